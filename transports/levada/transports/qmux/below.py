"""The carrier of a connection's records: a byte stream, or the messages of a WebSocket.

Both classes have the same methods, and a connection uses its carrier only through them.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import trio

from levada.framework.errors import CarrierError, ConnectionLost, RemoteProtocolError
from levada.transports.carriers.contracts import ByteStream, CarrierStatistics, MessageStream

from .codes import TransportError
from .core import QmuxCore
from .events import Event

__all__ = ["Below", "OverBytes", "OverMessages"]

S = TypeVar("S", ByteStream, MessageStream)

_TURN: Final = 256 * 1024
"""Most bytes taken before other tasks get a turn. Source: D-17."""
_WRONG: Final = {
    1003: (TransportError.PROTOCOL_VIOLATION, "a text message"),
    1009: (TransportError.FRAME_ENCODING_ERROR, "a message above the largest record"),
}
"""Broken rules of QMux that the WebSocket detects, by its close code. Source: QX-41."""


class _Over(Generic[S]):
    """What both have in common."""

    def __init__(self, stream: S) -> None:
        self._stream: S = stream
        self._taken = 0
        """Bytes since the last turn of other tasks."""

    @property
    def unsent(self) -> int:
        """Bytes that the stream has not handed on."""
        return self._stream.unsent

    async def flush(self) -> None:
        """Wait until the stream has handed everything on."""
        await self._stream.flush()

    def abort(self) -> None:
        """Close at once."""
        self._stream.abort()

    def statistics(self) -> CarrierStatistics:
        """Return the counters of the stream."""
        return self._stream.statistics()


class OverBytes(_Over[ByteStream]):
    """Carries records, each with its Size, on a byte stream."""

    def send(self, pieces: list[bytes]) -> None:
        """Queue the output of a core. Errors as `ByteStream.send_nowait`."""
        self._stream.send_nowait(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    async def receive(self, core: QmuxCore) -> list[Event]:
        """Wait for bytes, give them to the core, and return its events."""
        if self._taken >= _TURN:
            self._taken = 0
            await trio.lowlevel.checkpoint()
        data = await self._stream.receive_some()
        self._taken += len(data)
        return core.receive_data(data, trio.current_time())

    async def close(self, *, wait: bool) -> None:
        """Send the queue and end. With `wait`, read and drop until the peer's end. Source: QX-36, QX-37."""
        stream = self._stream
        try:
            if wait:
                await stream.send_eof()
                while await stream.receive_some():
                    pass
        except NotImplementedError:
            pass  # both directions of TLS end together: two sides that waited for each other would wait until their timeouts
        except CarrierError:
            pass  # the peer has closed it already
        await stream.aclose()


class OverMessages(_Over[MessageStream]):
    """Carries records without Size, one per message of a WebSocket. Source: QX-41."""

    def send(self, pieces: list[bytes]) -> None:
        """Queue the output of a core. Errors as `MessageStream.send_nowait`."""
        for piece in pieces:
            self._stream.send_nowait(piece)

    async def receive(self, core: QmuxCore) -> list[Event]:
        """Wait for a message, give all that have come to the core, and return its events."""
        if self._taken >= _TURN:
            self._taken = 0
            await trio.lowlevel.checkpoint()
        stream = self._stream
        try:
            message: bytes | None = await stream.receive()
        except ConnectionLost as error:
            if not isinstance(error.__cause__, RemoteProtocolError):
                raise
            wrong = TransportError.PROTOCOL_VIOLATION, error.__cause__.detail
            return core.fail(*_WRONG.get(error.code or 0, wrong), trio.current_time())
        now = trio.current_time()
        found: list[Event] = []
        while message is not None and not core.ended:
            self._taken += len(message)
            found += core.receive_message(message, now)
            message = stream.receive_nowait()
        return found

    async def close(self, *, wait: bool) -> None:
        """Send the queue and a close frame, and wait for the peer's. Source: QX-41."""
        await self._stream.aclose()


Below = OverBytes | OverMessages
