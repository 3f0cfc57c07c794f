"""Floods of every kind: memory stays bounded, the connection that floods is closed with code 4, and nothing is kept of what is over."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest

from levada.transports.aqueduct import (
    AqueductConfig,
    Attach,
    CloseCode,
    Delivery,
    Mode,
    ReceiverHalf,
    SenderHalf,
    SenderState,
)
from levada.transports.aqueduct.frames import (
    VERSION,
    FinishSender,
    Message,
    SentUnreliable,
    encode_int,
)
from levada.transports.aqueduct.streams import Stream
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
        w.core.receive_stream_data(2, data[octet : octet + 1])
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


@pytest.mark.rule("I-13")
def test_i13_finished_channels_leave_nothing(pair: Callable[..., Pair]) -> None:
    """After hundreds of channels there is what there was after a few: no halves, links, records or timers of those that are over."""
    p = pair()

    def objects() -> Counter[str]:
        gc.collect()
        kinds = (SenderHalf, ReceiverHalf, Stream, Delivery, NackDue)
        return Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds))

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

    channels(3)
    p.wait(3)
    before = objects()
    channels(200)
    p.wait(3)
    assert objects() == before
    assert sum(before.values()) < 10
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
