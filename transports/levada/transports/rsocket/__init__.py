"""RSocket 1.0 and 0.2, without I/O. `levada.actors.rsocket` runs it."""

from __future__ import annotations

from levada.transports.rsocket.codes import ErrorCode, StreamIdsExhausted
from levada.transports.rsocket.config import CoreConfig, LeaseGrant
from levada.transports.rsocket.core import RSocketCore
from levada.transports.rsocket.frames import Payload
from levada.transports.rsocket.resumption import Sessions
from levada.transports.rsocket.state import ConnectionState

__all__ = [
    "ConnectionState", "CoreConfig", "ErrorCode", "LeaseGrant", "Payload", "RSocketCore", "Sessions", "StreamIdsExhausted",
]  # fmt: skip
