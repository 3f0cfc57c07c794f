"""The core that the two halves of a channel share: queue, window, ends. Users see `levada.framework.channel`.

A `ChannelCore` belongs to one trio thread and keeps no handles, so that a forgotten handle can be collected.
Every method is synchronous, and the invariants hold before it returns or calls back:

* putters wait ⇒ the window is full: free room goes to the waiters at once, in order (a waiter that was let in already has its slot); a
  network that is the only sender may wait until half of the window is free;
* takers wait ⇒ the queue is empty: a message goes straight to the task that has waited longest;
* a half that has ended never changes; the receiver's half ends with the sender's half or after it, never before.

A task that was let in or given a message is already rescheduled, and trio delivers no cancellation to such a task. So a cancelled
``send`` did nothing and a cancelled ``receive`` took nothing.

**The interface for a network.** When a handle leaves inside a message, the carrier of the message calls ``handle.take_over(where)``
and gets the core; ``handle.give_back()`` undoes this as long as the core was not used. Then

* in place of a *receiver*: `consume` sets a callback, which is called whenever there may be something to `take`, including messages
  queued before. Each entry taken keeps its slot of the window until `settle`. When an end is `pending`, the queue is empty and
  everything is settled, the consumer calls `end_pending`. It may also set `prepare` for each message that is sent from then on: a
  message that cannot travel is refused to its sender, and handles inside move during ``send``, not later.
* in place of a *sender*: `offer` each message, and wait for the callback if it returns False; then `finish_producer`.
* on both sides: `end` with CANCELLED, RECEIVER_CLOSED, LOST or CONNECTION_LOST, and `Half.on_terminated` to learn of the end.

An `Envelope` may take a message's place: it is opened (decoded, say) only when the application takes it.
"""

from __future__ import annotations

import enum
import weakref
from _thread import get_ident
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

import attrs
import trio
from outcome import Error, Value
from trio import current_time, sleep
from trio.lowlevel import Abort, Task, current_task, current_trio_token, in_trio_run, reschedule, wait_task_rescheduled

from levada.framework.errors import (
    ChannelCancelled,
    ChannelConnectionLost,
    ChannelError,
    ChannelLost,
    EndOfChannel,
    ReceiverClosed,
    wrong_thread,
)
from levada.framework.identity import RemotePeer

__all__ = [
    "ENDED", "LARGE", "ChannelCore", "Envelope", "Half", "Mode", "Outcome", "Receipt", "TerminalState",
    "handles_in", "let_others_run", "may_hold",
]  # fmt: skip


class TerminalState(enum.Enum):
    """Whether one half of a channel is open, and how it ended if it is not."""

    OPEN = "open"
    """Not ended. A finished channel stays open until the receiver has taken everything."""
    FINISHED = "finished"
    """All senders finished and all messages were taken."""
    CANCELLED = "cancelled"
    """The sender cancelled the channel; queued messages were discarded."""
    RECEIVER_CLOSED = "receiver closed"
    """The receiver wants no more; queued messages were discarded."""
    LOST = "lost"
    """The message that carried the other half was lost in transit."""
    CONNECTION_LOST = "connection lost"
    """The connection under a networked channel was lost."""


class Mode(enum.Enum):
    """How the messages of a channel travel; chosen at the sender before the first message."""

    ORDERED = "ordered"
    """All messages arrive, in the order of sending."""
    UNORDERED = "unordered"
    """All messages arrive; over a network, none has to wait for another."""
    UNRELIABLE = "unreliable"
    """The newest messages arrive: a full buffer drops its oldest message, and a network may drop any."""


OPEN = TerminalState.OPEN

LARGE = 2**15
"""Bytes from which a message is decoded alone: other tasks run before the next message. Smaller messages take 0.05 s at worst."""

_NO_QUEUE: Any = ()
"""The queue while tasks wait for messages, or while a consumer has taken everything. A deque takes 760 bytes."""

ENDED: Any = object()
"""Given to a waiting taker in place of a message when the channel has ended."""

_ERRORS: dict[TerminalState, tuple[type[ChannelError], str]] = {
    TerminalState.FINISHED: (EndOfChannel, "finished, and every message was taken"),
    TerminalState.CANCELLED: (ChannelCancelled, "the sender cancelled the channel"),
    TerminalState.RECEIVER_CLOSED: (ReceiverClosed, "the receiver was closed"),
    TerminalState.LOST: (ChannelLost, "the message that carried the other half was lost in transit"),
    TerminalState.CONNECTION_LOST: (ChannelConnectionLost, "the connection under the channel was lost"),
}


async def let_others_run(seconds: float) -> None:
    """Wait as long as a large message took to open. Up to a millisecond this is one step of trio, since a sleep takes at least that long."""
    await sleep(seconds if seconds > 0.001 else 0.0)


class Half:
    """The state of one half, and the callbacks for its end."""

    __slots__ = ("_errors", "away", "cause", "detail", "reason", "state", "watcher", "watchers")

    def __init__(self) -> None:
        self._errors: weakref.WeakSet[ChannelError] | None = None
        """The errors made here that are still under way."""
        self.state = OPEN
        self.away = 0
        """Handles of this half that are in another system."""
        self.detail = ""
        self.reason = ""
        """Why the channel was cancelled, in words for peers."""
        self.cause: BaseException | None = None
        self.watcher: Callable[[], None] | None = None
        """The callback that came first. Mostly it is the only one: a dict for one takes 240 bytes."""
        self.watchers: dict[object, Callable[[], None]] | None = None
        """Those behind it."""

    def error(self, name: str) -> ChannelError:
        """Make the error for the state: a new one each time, since an exception that is raised again collects tracebacks."""
        kind, text = _ERRORS[self.state]
        if self.reason and not self.detail:
            text = f"{text}: {self.reason}"
        error = kind(f"channel {name}: {self.detail or text}", channel=name)
        if isinstance(error, ChannelCancelled):
            error.reason = self.reason
        error.__cause__ = self.cause
        self._errors = weakref.WeakSet() if self._errors is None else self._errors
        self._errors.add(error)
        return error

    @property
    def reader_left(self) -> bool:
        """Whether this is a sender's half whose reader closed its receiver, or is out of reach."""
        return self.state in (TerminalState.RECEIVER_CLOSED, TerminalState.CONNECTION_LOST)

    def says_reader_left(self, error: BaseException) -> bool:
        """Whether an error, or each error of a group, is `error` of this half and says that the reader left."""
        if isinstance(error, BaseExceptionGroup):
            return all(map(self.says_reader_left, error.exceptions))
        return self.reader_left and self._errors is not None and error in self._errors

    def on_terminated(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once when this half has ended, at once if it has; return a function that undoes this, at any time.

        The callback runs inside the call that ended the channel. It must be quick and not raise; it may use the channel.
        """
        if self.state is not OPEN:
            callback()
            return lambda: None
        if self.watcher is None and not self.watchers:
            first: Callable[[], None] | None = callback
            self.watcher = callback

            def remove_first() -> None:
                nonlocal first
                if first is not None and self.watcher is first:
                    self.watcher = None
                first = None  # the same callback may be there again

            return remove_first
        watchers = self.watchers = self.watchers or {}
        key = object()
        watchers[key] = callback

        def remove() -> None:
            watchers.pop(key, None)

        return remove

    def call_watchers(self) -> None:
        """Call each callback once. The state must be set before."""
        first, self.watcher = self.watcher, None
        if first is not None:
            first()
        if self.watchers:
            watchers = self.watchers
            for key in list(watchers):
                callback = watchers.pop(key, None)  # one callback may have removed another
                if callback is not None:
                    callback()


class Outcome(enum.Enum):
    """The outcome of one message. Only `PROCESSED` is true: ``if await receipt: …``."""

    PROCESSED = "processed"
    """The receiver took the message; over a network, the peer's runtime delivered it to the receiver."""
    NOT_PROCESSED = "not processed"
    """The message was discarded or dropped; no receiver will ever get it."""
    UNKNOWN = "not known"
    """The message was on its way when the connection, or the channel's other half, was lost: the peer may or may not have processed it."""

    def __bool__(self) -> bool:
        return self is PROCESSED


PROCESSED, NOT_PROCESSED = Outcome.PROCESSED, Outcome.NOT_PROCESSED


class Receipt:
    """The outcome of one message: ``outcome = await receipt``. Any number of tasks may wait; a cancellation only ends the wait."""

    __slots__ = ("_outcome", "_settled")

    def __init__(self) -> None:
        self._outcome: Outcome | None = None
        self._settled: trio.Event | None = None
        """Made for the first task that waits."""

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, or None while the message is under way."""
        return self._outcome

    def __await__(self) -> Generator[Any, Any, Outcome]:
        return self._wait().__await__()

    async def _wait(self) -> Outcome:
        if self._outcome is None:
            if self._settled is None:
                self._settled = trio.Event()
            await self._settled.wait()
        else:
            await trio.lowlevel.checkpoint()
        assert self._outcome is not None
        return self._outcome

    def settle(self, outcome: Outcome) -> None:
        """Set the outcome, once; for the channel or a network."""
        self._outcome = outcome
        if self._settled is not None:
            self._settled.set()


class Envelope:
    """A queue entry for a message with a receipt, or for a message that is decoded only when it is taken."""

    __slots__ = ()

    @property
    def peer(self) -> RemotePeer | None:
        """The peer that sent the message, if it came over a connection."""
        return None

    context: object = None
    """The tracing context of the sender, if the message came with one; set by `open`."""

    large: bool = False
    """Whether opening may take long, so that other tasks should run for as long before the next envelope is opened."""

    def open(self) -> Any:
        """Return the message; called once, in the receiving task, which gets any error. By default the envelope is the message."""
        return self

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome of the message; called once."""


@attrs.define(eq=False)
class Tracked(Envelope):
    """A message whose sender wants a receipt."""

    message: object
    receipt: Receipt

    def open(self) -> Any:
        return self.message

    def settle(self, outcome: Outcome) -> None:
        self.receipt.settle(outcome)


@attrs.define(eq=False)
class _SendWaiter:
    """A task inside ``send``."""

    task: Task
    handle: object
    entry: Any
    patient: ClassVar[bool] = False

    def admit(self, core: ChannelCore) -> None:
        try:
            core.put(self.entry)
        except Exception as error:
            reschedule(self.task, Error(error))
        else:
            reschedule(self.task, Value(True))

    def refuse(self) -> None:
        reschedule(self.task, Value(False))


@attrs.define(eq=False)
class _OfferWaiter:
    """A network that waits for room; its turn is one call."""

    on_room: Callable[[], None]
    patient: bool = False
    """Whether its turn comes only when half of the places are free."""

    def admit(self, _: ChannelCore) -> None:
        self.on_room()

    def refuse(self) -> None:
        """Do nothing, since the network watches the half."""


@attrs.define(eq=False, weakref_slot=False)
class _Leaving:
    """What trio calls when a task that waits for a message is cancelled. A function inside `stand_to_take` would take 200 bytes more."""

    core: ChannelCore
    task: Task

    def __call__(self, _: object) -> Abort:
        self.core.leave(self.task)
        return Abort.SUCCEEDED


_NO_TASKS: OrderedDict[Any, None] = OrderedDict()
"""The line of a channel for which no task has waited yet; it stays empty. A line takes 130 bytes."""


class ChannelCore:
    """The queue, window and ends of one channel. The module's docstring has the rules, and who may call what."""

    # Not generic: its users are, and the queue holds both messages and envelopes.
    __slots__ = (
        "_name", "abandoned", "consumer", "enveloped", "item_type", "limit", "mode", "pending", "prepare", "producers",
        "putters", "queue", "receiver", "rest", "sender", "taker", "takers", "thread", "token", "undelivered", "used", "window",
    )  # fmt: skip

    def __init__(self, item_type: Any, window: int, name: str | int | None) -> None:
        self._name = name
        self.item_type = item_type
        self.mode = Mode.ORDERED
        self.window = window
        """Messages that may be under way."""
        self.limit = window
        """Messages that may be queued: the window, minus entries that a consumer has taken and not settled; 0 after the sender's half ended."""
        self.used = False
        """Whether a message was ever put: then the mode is fixed, and a oneshot channel has had its value."""
        self.queue: deque[Any] = deque()
        # Not plain dicts, which step over all deleted keys to find the first one.
        self.putters: OrderedDict[_SendWaiter | _OfferWaiter, None] = _NO_TASKS
        self.taker: Task | None = None
        """The task that has waited longest for a message."""
        self.takers: OrderedDict[Task, None] = _NO_TASKS
        """The tasks behind it. Mostly there is none: a line for one task takes 380 bytes."""
        self.consumer: Callable[[], None] | None = None
        self.prepare: Callable[[Any], Any] | None = None
        """Turns a message into the entry queued for the consumer; may raise, to the sender."""
        self.enveloped = False
        """Whether the queue may hold envelopes; this saves other channels the isinstance."""
        self.producers = 1
        """The number of senders that have not finished."""
        self.pending: TerminalState | None = None
        """How the receiver's half will end when the queue is empty."""
        self.undelivered = 0
        self.rest: float | None = None
        """Seconds for which ``receive`` lets other tasks run before the next message, since the last one took as long to open."""
        self.sender = Half()
        self.receiver = Half()
        self.abandoned = False
        """Whether a handle was forgotten and its owner warned."""
        self.thread: int | None = None
        """The thread that the channel belongs to: tasks wait, and callbacks run, in this thread."""
        self.token: trio.lowlevel.TrioToken | None = None
        self.bind_thread()

    @property
    def name(self) -> str:
        """The given name, or the type of the messages, with the given number; for logs and errors."""
        name = self._name
        if isinstance(name, str) and name:
            return name
        kind = getattr(self.item_type, "__name__", None) or str(self.item_type)
        return kind if not isinstance(name, int) else f"{kind}#{name}"

    def bind_thread(self) -> None:
        """Bind a channel without a thread to this thread, since a task here is about to wait on it."""
        if self.thread is not None and get_ident() != self.thread:  # saves the call
            self.check_thread()
        try:
            self.token = current_trio_token()
        except RuntimeError:
            return  # outside of a trio run nothing can wait
        self.thread = get_ident()

    def check_thread(self) -> None:
        """Raise `WrongThread` in another thread than the channel's, before anything has changed."""
        if self.thread is not None and get_ident() != self.thread:
            raise wrong_thread(f"use of channel {self.name}")

    def accept(self, entry: Any) -> bool:
        """Put a message if there is room; return whether there was. The caller has checked that its handle may send."""
        self.used = True
        if len(self.queue) < self.limit:
            if self.taker is not None or self.consumer is not None:
                if get_ident() != self.thread:  # saves the call: 50 ns of 1,000
                    self.check_thread()
                if self.prepare is None:  # which is there with a consumer only, and then no task takes
                    self.put(entry)
                elif (entry := self.prepare(entry)) is not None:  # as put(), without the call
                    if self.queue is _NO_QUEUE:
                        self.queue = deque()
                    self.queue.append(entry)
                    if self.consumer is not None:
                        self.consumer()
            else:  # as put(), without the call: 45 ns of 170
                self.queue.append(entry)
            return True
        if self.mode is not Mode.UNRELIABLE or self.sender.state is not OPEN:
            return False
        self.check_thread()
        self.drop_oldest()
        self.put(entry)
        return True

    def open_queue(self) -> deque[Any]:
        """Return the queue for adding messages."""
        if self.queue is _NO_QUEUE:
            self.queue = deque()
        return self.queue

    def drop_oldest(self) -> None:
        """Drop the oldest message in the queue, to make room in an unreliable channel."""
        self._dropped(self.queue.popleft())

    def put(self, entry: Any) -> None:
        """Give a message to the task that has waited longest, or queue it. There must be room. If `prepare` raises, it was not put."""
        if self.taker is not None:
            self.give(entry)
        else:
            if self.prepare is not None:
                entry = self.prepare(entry)
                if entry is None:
                    return
            if self.queue is _NO_QUEUE:
                self.queue = deque()
            self.queue.append(entry)
            if self.consumer is not None:
                self.consumer()

    def give(self, entry: Any) -> None:
        """Give a message to the task that has waited longest."""
        assert self.taker is not None
        reschedule(self.taker, Value(entry))
        if self.takers:
            self._next_taker()
        else:  # as `_next_taker`, without the call
            self.taker = None
            self.queue = deque()

    def _next_taker(self) -> None:
        if self.takers:
            self.taker = self.takers.popitem(last=False)[0]
        else:
            self.taker = None
            self.queue = deque()

    def leave(self, task: Task) -> None:
        """Wait no longer for a message."""
        if task is self.taker:
            self._next_taker()
        else:
            del self.takers[task]

    def track(self, message: object) -> Tracked:
        """Put a message that wants a receipt into its envelope."""
        self.enveloped = True
        return Tracked(message, Receipt())

    async def wait_to_put(self, handle: object, entry: Any) -> bool:
        """Wait for a turn; return False if the channel or the handle ended first and the message was not taken."""
        self.bind_thread()
        waiter = _SendWaiter(current_task(), handle, entry)
        self._stand(waiter)

        def abort(_: object) -> Abort:
            del self.putters[waiter]
            return Abort.SUCCEEDED

        admitted: bool = await wait_task_rescheduled(abort)
        return admitted

    def offer(self, entry: Any, on_room: Callable[[], None]) -> bool:
        """Put a message, or an `Envelope`, for a sender in another system; return whether there was room.

        If there was none, `on_room` is called once, in its turn among the waiting senders. Offer nothing before that. If no other sender is
        left, that is when half of the places are free: a network that filled each place by itself took 3 µs for a message that waited.
        """
        if isinstance(entry, Envelope):
            self.enveloped = True
        if self.accept(entry):
            return True
        self.stand(on_room, patient=self.producers == 1)
        return False

    def stand(self, on_room: Callable[[], None], *, patient: bool = False) -> Callable[[], None]:
        """Call `on_room` once, in its turn among the waiting senders; the returned function leaves the line. Does nothing after the end.

        Args:
            on_room: called in the task that makes room.
            patient: wait until half of the places are free.
        """
        waiter = _OfferWaiter(on_room, patient)
        if self.sender.state is OPEN:
            self._stand(waiter)
        return lambda: self.putters.pop(waiter, None)

    def _stand(self, waiter: _SendWaiter | _OfferWaiter) -> None:
        if self.putters is _NO_TASKS:
            self.putters = OrderedDict()
        self.putters[waiter] = None

    def finish_producer(self, handle: object = None) -> None:
        """Finish one sender; after the last one the channel ends when everything was taken.

        Args:
            handle: tasks inside ``send`` on this handle are refused. ``None`` if there are none: then the waiting tasks are not searched. With
                the search, 8,000 producers that send one message each and finish took 15 s.
        """
        if handle is not None:
            for waiter in [w for w in self.putters if isinstance(w, _SendWaiter) and w.handle is handle]:
                del self.putters[waiter]
                waiter.refuse()
        self.producers -= 1
        if self.producers or self.sender.state is not OPEN:
            return
        self.pending = TerminalState.FINISHED
        if self.consumer is not None:
            self.consumer()
        elif not self.queue:
            self.end_pending()

    def took(self, entry: Any) -> Any:
        """Complete a local receiver's ``queue.popleft()``; return the message."""
        opened = self.enveloped and isinstance(entry, Envelope)
        if opened:
            entry.settle(PROCESSED)
        if self.putters:
            self._admit()
        if self.pending is not None and not self.queue:
            self.end_pending()
        if not opened:
            return entry
        return self._open(entry) if entry.large else entry.open()

    def stand_to_take(self) -> Callable[[object], Abort]:
        """Put this task in the line for messages.

        Returns:
            what `wait_task_rescheduled` is to be called with; `came` wants its result. So the two that wait need no coroutine of this class
            between them and trio's: 240 bytes, and 0.2 µs.
        """
        self.bind_thread()
        self.queue = _NO_QUEUE
        task = current_task()
        if self.taker is None:
            self.taker = task
        else:
            if self.takers is _NO_TASKS:
                self.takers = OrderedDict()
            self.takers[task] = None
        return _Leaving(self, task)

    def came(self, entry: Any) -> Any:
        """Open what a task in the line was given; `ENDED` if the channel has ended."""
        self.rest = None  # others have run
        if self.enveloped and isinstance(entry, Envelope):
            entry.settle(PROCESSED)
            return self._open(entry) if entry.large else entry.open()
        return entry

    def _open(self, entry: Envelope) -> Any:
        if not in_trio_run():
            return entry.open()
        began = current_time()
        try:
            return entry.open()
        finally:
            self.rest = current_time() - began

    async def let_others_run(self) -> None:
        """Yield to other tasks, since the last message was large. This is not repeated after a cancellation."""
        rest, self.rest = self.rest, None
        await let_others_run(rest or 0.0)

    def consume(self, consumer: Callable[[], None], prepare: Callable[[Any], Any] | None = None) -> None:
        """Give all messages to `consumer`, including queued ones; tasks inside ``receive`` are refused.

        Args:
            consumer: called after each change that may concern it, in the task that made the change. It must be quick, not raise, and
                allow calls while it runs.
            prepare: turns each message, or its `Tracked`, into an entry when it is put; its errors are raised by ``send``. If it returns
                ``None``, the message has already left, as if it had been queued and taken.
        """
        self.bind_thread()
        self.consumer, self.prepare = consumer, prepare
        if self.taker is not None:
            self._dismiss_takers()
        if self.queue or self.pending is not None:
            consumer()
        else:
            self.queue = _NO_QUEUE

    def take(self) -> Any:
        """Take the oldest entry for a consumer. It keeps its place in the window until `settle` (unreliable entries need none)."""
        if self.mode is not Mode.UNRELIABLE:
            self.limit -= 1
        entry = self.queue.popleft()
        if not self.queue:
            self.queue = _NO_QUEUE
        return entry

    def settle(self, *entries: Any, outcome: Outcome, more: int = 0) -> None:
        """Take the outcome of entries from a consumer, and of `more` that were processed and tell nobody; let the next senders in."""
        if self.sender.state is OPEN and self.mode is not Mode.UNRELIABLE:
            self.limit += len(entries) + more
        for entry in entries:
            if outcome is not PROCESSED:
                self._dropped(entry, outcome)
            elif isinstance(entry, Envelope):
                entry.settle(outcome)
        if self.putters:
            self._admit()

    def take_places(self, places: int) -> None:
        """Count a message as several, for a consumer whose queue has a bound in bytes; a negative number gives places back."""
        if self.sender.state is OPEN:
            self.limit -= places
            if self.putters and places < 0:
                self._admit()

    def end(
        self,
        state: TerminalState,
        *,
        discard: bool = True,
        detail: str = "",
        cause: BaseException | None = None,
        reason: str = "",
    ) -> None:
        """End both halves; a half that has ended never changes.

        Args:
            state: how the halves end.
            discard: whether to drop queued messages. Otherwise the receiver's half ends when the queue is empty.
            detail: replaces the usual text of the errors.
            cause: becomes the ``__cause__`` of the errors.
            reason: why it was cancelled, in words for peers.
        """
        if self.receiver.state is not OPEN:
            return
        while discard and self.queue:
            self._dropped(self.queue.popleft())
        if self.sender.state is OPEN:
            self.sender.state, self.sender.detail, self.sender.cause = state, detail, cause
            self.sender.reason = reason
            self.limit = 0
            while self.putters:
                self.putters.popitem(last=False)[0].refuse()
        if self.queue:
            self.pending = state
        else:
            self.receiver.state, self.receiver.detail, self.receiver.cause = state, detail, cause
            self.receiver.reason = reason
            self.consumer = self.prepare = None  # they refer to this channel, and no message comes any more
            if self.taker is not None:
                self._dismiss_takers()
        for half in (self.sender, self.receiver):
            if half.state is not OPEN and (half.watcher is not None or half.watchers):
                half.call_watchers()

    def end_pending(self) -> None:
        """End as `pending` says, once the queue is empty. A consumer calls this when everything is settled."""
        assert self.pending is not None
        self.end(self.pending, detail=self.sender.detail, cause=self.sender.cause, reason=self.sender.reason)

    def cancelled(self, reason: str) -> None:
        """End both halves as CANCELLED, because the last message was not one but the sender's reason; a finish may have come before."""
        self.end(TerminalState.CANCELLED, reason=reason)
        if self.receiver.state is TerminalState.FINISHED:
            self.receiver.state, self.receiver.reason = TerminalState.CANCELLED, reason

    def end_soon(self, ending: Callable[..., None], *args: object) -> None:
        """Run ``ending(*args)`` where it is safe, after a handle was collected.

        The garbage collector may run in any thread and in the middle of anything, including this class and trio's loop. So a channel that may
        have waiting tasks is changed only by the loop.
        """
        if self.token is None:
            ending(*args)
            return
        try:
            self.token.run_sync_soon(ending, *args)
        except trio.RunFinishedError:
            pass  # the run is over: no task waits

    def _admit(self) -> None:
        while self.putters and len(self.queue) < self.limit:
            waiter = next(iter(self.putters))
            if waiter.patient and len(self.queue) > self.limit >> 1:
                return
            del self.putters[waiter]
            waiter.admit(self)

    def _dismiss_takers(self) -> None:
        while self.taker is not None:
            self.give(ENDED)

    def _dropped(self, entry: Any, outcome: Outcome = NOT_PROCESSED) -> None:
        self.undelivered += 1
        if isinstance(entry, Envelope):
            entry.settle(outcome)
            if not isinstance(entry, Tracked):
                return  # it drops the handles inside itself
            entry = entry.message
        for handle in handles_in(entry):
            handle.drop(lost=self.receiver.away > 0)


def handles_in(message: Any, *, sampled: bool = False) -> Iterator[Any]:
    """Find the channel handles in a message, wherever the codec would, and in deques: in message classes and containers, at any depth.

    A container whose items cannot hold handles costs 20 ns for each item.

    Args:
        message: a message, or any value.
        sampled: for a container of more than a thousand items, look only at the first ten to decide whether to search it. For fields of
            actors: these may hold millions of items, and thousands of actors may share them.

    Example:
        >>> from levada.framework import channel
        >>> sender, receiver = channel(int)
        >>> list(handles_in([1, {"to": (receiver,)}])) == [receiver]
        True
        >>> sender.finish_nowait()
    """
    todo = [message]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        kind = type(value)
        if hasattr(kind, "attachment_kind"):
            if hasattr(kind, "take_over"):  # refs are copied
                yield value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))  # a list may be in itself
        inside: Collection[Any]
        if isinstance(value, dict):
            inside = value.values()
        elif isinstance(value, _CONTAINERS):
            inside = value
        elif hasattr(kind, "__message_tag__"):
            inside = [getattr(value, field.name) for field in attrs.fields(kind)]
        elif hasattr(kind, "carries_attachments"):  # an encoded message
            inside = value.attachments
        else:
            continue
        looked_at = islice(inside, 10) if sampled and len(inside) > 1000 else inside
        kinds = {kind for kind in set(map(type, looked_at)) if may_hold(kind)}
        if kinds:
            todo += [each for each in inside if type(each) in kinds]


_CONTAINERS = (list, tuple, set, frozenset, dict, deque)


@lru_cache(1024)
def may_hold(kind: type) -> bool:
    """Whether a value of this class is a handle or may contain one."""
    return (
        hasattr(kind, "take_over")
        or issubclass(kind, _CONTAINERS)
        or hasattr(kind, "__message_tag__")
        or hasattr(kind, "carries_attachments")
    )
