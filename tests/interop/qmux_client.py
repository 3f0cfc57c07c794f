"""A client that goes through the contract of ``levada interop qmux``, on any connection; the third-party peers have the same one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio

from levada.actors.interop.qmux import pattern
from levada.framework.errors import StreamWasReset, StreamWasStopped
from levada.transports.carriers import Connection, Stream

EXPECTED: dict[str, Any] = {
    "echo": [0, 1, 16_382, 1_000_000],
    "many": 300,
    "uni": "one way",
    "datagrams": 10,
    "reset": 77,
    "command_reset": 9,
    "command_unknown": 1,
    "command_stop": 11,
    "command_hold": 300_000,
    "command_send": True,
    "command_open_uni": 150 * 149 // 2,
    "command_open_bidi": 150 * 149 // 2,
    "command_close": [42, "so long"],
    "command_drop": "lost",
}
"""What every client finds at a server that keeps the contract."""


async def read_all(stream: Stream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


async def exchange(connection: Connection, data: bytes) -> bytes:
    """Send bytes on a new stream, with the end, and read the answer meanwhile."""
    stream = await connection.open_stream()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def send() -> None:
            await stream.send_all(data)
            await stream.send_eof()

        return await read_all(stream)


async def reset_of(stream: Stream) -> int | None:
    try:
        await read_all(stream)
    except StreamWasReset as error:
        return error.code
    return None


async def command(connection: Connection, line: bytes) -> Stream:
    stream = await connection.open_stream()
    await stream.send_all(line + b"\n")
    return stream


async def go_through(dial: Callable[[], AbstractAsyncContextManager[Connection]]) -> dict[str, Any]:
    """Do everything that the contract has; what was found, to compare with `EXPECTED`.

    Args:
        dial: connects to the server; called twice.
    """
    found: dict[str, Any] = {}
    async with dial() as connection:
        found["echo"] = []
        for size in (0, 1, 16_382, 1_000_000):
            got = await exchange(connection, b"x" * size)
            found["echo"].append(len(got) if not got.strip(b"x") else None)

        same: list[bool] = []

        async def one(i: int) -> None:
            same.append(await exchange(connection, b"stream %d" % i) == b"stream %d" % i)

        async with trio.open_nursery() as nursery:
            for i in range(300):
                nursery.start_soon(one, i)
        found["many"] = sum(same)

        stream = await connection.open_stream(unidirectional=True)
        stream.send_nowait(b"one way", fin=True)
        found["uni"] = (await read_all(await connection.accept_stream())).decode()

        found["datagrams"] = 0
        for i in range(10):
            # One at a time: the npm package drops datagrams while others wait to be sent.
            await connection.send_datagram(b"datagram %d" % i)
            found["datagrams"] += (await connection.receive_datagram()).data == b"datagram %d" % i

        stream = await connection.open_stream()
        await stream.send_all(b"some")
        await stream.receive_some()
        stream.reset(77)
        found["reset"] = await reset_of(stream)

        found["command_reset"] = await reset_of(await command(connection, b"!reset 9"))
        found["command_unknown"] = await reset_of(await command(connection, b"!what"))
        stream = await command(connection, b"!stop 11")
        assert await read_all(stream) == b""
        found["command_stop"] = await stream.stopped()
        found["command_hold"] = int(await exchange(connection, b"!hold 20\n" + bytes(300_000)))
        found["command_send"] = await exchange(connection, b"!send 100000\n") == pattern(0, 100_000)

        for kind in ("uni", "bidi"):
            asked: list[bytes] = []

            async def ask(kind: str, asked: list[bytes]) -> None:
                asked.append(await exchange(connection, b"!open %s 150\n" % kind.encode()))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(functools.partial(ask, kind, asked))
                total = 0
                for _ in range(150):
                    stream = await connection.accept_stream()
                    total += int(await read_all(stream))
                    if kind == "bidi":
                        with contextlib.suppress(StreamWasStopped):  # the crate's server has stopped it
                            await stream.send_eof()
            found[f"command_open_{kind}"] = total if asked == [b"done"] else None

        await command(connection, b"!close 42 so long")
        reason = await connection.wait_closed()
        assert reason.by_peer
        found["command_close"] = [reason.code, reason.text]
    async with dial() as connection:
        await command(connection, b"!drop")
        reason = await connection.wait_closed()
        found["command_drop"] = "lost" if reason.lost else reason.code
    return found
