"""The overview of a dashboard: the program's own actors, what is wrong with them, and the last 15 minutes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors import rsocket
from levada.actors.console import View, Viewer
from levada.actors.console.history import EVERY, KEPT_ROWS, history_of, keep_history
from levada.actors.console.snapshot import Watching, nodes_asked_by
from levada.framework import Actor, ActorSystem, Receiver, Ref, Sender, channel, handles, message, restart
from levada.framework.embedding import DescribedActor


@message
class Work:
    pass


@message
class Fail:
    pass


@message
class Hold:
    seconds: float


class Stuck(Actor[Work]):
    @handles
    async def work(self, m: Work) -> None:
        await trio.sleep_forever()


class Clerk(Actor[Work | Fail | Hold]):
    @handles
    async def work(self, m: Work) -> None:
        await trio.sleep(1)

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError("a secret")

    @handles
    def hold(self, m: Hold) -> None:
        time.sleep(m.seconds)


class Office(Actor[Work]):
    clerks: int

    def started(self) -> None:
        for number in range(self.clerks):
            self.spawn(Stuck, name=f"clerk{number}")

    @handles
    def work(self, m: Work) -> None:
        pass


class Exchange(Actor[Work]):
    out: list[Sender[int]]
    named: dict[str, Receiver[int]]

    @handles
    def work(self, m: Work) -> None:
        pass


@contextmanager
def viewing(system: ActorSystem) -> Iterator[Viewer]:
    viewer = Viewer(system)
    try:
        yield viewer
    finally:
        viewer.close()


def paths(answer: dict[str, Any]) -> list[str]:
    return [row["path"] for row in answer["rows"]]


@asynccontextmanager
async def served(system: ActorSystem) -> AsyncIterator[None]:
    async def answer(request: rsocket.Request) -> bytes:
        return request.data

    async with rsocket.serve(system, "rsocket+memory://town", answer):
        yield


async def test_the_programs_own_actors_come_first_and_levadas_are_folded_away() -> None:
    async with ActorSystem() as system, served(system):
        system.spawn(Office, 1, name="office")
        await wait_all_tasks_blocked()
        with viewing(system) as viewer:
            assert paths(await viewer.look(View())) == ["/office"]
            shown = await viewer.look(View(internals=True))
            assert [(row["kind"], row["own"]) for row in shown["rows"]] == [("Office", True), ("ListenerActor", False)]
            assert paths(await viewer.look(View(page="overview"))) == ["/office", "/office/clerk0"]
            # A search is for all of them.
            assert [row["kind"] for row in (await viewer.look(View(search="listener")))["rows"]] == ["ListenerActor"]


async def test_an_own_actor_below_one_of_levadas_is_at_the_top() -> None:
    async with ActorSystem() as system:
        outer = type("Outer", (Office,), {"__module__": "levada.actors.rsocket.connection"})
        system.spawn(outer, 2, name="outer")
        system.spawn(Office, 0, name="office")
        await wait_all_tasks_blocked()
        with viewing(system) as viewer:
            answer = await viewer.look(View())
            assert paths(answer) == ["/office", "/outer/clerk0", "/outer/clerk1"]
            assert [row["level"] for row in answer["rows"]] == [0, 0, 0]
            assert paths(await viewer.look(View(internals=True, open=("/outer",)))) == [
                "/office",
                "/outer",
                "/outer/clerk0",
                "/outer/clerk1",
            ]


class Store(DescribedActor[Work]):
    subject = "journal"

    @property
    def about(self) -> str:
        return "of the program"

    @handles
    def work(self, m: Work) -> None:
        pass


async def test_journals_queries_and_shards_are_the_programs_own() -> None:
    async with ActorSystem() as system:
        kind = type("Store", (Store,), {"__module__": "levada.actors.journal.actor"})
        system.spawn(kind, name="orders")
        with viewing(system) as viewer:
            assert paths(await viewer.look(View())) == ["/orders"]


async def test_every_column_sorts_both_ways(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    async with ActorSystem() as system:
        office = system.spawn(Office, 3, name="office")
        await wait_all_tasks_blocked()
        for number, messages in enumerate((2, 9, 4)):
            for _ in range(messages):
                ref = system.lookup(f"/office/clerk{number}")
                assert ref is not None
                ref.tell(Work())
        for _ in range(30):
            office.tell(Work())
        with viewing(system) as viewer:
            await trio.sleep(0.5)
            by_queue = ["/office/clerk1", "/office/clerk2", "/office/clerk0", "/office"]
            assert paths(await viewer.look(View(sort="-queue"))) == by_queue
            assert paths(await viewer.look(View(sort="queue"))) == by_queue[::-1]
            assert paths(await viewer.look(View(sort="-queue", first=1, count=2))) == by_queue[1:3]
            assert paths(await viewer.look(View(sort="-handled")))[0] == "/office"
            assert paths(await viewer.look(View(sort="class")))[0] == "/office"
            assert paths(await viewer.look(View(sort="name"))) == sorted(by_queue)
            assert paths(await viewer.look(View(sort="state")))[0] == "/office"  # idle, waiting
            # Rates are known from the second look on.
            await viewer.look(View(sort="-rate"))
            for _ in range(5):
                office.tell(Work())
            await trio.sleep(3.5)
            assert paths(await viewer.look(View(sort="-rate")))[0] == "/office"
            for key in ("oldest", "restarts", "in", "wait"):
                assert sorted(paths(await viewer.look(View(sort=key)))) == sorted(by_queue)
        office.kill()
        await office.terminated()


async def test_channels_in_lists_and_dicts_have_a_row_each() -> None:
    async with ActorSystem() as system:
        pairs = [channel(int, name=f"feed{number}") for number in range(4)]
        out, named = [pair[0] for pair in pairs], {pair[1].name: pair[1] for pair in pairs}
        system.spawn(Exchange, out, named, name="exchange")
        await wait_all_tasks_blocked()
        with viewing(system) as viewer:
            answer = await viewer.look(View(page="channels"))
            shown = sorted((row["name"], row["end"]) for row in answer["rows"])
            assert shown == [(f"feed{number}", end) for number in range(4) for end in ("Receiver", "Sender")]
            assert answer["total"] == 8
            part = await viewer.look(View(page="channels", first=5, count=2))
            assert part["rows"] == answer["rows"][5:7]


async def test_pages_without_content_are_not_offered() -> None:
    async with ActorSystem() as system:
        with viewing(system) as viewer:
            assert (await viewer.look(View()))["pages"] == ["overview", "actors", "flow"]
        sender, receiver = channel(int)
        system.spawn(Exchange, [sender], {}, name="exchange")
        nodes_asked_by(system, lambda limit: _no_nodes(), None)  # type: ignore[arg-type]
        async with served(system):
            with viewing(system) as viewer:
                assert (await viewer.look(View()))["pages"] == [
                    "overview",
                    "actors",
                    "flow",
                    "connections",
                    "channels",
                    "nodes",
                ]
        receiver.close()


async def _no_nodes() -> list[dict[str, Any]]:
    await trio.lowlevel.checkpoint()
    return []


async def troubles(viewer: Viewer) -> list[str]:
    return [each["text"] for each in (await viewer.look(View(page="overview")))["troubles"]]


async def test_a_mailbox_that_grows(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    async with ActorSystem() as system:
        clerk = system.spawn(Clerk, name="clerk")
        with viewing(system) as viewer:
            assert await troubles(viewer) == []
            for _ in range(200):
                clerk.tell(Work())
            await trio.sleep(3.5)  # longer than a viewer rests
            assert await troubles(viewer) == []  # nothing to compare with yet
            for _ in range(110):
                clerk.tell(Work())
            await trio.sleep(10)
            [text] = await troubles(viewer)
            shown = r"/clerk falls behind: 296 messages wait, the oldest for .*\. It gets 11 a second and handles 1\."
            assert re.fullmatch(shown, text)
            # It still works, and gets no more.
            await trio.sleep(60)
            await troubles(viewer)
            await trio.sleep(3)
            assert await troubles(viewer) == []
        clerk.kill()
        await clerk.terminated()


@pytest.mark.handler_fails
async def test_a_crash_loop_has_its_error_and_its_line(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    async with ActorSystem() as system:
        clerk = system.spawn(Clerk, name="clerk", supervise=restart(max=100, within=1))
        with viewing(system) as viewer:
            assert await troubles(viewer) == []
            clerk.tell(Fail())
            await trio.sleep(3.5)
            assert await troubles(viewer) == []  # once is no loop
            for _ in range(4):
                clerk.tell(Fail())
                await trio.sleep(1)
            answer = await viewer.look(View(page="overview"))
            [trouble] = answer["troubles"]
            assert trouble["text"].startswith("/clerk fails again and again: 5 restarts in 7.5 s, after ValueError at ")
            assert "test_console_overview.py:" in trouble["text"]
            assert "a secret" not in str(answer)
            assert trouble["actor"] == "/clerk"


@pytest.mark.slow_handler
async def test_a_stall_names_its_actor() -> None:
    async with ActorSystem() as system:
        clerk = system.spawn(Clerk, name="clerk")
        with viewing(system) as viewer:
            await troubles(viewer)
            clerk.tell(Hold(0.12))
            await wait_all_tasks_blocked()
            [text] = await troubles(viewer)
            assert text.startswith("/clerk held up the event loop for ")
            assert " with Hold, " in text


async def test_a_node_that_is_down(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    node = {"name": "n1", "state": "down", "pid": None, "host": "", "restarts": 3, "snapshot": None, "error": ""}

    async def ask(limit: int) -> list[dict[str, Any]]:
        await trio.lowlevel.checkpoint()
        return [node, {**node, "name": "n0", "state": "up", "error": "no answer: it is busy"}]

    async with ActorSystem() as system:
        nodes_asked_by(system, ask, None)  # type: ignore[arg-type]
        with viewing(system) as viewer:
            assert await troubles(viewer) == ["Node n1 is down.", "Node n0 is up: no answer: it is busy."]


async def test_a_group_that_lags_and_refused_clients(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    figures: dict[str, Any] = {"groups": {"billing": 5000, "audit": 0}}
    refused = {"url": "rsocket+tcp://desk", "refused": 0}

    class Log(Store):
        async def report(self) -> dict[str, Any]:
            await trio.lowlevel.checkpoint()
            return figures

    class Door(Store):
        subject = "listener"

        async def report(self) -> dict[str, Any]:
            await trio.lowlevel.checkpoint()
            return refused

    async with ActorSystem() as system:
        system.spawn(Log, name="orders")
        system.spawn(Door, name="door")
        with viewing(system) as viewer:
            assert await troubles(viewer) == []
            await trio.sleep(10)
            figures["groups"] = {"billing": 6000, "audit": 10}
            refused["refused"] = 7
            assert await troubles(viewer) == [
                "Group billing of the journal /orders is 6,000 rows behind, 1,000 more than before.",
                "rsocket+tcp://desk has refused 7 clients within the last minute.",
            ]


async def test_the_last_fifteen_minutes_are_there(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        nursery.start_soon(keep_history, system)
        clerk = system.spawn(Clerk, name="clerk", supervise=restart(max=100, within=1))
        await trio.sleep(20 * 60)
        before = trio.current_time()
        for _ in range(10):
            clerk.tell(Work())
        await trio.sleep(30)
        with viewing(system) as viewer:
            answer = await viewer.look(View(page="none", history=True))
            assert "history" not in await viewer.look(View(page="none"))
        rows = answer["history"]["rows"]
        assert len(rows) == KEPT_ROWS == 900 / EVERY
        assert rows[0]["time"] == pytest.approx(before + 30 - 900, abs=2 * EVERY)
        assert all(row["actors"] == 1 for row in rows)
        during = [row for row in rows if row["time"] > before]
        assert sum(row["handled"] for row in during) * EVERY == pytest.approx(10)
        assert max(row["waiting"] for row in during) == 1
        assert all(math.isfinite(row["cpu"]) for row in rows)
        nursery.cancel_scope.cancel()


@pytest.mark.handler_fails
async def test_events_before_the_page_was_opened_are_there_without_their_texts(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        nursery.start_soon(keep_history, system)
        await wait_all_tasks_blocked()
        clerk = system.spawn(Clerk, name="clerk", supervise=restart())
        clerk.tell(Fail())
        await trio.sleep(60)
        viewer = Viewer(system, tracebacks=True)
        events = (await viewer.look(View(page="none", history=True)))["history"]["events"]
        viewer.close()
        assert [(each["what"], each["actor"], each["why"]) for each in events] == [
            ("failure", "/clerk", "ValueError"),
            ("restart", "/clerk", "restart 1"),
        ]
        assert events[0]["where"].startswith("test_console_overview.py:")
        assert "a secret" not in str(events)
        nursery.cancel_scope.cancel()


async def test_a_history_ends_with_its_last_user() -> None:
    async with ActorSystem() as system:
        with history_of(system) as one, history_of(system) as two:
            assert one is two
        with history_of(system) as three:
            assert three is not one


async def test_the_overview_of_a_driver_has_the_actors_and_troubles_of_its_nodes(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    node = {"name": "n0", "state": "up", "pid": 1, "host": "", "restarts": 0, "snapshot": None, "error": ""}
    async with ActorSystem() as system, ActorSystem("n0") as other:
        remote = Viewer(other)

        async def ask(limit: int) -> list[dict[str, Any]]:
            await trio.lowlevel.checkpoint()
            return [node, {**node, "name": "n1", "state": "down"}]

        async def watch(name: str, actions: bool, tracebacks: bool) -> Watching:
            await trio.lowlevel.checkpoint()
            assert (name, actions, tracebacks) == ("n0", False, False)
            return remote.answer

        nodes_asked_by(system, ask, watch)
        system.spawn(Office, 0, name="office")
        clerk = other.spawn(Clerk, name="clerk")
        with viewing(system) as viewer:
            for _ in range(200):
                clerk.tell(Work())
            await viewer.look(View(page="overview"))
            await trio.sleep(3.5)
            for _ in range(50):
                clerk.tell(Work())
            answer = await viewer.look(View(page="overview"))
            assert [(row.get("node"), row["path"]) for row in answer["rows"]] == [(None, "/office"), ("n0", "/clerk")]
            assert answer["total"] == 2
            wrong = [(trouble.get("node"), trouble["text"].partition(":")[0]) for trouble in answer["troubles"]]
            assert wrong == [(None, "Node n1 is down."), ("n0", "/clerk falls behind")]
        remote.close()
        clerk.kill()
        await clerk.terminated()


class Sends(Actor[Work]):
    others: list[Ref[Any]]

    @handles
    def work(self, m: Work) -> None:
        for other in self.others:
            other.tell(m)


class Passes(Actor[Work]):
    incoming: Receiver[int]

    @handles
    def work(self, m: Work) -> None:
        pass


class Takes(Actor[Work]):
    @handles
    def work(self, m: Work) -> None:
        pass


async def test_a_channel_ties_its_two_ends() -> None:
    async with ActorSystem() as system:
        sender, receiver = channel(int, name="quotes")
        system.spawn(Exchange, [sender], {}, name="desk")
        system.spawn(Exchange, [], {"in": receiver}, name="board")
        await wait_all_tasks_blocked()
        with viewing(system) as viewer:
            ties = (await viewer.look(View(page="flow")))["rows"]
            assert ties == []  # of one class and parent: one box
            system.spawn(Takes, name="other")
            assert (await viewer.look(View(page="flow", search="nothing")))["rows"] == []
        inner, outer = channel(int, name="orders")
        system.spawn(Passes, outer, name="passes")
        system.spawn(Exchange, [inner], {}, name="third")
        with viewing(system) as viewer:
            [tie] = (await viewer.look(View(page="flow", search="PASSES")))["rows"]
            assert (tie["path"], tie["to"], tie["channels"]) == ("/Exchange \u00d7 3", "/passes", 1)


async def test_who_sends_to_whom_is_noted_only_while_a_client_looks() -> None:
    async with ActorSystem() as system:
        takers: list[Ref[Any]] = [system.spawn(Takes, name=f"taker{number}") for number in range(3)]
        lone = system.spawn(Takes, name="lone")
        sender = system.spawn(Sends, takers, name="sender")
        with viewing(system) as viewer:
            assert system.observe.flows is None
            [tie] = (await viewer.look(View(page="flow")))["rows"]
            assert tie == {"path": "/sender", "to": "/Takes \u00d7 4", "sent": 0, "waited": 0, "channels": 0, "refs": 3}
            for _ in range(640):
                sender.tell(Work())
                await wait_all_tasks_blocked()
            [tie] = (await viewer.look(View(page="flow")))["rows"]
            assert 0 < tie["sent"] <= 4 * 640 * 3
            await viewer.look(View())
            assert system.observe.flows is None
        assert lone.is_alive
