"""Fire-and-forget requests share actors and turns; none of them notices."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from contextvars import ContextVar
from time import perf_counter
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.rsocket import ApplicationError, Payload, Request
from levada.actors.rsocket.fire_and_forget import TURN, Fired
from levada.framework import ActorSystem
from levada.transports.rsocket import ErrorCode
from levada.transports.rsocket.events import Interaction, RequestReceived
from levada.transports.rsocket.frames import ErrorFrame, FrameType, RequestFrame

from .conftest import Tables, below, connect, serve
from .test_requests import pair


def fire(connection: Any, *requests: bytes) -> None:
    """Let requests come in one batch, with no turn of an actor between them."""
    event = Interaction.FIRE_AND_FORGET
    connection.apply([RequestReceived(event, 1, Payload(data), 0, True) for data in requests])


async def test_one_that_waits_holds_up_nobody() -> None:
    log: list[bytes] = []
    gate = trio.Event()

    async def handler(request: Request) -> None:
        if request.data.startswith(b"slow"):
            await gate.wait()
        log.append(request.data)

    async with pair(handler) as (peer, listener, _):
        for data in (b"1", b"slow 2", b"3", b"slow 4", b"5"):
            await peer.fire_and_forget(data)
        await wait_all_tasks_blocked()
        serving = below(listener.peers[0])
        assert (log, serving.fire_and_forget, serving.unbegun) == ([b"1", b"3", b"5"], 2, 0)
        gate.set()
        await wait_all_tasks_blocked()
        assert sorted(log[3:]) == [b"slow 2", b"slow 4"]
        assert serving.fire_and_forget == 0


@pytest.mark.parametrize("error", [ValueError("broken"), ApplicationError("no")], ids=["fails", "answers an error"])
async def test_one_that_fails_is_alone(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """A failure is logged, and is that request's only; an error for the requester has nobody to go to."""
    log: list[bytes] = []

    def handler(request: Request) -> None:
        if request.data == b"2":
            raise error
        log.append(request.data)

    async with pair(handler) as (peer, listener, system):
        with caplog.at_level(logging.WARNING, "levada"):
            for data in (b"1", b"2", b"3", b"4"):
                await peer.fire_and_forget(data)
            await wait_all_tasks_blocked()
        assert log == [b"1", b"3", b"4"]
        assert below(listener.peers[0]).fire_and_forget == 0
        failures = int(isinstance(error, ValueError))
        assert (system.statistics().failures, len(caplog.records)) == (failures, failures)


async def test_what_one_sets_the_next_does_not_see() -> None:
    name: ContextVar[bytes] = ContextVar("name", default=b"nobody")
    seen: list[bytes] = []

    async def handler(request: Request) -> None:
        seen.append(name.get())
        name.set(request.data)

    async with pair(handler) as (_, listener, _system):
        while not listener.peers:
            await trio.lowlevel.checkpoint()
        fire(below(listener.peers[0]), b"ann", b"bob", b"cat")
        await wait_all_tasks_blocked()
        assert seen == [b"nobody"] * 3


async def test_long_ones_share_the_turn(tables: Tables) -> None:
    """Handlers that do not wait, and take long, let other actors run between them."""
    log: list[bytes] = []

    def handler(request: Request) -> bytes:
        if request.kind is Interaction.FIRE_AND_FORGET:
            until = perf_counter() + TURN
            while perf_counter() <= until:
                pass
        log.append(request.data)
        return b""

    async with pair(handler) as (peer, listener, _):
        await peer.request_response(b"0")
        serving = below(listener.peers[0])
        fire(serving, b"1", b"2", b"3")
        tables.leave_out(peer)
        below(peer).core.send_request_response(Payload(b"other"), trio.current_time())
        serving.feed(b"".join(below(peer).core.data_to_send(0.0)))
        await wait_all_tasks_blocked()
        assert log == [b"0", b"1", b"other", b"2", b"3"]


async def test_the_actor_is_killed_before_it_began() -> None:
    """Another one takes its requests."""
    log: list[bytes] = []

    def handler(request: Request) -> None:
        log.append(request.data)

    async with pair(handler) as (peer, listener, _):
        await peer.fire_and_forget(b"0")
        await wait_all_tasks_blocked()
        serving = below(listener.peers[0])
        (idle,) = serving.idle.of(Fired)
        fire(serving, b"1", b"2")
        idle.ref.kill()
        await wait_all_tasks_blocked()
        assert (log, serving.unbegun, serving.fire_and_forget) == ([b"0", b"1", b"2"], 0, 0)


async def test_few_actors_for_those_that_do_not_wait() -> None:
    """One, and another that takes over where a turn was long: on a busy machine any may be."""

    def handler(request: Request) -> None:
        pass

    async with pair(handler) as (peer, listener, system):
        await peer.fire_and_forget(b"")
        await wait_all_tasks_blocked()
        actors = system.statistics().actors
        for _ in range(200):
            await peer.fire_and_forget(b"")
        await wait_all_tasks_blocked()
        assert listener.peers[0].statistics().requests_received == 201
        assert actors <= system.statistics().actors <= actors + 1


async def test_those_that_came_before_the_end_are_handled() -> None:
    """The requester leaves behind its last request; handlers that wait a little end all the same."""
    handled: list[bytes] = []

    async def handler(request: Request) -> None:
        await trio.lowlevel.checkpoint()
        handled.append(request.data)

    # Many times: the end may overtake an actor that has been told to take the rest, if trio runs the tasks in that order.
    for _ in range(40):
        async with pair(handler) as (peer, _, _system):
            for number in range(20):
                await peer.fire_and_forget(b"%d" % number)
            await peer.aclose()
        assert sorted(handled, key=int) == [b"%d" % number for number in range(20)]
        handled.clear()


@pytest.mark.parametrize("wait", [0, 1, 3])
async def test_a_listener_that_closes_waits_for_those_that_came_before_the_end(wait: int) -> None:
    """The requester has gone already when the listener is closed; none of its requests has begun."""
    handled: list[bytes] = []

    async def handler(request: Request) -> None:
        for _ in range(wait):
            await trio.lowlevel.checkpoint()
        handled.append(request.data)

    frames: list[RequestFrame | ErrorFrame] = [
        RequestFrame(type=FrameType.REQUEST_FNF, stream_id=2 * number + 1, payload=Payload(b"%d" % number))
        for number in range(20)
    ]
    octets = [frame.encode() for frame in [*frames, ErrorFrame(0, ErrorCode.CONNECTION_CLOSE)]]
    async with pair(handler) as (_, listener, _system):
        await wait_all_tasks_blocked()
        serving = below(listener.peers[0])
        serving.feed(b"".join(len(frame).to_bytes(3, "big") + frame for frame in octets))
        assert (serving.unbegun, listener.peers) == (20, [])
        await listener.aclose()
        assert sorted(handled, key=int) == [b"%d" % number for number in range(20)]


async def test_an_answer_that_nobody_wants_is_closed() -> None:
    log: list[str] = []

    class Items:
        def __aiter__(self) -> AsyncIterator[bytes]:
            raise AssertionError("nobody asked for it")

        async def aclose(self) -> None:
            log.append("closed")

    async with pair(lambda request: Items()) as (peer, _, _system):
        await peer.fire_and_forget(b"")
        await wait_all_tasks_blocked()
        assert log == ["closed"]


async def test_handlers_that_never_end_hold_the_end_up_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """On 3 connections 300 each; one after another they would take 75 minutes."""

    async def handler(_: Request) -> None:
        await trio.sleep_forever()

    async with ActorSystem(shutdown_timeout=math.inf) as system, AsyncExitStack() as connections:
        async with serve(system, "rsocket+memory://desk", handler) as listener:
            peers = [await connections.enter_async_context(connect(system, listener.url)) for _ in range(3)]
            for peer in peers:
                for _ in range(300):
                    await peer.fire_and_forget(b"")
            await wait_all_tasks_blocked()
            assert [each.statistics().requests_received for each in listener.peers] == [300] * 3
            serving = listener.peers[0]
            before = system.statistics().actors
            peers[0].abort()
            await serving.terminated()
            assert before - system.statistics().actors == 302  # with both ends of the connection
            start = trio.current_time()
        assert trio.current_time() - start == 5.0
    assert trio.current_time() - start == 5.0
    assert len([text for text in caplog.messages if text.startswith("300 children of")]) == 3


async def test_answers_that_take_their_time_to_end_take_it_together(autojump_clock: MockClock) -> None:
    async def handler(_: Request) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(4)

    async with (
        ActorSystem(shutdown_timeout=math.inf) as system,
        serve(system, "rsocket+memory://desk", handler) as listener,
        trio.open_nursery() as nursery,
        connect(system, listener.url) as peer,
    ):
        for _ in range(300):
            nursery.start_soon(peer.request_response, b"")
        await wait_all_tasks_blocked()
        start = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - start == 4.0
