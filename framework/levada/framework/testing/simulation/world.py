"""`simulate`: a whole system of processes in one run of trio, under one seed, in virtual time, with faults.

The rules of this file:

* The seed decides everything: trio's order of tasks, the run queues of all actor systems, ids, latencies, faults, and what a power failure leaves.
  Schedule, processes and faults draw from generators of their own.
* A world in which a module was imported is run again, since an import changes what later worlds do: the classes that messages have.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from math import inf
from typing import Any, Final

import attrs
import trio

from levada.framework.errors import ConfigurationError
from levada.framework.system import ActorSystem
from levada.framework.testing.clock import autojump, deterministic, unshield, watch
from levada.framework.testing.explore import Turn

from .addresses import PROCESS
from .by_chance import Faults
from .disk import Model, SimulatedDisk
from .failure import Hung, SimulationFailure, is_interrupt, shrunk
from .history import History
from .modules import ModuleState
from .network import SimulatedNetwork
from .process import Machine, Process
from .strike import Strike
from .strikes import Strikes

__all__ = ["Simulated", "World", "simulate"]

App = Callable[[ActorSystem], AsyncIterator[Any]]

_KEPT: Final = 10_000
_START: Final = (0.05, 0.3, 1.0)
"""Seconds for Python to start in a child process."""
_SILENT: Final = -1
"""A level below the level of each handler."""
_SLOW: Final = 10.0
"""How much slower the network is in every third world."""
_SHORT_LIFE: Final = 1.0
"""Seconds that a process runs at least, if it does anything."""
_FAILURES: Final = 20
"""Short lives in a row that a process may have."""
_PATIENCE: Final = 60.0
"""Seconds for which short lives may go on: what it needs may be out of reach."""
_MOST_FAILURES: Final = 1_000
"""The same if they take less time than that."""
_REPETITIONS: Final = 10
"""How often a world is run again because it has imported modules."""
_ONE_AT_A_TIME: Final = threading.Lock()
"""Held by `simulate`: trio's order of tasks is one for all threads."""


class World:
    """Machines and processes of one run; made by `simulate`."""

    def __init__(
        self,
        seed: int,
        machines: Sequence[str],
        faults: Faults | None,
        strikes: Sequence[Strike] | None,
        limit: float,
        rest: float,
    ) -> None:
        self.seed = seed
        self.faults = faults or Faults(strikes=0, skew=0, loss=0)
        self.clock = autojump()
        self.random = random.Random(f"world {seed}")
        self.history = History()
        """What clients have asked, with `History.call`."""
        self.events: deque[tuple[float, str]] = deque(maxlen=_KEPT)
        """The fates of processes and machines, and the lines of `note`, each with its time in seconds."""
        latency = self.faults.latency
        if self.random.random() < 1 / 3:
            latency = latency[0] * _SLOW, latency[1] * _SLOW
        chance = random.Random(f"datagrams {seed}")
        loss = self.faults.loss * max(0.0, chance.uniform(-1, 1))
        self.network = SimulatedNetwork(machines, random.Random(f"network {seed}"), latency, chance, loss)
        model: Model = self.random.choice(("ordered", "lax")) if self.faults.disk is None else self.faults.disk
        self.machines = {
            name: Machine(self, name, SimulatedDisk(model, time=self.clock.current_time)) for name in machines
        }
        self.processes: list[Process] = []
        """All processes so far, the dead ones too."""
        self.strikes = Strikes(self, self.faults, random.Random(f"faults {seed}"), strikes)
        self.modules = ModuleState()
        """Variables that all processes share."""
        self._pids = 100
        self._limit, self._rest = limit, rest
        self._scope = trio.CancelScope()
        """Ends the scenario at the limit."""
        self._stuck: str | None = None
        self._nursery: trio.Nursery

    # What users call.

    async def start(
        self,
        name: str,
        main: Callable[[], Awaitable[object]] | App,
        *,
        machine: str | None = None,
        restart: float | None = None,
    ) -> Process:
        """Start a process.

        Args:
            name: finds it: ``world[name]``. No process of this name may run.
            main: an async function that is the program, or an app as for ``levada serve``: an async generator function of an actor system.
            machine: the name of the machine that it runs on; by default the first one.
            restart: the seconds after which it is started again when it has ended other than with the exit code 0; None: never. Then an error
                that leaves `main` is an error of the scenario. A failed assertion always is. So is a process that has failed within a second
                of each of its starts for a minute (and 20 times), or 1,000 times.
        """
        return await self._start(name, main, machine, restart, [])

    async def _start(
        self, name: str, main: Any, machine: str | None, restart: float | None, failures: list[float]
    ) -> Process:
        where = self._machine(machine or next(iter(self.machines)))
        if any(process.name == name and not process.ended.is_set() for process in self.processes):
            raise ConfigurationError(f"there is a process {name!r} already")
        await where.came_up.wait()
        self.modules.watch(main)
        process = Process(self, name, where, None, returns=restart is not None)
        program: Any = _serving(main, name, process) if inspect.isasyncgenfunction(main) else main
        self.begin(process, program)
        if restart is not None:
            self._nursery.start_soon(self._start_again, process, main, restart, failures)
        return process

    async def _start_again(self, process: Process, main: Any, restart: float, failures: list[float]) -> None:
        """Start a process again after its end.

        Args:
            process: the one that runs, or has ended.
            main: its main function.
            restart: seconds until then.
            failures: the times at which it has failed at once, in a row.
        """
        began = trio.current_time()
        code = await process.wait()
        if not code:
            return
        now = trio.current_time()
        if code < 0 or now - began > _SHORT_LIFE:
            failures.clear()
        else:
            failures.append(now)
            count, seconds = len(failures), now - failures[0]
            if (count >= _FAILURES and seconds >= _PATIENCE) or count >= _MOST_FAILURES:
                why = f"exit code {code}" if process.error is None else repr(process.error)
                raise AssertionError(
                    f"{process.name} failed at once {count} times in {seconds:g} s, the last time with {why}"
                ) from process.error
        await trio.sleep(restart)
        await self._start(process.name, main, process.machine.name, restart, failures)

    def __getitem__(self, name: str) -> Process:
        """Return the process of this name that was started last: also a node, by its name, and a keeper."""
        for process in reversed(self.processes):
            if process.name == name:
                return process
        names = ", ".join(dict.fromkeys(process.name for process in self.processes))
        raise KeyError(f"there is no process {name!r}; there are: {names or 'none'}")

    def _machine(self, name: str) -> Machine:
        if name not in self.machines:
            raise ConfigurationError(f"there is no machine {name!r}; there are: {', '.join(self.machines)}")
        return self.machines[name]

    def disk(self, name: str) -> SimulatedDisk:
        """Return the disk of a machine, by its name or the name of a process on it.

        ``SimulatedFiles(world.disk(name))`` reads it at any time: errors that strike the machine's processes do not strike this reader.
        """
        return self.machines[name].disk if name in self.machines else self[name].machine.disk

    def cut(
        self,
        sender: str,
        receiver: str,
        *,
        one_way: bool = False,
        only_udp: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Block the way between two machines or processes, until `heal`.

        Args:
            sender: the name of a machine or a process.
            receiver: the same.
            one_way: whether what `receiver` sends still arrives.
            only_udp: whether only datagrams are lost, as behind a firewall that lets TCP pass but not QUIC.
            seconds: after which this cut heals by itself, and no other between them.

        Raises:
            KeyError: there is no such machine and has been no such process.
        """
        self._know(sender, receiver)
        how = "->" if one_way else "<->"
        what = "cut UDP" if only_udp else "cut"
        self.note(f"{what} {sender} {how} {receiver}{'' if seconds is None else f' for {seconds:g} s'}")
        ends = [self.network.cut(sender, receiver, only_udp=only_udp)]
        if not one_way:
            ends.append(self.network.cut(receiver, sender, only_udp=only_udp))
        if seconds is not None:
            for end in ends:
                self.network.later(seconds, end)

    def heal(self, sender: str, receiver: str) -> None:
        """End all cuts between them, both ways; everything sent meanwhile arrives. Raises `KeyError` as `cut` does."""
        self._know(sender, receiver)
        self.note(f"healed {sender} <-> {receiver}")
        self.network.heal(sender, receiver)
        self.network.heal(receiver, sender)

    def _know(self, *names: str) -> None:
        for name in names:
            if name not in self.machines:
                self[name]

    def note(self, text: str) -> None:
        """Add a line to the events, which the text of a failure shows. Does nothing once the world ends: what its end ends is no fate."""
        if not self._nursery.cancel_scope.cancel_called:
            self.events.append((trio.current_time(), text))

    # What processes call.

    def next_pid(self) -> int:
        """Return the number of a new process."""
        self._pids += 1
        return self._pids

    def skew(self) -> float:
        """Return the seconds that the clock of a new process is off."""
        return self.random.uniform(-self.faults.skew, self.faults.skew)

    def turn(self, process: Process, turn: Callable[[], Turn]) -> None:
        """Take note of what an actor of a process will handle."""
        self.strikes.aim(process, turn)

    def begin(self, process: Process, main: Callable[[], Awaitable[object]], *, starting: bool = False) -> None:
        """Run a process."""

        async def begun() -> object:
            await trio.sleep(self.random.choice(_START))
            return await main()

        self.processes.append(process)
        self.note(f"{process.name}: started on {process.machine.name} as process {process.pid}")
        process.context.run(self._nursery.start_soon, process.run, begun if starting else main)

    def set_deadline(self) -> None:
        """Have the scenario end in time: at the limit, and when it has had its rest since the last strike."""
        self._scope.deadline = min(self._limit, self.strikes.over + self._rest)

    async def run(self, scenario: Callable[[World], Awaitable[object]]) -> None:
        """Run a scenario to its end, and then end all processes."""
        watch(self.network.due, self.network.wake, self.end_stuck)
        self.set_deadline()
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self.network.carry)
                self._nursery.start_soon(self.strikes.run)
                try:
                    with self._scope:
                        await scenario(self)
                finally:
                    self.strikes.stop()
                    for process in self.processes:
                        process.go_on()  # cancelled tasks may wait for a thread of a paused process
                if self._scope.cancelled_caught:
                    raise Hung(f"the scenario did not end within {self._scope.deadline:g} s of virtual time")
                self._nursery.cancel_scope.cancel()
            if self._stuck is not None:
                raise Hung(self._stuck)
        finally:
            self.modules.warn()

    def end_stuck(self) -> None:
        """End a world that is stuck, because every task waits and no time-out will wake one: cancel shielded tasks too, and fail."""
        left = ", ".join(process.name for process in self.processes if not process.gone.is_set())
        self._stuck = (
            f"every task waits, and no time-out will wake one; processes that have not ended: {left or 'none'}"
        )
        unshield()


def _serving(app: App, name: str, process: Process) -> Callable[[], Awaitable[None]]:
    async def main() -> None:
        async with ActorSystem(name) as system, asynccontextmanager(app)(system):
            await process.terminated.wait()

    return main


@attrs.frozen
class Simulated:
    """The result of `simulate`."""

    digests: dict[int, str]
    """By seed, a digest of everything that was sent between processes, with its time."""
    seconds: float
    """Virtual seconds of all worlds together."""
    strikes: int
    """Faults of all worlds together."""


def simulate(
    scenario: Callable[[World], Awaitable[object]],
    *,
    seeds: Iterable[int] = range(20),
    machines: Sequence[str] = ("machine",),
    faults: Faults | None = None,
    strikes: Sequence[Strike] | None = None,
    shrink: bool = True,
    limit: float = 3600.0,
) -> Simulated:
    """Run a scenario once for each seed, in a new world and a new run of trio with virtual time.

    Call it from a plain function, not from inside trio.

    Args:
        scenario: an async function of a world: it starts processes, uses them, and fails by raising. When it returns, all processes are killed.
        seeds: each is one world; the same seed is the same world as long as the code stays the same, and the message classes that are imported:
            nodes tell them to the driver, which takes longer for many hundreds. At least one.
        machines: the names of the machines; they are the names of their hosts too.
        faults: what goes wrong by chance; None: only what the scenario does.
        strikes: exactly what strikes, instead of the strikes by chance of `faults`; what else `faults` says holds. A strike of something that is not
            there, or would not come back, and a strike whose moment does not come are skipped, and the events say so.
        shrink: whether a world that fails is run again with fewer strikes, to see which are needed: up to 50 times, and for 30 s of real time.
            The failure is then the one with the fewest; its error has the same type. Ctrl-C ends the search, not the failure.
            If it hangs, the others are not run to the limit, and the last one is, to be sure.
        limit: seconds of virtual time after which a world counts as hung. A loop in which no virtual time passes is not seen.

    A variable of a module of the program that a world has changed is a `SharedStateWarning`.

    Raises:
        SimulationFailure: the scenario raised, or a process that does not come back; names the seed. The remaining seeds are not run.
            Ctrl-C is raised as it is.
        ConfigurationError: there are no seeds, no machines, or two machines of one name.
        RuntimeError: this trio cannot repeat its order of tasks; a world imports modules in each run; or it is called inside of trio, or
            while another thread simulates.
    """
    names = _names(machines)
    if trio.lowlevel.in_trio_run():
        raise RuntimeError("simulate() makes a run of trio for each world, so it cannot be called inside of one")
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise RuntimeError("another thread runs simulate(); a process simulates one world at a time")
    try:
        digests, seconds, count = {}, 0.0, 0
        for seed in seeds:

            def run(strikes: Sequence[Strike] | None, rest: float, seed: int = seed) -> World | SimulationFailure:
                return _simulate(scenario, lambda: World(seed, names, faults, strikes, limit, rest))

            def attempt(strikes: Sequence[Strike], rest: float) -> SimulationFailure | float:
                ended = run(strikes, rest)
                return ended if isinstance(ended, SimulationFailure) else ended.clock.current_time()

            ended = run(strikes, inf)
            if isinstance(ended, SimulationFailure):
                raise shrunk(ended, attempt) if shrink and ended.strikes else ended
            digests[seed] = ended.network.digest
            seconds += ended.clock.current_time()
            count += ended.strikes.done
    finally:
        _ONE_AT_A_TIME.release()
    if not digests:
        raise ConfigurationError("simulate() got no seeds, so nothing was tried")
    return Simulated(digests, seconds, count)


def _names(machines: Sequence[str]) -> tuple[str, ...]:
    names = tuple(machines)
    if isinstance(machines, str) or not names or len({name.lower() for name in names}) < len(names):
        raise ConfigurationError(f"machines is {machines!r}, wanted a list of at least one name, each once")
    return names


def _simulate(scenario: Callable[[World], Awaitable[object]], make: Callable[[], World]) -> World | SimulationFailure:
    """Run a scenario in a world, and again in a new one if it has imported modules; return the world, or how it failed."""
    known: set[str] = set()
    failed: BaseException | None = None
    world = make()
    for _ in range(_REPETITIONS):
        known, failed = set(sys.modules), None
        try:
            with deterministic(world.seed), _dead_are_silent():
                trio.run(world.run, scenario, clock=world.clock)
        except BaseException as error:
            if is_interrupt(error):
                raise
            failed = _only(error)  # which may be an outcome of pytest, and no `Exception`
        if len(known) == len(sys.modules):
            if failed is not None:
                failure = SimulationFailure(world.seed, failed, tuple(world.events), world.strikes.kept)
                failure.__cause__ = failed
                return failure
            return world
        world = make()
    names = ", ".join(sorted(set(sys.modules) - known)[:3])
    raise RuntimeError(
        f"the world of seed {world.seed} imports a module in each run, at last {names}, and so is another one each time; import before"
    ) from failed


@contextmanager
def _dead_are_silent() -> Iterator[None]:
    """Drop what dead processes log while their tasks end."""
    make = logging.getLogRecordFactory()

    def make_record(*args: Any, **more: Any) -> logging.LogRecord:
        record, process = make(*args, **more), PROCESS.get()
        if process is not None and process.dead:
            record.levelno = _SILENT
        return record

    logging.setLogRecordFactory(make_record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def _only(error: BaseException) -> BaseException:
    """Return the error of a group of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
