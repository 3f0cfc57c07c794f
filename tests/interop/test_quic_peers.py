"""QUIC against other ends: aioquic's own asyncio classes, and qh3, whose engine is another one."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from levada.actors.interop.certificates import SelfSigned, make_certificates
from levada.framework.errors import CarrierError
from levada.transports.quic import QuicConfig, QuicConnection, QuicListener, QuicStream, dial, listen

pytestmark = [pytest.mark.loopback, pytest.mark.ci]

PROGRAM = Path(__file__).with_name("quic_peer.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SelfSigned:
    """An authority and a certificate by it: some peers take no authority's own certificate for a server's."""
    return make_certificates(tmp_path_factory.mktemp("quic"))


@pytest.fixture(params=["aioquic", "qh3"])
def peer(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    return name


@pytest.fixture
def config(made: SelfSigned) -> QuicConfig:
    return QuicConfig(
        certificate=made.certificate,
        key=made.key,
        ca=made.ca,
        server_name="localhost",
    )


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


async def echo(listener: QuicListener) -> None:
    async def stream_of(stream: QuicStream) -> None:
        await stream.send_all(await read_all(stream))
        await stream.send_eof()

    async def datagrams(connection: QuicConnection) -> None:
        while True:
            await connection.send_datagram((await connection.receive_datagram()).data)

    async def one(connection: QuicConnection) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(datagrams, connection)
                while True:
                    nursery.start_soon(stream_of, await connection.accept_stream())
        except* CarrierError:
            pass

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(one, (await listener.accept()).accept())


@pytest.mark.parametrize("changes", [{"retry": "always"}, {"retry": "never", "client_certificates": "required"}])
async def test_their_client_to_our_server(
    peer: str, config: QuicConfig, made: SelfSigned, changes: dict[str, Any]
) -> None:
    config = attrs.evolve(config, **changes)
    async with listen("quic://127.0.0.1:0", config) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(echo, listener)
        port = listener.url.rpartition(":")[2]
        command = [sys.executable, str(PROGRAM), peer, "call", str(made.ca.parent), port]
        with trio.fail_after(250):
            result = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        assert (result.stdout, result.returncode) == (b"ok\n", 0), result.stderr.decode()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def their_server(peer: str, made: SelfSigned) -> AsyncIterator[int]:
    command = [sys.executable, str(PROGRAM), peer, "serve", str(made.ca.parent)]
    async with trio.open_nursery() as nursery:
        run = functools.partial(trio.run_process, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
        process: trio.Process = await nursery.start(run, command)
        assert process.stdout is not None
        yield int(await process.stdout.receive_some())
        nursery.cancel_scope.cancel()


async def test_our_client_to_their_server(peer: str, config: QuicConfig, made: SelfSigned) -> None:
    async with their_server(peer, made) as port:
        with trio.fail_after(250):
            async with dial(f"quic://127.0.0.1:{port}", config) as connection:

                async def one(n: int) -> None:
                    data = bytes([n]) * (10_000 * n + 1)
                    stream = await connection.open_stream()
                    await stream.send_all(data)
                    await stream.send_eof()
                    assert await read_all(stream) == data

                async with trio.open_nursery() as nursery:
                    for n in range(20):
                        nursery.start_soon(one, n)
                await connection.send_datagram(b"datagram")
                assert (await connection.receive_datagram()).data == b"datagram"
                connection.update_keys()
                await one(3)
                assert connection.info.alpn == "levada"
