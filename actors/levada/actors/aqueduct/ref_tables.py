"""The refs of one connection (`Refs`), and of one system in a fleet (`MemberRefs`): how they get into messages, and how they arrive.

* A ref is copied into a message, never moved. Each copy brings a channel of envelopes to the owner's side. If this side already has a
  ref of the actor, the copy arrives as that ref, and its channel ends unused. So two refs of one connection are equal if and only if
  they refer to the same actor.
* Between members of a fleet (`levada.actors.aqueduct.fleet`) a ref of an actor in a third system arrives too, without a channel.
"""

from __future__ import annotations

import hmac
import logging
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from levada.framework import ActorSystem, Reason, Ref
from levada.framework.codec import AttachmentKind
from levada.framework.embedding import LocalRef, dead_ref
from levada.framework.errors import ChannelError, HandleNotForwardable
from levada.transports.aqueduct import Attach

from . import envelopes
from .envelopes import ID_SIZE, ActorIdentity
from .exports import Export
from .halves import Halves, Packing
from .name_lookup import Claim
from .oneshots import Awaited, Promise
from .raw import RawMessage
from .referring import Referring
from .refs import RefState, RemoteRef, remote_ref

__all__ = ["MemberRefs", "Refs"]

logger = logging.getLogger("levada.actors.aqueduct")

_CLAIMABLE = (RefState.UNCLAIMED, RefState.CLAIMING)


class MemberRefs(ABC):
    """The refs of one system that belong to a fleet: `levada.actors.aqueduct.fleet.FleetRefs`."""

    def __init__(self, system: ActorSystem, node_id: bytes) -> None:
        self.system = system
        self.node_id = node_id
        """The id of this node."""
        self.refs: weakref.WeakValueDictionary[tuple[bytes, bytes, int], RemoteRef] = weakref.WeakValueDictionary()
        """The refs of other members, by `ActorIdentity.address`."""
        self.names: dict[bytes, str] = {}
        """The members that live, and their names."""
        self.over: OrderedDict[bytes, Reason] = OrderedDict()
        """The last members that have ended, and why."""
        self._exported: weakref.WeakValueDictionary[int, LocalRef] = weakref.WeakValueDictionary()
        self._keys: weakref.WeakKeyDictionary[LocalRef, bytes] = weakref.WeakKeyDictionary()

    def name_of(self, node_id: bytes) -> str:
        """Return the name of a node, or the begin of its id."""
        return self.names.get(node_id) or node_id.hex()[:8]

    def export(self, cell: LocalRef) -> bytes:
        """Return the key of an actor here, whose ref is about to travel."""
        key = self._keys.get(cell)
        if key is None:
            key = self._keys[cell] = self.system.platform.token_bytes(ID_SIZE)
            self._exported[cell.incarnation] = cell
        return key

    def find(self, incarnation: int, key: bytes) -> LocalRef | None:
        """Return the actor here with this number, if the key is its key."""
        cell = self._exported.get(incarnation)
        return cell if cell is not None and hmac.compare_digest(self._keys[cell], key) else None

    def third(self, identity: ActorIdentity) -> Ref[Any]:
        """Return the ref that a peer has forwarded: the actor itself if it lives here, the ref that is there already, or a new one."""
        if identity.node == self.node_id:
            # An unknown key is of an actor that has ended, or is made up; both give a dead ref.
            return self.find(identity.incarnation, identity.key) or dead_ref(self.system, identity.incarnation)
        ref = self.refs.get(identity.address)
        if ref is None or ref.state is RefState.LOST:
            ref = self.refs[identity.address] = remote_ref(self.system, identity, self)
            over = self.over.get(identity.node)
            if over is not None:
                ref.lose(over)
        return ref

    @abstractmethod
    def claim(self, ref: RemoteRef) -> None:
        """Claim a ref in the background; it is opened or lost, later than in this call."""


class Refs(Referring):
    """The refs that have travelled over one connection, in both directions."""

    def __init__(self, halves: Halves, system: ActorSystem) -> None:
        super().__init__(halves)
        self.system = system
        self._exported: weakref.WeakValueDictionary[int, LocalRef] = weakref.WeakValueDictionary()
        """Actors of this side whose refs the peer has had, living ones, and dead ones that are still held here."""
        self._remote: weakref.WeakValueDictionary[int, RemoteRef] = weakref.WeakValueDictionary()
        self.fleet: MemberRefs | None = None
        """The refs of the fleet, if the peer is a member too."""
        self.node = b""
        """Node id of the peer, if it is a member."""

    def join(self, fleet: MemberRefs, node: bytes) -> None:
        """Record that the peer is a member of the fleet."""
        self.fleet, self.node = fleet, node

    @property
    def takes_work(self) -> bool:
        """Whether the peer understands `envelopes.WORK`."""
        return envelopes.WORK_GREETING in (self.halves.core.peer_headers or ())

    @property
    def numbers_questions(self) -> bool:
        """Whether the peer understands `envelopes.ASK_FIRST`, and there is room: less than half of the channels are in use."""
        core = self.halves.core
        return core.has_room(core.config.max_channels // 2 + 2) and envelopes.ANSWERS_GREETING in (
            core.peer_headers or ()
        )

    def attach(self, handle: Any, packing: Packing) -> tuple[AttachmentKind, int] | tuple[AttachmentKind, int, bytes]:
        """Put a ref, or a oneshot of one, into a message.

        Raises:
            HandleNotForwardable: the handle is a ref of a third system and the peer is no member of its fleet, or the handle cannot travel
                at all.
        """
        if packing.channel is not None and packing.channel.item_type is RawMessage:
            raise HandleNotForwardable(f"{handle!r} cannot travel in a RawMessage; send a Sender")
        if isinstance(handle, LocalRef):
            self._exported[handle.incarnation] = handle
            key = b"" if self.fleet is None else self.fleet.export(handle)
            note = ActorIdentity(handle.incarnation, handle.path, key=key).encode()
            return AttachmentKind.REF, packing.take(Export(self.halves, handle), Attach.SENDER), note
        if isinstance(handle, RemoteRef):
            if handle.refs is self:
                return AttachmentKind.RETURNED_REF, handle.incarnation
            return self._forward(handle)
        if isinstance(handle, Awaited):
            return AttachmentKind.ONESHOT_SENDER, packing.take(handle, Attach.ONESHOT_SENDER)
        if isinstance(handle, Promise):
            return AttachmentKind.ONESHOT_RECEIVER, packing.take(handle, Attach.ONESHOT_RECEIVER)
        raise HandleNotForwardable(
            f"a {type(handle).__name__} cannot travel in a message; send a Sender that leads to it, or the Ref of an actor"
        )

    def _forward(self, ref: RemoteRef) -> tuple[AttachmentKind, int, bytes]:
        """Put a ref of a third system into a message.

        Raises:
            HandleNotForwardable: the ref is of no fleet, or the peer is no member of it.
        """
        if self.fleet is not None and ref.fleet is self.fleet:
            return AttachmentKind.THIRD_REF, ref.incarnation, ref.identity.encode_third()
        if ref.fleet is None:
            why = "came over another connection and cannot be forwarded"
        else:
            why = f"cannot leave its fleet, and {self.peer} is no member of it"
        raise HandleNotForwardable(f"{ref!r} {why}; send a ref of an actor here that passes messages on")

    def arrived(self, half: Any, note: bytes) -> RemoteRef:
        """Return the ref that came with a message.

        Args:
            half: the sender's half of its channel.
            note: its encoded `ActorIdentity`.

        Raises:
            DecodeError: the note is malformed.
        """
        identity = ActorIdentity.decode(note, self.node)
        fleet = self.fleet if identity.key else None
        refs: Any = self._remote if fleet is None else fleet.refs
        address: Hashable = identity.incarnation if fleet is None else identity.address
        ref: RemoteRef | None = refs.get(address)
        if ref is None or ref.state is RefState.LOST:
            refs[address] = ref = remote_ref(self.system, identity, fleet)
        if ref.state in _CLAIMABLE:
            ref.open(self, identity, half)
        else:
            half.finish()
            self.halves.flush_soon()
        return ref

    def unattached(self, number: int, kind: AttachmentKind, item: Any = None, note: bytes = b"") -> Ref[Any]:
        """Return the ref that came without a channel: of an actor of this side, or of a third member of the fleet.

        Raises:
            DecodeError: the note of a third ref is malformed.
            LookupError: the attachment is another handle, or the peer is no member of the fleet.
        """
        if kind is AttachmentKind.RETURNED_REF:
            cell = self._exported.get(number)
            # An unknown number is of an actor that has ended, or was never sent; both give a dead ref.
            return cell if cell is not None else dead_ref(self.system, number)
        if kind is not AttachmentKind.THIRD_REF:
            raise LookupError("the message has no attachments")
        if self.fleet is None:
            raise LookupError("a ref of a third system, and the peer is no member of a fleet")
        return self.fleet.third(ActorIdentity.decode_third(number, note))

    def answer(self, claim: Claim) -> None:
        """Answer the claim of a ref: with the actor, or None if the key is of no living actor here."""
        with claim.found as found:
            try:
                found.send(None if self.fleet is None else self.fleet.find(claim.incarnation, claim.key))
            except ChannelError as error:  # it was withdrawn, or there are too many channels
                logger.info("%s: a claim was not answered: %s", self.peer, error)
