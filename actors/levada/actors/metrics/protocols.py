"""Figures of single protocols, and figures that some of them share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from levada.framework.metrics import Metric, Sample

if TYPE_CHECKING:
    from levada.actors.lumberjack.load import ReaderStatistics
    from levada.actors.lumberjack.writer_queue import Hub

__all__ = ["aqueduct_samples", "reader_samples", "request_samples", "rsocket_samples", "writer_samples"]

_ENDS: Final = ("protocol", "side")
_LISTENER: Final = ("listener",)

STREAMS = Metric("levada_streams", "gauge", "Open streams, or operations, of connections.", _ENDS)
REQUESTS_SENT = Metric(
    "levada_requests_sent_total", "counter", "Requests, or operations, that this program began.", _ENDS
)
REQUESTS_RECEIVED = Metric("levada_requests_received_total", "counter", "Requests, or operations, of peers.", _ENDS)

RESUMED = Metric(
    "levada_rsocket_sessions_resumed_total", "counter", "Sessions that went on over another carrier.", ("side",)
)
FIRED_DROPPED = Metric(
    "levada_rsocket_fired_dropped_total",
    "counter",
    "Fire-and-forget requests of peers for which there was no room.",
    ("side",),
)

MESSAGES_SENT = Metric("levada_aqueduct_messages_sent_total", "counter", "Messages that went to peers.", ("side",))
MESSAGES_RECEIVED = Metric(
    "levada_aqueduct_messages_received_total", "counter", "Messages that came from peers.", ("side",)
)
CHANNELS = Metric("levada_aqueduct_channels", "gauge", "Channels that have an end at a peer.", ("side",))
HELD = Metric(
    "levada_aqueduct_held_bytes",
    "gauge",
    "Bytes of messages that are held for their order or their receiver.",
    ("side",),
)

READER: Final = {
    "events": Metric("levada_lumberjack_events_received_total", "counter", "Events, as windows count them.", _LISTENER),
    "units": Metric(
        "levada_lumberjack_units_total", "counter", "Units and slices of events given to the sink.", _LISTENER
    ),
    "bytes_unpacked": Metric(
        "levada_lumberjack_unpacked_bytes_total", "counter", "Bytes after decompression.", _LISTENER
    ),
    "acks": Metric(
        "levada_lumberjack_acks_sent_total", "counter", "Acks, without those that only keep a connection.", _LISTENER
    ),
    "late_commits": Metric(
        "levada_lumberjack_late_commits_total",
        "counter",
        "Units that the sink took after their connection had ended.",
        _LISTENER,
    ),
    "sink_failures": Metric(
        "levada_lumberjack_sink_failures_total",
        "counter",
        "Connections that ended because the sink failed or took too long.",
        _LISTENER,
    ),
    "events_unacked": Metric(
        "levada_lumberjack_events_unacked_total",
        "counter",
        "Events whose connection ended before their ack; they come again.",
        _LISTENER,
    ),
    "connections_paused": Metric(
        "levada_lumberjack_paused_connections",
        "gauge",
        "Connections that are not read, as all hold too much.",
        _LISTENER,
    ),
    "bytes_held": Metric(
        "levada_lumberjack_held_bytes", "gauge", "Bytes, and costs of events, of all connections.", _LISTENER
    ),
    "oldest_unacked": Metric(
        "levada_lumberjack_oldest_unit_seconds", "gauge", "How long the sink has had its oldest unit.", _LISTENER, "max"
    ),
}
"""By the name of a member of `ReaderStatistics`."""
BROKEN = Metric(
    "levada_lumberjack_protocol_errors_total",
    "counter",
    "Connections that ended for a rule they broke.",
    (*_LISTENER, "rule"),
)

EVENTS_SENT = Metric("levada_lumberjack_events_sent_total", "counter", "Events sent, repeated ones included.")
EVENTS_ACKED = Metric("levada_lumberjack_events_acked_total", "counter", "Events that readers have acked.")
EVENTS_DROPPED = Metric("levada_lumberjack_events_dropped_total", "counter", "Events that a full queue has dropped.")
EVENTS_REJECTED = Metric(
    "levada_lumberjack_events_rejected_total", "counter", "Events that were given up: no reader acks them."
)
WINDOWS = Metric("levada_lumberjack_windows_sent_total", "counter", "Windows sent.")
STUCK = Metric(
    "levada_lumberjack_stuck_windows_total", "counter", "Windows that ended five connections with no event acked."
)
FAULTS = Metric(
    "levada_lumberjack_faults_total", "counter", "Attempts to connect that failed, and connections that were lost."
)
QUEUED = Metric("levada_lumberjack_unacked_events", "gauge", "Events of writers that are not acked.")


def request_samples(protocol: str, side: str, *, streams: int, sent: int, received: int) -> list[Sample]:
    """Return the samples of a connection that carries requests or operations."""
    ends = protocol, side
    return [(STREAMS, streams, ends), (REQUESTS_SENT, sent, ends), (REQUESTS_RECEIVED, received, ends)]


def rsocket_samples(side: str, *, resumed: int, dropped: int) -> list[Sample]:
    """Return the samples that only RSocket has."""
    return [(RESUMED, resumed, (side,)), (FIRED_DROPPED, dropped, (side,))]


def aqueduct_samples(side: str, *, channels: int, streams: int, sent: int, received: int, held: int) -> list[Sample]:
    """Return the samples that only Aqueduct has."""
    return [
        (STREAMS, streams, ("aqueduct", side)),
        (CHANNELS, channels, (side,)),
        (MESSAGES_SENT, sent, (side,)),
        (MESSAGES_RECEIVED, received, (side,)),
        (HELD, held, (side,)),
    ]


def reader_samples(listener: str, counts: ReaderStatistics) -> Iterator[Sample]:
    """Return the samples of a Lumberjack reader."""
    for name, metric in READER.items():
        yield metric, getattr(counts, name), (listener,)
    for rule, count in counts.protocol_errors.items():
        yield BROKEN, count, (listener, rule)


def writer_samples(hub: Hub) -> list[Sample]:
    """Return the samples of a Lumberjack writer."""
    counts, queue = hub.counters, hub.queue
    return [
        (EVENTS_SENT, counts.events_sent, ()),
        (EVENTS_ACKED, counts.events_acked, ()),
        (EVENTS_DROPPED, queue.dropped, ()),
        (EVENTS_REJECTED, queue.rejected, ()),
        (WINDOWS, counts.windows_sent, ()),
        (STUCK, queue.stuck_windows, ()),
        (FAULTS, counts.faults, ()),
        (QUEUED, len(queue), ()),
    ]
