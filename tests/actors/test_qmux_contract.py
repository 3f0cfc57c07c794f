"""The contract of ``levada interop qmux``, on the memory carrier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from tests.interop.qmux_client import EXPECTED, command, go_through, read_all, reset_of

from levada.actors.interop.qmux import keep
from levada.framework.errors import StreamWasReset
from levada.transports.carriers import Connection, MemoryConfig, memory

SHAPE = MemoryConfig(shape="connection")


@asynccontextmanager
async def serving() -> AsyncIterator[None]:
    async def accept() -> None:
        while True:
            incoming = await listener.accept()
            assert isinstance(incoming, memory.MemoryIncoming)
            connection = incoming.accept()
            nursery.start_soon(keep, connection, connection.link.cut)

    async with memory.listen("memory://contract", SHAPE) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def dial() -> AsyncIterator[Connection]:
    async with memory.dial("memory://contract") as connection:
        assert isinstance(connection, Connection)
        yield connection


@asynccontextmanager
async def connected() -> AsyncIterator[Connection]:
    async with serving(), dial() as connection:
        yield connection


async def test_the_whole_contract(autojump_clock: trio.abc.Clock) -> None:
    async with serving():
        assert await go_through(dial) == EXPECTED


@pytest.mark.parametrize(
    "line",
    [
        b"!",
        b"!close x",
        b"!close %d" % (1 << 62),
        b"!drop now",
        b"!reset",
        b"!reset %d" % (1 << 62),
        b"!reset -1",
        b"!stop 1 2",
        b"!hold \xc2\xb2",
        b"!send a lot",
        b"!open both 3",
        b"!send " + b"0" * 194,
    ],
)
async def test_other_commands_are_refused(line: bytes, autojump_clock: trio.abc.Clock) -> None:
    """The client's direction is stopped, so that it cannot fill the connection's window."""
    async with connected() as connection:
        stream = await command(connection, line)
        assert (await reset_of(stream), await stream.stopped()) == (1, 1)


@pytest.mark.parametrize("line", [b"!drop", b"!send " + b"0" * 200])
async def test_a_command_needs_its_line_feed_within_200_bytes(line: bytes, autojump_clock: trio.abc.Clock) -> None:
    async with connected() as connection:
        stream = await connection.open_stream()
        stream.send_nowait(line, fin=len(line) < 200)
        assert await reset_of(stream) == 1


async def test_a_command_may_come_in_pieces(autojump_clock: trio.abc.Clock) -> None:
    async with connected() as connection:
        stream = await connection.open_stream()
        for octet in b"!send 5\n":
            await stream.send_all(bytes((octet,)))
            await trio.testing.wait_all_tasks_blocked()
        assert await read_all(stream) == bytes(range(5))


async def test_a_reason_may_have_spaces_and_more(autojump_clock: trio.abc.Clock) -> None:
    async with connected() as connection:
        await command(connection, b"!close %d  two  spaces \xff" % ((1 << 62) - 1))
        reason = await connection.wait_closed()
        assert (reason.code, reason.by_peer) == ((1 << 62) - 1, True)
        assert reason.text == " two  spaces \ufffd"


async def test_a_stopped_echo_is_reset_with_the_same_code(autojump_clock: trio.abc.Clock) -> None:
    async with connected() as connection:
        stream = await connection.open_stream()
        await stream.send_all(b"echo")
        assert await stream.receive_some() == b"echo"
        stream.stop(78)
        await stream.send_all(b"more")
        assert await stream.stopped() == 78


async def test_one_way_streams_are_reset_and_stopped_alike(autojump_clock: trio.abc.Clock) -> None:
    async with connected() as connection:
        stream = await connection.open_stream(unidirectional=True)
        await stream.send_all(b"one")
        answer = await connection.accept_stream()
        assert (answer.unidirectional, await answer.receive_some()) == (True, b"one")
        stream.reset(5)
        with pytest.raises(StreamWasReset) as caught:
            await answer.receive_some()
        assert caught.value.code == 5

        stream = await connection.open_stream(unidirectional=True)
        await stream.send_all(b"two")
        answer = await connection.accept_stream()
        answer.stop(6)
        await stream.send_all(b"more")
        assert await stream.stopped() == 6


async def test_hold_reads_nothing_meanwhile(autojump_clock: trio.abc.Clock) -> None:
    async with connected() as connection:
        stream = await command(connection, b"!hold 60000")
        start = trio.current_time()
        with trio.move_on_after(59.0) as waited:
            while True:
                await stream.send_all(bytes(65_536))
        assert waited.cancelled_caught
        assert stream.unsent > 0
        await stream.send_eof()
        assert int(await read_all(stream)) % 65_536 == 0
        assert trio.current_time() - start == pytest.approx(60.0)
