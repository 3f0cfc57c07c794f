"""The refs of a fleet: systems that know each other, so that refs travel between any of them.

* Each member has a *node id*, random for each start of its process. Both sides of a connection say theirs in the header `NODE`, and from
  then on each of them is a *node* to the other.
* Each actor whose ref has left its system has a random *key*. Whoever has the key may use the actor, so a key travels only inside of
  messages between members.
* A ref of a third member arrives as node id, key, incarnation and path. Its first use *claims* it: this side dials its node, shows the key,
  and gets a channel as with any ref (`levada.actors.aqueduct.ref_tables`). Refs with the same node id, key and incarnation are one object, so
  refs are equal however they came.
* A system claims only over connections that it has dialled itself, one for each node (`Link`). So two systems never need to agree which of
  two connections a ref rides on.

A program does not use this directly: `levada.actors.nodes` makes a `FleetRefs` for each member and tells it of the others.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from typing import Any, Final, TypeAlias

import attrs
import trio

from levada.framework import ActorSystem, Lost, Reason, Ref, oneshot
from levada.framework.durations import is_duration
from levada.framework.embedding import DescribedActor
from levada.framework.errors import ActorStopped, ConfigurationError, ConnectionLost, LevadaError
from levada.framework.text import printable
from levada.transports.aqueduct import Headers

from .envelopes import ID_SIZE
from .name_lookup import Claim
from .peer import Peer
from .ref_tables import MemberRefs
from .refs import RefState, RemoteRef

__all__ = ["NODE", "Dial", "FleetRefs"]

logger = logging.getLogger("levada.actors.aqueduct")

NODE: Final = "levada-node"
"""Connection header: the node id of this side, as 32 hex digits in lower case."""
CLAIMS: Final = 64
"""Claims under way on one connection; later ones wait."""
REMEMBERED: Final = 1000
"""Nodes that have ended and whose refs are lost at once; refs of older ones are lost when dialling fails."""

Dial: TypeAlias = Callable[[bytes], AbstractAsyncContextManager[Peer[Any]]]
"""Connects to the node with this id; leaving the context closes the connection, or gives it back.

Raises `LevadaError` or `OSError` if the node is unknown, has ended or cannot be reached.
"""


class FleetRefs(MemberRefs):
    """The refs of one system that belong to a fleet. One for each system; `PeerConfig.fleet` of all its connections to members.

    Args:
        system: has been entered.
        node_id: 16 random bytes, new for each start of the process.
        dial: connects to a member.
        dial_timeout: seconds until a node that is not known, or does not answer, is given up.
        claim_timeout: seconds until a claim without an answer is given up.
        idle: seconds after which a connection is closed that nothing uses.

    Raises:
        ValueError: the node id does not have 16 bytes.
    """

    def __init__(
        self,
        system: ActorSystem,
        node_id: bytes,
        dial: Dial,
        *,
        dial_timeout: float = 10.0,
        claim_timeout: float = 10.0,
        idle: float = 30.0,
    ) -> None:
        for name, seconds in (("dial_timeout", dial_timeout), ("claim_timeout", claim_timeout), ("idle", idle)):
            if not is_duration(seconds):
                raise ConfigurationError(f"{name} is {seconds!r}, wanted more than 0 seconds")
        if len(node_id) != ID_SIZE:
            raise ValueError(f"the node id has {len(node_id)} bytes, wanted {ID_SIZE}")
        super().__init__(system, node_id)
        self.dial = dial
        self.dial_timeout = dial_timeout
        self.claim_timeout = claim_timeout
        self.idle = idle
        self._news = trio.lowlevel.ParkingLot()
        """Woken when a member is known, or has ended."""
        self._links: dict[bytes, Link] = {}
        self._connections: dict[bytes, dict[object, Callable[[], None]]] = {}
        self._closed = False

    # ---------------------------------------------------------------- the directory

    def known(self, node_id: bytes, name: str = "") -> None:
        """Record that a node is a member, so that its refs can be claimed. A node that has ended stays so.

        Args:
            node_id: 16 bytes.
            name: its name, for texts.
        """
        if node_id not in self.over:
            self.names[node_id] = name or node_id.hex()[:8]
            self._news.unpark_all()

    def ended(self, node_id: bytes, reason: Reason) -> None:
        """Record that a node has ended: all its refs end at once, and its connections are cut.

        Args:
            node_id: 16 bytes.
            reason: why, for all who watch an actor of it.
        """
        self.names.pop(node_id, None)
        self.over[node_id] = reason
        if len(self.over) > REMEMBERED:
            self.over.popitem(last=False)
        # All refs are looked at, 0.1 µs each: nodes end seldom.
        for ref in [*self.refs.values()]:
            if ref.identity.node == node_id:
                ref.lose(reason)
        link = self._links.get(node_id)
        if link is not None:
            link.cut()
        for cut in [*self._connections.get(node_id, {}).values()]:
            cut()
        self._news.unpark_all()

    async def aclose(self) -> None:
        """Close the connections that were dialled for claims, and claim no more; refs over them are lost.

        Cancellation:
            they are closed all the same.
        """
        self._closed = True
        links = [*self._links.values()]
        for link in links:
            link.cut()
        for link in links:
            await link.ref.terminated()

    # ---------------------------------------------------------------- connections

    @property
    def header(self) -> tuple[str, bytes]:
        """The header that this side greets with."""
        return NODE, self.node_id.hex().encode()

    def admit(self, headers: Mapping[str, bytes]) -> bytes:
        """Return the node id in a peer's greeting; empty if the peer is no other member.

        Raises:
            ValueError: the header is malformed, or the node has ended.
        """
        value = headers.get(NODE)
        if value is None:
            return b""
        node_id = _read_id(value)
        if node_id in self.over:
            raise ValueError(f"the node {node_id.hex()[:8]} has ended, and its id is not used again")
        return b"" if node_id == self.node_id else node_id

    def connected(self, node_id: bytes, connection: object, cut: Callable[[], None]) -> None:
        """Record a connection to a member, which `cut` ends."""
        self._connections.setdefault(node_id, {})[connection] = cut

    def disconnected(self, node_id: bytes, connection: object) -> None:
        """Forget a connection."""
        connections = self._connections.get(node_id, {})
        connections.pop(connection, None)
        if not connections:
            self._connections.pop(node_id, None)

    # ---------------------------------------------------------------- actors of third members

    def claim(self, ref: RemoteRef) -> None:
        """Claim a ref in the background; it is opened or lost, later than in this call."""
        try:
            self._link_to(ref.identity.node).claim(ref)
        except ActorStopped:
            try:
                trio.lowlevel.current_trio_token().run_sync_soon(ref.lose)
            except RuntimeError:  # the run is over
                ref.lose()

    def _link_to(self, node_id: bytes) -> Link:
        """Return the link to a node; dial, if there is none.

        Raises:
            ActorStopped: this side is ending.
        """
        link = self._links.get(node_id)
        if link is None:
            if self._closed:
                raise ActorStopped("the refs of the fleet were closed", actor="", reason=Lost(""))
            link = Link(self, node_id)
            self.system.spawn(lambda: link)
            self._links[node_id] = link
        return link

    def forget(self, link: Link) -> None:
        """Use a link no more."""
        if self._links.get(link.node_id) is link:
            del self._links[link.node_id]

    async def met(self, node_id: bytes) -> None:
        """Wait until a node is known to be a member: a ref may be quicker than the news of its node.

        Raises:
            ConnectionLost: the node has ended.
        """
        while node_id not in self.names:
            if node_id in self.over:
                raise ConnectionLost(f"the node {self.name_of(node_id)} has ended")
            await self._news.park()


def _read_id(value: bytes) -> bytes:
    if len(value) != 2 * ID_SIZE or not set(value) <= set(b"0123456789abcdef"):
        raise ValueError(f"{NODE} is not {2 * ID_SIZE} hex digits")
    return bytes.fromhex(value.decode())


class LinkState(Enum):
    """The states of a `Link`."""

    DIALLING = auto()
    """Claims wait."""
    UP = auto()
    """Claims are made."""
    OVER = auto()
    """There are no more claims; the next one makes a new link."""


class Link(DescribedActor[Any]):
    """The connection that this side has dialled to one node. It makes claims, and ends when nothing uses it."""

    fleet: FleetRefs
    node_id: bytes
    state: LinkState = attrs.field(default=LinkState.DIALLING, init=False)

    def __attrs_post_init__(self) -> None:
        self._waiting: deque[RemoteRef] = deque()
        self._running = 0
        self._changed = trio.Event()
        self._scope = trio.CancelScope()

    @property
    def about(self) -> str:
        """The node."""
        return f"refs of {self.fleet.name_of(self.node_id)}"

    def claim(self, ref: RemoteRef) -> None:
        """Claim a ref when there is a connection. It stays alive until then, since messages wait in it."""
        self._waiting.append(ref)
        self._changed.set()

    def cut(self) -> None:
        """End the connection at once."""
        self._scope.cancel()

    def started(self) -> None:
        """Dial, in a task of this actor."""
        self.start_soon(self._run)

    def stopping(self, reason: Reason) -> None:
        """Lose what waits."""
        self._end()

    async def _run(self) -> None:
        fleet, name = self.fleet, self.fleet.name_of(self.node_id)
        try:
            with self._scope as scope:
                scope.deadline = trio.current_time() + fleet.dial_timeout
                await fleet.met(self.node_id)
                async with fleet.dial(self.node_id) as peer:
                    scope.deadline = math.inf
                    self._check(peer.headers)
                    self.state = LinkState.UP
                    await self._serve(peer)
            if scope.cancelled_caught and trio.current_time() >= scope.deadline:
                logger.warning("the node %s did not answer in %g s: its refs are lost", name, fleet.dial_timeout)
        except (LevadaError, OSError) as error:
            logger.warning("no connection to the node %s, its refs are lost: %s", name, printable(str(error)))
        finally:
            self._end()
        self.stop()

    def _check(self, headers: Headers) -> None:
        """Refuse any node but the one dialled.

        Raises:
            ConnectionLost: it is another one, or no node at all.
        """
        if dict(headers).get(NODE) != self.node_id.hex().encode():
            raise ConnectionLost("another system answers there")

    async def _serve(self, peer: Peer[Any]) -> None:
        """Make claims, until the connection has ended, or nothing has used it for a while."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_over, peer)
            while True:
                self._changed = trio.Event()
                while self._waiting and self._running < CLAIMS:
                    self._running += 1
                    nursery.start_soon(self._claim, peer, self._waiting.popleft())
                with trio.move_on_after(self.fleet.idle) as patience:
                    await self._changed.wait()
                # Of an idle connection only the entrypoint is left. Then no message is on its way that could bring a ref.
                if patience.cancelled_caught and not self._running and peer.statistics().channels <= 1:
                    break
            self._end()
            nursery.cancel_scope.cancel()

    async def _until_over(self, peer: Peer[Any]) -> None:
        await peer.terminated()
        self._scope.cancel()

    async def _claim(self, peer: Peer[Any], ref: RemoteRef) -> None:
        """Claim one ref. If the answer is its actor, it is open when the answer has been read."""
        identity = ref.identity
        item: Any = Ref[Any] | None
        try:
            if ref.state is RefState.CLAIMING:
                found, answer = oneshot(item, name=f"claim of {identity.path}")
                with trio.move_on_after(self.fleet.claim_timeout), answer, found:
                    await peer.send(Claim(identity.incarnation, identity.key, found))
                    await answer
        except LevadaError as error:
            logger.info("%r: the claim has failed: %s", ref, printable(str(error)))
        finally:
            if ref.state is RefState.CLAIMING:  # no answer, or the ref of no actor, or of another
                ref.lose()
            self._running -= 1
            self._changed.set()

    def _end(self) -> None:
        self.state = LinkState.OVER
        self.fleet.forget(self)
        while self._waiting:
            self._waiting.popleft().lose()
