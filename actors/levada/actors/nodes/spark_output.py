"""The output of a node under Spark: complete lines with the node's name.

All nodes of an executor, and Spark itself, write to one pipe. Python writes a printed text and its line end separately, so the lines of two
nodes would mix.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Final

__all__ = ["NamedLines", "named_output"]

LONGEST: Final = 64 << 10
"""The most characters of a line; a longer line is cut."""


class NamedLines(io.TextIOBase):
    """A text stream that writes each line in one call, after a name. Threads may share it.

    Args:
        name: the name.
        descriptor: the file descriptor to write to.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        self._prefix = f"{name}: "
        self._descriptor = descriptor
        self._begun = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor, for `faulthandler` and child processes."""
        return self._descriptor

    def write(self, text: str) -> int:
        """Write complete lines, and keep the rest."""
        with self._lock:
            whole, end, self._begun = (self._begun + text).rpartition("\n")
            if len(self._begun) > LONGEST:
                whole, end, self._begun = f"{whole}{end}{self._begun}", "\n", ""
            if end:
                self._put(whole)
        return len(text)

    def finish(self) -> None:
        """Write the incomplete line."""
        with self._lock:
            if self._begun:
                self._put(self._begun)
                self._begun = ""

    def _put(self, lines: str) -> None:
        text = "".join(f"{self._prefix}{line}\n" for line in lines.split("\n"))
        data = text.encode(errors="backslashreplace")
        with contextlib.suppress(BrokenPipeError):  # Spark's executor has ended
            while data:  # one call, unless the pipe is full
                data = data[os.write(self._descriptor, data) :]


@contextmanager
def named_output(name: str) -> Iterator[None]:
    """While the block lasts, write standard output and standard error as lines with this name."""
    # Spark writes both to the same file.
    out, err = NamedLines(name, 1), NamedLines(name, 2)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            out.finish()
            err.finish()
