"""How a connection moves octets: others run during long turns, stops are noticed at once, what nobody reads is bounded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio
from tests.actors import carried
from tests.simnet import SimNet
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct.streams import AT_ONCE
from levada.framework import TerminalState, channel
from levada.framework.channel import Outcome
from levada.framework.codec import AttachmentKind, Codec
from levada.framework.errors import ChannelConnectionLost
from levada.transports.aqueduct import AqueductConfig
from levada.transports.aqueduct.frames import VERSION, ConnectionControl
from levada.transports.carriers import MemoryConfig, dial

from .conftest import Parcel, Start, settled

NOTHING = (0,) * 10


class Attached:
    """Writes every handle as a sender with number 0: channel 1, which flows to the client that minted it."""

    def attach(self, handle: Any, /) -> tuple[AttachmentKind, int]:
        return AttachmentKind.SENDER, 0

    def rollback(self) -> None: ...


@pytest.mark.ci
@carried.memory_only
async def test_others_run_while_many_channels_are_flushed(start: Start, autojump_clock: MockClock) -> None:
    """A turn that concerns a thousand channels lets others run after every few of them, on both sides."""
    channels = 1000
    async with start() as ends:
        pairs = [channel(int) for _ in range(channels)]
        await ends.peer.send(Parcel(many=[there for _, there in pairs]))
        got = await ends.got.receive()
        await settled()
        for number, (sender, _) in enumerate(pairs):
            sender.send_nowait(number)

        def written() -> int:
            statistics = ends.peer.statistics().carrier
            assert statistics is not None
            return statistics.writes

        writes = [written()]
        while not all(receiver._core.queue for receiver in got.many):
            await trio.lowlevel.checkpoint()
            writes.append(written())
        most = max(after - before for before, after in itertools.pairwise(writes))
        assert writes[-1] - writes[0] >= channels
        assert most <= 3 * AT_ONCE
        for number, receiver in enumerate(got.many):
            assert receiver.receive_nowait() == number
            receiver.close()
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.rule("AQ-20a")
async def test_aq20a_a_stopped_stream_is_noticed_without_a_write(start: Start, autojump_clock: MockClock) -> None:
    """A peer that stops an idle message stream, and whose receiver does not end, loses its connection after the time for it."""
    async with start() as ends:
        async with dial(ends.listener.url.removeprefix("aqueduct+")) as carrier:
            control: Any = await carrier.open_stream()  # type: ignore[union-attr]
            control.send_nowait(VERSION + ConnectionControl().encode())
            attach: Any = await carrier.open_stream(unidirectional=True)  # type: ignore[union-attr]
            sender, receiver = channel(int)
            payload = Codec().encode(Parcel(sender=sender), attachments=Attached())
            sender.cancel()
            receiver.close()
            attach.send_nowait(VERSION + b"\x03\x00\x00\x01\x01" + bytes((len(payload),)) + payload)
            remote = (await ends.got.receive()).sender
            await remote.send(7)
            stream: Any = None
            while stream is None or not stream.unidirectional:
                stream = await carrier.accept_stream()  # type: ignore[union-attr]
            assert await stream.receive_some()
            began = trio.current_time()
            stream.stop(0)
            reason = await carrier.wait_closed()  # type: ignore[union-attr]
            assert "AQ-20a" in reason.text
            assert reason.code == 1
            assert trio.current_time() - began == pytest.approx(10, abs=0.1)
            with pytest.raises(ChannelConnectionLost, match="AQ-20a"):
                await remote.send(8)
        assert not ends.peer.closed


@pytest.mark.rule("AQ-40")
async def test_aq40_messages_that_nobody_receives_are_bounded_by_their_octets(
    start: Start, autojump_clock: MockClock
) -> None:
    """Not only by their number: a channel's queue counts until the program has the message."""
    limit = 100_000
    async with start(core=AqueductConfig(mailbox_bytes=limit, window_bytes=10 * limit)) as ends:
        sender, there = channel(bytes)
        await ends.peer.send(Parcel(receiver=there))
        remote = (await ends.got.receive()).receiver
        sent = 0
        with trio.move_on_after(5):
            while True:
                await sender.send(bytes(10_000))
                sent += 1
        held = ends.server.core.held
        assert limit <= held <= 3 * limit  # and what is cut off in the streams
        assert len(remote._core.queue) == 10
        with trio.fail_after(60):
            for _ in range(sent):
                assert len(await remote.receive()) == 10_000
        sender.finish_nowait()
        assert await remote.terminated() is TerminalState.FINISHED
        await settled()
        assert ends.left() == NOTHING


async def test_the_core_knows_the_round_trip(start_on_network: Start, autojump_clock: MockClock) -> None:
    """The delays of declarations and nacks depend on it (AQ-36, AQ-37)."""
    net = SimNet(1, delay=0.2, turns=200_000)
    async with start_on_network(net) as ends:
        await ends.peer.send(Parcel())
        await settled()
        assert ends.server.core.round_trip == pytest.approx(0.4, abs=0.1)


async def test_a_carrier_that_ends_gives_what_had_arrived(start: Start, autojump_clock: MockClock) -> None:
    """Also of streams that were not read because something was full."""
    config = AqueductConfig(mailbox=2, window=8)
    async with start(core=config, carrier=MemoryConfig(shape="connection")) as ends:
        sender, there = channel(int)
        await ends.peer.send(Parcel(receiver=there))
        remote = (await ends.got.receive()).receiver
        for number in range(5):
            sender.send_nowait(number)
        await wait_all_tasks_blocked()
        ends.peer.abort()
        got = []
        with pytest.raises(ChannelConnectionLost):
            while True:
                got.append(await remote.receive())
        assert got == list(range(5))


@pytest.mark.rule("AQ-23")
async def test_aq23_plain_messages_do_not_overtake_others(start: Start, autojump_clock: MockClock) -> None:
    """Those without a receipt and without handles leave by a shorter way; the order is that of sending all the same."""
    async with start(core=AqueductConfig(window=5, mailbox=5)) as ends:
        sender, there = channel(Parcel)
        sender.ordered(16)
        await ends.peer.send(Parcel(receiver=there))
        remote = (await ends.got.receive()).receiver
        got: list[str] = []

        async def take() -> None:
            async for parcel in remote:
                got.append(parcel.text)
                if parcel.sender is not None:
                    parcel.sender.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            receipts = []
            for number in range(200):
                inner, receiver = channel(int)
                with_handle = number % 5 == 0
                parcel = Parcel(str(number), sender=inner if with_handle else None)
                if not with_handle:
                    inner.cancel()
                if number % 3:
                    await sender.send(parcel)
                else:
                    receipts.append(await sender.send(parcel, receipt=True))
                receiver.close()
            await sender.finish()
        assert got == [str(number) for number in range(200)]
        assert [await receipt for receipt in receipts] == [Outcome.PROCESSED] * 67
        await settled()
        assert ends.left() == NOTHING
