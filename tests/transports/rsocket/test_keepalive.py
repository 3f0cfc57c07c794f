"""Keepalive and silence (RS-105 to RS-111)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.rsocket import ErrorCode, Payload
from levada.transports.rsocket.events import (
    ConnectionEnded,
    EndReason,
    KeepaliveReceived,
    PeerFellSilent,
    SessionSuspended,
    StreamFailed,
)
from levada.transports.rsocket.frames import ErrorFrame, KeepaliveFrame, SetupFrame

from .conftest import Feed, Make, Pair, Sent

ASK = KeepaliveFrame(respond=True, position=0)


@pytest.mark.rule("RS-105")
def test_rs105_the_client_sends_keepalives_at_its_interval(pair: Pair, sent: Sent) -> None:
    """KEEPALIVE with R at the interval of SETUP; a server sends one when the application asks for it."""
    link = pair(keepalive_interval=0.5, max_lifetime=30.0)
    for now in (0.5, 1.0, 1.5):
        assert link.client.next_deadline() == now
        assert link.client.handle_timeout(now - 0.1) == []
        assert sent(link.client) == []
        assert link.client.handle_timeout(now) == []
        assert sent(link.client) == [ASK]
    assert link.server.next_deadline() == 30.0
    link.server.send_keepalive(b"you there?")
    assert link.to_client() == []
    assert link.to_server() == [KeepaliveReceived(b"you there?")]


@pytest.mark.rule("RS-106")
def test_rs106_the_answer_has_the_same_data(pair: Pair, feed: Feed, sent: Sent) -> None:
    """R set causes a KEEPALIVE with R clear and the same data; R clear causes nothing. Without resumption the position is 0."""
    link = pair()
    link.client.send_request_response(Payload(), 0.0)
    link.client.send_keepalive(b"data")
    link.to_server()
    assert sent(link.server) == [KeepaliveFrame(False, 0, b"data")]
    assert feed(link.server, KeepaliveFrame(False, 99, b"x")) == [KeepaliveReceived(b"x")]
    assert sent(link.server) == []


@pytest.mark.rule("RS-107")
@pytest.mark.rule("RS-110")
def test_rs107_rs110_a_silent_peer(pair: Pair, sent: Sent) -> None:
    """Nothing for the lifetime: ERROR[CONNECTION_ERROR] and close, on the server by the client's number too."""
    link = pair(keepalive_interval=5.0, max_lifetime=12.0)
    link.client.send_request_response(Payload(), 0.0)
    link.settle()
    for core in (link.client, link.server):
        while (deadline := core.next_deadline()) is not None and deadline < 12.0:
            assert core.handle_timeout(deadline) == []
        assert deadline == 12.0
        core.data_to_send(0.0)
        *streams, end = core.handle_timeout(12.0)
        assert end == ConnectionEnded(EndReason.TIMED_OUT, ErrorCode.CONNECTION_ERROR, "nothing heard for the lifetime")
        assert len(streams) == 1
        assert sent(core)[-1] == ErrorFrame(0, ErrorCode.CONNECTION_ERROR, b"nothing heard for the lifetime")


@pytest.mark.rule("RS-107")
@pytest.mark.parametrize("octets", [b"\0", bytes.fromhex("00000a 00000063 2000 00000001")])
def test_rs107_whatever_comes_is_a_sign_of_life(pair: Pair, octets: bytes) -> None:
    """Any frame counts, not just KEEPALIVE; so does a part of one, as a large frame takes its time."""
    link = pair(keepalive_interval=100.0, max_lifetime=12.0)
    link.client.receive_data(octets, 10.0)
    assert link.client.next_deadline() == 22.0


@pytest.mark.rule("RS-107")
def test_rs107_a_side_that_did_not_read_does_not_judge(pair: Pair) -> None:
    """While this side does not take octets, silence says nothing about the peer."""
    link = pair(keepalive_interval=100.0, max_lifetime=12.0)
    link.client.touch(11.0)
    link.client.touch(5.0)
    assert link.client.handle_timeout(12.0) == []
    assert link.client.next_deadline() == 23.0


@pytest.mark.rule("RS-107")
@pytest.mark.rule("RS-111")
def test_rs107_rs111_or_the_application_decides(pair: Pair) -> None:
    """Closing is the application's choice: the core can report the silence instead, once for each lifetime."""
    link = pair(keepalive_interval=100.0, max_lifetime=12.0, close_when_silent=False)
    assert link.client.handle_timeout(12.0) == [PeerFellSilent(12.0)]
    assert link.client.handle_timeout(12.0) == []
    assert link.client.next_deadline() == 24.0
    assert link.client.handle_timeout(24.0) == [PeerFellSilent(24.0)]
    link.client.receive_data(b"\0", 25.0)
    assert link.client.next_deadline() == 37.0


@pytest.mark.rule("RS-107")
def test_rs107_with_resumption_the_carrier_is_given_up(pair: Pair, sent: Sent) -> None:
    """The resume path instead of an ERROR, which would end the session."""
    link = pair(keepalive_interval=100.0, max_lifetime=12.0, resume=True, resume_timeout=60.0)
    assert link.client.handle_timeout(12.0) == [SessionSuspended(72.0, "the peer is silent")]
    assert sent(link.client) == []


def test_keepalives_need_a_live_connection(core: Make, feed: Feed, setup: Callable[..., SetupFrame]) -> None:
    made = core(client=False)
    feed(made, setup())
    with pytest.raises(LocalProtocolError):
        made.send_keepalive()
    assert made.next_deadline() is None
    assert made.handle_timeout(1e9) == []
    assert not any(isinstance(event, StreamFailed) for event in made.close(ErrorCode.CONNECTION_ERROR, "", 0.0))
