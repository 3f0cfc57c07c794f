"""The dashboard's server over sockets: requests and their limits, the WebSocket, and a program that ends and starts again."""

from __future__ import annotations

import json
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.console import serve_console
from levada.actors.dashboard import Dashboard, DashboardConfig, serve_console_dashboard, serve_dashboard
from levada.actors.dashboard.server import MOST_BROWSERS, MOST_CONNECTIONS, PATIENCE
from levada.framework import Actor, ActorSystem, handles, message
from levada.framework.errors import ConnectionLost
from levada.transports.carriers import websocket
from levada.transports.carriers.websocket_config import WebSocketConfig
from levada.transports.carriers.websocket_stream import WebSocketStream

pytestmark = pytest.mark.loopback


@message
class Work:
    pass


class Clerk(Actor[Work]):
    @handles
    def work(self, m: Work) -> None:
        pass


@asynccontextmanager
async def served(config: DashboardConfig | None = None) -> AsyncIterator[tuple[ActorSystem, Dashboard]]:
    async with ActorSystem("town") as system, serve_dashboard(system, config) as dashboard:
        system.spawn(Clerk, name="clerk")
        await wait_all_tasks_blocked()
        yield system, dashboard


def place(dashboard: Dashboard) -> tuple[str, int]:
    host, _, port = dashboard.url.removeprefix("http://").rstrip("/").partition(":")
    return host, int(port)


async def fetch(dashboard: Dashboard, octets: bytes) -> bytes:
    """Send bytes, with the Host header in place of HOST, and return the whole answer."""
    host, port = place(dashboard)
    async with await trio.open_tcp_stream(host, port) as stream:
        await stream.send_all(octets.replace(b"HOST", f"{host}:{port}".encode()))
        answer = b""
        try:
            async for part in stream:
                answer += part
        except trio.BrokenResourceError:
            pass  # the server has cut it off
        return answer


async def log_in(dashboard: Dashboard) -> str:
    body = json.dumps({"token": dashboard.login_url().partition("#token=")[2]}).encode()
    head = f"POST /login HTTP/1.1\r\nHost: HOST\r\nOrigin: http://HOST\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = await fetch(dashboard, head.encode() + body)
    assert answer.startswith(b"HTTP/1.1 204 ")
    line = next(line for line in answer.decode().split("\r\n") if line.lower().startswith("set-cookie: "))
    return line.partition(": ")[2].partition(";")[0]


@asynccontextmanager
async def looking(dashboard: Dashboard, cookie: str) -> AsyncIterator[WebSocketStream]:
    host, port = place(dashboard)
    config = WebSocketConfig(headers=(("Cookie", cookie), ("Origin", f"http://{host}:{port}")), keepalive_interval=None)
    async with websocket.dial(f"ws://{host}:{port}/socket", config) as socket:
        assert isinstance(socket, WebSocketStream)
        yield socket


async def say(socket: WebSocketStream, **members: Any) -> None:
    await socket.send(json.dumps(members).encode())


async def hear(socket: WebSocketStream, kind: str = "view") -> Any:
    while True:
        message = json.loads(await socket.receive())
        if kind in message:
            return message[kind]


async def test_the_page_and_the_login() -> None:
    async with served() as (_, dashboard):
        page = await fetch(dashboard, b"GET / HTTP/1.1\r\nHost: HOST\r\n\r\n")
        assert page.startswith(b"HTTP/1.1 200 ")
        assert b'<script type="module" src="/app.js">' in page
        assert b"Set-Cookie" not in page
        cookie = await log_in(dashboard)
        again = await fetch(dashboard, f"GET /login HTTP/1.1\r\nHost: HOST\r\nCookie: {cookie}\r\n\r\n".encode())
        assert again.startswith(b"HTTP/1.1 204 ")
        head = await fetch(dashboard, b"HEAD / HTTP/1.1\r\nHost: HOST\r\n\r\n")
        assert head.endswith(b"\r\n\r\n")


async def test_browsers_stay_logged_in_if_the_key_is_in_a_file(tmp_path: Path) -> None:
    """Otherwise the key is new at each start, and so is a cookie."""
    file = tmp_path / "key"
    kept = DashboardConfig(key_file=file)
    async with served(kept) as (_, dashboard):
        cookie = await log_in(dashboard)
    assert file.stat().st_mode & 0o777 == 0o600
    value = cookie.partition("=")[2]  # the name of a cookie has the port
    for config, status in ((kept, b"HTTP/1.1 204 "), (None, b"HTTP/1.1 401 ")):
        async with served(config) as (_, dashboard):
            request = f"GET /login HTTP/1.1\r\nHost: HOST\r\nCookie: levada-{place(dashboard)[1]}={value}\r\n\r\n"
            assert (await fetch(dashboard, request.encode())).startswith(status)


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: HOST\r\nHost: HOST\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: HOST\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 431),
        (b"POST /login HTTP/1.1\r\nHost: HOST\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000, 413),
        (b"POST /login HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n1388\r\n" + b"x" * 5000, 413),
        (b"POST /login HTTP/1.1\r\nHost: HOST\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /socket HTTP/1.1\r\nHost: HOST\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n", 403),
        (b"GET /nothing HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    ],
)
async def test_what_is_refused(octets: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "levada.actors.dashboard")
    async with served() as (_, dashboard):
        assert (await fetch(dashboard, octets)).split(b" ")[1] == str(status).encode()
        assert [record for record in caplog.records if record.exc_info] == []
        assert (await fetch(dashboard, b"GET / HTTP/1.1\r\nHost: HOST\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "octets", [b"", b"GET / HT", b"POST /login HTTP/1.1\r\nHost: HOST\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_half_a_request_has_ten_seconds(octets: bytes, autojump_clock: MockClock) -> None:
    async with served() as (_, dashboard):
        begin = trio.current_time()
        assert await fetch(dashboard, octets) == b""
        assert trio.current_time() - begin == pytest.approx(PATIENCE)


async def test_half_requests_make_room_for_the_newest(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as (_, dashboard):
        silent = [await trio.open_tcp_stream(*place(dashboard)) for _ in range(MOST_CONNECTIONS)]
        await wait_all_tasks_blocked(0.01)
        begin = trio.current_time()
        assert (await fetch(dashboard, b"GET / HTTP/1.1\r\nHost: HOST\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert trio.current_time() == begin
        with pytest.raises(trio.BrokenResourceError):
            await silent[0].receive_some()
        for stream in silent:
            await stream.aclose()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("away: its request made room for others")


async def test_a_view_and_its_changes(autojump_clock: MockClock) -> None:
    async with served() as (system, dashboard):
        async with looking(dashboard, await log_in(dashboard)) as socket:
            assert (await hear(socket))["page"] == "none"
            await say(socket, view={"page": "actors", "open": [], "first": 0, "count": 10})
            view = await hear(socket)
            assert [row["path"] for row in view["rows"]] == ["/clerk"]
            clerk = system.lookup("/clerk")
            assert clerk is not None
            for _ in range(3):
                clerk.tell(Work())
            began = trio.current_time()
            assert (await hear(socket))["rows"][0]["handled"] == 3
            assert trio.current_time() - began == pytest.approx(0.5, abs=0.1)
            clerk.kill()
            await wait_all_tasks_blocked()
            clerk.tell(Work())
            assert [each["what"] for each in (await hear(socket))["news"]] == ["dead letter"]
            assert (await hear(socket))["news"] == []
            # Nobody may do anything.
            await say(socket, act="stop", path="/clerk")
            assert "actions are not allowed" in (await hear(socket, "answer"))["refused"]
        await trio.sleep(1)  # the closing of the connection takes its time, which is virtual
        assert system.statistics().actors == 0


@pytest.mark.parametrize(
    "wrong", [b"{", b"[]", b'{"view": 5}', b"[" * 60_000, b"\xff\xfe", b'{"view":{"count":1000,"open":[]}}']
)
async def test_what_is_no_message_ends_the_websocket(wrong: bytes, autojump_clock: MockClock) -> None:
    async with served() as (system, dashboard):
        cookie = await log_in(dashboard)
        async with looking(dashboard, cookie) as socket:
            await socket.send(wrong)
            with pytest.raises(ConnectionLost) as lost:
                while True:
                    await socket.receive()
            assert lost.value.code == 1008
        async with looking(dashboard, cookie) as socket:
            assert (await hear(socket))["system"] == "town"
        assert system.statistics().failures == 0


def upgrade(cookie: str) -> bytes:
    """A request for a WebSocket."""
    return (
        f"GET /socket HTTP/1.1\r\nHost: HOST\r\nOrigin: http://HOST\r\nCookie: {cookie}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


async def test_browsers_that_leave_before_their_answer_do_not_count(autojump_clock: MockClock) -> None:
    async with served() as (_, dashboard):
        cookie = await log_in(dashboard)
        host, port = place(dashboard)
        octets = upgrade(cookie).replace(b"HOST", f"{host}:{port}".encode())
        for _ in range(MOST_BROWSERS):
            with socket.create_connection((host, port)) as browser:
                await wait_all_tasks_blocked()  # the server has accepted it
                browser.sendall(octets)
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset it at the end
        async with looking(dashboard, cookie) as another:
            assert (await hear(another))["system"] == "town"


async def test_so_many_browsers_and_no_more(autojump_clock: MockClock) -> None:
    async with served() as (_, dashboard), trio.open_nursery() as nursery:
        cookie = await log_in(dashboard)

        async def look(task_status: trio.TaskStatus[None]) -> None:
            async with looking(dashboard, cookie) as socket:
                await hear(socket)
                task_status.started()
                await trio.sleep_forever()

        for _ in range(MOST_BROWSERS):
            await nursery.start(look)
        answer = await fetch(dashboard, upgrade(cookie))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert answer.endswith(b"8 browsers are connected: close one of them\n")
        nursery.cancel_scope.cancel()


async def test_actions_are_asked_twice() -> None:
    async with served(DashboardConfig(actions=True)) as (system, dashboard):
        clerk = system.lookup("/clerk")
        assert clerk is not None
        async with looking(dashboard, await log_in(dashboard)) as socket:
            await say(socket, act="kill", path="/clerk")
            answer = await hear(socket, "answer")
            assert (answer["act"], answer["path"], clerk.is_alive) == ("kill", "/clerk", True)
            await say(socket, confirm=answer["confirm"])
            assert (await hear(socket, "answer"))["done"] == "kill /clerk"
            await clerk.terminated()


async def test_a_program_that_ends_and_starts_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    path = tmp_path / "c"
    async with serve_console_dashboard(path) as dashboard, looking(dashboard, await log_in(dashboard)) as socket:
        await say(socket, view={"page": "actors", "open": [], "count": 10, "internals": True})
        assert (await hear(socket, "gone")).startswith(f"there is no socket {path}")
        for name in ("first", "second"):
            async with ActorSystem(name) as system, serve_console(system, path, actions=True, tracebacks=True):
                view = await hear(socket)
                assert (view["system"], [row["kind"] for row in view["rows"]], view["actions"]) == (
                    name,
                    ["Console"],
                    [],
                )
                await say(socket, act="kill", path="/$1")
                assert "with --actions" in (await hear(socket, "answer"))["refused"]
            assert "has ended" in await hear(socket, "gone")
