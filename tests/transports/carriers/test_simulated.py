"""Carriers between processes of a simulated world: the contract, and names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.framework.testing.simulation import World, simulate
from levada.transports import carriers
from levada.transports.carriers.tcp import TcpConfig
from levada.transports.carriers.unix import UnixConfig
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks

dial: Any = carriers.dial
listen: Any = carriers.listen

URLS = ["tcp://localhost:0", "unix:///run/socket"]


async def settle() -> None:
    await trio.sleep(1)


TRAITS = CarrierTraits(shape="bytes", settle=settle, timeout=60)


@asynccontextmanager
async def pair(url: str = "tcp://localhost:0") -> AsyncIterator[tuple[Any, Any]]:
    async with listen(url) as listener, dial(listener.url) as client, await listener.accept() as server:
        yield client, server


def in_one_process(main: Callable[[], Awaitable[object]]) -> None:
    async def scenario(world: World) -> None:
        assert await (await world.start("main", main)).wait() == 0

    simulate(scenario, seeds=[1])


@pytest.mark.parametrize("check", carrier_checks(TRAITS), ids=str)
def test_keeps_the_contract(check: CarrierCheck) -> None:
    def factory() -> AbstractAsyncContextManager[tuple[Any, Any]]:
        return pair()

    in_one_process(lambda: check(factory))


@pytest.mark.parametrize("url", URLS)
def test_two_processes_talk_at_a_url_of_each_carrier(url: str) -> None:
    heard = []

    async def scenario(world: World) -> None:
        up: trio.Event = trio.Event()
        where = []

        async def server() -> None:
            async with listen(url) as listener:
                where.append(listener.url)
                up.set()
                async with await listener.accept() as stream:
                    heard.append(await stream.receive_some())
                    await stream.send_all(b"and you")

        async def client() -> None:
            await up.wait()
            async with dial(where[0]) as stream:
                await stream.send_all(b"hello")
                heard.append(await stream.receive_some())

        processes = [await world.start("server", server), await world.start("client", client)]
        assert [await process.wait() for process in processes] == [0, 0]

    simulate(scenario, seeds=[1])
    assert heard == [b"hello", b"and you"]


@pytest.mark.parametrize("shop", ["shop", "Shop"])
def test_machines_have_host_names_and_ports_of_their_own(shop: str) -> None:
    refused = []

    async def scenario(world: World) -> None:
        async def server() -> None:
            async with listen("tcp://0.0.0.0:80") as listener, await listener.accept() as stream:
                assert await stream.receive_some() == b"GET"

        async def client() -> None:
            for url in ("tcp://localhost:80", "tcp://shop:81", "tcp://nowhere:80"):
                with pytest.raises(ConnectionLost) as error:
                    async with dial(url):
                        pass
                refused.append(str(error.value))
            async with dial("tcp://shop:80") as stream:
                await stream.send_all(b"GET")

        await world.start("server", server, machine=shop)
        assert await (await world.start("client", client, machine="home")).wait() == 0

    simulate(scenario, seeds=[1], machines=[shop, "home"])
    assert refused == [
        "cannot connect to localhost:80: [Errno 111] Connection refused",
        "cannot connect to shop:81: [Errno 111] Connection refused",
        "cannot connect to nowhere:80: [Errno 113] no machine has the name 'nowhere'",
    ]


def test_an_address_has_one_listener_and_is_free_after_it() -> None:
    async def main() -> None:
        async with listen("tcp://localhost:80"):
            with pytest.raises(ConfigurationError, match=r"cannot listen at localhost:80: .*in use"):
                async with listen("tcp://localhost:80"):
                    pass
        async with listen("tcp://localhost:80"):
            pass

    in_one_process(main)


def test_a_peer_that_no_task_has_accepted_is_lost_with_its_listener() -> None:
    async def main() -> None:
        async with listen("tcp://localhost:80") as listener, dial("tcp://localhost:80") as stream:
            await settle()
            await listener.aclose()
            with pytest.raises(ConnectionClosed):
                await listener.accept()
            with pytest.raises(ConnectionLost):
                await stream.receive_some()

    in_one_process(main)


def test_a_dial_out_of_reach_waits_for_its_timeout() -> None:
    async def scenario(world: World) -> None:
        async def server() -> None:
            async with listen("tcp://0.0.0.0:80"):
                await trio.sleep_forever()

        async def client() -> None:
            began = trio.current_time()
            with pytest.raises(IdleTimeout):
                async with dial("tcp://a:80", TcpConfig(connect_timeout=3.0)):
                    pass
            assert trio.current_time() == began + 3.0

        await world.start("server", server, machine="a")
        world.cut("a", "b", one_way=True)
        await trio.sleep(1)
        assert await (await world.start("client", client, machine="b")).wait() == 0

    simulate(scenario, seeds=[1], machines=["a", "b"])


def test_tls_and_plain_tcp_do_not_meet() -> None:
    async def main() -> None:
        async with listen("tcp://localhost:443"):
            with pytest.raises(ConnectionLost, match="does not speak TLS"):
                async with dial("tls://localhost:443"):
                    pass

    in_one_process(main)


def test_a_unix_socket_knows_the_processes_at_its_ends() -> None:
    async def main() -> None:
        async with (
            listen("unix:///run/s", UnixConfig()) as listener,
            dial("unix:///run/s") as client,
            await listener.accept() as server,
        ):
            assert client.info.peer == server.info.peer
            assert client.info.peer_credentials[0] == 101

    in_one_process(main)


def test_websockets_run_over_simulated_tcp() -> None:
    async def main() -> None:
        async with (
            listen("ws://localhost:80/chat") as listener,
            dial("ws://localhost:80/chat") as client,
            await listener.accept() as server,
        ):
            await client.send(b"hello")
            assert await server.receive() == b"hello"

    in_one_process(main)
