"""Nodes that are child processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from levada.actors.nodes import NodeDown, NodeUp, local_nodes
from levada.framework import ActorSystem, Failed

from .apps import Add, Counter, Where, app

pytestmark = pytest.mark.ci


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's path, which its nodes get, has the root."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_killed_child_process_is_replaced_and_nothing_is_left() -> None:
    async with ActorSystem() as system:
        async with local_nodes(system, 2, app) as nodes, nodes.events() as events:
            counter = await nodes.spawn(Counter, 5, on="n1")
            pid, name = await counter.ask(Where())
            assert (name, pid) == ("n1", nodes["n1"].pid)
            assert await counter.ask(Add(2)) == 7
            os.kill(pid, signal.SIGKILL)
            down, up = await events.receive(), await events.receive()
            assert isinstance(down, NodeDown)
            assert isinstance(down.reason, Failed)
            assert str(down.reason.error) == "n1 was killed by SIGKILL"
            assert isinstance(up, NodeUp)
            assert up.member.pid != pid
            pids = [pid, *(member.pid for member in nodes.members)]
        assert [is_alive(pid) for pid in pids] == [False, False, False]
