"""The QUIC state machine: aioquic's, with access to the internals that a carrier needs, and a check whether the overrides fit.

Only this module, `keys` and the override modules (`lean`, `ready`, `packets`, `ranges`, `congestion`, `recovery`, `overrides`) touch
private names of aioquic's classes. The version and each name are checked at import:

* `PlainEngine` is aioquic's `QuicConnection` with read access to internals (unsent bytes, credit), limits on what a peer can make it
  store, client certificates, and fixes. Without the fixes, tasks would wait forever when packets get lost around a Retry, new keys or a new
  address. It works with any version that has the private names it uses, and replaces `TunedEngine`, with a warning, when the overrides do
  not fit.
* `TunedEngine` has all overrides. Other modules use both in the same way: the plain engine's methods for features that it cannot have do
  nothing.
"""

from __future__ import annotations

import importlib.metadata
import logging
import ssl
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import attrs
from aioquic import tls
from aioquic._buffer import Buffer
from aioquic._crypto import HeaderProtection
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    QuicConnection,
    QuicConnectionAdapter,
    QuicConnectionError,
    QuicConnectionState,
    QuicNetworkPath,
    QuicReceiveContext,
)
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicErrorCode
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace
from aioquic.quic.stream import QuicStream
from cryptography.x509 import Certificate

from levada.framework.platform import PLATFORM
from levada.transports.text import printable

from .certificates import UNREADABLE, ClientCertificateRequired, verify
from .keys import RollingKeys, channel_binding
from .ranges import Ranges

__all__ = ["OVERRIDES_FIT", "EarlyDatagram", "EngineSettings", "PlainEngine", "engine_class"]

SUPPORTED: Final = "1.7"
"""The version of aioquic, by its first two numbers, that the overrides were written for."""

logger = logging.getLogger("levada.transports.quic.engine")

_ONE_RTT = tls.Epoch.ONE_RTT
_PING = 0  # id of a PING whose acknowledgement is ignored
_PACKET_OVERHEAD = 3 + 16  # short header without the connection id, and the AEAD's tag
_LONG_HEADER = 11

MAX_GAPS: Final = 4_096
"""Most gaps in the received data of all streams of a connection: half as many as packets that fill a window of 8 MiB."""

MAX_HANDSHAKE_MESSAGE: Final = 1 << 16
"""Most bytes kept of a TLS message that is not complete; the longest messages are chains of certificates. aioquic keeps up to 16 MiB, and
copies them all for each further piece."""


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Settings of an engine beyond aioquic's own configuration; units as in `QuicConfig`."""

    max_streams: int = 128
    max_streams_unidirectional: int = 128
    max_packet_size: int = 1_452
    ack_delay: float = 0.001
    key_update_after: int = 1 << 22
    new_cid: Callable[[], bytes] = attrs.field(default=lambda: PLATFORM.get().token_bytes(8))
    reset_token: Callable[[bytes], bytes] = attrs.field(default=lambda cid: PLATFORM.get().token_bytes(16))
    address_validated: bool = False
    """Whether a token has shown that the client receives at its address."""


class _EngineLog(QuicConnectionAdapter):
    """aioquic's log, at the level DEBUG only: aioquic warns of each mistake of each peer, and does not escape the peer's text.

    Our errors and the listener's warning say why a connection failed.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log the message at the level DEBUG, whatever its own level."""
        if self.isEnabledFor(logging.DEBUG):
            text = str(msg) % args if args else str(msg)
            super().log(logging.DEBUG, "%s", printable(text))


class EarlyDatagram(events.DatagramFrameReceived):
    """A datagram that arrived as 0-RTT data."""


class PlainEngine(QuicConnection):
    """aioquic's connection with the accessors that backpressure needs, with limits and fixes."""

    _crypto: RollingKeys

    tuned = False
    """Whether the overrides are in use."""

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        settings: EngineSettings,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
        session_ticket_fetcher: tls.SessionTicketFetcher | None = None,
        session_ticket_handler: tls.SessionTicketHandler | None = None,
        token_handler: Callable[[bytes], None] | None = None,
    ):
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
            session_ticket_fetcher=session_ticket_fetcher,
            session_ticket_handler=session_ticket_handler,
            token_handler=token_handler,
        )
        self.settings = settings
        self._logger = self._loss._logger = _EngineLog(logger, self._logger.extra)
        self._challenge_at = 0.0  # when an unvalidated address may be challenged again
        self._key_sending: Any = None
        self._key_start = 0  # number of the first packet under these keys, or of a later one
        self._key_wanted = False
        self._gaps: dict[QuicStream, int] = {}  # number in the received data of each stream
        self._gap_count = 0
        self.channel_binding: bytes | None = None
        """The channel binding, known only to the two ends; set with the first 1-RTT key, before the handshake is complete."""
        self.early_streams: set[int] = set()
        """Streams that carried 0-RTT data; the reader of the events removes them."""
        self.reset_tokens_changed = False
        """Whether other connection ids of the peer have come into use since the reader cleared this; never set by the plain engine."""

    @property
    def close_event(self) -> events.ConnectionTerminated | None:
        """Why the connection is ending; ``None`` while it is not. aioquic emits this event only after the closing period."""
        return self._close_event

    @property
    def closed(self) -> bool:
        """Whether the connection has begun to end: no packet is sent any more, except perhaps the close itself."""
        return self._close_event is not None

    @property
    def closed_by_peer(self) -> bool:
        """Whether the peer's CONNECTION_CLOSE ended the connection."""
        return self._state is QuicConnectionState.DRAINING

    @property
    def terminated(self) -> bool:
        """Whether the closing period is over too."""
        return self._state is QuicConnectionState.TERMINATED

    @property
    def may_answer(self) -> bool:
        """Whether the peer has proved its address, or was sent at most three times what it sent. aioquic closes without regard to this limit."""
        if not self._network_paths:
            return False
        path = self._network_paths[0]
        return path.is_validated or path.bytes_sent <= 3 * path.bytes_received

    @property
    def handshake_complete(self) -> bool:
        """Whether the TLS handshake is complete."""
        return self._handshake_complete

    @property
    def probe_timeout(self) -> float:
        """The probe timeout in seconds, after which unacknowledged data is probed for."""
        return self._loss.get_probe_timeout()

    @property
    def credit(self) -> tuple[int, int]:
        """Bytes that the connection's flow control still allows this side and the peer to send."""
        limit = self._local_max_data
        return self._remote_max_data - self._remote_max_data_used, limit.value - limit.used

    @property
    def packet_size(self) -> int:
        """UDP payload of a full packet in bytes, as of now."""
        return self._max_datagram_size

    @property
    def smoothed_rtt(self) -> float:
        """Round-trip time in seconds; 0 if not measured yet."""
        return self._loss._rtt_smoothed

    @property
    def packets_sent(self) -> int:
        """Packets sent, of all kinds."""
        return self._packet_number

    @property
    def peer_certificate(self) -> Certificate | None:
        """The certificate that the peer has shown. A client has verified it unless told not to, a server always."""
        return self.tls._peer_certificate

    def peer_reset_tokens(self) -> set[bytes]:
        """Return the stateless reset tokens that may end this connection: only those for ids in use (RFC 9000 section 10.3.1)."""
        used = [self._peer_cid, *(path.peer_cid for path in self._network_paths)]
        return {cid.stateless_reset_token for cid in used if cid is not None and cid.stateless_reset_token}

    def take_events(self) -> Collection[events.QuicEvent]:
        """Return the events since the last call."""
        happened = self._events
        if happened:
            self._events = deque()
        return happened

    def terminate(self, code: int, text: str) -> None:
        """End the connection at once, without telling the peer."""
        if not self.terminated:
            if self._close_event is None:
                self._close_event = events.ConnectionTerminated(error_code=code, frame_type=0, reason_phrase=text)
            self._close_end()

    def release(self) -> None:
        """Release everything that is not needed after the end.

        aioquic's connection refers to its own methods, as handlers of frames, keys, handshakes and deliveries, and would stay in memory until
        the garbage collector runs.
        """
        self._loss._send_probe = _nothing
        for space in self._spaces.values():
            space.sent_packets.clear()
        for name in ("_QuicConnection__frame_handlers", "_cryptos", "_cryptos_initial", "_crypto", "tls"):
            vars(self).pop(name, None)
        for stream in self._streams.values():  # their counts of unsent bytes are still read
            stream.sender._buffer.clear()
            stream.receiver._buffer.clear()
        self._gaps.clear()
        self._crypto_streams.clear()
        self._datagrams_pending.clear()

    def stream_credit(self, *, unidirectional: bool) -> int:
        """Return how many more streams the peer allows to be opened now."""
        limit = self._remote_max_streams_uni if unidirectional else self._remote_max_streams_bidi
        return max(0, limit - self.get_next_available_stream_id(unidirectional) // 4)

    def reserve_stream(self, *, unidirectional: bool, priority: int) -> int:
        """Open a stream; the peer learns of it with its first frame."""
        stream_id = self.get_next_available_stream_id(unidirectional)
        self._get_or_create_stream_for_send(stream_id)
        self.set_priority(stream_id, priority)
        return stream_id

    def want_stream(self, *, unidirectional: bool) -> None:
        """Tell the peer that its limit blocks new streams; the plain engine cannot."""

    def set_priority(self, stream_id: int, priority: int) -> None:
        """Serve a stream before those with higher priority numbers; the plain engine serves all in turn."""

    def unsent(self, stream_id: int) -> int:
        """Return the bytes of a stream that were written and not yet sent."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.sender._reset_error_code is not None:
            return 0
        return stream.sender._buffer_stop - stream.sender.highest_offset

    def unacked(self, stream_id: int) -> int:
        """Return the bytes of a stream that were written and not yet acknowledged."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.sender._reset_error_code is not None:
            return 0
        return stream.sender._buffer_stop - stream.sender._buffer_start

    def total_unacked(self) -> int:
        """Return the unacknowledged bytes of all streams together."""
        return sum(map(self.unacked, self._streams))

    def discard_stream(self, stream_id: int, code: int) -> None:
        """Reset the sending half, and release its buffer."""
        self.reset_stream(stream_id, code)

    def refuse_stream(self, stream_id: int, code: int) -> None:
        """Ask the peer to stop sending, unless it has sent everything."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.receiver.is_finished:
            self.stop_stream(stream_id, code)

    def consumed(self, stream_id: int, size: int) -> bool:
        """Count bytes that the application has taken; true if the peer should be told of new credit."""
        return False

    def grant_stream(self, *, unidirectional: bool) -> bool:
        """Allow the peer one more stream, for a finished one; true if it should be told. aioquic has already done so by itself."""
        return False

    def take_settled(self, known: Iterable[int]) -> list[int]:
        """Return the `known` streams whose sending half has ended, acknowledged or reset; the plain engine names them in each call."""
        streams = self._streams
        return [stream_id for stream_id in known if stream_id not in streams or streams[stream_id].sender.is_finished]

    def take_forgotten(self, known: Iterable[int]) -> list[int]:
        """Return the `known` streams that the engine has dropped since the last call."""
        streams = self._streams
        return [stream_id for stream_id in known if stream_id not in streams]

    @property
    def datagrams_queued(self) -> int:
        """Datagrams not sent yet."""
        return len(self._datagrams_pending)

    def datagram_room(self) -> int:
        """Return the size in bytes of the largest datagram that fits a packet and that the peer accepts; 0 for none."""
        peer = self._remote_max_datagram_frame_size
        if peer is None or peer <= 3:
            return 0
        room = self._max_datagram_size - _PACKET_OVERHEAD - len(self._peer_cid.cid) - 3
        if not self._handshake_complete:  # 0-RTT packets have a long header
            room -= _LONG_HEADER - 3 + len(self.host_cid)
        return min(room, peer - 3)

    def _initialize(self, peer_cid: bytes) -> None:
        # After Retry or version negotiation a client starts again: its 0-RTT data must be resent, and is no longer in flight.
        for space in self._spaces.values():
            packets = list(space.sent_packets.values())
            self._loss._on_packets_lost(congestion_event=False, now=0.0, packets=packets, space=space)
        super()._initialize(peer_cid)
        self._crypto = self._cryptos[_ONE_RTT] = RollingKeys(self._cryptos[_ONE_RTT])
        self.tls._request_client_certificate = self._asks_client

    @property
    def _asks_client(self) -> bool:
        return not self._is_client and self._configuration.verify_mode in (ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)

    def _update_traffic_key(
        self, direction: tls.Direction, epoch: tls.Epoch, cipher_suite: tls.CipherSuite, secret: bytes
    ) -> None:
        if epoch is _ONE_RTT and direction is tls.Direction.DECRYPT:
            # The peer's Finished has just been verified. Without this key, nothing that the peer sends later can be read.
            self._verify_peer()
        super()._update_traffic_key(direction, epoch, cipher_suite, secret)
        if epoch is _ONE_RTT and self.channel_binding is None:
            # Both sides make the first key of this epoch when the transcript ends with the server's Finished, as the exporter secret
            # requires; soon after, it ends with the client's Finished. aioquic itself never derives the exporter secret.
            schedule = self.tls.key_schedule
            assert schedule is not None
            self.channel_binding = channel_binding(schedule.algorithm, schedule.derive_secret(b"exp master"))

    def _verify_peer(self) -> None:
        configuration, certificate = self._configuration, self.tls._peer_certificate
        if certificate is None:  # also in a resumed session, whose server has shown its certificate before
            if self._asks_client and configuration.verify_mode == ssl.CERT_REQUIRED:
                raise ClientCertificateRequired("a client certificate is required")
        elif configuration.verify_mode != ssl.CERT_NONE:
            chain = self.tls._peer_certificate_chain
            verify(certificate, chain, configuration.cadata, of_client=not self._is_client)

    def receive_datagram(self, data: bytes, addr: Any, now: float) -> None:
        """Take a packet, and note whether the peer's address has changed."""
        before = self._network_paths[:1]
        if self._handshake_confirmed and self._crypto.previous is not None:
            self._crypto.give_up_previous(now, 3 * self._loss.get_probe_timeout())
        try:
            super().receive_datagram(data, addr, now)
        except QuicConnectionError as error:  # from the keys
            self._close_for(error)
        if before and self._network_paths[0] is not before[0]:
            self._path_changed(afresh=before[0].addr[0] != self._network_paths[0].addr[0])

    def _handle_crypto_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        try:
            super()._handle_crypto_frame(context, frame_type, buf)
        except QuicConnectionError as error:
            if error.__context__ is not None:
                # aioquic's `negotiate` keeps the alert in a local variable. So the alert's traceback would refer to the alert, and to us.
                error.__context__.__traceback__ = None
            raise
        except UNREADABLE as error:  # aioquic expects a ValueError
            raise QuicConnectionError(
                error_code=QuicErrorCode.CRYPTO_ERROR + tls.AlertDescription.bad_certificate,
                frame_type=frame_type,
                reason_phrase=f"Certificate could not be parsed: {error}",
            ) from None
        if len(self.tls._receive_buffer) > MAX_HANDSHAKE_MESSAGE:
            raise QuicConnectionError(
                error_code=QuicErrorCode.CRYPTO_BUFFER_EXCEEDED,
                frame_type=frame_type,
                reason_phrase="Handshake message too long",
            )
        self._bound_gaps(self._crypto_streams[context.epoch], frame_type)

    def _handle_stream_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        start = buf.tell()
        stream_id = buf.pull_uint_var()
        buf.seek(start)
        super()._handle_stream_frame(context, frame_type, buf)
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._bound_gaps(stream, frame_type)

    def _bound_gaps(self, stream: QuicStream, frame_type: int) -> None:
        """Bound the cost of reassembly (RFC 9000 section 21.7).

        A gap costs 100 bytes of memory, and aioquic looks at all gaps for each piece of data: after thirty packets full of single bytes, a
        packet took 40 ms, and each further one more.
        """
        receiver = stream.receiver
        ranges = receiver._ranges
        gaps = 0 if receiver.is_finished else len(ranges)
        known = self._gaps.pop(stream, 0)
        self._gap_count += gaps - known
        if not gaps:
            return
        self._gaps[stream] = gaps
        if type(ranges) is RangeSet:
            receiver._ranges = Ranges(ranges)
        if self._gap_count > MAX_GAPS:
            raise QuicConnectionError(
                error_code=QuicErrorCode.PROTOCOL_VIOLATION,
                frame_type=frame_type,
                reason_phrase="Too many gaps in the received data",
            )

    def _handle_retire_connection_id_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        start = buf.tell()
        number = buf.pull_uint_var()
        buf.seek(start)
        if any(cid.sequence_number == number and not cid.was_sent for cid in self._host_cids):
            # aioquic allows this and makes another id at once, which the same packet may retire: 3 us for each byte of it.
            raise QuicConnectionError(
                error_code=QuicErrorCode.PROTOCOL_VIOLATION,
                frame_type=frame_type,
                reason_phrase="Cannot retire a connection ID that was not sent",
            )
        super()._handle_retire_connection_id_frame(context, frame_type, buf)

    def _send_probe(self) -> None:
        super()._send_probe()
        if self._is_client and self._handshake_complete and not self._handshake_confirmed:
            # aioquic repeats only the end of the handshake, and a server that has received that end has dropped the keys for it. To find a
            # client whose address has changed, such a server must receive a packet that it can open.
            self._ping_pending.append(_PING)

    def _close_for(self, error: QuicConnectionError) -> None:
        self.close(error_code=error.error_code, frame_type=error.frame_type, reason_phrase=error.reason_phrase)

    def _path_changed(self, *, afresh: bool) -> None:
        """Note that packets take another path from now on; `afresh` if more than the peer's port may have changed."""
        # Losses on the old path must not delay the probes of the new one: after seven unanswered probes, the next would come long after the
        # time for address validation is over.
        self._loss._pto_count = 0
        self._challenge_at = 0.0

    def _challenge_again(self, path: QuicNetworkPath, now: float) -> None:
        """Challenge an unvalidated address again when there is data to send there, at most once in a round trip.

        aioquic repeats a challenge once it counts as lost, which takes an acknowledgement of later data. A peer that has nothing to send and
        received only acknowledgements never sends one: it waits for data that goes to its old address.
        """
        if not path.is_validated and now >= self._challenge_at:
            path.local_challenge_sent = False
            # A congestion window full of packets to the old address must not hold the challenge back.
            self._probe_pending = True
            self._challenge_at = now + (self._loss._rtt_smoothed or self._configuration.initial_rtt)

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Any]]:
        """Return the packets to send now; renew the keys first if that is due."""
        if self._handshake_confirmed:
            self._renew_keys()
            self._challenge_again(self._network_paths[0], now)
        return super().datagrams_to_send(now)

    def request_key_update(self) -> None:
        """Renew the keys as soon as this is allowed."""
        self._key_wanted = True

    def _renew_keys(self) -> None:
        """Renew the keys if requested or due, once the peer has acknowledged a packet under the present ones (RFC 9001 section 6.1).

        A side two updates ahead of its peer would show the key phase that the peer is in. The peer would open its packets with the wrong keys,
        and could never read it again.
        """
        keys, number = self._crypto, self._packet_number
        if keys.send.aead is not self._key_sending:  # by an update of either side
            self._key_sending = keys.send.aead
            self._key_start = number
        if (
            (self._key_wanted or number - self._key_start >= self.settings.key_update_after)
            and self._spaces[_ONE_RTT].largest_acked_packet >= self._key_start
            and not keys._update_key_requested
        ):
            self._key_wanted = False
            super().request_key_update()

    def send_new_token(self, token: bytes) -> None:
        """Give the client a token for its next connection."""

    @property
    def has_news(self) -> bool:
        """Whether there may be an event, or the end of a stream or of the connection, to handle; the plain engine cannot tell."""
        return True

    def has_something_to_send(self, now: float) -> bool:
        """Whether `datagrams_to_send` should be called now and not at the next timer; the plain engine cannot tell."""
        return True

    def probe_path(self, now: float) -> list[tuple[bytes, Any]]:
        """Return a path MTU probe if one is due."""
        return []


def _nothing() -> None:
    pass


_PLAIN_NAMES = """
    _close_event _close_end _state _handshake_complete _loss _max_datagram_size _packet_number _peer_cid
    _remote_max_streams_bidi _remote_max_streams_uni _get_or_create_stream_for_send _streams
    _QuicConnection__frame_handlers _crypto_streams
    _datagrams_pending _remote_max_datagram_frame_size _network_paths _events
    _cryptos _spaces _handshake_confirmed _initialize _update_traffic_key _send_probe _handle_crypto_frame
    _handle_stream_frame _handle_retire_connection_id_frame _host_cids _is_client _ping_pending _probe_pending
    _configuration _local_max_data _remote_max_data _remote_max_data_used
"""
_TUNED_NAMES = """
    _streams_queue _streams_blocked_bidi _streams_blocked_uni _streams_blocked_pending _unblock_streams
    _get_or_create_stream _handle_max_data_frame _handle_max_stream_data_frame _handle_stop_sending_frame
    _handle_reset_stream_frame _handle_stream_frame _handle_datagram_frame _handle_streams_blocked_frame
    _write_streams_blocked_frame _consume_peer_cid _use_reserved_peer_cid _handle_crypto_frame _parse_transport_parameters
    _find_network_path _replenish_connection_ids _host_cids _host_cid_seq _remote_active_connection_id_limit
    _local_max_streams_bidi _local_max_streams_uni _local_initial_source_connection_id
    _on_connection_limit_delivery _on_max_stream_data_delivery _write_connection_limits _write_stream_limits
    _write_stream_frame _write_reset_stream_frame _write_stop_sending_frame _write_application _write_ack_frame
    _write_new_connection_id_frame _write_ping_frame _write_crypto_frame _flush_builder
    _payload_received _crypto_streams _pacing_at
    _handshake_done_pending _retire_connection_ids _close_pending _close_at
    _idle_timeout _loss_at _ack_eliciting_sent_since_receipt _spin_bit _spin_highest_pn _version _ack_delay
    _remote_ack_delay_exponent _remote_preferred_address _remote_max_idle_timeout
    _local_ack_delay_exponent _local_max_stream_data_uni _local_max_stream_data_bidi_remote _logger _configuration
    _remote_max_stream_data_bidi_local _on_new_connection_id_delivery _on_ack_delivery _handle_ack_frame
"""


def _missing(names: str) -> list[str]:
    """Return the private names that the installed aioquic lacks: `names` of a connection, and names of its parts."""
    sample = QuicConnection(configuration=QuicConfiguration(is_client=True))
    stream = QuicStream(stream_id=0)
    builder = QuicPacketBuilder(host_cid=b"", peer_cid=b"", version=1, is_client=True, max_datagram_size=1_200)
    parts: tuple[tuple[object, str], ...] = (
        (
            stream.sender,
            "_buffer _buffer_start _buffer_stop _pending _pending_eof _reset_error_code highest_offset reset_pending",
        ),
        (stream.receiver, "_buffer _buffer_start _final_size _ranges highest_offset stop_pending is_finished"),
        (
            builder,
            "_packet _buffer _packet_number _end_packet remaining_flight_space remaining_buffer_space packet_is_empty flush",
        ),
        (
            QuicPacketRecovery,
            "_on_packets_lost _detect_loss _in_persistent_congestion on_ack_received get_probe_timeout",
        ),
        (
            getattr(sample, "_loss", None),
            "_pacer _cc _pto_count _rtt_initial _rtt_smoothed _rtt_latest _rtt_min _rtt_variance _rtt_initialized _rtt_first_sample_time "
            "_time_of_last_sent_ack_eliciting_packet max_ack_delay peer_completed_address_validation",
        ),
        (
            tls.Context(is_client=False),
            "_peer_certificate _peer_certificate_chain _receive_buffer _request_client_certificate",
        ),
        (CryptoPair(), "recv send _update_key _update_key_requested"),
        (HeaderProtection, "_mask"),
        (
            QuicPacketSpace(),
            "ack_at ack_eliciting_in_flight ack_queue expected_packet_number largest_acked_packet loss_time received_packets sent_packets",
        ),
    )
    present = set(dir(sample))
    lacking = [name for name in names.split() if name not in present]
    return lacking + [name for part, wanted in parts for name in wanted.split() if name not in dir(part)]


def _overrides_fit() -> bool:
    version = importlib.metadata.version("aioquic")
    if _missing(_PLAIN_NAMES):
        raise ImportError(f"aioquic {version} cannot be used, wanted {SUPPORTED}.x: pip install 'levada[quic]'")
    lacking = _missing(_TUNED_NAMES)
    if not lacking and version.split(".")[:2] == SUPPORTED.split("."):
        return True
    why = f"lacks {', '.join(lacking)}" if lacking else f"is not {SUPPORTED}.x"
    warnings.warn(
        f"aioquic {version} {why}: QUIC runs without receive backpressure, 0-RTT marks, NEW_TOKEN, stateless reset and path MTU "
        "discovery, and costs more (pip install 'levada[quic]')",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


OVERRIDES_FIT: Final = _overrides_fit()
"""Whether the overrides were written for the installed aioquic."""


def engine_class(*, plain: bool = False) -> type[PlainEngine]:
    """Return the engine to use: the tuned one if the overrides fit, unless the plain one is requested."""
    if plain or not OVERRIDES_FIT:
        return PlainEngine
    from .overrides import TunedEngine  # imported only here, since this fails where the overrides do not fit

    return TunedEngine
