"""The checks of how connections end (closed, drained, cancelled, cut), and of what waiting tasks see then."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable

import trio

from levada.framework.errors import CarrierError, ConnectionClosed, ConnectionLost
from levada.transports.carriers.contracts import CloseReason, Connection
from levada.transports.testing._connection_checks import check, open_all, pair_on
from levada.transports.testing._stream_tools import block, expect, fill, outcome_of, read, read_to_end
from levada.transports.testing.traits import CarrierTraits


@check
async def cancelled_accept_takes_nothing(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    got: list[int] = []

    async def accept() -> None:
        got.append((await b.accept_stream()).stream_id)

    for number in range(4):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await traits.settle()
            stream = await a.open_stream(unidirectional=True)
            if number % 2:
                nursery.cancel_scope.cancel()
            stream.send_nowait(b"x")
            nursery.cancel_scope.cancel()
    while len(got) < 4:
        await accept()
    assert got == [2, 6, 10, 14]


async def _awaits(traits: CarrierTraits, a: Connection, b: Connection) -> list[Callable[[], Awaitable[object]]]:
    """Return one call for each await of end `a`, each of which waits now."""
    await open_all(traits, a, unidirectional=True)
    x, _ = await pair_on(traits, a, b)
    _, idle = await pair_on(traits, b, a)
    await fill(traits, x)
    return [
        a.accept_stream,
        lambda: a.open_stream(unidirectional=True),
        a.receive_datagram,
        x.receive_some,
        lambda: x.send_all(b"x"),
        x.flush,
        x.stopped,
        idle.acked,
    ]


async def _everybody_waits(
    traits: CarrierTraits, a: Connection, b: Connection, nursery: trio.Nursery, here: list[object], there: list[object]
) -> int:
    """Start a task for each await of both ends; return how many wait at each end."""
    calls, calls_there = await _awaits(traits, a, b), await _awaits(traits, b, a)
    for call in calls:
        nursery.start_soon(outcome_of, call, here)
    for call in calls_there:
        nursery.start_soon(outcome_of, call, there)
    await traits.settle()
    assert here == there == []
    return len(calls)


def _all_are(kind: type[CarrierError], got: list[object], count: int) -> None:
    assert [type(outcome) for outcome in got] == [kind] * count, got


@check
async def close_tells_everybody_on_both_sides(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    here: list[object] = []
    there: list[object] = []
    async with trio.open_nursery() as nursery:
        count = await _everybody_waits(traits, a, b, nursery, here, there)
        a.close(5, "enough")
    _all_are(ConnectionClosed, here, count)
    _all_are(ConnectionLost, there, count)
    assert {outcome.code for outcome in there if isinstance(outcome, ConnectionLost)} == {5}
    assert await a.wait_closed() == CloseReason(5, "enough")
    assert await b.wait_closed() == CloseReason(5, "enough", by_peer=True)
    await _is_over(a, ConnectionClosed)
    await _is_over(b, ConnectionLost)
    a.close(6)
    await a.aclose(6)
    assert (await a.wait_closed()).code == 5


async def _is_over(end: Connection, kind: type[CarrierError]) -> None:
    """Check that each new call raises the same kind of error."""
    await expect(kind, end.open_stream)
    await expect(kind, end.accept_stream)
    await expect(kind, end.receive_datagram)
    await expect(kind, lambda: end.send_datagram(b"x"))
    assert end.accept_stream_nowait() is None


@check
async def close_of_the_connection_fails_new_calls_on_streams(
    traits: CarrierTraits, a: Connection, b: Connection
) -> None:
    x, y = await pair_on(traits, a, b)
    b.close(3)
    await a.wait_closed()
    error = await expect(ConnectionLost, lambda: x.send_all(b"x"))
    assert isinstance(error, ConnectionLost)
    assert error.code == 3
    await expect(ConnectionLost, x.receive_some)
    await expect(ConnectionClosed, lambda: y.send_all(b"x"))
    await expect(ConnectionClosed, y.receive_some)


class _Told:
    """A callback whose references can be counted."""

    def __init__(self, references: list[weakref.ref[_Told]]) -> None:
        references.append(weakref.ref(self))

    def __call__(self, stream_id: int = 0, code: int = 0) -> None:
        """Take the news."""


@check
async def releases_its_callbacks_at_the_end(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    held: list[weakref.ref[_Told]] = []
    x, y = await pair_on(traits, a, b)
    finished, _ = await pair_on(traits, a, b)
    given_up, _ = await pair_on(traits, a, b)
    _, stopped = await pair_on(traits, a, b)
    for end, stream in ((a, x), (b, y)):
        end.on_stream(_Told(held))
        stream.on_readable(_Told(held))
        stream.on_stopped(_Told(held))
    assert [ref() is None for ref in held] == [False] * 6, "a callback was dropped while it may be called"
    finished.on_stopped(_Told(held))
    await finished.send_eof()
    assert await finished.acked()
    given_up.on_stopped(_Told(held))
    given_up.reset(1)
    stopped.on_readable(_Told(held))
    stopped.stop(1)
    assert [ref() is None for ref in held[6:]] == [True] * 3, "a callback stayed that is never called again"
    a.close()
    await b.wait_closed()
    for end, stream in ((a, x), (b, y)):
        end.on_stream(_Told(held))
        stream.on_readable(_Told(held))
        stream.on_stopped(_Told(held))
    for stream in (finished, given_up, stopped):
        stream.on_readable(_Told(held))
        stream.on_stopped(_Told(held))
    await traits.settle()
    assert [ref() is None for ref in held] == [True] * 21, "a callback stayed after the end"


@check
async def drains_finished_streams_on_close(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    blocks = [block(number) for number in range(8)]
    streams = []
    for data in blocks:
        stream = await a.open_stream()
        stream.send_nowait(data, fin=True)
        streams.append(stream)
    got: list[bytes] = []

    async def receive() -> None:
        for _ in blocks:
            got.append(await read_to_end(await b.accept_stream()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await a.aclose(1, "done", drain_timeout=traits.timeout / 2)
    assert got == blocks
    assert await b.wait_closed() == CloseReason(1, "done", by_peer=True)
    assert await a.wait_closed() == CloseReason(1, "done")


@check
async def leaving_the_block_closes_the_connection(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    async with a:
        (await a.open_stream()).send_nowait(b"x", fin=True)
    assert await a.wait_closed() == CloseReason(0)
    assert await b.wait_closed() == CloseReason(0, by_peer=True)


@check
async def cancelled_close_of_the_connection_still_closes(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, _ = await pair_on(traits, a, b)
    await fill(traits, x)
    x.send_nowait(b"end", fin=True)
    with trio.CancelScope() as scope:
        scope.cancel()
        await a.aclose(2)
    assert (await a.wait_closed()).code == 2
    assert await b.wait_closed() == CloseReason(2, by_peer=True)


@check
async def is_cut_while_everybody_waits(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    assert traits.cut is not None
    here: list[object] = []
    there: list[object] = []
    async with trio.open_nursery() as nursery:
        count = await _everybody_waits(traits, a, b, nursery, here, there)
        traits.cut(a, b)
    for end, outcomes in ((a, here), (b, there)):
        assert len(outcomes) == count
        assert all(isinstance(outcome, ConnectionLost) for outcome in outcomes), outcomes
        reason = await end.wait_closed()
        assert (reason.lost, reason.by_peer) == (True, False)
        await expect(ConnectionLost, end.open_stream)


@check
async def counts_everything_together(traits: CarrierTraits, a: Connection, b: Connection) -> None:
    x, y = await pair_on(traits, a, b)
    before = a.statistics()
    await x.send_all(bytes(1000))
    await x.flush()
    await read(y, 1000)
    after = a.statistics()
    assert after.bytes_sent - before.bytes_sent >= 1000
    assert after.writes > before.writes
    assert b.statistics().bytes_received >= 1000
