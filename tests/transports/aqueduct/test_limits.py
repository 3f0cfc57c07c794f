"""Floods of every kind: memory stays bounded, the connection that floods is closed with code 4, and nothing is kept of what is over."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.aqueduct import (
    AqueductConfig,
    Attach,
    CloseCode,
    Delivery,
    Mode,
    OpenStream,
    ReceiverHalf,
    SenderHalf,
    SenderState,
    StreamData,
    Writable,
)
from levada.transports.aqueduct.frames import (
    VERSION,
    AckReliable,
    ChannelControl,
    CloseReceiver,
    FinishSender,
    Message,
    SentUnreliable,
    encode_int,
)
from levada.transports.aqueduct.streams import AqueductStream
from levada.transports.aqueduct.timers import NackDue

from .conftest import Pair, Wire


def limited(w: Wire) -> str:
    """The limit for which the core has closed the connection."""
    rule = w.broken()
    assert w.closed is None or w.closed.code == CloseCode.LIMIT
    return rule


@pytest.mark.rule("AQ-19", "AQ-24")
@pytest.mark.parametrize("how", ["messages", "senders", "receivers"])
def test_aq19_a_flood_of_channels(wire: Callable[..., Wire], how: str) -> None:
    """Channels that the peer makes us create are counted, whichever way it does."""
    w = wire(client=False, config=AqueductConfig(max_channels=50))
    index = 0
    for index in range(60):
        if w.closed is not None:
            break
        match how:
            case "messages":
                w.give(w.uni(), Message((index + 1) << 3, 0), fin=True)
            case "senders":
                w.give(w.uni(), Message(0, index, (index << 3 | 1,)), fin=True)
            case _:
                w.give(w.uni(), Message(0, index, ((index + 1) << 3,)), fin=True)
    assert limited(w) == "AQ-19"
    assert index == 50


@pytest.mark.rule("AQ-30")
def test_aq30_unclaimed_mailboxes_are_counted(wire: Callable[..., Wire]) -> None:
    """A peer that never sends the attaching messages cannot fill the memory either."""
    w = wire(client=False, config=AqueductConfig(max_channels=20))
    for index in range(1, 30):
        if w.closed is not None:
            break
        w.give(w.uni(), Message(index << 3, 0), fin=True)
        w.give(1 + 4 * index, FinishSender(1), fin=True)
    assert limited(w) == "AQ-19"
    assert w.core.unclaimed == {}


def test_attachments_that_nobody_takes_are_counted(wire: Callable[..., Wire]) -> None:
    w = wire(client=False, config=AqueductConfig(max_channels=100))
    w.give(w.uni(), Message(0, 0, tuple(index << 3 | 1 for index in range(1000))))
    assert limited(w) == "AQ-19"


@pytest.mark.rule("AQ-3")
@pytest.mark.parametrize("octets", [b"\x03\x00\x00\x00" + encode_int(2**60), b"\x03\x00\x00" + encode_int(2**60)])
def test_aq3_giant_lengths(wire: Callable[..., Wire], octets: bytes) -> None:
    """Refused when the length is known; nothing of that size is waited for."""
    w = wire(client=False)
    w.give(2, octets)
    assert limited(w) == "AQ-3"


@pytest.mark.rule("AQ-3")
@pytest.mark.parametrize("size", [2**16 + 1, 2**50])
def test_aq3_endless_headers(wire: Callable[..., Wire], size: int) -> None:
    """Header data has a limit of its own."""
    w = wire(client=False, greet=False)
    w.core.handshake_completed(1170)
    w.give(0, VERSION, b"\x01" + encode_int(size))
    assert limited(w) == "AQ-3"


@pytest.mark.rule("AQ-40")
def test_aq40_many_half_messages(wire: Callable[..., Wire]) -> None:
    """Each stream holds little, all of them together too much."""
    w = wire(client=False, config=AqueductConfig(max_held=100_000))
    for _ in range(200):
        if w.closed is not None:
            break
        w.give(w.uni(), b"\x03\x00\x00\x00" + encode_int(2**20) + bytes(1000))
    assert limited(w) == "AQ-40"


def test_a_large_message_in_small_pieces_is_read_once(wire: Callable[..., Wire]) -> None:
    """64 KiB octet by octet: with one attempt for each piece it would take minutes."""
    w = wire(client=False)
    data = Message(0, 0, (), bytes(65536)).encode()
    for octet in range(len(data)):
        w.core.receive_stream_data(2, data[octet : octet + 1], False, w.now)
    assert len(w.receiver.take().payload) == 65536
    assert w.core.held == 0


@pytest.mark.rule("AQ-28")
def test_aq28_holes_in_the_numbers_are_bounded(wire: Callable[..., Wire]) -> None:
    """A peer that leaves out numbers makes us remember each hole."""
    w = wire(client=False, config=AqueductConfig(max_ranges=100))
    index = 0
    for index in range(200):
        if w.closed is not None:
            break
        w.give(w.uni(), Message(0, 2 * index + 1), fin=True)
        if w.receiver.mailbox:
            w.receiver.take()
    assert limited(w) == "AQ-28"
    assert index == 101


@pytest.mark.rule("AQ-31")
def test_aq31_holes_in_the_record_are_bounded(wire: Callable[..., Wire]) -> None:
    """A peer that leaves out ids as well."""
    w = wire(client=False, config=AqueductConfig(max_ranges=50))
    for index in range(1, 100):
        if w.closed is not None:
            break
        w.give(w.uni(), Message(0, index - 1, (index << 4,)), fin=True)
        w.receiver.take()
        w.give(1 + 4 * index, FinishSender(0), fin=True)
    assert limited(w) == "AQ-31"


def test_datagrams_that_nobody_declares_are_bounded(wire: Callable[..., Wire]) -> None:
    w = wire(client=False, config=AqueductConfig(max_ranges=100))
    for index in range(300):
        w.give_datagram(Message(0, 2 * index + 1))
        if w.receiver.mailbox:
            w.receiver.take()
    assert w.closed is None
    assert len(w.receiver._arrived or ()) == 100


@pytest.mark.ci
@pytest.mark.rule("I-13")
def test_i13_finished_channels_leave_nothing(pair: Callable[..., Pair]) -> None:
    """After hundreds of channels there is what there was after a few: no halves, links, records or timers of those that are over."""
    p = pair()

    def objects() -> Counter[str]:
        gc.collect()
        kinds = (SenderHalf, ReceiverHalf, AqueductStream, Delivery, NackDue)
        return Counter(type(o).__name__ for o in gc.get_objects() if issubclass(type(o), kinds))

    def channels(count: int) -> None:
        for _ in range(count):
            attached = p.sender.send(b"", [Attach.RECEIVER, Attach.SENDER, Attach.ONESHOT_SENDER])
            p.run()
            remote = p.receiver.take().attachments
            for sender, receiver in ((attached[0], remote[0]), (remote[1], attached[1]), (remote[2], attached[2])):
                assert isinstance(sender, SenderHalf)
                assert isinstance(receiver, ReceiverHalf)
                sender.send(b"x", mode=Mode.UNORDERED)
                sender.finish()
                p.run()
                assert receiver.take().payload == b"x"
            p.wait(0.1)
        for side in p.sides:
            side.events.clear()

    others = objects()  # of earlier tests
    channels(3)
    p.wait(3)
    before = objects()
    channels(200)
    p.wait(3)
    assert objects() == before
    assert sum((before - others).values()) < 10
    for side in p.sides:
        assert all(len(numbers) <= 1 for numbers in side.core._gone.values())
        assert not any(map(len, side.core._unhanded.values()))
        assert side.core.next_deadline() is None
    assert p.sender.state is SenderState.OPEN


def test_next_deadline_is_none_when_nothing_is_due(wire: Callable[..., Wire]) -> None:
    w = wire(client=False)
    assert w.core.next_deadline() is None
    w.give(1, SentUnreliable(1))
    w.give(w.uni(), Message(0, 0))
    assert w.core.next_deadline() == 0.025
    w.wait(5)
    assert w.core.next_deadline() is None


@pytest.mark.rule("AQ-3")
def test_aq3_the_settings_say_how_large_the_ranges_of_a_frame_are(wire: Callable[..., Wire]) -> None:
    """Four bytes are taken, and five close the connection."""
    w = wire(client=True, config=AqueductConfig(max_control=4))
    [sender] = [half for half in w.sender.send(b"", [Attach.RECEIVER]) if isinstance(half, SenderHalf)]
    for _ in range(9):
        sender.send(b"")
    w.flush()
    control = w.bidi()
    w.give(control, ChannelControl(sender.id), AckReliable((1, 1, 1, 1)))
    assert w.closed is None
    w.give(control, AckReliable((1, 1, 1, 1, 1)))
    assert limited(w) == "AQ-3"


@pytest.mark.rule("AQ-40")
def test_aq40_all_senders_together_are_bounded(wire: Callable[..., Wire]) -> None:
    """Above `max_unacked` each sender has one message under way; when enough was acked, those that wait are told."""
    w = wire(client=True, config=AqueductConfig(max_unacked=1000))
    w.give(w.bidi(), ChannelControl(0))
    senders = [half for half in w.sender.send(b"", [Attach.RECEIVER] * 3) if isinstance(half, SenderHalf)]
    for sender in senders[:2]:
        sender.send(bytes(400))
    assert senders[0].has_room()
    senders[0].send(bytes(400))
    assert w.core.unacked == 1200
    assert not senders[0].has_room()
    assert not senders[1].has_room()
    with pytest.raises(LocalProtocolError, match="window"):
        senders[1].send(b"")
    assert senders[2].has_room(), "it has nothing under way, so that no channel can stop another for good"
    senders[2].send(bytes(100))
    assert not senders[2].has_room()
    w.flush()
    w.events.clear()
    first = w.give(w.bidi(), ChannelControl(senders[0].id), AckReliable((1,)))
    assert w.core.unacked == 900
    assert [event.half for event in w.events if isinstance(event, Writable)] == senders[:1]
    w.give(first, AckReliable((1,)))
    assert w.core.unacked == 500
    # The others are told when a quarter is free, in the order in which they asked.
    assert [event.half for event in w.events if isinstance(event, Writable)] == senders
    assert w.core.crowded == {}
    for sender in senders:
        sender.cancel()
        if sender is senders[0]:
            w.give(first, CloseReceiver())
        else:
            w.give(w.bidi(), ChannelControl(sender.id), CloseReceiver())
    assert w.core.unacked == 0


@pytest.mark.rule("AQ-40")
def test_aq40_what_fills_the_bound_of_all_senders_exactly_is_the_last(wire: Callable[..., Wire]) -> None:
    """A sender with messages under way has room up to one byte below it."""
    w = wire(client=True, config=AqueductConfig(max_unacked=1000))
    w.give(w.bidi(), ChannelControl(0))
    first, second = (half for half in w.sender.send(b"", [Attach.RECEIVER] * 2) if isinstance(half, SenderHalf))
    first.send(bytes(600))
    second.send(bytes(399))
    assert (w.core.unacked, first.has_room()) == (999, True)
    second.send(b"x")
    assert (w.core.unacked, first.has_room()) == (1000, False)


@pytest.mark.rule("AQ-40")
def test_aq40_all_mailboxes_together_are_bounded(wire: Callable[..., Wire]) -> None:
    """Above `max_untaken` a channel takes one message at a time; the rest stays unread and unacked, and the connection lives."""
    w = wire(client=False, config=AqueductConfig(max_untaken=1000))
    streams = {index: w.uni() for index in range(1, 11)}
    for number in range(3):
        for index, stream in streams.items():
            w.give(stream, Message(index << 3, number, (), bytes(200)))
    boxes = {index: w.core.halves[index << 3] for index in streams}
    assert w.closed is None
    assert [len(box.mailbox) for box in boxes.values() if isinstance(box, ReceiverHalf)] == [1] * 10
    assert all(w.core.is_blocked(stream) for stream in streams.values())
    for _ in range(3):  # taking one makes room for the next
        for box in boxes.values():
            assert isinstance(box, ReceiverHalf)
            assert len(box.take().payload) == 200
    assert not any(w.core.is_blocked(stream) for stream in streams.values())
    assert w.core.held == 0


@pytest.mark.rule("AQ-40")
def test_aq40_what_is_taken_and_not_read_still_counts(wire: Callable[..., Wire]) -> None:
    """An owner with a queue of its own keeps the window closed until the application has the message."""
    w = wire(client=False, config=AqueductConfig(mailbox_bytes=500))
    stream = w.uni()
    for number in range(6):
        w.give(stream, Message(0, number, (), bytes(200)))
    taken = []
    while w.receiver.mailbox:
        taken.append(w.receiver.take(release=False))
    assert (len(taken), w.core.held, w.core.is_blocked(stream)) == (3, 3 * 200 + 3 * 206, True)
    assert [message.release() for message in taken] == [True, True, True]
    assert not taken[0].release(), "once more does nothing"
    assert len(w.receiver.mailbox) == 3
    while w.receiver.mailbox:
        w.receiver.take()
    assert w.core.held == w.receiver.untaken == 0
    w.give(stream, Message(0, 6, (), bytes(200)))
    last = w.receiver.take(release=False)
    assert w.core.held == w.receiver.untaken == 200
    assert not last.release(), "nothing waits to be read"
    assert w.core.held == w.receiver.untaken == 0
    w = wire(client=False, config=AqueductConfig(mailbox=2))
    stream = w.uni()
    for number in range(5):
        w.give(stream, Message(0, number))
    assert w.core.is_blocked(stream), "by the number of messages"
    assert [w.receiver.take(release=False).payload for _ in range(5)] == [b""] * 5
    assert not w.core.is_blocked(stream)
    assert w.core.held == w.receiver.untaken == 0


@pytest.mark.ci
@pytest.mark.rule("AQ-35", "AQ-37")
def test_aq35_aq37_very_many_channels_are_served_in_pieces(pair: Callable[..., Pair]) -> None:
    """Acks and declarations of a thousand channels that are due at once take several calls, and none is forgotten."""
    p = pair()
    senders = [half for half in p.sender.send(b"", [Attach.RECEIVER] * 1000) if isinstance(half, SenderHalf)]
    p.run()
    p.receiver.take()
    for sender in senders:
        sender.send(b"x")
        sender.send(b"y", mode=Mode.UNRELIABLE)
    p.run()
    p.now += 0.06
    p.client.core.handle_timeout(p.now)
    assert p.client.core.next_deadline() == pytest.approx(0.05), "it has passed: the rest is still due"
    assert sum(sender.declaring for sender in senders) == 1000 - 256
    p.server.core.handle_timeout(p.now)  # half of the delay
    p.now += 0.03
    calls = 0
    while (at := p.server.core.next_deadline()) is not None and at <= p.now:
        p.server.core.handle_timeout(p.now)
        calls += 1
    assert calls >= 4
    p.wait(3)
    assert all(sender.unsettled == 0 for sender in senders)


def test_output_is_taken_in_pieces(pair: Callable[..., Pair]) -> None:
    """About as much as is asked for, in an order that works; less only if nothing is left."""
    p = pair()
    for _ in range(100):
        p.sender.send(b"x", mode=Mode.UNORDERED)
        p.sender.send(b"y", mode=Mode.UNRELIABLE)
    sizes = []
    kinds: Counter[str] = Counter()
    opened: set[int] = set()
    while True:
        out = p.client.core.data_to_send(0.0, 20)
        for output in out:
            kinds[type(output).__name__] += 1
            if isinstance(output, OpenStream):
                opened.add(output.stream_id)
            elif isinstance(output, StreamData):
                assert output.stream_id in opened
        sizes.append(len(out))
        if len(out) < 20:
            break
    assert kinds == {"OpenStream": 100, "StreamData": 100, "DatagramData": 100}
    assert max(sizes) <= 41
