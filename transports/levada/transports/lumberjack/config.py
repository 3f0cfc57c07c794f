"""Settings of both sides. Every limit on the protocol's page has a field here."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError
from levada.transports.core import MAX_CONNECTIONS

__all__ = ["MAX_SEQUENCE", "ReaderConfig", "WriterConfig"]

MAX_SEQUENCE = 2**32 - 1  # LJ-1: all integers are u32

_size: Any = attrs.validators.and_(v.instance_of(int), v.ge(1))
_count: Any = attrs.validators.and_(v.instance_of(int), v.ge(0))
_seconds: Any = attrs.validators.and_(v.instance_of((int, float)), v.gt(0))
_maybe_seconds: Any = v.optional(_seconds)
_versions: Any = v.deep_iterable(v.in_((1, 2)), v.min_len(1))


@attrs.frozen(kw_only=True)
class ReaderConfig:
    """How a Lumberjack reader behaves. Immutable; derive with `attrs.evolve`."""

    versions: frozenset[int] = attrs.field(default=frozenset((1, 2)), converter=frozenset, validator=_versions)
    """Versions of the protocol that the reader accepts: 1, 2 or both. A writer with another version is refused (LJ-3)."""
    on_bad_json: Literal["close", "deliver"] = attrs.field(default="close", validator=v.in_(("close", "deliver")))
    """What to do with a J frame that is not JSON: refuse the connection, or deliver an event with the text as ``message`` and
    the tag ``_jsonparsefailure`` (LJ-12)."""

    max_window: int = attrs.field(default=65_536, validator=_size)
    """Events after which a unit ends, however large a window the writer announced (LJ-23)."""
    max_uncommitted_units: int = attrs.field(default=2, validator=_size)
    """Units of one connection that may wait for the sink. At this limit the reader stops reading from it (LJ-25)."""
    partial_ack_every: int | None = attrs.field(default=None, validator=v.optional(_size))
    """Version 2 only: deliver and ack a window in parts of this many events; ``None``: whole windows (LJ-19)."""
    idle_ack: float = attrs.field(default=1.0, validator=_seconds)
    """Seconds without bytes after which the events of an unfinished window are delivered as a unit (LJ-18)."""
    keepalive_interval: float = attrs.field(default=3.0, validator=_seconds)
    """Seconds between acks of 0 while the sink works; version 2 only (LJ-20)."""
    commit_timeout: float | None = attrs.field(default=60.0, validator=_maybe_seconds)
    """Seconds that the sink has for a unit from a version 1 writer, because version 1 has no keepalives; ``None``: no limit (LJ-25a)."""
    drain_timeout: float = attrs.field(default=5.0, validator=_seconds)
    """Seconds that the reader, when it ends, waits for the sink to commit units, which it then acks (LJ-28)."""
    close_timeout: float = attrs.field(default=1.0, validator=_seconds)
    """Seconds that the sink has, after the peer broke a rule, to commit earlier units, which are still acked (LJ-46)."""

    idle_timeout: float | None = attrs.field(default=60.0, validator=_maybe_seconds)
    """Seconds without bytes in either direction after which a connection with nothing unacked is closed; ``None``: never (LJ-29)."""
    frame_timeout: float = attrs.field(default=30.0, validator=_seconds)
    """Seconds that one frame may take, plus one second for each 256 KiB that it announces (LJ-29)."""
    send_timeout: float = attrs.field(default=30.0, validator=_seconds)
    """Seconds that a peer may leave acks unread once `send_buffer` is full (LJ-27)."""
    linger: float = attrs.field(default=2.0, validator=_seconds)
    """Seconds for which the reader discards further bytes after a close, because a reset could destroy acks (LJ-28a)."""

    max_frame: int = attrs.field(default=10 * 2**20, validator=_size)
    """Bytes of one D or J frame (LJ-36)."""
    max_pairs: int = attrs.field(default=4_096, validator=_size)
    """Pairs of one D frame (LJ-37)."""
    max_key: int = attrs.field(default=64 * 1024, validator=_size)
    """Bytes of one key (LJ-38)."""
    max_envelope: int = attrs.field(default=32 * 2**20, validator=_size)
    """Bytes of one envelope as it is sent (LJ-40)."""
    max_unpacked: int = attrs.field(default=64 * 2**20, validator=_size)
    """Bytes that one envelope may unpack to, those inside it included (LJ-41)."""
    max_windows: int = attrs.field(default=1_024, validator=_count)
    """Windows that one envelope may announce or fill, in addition to one for each ten bytes of its packed size: compression does not
    let a writer ask more of the sink than it could with plain frames (LJ-41a)."""
    max_cost: int = attrs.field(default=64 * 2**20, validator=_size)
    """Cost of the events that one connection holds before it delivers them as a slice: four times their bytes, plus 256 for each
    event and 128 for each pair. JSON also costs 72 for each comma and each list, 256 for each object and 128 for each field,
    counted before it is parsed. An event whose JSON alone costs more is refused (LJ-42)."""
    max_depth: int = attrs.field(default=2, validator=_size)
    """Levels of nested envelopes (LJ-32)."""
    max_json_depth: int = attrs.field(default=500, validator=_size)
    """Levels of nested arrays and objects (LJ-12)."""
    send_buffer: int = attrs.field(default=64 * 1024, validator=_size)
    """Bytes of acks that may wait for a peer that does not read them (LJ-27)."""
    max_connections: int = attrs.field(default=MAX_CONNECTIONS, validator=_size)
    """Connections of one listener. If there are as many, one that has not sent a whole unit makes room for the newest. If all have, the
    newest is closed at once. Both are counted (LJ-43)."""
    max_inflight_bytes: int = attrs.field(default=256 * 2**20, validator=_size)
    """Bytes and costs that all connections of one listener may hold together. Near this limit the connections that hold most are not
    read, the newest for the longest time (LJ-42b)."""


@attrs.frozen(kw_only=True)
class WriterConfig:
    """How a Lumberjack writer behaves. Immutable; derive with `attrs.evolve`."""

    version: Literal[1, 2] = attrs.field(default=2, validator=v.in_((1, 2)))
    """Version of the protocol; current releases of Filebeat and Logstash speak 2."""
    mode: Literal["batch", "stream"] = attrs.field(default="batch", validator=v.in_(("batch", "stream")))
    """``"batch"``: each batch announces its own window, which every reader accepts. ``"stream"``: one window for the whole
    connection, which only version 1 and levada's own reader accept (LJ-48)."""
    encoding: Literal["auto", "data", "json"] = attrs.field(default="auto", validator=v.in_(("auto", "data", "json")))
    """Frame type of events: D (version 1 only) or J. ``"auto"`` is J in version 2, and D in version 1, because most version 1 readers
    refuse J (LJ-10)."""
    window: int = attrs.field(default=1_024, validator=[_size, v.le(MAX_SEQUENCE)])
    """Events in a window. The writer never has more unacked events in one window than this (LJ-50, LJ-51)."""
    max_bytes: int = attrs.field(default=2**20, validator=_size)
    """Bytes of frames, before compression, after which a window is sent although it has room (LJ-51)."""
    linger: float = attrs.field(default=0.2, validator=v.ge(0))
    """Seconds that a window waits for more events (LJ-51)."""
    pipelining: int | None = attrs.field(default=None, validator=v.optional(_size))
    """Windows in flight; ``None``: 2 in version 2, 1 in version 1 (LJ-50)."""
    compression: int = attrs.field(default=3, validator=v.in_(range(10)))
    """Compression level of zlib. Level 0 does not compress, and no level compresses less than 200 bytes (LJ-34)."""
    max_frame: int = attrs.field(default=10 * 2**20, validator=_size)
    """Bytes of one event's frame; `send` rejects a larger event (LJ-59)."""
    ack_timeout: float = attrs.field(default=30.0, validator=_seconds)
    """Seconds without an ack, while events are in flight, after which the writer closes the connection (LJ-53)."""
    queue: int = attrs.field(default=8, validator=_size)
    """Size of the queue, in windows. When it is full, senders wait or events are dropped: see `drop` (LJ-57)."""
    drop: Literal["oldest", "newest"] | None = attrs.field(default=None, validator=v.in_((None, "oldest", "newest")))
    """What a full queue does: ``None`` makes the sender wait; the others drop an event that was never sent, and count it (LJ-57)."""
    on_stuck: Literal["keep", "reject"] = attrs.field(default="keep", validator=v.in_(("keep", "reject")))
    """``"reject"``: an event that has ended five connections in a row on its own is dropped and counted (LJ-59)."""
    initial_backoff: float = attrs.field(default=1.0, validator=_seconds)
    """Upper bound of the first pause before reconnecting, in seconds (LJ-54)."""
    max_backoff: float = attrs.field(default=60.0, validator=_seconds)
    """Upper bound of every pause, in seconds (LJ-54)."""

    def __attrs_post_init__(self) -> None:
        if self.mode == "stream" and self.version != 1:
            raise ConfigurationError(
                "mode 'stream' needs version 1: version 2 restarts its numbers with each window (LJ-48)"
            )
        if self.encoding == "data" and self.version != 1:
            raise ConfigurationError("version 2 has no D frames: use encoding 'json' (LJ-4)")

    @property
    def json(self) -> bool:
        """Whether events are sent as J frames."""
        return self.version == 2 if self.encoding == "auto" else self.encoding == "json"

    @property
    def windows_in_flight(self) -> int:
        """Windows that may be unacked at a time: `pipelining`, or its default; 1 in stream mode."""
        if self.mode == "stream":
            return 1
        return self.pipelining or self.version
