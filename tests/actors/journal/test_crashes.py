"""The process dies, or the power fails, at each call that changes a file: what was answered is there whole, the rest whole or not at all."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from tests.pace import every

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from tests.actors.journal.disk import MEMORY, Disk, Files, Watch  # noqa: E402

from levada.actors.journal import Deliver, JournalConfig, JournalError, Keyed, StageRows, Store  # noqa: E402
from levada.actors.journal.delivering import deliver as deliver_staged  # noqa: E402
from levada.actors.journal.delivering import stage_rows  # noqa: E402

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("who", pa.string())])
CONFIG = JournalConfig(
    partitions=2, segment_bytes=2048, block_rows=20, block_bytes=1024, max_bytes=1 << 20, retain_bytes=None
)
KEYED = attrs.evolve(CONFIG, keyed=Keyed(entity="who"))

Rows = tuple[tuple[int, int], ...]
"""The rows of a partition: the offset and the number of each."""
Seen = tuple[Rows, ...]
"""All rows that a reader sees, by partition."""


def rows(start: int, stop: int) -> Any:
    numbers = range(start, stop)
    return pa.record_batch(
        [pa.array(numbers, pa.int64()), pa.array([f"e{n // 10 % 3}" for n in numbers])], schema=SCHEMA
    )


def seen(store: Store) -> Seen:
    first = store.extent().first
    return tuple(
        tuple(
            (offset, number)
            for start, batch in store.batches(partition, first[partition])
            for offset, number in enumerate(batch.column("n").to_pylist(), start)
        )
        for partition in sorted(first)
    )


@attrs.frozen
class Action:
    """Something that is done with a journal."""

    do: Callable[[Store], object]
    apart: bool = False
    """Whether its rows in one partition have nothing to do with those in another one."""
    again: bool = False
    """Whether it may be done again, and then does nothing more."""
    staged: bool = False
    """Whether it needs staged rows, which a power failure may take: then it fails, and the action behind it stages them again."""


def append(*parts: tuple[int, int, int]) -> Action:
    """Return an append: for each part, the partition and the numbers."""
    return Action(lambda store: store.append([(number, rows(start, stop)) for number, start, stop in parts]))


def group(*parts: tuple[int, int, int]) -> Action:
    """Return appends of several senders that are written together, one to a partition."""
    return Action(
        lambda store: store.append_group([store.prepare(number, rows(start, stop)) for number, start, stop in parts]),
        apart=True,
    )


def deliver(batch: int, *parts: tuple[int, int, int]) -> Action:
    """Return a delivery."""
    return Action(
        lambda store: store.deliver(
            "q",
            batch,
            (
                (number, message)
                for number, start, stop in parts
                for message in store.pack([store.prepare(number, rows(start, stop))[1]])
            ),
        ),
        again=True,
    )


def stage(batch: int, *parts: tuple[int, int, int], attempt: int = 0) -> Action:
    """Return the staging of rows for a delivery."""
    return Action(
        lambda store: [
            stage_rows(store, StageRows("q", batch, part, attempt, [], at=0), rows(start, stop))
            for part, start, stop in parts
        ],
        again=True,
        staged=True,
    )


def hand_in(batch: int, *parts: tuple[int, int, int], attempt: int = 0) -> Action:
    """Return the delivery of staged rows: the same question each time, as if answers were lost."""
    winners = {part: attempt for part, _, _ in parts}
    question = Deliver("q", batch, winners, {part: stop - start for part, start, stop in parts})
    return Action(lambda store: [deliver_staged(store, question) for _ in range(2)], again=True, staged=True)


def hand_in_anew(batch: int, *parts: tuple[int, int, int]) -> Action:
    """Return a delivery as Spark's sink has it when a query starts again: the rows are staged under another attempt each time."""
    attempts = itertools.count(1)

    def do(store: Store) -> None:
        stage(batch, *parts, attempt=(attempt := next(attempts))).do(store)
        hand_in(batch, *parts, attempt=attempt).do(store)

    return Action(do, again=True)


def erase(who: str) -> Action:
    return Action(lambda store: [list(store.erase(who, partition=number)) for number in (0, 1)], apart=True, again=True)


def commit(**offsets: int) -> Action:
    """Return the commit of a group, for which rows are kept."""
    return Action(
        lambda store: store.commit_group("g", {int(name[1:]): offset for name, offset in offsets.items()}), again=True
    )


@attrs.frozen
class Story:
    """Actions on a journal, of which the first are not watched."""

    before: Sequence[Action]
    actions: Sequence[Action]
    config: JournalConfig = CONFIG
    call: str = "rename"
    """A call that must come, or the story is not about what it says: this one begins a segment."""
    retained: bool = False
    """Whether rows are deleted; a crash may leave some that were about to go."""


STORIES = {
    "appends": Story(
        [append((0, 0, 3))],
        [
            append((0, 100, 101)),
            append((0, 200, 290)),
            append((1, 300, 400)),
            append((0, 500, 560), (1, 600, 690), (0, 700, 701)),
        ],
    ),
    "groups": Story([append((0, 0, 3))], [group((0, 100, 190), (1, 200, 201)), group((1, 300, 400), (0, 400, 401))]),
    "deliveries": Story(
        [append((0, 0, 3))],
        [deliver(0, (0, 100, 170), (1, 200, 270)), append((1, 300, 302)), deliver(1, (0, 400, 401), (1, 500, 590))],
    ),
    "deliveries of staged rows": Story(
        [append((0, 0, 3))],
        [
            stage(0, (0, 100, 130), (1, 200, 230), (2, 300, 301)),
            hand_in(0, (0, 100, 130), (1, 200, 230), (2, 300, 301)),
            hand_in_anew(0, (0, 100, 130), (1, 200, 230), (2, 300, 301)),
        ],
        call="unlink",
    ),
    "small blocks that are merged": Story(
        [*(append((0, n, n + 1)) for n in range(70))],
        [append((0, 100, 101)), append((0, 200, 260)), append((0, 300, 301))],
        attrs.evolve(CONFIG, segment_bytes=20_000),
        call="link",
    ),
    "erasures": Story(
        [append((0, 0, 90)), append((1, 100, 150))],
        [append((0, 200, 230)), erase("e1"), append((0, 300, 303))],
        KEYED,
        call="link",
    ),
    "retention": Story(
        [
            Action(lambda store: store.declare_group("g")),
            append((0, 0, 100)),
            append((0, 100, 190)),
            append((1, 0, 90)),
        ],
        [commit(p0=120), append((0, 200, 290)), commit(p0=250, p1=90), append((1, 300, 400))],
        call="unlink",
        retained=True,
    ),
}


@attrs.define
class Trial:
    """Compares what is left of a story with what was answered."""

    story: Story
    base: Path
    truth: list[Seen] = attrs.field(factory=list)
    """All rows before the first action, and behind each."""

    def live(self, disk: Disk) -> Watch:
        """Do all of it; return what was seen on the disk."""
        folder = self.base / "life"
        with self.open(folder) as store:
            for action in self.story.before:
                action.do(store)
            self.truth.append(seen(store))
            with disk.watch(folder, lambda: len(self.truth) - 1) as watch:
                for action in self.story.actions:
                    action.do(store)
                    self.truth.append(seen(store))
        assert watch.calls[self.story.call] > 0
        return watch

    def open(self, folder: Path) -> Store:
        return Store.open(folder / "journal", SCHEMA, self.story.config)

    def check(self, files: Files, told: int, *, exactly: Seen | None = None, unsynced_lost: bool = True) -> Seen:
        """Open what is left, and compare it; then do what is missing, and a little more. Return what was there."""
        folder = files.write(self.base / "left")
        try:
            with self.open(folder) as store:
                found = seen(store)
                assert found == exactly or (exactly is None and self.may_be(found, told))
                actions = self.story.actions[told : told + 2]
                whole = not actions or self.is_behind(found, told)
                if not whole and not actions[0].again and not self.is_behind(found, told - 1):
                    return found  # one of several senders would send again, and the others not
                for place, action in enumerate(actions, told):
                    if action.again or not self.is_behind(seen(store), place):
                        try:
                            action.do(store)
                        except JournalError:
                            assert unsynced_lost
                            assert action.staged
                            continue
                    assert self.is_behind(seen(store), place)
                behind = seen(store)
            with self.open(folder) as store:
                assert seen(store) == behind
                assert store.statistics().bytes_cut == 0
            return found
        finally:
            shutil.rmtree(folder)

    def may_be(self, found: Seen, told: int) -> bool:
        """Whether a crash may leave these rows after so many answers."""
        if self.is_behind(found, told - 1) or told == len(self.story.actions):
            return self.is_behind(found, told - 1)
        if not self.story.actions[told].apart:
            return self.is_behind(found, told)
        return all(
            each in pair for each, pair in zip(found, zip(*self.truth[told : told + 2], strict=True), strict=True)
        )

    def is_behind(self, found: Seen, place: int) -> bool:
        """Whether these are the rows behind an action."""
        wanted = self.truth[place + 1]
        if not self.story.retained:
            return found == wanted
        former = self.truth[max(place, 0)]
        return all(
            each[-len(rows) :] == rows and set(each[: -len(rows)]) <= set(old)
            for each, rows, old in zip(found, wanted, former, strict=True)
        )


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.mark.ci
@pytest.mark.parametrize("name", STORIES)
def test_whatever_a_crash_leaves_is_what_was_answered(base: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    trial = Trial(STORIES[name], base)
    for number, moment in enumerate(trial.live(Disk(monkeypatch)).moments):
        trial.check(moment.killed(), moment.told, unsynced_lost=False)
        for seed in range(0 if number % every(2) else 8 // every(8)):
            chance = random.Random(f"{number} {seed}")
            trial.check(moment.power_failure(chance, names_lost=chance.random() < 0.5), moment.told)


@pytest.mark.ci
@pytest.mark.parametrize("name", STORIES)
def test_whatever_a_crash_leaves_that_cuts_a_recovery_short_is_what_was_answered(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trial, disk = Trial(STORIES[name], base), Disk(monkeypatch)
    for number, moment in enumerate(trial.live(disk).moments):
        if number % every(12):
            continue
        chance = random.Random(number)
        folder = moment.power_failure(chance).write(base / "again")
        shown: list[Seen] = []
        with disk.watch(folder, partial(len, shown)) as watch, trial.open(folder) as store:
            shown.append(seen(store))
        shutil.rmtree(folder)
        for each in watch.moments:
            exactly = shown[0] if each.told else None
            trial.check(each.killed(), moment.told, exactly=exactly)
            lost = chance.random() < 0.5
            trial.check(each.power_failure(chance, names_lost=lost), moment.told, exactly=exactly)
