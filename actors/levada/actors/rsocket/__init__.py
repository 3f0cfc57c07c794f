"""RSocket: serve and call, with an actor for each stream and credit from end to end.

Example:
    >>> import trio
    >>> from levada.framework import ActorSystem
    >>> from levada.actors.rsocket import connect, serve
    >>> async def echo(request):
    ...     return request.data.upper()
    >>> async def main() -> None:
    ...     async with ActorSystem() as system:
    ...         async with serve(system, "rsocket+memory://desk", echo) as listener:
    ...             async with connect(system, listener.url) as peer:
    ...                 print((await peer.request_response(b"hello")).data)
    >>> trio.run(main)
    b'HELLO'
"""

from __future__ import annotations

from levada.transports.rsocket import CoreConfig, LeaseGrant, Payload
from levada.transports.rsocket.events import ConnectionEnded, EndReason, Interaction

from .config import ClientConfig, Lease, Reconnect, ServerConfig
from .encoding import COMPOSITE, MESSAGES, Metadata
from .entry import balanced, connect, serve
from .errors import (
    ApplicationError,
    NoEndpoint,
    RequestCanceled,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
    SetupRejected,
)
from .peers import ConnectedPeer, ConnectionStatistics, Peer
from .reconnecting import Policy, ReconnectingPeer
from .requests import Request
from .routing import Handler, route
from .server import Listener

__all__ = [
    "COMPOSITE", "MESSAGES", "ApplicationError", "ClientConfig", "ConnectedPeer", "ConnectionEnded", "ConnectionStatistics", "CoreConfig",
    "EndReason", "Handler", "Interaction", "Lease", "LeaseGrant", "Listener", "Metadata", "NoEndpoint", "Payload", "Peer", "Policy",
    "Reconnect", "ReconnectingPeer", "Request", "RequestCanceled", "RequestFailed", "RequestInvalid", "RequestRejected", "ServerConfig",
    "SetupRejected", "balanced", "connect", "route", "serve",
]  # fmt: skip
