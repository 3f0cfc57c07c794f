"""The mailbox of an actor with a loop of its own (``async def run``).

Private fields used here: ``Cell._asking``, ``Cell._extras``, ``Cell._handled``, ``Cell._idle``, ``Cell._scheduler``.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import trio
from trio.lowlevel import Abort, RaiseCancelT, current_task, enable_ki_protection, reschedule, wait_task_rescheduled

from ._runtime.ask import Ask, RemoteAsk, RemoteTell, Wrapped
from ._runtime.dispatch import RUNTIME_ENTRIES
from ._runtime.tokens import Stop, Take
from ._runtime.tracing import begin
from .errors import ActorError, EndOfChannel
from .timers import Tick

if TYPE_CHECKING:
    from ._runtime.cell import Cell
    from .tracing import Span

__all__ = ["Inbox", "SleepingInbox"]

M = TypeVar("M")


class Inbox(Generic[M]):
    """The mailbox of a loop. It replaces the run queue as the cell's scheduler, so a message wakes the loop and not a worker."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self.scheduler = cell._scheduler
        self.system = self.scheduler.system
        self.thread = self.scheduler.thread
        self.parked = True
        """Always true, so that the idle cell of a waiting loop calls `wake`."""
        self.stop: Stop | None = None
        """The request that ended the loop, if one did."""
        self._task: Any = None
        self._ended = False
        self._span: tuple[Span, Any] | None = None
        """In a traced system what the loop does with its message, and the task that took it."""

    # A cell uses the next five of its scheduler.
    @property
    def ready(self) -> Inbox[M]:
        """The run queue; `append` ignores what it gets."""
        return self

    @property
    def now(self) -> float:
        """The scheduler's clock."""
        return self.scheduler.now

    def may_inline(self) -> bool:
        """Never: a loop takes its questions itself."""
        return False

    @enable_ki_protection
    def wake(self, cell: Cell) -> None:
        """Wake the loop."""
        if get_ident() != self.thread:
            raise cell.wrong_thread_error("tell")
        task, self._task = self._task, None
        if task is not None:
            reschedule(task)

    def append(self, _: Cell) -> None:
        """Do nothing: the loop was woken and finds the message."""

    async def receive(self) -> M:
        """Take the next message. Answer an ask with `Actor.reply_later` before you take the next message.

        Raises:
            EndOfChannel: the actor was asked to stop, and all messages queued before that were taken.

        Cancellation: no message was taken.
        """
        self._go_on()
        cell = self._cell
        await self.scheduler.checkpoint_if_slice_over()
        while True:
            if self._ended:
                raise EndOfChannel(f"{cell.path} was asked to stop")
            batch = cell.fill_batch()
            if not batch:
                await self._wait()
                continue
            entry = batch.pop()
            if type(entry) is Stop:
                cell.entry_left(entry)
                self._ended = True
                self.stop = entry
                continue
            found, message = self._open(entry)
            if found:
                return cast("M", message)

    def receive_nowait(self) -> M:
        """Take the next message, or raise `trio.WouldBlock` if there is none."""
        self._go_on()
        cell = self._cell
        while batch := cell.fill_batch():
            if type(batch[-1]) is Stop:
                break
            found, message = self._open(batch.pop())
            if found:
                return cast("M", message)
        raise trio.WouldBlock

    def __aiter__(self) -> AsyncIterator[M]:
        return self

    async def __anext__(self) -> M:
        try:
            return await self.receive()
        except EndOfChannel:
            raise StopAsyncIteration from None

    @enable_ki_protection
    async def _wait(self) -> None:
        cell = self._cell
        if self._task is not None:
            raise trio.BusyResourceError(f"two tasks of {cell.path} wait for its next message")
        self._task = current_task()
        cell._idle = True

        def abort(_: RaiseCancelT) -> Abort:
            self._task = None
            cell._idle = False
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)

    def _open(self, entry: Any) -> tuple[bool, Any]:
        """Return (True, message), or (False, None) for an entry that holds no message."""
        if isinstance(entry, Take):
            self._cell.entry_left(entry)
            return self._open(entry.next(self._cell))
        if isinstance(entry, Wrapped):
            if isinstance(entry, Ask):
                if entry.settled:
                    return False, None
                self._cell._asking = entry
            if isinstance(entry, RemoteAsk | RemoteTell):
                self._cell.make_extras().brought = entry
            if self._cell.traced:
                self._span = begin(self._cell, self.system.observe.kind(self._cell), entry), current_task()
            self._cell._handled += 1
            return True, entry.message
        if isinstance(entry, Tick):
            self._cell.entry_left(entry)
            return self._open(entry.alarm.message) if entry.alarm.take() else (False, None)
        self._cell._handled += 1  # an entry without a message uncounts itself
        if type(entry) not in RUNTIME_ENTRIES:
            return True, entry
        RUNTIME_ENTRIES[type(entry)](_Holder(self._cell), entry)
        return False, None

    def _go_on(self) -> None:
        """Release the message that the loop took; if it is a question that was not answered, fail it."""
        self.let_go()
        question = self._cell.take_question()
        if question is not None:
            question.fail(ActorError(f"{self._cell.path} went on without answering {type(question.message).__name__}"))

    def let_go(self, error: BaseException | None = None) -> None:
        """Release the message that the loop took. If the loop has ended, `Lifecycle` fails a question that was not answered.

        Args:
            error: ended the loop.
        """
        cell = self._cell
        if self._span is not None:
            (span, task), self._span = self._span, None
            if task is current_task():  # another task of the loop has a context of its own
                span.leave()
            span.end(error)
        if cell._extras is not None:
            cell._extras.brought = None

    def end(self) -> None:
        """Show the loop the end at its next `receive`, before queued messages."""
        self._ended = True
        if self._cell._idle:
            self._cell._idle = False
            self.wake(self._cell)


class _Holder:
    """Takes an actor's place, for an entry of the runtime."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell


class SleepingInbox(Inbox[Any]):
    """The mailbox of a loop that sleeps until its end. The cell always counts as idle, so each message leads to a call of `append`."""

    def wake(self, cell: Cell) -> None:
        """Check the thread of a sender."""
        if get_ident() != self.thread:
            raise cell.wrong_thread_error("tell")

    def end(self) -> None:
        """End the loop at once."""
        self._ended = True
        self._rouse()

    def _rouse(self) -> None:
        super().wake(self._cell)

    async def _sleep(self) -> None:
        self._task = current_task()
        await wait_task_rescheduled(self._give_up)

    def _give_up(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED

    def _see_stop(self, stop: Stop) -> None:
        self.stop = stop
        self.end()
