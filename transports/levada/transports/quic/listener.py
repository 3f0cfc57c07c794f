"""A server's handling of packets from unknown clients: version negotiation, Retry, tokens, and `QuicIncoming`.

Until the application accepts a `QuicIncoming`, its client costs only the memory for its first packets, and no handshake. Under load, or
always, a client must first prove that it receives at its address: it gets a token in a Retry packet, and the server keeps no state for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio
from aioquic._buffer import Buffer
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.packet_builder import QuicPacketBuilder

from levada.framework.errors import ConnectionClosed, LocalProtocolError
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.contracts import CloseReason
from levada.transports.carriers.places import Place, Places, share_of

from .config import SMALLEST_PACKET, TicketStore
from .connection import QuicConnection
from .endpoint import CID_LENGTH, QuicEndpoint
from .engine import Engine
from .port import Address, authority
from .tokens import AddressTokens

__all__ = ["QuicIncoming", "QuicListener"]

_PACKETS_KEPT = 10  # of a client that is not accepted yet: room for a large hello and early data
_BYTES_KEPT = 65_535  # room for at least the client's first datagram
MADE_ROOM = "its handshake made room for others"
_CLOSE_FRAME = 25  # most bytes of CONNECTION_CLOSE without a reason


class QuicIncoming:
    """A client that wants a connection: accept it, refuse it, make it prove its address, or ignore it, once.

    After `QuicConfig.handshake_timeout` seconds without a decision it expires, when the listener next handles a client. Each of these calls
    then raises `LocalProtocolError`.
    """

    def __init__(
        self,
        listener: QuicListener,
        header: QuicHeader,
        address: Address,
        *,
        leave: Callable[[], None] | None,
        original_cid: bytes | None,
        places: Places,
    ):
        self.place = places.take(share_of(authority(address)), self._make_room)
        self._listener = listener
        self._address = address
        self._version = header.version or 0
        self.destination_cid = header.destination_cid
        self.source_cid = header.source_cid
        self._original_cid = original_cid
        self._leave = leave
        self._packets: list[bytes] = []
        self._decided = False
        self.expires_at = trio.current_time() + listener.endpoint.config.handshake_timeout

    @property
    def peer(self) -> str:
        """The client's address, as ``HOST:PORT``."""
        return authority(self._address)

    @property
    def validated(self) -> bool:
        """Whether a token has shown that the client receives at this address."""
        return self._leave is not None

    @property
    def decided(self) -> bool:
        """Whether it was accepted, refused, sent back, ignored, or has expired."""
        return self._decided

    def keep(self, data: bytes) -> None:
        """Keep a packet until the client is accepted; drop it if there are too many."""
        if len(self._packets) < _PACKETS_KEPT and sum(map(len, self._packets)) + len(data) <= _BYTES_KEPT:
            self._packets.append(data)

    def accept(self) -> QuicConnection:
        """Begin the handshake; `QuicConnection.handshake` waits for it.

        Raises:
            LocalProtocolError: the client was already decided on.
        """
        self._decide()
        return self._listener.start(self, self._address, self._packets, self._original_cid, leave=self._leave)

    def refuse(self, why: str = "the application refused it") -> None:
        """Refuse the client, and tell it. `why` appears in the listener's warning only."""
        self.ignore()
        self._listener.send_close(
            self._version, self.source_cid, self.destination_cid, self._address, QuicErrorCode.CONNECTION_REFUSED
        )
        self._listener.admission.turn_away(self.peer, why)

    def retry(self) -> None:
        """Make the client prove its address first; then it comes as another `QuicIncoming`.

        Raises:
            LocalProtocolError: it has already proved its address, or was already decided on.
        """
        if self.validated:
            raise LocalProtocolError("this client has proved its address; accept, refuse or ignore it")
        self._decide()
        self.place.leave()
        self._listener.send_retry(self._version, self.source_cid, self.destination_cid, self._address)

    def ignore(self) -> None:
        """Forget the client without an answer."""
        self._decide()
        self.place.leave()
        if self._leave is not None:
            self._leave()

    def _make_room(self) -> None:
        self.ignore()
        self._listener.admission.turn_away(self.peer, MADE_ROOM)

    def _decide(self) -> None:
        if self._decided:
            raise LocalProtocolError(
                "this client was already accepted, refused, sent back or ignored, or it waited too long"
            )
        self._decided = True
        self._listener.decided(self)


class QuicListener:
    """Accepts clients. `listen` makes one; make your own to listen on a `QuicEndpoint` of yours."""

    def __init__(self, endpoint: QuicEndpoint):
        self.endpoint = endpoint
        config = endpoint.config
        self._configuration = config.for_engine(is_client=False)
        self._tokens = AddressTokens(endpoint.secret)
        self._tickets = config.tickets if config.tickets is not None else TicketStore()
        self._pending: dict[bytes, QuicIncoming] = {}
        self._queue: dict[QuicIncoming, None] = {}  # those that `accept` has not returned, the oldest first
        self._waiters = trio.lowlevel.ParkingLot()
        self._places = Places(config.max_handshakes)
        self._handshakes: dict[QuicConnection, Place] = {}
        self._entered: dict[QuicConnection, Callable[[], None]] = {}  # connections whose address is proved
        self._closed = False
        self.admission = Admission(self.url, config.max_connections_per_address)
        """The clients admitted, and the number turned away."""
        endpoint.listener = self

    @property
    def url(self) -> str:
        """The URL to dial, with the real port."""
        return f"quic://{authority(self.endpoint.address)}"

    @property
    def unfinished(self) -> int:
        """Handshakes in progress, and clients waiting for `accept`."""
        return len(self._places)

    async def accept(self) -> QuicIncoming:
        """Wait for the next client, before its handshake.

        Raises:
            ConnectionClosed: the listener was closed.

        Cancellation:
            no client was taken.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            self._expire()
            if self._queue:
                incoming = next(iter(self._queue))
                del self._queue[incoming]
                return incoming
            if self._closed:
                raise ConnectionClosed("the listener is closed")
            await self._waiters.park()

    def reload(self) -> None:
        """Read the certificate files again for new handshakes; existing connections keep theirs.

        Raises:
            ConfigurationError: the files cannot be used; the old certificates stay.
        """
        self._configuration = self.endpoint.config.for_engine(is_client=False)

    async def aclose(self) -> None:
        """Stop accepting, and refuse the clients that are not decided on. Accepted connections stay open."""
        self._closed = True
        for incoming in list(self._pending.values()):
            incoming.refuse("the listener is closed")
        self._waiters.unpark_all()
        await trio.lowlevel.checkpoint()

    def start(
        self,
        incoming: QuicIncoming,
        address: Address,
        packets: list[bytes],
        original_cid: bytes | None,
        *,
        leave: Callable[[], None] | None,
    ) -> QuicConnection:
        """Make the connection of an accepted client."""
        endpoint, config = self.endpoint, self.endpoint.config
        now = trio.current_time()
        # In a resumed session the client shows no certificate, and 0-RTT data would come before one.
        resumable = config.early_data and config.client_certificates == "none"
        engine = Engine(
            configuration=self._configuration,
            settings=endpoint.engine_settings(config, address_validated=leave is not None),
            original_destination_connection_id=original_cid or incoming.destination_cid,
            retry_source_connection_id=incoming.destination_cid if original_cid is not None else None,
            session_ticket_fetcher=self._tickets.take if resumable else None,
            session_ticket_handler=self._tickets.add if resumable else None,
        )
        connection = QuicConnection(endpoint, engine, address, config=config, is_client=False, now=now)
        endpoint.adopt(connection, incoming.destination_cid, engine.host_cid)
        self._handshakes[connection] = incoming.place
        incoming.place.end = partial(self._make_room, connection)
        if leave is not None:
            self._entered[connection] = leave
        for data in packets:
            endpoint.feed(connection, data, address, now)
        endpoint.touch(connection, now)
        return connection

    def _make_room(self, connection: QuicConnection) -> None:
        del self._handshakes[connection]
        self.admission.turn_away(connection.info.peer, MADE_ROOM)
        connection.fail(MADE_ROOM, code=QuicErrorCode.CONNECTION_REFUSED)

    def decided(self, incoming: QuicIncoming) -> None:
        """Remove a client that was decided on from the waiting ones."""
        self._pending.pop(incoming.destination_cid, None)
        self._queue.pop(incoming, None)

    def handshake_completed(self, connection: QuicConnection, address: Address) -> None:
        """Record that the client's address is proved, and give it a token to prove it next time; fail the connection if the address has too many."""
        if connection not in self._handshakes:
            return  # it has ended
        self._handshakes.pop(connection).leave()
        if connection not in self._entered:
            leave = self.admission.enter(address[0])
            if leave is None:
                self.admission.too_many(authority(address))
                connection.fail("too many connections from this address", code=QuicErrorCode.CONNECTION_REFUSED)
                return
            self._entered[connection] = leave
        connection.engine.sending.send_new_token(self._tokens.issue(address))

    def connection_over(self, connection: QuicConnection, reason: CloseReason) -> None:
        """Record that a connection has ended, perhaps before its handshake."""
        if connection in self._entered:
            self._entered.pop(connection)()
        if connection in self._handshakes:
            self._handshakes.pop(connection).leave()
            self.admission.ended_early(connection.info.peer, reason)

    def unknown(self, data: bytes, address: Address) -> None:
        """Handle a long-header packet without a connection."""
        counters, config = self.endpoint.counters, self.endpoint.config
        version = int.from_bytes(data[1:5], "big")
        if not version or self._closed:
            return  # a version negotiation gets no answer: forged ones could make two servers answer each other forever
        if version not in config.versions:
            self._negotiate(data, address)
            return
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=CID_LENGTH)
        except ValueError:
            counters["malformed"] += 1
            return
        waiting = self._pending.get(header.destination_cid)
        if waiting is not None:
            waiting.keep(data)
            return
        if (
            header.packet_type is not QuicPacketType.INITIAL
            or len(data) < SMALLEST_PACKET
            or len(header.destination_cid) < 8
        ):
            counters["stray"] += 1
            return
        self._newcomer(data, header, version, address)

    def _negotiate(self, data: bytes, address: Address) -> None:
        """Answer with the supported versions. In a packet of another version, only the connection ids are known (RFC 8999)."""
        if len(data) < SMALLEST_PACKET:
            return
        end = 6 + data[5]
        destination_cid, source_cid = data[6:end], data[end + 1 : end + 1 + data[end]]
        self.endpoint.counters["version negotiations"] += 1
        answer = encode_quic_version_negotiation(
            source_cid=destination_cid,
            destination_cid=source_cid,
            supported_versions=list(self.endpoint.config.versions),
        )
        self.endpoint.send([(answer, address)])

    def _newcomer(self, data: bytes, header: QuicHeader, version: int, address: Address) -> None:
        counters, config = self.endpoint.counters, self.endpoint.config
        self._expire()
        proof = (
            self._tokens.check(header.token, address, destination_cid=header.destination_cid) if header.token else None
        )
        if proof is None and header.token and self._tokens.is_retry(header.token, address):
            counters["invalid tokens"] += 1
            self.send_close(version, header.source_cid, header.destination_cid, address, QuicErrorCode.INVALID_TOKEN)
            self.admission.turn_away(authority(address), "its token is too old, or of another attempt")
            return
        demanded = config.retry == "always" or (config.retry == "load" and self.unfinished >= config.retry_threshold)
        if proof is None and demanded:
            self.send_retry(version, header.source_cid, header.destination_cid, address)
            return
        leave, original = None, None
        if proof is not None:
            leave, original = self.admission.enter(address[0]), proof.original_cid
            if leave is None:
                code = QuicErrorCode.CONNECTION_REFUSED
                self.send_close(version, header.source_cid, header.destination_cid, address, code)
                self.admission.too_many(authority(address))
                return
        incoming = QuicIncoming(self, header, address, leave=leave, original_cid=original, places=self._places)
        incoming.keep(data)
        self._pending[header.destination_cid] = incoming
        self._queue[incoming] = None
        self._waiters.unpark()

    def _expire(self) -> None:
        now = trio.current_time()
        # From the oldest on, including clients that `accept` has returned.
        while self._pending and (oldest := next(iter(self._pending.values()))).expires_at <= now:
            oldest.ignore()
            seconds = self.endpoint.config.handshake_timeout
            self.admission.turn_away(oldest.peer, f"it was not accepted within {seconds} s")

    def send_retry(self, version: int, source_cid: bytes, destination_cid: bytes, address: Address) -> None:
        """Make a client prove its address."""
        self.endpoint.counters["retries"] += 1
        retry_cid = self.endpoint.new_cid()
        packet = encode_quic_retry(
            version=version,
            source_cid=retry_cid,
            destination_cid=source_cid,
            original_destination_cid=destination_cid,
            retry_token=self._tokens.retry(address, original_cid=destination_cid, retry_cid=retry_cid),
        )
        self.endpoint.send([(packet, address)])

    def send_close(self, version: int, source_cid: bytes, destination_cid: bytes, address: Address, code: int) -> None:
        """Refuse a client that has no connection, in an Initial packet."""
        keys = CryptoPair()
        keys.setup_initial(cid=destination_cid, is_client=False, version=version)
        builder = QuicPacketBuilder(
            host_cid=destination_cid,
            is_client=False,
            max_datagram_size=SMALLEST_PACKET,
            peer_cid=source_cid,
            version=version,
        )
        builder.start_packet(QuicPacketType.INITIAL, keys)
        frame = builder.start_frame(QuicFrameType.TRANSPORT_CLOSE, _CLOSE_FRAME)
        frame.push_uint_var(code)
        frame.push_uint_var(QuicFrameType.PADDING)
        frame.push_uint_var(0)
        datagrams, _ = builder.flush()
        self.endpoint.send([(datagram, address) for datagram in datagrams])
