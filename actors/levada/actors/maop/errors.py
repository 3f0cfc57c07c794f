"""What an operation or a connection can end with, and what a handler raises to end one.

The initiator catches `Refused` and `OperationFailed`; a handler raises `Refuse` (at the gate) and `OperationError` (while it works).
Any other exception of a handler is EXECUTION_ERROR for the initiator: a text without details, and an audit id under which the log has
the rest.
"""

from __future__ import annotations

import attrs

from levada.framework.errors import ActorStopped, ConnectionLost, LevadaError
from levada.transports.maop import ErrorCode, code_name

__all__ = [
    "Disapproved", "MaopError", "OperationError", "OperationFailed", "OperationLost", "OperationStopped", "OperationTimeout", "Refuse",
    "Refused",
]  # fmt: skip


@attrs.define(eq=False, slots=False, str=False)
class MaopError(LevadaError):
    """An operation did not succeed."""

    code: int | None = None
    """See `levada.transports.maop.ErrorCode`; from 1024 on the application's own."""

    @property
    def name(self) -> str:
        """Name of the code. Source: MA-77."""
        return code_name(ErrorCode.UNKNOWN_ERROR if self.code is None else self.code)

    def _line(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


@attrs.define(eq=False, slots=False, str=False)
class Refused(MaopError):
    """The peer did not let the operation begin; nothing was executed. Source: MA-51."""

    retry_after: float | None = None
    """Seconds until a repetition makes sense; ``None`` without a hint."""


@attrs.define(eq=False, slots=False, str=False)
class OperationFailed(MaopError):
    """The operation failed; unless `not_executed`, what the peer has done by then is its own affair."""

    by_peer: bool = False
    """Whether the peer said so; else this side found out by itself."""
    not_executed: bool = False
    """Whether it is certain that the peer did nothing. Source: MA-120."""


@attrs.define(eq=False, slots=False, str=False)
class OperationTimeout(OperationFailed, TimeoutError):
    """TIMEOUT, said by the peer or found here."""


@attrs.define(eq=False, slots=False, str=False)
class OperationLost(OperationFailed, ConnectionLost):
    """The connection ended under the operation. Source: section 21."""


@attrs.define(eq=False, slots=False, str=False)
class OperationStopped(OperationFailed, ActorStopped):
    """The actor of the operation was ended, and the operation cancelled at the peer."""


@attrs.define(eq=False, slots=False, str=False)
class Disapproved(MaopError, ConnectionLost):
    """The server did not let this client in. Source: MA-21 to MA-27."""

    retry_after: float | None = None
    """Seconds until another attempt makes sense; ``None`` without a hint."""


class OperationError(LevadaError):
    """Raised by a handler: the operation fails with this code and text.

    Args:
        code: see `levada.transports.maop.ErrorCode`, or from 1024 on an own one. Source: MA-77, MA-79.
        detail: reason for the initiator; what looks like a secret is taken out, and the text cut. Source: MA-78.
    """

    def __init__(self, code: int = ErrorCode.EXECUTION_ERROR, detail: str = "") -> None:
        super().__init__(detail)
        self.code = code
        """See the class."""


class Refuse(LevadaError):
    """Raised by ``before_execute``: the operation does not begin. Source: MA-44, MA-113.

    Args:
        code: see `levada.transports.maop.ErrorCode`, or from 1024 on an own one.
        retry_after: hint for the initiator, in seconds.
        detail: for the log; a refusal has no text on the wire.
    """

    def __init__(
        self, code: int = ErrorCode.CAPACITY_LIMIT, retry_after: float | None = None, detail: str = ""
    ) -> None:
        super().__init__(detail)
        self.code = code
        """See the class."""
        self.retry_after = retry_after
        """See the class."""
