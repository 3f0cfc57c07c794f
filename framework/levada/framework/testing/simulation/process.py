"""Processes and machines of a simulated world.

A process is some tasks with a `levada.framework.platform.Platform` of their own. Cancelling them is no kill: they would clean up, and say goodbye.
So a kill first cuts all that others can see (wires, addresses, files, threads), then tells the parent, and cancels the tasks at last.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from functools import partial
from signal import SIGTERM
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple

import attrs
import trio

from levada.framework._runtime.host import split_cancelled
from levada.framework.platform import PLATFORM, Platform, ProcessExit, Shares
from levada.framework.testing.clock import CountingClock
from levada.framework.testing.explore import shuffle

from .addresses import PROCESS, Endpoint, SharedAddresses
from .disk import SimulatedDisk
from .faults import CHANGES, Call, Crashed, DiskFaults, Fault
from .files import SimulatedFiles
from .network import NetworkOfProcess, SimulatedWire

if TYPE_CHECKING:
    from .world import World

__all__ = ["Machine", "Process"]

SIGKILL: Final = 9
"""As Linux has it, also where `signal` has none."""

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_BEGIN: Final = 1_600_000_000.0
"""The seconds since 1970 at which a world begins."""
_THREADS: Final = (0.0002, 0.001, 0.005)
"""Seconds that a call in a thread may take, besides the disk's."""
_QUANTUM: Final = 3
"""The most messages that an actor handles in a turn, as of `levada.framework.testing.explore`."""


class Machine:
    """A machine: its disk, and whether it has power."""

    def __init__(self, world: World, name: str, disk: SimulatedDisk) -> None:
        self.world = world
        self.name = name
        self.disk = disk
        self.faults: DiskFaults | None = None
        """Says what happens at each call that a process of it makes; may be changed at any time. None: nothing does."""
        self.came_up = trio.Event()
        self.came_up.set()

    @property
    def is_up(self) -> bool:
        """Whether it has power."""
        return self.world.network.hosts[self.name]

    @property
    def processes(self) -> list[Process]:
        """The processes that run on it."""
        return [process for process in self.world.processes if process.machine is self and not process.dead]

    @property
    def returns(self) -> bool:
        """Whether there are processes on it, and each of them comes back when it ends."""
        processes = self.processes
        return bool(processes) and all(process.returns for process in processes)

    def power_failure(self, seconds: float = 1.0) -> None:
        """Cut the power: all its processes are gone without a word, and its disk keeps what it must and some of the rest.

        Args:
            seconds: after which it has power again.
        """
        if not self.is_up:
            return
        self.world.note(f"{self.name}: power failure for {seconds:g} s")
        self.world.network.hosts[self.name] = False
        self.came_up = trio.Event()
        for process in self.processes:
            process.end(-SIGKILL)
        self.disk.power_failure(self.world.random.getrandbits(32))
        self.world.network.later(seconds, self._come_up)

    def _come_up(self) -> None:
        self.world.note(f"{self.name}: power is back")
        self.world.network.hosts[self.name] = True
        self.came_up.set()
        self.world.network.look()


class Process(Endpoint):
    """A process of a simulated world; made by `World.start`, and by programs that start nodes or keepers."""

    def __init__(
        self,
        world: World,
        name: str,
        machine: Machine,
        parent: Process | None,
        *,
        returns: bool,
        shares: SharedAddresses | None = None,
    ) -> None:
        super().__init__(name, machine.name, world.network.hosts, shares)
        self.world = world
        self.machine = machine
        self.parent = parent
        self.returns = returns
        """Whether another one takes its place when it ends."""
        self.pid = world.next_pid()
        self.code: int | None = None
        """The exit code, negative for a signal; None while it runs, as far as others know."""
        self.error: BaseException | None = None
        """The error that has ended it; None if it was killed."""
        self.terminated = trio.Event()
        """Set by SIGTERM."""
        self.ended = trio.Event()
        """Set when it has ended, as far as others know."""
        self.offset = machine.world.skew()
        """Seconds that its clock is ahead."""
        self.gone = trio.Event()
        """Set when its tasks have ended."""
        self._crash_in = 0
        self._resumed = trio.Event()
        self._scope = trio.CancelScope()
        self._random = random.Random(world.random.getrandbits(64))
        self.files = _Files(self)
        self._platform = self._make_platform()
        self.context.run(PLATFORM.set, self._platform)
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return f"<process {self.pid} {self.name} on {self.machine.name}{'' if self.code is None else f', ended with {self.code}'}>"

    def _make_platform(self) -> Platform:
        order = random.Random(self._random.getrandbits(64))
        return Platform(
            time=lambda: _BEGIN + trio.current_time() + self.offset,
            virtual=True,
            monotonic=trio.current_time,
            perf_counter=CountingClock(random.Random(self._random.getrandbits(64))),
            process_time=lambda: 0.0,
            token_bytes=self._random.randbytes,
            files=self.files,
            run_in_thread=self._run_in_thread,
            thread_pool=lambda threads, name: _NoThreads(),
            pid=lambda: self.pid,
            host=lambda: self.machine.name,
            scheduling=lambda run_queue: shuffle(run_queue, order, _QUANTUM, partial(self.world.turn, self)),
            signals=lambda *numbers: nullcontext(_Signals(self.terminated)),
            launch=self._launch,
            network=NetworkOfProcess(self.world.network, self),
        )

    # What users call.

    def kill(self) -> None:
        """Kill it, as SIGKILL does. What it has written is in the page cache of its machine. Does nothing if it has ended."""
        if not self.dead:
            self.world.note(f"{self.name}: killed")
            self.end(-SIGKILL)

    def pause(self, seconds: float) -> None:
        """Stop its wires and threads for so many seconds, as SIGSTOP and a machine that swaps do. Its timers run on."""
        if not self.dead:
            self.world.network.later(seconds, self._resume)
            self.world.note(f"{self.name}: paused for {seconds:g} s")
            self.paused += 1

    def zombie(self, seconds: float) -> None:
        """Make its parent take it for dead, while it lives on for so many seconds with all its other wires: a machine out of reach."""
        if self.parent is not None and not self.ended.is_set():
            self.world.note(f"{self.name}: out of reach for {seconds:g} s, and taken for dead")
            for wire in self.wires:
                for way in wire.ways:
                    way.ended = way.ended or self.parent in (way.sender, way.receiver)
            self.code = -SIGKILL
            self.ended.set()
            self.world.network.later(seconds, self.kill)

    def crash_in(self, calls: int) -> None:
        """Kill it in the middle of a call of its disk, after so many calls that change something."""
        self._crash_in = calls

    def power_failure(self, seconds: float = 1.0) -> None:
        """Cut the power of its machine, see `Machine.power_failure`."""
        self.machine.power_failure(seconds)

    def clock(self, seconds: float) -> None:
        """Set its clock forward, or back if negative. Its timers do not notice."""
        self.world.note(f"{self.name}: clock {seconds:+g} s")
        self.offset += seconds

    def terminate(self) -> None:
        """Send SIGTERM: a process that was started with an app ends in order, and so do a node and ``levada serve --nodes``."""
        self.terminated.set()

    async def wait(self) -> int:
        """Wait until it has ended; return its exit code, negative for a signal."""
        await self.ended.wait()
        assert self.code is not None
        return self.code

    # What the world and the platform call.

    def fault(self, call: Call) -> Fault | None:
        """Say what happens at a call of the disk."""
        if self._crash_in and call.kind in CHANGES:
            self._crash_in -= 1
            if not self._crash_in:
                crash = Fault(crash=True, done=self._random.random())
                self.world.strikes.crashes(self, call, crash)
                return crash
        fault = self.world.strikes.at_call(self, call)
        return self.machine.faults(call) if fault is None and self.machine.faults is not None else fault

    def go_on(self) -> None:
        """End its pauses for good, because the world ends."""
        self.paused = 0
        self._resumed.set()

    def _resume(self) -> None:
        self.paused -= 1
        if not self.paused:
            self._resumed.set()
            self._resumed = trio.Event()
            self.world.network.look()

    def end(self, code: int) -> None:
        """End: cut its effects, then its tasks."""
        if self.dead:
            return
        self.dead = True
        self.world.network.forget(self, "the process at the other end has ended")
        self.files.kill()
        if self.code is None:
            self.code = code
        self.ended.set()
        self._scope.cancel()

    async def run(self, main: Callable[[], Awaitable[object]]) -> None:
        """Run its main function, whose result is the exit code if it is a number."""
        code, error = 1, None
        try:
            with self._scope:
                found = await main()
                code = found if isinstance(found, int) else 0
        except SystemExit as ends:
            code = _exit_code(ends)
        except BaseException as raised:  # a dead process has no errors; others are raised below
            cancelled, rest = split_cancelled(raised)
            if rest is not None and BaseExceptionGroup("", [rest]).subgroup(KeyboardInterrupt) is not None:
                raise  # Ctrl-C is not the program's
            if cancelled is not None:  # the world ends
                raise cancelled from None
            if not self.dead:
                self.error = error = raised
        finally:
            self.gone.set()
            if not self.dead:
                how = "" if error is None else f": {error!r}"
                self.world.note(f"{self.name}: ended with exit code {code}{how}")
                self.end(code)
        if error is not None and (not self.returns or not isinstance(error, Exception) or _asserts(error)):
            raise error

    def _launch(
        self, name: str, main: Callable[[ProcessExit], Awaitable[int]], *, shares: Shares | None = None
    ) -> _Launched:
        assert shares is None or isinstance(shares, SharedAddresses)
        child = Process(self.world, name, self.machine, self, returns=True, shares=shares)
        wires = self.world.network.wire(self, child), self.world.network.wire(self, child)
        self.world.begin(child, partial(main, _Inside(child)), starting=True)
        return _Launched(child, *wires)

    async def _run_in_thread(
        self,
        function: Callable[[*Ts], R],
        /,
        *arguments: *Ts,
        abandon_on_cancel: bool = False,
        limiter: trio.CapacityLimiter | None = None,
    ) -> R:
        """Call a function after a while, in the task itself."""
        await trio.lowlevel.checkpoint_if_cancelled()
        borrower = object()
        if limiter is not None:
            await limiter.acquire_on_behalf_of(borrower)
        try:
            with trio.CancelScope(shield=not abandon_on_cancel):
                await self._wait_as_thread(self._random.choice(_THREADS))
            try:
                return function(*arguments)
            finally:
                if waiting := self.files.take_waiting():
                    with trio.CancelScope(shield=not abandon_on_cancel):
                        await self._wait_as_thread(waiting)
        finally:
            if limiter is not None:
                limiter.release_on_behalf_of(borrower)

    async def _wait_as_thread(self, seconds: float) -> None:
        if self.dead:
            raise Crashed
        await trio.sleep(seconds)
        while self.paused and not self.dead:
            await self._resumed.wait()
        if self.dead:
            raise Crashed


def _exit_code(ends: SystemExit) -> int:
    """Return the exit code that Python makes of `sys.exit`."""
    if ends.code is None:
        return 0
    return ends.code if isinstance(ends.code, int) else 1


def _asserts(error: Exception) -> bool:
    """Return whether an error is a failed assertion, which is a failure of the scenario wherever it is raised."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(AssertionError) is not None
    return isinstance(error, AssertionError)


class _Files(SimulatedFiles):
    """Files whose end is the end of their process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        super().__init__(process.machine.disk, faults=process.fault)

    def kill(self) -> None:
        """End the process at once, not only the task that makes a call."""
        super().kill()
        if not self._process.dead:
            self._process.world.note(f"{self._process.name}: crashed at a call of its disk")
            self._process.end(-SIGKILL)


class _NoThreads(Executor):
    """Calls functions at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it now."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        return future


@attrs.frozen(eq=False)
class _Launched:
    """A child, as its parent sees it; a `levada.framework.platform.Launched`."""

    _child: Process
    wire: SimulatedWire
    heart: SimulatedWire

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._child.terminate()

    def kill(self) -> None:
        """Send SIGKILL, unless it counts as dead."""
        if not self._child.ended.is_set():
            self._child.kill()

    async def wait(self) -> int:
        """Wait until it has ended."""
        return await self._child.wait()


class _Signals:
    """The signals that a process gets: SIGTERM, once."""

    def __init__(self, terminated: trio.Event) -> None:
        self._terminated = terminated
        self._is_told = False

    def __aiter__(self) -> _Signals:
        return self

    async def __anext__(self) -> int:
        if self._is_told:
            await trio.sleep_forever()
        await self._terminated.wait()
        self._is_told = True
        return SIGTERM


class _Inside:
    """A child, as it sees itself; a `levada.framework.platform.Exit`."""

    def __init__(self, child: Process) -> None:
        self.terminated = child.terminated
        self._child = child

    def exit_within(self, seconds: float, code: int) -> None:
        """End the process after `seconds` at the latest."""
        child = self._child
        child.world.network.later(seconds, lambda: child.end(code))
