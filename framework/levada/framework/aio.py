"""Actor systems in asyncio programs: `open_in_loop` and `open_in_thread`. Both give a `Portal`.

The module is called ``aio``: a module ``asyncio`` would hide the standard library's from code that imports both.

* `open_in_loop` runs trio as a guest of the asyncio loop, in the same thread.  Refs and channels can be used directly wherever a call
  does not wait: ``ref.tell(…)``, ``system.spawn(…)``, ``sender.send_nowait(…)``.
* `open_in_thread` runs trio in a thread of its own.  asyncio code uses `FromThread.tell` and the methods of the portal.  A slow
  handler does not hold up the loop.

Whatever waits goes through the portal: `Portal.run`, `Portal.ask`, `Portal.iterate`, `Portal.enter`.  In the other direction, code in
trio calls `Portal.run_asyncio`.  Results, exceptions, cancellations and context variables cross in both directions, and a
cancelled wait ends only when the other side has ended.

Example:
    >>> import asyncio
    >>> from levada.framework import Actor, ActorSystem, Asks, aio, handles, message
    >>> @message
    ... class Double(Asks[int]):
    ...     n: int
    >>> class Calculator(Actor[Double]):
    ...     @handles
    ...     def double(self, m: Double) -> int:
    ...         return 2 * m.n
    >>> async def main() -> None:
    ...     async with aio.open_in_loop(ActorSystem()) as portal:
    ...         calculator = portal.system.spawn(Calculator)
    ...         print(await portal.ask(calculator, Double(21)))
    >>> asyncio.run(main())
    42
"""

# How it ends, whatever the reason.  One task of asyncio, the keeper, lives as long as the run of trio.  `asyncio.run` cancels all tasks
# at its end and waits for them; the keeper then ends the system and waits for trio, so the loop never closes under a run.
# Ctrl-C under `asyncio.run` cancels the main task, which leaves the block.  A second one raises KeyboardInterrupt out of the loop, and
# `asyncio.run` cancels all tasks, the keeper too: the phases are skipped.
#
# asyncio's handler of SIGINT raises at any bytecode, and a run of trio does not survive that in its own code.  So while trio is a guest in
# the main thread, the handler runs as a callback of the loop, between two ticks of trio, unless the signal interrupts what trio itself would
# interrupt: a handler, or other code of a task that is not protected.  There it runs at once, so Ctrl-C ends a handler that never returns.
#
# Calls from asyncio run in trio's system nursery and not in the system's: each ends before the first phase of the system's end, so
# nothing that asyncio holds open outlives the actors it talks to.

from __future__ import annotations

import asyncio
import contextvars
import enum
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeVar, TypeVarTuple

import attrs
import trio
from outcome import Error, Outcome, Value, capture
from trio.lowlevel import currently_ki_protected, in_trio_task, spawn_system_task, start_guest_run

from .errors import ActorStopped, ConfigurationError, LevadaError
from .links import SHUTDOWN
from .message import Question
from .ref import DEFAULT_TIMEOUT, Ref
from .system import ActorSystem

__all__ = ["Portal", "TaskCancelled", "open_in_loop", "open_in_thread"]

M = TypeVar("M")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_Start = Callable[[Callable[[], Awaitable[None]], asyncio.AbstractEventLoop, Callable[[Outcome[None]], None]], None]


@attrs.define(eq=False, slots=False, str=False)
class TaskCancelled(LevadaError):
    """An asyncio task that trio waited for in `Portal.run_asyncio` was cancelled by other code."""


class _State(enum.Enum):
    NEW = enum.auto()
    ENTERING = enum.auto()
    OPEN = enum.auto()
    ENDING = enum.auto()


@attrs.define(eq=False)
class _Call:
    """An async function of trio that asyncio waits for."""

    function: Callable[[], Awaitable[Any]]
    done: asyncio.Future[Any]
    """Gets the outcome of the function, or None if it was cancelled."""
    context: contextvars.Context = attrs.field(factory=contextvars.copy_context)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    over: trio.Event = attrs.field(factory=trio.Event)


class Portal:
    """The way into an actor system for the tasks of one asyncio loop; made by `open_in_loop` and `open_in_thread`.

    ``async with`` enters the system and ends it, in the phases of `ActorSystem`.  A cancellation while the system ends skips the
    phases.  If the system ends by itself because of an error that no supervisor handled, the task inside the block is cancelled and the
    error comes out of the block.  The end of the loop ends the system too.

    All methods belong to the loop's thread, except `run_asyncio`, which is for code in trio.
    """

    def __init__(self, system: ActorSystem, start: _Start) -> None:
        self.system = system
        """The system. With `open_in_thread`, use it only inside `call` and `run`."""
        self._start = start
        self._state = _State.NEW
        self._calls: dict[_Call, None] = {}
        self._leaving = trio.Event()
        self._phases = trio.CancelScope()

    async def __aenter__(self) -> Self:
        if self._state is not _State.NEW:
            raise ConfigurationError("this portal was entered before; make a new one")
        self._state = _State.ENTERING
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[Any] = self._loop.create_future()
        entered: asyncio.Future[Any] = self._loop.create_future()
        self._start(partial(self._main, entered), self._loop, self._finished)
        cancelled = None
        while not (entered.done() or self._over.done()):
            try:
                await asyncio.wait([entered, self._over], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                cancelled = error  # entering takes a few steps of trio and waits for nothing else
        self._keeper = asyncio.create_task(self._keep(), name=f"levada {self.system.name}")
        if cancelled is not None:
            await self._end()
            raise cancelled
        if self._over.done():
            self._over.result().unwrap()
        self._block = _Block(self._over)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        own = await self._block.close(error)
        cancelled = await self._end()
        self._over.result().unwrap()
        if cancelled is not None:
            raise cancelled
        return own is not error

    async def run(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run an async function of trio and wait for it. It has the context variables of the caller.

        Raises:
            ActorStopped: the system ended before the function did.
            ConfigurationError: called in trio or in another loop.
            BaseException: what the function raised.

        Cancellation:
            the function is cancelled, and the wait ends when it has ended.  Its result is dropped if it had just finished.
        """
        call = self._call(partial(function, *args))
        cancelled = await self._wait(call)
        if cancelled is not None and not isinstance(call.done.result(), Error):
            raise cancelled
        return self._result(call)  # type: ignore[no-any-return]

    async def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function in trio's thread, ``await portal.call(lambda: portal.system.spawn(Counter))``; otherwise like `run`."""

        async def called() -> T:
            return function(*args)

        return await self.run(called)

    async def ask(self, ref: Ref[M], message: Question[M, T], *, timeout: float | None = DEFAULT_TIMEOUT) -> T:
        """Send a question to an actor and return its answer: `Ref.ask`, with the same errors and the same cancellation."""
        return await self.run(partial(ref.ask, message, timeout=timeout))

    def iterate(self, items: AsyncIterable[T]) -> AsyncIterator[T]:
        """Iterate over a `Receiver`, or any other async iterable of trio: ``async for price in portal.iterate(receiver)``.

        The end of the channel ends the loop, and its errors come out of it.  This closes nothing: close the receiver when you stop early.

        Cancellation: nothing is lost. An item that was already taken is the first one of the next step of the same iterator.
        """
        return _Iterator(self, aiter(items))

    @asynccontextmanager
    async def enter(self, context: AbstractAsyncContextManager[T]) -> AsyncGenerator[T, None]:
        """Hold an async context manager of trio open: ``async with portal.enter(rsocket.serve(…)) as listener``.

        It is entered and left in one task of trio, and sees the error or the cancellation that ends the block.  If it fails
        meanwhile, the task inside the block is cancelled and the error comes out of the block.

        Raises:
            ActorStopped: the system ended before the context manager was entered.
            BaseException: what the context manager raised.
        """
        entered: asyncio.Future[Any] = self._loop.create_future()
        leave = trio.Event()
        reason: BaseException | None = None

        async def hold() -> None:
            async with context as value:
                self._deliver(entered.set_result, value)
                await leave.wait()
                if reason is not None:
                    raise reason

        call = self._call(hold)
        try:
            await asyncio.wait([entered, call.done], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._soon(call.scope.cancel)
            await self._wait(call)
            raise
        if not entered.done():
            self._result(call)
        block = _Block(call.done)
        try:
            yield entered.result()
        except BaseException as error:  # noqa: BLE001  # it goes into the context manager, and comes out there
            reason = await block.close(error)
        else:
            await block.close(None)
        self._soon(call.scope.cancel if isinstance(reason, asyncio.CancelledError) else leave.set)
        cancelled = await self._wait(call) or reason
        if isinstance(cancelled, asyncio.CancelledError) and not isinstance(call.done.result(), Error):
            raise cancelled
        self._result(call)

    async def run_asyncio(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run an async function of asyncio as a task of the loop and wait for it; for handlers and other code in trio.

        Raises:
            TaskCancelled: other code cancelled the task, or the loop has ended.
            ConfigurationError: called outside of a task of trio.
            BaseException: what the function raised.

        Cancellation: the task is cancelled, and the wait ends when it has ended.
        """
        if not in_trio_task():
            raise ConfigurationError("run_asyncio() is for code in trio; in asyncio await the function directly")
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        tasks: list[asyncio.Task[T]] = []

        async def work() -> T:
            return await function(*args)

        def start() -> None:
            task = self._loop.create_task(work())
            task.add_done_callback(lambda _: token.run_sync_soon(done.set))
            tasks.append(task)

        if not self._deliver(start):
            raise TaskCancelled("the asyncio loop has ended")
        try:
            await done.wait()
        except trio.Cancelled:
            self._deliver(lambda: tasks[0].cancel())
            with trio.CancelScope(shield=True):
                await done.wait()
            if not tasks[0].cancelled():
                tasks[0].result()
            raise
        if tasks[0].cancelled():
            raise TaskCancelled(f"the asyncio task {tasks[0].get_name()} was cancelled by other code")
        return tasks[0].result()

    # ------------------------------------------------------------ in trio

    async def _main(self, entered: asyncio.Future[Any]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._phases:
            async with self.system:
                self._state = _State.OPEN
                self._deliver(entered.set_result, None)
                try:
                    await self._leaving.wait()
                finally:
                    self._state = _State.ENDING
                    with trio.CancelScope(shield=True):
                        for call in self._calls:
                            call.scope.cancel()
                        for call in list(self._calls):
                            await call.over.wait()

    def _begin(self, call: _Call) -> None:
        if self._state is _State.OPEN:
            self._calls[call] = None
            spawn_system_task(self._carry, call, name="<portal>", context=call.context)
        else:
            self._deliver(_settle, call, None)

    async def _carry(self, call: _Call) -> None:
        result: Outcome[Any] | None = None
        try:
            with call.scope:
                result = Value(await call.function())
        except trio.Cancelled:
            raise
        except BaseException as error:  # noqa: BLE001  # all are for the caller, who may expect this one
            result = Error(error)
        finally:
            del self._calls[call]
            call.over.set()
            self._deliver(_settle, call, result)

    def _deliver(self, function: Callable[..., object], *args: Any) -> bool:
        """Call a function in the loop; return False if the loop has ended, which ends the system."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._leaving.set()
            return False
        return True

    # ------------------------------------------------------------ in asyncio

    def _call(self, function: Callable[[], Awaitable[Any]]) -> _Call:
        if self._state in (_State.NEW, _State.ENTERING):
            raise ConfigurationError("this portal was not entered: async with open_in_loop(…) as portal")
        if in_trio_task():
            raise ConfigurationError("a portal is for code in asyncio; in trio await the function directly")
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigurationError("this portal belongs to another asyncio loop; open one in this loop")
        call = _Call(function, self._loop.create_future())
        if not self._soon(self._begin, call):
            call.done.set_result(None)
        return call

    def _result(self, call: _Call) -> Any:
        result = call.done.result()
        if result is None:
            what = f"the actor system {self.system.name!r} has ended"
            raise ActorStopped(what, actor="/", reason=SHUTDOWN)
        return result.unwrap()

    async def _wait(self, call: _Call) -> asyncio.CancelledError | None:
        """Wait until a call has ended; a cancellation cancels the call and is returned."""
        cancelled = None
        while not call.done.done():
            try:
                await asyncio.wait([call.done])
            except asyncio.CancelledError as error:
                cancelled = error
                self._soon(call.scope.cancel)
        return cancelled

    def _soon(self, function: Callable[[*Ts], object], *args: *Ts) -> bool:
        """Call a function in trio, in the order of the calls; return False if the run of trio is over."""
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            return False
        return True

    def _finished(self, result: Outcome[None]) -> None:
        for call in list(self._calls):  # only if trio itself broke down
            _settle(call, None)
        self._over.set_result(result)

    async def _keep(self) -> None:
        try:
            await asyncio.wait([self._over])
        except asyncio.CancelledError:
            await self._end()

    async def _end(self) -> asyncio.CancelledError | None:
        """End the system and wait for it; a cancellation skips the phases and is returned."""
        self._soon(self._leaving.set)
        last = self._over if asyncio.current_task() is self._keeper else self._keeper
        cancelled = None
        while not last.done():
            try:
                await asyncio.wait([last])
            except asyncio.CancelledError as error:
                cancelled = error
                self._soon(self._phases.cancel)
        return cancelled


def open_in_loop(system: ActorSystem) -> Portal:
    """Run a new system as a guest of the running asyncio loop.

    ``async with open_in_loop(ActorSystem()) as portal`` enters it.  trio runs in the thread of the loop.  A loop carries one run of
    trio; a second system goes into the same run: ``async with portal.enter(ActorSystem("second")) as second``.

    Raises:
        ConfigurationError: on entering: the loop's thread runs trio already.
    """
    return Portal(system, _start_in_loop)


def open_in_thread(system: ActorSystem) -> Portal:
    """Run a new system in a thread of its own.

    ``async with open_in_thread(ActorSystem()) as portal`` enters it.  The thread ends with the block.
    """
    return Portal(system, partial(_start_in_thread, system.name))


def _start_in_loop(
    main: Callable[[], Awaitable[None]], loop: asyncio.AbstractEventLoop, finished: Callable[[Outcome[None]], None]
) -> None:
    if trio.lowlevel.in_trio_run():
        what = "this thread runs trio already; use Portal.enter(system) for a second system, or open_in_thread(system)"
        raise ConfigurationError(what)
    interrupts = _Interrupts(loop)

    def end(result: Outcome[None]) -> None:
        finished(result)
        interrupts.restore()

    start_guest_run(
        main,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        run_sync_soon_not_threadsafe=loop.call_soon,
        done_callback=end,
        host_uses_signal_set_wakeup_fd=True,  # asyncio does, on all its loops
    )


class _Interrupts:
    """Keeps the program's handler of SIGINT out of trio's code until `restore`.

    Python's own handler is left alone, because trio replaces it by one that does the same.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._before = signal.getsignal(signal.SIGINT)
        self._raised = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and callable(self._before) and self._before is not signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if currently_ki_protected() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, number, None)
        else:
            self._deliver(number, frame)

    def _deliver(self, number: int, frame: FrameType | None) -> None:
        assert callable(self._before)
        try:
            self._before(number, frame)
        except BaseException:
            self._raised = True
            raise

    def restore(self) -> None:
        """Put the handler back, or Python's for that of an `asyncio.Runner` that has ended: it removes only a handler that it finds."""
        if signal.getsignal(signal.SIGINT) == self._interrupted:
            task = self._before.keywords.get("main_task") if isinstance(self._before, partial) else None
            ended = isinstance(task, asyncio.Task) and (task.done() or self._raised)
            signal.signal(signal.SIGINT, signal.default_int_handler if ended else self._before)


def _start_in_thread(
    name: str,
    main: Callable[[], Awaitable[None]],
    loop: asyncio.AbstractEventLoop,
    finished: Callable[[Outcome[None]], None],
) -> None:
    def end(result: Outcome[None]) -> None:
        thread.join()  # it has only to return
        finished(result)

    def work() -> None:
        result = capture(trio.run, main)
        try:
            loop.call_soon_threadsafe(end, result)
        except RuntimeError:
            return  # the loop has ended, and nothing waits for this thread

    # A daemon, so that a program whose loop was closed under the portal can end.
    thread = threading.Thread(target=work, name=f"levada {name}", daemon=True)
    thread.start()


class _Block:
    """The task inside an ``async with`` block, which is cancelled when what the block stands on has ended."""

    def __init__(self, over: asyncio.Future[Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._open = True
        self._cut = False
        over.add_done_callback(self._cancel)

    def _cancel(self, _: asyncio.Future[Any]) -> None:
        if self._open:
            self._cut = self._task.cancel()

    async def close(self, error: BaseException | None) -> BaseException | None:
        """Leave the block; return its error, or None if that is this object's own cancellation."""
        self._open = False
        if not self._cut:
            return error
        if not isinstance(error, asyncio.CancelledError):
            try:
                await asyncio.sleep(0)  # the block ended without noticing
            except asyncio.CancelledError:
                pass
        ours = self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)
        return None if ours else error


class _Iterator(Generic[T]):
    def __init__(self, portal: Portal, items: AsyncIterator[T]) -> None:
        self._portal = portal
        self._items = items
        self._taken: list[T] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._taken:
            await self._portal.run(self._take)
        return self._taken.pop(0)

    async def _take(self) -> None:
        self._taken.append(await anext(self._items))


def _settle(call: _Call, result: Outcome[Any] | None) -> None:
    if not call.done.done():
        call.done.set_result(result)
