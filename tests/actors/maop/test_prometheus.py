"""Metrics of MAOP as Prometheus reads them: those of the system have them, by the protocol's names."""

from __future__ import annotations

import pytest

from levada.actors.maop import OperationRefused
from levada.actors.maop.metrics import Metrics

from .conftest import Start, echo

pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'levada[prometheus]'")

from levada.actors import metrics


async def scraped(exporter: metrics.Metrics) -> list[str]:
    _, body = await metrics.render(await exporter.collect())
    return body.decode().splitlines()


@pytest.mark.rule("MA-133")
async def test_ma133_prometheus_reads_the_metrics_by_their_names(start: Start) -> None:
    """Counters, gauges, histograms, with their labels; also when the connection and the listener have ended."""
    async with start({101: echo}) as ends:
        exporter = metrics.Metrics(ends.system)
        for value in (1.0, 2.5, 40.0):
            ends.listener.metrics.handler_latency_ms[7].observe(value)
        for _ in range(2):
            await ends.peer.request(101, b"12345")
        with pytest.raises(OperationRefused):
            await ends.peer.request(999)
        text = await scraped(exporter)
        lasting = (
            "# TYPE maop_success_count_total counter",
            "maop_success_count_total 2.0",
            'maop_success_bytes_total{content_type="application/octet-stream"} 10.0',
            "maop_invalid_content_type_total 0.0",
            "confirms_total 2.0",
            'handler_latency_ms_bucket{le="1",msg_id="7"} 1.0',
            'handler_latency_ms_bucket{le="30",msg_id="7"} 2.0',
            'handler_latency_ms_bucket{le="+Inf",msg_id="7"} 3.0',
            'handler_latency_ms_sum{msg_id="7"} 43.5',
            'handler_latency_ms_count{msg_id="7"} 3.0',
            'handler_latency_ms_count{msg_id="101"} 2.0',
            "maop_request_latency_ms_count 2.0",
            'levada_requests_sent_total{protocol="maop",side="client"} 3.0',
        )
        for expected in (*lasting, "# TYPE ops_inflight gauge", "ops_inflight 0.0"):
            assert expected in text
        await ends.peer.aclose()
        await ends.listener.aclose()
        text = await scraped(exporter)
        for expected in lasting:
            assert expected in text
        assert "ops_inflight 0.0" not in text


@pytest.mark.rule("MA-134")
async def test_ma134_prometheus_reads_the_approval_index(start: Start) -> None:
    """Confirms / (confirms + denies) per identity, also after its connection; Prometheus gets the lowest, without the name."""
    async with start({101: echo}) as ends:
        exporter = metrics.Metrics(ends.system)
        for _ in range(3):
            await ends.peer.request(101)
        with pytest.raises(OperationRefused):
            await ends.peer.request(999)
        assert "maop_approval_index 0.75" in await scraped(exporter)
        await ends.peer.aclose()
        assert "maop_approval_index 0.75" in await scraped(exporter)
        assert ends.listener.metrics.approval_indexes() == {"client-1": 0.75}
    many = Metrics()
    many.approval_indexes = lambda: {f"client-{n}": (n + 1) / 40 for n in reversed(range(40))}
    assert [sample[1:] for sample in many.samples() if sample[0].name == "maop_approval_index"] == [(1 / 40, ())]
