"""An actor's tasks and contexts, opened on first use and closed with the actor.

One trio task holds the actor's nursery (`start_soon`), and another one each context that the actor has entered (`enter`): a context must be
left in the task that entered it, and cancelling one must not disturb the others.  All these tasks are children of the system's nursery.
If one of them fails, the actor fails.  At the end the nursery is cancelled first, then the contexts are left, last entered first,
since tasks use contexts and not the other way round.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

import outcome
import trio
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    current_task,
    enable_ki_protection,
    reschedule,
    wait_task_rescheduled,
)

from levada.framework.text import text_of

if TYPE_CHECKING:
    from .cell import Cell

__all__ = ["ActorHost", "split_cancelled"]


def split_cancelled(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Split an exception into its cancellation and the rest; either may be ``None``."""
    if isinstance(error, trio.Cancelled):
        return error, None
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)
    return None, error


class ActorHost:
    """The nursery and the contexts of one actor object."""

    __slots__ = ("_cell", "_closing", "_contexts", "_gone", "_nursery", "_pending")

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._closing = False
        self._nursery: trio.Nursery | None = None
        self._pending: list[tuple[Context, Callable[..., Awaitable[object]], tuple[Any, ...], object]] = []
        """Tasks to start once the nursery is open, each with the context of the code that asked for it."""
        self._contexts: list[_Entered] = []
        self._gone: trio.Event | None = None

    def start_soon(self, function: Callable[..., Awaitable[object]], args: tuple[Any, ...], name: object) -> None:
        """Run a task of the actor, as soon as the nursery is open."""
        if self._closing:
            raise RuntimeError(f"{self._cell.path} is stopping: it starts no more tasks")
        if self._nursery is not None:
            self._nursery.start_soon(self._run, function, args, name=name or function)
            return
        self._pending.append((copy_context(), function, args, name or function))
        if self._gone is None:
            self._gone = trio.Event()
            self._cell.system.start_task(self._hold_nursery, name=f"<tasks of {self._cell.path}>")

    async def enter(self, context: AbstractAsyncContextManager[Any]) -> Any:
        """Enter `context` in its own task and return its value."""
        if self._closing:
            raise RuntimeError(f"{self._cell.path} is stopping: it enters no more contexts")
        entered = _Entered(self._cell, context)
        self._contexts.append(entered)
        self._cell.system.start_task(entered.hold, name=f"<context of {self._cell.path}>")
        try:
            return await entered.value()
        except BaseException:
            if entered in self._contexts:  # it was left again, or never entered
                self._contexts.remove(entered)
            raise

    def cancel_tasks(self) -> None:
        """Cancel the tasks; the contexts stay."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel(self._cell.end_for_peers())

    async def close(self) -> None:
        """Cancel the tasks, wait for them, then leave the contexts in reverse order."""
        self._closing = True
        self.cancel_tasks()
        if self._gone is not None:
            await self._gone.wait()
        while self._contexts:
            # A context stays in the list until it is gone, so that `cancel` finds one that takes too long.
            entered = self._contexts[-1]
            entered.leave.set()
            await entered.gone.wait()
            if entered in self._contexts:
                self._contexts.remove(entered)

    def cancel(self) -> None:
        """Cancel everything, including contexts that are being left; `close` comes before this or follows at once."""
        self.cancel_tasks()
        for entered in self._contexts:
            entered.scope.cancel()

    async def _hold_nursery(self) -> None:
        assert self._gone is not None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if self._closing:
                    self.cancel_tasks()
                self._start_pending(nursery)
                await trio.sleep_forever()
        finally:
            self._gone.set()

    def _start_pending(self, nursery: trio.Nursery) -> None:
        # In a call of its own: the variables of the task that holds the nursery live as long as the actor.
        start: Any = nursery.start_soon
        for context, function, args, name in self._pending:
            context.run(start, self._run, function, args, name=name)
        self._pending.clear()

    async def _run(self, function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        try:
            await function(*args)
        except BaseException as error:
            cancelled, rest = split_cancelled(error)
            if type(error) is TypeError and error.__traceback__ is not None and error.__traceback__.tb_next is None:
                # Only the call or its `await` can have failed, and the traceback has no line of the user's.
                error.add_note(
                    f"start_soon() takes an async function and its arguments; the function is {text_of(function, repr)}"
                )
            try:
                if rest is not None:
                    self._cell.system.lifecycle.task_failed(self._cell, rest)
                if cancelled is not None:
                    raise cancelled from None
            finally:
                del cancelled, rest  # their tracebacks would keep this frame


class _Entered:
    """One context and the task that holds it."""

    __slots__ = ("cell", "context", "gone", "inside", "leave", "result", "scope", "waiter")

    def __init__(self, cell: Cell, context: AbstractAsyncContextManager[Any]) -> None:
        self.cell = cell
        self.context = context
        self.scope = trio.CancelScope()
        self.leave = trio.Event()
        self.gone = trio.Event()
        self.result: outcome.Outcome[Any] | None = None
        self.waiter: Task | None = None

    @enable_ki_protection
    async def value(self) -> Any:
        """Wait until the context is entered, and return its value. If cancelled, cancel the context and wait until it is gone."""
        self.waiter = current_task()

        def abort(_: RaiseCancelT) -> Abort:
            self.waiter = None
            self.scope.cancel()
            return Abort.SUCCEEDED

        try:
            await wait_task_rescheduled(abort)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await self.gone.wait()
            raise
        assert self.result is not None
        return self.result.unwrap()

    def _tell(self, result: outcome.Outcome[Any]) -> None:
        self.result = result
        if self.waiter is not None:
            reschedule(self.waiter)
            self.waiter = None

    async def hold(self) -> None:
        try:
            with self.scope:
                async with self.context as value:
                    self._tell(outcome.Value(value))
                    await self.leave.wait()
        except BaseException as error:
            cancelled, rest = split_cancelled(error)
            if rest is not None:
                if self.waiter is None:  # it was entered, or nothing waits for it any more
                    self.cell.system.lifecycle.task_failed(self.cell, rest)
                else:
                    self._tell(outcome.Error(rest))
            if cancelled is not None:
                raise cancelled from None
        finally:
            if self.waiter is not None:
                self._tell(outcome.Error(RuntimeError(f"{self.cell.path} is stopping")))
            self.gone.set()
