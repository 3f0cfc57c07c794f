"""The actor runtime against its budgets, against plain loops and against other actor libraries: ``levada bench actors``."""

from __future__ import annotations

import attrs

from ._levada import CONTENDER, raw_msgpack, raw_msgpack_list, raw_msgpack_nested
from ._loops import ASYNCIO, TRIO, asyncio_ask, trio_switches
from ._measure import Progress, Report, Workload, measure
from ._peers import peers

__all__ = ["WORKLOADS", "run"]

WORKLOADS = (
    Workload(key="tell", title="tell + handle, sync handler", n=100_000, budget=5),
    Workload(key="hop", title="hop between two actors", n=50_000, budget=20),
    Workload(key="ask", title="ask from outside actors", n=20_000, budget=50),
    Workload(key="ask inside", title="ask from a handler, idle sync actor", n=20_000, budget=60),
    Workload(key="tell async", title="tell + handle, async, does not wait", n=100_000, budget=12),
    Workload(key="spawn", title="spawn + stop", n=20_000, budget=100),
    Workload(key="idle", title="idle actor, no fields", n=10_000, unit="B", base=None, budget=400),
    Workload(key="bounded", title="bounded send at 256 + handle", n=100_000, budget=12),
    Workload(
        key="ask async", title="ask an async actor", n=5_000, base=trio_switches, base_name="two switches", budget=3
    ),
    Workload(
        key="switches", title="two switches of trio alone, for an ask", n=5_000, base=asyncio_ask, base_name="asyncio"
    ),
    Workload(key="fan-out", title="fan-out to 1,000, each", n=100_000),
    Workload(key="ring", title="ring of 1,000, each hop", n=50_000),
    Workload(key="restart", title="failure + restart", n=5_000),
    Workload(key="thread", title="from_thread.tell, in the thread", n=30_000, base=None, budget=2_000),
    Workload(key="channel", title="channel between tasks, window 256", n=100_000),
    Workload(key="channel nowait", title="channel, send_nowait + receive_nowait", n=100_000),
    Workload(
        key="codec", title="codec, encode + decode, 4 fields", n=20_000, base=raw_msgpack, base_name="msgpack", budget=4
    ),
    Workload(
        key="codec nested",
        title="codec, one message in another",
        n=20_000,
        base=raw_msgpack_nested,
        base_name="msgpack",
        budget=5,
    ),
    Workload(
        key="codec list",
        title="codec, list of 100 messages",
        n=500,
        base=raw_msgpack_list,
        base_name="msgpack",
        budget=6,
    ),
    Workload(key="late", title="5 ms timer in a flood: late by", n=100, base=None),
    Workload(key="late worst", title="5 ms timer in a flood: worst of 100", n=100, base=None),
    Workload(key="million spawn", title="1,000,000 actors: spawn, each", n=1_000_000, base=None, once=True),
    Workload(key="million bytes", title="1,000,000 actors: memory, each", n=1_000_000, unit="B", base=None, once=True),
    Workload(key="million tell", title="1,000,000 actors: tell + handle, each", n=1_000_000, base=None, once=True),
    Workload(key="million stop", title="1,000,000 actors: stop, each", n=1_000_000, base=None, once=True),
)
"""The first eight are the budgets of the runtime."""


def run(*, rounds: int, quick: bool, only: str, progress: Progress) -> Report:
    """Measure all workloads whose title contains `only`."""
    workloads = [workload for workload in WORKLOADS if only in workload.title]
    ours = attrs.evolve(CONTENDER, runs={**CONTENDER.runs, "switches": trio_switches})
    return measure(workloads, [ours, TRIO, ASYNCIO, *peers()], rounds=rounds, quick=quick, progress=progress)
