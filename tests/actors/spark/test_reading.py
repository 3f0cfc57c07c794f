"""`read_mailbox`: a live mailbox as an Arrow stream, in DuckDB, Polars, pandas and wherever one is read; without pyspark."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from tests.actors.durable.accounts import EVENTS, Account, Move  # noqa: E402

from levada.actors.durable import shards  # noqa: E402
from levada.actors.journal import JournalBehind, JournalConfig, OffsetGone  # noqa: E402
from levada.actors.spark import BridgeUnreachable, EpochChanged, UnknownName, read_mailbox  # noqa: E402
from levada.actors.spark.protocol import Token  # noqa: E402
from levada.framework import message  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from .conftest import Actors, Server

pytestmark = pytest.mark.loopback


@message("reading.Line")
class Line:
    number: int
    text: str = ""


def numbers(reader: Any) -> list[int]:
    found: list[int] = reader.read_all().column("number").to_pylist()
    return found


def test_the_rows_that_are_there_are_read_and_later_ones_by_a_read_after_them(actors: Actors) -> None:
    lines = actors.mailbox("lines", Line, partitions=2)
    address = actors.bridge.address
    for partition in (0, 1):
        actors.do(lambda: lines.append([Line(partition), Line(partition + 10)], partition=partition))  # noqa: B023 - called at once
    reader = read_mailbox(address, "lines")
    assert reader.schema.names == ["number", "text"]
    actors.do(lambda: lines.append([Line(99)], partition=1))
    assert numbers(reader) == [0, 10, 1, 11]
    assert numbers(reader) == []
    end = reader.schema.metadata[b"levada.end"]
    assert {name: value for name, value in json.loads(end).items() if name in "01"} == {"0": 2, "1": 2}
    later = read_mailbox(address, "lines", after=end, columns=["text", "number"])
    assert later.schema.names == ["text", "number"]
    assert later.read_all().to_pylist() == [{"text": "", "number": 99}]
    assert numbers(read_mailbox(address, "lines", after=later.schema.metadata[b"levada.end"])) == []


def test_the_events_of_a_durable_class_are_read(actors: Actors, tmp_path: Path) -> None:
    async def start() -> None:
        accounts = await shards(actors.system, Account, events=EVENTS, journal=tmp_path / "log", shards=2)
        await actors.bridge.log("accounts", accounts)
        for entity in ("anna", "bert"):
            await accounts[entity].ask(Move([1, 2]), timeout=250)

    actors.do(start)
    found = read_mailbox(actors.bridge.address, "accounts", columns=["entity", "amount"]).read_all().to_pylist()
    rows = sorted((row["entity"], row["amount"]) for row in found)
    assert rows == [("anna", 1), ("anna", 2), ("bert", 1), ("bert", 2)]


def test_a_reader_that_is_dropped_ends_its_stream_at_the_bridge(actors: Actors) -> None:
    """And one that waits holds a few blocks, whatever the mailbox has."""
    lines = actors.mailbox("lines", Line, config=JournalConfig(block_rows=10))
    actors.do(lambda: lines.append([Line(number) for number in range(5000)]))
    home = actors.bridge._home

    def reads() -> float:
        return home.reads.used

    reader = read_mailbox(actors.bridge.address, "lines")
    assert reads() == 0
    assert reader.read_next_batch().num_rows == 10
    assert reads() == 1
    del reader
    assert (
        numbers(read_mailbox(actors.bridge.address, "lines"))[-1] == 4999
    )  # an answer after the end of the other stream
    assert reads() == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name": "line"}, UnknownName, "no mailbox 'line'"),
        (
            {"columns": ["number", "size"]},
            ConfigurationError,
            r"columns is \['number', 'size'\], wanted some of number, text",
        ),
        ({"columns": "text"}, ConfigurationError, r"columns is 'text', wanted a list of names: \['text'\]"),
        ({"columns": []}, ConfigurationError, r"columns is \[\], wanted some of"),
        ({"after": b"17"}, ConfigurationError, r'wanted reader.schema.metadata\[b"levada.end"\] of an earlier'),
        ({"after": b"{"}, ConfigurationError, "wanted reader.schema.metadata"),
        ({"after": '{"epoch": "0", "0": 3}'}, EpochChanged, "read without `after`"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(
    actors: Actors, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    actors.mailbox("lines", Line)
    with pytest.raises(error, match=text):
        read_mailbox(actors.bridge.address, **({"name": "lines"} | arguments))


def test_rows_that_an_older_copy_lacks_are_named(actors: Actors) -> None:
    lines = actors.mailbox("lines", Line)
    actors.do(lambda: lines.append([Line(1)]))
    end = json.loads(read_mailbox(actors.bridge.address, "lines").schema.metadata[b"levada.end"])
    with pytest.raises(JournalBehind, match="no such opening: it is an older copy") as behind:
        read_mailbox(actors.bridge.address, "lines", after=json.dumps(end | {"opening": "f" * 32}))
    assert str(behind.value).endswith(
        "The same rows end at {0: 0}. You can put the newest copy of the journal back, or read without `after`"
    )
    assert "checkpoint" not in str(behind.value)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("", "address is empty: give it the value of Bridge.address"),
        *(
            (address, f"the address is {address!r}, wanted unix:///path or tls://host:port")
            for address in ("http://x", "/path/bridge.socket", "tls://host", "tls://host:port", "tls://[::1", "unix:x")
        ),
        (
            "tls://localhost:1",
            "token_file (as an option: tokenFile) is missing: "
            "without a Unix socket the address does not tell where the token is",
        ),
    ],
)
def test_an_address_is_judged_before_a_token_is_looked_for(address: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_mailbox(address, "lines")
    assert str(refused.value) == text


def test_a_missing_token_file_is_named_with_pyspark_and_without_a_context_of_spark() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the token file away/bridge\.token: No such file"):
        read_mailbox("tls://localhost:1", "lines", token_file="away/bridge.token")


def test_an_address_of_another_machine_is_refused_at_once(actors: Actors, tmp_path: Path) -> None:
    secret, _, rest = actors.bridge.token_file.read_text().split("\n", 2)
    (tmp_path / "token").write_text(f"{secret}\n{'0' * 32}\n{rest}")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(BridgeUnreachable, match="is on another machine"):
        read_mailbox(actors.bridge.address, "lines", token_file=tmp_path / "token")


@pytest.mark.parametrize("library", ["arrow", pytest.param("duckdb", marks=pytest.mark.ci)])
def test_rows_that_retention_deletes_before_they_are_read_are_an_error_with_its_name(
    actors: Actors, library: str
) -> None:
    config = JournalConfig(block_rows=1, block_bytes=512, segment_bytes=1024, retain_bytes=2048)
    lines = actors.mailbox("lines", Line, config=config)
    actors.do(lambda: lines.append([Line(0, "x" * 100)]))
    reader = read_mailbox(actors.bridge.address, "lines")
    for number in range(40):
        actors.do(lambda: lines.append([Line(number, "x" * 100)]))  # noqa: B023 - called at once
    if library == "arrow":
        with pytest.raises(OffsetGone):
            reader.read_all()
    else:
        duckdb = pytest.importorskip("duckdb")
        with pytest.raises(duckdb.Error, match="OffsetGone"):
            duckdb.sql("SELECT count(*) FROM reader").fetchall()


def test_a_read_goes_on_at_its_row_when_the_bridge_starts_again(actors: Actors) -> None:
    config = JournalConfig(block_rows=10)
    lines = actors.mailbox("lines", Line, config=config)
    actors.do(lambda: lines.append([Line(number) for number in range(5000)]))
    reader = read_mailbox(actors.bridge.address, "lines")
    first = reader.read_next_batch().column("number").to_pylist()
    actors.stop()
    actors.start()
    actors.mailbox("lines", Line, config=config)
    assert first + numbers(reader) == list(range(5000))


def test_threads_read_side_by_side(actors: Actors) -> None:
    lines = actors.mailbox("lines", Line, config=JournalConfig(block_rows=100))
    actors.do(lambda: lines.append([Line(number) for number in range(3000)]))
    sums: list[int] = []

    def read() -> None:
        sums.append(sum(numbers(read_mailbox(actors.bridge.address, "lines"))))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [sum(range(3000))] * 4


WITHOUT_PYSPARK = """
import sys
sys.modules["pyspark"] = None
from levada.actors.spark import read_mailbox
reader = read_mailbox(sys.argv[1], "lines", token_file=sys.argv[2])
print(reader.read_all().num_rows, reader.read_all().num_rows)
try:
    read_mailbox("tls://localhost:1", "lines", token_file="bridge.token")
except ValueError as error:
    print(error)
"""


@pytest.mark.ci
def test_a_python_without_pyspark_reads(actors: Actors, tmp_path: Path) -> None:
    lines = actors.mailbox("lines", Line)
    actors.do(lambda: lines.append([Line(1), Line(2)]))
    arguments = [actors.bridge.address, str(actors.bridge.token_file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WITHOUT_PYSPARK, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (
        "2 0\ncannot read the token file bridge.token: No such file or directory\n",
        "",
    )


READERS = {
    "arrow": "reader.read_all()",
    "pandas": "reader.read_pandas()",
    "polars": "__import__('polars').from_arrow(reader)",
    "duckdb": "__import__('duckdb').sql('SELECT * FROM reader').fetch_arrow_table()",
}
INTERRUPTED = """
import signal, sys
import pyarrow
from levada.actors.spark import read_mailbox
signal.signal(signal.SIGINT, signal.default_int_handler)

def batches():
    print("reading", flush=True)
    yield from rows

rows = read_mailbox(sys.argv[1], "lines")
reader = pyarrow.RecordBatchReader.from_batches(rows.schema, batches())
print("planned", flush=True)
sys.stdin.readline()
{read}
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "library", ["arrow", "duckdb", *(pytest.param(name, marks=pytest.mark.release) for name in ("pandas", "polars"))]
)
def test_ctrl_c_ends_a_read_that_waits_for_a_bridge_that_stands_still(
    serve: Callable[..., Server], library: str
) -> None:
    """If DuckDB reads in a thread of its own, its query ends when the bridge has answered, with an error of its own."""
    if library != "arrow":
        pytest.importorskip(library)
    server = serve(1000)
    program = INTERRUPTED.format(read=READERS[library])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", program, server.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "planned\n"
        os.kill(server.process.pid, signal.SIGSTOP)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        if library == "duckdb":
            os.kill(server.process.pid, signal.SIGCONT)
        _, errors = process.communicate(timeout=50)
    assert process.returncode in (1, -signal.SIGINT)
    assert "KeyboardInterrupt" in errors or (library == "duckdb" and "Query interrupted" in errors)


CONNECTING = """
import signal, sys
from levada.actors.spark import read_mailbox
signal.signal(signal.SIGINT, signal.default_int_handler)
read_mailbox(sys.argv[1], "lines", token_file=sys.argv[2])
"""


@pytest.mark.ci
def test_ctrl_c_ends_a_call_that_waits_for_a_bridge_that_stands_still(tmp_path: Path) -> None:
    """It does not wait until the bridge closes the connection, too: then the bridge could still send."""
    Token.make().write(tmp_path / "token")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        command = [sys.executable, "-c", CONNECTING, f"unix://{tmp_path}/s", str(tmp_path / "token")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            bridge, _ = listener.accept()
            with bridge:
                received = b""
                while b"hello" not in received:
                    received += bridge.recv(4096)
                process.send_signal(signal.SIGINT)
                while bridge.recv(4096):
                    pass
                with pytest.raises(BrokenPipeError):
                    bridge.send(b"x")
                _, errors = process.communicate(timeout=50)
    assert errors.endswith("KeyboardInterrupt\n")


@pytest.mark.ci
def test_tasks_of_spark_read(spark: SparkSession, actors: Actors) -> None:
    """For example as a small table that each task needs."""
    lines = actors.mailbox("lines", Line)
    actors.do(lambda: lines.append([Line(20), Line(22)]))
    address = actors.bridge.address

    def added(batches: Any) -> Any:
        total = sum(read_mailbox(address, "lines").read_all().column("number").to_pylist())
        for batch in batches:
            yield pa.record_batch({"total": [total] * batch.num_rows})

    rows = spark.range(0, 4, numPartitions=2).mapInArrow(added, "total long").collect()
    assert [row.total for row in rows] == [42] * 4
