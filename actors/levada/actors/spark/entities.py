"""`EachCommand`: turns rows of Spark's tasks into commands of durable actors, each done once however often Spark repeats the task.

Example::

    deposits = system.spawn(EachCommand, accounts, Deposit)
    bridge.expose("deposits", deposits)

A job then asks it with `levada.actors.spark.asks.ask_batches`.
"""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import trio

from levada.actors.journal.columns import Columns, columns_of
from levada.actors.journal.errors import SchemaMismatch
from levada.framework import Actor, Asks, handles
from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.message import field_types, reply_type
from levada.framework.text import error_text

from .asks import AskRows
from .protocol import ActorFailed

if TYPE_CHECKING:
    from levada.actors.durable import Shards

__all__ = ["EachCommand"]

UNDER_WAY = 256
"""The most entities of a batch that are asked at the same time, so that their events share appends."""
_PLAIN = {
    bool: pa.bool_(),
    bytes: pa.binary(),
    float: pa.float64(),
    int: pa.int64(),
    str: pa.string(),
    NoneType: pa.null(),
}


class EachCommand(Actor[AskRows]):
    """Turns the rows of a Spark task into commands with ids, asks the entities, and makes a batch of the answers.

    A row has the column ``entity`` with the entity's id, the column ``command`` with the id of the command, both text, and the fields of the
    message. An entity gets its commands in the order of the rows. If a command fails, the batch fails with `ActorFailed`; other commands of the
    batch may be done. Spark then repeats the task, and commands that are done get their first answers. An entity remembers only its newest
    ids, so ``shards(remember=…)`` must be at least the number of commands that a job may send to one entity.

    Args:
        entities: the durable actors, which may be on nodes.
        question: a message class of ``Asks[R]``. If R is a message class, its fields are the columns of the answer. If it is a number, text,
            bytes or None, the answer is in the column ``answer``.

    Raises:
        ConfigurationError: the fields of `question` or its answer cannot be columns.
    """

    entities: Shards[Any]
    question: type[Asks[Any]]

    def __attrs_post_init__(self) -> None:
        answer = reply_type(self.question)
        self._answers: Columns[Any] | None = None
        try:
            self._fields = columns_of(self.question) if field_types(self.question) else None
            if answer not in _PLAIN:
                self._answers = columns_of(answer)
        except TypeError as error:
            raise ConfigurationError(
                f"{self.question.__qualname__} and its answer, {answer!r}, must fit columns: {error}"
            ) from error
        self._plain = _PLAIN.get(answer)

    @handles
    async def take(self, m: AskRows) -> None:
        """Ask the entities; the answer is a batch."""
        reply = self.reply_later()
        try:
            batch = _Batch(self.entities, m.rows, self._questions(m.rows))
            await batch.run()
            if batch.failure is not None:
                raise batch.failure
            if self._answers is not None:
                reply.send(self._answers.encode(batch.answers))
            else:
                reply.send(pa.record_batch({"answer": pa.array(batch.answers, self._plain)}))
        except LevadaError as error:
            reply.fail(error)

    def _questions(self, rows: pa.RecordBatch) -> list[Any]:
        if self._fields is None:
            return [self.question() for _ in range(rows.num_rows)]
        return self._fields.decode(
            rows.select([name for name in rows.schema.names if name not in ("entity", "command")])
        )


class _Batch:
    """The commands of one batch."""

    def __init__(self, entities: Shards[Any], rows: pa.RecordBatch, questions: list[Any]) -> None:
        self._entities = entities
        self._questions = questions
        self._ids = _texts(rows, "command")
        self.answers: list[Any] = [None] * rows.num_rows
        self.failure: ActorFailed | None = None
        by_entity: dict[str, list[int]] = {}
        for row, entity in enumerate(_texts(rows, "entity")):
            by_entity.setdefault(entity, []).append(row)
        self._left = iter(by_entity.items())
        self._count = len(by_entity)

    async def run(self) -> None:
        """Ask all, until one fails."""
        async with trio.open_nursery() as nursery:
            for _ in range(min(self._count, UNDER_WAY)):
                nursery.start_soon(self._ask, nursery.cancel_scope)

    async def _ask(self, scope: trio.CancelScope) -> None:
        for entity, rows in self._left:
            for row in rows:
                try:
                    answer = await self._entities[entity].ask(
                        self._questions[row], command=self._ids[row], timeout=None
                    )
                except LevadaError as error:
                    why = error if error.__cause__ is None else error.__cause__
                    self.failure = ActorFailed(
                        f"row {row}: entity {entity!r:.100}: {error_text(why)}", self._entities.ref.path
                    )
                    scope.cancel()
                    return
                self.answers[row] = answer


def _texts(rows: pa.RecordBatch, name: str) -> list[str]:
    place = rows.schema.get_field_index(name)
    column = rows.column(place) if place >= 0 else None
    if (
        column is None
        or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type))
        or column.null_count
    ):
        found = "missing" if column is None else f"{column.type} with {column.null_count} nulls"
        line = f"{name}: {found}, wanted text without nulls"
        raise SchemaMismatch(f"rows of commands have the columns entity and command: {line}", differences=(line,))
    texts: list[str] = column.to_pylist()
    return texts
