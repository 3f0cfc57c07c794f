"""How another process has an open log trimmed: it asks through the folder (`ask_writer`), as a `backup` does.

trim.lock     locked by the process that asks; or that trims itself, because no process has the log open
trim.request  the question; the writer looks for it every second, and deletes it when it has answered
trim.answer   the answer, or the error
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import attrs

from levada.framework.files import Files
from levada.framework.platform import Platform

from .asking import TRIM_LOCK, ask_writer, locked_in_turn, put, read_answer
from .errors import JournalError, refusals
from .questions import TrimRows

__all__ = ["TrimRequest", "TrimRequests", "ask_to_trim"]

_REQUEST, _ANSWER = "trim.request", "trim.answer"


@attrs.frozen
class TrimRequest:
    """A question of another process. It has fields of `TrimRows`; all snapshots count."""

    older: float
    remember: int
    archive: str = ""
    forget_archive: bool = False
    name: str = ""
    """Tells it from other questions."""

    def question(self, partition: int) -> TrimRows:
        """Return what a partition is asked."""
        return TrimRows(partition, self.older, self.remember, archive=self.archive, forget_archive=self.forget_archive)


class TrimRequests:
    """The side of the writer. Its methods belong to the thread that writes."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._known = ""
        self._found: TrimRequest | None = None

    def look(self) -> None:
        """Look for a new question, for `take`. It stays in the folder until it is answered, so that it outlives the writer."""
        if not self._files.exists(self._directory / _REQUEST):
            return
        try:
            found = TrimRequest(**json.loads(self._files.read(self._directory / _REQUEST)))
        except (OSError, ValueError, TypeError):
            return  # the asker has gone, or it was changed by hand
        if found.name != self._known:
            self._known, self._found = found.name, found

    def take(self) -> TrimRequest | None:
        """Return what `look` has found, once; then `answer` is due."""
        found, self._found = self._found, None
        return found

    def answer(self, request: TrimRequest, rows: int, error: str) -> None:
        """Answer a question: with the number of rows that went, or with why they did not.

        Raises:
            JournalFull, JournalUnwritable: the disk refuses.
        """
        text = json.dumps({"name": request.name, "rows": rows, "error": error})
        with refusals(self._directory):
            put(self._files, self._directory / _ANSWER, text.encode())
            self._files.discard(self._directory / _REQUEST)


def ask_to_trim(
    platform: Platform, directory: Path, wanted: TrimRequest, timeout: float, turn: ExitStack
) -> int | None:
    """Have the process that has a journal open trim it; return the number of rows that went, or None if no process has it open. Blocks.

    Args:
        platform: the surroundings.
        directory: of the journal.
        wanted: what it is asked.
        timeout: seconds to wait for other processes that ask too, and again for the answer.
        turn: no other process asks or trims until it is closed.

    Raises:
        JournalLocked: another process asks still, or the writer does not answer.
        JournalError: the writer refuses, or ended before it answered.
        JournalFull, JournalUnwritable: the disk is full or only reads, or this user may not write into the folder.
    """
    files, name = platform.files, platform.token_bytes(8).hex()
    asked = attrs.asdict(attrs.evolve(wanted, name=name))
    # A writer of an older levada takes a question without an archive.
    question = json.dumps({field: value for field, value in asked.items() if value not in ("", False)})

    def closed() -> None:
        if files.exists(directory / _REQUEST):
            raise JournalError(
                "the process that had it open has ended before it answered. What it had trimmed stays trimmed, and all other rows are there: run "
                "this again when it runs again, or is stopped for good, and it goes on from there",
                path=str(directory),
            )

    with refusals(directory):
        turn.enter_context(
            locked_in_turn(
                platform, directory / TRIM_LOCK, "another process trims this journal, or has it trimmed", timeout
            )
        )
        files.discard(directory / _REQUEST)  # of a process that was killed
        try:
            found = ask_writer(
                platform,
                directory / _REQUEST,
                question.encode(),
                lambda: read_answer(files, directory / _ANSWER, name=name),
                closed,
                timeout,
                "it trims still, it stands still",
            )
        finally:
            files.discard(directory / _REQUEST)
            files.discard(directory / _ANSWER)
    if found is not None and found["error"]:
        raise JournalError(f"the process that has it open refuses: {found['error']}", path=str(directory))
    return None if found is None else int(found["rows"])
