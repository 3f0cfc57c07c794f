"""The states of a connection and of a stream, and one table of transitions for each. A missing key is not a transition.

A connection has the states of RSocket without resumption (RX-60).  A stream has the states of RSocket with other transitions: here the end
of the responder's direction ends both directions (RX-56).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from levada.transports.rsocket.state import CONNECTION as RSOCKET_CONNECTION
from levada.transports.rsocket.state import ConnectionInput, ConnectionState, StreamInput, StreamState

__all__ = ["CONNECTION", "STREAM"]


def _stream_table() -> Mapping[tuple[StreamState, StreamInput], StreamState]:
    s, i = StreamState, StreamInput
    table = {
        # RX-56: C of a channel's requester does not end the stream.
        (s.BOTH, i.SEND_COMPLETE): s.RECEIVING,
        (s.BOTH, i.RECEIVE_COMPLETE): s.SENDING,
        (s.BOTH, i.SEND_STOP): s.SENDING,
    }
    for live in (s.BOTH, s.SENDING, s.RECEIVING):
        # RX-50, RX-52, RX-56: C of the responder ends a channel too, whether or not its requester has completed.
        # RX-57, RX-59: ERROR from either side and CANCEL from the requester as well.
        for ending in (i.RESPONDER_COMPLETE, i.SEND_ERROR, i.RECEIVE_ERROR, i.SEND_CANCEL, i.RECEIVE_CANCEL):
            table[live, ending] = s.ENDED
    return MappingProxyType(table)


STREAM: Final = _stream_table()


def _without_resumption() -> Mapping[tuple[ConnectionState, ConnectionInput], ConnectionState]:
    i, s = ConnectionInput, ConnectionState
    inputs = {i.RECEIVE_SETUP, i.ACCEPT, i.DRAIN, i.END}
    states = {s.AWAITING_SETUP, s.DECIDING, s.OPENING, s.OPEN, s.DRAINING}
    return MappingProxyType(
        {(state, by): to for (state, by), to in RSOCKET_CONNECTION.items() if state in states and by in inputs}
    )


CONNECTION: Final = _without_resumption()
