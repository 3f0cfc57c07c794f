"""The rows of Akka, Orleans, Ray, Temporal, Celery, asyncio, gRPC and Kafka in coming-from.md: each is run by a test here, which names it."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import attrs
import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

from tests.actors.nodes.conftest import nodes_here

from levada.actors import rsocket
from levada.actors.durable import Durable, Shards, applies, shards, upcasts
from levada.actors.journal import Append, GetExtent, Journal, Read, ReadRows
from levada.actors.nodes import Nodes, NodeSettings, singleton
from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Behaviour,
    Down,
    Ref,
    Sender,
    blocking,
    bounded,
    channel,
    handles,
    message,
    restart,
    router,
)
from levada.framework.errors import ActorStopped, AskCycle, ConfigurationError, MailboxFull
from levada.framework.testing.simulation import World, simulate

PAGE = (Path(__file__).resolve().parents[2] / "docs/explanation/coming-from.md").read_text("utf-8")
T = TypeVar("T", bound=Callable[..., Any])
HELD: set[tuple[str, str]] = set()
SECTIONS = ("Akka and Pekko", "Orleans", "Ray", "Temporal", "Celery", "asyncio queues", "gRPC", "Kafka consumers")


def row(section: str, *cells: str) -> Callable[[T], T]:
    """Note that a test runs rows of the page, named by their first cells."""
    HELD.update((section, cell) for cell in cells)
    return lambda test: test


def test_each_row_has_a_test() -> None:
    rows = {
        (section, cell)
        for section in SECTIONS
        for cell in re.findall(
            r"^\| (.*?) \|", PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0], re.MULTILINE
        )
        if cell != "there"
    }
    assert rows == HELD


@message("tests.coming_from.Add", frozen=True)
class Add(Asks[int]):
    n: int


@message("tests.coming_from.Where", frozen=True)
class Where(Asks[str]):
    pass


@message("tests.coming_from.Fail", frozen=True)
class Fail(Asks[None]):
    pass


@message("tests.coming_from.Added", frozen=True)
class Added:
    event_version: ClassVar[int] = 2
    n: int


class Counter(Actor[Add | Where | Fail]):
    total: int = 0

    @handles
    def add(self, m: Add) -> int:
        self.total += m.n
        return self.total

    @handles
    def where(self, m: Where) -> str:
        return self.system.name

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError("as told")


@row("Akka and Pekko", "`ActorSystem`", "`Behavior[T]`, `ActorRef[T]`", "`!`, `ask`")
async def test_a_block_of_a_system_ends_when_its_actors_have_ended(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        counter: Ref[Add | Where | Fail] = system.spawn(Counter, mailbox=bounded(1))
        counter.tell(Add(1))
        with pytest.raises(MailboxFull):
            counter.tell(Add(1))
        await counter.send(Add(2))  # waits for room
        assert await counter.ask(Add(0)) == 3
        assert counter.is_alive
    assert not counter.is_alive


@row("Akka and Pekko", "`Behaviors.receive…`, `become`", "`Stash`, timers")
async def test_an_actor_that_waits_handles_nothing_else(autojump_clock: MockClock) -> None:
    class Closed(Behaviour):
        @handles
        def wait(self: Any, m: Add) -> None:
            self.stash(m)

        @handles(str)
        def open(self: Any, m: str) -> None:
            self.become(None)
            self.unstash_all()

    class Door(Actor[Add | str]):
        seen: list[tuple[int, float]] = attrs.field(factory=list)

        def started(self) -> None:
            self.timers.once("open", 5.0, "open")
            self.become(Closed)

        @handles
        async def add(self, m: Add) -> int:
            await trio.sleep(m.n)
            self.seen.append((m.n, trio.current_time()))
            return m.n

        @handles(str)
        def open(self, m: str) -> None:
            raise AssertionError(m)

    async with ActorSystem() as system:
        door = Door()
        ref = system.spawn(lambda: door)
        begin = trio.current_time()
        ref.tell(Add(1))
        ref.tell(Add(2))
        await trio.sleep(10)
        assert door.seen == [(1, begin + 6), (2, begin + 8)]


@row("Akka and Pekko", "`context.watch`, `Terminated`", "supervision strategies")
@row("Ray", "`max_restarts`, `max_task_retries`")
async def test_a_supervisor_restarts_and_a_watcher_learns_why(autojump_clock: MockClock) -> None:
    reasons: list[str] = []

    class Watcher(Actor[Down]):
        target: Ref[Any]

        def started(self) -> None:
            self.watch(self.target)

        @handles
        def down(self, m: Down) -> None:
            reasons.append(str(m.reason))

    async with ActorSystem() as system:
        counter = system.spawn(Counter, supervise=restart(max=1, within=60.0))
        system.spawn(Watcher, counter)
        await counter.ask(Add(5))
        counter.tell(Fail())
        assert await counter.ask(Add(1)) == 1  # another object; the message that failed is not tried again
        other = system.spawn(Counter)
        system.spawn(Watcher, other)
        await trio.sleep(1)
        other.tell(Fail())
        await trio.sleep(1)
        assert len(reasons) == 1
        assert "as told" in reasons[0]


@row("Akka and Pekko", "routers, receptionist")
async def test_a_pull_router_gives_work_to_idle_actors(autojump_clock: MockClock) -> None:
    done: list[tuple[int, int]] = []

    class Worker(Actor[Add]):
        pace: float

        @handles
        async def add(self, m: Add) -> int:
            await trio.sleep(self.pace)
            done.append((int(self.pace), m.n))
            return m.n

    async with ActorSystem() as system:
        for pace in (1, 100):
            system.groups.join("workers", system.spawn(Worker, pace))
        ref = system.spawn(router.group("workers", routing=router.pull()))
        system.registry.register("workers", ref)
        for number in range(20):
            system.registry["workers"].tell(Add(number))
        await trio.sleep(50)
        assert len(done) == 19
        ref.kill()


@row("Akka and Pekko", "Streams")
async def test_an_end_of_a_channel_travels_in_a_message(autojump_clock: MockClock) -> None:
    @message("tests.coming_from.Count")
    class Count:
        to: Sender[int]

    class Source(Actor[Count]):
        @handles
        async def count(self, m: Count) -> None:
            async with m.to as to:
                for number in range(5):
                    await to.send(number)

    async with ActorSystem() as system:
        sender, numbers = channel(int)
        system.spawn(Source).tell(Count(sender.ordered(1)))
        assert [number async for number in numbers] == [0, 1, 2, 3, 4]


@row("Akka and Pekko", "dispatchers")
async def test_a_blocking_handler_has_a_thread() -> None:
    class Worker(Actor[Where]):
        @handles
        @blocking
        def where(self, m: Where) -> str:
            return threading.current_thread().name

    async with ActorSystem() as system:
        assert await system.spawn(Worker).ask(Where()) != threading.current_thread().name


class Account(Durable[Add | Where | Fail]):
    """Old events had the amount in units of ten."""

    total: int = 0

    @handles
    def add(self, m: Add) -> int:
        self.record(Added(m.n))
        if m.n == 7:
            self.remind(self.system.platform.time() + 86_400.0, Add(1000))
            self.after_commit(self.system.registry["sum"], Add(m.n))
        return self.total

    @handles
    def where(self, m: Where) -> str:
        return f"{self.total} on {self.system.name}"

    @handles
    async def fail(self, m: Fail) -> None:
        await SHARDS["alone"][self.entity].ask(Where())

    @applies
    def added(self, e: Added) -> None:
        self.total += e.n

    @upcasts("tests.coming_from.Added", version=1)
    @staticmethod
    def in_ones(columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"n": columns["n"] * 10}


SHARDS: dict[str, Shards[Any]] = {}


async def open_accounts(system: ActorSystem, folder: Path) -> Shards[Any]:
    SHARDS[system.name] = await shards(
        system, Account, events=Added, journal=folder, shards=2, snapshot_every=5, idle=5.0
    )
    return SHARDS[system.name]


@row("Orleans", "grain", "grain state, event-sourced grains", "reminders", "reentrancy")
@row("Akka and Pekko", "Persistence, Cluster Sharding")
@row("Temporal", "workflow, workflow id", "event history", "Signal, Update", "Query", "Activity")
@row("Temporal", "timers, `workflow.sleep`", "Continue-As-New", "child workflows")
async def test_a_durable_actor_alone(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with ActorSystem("alone") as system:
        system.registry.register("sum", system.spawn(Counter))
        accounts = await open_accounts(system, tmp_path)
        assert await accounts["anna"].ask(Add(7), command="order-1") == 7
        assert await accounts["anna"].ask(Add(7), command="order-1") == 7
        assert await accounts["bert"].ask(Add(1)) == 1
        with pytest.raises(Exception, match="anna") as caught:
            await accounts["anna"].ask(Fail())
        assert isinstance(caught.value.__cause__, AskCycle)
        assert await system.registry["sum"].ask(Add(0)) == 7
        for _ in range(10):
            await accounts["anna"].ask(Add(1))
        await trio.sleep(60)
        assert (await accounts.statistics()).live == 0  # idle entities have left memory
        assert await accounts["anna"].ask(Where()) == "17 on alone"
    async with ActorSystem("alone") as system:
        accounts = await open_accounts(system, tmp_path)
        await trio.sleep(86_400)
        assert await accounts["anna"].ask(Where()) == "1017 on alone"
        assert accounts.journal is not None
        kinds: list[Any] = []
        for partition in (await accounts.journal.ask(GetExtent())).end:
            kinds += (await accounts.journal.ask(ReadRows(partition, 0))).batch().column("kind").to_pylist()
        assert kinds.count("tests.coming_from.Added") == 13
        assert "$snapshot" in kinds


@row("Temporal", "`patched`, worker versioning")
async def test_old_events_are_converted(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Added, "event_version", 1)
    async with ActorSystem("alone") as system:
        await (await open_accounts(system, tmp_path))["anna"].ask(Add(2))
    monkeypatch.setattr(Added, "event_version", 2)
    async with ActorSystem("alone") as system:
        assert await (await open_accounts(system, tmp_path))["anna"].ask(Where()) == "20 on alone"


@row("Temporal", "time-skipping test server")
def test_a_world_kills_a_node() -> None:
    async def scenario(world: World) -> None:
        process = await world.start("a", trio.sleep_forever, restart=1.0)
        await trio.sleep(3600)
        process.kill()
        assert await process.wait() == -9

    simulate(scenario, seeds=[1], limit=7200)


FOLDER: list[Path] = []


async def app(system: ActorSystem) -> AsyncIterator[None]:
    await open_accounts(system, FOLDER[-1])
    yield


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[tuple[ActorSystem, Nodes]]:
    FOLDER.append(folder)
    async with (
        ActorSystem("driver", ask_timeout=60.0) as system,
        nodes_here(system, 2, f"{__name__}:app", settings=NodeSettings(start_timeout=30.0)) as (nodes, _),
    ):
        yield system, nodes


@row("Akka and Pekko", "Cluster, remoting", "Cluster Singleton and its proxy")
@row("Orleans", "silo", "grain placement")
@row("Ray", "`@ray.remote` class", "`ray.get(actor.method.remote())`", "named actors, `get_if_exists=True`")
@row("Ray", "object store", "pickled arguments")
@row("Temporal", "server, task queues, workers")
async def test_actors_on_nodes(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (system, nodes):
        counter = await nodes.spawn(Counter, on="n1")
        assert await counter.ask(Where()) == "n1"
        one = await singleton(system, Counter, name="one")
        assert await (await singleton(system, Counter, name="one")).ask(Add(1)) == 1
        assert await one.ask(Add(1)) == 2
        with pytest.raises(ConfigurationError, match="argument"):
            await singleton(system, Counter, 5, name="one")
        places = {await SHARDS[name][f"e{number}"].ask(Where()) for name in ("n0", "n1") for number in range(9)}
        assert places == {"0 on n0", "0 on n1"}
        with pytest.raises((TypeError, ValueError)):
            await counter.send(object())  # type: ignore[arg-type]


@row(
    "Celery",
    "`@app.task`, `task.delay`",
    "`AsyncResult.get`",
    "worker pool, `concurrency`",
    "`autoretry_for`, `max_retries`",
)
@row("Celery", "`countdown`, `eta`", "beat")
@row(
    "asyncio queues", "a worker task, `while True: await queue.get()`", "a future for the answer", "`join`, `task_done`"
)
@pytest.mark.handler_fails
async def test_a_pool_of_workers_restarts_and_keeps_time(autojump_clock: MockClock) -> None:
    done: list[int] = []

    class Worker(Actor[Add | Fail]):
        @handles
        async def add(self, m: Add) -> int:
            await trio.sleep(1)
            done.append(m.n)
            return m.n

        @handles
        def fail(self, m: Fail) -> None:
            raise ValueError("as told")

    class Beat(Actor[Add]):
        workers: Ref[Any]

        def started(self) -> None:
            self.timers.every("beat", 60.0, Add(1))
            self.timers.once("eta", 90.0, Add(2))

        @handles
        def add(self, m: Add) -> int:
            self.workers.tell(m)
            return m.n

    async with ActorSystem() as system:
        workers = system.spawn(router.pool(Worker, size=2, routing=router.pull(), supervise=restart()))
        with pytest.raises(ActorStopped, match="as told"):
            await workers.ask(Fail())
        assert await workers.ask(Add(7)) == 7
        beat = system.spawn(Beat, workers)
        await trio.sleep(130)
        assert done == [7, 1, 2, 1]
        beat.stop()
        for number in (5, 6):
            workers.tell(Add(number))
        workers.stop()
        await workers.terminated()
    assert sorted(done[4:]) == [5, 6]


@row("Celery", "task id, `acks_late`")
async def test_a_command_with_an_id_is_done_once(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with ActorSystem("alone") as system:
        accounts = await open_accounts(system, tmp_path)
        assert [await accounts["anna"].ask(Add(1), command="order-17") for _ in range(2)] == [1, 1]
        assert await accounts["anna"].ask(Add(1)) == 2


@row("asyncio queues", "`Queue(maxsize)`, `await put`", "`put_nowait`, `QueueFull`", "a sentinel for the end")
async def test_senders_wait_and_a_channel_ends_its_readers_loop(autojump_clock: MockClock) -> None:
    class Slow(Actor[Add]):
        @handles
        async def add(self, m: Add) -> int:
            await trio.sleep(1)
            return m.n

    async with ActorSystem() as system:
        slow = system.spawn(Slow, mailbox=bounded(1))
        begin = trio.current_time()
        for number in range(5):
            await slow.send(Add(number))
        assert trio.current_time() - begin == pytest.approx(3)
        with pytest.raises(MailboxFull) as caught:
            slow.tell(Add(9))
        assert caught.value.message == Add(9)
    sender, numbers = channel(int)
    async with trio.open_nursery() as nursery:
        sender.send_nowait(1)
        nursery.start_soon(sender.finish)
        assert [number async for number in numbers] == [1]


@row("gRPC", "unary call", "server streaming", "deadline", "status codes", "generated stubs")
async def test_calls_of_other_programs(autojump_clock: MockClock) -> None:
    sent: list[int] = []
    cancelled = trio.Event()

    class Desk(Actor[Any]):
        @rsocket.route("upper")
        async def upper(self, data: bytes) -> bytes:
            return data.upper()

        @rsocket.route("refuse")
        async def refuse(self, data: bytes) -> bytes:
            raise rsocket.RequestRejected("not today")

        @rsocket.route("hang")
        async def hang(self, data: bytes) -> bytes:
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()

        @rsocket.route("count")
        async def count(self, data: bytes) -> AsyncIterator[bytes]:
            for number in range(1000):
                sent.append(number)
                yield b"%d" % number

    async with (
        ActorSystem() as system,
        rsocket.serve(system, "rsocket+memory://grpc", Desk) as listener,
        rsocket.connect(system, listener.url) as peer,
    ):
        assert (await peer.request_response(b"anna", route="upper")).data == b"ANNA"
        with pytest.raises(rsocket.RequestRejected) as caught:
            await peer.request_response(b"", route="refuse")
        assert caught.value.retryable
        with trio.move_on_after(5):
            await peer.request_response(b"", route="hang")
        await cancelled.wait()
        async with await peer.request_stream(b"", route="count", window=4) as numbers:
            assert (await numbers.receive()).data == b"0"
            await trio.sleep(10)
            assert len(sent) < 20  # the rest waits for credit


@row("Kafka consumers", "topic, partitions", "`producer.send(…).get()`", "`seek`, `poll`", "end offsets")
async def test_rows_have_partitions_and_offsets(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with ActorSystem() as system:
        log = system.spawn(Journal, tmp_path / "log", Added, mailbox=bounded(16))
        await log.ask(Append([Added(n) for n in range(5)]))
        assert sum((await log.ask(GetExtent())).end.values()) == 5
        [partition] = [each for each, end in (await log.ask(GetExtent())).end.items() if end]
        [block] = await log.ask(Read(partition, 3))
        assert block.batch().column("n").to_pylist()[-2:] == [3, 4]
