"""Refs of actors in another system: the refs that a program holds (`RemoteRef`), and the refs of one connection (`Refs`).

* A ref is copied into a message, never moved. Each copy brings a channel of envelopes to the owner's side. If this side already has a
  ref of the actor, the copy arrives as that ref, and its channel ends unused. So two refs of one connection are equal if and only if
  they refer to the same actor.
* Messages and questions go over the ref's channel, in order. Answers and ends come back on oneshots of their own, so they never wait
  behind messages, and a lost connection ends each of them.
* A ref without holders finishes its channel; messages sent on it still arrive.
* The end of an actor is known here if the actor was watched, or was sent a message, and its notice has come. The end of the connection
  ends all its refs, for the reason `Lost`.

`levada.actors.aqueduct.exports` is the owner's side, and `levada.actors.aqueduct.envelopes` has the wire format.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import attrs
import trio

from levada.framework import ActorSystem, Failed, Lost, Reason, Ref
from levada.framework.channel import WINDOW
from levada.framework.codec import AttachmentKind
from levada.framework.embedding import Ask, ChannelCore, LocalRef, TerminalState, ThreadAsk, dead_ref, stopped_error
from levada.framework.errors import ActorError, DecodeError, HandleNotForwardable, LevadaError, MailboxFull, NoValue
from levada.framework.ref import DEFAULT_TIMEOUT, FromThread
from levada.transports.aqueduct import Attach, Delivery, ReceiverHalf, SenderHalf

from . import envelopes
from .envelopes import Identity
from .exports import Export, answer_type
from .halves import Halves, Outbound, Packing, open_delivery
from .oneshots import Awaited, Promise
from .raw import RawMessage

__all__ = ["Refs", "RemoteRef", "Tie"]

logger = logging.getLogger("levada.actors.aqueduct")

_LOST = (TerminalState.LOST, TerminalState.CONNECTION_LOST)


class Refs:
    """The refs that have travelled over one connection, in both directions."""

    def __init__(self, halves: Halves, system: ActorSystem) -> None:
        self.halves = halves
        self.system = system
        # An envelope has a few bytes before its message.
        self.codec = attrs.evolve(halves.codec, max_bytes=max(1, halves.codec.max_bytes - 16))
        self._exported: weakref.WeakValueDictionary[int, LocalRef] = weakref.WeakValueDictionary()
        """Actors of this side whose refs the peer has had, living ones, and dead ones that are still held here."""
        self.answers = ChannelCore(Any, 1, "for an answer")
        """The channel that errors name for handles in answers."""
        self._remote: weakref.WeakValueDictionary[int, RemoteRef] = weakref.WeakValueDictionary()
        self._peer = ""

    @property
    def peer(self) -> str:
        """Name of the peer."""
        return self._peer or self.halves.peer

    def release(self) -> None:
        """Drop the connection's halves, since its actor has ended and they may hold this object."""
        self._peer = self.halves.peer
        self.halves = weakref.proxy(self.halves)

    def attach(self, handle: Any, packing: Packing) -> tuple[AttachmentKind, int] | tuple[AttachmentKind, int, bytes]:
        """Put a ref, or a oneshot of one, into a message.

        Raises:
            HandleNotForwardable: the handle is a ref of a third system, or cannot travel at all.
        """
        if packing.channel is not None and packing.channel.item_type is RawMessage:
            raise HandleNotForwardable(f"{handle!r} cannot travel in a RawMessage; send a Sender")
        if isinstance(handle, LocalRef):
            self._exported[handle.incarnation] = handle
            note = Identity(handle.incarnation, handle.path).encode()
            return AttachmentKind.REF, packing.take(Export(self.halves, handle), Attach.SENDER), note
        if isinstance(handle, RemoteRef):
            if handle.refs is self:
                return AttachmentKind.RETURNED_REF, handle.incarnation
            raise HandleNotForwardable(
                f"{handle!r} came over another connection and cannot be forwarded; send a ref of an actor here that passes messages on"
            )
        if isinstance(handle, Awaited):
            return AttachmentKind.ONESHOT_SENDER, packing.take(handle, Attach.ONESHOT_SENDER)
        if isinstance(handle, Promise):
            return AttachmentKind.ONESHOT_RECEIVER, packing.take(handle, Attach.ONESHOT_RECEIVER)
        raise HandleNotForwardable(
            f"a {type(handle).__name__} cannot travel in a message; send a Sender that leads to it, or the Ref of an actor"
        )

    def arrived(self, half: Any, note: bytes) -> RemoteRef:
        """Return the ref that came with a message.

        Args:
            half: the sender's half of its channel.
            note: its encoded `Identity`.

        Raises:
            DecodeError: the note is malformed.
        """
        identity = Identity.decode(note)
        known = self._remote.get(identity.incarnation)
        if known is not None and not known.is_lost:
            half.finish()
            self.halves.flush_soon()
            return known
        ref = self._remote[identity.incarnation] = RemoteRef(self, identity, half)
        return ref

    def returned(self, number: int, kind: AttachmentKind, item: Any = None, note: bytes = b"") -> Ref[Any]:
        """Return the actor of this side whose ref has returned.

        Raises:
            LookupError: the attachment is not a returned ref.
        """
        if kind is not AttachmentKind.RETURNED_REF:
            raise LookupError("the message has no attachments")
        cell = self._exported.get(number)
        # An unknown number is of an actor that has ended, or was never sent; both give a dead ref.
        return cell if cell is not None else dead_ref(self.system, number)


class Signal:
    """An entry of a ref's channel that is not a plain message."""

    __slots__ = ()

    @property
    def wanted(self) -> bool:
        """Whether it still needs to be sent."""
        return True

    def encode(self, refs: Refs, packing: Packing) -> bytes:
        """Return the bytes, and put attached handles into the packing."""
        raise NotImplementedError

    def failed(self, error: BaseException | None) -> None:
        """Handle an error of a later send; the error is ``None`` if the ref has ended."""
        raise NotImplementedError


class _Later(Signal):
    """A message that waits for room, from a sender that cannot wait."""

    __slots__ = ("message", "ref")

    def __init__(self, ref: RemoteRef, message: Any) -> None:
        self.ref = ref
        self.message = message

    def encode(self, refs: Refs, packing: Packing) -> bytes:
        return envelopes.TELL + refs.codec.encode(self.message, attachments=packing)

    def failed(self, error: BaseException | None) -> None:
        if error is not None:
            logger.error("%r: a message cannot travel", self.ref, exc_info=error)
        self.ref.system.dead_letter(self.message, self.ref, "stopped")


class _RefOutbound(Outbound):
    """Stands in for the owner at the end of a ref's channel."""

    def _encode(self, entry: Any) -> bytes:
        refs, packing = self.halves.refs, self.halves.packing
        packing.channel = self.channel
        if isinstance(entry, Signal):
            return entry.encode(refs, packing)
        return envelopes.TELL + refs.codec.encode(entry, attachments=packing)

    def ended(self) -> None:
        self.halves.core.background.discard(self.half)
        super().ended()


class Asking(Signal):
    """A question on its way, and the oneshot for its answer."""

    __slots__ = ("answer", "question", "ref")

    def __init__(self, ref: RemoteRef, question: Ask) -> None:
        self.ref = ref
        self.question = question
        self.answer = Awaited(ref.refs.halves, self._answered, self._over)

    @property
    def wanted(self) -> bool:
        return not self.question.settled

    def encode(self, refs: Refs, packing: Packing) -> bytes:
        packing.take(self.answer, Attach.ONESHOT_SENDER)
        return envelopes.ASK + refs.codec.encode(self.question.message, attachments=packing)

    def failed(self, error: BaseException | None) -> None:
        self.question.fail(error or self.ref.stopped(self.question.message))

    def withdraw(self) -> None:
        """Stop waiting for the answer, and tell the owner's side."""
        self.answer.close()

    def _answered(self, delivery: Delivery) -> None:
        question, halves, payload = self.question, self.ref.refs.halves, delivery.payload
        if question.settled:  # withdrawn in the turn when the answer came: its handles are given up
            delivery.discard()
            return
        try:
            if payload.startswith(envelopes.ANSWER):
                expected = answer_type(question.message)
                value, _ = open_delivery(halves, delivery, payload[len(envelopes.ANSWER) :], expected)
                question.answer(value)
            else:
                error = envelopes.error_from(payload, self.ref.path, question.message)
                delivery.discard()
                question.fail(error)
        except LevadaError as error:
            if not payload.startswith(envelopes.ANSWER):
                delivery.discard()
            question.fail(error)

    def _over(self, state: TerminalState) -> None:
        message = self.question.message
        if state in _LOST:
            self.question.fail(stopped_error(self.ref, Lost(self.ref.refs.peer), message))  # type: ignore[arg-type]
        else:
            self.question.fail(NoValue(f"the answer to {type(message).__name__} was given up"))


class _Watching(Signal):
    """A request for notice of the actor's end."""

    __slots__ = ("down", "ref")

    def __init__(self, ref: RemoteRef) -> None:
        # Weak: a request for notice does not keep the ref alive, the watchers do.
        self.ref = weakref.ref(ref)
        self.down = Awaited(ref.refs.halves, self._down, self._over, idle=True)

    def encode(self, refs: Refs, packing: Packing) -> bytes:
        packing.take(self.down, Attach.ONESHOT_SENDER)
        return envelopes.WATCH

    def failed(self, error: BaseException | None) -> None:
        self._over(TerminalState.LOST)

    def _down(self, delivery: Delivery) -> None:
        ref = self.ref()
        delivery.discard()
        if ref is not None:
            try:
                reason = envelopes.read_signal(envelopes.DOWN, delivery.payload, ref.path)
            except DecodeError as error:
                logger.warning("%r: %s", ref, error)
                ref.lose()
            else:
                ref.end(reason)

    def _over(self, state: TerminalState) -> None:
        ref = self.ref()
        if ref is not None:
            ref.lose()


class Tie(Signal):
    """One side's record of a link between an actor here and one there.

    Each side reports the end of its actor, with the reason, on a oneshot. A oneshot that ends without a value unlinks.
    """

    __slots__ = ("cell", "ours", "ref", "theirs")

    def __init__(self, ref: RemoteRef, cell: LocalRef) -> None:
        halves = ref.refs.halves
        self.ref = ref
        self.cell = cell
        self.ours = Promise(halves, self._unheard, idle=True)
        """Tells the peer of the end of the actor here."""
        self.theirs = Awaited(halves, self._exited, self._untied, idle=True)
        """Tells this side of the end of the actor there."""

    def encode(self, refs: Refs, packing: Packing) -> bytes:
        """Return the bytes, and put attached handles into the packing."""
        return refs.codec.encode([envelopes.LINK[1], self.cell, self.theirs, self.ours], attachments=packing)

    def failed(self, error: BaseException | None) -> None:
        """End the link, which cannot be requested any more."""
        self.end(Failed(error) if error is not None else self.ref.reason)

    def tell_exit(self, reason: Reason) -> None:
        """Tell the peer that the actor here has ended."""
        self.ours.send(envelopes.encode_signal(envelopes.EXIT, reason))
        self.theirs.close()

    def cut(self) -> None:
        """Unlink, from this side."""
        self.ours.finish()
        self.theirs.close()

    def end(self, reason: Reason) -> None:
        """End the link: the actor there has ended, or is out of reach."""
        self.cut()
        self.ref.forget_tie(self)
        self.cell.exited(self.ref, reason)

    def _exited(self, delivery: Delivery) -> None:
        delivery.discard()
        try:
            self.end(envelopes.read_signal(envelopes.EXIT, delivery.payload, self.ref.path))
        except DecodeError as error:
            logger.warning("%r: %s", self.ref, error)
            self.end(Lost(self.ref.refs.peer))

    def _untied(self, state: TerminalState) -> None:
        if state is TerminalState.FINISHED:  # the actor there has unlinked
            self.ours.finish()
            if self.ref.forget_tie(self):
                self.cell.untie(self.ref)
        else:
            self.end(Lost(self.ref.refs.peer))

    def _unheard(self) -> None:
        """Do nothing: the peer also reports the end of its side on its own oneshot."""


class RemoteRef(Ref[Any]):
    """A ref of an actor in another system; refs in messages arrive as this."""

    __slots__ = (
        "__weakref__", "_channel", "_identity", "_reason", "_standing", "_ties", "_watchers", "_watching", "is_lost", "refs",
    )  # fmt: skip

    def __init__(self, refs: Refs, identity: Identity, half: Any) -> None:
        self.refs = refs
        self._identity = identity
        self._reason: Reason | None = None
        self.is_lost = False
        """Whether the ref ended because the actor is out of reach, not because it ended."""
        self._standing: set[Signal] = set()
        """The signals that wait for room."""
        self._ties: dict[LocalRef, list[Tie]] = {}
        self._watchers: dict[Hashable, Callable[[Reason], None]] = {}
        self._watching: _Watching | None = None
        self._channel = ChannelCore(Any, WINDOW, f"ref {identity.path}")
        self._channel.receiver.away = 1
        this = weakref.ref(self)

        def channel_ended() -> None:
            ref = this()
            if ref is not None:
                ref.lose()

        self._channel.sender.on_terminated(channel_ended)
        refs.halves.core.background.add(half)
        refs.halves.start(_RefOutbound(refs.halves, self._channel, half=half))

    @property
    def path(self) -> str:
        """The path of the actor in its own system."""
        return self._identity.path

    @property
    def where(self) -> str:
        """The path and the peer, for texts of errors."""
        return f"{self.path} at {self.refs.peer}"

    @property
    def incarnation(self) -> int:
        """The number of the actor in its own system."""
        return self._identity.incarnation

    @property
    def is_alive(self) -> bool:
        """Whether the actor has not ended, as far as this side knows. It learns of the end late, or never without a watcher."""
        return self._reason is None

    def tell(self, message: Any) -> None:
        """Send a message to the actor without waiting.

        Raises:
            MailboxFull: the window of the channel to its system is full: the actor, or the network, is slower than its senders.
            TypeError, ValueError, LevadaError: the message cannot travel; its handles still belong to this side.
        """
        if self._reason is None and self._channel.accept(message):
            return
        if self._reason is not None:
            self.system.dead_letter(message, self, "stopped")
            return
        window = self._channel.window
        raise MailboxFull(
            f"{window} messages are on their way to {self.where}; send() waits for room",
            actor=self.path,
            capacity=window,
            message=message,
        )

    async def send(self, message: Any) -> None:
        """Send a message; wait while the window of the channel to the actor's system is full.

        Raises:
            TypeError, ValueError, LevadaError: the message cannot travel; its handles still belong to this side.
        """
        await self.system.scheduler.checkpoint_if_slice_over()
        if self._reason is None:
            self._watch_end()
            if self._channel.accept(message):
                return
            # A lost connection settles the messages under way before the channel ends, and so makes room.
            if await self._channel.wait_to_put(self, message) and not self.is_lost:
                return
        raise self.stopped(message)

    async def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        """Ask the actor and wait for its answer. A circle of asks over two systems is not detected: it ends by its timeouts.

        Raises:
            TypeError, ValueError, LevadaError: the question cannot travel; its handles still belong to this side.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._reason is not None:
            raise self.stopped(message)
        asking = Asking(self, Ask(message, self))  # type: ignore[arg-type]
        self._post(asking)
        try:
            asking.question.start_timer(timeout)
            return await asking.question.wait()
        finally:
            asking.withdraw()

    def stop(self, *, now: bool = False) -> None:
        """Refuse: only an actor's own system stops it.

        Raises:
            ActorError: always.
        """
        self._refuse("stopped")

    def kill(self) -> None:
        """Refuse: only an actor's own system kills it.

        Raises:
            ActorError: always.
        """
        self._refuse("killed")

    async def terminated(self) -> Reason:
        """Wait for the end of the actor and return the reason."""
        ended = trio.Event()
        key = object()
        self.add_watcher(key, lambda _: ended.set())
        try:
            await ended.wait()
        finally:
            self.forget_watcher(key)
        assert self._reason is not None
        return self._reason

    @property
    def from_thread(self) -> FromThread[Any]:
        """The calls for other threads."""
        return _RemoteFromThread(self)

    def on_stopped(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call a function when the actor has ended; the returned function cancels that."""
        key = object()
        self.add_watcher(key, lambda _: callback())
        return lambda: self.forget_watcher(key)

    def __repr__(self) -> str:
        return f"<Ref {self.path}#{self.incarnation} at {self.refs.peer}>"

    def __del__(self) -> None:
        channel = self._channel
        if channel.sender.state is TerminalState.OPEN:
            # Collection may happen in any thread and at any moment.
            channel.end_soon(_release, channel, self._watching)

    @property
    def system(self) -> ActorSystem:
        """The system on this side."""
        return self.refs.system

    @property
    def line(self) -> Any:
        """The senders that wait for room in the channel."""
        return self._channel.putters

    def depth(self) -> int:
        """Messages on their way, or waiting for room."""
        return len(self._channel.queue) + len(self._channel.putters)

    def enqueue(self, message: Any, *, patient: bool = False) -> None:
        """Send a message or a question now, or when there is room; for callers that cannot wait: routers and threads."""
        if not isinstance(message, Ask):
            later = _Later(self, message)
            if self._reason is None:
                self._try_post(later)
            else:
                later.failed(None)
        elif self._reason is None:
            asking = Asking(self, message)
            if isinstance(message, _ThreadQuestion):
                message.asking = asking
            self._try_post(asking)
        else:
            message.fail(self.stopped(message.message))

    def add_watcher(self, key: Hashable, ended: Callable[[Reason], None]) -> None:
        """Call `ended` with the reason when the actor has ended, or is out of reach."""
        if self._reason is not None:
            ended(self._reason)
            return
        self._watch_end()
        self._watchers[key] = ended

    def forget_watcher(self, key: Hashable) -> None:
        """Remove a watcher; the owner is told when the last one goes."""
        if self._watchers.pop(key, None) is not None and not self._watchers and self._watching is not None:
            watching, self._watching = self._watching, None
            self._standing.discard(watching)
            watching.down.close()

    def tie(self, cell: LocalRef) -> None:
        """Link the actor there to one here."""
        if cell not in self._ties:
            tie = Tie(self, cell)
            self._post(tie)
            self._ties[cell] = [tie]

    def untie(self, cell: LocalRef) -> None:
        """Unlink the actor there from one here."""
        for tie in self._ties.pop(cell, ()):
            tie.cut()

    def exited(self, cell: LocalRef, reason: Reason) -> None:
        """Tell the actor there that a linked one here has ended."""
        for tie in self._ties.pop(cell, ()):
            tie.tell_exit(reason)

    def link_here(self, cell: LocalRef, ours: SenderHalf, theirs: ReceiverHalf) -> None:
        """Link an actor here to the actor there, which asks for it, if `cell` accepts such links.

        Args:
            cell: the actor here.
            ours: tells the peer of its end.
            theirs: tells this side of the end of the actor there.
        """
        halves, tie = self.refs.halves, Tie(self, cell)
        halves.start(tie.ours.bound(ours))
        if not cell.is_alive:
            tie.tell_exit(cell.reason)
        elif not cell.accepts_links:
            refusal = f"{cell.path} lets no actor of another system link to it (accept_remote_links)"
            tie.tell_exit(Failed(ActorError(refusal)))
        else:
            self._ties.setdefault(cell, []).append(tie)
            cell.tie(self)
        halves.start(tie.theirs.bound(theirs))

    def forget_tie(self, tie: Tie) -> bool:
        """Remove an ended link; return whether none is left with the actor here."""
        ties = self._ties.get(tie.cell, [])
        if tie in ties:
            ties.remove(tie)
        if not ties:
            self._ties.pop(tie.cell, None)
        return not ties

    @property
    def reason(self) -> Reason:
        """The reason why it has ended."""
        assert self._reason is not None
        return self._reason

    def stopped(self, message: Any) -> LevadaError:
        """Make the error for a message that will not be handled."""
        return stopped_error(self, self.reason, message)  # type: ignore[arg-type]

    def lose(self) -> None:
        """End for the reason `Lost`: the actor is out of reach."""
        if self._reason is None:
            self.is_lost = True
            self.end(Lost(self.refs.peer))

    def end(self, reason: Reason) -> None:
        """End: the actor has ended, or is out of reach."""
        if self._reason is not None:
            return
        self._reason = reason
        standing, self._standing = self._standing, set()
        for signal in standing:
            signal.failed(None)
        watchers, self._watchers = self._watchers, {}
        for ended in watchers.values():
            ended(reason)
        if self.is_lost:
            for tie in [tie for ties in self._ties.values() for tie in ties]:
                tie.end(reason)
        _release(self._channel, self._watching, self)

    def _post(self, signal: Signal) -> None:
        """Send a signal, or let it wait for room; raises the errors of `encode`."""
        if not self._channel.offer(signal, lambda: self._try_post(signal)):
            self._standing.add(signal)

    def _try_post(self, signal: Signal) -> None:
        """Send a signal like `_post`, and report an error by `Signal.failed`."""
        self._standing.discard(signal)
        if signal.wanted and self._reason is None:
            try:
                self._post(signal)
            except Exception as error:  # noqa: BLE001 - the sender must learn of any error
                signal.failed(error)

    def _watch_end(self) -> None:
        """Ask for notice of the actor's end, once."""
        if self._watching is None:
            watching = _Watching(self)
            self._post(watching)
            self._watching = watching

    def _refuse(self, done: str) -> NoReturn:
        raise ActorError(
            f"{self.path} lives at {self.refs.peer} and is {done} only by its own system; send it a message instead",
            actor=self.path,
        )


def _release(channel: ChannelCore, watching: _Watching | None, handle: object = None) -> None:
    """Finish the channel of a ref; queued messages still leave."""
    if watching is not None:
        watching.down.close()
    if channel.producers and channel.sender.state is TerminalState.OPEN:
        channel.finish_producer(handle)


class _ThreadQuestion(ThreadAsk):
    """A question of a thread; its withdrawal also tells the owner's side."""

    __slots__ = ("asking",)

    asking: Asking | None

    def withdraw(self) -> None:
        super().withdraw()
        asking = getattr(self, "asking", None)
        if asking is not None:
            asking.withdraw()


class _RemoteFromThread(FromThread[Any]):
    __slots__ = ("_ref",)

    def __init__(self, ref: RemoteRef) -> None:
        self._ref = ref

    def tell(self, message: Any) -> None:
        self._ref.system.inbox.put(self._ref, message)  # type: ignore[arg-type]

    def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        system = self._ref.system
        if system.inbox.is_home():
            raise RuntimeError("from_thread.ask() in the system's own thread would wait for ever; await ask() instead")
        question = _ThreadQuestion(message, self._ref)  # type: ignore[arg-type]
        system.inbox.put(self._ref, question)  # type: ignore[arg-type]
        return question.block(system.inbox, system.ask_timeout if timeout == DEFAULT_TIMEOUT else timeout)
