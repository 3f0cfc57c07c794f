"""What a dashboard costs the program that it shows: ``levada bench dashboard``.

A browser's WebSocket runs in a thread of its own, and only the processor time of the program's thread counts: nanoseconds for each
microsecond of watching, so 20 are 2 % of a core.  Unwatched, the row of a `tell` is compared with its own budget.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from time import thread_time
from typing import Any

import trio

from levada.actors.dashboard import Dashboard, serve_dashboard
from levada.framework import Actor, ActorSystem, Asks, handles, message
from levada.transports.carriers import websocket
from levada.transports.carriers.websocket_config import WebSocketConfig

from ._levada import Sink, flood, in_system
from ._measure import Contender, Measure, Progress, Report, Workload, measure

__all__ = ["WORKLOADS", "run"]

FIRST = 2_000_000
"""Microseconds before the measurement: the page is there, and a search has seen all actors once."""
TREE = {"page": "actors", "open": ["/hall"], "first": 0, "count": 60}
MOST = {**TREE, "count": 200}
SEARCH = {"page": "actors", "open": [], "search": "$77", "first": 0, "count": 60}


@message
class Nothing:
    pass


class Idler(Actor[Nothing]):
    @handles
    def nothing(self, m: Nothing) -> None:
        pass


@message
class Ready(Asks[None]):
    pass


class Hall(Actor[Ready]):
    idlers: int

    async def started(self) -> None:
        for number in range(self.idlers):
            self.spawn(Idler)
            if not number % 1000:
                await trio.lowlevel.checkpoint()

    @handles
    def ready(self, m: Ready) -> None:
        pass


async def log_in(dashboard: Dashboard) -> str:
    """Log in as a browser does, and return the cookie."""
    host = dashboard.url.removeprefix("http://").rstrip("/")
    body = json.dumps({"token": dashboard.login_url().partition("#token=")[2]})
    name, _, port = host.partition(":")
    async with await trio.open_tcp_stream(name, int(port)) as stream:
        head = f"POST /login HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nContent-Length: {len(body)}\r\n\r\n"
        await stream.send_all((head + body).encode())
        answer = b"".join([part async for part in stream]).decode()
    return (
        answer.lower().partition("set-cookie: ")[2]
        and answer[answer.lower().index("set-cookie: ") + 12 :].partition(";")[0]
    )


def look(url: str, cookie: str, view: dict[str, Any], micros: int) -> None:
    """Be a browser, in a thread."""

    async def main() -> None:
        host = url.removeprefix("http://").rstrip("/")
        config = WebSocketConfig(headers=(("Cookie", cookie), ("Origin", f"http://{host}")))
        async with websocket.dial(f"ws://{host}/socket", config) as socket:
            await socket.send(json.dumps({"view": view}).encode())
            with trio.move_on_after(micros / 1e6):
                while True:
                    json.loads(await socket.receive())

    trio.run(main)


def watched(actors: int, view: dict[str, Any]) -> Callable[[ActorSystem, int], Awaitable[float]]:
    """Make a measure: the program's processor time while a browser looks for `n` microseconds."""

    async def work(system: ActorSystem, n: int) -> float:
        hall = system.spawn(Hall, actors, name="hall")
        async with serve_dashboard(system) as dashboard, trio.open_nursery() as nursery:
            await hall.ask(Ready(), timeout=None)
            nursery.start_soon(trio.to_thread.run_sync, look, dashboard.url, await log_in(dashboard), view, FIRST + n)
            await trio.sleep(FIRST / 1e6)
            began = thread_time()
            await trio.sleep(n / 1e6)
            spent = thread_time() - began
        hall.kill()
        await hall.terminated()
        return spent

    return work


async def unwatched(system: ActorSystem, n: int) -> float:
    """Tell an actor while a dashboard is served, and no browser looks."""
    async with serve_dashboard(system):
        await flood(system, 1_000, system.spawn(Sink))  # the dashboard's tasks begin
        return await flood(system, n, system.spawn(Sink))


WORKLOADS = (
    Workload(key="none", title="no browser: tell + handle", n=100_000, budget=5),
    Workload(key="ten", title="10 actors, per µs watched", n=3_000_000, base=None, budget=20),
    Workload(key="many", title="100,000 actors, per µs watched", n=3_000_000, base=None, budget=20, once=True),
    Workload(
        key="rows", title="100,000 actors, 200 rows, per µs watched", n=3_000_000, base=None, budget=20, once=True
    ),
    Workload(
        key="search", title="100,000 actors, a search, per µs watched", n=3_000_000, base=None, budget=20, once=True
    ),
)

RUNS: dict[str, Measure] = {
    "none": in_system(unwatched),
    "ten": in_system(watched(10, TREE)),
    "many": in_system(watched(100_000, TREE)),
    "rows": in_system(watched(100_000, MOST)),
    "search": in_system(watched(100_000, SEARCH)),
}


def run(*, rounds: int, quick: bool, only: str, progress: Progress) -> Report:
    """Measure all workloads whose title contains `only`."""
    workloads = [workload for workload in WORKLOADS if only in workload.title]
    contender = Contender(name="levada", remark="this checkout", runs=RUNS)
    return measure(workloads, [contender], rounds=rounds, quick=quick, progress=progress)
