"""``levada serve``: apps and handlers as processes, their signals, their health, and mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio

from levada.actors import cli
from levada.actors.app_failures import AppImportFailed
from levada.actors.apps import find
from levada.actors.cli.dashboard import serve_own_dashboard
from levada.actors.interop.certificates import make_certificates
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError

pytestmark = pytest.mark.loopback

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "serve.md"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
LEVADA = (sys.executable, "-m", "levada.actors")

HANDLERS = """
import trio
from levada.actors.rsocket import Request

async def answer(request: Request) -> bytes:
    if request.route == "slow":
        print("asked", flush=True)
        await trio.sleep_forever()
    return request.data
"""


class Server:
    """``levada serve`` as a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def told(self, beginning: str) -> str:
        """The rest of the next line."""
        line = self.line()
        assert line.startswith(beginning), line
        return line.removeprefix(beginning)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def says(self) -> str:
        """The next line on stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def ends(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=250)
        return self.process.returncode, said


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*LEVADA, "serve", *arguments], cwd=folder, env=ENVIRONMENT, text=True, stdout=pipe, stderr=pipe
    ) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def health(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=250) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def call(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*LEVADA, "call", *arguments], env=ENVIRONMENT, text=True, stdout=pipe, stderr=pipe)


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Call from this process."""

    def called(*arguments: str) -> tuple[int, str]:
        return cli.main(["call", *arguments]), capsys.readouterr().out

    return called


Called = Callable[..., tuple[int, str]]


@pytest.mark.ci
def test_the_app_of_the_page(tmp_path: Path, called: Called) -> None:
    """It serves, says how it is, takes a new certificate on SIGHUP and keeps the old one if that is none, and drains on SIGTERM."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "desk.py").write_text(block[1].replace(":4433", ":0"), "utf-8")
    old = make_certificates(tmp_path / "tls")
    shutil.copy(old.ca, tmp_path / "old-ca.pem")
    ask = ("--tag", "desk.Ask", "--data", '["EURUSD"]', "--timeout", "50")
    with serving(tmp_path, "desk:app", "--health", "127.0.0.1:0") as server:
        probe = server.told("HEALTH ")
        url = server.told("SERVING ")
        assert called(url, "--ca", str(tmp_path / "old-ca.pem"), *ask) == (0, "1.08\n")
        status, facts = health(probe)
        assert (status, facts["state"], facts["urls"]) == (200, "serving", [url])
        assert facts["actors"] > 0
        new = make_certificates(tmp_path / "tls")
        server.signal(signal.SIGHUP)
        assert server.says() == f"levada: {url} has read its files again\n"
        assert called(url, "--ca", str(new.ca), *ask) == (0, "1.08\n")
        new.certificate.write_text("nothing of the kind")
        server.signal(signal.SIGHUP)
        assert server.says().startswith(f"levada: {url} keeps its old files: cannot use tls/cert.pem")
        assert called(url, "--ca", str(new.ca), *ask) == (0, "1.08\n")
        server.signal(signal.SIGTERM)
        assert server.ends() == (0, "")


@pytest.mark.ci
def test_prometheus_scrapes_the_health_port(tmp_path: Path, called: Called) -> None:
    """Beside the health, which is at every other path; totals stay when clients have left."""
    pytest.importorskip("prometheus_client")
    from tests.actors.metrics.scraped import read

    (tmp_path / "handlers.py").write_text(HANDLERS, "utf-8")
    arguments = ("handlers:answer", "--url", "rsocket+tcp://127.0.0.1:0", "--health", "127.0.0.1:0")
    with serving(tmp_path, *arguments) as server:
        probe, url = server.told("HEALTH "), server.told("SERVING ")
        for _ in range(2):
            assert called(url, "--data", "x") == (0, "x\n")
        request = urllib.request.Request(f"{probe}metrics", headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(request, timeout=250) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            found = read(answer.read().decode())
        assert found["levada_connections_opened_total", "rsocket", "server"] == 2
        assert found["levada_requests_received_total", "rsocket", "server"] == 2
        assert found["levada_clients_refused_total", url, "rsocket"] == 0
        assert found["levada_process_cpu_seconds_total",] > 0
        assert health(f"{probe}metric")[1]["state"] == "serving"
        server.signal(signal.SIGTERM)
        assert server.ends() == (0, "")


TRACED = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from levada.actors.rsocket import Request

def show(span):
    return f"SPAN {span.resource.attributes.get('levada.node')} {span.name}\\n"

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=show)))
trace.set_tracer_provider(provider)

async def answer(request: Request) -> bytes:
    return request.data
"""


@pytest.mark.ci
@pytest.mark.parametrize(("options", "node"), [([], "None"), (["--nodes", "1"], "n0")], ids=["one process", "nodes"])
def test_spans_go_to_the_provider_that_the_module_sets_up(
    tmp_path: Path, called: Called, options: list[str], node: str
) -> None:
    (tmp_path / "traced.py").write_text(TRACED, "utf-8")
    with serving(tmp_path, "traced:answer", "--url", "rsocket+tcp://127.0.0.1:0", "--trace", *options) as server:
        line = server.line()
        while not line.startswith("SERVING "):
            line = server.line()
        url = line.removeprefix("SERVING ")
        assert called(url, "--route", "echo", "--data", "x", "--timeout", "50") == (0, "x\n")
        while not line.endswith(" echo"):
            line = server.line()
        assert line == f"{'' if node == 'None' else node + ': '}SPAN {node} echo"


WHO = """
from levada.actors.aqueduct import RawMessage
from levada.actors.rsocket import Request
from levada.framework import current_peer

async def who(request: Request) -> bytes:
    return request.identity.name.encode()

async def tell(m: RawMessage) -> None:
    m.attachments[0].send(RawMessage(current_peer().identity.name.encode()))

async def take(unit) -> None:
    print(current_peer().identity.name, flush=True)
"""


@pytest.mark.ci
def test_tokens_are_replaced_while_it_serves(
    tmp_path: Path, called: Called, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "handlers.py").write_text(WHO)
    tokens = [private(tmp_path / name) for name in ("old", "new")]
    lines = []
    for file in tokens:
        assert cli.main(["token", "new", "ada", "--role", "reader"]) == 0
        token, line = capsys.readouterr().out.splitlines()
        file.write_text(token + "\n")
        lines.append(line)
    file = private(tmp_path / "tokens")
    file.write_text(lines[0])
    with serving(tmp_path, "handlers:who", "--url", "rsocket+tcp://127.0.0.1:0", "--tokens", "tokens") as server:
        url = server.told("SERVING ")
        old, new = (("--token-file", str(token)) for token in tokens)
        assert called(url, *old) == (0, "ada\n")
        assert called(url, *old, "--stream", "--json") == (0, '{"data": "ada"}\n')
        for refused in (new, ()):
            assert called(url, *refused) == (2, "")
        file.write_text(lines[1])
        server.signal(signal.SIGHUP)
        assert server.says().endswith(" away: These credentials are not valid here.\n")
        assert server.says() == f"levada: {url} has read its files again\n"
        assert (called(url, *old), called(url, *new)) == ((2, ""), (0, "ada\n"))
        file.write_text("nothing of the kind")
        server.signal(signal.SIGHUP)
        assert server.says().startswith(f"levada: {url} keeps its old files: tokens, line 1: expected NAME")
        assert called(url, *new) == (0, "ada\n")
        server.signal(signal.SIGTERM)
        assert server.ends() == (0, "")


@pytest.mark.ci
@pytest.mark.parametrize("carrier", ["tls", "wss", "quic"])
def test_clients_show_certificates(tmp_path: Path, called: Called, carrier: str) -> None:
    (tmp_path / "handlers.py").write_text(WHO)
    made = make_certificates(tmp_path / "tls")
    own = ("--cert", str(made.certificate), "--key", str(made.key))
    url = f"rsocket+{carrier}://127.0.0.1:0"
    with serving(tmp_path, "handlers:who", "--url", url, *own, "--client-ca", str(made.ca)) as server:
        url = server.told("SERVING ")
        assert called(url, "--ca", str(made.ca), *own) == (0, "CN=localhost\n")
        assert called(url, "--ca", str(made.ca)) == (2, "")


@pytest.mark.ci
def test_clients_of_aqueduct_show_certificates_and_tokens(
    tmp_path: Path, called: Called, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "handlers.py").write_text(WHO)
    made = make_certificates(tmp_path / "tls")
    own = ("--cert", str(made.certificate), "--key", str(made.key))
    assert cli.main(["token", "new", "ada"]) == 0
    token, line = capsys.readouterr().out.splitlines()
    files = [private(tmp_path / name) for name in ("token", "tokens")]
    for file, text in zip(files, (token, line), strict=True):
        file.write_text(text)
    shown, mine = ("--ca", str(made.ca)), ("--token-file", str(files[0]))
    for options, needed, name in (
        (("--client-ca", str(made.ca)), own, "CN=localhost"),
        (("--tokens", "tokens"), mine, "ada"),
    ):
        url = ("--url", "aqueduct://127.0.0.1:0")
        with serving(tmp_path, "handlers:tell", *url, *own, *options) as server:
            at = server.told("SERVING ")
            assert called(at, *shown, *needed) == (0, f"{name}\n")
            assert called(at, *shown) == (2, "")


@pytest.mark.ci
def test_writers_show_certificates(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(WHO)
    made = make_certificates(tmp_path / "tls")
    own = ("--cert", str(made.certificate), "--key", str(made.key))
    url = "lumberjack+tls://127.0.0.1:0"
    with serving(tmp_path, "handlers:take", "--url", url, *own, "--client-ca", str(made.ca)) as server:
        url = server.told("SERVING ")
        (tmp_path / "log").write_text("one\n")
        ship = [*LEVADA, "ship", "--to", url, "--ca", str(made.ca), *own, "--once", str(tmp_path / "log")]
        subprocess.run(ship, env=ENVIRONMENT, cwd=tmp_path, check=True, timeout=250)
        assert server.line() == "CN=localhost"


def private(file: Path) -> Path:
    file.touch(mode=0o600)
    return file


@pytest.mark.ci
def test_a_server_hides_what_it_starts_with_from_the_garbage_collector(tmp_path: Path, called: Called) -> None:
    (tmp_path / "handlers.py").write_text(
        "import gc\n"
        "from levada.actors.rsocket import Payload\n"
        "async def count(request: Payload) -> Payload:\n"
        "    return Payload(b'%d' % gc.get_freeze_count())\n"
    )
    with serving(tmp_path, "handlers:count", "--url", "rsocket+tcp://127.0.0.1:0") as server:
        code, out = called(server.told("SERVING "), "--data", "x")
        assert code == 0
        assert int(out) > 10_000
        server.signal(signal.SIGTERM)
        assert server.ends() == (0, "")


@pytest.mark.ci
def test_what_is_under_way_has_time_and_is_cut_off_by_a_second_signal(tmp_path: Path, called: Called) -> None:
    """A request that never ends holds up the end; health says so meanwhile."""
    (tmp_path / "handlers.py").write_text(HANDLERS)
    with serving(
        tmp_path,
        "handlers:answer",
        "--url",
        "rsocket+tcp://127.0.0.1:0",
        "--health",
        "127.0.0.1:0",
        "--drain-timeout",
        "100",
    ) as server:
        probe, url = server.told("HEALTH "), server.told("SERVING ")
        assert called(url, "--data", "x") == (0, "x\n")
        with call(url, "--route", "slow") as client:
            assert server.line() == "asked"
            server.signal(signal.SIGTERM)
            while (state := health(probe)[1]["state"]) == "serving":
                pass
            assert (state, health(probe)[0]) == ("draining", 503)
            server.signal(signal.SIGTERM)
            assert server.ends() == (1, "levada: open work was cut off (--drain-timeout 100)\n")
            client.communicate(timeout=250)
            assert client.returncode in (1, 2)


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_ends_with_what_was_under_way(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "handlers.py").write_text(HANDLERS)
    urls = ("--url", "rsocket+tcp://127.0.0.1:0", "--url", "reactivesocket+tcp://127.0.0.1:0")
    with serving(tmp_path, "handlers:answer", *urls, "--drain-timeout", "100") as server:
        url = server.told("SERVING rsocket")
        server.told("SERVING reactivesocket")
        with call(f"rsocket{url}", "--route", "slow") as client:
            assert server.line() == "asked"
            server.signal(number)
            client.send_signal(signal.SIGINT)  # it cancels its request
            assert client.wait(250) == 130
        code, said = server.ends()
        assert (code, said) == ((0, "") if number == signal.SIGTERM else (130, "levada: interrupted\n"))


@pytest.mark.ci
def test_time_is_up(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(HANDLERS)
    with serving(
        tmp_path, "handlers:answer", "--url", "rsocket+tcp://127.0.0.1:0", "--drain-timeout", "0.05"
    ) as server:
        url = server.told("SERVING ")
        with call(url, "--route", "slow") as client:
            assert server.line() == "asked"
            server.signal(signal.SIGTERM)
            assert server.ends() == (1, "levada: open work was cut off (--drain-timeout 0.05)\n")
            client.communicate(timeout=250)


BLOCKED = """
import threading
from levada.framework import Actor, blocking, handles

class Blocks(Actor[str]):
    @handles
    @blocking
    def block(self, m: str) -> None:
        print("blocked", flush=True)
        threading.Event().wait()

async def app(system):
    system.spawn(Blocks).tell("go")
    yield
"""


@pytest.mark.ci
def test_a_third_signal_ends_a_server_that_waits_for_a_thread(tmp_path: Path) -> None:
    (tmp_path / "blocked.py").write_text(BLOCKED)
    with serving(tmp_path, "blocked:app", "--drain-timeout", "100") as server:
        assert {server.line(), server.line()} == {"SERVING without a listener", "blocked"}
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGINT)
        waits = "waits for blocking handlers and for hooks; one more signal ends the process at once"
        assert server.says() == f"levada: {waits}\n"
        server.signal(signal.SIGTERM)
        assert server.ends() == (1, "")


@pytest.mark.ci
def test_a_third_signal_ends_a_server_whose_app_holds_up_the_loop(tmp_path: Path) -> None:
    (tmp_path / "holding.py").write_text(
        "import time\nasync def app(system):\n    print('holds', flush=True)\n    time.sleep(1000)\n    yield\n"
    )
    with serving(tmp_path, "holding:app") as server:
        assert server.line() == "holds"
        while server.process.poll() is None:  # signals of one kind that arrive together count once
            server.signal(signal.SIGTERM)
            server.signal(signal.SIGINT)
        assert server.ends() == (1, "")


HANGING = """
import trio
async def app(system):
    print("begins", flush=True)
    try:
        await trio.sleep_forever()
    finally:
        print("gives up", flush=True)
    yield
"""


@pytest.mark.ci
@pytest.mark.parametrize(("options", "said"), [([], "gives up"), (["--nodes", "2"], "")], ids=["one process", "nodes"])
def test_a_start_that_hangs_is_given_up_at_once(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    with serving(tmp_path, "hanging:app", "--drain-timeout", "1000", "--log", "error", *options) as server:
        assert server.line().endswith("begins")
        server.signal(signal.SIGINT)
        if said:
            assert server.line() == said
        assert server.ends() == (130, "levada: interrupted\n")


@pytest.mark.ci
@pytest.mark.parametrize("options", [[], ["--nodes", "2"]], ids=["one process", "nodes"])
def test_an_app_without_a_listener_says_that_it_serves(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "quiet.py").write_text("async def app(system):\n    yield\n")
    with serving(tmp_path, "quiet:app", *options) as server:
        assert server.line() == "SERVING without a listener"
        server.signal(signal.SIGTERM)
        assert server.ends()[0] == 0


SERVES = "SERVING without a listener\n"
APPS = """
from levada.framework import Actor
import contextlib
import os
import signal
import trio

number = 5

async def handler(m): ...
class Handler(Actor): ...

async def app(system):
    yield None

async def odd(system):
    yield "no listener"

async def alone():
    yield


async def never(system):
    if False:
        yield

async def twice(system):
    os.kill(os.getpid(), signal.SIGTERM)
    yield
    yield

async def twice_within(system):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        os.kill(os.getpid(), signal.SIGTERM)
        yield
        yield

async def yields_in_a_loop(system):
    while True:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lose)
                yield
        except Exception:
            pass

async def no_database(system):
    raise RuntimeError("no database")
    yield

async def lose():
    raise RuntimeError("lost the database")

async def loses_database(system):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lose)
        yield

async def cannot_flush(system):
    os.kill(os.getpid(), signal.SIGTERM)
    yield
    raise RuntimeError("cannot flush")

class Failing(Actor):
    async def started(self):
        await lose()

async def has_a_failing_actor(system):
    system.spawn(Failing, supervise="escalate")
    yield

@contextlib.asynccontextmanager
async def managed(system):
    yield None

def nothing(system):
    return 5

class Outer:
    inner = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "apps_for_serve.py").write_text(APPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("apps", "broken", "helper"):
        monkeypatch.delitem(sys.modules, f"{name}_for_serve", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["desk"], "expected MODULE:NAME, as in desk:app or shop.desk:app, got 'desk'"),
        (["desk.py:app"], "'desk.py:app' names a file, wanted its module and the app in it: desk:app"),
        (["desk.py"], "'desk.py' names a file, wanted its module and the app in it: desk:app"),
        (
            ["./shop/desk.py:main"],
            "'./shop/desk.py:main' names a file, wanted its module and the app in it: shop.desk:main",
        ),
        (["shop/desk:app"], "'shop/desk:app' names a file, wanted its module and the app in it: shop.desk:app"),
        (["apps_for_serve:app", "--nodes", "2", "--fence", "."], "cannot use the fence .: Is a directory"),
        (["apps_for_serve:app", "--fence", "f"], "--fence needs --nodes: one process has no others that outlive it"),
        (["no_such_module:app"], "no module named 'no_such_module' in "),
        (["levada.no_such:app"], "no module named 'levada.no_such' in "),
        (["apps_for_serve:ap"], "nothing is named 'ap' in module apps_for_serve; is it 'app'?"),
        (["apps_for_serve:Outer.iner"], "nothing is named 'iner' in Outer; is it 'inner'?"),
        (["json:dumps"], "json:dumps is no app, as it does not take a system (Object of type ActorSystem is not"),
        (
            ["apps_for_serve:number"],
            "apps_for_serve:number is no app: an app is an async generator function of the system",
        ),
        (["apps_for_serve:handler"], "apps_for_serve:handler is a handler, so it needs --url"),
        (["apps_for_serve:Handler"], "apps_for_serve:Handler is a handler, so it needs --url"),
        (["apps_for_serve:nothing"], "apps_for_serve:nothing gave 5, expected an async context manager"),
        (
            ["apps_for_serve:odd"],
            "apps_for_serve:odd yields 'no listener'; an app yields its listeners, which `async with serve(…)` gives, one or several, or",
        ),
        (["apps_for_serve:alone"], "apps_for_serve:alone is no app, as it does not take a system (alone() takes 0"),
        (["apps_for_serve:never"], "apps_for_serve:never ended without a yield; an app is an async generator function"),
        (["apps_for_serve:twice"], "apps_for_serve:twice yields more than once; an app is an async generator function"),
        (["apps_for_serve:twice_within"], "apps_for_serve:twice_within yields more than once; an app is an async"),
        (["apps_for_serve:yields_in_a_loop"], "apps_for_serve:yields_in_a_loop yields again after an error; an app is"),
        (["apps_for_serve:app", "--cert", "c"], "--cert goes with --url; an app has its own settings"),
        (["apps_for_serve:app", "--url", "x://y"], "apps_for_serve:app is an app, which has its own URLs"),
        (["apps_for_serve:managed", "--url", "x://y"], "apps_for_serve:managed is an app, which has its own URLs"),
        (["apps_for_serve:number", "--url", "x://y"], "apps_for_serve:number is not a handler"),
        (
            ["apps_for_serve:handler", "--url", "http://x:1"],
            "no protocol for 'http://x:1': expected aqueduct://host:port, rsocket+tcp://host:port, reactivesocket+tcp://host:port, "
            "lumberjack://host:port, or a scheme of an installed package",
        ),
        (["apps_for_serve:handler", "--url", "maop://x:1"], "a single handler cannot serve maop://: write an app"),
        (["apps_for_serve:handler", "--url", "aqueduct+memory://desk"], "handler must say which messages clients may"),
        (["apps_for_serve:handler", "--url", "aqueduct://127.0.0.1:0"], "aqueduct://127.0.0.1:0 needs --cert FILE"),
        (
            ["apps_for_serve:handler", "--url", "rsocket+tcp://127.0.0.1:0", "--client-ca", "ca.pem"],
            "--client-ca: rsocket+tcp://127.0.0.1:0 has no TLS",
        ),
        (
            ["apps_for_serve:handler", "--url", "rsocket+tcp://127.0.0.1:0", "--cert", "c.pem"],
            "--cert: rsocket+tcp://127.0.0.1:0 has no TLS, so nothing would be encrypted",
        ),
        (
            ["apps_for_serve:handler", "--url", "lumberjack://127.0.0.1:0", "--tokens", "t"],
            "--tokens: clients of lumberjack cannot send a token",
        ),
        (
            ["apps_for_serve:handler", "--url", "rsocket+tcp://127.0.0.1:0", "--tokens", "no-such-file"],
            "cannot read the tokens in no-such-file",
        ),
        (["apps_for_serve:app", "--tokens", "t"], "--tokens goes with --url"),
        (
            ["apps_for_serve:handler", "--url", "rsocket+tcp://203.0.113.1:1"],
            "cannot listen at rsocket+tcp://203.0.113.1:1: ",
        ),
        (["apps_for_serve:app", "--health", "203.0.113.1:1"], "cannot listen at 203.0.113.1:1"),
        (["apps_for_serve:app", "--dashboard", "203.0.113.1:1"], "--dashboard listens at addresses of this machine"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    code = cli.main(["serve", *arguments])
    said = capsys.readouterr()
    assert code == 2
    assert said.out == (SERVES if " yields more than once; " in complaint or " yields again " in complaint else "")
    assert said.err.startswith(f"levada: {complaint}"), said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("app", "complaint"),
    [
        ("no_database", "before its yield: RuntimeError: no database"),
        ("loses_database", "while it served: RuntimeError: lost the database"),
        ("cannot_flush", "at its end: RuntimeError: cannot flush"),
        ("has_a_failing_actor", "while it served: RuntimeError: lost the database"),
    ],
)
def test_an_app_that_raises_shows_its_traceback_and_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], app: str, complaint: str
) -> None:
    code = cli.main(["serve", f"apps_for_serve:{app}"])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "" if app == "no_database" else SERVES)
    *traceback, last = said.err.splitlines()
    raised = 'raise RuntimeError("' + complaint.rpartition(": ")[2]
    line = 1 + next(number for number, text in enumerate(APPS.splitlines()) if raised in text)
    assert last == f"levada: apps_for_serve:{app} has failed {complaint} (apps_for_serve.py:{line})"
    mine = traceback[1 + next(at for at, line in enumerate(traceback) if line.endswith("the app has failed")) :]
    frames = [line for line in mine if line.lstrip(" |").startswith('File "')]
    assert frames
    assert all("apps_for_serve.py" in line for line in frames), said.err


NOT_IMPORTED = [
    pytest.param("import os\napp = (\n", "SyntaxError: '(' was never closed (broken_for_serve.py:2)", id="syntax"),
    pytest.param(
        "import no_such_module_at_all",
        "no module named 'no_such_module_at_all' in {folder} or among the installed packages (broken_for_serve.py:1): "
        f"install it with {sys.executable} -m pip, or mend the name",
        id="missing",
    ),
    pytest.param(
        "from json import lods",
        f"ImportError: cannot import name 'lods' from 'json' ({json.__file__}) (broken_for_serve.py:1)",
        id="name",
    ),
    pytest.param(
        "import helper_for_serve\nhelper_for_serve.connect()",
        "RuntimeError: no address (helper_for_serve.py:2)",
        id="raise",
    ),
    pytest.param(
        "import json\njson.loads('?')",
        "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (broken_for_serve.py:2)",
        id="library",
    ),
    pytest.param(
        "from levada.framework import Actor, handles\nclass A(Actor):\n    @handles\n    def f(self, m): ...\n",
        "ConfigurationError: A.f: annotate 'm' with the message class, or write @handles(TheClass) (broken_for_serve.py:2)",
        id="actor",
    ),
    pytest.param("raise SystemExit('no settings')", "SystemExit: no settings (broken_for_serve.py:1)", id="exit"),
    pytest.param(
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('odd') from error\n",
        "RuntimeError: odd (broken_for_serve.py:4)",
        id="cause",
    ),
]


@pytest.mark.parametrize("command", ["serve", "serve --nodes 2", "simulate"])
@pytest.mark.parametrize(("code", "complaint"), NOT_IMPORTED)
def test_an_app_that_cannot_be_imported_is_one_sentence_below_the_lines_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, code: str, complaint: str
) -> None:
    (folder / "broken_for_serve.py").write_text(code)
    (folder / "helper_for_serve.py").write_text("def connect():\n    raise RuntimeError('no address')\n")
    name, *options = command.split()
    assert cli.main([name, "broken_for_serve:app", *options]) == 2
    said = capsys.readouterr()
    *above, last = said.err.splitlines()
    assert said.out == ""
    assert last == f"levada: module broken_for_serve cannot be imported: {complaint.format(folder=folder)}"
    frames = [line for line in above if line.startswith('  File "')]
    assert frames
    assert all(line.startswith(f'  File "{folder}') for line in frames), said.err


def test_an_installed_app_is_its_own_and_another_package_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = folder / "site-packages"
    installed.mkdir()
    (installed / "app_for_serve.py").write_text("import driver_for_serve\ndriver_for_serve.connect()\n")
    (installed / "driver_for_serve.py").write_text("def connect():\n    raise OSError('no server')\n")
    monkeypatch.syspath_prepend(installed)
    with pytest.raises(AppImportFailed, match=r"OSError: no server \(site-packages/app_for_serve.py:2\)$"):
        find("app_for_serve:app")


WATCHED = """
import os
import signal
from levada.actors.console import connect_console
from levada.actors.cli.servers import console_of

async def app(system):
    async with connect_console(console_of(None)) as console:
        snapshot = await console.snapshot()
        print(snapshot.system, snapshot.pid == os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)
    yield
"""


def test_a_server_has_a_console_from_its_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "watched_for_serve.py").write_text(WATCHED)
    with TemporaryDirectory(prefix="levada-") as runtime:  # a short path, as that of a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert cli.main(["serve", "watched_for_serve:app"]) == 0
        assert list(Path(runtime, "levada").iterdir()) == []
    assert capsys.readouterr() == (f"serve True\n{SERVES}", "")


def test_without_its_packages_a_dashboard_says_how_to_get_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wsproto", None)
    assert cli.main(["serve", "apps_for_serve:app", "--dashboard"]) == 2
    assert capsys.readouterr().err == "levada: --dashboard needs wsproto: pip install 'levada[dashboard]'\n"


async def test_the_dashboard_of_a_server_is_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wsproto")

    def fetch(url: str) -> int:
        with urllib.request.urlopen(url, timeout=50) as answer:
            return int(answer.status)

    async with ActorSystem() as system:
        async with serve_own_dashboard(system, ("127.0.0.1", 0)):
            said = re.fullmatch(r"DASHBOARD (http://127\.0\.0\.1:\d+/)#token=[0-9a-f]{64}\n", capsys.readouterr().out)
            assert said is not None
            assert await trio.to_thread.run_sync(fetch, said[1]) == 200
        for host in ("0.0.0.0", "::", "desk.example"):
            with pytest.raises(ConfigurationError, match="--dashboard listens at addresses of this machine alone"):
                await serve_own_dashboard(system, (host, 0)).__aenter__()
        async with serve_own_dashboard(system, None):
            assert capsys.readouterr().out == ""


ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="how a process gets a terminal is the system's own")
@pytest.mark.parametrize("more", [(), ("--nodes", "1")], ids=["one process", "nodes"])
def test_it_drains_when_its_terminal_is_closed(more: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(HANDLERS)
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", ON_TERMINAL, *LEVADA[1:], "serve", "handlers:answer"]
    with subprocess.Popen(
        [*command, "--url", "rsocket+tcp://127.0.0.1:0", *more],
        cwd=tmp_path,
        env=ENVIRONMENT,
        text=True,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        try:
            os.close(theirs)
            assert Server(process).line().startswith("SERVING ")
            os.close(ours)
            assert process.wait(250) == 0
        finally:
            process.kill()
