"""Metrics of journals, durable actors, the bridge and Spark's queries."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'levada[prometheus]'")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit

from levada.actors.durable import shards
from levada.actors.journal import Append, CommitGroup, DeclareGroup, Envelope, Journal
from levada.actors.metrics import Metrics
from levada.actors.metrics.spark import query_samples
from levada.framework import ActorSystem, message
from levada.framework.metrics import Tally

from .scraped import part, scrape


async def test_journals_and_their_groups(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        metrics = Metrics(system)
        for life in (1, 2):
            journal = system.spawn(Journal, tmp_path / "orders")
            await journal.ask(DeclareGroup("billing"))
            for _ in range(2):
                await journal.ask(Append([Envelope(datetime.now(UTC), value=b"row")] * 3))
            await journal.ask(CommitGroup("billing", {0: 1}))
            found = part(await scrape(metrics), "levada_journal")
            assert found["levada_journal_appends_total", "orders"] == 2 * life
            assert found["levada_journal_appended_rows_total", "orders"] == 6 * life
            assert found["levada_journal_rows", "orders"] == 6 * life
            assert found["levada_journal_group_lag_rows", "billing", "orders"] == 6 * life - 1
            assert found["levada_journal_syncs_total", "orders"] >= life
            assert found["levada_journal_appended_bytes_total", "orders"] > 100 * life
            assert found["levada_journal_size_bytes", "orders"] > 100
            assert found["levada_journal_segments", "orders"] >= 1
            for name in ("waiting_appends", "waiting_bytes", "full", "refused_appends_total", "lost_rows_total"):
                assert found[f"levada_journal_{name}", "orders"] == 0
            journal.stop()
            await journal.terminated()
        ended = part(await scrape(metrics), "levada_journal")
        assert ended["levada_journal_appended_rows_total", "orders"] == 12
        assert ("levada_journal_rows", "orders") not in ended


async def test_durable_actors_by_class(tmp_path: Path) -> None:
    async with ActorSystem(shutdown_timeout=100.0, ask_timeout=300.0) as system:
        metrics = Metrics(system)
        accounts = await shards(system, Account, events=EVENTS, journal=tmp_path, shards=2)
        for name in ("anna", "bert", "cleo"):
            await accounts[name].ask(Deposit(5), command="once")
        await accounts["anna"].ask(Deposit(5), command="once")
        await accounts["anna"].ask(Balance())
        found = part(await scrape(metrics), "levada_durable")
        assert found == {
            ("levada_durable_shards", "Account"): 2,
            ("levada_durable_entities", "Account"): 3,
            ("levada_durable_commands", "Account"): 0,
            ("levada_durable_unreadable_entities", "Account"): 0,
            ("levada_durable_written_rows_total", "Account"): found["levada_durable_written_rows_total", "Account"],
            ("levada_durable_loaded_entities_total", "Account"): 3,
            ("levada_durable_repeated_commands_total", "Account"): 1,
        }
        assert found["levada_durable_written_rows_total", "Account"] >= 3


@message("metrics.Line")
class Line:
    number: int


async def test_a_bridge(tmp_path: Path) -> None:
    pytest.importorskip("levada.actors.spark", exc_type=ImportError)
    from levada.actors.spark.bridge import serve_bridge

    async with ActorSystem() as system, serve_bridge(system, tmp_path) as bridge:
        metrics = Metrics(system)
        lines = await bridge.mailbox("lines", Line)
        await lines.append([Line(1), Line(2)])
        found = await scrape(metrics)
        assert part(found, "levada_bridge") == {
            ("levada_bridge_mailboxes",): 1,
            ("levada_bridge_pending_bytes",): 0,
            ("levada_bridge_reads",): 0,
            ("levada_bridge_refused_total",): 0,
        }
        assert found["levada_journal_rows", "lines"] == 2


def test_queries_without_a_name_are_one() -> None:
    """Their ids are new with each start, so there would be no end of labels."""
    report = {
        "name": "lines",
        "named": True,
        "batch": 3,
        "at": "2026-11-23T06:00:00+00:00",
        "rows": 10,
        "arrival_rate": 5.0,
        "processing_rate": 20.0,
        "seconds": 0.5,
        "watermark": "2026-11-23T05:00:00+00:00",
        "state_rows": 2,
        "state_bytes": 4096,
        "late_rows": 1,
    }
    tally = Tally()
    tally.add(query_samples({"name": "starting"}))
    assert tally.series == {}
    tally.add(query_samples(report))
    for batch in (1, 7):
        tally.add(query_samples({**report, "named": False, "batch": batch, "watermark": None}))
    found = {metric.name: values for metric, values in tally.series.items()}
    assert found["levada_spark_batch"] == {("lines",): 3, ("unnamed",): 7}
    assert found["levada_spark_batch_rows"] == {("lines",): 10, ("unnamed",): 20}
    assert found["levada_spark_watermark_timestamp_seconds"] == {("lines",): 1795410000.0}
    assert found["levada_spark_progress_timestamp_seconds"]["lines",] == 1795413600.0
    assert len(found) == 10
