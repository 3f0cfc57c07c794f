"""Nodes: one actor system on many processes.

A *driver* starts *nodes*, processes that each run an actor system of their own. Actors on all of them send each other messages by
ordinary refs. `local_nodes` starts child processes, `spark_nodes` runs nodes as Spark tasks.

Example:
    ::

        async with ActorSystem() as system, local_nodes(system, 4, "shop.workers:app") as nodes:
            worker = await nodes.spawn(Worker, on="any")
            print(await worker.ask(Work(7)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from levada.actors.on_demand import on_demand

from .local import local_nodes
from .messages import Member, MemberState, NodeDown, NodeLost, NodeUp
from .node import Launcher, Process, Run
from .nodes import Nodes, nodes_of
from .settings import NodeSettings
from .singletons import singleton

if TYPE_CHECKING:
    from .spark import spark_nodes

__all__ = [
    "Launcher", "Member", "MemberState", "NodeDown", "NodeLost", "NodeSettings", "NodeUp", "Nodes", "Process", "Run", "local_nodes",
    "nodes_of", "singleton", "spark_nodes",
]  # fmt: skip

# Spark is an extra.
__getattr__ = on_demand(__name__, ["spark"], ["spark_nodes"])
