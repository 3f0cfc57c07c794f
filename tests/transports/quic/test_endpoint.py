"""The port under all connections: a full socket, a change of port, timers, prompt answers, clients that nobody decides about."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from aioquic.quic.connection import QuicConnection as AioquicConnection
from tests.simnet import SimAddress, SimNet, SimPacket, SimPort
from trio.testing import MockClock

from levada.framework.errors import ConnectionClosed, ConnectionLost, LocalProtocolError
from levada.transports.quic import QuicConnection, QuicEndpoint, QuicStream, dial
from levada.transports.quic.engine import Engine

SERVER = ("server", 4433)
OUTBOX = 1_024  # datagrams that an endpoint keeps for a full socket


class JammedPort:
    """A port whose socket can be full, as the kernel's buffer is under a network that stands still."""

    def __init__(self, port: SimPort) -> None:
        self._port = port
        self._jammed = trio.Event()
        self._jammed.set()
        self._closed = False

    @property
    def address(self) -> SimAddress:
        return self._port.address

    async def receive(self) -> list[tuple[bytes, SimAddress]]:
        return await self._port.receive()

    def send(self, datagrams: Sequence[tuple[bytes, SimAddress]]) -> int:
        return self._port.send(datagrams) if self._jammed.is_set() else 0

    async def writable(self) -> None:
        await self._jammed.wait()
        if self._closed:
            raise trio.ClosedResourceError("closed by another task")

    def jam(self) -> None:
        self._jammed = trio.Event()

    def free(self) -> None:
        self._jammed.set()

    def close(self) -> None:
        self._closed = True
        self._jammed.set()
        self._port.close()


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


async def echo(connection: QuicConnection) -> None:
    async def one(stream: QuicStream) -> None:
        stream.send_nowait(await read_all(stream), fin=True)

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(one, await connection.accept_stream())


async def ask(connection: QuicConnection, data: bytes) -> bytes:
    stream = await connection.open_stream()
    stream.send_nowait(data, fin=True)
    return await read_all(stream)


@asynccontextmanager
async def jammable(lab: Any, net: SimNet) -> AsyncIterator[tuple[JammedPort, QuicConnection, QuicConnection]]:
    """A connected client whose socket can be full, that socket, and the server's end."""
    port = JammedPort(net.port("client"))
    accepted: list[QuicConnection] = []

    async def accept() -> None:
        accepted.append((await listener.accept()).accept())

    async with lab.listening(net) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        async with dial("quic://server:4433", lab.client(), port=port) as client:
            yield port, client, accepted[0]


async def test_a_port_that_changes_while_its_socket_is_full_loses_nothing(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with jammable(lab, net) as (port, client, server):
        stream = await client.open_stream()
        port.jam()
        stream.send_nowait(b"x" * 20_000, fin=True)
        await trio.sleep(0.1)
        client._endpoint.rebind(net.port("elsewhere"))
        assert await read_all(await server.accept_stream()) == b"x" * 20_000
        assert server.peer_address[0] == "elsewhere"


async def test_a_full_socket_keeps_what_is_sent_until_there_is_room(lab: Any, autojump_clock: MockClock) -> None:
    async with jammable(lab, SimNet(1)) as (port, client, server), trio.open_nursery() as nursery:
        nursery.start_soon(echo, server)
        port.jam()
        asked = await client.open_stream()
        asked.send_nowait(b"hello", fin=True)
        await trio.sleep(0.1)
        assert client._endpoint._outbox
        port.free()
        assert await read_all(asked) == b"hello"
        assert not client._endpoint._outbox
        nursery.cancel_scope.cancel()


async def test_what_waits_for_a_full_socket_is_bounded(lab: Any, autojump_clock: MockClock) -> None:
    """A flood of packets that each want an answer, at a server whose socket is full."""
    net = SimNet(1)
    port = JammedPort(net.port(*SERVER))
    strange = bytes([0xC0]) + b"\x0a\x0a\x0a\x0a" + bytes([8]) + bytes(8) + bytes([8]) + bytes(8)
    async with lab.listening_at(port) as listener:
        port.jam()
        stranger = net.port("stranger")
        for _ in range(2 * OUTBOX):
            stranger.send([(strange.ljust(1_200, b"\0"), SERVER)])
        await trio.sleep(1)
        assert listener.endpoint.counters["version negotiations"] == 2 * OUTBOX
        assert len(listener.endpoint._outbox) == OUTBOX


@pytest.mark.ci
async def test_timers_of_connections_that_are_gone_are_not_kept(lab: Any, autojump_clock: MockClock) -> None:
    """A connection's first timer is its idle time-out; kept until then, it would keep the connection in memory."""
    net = SimNet(1)

    async def serve() -> None:
        while True:
            (await listener.accept()).accept()

    async with lab.listening(net, idle_timeout=10_000.0) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        for _ in range(150):
            async with lab.dialling(net):
                pass
        await trio.sleep(10)
        assert listener.endpoint.connections == ()
        assert len(listener.endpoint._timers) <= 64
        nursery.cancel_scope.cancel()


async def test_one_request_at_a_time_takes_one_packet_each_way(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends, trio.open_nursery() as nursery:
        nursery.start_soon(echo, ends.server)
        await ask(ends.client, b"warm up")
        await trio.sleep(1)
        before = (ends.client.details().packets_sent, ends.server.details().packets_sent)
        for _ in range(50):
            assert await ask(ends.client, b"ping") == b"ping"
        sent = (ends.client.details().packets_sent - before[0], ends.server.details().packets_sent - before[1])
        assert sent[0] <= 55
        assert sent[1] <= 55
        nursery.cancel_scope.cancel()


async def test_answers_to_many_requests_share_packets(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends, trio.open_nursery() as nursery:
        nursery.start_soon(echo, ends.server)
        await ask(ends.client, b"warm up")
        await trio.sleep(1)
        before = (ends.client.details().packets_sent, ends.server.details().packets_sent)
        async with trio.open_nursery() as askers:
            for _ in range(64):
                askers.start_soon(ask, ends.client, b"ping")
        sent = (ends.client.details().packets_sent - before[0], ends.server.details().packets_sent - before[1])
        assert sent[0] <= 6
        assert sent[1] <= 6
        nursery.cancel_scope.cancel()


async def test_to_send_costs_nothing_for_the_other_sockets_of_the_program(
    lab: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics of trio count all sockets that anybody waits for: 43 us for 800 of them, which each flush would pay."""

    def count_sockets() -> None:
        raise AssertionError("asked trio for its statistics")

    async with lab.connected() as ends, trio.open_nursery() as nursery:
        nursery.start_soon(echo, ends.server)
        monkeypatch.setattr(trio.lowlevel, "current_statistics", count_sockets)
        assert await ask(ends.client, b"x" * 50_000) == b"x" * 50_000
        monkeypatch.undo()
        nursery.cancel_scope.cancel()


async def test_a_datagram_in_answer_to_a_datagram_leaves_at_once(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        await ends.client.send_datagram(b"ping")
        assert (await ends.server.receive_datagram()).data == b"ping"
        before = ends.server.details().packets_sent
        assert ends.server.send_datagram_nowait(b"pong")
        assert ends.server.details().packets_sent == before + 1  # without an await
        assert ends.server.send_datagram_nowait(b"and more")
        assert ends.server.details().packets_sent == before + 1
        assert (await ends.client.receive_datagram()).data == b"pong"
        assert (await ends.client.receive_datagram()).data == b"and more"


async def test_streams_that_came_together_are_read_in_the_task_that_received_them(
    lab: Any, autojump_clock: MockClock
) -> None:
    """A connection actor reads in its callback, so no task has to be woken before the one that waits for the message."""
    async with lab.connected() as ends:
        batches: list[tuple[str, list[bytes | None]]] = []

        def take() -> None:
            came = []
            while (stream := ends.server.accept_stream_nowait()) is not None:
                came.append(stream.receive_nowait())
            batches.append((trio.lowlevel.current_task().name, came))

        ends.server.on_stream(lambda: None)
        ends.server.on_batch(take)
        streams = [await ends.client.open_stream() for _ in range(3)]

        def send() -> None:
            for stream in streams:
                stream.send_nowait(b"x", fin=True)

        before = ends.client.details().packets_sent
        ends.client.together(send)
        assert ends.client.details().packets_sent == before + 1  # all in one packet, without an await
        await trio.sleep(1)
        assert [batch for batch in batches if batch[1]] == [("levada quic receive", [b"x"] * 3)]


async def test_an_engine_that_fails_at_the_first_packet_fails_nobody_else(
    lab: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = SimNet(1)
    async with lab.listening(net) as listener, trio.open_nursery() as nursery:

        def fail(*_: Any) -> None:
            raise RuntimeError("a fault of ours")

        async def accept() -> None:
            incoming = await listener.accept()
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "receive_datagram", fail)
                broken = incoming.accept()
            assert "a fault of ours" in (await broken.wait_closed()).text
            assert broken not in listener.endpoint.connections
            (await listener.accept()).accept()
            nursery.cancel_scope.cancel()

        nursery.start_soon(accept)
        async with lab.dialling(net):  # its next try is a newcomer to the server
            await trio.sleep_forever()


async def test_a_client_handed_out_and_not_decided_about_is_forgotten(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.listening(net, handshake_timeout=3.0) as listener, trio.open_nursery() as nursery:

        async def give_up() -> None:
            async with lab.dialling(net):
                raise AssertionError("nobody accepted it")

        nursery.start_soon(give_up)
        held = await listener.accept()
        assert listener.unfinished == 1
        await trio.sleep(4)
        with trio.move_on_after(0.1):
            await listener.accept()
        assert held.decided
        with pytest.raises(LocalProtocolError, match="waited too long"):
            held.accept()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("linger", "by_peer"), [(5.0, True), (0.0, False)])
async def test_linger_repeats_a_lost_close(lab: Any, autojump_clock: MockClock, linger: float, by_peer: bool) -> None:
    """With it the server knows at once, without it the server waits for the idle time-out."""
    net = SimNet(1)
    accepted: list[QuicConnection] = []

    async def accept() -> None:
        accepted.append((await listener.accept()).accept())

    async with (
        lab.listening(net, keepalive_interval=0.05, idle_timeout=20.0) as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(accept)
        async with lab.dialling(net, linger=linger):
            await trio.sleep(1)
            lost: list[int] = []

            def close_packet(packet: SimPacket) -> bool:
                if packet.source[0] == "client" and not lost:
                    lost.append(packet.n)
                return packet.n in lost

            net.drop(close_packet)
        start = trio.current_time()
        reason = await accepted[0].wait_closed()
        assert reason.by_peer is by_peer
        assert (trio.current_time() - start < 1) is by_peer


async def test_linger_ends_with_the_closing_period(lab: Any, autojump_clock: MockClock) -> None:
    """Three probe time-outs (RFC 9000, 10.2), far less than what it may take at most."""
    net = SimNet(1)
    async with lab.listening(net) as listener, trio.open_nursery() as nursery:

        async def accept() -> None:
            (await listener.accept()).accept()

        nursery.start_soon(accept)
        async with lab.dialling(net, linger=100.0) as client:
            await trio.sleep(1)
            start = trio.current_time()
        assert 0 < trio.current_time() - start < 5
        assert client._endpoint.connections == ()


async def test_a_cancelled_linger_leaves_at_once(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.listening(net) as listener, trio.open_nursery() as nursery:

        async def accept() -> None:
            (await listener.accept()).accept()

        nursery.start_soon(accept)
        endpoints = []
        with trio.move_on_after(30) as scope:
            async with lab.dialling(net, linger=100.0) as client:
                endpoints.append(client._endpoint)
                await trio.sleep(1)
                scope.deadline = trio.current_time() + 0.01
        assert scope.cancelled_caught
        assert trio.current_time() == scope.deadline
        assert not endpoints[0].connections, "what is left behind is forgotten"


async def test_closing_the_connection_drops_what_is_queued_and_says_so(lab: Any, autojump_clock: MockClock) -> None:
    """`close` at once, where `aclose` waits: the receiver gets what had arrived, then the loss; the sender's flush fails."""
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 3_000_000, fin=True)
        await trio.sleep(0.005)
        theirs = await ends.server.accept_stream()
        assert stream.unacked
        ends.client.close(3, "enough")
        with pytest.raises(ConnectionClosed):
            await stream.flush()
        got = 0
        with pytest.raises(ConnectionLost) as caught:
            while data := await theirs.receive_some():
                got += len(data)
        assert caught.value.code == 3
        assert 0 < got < 3_000_000


async def test_a_cancelled_aclose_closes_with_octets_queued(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net) as ends:
        net.partition("client", "server")
        (await ends.client.open_stream()).send_nowait(b"x" * 100_000, fin=True)
        start = trio.current_time()
        with trio.move_on_after(0.5) as scope:
            await ends.client.aclose(9, drain_timeout=60)
        assert scope.cancelled_caught
        assert trio.current_time() - start == pytest.approx(0.5)
        assert (await ends.client.wait_closed()).code == 9


async def test_timers_that_moved_are_not_kept_until_they_come_due(lab: Any, autojump_clock: MockClock) -> None:
    """Each request moves a timer to an earlier time; what it replaces would stay in the heap until the idle time-out."""
    net = SimNet(1)

    async def serve() -> None:
        while True:
            nursery.start_soon(echo, (await listener.accept()).accept())

    async with (
        lab.listening(net, idle_timeout=10_000.0) as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve)
        async with (
            lab.dialling(net, idle_timeout=10_000.0),
            lab.dialling(net, idle_timeout=10_000.0) as second,
            lab.dialling(net, idle_timeout=10_000.0) as third,
        ):
            for _ in range(150):
                for connection in (second, third):
                    await ask(connection, b"x")
                await trio.sleep(1)
            assert len(listener.endpoint._timers) <= 2 * 3 + 64
        nursery.cancel_scope.cancel()


async def test_a_connection_has_the_settings_it_was_dialled_with(lab: Any, autojump_clock: MockClock) -> None:
    async with QuicEndpoint(SimNet(1).port("client"), lab.client()) as endpoint:
        start = trio.current_time()
        connection = endpoint.connect(SERVER, server="server", config=lab.client(handshake_timeout=2.0))
        with pytest.raises(ConnectionLost, match=r"no handshake within 2\.0 s"):
            await connection.handshake()
        assert trio.current_time() - start == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
async def test_timers_are_those_of_aioquic(
    lab: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The short way to the next deadline, compared at each call with aioquic's own, under loss and a change of path.

    Without path MTU discovery, of which aioquic knows nothing.
    """
    ours = Engine.get_timer
    compared = 0

    def both(self: Any) -> float | None:
        nonlocal compared
        compared += 1
        at = ours(self)
        lost_at = self._loss_at
        assert at == AioquicConnection.get_timer(self)
        assert lost_at == self._loss_at
        return at

    monkeypatch.setattr(Engine, "get_timer", both)
    net = SimNet(seed, loss=0.1, jitter=0.005)
    fixed = {"max_packet_size": 1_200}
    async with lab.connected(net, **fixed, client=fixed) as ends, trio.open_nursery() as nursery:
        nursery.start_soon(echo, ends.server)
        assert await ask(ends.client, bytes(100_000)) == bytes(100_000)
        net.rebind(next(port for port in net._ports.values() if port.address[0] == "client"))
        for _ in range(20):
            assert await ask(ends.client, b"ping") == b"ping"
        nursery.cancel_scope.cancel()
    assert compared > 300
