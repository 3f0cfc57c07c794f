"""How a connection behaves: one immutable class for both roles and both dialects."""

from __future__ import annotations

from typing import Final

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError
from levada.transports.rsocket.frames import MAX_U31, Payload

__all__ = ["CUT_INTO", "LARGEST_SENT", "MAX_FRAME", "CoreConfig", "LeaseGrant", "mime_type_fault"]

MAX_FRAME: Final = 2**24 - 1  # RS-3: 24-bit frame length
# RS-86: rsocket-java counts the length field too. It drops larger frames silently, so a requester would wait forever.
LARGEST_SENT: Final = MAX_FRAME - 3
CUT_INTO: Final = 2**20  # bytes of a fragment, its length field included, of a payload that no frame can hold

_COUNT = [v.instance_of(int), v.ge(0)]
_SIZE = [v.instance_of(int), v.ge(1)]


def _milliseconds(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0.001 <= value <= MAX_U31 / 1000:
        raise ConfigurationError(f"{attribute.name} is {value}, wanted 0.001 to {MAX_U31 / 1000} seconds")


def mime_type_fault(metadata_mime_type: str, data_mime_type: str) -> str:
    """Return what is wrong with the MIME types of a SETUP, or an empty string (RS-42, RX-32).

    Names are not interpreted (RS-17), but they go into metadata entries, logs and the application's own texts.
    """
    if not metadata_mime_type:
        return "the metadata MIME type is empty"
    if len(metadata_mime_type) > 128:  # EXT-1: no entry of metadata has room for more
        return f"a metadata MIME type of {len(metadata_mime_type)} bytes, at most 128"
    if len(data_mime_type) > 255:  # one byte for its length
        return f"a data MIME type of {len(data_mime_type)} bytes, at most 255"
    for what, name in (("metadata", metadata_mime_type), ("data", data_mime_type)):
        if not (name.isascii() and name.isprintable()):
            return f"the {what} MIME type is not printable ASCII"
    return ""


@attrs.frozen
class LeaseGrant:
    """The lease that this side grants as soon as the connection is set up."""

    ttl: float = attrs.field(default=0.0, validator=[v.ge(0), v.le(MAX_U31 / 1000)])
    """Seconds; 0 allows nothing."""
    n: int = attrs.field(default=0, validator=[v.instance_of(int), v.ge(0), v.le(MAX_U31)])
    """Requests; 0 allows nothing, as for a side that has no responder (RS-55)."""
    metadata: bytes | None = None
    """Sent with the lease; ``None`` if there is none."""


@attrs.frozen(kw_only=True)
class CoreConfig:
    """How one side of a connection behaves. Immutable; derive with `attrs.evolve`."""

    # Sent by the client in SETUP.
    version: tuple[int, int] = (1, 0)
    """Client: the version in SETUP; ``(0, 2)`` for peers of the older text, whose frames are the same (RS-41)."""
    keepalive_interval: float = attrs.field(default=20.0, validator=_milliseconds)
    """Client: seconds between KEEPALIVEs."""
    max_lifetime: float = attrs.field(default=90.0, validator=_milliseconds)
    """Client: seconds of silence after which the peer is considered dead. SETUP carries the value, and the server uses it too."""
    metadata_mime_type: str = "application/octet-stream"
    """Client: the MIME type of all metadata on the connection, not interpreted here (RS-17). 1 to 128 printable ASCII characters."""
    data_mime_type: str = "application/octet-stream"
    """Client: the MIME type of all data on the connection, not interpreted here (RS-17). At most 255 printable ASCII characters."""
    setup_payload: Payload = attrs.field(factory=Payload, validator=v.instance_of(Payload), repr=False)
    """Client: the payload of SETUP, for the server's application."""

    # Features.
    lease: LeaseGrant | None = None
    """The first lease that this side grants; ``None`` for a connection without leases.

    A client with a value asks for leases in SETUP, a server with a value supports them. Then both sides need a lease for their requests.
    """
    lease_grace: float = attrs.field(default=1.0, validator=v.ge(0))
    """Seconds for which a request is still accepted after its lease has expired or was replaced, because the peer's clock started later
    and requests cross a new lease (RS-134)."""
    max_pending: int = attrs.field(default=1024, validator=_COUNT)
    """Requests that may wait for a lease. With 0, a request without a lease fails at once (RS-133)."""
    resume: bool = False
    """Client: ask for a session that outlives its carrier. Server: give one to each client that asks."""
    resume_token: bytes | None = attrs.field(default=None, validator=v.optional(v.max_len(65_535)), repr=False)
    """Client: the session's token; 16 random bytes if not given (RS-104)."""
    resume_buffer: int = attrs.field(default=16 * 1024 * 1024, validator=_COUNT)
    """Bytes of sent frames that are kept until the peer has received them; each frame counts as 48 bytes more.

    When the buffer is full, the oldest frames are dropped, and a resumption may fail (RS-94).
    """
    resume_timeout: float = attrs.field(default=60.0, validator=v.ge(0))
    """Seconds for which a session without a carrier can be resumed (RS-102)."""
    reuse_stream_ids: bool = False
    """Start again at the lowest id after the highest one, instead of raising `StreamIdsExhausted` (RS-20)."""
    fragment_size: int | None = attrs.field(default=None, validator=v.optional([v.instance_of(int), v.ge(64)]))
    """Bytes of the largest frame to send, its length field included; larger payloads are sent as fragments of this size.

    Frames of other streams, and KEEPALIVE, need not wait for the whole of a large payload then.

    ``None``: only payloads that do not fit into any frame are fragmented, into 1 MiB each (RS-86).
    """
    extensions: frozenset[int] = frozenset()
    """EXT types that the application understands."""
    strict_mime_types: frozenset[str] | None = None
    """ReactiveSocket server: the MIME types that a strict client may ask for; ``None`` for any."""
    strict: bool = False
    """ReactiveSocket client: ask the server to refuse MIME types that it does not understand."""

    # Limits.
    max_frame_size: int = attrs.field(default=MAX_FRAME, validator=_SIZE)
    """Bytes of the largest frame accepted from the peer (RS-5)."""
    max_payload_size: int = attrs.field(default=64 * 1024 * 1024, validator=_SIZE)
    """Bytes of data and metadata of one reassembled payload (RS-85)."""
    max_reassembly: int = attrs.field(default=256 * 1024 * 1024, validator=_SIZE)
    """Bytes of all unfinished payloads of the connection."""
    max_streams: int = attrs.field(default=4096, validator=_COUNT)
    """Streams that the peer may have open at once; a further request is answered with REJECTED. Each takes 5 to 8 kB with its handler.

    Connections of `levada.actors.rsocket` count a stream until its handler has ended, also if the peer has cancelled it.
    """
    max_setup_backlog: int = attrs.field(default=1024 * 1024, validator=_COUNT)
    """Server: bytes of the first frame (SETUP or RESUME), and of the frames that a client may send behind SETUP while the server
    decides.
    """

    # Times, in seconds.
    setup_timeout: float = attrs.field(default=10.0, validator=v.ge(0))
    """Server: seconds to wait for the first frame; then the carrier is closed, without an ERROR frame (RS-49)."""
    drain_timeout: float = attrs.field(default=5.0, validator=v.ge(0))
    """Seconds that open streams have to end in a drain, whichever side began it (RS-31)."""
    close_when_silent: bool = True
    """End the connection if the peer is silent for the whole lifetime. If false, `PeerFellSilent` reports the silence (RS-107)."""

    def __attrs_post_init__(self) -> None:
        fault = mime_type_fault(self.metadata_mime_type, self.data_mime_type)
        if fault:
            raise ConfigurationError(fault)
