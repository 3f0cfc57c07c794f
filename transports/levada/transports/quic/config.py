"""Settings of QUIC endpoints, connections and engines, and the two stores that outlive a connection."""

from __future__ import annotations

import ssl
from collections import OrderedDict
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import attrs
from aioquic.quic import connection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.tls import SessionTicket
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509 import load_pem_x509_certificates

from levada.framework.errors import ConfigurationError
from levada.framework.platform import PLATFORM
from levada.framework.text import texts
from levada.transports.private_files import warn_if_others_can_read

__all__ = ["ClientSessions", "EngineSettings", "QuicConfig", "TicketStore"]


LOOPBACK_PACKET = 16_384
"""Bytes. aioquic writes frame lengths in two bytes, so packets above 16,410 bytes would contain corrupt frames."""
SMALLEST_PACKET = 1_200
MTU_CEILING = 1_452  # 1,500 of Ethernet less 40 of IPv6 and 8 of UDP
_REST = 2_048  # bytes of the other handshake messages, which share aioquic's buffer with the certificates
WORKER_LIMIT = 256  # the first byte of a connection id names the worker process

_positive: Any = attrs.validators.and_(attrs.validators.instance_of((int, float)), attrs.validators.gt(0))
_not_negative: Any = attrs.validators.and_(attrs.validators.instance_of((int, float)), attrs.validators.ge(0))
# Peers are told of windows in 62 bits, of the idle timeout in milliseconds in 62 bits, and of at most 2^60 streams.
_idle: Any = attrs.validators.and_(_positive, attrs.validators.lt(1 << 52))
_count: Any = attrs.validators.and_(
    attrs.validators.instance_of(int), attrs.validators.ge(0), attrs.validators.le(1 << 60)
)
_size: Any = attrs.validators.and_(
    attrs.validators.instance_of(int), attrs.validators.gt(0), attrs.validators.lt(1 << 62)
)


class TicketStore:
    """Session tickets that this server has issued, each good for one resumption.

    Taking a ticket removes it, so recorded 0-RTT data cannot be replayed to this process. A store may outlive a run of trio, so it does not
    use trio's clock.

    Args:
        limit: most tickets kept.
        lifetime: seconds that a ticket is good for.
        clock: returns the time in seconds; ``None``: the `Platform.monotonic` of the process that makes the store.
    """

    def __init__(self, *, limit: int = 10_000, lifetime: float = 86_400.0, clock: Callable[[], float] | None = None):
        self._limit = limit
        self._lifetime = lifetime
        self._clock = clock or PLATFORM.get().monotonic
        self._tickets: OrderedDict[bytes, tuple[float, SessionTicket]] = OrderedDict()

    def add(self, ticket: SessionTicket) -> None:
        """Keep a ticket. Expired tickets are dropped, and the oldest ones above the limit."""
        now = self._clock()
        self._tickets[ticket.ticket] = (now + self._lifetime, ticket)
        while self._tickets and (len(self._tickets) > self._limit or next(iter(self._tickets.values()))[0] <= now):
            self._tickets.popitem(last=False)

    def take(self, label: bytes) -> SessionTicket | None:
        """Remove and return the ticket with this label; ``None`` if it is missing or too old."""
        until, ticket = self._tickets.pop(label, (0.0, None))
        return ticket if ticket is not None and until > self._clock() else None

    def __len__(self) -> int:
        return len(self._tickets)


class ClientSessions:
    """Session tickets and address tokens that servers gave this client, one of each per server; each is used once.

    A ticket allows 0-RTT, and a token proves the client's address. Servers are named by server name and port, as in ``"example.org:443"``.

    Args:
        limit: most servers remembered.
    """

    def __init__(self, *, limit: int = 1_000):
        self._limit = limit
        self._tickets: OrderedDict[str, SessionTicket] = OrderedDict()
        self._tokens: OrderedDict[str, bytes] = OrderedDict()

    def add_ticket(self, server: str, ticket: SessionTicket) -> None:
        """Keep the newest ticket of a server."""
        self._tickets[server] = ticket
        if len(self._tickets) > self._limit:
            self._tickets.popitem(last=False)

    def take_ticket(self, server: str) -> SessionTicket | None:
        """Remove and return the ticket of a server; ``None`` if there is none."""
        return self._tickets.pop(server, None)

    def add_token(self, server: str, token: bytes) -> None:
        """Keep the newest address token of a server."""
        self._tokens[server] = token
        if len(self._tokens) > self._limit:
            self._tokens.popitem(last=False)

    def take_token(self, server: str) -> bytes:
        """Remove and return the address token of a server; empty if there is none."""
        return self._tokens.pop(server, b"")


@attrs.frozen(kw_only=True)
class QuicConfig:
    """Settings of a QUIC endpoint and its connections. Immutable; derive with `attrs.evolve`."""

    alpn: tuple[str, ...] = attrs.field(default=("levada",), converter=texts)
    """Application protocols, preferred first; both ends must have one in common."""
    certificate: str | PathLike[str] | None = None
    """PEM file with this side's certificate and its chain. A listener needs one; a client shows its own if asked."""
    key: str | PathLike[str] | None = None
    """PEM file with the certificate's key; ``None`` if the certificate's file contains it."""
    key_password: str | None = attrs.field(default=None, repr=False)
    """Password of the key file."""
    ca: str | PathLike[str] | bytes | None = None
    """PEM file, or PEM bytes, with the authorities to trust. A client with ``None`` trusts the public ones."""
    verify: bool = True
    """Whether a client checks the server's certificate and name. Disable it in experiments only."""
    client_certificates: Literal["none", "optional", "required"] = attrs.field(
        default="none", validator=attrs.validators.in_(["none", "optional", "required"])
    )
    """Whether a listener asks clients for certificates, verified against `ca`. A listener that asks issues no tickets, so it takes no 0-RTT."""
    server_name: str | None = None
    """Name that a client requests and checks; ``None`` for the host of the URL."""

    idle_timeout: float = attrs.field(default=30.0, validator=_idle)
    """Seconds without a packet from the peer after which a connection is lost. The smaller value of the two ends applies."""
    keepalive_interval: float | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    """Seconds without a packet from the peer after which a PING is sent; ``None`` for never."""
    handshake_timeout: float = attrs.field(default=10.0, validator=_positive)
    """Seconds that a handshake may take, on both sides."""
    linger: float = attrs.field(default=0.0, validator=_not_negative)
    """Longest time in seconds that an endpoint stays open after its block, to repeat its close to peers that missed it."""

    stream_window: int = attrs.field(default=1 << 20, validator=_size)
    """Bytes that a peer may send on one stream ahead of the application's reads. The window of a stream that is read fast grows to half of
    `connection_window`."""
    connection_window: int = attrs.field(default=8 << 20, validator=_size)
    """Bytes that a peer may send on all streams of a connection together, ahead of the application's reads."""
    max_streams: int = attrs.field(default=128, validator=_count)
    """Bidirectional streams that a peer may have open at once."""
    max_streams_unidirectional: int = attrs.field(default=128, validator=_count)
    """Unidirectional streams that a peer may have open at once."""
    high_watermark: int = attrs.field(default=256 << 10, validator=_size)
    """Bytes queued on a stream and not yet sent, above which `send_all` waits."""
    low_watermark: int = attrs.field(default=128 << 10, validator=_count)
    """Bytes queued on a stream at which `send_all` continues."""
    max_unacked: int = attrs.field(default=8 << 20, validator=_size)
    """Unacknowledged bytes, queued or sent on all streams of a connection together, above which `send_all` waits."""

    datagrams: bool = True
    """Whether unreliable datagrams from the peer are accepted."""
    datagram_queue: int = attrs.field(default=256, validator=_size)
    """Most datagrams kept in each direction. When that many are kept, senders wait and receivers lose the oldest."""

    packet_size: int | Literal["loopback"] = 1_200
    """UDP payload of a packet in bytes, before path MTU discovery: 1,200 to 16,384. ``"loopback"`` means 16,384, for two ends on one machine."""
    max_packet_size: int = attrs.field(default=MTU_CEILING, validator=_size)
    """Upper limit of path MTU discovery in bytes, at most 16,384. At or below `packet_size` there is no discovery."""
    congestion_control: Literal["cubic", "reno"] = attrs.field(
        default="cubic", validator=attrs.validators.in_(("cubic", "reno"))
    )
    """Congestion control algorithm."""
    initial_rtt: float = attrs.field(default=0.1, validator=_positive)
    """Round-trip time in seconds, assumed until the first measurement."""
    ack_delay: float = attrs.field(default=0.001, validator=_positive)
    """Seconds that an acknowledgement may be delayed, at most 0.025."""
    key_update_after: int = attrs.field(default=1 << 22, validator=_size)
    """Packets after which the keys are renewed; AES-GCM is good for 2**23 (RFC 9001 section 6.6)."""
    versions: tuple[int, ...] = (0x00000001, 0x6B3343CF)
    """QUIC versions in order of preference: 1 and 2."""

    retry: Literal["load", "always", "never"] = attrs.field(
        default="load", validator=attrs.validators.in_(("load", "always", "never"))
    )
    """When a server makes clients prove their address before it keeps state for them: under load, always or never."""
    retry_threshold: int = attrs.field(default=64, validator=_count)
    """Unfinished handshakes at which ``"load"`` begins to demand proof."""
    max_handshakes: int = attrs.field(default=1_000, validator=_size)
    """Most unfinished handshakes and waiting `QuicIncoming` together. At that number, one of them makes room for the newest: the oldest of the
    address that has the most (for IPv6: of the /64). Unless `retry` is ``"never"``, these addresses are proved."""
    max_connections_per_address: int | None = attrs.field(default=None, validator=attrs.validators.optional(_size))
    """Most connections that a server admits from one address (for IPv6: one /64). A connection counts once its address is proved, by a token
    or the handshake, so forged addresses use up no places. ``None`` for no limit."""
    secret: bytes | None = attrs.field(default=None, repr=False)
    """At least 32 bytes, from which tokens and stateless resets are derived. Use the same for all workers and after restarts. ``None`` for a
    random secret."""
    worker: int = attrs.field(
        default=0, validator=[attrs.validators.instance_of(int), attrs.validators.in_(range(WORKER_LIMIT))]
    )
    """Number of this process among those that share a port; part of every connection id, so that packets can be forwarded."""
    tickets: TicketStore | None = None
    """Where a server keeps session tickets; ``None`` for the listener's own store."""
    early_data: bool = True
    """Whether a server issues tickets that allow 0-RTT. 0-RTT data is marked ``early``, since it may be a replay. A server that asks for
    client certificates issues no tickets."""
    sessions: ClientSessions | None = None
    """Where a client keeps tickets and tokens between connections; ``None`` for nowhere."""

    gso: bool = True
    """Whether to pass groups of packets to the kernel in one call, if it supports this."""
    gro: bool = True
    """Whether to take groups of packets from the kernel in one call, if it supports this."""
    socket_buffer: int = attrs.field(default=4 << 20, validator=_size)
    """Bytes requested for each of the socket's two buffers; the system may give less."""

    def __attrs_post_init__(self) -> None:
        """Check the combinations of fields."""
        size = self.initial_packet_size
        if not SMALLEST_PACKET <= size <= LOOPBACK_PACKET:
            raise ConfigurationError(f"packet_size is {size}, wanted {SMALLEST_PACKET} to {LOOPBACK_PACKET}")
        if self.max_packet_size > LOOPBACK_PACKET:
            raise ConfigurationError(f"max_packet_size is {self.max_packet_size}, wanted at most {LOOPBACK_PACKET}")
        if self.low_watermark > self.high_watermark:
            raise ConfigurationError(
                f"low_watermark {self.low_watermark} is above high_watermark {self.high_watermark}"
            )
        if self.secret is not None and len(self.secret) < 32:
            raise ConfigurationError(f"secret has {len(self.secret)} bytes, wanted at least 32")
        if self.ack_delay > 0.025:
            raise ConfigurationError(
                f"ack_delay is {self.ack_delay}, wanted at most 0.025, the delay that peers are told"
            )

    @property
    def initial_packet_size(self) -> int:
        """UDP payload of a packet in bytes, before path MTU discovery."""
        return LOOPBACK_PACKET if self.packet_size == "loopback" else self.packet_size

    def for_engine(self, *, is_client: bool, server_name: str | None = None) -> QuicConfiguration:
        """Convert to aioquic's configuration; this reads the certificate files.

        Raises:
            ConfigurationError: a server has no certificate, or a file cannot be read or has the wrong content.
        """
        configuration = QuicConfiguration(
            alpn_protocols=list(self.alpn),
            congestion_control_algorithm=self.congestion_control,
            idle_timeout=self.idle_timeout,
            initial_rtt=self.initial_rtt,
            is_client=is_client,
            max_data=self.connection_window,
            max_datagram_frame_size=65_535 if self.datagrams else None,
            max_datagram_size=self.initial_packet_size,
            max_stream_data=self.stream_window,
            supported_versions=list(self.versions),
        )
        if is_client:
            configuration.server_name = self.server_name or server_name
            configuration.verify_mode = ssl.CERT_REQUIRED if self.verify else ssl.CERT_NONE
        elif self.certificate is None:
            raise ConfigurationError("a QUIC server needs a certificate: QuicConfig(certificate=FILE, key=FILE)")
        elif self.client_certificates == "none":
            configuration.verify_mode = ssl.CERT_NONE
        elif self.ca is None:
            raise ConfigurationError("client certificates need authorities to check them against: set `ca`")
        else:
            required = self.client_certificates == "required"
            configuration.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        if self.ca is not None:
            try:
                configuration.cadata = self.ca if isinstance(self.ca, bytes) else Path(self.ca).read_bytes()
                load_pem_x509_certificates(configuration.cadata)
            except (OSError, ValueError) as error:
                what = "`ca`" if isinstance(self.ca, bytes) else self.ca
                raise ConfigurationError(f"cannot use {what}: {error}") from error
        if self.certificate is not None:
            password = None if self.key_password is None else self.key_password.encode()
            try:
                # aioquic's own function accepts only one format of key and, in a common file, only a key at the end.
                shown = load_pem_x509_certificates(Path(self.certificate).read_bytes())
                key: Any = load_pem_private_key(Path(self.key or self.certificate).read_bytes(), password)
                warn_if_others_can_read(self.key or self.certificate, "a private key")
            except (OSError, ValueError, TypeError) as error:  # TypeError: a missing or surplus password
                files = ", ".join(str(file) for file in (self.certificate, self.key) if file is not None)
                hint = "" if self.key is not None else " (set `key` if it is in another file)"
                raise ConfigurationError(f"cannot use {files}: {error}{hint}") from error
            configuration.certificate, *configuration.certificate_chain = shown
            configuration.private_key = key if PLATFORM.get().network is None else _steady(key)
            length, room = (
                sum(len(one.public_bytes(Encoding.DER)) for one in shown),
                connection.CRYPTO_BUFFER_SIZE - _REST,
            )
            if length > room:
                raise ConfigurationError(f"the certificates in {self.certificate} have {length} bytes, at most {room}")
            if key.public_key() != shown[0].public_key():
                raise ConfigurationError(f"{self.key or self.certificate} is not the key of {self.certificate}")
        return configuration


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


class _SteadyKey:
    """An ECDSA key that signs until the signature is as long as it can be: four times on average.

    In a simulated network QUIC repeats its packets, with their sizes, though not their bytes: the crypto library draws keys and nonces of its
    own. All of these have fixed lengths except for ECDSA signatures, whose two numbers lose their leading zeros: with P-256 a signature has
    70, 71 or 72 bytes, and rarely fewer. Two bytes more in a packet may change how many packets fit into a window.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        number = key.key_size // 8 + 1  # bytes, with the sign
        numbers = 2 * (2 + number)
        self._longest = numbers + (2 if numbers < 0x80 else 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._key, name)

    def sign(self, data: bytes, algorithm: ec.EllipticCurveSignatureAlgorithm) -> bytes:
        while len(signature := self._key.sign(data, algorithm)) < self._longest:
            pass
        return signature


ec.EllipticCurvePrivateKey.register(_SteadyKey)


def _steady(key: Any) -> Any:
    """Return a key whose signatures have one length: the key itself, unless it is one for ECDSA."""
    return _SteadyKey(key) if isinstance(key, ec.EllipticCurvePrivateKey) else key
