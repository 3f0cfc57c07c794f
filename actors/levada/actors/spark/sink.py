"""Writing to a mailbox: batches of a job, and micro-batches of a stream, each exactly once.

Tasks stage their rows under (query, batch, part, attempt), where readers do not see them. When all tasks are done, the driver names the attempt
that counts for each part, and the journal appends these rows and a line of its ledger in one transaction. Staged rows outlive the bridge's
process, so a bridge that is killed between the two steps delivers them after its restart. If a batch is delivered again, after a crash of
either side, the answer is that it is done. Spark repeats an unrecorded micro-batch under the same number, and the checkpoint keeps the id of
the query; so each micro-batch is in the journal once.

The journal compares a batch that comes again with the one that it has, and it looks for the micro-batch before a new one: Spark's numbers have
no gaps, and each micro-batch has a task, even without rows. So neither an older checkpoint nor an older copy of the mailbox loses rows silently.

An attempt is a random number: Spark's own attempt numbers repeat when a driver or a stage starts again.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator

import attrs
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from levada.actors.journal.errors import BatchReused, JournalBehind, SchemaMismatch
from levada.actors.journal.schema import DEFAULT, differences, fit
from levada.framework.errors import ConfigurationError, LevadaError

from .protocol import BridgeError, DeliverBatch, DiscardBatch, StageHead
from .source import Options

__all__ = ["BatchSink", "StreamSink"]

DELIVER_TIMEOUT = 600.0
"""Seconds for a delivery, which may wait for room in a full journal."""

_NEWEST_CHECKPOINT = (
    "The checkpoint is older than the mailbox, or the query makes other rows each time. Put the newest checkpoint back, start the query with "
    "a new one, or set option failOnDataLoss=false: the batch counts as delivered, and the rows that it has now are left out"
)
_OTHER_JOB = (
    "Give a job with other rows another jobId, or set option failOnDataLoss=false: the job counts as done, and the rows that it has now are "
    "left out"
)
_NEWEST_COPY = "Put the newest copy of the mailbox back, or set option failOnDataLoss=false: the query goes on without the rows of these batches"


@attrs.frozen
class Staged(WriterCommitMessage):
    """Identifies the staged rows of one task."""

    query: str
    batch: int
    part: int
    attempt: int
    rows: int


def fitting(batch: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    """Fit rows to the columns of the mailbox, by name. Missing columns get their defaults.

    Raises:
        SchemaMismatch: a column has nulls, and must not have any in the mailbox.
    """
    arrays, fields = [], []
    for field in columns:
        place = batch.schema.get_field_index(field.name)
        column = batch.column(place) if place >= 0 else _default(field, batch)
        if column.null_count and not field.nullable:
            raise SchemaMismatch(
                f"{field.name}: has nulls, which the mailbox does not allow", differences=(field.name,)
            )
        arrays.append(column if column.type == field.type else _cast(column, field.type))
        fields.append(field)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=columns.metadata))


def check_columns(schema: StructType, columns: pa.Schema) -> None:
    """Raise `SchemaMismatch` unless rows of `schema` can be written, by name. Whether a column has nulls is checked with the rows."""
    got = to_arrow_schema(schema, timezone="UTC")
    given = [got.field(field.name) for field in columns if got.get_field_index(field.name) >= 0]
    extra = [field for field in got if columns.get_field_index(field.name) < 0]
    wanted = [
        field
        for field in columns
        if got.get_field_index(field.name) >= 0 or not (field.nullable or DEFAULT in (field.metadata or {}))
    ]
    problems = differences(
        pa.schema([field.with_type(_plain(field.type)).with_nullable(True) for field in wanted]),
        pa.schema([field.with_type(_plain(field.type)).with_nullable(True) for field in given + extra]),
    )
    if problems:
        raise SchemaMismatch(f"these rows do not fit the mailbox: {'; '.join(problems)}", differences=tuple(problems))


def _default(field: pa.Field, batch: pa.RecordBatch) -> pa.Array:
    """Return a missing column, with its default."""
    anchor = batch.schema.field(0)
    return fit(batch.select([0]), pa.schema([anchor, field])).column(1)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type without the differences between Spark and the journal: inner nullability, and the names of list items."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    return kind


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        # A struct whose fields are nullable in one type only: the values have to be checked row by row.
        return pa.array(column.to_pylist(), kind)


class _Tasks:
    """The part that both writers share."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._remote = options.remote
        self._accept_loss = not options.fail_on_data_loss
        columns = options.remote.describe().columns()
        check_columns(schema, columns)
        self._columns: bytes = columns.serialize().to_pybytes()

    def stage(self, query: str, batch: int, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task, in a worker."""
        context = TaskContext.get()
        assert context is not None
        part, attempt = context.partitionId(), secrets.randbits(62)
        head = StageHead(query, batch, part, attempt)
        columns = pa.ipc.read_schema(pa.py_buffer(self._columns))
        try:
            rows = self._remote.stage(head, (fitting(each, columns) for each in iterator if each.num_rows))
        except Exception:
            self._discard(DiscardBatch(query, batch, part, attempt))
            raise
        return Staged(query, batch, part, attempt, rows)

    def deliver(self, messages: list[WriterCommitMessage | None], *, after: int | None, advice: str) -> None:
        """Append the staged rows of all tasks, in the driver.

        Args:
            messages: of the tasks.
            after: number of the batch before.
            advice: what to do about a batch that comes again with other rows.

        Raises:
            BatchReused: the mailbox has this batch with other rows; the text ends with the advice.
            JournalBehind: the mailbox does not have the batch before.
        """
        staged = [message for message in messages if isinstance(message, Staged)]
        if not staged:
            return
        winners = {each.part: each.attempt for each in staged if each.rows}
        rows = {each.part: each.rows for each in staged if each.rows}
        question = DeliverBatch(staged[0].query, staged[0].batch, winners, rows, after, self._accept_loss)
        try:
            self._remote.ask(question, timeout=DELIVER_TIMEOUT)
        except BatchReused as error:
            raise attrs.evolve(error, detail=f"{error.detail}. {advice}") from None
        except JournalBehind as error:
            raise attrs.evolve(error, detail=f"{error.detail}. {_NEWEST_COPY}") from None

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the staged rows of all tasks, in the driver."""
        for message in messages:
            if isinstance(message, Staged):
                self._discard(DiscardBatch(message.query, message.batch))
                return

    def _discard(self, question: DiscardBatch) -> None:
        try:
            self._remote.ask(question, patience=0.0)
        except LevadaError:
            # The first failure counts. The rows are dropped with the next delivery of this batch, or when they are old.
            pass


class StreamSink(DataSourceStreamArrowWriter):
    """Writes micro-batches. Spark makes one instance in the driver, and one for each commit."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._tasks = _Tasks(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task. Raises `BridgeError` if Spark does not say which micro-batch this is."""
        context = TaskContext.get()
        query = context and context.getLocalProperty("sql.streaming.queryId")
        batch = context and context.getLocalProperty("streaming.sql.batchId")
        if not query or not batch:
            raise BridgeError("Spark does not say which micro-batch this task belongs to: is this a streaming query?")
        return self._tasks.stage(query, int(batch), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Deliver the micro-batch, unless it was delivered before. Raises `BatchReused` and `JournalBehind`."""
        self._tasks.deliver(messages, after=batchId - 1 if batchId else None, advice=_NEWEST_CHECKPOINT)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Drop the micro-batch."""
        self._tasks.abort(messages)


class BatchSink(DataSourceArrowWriter):
    """Writes the rows of a batch job, all together at its end."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise ConfigurationError("rows of a mailbox cannot be overwritten: use mode('append')")
        self._tasks = _Tasks(options, schema)
        self._job = f"job:{options.job or uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task."""
        return self._tasks.stage(self._job, 0, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Deliver the rows of all tasks, unless a job with this id did. Raises `BatchReused`."""
        self._tasks.deliver(messages, after=None, advice=_OTHER_JOB)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the rows of all tasks."""
        self._tasks.abort(messages)
