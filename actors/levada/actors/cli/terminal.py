"""Text of peers, files and actors for standard output: harmless on a terminal, unchanged in a pipe or a file."""

from __future__ import annotations

import sys

from levada.transports.text import printable

__all__ = ["shown"]


def shown(text: str) -> str:
    """Return a text for standard output: with control characters escaped if that is a terminal, else unchanged. Line ends stay.

    An escape sequence could give a terminal another title, write over its lines, or make it type answers.
    """
    if not sys.stdout.isatty():
        return text
    return "\n".join(printable(line, 6 * len(line)) for line in text.split("\n"))
