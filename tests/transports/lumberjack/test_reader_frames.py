"""What the reader makes of frames: versions, D, J, and their limits."""

from __future__ import annotations

import gc
import struct
import sys
import zlib
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.lumberjack import encode_data, encode_envelope, encode_json, encode_window
from levada.transports.lumberjack.json_text import parse_json

from .conftest import Desk


def data_frame(sequence: int, *pairs: tuple[bytes, bytes]) -> bytes:
    parts = [b"1D", struct.pack(">II", sequence, len(pairs))]
    for key, value in pairs:
        parts += [struct.pack(">I", len(key)), key, struct.pack(">I", len(value)), value]
    return b"".join(parts)


def json_frame(version: int, sequence: int, text: bytes) -> bytes:
    return b"%dJ" % version + struct.pack(">II", sequence, len(text)) + text


def one(desk: Any, data: bytes, **settings: Any) -> Any:
    """A reader after a window of one and `data`."""
    reader = desk(**settings)
    reader.feed(encode_window(data[0] - ord("0"), 1) + data)
    return reader


@pytest.mark.rule("LJ-3")
def test_lj3_the_first_octet_fixes_the_version(desk: Any) -> None:
    """LJ-3: another version later, also in an envelope, is an error; an option narrows what a listener takes."""
    for data in (
        encode_window(1, 1) + encode_window(2, 1),
        encode_window(2, 1) + encode_data(1, 1, {}),
        encode_window(1, 1) + encode_envelope(1, zlib.compress(encode_json(2, 1, {}))),
    ):
        reader = desk()
        reader.feed(data)
        assert (reader.refused, reader.units) == ("LJ-3", [])
    for only, other in ((1, 2), (2, 1)):
        reader = desk(versions={only})
        reader.feed(encode_window(other, 1))
        assert (reader.refused, reader.core.version) == ("LJ-3", None)
        reader = desk(versions={only})
        reader.feed(encode_window(only, 1))
        assert (reader.refused, reader.core.version) == (None, only)


@pytest.mark.rule("LJ-4")
def test_lj4_frames_of_each_version(desk: Any) -> None:
    """LJ-4: D is of version 1 only; J, W and C are of both."""
    assert one(desk, encode_data(1, 1, {"a": "b"})).delivered == [{"a": "b"}]
    assert one(desk, encode_json(1, 1, {"a": 1})).delivered == [{"a": 1}]
    assert one(desk, encode_json(2, 1, {"a": 1})).delivered == [{"a": 1}]
    reader = one(desk, b"2D" + struct.pack(">II", 1, 0))
    assert (reader.refused, reader.units) == ("LJ-4", [])


@pytest.mark.ci
@pytest.mark.rule("LJ-5")
def test_lj5_work_is_linear_however_small_the_pieces(desk: Any) -> None:
    """LJ-5: no rescan from the start of a frame at each read: the lines of code run for an octet stay the same."""

    def lines(pairs: int, value: int) -> float:
        frame = data_frame(1, *((b"%03d" % number, b"x" * value) for number in range(pairs)))
        core = desk().core
        count = 0

        def trace(*_: Any) -> Any:
            nonlocal count
            count += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for at in range(len(frame)):
                core.receive_data(frame[at : at + 1], 0.0)
        finally:
            sys.settrace(before)
        assert core.events == 1
        return count / len(frame)

    assert lines(400, 1) == pytest.approx(lines(100, 1), rel=0.1)
    assert lines(2, 4_000) == pytest.approx(lines(2, 1_000), rel=0.1)


@pytest.mark.rule("LJ-7")
def test_lj7_octets_that_are_not_utf8_survive(desk: Any) -> None:
    """LJ-7: keys and values are UTF-8; what is not is escaped so that encoding gives the same octets."""
    pairs = ((b"\xff\xfe", b"caf\xe9"), ("ключ".encode(), "значение".encode()))
    (event,) = one(desk, data_frame(1, *pairs)).delivered
    assert event["ключ"] == "значение"
    again = {
        key.encode("utf-8", "surrogateescape"): value.encode("utf-8", "surrogateescape") for key, value in event.items()
    }
    assert again == dict(pairs)
    assert encode_data(1, 1, event) == data_frame(1, *pairs)


@pytest.mark.rule("LJ-8")
def test_lj8_no_pairs_empty_text_and_keys_given_twice(desk: Any) -> None:
    """LJ-8: zero pairs are an empty map, empty keys and values are legal, the last of equal keys wins."""
    assert one(desk, data_frame(1)).delivered == [{}]
    assert one(desk, data_frame(1, (b"", b""), (b"a", b"1"), (b"a", b"2"))).delivered == [{"": "", "a": "2"}]


KEYS = [b"line", b"lin", b"lines", b"host", b"", b"\xff", "ключ".encode(), b"k" * 64, b"k" * 65]
PAIRS = st.lists(st.tuples(st.sampled_from(KEYS), st.binary(max_size=6)), max_size=4)


@pytest.mark.rule("LJ-7")
@pytest.mark.rule("LJ-8")
@given(layouts=st.lists(PAIRS, min_size=1, max_size=3), data=st.data())
def test_lj7_lj8_each_event_has_its_own_pairs_whatever_the_one_before_had(
    layouts: list[list[tuple[bytes, bytes]]], data: st.DataObject
) -> None:
    """LJ-7, LJ-8: events with the same keys, almost the same, or others, with keys given twice, cut anywhere."""
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(layouts), st.binary(max_size=3)), min_size=2, max_size=6))
    events = [[(key, value + more) for key, value in layout] for layout, more in drawn]
    wire = encode_window(1, len(events)) + b"".join(data_frame(1, *event) for event in events)
    reader = Desk()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(wire) - 1), max_size=3)))
    for start, end in pairwise((0, *cuts, len(wire))):
        reader.feed(wire[start:end])
    assert reader.delivered == [
        {key.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape") for key, value in event}
        for event in events
    ]


@pytest.mark.rule("LJ-36")
@pytest.mark.rule("LJ-39")
def test_lj36_lj39_an_event_with_the_keys_of_the_one_before_has_its_limits(desk: Any) -> None:
    """LJ-36, LJ-39: the second of two frames is judged as the first is; a value of more than 64 KiB is taken."""
    first = data_frame(1, (b"j", b"x" * 10), (b"k", b"x" * 10))
    for j, k, rule in ((10, 10, None), (10, 11, "LJ-39"), (30, 0, "LJ-39"), (21, 0, "LJ-36")):
        reader = desk(max_frame=48)
        reader.feed(encode_window(1, 2) + first + data_frame(2, (b"j", b"x" * j), (b"k", b"x" * k)))
        assert (len(reader.delivered), reader.refused) == (0 if rule else 2, rule)
    reader, first = desk(), data_frame(1, (b"j", b"1"), (b"k", b"2"))
    reader.take(
        reader.core.receive_data(encode_window(1, 2) + first + data_frame(2, (b"j", b"3"), (b"k", b"x" * 70_000)), 0.0)
    )
    assert reader.core.large  # a step of its own
    reader.work()
    assert reader.delivered == [{"j": "1", "k": "2"}, {"j": "3", "k": "x" * 70_000}]


@pytest.mark.rule("LJ-5")
@pytest.mark.rule("LJ-8")
def test_lj5_lj8_keys_are_compared_whole(desk: Any) -> None:
    """LJ-5, LJ-8: a key may only begin like the one before, be cut anywhere, or lie behind an event with fewer pairs."""
    longer = b"line\0\0\0\1x"
    wire = (
        encode_window(1, 2) + data_frame(1, (b"k", b"1"), (b"line", b"2")) + data_frame(2, (b"k", b"3"), (longer, b"4"))
    )
    for cut in range(1, len(wire)):
        reader = desk()
        reader.feed(wire[:cut])
        reader.feed(wire[cut:])
        assert reader.delivered == [{"k": "1", "line": "2"}, {"k": "3", longer.decode(): "4"}]
    first, second = data_frame(1, (b"k", b"1"), (b"line", b"2")), data_frame(2, (b"k", b"3"))
    reader = desk()
    reader.feed(encode_window(1, 2) + first + second + first[-13:])  # the second pair
    assert (reader.delivered, reader.refused) == ([{"k": "1", "line": "2"}, {"k": "3"}], "LJ-2")


@pytest.mark.rule("LJ-11")
@pytest.mark.parametrize(
    ("version", "text", "delivered"),
    [
        (1, b'[{"a":1},{"a":2},3]', [{"a": 1}, {"a": 2}, {"value": 3}]),
        (1, b"[]", []),
        (2, b'[{"a":1}]', [{"value": [{"a": 1}]}]),
        (2, b"[]", [{"value": []}]),
        (1, b'"text"', [{"value": "text"}]),
        (2, b" null ", [{"value": None}]),
        (2, b' {"a": 1}\n', [{"a": 1}]),
    ],
)
def test_lj11_what_a_j_frame_may_hold(version: int, text: bytes, delivered: list[Any], desk: Any) -> None:
    """LJ-11: an array in version 1 is several items and one event for the window; any other value that is no object is wrapped."""
    reader = one(desk, json_frame(version, 7, text))
    assert (reader.delivered, reader.acks, reader.core.events) == (delivered, [7], 1)


BAD_JSON = {
    "empty": b"",
    "not UTF-8": b'"\xff"',
    "not JSON": b"{a:1}",
    "cut": b'{"a":',
    "text after it": b"{} {}",
    "NaN": b"[NaN]",
    "Infinity": b'{"a":-Infinity}',
    "5,000 digits": b"1" * 5_000,
    "nested 501 deep": b"[" * 501 + b"]" * 501,
    "nested far too deep": b'{"a":' * 100_000,
    "nested 501 deep in much that is not": b"[" * 498 + b"[]," * 20_000 + b'[{"a":[]}]' + b"]" * 498,
    "long, and text after it": b" " * 20_000 + b"{} {}",
}


@pytest.mark.rule("LJ-12")
@pytest.mark.parametrize("text", BAD_JSON.values(), ids=BAD_JSON)
def test_lj12_bad_json_closes_or_is_delivered_as_text(text: bytes, desk: Any) -> None:
    """LJ-12: bad JSON is a protocol error, or an event with the text and a tag; nothing blows up."""
    reader = one(desk, json_frame(2, 1, text))
    assert (reader.refused, reader.units, reader.sent, reader.finished) == ("LJ-12", [], b"", "refused")
    reader = one(desk, json_frame(2, 1, text), on_bad_json="deliver")
    message = text.decode("utf-8", "surrogateescape")
    assert (reader.delivered, reader.acks) == ([{"message": message, "tags": ["_jsonparsefailure"]}], [1])


@pytest.mark.rule("LJ-12")
def test_lj12_what_is_still_json(desk: Any) -> None:
    """LJ-12: nesting of 500 is legal, brackets in text are no nesting, the last of equal keys wins."""
    deep = b"[" * 499 + b"]" * 499
    assert one(desk, json_frame(2, 1, b'{"a":' + deep + b"}")).acks == [1]
    text = b'{"a":"' + b'[\\"{' * 600 + b'"}'
    assert one(desk, json_frame(2, 1, text)).delivered == [{"a": '[\\"{'.replace("\\", "") * 600}]
    wide = b'{"a":' + b"[" * 498 + b"[]," * 20_000 + b"[]" + b"]" * 498 + b"}"
    assert one(desk, json_frame(2, 1, wide)).acks == [1]
    assert one(desk, json_frame(2, 1, b" \n" * 10_000 + b'{"a":1}' + b"\t\r" * 10_000)).delivered == [{"a": 1}]
    assert gc.isenabled()
    assert one(desk, json_frame(2, 1, b'{"a":1,"a":2}')).delivered == [{"a": 2}]
    assert one(desk, json_frame(2, 1, b'{"a":"\\ud800"}')).delivered == [{"a": "\ud800"}]


@pytest.mark.rule("LJ-12")
def test_lj12_what_the_decoder_cannot_nest_is_bad_json() -> None:
    """LJ-12: whatever depth the settings allow."""
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json(b"[" * 200_000 + b"]" * 200_000, 1_000_000)


@pytest.mark.rule("LJ-12")
def test_lj12_long_json_is_read_where_the_collector_is_off(no_collector: None) -> None:
    """LJ-12: and it stays off."""
    assert parse_json(b'{"a":"' + b"x" * 20_000 + b'"}', 500) == {"a": "x" * 20_000}
    assert not gc.isenabled()


@pytest.mark.rule("LJ-12")
def test_lj12_numbers_beyond_a_float_are_delivered_as_their_text(desk: Any) -> None:
    """LJ-12: they are JSON, so they are not refused; all other numbers stay numbers."""
    digits = "9" * 400
    text = f'{{"a":[1e400,-1E+309,{digits}.0],"b":{{"c":1e308,"d":-1.5,"e":1e-400}},"f":{digits}}}'.encode()
    values = {"a": ["1e400", "-1E+309", f"{digits}.0"], "b": {"c": 1e308, "d": -1.5, "e": 0.0}, "f": int(digits)}
    assert one(desk, json_frame(2, 1, text)).delivered == [values]
    assert one(desk, json_frame(2, 1, b" " * 20_000 + text)).delivered == [values]
    assert one(desk, json_frame(2, 1, b"1e400")).delivered == [{"value": "1e400"}]


@pytest.mark.rule("LJ-13")
def test_lj13_numbers_are_not_judged(desk: Any) -> None:
    """LJ-13: repeated, skipped, falling and wrapping numbers are delivered; the last one is acked."""
    for numbers in ([0, 1, 2], [1, 1, 1], [9, 3, 7], [2**32 - 2, 2**32 - 1, 0], [2**32 - 1, 1, 2]):
        reader = desk()
        reader.feed(encode_window(1, 3) + b"".join(data_frame(number, (b"n", b"%d" % number)) for number in numbers))
        assert [event["n"] for event in reader.delivered] == [str(number) for number in numbers]
        assert reader.acks == numbers[-1:]


@pytest.mark.rule("LJ-24")
def test_lj24_an_ack_from_the_writer_is_refused(desk: Any) -> None:
    """LJ-24: A frames are the reader's only."""
    reader = desk()
    reader.feed(b"2A\0\0\0\1")
    assert reader.refused == "LJ-24"


def header(sequence: int, pairs: int) -> bytes:
    return b"1D" + struct.pack(">II", sequence, pairs)


TOO_LARGE = {
    "LJ-36 J": ("LJ-36", b"1J" + struct.pack(">II", 1, 2**32 - 1)),
    "LJ-36 J, just": ("LJ-36", b"2J" + struct.pack(">II", 1, 10 * 2**20 - 9)),
    "LJ-37": ("LJ-37", header(1, 4097)),
    "LJ-37 all ones": ("LJ-37", header(1, 2**32 - 1)),
    "LJ-38": ("LJ-38", header(1, 1) + struct.pack(">I", 64 * 1024 + 1)),
    "LJ-39": ("LJ-39", header(1, 1) + struct.pack(">I", 0) + struct.pack(">I", 2**32 - 1)),
    "LJ-40": ("LJ-40", b"1C" + struct.pack(">I", 32 * 2**20 + 1)),
    "LJ-40 all ones": ("LJ-40", b"2C" + struct.pack(">I", 2**32 - 1)),
}


@pytest.mark.rule("LJ-36")
@pytest.mark.rule("LJ-37")
@pytest.mark.rule("LJ-38")
@pytest.mark.rule("LJ-39")
@pytest.mark.rule("LJ-40")
@pytest.mark.rule("LJ-45")
@pytest.mark.parametrize(("rule", "data"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_lj36_lj37_lj38_lj39_lj40_lj45_a_length_is_judged_alone(rule: str, data: bytes, desk: Any) -> None:
    """LJ-36 to LJ-40, LJ-45: refused on the length, before any octet of it is waited for, however the header is cut."""
    for cut in range(1, len(data) + 1):
        reader = desk()
        reader.feed(data[:cut])
        if cut < len(data):
            assert reader.refused is None
            reader.feed(data[cut:])
        assert (reader.refused, reader.finished, reader.core.held) == (rule, "refused", 0)


@pytest.mark.rule("LJ-36")
def test_lj36_a_frame_of_just_the_limit_is_taken(desk: Any) -> None:
    """LJ-36: the limit counts the octets of the whole frame, in D over all pairs."""
    assert one(desk, encode_json(2, 1, "x" * 86), max_frame=98).acks == [1]
    assert one(desk, encode_json(2, 1, "x" * 87), max_frame=98).refused == "LJ-36"
    pairs = [(b"k", b"x" * 10)] * 4
    assert one(desk, data_frame(1, *pairs), max_frame=86).acks == [1]
    assert one(desk, data_frame(1, *pairs), max_frame=85).refused == "LJ-39"
    assert one(desk, data_frame(1, *pairs, (b"a" * 20, b"")), max_frame=86).refused == "LJ-36"


@pytest.mark.rule("LJ-37")
@pytest.mark.rule("LJ-38")
def test_lj37_lj38_pairs_and_keys_of_just_the_limit_are_taken(desk: Any) -> None:
    """LJ-37, LJ-38: 4,096 pairs and keys of 64 KiB are legal."""
    frame = data_frame(1, *((b"%d" % number, b"") for number in range(4096)))
    assert len(one(desk, frame).delivered[0]) == 4096
    assert one(desk, data_frame(1, (b"k" * 65536, b"v"))).delivered == [{"k" * 65536: "v"}]


@pytest.mark.rule("LJ-38")
def test_lj38_the_settings_say_how_long_a_key_is(desk: Any) -> None:
    """LJ-38: five bytes are taken, and six are refused."""
    assert one(desk, data_frame(1, (b"k" * 5, b"v")), max_key=5).delivered == [{"kkkkk": "v"}]
    assert one(desk, data_frame(1, (b"k" * 6, b"v")), max_key=5).refused == "LJ-38"


@pytest.mark.rule("LJ-12")
def test_lj12_the_settings_say_how_deep_json_is(desk: Any) -> None:
    """LJ-12: three levels are taken, and four are refused."""
    assert one(desk, encode_json(2, 1, {"a": [[1]]}), max_json_depth=3).delivered == [{"a": [[1]]}]
    assert one(desk, encode_json(2, 1, {"a": [[[1]]]}), max_json_depth=3).refused == "LJ-12"
