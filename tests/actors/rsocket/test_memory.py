"""A connection that is over frees its memory by itself: what it held does not wait for the collector."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.authentication import Credentials, Refused
from levada.actors.rsocket import (
    COMPOSITE,
    ApplicationError,
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    Listener,
    Payload,
    Request,
)
from levada.framework import ActorSystem, Identity
from levada.framework.errors import LevadaError
from levada.transports.carriers import dial
from levada.transports.carriers.contracts import ByteStream

from .conftest import connect, serve

LARGE = 1000  # octets

Use = Callable[[ConnectedPeer, Listener, str], Awaitable[None]]


@contextmanager
def nothing_for_the_collector() -> Iterator[None]:
    """Fail if the block leaves objects of ours, or large buffers, in reference cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
    finally:
        gc.set_debug(0)
        gc.enable()
    left = list(gc.garbage)
    gc.garbage.clear()
    ours = sorted({type(each).__qualname__ for each in left if type(each).__module__.startswith("levada.")})
    large = [
        type(part).__name__
        for each in left
        for part in gc.get_referents(each)
        if isinstance(part, bytes | bytearray | memoryview) and sys.getsizeof(part) > LARGE
    ]
    left.clear()
    assert (ours, large) == ([], [])


async def handler(request: Request) -> Any:
    async def items() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(3000)

    async def wait_for_ever() -> AsyncIterator[bytes]:
        yield bytes(3000)
        await trio.sleep_forever()

    match request.data.rstrip(b"\0"):
        case b"channel":
            return request.payloads
        case b"stream":
            return items()
        case b"wait":
            await trio.sleep_forever()
        case b"stream and wait":
            return wait_for_ever()
        case b"refuse":
            raise ApplicationError("no")
    return bytes(100_000)


async def use(peer: ConnectedPeer, listener: Listener, end: str) -> None:
    """One of each interaction, large, and then the end."""
    await peer.request_response(bytes(50_000))
    with pytest.raises(ApplicationError):
        await peer.request_response(b"refuse" + bytes(5000))
    await peer.fire_and_forget(bytes(9000))
    async with await peer.request_stream(b"stream") as answers:
        assert len([answer async for answer in answers]) == 20
    sender, answers = await peer.request_channel(b"channel" + bytes(5000))
    with sender, answers:
        await sender.send(bytes(5000))
        await answers.receive()
        await sender.finish()
        assert len([answer async for answer in answers]) == 1
    await end_it(peer, listener, end)


async def use_to_the_end(peer: ConnectedPeer, listener: Listener, end: str) -> None:
    """Interactions whose handlers wait when the connection ends, and one whose answers nobody has taken."""

    async def ask() -> None:
        with pytest.raises(LevadaError):
            await peer.request_response(b"wait" + bytes(5000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        taken = await peer.request_stream(b"stream and wait" + bytes(5000))
        assert await taken.receive() == Payload(bytes(3000))
        untaken = await peer.request_stream(b"stream" + bytes(5000))
        sender, answers = await peer.request_channel(b"wait" + bytes(5000))
        await sender.send(bytes(5000))
        while listener.peers[0].statistics().requests_received < 4:
            await trio.lowlevel.checkpoint()
        await end_it(peer, listener, end)
    for receiver in (taken, untaken, answers):
        receiver.close()
    sender.cancel()


async def end_it(peer: ConnectedPeer, listener: Listener, end: str) -> None:
    match end:
        case "aborted":
            peer.abort()
        case "aborted by the server":
            listener.peers[0].abort()
        case "lost":
            peer.drop_carrier()
        case _:
            await peer.aclose()
    await peer.terminated()


@pytest.mark.loopback
@pytest.mark.parametrize("used", [use, use_to_the_end])
@pytest.mark.parametrize("end", ["closed", "aborted", "aborted by the server", "lost"])
@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
@pytest.mark.parametrize("carrier", ["memory://desk", "tcp://127.0.0.1:0"])
async def test_a_connection_that_ended(carrier: str, dialect: str, end: str, used: Use) -> None:
    async with ActorSystem() as system, serve(system, f"{dialect}+{carrier}", handler) as listener:

        async def once() -> None:
            async with connect(
                system,
                listener.url,
                config=ClientConfig(core=CoreConfig(metadata_mime_type=COMPOSITE, drain_timeout=0.0)),
            ) as peer:
                await used(peer, listener, end)
            while system.statistics().actors > 1:
                await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()

        await once()  # what is made once stays
        with nothing_for_the_collector():
            await once()


@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
async def test_handlers_that_are_killed_after_their_time_to_stop(
    dialect: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem() as system, serve(system, f"{dialect}+memory://desk", handler) as listener:

        async def once() -> None:
            async with connect(system, listener.url) as peer:
                await peer.fire_and_forget(b"wait" + bytes(5000))
                await wait_all_tasks_blocked()
                peer.abort()
            await trio.sleep(60)
            assert system.statistics().actors == 1

        await once()
        assert "did not stop in 5 s: killed" in caplog.text
        caplog.set_level(logging.CRITICAL)  # a record would be kept, with what is in it
        with nothing_for_the_collector():
            await once()


# What is left unfinished: a frame of which most has come, a request in fragments, a channel's payload in fragments.
UNFINISHED = {
    "rsocket": (
        "00001d 00000000 0400 0001 0000 000f4240 000f4240 0161 0162",
        {
            "a frame": "ffff00 00000001 1000",
            "a request": "010009 00000001 1080 000000",
            "a channel": "00000a 00000001 1c00 00000001 010006 00000001 28a0",
        },
    ),
    "reactivesocket": (
        "0000001c 0001 0000 00000000 00000000 000f4240 000f4240 0161 0162",
        {
            "a frame": "00ffff00 0004 0000 00000002",
            "a channel": "00010010 0008 2800 00000002 00000001",
        },
    ),
}


@pytest.mark.parametrize(
    ("dialect", "what"), [(dialect, what) for dialect, (_, cases) in UNFINISHED.items() for what in cases]
)
@pytest.mark.parametrize("refused", [False, True], ids=["in the middle", "while it is judged"])
async def test_what_was_never_finished(dialect: str, what: str, refused: bool) -> None:
    setup, cases = UNFINISHED[dialect]
    octets = bytes.fromhex(cases[what]) + bytes(65_536)

    async def never(_: Credentials) -> Identity | Refused:
        await trio.sleep_forever()
        raise AssertionError

    hook = never if refused else None
    async with ActorSystem() as system, serve(system, f"{dialect}+memory://desk", handler, authenticate=hook):

        async def once() -> None:
            async with dial("memory://desk") as stream:
                assert isinstance(stream, ByteStream)
                header = bytes.fromhex(setup)
                await stream.send_all(len(header[3:]).to_bytes(3) + header[3:] if dialect == "rsocket" else header)
                await stream.send_all(octets)
                await wait_all_tasks_blocked()
                stream.abort()
            await wait_all_tasks_blocked()
            assert system.statistics().actors == 1

        await once()
        with nothing_for_the_collector():
            await once()
