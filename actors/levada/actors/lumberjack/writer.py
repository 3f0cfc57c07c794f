"""The writer: one queue, and one actor for each connection.

::

    send, deliver --> SendQueue --window--> _Connection (actor) --bytes--> reader
                          ^                        |
                          +---- unacked windows ---+  when the connection is lost

The rules of the protocol are in `levada.transports.lumberjack`: `SendQueue` holds every event that is not acked, `WriterCore` is
one connection.  Each connection has three tasks: one sends, one reads acks, so that neither waits for the other (LJ-52a), and one watches
the clock (LJ-53).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import attrs
import trio

from levada.actors.metrics.connections import connection_samples
from levada.actors.metrics.protocols import writer_samples
from levada.framework import Actor, ActorSystem, FlowWindow, Sample, restart
from levada.framework.durations import is_duration
from levada.framework.embedding import DescribedActor
from levada.framework.errors import CarrierError, ConfigurationError, ConnectionClosed
from levada.framework.text import printable
from levada.framework.tracing import Tracing
from levada.transports.carriers import ByteStream, CarrierStatistics
from levada.transports.lumberjack import (
    AckTimedOut,
    Batch,
    BatchDone,
    EventsAcked,
    Finished,
    KeepaliveReceived,
    PeerClosed,
    Refused,
    WriterConfig,
    WriterCore,
    WriterEvent,
    encode_event,
)

from .balance import HostConfig, Rota, targets
from .disk_spool import DiskSpool, SpoolConfig, SpoolPump, check_spool, open_segments
from .tracing import fields_of
from .unit import Unit
from .writer_queue import Hub, Intake

__all__ = ["Writer", "WriterStatistics", "connect", "relay"]

logger = logging.getLogger("levada.actors.lumberjack.writer")

_UNYIELDED = 64  # sends without a wait before a checkpoint, which costs as much as two sends
_SLICE = 64 * 1024  # bytes handed to the carrier at a time, to see its progress (LJ-53)


@attrs.frozen(kw_only=True)
class WriterStatistics:
    """Counters of a writer; a snapshot."""

    unacked: int
    """Events that were taken and are not acked. With a spool, events that are only on disk do not count."""
    events_sent: int
    """Events in windows sent, including those sent again."""
    events_acked: int
    events_dropped: int
    """Events that a full queue dropped (`WriterConfig.drop`)."""
    events_rejected: int
    """Events dropped by `WriterConfig.on_stuck`."""
    windows_sent: int
    stuck_windows: int
    """Windows that ended five connections in a row without an ack (LJ-59)."""
    bytes_sent: int
    connections: int
    """Connections that are up."""
    connects: int
    """Connections that were made."""
    faults: int
    """Attempts to connect that failed, and connections that were lost."""


class _Connection(DescribedActor[Any]):
    """Keeps one connection up and sends windows over it."""

    subject = "connection"

    hub: Hub
    rota: Rota
    ttl: float | None
    _talk: _Talk | None = attrs.field(init=False, default=None)
    """The connection, while there is a carrier."""
    _before: CarrierStatistics | None = attrs.field(init=False, default=None)
    """The sums of earlier carriers."""
    _phase: Literal["CONNECTING", "OPEN", "IDLE"] = attrs.field(init=False, default="CONNECTING")
    _connects: int = attrs.field(init=False, default=0)
    _lost: int = attrs.field(init=False, default=0)
    _failed: int = attrs.field(init=False, default=0)

    @property
    def about(self) -> str:
        """The reader's URL."""
        return printable(self.rota.current.url)

    @property
    def window(self) -> FlowWindow | None:
        """The events that may be sent before an ack; acks need no window."""
        talk = self._talk
        return None if talk is None else FlowWindow(talk.core.room, None, talk.stream.unsent, "lines")

    def metrics(self) -> Iterable[Sample]:
        """Return the figures of every connection. Each new carrier counts as another connection."""
        return connection_samples(
            "lumberjack",
            "client",
            self._phase.lower(),
            self._before if self._talk is None else self._total(self._talk.stream),
            opened=self._connects,
            lost=self._lost,
            failed=self._failed,
        )

    def _total(self, stream: ByteStream) -> CarrierStatistics:
        now = stream.statistics()
        return now if self._before is None else self._before + now

    async def report(self) -> dict[str, object]:
        """Return the state, the reader's URL, and the counters."""
        talk, queue = self._talk, self.hub.queue
        return {
            "protocol": "lumberjack",
            "side": "client",
            "phase": self._phase,
            "address": self.about,
            "identity": "",
            **({} if talk is None else attrs.asdict(talk.stream.statistics())),
            "unacked": len(queue),
            "events_dropped": queue.dropped,
        }

    def started(self) -> None:
        self.start_soon(self.keep_connected)

    async def keep_connected(self) -> None:
        """Connect, send until the connection ends, and connect again."""
        hub = self.hub
        while True:
            target = self.rota.current
            connects = self._connects
            extra = {"protocol": "lumberjack", "actor": self.ref.path}
            try:
                async with target.dial() as stream:
                    hub.attempted.set()
                    hub.counters.connects += 1
                    logger.info("connected to %s", target.url, extra=extra)
                    hub.counters.connections += 1
                    talk = self._talk = _Talk(hub, self.rota, stream)
                    self._phase = "OPEN"
                    self._connects += 1
                    try:
                        why = await self.talk(talk)
                    finally:
                        self._before, self._talk = self._total(stream), None
                        self._phase = "CONNECTING"
                        hub.counters.connections -= 1
                if why is None:
                    continue  # its time to live was over, and everything on it is acked
                if talk.idle and not hub.queue.waiting:
                    logger.info(
                        "%s: %s, which was idle; connecting again with the next event", target.url, why, extra=extra
                    )
                    self._phase = "IDLE"
                    await hub.wanted()
                    self._phase = "CONNECTING"
                    continue
            except CarrierError as error:
                why = str(error)
            except ConfigurationError as error:
                if not hub.attempted.is_set():
                    hub.mistake = error  # `connect` raises it
                    hub.attempted.set()
                    return
                why = str(error)
            hub.attempted.set()
            hub.counters.faults += 1
            if self._connects > connects:
                self._lost += 1
            else:
                self._failed += 1
            pause = self.rota.fault()
            logger.warning("%s: %s; next attempt in %.1f s", target.url, why, pause, extra=extra)
            await trio.sleep(pause)

    async def talk(self, talk: _Talk) -> str | None:
        """Send windows and take acks until the connection ends; return the reason, or ``None`` if its time to live is over."""
        ttl = self.ttl and self.ttl * self.system.random.uniform(0.8, 1.2)  # LJ-58
        try:
            async with trio.open_nursery() as nursery:
                talk.scope = nursery.cancel_scope
                nursery.start_soon(talk.read_acks)
                nursery.start_soon(talk.watch_clock)
                nursery.start_soon(talk.send_windows, ttl)
        finally:
            # LJ-55: unacked windows go back, whatever ended the connection.
            talk.core.close(0, "", trio.current_time())
            self.hub.give_back(talk.core.unacked())
        return talk.why


class _Talk:
    """One connection while it lasts: three tasks over one core."""

    def __init__(self, hub: Hub, rota: Rota, stream: ByteStream) -> None:
        self.hub = hub
        self.rota = rota
        self.stream = stream
        self.core = WriterCore(hub.config, now=trio.current_time())
        self.why: str | None = None
        self.idle = False
        """Whether the reader closed the connection while nothing on it was unacked."""
        self.scope = trio.CancelScope()

    def end(self, why: str | None) -> None:
        if not self.scope.cancel_called:
            self.why = why
            self.scope.cancel()

    async def send_windows(self, ttl: float | None) -> None:
        hub, core = self.hub, self.core
        expires = math.inf if ttl is None else trio.current_time() + ttl
        while True:
            if trio.current_time() >= expires:
                expires = math.inf
                self.apply(core.drain(trio.current_time()))
            found = hub.take(core)
            if not isinstance(found, Batch):
                with trio.CancelScope(deadline=min(expires, found)):
                    await hub.work.park()
                continue
            try:
                await self.send(found)
            except CarrierError as error:
                self.end(str(error))
                return

    async def send(self, batch: Batch) -> None:
        hub, core = self.hub, self.core
        core.send_batch(batch, trio.current_time())
        hub.windows += 1
        hub.counters.windows_sent += 1
        hub.counters.events_sent += len(batch.bodies)
        data = memoryview(b"".join(core.data_to_send(trio.current_time())))
        for at in range(0, len(data), _SLICE):
            part = data[at : at + _SLICE]
            await self.stream.send_all(part)
            hub.counters.bytes_sent += len(part)
            core.bytes_taken(len(part), trio.current_time())

    async def read_acks(self) -> None:
        while not self.scope.cancel_called:
            try:
                data = await self.stream.receive_some()
            except CarrierError as error:
                self.end(str(error))
                return
            self.apply(self.core.receive_data(data, trio.current_time()))

    async def watch_clock(self) -> None:
        while not self.scope.cancel_called:
            deadline = self.core.next_deadline()
            # A deadline that is set meanwhile is later than this.
            await trio.sleep_until(trio.current_time() + self.hub.config.ack_timeout if deadline is None else deadline)
            self.apply(self.core.handle_timeout(trio.current_time()))

    def apply(self, events: list[WriterEvent]) -> None:
        for event in events:
            match event:
                case EventsAcked():
                    self.rota.acked()
                    self.hub.acked(event)
                case BatchDone():
                    self.hub.windows -= 1
                case PeerClosed(clean):
                    self.idle = clean and not self.core.in_flight
                    self.end("the reader closed the connection")
                case Refused(error):
                    self.end(str(error))
                case AckTimedOut(seconds):
                    self.end(f"no ack for {seconds:g} s")
                case Finished():
                    self.end(None)
                case KeepaliveReceived():
                    pass  # the core has restarted its clock
        self.hub.work.unpark_all()


class _Writer(Actor[Any]):
    """The parent of the connections and of the spool's pump."""

    hub: Hub
    rotas: Sequence[Rota]
    ttl: float | None
    disk: DiskSpool | None

    def metrics(self) -> Iterable[Sample]:
        """Return the counts of events."""
        return writer_samples(self.hub)

    def started(self) -> None:
        if self.disk is not None:
            self.spawn(SpoolPump, self.disk, supervise="escalate")
        for rota in self.rotas:
            self.spawn(
                functools.partial(_Connection, self.hub, rota, self.ttl),
                supervise=restart("permanent", initial_backoff=1.0, max_backoff=30.0),
            )


class Writer:
    """Sends events to Lumberjack readers, each at least once. Made by `connect`.

    An event is *taken* when `send` returns, and *safe* when a reader has acked it, or with a spool when it is on disk.  After a fault,
    events that are not acked are sent again.
    """

    def __init__(self, hub: Hub, intake: Intake, stamp: str | None) -> None:
        self._hub = hub
        self._intake = intake
        self._put_nowait = intake.put_nowait
        self._stamp = stamp
        self._stamped = 0
        self._unyielded = 0
        self._closed = False

    def _encode(self, event: Mapping[str, Any]) -> bytes:
        if self._closed:
            raise ConnectionClosed("the writer was closed")
        if self._stamp is not None:
            event = {**event, "stamp": f"{self._stamp}-{self._stamped}"}
            self._stamped += 1
        return encode_event(event, self._hub.config)

    async def send(self, event: Mapping[str, Any]) -> None:
        """Take an event, waiting while the queue is full unless `WriterConfig.drop` says otherwise.

        Not every call is a checkpoint: a loop of sends yields at every 64th.

        Args:
            event: maps text to any JSON value; version 1 flattens it to text (LJ-9).

        Raises:
            EventRejected: it cannot be encoded, or is too large (LJ-59).
            ConnectionClosed: the writer was closed.

        Cancellation:
            the event was not taken.
        """
        body = self._encode(event)
        self._unyielded += 1
        if self._unyielded >= _UNYIELDED:
            self._unyielded = 0
            await trio.lowlevel.checkpoint()
        try:
            self._put_nowait(body)
            return
        except trio.WouldBlock:
            pass
        await self._intake.put([body])

    def send_nowait(self, event: Mapping[str, Any]) -> None:
        """Take an event without waiting.

        Raises:
            trio.WouldBlock: the queue is full, and `WriterConfig.drop` is ``None``.
            EventRejected, ConnectionClosed: as `send`.
        """
        self._intake.put_nowait(self._encode(event))

    async def deliver(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take events, all or none of them, and return when they are safe: acked by a reader, or on disk if there is a spool.

        It waits for room whatever `WriterConfig.drop` says, because it waits for the acks anyway.  It does not wait for windows to
        fill (`WriterConfig.linger`), nor for events that `WriterConfig.on_stuck` drops.  Calls at the same time may share a window.

        Raises:
            EventRejected: as `send`; none was taken.
            ConnectionClosed: the writer was closed: none was taken, or some of those that were taken are not acked.
            EventsDropped: the policy ``"oldest"`` dropped some to make room for newer events; the others are acked.

        Cancellation:
            some events may have been taken; those are sent.
        """
        await self._intake.deliver([self._encode(event) for event in events])

    async def flush(self) -> None:
        """Wait until all events taken so far are acked, without waiting for windows to fill.

        Raises:
            ConnectionClosed: the writer was closed before.
        """
        await self._intake.flush()

    @property
    def unacked(self) -> int:
        """Number of events that are taken and not acked. With a spool, events that are only on disk do not count."""
        return len(self._hub.queue)

    def statistics(self) -> WriterStatistics:
        """Return the counters as they are now."""
        queue = self._hub.queue
        return WriterStatistics(
            unacked=len(queue),
            events_dropped=queue.dropped,
            events_rejected=queue.rejected,
            stuck_windows=queue.stuck_windows,
            **attrs.asdict(self._hub.counters),
        )

    async def aclose(self, timeout: float = 5.0) -> int:
        """Take no more events, and wait up to `timeout` seconds for acks.

        Returns:
            The number of events that are still not acked.

        Cancellation:
            the writer is closed.
        """
        self._closed = True
        with trio.move_on_after(timeout), contextlib.suppress(ConnectionClosed):
            await self._intake.flush()
        return self.unacked


class _TracedWriter(Writer):
    """Puts the current context into each event."""

    def __init__(self, hub: Hub, intake: Intake, stamp: str | None, tracing: Tracing) -> None:
        super().__init__(hub, intake, stamp)
        self._tracing = tracing

    def _encode(self, event: Mapping[str, Any]) -> bytes:
        headers = self._tracing.headers(self._tracing.current())
        return super()._encode(event if headers is None else {**fields_of(headers), **event})


@asynccontextmanager
async def connect(
    system: ActorSystem,
    url: str | Sequence[str],
    *,
    config: WriterConfig | None = None,
    hosts: HostConfig | None = None,
    spool: SpoolConfig | None = None,
    stamp: bool = False,
    traces: bool = False,
    close_timeout: float = 5.0,
) -> AsyncIterator[Writer]:
    """Send events to one or several readers while the block lasts.

    The block begins after the first attempt to connect.  An unreachable reader is not an error: events are queued, and the writer keeps
    trying.  If the reader closes a connection on which nothing is unacked, the writer connects again with the next event.

    Leaving the block flushes, for `close_timeout` seconds at most, and logs the number of unacked events.  Calls of the writer that still
    wait then raise `ConnectionClosed`.

    Args:
        system: a running system.
        url: ``lumberjack://host:port`` or ``lumberjack+tls://host:port``, or several of them: see `HostConfig.several`.
        config: settings of the protocol; ``None``: version 2 with the defaults.
        hosts: settings of the connections; ``None``: the defaults.
        spool: keep events on disk until they are acked, also after the end of this process; ``None``: keep them in memory.
        stamp: add ``"stamp": "<id of this writer>-<number>"`` to each event, so that a sink can drop duplicates (LJ-56).
        traces: add the current trace context as ``traceparent`` and ``tracestate`` to each event that has none, for a reader that continues
            the trace (LJ-64).
        close_timeout: seconds that the end of the block waits for acks.

    Raises:
        ConfigurationError: a URL, the certificates, the spool or `close_timeout` cannot be used, or `traces` is set in a system that is not traced.

    Cancellation:
        unacked events in memory are lost; those in a spool are sent by the next writer.
    """
    if traces and system.tracing is None:
        raise ConfigurationError("traces=True needs a traced system: ActorSystem(tracing=…)")
    if not is_duration(close_timeout, zero=True):
        raise ConfigurationError(f"close_timeout is {close_timeout!r}, wanted 0 or more seconds")
    config = config or WriterConfig()
    check_spool(config, spool)
    hosts = hosts or HostConfig()
    found = targets(url, hosts)
    hub = Hub(config)
    lot = system.random
    rotas = [Rota([one], config, lot) for one in found] if hosts.several == "balance" else [Rota(found, config, lot)]
    with contextlib.ExitStack() as files:
        intake: Intake = hub
        disk: DiskSpool | None = None
        if spool is not None:
            opening = open_segments(spool, b"J" if config.json else b"D")
            segments = await system.platform.run_in_thread(files.enter_context, opening)
            intake = disk = DiskSpool(segments, spool, hub)
        actor = system.spawn(_Writer, hub, rotas, hosts.ttl, disk, supervise="escalate")
        try:
            await hub.attempted.wait()
            if hub.mistake is not None:
                raise hub.mistake
            name = system.platform.token_bytes(6).hex() if stamp else None
            tracing = system.tracing if traces else None
            writer = Writer(hub, intake, name) if tracing is None else _TracedWriter(hub, intake, name, tracing)
            try:
                yield writer
            finally:
                writer._closed = True
            if left := await writer.aclose(close_timeout):
                where = "" if disk is None else "; they are on disk"
                logger.warning("%d events are not acked at the end%s", left, where, extra={"event": "events_unacked"})
        finally:
            actor.stop(now=True)
            with trio.CancelScope(shield=True):
                await actor.terminated()
            hub.end()
            if disk is not None:
                disk.has_changed()


def relay(writer: Writer) -> Callable[[Unit], Awaitable[None]]:
    """Make a sink for `serve` that sends units on: the reader acks them only when the next reader has.

    A unit is committed when the next reader has acked it, so the first writer gets its ack from the end of the chain.
    A unit is sent on at once, whether or not it fills a window; units of several connections may share one.
    Writers of version 1 give up after about 15 s: give the relay's writer a spool if its reader may be away for longer (LJ-26).

    Args:
        writer: made by `connect`; many connections may share it. With a spool, a unit is committed when it is on disk.

    Example:
        ``async with connect(system, far) as writer, serve(system, near, relay(writer)):``
    """

    async def send_on(unit: Unit) -> None:
        await writer.deliver(unit.events)

    return send_on
