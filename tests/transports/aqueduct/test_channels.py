"""Numbers, attachments, control streams, auto-created and unclaimed receivers, the record of those that are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.aqueduct import (
    AqueductConfig,
    Attach,
    Ended,
    Mode,
    Readable,
    ReceiverHalf,
    ReceiverState,
    ResetCode,
    SenderHalf,
    SenderState,
)
from levada.transports.aqueduct.frames import (
    LARGEST,
    AckNackUnreliable,
    AckReliable,
    ChannelControl,
    ClosedChannelLost,
    CloseReceiver,
    FinishSender,
    Message,
    SentUnreliable,
)

from .conftest import Pair, Wire, frames_of


def attached_receiver(w: Wire, channel: int, number: int = 0) -> ReceiverHalf:
    """Attach a receiver to a message of the entrypoint and take it."""
    w.give(w.uni(), Message(0, number, (channel,)), fin=True)
    half = w.receiver.mailbox[-1].attachments[0]
    assert isinstance(half, ReceiverHalf)
    return half


def attached_sender(w: Wire, channel: int, number: int = 0) -> SenderHalf:
    w.give(w.uni(), Message(0, number, (channel,)), fin=True)
    half = w.receiver.mailbox[-1].attachments[0]
    assert isinstance(half, SenderHalf)
    return half


@pytest.mark.rule("AQ-28")
@pytest.mark.parametrize("first", [0, pytest.param(16_300, marks=pytest.mark.ci)])
@pytest.mark.parametrize("config", [AqueductConfig(), AqueductConfig(window=16, mailbox=100, mailbox_bytes=9_000)])
def test_messages_of_one_packet_are_received_as_if_each_had_a_packet(
    wire: Callable[..., Wire], first: int, config: AqueductConfig
) -> None:
    """Numbers and sizes of one to three bytes, another channel between, an attachment, a cut message, a full mailbox."""
    frames = [Message(0, number, (), bytes([number & 0xFF]) * (number % 7)) for number in range(first + 200)]
    frames[first + 5 : first + 5] = [Message(8, 0, (), b"beside")]
    frames[first + 60] = Message(0, first + 59, (), bytes(127))
    frames[first + 61] = Message(0, first + 60, (), bytes(128))
    frames[first + 62] = Message(0, first + 61, (), bytes(16_383))
    frames[first + 63] = Message(0, first + 62, (), bytes(16_384))
    frames[first + 90] = Message(0, first + 89, (16,), b"attached")

    def receive(pieces: Iterable[bytes]) -> tuple[object, ...]:
        w = wire(client=False, config=config)
        stream_id, taken = w.uni(), list[tuple[bytes, int]]()
        for piece in pieces:
            w.core.receive_stream_data(stream_id, piece, False, w.now)
            while w.receiver.mailbox and len(taken) < first:
                taken.append((w.receiver.take().payload, 0))
        while w.receiver.mailbox:
            message = w.receiver.take()
            taken.append((message.payload, len(message.attachments)))
        w.wait(0.1)
        return taken, list(w.core.halves), w.core.held, w.broken()

    before = [b"".join(frame.encode() for frame in frames[at : min(at + 50, first)]) for at in range(0, first, 50)]
    data = b"".join(frame.encode() for frame in frames[first:])
    whole = receive([*before, data[:-3], data[-3:]])
    assert whole == receive([*before, *(frame.encode() for frame in frames[first:])])
    assert whole[0] == [(frame.payload, len(frame.attachments)) for frame in frames if frame.channel == 0]
    assert whole[2:] == (len(b"beside"), "none")


@pytest.mark.rule("AQ-3", "E-1")
@pytest.mark.parametrize(
    ("size", "rule"), [(b"\x84\x00", "E-1"), (b"\xc8\x01", "none"), (b"\xc9\x01", "AQ-3"), (b"\xff\xff\x01", "AQ-3")]
)
def test_aq3_a_size_is_judged_also_behind_other_messages(wire: Callable[..., Wire], size: bytes, rule: str) -> None:
    """4 in two bytes, 200, 201, 32,767: a payload has 200 bytes at most here."""
    w = wire(client=False, config=AqueductConfig(max_message=200))
    w.give(2, Message(0, 0), Message(0, 1), b"\x03\x00\x02\x00" + size + bytes(200))
    assert w.broken() == rule
    assert [len(message.payload) for message in w.receiver.mailbox] == [0, 0, 200][: 3 if rule == "none" else 2]


@pytest.mark.rule("AQ-7", "E-5")
@pytest.mark.parametrize(
    "frames",
    [
        [Message(4, 0), Message(4, 1)],
        [Message(4, 1), Message(4, 0)],
    ],
)
def test_aq7_e5_a_oneshot_carries_one_message(wire: Callable[..., Wire], frames: list[Message]) -> None:
    """A second reliable message on a oneshot is a protocol error."""
    w = wire(client=False)
    w.give(w.uni(), frames[0], fin=True)
    assert w.broken() == "none"
    w.give(w.uni(), frames[1], fin=True)
    assert w.broken() == "E-5"


@pytest.mark.rule("AQ-7", "E-5")
@pytest.mark.parametrize("second", ["datagram", "declared", "finish"])
def test_e5_declared_datagrams_count(wire: Callable[..., Wire], second: str) -> None:
    """So is a datagram, or the declaration of one, after a reliable message; and a finish with two."""
    w = wire(client=False)
    w.give(w.uni(), Message(4, 0), fin=True)
    match second:
        case "datagram":
            w.give_datagram(Message(4, 0))
        case "declared":
            w.give(5, SentUnreliable(1))
        case _:
            w.give(5, FinishSender(2))
    assert w.broken() == "E-5"


@pytest.mark.rule("AQ-7")
def test_aq7_one_datagram_and_its_declaration_are_one_message(wire: Callable[..., Wire]) -> None:
    """An unreliable value is declared and finished like any other."""
    w = wire(client=False)
    w.give_datagram(Message(4, 0, (), b"value"))
    w.give(5, SentUnreliable(1), FinishSender(0), fin=True)
    assert w.broken() == "none"
    assert w.sent(5) == [ChannelControl(4), AckNackUnreliable((1,)), CloseReceiver()]


@pytest.mark.rule("AQ-7")
def test_aq7_our_oneshot_finishes_with_its_value(pair: Callable[..., Pair]) -> None:
    """The value goes reliably and the channel finishes at once; without one it finishes empty."""
    p = pair()
    p.sender.send(b"", [Attach.ONESHOT_RECEIVER, Attach.ONESHOT_RECEIVER])
    value, nothing = [half for half in p.client.core.halves.values() if half.oneshot]
    value.send(b"v", token="t")  # type: ignore[union-attr]
    with pytest.raises(LocalProtocolError):
        value.send(b"w")  # type: ignore[union-attr]
    nothing.finish()  # type: ignore[union-attr]
    p.wait(1)
    one, other = p.receiver.take().attachments
    assert [m.payload for m in one.mailbox] == [b"v"]  # type: ignore[union-attr]
    assert {one.state, other.state} == {ReceiverState.FINISHED}
    assert {value.state, nothing.state} == {SenderState.FINISHED}


@pytest.mark.rule("AQ-23")
def test_aq23_numbers_and_streams(wire: Callable[..., Wire]) -> None:
    """Streams and datagrams are numbered separately from 0; ordered messages share a stream, unordered ones have their own."""
    w = wire(client=True)
    for mode in (Mode.ORDERED, Mode.UNORDERED, Mode.UNRELIABLE, Mode.ORDERED, Mode.UNRELIABLE, Mode.UNORDERED):
        w.sender.send(mode.value.encode(), mode=mode)
    w.flush()
    assert [(f.number, f.payload) for f in w.sent(2)] == [(0, b"ordered"), (2, b"ordered")]  # type: ignore[union-attr]
    assert w.sent(6) == [Message(0, 1, (), b"unordered")]
    assert w.sent(10) == [Message(0, 3, (), b"unordered")]
    assert [frames_of(d) for d in w.datagrams] == [[Message(0, n, (), b"unreliable")] for n in (0, 1)]
    assert w.finished == {6, 10}


@pytest.mark.rule("AQ-23")
def test_aq23_delivery_is_in_order_of_processing(wire: Callable[..., Wire]) -> None:
    """Numbers never reorder."""
    w = wire(client=False)
    for number in (3, 0, 2, 1):
        w.give(w.uni(), Message(0, number, (), bytes((number,))), fin=True)
    assert [m.payload[0] for m in w.receiver.mailbox] == [3, 0, 2, 1]
    assert w.events.count(Readable(w.receiver)) == 0  # events are compared by identity
    assert [e.half for e in w.events if isinstance(e, Readable)] == [w.receiver]


@pytest.mark.rule("AQ-24")
def test_aq24_who_did_not_mint_opens_the_control_stream(wire: Callable[..., Wire]) -> None:
    """A half minted there has its control stream from birth; one minted here waits for it."""
    w = wire(client=False)
    w.give(w.uni(), Message(0, 0, (8, 1)), fin=True)
    assert w.octets[5] == ChannelControl(8).encode()
    assert w.octets[9] == ChannelControl(1).encode()
    (made,) = w.receiver.mailbox[0].attachments[1].send(b"", [Attach.SENDER])  # type: ignore[union-attr]
    w.flush()
    assert (made.state, made.control) == (ReceiverState.UNATTACHED, None)
    assert 13 not in w.octets


@pytest.mark.rule("AQ-25", "E-16", "E-17")
@pytest.mark.parametrize(("channel", "rule"), [(8, "E-17"), (1, "E-17"), (2, "E-16"), (0, "none")])
def test_aq25_e16_e17_channel_control(wire: Callable[..., Wire], channel: int, rule: str) -> None:
    """It names an id minted by its receiver, and one that was handed out."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(channel))
    assert w.broken() == rule


@pytest.mark.rule("AQ-25", "AQ-32", "AQ-57")
@pytest.mark.parametrize("gone", [True, False])
def test_aq25_aq32_a_ghost_is_told_that_it_is_lost(wire: Callable[..., Wire], gone: bool) -> None:
    """A second control stream, or one for a half that is gone, is reset and stopped with `lost`, and nothing else changes."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0), *([CloseReceiver()] if gone else []), fin=gone)
    before = w.sender.state
    ghost = w.give(w.bidi(), ChannelControl(0), AckReliable((5,)))
    assert (w.resets, w.stops) == ({ghost: ResetCode.LOST}, {ghost: ResetCode.LOST})
    w.give(ghost, b"\xff\xff")
    w.reset(ghost, ResetCode.LOST)
    assert ghost in w.done
    assert (w.sender.state, w.closed) == (before, None)


@pytest.mark.rule("AQ-25a")
def test_aq25a_a_nameless_reset_is_answered(wire: Callable[..., Wire]) -> None:
    """A bidirectional stream that is reset before it has a name: our direction is reset too, so that nothing leaks."""
    w = wire(client=True)
    for data in (b"", b"\x02", b"\x02\x80"):
        stream = w.bidi()
        if data:
            w.give(stream, data)
        w.reset(stream, 1)
        assert w.resets[stream] == ResetCode.LOST
        assert stream in w.done
    assert w.closed is None


@pytest.mark.rule("AQ-26")
def test_aq26_attachments_are_told_by_the_flow_bit(pair: Callable[..., Pair]) -> None:
    """The peer gets a sender for a channel that flows away from it, a receiver for one that flows to it, by index."""
    p = pair()
    kinds = [Attach.SENDER, Attach.RECEIVER, Attach.ONESHOT_RECEIVER, Attach.ONESHOT_SENDER, Attach.RECEIVER]
    local = p.sender.send(b"x", kinds)
    p.run()
    remote = p.receiver.take().attachments
    assert [half.id for half in remote] == [half.id for half in local]
    assert [type(half) for half in local] == [ReceiverHalf, SenderHalf, SenderHalf, ReceiverHalf, SenderHalf]
    assert [type(half) for half in remote] == [SenderHalf, ReceiverHalf, ReceiverHalf, SenderHalf, ReceiverHalf]


@pytest.mark.rule("AQ-26a")
def test_aq26a_a_message_that_is_refused_mints_nothing(wire: Callable[..., Wire]) -> None:
    """Whatever the reason, no id is used and no half is left behind."""
    w = wire(client=True, config=AqueductConfig(window=1, max_channels=3, max_message=10))
    with pytest.raises(LocalProtocolError, match="at most 10"):
        w.sender.send(bytes(11), [Attach.SENDER])
    with pytest.raises(LocalProtocolError, match="max_channels"):
        w.sender.send(b"", [Attach.SENDER] * 3)
    w.sender.send(b"")
    with pytest.raises(LocalProtocolError, match="full"):
        w.sender.send(b"", [Attach.SENDER])
    w.sender.cancel()
    with pytest.raises(LocalProtocolError, match="cancel"):
        w.sender.send(b"", [Attach.SENDER])
    assert list(w.core.halves) == [0]
    assert w.core.mint([Attach.SENDER])[0].id == 1


@pytest.mark.rule("AQ-27", "E-18", "E-19")
@pytest.mark.parametrize(
    ("frame", "rule"),
    [
        (Message(1, 0), "E-18"),
        (Message(3, 0), "E-18"),
        (Message(0, 0, (2,)), "E-19"),
        (Message(0, 0, (3,)), "E-19"),
        (Message(2, 0, (3,)), "E-19"),
        (Message(2, 0), "none"),
        (Message(10, 0, (8,)), "none"),
    ],
)
def test_aq27_e18_e19_routing(wire: Callable[..., Wire], frame: Message, rule: str) -> None:
    """A message flows to us, its attachments were minted there, and one for a receiver of ours that is gone is discarded."""
    w = wire(client=False)
    w.give(w.uni(), frame, fin=True)
    assert w.broken() == rule
    if rule == "none":
        assert list(w.core.halves) == [0]


@pytest.mark.rule("AQ-27")
def test_aq27_a_receiver_is_created_for_an_id_minted_there(wire: Callable[..., Wire]) -> None:
    """Its message has overtaken the one that attaches it, which then hands over that very receiver."""
    w = wire(client=False)
    w.give(w.uni(), Message(8, 0, (), b"first"), fin=True)
    assert w.sent(5) == [ChannelControl(8)]
    made = w.core.halves[8]
    half = attached_receiver(w, 8)
    assert half is made
    assert [m.payload for m in half.mailbox] == [b"first"]
    assert w.sent(9) == []


@pytest.mark.rule("E-20", "AQ-28")
@pytest.mark.parametrize("numbers", [(0, 0), (2, 2), (0, 1, 0), (1, 0, 1)])
def test_e20_a_reliable_number_twice(wire: Callable[..., Wire], numbers: tuple[int, ...]) -> None:
    """QUIC delivers a stream once, so a number that comes again is a mistake."""
    w = wire(client=False)
    for number in numbers:
        assert w.closed is None
        w.give(w.uni(), Message(0, number), fin=True)
    assert w.broken() == "E-20"


@pytest.mark.rule("AQ-28")
def test_aq28_a_datagram_that_was_settled_or_seen_is_ignored(wire: Callable[..., Wire]) -> None:
    """Datagrams may come twice, or after their nack."""
    w = wire(client=False)
    w.give(1, SentUnreliable(2))
    for _ in range(2):
        w.give_datagram(Message(0, 1, (), b"x"))
    w.wait(1.2)
    assert w.sent(1) == [ChannelControl(0), AckNackUnreliable((0, 1, 1))]
    for number in (0, 1):
        w.give_datagram(Message(0, number, (), b"late"))
    assert [m.payload for m in w.receiver.mailbox] == [b"x"]


@pytest.mark.rule("E-21", "AQ-28")
@pytest.mark.parametrize(
    ("frames", "message", "datagram"),
    [
        ([FinishSender(1)], Message(0, 1), False),
        ([SentUnreliable(1), FinishSender(1)], Message(0, 1), True),
        ([], Message(0, LARGEST), False),
        ([], Message(0, LARGEST), True),
    ],
)
def test_e21_numbers_beyond_the_end(
    wire: Callable[..., Wire], frames: list[FinishSender], message: Message, datagram: bool
) -> None:
    """After FinishSender there is nothing more, and 2^64-1 is never a number."""
    w = wire(client=False)
    w.give(1, *frames)
    assert w.closed is None
    if datagram:
        w.give_datagram(message)
    else:
        w.give(w.uni(), message)
    assert w.broken() == "E-21"


@pytest.mark.rule("E-21")
def test_e21_finish_declares_fewer_datagrams_than_came(wire: Callable[..., Wire]) -> None:
    """A datagram that came is one that must have been declared by then."""
    w = wire(client=False)
    w.give_datagram(Message(0, 1))
    w.give(1, SentUnreliable(1), FinishSender(0))
    assert w.broken() == "E-21"


@pytest.mark.rule("E-22", "AQ-28")
@pytest.mark.parametrize("gone", [True, False])
def test_e22_a_sender_attached_twice(wire: Callable[..., Wire], gone: bool) -> None:
    """A sender travels once, also if it is gone by then."""
    w = wire(client=False)
    attached_sender(w, 1)
    if gone:
        w.give(5, CloseReceiver(), fin=True)
        assert 1 not in w.core.halves
    w.give(w.uni(), Message(0, 1, (1,)))
    assert w.broken() == "E-22"


@pytest.mark.rule("E-23", "AQ-28")
@pytest.mark.parametrize("how", ["live", "gone", "gone, then lost", "same message", "entrypoint"])
def test_e23_a_receiver_handed_over_twice(wire: Callable[..., Wire], how: str) -> None:
    """A receiver travels once, and the entrypoint never."""
    w = wire(client=False)
    if how == "same message":
        w.give(w.uni(), Message(0, 0, (8, 8)))
    elif how == "entrypoint":
        w.give(w.uni(), Message(0, 0, (0,)))
    else:
        attached_receiver(w, 8)
        if how != "live":
            w.give(5, FinishSender(0), fin=True)
        if how == "gone, then lost":
            w.give(w.uni(), ClosedChannelLost(8), fin=True)
        w.give(w.uni(), Message(0, 1, (8,)))
    assert w.broken() == "E-23"


@pytest.mark.rule("AQ-28", "AQ-49")
def test_aq28_a_receiver_whose_loss_overtook_its_message_is_handed_over_lost(wire: Callable[..., Wire]) -> None:
    """No half and no control stream; the handle says so from the start, and only once."""
    w = wire(client=False)
    w.give(w.uni(), Message(8, 0), fin=True)
    w.give(w.uni(), ClosedChannelLost(8), fin=True)
    half = attached_receiver(w, 8)
    assert (half.state, half.ended, 8 in w.core.halves) == (ReceiverState.LOST, True, False)
    assert 9 not in w.octets
    half.close()
    w.give(w.uni(), Message(0, 1, (8,)))
    assert w.broken() == "E-23"


@pytest.mark.rule("AQ-29")
def test_aq29_messages_for_a_closed_receiver_without_control_stream(wire: Callable[..., Wire]) -> None:
    """They are dropped and not acked; CloseReceiver nacks them."""
    w = wire(client=True)
    (half,) = w.sender.send(b"", [Attach.SENDER])
    half.close()  # type: ignore[union-attr]
    w.give(w.uni(), Message(1, 0, (2,)), fin=True)
    w.give_datagram(Message(1, 0, (2,)))
    stream = w.give(w.bidi(), ChannelControl(1))
    assert w.sent(stream) == [CloseReceiver()]
    assert list(w.core.halves) == [0]


@pytest.mark.rule("AQ-30")
@pytest.mark.parametrize("how", ["finished", "cancelled"])
def test_aq30_an_unclaimed_mailbox_waits_for_its_message(wire: Callable[..., Wire], how: str) -> None:
    """A receiver that ended before it was attached keeps what it has, and how it ended."""
    w = wire(client=False)
    w.give(w.uni(), Message(8, 0, (), b"kept"), fin=True)
    if how == "finished":
        w.give(5, FinishSender(1), fin=True)
    else:
        w.reset(5, ResetCode.CANCELLED)
    assert list(w.core.halves) == [0]
    half = w.core.unclaimed[8]
    assert attached_receiver(w, 8) is half
    assert w.core.unclaimed == {}
    w.receiver.take()
    assert half.state.value == how
    assert [m.payload for m in half.mailbox] == ([b"kept"] if how == "finished" else [])


@pytest.mark.rule("AQ-30", "AQ-49")
def test_aq30_an_unclaimed_mailbox_is_dropped_when_its_message_is_lost(wire: Callable[..., Wire]) -> None:
    """ClosedChannelLost says that nobody will claim it; what is attached in it is torn down."""
    w = wire(client=False)
    w.give(w.uni(), Message(8, 0, (1,)), fin=True)
    w.give(5, FinishSender(1), fin=True)
    w.give(9, AckReliable(()))
    w.give(w.uni(), ClosedChannelLost(8), fin=True)
    assert w.core.unclaimed == {}
    assert w.resets == {9: ResetCode.LOST}
    assert list(w.core.halves) == [0]


@pytest.mark.rule("AQ-31")
def test_aq31_no_ghosts_are_made_here(wire: Callable[..., Wire]) -> None:
    """A late message for a receiver that is gone is discarded; the record takes one range for any number in order."""
    w = wire(client=False)
    for index in range(1, 200):
        w.give(w.uni(), Message(index << 3, 0), fin=True)
        w.give(1 + 4 * index, FinishSender(1), fin=True)
        w.give(w.uni(), Message(0, index - 1, (index << 3,)), fin=True)
        w.receiver.take()
    w.give(w.uni(), Message(40, 1), fin=True)
    assert list(w.core.halves) == [0]
    assert len(w.core._gone[0]) == 1


@pytest.mark.rule("AQ-33")
def test_aq33_payloads_stay_octets(pair: Callable[..., Pair]) -> None:
    """The core never looks into a payload, so one that means nothing harms nobody."""
    p = pair()
    p.sender.send(b"\xff\x00 not a message", token="t")
    p.wait(1)
    assert p.receiver.take().payload == b"\xff\x00 not a message"
    assert p.sender.unsettled == 0


@pytest.mark.rule("AQ-34", "AQ-50")
def test_aq34_what_is_not_taken_out_is_closed(pair: Callable[..., Pair]) -> None:
    """Attachments of a message that nobody looks at: receivers are closed, senders cancelled."""
    p = pair()
    sender, receiver = p.sender.send(b"", [Attach.RECEIVER, Attach.SENDER])
    p.wait(1)
    p.receiver.take().discard()
    p.wait(3)
    assert (sender.state, receiver.state) == (SenderState.RECEIVER_CLOSED, ReceiverState.CANCELLED)


def test_events_come_only_for_handles_that_the_application_has(wire: Callable[..., Wire]) -> None:
    w = wire(client=False)
    w.events.clear()
    w.give(w.uni(), Message(8, 0), fin=True)
    w.give(5, FinishSender(1), fin=True)
    assert not [e for e in w.events if isinstance(e, Readable | Ended)]
    half = attached_receiver(w, 8)
    assert w.receiver.take().attachments == (half,)
    assert (half.known, half.state, len(half.mailbox)) == (True, ReceiverState.FINISHED, 1)
