"""The log of a durable class: its columns, and events as rows.

Each row has the columns `BOOKKEEPING`, then the fields of all events, flat and nullable: two classes of events may share a column of the same
name and type. Columns whose names begin with ``_`` are for the shard only. ``kind`` is the event's wire name, or begins with ``$`` for rows that
are not events. Rows that belong to the shard and not to one of its entities have the entity ``""``.

Columns are only added at the end, so the columns of an existing log come first, in their order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import attrs
import pyarrow as pa
import pyarrow.compute

from levada.actors.journal import Columns, JournalConfig, Keyed, SchemaMismatch, columns_of
from levada.actors.journal.schema import default_of
from levada.actors.journal.value_rows import ValueRows
from levada.framework import Codec
from levada.framework.errors import ConfigurationError
from levada.framework.handlers import flatten
from levada.framework.message import field_types, tag_of
from levada.framework.platform import PLATFORM

if TYPE_CHECKING:
    from .turns import Live

__all__ = [
    "ANSWER", "BOOKKEEPING", "ERASED", "FIRED", "FORGOT", "OWNED", "REMIND", "SNAPSHOT", "WHOLE", "EventKind", "LogRow", "ShardLog", "grown",
    "load_arrow", "log_columns", "log_config",
]  # fmt: skip

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none

BOOKKEEPING = pa.schema(
    [
        pa.field("entity", pa.string(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("command", pa.string()),
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("_version", pa.int32()),
        pa.field("_reply", pa.binary()),
        pa.field("_body", pa.binary()),
        pa.field("_snapshot", pa.int64()),
        pa.field("_data", pa.binary()),
    ]
)
"""The first columns of every log."""
_HEAD = len(BOOKKEEPING)
_TAKEN = [name for name in BOOKKEEPING.names if not name.startswith("_")]

ANSWER = "$answer"
"""A command with an id that recorded no event."""
SNAPSHOT = "$snapshot"
"""The state of the entity, or all reminders of the shard, in ``_data``."""
ERASED = "$erased"
"""The entity was erased; it has no rows before this one."""
OWNED = "$owned"
"""A process opened the shard; its name is in ``_data``."""
REMIND, FIRED, FORGOT = "$remind", "$fired", "$forgot"
"""A reminder was set, has been handled, or was taken back. These rows are the shard's own; the reminder is in ``_data``."""

WHOLE: Final = Codec(max_bytes=1 << 30, max_items=1 << 40)
"""For the data of snapshots, which are larger than messages; their writers bound them."""
SEGMENT_BYTES = 64 << 20
_FOR_EVER = 1 << 60


async def load_arrow() -> None:
    """Make Arrow's first array in a thread: it imports pandas, if that is installed, which takes seconds on a busy machine."""
    if "pandas" not in sys.modules:
        await PLATFORM.get().run_in_thread(pa.array, [None])


def log_config(shards: int) -> JournalConfig:
    """Return the settings of the journal of a durable class: a partition for each shard, an index by entity, and no retention."""
    return JournalConfig(
        partitions=shards,
        segment_bytes=SEGMENT_BYTES,
        retain_bytes=_FOR_EVER,
        max_bytes=_FOR_EVER + (shards + 1) * SEGMENT_BYTES,
        keyed=Keyed(entity="entity"),
    )


def log_columns(events: Any, there: pa.Schema | None = None) -> pa.Schema:
    """Return the columns of the journal of a durable class.

    Args:
        events: the classes of its events, as a union (``Deposited | Withdrawn``).
        there: the columns of a log that exists, which stay as they are; columns of other events follow them.

    Raises:
        ConfigurationError: a field of an event cannot be a column, or two events need columns of the same name with different types.
    """
    return ShardLog(dict.fromkeys(flatten(events)), there).schema


def grown(there: pa.Schema, wanted: pa.Schema) -> pa.Schema:
    """Return the columns of a log that exists, as events with these columns have them: the same columns first, then the new ones.

    Args:
        there: the columns of the log.
        wanted: the columns of a new log of the events, as `log_columns` returns them.
    """
    fields = {field.name: field for schema in (there, wanted) for field in list(schema)[_HEAD:]}
    return pa.schema([*BOOKKEEPING, *fields.values()])


class LogRow:
    """A row that is not on disk yet. The offset of the entity's snapshot is added when it is written."""

    __slots__ = (
        "body", "command", "data", "kind", "live", "reply", "sequence", "size", "state", "time", "values", "version",
    )  # fmt: skip

    def __init__(
        self,
        live: Live,
        kind: str,
        time: int,
        command: str | None = None,
        version: int | None = None,
        values: Sequence[Any] | None = None,
        size: int = 0,
        *,
        data: bytes | None = None,
    ) -> None:
        self.live = live
        self.sequence = live.sequence
        self.kind = kind
        self.time = time
        """Microseconds since 1970."""
        self.command = command
        self.version = version
        """Of the class of its event, or of the layout of its snapshot; None if the row is neither."""
        self.values = values
        """The values of the columns of all events; None if the row is not an event."""
        self.data = data
        self.reply: bytes | None = None
        self.body: bytes | None = None
        self.state: Mapping[str, bytes] | None = None
        """The fields of the entity, if the row is a snapshot."""
        if values is None:
            size = live.writer.log.width + (len(data) if data is not None else 0)
        self.size = _USUAL + size
        """About the size of the row."""


_USUAL = 128
"""About the bytes of a row besides its texts: in Python, and in `BOOKKEEPING` and a few columns more."""


def _width(kind: pa.DataType) -> float:
    """Return the bytes that a column takes for each row, even if that is null."""
    if pa.types.is_struct(kind):
        return 0.125 + sum(_width(field.type) for field in kind)
    try:
        width: int = kind.bit_width
    except ValueError:  # its size varies, so it has offsets
        width = 64 if kind in (pa.large_string(), pa.large_binary()) else 32
    return (width + 1) / 8


def _values_of(
    columns: Columns[Any] | None, names: list[str], width: int
) -> Callable[[Any], tuple[Sequence[Any], int]]:
    """Return a function that gives an event's values for the columns with these names, and about their size.

    Args:
        columns: of the event's class; None if it has no fields.
        names: of the columns of all events.
        width: bytes that each row takes more than usual.
    """
    if columns is None:
        nulls = (None,) * len(names)
        return lambda event: (nulls, width)
    row, own = columns.row, list(columns.schema.names)
    if own == names and not width:
        return row
    places = [own.index(name) if name in own else len(own) for name in names]

    def spread(event: Any) -> tuple[Sequence[Any], int]:
        values, size = row(event)
        values = (*values, None)
        return [values[place] for place in places], size + width

    return spread


@attrs.frozen(eq=False)
class EventKind:
    """A class of events."""

    cls: type
    tag: str
    version: int
    columns: Columns[Any] | None
    """The columns of its fields; None if it has no fields."""
    values: Callable[[Any], tuple[Sequence[Any], int]]
    """Returns the values of an event for the columns of all events, and about their size in bytes; `SchemaMismatch` if one does not fit."""

    @property
    def names(self) -> list[str]:
        """The names of its columns."""
        return list(self.columns.schema.names) if self.columns is not None else []

    def batch(self, columns: Mapping[str, Any]) -> pa.RecordBatch:
        """Return the values of one event as a row; missing values are null.

        Raises:
            SchemaMismatch: the column of a value would change it.
        """
        fields = [field.with_nullable(True) for field in (self.columns.schema if self.columns is not None else ())]
        values = {field.name: columns.get(field.name) for field in fields}
        row = pa.RecordBatch.from_pylist([values], pa.schema(fields))
        for field, kept in zip(fields, row.columns, strict=True):
            found = kept[0].as_py()
            if not _is_kept(values[field.name], found):
                raise SchemaMismatch(
                    f"{field.name}: {values[field.name]!r:.60} does not fit {field.type}, it would be {found!r:.60}"
                )
        return row

    def fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of this kind in the columns of its class. A field that is younger than a row gets its default."""
        if self.columns is None:
            return batch
        wanted, there = self.columns.schema, set(batch.schema.names)
        arrays = [_filled(batch.column(field.name), field) if field.name in there else None for field in wanted]
        if all(map(_fits, arrays, wanted)):
            return pa.RecordBatch.from_arrays(arrays, schema=wanted)
        known = [array for array in arrays if array is not None]
        return pa.RecordBatch.from_arrays(known, schema=pa.schema(list(wanted)[: len(known)]))

    def events(self, batch: pa.RecordBatch) -> Iterator[Any]:
        """Turn rows that `fitted` has returned into events; each is made when it is taken."""
        if self.columns is None:
            cls: Any = self.cls
            return (cls() for _ in range(batch.num_rows))
        return self.columns.messages(batch)


def _is_kept(value: Any, found: Any) -> bool:
    """Whether a column has a value as it was: Arrow cuts off the fraction of a number for an integer, and drops unknown fields of a struct."""
    if isinstance(found, dict):
        known = isinstance(value, Mapping) and value.keys() <= found.keys()
        return known and all(_is_kept(value.get(name), each) for name, each in found.items())
    if isinstance(found, list | tuple):
        items = list(value.items() if isinstance(value, Mapping) else value)
        return len(items) == len(found) and all(map(_is_kept, items, found))
    return bool(value == found or (value != value and found != found))  # NaN is kept


def _fits(array: pa.Array | None, field: pa.Field) -> bool:
    """Whether a column is as its class has it, as nearly all are; the others are fitted, which takes 30 µs."""
    return array is not None and array.type == field.type and (field.nullable or not array.null_count)


def _filled(column: pa.Array, field: pa.Field) -> pa.Array:
    if field.nullable or not column.null_count:
        return column
    default = default_of(field)
    if default is None:
        return column  # the class raises, and names the missing field
    places = pc.if_else(pc.is_null(column), len(column), pa.array(range(len(column)), pa.int64()))
    return pa.concat_arrays([column, default]).take(places)


class ShardLog:
    """The columns of a log, and its classes of events.

    Raises:
        ConfigurationError: a field of an event cannot be a column, two events need columns of the same name with different types, or a field
            has the name of a column of `BOOKKEEPING` or begins with ``_``.
    """

    def __init__(self, events: Iterable[type], there: pa.Schema | None = None) -> None:
        fields: dict[str, pa.Field] = {field.name: field for field in list(there or ())[_HEAD:]}
        owners: dict[str, type] = {}
        kinds = []
        for cls in events:
            tag, columns = _columns_of(cls)
            for field in columns.schema if columns is not None else ():
                where = f"{cls.__qualname__}.{field.name}"
                if field.name in BOOKKEEPING.names or field.name.startswith("_"):
                    raise ConfigurationError(
                        f"{where}: each row of a log has columns {', '.join(_TAKEN)}, and others that begin with _: rename the field"
                    )
                known, owner = fields.get(field.name), owners.get(field.name)
                if known is not None and known.type != field.type and owner is not None:
                    other = f"{owner.__qualname__}.{field.name}"
                    raise ConfigurationError(
                        f"{where} is {field.type}, and {other} is {known.type}: fields of one name share a column, so rename one of them"
                    )
                if known is None or owner is None:
                    fields[field.name] = pa.field(field.name, field.type, nullable=True)
                owners.setdefault(field.name, cls)
            kinds.append((cls, tag, columns))
        self.schema: pa.Schema = pa.schema([*BOOKKEEPING, *fields.values()])
        """All columns."""
        self._struct = pa.struct(list(self.schema))
        self._nulls = (None,) * len(fields)
        # A log of forty kinds of events may have 280 columns, and each row then takes 1.5 KiB, whatever is in it.
        self.width = max(0, ceil(sum(_width(field.type) for field in self.schema)) - _USUAL)
        """The bytes that each row takes more than usual, because there are many columns."""
        self.kinds: dict[type, EventKind] = {
            cls: EventKind(cls, tag, _version_of(cls), columns, _values_of(columns, list(fields), self.width))
            for cls, tag, columns in kinds
        }
        """The kinds, by class."""
        self.tags: Mapping[str, EventKind] = {kind.tag: kind for kind in self.kinds.values()}
        """The kinds, by wire name."""

    def batch(self, rows: Sequence[LogRow], first: int, *, as_values: bool) -> pa.RecordBatch | ValueRows:
        """Return rows as they are appended.

        Args:
            rows: one or more.
            first: the offset of the first row.
            as_values: whether the log takes `ValueRows`.
        """
        found = ValueRows()
        found.columns = self._struct
        for offset, row in enumerate(rows, first):
            live = row.live
            if row.values is None or row.body is not None:
                live.writer.placed(row, offset)
            found.append(
                (
                    live.entity, row.sequence, row.command, row.time, row.kind, row.version, row.reply, row.body,
                    live.snapshot, row.data, *(row.values or self._nulls),
                )
            )  # fmt: skip
        # One array of structs takes a third of the time of an array for each column, for one row or for hundreds.
        return found if as_values else pa.RecordBatch.from_struct_array(pa.array(found, self._struct))


def _columns_of(cls: type) -> tuple[str, Columns[Any] | None]:
    try:
        tag = tag_of(cls)
    except TypeError as error:
        raise ConfigurationError(f"events are messages: decorate {cls.__qualname__} with @message('a.name')") from error
    return tag, columns_of(cls) if field_types(cls) else None


def _version_of(cls: type) -> int:
    version = getattr(cls, "event_version", 1)
    if not isinstance(version, int) or not 1 <= version < 1 << 31:
        raise ConfigurationError(f"{cls.__qualname__}.event_version is {version!r}, wanted a number of 1 or more")
    return version
