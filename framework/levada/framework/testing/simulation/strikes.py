"""Faults of a world: what strikes its processes and disks, how often, and at which moments."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import trio
from attrs import validators as v

from levada.framework.testing.explore import Turn

from .disk import Model, SimulatedDisk
from .faults import CHANGES, Call, Fault, chance

if TYPE_CHECKING:
    from .process import Machine, Process
    from .world import World

__all__ = ["Faults", "Strikes"]

T = TypeVar("T")

_AFTER: Final = (0.0, 0.0002, 0.001, 0.01)
"""Seconds from the moment that a strike is aimed at."""
_HITS: Final = 0.1
"""The share of the moments aimed at that are struck."""
_OTHERS: Final = 0.5
"""The share of aimed strikes that go to any process."""
_CALLS: Final = 40
"""The most calls of the disk before a crash in one of them."""
_READS: Final = frozenset({"database", "map", "names", "open", "read", "stat"})
_ERRORS: Final = (
    ("syncs", frozenset({"commit", "fdatasync", "fsync"}), Fault(errno.EIO)),
    ("writes", frozenset({"write"}), Fault(errno.EIO, done=0.5)),
    ("changes", CHANGES, Fault(errno.EIO)),
    ("reads", _READS, Fault(errno.EIO)),
    ("openings", frozenset({"create", "database", "open"}), Fault(errno.EMFILE)),
    ("writes", frozenset({"write"}), Fault(done=0.5)),
)
"""What a disk may refuse for a while, and how; the last one is short writes."""
_REFUSED: Final = (0.1, 0.5, 1.0)
"""The share of these calls that the disk refuses."""
_SYNC_TIMES: Final = (0.05, 0.5, 3.0)
"""Seconds that a sync of a slow disk takes."""

_share: Any = [v.instance_of((int, float)), v.ge(0), v.lt(inf)]


def _names(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"aims are a set of names, such as {{{names!r}}}, not a text")
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
    disk: Model | None = attrs.field(default=None, validator=v.in_((None, "ordered", "lax")))
    """What a power failure leaves, see `SimulatedDisk`; None: the seed decides."""


@attrs.frozen
class _Refusing:
    """Says what happens at the calls of a disk that refuses some."""

    kinds: frozenset[str]
    fault: Fault
    share: float
    seed: int

    def __call__(self, call: Call) -> Fault | None:
        refused = call.kind in self.kinds and chance(self.seed, attrs.astuple(call)) < self.share
        return self.fault if refused else None


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
        self._ill: set[Machine] = set()
        """Disks that are full, slow or refuse calls for a while."""
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
        while self._left > 0 and any(weight for _, weight in self._kinds):
            await trio.sleep(self._random.expovariate(1 / self._faults.every))
            self._count()
            strikes, weights = zip(*self._kinds, strict=True)
            self._random.choices(strikes, weights)[0]()

    def aim(self, process: Process, turn: Turn) -> None:
        """Strike at the moment when a process is about to handle messages, if it is chosen."""
        if self._hits(name.removeprefix("ask ") for name in turn.messages):
            self._strike_soon(process)

    def at_call(self, process: Process, call: Call) -> Fault | None:
        """Strike at the moment of a call of the disk, if it is chosen; return what happens at the call."""
        if not self._hits((call.kind,)):
            return None
        if self._random.random() < _OTHERS or not process.returns:
            self._strike_soon(process)
            return None
        self._count()
        done = self._random.choice((0.0, 0.5, 1.0))
        if self._random.random() < 0.3 and self._faults.disk_errors and process.machine.returns:
            self._world.note(f"{process.name}: {call.kind} of {call.path} fails")
            return Fault(errno.EIO, done=done)
        return Fault(crash=True, done=done)

    def _hits(self, moments: Iterable[str]) -> bool:
        aims = self._faults.aims
        return (
            self._aimed and self._left > 0 and any(each in aims for each in moments) and self._random.random() < _HITS
        )

    def _strike_soon(self, process: Process) -> None:
        """Strike a process, or another one, which may wait for the answer."""
        if self._random.random() < _OTHERS:
            process = next(iter(self._one(self._mortal())), process)
        if not process.returns:
            return
        self._count()
        faults = self._faults
        strikes: dict[Callable[[], None], float] = {process.kill: faults.kills}
        strikes[partial(process.pause, self._random.choice(self._faults.lengths))] = faults.pauses
        if process.parent is not None:
            strikes[partial(self._let_live_on, process)] = faults.zombies
        if process.machine.returns:
            strikes[partial(process.power_failure, self._random.choice(self._faults.lengths))] = faults.power_failures
        if any(strikes.values()):
            strike = self._random.choices(list(strikes), list(strikes.values()))[0]
            self._world.network.later(self._random.choice(_AFTER), strike)

    def _let_live_on(self, process: Process) -> None:
        """Make a child count as dead. In half of the cases it is stopped first, and what it has sent arrives when it has a successor."""
        seconds = self._random.choice(self._faults.lengths)
        if self._random.random() < 0.5:
            process.pause(seconds / 2)
        process.zombie(seconds)

    def _count(self) -> None:
        self._left -= 1
        self.done += 1

    def stop(self) -> None:
        """Strike no more. What is under way ends in its time."""
        self._left = 0

    def _one(self, found: list[T]) -> list[T]:
        return [self._random.choice(found)] if found else []

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
            process.pause(self._random.choice(self._faults.lengths))

    def _cut(self) -> None:
        wires = [wire for process in self._alive() for wire in process.wires]
        if wires:
            way = self._random.choice(self._random.choice(wires).ways)
            one_way = self._random.random() < 0.5
            self._world.cut(
                way.sender.name, way.receiver.name, one_way=one_way, seconds=self._random.choice(self._faults.lengths)
            )

    def _zombie(self) -> None:
        for process in self._one([process for process in self._mortal() if process.parent is not None]):
            self._let_live_on(process)

    def _returning(self) -> list[Machine]:
        return [machine for machine in self._world.machines.values() if machine.is_up and machine.returns]

    def _power(self) -> None:
        for machine in self._one(self._returning()):
            machine.power_failure(self._random.choice(self._faults.lengths))

    def _disk_errors(self) -> None:
        for machine in self._one([machine for machine in self._returning() if machine not in self._ill]):
            what, kinds, fault = self._random.choice(_ERRORS)
            happens = _Refusing(kinds, fault, self._random.choice(_REFUSED), self._random.getrandbits(32))
            how = f"fail with {errno.errorcode[fault.error]}" if fault.error else "are short"
            self._set_for_a_while(machine, f"{happens.share:.0%} of the {what} {how}", machine, "faults", happens)

    def _full_disk(self) -> None:
        for machine in self._one([machine for machine in self._returning() if machine not in self._ill]):
            self._set_for_a_while(machine, "its disk is full", machine.disk, "size", machine.disk.used)

    def _slow_disk(self) -> None:
        machines = [machine for machine in self._world.machines.values() if machine.is_up]
        for machine in self._one([machine for machine in machines if machine not in self._ill]):
            seconds = self._random.choice(_SYNC_TIMES)
            self._set_for_a_while(machine, f"each sync takes {seconds:g} s", machine.disk, "sync_time", seconds)

    def _set_for_a_while(
        self, machine: Machine, what: str, of: Machine | SimulatedDisk, name: str, value: object
    ) -> None:
        """Give an attribute of a machine or its disk another value. No two of these times overlap, so each ends with the value before it."""
        seconds = self._random.choice(self._faults.lengths)
        before = getattr(of, name)
        self._ill.add(machine)
        setattr(of, name, value)
        self._world.note(f"{machine.name}: {what}, for {seconds:g} s")

        def recover() -> None:
            self._ill.discard(machine)
            setattr(of, name, before)

        self._world.network.later(seconds, recover)

    def _clock(self) -> None:
        for process in self._one(self._alive()):
            process.clock(round(self._random.uniform(-self._faults.jump, self._faults.jump), 3))
