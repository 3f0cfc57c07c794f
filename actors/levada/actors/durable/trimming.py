"""Trimming: from time to time a shard has its log drop the old rows behind snapshots (``shards(keep=…)``)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from levada.actors.journal import TrimRows
from levada.framework.errors import LevadaError

if TYPE_CHECKING:
    from .shard import Shard

__all__ = ["Trimming"]

logger = logging.getLogger("levada.actors.durable")

FIRST_WAIT = 10.0
"""Seconds from the opening of a shard to the first time: a program that restarts often trims too."""
LEAST_WAIT, MOST_WAIT = 60.0, 86_400.0
"""Seconds between two times; in between, an eighth of what is kept. Each time the log reads all its rows."""
TIMEOUT = 3600.0
"""Seconds after which the log counts as out of reach."""


class Trimming:
    """Trims the log of one shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def begin(self) -> None:
        """Trim in a while, if rows are not kept for ever."""
        if self._shard.settings.keep is not None:
            self._shard.trim_in(FIRST_WAIT)

    async def trim(self) -> None:
        """Trim now, and again in a while. If the log refuses or is out of reach, that is logged."""
        shard, settings = self._shard, self._shard.settings
        assert settings.keep is not None
        older = settings.clock() - settings.keep
        question = TrimRows(shard.number, older, settings.remember, settings.snapshots.layout)
        try:
            done = await shard.access.journal.ask(question, timeout=TIMEOUT)
        except (LevadaError, OSError) as error:
            logger.warning("%s is not trimmed: %s", shard.ref.path, error, extra={"event": "not_trimmed"})
        else:
            if done.rows:
                logger.info("%s: %d old rows were trimmed", shard.ref.path, done.rows, extra={"event": "trimmed"})
        shard.trim_in(min(max(settings.keep / 8, LEAST_WAIT), MOST_WAIT))
