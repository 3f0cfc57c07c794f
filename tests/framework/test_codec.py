"""The message codec: golden vectors, mutations, round trips, growth, limits, attachments."""

from __future__ import annotations

import datetime as dt
import enum
import json
import sys
import tracemalloc
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NewType, TypeVar

import attrs
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.framework.codec import AttachmentKind, Codec, schema_fingerprint
from levada.framework.errors import ConfigurationError, DecodeError, HandleMoved
from levada.framework.message import Asks, message

T = TypeVar("T")
UTC = dt.UTC
codec = Codec()


@attrs.define(eq=False)
class Handle(Generic[T]):
    number: int = 0
    item: Any = None


class Sender(Handle[T]):
    attachment_kind: ClassVar[str] = "sender"


class Receiver(Handle[T]):
    attachment_kind: ClassVar[str] = "receiver"


class OneshotSender(Handle[T]):
    attachment_kind: ClassVar[str] = "oneshot_sender"


class OneshotReceiver(Handle[T]):
    attachment_kind: ClassVar[str] = "oneshot_receiver"


class Ref(Handle[T]):
    attachment_kind: ClassVar[str] = "ref"


HANDLES: dict[AttachmentKind, type[Handle[Any]]] = {
    AttachmentKind.SENDER: Sender,
    AttachmentKind.RECEIVER: Receiver,
    AttachmentKind.ONESHOT_SENDER: OneshotSender,
    AttachmentKind.ONESHOT_RECEIVER: OneshotReceiver,
    AttachmentKind.REF: Ref,
    AttachmentKind.RETURNED_REF: Ref,
    AttachmentKind.THIRD_REF: Ref,
}


class Frame:
    """The attachments of one message: numbered as the handles say, or in order."""

    def __init__(self, *, keep_numbers: bool = False, home: int | None = None) -> None:
        self.keep_numbers = keep_numbers
        self.home = home
        self.taken: list[Handle[Any]] = []
        self.given_back: list[Handle[Any]] = []

    def attach(self, handle: Any, /) -> tuple[AttachmentKind, int]:
        if any(handle is other for other in self.taken):
            raise HandleMoved("sent twice in one message")
        self.taken.append(handle)
        if self.home is not None and isinstance(handle, Ref):
            return AttachmentKind.RETURNED_REF, self.home
        return AttachmentKind[type(handle).attachment_kind.upper()], handle.number if self.keep_numbers else len(
            self.taken
        ) - 1

    def rollback(self) -> None:
        self.given_back, self.taken = self.taken, []


def detach(number: int, kind: AttachmentKind, item: Any, note: bytes = b"") -> Handle[Any]:
    return HANDLES[kind](number, item)


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


@message("v.Empty")
class Empty:
    pass


@message("v.Price")
class Price:
    symbol: str
    bid: float
    amount: int


@message("v.Deal")
class Deal(Price):
    by: str = "nobody"


@message("v.E")
class E:
    text: str | None = None
    number: int | None = None


@message("v.Book")
class Book:
    prices: list[Price]
    by_name: dict[str, Price]
    pair: tuple[int, str]


@message("v.Holder")
class Holder:
    price: Price


@message("v.Kinds")
class Kinds:
    color: Color
    level: Level
    direction: Literal["up", "down"]
    at: dt.datetime
    day: dt.date
    wait: dt.timedelta
    id: uuid.UUID
    ratio: Decimal
    numbers: set[int]
    names: frozenset[str]
    row: tuple[float, ...]
    blob: bytes
    flag: bool
    table: dict[int, list[None]]


@message("v.Box")
class Box:
    value: Any


@message("v.Follow")
class Follow:
    symbol: str
    prices: Sender[Price]


@message("v.Channels")
class Channels:
    stop: Receiver[None]
    done: OneshotSender[int]
    answer: OneshotReceiver[str]
    actor: Ref[Price | Empty]
    senders: list[Sender[Any]]


@message("v.Either")
class Either:
    value: Price | Empty | str


@message("v.Positive")
class Positive:
    number: int = attrs.field(validator=attrs.validators.gt(0))


@message("v.LocalOnly")
class LocalOnly:
    callback: Callable[[], None]


@message("v.Tree")
class Tree:
    children: list[Tree]
    value: int = 0


PRICE = Price("EURUSD", 1.0825, 7)
KINDS = Kinds(
    Color.RED,
    Level.HIGH,
    "up",
    dt.datetime(2024, 2, 29, 12, 30, 0, 500_000, tzinfo=UTC),
    dt.date(2024, 2, 29),
    dt.timedelta(seconds=90),
    uuid.UUID(bytes=bytes(range(16))),
    Decimal("3.140"),
    {2, 1},
    frozenset({"b", "a"}),
    (1.5, 2.5),
    b"\x00\xff",
    True,
    {7: [None]},
)
VALUES: dict[str, Any] = {
    "empty": Empty(),
    "price": PRICE,
    "price_large_int": Price("", -0.5, 2**64 - 1),
    "fixext": E(),
    "maybe": E("x", 3),
    "book": Book([PRICE, Price("X", 0.0, 0)], {"EUR": PRICE}, (1, "a")),
    "deal_for_price": Holder(Deal("EURUSD", 1.0825, 7, "me")),
    "all_kinds": KINDS,
    "any_tree": Box({"a": [1, None, 2.5, b"b", {"k": PRICE}], 2: True}),
    "follow": Follow("EURUSD", Sender(0)),
    "channels": Channels(Receiver(1), OneshotSender(128), OneshotReceiver(127), Ref(0), [Sender(2), Sender(3)]),
    "ref_home": Channels(Receiver(0), OneshotSender(1), OneshotReceiver(2), Ref(9), []),
    "union_price": Either(PRICE),
    "union_text": Either("text"),
    "array": [1, None, -1],
}
TYPES: dict[str, Any] = {
    **{
        f"v.{cls.__name__}": cls
        for cls in (Empty, Price, E, Book, Holder, Kinds, Box, Follow, Channels, Either, Positive)
    },
    "list[int | None]": list[int | None],
    "list[int]": list[int],
    "list[str]": list[str],
    "set[int]": set[int],
    "dict[str, int]": dict[str, int],
    "typing.Any": Any,
}
VECTORS = json.loads((Path(__file__).parent / "data" / "codec_vectors.json").read_text())


def same(left: Any, right: Any) -> bool:
    """Equality that sees types, and handles by what they stand for."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Handle):
        return bool(left.number == right.number)
    if attrs.has(type(left)):
        return all(same(getattr(left, a.name), getattr(right, a.name)) for a in attrs.fields(type(left)))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return len(left) == len(right) and all(map(same, left.items(), right.items()))
    return bool(left == right) or left != left


# ---------------------------------------------------------------- vectors


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
def test_vectors_both_ways(vector: dict[str, str]) -> None:
    value, octets, expected = VALUES[vector["name"]], bytes.fromhex(vector["hex"]), TYPES[vector["type"]]
    home = 2**64 - 1 if vector["name"] == "ref_home" else None
    assert codec.encode(value, expected, attachments=Frame(keep_numbers=True, home=home)).hex() == vector["hex"]
    decoded = codec.decode(octets, expected, detach=detach)
    if home is not None:
        assert decoded.actor.number == home
        decoded.actor.number = 9
    assert same(decoded, value)
    for data in (bytearray(octets), memoryview(octets)):
        assert type(codec.decode(data, expected, detach=detach)) is type(value)


@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda vector: vector["name"])
def test_invalid_vectors_name_path_and_cause(vector: dict[str, str]) -> None:
    with pytest.raises(DecodeError) as caught:
        codec.decode(bytes.fromhex(vector["hex"]), TYPES[vector["type"]], detach=detach)
    assert caught.value.path == vector["path"]
    assert vector["cause"] in caught.value.detail


def test_every_vector_has_its_value() -> None:
    assert [vector["name"] for vector in VECTORS["valid"]] == list(VALUES)


def decode_or_refuse(octets: bytes, expected: Any) -> None:
    """Whatever the octets, a value or a DecodeError comes out; a value is the same when it was encoded again."""
    try:
        value = codec.decode(octets, expected, detach=detach)
    except DecodeError:
        return
    again = codec.encode(value, expected, attachments=Frame(keep_numbers=True))
    assert same(codec.decode(again, expected, detach=detach), value)


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
def test_every_cut_is_refused(vector: dict[str, str]) -> None:
    octets = bytes.fromhex(vector["hex"])
    for end in range(len(octets)):
        for expected in (TYPES[vector["type"]], Any):
            with pytest.raises(DecodeError):
                codec.decode(octets[:end], expected, detach=detach)


@pytest.mark.ci
@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
def test_every_single_octet_change_decodes_or_is_refused(vector: dict[str, str]) -> None:
    octets = bytearray.fromhex(vector["hex"])
    for position, original in enumerate(octets):
        for changed in range(256):
            octets[position] = changed
            decode_or_refuse(bytes(octets), TYPES[vector["type"]])
        octets[position] = original


def nested_vectors() -> Iterator[bytes]:
    for vector in VECTORS["valid"] + VECTORS["invalid"]:
        yield bytes.fromhex(vector["hex"])


@given(
    st.one_of(
        st.binary(max_size=80),
        st.lists(
            st.sampled_from([*nested_vectors(), b"\x91", b"\x81", b"\xc7\x10\x02", b"\xdd\x00\x00", b"\xd6\xff"]),
            max_size=4,
        ).map(b"".join),
        st.binary(max_size=60).map(lambda tail: msgpack.packb(msgpack.ExtType(2, b"\x92\xa5v.Box" + tail))),
    ),
    st.sampled_from([*TYPES.values()]),
)
def test_any_octets_decode_or_are_refused(octets: bytes, expected: Any) -> None:
    decode_or_refuse(octets, expected)


# ---------------------------------------------------------------- round trips

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ints = st.integers(-(2**63), 2**64 - 1)
prices = st.builds(Price, texts, st.floats(), ints) | st.builds(Deal, texts, st.floats(), ints, texts)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    ints,
    st.floats(),
    texts,
    st.binary(max_size=8),
    st.datetimes(timezones=st.just(UTC)),
    prices,
)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | ints, inner, max_size=4), max_leaves=12
)
messages = st.one_of(
    prices,
    st.builds(Empty),
    st.builds(E, st.none() | texts, st.none() | ints),
    st.builds(Book, st.lists(prices, max_size=3), st.dictionaries(texts, prices, max_size=3), st.tuples(ints, texts)),
    st.builds(Holder, prices),
    st.builds(
        Kinds,
        st.sampled_from(Color),
        st.sampled_from(Level),
        st.sampled_from(["up", "down"]),
        st.datetimes(timezones=st.just(UTC)),
        st.dates(),
        st.timedeltas(dt.timedelta(days=-100_000_000), dt.timedelta(days=100_000_000)),
        st.uuids(),
        st.decimals(allow_nan=False),
        st.sets(ints, max_size=4),
        st.frozensets(texts, max_size=4),
        st.lists(st.floats(), max_size=3).map(tuple),
        st.binary(max_size=8),
        st.booleans(),
        st.dictionaries(ints, st.lists(st.none(), max_size=3), max_size=3),
    ),
    st.builds(Box, trees),
    st.builds(Either, prices | st.builds(Empty) | texts),
    st.recursive(
        st.builds(Tree, st.just([]), ints),
        lambda inner: st.builds(Tree, st.lists(inner, max_size=3), ints),
        max_leaves=8,
    ),
)


@given(messages, st.booleans())
def test_encode_decode_encode(value: Any, by_type: bool) -> None:
    expected = type(value) if by_type else Any
    octets = codec.encode(value, expected)
    decoded = codec.decode(octets, expected)
    assert same(decoded, value)
    assert codec.encode(decoded) == octets


CAREFUL = Codec(max_items=1023)
"""Counts the items of every container, so it takes no short cut."""
ROWS: list[tuple[Any, ...]] = [
    (Price, "x", 1, True), (Price, "x", 2**2000, 1), (Price, 5, 1.0, 1), (Holder, Empty()), (Holder, Deal("x", 1, 1)),
    (Book, (PRICE,), {}, (1, "x")), (Book, [PRICE, Deal("x", 1.0, 1)], {"a": Deal("x", 1.0, 1)}, (1, "x")),
    (Book, [PRICE], {1: PRICE}, (1, "x")), (Book, [], {}, (1, "x", 2)), (Book, [Empty()], {}, (1, "x")),
    (Book, [None], {}, [1, "x"]), (E, b"x", 2**64), (Tree, [Tree([Tree([], 2**64)])]), (Tree, ["x"]), (Tree, ()), (Box, 2**64),
]  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {"color": "red"}, {"at": KINDS.at.replace(tzinfo=None)}, {"row": [1.0]}, {"row": (1, 2)}, {"table": {1: None}},
]  # fmt: skip
ODD = [cls(*fields) for cls, *fields in ROWS] + [typing.cast(Any, attrs).evolve(KINDS, **each) for each in CHANGES]


def outcome(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        return repr(call(*arguments))
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


@given(messages | st.sampled_from(ODD), st.data())
def test_short_cuts_take_and_refuse_what_the_careful_way_does(value: Any, data: st.DataObject) -> None:
    written = outcome(codec.encode, value)
    assert written == outcome(CAREFUL.encode, value)
    if written.startswith("b"):
        octets = bytearray(codec.encode(value))
        if data.draw(st.booleans()):
            octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
        for expected in (Any, type(value), Price):
            assert outcome(codec.decode, bytes(octets), expected) == outcome(CAREFUL.decode, bytes(octets), expected)


def test_short_cuts_end_at_the_same_depth_and_size() -> None:
    tree = Tree([])
    for depth in range(1, 30):
        shallow, careful = (Codec(max_depth=33, max_items=most) for most in (2**20, 1023))
        assert outcome(shallow.encode, tree) == outcome(careful.encode, tree)
        assert outcome(shallow.decode, codec.encode(tree)) == outcome(careful.decode, codec.encode(tree))
        assert (outcome(shallow.encode, tree)[0] == "b") is (2 * depth <= 33)
        tree = Tree([tree])
    row = Tree([Tree([])] * 200)
    assert 1024 < len(codec.encode(row)) < 65_536
    assert codec.decode(codec.encode(row)) == row
    for few in (Codec(max_items=1999), Codec(max_bytes=1024)):
        assert outcome(few.encode, row).startswith("ValueError")
        assert outcome(few.decode, codec.encode(row)).startswith("DecodeError")


UserId = NewType("UserId", int)
Bounded = TypeVar("Bounded", bound=str)


@pytest.mark.parametrize(
    ("annotation", "value", "decoded"),
    [
        (float, 3, 3.0),
        (int, Level.HIGH, 2),
        (int, True, 1),
        (bytes, bytearray(b"x"), b"x"),
        (Sequence[int], (1, 2), [1, 2]),
        (Mapping[str, int], {"a": 1}, {"a": 1}),
        (tuple, (1, "a"), (1, "a")),
        (tuple[()], (), ()),
        (dict, {"a": 1}, {"a": 1}),
        (list, [(1, 2)], [[1, 2]]),
        (dict[tuple[int, str], float], {(1, "a"): 1}, {(1, "a"): 1.0}),
        (dict[frozenset[int], int], {frozenset({2, 1}): 3}, {frozenset({1, 2}): 3}),
        (set[Decimal], {Decimal(1)}, {Decimal(1)}),
        (Mode, Mode.READ | Mode.WRITE, Mode.READ | Mode.WRITE),
        (UserId, 5, 5),
        (Annotated[int, "unit"], 5, 5),
        (Bounded, "x", "x"),
        (T, ["x"], ["x"]),
        (object, None, None),
        (None, None, None),
        (int | float, 2, 2),
        (float | None, 2, 2.0),
        (typing.Union[list[int], str], [1], [1]),  # noqa: UP007
        (Literal[1, True, None, Color.RED], Color.RED, Color.RED),
        (list[Literal[1, True]], [True, 1], [True, 1]),
        (Any | None, [1], [1]),
    ],
    ids=str,
)
def test_annotations(annotation: Any, value: Any, decoded: Any) -> None:
    got = codec.decode(codec.encode(value, annotation), annotation)
    assert got == decoded
    assert repr(got) == repr(decoded)


def flags_of(base: Any) -> Any:
    """A new class of twenty flags, of which nothing is remembered yet."""
    return base("Rights", {f"r{bit}": 1 << bit for bit in range(20)} | {"both": 3})


@pytest.mark.ci
@pytest.mark.parametrize("base", [enum.Flag, enum.IntFlag])
def test_a_class_of_flags_does_not_remember_what_a_peer_sends(base: Any) -> None:
    rights: Any = flags_of(base)
    codec.encode(rights.r0, rights)
    known = len(rights._value2member_map_)
    tracemalloc.start()
    for value in range(20_000):
        assert codec.decode(msgpack.packb(value), rights).value == value
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rights._value2member_map_) == known
    assert kept < 100_000


@pytest.mark.parametrize("base", [enum.Flag, enum.IntFlag])
def test_a_combination_of_flags_equals_the_one_that_a_program_makes(base: Any) -> None:
    """Of the program's own, made before and after, and of the named ones it is the same object, as from a call of the class."""
    rights: Any = flags_of(base)
    mine = rights.r4 | rights.r5
    assert codec.decode(codec.encode(mine, rights), rights) is mine
    assert codec.decode(msgpack.packb(3), rights) is rights.both
    assert codec.decode(msgpack.packb(4), rights) is rights.r2
    for value in (0, 0b1_1000_0000):
        came = codec.decode(msgpack.packb(value), rights)
        assert type(came) is rights
        assert came == (rights.r7 | rights.r8 if value else rights(0))
        assert rights(value) == came
        assert repr(came) == repr(rights(value))
        assert (rights.r8 in came, rights.r1 in came) == (bool(value), False)


@pytest.mark.parametrize("boundary", enum.FlagBoundary)
@pytest.mark.parametrize("value", [4, 1 << 40, 1 << 63, -1, -4])
def test_bits_that_no_flag_has_are_refused_before_a_flag_is_made(boundary: enum.FlagBoundary, value: int) -> None:
    """Whatever the class would make of them."""

    class Two(enum.IntFlag, boundary=boundary):
        READ = 1
        WRITE = 2

    with pytest.raises(DecodeError, match=f"^{value} has bits that no member of Two has$"):
        codec.decode(msgpack.packb(value), Two)
    assert set(Two._value2member_map_) == {1, 2}


def test_bits_that_no_flag_has_are_not_sent() -> None:
    class Two(enum.IntFlag):
        READ = 1
        WRITE = 2

    with pytest.raises(ValueError, match="has bits that no member of Two has"):
        codec.encode(Two(8), Two)


def test_times_arrive_in_utc() -> None:
    there = dt.datetime(2024, 1, 1, 3, tzinfo=dt.timezone(dt.timedelta(hours=3)))
    got = codec.decode(codec.encode(there, dt.datetime), dt.datetime)
    assert (got, got.tzinfo) == (there, UTC)


def test_sets_are_written_in_one_order() -> None:
    forwards, backwards = {str(i) for i in range(50)}, {str(i) for i in reversed(range(50))}
    assert (
        codec.encode(forwards, set[str])
        == codec.encode(backwards, set[str])
        == msgpack.packb(sorted(forwards, key=msgpack.packb))
    )


def test_questions_are_messages_and_a_base_takes_every_registered_question() -> None:
    @message
    class Count(Asks[int]):
        of: str

    assert codec.decode(codec.encode(Count("x")), Asks[int]) == Count("x")
    with pytest.raises(DecodeError, match="Price: expected Asks, got Price"):
        codec.decode(codec.encode(PRICE), Asks[int])


@message
class Pair(Generic[T]):
    left: T
    right: list[T]


def test_generic_messages_check_the_class_and_leave_the_parameter_open() -> None:
    mixed: Pair[Any] = Pair(1, ["x"])
    assert codec.decode(codec.encode(mixed), Pair[int]) == mixed


# ---------------------------------------------------------------- growth


@message("grow.Old")
class Old:
    a: int
    b: str


@message("grow.New")
class New:
    a: int
    b: str
    c: float = 0.5
    d: list[str] = attrs.field(factory=list)
    e: bool = attrs.field(default=True, kw_only=True)


def retagged(octets: bytes, tag: str) -> bytes:
    """The same message as a process would send it that knows another version of the class."""
    row = msgpack.unpackb(msgpack.unpackb(octets).data)
    return bytes(msgpack.packb(msgpack.ExtType(2, msgpack.packb([tag, *row[1:]]))))


def test_a_subclass_without_fields_of_its_own_stays_itself() -> None:
    @message("v.Tick")
    class Tick(Price):
        pass

    codec.encode(PRICE)
    octets = retagged(codec.encode(PRICE), "v.Tick")
    assert type(codec.decode(octets)) is Tick
    assert codec.encode(Tick("EURUSD", 1.0825, 7)) == octets


def test_missing_trailing_fields_take_their_defaults() -> None:
    octets = codec.encode(Old(1, "x"))
    assert codec.decode(retagged(octets, "grow.New")) == New(1, "x", 0.5, [], e=True)


def test_trailing_fields_beyond_the_known_are_ignored() -> None:
    octets = codec.encode(New(1, "x", 2.5, ["y"], e=False))
    assert codec.decode(octets) == New(1, "x", 2.5, ["y"], e=False)
    assert codec.decode(retagged(octets, "grow.Old")) == Old(1, "x")


def test_fields_that_are_missing_without_default_are_named() -> None:
    with pytest.raises(DecodeError, match=r"^New: 1 fields came, b missing and without default$"):
        codec.decode(msgpack.packb(msgpack.ExtType(2, msgpack.packb(["grow.New", 1]))))


def test_underscored_converted_and_derived_fields() -> None:
    @message
    class Odd:
        _hidden: int = attrs.field(alias="hidden")
        text: str = attrs.field(converter=str)
        size: int = attrs.field(init=False, default=0)

        def __attrs_post_init__(self) -> None:
            self.size = len(self.text)

    assert codec.decode(codec.encode(Odd(1, "abc"))) == Odd(hidden=1, text="abc")
    assert codec.decode(codec.encode(Odd(1, "abc"))).size == 3


# ---------------------------------------------------------------- what cannot be encoded


def evolve(value: Any, **changes: Any) -> Any:
    return attrs.evolve(value, **changes)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (Book([PRICE, Price("X", "1", 2)], {}, (1, "a")), TypeError, "Book.prices[1].bid: expected float, got str"),  # type: ignore[arg-type]
        (
            Book([], {"EUR": Price("X", 1.0, 2**64)}, (1, "a")),
            ValueError,
            "Book.by_name['EUR'].amount: expected an int from -2**63 to 2**64-1",
        ),
        (Price("\ud800", 1.0, 1), ValueError, "Price.symbol: 'utf-8' codec can't encode"),
        (Box({"a": [1, {"b": 2**64}]}), ValueError, "Box.value['a'][1]['b']: expected an int"),
        (Box({2**64: 1}), ValueError, "Box.value[key 18446744073709551616]: expected an int"),
        (Box({(1, 2): 3}), TypeError, "Box.value[key (1, 2)]: a tuple comes back as a list, which is no key"),
        (Box([{((1,),): 3}]), TypeError, "Box.value[0][key ((1,),)]: a tuple comes back as a list"),
        (Box([1, {2}]), TypeError, "Box.value[1]: set cannot travel without an annotation that says set"),
        (Box(object()), TypeError, "Box.value: object cannot travel"),
        (Box(dt.datetime(2024, 1, 1)), ValueError, "Box.value: a datetime without timezone"),  # noqa: DTZ001
        (Box(Sender()), TypeError, "Box.value: Sender cannot travel here: this place takes no attachments"),
        (Follow("x", Receiver()), TypeError, "Follow.prices: expected Sender[Price], got Receiver"),  # type: ignore[arg-type]
        (Either(3), TypeError, "Either.value: expected Empty | Price | str, got int"),  # type: ignore[arg-type]
        (Holder(Empty()), TypeError, "Holder.price: expected Price, got Empty"),  # type: ignore[arg-type]
        (Book([], {}, (1,)), ValueError, "Book.pair: expected tuple[int, str], got 1 items"),  # type: ignore[arg-type]
        (Book({}, {}, (1, "")), TypeError, "Book.prices: expected list[Price], got dict"),  # type: ignore[arg-type]
        (Book([], {1: PRICE}, (1, "")), TypeError, "Book.by_name[key 1]: expected str, got int"),  # type: ignore[dict-item]
        (evolve(KINDS, color="red"), TypeError, "Kinds.color: expected Color, got 'red'"),
        (evolve(KINDS, direction="left"), TypeError, "Kinds.direction: expected Literal['up', 'down'], got 'left'"),
        (evolve(KINDS, day=KINDS.at), TypeError, "Kinds.day: expected date, got datetime"),
        (evolve(KINDS, wait=dt.timedelta.max), ValueError, "Kinds.wait: expected an int from"),
        (evolve(KINDS, row=(10**400,)), ValueError, "Kinds.row[0]: int too large to convert to float"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_encoding_errors_name_path_and_cause(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        codec.encode(value)
    assert str(caught.value).startswith(text)


def test_a_coroutine_that_was_not_awaited_is_named() -> None:
    async def price() -> float:
        return 1.0

    coroutine = price()
    with pytest.raises(TypeError, match=r"^Box\.value: the coroutine .*price cannot travel: await it$"):
        codec.encode(Box(coroutine))
    coroutine.close()


@pytest.mark.parametrize(
    ("annotation", "value", "place"),
    [
        (dict[Any, int], {(1, 2): 3}, "[key (1, 2)]"),
        (dict[tuple[Any, int], int], {((1,), 2): 3}, "[key ((1,), 2)][0]"),
        (dict[int | Any, int], {(1,): 2}, "[key (1,)]"),
        (set[Any], {(1, 2)}, "[0]"),
        (frozenset[tuple[Any, ...]], frozenset({((1,),)}), "[0][0]"),
    ],
)
def test_a_key_that_would_not_come_back_hashable_is_refused(annotation: Any, value: Any, place: str) -> None:
    with pytest.raises(TypeError) as caught:
        codec.encode(value, annotation)
    assert str(caught.value).startswith(f"{place}: a tuple comes back as a list")
    assert codec.decode(codec.encode({(1, 2): 3}, dict[tuple[int, int], int]), dict[tuple[int, int], int]) == {
        (1, 2): 3
    }
    assert codec.decode(codec.encode({1, "a"}, set[Any]), set[Any]) == {1, "a"}


def test_a_subclass_without_the_decorator_cannot_travel() -> None:
    class Sneaky(Price):
        pass

    with pytest.raises(TypeError, match=r"Holder\.price: .*Sneaky is not decorated with @message"):
        codec.encode(Holder(Sneaky("x", 1.0, 1)))


class Odd(enum.Enum):
    PAIR = (1, 2)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Callable[[], None], "cannot travel"),
        (complex, "complex cannot travel"),
        (list[complex], "complex cannot travel"),
        (str | Decimal, "look the same on the wire"),
        (list[int] | set[int], "look the same on the wire"),
        (Sender[int] | Sender[str], "look the same on the wire"),
        (Literal["red", Color.RED], "look the same on the wire"),
        (Odd, "values other than str and int"),
    ],
    ids=str,
)
def test_annotations_that_cannot_travel(annotation: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        codec.encode(None, annotation)


@message
class Unresolved:
    good: int
    bad: Missing  # type: ignore[name-defined]  # noqa: F821


def test_fields_that_cannot_travel_are_named_at_first_use() -> None:
    with pytest.raises(ConfigurationError, match=r"^Unresolved\.bad: cannot resolve the annotation 'Missing'"):
        codec.encode(Unresolved(1, 2))
    with pytest.raises(ConfigurationError, match=r"^LocalOnly\.callback: .*Callable.* cannot travel"):
        codec.encode(LocalOnly(lambda: None))
    with pytest.raises(ConfigurationError, match=r"^LocalOnly\.callback"):
        codec.decode(b"", LocalOnly)


# ---------------------------------------------------------------- limits


def nested(depth: int, innermost: Any) -> Any:
    for _ in range(depth):
        innermost = [innermost]
    return innermost


def test_depth_is_limited_both_ways_and_counts_messages_and_containers() -> None:
    limited = Codec(max_depth=5)
    fits: Any = Box([[Box([1])]])
    assert limited.decode(limited.encode(fits)) == fits
    for too_deep in (Box([[Box([[1]])]]), Box([[Box([Box(1)])]])):
        with pytest.raises(ValueError, match=r"^Box\.value\[0\]\[0\]\.value\[0\]: nested too deeply"):
            limited.encode(too_deep)
        with pytest.raises(DecodeError, match=r"^Box\.value\[0\]\[0\]\.value\[0\]: nested too deeply"):
            limited.decode(codec.encode(too_deep))


def test_the_largest_depth_works_for_messages_and_lists() -> None:
    deepest = Codec(max_depth=128)
    tree = Tree([])
    for _ in range(63):
        tree = Tree([tree])
    assert deepest.decode(deepest.encode(tree)) == tree
    assert deepest.decode(deepest.encode(nested(128, None))) == nested(128, None)
    with pytest.raises(ValueError, match="max_depth"):
        Codec(max_depth=129)


@pytest.mark.parametrize("levels", [100, 1000, 5000, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01"], ids=["array", "map", "array32"])
def test_recursion_bombs_are_refused(levels: int, opening: bytes) -> None:
    for bomb in (opening * levels, opening * levels + b"\xc0"):
        for octets in (bomb, msgpack.packb(msgpack.ExtType(2, b"\x92\xa5v.Box" + bomb))):
            with pytest.raises(DecodeError):
                codec.decode(octets)


def test_ext_bombs_are_refused() -> None:
    octets = b"\xc0"
    for _ in range(400):
        octets = msgpack.packb(msgpack.ExtType(2, b"\x92\xa5v.Box" + octets))
    with pytest.raises(DecodeError, match="nested too deeply"):
        codec.decode(octets)


def test_copies_of_nested_payloads_have_a_budget_both_ways() -> None:
    limited = Codec(max_bytes=1000)
    value = Box(bytes(600))
    for _ in range(12):
        value = Box(value)
    with pytest.raises(
        ValueError, match=r"Box\.value.*: messages nested in messages add up to more than 8 times max_bytes"
    ):
        limited.encode(value)
    with pytest.raises(
        DecodeError, match=r"Box\.value.*: messages nested in messages add up to more than 8 times max_bytes"
    ):
        limited.decode(codec.encode(value))


def allocated_by_decoding(octets: bytes, codec: Codec = codec) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            codec.decode(octets)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_claimed_lengths_allocate_nothing() -> None:
    assert allocated_by_decoding(b"\xdd\xff\xff\xff\xff") < 100_000
    # Each of 900 nested lists claims 100,000 items, which the octets could hold if there were only one.
    claims = b"\xdd" + (100_000).to_bytes(4, "big")
    assert allocated_by_decoding(claims * 900 + bytes(100_000)) < 1_000_000
    assert allocated_by_decoding(msgpack.packb(msgpack.ExtType(2, claims * 900 + bytes(100_000)))) < 2_000_000


def test_sizes_are_limited_both_ways() -> None:
    limited = Codec(max_bytes=40, max_items=3)
    assert limited.decode(limited.encode([1, 2, 3])) == [1, 2, 3]
    for value in ([1, 2, 3, 4], {1: 1, 2: 2, 3: 3, 4: 4}):
        with pytest.raises(ValueError, match=r"^4 items, at most 3 \(max_items\)$"):
            limited.encode(value)
        with pytest.raises(DecodeError, match=r"^4 items, at most 3 \(max_items\)$"):
            limited.decode(codec.encode(value))
    with pytest.raises(ValueError, match=r"^E: 5\d bytes, at most 40 \(max_bytes\)$"):
        limited.encode(E("x" * 40, 1))
    with pytest.raises(DecodeError, match=r"^5\d bytes, at most 40 \(max_bytes\)$"):
        limited.decode(codec.encode(E("x" * 40, 1)))


def items_of(value: Any) -> int:
    """What a value counts for under `Codec.max_items`."""
    if isinstance(value, Box):
        return 8 + 1 + items_of(value.value) + 8  # the ext value, and the row in it: tag and field
    if isinstance(value, list):
        return 8 + sum(map(items_of, value))
    if isinstance(value, dict):
        return 8 + sum(items_of(k) + items_of(each) for k, each in value.items())
    return 1


some_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 2**40), inner) | st.builds(Box, inner),
    max_leaves=30,
)


@pytest.mark.ci
@given(some_values, st.sampled_from([0, 30, 200, 300, 2**16]))
def test_all_values_of_a_message_have_one_budget_both_ways(value: Any, blob: int) -> None:
    """Values of whatever size and depth are counted, each once."""
    message = [value, "x" * 1024, bytes(blob), "y" * blob]
    items = items_of(message)
    assert Codec(max_items=items).decode(Codec(max_items=items).encode(message)) == message
    with pytest.raises(ValueError, match=rf"^more than {items - 1} items in all"):
        Codec(max_items=items - 1).encode(message)
    with pytest.raises(DecodeError, match=rf"^more than {items - 1} items in all"):
        Codec(max_items=items - 1).decode(codec.encode(message))


BOMBS = {
    "empty maps": b"\x80" * 200_000,
    "empty lists": b"\x90" * 200_000,
    "lists in lists": b"\x91\xc0" * 100_000,
    "texts": b"\xa2ab" * 100_000,
    "small messages": msgpack.packb(msgpack.ExtType(2, b"\x92\xa5v.Box\xc0")) * 20_000,
}


def wrapped(items: bytes) -> bytes:
    """A list whose length is right for items of one octet; the others are refused before it matters."""
    return b"\xdd" + len(items).to_bytes(4, "big") + items


@pytest.mark.parametrize("items", BOMBS.values(), ids=BOMBS)
def test_too_many_values_are_refused_before_one_is_made(items: bytes) -> None:
    limited = Codec(max_items=20_000)
    assert allocated_by_decoding(wrapped(items), limited) < 30_000
    in_a_message = msgpack.packb(msgpack.ExtType(2, b"\x92\xa5v.Box" + wrapped(items)))
    assert allocated_by_decoding(in_a_message, limited) < 30_000


def test_a_length_that_claims_what_follows_hides_nothing() -> None:
    """What is counted ends with the message that it is in, whatever lengths the inside claims."""
    claims = msgpack.packb(msgpack.ExtType(2, b"\x92\xa5v.Box\xc6" + (200_000).to_bytes(4, "big")))
    assert allocated_by_decoding(wrapped(claims + b"\x80" * 200_000), Codec(max_items=20_000)) < 30_000


@message("v.Early")
class Early:
    number: int
    rest: list[Any]


def test_nothing_behind_a_misfit_is_made() -> None:
    """A large message is read field by field: what one is not of the right type for is not made, nor what is behind it."""
    texts = b"\xdd" + (100_000).to_bytes(4, "big") + b"\xa2ab" * 100_000  # 6 MB if it is made
    for row, text in (
        (b"\xa3one" + texts, "Early.number: expected int, got str"),
        (texts + b"\x90", "Early.number: expected int, got list"),
        (b"\x01" + b"\x81\x01" + texts, r"Early.rest: expected list\[Any\], got dict"),
    ):
        octets = msgpack.packb(msgpack.ExtType(2, b"\x93\xa7v.Early" + row))
        assert allocated_by_decoding(octets) < 3 * len(octets)  # two copies of it, and one in the unpacker
        with pytest.raises(DecodeError, match=f"^{text}$"):
            codec.decode(octets)
    octets = b"\x81\x01" + texts
    tracemalloc.start()
    for wanted, got in ((list[str], "list[str]"), (int, "int"), (bytes, "bytes"), (Early, "Early")):
        with pytest.raises(DecodeError) as caught:
            codec.decode(octets, wanted)
        assert str(caught.value) == f"expected {got}, got dict"
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_large_messages_travel_and_grow_as_small_ones_do() -> None:
    large = Early(7, ["x" * 100_000, {"a": 1}])
    assert codec.decode(codec.encode(large)) == large
    row = msgpack.packb(["v.Early", 7, ["x" * 100_000, {"a": 1}], "a field of a later version"])
    assert codec.decode(msgpack.packb(msgpack.ExtType(2, row))) == large
    for wrong, text in (
        (["v.Early", bytes(100_000)], r"^Early.number: expected int, got bytes$"),
        (["v.Box" + "x" * 100_000], "^unknown tag 'v.Boxxx"),
        ([["v.Early"], bytes(100_000)], "an array that begins with a tag"),
        ({"v.Early": bytes(100_000)}, "an array that begins with a tag"),
    ):
        with pytest.raises(DecodeError, match=text):
            codec.decode(msgpack.packb(msgpack.ExtType(2, msgpack.packb(wrong))))
    for damaged in (row[:-1], row + b"\x00", row.replace(b"x" * 100_000, b"\xff" * 100_000)):
        with pytest.raises(DecodeError, match="not valid msgpack"):
            codec.decode(msgpack.packb(msgpack.ExtType(2, damaged)))


def test_keys_that_were_chosen_to_have_one_hash_are_refused() -> None:
    """Finding one of n such keys takes n steps: 20,000 of them, 360 kB, took 25 s."""
    alike = [uuid.UUID(int=7 + i * sys.hash_info.modulus) for i in range(20_000)]
    numbers = [Decimal(7 + i * sys.hash_info.modulus) for i in range(20_000)]
    for keys, kind in ((alike, uuid.UUID), (numbers, Decimal)):
        few = dict.fromkeys(keys[:99], 1)
        assert codec.decode(codec.encode(few, dict[kind, int]), dict[kind, int]) == few  # type: ignore[valid-type]
        plain = [key.bytes if isinstance(key, uuid.UUID) else str(key) for key in keys]
        with pytest.raises(DecodeError, match="a hundred keys with one hash"):
            codec.decode(msgpack.packb(plain), set[kind])  # type: ignore[valid-type]
        with pytest.raises(DecodeError, match="a hundred keys with one hash"):
            codec.decode(msgpack.packb(dict.fromkeys(plain, 1)), dict[kind, int])  # type: ignore[valid-type]


def test_decode_takes_octets() -> None:
    with pytest.raises(TypeError, match="got str, wanted bytes"):
        codec.decode("x")  # type: ignore[call-overload]


# ---------------------------------------------------------------- what user code does while decoding


def test_errors_of_validators_are_decode_errors_with_their_cause() -> None:
    @message
    class Picky:
        inner: Positive | None = None
        other: int = 0

        def __attrs_post_init__(self) -> None:
            if self.other:
                raise RuntimeError("other must stay 0")

    octets = codec.encode(Picky(Positive(7))).replace(b"v.Positive\x07", b"v.Positive\xff")
    with pytest.raises(
        DecodeError, match=r"^Picky\.inner: Positive refuses these values: 'number' must be > 0: -1$"
    ) as caught:
        codec.decode(octets)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(DecodeError, match="refuses these values: other must stay 0") as caught:
        codec.decode(codec.encode(Picky()).replace(b"\xc0\x00", b"\xc0\x01"))
    assert isinstance(caught.value.__cause__, RuntimeError)


# ---------------------------------------------------------------- attachments


def test_handles_are_attached_in_order_and_detached_with_kind_and_item_type() -> None:
    frame = Frame()
    value = Channels(Receiver(), OneshotSender(), OneshotReceiver(), Ref(), [Sender()])
    octets = codec.encode(value, attachments=frame)
    assert frame.taken == [value.stop, value.done, value.answer, value.actor, value.senders[0]]
    asked: list[tuple[int, AttachmentKind, Any]] = []

    def record(*arguments: Any) -> Handle[Any]:
        asked.append(arguments)
        return detach(*arguments)

    codec.decode(octets, detach=record)
    assert asked == [
        (0, AttachmentKind.RECEIVER, type(None)),
        (1, AttachmentKind.ONESHOT_SENDER, int),
        (2, AttachmentKind.ONESHOT_RECEIVER, str),
        (3, AttachmentKind.REF, Price | Empty),
        (4, AttachmentKind.SENDER, Any),
    ]


def test_a_ref_says_who_it_is() -> None:
    """What `attach` gives beside kind and number comes back to `detach`; of refs only."""

    class Named(Frame):
        def attach(self, handle: Any, /) -> Any:
            return *super().attach(handle), b"\x07/desk"

    octets = codec.encode(Box([Ref(), Ref()]), attachments=Named())
    assert octets.endswith(bytes.fromhex("d7010400072f6465736bd7010401072f6465736b"))
    asked: list[Any] = []
    codec.decode(octets, detach=lambda *arguments: asked.append(arguments))
    assert asked == [(0, AttachmentKind.REF, Any, b"\x07/desk"), (1, AttachmentKind.REF, Any, b"\x07/desk")]
    for kind in (0, 1, 2, 3, 5):
        wrong = octets.replace(bytes.fromhex("d7010400"), bytes([0xD7, 1, kind, 0]))
        with pytest.raises(DecodeError, match="not an attachment"):
            codec.decode(wrong, detach=detach)


def test_handles_travel_under_any_and_as_members_of_unions() -> None:
    @message
    class Loose:
        either: Sender[int] | Receiver[str] | None
        free: Any

    got = codec.decode(codec.encode(Loose(Receiver(), [Sender()]), attachments=Frame()), detach=detach)
    assert isinstance(got.either, Receiver)
    assert (got.either.number, got.either.item) == (0, str)
    assert isinstance(got.free[0], Sender)
    assert (got.free[0].number, got.free[0].item) == (1, Any)


def test_every_handle_is_given_back_when_encoding_fails() -> None:
    first, second = Sender[Any](), Sender[Any]()
    frame = Frame()
    with pytest.raises(TypeError, match=r"Box\.value\[2\]: object cannot travel"):
        codec.encode(Box([first, second, object()]), attachments=frame)
    assert (frame.taken, frame.given_back) == ([], [first, second])


def test_errors_of_attach_give_the_rest_back_and_reach_the_caller() -> None:
    handle = Sender[Any]()
    frame = Frame()
    with pytest.raises(HandleMoved, match="sent twice"):
        codec.encode(Box([handle, handle]), attachments=frame)
    assert (frame.taken, frame.given_back) == ([], [handle])


def test_handles_are_given_back_when_the_result_is_too_large() -> None:
    frame = Frame()
    with pytest.raises(ValueError, match="max_bytes"):
        Codec(max_bytes=20).encode(Box([Sender(), bytes(30)]), attachments=frame)
    assert len(frame.given_back) == 1


def test_attachments_need_a_place() -> None:
    octets = codec.encode(Follow("x", Sender()), attachments=Frame())
    with pytest.raises(DecodeError, match=r"^Follow\.prices: an attachment where none can be$"):
        codec.decode(octets)


@pytest.mark.parametrize(
    "refusal", [IndexError("out of range"), ValueError("wrong direction"), HandleMoved("gone")], ids=repr
)
def test_refusals_of_detach_are_decode_errors(refusal: Exception) -> None:
    def refuse(number: int, kind: AttachmentKind, item: Any) -> Handle[Any]:
        raise refusal

    octets = codec.encode(Follow("x", Sender()), attachments=Frame())
    with pytest.raises(DecodeError, match=rf"^Follow\.prices: attachment 0: {refusal}$") as caught:
        codec.decode(octets, detach=refuse)
    assert caught.value.__cause__ is refusal


# ---------------------------------------------------------------- fingerprint


def test_fingerprints_follow_tags_names_and_types_only() -> None:
    assert schema_fingerprint([Price, Book]) == schema_fingerprint([Book, Price, Price]) == "4dae3225"
    seen = {schema_fingerprint([Old]), schema_fingerprint([New])}
    for fields in ({"a": int, "b": str}, {"a": int, "c": str}, {"b": str, "a": int}, {"a": int, "b": bytes}):
        cls: type[Any] = message("grow.Changing")(
            type("Changing", (), {"__annotations__": fields, "__module__": __name__})
        )
        seen.add(schema_fingerprint([cls]))
    assert len(seen) == 6
    with pytest.raises(TypeError, match="not decorated"):
        schema_fingerprint([int])


@message("v.Bulk")
class Bulk:
    name: str
    data: bytes
    runs: list[tuple[int, int]]
    more: Any = None


@pytest.mark.parametrize("size", [0x3FFF, 0x4000, 0xFFF0, 0xFFFF, 0x10000, 300_000])
def test_bulk_travels_as_msgpack_writes_it(size: int) -> None:
    """Long bytes take a way of their own, in both directions."""
    bulk = Bulk("x" * 40, bytes(range(256)) * (size // 256) + bytes(size % 256), [(0, 4096), (5000, 5001)])
    octets = Codec().encode(bulk)
    row = msgpack.packb(["v.Bulk", bulk.name, bulk.data, bulk.runs, None])
    assert octets == msgpack.packb(msgpack.ExtType(2, row))
    for expected in (Any, Bulk, object):
        assert Codec().decode(octets, expected) == bulk


def test_bulk_that_is_cut_or_wrong_is_refused() -> None:
    octets = Codec().encode(Bulk("x", bytes(70_000), []))
    for cut in (5, 6, 20, 40, 69_000, len(octets) - 1):
        with pytest.raises(DecodeError):
            Codec().decode(octets[:cut])
    wrong = octets.replace(b"\xa6v.Bulk\xa1x", b"\xa6v.Bulk\x07\xc0")
    with pytest.raises(DecodeError):
        Codec().decode(wrong)
    claims = msgpack.packb(["v.Bulk", "x", bytes(70_000)])[:-1] + b"\xdd\xff\xff\xff\xff"
    with pytest.raises(DecodeError):
        Codec().decode(msgpack.packb(msgpack.ExtType(2, claims)))
    assert allocated_by_decoding(msgpack.packb(msgpack.ExtType(2, claims)), Codec()) < 500_000
