"""Figures of journals and of durable actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from levada.framework.metrics import Metric, Sample

if TYPE_CHECKING:
    from levada.actors.journal.extent import StoreStatistics

__all__ = ["group_samples", "journal_samples", "log_samples", "shard_samples"]

_JOURNAL: Final = ("journal",)
_CLASS: Final = ("class",)

APPENDS = Metric("levada_journal_appends_total", "counter", "Appends that succeeded.", _JOURNAL)
APPENDED_ROWS = Metric("levada_journal_appended_rows_total", "counter", "Rows that were appended.", _JOURNAL)
REFUSED = Metric(
    "levada_journal_refused_appends_total", "counter", "Appends that were refused by a full journal.", _JOURNAL
)
WAITING = Metric("levada_journal_waiting_appends", "gauge", "Appends and deliveries that are not answered.", _JOURNAL)
WAITING_BYTES = Metric("levada_journal_waiting_bytes", "gauge", "Bytes of these appends.", _JOURNAL)
FULL = Metric("levada_journal_full", "gauge", "1 while appends wait for room.", _JOURNAL, "max")
ROWS = Metric("levada_journal_rows", "gauge", "Rows that are kept.", _JOURNAL)
LAG = Metric("levada_journal_group_lag_rows", "gauge", "Rows that a group has not read.", ("journal", "group"), "max")
STORE: Final = {
    "rows_appended": APPENDED_ROWS,
    "bytes_appended": Metric(
        "levada_journal_appended_bytes_total", "counter", "Bytes written, headers included.", _JOURNAL
    ),
    "syncs": Metric("levada_journal_syncs_total", "counter", "Syncs of segments; many appends share one.", _JOURNAL),
    "batches_delivered": Metric(
        "levada_journal_delivered_batches_total", "counter", "Batches that queries of Spark have delivered.", _JOURNAL
    ),
    "rows_lost": Metric(
        "levada_journal_lost_rows_total", "counter", "Rows that were missing when it was opened.", _JOURNAL
    ),
    "bytes_stored": Metric("levada_journal_size_bytes", "gauge", "Size of all segments.", _JOURNAL),
    "bytes_staged": Metric("levada_journal_staged_bytes", "gauge", "Size of batches that are not delivered.", _JOURNAL),
    "segments": Metric("levada_journal_segments", "gauge", "Segments.", _JOURNAL),
}
"""By the name of a member of `StoreStatistics`."""

SHARDS = Metric("levada_durable_shards", "gauge", "Shards that this process runs.", _CLASS)
SHARD: Final = {
    "live": Metric("levada_durable_entities", "gauge", "Entities in memory.", _CLASS),
    "under_way": Metric("levada_durable_commands", "gauge", "Commands that are not answered.", _CLASS),
    "failed": Metric("levada_durable_unreadable_entities", "gauge", "Entities that could not be replayed.", _CLASS),
    "rows": Metric("levada_durable_written_rows_total", "counter", "Rows that shards have written.", _CLASS),
    "replayed": Metric("levada_durable_loaded_entities_total", "counter", "Entities that were replayed.", _CLASS),
    "repeated": Metric("levada_durable_repeated_commands_total", "counter", "Commands that came again.", _CLASS),
}
"""By the name of a member of a shard's report."""


def journal_samples(
    journal: str, store: StoreStatistics, *, appends: int, refused: int, waiting: int, waiting_bytes: int, full: bool
) -> list[Sample]:
    """Return the samples of an open journal. The label is the name of its folder."""
    labels = (journal,)
    return [
        (APPENDS, appends, labels),
        (REFUSED, refused, labels),
        (WAITING, waiting, labels),
        (WAITING_BYTES, waiting_bytes, labels),
        (FULL, int(full), labels),
        *((metric, getattr(store, name), labels) for name, metric in STORE.items()),
    ]


def log_samples(journal: str, *, appends: int, rows: int, waiting: int) -> list[Sample]:
    """Return the samples of a log in a database. The label is the name of its table."""
    labels = (journal,)
    return [(APPENDS, appends, labels), (APPENDED_ROWS, rows, labels), (WAITING, waiting, labels)]


def group_samples(report: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of a report of `Journal.report`."""
    journal = report["name"]
    lags: list[Sample] = [(LAG, lag, (journal, group)) for group, lag in report["groups"].items()]
    return [(ROWS, report["rows"], (journal,)), *lags]


def shard_samples(name: str, report: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of one shard, from its report. The label is the name of the durable class."""
    labels = (name,)
    return [(SHARDS, 1, labels), *((metric, report[name], labels) for name, metric in SHARD.items())]
