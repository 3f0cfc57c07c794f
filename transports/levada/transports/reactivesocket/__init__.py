"""ReactiveSocket, the draft that came before RSocket: the protocol without I/O. What runs it is in `levada.actors.rsocket`.

What both dialects share is in `levada.transports.rsocket`: the events, the configuration, `Payload`. Different in this one: the
client's stream ids are even (RX-14); lengths have 32 bits and count themselves (RX-3, RX-10); there are subscriptions (RX-53); the C flag
may carry a payload (RX-58); a responder's completion ends a channel (RX-56); a metadata length that cannot be makes a frame ignored, not
the connection closed (RX-12); nothing can be resumed (RX-60), and nothing announces a drain.
"""

from __future__ import annotations

from levada.transports.reactivesocket.codes import ErrorCode
from levada.transports.reactivesocket.config import ReactiveSocketConfig
from levada.transports.reactivesocket.core import ReactiveSocketCore

__all__ = ["ErrorCode", "ReactiveSocketConfig", "ReactiveSocketCore"]
