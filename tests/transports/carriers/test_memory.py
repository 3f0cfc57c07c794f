"""The memory carrier: the contract in every shape, and what tests use it for: chunks, latency, cuts, holding, early data, names."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from levada.framework.errors import (
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    DatagramTooLarge,
    IdleTimeout,
    LocalProtocolError,
)
from levada.transports.carriers import memory
from levada.transports.carriers.contracts import Datagram
from levada.transports.carriers.memory import (
    MemoryByteStream,
    MemoryConfig,
    MemoryConnection,
    MemoryIncoming,
    MemoryMessageStream,
    memory_connections,
    memory_messages,
    memory_streams,
)
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks
from levada.transports.testing.traits import Carrier, Factory

SLOW = MemoryConfig(latency=0.02, chunk=(1, 7000), max_message=100_000, max_streams=20)


def cut(a: Carrier, b: Carrier) -> None:
    assert isinstance(a, MemoryByteStream | MemoryMessageStream | MemoryConnection)
    a.link.cut()


def factory(make: Callable[[MemoryConfig], tuple[Carrier, Carrier]], config: MemoryConfig) -> Factory:
    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[Carrier, Carrier]]:
        yield make(config)

    return pair


BYTES = CarrierTraits(shape="bytes", buffered=160 * 1024, cut=cut)
MESSAGES = CarrierTraits(shape="messages", buffered=160 * 1024, max_message=100_000, cut=cut)
CONNECTION = CarrierTraits(shape="connection", buffered=160 * 1024, max_open=100, datagram_queue=256, cut=cut)


@pytest.mark.parametrize("check", carrier_checks(BYTES), ids=str)
async def test_byte_streams_keep_the_contract(check: CarrierCheck) -> None:
    await check(factory(memory_streams, MemoryConfig()))


@pytest.mark.parametrize("check", carrier_checks(MESSAGES), ids=str)
async def test_message_streams_keep_the_contract(check: CarrierCheck) -> None:
    await check(factory(memory_messages, MemoryConfig(max_message=100_000)))


@pytest.mark.parametrize("check", carrier_checks(CONNECTION), ids=str)
async def test_connections_keep_the_contract(check: CarrierCheck) -> None:
    await check(factory(memory_connections, MemoryConfig()))


async def a_second() -> None:
    await trio.sleep(1)


def slowly(traits: CarrierTraits) -> CarrierTraits:
    return attrs.evolve(traits, settle=a_second, timeout=10_000, streams=1000)


@pytest.mark.parametrize("check", carrier_checks(slowly(BYTES)), ids=str)
async def test_byte_streams_keep_it_with_latency(check: CarrierCheck, autojump_clock: trio.testing.MockClock) -> None:
    await check(factory(memory_streams, SLOW))


@pytest.mark.parametrize("check", carrier_checks(slowly(MESSAGES)), ids=str)
async def test_message_streams_keep_it_with_latency(
    check: CarrierCheck, autojump_clock: trio.testing.MockClock
) -> None:
    await check(factory(memory_messages, SLOW))


@pytest.mark.parametrize("check", carrier_checks(slowly(CONNECTION)), ids=str)
async def test_connections_keep_it_with_latency(check: CarrierCheck, autojump_clock: trio.testing.MockClock) -> None:
    await check(factory(memory_connections, SLOW))


# ---------------------------------------------------------------- what tests set


async def read_all(stream: MemoryByteStream) -> list[bytes]:
    return [part async for part in stream]


async def test_chunks_are_drawn_by_the_seed() -> None:
    async def chunks(seed: int) -> list[bytes]:
        a, b = memory_streams(MemoryConfig(chunk=(1, 5), seed=seed))
        await a.send_all(bytes(range(100)))
        await a.send_eof()
        return await read_all(b)

    first = await chunks(1)
    assert b"".join(first) == bytes(range(100))
    assert {len(part) for part in first} <= {1, 2, 3, 4, 5}
    assert first == await chunks(1)
    assert first != await chunks(2)


async def test_single_octets() -> None:
    a, b = memory_streams(MemoryConfig(chunk=(1, 1)))
    await a.send_all(b"abc")
    await a.send_eof()
    assert await read_all(b) == [b"a", b"b", b"c"]


async def test_latency_is_trios_time(autojump_clock: trio.testing.MockClock) -> None:
    a, b = memory_streams(MemoryConfig(latency=0.5))
    await a.send_all(b"ping")
    assert await b.receive_some() == b"ping"
    assert trio.current_time() == pytest.approx(0.5)
    await b.send_all(b"pong")
    assert await a.receive_some() == b"pong"
    assert trio.current_time() == pytest.approx(1.0)


async def test_window_and_watermark_bound_what_is_under_way(autojump_clock: trio.testing.MockClock) -> None:
    a, b = memory_streams(MemoryConfig(window=1000, high_watermark=500, latency=0.1))
    sent = 0
    with trio.move_on_after(60):
        while True:
            await a.send_all(bytes(100))
            sent += 100
    assert sent == 1600  # the window, the watermark and the one write above it
    assert a.statistics().unsent == 600
    assert a.statistics().bytes_sent == 1000
    assert await b.receive_some() == bytes(1000)


@given(at=st.integers(0, 40), sizes=st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_cut_after_any_octet(at: int, sizes: list[int]) -> None:
    """What was carried before the cut arrives whole and in order, then both ends lose the connection."""

    async def main() -> None:
        a, b = memory_streams(MemoryConfig(cut_after=at))
        data = bytes(range(sum(sizes)))
        lost_here = False
        start = 0
        for size in sizes:
            try:
                await a.send_all(data[start : start + size])
            except ConnectionLost:
                lost_here = True
                break
            start += size
        got = b""
        lost_there = False
        try:
            while len(got) < len(data):
                got += await b.receive_some()
        except ConnectionLost:
            lost_there = True
        assert got == data[:at]
        if at <= len(data) and (at or sizes):
            with pytest.raises(ConnectionLost):
                await a.send_all(b"x")
            with pytest.raises(ConnectionLost):
                await b.receive_some()
        else:
            assert not lost_here
            assert not lost_there

    trio.run(main)


async def test_cut_at_the_nth_call() -> None:
    for call in range(1, 7):
        a, b = memory_streams(MemoryConfig(cut_at_call=call))
        done = 0
        with pytest.raises(ConnectionLost):
            for _ in range(3):
                await a.send_all(b"x")
                done += 1
                await b.receive_some()
                done += 1
            await a.send_all(b"x")
        # The receive that begins with the cut still gets what has arrived, so the next call fails.
        assert done == (call - 1 if call % 2 else call)


async def test_held_link_stops_the_peer_and_release_goes_on() -> None:
    a, b = memory_connections(MemoryConfig(window=1000, high_watermark=500))
    x = await a.open_stream()
    a.link.hold()

    async def send() -> None:
        while True:
            await x.send_all(bytes(100))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert x.unacked == 1600
    assert b.accept_stream_nowait() is None
    a.link.release()
    y = b.accept_stream_nowait()
    assert y is not None
    got = 0
    while got < 1600:
        got += len(await y.receive_some())
    assert x.unacked == 0


async def test_cut_drops_what_is_held() -> None:
    a, b = memory_streams()
    await a.send_all(b"arrived")
    a.link.hold()
    await a.send_all(b"under way")
    a.link.cut("a digger")
    assert await b.receive_some() == b"arrived"
    with pytest.raises(ConnectionLost, match="a digger"):
        await b.receive_some()


async def test_close_gives_up_after_its_time(autojump_clock: trio.testing.MockClock) -> None:
    a, b = memory_streams(MemoryConfig(window=10, close_timeout=2))
    await a.send_all(bytes(100))
    await a.aclose()
    assert trio.current_time() == pytest.approx(2)
    assert await b.receive_some() == bytes(10)
    with pytest.raises(ConnectionLost):
        await b.receive_some()


async def test_the_connections_window_is_shared_by_priority() -> None:
    a, b = memory_connections(MemoryConfig(window=1000, connection_window=1000))
    first, later, urgent = [await a.open_stream(priority=priority) for priority in (128, 200, 0)]
    first.send_nowait(bytes(1000))
    later.send_nowait(bytes(600))
    urgent.send_nowait(bytes(600))
    assert (later.unsent, urgent.unsent) == (600, 600)
    y = await b.accept_stream()
    await y.receive_some(600)
    assert (later.unsent, urgent.unsent) == (600, 0)
    await y.receive_some()
    assert (later.unsent, urgent.unsent) == (200, 0)
    with pytest.raises(ValueError, match="priority"):
        first.priority = 256


async def test_early_data_is_marked_until_the_handshake() -> None:
    a, b = memory_connections(MemoryConfig(early="accepted"))
    early = await a.open_stream()
    await early.send_all(b"early")
    await a.send_datagram(b"early")
    seen = await b.accept_stream()
    assert await seen.receive_some() == b"early"
    assert seen.early
    assert await b.receive_datagram() == Datagram(b"early", early=True)
    assert (await a.handshake()).early_data_accepted is True
    assert a.info.early_data_accepted is True
    assert (await b.handshake()).early_data_accepted is None
    late = await a.open_stream()
    await late.send_all(b"late")
    seen = await b.accept_stream()
    assert not seen.early
    await a.send_datagram(b"late")
    assert await b.receive_datagram() == Datagram(b"late")


async def test_refused_early_data_is_sent_again_but_for_datagrams() -> None:
    a, b = memory_connections(MemoryConfig(early="refused"))
    stream = await a.open_stream()
    stream.send_nowait(b"early", fin=True)
    empty = await a.open_stream()
    empty.send_nowait(b"", fin=True)
    await a.send_datagram(b"early")
    assert b.accept_stream_nowait() is None
    assert (await a.handshake()).early_data_accepted is False
    for expected in (b"early", b""):
        seen = await b.accept_stream()
        assert await seen.receive_some() == expected
        assert not seen.early
    await a.send_datagram(b"late")
    assert await b.receive_datagram() == Datagram(b"late")


@pytest.mark.parametrize("limit", [0, 40])
async def test_the_settings_say_how_large_a_datagram_is(limit: int) -> None:
    a, b = memory_connections(MemoryConfig(max_datagram=limit))
    assert a.max_datagram_size() == limit
    with pytest.raises(DatagramTooLarge, match=f"datagram of {limit + 1} bytes, at most {limit} fit"):
        await a.send_datagram(bytes(limit + 1))
    if limit:
        await a.send_datagram(bytes(limit))
        assert await b.receive_datagram() == Datagram(bytes(limit))


async def test_datagrams_are_lost_by_the_seed() -> None:
    async def arrived(seed: int) -> list[bytes]:
        a, b = memory_connections(MemoryConfig(datagram_loss=0.5, seed=seed))
        for number in range(100):
            assert a.send_datagram_nowait(bytes([number]))
        a.close()
        got = []
        with pytest.raises(ConnectionLost):
            while True:
                got.append((await b.receive_datagram()).data)
        return got

    first = await arrived(1)
    assert 25 < len(first) < 75
    assert first == sorted(first)
    assert first == await arrived(1)
    assert first != await arrived(2)


async def test_datagrams_under_way_are_bounded(autojump_clock: trio.testing.MockClock) -> None:
    a, b = memory_connections(MemoryConfig(latency=1, datagram_queue=3))
    assert [a.send_datagram_nowait(b"x") for _ in range(4)] == [True, True, True, False]
    await a.send_datagram(b"waits")
    assert trio.current_time() == pytest.approx(1)
    assert [(await b.receive_datagram()).data for _ in range(4)] == [b"x", b"x", b"x", b"waits"]
    assert b.statistics().datagrams_dropped == 0


async def test_dropped_datagrams_are_counted() -> None:
    a, b = memory_connections(MemoryConfig(datagram_queue=3))
    for number in range(5):
        await a.send_datagram(bytes([number]))
    assert b.statistics().datagrams_dropped == 2
    assert [(await b.receive_datagram()).data for _ in range(3)] == [b"\2", b"\3", b"\4"]


async def test_the_wrong_direction_is_named() -> None:
    a, b = memory_connections()
    x = await a.open_stream(unidirectional=True)
    await x.send_all(b"x")
    y = await b.accept_stream()
    with pytest.raises(LocalProtocolError, match="stream 2 is only sent on"):
        await x.receive_some()
    with pytest.raises(LocalProtocolError, match="stream 2 is only received on"):
        y.reset(0)
    assert (y.unsent, y.unacked, y.priority) == (0, 0, 128)


async def test_stream_statistics_are_its_own() -> None:
    a, b = memory_connections()
    x = await a.open_stream()
    await x.send_all(b"12345")
    y = await b.accept_stream()
    await y.receive_some(3)
    assert (x.statistics().bytes_sent, y.statistics().bytes_received, y.statistics().reads) == (5, 3, 1)
    other = await a.open_stream(unidirectional=True)
    assert (other.statistics().bytes_sent, other.statistics().bytes_received) == (0, 0)


# ---------------------------------------------------------------- by name


async def test_dial_and_listen_by_name() -> None:
    async with memory.listen("memory://desk") as listener:
        assert listener.url == "memory://desk"
        async with memory.dial("memory://desk") as client:
            server = await listener.accept()
            assert isinstance(server, MemoryByteStream)
            assert isinstance(client, MemoryByteStream)
            await client.send_all(b"hello")
            assert await server.receive_some() == b"hello"
            assert client.info.peer == server.info.local == "desk/server"
        assert await server.receive_some() == b""
    with pytest.raises(ConnectionLost, match="no listener at"):
        async with memory.dial("memory://desk"):
            pass
    with pytest.raises(ConnectionClosed):
        await listener.accept()


async def test_free_names_and_taken_ones() -> None:
    async with memory.listen("memory://") as one, memory.listen("memory://") as two:
        assert one.url != two.url
        with pytest.raises(ConfigurationError, match="taken"):
            async with memory.listen(one.url):
                pass
    with pytest.raises(ConfigurationError, match="expected"):
        async with memory.dial("tcp://desk"):
            pass


async def test_shapes_must_agree_and_the_diallers_settings_win() -> None:
    async with memory.listen("memory://m", MemoryConfig(shape="messages")) as listener:
        with pytest.raises(ConfigurationError, match="'bytes', wanted 'messages'"):
            async with memory.dial("memory://m", MemoryConfig()):
                pass
        async with memory.dial("memory://m", MemoryConfig(shape="messages", max_message=3)) as client:
            server = await listener.accept()
            assert isinstance(client, MemoryMessageStream)
            assert isinstance(server, MemoryMessageStream)
            await client.send(b"1234")
            with pytest.raises(ConnectionLost, match="at most 3"):
                await server.receive()
            await server.aclose()
            with pytest.raises(ConnectionClosed):
                await server.receive()


async def incoming(listener: memory.MemoryListener) -> MemoryIncoming:
    peer = await listener.accept()
    assert isinstance(peer, MemoryIncoming)
    return peer


async def test_connections_come_in_to_be_judged(autojump_clock: trio.testing.MockClock) -> None:
    outcomes: list[object] = []

    async def dial() -> None:
        try:
            async with memory.dial("memory://c") as client:
                outcomes.append(client)
        except ConnectionLost as error:
            outcomes.append(error)

    async with (
        memory.listen("memory://c", MemoryConfig(shape="connection")) as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(dial)
        peer = await incoming(listener)
        assert (peer.peer, peer.validated) == ("c/client", False)
        peer.retry()
        peer = await incoming(listener)
        assert peer.validated
        server = peer.accept()
        assert not server.is_client
        await server.wait_closed()
        nursery.start_soon(dial)
        (await incoming(listener)).refuse()
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(dial)
        (await incoming(listener)).ignore()
        await trio.sleep(11)
    assert isinstance(outcomes[0], MemoryConnection)
    assert [type(error) for error in outcomes[1:]] == [ConnectionLost, IdleTimeout]


async def test_backlog_is_bounded_and_closing_refuses_those_in_it() -> None:
    async with memory.listen("memory://b", MemoryConfig(backlog=1)) as listener, memory.dial("memory://b") as waiting:
        with pytest.raises(ConnectionLost, match="backlog is full"):
            async with memory.dial("memory://b"):
                pass
        await listener.aclose()
        assert isinstance(waiting, MemoryByteStream)
        with pytest.raises(ConnectionLost):
            await waiting.receive_some()


async def test_early_dialler_need_not_wait() -> None:
    config = MemoryConfig(shape="connection", early="accepted")
    async with memory.listen("memory://e", config) as listener, memory.dial("memory://e") as client:
        assert isinstance(client, MemoryConnection)
        (await client.open_stream()).send_nowait(b"first flight")
        server = (await incoming(listener)).accept()
        seen = await server.accept_stream()
        assert (await seen.receive_some(), seen.early) == (b"first flight", True)


def test_settings_that_cannot_work() -> None:
    settings: tuple[dict[str, Any], ...] = (
        {"shape": "packets"},
        {"window": 0},
        {"chunk": (0, 3)},
        {"chunk": (4, 3)},
        {"latency": -1},
        {"datagram_loss": 1.5},
        {"early": "perhaps"},
    )
    for wrong in settings:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MemoryConfig(**wrong)
    assert pickle.loads(pickle.dumps(SLOW)) == SLOW


async def test_a_cancelled_dial_is_no_connection(autojump_clock: trio.testing.MockClock) -> None:
    """Who accepts it all the same learns that nobody is there."""
    async with memory.listen("memory://desk", MemoryConfig(shape="connection")) as listener:
        with trio.move_on_after(1) as scope:
            async with memory.dial("memory://desk"):
                raise AssertionError("nobody has accepted")
        assert scope.cancelled_caught
        incoming = await listener.accept()
        assert isinstance(incoming, MemoryIncoming)
        server = incoming.accept()
        with pytest.raises(ConnectionLost, match="gave up"):
            await server.accept_stream()
