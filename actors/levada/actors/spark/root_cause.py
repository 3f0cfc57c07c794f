"""The root cause of a Spark failure, in one line.

Spark and py4j print it last, after the failed call, Java stack traces and the traceback of the worker.
"""

from __future__ import annotations

import re

from levada.framework.text import printable

__all__ = ["explained", "root_cause"]

MOST = 500
"""Most characters of the line."""
_PYTHON = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n|[~^ ]+\n)*(?P<line>\S.*)", re.MULTILINE)
_JAVA = re.compile(r"^\s*Caused by: (?P<line>.+)", re.MULTILINE)
_CALL = re.compile(r"\AAn error occurred while calling .*\n:? *(?P<line>\S.*)")
_CLASS = re.compile(r"^(?:[\w$]+\.)+(?=[\w$]+: )")


def root_cause(text: str) -> str:
    r"""Return the line that names the root cause.

    Example:
        >>> root_cause("An error occurred while calling o1626.start.\n: java.io.IOException: no room\n\tat java.base/java.io")
        'IOException: no room'
        >>> root_cause("[STREAM_FAILED] ended: Traceback (most recent call last):\n  File \"x\"\nValueError: not a row\n SQLSTATE: 38000")
        'ValueError: not a row'
    """
    # A traceback may begin in the middle of a line.
    lines = re.sub(r"(?<=.)Traceback \(most", "\nTraceback (most", text)
    python = [found["line"] for found in _PYTHON.finditer(lines)]
    java = [found["line"] for found in _JAVA.finditer(text) if "Traceback (most recent call last)" not in found["line"]]
    call = _CALL.search(text)
    first = call["line"] if call is not None else text.strip().partition("\n")[0]
    [*_, line] = python or java or [first]
    return printable(_CLASS.sub("", line.strip()), MOST)


def explained(text: str) -> str:
    """Return the text with its root cause as the first line, unless it begins with it."""
    cause = root_cause(text)
    return text if text.startswith(cause) else f"{cause}\n{text}"
