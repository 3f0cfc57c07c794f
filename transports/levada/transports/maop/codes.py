"""Codes on the wire, and sanitised text for it."""

from __future__ import annotations

import enum
import re
import unicodedata
from typing import Final

from levada.framework.errors import LocalProtocolError

__all__ = ["ErrorCode", "OperationFault", "check_code", "close_code", "code_name", "sanitise"]


class ErrorCode(enum.IntEnum):
    """Why an operation or a connection failed. 0 to 1023 belong to the protocol, from 1024 on they are private. Source: section 12, MA-77."""

    INVALID_FORMAT = 0
    """Malformed operation, inconsistent fields, surplus bytes."""
    UNAUTHORIZED = 1
    """Authentication or policy; Block or Block End without Proceed."""
    CONTENT_TOO_LARGE = 2
    """Body, metadata or token above a limit."""
    INVALID_HEADER = 3
    """Semantically wrong header."""
    PAYLOAD_LENGTH_MISMATCH = 4
    """Blocks or Block End do not match the announced length."""
    TIMEOUT = 5
    """Response not begun in time; transfer stalled."""
    DUPLICATE_OPERATION = 6
    """Repeated Proceed or Refuse; reuse inside a replay window."""
    ORDER_VIOLATION = 7
    """Stream ended before Block End; Block End before any Block."""
    ID_MISMATCH = 8
    """The response id is not available."""
    PARSE = 9
    """Undecodable text."""
    ILLEGAL_STREAM = 10
    """Operation on the wrong stream; wrong first operation."""
    CANCELLED = 11
    """Aborted by the application or by shutdown."""
    PROTOCOL_VIOLATION = 12
    """High-level rule broken; direction; major version."""
    UNSUPPORTED_TEST_TYPE = 13
    """Test type or mode unknown."""
    CAPACITY_LIMIT = 14
    """Resources, quota, rate, draining."""
    POLICY_UNDEFINED_LENGTH = 15
    """Undefined length is not allowed here."""
    INCOMPATIBLE_MESSAGE = 16
    """msg_id unknown or of the other kind."""
    EXECUTION_ERROR = 17
    """The handler failed."""
    RESPONSE_MISMATCH = 18
    """The Response is not of the requested kind."""
    RESPONSE_CONSUME = 19
    """The requester failed to process the Response."""
    UNKNOWN_ERROR = 49
    """Unexplained."""


MAX_REASON: Final = 512
"""Longest reason sent, in bytes. Source: MA-78."""

# Text that looks like a credential is never sent. First the names, then the schemes of the Authorization header.
_SECRETS: Final = re.compile(
    r"(?i)\b(authorization|password|passwd|secret|token|api[_-]?key|bearer|basic)\b(\s*[:=]\s*|\s+)(?:(?:bearer|basic)\s+)?[^\s,;]+"
)


class OperationFault(Exception):
    """A peer's mistake in an operation; it never leaves the core."""

    def __init__(self, code: int, reason: str, rule: str) -> None:
        super().__init__(code, reason, rule)
        self.code = code
        self.reason = reason
        self.rule = rule


def check_code(code: int) -> int:
    """Check a code that the caller wants to send. Source: MA-77.

    Raises:
        LocalProtocolError: it is reserved.
    """
    if not 0 <= code < 65_536 or (19 < code < 1024 and code != ErrorCode.UNKNOWN_ERROR):
        raise LocalProtocolError(f"code {code} is reserved; use one of ErrorCode, or 1024 to 65535", rule="MA-77")
    return code


def code_name(code: int) -> str:
    """Return the name of a code; ``UNKNOWN_ERROR(n)`` if it has none. Source: MA-77.

    Example:
        >>> code_name(14), code_name(2000)
        ('CAPACITY_LIMIT', 'UNKNOWN_ERROR(2000)')
    """
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"UNKNOWN_ERROR({code})"


def close_code(code: int) -> int:
    """Return QUIC's application error code for an error; 0 remains 0, an orderly end. Source: MA-7."""
    return 0x100 + code


def sanitise(text: str, audit_id: str, *, secrets: tuple[str, ...] = ()) -> bytes:
    """Make a reason fit for the wire: one line of NFC text without secrets or stack traces, at most 512 bytes of UTF-8.

    Args:
        text: the cause, for people.
        audit_id: appended if the text is cut, so that the whole text can be found in the log.
        secrets: texts to remove, such as the token of this connection.

    Source: MA-5, MA-24, MA-78.

    Example:
        >>> sanitise("no access: token=abc123", "7f")
        b'no access: token=***'
    """
    text = text.partition("Traceback (most recent call last)")[0]
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    if not (text.isascii() and text.isprintable()):
        text = unicodedata.normalize("NFC", "".join(c if c.isprintable() else " " for c in text)).strip()
    text = _SECRETS.sub(lambda m: f"{m[1]}{m[2]}***", text)
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_REASON:
        return data
    tail = f" [{audit_id}]".encode()
    return data[: MAX_REASON - len(tail)].decode("utf-8", "ignore").encode() + tail
