"""Where frames may occur, against a grammar written by hand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from levada.transports.aqueduct.frames import (
    VERSION,
    AckReliable,
    ChannelControl,
    ClosedChannelLost,
    ConnectionControl,
    FinishSender,
    FrameType,
    Message,
    SentUnreliable,
)
from levada.transports.aqueduct.state import ENDS, PLACES, StreamPosition

from .conftest import Wire
from .test_frames import VECTORS

LETTERS = {
    "V": FrameType.VERSION,
    "C": FrameType.CONNECTION_CONTROL,
    "H": FrameType.CHANNEL_CONTROL,
    "M": FrameType.MESSAGE,
    "U": FrameType.SENT_UNRELIABLE,
    "A": FrameType.ACK_RELIABLE,
    "N": FrameType.ACK_NACK_UNRELIABLE,
    "F": FrameType.FINISH_SENDER,
    "R": FrameType.CLOSE_RECEIVER,
    "L": FrameType.CLOSED_CHANNEL_LOST,
}
GRAMMAR = {
    StreamPosition.UNI: "V|V?M+|V?L",
    StreamPosition.DATAGRAM: "V|V?M+",
    StreamPosition.ANSWER: None,
    StreamPosition.SENDER: "V?U*F",
    StreamPosition.RECEIVER: "V?[AN]*R",
}


@pytest.mark.rule("AQ-10", "AQ-11", "AQ-13")
@pytest.mark.parametrize(("start", "grammar"), [(k, g) for k, g in GRAMMAR.items() if g], ids=lambda v: str(v))
def test_aq10_the_table_is_the_grammar(start: StreamPosition, grammar: str) -> None:
    """What may be on a stream or in a datagram is exactly this, and it may end exactly here."""
    for length in range(5):
        for word in itertools.product(LETTERS, repeat=length):
            place: StreamPosition | None = start
            for letter in word:
                place = PLACES.get((place, LETTERS[letter])) if place else None
            accepted = place is not None and ENDS[place] is None
            assert accepted == bool(re.fullmatch(grammar, "".join(word))), word


@pytest.mark.rule("AQ-10")
def test_aq10_bidirectional_streams() -> None:
    """The first frame, other than Version, of an opener's direction says what the stream is; only a client's may be the connection's."""
    for start, after, connection in (
        (StreamPosition.CLIENT_BIDI, StreamPosition.CLIENT_BIDI_VERSION, True),
        (StreamPosition.SERVER_BIDI, StreamPosition.SERVER_BIDI_VERSION, False),
    ):
        first = {kind: PLACES.get((start, kind)) for kind in FrameType}
        second = {kind: PLACES.get((after, kind)) for kind in FrameType}
        assert {k for k, v in first.items() if v} == {FrameType.VERSION, FrameType.CHANNEL_CONTROL}
        wanted = {FrameType.CHANNEL_CONTROL} | ({FrameType.CONNECTION_CONTROL} if connection else set())
        assert {k for k, v in second.items() if v} == wanted
    assert not [
        key
        for key in PLACES
        if key[0]
        in (StreamPosition.CONNECTION, StreamPosition.SENDER_DONE, StreamPosition.RECEIVER_DONE, StreamPosition.ALONE)
    ]


@pytest.mark.rule("E-8", "E-12", "E-16", "E-17", "E-18", "E-19", "E-23", "E-25")
@pytest.mark.parametrize("vector", VECTORS["places"], ids=lambda v: v["name"])
def test_e8_frames_out_of_place(wire: Callable[..., Wire], vector: dict[str, Any]) -> None:
    """A frame in the wrong place closes the connection; the same octets up to it do not."""
    steps = vector["steps"]
    w = wire(client=steps[0]["by"] == "server", greet=False)
    w.core.handshake_completed(1170)
    w.flush()
    for step in steps:
        assert w.closed is None
        w.give(step["stream"], bytes.fromhex(step["hex"]))
        if w.core.state.value == "offered":
            w.core.accept()
    assert w.broken() == vector["rule"]


CONTROL = [ChannelControl(0)]
OUT_OF_PLACE: list[tuple[str, str, list[Any]]] = [
    ("server's channel control twice", "client bidi", [ChannelControl(0), ChannelControl(0)]),
    ("FinishSender by a receiver", "client bidi", [ChannelControl(0), FinishSender(0)]),
    ("message on a control stream", "client bidi", [ChannelControl(0), Message(0, 0)]),
    ("Version later", "client bidi", [ChannelControl(0), VERSION]),
    ("ConnectionControl of the server elsewhere", "client bidi", [VERSION, ConnectionControl()]),
    ("ack without ChannelControl", "client bidi", [AckReliable((1,))]),
    ("ConnectionControl on a unidirectional stream", "client uni", [VERSION, ConnectionControl()]),
    ("ChannelControl on a unidirectional stream", "client uni", [ChannelControl(0)]),
    ("SentUnreliable on a unidirectional stream", "client uni", [SentUnreliable(1)]),
    ("ClosedChannelLost after a message", "server uni", [Message(0, 0), ClosedChannelLost(8)]),
    ("message after ClosedChannelLost", "server uni", [ClosedChannelLost(8), Message(0, 0)]),
    ("Version twice", "server uni", [VERSION, VERSION]),
    ("ConnectionControl first", "server bidi", [ConnectionControl()]),
    ("anything on the connection control stream", "server 0", [ChannelControl(0)]),
]


@pytest.mark.rule("E-8")
@pytest.mark.parametrize(("name", "where", "frames"), OUT_OF_PLACE, ids=[row[0] for row in OUT_OF_PLACE])
def test_e8_more_frames_out_of_place(wire: Callable[..., Wire], name: str, where: str, frames: list[Any]) -> None:
    """Each kind of frame in a place of another."""
    side, _, stream = where.partition(" ")
    w = wire(client=side == "client")
    w.give(w.uni() if stream == "uni" else w.bidi() if stream == "bidi" else 0, *frames)
    assert w.broken() == "E-8"


@pytest.mark.rule("E-8")
def test_e8_closed_channel_lost_in_a_datagram(wire: Callable[..., Wire]) -> None:
    """A datagram holds messages only."""
    w = wire(client=False)
    w.give_datagram(ClosedChannelLost(8))
    assert w.broken() == "E-8"


@pytest.mark.rule("E-8")
def test_e8_a_frame_after_close_receiver(wire: Callable[..., Wire]) -> None:
    """CloseReceiver is the last frame, though the sender is gone by then."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0), b"\x08\x00")
    assert w.closed is None
    w.give(1, b"\x08\x00")
    assert w.broken() == "E-8"


@pytest.mark.rule("AQ-10")
def test_aq10_version_alone_says_nothing(wire: Callable[..., Wire]) -> None:
    """A Version with nothing after it is a whole stream, or datagram."""
    w = wire(client=False)
    w.give(w.uni(), VERSION, fin=True)
    w.give_datagram(VERSION)
    assert w.broken() == "none"


@pytest.mark.rule("E-9", "AQ-11")
@pytest.mark.parametrize("octets", ["", "ef", "03", "0300000005"], ids=["no frame", "Version", "type only", "payload"])
def test_e9_a_stream_or_datagram_that_ends_inside_a_frame(wire: Callable[..., Wire], octets: str) -> None:
    """FIN, or the end of a datagram, inside a frame or without any."""
    w = wire(client=False)
    w.give(w.uni(), bytes.fromhex(octets), fin=True)
    assert w.broken() == "E-9"
    w = wire(client=False)
    w.give_datagram(bytes.fromhex(octets))
    assert w.broken() == "E-9"


@pytest.mark.rule("E-10", "AQ-13")
@pytest.mark.parametrize(
    ("client", "frames"), [(True, [ChannelControl(0)]), (True, [ChannelControl(0), AckReliable(())])]
)
def test_e10_a_control_direction_ends_early(wire: Callable[..., Wire], client: bool, frames: list[Any]) -> None:
    """FIN without the last frame would leave the other half waiting forever."""
    w = wire(client=client)
    w.give(w.bidi(), *frames, fin=True)
    assert w.broken() == "E-10"


@pytest.mark.rule("E-10")
def test_e10_the_senders_direction_ends_early(wire: Callable[..., Wire]) -> None:
    """The same for a sender, whose direction is the answer on the receiver's stream."""
    w = wire(client=False)
    w.give(1, SentUnreliable(0), fin=True)
    assert w.broken() == "E-10"


@pytest.mark.rule("AQ-11")
def test_aq11_a_reset_stream_drops_the_partial_frame(wire: Callable[..., Wire]) -> None:
    """The octets of a cut frame are forgotten with their stream; whole frames before it count."""
    w = wire(client=False)
    stream = w.give(w.uni(), Message(0, 0, (), b"whole"), b"\x03\x00\x01\x00\x09cut")
    w.reset(stream, 77)
    assert [m.payload for m in w.receiver.mailbox] == [b"whole"]
    assert w.core.held == 5
    assert w.broken() == "none"


@pytest.mark.rule("AQ-12")
def test_aq12_frames_of_one_stream_are_processed_in_order(wire: Callable[..., Wire]) -> None:
    """Cut at any octet, the messages of a stream come in their order, with those of another between them."""
    data = b"".join(Message(0, n, (), bytes((n,))).encode() for n in (0, 1, 2))
    for cut in range(len(data) + 1):
        w = wire(client=False)
        one, other = w.uni(), w.uni()
        w.give(one, data[:cut])
        w.give(other, Message(0, 3, (), b"\x03"), fin=True)
        w.give(one, data[cut:], fin=True)
        payloads = [m.payload[0] for m in w.receiver.mailbox]
        assert sorted(payloads) == [0, 1, 2, 3]
        assert [p for p in payloads if p != 3] == [0, 1, 2]
