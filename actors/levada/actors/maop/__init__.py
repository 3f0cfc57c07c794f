"""MAOP: messages and calls over QUIC, approved by the peer before the body travels, with priorities, quotas and graceful shutdown.

Example:
    >>> import trio
    >>> from levada.actors.authenticators import BearerTokens
    >>> from levada.actors.maop import Call, connect, serve
    >>> from levada.framework import ActorSystem, Identity
    >>> async def shout(call: Call) -> bytes:
    ...     return (await call.body()).upper()
    >>> async def main() -> None:
    ...     async with ActorSystem() as system:
    ...         clients = BearerTokens.of({b"secret": Identity("client-1")})
    ...         async with serve(system, "maop+memory://desk", {101: shout}, authenticate=clients) as listener:
    ...             async with connect(system, listener.url, token=b"secret") as peer:
    ...                 print(await peer.request(101, b"hello"))
    >>> trio.run(main)
    b'HELLO'
"""

from __future__ import annotations

from levada.transports.maop import (
    AuthenticationConfig,
    ControlConfig,
    ErrorCode,
    GateConfig,
    HandlerSpec,
    MaopConfig,
    TestPlan,
    TimesConfig,
)

from .bodies import MESSAGE_TYPE, Body
from .config import PeerConfig, RetryPolicy
from .entry import connect, connect_over, serve, serve_over
from .errors import (
    Disapproved,
    MaopError,
    OperationError,
    OperationFailed,
    OperationLost,
    OperationRefused,
    OperationStopped,
    OperationTimeout,
    Refuse,
)
from .handlers import Call, Handler, Handlers, OperationActor, Reply
from .metrics import Histogram, Metrics
from .peer import ConnectionStatistics, Done, Peer, ReplyStream
from .server import Listener

__all__ = [
    "MESSAGE_TYPE", "AuthenticationConfig", "Body", "Call", "ConnectionStatistics", "ControlConfig", "Disapproved", "Done", "ErrorCode",
    "GateConfig", "Handler", "HandlerSpec", "Handlers", "Histogram", "Listener", "MaopConfig", "MaopError", "Metrics", "OperationActor",
    "OperationError", "OperationFailed", "OperationLost", "OperationRefused", "OperationStopped", "OperationTimeout", "Peer", "PeerConfig",
    "Refuse", "Reply", "ReplyStream", "RetryPolicy", "TestPlan", "TimesConfig", "connect", "connect_over", "serve", "serve_over",
]  # fmt: skip
