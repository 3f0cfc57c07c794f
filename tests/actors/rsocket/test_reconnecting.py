"""Clients that come back, alone and balanced, and connections on a network that goes wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.authentication import Credentials, Refused
from levada.actors.rsocket import (
    COMPOSITE,
    ClientConfig,
    CoreConfig,
    Handler,
    Listener,
    NoEndpoint,
    Peer,
    Reconnect,
    Request,
    ServerConfig,
    balanced,
)
from levada.actors.rsocket.client import ClientConnection
from levada.actors.rsocket.dialects import core_of
from levada.actors.rsocket.server import ListenerActor, ServerConnection
from levada.framework import Actor, ActorSystem, Identity, Ref
from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost
from levada.transports.carriers.memory import memory_streams
from levada.transports.testing import FaultyNetwork

from .conftest import connect, serve

QUICK = Reconnect(initial_backoff=0.1, max_backoff=1.0, jitter=0.0)


async def echo(request: Request) -> bytes:
    return request.data


async def names(request: Request) -> bytes:
    return request.connection.info.local.encode()


async def test_a_client_comes_back_after_a_restart(autojump_clock: MockClock) -> None:
    """Requests while the server is down wait for it; the one that was under way fails."""
    async with ActorSystem() as system:

        async def stuck(_: Request) -> Any:
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            async with serve(
                system, "rsocket+memory://desk", stuck, config=ServerConfig(core=CoreConfig(drain_timeout=0.0))
            ) as _:
                entered = connect(system, "rsocket+memory://desk", reconnect=QUICK)
                peer = await entered.__aenter__()

                async def call() -> None:
                    with pytest.raises(ConnectionLost):
                        await peer.request_response(b"lost")

                nursery.start_soon(call)
                await wait_all_tasks_blocked()
            assert peer.connected == 0
            answers: list[bytes] = []

            async def wait() -> None:
                answers.append((await peer.request_response(b"waited")).data)

            nursery.start_soon(wait)
            await trio.sleep(5)
            assert answers == []
            async with serve(system, "rsocket+memory://desk", echo):
                await trio.sleep(1.5)
                assert answers == [b"waited"]
                assert peer.connected == 1
                await entered.__aexit__(None, None, None)
        with pytest.raises(ConnectionClosed):
            await peer.request_response(b"")
        assert system.statistics().actors == 0


async def test_failing_at_once_by_choice(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        async with serve(system, "rsocket+memory://desk", echo) as listener:
            entered = connect(system, "rsocket+memory://desk", reconnect=Reconnect(wait=0.0))
            peer = await entered.__aenter__()
            await listener.aclose()
        with pytest.raises(NoEndpoint, match="none of 1 endpoints is up") as caught:
            await peer.request_response(b"")
        assert isinstance(caught.value.__cause__, ConnectionLost)
        await entered.__aexit__(None, None, None)


async def test_entering_waits_for_the_first_connection(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        with trio.move_on_after(3) as scope:
            async with connect(system, "rsocket+memory://desk", reconnect=QUICK):
                raise AssertionError("nobody is there")
        assert scope.cancelled_caught

        @asynccontextmanager
        async def late() -> AsyncIterator[None]:
            async with trio.open_nursery() as nursery:

                async def begin() -> None:
                    await trio.sleep(2)
                    async with serve(system, "rsocket+memory://desk", echo):
                        await trio.sleep_forever()

                nursery.start_soon(begin)
                yield
                nursery.cancel_scope.cancel()

        async with late(), connect(system, "rsocket+memory://desk", reconnect=QUICK) as peer:
            assert (await peer.request_response(b"late")).data == b"late"
        with pytest.raises(ConfigurationError):
            async with connect(system, "rsocket+carrot://desk", reconnect=QUICK):
                pass
        assert system.statistics().actors == 0


async def test_a_refused_client_does_not_hammer(autojump_clock: MockClock) -> None:
    """A SETUP that is refused counts as a failed try: the waits grow."""
    tries: list[float] = []

    async def refuse(_: Credentials) -> Identity | Refused:
        tries.append(trio.current_time())
        return Refused("no")

    async with ActorSystem() as system, serve(system, "rsocket+memory://desk", authenticate=refuse):
        async with connect(system, "rsocket+memory://desk", reconnect=QUICK):
            await trio.sleep(1.0)
        assert 3 <= len(tries) <= 5


@asynccontextmanager
async def desk(system: ActorSystem, name: str, handler: Handler = names) -> AsyncIterator[Listener]:
    async with serve(
        system, f"rsocket+memory://{name}", handler, config=ServerConfig(core=CoreConfig(drain_timeout=0.0))
    ) as listener:
        yield listener


async def ask(peer: Peer, times: int) -> Counter[str]:
    return Counter([(await peer.request_response(b"")).data.decode() for _ in range(times)])


async def test_round_robin_over_those_that_are_up(autojump_clock: MockClock) -> None:
    """An endpoint that ended is left out, and joins again after its restart."""
    async with ActorSystem() as system:
        urls = [f"rsocket+memory://{name}" for name in ("a", "b", "c")]

        async def who(name: bytes, _: Request) -> bytes:
            return name

        def named(name: bytes) -> Handler:
            async def handler(_: Request) -> bytes:
                return name

            return handler

        async with (
            desk(system, "a", named(b"a")),
            desk(system, "b", named(b"b")),
            balanced(system, urls, reconnect=Reconnect(initial_backoff=0.1, max_backoff=0.5, wait=0.0)) as peer,
        ):
            await trio.sleep(0.01)
            assert peer.connected == 2
            assert await ask(peer, 10) == {"a": 5, "b": 5}
            async with desk(system, "c", named(b"c")):
                await trio.sleep(1)
                assert await ask(peer, 9) == {"a": 3, "b": 3, "c": 3}
            assert await ask(peer, 10) == {"a": 5, "b": 5}
            async with desk(system, "c", named(b"C")):
                await trio.sleep(1)
                assert await ask(peer, 9) == {"a": 3, "b": 3, "C": 3}
        assert system.statistics().actors == 0


async def test_the_one_with_the_fewest_open_streams() -> None:
    async with ActorSystem() as system:
        counts: Counter[str] = Counter()

        def slow(name: str) -> Handler:
            async def handler(_: Request) -> Any:
                counts[name] += 1
                await trio.sleep_forever()

            return handler

        async with desk(system, "a", slow("a")), desk(system, "b", slow("b")):
            urls = ["rsocket+memory://a", "rsocket+memory://b"]
            async with balanced(system, urls, policy="least_pending") as peer:
                await wait_all_tasks_blocked()
                async with trio.open_nursery() as nursery:
                    for _ in range(10):
                        nursery.start_soon(peer.request_response, b"")
                        await wait_all_tasks_blocked()
                    assert counts == {"a": 5, "b": 5}
                    nursery.cancel_scope.cancel()


async def test_when_all_are_down_requests_fail_at_once(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        async with balanced(system, ["rsocket+memory://a", "rsocket+memory://b"]) as peer:
            began = trio.current_time()
            with pytest.raises(NoEndpoint, match="none of 2 endpoints is up"):
                await peer.request_response(b"")
            assert trio.current_time() == began
        async with balanced(system, ["rsocket+memory://a"], reconnect=Reconnect(wait=2.0)) as peer:
            began = trio.current_time()
            with pytest.raises(NoEndpoint):
                await peer.request_response(b"")
            assert trio.current_time() - began == pytest.approx(2.0)
        with pytest.raises(ConfigurationError, match="one URL or more"):
            balanced(system, [])
        with pytest.raises(ConfigurationError, match="policy"):
            async with balanced(system, ["rsocket+memory://a"], policy="by weight"):  # type: ignore[arg-type]
                pass


def test_backoff_doubles_to_its_most() -> None:
    lot = random.Random(1)
    assert [QUICK.delay(attempt, lot) for attempt in (1, 2, 3, 4, 5, 2000)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert all(0.5 <= Reconnect(initial_backoff=1.0, jitter=0.5).delay(1, lot) <= 1.0 for _ in range(50))


# ---------------------------------------------------------------- a network that goes wrong


class Accepted(ListenerActor):
    """A listener whose carriers are given to it."""

    def started(self) -> None:
        pass


class Given(ClientConnection):
    """A client on a carrier that is there already."""

    async def _dial(self) -> None:
        from levada.actors.single import ByteCarrier

        carrier = ByteCarrier(self.url)  # type: ignore[arg-type]  # the stream in the place of a URL
        try:
            self._plug(carrier)
            await self.read(carrier)
        finally:
            carrier.abort()


def adopt(system: ActorSystem, actor: Actor[Any]) -> Ref[Any]:
    return system.spawn(lambda: actor)


@pytest.mark.parametrize("seed", range(12))
async def test_a_connection_that_is_cut_anywhere_ends_alone(seed: int, autojump_clock: MockClock) -> None:
    """Whatever octet the fault strikes at: all requests end, both sides let go, the neighbour does not notice."""

    async def numbers(request: Request) -> Any:
        if not request.data.isdigit():
            return request.data

        async def items() -> AsyncIterator[bytes]:
            for number in range(int(request.data)):
                yield b"%d" % number

        return items()

    core = core_of("rsocket")
    async with ActorSystem() as system:
        listener = Accepted(ServerConfig(core=CoreConfig(drain_timeout=1.0)), numbers, core, "rsocket", "memory://none")
        root = adopt(system, listener)
        await wait_all_tasks_blocked()
        clients: list[Given] = []
        with FaultyNetwork(seed, within=3000) as network:
            for faulty in (True, False):
                ends = network.pair(*memory_streams()) if faulty else memory_streams()
                listener._connect(ends[1])
                config = ClientConfig(core=CoreConfig(metadata_mime_type=COMPOSITE, drain_timeout=1.0))
                client = Given(config, None, core, ends[0])  # type: ignore[arg-type]
                adopt(system, client)
                await client.opened()
                clients.append(client)
            bad, good = [client.handle for client in clients]
            with trio.move_on_after(200):
                try:
                    for _ in range(5):
                        await bad.request_response(b"hello")
                        async with await bad.request_stream(b"100", window=8) as receiver:
                            async for _ in receiver:
                                pass
                except (ConnectionLost, ConnectionClosed):
                    pass
            assert (await good.request_response(b"unharmed")).data == b"unharmed"
            for client in clients:
                await client.aclose()
        root.stop()
        await root.terminated()
        assert (system.statistics().actors, system.statistics().failures) == (0, 0)
        assert not any(isinstance(connection, ServerConnection) for connection in listener.connections)
