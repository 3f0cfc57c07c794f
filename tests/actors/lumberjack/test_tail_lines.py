"""Octets to records: `LineAssembler` against a model."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from levada.actors.lumberjack.multiline import LineAssembler, Record

octets = st.lists(st.sampled_from([b"a", b"[b", b"\n", b"\r\n", b"\xff", "é".encode()]), max_size=40).map(b"".join)


def feed(lines: LineAssembler, data: bytes, cuts: list[int]) -> list[Record]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [record for at, end in itertools.pairwise(places) for record in lines.feed(data[at:end])] + lines.finish(
        partial=True
    )


@given(octets, st.lists(st.integers(0, 200)))
def test_lines_are_the_same_however_the_octets_are_cut(data: bytes, cuts: list[int]) -> None:
    found = feed(LineAssembler(7), data, cuts)
    # What str.splitlines would do, written by hand: only \n ends a line, and \r before it belongs to the end.
    whole = data.split(b"\n")
    if not whole[-1]:
        whole.pop()
    assert [record.text.encode("utf-8", "surrogateescape") for record in found] == [
        line.removesuffix(b"\r") for line in whole
    ]
    assert [record.start for record in found] == [7, *(record.end for record in found)][: len(found)]
    assert not found or found[-1].end == 7 + len(data)
    assert not any(record.cut for record in found)


@given(octets, st.lists(st.integers(0, 200)), st.integers(1, 5), st.integers(5, 12))
def test_limits_hold_and_the_places_stay_right(data: bytes, cuts: list[int], most: int, record: int) -> None:
    start = re.compile(r"^\[")
    found = feed(LineAssembler(max_line=most, start=start, max_record=record), data, cuts)
    whole = feed(LineAssembler(start=start, max_record=10_000), data, [])
    assert [(record.start, record.end) for record in found] == [(record.start, record.end) for record in whole]
    for short, long in zip(found, whole, strict=True):
        size = len(short.text.encode("utf-8", "surrogateescape"))
        assert size <= max(record, most)
        assert short.cut or short.text == long.text


@given(
    st.lists(st.sampled_from([b"a", b"\0", b"\0\0", b"\n", b"\r\n", b"b\0"]), max_size=40).map(b"".join),
    st.lists(st.integers(0, 200)),
)
def test_nuls_at_the_beginning_of_lines_are_left_out(data: bytes, cuts: list[int]) -> None:
    found = feed(LineAssembler(7, skip_nuls=True), data, cuts)
    whole = feed(LineAssembler(7), data, [])
    places = [(record.end, record.text.lstrip("\0")) for record in whole]
    if data.rpartition(b"\n")[2].strip(b"\0") == b"":
        places = [place for place in places if place[0] <= 7 + data.rfind(b"\n") + 1]  # NULs alone are no last line
    assert [(record.end, record.text) for record in found] == places
    for record in found:
        assert data.startswith(record.text.encode(), record.start - 7)


def test_a_line_that_is_too_long_is_cut_and_marked() -> None:
    lines = LineAssembler(max_line=4)
    assert lines.feed(b"123") == []
    assert lines.feed(b"4567") == []
    assert lines.feed(b"89\nshort\nok\n") == [
        Record("1234", 0, 10, True),
        Record("shor", 10, 16, True),
        Record("ok", 16, 19, False),
    ]


def test_lines_without_a_beginning_belong_to_the_record_before() -> None:
    lines = LineAssembler(start=re.compile(r"^\["))
    assert lines.feed(b"tail of an older record\n[1] one\n\tat a\n\tat b\n[2] two\n") == [
        Record("tail of an older record", 0, 24, False),
        Record("[1] one\n\tat a\n\tat b", 24, 44, False),
    ]
    assert lines.holding
    assert lines.finish() == [Record("[2] two", 44, 52, False)]
    assert not lines.holding
    assert lines.finish() == []


def test_a_partial_line_waits_while_a_record_is_given_up() -> None:
    lines = LineAssembler(start=re.compile("^x"))
    assert lines.feed(b"x1\n more") == []
    assert lines.finish() == [Record("x1", 0, 3, False)]
    assert lines.feed(b" of it\nx2\n") == [Record(" more of it", 3, 15, False)]
