"""Payloads larger than a frame: the sender fragments them, the receiver reassembles them (reference, section 7)."""

from __future__ import annotations

from collections.abc import Iterator

from levada.transports.rsocket.payload import Payload

__all__ = ["Gathering", "split"]


def split(payload: Payload, first_room: int, room: int) -> Iterator[tuple[Payload, bool]]:
    """Yield the fragments of a payload in order, each with whether another one follows.

    Metadata goes before data, and the fragment with the last metadata carries the first data (RS-79).

    Args:
        payload: the payload to fragment.
        first_room: bytes that the first frame has for the metadata length, metadata and data.
        room: the same for the later frames.
    """
    data, metadata = payload.data, payload.metadata
    data_at = 0
    metadata_at = -1 if metadata is None else 0  # -1: none, or all of it is gone
    left = first_room
    while True:
        part = None
        if metadata is not None and metadata_at >= 0:
            left -= 3
            part = metadata[metadata_at : metadata_at + left]
            left -= len(part)
            metadata_at += len(part)
            if metadata_at == len(metadata):
                metadata_at = -1
        chunk = data[data_at : data_at + left] if metadata_at < 0 else b""
        data_at += len(chunk)
        follows = metadata_at >= 0 or data_at < len(data)
        yield Payload(chunk, part), follows
        if not follows:
            return
        left = room


class Gathering:
    """The fragments of one payload received so far. Empty fragments take no memory, however many there are (RS-85)."""

    __slots__ = ("_data", "_metadata", "complete", "is_request")

    def __init__(self, *, is_request: bool, complete: bool) -> None:
        self._data = bytearray()
        self._metadata: bytearray | None = None
        self.is_request = is_request
        """The payload is a request, which the application sees only when it is whole (RS-84)."""
        self.complete = complete
        """REQUEST_CHANNEL came with C: the direction completes with this payload (RS-81)."""

    def __len__(self) -> int:
        return len(self._data) + (len(self._metadata) if self._metadata is not None else 0)

    def add(self, part: Payload) -> None:
        """Append a fragment."""
        self._data += part.data
        if part.metadata is not None:
            if self._metadata is None:
                self._metadata = bytearray()
            self._metadata += part.metadata  # RS-79: M on any fragment makes metadata present

    def payload(self) -> Payload:
        """Return the reassembled payload."""
        return Payload(bytes(self._data), None if self._metadata is None else bytes(self._metadata))
