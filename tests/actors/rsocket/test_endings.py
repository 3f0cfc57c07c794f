"""What is left behind by ends and by mistakes: no dead letter, no actor, no stream, and no more octets than may wait."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.rsocket import (
    COMPOSITE,
    ApplicationError,
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    Interaction,
    LeaseGrant,
    Payload,
    Reconnect,
    Request,
    RequestCanceled,
    ServerConfig,
)
from levada.framework import ActorSystem
from levada.framework.errors import LevadaError
from levada.transports.carriers import MemoryConfig

from .conftest import below, connect, serve
from .test_cancellation import hold
from .test_requests import pair


async def handler(request: Request) -> Any:
    async def numbers() -> AsyncIterator[bytes]:
        for number in range(100_000):
            yield b"%d" % number

    match request.data:
        case b"channel":
            return request.payloads
        case b"stream":
            return numbers()
        case b"slow" if request.kind is Interaction.REQUEST_RESPONSE:
            await trio.sleep_forever()
    return request.payload


async def use(peer: ConnectedPeer, kind: bytes) -> None:
    """Be in the middle of something until the connection ends."""
    try:
        match kind:
            case b"stream":
                async with await peer.request_stream(kind, window=2) as receiver:
                    async for _ in receiver:
                        pass
            case b"channel":
                sender, receiver = await peer.request_channel(kind, window=2)
                async with trio.open_nursery() as nursery, sender, receiver:

                    @nursery.start_soon
                    async def back() -> None:
                        async for _ in receiver:
                            pass

                    while True:
                        await sender.send(b"more")
            case _:
                while True:
                    await peer.fire_and_forget(kind)
                    await peer.request_response(kind)
    except* LevadaError:
        pass


@pytest.mark.loopback
@pytest.mark.parametrize("end", ["client closes", "server closes", "abort", "cut", "cancel", "kill"])
@pytest.mark.parametrize("carrier", ["memory://desk", "tcp://127.0.0.1:0", "ws://127.0.0.1:0"])
async def test_no_end_makes_a_dead_letter(carrier: str, end: str) -> None:
    for turns in range(0, 60, 7):
        async with ActorSystem() as system:
            with trio.CancelScope() as scope:
                async with (
                    trio.open_nursery() as nursery,
                    serve(
                        system, f"rsocket+{carrier}", handler, config=ServerConfig(core=CoreConfig(drain_timeout=0))
                    ) as listener,
                    connect(
                        system,
                        listener.url,
                        config=ClientConfig(core=CoreConfig(metadata_mime_type=COMPOSITE, drain_timeout=0)),
                    ) as peer,
                ):
                    for kind in (b"stream", b"channel", b"slow", b"echo", b"stream"):
                        nursery.start_soon(use, peer, kind)
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    match end:
                        case "client closes":
                            await peer.aclose()
                        case "server closes":
                            await listener.aclose()
                        case "abort":
                            peer.abort()
                        case "cut":
                            peer.drop_carrier()
                        case "cancel":
                            scope.cancel()
                        case "kill":
                            below(peer).ref.kill()
                    await peer.terminated()
        statistics = system.statistics()
        assert (statistics.dead_letters, statistics.actors, statistics.failures) == (0, 0, 0)


async def test_requests_that_cannot_be_sent_leave_no_actor() -> None:
    wrong: Any = Payload("text")  # type: ignore[arg-type]
    async with pair(None) as (peer, _, system):
        actors = None
        for _ in range(5):
            for request in (peer.request_response, peer.request_stream, peer.request_channel):
                with pytest.raises(TypeError, match="wanted bytes"):
                    await request(wrong)
            actors = actors or system.statistics().actors
            assert system.statistics().actors == actors
        assert peer.statistics().open_streams == 0


async def test_metadata_waits_for_room() -> None:
    """A peer that does not read makes pushes wait, as it does requests."""
    async with pair(
        None, server=ServerConfig(carrier=MemoryConfig(window=1000)), client=ClientConfig(high_watermark=5000)
    ) as (peer, _, _system):
        link = hold(peer)
        pushed = 0
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def push() -> None:
                    nonlocal pushed
                    while True:
                        await peer.metadata_push(bytes(1000))
                        pushed += 1

                await wait_all_tasks_blocked()
                scope.cancel()
        assert 0 < pushed < 100  # the carrier itself keeps 64 KiB
        link.release()


@pytest.mark.parametrize(
    "error", [ApplicationError("long", data=bytes(1 << 24)), ApplicationError("odd", code=0x205)], ids=str
)
async def test_an_error_that_cannot_be_sent(error: ApplicationError, caplog: pytest.LogCaptureFixture) -> None:
    """The requester is told that much, and the handler's side logs why."""

    async def fail(_: Request) -> None:
        raise error

    async with pair(fail) as (peer, listener, system):
        with caplog.at_level(logging.ERROR, "levada"), pytest.raises(RequestCanceled):
            await peer.request_response(b"")
        await wait_all_tasks_blocked()
        assert system.statistics().failures == 1
        assert listener.peers[0].statistics().open_streams == 0


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "policy"])
async def test_leases_while_the_carrier_is_down(fixed: bool, autojump_clock: MockClock) -> None:
    """RS-103: one that runs out meanwhile is renewed when there is a carrier again."""
    grant = LeaseGrant(ttl=1.0, n=1)
    core = CoreConfig(resume=True, resume_timeout=30.0)
    client = ClientConfig(core=core, lease=LeaseGrant(), redial=Reconnect(initial_backoff=5.0, jitter=0.0))
    server = ServerConfig(core=core, lease=grant if fixed else lambda peer: grant)
    async with pair(lambda request: request.payload, client=client, server=server) as (peer, _, system):
        for data in (b"1", b"2"):
            assert (await peer.request_response(data)).data == data
        peer.drop_carrier()
        await trio.sleep(3)
        for data in (b"3", b"4", b"5"):
            assert (await peer.request_response(data)).data == data
        assert peer.statistics().sessions_resumed == 1
        assert system.statistics().failures == 0
