"""Over QUIC on a network that loses, delays and reorders packets; and over a real loopback socket."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.actors.aqueduct import AqueductConfig, PeerConfig, connect, serve
from levada.framework import ActorSystem, TerminalState, channel, oneshot
from levada.framework.errors import ChannelConnectionLost, ConnectionLost
from levada.transports.quic import QuicConfig

from .conftest import Parcel, Start, settled

NOTHING = (0,) * 10


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_loss_and_reordering_change_nothing_that_is_reliable(
    start_on_network: Start, seed: int, autojump_clock: MockClock
) -> None:
    """Every message once, ordered ones in order, all ends as asked for, nothing left behind."""
    net = SimNet(seed, delay=0.02, jitter=0.03, loss=0.05, turns=200_000)
    async with start_on_network(net) as ends:
        ordered, at_peer = channel(int)
        unordered, also_at_peer = channel(int)
        from_peer, back = channel(int)
        answer, asked = oneshot(str)
        await ends.peer.send(
            Parcel(receiver=at_peer, many=[also_at_peer], sender=from_peer, sends_one=answer, inner=Parcel("deep"))
        )
        got = await ends.got.receive()
        results: dict[str, list[int]] = {}

        async def send(sender: Any) -> None:
            async with sender:
                for number in range(100):
                    await sender.send(number)

        async def take(name: str, receiver: Any) -> None:
            results[name] = [number async for number in receiver]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, ordered)
            nursery.start_soon(send, unordered.unordered(16))
            nursery.start_soon(send, got.sender)
            nursery.start_soon(take, "ordered", got.receiver)
            nursery.start_soon(take, "unordered", got.many[0])
            nursery.start_soon(take, "back", back)
            got.sends_one.send("done")
            assert await asked == "done"
        assert results["ordered"] == results["back"] == list(range(100))
        assert sorted(results["unordered"]) == list(range(100))
        await settled()
        assert ends.left() == NOTHING


async def test_datagrams_that_are_lost_are_known_to_be_lost(start_on_network: Start, autojump_clock: MockClock) -> None:
    net = SimNet(5, delay=0.01, loss=0.2, turns=200_000)
    async with start_on_network(net) as ends:
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(receiver=receiver))
        remote = (await ends.got.receive()).receiver
        sender.unreliable()
        receipts = []
        for number in range(100):
            receipts.append(await sender.send(number, receipt=True))
            await trio.sleep(0.01)
        sender.finish_nowait()
        arrived = [number async for number in remote]
        delivered = [await receipt for receipt in receipts]
        assert arrived == [number for number in range(100) if delivered[number]]
        assert 50 < len(arrived) < 100
        await settled()
        assert ends.left() == NOTHING


async def test_a_network_that_falls_silent_is_a_lost_connection(
    start_on_network: Start, autojump_clock: MockClock
) -> None:
    net = SimNet(6, delay=0.01, turns=200_000)
    async with start_on_network(net) as ends:
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(sender=sender))
        got = await ends.got.receive()
        net.partition("client", "server")
        with pytest.raises(ChannelConnectionLost):
            await receiver.receive()
        assert await got.sender.terminated() is TerminalState.CONNECTION_LOST
        await ends.peer.terminated()
        assert not ends.client.core.halves
        net.heal()


async def test_more_streams_than_the_peer_allows_wait(start_on_network: Start, autojump_clock: MockClock) -> None:
    """Streams of messages wait for credit in their order; acks do not wait for them."""
    net = SimNet(7, delay=0.01, turns=200_000)
    async with start_on_network(net) as ends:  # the carrier's own default: 128 streams at once
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(receiver=receiver))
        remote = (await ends.got.receive()).receiver
        sender.unordered(256)
        for number in range(250):
            sender.send_nowait(number)
        sender.finish_nowait()
        assert sorted([number async for number in remote]) == list(range(250))
        pairs = [channel(int) for _ in range(150)]
        await ends.peer.send(Parcel(many=[there for _, there in pairs]))
        for number, (here, _) in enumerate(pairs):
            here.send_nowait(number)
            here.finish_nowait()
        got = await ends.got.receive()
        assert [[n async for n in there] for there in got.many] == [[n] for n in range(150)]
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.rule("AQ-14")
async def test_aq14_e11_a_peer_without_datagrams_is_refused(quic: tuple[QuicConfig, QuicConfig]) -> None:
    """Both ends accept datagrams; without them the connection closes."""

    async def ignore(m: Any) -> None: ...

    async with ActorSystem() as system:
        server = PeerConfig(carrier=attrs.evolve(quic[0], datagrams=False))
        async with serve(system, "aqueduct://127.0.0.1:0", ignore, Any, config=server) as listener:
            client = PeerConfig(carrier=attrs.evolve(quic[1], server_name="localhost"))
            with pytest.raises(ConnectionLost, match="E-11"):
                async with connect(system, listener.url, Parcel, config=client):
                    pass


@pytest.mark.loopback
async def test_over_a_real_socket(quic: tuple[QuicConfig, QuicConfig]) -> None:
    async def double(m: Parcel) -> None:
        assert m.sender is not None
        assert m.receiver is not None
        async with m.sender as sender:
            async for number in m.receiver:
                await sender.send(2 * number)

    async with ActorSystem() as system:
        server = PeerConfig(carrier=quic[0])
        async with serve(system, "aqueduct://127.0.0.1:0", double, Any, config=server) as listener:
            assert listener.url.startswith("aqueduct://127.0.0.1:")
            client = PeerConfig(carrier=attrs.evolve(quic[1], server_name="localhost"), core=AqueductConfig(window=32))
            async with connect(system, listener.url, Parcel, config=client) as peer:
                assert peer.info.alpn == "aqueduct"
                sender, at_peer = channel(int)
                doubling, doubled = channel(int)
                await peer.send(Parcel(sender=doubling, receiver=at_peer))

                async def send() -> None:
                    async with sender:
                        for number in range(1000):
                            await sender.send(number)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send)
                    assert [number async for number in doubled] == list(range(0, 2000, 2))
