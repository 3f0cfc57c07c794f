"""How a connection behaves: one immutable class for both roles and both dialects."""

from __future__ import annotations

from typing import Final

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError
from levada.transports.rsocket.payload import Payload

__all__ = ["CUT_INTO", "LARGEST_SENT", "MAX_FRAME", "MAX_U31", "CoreConfig", "LeaseGrant", "mime_type_fault"]

MAX_FRAME: Final = 2**24 - 1  # RS-3: 24-bit frame length
# RS-86: rsocket-java counts the length field too. It drops larger frames without a word, and whoever waits for them waits forever.
LARGEST_SENT: Final = MAX_FRAME - 3
CUT_INTO: Final = 2**20  # bytes of a fragment with its length field, of what no frame can hold
MAX_U31: Final = 2**31 - 1

_COUNT = [v.instance_of(int), v.ge(0)]
_SIZE = [v.instance_of(int), v.ge(1)]


def _milliseconds(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0.001 <= value <= MAX_U31 / 1000:
        raise ConfigurationError(f"{attribute.name} must be 0.001 to {MAX_U31 / 1000} seconds, got {value}")


def mime_type_fault(metadata_mime_type: str, data_mime_type: str) -> str:
    """Return the fault of the MIME types of a SETUP; empty if they can be used (RS-42, RX-32).

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
    """What this side's responder allows the peer as soon as the connection is set up."""

    ttl: float = attrs.field(default=0.0, validator=[v.ge(0), v.le(MAX_U31 / 1000)])
    """Seconds; 0 allows nothing."""
    n: int = attrs.field(default=0, validator=[v.instance_of(int), v.ge(0), v.le(MAX_U31)])
    """Requests; 0 allows nothing, which is what a side without a responder says (RS-55)."""
    metadata: bytes | None = None


@attrs.frozen(kw_only=True)
class CoreConfig:
    """How one side of a connection behaves. Immutable; derive with `attrs.evolve`."""

    # What the client says in SETUP.
    version: tuple[int, int] = (1, 0)
    """Client: the version in SETUP; ``(0, 2)`` for peers of the older text, whose frames are the same (RS-41)."""
    keepalive_interval: float = attrs.field(default=20.0, validator=_milliseconds)
    """Client: seconds between KEEPALIVEs."""
    max_lifetime: float = attrs.field(default=90.0, validator=_milliseconds)
    """Client: seconds of silence after which the peer is held dead; the server uses the number of the client's SETUP."""
    metadata_mime_type: str = "application/octet-stream"
    """Client: of the whole connection; not interpreted here (RS-17). 1 to 128 printable ASCII characters."""
    data_mime_type: str = "application/octet-stream"
    """Client: of the whole connection; not interpreted here (RS-17). At most 255 printable ASCII characters."""
    setup_payload: Payload = attrs.field(factory=Payload, validator=v.instance_of(Payload))
    """Client: what the server's application gets with SETUP."""

    # Features.
    lease: LeaseGrant | None = None
    """Requests need leases, both ways. Client: asked for in SETUP; server: possible. What is granted at once."""
    lease_grace: float = attrs.field(default=1.0, validator=v.ge(0))
    """Seconds for which a request is still taken after a lease has run out: the peer's clock started later (RS-134)."""
    max_pending: int = attrs.field(default=1024, validator=_COUNT)
    """Requests that may wait for a lease; 0: a request without lease fails at once (RS-133)."""
    resume: bool = False
    """Client: ask for a session that outlives its carrier. Server: give one to clients that ask."""
    resume_token: bytes | None = attrs.field(default=None, validator=v.optional(v.max_len(65_535)))
    """Client: the session's token; 16 random bytes if not given (RS-104)."""
    resume_buffer: int = attrs.field(default=16 * 1024 * 1024, validator=_COUNT)
    """Bytes of sent frames kept until the peer has them, and 48 for each; when it is full the oldest go and resuming may fail (RS-94)."""
    resume_timeout: float = attrs.field(default=60.0, validator=v.ge(0))
    """Seconds that a session without carrier lives (RS-102)."""
    reuse_stream_ids: bool = False
    """Begin again at the lowest id when the highest was used, instead of `StreamIdsExhausted` (RS-20)."""
    fragment_size: int | None = attrs.field(default=None, validator=v.optional([v.instance_of(int), v.ge(64)]))
    """Bytes of a frame with its length field above which payloads are cut into fragments of that size.

    ``None``: only payloads that no frame can hold are cut, into fragments of 1 MiB (RS-86).
    """
    extensions: frozenset[int] = frozenset()
    """EXT types that the application understands."""
    strict_mime_types: frozenset[str] | None = None
    """ReactiveSocket server: the MIME types that a strict client may ask for; ``None``: any."""
    strict: bool = False
    """ReactiveSocket client: ask the server to refuse MIME types that it does not understand."""

    # Limits.
    max_frame_size: int = attrs.field(default=MAX_FRAME, validator=_SIZE)
    """Bytes of the largest frame taken from the peer (RS-5)."""
    max_payload_size: int = attrs.field(default=64 * 1024 * 1024, validator=_SIZE)
    """Bytes of data and metadata of one payload put together from fragments (RS-85)."""
    max_reassembly: int = attrs.field(default=256 * 1024 * 1024, validator=_SIZE)
    """Bytes of all unfinished payloads of the connection together."""
    max_streams: int = attrs.field(default=4096, validator=_COUNT)
    """Streams of the peer open at once; a request above is answered by REJECTED. With their handlers they take 5 to 8 kB each."""
    max_setup_backlog: int = attrs.field(default=1024 * 1024, validator=_COUNT)
    """Server: bytes of the first frame, SETUP or RESUME, and of what a client may send behind SETUP while the server decides."""

    # Times, in seconds.
    setup_timeout: float = attrs.field(default=10.0, validator=v.ge(0))
    """Server: without a first frame until then the carrier is closed without a word (RS-49)."""
    drain_timeout: float = attrs.field(default=30.0, validator=v.ge(0))
    """In a drain, begun here or by the peer's CONNECTION_CLOSE, open streams have this long to end (RS-31)."""
    close_when_silent: bool = True
    """A peer that is silent for the whole lifetime ends the connection; else `PeerFellSilent` reports it (RS-107)."""

    def __attrs_post_init__(self) -> None:
        fault = mime_type_fault(self.metadata_mime_type, self.data_mime_type)
        if fault:
            raise ConfigurationError(fault)
