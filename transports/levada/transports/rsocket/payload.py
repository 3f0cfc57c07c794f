"""The data and metadata of a request, a stream item or a response."""

from __future__ import annotations

import attrs

__all__ = ["Payload", "not_bytes"]


# Not frozen: attrs sets the fields of a frozen class through object.__setattr__, 0.8 instead of 0.25 us, and every item has one.
@attrs.define
class Payload:
    """Data and metadata of one request, item or response. Treat it as immutable."""

    data: bytes = b""
    """Empty data and no data are the same thing (RS-16)."""
    metadata: bytes | None = None
    """``None`` if there is none, which is not the same as empty metadata (RS-16)."""

    @property
    def size(self) -> int:
        """Bytes of data and metadata together."""
        return len(self.data) + (len(self.metadata) if self.metadata is not None else 0)


def not_bytes(payload: Payload) -> TypeError:
    """Return the error of a payload with other types.

    Cores raise it at the call: frames are joined, and requests that wait for a lease are sent, when the caller is no longer there to blame.
    """
    kinds = f"{type(payload.data).__name__} and {type(payload.metadata).__name__}"
    return TypeError(f"data and metadata are {kinds}, wanted bytes, and bytes or None")
