"""Routing metadata: the route of a request, which selects its handler (EXT-2)."""

from __future__ import annotations

from typing import ClassVar, Self

import attrs

from levada.framework.errors import DecodeError
from levada.transports.rsocket.extensions.mime import MAX_ENTRIES

__all__ = ["Routing"]


@attrs.frozen(init=False)
class Routing:
    """A route, and perhaps further tags.

    Args:
        tags: each at most 255 bytes of UTF-8; the first one is the route.

    Source: routing metadata (EXT-2).
    """

    MIME_TYPE: ClassVar[str] = "message/x.rsocket.routing.v0"
    """What this kind of metadata is called in composite metadata."""

    tags: tuple[str, ...]
    """All tags, the route first; a peer may send none at all."""

    def __init__(self, *tags: str) -> None:
        for tag in tags:
            if not isinstance(tag, str):
                raise TypeError(f"the tag is {type(tag).__name__}, wanted str")
            if len(tag.encode()) > 255:
                raise ValueError(f"a tag of {len(tag.encode())} bytes, at most 255: {tag[:40]!r}")
        object.__setattr__(self, "tags", tags)

    @property
    def route(self) -> str | None:
        """The first tag; ``None`` if there is none."""
        return self.tags[0] if self.tags else None

    def encode(self) -> bytes:
        """Return the bytes."""
        encoded = [tag.encode() for tag in self.tags]
        return b"".join(bytes((len(tag),)) + tag for tag in encoded)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read tags to the end.

        Raises:
            DecodeError: the last tag is cut off, one is not UTF-8, or there are more than `MAX_ENTRIES`.
        """
        tags: list[str] = []
        at = 0
        while at < len(data):
            if len(tags) >= MAX_ENTRIES:
                raise DecodeError(f"more than {MAX_ENTRIES} tags", path=f"tags[{len(tags)}]")
            end = at + 1 + data[at]
            if len(data) < end:
                raise DecodeError(f"a tag of {data[at]} bytes, {len(data) - at - 1} left", path=f"tags[{len(tags)}]")
            try:
                tags.append(data[at + 1 : end].decode())
            except UnicodeDecodeError as error:
                raise DecodeError(f"not UTF-8: {error.reason}", path=f"tags[{len(tags)}]") from error
            at = end
        return cls(*tags)
