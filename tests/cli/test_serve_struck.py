"""``levada serve --nodes 3`` under the load of HTTP, RSocket and Aqueduct clients, while its nodes are killed, stopped and restarted.

The seed is printed, and chosen with ``LEVADA_SEED``.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.actors.nodes.processes import ROOT, processes_of
from tests.cli.struck_app import Follow, Pay, Take
from tests.cli.test_serve import LEVADA

from levada.actors import aqueduct, rsocket
from levada.actors.cli.servers import console_of
from levada.actors.console import connect_console
from levada.actors.rsocket import ClientConfig
from levada.framework import ActorSystem, TerminalState, channel
from levada.framework.errors import CarrierError, HandleMoved, LevadaError
from levada.transports.rsocket import CoreConfig, LeaseGrant

pytestmark = [pytest.mark.loopback, pytest.mark.release, pytest.mark.timeout(3000)]

CAUSES = re.compile(
    r"connection|Connection|lost|reset|closed|closing|draining|going away|not started|has stopped|ended|no listener|refused|shut|rejected"
    r"|session|outcome|no answer|was not answered|timed out|no reply|within|its task was cancelled"
)
"""What the text of a failure says, at least. A task that is cancelled just when its own sleep is over does not learn that its actor stops."""


class Server:
    """The server."""

    def __init__(self, process: trio.Process, urls: dict[str, str], folder: Path) -> None:
        self.process = process
        self.urls = urls
        self.folder = folder
        self.console = str(console_of(process.pid, nodes=True))

    async def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes, as ``levada nodes ls`` shows them."""
        async with connect_console(self.console) as console:
            found: list[dict[str, Any]] = (await console.command("nodes"))["nodes"]
            return found

    async def restart(self, node: str) -> None:
        """Restart a node, as ``levada nodes restart`` does with one after another."""
        async with connect_console(self.console) as console:
            await console.command("restart", timeout=float("inf"), node=node)

    async def until_up(self) -> None:
        """Wait until all nodes are up. A node that was struck in a restart by command stays down until the next command."""
        while down := [node for node in await self.nodes() if node["state"] != "up"]:
            for node in down:
                if node["state"] == "down" and node["starts_in"] is None:
                    try:
                        await self.restart(node["name"])
                    except CarrierError:
                        pass
            await trio.sleep(0.2)


@asynccontextmanager
async def serving(folder: Path, marker: str) -> AsyncIterator[Server]:
    """Serve the app; check that the server ends in order and leaves no process."""
    path = os.pathsep.join([str(ROOT), *(each for each in sys.path if each)])
    environment = {
        **os.environ,
        "STRUCK": str(folder),
        "LEVADA_TEST": marker.partition("=")[2],
        "PYTHONPATH": path,
    }
    with (folder / "log").open("wb") as log:
        process = await trio.lowlevel.open_process(
            [*LEVADA, "serve", "tests.cli.struck_app:app", "--nodes", "3"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            assert process.stdout is not None
            said = b""
            while said.count(b"SERVING ") < 3 or not said.endswith(b"\n"):
                part = await process.stdout.receive_some()
                assert part, (folder / "log").read_text()
                said += part
            urls = [line.split()[1] for line in said.decode().splitlines() if line.startswith("SERVING ")]
            yield Server(process, {url.partition(":")[0].partition("+")[0]: url for url in urls}, folder)
            process.terminate()
            assert await process.wait() == 0, (folder / "log").read_text()[-4000:]
            assert processes_of(marker) == []
        finally:
            process.kill()


@attrs.define
class Link:
    """A connection of Aqueduct, on which one question at a time is asked."""

    peer: Any = None
    house: Any = None
    desk: Any = None
    connected: trio.Event = attrs.field(factory=trio.Event)
    answered: trio.Event = attrs.field(factory=trio.Event)
    """Of the newest question."""

    def __attrs_post_init__(self) -> None:
        self.answered.set()

    @property
    def drains(self) -> bool:
        """Whether its server has closed the entrypoint; another link follows."""
        return self.peer.entry.state is not TerminalState.OPEN


class Load:
    """Clients of all three protocols. Each number is asked once; an order is given again, with its id, until it is paid."""

    def __init__(self, server: Server, system: ActorSystem) -> None:
        self.server = server
        self.system = system
        self.taken: set[int] = set()
        self.paid: set[str] = set()
        self.sent: set[str] = set()
        self.failures: Counter[str] = Counter()
        self.followed = 0
        self.over = False
        self._number = 0

    def failed(self, protocol: str, error: BaseException | str) -> None:
        """Note a failure. It has to say why."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.failures[f"{protocol}: {re.sub(r'[0-9]+', 'N', text)[:300]}"] += 1

    async def work(self, protocol: str, worker: int, get: Callable[[str], Awaitable[Any]]) -> None:
        """Use the singleton and the durable actors in turn."""
        while not self.over:
            number, self._number = self._number, self._number + 1
            order = f"{protocol}-{worker}-{number}"
            while True:
                try:
                    if number % 2:
                        assert int(await get(f"/take/{number}")) == number
                        self.taken.add(number)
                    else:
                        self.sent.add(order)
                        await get(f"/pay/{order}")
                        self.paid.add(order)
                    break
                except (LevadaError, OSError, trio.BrokenResourceError) as error:
                    self.failed(protocol, error)
                    if number % 2:
                        break
                    await trio.sleep(0.05)
            await trio.sleep(0.005)

    async def http(self, worker: int) -> None:
        """A new connection for each request."""
        address = self.server.urls["http"].removeprefix("http://").split(":")

        async def get(path: str) -> str:
            async with await trio.open_tcp_stream(address[0], int(address[1])) as stream:
                await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                answer = b""
                while part := await stream.receive_some():
                    answer += part
            head, _, body = answer.decode().partition("\r\n\r\n")
            if not head:
                raise ConnectionResetError("the connection was closed without an answer")
            if " 200 " not in head:
                raise LevadaError(body)
            return body

        await self.work("http", worker, get)

    async def rsocket(self, worker: int) -> None:
        """One client that connects again by itself."""
        await self.ask_over_rsocket("rsocket", worker, ClientConfig())

    async def leasing(self, worker: int) -> None:
        """The same; it sends no more requests than the server's leases allow."""
        await self.ask_over_rsocket("leasing", worker, ClientConfig(lease=LeaseGrant(ttl=60, n=1000)))

    async def resuming(self, worker: int) -> None:
        """The same, in a session that outlives its connection while its node does."""
        await self.ask_over_rsocket("resuming", worker, ClientConfig(core=CoreConfig(resume=True)))

    async def ask_over_rsocket(self, name: str, worker: int, config: ClientConfig) -> None:
        """Connect, and again when the connection or the session is lost."""
        again = rsocket.Reconnect(initial_backoff=0.05, max_backoff=0.5)
        async with rsocket.connect(self.system, self.server.urls["rsocket"], config=config, reconnect=again) as peer:

            async def get(path: str) -> bytes:
                while True:
                    try:
                        return (await peer.request_response(path.encode())).data
                    except rsocket.RequestFailed as error:
                        if not error.retryable:
                            raise
                        await trio.sleep(0.01)

            await self.work(name, worker, get)

    async def aqueduct(self, worker: int) -> None:
        """Questions go to a new connection when the server of the one before has closed its entrypoint: it drains."""
        link = Link()

        async def hold(task_status: trio.TaskStatus[None]) -> None:
            nonlocal link
            mine = link
            try:
                async with aqueduct.connect(self.system, self.server.urls["aqueduct"], Follow) as peer:
                    mine.peer = peer
                    mine.house, mine.desk = await peer.lookup("House"), await peer.lookup("desk")
                    mine.connected.set()
                    await peer.entry.terminated()
                    link = Link()
                    task_status.started()
                    await mine.answered.wait()
            except (LevadaError, OSError) as error:
                self.failed("aqueduct connection", error)
                if link is mine and mine.connected.is_set():
                    link = Link()

        async def keep() -> None:
            async with trio.open_nursery() as connections:
                while True:
                    try:
                        await connections.start(hold)
                    except RuntimeError:  # it has ended before
                        await trio.sleep(0.05)

        async def get(path: str) -> int:
            while not link.connected.is_set() or link.drains:
                await link.connected.wait()
            mine, (_, what, value) = link, path.split("/")
            mine.answered = trio.Event()
            try:
                if what == "take":
                    answer: int = await mine.house.ask(Take(int(value)), timeout=60)
                else:
                    answer = await mine.desk.ask(Pay(value), timeout=60)
            finally:
                mine.answered.set()
            return answer

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep)
            await self.work("aqueduct", worker, get)
            nursery.cancel_scope.cancel()

    async def follow(self) -> None:
        """Follow the singleton over a channel, from 0 again after its end."""
        while not self.over:
            sender, numbers = channel(int)
            try:
                async with aqueduct.connect(self.system, self.server.urls["aqueduct"], Follow) as peer:
                    await peer.send(Follow(sender))
                    wanted = 0
                    async for number in numbers:
                        assert number == wanted
                        wanted += 1
                        self.followed += 1
                        if self.over:
                            return
            except (LevadaError, OSError) as error:
                self.failed("follower", error)
                await trio.sleep(0.05)
            finally:
                numbers.close()
                with suppress(HandleMoved):
                    sender.cancel()

    async def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run the clients while the body runs, and check what was done."""
        async with trio.open_nursery() as nursery:
            for worker in range(2):
                for client in (self.http, self.rsocket, self.leasing, self.resuming, self.aqueduct):
                    nursery.start_soon(client, worker)
            nursery.start_soon(self.follow)
            await body()
            self.over = True
        for text, count in sorted(self.failures.items()):
            print(f"{count} times: {text}")
        handled = (self.server.folder / "handled").read_text().split()
        print(f"{len(self.taken)} of {self._number // 2} numbers, {len(self.paid)} orders, {self.followed} followed")
        assert "two" not in handled
        assert len(handled) == len(set(handled)), "a number was handled twice"
        assert self.taken <= {int(number) for number in handled}
        orders: list[str] = []
        async with rsocket.connect(self.system, self.server.urls["rsocket"], reconnect=rsocket.Reconnect()) as peer:
            for till in range(7):
                orders += (await peer.request_response(f"/orders/{till}".encode())).data.decode().split()
        assert sorted(orders) == sorted(self.paid)
        assert self.paid == self.sent
        for text in self.failures:
            assert CAUSES.search(text), text


@pytest.fixture
def chance() -> random.Random:
    """Randomness with a seed that is shown when the test fails."""
    seed = int(os.environ.get("LEVADA_SEED", "0")) or random.randrange(1, 1 << 32)
    print(f"LEVADA_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(autouse=True)
def _console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


async def strike(server: Server, chance: random.Random) -> str:
    """Kill or stop a node that is up, or restart one by command."""
    how = chance.choice(("kill", "kill", "stop", "restart"))
    node = chance.choice(await server.nodes())
    if node["state"] not in ("up", "starting", "draining") or not node["pid"]:
        return f"spares {node['name']}"
    if how == "restart":
        try:
            await server.restart(node["name"])
        except CarrierError as error:
            return f"restart {node['name']}: {error}"
    else:
        try:
            os.kill(node["pid"], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            if how == "stop":
                await trio.sleep(chance.choice((0.2, 1.0, 3.0, 12.0)))
                os.kill(node["pid"], signal.SIGCONT)
        except ProcessLookupError:
            pass  # it has ended by itself
    return f"{how} {node['name']}"


async def test_nothing_acknowledged_is_lost_or_done_twice_while_nodes_are_struck_a_hundred_times(
    chance: random.Random, tmp_path: Path
) -> None:
    async with ActorSystem("clients") as system, serving(tmp_path, f"LEVADA_TEST=struck-{os.getpid()}") as server:
        load = Load(server, system)

        async def strikes() -> None:
            for number in range(int(os.environ.get("LEVADA_STRIKES", "100"))):
                await trio.sleep(chance.uniform(0.2, 3.0))
                print(number, await strike(server, chance), len(load.taken), len(load.paid), flush=True)
                if number % 10 == 9:
                    await server.until_up()
            await server.until_up()
            await trio.sleep(2)

        await load.run(strikes)


async def test_three_rolling_restarts_under_load_fail_no_request(tmp_path: Path) -> None:
    async with ActorSystem("clients") as system, serving(tmp_path, f"LEVADA_TEST=rolling-{os.getpid()}") as server:
        load = Load(server, system)

        async def restarts() -> None:
            await trio.sleep(2)
            for _ in range(3):
                for node in await server.nodes():
                    began = trio.current_time()
                    await server.restart(node["name"])
                    print(f"{node['name']} serves again after {trio.current_time() - began:.1f} s", flush=True)
            await trio.sleep(2)

        await load.run(restarts)
    assert [text for text in load.failures if not text.startswith(("follower", "aqueduct connection"))] == []
