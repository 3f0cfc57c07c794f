"""The bodies that a program may send: bytes, a file, an async iterator or a message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import trio

from levada.framework import Codec
from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.maop import OCTET_STREAM

__all__ = ["MESSAGE_TYPE", "Body", "BodySource", "make_source"]

MESSAGE_TYPE: Final = "application/vnd.levada.message"
"""Content type of a message class, written by the codec."""
CHUNK: Final = 131_072
"""Bytes that are read from a file, or cut from a larger piece, at a time."""

Body: TypeAlias = "bytes | bytearray | memoryview | Path | AsyncIterable[bytes] | Any"
"""Bytes; a file, whose length is announced; an async iterator of bytes, of undefined length unless one is given; or an instance of a
message class."""


@attrs.define(eq=False)
class BodySource:
    """A body to send.

    Args:
        whole: bytes that are sent at once, or ``None`` for a body that comes in pieces.
        length: in bytes; ``None`` for undefined.
        content_type: for a Success.
        pieces: a file, or an async iterator.
    """

    whole: bytes | None
    length: int | None
    content_type: str
    _pieces: memoryview | Path | AsyncIterable[bytes] | None = None
    begun: bool = attrs.field(default=False, init=False)
    """True once pieces were taken from an iterator; the body cannot be sent again."""

    @property
    def repeatable(self) -> bool:
        """Whether the body can be sent again."""
        return not (self.begun and isinstance(self._pieces, AsyncIterable))

    async def pieces(self) -> AsyncGenerator[bytes | memoryview, None]:
        """Yield the body piece by piece; closing the generator closes the file or iterator.

        Raises:
            LocalProtocolError: the file is now shorter than announced.
            TypeError: the iterator yields something other than bytes.
        """
        pieces = self._pieces
        self.begun = True
        if isinstance(pieces, memoryview):
            for at in range(0, len(pieces), CHUNK):
                yield pieces[at : at + CHUNK]
        elif isinstance(pieces, Path):
            left = self.length or 0
            async with await trio.open_file(pieces, "rb") as file:
                while left:
                    data = await file.read(min(CHUNK, left))
                    if not data:
                        raise LocalProtocolError(f"{pieces} has {left} bytes less than announced", rule="MA-56")
                    left -= len(data)
                    yield data
        else:
            assert pieces is not None
            iterator = aiter(pieces)
            try:
                async for piece in iterator:
                    if not isinstance(piece, bytes | bytearray | memoryview):
                        raise TypeError(f"a piece of the body is {type(piece).__name__}, wanted bytes")
                    yield piece if isinstance(piece, bytes) else bytes(piece)
            finally:
                if isinstance(iterator, AsyncGenerator):
                    await iterator.aclose()


async def make_source(
    body: Body, codec: Codec, length: int | None = None, content_type: str | None = None
) -> BodySource:
    """Make the source of a body.

    Args:
        body: see `Body`.
        codec: writes message classes.
        length: how many bytes an iterator will yield.
        content_type: replaces the default one.

    Raises:
        ConfigurationError: the body has an unsupported type, or a length was given for a body with a known length.
        OSError: there is no such file, or it may not be read.
    """
    if isinstance(body, AsyncIterable):
        return BodySource(None, length, content_type or OCTET_STREAM, body)
    if isinstance(body, Path):
        size = (await trio.Path(body).stat()).st_size
        return BodySource(None, size, content_type or OCTET_STREAM, body)
    if length is not None:
        raise ConfigurationError("length= is for an async iterator only; the length of other bodies is known")
    return quick_source(body, codec, content_type)


def quick_source(body: Any, codec: Codec, content_type: str | None = None) -> BodySource:
    """Make a source from bytes or a message; raise `ConfigurationError` for anything else."""
    if isinstance(body, bytes):
        data, kind = body, OCTET_STREAM
    elif isinstance(body, bytearray | memoryview):
        data, kind = bytes(body), OCTET_STREAM
    elif hasattr(type(body), "__message_tag__"):
        data, kind = codec.encode(body), MESSAGE_TYPE
    else:
        raise ConfigurationError(
            f"the body is {type(body).__name__}, wanted bytes, a Path, an async iterator of bytes or a message"
        )
    kind = content_type or kind
    if len(data) > CHUNK:
        return BodySource(None, len(data), kind, memoryview(data))
    return BodySource(data, len(data), kind)
