"""Finish, cancel, close and lost: what is written, in which order, and what each side hears."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.aqueduct import (
    AqueductConfig,
    Attach,
    Ended,
    Mode,
    ReceiverHalf,
    ReceiverState,
    ResetCode,
    SenderHalf,
    SenderState,
    Settled,
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
)
from levada.transports.aqueduct.state import RECEIVER, SENDER, ReceiverInput, SenderInput

from .conftest import Pair, Wire, state_of


def attached(wire: Callable[..., Wire], **options: object) -> Wire:
    """Make a client whose entrypoint has its control stream, number 1."""
    w = wire(client=True, **options)
    w.give(w.bidi(), ChannelControl(0))
    return w


def given_sender(wire: Callable[..., Wire]) -> tuple[Wire, SenderHalf]:
    """Make a server that got a sender, whose control stream, number 5, it has opened: the gate is shut."""
    w = wire(client=False)
    w.give(w.uni(), Message(0, 0, (1,)), fin=True)
    half = w.receiver.take().attachments[0]
    assert isinstance(half, SenderHalf)
    return w, half


@pytest.mark.rule("AQ-41")
def test_aq41_finish(wire: Callable[..., Wire]) -> None:
    """The declaration of what is undeclared, FinishSender, FIN; FIN of the message stream; then nothing may be sent."""
    w = attached(wire)
    w.sender.send(b"a")
    w.sender.send(b"b", mode=Mode.UNRELIABLE)
    w.sender.finish()
    w.sender.finish()
    w.flush()
    assert w.sent(1) == [SentUnreliable(1), FinishSender(1)]
    assert w.finished == {1, 2}
    with pytest.raises(LocalProtocolError, match="finishing"):
        w.sender.send(b"c")
    w.give(1, AckNackUnreliable((1,)), AckReliable((1,)), CloseReceiver(), fin=True)
    assert w.sender.state is SenderState.FINISHED
    w.sender.finish()


@pytest.mark.rule("AQ-41")
def test_aq41_finish_waits_for_the_control_stream(wire: Callable[..., Wire]) -> None:
    """Without one it is only remembered."""
    w = wire(client=True)
    w.sender.send(b"a")
    w.sender.finish()
    w.flush()
    assert (w.sender.state, w.finished) == (SenderState.FINISH_WAIT, set())
    w.give(w.bidi(), ChannelControl(0))
    assert w.sent(1) == [FinishSender(1)]
    assert w.sender.state is SenderState.FINISHING


@pytest.mark.rule("AQ-42", "AQ-43")
def test_aq42_a_finishing_receiver_waits_for_everything_declared(wire: Callable[..., Wire]) -> None:
    """All reliable messages, and all datagrams received or given up; then it closes, and its mailbox can still be read."""
    w = wire(client=False)
    w.give(1, SentUnreliable(2), FinishSender(2), fin=True)
    w.give(w.uni(), Message(0, 1), fin=True)
    w.give_datagram(Message(0, 0))
    w.wait(0.9)
    assert w.receiver.state is ReceiverState.FINISHING
    w.wait(0.3)
    assert w.receiver.state is ReceiverState.FINISHING
    w.give(w.uni(), Message(0, 0), fin=True)
    assert state_of(w.receiver) is ReceiverState.FINISHED
    assert w.sent(1)[-1] == CloseReceiver()
    assert [e.half for e in w.events if isinstance(e, Ended)] == [w.receiver]
    assert len(w.receiver.mailbox) == 3
    assert 1 in w.finished


@pytest.mark.rule("AQ-42")
def test_aq42_nothing_is_waited_for_that_has_come(wire: Callable[..., Wire]) -> None:
    """If all datagrams came, their acks do not wait either."""
    w = wire(client=False)
    for number in (0, 1):
        w.give_datagram(Message(0, number))
    w.give(1, SentUnreliable(2), FinishSender(0), fin=True)
    assert w.sent(1) == [ChannelControl(0), AckNackUnreliable((2,)), CloseReceiver()]


@pytest.mark.rule("AQ-42")
def test_aq42_the_last_datagram_ends_a_finishing_receiver_at_once(wire: Callable[..., Wire]) -> None:
    """No ack and no nack has to come due for it."""
    w = wire(client=False)
    w.give(1, SentUnreliable(2), FinishSender(0), fin=True)
    for number in (1, 0):
        assert state_of(w.receiver) is ReceiverState.FINISHING
        w.give_datagram(Message(0, number))
    assert state_of(w.receiver) is ReceiverState.FINISHED
    assert w.sent(1) == [ChannelControl(0), AckNackUnreliable((2,)), CloseReceiver()]


@pytest.mark.rule("E-26", "AQ-42")
@pytest.mark.parametrize("number", [0, 5])
def test_e26_finished_with_fewer_than_came(wire: Callable[..., Wire], number: int) -> None:
    """The count cannot be below a number that was received."""
    w = wire(client=False)
    w.give(w.uni(), Message(0, number))
    w.give(1, FinishSender(number))
    assert w.broken() == "E-26"


@pytest.mark.rule("AQ-43", "AQ-51")
def test_aq43_close_waits_for_the_control_stream(wire: Callable[..., Wire]) -> None:
    """A receiver minted here that is closed at once says so when it can."""
    w = attached(wire)
    (half,) = w.sender.send(b"", [Attach.SENDER])
    half.close()  # type: ignore[union-attr]
    half.close()  # type: ignore[union-attr]
    assert half.state is ReceiverState.CLOSE_WAIT
    stream = w.give(w.bidi(), ChannelControl(1))
    assert state_of(half) is ReceiverState.CLOSED
    assert w.sent(stream) == [CloseReceiver()]
    assert stream in w.finished
    assert stream not in w.done
    w.give(stream, b"\xff thrown away", FinishSender(0), fin=True)
    assert stream in w.done
    assert w.closed is None


@pytest.mark.rule("AQ-43")
def test_aq43_what_comes_for_a_receiver_that_waits_to_say_so_holds_nothing_up(wire: Callable[..., Wire]) -> None:
    """It is dropped, and what is behind it on its stream is read."""
    w = attached(wire)
    closed, open_ = w.sender.send(b"", [Attach.SENDER, Attach.SENDER])
    assert isinstance(closed, ReceiverHalf)
    assert isinstance(open_, ReceiverHalf)
    closed.close()
    stream = w.give(w.uni(), Message(closed.id, 0, (), b"dropped"), Message(open_.id, 0, (), b"kept"))
    assert [message.payload for message in open_.mailbox] == [b"kept"]
    assert (closed.state, len(closed.mailbox)) == (ReceiverState.CLOSE_WAIT, 0)
    assert not w.core.is_blocked(stream)


@pytest.mark.rule("AQ-44", "AQ-44a")
def test_aq44_close_receiver_ends_the_sender(wire: Callable[..., Wire]) -> None:
    """What is not acked is nacked; S→R ends with FinishSender (D-21); message streams with nacked messages are reset."""
    w = attached(wire)
    for token in ("a", "b"):
        w.sender.send(b"", token=token)
    w.sender.send(b"", mode=Mode.UNORDERED, token="c")
    w.sender.send(b"", mode=Mode.UNRELIABLE, token="d")
    w.flush()
    w.give(1, AckReliable((1,)), CloseReceiver(), fin=True)
    assert [(e.tokens, e.delivered) for e in w.events if isinstance(e, Settled)] == [
        (["a"], True),
        (["b", "c", "d"], False),
    ]
    assert w.sender.state is SenderState.RECEIVER_CLOSED
    assert w.sent(1) == [SentUnreliable(1), FinishSender(3)]
    assert w.resets == {2: ResetCode.CANCELLED, 6: ResetCode.CANCELLED}
    assert {1, 2, 6} <= w.done


@pytest.mark.rule("AQ-44a")
def test_aq44a_message_streams_without_nacks_are_finished(wire: Callable[..., Wire]) -> None:
    """A FIN is enough for what was delivered."""
    w = attached(wire)
    w.sender.send(b"")
    w.flush()
    w.give(1, AckReliable((1,)), CloseReceiver(), fin=True)
    assert (w.resets, 2 in w.finished, 2 in w.done) == ({}, True, True)


@pytest.mark.rule("AQ-44")
@pytest.mark.parametrize(("acked", "state"), [(2, SenderState.FINISHED), (1, SenderState.RECEIVER_CLOSED)])
def test_aq44_finished_or_receiver_closed(wire: Callable[..., Wire], acked: int, state: SenderState) -> None:
    """Finished only if all reliable messages were acked; datagrams do not count."""
    w = attached(wire)
    w.sender.send(b"")
    w.sender.send(b"")
    w.sender.send(b"", mode=Mode.UNRELIABLE)
    w.sender.finish()
    w.flush()
    w.give(1, AckReliable((acked,)), CloseReceiver(), fin=True)
    assert w.sender.state is state


@pytest.mark.rule("AQ-45")
def test_aq45_cancel_with_the_gate_open(wire: Callable[..., Wire]) -> None:
    """The side that did not open the control stream resets at once, message streams first; acks are still read."""
    w = attached(wire)
    w.sender.send(b"", token="a")
    w.sender.send(b"", mode=Mode.UNORDERED, token="b")
    w.flush()
    w.sender.cancel()
    w.sender.cancel()
    w.flush()
    assert list(w.resets.items()) == [(2, 1), (6, 1), (1, 1)]
    assert w.sender.state is SenderState.CANCELLING
    with pytest.raises(LocalProtocolError):
        w.sender.send(b"")
    with pytest.raises(LocalProtocolError):
        w.sender.finish()
    w.give(1, AckReliable((1,)), CloseReceiver(), fin=True)
    assert [(e.tokens, e.delivered) for e in w.events if isinstance(e, Settled)] == [(["a"], True), (["b"], False)]
    assert state_of(w.sender) is SenderState.CANCELLED
    w.sender.cancel()


@pytest.mark.rule("AQ-45")
def test_aq45_unattached_cancel_waits(wire: Callable[..., Wire]) -> None:
    """Message streams are reset at once, the control stream when it comes."""
    w = wire(client=True)
    w.sender.send(b"")
    w.flush()
    w.sender.cancel()
    w.flush()
    assert (w.resets, w.sender.state) == ({2: 1}, SenderState.CANCEL_WAIT)
    w.give(w.bidi(), ChannelControl(0))
    assert (w.resets, w.sender.state) == ({2: 1, 1: 1}, SenderState.CANCELLING)


@pytest.mark.rule("AQ-45")
def test_aq45_the_gate_and_its_nudge(wire: Callable[..., Wire]) -> None:
    """Who opened the control stream makes the peer answer first, even if reliable messages are outstanding (D-22)."""
    w, sender = given_sender(wire)
    sender.send(b"reliable")
    w.flush()
    sender.cancel()
    w.flush()
    assert w.sent(5) == [ChannelControl(1), SentUnreliable(1)]
    assert w.resets == {3: 1}
    assert sender.state is SenderState.CANCEL_WAIT
    w.give(5, AckNackUnreliable((0, 1)))
    assert w.resets == {3: 1, 5: 1}
    assert state_of(sender) is SenderState.CANCELLING


@pytest.mark.rule("AQ-45")
def test_aq45_no_nudge_if_an_answer_must_come(wire: Callable[..., Wire]) -> None:
    """A declared datagram that is not settled makes the receiver speak anyway."""
    w, sender = given_sender(wire)
    sender.send(b"", mode=Mode.UNRELIABLE)
    sender.cancel()
    w.flush()
    assert w.sent(5) == [ChannelControl(1), SentUnreliable(1)]
    assert sender.sent_unreliable == 1


@pytest.mark.rule("AQ-45")
def test_aq45_a_nudge_is_answered_at_once(wire: Callable[..., Wire]) -> None:
    """Empty ranges open the gate of a sender that cancels; the nack of the number takes a second. Later declarations need no such answer."""
    w = attached(wire)
    (half,) = w.sender.send(b"", [Attach.SENDER])
    w.flush()
    stream = w.give(w.bidi(), ChannelControl(1), SentUnreliable(1))
    assert w.take_sent(stream) == [AckNackUnreliable(())]
    w.give(stream, SentUnreliable(1))
    assert w.take_sent(stream) == []
    w.reset(stream, ResetCode.CANCELLED)
    assert state_of(half) is ReceiverState.CANCELLED


@pytest.mark.rule("AQ-45")
def test_aq45_datagrams_that_came_before_their_declaration_need_no_answer(wire: Callable[..., Wire]) -> None:
    """They are acked soon."""
    w = attached(wire)
    w.sender.send(b"", [Attach.SENDER])
    w.flush()
    w.give_datagram(Message(1, 0))
    stream = w.give(w.bidi(), ChannelControl(1), SentUnreliable(1))
    assert w.take_sent(stream) == []
    w.wait(0.1)
    assert w.take_sent(stream) == [AckNackUnreliable((1,))]


@pytest.mark.rule("AQ-45")
def test_aq45_a_cancelled_channel_ends_without_waiting(pair: Callable[..., Pair]) -> None:
    """Whichever side minted it: in two round trips, and no timer is waited for."""
    p = pair()
    (kept,) = p.client.core.entrypoint.send(b"", [Attach.SENDER])  # type: ignore[union-attr]
    p.run()
    given = p.server.core.entrypoint.take().attachments[0]  # type: ignore[union-attr]
    assert isinstance(given, SenderHalf)
    given.send(b"on the way")
    given.cancel()
    p.run()
    assert (state_of(given), state_of(kept)) == (SenderState.CANCELLED, ReceiverState.CANCELLED)
    assert p.now == 0


@pytest.mark.rule("AQ-45")
def test_aq45_close_receiver_while_the_gate_is_shut(wire: Callable[..., Wire]) -> None:
    """S→R is ended properly (D-21), the outcome is cancelled."""
    w, sender = given_sender(wire)
    sender.cancel()
    w.flush()
    w.give(5, CloseReceiver(), fin=True)
    assert w.sent(5) == [ChannelControl(1), SentUnreliable(1), FinishSender(0)]
    assert (sender.state, w.resets, 5 in w.done) == (SenderState.CANCELLED, {}, True)


@pytest.mark.rule("AQ-48", "AQ-56")
@pytest.mark.parametrize("ending", ["finish", "cancel"])
def test_d25_a_sender_whose_peer_says_that_it_is_lost_does_not_tell_it_back(
    wire: Callable[..., Wire], ending: str
) -> None:
    """ClosedChannelLost is for a peer that cannot know: this side has ended its direction, and then lost the half by itself."""
    w = attached(wire)
    (half,) = w.sender.send(b"", [Attach.RECEIVER])
    assert isinstance(half, SenderHalf)
    control = w.give(w.bidi(), ChannelControl(half.id))
    getattr(half, ending)()
    w.flush()
    uni = [stream_id for stream_id in w.octets if stream_id & 2]
    w.reset(control, ResetCode.LOST)
    assert state_of(half) is SenderState.LOST
    assert [stream_id for stream_id in w.octets if stream_id & 2] == uni


@pytest.mark.rule("AQ-46", "AQ-50")
def test_aq46_a_cancelled_receiver_closes_at_once(wire: Callable[..., Wire]) -> None:
    """No gap is waited for; its mailbox is discarded."""
    w = wire(client=False)
    w.give(w.uni(), Message(0, 1), fin=True)
    w.give(1, SentUnreliable(4))
    w.reset(1, ResetCode.CANCELLED)
    assert w.sent(1) == [ChannelControl(0), AckReliable((0, 1, 1)), CloseReceiver()]
    assert (w.receiver.state, len(w.receiver.mailbox), w.core.held) == (ReceiverState.CANCELLED, 0, 0)
    assert 1 in w.done


@pytest.mark.rule("AQ-47")
@pytest.mark.parametrize("gate", [True, False])
def test_aq47_cancel_while_finishing_leaves_the_messages(wire: Callable[..., Wire], gate: bool) -> None:
    """The receiver may have FinishSender and wait for them, so only S→R is reset, through the gate and without a nudge (D-23)."""
    if gate:
        w = attached(wire)
        sender, control = w.sender, 1
    else:
        w, sender = given_sender(wire)
        control = 5
    sender.send(b"")
    sender.finish()
    w.flush()
    sender.cancel()
    w.flush()
    assert w.sent(control)[-1] == FinishSender(1)
    assert w.resets == ({1: 1} if gate else {})
    w.give(control, AckReliable((1,)))
    assert w.resets == {control: 1}
    w.give(control, CloseReceiver(), fin=True)
    assert sender.state is SenderState.CANCELLED


@pytest.mark.rule("AQ-48")
def test_aq48_lost_from_the_peer(wire: Callable[..., Wire]) -> None:
    """The half is gone at once and resets its own direction; links are lost, acked or not."""
    w = attached(wire)
    (child,) = w.sender.send(b"", [Attach.RECEIVER])
    (grandchild,) = child.send(b"", [Attach.SENDER])  # type: ignore[union-attr]
    (other,) = child.send(b"", [Attach.SENDER])  # type: ignore[union-attr]
    w.flush()
    stream = w.give(w.bidi(), ChannelControl(child.id), AckReliable((1,)))
    w.reset(stream, ResetCode.LOST)
    assert w.resets[stream] == ResetCode.LOST
    assert {child.state, grandchild.state, other.state} == {SenderState.LOST, ReceiverState.LOST}
    assert list(w.core.halves) == [0]
    assert w.core.links.tombstones == {}


@pytest.mark.rule("AQ-48", "AQ-50")
def test_aq48_a_lost_receiver_discards_its_mailbox(wire: Callable[..., Wire]) -> None:
    """Also if its finish had come; what was attached is torn down."""
    w = wire(client=False)
    w.give(w.uni(), Message(8, 0, (1,)), fin=True)
    w.give(9, AckReliable(()))
    w.give(5, FinishSender(2))
    half = w.core.halves[8]
    w.reset(5, ResetCode.LOST)
    assert (half.state, len(half.mailbox)) == (ReceiverState.LOST, 0)  # type: ignore[union-attr]
    assert w.resets == {5: 2, 9: 2}


@pytest.mark.rule("AQ-49", "E-27")
@pytest.mark.parametrize(
    ("client", "channel", "rule"), [(False, 2, "E-27"), (True, 8, "E-27"), (False, 80, "none"), (True, 2, "none")]
)
def test_aq49_e27_closed_channel_lost(wire: Callable[..., Wire], client: bool, channel: int, rule: str) -> None:
    """It comes from the side that minted the id; of an unknown channel it is ignored."""
    w = wire(client=client)
    w.give(w.uni(), ClosedChannelLost(channel), fin=True)
    assert w.broken() == rule


@pytest.mark.rule("AQ-49")
def test_aq49_closed_channel_lost_of_a_live_half(wire: Callable[..., Wire]) -> None:
    """The half is lost, and its id is on record: late messages are discarded."""
    w = wire(client=False)
    w.give(w.uni(), Message(8, 0), fin=True)
    half = w.core.halves[8]
    w.give(w.uni(), ClosedChannelLost(8), fin=True)
    assert half.state is ReceiverState.LOST
    assert w.resets == {5: 2}
    w.give(w.uni(), Message(8, 1), fin=True)
    assert list(w.core.halves) == [0]


@pytest.mark.rule("AQ-50")
def test_aq50_a_mailbox_closed_by_the_application(pair: Callable[..., Pair]) -> None:
    """Attached receivers are closed, attached senders cancelled, and so on down."""
    p = pair()
    inner_sender, receiver = p.sender.send(b"", [Attach.RECEIVER, Attach.SENDER])
    (leaf,) = inner_sender.send(b"", [Attach.SENDER])  # type: ignore[union-attr]
    p.run()
    p.receiver.close()
    p.wait(3)
    assert (p.sender.state, inner_sender.state) == (SenderState.RECEIVER_CLOSED, SenderState.RECEIVER_CLOSED)
    assert {receiver.state, leaf.state} == {ReceiverState.CANCELLED}
    assert p.leftovers() == {}


@pytest.mark.rule("AQ-50")
def test_aq50_a_mailbox_that_was_cancelled(pair: Callable[..., Pair]) -> None:
    """What was attached hears *lost*; senders through the gate, which holds that code."""
    p = pair()
    sender, receiver = p.sender.send(b"", [Attach.RECEIVER, Attach.SENDER])
    sender.send(b"", token=1)  # type: ignore[union-attr]
    p.wait(1)
    p.sender.cancel()
    p.wait(3)
    assert p.sender.state is SenderState.CANCELLED
    assert receiver.state is ReceiverState.LOST
    assert sender.state is SenderState.RECEIVER_CLOSED
    assert p.leftovers() == {}


@pytest.mark.rule("AQ-50")
@pytest.mark.parametrize("gate", [True, False])
def test_aq50_tearing_down_a_sender_goes_through_the_gate(wire: Callable[..., Wire], gate: bool) -> None:
    """With the gate shut the code 2 waits; when it opens the half is lost, not cancelled."""
    w = wire(client=False)
    w.give(w.uni(), Message(0, 0, (1,)), fin=True)
    if gate:
        w.give(5, AckReliable(()))
    half = w.core.halves[1]
    w.reset(1, ResetCode.CANCELLED)
    if not gate:
        assert (half.state, w.resets) == (SenderState.CANCEL_WAIT, {})
        assert w.sent(5) == [ChannelControl(1), SentUnreliable(1)]
        w.give(5, AckNackUnreliable((0, 1)))
    assert half.state is SenderState.LOST
    assert w.resets == {5: ResetCode.LOST}


@pytest.mark.rule("AQ-50", "E-27")
def test_aq50_a_sender_that_was_finished_is_torn_down_by_its_reset_alone(wire: Callable[..., Wire]) -> None:
    """ClosedChannelLost is for the side that minted the channel, which is the peer here."""
    w = wire(client=False)
    w.give(w.uni(), Message(0, 0, (1,)), fin=True)
    w.give(5, AckReliable(()))
    message = w.receiver.take()
    (half,) = message.attachments
    assert isinstance(half, SenderHalf)
    half.finish()
    w.flush()
    message.discard(lost=True)
    w.flush()
    assert (half.state, w.resets) == (SenderState.LOST, {5: ResetCode.LOST})
    assert set(w.octets) == {0, 1, 5}


@pytest.mark.rule("AQ-50")
@pytest.mark.parametrize("gate", [True, False])
def test_aq50_tearing_down_a_receiver(wire: Callable[..., Wire], gate: bool) -> None:
    """By reset if the gate is open, else by closing; a claimed receiver that has ended loses its mailbox the same way."""
    w = wire(client=False)
    w.give(w.uni(), Message(16, 0, (1,)), fin=True)
    w.give(5, FinishSender(1), fin=True)
    w.give(9, AckReliable(()))
    w.give(w.uni(), Message(0, 0, (8, 16)), fin=True)
    if gate:
        w.give(13, SentUnreliable(0))
    w.reset(1, ResetCode.CANCELLED)
    assert w.resets == ({13: 2, 9: 2} if gate else {9: 2})
    assert w.sent(13)[1:] == ([] if gate else [CloseReceiver()])
    assert list(w.core.halves) == []


@pytest.mark.rule("AQ-51")
def test_aq51_dropping_handles(pair: Callable[..., Pair]) -> None:
    """A dropped sender is one that cancels, a dropped receiver one that closes; the other side hears so."""
    p = pair()
    sender, receiver = p.sender.send(b"", [Attach.RECEIVER, Attach.SENDER])
    p.run()
    remote_receiver, remote_sender = p.receiver.take().attachments
    assert isinstance(remote_receiver, ReceiverHalf)
    assert isinstance(remote_sender, SenderHalf)
    sender.cancel()  # type: ignore[union-attr]
    receiver.close()  # type: ignore[union-attr]
    p.wait(3)
    assert remote_receiver.state is ReceiverState.CANCELLED
    assert remote_sender.state is SenderState.RECEIVER_CLOSED


def test_the_tables_have_no_way_out_of_an_end() -> None:
    ends = {
        SenderState.FINISHED,
        SenderState.RECEIVER_CLOSED,
        SenderState.CANCELLED,
        SenderState.LOST,
        SenderState.CONNECTION_LOST,
    }
    assert {state for state, _ in SENDER} == set(SenderState) - ends
    for state in set(SenderState) - ends:
        assert SENDER[state, SenderInput.LOST] is SenderState.LOST
        assert SENDER[state, SenderInput.CONNECTION_CLOSED] in ends
    closing = {ReceiverState.UNATTACHED, ReceiverState.OPEN, ReceiverState.FINISHING, ReceiverState.CLOSE_WAIT}
    assert {state for state, _ in RECEIVER} == closing
    for receiving in closing:
        assert RECEIVER[receiving, ReceiverInput.LOST] is ReceiverState.LOST
        assert RECEIVER[receiving, ReceiverInput.CONNECTION_CLOSED] not in closing


def test_a_channel_ended_before_its_control_stream_was_written_was_never_there(wire: Callable[..., Wire]) -> None:
    w = wire(client=False)
    w.core.receive_stream_data(w.uni(), Message(8, 0).encode(), True, w.now)
    w.give(w.uni(), ClosedChannelLost(8), fin=True)
    assert set(w.octets) == {0, 1}
    assert w.resets == {}
    w.give(w.uni(), Message(16, 0), fin=True)
    assert w.sent(5) == [ChannelControl(16)]


def test_small_windows_still_finish(pair: Callable[..., Pair]) -> None:
    p = pair(client=AqueductConfig(window=1), server=AqueductConfig(mailbox=1))
    for _ in range(3):
        p.sender.send(b"x")
        p.wait(0.06)
        if p.receiver.mailbox:
            p.receiver.take()
    p.sender.finish()
    p.wait(3)
    assert p.sender.state is SenderState.FINISHED
    assert p.receiver.state is ReceiverState.FINISHED


@pytest.mark.rule("AQ-50", "AQ-56")
@pytest.mark.parametrize("end", ["closed", "nacked", "receiver lost", "cancelled, then lost", "connection lost"])
def test_what_is_not_acked_is_only_denied_if_it_is_sure(wire: Callable[..., Wire], end: str) -> None:
    """CloseReceiver and a nack say that a message was not processed; a receiver that is lost, or out of reach, may have processed it."""
    w = attached(wire)
    w.sender.send(b"", token="acked")
    w.sender.send(b"", token="a")
    w.sender.send(b"", mode=Mode.UNRELIABLE, token="b")
    w.flush()
    w.give(1, AckReliable((1,)))
    match end:
        case "closed":
            w.give(1, CloseReceiver(), fin=True)
        case "nacked":
            w.give(1, AckNackUnreliable((0, 1)))
        case "receiver lost":
            w.reset(1, 2)
        case "cancelled, then lost":
            w.sender.cancel()
            w.flush()
            w.reset(1, 2)
        case _:
            w.events += w.core.connection_lost(0, "", w.now)
    unknown = {"closed": False, "nacked": False}.get(end)
    told = ["b"] if end == "nacked" else ["a", "b"]
    assert [(e.tokens, e.delivered) for e in w.events if isinstance(e, Settled)] == [(["acked"], True), (told, unknown)]
