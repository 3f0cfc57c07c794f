"""Columns of Arrow as arrays of PostgreSQL, and back, without a database."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

import pyarrow as pa

from levada.actors.journal import SchemaMismatch, columns_of
from levada.actors.journal.value_rows import ValueRows
from levada.actors.postgres.addresses import PostgresAddress
from levada.actors.postgres.escapes import escaped, unescaped
from levada.actors.postgres.tables import LogTables
from levada.actors.postgres.values import kind_of
from levada.actors.postgres.wire import only_value
from levada.framework import message
from levada.framework.errors import ConfigurationError

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\0\x100"))
LENGTHS = st.timedeltas(dt.timedelta(days=-100_000_000), dt.timedelta(days=100_000_000))
TIMES = st.datetimes(timezones=st.just(dt.UTC))
DECIMALS = st.decimals(min_value=-(10**19), max_value=10**19, places=18, allow_nan=False).filter(
    lambda d: abs(d) < 10**20
)
STRUCT = pa.struct([("name", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("weight", pa.float64())])
VALUES: list[tuple[pa.DataType, Any]] = [
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()),
    (pa.string(), TEXT),
    (pa.binary(), st.binary()),
    (pa.timestamp("us", tz="UTC"), TIMES),
    (pa.timestamp("us"), st.datetimes()),
    (pa.date32(), st.dates()),
    (pa.duration("us"), LENGTHS),
    (pa.decimal128(38, 18), DECIMALS),
    (pa.list_(pa.int64()), st.lists(st.integers(-(1 << 63), (1 << 63) - 1))),
    (pa.list_(pa.binary()), st.lists(st.binary())),
    (pa.list_(pa.decimal128(38, 18)), st.lists(DECIMALS)),
    (pa.map_(pa.string(), pa.float64()), st.dictionaries(TEXT, st.floats()).map(lambda d: list(d.items()))),
    (STRUCT, st.fixed_dictionaries({"name": TEXT | st.none(), "at": TIMES, "weight": st.floats() | st.none()})),
    (pa.list_(pa.duration("us")), st.lists(LENGTHS)),
    (pa.list_(pa.date32()), st.lists(st.dates())),
]


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind)[:30] for kind, _ in VALUES])
@given(data=st.data())
def test_a_column_comes_back_as_it_was(kind: pa.DataType, values: Any, data: st.DataObject) -> None:
    nulls = data.draw(st.booleans(), label="nulls")
    drawn = data.draw(st.lists(values | st.none() if nulls else values, max_size=20), label="values")
    whole = pa.array(drawn, kind)
    part = whole.slice(data.draw(st.integers(0, len(drawn)), label="start"))
    kept = kind_of(pa.field("x", kind))
    found = kept.decode(kept.encode(part), len(part))
    assert found.type == kind
    assert repr(found.to_pylist()) == repr(part.to_pylist())  # NaN is NaN, and -0.0 is not 0.0
    found.validate(full=True)


@pytest.mark.parametrize(
    ("column", "octets"),
    [
        (pa.array([1, -2], pa.int64()), "00000001 00000000 00000014 00000002 00000001 00000008 0000000000000001 00000008 fffffffffffffffe"),
        (pa.array(["é", None, "a\0b"]), "00000001 00000001 00000019 00000003 00000001 00000002 c3a9 ffffffff 00000004 61103062"),
        (pa.array([True]), "00000001 00000000 00000010 00000001 00000001 00000001 01"),
        (
            pa.array([dt.datetime(2000, 1, 1, 0, 0, 1, tzinfo=dt.UTC)], pa.timestamp("us", tz="UTC")),
            "00000001 00000000 000004a0 00000001 00000001 00000008 00000000000f4240",
        ),
        (pa.array([dt.date(1999, 12, 31)]), "00000001 00000000 0000043a 00000001 00000001 00000004 ffffffff"),
        (
            pa.array([dt.timedelta(seconds=1)], pa.duration("us")),
            "00000001 00000000 000004a2 00000001 00000001 00000010 00000000000f4240 00000000 00000000",
        ),
        (pa.array([[1.5, math.nan]]), "00000001 00000000 00000019 00000001 00000001 0000000b 5b312e352c226e616e225d"),
    ],
    ids=["int64", "string", "bool", "timestamp", "date", "duration", "list"],
)  # fmt: skip
def test_arrays_are_those_of_postgresql(column: pa.Array, octets: str) -> None:
    assert kind_of(pa.field("x", column.type)).encode(column) == bytes.fromhex(octets)


def test_many_values_of_a_fixed_size_are_the_same_as_few() -> None:
    kind = kind_of(pa.field("x", pa.int64()))
    numbers = [(-1) ** n * 3**n for n in range(39)]
    many = kind.encode(pa.array(numbers))
    assert many[20:] == b"".join(kind.encode(pa.array([number]))[20:] for number in numbers)


@given(TEXT, TEXT)
def test_texts_are_escaped_and_differ_as_before(one: str, other: str) -> None:
    first, second = escaped(one.encode()), escaped(other.encode())
    assert b"\0" not in first
    assert unescaped(first).decode() == one
    assert (first == second) == (one == other)
    if not {"\0", "\x10"} & set(one):
        assert first == one.encode()


@message("test.postgres.grown")
class Grown:
    name: str
    size: int = 7


def test_a_struct_from_before_a_field_has_the_default_of_the_field() -> None:
    field = pa.field("x", pa.list_(pa.struct(list(columns_of(Grown).schema))))
    kind = kind_of(field)
    old = pa.array([[{"name": "a"}]], pa.list_(pa.struct([("name", pa.string())])))
    data = kind_of(pa.field("x", old.type)).encode(old)
    assert kind.decode(data, 1).to_pylist() == [[{"name": "a", "size": 7}]]


def test_what_no_column_can_hold_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="x: a log in PostgreSQL has no columns of uint8"):
        kind_of(pa.field("x", pa.uint8()))
    year_20000 = pa.array([[568_971_820_800_000_000]], pa.list_(pa.int64())).cast(
        pa.list_(pa.timestamp("us", tz="UTC"))
    )
    with pytest.raises(SchemaMismatch, match="a value of list"):
        kind_of(pa.field("x", year_20000.type)).encode(year_20000)
    months = bytes.fromhex("00000001 00000000 000004a2 00000001 00000001 00000010 0000000000000000 00000000 00000001")
    with pytest.raises(ValueError, match="months"):
        kind_of(pa.field("x", pa.duration("us"))).decode(months, 1)


ALONE = [
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()),
    (pa.string(), TEXT),
    (pa.binary(), st.binary()),
    (pa.timestamp("us", tz="UTC"), st.integers(-(10**15), 10**16)),
]


@pytest.mark.parametrize(("kind", "values"), ALONE, ids=[str(kind) for kind, _ in ALONE])
@given(data=st.data())
def test_a_value_that_is_alone_is_the_one_of_an_array(kind: pa.DataType, values: Any, data: st.DataObject) -> None:
    value = data.draw(values, label="value")
    kept = kind_of(pa.field("x", kind))
    assert type(value) is kept.plain
    assert kept.value(value) == only_value(kept.encode(pa.array([value], kind)))


TABLES = LogTables.of(
    PostgresAddress.of("postgresql://user@host/base", "log"),
    pa.schema(
        [("entity", pa.string()), ("number", pa.int64()), ("at", pa.timestamp("us", tz="UTC")), ("ratio", pa.float64())]
    ),
)


def value_rows(*rows: tuple[Any, ...], columns: pa.Schema = TABLES.columns) -> ValueRows:
    found = ValueRows(rows)
    found.columns = pa.struct(list(columns))
    return found


def test_a_row_of_plain_values_is_not_put_into_columns() -> None:
    [row] = rows = value_rows(("ü\0", -2, 946_684_800_000_001, None))
    found = TABLES.values_in(rows)
    assert found == [b"\xc3\xbc\x100", (-2).to_bytes(8, "big", signed=True), (1).to_bytes(8, "big"), None]
    batch = rows.batch
    assert batch.schema == TABLES.columns
    assert found == [only_value(kind.encode(column)) for kind, column in zip(TABLES.kinds, batch.columns, strict=True)]
    assert row == rows[0]


@pytest.mark.parametrize(
    "rows",
    [
        value_rows(),
        value_rows(("a", 1, 0, 1.0), ("a", 2, 0, 1.0)),
        value_rows(("a", 1, dt.datetime(2026, 1, 1, tzinfo=dt.UTC), 1.0)),
        value_rows(("a", 1, 0, 1)),
        value_rows(("a", True, 0, 1.0)),
        value_rows(("a", 1 << 63, 0, 1.0)),
        value_rows(("\ud800", 1, 0, 1.0)),
        value_rows(("a", 1, 0), columns=pa.schema(list(TABLES.columns)[:3])),
        value_rows(("a", 1, 0, 1.0), columns=TABLES.columns.set(3, pa.field("rate", pa.float64()))),
    ],
    ids=["none", "two", "a time", "a whole number", "a truth", "a large number", "no Unicode", "fewer columns", "other columns"],
)  # fmt: skip
def test_other_rows_are_left_to_columns(rows: ValueRows) -> None:
    assert TABLES.values_in(rows) is None
