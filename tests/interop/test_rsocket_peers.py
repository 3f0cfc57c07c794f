"""RSocket with other people's implementations at the other end, as servers and as clients, over TCP and WebSocket.

PyPI's rsocket, and npm's rsocket-core of both its lines, run as programs that know the contract of ``levada interop rsocket``.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.output import heard

from levada.actors.interop.rsocket import CORE, Contract
from levada.actors.rsocket import ApplicationError, ClientConfig, CoreConfig, Peer, ServerConfig, connect, serve
from levada.framework import ActorSystem

pytestmark = [pytest.mark.loopback, pytest.mark.ci]

HERE = Path(__file__).parent
BIG = 5_000_000
CONFIG = ClientConfig(core=CoreConfig(metadata_mime_type="text/plain", fragment_size=64 * 1024))

EXPECTED: dict[str, Any] = {
    "echo": ["hello", "echo"],
    "count 7": [*range(100)],
    "count 2147483647": [*range(100)],
    "chan": [*range(10)],
    "fail": "boom",
    "fail stream": "boom",
    "unknown": "unknown route: nowhere",
    "slow": "3",
    "cancelled": "0",
    "fnf": "5",
    "len": str(BIG),
    "blob": [BIG] * 3,
}
"""What every client has to see of every server."""


@attrs.frozen
class Program:
    """Another implementation: how to start it."""

    command: tuple[str, ...]
    environment: dict[str, str]
    keeps_metadata: bool = True
    """Whether its answers carry the metadata that they were given."""


def node(packages: Callable[..., Path], script: str, version: str, *more: str, **facts: bool) -> Program:
    names = ["core", "tcp-client", "tcp-server", "websocket-client", "websocket-server", *more]
    modules = packages(*(f"rsocket-{name}@{version}" for name in names))
    command = ("node", str(HERE / "node" / script))
    return Program(command, {**os.environ, "NODE_PATH": str(modules)}, **facts)


@pytest.fixture(params=["pypi", "npm-alpha", "npm-classic"])
def program(request: pytest.FixtureRequest) -> Program:
    if request.param == "pypi":
        packages = request.getfixturevalue("python_packages")("rsocket==0.4.20", "aiohttp==3.14.5")
        command = (sys.executable, str(HERE / "rsocket_python.py"))
        return Program(command, {**os.environ, "PYTHONPATH": str(packages)})
    packages = request.getfixturevalue("node_packages")
    if request.param == "npm-alpha":
        return node(packages, "rsocket_alpha.cjs", "1.0.0-alpha.3")
    # Its responder never sets the flag for metadata.
    return node(packages, "rsocket_classic.cjs", "0.0.27", "flowable", keeps_metadata=False)


@pytest.fixture(params=["tcp", "ws"])
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def serving(program: Program, carrier: str) -> AsyncIterator[int]:
    """Run the program as a server; gives its port."""
    async with trio.open_nursery() as nursery:
        run = functools.partial(
            trio.run_process, env=program.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False
        )
        process: trio.Process = await nursery.start(run, [*program.command, "server", carrier])
        assert process.stdin is not None
        said = await heard(process.stdout, lambda said: said.endswith(b"\n"))
        word, port = said.split()
        assert word == b"LISTENING"
        yield int(port)
        await process.stdin.aclose()
        nursery.cancel_scope.cancel()


async def call(peer: Peer) -> AsyncIterator[tuple[str, Any]]:
    """Do what the programs do as clients, and give what they print."""

    async def ask(route: str, data: bytes = b"") -> str:
        return (await peer.request_response(data, route=route)).data.decode()

    async def settled(route: str, wanted: str) -> str:
        got = await ask(route)
        with trio.move_on_after(50):
            while got != wanted:  # the other program counts in its own time
                got = await ask(route)
        return got

    async def items(route: str, data: bytes, window: int) -> list[bytes]:
        async with await peer.request_stream(data, route=route, window=window) as stream:
            return [payload.data async for payload in stream]

    echoed = await peer.request_response(b"hello", route="echo")
    yield "echo", [echoed.data.decode(), (echoed.metadata or b"").decode()]
    for window in (7, 2**31 - 1):
        yield f"count {window}", [int(data) for data in await items("count", b"100", window)]
    sender, receiver = await peer.request_channel(b"0", route="chan", window=4)
    async with sender, receiver:
        for i in range(1, 10):
            await sender.send(b"%d" % i)
        sender.finish_nowait()
        yield "chan", [int(payload.data) async for payload in receiver]
    with pytest.raises(ApplicationError) as failed:
        await ask("fail", b"boom")
    yield "fail", failed.value.data.decode()
    with pytest.raises(ApplicationError) as failed:
        await items("fail", b"boom", 3)
    yield "fail stream", failed.value.data.decode()
    with pytest.raises(ApplicationError) as failed:
        await ask("nowhere")
    yield "unknown", failed.value.data.decode()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask, "slow")
        slow = await settled("slow-open", "3")
        nursery.cancel_scope.cancel()
    yield "slow", slow
    yield "cancelled", await settled("slow-open", "0")
    for _ in range(5):
        await peer.fire_and_forget(b"x", route="fnf")
    yield "fnf", await settled("fnf-count", "5")
    yield "len", await ask("len", bytes(BIG))
    yield "blob", [len(data) for data in await items("blob", b"3 %d" % BIG, 1)]


async def test_they_call_levada(program: Program, carrier: str) -> None:
    """All interactions, errors, cancels, windows and payloads of 5 MB, asked of this server by other clients."""
    async with (
        ActorSystem() as system,
        serve(
            system, f"rsocket+{carrier}://127.0.0.1:0/", Contract().answer, config=ServerConfig(core=CORE)
        ) as listener,
    ):
        port = listener.url.rstrip("/").rpartition(":")[2]
        done = await trio.run_process(
            [*program.command, "client", carrier, port], env=program.environment, capture_stdout=True
        )
    got = {line["check"]: line["got"] for line in map(json.loads, done.stdout.splitlines())}
    assert got == EXPECTED


async def test_levada_calls_them(program: Program, carrier: str) -> None:
    """The same the other way round."""
    async with (
        serving(program, carrier) as port,
        ActorSystem() as system,
        connect(system, f"rsocket+{carrier}://127.0.0.1:{port}/", config=CONFIG) as peer,
    ):
        got = {check: value async for check, value in call(peer)}
    expected = EXPECTED if program.keeps_metadata else EXPECTED | {"echo": ["hello", ""]}
    assert got == expected


async def test_levada_calls_levada(carrier: str) -> None:
    """The same between two ends of this library, so that a difference above is the peer's."""
    async with (
        ActorSystem() as system,
        serve(system, f"rsocket+{carrier}://127.0.0.1:0/", Contract().answer) as listener,
        connect(system, listener.url, config=CONFIG) as peer,
    ):
        assert {check: value async for check, value in call(peer)} == EXPECTED
