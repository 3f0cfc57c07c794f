"""Acks, nacks, declarations, and the window."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.aqueduct import AqueductConfig, Attach, CloseCode, Mode, Settled, StreamUnblocked, Writable
from levada.transports.aqueduct.frames import (
    LARGEST,
    AckNackUnreliable,
    AckReliable,
    ChannelControl,
    CloseReceiver,
    FinishSender,
    Message,
    SentUnreliable,
    encode_int,
)

from .conftest import Pair, Wire
from .test_frames import VECTORS


def sending(wire: Callable[..., Wire], reliable: int = 0, unreliable: int = 0, **options: object) -> Wire:
    """Make a client that has sent messages on its attached entrypoint; tokens are the numbers."""
    w = wire(client=True, **options)
    w.give(w.bidi(), ChannelControl(0))
    for number in range(reliable):
        w.sender.send(b"", token=number)
    for number in range(unreliable):
        w.sender.send(b"", mode=Mode.UNRELIABLE, token=number)
    w.flush()
    w.events.clear()
    return w


def settled(w: Wire) -> list[tuple[list[object], bool | None]]:
    found = [(e.tokens, e.delivered) for e in w.events if isinstance(e, Settled)]
    w.events.clear()
    return found


@pytest.mark.rule("AQ-35")
def test_aq35_acks_are_batched_and_timely(wire: Callable[..., Wire]) -> None:
    """One AckReliable for what came within the delay, from the lowest that was not acked."""
    w = wire(client=False)
    for number in (0, 1, 2):
        w.give(2, Message(0, number))
    assert w.sent(1) == [ChannelControl(0)]
    assert w.core.next_deadline() == 0.025
    w.wait(0.1)
    w.give(2, Message(0, 3))
    w.wait(0.1)
    assert w.sent(1) == [ChannelControl(0), AckReliable((3,)), AckReliable((1,))]
    assert w.core.next_deadline() is None


@pytest.mark.rule("AQ-35")
def test_aq35_holes_are_not_acked(wire: Callable[..., Wire]) -> None:
    """Each number once, whatever the order; negative runs cover holes and what was acked before."""
    w = wire(client=False)
    acks = []
    for numbers in ((0, 1, 5), (2, 6), (9, 4), (3, 7, 8)):
        for number in numbers:
            w.core.receive_stream_data(w.uni(), Message(0, number).encode(), True, w.now)
        w.flush()
        w.wait(0.1)
        acks.append(w.take_sent(1)[-1])
    assert acks == [
        AckReliable((2, 3, 1)),
        AckReliable((1, 3, 1)),
        AckReliable((0, 1, 1, 4, 1)),
        AckReliable((1, 3, 2)),
    ]


@pytest.mark.rule("AQ-35")
@pytest.mark.parametrize(("count", "acks"), [(5, []), (6, [AckReliable((6,))])])
def test_aq35_more_than_half_a_window_of_bytes_is_acked_at_once(
    wire: Callable[..., Wire], count: int, acks: list[AckReliable]
) -> None:
    """Also if all of it came in one packet."""
    w = wire(client=False, config=AqueductConfig(window_bytes=1000))
    w.give(w.uni(), *(Message(0, number, (), bytes(100)) for number in range(count)))
    assert len(w.receiver.mailbox) == count
    assert [frame for frame in w.sent(1) if isinstance(frame, AckReliable)] == acks


@pytest.mark.rule("AQ-35")
def test_aq35_acks_never_cap_a_channel(pair: Callable[..., Pair]) -> None:
    """Half a window is acked at once; a peer with a smaller window is met after the first wait."""
    for window, waits in ((256, 0), (8, 1), (1, 1)):
        p = pair(client=AqueductConfig(window=window))
        p.wait(1)
        start = p.now
        sent = 0
        while sent < 2000:
            while p.sender.has_room() and sent < 2000:
                p.sender.send(b"x")
                sent += 1
            p.run()
            while p.receiver.mailbox:
                p.receiver.take()
            if not p.sender.has_room():
                p.wait(0.051)
        assert p.now - start <= waits * 0.051 + 1e-9


@pytest.mark.rule("AQ-35", "AQ-37")
def test_aq35_a_backlog_is_acked_when_the_control_stream_comes(wire: Callable[..., Wire]) -> None:
    """At once if it is half a window, in time if it is less; datagrams too."""
    for reliable, unreliable, at_once in ((2, 2, True), (1, 1, False), (1, 0, False), (0, 1, False)):
        w = wire(client=True, config=AqueductConfig(window=4))
        (half,) = w.sender.send(b"", [Attach.SENDER])
        w.flush()
        for number in range(reliable):
            w.give(w.uni(), Message(half.id, number), fin=True)
        for number in range(unreliable):
            w.give_datagram(Message(half.id, number))
        w.wait(1)
        stream = w.give(w.bidi(), ChannelControl(half.id))
        acks = [AckReliable((reliable,))] * (reliable > 0) + [AckNackUnreliable((unreliable,))] * (unreliable > 0)
        assert w.sent(stream) == (acks if at_once else [])
        w.wait(0.06)
        assert w.sent(stream) == acks


@pytest.mark.rule("AQ-35")
def test_aq35_a_slow_sender_is_not_acked_message_by_message(wire: Callable[..., Wire]) -> None:
    """Messages that keep coming share an ack for each delay, however few come in a turn."""
    w = wire(client=False)
    for number in range(1000):
        w.give(2, Message(0, number))
        w.receiver.take()
        w.wait(0.001)
    acks = [frame for frame in w.sent(1) if isinstance(frame, AckReliable)]
    assert 10 < len(acks) < 45
    assert sum(ack.runs[0] for ack in acks) > 950


@pytest.mark.rule("AQ-36", "AQ-37")
def test_aq36_datagrams_are_settled_contiguously(wire: Callable[..., Wire]) -> None:
    """What came is acked up to the first hole; holes are nacked when they have had their time, not before."""
    w = wire(client=False)
    for number in (0, 1, 3):
        w.give_datagram(Message(0, number))
    w.wait(0.1)
    assert w.take_sent(1) == [ChannelControl(0), AckNackUnreliable((2,))]
    w.give(1, SentUnreliable(5))
    w.wait(0.99)
    assert w.take_sent(1) == []
    w.wait(0.14)
    assert w.take_sent(1) == [AckNackUnreliable((0, 1, 1, 1))]


@pytest.mark.rule("AQ-36")
def test_aq36_a_long_round_trip_gives_more_time(wire: Callable[..., Wire]) -> None:
    """Twice the round trip if that is more than a second."""
    w = wire(client=False)
    w.core.round_trip = 2.0
    w.give(1, SentUnreliable(1))
    w.wait(3.9)
    assert w.sent(1) == [ChannelControl(0)]
    w.wait(0.7)
    assert w.sent(1) == [ChannelControl(0), AckNackUnreliable((0, 1))]


@pytest.mark.rule("AQ-36")
def test_aq36_a_flood_of_declarations_costs_little(wire: Callable[..., Wire]) -> None:
    """Declarations close together are settled together, and numbers nobody sent cost nothing."""
    w = wire(client=False)
    w.give(1, *[SentUnreliable(2**50)] * 1000)
    for _ in range(1000):
        w.now += 0.001
        w.give(1, SentUnreliable(1))
    assert len(w.core._timers._nacks) <= 9
    w.wait(3)
    frames = [f for f in w.sent(1) if isinstance(f, AckNackUnreliable)]
    assert sum(sum(f.runs) for f in frames) == 1000 * 2**50 + 1000
    assert len(frames) <= 9


@pytest.mark.rule("AQ-37")
def test_aq37_datagrams_are_declared_in_time(wire: Callable[..., Wire]) -> None:
    """One SentUnreliable for those of 50 ms; none for none (D-17)."""
    w = sending(wire, unreliable=3)
    assert w.sent(1) == []
    w.wait(0.05)
    assert w.sent(1) == [SentUnreliable(3)]
    w.wait(1)
    assert w.sent(1) == [SentUnreliable(3)]


@pytest.mark.rule("AQ-37")
def test_aq37_a_backlog_is_declared_when_the_control_stream_comes(wire: Callable[..., Wire]) -> None:
    """Without a control stream there is nowhere to say it."""
    w = wire(client=True)
    w.sender.send(b"", mode=Mode.UNRELIABLE)
    w.wait(1)
    stream = w.give(w.bidi(), ChannelControl(0))
    assert w.sent(stream) == [SentUnreliable(1)]


@pytest.mark.rule("AQ-37")
def test_aq37_sent_unreliable_0_says_nothing(wire: Callable[..., Wire]) -> None:
    """It is accepted."""
    w = wire(client=False)
    w.give(1, SentUnreliable(0))
    w.wait(5)
    assert w.sent(1) == [ChannelControl(0)]


@pytest.mark.rule("E-4")
def test_e4_numbers_past_the_largest(wire: Callable[..., Wire]) -> None:
    """Neither ranges nor declarations count further than 2^64-1."""
    w = wire(client=False)
    w.give(1, SentUnreliable(LARGEST), SentUnreliable(1))
    assert w.broken() == "E-4"
    for frame in (AckReliable((1, LARGEST)), CloseReceiver((0, LARGEST))):
        w = sending(wire, reliable=2)
        w.give(1, AckReliable((1,)))
        w.give(1, frame)
        assert w.broken() == "E-4"
    w = sending(wire, unreliable=1)
    w.give(1, AckNackUnreliable((1,)))
    w.give(1, AckNackUnreliable((0, LARGEST)))
    assert w.broken() == "E-4"


@pytest.mark.rule("AQ-35", "AQ-38", "E-24", "E-25")
@pytest.mark.parametrize("case", VECTORS["ranges"]["cases"], ids=lambda c: " ".join(c["acks"]))
def test_aq35_aq38_ranges_from_the_lowest_not_acked(wire: Callable[..., Wire], case: dict[str, object]) -> None:
    """Where ranges start, what they settle, and what they may not."""
    w = sending(wire, reliable=VECTORS["ranges"]["sent"])
    w.give(1, *[bytes.fromhex(octets) for octets in case["acks"]])  # type: ignore[attr-defined]
    rule = case.get("rule", "none")
    found = settled(w) if rule == "none" else settled(w)[: len(case["acked"])]  # type: ignore[arg-type]
    expected = [(numbers, True) for numbers in case["acked"]]  # type: ignore[attr-defined]
    if "nacked" in case:
        expected.append((case["nacked"], False))
    assert found == expected
    w.flush()
    assert (w.closed is None) == (rule == "none")
    if w.closed is not None:
        assert w.closed.reason.startswith(str(rule))


@pytest.mark.rule("E-24")
def test_e24_settled_twice(wire: Callable[..., Wire]) -> None:
    """A positive run may not cover an acked number; a negative one may."""
    w = sending(wire, reliable=4)
    w.give(1, AckReliable((0, 1, 1)), AckReliable((1, 1, 1)))
    assert settled(w) == [([1], True), ([0, 2], True)]
    w = sending(wire, reliable=4)
    w.give(1, AckReliable((0, 1, 1)), AckReliable((2,)))
    assert w.broken() == "E-24"


@pytest.mark.rule("AQ-35", "AQ-40")
def test_aq35_aq40_a_message_that_is_settled_last_holds_up_no_other(wire: Callable[..., Wire]) -> None:
    """The first message counts alone in the window while all later ones are settled before it."""
    w = sending(wire, reliable=1, config=AqueductConfig(window=2))
    for number in range(1, 100):
        w.sender.send(b"", token=number)
        assert (w.sender.unsettled, w.sender.has_room()) == (2, False)
        w.give(1, AckReliable((0, number, 1)))
        assert settled(w) == [([number], True)]
        assert (w.sender.unsettled, w.sender.has_room()) == (1, True)
    w.give(1, AckReliable((1,)))
    assert settled(w) == [([0], True)]
    assert w.sender.unsettled == 0


@pytest.mark.rule("AQ-35")
def test_aq35_what_comes_together_is_acked_by_one_frame(wire: Callable[..., Wire]) -> None:
    """Also if it is more than half a window, from which on an ack does not wait."""
    w = wire(client=False, config=AqueductConfig(window=8, mailbox=100))
    w.give(2, *[Message(0, number, (), bytes(number % 3)) for number in range(100)])
    assert w.sent(1) == [ChannelControl(0), AckReliable((100,))]
    assert [len(w.receiver.take().payload) for _ in range(100)] == [number % 3 for number in range(100)]
    assert w.core.held == 0


@pytest.mark.rule("E-25", "AQ-37")
@pytest.mark.parametrize(
    ("frame", "rule"),
    [
        (AckReliable((3,)), "E-25"),
        (AckReliable((2, 9)), "none"),
        (CloseReceiver((0, 3)), "E-25"),
        (CloseReceiver((3,)), "E-25"),
        (AckNackUnreliable((3,)), "E-25"),
        (AckNackUnreliable((0, 3)), "E-25"),
        (AckNackUnreliable((2,)), "none"),
        (AckReliable((LARGEST,)), "E-25"),
    ],
)
def test_e25_settled_what_was_never_sent(wire: Callable[..., Wire], frame: AckReliable, rule: str) -> None:
    """Acks and nacks are of messages that were sent; a negative run of AckReliable is neither."""
    w = sending(wire, reliable=2, unreliable=2)
    w.give(1, frame)
    assert w.broken() == rule


@pytest.mark.rule("AQ-36")
def test_aq36_acks_and_nacks_reach_the_sender(wire: Callable[..., Wire]) -> None:
    """Each datagram is settled once, also before it was declared."""
    w = sending(wire, unreliable=6)
    w.give(1, AckNackUnreliable((3, 1)))
    w.give(1, AckNackUnreliable((0, 1, 1)))
    assert settled(w) == [([0, 1, 2], True), ([3], False), ([4], False), ([5], True)]
    assert w.sender.unsettled == 0


@pytest.mark.rule("AQ-38", "AQ-39", "AQ-43")
def test_aq38_aq39_the_closing_frames(wire: Callable[..., Wire]) -> None:
    """AckNackUnreliable, AckReliable, then CloseReceiver without ranges, all on the channel's control stream."""
    w = wire(client=False)
    w.give(1, SentUnreliable(9))
    for number in (0, 2):
        w.give(w.uni(), Message(0, number), fin=True)
        w.give_datagram(Message(0, number))
    w.receiver.close()
    w.flush()
    assert w.sent(1) == [ChannelControl(0), AckNackUnreliable((1, 1, 1)), AckReliable((1, 1, 1)), CloseReceiver()]
    assert 1 in w.finished
    assert set(w.octets) == {0, 1}


@pytest.mark.rule("AQ-40")
def test_aq40_the_window_by_messages_and_by_octets(wire: Callable[..., Wire]) -> None:
    """A sender has so many messages, or octets, unacked; what is beyond waits for `Writable`."""
    w = sending(wire, config=AqueductConfig(window=3, window_bytes=100))
    for size in (60, 60):
        w.sender.send(bytes(size))
    assert not w.sender.has_room()
    with pytest.raises(LocalProtocolError):
        w.sender.send(b"")
    w.flush()
    w.give(1, AckReliable((2,)))
    assert [e.half for e in w.events if isinstance(e, Writable)] == [w.sender]
    for _ in range(3):
        w.sender.send(b"")
    assert not w.sender.has_room()
    w.give(1, AckReliable((1,)))
    assert w.sender.has_room()


@pytest.mark.rule("AQ-40")
def test_aq40_datagrams_have_a_window_too(wire: Callable[..., Wire]) -> None:
    """Unsettled datagrams are bounded, so that a peer which settles nothing costs little."""
    w = sending(wire, config=AqueductConfig(unreliable_window=2), unreliable=2)
    assert not w.sender.has_room(Mode.UNRELIABLE)
    assert w.sender.has_room()
    w.sender.has_room(Mode.UNRELIABLE)
    w.give(1, AckNackUnreliable((1,)))
    assert [e.half for e in w.events if isinstance(e, Writable)] == [w.sender]


@pytest.mark.rule("AQ-40")
def test_aq40_a_full_mailbox_leaves_messages_unread(wire: Callable[..., Wire]) -> None:
    """They are not processed and not acked, their stream is blocked; with room they are, in order. Datagrams are dropped."""
    w = wire(client=False, config=AqueductConfig(mailbox=4))
    w.give(2, *[Message(0, number, (), bytes((number,))) for number in range(10)], fin=True)
    assert w.core.is_blocked(2)
    assert len(w.receiver.mailbox) == 4
    w.give_datagram(Message(0, 0))
    w.give(1, SentUnreliable(1))
    w.wait(1.2)
    assert w.take_sent(1) == [ChannelControl(0), AckReliable((4,)), AckNackUnreliable((0, 1))]
    got = [w.receiver.take().payload[0] for _ in range(10)]
    assert got == list(range(10))
    w.flush()
    assert StreamUnblocked(2) in w.events
    w.wait(0.1)
    assert w.sent(1) == [AckReliable((6,))]
    assert (w.core.held, set(w.core.streams.table)) == (0, {0, 1})


@pytest.mark.rule("AQ-40")
def test_aq40_a_full_mailbox_does_not_stop_other_channels(wire: Callable[..., Wire]) -> None:
    """Only streams whose next message has no room wait."""
    w = wire(client=False, config=AqueductConfig(mailbox=1))
    w.give(w.uni(), Message(0, 0), Message(0, 1))
    w.give(w.uni(), Message(8, 0))
    assert w.core.is_blocked(2)
    assert len(w.core.halves[8].mailbox) == 1  # type: ignore[union-attr]


@pytest.mark.rule("AQ-40")
def test_aq40_unprocessed_octets_are_bounded(wire: Callable[..., Wire]) -> None:
    """A peer that sends on regardless is closed with code 4."""
    w = wire(client=False, config=AqueductConfig(mailbox=1, max_held=10_000))
    w.give(2, Message(0, 0))
    for number in range(1, 40):
        if w.closed is not None:
            break
        w.give(2, Message(0, number, (), bytes(1000)))
    assert w.broken() == "AQ-40"
    assert w.closed is not None
    assert w.closed.code == CloseCode.LIMIT


def test_messages_with_attachments_are_settled_like_others(wire: Callable[..., Wire]) -> None:
    w = sending(wire)
    w.sender.send(b"", [Attach.SENDER], token="t")
    w.flush()
    w.give(1, AckReliable((1,)))
    assert settled(w) == [(["t"], True)]


def test_long_unreliable_ranges_are_cut_into_frames(wire: Callable[..., Wire]) -> None:
    w = wire(client=False, config=AqueductConfig(mailbox=100_000))
    for number in range(0, 10_000, 2):
        w.give_datagram(b"\x03\x00" + encode_int(number) + b"\0\0")
    w.give(1, SentUnreliable(10_000))
    w.give(1, FinishSender(0), fin=True)
    w.wait(2)
    frames = [f for f in w.sent(1) if isinstance(f, AckNackUnreliable)]
    assert [len(f.runs) for f in frames] == [1, 4096, 4096, 1808]
    assert sum(sum(f.runs) for f in frames) == 10_000


@pytest.mark.rule("AQ-20a", "AQ-35", "AQ-36", "AQ-37")
def test_deadlines_are_exact(wire: Callable[..., Wire]) -> None:
    """Not a moment before or after: acks, declarations, nacks, and the end of a channel whose stream was stopped."""

    def due(w: Wire, seconds: float, done: Callable[[], bool]) -> None:
        """Nothing is done just before, and all of it at the deadline."""
        w.wait(seconds - 0.001)
        assert not done()
        w.wait(0.001 + 1e-9)
        assert done()

    w = wire(client=False)
    control = 1
    w.give(w.uni(), Message(0, 0))
    w.take_sent(control)
    due(w, 0.05, lambda: AckReliable((1,)) in w.sent(control))
    w = wire(client=False)
    w.give(control, SentUnreliable(1))
    due(w, 1.125, lambda: AckNackUnreliable((0, 1)) in w.sent(control))
    w = wire(client=False)
    w.give(control, SentUnreliable(1))
    w.wait(0.5)
    w.give(control, SentUnreliable(1))
    due(w, 0.625, lambda: AckNackUnreliable((0, 1)) in w.sent(control))
    due(w, 0.5, lambda: w.sent(control).count(AckNackUnreliable((0, 1))) == 2)
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    w.sender.send(b"", mode=Mode.UNRELIABLE)
    w.flush()
    due(w, 0.05, lambda: SentUnreliable(1) in w.sent(1))
    w.sender.send(b"")
    w.flush()
    w.stop(2)
    due(w, 10.0, lambda: w.broken() == "AQ-20a")
