"""Strikes by chance: what may go wrong, how often, at which moments; and what the seed makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import trio
from attrs import validators as v

from .disk import Model
from .strike import REFUSALS, Kind, Moment, Strike

if TYPE_CHECKING:
    import random

    from .process import Machine, Process
    from .strikes import Strikes
    from .world import World

__all__ = ["ByChance", "Faults"]

T = TypeVar("T")

_AFTER: Final = (0.0, 0.0002, 0.001, 0.01)
"""Seconds from the moment that a strike is aimed at."""
_HITS: Final = 0.1
"""The share of the moments aimed at that are struck."""
_OTHERS: Final = 0.5
"""The share of aimed strikes that go to any process."""
_CALLS: Final = 40
"""The most calls of the disk before a crash in one of them."""
_REFUSED: Final = (0.1, 0.5, 1.0)
"""The share of these calls that the disk refuses."""
_SYNC_TIMES: Final = (0.05, 0.5, 3.0)
"""Seconds that a sync of a slow disk takes."""

_share: Any = [v.instance_of((int, float)), v.ge(0), v.lt(inf)]


def _names(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"aims and only are sets of names, such as {{{names!r}}}, not a text")
    return frozenset(names)


def _in_order(_faults: object, _attribute: object, latency: tuple[float, float]) -> None:
    least, most = latency
    if not 0 <= least <= most < inf:
        raise ValueError(f"latency is {latency!r}, wanted the least and the most seconds")


@attrs.frozen(kw_only=True)
class Faults:
    """What goes wrong in a world, by chance. Immutable; derive with `attrs.evolve`.

    Kinds of strikes have weights: 2 is twice as likely as 1, and 0 never happens. Only processes that come back are killed: children of a
    fleet, and processes that were started with `restart`.
    """

    strikes: int = attrs.field(default=5, validator=[v.instance_of(int), v.ge(0)])
    """The most strikes in a world; the seed decides how many."""
    every: float = attrs.field(default=1.0, validator=[v.gt(0), v.lt(inf)])
    """Mean seconds between two strikes."""
    begin: float = attrs.field(default=0.0, validator=_share)
    """Seconds before strikes begin: until then the program starts undisturbed."""
    kills: float = attrs.field(default=4.0, validator=_share)
    """Weight of kills."""
    crashes: float = attrs.field(default=2.0, validator=_share)
    """Weight of kills in the middle of a call of the disk."""
    pauses: float = attrs.field(default=2.0, validator=_share)
    """Weight of pauses."""
    cuts: float = attrs.field(default=2.0, validator=_share)
    """Weight of cuts between two processes, one way or both ways."""
    zombies: float = attrs.field(default=1.0, validator=_share)
    """Weight of children that count as dead and live on for a while; some are stopped first, so what they have sent arrives late."""
    power_failures: float = attrs.field(default=1.0, validator=_share)
    """Weight of power failures of a machine all whose processes come back."""
    disk_errors: float = attrs.field(default=1.0, validator=_share)
    """Weight of disks that refuse some or all calls of a kind for a while: syncs, writes, other changes or reads with `errno.EIO`, the opening of
    files with `errno.EMFILE`; or their writes are short. All processes of the machine come back."""
    full_disks: float = attrs.field(default=1.0, validator=_share)
    """Weight of disks that are full for a while. All processes of the machine come back."""
    slow_disks: float = attrs.field(default=1.0, validator=_share)
    """Weight of disks whose syncs are slow for a while."""
    clock_jumps: float = attrs.field(default=1.0, validator=_share)
    """Weight of jumps of a clock."""
    jump: float = attrs.field(default=3600.0, validator=_share)
    """The most seconds that a clock jumps, forward or back."""
    skew: float = attrs.field(default=0.5, validator=_share)
    """The most seconds that the clock of a process is off from the start."""
    latency: tuple[float, float] = attrs.field(default=(0.0001, 0.002), validator=_in_order)
    """Least and most seconds from one process to another. In a third of the worlds it is ten times as long."""
    loss: float = attrs.field(default=0.1, validator=[*_share, v.le(1)])
    """The largest share of datagrams that are lost, which concerns QUIC. Half of the worlds lose none, and the others up to this share."""
    lengths: tuple[float, ...] = attrs.field(
        default=(0.1, 1.0, 8.0), validator=[v.min_len(1), v.deep_iterable(v.and_(*_share))]
    )
    """Seconds that a pause, a cut, a life out of reach, a power failure, or a fault of a disk may take."""
    aims: frozenset[str] = attrs.field(
        default=frozenset(), converter=_names, validator=v.deep_iterable(v.instance_of(str))
    )
    """Moments to strike at, in half of the worlds.

    The name of a message class: when an actor is about to handle such a message, its process or another one is killed, paused, taken for dead,
    or without power, by their weights, now or a moment later.
    A kind of `CHANGES`, such as ``"fdatasync"``: when a process makes such a call of its disk, the process crashes before, in, or right behind
    the call, or the call fails, or another process is struck."""
    only: frozenset[str] = attrs.field(
        default=frozenset(), converter=_names, validator=v.deep_iterable(v.instance_of(str))
    )
    """Names of the processes and machines that are struck; empty: all of them. A cut has one of them at an end."""
    disk: Model | None = attrs.field(default=None, validator=v.in_((None, "ordered", "lax")))
    """What a power failure leaves, see `SimulatedDisk`; None: the seed decides."""


class ByChance:
    """Draws the strikes of a world.

    Args:
        world: has the processes and machines.
        faults: how likely each kind is, and the lengths.
        rng: decides.
        strikes: carries them out.
    """

    def __init__(self, world: World, faults: Faults, rng: random.Random, strikes: Strikes) -> None:
        self._world = world
        self._faults = faults
        self._random = rng
        self._strikes = strikes
        self._left = rng.randint(0, faults.strikes)
        self._aims = faults.aims if rng.random() < 0.5 else frozenset[str]()
        self._kinds: list[tuple[Callable[[], None], float]] = [
            (self._kill, faults.kills),
            (self._crash, faults.crashes),
            (self._pause, faults.pauses),
            (self._cut, faults.cuts),
            (self._zombie, faults.zombies),
            (self._power, faults.power_failures),
            (self._disk_errors, faults.disk_errors),
            (self._full_disk, faults.full_disks),
            (self._slow_disk, faults.slow_disks),
            (self._clock, faults.clock_jumps),
        ]

    async def run(self) -> None:
        """Strike at random times."""
        if self._faults.begin:
            await trio.sleep(self._faults.begin)
        while self._left > 0 and any(weight for _, weight in self._kinds):
            await trio.sleep(self._random.expovariate(1 / self._faults.every))
            if self._left <= 0:
                return
            self._count()
            strikes, weights = zip(*self._kinds, strict=True)
            self._random.choices(strikes, weights)[0]()

    def stop(self) -> None:
        """Draw no more."""
        self._left = 0

    def _count(self) -> None:
        self._left -= 1
        self._strikes.done += 1

    # At moments.

    @property
    def aims(self) -> frozenset[str]:
        """Names of moments that are counted, and may be struck."""
        return self._aims if self._left > 0 else frozenset()

    def hits(self) -> bool:
        """Decide whether a moment aimed at is struck."""
        return self._left > 0 and trio.current_time() >= self._faults.begin and self._random.random() < _HITS

    def strike_call(self, process: Process, moment: Moment) -> Strike | None:
        """Strike at a call of the disk, or soon; return what happens in the call, if anything."""
        if self._random.random() < _OTHERS or not self._is_mortal(process):
            self.strike_soon(process, moment)
            return None
        self._count()
        done = self._random.choice((0.0, 0.5, 1.0))
        fails = self._random.random() < 0.3 and self._faults.disk_errors and process.machine.returns
        return Strike("error" if fails else "crash", process.name, at=moment, share=done)

    def strike_soon(self, process: Process, moment: Moment) -> None:
        """Strike a process, or another one, which may wait for the answer."""
        if self._random.random() < _OTHERS or not self._is_meant(process.name):
            process = next(iter(self._one(self._mortal())), process)
        if not self._is_mortal(process):
            return
        self._count()
        faults, seconds = self._faults, {"pause": self._random.choice(self._faults.lengths)}
        weights: dict[Kind, float] = {"kill": faults.kills, "pause": faults.pauses}
        if process.parent is not None:
            weights["zombie"] = faults.zombies
        if process.machine.returns and self._is_meant(process.machine.name):
            seconds["power failure"] = self._random.choice(faults.lengths)
            weights["power failure"] = faults.power_failures
        if any(weights.values()):
            what = self._random.choices(list(weights), list(weights.values()))[0]
            after = self._random.choice(_AFTER)
            strike = partial(self._strike_one, what, process, moment, after, seconds.get(what, 0.0))
            self._strikes.later(after, strike)

    # At any time.

    def _strike_one(
        self, what: Kind, process: Process, at: float | Moment, after: float = 0.0, seconds: float = 0.0
    ) -> None:
        """Strike a process, or the machine that it runs on."""
        if what == "power failure":
            self._strikes.strike(Strike(what, process.machine.name, at=at, after=after, seconds=seconds))
            return
        stopped = False
        if (
            what == "zombie"
        ):  # in half of the cases it is stopped first, and what it has sent arrives when it has a successor
            seconds, stopped = self._random.choice(self._faults.lengths), self._random.random() < 0.5
        named = [each for each in self._world.processes if each.name == process.name]
        earlier = len(named) - 1 - named.index(process)
        self._strikes.strike(
            Strike(what, process.name, at=at, after=after, seconds=seconds, earlier=earlier, stopped=stopped)
        )

    def _one(self, found: list[T]) -> list[T]:
        return [self._random.choice(found)] if found else []

    def _length(self) -> float:
        return self._random.choice(self._faults.lengths)

    def _is_meant(self, name: str) -> bool:
        return not self._faults.only or name in self._faults.only

    def _is_mortal(self, process: Process) -> bool:
        return process.returns and self._is_meant(process.name)

    def _alive(self) -> list[Process]:
        return [process for process in self._world.processes if not process.dead and self._is_meant(process.name)]

    def _mortal(self) -> list[Process]:
        return [process for process in self._alive() if process.returns]

    def _machines(self) -> list[Machine]:
        machines = self._world.machines.values()
        return [machine for machine in machines if machine.is_up and self._is_meant(machine.name)]

    def _sound(self) -> list[Machine]:
        """Return the machines whose disks have no fault now."""
        return [machine for machine in self._machines() if machine not in self._strikes.ill]

    def _kill(self) -> None:
        for process in self._one(self._mortal()):
            self._strike_one("kill", process, trio.current_time())

    def _crash(self) -> None:
        for process in self._one(self._mortal()):
            self._strikes.crash_in(process, self._random.randint(1, _CALLS))

    def _pause(self) -> None:
        for process in self._one(self._alive()):
            self._strike_one("pause", process, trio.current_time(), seconds=self._length())

    def _cut(self) -> None:
        wires = [wire for process in self._alive() for wire in process.wires]
        if wires:
            way = self._random.choice(self._random.choice(wires).ways)
            one_way = self._random.random() < 0.5
            ends = way.sender.name, way.receiver.name
            self._strikes.strike(_now("cut", ends[0], other=ends[1], one_way=one_way, seconds=self._length()))

    def _zombie(self) -> None:
        for process in self._one([process for process in self._mortal() if process.parent is not None]):
            self._strike_one("zombie", process, trio.current_time())

    def _power(self) -> None:
        for machine in self._one([machine for machine in self._machines() if machine.returns]):
            self._strikes.strike(_now("power failure", machine.name, seconds=self._length()))

    def _disk_errors(self) -> None:
        for machine in self._one([machine for machine in self._sound() if machine.returns]):
            calls = self._random.choice(list(REFUSALS))
            share, seed = self._random.choice(_REFUSED), self._random.getrandbits(32)
            how = {"calls": calls, "share": share, "seed": seed}
            self._strikes.strike(_now("disk errors", machine.name, **how, seconds=self._length()))

    def _full_disk(self) -> None:
        for machine in self._one([machine for machine in self._sound() if machine.returns]):
            self._strikes.strike(_now("full disk", machine.name, seconds=self._length()))

    def _slow_disk(self) -> None:
        for machine in self._one(self._sound()):
            sync_time = self._random.choice(_SYNC_TIMES)
            self._strikes.strike(_now("slow disk", machine.name, sync_time=sync_time, seconds=self._length()))

    def _clock(self) -> None:
        for process in self._one(self._alive()):
            jump = round(self._random.uniform(-self._faults.jump, self._faults.jump), 3)
            self._strike_one("clock", process, trio.current_time(), seconds=jump)


def _now(what: Kind, whom: str, **how: Any) -> Strike:
    return Strike(what, whom, at=trio.current_time(), **how)
