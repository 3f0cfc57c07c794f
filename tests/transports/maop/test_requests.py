"""Requests and their Responses, on either side."""

from __future__ import annotations

from typing import Any

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.maop import (
    BodyEnded,
    BodyReceived,
    Completed,
    ErrorCode,
    Execute,
    Failed,
    HandlerSpec,
    MaopConfig,
    OperationCancelled,
    ResponseRejected,
    ResponseStarted,
    ResponseTerms,
)
from levada.transports.maop.frames import (
    UNDEFINED,
    Block,
    BlockEnd,
    Done,
    Fail,
    Message,
    Operation,
    Proceed,
    Request,
    Response,
)

from .conftest import Wire

HELLO = b"\x0atext/plainhello"


def asked(wire: Wire | None = None, **options: Any) -> tuple[Wire, int]:
    """A server whose handler is at work."""
    wire = wire or Wire(**options)
    stream = wire.bidi()
    wire.give(stream, Request(101, 0), fin=True)
    assert isinstance(wire.events[-1], Execute)
    wire.signals()
    return wire, stream


def asking(**options: Any) -> tuple[Wire, int]:
    """A client that waits for a Response."""
    wire = Wire(client=True, config=options.pop("config", None))
    stream = wire.core.send_request(101, response=ResponseTerms(**options), now=0.0)
    wire.flush()
    wire.signal(Proceed((stream,)))
    return wire, stream


@pytest.mark.rule("MA-65")
@pytest.mark.rule("MA-96")
@pytest.mark.rule("MA-66")
def test_ma65_ma66_ma96_a_response() -> None:
    """Header, Blocks, Block End, FIN; the native header counts; there is only one."""
    wire, stream = asked(wall_offset=1000.0)
    wire.core.respond(stream, b"hello", "text/plain", now=0.25)
    wire.flush()
    assert wire.body(stream) == [Response(16, 1_000_000, 250), Block(HELLO), BlockEnd(16)]
    assert stream in wire.finished
    wire.core.respond(stream, b"again", "text/plain", now=0.3)
    wire.core.fail(stream, 17, "late", now=0.3)
    wire.flush()
    assert len(wire.body(stream)) == 3
    empty, stream = asked()
    empty.core.respond(stream, now=0.0)
    empty.flush()
    assert empty.body(stream) == [Response(0)]
    large, stream = asked()
    large.core.respond(stream, bytes(300_000), "text/plain", now=0.0)
    large.flush()
    assert [type(op) for op in large.body(stream)] == [Response, Block, Block, Block, Block, BlockEnd]
    assert large.body(stream)[-1] == BlockEnd(300_011)


@pytest.mark.rule("MA-65")
@pytest.mark.parametrize("length", [5, None])
def test_ma65_a_response_in_pieces(length: int | None) -> None:
    """Known or unknown length; the time is that of the header."""
    wire, stream = asked()
    with pytest.raises(LocalProtocolError, match="start_response"):
        wire.core.send_body(stream, b"x", now=0.0)
    wire.core.start_response(stream, length, "text/plain", now=0.5)
    wire.core.send_body(stream, b"hel", now=0.6)
    wire.core.send_body(stream, b"lo", now=0.7)
    if length:
        with pytest.raises(LocalProtocolError, match="announced"):
            wire.core.send_body(stream, b"x", now=0.7)
    wire.core.end_body(stream, now=0.8)
    wire.flush()
    head, *rest = wire.body(stream)
    assert head == Response(UNDEFINED if length is None else 16, 0, 500)
    assert rest == [Block(HELLO[:11]), Block(b"hel"), Block(b"lo"), BlockEnd(16)]


@pytest.mark.rule("MA-99a")
@pytest.mark.rule("MA-98")
def test_ma98_ma99a_the_success_layout_is_for_success() -> None:
    """Another kind has the application's layout, unless its handler declares otherwise; no body needs no content type."""
    wire = Wire(handlers={5: HandlerSpec(responses={0, 42, 43}, success_layout={43})})
    streams = [wire.bidi() for _ in range(3)]
    for stream, kind in zip(streams, (0, 42, 43), strict=True):
        wire.give(stream, Request(5, 0, response_msg_id=kind), fin=True)
    with pytest.raises(LocalProtocolError, match="needs a content type"):
        wire.core.respond(streams[0], b"x", now=0.0)
    with pytest.raises(LocalProtocolError, match="has no content type"):
        wire.core.respond(streams[1], b"x", "text/plain", now=0.0)
    with pytest.raises(LocalProtocolError, match="media type"):
        wire.core.respond(streams[2], b"x", "text/plain; charset=utf-8", now=0.0)
    wire.core.respond(streams[0], now=0.0)
    wire.core.respond(streams[1], b"x", now=0.0)
    wire.core.respond(streams[2], b"x", "a/b", now=0.0)
    wire.flush()
    assert [len(wire.octets[stream]) - 21 for stream in streams] == [0, 15, 19]


@pytest.mark.rule("MA-66")
@pytest.mark.rule("MA-79")
@pytest.mark.rule("MA-75")
def test_ma66_ma75_ma79_a_handler_that_fails() -> None:
    """Fail on a control stream, with a clean reason; our side is reset; nothing more is written there."""
    wire, stream = asked()
    wire.core.fail(stream, 17, "boom: token=abc", now=0.0)
    wire.flush()
    other, last = asked()
    other.core.fail(last, 17, "token=abc", now=0.0)
    other.flush()
    assert other.signals() == [Fail(last, 17, b"token=***")]
    assert wire.signals() == [Fail(stream, 17, b"boom: token=***")]
    assert wire.resets == {stream: 0x111}
    assert wire.octets[stream] == b""
    assert len(wire.events) == 1


@pytest.mark.rule("MA-67")
def test_ma67_an_error_after_the_header() -> None:
    """Reset, then Fail. The requester reports that code; 11 if it does not come in 1 s; a Fail after the end is ignored."""
    wire, stream = asked()
    wire.core.start_response(stream, 100, "text/plain", now=0.0)
    wire.core.fail(stream, 2000, "disk", now=0.0)
    wire.flush()
    assert wire.resets == {stream: 0x8D0}
    assert wire.signals() == [Fail(stream, 2000, b"disk")]
    for explained in (True, False):
        wire, stream = asking()
        wire.give(stream, Response(100), Block(b"\x01"))
        assert wire.core.stream_reset(stream, 0, now=0.0) == []
        if explained:
            assert wire.signal(Fail(stream, 17, b"why")) == [Failed(stream, 17, "why", True)]
        else:
            assert wire.wait(0.9) == []
            assert wire.wait(0.2) == [Failed(stream, 11, "the peer gave the stream up", False)]
    wire, stream = asking()
    wire.give(stream, Response(0), fin=True)
    assert wire.signal(Fail(stream, 17, b"late")) == []
    held, stream = asking(acknowledge=False)
    held.give(stream, Response(0), fin=True)
    assert held.signal(Fail(stream, 17, b"late")) == []
    held.core.consumed(stream, now=0.0)
    held.flush()
    assert held.signals() == [Done(((stream, 0, 0),))]


@pytest.mark.rule("MA-68")
@pytest.mark.rule("MA-127")
def test_ma68_ma127_the_responder_keeps_the_time() -> None:
    """From the whole body to the header, else Fail 5 and cancellation; 0 is no limit; waiting at the gate counts."""
    wire = Wire(handlers={5: HandlerSpec(max_timeout=2.0), 6: HandlerSpec(), 7: HandlerSpec(gated=True)})
    capped, short, none, gated = (wire.bidi() for _ in range(4))
    wire.give(capped, Request(5, 0, timeout_ms=60_000), fin=True)
    wire.give(short, Request(6, 1, timeout_ms=500))
    wire.give(none, Request(6, 0, timeout_ms=0), fin=True)
    wire.give(gated, Request(7, 0, timeout_ms=700), fin=True)
    wire.wait(0.4)
    wire.give(short, Block(b"x"), BlockEnd(1))
    wire.signals()
    assert [e.stream_id for e in wire.wait(0.45) if isinstance(e, OperationCancelled)] == [gated]
    assert wire.signals() == [Fail(gated, 5, b"time is up")]
    assert [e.stream_id for e in wire.wait(0.1) if isinstance(e, OperationCancelled)] == [short]
    assert [e.stream_id for e in wire.wait(9.0) if isinstance(e, OperationCancelled)] == [capped]
    wire.core.respond(none, now=wire.now)
    assert Wire(client=True).core.send_request(101, now=0.0) == 4
    own = Wire()
    own.core.send_request(101, now=0.0)
    own.flush()
    assert own.body(1) == [Request(101, 0, timeout_ms=5000)]


@pytest.mark.rule("MA-68")
@pytest.mark.parametrize(("length", "cancelled_at"), [(0, 0.7), (1, 1.1)])
def test_ma68_time_at_the_gate_counts_for_an_operation_without_body(length: int, cancelled_at: float) -> None:
    """Its time runs from the header; otherwise from the completion of the body."""
    wire = Wire(handlers={7: HandlerSpec(gated=True)})
    stream = wire.bidi()
    wire.give(stream, Request(7, length, timeout_ms=700), fin=not length)
    wire.wait(0.4)
    wire.core.proceed(stream, now=wire.now)
    wire.flush()
    if length:
        wire.give(stream, Block(b"x"), BlockEnd(1))
    left = cancelled_at - 0.4
    assert [event for event in wire.wait(left - 0.05) if isinstance(event, OperationCancelled)] == []
    assert [event.stream_id for event in wire.wait(0.1) if isinstance(event, OperationCancelled)] == [stream]


@pytest.mark.rule("MA-69")
def test_ma69_the_requester_keeps_the_time_too() -> None:
    """Timeout and 1 s for the header, 30 s between chunks of the body."""
    wire, stream = asking(timeout_ms=500)
    assert wire.wait(1.45) == []
    [event] = wire.wait(0.1)
    assert isinstance(event, Failed)
    assert event.code == ErrorCode.TIMEOUT
    assert wire.stops == {stream: 0x10B}
    assert wire.signals() == []
    patient, stream = asking(timeout_ms=0, msg_id=42)
    assert patient.wait(10_000) == []
    patient.give(stream, Response(100), Block(b"\1"))
    patient.wait(29)
    patient.give(stream, Block(b"a"))
    assert patient.wait(29) == []
    assert [type(e) for e in patient.wait(2)] == [Failed]


@pytest.mark.rule("MA-14a")
@pytest.mark.parametrize("octets", [Block(b"x"), BlockEnd(0), Proceed((4,)), Message(100, 0), b"\xff"])
def test_ma14a_what_is_no_response(octets: Operation | bytes) -> None:
    """The call fails by 10, the peer is told, and stopped."""
    wire, stream = asking()
    [event] = wire.give(stream, octets)
    assert isinstance(event, Failed)
    assert event.code == 10
    assert [(s.target_stream_id, s.error_code) for s in wire.signals() if isinstance(s, Fail)] == [(stream, 10)]
    assert wire.stops == {stream: 0x10A}


@pytest.mark.rule("MA-70")
def test_ma70_responses_in_wrong_places() -> None:
    """From the side that asked: 10. A second one behind the first is ignored."""
    wire, stream = asked()
    late = wire.bidi()
    wire.give(late, Request(101, 0), Response(0))
    assert Fail(late, 10, b"operation 0x02 has no place here") in wire.signals()
    client, stream = asking()
    assert [type(e) for e in client.give(stream, Response(0), Response(0))] == [Completed]
    client.flush()
    assert [type(s) for s in client.signals()] == [Done]


@pytest.mark.rule("MA-71")
def test_ma71_the_requester_says_done() -> None:
    """With its own times, at once or when the application has used it; the responder forgets after 1 s."""
    wire, stream = asking()
    events = wire.give(stream, Response(16, 5, 6), Block(HELLO), BlockEnd(16), fin=True)
    assert events == [Completed(stream, b"hello", "text/plain", 5, 6, 16, 1)]
    assert wire.signals() == [Done(((stream, 0, 0),))]
    later, stream = asking(acknowledge=False)
    with pytest.raises(LocalProtocolError, match="not complete"):
        later.core.consumed(stream, now=0.0)
    later.give(stream, Response(0), fin=True)
    later.core.reject(stream, ErrorCode.RESPONSE_CONSUME, "cannot use it", now=0.5)
    later.flush()
    assert later.signals() == [Fail(stream, 19, b"cannot use it")]
    server, one = asked()
    _, two = asked(server)
    _, three = asked(server)
    for stream in (one, two, three):
        server.core.respond(stream, now=0.0)
    assert server.signal(Done(((one, 1, 2),)), Fail(two, 19, b"no")) == [
        ResponseRejected(two, 19, "no"),
    ]
    assert server.wait(1.1) == []
    assert server.core.statistic.responses_unacked == 1
    assert server.signal(Done(((three, 1, 2),))) == []


@pytest.mark.rule("MA-71")
@pytest.mark.parametrize(
    ("options", "octets", "fin", "code"),
    [
        ({}, [Response(5), b"\x05\0\0\0\6"], False, 4),
        ({}, [Response(5), BlockEnd(5)], False, 7),
        ({}, [Response(5), Block(b"\3a")], True, 7),
        ({}, [b"\x02\0\0"], True, 7),
        ({"allow_undefined": False}, [Response(UNDEFINED)], False, 15),
        ({"max_size": 4}, [Response(5)], False, 2),
        ({"max_size": 4}, [Response(UNDEFINED), b"\x05\0\0\0\5"], False, 2),
        ({}, [Response(5), Block(b"\0abcd")], False, 3),
        ({}, [Response(UNDEFINED), BlockEnd(0)], False, 3),
        ({}, [Response(5), Block(b"\4text"), BlockEnd(5)], False, 0),
        ({}, [Response(2), Block(b"\4t"), BlockEnd(2)], False, 0),
        ({}, [Response(4), Block(b"\3a/\xff")], False, 0),
        ({"config": MaopConfig(strict_timestamps=True)}, [Response(0, 6_000)], False, 3),
        ({"config": MaopConfig(strict_timestamps=True)}, [Response(0, 0, 6_000)], False, 3),
    ],
)
@pytest.mark.rule("MA-73")
@pytest.mark.rule("MA-111")
@pytest.mark.rule("MA-110")
def test_ma71_ma73_ma110_ma111_responses_of_no_use(
    options: dict[str, Any], octets: list[Operation | bytes], fin: bool, code: int
) -> None:
    """The call fails here and the responder is told, by the code that fits; in any cutting."""
    data = b"".join(o if isinstance(o, bytes) else o.encode() for o in octets)
    for size in (1, len(data)):
        wire, stream = asking(**options)
        for at in range(0, len(data), size):
            wire.give(stream, data[at : at + size], fin=fin and at + size >= len(data))
        [event] = wire.events
        assert isinstance(event, Failed)
        assert (event.stream_id, event.code, event.by_peer) == (stream, code, False)
        assert [s.error_code for s in wire.signals() if isinstance(s, Fail)] == [code]
        assert wire.core.operations == 0


@pytest.mark.rule("MA-72")
def test_ma72_done_for_a_request() -> None:
    """Never sent; one that comes fails the call by 12."""
    wire, stream = asked()
    with pytest.raises(LocalProtocolError, match="never by Done"):
        wire.core.finish(stream, now=0.0)
    client, stream = asking()
    [event] = client.signal(Done(((stream, 1, 1),)))
    assert isinstance(event, Failed)
    assert event.code == 12
    assert client.signals() == []


@pytest.mark.rule("MA-73")
def test_ma73_clocks_of_hosts_differ() -> None:
    """Times are judged only on request."""
    wire, stream = asking()
    assert [type(e) for e in wire.give(stream, Response(0, 2**63, 2**31), fin=True)] == [Completed]


@pytest.mark.rule("MA-61")
def test_ma61_an_initiator_that_gives_up() -> None:
    """Reset, or stopped reading: the handler is cancelled, and Fail 11 says that it had begun."""
    for stop in (True, False):
        wire = Wire()
        stream = wire.bidi()
        wire.give(stream, Request(101, 0))
        wire.signals()
        call = wire.core.stream_stopped if stop else wire.core.stream_reset
        [event] = call(stream, 0, now=0.0)
        assert isinstance(event, OperationCancelled)
        wire.flush()
        assert [s.error_code for s in wire.signals() if isinstance(s, Fail)] == [11]
        assert stream in wire.resets
    client, stream = asking()
    client.core.cancel(stream, now=0.0)
    client.flush()
    assert (client.stops, client.events) == ({stream: 0x10B}, [])
    assert client.signal(Fail(stream, 11, b"")) == []
    wire, stream = asked()
    [event] = wire.signal(Fail(stream, 10, b"gave up"))
    assert event == OperationCancelled(stream, 10, "gave up")


@pytest.mark.rule("MA-80")
def test_ma80_signals_for_what_is_over_are_counted() -> None:
    """Fail and Done for finished streams change nothing."""
    wire = Wire()
    stream = wire.uni()
    wire.give(stream, Message(100, 0), fin=True)
    assert wire.signal(Done(((stream, 1, 1),)), Fail(stream, 1, b"")) == []
    assert wire.core.signals.late == 2
    assert wire.core.operations == 1


def test_a_streamed_response_comes_piece_by_piece() -> None:
    """The content type is taken off, however it is cut."""
    data = b"".join(op.encode() for op in (Response(UNDEFINED, 3, 4), Block(HELLO[:7]), Block(HELLO[7:]), BlockEnd(16)))
    for size in (1, 5, len(data)):
        wire, stream = asking(streamed=True)
        for at in range(0, len(data), size):
            wire.give(stream, data[at : at + size])
        first, *pieces, last = wire.events
        assert first == ResponseStarted(stream, None, "text/plain", 3, 4)
        assert b"".join(bytes(e.data) for e in pieces if isinstance(e, BodyReceived)) == b"hello"
        assert last == Completed(stream, None, "text/plain", 3, 4, None, 2)
    plain, stream = asking(streamed=True, msg_id=42)
    assert plain.give(stream, Response(2), Block(b"ab"), BlockEnd(2), fin=True) == [
        ResponseStarted(stream, 2, None, 0, 0),
        BodyReceived(stream, b"ab"),
        Completed(stream, None, None, 0, 0, 2, 1),
    ]
    nothing, stream = asking(streamed=True)
    assert nothing.give(stream, Response(0), fin=True) == [
        ResponseStarted(stream, 0, None, 0, 0),
        Completed(stream, None, None, 0, 0, 0, 0),
    ]
    assert BodyEnded(1, 0) not in nothing.events


@pytest.mark.rule("MA-116")
def test_ma116_priorities_reach_the_streams() -> None:
    """Ours when they are opened, the peer's when the Response is written; a handler may have its own."""
    wire = Wire(handlers={5: HandlerSpec(), 6: HandlerSpec(priority=200)})
    wire.core.send_request(9, priority=3, now=0.0)
    one, two, three = (wire.bidi() for _ in range(3))
    for stream, operation in ((one, Request(5, 0, 7)), (two, Request(6, 0, 7)), (three, Request(5, 0))):
        wire.give(stream, operation, fin=True)
        wire.core.respond(stream, now=0.0)
    wire.flush()
    assert [(o.stream_id, o.unidirectional, o.priority) for o in wire.opened if o.priority >= 0] == [(1, False, 3)]
    assert wire.priorities == {one: 7, two: 200}
