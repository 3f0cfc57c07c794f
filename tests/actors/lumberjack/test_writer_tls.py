"""The writer over TLS: whom it trusts, what it shows, and what ends a connection."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs
import pytest
import trio

from levada.actors.lumberjack.balance import HostConfig
from levada.actors.lumberjack.writer import WriterStatistics, connect
from levada.framework import ActorSystem
from levada.transports.carriers import TlsConfig, listen
from levada.transports.lumberjack import WriterConfig

pytestmark = pytest.mark.loopback

Readers = Callable[..., AbstractAsyncContextManager[Any]]
ANY = "tls://127.0.0.1:0"
CONFIG = WriterConfig(initial_backoff=0.01, linger=0.01)


async def try_to_send(url: str, tls: TlsConfig, *, faults: int = 0) -> WriterStatistics:
    """Send one event and wait until it is acked, or until there were so many faults."""
    async with (
        ActorSystem() as system,
        connect(system, url, config=CONFIG, hosts=HostConfig(tls=tls), close_timeout=0.0) as writer,
    ):
        await writer.send({"n": 1})
        if not faults:
            await writer.flush()
        while writer.statistics().faults < faults:  # the counter tells nobody; each turn lets the writer go on
            await trio.lowlevel.checkpoint()
        return writer.statistics()


@pytest.mark.rule("LJ-60")
async def test_lj60_chain_and_name_are_verified(
    authorities: tuple[Any, Any], small_reader: Readers, caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-60: the writer verifies chain and name (SAN, no CN fallback); `verify=False` must be spelt out."""
    authority, other = authorities
    good = TlsConfig(certificate=authority.issue("good"))
    async with small_reader(ANY, good) as reader:
        assert (await try_to_send(reader.url, TlsConfig(ca=authority.ca))).events_acked == 1
        assert (await try_to_send(reader.url, TlsConfig(ca=other.ca), faults=2)).events_acked == 0
        assert (await try_to_send(reader.url, TlsConfig(), faults=2)).events_acked == 0
        assert (await try_to_send(reader.url, TlsConfig(verify=False))).events_acked == 1
        assert len(reader.events) == 2
    for certificate in (authority.issue("127.0.0.1", "logs.example.org"), authority.issue("old", hours=-1)):
        async with small_reader(ANY, TlsConfig(certificate=certificate)) as reader:
            statistics = await try_to_send(reader.url, TlsConfig(ca=authority.ca), faults=2)
            assert (statistics.events_acked, statistics.connects, reader.events) == (0, 0, [])
    assert "next attempt in" in caplog.text
    named = TlsConfig(certificate=authority.issue("named", "logs.example.org"))
    async with small_reader(ANY, named) as reader:
        tls = TlsConfig(ca=authority.ca, server_name="logs.example.org")
        assert (await try_to_send(reader.url, tls)).events_acked == 1


@pytest.mark.rule("LJ-61")
async def test_lj61_a_client_certificate_is_shown_if_there_is_one(
    authorities: tuple[Any, Any], small_reader: Readers
) -> None:
    """LJ-61: with client certificates required, only a writer with one of the reader's authorities gets through."""
    authority, other = authorities
    serving = TlsConfig(certificate=authority.issue("good"), ca=authority.ca, client_certificates="required")
    trusting = TlsConfig(ca=authority.ca)
    async with small_reader(ANY, serving) as reader:
        shown = attrs.evolve(trusting, certificate=authority.issue("client"))
        assert (await try_to_send(reader.url, shown)).events_acked == 1
        wrong = attrs.evolve(trusting, certificate=other.issue("client"))
        assert (await try_to_send(reader.url, wrong, faults=2)).events_acked == 0
        assert (await try_to_send(reader.url, trusting, faults=2)).events_acked == 0
        assert len(reader.events) == 1


@pytest.mark.rule("LJ-62")
@pytest.mark.parametrize("writer_has_tls", [True, False])
async def test_lj62_tls_and_plain_do_not_meet(
    writer_has_tls: bool, authorities: tuple[Any, Any], small_reader: Readers
) -> None:
    """LJ-62: no STARTTLS: plain octets on a TLS port, and TLS on a plain one, end that connection, and nothing is taken for acked."""
    authority = authorities[0]
    reading: Any = (
        ("tcp://127.0.0.1:0", None) if writer_has_tls else (ANY, TlsConfig(certificate=authority.issue("good")))
    )
    async with listen(*reading) as listener:
        url = listener.url.replace(*(("tcp", "lumberjack+tls") if writer_has_tls else ("tls", "lumberjack")))

        async def accept() -> None:
            while True:
                stream: Any = await listener.accept()
                await stream.receive_some()
                stream.abort()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            statistics = await try_to_send(url, TlsConfig(ca=authority.ca), faults=2)
            assert (statistics.events_acked, statistics.unacked) == (0, 1)
            nursery.cancel_scope.cancel()


@pytest.mark.rule("LJ-63")
async def test_lj63_an_end_without_close_notify_is_a_fault_and_all_comes_again(
    authorities: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-63: the writer sends again what was not acked, however the reader's end came."""
    authority = authorities[0]
    async with listen(ANY, TlsConfig(certificate=authority.issue("good"))) as listener:

        async def cut_off_then_ack() -> None:
            for ends in (b"", b"2A\x00\x00", None):
                stream: Any = await listener.accept()
                await stream.receive_some()
                if ends is None:
                    await stream.send_all(b"2A\x00\x00\x00\x01")
                    await stream.aclose()
                    return
                if ends:
                    await stream.send_all(ends)
                    await stream.flush()
                stream.abort()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut_off_then_ack)
            statistics = await try_to_send("lumberjack+" + listener.url, TlsConfig(ca=authority.ca))
    assert (statistics.events_acked, statistics.events_sent, statistics.connects) == (1, 3, 3)


async def test_a_reader_that_never_answers_the_handshake_is_left(authorities: tuple[Any, Any]) -> None:
    async with listen("tcp://127.0.0.1:0") as listener:
        tls = TlsConfig(ca=authorities[0].ca, handshake_timeout=0.05)
        statistics = await try_to_send(listener.url.replace("tcp", "lumberjack+tls"), tls, faults=2)
        assert statistics.connects == 0
