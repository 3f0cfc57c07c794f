"""Faults of a world: what strikes its processes, how often, and at which moments."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio
from attrs import validators as v

from levada.framework.testing.explore import Turn

from .disk import Model

if TYPE_CHECKING:
    from .process import Process
    from .world import World

__all__ = ["Faults", "Strikes"]

_SHORT: Final = (0.1, 1.0, 8.0)
"""Seconds of a pause, a cut, or a life out of reach."""
_AFTER: Final = (0.0, 0.0002, 0.001, 0.01)
"""Seconds from the moment that a strike is aimed at."""
_HITS: Final = 0.1
"""The share of the moments aimed at that are struck."""
_OTHERS: Final = 0.5
"""The share of aimed strikes that go to any process."""
_CALLS: Final = 40
"""The most calls of the disk before a crash in one of them."""

_share: Any = [v.instance_of((int, float)), v.ge(0)]


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen(kw_only=True)
class Faults:
    """What goes wrong in a world, by chance. Immutable; derive with `attrs.evolve`.

    Kinds of strikes have weights: 2 is twice as likely as 1, and 0 never happens. Only processes that come back are killed: children of a
    fleet, and processes that were started with `restart`.
    """

    strikes: int = attrs.field(default=5, validator=[v.instance_of(int), v.ge(0)])
    """The most strikes in a world; the seed decides how many."""
    every: float = attrs.field(default=1.0, validator=v.gt(0))
    """Mean seconds between two strikes."""
    kills: float = attrs.field(default=4.0, validator=_share)
    """Weight of kills."""
    crashes: float = attrs.field(default=2.0, validator=_share)
    """Weight of kills in the middle of a call of the disk."""
    pauses: float = attrs.field(default=2.0, validator=_share)
    """Weight of pauses."""
    cuts: float = attrs.field(default=2.0, validator=_share)
    """Weight of cuts between two processes, one way or both ways."""
    zombies: float = attrs.field(default=1.0, validator=_share)
    """Weight of children that count as dead and live on for a while."""
    power_failures: float = attrs.field(default=1.0, validator=_share)
    """Weight of power failures of a machine all whose processes come back."""
    clock_jumps: float = attrs.field(default=1.0, validator=_share)
    """Weight of jumps of a clock."""
    jump: float = attrs.field(default=3600.0, validator=_share)
    """The most seconds that a clock jumps, forward or back."""
    skew: float = attrs.field(default=0.5, validator=_share)
    """The most seconds that the clock of a process is off from the start."""
    latency: tuple[float, float] = (0.0001, 0.002)
    """Least and most seconds from one process to another. In a third of the worlds it is ten times as long."""
    loss: float = attrs.field(default=0.1, validator=[*_share, v.le(1)])
    """The largest share of datagrams that are lost, which concerns QUIC. Half of the worlds lose none, and the others up to this share."""
    aims: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    """Names of message classes. When an actor is about to handle such a message, its process may be struck, now or a moment later."""
    disk: Model | None = None
    """What a power failure leaves, see `SimulatedDisk`; None: the seed decides."""


class Strikes:
    """Strikes the processes of a world."""

    def __init__(self, world: World, faults: Faults, rng: random.Random) -> None:
        self._world = world
        self._faults = faults
        self._random = rng
        self._left = rng.randint(0, faults.strikes)
        self.done = 0
        """Strikes so far."""
        self._aimed = rng.random() < 0.5 and bool(faults.aims)
        self._kinds: list[tuple[Callable[[], None], float]] = [
            (self._kill, faults.kills),
            (self._crash, faults.crashes),
            (self._pause, faults.pauses),
            (self._cut, faults.cuts),
            (self._zombie, faults.zombies),
            (self._power, faults.power_failures),
            (self._clock, faults.clock_jumps),
        ]

    async def run(self) -> None:
        """Strike at random times."""
        while self._left > 0 and any(weight for _, weight in self._kinds):
            await trio.sleep(self._random.expovariate(1 / self._faults.every))
            self._left -= 1
            self.done += 1
            strikes, weights = zip(*self._kinds, strict=True)
            self._random.choices(strikes, weights)[0]()

    def aim(self, process: Process, turn: Turn) -> None:
        """Strike a process that is about to handle a message of the chosen classes."""
        if not self._aimed or self._left <= 0:
            return
        aims = self._faults.aims
        if any(name.removeprefix("ask ") in aims for name in turn.messages) and self._random.random() < _HITS:
            if self._random.random() < _OTHERS:
                process = next(iter(self._one(self._mortal())), process)  # perhaps one that waits for the answer
            if not process.returns:
                return
            self._left -= 1
            self.done += 1
            strike = process.kill
            if process.parent is not None and self._random.random() < 0.3 and self._faults.zombies:
                seconds = self._random.choice(_SHORT)
                strike = lambda: process.zombie(seconds)  # noqa: E731 - it is chosen
            self._world.network.later(self._random.choice(_AFTER), strike)

    def stop(self) -> None:
        """Strike no more, and undo all cuts."""
        self._left = 0

    def _one(self, processes: list[Process]) -> list[Process]:
        return [self._random.choice(processes)] if processes else []

    def _alive(self) -> list[Process]:
        return [process for process in self._world.processes if not process.dead]

    def _mortal(self) -> list[Process]:
        return [process for process in self._alive() if process.returns]

    def _kill(self) -> None:
        for process in self._one(self._mortal()):
            process.kill()

    def _crash(self) -> None:
        for process in self._one(self._mortal()):
            process.crash_in(self._random.randint(1, _CALLS))

    def _pause(self) -> None:
        for process in self._one(self._alive()):
            process.pause(self._random.choice(_SHORT))

    def _cut(self) -> None:
        wires = [wire for process in self._alive() for wire in process.wires]
        if wires:
            way = self._random.choice(self._random.choice(wires).ways)
            one_way = self._random.random() < 0.5
            self._world.cut(way.sender.name, way.receiver.name, one_way=one_way, seconds=self._random.choice(_SHORT))

    def _zombie(self) -> None:
        for process in self._one([process for process in self._mortal() if process.parent is not None]):
            process.zombie(self._random.choice(_SHORT))

    def _power(self) -> None:
        machines = [machine for machine in self._world.machines.values() if machine.is_up and machine.processes]
        machines = [machine for machine in machines if all(process.returns for process in machine.processes)]
        if machines:
            self._random.choice(machines).power_failure(self._random.choice(_SHORT))

    def _clock(self) -> None:
        for process in self._one(self._alive()):
            process.clock(round(self._random.uniform(-self._faults.jump, self._faults.jump), 3))
