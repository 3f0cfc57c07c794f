"""A protocol from another package, which the command line knows by its record only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.packages import environment, install, run

from levada.actors import cli, protocols
from levada.actors.protocols import Protocol
from levada.framework.errors import ConfigurationError
from levada.transports.plugins import resolve

LEVADA = ("-m", "levada.actors")
ECHO = """
from contextlib import asynccontextmanager
import trio
from levada.actors.explain import Line
from levada.actors.protocols import Protocol
from levada.framework.errors import LevadaError
from levada.transports import carriers

class Listener:
    def __init__(self, url):
        self.url = url

class Peer:
    def __init__(self, stream):
        self.stream = stream
    async def request(self, data):
        await self.stream.send_all(data + b"\\n")
        answer = await self.stream.receive_some()
        if answer.startswith(b"-"):
            raise LevadaError(answer[1:].decode())
        return answer

@asynccontextmanager
async def serve(system, url, handler, *, carrier, drain_timeout, authenticate=None):
    async def answer(stream):
        async with stream:
            while data := await stream.receive_some():
                await stream.send_all(await handler(data.strip()))
    async def accept(listener):
        while True:
            nursery.start_soon(answer, await listener.accept())
    async with carriers.listen("tcp" + url[4:], carrier) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(accept, listener)
        yield Listener("echo" + listener.url[3:])
        nursery.cancel_scope.cancel()

@asynccontextmanager
async def connect(system, url, *, carrier):
    async with carriers.dial("tcp" + url[4:], carrier) as stream:
        yield Peer(stream)

class Captures:
    HELP = "lines"
    def add_arguments(self, parser):
        parser.add_argument("--upper", action="store_true")
    def explain(self, octets, args):
        text = octets.decode()
        yield Line(0, len(octets), text.upper() if args.upper else text)

class Interop:
    CARRIERS = ("tcp",)
    def add_arguments(self, parser):
        parser.add_argument("--word", default="same")
    def serve(self, system, carrier, where, tls, args):
        async def same(data):
            return args.word.encode() + b" " + data
        return serve(system, "echo://" + where, same, carrier=None, drain_timeout=1)

PROTOCOL = Protocol(
    scheme="echo", example="echo://host:port", serve=serve, connect=connect, explain=Captures(), interop=Interop()
)
"""
HANDLERS = """
async def shout(data):
    return b"-no" if data == b"refuse" else data.upper()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("echo")
    (folder / "echo_protocol.py").write_text(ECHO)
    (folder / "handlers.py").write_text(HANDLERS)
    install(folder, "levada-echo", "levada.protocols", echo="echo_protocol:PROTOCOL", gone="echo_protocol:GONE")
    return folder


def said(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = run(folder, *LEVADA, *arguments)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.ci
@pytest.mark.loopback
def test_serve_and_call(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, *LEVADA, "serve", "handlers:shout", "--url", "echo://127.0.0.1:0"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("SERVING ").strip()
            assert said(folder, "call", url, "--data", "hello") == (0, "HELLO\n", "")
            assert said(folder, "call", url, "--data", "refuse") == (1, "", "levada: no\n")
            server.terminate()
            assert server.communicate(timeout=250) == ("", "")
            assert server.returncode == 0
        finally:
            server.kill()


@pytest.mark.ci
@pytest.mark.loopback
def test_interop(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, *LEVADA, "interop", "echo", "--word", "again:", "--until-stdin-closes"],
        env=environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            _, host, port, carrier = server.stdout.readline().split()
            assert carrier == "tcp"
            assert said(folder, "call", f"echo://{host}:{port}", "--data", "a") == (0, "again: a\n", "")
            server.communicate(timeout=250)
            assert server.returncode == 0
        finally:
            server.kill()


@pytest.mark.ci
def test_explain(folder: Path) -> None:
    (folder / "capture").write_text("abc")
    assert said(folder, "explain", "echo", "--upper", "capture") == (0, "         0        3  ABC\n", "")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["call", "echo://127.0.0.1:1", "--stream"], "--stream is not for echo"),
        (["call", "echo://127.0.0.1:1", "--limit", "3"], "--limit is not for echo"),
        (
            ["call", "gone://x"],
            "gone:// comes from levada-echo 1.0 (echo_protocol:GONE), which cannot be loaded: AttributeError: module "
            "'echo_protocol' has no attribute 'GONE'",
        ),
        (["explain", "gone", "-"], "gone:// comes from levada-echo 1.0 (echo_protocol:GONE), which cannot be loaded"),
        (["serve", "handlers:shout", "--url", "gone://x"], "gone:// comes from levada-echo 1.0"),
        (["serve", "handlers:shout", "--url", "nowhere://x"], "no protocol for 'nowhere://x': expected aqueduct://"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, arguments: list[str], complaint: str) -> None:
    code, out, err = said(folder, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"levada: {complaint}")
    assert err.count("\n") == 1


@pytest.mark.ci
def test_a_package_that_no_command_names_is_not_imported(folder: Path) -> None:
    program = (
        "import sys; from levada.actors import cli; cli.main(['call', 'rsocket://127.0.0.1:1']); "
        "sys.exit('echo_protocol' in sys.modules)"
    )
    assert run(folder, "-c", program).returncode == 0


def test_the_protocols_of_levada_are_complete() -> None:
    """Each part can be imported, and each protocol has what its commands need."""
    parts = {
        protocol.scheme: {
            name
            for name in ("serve", "connect", "call", "explain", "interop")
            if (part := getattr(protocol, name)) is not None and resolve(part) is not None
        }
        for protocol in protocols.known()
    }
    everything = {"serve", "call", "explain", "interop"}
    assert parts == {
        "aqueduct": everything,
        "rsocket": everything,
        "reactivesocket": everything,
        "maop": everything - {"serve"},
        "lumberjack": everything - {"call"},
        "qmux": {"explain", "interop"},
    }


def test_a_protocol_of_levada_cannot_be_replaced() -> None:
    mine = Protocol(scheme="maop", example="maop://x", serve="mine:serve")
    with pytest.raises(
        ConfigurationError,
        match=r"^maop:// is levada's own \(levada.actors.cli.protocols.maop\), so mine:serve needs another scheme$",
    ):
        protocols.register(mine)


@pytest.mark.ci
def test_the_core_of_the_registry_needs_no_extra() -> None:
    """Looking a protocol up imports nothing of it."""
    program = (
        "import sys; from levada.actors.protocols import of_url; of_url('maop://x'); "
        "sys.exit(any(name.startswith(('levada.actors.maop', 'levada.transports.maop', 'aioquic')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=250).returncode == 0


def test_completion_knows_the_protocols(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(protocol.scheme in script for protocol in protocols.known())
