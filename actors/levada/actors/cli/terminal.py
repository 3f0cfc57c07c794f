"""What a terminal gets and a pipe or a file does not: escapes in the text of peers, files and actors, and a line of progress."""

from __future__ import annotations

import shutil
import sys

from levada.framework.text import printable

__all__ = ["show_progress", "shown"]


def show_progress(text: str) -> None:
    """Replace the line of progress if standard error is a terminal; elsewhere do nothing. An empty text removes it."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)


def shown(text: str) -> str:
    """Return a text for standard output: with control characters escaped if that is a terminal, else unchanged. Line ends stay.

    An escape sequence could give a terminal another title, write over its lines, or make it type answers.
    """
    if not sys.stdout.isatty():
        return text
    return "\n".join(printable(line, 6 * len(line)) for line in text.split("\n"))
