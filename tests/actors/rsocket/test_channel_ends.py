"""A channel whose sides end in any order leaves no stream behind, on either side, and nobody waits for a side that has gone."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.rsocket import (
    ApplicationError,
    ConnectedPeer,
    CoreConfig,
    Listener,
    Payload,
    Request,
    RequestCanceled,
    RequestFailed,
    ServerConfig,
)
from levada.actors.rsocket.blocking import connect as connect_blocking
from levada.framework import ActorSystem, Receiver, Sender
from levada.framework.errors import ChannelCancelled, ChannelConnectionLost, ReceiverClosed
from levada.transports.rsocket.frames import CancelFrame, PayloadFrame

from .conftest import below, connect, serve

Channel = tuple[Sender[Any], Receiver[Payload]]

both_dialects = pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])


@asynccontextmanager
async def pair(
    dialect: str, handler: Callable[[Request], Any], server: ServerConfig | None = None
) -> AsyncIterator[tuple[ConnectedPeer, Listener]]:
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler, config=server) as listener,
        connect(system, listener.url) as peer,
    ):
        yield peer, listener


async def left(peer: ConnectedPeer, listener: Listener) -> tuple[int, int]:
    """Wait until nothing moves; streams that the two sides still have."""
    await wait_all_tasks_blocked()
    (serving,) = listener.peers
    return peer.statistics().open_streams, serving.statistics().open_streams


async def one_of_them(request: Request) -> AsyncIterator[Payload]:
    """End after one payload, whatever else the requester has to say."""
    yield await request.payloads.receive()


@both_dialects
async def test_the_responder_ends_first(dialect: str) -> None:
    """RS-69, RX-56: a sender that goes on is told, in the middle of waiting for credit too."""
    async with pair(dialect, one_of_them) as (peer, listener):
        sender, answers = await peer.request_channel(b"1", window=4)
        assert [payload.data async for payload in answers] == [b"1"]
        assert await left(peer, listener) == (0, 0)
        with pytest.raises(ReceiverClosed):
            await sender.send(b"2")


@both_dialects
async def test_the_responder_ends_while_the_requester_waits_for_credit(dialect: str) -> None:
    gate = trio.Event()

    async def handler(request: Request) -> AsyncIterator[Payload]:
        await gate.wait()
        yield await request.payloads.receive()

    async with pair(dialect, handler) as (peer, listener), trio.open_nursery() as nursery:
        sender, answers = await peer.request_channel(b"0")
        ended = trio.Event()

        @nursery.start_soon
        async def send() -> None:
            with pytest.raises(ReceiverClosed):
                for _ in range(1000):
                    await sender.send(b"more")
            ended.set()

        await wait_all_tasks_blocked()
        assert not ended.is_set()
        gate.set()
        assert [payload.data async for payload in answers] == [b"0"]
        await ended.wait()
        assert await left(peer, listener) == (0, 0)


@both_dialects
async def test_channels_that_were_left_open_do_not_count(dialect: str) -> None:
    server = ServerConfig(core=CoreConfig(max_streams=2))
    async with pair(dialect, one_of_them, server) as (peer, listener):
        kept: list[Channel] = []
        for number in range(10):
            sender, answers = await peer.request_channel(b"%d" % number)
            kept.append((sender, answers))
            assert [payload.data async for payload in answers] == [b"%d" % number]
        assert await left(peer, listener) == (0, 0)


@both_dialects
@pytest.mark.parametrize("how", ["returns", "answers one", "refuses", "fails", "closes", "closes and answers"])
async def test_each_way_in_which_a_responder_ends_first(dialect: str, how: str) -> None:
    async def handler(request: Request) -> Any:
        match how:
            case "answers one":
                return b"answer"
            case "refuses" | "fails":
                raise ApplicationError("no") if how == "refuses" else ValueError("broken")
            case "closes":
                request.payloads.close()
            case "closes and answers":
                request.payloads.close()
                return b"answer"
        return None

    async with pair(dialect, handler) as (peer, listener):
        sender, answers = await peer.request_channel(b"")
        got: list[bytes] = []
        try:
            async for payload in answers:
                got.append(payload.data)
        except ApplicationError as error:
            got.append(error.data.partition(b" [")[0])
        wanted = {"refuses": [b"no"], "fails": [b"the handler failed"], "returns": [], "closes": []}
        assert got == wanted.get(how, [b"answer"])
        assert await left(peer, listener) == (0, 0)
        with pytest.raises(ReceiverClosed):
            await sender.send(b"more")


@both_dialects
@pytest.mark.parametrize("how", ["finishes", "cancels", "closes", "both"])
async def test_each_way_in_which_a_requester_ends_first(dialect: str, how: str) -> None:
    async def echo(request: Request) -> Any:
        return request.payloads

    async with pair(dialect, echo) as (peer, listener):
        sender, answers = await peer.request_channel(b"first")
        assert (await answers.receive()).data == b"first"
        match how:
            case "finishes":
                await sender.finish()
                assert [payload async for payload in answers] == []
            case "cancels":
                sender.cancel()
                with pytest.raises(ChannelCancelled):
                    await answers.receive()
            case "closes":
                answers.close()
            case "both":
                sender.cancel()
                answers.close()
        assert await left(peer, listener) == (0, 0)


@both_dialects
async def test_a_responder_that_is_killed_while_it_closes_its_source(dialect: str, autojump_clock: MockClock) -> None:
    """Its answers were complete, but it had not yet said that it takes no more."""

    class Source:
        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> bytes:
            raise StopAsyncIteration

        async def aclose(self) -> None:
            await trio.sleep_forever()

    async with pair(dialect, lambda request: Source()) as (peer, listener):
        sender, answers = await peer.request_channel(b"")
        assert [payload async for payload in answers] == []
        await wait_all_tasks_blocked()
        for stream in list(below(listener.peers[0]).streams.values()):
            stream.ref.kill()
        assert await left(peer, listener) == (0, 0)
        with pytest.raises(ReceiverClosed):
            await sender.send(b"more")


@both_dialects
async def test_a_source_that_closes_slowly_holds_no_stream(dialect: str) -> None:
    gate = trio.Event()

    async def handler(request: Request) -> Any:
        class Source:
            def __aiter__(self) -> Any:
                return self

            async def __anext__(self) -> bytes:
                raise StopAsyncIteration

            async def aclose(self) -> None:
                await gate.wait()

        return Source()

    async with pair(dialect, handler) as (peer, listener):
        assert [payload async for payload in await peer.request_stream(b"")] == []
        assert await left(peer, listener) == (0, 0)
        gate.set()


@both_dialects
@pytest.mark.parametrize("kind", ["request-response", "stream", "channel"])
async def test_a_cancelled_stream_that_was_the_last_ends_a_drain_at_once(
    dialect: str, kind: str, autojump_clock: MockClock
) -> None:
    async def never(request: Request) -> None:
        await trio.sleep_forever()

    async with pair(dialect, never) as (peer, _), trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def use() -> None:
            with scope:
                if kind == "request-response":
                    await peer.request_response(b"")
                elif kind == "stream":
                    with await peer.request_stream(b"") as answers:
                        await answers.receive()
                else:
                    sender, answers = await peer.request_channel(b"")
                    with sender, answers:
                        await answers.receive()

        nursery.start_soon(use)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        nursery.start_soon(peer.aclose)
        await trio.sleep(1)
        scope.cancel()
        await peer.terminated()
        assert trio.current_time() - began < 1.1


async def test_a_killed_actor_of_a_stream_is_told() -> None:
    async def never(request: Request) -> None:
        await trio.sleep_forever()

    async with pair("rsocket", never) as (peer, listener):
        _sender, answers = await peer.request_channel(b"")
        await wait_all_tasks_blocked()
        for stream in list(below(listener.peers[0]).streams.values()):
            stream.ref.kill()
        with pytest.raises(RequestCanceled):
            await answers.receive()
        assert await left(peer, listener) == (0, 0)


@both_dialects
@pytest.mark.loopback
async def test_a_blocking_channel_whose_responder_ends_first(dialect: str) -> None:
    async with ActorSystem() as system, serve(system, f"{dialect}+tcp://127.0.0.1:0", one_of_them) as listener:

        def use() -> list[Payload]:
            with connect_blocking(listener.url) as peer:
                answers: list[Payload] = []
                for number in range(3):
                    channel = peer.request_channel(b"%d" % number, timeout=5.0)
                    answers += channel
                    with pytest.raises(ReceiverClosed):
                        for _ in range(1000):
                            channel.send(b"more", timeout=5.0)
                assert peer._streams == {}
                return answers

        answers = await trio.to_thread.run_sync(use)
        assert [answer.data for answer in answers] == [b"0", b"1", b"2"]
        assert all(serving.statistics().open_streams == 0 for serving in listener.peers)


@both_dialects
@pytest.mark.loopback
async def test_a_blocking_channel_whose_requester_fails(dialect: str) -> None:
    """RSocket's responder gets the error; ReactiveSocket's is cancelled (RX-57)."""
    ends: list[str] = []
    over = trio.Event()

    async def listen(request: Request) -> None:
        try:
            async for _ in request.payloads:
                pass
        except RequestFailed as error:
            ends.append(f"{error.code:#x} {error}")
        except trio.Cancelled:
            ends.append("cancelled")
            raise
        finally:
            over.set()

    async with ActorSystem() as system, serve(system, f"{dialect}+tcp://127.0.0.1:0", listen) as listener:

        def use() -> None:
            with connect_blocking(listener.url) as peer:
                channel = peer.request_channel(b"0", timeout=5.0)
                channel.send(b"1", timeout=5.0)
                channel.fail(RequestCanceled("out of paper"))
                channel.fail(RequestCanceled("again"))
                with pytest.raises(RequestCanceled, match="out of paper"):
                    next(channel)
                with pytest.raises(RequestCanceled, match="out of paper"):
                    channel.send(b"2", timeout=5.0)
                trio.from_thread.run(over.wait)

        await trio.to_thread.run_sync(use)
        assert ends == ["cancelled" if dialect == "reactivesocket" else "0x203 out of paper"]


@pytest.mark.loopback
@pytest.mark.parametrize("peer_first", [False, True], ids=["stops last", "stops first"])
def test_a_blocking_channel_that_is_stopped_and_completed_in_two_messages(peer_first: bool) -> None:
    """RS-69: CANCEL and C of the responder together are the end, in either order."""
    complete, cancel = PayloadFrame(stream_id=1, payload=Payload(), complete=True), CancelFrame(1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"rsocket+tcp://127.0.0.1:{listening.getsockname()[1]}"
        with connect_blocking(url) as peer, listening.accept()[0] as server:
            channel = peer.request_channel(b"", timeout=5.0)
            for frame in (cancel, complete) if peer_first else (complete, cancel):
                octets = frame.encode()
                server.sendall(len(octets).to_bytes(3, "big") + octets)
                if frame is complete:
                    assert list(channel) == []
                else:
                    with pytest.raises(ReceiverClosed):
                        for _ in range(1000):
                            channel.send(b"", timeout=5.0)
            assert peer._streams == {}


async def taken_never(request: Request) -> None:
    """Grant a window of credit, and take nothing."""
    await trio.sleep_forever()


async def fill(peer: ConnectedPeer) -> Channel:
    """Open a channel whose producer waits for credit."""
    sender, answers = await peer.request_channel(b"")
    with trio.move_on_after(0.0):
        while True:
            await sender.send(b"more")
    await wait_all_tasks_blocked()
    return sender, answers


@both_dialects
async def test_a_producer_that_is_killed_while_it_waits_for_credit(dialect: str) -> None:
    async with pair(dialect, taken_never) as (peer, listener):
        sender, answers = await fill(peer)
        for stream in list(below(peer).streams.values()):
            stream.ref.kill()
        with pytest.raises(ChannelConnectionLost, match="was ended"):
            await answers.receive()
        with pytest.raises(ReceiverClosed):
            await sender.send(b"more")
        assert await left(peer, listener) == (0, 0)


@both_dialects
async def test_a_producer_that_waits_for_credit_is_free_when_its_channel_is_over(dialect: str) -> None:
    """The same actor serves one channel after another."""
    gates: list[trio.Event] = []

    async def handler(request: Request) -> None:
        gates.append(trio.Event())
        await gates[-1].wait()

    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler) as listener,
        connect(system, listener.url) as peer,
    ):
        actors: list[int] = []
        for _ in range(4):
            sender, answers = await fill(peer)
            gates[-1].set()
            assert [payload async for payload in answers] == []
            await wait_all_tasks_blocked()
            with pytest.raises(ReceiverClosed):
                await sender.send(b"more")
            await wait_all_tasks_blocked()
            actors.append(system.statistics().actors)
        assert max(actors) <= min(actors) + 1
