"""Hypothesis state machines over actors: rules that await, in one run of trio with virtual time.

Import `rule`, `initialize` and `invariant` from here: they take async functions.  Everything else (bundles, preconditions, settings) is
hypothesis's own.

trio runs as a guest (`trio.lowlevel.start_guest_run`) of a queue of calls, which are run only during a rule.
Between rules nothing runs and no time passes.  Slices are counted and a seed orders trio's tasks, so a failed example fails again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
import random
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import outcome
import trio
import trio.testing

try:
    import hypothesis.stateful
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "levada.framework.testing.stateful needs hypothesis: pip install hypothesis, or 'levada[dev]' for all that the tests use",
        name=missing.name,
    ) from missing

from levada.framework._runtime.host import split_cancelled
from levada.framework.platform import PLATFORM
from levada.framework.system import ActorSystem

from .clock import autojump, counted_time, deterministic

__all__ = ["ActorStateMachine", "initialize", "invariant", "rule"]

F = TypeVar("F", bound=Callable[..., Any])


def rule(**arguments: Any) -> Callable[[F], F]:
    """Make a method, sync or async, a rule of an `ActorStateMachine`; arguments as for `hypothesis.stateful.rule`."""
    return _decorator(hypothesis.stateful.rule(**arguments))


def initialize(**arguments: Any) -> Callable[[F], F]:
    """Make a method, sync or async, a rule that runs once, before all others."""
    return _decorator(hypothesis.stateful.initialize(**arguments))


def invariant(**arguments: Any) -> Callable[[F], F]:
    """Make a method, sync or async, a check after each rule."""
    return _decorator(hypothesis.stateful.invariant(**arguments))


def _decorator(decorate: Callable[[Any], Any]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        @functools.wraps(function)
        def step(self: ActorStateMachine, *arguments: Any, **keywords: Any) -> Any:
            return self._run(functools.partial(function, self, *arguments, **keywords))

        made: F = decorate(step)
        return made

    return apply


class ActorStateMachine(hypothesis.stateful.RuleBasedStateMachine):
    """A rule-based state machine with a running system; rules and invariants run inside its trio run.

    A failed actor fails the machine only if a rule says so; an error that ends the system does.

    Example:
        >>> from hypothesis import settings, strategies as st
        >>> from levada.framework import Actor, Asks, handles, message
        >>> @message
        ... class Add:
        ...     n: int
        >>> @message
        ... class Get(Asks[int]):
        ...     pass
        >>> class Counter(Actor[Add | Get]):
        ...     total: int = 0
        ...     @handles
        ...     def add(self, m: Add) -> None:
        ...         self.total += m.n
        ...     @handles
        ...     def get(self, m: Get) -> int:
        ...         return self.total
        >>> class Counting(ActorStateMachine):
        ...     @initialize()
        ...     def begin(self) -> None:
        ...         self.counter, self.model = self.system.spawn(Counter), 0
        ...     @rule(n=st.integers())
        ...     async def add(self, n: int) -> None:
        ...         await self.counter.send(Add(n))
        ...         self.model += n
        ...     @invariant()
        ...     async def it_counts(self) -> None:
        ...         assert await self.counter.ask(Get()) == self.model
        >>> settings_of = Counting.TestCase.settings = settings(max_examples=5, deadline=None, database=None)
        >>> Counting.TestCase().runTest()
    """

    make_system: ClassVar[Callable[..., ActorSystem]] = ActorSystem
    """Makes the system: `ActorSystem`, `levada.framework.testing.strict`\\ ``()``, or one with settings, by `functools.partial`."""
    seed: ClassVar[int] = 0
    """Of the system, and of trio's order of tasks."""

    system: ActorSystem
    """The running system."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._result: outcome.Outcome[Any] | None = None
        self._ended: outcome.Outcome[None] | None = None
        self._step: Callable[[], Any] | None = None
        self._between_steps = trio.lowlevel.ParkingLot()
        with contextlib.ExitStack() as stack:
            stack.enter_context(deterministic(self.seed))
            trio.lowlevel.start_guest_run(
                self._main, run_sync_soon_threadsafe=self._calls.put, done_callback=self._done, clock=autojump()
            )
            self._run(_nothing)
            self._order = stack.pop_all()

    async def wait_until_idle(self) -> None:
        """Wait until every actor and task waits; for async rules."""
        await trio.testing.wait_all_tasks_blocked()

    def teardown(self) -> None:
        """End the system, in its phases, and trio. An override calls this last."""
        if self._ended is None:
            self._step = None
            self._between_steps.unpark_all()
            while self._ended is None:
                self._calls.get()()
        self._order.close()
        ended, self._ended = self._ended, outcome.Value(None)
        ended.unwrap()

    def _run(self, function: Callable[[], Any]) -> Any:
        """Run one step inside trio, to its end."""
        self._step = function
        self._result = None
        self._between_steps.unpark_all()
        while self._result is None:
            if self._ended is not None:
                ended, self._ended = self._ended, outcome.Value(None)
                ended.unwrap()
                raise RuntimeError("the actor system has ended")
            self._calls.get()()
        return self._result.unwrap()

    def _done(self, ended: outcome.Outcome[None]) -> None:
        self._ended = ended

    async def _main(self) -> None:
        PLATFORM.set(counted_time(random.Random(self.seed)))
        async with type(self).make_system(seed=self.seed) as self.system:
            while self._step is not None:
                self._result = await _capture(self._step)
                await self._between_steps.park()


async def _capture(function: Callable[[], Any]) -> outcome.Outcome[Any]:
    """Call a sync or async function and capture the outcome; let only a cancellation, from the end of the system, pass."""
    try:
        result = function()
        return outcome.Value(await result if inspect.isawaitable(result) else result)
    except BaseException as error:
        cancelled, rest = split_cancelled(error)
        if cancelled is not None:
            raise
        assert rest is not None
        return outcome.Error(rest)


async def _nothing() -> None:
    """The first step: when it is done, the system was entered."""
