"""Message classes as Arrow columns: `Columns` turns messages into record batches and back.

============================================  ==========================================================================
annotation                                    column
============================================  ==========================================================================
int, float, str, bytes, bool                  int64, double, string, binary, bool
datetime                                      timestamp in microseconds, UTC; a datetime without timezone is refused
date, timedelta, UUID                         date32, duration in microseconds, binary (16 bytes)
Decimal                                       decimal128(38, 18); a value that does not fit exactly is refused
Enum classes, Literal[...] of str or of int   string or int64: the value
T | None                                      as T, nullable; all others are not null
list[T], Sequence, tuple[T, ...], set         list
dict[K, V], Mapping                           map
a message class                               struct; takes this very class, no subclasses
any other type of a message                   binary, encoded by `levada.framework.Codec`; metadata ``levada.codec`` is ``msgpack``
============================================  ==========================================================================

Values are checked as the codec checks them: nothing is cut off or turned into text.  A class that contains itself is a struct with an encoded
field, because Arrow's types are finite.
"""

from __future__ import annotations

import datetime as dt
import types
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from enum import Flag
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast
from uuid import UUID

import attrs
import pyarrow as pa

from levada.framework import Codec, message, schema_fingerprint
from levada.framework.annotations import CONTAINERS, Form, Misfit, part_of
from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.flags import flag_maker
from levada.framework.message import field_types, is_message, tag_of

from .errors import SchemaMismatch
from .schema import fit, with_default

__all__ = ["CODEC", "Columns", "Envelope", "columns_of"]

M = TypeVar("M")

CODEC = b"levada.codec"
"""Key of the metadata of a field whose column holds encoded values; the value is ``msgpack``."""

_SIZED = frozenset({str, bytes, list, tuple, dict})
_MICROSECONDS = pa.timestamp("us", tz="UTC")
_NONE: type = types.NoneType
_ARROW = (pa.ArrowException, TypeError, ValueError, OverflowError)  # Arrow's errors for a value that does not fit


@attrs.frozen(eq=False)
class _Kind:
    """How values of one annotation are kept."""

    type: pa.DataType
    plain: frozenset[type] = frozenset()
    """Values of exactly these types are passed to Arrow unchanged."""
    lower: Callable[[Any], Any] | None = None
    """Turns any other value into one for Arrow, or raises `Misfit`; None: any other is a misfit."""
    lift: Callable[[Any], Any] | None = None
    """Turns Arrow's value into ours; None: they are the same."""
    nullable: bool = False
    metadata: dict[bytes, bytes] | None = None

    def field(self, name: str) -> pa.Field:
        return pa.field(name, self.type, nullable=self.nullable, metadata=self.metadata)

    def lowered(self, value: Any) -> Any:
        if type(value) in self.plain:
            return value
        if self.lower is None:
            raise _refuse(self.type, value)
        return self.lower(value)

    def lifted(self, value: Any) -> Any:
        return value if self.lift is None else self.lift(value)


class Columns(Generic[M]):
    """The columns of a message class. Made by `columns_of`; immutable, may be shared by threads."""

    def __init__(self, cls: type[M]) -> None:
        self.message = cls
        """The class."""
        # Raises for fields that cannot travel at all.
        schema_fingerprint([cls])
        self._fields = _fields_of(cls, (cls,))
        if not self._fields:
            raise ConfigurationError(f"{cls.__qualname__} has no fields, so there are no columns to put it in")
        self._getters = [attrgetter(field.name) for field in self._fields]
        self._by_name = any(field.by_name for field in self._fields)
        self.schema: pa.Schema = pa.schema(
            [field.column for field in self._fields], metadata={"levada.message": tag_of(cls)}
        )
        """One column for each field, in the order of definition."""
        self.row: Callable[[M], tuple[tuple[Any, ...], int]] = _row_function(self._fields, self._lowered_row)
        """Returns the values of one message for `pyarrow.array`, in the order of `schema`, and about their size in bytes; they fit.

        Raises `SchemaMismatch` if a value does not fit its column; names class and field.
        """

    def encode(self, messages: Sequence[M]) -> pa.RecordBatch:
        """Put messages into columns.

        Raises:
            SchemaMismatch: a message is of another class, or a value does not fit its column; names class, field and row.
        """
        cls = self.message
        if not {cls}.issuperset(map(type, messages)):
            row, wrong = next((row, m) for row, m in enumerate(messages) if type(m) is not cls)
            raise _mismatch(f"row {row}: expected {cls.__qualname__}, got {type(wrong).__qualname__}")
        arrays = []
        for field, getter in zip(self._fields, self._getters, strict=True):
            kind, values = field.kind, list(map(getter, messages))
            row = 0
            try:
                if not kind.plain.issuperset(map(type, values)):
                    for row, value in enumerate(values):
                        values[row] = kind.lowered(value)
                arrays.append(_array(values, kind.type))
            except Misfit as misfit:
                raise _mismatch(f"{cls.__qualname__}.{field.name}{misfit.path}, row {row}: {misfit.detail}") from None
            except _ARROW as error:
                row, why = _culprit(values, kind.type, error)
                raise _mismatch(f"{cls.__qualname__}.{field.name}, row {row}: {why}") from error
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _lowered_row(self, message: M) -> tuple[tuple[Any, ...], int]:
        values: list[Any] = []
        for field, getter in zip(self._fields, self._getters, strict=True):
            kind, value = field.kind, getter(message)
            try:
                if type(value) not in kind.plain:
                    value = kind.lowered(value)
                _array([value], kind.type)
            except Misfit as misfit:
                raise _mismatch(f"{self.message.__qualname__}.{field.name}{misfit.path}: {misfit.detail}") from None
            except _ARROW as error:
                raise _mismatch(
                    f"{self.message.__qualname__}.{field.name}: {value!r:.60} does not fit: {error}"
                ) from error
            values.append(value)
        return tuple(values), sum(_bytes_in(value) for value in values if type(value) in _SIZED)

    def decode(self, batch: pa.RecordBatch) -> list[M]:
        """Turn rows into messages. Missing columns get their defaults, unknown ones at the end are ignored.

        Raises:
            SchemaMismatch: the columns differ from this class, or the class refuses the values.
        """
        messages = self.messages(batch)
        try:
            return list(messages)
        except (TypeError, ValueError) as error:
            raise _mismatch(f"{self.message.__qualname__} refuses these values: {error}") from error

    def messages(self, batch: pa.RecordBatch) -> Iterator[M]:
        """Turn rows into messages as `decode` does, each when it is taken; errors of the class come from there as they are."""
        columns = []
        for field, column in zip(self._fields, fit(batch, self.schema).columns, strict=True):
            try:
                values = column.to_pylist()
            except (ValueError, OverflowError) as error:  # a date of the year 20,000, an unknown zone
                raise _mismatch(f"{field.name}: Python has no such value: {error}") from error
            columns.append(values if field.kind.lift is None else list(map(field.kind.lift, values)))
        cls: Any = self.message
        if self._by_name:
            names = [field.alias for field in self._fields]
            return (cls(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True))
        return map(cls, *columns)


def columns_of(cls: type[M]) -> Columns[M]:
    """Return the columns of a message class.

    Raises:
        TypeError: it is no message class.
        ConfigurationError: it has no fields, or a field that cannot be kept: a handle, or a type that no message may hold.

    Example:
        >>> from levada.framework import message
        >>> @message("docs.Tick")
        ... class Tick:
        ...     symbol: str
        ...     bid: float | None = None
        >>> ticks = columns_of(Tick)
        >>> print(ticks.schema.remove_metadata().to_string(show_field_metadata=False))
        symbol: string not null
        bid: double
        >>> ticks.decode(ticks.encode([Tick("EURUSD", 1.08), Tick("USDJPY")]))
        [Tick(symbol='EURUSD', bid=1.08), Tick(symbol='USDJPY', bid=None)]
    """
    columns: Columns[M] | None = cls.__dict__.get("__message_columns__")
    if columns is None:
        columns = Columns(cls)
        cls.__message_columns__ = columns  # type: ignore[attr-defined]  # kept with the class, and gone with it
    return columns


@message("levada.Envelope", frozen=True)
class Envelope:
    """Row of a mailbox that takes messages of any class."""

    ts: dt.datetime
    """When it was sent."""
    key: str | None = None
    """Chooses the partition."""
    sender: str | None = None
    """Path of the actor that sent it."""
    kind: str | None = None
    """Tag of the message class."""
    headers: dict[str, bytes] | None = None
    value: bytes | None = None
    """The message, encoded."""


@attrs.frozen(eq=False)
class _Field:
    name: str
    alias: str
    """Its name in the constructor."""
    kind: _Kind
    column: pa.Field
    by_name: bool


def _fields_of(cls: type, within: tuple[type, ...]) -> list[_Field]:
    annotations = field_types(cls)
    fields = []
    for attribute in attrs.fields(cls):
        if not attribute.init:
            continue
        annotation = annotations[attribute.name]
        try:
            kind = _compile(annotation, within) or _encoded(annotation)
        except ConfigurationError as error:
            raise ConfigurationError(f"{cls.__qualname__}.{attribute.name}: {error}") from error
        column = _with_default_of(attribute, kind.field(attribute.name), kind)
        fields.append(_Field(attribute.name, attribute.alias or attribute.name, kind, column, bool(attribute.kw_only)))
    return fields


def _with_default_of(attribute: attrs.Attribute[Any], column: pa.Field, kind: _Kind) -> pa.Field:
    default: Any = attribute.default
    if default is attrs.NOTHING or default is None:
        return column
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class, which the stubs declare as a function
        if default.takes_self:
            return column
        default = default.factory()
    try:
        return with_default(column, _array([kind.lowered(default)], kind.type))
    except (Misfit, *_ARROW) as error:
        raise ConfigurationError(f"the default of {attribute.name} does not fit its column: {error}") from error


_SURE = {
    bool: ("type({0}) is bool", ""),
    float: ("type({0}) is float", ""),
    int: ("type({0}) is int and {0}.bit_length() < 64", ""),
    bytes: ("type({0}) is bytes", "len({0})"),
    str: ("type({0}) is str and {0}.isascii()", "len({0})"),
}
"""For some types, the code of the question whether Arrow surely takes a value, and of its size."""


def _row_function(fields: Sequence[_Field], slow: Callable[[Any], Any]) -> Callable[[Any], tuple[tuple[Any, ...], int]]:
    """Return what `Columns.row` is: straight code if all fields are plain, which asks `slow` if a value is not.

    Three fields: 0.14 µs, against 0.5 µs with `attrgetter` and loops for fit and size.
    """
    reads, fits, sizes = "", [], []
    for number, field in enumerate(fields):
        name, kinds = f"f{number}", field.kind.plain - {_NONE}
        if len(kinds) != 1 or not kinds <= _SURE.keys():
            return slow
        fit, size = (code.format(name) for code in _SURE[next(iter(kinds))])
        reads += f"    {name} = message.{field.name}\n"
        fits.append(f"({name} is None or {fit})" if _NONE in field.kind.plain else fit)
        if size:
            sizes.append(f"({name} is not None and {size})" if _NONE in field.kind.plain else size)
    names = ", ".join(f"f{number}" for number in range(len(fields)))
    source = (
        f"def row(message):\n{reads}    if {' and '.join(fits)}:\n"
        f"        return ({names},), {' + '.join(sizes) or '0'}\n    return slow(message)\n"
    )
    scope: dict[str, Any] = {"slow": slow}
    exec(compile(source, "<row of columns>", "exec"), scope)  # nothing but attribute names goes in
    return cast("Callable[[Any], tuple[tuple[Any, ...], int]]", scope["row"])


def _bytes_in(value: Any) -> int:
    """Return about the size of a value of a column in bytes."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return 8 * len(items) + sum(_bytes_in(item) for item in items if type(item) in _SIZED)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    array = pa.array(values, kind)
    # Several chunks mean more text than 32-bit offsets reach; no block of a journal holds as much.
    if isinstance(array, pa.ChunkedArray):
        raise pa.ArrowInvalid(f"{len(values)} rows are more than one batch holds, send fewer at a time")
    return array


def _culprit(values: list[Any], kind: pa.DataType, error: Exception) -> tuple[int, str]:
    for row, value in enumerate(values):
        try:
            pa.array([value], kind)
        except _ARROW as why:
            return row, f"{value!r:.60} does not fit {kind}: {why}"
    return 0, str(error)


def _refuse(expected: object, value: object) -> Misfit:
    return Misfit(f"expected {expected}, got {type(value).__name__}")


def _mismatch(line: str) -> SchemaMismatch:
    return SchemaMismatch(line, differences=(line,))


def _widened(kind: type, takes: tuple[type, ...], widen: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def lower(value: Any) -> Any:
        if not isinstance(value, takes):
            raise _refuse(kind.__name__, value)
        try:
            return widen(value)
        except OverflowError as error:
            raise Misfit(str(error)) from error

    return lower


def _moment(value: Any) -> Any:
    if not isinstance(value, dt.datetime):
        raise _refuse("datetime", value)
    if value.utcoffset() is None:
        raise Misfit("a datetime without timezone is another moment elsewhere; use e.g. datetime.now(UTC)")
    return value


_LEAVES: dict[Any, _Kind] = {
    bool: _Kind(pa.bool_(), frozenset({bool})),
    int: _Kind(pa.int64(), frozenset({int}), _widened(int, (int,), int)),
    float: _Kind(pa.float64(), frozenset({float}), _widened(float, (int, float), float)),
    str: _Kind(pa.string(), frozenset({str}), _widened(str, (str,), str.__str__)),
    bytes: _Kind(pa.binary(), frozenset({bytes}), _widened(bytes, (bytes, bytearray, memoryview), bytes)),
    dt.datetime: _Kind(_MICROSECONDS, lower=_moment),
    dt.date: _Kind(pa.date32(), frozenset({dt.date})),
    dt.timedelta: _Kind(pa.duration("us"), frozenset({dt.timedelta})),
    Decimal: _Kind(pa.decimal128(38, 18), frozenset({Decimal})),
    UUID: _Kind(pa.binary(), lower=_widened(UUID, (UUID,), attrgetter("bytes")), lift=lambda data: UUID(bytes=data)),
}


def _compile(annotation: Any, within: tuple[type, ...]) -> _Kind | None:
    """Return how an annotation is kept in a column of its own type; None if only in encoded form."""
    part = part_of(annotation)
    origin, arguments = part.origin, part.arguments
    match part.form:
        case Form.HANDLE:
            raise ConfigurationError("a handle is gone when the journal is read; keep it out of what is written")
        case Form.LITERAL:
            return _choice(arguments, arguments)
        case Form.UNION:
            inner = [_compile(argument, within) for argument in arguments if argument is not _NONE]
            return _optional(inner[0]) if len(inner) == 1 and inner[0] is not None and len(arguments) == 2 else None
        case Form.ITEMS:
            item = _compile(arguments[0], within)
            return _list(origin, item) if item is not None else None
        case Form.MAPPING:
            key, item = (_compile(argument, within) for argument in arguments)
            return _map(key, item) if key is not None and item is not None and not key.nullable else None
        case Form.ENUM if issubclass(origin, Flag):
            return _Kind(pa.int64(), lower=_widened(origin, (origin,), attrgetter("value")), lift=flag_maker(origin))
        case Form.ENUM:
            return _choice(tuple(origin), tuple(member.value for member in origin))
        case Form.MESSAGE if is_message(origin) and origin not in within:
            return _struct(origin, (*within, origin))
        case Form.OTHER:
            return _LEAVES.get(origin)
    return None


def _optional(kind: _Kind) -> _Kind:
    inner_lift = kind.lift
    lift = None if inner_lift is None else (lambda value: None if value is None else inner_lift(value))
    return attrs.evolve(kind, plain=kind.plain | {_NONE}, lift=lift, nullable=True)


def _choice(members: Sequence[Any], values: Sequence[Any]) -> _Kind | None:
    """One of some constants, kept by their values."""
    kinds = {type(value) for value in values}
    if kinds != {str} and kinds != {int}:
        return None
    by_value = dict(zip(values, members, strict=True))
    by_member = {(type(member), member): value for value, member in by_value.items()}

    def lower(value: Any) -> Any:
        try:
            return by_member[type(value), value]
        except (KeyError, TypeError):
            raise Misfit(f"{value!r:.60} is not one of {', '.join(map(repr, members))}") from None

    def lift(value: Any) -> Any:
        try:
            return by_value[value]
        except KeyError:
            raise _mismatch(f"{value!r:.60} is not one of {', '.join(map(repr, members))}") from None

    return _Kind(pa.string() if kinds == {str} else pa.int64(), lower=lower, lift=lift)


def _list(origin: Any, item: _Kind) -> _Kind:
    takes, build = CONTAINERS[origin]
    unordered = build in (set, frozenset)

    def lower(value: Any) -> Any:
        if not isinstance(value, takes):
            raise _refuse(origin.__name__, value)
        lowered: list[Any] = []
        try:
            for each in value:
                lowered.append(item.lowered(each))
        except Misfit as misfit:
            misfit.path = f"[{len(lowered)}]{misfit.path}"
            raise
        return sorted(lowered, key=repr) if unordered else lowered

    def lift(values: list[Any]) -> Any:
        return build(values if item.lift is None else list(map(item.lift, values)))

    # Spark calls it "element", and compares names.
    return _Kind(pa.list_(item.field("element")), lower=lower, lift=lift)


def _map(key: _Kind, item: _Kind) -> _Kind:
    def lower(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _refuse("dict", value)
        lowered = []
        for each, inner in value.items():
            try:
                lowered.append((key.lowered(each), item.lowered(inner)))
            except Misfit as misfit:
                misfit.path = f"[{each!r:.60}]{misfit.path}"
                raise
        return lowered

    def lift(pairs: list[tuple[Any, Any]]) -> Any:
        return {key.lifted(each): item.lifted(inner) for each, inner in pairs}

    return _Kind(pa.map_(key.type, item.field("value")), lower=lower, lift=lift)


def _struct(cls: type, within: tuple[type, ...]) -> _Kind:
    fields = _fields_of(cls, within)
    if not fields:
        raise ConfigurationError(f"{cls.__qualname__} has no fields, so there are no columns to put it in")

    def lower(value: Any) -> Any:
        if type(value) is not cls:
            raise _refuse(cls.__qualname__, value)
        lowered = {}
        for field in fields:
            try:
                lowered[field.name] = field.kind.lowered(getattr(value, field.name))
            except Misfit as misfit:
                misfit.path = f".{field.name}{misfit.path}"
                raise
        return lowered

    def lift(values: dict[str, Any]) -> Any:
        return cls(**{field.alias: field.kind.lifted(values[field.name]) for field in fields})

    return _Kind(pa.struct([field.column for field in fields]), lower=lower, lift=lift)


def _encoded(annotation: Any) -> _Kind:
    codec = Codec()

    def lower(value: Any) -> Any:
        try:
            return codec.encode(value, annotation)
        except (TypeError, ValueError, LevadaError) as error:
            raise Misfit(str(error)) from error

    def lift(data: bytes) -> Any:
        try:
            return cast("object", codec.decode(data, annotation))
        except LevadaError as error:
            raise _mismatch(f"an encoded value cannot be read: {error}") from error

    return _Kind(pa.binary(), lower=lower, lift=lift, metadata={CODEC: b"msgpack"})
