"""``levada ship`` and ``levada receive`` as processes: what arrives, what they print, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from tests.output import heard

from levada.actors import cli
from levada.actors.interop.certificates import make_certificates
from levada.actors.lumberjack import connect
from levada.framework import ActorSystem

pytestmark = pytest.mark.loopback

ANY = "lumberjack://127.0.0.1:0"


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "levada.actors", *argv]


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}


async def levada(*argv: str) -> tuple[int, str, str]:
    """Run to the end; return the exit code, stdout and stderr."""
    done = await trio.run_process(
        command(*argv), env=ENVIRONMENT, capture_stdout=True, capture_stderr=True, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Receiver:
    """A running ``levada receive``."""

    def __init__(self, process: trio.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Stop it; return the exit code and what it has written since the beginning."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        out = b"".join([part async for part in self.process.stdout])
        err = b"".join([part async for part in self.process.stderr])
        return await self.process.wait(), out.decode("utf-8", "surrogateescape"), err.decode()


async def line_of(process: trio.Process) -> bytes:
    """Take one line of stderr."""
    return await heard(process.stderr, lambda said: said.endswith(b"\n"), most=1)


@asynccontextmanager
async def receiving(url: str = ANY, *argv: str) -> AsyncIterator[Receiver]:
    async with running(command("receive", url, *argv)) as receiver:
        yield receiver


@asynccontextmanager
async def running(argv: list[str]) -> AsyncIterator[Receiver]:
    process = await trio.lowlevel.open_process(argv, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        line = await line_of(process)
        assert line.startswith(b"listening on "), line
        yield Receiver(process, line.decode().split()[-1])
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


# ---------------------------------------------------------------- both


@pytest.mark.ci
async def test_lines_arrive_as_they_are_and_a_terminal_shows_progress(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_bytes(b"one\nt\xe9o\nlast")
    async with receiving() as receiver:
        code, out, err = await levada("ship", str(log), "--to", receiver.url, "--once", "--v1", "--compression", "0")
        assert (code, out) == (0, "")
        assert err == "3 lines acknowledged, 0 bytes behind\n"
        other = tmp_path / "other.log"
        other.write_text("four\n")
        await progress_on_a_terminal(other, receiver.url)
        assert await receiver.end() == (0, "one\nt\udce9o\nlast\nfour\n", "4 events\n")


@pytest.mark.ci
async def test_halves_of_surrogate_pairs_are_printed_as_escapes() -> None:
    async with receiving() as receiver, ActorSystem() as system, connect(system, receiver.url) as writer:
        with trio.fail_after(20):
            await writer.deliver([{"line": "before"}, {"line": "t\udce9o \ud83d"}, {"message": "after"}])
        assert await receiver.end() == (0, "before\nt\udce9o \\ud83d\nafter\n", "3 events\n")


async def progress_on_a_terminal(log: Path, url: str) -> None:
    """Ship one line, with a terminal as stderr."""
    ours, theirs = pty.openpty()
    process = await trio.lowlevel.open_process(
        command("ship", str(log), "--to", url, "--interval", "0.05"),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    text = b""
    while b"1 lines acknowledged, 0 bytes behind, 1 files open, 1 connections" not in text:
        text += await trio.to_thread.run_sync(os.read, ours, 4096)
    assert b"\r\x1b[K" in text
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(OSError):  # it is read until it has ended, else a full terminal would hold it up
        while True:
            await trio.to_thread.run_sync(os.read, ours, 4096)
    assert await process.wait() == 0
    os.close(ours)


@pytest.mark.ci
async def test_json_on_both_sides_and_the_count_on_a_signal(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("[1] a\n b\n[2] c\n")
    async with receiving(ANY, "--json") as receiver:
        code, out, err = await levada(
            "ship", str(log), "--to", receiver.url, "--once", "--json", "--multiline", r"^\[", "--field", "env=test"
        )
        assert (code, err) == (0, "")
        report = json.loads(out.splitlines()[-1])
        assert (report["state"], report["lines_acked"], report["writer"]["events_acked"]) == ("done", 2, 2)
        receiver.process.send_signal(signal.SIGUSR1)
        assert await line_of(receiver.process) == b"2 events\n"
        code, out, err = await receiver.end(signal.SIGINT)
        assert (code, err) == (130, "2 events\nlevada: interrupted\n")
        events = [json.loads(line) for line in out.splitlines()]
        assert [(event["line"], event["env"], event["file"]) for event in events] == [
            ("[1] a\n b", "test", str(log)),
            ("[2] c", "test", str(log)),
        ]


@pytest.mark.ci
async def test_over_tls_into_a_folder_and_on_to_the_next_host(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    log = tmp_path / "app.log"
    log.write_text("".join(f"{number}\n" for number in range(2500)))
    folder = tmp_path / "spool"
    serving = ("--cert", str(made.certificate), "--key", str(made.key), "--spool", str(folder))
    async with receiving("lumberjack+tls://127.0.0.1:0", *serving) as receiver:
        nobody = "lumberjack+tls://127.0.0.1:1"
        code, _, _ = await levada(
            "ship", str(log), "--to", nobody, "--to", receiver.url, "--once", "--ca", str(made.ca), "--balance"
        )
        assert code == 0
        receiver.process.send_signal(signal.SIGHUP)  # the certificates are read again
        assert await receiver.end() == (0, "", "2500 events\n")
    lines = [
        json.loads(line)["line"] for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()
    ]
    assert lines == [str(number) for number in range(2500)]


@pytest.mark.ci
async def test_a_receiver_whose_output_nobody_reads_ends_and_acks_nothing_more(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\ntwo\n")
    async with receiving() as receiver:
        assert receiver.process.stdout is not None
        await receiver.process.stdout.aclose()
        code, _, err = await levada(
            "ship", str(log), "--to", receiver.url, "--once", "--timeout", "1", "--drain-timeout", "0.1"
        )
        assert code == 1
        assert "levada: lines that are not acknowledged: 2" in err
        assert await receiver.process.wait() == 0


@pytest.mark.ci
async def test_a_disk_that_refuses_events_is_told_once_and_writers_wait(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    async with receiving(ANY, "--spool", str(folder)) as receiver, ActorSystem() as system:
        (folder / ".writing").rmdir()
        (folder / ".writing").write_text("in the way")
        async with connect(system, receiver.url) as writer, trio.open_nursery() as nursery:
            nursery.start_soon(writer.deliver, [{"line": "one"}])
            told = await line_of(receiver.process)
            assert told == f"levada: cannot write to {folder}: Not a directory; writers keep their events\n".encode()
            await trio.to_thread.run_sync((folder / ".writing").unlink)
            assert await line_of(receiver.process) == f"levada: writes to {folder} again\n".encode()
        assert await receiver.end() == (0, "", "1 events\n")
    assert [json.loads(file.read_text()) for file in folder.glob("*.jsonl")] == [{"line": "one"}]


# The clock of this process is so slow that five seconds take more than eight minutes.
SLOW_CLOCK = """
import functools, sys, trio, trio.testing
trio.run = functools.partial(trio.run, clock=trio.testing.MockClock(0.01))
from levada.actors import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_receiver_whose_disk_refuses_events_ends_at_once(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "spool"
    argv = [sys.executable, "-c", SLOW_CLOCK, "receive", ANY, "--spool", str(folder)]
    async with running(argv) as receiver, ActorSystem() as system:
        (folder / ".writing").rmdir()
        (folder / ".writing").write_text("in the way")
        async with connect(system, receiver.url) as writer:
            await writer.send({"line": "one"})
            assert b"cannot write to" in await line_of(receiver.process)
            with trio.fail_after(30):
                code, _, err = await receiver.end(number)
            assert (code, "0 events" in err.splitlines()) == (130 if number == signal.SIGINT else 0, True)
            assert "Traceback" not in err
            assert writer.statistics().events_acked == 0
            assert await writer.aclose(timeout=0.0) == 1


# ---------------------------------------------------------------- ends


@pytest.mark.ci
async def test_what_is_left_at_the_end_is_told_and_an_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("a line of a log\n" * 50_000)
    size = log.stat().st_size
    code, _, err = await levada("ship", str(log), "--to", "lumberjack://127.0.0.1:9", "--once", "--timeout", "0.5")
    assert code == 1
    assert f"0 lines acknowledged, {size:,} bytes behind" in err
    assert "dead letter" not in err
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                command(
                    "ship", str(log), "--to", "lumberjack://127.0.0.1:9", "--drain-timeout", "0.1", "--interval", "0.05"
                ),
                env=ENVIRONMENT,
                stderr=subprocess.PIPE,
                check=False,
            )
        )
        assert process.stderr is not None
        first = await heard(process.stderr, lambda said: b"bytes behind" in said)
        process.send_signal(signal.SIGTERM)
        err = (first + b"".join([part async for part in process.stderr])).decode()
    assert process.returncode == 1
    assert f"0 lines acknowledged, {size:,} bytes behind" in err
    assert "dead letter" not in err


@pytest.mark.ci
async def test_ctrl_c_ends_in_order_and_says_what_is_missing(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("one\ntwo\n")
    process = await trio.lowlevel.open_process(
        command("ship", str(log), "--to", "lumberjack://127.0.0.1:1", "--drain-timeout", "0.2", "--interval", "0.05"),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    text = b""
    wanted = (b"0 lines acknowledged, 8 bytes behind, 1 files open, 0 connections", b"cannot connect")
    while not all(part in text for part in wanted):
        part = await process.stderr.receive_some()
        assert part, text
        text += part
    process.send_signal(signal.SIGINT)
    err = b"".join([part async for part in process.stderr]).decode()
    assert await process.wait() == 130
    assert "levada: lines that are not acknowledged: 2" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ship", "/nowhere/*.log", "--to", "lumberjack://a:1", "--once"], "no file to ship: /nowhere/*.log"),
        (
            ["ship", "/", "--to", "lumberjack://a:1", "--once"],
            "no file to ship: /; a folder is shipped as FOLDER/*",
        ),
        (["ship", __file__, "--to", "http://a:1"], "expected lumberjack://host:port"),
        (["ship", __file__, "--to", "lumberjack://a:1", "--multiline", "["], "'[' is not a regular expression"),
        (["ship", __file__, "--to", "lumberjack+tls://a:1", "--ca", "/nowhere.pem"], "cannot use the certificates"),
        (["ship", __file__, "--to", "lumberjack://a:1", "--registry", "/dev/null/x"], "cannot keep a registry"),
        (["receive", "lumberjack+tls://127.0.0.1:0"], "--cert goes with a URL of lumberjack+tls://"),
        (["receive", "lumberjack://127.0.0.1:0", "--client-ca", "ca.pem"], "--key and --client-ca need --cert"),
        (["receive", "lumberjack://127.0.0.1:0", "--key", "key.pem"], "--key and --client-ca need --cert"),
        (["receive", "lumberjack://127.0.0.1:0", "--spool", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["receive", "lumberjack://127.0.0.1:0", "--spool", ""], "the name of a folder is empty"),
        (["receive", "tcp://127.0.0.1:0"], "expected lumberjack://host:port"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    # A shipper may have told by then that the reader is not there.
    assert err.splitlines()[-1].startswith(f"levada: {message}")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "argv",
    [
        ["ship"],
        ["ship", "a"],
        ["ship", "a", "--to", "x", "--field", "nothing"],
        ["ship", "a", "--to", "x", "--compression", "10"],
        ["ship", "a", "--to", "x", "--timeout", "-1"],
        ["ship", "a", "--to", "x", "--window", "0"],
        ["receive", "x", "--json", "--spool", "y"],
    ],
)
def test_arguments_that_make_no_sense(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: levada" in capsys.readouterr().err


@pytest.mark.ci
async def test_a_pattern_without_files_is_told_and_the_limit_of_descriptors_is_raised(tmp_path: Path) -> None:
    (tmp_path / "folder.log").mkdir()
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n")
    async with receiving() as receiver:
        patterns = [str(tmp_path / "folder.log"), str(tmp_path / "*.txt"), str(tmp_path / "later")]
        words = command("ship", *patterns, "--to", receiver.url, "--once", "--json")
        limited = f"ulimit -S -n 64; exec {shlex.join(words)}"
        done = await trio.run_process(["sh", "-c", limited], env=ENVIRONMENT, capture_stdout=True, capture_stderr=True)
        assert done.stderr.decode().splitlines() == [
            f"levada: no file to ship yet: {patterns[0]}",
            f"levada: no file to ship yet: {patterns[2]}",
        ]
        report = json.loads(done.stdout.splitlines()[-1])
        assert (report["lines_acked"], report["bytes_behind"], report["failures"]) == (60, 0, 0)
        _, out, _ = await receiver.end()
        assert sorted(map(int, out.split())) == list(range(60))
