"""The record that a core keeps of a stream, and the source of stream ids."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

import attrs

from levada.transports.rsocket.codes import StreamIdsExhausted
from levada.transports.rsocket.config import MAX_U31
from levada.transports.rsocket.events import Interaction
from levada.transports.rsocket.fragments import Gathering
from levada.transports.rsocket.payload import Payload
from levada.transports.rsocket.state import StreamState

__all__ = ["UNBOUNDED", "LiveStream", "PendingRequest", "StreamIds", "add_credit", "live_ids"]

# RS-75: credit of 2**31-1 and more is never used up. Counting down from here takes some 10,000 years at 10,000,000 payloads a second,
# so an item needs no test for it.
UNBOUNDED: Final = 2**62


def add_credit(credit: int, n: int) -> int:
    """Return the credit after `n` more (RS-72)."""
    total = credit + n
    return total if total < MAX_U31 else UNBOUNDED


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
