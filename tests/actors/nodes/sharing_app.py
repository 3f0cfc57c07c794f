"""The app of `test_sharing`: the test reaches the systems of its nodes, which run in its own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import trio

from levada.framework import Actor, ActorSystem, Asks, Joined, Left, handles, message
from levada.framework.events import DeadLetter

SYSTEMS: dict[str, ActorSystem] = {}
"""The systems of the nodes that are up, by name."""
SEEN: dict[str, list[Any]] = {}
"""What the app of a node saw when it began: the names of the members of ``early``, and whether there was the name ``early``."""
RUNNING: list[str] = []
"""The systems in which a `Single` runs."""
BEGUN: list[int] = []
"""The jobs that were begun."""
MOST: list[int] = []
"""How many ran, each time that one began."""


@message("tests.sharing.Who")
class Who(Asks[str]):
    """Ask for the name of the system."""


@message("tests.sharing.Text")
class Text:
    text: str


@message("tests.sharing.Leave")
class Leave:
    """Let the actor end by itself."""


class Worker(Actor[Any]):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.got: list[str] = []

    @handles
    def who(self, m: Who) -> str:
        return self.system.name

    @handles
    def text(self, m: Text) -> None:
        self.got.append(m.text)

    @handles
    def leave(self, m: Leave) -> None:
        self.stop()


@message("tests.sharing.Job")
class Job:
    number: int


class Toiler(Actor[Any]):
    """Joins the group ``toil``, and notes the jobs that it begins."""

    def started(self) -> None:
        self.system.groups.join("toil", self.ref)

    @handles
    async def job(self, m: Job) -> None:
        BEGUN.append(m.number)
        await trio.sleep(0.3)


class Single(Worker):
    """Counts how many of it run."""

    def started(self) -> None:
        RUNNING.append(self.system.name)
        MOST.append(len(RUNNING))

    def stopping(self, reason: Any) -> None:
        RUNNING.remove(self.system.name)


class Letters(Actor[Any]):
    """Keeps dead letters."""

    def __init__(self, kept: list[tuple[Any, str]]) -> None:
        self.kept = kept

    @handles
    def letter(self, m: DeadLetter) -> None:
        self.kept.append((m.message, m.why))


class Listener(Actor[Any]):
    """Notes who joined and left."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    @handles
    def joined(self, m: Joined) -> None:
        self.heard.append(("joined", m.ref.path))

    @handles
    def left(self, m: Left) -> None:
        self.heard.append(("left", m.ref.path))


async def app(system: ActorSystem) -> AsyncIterator[list[Any]]:
    """Make the system known."""
    SEEN[system.name] = [[ref.path for ref in system.groups.members("early")], system.registry.get("early") is not None]
    SYSTEMS[system.name] = system
    system.spawn(Toiler)
    yield []
