"""``levada serve --nodes``: several processes that share their addresses, in the hands of one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.cli.test_serve import LEVADA, Server, health

from levada.actors import cli
from levada.actors.interop.certificates import make_certificates
from levada.actors.rsocket import ClientConfig, RequestFailed, RequestRejected, connect
from levada.actors.rsocket.blocking import BlockingPeer
from levada.actors.rsocket.blocking import connect as connect_blocking
from levada.framework import ActorSystem
from levada.framework.errors import CarrierError, ConnectionLost
from levada.transports.carriers import TlsConfig

pytestmark = [pytest.mark.loopback, pytest.mark.ci]

HANDLERS = """
import os
import trio
from levada.actors.rsocket import Request, serve

async def answer(request: Request) -> bytes:
    if request.route == "slow":
        print("asked", flush=True)
        await trio.sleep(0.3)
    if request.route == "never":
        print("asked", flush=True)
        await trio.sleep_forever()
    return str(os.getpid()).encode()

async def fails_in_one(system):
    if system.name == "n1":
        raise RuntimeError("not here")
    yield None

async def fails_at_its_end(system):
    yield None
    if system.name == "n1":
        yield None

async def different(system):
    host = "127.0.0.1" if system.name == "n0" else "127.0.0.2"
    async with serve(system, f"rsocket+tcp://{host}:0", answer) as listener:
        yield listener
"""

WAITING = """
import os
import trio
from levada.actors.rsocket import serve
from handlers import answer

def hold():
    print("waits", flush=True)
    with open("gate"):
        pass

async def held(system):
    if os.path.exists("gate"):
        await trio.to_thread.run_sync(hold)
    async with serve(system, "rsocket+tcp://127.0.0.1:0", answer) as listener:
        yield listener
"""

SHARED = """
import os
from levada.actors.durable import Durable, applies, shards
from levada.actors.nodes import singleton
from levada.actors.rsocket import serve
from levada.framework import Actor, Asks, handles, message

@message("shared.Next", frozen=True)
class Next(Asks[int]):
    pass

@message("shared.counted", frozen=True)
class Counted:
    pass

class House(Actor[Next]):
    count: int = 0
    @handles
    def next(self, m: Next) -> int:
        self.count += 1
        return self.count

class Till(Durable[Next]):
    count: int = 0
    @handles
    def next(self, m: Next) -> int:
        self.record(Counted())
        return self.count
    @applies
    def counted(self, e: Counted) -> None:
        self.count += 1

async def app(system):
    house = await singleton(system, House)
    tills = await shards(system, Till, events=Counted, journal="tills", shards=4)
    number = await house.ask(Next())
    async def answer(request):
        command = request.data.decode() or None
        paid = await tills["anna"].ask(Next(), command=command, timeout=30)
        return f"{os.getpid()} {await house.ask(Next(), timeout=30)} {paid}".encode()
    async with serve(system, "rsocket+tcp://127.0.0.1:0", answer) as listener:
        yield listener
"""

GROWING = """
from levada.actors.nodes import nodes_of, singleton
from levada.actors.rsocket import serve
from levada.framework import Actor, Asks, handles, message
from levada.framework.errors import LevadaError

@message("growing.Job")
class Job(Asks[str]):
    text: str

class Desk(Actor[Job]):
    first: Job
    @handles
    def job(self, m: Job) -> str:
        return f"{self.first} {m}"

def job(text):
    return Job(text)

async def app(system):
    with open("starts", "a") as file:
        print(system.name, file=file)
    house = await singleton(system, Desk, job("house"))
    async def answer(request):
        desk = await nodes_of(system).spawn(Desk, job("first"), on=request.data.decode())
        answers = [system.name, await desk.ask(job("next")), await house.ask(job("last"))]
        return "; ".join(answers).encode()
    async def again(request):
        try:
            return await answer(request)
        except LevadaError as error:
            return f"{system.name}; {error}".encode()
    async with serve(system, "rsocket+tcp://127.0.0.1:0", again) as listener:
        yield listener
"""

ANY = "rsocket+tcp://127.0.0.1:0"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers run, with a folder for their consoles that no other test sees."""
    (tmp_path / "handlers.py").write_text(HANDLERS)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    return tmp_path


Start = Callable[..., Server]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start ``levada serve``; what is started is killed at the end."""
    with ExitStack() as ended:

        def start(*arguments: str) -> Server:
            pipe = subprocess.PIPE
            process = ended.enter_context(
                subprocess.Popen([*LEVADA, "serve", *arguments], cwd=folder, text=True, stdout=pipe, stderr=pipe)
            )
            ended.callback(process.kill)
            return Server(process)

        yield start


def peers_of_both(url: str) -> dict[int, list[BlockingPeer]]:
    """Connect until both nodes have clients."""
    found: dict[int, list[BlockingPeer]] = {}
    for _ in range(500):
        peer = connect_blocking(url)
        found.setdefault(ask(peer), []).append(peer)
        if len(found) == 2:
            return found
    raise AssertionError(f"one node took 500 clients: {found.keys()}")


def ask(peer: BlockingPeer) -> int:
    return int(peer.request_response(b"", timeout=100).data)


def close(peers: dict[int, list[BlockingPeer]]) -> None:
    for each in peers.values():
        for peer in each:
            peer.close()


def until(probe: str, state: str, restarts: int) -> dict[str, Any]:
    """Look at the health until the server is in a state and its nodes have restarted so often, or oftener."""
    while True:
        _, facts = health(probe)
        if facts["state"] == state and sum(node["restarts"] for node in facts["nodes"]) >= restarts:
            return facts


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def levada(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_one_app_has_one_house_and_the_same_durable_actors_alone_and_on_nodes(start: Start, folder: Path) -> None:
    """Used before the app's ``yield``. Nothing is lost in a rolling restart under load, nor with a node that is killed."""
    (folder / "shared.py").write_text(SHARED)
    asked = 0

    def call(url: str) -> tuple[int, int, int]:
        """Give a command with an id over a new connection, again if its node ends, as a client of a server has to."""
        nonlocal asked
        asked += 1
        while True:
            try:
                with connect_blocking(url) as peer:
                    pid, house, paid = peer.request_response(f"order {asked}".encode(), timeout=60).data.split()
                    return int(pid), int(house), int(paid)
            except (ConnectionLost, RequestFailed):
                pass  # its node was told to leave, or was killed

    for options in ((), ("--nodes", "2", "--health", "127.0.0.1:0")):
        server = start("shared:app", *options)
        probe = server.told("HEALTH ") if options else ""
        url = server.told("SERVING ")
        found = [call(url) for _ in range(30)]
        assert len({pid for pid, _, _ in found}) == (2 if options else 1)
        houses = [house for _, house, _ in found]
        assert houses == [*range(houses[0], houses[0] + 30)]
        assert houses[0] == (3 if options else 2)  # each node has asked before its yield
        if not options:
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait() == 0
            continue
        with subprocess.Popen([*LEVADA, "nodes", "restart"], stdout=subprocess.DEVNULL) as restarting:
            while restarting.poll() is None:
                found.append(call(url))
        assert restarting.returncode == 0
        os.kill(until(probe, "serving", 2)["nodes"][0]["pid"], signal.SIGKILL)
        found += [call(url) for _ in range(20)]
        assert [paid for _, _, paid in found] == [*range(31, 31 + len(found))]


def test_new_code_whose_message_classes_have_grown_runs_beside_the_old_code(
    start: Start, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each node reads the fields that its code has, also of what came by way of the server, whose code is the oldest."""
    old, new = "Job(text={!r})".format, "Job(text={!r}, note={!r})".format

    def say(node: str, on: str) -> list[str]:
        while True:
            with connect_blocking(url) as peer:
                name, *said = peer.request_response(on.encode(), timeout=60).data.decode().split("; ")
                if name == node:
                    return said

    def edit(before: str, after: str) -> None:
        code = (folder / "growing.py").read_text()
        assert before in code
        (folder / "growing.py").write_text(code.replace(before, after))

    (folder / "growing.py").write_text(GROWING)
    server = start("growing:app", "--nodes", "2", "--health", "127.0.0.1:0")
    probe, url = (server.told(beginning) for beginning in ("HEALTH ", "SERVING "))
    said = f"{old('house')} {old('last')}"
    assert say("n0", "n1") == [f"{old('first')} {old('next')}", said]
    edit("    text: str\n", "    text: str\n    note: str = ''\n")
    edit("Job(text)", "Job(text, 'noted')")
    os.kill(until(probe, "serving", 0)["nodes"][0]["pid"], signal.SIGKILL)
    until(probe, "serving", 1)
    assert say("n0", "n0")[0] == f"{new('first', 'noted')} {new('next', 'noted')}"
    assert say("n0", "n1")[0] == f"{old('first')} {old('next')}"
    assert say("n1", "n0")[0] == f"{new('first', '')} {new('next', '')}"
    code, out, _ = levada(capsys, "nodes", "restart")
    assert (code, len(out.splitlines())) == (0, 2)
    assert say("n1", "n0") == [
        f"{new('first', 'noted')} {new('next', 'noted')}",
        f"{new('house', 'noted')} {new('last', 'noted')}",
    ]
    edit("    text: str\n", "    text: int | str\n")
    code, _, complaint = levada(capsys, "nodes", "restart")
    assert code == 1
    assert (
        "n0 does not serve again, the others are as they were: n0 has another version of a message class" in complaint
    )
    assert "growing.Job: text: str in the driver, text: int | str in n0" in complaint
    # The refused node has not started its app, which would take clients that it then cuts off.
    assert Counter((folder / "starts").read_text().split()) == {"n0": 3, "n1": 2}
    assert say("n1", "n1")[0] == f"{new('first', 'noted')} {new('next', 'noted')}"


def test_a_killed_node_takes_its_own_clients_with_it_and_is_replaced(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clients of the other node notice nothing, new clients are served, and so it goes on with both nodes."""
    server = start("handlers:answer", "--url", ANY, "--nodes", "2", "--health", "127.0.0.1:0", "--dashboard")
    probe, browsed, url = (server.told(beginning) for beginning in ("HEALTH ", "DASHBOARD ", "SERVING "))
    with urllib.request.urlopen(browsed.partition("#")[0], timeout=250) as answer:
        assert answer.status == 200
    status, facts = health(probe)
    assert (status, facts["state"], facts["urls"]) == (200, "serving", [url])
    nodes = {node["name"]: node for node in facts["nodes"]}
    assert nodes.keys() == {"n0", "n1"}
    assert facts["actors"] == sum(node["actors"] for node in nodes.values()) > 0
    peers = peers_of_both(url)
    with urllib.request.urlopen(f"{probe}metrics", timeout=250) as answer:
        text = answer.read().decode()
    for node in ("n0", "n1"):  # one scrape tells of all of them
        assert f'levada_node_up{{node="{node}"}} 1.0' in text
        assert re.search(rf'levada_connections_opened_total{{node="{node}",protocol="rsocket",side="server"}} \d', text)
    killed, other = nodes["n0"]["pid"], nodes["n1"]["pid"]
    assert peers.keys() == {killed, other}
    stop, answered, failed = threading.Event(), Counter[int](), list[Exception]()

    def load(peer: BlockingPeer) -> None:
        try:
            while not stop.is_set():
                answered[ask(peer)] += 1
        except Exception as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    threads = [threading.Thread(target=load, args=(peer,)) for each in peers.values() for peer in each]
    for thread in threads:
        thread.start()
    os.kill(killed, signal.SIGKILL)
    for _ in range(20):
        with connect_blocking(url) as peer:
            assert ask(peer) != killed
    assert "WARNING levada.actors.nodes: n0 was killed by SIGKILL" in server.says()
    facts = until(probe, "serving", 1)
    assert f"NODE n0 up pid {facts['nodes'][0]['pid']}" in server.says()
    stop.set()
    for thread in threads:
        thread.join()
    assert [type(error) for error in failed] == [ConnectionLost] * len(peers[killed])
    assert answered[other] > 20
    close(peers)
    both = peers_of_both(url)
    assert killed not in both
    close(both)

    code, out, _ = levada(capsys, "nodes", "ls")
    assert code == 0
    assert [line.split()[:4] for line in out.splitlines()] == [
        ["name", "state", "pid", "restarts"],
        ["n0", "up", str(facts["nodes"][0]["pid"]), "1"],
        ["n1", "up", str(other), "0"],
    ]
    code, out, _ = levada(capsys, "top", "--once")
    assert code == 0
    assert "nodes: 2 up" in out
    assert [line.split()[0] for line in out.splitlines() if " node " in line] == ["n0", "n1"]
    code, out, _ = levada(capsys, "top", "--pid", str(server.process.pid), "--once", "--json")
    snapshot = json.loads(out)
    assert [(node["name"], node["snapshot"]["pid"]) for node in snapshot["nodes"]] == [
        ("n0", facts["nodes"][0]["pid"]),
        ("n1", other),
    ]
    os.kill(other, signal.SIGSTOP)  # as if it computed
    _, out, _ = levada(capsys, "top", "--once")
    (silent,) = [line for line in out.splitlines() if line.startswith("n1")]
    assert silent.endswith("did not answer Look in 1 s")
    facts = until(probe, "degraded", 1)
    assert [node["actors"] is None for node in facts["nodes"]] == [False, True]
    os.kill(other, signal.SIGCONT)
    until(probe, "serving", 1)
    server.signal(signal.SIGTERM)
    assert server.ends() == (0, "")
    code, _, said = levada(capsys, "nodes", "ls")
    assert (code, said) == (2, "levada: no 'levada serve --nodes' of yours is running\n")


def test_a_drain_answers_what_was_asked(start: Start) -> None:
    server = start("handlers:answer", "--url", ANY, "--nodes", "2", "--drain-timeout", "100")
    url = server.told("SERVING ")
    peers = peers_of_both(url)
    everyone = [(pid, peer) for pid, each in peers.items() for peer in each]
    asked = [(pid, peer.start_request(b"", route="slow")) for pid, peer in everyone]
    for _ in asked:
        assert server.line() in ("n0: asked", "n1: asked")
    server.signal(signal.SIGTERM)
    assert [int(future.result(50).data) for _, future in asked] == [pid for pid, _ in asked]
    close(peers)
    assert server.ends() == (0, "")
    with pytest.raises(ConnectionLost, match="refused"):
        connect_blocking(url)


def test_time_is_up(start: Start) -> None:
    server = start("handlers:answer", "--url", ANY, "--nodes", "2", "--drain-timeout", "0.2", "--log", "error")
    with connect_blocking(server.told("SERVING ")) as peer:
        peer.start_request(b"", route="never")
        node, _, said = server.line().partition(": ")
        assert (node in ("n0", "n1"), said) == (True, "asked")
        server.signal(signal.SIGTERM)
        code, text = server.ends()
        late = re.fullmatch(r"levada: open work on (.*) was cut off \(--drain-timeout 0\.2\)\n", text)
        assert late is not None
        assert (code, node in late[1].split(", ")) == (1, True)  # a busy machine may need longer for the other one, too


def test_a_second_signal_ends_all_at_once(start: Start) -> None:
    options = ("--url", ANY, "--nodes", "2", "--health", "127.0.0.1:0", "--drain-timeout", "100")
    server = start("handlers:answer", *options)
    probe, url = server.told("HEALTH "), server.told("SERVING ")
    with connect_blocking(url) as peer:
        peer.start_request(b"", route="never")
        assert server.line() in ("n0: asked", "n1: asked")
        server.signal(signal.SIGTERM)
        until(probe, "draining", 0)
        assert health(probe)[0] == 503
        server.signal(signal.SIGTERM)
        assert server.ends() == (1, "levada: open work was cut off (--drain-timeout 100)\n")


def test_nodes_restart_one_after_another_while_clients_come(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """No client is refused, and each request is answered; a client that a node hung up on or rejected tries again."""
    server = start("handlers:answer", "--url", ANY, "--nodes", "2", "--health", "127.0.0.1:0")
    probe, url = server.told("HEALTH "), server.told("SERVING ")
    before = {node["pid"] for node in health(probe)[1]["nodes"]}
    stop, answered, refused = threading.Event(), Counter[int](), list[str]()

    def come_and_go() -> None:
        while not stop.is_set():
            try:
                with connect_blocking(url) as peer:
                    answered[ask(peer)] += 1
            except RequestRejected:  # it has crossed the drain of the node, and is not done
                pass
            except CarrierError as error:
                if "refused" in str(error):
                    refused.append(str(error))

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    code, out, _ = levada(capsys, "nodes", "restart")
    after = {node["pid"] for node in until(probe, "serving", 2)["nodes"]}
    while not after <= answered.keys():
        pass
    stop.set()
    for thread in threads:
        thread.join()
    assert (code, [line.rpartition(" ")[0] for line in out.splitlines()]) == (
        0,
        ["n0 serves again as process", "n1 serves again as process"],
    )
    assert {int(line.rpartition(" ")[2]) for line in out.splitlines()} == after
    assert not before & after
    assert refused == []
    assert answered.keys() <= before | after
    server.signal(signal.SIGTERM)
    assert server.ends()[0] == 0


def test_the_end_comes_while_a_node_restarts(start: Start, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The app gets no sockets any more, and that is no error: the node ends as it should."""
    (folder / "waiting.py").write_text(WAITING)
    server = start("waiting:held", "--nodes", "2", "--health", "127.0.0.1:0")
    probe = server.told("HEALTH ")
    server.told("SERVING ")
    os.mkfifo(folder / "gate")
    os.kill(health(probe)[1]["nodes"][0]["pid"], signal.SIGKILL)
    assert server.line() == "n0: waits"
    _, out, _ = levada(capsys, "nodes", "ls", "--json")
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["starting", "up"]
    server.signal(signal.SIGTERM)
    until(probe, "draining", 1)
    _, out, _ = levada(capsys, "nodes", "ls", "--json")
    assert json.loads(out.splitlines()[0])["state"] in ("draining", "down")
    with (folder / "gate").open("w"):
        pass
    code, said = server.ends()
    assert (code, [line for line in said.splitlines() if "SIGKILL" not in line and "NODE " not in line]) == (0, [])


RELOADED = """
from levada.actors.rsocket import Request, serve
import trio
{first}

async def answer(request: Request) -> bytes:
    return {answer}

async def app(system):
    {before}
    async with serve(system, "rsocket+tcp://127.0.0.1:0", answer) as listener:
        yield listener
"""


def test_changed_code_is_loaded_and_clients_wait_meanwhile(start: Start, folder: Path) -> None:
    """Also while code that cannot start waits for its repair; and a change, or Ctrl-C, ends a start that hangs."""
    pytest.importorskip("watchfiles")

    def write(*, answer: str = "b'old'", first: str = "", before: str = "pass") -> None:
        (folder / "new").write_text(RELOADED.format(answer=answer, first=first, before=before))
        (folder / "new").replace(folder / "reloaded.py")

    def answer(url: str) -> bytes:
        with connect_blocking(url) as peer:
            return peer.request_response(b"", timeout=100).data

    def told() -> str:
        """What the server says next, without its log and tracebacks."""
        while not (line := server.says()).startswith("levada: "):
            assert line
        return line.removeprefix("levada: ").rstrip("\n")

    write()
    server = start("reloaded:app", "--reload", "--drain-timeout", "0.3")
    url = server.told("SERVING ")
    assert answer(url) == b"old"

    write(first="1 / 0")
    assert told().startswith("module reloaded cannot be imported: ZeroDivisionError: division by zero (reloaded.py:")
    assert told() == "reloaded.py changed, and the new code cannot be imported, so nothing is restarted"
    assert answer(url) == b"old"

    write(before="raise RuntimeError('no database')")
    assert told() == "reloaded.py changed: restarting"
    assert told().startswith("n0 has failed: RuntimeError: no database (reloaded.py:")
    assert told() == "the next change starts it again"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answer, url)  # no node accepts it, and the port is open
        write(answer="b'new'")
        assert told() == "reloaded.py changed: restarting"
        assert told() == "the new code serves"
        assert waiting.result(250) == b"new"

    write(before="print('hangs', flush=True); await trio.sleep_forever()")
    assert told() == "reloaded.py changed: restarting"
    assert server.line() == "n0: hangs"
    write(before="print('hangs again', flush=True); await trio.sleep_forever()")
    assert told() == "reloaded.py changed: restarting"
    assert server.line() == "n0: hangs again"
    server.signal(signal.SIGINT)
    code, said = server.ends()
    assert (code, said.splitlines()[-1]) == (130, "levada: interrupted")


@pytest.mark.release
def test_a_node_that_cannot_start_again_stays_down_and_the_others_go_on(
    start: Start, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start("handlers:answer", "--url", ANY, "--nodes", "2", "--health", "127.0.0.1:0")
    probe, url = server.told("HEALTH "), server.told("SERVING ")
    (folder / "handlers.py").write_text("1 / 0")
    code, out, said = levada(capsys, "nodes", "restart")
    assert (code, out) == (1, "")
    assert (
        "n0 does not serve again, the others are as they were: n0 has failed: module handlers cannot be imported: ZeroDivisionError"
        in said
    )
    facts = until(probe, "degraded", 0)
    while [node["state"] for node in facts["nodes"]] != ["down", "up"]:
        facts = until(probe, "degraded", 0)
    assert health(probe)[0] == 200
    with connect_blocking(url) as peer:
        assert ask(peer) == facts["nodes"][1]["pid"]
    (folder / "handlers.py").write_text(HANDLERS)
    assert levada(capsys, "nodes", "restart")[0] == 0
    assert until(probe, "serving", 3)["nodes"][0]["state"] == "up"
    server.signal(signal.SIGTERM)
    assert server.ends()[0] == 0


async def test_every_carrier_reaches_all_nodes_and_files_are_read_again(start: Start, folder: Path) -> None:
    made = make_certificates(folder / "tls")
    urls = (ANY, f"rsocket+unix://{folder}/s", "rsocket+ws://127.0.0.1:0/desk", "rsocket+tls://localhost:0")
    options = [part for url in urls for part in ("--url", url)]
    files = ("--cert", str(made.certificate), "--key", str(made.key))
    server = start("handlers:answer", *options, *files, "--nodes", "2")
    served = [server.told("SERVING ") for _ in urls]
    assert served[1] == urls[1]

    async def pids(url: str, **settings: Any) -> set[int]:
        found: set[int] = set()
        async with ActorSystem() as system:
            for _ in range(500):
                async with connect(system, url, config=ClientConfig(**settings)) as peer:
                    found.add(int((await peer.request_response(b"")).data))
                if len(found) == 2:
                    break
        return found

    trusting = {"carrier": TlsConfig(ca=made.ca)}
    both = await pids(served[0])
    assert len(both) == 2
    assert [await pids(url, **(trusting if "tls" in url else {})) for url in served[1:]] == [both] * 3

    new = make_certificates(folder / "tls")
    server.signal(signal.SIGHUP)
    told = {server.says() for _ in range(8)}
    assert told == {f"levada: {name}: {url} has read its files again\n" for name in ("n0", "n1") for url in served}
    assert await pids(served[3], carrier=TlsConfig(ca=new.ca)) == both
    new.certificate.write_text("nothing of the kind")
    server.signal(signal.SIGHUP)
    told = {server.says() for _ in range(8)}
    for name in ("n0", "n1"):
        assert any(line.startswith(f"levada: {name}: {served[3]} keeps its old files: cannot use") for line in told)
    server.signal(signal.SIGINT)
    assert server.ends() == (130, "levada: interrupted\n")
    assert not (folder / "s").exists()


@pytest.mark.release
async def test_one_node_serves_quic_and_another_one_after_it(start: Start, folder: Path) -> None:
    made = make_certificates(folder / "tls")
    options = ("--url", "rsocket+quic://localhost:0", "--cert", str(made.certificate), "--key", str(made.key))
    server = start("handlers:answer", *options, "--nodes", "2")
    url = server.told("SERVING ")
    config = ClientConfig(carrier=protocol_quic(made.ca))

    async def pid(system: ActorSystem) -> int:
        async with connect(system, url, config=config) as peer:
            return int((await peer.request_response(b"")).data)

    async with ActorSystem() as system:
        first = await pid(system)
        assert {await pid(system) for _ in range(4)} == {first}
        os.kill(first, signal.SIGKILL)
        with trio.fail_after(250):
            while (second := await pid(system)) == first:
                pass
        assert {await pid(system) for _ in range(4)} == {second}
    server.signal(signal.SIGTERM)
    assert server.ends()[0] == 0


def protocol_quic(ca: Path) -> Any:
    from levada.transports.quic import QuicConfig

    return QuicConfig(ca=ca)


def test_one_node_is_enough_and_ends_with_its_driver(start: Start) -> None:
    server = start("handlers:answer", "--url", ANY, "--nodes", "1")
    url = server.told("SERVING ")
    with connect_blocking(url) as peer:
        node = ask(peer)
        assert node != server.process.pid
        server.process.kill()
        with pytest.raises(CarrierError):
            while True:
                ask(peer)
    while runs(node):
        pass
    with pytest.raises(ConnectionLost, match="refused"):
        connect_blocking(url)


@pytest.mark.parametrize("count", ["0", "257", "-1", "two", "1.5"])
def test_a_number_of_nodes_that_cannot_be(capsys: pytest.CaptureFixture[str], count: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "handlers:answer", f"--nodes={count}"])
    assert ended.value.code == 2
    assert "expected 1 to 256, or 'cores', got " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["handlers:fails_in_one"], "levada: n1 has failed: RuntimeError: not here (handlers.py:"),
        (["handlers:different"], "levada: n0 serves rsocket+tcp://127.0.0.1:"),
    ],
)
def test_an_app_that_cannot_start(start: Start, arguments: list[str], complaint: str) -> None:
    server = start(*arguments, "--nodes", "2")
    code, said = server.ends()
    assert code == 2
    assert complaint in said.splitlines()[-1], said
    assert ("Traceback" in said) == ("RuntimeError" in said)


def test_an_app_that_fails_at_its_end(start: Start) -> None:
    server = start("handlers:fails_at_its_end", "--nodes", "2", "--health", "127.0.0.1:0")
    until(server.told("HEALTH "), "serving", 0)
    server.signal(signal.SIGTERM)
    code, said = server.ends()
    assert code == 2
    wrong = "ConfigurationError: handlers:fails_at_its_end yields more than once; an app is an async generator function"
    assert said.splitlines()[-1].startswith(f"levada: n1 has failed: {wrong}")


def test_an_address_in_use(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = start("handlers:answer", "--url", f"rsocket+tcp://127.0.0.1:{port}", "--nodes", "2")
        code, said = server.ends()
    assert code == 2
    assert "Address already in use" in said
    assert "Traceback" not in said
