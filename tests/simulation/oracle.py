"""What may be in a journal, as far as its answers tell.

`Oracle` knows the rows that were promised, by partition and offset. An operation that was cut short leaves alternatives: what there is if it
was done, and if not. The next successful opening decides between them, and from then on what was seen is promised.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from levada.actors.journal import OffsetGone, Store

__all__ = ["Oracle", "Wrong"]

Part = Sequence[int]
"""A partition, the number of the first row, and how many rows there are."""
Groups = dict[str, dict[int, int]]


class Wrong(AssertionError):
    """The journal does not hold what it promised, or answers what it should not."""


@attrs.frozen
class _Effect:
    """What an operation adds."""

    rows: Mapping[int, Sequence[int]]
    """The numbers of the rows, by partition."""
    batch: int | None = None
    """The batch that is delivered with it."""


NOTHING = _Effect({})


def entity(number: int) -> str:
    """Return the entity of a row."""
    return f"e{number % 3}"


def command(first: int) -> str:
    """Return the id of the command whose rows begin with this one."""
    return f"c{first}"


class Oracle:
    """Compares a journal with its answers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.partitions: int = config["partitions"]
        self.ages = config.get("retain_time") is not None or config["retain_bytes"] is not None
        self.syncs = config["sync"] == "group"
        self.keyed: bool = config["keyed"]
        self.rows: list[list[int]] = [[] for _ in range(self.partitions)]
        """The rows that were promised, by offset."""
        self.ends: list[list[int]] = [[0] for _ in range(self.partitions)]
        """The offset behind each append."""
        self.synced = [0] * self.partitions
        """The rows before this offset outlive a power failure."""
        self.gone = set[int]()
        """Rows that were erased."""
        self.fading = set[int]()
        """Rows that may be erased."""
        self.may_go = [0] * self.partitions
        """Retention may have deleted the rows before this offset."""
        self.groups: list[Groups] = [{}]
        """Each state that the groups may be in."""
        self.batches: dict[int, dict[int, tuple[int, int]]] = {}
        """The place of each batch that was delivered."""
        self.remember: int = config.get("remember", 1_000_000)
        self._commands: dict[int, int] = {}
        """By the number of a row, the number of the first row of its command."""
        self.effects = [NOTHING]
        """Each effect that the last operation may have had."""
        self.unsynced_may_go = False
        """Whether the power has failed, or a bit has turned: rows that were never synced may be gone."""
        self.rows_may_be_lost = False
        """Whether the journal was opened with a loss that it has told."""

    # What is done

    def appended(self, parts: Iterable[Part], batch: int | None = None, *, each: bool = False) -> None:
        """Rows were promised; if `each` part is an append of its own, it may be lost alone."""
        parts = list(parts)
        for alone in [[part] for part in parts] if each else [parts]:
            self._add(_Effect(self._rows(alone), batch))
        touched = {part[0] for part in parts}
        if self.syncs or batch is not None or (not each and len(touched) > 1):
            for number in touched:
                self.synced[number] = len(self.rows[number])

    def _rows(self, parts: Iterable[Part]) -> dict[int, list[int]]:
        """Return the numbers of the rows by partition; each part is a command."""
        found: dict[int, list[int]] = {}
        for partition, first, count in parts:
            found.setdefault(partition, []).extend(range(first, first + count))
            self._commands |= dict.fromkeys(range(first, first + count), first)
        return found

    def commands(self, partition: int) -> Iterator[tuple[int, int, int]]:
        """Yield the commands all whose rows must be there: the number of the first row, its offset, and how many rows there are."""
        rows, at = self.rows[partition], 0
        for first, same in itertools.groupby(rows, self._commands.__getitem__):
            numbers = list(same)
            if at >= self.may_go[partition] and rows[at] == first and not (self.gone | self.fading) & set(numbers):
                yield first, at, len(numbers)
            at += len(numbers)

    def known_commands(self) -> list[tuple[int, int, int, int]]:
        """Return the commands that the journal must know: the partition of each, and as `commands`."""
        return [
            (partition, *each)
            for partition in range(self.partitions)
            for each in self.commands(partition)
            if each[1] >= len(self.rows[partition]) - self.remember
        ]

    def _add(self, effect: _Effect) -> None:
        place = {}
        for number, rows in effect.rows.items():
            start = len(self.rows[number])
            self.rows[number] += rows
            self.ends[number].append(len(self.rows[number]))
            place[number] = start, len(self.rows[number])
        if effect.batch is not None:
            self.batches[effect.batch] = place

    def cut_short(self, parts: Iterable[Part], batch: int | None = None, *, each: bool = False) -> None:
        """An operation was begun, and may be done or not; if `each` part is an append of its own, each partition may have its own or not."""
        rows = self._rows(parts)
        if not each:
            self.effects = [NOTHING, _Effect(rows, batch)]
            return
        chosen = itertools.product(*([False, True] for _ in rows))
        self.effects = [_Effect(dict(itertools.compress(rows.items(), choice))) for choice in chosen]

    def group_set(self, name: str, offsets: Mapping[int, int] | None, *, surely: bool) -> None:
        """A group was moved, or with None forgotten; if not `surely`, perhaps."""
        moved: list[Groups] = []
        for groups in self.groups:
            if offsets is None:
                moved.append({each: places for each, places in groups.items() if each != name})
            else:
                moved.append({**groups, name: {**groups.get(name, {}), **offsets}})
        self.groups = moved if surely else [*self.groups, *(each for each in moved if each not in self.groups)]

    def erasing(self, partition: int, who: str, before: int | None = None) -> set[int]:
        """An erasure of the rows before an offset begins; return the rows that it is about."""
        chosen = {number for number in self.rows[partition][:before] if entity(number) == who}
        self.fading |= chosen - self.gone
        return chosen

    def pruning(self, partition: int, ranges: Iterable[range]) -> set[int]:
        """The rows at some offsets are to be taken out; return them."""
        chosen = {number for each in ranges for number in self.rows[partition][each.start : each.stop]}
        self.fading |= chosen - self.gone
        return chosen

    def retaining(self) -> None:
        """Rows may be deleted now that all groups have read."""
        for number in range(self.partitions):
            for groups in self.groups:
                read = [offsets.get(number, 0) for offsets in groups.values()]
                if read or self.ages:
                    more = max(len(effect.rows.get(number, ())) for effect in self.effects)
                    self.may_go[number] = max(self.may_go[number], min([*read, len(self.rows[number]) + more]))

    # What is there

    def settle(self, store: Store) -> None:
        """The journal was opened: see which of the alternatives is there. Raises `Wrong` if it is none of them."""
        found = [self._seen(store, number) for number in range(self.partitions)]
        ends = [store.end(number) for number in range(self.partitions)]
        for effect in self.effects:
            if (self.rows_may_be_lost or self._fits(effect, store)) and self._has_batch(store, effect):
                break
        else:
            wanted = [len(rows) for rows in self.rows]
            raise Wrong(f"partitions end at {ends}, promised were {wanted}, and perhaps {self.effects[1:]}")
        self._add(effect)
        for number, end in enumerate(ends):
            if end < len(self.rows[number]):  # unsynced rows are lost, and others may get their offsets
                del self.rows[number][end:]
                self.ends[number] = [*(each for each in self.ends[number] if each < end), end]
        self.effects, self.unsynced_may_go = [NOTHING], False
        self.synced = [len(rows) for rows in self.rows]
        groups = store.groups()
        if groups not in self.groups:
            raise Wrong(f"groups are {groups}, promised was one of {self.groups}")
        self.groups = [groups]
        if self.rows_may_be_lost:
            for rows, here in zip(self.rows, found, strict=True):
                self.fading |= {number for offset, number in enumerate(rows) if offset not in here}
        self._compare(store, found)

    def _fits(self, effect: _Effect, store: Store) -> bool:
        for number, first in store.extent().first.items():
            end, start = store.end(number), len(self.rows[number])
            most = start + len(effect.rows.get(number, ()))
            if end == most:
                continue
            if not self.unsynced_may_go or not self.synced[number] <= end < most or (start < most and end <= start):
                return False
            # Retention may have deleted the first rows of an append whose other rows are lost.
            if end not in self.ends[number] and end != first:
                return False
        return True

    def _has_batch(self, store: Store, effect: _Effect) -> bool:
        perhaps = {each.batch for each in self.effects} - {None}
        return all(
            (store.delivered("q", batch) is not None) is (batch == effect.batch)
            for batch in perhaps
            if batch is not None
        )

    def compare(self, store: Store) -> None:
        """Require that the journal has what was promised, and nothing else; nothing is in doubt."""
        ends = [store.end(number) for number in range(self.partitions)]
        if ends != [len(rows) for rows in self.rows]:
            raise Wrong(f"partitions end at {ends}, promised were {[len(rows) for rows in self.rows]}")
        if store.groups() not in self.groups:
            raise Wrong(f"groups are {store.groups()}, promised was one of {self.groups}")
        self._compare(store, [self._seen(store, number) for number in range(self.partitions)])

    def _seen(self, store: Store, partition: int) -> dict[int, tuple[int, str]]:
        at, seen = store.extent().first[partition], dict[int, tuple[int, str]]()
        while True:
            try:
                for start, batch in store.batches(partition, at):
                    rows = zip(batch.column("n").to_pylist(), batch.column("who").to_pylist(), strict=True)
                    seen.update(enumerate(rows, start))
            except OffsetGone as gone:
                if not self.rows_may_be_lost or gone.first <= at:
                    raise
                at = gone.first
            else:
                return seen

    def _compare(self, store: Store, found: Sequence[Mapping[int, tuple[int, str]]]) -> None:
        for partition, here in enumerate(found):
            first, rows = store.extent().first[partition], self.rows[partition]
            kept = self.may_go[partition]
            while kept < len(rows) and rows[kept] in self.gone | self.fading:
                kept += 1  # segments without a row go
            if first > kept and not self.rows_may_be_lost:
                raise Wrong(f"partition {partition} begins at {first}, rows from {kept} on had to stay")
            for offset in range(first, len(rows)):
                number = rows[offset]
                if offset in here:
                    if here[offset] != (number, entity(number)):
                        raise Wrong(f"partition {partition} has row {here[offset]} at {offset}, promised was {number}")
                    if number in self.gone:
                        raise Wrong(f"row {number} in partition {partition} at {offset} was erased")
                elif number not in self.gone and number not in self.fading:
                    raise Wrong(f"row {number} in partition {partition} at {offset} is gone")
            if self.keyed:
                self._compare_keys(store, partition, here)
                self._compare_commands(store, partition)
        for batch, ranges in self.batches.items():
            done = store.delivered("q", batch)
            if done is None or done.ranges != ranges:
                raise Wrong(f"batch {batch} was delivered to {ranges}, and is at {done}")

    def _compare_commands(self, store: Store, partition: int) -> None:
        """Look some commands up: the oldest and the newest that the journal must know, and one that it must have forgotten."""
        oldest = len(self.rows[partition]) - self.remember
        found = list(self.commands(partition))
        known, forgotten = [each for each in found if each[1] >= oldest], [each for each in found if each[1] < oldest]
        for first, at, count in (*known[:1], *known[-1:], *forgotten[-1:]):
            taken = store.taken(partition, command(first))
            there = None if taken is None else (taken.first, taken.rows.num_rows)
            if there != ((at, count) if at >= oldest else None):
                raise Wrong(f"{command(first)} in partition {partition} with {count} rows at {at} is found at {there}")

    @staticmethod
    def _compare_keys(store: Store, partition: int, here: Mapping[int, tuple[int, str]]) -> None:
        for who in ("e0", "e1", "e2"):
            found = [
                offset
                for _, batch in store.rows_of(who, partition=partition)
                for offset in batch.column("offset").to_pylist()
            ]
            wanted = [offset for offset, (_, entity) in here.items() if entity == who]
            if found != wanted:
                raise Wrong(f"{who} in partition {partition} has the rows {wanted}, and its index {found}")
