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
APPENDED_BYTES = Metric("levada_journal_appended_bytes_total", "counter", "Bytes written, headers included.", _JOURNAL)
SYNCS = Metric("levada_journal_syncs_total", "counter", "Syncs of segments; many appends share one.", _JOURNAL)
REFUSED = Metric(
    "levada_journal_refused_appends_total", "counter", "Appends that were refused by a full journal.", _JOURNAL
)
DELIVERED = Metric(
    "levada_journal_delivered_batches_total", "counter", "Batches that queries of Spark have delivered.", _JOURNAL
)
LOST = Metric("levada_journal_lost_rows_total", "counter", "Rows that were missing when it was opened.", _JOURNAL)
SIZE = Metric("levada_journal_size_bytes", "gauge", "Size of all segments.", _JOURNAL)
STAGED = Metric("levada_journal_staged_bytes", "gauge", "Size of batches that are not delivered.", _JOURNAL)
SEGMENTS = Metric("levada_journal_segments", "gauge", "Segments.", _JOURNAL)
WAITING = Metric("levada_journal_waiting_appends", "gauge", "Appends and deliveries that are not answered.", _JOURNAL)
WAITING_BYTES = Metric("levada_journal_waiting_bytes", "gauge", "Bytes of these appends.", _JOURNAL)
FULL = Metric("levada_journal_full", "gauge", "1 while appends wait for room.", _JOURNAL, "max")
ROWS = Metric("levada_journal_rows", "gauge", "Rows that are kept.", _JOURNAL)
LAG = Metric("levada_journal_group_lag_rows", "gauge", "Rows that a group has not read.", ("journal", "group"), "max")

SHARDS = Metric("levada_durable_shards", "gauge", "Shards that this process runs.", _CLASS)
ENTITIES = Metric("levada_durable_entities", "gauge", "Entities in memory.", _CLASS)
UNDER_WAY = Metric("levada_durable_commands", "gauge", "Commands that are not answered.", _CLASS)
UNREADABLE = Metric("levada_durable_unreadable_entities", "gauge", "Entities that could not be replayed.", _CLASS)
WRITTEN = Metric("levada_durable_written_rows_total", "counter", "Rows that shards have written.", _CLASS)
LOADED = Metric("levada_durable_loaded_entities_total", "counter", "Entities that were replayed.", _CLASS)
REPEATED = Metric("levada_durable_repeated_commands_total", "counter", "Commands that came again.", _CLASS)


def journal_samples(
    journal: str, store: StoreStatistics, *, appends: int, refused: int, waiting: int, waiting_bytes: int, full: bool
) -> list[Sample]:
    """Return the samples of an open journal. The label is the name of its folder."""
    labels = (journal,)
    return [
        (APPENDS, appends, labels),
        (APPENDED_ROWS, store.rows_appended, labels),
        (APPENDED_BYTES, store.bytes_appended, labels),
        (SYNCS, store.syncs, labels),
        (REFUSED, refused, labels),
        (DELIVERED, store.batches_delivered, labels),
        (LOST, store.rows_lost, labels),
        (SIZE, store.bytes_stored, labels),
        (STAGED, store.bytes_staged, labels),
        (SEGMENTS, store.segments, labels),
        (WAITING, waiting, labels),
        (WAITING_BYTES, waiting_bytes, labels),
        (FULL, int(full), labels),
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
    return [
        (SHARDS, 1, labels),
        (ENTITIES, report["live"], labels),
        (UNDER_WAY, report["under_way"], labels),
        (UNREADABLE, report["failed"], labels),
        (WRITTEN, report["rows"], labels),
        (LOADED, report["replayed"], labels),
        (REPEATED, report["repeated"], labels),
    ]
