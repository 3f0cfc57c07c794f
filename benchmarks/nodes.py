"""What nodes gain, and what they cost: ``levada bench nodes``.

Two nodes, the driver in this process, everything on one machine with two cores or more. Each row is measured against something else in the same
round: two bare processes that do the same jobs without levada, one process that does them in an actor, Aqueduct over QUIC between two
processes. Jobs and asks are measured in turns with the other side's, and the medians of the turns are compared: a machine that stalls for a
moment spoils one turn.
The rows about starts and deaths are seconds; they need a quiet machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from levada.actors.aqueduct import PeerConfig, connect
from levada.actors.interop.certificates import make_certificates
from levada.actors.nodes import NodeDown, Nodes, NodeUp, local_nodes
from levada.framework import ActorSystem, Ref
from levada.transports.quic import QuicConfig

from ._measure import verdict
from ._nodes_app import Asker, Burn, Burner, Echo, Measure, Ping, app, burn, time_asks

__all__ = ["run"]

ROOT = Path(__file__).parents[1]
NODES = 2
TURNS = 10


@attrs.frozen
class Row:
    """A ratio, or seconds, measured in all rounds."""

    title: str
    budget: float
    other: str = ""
    """What `ours` is compared with; empty: the row is in seconds, and the budget is the most."""
    ours: list[float] = attrs.field(factory=list)
    """Seconds."""
    theirs: list[float] = attrs.field(factory=list)
    most: bool = False
    """Whether the ratio is ours to theirs, at most the budget; else it is theirs to ours, at least the budget."""

    def add(self, ours: Sequence[float], theirs: Sequence[float]) -> None:
        """Add the medians of the turns of a round."""
        self.ours.append(statistics.median(ours))
        self.theirs.append(statistics.median(theirs))

    @property
    def figure(self) -> float:
        """The median of the ratios, or of the seconds."""
        pairs = list(zip(self.ours, self.theirs, strict=False))
        if not self.other:
            return statistics.median(self.ours)
        return statistics.median(mine / other if self.most else other / mine for mine, other in pairs)

    @property
    def missed(self) -> bool:
        """Whether it misses the budget."""
        return self.figure > self.budget if self.most or not self.other else self.figure < self.budget

    def text(self, *, judged: bool) -> str:
        """One line of the table."""
        end = verdict(self.missed, judged)
        if not self.other:
            return f"{self.title:44} {self.figure:>10.3f} s{'':12}  (≤ {self.budget:g} s) {end}"
        sides = f"{1e6 * statistics.median(self.ours):>10,.0f} {1e6 * statistics.median(self.theirs):>13,.0f}"
        return f"{self.title:44} {sides}  {self.figure:.2f} × {self.other} ({'≤' if self.most else '≥'} {self.budget:g}) {end}"


@attrs.frozen
class Report:
    """All rows."""

    rows: Sequence[Row]

    @property
    def missed(self) -> list[str]:
        """Titles of the rows that miss their budgets."""
        return [row.title for row in self.rows if row.missed]

    def text(self, *, judged: bool) -> str:
        """Lay it out as a table."""
        head = f"{'µs of one operation, medians':44} {'nodes':>10} {'other':>13}  ratio and budget"
        return "\n".join([head, *(row.text(judged=judged) for row in self.rows)]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Turn it into what the `json` module writes."""
        return {"rows": [{**attrs.asdict(row), "figure": row.figure, "missed": row.missed} for row in self.rows]}


def loops_for(seconds: float) -> int:
    """How many loops of `burn` take so long: the best of some tries."""
    loops = 20
    best = min(_timed(loops) for _ in range(20))
    return round(loops * seconds / best)


def _timed(loops: int) -> float:
    start = time.perf_counter()
    burn(loops)
    return time.perf_counter() - start


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of `benchmarks._nodes_app`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])}
    command = [sys.executable, "-m", "benchmarks._nodes_app", *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


@contextlib.contextmanager
def bare(loops: int, jobs: int) -> Iterator[Callable[[], float]]:
    """Two processes without levada; the yielded function returns the seconds of one job when each does half of them."""
    with process("bare", loops, jobs // NODES) as one, process("bare", loops, jobs // NODES) as other:
        assert one.stdout is not None
        assert other.stdout is not None
        outputs = one.stdout, other.stdout
        for each in outputs:
            each.readline()

        def take_turn() -> float:
            start = time.perf_counter()
            for started in (one, other):
                print("go", file=started.stdin, flush=True)
            for each in outputs:
                assert each.readline() == "done\n"
            return (time.perf_counter() - start) / jobs

        yield take_turn


async def asked(burners: Sequence[Ref[Burn]], loops: int, jobs: int) -> float:
    """Seconds of one job when each actor does the same number of them, with two asks under way to each."""

    async def some(burner: Ref[Burn], left: Iterator[int]) -> None:
        for _ in left:
            await burner.ask(Burn(loops), timeout=None)

    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for burner in burners:
            left = iter(range(jobs // len(burners)))
            for _ in range(2):
                nursery.start_soon(some, burner, left)
    return (time.perf_counter() - start) / jobs


class Round:
    """One round: a fleet, and all that is measured with it."""

    def __init__(self, rows: dict[str, Row], quick: bool) -> None:
        self.rows = rows
        self.scale = 20 if quick else 1

    async def run(self, folder: Path) -> None:
        """Measure all rows once."""
        async with ActorSystem("bench") as system:
            start = time.perf_counter()
            async with local_nodes(system, NODES, app) as nodes:
                self.rows["up"].ours.append(time.perf_counter() - start)
                await self.computing(system, nodes)
                await self.asks(nodes, folder)
                await self.spawns(nodes)
                await self.deaths(nodes)

    async def computing(self, system: ActorSystem, nodes: Nodes) -> None:
        """Handlers that compute."""
        burners = [await nodes.spawn(Burner, on=number) for number in range(NODES)]
        here = [system.spawn(Burner)]
        loops = loops_for(0.02)
        jobs = max(4, 12 // self.scale)
        ours, theirs = list[float](), list[float]()
        with bare(loops, jobs) as take_turn:
            for _ in range(2 * TURNS):
                theirs.append(await trio.to_thread.run_sync(take_turn))
                ours.append(await asked(burners, loops, jobs))
        self.rows["20 ms"].add(ours, theirs)
        ours, theirs = [], []
        for _ in range(2 * TURNS):
            theirs.append(await asked(here, loops // 10, 2 * jobs))
            ours.append(await asked(burners, loops // 10, 2 * jobs))
        self.rows["2 ms"].add(ours, theirs)

    async def asks(self, nodes: Nodes, folder: Path) -> None:
        """Asks between two nodes, and over QUIC between two processes."""
        echo = await nodes.spawn(Echo, on=1)
        asker = await nodes.spawn(Asker, on=0)
        config = PeerConfig(carrier=QuicConfig(ca=folder / "ca.pem", server_name="localhost"))
        with process("quic", folder) as server:
            assert server.stdout is not None
            url = (await trio.to_thread.run_sync(server.stdout.readline)).strip()
            async with ActorSystem() as system, connect(system, url, object, config=config) as peer:
                other: Ref[Ping] = await peer.lookup("echo", Ping)
                for at_once in (1, 64):
                    count = max(20, (200 if at_once == 1 else 1_000) // self.scale)
                    ours, theirs = list[float](), list[float]()
                    for _ in range(TURNS):
                        await time_asks(other, count // 10, at_once)
                        theirs.append(await time_asks(other, count, at_once))
                        ours.append(await asker.ask(Measure(echo, count, at_once), timeout=None))
                    self.rows[f"ask {at_once}"].add(ours, theirs)

    async def spawns(self, nodes: Nodes) -> None:
        """Spawns on a node that has done it before, and asks of that node."""
        echo = await nodes.spawn(Echo, on=0)
        count = max(20, 500 // self.scale)
        await time_asks(echo, count // 10, 1)
        row = self.rows["spawn"]
        row.theirs.append(await time_asks(echo, count, 1))
        start = time.perf_counter()
        for _ in range(count):
            await nodes.spawn(Echo, on=0)
        row.ours.append((time.perf_counter() - start) / count)

    async def deaths(self, nodes: Nodes) -> None:
        """Kill a node; wait until that is known, and until it is up again."""
        async with nodes.events() as events:
            start = time.perf_counter()
            os.kill(nodes["n0"].pid, signal.SIGKILL)
            assert isinstance(await events.receive(), NodeDown)
            self.rows["down"].ours.append(time.perf_counter() - start)
            assert isinstance(await events.receive(), NodeUp)
            self.rows["again"].ours.append(time.perf_counter() - start)


def run(*, rounds: int, quick: bool, only: str, progress: Callable[[str], None]) -> Report:
    """Measure; all rows of a round share its fleet, and `only` chooses what is shown."""
    rows = {
        "20 ms": Row("20 ms of computing, 2 nodes", 0.93, "two bare processes"),
        "2 ms": Row("2 ms of computing, 2 nodes", 1.3, "one process"),
        "ask 1": Row("ask from node to node, one at a time", 1.3, "Aqueduct over QUIC"),
        "ask 64": Row("ask from node to node, 64 at a time", 1.3, "Aqueduct over QUIC"),
        "spawn": Row("spawn on a node", 3.0, "an ask", most=True),
        "up": Row("two nodes up", 1.5),
        "down": Row("a killed node is known", 0.05),
        "again": Row("a killed node is up again", 2.5),
    }
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            trio.run(Round(rows, quick).run, Path(folder))
    return Report([row for row in rows.values() if only in row.title])
