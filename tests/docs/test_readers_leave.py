"""The programs of the pages and the examples that stream go on when a reader leaves in the middle, and log nothing about it."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors import aqueduct, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.framework import ActorSystem, Identity, Receiver, Ref, Sender, channel, oneshot

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """INFO is for connections that begin and end."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelno > logging.INFO] == []


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("test", shutdown_timeout=1.0) as system:
        yield system
        await wait_all_tasks_blocked()
        assert system.statistics().failures == 0


def page(name: str, number: int = 0) -> Any:
    """Return the definitions of a program of a page, as a module."""
    program = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)[number]
    module = types.ModuleType(f"page_{re.sub(r'[^a-z]', '_', name)}_{number}")
    sys.modules[module.__name__] = module
    exec(compile(re.sub(r"^\S+\.run\(main.*", "", program, flags=re.MULTILINE), name, "exec"), vars(module))
    return module


def example(name: str) -> Any:
    """Import a program of ``examples/``."""
    path = ROOT / "examples" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def leaver(receiver: Receiver[Any]) -> None:
    """Take one message and leave."""
    async with receiver:
        await receiver.receive()


Tell = Callable[[Any], Any]


@asynccontextmanager
async def local(system: ActorSystem, ref: Ref[Any]) -> AsyncIterator[Tell]:
    """Reach an actor in this process."""
    yield ref.send


@asynccontextmanager
async def over_a_network(system: ActorSystem, handler: Any) -> AsyncIterator[Tell]:
    """Reach an actor or a function by a connection."""
    async with (
        aqueduct.serve(system, "aqueduct+memory://here", handler, Any) as listener,
        aqueduct.connect(system, listener.url, object) as peer,
    ):
        yield peer.send


@asynccontextmanager
async def lost(system: ActorSystem, handler: Any) -> AsyncIterator[Tell]:
    """Reach an actor or a function by a connection of its own for each message; it ends in the middle."""
    async with (
        aqueduct.serve(system, "aqueduct+memory://lost", handler, Any) as listener,
        trio.open_nursery() as nursery,
    ):

        async def send(m: Any) -> None:
            peer = await nursery.start(visit, listener.url)
            await peer.send(m)

        async def visit(url: str, task_status: Any) -> None:
            async with aqueduct.connect(system, url, object) as peer:
                task_status.started(peer)
                await trio.sleep(1)

        yield send
        nursery.cancel_scope.cancel()


WAYS = [local, over_a_network]


@pytest.mark.parametrize("way", WAYS)
async def test_the_desk_of_the_readme(autojump_clock: MockClock, system: ActorSystem, way: Any) -> None:
    module = page("README.md", 1)
    desk = system.spawn(module.Desk)
    got = []
    async with way(system, desk) as tell:
        (one, leaves), (two, stays) = channel(module.Price), channel(module.Price)
        await tell(module.Follow("A", one.ordered(1)))
        await tell(module.Follow("B", two.ordered(1)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaver, leaves)
            got += [price.bid async for price in stays]
    assert got == [99.0, 99.5, 100.0]
    assert desk.is_alive


@pytest.mark.parametrize("way", WAYS)
async def test_the_counter_of_the_page_on_asyncio(autojump_clock: MockClock, system: ActorSystem, way: Any) -> None:
    module = page("docs/how-to/asyncio.md")
    counter = system.spawn(module.Counter)
    await counter.ask(module.Add(3))
    async with way(system, counter) as tell:
        for read in (leaver, all_of):
            sender, numbers = channel(int)
            await tell(module.Count(sender.ordered(1)))
            assert await read(numbers) in (None, [1, 2, 3])
    assert await counter.ask(module.Add(1)) == 4


async def all_of(receiver: Receiver[Any]) -> list[Any]:
    return [message async for message in receiver]


@pytest.mark.parametrize("way", [over_a_network, lost])
async def test_the_search_of_the_page_on_aqueduct(autojump_clock: MockClock, system: ActorSystem, way: Any) -> None:
    module = page("docs/how-to/aqueduct.md")
    async with way(system, module.search) as tell:
        for wants_count in (True, False):
            sender, hits = channel(str)
            done, count = oneshot(int)
            await tell(module.Search("levada", sender.ordered(1), done))
            with count:
                await leaver(hits)
                if wants_count:
                    assert await count == 3
        if way is lost:
            sender, hits = channel(str)
            done, count = oneshot(int)
            await tell(module.Search("levada", sender.ordered(1), done))
            with hits, count:
                await trio.sleep(2)  # the connection is lost meanwhile


@pytest.mark.parametrize("name", ["docs/how-to/choose-a-carrier.md", "docs/how-to/serve.md"])
async def test_a_single_answer_that_no_one_waits_for(autojump_clock: MockClock, system: ActorSystem, name: str) -> None:
    module = page(name)
    async with over_a_network(system, module.quote) as tell:
        mine, theirs = oneshot(Any)
        await tell(module.Ask("EURUSD", mine))
        theirs.close()
        await wait_all_tasks_blocked()
        ours, price = oneshot(float)
        await tell(module.Ask("EURUSD", ours))
        assert await price == 1.08


@pytest.mark.parametrize("way", WAYS)
async def test_the_desk_of_the_examples(autojump_clock: MockClock, system: ActorSystem, way: Any) -> None:
    module = example("price_desk.py")
    desk = system.spawn(module.Desk)
    got: list[list[Any]] = [[], []]
    async with way(system, desk) as tell:
        for into, count in zip(got, (3, 30), strict=True):
            sender, receiver = channel(module.Price)
            await tell(module.Follow("EURUSD", sender.ordered(8)))
            with receiver:
                await module.take(receiver, count, into)
    assert [len(each) for each in got] == [3, 30]
    assert await desk.ask(module.Served()) == {"EURUSD": 2}


@pytest.mark.parametrize("way", WAYS)
async def test_the_station_of_the_tutorial(autojump_clock: MockClock, system: ActorSystem, way: Any) -> None:
    module = example("tutorial/step4_channels.py")
    station = system.spawn(module.Station, {"roof": lambda: 11.5})
    async with way(system, station) as tell:
        (gone, closed), (one, leaves), (two, stays) = (channel(module.Reading) for _ in range(3))
        closed.close()
        for sender in (gone, one, two):
            if sender.state.value == "open" or way is local:
                await tell(module.Follow(sender))
        await leaver(leaves)
        assert [(await stays.receive()).celsius for _ in range(20)] == [11.5] * 20
        stays.close()


async def test_the_counter_of_the_examples(autojump_clock: MockClock, system: ActorSystem) -> None:
    pytest.importorskip("fastapi")
    module = example("fastapi_counter.py")
    counter = system.spawn(module.Counter)
    (gone, closed), (one, leaves), (two, stays) = (channel(int) for _ in range(3))
    closed.close()
    for sender in (gone, one, two):
        counter.tell(module.Follow(sender))
    assert await counter.ask(module.Add(1)) == 1
    await leaver(leaves)
    assert await counter.ask(module.Add(1)) == 2
    assert [await stays.receive(), await stays.receive()] == [1, 2]
    stays.close()


@pytest.mark.parametrize("leaves", ["before the answer", "without a word", "lost"])
async def test_a_guest_who_leaves_the_chat_room(autojump_clock: MockClock, system: ActorSystem, leaves: str) -> None:
    module = example("chat_room.py")
    room = module.Room()
    ref = system.spawn(lambda: room)
    heard: list[str] = []
    way = {"before the answer": local, "without a word": over_a_network, "lost": lost}[leaves]
    async with way(system, ref) as send:
        hear, said = channel(module.Said)
        speak, mine = oneshot(Sender[str])
        if leaves == "before the answer":
            said.close()
            mine.close()
            await send(module.Join("Ada", hear, speak))
        else:
            await send(module.Join("Ada", hear, speak))
            voice = await mine
            with said:
                if leaves == "without a word":
                    voice.cancel()
                else:
                    await trio.sleep(2)
        await wait_all_tasks_blocked()
    await module_visit(module, system, ref, heard)
    assert heard == ["Bob: hello"]
    assert room.log[:1] == ["room: Ada has left"]
    assert ref.is_alive


async def module_visit(module: Any, system: ActorSystem, room: Ref[Any], heard: list[str]) -> None:
    async with aqueduct.serve(system, "aqueduct+memory://chat", room, module.Join) as listener:
        await module.visit(system, listener.url, "Bob", ["hello"], 1, heard)


@pytest.mark.parametrize("leaves", ["block", "connection"])
async def test_a_requester_who_leaves_a_stream_of_rsocket(
    autojump_clock: MockClock, system: ActorSystem, leaves: str
) -> None:
    prices = example("rsocket_prices.py")
    module = page("docs/how-to/rsocket.md")

    class Both(module.Desk, prices.Desk):  # type: ignore[misc, name-defined]
        pass

    async with rsocket.serve(system, "rsocket+memory://desk", Both) as listener:
        for route, question in (("count", b"1000000"), ("follow", prices.Follow("EURUSD", 1_000_000))):
            async with rsocket.connect(system, listener.url) as peer:
                payloads = await peer.request_stream(question, route=route, window=4)
                await payloads.receive()
                if leaves == "block":
                    payloads.close()
                    await wait_all_tasks_blocked()
                    assert await peer.request_response(module.Quote("EURUSD"), route="quote") == 1.08
            payloads.close()
        async with rsocket.connect(system, listener.url) as peer:
            sender, answers = await peer.request_channel(b"one", route="upper")
            with answers:
                assert (await answers.receive()).data == b"ONE"
            async with sender:
                while True:
                    await sender.send(b"more")


async def test_a_handler_of_maop_that_takes_a_part_of_a_body(autojump_clock: MockClock, system: ActorSystem) -> None:
    """The reader of a stream is the other side's handler. Its caller hears what the handler said, and the connection goes on."""
    module = page("docs/how-to/maop.md")

    async def first_line(call: maop.Call) -> None:
        async for _ in call:
            raise maop.OperationError(code=1024, detail="one line is enough")

    spec = maop.HandlerSpec(requests=False, streaming=True, allow_undefined_length=True)
    handlers = {**module.HANDLERS, module.OTHER: maop.Handler(first_line, spec=spec)}

    async def many_lines() -> AsyncIterator[bytes]:
        while True:
            yield b"line\n" * 10_000

    async with (
        maop.serve(
            system, "maop+memory://desk", handlers, authenticate=BearerTokens.of({b"secret": Identity("office-1")})
        ) as listener,
        maop.connect(system, listener.url, token=b"secret") as peer,
    ):
        with pytest.raises(maop.OperationFailed, match="one line is enough"):
            await peer.message(module.OTHER, many_lines())
        assert await peer.request(module.ECHO, b"hello") == b"hello"
