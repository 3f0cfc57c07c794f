"""Message classes as Arrow columns, and how schemas are compared and grow."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from levada.actors.journal import Envelope, SchemaMismatch, check_growth, columns_of, differences, fit  # noqa: E402
from levada.actors.journal.columns import CODEC  # noqa: E402
from levada.actors.journal.schema import all_same, check_schema, conform, fingerprint, offsets  # noqa: E402
from levada.framework import Receiver, message  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402

UTC = dt.UTC


class Side(enum.Enum):
    BUY = "buy"
    SELL = "sell"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Flags(enum.Flag):
    A = 1
    B = 2


@message("columns.Venue")
class Venue:
    name: str
    fee: Decimal | None = None


@message("columns.Node")
class Node:
    value: int
    following: Node | None = None


@message("columns.Everything")
class Everything:
    number: int
    ratio: float
    text: str
    octets: bytes
    yes: bool
    moment: dt.datetime
    day: dt.date
    span: dt.timedelta
    amount: Decimal
    id: UUID
    side: Side
    level: Level
    flags: Flags
    word: Literal["a", "b"]
    maybe: int | None
    numbers: list[int]
    sequence: Sequence[str | None]
    many: tuple[float, ...]
    unique: frozenset[str]
    by_name: Mapping[str, list[Venue]]
    venue: Venue
    other: Venue | None
    pair: tuple[int, str]
    either: int | str
    anything: Any
    node: Node


SMALL = st.integers(-(2**63), 2**63 - 1)
VENUES = st.builds(
    Venue, st.text(), st.none() | st.decimals(-(10**19), 10**19, places=18, allow_nan=False).map(Decimal)
)
EVERYTHING = st.builds(
    Everything,
    number=SMALL,
    ratio=st.floats(allow_nan=False),
    text=st.text(),
    octets=st.binary(),
    yes=st.booleans(),
    moment=st.datetimes(timezones=st.just(UTC)),
    day=st.dates(),
    span=st.timedeltas(dt.timedelta(-(10**8)), dt.timedelta(10**8)),  # 64 bits of microseconds
    amount=st.decimals(-(10**19), 10**19, places=6, allow_nan=False),
    id=st.uuids(),
    side=st.sampled_from(Side),
    level=st.sampled_from(Level),
    flags=st.sampled_from([Flags.A, Flags.B, Flags.A | Flags.B]),
    word=st.sampled_from(["a", "b"]),
    maybe=st.none() | SMALL,
    numbers=st.lists(SMALL, max_size=3),
    sequence=st.lists(st.none() | st.text(), max_size=3),
    many=st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
    unique=st.frozensets(st.text(), max_size=3),
    by_name=st.dictionaries(st.text(), st.lists(VENUES, max_size=2), max_size=2),
    venue=VENUES,
    other=st.none() | VENUES,
    pair=st.tuples(SMALL, st.text()),
    either=SMALL | st.text(),
    anything=st.none() | st.integers(0, 9) | st.lists(st.text(), max_size=2),
    node=st.builds(Node, SMALL, st.none() | st.builds(Node, SMALL)),
)


@pytest.mark.ci
@given(st.lists(EVERYTHING, max_size=4))
def test_what_goes_in_comes_out(messages: list[Everything]) -> None:
    columns = columns_of(Everything)
    batch = columns.encode(messages)
    batch.validate(full=True)
    assert batch.schema.equals(columns.schema, check_metadata=True)
    assert columns.decode(batch) == messages


def test_types_of_the_columns() -> None:
    schema = columns_of(Everything).schema
    assert {field.name: str(field.type) for field in schema} == {
        "number": "int64",
        "ratio": "double",
        "text": "string",
        "octets": "binary",
        "yes": "bool",
        "moment": "timestamp[us, tz=UTC]",
        "day": "date32[day]",
        "span": "duration[us]",
        "amount": "decimal128(38, 18)",
        "id": "binary",
        "side": "string",
        "level": "int64",
        "flags": "int64",
        "word": "string",
        "maybe": "int64",
        "numbers": "list<element: int64 not null>",
        "sequence": "list<element: string>",
        "many": "list<element: double not null>",
        "unique": "list<element: string not null>",
        "by_name": "map<string, list<element: struct<name: string not null, fee: decimal128(38, 18)> not null>>",
        "venue": "struct<name: string not null, fee: decimal128(38, 18)>",
        "other": "struct<name: string not null, fee: decimal128(38, 18)>",
        "pair": "binary",
        "either": "binary",
        "anything": "binary",
        "node": "struct<value: int64 not null, following: binary not null>",
    }
    assert [field.name for field in schema if field.nullable] == ["maybe", "other"]
    encoded = [field.name for field in schema if (field.metadata or {}).get(CODEC) == b"msgpack"]
    assert encoded == ["pair", "either", "anything"]
    assert schema.metadata[b"levada.message"] == b"columns.Everything"


@message("columns.Price")
class Price:
    symbol: str
    bid: float
    size: int = 1
    at: dt.datetime = dt.datetime(2020, 1, 1, tzinfo=UTC)
    amount: Decimal = Decimal(0)
    venues: list[Venue] = attrs.field(factory=list)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"symbol": 5}, "Price.symbol, row 1: expected str, got int"),
        ({"symbol": None}, "Price.symbol, row 1: expected str, got NoneType"),
        ({"symbol": b"x"}, "Price.symbol, row 1: expected str, got bytes"),
        ({"symbol": "\ud800"}, "Price.symbol, row 1: '\\ud800' does not fit string"),
        ({"bid": "1.5"}, "Price.bid, row 1: expected float, got str"),
        ({"bid": 10**400}, "Price.bid, row 1: int too large to convert to float"),
        ({"size": 1.5}, "Price.size, row 1: expected int, got float"),
        ({"size": 2**63}, "Price.size, row 1: 9223372036854775808 does not fit int64"),
        ({"at": dt.datetime(2020, 1, 1)}, "Price.at, row 1: a datetime without timezone"),  # noqa: DTZ001
        ({"amount": Decimal("1e-19")}, "Price.amount, row 1: Decimal('1E-19') does not fit decimal128(38, 18)"),
        ({"amount": Decimal("NaN")}, "Price.amount, row 1: Decimal('NaN') does not fit"),
        ({"venues": [Venue("a"), "b"]}, "Price.venues[1], row 1: expected Venue, got str"),
        ({"venues": [Venue("a"), Venue(7)]}, "Price.venues[1].name, row 1: expected str, got int"),  # type: ignore[arg-type]
        ({"venues": ()}, "Price.venues, row 1: expected list, got tuple"),
    ],
)
def test_a_value_that_does_not_fit_is_named(change: dict[str, Any], complaint: str) -> None:
    """Nothing is cut off, rounded or made into text on the way."""
    good, changed = Price("a", 1.0), Price("a", 1.0)
    for name, value in change.items():
        setattr(changed, name, value)
    with pytest.raises(SchemaMismatch) as caught:
        columns_of(Price).encode([good, changed, good])
    assert str(caught.value).startswith(complaint)
    assert caught.value.differences == (str(caught.value),)


def test_values_of_kindred_types_are_taken_as_by_the_codec() -> None:
    class Text(str):
        __slots__ = ()

    columns = columns_of(Price)
    [back] = columns.decode(columns.encode([Price(Text("a"), 1, Level.HIGH)]))
    assert (back.symbol, back.bid, back.size) == ("a", 1.0, 2)
    assert [type(back.symbol), type(back.bid), type(back.size)] == [str, float, int]


def test_a_message_of_another_class_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"row 1: expected Price, got Venue"):
        columns_of(Price).encode([Price("a", 1.0), Venue("b")])  # type: ignore[list-item]


def test_a_subclass_in_a_struct_is_refused() -> None:
    """Its further fields would be lost."""

    @message("columns.Exchange")
    class Exchange(Venue):
        country: str = "PT"

    with pytest.raises(SchemaMismatch, match=r"Price.venues\[0\], row 0: expected Venue, got Exchange"):
        columns_of(Price).encode([Price("a", 1.0, venues=[Exchange("b")])])


def test_classes_that_cannot_be_kept_are_refused_at_once() -> None:
    @message("columns.Empty")
    class Empty:
        pass

    @message("columns.WithHandle")
    class WithHandle:
        prices: Receiver[int]

    @message("columns.WithObject")
    class WithObject:
        thing: threading_lock

    with pytest.raises(ConfigurationError, match="Empty has no fields"):
        columns_of(Empty)
    with pytest.raises(ConfigurationError, match=r"WithHandle.prices: a handle is gone when the journal is read"):
        columns_of(WithHandle)
    with pytest.raises(ConfigurationError, match=r"WithObject.thing"):
        columns_of(WithObject)
    with pytest.raises(TypeError, match="is not decorated with @message"):
        columns_of(int)


class threading_lock:  # noqa: N801 - stands for a class that no message may hold
    pass


def test_validators_of_the_class_are_named() -> None:
    @message("columns.Positive")
    class Positive:
        number: int = attrs.field(validator=attrs.validators.gt(0))

    columns = columns_of(Positive)
    with pytest.raises(SchemaMismatch, match=r"Positive refuses these values: .*must be > 0: 0"):
        columns.decode(pa.record_batch([pa.array([0])], schema=columns.schema))


@message("columns.Plain")
class Plain:
    number: int
    flag: bool
    ratio: float
    text: str
    data: bytes
    maybe: int | None = None
    name: str | None = None


EDGES = st.sampled_from([-(1 << 63) - 1, -(1 << 63), 1 - (1 << 63), (1 << 63) - 1, 1 << 63])
ODD = (
    st.none()
    | st.booleans()
    | EDGES
    | st.floats(allow_nan=False)
    | st.binary(max_size=3)
    | st.text("aé\ud800")
    | st.just(Level.HIGH)
)


@pytest.mark.ci
@given(
    st.builds(
        Plain,
        number=st.integers() | ODD,
        flag=st.booleans() | ODD,
        ratio=st.floats(allow_nan=False) | ODD,
        text=st.text() | ODD,
        data=st.binary() | ODD,
        maybe=st.none() | SMALL | ODD,
        name=st.none() | st.text() | ODD,
    )
    | EVERYTHING
)
def test_the_values_of_one_message_are_those_of_its_columns(one: Plain | Everything) -> None:
    """They come another way, by straight code if all fields are plain, and are refused if the columns refuse them."""
    columns: Any = columns_of(type(one))
    try:
        batch = columns.encode([one])
    except SchemaMismatch as error:
        refused = str(error).partition(", row 0")[0]
        with pytest.raises(SchemaMismatch, match=f"^{refused}: "):
            columns.row(one)
    else:
        values, size = columns.row(one)
        assert pa.RecordBatch.from_struct_array(pa.array([values], pa.struct(list(columns.schema)))).equals(batch)
        assert isinstance(one, Everything) or size == sum(
            len(each.encode() if isinstance(each, str) else each)
            for each in (one.text, one.data, one.name)
            if each is not None
        )


def test_keyword_only_fields_and_private_names() -> None:
    @message("columns.Keywords")
    class Keywords:
        _hidden: int = attrs.field(kw_only=True)
        shown: str = attrs.field(default="x")

    columns = columns_of(Keywords)
    make: Any = Keywords
    messages = [make(hidden=5), make("y", hidden=6)]
    assert columns.decode(columns.encode(messages)) == messages
    assert [columns.row(each) for each in messages] == [((5, "x"), 1), ((6, "y"), 1)]


# ---------------------------------------------------------------- schemas


def test_differences_name_each_column() -> None:
    wanted = pa.schema(
        [
            pa.field("symbol", pa.string(), nullable=False),
            ("bid", pa.float64()),
            ("ask", pa.float64()),
            ("venue", pa.struct([("name", pa.string()), ("fee", pa.int64())])),
            ("at", pa.date32()),
        ]
    )
    got = pa.schema(
        [
            ("symbol", pa.string()),
            ("ask", pa.float64()),
            ("bid", pa.string()),
            ("venue", pa.struct([("name", pa.int64()), ("city", pa.string())])),
            ("note", pa.string()),
        ]
    )
    assert differences(wanted, got) == [
        "symbol: may be null, wanted not null",
        "bid: string, wanted double",
        "bid: column 3, wanted column 2",
        "ask: column 2, wanted column 3",
        "venue.name: int64, wanted string",
        "venue.fee: missing, wanted int64",
        "venue.city: string, not wanted",
        "at: missing, wanted date32[day]",
        "note: string, not wanted",
    ]
    assert differences(wanted, wanted) == []
    twice = pa.schema([("a", pa.int64()), ("a", pa.int64())])
    assert differences(wanted, twice) == ["a: there 2 times"]


def test_a_missing_column_displaces_no_other() -> None:
    wanted = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("c", pa.int64())])
    assert differences(wanted, pa.schema([("b", pa.int64()), ("c", pa.int64())])) == ["a: missing, wanted int64"]


def test_a_nullable_column_without_nulls_passes() -> None:
    """Batches that come from a data engine are nullable throughout."""
    wanted = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    assert conform(pa.record_batch({"a": [1, 2]}), wanted).schema == wanted
    with pytest.raises(SchemaMismatch, match=r"a: may be null, wanted not null") as caught:
        conform(pa.record_batch({"a": [1, None]}), wanted, where="/journal")
    assert caught.value.path == "/journal"


def test_nested_nullability_counts_only_where_there_are_nulls() -> None:
    inner = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    wanted = pa.schema([pa.field("a", pa.list_(pa.field("element", inner, nullable=False)))])
    loose = pa.schema([("a", pa.list_(pa.struct([("x", pa.int64())])))])
    rows = [{"a": [{"x": 1}, {"x": 2}]}, {"a": None}, {"a": []}]
    batch = conform(pa.RecordBatch.from_pylist(rows, loose), wanted)
    assert (batch.schema, batch.to_pylist()) == (wanted, rows)
    for bad in ({"a": [None]}, {"a": [{"x": None}]}):
        with pytest.raises(SchemaMismatch, match=r"a: list<item: struct<x: int64>>, wanted list<element: struct<x"):
            conform(pa.RecordBatch.from_pylist([bad], loose), wanted)
    # Of the same layout, and not the same all the same.
    with pytest.raises(SchemaMismatch, match="a: int64, wanted timestamp"):
        conform(pa.record_batch({"a": [1]}), pa.schema([("a", pa.timestamp("us"))]))


def test_columns_that_no_journal_keeps() -> None:
    with pytest.raises(ConfigurationError, match="one column or more"):
        check_schema(pa.schema([]))
    with pytest.raises(ConfigurationError, match="a name of its own: a, a"):
        check_schema(pa.schema([("a", pa.int64()), ("a", pa.int64())]))
    with pytest.raises(ConfigurationError, match="a: dictionaries are not kept"):
        check_schema(pa.schema([("a", pa.list_(pa.dictionary(pa.int8(), pa.string())))]))


def test_a_fingerprint_sees_what_counts() -> None:
    base = pa.schema([("a", pa.int64()), ("b", pa.string())])
    others = [
        pa.schema([("b", pa.string()), ("a", pa.int64())]),
        pa.schema([("a", pa.int32()), ("b", pa.string())]),
        pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.string())]),
        pa.schema([("a", pa.int64()), ("c", pa.string())]),
        pa.schema([("a", pa.int64())]),
    ]
    assert len({fingerprint(schema) for schema in [base, *others]}) == 6
    assert fingerprint(base.with_metadata({"x": "y"})) == fingerprint(base)


def grown() -> tuple[Any, Any]:
    """One class, as it was and as it is."""

    def before() -> Any:
        @message("columns.grown.Place")
        class Place:
            name: str

        @message("columns.grown.Visit")
        class Visit:
            who: str
            place: Place
            places: list[Place]
            by_day: dict[str, Place]

        return Visit, Place

    def after() -> Any:
        @message("columns.later.Place")
        class Place:
            name: str
            stars: int = 3

        @message("columns.later.Visit")
        class Visit:
            who: str
            place: Place
            places: list[Place]
            by_day: dict[str, Place]
            note: str | None = None
            cost: float = 9.5
            tags: list[str] = attrs.field(factory=lambda: ["new"])

        return Visit, Place

    return before(), after()


def test_old_rows_in_new_columns_and_new_rows_in_old_ones() -> None:
    """Fields are added at the end: missing ones take their defaults, unknown ones are ignored, in nested classes too."""
    (old, old_place), (new, new_place) = grown()
    check_growth(columns_of(old).schema, columns_of(new).schema)
    rows = [
        old("ann", old_place("a"), [old_place("b")], {"mon": old_place("c")}),
        old("bob", old_place("d"), [], {}),
    ]
    assert columns_of(new).decode(columns_of(old).encode(rows)) == [
        new("ann", new_place("a", 3), [new_place("b", 3)], {"mon": new_place("c", 3)}, None, 9.5, ["new"]),
        new("bob", new_place("d", 3), [], {}, None, 9.5, ["new"]),
    ]
    later = [new("cid", new_place("a", 5), [new_place("b", 4)], {}, "hm", 1.0, [])]
    assert columns_of(old).decode(columns_of(new).encode(later)) == [old("cid", old_place("a"), [old_place("b")], {})]


def test_columns_that_are_the_same_are_not_copied() -> None:
    batch = pa.record_batch({"a": list(range(1000))})
    wider = fit(batch, pa.schema([("a", pa.int64()), ("b", pa.string())]))
    assert wider.column("a").buffers()[1].address == batch.column("a").buffers()[1].address
    assert wider.column("b").null_count == 1000


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        ([("b", pa.string())], "a: missing, the journal has int64"),
        ([("b", pa.string()), ("a", pa.int64())], "a: column 2, in the journal column 1"),
        ([("a", pa.int32()), ("b", pa.string())], "a: int32, in the journal int64"),
        ([("a", pa.int64(), False), ("b", pa.string())], "a: not null, in the journal it may be null"),
        (
            [("a", pa.int64()), ("b", pa.string()), ("c", pa.int64(), False)],
            "c: new, so it must be nullable or have a default",
        ),
    ],
)
def test_what_is_no_growth(new: list[Any], complaint: str) -> None:
    old = pa.schema([("a", pa.int64()), ("b", pa.string())])
    with pytest.raises(SchemaMismatch, match="grow at the end only") as caught:
        check_growth(old, pa.schema([pa.field(name, kind, nullable=not rest) for name, kind, *rest in new]))
    assert complaint in caught.value.differences


def test_rows_of_unrelated_columns_do_not_fit() -> None:
    with pytest.raises(SchemaMismatch, match="x: column 1, wanted symbol"):
        columns_of(Price).decode(pa.record_batch({"x": [1]}))
    with pytest.raises(SchemaMismatch, match="has nulls, wanted not null"):
        fit(pa.record_batch({"a": [None, 1]}), pa.schema([pa.field("a", pa.int64(), nullable=False)]))
    with pytest.raises(SchemaMismatch, match="b: missing, and it has no default"):
        fit(
            pa.record_batch({"a": [1]}),
            pa.schema([("a", pa.int64()), pa.field("b", pa.int64(), nullable=False)]),
        )


def test_the_envelope_takes_messages_of_any_kind() -> None:
    columns = columns_of(Envelope)
    assert columns.schema.names == ["ts", "key", "sender", "kind", "headers", "value"]
    rows = [
        Envelope(dt.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=UTC), "k", "/a/b", "desk.Price", {"h": b"1"}, b"v"),
        Envelope(dt.datetime(2024, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=2)))),
    ]
    assert columns.decode(columns.encode(rows)) == rows


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ([], True),
        (["a"], True),
        (["a"] * 5, True),
        (["a", "a", "b"], False),
        ([None, None], True),
        (["a", None], False),
    ],
)
def test_columns_of_one_value(values: list[str | None], same: bool) -> None:
    column = pa.array(["x", *values], pa.string()).slice(1)
    assert all_same(column) is same


def test_offsets_are_dense() -> None:
    assert offsets(2**40, 3).to_pylist() == [2**40, 2**40 + 1, 2**40 + 2]
    assert offsets(0, 0).type == pa.int64()
