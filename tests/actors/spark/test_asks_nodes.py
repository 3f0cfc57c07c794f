"""Executors ask actors on nodes: spread over the nodes, and over the others when one is lost."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs
import pytest
import trio

pytest.importorskip("levada.actors.spark", exc_type=ImportError)

import pyarrow as pa

from levada.actors.interop.certificates import make_certificates
from levada.actors.nodes import NodeDown, NodeSettings, NodeUp, local_nodes
from levada.actors.spark.asks import AskRows, RemoteActor, ask, ask_batches
from levada.actors.spark.desk import BridgeConfig, serve_asks
from levada.actors.spark.protocol import BridgeRefused, MeasureRows, Token, UnknownName
from levada.actors.spark.shipping import make_zip
from levada.actors.spark.worker import addresses
from levada.framework import Actor, ActorSystem, handles
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports.carriers import TlsConfig

from . import asks_app
from .test_cluster import submit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Here(Actor[AskRows | MeasureRows]):
    """Answers with the name of its system."""

    @handles
    def rows(self, m: AskRows) -> pa.RecordBatch:
        return pa.record_batch({"name": [self.system.name] * m.rows.num_rows})

    @handles
    def one(self, m: MeasureRows) -> int:
        return int(self.system.name.removeprefix("n"))


async def in_thread(function: Callable[[], Any]) -> Any:
    return await trio.to_thread.run_sync(function)


def names(batches: Any) -> Counter[str]:
    return Counter(name for batch in batches for name in set(batch.column("name").to_pylist()))


def batches(count: int) -> list[pa.RecordBatch]:
    return [pa.record_batch({"id": [number]}) for number in range(count)]


async def test_questions_are_spread_and_go_to_the_node_that_is_left(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")  # a folder may have any name
    folder.mkdir()
    address = f"unix://{quote(os.fsencode(folder))}/asks/*.socket"
    scores = RemoteActor("scores", address)
    async with AsyncExitStack() as stack:
        systems = [await stack.enter_async_context(ActorSystem(f"n{number}")) for number in range(2)]
        desks = []
        for system in systems:
            serving = serve_asks(system, folder / "asks", {"scores": system.spawn(Here)})
            desks.append(await stack.enter_async_context(serving))
        assert addresses(address) == [desk.address for desk in desks]
        assert {desk.token_file.read_text() for desk in desks} == {(folder / "asks" / "bridge.token").read_text()}
        found = await in_thread(lambda: names(ask_batches(scores, batches(20), window=4)))
        assert found == {"n0": 10, "n1": 10}
        assert Counter([await in_thread(partial(ask, scores, MeasureRows(0, 0, 0, 0))) for _ in range(10)]) == {
            0: 5,
            1: 5,
        }
        with pytest.raises(UnknownName):
            await in_thread(partial(ask, RemoteActor("nobody", address), MeasureRows(0, 0, 0, 0)))
        one = RemoteActor("scores", f"{desks[1].address}; unix://{quote(os.fsencode(folder))}/asks/gone.socket")
        assert await in_thread(lambda: names(ask_batches(one, batches(6)))) == {"n1": 6}
    with pytest.raises(ConnectionLost, match="no node serves at"):
        await in_thread(partial(ask, scores, MeasureRows(0, 0, 0, 0), timeout=0.01))


async def test_who_does_not_know_the_token_is_refused(tmp_path: Path) -> None:
    async with ActorSystem("n0") as system, serve_asks(system, tmp_path / "asks", {}) as desk:
        text = desk.token_file.read_text()
        other = tmp_path / "other.token"
        other.write_text("0" * 64 + text[64:])
        other.chmod(0o600)
        with pytest.raises(BridgeRefused):
            await in_thread(partial(ask, RemoteActor("scores", desk.address, str(other)), MeasureRows(0, 0, 0, 0)))


def tls_of(address: str) -> str:
    """The address for other machines."""
    [url] = [url for url in address.split(",") if url.startswith("tls://")]
    return url


def copied_token(made: Path, *folders: Path) -> Path:
    """A token that was made before any node, with the certificates to trust; and a copy in the folder of each node."""
    trust = (made.parent / "cert.pem").read_text()
    Token.make(trust=trust).write(made)
    for folder in folders:
        folder.mkdir(mode=0o700)
        shutil.copy(made, folder / made.name)
    return made


@pytest.mark.loopback
async def test_executors_of_other_machines_ask_over_tls(tmp_path: Path) -> None:
    """Each node has a folder of its own, as on machines of their own; a node with a certificate that is not trusted is left out."""
    shared, other = make_certificates(tmp_path / "shared"), make_certificates(tmp_path / "other")
    token = copied_token(tmp_path / "shared" / "bridge.token", *(tmp_path / name for name in ("n0", "n1", "n2")))
    async with AsyncExitStack() as stack:
        found = []
        for number, made in enumerate((shared, shared, other)):
            system = await stack.enter_async_context(ActorSystem(f"n{number}"))
            config = BridgeConfig(tls=TlsConfig(certificate=made.certificate, key=made.key), advertise="localhost")
            serving = serve_asks(
                system, tmp_path / system.name, {"scores": system.spawn(Here)}, url="tls://127.0.0.1:0", config=config
            )
            found.append(tls_of((await stack.enter_async_context(serving)).address))
        both = RemoteActor("scores", "; ".join(found[:2]), str(token))
        assert await in_thread(lambda: names(ask_batches(both, batches(20), window=4))) == {"n0": 10, "n1": 10}
        three = RemoteActor("scores", "; ".join(found), str(token))
        answers = await in_thread(lambda: names(ask_batches(three, batches(20), window=4)))
        assert (answers.total(), set(answers)) == (20, {"n0", "n1"})
        with pytest.raises(ConnectionLost, match="certificate verify failed"):
            await in_thread(
                partial(ask, RemoteActor("scores", found[2], str(token)), MeasureRows(0, 0, 0, 0), timeout=0.01)
            )
        wrong = tmp_path / "wrong.token"
        Token.make(trust=shared.certificate.read_text()).write(wrong)
        with pytest.raises(BridgeRefused):
            await in_thread(partial(ask, attrs.evolve(both, token_file=str(wrong)), MeasureRows(0, 0, 0, 0)))


async def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    async with ActorSystem("a/b") as system:
        with pytest.raises(ConfigurationError, match="the name of a socket"):
            async with serve_asks(system, tmp_path / "asks", {}):
                pass
    async with ActorSystem("n0") as system:
        ref = system.spawn(Here)
        with pytest.raises(ConfigurationError, match="without '/'"):
            async with serve_asks(system, tmp_path / "asks", {"a/b": ref}):
                pass
        with pytest.raises(ConfigurationError, match="needs both"):
            async with serve_asks(system, tmp_path / "asks", {}, url="tls://127.0.0.1:0"):
                pass
        (tmp_path / "open").mkdir(mode=0o755)
        with pytest.raises(ConfigurationError, match="chmod 700"):
            async with serve_asks(system, tmp_path / "open", {}):
                pass


async def ask_nodes(spark: SparkSession, folder: Path, *, kill: bool) -> tuple[Counter[int], list[int]]:
    """Let tasks ask two nodes; return the rows that each process has answered, and the processes of the nodes."""
    settings = NodeSettings(env={asks_app.FOLDER: str(folder)})
    numbers = spark.range(0, 2_000, numPartitions=2)
    function = asks_app.scored(f"unix://{folder}/*.socket", idempotent=kill)
    if kill:
        await trio.Path(folder / "deadly").touch()
    async with (
        ActorSystem("driver") as system,
        local_nodes(system, 2, "tests.actors.spark.asks_app:app", settings=settings) as nodes,
        nodes.events() as events,
    ):
        processes = [member.pid for member in nodes.members]
        frame = numbers.mapInArrow(function, "double long, pid long")
        rows: list[Any] = await trio.to_thread.run_sync(frame.collect)
        if kill:
            down, up = await events.receive(), await events.receive()
            assert isinstance(down, NodeDown)
            assert isinstance(up, NodeUp)
            # It is found again where it was.
            one = RemoteActor("scores", f"unix://{folder}/{up.member.name}.socket")
            [answer] = await in_thread(lambda: list(ask_batches(one, batches(1))))
            assert answer.column("pid").to_pylist() == [up.member.pid]
    assert [row.double for row in rows] == [2 * n for n in range(2_000)]
    return Counter(row.pid for row in rows), processes


async def check_nodes(spark: SparkSession, folder: Path, *, kill: bool) -> None:
    """Each node answers its share; if one is killed, the rest goes to the other, and no row is missing."""
    before = str(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch"))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    await trio.Path(folder).mkdir(mode=0o700)
    try:
        found, processes = await ask_nodes(spark, folder, kill=kill)
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)
    assert sum(found.values()) == 2_000
    if not kill:
        assert set(found) == set(processes)
        assert all(share == pytest.approx(1_000, abs=200) for share in found.values())


@pytest.mark.release
@pytest.mark.parametrize("kill", [False, True])
async def test_tasks_of_spark_ask_nodes(request: pytest.FixtureRequest, tmp_path: Path, kill: bool) -> None:
    pytest.importorskip("pyspark")
    await check_nodes(request.getfixturevalue("spark"), tmp_path / "asks", kill=kill)


@pytest.mark.release
@pytest.mark.timeout(400)
async def test_the_demo_has_requests_scored_by_actors(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Over the demo's access log, as a batch: all counts are those that are known, and each line was scored once."""
    pytest.importorskip("pyspark")
    from levada.actors.demo.ingest import unpack
    from levada.actors.demo.known import KNOWN
    from levada.actors.demo.queries import access_counts, scores
    from levada.actors.demo.scoring import scorers

    spark: SparkSession = request.getfixturevalue("spark")
    texts = unpack(tmp_path)[0].read_text().splitlines()
    lines = spark.createDataFrame(pa.table({"offset": [0] * len(texts), "text": texts}))
    scored = Counter[str]()
    async with ActorSystem("demo") as system, scorers(system, tmp_path / "asks", scored, on_nodes=False) as scorer:
        counts = access_counts(lines.withColumn("points", scores(scorer)(lines.text)))
        found: list[Any] = await trio.to_thread.run_sync(counts.collect)
    for kind in ("lines", "status", "day", "suspicious"):
        assert {row.key: row["count"] for row in found if row.kind == kind} == KNOWN["access", kind]
    assert scored == {"demo": len(texts)}


@pytest.mark.release
@pytest.mark.timeout(1200)
async def test_executors_of_a_cluster_ask_nodes(tmp_path: Path) -> None:
    """Processes of their own, over TLS, with a token that was shipped."""
    pytest.importorskip("pyspark")
    folder = tmp_path / "asks"
    make_certificates(folder)
    token = copied_token(folder / "bridge.token", folder / "n0", folder / "n1")
    settings = NodeSettings(env={asks_app.FOLDER: str(folder)})
    async with (
        ActorSystem("driver") as system,
        local_nodes(system, 2, "tests.actors.spark.asks_app:app_over_tls", settings=settings),
    ):
        arguments = [
            "; ".join(tls_of((folder / name / "address").read_text()) for name in ("n0", "n1")),
            "bridge.token",
        ]
        packed = make_zip(tmp_path / "levada.zip")
        done = await in_thread(partial(submit, tmp_path, packed, token, arguments))
    assert done["rows"] == 1000
    assert done["sum"] == 2 * sum(range(1000))
    assert len(done["executors"]) == 2
    rows = [sum(map(int, path.read_text().split())) for path in sorted(folder.glob("*.rows"))]
    assert len(rows) == 2
    assert sum(rows) == 1000
