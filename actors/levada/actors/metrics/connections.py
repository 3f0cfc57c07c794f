"""Figures of connections and listeners that every protocol has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from levada.framework.metrics import Metric, Sample

if TYPE_CHECKING:
    from levada.transports.carriers import CarrierStatistics

__all__ = ["connection_samples", "listener_samples"]

_ENDS: Final = ("protocol", "side")
_LISTENER: Final = ("protocol", "listener")

NOW = Metric("levada_connections", "gauge", "Connections, by state.", (*_ENDS, "state"))
OPENED = Metric("levada_connections_opened_total", "counter", "Connections that had a carrier.", _ENDS)
LOST = Metric(
    "levada_connections_lost_total", "counter", "Connections that the peer, the network or a mistake has ended.", _ENDS
)
FAILED = Metric("levada_connections_failed_total", "counter", "Connections that never had a carrier.", _ENDS)
CARRIER: Final = {
    "bytes_sent": Metric(
        "levada_connection_sent_bytes_total", "counter", "Bytes handed to the operating system.", _ENDS
    ),
    "bytes_received": Metric("levada_connection_received_bytes_total", "counter", "Bytes received.", _ENDS),
    "unsent": Metric("levada_connection_unsent_bytes", "gauge", "Bytes queued and not handed on.", _ENDS),
    "writes": Metric(
        "levada_connection_writes_total", "counter", "Calls to the operating system, or packets, sent.", _ENDS
    ),
    "reads": Metric(
        "levada_connection_reads_total", "counter", "Calls to the operating system, or packets, received.", _ENDS
    ),
    "datagrams_dropped": Metric(
        "levada_connection_dropped_datagrams_total", "counter", "Datagrams that no task took.", _ENDS
    ),
}
"""By the name of a member of `CarrierStatistics`."""

CLIENTS = Metric("levada_clients", "gauge", "Connections whose client was let in.", _LISTENER)
LIMIT = Metric("levada_clients_limit", "gauge", "The most connections at a time.", _LISTENER)
REFUSED = Metric("levada_clients_refused_total", "counter", "Clients and requests that were turned away.", _LISTENER)


def connection_samples(
    protocol: str,
    side: str,
    state: str,
    statistics: CarrierStatistics | None,
    *,
    opened: int,
    lost: int,
    failed: int,
) -> list[Sample]:
    """Return the samples of one connection, which may have had several carriers.

    Args:
        protocol: the name of the protocol.
        side: ``client`` or ``server``.
        state: the state in lower case.
        statistics: the counters of all its carriers; None if it never had a carrier.
        opened: how often it got a carrier.
        lost: how often the peer, the network or an error ended it.
        failed: how often it did not get a carrier.
    """
    ends = protocol, side
    samples: list[Sample] = [
        (NOW, 1, (protocol, side, state)),
        (OPENED, opened, ends),
        (LOST, lost, ends),
        (FAILED, failed, ends),
    ]
    if statistics is not None:
        samples += ((metric, getattr(statistics, name), ends) for name, metric in CARRIER.items())
    return samples


def listener_samples(protocol: str, listener: str, *, clients: int, limit: float, refused: int) -> list[Sample]:
    """Return the samples of one listener; `limit` may be infinite."""
    labels = protocol, listener
    samples: list[Sample] = [(CLIENTS, clients, labels), (REFUSED, refused, labels)]
    return samples if math.isinf(limit) else [*samples, (LIMIT, limit, labels)]
