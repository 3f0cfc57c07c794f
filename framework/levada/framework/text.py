"""Making untrusted text safe for logs, error texts and terminals, and values for JSON; texts of objects; telling one text from several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from traceback import walk_tb
from types import TracebackType
from typing import Any, Final

__all__ = ["asyncio_hint", "counted", "exc_info", "finite", "printable", "text_of", "texts"]

_INSTEAD: Final[Mapping[str, str]] = {
    "sleep": "trio.sleep",
    "create_task": "self.start_soon or a nursery of trio",
    "TaskGroup.__aenter__": "a nursery of trio",
    "wait_for": "trio.fail_after",
    "timeout": "trio.fail_after",
    "Timeout.__aenter__": "trio.fail_after",
    "to_thread": "trio.to_thread.run_sync",
    "Queue.get": "a channel",
    "Queue.put": "a channel",
    "Event.wait": "trio.Event",
    "Lock.acquire": "trio.Lock",
    "open_connection": "trio.open_tcp_stream",
    "create_subprocess_exec": "trio.run_process",
    "create_subprocess_shell": "trio.run_process",
}
"""What to call in place of asyncio's functions."""


def printable(text: str | bytes, limit: int = 512) -> str:
    r"""Return a text as one printable line, safe to write to a terminal. Never raises.

    Characters that `str.isprintable` refuses are escaped as in a Python literal: control characters (ESC and line ends among them),
    bidirectional overrides, line and paragraph separators, lone surrogates. So are bytes that are not UTF-8.

    Args:
        text: a peer's text, or its UTF-8.
        limit: the most characters to return; longer text ends in an ellipsis. It also bounds the work.

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


def error_text(error: object) -> str:
    """Return an error as longer texts name it. Of an error of levada that is the class and the line, without the other fields.

    Example:
        >>> error_text(KeyError("tea"))
        "KeyError('tea')"
        >>> from levada.framework.errors import MailboxFull
        >>> error_text(MailboxFull("no room", capacity=5))
        "MailboxFull('no room')"
    """
    if hasattr(error, "_line") and isinstance(error, Exception):  # a `LevadaError`, which this module cannot import
        return f"{type(error).__name__}({text_of(error)!r})"
    hint = asyncio_hint(error)
    return f"{text_of(error, repr)}: {hint}" if hint else text_of(error, repr)


def asyncio_hint(error: object) -> str:
    """Return what to do about an error that asyncio's functions cause under trio, or a group with one; empty for other errors.

    Example:
        >>> asyncio_hint(RuntimeError("no running event loop"))
        "levada runs on trio, not on asyncio: use trio's calls, or levada.framework.aio for a library of asyncio"
        >>> asyncio_hint(RuntimeError("no tea"))
        ''
    """
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(asyncio_hint, error.exceptions)), "")
    if type(error) not in (RuntimeError, AttributeError, TypeError):
        return ""
    assert isinstance(error, Exception)
    calls = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    ours = [PurePath(code.co_filename).parent.name == "asyncio" for code in calls]
    text = str(error)
    if not (
        text == "no running event loop"
        or (text.startswith("'NoneType' object has no attribute") and ours[-1:] == [True])  # the loop
        or text.startswith("trio.run received unrecognized yield message")
    ):
        return ""
    name = calls[ours.index(True)].co_qualname if True in ours else ""
    if (instead := _INSTEAD.get(name)) is None:
        return "levada runs on trio, not on asyncio: use trio's calls, or levada.framework.aio for a library of asyncio"
    return f"levada runs on trio: use {instead} in place of asyncio.{name.partition('.')[0]}"


def text_of(value: object, write: Callable[[object], str] = str) -> str:
    """Return the text of an object of the user's, whose ``__str__`` or ``__repr__`` may fail.

    Example:
        >>> text_of(KeyError("tea"), repr)
        "KeyError('tea')"
        >>> class Odd(Exception):
        ...     def __str__(self) -> str:
        ...         return self.missing
        >>> text_of(Odd())
        '<Odd without text: AttributeError>'
    """
    try:
        return write(value)
    except Exception as broken:  # noqa: BLE001 - an error must not hide the one that it describes
        return f"<{type(value).__name__} without text: {type(broken).__name__}>"


def exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return an exception as `logging` takes it. Given the exception itself, it would call its ``__bool__`` or ``__len__``."""
    return type(error), error, error.__traceback__


def finite(value: Any) -> Any:
    """Return a value with text in place of NaN and the infinities, which JSON does not have, also within lists and dicts.

    Example:
        >>> finite({"mean": float("nan"), "most": [1.5, float("inf")]})
        {'mean': 'nan', 'most': [1.5, 'inf']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def counted(number: int, thing: str) -> str:
    """Return a number of things in words.

    Example:
        >>> [counted(number, "dead letter") for number in (0, 1, 2000)]
        ['0 dead letters', '1 dead letter', '2000 dead letters']
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def texts(values: Iterable[str]) -> tuple[str, ...]:
    """Return several texts as a tuple, for a setting that has several.

    Raises:
        TypeError: it is one text, whose characters would be taken for texts, or not all values are text.
    """
    if isinstance(values, str):
        raise TypeError(f"expected several texts, as in ({values!r},), got {values!r}")
    found = tuple(values)
    if not all(isinstance(value, str) for value in found):
        raise TypeError(f"expected several texts, got {found!r}")
    return found
