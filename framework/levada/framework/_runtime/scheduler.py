"""The run queue: ready actors, the workers that run them, and handlers that wait.

One trio step costs as much as seventy messages, so only messages that need a step cause one:

* One *active* worker takes ready cells and runs a batch of messages of each.  It calls sync handlers and drives async ones by hand
  (``coroutine.send(None)``), which costs a plain call if they end without waiting.
* When a handler waits, its worker *stays with it* and yields the handler's trap to trio, so timeouts, nurseries, ``to_thread`` and
  `trio.lowlevel.current_task` see one ordinary task.  Another worker takes over the run queue.
* Each worker has one cancel scope and at most one unfinished handler. So killing an actor cancels the scope of the worker that stays
  with it: trio's own level-triggered cancellation, at no cost per message.  After a cancellation the worker leaves the scope and opens
  a new one before it touches another cell, however the handler ended.
* After each slice (0.5 ms) the active worker yields to trio once.

The loop in `_slice` has no branches for rare states.  A rare state is an unusual *entry* (`tokens`), an unusual *table* (paused cells
have an empty one) or an unusual *class* (dead cells).  Signals — kill, exit, a child's end — are calls that the *signal cell* runs.
This cell of the runtime is always next in the queue; a cell that is running meanwhile gets a `TURN` on top of its batch.

ContextVars: a worker runs cells in a scratch copy of the system's context and compares the two after each turn (16 ns, since they share
their storage until a variable is set).  If an actor has set a variable, the copy becomes that actor's own.

KeyboardInterrupt: everything here is protected; handlers are marked unprotected when their class is made. So Ctrl-C during a handler that
loops raises an exception in that handler and nowhere else.

Private fields used here: ``Cell._actor``, ``Cell._asking``, ``Cell._batch``, ``Cell._box``, ``Cell._extras``,
``Cell._handled``, ``Cell._idle``, ``Cell._quantum``, ``Cell._scheduler``, ``Cell._since``, ``Cell._table``.
"""

from __future__ import annotations

import contextvars
import inspect
import types
from _thread import get_ident
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from types import CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import outcome
import trio
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    current_task,
    disable_ki_protection,
    enable_ki_protection,
    reschedule,
    wait_task_rescheduled,
)

from .ask import Ask, Edge
from .cell import NO_MESSAGES, Cell, NoActor
from .phase import RUNNING, STOPPED
from .tokens import END_TURN, TURN

if TYPE_CHECKING:
    from levada.framework.identity import RemotePeer

    from .contract import System

__all__ = ["EVERY", "SLICE", "SOURCE", "RunQueue", "Worker", "coroutine_of"]

SLICE: Final = 0.0005
"""Seconds between checkpoints. Any value from 0.2 to 10 ms costs the same; timers of other tasks are late by one to one and a half slices."""

EVERY: Final = 63
"""One turn in so many is measured, of those that are no longer than a slice.

The number is odd, because in a quiet system a slice is one turn and one look at the empty queue: with an even number the last item would always
be that look.
"""


_IDLE, _SLICE_OVER, _WAITS, _OWN_CONTEXT, _CONTEXT_SET, _FAILED = range(6)

MOST_AT_ONCE: Final = 128
"""Most messages of one cell in a turn; fewer for cells with slow handlers."""

SOURCE: Final[contextvars.ContextVar[RunQueue | RemotePeer | None]] = contextvars.ContextVar(
    "levada.source", default=None
)
"""In the contexts of actors, the run queue, which knows the running actor; in a task that acts for a peer, the peer."""

_SPARE_WORKERS: Final = 8
_SWALLOWS: Final = 100
"""How often a handler may catch its cancellation and wait again before its coroutine is closed."""


@types.coroutine
def _yield_trap(trap: Any) -> Generator[Any, Any, Any]:
    return (yield trap)


class Worker:
    """One trio task that runs cells."""

    __slots__ = (
        "cell",
        "context",
        "coroutine",
        "message",
        "retired",
        "scope",
        "spent",
        "task",
        "torn",
        "trap",
        "waits",
    )

    def __init__(self, context: contextvars.Context) -> None:
        self.context = context
        self.task: Task | None = None
        self.scope: trio.CancelScope | None = None
        self.spent = False
        """Whether the scope has been cancelled."""
        self.retired = False
        self.torn = False
        """Whether a handler that could not be ended left cancel scopes open in the task."""
        self.cell: Cell | None = None
        self.message: Any = None
        self.coroutine: Any = None
        self.trap: Any = None
        self.waits: list[Edge] = []
        """What the handler waits for, by ask or send."""

    def cancel(self) -> None:
        """Cancel the handler that this worker stays with."""
        if not self.spent:
            self.spent = True
            assert self.scope is not None
            assert self.cell is not None
            self.scope.cancel(self.cell.end_for_peers())


class _TaskView:
    """Replaces a worker's coroutine in its task, so that debuggers see where the handler waits.

    trio's `iter_await_frames` follows ``cr_await``, which would end in this file, because the handler is driven by hand.
    trio calls the bound methods of the coroutine itself, so this costs nothing.
    """

    __slots__ = ("_coroutine", "_worker", "send", "throw")

    def __init__(self, coroutine: Any, worker: Worker) -> None:
        self._coroutine = coroutine
        self._worker = worker
        self.send = coroutine.send
        self.throw = coroutine.throw

    @property
    def cr_await(self) -> Any:
        handler = self._worker.coroutine
        return self._coroutine.cr_await if handler is None else handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)


class RunQueue:
    """All ready cells of one system and the workers that run them."""

    def __init__(self, system: System, *, clock: Callable[[], float], max_waiting: int) -> None:
        self.system = system
        self.clock = clock
        self.ready: deque[Cell] = deque()
        self.thread: int | None = get_ident()
        """Everything below belongs to this thread. None in a forked process, whose copy of the system does not run."""
        self.parked = True
        """No worker runs cells now: code that makes a cell ready calls `wake`."""
        self.now = clock()
        self.inline: Cell | None = None
        """The actor whose handler runs in its asker's task."""
        self.workers: dict[Task, Worker] = {}
        self.waiting = 0
        self.slice = SLICE
        self.slices = 0
        self.turn_began = self.now
        self.ended: dict[type | None, int] = {}
        """Messages handled by actors that have ended, by class; ``None`` stands for classes that had no room."""
        self._sample = iter(_SAMPLE)
        self._max_waiting = max_waiting
        self._base = contextvars.copy_context()
        self._base.run(SOURCE.set, self)
        self._scratch = self._base.copy()
        self._active: Worker | None = None
        self._spares: list[Worker] = []
        self.end = self.now + SLICE
        self._signals: Cell = _make_signal_cell(self)

    @enable_ki_protection
    def wake(self, cell: Cell) -> None:
        """Wake or start a worker, for `cell`; only while `parked`.

        Raises:
            WrongThread: called in another thread than the system's; nothing has changed. The check is only here, where it costs messages
                nothing, and a call that wakes no worker does not touch trio.
        """
        if get_ident() != self.thread:
            raise cell.wrong_thread_error("tell")
        self.parked = False
        self.now = self.clock()
        if self._active is not None:
            worker = self._active
        elif self._spares:
            worker = self._active = self._spares.pop()
        else:
            self._active = worker = Worker(self._base.copy())
            self.system.start_task(self._work, worker, name="<worker>")
            return
        assert worker.task is not None
        reschedule(worker.task)

    def forked(self, root: Cell) -> None:
        """Make all calls raise, since this is the copy of a system in a forked process: each looks at the thread before it wakes a worker."""
        self.thread = None
        self.parked = True
        cells = [root]
        for cell in cells:
            cell._idle = True
            cell._scheduler.thread = None  # a loop has a scheduler of its own
            if cell._extras is not None and cell._extras.children is not None:
                cells += cell._extras.children

    @enable_ki_protection
    def signal(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call `function` on a worker, after the running handler and before any other message."""
        signals = self._signals
        signals._box.append((function, arguments))
        running = self._active.cell if self._active is not None else None
        if running is not None and running is not signals and running._batch and running._batch[-1] is not TURN:
            running._batch.append(TURN)
        if signals._idle:
            signals._idle = False
            self.ready.appendleft(signals)
            if self.parked:
                self.wake(signals)

    @enable_ki_protection
    def requeue(self, cell: Cell) -> None:
        """Put a cell that no worker holds into the run queue, or mark it idle."""
        if cell.phase is RUNNING:
            if cell._batch or cell._box:
                if cell is self._signals:
                    self.ready.appendleft(cell)
                else:
                    self.ready.append(cell)
                if self.parked:
                    self.wake(cell)
            else:
                cell._batch = NO_MESSAGES
                cell._idle = True
        elif cell._extras is not None:
            cell._extras.queued = False

    def may_inline(self) -> bool:
        """Whether a call in the asker's task keeps the order: no such call is running and no signal waits."""
        return self._signals._idle and self.inline is None

    @enable_ki_protection
    def call_inline(self, cell: Cell, handler: Callable[[Any, Any], Any], message: Any, question: Ask) -> None:
        """Handle a message of an idle cell in the task that sends it; `handler` is sync. A worker handles a failure, so no hook runs here."""
        self.inline = cell
        cell._idle = False
        context = cell.context
        if context is None:
            context = self._scratch
        elif cell._extras is not None:
            cell._extras.touched = trio.current_time()
        clock = self.clock
        began = clock()
        try:
            result = context.run(handler, cell._actor, message)
        except BaseException as error:
            self.signal(self.system.lifecycle.raised_inline, cell, message, error)
            # The failure comes first, as on a worker: other signals of the handler (a stop, say) come after it.
            self._signals._box.insert(0, self._signals._box.pop())
            self.system.lifecycle.fail_question(cell, error)
            return
        finally:
            self.inline = None
            self.now = now = clock()
            seconds = now - began
            if seconds > SLICE:
                self.system.observe.took_long(cell, message, seconds, 1)
            if cell.context is None and context != self._base:
                cell.context = context
                self._scratch = self._base.copy()
        cell._handled += 1
        coroutine = result
        if result is not None and type(result) is not CoroutineType:
            coroutine = coroutine_of(result)
        if coroutine is not None:
            # A sync function returned an awaitable: a worker continues with it.
            cell.put_back([InlineCoroutine(coroutine, question)])
        elif cell._asking is question:
            cell._asking = None
            question.settled = True
            question.value = result
        if cell._batch or cell._box:
            cell._since = self.now
            self.ready.append(cell)
            if self.parked:
                self.wake(cell)
        else:
            cell._batch = NO_MESSAGES
            cell._idle = True

    def fail_inline(self, cell: Cell, question: Ask, error: BaseException) -> None:
        """Give an error to a worker, which handles it as an error of the handler of a question."""
        cell._asking = question
        cell.put_back([InlineCoroutine(_raise(error), question)])

    async def shielded_checkpoint(self) -> None:
        """Yield to others after inline calls. It is shielded, since these calls are done."""
        # Of many tasks that were woken together, one yields for all. Otherwise 256 askers whose answers came at once took a third longer.
        self.end = self.clock() + self.slice
        await trio.lowlevel.cancel_shielded_checkpoint()
        self.end = self.clock() + self.slice

    async def checkpoint_if_slice_over(self) -> None:
        """Run a checkpoint if a slice has passed since the last one; it may be cancelled, as nothing has been done yet."""
        if self.clock() > self.end:
            await trio.lowlevel.checkpoint()
            self.end = self.clock() + self.slice

    def slice_over(self) -> bool:
        """Whether a slice has passed since the last checkpoint."""
        return self.clock() > self.end

    def begin_slice(self) -> None:
        """Record that a checkpoint has just run."""
        self.end = self.clock() + self.slice

    def base_context(self) -> contextvars.Context:
        """Make a context for an actor that has set no ContextVar."""
        return self._base.copy()

    def claim_context(self, cell: Cell) -> None:
        """Give a cell the context that its current turn has changed, so that its hooks see it."""
        worker = self._active
        if worker is not None and worker.cell is cell and cell.context is None and worker.context != self._base:
            cell.context = worker.context

    def differs(self, context: contextvars.Context) -> bool:
        """Whether a ContextVar has been set in a copy of the base context."""
        return context != self._base

    def current_worker(self) -> Worker | None:
        """Return the worker whose handler runs in the current task or in a parent task, or None."""
        task, workers = current_task(), self.workers
        worker = workers.get(task)
        # Only a handler that waits has tasks below it; the walk to the root takes 1 of the 10 µs of an ask that waits.
        while worker is None and self.waiting and (nursery := task.parent_nursery) is not None:
            task = nursery.parent_task
            worker = workers.get(task)
        return worker

    @enable_ki_protection
    async def _work(self, worker: Worker) -> None:
        task = worker.task = current_task()
        coroutine = task.coro
        task.coro = cast("Any", _TaskView(coroutine, worker))
        self.workers[task] = worker
        try:
            while not worker.retired:
                worker.spent = False
                with trio.CancelScope() as worker.scope:
                    await self._serve(worker)
        except Exception as fault:
            if worker.torn:
                return  # trio complains about the open scopes, and has closed them
            # A bug in the runtime. Nothing can be trusted to end in order now, but the block must end.
            self.system.crash(fault)
            self.system.root_ended()
        finally:
            task.coro = coroutine
            del self.workers[task]
            if self._active is worker:
                self._active = None
                self.parked = True
                if self.ready and self.system.phase != "over":
                    # The system is being cancelled, but its actors' endings must still run.
                    self.wake(self._signals)

    async def _serve(self, worker: Worker) -> None:
        """Run cells until the worker's scope is cancelled or there are too many spare workers."""
        take = self.ready.popleft
        while True:
            if self._active is not worker:
                if len(self._spares) >= _SPARE_WORKERS:
                    worker.retired = True
                    return
                self._spares.append(worker)
                worker.cell = None  # a dead cell keeps its error, and the error keeps the frames it passed through
                await wait_task_rescheduled(self._give_up_spare)
                self.end = self.clock() + self.slice
            what = worker.context.run(self._slice, worker, take, None, worker.context)
            if what == _OWN_CONTEXT:
                cell = worker.cell
                assert cell is not None
                assert cell.context is not None
                what = cell.context.run(self._slice, worker, iter((cell,)).__next__, cell.context, self._base)
                if cell._extras is not None:
                    cell._extras.touched = trio.current_time()
                del cell
                if what == _IDLE:
                    continue
            if what == _WAITS:
                await self._stay_with_handler(worker)
                if worker.spent:
                    return
                self.end = self.clock() + self.slice
            elif what == _CONTEXT_SET:
                self._give_context(worker)
            elif what == _FAILED:
                continue
            elif what == _SLICE_OVER:
                await trio.lowlevel.checkpoint()
                self.end = self.clock() + self.slice
            else:
                self.parked = True
                await wait_task_rescheduled(_succeed)
                self.end = self.clock() + self.slice

    def _give_up_spare(self, _: RaiseCancelT) -> Abort:
        # Only the end of the whole system cancels a spare worker.
        self._spares.clear()
        return Abort.SUCCEEDED

    def _give_context(self, worker: Worker) -> None:
        """Give the scratch context to the actor whose last turn set a ContextVar."""
        assert worker.cell is not None
        worker.cell.context = worker.context
        worker.context = self._base.copy()

    @enable_ki_protection
    def _slice(
        self, worker: Worker, take: Callable[[], Cell], own: contextvars.Context | None, scratch: contextvars.Context
    ) -> int:
        """Run turns of cells until the slice is over or the worker's coroutine must act; return why."""
        clock = self.clock
        base = self._base
        ready = self.ready
        end = self.end
        spare: list[Any] = []
        then = now = self.now = clock()
        self.slices += 1
        while True:
            cell = None
            for _ in self._sample:
                try:
                    cell = take()
                except (IndexError, StopIteration):
                    worker.cell = None
                    return _IDLE
                worker.cell = cell
                if cell.context is not own:
                    return _OWN_CONTEXT
                batch = cell._batch
                if not batch:
                    batch = cell._box
                    cell._box = spare
                    cell._batch = batch
                    count = len(batch)
                    if count > 1:
                        batch.reverse()
                else:
                    count = len(batch)
                if count > 1 and count > cell._quantum:
                    count = cell._quantum
                table = cell._table
                actor = cell._actor
                message = None
                left: Any = _ONCE if count == 1 else iter(_TIMES[count])
                try:
                    for _ in left:
                        try:
                            message = batch.pop()
                        except IndexError:
                            # An earlier message of this batch emptied the mailbox.
                            cell._handled -= 1
                            break
                        try:
                            handler = table[type(message)]
                        except KeyError:
                            handler = self._find_handler(cell, message)
                        result = handler(actor, message)
                        if result is not None:
                            if type(result) is not CoroutineType:
                                if result is END_TURN:
                                    break
                                result = coroutine_of(result)
                                if result is None:
                                    continue
                            try:
                                worker.trap = result.send(None)
                            except StopIteration:
                                continue
                            worker.coroutine = result
                            worker.message = message
                            cell._handled += count - left.__length_hint__()
                            self._note_turn(cell, message, now, count)
                            return _WAITS
                    else:
                        cell._handled += count
                        if batch:
                            ready.append(cell)
                            cell._since = now
                            spare = []
                            if cell._quantum < MOST_AT_ONCE:
                                cell._quantum = min(MOST_AT_ONCE, cell._quantum * 2)
                        else:
                            cell._batch = NO_MESSAGES
                            spare = batch
                            if cell._box:
                                ready.append(cell)
                            else:
                                cell._idle = True
                        then = now
                        now = self.now = clock()
                        if scratch != base:
                            return _CONTEXT_SET
                        if now > end:
                            self._note_turn(cell, message, then, count)
                            return _SLICE_OVER
                        continue
                except BaseException as error:
                    cell._handled += count - left.__length_hint__()
                    self.system.lifecycle.raised(cell, message, error)
                    self.requeue(cell)
                    now = self.now = clock()
                    if now > end:
                        self._note_turn(cell, message, then, count)
                    # A log record keeps the error, and the error keeps this frame: no variable may keep the actor.
                    cell = actor = batch = table = message = handler = result = None  # type: ignore[assignment]
                    if scratch != base:
                        return _CONTEXT_SET
                    return _SLICE_OVER if now > end else _FAILED
                cell._handled += count - left.__length_hint__()
                if cell.phase is STOPPED and actor is not None:
                    # It has ended in this turn. This costs 0.2 of the 5.5 µs that a start, a message and an end take.
                    try:
                        self.ended[type(actor)] += cell._handled
                    except KeyError:
                        self.count_ended(actor, cell._handled)
                spare = []
                self.requeue(cell)
                then = now
                now = self.now = clock()
                if scratch != base:
                    return _CONTEXT_SET
                if now > end:
                    self._note_turn(cell, message, then, count)
                    return _SLICE_OVER
            self._sample = iter(_SAMPLE)
            if cell is not None:
                self.turn_began = then
                self.system.observe.sample(cell, now)

    def count_ended(self, actor: Any, handled: int) -> None:
        """Add the messages of an actor that has ended to the count of its class."""
        ended, kind = self.ended, type(actor)
        known = kind if kind in ended or len(ended) < _MOST_CLASSES else None
        ended[known] = ended.get(known, 0) + handled

    def _note_turn(self, cell: Cell, message: Any, began: float, count: int) -> None:
        """Check the last turn of a slice. After a turn longer than a slice, the cell gets fewer messages per turn."""
        seconds = self.clock() - began
        if seconds > SLICE:
            cell._quantum = max(1, int(count * SLICE / seconds))
            self.system.observe.took_long(cell, message, seconds, count)

    def _find_handler(self, cell: Cell, message: Any) -> Callable[[Any, Any], Any]:
        if cell.phase is RUNNING:
            return cell._actor._find_handler(type(message), cell._table)  # type: ignore[no-any-return]
        # The cell is paused: the message goes back, the turn ends.
        cell._handled -= 1
        if message is not TURN:
            cell._batch.append(message)
        return _end_turn

    async def _stay_with_handler(self, worker: Worker) -> None:
        """Drive a waiting handler to its end while another worker runs the queue."""
        cell = worker.cell
        assert cell is not None
        own = cell.context
        step = (own if own is not None else worker.context).run
        coroutine, trap, message = worker.coroutine, worker.trap, worker.message
        worker.trap = worker.message = None
        cell._worker = worker
        self.waiting += 1
        self._active = None
        self.parked = True
        if self.waiting > self._max_waiting:
            self.system.lifecycle.too_many_waiting(cell)
        if self.ready and self.parked:
            self.wake(cell)
        swallowed = 0
        # The values sent to the handler are not variables of this frame: the traceback of an error among them holds the handler's
        # frames, and those hold this one.
        values: list[Any] = []
        error: BaseException | None = None
        clock = self.clock
        began = clock()
        try:
            while True:
                try:
                    value = await _yield_trap(trap)
                except BaseException as thrown:
                    began = clock()
                    trap = step(coroutine.throw, thrown)
                else:
                    # Without `spent`, a handler whose own timeouts expire often would look like one that ignores its cancellation.
                    cancelled = (
                        worker.spent and type(value) is outcome.Error and isinstance(value.error, trio.Cancelled)
                    )
                    values.append(value)
                    del value
                    began = clock()
                    trap = step(coroutine.send, values.pop())
                    if clock() - began > SLICE:
                        self.system.observe.took_long(cell, message, clock() - began, 1)
                    if cancelled:
                        swallowed += 1
                        if swallowed >= _SWALLOWS and not current_task().child_nurseries:
                            worker.torn = not _close(coroutine)
                            raise RuntimeError(
                                f"{cell.path} caught its cancellation {swallowed} times and went on waiting"
                            )
        except StopIteration:
            pass
        except BaseException as raised:
            error = raised
        if clock() - began > SLICE:
            self.system.observe.took_long(cell, message, clock() - began, 1)
        cell._worker = None
        if cell._extras is not None:
            cell._extras.touched = trio.current_time()
        worker.coroutine = None
        worker.waits.clear()
        self.waiting -= 1
        if self._active is None:
            self._active = worker
            self.parked = False
        if own is None and worker.context != self._base:
            self._give_context(worker)
        rest = self.system.lifecycle.waited(cell, message, error)
        self.requeue(cell)
        # As in `_slice`, an error may keep this frame.
        del cell, coroutine, trap, message, own, step, error
        if rest is not None:
            try:
                raise rest
            finally:
                del rest


@attrs.define(eq=False, weakref_slot=False)
class InlineCoroutine:
    """A mailbox entry: an inline call returned this coroutine, which must answer the question."""

    coroutine: Any
    question: Ask


async def _raise(error: BaseException) -> None:
    raise error


def _close(coroutine: Any) -> bool:
    """Close a coroutine; return False if it caught that, too, as a bare ``except`` in a loop does."""
    try:
        coroutine.close()
    except RuntimeError:
        if coroutine.cr_frame is not None:
            return False
        raise
    return True


_SAMPLE: Final[Iterable[None]] = (None,) * EVERY
"""A loop around the loop costs nothing, unlike a counter. The iterator lives across slices, so quiet systems are measured too."""

_MOST_CLASSES: Final = 1000
"""Most classes whose ended actors are counted by class, since a program may make new classes without end."""


class _Once(tuple[None]):
    """The tuple that a turn of one message loops over, without making an iterator: 20 of the 850 ns of a hop. Its length hint is always 0."""

    __slots__ = ()

    def __length_hint__(self) -> int:
        return 0


_ONCE: Final = _Once((None,))
_TIMES: Final = tuple((None,) * count for count in range(MOST_AT_ONCE + 1))
"""Tuples for loops of a given number of rounds; for one round, 30 ns faster than `itertools.repeat`."""


def _succeed(_: RaiseCancelT) -> Abort:
    return Abort.SUCCEEDED


def coroutine_of(result: Any) -> Coroutine[Any, Any, Any] | None:
    """Wrap an awaitable that is no coroutine in one: of compiled code, of `types.coroutine`, of a class with ``__await__``.

    Returns:
        The coroutine. ``None`` for a value that cannot be awaited, and for channel handles: these are answers, although some can be awaited.
    """
    kind = type(result)
    if hasattr(kind, "__await__"):
        return None if hasattr(kind, "attachment_kind") else _drive(result)
    if kind is GeneratorType and result.gi_code.co_flags & inspect.CO_ITERABLE_COROUTINE:
        return _drive(result)
    return None


@disable_ki_protection
async def _drive(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _end_turn(_actor: Any, _message: Any) -> Any:
    return END_TURN


def _make_signal_cell(scheduler: RunQueue) -> Cell:
    """Make the cell that runs signals; it has no actor and no parent."""
    signals = Cell(scheduler, NoActor(), None, "<signals>", 0)
    signals._actor = None

    def run_signal(_: Any, signal: tuple[Callable[..., object], tuple[Any, ...]]) -> Any:
        function, arguments = signal
        function(*arguments)
        # Each signal is a turn, and `requeue` puts the signal cell first again, so signals that a signal sends overtake messages too.
        return END_TURN if signals._batch or signals._box else None

    signals._table = {tuple: run_signal}
    return signals
