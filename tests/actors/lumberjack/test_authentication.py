"""Admission of writers: nothing of a writer reaches a sink before the hook admits it, and a refusal only closes."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.authentication import Authenticate, Authentication, Credentials, PeerRefused, Refused
from levada.actors.authenticators import CertificateNames
from levada.actors.lumberjack import Reader, Unit, serve
from levada.framework import Actor, ActorSystem, Identity, Limits, handles
from levada.framework.errors import ConnectionLost
from levada.framework.testing import Probe
from levada.transports.carriers import ByteStream, TlsConfig, dial
from levada.transports.lumberjack import encode_json, encode_window

WINDOW = encode_window(2, 1) + encode_json(2, 1, {"n": 1})
ACK = struct.pack(">2sI", b"2A", 1)


class Desk:
    """A reader with a hook that waits for `may`, and what its sinks saw."""

    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        self.asked: list[Credentials] = []
        self.sinks = 0
        self.units: list[Unit] = []
        self.may = trio.Event()
        self.answer: Identity | Refused = Identity("web-01")
        self.reader: Reader

    async def decide(self, asked: Credentials) -> Identity | Refused:
        self.asked.append(asked)
        await self.may.wait()
        return self.answer

    def sink(self) -> Actor[Unit]:
        self.sinks += 1
        return Shelf(self.units)


class Shelf(Actor[Unit]):
    units: list[Unit]

    @handles
    async def take(self, unit: Unit) -> object:
        self.units.append(unit)
        return None


@asynccontextmanager
async def desk(hook: Authenticate | Authentication | None = None) -> AsyncIterator[Desk]:
    async with ActorSystem() as system:
        made = Desk(system)
        async with serve(
            system, "lumberjack+memory://logs", made.sink, authenticate=hook or made.decide
        ) as made.reader:
            yield made


@asynccontextmanager
async def writer() -> AsyncIterator[ByteStream]:
    async with dial("memory://logs") as stream:
        yield cast("ByteStream", stream)


async def closed(stream: ByteStream) -> bool:
    try:
        return await stream.receive_some() == b""
    except ConnectionLost:
        return True


async def test_an_admitted_writer_is_known_to_the_sink() -> None:
    async with desk() as at, writer() as stream:
        await stream.send_all(WINDOW)
        await wait_all_tasks_blocked()
        [asked] = at.asked
        assert (asked.protocol, asked.listener, asked.info.peer) == ("lumberjack", at.reader.url, stream.info.local)
        assert (at.sinks, at.units) == (0, []), "nothing is handled before the decision"
        at.may.set()
        assert await stream.receive_some() == ACK
        await stream.send_all(WINDOW)
        assert await stream.receive_some() == ACK
        assert [unit.origin.identity for unit in at.units] == ["web-01", "web-01"]
        assert (at.sinks, at.reader.refused) == (1, 0)


async def test_a_silent_writer_is_admitted_before_its_first_byte() -> None:
    async with desk() as at, writer() as stream:
        at.may.set()
        await wait_all_tasks_blocked()
        await stream.send_all(WINDOW)
        assert await stream.receive_some() == ACK


async def test_without_a_hook_writers_have_no_name() -> None:
    units: list[Unit] = []

    async def take(unit: Unit) -> None:
        units.append(unit)

    async with ActorSystem() as system, serve(system, "lumberjack+memory://logs", take), writer() as stream:
        await stream.send_all(WINDOW)
        assert await stream.receive_some() == ACK
    assert units[0].origin.identity == ""


async def test_a_refused_writer_is_disconnected_counted_and_audited() -> None:
    async with desk() as at:
        audit = Probe(at.system)
        at.system.events.subscribe(PeerRefused, audit.ref)
        at.answer = Refused("Not today.")
        at.may.set()
        async with writer() as stream:
            await stream.send_all(WINDOW)
            assert await closed(stream)
            event = await audit.expect(PeerRefused)
            assert (event.protocol, event.address, event.reason) == ("lumberjack", stream.info.local, "Not today.")
        assert (at.sinks, at.units) == (0, [])
        assert (at.reader.refused, at.reader.statistics().connections_refused) == (1, 1)


async def test_a_decision_that_takes_too_long_is_a_refusal(autojump_clock: MockClock) -> None:
    async with desk() as at, writer() as stream:
        await stream.send_all(WINDOW * 1_000)
        began = trio.current_time()
        assert await closed(stream)
        assert (trio.current_time() - began, at.units, at.reader.refused) == (5.0, [], 1)


async def test_a_writer_that_leaves_gives_its_place_back() -> None:
    """One hook runs at a time, and the first writer's would wait forever."""
    units: list[Unit] = []

    async def take(unit: Unit) -> None:
        units.append(unit)

    asked: list[Credentials] = []

    async def decide(credentials: Credentials) -> Identity | Refused:
        asked.append(credentials)
        if len(asked) == 1:
            await trio.sleep_forever()
        return Identity("second")

    hook = Authentication(decide, at_once=1, timeout=10_000.0)
    async with ActorSystem() as system, serve(system, "lumberjack+memory://logs", take, authenticate=hook) as reader:
        async with writer():
            await wait_all_tasks_blocked()
            assert len(asked) == 1
        async with writer() as stream:
            await stream.send_all(WINDOW)
            assert await stream.receive_some() == ACK
        assert (units[0].origin.identity, reader.refused) == ("second", 0)


async def test_a_tenant_has_so_many_connections() -> None:
    async def decide(asked: Credentials) -> Identity | Refused:
        return Identity("web", limits=Limits(max_connections=1))

    async with desk(decide) as at:
        async with writer() as first:
            await first.send_all(WINDOW)
            assert await first.receive_some() == ACK
            async with writer() as second:
                assert await closed(second)
            assert at.reader.refused == 1
        await wait_all_tasks_blocked()
        async with writer() as third:
            await third.send_all(WINDOW)
            assert await third.receive_some() == ACK


async def test_the_end_of_the_reader_ends_the_hook() -> None:
    async with desk() as at, writer() as stream:
        await stream.send_all(WINDOW)
        await wait_all_tasks_blocked()
        await at.reader.aclose()
        assert await closed(stream)
    assert (at.units, at.reader.refused) == ([], 0)


@pytest.mark.loopback
async def test_writers_are_told_apart_by_their_certificates(authorities: Any) -> None:
    ours, _ = authorities
    serving = TlsConfig(certificate=ours.issue("reader"), ca=ours.ca, client_certificates="required")
    dialling = TlsConfig(ca=ours.ca, certificate=ours.issue("writer", "web-01.example.org"))
    units: list[Unit] = []

    async def take(unit: Unit) -> None:
        units.append(unit)

    async with (
        ActorSystem() as system,
        serve(
            system,
            "lumberjack+tls://127.0.0.1:0",
            take,
            carrier=serving,
            authenticate=CertificateNames({"DNS:*.example.org": None}),
        ) as reader,
    ):
        url = reader.url.removeprefix("lumberjack+")
        async with cast("Any", dial(url, dialling)) as stream:
            await stream.send_all(WINDOW)
            assert await stream.receive_some() == ACK
        other = attrs.evolve(dialling, certificate=ours.issue("other", "other.example.com"))
        async with cast("Any", dial(url, other)) as stream:
            assert await closed(stream)
        assert [unit.origin.identity for unit in units] == ["DNS:web-01.example.org"]
        assert reader.refused == 1
