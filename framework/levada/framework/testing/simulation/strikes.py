"""Faults of a world: what strikes its processes and disks, how often, and at which moments."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import trio
from attrs import validators as v

from levada.framework.testing.explore import Turn

from .disk import Model, SimulatedDisk
from .faults import Call, Fault, chance
from .strike import AT_A_CALL, REFUSALS, Kind, Moment, Strike

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
    """Strikes the processes of a world: by chance, or as it is told."""

    def __init__(self, world: World, faults: Faults, rng: random.Random, told: Sequence[Strike] | None) -> None:
        self._world = world
        self._faults = faults
        self._random = rng
        self._left = rng.randint(0, faults.strikes)
        self.done = 0
        """Strikes so far."""
        self.made: list[Strike] = []
        """Records of the strikes that have done something."""
        self._aims = faults.aims if rng.random() < 0.5 else frozenset()
        self._timed: list[Strike] = []
        self._awaited: dict[tuple[str, str, str], list[Strike]] = {}
        """Told strikes by their moments: process, name, path."""
        if told is not None:
            self._left, self._aims = 0, frozenset()
            self._timed = sorted((each for each in told if not isinstance(each.at, Moment)), key=_time)
            for each in told:
                if isinstance(each.at, Moment):
                    self._awaited.setdefault((each.at.process, each.at.name, each.at.path), []).append(each)
        self._handled = Counter[tuple[str, str]]()
        """How many messages of a class that is aimed at the processes of a name have handled."""
        self._doomed: set[Process] = set()
        """Processes that will crash in a call of the disk."""
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
        """Strike at the times that were told, or at random times."""
        while self._timed:
            await trio.sleep_until(_time(self._timed[0]))
            if self._timed:
                strike = self._timed.pop(0)
                (self._strike_as_told if self._may_strike(strike) else self._skip)(strike)
        while self._left > 0 and any(weight for _, weight in self._kinds):
            await trio.sleep(self._random.expovariate(1 / self._faults.every))
            self._count()
            strikes, weights = zip(*self._kinds, strict=True)
            self._random.choices(strikes, weights)[0]()

    # What happens: by chance and as told alike.

    def _strike(self, strike: Strike) -> bool:
        """Carry out a strike of a process or a machine; return whether it did anything."""
        if strike.what in ("power failure", "disk errors", "full disk", "slow disk"):
            done = self._strike_machine(strike)
        elif strike.what == "cut":
            done = self._strike_wires(strike)
        else:
            process = self._find(strike)
            done = process is not None and self._strike_process(strike, process)
        if done:
            self.made.append(strike)
        return done

    def _find(self, strike: Strike) -> Process | None:
        """Return the process that is meant, if it lives."""
        named = [process for process in self._world.processes if process.name == strike.whom]
        found = named[-1 - strike.earlier] if strike.earlier < len(named) else None
        return None if found is None or found.dead else found

    def _strike_process(self, strike: Strike, process: Process) -> bool:
        if strike.what == "kill":
            process.kill()
        elif strike.what == "pause":
            process.pause(strike.seconds)
        elif strike.what == "clock":
            process.clock(strike.seconds)
        elif process.parent is None:
            return False
        else:
            if strike.stopped:
                process.pause(strike.seconds / 2)
            process.zombie(strike.seconds)
        return True

    def _strike_wires(self, strike: Strike) -> bool:
        try:
            self._world.cut(strike.whom, strike.other, one_way=strike.one_way, seconds=strike.seconds)
        except KeyError:  # there has been no such process
            return False
        return True

    def _strike_machine(self, strike: Strike) -> bool:
        machine = self._world.machines.get(strike.whom)
        if machine is None or not machine.is_up:
            return False
        if strike.what == "power failure":
            machine.power_failure(strike.seconds)
            return True
        if machine in self._ill:
            return False
        if strike.what == "disk errors":
            kinds, fault = REFUSALS[strike.calls]
            happens = _Refusing(kinds, fault, strike.share, strike.seed)
            how = f"{strike.calls} fail with {errno.errorcode[fault.error]}" if fault.error else "writes are short"
            self._set_for_a_while(strike, f"{strike.share:.0%} of the {how}", machine, machine, "faults", happens)
        elif strike.what == "full disk":
            self._set_for_a_while(strike, "its disk is full", machine, machine.disk, "size", machine.disk.used)
        else:
            what = f"each sync takes {strike.sync_time:g} s"
            self._set_for_a_while(strike, what, machine, machine.disk, "sync_time", strike.sync_time)
        return True

    def _set_for_a_while(
        self, strike: Strike, what: str, machine: Machine, of: Machine | SimulatedDisk, name: str, value: object
    ) -> None:
        """Give an attribute of a machine or its disk another value. No two of these times overlap, so each ends with the value before it."""
        before = getattr(of, name)
        self._ill.add(machine)
        setattr(of, name, value)
        self._world.note(f"{machine.name}: {what}, for {strike.seconds:g} s")

        def recover() -> None:
            self._ill.discard(machine)
            setattr(of, name, before)

        self._world.network.later(strike.seconds, recover)

    def _fail(self, strike: Strike, call: Call) -> Fault:
        """Return what happens at a call of the disk."""
        self.made.append(strike)
        if strike.what == "crash":
            return Fault(crash=True, done=strike.share)
        self._world.note(f"{strike.whom}: {call.kind} of {call.path} fails")
        return Fault(errno.EIO, done=strike.share)

    def crashes(self, process: Process, call: Call, fault: Fault) -> None:
        """Take note of the call that a process crashes at."""
        if process in self._doomed:
            self.made.append(Strike("crash", process.name, at=self._moment(process, call), share=fault.done))

    # As told.

    def _strike_as_told(self, strike: Strike) -> None:
        if self._strike(strike):
            self.done += 1
        else:
            self._skip(strike)

    def _skip(self, strike: Strike) -> None:
        self._world.note(f"skipped, for there is no such thing to strike: {strike!r}")

    def _may_strike(self, strike: Strike) -> bool:
        """Return whether what would end comes back, as by chance."""
        if strike.what in ("power failure", "disk errors", "full disk"):
            machine = self._world.machines.get(strike.whom)
            return machine is not None and machine.returns
        process = self._find(strike)
        return process is None or process.returns or strike.what not in ("kill", "zombie")

    def _take_told(self, process: str, name: str, path: str, before: int, count: int) -> list[Strike]:
        """Take the told strikes at the moments of a name behind number `before`, up to number `count`."""
        awaited = self._awaited.get((process, name, path), [])
        found = [each for each in awaited if isinstance(each.at, Moment) and before < each.at.count <= count]
        for each in found:
            awaited.remove(each)
        return found

    def end(self) -> None:
        """Add the told strikes whose moment has not come to the events, and forget them."""
        left = [*self._timed, *(each for awaited in self._awaited.values() for each in awaited)]
        self._timed.clear()
        self._awaited.clear()
        now = trio.current_time()
        self._world.events.extend((now, f"skipped, for its moment did not come: {each!r}") for each in left)

    def stop(self) -> None:
        """Strike no more. What is under way ends in its time."""
        self._left = 0
        self.end()

    # At moments.

    def aim(self, process: Process, turn: Turn) -> None:
        """Strike at the moment when a process is about to handle messages, if it is chosen."""
        if not self._awaited and (not self._aims or self._left <= 0):
            return
        moment: Moment | None = None
        for name, count in Counter(name.removeprefix("ask ") for name in turn.messages).items():
            if name in self._aims or (process.name, name, "") in self._awaited:
                before = self._handled[process.name, name]
                self._handled[process.name, name] += count
                moment = moment or Moment(process.name, name, before + 1)
                self._soon_as_told(self._take_told(process.name, name, "", before, before + count))
        if moment is not None and self._hits():
            self._strike_soon(process, moment)

    def at_call(self, process: Process, call: Call) -> Fault | None:
        """Strike at the moment of a call of the disk, if it is chosen; return what happens at the call."""
        if self._awaited and (process.name, call.kind, call.path) in self._awaited:
            return self._told_at_call(process, call)
        if call.kind not in self._aims or not self._hits():
            return None
        moment = self._moment(process, call)
        if self._random.random() < _OTHERS or not process.returns:
            self._strike_soon(process, moment)
            return None
        self._count()
        done = self._random.choice((0.0, 0.5, 1.0))
        fails = self._random.random() < 0.3 and self._faults.disk_errors and process.machine.returns
        return self._fail(Strike("error" if fails else "crash", process.name, at=moment, share=done), call)

    def _told_at_call(self, process: Process, call: Call) -> Fault | None:
        count = self._moment(process, call).count
        told = self._take_told(process.name, call.kind, call.path, count - 1, count)
        self._soon_as_told(each for each in told if each.what not in AT_A_CALL)
        fault = None
        for strike in told:
            if strike.what in AT_A_CALL:
                self.done += 1
                fault = self._fail(strike, call)
        return fault

    def _soon_as_told(self, strikes: Iterable[Strike]) -> None:
        for strike in strikes:
            if self._may_strike(strike):
                self._world.network.later(strike.after, partial(self._strike_as_told, strike))
            else:
                self._skip(strike)

    def _moment(self, process: Process, call: Call) -> Moment:
        others = [each for each in self._world.processes if each.name == process.name and each is not process]
        count = call.count + sum(each.files.calls(call.kind, call.path) for each in others)
        return Moment(process.name, call.kind, count, path=call.path)

    def _hits(self) -> bool:
        return self._left > 0 and self._random.random() < _HITS

    def _strike_soon(self, process: Process, moment: Moment) -> None:
        """Strike a process, or another one, which may wait for the answer."""
        if self._random.random() < _OTHERS:
            process = next(iter(self._one(self._mortal())), process)
        if not process.returns:
            return
        self._count()
        faults, seconds = self._faults, {"pause": self._random.choice(self._faults.lengths)}
        weights: dict[Kind, float] = {"kill": faults.kills, "pause": faults.pauses}
        if process.parent is not None:
            weights["zombie"] = faults.zombies
        if process.machine.returns:
            seconds["power failure"] = self._random.choice(faults.lengths)
            weights["power failure"] = faults.power_failures
        if any(weights.values()):
            what = self._random.choices(list(weights), list(weights.values()))[0]
            after = self._random.choice(_AFTER)
            strike = partial(self._strike_one, what, process, moment, after, seconds.get(what, 0.0))
            self._world.network.later(after, strike)

    # By chance.

    def _strike_one(
        self, what: Kind, process: Process, at: float | Moment, after: float = 0.0, seconds: float = 0.0
    ) -> None:
        """Strike a process, or the machine that it runs on."""
        if what == "power failure":
            self._strike(Strike(what, process.machine.name, at=at, after=after, seconds=seconds))
            return
        stopped = False
        if (
            what == "zombie"
        ):  # in half of the cases it is stopped first, and what it has sent arrives when it has a successor
            seconds, stopped = self._random.choice(self._faults.lengths), self._random.random() < 0.5
        named = [each for each in self._world.processes if each.name == process.name]
        earlier = len(named) - 1 - named.index(process)
        self._strike(Strike(what, process.name, at=at, after=after, seconds=seconds, earlier=earlier, stopped=stopped))

    def _count(self) -> None:
        self._left -= 1
        self.done += 1

    def _one(self, found: list[T]) -> list[T]:
        return [self._random.choice(found)] if found else []

    def _length(self) -> float:
        return self._random.choice(self._faults.lengths)

    def _alive(self) -> list[Process]:
        return [process for process in self._world.processes if not process.dead]

    def _mortal(self) -> list[Process]:
        return [process for process in self._alive() if process.returns]

    def _kill(self) -> None:
        for process in self._one(self._mortal()):
            self._strike_one("kill", process, trio.current_time())

    def _crash(self) -> None:
        for process in self._one(self._mortal()):
            process.crash_in(self._random.randint(1, _CALLS))
            self._doomed.add(process)

    def _pause(self) -> None:
        for process in self._one(self._alive()):
            self._strike_one("pause", process, trio.current_time(), seconds=self._length())

    def _cut(self) -> None:
        wires = [wire for process in self._alive() for wire in process.wires]
        if wires:
            way = self._random.choice(self._random.choice(wires).ways)
            one_way = self._random.random() < 0.5
            ends = way.sender.name, way.receiver.name
            self._strike(_now("cut", ends[0], other=ends[1], one_way=one_way, seconds=self._length()))

    def _zombie(self) -> None:
        for process in self._one([process for process in self._mortal() if process.parent is not None]):
            self._strike_one("zombie", process, trio.current_time())

    def _returning(self) -> list[Machine]:
        return [machine for machine in self._world.machines.values() if machine.is_up and machine.returns]

    def _power(self) -> None:
        for machine in self._one(self._returning()):
            self._strike(_now("power failure", machine.name, seconds=self._length()))

    def _disk_errors(self) -> None:
        for machine in self._one([machine for machine in self._returning() if machine not in self._ill]):
            calls = self._random.choice(list(REFUSALS))
            share, seed = self._random.choice(_REFUSED), self._random.getrandbits(32)
            self._strike(_now("disk errors", machine.name, calls=calls, share=share, seed=seed, seconds=self._length()))

    def _full_disk(self) -> None:
        for machine in self._one([machine for machine in self._returning() if machine not in self._ill]):
            self._strike(_now("full disk", machine.name, seconds=self._length()))

    def _slow_disk(self) -> None:
        machines = [machine for machine in self._world.machines.values() if machine.is_up]
        for machine in self._one([machine for machine in machines if machine not in self._ill]):
            sync_time = self._random.choice(_SYNC_TIMES)
            self._strike(_now("slow disk", machine.name, sync_time=sync_time, seconds=self._length()))

    def _clock(self) -> None:
        for process in self._one(self._alive()):
            jump = round(self._random.uniform(-self._faults.jump, self._faults.jump), 3)
            self._strike_one("clock", process, trio.current_time(), seconds=jump)


def _now(what: Kind, whom: str, **how: Any) -> Strike:
    return Strike(what, whom, at=trio.current_time(), **how)


def _time(strike: Strike) -> float:
    assert not isinstance(strike.at, Moment)
    return strike.at
