"""`dial` and `listen` choose the carrier by the scheme."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from levada.framework.errors import ConfigurationError
from levada.transports.carriers import (
    ByteStream,
    Carrier,
    Connection,
    Incoming,
    MemoryConfig,
    MessageStream,
    TcpConfig,
    TlsConfig,
    UnixConfig,
    dial,
    listen,
    register,
)
from levada.transports.carriers.contracts import Listener
from levada.transports.carriers.memory import memory_streams

if TYPE_CHECKING:
    from tests.transports.conftest import Authority


async def test_memory_in_every_shape() -> None:
    for shape, kind in (("bytes", ByteStream), ("messages", MessageStream)):
        async with (
            listen("memory://desk", MemoryConfig(shape=shape)) as listener,  # type: ignore[arg-type]  # it is one of them
            dial("memory://desk") as client,
        ):
            assert isinstance(listener, Listener)
            assert isinstance(client, kind)
            assert isinstance(await listener.accept(), kind)


@pytest.mark.loopback
async def test_tcp_and_unix(tmp_path: Path) -> None:
    for url, config in (("tcp://127.0.0.1:0", TcpConfig()), (f"unix://{tmp_path}/socket", UnixConfig())):
        async with (
            listen(url, config) as listener,
            dial(listener.url, config) as client,
            await listener.accept() as server,
        ):
            await client.send_all(b"x")
            assert await server.receive_some() == b"x"


@pytest.mark.loopback
async def test_tls(authority: Authority) -> None:
    async with (
        listen("tls://127.0.0.1:0", TlsConfig(certificate=authority.issue("server"))) as listener,
        dial(listener.url, TlsConfig(ca=authority.ca)) as client,
        await listener.accept() as server,
    ):
        await client.send_all(b"x")
        assert await server.receive_some() == b"x"


@pytest.mark.loopback
async def test_websocket() -> None:
    websocket = pytest.importorskip("levada.transports.carriers.websocket", exc_type=ImportError)
    config = websocket.WebSocketConfig()
    async with listen("ws://127.0.0.1:0", config) as listener, dial(listener.url, config) as client:
        server = await listener.accept()
        await client.send(b"x")
        assert await server.receive() == b"x"
        client.abort()
        server.abort()


@pytest.mark.loopback
async def test_quic(authority: Authority) -> None:
    quic = pytest.importorskip("levada.transports.quic", exc_type=ImportError)
    serving = quic.QuicConfig(certificate=str(authority.issue("server")), key=str(authority.issue("server")))
    async with listen("quic://127.0.0.1:0", serving) as listener, trio.open_nursery() as nursery:

        async def serve() -> None:
            incoming = await listener.accept()
            assert isinstance(incoming, Incoming)
            async with incoming.accept() as connection:
                await connection.wait_closed()

        nursery.start_soon(serve)
        url = listener.url.replace("127.0.0.1", "localhost")
        async with dial(url, quic.QuicConfig(ca=str(authority.ca))) as client:
            assert isinstance(client, Connection)
            assert (await client.handshake()).scheme == "quic"


def test_unknown_schemes_and_wrong_settings() -> None:
    for url in ("http://example.org", "desk", ""):
        with pytest.raises(ConfigurationError, match="no carrier"):
            dial(url)
    with pytest.raises(ConfigurationError, match="tcp:// is a UnixConfig, wanted a TcpConfig"):
        listen("tcp://127.0.0.1:0", UnixConfig())
    with pytest.raises(ConfigurationError):
        listen("tcp://127.0.0.1:0", MemoryConfig())
    with pytest.raises(ConfigurationError, match="not a URL"):
        dial("tcp://[::1")


@pytest.mark.parametrize(("scheme", "needs"), [("quic", "aioquic"), ("ws", "wsproto"), ("wss", "wsproto")])
def test_missing_extra_is_named(scheme: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is missing already")
    for name in [name for name in sys.modules if name.partition(".")[0] == needs]:
        monkeypatch.delitem(sys.modules, name)
    for name in [
        name for name in sys.modules if name.startswith(("levada.transports.quic", "levada.transports.carriers.web"))
    ]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == needs:
                raise ModuleNotFoundError(f"No module named {needs!r}", name=needs)

    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    extra = "quic" if needs == "aioquic" else "websocket"
    with pytest.raises(ConfigurationError, match=rf"{scheme}:// needs {needs}: pip install 'levada\[{extra}\]'"):
        dial(f"{scheme}://127.0.0.1:1")


def test_a_program_registers_a_carrier() -> None:
    seen: list[tuple[str, object]] = []

    @asynccontextmanager
    async def opens(url: str, config: TcpConfig | None) -> AsyncIterator[ByteStream]:
        seen.append((url, config))
        yield memory_streams()[0]

    carrier: Carrier[TcpConfig] = Carrier(dial=opens, listen="module_not_there:listen", config=TcpConfig, requires="it")
    register("opens", carrier)
    with pytest.raises(ConfigurationError, match="opens:// needs module_not_there: pip install 'it'"):
        dial("opens://x")
    register("opens2", attrs.evolve(carrier, listen=listen))

    async def main() -> None:
        async with dial("opens2://x") as stream, dial("opens2://y", TcpConfig(backlog=5)):
            assert isinstance(stream, ByteStream)

    trio.run(main)
    assert seen == [("opens2://x", None), ("opens2://y", TcpConfig(backlog=5))]
    with pytest.raises(ConfigurationError, match="opens2:// is a UnixConfig, wanted a TcpConfig"):
        dial("opens2://x", UnixConfig())
    with pytest.raises(ConfigurationError, match=r"tcp:// is levada's own \(levada.transports.carriers.tcp\)"):
        register("tcp", carrier)


def test_an_unknown_scheme_says_where_others_come_from() -> None:
    with pytest.raises(
        ConfigurationError, match=r"the carrier is one of memory, tcp, .*entry point group levada.carriers"
    ):
        dial("vsock://3:7000")
