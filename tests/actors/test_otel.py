"""OpenTelemetry in one process: which spans there are, what their parents and links are, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from tests.actors.spans import Spans, facts, ident, is_below, recorded

from levada.actors.otel import OpenTelemetry
from levada.framework import (
    Actor,
    ActorStopped,
    ActorSystem,
    Asks,
    AskTimeout,
    ConfigurationError,
    Receiver,
    Ref,
    bounded,
    channel,
    handles,
    message,
    restart,
)
from levada.framework.router import pool, pull, round_robin
from levada.framework.tracing import TraceHeaders, current_tracing


@message
class Add:
    n: int


@message
class Get(Asks[int]):
    pass


@message
class Fail(Asks[int]):
    pass


@message
class Later:
    pass


@message
class Forward:
    to: Ref[Any]


@message
class Take:
    numbers: Receiver[int]


class Counter(Actor[Add | Get | Fail]):
    total: int = 0

    @handles
    def add(self, m: Add) -> None:
        self.total += m.n

    @handles
    async def get(self, m: Get) -> int:
        await trio.lowlevel.checkpoint()
        return self.total

    @handles
    def fail(self, m: Fail) -> int:
        raise ValueError("no such\nnumber")


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded() as spans:
        yield spans


@pytest.mark.parametrize(
    "mailbox", [None, bounded(4), bounded(4, overflow="drop_old")], ids=["unbounded", "bounded", "drop_old"]
)
async def test_the_handler_of_a_tell_is_a_consumer_below_what_the_sender_does(spans: Spans, mailbox: Any) -> None:
    async with spans.system() as system:
        counter = system.spawn(Counter, name="sums", mailbox=mailbox)
        with spans.tracer.start_as_current_span("program"):
            counter.tell(Add(1))
            await counter.send(Add(2))
        assert await counter.ask(Get()) == 3
    first, second = spans.named("process Counter/Add")
    for span in (first, second):
        assert is_below(span, spans.one("program"))
        assert span.kind is SpanKind.CONSUMER
        assert span.status.status_code is StatusCode.UNSET
        assert span.attributes == {
            "messaging.system": "levada",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": "/sums",
            "messaging.destination.template": "Counter",
            "levada.message.type": "Add",
        }


async def test_an_ask_is_a_client_and_its_handler_a_server_below(spans: Spans) -> None:
    async with spans.system() as system:
        counter = system.spawn(Counter, name="sums")
        with spans.tracer.start_as_current_span("program"):
            assert await counter.ask(Get()) == 0
    server, client = spans.named("Counter/Get")
    assert is_below(client, spans.one("program"))
    assert is_below(server, client)
    assert (client.kind, server.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    assert client.attributes == {"rpc.system": "levada", "rpc.method": "Counter/Get", "levada.peer": "/sums"}


class Worker(Actor[Add | Get]):
    """Its spans are children of its handler, after a wait and in a task too."""

    to: Ref[Any]
    tracer: trace.Tracer

    @handles
    async def add(self, m: Add) -> None:
        with self.tracer.start_as_current_span("before"):
            await trio.lowlevel.checkpoint()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._child)
        self.to.tell(m)

    async def _child(self) -> None:
        await trio.lowlevel.checkpoint()
        with self.tracer.start_as_current_span("in a task"):
            pass

    @handles
    def get(self, m: Get) -> int:
        self.start_soon(self._child)
        return 1


async def test_spans_of_a_handler_are_its_children_after_waits_and_in_its_tasks(spans: Spans) -> None:
    async with spans.system() as system:
        counter = system.spawn(Counter)
        worker = system.spawn(Worker, counter, spans.tracer)
        with spans.tracer.start_as_current_span("program"):
            worker.tell(Add(5))
        await trio.testing.wait_all_tasks_blocked()
        assert await counter.ask(Get()) == 5
    handler = spans.one("process Worker/Add")
    for name in ("before", "in a task", "process Counter/Add"):
        assert is_below(spans.one(name), handler), name


async def test_tasks_that_begin_before_the_nursery_is_open_have_the_context_of_their_handler(spans: Spans) -> None:
    async with spans.system() as system:
        worker = system.spawn(Worker, system.spawn(Counter), spans.tracer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.ask, Get())
            nursery.start_soon(worker.ask, Get())
        await trio.testing.wait_all_tasks_blocked()
    servers = [span for span in spans.named("Worker/Get") if span.kind is SpanKind.SERVER]
    parents = {task.parent.span_id for task in spans.named("in a task") if task.parent is not None}
    assert parents == {ident(server).span_id for server in servers}
    assert len(parents) == 2


class Poller(Actor[Later | Add]):
    """Tells itself, directly and by a timer."""

    @handles
    def later(self, m: Later) -> None:
        self.ref.tell(Add(1))

    @handles
    def add(self, m: Add) -> None:
        if m.n == 1:
            self.timers.once("again", 1, Add(2))


async def test_what_an_actor_sends_itself_is_a_new_trace_with_a_link(spans: Spans, autojump_clock: Any) -> None:
    async with spans.system() as system:
        with spans.tracer.start_as_current_span("program"):
            system.spawn(Poller).tell(Later())
        await trio.sleep(2)
    begun = spans.one("process Poller/Later")
    told, timed = spans.named("process Poller/Add")
    assert ident(begun).trace_id == ident(spans.one("program")).trace_id
    for span, cause in ((told, begun), (timed, told)):
        assert span.parent is None
        assert [link.context.span_id for link in span.links] == [ident(cause).span_id]
        assert ident(span).trace_id != ident(cause).trace_id


class Loop(Actor[Add | Get]):
    """Takes its messages itself."""

    tracer: trace.Tracer
    total: int = 0

    async def run(self) -> None:
        self.timers.once("more", 1, Add(4))
        async for m in self.mailbox:
            with self.tracer.start_as_current_span("in the loop"):
                await trio.lowlevel.checkpoint()
            if isinstance(m, Get):
                self.reply_later().send(self.total)
            else:
                self.total += m.n


async def test_a_loop_works_within_the_span_of_the_message_that_it_took(spans: Spans, autojump_clock: Any) -> None:
    async with spans.system() as system:
        loop = system.spawn(Loop, spans.tracer)
        with spans.tracer.start_as_current_span("program"):
            loop.tell(Add(1))
            assert await loop.ask(Get()) == 1
        await trio.sleep(2)
        assert await loop.ask(Get()) == 5
    client = next(span for span in spans.named("Loop/Get") if span.kind is SpanKind.CLIENT)
    server = next(span for span in spans.named("Loop/Get") if span.kind is SpanKind.SERVER)
    told, timed = spans.named("process Loop/Add")
    assert is_below(told, spans.one("program"))
    assert is_below(server, client)
    assert timed.parent is None
    works = spans.named("in the loop")
    assert [is_below(work, span) for work, span in zip(works, (told, server, timed), strict=False)] == [True] * 3


async def test_a_failing_handler_records_the_class_and_the_text_and_so_does_the_ask(spans: Spans) -> None:
    async with spans.system() as system:
        counter = system.spawn(Counter, supervise=restart())
        with pytest.raises(ActorStopped):
            await counter.ask(Fail())
        with spans.tracer.start_as_current_span("program"):
            counter.tell(Add(1))  # the actor is starting again
            counter.tell(Add(1))
        assert await counter.ask(Get()) == 2
    server, client = spans.named("Counter/Fail")
    assert server.status.status_code is client.status.status_code is StatusCode.ERROR
    assert facts(server)["error.type"] == "ValueError"
    assert facts(client)["error.type"] == "levada.framework.errors.ActorStopped"
    (event,) = server.events
    assert event.attributes == {"exception.type": "ValueError", "exception.message": "no such\\nnumber"}
    assert [is_below(span, spans.one("program")) for span in spans.named("process Counter/Add")] == [True, True]


async def test_a_cancelled_ask_is_no_error_and_a_late_one_is(spans: Spans, autojump_clock: Any) -> None:
    async def never(m: Get) -> int:
        await trio.sleep_forever()
        return 0

    async with spans.system() as system:
        ref = system.spawn(never)
        with trio.move_on_after(1):
            await ref.ask(Get(), timeout=None)
        with pytest.raises(AskTimeout):
            await ref.ask(Get(), timeout=1)
        ref.kill()
    cancelled, late, killed = spans.named("never/Get")
    assert (cancelled.kind, late.kind, killed.kind) == (SpanKind.CLIENT, SpanKind.CLIENT, SpanKind.SERVER)
    assert facts(cancelled)["levada.cancelled"] is facts(killed)["levada.cancelled"] is True
    assert cancelled.status.status_code is killed.status.status_code is StatusCode.UNSET
    assert facts(late)["error.type"] == "levada.framework.errors.AskTimeout"


@pytest.mark.parametrize("routing", [round_robin(), pull()], ids=["round_robin", "pull"])
async def test_a_router_is_not_in_the_trace(spans: Spans, routing: Any) -> None:
    async with spans.system() as system:
        router = system.spawn(pool(Counter, size=2, routing=routing))
        with spans.tracer.start_as_current_span("program"):
            router.tell(Add(1))
            await router.ask(Get())
    assert is_below(spans.one("process Counter/Add"), spans.one("program"))
    server, client = [span for span in spans.all() if "Get" in span.name]
    assert server.name == "Counter/Get"
    assert is_below(server, client)


class Stasher(Actor[Add | Later]):
    open: bool = False

    @handles
    def add(self, m: Add) -> None:
        if not self.open:
            self.stash(m)

    @handles
    def later(self, m: Later) -> None:
        self.open = True
        self.unstash_all()


async def test_a_stashed_message_keeps_its_context(spans: Spans) -> None:
    async with spans.system() as system:
        ref = system.spawn(Stasher)
        with spans.tracer.start_as_current_span("program"):
            ref.tell(Add(1))
        ref.tell(Later())
    assert [is_below(span, spans.one("program")) for span in spans.named("process Stasher/Add")] == [True, True]


async def test_threads_send_their_context(spans: Spans) -> None:
    async with spans.system() as system:
        counter = system.spawn(Counter)

        def work() -> int:
            with spans.tracer.start_as_current_span("thread"):
                counter.from_thread.tell(Add(3))
                return counter.from_thread.ask(Get())

        assert await trio.to_thread.run_sync(work) == 3
    server, client = spans.named("Counter/Get")
    assert is_below(spans.one("process Counter/Add"), spans.one("thread"))
    assert is_below(client, spans.one("thread"))
    assert is_below(server, client)


class Reader(Actor[Take | int]):
    got: list[int]

    @handles
    def take(self, m: Take) -> None:
        m.numbers.to_mailbox(self.ref)

    @handles
    def number(self, m: int) -> None:
        self.got.append(m)


async def test_each_half_of_a_channel_is_one_span_below_its_opener(spans: Spans) -> None:
    got: list[int] = []
    async with spans.system() as system:
        with spans.tracer.start_as_current_span("program"):
            sender, receiver = channel(int, name="numbers")
        with sender:
            for n in range(3):
                sender.send_nowait(n)
        assert [n async for n in receiver] == [0, 1, 2]
        with spans.tracer.start_as_current_span("other"):
            sender, receiver = channel(int, name="fed")
        system.spawn(Reader, got).tell(Take(receiver))
        await sender.send(7)
        await sender.finish()
    program = spans.one("program")
    sends, receives = spans.one("send numbers"), spans.one("receive numbers")
    assert is_below(sends, program)
    assert is_below(receives, program)
    assert facts(sends)["levada.channel.messages"] == facts(receives)["levada.channel.messages"] == 3
    assert facts(receives)["levada.channel.state"] == "finished"
    assert got == [7]
    assert is_below(spans.one("process Reader/int"), spans.one("other"))


async def test_a_closed_channel_says_how_many_messages_were_taken(spans: Spans) -> None:
    async with spans.system():
        sender, receiver = channel(int)
        for n in range(3):
            sender.send_nowait(n)
        receiver.receive_nowait()
        receiver.close()
    sends, receives = spans.one("send int"), spans.one("receive int")
    assert (facts(sends)["levada.channel.messages"], facts(receives)["levada.channel.messages"]) == (3, 1)
    assert facts(receives)["levada.channel.state"] == "receiver closed"


async def test_an_unsampled_context_crosses_too() -> None:
    seen: list[trace.SpanContext] = []

    async def look(m: Add) -> None:
        seen.append(trace.get_current_span().get_span_context())

    with recorded(ParentBased(ALWAYS_OFF)) as spans:
        async with spans.system() as system:
            with spans.tracer.start_as_current_span("program") as program:
                system.spawn(look).tell(Add(1))
        assert spans.all() == ()
    assert seen[0].trace_id == program.get_span_context().trace_id
    assert not seen[0].trace_flags.sampled


class BrokenStart(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise RuntimeError("broken")


class BrokenEnd(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("processor", "text"), [(BrokenStart(), "a span was not started"), (BrokenEnd(), "a span was not exported")]
)
async def test_a_processor_that_raises_ends_no_actor_and_does_not_fill_the_log(
    spans: Spans, processor: SpanProcessor, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans of threads count too."""
    spans.provider.add_span_processor(processor)
    async with spans.system() as system:
        counter = system.spawn(Counter)
        assert await trio.to_thread.run_sync(counter.from_thread.ask, Get()) == 0
        for _ in range(20):
            counter.tell(Add(1))
        assert await counter.ask(Get()) == 20
        assert system.statistics().failures == 0
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [text] * 10


async def test_nothing_stays_current_and_actors_get_no_context_of_their_own(spans: Spans) -> None:
    seen: list[bool] = []

    async def look(m: Later) -> None:
        seen.append(trace.get_current_span().get_span_context().is_valid)

    async with spans.system() as system:
        assert current_tracing() is system.tracing
        counter = system.spawn(Counter)
        for _ in range(3):
            await counter.ask(Get())
        assert counter.context is None  # type: ignore[attr-defined]
        assert not trace.get_current_span().get_span_context().is_valid
        system.spawn(look).tell(Later())
    assert current_tracing() is None
    assert seen == [True]


def test_strict_systems_are_not_traced(spans: Spans) -> None:
    with pytest.raises(ConfigurationError, match="choose one"):
        ActorSystem(strict=True, tracing=OpenTelemetry(spans.provider))


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "levada.actors.otel")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'levada\[otel\]'"):
        import levada.actors.otel  # noqa: F401


@pytest.mark.parametrize(
    ("parent", "state", "parsed"),
    [
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x=1", "x=1"),
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-00", "x" * 513, ""),
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-00", "x\n", ""),
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-00", 7, ""),
        ("00-" + "0" * 32 + "-" + "b" * 16 + "-01", "", None),
        ("00-" + "a" * 32 + "-" + "0" * 16 + "-01", "", None),
        ("ff-" + "a" * 32 + "-" + "b" * 16 + "-01", "", None),
        ("00-" + "A" * 32 + "-" + "b" * 16 + "-01", "", None),
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01\n", "", None),
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01-more", "", None),
        (b"00", "", None),
        (None, "", None),
    ],
)
def test_headers_of_peers_are_checked(parent: object, state: object, parsed: str | None) -> None:
    headers = TraceHeaders.parse(parent, state)
    assert (headers and headers.tracestate) == parsed
