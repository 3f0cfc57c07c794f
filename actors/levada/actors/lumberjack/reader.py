"""`serve`: a Lumberjack reader, for Filebeat, Logstash's forwarders and our own writer."""

from __future__ import annotations

import functools
import inspect
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import attrs
import trio

from levada.framework import Actor, ActorSystem, Ref, handles
from levada.framework.errors import ActorStopped, ConfigurationError, ConnectionClosed
from levada.transports.carriers import ByteStream, Listener, MemoryConfig, TcpConfig, TlsConfig, listen
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.streams import StreamConfig
from levada.transports.carriers.tls import TlsListener
from levada.transports.lumberjack import ReaderConfig

from .balance import HostConfig, targets
from .connection import Connection
from .load import Load, ReaderStatistics
from .unit import Sink, Unit

__all__ = ["Reader", "serve"]

_CLOSING = 5.0  # seconds to close connections once their units have had their time


class Reader:
    """A reader that listens; comes from `serve`."""

    def __init__(self, listener: Listener[ByteStream], load: Load) -> None:
        self._listener = listener
        self._load = load

    @property
    def url(self) -> str:
        """Where it listens, with the real port, as a writer's URL."""
        scheme, rest = self._listener.url.split("://", 1)
        return f"lumberjack://{rest}" if scheme == "tcp" else f"lumberjack+{scheme}://{rest}"

    def statistics(self) -> ReaderStatistics:
        """Return the counters as they are now."""
        statistics = self._load.statistics(trio.current_time())
        admission = getattr(self._listener, "admission", None)  # memory has none
        before = 0 if admission is None else admission.refused
        return attrs.evolve(statistics, connections_refused=statistics.connections_refused + before)

    def reload(self, context: ssl.SSLContext | None = None) -> None:
        """Read the certificate files again, for connections from now on; those that are open live on (LJ-62).

        Args:
            context: use this one instead of the settings.

        Raises:
            ConfigurationError: no TLS here, or files that cannot be used; the certificates of before stay.
        """
        if not isinstance(self._listener, TlsListener):
            raise ConfigurationError(f"{self.url} has no certificates to reload")
        self._listener.reload(context)


class _Acceptor(Actor[Any]):
    """Takes connections in; each is a child."""

    listener: Listener[ByteStream]
    sink: Ref[Unit] | Callable[[], Actor[Unit]]
    load: Load

    def started(self) -> None:
        self.admission = Admission(self.listener.url)
        self.start_soon(self._accept)

    async def _accept(self) -> None:
        try:
            while True:
                stream = await self.listener.accept()
                if len(self.children) >= self.load.config.max_connections:
                    self.load.refused += 1
                    self.admission.turn_away(stream.info.peer, "there are enough connections (max_connections)")
                    stream.abort()
                    continue
                try:
                    self.spawn(functools.partial(Connection, stream, self.sink, self.load))
                except ActorStopped:
                    stream.abort()
        except ConnectionClosed:
            pass  # `serve` ends


@asynccontextmanager
async def serve(
    system: ActorSystem,
    url: str,
    sink: Sink,
    *,
    config: ReaderConfig | None = None,
    carrier: TcpConfig | TlsConfig | MemoryConfig | None = None,
) -> AsyncIterator[Reader]:
    """Take in logs: each unit of events is asked of the sink, and acked after its answer.

    Versions 1 and 2 are served on one port.  Entering the block means bound and listening; leaving it stops accepting and
    reading, gives units at the sink `ReaderConfig.shutdown_grace`, acks the units that got committed, and closes.  Writers send
    unacked events again.

    Args:
        system: where the actors live.
        url: ``lumberjack://host:port`` or ``lumberjack+tls://host:port``; port 0 takes a free one, none is 5044. Also
            ``lumberjack+memory://name``.
        sink: see `Sink`; it must answer within the time of the oldest writer, 15 s for some of version 1: put a `SpoolSink` before
            what takes longer (LJ-26).
        config: limits, clocks and policies.
        carrier: settings of the scheme; TLS needs a certificate; `TlsConfig.client_certificates` asks writers for theirs.

    Raises:
        ConfigurationError: not such a URL, something that cannot be a sink, settings that cannot work, or the address cannot be
            listened at.

    Cancellation:
        connections are closed at once, as they are if the block ends by an error; nothing is acked that was not committed.

    Example:
        >>> import trio
        >>> from levada.framework import ActorSystem
        >>> from levada.actors.lumberjack import Unit, connect, serve
        >>> async def show(unit: Unit) -> None:
        ...     print([event["line"] for event in unit.events])
        >>> async def main() -> None:
        ...     async with ActorSystem() as system, serve(system, "lumberjack+memory://logs", show) as reader:
        ...         async with connect(system, reader.url) as writer:
        ...             await writer.send({"line": "hello"})
        ...             await writer.flush()
        >>> trio.run(main)
        ['hello']
    """
    config = config or ReaderConfig()
    taker = _checked(sink)
    carrier_url = targets(url, HostConfig())[0].carrier_url
    async with listen(carrier_url, cast("Any", _settings(carrier_url, carrier, config))) as listening:
        listener = cast("Listener[ByteStream]", listening)
        load = Load(config)
        acceptor: Ref[Any] = system.spawn(functools.partial(_Acceptor, listener, taker, load), supervise="escalate")
        try:
            yield Reader(listener, load)
            await listener.aclose()
            load.drain()
            with trio.move_on_after(config.shutdown_grace + _CLOSING):
                await load.empty()
        finally:
            acceptor.kill()
            with trio.CancelScope(shield=True):
                await acceptor.terminated()


class _Function(Actor[Unit]):
    """A function as the sink of one connection; what it calls its parameter's type is its own business."""

    function: Callable[[Unit], Awaitable[object]]

    @handles
    async def take(self, unit: Unit) -> object:
        return await self.function(unit)


def _checked(sink: Sink) -> Ref[Unit] | Callable[[], Actor[Unit]]:
    """Find out now what would else fail with each connection."""
    if isinstance(sink, Ref):
        return sink
    is_function = inspect.iscoroutinefunction(sink)
    try:
        inspect.signature(sink).bind(*([None] if is_function else []))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"a sink is a Ref, an async function of one unit, or an actor class or factory without arguments; not {sink!r}: {error}"
        ) from error
    if is_function:
        return functools.partial(_Function, cast("Callable[[Unit], Awaitable[object]]", sink))
    return cast("Callable[[], Actor[Unit]]", sink)


def _settings(
    url: str, carrier: TcpConfig | TlsConfig | MemoryConfig | None, config: ReaderConfig
) -> TcpConfig | TlsConfig | MemoryConfig | None:
    """Put what the protocol wants of a carrier into its settings."""
    if carrier is None and url.startswith("tcp:"):
        carrier = TcpConfig()
    if isinstance(carrier, StreamConfig):
        # LJ-28a: after our end, read on for a while; a reset would destroy acks under way.
        return attrs.evolve(
            carrier, linger=config.linger, close_timeout=max(carrier.close_timeout, config.linger + 1.0)
        )
    return carrier
