"""ReactiveSocket, the draft that RSocket grew out of: the same actors as `levada.actors.rsocket`, another core.

Its URLs begin with ``reactivesocket`` (``reactivesocket+tcp://…``). It has no resumption, and one interaction more:
`Peer.request_subscription`.
"""

from __future__ import annotations

from levada.actors.rsocket import (
    ApplicationError,
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    Handler,
    LeaseGrant,
    Listener,
    NoEndpoint,
    Payload,
    Peer,
    Reconnect,
    ReconnectingPeer,
    Request,
    RequestCanceled,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
    ServerConfig,
    SetupRejected,
    balanced,
    connect,
    route,
    serve,
)

__all__ = [
    "ApplicationError", "ClientConfig", "ConnectedPeer", "CoreConfig", "Handler", "LeaseGrant", "Listener", "NoEndpoint", "Payload",
    "Peer", "Reconnect", "ReconnectingPeer", "Request", "RequestCanceled", "RequestFailed", "RequestInvalid", "RequestRejected",
    "ServerConfig", "SetupRejected", "balanced", "connect", "route", "serve",
]  # fmt: skip
