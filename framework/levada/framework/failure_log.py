"""The log of failures that others may cause as often as they like: tracebacks that are limited, counted and safe to read.

A handler that raises at a peer's input would otherwise write a traceback for each message, and the text of its exception could quote
escape sequences or whole log lines of the peer.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from types import TracebackType
from typing import Final, TypeAlias

import attrs
import trio

from ._runtime.remains import drop_frames, without_frames
from .errors import loss_of
from .platform import PLATFORM
from .text import asyncio_hint, printable, text_of

__all__ = ["FailureLog", "note_asyncio"]

_LOGGED: Final = 10  # of one cause in an interval
_INTERVAL: Final = 60.0  # seconds
_CAUSES: Final = 1_000
_TEXT: Final = 2_000  # characters of an exception's text, which may quote a message
_FRAME: Final = re.compile(r'[ |]*  File "')

Cause: TypeAlias = tuple[object, ...]


@attrs.define
class _Seen:
    """How often a cause was seen."""

    until: float
    """The end of the interval."""
    logged: int = 0
    """Lines in the interval."""
    more: int = 0
    """Failures since then without a line."""


class FailureLog:
    """Logs failures with their tracebacks: in a minute the first ten of each cause, then how many more there were.

    Failures have the same cause if they were logged at the same place, and the same class of exception came along the same lines of code.
    The texts of exceptions are made printable, and their further lines are indented, so that none looks like a line of the log.

    A failure whose cause is elsewhere (`levada.framework.errors.LevadaError.loss`: an ask without an answer, a channel whose node was
    lost) is one line at the level ``WARNING``, without a traceback: the code that failed could not do better.

    Args:
        clock: returns seconds. Trio's clock is for the tasks of one run only; a log that threads use too needs another.
    """

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._key = PLATFORM.get().token_bytes(16)  # so that an id says nothing about the code
        self._seen: dict[Cause, _Seen] = {}  # the oldest first

    def log(self, logger: logging.Logger, error: BaseException, text: str, *arguments: object, **extra: object) -> None:
        """Log a failure, or count it. It goes no further: its traceback keeps the lines, but not the frames, which may hold channels.

        Args:
            logger: where it goes.
            error: the exception.
            text: see `logging.Logger.log`; so are the arguments.
            extra: fields of the record.
        """
        more = self._note(_cause(error, text))
        loss = loss_of(error)
        shown = "" if more is None or loss else _traceback(error)
        drop_frames(error)
        if more is None:
            return
        if loss:
            text += f": %s{more}"
            logger.warning(text, *arguments, _line(error), extra=extra, stacklevel=2)
        else:
            _write(logger, error, shown, text + more, arguments, extra)

    def log_whole(
        self, logger: logging.Logger, error: BaseException, text: str, *arguments: object, **extra: object
    ) -> None:
        """Log a failure, or count it, as `log` does. The caller drops its frames, see `levada.framework.embedding`."""
        more = self._note(_cause(error, text))
        if more is not None:
            _write(logger, error, _traceback(error), text + more, arguments, extra)

    def for_peer(self, error: BaseException) -> str:
        """Return what a peer hears of a handler's exception, whose text it may not see: the loss, or that the handler failed.

        Its end is the id of `mark`, in brackets.
        """
        return f"{loss_of(error) or 'the handler failed'} [{self.mark(error)}]"

    def mark(self, error: BaseException) -> str:
        """Give a failure an id that its traceback or line in the log ends with; return it.

        Failures that were raised at the same place have the same id, so at least one of them has a line in the log.
        """
        ends = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][-1:]
        failure_id = blake2b(repr((type(error), ends)).encode(), digest_size=4, key=self._key).hexdigest()
        _add_note(error, f"failure {failure_id}")
        return failure_id

    def _note(self, cause: Cause) -> str | None:
        """Count a failure; return how its text ends, or None if it gets no line."""
        now = self._clock()
        seen = self._seen.get(cause)
        if seen is None:
            if len(self._seen) >= _CAUSES:
                self._seen.pop(next(iter(self._seen)), None)  # None: another thread has done that
            seen = self._seen[cause] = _Seen(now + _INTERVAL)
        elif now >= seen.until:
            seen.until, seen.logged = now + _INTERVAL, 0
        if seen.logged >= _LOGGED:
            seen.more += 1
            return None
        seen.logged += 1
        more, seen.more = seen.more, 0
        return f" ({more:,} more of this cause since the last such line)" if more else ""


def _line(error: BaseException) -> str:
    """Return the class and the text of an error, or of the parts of a group, and its notes."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    texts = map(_line, parts) if parts else (f"{type(error).__name__}: {text_of(error)}",)
    return printable("; ".join([*texts, *getattr(error, "__notes__", ())]), _TEXT)


def _cause(error: BaseException, text: str) -> Cause:
    """Return what failures of one cause have in common. A recursion counts as one pass, so that a peer cannot make causes of its depth."""
    lines = dict.fromkeys((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return text, type(error), *lines


def _write(
    logger: logging.Logger,
    error: BaseException,
    shown: str,
    text: str,
    arguments: tuple[object, ...],
    extra: dict[str, object],
) -> None:
    if not logger.isEnabledFor(logging.ERROR):
        return
    file, line, function, _ = logger.findCaller(stacklevel=3)
    record = logger.makeRecord(
        logger.name, logging.ERROR, file, line, text, arguments, _frameless(error), function, extra
    )
    record.exc_text = shown  # which formatters take instead of their own
    logger.handle(record)


def note_asyncio(error: BaseException) -> None:
    """Add a note to an error that asyncio's functions cause under trio: what to call in place of them."""
    if hint := asyncio_hint(error):
        _add_note(error, hint)


def _add_note(error: BaseException, note: str) -> None:
    with suppress(Exception):  # an odd class, which takes no notes
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _frameless(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return an exception for a record, which handlers may keep. A frame that is cleared later still has its callers' messages."""
    return type(error), error, without_frames(error.__traceback__)


def _traceback(error: BaseException) -> str:
    """Write a traceback in which only code begins a line."""
    note_asyncio(error)
    shown = []
    for part in traceback.format_exception(error):
        if _FRAME.match(part) or part.startswith("\n"):  # between two exceptions
            shown.append(part)
        else:
            lines = part.rstrip("\n")[:_TEXT].split("\n")
            shown.append("\n    ".join(printable(line, _TEXT) for line in lines) + "\n")
    return "".join(shown).rstrip("\n")
