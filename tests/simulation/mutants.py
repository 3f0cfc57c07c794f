"""Faults that are put into the product, one at a time: worlds have to find each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs

from levada.actors.durable.access import Access
from levada.actors.durable.commits import UnderWay
from levada.actors.durable.hosting import Host
from levada.actors.durable.reminders import Reminders
from levada.actors.durable.rows import FIRED
from levada.actors.durable.shard import Shard
from levada.actors.journal import Appended, appends
from levada.actors.journal.ledger import Ledger
from levada.actors.nodes.placing import Placing
from levada.framework.testing.simulation import SimulatedFiles

__all__ = ["BRIDGES", "FOUND", "KEEPERS", "MOVES", "MUTANTS", "OWNERS"]


def no_command_memory() -> None:
    """Neither shards nor journals know the commands that were given before."""
    shard: Any = Shard
    shard._is_new = lambda self, live, turn, command: True
    commands: Any = appends._Commands
    commands.fresh = lambda self, number, batch, at, count, end: ([(at, count)], None)


def answers_before_the_disk() -> None:
    """A command is answered when its handler has returned."""
    shard: Any = Shard
    finished = shard.finished

    def early(self: Any, turn: Any, value: Any) -> None:
        finished(self, turn, value)
        if turn in self.under_way.turns:
            self.under_way.send(turn, turn.value)
            turn.question = None

    shard.finished = early


def answers_after_the_loss() -> None:
    """A shard that has lost its partition answers from its memory."""
    under_way: Any = UnderWay
    give_up = under_way.give_up

    def generous(self: Any, refusal: BaseException | None = None) -> None:
        for turn in list(self.turns):
            if turn.settled:
                self.send(turn, turn.value)
        give_up(self, refusal)

    under_way.give_up = generous


def reminders_fire_twice() -> None:
    """A shard that is opened again takes no note of the reminders that have fired."""
    shard: Any = Shard
    reminders: Any = Reminders
    commands: Any = appends._Commands
    note, is_new = reminders.note, shard._is_new
    reminders.note = lambda self, kind, data: None if kind == FIRED else note(self, kind, data)
    shard._is_new = lambda self, live, turn, command: turn.reminder is not None or is_new(self, live, turn, command)
    commands.fresh = lambda self, number, batch, at, count, end: ([(at, count)], None)


def no_fence() -> None:
    """The journal ignores `Append.at`."""
    writer: Any = appends.Appends
    judge = writer._judge

    def generous(self: Any, parts: Any, keyed: Any) -> None:
        for job in (job for part in parts for job in part.jobs if job.append is not None):
            job.append = attrs.evolve(job.append, at=None)
        judge(self, parts, keyed)

    writer._judge = generous


def two_owners() -> None:
    """A shard stays open on its old node when it moves, and the journal takes the rows of both nodes."""
    no_fence()
    host: Any = Host

    async def stay(self: Any, shard: int, ref: Any, reply: Any) -> None:
        reply.send(None)

    host._close = stay


def gives_up_at_once() -> None:
    """A shard does not wait for a journal that is out of reach."""
    way: Any = Access

    async def never(self: Any, attempt: Any, lost: Exception) -> None:
        raise lost

    way._until_reached = never


def asks_anew() -> None:
    """A shard whose append found other rows in its place writes its own behind them, without a look at them."""
    way: Any = Access

    async def anew(self: Any, question: Any, batch: Any, at: int) -> Any:
        answer = await self._ask_once(question)
        return answer if isinstance(answer, Appended) else await self._ask_once(attrs.evolve(question, at=answer.end))

    way._append_again = anew


def no_sync() -> None:
    """No file is brought to the disk."""
    files: Any = SimulatedFiles
    files.fdatasync = files.fsync = lambda self, descriptor: None


def moves_twice() -> None:
    """A singleton that is told to move starts elsewhere at once, beside the one that still handles what it has."""
    placing: Any = Placing

    async def move(self: Any) -> bool:
        self.member = None
        self.over()
        await self.start_when_possible()
        return True

    placing.move = move


def delivers_again() -> None:
    """A mailbox does not know which batches were delivered before."""
    ledger: Any = Ledger

    def delivered(self: Any, query: str, batch: int) -> None:
        self._connection.execute("DELETE FROM batches WHERE query = ? AND batch = ?", (query, batch))

    ledger.delivered = delivered


MUTANTS: Final[dict[str, Callable[[], None]]] = {
    each.__name__: each
    for each in (
        no_command_memory,
        answers_before_the_disk,
        answers_after_the_loss,
        reminders_fire_twice,
        no_sync,
        no_fence,
        two_owners,
        gives_up_at_once,
        asks_anew,
    )
}
MOVES: Final[dict[str, Callable[[], None]]] = {moves_twice.__name__: moves_twice}
"""The mutants that `tests.simulation.moves` has to find."""
BRIDGES: Final[dict[str, Callable[[], None]]] = {delivers_again.__name__: delivers_again}
"""The mutants that `tests.simulation.bridges` has to find."""
OWNERS: Final = frozenset({"no_fence", "two_owners"})
"""The mutants for which a shard has to move from an owner that does not know it: see `tests.simulation.handover`."""
KEEPERS: Final = frozenset({"asks_anew", "gives_up_at_once"})
"""The mutants for which the keeper has to be lost: see `tests.simulation.keepers`."""
FOUND: Final[dict[str, tuple[int, int]]] = {
    "no_command_memory": (3, 160),
    "answers_before_the_disk": (3, 150),
    "answers_after_the_loss": (3, 200),
    "reminders_fire_twice": (5, 10),
    "no_sync": (4, 30),
    "no_fence": (3, 16),
    "two_owners": (3, 16),
    "gives_up_at_once": (4, 20),
    "asks_anew": (3, 36),
    "moves_twice": (4, 24),
    "delivers_again": (2, 120),
}
"""How many of how many worlds have to find a mutant. A change after which fewer do has made worlds blind, or draws other worlds: look for the cause.

Each wants about a third of what was found when this was written: of 40 worlds 2 found `no_command_memory`; of 24, 2 `answers_before_the_disk`, 1
`answers_after_the_loss`, 24 `reminders_fire_twice` and 9 `no_sync`; of 8, 3 `no_fence` and 3 `two_owners`; of 12, 7 `gives_up_at_once`; of 24, 6
`asks_anew`; of 20, 11 `moves_twice`; of 60, 3 `delivers_again`.
"""
