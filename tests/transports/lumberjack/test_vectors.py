"""The octets of the protocol's page: every vector, every exchange, every cut and every flipped octet."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from levada.transports.lumberjack import (
    UnitReady,
    encode_ack,
    encode_data,
    encode_envelope,
    encode_json,
    encode_window,
)

PAGE = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text(encoding="utf-8"))
GOOD = [name for name, vector in PAGE["vectors"].items() if not vector["bad"] and name not in ("V1", "V8")]
BAD = [name for name, vector in PAGE["vectors"].items() if vector["bad"]]


@pytest.mark.parametrize("exchange", PAGE["exchanges"], ids=lambda exchange: exchange["name"])
def test_each_exchange_goes_as_written(exchange: dict[str, Any], desk: Any, hexed: Any) -> None:
    reader = desk()
    for step in exchange["steps"]:
        before = len(reader.sent)
        if "feed" in step:
            reader.feed(hexed(step["feed"]))
        elif "idle" in step:
            reader.wait(step["idle"])
        elif "end" in step:
            reader.end()
        else:
            reader.reset()
        assert reader.sent[before:] == hexed(step["acks"])
        assert reader.finished == step.get("finished", reader.finished)
    assert reader.delivered == exchange["delivered"]
    assert reader.refused == exchange["refused"]


def test_our_encoders_give_the_same_octets(hexed: Any) -> None:
    one, two = encode_data(1, 1, {"k": "v"}), encode_data(1, 2, {"k": "w"})
    assert encode_ack(1, 2) == hexed("V1")
    assert encode_data(1, 1, {"line": "hello", "host": "web-01"}) == hexed("V2")
    assert encode_data(1, 2, {"line": "héllo", "k": ""}) == hexed("V3")
    assert encode_data(1, 2**32 - 1, {}) == hexed("V4")
    assert encode_json(1, 1, {"line": "hi"}) == hexed("V5")
    assert encode_json(2, 1, {"line": "hi"}) == hexed("V6")
    assert encode_window(1, 2) == hexed("V7")
    assert encode_ack(2, 0) == hexed("V8")
    assert encode_envelope(1, zlib.compress(one + two, 0)) == hexed("V9")
    assert encode_envelope(1, zlib.compress(encode_envelope(1, zlib.compress(one, 0)), 0)) == hexed("V11")
    inner = encode_window(2, 1) + encode_json(2, 0, {"a": 1})
    assert encode_envelope(2, zlib.compress(inner, 0)) == hexed("V12")


@pytest.mark.rule("LJ-5")
@pytest.mark.parametrize("exchange", PAGE["exchanges"], ids=lambda exchange: exchange["name"])
def test_lj5_every_cut_of_every_exchange_means_the_same(exchange: dict[str, Any], desk: Any, hexed: Any) -> None:
    """LJ-5: a frame may be split over any number of reads and any number of frames may come in one read."""
    data = b"".join(hexed(step["feed"]) for step in exchange["steps"] if "feed" in step)
    whole = desk()
    whole.feed(data)
    pieces = [[data[:cut], data[cut:]] for cut in range(1, len(data))]
    pieces.append([data[at : at + 1] for at in range(len(data))])
    for parts in pieces:
        reader = desk()
        for part in parts:
            if reader.core.wants_data:
                reader.feed(part)
        assert (reader.delivered, reader.sent, reader.refused) == (whole.delivered, whole.sent, whole.refused)


@pytest.mark.rule("LJ-6")
@pytest.mark.parametrize("name", GOOD)
def test_lj6_an_end_inside_a_frame_delivers_nothing_of_it(name: str, desk: Any, hexed: Any) -> None:
    """LJ-6: a partial frame is dropped; an end at a boundary is a normal close."""
    data = hexed(name)
    for cut in range(len(data) + 1):
        reader = desk()
        if cut:
            reader.feed(data[:cut])
        before = len(reader.delivered)
        reader.end()
        if 0 < cut < len(data):
            assert (before, reader.delivered, reader.sent, reader.peer_closed) == (0, [], b"", False)
        else:
            assert reader.peer_closed
        assert reader.finished == "peer_closed"


@pytest.mark.parametrize("name", GOOD + BAD)
def test_each_flipped_octet_is_understood_or_refused(name: str, desk: Any, hexed: Any) -> None:
    data = hexed(name)
    for at in range(len(data)):
        for value in {data[at] ^ 1 << bit for bit in range(8)} | ({0, 1, 0x31, 0x32, 0xFF} - {data[at]}):
            changed = bytearray(data)
            changed[at] = value
            reader = desk()
            reader.feed(bytes(changed))
            if reader.refused is not None:
                assert reader.refused.startswith("LJ-")
                assert reader.finished == "refused"
            assert reader.core.held <= len(data) * 8 + 1024


@pytest.mark.rule("LJ-46")
@pytest.mark.parametrize("name", BAD)
def test_lj46_what_was_refused_says_where_and_shows_the_first_octets(name: str, desk: Any, hexed: Any) -> None:
    """LJ-46: one log line with the rule and the first 32 octets of the frame."""
    data = hexed(name)
    reader = desk()
    reader.feed(hexed("V7") + data if data[:1] == b"1" else data)
    (refused,) = [event for event in reader.others if not isinstance(event, UnitReady)][:1]
    start = 6 if data[:1] == b"1" else 0
    fault = start + (6 if name == "V18" else 10 if name == "V14" else 0)
    assert refused.error.offset == fault
    frame = data[6:] if name == "V18" else data
    assert refused.head == frame[:32]


@pytest.mark.rule("LJ-2")
def test_lj2_a_binary_version_is_refused(desk: Any) -> None:
    """LJ-2: the version is ASCII '1' or '2'; types are upper case."""
    for head in (b"\x01", b"\x02", b"3", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n", b"1w", b"1d\0\0\0\1", b"1Z", b"2\0"):
        reader = desk()
        reader.feed(head)
        assert (reader.refused, reader.sent, reader.finished) == ("LJ-2", b"", "refused")


@pytest.mark.rule("LJ-1")
def test_lj1_integers_are_big_endian_and_unsigned(desk: Any) -> None:
    """LJ-1: all integers are unsigned, big-endian; there is no error frame, so a refusal sends nothing."""
    reader = desk()
    reader.feed(b"1W" + struct.pack(">I", 1) + b"1D" + struct.pack(">II", 2**31 + 5, 0))
    assert reader.sent == b"1A\x80\x00\x00\x05"
    reader.feed(b"9")
    assert (reader.refused, reader.sent) == ("LJ-2", b"1A\x80\x00\x00\x05")
