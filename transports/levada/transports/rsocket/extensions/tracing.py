"""Zipkin tracing metadata: the trace and span of a request (EXT-5)."""

from __future__ import annotations

from typing import ClassVar, Self

import attrs

from levada.framework.errors import DecodeError

__all__ = ["ZipkinTracing"]

# EXT-5: from the highest bit; the lowest two have no meaning and are not read.
_IDS, _DEBUG, _SAMPLED, _NOT_SAMPLED, _WIDE, _PARENT = 0x80, 0x40, 0x20, 0x10, 0x08, 0x04


@attrs.frozen(kw_only=True)
class ZipkinTracing:
    """Trace, span and sampling decision, or the decision alone.

    Source: Zipkin tracing metadata (EXT-5).
    """

    MIME_TYPE: ClassVar[str] = "message/x.rsocket.tracing-zipkin.v0"
    """What this kind of metadata is called in composite metadata."""

    trace_id: int | None = None
    """Below 2^128; an id below 2^64 is sent in 64 bits. Set it together with `span_id`."""
    span_id: int | None = None
    """Below 2^64."""
    parent_id: int | None = None
    """Below 2^64; only with the other two."""
    sampled: bool | None = None
    """Whether the trace is recorded; ``None`` leaves it to the receiver."""
    debug: bool = False
    """Record the trace whatever the sampler says."""

    def __attrs_post_init__(self) -> None:
        if (self.trace_id is None) is not (self.span_id is None):
            raise ValueError("trace_id and span_id come together")
        if self.parent_id is not None and self.span_id is None:
            raise ValueError("parent_id needs trace_id and span_id")
        for name, value, bits in (
            ("trace", self.trace_id, 128),
            ("span", self.span_id, 64),
            ("parent", self.parent_id, 64),
        ):
            if value is not None and not 0 <= value < 1 << bits:
                raise ValueError(f"{name}_id is {value:#x}, wanted at most {bits} bits")

    def encode(self) -> bytes:
        """Return the bytes."""
        flags = _DEBUG if self.debug else 0
        if self.sampled is not None:
            flags |= _SAMPLED if self.sampled else _NOT_SAMPLED
        if self.trace_id is None or self.span_id is None:
            return bytes((flags,))
        flags |= _IDS
        ids = self.span_id.to_bytes(8, "big")
        if self.trace_id < 1 << 64:
            ids = self.trace_id.to_bytes(8, "big") + ids
        else:
            flags |= _WIDE
            ids = self.trace_id.to_bytes(16, "big") + ids
        if self.parent_id is not None:
            flags |= _PARENT
            ids += self.parent_id.to_bytes(8, "big")
        return bytes((flags,)) + ids

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read flags and ids.

        Raises:
            DecodeError: too few bytes or too many for the flags, or both sampled and not sampled.
        """
        if not data:
            raise DecodeError("no flags")
        flags = data[0]
        if flags & _SAMPLED and flags & _NOT_SAMPLED:
            raise DecodeError("both sampled and not sampled", path="sampled")
        sampled = True if flags & _SAMPLED else False if flags & _NOT_SAMPLED else None
        debug = bool(flags & _DEBUG)
        span = 1 + (16 if flags & _WIDE else 8)
        size = span + (16 if flags & _PARENT else 8) if flags & _IDS else 1
        if len(data) != size:
            raise DecodeError(f"{len(data)} bytes, {size} wanted by the flags {flags:#04x}")
        if not flags & _IDS:
            return cls(sampled=sampled, debug=debug)
        return cls(
            trace_id=int.from_bytes(data[1:span], "big"),
            span_id=int.from_bytes(data[span : span + 8], "big"),
            parent_id=int.from_bytes(data[span + 8 :], "big") if flags & _PARENT else None,
            sampled=sampled,
            debug=debug,
        )
