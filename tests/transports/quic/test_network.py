"""Loss, reordering, duplication, delay: everything arrives, and the same seed gives the same packets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from tests.simnet import SimNet, SimPacket, TimeStandsStill
from trio.testing import MockClock

from levada.transports.quic import QuicStream

MEGABYTE = 1 << 20


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


async def transfer(lab: Any, net: SimNet, octets: int = MEGABYTE) -> float:
    """Send octets to the server; return the virtual seconds."""
    data = bytes(range(256)) * (octets // 256)
    async with lab.connected(net, congestion_control="cubic") as ends:
        start = trio.current_time()
        stream = await ends.client.open_stream()
        stream.send_nowait(data, fin=True)
        assert await read_all(await ends.server.accept_stream()) == data
        assert await stream.acked()
        return trio.current_time() - start


@pytest.mark.ci
@pytest.mark.parametrize(
    ("trouble", "bar"),
    [
        ({}, 0.5),
        ({"loss": 0.02}, 4.0),
        ({"duplicate": 0.3}, 0.5),
        ({"reorder": 0.1}, 20.0),
        ({"loss": 0.1, "duplicate": 0.05, "jitter": 0.02}, 40.0),
        ({"rate": 500_000, "queue": 50_000}, 12.0),
    ],
    ids=["clean", "2% loss", "duplicates", "reordering", "10% loss", "bottleneck"],
)
async def test_a_megabyte_crosses(lab: Any, autojump_clock: MockClock, trouble: dict[str, Any], bar: float) -> None:
    assert await transfer(lab, SimNet(3, **trouble)) < bar


@pytest.mark.ci
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_the_same_seed_gives_the_same_packets(lab: Any, repeatable: Callable[[int], None], loss: float) -> None:
    def run(seed: int) -> str:
        repeatable(5)
        net = SimNet(seed, loss=loss, jitter=0.003)
        trio.run(transfer, lab, net, 200_192, clock=MockClock(autojump_threshold=0))
        return net.digest()

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(1, 6))])
async def test_many_streams_and_both_directions_under_loss(lab: Any, autojump_clock: MockClock, seed: int) -> None:
    net = SimNet(seed, loss=0.05, jitter=0.01, duplicate=0.02)

    async def echo(ends: Any) -> None:
        async def one(stream: QuicStream) -> None:
            await stream.send_all(await read_all(stream))
            await stream.send_eof()

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one, await ends.server.accept_stream())

    async def call(ends: Any, n: int) -> None:
        data = bytes([n]) * (1_000 * n + 1)
        stream = await ends.client.open_stream()
        await stream.send_all(data)
        await stream.send_eof()
        assert await read_all(stream) == data, f"seed {seed}"
        assert await stream.acked()

    async with lab.connected(net) as ends, trio.open_nursery() as nursery:
        nursery.start_soon(echo, ends)
        for n in range(20):
            nursery.start_soon(call, ends, n)


@pytest.mark.parametrize("n", range(1, 14))
async def test_any_one_packet_may_be_lost(lab: Any, autojump_clock: MockClock, n: int) -> None:
    """Of handshake, data and acknowledgements, in either direction."""
    net = SimNet(1)
    net.drop(lambda p: p.n == n)
    assert await transfer(lab, net, 20_480) < 5


@pytest.mark.parametrize("n", range(1, 14))
async def test_any_one_packet_may_be_late(lab: Any, autojump_clock: MockClock, n: int) -> None:
    net = SimNet(1)
    net.hold(lambda p: p.n == n, 0.2)
    assert await transfer(lab, net, 20_480) < 5


@pytest.mark.parametrize("n", range(1, 10))
async def test_any_one_packet_may_be_damaged(lab: Any, autojump_clock: MockClock, n: int) -> None:
    net = SimNet(1)
    net.corrupt(lambda p: p.n == n, at=n * 7 % 40)
    assert await transfer(lab, net, 20_480) < 5


async def test_a_partition_that_heals_in_time_costs_only_time(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net) as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 300_000, fin=True)
        await trio.sleep(0.03)
        net.partition("client", "server")
        await trio.sleep(8)
        net.heal()
        assert len(await read_all(await ends.server.accept_stream())) == 300_000


async def test_one_way_loss_is_survived(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(9)
    net.link("server", "client", loss=0.3)
    assert await transfer(lab, net, 200_192) < 30


async def test_lost_resets_and_stops_are_said_again(lab: Any, autojump_clock: MockClock) -> None:
    """Also streams, credit and windows: everything that is said once must be repeated when lost."""
    net = SimNet(4, loss=0.2)
    async with lab.connected(net) as ends:
        for n in range(30):
            stream = await ends.client.open_stream()
            stream.send_nowait(b"x" * 100)
            theirs = await ends.server.accept_stream()
            if n % 2:
                stream.reset(n)
                with pytest.raises(Exception, match=f"code {n}"):
                    while True:
                        await theirs.receive_some()
                await theirs.send_eof()
            else:
                theirs.stop(n)
                assert await stream.stopped() == n
                await theirs.send_eof()
                await read_all(stream)
        await trio.sleep(10)
        assert len(ends.client.streams) + len(ends.server.streams) == 0


# ---------------------------------------------------------------- the network itself


async def test_a_timer_that_does_not_move_is_noticed(autojump_clock: MockClock) -> None:
    net = SimNet(1, turns=100)
    port = net.port("a")
    with pytest.raises(TimeStandsStill, match="seed 1"):
        while True:
            port.send([(b"x", ("b", 1))])


async def test_rate_queue_and_mtu(autojump_clock: MockClock) -> None:
    net = SimNet(1, delay=0.1, rate=1_000, queue=1_500, mtu=600)
    a, b = net.port("a", 1), net.port("b", 1)
    a.send([(b"x" * 500, b.address)] * 5 + [(b"x" * 601, b.address)])
    times = []
    with trio.move_on_after(10):
        while True:
            for _ in await b.receive():
                times.append(round(trio.current_time(), 6))
    assert times == [0.6, 1.1, 1.6, 2.1]
    assert (net.sent, net.lost) == (6, 2)


async def test_faults_change_single_packets(autojump_clock: MockClock) -> None:
    net = SimNet(1)
    a, b = net.port("a", 1), net.port("b", 1)
    seen: list[SimPacket] = []
    net.fault(seen.append)
    net.drop(lambda p: p.n == 0)
    net.corrupt(lambda p: p.n == 1, at=0, mask=0xFF)
    net.hold(lambda p: p.n == 2, 1.0)
    a.send([(b"\x00", b.address)] * 4)
    await trio.sleep(0.5)
    assert await b.receive() == [(b"\xff", a.address), (b"\x00", a.address)]
    assert await b.receive() == [(b"\x00", a.address)]
    assert trio.current_time() == pytest.approx(1.01)
    assert [p.n for p in seen] == [0, 1, 2, 3]


async def test_addresses_are_taken_once_and_can_move(autojump_clock: MockClock) -> None:
    net = SimNet(1)
    a, b = net.port("a", 1), net.port("b", 1)
    with pytest.raises(OSError, match="in use"):
        net.port("a", 1)
    new = net.rebind(a)
    a.send([(b"from the new one", b.address)])
    assert await b.receive() == [(b"from the new one", new)]
    b.send([(b"lost", ("a", 1)), (b"found", new)])
    assert await a.receive() == [(b"found", b.address)]
    b.close()
    with pytest.raises(trio.ClosedResourceError):
        await b.receive()


async def test_a_port_is_not_moved_onto_another(autojump_clock: MockClock) -> None:
    net = SimNet(1)
    first = net.port("a")
    taken = net.port("a", first.address[1] + 1)
    with pytest.raises(OSError, match="in use"):
        net.rebind(first, taken.address[1])
    moved = net.rebind(first)
    assert moved not in (taken.address, ("a", taken.address[1] - 1))
    b = net.port("b", 1)
    b.send([(b"one", taken.address), (b"two", moved)])
    assert await taken.receive() == [(b"one", b.address)]
    assert await first.receive() == [(b"two", b.address)]


async def test_a_cancelled_receive_of_a_port_loses_nothing(autojump_clock: MockClock) -> None:
    net = SimNet(1)
    a, b = net.port("a"), net.port("b")
    a.send([(b"here", b.address)])
    await trio.sleep(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await b.receive()
    assert scope.cancelled_caught
    assert await b.receive() == [(b"here", a.address)]
