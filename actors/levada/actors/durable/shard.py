"""`Shard`: the actor that owns a partition of the log, and the entities whose ids hash to it.

A command comes to the shard. If the entity is in memory, the shard puts the command into the entity's mailbox, one at a time; else it loads the
entity first, with a task of its own. When the handler has returned, `finished` queues its rows, and the answer with them (`commits.py`).

At a normal end the shard finishes the commands that it has (`Finisher`, `Leave`); commands that it cannot finish are counted in the log.

The shard ends if its partition takes no more of its rows: another process has written there, or the journal is out of reach for long (`access.py`).
Then all commands under way fail with `OutcomeUnknown`, the entities end, and the supervisor starts the shard again, which reads everything again. A
shard whose own rows cannot be read refuses all commands with the journal's error, and tries again later. If the journal refuses rows, because the
disk is full, the commands under way get its error too, but a command that is partly on the disk fails with `OutcomeUnknown`; until there is room,
the shard answers the commands that write nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from levada.actors.journal import (
    Appended,
    CommandReused,
    JournalBehind,
    JournalError,
    JournalFull,
    JournalUnwritable,
)
from levada.actors.journal.errors import fresh
from levada.actors.metrics.journal import shard_samples
from levada.framework import Actor, Failed, Killed, Normal, Reason, Ref, Reply, Sample, Shutdown, handles
from levada.framework.embedding import ActorPhase, Ask, DescribedActor, adopt, local_ref, release
from levada.framework.errors import ActorError, ActorStopped
from levada.framework.message import Asks, reply_type

from .access import Access
from .commits import CommitPart, Commits, UnderWay
from .entity import handler_of
from .erasing import Erasing
from .errors import CommandFailed, DurableError, ReplayFailed, ShardLost
from .live_entities import Population
from .reminder_times import ReminderTimes
from .reminders import Reminders
from .replay import load
from .rows import ANSWER, ERASED, FIRED, FORGOT, OWNED, REMIND, SNAPSHOT, LogRow
from .settings import GetShardStatistics, ShardSettings, ShardStatistics
from .snapshots import MOST_BYTES as SNAPSHOT_BYTES
from .trimming import FIRST_WAIT, trim
from .turns import IMMUTABLE, CommandTurn, EntityCommand, Erase, Live, bytes_of, copy_of

__all__ = ["Finisher", "Leave", "Shard"]

logger = logging.getLogger("levada.actors.durable")

_STOPPED = ActorPhase.STOPPED  # a member of an enumeration takes 0.05 µs to look up

FIRST_DELAY, LAST_DELAY = 0.05, 5.0
"""Seconds between attempts to reach the journal."""
MOST_BYTES = 14 << 20
"""The most bytes of the rows of one command with its answer: a journal in another process reads rows of 15 MiB at most."""


@attrs.frozen
class Finish(Asks[None]):
    """Ask for an answer when no command is under way."""


@attrs.frozen
class Leave:
    """End when no command is under way. A command that comes later fails at once: it was not begun."""


@attrs.frozen
class _Sweep:
    """Time to passivate."""


@attrs.frozen
class _Again:
    """Time to open a shard again that could not be opened."""


@attrs.frozen
class _Due:
    """Time to look at the reminders."""


@attrs.frozen
class _Trim:
    """Time to trim the log."""


class Finisher(Actor[Any]):
    """Has the shards of a process finish their commands before they end. It is started after them, so it is stopped first."""

    shards: Sequence[Ref[Any]]

    async def stopping(self, reason: Reason) -> None:
        """Wait for all shards before the first one ends: a handler may ask an entity of another shard."""
        if isinstance(reason, Normal | Shutdown):
            for step in (_finish, _leave):
                async with trio.open_nursery() as nursery:
                    for shard in self.shards:
                        nursery.start_soon(step, shard)


async def _finish(shard: Ref[Any]) -> None:
    try:
        await shard.ask(Finish(), timeout=None)
    except ActorError:
        pass  # it has ended


async def _leave(shard: Ref[Any]) -> None:
    try:
        await shard.send(Leave())
    except ActorError:
        pass  # it has ended
    await shard.terminated()


class Shard(DescribedActor[Any]):
    """Owns one partition. Supervise it with back-off."""

    subject = "shard"

    settings: ShardSettings
    access: Access

    def __attrs_post_init__(self) -> None:
        self._erasing = Erasing(self)
        self._repeated = 0
        self.number = self.access.shard
        self.log = self.settings.log
        self._handlers = self.settings.cls.command_table
        self._sync_handlers = self._handlers[None]
        self._time = self.settings.clock
        limits = self.settings.terms.limits
        self._snapshot_every, self._remember = limits.snapshot_every, limits.remember
        self._reminder_times = ReminderTimes(self)
        self._refusal: JournalError | None = JournalError("it is being opened")
        """Why it takes no commands; None: it takes them."""
        self._unwritable: JournalError | None = None
        """Why the journal takes no rows, so that it answers only what needs none; None: it owns its partition."""
        self._commits = Commits(self.access, self.log, 0)
        self.under_way = UnderWay(self._commits, self._reminder_times.again)
        self.entities = Population(self._commits, -(-limits.max_live // self.settings.terms.shards))

    async def started(self) -> None:
        """Take the partition, and start the task that writes."""
        self._clock = trio.lowlevel.current_clock()  # `trio.current_time` takes two calls more
        self.place = local_ref(self)
        self.place.take_at_once(self._take_at_once)
        await self._open()

    async def _open(self) -> None:
        delay = FIRST_DELAY
        while True:
            self.own = Live("", self)
            self.reminders = Reminders(self.settings.codec)
            try:
                is_writable = await self._take()
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
        if is_writable:
            self._begin_to_write()

    async def _take(self) -> bool:
        """Take the partition, and read the reminders; return whether the journal takes rows."""
        self._commits.end = await self.access.end()
        _, self.own.snapshot = await self.access.newest("")
        is_writable = await self._claim()
        self.own.since = 0
        async with aclosing(self.access.rows("", self.own.snapshot or 0)) as batches:
            async for rows in batches:
                self.own.since += rows.num_rows
                for kind, data in zip(rows.column("kind").to_pylist(), rows.column("_data").to_pylist(), strict=True):
                    if kind == SNAPSHOT:
                        self.reminders.restore(data)
                    elif kind in (REMIND, FIRED, FORGOT):
                        self.reminders.note(kind, data)
        return is_writable

    async def _claim(self) -> bool:
        """Write that this process owns the partition. If there is no room for that, note why, and return False."""
        data = self.settings.codec.encode({"node": self.settings.node})
        row = LogRow(self.own, OWNED, self.now(), data=data)
        rows = self.log.batch([row], self._commits.end, as_values=self.access.takes_values)
        try:
            answer = await self.access.append(rows, self._commits.end)
        except (JournalFull, JournalUnwritable) as error:
            if str(error) != str(self._unwritable):
                logger.error("%s cannot be written: %s", self.ref.path, error, extra={"event": "shard_refused"})
            self._unwritable = error
            self.timers.once("again", LAST_DELAY, _Again())
            return False
        if not isinstance(answer, Appended):
            raise ShardLost(f"shard {self.number}: another process writes to it", shard=self.number)
        self._unwritable = None
        self._commits.end += 1
        return True

    def _begin_to_write(self) -> None:
        self.start_task(self._commits.run)
        self._reminder_times.arm()
        if self.settings.terms.keep is not None:
            self._trim_in(FIRST_WAIT)

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
        """Try to open a shard that could not be opened, or to take the partition of one that could not be written."""
        if self._refusal is not None:
            await self._open()
        elif self._unwritable is not None:
            self.start_task(self._claim_again)

    async def _claim_again(self) -> None:
        try:
            if await self._claim():
                self._begin_to_write()
        except JournalError as error:
            raise ShardLost(str(error), shard=self.number) from error

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
        self.under_way.give_up(refusal)
        self._erasing.give_up()

    @property
    def about(self) -> str:
        """How many entities live, and how many commands are under way."""
        if self._refusal is not None:
            return "opening"
        return f"{len(self.entities.live)} live, {len(self.under_way)} under way"

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

    @enable_ki_protection
    def _take_at_once(self, question: Ask) -> bool:
        """Take a command to an entity in memory in the asker's task, unless it needs more than the entity."""
        m = question.message
        if (
            type(m) is not EntityCommand
            or self._refusal is not None
            or self._erasing.questions
            or self.under_way.is_full()
        ):
            return False
        live = self.entities.live.get(m.entity)
        if live is None or live.cell.phase is _STOPPED or (m.command is not None and live.knows(m.command)):
            return False
        turn = self._turn_of(m, question)
        if turn is not None:
            self.under_way.add(turn)
            self._offer(live, turn, at_once=True)
        return True

    @handles
    def command(self, m: EntityCommand) -> Coroutine[Any, Any, None] | None:
        """Take a command, when there is room."""
        # Not a coroutine function: an ask of an idle shard calls this at once, without a turn of the mailbox.
        if self.under_way.is_full():
            return self._command_later(m)
        self._take_command(m)
        return None

    async def _command_later(self, m: EntityCommand) -> None:
        while self.under_way.is_full():
            await self.under_way.until_one_is_settled()
        self._take_command(m)

    def _take_command(self, m: EntityCommand) -> None:
        # Not `reply_later`: `_give_up` fails the questions of all turns.
        turn = self._turn_of(m, self.place.take_question())
        if turn is not None:
            self.begin_turn(turn)

    def _turn_of(self, m: EntityCommand, question: Ask | None) -> CommandTurn | None:
        """Return the turn of a command; None if the command was refused."""
        kind = type(m.message)
        handler: Any = self._handlers.get(kind) or handler_of(self.settings.cls, kind)
        turn = CommandTurn(self.place, self, m, handler, question)
        error: Exception
        if self._refusal is not None:
            error = fresh(self._refusal)
        elif handler is None:
            error = ActorError(f"{self.settings.cls.__name__} has no handler for {kind.__name__}", actor=self.ref.path)
        else:
            try:
                if m.command is None:
                    turn.message_bytes = bytes_of(m.message, self.settings.codec)
                else:
                    encoded = self.settings.codec.encode(m.message)
                    turn.body = hashlib.blake2b(encoded, digest_size=16).digest()
                    turn.message_bytes = len(encoded)
                return turn
            except Exception as refused:  # noqa: BLE001 - the message may be anything, an unfinished object too
                error = refused
        self.under_way.refuse(turn, error)
        return None

    def begin_turn(self, turn: CommandTurn) -> None:
        """Take a command."""
        self.under_way.add(turn)
        self._dispatch(turn)

    def _dispatch(self, turn: CommandTurn) -> None:
        if self._erasing.questions:
            refusal = self._erasing.refusal(turn.entity)
            if refusal is not None:
                self.under_way.refuse(turn, refusal)
                return
        entities = self.entities
        live = entities.live.get(turn.entity)
        if live is not None:
            if live.cell.phase is not _STOPPED:
                self._offer(live, turn)
                return
            entities.drop(live)
        waiting = entities.loading.get(turn.entity)
        if waiting is not None:
            waiting.append(turn)
        elif (error := entities.unreadable.get(turn.entity)) is not None:
            self.under_way.refuse(turn, fresh(error))
        else:
            entities.loading[turn.entity] = [turn]
            self.start_task(self._load, turn.entity)

    def _offer(self, live: Live, turn: CommandTurn, *, at_once: bool = False) -> None:
        """Give a command to an entity in memory, unless it has been given before."""
        if turn.command is not None and not self._is_new(live, turn, turn.command):
            return
        turn.live = live
        if live.turn is None:
            self._begin(live, turn, at_once=at_once)
        else:
            turn.wait_for(live.cell)
            if live.waiting is None:
                live.waiting = deque()
            live.waiting.append(turn)

    def _begin(self, live: Live, turn: CommandTurn, *, at_once: bool = False) -> None:
        live.turn = turn
        if turn.question is not None:
            turn.question.target = live.cell
        live.begun += 1
        in_memory = self.entities.live
        in_memory[live.entity] = in_memory.pop(live.entity)  # used last
        live.used = self._clock.current_time()
        if at_once and type(turn.message) in self._sync_handlers:
            live.cell.handle_or_enqueue(turn)
        else:  # an async one too: a kill before its coroutine begins would leave that unawaited
            live.cell.enqueue(turn)

    def _begin_next(self, live: Live) -> None:
        """Begin the next command that an asker still waits for: what was cancelled or timed out before is not done."""
        while live.waiting:
            turn = live.waiting.popleft()
            if turn.is_wanted:
                self._begin(live, turn)
                return
            if turn.command is not None and live.underway is not None:
                del live.underway[turn.command]
            self.under_way.withdraw(turn)

    def _is_new(self, live: Live, turn: CommandTurn, command: str) -> bool:
        """Return whether a command with an id was not given before; if it was, see to its answer."""
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
            self.under_way.refuse(turn, CommandReused(what, command=command, partition=self.number, first=offset))
        elif first is not None:
            first.also = first.also or []
            first.also.append(turn)
            if not first.settled:  # else it only waits for the disk
                turn.wait_for(live.cell)
        elif known is not None:
            self.start_task(self._repeat, turn, known[0])
        return False

    async def _repeat(self, turn: CommandTurn, offset: int) -> None:
        """Answer with the reply in the log."""
        try:
            reply = (await self.access.row(offset)).column("_reply")[0].as_py()
            self.under_way.send(turn, self.settings.codec.decode(reply, _expected(turn.message)))
        except ShardLost:
            raise
        except JournalBehind as error:
            raise ShardLost(str(error), shard=self.number) from error
        except Exception as error:  # noqa: BLE001 - it is the command's: its class may have changed
            self.under_way.refuse(turn, error)

    async def _load(self, entity: str) -> None:
        """Read an entity, and give it the commands that came meanwhile."""
        entities = self.entities
        await entities.until_written(entity)
        try:
            live = await load(self, entity)
        except ShardLost:
            raise
        except (JournalError, DurableError) as error:
            if isinstance(error, ReplayFailed):
                logger.error("%s", error, extra={"event": "replay_failed"})
                entities.note_unreadable(error)
            for turn in entities.take_waiting(entity):
                self.under_way.refuse(turn, fresh(error))
            return
        turns = entities.take_waiting(entity)
        if not adopt(self, live.actor, name=_name_of(entity)):
            return  # the shard is ending, and gives the commands up
        live.cell = local_ref(live.actor)
        if entities.is_empty:
            self._sweep_later()
        entities.add(live, self._clock.current_time())
        for turn in turns:
            if turn.is_wanted:
                self._dispatch(turn)
            else:
                self.under_way.withdraw(turn)
        entities.make_room()

    # Commands, on their way out.

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        clock = self._time
        return int(clock() * 1e6)

    def finished(self, turn: CommandTurn, value: Any) -> None:
        """Queue the rows of a handler that has returned, and its answer behind them. Raises if the answer cannot be kept."""
        live = turn.live
        assert live is not None
        if live.failed is not None:
            raise live.failed
        if type(value) not in IMMUTABLE:
            value = copy_of(value)
        rows = live.recorded
        if turn.command is not None:
            reply = self.settings.codec.encode(value, _expected(turn.message))
            if not rows:
                rows.append(LogRow(live, ANSWER, self.now(), command=turn.command))
            if live.size + len(reply) > MOST_BYTES:
                raise ValueError(f"the events and the answer of one command have more than {MOST_BYTES} bytes")
            rows[-1].reply, rows[-1].body = reply, turn.body
        turn.settled = True
        if self._unwritable is not None and (rows or live.own):
            release(live.actor)  # its state has what is not written
            self.failed(turn, fresh(self._unwritable))
            return
        turn.value, turn.tells = value, live.tells
        if turn.question is not None:
            turn.question.target = self.place  # the asker waits for the disk, and no more for a handler
        for each in turn.also or ():
            if each.question is not None:
                each.question.target = self.place
        if turn.reminder is not None:
            self.reminders.handled.add(turn.reminder.id)
            live.own = [self.reminders.row(self.own, FIRED, self.now(), turn.reminder), *(live.own or ())]
        if rows or live.own:
            turn.rows, turn.size = self._take_rows(live)
            live.ticket = self._commits.put(turn)
            if live.since >= self._snapshot_every or self.own.since > self._snapshot_every:
                self._write_snapshots(live)
        else:
            turn.rows, turn.size = (), 0
            if live.ticket > self._commits.written:
                self._commits.put(turn)
            else:
                self.done(turn)
        live.tells = live.turn = None
        if live.waiting:
            self._begin_next(live)

    def commit(self, live: Live) -> trio.Event | None:
        """Queue what an entity has recorded in the middle of a handler."""
        if live.failed is not None:
            raise live.failed
        if not live.recorded and not live.own and not live.tells and live.ticket <= self._commits.written:
            return None
        if self._unwritable is not None:
            live.failed = fresh(self._unwritable)
            raise live.failed
        event = trio.Event()
        rows, size = self._take_rows(live)
        live.ticket = self._commits.put(CommitPart(self, rows, size, event, live.entity, live.tells or ()))
        live.tells = None
        if live.turn is not None and live.turn.part is None:
            live.turn.part = live.ticket
        self._write_snapshots(live)
        return event

    def _take_rows(self, live: Live) -> tuple[Sequence[LogRow], int]:
        """Take what an entity has recorded, and about its size."""
        rows = live.recorded
        live.recorded = []
        if live.own is not None:
            self.own.since += len(live.own)
            rows = [*live.own, *rows]
            live.own = None
        size, live.size = live.size, 0
        return rows, size

    def _write_snapshots(self, live: Live) -> None:
        """Queue the state of an entity, and the shard's reminders, if enough rows have come: each alone, because it may be large."""
        every, own, reminders = self._snapshot_every, self.own, self.reminders
        if own.since > every and own.since > 2 * len(reminders.pending) and reminders.size <= SNAPSHOT_BYTES:
            own.since = 0
            self.write([LogRow(own, SNAPSHOT, self.now())], trio.Event())
        if live.since < every:
            return
        live.since = 0
        row = LogRow(live, SNAPSHOT, self.now(), version=self.settings.snapshots.layout)
        try:
            row.state = self.settings.snapshots.state(live)
        except Exception as error:  # noqa: BLE001 - the events have everything, so commands go on
            where = f"{self.settings.cls.__name__} {live.entity!r:.100}"
            logger.error("%s: no snapshot, its state cannot be kept: %s", where, error, extra={"event": "snapshot"})
            return
        size = row.size + sum(map(len, row.state.values()))
        live.ticket = self._commits.put(CommitPart(self, [row], size, trio.Event()))

    def placed(self, row: LogRow, offset: int) -> None:
        """Record the offset of a row that is no event, or has the answer of a command; they come in the order of the log."""
        live = row.live
        if row.body is not None and row.command is not None:
            if live.commands is None:
                live.commands = {}
            live.commands[row.command] = (offset, row.body)
            if len(live.commands) > self._remember:
                del live.commands[next(iter(live.commands))]
        if row.kind is ERASED:
            live.snapshot = offset  # rows before it go
        if row.kind is SNAPSHOT:
            live.snapshot = offset
            row.data = self.reminders.pack() if row.state is None else self.settings.snapshots.pack(row.state, live)
        elif live is self.own and row.data is not None and row.kind is not OWNED:
            self.reminders.placed(row)

    def done(self, turn: CommandTurn) -> None:
        """Answer: everything up to the command's last row is on the disk."""
        if turn.tells:
            self.under_way.tell_all(self.ref.path, turn.entity, turn.tells)
        if turn.command is not None and turn.live is not None and turn.live.underway is not None:
            del turn.live.underway[turn.command]
        if self.reminders.pending or turn.reminder is not None:
            self._reminder_times.done(turn.command)
        self.under_way.send(turn, turn.value)

    def part_done(self, entity: str, tells: Sequence[tuple[Ref[Any], Any]]) -> None:
        """Send the messages of an entity that waited for rows in the middle of a handler."""
        self.under_way.tell_all(self.ref.path, entity, tells)
        self._reminder_times.arm()

    def failed(self, turn: CommandTurn, error: BaseException) -> None:
        """Drop an entity that ended on a command. Those behind it are for its next life."""
        if turn not in self.under_way.turns:
            return  # the shard has given it up
        live = turn.live
        assert live is not None
        if live.own is not None:
            self.reminders.withdraw(live.own)
            live.own = None
        behind, live.waiting = list(live.waiting or ()), None
        goes_on = self.place.phase is ActorPhase.RUNNING
        failed = isinstance(error, ActorStopped) and isinstance(error.reason, Failed)
        if goes_on and not (failed or turn.running) and live.begun > 1:
            # An earlier command of this life has called `stop`. Without an earlier one, the next life might end at once too, for ever.
            turn.settled = False
            behind.insert(0, turn)
        else:
            if isinstance(live.failed, JournalError):
                error = live.failed
            elif isinstance(error, ActorStopped) and failed:
                # Not if it ended with its shard or its node: then a command with an id is asked again.
                cause = error.__cause__
                error = CommandFailed(error.detail, actor=error.actor, reason=error.reason, message=error.message)
                error.__cause__ = cause
            self.under_way.refuse(turn, error)
        if self.entities.live.get(live.entity) is live:  # otherwise `_dispatch` has found it ended
            self.entities.drop(live)
        if goes_on:
            for each in behind:
                self._dispatch(each)

    # Erasing.

    @handles
    def erase(self, m: Erase) -> None:
        """End an entity and erase its rows."""
        question = self.place.take_question()  # not `reply_later`: `_give_up` fails it
        assert question is not None  # only `Shards.erase` sends it
        refusal = self._refusal or self._unwritable
        if refusal is not None:
            question.fail(fresh(refusal))
        else:
            self._erasing.begin(m.entity, question)

    def write(self, rows: list[LogRow], written: trio.Event) -> None:
        """Queue rows; the event is set when they are on the disk."""
        size = sum(row.size for row in rows)
        if any(row.live is self.own and row.kind is SNAPSHOT for row in rows):
            size += self.reminders.size
        self._commits.put(CommitPart(self, rows, size, written))

    # Reminders.

    @handles
    def due(self, _: _Due) -> None:
        """Give entities the reminders that are due."""
        self._reminder_times.remind()

    def wake_in(self, seconds: float) -> None:
        """Look at the reminders in so many seconds, and at no other time; not while nothing can be written."""
        if self._unwritable is None:
            self.timers.once("due", seconds, _Due())

    # Trimming.

    @handles
    def trim(self, _: _Trim) -> None:
        """Have the log drop old rows."""
        self.start_soon(self._trim)

    async def _trim(self) -> None:
        self._trim_in(await trim(self.access.journal, self.number, self.ref.path, self.settings))

    def _trim_in(self, seconds: float) -> None:
        self.timers.once("trim", seconds, _Trim())

    @handles
    def finish(self, _: Finish) -> None:
        """Answer when no command is under way."""
        self.start_soon(self._finish, self.reply_later())

    async def _finish(self, reply: Reply[None]) -> None:
        await self._until_finished()
        reply.send(None)

    @handles
    def leave(self, _: Leave) -> None:
        """End when no command is under way."""
        self.start_soon(self._leave)

    async def _leave(self) -> None:
        await self._until_finished()
        release(self)

    async def _until_finished(self) -> None:
        # Not in a handler: meanwhile the shard takes the commands that commands under way ask.
        while self.under_way:
            await self.under_way.until_one_is_settled()

    # Passivation.

    @handles
    def sweep(self, _: _Sweep) -> None:
        """Drop entities that had no command for some time."""
        self.entities.sweep(self._clock.current_time() - self.settings.terms.limits.idle)
        if not self.entities.is_empty:
            self._sweep_later()

    def _sweep_later(self) -> None:
        self.timers.once("sweep", self.settings.terms.limits.idle / 4, _Sweep())

    @handles
    def count(self, _: GetShardStatistics) -> ShardStatistics:
        """Answer with the counters."""
        return ShardStatistics(
            len(self.entities.live),
            len(self.entities.loading),
            len(self.under_way),
            self._commits.written,
            self._commits.end,
            self.entities.loads,
            len(self.entities.unreadable),
            self._repeated,
        )


def _expected(question: Any) -> Any:
    return reply_type(type(question)) if isinstance(question, Asks) else Any


def _name_of(entity: str) -> str:
    """Return an id as the name of an actor, which is printable, has no slash and does not begin with a dollar."""
    quoted = entity.replace("%", "%25").replace("/", "%2F")
    if not quoted.isprintable():
        quoted = "".join(each if each.isprintable() else quote(each) for each in quoted)
    return f"%24{quoted[1:]}" if quoted.startswith("$") else quoted
