"""Envelopes: format, nesting, all or nothing, limits, memory."""

from __future__ import annotations

import gzip
import itertools
import tracemalloc
import zlib
from typing import Any

import pytest

from levada.transports.lumberjack import encode_data, encode_envelope, encode_json, encode_window

MIB = 2**20


def frames(version: int, *numbers: int) -> bytes:
    if version == 1:
        return b"".join(encode_data(1, number, {"n": str(number)}) for number in numbers)
    return b"".join(encode_json(2, number, {"n": str(number)}) for number in numbers)


def packed(version: int, *parts: bytes, level: int = 6) -> bytes:
    return encode_envelope(version, zlib.compress(b"".join(parts), level))


def numbers(reader: Any) -> list[list[int]]:
    return [[int(event["n"]) for event in unit.events] for unit in reader.units]


def bomb(size: int, unit: bytes) -> bytes:
    """A zlib stream of `size` octets, made of whole `unit`s, in little memory."""
    packer = zlib.compressobj(9)
    block = unit * (MIB // len(unit))
    parts = [packer.compress(block) for _ in range(size // len(block))]
    return b"".join(parts) + packer.flush()


@pytest.mark.rule("LJ-30")
def test_lj30_what_is_no_zlib_stream_of_whole_frames_is_refused(desk: Any) -> None:
    """LJ-30: raw deflate, gzip, a cut stream, a wrong checksum, octets after the end, a part of a frame; empty is legal."""
    data = frames(1, 1)
    good = zlib.compress(data)
    raw = zlib.compressobj(wbits=-15)
    for payload in (
        raw.compress(data) + raw.flush(),
        gzip.compress(data),
        good[:-1],
        good[:-5],
        b"",
        good[:-1] + bytes([good[-1] ^ 1]),
        good + b"\0",
        good + good,
        zlib.compress(data[:-1]),
        zlib.compress(data + b"1"),
        b"garbage",
    ):
        reader = desk()
        reader.feed(encode_window(1, 1) + encode_envelope(1, payload))
        assert (reader.refused, reader.units, reader.sent) == ("LJ-30", [], b"")
    reader = desk()
    reader.feed(encode_window(1, 1) + packed(1) + packed(1, data))
    assert (numbers(reader), reader.acks) == ([[1]], [1])


@pytest.mark.rule("LJ-31")
def test_lj31_units_span_envelopes_and_an_envelope_holds_several(desk: Any) -> None:
    """LJ-31: unpacked frames are handled as if they had come from the network."""
    reader = desk()
    reader.feed(encode_window(2, 3) + packed(2, frames(2, 1, 2)) + frames(2, 3) + packed(2, frames(2, 4, 5, 6, 7)))
    assert (numbers(reader), reader.acks) == ([[1, 2, 3], [4, 5, 6]], [3, 6])


@pytest.mark.rule("LJ-31a")
def test_lj31a_all_of_an_envelope_or_nothing(desk: Any) -> None:
    """LJ-31a: nothing is handed on before end, checksum and frames are checked; bad JSON spares the units before it."""
    many = b"".join(encode_window(2, 1) + frames(2, number) for number in range(1, 5001))
    data = encode_envelope(2, zlib.compress(many, 0)[:-1] + b"?")
    reader = desk()
    for at in range(0, len(data), 50_000):
        reader.feed(data[at : at + 50_000])
    assert (reader.refused, reader.units, reader.sent) == ("LJ-30", [], b"")
    broken_late = packed(
        2, encode_window(2, 1), frames(2, 1), encode_window(2, 2), frames(2, 2), b"2J\0\0\0\1\0\0\0\1{"
    )
    reader = desk()
    reader.feed(broken_late)
    assert (reader.refused, numbers(reader), reader.acks) == ("LJ-12", [[1]], [1])
    reader = desk()
    reader.feed(packed(2, encode_window(2, 1), frames(2, 1), b"2J\0\0\0\1\0\0\0\1{", b"2"))
    assert (reader.refused, numbers(reader), reader.acks) == ("LJ-30", [], [])


@pytest.mark.rule("LJ-31a")
@pytest.mark.rule("LJ-42")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("max_cost", [500, 700, 2000, 10**9])
def test_lj31a_lj42_a_costly_envelope_is_checked_first_and_built_in_slices(
    version: int, nested: bool, max_cost: int, desk: Any
) -> None:
    """LJ-31a, LJ-42: the same events and acks come out however little may be held; and nothing if the end is bad."""
    content = b"".join(
        encode_window(version, 7) + frames(version, *range(first, first + 7)) for first in range(1, 701, 7)
    )
    content += frames(version, 701)
    inner = packed(version, content) if nested else content
    reader = desk(max_cost=max_cost, max_uncommitted_units=1)
    reader.feed(frames(version, 0) + packed(version, inner))
    reader.end()
    assert [number for unit in numbers(reader) for number in unit] == list(range(702))
    assert (reader.acks, reader.finished) == ([0, *range(7, 701, 7), 701], "peer_closed")
    assert reader.core.held == 0
    reader = desk(max_cost=max_cost)
    reader.feed(packed(version, inner + b"?"))
    assert (reader.units, reader.refused) == ([], "LJ-2")


@pytest.mark.rule("LJ-12")
@pytest.mark.rule("LJ-42")
def test_lj12_lj42_bad_json_in_the_rest_of_a_costly_envelope(desk: Any) -> None:
    """LJ-12: it is met when the rest is built; the units before it stand."""
    content = b"".join(encode_window(2, 1) + frames(2, number) for number in range(1, 11))
    reader = desk(max_cost=700)
    reader.feed(packed(2, content, b"2J\0\0\0\1\0\0\0\1{"))
    assert (reader.refused, numbers(reader), reader.acks) == ("LJ-12", [[n] for n in range(1, 11)], list(range(1, 11)))


@pytest.mark.rule("LJ-32")
def test_lj32_two_envelopes_deep_and_no_more(desk: Any) -> None:
    """LJ-32: depth 2 is accepted, 3 is refused on the header; limits count over the whole outer envelope."""
    two = packed(1, packed(1, frames(1, 1)), packed(1, frames(1, 2)), frames(1, 3))
    reader = desk()
    reader.feed(encode_window(1, 3) + two)
    assert (numbers(reader), reader.acks) == ([[1, 2, 3]], [3])
    reader = desk()
    reader.feed(encode_window(1, 3) + packed(1, two))
    assert (reader.refused, reader.units) == ("LJ-32", [])
    inner = packed(1, b"\0" * 600)
    reader = desk(max_unpacked=1000)
    reader.feed(packed(1, *([encode_envelope(1, zlib.compress(frames(1, 1) * 20))] * 3)))
    assert (reader.refused, reader.units) == ("LJ-41", [])
    assert len(inner) < 100


@pytest.mark.rule("LJ-35")
def test_lj35_unpacking_goes_in_steps(desk: Any) -> None:
    """LJ-35: one call unpacks 64 KiB at most, so that the driver can let others run."""
    payload = encode_envelope(1, bomb(4 * MIB, encode_data(1, 1, {"k": "v" * 1000})))
    core = desk().core
    core.receive_data(encode_window(1, 10**6) + payload, 0.0)
    steps = [core.bytes_unpacked]
    while core.has_work:
        core.work(0.0)
        steps.append(core.bytes_unpacked)
    assert max(after - before for before, after in itertools.pairwise(steps)) == 64 * 1024
    assert len(steps) >= 60


@pytest.mark.rule("LJ-41")
def test_lj41_unpacking_ends_at_the_limit(desk: Any) -> None:
    """LJ-41: refused at once when more comes out than is allowed; just the limit is legal."""
    frame = frames(1, 1)
    for limit, refused in ((len(frame) * 10, None), (len(frame) * 10 - 1, "LJ-41")):
        reader = desk(max_unpacked=limit)
        reader.feed(packed(1, frame * 10))
        assert reader.refused == refused
        assert reader.core.bytes_unpacked <= limit + 1


def peak_of(reader: Any, payload: bytes, version: int = 1) -> int:
    """Peak growth of memory while a reader takes an envelope in pieces of 64 KiB; its sink forgets what it gets."""
    data = encode_envelope(version, payload)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(0, len(data), 65536):
        reader.feed(data[at : at + 65536])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before


@pytest.mark.ci
@pytest.mark.rule("LJ-21")
@pytest.mark.rule("LJ-42")
def test_lj21_lj42_windows_of_nothing_cost_too(desk: Any) -> None:
    """LJ-21, LJ-42: each is answered once, and no number of them takes memory without end, packed or behind a slow sink."""
    nothing = encode_window(2, 0)
    reader = desk(max_cost=10_000, max_windows=3_000)
    reader.feed(packed(2, frames(2, 1), nothing * 3_000, frames(2, 2)))
    reader.end()
    assert (numbers(reader), reader.acks) == ([[1], [2]], [1, *([0] * 3_000), 2])
    reader = desk(max_cost=10_000, max_windows=3_000)
    reader.feed(packed(2, nothing * 3_000))
    assert (reader.acks, reader.core.held) == ([0] * 3_000, 0)
    reader = desk(commits=False)
    reader.feed(encode_window(2, 1) + frames(2, 1))
    fed = 0
    while reader.core.wants_data:
        reader.feed(nothing * 100)
        fed += 100
    assert (fed, reader.acks) == (1100, [])
    reader.commit(1)
    assert (reader.acks, reader.core.wants_data, reader.core.held) == ([1, *([0] * fed)], True, 0)
    reader = desk(commits=False, max_cost=MIB, max_windows=50_010)
    reader.feed(packed(2, encode_window(2, 1), frames(2, 1), nothing * 50_000))
    assert reader.core.held < 2 * MIB
    assert not reader.core.wants_data
    reader.commit(1)
    assert reader.acks == [1, *([0] * 50_000)]


@pytest.mark.rule("LJ-41a")
@pytest.mark.parametrize("max_cost", [10_000, 64 * MIB], ids=["checked first", "built at once"])
@pytest.mark.parametrize(
    ("version", "frame"),
    [
        (1, encode_data(1, 1, {})),
        (1, encode_window(1, 1) + encode_data(1, 1, {})),
        (2, encode_json(2, 1, {})),
        (2, encode_window(2, 0)),
        (2, encode_window(2, 5)),
    ],
    ids=["D", "W and D", "J", "W 0", "W 5"],
)
def test_lj41a_an_envelope_asks_no_more_of_the_sink_than_plain_octets_could(
    version: int, frame: bytes, max_cost: int, desk: Any
) -> None:
    """LJ-41a: 128 windows and one for each ten octets as they are sent; so many are taken, and of more no more is done."""
    within = zlib.compress(frame * 128)
    reader = desk(max_windows=256, max_cost=max_cost)
    reader.feed(encode_window(version, 1) + encode_envelope(version, within))
    assert reader.refused is None
    much = zlib.compress(frame * 100_000, 9)
    reader = desk(max_windows=128, max_cost=max_cost)
    reader.feed(encode_window(version, 1) + encode_envelope(version, much))
    most = 128 + len(much) // 10
    assert reader.refused == "LJ-41a"
    assert len(much) < 10_000
    assert reader.core.events <= most + 1
    assert len(reader.units) + len(reader.acks) <= 2 * most
    assert reader.core.held == 0


@pytest.mark.ci
@pytest.mark.rule("LJ-47")
@pytest.mark.parametrize("unit", [b"\0", encode_data(1, 1, {"k": "v" * 1000})], ids=["zeros", "events"])
def test_lj47_a_bomb_stays_small(unit: bytes, desk: Any) -> None:
    """LJ-47: a sixteenth: a bomb of 64 MiB under LJ-41 + 1 MiB, for steps of 64 KiB."""
    reader = desk(keeps=False, max_unpacked=4 * MIB, max_cost=4 * MIB)
    peak = peak_of(reader, bomb(64 * MIB, unit))
    assert reader.refused == ("LJ-2" if unit == b"\0" else "LJ-41")
    assert peak < 4 * MIB + MIB


@pytest.mark.ci
@pytest.mark.rule("LJ-47")
def test_lj47_very_many_events_in_an_envelope(desk: Any) -> None:
    """LJ-47: a 512th: 128 KiB of 10-octet frames under LJ-41 + 3 x LJ-42 + the same, for steps of 64 KiB."""
    size = MIB // 8
    frame = encode_data(1, 1, {})
    reader = desk(keeps=False, max_unpacked=size, max_cost=size)
    peak = peak_of(reader, zlib.compress(frame * (size // len(frame))))
    assert (reader.refused, reader.core.events) == (None, size // len(frame))
    assert peak < size + 3 * size + size


@pytest.mark.soak
@pytest.mark.rule("LJ-47")
@pytest.mark.parametrize(
    ("size", "unit", "limit"),
    [
        (1024 * MIB, b"\0", 80),
        (1024 * MIB, encode_data(1, 1, {"k": "v" * 1000}), 80),
        (64 * MIB, encode_data(1, 1, {}), 272),
    ],
    ids=["zeros", "events", "6.7 million events"],
)
def test_lj47_in_full(size: int, unit: bytes, limit: int, desk: Any) -> None:
    """LJ-47: the 1 GiB bomb under LJ-41 + 16 MiB; 64 MiB of small events under LJ-41 + 3 x LJ-42 + 16 MiB."""
    assert peak_of(desk(keeps=False), bomb(size, unit)) < limit * MIB


def json_frame(version: int, text: bytes) -> bytes:
    return b"%dJ\0\0\0\1" % version + len(text).to_bytes(4, "big") + text


def ones(octets: int) -> bytes:
    """A JSON text of very many objects: 20 times its size and more once it is built."""
    return b"[" + b"1," * (octets // 2) + b"1]"


@pytest.mark.rule("LJ-42")
@pytest.mark.parametrize("packing", ["plain", "packed"])
@pytest.mark.parametrize(
    "text",
    [
        ones(40_000),
        b'{"a":' + ones(40_000) + b"}",
        b"[" + b"[]," * 20_000 + b"[]]",
        b'["\\\\",' + ones(40_000)[1:],  # the quote behind two backslashes ends the string
        b"[" + b'"",' * 20_000 + b"1]",
        b'["' + b"," * 20_000 + b'"' + b'""' * 60_000 + b"]",
    ],
    ids=["numbers", "numbers in an object", "lists", "behind a string", "strings", "no JSON"],
)
def test_lj42_json_of_too_many_values_is_refused_before_it_is_built(packing: str, text: bytes, desk: Any) -> None:
    """LJ-42: what one text costs is counted before it is parsed; nothing of it is built, and nothing is acked."""
    for version in (1, 2):
        reader = desk(max_cost=MIB)
        frame = json_frame(version, text)
        data = encode_window(version, 1) + (frame if packing == "plain" else packed(version, frame))
        tracemalloc.start()
        reader.feed(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (reader.refused, reader.units, reader.sent) == ("LJ-42", [], b"")
        assert peak < 4 * MIB


@pytest.mark.rule("LJ-42")
def test_lj42_commas_in_a_string_are_no_values(desk: Any) -> None:
    """LJ-42: a long line is legal, whatever its characters are; only what stands outside strings counts in the end."""
    line = ',[{:\\"' * 20_000
    reader = desk(max_cost=MIB)
    reader.feed(encode_window(2, 1) + encode_json(2, 1, {"line": line}))
    assert (reader.refused, reader.delivered, reader.acks) == (None, [{"line": line}], [1])


@pytest.mark.rule("LJ-11")
@pytest.mark.rule("LJ-42")
@pytest.mark.rule("LJ-42a")
@pytest.mark.parametrize("packing", ["plain", "packed", "nested"])
def test_lj11_lj42_items_of_an_array_come_in_slices_and_are_one_event(packing: str, desk: Any) -> None:
    """LJ-11, LJ-42a: an array of version 1 that does not fit comes in slices; once each, in order, one ack behind the last."""
    data = json_frame(1, b'[{"n":"2"},' + b",".join(b"%d" % number for number in range(3, 1000)) + b"]")
    data = frames(1, 1) + data + frames(1, 1000)  # numbered 1, 1 and 1000
    for _ in range(["plain", "packed", "nested"].index(packing)):
        data = packed(1, data)
    reader = desk(max_cost=100_000, max_uncommitted_units=1, commits=False)
    reader.feed(encode_window(1, 3) + data)
    while not reader.acks:
        assert reader.core.held < 4 * 100_000
        reader.commit(reader.units[-1].number)
    assert [int(event.get("n", event.get("value"))) for event in reader.delivered] == list(range(1, 1001))
    assert (reader.acks, len(reader.units) > 3, sum(unit.count for unit in reader.units)) == ([1000], True, 3)
    assert [unit.whole for unit in reader.units] == [False] * (len(reader.units) - 1) + [True]
    assert all(unit.cost <= 101_000 for unit in reader.units)


@pytest.mark.rule("LJ-42b")
def test_lj42b_values_of_an_array_are_counted_once(desk: Any) -> None:
    """LJ-42b: they cost what they take; the events they will be are counted when these are made, or one peer would pause all others."""
    reader = desk(max_cost=MIB, max_uncommitted_units=1, commits=False)
    reader.feed(packed(1, json_frame(1, ones(24_000))))
    assert not reader.core.wants_data
    assert reader.core.held < 3 * MIB


@pytest.mark.rule("LJ-47")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("text", [ones(100_000), ones(6_000)], ids=["refused", "just below"])
def test_lj47_an_envelope_of_many_values_stays_small(version: int, text: bytes, desk: Any) -> None:
    """LJ-47: a 128th: under LJ-41 + 3 x LJ-42 + the same, however many values the JSON in it holds."""
    size = MIB // 2
    reader = desk(keeps=False, max_unpacked=size, max_cost=size)
    assert peak_of(reader, zlib.compress(json_frame(version, text) * 4, 9), version) < 4 * size + size
    assert reader.refused == ("LJ-42" if len(text) > 50_000 else None)


@pytest.mark.parametrize("text", [ones(100_000), ones(1000)[:-1]], ids=["too costly", "no JSON"])
def test_a_refused_text_is_not_kept_by_its_error(text: bytes, desk: Any, no_collector: None) -> None:
    """The error that says what was wrong is still here, what it is about is not."""
    reader = desk(max_cost=MIB)
    text += b" " * 400_000
    tracemalloc.start()
    reader.feed(encode_window(2, 1) + packed(2, json_frame(2, text)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reader.refused in ("LJ-12", "LJ-42")
    assert held < 100_000
