"""What a request, an item of a stream and an answer carry: data and, perhaps, metadata."""

from __future__ import annotations

import attrs

__all__ = ["Payload"]


# Not frozen: attrs sets the fields of a frozen class through object.__setattr__, 0.8 instead of 0.25 us, and every item has one.
@attrs.define
class Payload:
    """Data and metadata of one request, item or answer. Treat it as immutable."""

    data: bytes = b""
    """Empty data and no data are the same thing (RS-16)."""
    metadata: bytes | None = None
    """``None`` if there is none, which is not the same as empty metadata (RS-16)."""

    @property
    def size(self) -> int:
        """Bytes of both."""
        return len(self.data) + (len(self.metadata) if self.metadata is not None else 0)
