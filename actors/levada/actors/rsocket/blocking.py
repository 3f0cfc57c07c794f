"""A client for code without an event loop: the same protocol core over a plain socket, for threads that may block.

Example:
    >>> from levada.actors.rsocket.blocking import connect
    >>> with connect("rsocket+unix:///run/desk.socket") as peer:  # doctest: +SKIP
    ...     answer = peer.request_response(b"EURUSD", route="quote", timeout=1.0)
    ...     for item in peer.request_stream(b"EURUSD", route="follow", window=64):
    ...         print(item.data)

How it works:

* One lock guards core, socket and streams. No thread waits while holding it, since the socket does not block. A sending thread writes
  straight to the socket as much as the kernel takes; the connection's own thread writes the remainder.
* That thread, one per connection, reads, keeps the core's deadlines (keepalive) and writes the rest. So a connection stays alive
  while its owner computes for minutes, and any number of threads may have any number of requests under way.
* While more than `ClientConfig.high_watermark` bytes wait to be sent, a new request waits too, within its timeout. While as many bytes of the
  core's own answers wait, nothing is read: a server that asks and does not read cannot make them pile up.
* After a fork the child has a copy of the socket but not the thread. In the child every call but `close` is refused, and `close` only
  releases the copy: the parent's connection does not notice.

Importing this module starts neither a thread nor trio.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, overload

import attrs

from levada.actors.stream_carriers import name_as_written
from levada.framework import Asks
from levada.framework.errors import (
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    LevadaError,
    ReceiverClosed,
    SenderFinished,
)
from levada.framework.ref import check_timeout
from levada.transports.rsocket import ErrorCode, Payload
from levada.transports.rsocket.events import (
    ConnectionDraining,
    ConnectionEnded,
    CreditGranted,
    EndReason,
    Event,
    PayloadReceived,
    RequestReceived,
    SendingStopped,
    StreamCompleted,
    StreamFailed,
)

from .blocking_sockets import open_socket, socket_settings
from .config import ClientConfig
from .dialects import carrier_url, core_of
from .encoding import Encoding, Metadata, expected_reply, is_message
from .errors import RequestFailed, connection_lost, stream_failed
from .flows import again
from .peers import Data, RequestOptions, StreamOptions

__all__ = ["BlockingChannel", "BlockingPeer", "BlockingStream", "PendingAnswer", "RequestTimeout", "connect"]

R = TypeVar("R")
S = TypeVar("S", bound="BlockingStream[Any]")
T = TypeVar("T")

READ = 256 * 1024  # bytes read from the socket at once


class TimedOptions(RequestOptions, total=False):
    """Keyword arguments of a request."""

    timeout: float | None


class TimedStreamOptions(TimedOptions, StreamOptions, total=False):
    """Keyword arguments of a request that is answered by a stream."""


@attrs.define(eq=False, slots=False, str=False)
class RequestTimeout(LevadaError, TimeoutError):
    """No answer came in time. The request has been cancelled at the peer, and may have been processed."""

    loss = "a request was not answered in time"


def connect(url: str, *, config: ClientConfig | None = None, timeout: float | None = None) -> BlockingPeer:
    """Connect to a server and send SETUP.

    Args:
        url: ``rsocket+tcp://host:port``, with ``tls`` or ``unix`` instead of ``tcp``; also with ``reactivesocket`` instead of ``rsocket``.
        config: as for `levada.actors.rsocket.connect`. Resumption and leases of this side are not supported here. The carrier's
            ``happy_eyeballs_delay``, ``receive_size``, ``high_watermark`` and ``linger`` have no meaning here: addresses are tried one after
            the other, `ClientConfig.high_watermark` limits what waits to be sent, and `BlockingPeer.close` always waits for the peer.
        timeout: seconds to connect to an address of the host, and as many for a TLS handshake; ``None``: the carrier's ``connect_timeout``
            and ``handshake_timeout``.

    Raises:
        ConnectionLost: no server answers at the URL, its certificate is wrong, or its user is not allowed (`UnixConfig.allowed_uids`).
        ConfigurationError: the URL or the settings cannot work.
    """
    dialect, carrier = carrier_url(url)
    settings = config or ClientConfig()
    if settings.core.resume or settings.lease is not None:
        raise ConfigurationError("a blocking client has neither resumption nor leases")
    try:
        carrier_settings = socket_settings(carrier, settings.carrier)
        opened = open_socket(carrier, carrier_settings, timeout)
    except ConfigurationError as error:
        name_as_written(error, url, carrier)
        raise
    try:
        return BlockingPeer(opened, dialect, attrs.evolve(settings, carrier=carrier_settings))
    except BaseException:
        opened.close()
        raise


class BlockingPeer:
    """The server at the other end. Made by `connect`; all methods may be called from any thread.

    Arguments, routes, answers and errors are the same as for `levada.actors.rsocket.Peer`. In addition, a request raises `RequestTimeout` if
    `timeout` passes first (seconds, ``None`` for no limit). Requests from the server are rejected.
    """

    def __init__(self, opened: socket.socket, dialect: str, config: ClientConfig) -> None:
        self._socket = opened
        self._config = config
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        """Notified when the kernel has taken what waited, and at the end."""
        self._core = core_of(dialect)(
            config.core, client=True, framed=False, now=time.monotonic(), random_bytes=os.urandom
        )
        self._encoding = Encoding(config.core.data_mime_type, config.core.metadata_mime_type, config.codec)
        self._calls: dict[int, Future[Payload]] = {}
        self._streams: dict[int, BlockingStream[Any]] = {}
        self._unsent = bytearray()
        self._answers = 0
        """Bytes that the core has answered since `_unsent` was last empty."""
        self._draining = False
        self._end: ConnectionEnded | None = None
        self._awake, self._waker = socket.socketpair()
        opened.setblocking(False)
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        with self._lock:
            self._write()
        self._thread = threading.Thread(target=self._run, name="levada rsocket client", daemon=True)
        self._thread.start()

    @overload
    def request_response(self, x: Asks[R], **options: Unpack[TimedOptions]) -> R: ...
    @overload
    def request_response(self, x: Data, **options: Unpack[TimedOptions]) -> Payload: ...
    @overload
    def request_response(self, x: object, **options: Unpack[TimedOptions]) -> Any: ...
    def request_response(
        self, x: Any, *, route: str | None = None, metadata: Metadata = None, timeout: float | None = None
    ) -> Any:
        """Send a request and wait for its answer."""
        until = _until(timeout)
        return self.start_request(x, route=route, metadata=metadata, timeout=timeout)._result(until, timeout)

    def start_request(
        self, x: object, *, route: str | None = None, metadata: Metadata = None, timeout: float | None = None
    ) -> PendingAnswer:
        """Send a request and return at once, so that many may be under way; waits only for room to send, within `timeout`."""
        payload = self._encoding.request(x, route, metadata)
        with self._own():
            self._ready(_until(timeout))
            stream_id = self._core.send_request_response(payload, time.monotonic())
            future: Future[Payload] = Future()
            future.add_done_callback(partial(self._answered, stream_id))
            self._calls[stream_id] = future
            self._write()
        return PendingAnswer(self, future, x)

    def fire_and_forget(
        self, x: object, *, route: str | None = None, metadata: Metadata = None, timeout: float | None = None
    ) -> None:
        """Send a request that gets no answer; waits only for room to send, within `timeout`."""
        payload = self._encoding.request(x, route, metadata)
        with self._own():
            self._ready(_until(timeout))
            self._core.send_fire_and_forget(payload, time.monotonic())
            self._write()

    @overload
    def request_stream(self, x: Asks[R], **options: Unpack[TimedStreamOptions]) -> BlockingStream[R]: ...
    @overload
    def request_stream(self, x: Data, **options: Unpack[TimedStreamOptions]) -> BlockingStream[Payload]: ...
    @overload
    def request_stream(self, x: object, **options: Unpack[TimedStreamOptions]) -> BlockingStream[Any]: ...
    def request_stream(
        self,
        x: Any,
        *,
        route: str | None = None,
        metadata: Metadata = None,
        window: int | None = None,
        timeout: float | None = None,
    ) -> BlockingStream[Any]:
        """Open a stream of answers. Iterate over it, and close it if you leave it before its end.

        Args:
            window: payloads that the responder may send ahead; ``None``: the setting.
            timeout: seconds to wait for each item.
        """
        payload = self._encoding.request(x, route, metadata)
        return self._begin(BlockingStream, self._core.send_request_stream, payload, window, timeout, x)

    @overload
    def request_channel(self, x: Asks[R], **options: Unpack[TimedStreamOptions]) -> BlockingChannel[R]: ...
    @overload
    def request_channel(self, x: Data, **options: Unpack[TimedStreamOptions]) -> BlockingChannel[Payload]: ...
    @overload
    def request_channel(self, x: object, **options: Unpack[TimedStreamOptions]) -> BlockingChannel[Any]: ...
    def request_channel(
        self,
        x: Any,
        *,
        route: str | None = None,
        metadata: Metadata = None,
        window: int | None = None,
        timeout: float | None = None,
    ) -> BlockingChannel[Any]:
        """Open a channel with its first payload. Send the others, call `BlockingChannel.finish`, and iterate over the answers.

        Arguments as for `request_stream`.
        """
        payload = self._encoding.request(x, route, metadata)
        return self._begin(BlockingChannel, self._core.send_request_channel, payload, window, timeout, x)

    def _begin(
        self,
        kind: type[S],
        send: Callable[[Payload, int, float], int],
        payload: Payload,
        window: int | None,
        timeout: float | None,
        question: object,
    ) -> S:
        window = self._config.credit(window)
        with self._own():
            self._ready(_until(timeout))
            stream_id = send(payload, window, time.monotonic())
            stream = kind(self, stream_id, window, timeout, question)
            self._streams[stream_id] = stream
            self._write()
        return stream

    def close(self) -> None:
        """Close the connection; requests under way fail with `ConnectionClosed`. A second call does no harm, nor does one in a forked child.

        What was sent before still reaches the peer: this waits until the peer closes, too, for up to the carrier's ``close_timeout``.
        """
        if self._pid != os.getpid():
            # In a forked child a lock may be held by a thread that does not exist here. Nothing is sent: the connection is the parent's.
            for part in (self._socket, self._awake, self._waker):
                number = part.detach()
                if number >= 0:
                    os.close(number)
            return
        with self._lock:
            if self._end is None:
                self._apply(self._core.close(0, "closed", time.monotonic()))
                self._write()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def closed(self) -> bool:
        """Whether the connection is over, also if its end has arrived and the thread has not read it yet."""
        if self._end is None and self._pid == os.getpid():
            with self._lock:
                if self._end is None:
                    self._turn(woken=False)
        return self._end is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _own(self) -> threading.Lock:
        """Return the lock; raise in a forked child, where a thread that does not exist may hold it, and the connection is the parent's."""
        if self._pid != os.getpid():
            raise ConnectionClosed("this connection belongs to the process before the fork; connect again here")
        return self._lock

    def _ready(self, until: float | None) -> None:
        """Wait for room for a request, and raise if the connection takes no more."""
        self._wait_for_room(until)
        if self._draining:
            raise ConnectionLost("the peer is closing the connection and takes no more requests")

    def _wait_for_room(self, until: float | None) -> None:
        while self._end is None and len(self._unsent) > self._config.high_watermark:
            if not self._room.wait(_left(until)):
                raise RequestTimeout("the server does not read; nothing was sent")
        if self._end is not None:
            raise self._error()

    def _error(self) -> LevadaError:
        assert self._end is not None
        if self._end.reason is EndReason.CLOSED:
            return ConnectionClosed("this side closed the connection")
        return connection_lost(self._end.code, self._end.text or self._end.reason.value)

    def _write(self) -> int:
        """Write as much as the kernel takes now, and return how many bytes the core had queued; the thread writes the rest."""
        data = b"".join(self._core.data_to_send(time.monotonic()))
        waited = bool(self._unsent)
        self._unsent += data
        if data and not waited:
            self._push()
            if self._unsent:
                self._wake()
        return len(data)

    def _push(self) -> None:
        try:
            while self._unsent:
                with memoryview(self._unsent) as view, view[:READ] as part:
                    count = self._socket.send(part)
                del self._unsent[:count]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self._unsent.clear()
            self._apply(self._core.connection_lost(0, str(error), time.monotonic()))
        if len(self._unsent) <= self._config.high_watermark // 2:
            self._room.notify_all()

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # full: it will wake anyway; closed: the connection has ended

    def _grant(self, stream_id: int, n: int) -> None:
        if self._end is None and stream_id in self._streams:
            self._core.send_request_n(stream_id, n)
            self._write()

    def _answered(self, stream_id: int, future: Future[Payload]) -> None:
        """Cancel the request at the peer if its future was cancelled. That happens in a caller's thread, which does not hold the lock."""
        if future.cancelled() and self._pid == os.getpid():
            with self._lock:
                self._cancel(stream_id)

    def _take_call(self, stream_id: int) -> Future[Payload] | None:
        """Remove a call; return its future if it can still get a result. Tell `concurrent.futures.wait` if it was cancelled."""
        call = self._calls.pop(stream_id, None)
        return call if call is not None and call.set_running_or_notify_cancel() else None

    def _cancel(self, stream_id: int) -> None:
        known = stream_id in self._streams or stream_id in self._calls
        self._streams.pop(stream_id, None)
        self._take_call(stream_id)
        if known and self._end is None:
            self._core.send_cancel(stream_id)
            self._write()
            self._forget_if_over(stream_id)

    def _apply(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case PayloadReceived(stream_id, payload, complete):
                    call = self._take_call(stream_id)
                    if call is not None:
                        call.set_result(payload)
                    elif stream_id in self._streams:
                        self._streams[stream_id]._items.append(payload)
                        if complete:
                            self._finish(stream_id, None)
                        else:
                            self._streams[stream_id]._changed.notify_all()
                case StreamCompleted(stream_id):
                    call = self._take_call(stream_id)
                    if call is not None:
                        call.set_result(Payload())
                    self._finish(stream_id, None)
                case StreamFailed(stream_id):
                    call = self._take_call(stream_id)
                    if call is not None:
                        call.set_exception(stream_failed(event))
                    self._finish(stream_id, stream_failed(event))
                case CreditGranted(stream_id):
                    if stream_id in self._streams:
                        self._streams[stream_id]._changed.notify_all()
                case SendingStopped(stream_id):
                    stopped = self._streams.get(stream_id)
                    if stopped is not None:
                        stopped._refuse_more()
                        if stopped._over:  # otherwise the end of the answers is still to come
                            self._forget_if_over(stream_id)
                case RequestReceived(_, stream_id):
                    if self._core.has_stream(stream_id):
                        self._core.send_error(stream_id, ErrorCode.REJECTED, b"no handler")
                case ConnectionDraining():
                    self._draining = True
                case ConnectionEnded():
                    self._end = event
                    self._room.notify_all()
                case _:
                    pass

    def _finish(self, stream_id: int, error: LevadaError | None) -> None:
        """End the peer's direction; without an error a channel's other direction may go on."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if not stream._over:
            stream._over, stream._failure = True, error
        if not self._core.has_stream(stream_id):
            stream._refuse_more()
        self._forget_if_over(stream_id)
        stream._changed.notify_all()

    def _forget_if_over(self, stream_id: int) -> None:
        """Keep a stream as long as the core has it; a drain may be waiting for the last one."""
        if not self._core.has_stream(stream_id):
            self._streams.pop(stream_id, None)
            if self._draining:
                self._wake()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._awake, selectors.EVENT_READ)
                selector.register(self._socket, selectors.EVENT_READ)
                self._serve(selector)
                self._linger(selector)
        finally:
            with self._lock:
                if self._end is None:
                    self._apply(self._core.connection_lost(0, "the client's thread has failed", time.monotonic()))
                self._socket.close()
                self._awake.close()
                self._waker.close()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        while True:
            with self._lock:
                if self._end is not None:
                    return
                wait = _left(self._core.next_deadline())
                events = selectors.EVENT_READ if self._reading() else 0
                events |= selectors.EVENT_WRITE if self._unsent else 0
            if selector.get_key(self._socket).events != events:
                selector.modify(self._socket, events)
            ready = selector.select(wait)
            with self._lock:
                self._turn(woken=any(key.fileobj is self._awake for key, _ in ready))

    def _linger(self, selector: selectors.BaseSelector) -> None:
        """Send the rest, and discard what arrives until the peer ends too.

        A socket that closes with unread bytes sends a reset, which destroys the last bytes on their way to the peer.
        """
        until = _until(self._config.carrier.close_timeout)
        selector.unregister(self._awake)
        open_for = selectors.EVENT_READ | selectors.EVENT_WRITE
        try:
            while open_for and (wait := _left(until)):
                selector.modify(self._socket, open_for)
                selector.select(wait)
                if open_for & selectors.EVENT_WRITE:
                    with self._lock:
                        self._push()
                    if not self._unsent:
                        self._socket.shutdown(socket.SHUT_WR)
                        open_for &= ~selectors.EVENT_WRITE
                if open_for & selectors.EVENT_READ and self._peer_ended():
                    open_for &= ~selectors.EVENT_READ
        except OSError:
            pass  # the peer has gone

    def _peer_ended(self) -> bool:
        """Discard bytes that have arrived; return whether they were the last."""
        try:
            return not self._socket.recv(READ)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False

    def _reading(self) -> bool:
        return self._end is None and self._answers <= self._config.high_watermark

    def _turn(self, *, woken: bool) -> None:
        if woken:
            self._awake.recv(4096)
        if self._unsent:
            self._push()
        taken = 0
        try:
            # A bounded number of bytes, so that a server that sends without a pause leaves time for answers, deadlines and other threads.
            while taken < READ and self._reading():
                data = self._socket.recv(READ)
                taken += len(data)
                self._apply(self._core.receive_data(data, time.monotonic()))
                if len(data) < READ and not isinstance(self._socket, ssl.SSLSocket):
                    break
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self._apply(self._core.connection_lost(0, str(error), time.monotonic()))
        if self._end is None:
            self._apply(self._core.handle_timeout(time.monotonic()))
        queued = self._write()
        self._answers = self._answers + queued if self._unsent else 0


class PendingAnswer:
    """A request-response under way; made by `BlockingPeer.start_request`."""

    def __init__(self, peer: BlockingPeer, future: Future[Payload], question: object) -> None:
        self._peer = peer
        self._question = question
        self.future = future
        """The future of the answer's payload, for `concurrent.futures.wait` and callbacks. Callbacks run in the client's thread: they must be quick
        and must not use this client. Cancelling the future cancels the request."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer.

        Raises:
            RequestTimeout: no answer came in `timeout` seconds; the request has been cancelled.
            concurrent.futures.CancelledError: the request was cancelled before, by `cancel` or after a timeout.
        """
        return self._result(_until(timeout), timeout)

    def _result(self, until: float | None, timeout: float | None) -> Any:
        self._peer._own()
        try:
            answer = self.future.result(_left(until))
        except TimeoutError as error:
            if isinstance(error, LevadaError):
                raise
            self.cancel()
            raise RequestTimeout(f"no answer in {timeout or 0:g} s") from None
        except BaseException:
            self.cancel()
            raise
        question = self._question
        return (
            self._peer._encoding.codec.decode(answer.data, expected_reply(question)) if is_message(question) else answer
        )

    def cancel(self) -> None:
        """Cancel the request, and wake the threads that wait for its answer; does nothing if it was answered."""
        self._peer._own()
        self.future.cancel()


class BlockingStream(Generic[T]):
    """The answers to a request-stream, in order: an iterator, and a context manager that cancels the rest.

    The request's timeout applies to each item; after it `RequestTimeout` is raised and the stream is cancelled.
    """

    def __init__(
        self, peer: BlockingPeer, stream_id: int, window: int, timeout: float | None, question: object
    ) -> None:
        self._peer = peer
        self._stream_id = stream_id
        self._timeout = timeout
        self._top_up = max(1, window // 2)
        self._taken = 0
        self._items: deque[Payload] = deque()
        self._changed = threading.Condition(peer._lock)
        self._over = False
        self._failure: LevadaError | None = None
        self._expected = expected_reply(question)
        self._messages = is_message(question)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        until = _until(self._timeout)
        with self._peer._own():
            while not self._items:
                if self._over:
                    if self._failure is not None:
                        raise again(self._failure)
                    raise StopIteration
                if not self._changed.wait(_left(until)):
                    self._give_up()
                    raise RequestTimeout(f"no item in {self._timeout:g} s")
            item: Any = self._items.popleft()
            self._taken += 1
            if self._taken >= self._top_up and not self._over:
                self._peer._grant(self._stream_id, self._taken)
                self._taken = 0
        return self._peer._encoding.codec.decode(item.data, self._expected) if self._messages else item  # type: ignore[no-any-return]

    def _give_up(self) -> None:
        self._peer._cancel(self._stream_id)
        self._over = True
        self._items.clear()
        self._refuse_more()

    def _refuse_more(self) -> None:
        """End this side's direction; a stream has none."""
        self._changed.notify_all()

    def close(self) -> None:
        """Cancel the stream, if it is not over, and end the iteration."""
        if self._peer._pid == os.getpid():
            with self._peer._lock:
                self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BlockingChannel(BlockingStream[T]):
    """A request-channel: a `BlockingStream` that can also send. One thread may send while another one iterates."""

    def __init__(
        self, peer: BlockingPeer, stream_id: int, window: int, timeout: float | None, question: object
    ) -> None:
        super().__init__(peer, stream_id, window, timeout, question)
        self._finished = self._refused = False

    def send(self, x: object, *, timeout: float | None = None) -> None:
        """Send one more payload, when the responder has given credit for it.

        Args:
            x: bytes, text or a `Payload`; a message, if the first one was.
            timeout: seconds to wait for credit and for room.

        Raises:
            RequestTimeout: there was no credit or room in time; nothing was sent, and the channel stays open.
            SenderFinished: `finish` was called before.
            ReceiverClosed: the responder takes no more, or the channel was closed here.
            RequestFailed: the responder has ended the channel with an error.
            ConnectionLost: the connection is over; `ConnectionClosed` if this side closed it.
        """
        peer, until = self._peer, _until(timeout)
        payload = peer._encoding.reply(x, messages=self._messages)
        with peer._own():
            peer._wait_for_room(until)
            while self._finished or self._refused or not peer._core.credit(self._stream_id):
                if self._finished:
                    raise SenderFinished("this side of the channel is finished")
                if self._refused:
                    raise again(self._failure) if self._failure is not None else ReceiverClosed("no more is taken")
                if not self._changed.wait(_left(until)):
                    raise RequestTimeout(f"no credit in {timeout:g} s; nothing was sent")
            peer._core.send_payload(self._stream_id, payload)
            peer._write()

    def finish(self) -> None:
        """Announce that there are no more payloads; needs no credit. You can still iterate over the answers. A second call does nothing."""
        with self._peer._own():
            if not self._finished and not self._refused and self._peer._end is None:
                self._peer._core.send_complete(self._stream_id)
                self._peer._write()
                self._peer._forget_if_over(self._stream_id)
            self._finished = True
            self._changed.notify_all()

    def fail(self, error: RequestFailed) -> None:
        """Tell the responder that this side has failed, by an ERROR with the code and text; needs no credit.

        It ends both directions (RS-68): the iteration raises this error, too. ReactiveSocket can only cancel (RX-57). Does nothing if the
        channel is over.

        Raises:
            LocalProtocolError: the code is not for streams, or the text is too long.
        """
        peer = self._peer
        with peer._own():
            if peer._end is None and peer._core.has_stream(self._stream_id):
                peer._core.send_error(self._stream_id, error.code or ErrorCode.APPLICATION_ERROR, error.data)
                peer._write()
                peer._forget_if_over(self._stream_id)
                self._over, self._failure = True, error
                self._items.clear()
                self._refuse_more()

    def _refuse_more(self) -> None:
        self._refused = True
        super()._refuse_more()


def _until(timeout: float | None) -> float | None:
    check_timeout(timeout)
    return None if timeout is None else time.monotonic() + timeout


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
