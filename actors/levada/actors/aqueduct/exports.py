"""The owner's side of a ref that has travelled: envelopes from the peer become messages, questions and signals of the actor here.

* If the actor's mailbox is full, the message waits, and later ones stay in the channel, whose window closes. So senders at the peer wait
  for the actor, like senders here.
* A malformed envelope ends the channel. If the message in an envelope cannot be decoded, only that message is lost; an asker gets an error.
* The channel outlives the actor: a message to an ended actor is a dead letter, and a question to it fails with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs
import trio

from levada.framework.codec import AttachmentKind
from levada.framework.embedding import LARGE, Ask, LocalRef, RemoteAsk, RemoteTell, let_others_run
from levada.framework.errors import ActorError, ActorStopped, DecodeError, LevadaError
from levada.framework.message import Asks, reply_type
from levada.transports.aqueduct import Delivery, ReceiverHalf, SenderHalf
from levada.transports.text import printable

from . import envelopes
from .halves import Referring, open_delivery, read_unreadable
from .links import HalfActor
from .oneshots import Promise

__all__ = ["Export", "answer_type"]

logger = logging.getLogger("levada.actors.aqueduct")


class Export(HalfActor):
    """Receives the envelopes of one copy of a ref."""

    target: LocalRef
    """The actor that the ref is of."""
    _held: Any = attrs.field(default=None, init=False)
    """A message or a question that did not fit into the mailbox."""
    _waiting: bool = attrs.field(default=False, init=False)
    """Whether the mailbox will call when it has room, or has ended."""
    _forget: Callable[[], None] = attrs.field(init=False)
    _busy: bool = attrs.field(default=False, init=False)
    _pausing: bool = attrs.field(default=False, init=False)
    """Whether it waits until other tasks have run for as long as a large message took."""

    # `levada.actors.aqueduct.halves.Passenger`

    def bound(self, half: Any) -> Export:
        """Go on over this half, since the message has left."""
        self.half = half
        self.halves.inbound[half] = self
        self.halves.core.background.add(half)
        return self

    def forget(self) -> None:
        """Do nothing: the message will never leave."""

    def give_back(self) -> None:
        """Do nothing: the message could not be encoded."""

    # `levada.actors.aqueduct.halves.Record`

    def start(self) -> None:
        """Begin; the message with the half has been sent."""
        if self.half.ended:
            self.ended()
        else:
            self.begin()
            self.pump()

    def ended(self) -> None:
        """End after the peer has dropped the ref, or is lost; envelopes that have arrived are still handled."""
        self.halves.inbound.pop(self.half, None)
        self.halves.core.background.discard(self.half)
        self.pump()
        self.retire()

    def give_up(self, detail: str) -> None:
        """Close the half."""
        self.half.close()
        self.halves.flush_soon()

    def pump(self) -> None:
        """Deliver the envelopes that have arrived."""
        if self._busy or self._waiting:
            return
        self._busy = True
        half, halves = self.half, self.halves
        try:
            while not (self._waiting or self._pausing) and half.mailbox:
                delivery = half.take()
                halves.received += 1
                began = trio.current_time() if len(delivery.payload) > LARGE else 0.0
                try:
                    self._open(delivery)
                except DecodeError as error:
                    told = read_unreadable(halves, delivery.payload)
                    cause = error if told is None else f"the message with the ref was not read: {told.cause}"
                    logger.warning("%s: an envelope for %s: %s", halves.peer, self.target.path, printable(str(cause)))
                    delivery.discard()
                    half.close()
                if began:
                    self._pausing = True
                    trio.lowlevel.spawn_system_task(self._pause, trio.current_time() - began)
        finally:
            self._busy = False
        halves.flush_soon()

    async def _pause(self, seconds: float) -> None:
        await let_others_run(seconds)
        self._pausing = False
        self.pump()

    def _open(self, delivery: Delivery) -> None:
        """Handle one envelope.

        Raises:
            DecodeError: it is malformed.
        """
        head = envelopes.head_of(delivery.payload)
        if head is envelopes.TELL:
            self._tell(delivery)
        elif head is envelopes.ASK:
            self._ask(delivery, self._oneshot(delivery))
        elif head is envelopes.WATCH:
            if delivery.payload != head or len(delivery.attachments) != 1:
                raise DecodeError("a watch with more than its oneshot")
            self._watch(self._oneshot(delivery))
        else:
            self._link(delivery)

    def _oneshot(self, delivery: Delivery) -> SenderHalf:
        half = delivery.attachments[0] if delivery.attachments else None
        if not isinstance(half, SenderHalf) or not half.oneshot:
            raise DecodeError("an envelope without the oneshot that belongs to it")
        return half

    def _tell(self, delivery: Delivery) -> None:
        refs = self.halves.refs
        payload = delivery.payload[len(envelopes.TELL) :]
        try:
            if delivery.attachments:
                message, _ = open_delivery(refs.halves, delivery, payload, Any)
            else:
                message = refs.halves.codec.decode(payload, detach=refs.unattached)
        except LevadaError as error:
            logger.warning("%s: a message for %s cannot be decoded: %s", refs.peer, self.target.path, error)
        else:
            self._put(RemoteTell(message, refs.halves.remote))

    def _ask(self, delivery: Delivery, half: SenderHalf) -> None:
        refs = self.halves.refs
        question = Question(refs, self.target, half)
        try:
            question.message, _ = open_delivery(
                refs.halves, delivery, delivery.payload[len(envelopes.ASK) :], Any, first=1
            )
        except LevadaError as error:
            question.fail(ActorError(f"the question cannot be decoded: {error}", actor=self.target.path))
        else:
            self._put(question)

    def _watch(self, half: SenderHalf) -> None:
        cell, halves = self.target, self.halves
        promise = Promise(halves, lambda: cell.forget_watcher(promise), idle=True)
        halves.start(promise.bound(half))
        cell.add_watcher(promise, lambda reason: promise.send(envelopes.encode_signal(envelopes.DOWN, reason)))

    def _link(self, delivery: Delivery) -> None:
        """Link the actor here to the actor there that asks for it, if it accepts such links.

        Raises:
            DecodeError: it is malformed.
        """
        refs = self.halves.refs
        attachments = delivery.attachments
        wanted = (AttachmentKind.REF, AttachmentKind.ONESHOT_SENDER, AttachmentKind.ONESHOT_RECEIVER)
        notes: list[bytes] = []

        def detach(number: int, kind: AttachmentKind, item: Any, note: bytes = b"") -> AttachmentKind:
            if number != wanted.index(kind):
                raise ValueError("it is in another's place")
            notes.append(note)
            return kind

        if refs.codec.decode(delivery.payload, detach=detach) != [envelopes.LINK[1], *wanted] or len(attachments) != 3:
            raise DecodeError("a link that lacks something, or has too much")
        source, ours, theirs = attachments
        if not (
            isinstance(source, SenderHalf)
            and not source.oneshot
            and isinstance(ours, SenderHalf)
            and ours.oneshot
            and isinstance(theirs, ReceiverHalf)
            and theirs.oneshot
        ):
            raise DecodeError("a link with other channels than its own")
        refs.arrived(source, notes[0]).link_here(refs, self.target, ours, theirs)

    def _put(self, entry: Any) -> None:
        """Put a message or a question into the mailbox, or hold it until there is room."""
        cell = self.target
        try:
            if not cell.try_tell(entry):
                self._held, self._waiting = entry, True
                self._forget = cell.on_stopped(self._room)
                cell.on_room(self._room)
        except ActorStopped:
            cell.tell(entry)  # a dead letter, or an error for the asker
        except Exception:
            # The key function of a conflating mailbox is the user's code; the peer is not at fault.
            logger.exception("%s: no key for a message from %s", cell.path, self.halves.peer)
            if isinstance(entry, Ask):
                entry.fail(ActorError(f"{cell.path} has no key for this question", actor=cell.path))
            else:
                cell.system.dead_letter(entry, cell, "no key")

    def _room(self) -> None:
        if self._waiting:
            entry, self._held, self._waiting = self._held, None, False
            self._forget()
            self._put(entry)
            self.pump()


class Question(RemoteAsk):
    """A question from the peer, answered on its oneshot."""

    __slots__ = ("_promise", "_refs")

    def __init__(self, refs: Referring, cell: LocalRef, half: SenderHalf) -> None:
        super().__init__(None, cell, refs.halves.remote)
        self._refs = refs
        self._promise = Promise(refs.halves, self.withdraw)
        refs.halves.start(self._promise.bound(half))

    def _settle(self, value: Any, error: BaseException | None) -> None:
        super()._settle(value, error)
        promise, refs = self._promise, self._refs
        if error is None:
            expected = answer_type(self.message)
            refs.halves.packing.channel = refs.answers
            try:
                promise.send(envelopes.ANSWER + refs.codec.encode(value, expected, attachments=refs.halves.packing))
            except Exception as broken:
                logger.exception("%s: an answer cannot travel", self.target.path)
                kind = type(self.message).__name__
                error = ActorError(f"the answer to {kind} cannot travel: {broken}", actor=self.target.path)
        if error is not None:
            promise.send(envelopes.encode_failure(error))


def answer_type(question: Any) -> Any:
    """Return the type of the answer to a question; `Any` if its class does not declare one."""
    kind = type(question)
    return reply_type(kind) if issubclass(kind, Asks) else Any
