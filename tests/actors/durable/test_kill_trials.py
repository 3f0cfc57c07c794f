"""Kill trials of durable actors with real processes: nodes, the keeper and the driver are killed at random while commands are under way.

Real signals, pipes, locks and files are tested here. All else that a kill may do is tested in simulated worlds (`tests.simulation`).

This process is the customer. It gives commands with ids to a driver in a process of its own, and asks the next driver for what the last one has
not answered. Then all answers are asked for again, and the files of the log are read without any code of levada. The seed is printed, and chosen
with ``LEVADA_SEED``.
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")

from tests.actors.durable.log_reader import check_rows, read_log
from tests.actors.nodes.processes import ROOT, START, gone, processes_of

SHARDS = 8
ENTITIES = [f"purse-{number}" for number in range(24)]
CUSTOMERS = 48
NODES = ["n0", "n1", "n2"]
KEEPER = "Purse-keeper"
STRIKES = [
    *["recorded"] * 3,  # between record and the log
    *["written"] * 2,  # between the log and the answer
    *["answered"] * 2,  # between the answer and its receipt
    "received",  # the driver, between the receipt and the customer
    "driver",
    *["keeper"] * 2,
    *["SIGKILL"] * 2,
    "SIGSTOP",
    *["restart"] * 2,  # while shards move, nothing is killed
    *["restart, then SIGKILL of another"] * 2,
    "restart, then SIGKILL",
    "restart, then SIGKILL of the keeper",
]
"""Of one long trial, in random order."""
SIGNALS = ["driver", "keeper", "SIGKILL", "SIGSTOP", "restart", "restart, then SIGKILL of the keeper"]
"""Of the short trial: each signal to each kind of process."""
ROWS = ["1", "2", "4"]
"""Of an entity, after which its state is written too: with 1, each strike at a command is one at a snapshot."""
MISTAKES = r"\b(AssertionError|AttributeError|IndexError|KeyError|NoValue|TypeError|ValueError)\b"
"""No process logs one of these, whatever is killed. Shards that lose their journal log `ShardLost`."""
ANSWERED = 2 * START
"""Seconds in which a command is answered, whatever happens, on a busy machine: the driver and its nodes start in `START`."""


class Driver:
    """One life of the driver."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.ready = trio.Event()
        self._out = trio.Lock()

    async def say(self, **what: Any) -> None:
        assert self.process.stdin is not None
        async with self._out:
            try:
                await self.process.stdin.send_all(json.dumps(what).encode() + b"\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # it has ended; the next one is asked again

    async def lines(self) -> AsyncGenerator[dict[str, Any], None]:
        assert self.process.stdout is not None
        buffer = b""
        while data := await self.process.stdout.receive_some():
            *whole, buffer = (buffer + data).split(b"\n")
            for line in whole:
                yield json.loads(line)


class Trial:
    """Commands, strikes, and what came of them."""

    def __init__(self, folder: Path, chance: random.Random, commands: int) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.chance = chance
        self.marker = f"LEVADA_TEST={uuid.uuid4()}"
        self.driver: Driver | None = None
        self.lives = 0
        self.answers: dict[str, int] = {}
        self.asked: dict[str, dict[str, Any]] = {}
        self.late = 0
        self._open: dict[str, dict[str, Any]] = {}
        self._events: dict[str, trio.Event] = {}
        self._got: dict[str, int] = {}
        self._left = iter(range(commands))
        self._strikes: collections.deque[str] = collections.deque()
        self._progress = trio.Event()
        self._ending = False

    # Asking.

    async def ask(self, **question: Any) -> int:
        """Ask until a driver has answered."""
        number = question["id"]
        answered = self._events[number] = trio.Event()
        self._open[number] = question
        if self.driver is not None and self.driver.ready.is_set():
            await self.driver.say(**question)
        with trio.fail_after(ANSWERED):
            await answered.wait()
        return self._got.pop(number)

    def _take(self, line: dict[str, Any]) -> None:
        match line:
            case {"id": str() as number, "answer": int() as answer}:
                if self._open.pop(number, None) is not None:
                    self._got[number] = answer
                    self._events[number].set()
            case {"late": _} | {"lost": _}:  # a restart that found its node dead, or hanging on a busy machine
                self.late += "late" in line
            case _:
                raise AssertionError(line)

    async def customer(self) -> None:
        for number in self._left:
            await self.pay(number)
            if self.chance.random() < 0.1:
                await self.repeat(self.chance.choice(list(self.answers)))

    async def pay(self, number: int) -> None:
        name = f"pay-{number}"
        question = {
            "do": "pay", "id": name, "entity": ENTITIES[number % len(ENTITIES)], "amount": self.chance.randrange(1, 100),
        }  # fmt: skip
        if self.chance.random() < 0.3:
            question["via"] = self.chance.choice(NODES)
        how = self._strikes.popleft() if self._strikes else ""
        if how == "received":
            question["received"] = True
        elif how:
            question |= {"strike": how, "once": str(self.folder / f"struck-{name}")}
        self.asked[name] = question
        self.answers[name] = await self.ask(**question)
        self._progress.set()
        self._progress = trio.Event()

    async def repeat_each(self, names: Iterator[str]) -> None:
        for name in names:
            await self.repeat(name)

    async def repeat(self, name: str) -> None:
        """Ask again; the answer is the same."""
        if name not in self._open:
            assert await self.ask(**_once(self.asked[name])) == self.answers[name]

    @property
    def died(self) -> int:
        """Number of processes that killed themselves in the middle of a command."""
        return sum(path.name.startswith("struck-") for path in self.folder.iterdir())

    # Lives.

    async def live(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run one driver after the other, until `end`."""
        variable, _, value = self.marker.partition("=")
        while not self._ending:
            with (self.folder / f"driver-{self.lives}.err").open("wb") as errors:
                process = await trio.lowlevel.open_process(
                    [sys.executable, "-m", "tests.actors.durable.trial_driver", str(self.log), str(SHARDS), self.chance.choice(ROWS)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT,
                    env={**os.environ, variable: value}, process_group=0,
                )  # fmt: skip
            self.lives += 1
            driver = self.driver = Driver(process)
            try:
                async with aclosing(driver.lines()) as lines:
                    async for line in lines:
                        if "ready" in line:
                            driver.ready.set()
                            for question in list(self._open.values()):
                                await driver.say(**_once(question))
                            task_status.started()
                            task_status = trio.TASK_STATUS_IGNORED
                        else:
                            self._take(line)
                code = await process.wait()
                assert code == (0 if self._ending else -9), (self.folder / f"driver-{self.lives - 1}.err").read_text()
            finally:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()

    async def end(self) -> None:
        """End the driver in order."""
        assert self.driver is not None
        assert self.driver.process.stdin is not None
        await self.driver.ready.wait()
        self._ending = True
        await self.driver.process.stdin.aclose()
        with trio.fail_after(START):
            await self.driver.process.wait()

    # Strikes.

    async def strike(self, how: str) -> None:
        driver = self.driver
        assert driver is not None
        with trio.fail_after(START):
            await driver.ready.wait()
        node, other = self.chance.sample(NODES, 2)
        await trio.sleep(self.chance.random() / 50)
        match how.split(", then "):
            case ["recorded" | "written" | "answered" | "received"]:
                self._strikes.append(how)
            case ["driver"]:
                driver.process.kill()
            case ["restart", then]:
                await driver.say(do="strike", how="restart", node=node)
                await trio.sleep(self.chance.random() / 5)
                victim = {"of another": other, "of the keeper": KEEPER}.get(then.partition("SIGKILL ")[2], node)
                await driver.say(do="strike", how="SIGKILL", node=victim)
            case ["keeper"]:
                await driver.say(do="strike", how="SIGKILL", node=KEEPER)
            case _:
                await driver.say(do="strike", how=how, node=node)

    async def strike_all(self, strikes: list[str], commands: int) -> None:
        for number, how in enumerate(strikes):
            while len(self.answers) < number * commands:
                await self._progress.wait()
            await self.strike(how)


def _once(question: dict[str, Any]) -> dict[str, Any]:
    """A driver that died where it was told to does so no more."""
    return {key: value for key, value in question.items() if key != "received"}


@asynccontextmanager
async def nothing_left(marker: str) -> AsyncIterator[None]:
    """Whatever happens, nothing of a trial is left."""
    try:
        yield
        for pid in processes_of(marker):
            assert await gone(pid, 15.0), f"process {pid} is left"
    finally:
        for pid in processes_of(marker):
            os.kill(pid, 9)


def read_errors(folder: Path) -> str:
    """What all drivers and their nodes wrote."""
    return "".join(path.read_text() for path in sorted(folder.glob("driver-*.err")))


async def campaign(seed: int, folder: Path, strikes: list[str], commands: int) -> dict[str, Any]:
    """Strike in each way, with so many commands for each; return what is of interest."""
    chance = random.Random(seed)
    strikes = chance.sample(strikes, len(strikes))
    trial = Trial(folder, chance, commands * len(strikes))
    began = time.monotonic()
    async with nothing_left(trial.marker), trio.open_nursery() as nursery:
        await nursery.start(trial.live)
        async with trio.open_nursery() as customers:
            customers.start_soon(trial.strike_all, strikes, commands)
            for _ in range(CUSTOMERS):
                customers.start_soon(trial.customer)
        struck = time.monotonic() - began
        async with trio.open_nursery() as customers:
            names = iter(list(trial.answers))
            for _ in range(CUSTOMERS):
                customers.start_soon(trial.repeat_each, names)
        totals = {name: await trial.ask(do="total", id=f"total-{name}", entity=name) for name in ENTITIES}
        await trial.end()
    with (trial.log / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len(trial.answers) == commands * len(strikes)
    log = read_log(trial.log)
    assert check_rows(log, trial.answers) == totals
    errors = read_errors(folder)
    assert re.search(MISTAKES, errors) is None, errors
    kinds = collections.Counter(row["kind"] for rows in log for row in rows)
    return {
        "commands": len(trial.answers), "strikes": len(strikes), "seconds": round(struck, 1), "lives": trial.lives, "late": trial.late,
        "opened": kinds["$owned"], "snapshots": kinds["$snapshot"], "died in a command": trial.died,
    }  # fmt: skip


def seed_of(number: int) -> int:
    seed = int(os.environ.get("LEVADA_SEED", "0")) or random.randrange(1, 1 << 32)
    print(f"LEVADA_SEED={seed + number}")
    return seed + number


@pytest.mark.ci
@pytest.mark.timeout(300)
async def test_whatever_is_killed_each_command_is_done_once(tmp_path: Path) -> None:
    """The start of 16 processes is nearly all that this costs."""
    found = await campaign(seed_of(0), tmp_path, SIGNALS, 25)
    print(found)
    assert (found["commands"], found["strikes"]) == (150, 6)
    assert found["snapshots"] > 5


@pytest.mark.release
@pytest.mark.parametrize("number", range(4))
async def test_whatever_is_killed_each_command_is_done_once_for_long(number: int, tmp_path: Path) -> None:
    """4 trials: 80 strikes and 8,000 commands in all."""
    print(await campaign(seed_of(number), tmp_path, STRIKES, 100), flush=True)
