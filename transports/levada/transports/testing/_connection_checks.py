"""The checks of connections: streams and their numbers, codes, credit, datagrams, handshake."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable

import trio

from levada.framework.errors import (
    ConnectionClosed,
    DatagramTooLarge,
    LocalProtocolError,
    StreamWasReset,
    StreamWasStopped,
)
from levada.transports.carriers.contracts import Connection, Datagram, Stream
from levada.transports.testing._stream_tools import (
    BLOCK,
    Run,
    block,
    expect,
    expect_blocks,
    fill,
    outcome_of,
    read,
    read_on,
    read_to_end,
)
from levada.transports.testing.traits import CarrierTraits, Factory

LARGEST_CODE = 2**62 - 1

Body = Callable[[CarrierTraits, Connection, Connection], Awaitable[None]]

CHECKS: dict[str, Run] = {}
"""By name."""


def check(body: Body) -> Body:
    """Register a check of connections."""

    async def run(traits: CarrierTraits, factory: Factory) -> None:
        async with factory() as (a, b):
            assert isinstance(a, Connection)
            assert isinstance(b, Connection)
            await body(traits, a, b)

    CHECKS[body.__name__] = run
    return body


async def pair_on(
    traits: CarrierTraits, a: Connection, b: Connection, *, unidirectional: bool = False
) -> tuple[Stream, Stream]:
    """Open a stream that both ends know."""
    x = await a.open_stream(unidirectional=unidirectional)
    await x.send_all(b"\0")
    y = await b.accept_stream()
    assert await read(y, 1) == b"\0"
    await traits.settle()  # the credit for that byte is back, and blocked means blocked
    return x, y


async def until(traits: CarrierTraits, ready: Callable[[], bool]) -> None:
    """Wait until it is so."""
    for _ in range(200):
        if ready():
            return
        await traits.settle()
    raise AssertionError("nothing came, however long the check waited")


@check
async def handshake_tells_who_is_there(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    assert (a.is_client, b.is_client) == (True, False)
    for end in (a, b):
        info = await end.handshake()
        assert info == end.info
        assert info.scheme
        assert info.peer
    before = a.info, b.info
    a.close()
    await b.wait_closed()
    assert (await a.handshake(), await b.handshake()) == before, "a complete handshake stays complete after the end"


@check
async def streams_are_numbered_as_in_quic(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    opened = [
        (opener, acceptor, unidirectional, await opener.open_stream(unidirectional=unidirectional))
        for opener, acceptor in ((a, b), (b, a))
        for unidirectional in (False, True)
        for _ in range(2)
    ]
    assert [stream.stream_id for *_, stream in opened] == [0, 4, 2, 6, 1, 5, 3, 7]
    for _, acceptor, unidirectional, stream in opened:
        assert (stream.initiated_here, stream.unidirectional) == (True, unidirectional)
        await stream.send_all(b"hello")
        seen = await acceptor.accept_stream()
        assert (seen.stream_id, seen.initiated_here, seen.unidirectional) == (stream.stream_id, False, unidirectional)
        assert not seen.early
        assert await read(seen, 5) == b"hello"


@check
async def stream_appears_with_its_first_byte_end_or_reset(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x = [await a.open_stream() for _ in range(3)]
    await traits.settle()
    assert b.accept_stream_nowait() is None
    await x[2].send_all(b"x")
    y = [await b.accept_stream()]
    await x[1].send_eof()
    y.append(await b.accept_stream())
    x[0].reset(3)
    y.append(await b.accept_stream())
    assert [stream.stream_id for stream in y] == [8, 4, 0]
    assert await read(y[0], 1) == b"x"
    assert await y[1].receive_some() == b""
    await expect(StreamWasReset, y[2].receive_some)


@check
async def all_streams_of_a_batch_are_there_at_once(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    for _ in range(10):
        (await a.open_stream()).send_nowait(b"x", fin=True)
    seen = [await b.accept_stream()]
    await traits.settle()
    while (stream := b.accept_stream_nowait()) is not None:
        seen.append(stream)
    assert [stream.stream_id for stream in seen] == list(range(0, 40, 4))
    assert [await read_to_end(stream) for stream in seen] == [b"x"] * 10


@check
async def tells_when_there_is_a_stream_to_accept(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    (await a.open_stream()).send_nowait(b"0", fin=True)
    await traits.settle()
    seen: list[Stream] = []

    def accept() -> None:
        while (stream := b.accept_stream_nowait()) is not None:
            seen.append(stream)

    b.on_stream(accept)
    await until(traits, lambda: len(seen) == 1)
    for octet in (b"1", b"2"):
        (await a.open_stream()).send_nowait(octet, fin=True)
    await until(traits, lambda: len(seen) == 3)
    assert [await read_to_end(stream) for stream in seen] == [b"0", b"1", b"2"]


@check
async def tells_of_a_batch_when_its_streams_have_their_data(
    traits: CarrierTraits, a: Connection, b: Connection
) -> None:
    batches: list[list[bytes]] = []

    def take() -> None:
        batches.append([])
        while (stream := b.accept_stream_nowait()) is not None:
            batches[-1].append(bytes(stream.receive_nowait() or b""))

    streams = [await a.open_stream() for _ in range(3)]
    b.on_batch(take)
    for stream in streams:
        stream.send_nowait(b"x", fin=True)
    await traits.settle()
    take()  # a carrier that has no batches has not called it
    assert [data for batch in batches for data in batch] == [b"x"] * 3


@check
async def sends_together(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x = [await a.open_stream() for _ in range(3)]

    def some() -> None:
        for stream in x[1:]:
            stream.send_nowait(b"inside", fin=True)

    def send() -> None:
        x[0].send_nowait(b"outside", fin=True)
        a.together(some)

    a.together(send)
    y = [await b.accept_stream() for _ in range(3)]
    assert sorted([await read_to_end(stream) for stream in y]) == [b"inside", b"inside", b"outside"]

    def fail() -> None:
        z.send_nowait(b"before", fin=True)
        raise LookupError

    z = await a.open_stream()
    try:
        a.together(fail)
    except LookupError:
        pass
    else:
        raise AssertionError("the error was swallowed")
    assert await read_to_end(await b.accept_stream()) == b"before"


@check
async def unidirectional_streams_have_one_direction(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, y = await pair_on(traits, a, b, unidirectional=True)
    for call in (x.receive_some, lambda: y.send_all(b"x"), y.send_eof):
        try:
            await call()
        except LocalProtocolError:
            continue
        raise AssertionError("the direction that a unidirectional stream lacks was used")
    await x.send_all(b"on")
    await x.send_eof()
    assert await read_to_end(y) == b"on"


@check
async def send_nowait_queues_and_finishes(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x = await a.open_stream()
    x.send_nowait(b"all ")
    x.send_nowait(b"at once", fin=True)
    await expect(ConnectionClosed, lambda: x.send_all(b"x"))
    y = await b.accept_stream()
    assert await read_to_end(y) == b"all at once"
    y.send_nowait(b"", fin=True)
    assert await x.receive_some() == b""


@check
async def tells_when_there_is_something_to_take(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, y = await pair_on(traits, a, b)
    told: list[int] = []
    y.on_readable(told.append)
    await traits.settle()
    assert told == [], "there is nothing to take"
    assert y.receive_nowait() is None
    assert not y.at_end
    x.send_nowait(b"octets", fin=True)
    await until(traits, lambda: bool(told))
    got = b""
    while part := y.receive_nowait():
        got += part
    if part is None:  # the end may come by itself
        told.clear()
        y.on_readable(told.append)
        await until(traits, lambda: bool(told))
    assert y.at_end
    assert (got, y.receive_nowait()) == (b"octets", b"")
    told.clear()
    y.on_readable(told.append)
    assert told == [y.stream_id], "the end is there already"

    x, y = await pair_on(traits, a, b, unidirectional=True)
    y.on_readable(told.append)
    assert not y.was_reset
    x.reset(4)
    await until(traits, lambda: len(told) > 1)
    assert y.was_reset
    assert not x.was_reset
    for call, error in (
        (y.receive_nowait, StreamWasReset),
        (x.receive_nowait, LocalProtocolError),
        (lambda: x.on_readable(told.append), LocalProtocolError),
    ):
        try:
            call()
        except error:
            continue
        raise AssertionError(f"{error.__name__} was to come")


@check
async def priority_may_be_set_at_any_time(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x = await a.open_stream(priority=3)
    assert x.priority == 3
    await x.send_all(b"a")
    x.priority = 255
    assert x.priority == 255
    await x.send_all(b"b")
    assert await read(await b.accept_stream(), 2) == b"ab"


@check
async def stream_that_is_only_received_on_has_a_priority_that_cannot_be_set(
    traits: CarrierTraits, a: Connection, b: Connection
) -> None:
    x, y = await pair_on(traits, a, b, unidirectional=True)
    assert isinstance(y, Stream)
    assert y.priority == 128
    assert y.unsent == 0
    try:
        y.priority = 3
    except LocalProtocolError:
        x.priority = 3
        return
    raise AssertionError("a priority was set where nothing is sent")


@check
async def reset_carries_its_code(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    for code in (0, 7, LARGEST_CODE):
        x, y = await pair_on(traits, a, b)
        x.reset(code)
        error = await expect(StreamWasReset, lambda y=y: read_on(y))  # type: ignore[misc]  # a default cannot be typed
        assert isinstance(error, StreamWasReset)
        assert error.code == code
        await expect(ConnectionClosed, lambda x=x: x.send_all(b"x"))  # type: ignore[misc]  # a default cannot be typed
        await y.send_all(b"the other direction lives on")
        assert await read(x, 28) == b"the other direction lives on"


@check
async def stop_carries_its_code(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    for code in (0, 9, LARGEST_CODE):
        x, y = await pair_on(traits, a, b)
        y.stop(code)
        assert await x.stopped() == code
        error = await expect(StreamWasStopped, lambda x=x: x.send_all(b"x"))  # type: ignore[misc]  # a default cannot be typed
        assert isinstance(error, StreamWasStopped)
        assert error.code == code
        assert await x.acked() is False
        await expect(ConnectionClosed, y.receive_some)
        await y.send_all(b"the other direction lives on")
        assert await read(x, 28) == b"the other direction lives on"


@check
async def stop_of_an_idle_stream_is_noticed_without_writing(
    traits: CarrierTraits, a: Connection, b: Connection
) -> None:
    await _notice_stop(traits, *await pair_on(traits, a, b))
    x, y = await pair_on(traits, a, b, unidirectional=True)
    await _notice_stop(traits, x, y)
    try:
        y.on_stopped(lambda *_: None)
    except LocalProtocolError:
        return
    raise AssertionError("the end that only receives was told that it may be stopped")


async def _notice_stop(traits: CarrierTraits, x: Stream, y: Stream) -> None:
    got: list[object] = []
    x.on_stopped(lambda stream_id, code: got.append((stream_id, code)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, x.stopped, got)
        await traits.settle()
        assert got == [], "it has not been stopped yet"
        y.stop(11)
    await until(traits, lambda: len(got) == 2)
    x.on_stopped(lambda _, code: got.append(-code))
    assert sorted(got[:2], key=str) == [(x.stream_id, 11), 11]
    assert got[2:] == [-11]
    await expect(StreamWasStopped, lambda: x.send_all(b"x"))


@check
async def stream_credit_is_what_may_be_opened(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    for unidirectional in (False, True):
        credit = a.stream_credit(unidirectional=unidirectional)
        assert credit > 0
        for left in range(credit - 1, -1, -1):
            assert a.try_open_stream(unidirectional=unidirectional) is not None
            assert a.stream_credit(unidirectional=unidirectional) == left
        assert a.try_open_stream(unidirectional=unidirectional) is None
    a.close()
    assert a.stream_credit(unidirectional=True) == 0


@check
async def stop_that_comes_too_late_is_not_told(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, y = await pair_on(traits, a, b)
    z, _ = await pair_on(traits, a, b)
    got: list[tuple[int, int]] = []
    x.on_stopped(lambda *told: got.append(told))
    z.on_stopped(lambda *told: got.append(told))
    await x.send_eof()
    assert await read_to_end(y) == b""
    assert await x.acked()
    y.stop(1)
    z.reset(2)
    await traits.settle()
    a.close()
    await b.wait_closed()
    assert await x.stopped() is None
    assert got == []


@check
async def reset_and_stop_wake_who_waits(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, y = await pair_on(traits, a, b)
    await fill(traits, x)
    got: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, lambda: x.send_all(b"x"), got)
        nursery.start_soon(outcome_of, x.flush, got)
        nursery.start_soon(outcome_of, x.acked, got)
        await traits.settle()
        assert got == []
        y.stop(5)
    assert sorted(map(repr, map(type, got))) == sorted(map(repr, [StreamWasStopped, StreamWasStopped, bool])), got
    got.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, x.receive_some, got)
        await traits.settle()
        y.reset(6)
    assert [type(outcome) for outcome in got] == [StreamWasReset]


@check
async def reset_drops_what_is_queued(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, y = await pair_on(traits, a, b)
    await fill(traits, x)
    assert x.unsent > 0
    assert x.unacked >= x.unsent
    x.reset(1)
    assert x.unsent == 0
    await expect(StreamWasReset, lambda: read_on(y))
    assert await x.acked() is False


@check
async def acked_means_that_the_peer_has_it(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, y = await pair_on(traits, a, b)
    got: list[object] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, x.acked, got)
        nursery.start_soon(outcome_of, x.stopped, got)
        await x.send_all(b"data")
        await traits.settle()
        assert got == [], "the end is not sent yet"
        await x.send_eof()
    assert sorted(map(repr, got)) == ["None", "True"]
    assert x.unacked == 0
    assert await read_to_end(y) == b"data"


@check
async def all_acked_waits_for_the_peer_on_a_stream_that_goes_on(
    traits: CarrierTraits, a: Connection, b: Connection
) -> None:
    x, y = await pair_on(traits, a, b)
    await x.all_acked()
    for size in (1, 50_000):
        async with trio.open_nursery() as nursery:
            await x.send_all(bytes(size))
            nursery.start_soon(read, y, size)
            await x.all_acked()
            assert x.unacked == 0
    got: list[object] = []
    async with trio.open_nursery() as nursery:
        await fill(traits, x)
        nursery.start_soon(outcome_of, x.all_acked, got)
        await traits.settle()
        assert got == [], "all_acked() came back though the peer has not taken everything"
        a.close(1, "done")
    assert [type(outcome) for outcome in got] == [ConnectionClosed]


async def open_all(traits: CarrierTraits, a: Connection, *, unidirectional: bool) -> list[Stream]:
    streams: list[Stream] = []
    while (stream := a.try_open_stream(unidirectional=unidirectional)) is not None:
        streams.append(stream)
        assert len(streams) <= traits.max_open, "there seems to be no limit to streams"
    return streams


@check
async def streams_wait_for_the_peers_credit(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    await _credit(traits, a, b, unidirectional=True)
    await _credit(traits, a, b, unidirectional=False)


async def _credit(traits: CarrierTraits, a: Connection, b: Connection, *, unidirectional: bool) -> None:
    streams = await open_all(traits, a, unidirectional=unidirectional)
    assert len(streams) >= 2
    opened: list[int] = []

    async def open_one() -> None:
        opened.append((await a.open_stream(unidirectional=unidirectional)).stream_id)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_one)
        await traits.settle()
        assert opened == []
        nursery.cancel_scope.cancel()  # takes no credit along
    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_one)
        streams[1].send_nowait(b"over", fin=True)
        seen = await b.accept_stream()
        assert await read_to_end(seen) == b"over"
        if not unidirectional:
            await seen.send_eof()
            assert await read_to_end(streams[1]) == b""
    assert opened == [streams[-1].stream_id + 4]
    assert a.try_open_stream(unidirectional=unidirectional) is None


@check
async def credit_is_counted_down(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    for unidirectional in (False, True):
        credit = a.stream_credit(unidirectional=unidirectional)
        assert 2 <= credit <= traits.max_open
        await a.open_stream(unidirectional=unidirectional)
        assert a.stream_credit(unidirectional=unidirectional) == credit - 1
    assert 0 <= a.round_trip() < traits.timeout
    a.close()
    assert a.stream_credit(unidirectional=False) == 0


@check
async def bytes_take_credit_of_the_whole_connection(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, y = await pair_on(traits, a, b)
    assert a.credit() == b.credit()[::-1]
    free, back = a.credit()
    await x.send_all(bytes(1000))
    await until(traits, lambda: a.credit() == (free - 1000, back) == b.credit()[::-1])
    await read(y, 1000)
    await y.send_all(bytes(10))
    await read(x, 10)
    await a.aclose()
    await b.wait_closed()
    assert a.credit() == b.credit() == (0, 0)


@check
async def stopped_stream_leaves_the_others_alone(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, y = await pair_on(traits, a, b)
    sent = await fill(traits, x)
    other, there = await pair_on(traits, a, b)
    for number in range(5):
        await other.send_all(block(number))
        assert await read(there, BLOCK) == block(number)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(x.send_all, b"tail")
        await expect_blocks(y, sent, b"tail")


@check
async def many_streams_come_and_go_without_growth(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    async def answer() -> None:
        while True:
            stream: Stream | None = await b.accept_stream()
            while stream is not None:
                nursery.start_soon(serve, stream)
                stream = b.accept_stream_nowait()

    async def serve(stream: Stream) -> None:
        stream.send_nowait(await read_to_end(stream), fin=True)

    async def ask(count: int) -> None:
        for _ in range(count):
            stream = await a.open_stream()
            stream.send_nowait(b"ping", fin=True)
            assert await read_to_end(stream) == b"ping"

    async def ask_many(count: int) -> int:
        async with trio.open_nursery() as askers:
            for _ in range(20):
                askers.start_soon(ask, count // 20)
        await traits.settle()
        gc.collect()
        return len(gc.get_objects())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        few = await ask_many(traits.streams // 5)
        many = await ask_many(traits.streams - traits.streams // 5)
        limit = max(100, traits.streams // 50)  # some dozens are under way at any moment
        assert many - few < limit, f"{many - few} objects more after {traits.streams} streams were closed"
        nursery.cancel_scope.cancel()


@check
async def datagrams_have_a_size_limit(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    await a.handshake()
    limit = a.max_datagram_size()
    assert limit >= 1000
    error = await expect(DatagramTooLarge, lambda: a.send_datagram(bytes(limit + 1)))
    assert isinstance(error, DatagramTooLarge)
    assert (error.size, error.limit) == (limit + 1, limit)
    await a.send_datagram(b"\1" * limit)
    assert await b.receive_datagram() == Datagram(b"\1" * limit)
    assert b.send_datagram_nowait(memoryview(b"back")) is True
    assert await a.receive_datagram() == Datagram(b"back")


@check
async def datagrams_nobody_takes_are_dropped_oldest_first(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    await a.handshake()
    count = 2 * traits.datagram_queue
    for number in range(count):
        await a.send_datagram(number.to_bytes(4, "big"))
        if number % 32 == 31:
            await traits.settle()
    await traits.settle()
    got: list[int] = []

    async def receive() -> None:
        while True:
            got.append(int.from_bytes((await b.receive_datagram()).data, "big"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await until(traits, lambda: count - 1 in got)
        await traits.settle()
        nursery.cancel_scope.cancel()
    assert got == list(range(count - len(got), count))
    assert b.statistics().datagrams_dropped == count - len(got)
    assert len(got) <= traits.datagram_queue


@check
async def cancelled_receive_datagram_takes_nothing(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    got: list[object] = []
    await a.handshake()
    for number in range(4):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outcome_of, b.receive_datagram, got)
            await traits.settle()
            if number % 2:
                nursery.cancel_scope.cancel()
            assert a.send_datagram_nowait(bytes([number]))
            nursery.cancel_scope.cancel()
    while len(got) < 4:
        got.append(await b.receive_datagram())
    assert got == [Datagram(bytes([number])) for number in range(4)]
