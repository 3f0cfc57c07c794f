"""Messages as octets, and a connection on which nothing is said for long."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.actors.aqueduct import AqueductConfig, PeerConfig, RawMessage, connect, serve
from levada.actors.aqueduct.config import fit
from levada.actors.aqueduct.entry import connect_over, serve_over
from levada.framework import (
    ActorSystem,
    Codec,
    OneshotReceiver,
    OneshotSender,
    Receiver,
    Sender,
    TerminalState,
    channel,
    oneshot,
)
from levada.framework.errors import ChannelCancelled
from levada.transports.quic import QuicConfig, dial, listen

from .conftest import Keeper, Parcel, Start


async def test_handles_of_every_kind_arrive_by_index_and_work(scheme: str) -> None:
    with Keeper() as keeper:
        async with (
            ActorSystem() as system,
            serve(system, f"aqueduct+{scheme}://raw", keeper.function(), message_type=RawMessage) as listener,
            connect(system, listener.url, RawMessage) as peer,
        ):
            sender, receives = channel(RawMessage)
            sends, receiver = channel(RawMessage)
            sends_one, gets = oneshot(RawMessage)
            gives, gets_one = oneshot(RawMessage)
            await peer.send(RawMessage(b"\xff\x00", [sender, receiver, sends_one, gets_one]))
            m: Any = await keeper.got.receive()
            assert m.payload == b"\xff\x00"
            assert [type(handle) for handle in m.attachments] == [Sender, Receiver, OneshotSender, OneshotReceiver]
            there, back, there_once, back_once = m.attachments
            with receives, sends, there, back:
                await there.send(RawMessage(b"1"))
                await sends.send(RawMessage(b"2"))
                there_once.send(RawMessage(b"3"))
                gives.send(RawMessage(b"4"))
                got = [await receives.receive(), await back.receive(), await gets, await back_once]
            assert [(one.payload, one.attachments) for one in got] == [(b"%d" % n, ()) for n in range(1, 5)]
            # Neither side says anything about a codec, as there is none.
            assert (peer.headers, listener.peers[0].headers) == ((), ())


async def test_a_message_that_cannot_be_sent_gives_its_handles_back(scheme: str) -> None:
    config = PeerConfig(core=AqueductConfig(max_message=100))
    with Keeper() as keeper:
        async with (
            ActorSystem() as system,
            serve(system, f"aqueduct+{scheme}://raw", keeper.function(), message_type=RawMessage) as listener,
            connect(system, listener.url, RawMessage, config=config) as peer,
        ):
            sender, receiver = channel(RawMessage)
            octets: Any = b"octets"
            with sender, receiver:
                with pytest.raises(ValueError, match="101 bytes, at most 100"):
                    await peer.send(RawMessage(bytes(101), [sender]))
                with pytest.raises(TypeError, match="expected RawMessage, got bytes"):
                    await peer.send(octets)
                await sender.send(RawMessage(b"still here"))
                assert (await receiver.receive()).payload == b"still here"


async def test_a_side_with_message_classes_and_one_with_octets(start: Start, scheme: str) -> None:
    """What is octets to one side is a message to the other; what is dropped unread ends as usual."""

    async def answer(m: RawMessage) -> None:
        sender, receiver = m.attachments
        with sender, receiver:
            await sender.send(RawMessage(Codec().encode(len(m.payload))))
            await receiver.receive()
            sender.cancel()

    async with (
        ActorSystem() as system,
        serve(system, f"aqueduct+{scheme}://raw", answer, message_type=RawMessage) as listener,
        connect(system, listener.url, Parcel) as peer,
    ):
        sender, numbers = channel(int)
        words, receiver = channel(str)
        parcel = Parcel("x", sender=sender, receiver=receiver)
        with numbers, words:
            await peer.send(parcel)
            assert await numbers.receive() > 10
            await words.send("enough")
            with pytest.raises(ChannelCancelled):
                await numbers.receive()
            assert await words.terminated() is TerminalState.RECEIVER_CLOSED


@pytest.mark.parametrize(("given", "kept"), [(None, 10.0), (4.0, 4.0)])
async def test_a_quiet_connection_lasts(
    quic: tuple[QuicConfig, QuicConfig], autojump_clock: MockClock, given: float | None, kept: float
) -> None:
    """The client keeps it alive: neither a long silence nor the idle timeout of 30 s ends a channel."""
    net, url = SimNet(1), "quic://server:4433"
    server = fit(url, PeerConfig(carrier=quic[0]), client=False)
    client = fit(url, PeerConfig(carrier=QuicConfig(ca=quic[1].ca, keepalive_interval=given)), client=True)
    assert (server.keepalive_interval, client.keepalive_interval) == (None, kept)

    async def late(m: RawMessage) -> None:
        await trio.sleep(500)
        with m.attachments[0] as sender:
            await sender.send(RawMessage(m.payload))

    async with (
        ActorSystem() as system,
        serve_over(system, partial(listen, url, server, port=net.port("server", 4433)), late, RawMessage),
        connect_over(system, partial(dial, url, client, port=net.port("client")), RawMessage) as peer,
    ):
        sender, receiver = channel(RawMessage)
        with receiver:
            await peer.send(RawMessage(b"late", [sender]))
            assert (await receiver.receive()).payload == b"late"
