"""Traces of actors with OpenTelemetry. Needs the extra: ``pip install 'levada[otel]'``.

``ActorSystem(tracing=OpenTelemetry())`` records a span for each handler, ask, request to a peer and half of a channel, and lets contexts
cross mailboxes and connections. This uses OpenTelemetry's API only; the program sets up its SDK, see ``docs/how-to/trace.md``.

Names and attributes follow OpenTelemetry's semantic conventions for messaging and RPC:

* The handler of a told message is a ``CONSUMER`` span ``process Counter/Add``, a child of the current span of the sender. There is no
  ``PRODUCER`` span for each `Ref.tell`: it would last as long as an append to a list, and cost as much as the handler's.
* An ask is a ``CLIENT`` span ``Counter/Get``, and its handler a ``SERVER`` span below it.
* What an actor sends to itself, its timers included, begins a trace of its own, with a link to the old one. Otherwise an actor that
  polls would be one trace forever.
* A half of a channel is one span from its opening to its end, with the number of messages.

A span that ends with an exception has its class in ``error.type``, an event with its text, and the status error; a cancellation is no error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import attrs
import trio

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "levada.actors.otel needs opentelemetry-api: pip install 'levada[otel]'", name="opentelemetry"
    ) from error

from levada.framework import Ref, RemotePeer
from levada.framework.failure_log import FailureLog
from levada.framework.platform import PLATFORM
from levada.framework.text import printable, text_of
from levada.framework.tracing import Span, TraceHeaders, Tracing

__all__ = ["OpenTelemetry"]

logger = logging.getLogger("levada.actors.otel")

_SELF: Final = otel_context.create_key("levada-actor")
"""In a context: the actor whose handler it belongs to."""
_LINK: Final = otel_context.create_key("levada-link")
"""In a context without a span: the span of a peer whose trace is not continued."""
_MAX_TEXT: Final = 1000
"""Characters of an exception's text."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class _Span(Span):
    """A span of OpenTelemetry. A processor or an exporter that raises must not end an actor, so its errors are only logged."""

    __slots__ = ("_context", "_failures", "_span", "_token")

    def __init__(self, span: trace.Span, context: Context, failures: FailureLog) -> None:
        self._span = span
        self._context = context
        self._failures = failures
        self._token: Any = None

    @property
    def context(self) -> Context:
        return self._context

    def enter(self) -> _Span:
        """Make its context the current one."""
        self._token = otel_context.attach(self._context)
        return self

    def note(self, name: str, value: str | int) -> None:
        self._span.set_attribute(name, value)

    def leave(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            otel_context.detach(token)

    def end(self, error: BaseException | None = None) -> None:
        span = self._span
        try:
            if error is not None and span.is_recording():
                if isinstance(error, trio.Cancelled | GeneratorExit):
                    span.set_attribute("levada.cancelled", True)
                else:
                    self._fail(span, error)
            span.end()
        except Exception as failure:  # noqa: BLE001 - the user's processor
            self._failures.log(logger, failure, "a span was not exported", event="span_lost")

    @staticmethod
    def _fail(span: trace.Span, error: BaseException) -> None:
        kind, text = type(error), printable(text_of(error), _MAX_TEXT)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        span.set_attribute("error.type", name)
        span.add_event("exception", {"exception.type": name, "exception.message": text})
        span.set_status(Status(StatusCode.ERROR, text))


@attrs.define
class OpenTelemetry(Tracing):
    """Tracing with OpenTelemetry, for ``ActorSystem(tracing=OpenTelemetry())``.

    Without an SDK nothing is recorded, and contexts of peers are passed on.

    Args:
        provider: makes the tracer; None: the global one.
    """

    elsewhere: ClassVar[str] = "levada.actors.otel:OpenTelemetry"
    """Nodes have the global provider of their process."""

    provider: TracerProvider | None = None
    _tracer: trace.Tracer = attrs.field(init=False, repr=False)
    _failures: FailureLog = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        self._tracer = trace.get_tracer("levada", tracer_provider=self.provider)
        self._failures = FailureLog(PLATFORM.get().monotonic)  # spans of threads end in them

    def current(self) -> Context:
        """The current context of OpenTelemetry."""
        return otel_context.get_current()

    def handle(self, actor: Ref[Any], kind: str, message: object, context: object, *, asked: bool) -> Span:
        """Begin a ``CONSUMER`` or, for a question, a ``SERVER`` span."""
        parent, method = _context(context), type(message).__name__
        name, links = f"{kind}/{method}", []
        if asked:
            return self._begin(name, SpanKind.SERVER, _rpc("levada", name, actor.path), parent, actor=actor).enter()
        if parent.get(_SELF) is actor:
            links = [_link(parent)]
            parent = Context()
        attributes = {
            "messaging.system": "levada",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": actor.path,
            "messaging.destination.template": kind,
            "levada.message.type": method,
        }
        return self._begin(f"process {name}", SpanKind.CONSUMER, attributes, parent, links, actor=actor).enter()

    def ask(self, to: Ref[Any], kind: str, message: object) -> Span:
        """Begin a ``CLIENT`` span."""
        method = type(message).__name__
        name = f"{kind}/{method}" if kind else method
        return self._begin(name, SpanKind.CLIENT, _rpc("levada", name, to.path), self.current())

    def channel(self, half: Literal["send", "receive"], name: str, context: object) -> Span:
        """Begin a ``PRODUCER`` or ``CONSUMER`` span."""
        attributes = {
            "messaging.system": "levada",
            "messaging.operation.name": half,
            "messaging.operation.type": half,
            "messaging.destination.name": name,
        }
        kind = SpanKind.PRODUCER if half == "send" else SpanKind.CONSUMER
        return self._begin(f"{half} {name}", kind, attributes, _context(context))

    def request(self, protocol: str, method: str, peer: str) -> Span:
        """Begin a ``CLIENT`` span."""
        return self._begin(method, SpanKind.CLIENT, _rpc(protocol, method, peer), self.current())

    def serve(self, protocol: str, method: str, peer: str, context: object, links: Sequence[object] = ()) -> Span:
        """Begin a ``SERVER`` span."""
        found = [_link(_context(link)) for link in links]
        return self._begin(method, SpanKind.SERVER, _rpc(protocol, method, peer), _context(context), found).enter()

    def headers(self, context: object) -> TraceHeaders | None:
        """Return what W3C Trace Context sends."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, _context(context))
        return TraceHeaders.parse(carrier.get("traceparent"), carrier.get("tracestate", ""))

    def context(self, headers: TraceHeaders, peer: RemotePeer | None) -> Context:
        """Return the context of a trusted peer, or a link to an untrusted one, as at a public endpoint of OpenTelemetry."""
        carrier = {"traceparent": headers.traceparent, "tracestate": headers.tracestate}
        context = _PROPAGATOR.extract(carrier, Context())
        return (
            context if peer is None or peer.trace_trusted else otel_context.set_value(_LINK, _link(context), Context())
        )

    def _begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, str],
        parent: Context,
        links: list[Link] | None = None,
        *,
        actor: Ref[Any] | None = None,
    ) -> _Span:
        if _LINK in parent:
            links, parent = [*(links or ()), _link(parent)], Context()
        try:
            span = self._tracer.start_span(name, parent, kind, attributes, links)
        except Exception as failure:  # noqa: BLE001 - the user's sampler or processor
            self._failures.log(logger, failure, "a span was not started", event="span_lost")
            span = trace.INVALID_SPAN
        context = trace.set_span_in_context(span, parent)
        return _Span(span, context if actor is None else otel_context.set_value(_SELF, actor, context), self._failures)


def _context(context: object) -> Context:
    return context if isinstance(context, Context) else Context()


def _link(context: Context) -> Link:
    known = context.get(_LINK)
    return known if isinstance(known, Link) else Link(trace.get_current_span(context).get_span_context())


def _rpc(system: str, method: str, peer: str) -> dict[str, str]:
    return {"rpc.system": system, "rpc.method": method, "levada.peer": peer}
