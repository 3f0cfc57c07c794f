"""Nodes that flood the keeper of the log: memory stays bounded, and an honest node is served."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.actors.durable.accounts import Deposit, Deposited
from tests.actors.durable.flood_app import Flood, Flooder, Placed, Sent
from tests.actors.durable.test_placement import Where
from tests.actors.nodes.processes import START

from levada.actors.durable import log_columns, log_config, shards
from levada.actors.journal.keeper_process import keeper
from levada.actors.nodes import NodeSettings, local_nodes
from levada.framework import ActorSystem

FLOOD = 5_000
"""Questions of each of two nodes before the honest one is looked at; many of them have 1 MiB."""
MOST_BYTES = 64 << 20
"""That the driver and the keeper may grow by."""
TICK = os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_of(pid: int) -> float:
    """Seconds of CPU of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


@pytest.mark.release
@pytest.mark.timeout(600)
async def test_nodes_that_flood_the_keeper_leave_room_for_an_honest_one(tmp_path: Path) -> None:
    settings = NodeSettings(start_timeout=START, hang_timeout=60.0, silence=120.0)
    async with (
        ActorSystem("driver", shutdown_timeout=150.0, ask_timeout=300.0) as system,
        keeper(system, settings=settings) as keep,
        local_nodes(
            system, 3, "tests.actors.durable.flood_app:app", names=["n0", "n1", "n2"], settings=settings
        ) as nodes,
    ):
        journal = await keep.open(tmp_path / "log", log_columns(Deposited), config=log_config(8))
        accounts = await shards(system, Placed, events=Deposited, journal=journal, shards=8, nodes=nodes)
        names = [f"e{number}" for number in range(40)]
        honest = [name for name in names if await accounts[name].ask(Where()) == "n2"][:8]
        pids = {"driver": os.getpid(), "keeper": keep.nodes[keep.name].pid}

        async def serve() -> list[float]:
            """Seconds that each of 40 commands of honest entities takes."""
            found = []
            for _ in range(5):
                for name in honest:
                    began = time.monotonic()
                    await accounts[name].ask(Deposit(1))
                    found.append(time.monotonic() - began)
            return sorted(found)

        before = await serve()
        memory = {name: memory_of(pid) for name, pid in pids.items()}
        cpu = {name: cpu_of(pid) for name, pid in pids.items()}
        flooders = [await nodes.spawn(Flooder, on=name) for name in ("n0", "n1")]
        for each in flooders:
            await each.ask(Flood(journal, FLOOD), timeout=None)
        during = await serve()
        sent = sum([await each.ask(Sent()) for each in flooders])
        grown = {name: memory_of(pid) - memory[name] for name, pid in pids.items()}
        spent = {name: round(cpu_of(pid) - cpu[name], 2) for name, pid in pids.items()}
        middle = len(during) // 2
        print({"sent": sent, "seconds": (before[middle], during[middle], during[-1]), "bytes": grown, "CPU": spent})
        assert max(grown.values()) < MOST_BYTES
        assert during[middle] < max(1.0, 50 * before[middle])  # a second, or as busy as the machine is without them
        assert await accounts[honest[0]].ask(Deposit(1)) == 11
        accounts.ref.stop()
        await accounts.ref.terminated()
