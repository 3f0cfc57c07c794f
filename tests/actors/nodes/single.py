"""An actor that writes down what it handles, and questions for it, so that a test sees whether it ran twice at once, or handled one twice.

Imports nothing of the tests: nodes under Spark get this file alone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import trio

from levada.framework import Actor, ActorSystem, Asks, Reason, handles, message
from levada.framework.errors import ActorError


@message("tests.nodes.Where")
class Where(Asks[tuple[int, str]]):
    """Ask for the process and the name of the system."""


@message("tests.nodes.Handle")
class Handle(Asks[int]):
    """Handle a numbered message."""

    number: int


class Single(Actor[Handle | Where]):
    """Runs at most once at a time, and writes down what it handles.

    Args:
        folder: has the file that a running one locks, and the file with what was handled.
    """

    folder: str

    def started(self) -> None:
        """Lock the file; the system unlocks it when this process has ended."""
        self.lock = open(f"{self.folder}/lock", "w")  # noqa: SIM115 - until the actor ends
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.write("two")

    def stopping(self, reason: Reason) -> None:
        """Unlock the file."""
        self.lock.close()

    def write(self, text: object) -> None:
        """Append a line."""
        with open(f"{self.folder}/handled", "a") as file:
            file.write(f"{text}\n")

    @handles
    def handle(self, m: Handle) -> int:
        """Write it down."""
        self.write(m.number)
        return m.number

    @handles
    def where(self, m: Where) -> tuple[int, str]:
        """Tell."""
        return os.getpid(), self.system.name


class Load:
    """Sends numbered questions to the `Single` that is registered as ``single``, all the time."""

    def __init__(self, system: ActorSystem, *, pause: float) -> None:
        self.system = system
        self.pause = pause
        self.answered: set[int] = set()
        self.sent = 0

    async def run(self) -> None:
        """Send."""
        while True:
            single = self.system.registry.get("single")
            number, self.sent = self.sent, self.sent + 1
            if single is not None:
                try:
                    assert await single.ask(Handle(number), timeout=50) == number
                    self.answered.add(number)
                except ActorError:
                    pass  # it may have been handled, once
            await trio.sleep(self.pause)

    def check(self, folder: Path) -> None:
        """Check that there were never two, that nothing was handled twice, and that what was answered was handled."""
        handled = (folder / "handled").read_text().split()
        assert "two" not in handled
        assert len(handled) == len(set(handled))
        assert self.answered <= {int(number) for number in handled}
