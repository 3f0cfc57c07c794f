"""``levada top`` against a system in the same process."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from tests.output import heard
from trio.testing import wait_all_tasks_blocked

from levada.actors import cli
from levada.actors.console import Snapshot, serve_console
from levada.framework import Actor, ActorSystem, handles, message

pytestmark = pytest.mark.loopback


@message
class Note:
    pass


class Shelf(Actor[Note]):
    @handles
    def note(self, m: Note) -> None:
        pass


class Library(Actor[Note]):
    def started(self) -> None:
        self.spawn(Shelf, name="shelf").tell(Note())

    @handles
    def note(self, m: Note) -> None:
        pass


class Stuck(Actor[Note]):
    @handles
    def note(self, m: Note) -> None:
        time.sleep(0.15)  # more than the tenth of a second that is worth a sentence


@pytest.fixture
async def console(tmp_path: Path) -> AsyncIterator[str]:
    async with ActorSystem("town") as system, serve_console(system, tmp_path / "c") as path:
        system.spawn(Library, name="library")
        await wait_all_tasks_blocked()
        yield path


async def levada(*argv: str) -> int:
    """Run the command in a thread, so that the system it looks at can answer."""
    return await trio.to_thread.run_sync(cli.main, argv)


async def start(*argv: str, stdout: int, stderr: int) -> trio.Process:
    """Run the command as a process of its own, where a terminal or the end of a pipe matters."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {"TERM": "xterm", "COLUMNS": "120", "LINES": "20"}
    command = [sys.executable, "-m", "levada.actors", *argv]
    return await trio.lowlevel.open_process(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment
    )


@pytest.mark.ci
async def test_q_quits_and_the_terminal_is_as_before(console: str) -> None:
    here, there = pty.openpty()
    before = termios.tcgetattr(there)
    try:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "levada.actors", "top", console],
            stdin=there,
            stdout=there,
            stderr=there,
            env=environment | {"TERM": "xterm", "COLUMNS": "120", "LINES": "20"},
        )
        shown = b""
        with trio.fail_after(250):
            while b"shelf" not in shown:
                await trio.lowlevel.wait_readable(here)
                shown += os.read(here, 65536)
            os.write(here, b"xq")
            assert await process.wait() == 0
        assert termios.tcgetattr(there) == before
    finally:
        os.close(here)
        os.close(there)


async def test_one_picture(console: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await levada("top", console, "--once") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"town (process {os.getpid()}, running): 3 actors, ")
    # The name, its class, its state, and how many messages are queued and were handled; no colours, no cursor.
    # The program's own actors come before the console, which has begun before them.
    assert [line.split()[:5] for line in out.splitlines()[3:]] == [
        ["/", "Root", "idle", "0", "0"],
        ["library", "Library", "idle", "0", "0"],
        ["shelf", "Shelf", "idle", "0", "1"],
        ["$1", "Console", "idle", "0", "0"],
    ]
    assert "\x1b" not in out


async def test_as_json(console: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await levada("top", console, "--once", "--json", "--limit", "3") == 0
    snapshot = Snapshot.from_json(json.loads(capsys.readouterr().out))
    assert [row.path for row in snapshot.actors] == ["/", "/$1", "/library"]
    assert snapshot.actors[2].hidden == 1


async def test_it_says_what_is_wrong_as_the_dashboard_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with ActorSystem("town") as system, serve_console(system, tmp_path / "c") as path:
        system.spawn(Stuck, name="stuck").tell(Note())
        await wait_all_tasks_blocked()
        assert await levada("top", path, "--once") == 0
        out = capsys.readouterr().out
        assert re.match(r"! The event loop was held up for .*, .* ago\. Nothing else ran meanwhile\.\ntown", out)
        assert await levada("top", path, "--once", "--json") == 0
        [trouble] = json.loads(capsys.readouterr().out)["troubles"]
        assert trouble["text"].startswith("The event loop was held up for ")


async def test_depth_and_order(console: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await levada("top", console, "--once", "--depth", "1", "--sort", "path") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:]] == ["/", "/$1", "/library"]


def pipes(process: trio.Process) -> tuple[trio.abc.ReceiveStream, trio.abc.ReceiveStream]:
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdout, process.stderr


@pytest.mark.ci
async def test_again_and_again_until_the_program_ends(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_console(system, tmp_path / "c") as path:
        process = await start(
            "top", path, "--json", "--interval", "0.1", stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = pipes(process)
        lines = await heard(out, lambda said: said.count(b"\n") >= 2)
    async with out, err:
        complaint = b"".join([part async for part in err])
    assert await process.wait() == 2
    assert complaint.decode() == f"levada: the program behind {path} has ended\n"
    first, second = [Snapshot.from_json(json.loads(line)) for line in lines.splitlines()[:2]]
    assert second.time > first.time


@pytest.mark.ci
async def test_a_reader_that_goes_away_ends_it_quietly(console: str) -> None:
    process = await start("top", console, "--interval", "0.1", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = pipes(process)
    async with err:
        async with out:
            await out.receive_some()
        assert b"".join([part async for part in err]) == b""
    assert await process.wait() == 0


@pytest.mark.parametrize("options", [[], ["--once"], ["--json"], ["--web"]], ids=str)
def test_no_program(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "c")
    assert cli.main(["top", path, *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"levada: there is no socket {path}: a program makes one with serve_console(system, {path!r})\n",
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--interval", "0"], "expected 0.1 to 300 seconds, got '0'"),
        (["--interval", "soon"], "expected 0.1 to 300 seconds, got 'soon'"),
        (["--interval", "nan"], "expected 0.1 to 300 seconds, got 'nan'"),
        (["--depth", "0"], "expected a whole number, 1 or more, got '0'"),
        (["--depth", "1.5"], "expected a whole number, 1 or more, got '1.5'"),
        (["--limit", "-3"], "expected a whole number, 1 or more, got '-3'"),
        (["--web", "--port", "99999"], "expected a whole number from 0 to 65535, got '99999'"),
        (["--sort", "colour"], "invalid choice: 'colour'"),
    ],
)
def test_wrong_arguments(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["top", "PATH", *arguments])
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_key_without_a_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "PATH", "--web", "--key", "key.pem"]) == 2
    assert capsys.readouterr() == ("", "levada: --key needs --cert\n")


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
async def test_on_a_terminal_the_picture_is_redrawn(console: str) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    process = await start("top", console, "--interval", "0.1", stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    screen = b""
    while screen.count(b"shelf") < 2:
        await trio.lowlevel.wait_readable(ours)
        screen += os.read(ours, 65536)
    process.send_signal(2)
    with contextlib.suppress(OSError):  # it is read until it has ended, else a full terminal would hold it up
        while True:
            await trio.lowlevel.wait_readable(ours)
            screen += os.read(ours, 65536)
    assert await process.wait() == 130
    os.close(ours)
    # The alternate screen, so that what was on the terminal comes back.
    assert screen.startswith(b"\x1b[?1049h")
    assert b"Traceback" not in screen


@pytest.mark.ci
async def test_in_the_browser(console: str) -> None:
    """The command prints an address that logs in, serves until Ctrl-C, and leaves nothing behind."""
    process = await start("top", "--web", console, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = pipes(process)
    async with out, err:
        printed = await heard(out, lambda said: said.count(b"\n") >= 2)
        found = re.fullmatch(
            r"open http://127\.0\.0\.1:(\d+)/#token=[0-9a-f]{64}\nThe address works for one login; Ctrl-C ends the dashboard\.\n",
            printed.decode(),
        )
        assert found is not None
        async with await trio.open_tcp_stream("127.0.0.1", int(found[1])) as stream:
            await stream.send_all(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{found[1]}\r\n\r\n".encode())
            page = b"".join([part async for part in stream])
        assert page.startswith(b"HTTP/1.1 200 ")
        process.send_signal(signal.SIGINT)
        assert b"".join([part async for part in err]) == b"levada: interrupted\n"
    assert await process.wait() == 130


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--host", "0.0.0.0"], "a dashboard at 0.0.0.0 needs TLS, or plaintext=True in a network that you trust"),
        (["--host", "0.0.0.0", "--plaintext"], "a dashboard at all addresses needs the names that browsers will use"),
        (["--cert", "/nowhere.pem"], "cannot use the certificates in /nowhere.pem"),
    ],
)
def test_in_the_browser_of_others(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "PATH", "--web", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"levada: {complaint}")
