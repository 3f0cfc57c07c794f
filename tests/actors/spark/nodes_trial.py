"""A driver of nodes under Spark that kills them: a program, started by ``test_nodes_cluster.py``.

    nodes_trial.py MASTER COUNT CORES SETTINGS STEP...

CORES are those of a node, 0 for the default; SETTINGS are Spark's, as JSON. Steps: ``worker``, ``term``, ``stop``, ``daemon``, ``executor`` do that
to the process of the first node, to its parent and so on, and wait until all nodes are up again; ``kill:PID`` does it to another process;
``random:N:SEED`` does N of the first five to random nodes; ``restart`` is a rolling restart, ``query`` an ordinary job of Spark, ``drain`` drains the
last node; ``secrets`` tells the random values that were made so far. ``wait`` waits to be killed.
Prints a JSON object for each step when it is done. Meanwhile a supervised actor is asked all the time, which nodes run once at most.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import re
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from levada.actors.nodes import Member, MemberState, Nodes, NodeSettings, spark_nodes
from levada.actors.spark.session import session
from levada.framework import ActorSystem, Failed, Lost, Shutdown, restart
from levada.framework.errors import LevadaError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIMIT = 240.0
"""Seconds for all nodes to be up again; a session takes up to 100 to start on a busy machine."""
PARENTS = {"worker": 0, "term": 0, "stop": 0, "daemon": 1, "executor": 2}
SIGNALS = {"term": signal.SIGTERM, "stop": signal.SIGSTOP}
REASONS = {"term": "told to end by SIGTERM", "stop": "hangs: no heartbeat for"}
"""What is said of a node that was hurt; of the others, that Spark says it."""
KNOWN = 60.0
"""Seconds until the driver and a watcher know that a node was hurt: a second for what Spark says, 9 for a hang, on a quiet machine."""


MADE: list[str] = []
"""All random values of this process, in hexadecimal."""


def recorded(make: Any) -> Any:
    def record(count: int) -> Any:
        made = make(count)
        MADE.append(made if isinstance(made, str) else made.hex())
        return made

    return record


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def ancestor(pid: int, generations: int) -> int:
    for _ in range(generations):
        pid = int(stat(pid)[1])
    return pid


async def ended(pid: int) -> None:
    """Wait for the end of a process."""
    try:
        number = os.pidfd_open(pid)
    except OSError:  # see `tests.actors.nodes.processes.gone`
        return
    try:
        await trio.lowlevel.wait_readable(number)
    finally:
        os.close(number)


class Trial:
    """Kills, and waits."""

    def __init__(self, spark: SparkSession, nodes: Nodes) -> None:
        self.spark = spark
        self.nodes = nodes
        self.born: dict[int, str] = {}
        """When each process of a node began."""
        self.reasons: list[str] = []

    def note(self, member: Member, reason: Any) -> None:
        if member.pid and (state := stat(member.pid)):
            self.born.setdefault(member.pid, state[19])
        if member.state is MemberState.DOWN and isinstance(reason, Failed):
            self.reasons.append(f"{member.name}: {reason.error}")

    def living(self) -> set[int]:
        """Processes that are or were nodes."""
        return {
            pid for pid, born in self.born.items() if (state := stat(pid)) and state[0] != "Z" and state[19] == born
        }

    async def settled(self) -> None:
        """Wait until all nodes are up and answer, and nothing else of them is left."""
        where = importlib.import_module("node_app").Where  # shipped
        with trio.fail_after(LIMIT):
            while True:
                await trio.sleep(0.1)
                members = [member for member in self.nodes.members if member.state is not MemberState.DOWN]
                if len(members) != len(self.nodes.members) or self.living() != {member.pid for member in members}:
                    continue
                try:
                    for member in members:
                        counter = await self.nodes.lookup("counter", on=member.name)
                        assert await counter.ask(where(), timeout=5) == member.pid
                except LevadaError:
                    continue
                return

    async def hurt(self, kind: str, member: Member) -> None:
        victim = ancestor(member.pid, PARENTS[kind])
        before, said = member.node_id, len(self.reasons)
        watched = await self.nodes.spawn(importlib.import_module("node_app").Counter, on=member.name)
        os.kill(victim, SIGNALS.get(kind, signal.SIGKILL))
        with trio.fail_after(KNOWN):
            reason = await watched.terminated()
            await self.nodes.directory.until(lambda: len(self.reasons) > said)
        # An actor of a node that drains is told to stop; of one that dies, it is lost. The end of an executor is SIGHUP for its nodes.
        assert isinstance(reason, (Lost, Shutdown) if kind in ("term", "executor") else Lost), (kind, reason)
        with trio.fail_after(LIMIT):
            await self.nodes.directory.until(
                lambda: self.nodes[member.name].node_id != before and self.nodes[member.name].state is MemberState.UP
            )
        wanted = f"{member.name}: .*{REASONS.get(kind, 'Spark says: ')}"
        assert any(re.match(wanted, each) for each in self.reasons[said:]), (kind, self.reasons[said:])
        await self.settled()

    async def step(self, text: str) -> None:
        word, *arguments = text.split(":")
        began = time.monotonic()
        self.reasons.clear()
        first = self.nodes.members[0]
        if word in PARENTS:
            await self.hurt(word, first)
        elif word == "random":
            count, seed = map(int, arguments)
            chance = random.Random(seed)
            for _ in range(count):
                kind, member = chance.choice(sorted(PARENTS)), chance.choice(self.nodes.members)
                at = time.monotonic()
                await self.hurt(kind, member)
                say(step=f"{kind} of {member.name}", seconds=round(time.monotonic() - at, 1))
        elif word == "kill":
            os.kill(int(arguments[0]), signal.SIGKILL)
            await trio.sleep(3)  # as long as Spark takes to notice
            await self.settled()
        elif word == "restart":
            before = {member.node_id for member in self.nodes.members}
            await self.nodes.restart()
            await self.settled()
            assert before.isdisjoint({member.node_id for member in self.nodes.members})
        elif word == "query":
            assert await trio.to_thread.run_sync(lambda: self.spark.range(1000).count()) == 1000
        elif word == "drain":
            await self.nodes.drain(self.nodes.members[-1].name)
        elif word == "secrets":
            say(step="secrets", secrets=MADE)
            return
        elif word == "wait":
            say(step="wait", pids=sorted(self.living()), gateway=gateway())
            await trio.sleep_forever()
        say(step=text, seconds=round(time.monotonic() - began, 1), reasons=self.reasons, hosts=self.hosts())

    def hosts(self) -> int:
        """Executors that nodes are on."""
        return len({ancestor(member.pid, 2) for member in self.nodes.members if member.pid in self.living()})


def gateway() -> int:
    """The process of the driver's Java."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return next(int(child) for child in children if "java" in Path(f"/proc/{child}/cmdline").read_text())


async def main(master: str, count: int, cores: int, settings: dict[str, str], steps: list[str]) -> None:
    spark = session(master=master, log_level="off", **settings)
    try:
        for module in (Path(__file__).parents[1] / "nodes" / "single.py", Path(__file__).with_name("node_app.py")):
            spark.sparkContext.addPyFile(str(module))
        single = importlib.import_module("single")  # shipped
        async with ActorSystem("driver") as system, trio.open_nursery() as nursery:
            load = single.Load(system, pause=0.02)
            how = NodeSettings(start_timeout=LIMIT, silence=4.0, drain_timeout=20.0)
            async with spark_nodes(system, spark, count, "node_app:app", settings=how, cores=cores or None) as nodes:
                trial = Trial(spark, nodes)
                for member in nodes.members:
                    trial.note(member, None)
                nodes.directory.watchers.append(trial.note)
                await trial.settled()
                say(step="up", hosts=trial.hosts())
                policy = restart("permanent", max=1000, within=1.0)
                await nodes.spawn(single.Single, str(Path.cwd()), name="single", supervise=policy)
                nursery.start_soon(load.run)
                for step in steps:
                    await trial.step(step)
            with trio.fail_after(100):
                for pid in trial.living():
                    await ended(pid)
            nursery.cancel_scope.cancel()
        load.check(Path.cwd())
        say(step="drained", answered=len(load.answered), asked=load.sent)
    finally:
        spark.stop()


if __name__ == "__main__":
    logging.getLogger("levada.framework.lifecycle").setLevel(logging.CRITICAL)  # nodes that were killed
    secrets.token_hex, secrets.token_bytes = recorded(secrets.token_hex), recorded(secrets.token_bytes)
    trio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5:])
