"""`Peer`: the handle through which a program calls the other side of a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack, overload

import attrs
import trio

from levada.framework import Codec, Identity, Reason
from levada.framework.durations import is_duration
from levada.framework.errors import DecodeError
from levada.framework.tracing import Tracing
from levada.transports.carriers import CarrierInfo, CarrierStatistics
from levada.transports.maop import (
    Completed,
    ErrorCode,
    ResponseStarted,
    ResponseTerms,
    TestPlan,
    check_test,
)

from .bodies import MESSAGE_TYPE, Body, BodySource, make_source, quick_source
from .config import RetryPolicy
from .errors import MaopError, OperationFailed
from .handlers import Reply
from .metrics import Metrics
from .operations import Begin, OwnOperation
from .tracing import field_of

if TYPE_CHECKING:
    from .connection import MaopDriver

__all__ = ["ConnectionStatistics", "Done", "Peer", "ReplyStream"]

T = TypeVar("T")

DEFAULT_TIMEOUT = 5.0
"""Seconds. Source: MA-68."""
MAX_RESPONSE = 8 * 2**20
"""The largest Response in bytes that is returned as a whole, unless the caller chooses another limit."""


class OperationOptions(TypedDict, total=False):
    """Further arguments of `Peer.request`, for type checkers."""

    timeout: float | None
    priority: int
    length: int | None
    response_id: int
    success_layout: bool | None
    max_response: int | None
    idempotency: bytes | None
    retry: RetryPolicy | None


@attrs.frozen
class Done:
    """When the peer executed a Message and how long it took, by the peer's clock."""

    started: float
    """UNIX time in seconds."""
    took: float
    """Seconds."""


@attrs.frozen(kw_only=True)
class ConnectionStatistics:
    """Counters of one connection; plain numbers, a snapshot."""

    operations: int
    """Operations of either side that have not ended."""
    opened: int
    """Operations that this side has begun so far."""
    received: int
    """Operations that the peer has begun so far."""
    done: int
    """Operations of the peer that succeeded."""
    refused: dict[int, int]
    """Operations of the peer that were refused, by code."""
    failed: dict[int, int]
    """Fails sent, received and detected here, by code."""
    waiting_for_streams: int
    """Callers that wait for the peer to allow a stream."""
    pending_approvals: int
    """Operations of the peer that await a decision."""
    handlers: int
    """Operations of the peer that a handler knows."""
    block_bytes: int
    """Bytes received on data streams."""
    control_backlog: int
    """Signals that wait on the fullest control stream."""
    late_signals: int
    """Signals for operations that were over or unknown."""
    streams: int
    """Streams of the carrier in use."""
    turns: int
    """Times that input and output were collected."""
    carrier: CarrierStatistics | None
    """Counters of the carrier; ``None`` if it keeps none."""


class Peer:
    """The other side of a connection. `connect` yields one, `Listener.peers` lists a server's, and each `Call` has its own.

    All methods raise `OperationRefused` if the peer does not let the operation begin, and `OperationFailed` if it fails, with the subclasses
    `OperationTimeout`, `OperationLost` and `OperationStopped`. They raise `ConnectionClosed` or `ConnectionLost` if the connection was already
    over, and `ConfigurationError`, `TypeError` or `ValueError` if the arguments cannot be sent. Cancelling a call
    cancels the operation at the peer, which may have executed it in part. Source: MA-61, MA-115.
    """

    def __init__(self, connection: MaopDriver) -> None:
        self._connection = connection

    @property
    def identity(self) -> Identity | None:
        """The identity that `authenticate` returned for this client; None on a client's side."""
        return self._connection.identity

    @property
    def codec(self) -> Codec:
        """Reads and writes message classes."""
        return self._connection.config.codec

    @property
    def info(self) -> CarrierInfo:
        """The carrier's facts about the other end."""
        info = self._connection.info
        assert info is not None
        return info

    @property
    def session_id(self) -> bytes:
        """16 bytes, for correlation. Source: MA-22."""
        return self._connection.core.session_id

    @property
    def identifier(self) -> str:
        """The server's name for the client, on both sides. Source: MA-22."""
        return self._connection.core.identifier

    @property
    def pairs(self) -> dict[str, str]:
        """Metadata that the client gave; empty on its own side. Source: MA-19."""
        peer = self._connection.core.peer
        return dict(getattr(peer, "pairs", {}))

    @property
    def vendor(self) -> str:
        """The name of the other side's program."""
        peer = self._connection.core.peer
        return "" if peer is None else peer.vendor

    @property
    def version(self) -> tuple[int, int, int]:
        """The effective version. Source: MA-34."""
        return self._connection.core.version

    @property
    def takes_idempotency(self) -> bool:
        """Whether the peer accepts idempotency keys. Source: MA-122."""
        return self._connection.core.idempotency

    @property
    def metrics(self) -> Metrics:
        """The metrics of this client; on a server's side, the listener's."""
        return self._connection.shared.metrics

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._connection.end is not None

    async def message(
        self,
        msg_id: int,
        body: Body = b"",
        *,
        priority: int = 128,
        length: int | None = None,
        timeout: float | None = None,
        idempotency: bytes | None = None,
        retry: RetryPolicy | None = None,
    ) -> Done:
        """Send a Message and wait until the peer has executed it.

        Args:
            msg_id: selects the peer's handler.
            body: bytes, a `pathlib.Path`, an async iterator of bytes, or a message. A buffer that changes meanwhile is sent with the changes.
            priority: 0 (first) to 255. Source: MA-116.
            length: how many bytes an iterator will yield; ``None`` for undefined length, which not every handler accepts.
            timeout: seconds from the complete body to the end; ``None``: no limit.
            idempotency: key of 16 bytes: the peer executes the operation once, however often it is sent. Source: MA-122.
            retry: when to send it again; an iterator that was begun is not repeated. Source: MA-120.
        """
        _milliseconds(timeout)
        source = await make_source(body, self.codec, length)
        calling = self._calling("message", msg_id)
        begin = partial(
            self._connection.core.send_message,
            msg_id,
            source.whole,
            length=source.length,
            priority=priority,
            key=idempotency or b"",
            trace=b"" if calling is None else calling.field,
            timeout=timeout,
        )
        perform = partial(self._perform, begin, source, priority, request=False)
        if retry is not None:
            perform = partial(self._repeat, perform, source, retry, keyed=bool(idempotency))
        done = await (perform() if calling is None else calling.call(perform))
        return Done(done.exec_start_ms / 1000, done.exec_time_ms / 1000)

    @overload
    async def request(
        self, msg_id: int, body: Body = b"", *, response: type[bytes] = bytes, **options: Unpack[OperationOptions]
    ) -> bytes: ...
    @overload
    async def request(
        self, msg_id: int, body: Body = b"", *, response: type[T], **options: Unpack[OperationOptions]
    ) -> T: ...
    async def request(
        self,
        msg_id: int,
        body: Body = b"",
        *,
        response: Any = bytes,
        timeout: float | None = DEFAULT_TIMEOUT,
        priority: int = 128,
        length: int | None = None,
        response_id: int = 0,
        success_layout: bool | None = None,
        max_response: int | None = MAX_RESPONSE,
        idempotency: bytes | None = None,
        retry: RetryPolicy | None = None,
    ) -> Any:
        """Send a Request and wait for the whole Response. Other arguments are as for `message`.

        Args:
            response: the type to return: ``bytes``; `Reply`, for bytes with their content type; or a message class.
            timeout: seconds from the complete body to the beginning of the Response; the peer is told. ``None``: no limit.
            response_id: the kind of Response to ask for; 0 is Success.
            success_layout: whether another kind has the header of Success, by agreement. Source: MA-99a.
            max_response: the most bytes that it may have; a longer one fails with CONTENT_TOO_LARGE. ``None``: no limit.

        Raises:
            OperationFailed: also with RESPONSE_MISMATCH (18) or RESPONSE_CONSUME (19), if the Response does not decode; the peer is told.
        """
        codec = self._connection.config.codec
        source = (
            quick_source(body, codec)
            if type(body) is bytes and length is None
            else await make_source(body, codec, length)
        )
        terms = _terms(
            response_id, success_layout, timeout, False, response is bytes or response is Reply, max_response
        )
        calling = self._calling("request", msg_id)
        begin = self._sending(msg_id, source, terms, priority, idempotency, calling)
        if retry is None and calling is None:
            done = await self._perform(begin, source, priority, request=True)
        else:
            perform = partial(self._perform, begin, source, priority, request=True)
            if retry is not None:
                perform = partial(self._repeat, perform, source, retry, keyed=bool(idempotency))
            done = await (perform() if calling is None else calling.call(perform))
        body = done.body or b""
        if response is bytes:
            return body
        if response is Reply:
            return Reply(body, done.content_type)
        return self._decode(done, body, response, response_id)

    def _decode(self, done: Completed, body: bytes, response: Any, response_id: int) -> Any:
        """Decode a Response, and tell the peer whether that worked. Source: MA-71."""
        connection = self._connection
        if response_id == 0 and done.content_type != MESSAGE_TYPE:
            raise self._reject(done, ErrorCode.RESPONSE_MISMATCH, f"wanted {MESSAGE_TYPE}, got {done.content_type}")
        try:
            value = self.codec.decode(body, response)
        except DecodeError as error:
            raise self._reject(done, ErrorCode.RESPONSE_CONSUME, str(error)) from error
        if connection.end is None:
            connection.core.consumed(done.stream_id, now=trio.current_time())
            connection.flush_soon()
        return value

    def _reject(self, done: Completed, code: int, reason: str) -> OperationFailed:
        connection = self._connection
        if connection.end is None:
            connection.core.reject(done.stream_id, code, reason, now=trio.current_time())
            connection.flush_soon()
        return OperationFailed(reason, code=code)

    @asynccontextmanager
    async def open_request(
        self,
        msg_id: int,
        body: Body = b"",
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        priority: int = 128,
        length: int | None = None,
        response_id: int = 0,
        success_layout: bool | None = None,
        max_response: int | None = None,
        idempotency: bytes | None = None,
    ) -> AsyncIterator[ReplyStream]:
        """Send a Request and take the Response piece by piece: entering means that it has begun, leaving early cancels it.

        The peer may send ``GateConfig.stream_window`` bytes ahead. If that window is full and the caller takes nothing for
        ``TimesConfig.response_transfer_timeout`` seconds, the operation fails with TIMEOUT. Arguments are as for `request`.
        """
        source = await make_source(body, self.codec, length)
        terms = _terms(response_id, success_layout, timeout, True, True, max_response)
        calling = self._calling("request", msg_id)
        begin = self._sending(msg_id, source, terms, priority, idempotency, calling)
        with nullcontext() if calling is None else calling.span:
            connection = self._connection
            queue = connection.credit[True]
            await trio.lowlevel.checkpoint_if_cancelled()
            operation = queue.begin(connection, begin) or await queue.wait(connection, begin, priority)
            try:
                await operation.upload(source)
                while operation.head is None and operation.outcome is None:
                    await operation.news()
                if operation.head is None:
                    operation.result()
                reply = ReplyStream(operation, operation.head)
                try:
                    yield reply
                finally:
                    reply._operation = None
            finally:
                operation.leave()

    async def test(
        self, plan: TestPlan | None = None, *, timeout: float | None = DEFAULT_TIMEOUT, priority: int = 128
    ) -> str | None:
        """Run a native Test; return ``None`` if the answer is right, otherwise the differences. Source: MA-100 to MA-110."""
        plan = plan or TestPlan(mode=0)
        source = quick_source(plan.encode(), self.codec)
        terms = _terms(0, None, timeout, False, True, None)
        begin = self._sending(1, source, terms, priority, None, None)
        return check_test(plan, await self._perform(begin, source, priority, request=True))

    def _sending(
        self,
        msg_id: int,
        source: BodySource,
        terms: ResponseTerms,
        priority: int,
        key: bytes | None,
        calling: _Calling | None,
    ) -> Begin:
        """Return the call that begins a Request; a `partial` with these keywords would take 0.15 µs longer."""
        core, whole, length = self._connection.core, source.whole, source.length
        key, trace = key or b"", b"" if calling is None else calling.field
        return lambda now: core.send_request(
            msg_id, whole, response=terms, length=length, priority=priority, key=key, trace=trace, now=now
        )

    def _calling(self, kind: str, msg_id: int) -> _Calling | None:
        """Begin the span of an operation of this side, in a traced system."""
        connection = self._connection
        tracing = connection.shared.tracing
        return None if tracing is None else _Calling(tracing, f"{kind} {msg_id}", str(connection.remote))

    async def _perform(self, begin: Begin, source: BodySource, priority: int, *, request: bool) -> Completed:
        connection = self._connection
        queue = connection.credit[request]
        await trio.lowlevel.checkpoint_if_cancelled()
        operation = queue.begin(connection, begin) or await queue.wait(connection, begin, priority)
        since = connection.core.now
        try:
            if source.whole is None:
                await operation.upload(source)
            while operation.outcome is None:
                await operation.news()
            done = operation.result()
        except MaopError as error:
            if request and error.code is not None:
                connection.shared.metrics.response_fail[error.code] += 1
            raise
        finally:
            operation.leave()
        if request:
            metrics = connection.shared.metrics
            metrics.request_latency_ms.observe(1000 * (connection.core.now - since))
            metrics.rpc_payload_bytes.observe(len(done.body or b""))
        return done

    async def _repeat(
        self, perform: Callable[[], Awaitable[Completed]], source: BodySource, retry: RetryPolicy, *, keyed: bool
    ) -> Completed:
        """Perform an operation, and repeat it if the policy says so. Source: MA-120."""
        for attempt in range(1, retry.attempts):
            try:
                return await perform()
            except MaopError as error:
                if not (source.repeatable and retry.allows(error, keyed=keyed)) or self.closed:
                    raise
                await trio.sleep(retry.delay(attempt, error, self._connection.system.random))
        return await perform()

    def statistics(self) -> ConnectionStatistics:
        """Return a snapshot of the counters."""
        connection = self._connection
        core = connection.core
        statistic = core.statistic
        return ConnectionStatistics(
            operations=core.operations,
            opened=statistic.opened,
            received=statistic.received,
            done=statistic.done,
            refused=dict(statistic.refused),
            failed=dict(statistic.failed),
            waiting_for_streams=sum(map(len, connection.credit.values())),
            pending_approvals=core.gate.pending,
            handlers=len(connection.executions),
            block_bytes=statistic.block_bytes,
            control_backlog=core.pool.backlog,
            late_signals=core.signals.late,
            streams=connection.stream_count,
            turns=connection.turns,
            carrier=connection.carrier_statistics(),
        )

    async def aclose(self, reason: str = "") -> None:
        """Stop new operations of both sides, let running ones end within `TimesConfig.drain_timeout` seconds, then disconnect.

        Operations left after that fail with CANCELLED and the reason ``SHUTDOWN``. A second call does no harm. Source: MA-89 to MA-93.

        Args:
            reason: for the peer's log.

        Cancellation:
            the connection closes at once.
        """
        await self._connection.aclose(reason)

    def abort(self) -> None:
        """Close at once: operations end on both sides."""
        self._connection.shut()

    async def terminated(self) -> Reason:
        """Wait for the end of the connection and return the reason.

        Returns:
            `Normal` if this side closed it in order, `Lost` if the peer or the network ended it.

        Cancellation:
            only the waiting ends.
        """
        return await self._connection.ref.terminated()


class ReplyStream:
    """A Response that arrives piece by piece; `Peer.open_request` yields it. Iterate over it once."""

    def __init__(self, operation: OwnOperation, head: ResponseStarted | None) -> None:
        assert head is not None
        self._operation: OwnOperation | None = operation
        self._head = head

    @property
    def content_type(self) -> str | None:
        """Content type of a Success; ``None`` for other kinds, and without a body."""
        return self._head.content_type

    @property
    def length(self) -> int | None:
        """The announced length in bytes, native header included; ``None`` for undefined length."""
        return self._head.length

    @property
    def took(self) -> float:
        """Seconds that the peer worked before it began to answer."""
        return self._head.exec_time_ms / 1000

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | memoryview:
        operation = self._operation
        if operation is None:
            raise OperationFailed("the block of open_request has been left", code=ErrorCode.CANCELLED)
        while not operation.chunks:
            if operation.outcome is not None:
                operation.result()
                raise StopAsyncIteration
            await operation.news()
        chunk = operation.chunks.popleft()
        operation.taken(len(chunk))
        return chunk


@lru_cache(typed=True)
def _terms(
    response_id: int,
    success_layout: bool | None,
    timeout: float | None,
    streamed: bool,
    acknowledge: bool,
    max_response: int | None,
) -> ResponseTerms:
    """Return what a Request wants of its Response. Most Requests want the same: to make the terms takes 0.9 µs, to find them 0.2."""
    return ResponseTerms(
        msg_id=response_id,
        success_layout=success_layout,
        timeout_ms=_milliseconds(timeout),
        streamed=streamed,
        acknowledge=acknowledge,
        max_size=max_response,
    )


def _milliseconds(timeout: float | None) -> int:
    """Return a timeout in wire format, 0 for none."""
    if timeout is None:
        return 0
    # A float, as nearly always, is compared here: each request comes by.
    if not (timeout > 0 if type(timeout) is float else is_duration(timeout)):
        raise ValueError(f"timeout is {timeout!r}, wanted more than 0 seconds, or None for no limit")
    return max(1, round(timeout * 1000))


class _Calling:
    """The span of an operation of this side, and its trace field."""

    def __init__(self, tracing: Tracing, method: str, peer: str) -> None:
        self.span = tracing.request("maop", method, peer)
        self.field = field_of(tracing, self.span)

    async def call(self, perform: Callable[[], Awaitable[Completed]]) -> Completed:
        with self.span:
            return await perform()
