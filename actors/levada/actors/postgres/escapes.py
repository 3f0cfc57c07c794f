"""Texts with U+0000, which PostgreSQL's texts cannot have and texts of a journal can: an id or an event may come from a peer.

The character U+0010, "data link escape", stands for U+0000 with a ``0`` behind it, and for itself if it is there twice. It is in next to no text, so
texts in a table are as they are. Equal texts stay equal, so the index of entities finds them.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ESCAPE", "escaped", "unescaped"]

ESCAPE: Final = b"\x10"
_NUL, _TWICE = ESCAPE + b"0", ESCAPE + ESCAPE


def escaped(text: bytes) -> bytes:
    r"""Return a text in UTF-8 as PostgreSQL can have it.

    Example:
        >>> escaped(b"a\0b")
        b'a\x100b'
    """
    if b"\0" in text or ESCAPE in text:
        return text.replace(ESCAPE, _TWICE).replace(b"\0", _NUL)
    return text


def unescaped(text: bytes) -> bytes:
    """Undo `escaped`."""
    if ESCAPE in text:
        return ESCAPE.join([part.replace(_NUL, b"\0") for part in text.split(_TWICE)])
    return text
