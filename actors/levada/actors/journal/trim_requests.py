"""How another process has an open log trimmed: it asks through the folder, as a `backup` does.

trim.lock     locked by the process that asks
trim.request  the question; the writer looks for it every second, and deletes it when it has answered
trim.answer   the answer, or the error
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from threading import Event

import attrs

from levada.framework.files import Files
from levada.framework.platform import Platform

from .blocks import write_all
from .errors import JournalError, JournalLocked
from .pinning import locked

__all__ = ["TrimRequest", "TrimRequests", "ask_writer"]

_LOCK, _REQUEST, _ANSWER = "trim.lock", "trim.request", "trim.answer"
_POLL = 0.02
"""Seconds between looks for the answer."""
_POLLS = 50
"""Looks for the answer between looks whether a process still has the journal open."""


@attrs.frozen
class TrimRequest:
    """A question of another process."""

    name: str
    """Tells it from other questions."""
    older: float
    """As in `TrimRows`."""
    remember: int


class TrimRequests:
    """The side of the writer. Its methods belong to the thread that writes."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._known = ""

    def look(self) -> TrimRequest | None:
        """Return a new question, if there is one. It stays until it is answered, so that it outlives the writer."""
        if not self._files.exists(self._directory / _REQUEST):
            return None
        try:
            found = TrimRequest(**json.loads(self._files.read(self._directory / _REQUEST)))
        except (OSError, ValueError, TypeError):
            return None  # the asker has gone, or it was changed by hand
        if found.name == self._known:
            return None
        self._known = found.name
        return found

    def answer(self, request: TrimRequest, rows: int, error: str) -> None:
        """Answer a question: with the number of rows that went, or with why they did not."""
        text = json.dumps({"name": request.name, "rows": rows, "error": error})
        _put(self._files, self._directory / _ANSWER, text)
        self._files.discard(self._directory / _REQUEST)


def ask_writer(platform: Platform, directory: Path, older: float, remember: int, timeout: float) -> int | None:
    """Have the process that has a journal open trim it; return the number of rows that went, or None if no process has it open. Blocks.

    Args:
        platform: the surroundings.
        directory: of the journal.
        older: as in `TrimRows`.
        remember: as in `TrimRows`.
        timeout: seconds to wait for the answer.

    Raises:
        JournalLocked: another process asks too, or the writer does not answer.
        JournalError: the writer refuses.
        OSError: this user may not write into the folder.
    """
    files, name = platform.files, platform.token_bytes(8).hex()
    deadline, tick, polls = platform.monotonic() + timeout, Event(), 0
    with locked(files, directory / _LOCK, "another process has this journal trimmed"):
        try:
            while True:
                if polls % _POLLS == 0:  # seldom: a writer that starts in this moment finds the folder locked
                    with suppress(JournalLocked), locked(files, directory / "lock", shared=True):
                        return None
                if not polls:
                    _put(files, directory / _REQUEST, json.dumps(attrs.asdict(TrimRequest(name, older, remember))))
                polls += 1
                found = _answer_in(files, directory, name)
                if found is not None:
                    if found["error"]:
                        raise JournalError(
                            f"the process that has it open refuses: {found['error']}", path=str(directory)
                        )
                    return int(found["rows"])
                if platform.monotonic() >= deadline:
                    raise JournalLocked(
                        f"a process has this journal open and did not answer for {timeout:g} s: it trims still, it stands still, or its levada is "
                        "too old. Wait longer, or stop it first",
                        path=str(directory),
                    )
                tick.wait(_POLL)
        finally:
            files.discard(directory / _REQUEST)
            files.discard(directory / _ANSWER)


def _answer_in(files: Files, directory: Path, name: str) -> dict[str, str | int] | None:
    try:
        found: dict[str, str | int] = json.loads(files.read(directory / _ANSWER))
    except FileNotFoundError:
        return None
    return found if found["name"] == name else None


def _put(files: Files, path: Path, text: str) -> None:
    """Write a file as a whole, which the other side may read."""
    beside = path.with_name(path.name + "-new")
    descriptor = files.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(files, descriptor, [text.encode()], 0)
    finally:
        files.close(descriptor)
    files.rename(beside, path)
