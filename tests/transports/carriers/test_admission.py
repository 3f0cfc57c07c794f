"""Peers that are turned away: the limit of an address, and what is said about them."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from levada.framework.errors import CarrierError
from levada.transports.carriers import tcp, tls, unix, websocket
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.contracts import CloseReason
from levada.transports.carriers.tcp import TcpConfig
from levada.transports.carriers.tls import TlsConfig
from levada.transports.carriers.unix import UnixConfig
from levada.transports.carriers.websocket_config import WebSocketConfig


def test_addresses_of_one_host_count_together() -> None:
    admission = Admission("tcp://here:1", 2)
    first = admission.enter("2001:db8::1")
    assert first is not None
    assert admission.enter("2001:db8::ffff:2") is not None
    assert admission.enter("2001:db8::3") is None
    assert admission.enter("2001:db8:0:1::3") is not None
    assert admission.enter("192.0.2.1") is not None
    assert admission.enter("::ffff:192.0.2.1") is not None
    assert admission.enter("192.0.2.1") is None
    assert admission.enter("fe80::1%eth0") is not None
    first()
    assert admission.enter("2001:db8::3") is not None


async def test_one_line_for_many_that_are_turned_away(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    """The first at once, then how many more there were; nothing that a peer writes can forge another line."""
    admission = Admission("tls://here:1")
    for _ in range(1000):
        admission.turn_away("peer\n", "it said \x1b[31m\nERROR all is lost")
    await trio.sleep(10.0)
    admission.turn_away("peer", "plain octets")
    lines = [record.getMessage() for record in caplog.records]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert admission.refused == 1001
    assert lines[1] == "tls://here:1 turned peer away: plain octets (999 more since the last such line)"
    assert "\n" not in lines[0]
    assert "\x1b" not in lines[0]


async def test_only_a_handshake_that_the_peer_or_the_network_ended_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The warning says who ended it; a code only if there was one."""
    for reason in (
        CloseReason(0, "this side was done"),
        CloseReason(1, "no transport parameters within 10 s", lost=True),
        CloseReason(0x178, "No common ALPN protocols", lost=True),
        CloseReason(0x12A, by_peer=True),
    ):
        Admission("quic://here:1").ended_early("peer", reason)
    assert [record.getMessage() for record in caplog.records] == [
        "quic://here:1 turned peer away: its handshake was not finished: no transport parameters within 10 s",
        "quic://here:1 turned peer away: its handshake was not finished: No common ALPN protocols (code 0x178)",
        "quic://here:1 turned peer away: it broke its handshake off: no reason given (code 0x12a)",
    ]


@pytest.mark.loopback
async def test_only_so_many_of_one_address(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        tcp.listen("tcp://127.0.0.1:0", TcpConfig(max_connections_per_address=2)) as listener,
        tcp.dial(listener.url) as first,
        await listener.accept() as served,
        tcp.dial(listener.url),
        await listener.accept(),
    ):
        async with tcp.dial(listener.url) as third:
            with pytest.raises(CarrierError):
                while await third.receive_some():
                    pass
                raise CarrierError("it ended")
        assert listener.admission.refused == 1
        assert "2 connections of its address are open" in caplog.text
        await first.aclose()
        await served.aclose()
        async with tcp.dial(listener.url) as fourth, await listener.accept() as server:
            await server.send_all(b"hello")
            assert await fourth.receive_some() == b"hello"


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell who connects")
async def test_only_so_many_of_one_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One more is closed at once, by what the kernel says of its user; a place is free again when a connection has ended, or was cut off."""
    async with unix.listen(f"unix://{tmp_path}/desk", UnixConfig(max_connections_per_uid=2)) as listener:
        for _ in range(3):
            async with unix.dial(listener.url), unix.dial(listener.url) as second:
                first_served, second_served = await listener.accept(), await listener.accept()
                async with unix.dial(listener.url) as third:
                    assert await third.receive_some() == b""
                await second.aclose()
                await second_served.aclose()
                async with unix.dial(listener.url) as fourth, await listener.accept() as served:
                    await served.send_all(b"hello")
                    assert await fourth.receive_some() == b"hello"
                first_served.abort()
        assert listener.admission.refused == 3
        assert "2 connections of its user are open (max_connections_per_uid)" in caplog.text
        assert f"uid={os.getuid()}" in caplog.text


@pytest.mark.loopback
async def test_handshakes_that_stand_still_hold_places_of_their_own_address_only(
    authority: object, mock_clock: trio.testing.MockClock
) -> None:
    """Half-open connections count from the first octet of TCP on; those that end give their places back."""
    config = TlsConfig(
        certificate=authority.issue("server"),  # type: ignore[attr-defined]  # the conftest's
        tcp=TcpConfig(max_connections_per_address=3),
        handshake_timeout=60.0,
    )
    mock_clock.rate = 1.0
    async with tls.listen("tls://127.0.0.1:0", config) as listener:
        port = int(listener.url.rsplit(":", 1)[1])
        streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(5)]
        for refused, stream in enumerate(reversed(streams), 1):
            if refused == 3:
                assert listener.admission.refused == 2
                await trio.testing.wait_all_tasks_blocked()
                mock_clock.jump(60.0)
            try:
                assert await stream.receive_some() == b""
            except trio.BrokenResourceError:
                pass
            await stream.aclose()
        assert listener.admission.refused == 5
        trusting = TlsConfig(ca=authority.ca)  # type: ignore[attr-defined]
        async with tls.dial(listener.url, trusting), await listener.accept():
            pass


@pytest.mark.loopback
async def test_a_client_that_speaks_no_websocket_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    config = WebSocketConfig(tcp=TcpConfig(max_connections_per_address=1))
    async with websocket.listen("ws://127.0.0.1:0/", config) as listener:
        port = int(listener.url.rsplit(":", 1)[1].rstrip("/"))
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"GET /nowhere\x1b HTTP/1.0\r\n\r\n")
        while await stream.receive_some():
            pass
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert listener.admission.refused == 1
        assert "got no WebSocket" in caplog.text
        assert "\x1b" not in caplog.text
