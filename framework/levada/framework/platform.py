"""What a process takes from its surroundings: clocks, random bytes, files, threads, its names, other processes, the network.

What reads a clock or starts a thread through the `Platform` of the context runs in other surroundings unchanged: in virtual time, or simulated.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from time import monotonic, perf_counter, process_time, time
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, TypeVarTuple, Unpack

import attrs
import trio

from .files import Files

if TYPE_CHECKING:
    from concurrent.futures import Executor

__all__ = [
    "PLATFORM", "REAL", "Datagrams", "Launch", "Launched", "Network", "Platform", "ProcessExit", "RunInThread", "Shares", "Wire",
]  # fmt: skip

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class RunInThread(Protocol):
    """Calls a function in a thread, as `trio.to_thread.run_sync` does."""

    def __call__(
        self,
        function: Callable[[Unpack[Ts]], R],
        /,
        *arguments: *Ts,
        abandon_on_cancel: bool = False,
        limiter: trio.CapacityLimiter | None = None,
    ) -> Awaitable[R]:
        """Call it and wait for its result. Cancellation waits for it too, or with `abandon_on_cancel` leaves it alone."""
        ...


def _thread_pool(threads: int, name: str) -> Executor:
    from concurrent.futures import ThreadPoolExecutor  # programs that need none need not load it

    return ThreadPoolExecutor(threads, name)


class Wire(Protocol):
    """A connection of two processes, below a carrier: it calls functions of the carrier at the other end, in order, or never."""

    on_lost: Callable[[int, str], None]
    """Set by the carrier. Called with a side (0 connected or started the other) and the reason when that side learns that the wire was cut."""

    def post(self, way: int, call: Callable[..., None], *arguments: object) -> None:
        """Call at the other end, later, and after everything that was posted this way before.

        Args:
            way: 0 from the side that connected or started the other, 1 from the other side.
            call: what arrives; it must not wait.
            arguments: of the call.
        """


class Datagrams(Protocol):
    """A socket for datagrams: they may be lost, and may overtake each other.

    An address is a tuple of a host, a port, and what else the system adds.
    """

    @property
    def address(self) -> Any:
        """The local address."""
        ...

    async def receive(self) -> Sequence[tuple[bytes, Any]]:
        """Wait for datagrams, and take a burst of them, each with the address to answer to.

        Raises:
            trio.ClosedResourceError: the socket was closed.

        Cancellation:
            no datagram was taken.
        """
        ...

    def send(self, datagrams: Sequence[tuple[bytes, Any]]) -> int:
        """Send without waiting; return how many were accepted. Send the rest again after `writable`."""
        ...

    async def writable(self) -> None:
        """Wait until more can be sent.

        Raises:
            trio.ClosedResourceError: the socket was closed.
        """

    def close(self) -> None:
        """Release the address."""


class Shares(Protocol):
    """Addresses that several processes share; made by `Network.share`. Each peer comes to one of those that listen, or waits for one."""

    def close(self) -> None:
        """Share no more: an address is free once none of the processes listens there."""


class Network(Protocol):
    """A network that is not the real one, as one of its processes sees it."""

    def bind(self, kind: str, host: str, port: int, listener: Any) -> int:
        """Take an address for a listener, and return its port.

        Args:
            kind: ``"tcp"`` or ``"unix"``.
            host: a host name or an address; for ``"unix"``, the path.
            port: 0 chooses a free one; always 0 for ``"unix"``.
            listener: what `connect` returns to other processes.

        Raises:
            OSError: the address is taken, or not one of this machine.
        """
        ...

    def release(self, kind: str, host: str, port: int) -> None:
        """Free an address."""

    async def connect(self, kind: str, host: str, port: int) -> tuple[Wire, Any]:
        """Connect to an address; return the wire and the listener there. Waits for as long as the address is out of reach.

        Raises:
            OSError: no process listens there, or there is no such host.
        """
        ...

    def resolve(self, host: str) -> str:
        """Return the name by which datagrams find a host.

        Raises:
            OSError: there is no such host.
        """
        ...

    def datagrams(self, host: str, port: int) -> Datagrams:
        """Open a socket for datagrams; port 0 chooses a free one.

        Raises:
            OSError: the address is taken, or not one of this machine.
        """
        ...

    def share(self) -> Shares:
        """Share addresses among processes that this one will start."""
        ...


class ProcessExit(Protocol):
    """A process of `Launch`, as it sees itself."""

    terminated: trio.Event
    """Set by SIGTERM."""

    def exit_within(self, seconds: float, code: int) -> None:
        """End this process after `seconds` at the latest, whatever its tasks do."""


class Launched(Protocol):
    """A process of `Launch`, as the process that started it sees it."""

    @property
    def wire(self) -> Wire:
        """The connection with the process: the parent has way 0."""
        ...

    @property
    def heart(self) -> Wire:
        """A second one, for heartbeats."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM. Does nothing if it has ended."""

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if it has ended."""

    async def wait(self) -> int:
        """Wait until it has ended; return its exit code, negative for a signal."""
        ...


class Launch(Protocol):
    """Starts a process that is not a real one."""

    def __call__(
        self, name: str, main: Callable[[ProcessExit], Awaitable[int]], *, shares: Shares | None = None
    ) -> Launched:
        """Start it; `main` runs in its surroundings and returns its exit code.

        Args:
            name: of the process.
            main: its main function.
            shares: it shares the addresses of its listeners with all processes that were started with these; None: they are its own.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class Platform:
    """The surroundings of a process: by default the real ones. All functions but `run_in_thread` may be called in any thread."""

    time: Callable[[], float] = time
    """Returns the seconds since 1970, on a clock that may be set."""
    virtual: bool = False
    """Whether time is virtual: it passes when everything waits, so what waits for a time does not look at the world at intervals."""
    monotonic: Callable[[], float] = monotonic
    """Returns the seconds since some moment, on a clock that is never set."""
    perf_counter: Callable[[], float] = perf_counter
    """Returns the seconds since some moment, on the finest clock, to measure work."""
    process_time: Callable[[], float] = process_time
    """Returns the seconds of CPU time that the process has used."""
    token_bytes: Callable[[int], bytes] = secrets.token_bytes
    """Returns so many random bytes, which no peer can guess."""
    files: Files = attrs.field(factory=Files)
    run_in_thread: RunInThread = trio.to_thread.run_sync
    thread_pool: Callable[[int, str], Executor] = _thread_pool
    """Makes so many threads at most, whose names begin so, for what blocks and is done at once: syncs of many files. Shutting it down ends them."""
    pid: Callable[[], int] = os.getpid
    """Returns the number of the process."""
    host: Callable[[], str] = socket.gethostname
    """Returns the name of the machine."""
    scheduling: Callable[[Any], None] | None = None
    """Called with the run queue of each system that starts, to change its order; None: not called."""
    signals: Callable[..., AbstractContextManager[AsyncIterator[int]]] = trio.open_signal_receiver
    """Receives signals with these numbers, as `trio.open_signal_receiver`."""
    launch: Launch | None = None
    """Starts processes; None: the operating system does."""
    network: Network | None = None
    """Connects processes; None: the operating system does."""


REAL: Final = Platform()
"""The real surroundings, which are the default."""

PLATFORM: Final[ContextVar[Platform]] = ContextVar("levada_platform", default=REAL)
"""The surroundings of this process."""
