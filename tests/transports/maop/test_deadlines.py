"""Each deadline of the core is kept to the millisecond; what is done then, and why, is in the tests of the rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levada.transports.maop import (
    AuthenticationConfig,
    BodyWanted,
    ControlConfig,
    ErrorCode,
    Failed,
    HandlerSpec,
    MaopConfig,
    OperationCancelled,
    ResponseTerms,
    TimesConfig,
)
from levada.transports.maop.frames import Block, DisconnectRequest, Done, Fail, Message, Proceed, Request, Response

from .conftest import Wire, authentication


def due(wire: Wire, seconds: float, done: Callable[[], bool]) -> None:
    """Nothing is done a thousandth of a second before, and all of it at the deadline."""
    wire.wait(seconds - 0.001)
    assert not done()
    wire.wait(0.001 + 1e-9)
    assert done()


def told(wire: Wire, kind: type[object], stream_id: int) -> Callable[[], bool]:
    """Whether the core has told such an event of a stream."""
    return lambda: any(type(event) is kind and getattr(event, "stream_id", None) == stream_id for event in wire.events)


def failed(wire: Wire, stream_id: int) -> Callable[[], bool]:
    """Whether the core has written a Fail for a stream."""
    return lambda: any(isinstance(signal, Fail) and signal.target_stream_id == stream_id for signal in wire.signals())


@pytest.mark.rule("MA-20")
def test_deadlines_of_authentication_are_exact() -> None:
    """What is wanted of a client, and of a server."""
    wire = Wire(approve=False)
    wire.give(0, authentication().encode()[:5])
    due(wire, 5.0, lambda: wire.octets[0] != b"")
    silent = Wire(approve=False, client=True)
    due(silent, 10.0, lambda: silent.closed is not None)


@pytest.mark.rule("MA-68")
@pytest.mark.rule("MA-127")
def test_deadlines_of_the_responder_are_exact() -> None:
    """From the whole body to the header, also at the gate; and until the requester has said Done."""
    wire = Wire(handlers={6: HandlerSpec(), 7: HandlerSpec(gated=True)})
    plain = wire.bidi()
    wire.give(plain, Request(6, 0, timeout_ms=500), fin=True)
    due(wire, 0.5, told(wire, OperationCancelled, plain))
    gated = wire.bidi()
    wire.give(gated, Request(7, 0, timeout_ms=700), fin=True)
    due(wire, 0.7, told(wire, OperationCancelled, gated))
    wire = Wire()
    stream = wire.bidi()
    wire.give(stream, Request(101, 0), fin=True)
    wire.core.respond(stream, now=0.0)
    wire.flush()
    due(wire, 1.0, lambda: wire.core.statistic.responses_unacked == 1)


@pytest.mark.rule("MA-67")
@pytest.mark.rule("MA-69")
def test_deadlines_of_the_requester_are_exact() -> None:
    """For the header, between pieces of the body, and for the Fail that explains a reset."""

    def asking() -> tuple[Wire, int]:
        wire = Wire(client=True)
        stream = wire.core.send_request(101, response=ResponseTerms(timeout_ms=500, msg_id=42), now=0.0)
        wire.flush()
        wire.signal(Proceed((stream,)))
        return wire, stream

    wire, stream = asking()
    due(wire, 1.5, told(wire, Failed, stream))
    wire, stream = asking()
    wire.give(stream, Response(100), Block(b"\1"))
    due(wire, 30.0, told(wire, Failed, stream))
    wire, stream = asking()
    wire.give(stream, Response(100), Block(b"\1"))
    wire.core.stream_reset(stream, 0, now=0.0)
    due(wire, 1.0, told(wire, Failed, stream))
    wire = Wire(client=True)
    stream = wire.core.send_message(100, timeout=2.0, now=0.0)
    wire.flush()
    due(wire, 2.0, told(wire, Failed, stream))


@pytest.mark.rule("MA-74")
@pytest.mark.rule("MA-126")
def test_deadlines_of_transfers_are_exact() -> None:
    """Between two pieces, of the peer's body and of our own; for a Proceed; for all of a body; and for Dones that wait for company."""
    handlers = {5: HandlerSpec(allow_undefined_length=True, max_payload=1000)}
    for config in (
        MaopConfig(),
        MaopConfig(times=TimesConfig(transfer_idle_timeout=100.0, transfer_total_timeout=30.0)),
    ):
        wire = Wire(handlers=handlers, config=config)
        stream = wire.uni()
        wire.give(stream, Message(5, 100))
        wire.give(stream, Block(b"x"))
        due(wire, 30.0, failed(wire, stream))
    own = Wire()
    mine = own.core.send_message(100, None, length=5, now=0.0)
    own.flush()
    waits = own.core.send_message(100, None, length=5, now=0.0)
    own.flush()
    assert own.signal(Proceed((mine,))) == [BodyWanted(mine)]
    due(own, 10.0, told(own, Failed, waits))
    own.core.send_body(mine, b"abc", now=own.now)
    due(own, 30.0, told(own, Failed, mine))
    wire = Wire(config=MaopConfig(control=ControlConfig(done_flush=0.05)))
    stream = wire.uni()
    wire.give(stream, Message(100, 0), fin=True)
    wire.core.finish(stream, now=0.0)
    wire.flush()
    due(wire, 0.05, lambda: any(isinstance(signal, Done) for signal in wire.signals()))


@pytest.mark.rule("MA-26")
@pytest.mark.rule("MA-27")
def test_deadlines_of_authentication_follow_the_settings() -> None:
    """For the result, for a refused client to leave, and for stream 0 to end."""
    config = MaopConfig(
        authentication=AuthenticationConfig(answer_timeout=3.0, disapproved_linger=0.4, auth_close_timeout=7.0)
    )
    silent = Wire(approve=False, client=True, config=config)
    due(silent, 3.0, lambda: silent.closed is not None)
    refused = Wire(approve=False, config=config)
    refused.give(0, authentication().encode(), fin=True)
    refused.core.disapprove_client(ErrorCode.UNAUTHORIZED, "no", now=0.0)
    refused.flush()
    due(refused, 0.4, lambda: refused.closed is not None)
    half_open = Wire(approve=False, config=config)
    half_open.give(0, authentication().encode())
    half_open.core.approve_client("c-42", now=0.0)
    half_open.flush()
    due(half_open, 7.0, lambda: half_open.stops == {0: 0})


@pytest.mark.rule("MA-67")
@pytest.mark.rule("MA-68")
@pytest.mark.rule("MA-69")
@pytest.mark.rule("MA-71")
def test_deadlines_of_responses_follow_the_settings() -> None:
    """For the header, for the Fail behind a reset, for the next piece of the body, and for the Done."""
    config = MaopConfig(
        times=TimesConfig(
            default_request_timeout_ms=2500,
            response_grace=0.25,
            response_transfer_timeout=4.0,
            response_ack_timeout=6.0,
        )
    )

    def asking() -> tuple[Wire, int]:
        wire = Wire(client=True, config=config)
        stream = wire.core.send_request(101, response=ResponseTerms(msg_id=42), now=0.0)
        wire.flush()
        wire.signal(Proceed((stream,)))
        return wire, stream

    wire, stream = asking()
    assert wire.body(stream) == [Request(101, 0, response_msg_id=42, timeout_ms=2500)]
    due(wire, 2.75, told(wire, Failed, stream))
    wire, stream = asking()
    wire.give(stream, Response(100), Block(b"\1"))
    due(wire, 4.0, told(wire, Failed, stream))
    wire, stream = asking()
    wire.give(stream, Response(100), Block(b"\1"))
    wire.core.stream_reset(stream, 0, now=0.0)
    due(wire, 0.25, told(wire, Failed, stream))
    wire = Wire(config=config)
    stream = wire.bidi()
    wire.give(stream, Request(101, 0), fin=True)
    wire.core.respond(stream, now=0.0)
    wire.flush()
    due(wire, 6.0, lambda: wire.core.statistic.responses_unacked == 1)


@pytest.mark.rule("MA-88")
@pytest.mark.rule("MA-92")
def test_deadlines_of_a_connection_follow_the_settings() -> None:
    """For a flood of signals to end, and for the time to drain that a peer asks for."""
    wire = Wire(
        config=MaopConfig(
            control=ControlConfig(signal_rate=100.0, signal_burst=10, unknown_signal_rate=10**6, flood_timeout=3.0)
        )
    )
    wire.signal(Proceed((1,) * 5000))
    due(wire, 3.0, lambda: wire.closed is not None)
    wire = Wire(config=MaopConfig(times=TimesConfig(max_drain_time=8.0)))
    stream = wire.uni()
    wire.give(stream, Message(100, 0))
    wire.signal(DisconnectRequest(60_000))
    due(wire, 8.0, told(wire, OperationCancelled, stream))
