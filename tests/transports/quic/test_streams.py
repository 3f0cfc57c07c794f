"""Streams on the simulated network: order, ends, codes, windows, credit."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework.errors import (
    ConnectionClosed,
    ConnectionLost,
    LocalProtocolError,
    StreamWasReset,
    StreamWasStopped,
)
from levada.transports.quic import QuicStream


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


async def test_an_echo_comes_back(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        await stream.send_all(b"hello")
        await stream.send_eof()
        theirs = await ends.server.accept_stream()
        assert (theirs.stream_id, theirs.initiated_here, theirs.unidirectional) == (0, False, False)
        assert await read_all(theirs) == b"hello"
        await theirs.send_all(b"world")
        await theirs.send_eof()
        assert await read_all(stream) == b"world"
        assert await stream.acked()
        assert await theirs.acked()
        assert await stream.stopped() is None


async def test_info_says_what_was_agreed(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        info = ends.client.info
        assert (info.scheme, info.peer, info.alpn, info.tls_version) == ("quic", "server:4433", "levada", "TLSv1.3")
        assert info.resumed is False
        assert info.early_data_accepted is None
        assert info.peer_certificate is not None
        assert ends.server.info.alpn == "levada"


async def test_a_megabyte_arrives_in_order_both_ways(lab: Any, autojump_clock: MockClock) -> None:
    data = bytes(range(256)) * 4096

    async def send(stream: QuicStream) -> None:
        for at in range(0, len(data), 10_000):
            await stream.send_all(memoryview(data)[at : at + 10_000])
        await stream.send_eof()

    async with lab.connected() as ends, trio.open_nursery() as nursery:
        stream = await ends.client.open_stream()
        nursery.start_soon(send, stream)
        theirs = await ends.server.accept_stream()
        nursery.start_soon(send, theirs)
        assert await read_all(theirs) == data
        assert await read_all(stream) == data
        assert await stream.acked()
        assert (stream.unsent, stream.unacked) == (0, 0)
        assert stream.statistics().bytes_received == len(data)


async def test_max_bytes_is_kept_and_no_octet_is_lost(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream(unidirectional=True)
        await stream.send_all(b"abcdefgh")
        await stream.send_all(b"ijkl")
        await stream.send_eof()
        await stream.acked()
        theirs = await ends.server.accept_stream()
        assert [await theirs.receive_some(n) for n in (3, 1, 6, 100, 1)] == [b"abc", b"d", b"efghij", b"kl", b""]
        with pytest.raises(ValueError, match="at least 1"):
            await theirs.receive_some(0)


async def test_unidirectional_streams_have_one_direction(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream(unidirectional=True)
        await stream.send_all(b"x")
        theirs = await ends.server.accept_stream()
        assert theirs.unidirectional
        with pytest.raises(LocalProtocolError, match="only sent on"):
            await stream.receive_some()
        with pytest.raises(LocalProtocolError, match="only received on"):
            await theirs.send_all(b"y")
        with pytest.raises(LocalProtocolError, match="stop it"):
            theirs.reset(1)
        with pytest.raises(LocalProtocolError, match="reset it"):
            stream.stop(1)


@pytest.mark.parametrize("code", [0, 7, 2**62 - 1])
async def test_reset_carries_its_code_and_is_sticky(lab: Any, autojump_clock: MockClock, code: int) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        await stream.send_all(b"some")
        theirs = await ends.server.accept_stream()
        stream.reset(code)
        for _ in range(2):
            with pytest.raises(StreamWasReset) as caught:
                while True:
                    await theirs.receive_some()
            assert caught.value.code == code
        with pytest.raises(ConnectionClosed, match="given up here"):
            await stream.send_all(b"more")
        assert await stream.acked() is False
        await theirs.send_all(b"the other direction lives")
        assert await stream.receive_some() == b"the other direction lives"


@pytest.mark.parametrize("code", [0, 9, 2**62 - 1])
async def test_stop_carries_its_code_and_is_sticky(lab: Any, autojump_clock: MockClock, code: int) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        await stream.send_all(b"x" * 100)
        theirs = await ends.server.accept_stream()
        theirs.stop(code)
        assert await stream.stopped() == code
        for _ in range(2):
            with pytest.raises(StreamWasStopped) as caught:
                await stream.send_all(b"more")
            assert caught.value.code == code
        with pytest.raises(ConnectionClosed, match="stopped here"):
            await theirs.receive_some()
        assert await stream.acked() is False


async def test_a_stream_that_begins_with_a_reset_appears(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        (await ends.client.open_stream()).reset(3)
        theirs = await ends.server.accept_stream()
        with pytest.raises(StreamWasReset) as caught:
            await theirs.receive_some()
        assert caught.value.code == 3


async def test_reset_gives_the_buffer_back(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 5_000_000)
        await trio.sleep(1)
        stream.reset(0)
        assert (stream.unsent, stream.unacked, ends.client.engine.ready.unacked) == (0, 0, 0)
        other = await ends.client.open_stream()
        other.send_nowait(b"still alive", fin=True)
        assert await other.acked()
        assert ends.client.engine.ready.unacked == 0


async def test_a_stopped_reader_stops_the_sender_within_the_window(lab: Any, autojump_clock: MockClock) -> None:
    sent = 0

    async def send(stream: QuicStream) -> None:
        nonlocal sent
        while True:
            await stream.send_all(b"x" * 16_384)
            sent += 16_384

    window, low, high = 65_536, 32_768, 65_536
    async with (
        lab.connected(stream_window=window, client={"high_watermark": high, "low_watermark": low}) as ends,
        trio.open_nursery() as nursery,
    ):
        stream = await ends.client.open_stream()
        nursery.start_soon(send, stream)
        theirs = await ends.server.accept_stream()
        await trio.sleep(20)
        assert theirs.statistics().bytes_received == window
        assert sent <= window + high + 16_384
        assert len(await theirs.receive_some()) == window
        await trio.sleep(20)
        assert theirs.statistics().bytes_received == 2 * window
        nursery.cancel_scope.cancel()


async def test_the_connection_window_bounds_all_streams_together(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(stream_window=65_536, connection_window=100_000) as ends:
        for _ in range(5):
            stream = await ends.client.open_stream(unidirectional=True)
            stream.send_nowait(b"x" * 60_000, fin=True)
        await trio.sleep(10)
        received = [await ends.server.accept_stream()]
        while (stream_ := ends.server.accept_stream_nowait()) is not None:
            received.append(stream_)
        assert sum(stream.statistics().bytes_received for stream in received) == 100_000
        for _ in range(5 - len(received)):
            received.append(await ends.server.accept_stream()) if False else None
        async with trio.open_nursery() as nursery:
            lengths: list[int] = []

            async def take(stream: QuicStream) -> None:
                lengths.append(len(await read_all(stream)))

            for stream_ in received:
                nursery.start_soon(take, stream_)
            for _ in range(5 - len(received)):
                nursery.start_soon(take, await ends.server.accept_stream())
        assert lengths == [60_000] * 5


@pytest.mark.parametrize("how", ["reset", "stop"])
async def test_what_is_never_taken_goes_back_into_the_window(lab: Any, autojump_clock: MockClock, how: str) -> None:
    """Many times the connection window, on streams that end early."""
    async with lab.connected(stream_window=65_536, connection_window=131_072) as ends:
        for _ in range(20):
            stream = await ends.client.open_stream(unidirectional=True)
            stream.send_nowait(b"x" * 60_000)
            theirs = await ends.server.accept_stream()
            await trio.sleep(1)
            if how == "reset":
                stream.reset(1)
            else:
                theirs.stop(1)
                assert await stream.stopped() == 1
        stream = await ends.client.open_stream(unidirectional=True)
        stream.send_nowait(b"x" * 120_000, fin=True)
        theirs = await ends.server.accept_stream()
        assert len(await read_all(theirs)) == 120_000


@pytest.mark.ci
async def test_send_all_waits_above_the_watermark_and_a_cancelled_one_queues_nothing(
    lab: Any, autojump_clock: MockClock
) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 3_000_000)
        before = stream.unacked
        with trio.move_on_after(0) as scope:
            await stream.send_all(b"y" * 10)
        assert scope.cancelled_caught
        assert stream.unacked == before
        await stream.send_eof()
        theirs = await ends.server.accept_stream()
        assert await read_all(theirs) == b"x" * 3_000_000


async def test_the_cap_on_unacknowledged_octets_holds_over_all_streams(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(client={"max_unacked": 100_000}) as ends:
        one = await ends.client.open_stream()
        two = await ends.client.open_stream()
        one.send_nowait(b"x" * 150_000, fin=True)
        start = trio.current_time()
        await two.send_all(b"y")
        assert trio.current_time() > start
        assert one.unacked < 100_000


async def test_opening_waits_for_credit(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(max_streams=3) as ends:
        streams = [await ends.client.open_stream() for _ in range(3)]
        assert ends.client.try_open_stream() is None
        with trio.move_on_after(5) as scope:
            await ends.client.open_stream()
        assert scope.cancelled_caught
        for stream in streams:
            stream.send_nowait(b"x", fin=True)
        theirs = await ends.server.accept_stream()
        assert await theirs.receive_some() == b"x"
        await theirs.send_eof()
        fourth = await ends.client.open_stream()
        assert fourth.stream_id == 12


async def test_streams_that_nobody_accepts_are_not_paid_back(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(max_streams_unidirectional=10) as ends:
        for _ in range(10):
            (await ends.client.open_stream(unidirectional=True)).send_nowait(b"x", fin=True)
        with trio.move_on_after(5) as scope:
            await ends.client.open_stream(unidirectional=True)
        assert scope.cancelled_caught
        for _ in range(10):
            await ends.server.accept_stream()
        await ends.client.open_stream(unidirectional=True)


@pytest.mark.ci
async def test_thousands_of_streams_leave_nothing_behind(lab: Any, autojump_clock: MockClock) -> None:
    count = 10_000

    async def serve() -> None:
        while True:
            stream = await ends.server.accept_stream()
            data = await read_all(stream)
            stream.send_nowait(data, fin=True)

    async def call(count: int) -> None:
        for _ in range(count):
            stream = await ends.client.open_stream()
            stream.send_nowait(b"ping", fin=True)
            assert await read_all(stream) == b"ping"

    async with lab.connected() as ends, trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with trio.open_nursery() as calls:
            for _ in range(100):
                calls.start_soon(call, count // 100)
        await trio.sleep(1)
        assert (len(ends.client.streams), len(ends.server.streams)) == (0, 0)
        assert len(ends.server.engine._streams) == 0
        nursery.cancel_scope.cancel()


async def test_lower_numbers_go_first(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        order: list[int] = []

        async def watch(stream: QuicStream, priority: int) -> None:
            await stream.acked()
            order.append(priority)

        async with trio.open_nursery() as nursery:
            streams = {}
            for priority in (200, 128, 3):
                stream = streams[priority] = await ends.client.open_stream(unidirectional=True, priority=priority)
                stream.send_nowait(b"x" * 200_000, fin=True)
                nursery.start_soon(watch, stream, priority)
            streams[200].priority = 0
        assert order == [200, 3, 128]


async def test_equal_priorities_share(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        streams = [await ends.client.open_stream(unidirectional=True) for _ in range(4)]
        for stream in streams:
            stream.send_nowait(b"x" * 100_000, fin=True)
        await trio.sleep(0.06)
        sent = [stream.statistics().bytes_sent for stream in streams]
        assert max(sent) - min(sent) <= 5_000, sent  # each turn is one packet, or what is left of one
        assert min(sent) > 0


async def test_two_tasks_on_one_direction_are_an_error(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends, trio.open_nursery() as nursery:
        stream = await ends.client.open_stream()
        nursery.start_soon(stream.receive_some)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await stream.receive_some()
        nursery.cancel_scope.cancel()


async def test_a_cancelled_receive_takes_nothing(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        with trio.move_on_after(0.5) as scope:
            await stream.receive_some()
        assert scope.cancelled_caught
        stream.send_nowait(b"x")
        theirs = await ends.server.accept_stream()
        theirs.send_nowait(b"data")
        assert await stream.receive_some() == b"data"


async def test_aclose_of_a_stream_finishes_sending_and_stops_receiving(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        async with await ends.client.open_stream() as stream:
            await stream.send_all(b"all of it")
        theirs = await ends.server.accept_stream()
        assert await read_all(theirs) == b"all of it"
        assert await theirs.stopped() == 0
        with pytest.raises(ConnectionClosed):
            await stream.send_all(b"x")
        with pytest.raises(ConnectionClosed):
            await stream.receive_some()


async def test_flush_waits_until_everything_was_in_a_packet(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 500_000)
        await stream.flush()
        assert stream.unsent == 0


async def test_closing_the_connection_reaches_every_waiting_task(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected() as ends:
        errors: list[tuple[str, int | None]] = []

        async def wait(name: str, call: Any) -> None:
            with pytest.raises(ConnectionLost) as caught:
                await call()
            errors.append((name, caught.value.code))

        stream = await ends.client.open_stream()
        stream.send_nowait(b"x")
        blocked = await ends.client.open_stream()
        blocked.send_nowait(b"x" * 9_000_000)
        async with trio.open_nursery() as nursery:
            for name, call in (
                ("receive", stream.receive_some),
                ("send", lambda: blocked.send_all(b"y")),
                ("acked", stream.acked),
                ("stopped", stream.stopped),
                ("accept", ends.client.accept_stream),
                ("datagram", ends.client.receive_datagram),
            ):
                nursery.start_soon(wait, name, call)
            await wait_all_tasks_blocked()
            ends.server.close(77, "enough")
        assert sorted(errors) == [(n, 77) for n in ("accept", "acked", "datagram", "receive", "send", "stopped")]
