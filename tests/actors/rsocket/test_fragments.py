"""Large payloads on a slow carrier: with `fragment_size` other requests and KEEPALIVE do not wait for them, in both dialects (RS-70, RS-82)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from levada.actors.rsocket import ClientConfig, CoreConfig, Request, ServerConfig
from levada.framework import ActorSystem
from levada.framework.errors import ConnectionLost
from levada.transports.carriers import ByteStream, MemoryConfig, dial
from levada.transports.rsocket import LeaseGrant, Payload
from levada.transports.rsocket.frames import FrameType, RequestFrame

from .conftest import below, connect, serve
from .test_resumption import BACK, HELLO

SLOW = MemoryConfig(latency=0.01, window=8_000)  # 400 kB/s
SIZE = 1_000_000
CORE = CoreConfig(fragment_size=16_384, keepalive_interval=0.5, max_lifetime=1.0)
LONGEST = 0.35  # seconds for the carrier's queue of 64 KiB, the 32 KiB and a fragment that it gets, and the round trip
TAKES = SIZE / 400_000

pytestmark = pytest.mark.timeout(30)
DIALECTS = pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])


async def handler(request: Request) -> Any:
    if request.data == b"items":
        return items()
    return bytes(SIZE) if request.data == b"large" else str(len(request.data)).encode()


async def items() -> AsyncIterator[bytes]:
    yield bytes(SIZE // 2)
    yield bytes(SIZE // 2)


@DIALECTS
@pytest.mark.parametrize("kind", ["answer", "items", "request"])
async def test_small_requests_do_not_wait_for_a_large_payload(
    autojump_clock: MockClock, dialect: str, kind: str
) -> None:
    """Nor does KEEPALIVE: the peer, which takes a second of silence for an end, stays."""
    waited: list[float] = []
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler, config=ServerConfig(core=CORE, carrier=SLOW)) as listener,
        connect(system, listener.url, config=ClientConfig(core=CORE, carrier=SLOW)) as peer,
        trio.open_nursery() as nursery,
    ):
        began = trio.current_time()

        async def large() -> None:
            if kind == "answer":
                assert len((await peer.request_response(b"large")).data) == SIZE
            elif kind == "items":
                assert [len(item.data) async for item in await peer.request_stream(b"items")] == [SIZE // 2] * 2
            else:
                sender, receiver = await peer.request_channel(bytes(SIZE))
                sender.finish_nowait()
                assert [item.data async for item in receiver] == [str(SIZE).encode()]
            assert trio.current_time() - began == pytest.approx(TAKES, abs=0.5)
            nursery.cancel_scope.cancel()

        async def small() -> None:
            while True:
                await trio.sleep(0.2)
                asked = trio.current_time()
                assert (await peer.request_response(b"small")).data == b"5"
                waited.append(trio.current_time() - asked)

        nursery.start_soon(large)
        nursery.start_soon(small)
    assert len(waited) > 3
    assert max(waited) < LONGEST


@DIALECTS
async def test_large_payloads_wait_for_each_other(autojump_clock: MockClock, dialect: str) -> None:
    """However many there are, this side queues little more than one of them."""
    most = 0
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler, config=ServerConfig(core=CORE, carrier=SLOW)) as listener,
        connect(system, listener.url, config=ClientConfig(core=CORE, carrier=SLOW, window=64)) as peer,
        trio.open_nursery() as nursery,
    ):
        got: list[int] = []

        async def ask(number: int) -> None:
            if number % 2:
                got.append(len((await peer.request_response(b"large")).data))
            else:
                got.append(sum([len(item.data) async for item in await peer.request_stream(b"items")]))
            if len(got) == 4:
                nursery.cancel_scope.cancel()

        for number in range(4):
            nursery.start_soon(ask, number)
        while True:
            await trio.sleep(0.05)
            most = max(most, below(listener.peers[0]).core.statistics().bytes_unsent)
    assert got == [SIZE] * 4
    assert SIZE // 2 < most < SIZE + ServerConfig().high_watermark


@DIALECTS
async def test_closing_waits_for_the_rest_of_an_answer(autojump_clock: MockClock, dialect: str) -> None:
    core = attrs.evolve(CORE, keepalive_interval=20.0, max_lifetime=90.0, drain_timeout=30.0)  # nothing else wakes it
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler, config=ServerConfig(core=core, carrier=SLOW)) as listener,
        connect(system, listener.url, config=ClientConfig(core=core, carrier=SLOW)) as peer,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            assert len((await peer.request_response(b"large")).data) == SIZE

        nursery.start_soon(ask)
        await trio.sleep(0.5)
        began = trio.current_time()
        await listener.aclose()
        assert trio.current_time() - began == pytest.approx(TAKES - 0.5, abs=0.5)


@DIALECTS
async def test_a_large_request_that_waited_for_a_lease_goes_out_whole(autojump_clock: MockClock, dialect: str) -> None:
    core = CoreConfig(fragment_size=16_384)
    server = ServerConfig(core=core, carrier=SLOW, lease=LeaseGrant(ttl=2.0, n=1))
    client = ClientConfig(core=core, carrier=SLOW, lease=LeaseGrant(ttl=2.0, n=1))
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler, config=server) as listener,
        connect(system, listener.url, config=client) as peer,
    ):
        began = trio.current_time()
        assert (await peer.request_response(b"small")).data == b"5"
        with trio.fail_after(10.0):
            assert (await peer.request_response(bytes(SIZE))).data == str(SIZE).encode()
        assert trio.current_time() - began == pytest.approx(2.0 + TAKES, abs=0.5)


async def test_an_answer_goes_on_over_the_next_carrier(autojump_clock: MockClock) -> None:
    core = CoreConfig(fragment_size=16_384, resume=True)
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", handler, config=ServerConfig(core=core, carrier=SLOW)) as listener,
        connect(system, listener.url, config=ClientConfig(core=core, carrier=SLOW)) as peer,
        trio.open_nursery() as nursery,
    ):
        got: list[int] = []

        async def ask() -> None:
            got.append(len((await peer.request_response(b"large")).data))

        nursery.start_soon(ask)
        for _ in range(3):
            await trio.sleep(0.5)
            wire: Any = below(peer).carrier
            wire.abort()
    assert got == [SIZE]
    assert peer.statistics().sessions_resumed == 3


async def test_an_answer_goes_on_if_the_client_is_back_before_it_was_missed(autojump_clock: MockClock) -> None:
    """The carrier before takes nothing and has not ended, as after a change of the client's network."""
    core = CoreConfig(metadata_mime_type="text/plain", fragment_size=16_384, resume=True)
    hello, back = HELLO.encode(), BACK.encode()
    asked = RequestFrame(type=FrameType.REQUEST_RESPONSE, stream_id=1, payload=Payload(b"large")).encode()
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", handler, config=ServerConfig(core=core, carrier=SLOW)),
        dial("memory://desk", SLOW) as before,
        dial("memory://desk", SLOW) as carrier,
    ):
        assert isinstance(before, ByteStream)
        assert isinstance(carrier, ByteStream)
        for octets in (hello, asked):
            await before.send_all(len(octets).to_bytes(3) + octets)
        await trio.sleep(1.0)
        await carrier.send_all(len(back).to_bytes(3) + back)
        got = 0
        with trio.move_on_after(2 * TAKES):
            while got < SIZE:
                got += len(await carrier.receive_some())
        before.abort()
    assert got >= SIZE


@DIALECTS
async def test_a_cancelled_answer_frees_the_carrier(autojump_clock: MockClock, dialect: str) -> None:
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler, config=ServerConfig(core=CORE, carrier=SLOW)) as listener,
        connect(system, listener.url, config=ClientConfig(core=CORE, carrier=SLOW)) as peer,
    ):
        with trio.move_on_after(0.5):
            await peer.request_response(b"large")
        began = trio.current_time()
        assert len((await peer.request_response(b"large")).data) == SIZE
        assert trio.current_time() - began < TAKES + LONGEST


@DIALECTS
async def test_a_request_that_waits_for_its_turn_hears_of_the_end(autojump_clock: MockClock, dialect: str) -> None:
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler, config=ServerConfig(core=CORE, carrier=SLOW)) as listener,
        connect(system, listener.url, config=ClientConfig(core=CORE, carrier=SLOW)) as peer,
        trio.open_nursery() as nursery,
    ):

        async def late() -> None:
            with pytest.raises(ConnectionLost):
                await peer.request_channel(bytes(SIZE))

        sender, receiver = await peer.request_channel(bytes(SIZE))
        nursery.start_soon(late)
        await trio.sleep(0.5)
        wire: Any = below(peer).carrier
        wire.stream.link.cut("somebody dug")
        await peer.terminated()
        sender.cancel()
        receiver.close()
