"""What clients cost that say nothing, or half of something, at every listener: an honest client beside them is let in at once.

There are half as many more of them than the listener has places.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import pytest
import trio
from aioquic._buffer import Buffer
from aioquic.quic.packet import pull_quic_header

from levada.actors import aqueduct, lumberjack, maop, reactivesocket, rsocket
from levada.actors.authenticators import BearerTokens
from levada.actors.stream_carriers import carrier_of
from levada.framework import ActorSystem, Identity, OneshotSender, message, oneshot
from levada.framework.errors import CarrierError
from levada.transports.carriers import TcpConfig, TlsConfig, UnixConfig, dial
from levada.transports.carriers.websocket_config import WebSocketConfig
from levada.transports.qmux import QmuxConfig
from levada.transports.quic import QuicConfig
from levada.transports.quic import dial as dial_quic
from levada.transports.quic.port import UdpPort

pytestmark = [pytest.mark.ci, pytest.mark.loopback]
PLACES = 16
CLIENTS = 3 * PLACES // 2
TOKENS = BearerTokens.of({b"secret": Identity("desk")})


@message("tests.silent.Question")
class Question:
    answer: OneshotSender[str]


async def of_rsocket(request: rsocket.Request) -> bytes:
    return b"answer"


async def of_aqueduct(question: Question) -> None:
    question.answer.send("answer")


async def of_maop(call: Any) -> bytes:
    return b"answer"


async def of_lumberjack(unit: lumberjack.Unit) -> None:
    pass


def settings_of(certificate: Path, protocol: str, carrier: str) -> tuple[Any, Any]:
    """Settings of the server and of clients for a carrier."""
    served, trusting = TlsConfig(certificate=certificate, key=certificate), TlsConfig(ca=certificate)
    sides: dict[str, tuple[Any, Any]] = {
        "tcp": (TcpConfig(), TcpConfig()),
        "unix": (UnixConfig(), UnixConfig()),
        "tls": (attrs.evolve(served, backlog=PLACES), trusting),
        "ws": (WebSocketConfig(backlog=PLACES), WebSocketConfig()),
        "wss": (WebSocketConfig(backlog=PLACES, tls=served), WebSocketConfig(tls=trusting)),
        "quic": (
            QuicConfig(certificate=certificate, key=certificate, max_handshakes=PLACES, retry="always"),
            QuicConfig(ca=certificate, server_name="localhost"),
        ),
    }
    server, client = sides[carrier]
    if carrier == "quic":
        alpn = ("maop/1" if protocol == "maop" else protocol,)
        return attrs.evolve(server, alpn=alpn), attrs.evolve(client, alpn=alpn)
    if protocol in ("aqueduct", "maop"):
        spoken = ("qmux-02.maop-1" if protocol == "maop" else "qmux-02.aqueduct",)
        return QmuxConfig(below=server, protocols=spoken), QmuxConfig(below=client, protocols=spoken)
    return server, client


def serve(protocol: str, system: ActorSystem, url: str, settings: Any) -> Any:
    """Listen with a 64th of the default limit of connections."""
    match protocol:
        case "lumberjack":
            config = lumberjack.ReaderConfig(max_connections=PLACES)
            return lumberjack.serve(system, url, of_lumberjack, config=config, carrier=settings)
        case "rsocket" | "reactivesocket":
            server = rsocket.ServerConfig(max_connections=PLACES, carrier=settings)
            module = rsocket if protocol == "rsocket" else reactivesocket
            return module.serve(system, url, of_rsocket, config=server)
        case "aqueduct":
            peer = aqueduct.PeerConfig(max_connections=PLACES, carrier=settings)
            return aqueduct.serve(system, url, of_aqueduct, Question, config=peer)
        case _:
            many = maop.PeerConfig(max_connections=PLACES, max_attempts=None, carrier=settings)
            return maop.serve(system, url, {101: of_maop}, authenticate=TOKENS, config=many)


async def ask(protocol: str, system: ActorSystem, url: str, settings: Any) -> None:
    """Connect, be answered, and leave."""
    match protocol:
        case "lumberjack":
            hosts = lumberjack.HostConfig(tls=settings if isinstance(settings, TlsConfig) else None)
            async with lumberjack.connect(system, url, hosts=hosts) as writer:
                await writer.send({"line": "hello"})
                await writer.flush()
        case "rsocket" | "reactivesocket":
            module: Any = rsocket if protocol == "rsocket" else reactivesocket
            async with module.connect(system, url, config=rsocket.ClientConfig(carrier=settings)) as peer:
                assert (await peer.request_response(b"")).data == b"answer"
        case "aqueduct":
            config = aqueduct.PeerConfig(carrier=settings)
            async with aqueduct.connect(system, url, Question, config=config) as other:
                mine, theirs = oneshot(str)
                await other.send(Question(mine))
                assert await theirs == "answer"
        case _:
            async with maop.connect(system, url, token=b"secret", config=maop.PeerConfig(carrier=settings)) as third:
                await third.request(101)


BEGINNINGS = {"lumberjack": b"2W\0", "rsocket": b"\0\0\x40\0", "reactivesocket": b"\0\0\0\x40\0"}
"""Of the first message; QMux's is a record of 64 bytes or more."""
OF_CARRIERS = {"ws": b"GET / HT", "tls": b"\x16\x03\x01\x02", "wss": b"\x16\x03\x01\x02"}


@asynccontextmanager
async def socket_to(url: str) -> AsyncIterator[trio.SocketStream]:
    """An address of their own, if there are addresses."""
    parts = urlsplit(url)
    if parts.port is None:
        stream = await trio.open_unix_socket(parts.path)
    else:
        stream = await trio.open_tcp_stream("127.0.0.1", parts.port, local_address="127.0.0.2")
    async with stream:
        yield stream


async def half_messages(url: str, beginning: bytes, task_status: trio.TaskStatus[None]) -> None:
    """Send nothing, or half of something."""
    async with socket_to(url) as stream:
        await stream.send_all(beginning)
        task_status.started()
        await trio.sleep_forever()


async def without_a_word(url: str, settings: Any, task_status: trio.TaskStatus[None]) -> None:
    """Have the carrier's whole handshake, and say no more."""
    with suppress(CarrierError):
        async with dial(url, settings):
            task_status.started()
            await trio.sleep_forever()


class Mute(UdpPort):
    """Says hello, as often as it takes, until it has said it with the token that proves the address; then it is silent."""

    proven = False

    def send(self, datagrams: Sequence[tuple[bytes, Any]]) -> int:
        if self.proven:
            return len(datagrams)
        self.proven = any(pull_quic_header(Buffer(data=data), 8).token for data, _ in datagrams)
        return super().send(datagrams)


async def half_handshakes(url: str, settings: Any, task_status: trio.TaskStatus[None]) -> None:
    with suppress(CarrierError):
        async with dial_quic(url, settings, port=Mute.bind(("127.0.0.2", 0))):
            task_status.started()  # the server's part has come
            await trio.sleep_forever()


CARRIERS = {
    "lumberjack": ["tcp", "tls"],
    "rsocket": ["tcp", "tls", "unix", "ws", "wss", "quic"],
    "reactivesocket": ["tcp", "ws"],
    "aqueduct": ["tcp", "tls", "unix", "ws", "quic"],
    "maop": ["tcp", "tls", "unix", "ws", "quic"],
}


def cases() -> Iterator[tuple[str, str, str]]:
    for protocol, carriers in CARRIERS.items():
        for carrier in carriers:
            if carrier == "quic":
                yield protocol, carrier, "half_handshake"
            else:
                yield protocol, carrier, "silent"
                yield protocol, carrier, "half_message"
            yield protocol, carrier, "handshake_only"


def attacker(protocol: str, url: str, kind: str, settings: Any) -> Callable[..., Awaitable[None]]:
    """What one of the clients does."""
    scheme, _, rest = url.partition("://")
    _, _, carrier = scheme.partition("+")
    below = carrier or ("tcp" if protocol == "lumberjack" else "quic")
    if protocol in ("aqueduct", "maop"):
        below = carrier_of(carrier)
    match kind:
        case "half_handshake":
            return partial(half_handshakes, f"quic://{rest}", settings)
        case "handshake_only":
            return partial(without_a_word, f"{below}://{rest}", settings)
        case "silent":
            return partial(half_messages, f"{below}://{rest}", b"")
        case _:
            beginning = OF_CARRIERS.get(carrier) or BEGINNINGS.get(protocol, b"\x40")
            return partial(half_messages, f"{below}://{rest}", beginning)


class Steps(trio.abc.Instrument):
    """Counts how often tasks go on: those of a listener that is busy with clients that say nothing do all the time."""

    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


@pytest.mark.parametrize(("protocol", "carrier", "kind"), list(cases()))
async def test_clients_without_a_whole_first_message(
    certificate: Path, tmp_path: Path, protocol: str, carrier: str, kind: str
) -> None:
    scheme = protocol if (protocol, carrier) == ("lumberjack", "tcp") else f"{protocol}+{carrier}"
    url = f"{scheme}://{tmp_path}/desk" if carrier == "unix" else f"{scheme}://127.0.0.1:0"
    server, client = settings_of(certificate, protocol, carrier)
    async with ActorSystem() as system, serve(protocol, system, url, server) as listener:
        hostile = attacker(protocol, listener.url, kind, client)
        steps = Steps()
        trio.lowlevel.add_instrument(steps)

        async def steps_of_a_client() -> int:
            before = steps.count
            await ask(protocol, system, listener.url, client)
            return steps.count - before

        alone = await steps_of_a_client()
        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                await nursery.start(hostile)
            for _ in range(2):
                # Some of the silent clients are turned away, which takes seven steps for each.
                assert await steps_of_a_client() < alone + 20 * CLIENTS
            nursery.cancel_scope.cancel()
