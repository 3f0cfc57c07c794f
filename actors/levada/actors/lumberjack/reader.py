"""`serve`: a Lumberjack reader for Filebeat, the forwarders of Logstash, and levada's own writer."""

from __future__ import annotations

import functools
import inspect
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar, cast

import attrs
import trio

from levada.actors.authentication import Authenticate, Authentication
from levada.actors.listening import Acceptor, ListenerHandle, running
from levada.actors.metrics.protocols import reader_samples
from levada.actors.stream_carriers import AsWritten
from levada.framework import Actor, ActorSystem, Ref, Sample, handles
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import ByteStream, Listener, MemoryConfig, TcpConfig, TlsConfig, listen
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

    waits: ClassVar = False  # LJ-43: writers that wait in the system's queue would not try another host

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.load = Load(self.config)

    @property
    def max_connections(self) -> int:
        """The most connections at a time, as configured (LJ-43)."""
        return self.config.max_connections

    def listening(self) -> AbstractAsyncContextManager[Listener[Any]]:
        """Listen at the carrier."""
        settings: Any = _settings(self.carrier_url, self.carrier, self.config)
        return AsWritten(
            self.url_of(self.carrier_url), self.carrier_url, functools.partial(listen, self.carrier_url, settings)
        )

    def url_of(self, carrier_url: str) -> str:
        """Make a writer's URL."""
        scheme, rest = carrier_url.split("://", 1)
        return f"lumberjack://{rest}" if scheme == "tcp" else f"lumberjack+{scheme}://{rest}"

    def make(self, accepted: ByteStream) -> LumberjackDriver:
        """Make a connection."""
        return LumberjackDriver(accepted, self.sink, self.load)

    def statistics(self) -> ReaderStatistics:
        """Return the counters as they are now."""
        return self.load.statistics(trio.current_time(), refused=self.turned_away)

    def metrics(self) -> Iterable[Sample]:
        """Return also the counts of events."""
        if not self.url:
            return ()
        return (*super().metrics(), *reader_samples(self.url, self.load.statistics(trio.current_time())))

    def reload(self, context: ssl.SSLContext | None = None) -> None:
        """Read the certificate files again, or use this context."""
        if context is None:
            super().reload()
        elif isinstance(self._listener, TlsListener):
            self._listener.reload(context)
        else:
            raise ConfigurationError(f"{self.url} does not use TLS, so it cannot use a context")


class Reader(ListenerHandle[ReaderActor]):
    """A reader that listens, made by `serve`."""

    def statistics(self) -> ReaderStatistics:
        """Return the counters as they are now."""
        return self._actor.statistics()

    def reload(self, context: ssl.SSLContext | None = None) -> None:
        """Read the certificate files and the files of the ``authenticate`` hook again. Open connections stay as they are (LJ-62).

        Args:
            context: use this one instead of the certificate files; then no file is read.

        Raises:
            ConfigurationError: a file cannot be used, and its old contents stay in use; or there is a context and no TLS.
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
    """Receive logs: ask the sink to take each unit of events, and ack the unit when it has answered.

    One port serves versions 1 and 2.  The block begins when the port is bound.  Leaving it stops accepting and reading, waits up to
    `ReaderConfig.drain_timeout` for units at the sink, acks those that are committed, and closes.  Writers send unacked events again.

    Args:
        system: the system in which the actors run.
        url: ``lumberjack://host:port`` or ``lumberjack+tls://host:port``; port 0 takes a free one, and the default is 5044. Also
            ``lumberjack+memory://name``.
        sink: takes the units, see `Sink`. It must answer before its writers give up, which some of version 1 do after 15 s: put a
            `SpoolSink` before a slower sink (LJ-26).
        config: limits, clocks and policies.
        carrier: settings of the scheme. TLS needs a certificate; `TlsConfig.client_certificates` asks writers for theirs.
        authenticate: decides on each writer by its address and certificate, because Lumberjack has no credentials; None admits all. A
            refused writer is only disconnected, because the protocol cannot say why.
        trust_traces: whether a traced system continues the traces of writers, see ``docs/how-to/trace.md``. None: if they have an
            identity.

    Raises:
        ConfigurationError: the URL, the sink or the settings cannot work, or the address is taken.

    Cancellation:
        connections are closed at once, as they are if the block ends by an error. Units that are not committed are not acked. Sinks that
            belong to connections have one second to end.

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
    """A function as the sink of one connection. The annotation of its parameter is not checked."""

    function: Callable[[Unit], Awaitable[object]]

    @handles
    async def take(self, unit: Unit) -> object:
        return await self.function(unit)


def _checked(sink: Sink) -> Ref[Unit] | Callable[[], Actor[Unit]]:
    """Check the sink now, because a wrong one would fail with each connection."""
    if isinstance(sink, Ref):
        return sink
    is_function = inspect.iscoroutinefunction(sink)
    try:
        inspect.signature(sink).bind(*([None] if is_function else []))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the sink is {sink!r}, wanted a Ref, an async function of one unit, or an actor class or factory without arguments: {error}"
        ) from error
    if is_function:
        return functools.partial(_Function, cast("Callable[[Unit], Awaitable[object]]", sink))
    return cast("Callable[[], Actor[Unit]]", sink)


def _settings(
    url: str, carrier: TcpConfig | TlsConfig | MemoryConfig | None, config: ReaderConfig
) -> TcpConfig | TlsConfig | MemoryConfig | None:
    """Return the settings of the carrier, with the times that the protocol needs."""
    if carrier is None and url.startswith("tcp:"):
        carrier = TcpConfig()
    if isinstance(carrier, StreamConfig):
        # LJ-28a: read on for a while after this side's end, because a reset would destroy acks under way.
        return attrs.evolve(
            carrier, linger=config.linger, close_timeout=max(carrier.close_timeout, config.linger + 1.0)
        )
    return carrier
