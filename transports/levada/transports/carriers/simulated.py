"""Byte streams between processes of a simulated network: `levada.framework.platform.Platform.network` in place of the sockets of TCP and Unix.

The rules of this file:

* The carriers come here where they would open a socket. URLs, settings and errors mean the same, so a program need not know. `dial` and
  `listen` give Any, for the classes of the carriers: the contracts are the same.
* A stream is one of `levada.transports.carriers.memory` over a `Wire`. Windows and backpressure are the same; the wire decides what arrives
  and when, each way for itself.
* `levada.transports.carriers.simulated_tls` has the same for TLS.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.framework.platform import PLATFORM, Network, Wire
from levada.transports.carriers._memory_pipe import TO_RECEIVER, Flow, MemoryConfig, MemoryLink, Pipe
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.contracts import CarrierInfo
from levada.transports.carriers.memory import MemoryByteStream

if TYPE_CHECKING:
    from levada.transports.carriers.streams import StreamConfig

__all__ = ["SimulatedListener", "authority", "connect", "dial", "join", "listen", "over"]


L = TypeVar("L", bound="SimulatedListener")


class _WireLink(MemoryLink):
    """A link whose calls travel over a `Wire`, each way for itself."""

    def __init__(self, config: MemoryConfig, wire: Wire, infos: tuple[CarrierInfo, CarrierInfo]) -> None:
        super().__init__(config)
        self.direct = False
        there, back = Pipe(self, Flow()), Pipe(self, Flow())
        self._wire = wire
        self._ways = {there: 0, back: 1}
        self.sides = MemoryByteStream(self, there, back, infos[0]), MemoryByteStream(self, back, there, infos[1])
        wire.on_lost = self._lost

    def post(self, arrive: Callable[..., None], *args: object) -> None:
        """Call at the other end when the wire carries it there."""
        way = self._ways[arrive.__self__]  # type: ignore[attr-defined]
        forward = arrive.__func__ in TO_RECEIVER  # type: ignore[attr-defined]
        self._wire.post(way if forward else 1 - way, arrive, *args)

    def _lost(self, side: int, why: str) -> None:
        self.sides[side].lose(ConnectionLost(why))


def join(
    wire: Wire, config: StreamConfig | None, infos: tuple[CarrierInfo, CarrierInfo]
) -> tuple[MemoryByteStream, MemoryByteStream]:
    """Make both ends of a stream: of the side that connected, and of the other side."""
    settings = MemoryConfig()
    if config is not None:
        settings = attrs.evolve(settings, high_watermark=config.high_watermark, close_timeout=config.close_timeout)
    return _WireLink(settings, wire, infos).sides


def over(wire: Wire, names: tuple[str, str]) -> tuple[MemoryByteStream, MemoryByteStream]:
    """Make both ends of a stream in place of a socket pair; `names` are the processes, as the other side knows them.

    The first end is of the process that starts the other one.
    """
    parent, child = names
    return join(
        wire,
        None,
        (
            CarrierInfo(scheme="unix", local="socket pair", peer=child),
            CarrierInfo(scheme="unix", local="socket pair", peer=parent),
        ),
    )


class SimulatedListener:
    """Accepts the peers of a simulated network; a `Listener` of byte streams, made by `listen`."""

    def __init__(self) -> None:
        self.url = ""
        """The URL to dial, with the port, once it is bound."""
        self.pid = PLATFORM.get().pid()
        """Of the process that listens."""
        self.admission = Admission("")
        """Counts the peers that were turned away. Addresses have no limits here."""
        self._give, self._take = trio.open_memory_channel[MemoryByteStream](math.inf)

    def arrive(self, stream: MemoryByteStream) -> None:
        """Queue a peer for `accept`; refuse it if the listener is closed."""
        try:
            self._give.send_nowait(stream)
        except trio.ClosedResourceError:
            stream.abort()

    async def accept(self) -> MemoryByteStream:
        """Wait for the next peer: see `Listener.accept`."""
        try:
            return await self._take.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise ConnectionClosed(f"this side closed the listener {self.url}") from error

    async def aclose(self) -> None:
        """Stop accepting, and abort the streams that were not accepted. Accepted streams stay open."""
        self._give.close()
        try:
            while True:
                self._take.receive_nowait().abort()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            self._take.close()
        await trio.lowlevel.checkpoint()


def authority(host: str, port: int) -> str:
    """Write an address as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def connect(
    network: Network, kind: str, host: str, port: int, timeout: float, wanted: type[L]
) -> tuple[Wire, L, CarrierInfo, CarrierInfo]:
    """Connect to a listener; return the wire, the listener, and the facts of both sides.

    Args:
        network: of this process.
        kind: ``"tcp"`` or ``"unix"``.
        host: a host name or an address; for ``"unix"``, the path.
        port: 0 for ``"unix"``.
        timeout: seconds to connect.
        wanted: the class of the listener, which speaks TLS or does not.

    Raises:
        ConnectionLost: no process listens there, or it speaks another protocol.
        IdleTimeout: it was out of reach for too long.
    """
    where = host if kind == "unix" else authority(host, port)
    found: tuple[Wire, object] | None = None
    try:
        with trio.move_on_after(timeout):
            found = await network.connect(kind, host, port)
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {where}: {error}") from error
    if found is None:
        raise IdleTimeout(f"no connection to {where} within {timeout} s")
    wire, listener = found
    if type(listener) is not wanted:
        raise ConnectionLost(f"{where} {'speaks' if wanted is SimulatedListener else 'does not speak'} TLS")
    pid = PLATFORM.get().pid()
    facts = CarrierInfo(scheme=kind, local=where, peer=where)
    if kind == "unix":
        return wire, listener, _unix(facts, listener.pid), _unix(facts, pid)
    name = f"process-{pid}:0"
    return wire, listener, attrs.evolve(facts, local=name), attrs.evolve(facts, peer=name)


def _unix(facts: CarrierInfo, pid: int) -> CarrierInfo:
    credentials = pid, os.getuid(), os.getgid()
    return attrs.evolve(facts, peer="pid={} uid={} gid={}".format(*credentials), peer_credentials=credentials)


@asynccontextmanager
async def dial(
    network: Network, kind: str, host: str, port: int, config: StreamConfig, *, timeout: float
) -> AsyncIterator[Any]:
    """Connect to a listener, see `connect`; leaving the block closes the stream."""
    wire, listener, *infos = await connect(network, kind, host, port, timeout, SimulatedListener)
    stream, other = join(wire, config, (infos[0], infos[1]))
    wire.post(0, listener.arrive, other)
    async with stream:
        yield stream


@asynccontextmanager
async def listen(
    network: Network, scheme: str, host: str, port: int, listener: SimulatedListener | None = None
) -> AsyncIterator[Any]:
    """Listen at an address of this process's machine; leaving the block stops listening. Accepted streams stay open.

    Args:
        network: of this process.
        scheme: of the URL.
        host: a host name or an address; for ``"unix"``, the path.
        port: 0 chooses a free one; always 0 for ``"unix"``.
        listener: accepts the peers; None: a new one.

    Raises:
        ConfigurationError: the address is taken, or not one of this machine.
    """
    kind = "unix" if scheme == "unix" else "tcp"
    listener = listener or SimulatedListener()
    try:
        port = network.bind(kind, host, port, listener)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {host if kind == 'unix' else authority(host, port)}: {error}"
        ) from error
    try:
        listener.url = listener.admission.url = (
            f"unix://{host}" if kind == "unix" else f"{scheme}://{authority(host, port)}"
        )
        yield listener
    finally:
        network.release(kind, host, port)
        with trio.CancelScope(shield=True):
            await listener.aclose()
