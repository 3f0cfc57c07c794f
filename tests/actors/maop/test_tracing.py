"""Traces over MAOP: a span for each operation on both sides, and the context in a field of its header."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.trace import SpanKind, StatusCode
from tests.actors.carried import settings
from tests.actors.spans import Spans, begins_with_link, facts, is_below, recorded

from levada.actors.maop import Call, OperationFailed, Peer, PeerConfig, connect, serve
from levada.actors.otel import OpenTelemetry
from levada.framework import ActorSystem, Identity
from levada.transports.maop.frames import Message, Request, decode_operation

PARENT = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"


async def admit(_: Any) -> Identity:
    return Identity("client")


async def echo(call: Call) -> bytes:
    return await call.body()


async def fail(call: Call) -> bytes:
    raise ValueError("no")


HANDLERS = {2000: echo, 2001: fail}


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded() as spans:
        yield spans


@asynccontextmanager
async def served(
    client: OpenTelemetry | None, server: OpenTelemetry | None, *, trust_traces: bool = True
) -> AsyncIterator[tuple[Peer, list[bytes]]]:
    """Begin a connection between two systems; the list has what the client sends."""
    wire: list[bytes] = []
    config = PeerConfig(carrier=settings("memory", None))
    async with (
        ActorSystem(tracing=client) as here,
        ActorSystem(tracing=server) as there,
        serve(
            there, "maop+memory://desk", HANDLERS, authenticate=admit, config=config, trust_traces=trust_traces
        ) as listener,
        connect(here, listener.url, config=config) as peer,
    ):
        (connection,) = listener._actor.connections
        receive = connection.core.receive_stream_data

        def note(stream: int, data: bytes, fin: bool, now: float) -> Any:
            wire.append(bytes(data))
            return receive(stream, data, fin, now=now)

        connection.core.receive_stream_data = note
        yield peer, wire


@pytest.mark.rule("MA-138")
async def test_ma138_an_operation_is_a_client_span_and_its_handler_a_server_span_below(spans: Spans) -> None:
    """MA-138: with the capability of both sides, headers carry the context of the operation."""
    async with served(spans.tracing(), spans.tracing()) as (peer, _):
        with spans.tracer.start_as_current_span("program"):
            assert await peer.request(2000, b"x") == b"x"
            async with peer.open_request(2000, b"y") as reply:
                assert [bytes(piece) async for piece in reply] == [b"y"]
    clients, servers = spans.named("request 2000", SpanKind.CLIENT), spans.named("request 2000", SpanKind.SERVER)
    assert [is_below(span, spans.one("program")) for span in clients] == [True, True]
    assert [is_below(server, client) for server, client in zip(servers, clients, strict=True)] == [True, True]
    assert facts(clients[0])["rpc.system"] == facts(servers[0])["rpc.system"] == "maop"


@pytest.mark.handler_fails
async def test_a_failed_operation_is_an_error_on_both_sides(spans: Spans) -> None:
    async with served(spans.tracing(), spans.tracing()) as (peer, _):
        with pytest.raises(OperationFailed):
            await peer.request(2001)
    client, server = spans.one("request 2001", SpanKind.CLIENT), spans.one("request 2001", SpanKind.SERVER)
    assert client.status.status_code is server.status.status_code is StatusCode.ERROR
    assert facts(server)["error.type"] == "ValueError"
    assert facts(client)["error.type"] == "levada.actors.maop.errors.OperationFailed"


@pytest.mark.rule("MA-138")
@pytest.mark.parametrize(("here", "there"), [(False, False), (True, False), (False, True)])
async def test_ma138_without_tracing_on_both_sides_no_header_changes(spans: Spans, here: bool, there: bool) -> None:
    """MA-138: a peer that does not announce the capability sees no field."""

    async def run(client: OpenTelemetry | None, server: OpenTelemetry | None) -> list[bytes]:
        async with served(client, server) as (peer, wire):
            with spans.tracer.start_as_current_span("program"):
                await peer.request(2000, b"x")
            return [data for data in wire if data[:1] == b"\x01"]

    plain = await run(None, None)
    assert len(plain) == 1
    assert await run(spans.tracing() if here else None, spans.tracing() if there else None) == plain


async def test_a_listener_may_trust_no_caller(spans: Spans) -> None:
    async with served(spans.tracing(), spans.tracing(), trust_traces=False) as (peer, _):
        await peer.request(2000, b"x")
    name = "request 2000"
    assert begins_with_link(spans.one(name, SpanKind.SERVER), spans.one(name, SpanKind.CLIENT))


@pytest.mark.rule("MA-138")
@pytest.mark.parametrize("trace", [b"", PARENT, PARENT + b"a=1"])
@pytest.mark.parametrize("key", [None, b"", b"k" * 16])
def test_ma138_the_field_is_the_last_of_a_header(key: bytes | None, trace: bytes) -> None:
    """MA-138: two octets of length, and 0 or 55 to 567 octets."""
    for operation in (Message(7, 1, 2, key, trace), Request(7, 1, 2, 0, 5000, key, trace)):
        data = operation.encode()
        assert data.endswith(len(trace).to_bytes(2, "big") + trace)
        assert decode_operation(data, idempotency=key is not None, traces=True) == (operation, len(data))
        for cut in range(len(data)):
            assert decode_operation(data[:cut], idempotency=key is not None, traces=True) is None
        with pytest.raises(ValueError, match="MA-138"):
            decode_operation(
                data[: len(data) - len(trace) - 2] + b"\x00\x36" + b"x" * 54, idempotency=key is not None, traces=True
            )
