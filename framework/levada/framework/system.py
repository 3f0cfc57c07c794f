"""`ActorSystem`: the one nursery that everything lives in, and its orderly end.

Private fields used here: ``Cell._actor``, ``Actor._cell``, ``Cell._extras``, ``Actor._has_start``,
``Actor._is_loop``, ``Cell._table``.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import random
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, TypeVarTuple, Unpack, overload

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._runtime.ask import Ask, WaitGraph, content_of, stopped_error
from ._runtime.cell import Cell
from ._runtime.contract import SystemCounters
from ._runtime.host import split_cancelled
from ._runtime.kinds import make_cell
from ._runtime.lifecycle import Lifecycle
from ._runtime.observer import Observer
from ._runtime.phase import RUNNING, STOPPED
from ._runtime.scheduler import RunQueue
from ._runtime.tokens import START, Stop
from ._runtime.virtual_time import platform_of_run
from .actor import Actor
from .actor import actor as function_actor
from .durations import is_duration
from .errors import ActorError, ActorStopped, ConfigurationError, LevadaError, MailboxFull, NameTaken, wrong_thread
from .events import DeadLetters, EventStream, RateLimitedLog
from .failure_log import FailureLog, note_asyncio
from .handlers import find_handler
from .links import CANCELLED, KILLED, SHUTDOWN
from .mailbox import MailboxPolicy, unbounded
from .message import Asks, fits, reply_type
from .platform import PLATFORM
from .registry import Groups, Registry
from .supervision import RestartPolicy, SpawnOptions, Supervised, Supervision
from .text import counted, exc_info
from .timers import TimerHeap
from .tracing import TRACING

if TYPE_CHECKING:
    from .ref import Ref
    from .tracing import Tracing

__all__ = ["PHASES", "ActorSystem", "Phase", "Statistics"]

logger = logging.getLogger("levada.framework.system")

M = TypeVar("M")
Ts = TypeVarTuple("Ts")

Phase = Literal["accept", "drain", "close", "flush"]
"""A phase of a system's end: one of `PHASES`."""
_SET_ON_ENTERING: Final = frozenset(
    ["scheduler", "lifecycle", "waits", "inbox", "_around", "_outer", "_nursery", "_body", "root", "_root_gone"]
)

PHASES: Final[tuple[Phase, ...]] = ("accept", "drain", "close", "flush")
"""The phases of a system's end, in order: accept nothing new; let actors finish; close connections; flush buffers."""


@attrs.frozen
class Statistics:
    """Counts since the system was entered: `ActorSystem.statistics`."""

    actors: int
    """Alive now."""
    spawned: int
    stopped: int
    failures: int
    """Exceptions from handlers, hooks and tasks."""
    unsupervised: int
    """Actors that failed without a supervisor: spawned with ``supervise="stop"``, the default."""
    restarts: int
    dead_letters: int
    unhandled: int
    late_replies: int
    """Answers that came when the asker no longer waited."""
    slow_turns: int
    waiting: int
    """Handlers that wait now; each is a trio task."""
    workers: int
    ready: int
    """Actors in the run queue."""
    timers: int


class _Root(Actor[Any]):
    """The parent of the actors that the program spawns."""


class ActorSystem:
    """Actors, and the trio nursery that they live in: ``async with ActorSystem() as system``.

    Leaving the block ends all actors in four phases (`PHASES`), each with a deadline, and kills the rest.  This happens at the end of
    the body, after its exception, Ctrl-C, or an error that no supervisor handled; the block then raises that error.
    If the scope around the block is cancelled, the phases are skipped.  Nothing outlives the block.

    Args:
        name: for logs.
        ask_timeout: the default timeout of `Ref.ask` in seconds; ``None``: no limit.
        shutdown_timeout: seconds for each phase.
        stop_timeout: seconds that an actor has for its hooks, and a stopping child before it is killed.
        slow_handler: seconds without a yield after which a handler is reported (a log line and `SlowHandler`).
        max_waiting: how many handlers may wait at a time, each costs a trio task (about 5 kB); one more fails.
        blocking_threads: threads for `blocking` handlers.
        thread_inbox: how many messages from other threads may be on their way at a time.
        strict: check each `tell` for the wrong thread or run and for floods; for tests, three times the cost.
        seed: for jitter and random routing; ``None``: from the operating system.
        tracing: follows messages from actor to actor, see `levada.framework.tracing`; not together with `strict`.

    Raises:
        ConfigurationError: a setting is out of its range, or `strict` and `tracing` are combined.
    """

    def __init__(
        self,
        name: str = "levada",
        *,
        ask_timeout: float | None = 5.0,
        shutdown_timeout: float = 5.0,
        stop_timeout: float = 5.0,
        slow_handler: float = 0.1,
        max_waiting: int = 100_000,
        blocking_threads: int = 16,
        thread_inbox: int = 65_536,
        strict: bool = False,
        seed: int | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise ConfigurationError(f"the name of a system is {name!r}, wanted text")
        for setting, value in (
            ("shutdown_timeout", shutdown_timeout),
            ("stop_timeout", stop_timeout),
            ("slow_handler", slow_handler),
        ):
            if not is_duration(value):
                raise ConfigurationError(f"{setting} is {value!r}, wanted more than 0 seconds")
        if ask_timeout is not None and not is_duration(ask_timeout):
            raise ConfigurationError(f"ask_timeout is {ask_timeout!r}, wanted None or more than 0 seconds")
        if max_waiting < 1 or blocking_threads < 1 or thread_inbox < 1:
            raise ConfigurationError("max_waiting, blocking_threads and thread_inbox are 1 or more")
        if strict and tracing is not None:
            raise ConfigurationError(
                "a strict system looks at bare messages, and a traced one has envelopes: choose one"
            )
        self.name = name
        self.tracing = tracing
        """The tracing, if there is one."""
        self.ask_timeout = ask_timeout
        self.stop_timeout = stop_timeout
        self.max_waiting = max_waiting
        self.platform = PLATFORM.get()
        """What the process takes from its surroundings: `Platform`."""
        self.random = random.Random(self.platform.token_bytes(16) if seed is None else seed)
        self.counters = SystemCounters()
        self.events = EventStream()
        """The event stream, see `EventStream`."""
        self.registry = Registry(self)
        """Actors by unique name: `Registry`."""
        self.groups = Groups(self)
        """Actors by topic, many under each: `Groups`."""
        self.blocking_limiter = trio.CapacityLimiter(blocking_threads)
        self.observe = Observer(self, slow_handler)
        self.heap = TimerHeap(self.observe.late)
        self._strict = strict
        self._plain = not strict and tracing is None
        """Whether the cell of an unbounded mailbox is nothing but a `Cell`."""
        self._thread_inbox = thread_inbox
        self.shutdown_timeout = shutdown_timeout
        """Seconds for each phase of the end, until it begins."""
        self._dead_letters = DeadLetters(self.events)
        self.log_unhandled = RateLimitedLog("unhandled message")
        self.log_unreadable = RateLimitedLog("unreadable message")
        self.failure_log = FailureLog()
        """Logs the failures of all actors, and of code that peers cause to run."""
        self._numbers = itertools.count(1)
        self._phase_calls: dict[Phase, dict[object, Callable[[], Awaitable[object]]]] = {phase: {} for phase in PHASES}
        self._phase: Phase | Literal["new", "running", "over"] = "new"
        self.fatal: BaseException | None = None
        # Set on entering: they belong to the task and the run that do it.
        self.scheduler: RunQueue
        self.lifecycle: Lifecycle
        self.waits: WaitGraph
        self.inbox: ThreadInbox
        self._around: Any
        self._outer: trio.Nursery
        self._nursery: trio.Nursery
        self._body: trio.CancelScope
        self._patience = trio.CancelScope()
        self.root: Cell
        self._root_gone: trio.Event

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _SET_ON_ENTERING:
                raise ConfigurationError(
                    f"the system {self.name!r} was not entered: async with ActorSystem() as system"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @enable_ki_protection
    async def __aenter__(self) -> ActorSystem:
        if self._phase != "new":
            raise ConfigurationError(f"the system {self.name!r} was entered before; make a new one")
        if not trio.lowlevel.in_trio_run():
            raise ConfigurationError("an actor system runs on trio: start the program with trio.run(main)")
        self._phase = "running"
        self.platform = platform_of_run()
        self._platform_around = PLATFORM.get()
        PLATFORM.set(self.platform)  # before the run queue copies the context for its actors
        self._tracing_around = TRACING.get()
        if self.tracing is not None:
            TRACING.set(self.tracing)
        # Two nurseries: an outside cancellation reaches the block's body in the outer one. The actors are in the inner one,
        # which is shielded, so `__aexit__` ends them in order.
        self._around = trio.open_nursery()
        self._outer = await self._around.__aenter__()
        held = trio.Event()
        self._outer.start_soon(self._hold_nursery, held)
        interrupt = await _wait_patiently(held)
        self.scheduler = RunQueue(self, clock=self.platform.perf_counter, max_waiting=self.max_waiting)
        if self.platform.scheduling is not None:
            self.platform.scheduling(self.scheduler)
        self.lifecycle = Lifecycle(self, random=self.random)
        self.waits = WaitGraph(self.scheduler)
        self.inbox = ThreadInbox(self, trio.lowlevel.current_trio_token(), self._thread_inbox)
        self._root_gone = trio.Event()
        root = _Root()
        self.root = root._cell = Cell(self.scheduler, root, None, None, 0)
        self.root.make_extras().children = {}
        _RUNNING.add(self)
        self.start_task(self.heap.run, name="<timers>")
        self._body = trio.CancelScope()
        self._body.__enter__()
        if interrupt is not None:
            await self.__aexit__(type(interrupt), interrupt, interrupt.__traceback__)
            raise interrupt
        return self

    @enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:  # a plain bool would tell type checkers that errors of the block may be swallowed
        try:
            if self._body.__exit__(kind, error, traceback):
                error = None
        except BaseException as rest:
            error = rest
        if error is not None:
            note_asyncio(error)
        self._dead_letters.silent = True
        second: BaseException | None = None
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            with self._patience:
                await self._end_in_phases()
        except BaseException as hurry:
            # A second Ctrl-C, or the scope around was cancelled: skip the phases.
            second = hurry
        cancelled = second is not None and split_cancelled(second)[0] is not None
        self.lifecycle.request(self.root, CANCELLED if cancelled else KILLED, cancel=True, final=True)
        second = await _wait_patiently(self._root_gone) or second
        self._phase = "over"
        _RUNNING.discard(self)
        self.inbox.close()
        self._nursery.cancel_scope.cancel()
        self._outer.cancel_scope.shield = True
        if self.tracing is not None:
            TRACING.set(self._tracing_around)
        PLATFORM.set(self._platform_around)
        try:
            await self._around.__aexit__(None, None, None)
        except BaseException as late:
            if second is None:
                second = late  # all tasks have ended in any case
        failed, letters = self.counters.unsupervised, self._dead_letters.count
        if failed or letters:
            counts = f"{counted(failed, 'unsupervised failure')} and {counted(letters, 'dead letter')}"
            level = logging.WARNING if failed else logging.INFO
            logger.log(level, "%s ended with %s", self.name, counts, extra={"event": "ended"})
        return self._raise_what_ended(error, second)

    def _raise_what_ended(self, error: BaseException | None, second: BaseException | None) -> bool:
        errors: list[BaseException] = []
        fatal = self.fatal
        ended: tuple[BaseException | None, ...] = (error, second, fatal)
        if error is not None and fatal is not None and not isinstance(fatal, Exception) and _tells_of(error, fatal):
            ended = (fatal,)  # Ctrl-C in a handler comes out as Ctrl-C, also if the block waited for the answer
        for one in ended:
            counts = not isinstance(one, trio.Cancelled) or not (fatal or errors)
            if one is not None and counts and not any(one is other for other in errors):
                errors.append(one)
        if not errors:
            return True
        if len(errors) == 1:
            [only] = errors
            if only is error:
                return False
            before = only.__context__
            try:
                raise only
            finally:
                # Not what the block ended with: the cancelling, or an error that this one caused. An odd class refuses that.
                with suppress(Exception):
                    only.__context__ = before
        raise BaseExceptionGroup(f"the actor system {self.name!r} ended with several errors", errors)

    async def _end_in_phases(self) -> None:
        for phase in PHASES:
            self._phase = phase
            logger.debug("%s: %s", self.name, phase, extra={"event": "phase"})
            with trio.move_on_after(self.shutdown_timeout) as scope:
                async with trio.open_nursery() as nursery:
                    for function in list(self._phase_calls[phase].values()):
                        nursery.start_soon(self._call_in_phase, phase, function)
                    if phase == "drain":
                        self.root.admit(Stop(SHUTDOWN, final=True))
                        await self._root_gone.wait()
            if scope.cancelled_caught:
                what = "%s: %s took longer than %g s"
                logger.warning(what, self.name, phase, self.shutdown_timeout, extra={"event": "phase_late"})

    async def _call_in_phase(self, phase: Phase, function: Callable[[], Awaitable[object]]) -> None:
        try:
            await function()
        except BaseException as error:
            cancelled, rest = split_cancelled(error)
            if isinstance(rest, Exception):
                logger.error("%s: a call in phase %s failed", self.name, phase, exc_info=exc_info(rest))
                if self.fatal is None:
                    self.fatal = rest
            elif rest is not None:
                self.crash(rest)  # SystemExit, for example, as from a handler
            if cancelled is not None:
                raise cancelled from None

    def at_end(self, phase: Phase, function: Callable[[], Awaitable[object]]) -> Callable[[], None]:
        """Call an async function in a phase of the end, concurrently with others; its error comes out of the block.

        Returns:
            A function that undoes this, at any time.

        Raises:
            ConfigurationError: no such phase.
        """
        if phase not in PHASES:
            raise ConfigurationError(f"the phase is {phase!r}, wanted one of {', '.join(PHASES)}")
        calls = self._phase_calls[phase]
        key = object()
        calls[key] = function

        def forget() -> None:
            calls.pop(key, None)

        return forget

    @property
    def phase(self) -> str:
        """``"new"``, ``"running"``, one of `PHASES`, or ``"over"``."""
        return self._phase

    @overload
    def spawn(self, factory: Callable[[*Ts], Actor[M]], *args: *Ts, **options: Unpack[SpawnOptions]) -> Ref[M]: ...
    @overload
    def spawn(self, factory: Callable[[M], Awaitable[object]], **options: Unpack[SpawnOptions]) -> Ref[M]: ...
    def spawn(  # type: ignore[misc]  # mypy does not take Any for *Ts
        self,
        factory: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        mailbox: MailboxPolicy | None = None,
        supervise: Supervision = "stop",
    ) -> Ref[Any]:
        """Start an actor; its `Actor.started` runs soon, before its first message.

        Args:
            factory: an `Actor` class, or any function that makes a new actor object from `args` (use `functools.partial` for
                keyword arguments); each restart calls it again. Or an async function of one message.
            args: for the factory.
            name: unique among its siblings, part of its path; the default is a number.
            mailbox: see `bounded`; the default is unbounded.
            supervise: after a failure, ``"stop"`` (log it, tell watchers), ``"escalate"`` (the parent fails too; from a top-level
                actor the error comes out of the system's block) or `restart`.

        Raises:
            NameTaken: a living sibling has the name.
            ActorStopped: the system, or the parent, is ending.
            ConfigurationError: the factory made no actor; a name with a slash or with a character that cannot be printed.
            Exception: the factory raised. At a restart, this is a failure of the actor instead.
        """
        ref: Ref[Any] = self.spawn_below(self.root, factory, args, name, mailbox, supervise)
        return ref

    def spawn_below(
        self,
        parent: Cell,
        factory: Callable[..., Any],
        args: tuple[Any, ...],
        name: str | None,
        mailbox: MailboxPolicy | None,
        supervise: Supervision,
    ) -> Any:
        """Start an actor below `parent`; arguments and errors as for `spawn`."""
        if self.scheduler.parked and get_ident() != self.scheduler.thread:
            raise wrong_thread(f"spawn below {parent.path}", forked=self.scheduler.thread is None)
        if parent.phase is not RUNNING:
            raise ActorStopped(f"{parent.path} is ending: it spawns no more", actor=parent.path, reason=SHUTDOWN)
        if not isinstance(factory, type):
            factory = _as_factory(factory)
        try:
            actor = factory(*args)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None and inspect.isroutine(factory):
                raise ConfigurationError(f"spawn() called {factory!r} to make an actor: {error}; {_CURE}") from error
            raise
        if not isinstance(actor, Actor):
            raise _no_actor(factory, actor)
        if supervise != "stop" and supervise != "escalate" and not isinstance(supervise, RestartPolicy):
            raise ConfigurationError(f"supervise is {supervise!r}, wanted 'stop', 'escalate' or restart(…)")
        return self.install(parent, actor, factory, args, name, mailbox, supervise)

    @enable_ki_protection
    def install(
        self,
        parent: Cell,
        actor: Actor[Any],
        factory: Callable[..., Any],
        args: tuple[Any, ...],
        name: str | None,
        mailbox: MailboxPolicy | None,
        supervise: Supervision,
        adopted: bool = False,
    ) -> Cell:
        """Make an actor object the actor of a new cell below `parent`, which must be running."""
        family = parent._extras
        if family is None or family.children is None:
            family = parent.make_extras()
            family.children = {}
        if name is not None:
            # It shows up in logs and terminals, and peers refuse other paths.
            if not isinstance(name, str) or not name or "/" in name or name.startswith("$") or not name.isprintable():
                raise ConfigurationError(
                    f"the name is {name!r:.200}, wanted printable text without '/' that does not begin with '$'"
                )
            if family.names is None:
                family.names = {}
            if name in family.names:
                raise NameTaken(f"{parent.path.rstrip('/')}/{name} lives already", actor=parent.path, name=name)
        if mailbox is not None and not isinstance(mailbox, MailboxPolicy):
            raise ConfigurationError(f"the mailbox is {mailbox!r}, wanted bounded(…) or unbounded()")
        number = next(self._numbers)
        if mailbox is None and self._plain:
            cell = Cell(self.scheduler, actor, parent, name, number)
        else:
            cell = make_cell(self.scheduler, actor, parent, name, number, mailbox or unbounded(), strict=self._strict)
        actor._cell = cell
        family.children[cell] = adopted
        if name is not None:
            assert family.names is not None
            family.names[name] = cell
        if supervise != "stop":
            cell.make_extras().supervised = Supervised(factory, args, supervise)
        self.counters.spawned += 1
        if actor._has_start:
            cell.admit(START)
        return cell

    def lookup(self, path: str) -> Ref[Any] | None:
        """Return the living actor at a path of names, for example ``"/desk/prices"``, or None."""
        cell = self.root
        for name in path.strip("/").split("/"):
            names = cell._extras.names if cell._extras is not None else None
            if names is None or name not in names:
                return None
            cell = names[name]
        return cell

    def statistics(self) -> Statistics:
        """Return the current counters."""
        counters, scheduler = self.counters, self.scheduler
        return Statistics(
            **attrs.asdict(counters),
            actors=counters.spawned - counters.stopped + (self.root.phase is STOPPED),
            dead_letters=self._dead_letters.count,
            waiting=scheduler.waiting,
            workers=len(scheduler.workers),
            ready=len(scheduler.ready),
            timers=len(self.heap),
        )

    @enable_ki_protection
    async def _hold_nursery(self, held: trio.Event) -> None:
        try:
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as self._nursery:
                    held.set()
                    await trio.sleep_forever()
        except BaseException as error:
            # The workers have ended with the failed task, so no actor will report its end.
            self.scheduler.parked = False  # so no call wakes a worker
            self.crash(error)
            self._root_gone.set()

    def start_task(self, function: Callable[..., Awaitable[object]], *args: Any, name: str) -> None:
        """Run a task of the runtime in the system's nursery. It must not raise: an error ends the system."""
        self._nursery.start_soon(function, *args, name=name)

    def check_thread(self, what: str) -> None:
        """Raise `WrongThread` unless this is the thread of the system."""
        if get_ident() != self.scheduler.thread:
            raise wrong_thread(what, forked=self.scheduler.thread is None)

    def dead_letter(self, message: Any, to: Ref[Any], why: str) -> None:
        """Record a message that reached no handler."""
        self._dead_letters.add(content_of(message), to, why)

    def crash(self, error: BaseException) -> None:
        """End the system because of an error that no supervisor handled; the first one comes out of the block."""
        if self.fatal is None:
            self.fatal = error
        elif self.fatal is not error:
            logger.error("%s: one more error while it ends", self.name, exc_info=exc_info(error))
        self._body.cancel()
        if self._phase in PHASES and not isinstance(error, Exception):
            self._patience.cancel()  # a second Ctrl-C

    def root_ended(self) -> None:
        """Record that all actors have ended."""
        self._root_gone.set()

    def strict_check(self, cell: Cell, message: Any) -> None:
        """Check a `tell` for a wrong thread, a flood, and a missing handler."""
        if get_ident() != self.scheduler.thread:
            raise cell.wrong_thread_error("tell")
        self.observe.count_tell(cell)
        actor = cell._actor
        if cell.phase is RUNNING and not actor._is_loop and type(actor).unhandled is Actor.unhandled:
            kind = type(message)
            if find_handler(kind, type(actor)._table) is None and find_handler(kind, cell._table) is None:
                what = f"{cell.path} ({type(actor).__name__}) has no handler for {kind.__name__}"
                raise ActorError(what, actor=cell.path)

    def strict_answer(self, cell: Cell, question: Any, answer: Any) -> Any:
        """Return the answer, or raise if it does not have the type that the class of its question promises."""
        if isinstance(question, Asks):
            wanted = reply_type(type(question))
            if not fits(answer, wanted):
                promise = f"Asks[{getattr(wanted, '__name__', wanted)}]"
                kind = type(question).__name__
                what = f"{cell.path} answered {kind} with a {type(answer).__name__}, but {kind} is {promise}"
                raise ActorError(what, actor=cell.path)
        return answer


def _tells_of(error: BaseException, cause: BaseException) -> bool:
    """Whether an error, or each one of a group, was caused by another one."""
    if isinstance(error, BaseExceptionGroup):
        return all(_tells_of(each, cause) for each in error.exceptions)
    seen = set[int]()
    while error is not cause:
        above = error.__cause__ or error.__context__
        if above is None or id(above) in seen:
            return False
        seen.add(id(above))
        error = above
    return True


async def _wait_patiently(event: trio.Event) -> KeyboardInterrupt | None:
    """Wait for an event that is certain to come; return a Ctrl-C that came meanwhile."""
    interrupt = None
    with trio.CancelScope(shield=True):
        while not event.is_set():
            try:
                await event.wait()
            except KeyboardInterrupt as error:
                interrupt = error
    return interrupt


_CURE: Final = "a function that takes messages is async, or is wrapped with actor()"


def _as_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Turn an async function of one message into an actor class."""
    if inspect.iscoroutinefunction(factory):
        return function_actor(factory)
    if not callable(factory):
        hint = ""
        if isinstance(factory, Actor):
            hint = f": spawn({type(factory).__name__}, …)"
        elif inspect.iscoroutine(factory):
            factory.close()
            hint = f": spawn({factory.__name__}, …), without a call"
        raise ConfigurationError(f"spawn() got {factory!r}, wanted an Actor class or a factory{hint}")
    return factory


def _no_actor(factory: Any, made: Any) -> ConfigurationError:
    """Make the error for a factory that has made something else."""
    cure = "derive the class from Actor" if isinstance(factory, type) else _CURE
    if inspect.iscoroutine(made):  # of an object with an async ``__call__``, or of a lambda around an async function
        made.close()
        cure = "spawn the async function itself, with functools.partial for arguments"
    elif inspect.isasyncgen(made) or inspect.isgenerator(made):
        cure = "the runtime does not run generators: await instead, and send several values by a channel"
    return ConfigurationError(f"{factory!r} made {type(made).__name__}, not an Actor: {cure}")


class ThreadInbox:
    """Messages from threads that do not run trio: a queue, with one wake-up for many messages.

    A call into trio costs 5 µs and a round trip 48 µs; a queue with one wake-up costs under 1 µs a message.
    """

    def __init__(self, system: ActorSystem, token: trio.lowlevel.TrioToken, limit: int) -> None:
        self._system = system
        self._token = token
        self._limit = limit
        self._queue: deque[tuple[Cell | None, Any]] = deque()
        self._woken = False
        self._closed = False

    def is_home(self) -> bool:
        """Whether this is the system's thread, inside its run of trio."""
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            return False

    def put(self, cell: Cell, message: Any) -> None:
        """Send a message; from any thread."""
        if self._closed:
            if self._system.scheduler.thread is None:
                raise cell.wrong_thread_error("tell")
            raise stopped_error(cell, SHUTDOWN, message)
        line = cell.line
        if len(self._queue) + (len(line) if line else 0) >= self._limit:
            what = f"{self._limit} messages from threads are on their way to {cell.path} (raise thread_inbox, or send fewer)"
            raise MailboxFull(what, actor=cell.path, capacity=self._limit, message=content_of(message))
        self._send((cell, message))

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the system's thread, soon; from any thread, even in a finaliser."""
        if not self._closed:
            self._send((None, (function, arguments)))

    def _send(self, entry: tuple[Cell | None, Any]) -> None:
        self._queue.append(entry)
        if not self._woken:
            self._woken = True
            try:
                self._token.run_sync_soon(self._deliver)
            except trio.RunFinishedError:
                self.close()

    @enable_ki_protection
    def _deliver(self) -> None:
        # Cleared first: later entries ask for their own wake-up.
        self._woken = False
        queue = self._queue
        for _ in range(min(len(queue), 1000)):
            cell, message = queue.popleft()
            if cell is None:
                function, arguments = message
                function(*arguments)
            else:
                try:
                    cell.enqueue(message, patient=True)
                except LevadaError as error:
                    if isinstance(message, Ask):
                        message.fail(error)
                    else:
                        full = isinstance(error, MailboxFull)
                        self._system.dead_letter(message, cell, "mailbox full" if full else str(error))
                except Exception as error:
                    # The key function is the user's code, and the sending thread has gone on.
                    text = "%s: no key for a message from a thread"
                    self._system.failure_log.log(logger, error, text, cell.path, actor=cell.path)
                    self._system.dead_letter(message, cell, "no key")
        if queue and not self._woken:
            self._woken = True
            self._token.run_sync_soon(self._deliver)

    def forked(self) -> None:
        """Take no more messages, and forget those on their way: the process that was forked has them."""
        self._closed = True
        self._queue.clear()

    def close(self) -> None:
        """Fail questions on their way and turn messages into dead letters: the system is over."""
        self._closed = True
        while self._queue:
            cell, message = self._queue.popleft()
            if cell is not None:
                cell.enqueue(message)


_RUNNING: weakref.WeakSet[ActorSystem] = weakref.WeakSet()


def _mark_copies() -> None:
    """Mark the copies of the running systems in a forked process. It costs nothing else: a `tell` looks at no process."""
    for system in _RUNNING:
        system.scheduler.forked(system.root)
        system.inbox.forked()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_mark_copies)
