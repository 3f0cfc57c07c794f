"""The end of a connection: QX-36 to QX-38, and draining."""

from __future__ import annotations

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.qmux import Ended, QmuxCore, StreamData, StreamOver, TransportError, error_name
from levada.transports.qmux.frames import Frame, FrameType, encode_close, encode_frame

from .conftest import Pair, Wire, stream


@pytest.mark.rule("QX-36")
def test_qx36_a_close_drops_the_queue_and_is_the_last_record() -> None:
    """Streams, datagrams, answers and limits."""
    wire = Wire(client=True, stream_window=10)
    stream_id = wire.core.open_stream()
    assert stream_id is not None
    wire.core.send(stream_id, bytes(100_000))
    wire.core.data_to_send(0.0, 1)
    wire.core.send_datagram(b"x")
    wire.give("f48c67529ef8c7bd01")
    assert wire.core.close(42, "so long", 0.0) == [Ended(42, "so long", False, False)]
    assert wire.take().hex() == "0a1d2a07736f206c6f6e67"
    assert not wire.core.has_output
    assert wire.core.close(1, "again", 0.0) == []
    assert wire.take() == b""
    assert wire.core.queued == 0


@pytest.mark.rule("QX-36")
def test_qx36_fail_names_the_broken_rule() -> None:
    """For what the owner checks: a text message on a WebSocket."""
    wire = Wire()
    (end,) = wire.core.fail(TransportError.PROTOCOL_VIOLATION, "a text message", 0.0)
    assert end == Ended(10, "PROTOCOL_VIOLATION: a text message", False, True)
    assert wire.frames() == [Frame(FrameType.TRANSPORT_CLOSE, (10, 0), b"a text message")]
    assert wire.core.fail(TransportError.PROTOCOL_VIOLATION, "again", 0.0) == []


@pytest.mark.rule("QX-36")
@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (stream(0, 1, b"x"), 0x0E),
        (encode_frame(FrameType.PING_ANSWER, 9), FrameType.PING_ANSWER),
        (b"\x01", 0x01),
        (b"\x40\x08\x00", 0),
        (encode_frame(FrameType.STOP_SENDING, 2, 0), 0x05),
    ],
)
def test_qx36_the_close_names_the_frame_at_fault(frame: bytes, kind: int) -> None:
    """0 if there is none."""
    wire = Wire()
    wire.give("00", frame)
    (close,) = wire.frames()
    assert close.fields[1] == kind


@pytest.mark.rule("QX-37", "QX-38")
@pytest.mark.parametrize(
    ("close", "event"),
    [
        (encode_close(7, "done", cause=None), Ended(7, "done", True, False)),
        (encode_close(1002, "oops", cause=0), Ended(1002, "transport error 1002: oops", True, True)),
        (encode_close(7, "", cause=8), Ended(7, "FRAME_ENCODING_ERROR: ", True, True)),
        (bytes.fromhex("1d0002fffe"), Ended(0, "\ufffd\ufffd", True, False)),
        (
            encode_frame(FrameType.APPLICATION_CLOSE, (1 << 62) - 1, data=bytes(5000)),
            Ended((1 << 62) - 1, "\0" * 5000, True, False),
        ),
    ],
)
def test_qx37_the_peer_closes(close: bytes, event: Ended) -> None:
    """Nothing after it is looked at; no frame of ours follows; what came before is delivered first."""
    wire = Wire()
    wire.core.send_datagram(b"x")
    assert wire.give(stream(0, 0, b"last"), close, "01", stream(4, 0, b"x"))[1:] == [
        StreamData(0, b"last", False),
        event,
    ]
    assert wire.take() == b""
    assert wire.core.next_deadline() is None


@pytest.mark.rule("QX-37", "QX-38")
def test_qx37_an_end_without_a_close_is_a_loss() -> None:
    """Between records, inside a record, or a transport that broke."""
    wire = Wire()
    assert wire.octets(b"") == [Ended(1, "the peer ended the transport without closing", False, True)]
    wire = Wire()
    wire.octets("05 0a00")
    assert wire.octets(b"") == [Ended(1, "the peer ended the transport inside a record", False, True)]
    wire = Wire()
    wire.core.send_datagram(b"x")
    assert wire.core.connection_lost(0, "reset", 0.0) == [Ended(1, "reset", False, True)]
    assert wire.take() == b""
    assert wire.core.connection_lost(0, "", 0.0) == []
    core = QmuxCore(client=True, now=0.0)
    assert core.connection_lost(0, "", 0.0) == [Ended(1, "the transport broke", False, True)]
    assert core.data_to_send(0.0) == []
    assert Wire(peer=None).core.connection_lost(0, "", 0.0) == [Ended(1, "the transport broke", False, True)]


@pytest.mark.rule("QX-38")
def test_qx38_calls_after_the_end() -> None:
    """Nothing can be sent any more; notes of what was taken are fine."""
    wire = Wire(client=True)
    stream_id = wire.core.open_stream()
    assert stream_id is not None
    core = wire.core
    largest = core.max_datagram_size
    assert largest > 0
    core.connection_lost(0, "", 0.0)
    assert core.ended
    assert (core.open_stream(), core.stream_credit(unidirectional=False), core.max_datagram_size) == (None, 0, largest)
    for call in (lambda: core.send(stream_id, b"x"), lambda: core.send_datagram(b"")):
        with pytest.raises(LocalProtocolError):
            call()
    core.consumed(stream_id, 1)
    core.reset(stream_id, 1)
    core.stop(stream_id, 1)
    core.accepted(3)
    core.want_acked(stream_id)
    core.want_flushed(stream_id)
    core.set_priority(stream_id, 3)
    assert (core.take_events(), wire.take(), core.has_output) == ([], b"", False)


def test_a_drain_waits_for_open_streams_and_for_the_peer() -> None:
    """It opens no more, and closes with 0 when the peer has everything."""
    pair = Pair()
    client, server = pair.client, pair.server
    stream_id = client.open_stream()
    assert stream_id is not None
    client.send(stream_id, b"ask", True)
    assert client.drain(0.0) == []
    assert (client.open_stream(), client.stream_credit(unidirectional=False)) == (None, 0)
    pair.settle()
    assert not client.ended
    server.consumed(stream_id, 3)
    server.send(stream_id, b"answer", True)
    of_client, of_server = pair.settle()
    assert of_client == [StreamData(stream_id, b"answer", True)]
    client.consumed(stream_id, 6)
    of_client, of_server = pair.settle()
    assert of_client == [StreamOver(stream_id), Ended(0, "", False, False)]
    assert of_server == [Ended(0, "", True, False)]


def test_a_drain_with_nothing_open_asks_the_peer_once() -> None:
    """The answer ends it, with no further call."""
    wire = Wire(client=True)
    assert wire.core.drain(0.0) == []
    assert wire.core.has_output
    assert wire.frames() == [Frame(FrameType.PING, (1,), b"")]
    assert not wire.core.has_output
    assert wire.give(encode_frame(FrameType.PING_ANSWER, 1)) == [Ended(0, "", False, False)]
    assert wire.take().hex() == "031d0000"


def test_a_drain_takes_no_longer_than_the_settings_allow() -> None:
    wire = Wire(client=True, drain_timeout=2.0)
    assert wire.core.open_stream() == 0
    assert wire.core.drain(1.0) == []
    assert wire.core.next_deadline() == 3.0
    assert wire.core.drain(2.0) == []
    assert wire.core.next_deadline() == 3.0
    assert wire.core.handle_timeout(3.0) == [Ended(0, "", False, False)]
    assert wire.take().hex() == "031d0000"
    assert Wire(peer=None).core.drain(0.0) == [Ended(0, "", False, False)]


@pytest.mark.parametrize(("code", "name"), [(10, "PROTOCOL_VIOLATION"), (0x101, "transport error 257")])
def test_names_of_transport_errors(code: int, name: str) -> None:
    assert error_name(code) == name
