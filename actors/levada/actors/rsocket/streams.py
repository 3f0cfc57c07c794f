"""Actors of streams, which wait for answers or give them: children of their connection, each with one stream at a time.

* The connection applies events by direct calls (`received`, `credited`, `cancelled`, …): a turn of a mailbox would cost more than
  everything else. These methods are sync, run no user code, and raise nothing.
* The user's code runs in the handler `Answer.answer`. So its failure fails only that stream, and a CANCEL kills only that actor.
* An actor whose stream is over is *idle* until the connection needs one (`levada.actors.pool`), so no stream is ever replayed.
* A stream leaves the connection's table when it leaves the core: the core is told first, then `leave` is called.
* Payloads are flushed when the handler is about to wait, and every so many payloads, so that many frames share a write.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Coroutine, Generator
from functools import partial
from inspect import isawaitable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, cast

import attrs
from outcome import Error, Value
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    current_task,
    enable_ki_protection,
    reschedule,
    wait_task_rescheduled,
)

from levada.actors.driver import Phase
from levada.actors.pool import Pooled
from levada.framework import Reason, Receiver, TerminalState, handles
from levada.framework.embedding import ChannelCore
from levada.framework.errors import ActorStopped, ChannelError, DecodeError, LevadaError, LocalProtocolError
from levada.framework.text import text_of
from levada.transports.rsocket import ErrorCode, Payload
from levada.transports.rsocket.events import FailedBy, Interaction, RequestReceived, StreamFailed

from .errors import NEEDS_STREAM, RequestFailed, RequestInvalid, error_data, stream_failed
from .flows import PayloadChannel
from .requests import Request

if TYPE_CHECKING:
    from .connection import RSocketDriver

__all__ = [
    "BEGIN", "EMPTY", "SMALL", "Answer", "AwaitedResponse", "Begin", "Channel", "InteractionActor", "Items",
    "before_waiting", "close_source",
]  # fmt: skip

FLUSH_ITEMS, FLUSH_BYTES = 32, 65_536
"""Payloads, or bytes of them, after which a stream flushes even though it could go on."""

SMALL = 4096  # bytes of a payload that are not counted: counting takes time, and 4,096 streams with so many hold 16 MiB
EMPTY = Payload(b"")

# Members of an enum under names of this module: that takes a tenth of the time of an attribute lookup.
OPEN = Phase.OPEN
RESPONSE, CHANNEL = Interaction.REQUEST_RESPONSE, Interaction.REQUEST_CHANNEL


@types.coroutine
def before_waiting(coroutine: Coroutine[Any, Any, None], function: Callable[[], object]) -> Generator[Any, Any, None]:
    """Drive a coroutine, calling `function` each time before it waits."""
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    try:
        while True:
            trap = step(value)
            function()
            try:
                value = yield trap
                step = coroutine.send
            except BaseException as error:  # noqa: BLE001 - it is thrown on
                value, step = error, coroutine.throw
    except StopIteration:
        pass
    finally:
        value = None  # a cancellation, whose traceback keeps this frame alive


class Begin:
    """Tells an actor to begin with the stream that it has been given."""

    __slots__ = ()


BEGIN = Begin()


class InteractionActor(Pooled, ABC):
    """The base of all streams: a place in the connection's table, from `occupy` to `leave`."""

    connection: RSocketDriver
    stream_id: int = attrs.field(default=0, init=False)
    """The stream's id; 0 while the actor is idle."""
    busy: bool = attrs.field(default=False, init=False)
    """Whether a handler of this actor runs; then the handler does the rest when it ends."""

    def occupy(self, stream_id: int) -> None:
        """Take up a stream."""
        self.stream_id = stream_id
        self.connection.streams[stream_id] = self

    def leave(self) -> None:
        """Leave the table: the stream is over for this side."""
        stream_id = self.stream_id
        if stream_id:
            connection = self.connection
            if connection.streams.get(stream_id) is self:
                del connection.streams[stream_id]
            if connection.phase is not OPEN:
                connection.retime()  # a drained connection ends with its last stream
            self.stream_id = 0
            if not self.busy:
                connection.idle.put(self)

    # The connection calls these.

    @abstractmethod
    def received(self, payload: Payload, complete: bool) -> None:
        """Take a payload."""

    @abstractmethod
    def completed(self) -> None:
        """Record that the peer has sent everything."""

    @abstractmethod
    def failed(self, event: StreamFailed) -> None:
        """End the stream with an error of the peer or of the connection."""

    def credited(self) -> None:
        """Record that the peer takes more."""

    def cancelled(self) -> None:
        """End sending: the peer wants no more, or the connection is over."""

    @abstractmethod
    def give_up(self, reason: Reason) -> None:
        """End the stream, because this actor was stopped from outside."""

    def stopping(self, reason: Reason) -> None:
        """Give up the stream that is under way."""
        if self.stream_id:
            self.fit = False
            self.give_up(reason)
            self.connection.flush()
        self.connection.idle.forget(self)

    def undelivered(self, messages: list[Any]) -> None:
        """Drop the messages: the stream that they announced is over."""

    def stopped_by(self, reason: Reason) -> ActorStopped:
        """Return the error for callers that wait for this stream."""
        return ActorStopped(f"the actor of stream {self.stream_id} was ended", actor=self.ref.path, reason=reason)


class AwaitedResponse(InteractionActor):
    """Waits for the one answer of a request-response."""

    task: Task | None = attrs.field(default=None, init=False)
    """The task that waits."""

    def abort(self, _: RaiseCancelT) -> Abort:
        """Send a CANCEL, because the waiting task is cancelled."""
        self.task = None
        self._cancel()
        return Abort.SUCCEEDED

    def _cancel(self) -> None:
        self.connection.core.send_cancel(self.stream_id)
        self.leave()
        self.connection.flush()

    def _settle(self, result: Value[Payload] | Error) -> None:
        task, self.task = self.task, None
        self.leave()
        if task is not None:
            reschedule(task, result)

    def received(self, payload: Payload, complete: bool) -> None:
        """Give the answer to the waiting task."""
        task, self.task = self.task, None
        self.leave()
        if task is not None:
            reschedule(task, Value(payload))

    def completed(self) -> None:
        """Give the waiting task an empty answer."""
        self._settle(Value(EMPTY))

    def failed(self, event: StreamFailed) -> None:
        """Raise the error in the waiting task."""
        self._settle(Error(stream_failed(event)))

    def give_up(self, reason: Reason) -> None:
        """Send a CANCEL, and raise an error in the waiting task."""
        error = self.stopped_by(reason)
        task, self.task = self.task, None
        self._cancel()
        if task is not None:
            reschedule(task, Error(error))


class Items(InteractionActor):
    """Takes the payloads of a request-stream."""

    inbound: PayloadChannel | None = attrs.field(default=None, init=False)

    def begin(self, window: int, item_type: Any, convert: Callable[[Payload], Any] | None) -> Receiver[Any]:
        """Make the channel for the payloads; call it before `occupy`."""
        inbound = PayloadChannel(window, "answers", item_type, self._grant)
        if convert is not None:
            inbound.convert(convert)
        inbound.used = True
        self.inbound = inbound
        inbound.sender.on_terminated(lambda: self._closed(inbound))
        return Receiver(inbound)

    def leave(self) -> None:
        """Leave the table and the channel."""
        self.inbound = None
        super().leave()

    def _grant(self, inbound: PayloadChannel, n: int) -> None:
        # By now this actor may have another stream, while the receiver of the last one still takes its queued payloads.
        if self.inbound is inbound and self.stream_id:
            self.connection.core.send_request_n(self.stream_id, n)
            self.connection.flush()

    def _closed(self, inbound: PayloadChannel) -> None:
        if self.inbound is inbound and self.stream_id and inbound.sender.state is TerminalState.RECEIVER_CLOSED:
            self.connection.core.send_cancel(self.stream_id)
            self.leave()
            self.connection.flush()

    def received(self, payload: Payload, complete: bool) -> None:
        """Queue a payload for the receiver."""
        assert self.inbound is not None
        self.inbound.put(payload)
        if complete:
            self.completed()

    def completed(self) -> None:
        """End the receiver after the queued payloads."""
        inbound = self.inbound
        self.leave()
        if inbound is not None:
            inbound.finish_producer()

    def failed(self, event: StreamFailed) -> None:
        """Fail the receiver after the queued payloads."""
        self.end(stream_failed(event))

    def end(self, error: LevadaError) -> None:
        """End the user's channel with `error`."""
        inbound = self.inbound
        self.leave()
        if inbound is not None:
            inbound.fail(error)

    def give_up(self, reason: Reason) -> None:
        """Send a CANCEL, and fail the user's channel."""
        self.connection.core.send_cancel(self.stream_id)
        self.end(self.stopped_by(reason))


class _Producing(InteractionActor):
    """A stream that sends payloads as its credit and the carrier's room allow."""

    producer: Task | None = attrs.field(default=None, init=False)
    """The task that waits for credit."""

    def credited(self) -> None:
        """Wake the task that waits for credit."""
        self._wake()

    @enable_ki_protection
    def _wake(self) -> None:
        task, self.producer = self.producer, None
        if task is not None:
            reschedule(task)

    @enable_ki_protection
    async def _wait_for_credit(self) -> None:
        self.producer = current_task()

        def abort(_: RaiseCancelT) -> Abort:
            self.producer = None
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)

    async def send_items(self, source: AsyncIterable[Any], encode: Callable[[Any], Payload]) -> bool:
        """Send the items of `source`; return false if the stream was over before the source ended.

        Cancellation:
            items already sent stay sent; the source has been closed.
        """
        connection, stream_id = self.connection, self.stream_id
        core = connection.core
        credit = items = size = 0
        if connection.line.locked():
            await connection.turn()  # other tasks have been waiting for longer
        async for item in source:
            payload = encode(item)
            while credit < 1:
                if self.stream_id != stream_id:
                    return False
                credit = core.credit(stream_id)
                if credit < 1:
                    await self._wait_for_credit()
            size += len(payload.data)
            if items >= FLUSH_ITEMS or size >= FLUSH_BYTES:
                items = size = 0
                connection.flush()
                if connection.crowded or self.system.scheduler.slice_over():
                    await connection.turn()
            if core.backlog and connection.must_wait(payload, stream_id):
                connection.flush()
                await connection.cut_enough()
            if self.stream_id != stream_id:
                return False
            core.send_payload(stream_id, payload)
            if core.backlog:
                connection.cut_on()
            credit -= 1
            items += 1
        return self.stream_id == stream_id


class Channel(Items, _Producing):
    """A request-channel: takes payloads as a request-stream does, and sends the payloads that its user puts into a `Sender`."""

    outbound: ChannelCore | None = attrs.field(default=None, init=False)
    """The channel behind the user's sender; ``None`` once this direction is over."""
    encode: Callable[[Any], Payload] | None = attrs.field(default=None, init=False)

    def feed(self, outbound: ChannelCore, encode: Callable[[Any], Payload]) -> None:
        """Send the payloads of `outbound` as its receiver; call it after `occupy`."""
        self.outbound, self.encode, self.busy = outbound, encode, True
        self.ref.tell(BEGIN)

    @handles
    async def produce(self, m: Begin) -> None:
        """Send until the user's sender, or the stream, is over."""
        outbound, encode = self.outbound, self.encode
        self.encode = None
        try:
            if outbound is not None and encode is not None:
                source: Receiver[Any]
                with Receiver(outbound) as source:
                    await before_waiting(self._produce(source, encode), self.connection.flush_waiting)
        finally:
            self.busy = False
            self.connection.flush_soon()
        if not self.stream_id:
            self.connection.idle.put(self)

    async def _produce(self, source: Receiver[Any], encode: Callable[[Any], Payload]) -> None:
        core, stream_id = self.connection.core, self.stream_id
        try:
            if await self.send_items(source, encode) and self.outbound is not None:
                core.send_complete(stream_id)
        except RequestFailed as error:  # the user's last payload
            if self.stream_id:
                self._fail(error)
        except ChannelError:
            # The user gave the sender up. Otherwise the stream ended or the responder wants no more, and this direction is over already.
            if self.outbound is not None:
                core.send_cancel(stream_id)
                inbound = self.inbound
                self.leave()
                if inbound is not None:
                    inbound.end(TerminalState.CANCELLED)
        except Exception as error:
            if self.stream_id:
                self.fit = False
                core.send_error(stream_id, ErrorCode.APPLICATION_ERROR, self.connection.text_for_peer(error))
                self.end(RequestInvalid(f"a payload could not be sent: {error}"))
            raise
        self.outbound = None
        if self.inbound is None:
            self.leave()

    def _fail(self, error: RequestFailed) -> None:
        """End both directions by an error of this side (RS-68)."""
        try:
            self.connection.core.send_error(self.stream_id, error.code or ErrorCode.APPLICATION_ERROR, error.data)
        except LocalProtocolError as wrong:  # no code of streams, or too long a text
            self.connection.core.send_error(self.stream_id, ErrorCode.APPLICATION_ERROR)
            error = RequestInvalid(f"the error could not be sent: {wrong}")
        self.end(error)

    def leave(self) -> None:
        """Leave the table, and refuse further payloads of the user."""
        super().leave()
        self._refuse()

    def _refuse(self) -> None:
        outbound, self.outbound = self.outbound, None
        if outbound is not None:
            outbound.end(TerminalState.RECEIVER_CLOSED)
        self._wake()

    def completed(self) -> None:
        """End the receiver after the queued payloads; the user may still send."""
        inbound, self.inbound = self.inbound, None
        if self.outbound is None:
            self.leave()
        if inbound is not None:
            inbound.finish_producer()

    def cancelled(self) -> None:
        """Refuse further payloads of the user; the responder's answers still come, unless they have ended (RS-69)."""
        self._refuse()
        if self.inbound is None:
            self.leave()


class Answer(_Producing):
    """Runs the user's handler for one request of the peer, and sends its answer."""

    request: Request | None = attrs.field(default=None, init=False)
    inbound: PayloadChannel | None = attrs.field(default=None, init=False)
    """The payloads of a channel; ``None`` once the requester has sent everything."""
    running: bool = attrs.field(default=False, init=False)
    answered: bool = attrs.field(default=False, init=False)
    """Whether this direction is over."""
    held: int = attrs.field(default=0, init=False)
    """Bytes of the request that the connection counts."""

    def take(self, event: RequestReceived) -> None:
        """Take up a request; this actor's turn does the work."""
        connection = self.connection
        self.busy, self.answered = True, False
        kind, stream_id = event.kind, event.stream_id
        connection.answering += 1
        if kind is CHANNEL:
            self._open_inbound(event)
        self.request = Request(kind, stream_id, event.payload, connection.handle, connection.encoding, self.inbound)
        self.stream_id = stream_id
        connection.streams[stream_id] = self
        self.own.tell(BEGIN)

    def _open_inbound(self, event: RequestReceived) -> None:
        inbound = PayloadChannel(self.connection.config.window, f"stream {event.stream_id}", Payload, self._grant)
        self.inbound = inbound
        inbound.used = True
        inbound.put(event.payload)
        inbound.sender.on_terminated(lambda: self._closed(inbound))
        if event.complete:
            self.completed()

    def _grant(self, inbound: PayloadChannel, n: int) -> None:
        if self.inbound is inbound and self.stream_id:
            self.connection.core.send_request_n(self.stream_id, n)
            self.connection.flush_soon()

    def _closed(self, inbound: PayloadChannel) -> None:
        if self.inbound is inbound and self.stream_id and inbound.sender.state is TerminalState.RECEIVER_CLOSED:
            self._take_no_more()

    def _take_no_more(self) -> None:
        """Tell the requester of a channel to send no more, unless it is done (RS-69); the answers continue."""
        if self.inbound is not None:
            self.inbound = None
            self.connection.core.send_cancel(self.stream_id)
            self.connection.flush_soon()

    def received(self, payload: Payload, complete: bool) -> None:
        """Take a further payload of a channel; small ones are not counted, and `max_request_bytes` bounds the others."""
        inbound, size = self.inbound, payload.size
        if inbound is not None:
            connection = self.connection
            if size <= SMALL:
                inbound.put(payload)
            elif connection.has_room(size):
                connection.request_bytes += size
                inbound.put(payload, lambda: connection.unhold(size))
            else:
                most = connection.config.max_request_bytes
                text = f"requests of {connection.request_bytes} bytes are held, at most {most} (max_request_bytes)"
                self._fail(ErrorCode.CANCELED, text.encode())
                self._take_no_more()  # the answers were complete before
                inbound.end(TerminalState.CANCELLED)
                self.cancelled()
                return
        if complete:
            self.completed()

    def completed(self) -> None:
        """End the channel's receiver: the requester has sent everything."""
        inbound, self.inbound = self.inbound, None
        if inbound is not None:
            inbound.finish_producer()

    def failed(self, event: StreamFailed) -> None:
        """Fail the channel's receiver, and end the answer. A handler that waits for payloads gets the requester's error; others are cancelled."""
        inbound, self.inbound = self.inbound, None
        told = False
        if inbound is not None:
            told = inbound.taker is not None and event.by is not FailedBy.CONNECTION
            inbound.fail(stream_failed(event))
        if told:
            self.leave()
        else:
            self.cancelled()

    def cancelled(self) -> None:
        """End the answer; a running handler is cancelled."""
        inbound, self.inbound = self.inbound, None
        self.leave()
        if self.running:
            self.fit = False
            self.ref.kill()  # when it ends it closes the request
        elif inbound is not None:
            inbound.end(TerminalState.CANCELLED)

    def give_up(self, reason: Reason) -> None:
        """Answer CANCELED, because this actor was stopped from outside."""
        self._fail(ErrorCode.CANCELED, b"the handler was ended")
        self._take_no_more()  # the answers were complete before
        self.leave()

    def undelivered(self, messages: list[Any]) -> None:
        """Release the request: this actor was stopped before it could begin."""
        self.connection.begun()
        self.connection.answering -= 1
        self._release()

    def _release(self) -> None:
        """Stop counting the bytes of the request."""
        self.connection.unhold(self.held)
        self.held = 0

    @handles
    def answer(self, m: Begin) -> Coroutine[Any, Any, None] | None:
        """Run the handler, unless the request was cancelled before its turn came."""
        connection, request = self.connection, self.request
        connection.begun()
        self.request = None
        if not self.stream_id or request is None:
            connection.answering -= 1
            self._release()
            connection.idle.put(self)
            return None
        self.running, self.fit = True, False  # fit again when it ends normally
        if request.kind is RESPONSE:
            return self._answer(request)  # sends nothing before its end, which flushes by itself
        return self._answer_flushing(request)

    async def _answer_flushing(self, request: Request) -> None:
        connection = self.connection
        try:
            await before_waiting(self._answer(request), connection.flush_waiting)
        finally:
            connection.flush_soon() if connection.unbegun else connection.flush()

    # One coroutine for everything: each further one would cost 0.3 us per request.
    async def _answer(self, request: Request) -> None:
        connection, stream_id = self.connection, self.stream_id
        try:
            if connection.answer_bytes:
                await connection.turn()  # a peer that does not read its answers gets no more of them
            if connection.checks_requests and (shown := request.credentials) is not None:
                await connection.check(request, shown)
            if self.inbound is not None:
                connection.core.send_request_n(stream_id, connection.config.window)  # RS-66: the handler is ready
            result: Any = connection.responder(request)
            if type(result) is CoroutineType or (type(result) is not Payload and isawaitable(result)):
                result = await result
            if type(result) is not Payload:
                if hasattr(result, "__aiter__"):
                    await self._send_stream(request, cast("AsyncIterable[Any]", result))
                elif result is not None or request.holds_message:
                    result = connection.encoding.reply(result, messages=request.holds_message)
            crowded = (connection.filled and connection.crowded) or connection.core.backlog
            if crowded and not self.answered and result is not None:
                await connection.let_out(result)
            if request.kind is not RESPONSE and result is not None and not self.answered:
                # ReactiveSocket's streams may begin without credit (RX-63).
                while self.stream_id == stream_id and connection.core.credit(stream_id) < 1:
                    await self._wait_for_credit()
            if not self.answered and self.stream_id == stream_id:
                if result is None:
                    connection.core.send_complete(stream_id)
                else:
                    connection.core.send_payload(stream_id, result, complete=True)
                    if connection.core.backlog:
                        connection.cut_on()
                self.answered = True
                if connection.unbegun and (result is None or len(result.data) <= SMALL):
                    connection.flush_soon()
                else:
                    # No other handler is about to run, and a turn for the flush would cost 2 us; or those that are about to run shall see
                    # whether the carrier is crowded.
                    connection.flush()
        except RequestFailed as error:
            # An error from another peer says nothing about this request: REJECTED would promise that it was not processed.
            self._fail(ErrorCode.APPLICATION_ERROR if error.channel else error.code, error.data)
        except DecodeError as error:
            self._fail(ErrorCode.INVALID, error_data(text_of(error)))
        except Exception as error:
            self._fail(ErrorCode.APPLICATION_ERROR, connection.text_for_peer(error))
            if not connection.has_lost(error):
                raise
        finally:
            self.running = False
            if not self.answered:
                self._fail(ErrorCode.CANCELED, b"the handler was ended")
            request.close()
            self.leave()
            connection.answering -= 1
            if self.held:
                self._release()
        self.fit = True
        connection.idle.put(self)

    async def _send_stream(self, request: Request, items: AsyncIterable[Any]) -> None:
        messages = request.holds_message
        try:
            if request.kind is RESPONSE:
                raise RequestInvalid(NEEDS_STREAM)
            if await self.send_items(items, partial(self.connection.encoding.reply, messages=messages)):
                core = self.connection.core
                core.send_complete(self.stream_id)
                self.answered = True
                if not core.has_stream(self.stream_id):
                    self.leave()  # closing the source may take its time
        finally:
            await close_source(items)

    def _fail(self, code: int, data: bytes) -> None:
        if not self.answered and self.connection.streams.get(self.stream_id) is self:
            self.inbound = None
            self.connection.core.send_error(self.stream_id, code, data)
            self.answered = True  # not before: if the payload's length or code cannot be sent, CANCELED follows
            self.connection.flush_soon()


async def close_source(source: Any) -> None:
    """Close an async iterable that is no longer wanted; has no effect if it has ended."""
    if isinstance(source, Receiver):
        source.close()
    elif hasattr(source, "aclose"):
        await source.aclose()
