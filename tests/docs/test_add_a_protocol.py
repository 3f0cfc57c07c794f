"""The protocol of ``docs/how-to/add-a-protocol.md``: its core keeps the contract, and the command line knows it by its record."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.packages import environment, install, modules_of, run

from levada.actors.interop.certificates import make_certificates

MODULES = modules_of("add-a-protocol.md")
LEVADA = ("-m", "levada.actors")
HANDLERS = """
import sys
import trio
from contextlib import AsyncExitStack
from levada.actors.console import serve_console
from toy_protocol import serve

async def shout(data):
    if data == b"slow":
        print("begun", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
    if data == b"fail":
        raise ValueError("no such word")
    return data.upper()

async def watched(system):
    async with serve_console(system, "console"), serve(system, "toy://127.0.0.1:0", shout) as listener:
        yield listener
"""
CORE = """
from toy_core import HEADER, Answered, Asked, Ended, ToyCore

def frame(kind, number, data=b""):
    return HEADER.pack(kind, number, len(data)) + data

def of(core):
    return b"".join(core.data_to_send(0.0))

# Two cores answer each other, however the bytes are cut.
client, server = ToyCore(), ToyCore()
first, second = client.send_request(b"a"), client.send_request(b"b")
sent = of(client)
asked = [event for at in range(len(sent)) for event in server.receive_data(sent[at : at + 1], 0.0)]
assert asked == [Asked(first, b"a"), Asked(second, b"b")]
server.send_answer(second, b"B")
server.send_answer(first, b"x", failed=True)
assert client.receive_data(of(server), 0.0) == [Answered(second, b"B"), Answered(first, b"x", failed=True)]

# A drain waits for what is open, and not forever.
third = client.send_request(b"c")
server.receive_data(of(client), 0.0)
assert server.drain(1.0) == server.drain(2.0) == [] and server.next_deadline() == 6.0
assert server.handle_timeout(5.9) == []
server.send_answer(third, b"C")
assert server.take_events() == [Ended(0, "drained")]
assert client.receive_data(of(server), 1.0) == [Answered(third, b"C"), Ended(0, "drained")]
late = ToyCore()
late.receive_data(frame(b"?", 1), 0.0)
late.drain(1.0)
assert late.handle_timeout(6.0) == [Ended(0, "drained")] and late.next_deadline() is None

# After the end nothing happens.
for core in (client, server, late):
    of(core)
    assert core.receive_data(frame(b"?", 9), 7.0) == core.drain(7.0) == core.close(1, "", 7.0) == []
    assert core.connection_lost(1, "", 7.0) == core.handle_timeout(7.0) == core.take_events() == [] and of(core) == b""

# A peer that breaks a rule is told so, and nothing of the size that it claims is kept.
for broken in (b"?" + bytes(4) + b"\\xff" * 4, frame(b"=", 5), frame(b"x", 1), frame(b"?", 1) * 2):
    core = ToyCore()
    *_, last = core.receive_data(broken, 0.0)
    assert last.code == 2 and of(core)[:1] == b"."

# What is open fails with the connection.
core = ToyCore()
core.send_request(b"")
assert core.connection_lost(0, "cut", 0.0) == [Answered(1, b"cut", failed=True), Ended(1, "cut")]
print("sound")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (text, _) in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "handlers.py").write_text(HANDLERS)
    install(tmp_path, "levada-toy", "levada.protocols", toy="toy_protocol:PROTOCOL")
    return tmp_path


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``levada serve``; gives the process and its URL."""
    with subprocess.Popen(
        [sys.executable, *LEVADA, "serve", *arguments],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().removeprefix("SERVING ").strip()
        finally:
            process.kill()


def said(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = run(folder, *LEVADA, *arguments)
    return done.returncode, done.stdout, done.stderr


def test_the_toy_is_small() -> None:
    assert list(MODULES) == ["use_toy", "handlers", "toy_core", "toy_protocol"]
    lines = [line for name in ("toy_core", "toy_protocol") for line in MODULES[name][0].splitlines()[1:] if line]
    assert len(lines) <= 210


@pytest.mark.ci
def test_its_program_prints_what_the_page_says(folder: Path) -> None:
    done = run(folder, "use_toy.py")
    assert (done.stdout, done.stderr, done.returncode) == (MODULES["use_toy"][1], "", 0)


def test_its_core_keeps_the_contract(folder: Path) -> None:
    (folder / "check_core.py").write_text(CORE)
    done = run(folder, "check_core.py")
    assert (done.stdout, done.stderr) == ("sound\n", "")


@pytest.mark.ci
@pytest.mark.loopback
def test_serve_and_call_and_drain(folder: Path) -> None:
    """A request under way when SIGTERM comes gets its answer."""
    with serving(folder, "handlers:shout", "--url", "toy://127.0.0.1:0") as (server, url):
        assert said(folder, "call", url, "--data", "hello") == (0, "HELLO\n", "")
        assert said(folder, "call", url, "--data", "fail") == (1, "", "levada: no such word\n")
        with subprocess.Popen(
            [sys.executable, *LEVADA, "call", url, "--data", "slow"],
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as client:
            assert server.stdout is not None
            assert server.stdin is not None
            assert server.stdout.readline() == "begun\n"
            server.terminate()
            code, _, error = said(folder, "call", url, "--data", "late")
            assert (code, error[:8]) == (2, "levada: ")
            server.stdin.write("\n")
            server.stdin.flush()
            assert client.communicate(timeout=250) == ("SLOW\n", "")
        assert server.communicate(timeout=250) == ("", "")
        assert server.returncode == 0


@pytest.mark.ci
@pytest.mark.loopback
def test_reload(folder: Path) -> None:
    made = make_certificates(folder / "tls")
    with serving(
        folder,
        "handlers:shout",
        "--url",
        "toy+tls://127.0.0.1:0",
        "--cert",
        str(made.certificate),
        "--key",
        str(made.key),
    ) as (server, url):
        new = make_certificates(folder / "tls")
        server.send_signal(signal.SIGHUP)
        assert server.stderr is not None
        assert server.stderr.readline() == f"levada: {url} has read its files again\n"
        assert said(folder, "call", url, "--data", "a", "--ca", str(new.ca)) == (0, "A\n", "")


@pytest.mark.ci
@pytest.mark.loopback
def test_top(folder: Path) -> None:
    with (
        serving(folder, "handlers:watched") as (server, url),
        subprocess.Popen(
            [sys.executable, *LEVADA, "call", url, "--data", "slow"], env=environment(folder), stdout=subprocess.PIPE
        ) as client,
    ):
        assert server.stdout is not None
        assert server.stdin is not None
        assert server.stdout.readline() == "begun\n"
        code, out, _ = said(folder, "top", "console", "--once", "--json")
        assert code == 0
        assert {"ToyListener", "Connection"} <= {row["kind"] for row in json.loads(out)["actors"]}
        server.stdin.write("\n")
        server.stdin.flush()
        out_of_client, _ = client.communicate(timeout=250)
        assert out_of_client == b"SLOW\n"
