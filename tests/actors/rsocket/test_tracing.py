"""Traces over RSocket: a span for each request on both sides, and the context in composite metadata."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.trace import SpanKind, StatusCode
from tests.actors.spans import Spans, begins_with_link, facts, is_below, recorded

from levada.actors.otel import OpenTelemetry
from levada.actors.rsocket import ConnectedPeer, Request, RequestFailed
from levada.actors.rsocket.tracing import headers_of, zipkin
from levada.framework import Actor, ActorSystem, Asks, channel, handles, message
from levada.framework.tracing import TraceHeaders
from levada.transports.rsocket.extensions import CompositeMetadata, Routing, ZipkinTracing

from .conftest import connect, serve

TRACE, SPAN = "0123456789abcdef" * 2, "fedcba9876543210"


@message("tests.rsocket.tracing.Square")
class Square(Asks[int]):
    n: int


class Desk(Actor[Square]):
    @handles
    def square(self, m: Square) -> int:
        return m.n**2


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded() as spans:
        yield spans


@asynccontextmanager
async def served(
    handler: Any, client: OpenTelemetry | None, server: OpenTelemetry | None, *, trust_traces: bool | None = True
) -> AsyncIterator[ConnectedPeer]:
    """Begin a connection between two systems; a handler that is an actor class becomes an actor of the server."""
    async with ActorSystem(tracing=client) as here, ActorSystem(tracing=server) as there:
        handler = there.spawn(handler) if handler is Desk else handler
        serving = serve(there, "rsocket+memory://desk", handler, trust_traces=trust_traces)
        async with serving as listener, connect(here, listener.url) as peer:
            assert isinstance(peer, ConnectedPeer)
            yield peer


async def echo(request: Request) -> bytes:
    return request.data


async def fail(request: Request) -> bytes:
    raise RequestFailed("no", code=0x301)


async def count(request: Request) -> Any:
    sender, receiver = channel(bytes)
    for n in range(3):
        sender.send_nowait(b"%d" % n)
    sender.finish_nowait()
    return receiver


async def generate(request: Request) -> AsyncIterator[bytes]:
    for n in range(3):
        yield b"%d" % n


@pytest.mark.rule("EXT-7")
async def test_ext7_a_request_is_a_client_span_and_its_handler_a_server_span_below(spans: Spans) -> None:
    """EXT-7: the context travels in the Zipkin entry of the request."""
    async with served(echo, spans.tracing(), spans.tracing()) as peer:
        with spans.tracer.start_as_current_span("program"):
            assert (await peer.request_response(b"x", route="echo")).data == b"x"
            await peer.fire_and_forget(b"x", route="log")
    client, server = spans.one("echo", SpanKind.CLIENT), spans.one("echo", SpanKind.SERVER)
    assert is_below(client, spans.one("program"))
    assert is_below(server, client)
    assert server.parent is not None
    assert server.parent.is_remote
    assert facts(client)["rpc.system"] == facts(server)["rpc.system"] == "rsocket"
    assert is_below(spans.one("log", SpanKind.SERVER), spans.one("log", SpanKind.CLIENT))


async def test_an_actor_that_answers_is_below_the_request(spans: Spans) -> None:
    async with served(Desk, spans.tracing(), spans.tracing()) as peer:
        assert await peer.request_response(Square(3)) == 9
    server = spans.one("request_response", SpanKind.SERVER)
    assert is_below(server, spans.one("Square", SpanKind.CLIENT))
    assert is_below(spans.one("Desk/Square", SpanKind.SERVER), server)


@pytest.mark.parametrize("handler", [count, generate])
async def test_a_stream_is_one_span_on_each_side(spans: Spans, handler: Any) -> None:
    async with served(handler, spans.tracing(), spans.tracing()) as peer:
        receiver = await peer.request_stream(b"", route="numbers")
        assert spans.named("numbers", SpanKind.CLIENT) == []
        assert [item.data async for item in receiver] == [b"0", b"1", b"2"]
    assert is_below(spans.one("numbers", SpanKind.SERVER), spans.one("numbers", SpanKind.CLIENT))


async def test_a_failed_request_is_an_error_on_both_sides(spans: Spans) -> None:
    async with served(fail, spans.tracing(), spans.tracing()) as peer:
        with pytest.raises(RequestFailed):
            await peer.request_response(b"x", route="fail")
    for span in spans.named("fail"):
        assert span.status.status_code is StatusCode.ERROR
        assert facts(span)["error.type"].startswith("levada.actors.rsocket.errors.")


@pytest.mark.rule("EXT-7")
@pytest.mark.parametrize(("here", "there"), [(False, False), (True, False), (False, True)])
async def test_ext7_a_side_that_does_not_trace_sends_and_skips_no_entry(spans: Spans, here: bool, there: bool) -> None:
    """EXT-7: without tracing the metadata is as always; a responder without tracing answers as always."""
    seen: list[bytes | None] = []

    async def look(request: Request) -> bytes:
        seen.append(request.metadata)
        return request.route.encode()

    async with served(look, spans.tracing() if here else None, spans.tracing() if there else None) as peer:
        with spans.tracer.start_as_current_span("program"):
            assert (await peer.request_response(b"x", route="look")).data == b"look"
    plain = CompositeMetadata.of(Routing("look")).encode()
    assert seen[0] is not None
    assert seen[0].startswith(plain)
    assert (seen[0] == plain) is not here
    if there:
        assert spans.one("look", SpanKind.SERVER).parent is None


async def test_a_requester_without_an_identity_is_not_trusted(spans: Spans) -> None:
    async with served(echo, spans.tracing(), spans.tracing(), trust_traces=None) as peer:
        await peer.request_response(b"x", route="echo")
    assert begins_with_link(spans.one("echo", SpanKind.SERVER), spans.one("echo", SpanKind.CLIENT))


async def test_a_malformed_entry_leaves_the_request_as_it_is(spans: Spans) -> None:
    broken = CompositeMetadata.of(Routing("echo")).encode() + CompositeMetadata.of(ZipkinTracing(debug=True)).encode()
    async with served(echo, None, spans.tracing()) as peer:
        assert (await peer.request_response(b"x", metadata=broken[:-1] + b"\xff")).data == b"x"
    assert spans.one("request_response", SpanKind.SERVER).parent is None


@pytest.mark.rule("EXT-7")
def test_ext7_ids_and_sampling_both_ways() -> None:
    """EXT-7: trace, span and sampling of traceparent are those of the entry; an entry without ids is no context."""
    for flags, sampled in (("01", True), ("00", False)):
        headers = TraceHeaders(f"00-{TRACE}-{SPAN}-{flags}")
        entry = zipkin(headers)
        assert (entry.trace_id, entry.span_id, entry.sampled) == (int(TRACE, 16), int(SPAN, 16), sampled)
        assert headers_of(ZipkinTracing.decode(entry.encode())) == headers
    assert headers_of(None) is headers_of(ZipkinTracing(sampled=True)) is None
    assert headers_of(ZipkinTracing(trace_id=0, span_id=1)) is None
    short = headers_of(ZipkinTracing(trace_id=7, span_id=1, debug=True))
    assert short == TraceHeaders(f"00-{7:032x}-{1:016x}-01")
