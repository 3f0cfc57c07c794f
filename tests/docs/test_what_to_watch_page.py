"""Each alert of what-to-watch.md fires when what it is about happens, and is silent before."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

import attrs
import pyarrow as pa

from levada.actors.journal import Append, DeclareGroup, Journal
from levada.actors.metrics import Metrics
from levada.actors.metrics.nodes import NodeFigures, fleet_measured_by
from levada.framework import Actor, ActorSystem, bounded, handles, restart
from levada.framework.metrics import Distribution
from levada.framework.platform import PLATFORM

PAGE = (Path(__file__).parents[2] / "docs/how-to/what-to-watch.md").read_text("utf-8")
RULES = dict(re.findall(r"- alert: (\w+)\n\s+expr: (.+)", PAGE))
CONDITION = re.compile(r"(levada_\w+).*? (==|>) ([\d.]+)")
MINUTES = 300.0
Trouble = Callable[[ActorSystem, Path], Awaitable[object]]


class Clerk(Actor[str]):
    @handles
    async def work(self, m: str) -> None:
        if m == "fail":
            raise ValueError("as told")
        if m == "block":
            time.sleep(0.6)  # noqa: ASYNC251 - the trouble that is to be seen
        if m == "wait":
            await trio.sleep(30)


async def actors_fail(system: ActorSystem, folder: Path) -> None:
    clerk = system.spawn(Clerk, supervise=restart(max=100, within=1e6, initial_backoff=0.0))
    for _ in range(60):
        clerk.tell("fail")


async def a_mailbox_stands_still(system: ActorSystem, folder: Path) -> None:
    clerk = system.spawn(Clerk)
    clerk.tell("wait")
    clerk.tell("next")


async def a_reader_falls_behind(system: ActorSystem, folder: Path) -> None:
    journal = system.spawn(Journal, folder, pa.schema([("n", pa.int64())]), mailbox=bounded(16))
    await journal.ask(DeclareGroup("readers"))
    rows = pa.record_batch({"n": pa.array(range(60_000), pa.int64())})
    for _ in range(2):
        await journal.ask(Append(rows))


async def the_loop_is_held_up(system: ActorSystem, folder: Path) -> None:
    clerks = [system.spawn(Clerk) for _ in range(200)]
    for clerk in clerks:
        clerk.tell("block" if clerk is clerks[0] else "next")  # the others wait for their turns meanwhile


async def a_node_is_down(system: ActorSystem, folder: Path) -> None:
    async def ask() -> list[NodeFigures]:
        return [NodeFigures("n0", "down", 1, None)]

    fleet_measured_by(system, ask)


TROUBLES: dict[str, Trouble] = {
    "ActorsFail": actors_fail,
    "LoopIsHeldUp": the_loop_is_held_up,
    "MailboxesStandStill": a_mailbox_stands_still,
    "NodeIsDown": a_node_is_down,
    "ReadersFallBehind": a_reader_falls_behind,
    "TurnsAreLate": the_loop_is_held_up,
}


async def measure(metrics: Metrics, name: str) -> list[float]:
    """The values of a metric; of a histogram, the upper bound of its slowest hundredth."""
    found: list[float] = []
    for metric, series in (await metrics.collect()).items():
        if metric.name == name.removesuffix("_bucket"):
            for value in series.values():
                found.append(slowest(value) if isinstance(value, Distribution) else value)
    return found


def slowest(value: Distribution) -> float:
    wanted, seen = 0.99 * sum(value.counts), 0
    for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
        seen += count
        if seen >= wanted:
            return bound
    raise AssertionError(value)


async def fires(metrics: Metrics, rule: str) -> bool:
    """What Prometheus would compute from two scrapes, as far as these rules need it."""
    condition = CONDITION.search(rule)
    assert condition is not None, rule
    name, operator, limit = condition[1], condition[2], float(condition[3])
    values = await measure(metrics, name)
    if "rate(" in rule and not name.endswith("_bucket"):
        values = [value / MINUTES for value in values]  # nothing was counted before
    return any(value == limit if operator == "==" else value > limit for value in values)


def test_each_alert_has_a_trouble_and_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(RULES) == sorted(TROUBLES) == sorted(rows)


@pytest.mark.ci
@pytest.mark.handler_fails
@pytest.mark.slow_handler
@pytest.mark.parametrize("name", sorted(TROUBLES))
async def test_an_alert_fires(name: str, tmp_path: Path, autojump_clock: MockClock) -> None:
    if (
        name == "MailboxesStandStill"
    ):  # it waits, so its clock is virtual too; a turn that is held up takes time of this machine
        PLATFORM.set(attrs.evolve(PLATFORM.get(), perf_counter=trio.current_time, monotonic=trio.current_time))
    async with ActorSystem() as system:
        metrics = Metrics(system)
        assert not await fires(metrics, RULES[name])
        await TROUBLES[name](system, tmp_path / "journal")
        await trio.sleep(1)
        await fires(metrics, RULES[name])  # a scrape; ages are counted from the first that sees them
        await trio.sleep(20)
        assert await fires(metrics, RULES[name])
