"""Captures of a wire protocol as text, one module for each protocol: what ``levada explain`` prints.

Each module has ``add_arguments(parser)`` for arguments of its own and ``explain(octets, args)``, which explains the bytes of one
direction of a connection `Line` by `Line`.  It never raises for bad bytes: where it cannot read on, the last line says so.
"""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["Line", "shown"]

SHOWN = 60  # bytes of a field that are shown


@attrs.frozen
class Line:
    """One frame."""

    offset: int
    """Bytes before it."""
    length: int
    """Its length in bytes, with a length field in front of it."""
    text: str
    """Its meaning."""
    damaged: bool = False
    """Whether it is not a frame, or not allowed by the protocol."""


def shown(value: Any) -> str:
    """Show a value briefly: text in quotes, other bytes in hex, long ones cut."""
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
