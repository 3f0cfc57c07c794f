"""Both dialects over every carrier: each interaction, errors and cancellation, and nothing left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio

from levada.actors.rsocket import (
    ApplicationError,
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    Payload,
    Request,
    ServerConfig,
    route,
)
from levada.framework import Actor, ActorSystem, Asks, Receiver, message
from levada.transports.carriers import Connection, dial
from levada.transports.rsocket import RSocketCore
from levada.transports.rsocket.events import PayloadReceived

from .conftest import CarrierSettings, connect, serve

DIALECTS = ["rsocket", "reactivesocket"]
SCHEMES = ["memory", "tcp", "tls", "unix", "ws", "wss", "quic"]


@message("tests.rsocket.Double")
class Double(Asks[int]):
    number: int


class Desk(Actor[Any]):
    """What the scenarios talk to."""

    slow: int = 0
    noted: int = 0

    @route("echo")
    def echo(self, payload: Payload) -> Payload:
        return payload

    @route("double")
    async def double(self, m: Double) -> int:
        return 2 * m.number

    @route("count")
    async def count(self, data: bytes) -> AsyncIterator[bytes]:
        for number in range(int(data)):
            yield b"%d" % number

    @route("chan")
    async def chan(self, payloads: Receiver[Payload]) -> AsyncIterator[Payload]:
        async for payload in payloads:
            yield payload

    @route("sum")
    async def sum(self, payloads: Receiver[bytes]) -> bytes:
        return b"%d" % sum([int(data) async for data in payloads])

    @route("fail")
    async def fail(self, data: bytes) -> None:
        raise ApplicationError(data.decode())

    @route("wait")
    async def wait(self) -> None:
        self.slow += 1
        try:
            await trio.sleep_forever()
        finally:
            self.slow -= 1

    @route("waiting")
    def waiting(self) -> bytes:
        return b"%d" % self.slow

    @route("note")
    def note(self, data: bytes) -> None:
        self.noted += int(data)

    @route("noted")
    def total(self) -> bytes:
        return b"%d" % self.noted


async def ask(peer: ConnectedPeer, name: str, data: bytes = b"") -> bytes:
    return (await peer.request_response(data, route=name)).data


async def scenario(peer: ConnectedPeer) -> None:
    answer = await peer.request_response(b"hello", route="echo")
    assert answer.data == b"hello"
    assert answer.metadata is not None
    assert await peer.request_response(Double(21), route="double") == 42

    async with await peer.request_stream(b"100", route="count", window=8) as receiver:
        assert [payload.data async for payload in receiver] == [b"%d" % number for number in range(100)]
    async with await peer.request_stream(b"1000", route="count", window=4) as receiver:
        assert (await receiver.receive()).data == b"0"

    sender, receiver = await peer.request_channel(b"0", route="chan", window=4)
    back: list[bytes] = []

    async def send() -> None:
        async with sender:
            for number in range(1, 40):
                await sender.send(b"%d" % number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        back += [payload.data async for payload in receiver]
    assert back == [b"%d" % number for number in range(40)]

    with pytest.raises(ApplicationError) as failed:
        await peer.request_response(b"no such price", route="fail")
    assert (str(failed.value), failed.value.code, failed.value.data) == ("no such price", 0x201, b"no such price")
    with pytest.raises(ApplicationError, match=r"^unknown route: nowhere$"):
        await peer.request_response(b"", route="nowhere")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, peer, "wait")
        while await ask(peer, "waiting") != b"1":
            pass
        nursery.cancel_scope.cancel()
    while await ask(peer, "waiting") != b"0":
        pass

    for number in range(10):
        await peer.fire_and_forget(b"%d" % number, route="note")
    while await ask(peer, "noted") != b"45":
        pass
    large = bytes(range(256)) * 1200  # more than a carrier takes at once
    assert await ask(peer, "echo", large) == large


@pytest.mark.loopback
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_all_interactions(scheme: str, dialect: str, settings: Callable[[str], CarrierSettings]) -> None:
    carrier = settings(scheme)
    tasks = len(trio.lowlevel.current_root_task().child_nurseries[0].child_tasks)  # type: ignore[union-attr]
    async with ActorSystem() as system:
        async with serve(
            system, f"{dialect}+{carrier.url}", Desk, config=ServerConfig(carrier=carrier.serving)
        ) as listener:
            assert listener.url.startswith(f"{dialect}+{scheme}://")
            async with connect(system, listener.url, config=ClientConfig(carrier=carrier.dialling)) as peer:
                await scenario(peer)
                assert peer.info.scheme == scheme
                assert [known.info.scheme for known in listener.peers] == [scheme]
                assert peer.statistics().open_streams == listener.peers[0].statistics().open_streams == 0
        assert (system.statistics().actors, system.statistics().timers, system.statistics().failures) == (0, 0, 0)
    assert len(trio.lowlevel.current_root_task().child_nurseries[0].child_tasks) == tasks  # type: ignore[union-attr]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("scheme", ["tcp", "tls", "unix", "ws", pytest.param("quic", marks=pytest.mark.ci)])
async def test_large_requests_and_large_answers_do_not_wait_for_each_other(
    scheme: str, dialect: str, settings: Callable[[str], CarrierSettings]
) -> None:
    """Both sides ask, so each has more to send than the other's buffers hold, requests and answers."""

    async def turn_round(request: Request) -> bytes:
        return request.data[::-1]

    async def ask(peer: Any, number: int) -> None:
        data = bytes([number]) + bytes(3_000_000)
        assert (await peer.request_response(data)).data == data[::-1]

    carrier = settings(scheme)
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+{carrier.url}", turn_round, config=ServerConfig(carrier=carrier.serving)) as listener,
        connect(system, listener.url, turn_round, config=ClientConfig(carrier=carrier.dialling)) as peer,
    ):
        assert (await peer.request_response(b"ab")).data == b"ba"
        with trio.fail_after(100):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(ask, (peer, listener.peers[0])[number % 2], number)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_requests_of_the_server(dialect: str) -> None:
    async def shout(request: Request) -> bytes:
        return request.data.upper()

    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk") as listener,
        connect(system, listener.url, shout) as peer,
    ):
        assert peer.setup is None
        while not listener.peers:
            await trio.lowlevel.checkpoint()
        (client,) = listener.peers
        assert (await client.request_response(b"hello")).data == b"HELLO"
        assert client.setup is not None
        assert client.setup.data_mime_type == "application/octet-stream"


@pytest.mark.loopback
@pytest.mark.rule("RS-8")
async def test_rs8_quic_carries_a_connection_as_tcp_would(settings: Callable[[str], CarrierSettings]) -> None:
    """One bidirectional stream, opened by the client, has the frames of both sides with their lengths; ALPN says ``rsocket``."""
    carrier = settings("quic")
    one = attrs.evolve(carrier.serving, max_streams=1, max_streams_unidirectional=0)
    async with (
        ActorSystem() as system,
        serve(system, f"rsocket+{carrier.url}", Desk, config=ServerConfig(carrier=one)) as listener,
    ):
        async with connect(system, listener.url, config=ClientConfig(carrier=carrier.dialling)) as peer:
            await scenario(peer)
            assert listener.peers[0].info.alpn == peer.info.alpn == "rsocket"

        core = RSocketCore(
            CoreConfig(metadata_mime_type="text/plain"), client=True, framed=False, now=0.0, random_bytes=bytes
        )
        core.send_request_response(Payload(b"hello", b"echo"), 0.0)
        bare = attrs.evolve(carrier.dialling, alpn=("rsocket",))
        async with dial(listener.url.removeprefix("rsocket+"), bare) as connection:
            assert isinstance(connection, Connection)
            async with await connection.open_stream() as stream:
                await stream.send_all(b"".join(core.data_to_send(0.0)))
                events = core.receive_data(await stream.receive_some(), 0.0)
                assert PayloadReceived(1, Payload(b"hello", b"echo"), True) in events
