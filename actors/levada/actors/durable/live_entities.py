"""The entities of a shard: in memory, on their way into it, or ended with rows that are not on the disk yet."""

from __future__ import annotations

from itertools import islice

import trio

from levada.framework.embedding import drop_frames, release

from .commits import Commits
from .errors import ReplayFailed
from .turns import CommandTurn, Live

__all__ = ["Population"]

MOST_FAILED = 1000
"""Entities of a shard whose failed replay is remembered; others are read again with each command."""


class Population:
    """Which entities of a shard are where."""

    def __init__(self, commits: Commits, max_live: int) -> None:
        self.live: dict[str, Live] = {}
        """Those in memory, those used least recently first."""
        self.loading: dict[str, list[CommandTurn]] = {}
        """The commands that wait for entities that are being read."""
        self.unreadable: dict[str, ReplayFailed] = {}
        """Why entities could not be read."""
        self.loads = 0
        """How many entities were read."""
        self._commits = commits
        self._max_live = max_live
        self._ended: dict[str, Live] = {}
        self._most_ended = MOST_FAILED
        self._loaded = trio.Event()

    async def until_written(self, entity: str, live: Live | None = None) -> None:
        """Wait until an entity has ended, if it was in memory, and its rows are on the disk."""
        ended = self._ended.pop(entity, live)
        if ended is not None:
            await ended.cell.terminated()
            await self._commits.reach(ended.ticket)

    def note_unreadable(self, error: ReplayFailed) -> None:
        """Remember that an entity could not be read, if an event was the reason; otherwise the next command tries again."""
        drop_frames(error)  # they have the rows that were read
        if error.sequence and len(self.unreadable) < MOST_FAILED:
            self.unreadable[error.entity] = error

    def take_waiting(self, entity: str) -> list[CommandTurn]:
        """Return the commands that waited for an entity, which is not being read any more."""
        self._loaded.set()
        self._loaded = trio.Event()
        return self.loading.pop(entity)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to `sweep`."""
        return not self.live and not self._ended

    def add(self, live: Live, now: float) -> None:
        """Take an entity that has been read."""
        self.loads += 1
        live.used = now
        self.live[live.entity] = live

    def drop(self, live: Live) -> None:
        """Forget an entity that has ended on its own; it is read again when its rows are on the disk."""
        del self.live[live.entity]
        self._ended[live.entity] = live
        if len(self._ended) > self._most_ended:
            self.forget_ended()
            self._most_ended = max(MOST_FAILED, 2 * len(self._ended))

    async def end(self, entity: str) -> None:
        """End an entity, and wait until its rows are on the disk."""
        while entity in self.loading:
            await self._loaded.wait()
        live = self.live.get(entity)
        if live is not None:
            live.cell.kill()
            await live.cell.terminated()
            self.live.pop(entity, None)
        await self.until_written(entity, live)

    def sweep(self, oldest: float) -> None:
        """Drop entities that had no command since some time on trio's clock."""
        for live in list(self.live.values()):
            if live.used > oldest:
                break
            self._let_go(live)
        self.forget_ended()

    def make_room(self) -> None:
        """Drop the entities that were used least recently, if there are too many in memory."""
        excess = len(self.live) - self._max_live
        if excess > 0:
            for live in list(islice(self.live.values(), excess)):
                self._let_go(live)

    def forget_ended(self) -> None:
        """Forget entities that have ended and whose rows are on the disk."""
        for entity, live in list(self._ended.items()):
            if not live.cell.is_alive and live.ticket <= self._commits.written:
                del self._ended[entity]

    def _let_go(self, live: Live) -> None:
        if live.turn is None and live.ticket <= self._commits.written:
            del self.live[live.entity]
            release(live.actor, hook=True)
            if live.cell.is_alive:
                self._ended[live.entity] = live
