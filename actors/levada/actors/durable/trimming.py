"""Trimming: from time to time a shard has its log drop the old rows behind snapshots (``shards(keep=…)``)."""

from __future__ import annotations

import logging
from typing import Any

from levada.actors.journal import TrimRows
from levada.framework import Ref
from levada.framework.errors import LevadaError

from .settings import ShardSettings, kept_from

__all__ = ["FIRST_WAIT", "trim"]

logger = logging.getLogger("levada.actors.durable")

FIRST_WAIT = 10.0
"""Seconds from the opening of a shard to the first time: a program that restarts often trims too."""
LEAST_WAIT, MOST_WAIT = 60.0, 86_400.0
"""Seconds between two times; in between, an eighth of what is kept. Each time the log reads all its rows."""
LEAST_WAIT_ARCHIVED = 3600.0
"""The same with an archive, which gets a file each time."""
TIMEOUT = 3600.0
"""Seconds after which the log counts as out of reach."""


async def trim(journal: Ref[Any], shard: int, path: str, settings: ShardSettings) -> float:
    """Trim the log of a shard; return the seconds to the next time. If the log refuses or is out of reach, that is logged."""
    assert settings.terms.keep is not None
    older = kept_from(settings.clock(), settings.terms.keep)
    try:
        remember = settings.terms.limits.remember
        question = TrimRows(shard, older, remember, settings.snapshots.layout, settings.terms.archive)
        done = await journal.ask(question, timeout=TIMEOUT)
    except (LevadaError, OSError) as error:
        logger.warning("%s is not trimmed: %s", path, error, extra={"event": "not_trimmed"})
    else:
        if done.rows:
            logger.info("%s: %d old rows were trimmed", path, done.rows, extra={"event": "trimmed"})
    return min(max(settings.terms.keep / 8, LEAST_WAIT_ARCHIVED if settings.terms.archive else LEAST_WAIT), MOST_WAIT)
