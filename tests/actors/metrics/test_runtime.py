"""Metrics of the runtime: actors by class, mailboxes, supervision, channels."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from time import thread_time

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'levada[prometheus]'")

import trio.lowlevel

from levada.actors.metrics import Metrics, collecting
from levada.framework import Actor, ActorSystem, Metric, Ref, Sample, handles, message, restart

from .scraped import part, scrape

DONE = Metric("desk_done_total", "counter", "What desks have done.", ("desk",))
OPEN = Metric("desk_open", "gauge", "What desks have to do.")


@message
class Work:
    pass


@message
class Fail:
    pass


class Desk(Actor[Work | Fail]):
    done: int = 0

    @handles
    def work(self, m: Work) -> None:
        self.done += 1

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError

    def metrics(self) -> Iterable[Sample]:
        return [DONE.sample(self.done, "north"), OPEN.sample(2)]


class Idler(Actor[Work]):
    @handles
    async def work(self, m: Work) -> None:
        await trio.sleep_forever()


async def test_actors_by_class(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        metrics = Metrics(system)
        desk = system.spawn(Desk, supervise=restart("transient"))
        idler, *_ = [system.spawn(Idler) for _ in range(3)]
        idler.tell(Work())
        await wait_all_tasks_blocked()
        idler.tell(Work())
        desk.tell(Work())
        desk.tell(Fail())
        await trio.sleep(20)
        found = await scrape(metrics)
        assert part(found, "levada_actor") == {
            ("levada_actors", "Idler"): 3,
            ("levada_actors", "Desk"): 1,
            ("levada_actors_ready",): 0,
            ("levada_actors_spawned_total",): 4,
            ("levada_actors_stopped_total",): 0,
            ("levada_actor_failures_total", "Desk"): 1,
            ("levada_actor_restarts_total", "Desk"): 1,
        }
        assert part(found, "levada_messages", "levada_mailbox_messages", "levada_handlers") == {
            ("levada_messages_handled_total", "Idler"): 1,
            ("levada_messages_handled_total", "Desk"): 2,
            ("levada_mailbox_messages", "Idler"): 1,
            ("levada_mailbox_messages", "Desk"): 0,
            ("levada_handlers_waiting", "Idler"): 1,
            ("levada_handlers_waiting", "Desk"): 0,
        }
        assert found["levada_mailbox_oldest_seconds", "Idler"] > 0
        assert found["levada_turn_seconds_bucket", "+Inf"] == found["levada_turn_seconds_count",]
        assert found["levada_scrape_complete",] == 1
        idler.kill()


async def test_totals_never_go_back() -> None:
    """Over ends and restarts, also in the middle of a pass, by scrapes one after another."""
    async with ActorSystem() as system:
        metrics = Metrics(system)
        told = -1.0
        handled = -1.0
        sent = 0
        desks: list[Ref[Work | Fail]] = []
        for round_ in range(40):
            desks.append(
                system.spawn(Desk, supervise=restart("transient", max=1000, initial_backoff=0.0001, max_backoff=0.0001))
            )
            for desk in desks:
                desk.tell(Work())
                sent += 1
            if round_ % 3 == 1:
                desks[0].tell(Fail())
            if round_ % 5 == 4:
                desks.pop(0).stop()
            found = await scrape(metrics)
            assert found["desk_done_total", "north"] >= told
            assert found["levada_messages_handled_total", "Desk"] >= handled
            told, handled = found["desk_done_total", "north"], found["levada_messages_handled_total", "Desk"]
            assert told <= sent
        while (await scrape(metrics))["desk_done_total", "north"] < sent:
            await trio.lowlevel.checkpoint()
        for desk in desks:
            desk.stop()
            await desk.terminated()
        found = await scrape(metrics)
        assert found["desk_done_total", "north"] == sent
        assert ("desk_open",) not in found


async def test_an_end_during_a_pass_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that the pass has not visited when it ends is told as before; none is counted twice."""
    monkeypatch.setattr(collecting, "SLICE", -1.0)  # a step after every few actors
    async with ActorSystem() as system:
        metrics = Metrics(system)
        desks = [system.spawn(Desk) for _ in range(200)]
        for desk in desks:
            desk.tell(Work())
        await wait_all_tasks_blocked()
        assert (await scrape(metrics))["desk_done_total", "north"] == 200
        found: list[float] = []
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def scraping() -> None:
                for _ in range(5):
                    found.append((await scrape(metrics))["desk_done_total", "north"])

            for first, last in zip(desks, reversed(desks[100:]), strict=False):
                first.stop()
                last.stop()
                await trio.lowlevel.checkpoint()
        assert found == [200] * 5


async def test_labels_are_bounded() -> None:
    """A thousand classes are 50, and all others together; what was named keeps its name."""
    async with ActorSystem() as system:
        metrics = Metrics(system)
        system.spawn(Desk)
        classes = [type(f"Kind{number}", (Idler,), {}) for number in range(1000)]
        kinds = [system.spawn(kind) for kind in classes]
        for _ in range(5):
            system.spawn(classes[900])
        found = part(await scrape(metrics), "levada_actors")
        named = {key[1]: value for key, value in found.items() if key[0] == "levada_actors"}
        assert len(named) == 51
        assert (named["Kind900"], named["other"], sum(named.values())) == (6, 1006 - 49 - 6, 1006)
        for kind in kinds[:40]:
            kind.stop()
        await wait_all_tasks_blocked()
        after = {key[1] for key in part(await scrape(metrics), "levada_actors_") if key[1:]}
        assert after <= set(named)


async def test_sources_that_are_no_actors() -> None:
    @attrs.define  # compared by value, so it has no hash
    class Queue:
        taken: int = 3

        def metrics(self) -> Iterable[Sample]:
            return [DONE.sample(self.taken, "queue"), OPEN.sample(5)]

    async with ActorSystem() as system:
        metrics = Metrics(system)
        remove = metrics.add(Queue())
        found = await scrape(metrics)
        assert part(found, "desk") == {("desk_done_total", "queue"): 3, ("desk_open",): 5}
        remove()
        remove()
        assert part(await scrape(metrics), "desk") == {("desk_done_total", "queue"): 3}


async def test_a_source_that_fails_takes_nothing_else_with_it(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Idler):
        def metrics(self) -> Iterable[Sample]:
            raise KeyError("secret")

    class Other:
        def metrics(self) -> Iterable[Sample]:
            return [Metric("desk_open", "gauge", "Another metric of this name.").sample(1)]

    async with ActorSystem() as system:
        metrics = Metrics(system)
        metrics.add(Other())
        for _ in range(12):
            system.spawn(Broken)
        system.spawn(Desk)
        found = await scrape(metrics)
        assert found["levada_actors", "Broken"] == 12
        assert found["desk_open",] == 2
        texts = [record.getMessage() for record in caplog.records]
        assert texts[:-1] == 10 * ["Broken.metrics failed"]
        assert texts[-1].endswith("has no metrics")
        caplog.clear()
        system.root.stop()


async def test_without_time_figures_are_of_an_earlier_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ActorSystem() as system:
        metrics = Metrics(system)
        for _ in range(100):
            system.spawn(Idler)
        assert (await scrape(metrics))["levada_actors", "Idler"] == 100
        for _ in range(100):
            system.spawn(Idler)
        monkeypatch.setattr(collecting, "SLICE", -1.0)
        monkeypatch.setattr(collecting, "_PASS", -1.0)
        found = await scrape(metrics)
        assert (found["levada_actors", "Idler"], found["levada_scrape_complete",]) == (100, 0)
        assert found["levada_actors_spawned_total",] == 200
        monkeypatch.undo()
        found = await scrape(metrics)
        assert (found["levada_actors", "Idler"], found["levada_scrape_complete",]) == (200, 1)


@pytest.mark.ci
async def test_a_scrape_of_many_actors_holds_up_nobody() -> None:
    """Others run every few milliseconds, as with the console."""
    async with ActorSystem(shutdown_timeout=60.0) as system:
        for _ in range(100_000):
            system.spawn(Idler)
        await wait_all_tasks_blocked()
        metrics = Metrics(system)
        longest: list[float] = []
        found: dict[str, object] = {}
        gc.disable()  # a collection over so many objects takes 50 ms, whoever allocates
        try:
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def watch() -> None:
                    before = thread_time()
                    while True:
                        await trio.lowlevel.checkpoint()
                        now = thread_time()
                        longest.append(now - before)
                        before = now

                while "levada_actors" not in found:  # on a busy machine a pass may need more than one scrape
                    found = {metric.name: values for metric, values in (await metrics.collect()).items()}
                nursery.cancel_scope.cancel()
        finally:
            gc.enable()
        assert found["levada_actors"] == {("Idler",): 100_000}
        assert len(longest) > 20
        # CPU seconds: two slices of 0.002, and the work between them. Of some, the host of a virtual machine took a part.
        assert sorted(longest)[len(longest) * 9 // 10] < 0.01
