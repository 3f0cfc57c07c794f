"""Refs of actors in another system, as a program holds them (`RemoteRef`). `levada.actors.aqueduct.ref_tables` has the refs of a connection.

* Messages and questions go over the ref's channel, in order. Answers and ends come back on oneshots of their own, so they never wait
  behind messages, and a lost connection ends each of them.
* A ref without holders finishes its channel; messages sent on it still arrive.
* The end of an actor is known here if the actor was watched, or was sent a message, and its notice has come. The end of the connection
  ends all its refs, for the reason `Lost`.
* A ref of an actor in a third system of a fleet has no channel at first. It is claimed from the owner when it is first used; until then its
  channel has no other end, and everything sent to it waits in the window.

`RefState` and `TRANSITIONS` have the states of a ref. `levada.actors.aqueduct.exports` is the owner's side,
`levada.actors.aqueduct.signals` has what travels beside plain messages, and `levada.actors.aqueduct.envelopes` the wire format.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs
import trio

from levada.framework import ActorSystem, Failed, Lost, Reason, Ref
from levada.framework.channel import WINDOW
from levada.framework.embedding import (
    BEFORE_ASKS,
    Ask,
    ChannelCore,
    LocalRef,
    Outcome,
    TerminalState,
    ThreadAsk,
    TracedAsk,
    TracedTell,
    UntracedMessage,
    prepare_to_ask,
    stopped_error,
)
from levada.framework.errors import ActorError, LevadaError, MailboxFull
from levada.framework.ref import DEFAULT_TIMEOUT, FromThread, check_timeout
from levada.framework.tracing import Tracing
from levada.transports.aqueduct import ReceiverHalf, SenderHalf

from . import envelopes
from .answers import FEW, Answers
from .envelopes import ActorIdentity
from .halves import MOST_WAITING, Outbound
from .referring import Referring
from .signals import Asking, Later, Sampling, Signal, Tie, Watching, WorkAsking, Working

if TYPE_CHECKING:
    from .ref_tables import MemberRefs, Refs

__all__ = ["TRANSITIONS", "RefChange", "RefState", "RemoteRef", "remote_ref"]

logger = logging.getLogger("levada.actors.aqueduct")


class RefState(Enum):
    """Whether a ref reaches its actor."""

    UNCLAIMED = auto()
    """It has no channel yet, and was never used."""
    CLAIMING = auto()
    """It was used and has no channel yet: messages wait here."""
    OPEN = auto()
    """It has a channel to the owner's side."""
    ENDED = auto()
    """The actor has ended."""
    LOST = auto()
    """The actor is out of reach."""


class RefChange(Enum):
    """What happens to a ref."""

    USE = auto()
    """A message, a question, a watch or a link is sent to it."""
    OPEN = auto()
    """A channel has come from the owner."""
    END = auto()
    """Notice of the actor's end has come."""
    LOSE = auto()
    """The claim has failed, or the channel, its connection or the owner's node has ended."""


TRANSITIONS: Final[Mapping[tuple[RefState, RefChange], RefState]] = {
    (RefState.UNCLAIMED, RefChange.USE): RefState.CLAIMING,
    (RefState.UNCLAIMED, RefChange.OPEN): RefState.OPEN,
    (RefState.UNCLAIMED, RefChange.LOSE): RefState.LOST,
    (RefState.CLAIMING, RefChange.OPEN): RefState.OPEN,
    (RefState.CLAIMING, RefChange.LOSE): RefState.LOST,
    (RefState.OPEN, RefChange.END): RefState.ENDED,
    (RefState.OPEN, RefChange.LOSE): RefState.LOST,
}
"""The next state of a ref. `RefState.ENDED` and `RefState.LOST` are final."""

# A member of an enum takes several times as long to look up as a name, and each message needs these.
_UNCLAIMED, _CLAIMING, _OPEN = RefState.UNCLAIMED, RefState.CLAIMING, RefState.OPEN


class _RefOutbound(Outbound):
    """Stands in for the owner at the end of a ref's channel."""

    begun: Callable[[], None] | None = attrs.field(default=None, kw_only=True)
    """Sends the messages that have waited for the channel."""

    def start(self) -> None:
        """Begin; the message with the half has been opened."""
        super().start()
        if self.begun is not None:
            self.begun()
            self.begun = None

    def _encode(self, message: Any) -> bytes:
        refs, packing = self.halves.refs, self.halves.packing
        packing.channel = self.channel
        if isinstance(message, Signal):
            return message.encode(refs, packing)
        return envelopes.TELL + refs.codec.encode(message, attachments=packing)

    def _context(self, entry: Any, tracing: Tracing) -> object:
        return entry.context if isinstance(entry, Signal) else None

    def ended(self) -> None:
        self.halves.core.background.discard(self.half)
        super().ended()


class RemoteRef(Ref[Any]):
    """A ref of an actor in another system; refs in messages arrive as this."""

    __slots__ = (
        "__weakref__", "_asked", "_channel", "_reason", "_standing", "_ties", "_watchers", "_watching", "answers", "fleet", "identity", "refs",
        "state", "system",
    )  # fmt: skip

    def __init__(self, system: ActorSystem, identity: ActorIdentity, fleet: MemberRefs | None) -> None:
        self.system = system
        """The system on this side."""
        self.identity = identity
        """Identifies the actor; the path is what was said with the ref, until its owner says another."""
        self.fleet = fleet
        """The refs of the fleet, if the ref may be forwarded to its members."""
        self.refs: Refs | None = None
        """The refs of the connection that its channel is on, once there is a channel."""
        self.state = _UNCLAIMED
        self._reason: Reason | None = None
        self._standing: dict[Signal, Callable[[], None]] = {}
        """The signals that wait for room; the function leaves the line."""
        self._ties: dict[LocalRef, list[Tie]] = {}
        self._watchers: dict[Hashable, Callable[[Reason], None]] = {}
        self._watching: Watching | None = None
        self.answers: Answers | None = None
        """Receives the answers to its numbered questions."""
        self._asked = 0
        """Questions before those."""
        self._channel = ChannelCore(Any, WINDOW, f"ref {identity.path}")
        self._channel.receiver.away = 1
        this = weakref.ref(self)

        def channel_ended() -> None:
            ref = this()
            if ref is not None:
                ref.lose()

        self._channel.sender.on_terminated(channel_ended)

    def open(self, refs: Refs, identity: ActorIdentity, half: Any) -> None:
        """Begin to use a channel to the owner's side; what has waited for it goes first, in order.

        Args:
            refs: the refs of the channel's connection.
            identity: as the owner says.
            half: the sender's half of the channel.
        """
        self._go(RefChange.OPEN)
        self.refs, self.identity = refs, identity
        waiting = self._take_waiting()

        def begun() -> None:
            for signal in waiting:
                if self._reason is None:
                    self._try_post(signal)
                else:
                    signal.failed(None)
            self._channel.settle(outcome=Outcome.PROCESSED)  # there may be room for those in line

        refs.halves.core.background.add(half)
        outbound = _RefOutbound(refs.halves, self._channel, half=half, begun=begun if waiting else None)
        refs.halves.start(outbound)

    def expect_answers(self) -> Answers | None:
        """Make the receiver of the answers to this question and later ones; None if the answer comes on a oneshot."""
        self._asked += 1
        refs = self.refs
        if self._asked <= FEW or refs is None or not refs.numbers_questions:
            return None
        this = weakref.ref(self)

        def lost() -> None:
            ref = this()
            if ref is not None:
                ref.lose()

        def given_back() -> None:
            ref = this()
            if ref is not None:
                ref.answers = None

        self.answers = Answers(refs.halves, lost, given_back)
        return self.answers

    @property
    def path(self) -> str:
        """The path of the actor in its own system."""
        return self.identity.path

    @property
    def peer(self) -> str:
        """Name of the system where the actor lives."""
        if self.refs is not None:
            return self.refs.peer
        return "" if self.fleet is None else self.fleet.name_of(self.identity.node)

    @property
    def where(self) -> str:
        """The path and the peer, for texts of errors."""
        return f"{self.path} at {self.peer}"

    @property
    def incarnation(self) -> int:
        """The number of the actor in its own system."""
        return self.identity.incarnation

    @property
    def is_alive(self) -> bool:
        """Whether the actor has not ended, as far as this side knows. It learns of the end late, or never without a watcher."""
        return self._reason is None

    def tell(self, message: Any) -> None:
        """Send a message to the actor without waiting.

        Raises:
            MailboxFull: the window of the channel to its system is full: the actor, or the network, is slower than its senders.
            TypeError, ValueError, LevadaError: the message cannot travel; its handles still belong to this side. While the ref has no
                channel yet, such a message becomes a dead letter, and the error is logged.
        """
        if self.state is not _OPEN or not self._channel.accept(message):
            self._tell_later(Later(self, message))

    def _tell_later(self, later: Later) -> None:
        """Tell an actor whose channel is not open, or full."""
        message = later.message
        if self._reason is not None:
            self.system.dead_letter(message, self, "stopped")
            return
        if self.state is not _OPEN and self._channel.accept(later):
            self._use()
            return
        window = self._channel.window
        raise MailboxFull(
            f"{window} messages are on their way to {self.where}, or {MOST_WAITING >> 20} MiB of them; send() waits for room",
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
            if self._channel.accept(message if self.state is _OPEN else Later(self, message)):
                return
            # A lost connection settles the messages under way before the channel ends, and so makes room.
            if await self._channel.wait_to_put(self, message) and self.state is not RefState.LOST:
                return
        raise self.stopped(message)

    async def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        """Ask the actor and wait for its answer. A circle of asks over two systems is not detected: it ends by its timeouts.

        Raises:
            TypeError, ValueError, LevadaError: the question cannot travel; its handles still belong to this side.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        check_timeout(timeout)
        if BEFORE_ASKS:
            await prepare_to_ask()
        if self._reason is not None:
            raise self.stopped(message)
        return await self._put_question(Ask(message, self), timeout)  # type: ignore[arg-type]

    async def _put_question(self, question: Ask, timeout: float | None) -> Any:
        asking = Asking(self, question)
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
        return f"<Ref {self.path}#{self.incarnation} at {self.peer}>"

    # A default, because at the end of the interpreter the names of modules are gone.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing() or self.state is _UNCLAIMED:
            return  # nothing to let go, or never used
        channel = self._channel
        if channel.sender.state is TerminalState.OPEN:
            # Collection may happen in any thread and at any moment.
            channel.end_soon(_release, channel, self._watching)

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
            later = Later(self, message)
            if self._reason is None:
                self._try_post(later)
            else:
                later.failed(None)
        elif self._reason is None:
            self._try_post(Asking(self, message))
        else:
            message.fail(self.stopped(message.message))

    @property
    def takes_work(self) -> bool:
        """Whether its system reports finished work. All members of a fleet do."""
        return self.fleet is not None or (self.refs is not None and self.refs.takes_work)

    def work(self, entry: Any, over: Callable[[Outcome], None]) -> bool:
        """Give the actor one message or question, and report when it has finished."""
        working = WorkAsking(self, entry, over) if isinstance(entry, Ask) else Working(self, entry, over)
        try:
            self._post(working)
        except Exception as error:  # noqa: BLE001 - the sender must learn of any error
            working.refuse(error)
            return False
        return True

    def sample_load(self, got: Callable[[int | None], None]) -> None:
        """Ask how many messages wait for the actor."""
        self._try_post(Sampling(self, got))

    def add_watcher(self, key: Hashable, ended: Callable[[Reason], None]) -> None:
        """Call `ended` with the reason when the actor has ended, or is out of reach."""
        if self._reason is not None:
            ended(self._reason)
            return
        self._watch_end()
        self._watchers[key] = ended

    def note_end(self, key: Hashable, ended: Callable[[Reason], None]) -> None:
        """Call `ended` when this side learns that the ref has ended. Unlike `add_watcher`, it asks nobody for notice."""
        self._watchers[key] = ended

    def forget_watcher(self, key: Hashable) -> None:
        """Remove a watcher; the owner is told when the last one goes."""
        if self._watchers.pop(key, None) is not None and not self._watchers and self._watching is not None:
            watching, self._watching = self._watching, None
            self._step_back(watching)
            watching.withdraw()

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

    def link_here(self, refs: Referring, cell: LocalRef, ours: SenderHalf, theirs: ReceiverHalf) -> None:
        """Link an actor here to the actor there, which asks for it, if `cell` accepts such links.

        Args:
            refs: the refs of the connection on which it asks.
            cell: the actor here.
            ours: tells the peer of its end.
            theirs: tells this side of the end of the actor there.
        """
        tie = Tie(self, cell)
        listen = tie.accept(refs, ours)
        if not cell.is_alive:
            tie.tell_exit(cell.reason)
        elif not cell.accepts_links:
            refusal = f"{cell.path} lets no actor of another system link to it (accept_remote_links)"
            tie.tell_exit(Failed(ActorError(refusal)))
        else:
            self._ties.setdefault(cell, []).append(tie)
            cell.tie(self)
        listen(theirs)

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

    def lose(self, reason: Reason | None = None) -> None:
        """End because the actor is out of reach; without a reason, for the reason `Lost`. Does nothing if the ref has ended."""
        if self._reason is None:
            self._end(RefChange.LOSE, reason or Lost(self.peer))

    def end(self, reason: Reason) -> None:
        """End with the actor. Does nothing if the ref has ended."""
        if self._reason is None:
            self._end(RefChange.END, reason)

    def _end(self, change: RefChange, reason: Reason) -> None:
        self._go(change)
        self._reason = reason
        waiting = self._take_waiting() if self.refs is None else []
        standing, self._standing = self._standing, {}
        for signal in (*waiting, *standing):
            signal.failed(None)
        watchers, self._watchers = self._watchers, {}
        for ended in watchers.values():
            ended(reason)
        if self.state is RefState.LOST:
            for tie in [tie for ties in self._ties.values() for tie in ties]:
                tie.end(reason)
        _release(self._channel, self._watching, self)

    def _go(self, change: RefChange) -> None:
        self.state = TRANSITIONS[self.state, change]

    def _use(self) -> None:
        """Claim the ref, at its first use."""
        if self.state is _UNCLAIMED:
            assert self.fleet is not None
            self._go(RefChange.USE)
            self.fleet.claim(self)

    def _take_waiting(self) -> list[Signal]:
        """Take what waits for the channel; without one, the queue holds nothing but signals."""
        waiting = [*self._channel.queue]
        self._channel.open_queue().clear()
        return waiting

    def _post(self, signal: Signal) -> None:
        """Send a signal, or let it wait for room; raises the errors of `encode`."""
        channel = self._channel
        if not channel.accept(signal):
            self._standing[signal] = channel.stand(lambda: self._try_post(signal))
            signal.stand(self._step_back)
        if self.state is _UNCLAIMED:
            self._use()

    def _step_back(self, signal: Signal) -> None:
        """Take a signal that is no longer wanted out of the line, where it would keep its message."""
        leave = self._standing.pop(signal, None)
        if leave is not None:
            leave()
            signal.unsent()

    def _try_post(self, signal: Signal) -> None:
        """Send a signal like `_post`, and report an error by `Signal.failed`."""
        self._standing.pop(signal, None)
        if self._reason is not None:
            return  # it has been told
        if not signal.wanted:
            signal.unsent()
        else:
            try:
                self._post(signal)
            except Exception as error:  # noqa: BLE001 - the sender must learn of any error
                signal.failed(error)

    def _watch_end(self) -> None:
        """Ask for notice of the actor's end, once."""
        if self._watching is None:
            watching = Watching(self)
            self._post(watching)
            self._watching = watching

    def _refuse(self, done: str) -> NoReturn:
        raise ActorError(
            f"{self.path} lives at {self.peer} and is {done} only by its own system; send it a message instead",
            actor=self.path,
        )


class _TracedRef(RemoteRef):
    """A ref of an actor in another system, in a traced system: messages take the contexts of their senders along."""

    __slots__ = ()

    def _later(self, message: Any) -> Later:
        if not isinstance(message, TracedTell):
            message = TracedTell(message, self._tracing.current())
        return Later(self, message)

    @property
    def _tracing(self) -> Tracing:
        tracing = self.system.tracing
        assert tracing is not None
        return tracing

    def tell(self, message: Any) -> None:
        later = self._later(message)
        if self.state is not _OPEN or not self._channel.accept(later):
            self._tell_later(later)

    async def send(self, message: Any) -> None:
        await self.system.scheduler.checkpoint_if_slice_over()
        if self._reason is None:
            self._watch_end()
            later = self._later(message)
            if self._channel.accept(later):
                return
            if await self._channel.wait_to_put(self, later) and self.state is not RefState.LOST:
                return
        raise self.stopped(message)

    async def _put_question(self, question: Ask, timeout: float | None) -> Any:
        if isinstance(question.message, UntracedMessage):
            return await super()._put_question(question, timeout)
        with self._tracing.ask(self, "", question.message) as span:
            return await super()._put_question(TracedAsk(question.message, question.target, span.context), timeout)


def remote_ref(system: ActorSystem, identity: ActorIdentity, fleet: MemberRefs | None) -> RemoteRef:
    """Make the ref of an actor in another system."""
    return (RemoteRef if system.tracing is None else _TracedRef)(system, identity, fleet)


def _release(channel: ChannelCore, watching: Watching | None, handle: object = None) -> None:
    """Finish the channel of a ref; queued messages still leave."""
    if watching is not None:
        watching.withdraw()
    if channel.producers and channel.sender.state is TerminalState.OPEN:
        channel.finish_producer(handle)


class _RemoteFromThread(FromThread[Any]):
    __slots__ = ("_ref",)

    def __init__(self, ref: RemoteRef) -> None:
        self._ref = ref

    def tell(self, message: Any) -> None:
        self._ref.system.inbox.put(self._ref, message)  # type: ignore[arg-type]

    def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        check_timeout(timeout)
        system = self._ref.system
        if system.inbox.is_home():
            raise RuntimeError("from_thread.ask() in the system's own thread would wait forever; await ask() instead")
        question = ThreadAsk(message, self._ref)  # type: ignore[arg-type]
        system.inbox.put(self._ref, question)  # type: ignore[arg-type]
        return question.block(system.inbox, system.ask_timeout if timeout is DEFAULT_TIMEOUT else timeout)
