"""The end of a connection: at once, after a drain, or by the network."""

from __future__ import annotations

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.maop import (
    Completed,
    ConnectionEnded,
    ConnectionState,
    Draining,
    ErrorCode,
    Execute,
    Failed,
    HandlerSpec,
    MaopConfig,
    OperationCancelled,
    Refused,
    TimesConfig,
)
from levada.transports.maop.frames import Disconnect, DisconnectRequest, Done, Fail, Message, Proceed, Refuse, Request

from .conftest import Pair, Wire


def deadline(wire: Wire) -> float | None:
    return wire.core.at


@pytest.mark.rule("MA-89")
def test_ma89_no_new_operations_while_draining() -> None:
    """The peer's are refused by 14 without a hint, unless the handler is needed; ours are the caller's mistake."""
    wire = Wire(handlers={5: HandlerSpec(), 6: HandlerSpec(allow_while_draining=True)})
    running, new, needed = wire.uni(), wire.uni(), wire.uni()
    wire.give(running, Message(5, 0))
    assert wire.signal(DisconnectRequest(3000, b"bye")) == [Draining(3.0, "bye", by_peer=True)]
    wire.give(new, Message(5, 0))
    assert wire.signals() == [Refuse(((new, 0, 14),))]
    [event] = wire.give(needed, Message(6, 0))
    assert isinstance(event, Execute)
    with pytest.raises(LocalProtocolError, match="DRAINING"):
        wire.core.send_message(5, now=0.0)
    assert wire.core.send_message(5, while_draining=True, now=0.0) == 3


@pytest.mark.rule("MA-90")
def test_ma90_the_shorter_time_holds_and_the_asker_may_grant_more() -> None:
    """Nothing, an answer, or a denial."""
    wire = Wire()
    wire.give(wire.uni(), Message(100, 0))
    wire.core.request_disconnect(10.0, "maintenance", now=0.0)
    wire.flush()
    assert wire.signals() == [DisconnectRequest(10_000, b"maintenance")]
    wire.signal(DisconnectRequest(4000))
    assert deadline(wire) == 4.0
    wire.core.request_disconnect(20.0, "", now=0.0)
    assert deadline(wire) == 20.0
    asked = Wire()
    asked.give(asked.uni(), Message(100, 0))
    asked.signal(DisconnectRequest(10_000))
    asked.core.request_disconnect(50.0, "", now=0.0)
    assert deadline(asked) == 10.0
    asked.signal(DisconnectRequest(20_000))
    assert deadline(asked) == 20.0
    deny = Wire()
    deny.give(deny.uni(), Message(100, 0))
    deny.signal(DisconnectRequest(10_000))
    assert [type(e) for e in deny.core.disconnect(now=0.0)] == [OperationCancelled]
    deny.flush()
    assert deny.signals() == [Disconnect()]


@pytest.mark.rule("MA-91")
def test_ma91_a_disconnect_request_that_breaks_off() -> None:
    """It does not count, and the connection ends."""
    for reset in (True, False):
        wire = Wire()
        wire.signal(DisconnectRequest(1000, b"bye").encode()[:-1])
        if reset:
            wire.events += wire.core.stream_reset(wire.control, 0, now=0.0)
            wire.flush()
        else:
            wire.give(wire.control, fin=True)
        assert wire.closed is not None
        assert not [e for e in wire.events if isinstance(e, Draining)]


@pytest.mark.rule("MA-92")
def test_ma92_drained() -> None:
    """When the last has ended, signals are flushed, then Disconnect, then the close by 0."""
    wire = Wire()
    stream = wire.uni()
    wire.give(stream, Message(100, 0), fin=True)
    wire.signal(DisconnectRequest(5000))
    wire.wait(1.0)
    assert wire.core.state is ConnectionState.DRAINING
    wire.core.finish(stream, now=1.0)
    wire.flush()
    wire.flush()
    states = [wire.core.state]
    assert [type(s) for s in wire.signals()] == [Done]
    wire.core.control_acknowledged(now=1.0)
    wire.flush()
    states.append(wire.core.state)
    assert wire.signals() == [Disconnect()]
    wire.core.control_acknowledged(now=1.0)
    wire.flush()
    states.append(wire.core.state)
    assert states == [ConnectionState.FLUSHING, ConnectionState.CLOSING, ConnectionState.CLOSED]
    assert wire.closed is not None
    assert wire.closed.code == 0


@pytest.mark.rule("MA-92")
@pytest.mark.parametrize("answer", [DisconnectRequest(9000), Disconnect(), None])
def test_ma92_a_drain_waits_until_the_peer_knows(answer: DisconnectRequest | Disconnect | None) -> None:
    """What the peer began before it knew is refused, not lost. A peer that says nothing costs the drain time."""
    wire = Wire()
    crossing = wire.bidi()
    wire.core.request_disconnect(5.0, "bye", now=0.0)
    wire.flush()
    assert wire.signals() == [DisconnectRequest(5000, b"bye")]
    wire.wait(1.0)
    wire.give(crossing, Request(101, 0), fin=True)
    assert wire.signals() == [Refuse(((crossing, 0, 14),))]
    assert deadline(wire) == 5.0
    if answer is None:
        wire.wait(4.0)
    else:
        wire.signal(answer)
    if isinstance(answer, Disconnect):
        assert wire.core.state is ConnectionState.CLOSED
        assert wire.closed is not None
        assert wire.closed.code == 0
        return
    assert wire.core.state is ConnectionState.FLUSHING
    wire.core.control_acknowledged(now=0.0)
    wire.flush()
    assert wire.signals() == [Disconnect()]


@pytest.mark.rule("MA-92")
def test_ma92_time_is_up() -> None:
    """What is left is cancelled and fails by 11, SHUTDOWN; ours too; without acknowledgement all waits 500 ms."""
    wire = Wire()
    stream = wire.uni()
    wire.give(stream, Message(100, 0), fin=True)
    mine = wire.core.send_message(100, now=0.0)
    wire.signal(DisconnectRequest(100_000))
    assert deadline(wire) == 30.0
    events = wire.wait(30.1)
    assert events == [OperationCancelled(stream, 11, "SHUTDOWN"), Failed(mine, 11, "SHUTDOWN", False)]
    assert [s for s in wire.signals() if isinstance(s, Fail)] == [Fail(stream, 11, b"SHUTDOWN")]
    wire.wait(0.5)
    assert wire.signals() == [Disconnect()]
    assert wire.closed is None
    [event] = wire.wait(0.5)
    assert event == ConnectionEnded(0, "disconnected", None)
    now = Wire()
    now.give(now.uni(), Message(100, 0))
    now.signal(DisconnectRequest(0))
    assert [type(e) for e in now.wait(0.0)] == [OperationCancelled]


@pytest.mark.rule("MA-92")
@pytest.mark.parametrize("both", [True, False])
def test_ma92_two_cores_drain(both: bool) -> None:
    """Whoever is first says Disconnect; both end orderly, and what ran has finished."""
    pair = Pair()
    stream = pair.client.send_message(100, b"x", now=0.0)
    pair.pump()
    pair.client.request_disconnect(5.0, "", now=0.0)
    if both:
        pair.server.request_disconnect(4.0, "", now=0.0)
    pair.pump()
    pair.server.finish(stream, now=0.0)
    pair.pump()
    pair.wait(2.0)
    assert Completed(stream, None, None, 0, 0) in pair.events[0]
    for events in pair.events:
        assert isinstance(events[-1], ConnectionEnded)
        assert events[-1].code == 0


@pytest.mark.rule("MA-92")
@pytest.mark.parametrize("leaving", [0, 1])
def test_ma92_an_operation_that_crosses_the_end_is_refused(leaving: int) -> None:
    """With a body or without, to a server or to a client; nothing of it is begun, and no time is lost."""
    pair = Pair()
    other = 1 - leaving
    crossing = [
        pair.cores[other].send_message(100, b"x", now=0.0),
        pair.cores[other].send_request(101, b"", now=0.0),
    ]
    pair.events[leaving].extend(pair.cores[leaving].drain(0.0))
    pair.pump()
    refused = [event for event in pair.events[other] if isinstance(event, Refused)]
    assert sorted((event.stream_id, event.code) for event in refused) == [(stream, 14) for stream in sorted(crossing)]
    assert not [event for event in pair.events[leaving] if isinstance(event, Execute)]
    pair.wait(1.0)
    assert [type(events[-1]) for events in pair.events] == [ConnectionEnded, ConnectionEnded]


@pytest.mark.rule("MA-93")
def test_ma93_disconnect_at_once() -> None:
    """Its receiver cancels all without a signal and closes by 0; its sender closes after 500 ms."""
    wire = Wire()
    stream = wire.uni()
    wire.give(stream, Message(100, 0))
    mine = wire.core.send_message(100, b"body", now=0.0)
    wire.flush()
    assert wire.signal(Disconnect(), Proceed((mine,))) == [
        OperationCancelled(stream, 11, "the connection is over"),
        Failed(mine, 11, "the connection is over", False, True),
        ConnectionEnded(0, "the peer disconnected", None),
    ]
    assert wire.closed is not None
    assert wire.closed.code == 0
    own = Wire()
    assert own.core.disconnect(now=0.0) == []
    own.flush()
    assert own.signals() == [Disconnect()]
    assert own.core.disconnect(now=0.0) == []
    own.wait(0.4)
    assert own.closed is None
    own.wait(0.2)
    assert own.closed is not None


@pytest.mark.rule("MA-94")
def test_ma94_the_reason_is_for_diagnostics() -> None:
    """Sanitised like any other."""
    wire = Wire()
    wire.core.request_disconnect(1.0, "token=abc\n" + "x" * 600, now=0.0)
    wire.flush()
    [request] = wire.signals()
    assert isinstance(request, DisconnectRequest)
    assert request.reason.startswith(b"token=*** ")
    assert len(request.reason) <= 512


@pytest.mark.rule("MA-61")
@pytest.mark.rule("MA-120")
def test_ma61_ma120_a_lost_connection_says_what_was_not_executed() -> None:
    """Certain only for what had no Proceed and N > 0; nothing is repeated by itself."""
    wire = Wire()
    body, empty, asked = (
        wire.core.send_message(100, b"x", now=0.0),
        wire.core.send_message(100, now=0.0),
        wire.core.send_message(100, None, length=4, now=0.0),
    )
    wire.flush()
    wire.signal(Proceed((asked,)))
    events = wire.core.connection_lost(7, "gone", now=0.0)
    assert [(e.stream_id, e.not_executed) for e in events if isinstance(e, Failed)] == [
        (body, True),
        (empty, False),
        (asked, False),
    ]
    assert events[-1] == ConnectionEnded(7, "gone", None)
    wire.flush()
    assert wire.closed is None
    assert wire.core.next_deadline() is None
    assert wire.core.handle_timeout(100.0) == []
    assert wire.core.receive_stream_data(4, b"x", False, now=0.0) == []
    with pytest.raises(LocalProtocolError):
        wire.core.request_disconnect(1.0, "", now=0.0)


@pytest.mark.rule("MA-2")
@pytest.mark.parametrize("approve", [True, False])
def test_ma2_a_datagram_ends_the_connection(approve: bool) -> None:
    """No datagrams."""
    wire = Wire(approve=approve)
    [event] = wire.core.receive_datagram(b"x", 0.0)
    assert isinstance(event, ConnectionEnded)
    assert event.error is not None
    assert event.error.rule == "MA-2"
    wire.flush()
    assert wire.closed is not None
    assert wire.closed.code == 0x100 + ErrorCode.PROTOCOL_VIOLATION
    assert wire.core.receive_datagram(b"x", 0.0) == []


def test_drain_takes_its_time_from_the_settings_and_a_second_call_changes_nothing() -> None:
    wire = Wire(config=MaopConfig(times=TimesConfig(drain_timeout=3.0)))
    wire.give(wire.bidi(), Request(101, 0), fin=True)
    [draining] = wire.core.drain(1.0)
    assert draining == Draining(3.0, "", False)
    assert wire.core.drain(2.0) == []
    wire.flush()
    assert wire.signals()[-1] == DisconnectRequest(3000, b"")
    assert wire.core.next_deadline() == 4.0


def test_drain_answers_the_peer_that_asked_first() -> None:
    wire = Wire(config=MaopConfig(times=TimesConfig(drain_timeout=3.0)))
    wire.give(wire.bidi(), Request(101, 0), fin=True)
    wire.signal(DisconnectRequest(1000, b""))
    assert wire.core.drain(0.5) == [Draining(0.5, "", False)]
    assert wire.core.drain(0.5) == []


@pytest.mark.parametrize("client", [True, False])
def test_drain_of_a_connection_that_is_not_open_ends_it(client: bool) -> None:
    wire = Wire(client=client, approve=False)
    assert wire.core.drain(0.0) == [ConnectionEnded(0, "")]
    assert wire.core.next_deadline() is None
