"""Figures of Spark's streaming queries and of bridges."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from levada.framework.metrics import Metric, Sample

__all__ = ["bridge_samples", "query_samples"]

_QUERY: Final = ("query",)
UNNAMED: Final = "unnamed"
"""The label of queries without a name, because their ids change with each start."""

QUERY: Final = {
    "batch": Metric("levada_spark_batch", "gauge", "Number of the last micro-batch.", _QUERY, "max"),
    "rows": Metric("levada_spark_batch_rows", "gauge", "Rows of the last micro-batch.", _QUERY),
    "seconds": Metric("levada_spark_batch_seconds", "gauge", "How long the last micro-batch took.", _QUERY, "max"),
    "arrival_rate": Metric("levada_spark_arriving_rows_per_second", "gauge", "Rows that came to the sources.", _QUERY),
    "processing_rate": Metric("levada_spark_processed_rows_per_second", "gauge", "Rows that were processed.", _QUERY),
    "state_rows": Metric("levada_spark_state_rows", "gauge", "Rows in state stores.", _QUERY),
    "state_bytes": Metric("levada_spark_state_bytes", "gauge", "Memory of state stores.", _QUERY),
    "late_rows": Metric(
        "levada_spark_late_rows", "gauge", "Rows of the last micro-batch that the watermark dropped.", _QUERY
    ),
}
"""By the name of a member of a query's report."""
AT = Metric(
    "levada_spark_progress_timestamp_seconds", "gauge", "When the last micro-batch began, since 1970.", _QUERY, "min"
)
WATERMARK = Metric(
    "levada_spark_watermark_timestamp_seconds", "gauge", "The watermark, in seconds since 1970.", _QUERY, "min"
)

MAILBOXES = Metric("levada_bridge_mailboxes", "gauge", "Mailboxes that a bridge serves.")
PENDING = Metric("levada_bridge_pending_bytes", "gauge", "Bytes of appends and questions of Spark that wait.")
READS = Metric("levada_bridge_reads", "gauge", "Streams of rows to Spark.")
REFUSED = Metric("levada_bridge_refused_total", "counter", "Requests of Spark that were refused for the limits.")


def query_samples(report: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of a report of `Query.report`; none before its first progress."""
    if "batch" not in report:
        return []
    labels = (report["name"] if report["named"] else UNNAMED,)
    samples: list[Sample] = [(metric, report[name], labels) for name, metric in QUERY.items()]
    samples.append((AT, datetime.fromisoformat(report["at"]).timestamp(), labels))
    if report["watermark"] is not None:
        samples.append((WATERMARK, datetime.fromisoformat(report["watermark"]).timestamp(), labels))
    return samples


def bridge_samples(*, mailboxes: int, pending_bytes: int, reads: int, refused: int) -> list[Sample]:
    """Return the samples of an open bridge."""
    return [(MAILBOXES, mailboxes, ()), (PENDING, pending_bytes, ()), (READS, reads, ()), (REFUSED, refused, ())]
