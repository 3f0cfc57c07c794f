"""The start and the end of a connection: greeting, Version, what is held back, 0-RTT, resets and stops."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.aqueduct import (
    ALPN,
    AqueductConfig,
    AqueductCore,
    Attach,
    CloseCode,
    CloseConnection,
    ConnectionEnded,
    ConnectionState,
    Ended,
    HeadersReceived,
    Mode,
    OpenStream,
    ReceiverState,
    ResetCode,
    SenderState,
    Settled,
    StreamData,
    StreamDone,
    StreamUnblocked,
)
from levada.transports.aqueduct.frames import (
    VERSION,
    AckReliable,
    ChannelControl,
    CloseReceiver,
    ConnectionControl,
    FinishSender,
    Message,
    SentUnreliable,
    Version,
)
from levada.transports.aqueduct.state import CONNECTION, ConnectionInput

from .conftest import Pair, Wire, frames_of, state_of


@pytest.mark.rule("AQ-14", "E-11")
def test_aq14_e11_a_peer_without_datagrams_is_refused(wire: Callable[..., Wire]) -> None:
    """Both ends must take datagrams, which is known when the handshake is complete."""
    assert ALPN == "aqueduct"
    w = wire(client=True, greet=False)
    w.events += w.core.handshake_completed(0)
    assert w.broken() == "E-11"


@pytest.mark.rule("AQ-15")
def test_aq15_the_client_greets_first(wire: Callable[..., Wire]) -> None:
    """The client opens a bidirectional stream with Version and ConnectionControl as soon as it can."""
    w = wire(client=True, greet=False, headers=(("k", b"v"),))
    assert w.core.data_to_send(0.0) == []
    assert w.core.control_id is None
    w.core.handshake_completed(1170)
    assert w.core.data_to_send(0.0) == [
        OpenStream(0, unidirectional=False, priority=64),
        StreamData(0, VERSION + ConnectionControl((("k", b"v"),)).encode(), fin=False),
    ]
    assert w.core.control_id == 0


@pytest.mark.rule("AQ-15", "AQ-16", "AQ-18")
def test_aq15_aq18_the_server_answers_when_the_application_says_so(wire: Callable[..., Wire]) -> None:
    """Nothing is sent before the client's ConnectionControl was looked at; then headers, and the entrypoint's control stream."""
    w = wire(client=False, greet=False)
    w.core.handshake_completed(1170)
    with pytest.raises(LocalProtocolError):
        w.core.accept()
    w.give(0, VERSION, b"\x01")
    assert w.events == []
    assert w.core.control_id is None
    w.give(0, b"\x00")
    assert w.events == [HeadersReceived(())]
    assert w.core.control_id == 0
    assert (dict(w.octets), w.core.halves) == ({}, {})
    w.core.accept((("s", b"1"),))
    w.flush()
    assert w.octets == {0: VERSION + ConnectionControl((("s", b"1"),)).encode(), 1: ChannelControl(0).encode()}
    assert w.receiver.state is ReceiverState.OPEN
    with pytest.raises(LocalProtocolError):
        w.core.accept()


@pytest.mark.rule("AQ-18")
def test_aq18_the_client_starts_with_the_entrypoint(wire: Callable[..., Wire]) -> None:
    """One sender, reachable, without a control stream."""
    w = wire(client=True, greet=False)
    assert list(w.core.halves) == [0]
    assert (w.sender.state, w.sender.reachable, w.sender.control) == (SenderState.UNATTACHED, True, None)


@pytest.mark.rule("AQ-16")
def test_aq16_an_early_client_says_version_first(wire: Callable[..., Wire]) -> None:
    """Each stream and datagram begins with Version until the server's ConnectionControl has come, and never later."""
    w = wire(client=True, greet=False)
    w.core.handshake_completed(1170)
    w.sender.send(b"a")
    w.sender.send(b"b", mode=Mode.UNORDERED)
    w.sender.send(b"c", mode=Mode.UNRELIABLE)
    w.flush()
    for octets in (w.octets[2], w.octets[6], w.datagrams[0]):
        assert [type(frame) for frame in frames_of(octets)] == [Version, Message]
    w.sender.send(b"d")
    w.give(0, VERSION, ConnectionControl())
    w.sender.send(b"e", mode=Mode.UNORDERED)
    w.sender.send(b"f", mode=Mode.UNRELIABLE)
    w.flush()
    assert [type(frame) for frame in frames_of(w.octets[2])] == [Version, Message, Message]
    for octets in (w.octets[10], w.datagrams[1]):
        assert [type(frame) for frame in frames_of(octets)] == [Message]


@pytest.mark.rule("E-14", "AQ-16")
@pytest.mark.parametrize("where", ["uni", "bidi", "datagram"])
def test_e14_a_client_that_cannot_have_the_answer_must_say_version(wire: Callable[..., Wire], where: str) -> None:
    """Before the server has answered, each first frame of the client's is Version."""
    for greeted in (False, True):
        w = wire(client=False, greet=False)
        w.core.handshake_completed(1170)
        if greeted:
            w.give(w.bidi(), VERSION, ConnectionControl())
        if where == "datagram":
            w.give_datagram(Message(0, 0))
        else:
            w.give(w.uni() if where == "uni" else 4, Message(0, 0) if where == "uni" else ChannelControl(1))
        assert w.broken() == "E-14"


@pytest.mark.rule("AQ-15")
@pytest.mark.parametrize("greets", [False, True])
def test_aq15_a_client_has_some_seconds_to_greet(wire: Callable[..., Wire], greets: bool) -> None:
    """They count from the handshake; the application may take any time for its answer."""
    w = wire(client=False, greet=False, config=AqueductConfig(greeting=3.0))
    assert w.core.handshake_completed(1170, now=7.0) == []
    assert w.core.next_deadline() == 10.0
    w.events += w.core.handle_timeout(9.9)
    if greets:
        w.give(0, VERSION, ConnectionControl())
        assert w.core.next_deadline() is None
        w.events += w.core.handle_timeout(99.0)
        assert w.events == [HeadersReceived(())]
    else:
        w.events += w.core.handle_timeout(10.0)
        assert w.broken() == "AQ-15"
        assert w.closed == CloseConnection(CloseCode.LIMIT, "AQ-15: no ConnectionControl within 3 s", 0.0)


@pytest.mark.rule("AQ-17")
def test_aq17_the_server_holds_what_overtakes_the_greeting(wire: Callable[..., Wire]) -> None:
    """Streams and datagrams that come first are processed, each in its order, once the server has answered."""
    w = wire(client=False, greet=False)
    w.core.handshake_completed(1170)
    w.give(2, VERSION, Message(0, 0, (), b"a"))
    w.give(2, Message(0, 1, (), b"b"), fin=True)
    w.give_datagram(VERSION, Message(0, 0, (), b"d"))
    w.give(6, VERSION, Message(0, 2, (), b"c"))
    w.reset(6, 1)
    assert w.core.is_blocked(2)
    assert w.events == []
    w.give(0, VERSION, ConnectionControl())
    w.core.accept()
    w.flush()
    assert StreamUnblocked(2) in w.events
    assert not w.core.is_blocked(2)
    assert [m.payload for m in w.receiver.mailbox] == [b"a", b"b", b"d"]
    assert (w.core.held, set(w.core.streams.table)) == (3, {0, 1})


@pytest.mark.rule("AQ-17")
def test_aq17_the_client_holds_until_the_servers_headers_are_there(wire: Callable[..., Wire]) -> None:
    """The server's control streams may overtake its ConnectionControl (D-8); a reset after them keeps its place."""
    w = wire(client=True, greet=False)
    w.core.handshake_completed(1170)
    w.give(1, ChannelControl(0))
    w.reset(1, ResetCode.LOST)
    assert w.sender.state is SenderState.UNATTACHED
    w.give(0, VERSION, ConnectionControl((("x", b"y"),)))
    assert w.core.peer_headers == (("x", b"y"),)
    assert state_of(w.sender) is SenderState.LOST


@pytest.mark.rule("AQ-17")
def test_aq17_what_is_held_is_bounded(wire: Callable[..., Wire]) -> None:
    """More than the limit before the greeting closes the connection (code 4), datagrams of little size included."""
    w = wire(client=False, greet=False, config=AqueductConfig(max_held_early=1000))
    w.core.handshake_completed(1170)
    w.give(2, VERSION, b"\x03" + bytes(972))
    assert w.closed is None
    w.give(6, VERSION, b"\x03" + bytes(100))
    assert w.broken() == "AQ-17"
    assert w.closed is not None
    assert w.closed.code == CloseCode.LIMIT
    w = wire(client=False, greet=False, config=AqueductConfig(max_held_early=1000))
    for _ in range(16):
        w.give_datagram(VERSION, Message(0, 0))
    assert w.broken() == "AQ-17"


@pytest.mark.rule("AQ-17")
@pytest.mark.parametrize("where", ["stream", "datagram", "stalled"])
def test_aq17_what_was_held_may_be_wrong(wire: Callable[..., Wire], where: str) -> None:
    """It is judged when it is processed, like anything else."""
    w = wire(client=False, greet=where == "stalled", config=AqueductConfig(mailbox=1))
    wrong = Message(1, 0).encode()
    if where == "stalled":
        w.give(2, Message(0, 0), Message(0, 1), wrong)
        assert w.closed is None
        w.receiver.take()
        w.receiver.take()
    else:
        w.core.handshake_completed(1170)
        if where == "stream":
            w.give(2, VERSION, wrong)
        else:
            w.give_datagram(VERSION, wrong)
        w.give(0, VERSION, ConnectionControl())
        assert w.closed is None
        w.core.accept()
    assert w.broken() == "E-18"


@pytest.mark.rule("E-12")
@pytest.mark.parametrize("stream", [0, 4])
def test_e12_connection_control_twice(wire: Callable[..., Wire], stream: int) -> None:
    """Each side says it once, on this stream or another."""
    w = wire(client=False)
    w.give(stream, *([VERSION] if stream else []), ConnectionControl())
    assert w.broken() == "E-12"


@pytest.mark.rule("E-13", "AQ-15")
@pytest.mark.parametrize("client", [True, False])
@pytest.mark.parametrize("end", ["fin", "reset", "stop"])
def test_e13_the_connection_control_stream_lives_as_long_as_the_connection(
    wire: Callable[..., Wire], client: bool, end: str
) -> None:
    """Its end, whichever way, is a protocol error on both sides."""
    w = wire(client=client)
    match end:
        case "fin":
            w.give(0, fin=True)
        case "reset":
            w.reset(0, 1)
        case _:
            w.stop(0)
    assert w.broken() == "E-13"


@pytest.mark.rule("AQ-19")
def test_aq19_close_codes_and_what_the_halves_say(wire: Callable[..., Wire]) -> None:
    """Closing ends every half as connection lost; what was in a mailbox stays there; nothing else is written."""
    w = wire(client=False)
    w.give(w.uni(), Message(0, 0, (1,), b"x"))
    message = w.receiver.take()
    sender = message.attachments[0]
    sender.send(b"y", token="y")  # type: ignore[union-attr]
    w.give(2, Message(0, 1, (), b"z"))
    w.events.clear()
    events = w.core.close(CloseCode.APPLICATION, "enough", w.now)
    assert events == [
        *[e for e in events if isinstance(e, Settled | Ended)],
        ConnectionEnded(2, "enough", closed_here=True),
    ]
    assert {e.half for e in events if isinstance(e, Ended)} == {w.receiver, sender}
    assert [e.tokens for e in events if isinstance(e, Settled)] == [["y"]]
    assert (w.receiver.state, sender.state) == (ReceiverState.CONNECTION_LOST, SenderState.CONNECTION_LOST)
    assert w.receiver.take().payload == b"z"
    assert w.core.data_to_send(1.0) == [CloseConnection(2, "enough")]
    assert w.core.data_to_send(1.0) == []
    assert w.core.receive_stream_data(2, b"\xff", False, 1.0) == w.core.receive_datagram(b"", 1.0) == []
    assert w.core.stream_reset(2, 9, 1.0) == w.core.stream_stopped(2, 9, 1.0) == w.core.close(0, "", 1.0) == []
    assert w.core.handle_timeout(9.0) == []
    with pytest.raises(LocalProtocolError):
        sender.send(b"more")  # type: ignore[union-attr]
    sender.cancel()  # type: ignore[union-attr]
    w.receiver.close()


@pytest.mark.rule("AQ-19")
def test_aq19_a_lost_connection(wire: Callable[..., Wire]) -> None:
    """Cancelled and closed halves keep their own end; no output follows."""
    w = wire(client=True)
    (receiver,) = w.sender.send(b"", [Attach.SENDER])
    receiver.close()  # type: ignore[union-attr]
    w.sender.cancel()
    assert w.core.connection_lost(7, "gone", w.now)[-1] == ConnectionEnded(7, "gone")
    assert (w.sender.state, receiver.state) == (SenderState.CANCELLED, ReceiverState.CLOSED)
    assert w.core.data_to_send(0.0) == []
    assert w.core.next_deadline() is None


@pytest.mark.rule("E-15", "AQ-20")
@pytest.mark.parametrize(
    ("client", "code", "legal"),
    [(True, 1, False), (True, 2, True), (False, 1, True), (False, 2, True), (False, 3, False), (True, 0, False)],
)
def test_e15_reset_codes_of_a_control_stream(wire: Callable[..., Wire], client: bool, code: int, legal: bool) -> None:
    """A sender's direction is reset with 1 or 2, a receiver's with 2."""
    w = wire(client=client)
    if client:
        w.give(w.bidi(), ChannelControl(0))
    w.reset(1, code)
    assert w.broken() == ("none" if legal else "E-15")


@pytest.mark.rule("AQ-20")
def test_aq20_codes_of_message_streams_are_not_looked_at(wire: Callable[..., Wire]) -> None:
    """What happened to a channel is told by its control stream."""
    w = wire(client=False)
    for code in (0, 1, 2, 99):
        w.reset(w.give(w.uni(), Message(0, code)), code)
    assert w.broken() == "none"
    assert w.receiver.state is ReceiverState.OPEN


@pytest.mark.rule("AQ-20a")
def test_aq20a_a_stopped_control_direction_counts_as_ended(wire: Callable[..., Wire]) -> None:
    """Nothing else happens; the other direction tells the outcome."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    w.stop(1)
    w.sender.finish()
    w.flush()
    assert (w.octets[1], w.finished, w.resets) == (b"", set(), {})
    assert w.sender.state is SenderState.FINISHING
    w.give(1, CloseReceiver(), fin=True)
    assert state_of(w.sender) is SenderState.FINISHED
    assert 1 in w.done


@pytest.mark.rule("AQ-20a")
@pytest.mark.parametrize("mode", [Mode.ORDERED, Mode.UNORDERED])
@pytest.mark.parametrize("lives", [True, False])
def test_aq20a_a_stopped_message_stream(wire: Callable[..., Wire], mode: Mode, lives: bool) -> None:
    """Later messages keep their numbers and are not written; a receiver that lives 10 s later closes the connection."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    w.sender.send(b"a", mode=mode, token="a")
    w.flush()
    w.stop(2)
    w.sender.send(b"b", token="b")
    w.flush()
    assert w.sender.sent == 2
    assert frames_of(w.octets[2]) == [Message(0, 0, (), b"a")]
    w.wait(9.9)
    if not lives:
        w.give(1, AckReliable((1,)), CloseReceiver(), fin=True)
        assert [(e.tokens, e.delivered) for e in w.events if isinstance(e, Settled)] == [(["a"], True), (["b"], False)]
    w.wait(0.2)
    assert w.broken() == ("AQ-20a" if lives else "none")


@pytest.mark.rule("AQ-20a")
def test_aq20a_we_stop_only_what_names_no_half(pair: Callable[..., Pair]) -> None:
    """No unidirectional stream is ever stopped: it may hold messages of other channels."""
    p = pair()
    p.sender.send(b"a")
    p.run()
    p.receiver.close()
    p.run()
    assert not p.client.stops
    assert not p.server.stops
    assert p.sender.state is SenderState.RECEIVER_CLOSED


@pytest.mark.rule("AQ-21")
def test_aq21_the_server_holds_early_data_until_the_handshake_is_complete(wire: Callable[..., Wire]) -> None:
    """Before that it may be a replay: not even headers are shown (D-11)."""
    w = wire(client=False, greet=False)
    w.give(0, VERSION, ConnectionControl())
    w.give(2, VERSION, Message(0, 0, (), b"early"))
    w.give_datagram(VERSION, Message(0, 0, (), b"datagram"))
    assert (w.events, w.core.peer_headers) == ([], None)
    w.events += w.core.handshake_completed(1170)
    assert HeadersReceived(()) in w.events
    w.core.accept()
    assert [m.payload for m in w.receiver.mailbox] == [b"early", b"datagram"]


@pytest.mark.rule("AQ-21")
@pytest.mark.parametrize("accepted", [True, False])
def test_aq21_a_client_repeats_what_was_refused(accepted: bool) -> None:
    """Rejected early data goes out again on new streams, which take the place of the old ones; datagrams do not."""
    core = AqueductCore(client=True, early=True)
    core.datagram_limit = 1200
    sender = core.entrypoint
    assert sender is not None
    sender.send(b"ordered")  # type: ignore[union-attr]
    sender.send(b"own", mode=Mode.UNORDERED)  # type: ignore[union-attr]
    sender.send(b"datagram", mode=Mode.UNRELIABLE)  # type: ignore[union-attr]
    first = {out.stream_id: out for out in core.data_to_send(0.0) if isinstance(out, StreamData)}
    assert set(first) == {0, 2, 6}
    core.handshake_completed(1170, early_data_accepted=accepted)
    sender.send(b"later")  # type: ignore[union-attr]
    outputs = core.data_to_send(0.0)
    second = {out.stream_id: out for out in outputs if isinstance(out, StreamData)}
    later = Message(0, 2, (), b"later").encode()
    assert {out.stream_id for out in outputs if isinstance(out, StreamDone)} == (set() if accepted else first.keys())
    sender.send(b"own", mode=Mode.UNORDERED)  # type: ignore[union-attr]
    core.data_to_send(0.0)
    assert not any(stream.early for stream in core.streams.table.values()), "nothing is kept for another time"
    if accepted:
        assert second == {2: StreamData(2, later, fin=False)}
        return
    assert second == {
        4: StreamData(4, first[0].data, fin=False),
        10: StreamData(10, bytes(first[2].data) + later, fin=False),
        14: StreamData(14, first[6].data, fin=True),
    }
    core.receive_stream_data(4, VERSION + ConnectionControl().encode(), False, 0.0)
    assert core.state is ConnectionState.OPEN
    core.receive_stream_data(1, ChannelControl(0).encode() + AckReliable((3,)).encode(), False, 0.0)
    assert sender.unsettled == 2, "the last one, and the datagram"  # type: ignore[union-attr]


@pytest.mark.rule("AQ-22")
def test_aq22_what_does_not_fit_a_datagram_goes_by_stream(wire: Callable[..., Wire]) -> None:
    """The number space is that of the way taken, and Version counts while it is needed."""
    w = wire(client=True, greet=False)
    w.core.handshake_completed(1170)
    overhead = len(Message(0, 0, (), bytes(1130)).encode()) - 1130
    w.sender.send(bytes(1170 - 28 - overhead), mode=Mode.UNRELIABLE)
    w.sender.send(bytes(1170 - 28 - overhead + 1), mode=Mode.UNRELIABLE)
    w.flush()
    assert [len(d) for d in w.datagrams] == [1170]
    assert (w.sender.sent, w.sender.sent_unreliable) == (1, 1)
    assert 2 in w.finished
    w.give(0, VERSION, ConnectionControl())
    w.sender.send(bytes(1170 - overhead), mode=Mode.UNRELIABLE)
    w.flush()
    assert [len(d) for d in w.datagrams] == [1170, 1170]
    w.core.datagram_limit = 100
    w.sender.send(bytes(101), mode=Mode.UNRELIABLE)
    assert (w.sender.sent, w.sender.sent_unreliable) == (2, 2)


def test_connection_states() -> None:
    for (state, what), after in CONNECTION.items():
        assert state is not ConnectionState.CLOSED
        assert (what is ConnectionInput.CLOSED) == (after is ConnectionState.CLOSED)


@pytest.mark.rule("AQ-15")
def test_aq15_late_frames_of_a_stranger(wire: Callable[..., Wire]) -> None:
    """The control stream of a channel carries on while others come and go."""
    w = wire(client=False)
    w.give(1, SentUnreliable(0), FinishSender(0), fin=True)
    assert w.receiver.state is ReceiverState.FINISHED
    assert w.sent(1) == [ChannelControl(0), CloseReceiver()]
    assert 1 in w.done
