"""One UDP port and all QUIC connections on it, however many, served by two tasks.

* The **receive task** takes a burst of datagrams from the port, routes each by its connection id, feeds it to its connection, and then lets
  each of these connections handle the news and answer. Input from a peer never ends this task: an error of the engine ends only that
  connection.
* The **flush task** sends for all connections that have data. It lets the tasks that can run go first, for up to three rounds while they
  keep asking to send, so that answers made in one turn share packets; sending at once split 64 answers into 38 packets.
* A lone answer does not wait for the flush task: `send_for` sends it in the turn of its caller.
* One deadline serves all timers: a heap of (time, connection). A timer that moves earlier is pushed at once. A timer that moves later is
  replaced if it is the first, since it would soon fire for nothing; otherwise it stays in the heap and is checked when it fires.

Connection ids have 8 bytes; the first is the number of the worker process. So a short header names connection and worker without parsing.
Several processes may share one port and forward packets that the kernel gave to the wrong one: `foreign` sends them, `take_in` receives
them. Packets with long headers are not forwarded, since a client makes up the first id itself. They need no forwarding: the kernel chooses
the process by the addresses, so all packets of a handshake go to the same one.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import trio
from aioquic.tls import SessionTicket

from levada.framework.failure_log import FailureLog
from levada.framework.platform import PLATFORM
from levada.transports.carriers.contracts import CloseReason
from levada.transports.carriers.streams import plain_nursery

from .config import EngineSettings, QuicConfig
from .connection import QuicConnection
from .engine import Engine
from .port import Address, DatagramPort
from .tokens import reset_token

if TYPE_CHECKING:
    from .listener import QuicListener

__all__ = ["QuicEndpoint"]

logger = logging.getLogger("levada.transports.quic")

CID_LENGTH = 8
_YIELDS = 3  # most scheduler rounds for which a flush lets other tasks run first
_SMALLEST_RESET = 21  # bytes, RFC 9000 section 10.3
_LARGEST_RESET = 43
_OUTBOX = 1_024  # datagrams that wait while the socket's buffer is full; further ones are lost, as on any full network
_RETIRED_KEPT = 8  # retired ids that a connection keeps; as many as its peer may have in use
_TIMERS_LEFT = 64  # stale entries; each keeps its connection in memory until the idle timeout
_RESETS_PER_SECOND = 100


class QuicEndpoint:
    """A port with its connections; an async context manager that runs the two tasks.

    Leaving the block closes the connections and the port. `dial` and `listen` make an endpoint for each call. Make your own to dial many
    servers from one port, or to dial and listen on it.
    """

    def __init__(self, port: DatagramPort, config: QuicConfig | None = None):
        self.config = config or QuicConfig()
        self.listener: QuicListener | None = None
        self.foreign: Callable[[int, bytes, Address], None] | None = None
        """Called with worker number, datagram and address for each packet of another worker's connection. That worker should pass datagram and
        address to its endpoint's `take_in`. ``None`` drops the packets."""
        self._token_bytes = PLATFORM.get().token_bytes
        self.secret = self.config.secret or self._token_bytes(32)
        self.counters: Counter[str] = Counter()
        """Counts of flushes, of failed engines, and of datagrams of no connection, by what was done with them."""
        self.asked = 0
        """How often connections have asked for a flush."""
        self._port = port
        self._failures = FailureLog()
        self._routes: dict[bytes, QuicConnection] = {}
        self._reset_tokens: dict[bytes, QuicConnection] = {}
        self._connections: dict[QuicConnection, None] = {}
        self._dirty: list[QuicConnection] = []
        self._outbox: list[tuple[bytes, Address]] = []
        self._timers: list[tuple[float, int, QuicConnection]] = []
        self._timer_count = 0
        self._flusher: trio.lowlevel.Task | None = None
        self._flusher_scope: trio.CancelScope | None = None
        self._receive_scope = trio.CancelScope()
        self._reset_allowance = float(_RESETS_PER_SECOND)
        self._reset_seen = 0.0
        self._deserted = trio.lowlevel.ParkingLot()
        self._manager: Any = None

    @property
    def address(self) -> Address:
        """The local address."""
        return self._port.address

    @property
    def connections(self) -> Sequence[QuicConnection]:
        """The connections, including those in their closing period."""
        return tuple(self._connections)

    async def __aenter__(self) -> Self:
        self._manager = plain_nursery()
        nursery: trio.Nursery = await self._manager.__aenter__()
        nursery.start_soon(self._receive_loop, name="levada quic receive")
        nursery.start_soon(self._flush_loop, name="levada quic flush")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for connection in self.connections:
                connection.close()
            self._flush(trio.current_time())
            if self.config.linger and kind is None and self._connections:
                await self._linger()
        finally:
            try:
                await self._manager.__aexit__(kind, error, traceback)
            finally:
                self._port.close()
                for connection in self.connections:
                    self.forget(connection)
                self._manager = self.listener = None
                self._timers.clear()
                self._dirty.clear()

    async def _linger(self) -> None:
        """Wait until the closing periods are over, at most for the configured time."""
        with trio.move_on_after(self.config.linger):
            await self._deserted.park()

    def connect(
        self, address: Address, *, server: str, early: bool = False, config: QuicConfig | None = None
    ) -> QuicConnection:
        """Begin a connection; the first packet is sent when the caller next waits.

        Args:
            address: the server's socket address.
            server: the server's name, for the certificate and as a key of `ClientSessions`.
            early: send data before the handshake is complete if a ticket allows it.
            config: replaces the endpoint's own.

        Raises:
            ConfigurationError: a certificate file cannot be used.
        """
        config = config or self.config
        configuration = config.for_engine(is_client=True, server_name=server)
        sessions = config.sessions
        key = f"{configuration.server_name}:{address[1]}"
        ticket = None
        if sessions is not None:
            configuration.token = sessions.take_token(key)
            ticket = sessions.take_ticket(key)
            if ticket is not None and not early:
                ticket.max_early_data_size = None
            configuration.session_ticket = ticket

        def keep_ticket(ticket: SessionTicket) -> None:
            if sessions is not None:
                sessions.add_ticket(key, ticket)

        engine = Engine(
            configuration=configuration,
            settings=self.engine_settings(config),
            session_ticket_handler=keep_ticket if sessions is not None else None,
            token_handler=(lambda token: sessions.add_token(key, token)) if sessions is not None else None,
        )
        now = trio.current_time()
        offered = early and ticket is not None and ticket.max_early_data_size is not None
        connection = QuicConnection(
            self, engine, address, config=config, is_client=True, now=now, early_offered=offered
        )
        self.adopt(connection, engine.host_cid)
        engine.connect(address, now=now)
        connection.mark_dirty()
        return connection

    def engine_settings(self, config: QuicConfig, *, address_validated: bool = False) -> EngineSettings:
        """Return the settings for an engine of this endpoint."""
        secret = self.secret
        return EngineSettings(
            max_streams=config.max_streams,
            max_streams_unidirectional=config.max_streams_unidirectional,
            max_packet_size=config.max_packet_size,
            ack_delay=config.ack_delay,
            key_update_after=config.key_update_after,
            new_cid=self.new_cid,
            reset_token=lambda cid: reset_token(secret, cid),
            address_validated=address_validated,
        )

    def new_cid(self) -> bytes:
        """Make a connection id: the worker's number, then random bytes."""
        return bytes((self.config.worker,)) + self._token_bytes(CID_LENGTH - 1)

    def adopt(self, connection: QuicConnection, *cids: bytes) -> None:
        """Route packets for these ids to a connection, and keep its timer."""
        self._connections[connection] = None
        for cid in cids:
            self.add_route(cid, connection)

    def add_route(self, cid: bytes, connection: QuicConnection) -> None:
        """Route packets for an id to a connection."""
        self._routes[cid] = connection
        connection.cids.add(cid)

    def retire_route(self, cid: bytes, connection: QuicConnection) -> None:
        """Retire an id that the peer has given up. Packets with this id may still arrive, and must not be answered with a stateless reset."""
        retired = connection.retired_cids
        retired.append(cid)
        if len(retired) > _RETIRED_KEPT:
            cid = retired.popleft()
            self._routes.pop(cid, None)
            connection.cids.discard(cid)

    def forget(self, connection: QuicConnection) -> None:
        """Remove all traces of a connection."""
        if connection not in self._connections:
            return
        del self._connections[connection]
        for cid in connection.cids:
            self._routes.pop(cid, None)
        connection.cids.clear()
        for token in connection.reset_tokens:
            self._reset_tokens.pop(token, None)
        connection.reset_tokens.clear()
        connection.forgotten()
        self._drop_stale_timers()
        if not self._connections:
            self._deserted.unpark_all()

    def learn_reset_tokens(self, connection: QuicConnection) -> None:
        """Record a connection's stateless reset tokens. Resets are recognised by them, since the connection ids of resets are random."""
        tokens = connection.engine.peer_reset_tokens()
        if tokens != connection.reset_tokens:
            for token in connection.reset_tokens - tokens:
                self._reset_tokens.pop(token, None)
            connection.reset_tokens = tokens
            for token in tokens:
                self._reset_tokens[token] = connection

    def handshake_completed(self, connection: QuicConnection, address: Address) -> None:
        """Record that a client has completed its TLS handshake."""
        if self.listener is not None:
            self.listener.handshake_completed(connection, address)

    def connection_over(self, connection: QuicConnection, reason: CloseReason) -> None:
        """Record that a connection has ended, perhaps before its handshake."""
        if self.listener is not None:
            self.listener.connection_over(connection, reason)

    def rebind(self, port: DatagramPort) -> None:
        """Continue on another port, for example after a change of network. The old port is closed; dialled connections tell their servers at once."""
        old, self._port = self._port, port
        self._receive_scope.cancel()
        old.close()
        for connection in self.connections:
            if connection.is_client and not connection.closed:
                connection.change_path()

    def add_dirty(self, connection: QuicConnection) -> None:
        """Send for a connection soon."""
        self._dirty.append(connection)
        self._wake_flusher()

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> None:
        """Send datagrams that need no connection."""
        if self._outbox:
            self._outbox += datagrams[: max(0, _OUTBOX - len(self._outbox))]
        else:
            taken = self._port.send(datagrams)
            if taken < len(datagrams):
                self._outbox = list(datagrams[taken:])
                self._wake_flusher()

    def _wake_flusher(self) -> None:
        task = self._flusher
        if task is not None:
            self._flusher = None
            trio.lowlevel.reschedule(task)

    async def _flush_loop(self) -> None:
        while True:
            # One scope for many turns, since entering a scope costs as much as half a turn. A timer that fires ends the scope.
            with trio.CancelScope(deadline=self._timers[0][0] if self._timers else math.inf) as self._flusher_scope:
                while True:
                    if not self._dirty and not self._outbox:
                        self._flusher = trio.lowlevel.current_task()
                        await trio.lowlevel.wait_task_rescheduled(self._flusher_interrupted)
                    await self._turn()
            await self._turn()

    async def _turn(self) -> None:
        for _ in range(_YIELDS):
            before = self.asked
            await trio.lowlevel.checkpoint()
            if self.asked == before:  # trio's statistics would tell whether tasks can run, but cost too much
                break
        now = trio.current_time()
        if self._timers and self._timers[0][0] <= now:
            self._fire_timers(now)
        self._flush(now)
        while self._outbox:
            port = self._port
            try:
                await port.writable()
            except trio.ClosedResourceError:
                if port is self._port:
                    raise
                continue  # `rebind` has closed the old port
            taken = port.send(self._outbox)
            del self._outbox[:taken]

    def _flusher_interrupted(self, _: Any) -> trio.lowlevel.Abort:
        self._flusher = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _flush(self, now: float) -> None:
        self.counters["flushes"] += 1
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            datagrams: list[tuple[bytes, Address]] = []
            for connection in dirty:
                connection.dirty = False
                datagrams += self._transmit(connection, now)
            if datagrams:
                self.send(datagrams)

    def send_for(self, connection: QuicConnection) -> None:
        """Send for a connection at once."""
        self.send(self._transmit(connection, trio.current_time()))

    def _transmit(self, connection: QuicConnection, now: float) -> list[tuple[bytes, Address]]:
        datagrams: list[tuple[bytes, Address]] = []
        if connection not in self._connections:
            return datagrams
        try:
            datagrams = connection.transmit(now)
        except Exception as error:  # noqa: BLE001 - an engine that fails ends only its own connection
            self._engine_failed(connection, error)
        self._set_timer(connection)
        return datagrams

    def _set_timer(self, connection: QuicConnection) -> None:
        if connection not in self._connections:
            return
        at = connection.next_deadline()
        timers = self._timers
        if at == connection.timer_at:
            return
        if at > connection.timer_at and timers[0][2] is not connection:
            return  # checked when it fires
        connection.timer_at = at
        self._timer_count += 1
        entry = (at, self._timer_count, connection)
        if timers and timers[0][2] is connection:
            heapq.heapreplace(timers, entry)
        else:
            heapq.heappush(timers, entry)
            self._drop_stale_timers()
        scope = self._flusher_scope
        if scope is not None and timers[0][0] != scope.deadline:
            scope.deadline = timers[0][0]

    def _drop_stale_timers(self) -> None:
        """Keep the heap in proportion to the connections: stale entries would stay until they come due."""
        timers = self._timers
        if len(timers) > 2 * len(self._connections) + _TIMERS_LEFT:
            timers[:] = [entry for entry in timers if entry[0] == entry[2].timer_at and entry[2] in self._connections]
            heapq.heapify(timers)

    def _fire_timers(self, now: float) -> None:
        timers = self._timers
        while timers and timers[0][0] <= now:
            at, _, connection = heapq.heappop(timers)
            if connection.timer_at != at:
                continue  # stale: a newer entry with an earlier time has replaced it
            connection.timer_at = math.inf
            if connection not in self._connections:
                continue
            if connection.next_deadline() > now:
                self._set_timer(connection)
                continue
            try:
                # This marks the connection dirty. Sending then clears the ack and pacing timers, and sets the next one.
                connection.fire(now)
            except Exception as error:  # noqa: BLE001 - as in _transmit
                self._engine_failed(connection, error)

    def _engine_failed(self, connection: QuicConnection, error: Exception) -> None:
        self.counters["engine failures"] += 1
        text = "the engine of %r failed, which ends the connection"
        self._failures.log(logger, error, text, connection)
        connection.abandon(f"internal error: {error!r}")

    async def _receive_loop(self) -> None:
        while True:
            with trio.CancelScope() as self._receive_scope:
                while True:
                    self.take_in(await self._port.receive())
            # `rebind` has cancelled the scope: continue with the new port.
            await trio.lowlevel.checkpoint()

    def take_in(self, batch: Sequence[tuple[bytes, Address]]) -> None:
        """Handle datagrams that arrived at the port, or that another worker forwarded (`foreign`)."""
        now = trio.current_time()
        touched: dict[QuicConnection, None] = {}
        for data, address in batch:
            connection = self._route(data, address, now)
            if connection is not None:
                self.feed(connection, data, address, now)
                touched[connection] = None
        for connection in touched:
            self.touch(connection, now)

    def feed(self, connection: QuicConnection, data: bytes, address: Address, now: float) -> None:
        """Give a connection a datagram from its peer; call `touch` after the last one."""
        try:
            connection.receive(data, address, now)
        except Exception as error:  # noqa: BLE001 - input from a peer ends its own connection at most
            self._engine_failed(connection, error)

    def touch(self, connection: QuicConnection, now: float) -> None:
        """Handle the news of a connection that was fed, and send its answer."""
        try:
            connection.settle()
        except Exception as error:  # noqa: BLE001 - as in feed
            self._engine_failed(connection, error)
        connection.batch_over()
        if connection in self._connections and connection.engine.sending.is_due(now):
            connection.mark_dirty()
        else:
            self._set_timer(connection)

    def _route(self, data: bytes, address: Address, now: float) -> QuicConnection | None:
        if not data:
            return None
        if not data[0] & 0x80:
            cid = data[1 : 1 + CID_LENGTH]
            connection = self._routes.get(cid)
            if connection is None:
                self._unroutable(data, cid, address, now)
            return connection
        # Long header: the version, the length of the destination id, the id.
        connection = self._routes.get(data[6 : 6 + data[5]]) if len(data) > 6 else None
        if connection is None and self.listener is not None:
            self.listener.unknown(data, address)
        return connection

    def _unroutable(self, data: bytes, cid: bytes, address: Address, now: float) -> None:
        """Handle a short-header packet of no connection here: it is a reset, is for another worker, or is answered with a stateless reset."""
        if len(data) >= _SMALLEST_RESET:
            connection = self._reset_tokens.get(data[-16:])
            if connection is not None and connection.peer_address == address:
                self.counters["stateless resets received"] += 1
                connection.reset_by_peer()
                return
        if len(cid) == CID_LENGTH and cid[0] != self.config.worker:
            self.counters["foreign"] += 1
            if self.foreign is not None:
                self.foreign(cid[0], data, address)
            return
        self.counters["unroutable"] += 1
        # A reset is smaller than the packet that it answers, so two endpoints cannot send each other resets forever.
        size = min(len(data) - 1, _LARGEST_RESET)
        if size < _SMALLEST_RESET:
            return
        elapsed, self._reset_seen = now - self._reset_seen, now
        self._reset_allowance = min(_RESETS_PER_SECOND, self._reset_allowance + elapsed * _RESETS_PER_SECOND)
        if self._reset_allowance >= 1:
            self._reset_allowance -= 1
            self.counters["stateless resets sent"] += 1
            noise = self._token_bytes(size - 16)
            self.send([(bytes((0x40 | noise[0] & 0x3F,)) + noise[1:] + reset_token(self.secret, cid), address)])
