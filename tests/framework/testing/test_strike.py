"""What has struck a world, by name: told again it strikes alike, and a failure is shrunk to the few strikes that it needs."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import trio

from levada.framework import Actor, ActorSystem, handles, message
from levada.framework.platform import PLATFORM
from levada.framework.testing.simulation import (
    Faults,
    Moment,
    SimulatedFiles,
    SimulationFailure,
    Strike,
    World,
    simulate,
)

ROOT = Path(__file__).resolve().parents[3]


def only(**weights: float) -> Faults:
    """Return faults of these kinds alone."""
    kinds = (
        "kills", "crashes", "pauses", "cuts", "zombies", "power_failures", "disk_errors", "full_disks", "slow_disks", "clock_jumps",
    )  # fmt: skip
    all_weights: dict[str, Any] = {**dict.fromkeys(kinds, 0.0), **weights}
    return Faults(strikes=6, **all_weights)


@message("strike.Tick")
class Tick:
    """Write a line."""

    number: int


class Writer(Actor[Tick]):
    """Has a bug: says that a line is written before it is."""

    said: Any

    @handles
    async def take(self, m: Tick) -> None:
        self.said.add(m.number)
        await trio.sleep(0.05)
        try:
            await PLATFORM.get().run_in_thread(write)
        except OSError:
            self.said.discard(m.number)


def write() -> None:
    files = PLATFORM.get().files
    with files.opened("/lines", os.O_RDWR | os.O_CREAT) as descriptor:
        files.pwrite(descriptor, b"x", files.fstat(descriptor).st_size)
        files.fsync(descriptor)


async def child(exit: Any) -> int:
    await trio.sleep_forever()
    return 0


async def writes(world: World, said: set[int], *, first: int = 0) -> None:
    """Write fifty lines from a process that has a child."""

    async def main() -> None:
        launch = PLATFORM.get().launch
        assert launch is not None
        async with ActorSystem("app") as system, trio.open_nursery() as nursery:
            writer = system.spawn(Writer, said)
            nursery.start_soon(keep, partial(launch, "child", child))
            for number in range(max(said, default=first - 1) + 1, 50):
                writer.tell(Tick(number))
                await trio.sleep(0.1)
            await trio.sleep_forever()

    async def keep(start: Callable[[], Any]) -> None:
        while True:
            await start().wait()

    await world.start("app", main, restart=0.5)
    await trio.sleep(10)


WORLDS: list[World] = []


async def struck(world: World) -> None:
    WORLDS.append(world)
    await writes(world, set())


@pytest.mark.ci
@pytest.mark.parametrize("aims", [(), ("Tick",), ("fsync",)])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("kills", "kill"),
        ("crashes", "crash"),
        ("pauses", "pause"),
        ("cuts", "cut"),
        ("zombies", "zombie"),
        ("power_failures", "power failure"),
        ("disk_errors", "disk errors"),
        ("full_disks", "full disk"),
        ("slow_disks", "slow disk"),
        ("clock_jumps", "clock"),
    ],
)
def test_a_strike_that_is_told_tells_the_story_of_the_one_by_chance(
    kind: str, what: str, aims: tuple[str, ...]
) -> None:
    faults = only(**{kind: 1.0})
    if aims:
        faults = Faults(strikes=6, every=1e6, aims=aims, cuts=0, clock_jumps=0)
    seen = set[str]()
    for seed in range(4 if not aims else 2):
        WORLDS.clear()
        simulate(struck, seeds=[seed], faults=faults)
        made = WORLDS[0].strikes.made
        read = eval(repr(made), {"Strike": Strike, "Moment": Moment})
        assert read == made
        simulate(struck, seeds=[seed], faults=faults, strikes=read)
        assert WORLDS[1].strikes.made == made
        assert list(WORLDS[1].events) == list(WORLDS[0].events)
        seen.update(strike.what for strike in made)
    assert aims or seen == {what}


# A bug, and the strike that it needs.


async def hasty(world: World, *, idle: bool = False, first: int = 0) -> None:
    if idle:
        await world.start("idle", trio.sleep_forever)
    said = set[int]()
    await writes(world, said, first=first)
    written = len(SimulatedFiles(world.disk("app")).read("/lines"))
    assert written >= len(said), f"{len(said)} lines were said to be written, {written} are"


HASTY = Faults(strikes=8, every=0.5, aims={"Tick"}, power_failures=0, disk_errors=0, full_disks=0)


def failure_of(scenario: Callable[[World], Awaitable[None]] = hasty, **more: Any) -> SimulationFailure:
    with pytest.raises(SimulationFailure) as error:
        simulate(scenario, **more)
    return error.value


def test_a_failure_needs_few_strikes_and_their_list_repeats_it_when_the_code_has_changed() -> None:
    failure = failure_of(seeds=range(40), faults=HASTY)
    strikes = failure.strikes
    assert strikes is not None
    assert len(strikes) == 1
    assert isinstance(strikes[0].at, Moment)
    assert str(failure).endswith(
        f"as a test that outlives changes of the code: simulate(…, seeds=[{failure.seed}], strikes=[\n    {strikes[0]!r},\n])"
    )
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure)
    for changed in (partial(hasty, idle=True), partial(hasty, first=-1)):
        again = failure_of(changed, seeds=[failure.seed], faults=HASTY, strikes=strikes)
        assert type(again.__cause__) is type(failure.__cause__)
        assert again.strikes == strikes


@pytest.mark.ci
def test_the_list_of_a_failure_repeats_it_in_another_process() -> None:
    failure = failure_of(seeds=range(40), faults=HASTY)
    program = (
        "from tests.framework.testing.test_strike import HASTY, hasty\n"
        "from levada.framework.testing.simulation import Moment, Strike, simulate\n"
        f"{failure.call.replace('…', 'hasty, faults=HASTY')}\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"last events:{str(failure).partition('last events:')[2]}" in ended.stderr


def test_strikes_are_left_as_they_were_if_wanted() -> None:
    failure = failure_of(seeds=range(40), faults=HASTY, shrink=False)
    assert failure.strikes is not None
    assert len(failure.strikes) > 1
    assert "strikes" not in str(failure_of(fails, seeds=[1]))


async def fails(world: World) -> None:
    await writes(world, set())
    raise ValueError("as always")


def test_a_world_that_fails_whatever_strikes_it_needs_no_strike() -> None:
    failure = failure_of(fails, seeds=[3], faults=only(kills=1))
    assert failure.strikes == ()
    assert failure.call == "simulate(…, seeds=[3], strikes=[])"


def test_a_failure_of_another_kind_is_not_what_was_found() -> None:
    async def scenario(world: World) -> None:
        await writes(world, set())
        raise ValueError("struck") if world.strikes.made else KeyError("calm")

    failure = failure_of(scenario, seeds=[3], faults=only(kills=1))
    assert type(failure.__cause__) is ValueError
    assert len(failure.strikes or ()) == 1


def test_a_world_that_does_not_fail_again_has_its_seed_alone() -> None:
    async def scenario(world: World) -> None:
        runs.append(world)
        await writes(world, set())
        if len(runs) == 1:
            raise ValueError("once")

    runs: list[World] = []
    failure = failure_of(scenario, seeds=[3], faults=only(kills=1))
    assert (failure.strikes, str(failure.__cause__), len(runs)) == (None, "once", 2)


def test_ctrl_c_while_strikes_are_left_out_ends_with_the_failure() -> None:
    async def scenario(world: World) -> None:
        runs.append(world)
        await writes(world, set())
        if len(runs) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        raise ValueError(len(runs))

    runs: list[World] = []
    failure = failure_of(scenario, seeds=[3], faults=only(kills=1))
    assert (str(failure.__cause__), len(runs)) == ("1", 2)
    assert failure.strikes == tuple(runs[0].strikes.made)


def test_a_strike_of_what_is_not_there_is_skipped_and_told() -> None:
    strikes = [
        Strike("kill", "nobody", at=1.0),
        Strike("kill", "app", at=1.0, earlier=3),
        Strike("cut", "nobody", at=1.0, other="app"),
        Strike("zombie", "app", at=1.0),
        Strike("power failure", "nowhere", at=1.0),
        Strike("pause", "app", at=Moment("app", "Tick", 99), seconds=1.0),
        Strike("crash", "app", at=Moment("app", "fsync", 999, path="/lines")),
        Strike("clock", "app", at=99.0, seconds=5.0),
    ]
    WORLDS.clear()
    assert simulate(struck, seeds=[1], strikes=strikes).strikes == 0
    assert [text for _, text in WORLDS[0].events if "skipped" in text] == [
        *(f"skipped, for there is no such thing to strike: {strike!r}" for strike in strikes[:5]),
        *(f"skipped, for its moment did not come: {strike!r}" for strike in [strikes[7], *strikes[5:7]]),
    ]


class Bell(Actor[Tick]):
    """Does nothing."""

    @handles
    def ring(self, m: Tick) -> None:
        pass


async def rings(world: World) -> None:
    """Let 60 actors handle a message at once, and strike no more from 5 ms later on."""

    async def main() -> None:
        async with ActorSystem("bells") as system:
            bells = [system.spawn(Bell) for _ in range(60)]
            await trio.sleep(1)
            for bell in bells:
                bell.tell(Tick(0))
            await trio.sleep_forever()

    WORLDS.append(world)
    await world.start("bells", main, restart=50)
    await trio.sleep(1.005)
    world.strikes.stop()
    made = list(world.strikes.made)
    await trio.sleep(1)
    assert world.strikes.made == made


async def writes_on(world: World) -> None:
    """Write lines, and strike no more after some of them."""

    async def stop() -> None:
        await trio.sleep(1.97)
        world.strikes.stop()
        made.extend(world.strikes.made)

    made: list[Strike] = []
    WORLDS.append(world)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop)
        await writes(world, set())
    assert world.strikes.made == made


@pytest.mark.parametrize(
    ("scenario", "faults"),
    [
        (rings, Faults(strikes=20, every=1e6, aims={"Tick"})),
        (writes_on, attrs.evolve(only(crashes=1), strikes=20, every=0.1)),
        (writes_on, attrs.evolve(only(kills=1), every=0.5)),
    ],
    ids=["a moment later", "in a call of the disk", "at a time"],
)
def test_what_waits_for_its_moment_does_not_strike_after_the_stop(
    scenario: Callable[[World], Awaitable[None]], faults: Faults
) -> None:
    WORLDS.clear()
    simulate(scenario, seeds=range(12), faults=faults)
    assert sum(len(world.strikes.made) for world in WORLDS) > 3


def test_a_told_strike_does_not_come_after_the_stop_and_is_told() -> None:
    late = Strike("kill", "bells", at=Moment("bells", "Tick", 3), after=0.01)
    soon = attrs.evolve(late, after=0.001)
    WORLDS.clear()
    simulate(rings, seeds=[1], strikes=[late])
    simulate(rings, seeds=[1], strikes=[soon])
    assert [world.strikes.made for world in WORLDS] == [[], [soon]]
    skipped = [text for _, text in WORLDS[0].events if "skipped" in text]
    assert skipped == [f"skipped, for its moment did not come: {late!r}"]


def test_only_what_is_named_is_struck() -> None:
    async def scenario(world: World) -> None:
        WORLDS.append(world)
        for name in ("anna", "bert"):
            await world.start(name, trio.sleep_forever, restart=0.5)
        await trio.sleep(60)

    struck = dict[str, set[str]]()
    for name in ("bert", "machine"):
        WORLDS.clear()
        simulate(scenario, seeds=range(12), faults=Faults(strikes=20, only={name}))
        made = [strike for world in WORLDS for strike in world.strikes.made]
        assert {strike.whom for strike in made} == {name}
        struck[name] = {strike.what for strike in made}
    assert struck == {
        "bert": {"kill", "pause", "clock"},
        "machine": {"power failure", "disk errors", "full disk", "slow disk"},
    }


async def rings_twice(world: World) -> None:
    """Let 60 actors handle a message, and another one two seconds later."""

    async def main() -> None:
        async with ActorSystem("bells") as system:
            bells = [system.spawn(Bell) for _ in range(60)]
            for at in (1, 3):
                await trio.sleep_until(at)
                for bell in bells:
                    bell.tell(Tick(0))
            await trio.sleep_forever()

    WORLDS.append(world)
    await world.start("bells", main, restart=50)
    await trio.sleep(5)


def test_a_moment_counts_from_the_start_also_if_strikes_begin_later() -> None:
    faults = Faults(strikes=20, every=1e6, aims={"Tick"}, begin=2.0)
    compared = 0
    for seed in range(12):
        WORLDS.clear()
        simulate(rings_twice, seeds=[seed], faults=faults)
        made = WORLDS[0].strikes.made
        simulate(rings_twice, seeds=[seed], faults=faults, strikes=made)
        assert list(WORLDS[1].events) == list(WORLDS[0].events)
        assert all(isinstance(strike.at, Moment) and strike.at.count > 60 for strike in made)
        compared += len(made)
    assert compared > 3


@pytest.mark.parametrize(("begin", "some"), [(0.5, True), (1.5, False)])
def test_strikes_begin_when_they_are_to(begin: float, some: bool) -> None:
    aimed = Faults(strikes=20, every=1e6, aims={"Tick"}, begin=begin)
    WORLDS.clear()
    simulate(rings, seeds=range(8), faults=aimed)
    assert any(world.strikes.made for world in WORLDS) == some
    WORLDS.clear()
    simulate(struck, seeds=range(4), faults=attrs.evolve(only(clock_jumps=1), begin=begin))
    times = [strike.at for world in WORLDS for strike in world.strikes.made]
    assert len(times) > 5
    assert all(isinstance(at, float) and at > begin for at in times)


# Worlds that hang.


class Forgetful:
    """A program that forgets what it was to do when it is started again, `patience` times, or goes on late."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.ends: list[float] = []
        """The times at which worlds have ended."""

    async def __call__(self, world: World) -> None:
        async def main() -> None:
            life = next(lives)
            if life <= self.patience:
                await trio.sleep(5 if life == 0 else 300)
                done.set()
            await trio.sleep_forever()

        lives, done = count(), trio.Event()
        await world.start("app", main, restart=0.5)
        try:
            while not done.is_set():  # noqa: ASYNC110 - a world that hangs, and goes on
                await trio.sleep(1)
        finally:
            self.ends.append(trio.current_time())


MANY = Faults(strikes=10, every=0.4)


def test_a_world_that_hangs_is_shrunk_in_worlds_that_do_not_take_as_long() -> None:
    scenario = Forgetful(0)
    failure = failure_of(scenario, seeds=range(20), faults=MANY, limit=1000.0)
    assert "did not end within 1000 s" in str(failure.__cause__)
    assert [strike.what for strike in failure.strikes or ()] in (["kill"], ["power failure"])
    assert len(scenario.ends) > 4
    assert [end for end in scenario.ends if end > 100] == [
        1000,
        1000,
    ]  # the one that was found, and the proof at the end


def test_a_world_that_only_takes_long_is_not_taken_for_one_that_hangs() -> None:
    scenario = Forgetful(1)
    failure = failure_of(scenario, seeds=range(20), faults=MANY, limit=1000.0)
    assert sum(strike.what in ("kill", "power failure") for strike in failure.strikes or ()) >= 2
    whole = failure_of(scenario, seeds=[failure.seed], faults=MANY, limit=1000.0, shrink=False)
    assert failure.strikes == whole.strikes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Strike, "crash", "a", at=1.0), "happens at a call of the disk of 'a', not at 1.0"),
        (partial(Strike, "error", "a", at=Moment("b", "fsync", 1, path="/x")), "of the disk of 'a', not at Moment"),
        (partial(Strike, "disk errors", "m", at=1.0, calls="all"), "'calls' are syncs, writes, .*; not 'all'"),
        (lambda: Strike(*cast("Any", ("flood", "m")), at=1.0), "'what' must be in"),
        (partial(Moment, "a", "Tick", 0), "'count' must be >= 1"),
    ],
)
def test_a_strike_that_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
