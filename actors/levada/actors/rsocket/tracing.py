"""Traces of requests: a span on each side, and the context in the requester's metadata, as Zipkin's entry (EXT-5).

Only composite metadata has room for it. A responder that does not know the entry skips it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from inspect import isawaitable
from typing import Any

from levada.framework import Receiver
from levada.framework.errors import DecodeError
from levada.framework.text import printable
from levada.framework.tracing import Span, TraceHeaders, Tracing
from levada.transports.rsocket import Payload
from levada.transports.rsocket.extensions import CompositeMetadata, ZipkinTracing

from .encoding import COMPOSITE, Encoding, Metadata
from .requests import Request, Responder

__all__ = ["Calling", "TracedResponder", "headers_of", "zipkin"]

_MAX_NAME = 100


def zipkin(headers: TraceHeaders) -> ZipkinTracing:
    """Return a context as an entry of metadata; it has no place for ``tracestate``. Source: EXT-5, EXT-7."""
    _, trace, span, flags = headers.traceparent.split("-")
    return ZipkinTracing(trace_id=int(trace, 16), span_id=int(span, 16), sampled=bool(int(flags, 16) & 1))


def headers_of(entry: ZipkinTracing | None) -> TraceHeaders | None:
    """Return the context in an entry; None if it has no ids, or one of them is 0. Source: EXT-5, EXT-7."""
    if entry is None or entry.trace_id is None or entry.span_id is None:
        return None
    flags = "01" if entry.sampled or entry.debug else "00"
    return TraceHeaders.parse(f"00-{entry.trace_id:032x}-{entry.span_id:016x}-{flags}")


class Calling:
    """A request to a peer: ``with Calling(…) as calling`` ends its span with an error, or where `until` says.

    Args:
        tracing: of the system.
        peer: for the span.
        x: the data.
        route: of the request.
    """

    def __init__(self, tracing: Tracing, peer: str, x: object, route: str | None) -> None:
        self._tracing = tracing
        self._span = tracing.request("rsocket", route or type(x).__name__, peer)
        self._goes_on = False

    def payload(self, encoding: Encoding, x: object, route: str | None, metadata: Metadata) -> Payload:
        """Make the payload as `Encoding.request` does, with the context in its metadata. Source: EXT-7."""
        payload = encoding.request(x, route, metadata)
        headers = self._tracing.headers(self._span.context)
        if headers is None or encoding.metadata_mime_type != COMPOSITE:
            return payload
        return Payload(payload.data, (payload.metadata or b"") + CompositeMetadata.of(zipkin(headers)).encode())

    def until(self, receiver: Receiver[Any]) -> None:
        """Extend the span until a receiver ends."""
        self._goes_on = True
        receiver.on_terminated(lambda _, error: self._span.end(error))

    def __enter__(self) -> Calling:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._goes_on:
            self._span.end(error)


class TracedResponder:
    """Answers requests within spans."""

    def __init__(self, responder: Responder, tracing: Tracing) -> None:
        self._responder = responder
        self._tracing = tracing

    def __call__(self, request: Request) -> Any:
        """Begin the span of a request; it ends with the answer."""
        tracing = self._tracing
        try:
            headers, route = headers_of(request.tracing), request.route
        except DecodeError:
            headers, route = None, ""
        context = None if headers is None else tracing.context(headers, request.peer)
        name = printable(route, _MAX_NAME) or request.kind.name.lower()
        span = tracing.serve("rsocket", name, str(request.peer), context)
        try:
            result = self._responder(request)
        except BaseException as error:
            span.__exit__(None, error, None)
            raise
        if type(result) is not Payload and isawaitable(result) and not isinstance(result, Receiver):
            return self._await(span, result)
        return self._answered(span, result)

    async def _await(self, span: Span, answer: Any) -> Any:
        try:
            result = await answer
        except BaseException as error:
            span.__exit__(None, error, None)
            raise
        return self._answered(span, result)

    def _answered(self, span: Span, result: Any) -> Any:
        if isinstance(result, AsyncGenerator):
            return self._items(span, result)
        span.leave()
        if isinstance(result, Receiver):
            result.on_terminated(lambda _, error: span.end(error))
        else:
            span.end()
        return result

    async def _items(self, span: Span, items: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        with span:
            async with aclosing(items):
                async for item in items:
                    yield item
