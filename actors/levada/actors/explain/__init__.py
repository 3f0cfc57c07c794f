"""Captures of a wire protocol as text, one module for each protocol: what ``levada explain`` prints.

Each module has ``add_arguments(parser)`` for arguments of its own and ``explain(octets, args)``, which gives `Line` by `Line` what the octets
of one direction of a connection mean.  It never raises for what is in them: where nothing can be read any more, the last line says so.
"""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["Line", "shown"]

SHOWN = 60  # octets of a field that are shown


@attrs.frozen
class Line:
    """One frame."""

    offset: int
    """Octets before it."""
    length: int
    """Octets of it, with a length field in front of it."""
    text: str
    """What it says."""
    damaged: bool = False
    """Whether it is none, or not what the protocol allows."""


def shown(value: Any) -> str:
    """Show a value shortly: text in quotes, octets that are no text in hex, long ones cut."""
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
