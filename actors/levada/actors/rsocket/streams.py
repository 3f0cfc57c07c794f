"""Actors of streams: what waits for answers, what gives them. Children of their connection, each with one stream at a time.

* The connection applies what arrives by direct calls (`received`, `credited`, `cancelled`, …): a turn of a mailbox would cost more than
  all the rest. They are sync, run no code of the user, and raise nothing.
* The user's code runs in the handler `Answer.answer`, so that its failure is that stream's, and a CANCEL is a kill of that actor.
* An actor whose stream is over is *idle* until the connection needs one (`levada.actors.pool`), so no stream is ever replayed.
* A stream's place in the connection's table ends with its place in the core's: the core is told first, then comes `leave`.
* What was produced is flushed when the handler is about to wait, and every so many payloads, so that many frames share a write.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import AsyncIterable, Callable, Coroutine, Generator
from inspect import isawaitable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Protocol, cast

import attrs
import trio
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
from levada.actors.pool import Pool, Pooled
from levada.framework import Reason, Receiver, TerminalState, handles
from levada.framework.embedding import ChannelCore
from levada.framework.errors import ActorStopped, ChannelError, DecodeError, LevadaError
from levada.transports.rsocket import ErrorCode, Payload
from levada.transports.rsocket.events import Interaction, RequestReceived, StreamFailed
from levada.transports.rsocket.reactive_streams import ReactiveStreamsCore

from .errors import RequestFailed, RequestInvalid, stream_failed
from .flows import Inbound
from .requests import Request
from .routing import Responder

if TYPE_CHECKING:
    from .config import ClientConfig, ServerConfig
    from .encoding import Encoding
    from .peers import ConnectedPeer

__all__ = [
    "BEGIN", "Answer", "Begin", "Call", "Channel", "Items", "Stream", "_Carrying", "before_waiting", "close_source",
]  # fmt: skip

FLUSH_ITEMS, FLUSH_OCTETS = 32, 65_536
"""Payloads, or bytes of them, that a stream produces before they are flushed although it could go on."""

SMALL = 4096  # bytes of a payload that are not counted: counting costs time, and 4,096 streams with so many hold 16 MiB
EMPTY = Payload(b"")

# Members of an enum under names of this module, which cost a tenth of an attribute of it.
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
        value = None  # a cancellation, whose traceback keeps this frame


class Begin:
    """To an actor that has been given a stream: do what there is to do."""

    __slots__ = ()


BEGIN = Begin()


class _Carrying(Protocol):
    """What streams need of their connection; `levada.actors.rsocket.connection.Connection` says what each is."""

    core: ReactiveStreamsCore
    config: ClientConfig | ServerConfig
    encoding: Encoding
    peer: ConnectedPeer
    phase: Phase
    line: trio.Lock
    streams: dict[int, Stream]
    idle: Pool
    responder: Responder
    checks_requests: bool
    request_octets: int
    unbegun: int
    fired: deque[Request]
    firing: bool
    fire_and_forget: int
    fire_and_forget_octets: int

    @property
    def crowded(self) -> bool: ...
    def begun(self) -> None: ...
    async def check(self, request: Request) -> None: ...
    def fire_on(self) -> bool: ...
    def has_room(self, octets: int) -> bool: ...
    def unhold(self, octets: int) -> None: ...
    def flush(self) -> bool: ...
    def flush_soon(self) -> None: ...
    def retime(self) -> None: ...
    async def room(self) -> None: ...
    async def turn(self) -> None: ...


class Stream(Pooled):
    """What all have in common: a place in the connection's table, from `occupy` to `leave`."""

    connection: _Carrying
    stream_id: int = attrs.field(default=0, init=False)
    """0 while it is idle."""
    busy: bool = attrs.field(default=False, init=False)
    """Whether a handler of it runs, which sees to the rest."""

    def occupy(self, stream_id: int) -> None:
        """Take up a stream."""
        self.stream_id = stream_id
        self.connection.streams[stream_id] = self

    def leave(self) -> None:
        """The stream is over for this side."""
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

    # What the connection calls.

    def received(self, payload: Payload, complete: bool) -> None:
        """Take a payload."""
        raise NotImplementedError

    def completed(self) -> None:
        """The peer has sent everything."""
        raise NotImplementedError

    def failed(self, event: StreamFailed) -> None:
        """The stream is over by an error, of the peer or of the connection."""
        raise NotImplementedError

    def credited(self) -> None:
        """The peer takes more."""

    def cancelled(self) -> None:
        """The peer wants no more, or the connection is over."""

    def give_up(self, reason: Reason) -> None:
        """This actor is ended by somebody else than its stream."""
        raise NotImplementedError

    def stopping(self, reason: Reason) -> None:
        """See `Actor.stopping`."""
        if self.stream_id:
            self.fit = False
            self.give_up(reason)
            self.connection.flush()
        self.connection.idle.forget(self)

    def undelivered(self, messages: list[Any]) -> None:
        """See `Actor.undelivered`: what this actor was to begin with is over."""

    def stopped_by(self, reason: Reason) -> ActorStopped:
        """Make the error for those who wait for this stream."""
        return ActorStopped(f"the actor of stream {self.stream_id} was ended", actor=self.ref.path, reason=reason)


class Call(Stream):
    """Waits for the one answer of a request-response."""

    task: Task | None = attrs.field(default=None, init=False)
    """Who waits."""

    def abort(self, _: RaiseCancelT) -> Abort:
        """Send a CANCEL, as who waits is cancelled."""
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
        """See `Stream.received`."""
        task, self.task = self.task, None
        self.leave()
        if task is not None:
            reschedule(task, Value(payload))

    def completed(self) -> None:
        """See `Stream.completed`: an answer without a payload."""
        self._settle(Value(EMPTY))

    def failed(self, event: StreamFailed) -> None:
        """See `Stream.failed`."""
        self._settle(Error(stream_failed(event)))

    def give_up(self, reason: Reason) -> None:
        """See `Stream.give_up`."""
        error = self.stopped_by(reason)
        task, self.task = self.task, None
        self._cancel()
        if task is not None:
            reschedule(task, Error(error))


class Items(Stream):
    """Takes the payloads of a request-stream."""

    inbound: Inbound | None = attrs.field(default=None, init=False)

    def begin(self, window: int, item_type: Any, convert: Callable[[Payload], Any] | None) -> Receiver[Any]:
        """Make the channel by which the payloads come; before `occupy`."""
        inbound = Inbound(window, "answers", item_type, self._grant)
        if convert is not None:
            inbound.convert(convert)
        inbound.used = True
        self.inbound = inbound
        inbound.sender.on_terminated(lambda: self._closed(inbound))
        return Receiver(inbound)

    def leave(self) -> None:
        """See `Stream.leave`."""
        self.inbound = None
        super().leave()

    def _grant(self, inbound: Inbound, n: int) -> None:
        # It may have another stream by now, and a receiver of the last one that still takes what it has.
        if self.inbound is inbound and self.stream_id:
            self.connection.core.send_request_n(self.stream_id, n)
            self.connection.flush()

    def _closed(self, inbound: Inbound) -> None:
        if self.inbound is inbound and self.stream_id and inbound.sender.state is TerminalState.RECEIVER_CLOSED:
            self.connection.core.send_cancel(self.stream_id)
            self.leave()
            self.connection.flush()

    def received(self, payload: Payload, complete: bool) -> None:
        """See `Stream.received`."""
        assert self.inbound is not None
        self.inbound.put(payload)
        if complete:
            self.completed()

    def completed(self) -> None:
        """See `Stream.completed`."""
        inbound = self.inbound
        self.leave()
        if inbound is not None:
            inbound.finish_producer()

    def failed(self, event: StreamFailed) -> None:
        """See `Stream.failed`."""
        self.end(stream_failed(event))

    def end(self, error: LevadaError) -> None:
        """End what the user holds by `error`."""
        inbound = self.inbound
        self.leave()
        if inbound is not None:
            inbound.fail(error)

    def give_up(self, reason: Reason) -> None:
        """See `Stream.give_up`."""
        self.connection.core.send_cancel(self.stream_id)
        self.end(self.stopped_by(reason))


class _Producing(Stream):
    """What sends payloads as its credit and the carrier's room allow."""

    producer: Task | None = attrs.field(default=None, init=False)
    """Waits for credit."""

    def credited(self) -> None:
        """See `Stream.credited`."""
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
        """Send what `source` gives; false if the stream was over before it ended.

        Cancellation:
            what was sent stays sent; the source has been closed.
        """
        connection, stream_id, scheduler = self.connection, self.stream_id, self.system.scheduler
        core = connection.core
        credit = items = octets = 0
        if connection.line.locked():
            await connection.turn()  # others have been waiting for longer
        async for item in source:
            payload = encode(item)
            while credit < 1:
                if self.stream_id != stream_id:
                    return False
                credit = core.credit(stream_id)
                if credit < 1:
                    await self._wait_for_credit()
            octets += len(payload.data)
            if items >= FLUSH_ITEMS or octets >= FLUSH_OCTETS:
                items = octets = 0
                connection.flush()
                if connection.crowded or scheduler.slice_over():
                    await connection.turn()
            if self.stream_id != stream_id:
                return False
            core.send_payload(stream_id, payload)
            credit -= 1
            items += 1
        return self.stream_id == stream_id


class Channel(Items, _Producing):
    """A request-channel: takes payloads as a request-stream does, and sends those that its user puts into a `Sender`."""

    outbound: ChannelCore | None = attrs.field(default=None, init=False)
    """What the user's sender feeds; ``None`` once this direction is over."""
    encode: Callable[[Any], Payload] | None = attrs.field(default=None, init=False)

    def feed(self, outbound: ChannelCore, encode: Callable[[Any], Payload]) -> None:
        """Send what comes by `outbound`, whose receiver this takes; after `occupy`."""
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
                    await before_waiting(self._produce(source, encode), self.connection.flush_soon)
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
        except ChannelError:
            # Its user gave it up. Or the stream ended, or the responder wants no more: then this direction is over already.
            if self.outbound is not None:
                core.send_cancel(stream_id)
                inbound = self.inbound
                self.leave()
                if inbound is not None:
                    inbound.end(TerminalState.CANCELLED)
        except Exception as error:
            if self.stream_id:
                self.fit = False
                core.send_error(stream_id, ErrorCode.APPLICATION_ERROR, str(error).encode())
                self.end(RequestInvalid(f"a payload could not be sent: {error}"))
            raise
        self.outbound = None
        if self.inbound is None:
            self.leave()

    def leave(self) -> None:
        """See `Stream.leave`; what the user still sends is refused."""
        super().leave()
        self._refuse()

    def _refuse(self) -> None:
        outbound, self.outbound = self.outbound, None
        if outbound is not None:
            outbound.end(TerminalState.RECEIVER_CLOSED)
        self._wake()

    def completed(self) -> None:
        """See `Stream.completed`: of the other direction; this one goes on."""
        inbound, self.inbound = self.inbound, None
        if self.outbound is None:
            self.leave()
        if inbound is not None:
            inbound.finish_producer()

    def cancelled(self) -> None:
        """See `Stream.cancelled`: the responder takes no more; its answers still come, unless they have ended (RS-69)."""
        self._refuse()
        if self.inbound is None:
            self.leave()


class Answer(_Producing):
    """Runs the user's handler for one request of the peer, and sends what it gives."""

    request: Request | None = attrs.field(default=None, init=False)
    inbound: Inbound | None = attrs.field(default=None, init=False)
    """Of a channel; ``None`` once the requester has sent everything."""
    running: bool = attrs.field(default=False, init=False)
    answered: bool = attrs.field(default=False, init=False)
    """Whether this direction is over."""
    held: int = attrs.field(default=0, init=False)
    """Bytes of the request that the connection has counted."""

    def take(self, event: RequestReceived) -> None:
        """Take up a request; what there is to do is done in this actor's turn."""
        connection = self.connection
        self.busy, self.answered = True, False
        kind, stream_id = event.kind, event.stream_id
        if kind is CHANNEL:
            self._open_inbound(event)
        self.request = Request(kind, stream_id, event.payload, connection.peer, connection.encoding, self.inbound)
        self.stream_id = stream_id
        connection.streams[stream_id] = self
        self.own.tell(BEGIN)

    def _open_inbound(self, event: RequestReceived) -> None:
        inbound = Inbound(self.connection.config.window, f"stream {event.stream_id}", Payload, self._grant)
        self.inbound = inbound
        inbound.used = True
        inbound.put(event.payload)
        inbound.sender.on_terminated(lambda: self._closed(inbound))
        if event.complete:
            self.completed()

    def _grant(self, inbound: Inbound, n: int) -> None:
        if self.inbound is inbound and self.stream_id:
            self.connection.core.send_request_n(self.stream_id, n)
            self.connection.flush_soon()

    def _closed(self, inbound: Inbound) -> None:
        if self.inbound is inbound and self.stream_id and inbound.sender.state is TerminalState.RECEIVER_CLOSED:
            self._take_no_more()

    def _take_no_more(self) -> None:
        """Tell the requester of a channel that has not completed to send nothing further (RS-69); the answers go on."""
        if self.inbound is not None:
            self.inbound = None
            self.connection.core.send_cancel(self.stream_id)
            self.connection.flush_soon()

    def received(self, payload: Payload, complete: bool) -> None:
        """Take a further payload of a channel; small ones are not counted, `max_request_octets` bounds the others."""
        inbound, octets = self.inbound, payload.size
        if inbound is not None:
            connection = self.connection
            if octets <= SMALL:
                inbound.put(payload)
            elif connection.has_room(octets):
                connection.request_octets += octets
                inbound.put(payload, lambda: connection.unhold(octets))
            else:
                most = connection.config.max_request_octets
                text = f"requests of {connection.request_octets} bytes are held, at most {most} (max_request_octets)"
                self._fail(ErrorCode.CANCELED, text.encode())
                self._take_no_more()  # the answers were complete before
                inbound.end(TerminalState.CANCELLED)
                self.cancelled()
                return
        if complete:
            self.completed()

    def completed(self) -> None:
        """See `Stream.completed`: the requester of a channel has sent everything."""
        inbound, self.inbound = self.inbound, None
        if inbound is not None:
            inbound.finish_producer()

    def failed(self, event: StreamFailed) -> None:
        """See `Stream.failed`: the requester of a channel has failed."""
        inbound, self.inbound = self.inbound, None
        if inbound is not None:
            inbound.fail(stream_failed(event))
        self.cancelled()

    def cancelled(self) -> None:
        """See `Stream.cancelled`: a handler that runs is cancelled."""
        inbound, self.inbound = self.inbound, None
        self.leave()
        if self.running:
            self.fit = False
            self.ref.kill()  # at its end it closes the request
        elif inbound is not None:
            inbound.end(TerminalState.CANCELLED)

    def give_up(self, reason: Reason) -> None:
        """See `Stream.give_up`."""
        self._fail(ErrorCode.CANCELED, b"the handler was ended")
        self._take_no_more()  # the answers were complete before
        self.leave()

    def undelivered(self, messages: list[Any]) -> None:
        """See `Actor.undelivered`: it was ended before it could begin."""
        self.connection.begun()
        self._release()

    def _release(self) -> None:
        """Count the bytes of the request no more."""
        self.connection.unhold(self.held)
        self.held = 0

    @handles
    def answer(self, m: Begin) -> Coroutine[Any, Any, None] | None:
        """Run the handler, unless the request was cancelled before its turn came."""
        connection, request = self.connection, self.request
        connection.begun()
        self.request = None
        if not self.stream_id or request is None:
            self._release()
            connection.idle.put(self)
            return None
        self.running, self.fit = True, False  # unfit until it has ended in order
        if request.kind is RESPONSE:
            return self._answer(request)  # sends nothing before its end, which flushes by itself
        return self._answer_flushing(request)

    async def _answer_flushing(self, request: Request) -> None:
        try:
            await before_waiting(self._answer(request), self.connection.flush_soon)
        finally:
            self.connection.flush_soon()

    # One coroutine for all of it: each further one would cost 0.3 us of each request.
    async def _answer(self, request: Request) -> None:
        connection, stream_id = self.connection, self.stream_id
        try:
            if connection.checks_requests:
                await connection.check(request)
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
            if not self.answered and connection.crowded:
                await connection.room()
            if request.kind is not RESPONSE and result is not None and not self.answered:
                # ReactiveSocket's streams may begin without any (RX-63).
                while self.stream_id == stream_id and connection.core.credit(stream_id) < 1:
                    await self._wait_for_credit()
            if not self.answered and self.stream_id == stream_id:
                if result is None:
                    connection.core.send_complete(stream_id)
                else:
                    connection.core.send_payload(stream_id, result, complete=True)
                self.answered = True
                if connection.unbegun:
                    connection.flush_soon()
                else:
                    connection.flush()  # no other handler is about to run; a turn for the flush would cost 2 us
        except RequestFailed as error:
            # One that came from another peer says nothing of this request: REJECTED would promise that it was not processed.
            self._fail(ErrorCode.APPLICATION_ERROR if error.channel else error.code, error.data)
        except DecodeError as error:
            self._fail(ErrorCode.INVALID, str(error).encode())
        except Exception as error:
            self._fail(ErrorCode.APPLICATION_ERROR, (str(error) or type(error).__name__).encode())
            raise
        finally:
            self.running = False
            if not self.answered:
                self._fail(ErrorCode.CANCELED, b"the handler was ended")
            request.close()
            self.leave()
            if self.held:
                self._release()
        self.fit = True
        connection.idle.put(self)

    async def _send_stream(self, request: Request, items: AsyncIterable[Any]) -> None:
        messages = request.holds_message
        try:
            if request.kind is RESPONSE:
                raise RequestInvalid("this is answered by a stream; send a request-stream")
            if await self.send_items(items, lambda item: self.connection.encoding.reply(item, messages=messages)):
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
            self.answered = True  # not before: what cannot be sent, for its length or its code, is followed by CANCELED
            self.connection.flush_soon()


async def close_source(source: Any) -> None:
    """Close an async iterable that is not wanted any more; one that ended is not changed by it."""
    if isinstance(source, Receiver):
        source.close()
    elif hasattr(source, "aclose"):
        await source.aclose()
