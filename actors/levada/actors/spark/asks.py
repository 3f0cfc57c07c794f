"""Questions from Spark's executors to actors: `ask`, `ask_many`, `ask_batches`; and `EachRow` for actors that take single rows.

Example:
    >>> from levada.actors.spark.asks import RemoteActor, ask_batches
    >>> scores = RemoteActor("scores", bridge.address)  # doctest: +SKIP
    >>> def scored(batches):
    ...     return ask_batches(scores, batches, window=8)
    >>> df.mapInArrow(scored, "score double")  # doctest: +SKIP

On the actors' side: ``bridge.expose("scores", ref)``. The actor handles `AskRows`, whole batches, or is an `EachRow` in front of an actor that
handles single messages.

Note:
* **One at a time is slow**: a question and its answer cross two processes, so rows in a loop of `ask` take about 60 times as long as the same
  rows in batches. `ask_many` keeps questions under way, `ask_batches` sends a batch as one.
* **Spark repeats functions**: after a failed task, a lost stage, a speculative copy, or a restart in the middle of a micro-batch.
  So a function of a data frame asks at least once, even without retries here, and handlers must be idempotent.
  If rows carry a key, a handler can recognise a repetition. For results that must count once, write to a mailbox.
* **Lost connections**: calls wait until the deadline for a bridge that is away. A question that was under way may have been handled, so it is
  repeated only with ``idempotent=True``. `AskRows.request` is the same for all attempts.
* **Deadlines**: the time of a question starts with its first attempt. At the deadline it is withdrawn, unless its handler has begun.
* An exception that leaves the function fails Spark's task. Exceptions raised here are plain values and name the actor.

This works in any process that has this package, without an event loop; in the bridge's own process only from threads.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import attrs
import pyarrow as pa
import trio

from levada.actors.journal.columns import columns_of
from levada.actors.journal.ipc import stream_of
from levada.actors.rsocket import RequestFailed, RequestRejected
from levada.actors.rsocket.blocking import BlockingPeer, PendingAnswer, RequestTimeout
from levada.framework import Actor, Asks, Ref, handles
from levada.framework.durations import is_duration
from levada.framework.errors import (
    ActorStopped,
    AskTimeout,
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    LevadaError,
)
from levada.framework.message import reply_type
from levada.framework.text import error_text
from levada.framework.tracing import TraceHeaders
from levada.transports.rsocket import Payload
from levada.transports.rsocket.extensions import Entry, ZipkinTracing

from .protocol import REQUEST_ID, ActorFailed, BridgeUnreachable, raised
from .tracing import current_trace
from .worker import addresses, connection, traced

__all__ = ["AskRows", "EachRow", "RemoteActor", "ask", "ask_batches", "ask_many"]

R = TypeVar("R")

logger = logging.getLogger("levada.actors.spark")

TIMEOUT = 30.0
"""Default seconds for an answer."""
MANY, BATCHES = 256, 8
"""Default number of questions under way, single questions and batches."""
MAX_BYTES = 60 << 20
"""Largest batch in bytes: a peer reassembles 64 MiB at most."""
PAUSES = 0.05, 1.0
"""The first and the longest pause in seconds between attempts after a lost connection; each pause doubles the one before."""
HINT_AFTER = 200
"""The number of single questions of a process after which a warning names the faster functions."""
ROWS_A_TURN = 64
"""Rows after which `EachRow` lets other tasks run: about 0.5 ms."""


@attrs.frozen
class AskRows(Asks[pa.RecordBatch]):
    """Rows of a Spark task. The answer is a record batch of as many rows, in the same order."""

    rows: pa.RecordBatch
    request: str = ""
    """The id of this question, the same for each attempt; empty if there is only one."""


@attrs.frozen
class RemoteActor:
    """An actor, as executors see it. It is plain data, for the closure of a function that Spark ships."""

    name: str
    """The name given to `Bridge.expose`."""
    address: str
    """`Bridge.address`; or those of several nodes, separated by semicolons. A ``*`` in the name of a Unix socket stands for all sockets there.

    Each question goes to the node that has the fewest questions of its task under way; if it cannot be reached, to another one.
    """
    token_file: str | None = None
    """Path of the token file, or its name if it is shipped with the job (``spark-submit --files``). None: beside the bridge's Unix socket."""
    trace: TraceHeaders | None = attrs.field(factory=current_trace, kw_only=True)
    """The trace of the questions, for a traced bridge, if the asking code has no span of its own. The default is the context of the code that
    makes this object."""


def ask(actor: RemoteActor, value: Asks[R], *, timeout: float = TIMEOUT, idempotent: bool = False) -> R:
    """Ask one question and wait for its answer. For more than a few: `ask_many`, `ask_batches`.

    Args:
        actor: the actor to ask.
        value: an instance of a message class that derives from ``Asks[R]``, defined in a module that executors have.
        timeout: seconds for the whole call.
        idempotent: whether the question may be repeated after a lost connection.

    Raises:
        ActorStopped: the actor has ended, before or while the question waited in its mailbox.
        ActorFailed: the actor failed on this question, or before it answered it later (`Actor.reply_later`).
        AskTimeout: no answer in time.
        ConnectionLost: the bridge cannot be reached; or, without `idempotent`, it was lost and the question may have been handled.
        UnknownName: the bridge has no actor of this name.
        BridgeRefused, BridgeUnreachable, ConfigurationError: see `levada.actors.spark.worker.connection`.
    """
    if next(_asked) == HINT_AFTER:
        logger.warning(
            "%s questions to actors one at a time, the last one to %s: ask_many() or, from mapInArrow, ask_batches() are many times faster",
            HINT_AFTER,
            actor.name,
            extra={"event": "asks_one_at_a_time"},
        )
    asking = _Asking(actor, _Single(actor), timeout, idempotent=idempotent)
    asking.send(value)
    try:
        return cast("R", asking.take())
    finally:
        asking.close()


_asked = itertools.count(1)
_turns = itertools.count(os.getpid())


def ask_many(
    actor: RemoteActor,
    values: Iterable[Asks[R]],
    *,
    window: int = MANY,
    timeout: float = TIMEOUT,
    idempotent: bool = False,
) -> Iterator[R]:
    """Yield the answers to many questions in order, with at most `window` questions under way. Other arguments are as for `ask`.

    Questions are taken from `values` only as fast as the caller takes answers. `timeout` applies to each question, from its sending. Closing
    the iterator withdraws the questions under way. An error, as of `ask`, is raised in place of its answer and ends the iterator.
    """
    return _windowed(_Asking(actor, _Single(actor), timeout, idempotent=idempotent), values, window)


def ask_batches(
    actor: RemoteActor,
    batches: Iterable[pa.RecordBatch],
    *,
    window: int = BATCHES,
    timeout: float = TIMEOUT,
    idempotent: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the answer to each record batch, in order: a batch of as many rows. For ``mapInArrow`` and Arrow functions; otherwise as `ask_many`.

    The actor handles `AskRows`, itself or through an `EachRow`. With pandas: ``pa.RecordBatch.from_pandas(frame)`` for the question,
    ``batch.to_pandas()`` for the answer.

    Raises:
        ActorFailed: also if the answer is not a batch, or has another number of rows.
        ConfigurationError: also if a batch is larger than `MAX_BYTES`.
    """
    return _windowed(_Asking(actor, _Batch(actor), timeout, idempotent=idempotent), batches, window)


def _windowed(asking: _Asking, values: Iterable[Any], window: int) -> Iterator[Any]:
    if window < 1:
        raise ConfigurationError(f"window is {window!r}, wanted 1 or more")
    return _answers(asking, values, window)


def _answers(asking: _Asking, values: Iterable[Any], window: int) -> Iterator[Any]:
    try:
        for value in values:
            if len(asking.waiting) >= window:
                yield asking.take()
            asking.send(value)
        while asking.waiting:
            yield asking.take()
    finally:
        asking.close()


@attrs.define(eq=False)
class _Question:
    """A question under way."""

    value: Any
    request: str
    until: float
    pending: PendingAnswer | None = None
    address: str = ""
    """The address of the node that was asked."""

    @property
    def left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    @property
    def lost(self) -> bool:
        if self.pending is None:
            return True
        future = self.pending.future
        return future.done() and isinstance(future.exception(), _LOST)


_LOST = ConnectionLost, ConnectionClosed, RequestRejected
"""After these errors an idempotent question may be repeated; after the last of them any question, because it was not handled."""


class _Asking:
    """Questions to one actor, answered in order."""

    def __init__(self, actor: RemoteActor, kind: _Single | _Batch, timeout: float, *, idempotent: bool) -> None:
        if not is_duration(timeout):
            raise ConfigurationError(f"timeout is {timeout!r}, wanted more than 0 seconds")
        if trio.lowlevel.in_trio_run():
            raise ConfigurationError("ask(), ask_many() and ask_batches() block their thread: inside trio, use Ref.ask")
        self._actor = actor
        self._kind = kind
        self._timeout = timeout
        self._idempotent = idempotent
        self.waiting: deque[_Question] = deque()

    def send(self, value: Any) -> None:
        """Send a question. Waits for room and for a connection, until the question's deadline."""
        request = uuid.uuid4().hex if self._idempotent else ""
        question = _Question(value, request, time.monotonic() + self._timeout)
        self._start(question)
        self.waiting.append(question)

    def take(self) -> Any:
        """Wait for the answer to the oldest question."""
        while True:
            question = self.waiting[0]
            assert question.pending is not None
            try:
                answer = question.pending.result(question.left)
            except RequestTimeout:
                raise self._late() from None
            except _LOST as error:
                if isinstance(error, RequestRejected):
                    time.sleep(PAUSES[0])  # the bridge is busy or closing
                elif not self._idempotent:
                    raise ConnectionLost(
                        f"the bridge was lost while {self._actor.name} was asked, which may have handled the question "
                        f"(idempotent=True lets it be asked again): {error}"
                    ) from error
                # All lost questions are repeated at once: one at a time, each would take a round trip.
                for each in self.waiting:
                    if each.lost:
                        self._start(each)
            except RequestFailed as error:
                found = raised(error)
                raise found from (None if found is error else error)
            else:
                self.waiting.popleft()
                return self._kind.read(question.value, answer)

    def close(self) -> None:
        """Withdraw the questions under way."""
        for question in self.waiting:
            if question.pending is not None:
                question.pending.cancel()
        self.waiting.clear()

    def _start(self, question: _Question) -> None:
        pause, most = PAUSES
        question.pending = None
        while True:
            error: LevadaError = ConnectionLost(f"no node serves at {self._actor.address}")
            found = self._by_load()
            hopeless = bool(found)
            for question.address in found:
                try:
                    peer = connection(question.address, self._actor.token_file)
                    question.pending = self._kind.start(peer, question.value, self._metadata(question), question.left)
                    return
                except RequestTimeout:
                    raise self._late() from None
                except (ConnectionLost, ConnectionClosed) as lost:
                    error = lost  # nothing was sent, so every question may be repeated
                    hopeless = hopeless and isinstance(lost, BridgeUnreachable)
            if hopeless or question.left < pause:
                raise error
            time.sleep(pause)
            pause = min(2 * pause, most)

    def _metadata(self, question: _Question) -> list[Entry | ZipkinTracing] | None:
        entries: list[Entry | ZipkinTracing] = []
        if question.request:
            entries.append(Entry(REQUEST_ID, question.request.encode()))
        return [*entries, *traced(question.address, self._actor.token_file, self._actor.trace)] or None

    def _by_load(self) -> list[str]:
        """Return the addresses of the nodes, ordered by their number of questions under way; equal nodes take turns."""
        found = addresses(self._actor.address)
        if len(found) > 1:
            turn = next(_turns) % len(found)
            found = found[turn:] + found[:turn]
            under_way = Counter(each.address for each in self.waiting if each.pending is not None)
            found.sort(key=lambda address: under_way[address])
        return found

    def _late(self) -> AskTimeout:
        name = self._actor.name
        return AskTimeout(f"{name} did not answer within {self._timeout:g} s", actor=name, seconds=self._timeout)


class _Single:
    """Questions that are messages."""

    def __init__(self, actor: RemoteActor) -> None:
        self._route = f"ask/{actor.name}"

    def start(
        self, peer: BlockingPeer, question: Any, metadata: Sequence[Entry | ZipkinTracing] | None, timeout: float
    ) -> PendingAnswer:
        if not isinstance(question, Asks):
            raise TypeError(f"expected an instance of a message class of Asks[…], got {type(question).__name__}")
        return peer.start_request(question, route=self._route, metadata=metadata, timeout=timeout)

    def read(self, question: Any, answer: Any) -> Any:
        return answer


class _Batch:
    """Questions that are record batches, each sent with its schema as an Arrow stream of one batch."""

    def __init__(self, actor: RemoteActor) -> None:
        self._actor = actor
        self._route = f"ask/{actor.name}/batch"

    def start(
        self,
        peer: BlockingPeer,
        question: pa.RecordBatch,
        metadata: Sequence[Entry | ZipkinTracing] | None,
        timeout: float,
    ) -> PendingAnswer:
        data = stream_of(question)
        if len(data) > MAX_BYTES:
            raise ConfigurationError(
                f"a batch for {self._actor.name} of {len(data)} bytes, at most {MAX_BYTES} "
                "(lower spark.sql.execution.arrow.maxRecordsPerBatch)"
            )
        return peer.start_request(data, route=self._route, metadata=metadata, timeout=timeout)

    def read(self, question: pa.RecordBatch, answer: Payload) -> pa.RecordBatch:
        with pa.ipc.open_stream(answer.data) as stream:
            batch = stream.read_next_batch()
        if batch.num_rows != question.num_rows:
            raise ActorFailed(
                f"{self._actor.name} answered {question.num_rows} rows by {batch.num_rows} rows", self._actor.name
            )
        return batch


class EachRow(Actor[AskRows]):
    """Turns the rows of a Spark task into messages, asks an actor one after another, and makes a batch of the answers.

    If the actor fails on a row, the whole batch fails. Batches are processed one at a time; for a pool, spawn several `EachRow` and expose
    each by its own name.

    Args:
        target: the actor to ask.
        question: a message class of ``Asks[R]`` whose fields are the columns of the rows, by order and name. R is also a message class, whose
            fields are the columns of the answer.

    Raises:
        ConfigurationError: `question` or its answer is not a message class whose fields can be columns.
    """

    target: Ref[Any]
    question: type[Asks[Any]]

    def __attrs_post_init__(self) -> None:
        answer = reply_type(self.question)
        try:
            self._rows, self._answers = columns_of(self.question), columns_of(answer)
        except TypeError as error:
            raise ConfigurationError(
                f"{self.question.__qualname__} and its answer, {answer!r}, must be message classes: {error}"
            ) from error

    @handles
    async def take(self, m: AskRows) -> None:
        """Ask row by row; the answer is a batch."""
        reply, answers, row = self.reply_later(), [], 0
        try:
            for row, question in enumerate(self._rows.decode(m.rows)):
                if row % ROWS_A_TURN == 0:
                    await trio.lowlevel.checkpoint()
                    if not reply.wanted:
                        return
                answers.append(await self.target.ask(question, timeout=None))
            reply.send(self._answers.encode(answers))
        except ActorStopped as error:
            failure: LevadaError = error
            if error.__cause__ is not None:
                failure = ActorFailed(
                    f"row {row}: {self.target.path} failed: {error_text(error.__cause__)}", self.target.path
                )
            reply.fail(failure)
        except LevadaError as error:
            reply.fail(error)
