"""The contract of ``levada interop qmux``: streams and datagrams that come back, and commands. The protocol name is ``qmux-02.interop``.

* A client's bidirectional stream whose first byte is not ``!``: every byte comes back as it comes, and the end after the end. Reset or
  stopped with a code, this side's direction is reset with the same code.
* A client's unidirectional stream: a unidirectional stream comes back in the same way.
* A datagram comes back.
* A client's bidirectional stream whose first byte is ``!``: a command of at most 200 bytes, ended by a line feed.

================== =================================================================================================================
command            does
================== =================================================================================================================
``!close C TEXT``  closes the connection with this code and text
``!drop``          cuts the transport, without a frame
``!reset C``       resets this side's direction; what the client sends is read and dropped
``!stop C``        stops the client's direction, and ends this side's
``!hold MS``       reads nothing for so many milliseconds, then all; answers the number of bytes after the line feed
``!send N``        sends N bytes, byte number i being i modulo 251
``!open KIND N``   opens N streams, ``uni`` or ``bidi``; stream i carries i in decimal; answers ``done`` when all have been opened
anything else      resets this side's direction with code 1
================== =================================================================================================================

Source: QMux reference, section 13.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from levada.actors.protocols import Served, carrier_settings
from levada.framework import ActorSystem
from levada.framework.errors import (
    ConnectionClosed,
    ConnectionLost,
    DatagramTooLarge,
    StreamWasReset,
    StreamWasStopped,
)
from levada.transports.carriers import Connection, Stream, TlsConfig
from levada.transports.qmux import QmuxConfig
from levada.transports.qmux.entry import listen

__all__ = ["CARRIERS", "add_arguments", "keep", "pattern", "serve"]

CARRIERS = ("tcp", "unix", "tls", "ws", "wss")
NAMES: Final = ("qmux-02.interop", "qmux-02")
"""Protocol names for TLS, and for WebSocket as subprotocols."""

_LONGEST: Final = 200  # bytes of a command
_CHUNK: Final = 65_536  # bytes
_CODES: Final = 1 << 62
_REFUSED: Final = 1


def pattern(start: int, end: int) -> bytes:
    """Return a part of what ``!send`` sends."""
    first, count = start % 251, end - start
    return (bytes(range(251)) * (count // 251 + 2))[first : first + count]


async def keep(connection: Connection, drop: Callable[[], None]) -> None:
    """Serve the contract on one connection until it ends.

    Args:
        connection: a client's.
        drop: cuts the transport without telling the peer.
    """
    with contextlib.suppress(ConnectionClosed, ConnectionLost):
        await connection.handshake()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_datagrams, connection)
        with contextlib.suppress(ConnectionClosed, ConnectionLost):
            while True:
                nursery.start_soon(_stream, connection, drop, await connection.accept_stream())
        nursery.cancel_scope.cancel()


async def _datagrams(connection: Connection) -> None:
    with contextlib.suppress(ConnectionClosed, ConnectionLost):
        while True:
            with contextlib.suppress(DatagramTooLarge):  # the peer accepts only smaller ones than it sends
                await connection.send_datagram((await connection.receive_datagram()).data)


async def _stream(connection: Connection, drop: Callable[[], None], stream: Stream) -> None:
    answer = stream
    with contextlib.suppress(ConnectionClosed, ConnectionLost):
        if stream.unidirectional:
            answer = await connection.open_stream(unidirectional=True)
        try:
            first = await stream.receive_some()
            if first.startswith(b"!") and not stream.unidirectional:
                await _command(connection, drop, stream, first)
            else:
                await _echo(stream, answer, first)
        except StreamWasReset as error:
            answer.reset(error.code)
        except StreamWasStopped as error:  # the carrier has reset the direction already
            stream.stop(error.code)


async def _echo(stream: Stream, answer: Stream, data: bytes) -> None:
    while data:
        await answer.send_all(data)
        data = await stream.receive_some()
    await answer.send_eof()


async def _command(connection: Connection, drop: Callable[[], None], stream: Stream, data: bytes) -> None:
    while b"\n" not in data and len(data) <= _LONGEST:
        more = await stream.receive_some()
        if not more:
            break
        data += more
    line, feed, rest = data.partition(b"\n")
    words = line[1:].decode("utf-8", "replace").split(" ", 2)
    match [words[0], *(int(word) if word.isascii() and word.isdigit() else word for word in words[1:])]:
        case _ if not feed or len(line) >= _LONGEST:
            _refuse(stream)
        case ["close", int(code), *_] if code < _CODES:
            connection.close(code, " ".join(words[2:]))
        case ["drop"]:
            drop()
        case ["reset", int(code)] if code < _CODES:
            stream.reset(code)
            await _count(stream)
        case ["stop", int(code)] if code < _CODES:
            stream.stop(code)
            await stream.send_eof()
        case ["hold", int(milliseconds)]:
            await trio.sleep(milliseconds / 1000)
            await stream.send_all(b"%d" % (len(rest) + await _count(stream)))
            await stream.send_eof()
        case ["send", int(count)]:
            for start in range(0, count, _CHUNK):
                await stream.send_all(pattern(start, min(start + _CHUNK, count)))
            await stream.send_eof()
        case ["open", ("uni" | "bidi") as kind, int(count)]:
            for i in range(count):
                opened = await connection.open_stream(unidirectional=kind == "uni")
                opened.send_nowait(b"%d" % i, fin=True)
            await stream.send_all(b"done")
            await stream.send_eof()
        case _:
            _refuse(stream)


def _refuse(stream: Stream) -> None:
    stream.reset(_REFUSED)
    stream.stop(_REFUSED)  # what else the client sends takes no room


async def _count(stream: Stream) -> int:
    """Read to the end, and count."""
    count = 0
    while data := await stream.receive_some():
        count += len(data)
    return count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: this contract has no options."""


@asynccontextmanager
async def serve(
    system: ActorSystem, carrier: str, where: str, tls: TlsConfig | None, args: argparse.Namespace
) -> AsyncIterator[Served]:
    """Serve the contract; arguments as for `levada.actors.interop.rsocket.serve`. It runs on the bare carrier, without actors."""
    config = QmuxConfig(protocols=NAMES, below=carrier_settings(carrier, tls))

    async def accept() -> None:
        while True:
            connection = (await listener.accept()).accept()
            nursery.start_soon(keep, connection, connection.abort)

    async with listen(f"qmux+{carrier}://{where}", config) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        yield listener
        nursery.cancel_scope.cancel()
