"""A byte stream with faults chosen by a seed, for tests of the protocols on it.

Example:
    >>> from levada.transports.carriers.memory import memory_streams
    >>> async def main() -> None:
    ...     with FaultyNetwork(7, faults=("truncate",), within=4) as network:
    ...         client, server = network.pair(*memory_streams())
    ...         await client.send_all(b"0123456789")
    ...         received = b""
    ...         while part := await server.receive_some():
    ...             received += part
    ...         print(received, network.happened)
    >>> trio.run(main)
    b'0' ['client sends: truncate at byte 1']
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Literal, Self, TypeVar, get_args

import attrs
import trio

from levada.framework.errors import ConnectionClosed, ConnectionLost
from levada.transports.carriers.contracts import ByteStream, CarrierInfo, CarrierStatistics, Octets
from levada.transports.carriers.streams import again

__all__ = ["Fault", "FaultyNetwork", "FaultyStream"]

T = TypeVar("T")

Fault = Literal["none", "cut", "reset", "truncate", "half_close"]
"""The fault of a pair, at some byte of one direction:

* ``"cut"``: the bytes before it arrive, then both ends lose the connection;
* ``"reset"``: both ends lose it at once, and the bytes under way are lost;
* ``"truncate"``: the bytes before it arrive, then the end, as if the sender had closed; the sender notices nothing;
* ``"half_close"``: earlier sends arrive whole, then the end; later sends fail, and the other direction goes on;
* ``"none"``: no fault.
"""


@attrs.define
class _Plan:
    """The fault of one direction."""

    fault: Fault
    at: int  # bytes that come before it


class FaultyNetwork:
    """Wraps pairs of byte streams: bytes arrive late and cut anywhere, and each pair meets one fault in one direction.

    As a context manager it adds a note with the seed and the faults to every exception that passes.

    Args:
        seed: the same seed gives the same faults at the same bytes. (Trio picks the order of tasks by its own dice.)
        faults: what may happen, each equally often.
        within: the fault comes before this many bytes of its direction.
        delay: bytes that have arrived are held back for at most so many seconds (trio's clock).
    """

    def __init__(
        self, seed: int, *, faults: tuple[Fault, ...] = get_args(Fault), within: int = 4096, delay: float = 0.05
    ) -> None:
        self.seed = seed
        self.happened: list[str] = []
        """The faults that have happened, in words."""
        self._random = random.Random(seed)
        self._faults = faults
        self._within = within
        self._delay = delay

    def pair(self, client: ByteStream, server: ByteStream) -> tuple[FaultyStream, FaultyStream]:
        """Return the two ends of a connection with this network between them."""
        fault = self._random.choice(self._faults)
        at = self._random.randrange(self._within)
        from_client = self._random.random() < 0.5
        none = _Plan("none", 0)
        ends = tuple(
            FaultyStream(
                self,
                stream,
                name,
                _Plan(fault, at) if faulty else none,
                random.Random(self._random.random()),
                self._delay,
            )
            for stream, name, faulty in ((client, "client", from_client), (server, "server", not from_client))
        )
        ends[0].meet(ends[1])
        ends[1].meet(ends[0])
        return ends[0], ends[1]

    def __str__(self) -> str:
        return f"FaultyNetwork(seed={self.seed}): {'; '.join(self.happened) or 'nothing has gone wrong'}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(str(self))


class FaultyStream(trio.abc.AsyncResource):
    """One end of a pair on a `FaultyNetwork`; a `ByteStream`."""

    def __init__(
        self, network: FaultyNetwork, stream: ByteStream, name: str, plan: _Plan, dice: random.Random, delay: float
    ) -> None:
        self._network = network
        self._stream = stream
        self._name = name
        self._plan = plan
        self._random = dice
        self._delay = delay
        self._peer = self
        self._sent = 0
        self._swallow = False
        self._send_error: ConnectionLost | None = None
        self._received = 0
        self._last: int | None = None  # bytes after which receiving is over
        self._receive_error: ConnectionLost | None = None  # how it is over; the end if none
        self._closed = False
        self._waiting: set[trio.CancelScope] = set()

    def meet(self, peer: FaultyStream) -> None:
        """Say which stream is the other end."""
        self._peer = peer

    @property
    def info(self) -> CarrierInfo:
        """Who is at the other end of the stream below."""
        return self._stream.info

    @property
    def unsent(self) -> int:
        """Bytes queued in the stream below."""
        return self._stream.unsent

    async def send_all(self, data: Octets) -> None:
        """Wait for room below, then send as `send_nowait` does."""
        self._check_sending()
        await self._unless_broken(lambda: self._stream.send_all(b""))  # waits for room
        self.send_nowait(data)

    def send_nowait(self, data: Octets) -> None:
        """Send `data` down to the fault, if it comes this soon; then let the fault happen."""
        self._check_sending()
        if self._swallow:
            return
        room = self._plan.at - self._sent
        if self._plan.fault != "none" and len(data) > room:
            self._go_wrong(data, room)
            self._check_sending()
            return
        self._sent += len(data)
        self._stream.send_nowait(data)

    def _check_sending(self) -> None:
        if self._send_error is not None and not self._closed:
            raise again(self._send_error)

    def _go_wrong(self, data: Octets, room: int) -> None:
        plan, self._plan = self._plan, _Plan("none", 0)
        lost = ConnectionLost(f"lost by {plan.fault} at byte {plan.at} of what the {self._name} sends")
        self._network.happened.append(f"{self._name} sends: {plan.fault} at byte {plan.at}")
        if plan.fault == "reset":
            self._break(0, lost)
            self._peer._break(0, lost)
            return
        if plan.fault != "half_close":
            self._stream.send_nowait(memoryview(data)[:room])
            self._sent += room
        if plan.fault == "truncate":
            self._swallow = True
        else:
            self._send_error = lost
        if plan.fault == "cut":
            self._break(0, lost)
            self._peer._break(self._sent, lost)
        else:
            self._peer._break(self._sent, None)

    def _break(self, last: int, error: ConnectionLost | None) -> None:
        """End receiving after `last` bytes: with an error, which sending raises at once too, or as the peer's end."""
        self._last = last
        self._receive_error = error
        self._send_error = error or self._send_error
        for scope in self._waiting:
            scope.cancel()

    async def _unless_broken(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Wait for `call`, or until this end breaks, which gives ``None``."""
        with trio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                return await call()
            finally:
                self._waiting.discard(scope)
        return None

    async def send_eof(self) -> None:
        """End this direction, unless a fault has ended it for the peer."""
        self._check_sending()
        if not self._swallow:
            await self._stream.send_eof()

    async def flush(self) -> None:
        """Wait until nothing is queued below; the loss of the connection ends the wait."""
        self._check_sending()
        await self._unless_broken(self._stream.flush)
        self._check_sending()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive a random part of what has arrived, at times late, up to the byte where the fault ends it."""
        while not self._closed:
            if self._last is not None and self._received >= self._last:
                if self._receive_error is not None:
                    raise again(self._receive_error)
                return b""
            data = await self._unless_broken(lambda: self._receive(max_bytes))
            if data is not None:
                self._received += len(data)
                return data
        raise ConnectionClosed("this side closed the stream")

    async def _receive(self, max_bytes: int | None) -> bytes:
        if self._random.random() < 0.25:
            await trio.sleep(self._random.uniform(0, self._delay))
        limit = self._random.choice((1, 2, 7, 64, 1024, 65_536))
        if max_bytes is not None:
            limit = min(limit, max_bytes)
        if self._last is not None:
            limit = min(limit, self._last - self._received)
        return await self._stream.receive_some(limit)

    async def aclose(self) -> None:
        """Close the stream below."""
        self._closed = True
        await self._stream.aclose()

    def abort(self) -> None:
        """Abort the stream below."""
        self._closed = True
        self._stream.abort()

    def statistics(self) -> CarrierStatistics:
        """Return the counters of the stream below."""
        return self._stream.statistics()
