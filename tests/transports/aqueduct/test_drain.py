"""A drain: what is open ends, then the connection ends by itself."""

from __future__ import annotations

from collections.abc import Callable

from levada.transports.aqueduct import (
    AqueductConfig,
    Attach,
    CloseConnection,
    ConnectionEnded,
    ConnectionState,
    ReceiverState,
    SenderState,
)
from levada.transports.aqueduct.frames import VERSION, ConnectionControl

from .conftest import Pair, Wire, state_of

DRAIN = AqueductConfig(drain_timeout=4.0)


def test_a_client_ends_when_everything_has_arrived(pair: Callable[..., Pair]) -> None:
    """Its entrypoint is finished, and what it sent is acked, before the connection closes; the close lets the last bytes arrive."""
    p = pair(client=DRAIN)
    p.sender.send(b"last")
    p.client.events += p.client.core.drain(p.now)
    assert p.client.core.state is ConnectionState.DRAINING
    p.wait(1.0)
    assert p.receiver.take().payload == b"last"
    assert (p.sender.state, state_of(p.receiver)) == (SenderState.FINISHED, ReceiverState.FINISHED)
    assert p.client.events[-1] == ConnectionEnded(0, "", closed_here=True)
    assert p.client.closed == CloseConnection(0, "", drain_timeout=4.0)
    assert p.client.core.next_deadline() is None


def test_a_channel_that_stays_open_holds_up_for_the_drain_time_only(pair: Callable[..., Pair]) -> None:
    p = pair(client=DRAIN)
    (answers,) = p.sender.send(b"", [Attach.SENDER])
    p.client.events += p.client.core.drain(p.now)
    p.wait(3.9)
    assert p.client.closed is None
    p.client.events += p.client.core.drain(p.now)  # changes nothing
    p.wait(0.2)
    assert p.client.events[-1] == ConnectionEnded(0, "", closed_here=True)
    assert p.client.closed == CloseConnection(0, "")
    assert state_of(answers) is ReceiverState.CONNECTION_LOST


def test_a_channel_ends_while_the_connection_drains(pair: Callable[..., Pair]) -> None:
    p = pair(client=DRAIN)
    (answers,) = p.sender.send(b"", [Attach.SENDER])
    p.wait(0.1)
    p.client.events += p.client.core.drain(p.now)
    p.wait(1.0)
    (other,) = p.receiver.take().attachments
    other.send(b"answer")  # type: ignore[union-attr]
    other.finish()  # type: ignore[union-attr]
    p.wait(1.0)
    assert answers.take().payload == b"answer"  # type: ignore[union-attr]
    assert state_of(answers) is ReceiverState.FINISHED
    assert p.client.closed is not None
    assert 2.5 < p.client.closed.drain_timeout < 3.0


def test_a_server_closes_the_entrypoint(pair: Callable[..., Pair]) -> None:
    p = pair(server=DRAIN)
    p.sender.send(b"unread")
    p.run()
    p.server.events += p.server.core.drain(p.now)
    p.wait(0.1)
    assert (state_of(p.receiver), state_of(p.sender)) == (ReceiverState.CLOSED, SenderState.RECEIVER_CLOSED)
    assert p.server.closed == CloseConnection(0, "", drain_timeout=4.0)


def test_who_waits_for_room_sends_on(pair: Callable[..., Pair]) -> None:
    """An owner that was refused has more to send: finishing the entrypoint is left to it."""
    p = pair(client=AqueductConfig(window=1))
    p.sender.send(b"one")
    assert not p.sender.has_room()
    p.client.events += p.client.core.drain(p.now)
    p.wait(0.1)
    assert p.client.closed is None
    p.sender.send(b"two")
    p.sender.finish()
    p.wait(0.1)
    assert p.client.closed is not None
    assert [message.payload for message in p.receiver.mailbox] == [b"one", b"two"]


def test_channels_in_the_background_hold_up_while_something_is_unsettled(pair: Callable[..., Pair]) -> None:
    p = pair(client=DRAIN)
    (background,) = p.sender.send(b"", [Attach.RECEIVER])
    p.client.core.background.add(background)
    p.wait(0.1)
    background.send(b"unsettled")  # type: ignore[union-attr]
    p.client.events += p.client.core.drain(p.now)
    p.flush(p.client)
    assert p.client.closed is None
    p.wait(0.1)
    assert p.client.closed is not None
    assert state_of(background) is SenderState.CONNECTION_LOST


def test_a_drain_before_the_peer_has_greeted(wire: Callable[..., Wire]) -> None:
    """What a client has sent still arrives if the server greets in time; a server accepts and closes its entrypoint."""
    w = wire(client=True, greet=False, config=DRAIN)
    w.core.handshake_completed(1170)
    w.sender.send(b"early")
    w.flush()
    w.core.drain(w.now)
    w.wait(1.0)
    assert (w.closed, w.core.state) == (None, ConnectionState.GREETING)
    w.give(0, VERSION, ConnectionControl())
    assert (w.closed, w.core.state) == (None, ConnectionState.DRAINING)
    w.wait(3.0)
    assert w.closed == CloseConnection(0, "")
    s = wire(client=False, greet=False)
    s.core.handshake_completed(1170)
    s.core.drain(s.now)
    s.give(s.bidi(), VERSION, ConnectionControl())
    s.core.accept()
    assert state_of(s.receiver) is ReceiverState.CLOSED
    s.flush()
    assert s.closed is None
    s.give(1, fin=True)
    assert s.closed == CloseConnection(0, "", drain_timeout=5.0)


def test_a_server_waits_until_the_client_knows_that_its_entrypoint_is_closed(pair: Callable[..., Pair]) -> None:
    """What the client sent before that on another channel arrives. Source: AQ-44."""
    p = pair(server=DRAIN)
    (questions,) = p.sender.send(b"", [Attach.RECEIVER])
    p.run()
    (asked,) = p.receiver.take().attachments
    p.server.core.background.add(asked)
    p.server.events += p.server.core.drain(p.now)
    p.flush(p.server)
    assert p.server.closed is None
    questions.send(b"crossing")  # type: ignore[union-attr]
    p.run()
    assert asked.take().payload == b"crossing"  # type: ignore[union-attr]
    assert p.sender.state is SenderState.RECEIVER_CLOSED
    p.wait(0.1)
    assert p.server.closed is not None


def test_a_server_waits_no_longer_than_its_drain_for_a_client_that_says_nothing(wire: Callable[..., Wire]) -> None:
    s = wire(client=False, config=DRAIN)
    s.core.drain(s.now)
    s.wait(3.9)
    assert s.closed is None
    s.wait(0.2)
    assert s.closed == CloseConnection(0, "")


def test_a_drain_after_the_end_does_nothing(wire: Callable[..., Wire]) -> None:
    w = wire(client=True)
    w.core.close(0, "", w.now)
    assert w.core.drain(w.now) == []
    assert w.core.next_deadline() is None
