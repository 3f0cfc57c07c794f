"""Metrics of MAOP as Prometheus reads them."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from levada.actors.maop import OperationRefused
from levada.actors.maop.metrics import Metrics

from .conftest import Start, echo

pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'levada[prometheus]'")

from prometheus_client import CollectorRegistry, generate_latest

from levada.actors.maop.prometheus import MaopCollector


def counted() -> Metrics:
    metrics = Metrics()
    metrics.succeeded("text/plain", 5)
    metrics.succeeded("text/plain", 7)
    metrics.response_fail[5] += 1
    for value in (1.0, 2.5, 40.0):
        metrics.histogram(101).observe(value)
    return metrics


def lines(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()


@pytest.mark.rule("MA-133")
async def test_ma133_prometheus_reads_the_metrics_by_their_names() -> None:
    """Counters, gauges, histograms, with their labels."""
    registry = CollectorRegistry()
    registry.register(MaopCollector(counted()))
    text = lines(registry)
    for expected in (
        "# TYPE maop_success_count_total counter",
        "maop_success_count_total 2.0",
        'maop_success_bytes_total{content_type="text/plain"} 12.0',
        "maop_invalid_content_type_total 0.0",
        'maop_response_fail_total{error_code="TIMEOUT"} 1.0',
        "# TYPE ops_inflight gauge",
        "ops_inflight 0.0",
        'handler_latency_ms_bucket{le="1.0",msg_id="101"} 1.0',
        'handler_latency_ms_bucket{le="30.0",msg_id="101"} 2.0',
        'handler_latency_ms_bucket{le="+Inf",msg_id="101"} 3.0',
        'handler_latency_ms_sum{msg_id="101"} 43.5',
        'handler_latency_ms_count{msg_id="101"} 3.0',
    ):
        assert expected in text
    assert not [line for line in text if line.startswith("# HELP") and len(line.split()) < 5], "a metric without help"


@pytest.mark.rule("MA-134")
async def test_ma134_prometheus_reads_the_approval_index(start: Start) -> None:
    """Confirms / (confirms + denies) per identity, also after its connection; no more than 32, the lowest."""
    async with start({101: echo}) as ends:
        registry = CollectorRegistry()
        registry.register(MaopCollector(ends.listener.metrics))
        for _ in range(3):
            await ends.peer.request(101)
        with pytest.raises(OperationRefused):
            await ends.peer.request(999)
        assert 'maop_approval_index{identity="client-1"} 0.75' in lines(registry)
        await ends.peer.aclose()
        assert 'maop_approval_index{identity="client-1"} 0.75' in lines(registry)
    many = Metrics()
    many.approval_indexes = lambda: {f"client-{n}": n / 40 for n in reversed(range(40))}
    [family] = [family for family in many.collect() if family.name == "maop_approval_index"]
    assert family.samples == {f"client-{n}": n / 40 for n in range(32)}


async def test_several_sources_have_a_label() -> None:
    registry = CollectorRegistry()
    registry.register(MaopCollector({"orders": counted(), "uplink": Metrics()}))
    text = lines(registry)
    assert 'maop_success_count_total{source="orders"} 2.0' in text
    assert 'maop_success_count_total{source="uplink"} 0.0' in text
    assert 'maop_success_bytes_total{content_type="text/plain",source="orders"} 12.0' in text
    assert sum(line.startswith("# TYPE maop_success_count_total ") for line in text) == 1


async def test_a_scrape_from_another_thread_is_answered_in_the_thread_of_trio() -> None:
    threads: list[int] = []

    class Watched(Metrics):
        def collect(self, now: float = 0.0) -> Iterator[Any]:
            threads.append(threading.get_ident())
            return super().collect(now)

    collector = MaopCollector(Watched())
    families = await trio.to_thread.run_sync(lambda: list(collector.collect()))
    assert threads == [threading.get_ident()]
    assert "maop_drain_ms" in {family.name for family in families}


def test_after_the_end_there_are_none() -> None:
    async def make() -> MaopCollector:
        return MaopCollector(counted())

    assert list(trio.run(make).collect()) == []


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.metrics_core", None)
    monkeypatch.delitem(sys.modules, "levada.actors.maop.prometheus")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'levada\[prometheus\]'") as raised:
        importlib.import_module("levada.actors.maop.prometheus")
    assert raised.value.name == "prometheus_client"
