"""The life of a connection: datagrams, ends, time-outs, keys, paths."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import trio
from aioquic.quic.packet import QuicPreferredAddress, push_quic_transport_parameters
from aioquic.tls import Epoch
from cryptography.hazmat.primitives import serialization
from tests.simnet import SimNet, SimPacket
from trio.testing import MockClock

from levada.framework.errors import (
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    DatagramTooLarge,
    IdleTimeout,
    LocalProtocolError,
)
from levada.transports.carriers.contracts import CloseReason
from levada.transports.quic import QuicConfig, QuicConnection, QuicListener, QuicStream, dial, listen
from levada.transports.quic.tokens import reset_token


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


# ---------------------------------------------------------------- failed handshakes


async def test_a_failed_handshake_is_in_the_error_and_in_one_line_of_the_listener(
    lab: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Aioquic warns on both sides too. Without handlers, as in a program that configures no logging, Python would print that."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    net = SimNet(1)
    served: list[CloseReason] = []

    async def accept(listener: QuicListener) -> None:
        served.append(await (await listener.accept()).accept().wait_closed())

    async with lab.listening(net, alpn=("one",)) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(accept, listener)
        with pytest.raises(ConnectionLost, match="0x178: No common ALPN protocols"):
            async with lab.dialling(net, alpn=("another",)):
                pass
    assert served == [CloseReason(0x178, "No common ALPN protocols", lost=True)]
    out, line = capsys.readouterr()
    assert out == ""
    assert line.startswith("quic://server:4433 turned client:")
    assert line.endswith(" away: its handshake was not finished: No common ALPN protocols (code 0x178)\n")


async def test_what_the_engine_logs_is_for_debugging_and_of_printable_text(
    lab: Any, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with lab.connected() as ends:
        ends.client.close(7, "enough\nERROR all is lost")
        await ends.server.wait_closed()
    records = [record for record in caplog.records if record.name == "levada.transports.quic.engine"]
    assert {record.levelname for record in records} == {"DEBUG"}
    (said,) = [record.getMessage() for record in records if "close received" in record.getMessage()]
    assert said.endswith(r" Connection close received (code 0x7, reason enough\nERROR all is lost)")


# ---------------------------------------------------------------- datagrams


async def test_datagrams_arrive(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        await ends.client.send_datagram(b"one")
        assert ends.client.send_datagram_nowait(b"two")
        assert [(await ends.server.receive_datagram()).data for _ in range(2)] == [b"one", b"two"]
        largest = ends.server.max_datagram_size()
        assert 1_100 < largest < 1_452
        await ends.server.send_datagram(b"x" * largest)
        assert len((await ends.client.receive_datagram()).data) == largest


async def test_a_datagram_that_does_not_fit_is_refused(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        limit = ends.client.max_datagram_size()
        with pytest.raises(DatagramTooLarge) as caught:
            await ends.client.send_datagram(b"x" * (limit + 1))
        assert (caught.value.size, caught.value.limit) == (limit + 1, limit)


async def test_a_peer_may_take_no_datagrams(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(datagrams=False) as ends:
        assert ends.client.max_datagram_size() == 0
        with pytest.raises(DatagramTooLarge):
            await ends.client.send_datagram(b"x")


async def test_the_queues_of_datagrams_are_bounded(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(datagram_queue=5, client={"datagram_queue": 8}) as ends:
        taken = sum(ends.client.send_datagram_nowait(bytes([n])) for n in range(20))
        assert taken == 8
        await ends.client.send_datagram(b"the ninth waits for room")
        await trio.sleep(1)
        assert ends.server.statistics().datagrams_dropped == 4
        got = [(await ends.server.receive_datagram()).data for _ in range(5)]
        assert got == [b"\x04", b"\x05", b"\x06", b"\x07", b"the ninth waits for room"]


# ---------------------------------------------------------------- ends


async def test_close_carries_code_and_reason(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        ends.client.close(42, "no more")
        assert await ends.client.wait_closed() == CloseReason(42, "no more")
        assert await ends.server.wait_closed() == CloseReason(42, "no more", by_peer=True)
        with pytest.raises(ConnectionClosed):
            await ends.client.open_stream()
        with pytest.raises(ConnectionLost) as caught:
            await ends.server.accept_stream()
        assert caught.value.code == 42
        ends.client.close(43)
        assert (await ends.client.wait_closed()).code == 42


async def test_aclose_delivers_finished_streams_first(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 500_000, fin=True)
        unfinished = await ends.client.open_stream()
        unfinished.send_nowait(b"y")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.client.aclose, 5)
            theirs = await ends.server.accept_stream()
            assert await read_all(theirs) == b"x" * 500_000
        assert (await ends.server.wait_closed()).code == 5


async def test_aclose_gives_up_after_the_drain_time(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net) as ends:
        net.partition("client", "server")
        (await ends.client.open_stream()).send_nowait(b"x", fin=True)
        start = trio.current_time()
        await ends.client.aclose(drain_timeout=2.0)
        assert trio.current_time() - start == pytest.approx(2.0)


async def test_data_that_arrived_before_the_close_is_read(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"last words", fin=True)
        await ends.client.aclose()
        await ends.server.wait_closed()
        theirs = await ends.server.accept_stream()
        assert await read_all(theirs) == b"last words"
        with pytest.raises(ConnectionLost):
            await ends.server.accept_stream()


async def test_a_lost_close_is_said_again(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net, client={"keepalive_interval": 0.05}) as ends:
        await trio.sleep(2)
        dropped: list[int] = []

        def first_of_the_server(packet: SimPacket) -> bool:
            if packet.source[0] == "server" and not dropped:
                dropped.append(packet.n)
            return packet.n in dropped

        ends.server.close(7)
        net.drop(first_of_the_server)
        assert (await ends.client.wait_closed()).code == 7
        assert len(dropped) == 1


async def test_silence_is_an_idle_time_out(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net, client={"idle_timeout": 5.0}) as ends:
        start = trio.current_time()
        net.partition("client", "server")
        with pytest.raises(IdleTimeout):
            await ends.client.accept_stream()
        assert 4.9 < trio.current_time() - start < 5.2
        assert (await ends.client.wait_closed()).lost
        with pytest.raises(IdleTimeout):
            await ends.server.accept_stream()
        await trio.sleep(1)
        assert ends.listener.endpoint.connections == ()


async def test_keepalive_keeps_a_quiet_connection(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(idle_timeout=5.0, client={"keepalive_interval": 1.0}) as ends:
        await trio.sleep(100)
        assert not ends.client.closed
        assert not ends.server.closed
        before = ends.net.sent
        await trio.sleep(100)
        assert 190 <= ends.net.sent - before <= 320


async def test_a_quiet_connection_without_keepalive_ends(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(idle_timeout=5.0) as ends:
        await trio.sleep(10)
        assert ends.client.closed


async def test_nobody_answers(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    start = trio.current_time()
    with pytest.raises(ConnectionLost, match="no handshake within 3"):
        async with lab.dialling(net, handshake_timeout=3.0):
            pass
    assert trio.current_time() - start == pytest.approx(3.0, abs=0.01)


async def test_a_wrong_certificate_is_refused(lab: Any, autojump_clock: MockClock) -> None:
    async def accept(listener: Any) -> None:
        with pytest.raises(ConnectionLost, match="0x1"):
            await (await listener.accept()).accept().handshake()

    async with lab.listening(net := SimNet(1)) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(accept, listener)
        with pytest.raises(ConnectionLost, match="transport error 0x1"):
            async with lab.dialling(net, ca=None):
                pass


async def test_protocols_must_agree(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.listening(net := SimNet(1), alpn=("one",)) as listener, trio.open_nursery() as nursery:

        async def accept() -> None:
            with pytest.raises(ConnectionLost):
                await (await listener.accept()).accept().handshake()

        nursery.start_soon(accept)
        with pytest.raises(ConnectionLost, match="0x178"):  # TLS alert 120, no_application_protocol
            async with lab.dialling(net, alpn=("two",)):
                pass


async def test_an_error_in_the_block_comes_out_as_it_is(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    accepted = []

    async def serve(listener: Any) -> None:
        accepted.append((await listener.accept()).accept())

    async with lab.listening(net) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        with pytest.raises(KeyError, match="mine"):
            async with lab.dialling(net):
                raise KeyError("mine")


async def test_urls_are_checked(lab: Any, autojump_clock: MockClock) -> None:
    names = (
        "tcp://server:1",
        "quic://server",
        "quic://server:0",
        "quic://:1",
        "quic://server:99999",
        "quic://[::1",
        "quic://server:1/path",
    )
    for url in (*names, f"quic://{'x' * 70}.test:1"):
        with pytest.raises(ConfigurationError):
            async with dial(url):
                pass
    with pytest.raises(ConfigurationError, match="certificate"):
        async with listen("quic://server:1", QuicConfig(), port=SimNet(1).port("server")):
            pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("idle_timeout", math.inf),
        ("idle_timeout", 1e300),
        ("idle_timeout", 0.0),
        ("stream_window", 1 << 62),
        ("connection_window", 1 << 62),
        ("max_streams", (1 << 60) + 1),
    ],
)
def test_settings_that_peers_cannot_be_told_of(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        QuicConfig(**{name: value})  # type: ignore[arg-type]


async def test_files_and_addresses_that_cannot_be_had(certificate: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    file, key = certificate.certificate, certificate.private_key
    locked = tmp_path / "locked.pem"
    secret = serialization.load_pem_private_key(key.read_bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    locked.write_bytes(secret)
    for wrong, words in (
        (QuicConfig(certificate=tmp_path / "missing", key=key), "missing"),
        (QuicConfig(certificate=other, key=key), "other.pem"),
        (QuicConfig(certificate=file, key=other), "other.pem"),
        (QuicConfig(certificate=file, key=locked), "locked.pem"),
        (QuicConfig(certificate=file, key=key, key_password="too much"), "key.pem"),
        (QuicConfig(certificate=file), "set `key`"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            async with listen("quic://server:1", wrong, port=SimNet(1).port("server")):
                pass
    with pytest.raises(ConfigurationError, match="missing"):
        async with dial("quic://server:1", QuicConfig(ca=tmp_path / "missing"), port=SimNet(1).port("client")):
            pass
    good = QuicConfig(certificate=file, key=key)
    async with listen("quic://127.0.0.1:0", good) as listener:
        with pytest.raises(ConfigurationError, match=r"cannot listen at .* another process .* choose another port"):
            async with listen(listener.url, good):
                pass


def test_configurations_are_checked() -> None:
    wrong: Any
    for wrong in (
        {"packet_size": 1_199},
        {"packet_size": 16_385},
        {"max_packet_size": 16_385},
        {"low_watermark": 2, "high_watermark": 1},
        {"secret": b"short"},
        {"idle_timeout": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            QuicConfig(**wrong)
    assert QuicConfig(packet_size="loopback").initial_packet_size == 16_384


# ---------------------------------------------------------------- incoming


async def test_incoming_can_be_refused_and_ignored_and_only_once(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)

    async def serve(listener: Any) -> None:
        incoming = await listener.accept()
        assert incoming.peer.startswith("client:")
        assert not incoming.validated
        incoming.refuse()
        with pytest.raises(LocalProtocolError):
            incoming.accept()
        (await listener.accept()).ignore()

    async with lab.listening(net) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        with pytest.raises(ConnectionLost, match="transport error 0x2"):
            async with lab.dialling(net):
                pass
        with pytest.raises(ConnectionLost, match="no handshake within 2"):
            async with lab.dialling(net, handshake_timeout=2.0):
                pass
        nursery.cancel_scope.cancel()


async def test_an_incoming_can_be_sent_back_to_prove_its_address(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    connections: list[QuicConnection] = []

    async def serve(listener: Any) -> None:
        (await listener.accept()).retry()
        assert listener.unfinished == 0
        second = await listener.accept()
        assert second.validated
        with pytest.raises(LocalProtocolError, match="has proved"):
            second.retry()
        connections.append(second.accept())

    async with lab.listening(net) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        async with lab.dialling(net) as client:
            assert not client.closed
    assert len(connections) == 1


async def test_a_closed_listener_accepts_nothing_and_its_connections_live_on(
    lab: Any, autojump_clock: MockClock
) -> None:
    async with lab.connected() as ends:
        await ends.listener.aclose()
        with pytest.raises(ConnectionClosed):
            await ends.listener.accept()
        stream = await ends.client.open_stream()
        stream.send_nowait(b"still here", fin=True)
        assert await read_all(await ends.server.accept_stream()) == b"still here"


# ---------------------------------------------------------------- keys and paths


async def test_keys_can_be_updated_again_and_again(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        for n in range(6):
            (ends.client if n % 2 else ends.server).update_keys()
            stream = await ends.client.open_stream()
            stream.send_nowait(b"x" * 50_000, fin=True)
            assert len(await read_all(await ends.server.accept_stream())) == 50_000


async def test_keys_are_never_two_updates_ahead_of_the_peer(lab: Any, autojump_clock: MockClock) -> None:
    """RFC 9001, section 6.1: the next update waits until the peer has acknowledged something under the keys of the last one."""
    net = SimNet(1)
    async with lab.connected(net) as ends:
        await trio.sleep(1)
        assert ends.client.send_datagram_nowait(b"acknowledged under the first keys")
        await trio.sleep(1)
        net.partition("client", "server")
        for _ in range(4):
            ends.client.update_keys()
            assert ends.client.send_datagram_nowait(b"lost")
            await trio.sleep(0.1)
        net.heal()
        for _ in range(5):
            stream = await ends.client.open_stream()
            stream.send_nowait(b"found", fin=True)
            assert await read_all(await ends.server.accept_stream()) == b"found"
            await trio.sleep(1)
        phase = ends.server.engine._cryptos[Epoch.ONE_RTT].recv.key_phase
        assert phase == 0, "one update at once, and one that waited for all that were asked for meanwhile"


async def test_keys_are_updated_before_their_limit(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(client={"key_update_after": 100}) as ends:
        phases = set()
        for _ in range(10):
            stream = await ends.client.open_stream()
            stream.send_nowait(b"x" * 50_000, fin=True)
            await read_all(await ends.server.accept_stream())
            phases.add(ends.server.engine._cryptos[Epoch.ONE_RTT].recv.key_phase)
        assert phases == {0, 1}


async def test_a_client_behind_a_nat_that_forgets_is_followed(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net) as ends:
        port = ends.client._endpoint._port
        old = ends.server.peer_address
        net.rebind(port)
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 100_000, fin=True)
        theirs = await ends.server.accept_stream()
        assert len(await read_all(theirs)) == 100_000
        theirs.send_nowait(b"y" * 100_000, fin=True)
        assert len(await read_all(stream)) == 100_000
        assert ends.server.peer_address != old
        assert ends.server.engine._network_paths[0].is_validated


async def test_a_client_moves_to_another_port(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net) as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"before ")
        theirs = await ends.server.accept_stream()
        ends.client._endpoint.rebind(net.port("elsewhere"))
        await trio.sleep(1)
        assert ends.server.peer_address[0] == "elsewhere"
        stream.send_nowait(b"after", fin=True)
        assert await read_all(theirs) == b"before after"


async def test_the_packet_size_grows_to_what_the_path_carries(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(SimNet(1)) as ends:
        await trio.sleep(2)
        assert ends.client.details().packet_size == 1_452
        assert ends.client.max_datagram_size() > 1_400


@pytest.mark.parametrize("mtu", [1_200, 1_280, 1_350, 1_400])
async def test_the_packet_size_stops_where_the_path_does(lab: Any, autojump_clock: MockClock, mtu: int) -> None:
    async with lab.connected(SimNet(1, mtu=mtu)) as ends:
        await trio.sleep(25)
        assert mtu - 20 < ends.client.details().packet_size <= mtu
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 100_000, fin=True)
        assert len(await read_all(await ends.server.accept_stream())) == 100_000


async def test_a_path_that_shrinks_is_noticed(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net) as ends:
        await trio.sleep(2)
        assert ends.client.details().packet_size == 1_452
        net.blackhole("client", "server", larger_than=1_300)
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 100_000, fin=True)
        with trio.fail_after(20):
            assert len(await read_all(await ends.server.accept_stream())) == 100_000
        assert ends.client.details().packet_size == 1_200


async def test_large_packets_on_loopback_are_asked_for(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1, mtu=65_535)
    async with lab.connected(net, packet_size="loopback", client={"packet_size": "loopback"}) as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 1_000_000, fin=True)
        assert len(await read_all(await ends.server.accept_stream())) == 1_000_000
        assert max(size for *_, size in net.trace) == 16_384


async def test_no_packet_is_larger_than_the_peer_takes(
    lab: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that begins with large packets, and a client that says in its transport parameters that it takes 1,400 octets."""

    def push_less(buffer: Any, parameters: Any) -> None:
        parameters.max_udp_payload_size = 1_400
        push_quic_transport_parameters(buffer, parameters)

    monkeypatch.setattr("aioquic.quic.connection.push_quic_transport_parameters", push_less)
    net = SimNet(1, mtu=65_535)
    async with lab.connected(net, packet_size="loopback") as ends:
        stream = await ends.server.open_stream()
        stream.send_nowait(b"x" * 100_000, fin=True)
        assert len(await read_all(await ends.client.accept_stream())) == 100_000
        assert max(size for _, source, _, size in net.trace if source[0] == "server") == 1_400


async def test_a_client_moves_to_the_address_that_its_server_prefers(
    lab: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RFC 9000, section 9.6; the server here, which has no way to say so, says it by a changed transport parameter."""
    net = SimNet(1)
    port = net.port("10.0.0.1", 4433)
    net._ports["10.0.0.1", 5544] = port  # it hears at both
    async with lab.listening_at(port) as listener, trio.open_nursery() as nursery:
        endpoint = listener.endpoint
        ids = [b"\0prefer%d" % number for number in range(9)]
        new_ids = iter(ids)
        monkeypatch.setattr(endpoint, "new_cid", lambda: next(new_ids))
        preferred = QuicPreferredAddress(("10.0.0.1", 5544), None, ids[1], reset_token(endpoint.secret, ids[1]))

        def push_more(buffer: Any, parameters: Any) -> None:
            if parameters.original_destination_connection_id is not None:  # a server's
                parameters.preferred_address = preferred
            push_quic_transport_parameters(buffer, parameters)

        monkeypatch.setattr("aioquic.quic.connection.push_quic_transport_parameters", push_more)
        accepted: list[QuicConnection] = []

        async def accept() -> None:
            accepted.append((await listener.accept()).accept())

        nursery.start_soon(accept)
        config = lab.client(server_name="server")
        async with dial("quic://10.0.0.1:4433", config, port=net.port("10.0.0.9")) as client:
            await trio.sleep(1)
            assert client.peer_address == ("10.0.0.1", 5544)
            stream = await client.open_stream()
            stream.send_nowait(b"hello", fin=True)
            assert await read_all(await accepted[0].accept_stream()) == b"hello"
            assert await stream.acked()
