"""The promises of `levada.actors.journal.Log`, `TailedLog`, `CopiedLog` and `TrimmedLog` as checks for any store.

A maker is an async context manager that makes a new log, with some columns and some number of partitions, and yields a `MadeLog`. The checks know
nothing else about the store, so the same suite runs on a folder, a keeper and a database.

Example::

    @pytest.mark.parametrize("check", log_checks(), ids=str)
    async def test_keeps_the_promise(check: LogCheck) -> None:
        await check(make)
"""

from __future__ import annotations

import attrs
import trio

from ._promises import CHECKS, Maker

__all__ = ["LogCheck", "check_log", "log_checks"]


@attrs.frozen
class LogCheck:
    """One promise. Call it with a maker; it raises `AssertionError` if the store breaks the promise."""

    name: str
    """The promise in words with underscores; ``str()`` returns it too, for the ids of parametrised tests."""
    timeout: float
    """Seconds that the check may take."""

    def __str__(self) -> str:
        return self.name

    async def __call__(self, make: Maker) -> None:
        """Make a log and check it.

        Raises:
            AssertionError: the promise is broken. If a task of the check noticed it, the error is in an exception group.
            JournalError: the store refuses what it must take.
            trio.TooSlowError: the check took longer than `timeout`.
        """
        with trio.fail_after(self.timeout):
            await CHECKS[self.name](make)


def log_checks(*, timeout: float = 60.0) -> list[LogCheck]:
    """Return every check.

    Args:
        timeout: seconds that each of them may take.
    """
    from . import _copy_checks, _fault_checks, _log_checks, _trim_checks  # noqa: F401 - they add their checks

    return [LogCheck(name, timeout) for name in CHECKS]


async def check_log(make: Maker, *, timeout: float = 60.0) -> None:
    """Run every check against a log of its own, one after the other.

    Args:
        make: makes the logs.
        timeout: seconds that each check may take.

    Raises:
        AssertionError: a promise is broken; a note names the check. If a task of the check noticed it, the error is in an exception group.
        JournalError: the store refuses what it must take; a note names the check.
        trio.TooSlowError: a check took too long; a note names the check.
    """
    for check in log_checks(timeout=timeout):
        try:
            await check(make)
        except Exception as error:
            error.add_note(f"log check: {check.name}")
            raise
