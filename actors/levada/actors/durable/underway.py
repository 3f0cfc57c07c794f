"""The commands of a shard that are under way: how many it takes, and how they are answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import trio

from levada.actors.journal import JournalError
from levada.actors.journal.errors import fresh
from levada.framework import Ref
from levada.framework.embedding import RateLimitedLog

from .commits import Commits
from .errors import OutcomeUnknown
from .reminders import Reminder
from .turns import CommandTurn

__all__ = ["UnderWay"]

logger = logging.getLogger("levada.actors.durable")

MOST_UNDER_WAY = 4096
"""Commands that a shard takes before the first of them is answered; more wait in its mailbox."""
MOST_BYTES = 64 << 20
"""About the bytes of commands under way, and of rows that wait for the disk, before a shard takes the next command."""


class UnderWay:
    """The commands that a shard has taken and not answered."""

    def __init__(self, commits: Commits, remind_again: Callable[[Reminder, BaseException], None]) -> None:
        self.turns: dict[CommandTurn, None] = {}  # not a set: `give_up` fails them in this order
        self._octets = 0
        self._commits = commits
        self._remind_again = remind_again
        self._room = trio.Event()
        self._held = False
        self._told = RateLimitedLog("failed command", logger)
        self._lost = RateLimitedLog("lost message after a commit", logger)

    def __len__(self) -> int:
        return len(self.turns)

    def is_full(self) -> bool:
        """Return whether the next command has to wait."""
        return len(self.turns) >= MOST_UNDER_WAY or self._octets + self._commits.size >= MOST_BYTES

    @property
    def has_place(self) -> bool:
        """Whether there are few enough commands for another reminder."""
        return len(self.turns) < MOST_UNDER_WAY

    async def until_one_is_settled(self) -> None:
        """Wait until there may be room, or until no command is under way."""
        self._held = True
        await self._room.wait()

    def add(self, turn: CommandTurn) -> None:
        """Take a command."""
        self.turns[turn] = None
        self._octets += turn.message_bytes

    def send(self, turn: CommandTurn, value: Any) -> None:
        """Answer a command, and its repetitions."""
        self._settle(turn)
        if turn.question is not None:
            turn.question.answer(value)
        if turn.also is not None:
            for each in turn.also:
                self.send(each, value)

    def tell_all(self, path: str, entity: str, tells: Sequence[tuple[Ref[Any], Any]]) -> None:
        """Send the messages of an entity that waited for its rows. `path` is the shard's."""
        for ref, each in tells:
            try:
                ref.tell(each)
            except Exception as error:  # noqa: BLE001 - the message may be wrong for its ref, and the next one is not
                self._lost.line(
                    "%s: %s to %r after a commit of %r is lost: %r",
                    path,
                    type(each).__name__,
                    ref,
                    entity,
                    error,
                    event="tell_lost",
                )

    def refuse(self, turn: CommandTurn, error: BaseException) -> None:
        """Fail a command, and its repetitions."""
        self._settle(turn)
        if turn.reminder is not None:
            self._remind_again(turn.reminder, error)
        elif turn.question is None:
            self._told.line(
                "%s: %s to %r was told and failed: %s",
                turn.target.path,
                type(turn.message).__name__,
                turn.entity,
                error,
                event="told",
            )
        else:
            turn.question.fail(error)
        for each in turn.also or ():
            self.refuse(each, error)

    def withdraw(self, turn: CommandTurn) -> None:
        """Forget a command that was not begun and whose askers do not wait, and its repetitions."""
        self._settle(turn)
        for each in turn.also or ():
            self.withdraw(each)

    def _settle(self, turn: CommandTurn) -> None:
        try:
            del self.turns[turn]
        except KeyError:  # it was not taken, or given up
            pass
        else:
            self._octets -= turn.message_bytes
        if self._held and not (self.turns and self.is_full()):
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        self._held = False
        self._room.set()
        self._room = trio.Event()

    def give_up(self, refusal: BaseException | None = None) -> None:
        """Fail all commands; if the journal refused rows, with its error."""
        refused = refusal if isinstance(refusal, JournalError) else None  # of what this refuses nothing is on the disk
        begun = set[CommandTurn]() if refused is None else self._begun()
        told = [turn for turn in self.turns if turn.question is None and turn.reminder is None]
        if told:
            what = "%s ends: %d told commands are not done, or not known to be"
            logger.error(what, told[0].target.path, len(told), extra={"event": "told_lost"})
        for turn in self.turns:
            if turn.question is None:
                continue
            if refused is not None and turn not in begun:
                turn.question.fail(fresh(refused))
                continue
            command = f"command {turn.command!r:.100}" if turn.command is not None else type(turn.message).__name__
            state = f"is done in part, without the rest ({refused})" if refused else "is not done, or not known to be"
            what = f"{turn.target.path}: {command} of entity {turn.entity!r:.100} {state}: ask again with the same command id"
            turn.question.fail(OutcomeUnknown(what, entity=turn.entity, command=turn.command or ""))
        self.turns.clear()
        self._octets = 0
        self._wake_waiting()

    def _begun(self) -> set[CommandTurn]:
        """Return the commands that are partly on the disk, and their repetitions."""
        written = self._commits.written
        begun = (turn for turn in self.turns if turn.part is not None and turn.part <= written)
        return {each for turn in begun for each in (turn, *(turn.also or ()))}
