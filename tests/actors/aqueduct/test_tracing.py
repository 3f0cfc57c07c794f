"""Traces over Aqueduct: contexts in stamps, between sides that both trace, and nothing on the wire otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from opentelemetry.trace import SpanKind
from tests.actors.carried import settings
from tests.actors.spans import Spans, begins_with_link, facts, ident, is_below, recorded

from levada.actors.aqueduct import Peer, PeerConfig, connect, serve
from levada.actors.aqueduct.envelopes import MAX_STAMP, TRACE_GREETING, read_stamp, stamped
from levada.actors.otel import OpenTelemetry
from levada.framework import ActorSystem, Identity, Ref, channel
from levada.framework.errors import DecodeError
from levada.framework.router import group, pull, round_robin
from levada.framework.tracing import TraceHeaders

from .conftest import Clerk, Do, Note, Parcel

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded() as spans:
        yield spans


@attrs.frozen
class Sides:
    """A connection between two systems."""

    client: ActorSystem
    server: ActorSystem
    peer: Peer[Any]
    clerk: Ref[Any]
    """An actor of the server, as the client sees it."""
    wire: list[bytes]
    """The payloads that arrived at the server."""


async def admit(_: Any) -> Identity:
    return Identity("client")


@asynccontextmanager
async def sides(
    client: OpenTelemetry | None, server: OpenTelemetry | None, *, trust: bool | None = True, admits: bool = False
) -> AsyncIterator[Sides]:
    """Begin a connection; the entrypoint's handler takes parcels and sends on the sender in each."""
    wire: list[bytes] = []

    async def handler(m: Any) -> None:
        if isinstance(m, Parcel):
            assert m.sender is not None
            async with trio.open_nursery():
                await m.sender.send(1)
                await m.sender.finish()

    config = PeerConfig(carrier=settings("memory", None))
    async with (
        ActorSystem(tracing=client) as here,
        ActorSystem(tracing=server) as there,
        serve(
            there,
            "aqueduct+memory://desk",
            handler,
            Any,
            expose=["clerk"],
            config=config,
            authenticate=admit if admits else None,
            trust_traces=trust,
        ) as listener,
        connect(here, listener.url, object, config=config) as peer,
    ):
        there.registry.register("clerk", there.spawn(Clerk, name="clerk"))
        (connection,) = listener._actor.connections
        read = connection.core.receive_stream_data

        def note(stream: int, data: bytes, fin: bool, now: float) -> Any:
            wire.append(bytes(data))
            return read(stream, data, fin, now)

        connection.core.receive_stream_data = note
        yield Sides(here, there, peer, await peer.lookup("clerk"), wire)


@pytest.mark.rule("RF-57")
async def test_rf57_tells_and_asks_to_remote_refs_go_on_with_the_trace(spans: Spans) -> None:
    """RF-57: contexts travel if both sides have said that they read them."""
    async with sides(spans.tracing(), spans.tracing()) as both:
        with spans.tracer.start_as_current_span("program"):
            both.clerk.tell(Note("a"))
            await both.clerk.send(Note("b"))
            assert await both.clerk.ask(Do("count")) == 2
    program = spans.one("program")
    assert [is_below(span, program) for span in spans.named("process Clerk/Note")] == [True, True]
    client, server = spans.one("Do", SpanKind.CLIENT), spans.one("Clerk/Do", SpanKind.SERVER)
    assert is_below(client, program)
    assert is_below(server, client)
    assert server.parent is not None
    assert server.parent.is_remote


@pytest.mark.rule("RF-57")
async def test_rf57_many_questions_and_questions_of_routers_keep_their_context(spans: Spans) -> None:
    """RF-57: also in numbered questions, and through a router on this side."""
    async with sides(spans.tracing(), spans.tracing()) as both:
        for routing in (round_robin(), pull()):
            both.client.groups.join(str(routing), both.clerk)
            router = both.client.spawn(group(str(routing), routing=routing))
            with spans.tracer.start_as_current_span("program"):
                router.tell(Note("a"))
                for _ in range(4):
                    await router.ask(Do("count"))
    programs = {ident(span).span_id for span in spans.named("program")}
    assert {span.parent.span_id for span in spans.named("process Clerk/Note") if span.parent} == programs
    clients = {ident(span).span_id for span in spans.all() if span.kind is SpanKind.CLIENT}
    servers = spans.named("Clerk/Do", SpanKind.SERVER)
    assert len(servers) == 8
    assert {span.parent.span_id for span in servers if span.parent} == clients


@pytest.mark.rule("RF-57")
async def test_rf57_a_message_to_the_entrypoint_is_served_and_its_channels_have_its_opener(spans: Spans) -> None:
    """RF-57: the handler of an entrypoint and the channels in a message belong to the sender's trace."""
    async with sides(spans.tracing(), spans.tracing()) as both:
        with spans.tracer.start_as_current_span("program"):
            sender, receiver = channel(int, name="numbers")
            await both.peer.send(Parcel(sender=sender))
        assert [n async for n in receiver] == [1]
    program = spans.one("program")
    served = spans.one("Parcel", SpanKind.SERVER)
    assert is_below(served, program)
    assert facts(served)["rpc.system"] == "aqueduct"
    receives = spans.one("receive numbers")
    (sends,) = [span for span in spans.all() if span.name.startswith("send ") and is_below(span, program)]
    assert is_below(receives, program)
    assert facts(sends)["levada.channel.messages"] == facts(receives)["levada.channel.messages"] == 1


@pytest.mark.parametrize(("here", "there"), [(False, False), (True, False), (False, True)])
@pytest.mark.rule("RF-57")
async def test_rf57_without_tracing_on_both_sides_no_payload_changes(spans: Spans, here: bool, there: bool) -> None:
    """RF-57: a peer that does not trace gets what it has always got."""

    async def run(client: OpenTelemetry | None, server: OpenTelemetry | None) -> tuple[list[bytes], bool]:
        async with sides(client, server) as both:
            both.wire.clear()
            with spans.tracer.start_as_current_span("program"):
                both.clerk.tell(Note("a"))
                assert await both.clerk.ask(Do("count")) == 1
            messages = [data for data in both.wire if b"tests.aqueduct" in data]  # acks come when they come
            return messages, TRACE_GREETING in (both.peer._connection.core.peer_headers or ())

    plain, _ = await run(None, None)
    assert b"".join(plain).count(b"tests.aqueduct") == 2
    wire, theirs = await run(spans.tracing() if here else None, spans.tracing() if there else None)
    assert b"".join(wire) == b"".join(plain)
    assert theirs is there


@pytest.mark.parametrize(
    ("trust", "admits", "goes_on"),
    [(None, False, False), (None, True, True), (False, True, False), (True, False, True)],
    ids=["anyone", "a known client", "none", "all"],
)
@pytest.mark.rule("RF-60")
async def test_rf60_a_listener_goes_on_with_the_traces_of_clients_that_it_trusts(
    spans: Spans, trust: bool | None, admits: bool, goes_on: bool
) -> None:
    """RF-60: by default those that have an identity; another client's message begins a trace here, with a link."""
    async with sides(spans.tracing(), spans.tracing(), trust=trust, admits=admits) as both:
        with spans.tracer.start_as_current_span("program"):
            assert await both.clerk.ask(Do("count")) == 0
    client, server = spans.one("Do", SpanKind.CLIENT), spans.one("Clerk/Do", SpanKind.SERVER)
    assert is_below(server, client) is goes_on
    assert begins_with_link(server, client) is not goes_on


async def test_what_a_handler_of_an_untrusted_message_causes_belongs_to_the_new_trace(spans: Spans) -> None:
    async with sides(spans.tracing(), spans.tracing(), trust=False) as both:
        with spans.tracer.start_as_current_span("program"):
            sender, receiver = channel(int, name="numbers")
            await both.peer.send(Parcel(sender=sender))
        assert [n async for n in receiver] == [1]
    program, served = spans.one("program"), spans.one("Parcel", SpanKind.SERVER)
    assert begins_with_link(served, program)
    sends = [span for span in spans.all() if span.name.startswith("send ")]
    assert sorted(begins_with_link(span, program) for span in sends) == [False, True]


@pytest.mark.parametrize("state", ["", "a=1,b=2", "x" * 512])
@pytest.mark.rule("RF-58")
def test_rf58_a_stamp_goes_before_the_payload(state: str) -> None:
    """RF-58: 0xC1, traceparent, the size of tracestate in two bytes, tracestate, payload."""
    headers = TraceHeaders(PARENT, state)
    data = stamped(headers, b"\x92\x00payload")
    assert data == b"\xc1" + PARENT.encode() + len(state).to_bytes(2, "big") + state.encode() + b"\x92\x00payload"
    assert len(data) <= MAX_STAMP + 9
    assert read_stamp(data) == (headers, b"\x92\x00payload")


@pytest.mark.rule("RF-59")
def test_rf59_what_is_in_a_stamp_is_checked() -> None:
    """RF-59: a bad context is ignored, a bad stamp is a message that cannot be read."""
    good = stamped(TraceHeaders(PARENT), b"rest")
    assert read_stamp(b"rest") == (None, b"rest")
    assert read_stamp(good.replace(b"a", b"\xff", 1)) == (None, b"rest")
    assert read_stamp(good.replace(b"b" * 16, b"0" * 16)) == (None, b"rest")
    for size in range(1, 58):
        with pytest.raises(DecodeError):
            read_stamp(good[:size])
    with pytest.raises(DecodeError, match="513 bytes"):
        read_stamp(good[:56] + (513).to_bytes(2, "big") + b"x" * 600)
