"""New keys, new addresses and a Retry while packets get lost: nobody waits until the idle time-out for what the other has said long ago."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from tests.simnet import SimNet, SimPacket
from trio.testing import MockClock

from levada.transports.quic import ClientSessions, QuicListener, QuicStream, TicketStore


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


def the_first_from(host: str, count: int = 1) -> Callable[[SimPacket], bool]:
    """Say which packets are the next ones that a host sends."""
    numbers: set[int] = set()

    def is_one(packet: SimPacket) -> bool:
        if packet.source[0] == host and len(numbers) < count:
            numbers.add(packet.n)
        return packet.n in numbers

    return is_one


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("moved", [False, True], ids=["", "under a new connection id"])
@pytest.mark.parametrize("updating", ["client", "server"])
async def test_a_lost_acknowledgement_under_new_keys_leaves_the_other_side_understood(
    lab: Any, autojump_clock: MockClock, updating: str, moved: bool
) -> None:
    """RFC 9001, section 6.1: until the peer follows, its packets come under the old keys, and nothing else would make it follow."""
    net = SimNet(1)
    async with lab.connected(net) as ends:
        await trio.sleep(1)
        one, other = (ends.client, ends.server) if updating == "client" else (ends.server, ends.client)
        if moved:
            ends.client.change_path()
        assert one.send_datagram_nowait(b"acknowledged under the first keys")
        await trio.sleep(1)
        one.update_keys()
        await trio.sleep(0.1)  # there is nothing to say yet
        net.drop(the_first_from(updating))
        for n in range(20):
            assert other.send_datagram_nowait(b"%d" % n)
            assert (await one.receive_datagram()).data == b"%d" % n
            await trio.sleep(0.1)
        assert net.lost == 1
        assert {end.engine._crypto.recv.key_phase for end in (one, other)} == {1}


async def test_packets_of_a_moved_client_under_old_keys_are_read(lab: Any, autojump_clock: MockClock) -> None:
    """The server renews its keys while the client leaves: each waits for a packet of the other, one by key and one by address."""
    net = SimNet(1)
    async with lab.connected(net) as ends:
        assert ends.server.send_datagram_nowait(b"acknowledged under the first keys")
        await trio.sleep(1)
        net.drop(the_first_from("server"))
        ends.server.update_keys()
        assert ends.server.send_datagram_nowait(b"lost")
        ends.client._endpoint.rebind(net.port("elsewhere"))
        stream = await ends.client.open_stream()
        stream.send_nowait(b"here", fin=True)
        with trio.fail_after(2):
            assert await read_all(await ends.server.accept_stream()) == b"here"
        await trio.sleep(1)
        assert ends.client.engine._crypto.recv.key_phase == ends.server.engine._crypto.recv.key_phase == 1


async def test_a_client_takes_the_short_way_also_under_a_new_connection_id(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        await trio.sleep(1)
        first = ends.client.engine.host_cid
        ends.client.change_path()
        await trio.sleep(1)
        assert ends.server.send_datagram_nowait(b"x")
        await ends.client.receive_datagram()
        assert ends.client.engine.receiving._context.host_cid == ends.server.engine._peer_cid.cid != first


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_server_that_spoke_in_vain_for_long_follows_its_client_at_once(
    lab: Any, autojump_clock: MockClock, lost: int
) -> None:
    """Its probes have become rare; the new address has to be validated before the time for that is over, also if challenges get lost."""
    net = SimNet(1)
    async with lab.connected(net) as ends:
        await trio.sleep(1)
        theirs = await ends.server.open_stream()
        net.rebind(ends.client._endpoint._port)
        theirs.send_nowait(b"x" * 50_000, fin=True)
        await trio.sleep(8)
        assert ends.server.engine._loss._pto_count >= 6
        net.drop(the_first_from("server", lost))
        ours = await ends.client.open_stream()
        ours.send_nowait(b"here", fin=True)
        with trio.fail_after(2):
            assert len(await read_all(await ends.client.accept_stream())) == 50_000
        assert ends.server.engine._network_paths[0].is_validated
        assert ends.server.peer_address == ends.client._endpoint._port.address


async def test_a_client_that_moves_before_its_handshake_is_confirmed_is_found(
    lab: Any, autojump_clock: MockClock
) -> None:
    """HANDSHAKE_DONE goes to the old address, and a server has no keys any more for the end of the handshake that the client repeats."""
    net = SimNet(1)
    async with lab.connected(net) as ends:
        net.drop(the_first_from("elsewhere"))
        ends.client._endpoint.rebind(net.port("elsewhere"))
        assert not ends.client.engine._handshake_confirmed
        theirs = await ends.server.open_stream()
        theirs.send_nowait(b"x" * 5_000, fin=True)
        with trio.fail_after(3):
            assert len(await read_all(await ends.client.accept_stream())) == 5_000
        assert ends.client.engine._handshake_confirmed


async def test_the_way_to_a_new_address_may_be_narrower(lab: Any, autojump_clock: MockClock) -> None:
    """RFC 9000, section 14: a packet size is known for one path only; the answer to a challenge has to pass, too."""
    net = SimNet(1)
    net.link("elsewhere", "server", mtu=1_200)
    net.link("server", "elsewhere", mtu=1_200)
    async with lab.connected(net) as ends:
        await trio.sleep(2)
        sizes = [end.details().packet_size for end in (ends.client, ends.server)]
        assert sizes == [1_452, 1_452]
        ends.client._endpoint.rebind(net.port("elsewhere"))
        await trio.sleep(0.3)
        assert ends.server.engine._network_paths[0].is_validated
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 100_000, fin=True)
        theirs = await ends.server.accept_stream()
        with trio.fail_after(2):
            assert len(await read_all(theirs)) == 100_000
        theirs.send_nowait(b"y" * 100_000, fin=True)
        with trio.fail_after(2):
            assert len(await read_all(stream)) == 100_000
        await trio.sleep(20)
        sizes = [end.details().packet_size for end in (ends.client, ends.server)]
        assert sizes == [1_200, 1_200]


@pytest.mark.parametrize("host", ["client", "elsewhere"])
async def test_what_is_known_of_a_path_is_not_said_of_another(lab: Any, autojump_clock: MockClock, host: str) -> None:
    """RFC 9000, section 9.4: window and round trip begin anew for a new address; a port may be a NAT's doing only."""
    net = SimNet(1)
    net.link("elsewhere", "server", delay=0.1)
    net.link("server", "elsewhere", delay=0.1)
    async with lab.connected(net) as ends:
        stream = await ends.server.open_stream()
        stream.send_nowait(b"x" * 500_000, fin=True)
        await read_all(await ends.client.accept_stream())
        await trio.sleep(1)
        window = ends.server.engine._loss.congestion_window
        assert window > 100_000
        assert ends.server.engine.smoothed_rtt < 0.03
        ends.client._endpoint.rebind(net.port(host))
        await trio.sleep(1)
        assert ends.server.peer_address[0] == host
        if host == "client":
            assert ends.server.engine._loss.congestion_window >= window
            assert ends.server.engine.smoothed_rtt < 0.03
        else:
            assert ends.server.engine._loss.congestion_window < 20_000
            assert ends.server.engine.smoothed_rtt == pytest.approx(0.2, abs=0.01)
        for end in (ends.client, ends.server):
            assert end.engine._loss.bytes_in_flight == 0


# ---------------------------------------------------------------- Retry


async def test_early_data_before_a_retry_is_sent_again(lab: Any, autojump_clock: MockClock) -> None:
    """RFC 9000, section 17.2.5.3: a Retry says nothing about what else was sent, and nothing of that was kept."""
    net, sessions, tickets = SimNet(1), ClientSessions(), TicketStore()

    async def serve(listener: QuicListener) -> None:
        connection = (await listener.accept()).accept()
        while True:
            stream = await connection.accept_stream()
            stream.send_nowait(await read_all(stream), fin=True)

    for early in (False, True):
        # Another secret: the token of the first connection is worth nothing for the second, which has to prove its address.
        async with (
            lab.listening(net, retry="always", tickets=tickets, secret=bytes((early,)) * 32) as listener,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(serve, listener)
            async with lab.dialling(net, sessions=sessions, early=early) as connection:
                streams = [await connection.open_stream() for _ in range(4)]
                for n, stream in enumerate(streams):
                    stream.send_nowait(b"%d" % n * 2_000, fin=True)
                with trio.fail_after(5):
                    got = [await read_all(stream) for stream in streams]
                assert got == [b"%d" % n * 2_000 for n in range(4)]
                await trio.sleep(1)
                assert listener.endpoint.counters["retries"] == 1
                assert connection.info.early_data_accepted is (True if early else None)
                assert connection.engine._loss.bytes_in_flight == 0
            nursery.cancel_scope.cancel()
