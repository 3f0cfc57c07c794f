"""ReactiveSocket, the draft that preceded RSocket, without I/O. `levada.actors.rsocket` runs it.

Both dialects share the events, the configuration and `Payload` of `levada.transports.rsocket`. ReactiveSocket differs from RSocket:

* the client's stream ids are even (RX-14);
* lengths have 32 bits and count themselves (RX-3, RX-10);
* there are subscriptions (RX-53), the C flag may carry a payload (RX-58), and a responder's completion ends a channel (RX-56);
* a frame with an impossible metadata length is ignored; it does not close the connection (RX-12);
* nothing can be resumed (RX-60), and nothing announces a drain.
"""

from __future__ import annotations

from levada.transports.reactivesocket.config import ReactiveSocketConfig
from levada.transports.reactivesocket.core import ReactiveSocketCore
from levada.transports.reactivesocket.frames import ErrorCode

__all__ = ["ErrorCode", "ReactiveSocketConfig", "ReactiveSocketCore"]
