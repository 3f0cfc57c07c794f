"""Figures that actors tell of themselves: declarations, sums, and totals that outlive their actors."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Metric,
    Normal,
    Reason,
    Sample,
    Shutdown,
    channel,
    handles,
    message,
    restart,
)
from levada.framework.errors import ConfigurationError
from levada.framework.metrics import MOST_SERIES, OTHER, Distribution, Tally
from levada.framework.observe import ClassFigures, Histogram

DONE = Metric("test_done_total", "counter", "What was done.", ("kind",))
OPEN = Metric("test_open", "gauge", "What is to be done.")
TOOK = Metric("test_took_seconds", "histogram", "How long it took.")
OLDEST = Metric("test_oldest_seconds", "gauge", "How long the oldest waits.", combine="max")


@message
class Work:
    pass


@message
class Fail:
    pass


@message
class Done(Asks[int]):
    pass


class Clerk(Actor[Work | Fail | Done]):
    done: int = 0

    @handles
    def work(self, m: Work) -> None:
        self.done += 1

    @handles
    async def fail(self, m: Fail) -> None:
        raise ValueError

    @handles
    async def count(self, m: Done) -> int:
        await trio.sleep(1)
        return self.done

    def metrics(self) -> Iterable[Sample]:
        yield DONE.sample(self.done, "work")
        yield OPEN.sample(7)


@pytest.mark.parametrize(
    ("name", "kind", "labels"),
    [
        ("desk_done", "counter", ()),
        ("desk_done_total", "gauge", ()),
        ("desk-done_total", "counter", ()),
        ("Desk_total", "counter", ()),
        ("desk_total", "counter", ("le",)),
        ("desk_total", "counter", ("__name",)),
        ("desk_total", "counter", ("a b",)),
    ],
)
def test_names_follow_the_rules_of_prometheus(name: str, kind: str, labels: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"desk|Desk|le|__name|a b"):
        Metric(name, kind, "Some.", labels)  # type: ignore[arg-type]


def test_a_metric_has_a_help_text_and_a_sample_all_labels() -> None:
    with pytest.raises(ConfigurationError, match="needs a sentence"):
        Metric("desk_open", "gauge", "")
    with pytest.raises(ConfigurationError, match="has the labels"):
        DONE.sample(1)


def test_samples_are_combined_as_their_metric_says() -> None:
    tally = Tally()
    tally.add([DONE.sample(1, "a"), DONE.sample(2, "a"), DONE.sample(4, "b"), OLDEST.sample(3.0), OLDEST.sample(2.0)])
    assert tally.series == {DONE: {("a",): 3, ("b",): 4}, OLDEST: {(): 3.0}}
    other = tally.branch()
    other.add([DONE.sample(10, "a"), OPEN.sample(1)], lasting=True)
    assert other.series == {DONE: {("a",): 13, ("b",): 4}, OLDEST: {(): 3.0}}
    assert tally.series[DONE]["a",] == 3


def test_the_labels_of_a_metric_are_bounded_and_stay_what_they_are() -> None:
    """What was named keeps its name, and what was not never gets one, so no total goes back."""
    tally = Tally()
    for number in range(3 * MOST_SERIES):
        tally.branch().add([DONE.sample(1, f"k{number}")])
    last = tally.branch()
    last.add([DONE.sample(1, f"k{number}") for number in reversed(range(3 * MOST_SERIES))])
    assert last.series[DONE] == {(OTHER,): 2 * MOST_SERIES, **{(f"k{n}",): 1 for n in range(MOST_SERIES)}}
    tally.add([DONE.sample(1, "k0\n\x1b[2J" + 200 * "x")])
    assert tally.series[DONE] == {(OTHER,): 1}


def test_two_metrics_of_one_name_are_refused() -> None:
    tally = Tally()
    tally.add([DONE.sample(1, "a")])
    other = Metric("test_done_total", "counter", "Another.")
    with pytest.raises(ConfigurationError, match="two metrics named test_done_total"):
        tally.branch().add([other.sample(1)])


def test_distributions_of_a_histogram_add_up() -> None:
    histogram = Histogram()
    for seconds in (0.5e-6, 3e-6, 3e-6, 0.1, 100.0):
        histogram.add(seconds)
    found = histogram.distribution()
    assert dict(zip(found.bounds, found.counts, strict=False)) == {
        **dict.fromkeys(found.bounds, 0),
        1e-6: 1,
        4e-6: 2,
        0.262144: 1,
    }
    assert (sum(found.counts), found.counts[-1]) == (5, 1)
    assert found.total == pytest.approx(100.1, abs=1e-4)
    assert sum((found + found).counts) == 10
    assert (found + found).total == 2 * found.total
    with pytest.raises(ConfigurationError, match="the same bounds"):
        _ = found + Distribution((1.0,), (1, 2), 1.0)


@pytest.mark.parametrize(
    ("metric", "value", "label"),
    [
        (DONE, "5", "a"),
        (DONE, None, "a"),
        (DONE, Distribution((1.0,), (1, 2), 1.0), "a"),
        (DONE, 1, 5),
        (TOOK, 5, None),
        (OPEN, Decimal(5), None),
    ],
)
def test_a_sample_that_no_scrape_could_show_is_refused(metric: Metric, value: Any, label: Any) -> None:
    """Otherwise one actor would spoil all scrapes, and its totals those after its end."""
    with pytest.raises(ConfigurationError, match=metric.name):
        metric.sample(value, *(() if label is None else (label,)))


@pytest.mark.parametrize(("bounds", "counts"), [((0.1, 1.0), (1, 2)), ((0.1,), (1, 2, 3)), ((1.0, 0.1), (1, 2, 3))])
def test_buckets_of_another_shape_are_refused(bounds: tuple[float, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="one count more than bounds"):
        Distribution(bounds, counts, 1.0)


async def test_totals_outlive_the_actor_however_it_ends(autojump_clock: MockClock) -> None:
    """Stopped behind its messages, stopped at once, killed in a handler, failed, restarted."""
    async with ActorSystem() as system:
        for end in ("stop", "now", "kill", "fail"):
            clerk = system.spawn(Clerk)
            for _ in range(3):
                clerk.tell(Work())
            if end == "stop":
                clerk.stop()
            elif end == "fail":
                clerk.tell(Fail())
            else:
                await wait_all_tasks_blocked()
                if end == "kill":
                    clerk.tell(Done())
                    await wait_all_tasks_blocked()
                    clerk.kill()
                else:
                    clerk.stop(now=True)
            await clerk.terminated()
        assert system.observe.ended.series == {DONE: {("work",): 12}}
        # `Fail` and `Done` were handled, too.
        assert system.observe.handled == {Clerk: 14}
        assert system.observe.failures == {"Clerk": 1}

        again = system.spawn(Clerk, supervise=restart("permanent"))
        again.tell(Work())
        again.tell(Fail())
        await trio.sleep(10)
        again.tell(Work())
        await wait_all_tasks_blocked()
        assert system.observe.restarts == {"Clerk": 1}
        assert system.observe.ended.series == {DONE: {("work",): 13}}
        classes: dict[str, ClassFigures] = {}
        assert system.observe.count(again, classes, 0.0)  # type: ignore[arg-type]
        assert classes == {"Clerk": ClassFigures(actors=1, handled=3)}


async def test_messages_count_whatever_an_actor_does_when_it_ends(autojump_clock: MockClock) -> None:
    """It is idle and released by its parent, has a hook, or waits for its restart."""

    class Neat(Clerk):
        def stopping(self, reason: Reason) -> None:
            pass

    async with ActorSystem() as system:
        released, neat = system.spawn(Clerk), system.spawn(Neat)
        waiting = system.spawn(
            Clerk, supervise=restart("transient", initial_backoff=100.0, max_backoff=100.0, jitter=0.0)
        )
        for clerk in (released, neat, waiting):
            clerk.tell(Work())
            clerk.tell(Work())
        waiting.tell(Fail())  # starts again at once
        waiting.tell(Fail())
        await wait_all_tasks_blocked()
        assert [child.state for child in system.observe.tree().children] == ["idle", "idle", "restarting"]
        system.lifecycle.release(released, Normal())  # type: ignore[arg-type]
        neat.stop()
        waiting.stop(now=True)
        await waiting.terminated()
        await neat.terminated()
        assert trio.current_time() < 100.0
        assert system.observe.handled == {Clerk: 6, Neat: 2}


async def test_figures_of_a_class(autojump_clock: MockClock) -> None:
    """Mailboxes, waiting handlers, and channels: messages are counted where they are received."""

    class Desk(Clerk):
        ends: object = None

    sender, receiver = channel(int)
    other, taken = channel(int)
    async with ActorSystem() as system:
        desk = system.spawn(Desk, 0, [sender, receiver, other])
        for _ in range(3):
            sender.send_nowait(1)
        other.send_nowait(1)
        desk.tell(Done())
        await wait_all_tasks_blocked()
        desk.tell(Work())
        desk.tell(Work())
        classes: dict[str, ClassFigures] = {}
        assert system.observe.count(desk, classes, system.scheduler.clock())  # type: ignore[arg-type]
        [figures] = classes.values()
        assert 0.0 <= figures.age < 10.0
        assert figures == ClassFigures(actors=1, waiting=1, handled=1, depth=2, age=figures.age, channels=3, queued=3)
        taken.close()


async def test_metrics_that_fail_at_the_end_are_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Clerk):
        def metrics(self) -> Iterable[Sample]:
            yield DONE.sample(1, "work")
            raise KeyError("gone")

    async with ActorSystem() as system:
        clerk = system.spawn(Broken)
        clerk.stop()
        await clerk.terminated()
        assert clerk.is_alive is False
        [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert record.getMessage() == "Broken.metrics failed at its end"


@pytest.mark.parametrize("end", ["stop", "kill", "restart"])
async def test_a_system_exit_from_metrics_ends_the_system_in_order(end: str, autojump_clock: MockClock) -> None:
    ended: list[Reason] = []

    class Other(Actor[Any]):
        def stopping(self, reason: Reason) -> None:
            ended.append(reason)

    class Leaves(Clerk):
        def metrics(self) -> Iterable[Sample]:
            raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        async with ActorSystem() as system:
            system.spawn(Other)
            clerk = system.spawn(Leaves, supervise=restart() if end == "restart" else "stop")
            if end == "stop":
                clerk.stop()
            else:
                clerk.kill()
            await trio.sleep_forever()
    assert caught.value.code == 3
    assert ended == [Shutdown()]
    assert trio.current_time() == 0.0


def test_metrics_are_not_async() -> None:
    with pytest.raises(ConfigurationError, match=r"Slow.metrics must be sync"):

        class Slow(Actor[Work]):
            @handles
            def work(self, m: Work) -> None: ...

            async def metrics(self) -> list[Sample]:  # type: ignore[override]
                return []


@pytest.mark.parametrize("name", ["metrics", "watch", "stop", "peer", "started"])
def test_a_handler_never_replaces_a_method_of_actors(name: str) -> None:
    @handles
    def take(self: Any, m: Work) -> None: ...

    with pytest.raises(ConfigurationError, match=rf"Taking.{name}: each actor has a method of this name"):
        type("Taking", (Actor,), {name: take})


async def test_a_field_named_metrics_is_a_field() -> None:
    class Old(Actor[Work]):
        metrics: int = 3  # type: ignore[assignment]

        @handles
        def work(self, m: Work) -> None: ...

    async with ActorSystem() as system:
        old = system.spawn(Old)
        classes: dict[str, ClassFigures] = {}
        assert not system.observe.count(old, classes, 0.0)  # type: ignore[arg-type]
        assert classes["Old"].actors == 1


async def test_there_is_no_end_of_classes_made_at_run_time() -> None:
    """Their names are bounded, where totals are kept."""
    async with ActorSystem() as system:
        for number in range(1010):
            system.scheduler.count_ended(type(f"Made{number}", (), {})(), 1)
        assert len(system.observe.handled) == 1001
        assert system.observe.handled[None] == 10
