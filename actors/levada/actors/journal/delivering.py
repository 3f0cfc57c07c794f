"""Batches of Spark on their way into a journal: staged rows, and the delivery of a batch. Both run in the thread that writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pyarrow as pa

from .errors import JournalError
from .ledger import Delivered
from .questions import Deliver, StageRows
from .staging import Stage
from .store import Store

__all__ = ["deliver", "stage_rows"]

logger = logging.getLogger("levada.actors.journal")


def stage_rows(store: Store, m: StageRows, batch: pa.RecordBatch) -> int:
    """Answer `StageRows`, whose rows are this batch."""
    stage = store.staged(m.query, m.batch).get((m.part, m.attempt))
    there = stage.rows if stage is not None else 0
    at = there if m.at is None else m.at
    end: int = at + batch.num_rows
    if there == at:
        (stage or store.stage(m.query, m.batch, m.part, m.attempt)).append(batch)
    elif there < end:
        raise JournalError(
            f"{there} rows of part {m.part} of batch {m.batch} of {m.query} are staged, where rows {at} to {end} were to come",
            path=str(store.directory),
        )
    return end  # of rows that were sent again, too


def deliver(store: Store, m: Deliver) -> Delivered:
    """Answer `Deliver`."""
    stages = store.staged(m.query, m.batch)
    if store.delivered(m.query, m.batch) is None:
        _require_staged(store, m, stages)
    partitions = store.config.partitions
    done = store.deliver(
        m.query,
        m.batch,
        (
            (part % partitions, message)
            for part, attempt in sorted(m.winners.items())
            for message in stages[part, attempt].messages()
        ),
    )
    try:
        store.unstage(m.query, m.batch)
    except JournalError as error:
        # It is delivered all the same. The next opening deletes what is left.
        logger.warning(
            "%s; it has been delivered, and its staged rows stay for now", error, extra={"event": "not_unstaged"}
        )
    return done


def _require_staged(store: Store, m: Deliver, stages: Mapping[tuple[int, int], Stage]) -> None:
    for part, attempt in m.winners.items():
        stage = stages.get((part, attempt))
        there = stage.rows if stage is not None else 0
        if stage is None or there != m.rows.get(part, there):
            wanted = f"{m.rows[part]} " if part in m.rows else ""
            raise JournalError(
                f"batch {m.batch} of {m.query}: the {wanted}rows of part {part} are not staged, there are {there}: they were given up "
                "meanwhile, or lost by a power failure",
                path=str(store.directory),
            )
