"""Questions in flight: the envelope of an ask, the handle to answer it later, and the graph of waiting actors.

The first event settles an `Ask`: the answer, a failure, the deadline, or the end of the asker's wait. Later events are ignored; a late answer
is counted.

Private fields used here: ``Cell._worker``.
"""

from __future__ import annotations

import sys
import threading
from _thread import get_ident
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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

from levada.framework.errors import ActorStopped, AskCycle, AskTimeout, NoValue
from levada.framework.ref import DEFAULT_TIMEOUT
from levada.framework.text import error_text

from .channel_core import handles_in
from .phase import PAUSED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from levada.framework.identity import RemotePeer
    from levada.framework.links import Reason
    from levada.framework.timers import Timer

    from .cell import Cell
    from .contract import ThreadInbox
    from .scheduler import RunQueue, Worker

__all__ = [
    "BEFORE_ASKS", "AddressedMessage", "Ask", "Edge", "OpenAsks", "RemoteAsk", "RemoteTell", "Reply", "ThreadAsk", "WaitGraph", "Wrapped",
    "content_of", "prepare_to_ask", "question_name", "stopped_error",
]  # fmt: skip

R = TypeVar("R")


BEFORE_ASKS: dict[Task, Callable[[], Awaitable[object]]] = {}
"""Functions that tasks call before they ask; a durable actor's writes its records to the disk. Nearly always empty: a check costs 15 ns."""


async def prepare_to_ask() -> None:
    """Do what `BEFORE_ASKS` says for the current task, or for the task whose nursery it runs in."""
    task: Task | None = current_task()
    while task is not None:
        before = BEFORE_ASKS.get(task)
        if before is not None:
            await before()
            return
        task = task.parent_nursery.parent_task if task.parent_nursery is not None else None


def content_of(entry: Any) -> Any:
    """Return the message of a mailbox entry, wrapped or not."""
    return entry.message if isinstance(entry, Wrapped) else entry


def stopped_error(cell: Cell, reason: Reason, message: Any, *, begun: bool = False) -> ActorStopped:
    """Build the error for a message that `cell` did not handle; if it had `begun` to, its exception becomes the cause."""
    message = content_of(message)
    error = getattr(reason, "error", None)
    why = f"failed: {error_text(error)}" if error is not None else f"has stopped ({type(reason).__name__.lower()})"
    stopped = ActorStopped(f"{cell.where} {why}", actor=cell.path, reason=reason, message=message)
    if begun:
        stopped.__cause__ = error
    return stopped


class AddressedMessage:
    """A mixin of messages of levada's own that bring a message to one of several things behind an actor. A time-out names both."""

    __slots__ = ()

    @property
    def addressed(self) -> str:
        """The name of the message's class, and whom it is for."""
        raise NotImplementedError


def question_name(message: Any) -> str:
    """Return what a time-out calls a question: its class, and whom it was for if that is not the actor."""
    return message.addressed if isinstance(message, AddressedMessage) else type(message).__name__


class Wrapped:
    """A mailbox entry with a message in it."""

    __slots__ = ("message",)

    message: Any


class Ask(Wrapped):
    """A question in a mailbox and the task that waits for the answer."""

    __slots__ = ("asker_gone", "edge", "error", "settled", "target", "task", "timer", "value")

    asker_gone: Callable[[], None]
    """Set if the question went to another system: called if the asker no longer waits, so that the system there learns of it."""
    edge: Edge
    """Set if a handler waits for the answer; `WaitGraph` says more."""

    def __init__(self, message: Any, target: Cell) -> None:
        self.message = message
        self.target = target
        self.settled = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.task: trio.lowlevel.Task | None = None
        self.timer: Timer | None = None

    def answer(self, value: Any) -> None:
        """Deliver the answer, or count it as a late reply."""
        if self.settled:
            self.target.system.counters.late_replies += 1
            for handle in handles_in(value):
                handle.drop(lost=False)
        else:
            self._settle(value, None)

    def fail(self, error: BaseException) -> None:
        """Fail the question: the asker's `ask` raises `error`."""
        if not self.settled:
            self._settle(None, error)

    def start_timer(self, timeout: float | None) -> None:
        """Fail with `AskTimeout` after `timeout` seconds."""
        system = self.target.system
        if timeout is DEFAULT_TIMEOUT:
            timeout = system.ask_timeout
        if timeout is not None and not self.settled:
            self.timer = system.heap.after(timeout, self._expire)

    def timed_out(self, seconds: float) -> AskTimeout:
        """Build the error for an answer that did not come in `seconds`."""
        what = f"{self.target.where} did not answer {question_name(self.message)} in {seconds:g} s"
        return AskTimeout(what, actor=self.target.path, seconds=seconds, message=self.message)

    def withdraw(self) -> None:
        """Settle the question, since the asker no longer waits, so that no handler starts on it."""
        self.settled = True
        self.task = None
        if self.timer is not None:
            self.timer.cancel()
        self._tell_gone()

    @enable_ki_protection
    async def wait(self) -> Any:
        """Wait until settled; a cancellation withdraws the question."""
        if not self.settled:
            self.task = current_task()
            await wait_task_rescheduled(self._abort)
        return self.result()

    def _abort(self, _: RaiseCancelT) -> Abort:
        self.withdraw()
        return Abort.SUCCEEDED

    def result(self) -> Any:
        """Return the answer, or raise the error."""
        error = self.error
        if error is None:
            return self.value
        self.error = None
        try:
            raise error
        finally:
            del error  # otherwise the traceback, this frame and the error form a cycle

    def pass_over(self) -> None:
        """Record that no handler starts on the question, since it was settled before. The asker still has its message."""

    @property
    def has_room(self) -> bool:
        """Whether the way to the asker has room for an answer of any size."""
        return True

    async def room(self) -> None:
        """Wait until it has, or nobody waits for the answer."""
        await trio.lowlevel.checkpoint()

    def _expire(self) -> None:
        assert self.timer is not None
        self.fail(self.timed_out(self.timer.delay))
        self._tell_gone()

    def _tell_gone(self) -> None:
        gone: Callable[[], None] | None = getattr(self, "asker_gone", None)
        if gone is not None:
            gone()

    @enable_ki_protection
    def _settle(self, value: Any, error: BaseException | None) -> None:
        self.settled = True
        self.value = value
        self.error = error
        if self.timer is not None:
            self.timer.cancel()
        if self.task is not None:
            reschedule(self.task)


class ThreadAsk(Ask):
    """A question from a thread that blocks until the answer."""

    __slots__ = ("ready",)

    def __init__(self, message: Any, target: Cell) -> None:
        super().__init__(message, target)
        self.ready = threading.Event()

    def _settle(self, value: Any, error: BaseException | None) -> None:
        super()._settle(value, error)
        self.ready.set()

    def block(self, inbox: ThreadInbox, timeout: float | None) -> Any:
        """Wait in the asking thread."""
        if not self.ready.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            inbox.call(self.withdraw)
            raise self.timed_out(timeout or 0.0)
        return self.result()


class RemoteTell(Wrapped):
    """A message that came over a connection."""

    __slots__ = ("context", "peer")

    def __init__(self, message: Any, peer: RemotePeer | None, context: object = None) -> None:
        self.message = message
        self.peer = peer
        self.context = context
        """The tracing context of the sender, in a traced system."""


class RemoteAsk(Ask):
    """A question that came over a connection."""

    __slots__ = ("context", "peer")

    def __init__(self, message: Any, target: Cell, peer: RemotePeer | None, context: object = None) -> None:
        super().__init__(message, target)
        self.peer = peer
        self.context = context
        """The tracing context of the asker, in a traced system."""

    def pass_over(self) -> None:
        """End the handles in the message, since nothing else here has them."""
        for handle in handles_in(self.message):
            handle.drop(lost=False)


class OpenAsks(set[Ask]):
    """Asks that an actor answers later. Settled ones are removed each time the set has doubled."""

    __slots__ = ("_sweep_at",)

    def __init__(self) -> None:
        super().__init__()
        self._sweep_at = 16

    def take(self, question: Ask) -> None:
        """Add an ask; the average cost does not grow with the number of open asks."""
        if len(self) >= self._sweep_at:
            self.difference_update([ask for ask in self if ask.settled])
            self._sweep_at = max(16, 2 * len(self))
        self.add(question)


class Reply(Generic[R]):
    """The right to answer one ask after its handler has returned; made by `Actor.reply_later`.

    If it is dropped without an answer, the ask fails with `NoValue`. If the actor ends or restarts first, the ask fails with `ActorStopped`,
    with the actor's exception as its cause: at once after a failure; else after the hook and the tasks of the actor, which may answer.
    """

    __slots__ = ("__weakref__", "_ask", "_open")

    def __init__(self, ask: Ask, open_asks: OpenAsks) -> None:
        self._ask = ask
        self._open = open_asks
        open_asks.take(ask)

    @property
    def wanted(self) -> bool:
        """Whether the asker still waits: false after an answer, a timeout, or a cancellation of the asker."""
        return not self._ask.settled

    @property
    def has_room(self) -> bool:
        """Whether the way to the asker has room for a large answer: over a connection, few bytes of earlier answers still wait."""
        return self._ask.has_room

    async def room(self) -> None:
        """Wait until the way to the asker has room (`has_room`), or the asker no longer waits: before a large answer is made.

        Those that wait for the same connection have their turns one after the other, as answers leave, or are given up: answer soon after it.
        For an asker in this system there always is room. Over a connection, too many bytes of answers that wait make a large one fail
        (`levada.actors.aqueduct.PeerConfig.max_answer_bytes`).

        Cancellation:
            the turn is the next one's.

        Example:
            ::

                async def _read(self, question: ReadFile, reply: Reply[bytes]) -> None:  # a task of the actor
                    while reply.wanted:
                        await reply.room()
                        async with self._few:  # readers at a time
                            if reply.wanted and reply.has_room:
                                reply.send(await trio.Path(question.name).read_bytes())
        """
        await self._ask.room()

    def send(self, value: R) -> None:
        """Answer. If the asker no longer waits, the answer is ignored and counted as late."""
        question = self._ask
        if get_ident() != question.target._scheduler.thread:  # saves the call
            question.target.check_thread("answer of")
        question.answer(value)
        self._open.discard(question)

    def fail(self, error: BaseException) -> None:
        """Fail the question: the asker's `Ref.ask` raises `error`; the actor itself does not fail."""
        question = self._ask
        question.target.check_thread("answer of")
        question.fail(error)
        self._open.discard(question)

    # A default argument, since the names of modules are gone when the interpreter ends.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        ask = self._ask
        if not ask.settled and not is_finalizing():
            # Collection may happen in any thread at any time, so the failure is left to the system's thread.
            ask.target.system.inbox.call(_give_up, ask)

    def __repr__(self) -> str:
        return f"<Reply to {type(self._ask.message).__name__}, {'wanted' if self.wanted else 'settled'}>"


def _give_up(ask: Ask) -> None:
    """Fail a question whose `Reply` was dropped. If its actor is ending, the end fails it, and says why."""
    if ask.target.phase is not PAUSED:
        ask.fail(NoValue(f"the answer to {type(ask.message).__name__} was given up"))


class Edge:
    """A handler, named by its worker, that waits for an actor: for the answer to a question, or for room in a mailbox."""

    __slots__ = ("_question", "_room", "worker")

    def __init__(self, worker: Worker, question: Ask | None, room: Cell) -> None:
        self.worker = worker
        self._question = question
        self._room = room

    @property
    def target(self) -> Cell:
        """The actor that has the question now, or whose mailbox is full."""
        return self._room if self._question is None else self._question.target


class WaitGraph:
    """The graph of which handlers wait for which actors. It refuses a wait that would close a cycle.

    An edge goes from a worker, whose handler waits, to a cell.  A running handler always adds the last edge of a cycle, so a check at
    each new edge finds every cycle.  Tasks outside the handlers (`Actor.start_soon`, code outside actors) block no mailbox, so their
    waits are not edges; waits in a nursery inside a handler are.

    The edge of a question goes where the question goes: to the routee of a router, to the entity of a shard.
    """

    def __init__(self, scheduler: RunQueue) -> None:
        self._scheduler = scheduler

    def begin(self, target: Cell, message: Any) -> Edge | None:
        """Record that the current task waits: for the answer, if `message` is a question, or for room in the mailbox of `target`.

        Raises:
            AskCycle: a chain of waits leads back to this handler. If `message` is a question, it was withdrawn.
        """
        worker = self._scheduler.current_worker()
        if worker is None or worker.cell is None:
            return None
        question = message if isinstance(message, Ask) else None
        edge = Edge(worker, question, target)
        has = target if question is None else question.target  # `edge.target`, without the call
        if has is worker.cell or has._worker is not None:  # else it waits for nobody
            try:
                self._refuse_circle(worker.cell, has)
            except AskCycle:
                if question is not None:
                    question.withdraw()
                raise
        worker.waits.append(edge)
        if question is not None:
            question.edge = edge
        return edge

    def forward(self, question: Ask, target: Cell) -> None:
        """Record that a question is passed on to `target`, for which the asker waits from now on.

        If `begin` comes after this, as for questions that are taken at once, it finds the cycle.

        Raises:
            AskCycle: `target` already waits for the asker; nothing has changed.
        """
        edge: Edge | None = getattr(question, "edge", None)
        if edge is not None:
            assert edge.worker.cell is not None
            self._refuse_circle(edge.worker.cell, target)
        question.target = target

    def end(self, edge: Edge | None) -> None:
        """Record that the wait is over."""
        if edge is not None:
            edge.worker.waits.remove(edge)

    def refuse_own_end(self, cell: Cell) -> None:
        """Raise `AskCycle` in a handler that would wait for the end of its own actor."""
        worker = self._scheduler.current_worker()
        if worker is not None and worker.cell is cell:
            self._refuse_circle(cell, cell)

    def edges(self) -> list[tuple[str, str]]:
        """List the waits as pairs of paths."""
        waiting = [
            (worker.cell, worker.waits) for worker in self._scheduler.workers.values() if worker.cell is not None
        ]
        return [(cell.path, edge.target.path) for cell, edges in waiting for edge in edges]

    def _refuse_circle(self, asker: Cell, target: Cell) -> None:
        cycle = self._path(target, asker)
        if cycle is not None:
            names = (asker.path, *(cell.path for cell in cycle))
            what = f"{' waits for '.join(names)}: none of them would ever go on"
            raise AskCycle(what, actor=target.path, cycle=names)

    @staticmethod
    def _path(start: Cell, goal: Cell) -> list[Cell] | None:
        """Return the chain of waits from `start` to `goal`, both included; depth first, usually one to three steps."""
        trail: list[Cell] = []
        seen: set[Cell] = set()
        stack: list[tuple[Cell, int]] = [(start, 0)]
        while stack:
            cell, depth = stack.pop()
            del trail[depth:]
            trail.append(cell)
            if cell is goal:
                return trail
            if cell in seen or cell._worker is None:
                continue
            seen.add(cell)
            stack += [(edge.target, depth + 1) for edge in cell._worker.waits]
        return None
