"""Strikes of a world: by chance, or as told, a strike is the same record, which is carried out here and kept for the failure's text."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from levada.framework.testing.explore import Turn

from .by_chance import ByChance, Faults
from .disk import SimulatedDisk
from .faults import Call, Fault, chance
from .strike import AT_A_CALL, REFUSALS, Moment, Strike

if TYPE_CHECKING:
    from .process import Machine, Process
    from .world import World

__all__ = ["Strikes"]


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
        self.done = 0
        """Strikes so far, of those by chance also the ones that had nothing to strike."""
        self.made: list[Strike] = []
        """Records of the strikes that have done something."""
        self.over = 0.0
        """When the last strike is over, of those that were made and those that were told with their times."""
        self.ill: set[Machine] = set()
        """Machines whose disks are full, slow or refuse calls for a while."""
        self._chance = ByChance(world, faults, rng, self)
        self._expected = faults.strikes > 0 or told is not None
        self._stopped = False
        self._timed: list[Strike] = []
        self._awaited: dict[tuple[str, str, str], list[Strike]] = {}
        """Told strikes by their moments: process, name, path."""
        self._soon: list[Strike] = []
        """Told strikes whose moment has come, and which come a little later."""
        if told is not None:
            self._chance.stop()
            self._timed = sorted((each for each in told if not isinstance(each.at, Moment)), key=_time)
            self.over = max(map(_time, self._timed), default=0.0)
            for each in told:
                if isinstance(each.at, Moment):
                    self._awaited.setdefault((each.at.process, each.at.name, each.at.path), []).append(each)
        self._handled = Counter[tuple[str, str]]()
        """How many messages of a class that is aimed at the processes of a name have handled."""
        self._doomed: set[Process] = set()
        """Processes that will crash in a call of the disk."""

    @property
    def kept(self) -> tuple[Strike, ...] | None:
        """The strikes so far; None if there were to be none."""
        return tuple(self.made) if self._expected else None

    async def run(self) -> None:
        """Strike at the times that were told, or at random times."""
        while self._timed:
            await trio.sleep_until(_time(self._timed[0]))
            if self._timed:
                strike = self._timed.pop(0)
                (self._strike_as_told if self._may_strike(strike) else self._skip)(strike)
        await self._chance.run()

    def stop(self) -> None:
        """Strike no more, also where a strike waits for its moment. Faults under way end in their time."""
        self._stopped = True
        self._chance.stop()
        for process in self._doomed:
            process.crash_in(0)
        left = [*self._timed, *(each for awaited in self._awaited.values() for each in awaited), *self._soon]
        self._timed.clear()
        self._awaited.clear()
        self._soon.clear()
        now = trio.current_time()
        self._world.events.extend((now, f"skipped, for its moment did not come: {each!r}") for each in left)

    # What happens: by chance and as told alike.

    def strike(self, strike: Strike) -> bool:
        """Carry out a strike of a process or a machine; return whether it did anything."""
        if strike.what in ("power failure", "disk errors", "full disk", "slow disk"):
            done = self._strike_machine(strike)
        elif strike.what == "cut":
            done = self._strike_wires(strike)
        else:
            process = self._find(strike)
            done = process is not None and self._strike_process(strike, process)
        if done:
            self._keep(strike)
        return done

    def _keep(self, strike: Strike) -> None:
        self.made.append(strike)
        self.over = max(self.over, trio.current_time() + abs(strike.seconds))
        self._world.set_deadline()

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
        if machine in self.ill:
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
        self.ill.add(machine)
        setattr(of, name, value)
        self._world.note(f"{machine.name}: {what}, for {strike.seconds:g} s")

        def recover() -> None:
            self.ill.discard(machine)
            setattr(of, name, before)

        self._world.network.later(strike.seconds, recover)

    def _fail(self, strike: Strike, call: Call) -> Fault:
        """Return what happens at a call of the disk."""
        self._keep(strike)
        if strike.what == "crash":
            return Fault(crash=True, done=strike.share)
        self._world.note(f"{strike.whom}: {call.kind} of {call.path} fails")
        return Fault(errno.EIO, done=strike.share)

    def later(self, seconds: float, strike: Callable[[], None]) -> None:
        """Strike in so many seconds, unless `stop` comes first."""
        self._world.network.later(seconds, lambda: None if self._stopped else strike())

    def crash_in(self, process: Process, calls: int) -> None:
        """Have a process crash in a call of the disk, after so many calls that change something."""
        process.crash_in(calls)
        self._doomed.add(process)

    def crashes(self, process: Process, call: Call, fault: Fault) -> None:
        """Take note of the call that a process crashes at."""
        if process in self._doomed:
            self._keep(Strike("crash", process.name, at=self._moment(process, call), share=fault.done))

    # As told.

    def _strike_as_told(self, strike: Strike) -> None:
        if self.strike(strike):
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

    # At moments.

    def aim(self, process: Process, turn: Callable[[], Turn]) -> None:
        """Strike at the moment when a process is about to handle messages, if it is chosen."""
        if not self._awaited and not self._chance.aims:
            return
        moment: Moment | None = None
        for name, count in Counter(name.removeprefix("ask ") for name in turn().messages).items():
            if name in self._chance.aims or (process.name, name, "") in self._awaited:
                before = self._handled[process.name, name]
                self._handled[process.name, name] += count
                moment = moment or Moment(process.name, name, before + 1)
                self._soon_as_told(self._take_told(process.name, name, "", before, before + count))
        if moment is not None and self._chance.hits():
            self._chance.strike_soon(process, moment)

    def at_call(self, process: Process, call: Call) -> Fault | None:
        """Strike at the moment of a call of the disk, if it is chosen; return what happens at the call."""
        if self._awaited and (process.name, call.kind, call.path) in self._awaited:
            return self._told_at_call(process, call)
        if call.kind not in self._chance.aims or not self._chance.hits():
            return None
        strike = self._chance.strike_call(process, self._moment(process, call))
        return None if strike is None else self._fail(strike, call)

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
                self._soon.append(strike)
                self.later(strike.after, partial(self._strike_soon_as_told, strike))
            else:
                self._skip(strike)

    def _strike_soon_as_told(self, strike: Strike) -> None:
        self._soon.remove(strike)
        self._strike_as_told(strike)

    def _moment(self, process: Process, call: Call) -> Moment:
        others = [each for each in self._world.processes if each.name == process.name and each is not process]
        count = call.count + sum(each.files.calls(call.kind, call.path) for each in others)
        return Moment(process.name, call.kind, count, path=call.path)


def _time(strike: Strike) -> float:
    assert not isinstance(strike.at, Moment)
    return strike.at
