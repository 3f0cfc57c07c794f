"""Metadata extensions: vectors, round trips, cuts and flips, and what is never shown."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.framework.errors import DecodeError
from levada.transports.rsocket import extensions
from levada.transports.rsocket.extensions import (
    WELL_KNOWN_MIME_TYPES,
    AcceptableMimeTypes,
    Authentication,
    BearerAuthentication,
    CompositeMetadata,
    DataMimeType,
    Entry,
    OtherAuthentication,
    Routing,
    SimpleAuthentication,
    ZipkinTracing,
)

VECTORS = json.loads((Path(__file__).parent / "data" / "extension_vectors.json").read_text(encoding="utf-8"))
NAMES = {name: getattr(extensions, name) for name in extensions.__all__}
KINDS: tuple[Any, ...] = (
    AcceptableMimeTypes,
    Authentication,
    CompositeMetadata,
    DataMimeType,
    Routing,
    ZipkinTracing,
)


def named(vector: dict[str, Any]) -> str:
    return str(vector.get("name") or f"{vector['class']}: {vector['why']}")


def value_of(vector: dict[str, Any]) -> Any:
    return eval(vector["value"], {**NAMES, "__builtins__": {}})  # the data file is ours


def read_or_refuse(data: bytes) -> None:
    """Read the octets as each kind: a value whose octets are read the same again, or a DecodeError."""
    for kind in KINDS:
        try:
            value = kind.decode(data)
        except DecodeError:
            continue
        assert kind.decode(value.encode()) == value


@pytest.mark.rule("EXT-1")
@pytest.mark.parametrize("vector", VECTORS["composite"], ids=named)
def test_ext1_entries_of_a_peer_both_ways(vector: dict[str, Any]) -> None:
    """An entry is a MIME id or length - 1 and a name, a 24-bit length, and the metadata."""
    octets = bytes.fromhex(vector["hex"])
    value = value_of(vector)
    assert CompositeMetadata.of(value).encode() == octets
    read = CompositeMetadata.decode(octets)
    assert [entry.mime_type for entry in read.entries] == [vector["mime"]]
    if isinstance(value, Entry):
        assert read.entries == (value,)
    else:
        assert read.first(type(value)) == value
        assert read.all(type(value)) == [value]


@pytest.mark.rule("EXT-1")
def test_ext1_order_is_kept_and_unknown_entries_are_skipped() -> None:
    """The same MIME may repeat, order is kept, an unknown entry is skipped by its length and kept."""
    metadata = CompositeMetadata.of(
        Entry("x/y", b"\xfe\x00"), Routing("one"), Entry(0x55, b"?"), BearerAuthentication("t"), Routing("two")
    )
    read = CompositeMetadata.decode(metadata.encode())
    assert read == metadata
    assert [entry.mime_type for entry in read.entries] == [
        "x/y",
        Routing.MIME_TYPE,
        0x55,
        Authentication.MIME_TYPE,
        Routing.MIME_TYPE,
    ]
    assert read.first(Routing) == Routing("one")
    assert read.all(Routing) == [Routing("one"), Routing("two")]
    assert read.first(Authentication) == BearerAuthentication("t")
    assert read.first(ZipkinTracing) is None
    assert read.all(ZipkinTracing) == []


@pytest.mark.rule("EXT-1")
def test_ext1_names_have_1_to_128_octets() -> None:
    """Length - 1 of a MIME string in 7 bits: 1 to 128 octets."""
    longest = Entry("m" * 128, b"")
    assert CompositeMetadata.of(longest).encode() == b"\x7f" + b"m" * 128 + bytes(3)
    assert CompositeMetadata.decode(CompositeMetadata.of(longest).encode()).entries == (longest,)
    for wrong in ("", "m" * 129, "é"):
        with pytest.raises(ValueError, match="1 to 128 ASCII"):
            Entry(wrong, b"")


@pytest.mark.rule("EXT-1")
def test_ext1_lengths_have_24_bits() -> None:
    """Metadata of an entry has at most 16,777,215 octets."""
    Entry("a/b", bytes(2**24 - 1))
    with pytest.raises(ValueError, match="16777216 bytes, at most 16777215"):
        Entry("a/b", bytes(2**24))


@pytest.mark.rule("EXT-1")
def test_ext1_a_well_known_name_in_letters_means_the_same() -> None:
    """A peer may spell out a name that has an id."""
    name = b"text/plain"
    read = CompositeMetadata.decode(bytes((len(name) - 1,)) + name + b"\x00\x00\x01m")
    assert read.entries == (Entry("text/plain", b"m"),)
    assert read.encode().hex(" ", 1) == "a1 00 00 01 6d"


@pytest.mark.rule("EXT-2")
@pytest.mark.rule("EXT-3")
@pytest.mark.rule("EXT-4")
@pytest.mark.rule("EXT-5")
@pytest.mark.parametrize("vector", VECTORS["alone"], ids=named)
def test_ext2_to_ext5_vectors_both_ways(vector: dict[str, Any]) -> None:
    """Tags, credentials, MIME types and trace flags have the octets that the rules say."""
    octets = bytes.fromhex(vector["hex"])
    value = value_of(vector)
    assert value.encode() == octets
    assert type(value).decode(octets) == value


@pytest.mark.rule("EXT-1")
@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=named)
def test_ext1_to_ext5_wrong_octets_are_decode_errors(vector: dict[str, Any]) -> None:
    """Lengths are believed by nobody: what is cut off or left over is an error."""
    with pytest.raises(DecodeError):
        NAMES[vector["class"]].decode(bytes.fromhex(vector["hex"]))


@pytest.mark.rule("EXT-2")
def test_ext2_the_first_tag_is_the_route() -> None:
    """Tags of at most 255 octets; the first tag is the route."""
    assert Routing("a", "b").route == "a"
    assert Routing.decode(b"").route is None
    assert Routing.decode(Routing("é" * 127).encode()).tags == ("é" * 127,)
    with pytest.raises(ValueError, match="256 bytes, at most 255"):
        Routing("é" * 128)


@pytest.mark.rule("EXT-3")
def test_ext3_types_by_id_and_by_name() -> None:
    """Simple and bearer by id or by name; another type is kept as it came."""
    assert Authentication.decode(b"\x05simple\x00\x01up") == SimpleAuthentication("u", "p")
    assert Authentication.decode(b"\x05bearertok") == BearerAuthentication("tok")
    assert Authentication.decode(b"\xffx") == OtherAuthentication(0x7F, b"x")
    assert SimpleAuthentication.decode(b"\x80\x00\x01up") == SimpleAuthentication("u", "p")
    with pytest.raises(DecodeError, match="BearerAuthentication where SimpleAuthentication was wanted"):
        SimpleAuthentication.decode(b"\x81tok")


@pytest.mark.rule("EXT-3")
def test_ext3_limits_of_what_can_be_said() -> None:
    """The username has a 16-bit length; types with a class are not to be had as other."""
    full = SimpleAuthentication("u" * 65535, "")
    assert Authentication.decode(full.encode()) == full
    with pytest.raises(ValueError, match="65536 bytes, at most 65535"):
        SimpleAuthentication("u" * 65536, "")
    for taken in (0, 1, 128):
        with pytest.raises(ValueError, match="below 0x80"):
            OtherAuthentication(taken, b"")
    for name in ("simple", "bearer"):
        with pytest.raises(ValueError, match="class of its own"):
            OtherAuthentication(name, b"")


@pytest.mark.rule("EXT-3")
def test_ext3_secrets_are_never_shown() -> None:
    """Neither ``repr`` nor an error tells a password, a token or a wrong value given for one."""
    for value in (
        SimpleAuthentication("user", "hush"),
        BearerAuthentication("hush"),
        OtherAuthentication("t", b"hush"),
        CompositeMetadata.of(SimpleAuthentication("user", "hush")),
    ):
        assert "hush" not in repr(value)
        assert "hush" not in str(value)
    with pytest.raises(TypeError) as wrong:
        BearerAuthentication(b"hush")  # type: ignore[arg-type]
    assert "hush" not in str(wrong.value)
    for octets in (b"\x80\x00\x00hush\xff", b"\x81hush\xff"):
        with pytest.raises(DecodeError) as refused:
            Authentication.decode(octets)
        assert refused.value.__context__ is None
        assert b"hush" not in pickle.dumps(refused.value)


@pytest.mark.rule("EXT-4")
def test_ext4_ids_without_a_name_are_kept() -> None:
    """An acceptable type that the table does not know stays what it is."""
    assert AcceptableMimeTypes.decode(b"\x85\xb0\x00x").mime_types == ("application/json", 0x30, "x")
    assert DataMimeType.decode(b"\xb0") == DataMimeType(0x30)
    assert AcceptableMimeTypes(["a/b"]).mime_types == ("a/b",)
    with pytest.raises(ValueError, match="without a name of its own"):
        DataMimeType(0x05)


@pytest.mark.rule("EXT-5")
def test_ext5_ids_only_with_their_flag() -> None:
    """Without I no ids follow, whatever T and P say; the lowest two bits mean nothing."""
    assert ZipkinTracing.decode(b"\x0f") == ZipkinTracing()
    assert ZipkinTracing.decode(b"\x83" + bytes(16)) == ZipkinTracing(trace_id=0, span_id=0)
    with pytest.raises(DecodeError, match="25 wanted"):
        ZipkinTracing.decode(b"\x84" + bytes(16))


@pytest.mark.rule("EXT-5")
@pytest.mark.parametrize(
    "wrong",
    [
        {"trace_id": 1},
        {"span_id": 1},
        {"parent_id": 1},
        {"trace_id": 1 << 128, "span_id": 1},
        {"trace_id": 1, "span_id": 1 << 64},
        {"trace_id": 1, "span_id": -1},
    ],
)
def test_ext5_ids_that_do_not_fit(wrong: dict[str, Any]) -> None:
    """A trace id has 64 or 128 bits, the others 64; trace and span come together."""
    with pytest.raises(ValueError, match=r"together|needs|bits"):
        ZipkinTracing(**wrong)


@pytest.mark.rule("EXT-6")
def test_ext6_table_of_well_known_types() -> None:
    """43 registered types from 0x00 to 0x2A and six extensions from 0x7A to 0x7F."""
    assert sorted(WELL_KNOWN_MIME_TYPES) == [*range(0x2B), *range(0x7A, 0x80)]
    assert {f"{id_:02x}": name for id_, name in WELL_KNOWN_MIME_TYPES.items()} == VECTORS["mime_types"]
    assert {
        kind.MIME_TYPE: id_ for id_, name in WELL_KNOWN_MIME_TYPES.items() for kind in KINDS if name == kind.MIME_TYPE
    } == {
        DataMimeType.MIME_TYPE: 0x7A,
        AcceptableMimeTypes.MIME_TYPE: 0x7B,
        Authentication.MIME_TYPE: 0x7C,
        ZipkinTracing.MIME_TYPE: 0x7D,
        Routing.MIME_TYPE: 0x7E,
        CompositeMetadata.MIME_TYPE: 0x7F,
    }
    with pytest.raises(TypeError):
        WELL_KNOWN_MIME_TYPES[0x2B] = "x/y"  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: Routing(b"echo"), "the tag is"),  # type: ignore[arg-type]
        (lambda: Entry("a/b", "m"), "wanted bytes"),  # type: ignore[arg-type]
        (lambda: Entry(None, b""), "wanted a name or an id"),  # type: ignore[arg-type]
        (lambda: AcceptableMimeTypes("a/b"), "several names"),
        (lambda: DataMimeType(True), "wanted a name or an id"),
        (lambda: OtherAuthentication("t", "x"), "wanted bytes"),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_fail_in_the_constructor(make: Any, wrong: str) -> None:
    with pytest.raises(TypeError, match=wrong):
        make()


@pytest.mark.ci
@pytest.mark.parametrize("vector", [*VECTORS["composite"], *VECTORS["alone"]], ids=named)
def test_every_cut_and_flip_is_read_or_refused(vector: dict[str, Any]) -> None:
    octets = bytes.fromhex(vector["hex"])
    for cut in range(len(octets)):
        read_or_refuse(octets[:cut])
    for at in range(len(octets)):
        for octet in range(256):
            read_or_refuse(octets[:at] + bytes((octet,)) + octets[at + 1 :])


ascii_names = st.text(st.characters(max_codepoint=127), min_size=1, max_size=128)
mime_types = st.sampled_from(sorted(WELL_KNOWN_MIME_TYPES.values())) | ascii_names | st.integers(0x2B, 0x79)
texts = st.text(st.characters(codec="utf-8"), max_size=60)
ids = st.integers(0, 2**64 - 1)
parts = st.one_of(
    st.builds(Entry, mime_types, st.binary(max_size=50)),
    st.lists(texts, max_size=3).map(lambda tags: Routing(*tags)),
    st.builds(SimpleAuthentication, texts, texts),
    st.builds(BearerAuthentication, texts),
    st.builds(OtherAuthentication, ascii_names.filter(lambda name: name not in ("simple", "bearer")), st.binary()),
    st.builds(DataMimeType, mime_types),
    st.builds(AcceptableMimeTypes, st.lists(mime_types, max_size=4)),
    st.builds(ZipkinTracing, sampled=st.none() | st.booleans(), debug=st.booleans()),
    st.builds(
        ZipkinTracing,
        trace_id=st.integers(0, 2**128 - 1) | ids,
        span_id=ids,
        parent_id=st.none() | ids,
        sampled=st.none() | st.booleans(),
        debug=st.booleans(),
    ),
)


@given(st.lists(parts, max_size=5))
def test_round_trip(values: list[Any]) -> None:
    octets = CompositeMetadata.of(*values).encode()
    read = CompositeMetadata.decode(octets)
    assert read.encode() == octets
    for value, entry in zip(values, read.entries, strict=True):
        if isinstance(value, Entry):
            assert entry == value
        else:
            assert type(value).decode(entry.metadata) == value
            assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value


@given(st.binary(max_size=64))
def test_any_octets_are_read_or_refused(data: bytes) -> None:
    read_or_refuse(data)


@pytest.mark.parametrize(
    ("kind", "entry"), [(CompositeMetadata, b"\x80\0\0\0"), (Routing, b"\0"), (AcceptableMimeTypes, b"\x80")]
)
def test_lists_of_a_peer_are_read_up_to_a_limit(kind: Any, entry: bytes) -> None:
    """Entries of 1 to 4 octets would become objects of 100."""
    kind.decode(entry * 1000)
    with pytest.raises(DecodeError, match="more than 1000"):
        kind.decode(entry * 1001)
