"""The writers of ``levada bench lumberjack``, encoding counted: levada's, and PyPI's pylogbeat, which always packs and has one window in flight."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio
from benchmarks._lumberjack_peers import EVENTS

from levada.actors.lumberjack import WriterConfig, connect
from levada.framework import ActorSystem

__all__ = ["WRITERS"]

clock = time.perf_counter

_LINE = (
    '203.0.113.7 - - [17/May/2015:10:05:03 +0000] "GET /presentations/logstash/images/kibana.png HTTP/1.1" 200 ' * 4
)[:300]


def event(number: int) -> dict[str, str]:
    return {
        "line": _LINE,
        "host": "web-01",
        "file": "/var/log/access.log",
        "offset": str(number * 301),
        "id": str(number),
    }


def write_with_levada(port: int, count: int) -> float:
    """Events a second, one call for each."""

    async def main() -> float:
        config = WriterConfig(window=EVENTS)
        async with ActorSystem() as system, connect(system, f"lumberjack://127.0.0.1:{port}", config=config) as writer:
            began = clock()
            for number in range(count):
                await writer.send(event(number))
            await writer.flush()
            return count / (clock() - began)

    return trio.run(main)


def write_with_pylogbeat(port: int, count: int) -> float:
    """Events a second, one call for each window."""
    from pylogbeat import PyLogBeatClient

    client = PyLogBeatClient("127.0.0.1", port)
    client.connect()
    try:
        began = clock()
        for first in range(0, count, EVENTS):
            client.send([event(number) for number in range(first, first + EVENTS)])
        return count / (clock() - began)
    finally:
        client.close()


WRITERS: dict[str, Callable[[int, int], float]] = {"levada": write_with_levada, "pylogbeat": write_with_pylogbeat}
"""Each sends so many events to a reader at a port of this machine."""
