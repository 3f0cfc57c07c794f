"""`tail` follows files and delivers their lines.

* **The place in a file moves only when its lines are safe** (`tail_delivery`).
* Each file has an actor (`tail_reader`).  Another actor looks for files and starts these actors (`tail_scanner`).
* The lines of a file that are read and not delivered are bounded.  At the bound, reading waits.

`levada.actors.lumberjack.tail_registry` explains how files are identified.  All of this needs a POSIX system.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import attrs
import trio

from levada.framework import ActorSystem
from levada.framework.errors import ActorStopped

from .tail_config import TailConfig, TailStatus
from .tail_delivery import Deliver, TailState
from .tail_reader import DrainFiles
from .tail_registry import open_registry
from .tail_scanner import Scanner

__all__ = ["Deliver", "Tail", "TailConfig", "TailStatus", "tail"]


class Tail:
    """The files that `tail` follows."""

    def __init__(self, shared: TailState, finished: trio.Event) -> None:
        self._shared = shared
        self._finished = finished

    def status(self) -> TailStatus:
        """Return the counters as they are now, or as they were at the end."""
        shared = self._shared
        behind = shared.bytes_waiting + sum(max(0, size - entry.offset) for entry, size in shared.sizes.values())
        return TailStatus(
            files=shared.files, waiting=shared.waiting, bytes_behind=behind, **attrs.asdict(shared.counters)
        )

    async def finished(self) -> None:
        """Wait until all files were read to their end and delivered, which only happens with `TailConfig.once`.

        Raises:
            ActorStopped: the block of `tail` was left before that.
        """
        await self._finished.wait()
        reason = self._shared.cut
        if reason is not None:
            what = "the block of tail() was left before all files were read to their end and delivered"
            raise ActorStopped(what, reason=reason)


@asynccontextmanager
async def tail(
    system: ActorSystem,
    patterns: Iterable[str],
    deliver: Deliver,
    *,
    registry: str | os.PathLike[str] | None = None,
    config: TailConfig | None = None,
) -> AsyncIterator[Tail]:
    """Follow files while the block lasts, and hand each of their lines to `deliver` at least once.

    The block begins after the first look for files.
    Leaving it stops reading, waits up to `TailConfig.drain_timeout` seconds until the lines under way are delivered, and writes the registry.

    Args:
        system: a running system.
        patterns: names of files, or patterns as in a shell, including ``**``.
        deliver: takes a list of events and returns when they are safe. If it fails, the same events come again.
        registry: folder that keeps the place in each file; ``None``: the places are not kept, so the next run starts from the beginning.
        config: how files are followed; ``None``: the defaults.

    Raises:
        ConfigurationError: the registry cannot be used.

    Cancellation:
        lines under way are not waited for, and come again in the next run; the registry is written.
    """
    config = config or TailConfig()
    with contextlib.ExitStack() as files:
        entries = await system.platform.run_in_thread(files.enter_context, open_registry(registry))
        finished = trio.Event()
        shared = TailState(config, entries, deliver)
        scanner = system.spawn(Scanner, tuple(patterns), shared, finished, supervise="escalate")
        try:
            await shared.looked.wait()
            yield Tail(shared, finished)
            with trio.move_on_after(config.drain_timeout):
                await scanner.ask(DrainFiles(), timeout=None)
        finally:
            scanner.stop(now=True)
            with trio.CancelScope(shield=True):
                reason = await scanner.terminated()
                if not finished.is_set():
                    shared.cut = reason
                    finished.set()
