"""Bodies: Blocks, their ends, and everything that can be wrong with them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.maop import (
    BodyEnded,
    BodyReceived,
    BodyWanted,
    Completed,
    ControlConfig,
    ErrorCode,
    Execute,
    Failed,
    GateConfig,
    HandlerSpec,
    Incoming,
    MaopConfig,
    OperationCancelled,
    ReceiverState,
    StreamData,
    StreamUnblocked,
    TimesConfig,
)
from levada.transports.maop.frames import UNDEFINED, Block, BlockEnd, Done, Fail, Message, Operation, Proceed, Request

from .conftest import Wire

OPEN = {5: HandlerSpec(allow_undefined_length=True, max_payload=1000)}
STREAMING = {5: HandlerSpec(streaming=True, allow_undefined_length=True, max_payload=2**40)}


def armed(length: int, wire: Wire | None = None, **options: Any) -> tuple[Wire, int]:
    """A Message whose Proceed is written."""
    options.setdefault("handlers", OPEN)
    wire = wire or Wire(**options)
    stream = wire.uni()
    wire.give(stream, Message(5, length))
    assert Proceed((stream,)) in wire.signals()
    return wire, stream


def failed(wire: Wire) -> int:
    """The code of the only Fail."""
    [fail] = [s for s in wire.signals() if isinstance(s, Fail)]
    return fail.error_code


@pytest.mark.rule("MA-55")
def test_ma55_no_body() -> None:
    """The header completes it; one Block End(0) is tolerated in any pieces, anything else is 4, also before Proceed."""
    for pieces in (1, 3, 9):
        wire = Wire(handlers=OPEN)
        stream = wire.uni()
        [event] = wire.give(stream, Message(5, 0))
        assert isinstance(event, Execute)
        assert event.body == b""
        end = BlockEnd(0).encode()
        for at in range(0, 9, pieces):
            assert wire.give(stream, end[at : at + pieces]) == []
        wire.core.finish(stream, now=0.0)
        assert wire.give(stream, b"", fin=True) == []
        assert [type(s) for s in wire.signals()] == [Done]
    for wrong in (Block(b""), Block(b"x"), BlockEnd(1)):
        wire = Wire(handlers=OPEN)
        wire.give(wire.uni(), Message(5, 0), wrong)
        assert failed(wire) == 4
        gated = Wire(handlers={5: HandlerSpec(gated=True)})
        gated.give(gated.bidi(), Request(5, 0), wrong)
        assert failed(gated) == 4
    twice = Wire(handlers=OPEN)
    twice.give(twice.uni(), Message(5, 0), BlockEnd(0), BlockEnd(0))
    assert failed(twice) == 4
    cut = Wire(handlers=OPEN)
    cut.give(cut.uni(), Message(5, 0), b"\x06\0", fin=True)
    assert failed(cut) == 4


@pytest.mark.rule("MA-56")
@pytest.mark.rule("MA-57")
@pytest.mark.rule("MA-6")
@pytest.mark.rule("MA-64")
@pytest.mark.parametrize("length", [11, UNDEFINED])
def test_ma6_ma56_ma57_ma64_blocks_in_any_cutting(length: int) -> None:
    """The Blocks add up, in whatever pieces they come; execution starts once, with the whole body."""
    data = b"".join(op.encode() for op in (Block(b"hello "), Block(b""), Block(b"world"), BlockEnd(11)))
    for size in range(1, len(data) + 1):
        wire, stream = armed(length)
        for at in range(0, len(data), size):
            wire.give(stream, data[at : at + size])
        [event] = wire.events
        assert isinstance(event, Execute)
        assert event.body == b"hello world"
        entry = wire.core.streams[stream]
        assert isinstance(entry, Incoming)
        assert entry.state is ReceiverState.RUNNING
        assert wire.give(stream, b"", fin=True) == []
    wire, stream = armed(UNDEFINED)
    [event] = wire.give(stream, BlockEnd(0))
    assert isinstance(event, Execute)


@pytest.mark.rule("MA-58")
@pytest.mark.parametrize(
    ("length", "operations", "code"),
    [
        (5, [b"\x05\0\0\0\6"], 4),
        (5, [Block(b"abc"), b"\x05\0\0\0\3"], 4),
        (5, [Block(b"abc"), BlockEnd(5)], 4),
        (5, [Block(b"abc"), BlockEnd(3)], 4),
        (5, [Block(b"abcde"), BlockEnd(6)], 4),
        (UNDEFINED, [Block(b"abc"), BlockEnd(4)], 4),
        (UNDEFINED, [b"\x05\0\0\3\xe9"], 2),
        (UNDEFINED, [b"\x05\xff\xff\xff\xff"], 2),
        (5, [BlockEnd(5)], 7),
    ],
)
@pytest.mark.rule("MA-59")
@pytest.mark.rule("MA-95")
def test_ma58_ma59_ma95_sums_that_do_not_fit(length: int, operations: list[Operation | bytes], code: int) -> None:
    """Judged by the Block's header, before its chunk; Block End before any Block is 7."""
    wire, stream = armed(length)
    assert [type(e) for e in wire.give(stream, *operations)] == []
    assert failed(wire) == code
    assert wire.stops == {stream: 0x100 + code}
    assert wire.core.operations == 0
    assert wire.give(stream, b"whatever follows", fin=True) == []


@pytest.mark.rule("MA-60")
def test_ma60_blocks_behind_the_end() -> None:
    """10 before the terminal, dropped after it."""
    for extra in (Block(b"x"), BlockEnd(1)):
        wire, stream = armed(1)
        wire.give(stream, Block(b"x"), BlockEnd(1), extra)
        assert failed(wire) == 10
        assert [type(e) for e in wire.events] == [Execute, OperationCancelled]
        wire, stream = armed(1)
        wire.give(stream, Block(b"x"), BlockEnd(1))
        wire.core.finish(stream, now=0.0)
        wire.give(stream, extra)
        assert [type(s) for s in wire.signals()] == [Done]


@pytest.mark.rule("MA-61")
def test_ma61_streams_that_end_or_are_reset_before_block_end() -> None:
    """FIN: 7, also inside a Block and before Proceed. Reset: silent unless a handler has started."""
    for last in (b"", b"\x05\0\0", Block(b"abc"), Block(b"abc").encode()[:-1]):
        wire, stream = armed(5)
        wire.give(stream, last, fin=True)
        assert failed(wire) == 7
        assert wire.stops == {}
    early = Wire(handlers=OPEN)
    early.give(early.uni(), Message(5, 5), fin=True)
    assert failed(early) == 7
    wire, stream = armed(5)
    wire.give(stream, Block(b"ab"))
    assert wire.core.stream_reset(stream, 0, now=0.0) == []
    wire.flush()
    assert wire.signals() == []
    streaming, stream = armed(5, handlers=STREAMING)
    streaming.give(stream, Block(b"ab"))
    [event] = streaming.core.stream_reset(stream, 0, now=0.0)
    assert event == OperationCancelled(stream, 11, "the initiator reset the stream")
    streaming.flush()
    assert failed(streaming) == 11


@pytest.mark.rule("MA-62")
def test_ma62_what_a_sender_writes() -> None:
    """Chunks of the limit, Block End with the end of the stream, large chunks without a copy."""
    wire = Wire(config=MaopConfig(max_block_chunk_size=50_000))
    body = bytes(range(256)) * 512
    stream = wire.core.send_message(100, body, now=0.0)
    wire.flush()
    wire.core.receive_stream_data(wire.control, Proceed((stream,)).encode(), False, now=0.0)
    outs = [out for out in wire.core.data_to_send(0.0) if isinstance(out, StreamData)]
    views = [out.data for out in outs if isinstance(out.data, memoryview)]
    assert [len(view) for view in views] == [50_000, 50_000, 31_072]
    assert all(view.obj is body for view in views)
    assert outs[-1].fin
    assert b"".join(views) == body


@pytest.mark.rule("MA-62")
def test_ma62_small_blocks_are_counted_in_bodies_of_defined_length() -> None:
    """Above 4096 of them: 2. Large ones, and those of an undefined body, are free."""
    handlers = {5: HandlerSpec(allow_undefined_length=True)}
    small = Block(b"x").encode()
    wire, stream = armed(10_000, handlers=handlers)
    wire.give(stream, small * 4096)
    assert wire.signals() == []
    wire.give(stream, small)
    assert failed(wire) == 2
    wire, stream = armed(UNDEFINED, handlers=handlers)
    wire.give(stream, small * 5000, BlockEnd(5000))
    assert [type(e) for e in wire.events] == [Execute]


@pytest.mark.rule("MA-62")
def test_ma62_one_block_of_any_size_and_no_copies_of_large_pieces() -> None:
    """A receiver has no limit on chunks, hands large pieces on as views, and allocates nothing by announced length."""
    wire, stream = armed(2**39, handlers=STREAMING)
    tracemalloc.start()
    try:
        [execute] = wire.give(stream, b"\x05\xff\xff\xff\xff")
        piece = bytes(100_000)
        [event] = wire.give(stream, piece)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert isinstance(execute, Execute)
    assert execute.body is None
    assert isinstance(event, BodyReceived)
    assert isinstance(event.data, memoryview)
    assert event.data.obj is piece


@pytest.mark.rule("MA-113")
def test_ma113_a_streaming_handler_gets_pieces_and_the_end() -> None:
    """It starts with the first Block; the end comes when the sum is right."""
    wire, stream = armed(UNDEFINED, handlers=STREAMING)
    first, second = wire.give(stream, Block(b"ab"))
    assert isinstance(first, Execute)
    assert second == BodyReceived(stream, b"ab")
    assert wire.give(stream, Block(b"c"), BlockEnd(3)) == [BodyReceived(stream, b"c"), BodyEnded(stream, 3)]
    wire.core.finish(stream, now=0.0)
    bad, stream = armed(UNDEFINED, handlers=STREAMING)
    bad.give(stream, Block(b"ab"))
    assert [type(e) for e in bad.give(stream, BlockEnd(3))] == [OperationCancelled]


@pytest.mark.rule("MA-118")
@pytest.mark.rule("MA-131")
def test_ma118_ma131_a_slow_handler_stops_its_stream() -> None:
    """Above the window the stream is not read; consuming opens it again."""
    wire, stream = armed(10_000, handlers=STREAMING, config=MaopConfig(gate=GateConfig(stream_window=1000)))
    wire.give(stream, Block(bytes(999)))
    assert not wire.core.is_blocked(stream)
    wire.give(stream, Block(bytes(10)))
    assert wire.core.is_blocked(stream)
    assert wire.core.body_consumed(stream, 5, now=0.0) == []
    assert wire.core.body_consumed(stream, 500, now=0.0) == [StreamUnblocked(stream)]
    assert wire.core.quota.buffered == 504


@pytest.mark.rule("MA-54c")
def test_ma54c_an_undefined_body_that_exhausts_the_quota() -> None:
    """Fail 14, and the quota is free again."""
    handlers = {5: HandlerSpec(allow_undefined_length=True)}
    wire, stream = armed(UNDEFINED, handlers=handlers, config=MaopConfig(gate=GateConfig(max_buffer_bytes=1000)))
    wire.give(stream, Block(bytes(600)))
    assert wire.core.quota.buffered == 600
    wire.give(stream, Block(bytes(600)))
    assert failed(wire) == 14
    assert wire.core.quota.buffered == 0


@pytest.mark.rule("MA-126")
def test_ma126_a_body_that_stalls() -> None:
    """30 s without an octet: dropped, 5. The total may be limited too. Our own application is watched likewise."""
    wire, stream = armed(100)
    for _ in range(5):
        wire.wait(29)
        wire.give(stream, Block(b"x"))
    assert wire.signals() == []
    wire.wait(30.1)
    assert failed(wire) == 5
    total, stream = armed(100, config=MaopConfig(times=TimesConfig(transfer_total_timeout=40.0)))
    total.wait(29)
    total.give(stream, Block(b"x"))
    total.wait(12)
    assert failed(total) == 5
    silent, stream = armed(100, config=MaopConfig(times=TimesConfig(transfer_total_timeout=3.0)))
    silent.wait(3.1)  # shorter than the longest pause, and not an octet has come
    assert failed(silent) == 5
    own = Wire()
    mine = own.core.send_message(100, None, length=5, now=0.0)
    own.flush()
    assert own.signal(Proceed((mine,))) == [BodyWanted(mine)]
    own.core.send_body(mine, b"abc", now=0.0)
    [event] = own.wait(31)
    assert isinstance(event, Failed)
    assert event.code == ErrorCode.TIMEOUT
    assert own.resets == {mine: 0x10B}
    header = Wire()
    half = header.uni()
    header.give(half, b"\0\0")
    header.wait(31)
    assert failed(header) == 5


@pytest.mark.rule("MA-74")
@pytest.mark.rule("MA-76")
@pytest.mark.rule("MA-126")
def test_ma74_ma76_done_and_only_one_terminal() -> None:
    """Done with the times of the handler; Dones may wait for company; what comes twice is the caller's mistake."""
    wire = Wire(config=MaopConfig(control=ControlConfig(done_flush=0.05)), wall_offset=1_700_000_000.0)
    streams = [wire.uni() for _ in range(3)]
    for stream in streams:
        wire.give(stream, Message(100, 0), fin=True)
    wire.now = 0.01
    for stream in streams:
        wire.core.finish(stream, now=wire.now)
    wire.flush()
    assert wire.signals() == []
    wire.wait(0.06)
    assert sorted(e for s in wire.signals() if isinstance(s, Done) for e in s.entries) == [
        (stream, 1_700_000_000_000, 10) for stream in streams
    ]
    wire.core.finish(streams[0], now=wire.now)  # it has ended, which is no mistake
    wire.flush()
    assert wire.signals() == []
    mine = wire.core.send_message(100, timeout=2.0, now=wire.now)
    [event] = wire.wait(2.1)
    assert isinstance(event, Failed)
    assert wire.signal(Done(((mine, 1, 1),))) == []
    assert wire.core.signals.late == 1


@pytest.mark.rule("MA-137")
def test_ma137_block_lengths_of_eight_octets() -> None:
    """Read only if the setting says so."""
    wide = b"\x05" + (3).to_bytes(8, "big") + b"abc"
    wire, stream = armed(6, config=MaopConfig(tolerate_u64_block_length=True))
    for octet in wide:
        wire.give(stream, bytes((octet,)))
    wire.give(stream, Block(b"def"), BlockEnd(6))
    [event] = wire.events
    assert isinstance(event, Execute)
    assert event.body == b"abcdef"
    strict, stream = armed(3)
    strict.give(stream, wide)
    assert failed(strict) == 12


def test_a_body_longer_or_shorter_than_announced_is_the_callers_mistake() -> None:
    wire = Wire()
    stream = wire.core.send_message(100, None, length=5, now=0.0)
    wire.flush()
    wire.signal(Proceed((stream,)))
    wire.core.send_body(stream, b"abc", now=0.0)
    with pytest.raises(LocalProtocolError, match="more than the 5"):
        wire.core.send_body(stream, b"def", now=0.0)
    with pytest.raises(LocalProtocolError, match="3 bytes of 5"):
        wire.core.end_body(stream, now=0.0)
    wire.core.send_body(stream, memoryview(b"de"), now=0.0)
    wire.core.end_body(stream, now=0.0)
    wire.flush()
    assert wire.body(stream) == [Message(100, 5), Block(b"abc"), Block(b"de"), BlockEnd(5)]
    assert wire.signal(Done(((stream, 7, 8),))) == [Completed(stream, None, None, 7, 8)]


@pytest.mark.rule("MA-123")
@pytest.mark.rule("MA-95")
def test_ma95_done_for_a_body_that_is_on_its_way() -> None:
    """In place of Proceed it is a stored terminal; after Proceed it is 12."""
    wire = Wire()
    stored, early = (wire.core.send_message(100, None, length=5, now=0.0) for _ in range(2))
    wire.flush()
    assert wire.signal(Done(((stored, 1, 1),))) == [Completed(stored, None, None, 1, 1)]
    assert wire.resets == {stored: 0}
    wire.signal(Proceed((early,)))
    [event] = wire.signal(Done(((early, 1, 1),)))
    assert isinstance(event, Failed)
    assert event.code == 12


@pytest.mark.rule("MA-48")
def test_ma48_a_stop_or_a_fail_ends_the_body_at_once() -> None:
    """Our side is reset; the reason is waited for 1 s."""
    wire = Wire()
    one, two = (wire.core.send_message(100, None, length=5, now=0.0) for _ in range(2))
    wire.flush()
    wire.signal(Proceed((one, two)))
    wire.core.stream_stopped(one, 0, now=0.0)
    wire.flush()
    assert one in wire.resets
    with pytest.raises(LocalProtocolError):
        wire.core.send_body(one, b"a", now=0.0)
    assert wire.signal(Fail(one, 17, b"no")) == [Failed(one, 17, "no", True)]
    wire.core.stream_stopped(two, 0, now=0.0)
    assert wire.wait(1.1) == [Failed(two, 11, "the peer gave the stream up", False)]
