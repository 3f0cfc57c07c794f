"""Figures and promises of the pages on operating: what grows, capacity, a stuck handler."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.actors.lumberjack import SpoolConfig
from levada.framework import Actor, ActorSystem, Supervision, handles, restart

PAGES = Path(__file__).parents[2] / "docs/how-to"
CAPACITY = (PAGES / "plan-capacity.md").read_text("utf-8")

NODES = """
import sys, tempfile
from pathlib import Path
import trio
from nodes_app import bare, durable
from levada.actors.nodes import local_nodes
from levada.framework import ActorSystem

def megabytes(pid):
    "The memory that a process shares with no other, and its part of the rest."
    return int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\\nPss:")[2].split()[0]) / 1000

async def main():
    for app in (bare, durable):
        async with ActorSystem() as system, local_nodes(system, 2, app) as nodes:
            print(*(megabytes(member.pid) for member in nodes.members))

if __name__ == "__main__":
    trio.run(main)
"""
APP = """
from levada.framework import handles, message

async def bare(system):
    yield

async def durable(system):
    from levada.actors.durable import Durable, applies, shards

    @message("docs.put")
    class Put:
        n: int

    global Kept

    class Kept(Durable):
        n: int = 0

        @handles
        def put(self, m: Put) -> None:
            self.record(m)

        @applies
        def set(self, e: Put) -> None:
            self.n = e.n

    Kept.__qualname__ = "Kept"
    await shards(system, Kept, events=Put, journal="kept", shards=4)
    yield
"""


@pytest.mark.release
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_a_node_takes_the_memory_that_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "nodes_app.py").write_text(APP)
    (tmp_path / "main.py").write_text(NODES)
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bare, durable = (max(map(float, line.split())) for line in done.stdout.splitlines())
    said = re.search(r"A node takes about (\d+) MB .* with durable actors about (\d+) MB", CAPACITY)
    assert said is not None
    assert bare == pytest.approx(float(said[1]), rel=0.25)
    assert durable == pytest.approx(float(said[2]), rel=0.25)


def test_a_spool_has_the_bound_that_the_page_says() -> None:
    said = re.search(r"`SpoolConfig.max_bytes`, (\d+) GB", (PAGES / "what-grows.md").read_text("utf-8"))
    assert said is not None
    assert SpoolConfig(folder="spool").max_bytes == int(said[1]) << 30


@pytest.mark.parametrize(("supervise", "works"), [("stop", []), (restart("permanent"), ["second", "third"])])
async def test_a_kill_frees_a_stuck_handler(supervise: Supervision, works: list[str]) -> None:
    worked = []

    class Clerk(Actor[str]):
        @handles
        async def work(self, m: str) -> None:
            if m == "first":
                await trio.sleep_forever()
            worked.append(m)

    async with ActorSystem() as system:
        clerk = system.spawn(Clerk, supervise=supervise)
        for each in ("first", "second", "third"):
            clerk.tell(each)
        await wait_all_tasks_blocked()
        clerk.kill()
        await wait_all_tasks_blocked()
        assert worked == works
        assert system.statistics().dead_letters == 2 - len(works)
