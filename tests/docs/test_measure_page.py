"""The page about metrics: its table is what the code declares, a busy system yields that, and its alerts name what there is."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from tests.actors.durable.accounts import EVENTS, Account, Deposit

from levada.actors import aqueduct, lumberjack, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.actors.durable import shards
from levada.actors.journal import Append, DeclareGroup, Envelope
from levada.actors.metrics import Metrics, connections, journal, nodes, protocols, runtime, spark
from levada.actors.metrics.nodes import NodeFigures, fleet_measured_by
from levada.actors.spark.bridge import serve_bridge
from levada.framework import Actor, ActorRestarted, ActorSystem, Identity, Metric, Sample, handles, restart
from levada.transports.carriers import ByteStream, dial

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "measure.md").read_text("utf-8")
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*) \|$", re.MULTILINE)


def declared() -> dict[str, Metric]:
    found = [
        value
        for module in (runtime, connections, protocols, journal, spark, nodes)
        for name, known in vars(module).items()
        if not name.startswith("__")
        for value in (known.values() if isinstance(known, dict) else [known])
        if isinstance(value, Metric)
    ]
    assert len({metric.name for metric in found}) == len({id(metric) for metric in found})
    return {metric.name: metric for metric in found}


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def test_the_table_is_what_the_code_declares() -> None:
    wanted = {name: row(metric) for name, metric in declared().items()}
    found = {match[1]: match[0] for match in ROW.finditer(PAGE)}
    missing = [line for name, line in wanted.items() if found.get(name) != line]
    assert found.keys() <= wanted.keys()
    assert not missing, "\n".join(missing)


def test_queries_name_metrics_that_exist() -> None:
    names = declared()
    histograms = {f"{name}_{part}" for name in names for part in ("bucket", "sum", "count")}
    watch = (Path(__file__).parents[2] / "docs/how-to/what-to-watch.md").read_text("utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE + watch, re.DOTALL | re.MULTILINE)
    used = {name for block in blocks for name in re.findall(r"\blevada_\w+", block)}
    assert len(used) >= 5
    assert used <= names.keys() | histograms


async def test_the_actor_of_the_page_counts_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [
        block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if "Desk" in block
    ]
    page = types.ModuleType("measure_page")
    monkeypatch.setitem(sys.modules, "measure_page", page)
    exec(compile(block, "measure.md", "exec"), vars(page))
    async with ActorSystem() as system:
        desks = [system.spawn(page.Desk, supervise=restart("transient")) for _ in range(2)]
        for desk, kind in ((desks[0], "book"), (desks[1], "book"), (desks[1], "record")):
            desk.tell(page.Order(kind))
        await wait_all_tasks_blocked()
        metrics = Metrics(system)
        found = await metrics.collect()
        assert found[page.ORDERS] == {("book",): 2, ("record",): 1}
        assert found[page.OPEN] == {(): 3}
        desks[1].stop()
        await desks[1].terminated()
        found = await metrics.collect()
        assert found[page.ORDERS] == {("book",): 2, ("record",): 1}
        assert found[page.OPEN] == {(): 1}


class Clerk(Actor[str]):
    """Handles, fails and starts again."""

    @handles
    def work(self, m: str) -> None:
        if m == "fail":
            raise ValueError


class Witness(Actor[ActorRestarted]):
    seen: trio.Event

    @handles
    def restarted(self, m: ActorRestarted) -> None:
        self.seen.set()


class Sink(Actor[lumberjack.Unit]):
    @handles
    def take(self, m: lumberjack.Unit) -> None: ...


class Desk(Actor[str]):
    @handles
    def work(self, m: str) -> None: ...

    def metrics(self) -> Iterable[Sample]:
        return [Metric("desk_open", "gauge", "A program's own.").sample(1)]


async def answer(request: rsocket.Request) -> bytes:
    return request.data


async def echo(call: maop.Call) -> bytes:
    return await call.body()


@pytest.mark.ci
async def test_a_busy_system_yields_the_table(tmp_path: Path) -> None:
    """All of it, but for Spark's queries, which `tests.actors.spark.test_query` looks at; and nothing else under this prefix."""

    async def ask() -> list[NodeFigures]:
        return [NodeFigures("n0", "up", 1, None)]

    async with ActorSystem(ask_timeout=300.0) as system, AsyncExitStack() as stack:
        serving = stack.enter_async_context
        await serving(rsocket.serve(system, "rsocket+memory://rsocket-measured", answer))
        peer = await serving(rsocket.connect(system, "rsocket+memory://rsocket-measured"))
        await peer.request_response(b"x")
        await serving(aqueduct.serve(system, "aqueduct+memory://aqueduct-measured", Desk, str))
        await (await serving(aqueduct.connect(system, "aqueduct+memory://aqueduct-measured", str))).send("x")
        tokens = BearerTokens.of({b"secret": Identity("client")})
        await serving(maop.serve(system, "maop+memory://maop-measured", {101: echo}, authenticate=tokens))
        client = await serving(maop.connect(system, "maop+memory://maop-measured", token=b"secret"))
        await client.request(101, b"x")
        await serving(lumberjack.serve(system, "lumberjack+memory://lumberjack-measured", system.spawn(Sink)))
        writer = await serving(lumberjack.connect(system, "lumberjack+memory://lumberjack-measured"))
        await writer.send({"line": 1})
        await writer.flush()
        async with dial("memory://lumberjack-measured") as wrong:
            assert isinstance(wrong, ByteStream)
            await wrong.send_all(b"GET / HTTP/1.1\r\n\r\n")
            assert not await wrong.receive_some()
        bridge = await serving(serve_bridge(system, tmp_path / "bridge"))
        mailbox = await bridge.mailbox("lines")
        await mailbox.ref.ask(Append([Envelope(datetime.now(UTC), value=b"row")]))
        await mailbox.ref.ask(DeclareGroup("readers"))
        accounts = await shards(system, Account, events=EVENTS, journal=tmp_path / "log", shards=1)
        await accounts["anna"].ask(Deposit(5))
        restarted = trio.Event()
        system.events.subscribe(ActorRestarted, system.spawn(Witness, restarted))
        clerk = system.spawn(Clerk, supervise=restart("transient", initial_backoff=0.001, max_backoff=0.001))
        clerk.tell("fail")
        fleet_measured_by(system, ask)
        await restarted.wait()
        names = {metric.name for metric in await Metrics(system).collect()}
        wanted = {name for name in declared() if not name.startswith("levada_spark_")}
        assert {name for name in names if name.startswith("levada_")} == wanted
        assert "desk_open" in names
        assert "confirms_total" in names
