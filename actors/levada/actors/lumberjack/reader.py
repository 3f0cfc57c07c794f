"""`serve`: a Lumberjack reader, for Filebeat, Logstash's forwarders and our own writer."""

from __future__ import annotations

import functools
import inspect
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import attrs
import trio

from levada.actors.authentication import Authenticate, Authentication
from levada.actors.listening import Acceptor, ListenerHandle, running
from levada.actors.metrics.protocols import reader_samples
from levada.framework import Actor, ActorSystem, Ref, Sample, handles
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import ByteStream, Listener, MemoryConfig, TcpConfig, TlsConfig, listen
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.streams import StreamConfig
from levada.transports.carriers.tls import TlsListener
from levada.transports.lumberjack import ReaderConfig

from .balance import HostConfig, targets
from .connection import LumberjackDriver
from .load import Load, ReaderStatistics
from .unit import Sink, Unit

__all__ = ["Reader", "serve"]


class ReaderActor(Acceptor[LumberjackDriver]):
    """Accepts connections."""

    carrier_url: str
    carrier: TcpConfig | TlsConfig | MemoryConfig | None
    sink: Ref[Unit] | Callable[[], Actor[Unit]]
    config: ReaderConfig

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.load = Load(self.config)
        self.admission = Admission(self.carrier_url)

    @property
    def max_connections(self) -> float:
        """No bound: `accept` turns away excess connections (LJ-43)."""
        return math.inf

    def listening(self) -> AbstractAsyncContextManager[Listener[Any]]:
        """Listen at the carrier."""
        return listen(self.carrier_url, cast("Any", _settings(self.carrier_url, self.carrier, self.config)))

    def url_of(self, carrier_url: str) -> str:
        """Make a writer's URL."""
        scheme, rest = carrier_url.split("://", 1)
        return f"lumberjack://{rest}" if scheme == "tcp" else f"lumberjack+{scheme}://{rest}"

    async def accept(self, listener: Listener[ByteStream]) -> ByteStream:
        """Wait for a writer for which there is room."""
        while True:
            stream = await listener.accept()
            if len(self.children) < self.config.max_connections:
                return stream
            self.load.refused += 1
            self.admission.turn_away(stream.info.peer, "there are enough connections (max_connections)")
            stream.abort()

    def make(self, accepted: ByteStream) -> LumberjackDriver:
        """Make a connection."""
        return LumberjackDriver(accepted, self.sink, self.load)

    @property
    def turned_away(self) -> int:
        """Refused clients, and writers for which there was no room."""
        return super().turned_away + self.load.refused

    def statistics(self) -> ReaderStatistics:
        """Return the counters as they are now."""
        return attrs.evolve(self.load.statistics(trio.current_time()), connections_refused=self.turned_away)

    def metrics(self) -> Iterable[Sample]:
        """Return also the counts of events."""
        if not self.url:
            return ()
        return (*super().metrics(), *reader_samples(self.url, self.load.statistics(trio.current_time())))

    def reload(self, context: ssl.SSLContext | None = None) -> None:
        """Read the files again, or use this context."""
        if context is None:
            super().reload()
        elif isinstance(self._listener, TlsListener):
            self._listener.reload(context)
        else:
            raise ConfigurationError(f"{self.url} has no TLS, so no use for a context")


class Reader(ListenerHandle[ReaderActor]):
    """A reader that listens; comes from `serve`."""

    def statistics(self) -> ReaderStatistics:
        """Return the counters as they are now."""
        return self._actor.statistics()

    def reload(self, context: ssl.SSLContext | None = None) -> None:
        """Read the certificate files, and the files of the ``authenticate`` hook, again, for new connections; open ones stay (LJ-62).

        Args:
            context: use this one instead of the settings.

        Raises:
            ConfigurationError: a file cannot be used, and the settings read from it stay unchanged; or a context without TLS.
        """
        self._actor.reload(context)


@asynccontextmanager
async def serve(
    system: ActorSystem,
    url: str,
    sink: Sink,
    *,
    config: ReaderConfig | None = None,
    carrier: TcpConfig | TlsConfig | MemoryConfig | None = None,
    authenticate: Authenticate | Authentication | None = None,
    trust_traces: bool | None = None,
) -> AsyncIterator[Reader]:
    """Receive logs: the sink is asked to take each unit of events, and the unit is acked after the answer.

    Versions 1 and 2 are served on one port.  Entering the block means bound and listening; leaving it stops accepting and
    reading, gives units at the sink `ReaderConfig.drain_timeout`, acks the units that got committed, and closes.  Writers send
    unacked events again.

    Args:
        system: where the actors live.
        url: ``lumberjack://host:port`` or ``lumberjack+tls://host:port``; port 0 takes a free one, none is 5044. Also
            ``lumberjack+memory://name``.
        sink: see `Sink`; it must answer within the time of the oldest writer, 15 s for some of version 1: put a `SpoolSink` before
            what takes longer (LJ-26).
        config: limits, clocks and policies.
        carrier: settings of the scheme; TLS needs a certificate; `TlsConfig.client_certificates` asks writers for theirs.
        authenticate: decides on each writer by its address and certificate, as Lumberjack has no credentials; None lets all in. A
            refused writer is only disconnected, since the protocol cannot say why.
        trust_traces: whether a traced system goes on with the traces of writers, see ``docs/how-to/trace.md``. None: if they have an
            identity.

    Raises:
        ConfigurationError: not such a URL, something that cannot be a sink, settings that cannot work, or the address cannot be
            listened at.

    Cancellation:
        connections are closed at once, as they are if the block ends by an error; nothing is acked that was not committed. Sinks of
            connections have a second to end.

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
    actor = ReaderActor(carrier_url, carrier, taker, config, authenticate=authenticate, trust_traces=trust_traces)
    async with running(system, actor):
        yield Reader(actor)


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
