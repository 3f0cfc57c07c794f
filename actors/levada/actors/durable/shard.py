"""`Shard`: the actor that owns a partition of the log, and the entities whose ids hash to it.

A command comes to the shard. If the entity is in memory, the shard puts the command into the entity's mailbox, one at a time; else it loads the
entity first, with a task of its own. When the handler has returned, `finished` queues its rows, and the answer with them (`commits.py`).

The shard ends if its partition takes no more of its rows: another process has written there, or the journal failed. Then all commands under way
fail with `OutcomeUnknown`, the entities end, and the supervisor starts the shard again, which reads everything anew. A shard whose own rows cannot
be read or written refuses all commands with the journal's error, and tries again later; if the journal refuses rows, the commands under way get its
error too, but a command that is partly on the disk fails with `OutcomeUnknown`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import attrs
import trio

from levada.actors.journal import Appended, CommandReused, JournalError
from levada.actors.journal.errors import fresh
from levada.actors.metrics.journal import shard_samples
from levada.framework import Failed, Killed, Reason, Ref, Sample, handles
from levada.framework.embedding import ActorPhase, DescribedActor, adopt, local_ref, release
from levada.framework.errors import ActorError, ActorStopped, LevadaError
from levada.framework.message import Asks, reply_type

from .access import Access
from .commits import Commits, Part
from .entity import handler_of
from .erasing import Erasing
from .errors import CommandFailed, DurableError, OutcomeUnknown, ReplayFailed, ShardLost
from .reminders import Reminder, Reminders
from .replay import load
from .rows import ANSWER, ERASED, FIRED, FORGOT, OWNED, REMIND, SNAPSHOT, Row
from .settings import GetShardStatistics, Settings, ShardStatistics
from .sizes import bytes_of
from .turns import Command, Erase, Live, Turn

__all__ = ["Leave", "Shard"]

logger = logging.getLogger("levada.actors.durable")

MOST_UNDER_WAY = 4096
"""Commands that a shard takes before the first of them is answered; more wait in its mailbox."""
MOST_BYTES = 64 << 20
"""About the bytes of commands under way, and of rows that wait for the disk, before a shard takes the next command."""
MOST_FAILED = 1000
"""Entities of a shard whose failed replay is remembered; others are read again with each command."""
LONGEST_WAIT = 60.0
"""Seconds after which the clock is looked at again, and most seconds between attempts at a reminder."""
FIRST_DELAY, LAST_DELAY = 0.05, 5.0
"""Seconds between attempts to reach the journal."""


@attrs.frozen
class Leave:
    """Finish the commands that were taken, then end. Those that come later fail at once: they were not begun."""


@attrs.frozen
class _Sweep:
    """Time to passivate."""


@attrs.frozen
class _Again:
    """Time to open a shard again that could not be opened."""


@attrs.frozen
class _Due:
    """Time to look at the reminders."""


class Shard(DescribedActor[Any]):
    """Owns one partition. Supervise it with back-off."""

    subject = "shard"

    settings: Settings
    access: Access

    def __attrs_post_init__(self) -> None:
        self._live: dict[str, Live] = {}
        self._loading: dict[str, list[Turn]] = {}
        self._ended: dict[str, Live] = {}
        self._most_ended = MOST_FAILED
        self._unreadable: dict[str, ReplayFailed] = {}
        self._erasing = Erasing(self)
        self._loaded = trio.Event()
        self._turns: set[Turn] = set()
        self._octets = 0
        """About the bytes of the commands in it."""
        self._room = trio.Event()
        self._held = False
        self._replayed = self._repeated = 0
        self.number = self.access.shard
        self.log = self.settings.log
        self._handlers = self.settings.cls.command_table
        self._attempts: dict[str, int] = {}
        self._refusal: JournalError | None = JournalError("it is being opened")
        """Why it takes no commands; None: it owns its partition."""
        self._commits = Commits(self.access, self.log, 0)

    async def started(self) -> None:
        """Take the partition, and start the task that writes."""
        self._clock = trio.lowlevel.current_clock()  # `trio.current_time` takes two calls more
        self.place = local_ref(self)
        await self._open()

    async def _open(self) -> None:
        delay = FIRST_DELAY
        while True:
            self.own = Live("", self)
            self.reminders = Reminders(self.settings.codec)
            try:
                end = await self._take()
                break
            except JournalError as error:
                if str(error) != str(self._refusal):
                    logger.error("%s cannot be opened: %s", self.ref.path, error, extra={"event": "shard_refused"})
                self._refusal = error
                self.timers.once("again", LAST_DELAY, _Again())
                return
            except ShardLost as error:
                logger.warning(
                    "%s: %s; trying again in %g s", self.ref.path, error, delay, extra={"event": "shard_waits"}
                )
                await trio.sleep(delay)
                delay = min(2 * delay, LAST_DELAY)
        self._refusal = None
        self._commits = Commits(self.access, self.log, end)
        self.start_task(self._commits.run)
        self.timers.every("sweep", self.settings.idle / 4, _Sweep())
        self._arm()

    async def _take(self) -> int:
        """Write that this process owns the partition, and read the reminders; return the offset behind all rows."""
        end = await self.access.end()
        _, self.own.snapshot = await self.access.newest("")
        data = self.settings.codec.encode({"node": self.settings.node})
        batch = self.log.batch([Row(self.own, OWNED, self.now(), data=data)], end)
        if not isinstance(await self.access.append(batch, end), Appended):
            raise ShardLost(f"shard {self.number}: another process writes to it", shard=self.number)
        self.own.since = 0
        async with aclosing(self.access.rows("", self.own.snapshot or 0)) as batches:
            async for rows in batches:
                self.own.since += rows.num_rows
                for kind, data in zip(rows.column("kind").to_pylist(), rows.column("_data").to_pylist(), strict=True):
                    if kind == SNAPSHOT:
                        self.reminders.restore(data)
                    elif kind in (REMIND, FIRED, FORGOT):
                        self.reminders.note(kind, data)
        return end + 1

    def start_task(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Start a task; if it finds that the partition is lost, the shard ends."""
        self.start_soon(self._guarded, function, *args)

    async def _guarded(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        try:
            await function(*args)
        except ShardLost as error:
            logger.warning("%s ends: %s", self.ref.path, error, extra={"event": "shard_lost"})
            self._give_up(error.__cause__)
            release(self, Failed(error))

    @handles
    async def again(self, _: _Again) -> None:
        """Try to open a shard that could not be opened."""
        await self._open()

    async def stopping(self, reason: Reason) -> None:
        """Write the rows of finished handlers; the other commands fail."""
        try:
            if not isinstance(reason, Failed | Killed):  # else nobody writes any more
                await self._commits.drain()
        finally:
            self._give_up()

    def restarting(self, error: BaseException | None, message: Any) -> None:
        """Fail the commands under way."""
        self._give_up()

    def _give_up(self, refusal: BaseException | None = None) -> None:
        refused = refusal if isinstance(refusal, JournalError) else None  # of what this refuses nothing is on the disk
        begun = self._turns if refused is None else self._begun_turns()
        for turn in self._turns:
            if turn.reply is None:
                continue
            if refused is not None and turn not in begun:
                turn.reply.fail(fresh(refused))
                continue
            command = f"command {turn.command!r:.100}" if turn.command is not None else type(turn.message).__name__
            state = f"is done in part, without the rest ({refused})" if refused else "is not done, or not known to be"
            what = (
                f"{self.ref.path}: {command} of entity {turn.entity!r:.100} {state}: ask again with the same command id"
            )
            turn.reply.fail(OutcomeUnknown(what, entity=turn.entity, command=turn.command or ""))
        self._turns.clear()
        self._octets = 0
        self._erasing.give_up()
        self._wake_waiting()

    def _begun_turns(self) -> set[Turn]:
        """Return the commands that are partly on the disk, and their repetitions."""
        written = self._commits.written
        begun = (turn for turn in self._turns if turn.part is not None and turn.part <= written)
        return {each for turn in begun for each in (turn, *(turn.also or ()))}

    @property
    def about(self) -> str:
        """How many entities live, and how many commands are under way."""
        if self._refusal is not None:
            return "opening"
        return f"{len(self._live)} live, {len(self._turns)} under way"

    def metrics(self) -> Iterable[Sample]:
        """Return the counts, once it owns its partition."""
        if self._refusal is not None:
            return ()
        return shard_samples(self.settings.cls.__name__, self._counts())

    async def report(self) -> Mapping[str, object]:
        """Return `ShardStatistics` by name."""
        return self._counts()

    def _counts(self) -> dict[str, object]:
        found: Any = self.count(GetShardStatistics())
        return attrs.asdict(found)

    # Commands, on their way in.

    @handles
    def command(self, m: Command) -> Coroutine[Any, Any, None] | None:
        """Take a command, when there is room."""
        # Not a coroutine function: an ask of an idle shard calls this at once, without a turn of the mailbox.
        if self._is_full():
            return self._command_later(m)
        self._take_command(m)
        return None

    async def _command_later(self, m: Command) -> None:
        while self._is_full():
            await self._until_one_is_settled()
        self._take_command(m)

    def _is_full(self) -> bool:
        return len(self._turns) >= MOST_UNDER_WAY or self._octets + self._commits.octets >= MOST_BYTES

    async def _until_one_is_settled(self) -> None:
        self._held = True
        await self._room.wait()

    def _take_command(self, m: Command) -> None:
        try:
            reply = self.reply_later()
        except ActorError:  # told, not asked
            reply = None
        turn = Turn(self.place, self, m, reply)
        if self._refusal is not None:
            self._refuse(turn, fresh(self._refusal))
            return
        if type(m.message) not in self._handlers and handler_of(self.settings.cls, type(m.message)) is None:
            name = self.settings.cls.__name__
            self._refuse(turn, ActorError(f"{name} has no handler for {type(m.message).__name__}", actor=self.ref.path))
            return
        if m.command is not None:
            try:
                octets = self.settings.codec.encode(m.message)
            except (TypeError, ValueError, LevadaError) as error:
                self._refuse(turn, error)
                return
            turn.body = hashlib.blake2b(octets, digest_size=16).digest()
            turn.message_bytes = len(octets)
        else:
            turn.message_bytes = bytes_of(m.message, self.settings.codec)
        self._begin_turn(turn)

    def _begin_turn(self, turn: Turn) -> None:
        self._turns.add(turn)
        self._octets += turn.message_bytes
        self._dispatch(turn)

    def _dispatch(self, turn: Turn) -> None:
        if self._erasing.replies:
            refusal = self._erasing.refusal(turn.entity)
            if refusal is not None:
                self._refuse(turn, refusal)
                return
        live = self._live.get(turn.entity)
        if live is not None:
            if live.cell.phase is not ActorPhase.STOPPED:
                self._offer(live, turn)
                return
            self._drop(live)
        waiting = self._loading.get(turn.entity)
        if waiting is not None:
            waiting.append(turn)
        elif (error := self._unreadable.get(turn.entity)) is not None:
            self._refuse(turn, fresh(error))
        else:
            self._loading[turn.entity] = [turn]
            self.start_task(self._load, turn.entity)

    def _offer(self, live: Live, turn: Turn) -> None:
        """Give a command to an entity in memory, unless it has been given before."""
        command = turn.command
        if command is not None and not self._is_new(live, turn, command):
            return
        turn.live = live
        if live.turn is not None:
            if live.waiting is None:
                live.waiting = deque()
            live.waiting.append(turn)
        else:
            self._begin(live, turn)

    def _begin(self, live: Live, turn: Turn) -> None:
        live.turn = turn
        # Least recently used first.
        del self._live[live.entity]
        self._live[live.entity] = live
        live.used = self._clock.current_time()
        live.cell.enqueue(turn)

    def _is_new(self, live: Live, turn: Turn, command: str) -> bool:
        first = live.underway.get(command) if live.underway is not None else None
        known = live.commands.get(command) if live.commands is not None else None
        if first is None and known is None:
            live.underway = live.underway or {}
            live.underway[command] = turn
            return True
        self._repeated += 1
        body = first.body if first is not None else known[1] if known is not None else None
        if body != turn.body:
            offset = known[0] if known is not None else self._commits.end
            what = f"command {command!r:.100} of entity {live.entity!r:.100} was another message before: give each command an id of its own"
            self._refuse(turn, CommandReused(what, command=command, partition=self.number, first=offset))
        elif first is not None:
            first.also = first.also or []
            first.also.append(turn)
        elif known is not None:
            self.start_task(self._repeat, turn, known[0])
        return False

    async def _repeat(self, turn: Turn, offset: int) -> None:
        """Answer with the reply in the log."""
        try:
            octets = (await self.access.row(offset)).column("_reply")[0].as_py()
            self._send(turn, self.settings.codec.decode(octets, _expected(turn.message)))
        except ShardLost:
            raise
        except LevadaError as error:
            self._refuse(turn, error)

    async def _load(self, entity: str) -> None:
        """Read an entity, and give it the commands that came meanwhile."""
        ended = self._ended.pop(entity, None)
        if ended is not None:
            await ended.cell.terminated()
            await self._commits.reach(ended.ticket)
        settings = self.settings
        try:
            live = await load(settings.cls, entity, self, self.access, settings.snapshots, settings.remember)
        except ShardLost:
            raise
        except (JournalError, DurableError) as error:
            if isinstance(error, ReplayFailed):
                logger.error("%s", error, extra={"event": "replay_failed"})
                if len(self._unreadable) < MOST_FAILED:
                    self._unreadable[entity] = error
            for turn in self._load_ended(entity):
                self._refuse(turn, fresh(error))
            return
        self._replayed += 1
        turns = self._load_ended(entity)
        if not adopt(self, live.actor, name=_name_of(entity)):
            return  # the shard is ending, and gives the commands up
        live.cell = local_ref(live.actor)
        live.used = self._clock.current_time()
        self._live[entity] = live
        for turn in turns:
            self._dispatch(turn)
        self._make_room()

    def _load_ended(self, entity: str) -> list[Turn]:
        self._loaded.set()
        self._loaded = trio.Event()
        return self._loading.pop(entity)

    # Commands, on their way out.

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        return int(self.settings.clock() * 1e6)

    def finished(self, turn: Turn, value: Any) -> None:
        """Queue the rows of a handler that has returned, and its answer behind them. Raises if the answer cannot be kept."""
        live = turn.live
        assert live is not None
        if live.failed is not None:
            raise live.failed
        rows = live.recorded
        if turn.command is not None:
            reply = self.settings.codec.encode(value, _expected(turn.message))
            if not rows:
                rows.append(Row(live, ANSWER, self.now(), command=turn.command))
            rows[-1].reply, rows[-1].body = reply, turn.body
        turn.settled = True
        turn.value, turn.tells = value, live.tells
        if turn.reminder is not None:
            self.reminders.handled.add(turn.reminder.id)
            live.own = [self.reminders.row(self.own, FIRED, self.now(), turn.reminder), *(live.own or ())]
        if rows or live.own:
            turn.rows, turn.octets = self._take_rows(live)
            live.ticket = self._commits.put(turn)
        else:
            turn.rows, turn.octets = (), 0
            if live.ticket > self._commits.written:
                self._commits.put(turn)
            else:
                self.done(turn)
        live.tells = live.turn = None
        if live.waiting:
            self._begin(live, live.waiting.popleft())

    def commit(self, live: Live) -> trio.Event | None:
        """Queue what an entity has recorded in the middle of a handler."""
        if live.failed is not None:
            raise live.failed
        if not live.recorded and not live.own and not live.tells and live.ticket <= self._commits.written:
            return None
        event = trio.Event()
        rows, octets = self._take_rows(live)
        live.ticket = self._commits.put(Part(self, rows, octets, event, live.tells or ()))
        live.tells = None
        if live.turn is not None and live.turn.part is None:
            live.turn.part = live.ticket
        return event

    def _take_rows(self, live: Live) -> tuple[Sequence[Row], int]:
        """Take what an entity has recorded, and about its size."""
        rows = live.recorded
        live.recorded = []
        if live.own is not None:
            self.own.since += len(live.own)
            rows = [*live.own, *rows]
            live.own = None
            if self.own.since > max(self.settings.snapshot_every, 2 * len(self.reminders.pending)):
                self.own.since = 0
                rows.append(Row(self.own, SNAPSHOT, self.now()))
        if live.since >= self.settings.snapshot_every:
            rows.append(self._snapshot(live))
        octets, live.octets = live.octets, 0
        return rows, octets

    def _snapshot(self, live: Live) -> Row:
        live.since = 0
        row = Row(live, SNAPSHOT, self.now())
        row.state = self.settings.snapshots.state(live.actor)
        live.octets += row.octets + sum(map(len, row.state.values()))
        return row

    def placed(self, row: Row, offset: int) -> None:
        """Note the offset of a row that is no event, or has the answer of a command; they come in the order of the log."""
        live = row.live
        if row.body is not None and row.command is not None:
            if live.commands is None:
                live.commands = {}
            live.commands[row.command] = (offset, row.body)
            if len(live.commands) > self.settings.remember:
                del live.commands[next(iter(live.commands))]
        if row.kind is ERASED:
            live.snapshot = offset  # rows before it go
        if row.kind is SNAPSHOT:
            live.snapshot = offset
            row.data = self.reminders.pack() if row.state is None else self.settings.snapshots.pack(row.state, live)
        elif live is self.own and row.data is not None and row.kind is not OWNED:
            self.reminders.note(row.kind, row.data)

    def done(self, turn: Turn) -> None:
        """Answer: everything up to the command's last row is on the disk."""
        if turn.tells:
            self._tell(turn.tells)
        if turn.command is not None and turn.live is not None and turn.live.underway is not None:
            del turn.live.underway[turn.command]
        if self.reminders.pending or turn.reminder is not None:
            self._attempts.pop(turn.command or "", None)
            self._arm()
        self._send(turn, turn.value)

    def part_done(self, tells: Sequence[tuple[Ref[Any], Any]]) -> None:
        """Send the messages that waited for rows in the middle of a handler."""
        self._tell(tells)
        self._arm()

    def _tell(self, tells: Sequence[tuple[Ref[Any], Any]]) -> None:
        for ref, each in tells:
            try:
                ref.tell(each)
            except LevadaError as error:
                logger.warning(
                    "%s: a message after a commit is lost: %s", self.ref.path, error, extra={"event": "tell_lost"}
                )

    def _send(self, turn: Turn, value: Any) -> None:
        self._settle(turn)
        if turn.reply is not None:
            turn.reply.send(value)
        for each in turn.also or ():
            self._send(each, value)

    def _refuse(self, turn: Turn, error: BaseException) -> None:
        self._settle(turn)
        if turn.reminder is not None:
            self._again(turn.reminder, error)
        elif turn.reply is None:
            logger.warning(
                "%s: %s to %r was told and failed: %s",
                self.ref.path,
                type(turn.message).__name__,
                turn.entity,
                error,
                extra={"event": "told"},
            )
        else:
            turn.reply.fail(error)
        for each in turn.also or ():
            self._refuse(each, error)

    def _settle(self, turn: Turn) -> None:
        if turn in self._turns:
            self._turns.remove(turn)
            self._octets -= turn.message_bytes
        if self._held and not (self._turns and self._is_full()):
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        self._held = False
        self._room.set()
        self._room = trio.Event()

    def failed(self, turn: Turn, error: BaseException) -> None:
        """Drop an entity that ended on a command. Those behind it are for its next life."""
        if turn not in self._turns:
            return  # the shard has given it up
        live = turn.live
        assert live is not None
        if isinstance(error, ActorStopped) and isinstance(error.reason, Failed):
            # Not if it ended with its shard or its node: then a command with an id is asked again.
            cause = error.__cause__
            error = CommandFailed(error.detail, actor=error.actor, reason=error.reason, message=error.message)
            error.__cause__ = cause
        self._refuse(turn, error)
        waiting = live.waiting
        live.waiting = None
        if self._live.get(live.entity) is live:
            self._drop(live)
        if self.place.phase is ActorPhase.RUNNING:
            for each in waiting or ():
                self._dispatch(each)

    def _drop(self, live: Live) -> None:
        """Forget an entity that has ended on its own; it is read again when its rows are on the disk."""
        del self._live[live.entity]
        self._ended[live.entity] = live
        if len(self._ended) > self._most_ended:
            self._forget_ended()
            self._most_ended = max(MOST_FAILED, 2 * len(self._ended))

    # Erasing.

    @handles
    def erase(self, m: Erase) -> None:
        """End an entity and erase its rows."""
        reply = self.reply_later()
        if self._refusal is not None:
            reply.fail(fresh(self._refusal))
        else:
            self._erasing.begin(m.entity, reply)

    async def end_entity(self, entity: str) -> None:
        """End an entity, and wait until its rows are on the disk."""
        while entity in self._loading:
            await self._loaded.wait()
        live = self._live.get(entity)
        if live is not None:
            live.cell.kill()
            await live.cell.terminated()
            self._live.pop(entity, None)
        ended = self._ended.pop(entity, live)
        if ended is not None:
            await ended.cell.terminated()
            await self._commits.reach(ended.ticket)

    def write(self, rows: list[Row], written: trio.Event) -> None:
        """Queue rows; the event is set when they are on the disk."""
        self._commits.put(Part(self, rows, 0, written))

    def forget_entity(self, entity: str) -> None:
        """Forget that an entity could not be read."""
        self._unreadable.pop(entity, None)

    # Reminders.

    def _arm(self) -> None:
        """Wake up for the next reminder, or in a while, since the clock of the world may be set."""
        at = self.reminders.next()
        if at is not None:
            self.timers.once("due", min(max(0.0, at - self.settings.clock()), LONGEST_WAIT), _Due())

    @handles
    def due(self, _: _Due) -> None:
        """Give entities the reminders that are due, as far as there is room."""
        while len(self._turns) < MOST_UNDER_WAY and (reminder := self.reminders.take(self.settings.clock())):
            self._remind(reminder)
        if len(self._turns) < MOST_UNDER_WAY:
            self._arm()
        else:
            self.timers.once("due", FIRST_DELAY, _Due())

    def _remind(self, reminder: Reminder) -> None:
        try:
            command = Command(reminder.entity, self.settings.codec.decode(reminder.message), reminder.id)
            if handler_of(self.settings.cls, type(command.message)) is None:
                raise ActorError(f"{self.settings.cls.__name__} has no handler for {type(command.message).__name__}")
        except LevadaError as error:
            self._again(reminder, error)
            return
        turn = Turn(self.place, self, command, None)
        turn.body = hashlib.blake2b(reminder.message, digest_size=16).digest()
        turn.reminder = reminder
        turn.message_bytes = len(reminder.message)
        self._begin_turn(turn)

    def _again(self, reminder: Reminder, error: BaseException) -> None:
        """Try a reminder that failed once more, later each time."""
        tried = self._attempts[reminder.id] = self._attempts.get(reminder.id, 0) + 1
        wait = min(LONGEST_WAIT, 2.0 ** min(tried, 10) / 2)
        logger.warning(
            "%s: reminder %r of %r failed, again in %g s: %s", self.ref.path, reminder.key, reminder.entity, wait, error
        )
        self.reminders.retry(reminder, self.settings.clock() + wait)
        self._arm()

    @handles
    async def leave(self, _: Leave) -> None:
        """End when the commands under way are answered."""
        while self._turns:
            await self._until_one_is_settled()
        self.stop()

    # Passivation.

    @handles
    def sweep(self, _: _Sweep) -> None:
        """Let entities go that had no command for some time."""
        oldest = self._clock.current_time() - self.settings.idle
        for live in list(self._live.values()):
            if live.used > oldest:
                break
            self._let_go(live)
        self._forget_ended()

    def _forget_ended(self) -> None:
        for entity, live in list(self._ended.items()):
            if not live.cell.is_alive and live.ticket <= self._commits.written:
                del self._ended[entity]

    def _make_room(self) -> None:
        excess = len(self._live) - self.settings.max_live
        if excess > 0:
            for live in list(self._live.values())[:excess]:
                self._let_go(live)

    def _let_go(self, live: Live) -> None:
        if live.turn is None and live.ticket <= self._commits.written:
            del self._live[live.entity]
            release(live.actor)
            if live.cell.is_alive:
                self._ended[live.entity] = live

    @handles
    def count(self, _: GetShardStatistics) -> ShardStatistics:
        """Answer with the counters."""
        return ShardStatistics(
            len(self._live),
            len(self._loading),
            len(self._turns),
            self._commits.written,
            self._commits.end,
            self._replayed,
            len(self._unreadable),
            self._repeated,
        )


def _expected(question: Any) -> Any:
    return reply_type(type(question)) if isinstance(question, Asks) else Any


def _name_of(entity: str) -> str:
    """Return an id as the name of an actor, which has no slash and does not begin with a dollar."""
    quoted = entity.replace("%", "%25").replace("/", "%2F")
    return f"%24{quoted[1:]}" if quoted.startswith("$") else quoted
