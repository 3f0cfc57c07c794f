"""Seeded schedules: the same scenario under many orders of events, each repeatable.

In a running system three things decide which code runs next, and none is guaranteed: the run queue (first come, first served, until
something waits), the real time of a slice, and trio's order of tasks.  Under `explore` a seed decides all three:

* the run queue picks any ready actor, not the oldest, and lets it handle 1 to `quantum` of its messages; signals still come first;
* a slice ends after a few turns, by a counting clock; an ask of an idle actor is sometimes answered at once and sometimes queued;
* trio shuffles its runnable tasks by a generator with the same seed, and time is virtual (`autojump`).

Each of these orders may happen in a real run, so a failure here is a real bug.  Messages of one sender to one actor stay in order.
Threads (`blocking` handlers), sockets and sets of objects hashed by address are out of reach, and a sync handler is never interrupted.

Private fields used here: ``Cell._actor``, ``Cell._batch``, ``Cell._box``, ``Cell._parent``, ``Cell._quantum``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import attrs
import trio

from levada.framework._runtime.ask import Ask, content_of
from levada.framework._runtime.cell import Cell
from levada.framework.platform import PLATFORM
from levada.framework.system import ActorSystem
from levada.framework.text import error_text

from .clock import autojump, counted_time, deterministic

__all__ = ["Explored", "ScheduleFailure", "Turn", "explore", "shuffle"]

_SHOWN = 20
"""Turns in the text of a failure."""


@attrs.frozen
class Turn:
    """One actor's turn in a schedule."""

    path: str
    messages: tuple[str, ...]
    """The classes of the messages that it may handle in this turn; fewer if one makes it wait, fail or end."""

    def __str__(self) -> str:
        return f"{self.path}: {', '.join(self.messages)}"


class ScheduleFailure(AssertionError):
    """A scenario failed under one schedule; the error itself is the ``__cause__``."""

    def __init__(self, seed: int, error: Exception, trace: tuple[Turn, ...]) -> None:
        self.seed = seed
        """Run it again with ``explore(scenario, seeds=[seed])``."""
        self.trace = trace
        """All turns up to the end."""
        last = "\n  ".join(map(str, trace[-_SHOWN:]))
        super().__init__(
            f"failed under schedule seed {seed} (repeat it: explore(…, seeds=[{seed}])): {error_text(error)}\nlast turns:\n  {last}"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.seed, self.__cause__, self.trace)


@attrs.frozen
class Explored:
    """The result of `explore`."""

    traces: dict[int, tuple[Turn, ...]]
    """The turns of each run, by seed."""

    @property
    def interleavings(self) -> int:
        """The number of different schedules."""
        return len(set(self.traces.values()))


def explore(
    scenario: Callable[[ActorSystem], Awaitable[object]],
    *,
    seeds: Iterable[int] = range(100),
    system: Callable[..., ActorSystem] = ActorSystem,
    quantum: int = 3,
    limit: float = 3600.0,
) -> Explored:
    r"""Run a scenario once for each seed, in a new system and a new run of trio with virtual time.

    Call it from a plain function, not from inside trio.

    Args:
        scenario: an async function of a running system; it fails by raising, and asks actors for their final state itself.
        seeds: each is one schedule; the same seed is the same schedule as long as the code stays the same.
        system: makes the system: `ActorSystem`, `strict`\ ``()``, or one of them with settings, by `functools.partial`.
        quantum: the most messages that one actor handles in a turn.
        limit: seconds of virtual time after which a run counts as hung.

    Raises:
        ScheduleFailure: the scenario raised; names the seed. The remaining seeds are not run.
        RuntimeError: this trio cannot repeat its order of tasks.

    Example:
        >>> from levada.framework import Actor, ActorSystem, Asks, handles, message
        >>> @message
        ... class Get(Asks[int]):
        ...     pass
        >>> @message
        ... class Put:
        ...     value: int
        >>> class Account(Actor[Get | Put]):
        ...     balance: int = 0
        ...     @handles
        ...     def get(self, m: Get) -> int:
        ...         return self.balance
        ...     @handles
        ...     def put(self, m: Put) -> None:
        ...         self.balance = m.value
        >>> @message
        ... class Pay(Asks[None]):
        ...     amount: int
        >>> class Teller(Actor[Pay]):
        ...     account: object
        ...     @handles
        ...     async def pay(self, m: Pay) -> None:
        ...         balance = await self.account.ask(Get())
        ...         self.account.tell(Put(balance + m.amount))  # another teller may have paid meanwhile
        >>> async def two_tellers(system: ActorSystem) -> None:
        ...     account = system.spawn(Account)
        ...     async with trio.open_nursery() as nursery:
        ...         for _ in range(2):
        ...             nursery.start_soon(system.spawn(Teller, account).ask, Pay(10))
        ...     assert await account.ask(Get()) == 20
        >>> try:
        ...     explore(two_tellers)
        ... except ScheduleFailure as failure:
        ...     print(str(failure).partition(" seed ")[0])
        failed under schedule
    """
    traces = {}
    for seed in seeds:
        trace: list[Turn] = []
        try:
            with deterministic(seed):
                trio.run(_run, scenario, system, seed, quantum, limit, trace, clock=autojump())
        except Exception as error:
            raise ScheduleFailure(seed, error, tuple(trace)) from error
        traces[seed] = tuple(trace)
    return Explored(traces)


async def _run(
    scenario: Callable[[ActorSystem], Awaitable[object]],
    make: Callable[..., ActorSystem],
    seed: int,
    quantum: int,
    limit: float,
    trace: list[Turn],
) -> None:
    rng = random.Random(seed)
    PLATFORM.set(
        attrs.evolve(
            counted_time(rng),
            scheduling=lambda run_queue: shuffle(run_queue, rng, quantum, lambda turn: trace.append(turn())),
        )
    )
    async with make(seed=seed) as system:
        with trio.move_on_after(limit) as scope:
            await scenario(system)
        if scope.cancelled_caught:
            raise AssertionError(f"the scenario did not end within {limit:g} s of virtual time")


def shuffle(run_queue: Any, rng: random.Random, quantum: int, note: Callable[[Callable[[], Turn]], object]) -> None:
    """Make a generator decide the order in a run queue that is empty.

    Args:
        run_queue: of a system that starts.
        rng: decides.
        quantum: the most messages that one actor handles in a turn.
        note: called before each turn, with a function that returns the turn.
    """
    may_inline = run_queue.may_inline
    run_queue.ready = _ShuffledQueue(rng, quantum, note)
    run_queue.may_inline = lambda: rng.random() < 0.5 and may_inline()


class _ShuffledQueue(deque[Cell]):
    """A run queue that picks a random actor; the signal cell comes first."""

    def __init__(self, rng: random.Random, quantum: int, note: Callable[[Callable[[], Turn]], object]) -> None:
        super().__init__()
        self._random = rng
        self._most = quantum
        self._note = note

    def append(self, cell: Cell) -> None:
        if cell._actor is None and cell._parent is None:
            super().appendleft(cell)
        else:
            super().append(cell)

    def popleft(self) -> Cell:
        if self and self[0]._actor is None and self[0]._parent is None:
            return super().popleft()
        at = self._random.randrange(len(self)) if len(self) > 1 else 0
        self.rotate(-at)
        cell = super().popleft()
        self.rotate(at)
        cell._quantum = self._random.randint(1, self._most)
        self._note(lambda: _turn(cell))
        return cell


def _turn(cell: Cell) -> Turn:
    coming = [*reversed(cell._batch)] or cell._box
    return Turn(cell.path, tuple(map(_name, coming[: cell._quantum])))


def _name(entry: Any) -> str:
    return f"ask {type(entry.message).__name__}" if isinstance(entry, Ask) else type(content_of(entry)).__name__
