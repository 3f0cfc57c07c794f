"""Errors of operations and connections, and the exceptions that a handler raises to end an operation.

The initiator catches `OperationRefused` and `OperationFailed`; a handler raises `Refuse` (at the gate) and `OperationError` (while it works).
Any other exception of a handler reaches the initiator as EXECUTION_ERROR: a text without details, and an audit id that finds the
details in the log.
"""

from __future__ import annotations

import attrs

from levada.framework.errors import ActorStopped, ConnectionLost, LevadaError
from levada.transports.maop import ErrorCode, code_name

__all__ = [
    "Disapproved",
    "MaopError",
    "OperationError",
    "OperationFailed",
    "OperationLost",
    "OperationRefused",
    "OperationStopped",
    "OperationTimeout",
    "Refuse",
]  # fmt: skip


@attrs.define(eq=False, slots=False, str=False)
class MaopError(LevadaError):
    """An operation did not succeed."""

    loss = "an operation did not succeed"

    code: int | None = None
    """A `levada.transports.maop.ErrorCode`; codes from 1024 on belong to the application."""

    @property
    def name(self) -> str:
        """The code's name. Source: MA-77."""
        return code_name(ErrorCode.UNKNOWN_ERROR if self.code is None else self.code)

    def _line(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


@attrs.define(eq=False, slots=False, str=False)
class OperationRefused(MaopError):
    """The peer refused the operation before it began; nothing was executed. Source: MA-51."""

    retry_after: float | None = None
    """Seconds to wait before a repetition; ``None`` without a hint."""


@attrs.define(eq=False, slots=False, str=False)
class OperationFailed(MaopError):
    """The operation failed. Unless `not_executed` is true, the peer may have executed part of it."""

    by_peer: bool = False
    """True if the peer reported the failure, false if this side detected it."""
    not_executed: bool = False
    """Whether the peer certainly executed nothing. Source: MA-120."""


@attrs.define(eq=False, slots=False, str=False)
class OperationTimeout(OperationFailed, TimeoutError):
    """TIMEOUT, reported by the peer or detected here."""


@attrs.define(eq=False, slots=False, str=False)
class OperationLost(OperationFailed, ConnectionLost):
    """The connection ended while the operation ran. Source: section 21."""

    loss = ConnectionLost.loss


@attrs.define(eq=False, slots=False, str=False)
class OperationStopped(OperationFailed, ActorStopped):
    """The operation's actor was stopped, and the operation was cancelled at the peer."""

    loss = ActorStopped.loss


@attrs.define(eq=False, slots=False, str=False)
class Disapproved(MaopError, ConnectionLost):
    """The server turned this client away. Source: MA-21 to MA-27."""

    loss = ConnectionLost.loss

    retry_after: float | None = None
    """Seconds to wait before another attempt; ``None`` without a hint."""


class OperationError(LevadaError):
    """Raised by a handler: the operation fails with this code and text.

    Args:
        code: a `levada.transports.maop.ErrorCode`, or the application's own code from 1024 on. Source: MA-77, MA-79.
        detail: reason for the initiator; text that looks like a secret is removed, and the rest is cut to length. Source: MA-78.
    """

    def __init__(self, code: int = ErrorCode.EXECUTION_ERROR, detail: str = "") -> None:
        super().__init__(detail)
        self.code = code
        """The error code on the wire."""


class Refuse(LevadaError):
    """Raised by ``before_execute``: the operation does not begin. Source: MA-44, MA-113.

    Args:
        code: a `levada.transports.maop.ErrorCode`, or the application's own code from 1024 on.
        retry_after: hint for the initiator, in seconds.
        detail: for the log; a refusal has no text on the wire.
    """

    def __init__(
        self, code: int = ErrorCode.CAPACITY_LIMIT, retry_after: float | None = None, detail: str = ""
    ) -> None:
        super().__init__(detail)
        self.code = code
        """The error code on the wire."""
        self.retry_after = retry_after
        """Hint for the initiator, in seconds."""
