"""``levada simulate``: the worlds that it runs, the story of one that fails, and how it is interrupted."""

from __future__ import annotations

import logging
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator

import pytest
import trio

from levada.actors import cli
from levada.framework import Actor, ActorSystem, handles, message
from levada.framework.testing.simulation import Faults, World

HERE = __name__
FAULTS = Faults(strikes=3, skew=0)
RAN: list[int] = []
"""The seeds of the worlds of `passes`."""


@pytest.fixture(autouse=True)
def ran() -> list[int]:
    RAN.clear()
    return RAN


async def passes(world: World) -> None:
    RAN.append(world.seed)
    await trio.sleep(100)


async def app(system: ActorSystem) -> AsyncIterator[None]:
    yield


async def warns(world: World) -> None:
    logging.getLogger("levada.tea").warning("tea is cold")


async def fails(world: World) -> None:
    await world.start("shop", app)
    await trio.sleep(2)
    if world.seed in (3, 5):
        world["shop"].kill()
        raise ValueError("no\x1b]0;tea")


async def chance(world: World) -> None:
    await world.start("shop", trio.sleep_forever, machine="north", restart=1.0)
    await trio.sleep(10)
    if world.strikes.done:
        raise ValueError(world.strikes.done)


async def hangs(world: World) -> None:
    await trio.sleep_forever()


async def interrupted(world: World) -> None:
    if world.seed == 2:
        os.kill(os.getpid(), signal.SIGINT)
    await trio.sleep(1)


@message("test_simulate.Interrupt")
class Interrupt:
    """The user presses Ctrl-C while an actor works."""


class Worker(Actor[Interrupt]):
    """Is interrupted."""

    @handles
    def take(self, m: Interrupt) -> None:
        os.kill(os.getpid(), signal.SIGINT)


async def interrupted_actor(world: World) -> None:
    async def busy(system: ActorSystem) -> AsyncIterator[None]:
        system.spawn(Worker).tell(Interrupt())
        yield

    await world.start("busy", busy, restart=1.0)
    await trio.sleep(10)


async def interrupted_at_its_end(world: World) -> None:
    async def main() -> None:
        try:
            await trio.sleep_forever()
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    await world.start("main", main, restart=1.0)
    await trio.sleep(1)
    world["main"].kill()
    await trio.sleep(1)


async def two(world: World, other: World) -> None:
    """No scenario: it takes too much."""


def test_each_seed_is_a_world(ran: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", f"{HERE}:passes", "--seeds", "3"]) == 0
    assert ran == [0, 1, 2]
    out = "3 worlds ran, none failed; 300 virtual seconds and 0 strikes\n"
    assert capsys.readouterr() == (out, "")
    ran.clear()
    assert cli.main(["simulate", f"{HERE}:passes", "--first", "7", "--seeds", "2"]) == 0
    assert ran == [7, 8]
    ran.clear()
    assert cli.main(["simulate", f"{HERE}:passes", "--seed", "9", "--seed", "4"]) == 0
    assert ran == [9, 4]


def test_a_failing_world_is_told_in_words_and_is_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", f"{HERE}:fails", "--limit", "60"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "The world of seed 3 failed. Its events, in virtual time:",
        "      0.0000 s  shop: started on machine as process 101",
        "      2.0000 s  shop: killed",
        "and the error:",
        "  Traceback (most recent call last):",
    ]
    assert lines[-3:] == [
        "  ValueError: no\x1b]0;tea",
        f"Run it again, with its log: levada simulate {HERE}:fails --seed 3 --limit 60 -v",
        "4 of 20 worlds ran, 1 failed (seed 3); 6 virtual seconds and 0 strikes in the others",
    ]
    assert any("raise ValueError" in line for line in lines)


def test_the_other_worlds_run_too_if_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", f"{HERE}:fails", "--keep-going", "--seeds", "8"]) == 1
    out = capsys.readouterr().out
    assert out.endswith("8 worlds ran, 2 failed (seed 3, 5); 12 virtual seconds and 0 strikes in the others\n")
    assert out.count("Run it again, with its log: ") == 2


def test_what_a_world_logs_is_shown_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program that sets up no logging
    for more, log in ([], ""), (["-v"], "tea is cold\n" * 2):
        assert cli.main(["simulate", f"{HERE}:warns", "--seeds", "2", *more]) == 0
        assert capsys.readouterr() == ("2 worlds ran, none failed; 0 virtual seconds and 0 strikes\n", log)
        assert logging.getLogger().handlers == []


def test_a_terminal_gets_progress_and_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        assert cli.main(["simulate", f"{HERE}:fails", "--first", "3"]) == 1
        out.flush()
        said = b""
        while b"Run it again, with its log: " not in said:  # a terminal may give what was written in parts
            said += os.read(ours, 65_536)
        monkeypatch.undo()
    os.close(ours)
    text = said.decode()
    assert text.startswith("\r\x1b[Kworld 1 of 20: seed 3\r\x1b[KThe world of seed 3 failed.")
    assert r"ValueError: no\x1b]0;tea" in text


@pytest.mark.parametrize("faults", ["3", f"{HERE}:FAULTS"])
def test_a_command_that_repeats_a_failure_has_all_that_decides_it(
    faults: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", f"{HERE}:chance", "--machine", "north", "--machine", "south", "--faults", faults]
    assert cli.main(command) == 1
    first = capsys.readouterr().out
    (again,) = [line for line in first.splitlines() if line.startswith("Run it again, with its log: levada ")]
    *words, verbose = again.removeprefix("Run it again, with its log: levada ").split()
    assert verbose == "-v"
    assert cli.main(words) == 1
    assert capsys.readouterr().out.splitlines()[:-1] == first.splitlines()[:-1]
    assert cli.main([*words, verbose]) == 1
    whole = capsys.readouterr().out.splitlines()
    assert whole[0] == first.splitlines()[0]
    assert "As a test that outlives changes" in first
    assert not any(line.startswith("As a test") for line in whole)


def test_a_world_that_hangs_fails_at_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", f"{HERE}:hangs", "--limit", "60"]) == 1
    assert "did not end within 60 s of virtual time" in capsys.readouterr().out


def test_ctrl_c_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", f"{HERE}:interrupted"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "levada: 2 of 20 worlds ran, none failed; 2 virtual seconds and 0 strikes; stopped in the world of seed 2",
        "levada: interrupted",
    ]


@pytest.mark.handler_fails
@pytest.mark.parametrize("scenario", ["interrupted_actor", "interrupted_at_its_end"])
def test_ctrl_c_ends_it_wherever_it_is(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", f"{HERE}:{scenario}"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "levada: interrupted"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "expected MODULE:NAME, as in desk:app or shop.desk:app, got 'nowhere'"),
        (
            [f"{HERE}:two"],
            "two is no scenario: a scenario is an async function that takes a World, and nothing else (missing",
        ),
        ([f"{HERE}:RAN"], "RAN is no scenario: a scenario is an async function that takes a World; got []"),
        ([f"{HERE}:app"], "app is no scenario: a scenario is an async function that takes a World; got <function app"),
        ([f"{HERE}:passes", "--faults", f"{HERE}:RAN"], "RAN is [], wanted a number or MODULE:NAME of a "),
        ([f"{HERE}:passes", "--faults=-3"], "--faults: -3 is '-3', wanted a number or MODULE:NAME of a "),
        ([f"{HERE}:passes", "--seed", "1", "--first", "1"], "--first goes with --seeds"),
        ([f"{HERE}:passes", "--machine", "a", "--machine", "a"], "--machine a is given twice"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert error in err
