"""Creation links: what lives or dies with which message, and chains of any length."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from levada.transports.aqueduct import (
    AqueductConfig,
    Attach,
    Mode,
    Reached,
    ReceiverState,
    ResetCode,
    SenderHalf,
    SenderState,
    StreamData,
)
from levada.transports.aqueduct.frames import (
    AckNackUnreliable,
    AckReliable,
    ChannelControl,
    ClosedChannelLost,
    CloseReceiver,
    FinishSender,
    Message,
    SentUnreliable,
    encode_int,
)

from .conftest import Pair, Wire, frames_of


def chain(sender: SenderHalf, length: int, mode: Mode = Mode.ORDERED) -> list[SenderHalf]:
    """Attach a receiver to a message on each sender in turn."""
    made = []
    for _ in range(length):
        (half,) = sender.send(b"", [Attach.RECEIVER], mode=mode)
        assert isinstance(half, SenderHalf)
        made.append(half)
        sender = half
    return made


@pytest.mark.rule("AQ-52")
def test_aq52_who_starts_reachable(pair: Callable[..., Pair]) -> None:
    """The entrypoint's sender and halves minted there; not those minted here."""
    p = pair()
    sender, receiver = p.sender.send(b"", [Attach.RECEIVER, Attach.SENDER])
    assert p.sender.reachable
    assert not sender.reachable
    assert not receiver.reachable
    p.run()
    assert all(half.reachable for half in p.receiver.take().attachments)
    assert p.receiver.reachable


@pytest.mark.rule("AQ-53", "AQ-54")
def test_aq53_aq54_an_ack_reaches_down_to_what_was_acked(wire: Callable[..., Wire]) -> None:
    """A link lasts until its message is acked and its sender reachable; then what was acked on it before follows in the same step."""
    w = wire(client=True)
    one, two, three = chain(w.sender, 3)
    assert (w.sender.links, one.links) == ({0: (one.id,)}, {0: (two.id,)})
    w.flush()
    w.give(w.bidi(), ChannelControl(0))
    w.give(w.bidi(), ChannelControl(one.id), AckReliable((1,)))
    assert (two.reachable, one.links, one.acked_links) == (False, {}, [two.id])
    assert not [e for e in w.events if isinstance(e, Reached)]
    w.give(1, AckReliable((1,)))
    assert [e.half for e in w.events if isinstance(e, Reached)] == [one, two]
    assert (one.reachable, two.reachable, three.reachable) == (True, True, False)
    assert not w.sender.links
    assert one.acked_links is None


@pytest.mark.rule("AQ-55")
def test_aq55_a_nack_loses_what_was_attached(wire: Callable[..., Wire]) -> None:
    """Whether or not the sender is reachable; a datagram that is nacked takes its channels along."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    one, two = chain(w.sender, 2, Mode.UNRELIABLE)
    (kept,) = w.sender.send(b"", [Attach.SENDER])
    w.flush()
    w.give(1, AckNackUnreliable((0, 1)))
    assert {one.state, two.state} == {SenderState.LOST}
    assert kept.state is ReceiverState.UNATTACHED
    assert set(w.core.halves) == {0, kept.id}


@pytest.mark.rule("AQ-56")
def test_aq56_lose_resets_both_kinds_of_halves(wire: Callable[..., Wire]) -> None:
    """Attached halves reset their direction with `lost`, senders their message streams too."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    sender, receiver = w.sender.send(b"", [Attach.RECEIVER, Attach.SENDER], mode=Mode.UNRELIABLE)
    sender.send(b"ordered")  # type: ignore[union-attr]
    sender.send(b"alone", mode=Mode.UNORDERED)  # type: ignore[union-attr]
    w.flush()
    one = w.give(w.bidi(), ChannelControl(sender.id))
    other = w.give(w.bidi(), ChannelControl(receiver.id))
    w.give(1, AckNackUnreliable((0, 1)))
    assert w.resets == dict.fromkeys((one, other, 2, 6), ResetCode.LOST)
    assert {sender.state, receiver.state} == {SenderState.LOST, ReceiverState.LOST}


@pytest.mark.rule("AQ-56", "AQ-58")
@pytest.mark.parametrize("acked", [True, False])
def test_aq56_a_tombstone_is_resolved_with_its_link(wire: Callable[..., Wire], acked: bool) -> None:
    """A half that ends unreached is remembered, with what hangs on it, until the message that carries it is settled."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    (one,) = w.sender.send(b"", [Attach.RECEIVER], mode=Mode.UNRELIABLE)
    (two,) = one.send(b"", [Attach.RECEIVER])  # type: ignore[union-attr]
    one.finish()  # type: ignore[union-attr]
    w.flush()
    w.give(w.bidi(), ChannelControl(one.id), AckReliable((1,)), CloseReceiver(), fin=True)
    assert one.state is SenderState.FINISHED
    assert w.core.links.tombstones == {one.id: [two.id]}
    w.give(1, AckNackUnreliable((1,) if acked else (0, 1)))
    assert w.core.links.tombstones == {}
    if acked:
        assert two.reachable
        assert 6 not in w.octets
    else:
        assert two.state is SenderState.LOST
        assert frames_of(w.octets[6]) == [ClosedChannelLost(one.id)]
        assert 6 in w.finished


@pytest.mark.rule("AQ-56")
@pytest.mark.parametrize("how", ["finish", "cancel"])
def test_aq56_a_half_that_has_ended_its_direction_also_says_it_on_a_stream(wire: Callable[..., Wire], how: str) -> None:
    """The peer's half may have closed already, and would never see the reset (D-25)."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    (half,) = w.sender.send(b"", [Attach.RECEIVER], mode=Mode.UNRELIABLE)
    w.flush()
    w.give(w.bidi(), ChannelControl(half.id))
    getattr(half, how)()
    w.flush()
    w.give(1, AckNackUnreliable((0, 1)))
    assert half.state is SenderState.LOST
    assert frames_of(w.octets[2]) == [ClosedChannelLost(half.id)]


@pytest.mark.rule("AQ-56")
def test_aq56_a_receiver_that_was_closed_unreached_leaves_a_tombstone(wire: Callable[..., Wire]) -> None:
    """The remote sender may be waiting for an application that never gets it."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    (half,) = w.sender.send(b"", [Attach.SENDER], mode=Mode.UNRELIABLE)
    w.flush()
    half.close()  # type: ignore[union-attr]
    w.give(w.bidi(), ChannelControl(half.id))
    assert w.core.links.tombstones == {half.id: []}
    w.give(1, AckNackUnreliable((1,)))
    assert w.core.links.tombstones == {}


@pytest.mark.rule("AQ-57")
def test_aq57_an_unattached_half_is_lost_in_silence(wire: Callable[..., Wire]) -> None:
    """Nothing is sent; a control stream that comes later meets AQ-25."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    (half,) = w.sender.send(b"", [Attach.SENDER], mode=Mode.UNRELIABLE)
    w.flush()
    w.give(1, AckNackUnreliable((0, 1)))
    assert (half.state, w.resets) == (ReceiverState.LOST, {})
    late = w.give(w.bidi(), ChannelControl(half.id))
    assert w.resets == {late: ResetCode.LOST}


@pytest.mark.rule("AQ-58", "I-9")
def test_aq58_every_tombstone_goes_away(pair: Callable[..., Pair]) -> None:
    """Whatever becomes of the carrying message; here ten channels end before it is acked."""
    p = pair()
    for half in p.sender.send(b"", [Attach.RECEIVER] * 5 + [Attach.SENDER] * 5):
        if isinstance(half, SenderHalf):
            half.send(b"x")
            half.finish()
        else:
            half.close()
    p.wait(3)
    for half in p.receiver.take().attachments:
        if not isinstance(half, SenderHalf):
            half.take()
    p.wait(3)
    p.sender.finish()
    p.wait(3)
    assert p.leftovers() == {}


@pytest.mark.rule("I-8")
def test_i8_what_was_reached_is_never_lost_by_its_link(wire: Callable[..., Wire]) -> None:
    """Once acked on a reachable sender, a channel outlives the end of that sender."""
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    (half,) = w.sender.send(b"", [Attach.SENDER])
    w.flush()
    w.give(1, AckReliable((1,)), CloseReceiver(), fin=True)
    assert (half.reachable, half.state) == (True, ReceiverState.UNATTACHED)


def calls_of(function: Callable[..., object], *args: object) -> int:
    """Count the calls of functions that a call makes."""
    calls = 0

    def count(frame: object, what: str, arg: object) -> None:
        nonlocal calls
        calls += what in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return calls


def lose_a_chain_of_senders(wire: Callable[..., Wire], length: int) -> int:
    w = wire(client=True, config=AqueductConfig(max_channels=length + 2))
    w.give(w.bidi(), ChannelControl(0))
    w.core.datagram_limit = 1000
    (first,) = w.sender.send(b"", [Attach.RECEIVER], mode=Mode.UNRELIABLE)
    assert isinstance(first, SenderHalf)
    made = chain(first, length, Mode.UNRELIABLE)
    w.core.data_to_send(0.0)
    calls = calls_of(w.core.receive_stream_data, 1, AckNackUnreliable((0, 1)).encode(), False, w.now)
    assert list(w.core.halves) == [0]
    assert made[-1].state is SenderState.LOST
    return calls


def discard_a_chain_of_mailboxes(wire: Callable[..., Wire], length: int) -> int:
    w = wire(client=False, config=AqueductConfig(max_channels=length + 2))
    frames = [b"\x03" + encode_int(index << 3) + b"\0" + _attach((index + 1) << 3) + b"\0" for index in range(length)]
    w.core.receive_stream_data(2, b"".join(frames), False, w.now)
    w.core.data_to_send(0.0)
    assert len(w.core.halves) == length + 1
    calls = calls_of(w.receiver.close)
    assert w.core.halves == {}
    closed = sum(isinstance(out, StreamData) and out.fin for out in w.core.data_to_send(0.0))
    assert closed == length + 1
    return calls


def _attach(channel: int) -> bytes:
    octets = encode_int(channel)
    return encode_int(len(octets)) + octets


@pytest.mark.ci
@pytest.mark.rule("I-11", "AQ-50", "AQ-56")
@pytest.mark.parametrize("cascade", [lose_a_chain_of_senders, discard_a_chain_of_mailboxes])
def test_i11_long_chains_neither_recurse_nor_grow_faster_than_they_are_long(
    wire: Callable[..., Wire], cascade: Callable[[Callable[..., Wire], int], int]
) -> None:
    """Ten thousand nested channels end in one step; ten times as many take ten times as many calls."""
    short, long = cascade(wire, 1_000), cascade(wire, 10_000)
    assert 9 * short < long < 11 * short


@pytest.mark.soak
@pytest.mark.rule("I-11")
@pytest.mark.parametrize("cascade", [lose_a_chain_of_senders, discard_a_chain_of_mailboxes])
def test_i11_a_million(wire: Callable[..., Wire], cascade: Callable[[Callable[..., Wire], int], int]) -> None:
    """A million nested channels take a bounded number of calls for each."""
    assert cascade(wire, 1_000_000) < 100_000_000


def test_a_cascade_goes_through_ended_and_live_halves(wire: Callable[..., Wire]) -> None:
    w = wire(client=True)
    w.give(w.bidi(), ChannelControl(0))
    one, two, three = chain(w.sender, 3, Mode.UNRELIABLE)
    two.finish()
    w.flush()
    w.give(w.bidi(), ChannelControl(two.id), AckNackUnreliable((1,)), CloseReceiver(), fin=True)
    assert [type(f) for f in w.sent(5)] == [SentUnreliable, FinishSender]
    assert w.core.links.tombstones == {two.id: [three.id]}
    w.give(1, AckNackUnreliable((0, 1)))
    assert (one.state, two.state, three.state) == (SenderState.LOST, SenderState.FINISHED, SenderState.LOST)
    assert list(w.core.halves) == [0]
    assert w.core.links.tombstones == {}


def test_a_message_of_a_lost_channel_that_comes_late_is_discarded(wire: Callable[..., Wire]) -> None:
    w = wire(client=False)
    w.give(w.uni(), ClosedChannelLost(8), fin=True)
    w.give(w.uni(), Message(8, 0, (16,)), fin=True)
    assert list(w.core.halves) == [0]
