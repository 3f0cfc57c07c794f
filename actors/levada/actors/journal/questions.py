"""The questions that a journal answers.

Those that are messages may be asked through a ref of another process: their rows travel as messages, or as an Arrow IPC stream (`stream_of`), and
are checked before they are used. The others hold record batches, or blocks of mapped files, and stay in the journal's own process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import lt
from typing import Any, Literal

import attrs
import pyarrow as pa
from attrs import validators as v

from levada.framework import Asks, message

from .blocks import Block
from .errors import SchemaMismatch
from .extent import Appended, Extent, Fenced, StoreStatistics
from .ipc import rows_of_stream
from .ledger import Delivered, Reach

__all__ = [
    "Append", "AwaitRows", "CommitGroup", "CopyRows", "DeclareGroup", "Deliver", "DiscardOlder", "DiscardStaged", "EraseEntity", "Erased",
    "FindCommand", "ForgetGroup", "Found", "GetExtent", "GetGroups", "GetJournalStatistics", "GetReach", "GetSchema", "JournalStatistics",
    "OffsetWithin", "Read", "ReadEntity", "ReadRows", "Rows", "StageRows", "TrimRows", "Trimmed",
]  # fmt: skip

MOST_COPIED = 1 << 20
"""Most offsets of a `CopyRows` with rows."""
MAX_READ = 8 << 20
"""Most bytes that may be asked for at once."""
MAX_BLOCK = 15 << 20
"""Most bytes of a block that is read on its own; a message of the codec has 16 MiB at most by default."""

# Types are checked where a question is made: a wrong one must not end the journal.
_INT = v.instance_of(int)
_NUMBERS: Any = v.deep_mapping(_INT, _INT, v.instance_of((Mapping,)))
_ROWS = v.instance_of((pa.RecordBatch, Sequence))
_OFFSET = v.and_(v.instance_of(int), v.ge(0))
_NUMBER = v.and_(v.instance_of(int), v.ge(0), v.lt(1 << 63))


def _key(_: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, str):
        value.encode()  # a lone surrogate fails here, and not in the journal
    elif not isinstance(value, bytes):
        raise TypeError(f"{attribute.name} is {type(value).__name__}, wanted text or bytes")


_MOMENT: Any = v.and_(v.instance_of((int, float)), v.ge(0), v.le(1e12))
_NAME = v.and_(v.instance_of(str), v.max_len(1000), _key)

_APPEND = {
    "rows": _ROWS,
    "partition": v.optional(_INT),
    "key": v.optional(_key),
    "at": v.optional(_OFFSET),
    "waits": v.instance_of(bool),
}


@message("levada.journal.append", frozen=True)
class Append(Asks[Appended | Fenced]):
    """Append rows; answered when they are on the disk (`JournalConfig.sync`). Only an append with `at` is ever answered with `Fenced`.

    Fails with `SchemaMismatch` if they do not fit the columns, `JournalError` if there are none or too many at once, `JournalUnwritable` if
    the disk refuses, `JournalFull` if the journal is full and `max_waiting` others wait already. A failed append has written nothing. If the
    asker is cancelled, the rows may have been written.
    """

    rows: Any
    """A record batch, messages of the journal's class, or an Arrow IPC stream of one batch (`stream_of`). Record batches do not travel."""
    partition: int | None = None
    """None: by `key`."""
    key: str | bytes | None = None
    """Rows with the same key go to the same partition, in order. None: partitions take turns."""
    at: int | None = None
    """Compare and append: write only if the partition ends here, else answer with `Fenced`. No other append comes between the two. Needs
    `partition` or `key`. There may be no rows: then nothing is written, and the answer says whether the partition still ends here."""
    waits: bool = True
    """Whether to wait for room while the journal or the disk is full. False: fail with `JournalFull` at once."""

    def __attrs_post_init__(self) -> None:
        # Validators of the fields took a tenth of an append, also of one that is only rows.
        plain = self.partition is None and self.key is None and self.at is None and self.waits is True
        if plain and type(self.rows) is list:
            return
        cls: Any = Append
        for field in attrs.fields(cls):
            _APPEND[field.name](self, field, getattr(self, field.name))
        if self.at is not None and self.partition is None and self.key is None:
            raise ValueError("Append(at=) compares the end of one partition: say which, by partition= or key=")


@message("levada.journal.copy_rows", frozen=True)
class CopyRows(Asks[Appended | Fenced]):
    """Append rows of another log at the offsets that they have there; answered when they are on the disk.

    Compares and appends as `Append` with `at`: if the partition does not end there, the answer is `Fenced`. Offsets without a row are as if their
    rows were erased. `Appended.count` counts them too.

    Fails as `Append` with ``waits=False``, and with `SchemaMismatch` if the offsets do not grow, or are not between `at` and `end`.
    """

    rows: Any
    """A record batch, or an Arrow IPC stream of one (`stream_of`): a column ``offset``, then the journal's, as in `Found`. Record batches do not
    travel. Empty bytes: there are no rows."""
    partition: int = attrs.field(validator=_INT)
    at: int = attrs.field(validator=_OFFSET)
    """Where the partition ends."""
    end: int = attrs.field(validator=_OFFSET)
    """Where it ends afterwards. That is behind `at`, and with rows at most `MOST_COPIED` behind it."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.rows, pa.RecordBatch | bytes):
            raise TypeError(f"rows is {type(self.rows).__name__}, wanted a record batch or bytes")
        most = self.at + MOST_COPIED if len(self.rows) else 1 << 62
        if not self.at < self.end <= most:
            raise ValueError(f"end is {self.end}, wanted {self.at + 1} to {most}")

    def placed(self) -> tuple[list[int], pa.RecordBatch | None]:
        """Return the offsets and the rows without them; None if there are no rows.

        Raises:
            SchemaMismatch: they are no rows with offsets of this range.
        """
        if not len(self.rows):
            return [], None
        batch = rows_of_stream(self.rows) if isinstance(self.rows, bytes) else self.rows
        if batch.schema.names[:1] != ["offset"] or batch.column(0).type != pa.int64():
            raise SchemaMismatch("rows of a copy begin with a column of their offsets: offset, int64")
        places = batch.column(0).to_pylist()
        if not places:
            return [], None
        if None in places or not self.at <= places[0] <= places[-1] < self.end or not all(map(lt, places, places[1:])):
            raise SchemaMismatch(f"offsets of a copy grow, and are between {self.at} and {self.end}")
        columns = pa.RecordBatch.from_arrays(batch.columns[1:], schema=pa.schema(list(batch.schema)[1:]))
        return places, columns


@attrs.frozen
class StageRows(Asks[int]):
    """Stage rows of a batch until `Deliver`; answered with the number of rows of this part so far. Readers do not see them before.

    They outlive the journal's process. With `at` they may be sent again, and are staged once.

    Fails with `JournalFull` if too much is staged, with `JournalError` if `at` leaves a gap, with `SchemaMismatch` and `JournalUnwritable` as
    `Append`.
    """

    query: str = attrs.field(validator=_NAME)
    batch: int = attrs.field(validator=_NUMBER)
    part: int = attrs.field(validator=_NUMBER)
    """Part of the batch: for Spark the task's partition."""
    attempt: int = attrs.field(validator=_NUMBER)
    """Try at this part; each has rows of its own. Use a random number: if one is used again, a repeated batch may not be compared."""
    rows: pa.RecordBatch | Sequence[Any] = attrs.field(validator=_ROWS)
    at: int | None = attrs.field(default=None, validator=v.optional(_INT))
    """Number of rows of this part before these. None: all that are staged."""


@attrs.frozen
class Deliver(Asks[Delivered]):
    """Append a staged batch exactly once. The second time, even after a crash, the answer is ``already``.

    Afterwards all stages of this batch are deleted, in one step. A batch that was delivered before is compared: its rows are staged again, or
    the winners are the same as the last time, and none of them is staged. It is the same batch if it has the same rows, in any order and in
    any parts.

    Fails with `BatchReused` if it has other rows, or they cannot be compared any more; with `JournalBehind` if the batch `after` is missing;
    with `JournalError` if a winner was not staged, has another number of `rows`, or the batch is larger than the journal can ever take; with
    `JournalUnwritable` as `Append`.
    """

    query: str = attrs.field(validator=_NAME)
    batch: int = attrs.field(validator=_NUMBER)
    winners: Mapping[int, int] = attrs.field(factory=dict[int, int], validator=_NUMBERS)
    """For each part with rows, the attempt that counts. Part n goes to partition n modulo the number of partitions."""
    rows: Mapping[int, int] = attrs.field(factory=dict[int, int], validator=_NUMBERS)
    """For some parts, the number of rows that were staged. A power failure may have lost some of them."""
    after: int | None = attrs.field(default=None, validator=v.optional(_NUMBER))
    """The number of the batch before, which this journal should have. An older copy does not have it. None: any or none."""
    accept_loss: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Do not fail with `BatchReused` or `JournalBehind`, but log a warning: a known batch counts as delivered, an unknown one is appended."""


@attrs.frozen
class DiscardStaged(Asks[int]):
    """Drop staged rows that were not delivered; answered with the number of stages dropped."""

    query: str = attrs.field(validator=_NAME)
    batch: int = attrs.field(validator=_NUMBER)
    part: int | None = None
    """None: all parts."""
    attempt: int | None = None
    """None: all attempts."""


@attrs.frozen
class DiscardOlder(Asks[list[tuple[str, int]]]):
    """Drop the staged batches that got no rows for `age` seconds; answered with their queries and numbers."""

    age: float = attrs.field(validator=v.instance_of((int, float)))


@message("levada.journal.declare_group", frozen=True)
class DeclareGroup(Asks[Mapping[int, int]]):
    """Keep all rows that this group has not read; answered with its offsets."""

    group: str = attrs.field(validator=_NAME)
    at: Literal["first", "end"] = attrs.field(default="first", validator=v.in_(("first", "end")))
    """Where a new group begins."""


@message("levada.journal.commit_group", frozen=True)
class CommitGroup(Asks[None]):
    """Set the offsets of a group. Fails with `JournalError` for an unknown group or an offset beyond the end."""

    group: str = attrs.field(validator=_NAME)
    offsets: Mapping[int, int] = attrs.field(validator=_NUMBERS)
    """For some partitions, the offset behind the last row the group has done with."""


@message("levada.journal.forget_group", frozen=True)
class ForgetGroup(Asks[None]):
    """Keep no more rows for a group."""

    group: str = attrs.field(validator=_NAME)


@message("levada.journal.get_groups", frozen=True)
class GetGroups(Asks[Mapping[str, Mapping[int, int]]]):
    """Ask for the offsets of all groups."""


@message("levada.journal.get_extent", frozen=True)
class GetExtent(Asks[Extent]):
    """Ask for the `Extent`."""


@message("levada.journal.get_reach", frozen=True)
class GetReach(Asks[Reach]):
    """Ask how far the rows of an earlier opening are still the same; see `Store.reach`."""

    opening: str | None = attrs.field(validator=v.optional(_NAME))


@message("levada.journal.get_schema", frozen=True)
class GetSchema(Asks[bytes]):
    """Ask for the columns, as an Arrow IPC message: ``pa.ipc.read_schema(pa.py_buffer(answer))``."""

    wanted: bytes | None = attrs.field(default=None, validator=v.optional(v.instance_of(bytes)))
    """Columns to add at the end, as such a message too, if the log grows while it is open; a `Journal` does not. None: none."""


@message("levada.journal.await_rows", frozen=True)
class AwaitRows(Asks[Extent]):
    """Ask for the `Extent` once there are `rows` rows behind some offsets; the ask's own time-out ends the wait."""

    after: Mapping[int, int] = attrs.field(validator=_NUMBERS)
    """For each partition, the offset at which counting starts; the oldest one for a partition that is not named."""
    rows: int = attrs.field(default=1, validator=_INT)

    def reached(self, extent: Extent) -> bool:
        """Whether there are so many rows."""
        ends = extent.end.items()
        return sum(max(0, end - self.after.get(number, extent.first[number])) for number, end in ends) >= self.rows


@attrs.frozen
class Read(Asks[list[Block]]):
    """Read blocks of one partition, as `Store.read`. To continue, start at the end of the last block; an empty list: no more rows."""

    partition: int = attrs.field(validator=_INT)
    start: int = attrs.field(validator=_INT)
    end: int | None = attrs.field(default=None, validator=v.optional(_INT))
    max_bytes: int = attrs.field(default=4 << 20, validator=_INT)


@message("levada.journal.rows", frozen=True)
class Rows:
    """Rows of one partition, as they travel."""

    partition: int
    first: int
    """Offset of the first row."""
    count: int
    data: bytes = attrs.field(repr=False)
    """An Arrow IPC stream; see `batch`."""

    @property
    def end(self) -> int:
        """The offset behind the last row."""
        return self.first + self.count

    def batch(self) -> pa.RecordBatch:
        """Return the rows in the journal's columns, without copying them; `SchemaMismatch` if these bytes are not rows."""
        return rows_of_stream(self.data)


@message("levada.journal.read_rows", frozen=True)
class ReadRows(Asks[Rows]):
    """Read rows of one partition that follow each other. To continue, start at `Rows.end`; an empty answer means that there are no more rows.

    Erased rows are passed over: `Rows.first` is then behind `start`.

    Fails as `Read`, and with `JournalError` if one block has more than 15 MiB.
    """

    partition: int = attrs.field(validator=_INT)
    start: int = attrs.field(validator=_INT)
    end: int | None = attrs.field(default=None, validator=v.optional(_INT))
    max_bytes: int = attrs.field(default=4 << 20, validator=[v.instance_of(int), v.ge(1), v.le(MAX_READ)])
    """Size of the blocks that are read; one is read whatever its size."""


@message("levada.journal.found", frozen=True)
class Found:
    """Rows that were found by a key."""

    partition: int
    count: int
    next: int | None
    """Where to go on; None: these are all."""
    data: Any = attrs.field(repr=False)
    """An Arrow IPC stream, empty if there are no rows, or a record batch (`ReadEntity.stream`); see `batch`."""

    def batch(self) -> pa.RecordBatch:
        """Return the rows: a column ``offset``, then the journal's; `SchemaMismatch` if these bytes are not rows."""
        return self.data if isinstance(self.data, pa.RecordBatch) else rows_of_stream(self.data)


@message("levada.journal.read_entity", frozen=True)
class ReadEntity(Asks[Found]):
    """Read rows of an entity in order: the rows of one block and more, until they have `max_bytes`. No other block is read."""

    entity: str | bytes = attrs.field(validator=_key)
    partition: int | None = attrs.field(default=None, validator=v.optional(_INT))
    """None: the partition of the entity as a key."""
    start: int = attrs.field(default=0, validator=_INT)
    """Offset of the first row that may be among them."""
    max_bytes: int = attrs.field(default=4 << 20, validator=[v.instance_of(int), v.ge(1), v.le(MAX_READ)])
    newest: int | None = attrs.field(default=None, validator=v.optional([v.instance_of(int), v.ge(1)]))
    """Only so many rows, the newest ones; fewer if they have more than `max_bytes`. `Found.next` is None then."""
    stream: bool = attrs.field(default=True, validator=v.instance_of(bool))
    """False: the rows come as a record batch, which does not travel, and is not copied."""
    since: str | None = attrs.field(default=None, validator=v.optional(v.instance_of(str)))
    """A column of offsets: only rows from the offset on that the entity's newest row has there, if it is not null."""


@message("levada.journal.find_command", frozen=True)
class FindCommand(Asks[Found]):
    """Look up the rows of a command, as `Store.taken`; no rows: it has not been taken, or is forgotten."""

    partition: int = attrs.field(validator=_INT)
    command: str | bytes = attrs.field(validator=_key)


@message("levada.journal.erased", frozen=True)
class Erased:
    """The rows of an entity are gone."""

    partition: int
    rows: int
    """Number of rows erased now."""


@message("levada.journal.erase_entity", frozen=True)
class EraseEntity(Asks[Erased]):
    """Erase the rows of an entity from the journal's files; answered when they are gone. Other appends go on meanwhile.

    The other rows keep their offsets, and readers pass over the erased ones. If the journal ends before it is done, the next opening goes
    on. Fails with `JournalError` without `Keyed.entity`, with `JournalDamaged`, `JournalUnwritable` or `JournalFull` if a file cannot be
    read or written: ask again.
    """

    entity: str | bytes = attrs.field(validator=_key)
    partition: int | None = attrs.field(default=None, validator=v.optional(_INT))
    """None: the partition of the entity as a key."""
    before: int | None = attrs.field(default=None, validator=v.optional(_OFFSET))
    """Rows from this offset on stay, such as a tombstone. None: the end at that time."""
    archive: str = attrs.field(default="", validator=v.instance_of(str))
    """As `TrimRows.archive`: the rows go from it first, and are not counted. A log that has an archive fails with `JournalError` without it."""


@message("levada.journal.trimmed", frozen=True)
class Trimmed:
    """Rows behind snapshots are gone."""

    partition: int
    rows: int
    """Number of rows that went now."""


@message("levada.journal.trim_rows", frozen=True)
class TrimRows(Asks[Trimmed]):
    """Remove rows of a log of durable actors that no durable actor needs any more, to make room; answered when they are gone.

    A row goes if it is older than `older`, the newest snapshot of its entity is behind it, and it does not have one of the `remember` newest
    answers of its entity. The log may keep rows that may go. The other rows keep their offsets, and readers pass over those that went.
    `Extent.trimmed` says how far.

    Fails with `JournalError` if this is no log of durable actors, and as `EraseEntity`: ask again.
    """

    partition: int = attrs.field(validator=_INT)
    older: float = attrs.field(validator=_MOMENT)
    """Seconds since 1970: the first row with this time or a later one stays, and all behind it."""
    remember: int = attrs.field(default=256, validator=[v.instance_of(int), v.ge(0)])
    """How many answers of each entity stay, the newest ones."""
    layout: int | None = attrs.field(default=None, validator=v.optional(_INT))
    """Only snapshots of entities with this ``_version`` count: the class of today can read them. None: all of them."""
    archive: str = attrs.field(default="", validator=v.instance_of(str))
    """A folder or URL (`Archive`): all old rows are there before one goes, and none goes that is not there. Empty: there is no archive.

    The log remembers it, and then fails with `JournalError` if a question does not name it, or names an archive without these rows.
    """
    forget_archive: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """The archive that the log remembers is gone for good: `archive` is a new one, or there is none from now on."""


@message("levada.journal.offset_within", frozen=True)
class OffsetWithin(Asks[int]):
    """Ask for the offset at which `Read` with the same arguments would end."""

    partition: int = attrs.field(validator=_INT)
    start: int = attrs.field(validator=_INT)
    end: int = attrs.field(validator=_INT)
    max_bytes: int = attrs.field(validator=_INT)


@attrs.frozen(kw_only=True)
class JournalStatistics:
    """Counters of a journal."""

    store: StoreStatistics
    appends: int
    """Appends that succeeded."""
    appends_waiting: int
    """Appends and deliveries that are not answered yet."""
    bytes_waiting: int
    full: bool
    """Whether they wait for room."""
    appends_refused: int
    """Because the journal was full and too many waited."""
    readers_waiting: int
    """`AwaitRows` that are not answered yet."""


@attrs.frozen
class GetJournalStatistics(Asks[JournalStatistics]):
    """Ask for `JournalStatistics`."""
