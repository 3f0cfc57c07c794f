"""What a core keeps of a stream and its payload in fragments; the source of stream ids; leases (reference, sections 7 and 10)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Final

import attrs

from levada.transports.rsocket.codes import StreamIdsExhausted
from levada.transports.rsocket.events import Interaction
from levada.transports.rsocket.frames import MAX_U31, Payload
from levada.transports.rsocket.state import StreamState

__all__ = [
    "UNBOUNDED", "Allowance", "Gathering", "LiveStream", "PendingRequest", "StreamIds", "add_credit", "live_ids", "split",
]  # fmt: skip

# RS-75: credit of 2**31-1 and more is never used up. Counting down from here takes some 10,000 years at 10,000,000 payloads a second,
# so an item needs no test for it.
UNBOUNDED: Final = 2**62


def add_credit(credit: int, n: int) -> int:
    """Return the credit after `n` more (RS-72)."""
    total = credit + n
    return total if total < MAX_U31 else UNBOUNDED


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


class LiveStream:
    """One live stream.

    `credit` and `demand` are 0 while their direction is closed, so one comparison tells whether a payload may go or come.
    """

    __slots__ = ("credit", "demand", "gathering", "kind", "requester", "state")

    def __init__(self, kind: Interaction, requester: bool, state: StreamState, credit: int, demand: int) -> None:
        self.kind = kind
        self.requester = requester
        """This side opened it."""
        self.state = state
        self.credit = credit
        """Payloads that this side may send; 1 for the response of a request-response, which needs no credit."""
        self.demand = demand
        """Payloads that the peer may send; 0 for the response of a request-response, which needs no credit."""
        self.gathering: Gathering | None = None

    @property
    def heard_of(self) -> bool:
        """Whether the application has seen the stream. It has not while the request itself is incomplete (RS-84)."""
        return self.gathering is None or not self.gathering.is_request


@attrs.define
class PendingRequest:
    """A request that waits for a lease and has not been sent."""

    kind: Interaction
    payload: Payload
    n: int
    complete: bool


class StreamIds:
    """Ids for the streams that this side opens: odd ones for the client, even ones for the server (RS-18).

    Args:
        first: 1 or 2.
        reuse: start again at `first` after the highest id, and skip ids in use (RS-20).
        start: the next id, if it is not `first`.
    """

    __slots__ = ("_first", "_next", "_reuse", "_wrapped")

    def __init__(self, first: int, *, reuse: bool, start: int | None = None) -> None:
        self._first = first
        self._reuse = reuse
        self._next = first if start is None else start
        self._wrapped = False

    def take(self, *in_use: Container[int]) -> int:
        """Return the next id that is in none of the given collections.

        Raises:
            StreamIdsExhausted: every id has been used or, with `reuse`, is in use.
        """
        stream_id = self._next
        if stream_id > MAX_U31 and self._reuse:
            self._wrapped = True
            stream_id = self._first
        if self._wrapped:
            start = stream_id
            while any(stream_id in ids for ids in in_use):
                stream_id = stream_id + 2 if stream_id + 2 <= MAX_U31 else self._first
                if stream_id == start:
                    raise StreamIdsExhausted("every stream id is in use; open another connection", rule="RS-20")
        elif stream_id > MAX_U31:
            text = "every stream id was used; open another connection, or set reuse_stream_ids"
            raise StreamIdsExhausted(text, rule="RS-20")
        self._next = stream_id + 2
        return stream_id


def live_ids(streams: Mapping[int, LiveStream], waiting: Mapping[int, PendingRequest]) -> set[int]:
    """Return the ids of the streams that the application has seen. Fire-and-forget requests are not streams, even while they wait."""
    ids = {stream_id for stream_id, stream in streams.items() if stream.heard_of}
    ids.update(stream_id for stream_id, request in waiting.items() if request.kind is not Interaction.FIRE_AND_FORGET)
    return ids


class Allowance:
    """What the last LEASE allows; nothing before the first one (RS-130, RS-131).

    Args:
        lease_grace: seconds for which a lease still counts after its time is over or another lease has replaced it. The side that granted it
            needs this, because its clock started earlier, and requests cross the new lease (RS-134).
    """

    __slots__ = ("_crossing", "_crossing_until", "_lease_grace", "_left", "_until")

    def __init__(self, lease_grace: float = 0.0) -> None:
        self._lease_grace = lease_grace
        self._left = self._crossing = 0
        self._until = self._crossing_until = 0.0

    def replace(self, ttl: float, n: int, now: float) -> None:
        """Replace the earlier lease (RS-130). A `ttl` or an `n` of 0 stops all requests (RS-131)."""
        crossing = self._crossing if now < self._crossing_until else 0
        self._crossing = max(crossing, self._left if now < self._until else 0)
        self._crossing_until = now + self._lease_grace
        self._left = n if ttl > 0 else 0
        self._until = now + ttl + self._lease_grace

    def resume(self, now: float) -> None:
        """Count what is left for the requests that are sent again on a new carrier; for others it needs a new lease (RS-103)."""
        self._until = now + self._lease_grace

    def take(self, now: float) -> bool:
        """Use up one request. Return false if none is left or the lease has expired."""
        if self._crossing and now < self._crossing_until:
            self._crossing -= 1
            return True
        if self._left > 0 and now < self._until:
            self._left -= 1
            return True
        return False
