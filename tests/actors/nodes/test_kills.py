"""Kills of real nodes and drivers: signals, pipes, and what is left of processes. The seed is printed, and chosen with ``LEVADA_SEED``.

What happens to messages and shards when processes die at any moment is tested in simulated worlds (`tests.simulation`), thousands of times.
"""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import trio

from levada.actors.nodes import MemberState, NodeDown, NodeLost, Nodes, NodeSettings, NodeUp, local_nodes
from levada.framework import ActorSystem, Failed, Receiver, Ref, restart

from .apps import Counter, Watch, Watcher, app
from .processes import ROOT, driver, gone, is_alive, processes_of
from .single import Load, Single, Where

HANG = 4.0
SOON = 50.0  # seconds; what is measured here must hold on a busy machine
STARTED = 60.0  # seconds for a node to start, which takes most of a second of CPU
SIGNALS = "SIGKILL", "SIGSTOP", "SIGTERM"
SETTINGS = NodeSettings(
    hang_timeout=HANG,
    silence=30.0,
    drain_timeout=5.0,
    restart=restart(max=1000, within=1.0, initial_backoff=0.0, max_backoff=0.0),
)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def chance() -> random.Random:
    """Randomness with a seed that is shown when the test fails."""
    seed = int(os.environ.get("LEVADA_SEED", "0")) or random.randrange(1, 1 << 32)
    print(f"LEVADA_SEED={seed}")
    return random.Random(seed)


async def next_of(events: Receiver[NodeUp | NodeDown], name: str, kind: type[Any]) -> Any:
    """Wait for an event of a node."""
    with trio.fail_after(STARTED if kind is NodeUp else SOON):
        async for event in events:
            if event.member.name == name and isinstance(event, kind):
                return event
    raise AssertionError("no more events")


async def strike(
    nodes: Nodes, events: Receiver[NodeUp | NodeDown], how: str, chance: random.Random, times: dict[str, list[float]]
) -> tuple[str, float]:
    """Kill, stop or end one node; check who learns what, and when. Returns what was done, and the seconds until the node was up again."""
    name = chance.choice([member.name for member in nodes.members])
    other = next(member.name for member in nodes.members if member.name != name)
    victim = await nodes.spawn(Counter, on=name)
    watcher = await nodes.spawn(Watcher, on=other)
    single: Ref[Any] = nodes.system.registry["single"]
    pid = nodes[name].pid
    seen: list[str] = []
    learned: list[float] = []

    async def far() -> None:
        seen.append(await watcher.ask(Watch(victim), timeout=SOON + STARTED))
        learned.append(time.monotonic())

    async def near() -> None:
        await victim.terminated()
        learned.append(time.monotonic())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(far)
        nursery.start_soon(near)
        await trio.sleep(chance.random() / 20)
        began = time.monotonic()
        os.kill(pid, getattr(signal, how))
        down = await next_of(events, name, NodeDown)
        times.setdefault(f"{how} down", []).append(time.monotonic() - began)
        up = await next_of(events, name, NodeUp)
        times.setdefault(f"{how} up", []).append(time.monotonic() - began)
        nursery.cancel_scope.deadline = trio.current_time() + SOON
    times.setdefault(f"{how} watcher", []).append(max(learned) - began)
    assert len(learned) == 2
    assert max(learned) - began < SOON
    assert isinstance(down.reason, Failed)
    lost = down.reason.error
    assert isinstance(lost, NodeLost)
    expected = {"SIGKILL": "was killed by SIGKILL", "SIGSTOP": "hangs: no heartbeat", "SIGTERM": "with exit code 0"}[
        how
    ]
    assert expected in str(lost)
    # An actor of a node that drains is told to stop; of one that dies, it is lost.
    assert seen in ([["Shutdown"], ["Lost"]] if how == "SIGTERM" else [["Lost"]])
    assert up.member.state is MemberState.UP
    assert up.member.pid != pid
    assert not is_alive(pid)
    assert (await single.ask(Where(), timeout=SOON))[1] in [member.name for member in nodes.members]
    return f"{how} to {name}", times[f"{how} up"][-1]


async def campaign(chance: random.Random, rounds: int, folder: Path) -> None:
    """Strike nodes with each signal in each round, under load; then look at what was handled, and at what is left."""
    strikes = chance.sample(SIGNALS * rounds, rounds * len(SIGNALS))
    marker = uuid.uuid4().hex
    settings = NodeSettings(
        hang_timeout=HANG, silence=30.0, drain_timeout=5.0, env={"LEVADA_TEST": marker}, restart=SETTINGS.restart
    )  # fmt: skip
    times: dict[str, list[float]] = {}
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        load = Load(system, pause=0.002)
        async with local_nodes(system, 3, app, settings=settings) as nodes, nodes.events() as events:
            policy = restart("permanent", max=1000, within=1.0)
            await nodes.spawn(Single, str(folder), name="single", supervise=policy)
            nursery.start_soon(load.run)
            for number, signal_name in enumerate(strikes, 1):
                how, took = await strike(nodes, events, signal_name, chance, times)
                print(f"{number} of {len(strikes)}: {how}, up after {took:.1f} s", flush=True)
        nursery.cancel_scope.cancel()
    load.check(folder)
    assert len(load.answered) > len(strikes)
    assert processes_of(f"LEVADA_TEST={marker}", parent=os.getpid()) == []
    for what, seconds in sorted(times.items()):
        print(f"{what}: {min(seconds):.3f} to {max(seconds):.3f} s, {len(seconds)} times")


async def kill_driver(chance: random.Random, *, ready: bool, stopped: bool) -> None:
    """Kill a driver at any moment of its start or behind it, at once or when it has been stopped for a while; nothing of it is left soon."""
    async with driver(silence=4.0, drain_timeout=0.5) as d:
        if ready:
            await d.ready()
        await trio.sleep(chance.random())
        if stopped:
            os.kill(d.pid, signal.SIGSTOP)
            await trio.sleep(6.0)
        os.kill(d.pid, signal.SIGKILL)
        with trio.fail_after(SOON):
            await d.process.wait()
        for pid in processes_of(d.marker):
            assert await gone(pid, SOON)


@pytest.mark.ci
@pytest.mark.timeout(300)
async def test_nodes_are_killed_and_stopped(chance: random.Random, tmp_path: Path) -> None:
    await campaign(chance, 2, tmp_path)


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ready", "stopped"), [(True, True), (True, False), (False, False)])
async def test_drivers_are_killed_and_stopped(chance: random.Random, ready: bool, stopped: bool) -> None:
    await kill_driver(chance, ready=ready, stopped=stopped)


@pytest.mark.release
async def test_nodes_are_killed_and_stopped_for_long(chance: random.Random, tmp_path: Path) -> None:
    await campaign(chance, 10, tmp_path)


@pytest.mark.release
async def test_drivers_are_killed_and_stopped_for_long(chance: random.Random) -> None:
    for number in range(12):
        await kill_driver(chance, ready=number % 2 == 0, stopped=number % 4 < 2)
