"""Events that the core gives its owner.

The classes are not frozen: making a frozen object takes 1.8 times as long, and each frame makes one.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from levada.framework.text import printable

from .frames import Parameters

__all__ = [
    "DatagramReceived", "DatagramRoom", "Ended", "Established", "Event", "QueueRoom", "StreamAcked", "StreamData", "StreamFlushed",
    "StreamOpened", "StreamOver", "StreamReset", "StreamRoom", "StreamStopped", "StreamsAllowed",
]  # fmt: skip


@attrs.define
class Established:
    """The peer's parameters have come: streams may be opened, datagrams may be sent. Emitted once, before all events but `Ended`."""

    parameters: Parameters
    """The peer's parameters."""


@attrs.define
class StreamOpened:
    """The peer has opened a stream. Its other events follow. Source: QX-20 (D-11)."""

    stream_id: int
    """Number of the stream."""


@attrs.define
class StreamData:
    """Bytes of a stream. Call `QmuxCore.consumed` when the application has taken them."""

    stream_id: int
    """Number of the stream."""
    data: bytes
    """The bytes; empty only if `fin`."""
    fin: bool
    """Whether the peer sends no more on this stream."""


@attrs.define
class StreamReset:
    """The peer gave up sending. Bytes not taken are dropped; their credit was already given back."""

    stream_id: int
    """Number of the stream."""
    code: int
    """The application's code."""


@attrs.define
class StreamStopped:
    """The peer wants no more bytes. This side has reset its sending with the same code and dropped the queue. Source: QX-25."""

    stream_id: int
    """Number of the stream."""
    code: int
    """The application's code."""


@attrs.define
class StreamRoom:
    """The queue of a stream has fallen to `QmuxConfig.low_watermark`, or is empty if all queues together exceed `QmuxConfig.max_queued`."""

    stream_id: int
    """Number of the stream."""


@attrs.define
class QueueRoom:
    """The queues of all streams together have fallen to `QmuxConfig.max_queued` or below."""


@attrs.define
class StreamFlushed:
    """The answer to `QmuxCore.want_flushed`: everything that was queued then is written."""

    stream_id: int
    """Number of the stream."""


@attrs.define
class StreamAcked:
    """The answer to `QmuxCore.want_acked`: the peer has everything that was queued then."""

    stream_id: int
    """Number of the stream."""


@attrs.define
class StreamOver:
    """Both directions of a stream are over, and its last frame is written. Only `StreamAcked` may follow. Source: QX-23, D-14."""

    stream_id: int
    """Number of the stream."""


@attrs.define
class StreamsAllowed:
    """The peer allows more streams."""

    unidirectional: bool
    """The kind of streams."""


@attrs.define
class DatagramReceived:
    """A datagram from the peer."""

    data: bytes
    """Its bytes; may be empty."""


@attrs.define
class DatagramRoom:
    """The queue of datagrams was full and has room again."""


@attrs.define
class Ended:
    """The last event. No stream gets another event. Bytes that have come may still be taken. Source: QX-38."""

    code: int
    """The application's code; if `lost`, the transport's code, or 1 if no frame gave one."""
    reason: str = attrs.field(converter=printable)
    """The reason in words."""
    by_peer: bool
    """Whether the peer closed the connection."""
    lost: bool
    """Whether neither application closed the connection: a transport error, an end without a frame, or silence."""
    idle: bool = False
    """Whether the peer was silent for too long."""


Event: TypeAlias = (
    Established
    | StreamOpened
    | StreamData
    | StreamReset
    | StreamStopped
    | StreamRoom
    | QueueRoom
    | StreamFlushed
    | StreamAcked
    | StreamOver
    | StreamsAllowed
    | DatagramReceived
    | DatagramRoom
    | Ended
)
"""The events of `QmuxCore`."""
