"""Turn captures of a wire protocol into text, for ``levada explain``; there is one module for each protocol.

Each module has ``add_arguments(parser)`` for its own arguments and ``explain(data, args)``, which yields a `Line` for each frame in one
direction of a connection.  It never raises for bad bytes: where it cannot continue, the last line says so.
"""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["Line", "shown"]

SHOWN = 60  # bytes, or characters, of a field that are shown


@attrs.frozen
class Line:
    """One frame."""

    offset: int
    """Offset of its first byte in the capture."""
    length: int
    """Its length in bytes, including a length field in front of it."""
    text: str
    """Its meaning."""
    damaged: bool = False
    """Whether it is not a frame, or not allowed by the protocol."""


def shown(value: Any) -> str:
    """Show a value briefly: text in quotes, other bytes in hex, long values cut."""
    if not isinstance(value, bytes | bytearray):
        return str(value) if not isinstance(value, str) else _quoted(value)
    try:
        return _quoted(bytes(value).decode())
    except UnicodeDecodeError:
        head = value[:SHOWN].hex()
        return f"0x{head}{_more(len(value))}"


def _quoted(text: str) -> str:
    return f"{text[:SHOWN]!r}{_more(len(text))}"


def _more(length: int) -> str:
    return f"… ({length:,})" if length > SHOWN else ""
