"""Messages and requests of every shape: what is sent, what arrives, what is answered."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.actors import carried
from trio.testing import MockClock

from levada.actors.maop import (
    MESSAGE_TYPE,
    Call,
    Done,
    GateConfig,
    Handler,
    HandlerSpec,
    MaopConfig,
    OperationActor,
    OperationFailed,
    OperationRefused,
    PeerConfig,
    Refuse,
    Reply,
    TestPlan,
)
from levada.framework.errors import ConfigurationError, LocalProtocolError
from levada.transports.carriers import MemoryConfig

from .conftest import CLIENT, NOTHING, Answer, Ends, Question, Start, echo, nothing, settled

BIG = bytes(range(256)) * 4096  # a megabyte that shows where a piece went
OPEN = HandlerSpec(allow_undefined_length=True)
STREAMING = HandlerSpec(allow_undefined_length=True, streaming=True, max_payload=2**30)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


class Keeper:
    """A handler that keeps what it got."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.pieces: list[int] = []

    async def whole(self, call: Call) -> None:
        self.bodies.append(await call.body())

    async def piecewise(self, call: Call) -> None:
        got = b""
        async for chunk in call:
            self.pieces.append(len(chunk))
            got += chunk
        self.bodies.append(got)


@pytest.mark.parametrize("body", [b"", b"x", b"hello", BIG, bytearray(b"array"), memoryview(b"view")])
async def test_a_message_arrives_as_it_was_sent(start: Start, body: Any, autojump_clock: MockClock) -> None:
    keeper = Keeper()
    async with start({100: keeper.whole}) as ends:
        done = await ends.peer.message(100, body)
        assert isinstance(done, Done)
        assert keeper.bodies == [bytes(body)]
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.parametrize("body", [b"", b"hello", BIG])
async def test_a_request_is_answered_by_octets(start: Start, body: bytes, autojump_clock: MockClock) -> None:
    async with start({101: echo}) as ends:
        assert await ends.peer.request(101, body) == body
        assert await ends.peer.request(101, body, response=Reply) == Reply(body, "application/octet-stream")
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.rule("MA-98")
async def test_ma98_no_answer_is_a_success_without_content_type(start: Start) -> None:
    """A Response of length 0 means no body."""
    async with start({101: nothing}) as ends:
        assert await ends.peer.request(101, response=Reply) == Reply(b"", None)


async def test_the_server_calls_the_client(start: Start) -> None:
    """MA-29: both ends may start operations once the client was let in."""
    async with start({}, client={"handlers": {7: echo}}) as ends:
        assert await ends.caller.request(7, b"are you there?") == b"are you there?"
        assert ends.caller.identity == CLIENT
        assert ends.peer.identifier == "client-1"


@pytest.mark.rule("MA-29")
async def test_ma29_a_handler_calls_back_on_the_same_connection(start: Start) -> None:
    """Both ends may start Messages and Requests."""

    async def relay(call: Call) -> bytes:
        return b"<" + await call.peer.request(7, await call.body()) + b">"

    async with start({101: relay}, client={"handlers": {7: echo}}) as ends:
        assert await ends.peer.request(101, b"hop") == b"<hop>"


async def test_files_travel_by_their_length(start: Start, tmp_path: Path) -> None:
    keeper = Keeper()
    file = tmp_path / "body"
    file.write_bytes(BIG)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")

    async def send(call: Call) -> Any:
        return file if (await call.body()) == b"plain" else Reply(file, "image/png")

    async with start({100: keeper.whole, 101: send}) as ends:
        await ends.peer.message(100, file)
        await ends.peer.message(100, empty)
        assert keeper.bodies == [BIG, b""]
        assert await ends.peer.request(101, b"plain") == BIG
        assert await ends.peer.request(101, b"typed", response=Reply) == Reply(BIG, "image/png")


async def test_iterators_travel_by_undefined_length(start: Start) -> None:
    """MA-57: any number of Blocks, also none, then the true sum."""
    keeper = Keeper()
    seen: list[int | None] = []

    async def keep(call: Call) -> None:
        seen.append(call.length)
        await keeper.whole(call)

    async with start({100: Handler(keep, spec=OPEN), 101: Handler(echo, spec=OPEN)}) as ends:
        await ends.peer.message(100, pieces(b"one", b"", b"two"))
        await ends.peer.message(100, pieces())
        await ends.peer.message(100, pieces(b"six", b"seven"), length=8)
        assert keeper.bodies == [b"onetwo", b"", b"sixseven"]
        assert seen == [None, None, 8]
        assert await ends.peer.request(101, pieces(b"a", BIG)) == b"a" + BIG


@pytest.mark.rule("MA-56")
@pytest.mark.parametrize("parts", [(b"short",), (b"much too long",)])
async def test_ma56_an_iterator_that_breaks_its_promise_fails_here(start: Start, parts: tuple[bytes, ...]) -> None:
    """The Blocks add up to exactly N."""
    keeper = Keeper()
    async with start({100: keeper.whole}) as ends:
        with pytest.raises(LocalProtocolError, match=r"bytes of 8|8 bytes announced"):
            await ends.peer.message(100, pieces(*parts), length=8)
        assert keeper.bodies == []


async def test_message_classes_travel(start: Start, autojump_clock: MockClock) -> None:
    async def answer(call: Call) -> Answer:
        return Answer(call.decode(Question).number + 1)

    async with start({104: answer}) as ends:
        assert await ends.peer.request(104, Question(4), response=Answer) == Answer(5)
        assert (await ends.peer.request(104, Question(4), response=Reply)).content_type == MESSAGE_TYPE
        await settled()
        assert ends.server.core.statistic.responses_unacked == 0


async def test_a_streaming_handler_gets_pieces_as_they_come(start: Start) -> None:
    keeper = Keeper()
    gate = trio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"first"
        await gate.wait()
        yield b"second"

    async def piecewise(call: Call) -> None:
        assert call.deadline == math.inf
        async for chunk in call:
            keeper.bodies.append(bytes(chunk))
            gate.set()

    async with start({100: Handler(piecewise, spec=STREAMING)}) as ends:
        await ends.peer.message(100, slowly())
        assert keeper.bodies == [b"first", b"second"]


@pytest.mark.rule("MA-118")
@carried.memory_only
async def test_ma118_a_slow_streaming_handler_holds_the_sender_back(start: Start, autojump_clock: MockClock) -> None:
    """What the handler has not taken is bounded; the sender waits."""
    sent = [0]
    most = [0]

    async def source() -> AsyncIterator[bytes]:
        for _ in range(64):
            sent[0] += 65_536
            yield bytes(65_536)

    async def slow(call: Call) -> None:
        taken = 0
        async for chunk in call:
            taken += len(chunk)
            most[0] = max(most[0], sent[0] - taken)
            await trio.sleep(0.1)

    async with start(
        {100: Handler(slow, spec=STREAMING)}, core=MaopConfig(gate=GateConfig(stream_window=262_144))
    ) as ends:
        await ends.peer.message(100, source())
        assert sent[0] == 64 * 65_536
        assert most[0] < 262_144 + 8 * 65_536  # the window, and what the carrier and one read hold


@carried.memory_only
async def test_a_streamed_answer_is_taken_piece_by_piece(start: Start, autojump_clock: MockClock) -> None:
    sent = [0]
    closed: list[bool] = []

    async def produce(call: Call) -> AsyncIterator[bytes]:
        async def give() -> AsyncIterator[bytes]:
            try:
                for _ in range(100):
                    sent[0] += 65_536
                    yield bytes(65_536)
            finally:
                closed.append(True)

        return give()

    async with start({103: produce}, core=MaopConfig(gate=GateConfig(stream_window=131_072))) as ends:
        async with ends.peer.open_request(103) as reply:
            assert (reply.content_type, reply.length) == ("application/octet-stream", None)
            assert reply.took == 0.0
            await trio.sleep(1)
            ahead = sent[0]
            assert ahead < 131_072 + 8 * 65_536
            total = 0
            async for chunk in reply:
                total += len(chunk)
            assert total == 100 * 65_536
        assert closed == [True]
        async with ends.peer.open_request(103) as reply:
            assert len(await anext(reply)) > 0  # and leave: that cancels it
        await settled()
        assert closed == [True, True]
        assert ends.left() == NOTHING


async def test_a_streamed_answer_of_known_length(start: Start) -> None:
    async def produce(call: Call) -> Reply:
        return Reply(pieces(b"abc", b"def"), "text/plain", 6)

    async with start({103: produce}) as ends, ends.peer.open_request(103, b"") as reply:
        assert (reply.content_type, reply.length) == ("text/plain", 6 + 11)
        assert [bytes(chunk) async for chunk in reply] in ([b"abc", b"def"], [b"abcdef"])


@pytest.mark.rule("MA-99a")
async def test_ma99a_other_response_ids_have_the_applications_own_layout(start: Start) -> None:
    """The Success layout applies when the id is 0, or where both ends declare it."""
    spec = HandlerSpec(responses={0, 42, 43}, success_layout={43})
    async with start({101: Handler(echo, spec=spec)}) as ends:
        assert await ends.peer.request(101, b"own", response_id=42, response=Reply) == Reply(b"own", None)
        typed = await ends.peer.request(101, b"typed", response_id=43, success_layout=True, response=Reply)
        assert typed == Reply(b"typed", "application/octet-stream")
        with pytest.raises(OperationFailed) as failed:
            await ends.peer.request(101, b"", response_id=7)
        assert failed.value.code == 8


@pytest.mark.rule("MA-114")
async def test_ma114_a_handler_knows_its_operation(start: Start, scheme: str, autojump_clock: MockClock) -> None:
    """Session, identity, metadata, stream, msg_id, priority, deadline, length, idempotency key."""
    seen: dict[str, Any] = {}

    async def look(call: Call) -> None:
        seen.update(
            msg_id=call.msg_id,
            request=call.is_request,
            length=call.length,
            priority=call.priority,
            key=call.idempotency,
            deadline=call.deadline - trio.current_time(),
            pairs=call.peer.pairs["region"],
            identity=call.peer.identity,
            session=call.peer.session_id,
            response_id=call.response_id,
            stream=call.stream_id,
        )

    async with start({101: look}, client={"pairs": {"region": "eu"}}) as ends:
        await ends.peer.request(101, b"body", priority=7, timeout=2.5, idempotency=bytes(16))
        assert seen == {
            "msg_id": 101,
            "request": True,
            "length": 4,
            "priority": 7,
            "key": bytes(16),
            "deadline": 2.5,
            "pairs": "eu",
            "identity": ends.caller.identity,
            "session": ends.peer.session_id,
            "response_id": 0,
            "stream": 4,
        }
        assert ends.peer.version == (1, 0, 0)
        assert ends.peer.vendor == "levada"
        assert ends.peer.takes_idempotency
        assert ends.peer.info.scheme == scheme
        assert not ends.peer.closed
        await ends.peer.message(101, timeout=5)
        assert (seen["request"], seen["deadline"]) == (False, math.inf)


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
async def test_the_native_test_passes_its_own_checks(start: Start, mode: int, multi: bool) -> None:
    async with start({}) as ends:
        for exp in (0, 3, 6, 11):
            assert await ends.peer.test(TestPlan(mode=mode, multi=multi, exp=exp)) is None
            assert await ends.caller.test(TestPlan(mode=mode, multi=multi, exp=exp)) is None


@pytest.mark.parametrize("chunk", [(1, 1), (1, 3), (1, 100)])
async def test_octets_may_come_in_any_pieces(start: Start, chunk: tuple[int, int], autojump_clock: MockClock) -> None:
    keeper = Keeper()
    carrier = MemoryConfig(shape="connection", chunk=chunk, seed=chunk[1])
    handlers = {100: Handler(keeper.piecewise, spec=STREAMING), 101: echo}
    async with start(handlers, carrier=carrier) as ends:
        body = bytes(range(256)) * 4
        await ends.peer.message(100, pieces(b"first", body))
        assert await ends.peer.request(101, body, idempotency=bytes(16)) == body
        with pytest.raises(OperationRefused):
            await ends.peer.message(999, body)
        async with ends.peer.open_request(101, body) as reply:
            assert b"".join([chunk async for chunk in reply]) == body
        assert keeper.bodies == [b"first" + body]
        await settled()
        assert ends.left() == NOTHING


# ---------------------------------------------------------------- actors


class Account(OperationActor):
    """Keeps what happened, by class: each operation has an object of its own."""

    said: list[str]
    made: int = 0

    def __attrs_post_init__(self) -> None:
        self.said.append("made")

    async def before_execute(self, call: Call) -> None:
        self.made += 1
        self.said.append(f"before {call.length}")

    async def execute(self, call: Call) -> bytes:
        self.said.append(f"execute {self.made}")
        if call.msg_id == 106:
            await trio.sleep_forever()
        return await call.body()

    async def on_cancel(self, call: Call, reason: str) -> None:
        self.said.append("cancelled")


@pytest.mark.rule("MA-113")
async def test_ma113_an_actor_for_each_operation(start: Start, autojump_clock: MockClock) -> None:
    """BeforeExecute at the gate, execute with the body, onCancel exactly once and never after success."""
    said: list[str] = []

    def make() -> Account:
        return Account(said)

    handlers = {105: Handler(make, spec=HandlerSpec(gated=True)), 106: Handler(make)}
    async with start(handlers) as ends:
        assert await ends.peer.request(105, b"mine") == b"mine"
        assert said == ["made", "before 4", "execute 1"]
        said.clear()
        with trio.move_on_after(1):
            await ends.peer.request(106)
        await settled()
        assert said == ["made", "execute 0", "cancelled"]
        assert ends.left() == NOTHING


async def test_an_actor_class_is_gated_if_it_decides(start: Start) -> None:
    class Decides(OperationActor):
        async def before_execute(self, call: Call) -> None:
            raise Refuse(1025, 0.5)

        async def execute(self, call: Call) -> bytes:
            raise AssertionError("refused operations are not executed")

    class Works(OperationActor):
        async def execute(self, call: Call) -> bytes:
            return b"worked"

    async with start({105: Decides, 106: Works}) as ends:
        with pytest.raises(OperationRefused) as refused:
            await ends.peer.request(105)
        assert (refused.value.code, refused.value.retry_after) == (1025, 0.5)
        assert await ends.peer.request(106) == b"worked"


async def test_what_cannot_be_a_body_or_a_handler_is_refused_at_once(start: Start) -> None:
    async with start({}) as ends:
        with pytest.raises(ConfigurationError, match="the body is"):
            await ends.peer.message(100, "text")
        with pytest.raises(ConfigurationError, match="length"):
            await ends.peer.message(100, b"x", length=1)
        with pytest.raises(OSError, match="nowhere"):
            await ends.peer.message(100, Path("/nowhere/at/all"))
        with pytest.raises(LocalProtocolError, match="out of range"):
            await ends.peer.message(0)
        assert ends.client.core.statistic.opened == 0


@pytest.mark.parametrize("handlers", [{1: echo}, {0: echo}, {65_536: echo}, {"x": echo}, {5: "no function"}])
async def test_handlers_that_cannot_be_are_refused(start: Start, handlers: Any) -> None:
    with pytest.raises(ConfigurationError):
        async with start(handlers):
            pass


async def test_functions_beside_an_actor_are_refused() -> None:
    async def decide(call: Call) -> None: ...

    with pytest.raises(ConfigurationError, match="an OperationActor has methods of its own"):
        Handler(Account, before_execute=decide)  # type: ignore[arg-type]


async def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="max_running"):
        PeerConfig(max_running=0)


def counted(ends: Ends) -> tuple[int, int]:
    statistics = ends.peer.statistics()
    return statistics.opened, statistics.operations


async def test_statistics_are_a_snapshot(start: Start) -> None:
    async with start({101: echo}) as ends:
        before = ends.peer.statistics()
        await ends.peer.request(101, b"x")
        assert counted(ends) == (1, 0)
        assert before.opened == 0
        server = ends.caller.statistics()
        assert (server.received, server.done, server.refused, server.failed) == (1, 1, {}, {})
        assert server.carrier is not None
        assert server.carrier.bytes_received > 0
