"""Runs a history of a journal on a simulated disk, and tells what went wrong."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import attrs
import pyarrow as pa
from tests.simulation.history import History, Life, Operation
from tests.simulation.oracle import Oracle, Part, Wrong, command, entity

from levada.actors.journal import (
    Append,
    Appended,
    CommandReused,
    CopyRows,
    Deliver,
    Fenced,
    JournalConfig,
    JournalDamaged,
    JournalError,
    JournalFull,
    Keyed,
    StageRows,
    Store,
)
from levada.actors.journal.appends import Appends, ToldRows, WriteJob
from levada.actors.journal.delivering import deliver, stage_rows
from levada.framework.platform import PLATFORM, Platform
from levada.framework.testing.simulation import (
    CHANGES,
    Call,
    Crashed,
    Fault,
    SimulatedDisk,
    SimulatedFiles,
)

__all__ = ["Outcome", "run"]

P = ParamSpec("P")
T = TypeVar("T")

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("who", pa.string()), ("command", pa.string())])
FOLDER = "/data/journal"
LOGGER = logging.getLogger("levada.actors.journal")


@attrs.frozen
class Outcome:
    """What became of a history."""

    wrong: str
    """What the journal did wrong; empty if nothing."""
    history: History
    """The same, with each fault at the name of its call."""
    crashes: int
    story: list[str]
    """What happened, in words."""


class _Inline(Executor):
    """Runs at once what threads would run."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # as a pool of threads does
            done.set_exception(error)
        return done


class _Ended(Exception):
    """The life has ended before its operations."""


def schema_of(more: int) -> pa.Schema:
    """Return the columns, with some that were added."""
    return pa.schema([*SCHEMA, *(pa.field(f"more {place}", pa.bool_()) for place in range(more))])


def batch_of(first: int, count: int, more: int = 0) -> Any:
    """Return rows with these numbers, which are one command."""
    numbers = pa.array(range(first, first + count), pa.int64())
    who = pa.array([entity(n) for n in range(first, first + count)])
    commands = pa.array([command(first)] * count)
    added = [pa.array([True] * count)] * more
    return pa.record_batch([numbers, who, commands, *added], schema=schema_of(more))


def place(share: float, count: int) -> int:
    """Return which of so many a share from 0 to 1 means."""
    return min(int(share * count), count - 1)


def run(history: History, files: type[SimulatedFiles] = SimulatedFiles) -> Outcome:
    """Run a history.

    Args:
        history: what happens.
        files: makes the files of each process.
    """
    return _Run(history, files).all()


class _Run:
    def __init__(self, history: History, files: type[SimulatedFiles]) -> None:
        self.history = history
        self.now = 1000.0
        self.disk = SimulatedDisk(history.model, sector=history.sector, time=lambda: self.now)
        config = dict(history.config)
        remember = config.pop("remember", 1_000_000)
        keyed = None
        if config.pop("keyed"):
            keyed = Keyed(entity="who", command="command", body=("n", "who"), remember=remember)
        self.config = JournalConfig(keyed=keyed, **config)
        self.oracle = Oracle(history.config)
        self.random = random.Random(0)
        self.files = files
        self.story: list[str] = []
        self.hits: list[tuple[Call, Fault]] = []
        self.calls = 0
        self.crashes = 0
        self.columns = 0
        """Columns that were added."""
        self.closed = self.rotten = False
        self.power_failed = False
        """Whether a power failure may have brought the names of staged rows back, without all of the rows."""

    def all(self) -> Outcome:
        lives: list[Life] = []
        wrong, level = "", LOGGER.level
        LOGGER.setLevel(logging.CRITICAL)  # each recovery has something to say
        for life in [*self.history.lives, Life()]:
            self.hits, self.calls = [], 0
            life = self.rot(life)
            try:
                self.live(life)
            except Wrong as error:
                wrong = str(error)
            except Exception as error:  # noqa: BLE001  # of any kind, it is the failure to be told
                wrong = f"{type(error).__name__}: {error}"
            lives.append(attrs.evolve(life, aims=[], faults=self.hits))
            if wrong:
                break
        LOGGER.setLevel(level)
        named = attrs.evolve(self.history, lives=lives[: len(self.history.lives)])
        return Outcome(wrong, named, self.crashes, self.story)

    def rot(self, life: Life) -> Life:
        """Turn a bit; return the life with its name."""
        if not life.rot or not self.closed:
            return life
        self.rotten = True
        where, at, bit = life.rot
        if not isinstance(where, str):
            paths = [path for path in self.disk.paths() if self.disk.find(path).cache]
            where = paths[place(where, len(paths))]
            at = place(at, len(self.disk.find(where).cache))
        if where not in self.disk.paths():
            return life  # a smaller history has other files
        self.tell(f"bit {bit} of byte {at} of {where} turns")
        self.disk.rot(where, at, bit)
        self.oracle.unsynced_may_go = True
        return attrs.evolve(life, rot=[where, at, bit])

    def tell(self, text: str) -> None:
        self.story.append(text)

    def live(self, life: Life) -> None:
        known, aims = dict(life.faults), list(life.aims)

        def happens(call: Call) -> Fault | None:
            fault = known.get(call)
            if aims and (call.kind == aims[0][0] or (not aims[0][0] and call.kind in CHANGES)):
                self.calls += 1
                if self.calls == aims[0][1]:
                    fault, self.calls = aims.pop(0)[2], 0
            if fault is not None:
                self.hits.append((call, fault))
                self.tell(f"  {call}: {fault}")
            return fault

        files = self.files(self.disk, faults=happens)
        platform = Platform(
            files=files, time=lambda: 1.7e9 + self.now, monotonic=lambda: self.now, perf_counter=lambda: self.now,
            token_bytes=self.random.randbytes, thread_pool=lambda *_: _Inline(), pid=lambda: 1, host=lambda: "machine",
        )  # fmt: skip
        self.now += 1
        self.columns = max(self.columns, life.columns)
        self.closed = False
        token = PLATFORM.set(platform)
        try:
            self.work(life)
        except Crashed:
            self.tell("  crashed")
            self.crashes += 1
        except _Ended:
            pass
        finally:
            PLATFORM.reset(token)
        self.disk.size = None
        if life.end == "power":
            self.tell(f"the power fails: {life.seed}, {life.share}")
            self.disk.power_failure(life.seed, share=life.share)
            self.oracle.unsynced_may_go = self.power_failed = True
        files.kill()

    def work(self, life: Life) -> None:
        store = self.open()
        for place, operation in enumerate(life.operations):
            self.now += 0.05
            if place == life.full:
                self.tell("the disk is full")
                self.disk.full()
            elif place == life.full + 1:
                self.disk.size = None
            self.tell(f"{operation}")
            if operation[0] == "reopen":
                store.close()
                store = self.open()
            else:
                self.do(store, operation)
        self.disk.size = None
        left = [path for path in self.disk.paths() if path.endswith(".old")]
        if left and not self.hits and not self.rotten:
            raise Wrong(f"files with rows that were erased or merged are left: {left}")
        self.check(store, self.oracle.compare)
        if life.end == "close":
            store.close()
            self.closed = not self.hits

    def check(self, store: Store, compare: Callable[[Store], None]) -> None:
        """Look at the rows; after a fault at a read the life ends."""
        hits = len(self.hits)
        try:
            compare(store)
        except (JournalError, OSError) as error:
            self.tell(f"  {type(error).__name__}: {error}")
            if len(self.hits) == hits and not self.rotten:
                raise
            raise _Ended from error

    def open(self) -> Store:
        hits = len(self.hits)
        self.tell("open")
        try:
            store = self.opened()
        except (JournalError, OSError) as error:
            self.tell(f"  {type(error).__name__}: {error}")
            if len(self.hits) == hits and self.disk.size is None and not self.rotten:
                raise Wrong(f"it cannot be opened: {type(error).__name__}: {error}") from error
            raise _Ended from error
        if store.broken:  # a fault has come behind the recovery, where the opening goes on with an erasure
            self.tell(f"  {store.broken}")
            if len(self.hits) == hits:
                raise Wrong(f"it is broken when it is opened: {store.broken}")
            raise _Ended
        self.oracle.retaining()  # a crash may have come behind the retention of an operation that was cut short
        self.check(store, self.oracle.settle)
        return store

    def opened(self) -> Store:
        schema = schema_of(self.columns)
        try:
            return Store.open(FOLDER, schema, self.config)
        except JournalDamaged as error:
            if not self.rotten:
                raise
            self.tell(f"  {error}; the loss is accepted")
            store = Store.open(FOLDER, schema, attrs.evolve(self.config, accept_loss=True))
            self.oracle.rows_may_be_lost = True
            return store

    def do(self, store: Store, operation: Operation) -> None:
        name, *arguments = operation
        hits = len(self.hits)
        try:
            getattr(self, f"do_{name}")(store, *arguments)
        except JournalFull as error:
            self.tell(f"  {error}")
            if not error.limit and len(self.hits) == hits and self.disk.size is None:
                raise Wrong(f"{name} found the disk full: {error}") from error
        except JournalError as error:
            self.tell(f"  {type(error).__name__}: {error}")
            if len(self.hits) == hits and self.disk.size is None and not self.rotten:
                raise Wrong(f"{name} was refused: {type(error).__name__}: {error}") from error
        if store.broken:
            raise _Ended
        if len(self.hits) > hits or self.disk.size is not None:
            self.check(store, self.oracle.compare)

    @contextmanager
    def in_doubt(
        self, store: Store, parts: Iterable[Part], batch: int | None = None, *, each: bool = False
    ) -> Iterator[None]:
        """Do something that has an effect, or none, if it raises."""
        try:
            yield
        except BaseException as error:
            if store.broken or not isinstance(error, JournalError):
                self.oracle.cut_short(parts, batch, each=each)
            raise
        finally:
            self.oracle.retaining()

    def do_append(self, store: Store, parts: Sequence[Part]) -> None:
        batches = [(number, batch_of(first, count, self.columns)) for number, first, count in parts]
        with self.in_doubt(store, parts):
            places = store.append(batches)
            self.answered([(each.partition, each.first, each.count) for each in places], parts)
            self.oracle.appended(parts)

    def do_group(self, store: Store, parts: Sequence[Part]) -> None:
        prepared = [store.prepare(number, batch_of(first, count, self.columns)) for number, first, count in parts]
        with self.in_doubt(store, parts, each=True):
            places = store.append_group(prepared)
            self.answered([(each.partition, each.first, each.count) for each in places], parts[: len(places)])
            self.oracle.appended(parts[: len(places)], each=True)

    def do_commands(self, store: Store, parts: Sequence[Part]) -> None:
        """Append commands as the journal's writer does; each knows the end."""
        jobs = []
        ends = [len(rows) for rows in self.oracle.rows]
        for number, first, count in parts:
            jobs.append(self.job(batch_of(first, count, self.columns), number, ends[number]))
            ends[number] += count
        with self.in_doubt(store, parts, each=True):
            answers = self.judged(store, jobs)
            places = [(each.partition, each.first, each.count) for each in answers if isinstance(each, Appended)]
            self.answered(places, parts[: len(places)])
            self.oracle.appended(parts[: len(places)], each=True)

    def do_copy(self, store: Store, partition: int, first: int, gap: int, count: int) -> None:
        """Append rows at offsets of their own: a gap, then rows, of which those of the first entity are missing."""
        at, numbers = len(self.oracle.rows[partition]), range(first, first + gap + count)
        there = [number for number in numbers[gap:] if entity(number) != "e0"]
        self.oracle.gone |= {*numbers} - {*there}
        rows: Any = b""
        if there:
            mask = pa.array([number in there for number in numbers])
            whole = batch_of(first, gap + count, self.columns)
            rows = whole.add_column(0, "offset", pa.array(range(at, at + gap + count), pa.int64())).filter(mask)
        parts = [[partition, first, gap + count]]
        with self.in_doubt(store, parts):
            answer = store.copy(CopyRows(rows, partition, at, at + gap + count))
            if answer != Appended(partition, at, gap + count):
                raise Wrong(f"{gap + count} offsets of partition {partition} at {at} were answered with {answer}")
            self.oracle.appended(parts)

    def do_repeat(self, store: Store, which: float) -> None:
        """Give a command again that is known, and one that comes too late."""
        known = self.oracle.known_commands()
        if known:
            number, first, offset, count = known[place(which, len(known))]
            found = self.judged(store, [self.job(batch_of(first, count, self.columns), number, None)])
            if found != [Appended(number, offset, 0, count)]:
                raise Wrong(f"{command(first)} in partition {number} at {offset} was answered with {found}")
            late = self.judged(store, [self.job(batch_of(1 << 40, 1, self.columns), number, store.end(number) + 1)])
            if late != [Fenced(number, store.end(number))]:
                raise Wrong(f"an append behind the end was answered with {late}")

    def do_reuse(self, store: Store, which: float) -> None:
        """Give another command the id of one that is known."""
        known = self.oracle.known_commands()
        if known:
            number, first, _, count = known[place(which, len(known))]
            rows = batch_of(first, count, self.columns)
            other = rows.set_column(0, SCHEMA.field(0), pa.array([1 << 41] * count, pa.int64()))
            try:
                found = self.judged(store, [self.job(other, number, None)])
            except CommandReused:
                return
            raise Wrong(f"{command(first)} with another body was answered with {found}")

    @staticmethod
    def job(rows: Any, partition: int, at: int | None) -> WriteJob:
        return WriteJob(None, ToldRows(), Append(rows, partition=partition, at=at, waits=False))

    @staticmethod
    def judged(store: Store, jobs: Sequence[WriteJob]) -> list[Appended | Fenced]:
        answers, error = Appends(store, None).write(jobs)
        if error is not None and not answers:
            raise error
        found = []
        for _, answer in answers:
            if isinstance(answer, Exception):
                raise answer
            found.append(answer)
        return found

    def do_many(self, store: Store, partition: int, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.do_append(store, [[partition, number, 1]])

    def answered(self, places: Sequence[tuple[int, int, int]], parts: Sequence[Part]) -> None:
        ends = [len(rows) for rows in self.oracle.rows]
        for (partition, first, count), (number, _, wanted) in zip(places, parts, strict=True):
            if (partition, first, count) != (number, ends[number], wanted):
                raise Wrong(
                    f"{wanted} rows for partition {number} at {ends[number]} were answered as {partition, first, count}"
                )
            ends[number] += wanted

    def do_deliver(self, store: Store, batch: int, parts: Sequence[Part]) -> None:
        known = self.oracle.batches.get(batch)
        if known is not None:
            done = store.deliver("q", batch, [])
            if not done.already or done.ranges != known:
                raise Wrong(f"batch {batch} was delivered to {known}, and now: {done}")
            return
        messages = [
            (number, message)
            for number, first, count in parts
            for message in store.pack([store.prepare(number, batch_of(first, count, self.columns))[1]])
        ]
        with self.in_doubt(store, parts, batch):
            done = store.deliver("q", batch, messages)
            self.delivered(batch, parts, done.ranges, already=done.already)

    def delivered(self, batch: int, parts: Sequence[Part], ranges: Any, *, already: bool) -> None:
        self.oracle.appended(parts, batch)
        if already or ranges != self.oracle.batches[batch]:
            raise Wrong(
                f"batch {batch} was answered with {ranges}, already {already}; it should be {self.oracle.batches[batch]}"
            )

    def do_stage(self, store: Store, batch: int, parts: Sequence[Part], attempt: int) -> None:
        for part, first, count in parts:
            stage_rows(store, StageRows("q", batch, part, attempt, [], at=0), batch_of(first, count, self.columns))

    def do_hand_in(self, store: Store, batch: int, parts: Sequence[Part], attempt: int) -> None:
        known, rows = self.oracle.batches.get(batch), {part: count for part, _, count in parts}
        question = Deliver("q", batch, dict.fromkeys(rows, attempt), rows)
        if known is not None:
            try:
                done = deliver(store, question)
            except JournalError as error:
                if type(error) is not JournalError or not self.power_failed:
                    raise
                self.tell(f"  {error}")
                return
            if not done.already or done.ranges != known:
                raise Wrong(f"batch {batch} was delivered to {known}, and now: {done}")
            self.require_unstaged(store, batch)
            return
        try:
            self.do_stage(store, batch, parts, attempt)
        except JournalError as error:
            self.tell(f"  {error}")  # an earlier attempt, of which a part was lost
            return
        placed = [(part % self.oracle.partitions, first, count) for part, first, count in parts]
        with self.in_doubt(store, placed, batch):
            done = deliver(store, question)
            self.delivered(batch, placed, done.ranges, already=done.already)
        self.require_unstaged(store, batch)

    def require_unstaged(self, store: Store, batch: int) -> None:
        """Nothing stays staged of a batch that was answered."""
        if store.staged("q", batch) and not self.hits:
            raise Wrong(f"batch {batch} was answered, and has staged rows: {sorted(store.staged('q', batch))}")

    def group_change(
        self, store: Store, name: str, offsets: dict[int, int] | None, change: Callable[[], object]
    ) -> None:
        try:
            change()
        except BaseException:
            self.oracle.group_set(name, offsets, surely=False)
            raise
        else:
            self.oracle.group_set(name, offsets, surely=True)
            for number in offsets or ():
                self.oracle.synced[number] = len(self.oracle.rows[number])
        finally:
            self.oracle.retaining()

    def do_declare(self, store: Store, name: str, at: Any) -> None:
        if name not in store.groups():
            extent = store.extent()
            self.group_change(
                store, name, dict(extent.whole if at == "first" else extent.end), lambda: store.declare_group(name, at)
            )

    def do_commit(self, store: Store, name: str, shares: dict[str, float]) -> None:
        if name in store.groups():
            extent = store.extent()
            offsets = {
                int(number): extent.first[int(number)]
                + int(share * (extent.end[int(number)] - extent.first[int(number)]))
                for number, share in shares.items()
            }
            self.group_change(store, name, offsets, lambda: store.commit_group(name, offsets))

    def do_forget(self, store: Store, name: str) -> None:
        self.group_change(store, name, None, lambda: store.forget_group(name))

    def do_erase(self, store: Store, partition: int, who: str) -> None:
        chosen = self.oracle.erasing(partition, who)
        for _ in store.erase(who, partition=partition):
            pass
        self.oracle.gone |= chosen
        self.oracle.fading -= chosen

    def do_trim(self, store: Store, partition: int, who: str, share: float, first: int) -> None:
        """Erase the older rows of an entity, with an append between two steps."""
        before = int(share * store.end(partition))
        chosen = self.oracle.erasing(partition, who, before)
        for step, _ in enumerate(store.erase(who, partition=partition, before=before)):
            if step < 10:
                self.do_append(store, [[partition, first + step, 1]])
        self.oracle.gone |= chosen
        self.oracle.fading -= chosen

    def do_prune(self, store: Store, partition: int, of: int, share: float, first: int) -> None:
        """Take out older rows of all entities: all but each so manieth, with an append between two steps."""
        end, start = int(share * store.end(partition)), store.extent().first[partition]
        ranges = [range(at, min(at + of, end)) for at in range(start, end, of + 1)] if of < 4 else [range(start, end)]
        chosen = self.oracle.pruning(partition, ranges)
        for step, _ in enumerate(store.trim(partition, [each for each in ranges if each])):
            if step < 10:
                self.do_append(store, [[partition, first + step, 1]])
        self.oracle.gone |= chosen
        self.oracle.fading -= chosen
        mark, wanted = store.extent().trimmed.get(partition, 0), max([0, *(each.stop for each in ranges if each)])
        if mark < wanted:
            raise Wrong(f"rows before {wanted} of partition {partition} were trimmed, and the mark is {mark}")

    def do_retain(self, store: Store) -> None:
        try:
            store.retain()
        finally:
            self.oracle.retaining()

    def do_wait(self, store: Store, seconds: float) -> None:
        self.now += seconds

    def do_sync_ends(self, store: Store) -> None:
        store.sync_ends()

    def do_look(self, store: Store) -> None:
        store.look()
