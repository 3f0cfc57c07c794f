"""The commands of a shard that are under way: how many it takes, how their rows get to the disk, and how they are answered.

While one append is under way, finished commands gather for the next. Answers are sent in the order of the queue, once their rows are on disk. So
an answer waits for everything queued before it.

Many askers that ask again as soon as they have their answers take turns with the journal: each append has all their commands, so this process has
nothing to do while another process writes it. If an append had half of them, the others would be handled meanwhile. Whether that is better depends
on the journal, on the network, and on whether the machine has a processor left. So both are tried now and then (`_trials`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import attrs
import trio

from levada.actors.journal import Appended, JournalError
from levada.actors.journal.errors import fresh
from levada.actors.journal.writing import let_askers_come
from levada.framework import Ref
from levada.framework.embedding import RateLimitedLog
from levada.framework.platform import PLATFORM

from .access import Access
from .errors import OutcomeUnknown, ShardLost
from .reminders import Reminder
from .rows import LogRow, ShardLog
from .turns import CommandTurn, ShardWriter

__all__ = ["Commit", "CommitPart", "Commits", "UnderWay"]

logger = logging.getLogger("levada.actors.durable")

MOST_UNDER_WAY = 4096
"""Commands that a shard takes before the first of them is answered; more wait in its mailbox."""
MOST_WAITING_BYTES = 64 << 20
"""About the bytes of commands under way, and of rows that wait for the disk, before a shard takes the next command."""

MOST_ROWS = 4096
"""The most rows of one append, unless a single command has more."""
MOST_BYTES = 4 << 20
"""The most bytes of one append, approximately, unless a single command has more."""
LEAST_HALVED = 128
"""The least commands under way that may be written in halves."""
_TRIAL = 8
"""Appends by which a way of writing is judged."""
_STAY = 100
"""Appends in the better way before both are tried again."""
_WORTH = 0.9
"""Halves are kept if a command takes less than this part of the time: they cost up to a seventh more CPU time."""
_ROWS: Callable[[Commit], Sequence[LogRow]] = attrgetter("rows")


class Commit(Protocol):
    """Rows that are written together, and a function to call when they are on disk: a `CommandTurn`, or a `CommitPart`."""

    rows: Sequence[LogRow]
    size: int
    """About the size of the rows."""

    def done(self) -> None:
        """Called when the rows are on disk."""
        ...


@attrs.define(eq=False)
class CommitPart:
    """The rows that a running handler commits, or rows of the shard itself."""

    writer: ShardWriter
    rows: Sequence[LogRow]
    size: int
    written: trio.Event
    """Set when the rows are on disk."""
    entity: str = ""
    """The id of the handler's entity."""
    tells: Sequence[tuple[Ref[Any], Any]] = ()

    def done(self) -> None:
        """Send the messages that waited, and let the handler continue."""
        self.writer.part_done(self.entity, self.tells)
        self.written.set()


class Commits:
    """The queue of one shard. Its `run` is a task of the shard."""

    def __init__(self, access: Access, log: ShardLog, end: int) -> None:
        self.end = end
        """The offset after the last row of the partition."""
        self.queued = 0
        """The number of rows that were queued so far."""
        self.written = 0
        """The number of these rows that are on disk."""
        self.size = 0
        """About the bytes of the rows in the queue."""
        self._is_elsewhere = access.streams or access.takes_values
        """Whether another process writes the log; this one would spend the time on its own syncs only."""
        self._trials = _trials(PLATFORM.get().perf_counter)
        next(self._trials)
        self._access = access
        self._log = log
        self._queue: deque[Commit] = deque()
        self._wake = trio.Event()
        self._progress = trio.Event()

    def put(self, commit: Commit) -> int:
        """Queue rows; return their place. They are on disk when `written` has reached it."""
        if not self._queue:
            self._wake.set()
        self._queue.append(commit)
        self.size += commit.size
        self.queued += len(commit.rows)
        return self.queued

    async def reach(self, place: int) -> None:
        """Wait until all rows up to a place are on disk."""
        while self.written < place:
            await self._progress.wait()

    async def drain(self) -> None:
        """Wait until the queue is empty."""
        while self._queue:
            await self._progress.wait()

    async def run(self) -> None:
        """Write group after group.

        Raises:
            ShardLost: another process has written to the partition, or the journal refused or is out of reach. The rows of the last group may
                have been written.
        """
        shard, expected, most = self._access.shard, 0, MOST_ROWS
        while True:
            if not self._queue:
                self._wake = trio.Event()
                await self._wake.wait()
            if len(self._queue) < min(expected, most):
                await let_askers_come(self._queue, min(expected, most))
            group, rows, size = self._group(most)
            if rows:
                try:
                    batch = self._log.batch(rows, self.end, as_values=self._access.takes_values)
                    answer = await self._access.append(batch, self.end)
                except JournalError as error:
                    raise ShardLost(f"shard {shard}: the journal refused rows: {error}", shard=shard) from error
                if not isinstance(answer, Appended):
                    raise ShardLost(
                        f"shard {shard}: another process has written to it, up to row {answer.end} where this one knows {self.end}: it owns "
                        "the shard now",
                        shard=shard,
                    )
                self.end = answer.first + answer.count
            for _ in group:
                self._queue.popleft()
            self.written += len(rows)
            self.size -= size
            for commit in group:
                commit.done()
            expected = len(self._queue) + len(group)
            halved = expected >= LEAST_HALVED and self._is_elsewhere and self._trials.send(len(group))
            most = -(-expected // 2) if halved else MOST_ROWS
            self._progress.set()
            self._progress = trio.Event()

    def _group(self, most: int) -> tuple[list[Commit], list[LogRow], int]:
        """Return the first commits of the queue, at most so many, their rows, and about the size of these."""
        is_small = self.size <= MOST_BYTES and self.queued - self.written <= MOST_ROWS
        if is_small and len(self._queue) <= most:  # nearly always
            group = list(self._queue)
            return group, list(chain.from_iterable(map(_ROWS, group))), self.size
        group, rows, size = [], list[LogRow](), 0
        for commit in self._queue:
            if len(group) >= most or (
                group and (len(rows) + len(commit.rows) > MOST_ROWS or size + commit.size > MOST_BYTES)
            ):
                break
            group.append(commit)
            rows += commit.rows
            size += commit.size
        return group, rows, size


def _trials(clock: Callable[[], float]) -> Generator[bool, int, None]:
    """Yield for each append whether it takes half of the commands under way. Each is sent how many commits the append before it had."""

    def written(halved: bool, appends: int) -> Generator[bool, int, float]:
        yield halved  # the first one comes behind another way of writing
        began, count = clock(), 0
        for _ in range(appends):
            count += yield halved
        return (clock() - began) / count

    while True:
        is_better = True
        for _ in range(2):  # twice, because of what else the machine does
            whole = yield from written(False, _TRIAL)
            half = yield from written(True, _TRIAL)
            is_better = is_better and half < _WORTH * whole
        yield from written(is_better, _STAY)


class UnderWay:
    """The commands that a shard has taken and not answered."""

    def __init__(self, commits: Commits, remind_again: Callable[[Reminder, BaseException], None]) -> None:
        self.turns: dict[CommandTurn, None] = {}  # not a set: `give_up` fails them in this order
        self._bytes = 0
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
        return len(self.turns) >= MOST_UNDER_WAY or self._bytes + self._commits.size >= MOST_WAITING_BYTES

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
        self._bytes += turn.message_bytes

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
            self._bytes -= turn.message_bytes
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
        self._bytes = 0
        self._wake_waiting()

    def _begun(self) -> set[CommandTurn]:
        """Return the commands that are partly on the disk, and their repetitions."""
        written = self._commits.written
        begun = (turn for turn in self.turns if turn.part is not None and turn.part <= written)
        return {each for turn in begun for each in (turn, *(turn.also or ()))}
