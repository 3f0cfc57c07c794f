"""Reading a mailbox: batches, and streams of micro-batches.

An offset of a stream is a position, see `levada.actors.spark.positions`: a repeated micro-batch has the same rows, and with the checkpoint each
row counts once in Spark's state.

In the driver the reader holds only the bounds of one micro-batch. Rows go from the journal straight to the tasks, one for each partition, as
the Arrow batches that were written; a task holds at most `levada.actors.spark.protocol.WINDOW` of them.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructField, StructType

from levada.actors.journal.errors import OffsetGone, SchemaMismatch
from levada.actors.journal.schema import types_in
from levada.framework.errors import ConfigurationError
from levada.framework.tracing import TraceHeaders

from .positions import offsets_in, position
from .protocol import CommitOffsets, Declare, Description
from .worker import RemoteMailbox

__all__ = ["MAX_ROWS", "BatchSource", "Options", "StreamSource", "columns_for"]

logger = logging.getLogger("levada.actors.spark")

MAX_ROWS = 1_000_000
"""The default for the most rows of a micro-batch: about a second of reading, so fixed costs hardly matter. A day's backlog may be far more."""

IDLE = 0.5
"""Seconds that a query without new rows waits at the bridge. Spark asks every 10 ms, at 1.6 ms of CPU time for each question and stream. A query
that is stopped waits as long."""

_KNOWN = (
    "address", "tokenFile", "mailbox", "schema", "group", "startingOffsets", "maxRowsPerBatch", "maxBytesPerBatch",
    "minRowsPerBatch", "maxTriggerDelay", "failOnDataLoss", "jobId", "traceparent",
)  # fmt: skip
_OF_SPARK = frozenset({"path", "checkpointlocation", "queryname", "querytablename", "recursivefilelookup"})
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")


@attrs.frozen(kw_only=True)
class Options:
    """The options of a source or a sink, read and checked; see `levada.actors.spark.datasource`."""

    remote: RemoteMailbox
    columns: str | None
    """Option ``schema``."""
    group: str | None
    starting: str | Mapping[int, int] | None
    max_rows: int | None
    max_bytes: int | None
    min_rows: int | None
    max_delay: float
    """Seconds."""
    fail_on_data_loss: bool
    job: str | None

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Options:
        """Read Spark's options. Raises `ConfigurationError` for a missing, unknown or invalid option."""
        given = {name.lower(): value for name, value in options.items()}
        if "provider" in given:
            raise ConfigurationError(
                "a mailbox cannot be a table of the catalog, because Spark does not pass its options on: use CREATE TEMPORARY VIEW … USING mailbox"
            )
        unknown = set(given) - {name.lower() for name in _KNOWN} - _OF_SPARK
        if unknown:
            raise ConfigurationError(
                f"format mailbox has no option {', '.join(sorted(unknown))}; its options are {', '.join(_KNOWN)}"
            )
        for name in ("address", "mailbox"):
            if not given.get(name):
                raise ConfigurationError(f"format mailbox needs option {name}")
        made = cls(
            remote=RemoteMailbox(
                given["address"], given["mailbox"], given.get("tokenfile"), _trace(given.get("traceparent"))
            ),
            columns=given.get("schema"),
            group=given.get("group"),
            starting=_starting(given.get("startingoffsets")),
            max_rows=_number(given, "maxRowsPerBatch"),
            max_bytes=_number(given, "maxBytesPerBatch"),
            min_rows=_number(given, "minRowsPerBatch"),
            max_delay=_seconds(given.get("maxtriggerdelay", "15m")),
            fail_on_data_loss=_flag(given.get("failondataloss", "true")),
            job=given.get("jobid"),
        )
        if made.starting == "group" and made.group is None:
            raise ConfigurationError("startingOffsets=group needs option group")
        return made


def _trace(text: str | None) -> TraceHeaders | None:
    found = TraceHeaders.parse(text)
    if text is not None and found is None:
        raise ConfigurationError(f"traceparent is {text!r}, wanted the header of W3C Trace Context, 55 characters")
    return found


def _starting(text: str | None) -> str | Mapping[int, int] | None:
    if text is None or text in ("earliest", "latest", "group"):
        return text
    try:
        return {int(number): int(offset) for number, offset in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise ConfigurationError(
            f'startingOffsets is {text!r}, wanted earliest, latest, group or JSON such as {{"0": 17}}'
        ) from None


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name.lower())
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not int(text):
        raise ConfigurationError(f"{name} is {text!r}, wanted a whole number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"maxTriggerDelay is {text!r}, wanted a time such as 500ms, 10s, 2m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigurationError(f"failOnDataLoss is {text!r}, wanted true or false")
    return text.lower() == "true"


def columns_for(columns: pa.Schema) -> StructType:
    """Return Spark's columns for a mailbox; `SchemaMismatch` names the columns for which Spark has no type."""
    fields, problems = [], []
    for column in columns:
        try:
            kind = from_arrow_type(column.type)
        except PySparkTypeError:
            kind = None
        if kind is None or any(map(pa.types.is_decimal256, types_in(column.type))):
            problems.append(f"{column.name}: Spark has no type for {column.type}")
        else:
            fields.append(StructField(column.name, kind, column.nullable))
    if problems:
        raise _mismatch("not all columns of the mailbox can be read, name others in option schema", problems)
    return StructType(fields)


def check_columns(wanted: StructType, columns: pa.Schema) -> None:
    """Raise `SchemaMismatch`, with the differences, unless the mailbox has these columns with their types, in any order."""
    problems = []
    for field in wanted.fields:
        place = columns.get_field_index(field.name)
        if place < 0:
            problems.append(f"{field.name}: not in the mailbox, which has {', '.join(columns.names)}")
            continue
        there = from_arrow_type(columns.field(place).type)
        if there.simpleString() != field.dataType.simpleString():  # which ignores inner nullability
            problems.append(f"{field.name}: {field.dataType.simpleString()}, in the mailbox {there.simpleString()}")
        elif columns.field(place).nullable and not field.nullable:
            problems.append(f"{field.name}: not null, in the mailbox it may be null")
    if problems:
        raise _mismatch("the wanted columns differ from the mailbox's", problems)


def _mismatch(what: str, problems: list[str]) -> SchemaMismatch:
    return SchemaMismatch(f"{what}: {'; '.join(problems)}", differences=tuple(problems))


class Rows(InputPartition):
    """Rows of one partition, for one task."""

    def __init__(self, partition: int, start: int, end: int, epoch: str, opening: str, schema: bytes) -> None:
        super().__init__((partition, start, end))
        self.partition = partition
        self.start = start
        self.end = end
        self.epoch = epoch
        self.opening = opening
        self.schema = schema
        """Columns of the mailbox when the batch was planned, as an Arrow IPC message."""


def rows_of(options: Options, wanted: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one task, in the exact Arrow types that Spark wants."""
    assert isinstance(partition, Rows)
    columns = pa.ipc.read_schema(pa.py_buffer(partition.schema))
    target = to_arrow_schema(wanted, timezone="UTC")
    start = partition.start
    while start < partition.end:
        try:
            # There may be fewer rows than offsets: some are erased, or not events.
            for batch in options.remote.read(
                partition.partition,
                start,
                partition.end,
                epoch=partition.epoch,
                opening=partition.opening,
                schema=columns,
            ):
                yield _cast(batch, target, options.remote.name) if batch.schema != target else batch
            return
        except OffsetGone as gone:
            if options.fail_on_data_loss:
                raise
            logger.warning("rows are lost to this query: %s", gone, extra={"event": "rows_lost"})
            start = gone.first


def _cast(batch: pa.RecordBatch, target: pa.Schema, mailbox: str) -> pa.RecordBatch:
    """Cast rows to Spark's types; `SchemaMismatch` names the columns with a value that does not fit, such as nanoseconds."""
    columns, problems = [], []
    for field in target:
        try:
            columns.append(batch.column(field.name).cast(field.type))
        except pa.ArrowInvalid as error:
            problems.append(f"{field.name}: {error}")
    if problems:
        raise _mismatch(
            f"mailbox {mailbox} has values that Spark cannot hold, name other columns in option schema, or cast the rows into a new mailbox",
            problems,
        )
    return pa.RecordBatch.from_arrays(columns, schema=target)


def begin(options: Options, found: Description) -> dict[int, int]:
    """Return the offsets at which a query without a checkpoint begins."""
    match options.starting:
        case "latest":
            return dict(found.end)
        case "group":
            assert options.group is not None
            return options.remote.ask(Declare(options.group))
        case None | "earliest":
            return dict(found.first)
    given = options.starting
    assert isinstance(given, Mapping)
    unknown = set(given) - set(found.end)
    if unknown:
        raise ConfigurationError(f"startingOffsets names the partitions {sorted(unknown)}, wanted {sorted(found.end)}")
    beyond = {number: offset for number, offset in given.items() if offset > found.end[number]}
    if beyond:
        raise ConfigurationError(
            f"startingOffsets is {beyond}, wanted at most {dict(found.end)}, the end of the mailbox"
        )
    return {**found.first, **given}


def tasks(start: Mapping[int, int], end: Mapping[int, int], found: Description) -> list[Rows]:
    """Make one task for each partition that has rows."""
    return [
        Rows(number, start.get(number, 0), stop, found.epoch, found.opening, found.schema)
        for number, stop in sorted(end.items())
        if stop > start.get(number, 0)
    ]


class BatchSource(DataSourceReader):
    """Reads the rows that are in a mailbox when the job begins."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[Rows]:
        """Plan the tasks; `SchemaMismatch` if the mailbox does not have the wanted columns."""
        found = self._options.remote.describe()
        check_columns(self._schema, found.columns())
        return tasks(begin(self._options, found), found.end, found)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, in a worker."""
        if not isinstance(partition, Rows):  # Spark's placeholder for "no tasks"
            return iter(())
        return rows_of(self._options, self._schema, partition)


class StreamSource(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a mailbox in micro-batches. Lives as long as its query, in one process on the driver's machine."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._committed: dict[int, int] | None = None
        """The offsets of the group; None: it is not declared yet."""
        self._target: dict[int, int] | None = None
        """The end for Trigger.AvailableNow."""
        self._last_batch = time.monotonic()
        self._accepted = set[tuple[str, str]]()
        """Openings with lost rows that were logged, each with the opening that found the loss."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        """Return the offset at which a query without checkpoint begins."""
        found = self._describe()
        return position(found, begin(self._options, found))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of ``maxRowsPerBatch`` or ``maxBytesPerBatch``; with both, both apply, and without either `MAX_ROWS`."""
        if self._options.max_rows is None and self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadMaxRows(self._options.max_rows or MAX_ROWS)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember the current end of the mailbox; nothing after it is read."""
        self._target = dict(self._describe().end)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next micro-batch; `start` if there is none yet.

        Raises:
            EpochChanged: the checkpoint belongs to another journal.
            JournalBehind: the journal does not have the rows of the checkpoint, and ``failOnDataLoss`` is true.
            SchemaMismatch: the mailbox does not have the wanted columns.
        """
        found = self._describe()
        begun = self._offsets(start, found)
        end = dict(found.end) if self._target is None else self._target
        end = {number: max(stop, begun.get(number, 0)) for number, stop in end.items()}
        rows = {number: stop - max(begun.get(number, 0), found.first[number]) for number, stop in end.items()}
        if not any(count > 0 for count in rows.values()) or self._waits(sum(rows.values())):
            # Spark asks when the last batch is done, and commits it only with the next batch, for which a full mailbox would wait without end.
            if any(offset > (self._committed or {}).get(number, offset) for number, offset in begun.items()):
                self.commit(start)
            if self._target is None:
                self._options.remote.wait_for_rows(begun, self._options.min_rows or 1, IDLE)
            return start
        end = self._limited(begun, end, found, limit)
        self._last_batch = time.monotonic()
        return position(found, end)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the end of the mailbox, for the query's progress."""
        found = self._options.remote.describe()
        return position(found, found.end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Rows]:
        """Plan the tasks of one micro-batch; the same rows for the same offsets.

        Raises:
            OffsetGone: retention has deleted some of them, and ``failOnDataLoss`` is true.
            JournalBehind: see `latestOffset`.
        """
        found = self._describe()
        begun, stops = self._offsets(start, found), self._offsets(end, found)
        if self._options.fail_on_data_loss:
            for number, first in found.first.items():
                if begun.get(number, 0) < min(first, stops.get(number, 0)):
                    raise OffsetGone(
                        f"mailbox {self._options.remote.name}, partition {number}: rows {begun.get(number, 0)} to {first - 1} have been "
                        "deleted by retention, or trimmed, before this query has read them (option failOnDataLoss=false goes on without them, option "
                        "group keeps them)",
                        partition=number,
                        wanted=begun.get(number, 0),
                        first=first,
                    )
        return tasks(begun, stops, found)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, in a worker."""
        return rows_of(self._options, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Set the offsets of the group: rows before them are never asked for again."""
        if self._options.group is not None:
            found = self._describe()
            self._committed = self._offsets(end, found)
            self._options.remote.ask(CommitOffsets(self._options.group, found.epoch, self._committed))

    def _offsets(self, offset: Mapping[str, Any], found: Description) -> dict[int, int]:
        """Read an offset. If rows before it are lost, and ``failOnDataLoss`` is false, return the end of the remaining rows."""
        offsets, behind = offsets_in(
            offset,
            found,
            self._options.remote,
            held="the checkpoint",
            again="start the query with a new checkpoint",
            skip=", or set option failOnDataLoss=false: it continues with the rows that are left",
        )
        if behind is not None:
            if self._options.fail_on_data_loss:
                raise behind
            if (behind.opening, found.opening) not in self._accepted:
                self._accepted.add((behind.opening, found.opening))
                logger.warning("this query goes on: %s", behind, extra={"event": "rows_lost"})
        return offsets

    def _describe(self) -> Description:
        """Describe the mailbox; the first time check the columns and declare the group."""
        remote = self._options.remote
        found = remote.describe()
        if self._committed is None:
            check_columns(self._schema, found.columns())
            group = self._options.group
            at_end = self._options.starting == "latest"
            self._committed = {} if group is None else remote.ask(Declare(group, at_end=at_end))
        return found

    def _waits(self, rows: int) -> bool:
        """Whether these rows are still too few for a micro-batch."""
        least = self._options.min_rows
        # Trigger.AvailableNow has nothing to wait for.
        if least is None or rows >= least or self._target is not None:
            return False
        return time.monotonic() - self._last_batch < self._options.max_delay

    def _limited(
        self, start: Mapping[int, int], end: Mapping[int, int], found: Description, limit: ReadLimit
    ) -> dict[int, int]:
        first = {number: max(start.get(number, 0), found.first[number]) for number in end}
        ends = dict(end)
        if isinstance(limit, ReadAllAvailable):
            return ends
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_rows
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes
        if max_rows is not None:
            ends = shares(first, ends, max_rows)
        if max_bytes is not None:
            busy = [number for number in ends if ends[number] > first[number]]
            for number in busy:
                share = max(1, max_bytes // len(busy))
                try:
                    ends[number] = self._options.remote.measure(number, first[number], ends[number], share)
                except OffsetGone as gone:
                    ends[number] = min(ends[number], gone.first)  # `read` reports the loss
        return ends


def shares(start: Mapping[int, int], end: Mapping[int, int], rows: int) -> dict[int, int]:
    """Divide rows among partitions, in proportion to the rows of each.

    Example:
        >>> shares({0: 0, 1: 10}, {0: 90, 1: 40}, 40)
        {0: 30, 1: 20}
    """
    total = sum(end[number] - start[number] for number in end)
    if total <= rows:
        return dict(end)
    given = {number: (end[number] - start[number]) * rows // total for number in end}
    # The remainder of the division, fewer rows than partitions, goes to partitions that have more.
    over = rows - sum(given.values())
    for number in end:
        if over and given[number] < end[number] - start[number]:
            given[number] += 1
            over -= 1
    return {number: start[number] + given[number] for number in end}
