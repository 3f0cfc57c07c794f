"""Following files: `tail` is what programs use.

* **The place in a file moves only when its lines are safe** (`tail_delivery`).
* Each file has an actor (`tail_reader`); another actor looks for files and starts them (`tail_scanner`).
* Lines that are read and not delivered are bounded for each file; then reading waits.

`levada.actors.lumberjack.tail_registry` explains how files are told apart.  All of it needs a POSIX system.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import attrs
import trio

from levada.framework import ActorSystem

from .tail_config import TailConfig, TailStatus
from .tail_delivery import Deliver, Shared
from .tail_reader import Drain
from .tail_registry import open_registry
from .tail_scanner import Scanner

__all__ = ["Deliver", "Tail", "TailConfig", "TailStatus", "tail"]


class Tail:
    """Files being followed. Made by `tail`."""

    def __init__(self, shared: Shared, finished: trio.Event) -> None:
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
        """Wait until everything has been read and delivered; forever without `TailConfig.once`."""
        await self._finished.wait()


@asynccontextmanager
async def tail(
    system: ActorSystem,
    patterns: Iterable[str],
    deliver: Deliver,
    *,
    registry: str | os.PathLike[str] | None = None,
    config: TailConfig | None = None,
) -> AsyncIterator[Tail]:
    """Follow files while the block lasts, and hand their lines to `deliver`: each line at least once.

    Entering the block means that files have been looked for.
    Leaving the block reads no more, gives lines under way `TailConfig.drain_timeout` seconds to be delivered, and writes the registry.

    Args:
        system: has been entered.
        patterns: names of files, or patterns of them as in a shell, ``**`` included.
        deliver: takes a list of events and returns when they are safe. If it fails, the same events come again.
        registry: folder that keeps the places; ``None``: they are not kept, so the next run begins anew.
        config: ``None``: the defaults.

    Raises:
        ConfigurationError: the registry cannot be used.
    """
    config = config or TailConfig()
    with contextlib.ExitStack() as files:
        entries = await trio.to_thread.run_sync(files.enter_context, open_registry(registry))
        finished = trio.Event()
        shared = Shared(config, entries, deliver)
        scanner = system.spawn(Scanner, tuple(patterns), shared, finished, supervise="escalate")
        try:
            await shared.looked.wait()  # from now on it is known what there is to do
            yield Tail(shared, finished)
            with trio.move_on_after(config.drain_timeout):
                await scanner.ask(Drain(), timeout=None)
        finally:
            scanner.stop(now=True)
            with trio.CancelScope(shield=True):
                await scanner.terminated()
