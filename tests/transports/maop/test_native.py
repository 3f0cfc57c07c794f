"""Success and Test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from levada.transports.maop import (
    Completed,
    Failed,
    GateConfig,
    MaopConfig,
    ResetStream,
    RoomWanted,
    StreamData,
    TestPlan,
    TimesConfig,
    check_test,
    success_header,
)
from levada.transports.maop.frames import (
    UNDEFINED,
    Block,
    BlockEnd,
    Done,
    Fail,
    Message,
    Proceed,
    Refuse,
    Request,
    Response,
)

from .conftest import Pair, Wire

DATA = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text("utf-8"))
SINK = b"\x18application/octet-stream"


def probe(payload: bytes, *, request: bool = True, response: int = 0) -> tuple[Wire, int]:
    wire = Wire()
    stream = wire.bidi() if request else wire.uni()
    size = len(payload)
    wire.give(stream, Request(1, size, response_msg_id=response) if request else Message(1, size))
    if size:
        wire.give(stream, Block(payload), BlockEnd(size))
    return wire, stream


@pytest.mark.rule("MA-96")
@pytest.mark.rule("MA-97")
@pytest.mark.rule("MA-99")
def test_ma96_ma97_ma99_the_success_header() -> None:
    """Length, media type, body; types without parameters, at most 255 octets."""
    for vector in DATA["success"]:
        assert success_header(vector["content_type"]) + bytes.fromhex(vector["body"]) == bytes.fromhex(vector["hex"])
        assert len(bytes.fromhex(vector["hex"])) == 19
    for wrong in ("", "text", "text/", "text/plain; charset=utf-8", "text/é", "a/" + "b" * 254):
        with pytest.raises(ValueError, match="MA-97"):
            success_header(wrong)


@pytest.mark.rule("MA-97")
def test_ma97_case_does_not_matter() -> None:
    """Reported in lower case."""
    wire = Wire(client=True)
    stream = wire.core.send_request(101, now=0.0)
    wire.flush()
    [event] = wire.give(stream, Response(11), Block(b"\x0aText/Plain"), BlockEnd(11), fin=True)
    assert event == Completed(stream, b"", "text/plain", 0, 0, 11, 1)


@pytest.mark.rule("MA-105")
def test_ma105_the_table_of_sizes() -> None:
    """L and N for each exp."""
    for row in DATA["tests"]:
        plan = TestPlan(mode=1, multi=True, exp=row["exp"])
        assert (plan.length, plan.blocks, plan.length // plan.blocks) == (row["length"], row["blocks"], row["block"])


@pytest.mark.rule("MA-102")
@pytest.mark.rule("MA-103")
@pytest.mark.rule("MA-104")
@pytest.mark.rule("MA-106")
@pytest.mark.parametrize("exp", [0, 3, 7, 11])
@pytest.mark.parametrize(("mode", "multi"), [(0, False), (0, True), (1, False), (1, True), (2, False), (2, True)])
def test_ma102_ma103_ma104_ma106_what_a_test_transfers(mode: int, multi: bool, exp: int) -> None:
    """Nothing; exactly L; L of undefined length; in one Block or N, of zeros, and Block End."""
    plan = TestPlan(mode=mode, multi=multi, exp=exp)
    wire, stream = probe(plan.encode())
    head, *blocks = wire.body(stream)
    assert head == Response((0, 1024 << exp, UNDEFINED)[mode])
    if not mode:
        assert blocks == []
        return
    chunks = [block.chunk for block in blocks if isinstance(block, Block)]
    assert [len(chunk) for chunk in chunks] == [plan.length // plan.blocks] * plan.blocks
    assert b"".join(chunks) == SINK + bytes(plan.length - 25)
    assert blocks[-1] == BlockEnd(plan.length)
    assert stream in wire.finished


def ask(wire: Wire, *plans: TestPlan) -> list[int]:
    """Send Tests, and give no room to the streams of the answers."""
    streams = [wire.bidi() for _ in plans]
    for stream in streams:
        wire.give(stream, Request(1, 2))
    for stream, plan in zip(streams, plans, strict=True):
        octets = Block(plan.encode()).encode() + BlockEnd(2).encode()
        wire.events += wire.core.receive_stream_data(stream, octets, False, now=0.0)
    return streams


def queued(wire: Wire, stream: int) -> int:
    """Take what the core has for a stream; count it."""
    return sum(
        len(out.data) for out in wire.core.data_to_send(0.0) if isinstance(out, StreamData) and out.stream_id == stream
    )


@pytest.mark.rule("MA-103")
def test_ma103_an_answer_is_written_at_the_pace_of_its_stream() -> None:
    """32 MiB in one Block take 64 KiB here at any time, and their turn comes with the room."""
    wire = Wire()
    [stream] = ask(wire, TestPlan(mode=1, exp=15))
    octets, turns = queued(wire, stream), 0
    while wire.events == [RoomWanted(stream)]:
        assert wire.core.quota.buffered == 65_536
        wire.events = wire.core.has_room(stream, now=0.0)
        more = queued(wire, stream)
        assert more < 65_536 + 64
        octets, turns = octets + more, turns + 1
    assert (octets, turns) == (21 + 5 + 32 * 2**20 + 9, 511)
    assert (wire.events, wire.core.quota.buffered, wire.core.quota.operations) == ([], 0, 0)
    assert wire.core.has_room(stream, now=0.0) == []


@pytest.mark.rule("MA-54c")
@pytest.mark.rule("MA-103")
def test_ma54c_answers_to_tests_count_in_the_quota() -> None:
    """When the quota of buffers is used up a Test fails by CAPACITY_LIMIT (14), like any body."""
    wire = Wire(config=MaopConfig(gate=GateConfig(max_buffer_bytes=200_000)))
    streams = ask(wire, *[TestPlan(mode=1, exp=15)] * 4)
    outs = [out for out in wire.core.data_to_send(0.0) if isinstance(out, StreamData)]
    assert sum(len(out.data) for out in outs) < 200_000 + 1000
    assert wire.events == [RoomWanted(stream) for stream in streams[:3]]
    assert b"no room for the body" in b"".join(bytes(out.data) for out in outs)


@pytest.mark.rule("MA-61")
def test_ma61_an_answer_that_is_not_wanted_any_more_stops() -> None:
    """The requester stops the stream, or reads nothing for too long: what is left is not written."""
    wire = Wire(config=MaopConfig(times=TimesConfig(transfer_idle_timeout=3.0)))
    one, two = ask(wire, TestPlan(mode=1, exp=15), TestPlan(mode=2, exp=15))
    wire.core.data_to_send(0.0)
    wire.core.stream_stopped(one, 0, now=0.0)
    wire.core.handle_timeout(3.0)
    assert (wire.core.operations, wire.core.quota.buffered) == (0, 0)
    assert wire.core.has_room(one, now=3.0) == wire.core.has_room(two, now=3.0) == []
    resets = {out.stream_id for out in wire.core.data_to_send(3.0) if isinstance(out, ResetStream)}
    assert resets == {one, two}


@pytest.mark.rule("MA-112")
def test_ma112_the_native_test_can_be_switched_off() -> None:
    """Then it is a msg_id like any other without a handler: INCOMPATIBLE_MESSAGE (16)."""
    wire = Wire(config=MaopConfig(native_test=False))
    stream = wire.bidi()
    wire.give(stream, Request(1, 2))
    assert wire.signals() == [Refuse(((stream, 0, 16),))]


@pytest.mark.rule("MA-100")
@pytest.mark.rule("MA-107")
@pytest.mark.rule("MA-108")
@pytest.mark.parametrize("request_", [True, False])
def test_ma100_ma107_ma108_tests_that_are_none(request_: bool) -> None:
    """Type or mode unknown: 13, after the gate. One octet: 0. Other sizes: a sink. Messages: the same, Done."""
    for payload, code in ((b"\1\0", 13), (b"\0\xc0", 13), (b"\0", 0)):
        wire, stream = probe(payload, request=request_)
        signals = wire.signals()
        assert [s for s in signals if isinstance(s, Proceed)] == [Proceed((stream,))]
        assert [s.error_code for s in signals if isinstance(s, Fail)] == [code]
        assert wire.events == []
    for payload in (b"", b"abc", b"\0\x50"):
        wire, stream = probe(payload, request=request_)
        if not request_:
            assert [s for s in wire.signals() if isinstance(s, Done)] == [Done(((stream, 0, 0),))]
        elif len(payload) != 2:
            assert wire.body(stream) == [Response(26), Block(SINK + b"\0"), BlockEnd(26)]


@pytest.mark.rule("MA-101")
def test_ma101_a_test_gives_success_only() -> None:
    """Another kind of Response: 8."""
    wire, stream = probe(b"", response=7)
    assert wire.signals() == [Fail(stream, 8, b"no response 7 here")]


@pytest.mark.rule("MA-109")
def test_ma109_large_tests() -> None:
    """Above 1 MiB: 2. Undefined: 15."""
    wire = Wire()
    one, two = wire.bidi(), wire.bidi()
    wire.give(one, Request(1, 2**20 + 1))
    wire.give(two, Request(1, UNDEFINED))
    assert sorted(e for s in wire.signals() if isinstance(s, Refuse) for e in s.entries) == [(one, 0, 2), (two, 0, 15)]


@pytest.mark.rule("MA-110")
@pytest.mark.parametrize(
    "plan", [TestPlan(mode=m, multi=b, exp=e) for m in (0, 1, 2) for b in (False, True) for e in (0, 5)]
)
def test_ma110_a_tester_against_our_own_test(plan: TestPlan) -> None:
    """Two cores: the answer is what was asked for."""
    pair = Pair()
    stream = pair.client.send_request(1, plan.encode(), now=0.0)
    pair.pump()
    [answer] = pair.events[0]
    assert isinstance(answer, Completed)
    assert answer.stream_id == stream
    assert check_test(plan, answer) is None


@pytest.mark.rule("MA-110")
def test_ma110_answers_that_are_wrong() -> None:
    """Mode, sum, number of Blocks; the tolerance of mode 10."""
    kind = "application/octet-stream"
    known, several = TestPlan(mode=1, exp=0), TestPlan(mode=2, multi=True, exp=0)
    good = Completed(1, bytes(999), kind, 0, 0, 1024, 1)
    assert check_test(known, good) is None
    assert check_test(known, Completed(1, bytes(999), kind, 0, 0, None, 1)) is not None
    assert check_test(known, Completed(1, bytes(999), kind, 0, 0, 1024, 2)) == "2 Blocks, wanted 1"
    assert check_test(several, Completed(1, bytes(1101), kind, 0, 0, None, 3)) is None
    assert check_test(several, Completed(1, bytes(1102), kind, 0, 0, None, 3)) == "1127 bytes, wanted 1024"
    assert check_test(several, Completed(1, bytes(1101), kind, 0, 0, None, 1)) is not None
    assert check_test(TestPlan(mode=0), Completed(1, b"", None, 0, 0, 0, 0)) is None


def test_a_test_that_the_peer_does_not_know_fails_by_13() -> None:
    pair = Pair()
    stream = pair.client.send_request(1, b"\x07\0", now=0.0)
    pair.pump()
    assert pair.events[0] == [Failed(stream, 13, "UNSUPPORTED_TEST_TYPE 7", True)]
