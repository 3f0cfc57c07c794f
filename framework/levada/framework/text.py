"""Text from outside, made fit for a log line, an error text or a terminal."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str | bytes, limit: int = 512) -> str:
    r"""Return a text as one line that shows what it holds and does nothing to the terminal it is written to.

    Everything that `str.isprintable` refuses is written as in a Python literal: control characters (among them ESC and line ends),
    bidirectional overrides, separators of lines and paragraphs, lone surrogates. So is a byte that is not UTF-8. It never raises.

    Args:
        text: text of a peer, or its UTF-8.
        limit: characters that are returned at most; what is cut off leaves an ellipsis. It also bounds the work.

    Example:
        >>> print(printable("bye\nERROR all is lost"))
        bye\nERROR all is lost
        >>> print(printable(b"\x1b[2J caf\xc3\xa9 \xff"))
        \x1b[2J café \xff
        >>> printable("a" * 100, limit=8)
        'aaaaaaa…'
    """
    if isinstance(text, bytes | bytearray | memoryview):
        text = bytes(text[: 4 * limit + 4]).decode("utf-8", "backslashreplace")  # a character has at most four bytes
    shown = text[: limit + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
