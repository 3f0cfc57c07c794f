"""The context of a message before its payload, between two sides that both trace. ``docs/protocols/aqueduct-refs.md`` has the format."""

from __future__ import annotations

import struct
from typing import Final

from levada.framework.errors import DecodeError
from levada.framework.tracing import TraceHeaders

__all__ = ["MAX_STAMP", "TRACE_GREETING", "read_stamp", "stamped"]

TRACE_GREETING: Final = ("levada-trace", b"1")
"""Connection header: this side reads stamps. A peer without it is sent none."""

_MARK: Final = b"\xc1"
"""The first byte of a stamp: no msgpack value begins with it."""
_HEAD: Final = struct.Struct(">55sH")
"""``traceparent``, and the size of ``tracestate``."""
_MAX_STATE: Final = 512
MAX_STAMP: Final = 1 + _HEAD.size + _MAX_STATE


def stamped(headers: TraceHeaders, payload: bytes) -> bytes:
    """Put a context before a payload. Source: RF-58."""
    state = headers.tracestate.encode("ascii")
    return b"".join((_MARK, _HEAD.pack(headers.traceparent.encode("ascii"), len(state)), state, payload))


def read_stamp(payload: bytes) -> tuple[TraceHeaders | None, bytes]:
    """Split a payload into the context, if there is a good one, and the rest.

    Raises:
        DecodeError: the stamp is cut, or its ``tracestate`` is too long.

    Source: RF-58, RF-59.
    """
    if payload[:1] != _MARK:
        return None, payload
    start = 1 + _HEAD.size
    if len(payload) < start:
        raise DecodeError("a stamp is cut")
    parent, size = _HEAD.unpack_from(payload, 1)
    if size > _MAX_STATE or len(payload) < start + size:
        raise DecodeError(f"a stamp with a tracestate of {size} bytes")
    state = payload[start : start + size].decode("ascii", "replace")
    return TraceHeaders.parse(parent.decode("ascii", "replace"), state), payload[start + size :]
