"""Traces and metrics of nodes under Spark: as those of local nodes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("cryptography")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("prometheus_client")

from opentelemetry.trace import SpanKind
from tests.actors.metrics.scraped import part, scrape
from tests.actors.spans import ident, recorded

from levada.actors.metrics import Metrics
from levada.actors.nodes import NodeSettings, spark_nodes
from levada.framework.message import BY_TAG

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.release, pytest.mark.loopback, pytest.mark.timeout(900)]

APP = Path(__file__).parents[1] / "nodes" / "traced_app.py"


async def test_traces_go_on_in_a_node_under_spark_and_its_driver_answers_for_its_metrics(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag in [tag for tag in BY_TAG if tag.startswith("tests.nodes.traced.")]:
        monkeypatch.delitem(BY_TAG, tag)  # of the same file under its other name
    spark.sparkContext.addPyFile(str(APP))
    traced = importlib.import_module("traced_app")  # shipped
    settings = NodeSettings(start_timeout=240.0)
    with recorded() as spans:
        async with (
            spans.system() as system,
            spark_nodes(system, spark, 1, "traced_app:app", settings=settings) as nodes,
        ):
            tracer = await nodes.spawn(traced.Tracer, on="n0")
            with spans.tracer.start_as_current_span("program") as program:
                found = await tracer.ask(traced.Where())
            first = found["instance"]
            await nodes.restart()
            again = await (await nodes.spawn(traced.Tracer, on="n0")).ask(traced.Where())
            scraped = await scrape(Metrics(system))
    own = {"Certify", "Hello", "Leaving", "Measure", "Ready", "Spawn"}  # by which nodes are run
    assert own.isdisjoint(span.name for span in spans.all())
    asks = spans.named("Where", SpanKind.CLIENT)
    trace = program.get_span_context().trace_id
    assert (found["node"], found["trace"]) == ("n0", f"{trace:032x}")
    assert again["node"] == "n0"
    assert len({first, again["instance"], str(spans.provider.resource.attributes.get("service.instance.id"))}) == 3
    # The second question belongs to no span of the program, so it begins a trace of its own.
    assert [f"{ident(ask).trace_id:032x}" for ask in asks] == [found["trace"], again["trace"]]
    assert again["trace"] not in (found["trace"], "0" * 32)
    assert part(scraped, "levada_node")["levada_node_up", "n0"] == 1
    assert part(scraped, "levada_actors")["levada_actors", "Tracer", "n0"] == 1
