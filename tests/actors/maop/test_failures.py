"""What goes wrong in a handler, at the gate, or with an answer: codes, sanitised reasons, audit ids, and who undoes what."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from levada.actors.maop import (
    Call,
    Disapproved,
    Handler,
    HandlerSpec,
    MaopConfig,
    MaopError,
    OperationActor,
    OperationError,
    OperationFailed,
    OperationLost,
    OperationRefused,
    OperationTimeout,
    PeerConfig,
    Refuse,
    Reply,
    TimesConfig,
)
from levada.actors.rsocket import ApplicationError
from levada.framework.errors import ChannelConnectionLost, ConnectionClosed, ConnectionLost, StreamWasReset
from levada.transports.carriers import MemoryConfig

from .conftest import NOTHING, Answer, Question, Start, echo, nothing, settled

GATED = HandlerSpec(gated=True)


async def fail_with(call: Any, code: int) -> MaopError:
    """Await something that fails, and return the error."""
    with pytest.raises(MaopError) as failed:
        await call
    assert failed.value.code == code
    return failed.value


@pytest.mark.handler_fails
@pytest.mark.rule("MA-79")
@pytest.mark.parametrize("kind", ["message", "request"])
async def test_ma79_an_exception_is_execution_error_under_an_audit_id(
    start: Start, kind: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    """EXECUTION_ERROR with a sanitised text; details go to the log under the audit id."""

    async def broken(call: Call) -> None:
        raise ValueError("password=hunter2 in /srv/app/db.py")

    async with start({102: broken}) as ends:
        error = await fail_with(getattr(ends.peer, kind)(102, b"body"), 17)
        assert isinstance(error, OperationFailed)
        assert error.by_peer
        found = re.fullmatch(r"the handler failed \[([0-9a-f]{8})\]", error.detail)
        assert found is not None
        [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert found[1] in record.message
        assert record.exc_info is not None
        assert "hunter2" in str(record.exc_info[1])
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.rule("MA-77")
@pytest.mark.parametrize(("code", "seen"), [(5, 5), (17, 17), (1024, 1024), (65_535, 65_535), (30, 49), (-1, 49)])
async def test_ma77_a_handler_chooses_its_code(start: Start, code: int, seen: int) -> None:
    """0 to 1023 are the protocol's; what is reserved is not sent."""

    async def refuse(call: Call) -> None:
        raise OperationError(code, "no such account")

    async with start({102: refuse}) as ends:
        error = await fail_with(ends.peer.request(102), seen)
        assert error.detail == "no such account"
        assert error.name == ("UNKNOWN_ERROR(65535)" if seen == 65_535 else error.name)


@pytest.mark.rule("MA-78")
async def test_ma78_a_reason_is_cut_and_without_secrets(start: Start) -> None:
    """512 octets at most, an audit id where it was cut, no secrets, no stack traces."""

    async def wordy(call: Call) -> None:
        raise OperationError(1024, "token=abc secret " + "é" * 600)

    async def trace(call: Call) -> None:
        raise OperationError(1024, "went wrong Traceback (most recent call last): File x")

    async with start({102: wordy, 103: trace}) as ends:
        error = await fail_with(ends.peer.request(102), 1024)
        assert len(error.detail.encode()) <= 512
        assert error.detail.startswith("token=*** *** é")  # what looks like one, and the token of this connection
        assert re.search(r" \[[0-9a-f]{8}\]$", error.detail)
        assert (await fail_with(ends.peer.request(103), 1024)).detail == "went wrong "


async def test_a_body_that_is_no_message_is_invalid_format(start: Start) -> None:
    async def answer(call: Call) -> Answer:
        return Answer(call.decode(Question).number)

    async with start({104: answer}) as ends:
        assert "msgpack" in (await fail_with(ends.peer.request(104, b"\xc1"), 0)).detail


@pytest.mark.rule("MA-71")
async def test_ma71_an_answer_that_is_no_such_message_is_rejected(
    start: Start, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    """Not the promised kind RESPONSE_MISMATCH (18), what cannot be used RESPONSE_CONSUME (19); the responder hears of it."""
    caplog.set_level(logging.INFO, "levada.actors.maop")

    async def other(call: Call) -> Answer:
        return Answer(1)

    async with start({104: echo, 105: other}) as ends:
        await fail_with(ends.peer.request(104, b"plain", response=Answer), 18)
        await fail_with(ends.peer.request(105, response=Question), 19)
        await settled()
        rejected = [r.message for r in caplog.records if "response rejected" in r.message]
        assert ["RESPONSE_MISMATCH" in rejected[0], "RESPONSE_CONSUME" in rejected[1], len(rejected)] == [True, True, 2]
        assert ends.left() == NOTHING


async def test_an_answer_above_the_callers_limit_fails(start: Start) -> None:
    async with start({101: echo}) as ends:
        await fail_with(ends.peer.request(101, bytes(100), max_response=100), 2)
        assert await ends.peer.request(101, bytes(100), max_response=125) == bytes(100)


@pytest.mark.rule("MA-67")
async def test_ma67_an_error_behind_the_response_header_resets_the_stream(
    start: Start, autojump_clock: MockClock
) -> None:
    """The requester drops the partial body and reports the code of the Fail."""

    async def breaks(call: Call) -> AsyncIterator[bytes]:
        async def give() -> AsyncIterator[bytes]:
            yield b"begun"
            await trio.sleep(1)
            raise OperationError(1030, "the source dried up")

        return give()

    async with start({103: breaks}) as ends:
        error = await fail_with(ends.peer.request(103), 1030)
        assert error.detail == "the source dried up"
        got = []
        with pytest.raises(OperationFailed, match="dried up"):
            async with ends.peer.open_request(103) as reply:
                async for chunk in reply:
                    got.append(bytes(chunk))
        assert got == [b"begun"]
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.handler_fails
async def test_answers_that_cannot_be_are_failures_of_the_handler(start: Start, autojump_clock: MockClock) -> None:
    async def number(call: Call) -> Any:
        return 7

    async def odd_type(call: Call) -> Reply:
        return Reply(b"x", "not a media type")

    async def odd_pieces(call: Call) -> Any:
        async def give() -> AsyncIterator[Any]:
            yield "text"

        return give()

    async with start({101: number, 102: odd_type, 103: odd_pieces}) as ends:
        for msg_id in (101, 102, 103):
            await fail_with(ends.peer.request(msg_id), 17)
        assert await ends.peer.message(101) is not None  # of a Message nothing is answered, so nothing can be wrong
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.parametrize("kind", ["message", "request"])
async def test_a_handler_that_fails_while_the_body_comes_stops_the_sender(
    start: Start, kind: str, autojump_clock: MockClock
) -> None:
    """In SENDING a Fail or STOP_SENDING stops the body at once, also while its source gives nothing."""
    said: list[str] = []

    async def picky(call: Call) -> None:
        async for chunk in call:
            if b"poison" in bytes(chunk):
                raise OperationError(1040, "that is poison")

    async def source(pause: float) -> AsyncIterator[bytes]:
        try:
            for number in range(1000):
                yield b"poison" if number == 3 else bytes(1000)
                await trio.sleep(pause)
        finally:
            said.append("closed")

    spec = HandlerSpec(allow_undefined_length=True, streaming=True)
    async with start({100: Handler(picky, spec=spec)}, carrier=MemoryConfig(shape="connection", latency=0.2)) as ends:
        for pause in (0.01, 0.3, 100.0):
            error = await fail_with(getattr(ends.peer, kind)(100, source(pause)), 1040 if pause < 10 else 5)
            assert (error.detail == "that is poison") is (pause < 10)
        assert said == ["closed"] * 3
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no more"),
        ConnectionLost("the other connection was lost"),
        ChannelConnectionLost("the other connection was lost"),
        StreamWasReset("the source gave up"),
        ApplicationError("no price"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", ["message", "request"])
async def test_a_source_that_fails_fails_its_operation_at_once(
    start: Start, kind: str, error: Exception, autojump_clock: MockClock
) -> None:
    """Also with the error of another connection, from which the source reads."""

    async def source() -> AsyncIterator[bytes]:
        yield b"some"
        await trio.lowlevel.checkpoint()
        raise error

    spec = HandlerSpec(allow_undefined_length=True)
    async with start({100: Handler(nothing, spec=spec)}) as ends:
        began = trio.current_time()
        with pytest.raises(type(error)) as failed:
            await getattr(ends.peer, kind)(100, source())
        assert failed.value is error
        assert trio.current_time() - began < 1
        await settled()
        assert ends.left() == NOTHING


# ---------------------------------------------------------------- the gate


@pytest.mark.rule("MA-44")
async def test_ma44_the_gate_refuses_before_the_body_travels(start: Start) -> None:
    """msg_id, right, undefined length and size are judged by the header alone."""
    ran: list[int] = []

    async def run(call: Call) -> None:
        ran.append(call.msg_id)

    async def endless() -> AsyncIterator[bytes]:
        ran.append(-1)
        yield b""

    handlers = {
        100: Handler(run, spec=HandlerSpec(requests=False)),
        101: Handler(run, spec=HandlerSpec(role="admin")),
        102: Handler(run, spec=HandlerSpec(max_payload=10)),
    }
    async with start(handlers) as ends:
        assert (await fail_with(ends.peer.request(100), 16)).name == "INCOMPATIBLE_MESSAGE"
        assert (await fail_with(ends.peer.message(999), 16)).name == "INCOMPATIBLE_MESSAGE"
        assert (await fail_with(ends.peer.message(101), 1)).name == "UNAUTHORIZED"
        assert (await fail_with(ends.peer.message(102, bytes(11)), 2)).name == "CONTENT_TOO_LARGE"
        refused = await fail_with(ends.peer.message(102, endless()), 15)
        assert (refused.name, str(refused)) == ("POLICY_UNDEFINED_LENGTH", "POLICY_UNDEFINED_LENGTH")
        assert isinstance(refused, OperationRefused)
        assert ran == []


@pytest.mark.handler_fails
@pytest.mark.rule("MA-113")
async def test_ma113_before_execute_decides_without_the_body(start: Start, autojump_clock: MockClock) -> None:
    """Raising an error there means Refuse with its code; it may be asynchronous."""
    said: list[str] = []

    async def decide(call: Call) -> None:
        said.append(f"decide {call.priority}")
        await trio.sleep(0.5)
        if call.priority == 1:
            raise Refuse(14, 2.5)
        if call.priority == 2:
            raise Refuse(30)  # reserved
        if call.priority == 3:
            raise KeyError("bug")

    async def run(call: Call) -> None:
        said.append("run")

    async with start({100: Handler(run, before_execute=decide)}) as ends:
        await ends.peer.message(100, b"x", priority=0)
        refused = await fail_with(ends.peer.message(100, b"x", priority=1), 14)
        assert isinstance(refused, OperationRefused)
        assert refused.retry_after == 2.5
        await fail_with(ends.peer.message(100, b"x", priority=2), 49)
        await fail_with(ends.peer.message(100, b"x", priority=3), 17)
        assert said == ["decide 0", "run", "decide 1", "decide 2", "decide 3"]
        assert ends.listener.metrics.approval_latency_ms.quantile(0.5) >= 500
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.rule("MA-53")
async def test_ma53_a_decision_that_never_comes_is_a_capacity_limit(start: Start, autojump_clock: MockClock) -> None:
    """At most approval_timeout, then Refuse CAPACITY_LIMIT with a retry hint; the hook is cancelled."""
    said: list[str] = []

    async def decide(call: Call) -> None:
        try:
            await trio.sleep_forever()
        finally:
            said.append("given up")

    async def undo(call: Call, reason: str) -> None:
        said.append("undone")

    handler = Handler(nothing, before_execute=decide, on_cancel=undo)
    impatient = PeerConfig(core=MaopConfig(times=TimesConfig(approval_timeout=3.0)))
    async with start({100: handler}, server={"config": impatient}) as ends:
        refused = await fail_with(ends.peer.message(100, b"x"), 14)
        assert isinstance(refused, OperationRefused)
        assert refused.retry_after is not None
        assert trio.current_time() == pytest.approx(3.0, abs=0.1)
        await settled()
        assert said == ["given up", "undone"]
        assert ends.left() == NOTHING


@pytest.mark.rule("MA-53")
async def test_ma53_an_initiator_waits_for_a_decision_as_long(start: Start, autojump_clock: MockClock) -> None:
    """No decision within approval_timeout: TIMEOUT (5), found here, and the operation is cancelled at the peer."""
    said: list[str] = []

    async def decide(call: Call) -> None:
        await trio.sleep_forever()

    async def undo(call: Call, reason: str) -> None:
        said.append("undone")

    handler = Handler(nothing, before_execute=decide, on_cancel=undo)
    impatient = PeerConfig(core=MaopConfig(times=TimesConfig(approval_timeout=3.0)))
    async with start({100: handler}, client={"config": impatient}) as ends:
        error = await fail_with(ends.peer.message(100, b"x"), 5)
        assert isinstance(error, OperationTimeout)
        assert not error.by_peer
        assert trio.current_time() == pytest.approx(3.0, abs=0.1)
        await settled()
        assert said == ["undone"]
        assert ends.left() == NOTHING


# ---------------------------------------------------------------- time


@pytest.mark.rule("MA-68")
async def test_ma68_a_late_answer_is_a_timeout_and_the_handler_is_cancelled(
    start: Start, autojump_clock: MockClock
) -> None:
    """The Response header must be written within timeout_ms, else Fail TIMEOUT and onCancel."""
    said: list[str] = []

    async def slow(call: Call) -> None:
        try:
            await trio.sleep(10)
        except trio.Cancelled:
            said.append("cancelled")
            raise

    async def undo(call: Call, reason: str) -> None:
        await trio.sleep(1)
        said.append(reason)

    async with start({101: Handler(slow, on_cancel=undo)}) as ends:
        began = trio.current_time()
        error = await fail_with(ends.peer.request(101, timeout=2.0), 5)
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.05)
        assert isinstance(error, OperationTimeout)
        assert isinstance(error, TimeoutError)
        assert error.by_peer
        await settled()
        assert said == ["cancelled", "time is up"]
        assert await ends.peer.request(101, timeout=None) == b""  # no limit
        assert ends.left() == NOTHING


async def test_a_message_without_its_done_times_out_here(start: Start, autojump_clock: MockClock) -> None:
    async def slow(call: Call) -> None:
        await trio.sleep(10)

    async with start({100: slow}) as ends:
        error = await fail_with(ends.peer.message(100, b"x", timeout=2.0), 5)
        assert isinstance(error, OperationTimeout)
        assert not error.by_peer
        await trio.sleep(10)  # all of it has arrived, so the handler works on
        assert ends.left() == NOTHING


@pytest.mark.rule("MA-126")
async def test_ma126_a_body_without_octets_times_out(start: Start, autojump_clock: MockClock) -> None:
    """The initiator watches its own body: no octet for transfer_idle_timeout resets the stream."""

    async def stalls() -> AsyncIterator[bytes]:
        yield b"one"
        await trio.sleep_forever()

    async with start({100: Handler(nothing, spec=HandlerSpec(allow_undefined_length=True))}) as ends:
        began = trio.current_time()
        await fail_with(ends.peer.message(100, stalls()), 5)
        assert trio.current_time() - began == pytest.approx(30, abs=1)
        await settled()
        assert ends.left() == NOTHING


# ---------------------------------------------------------------- undoing


async def test_a_handler_has_its_place_until_its_work_is_undone(start: Start, autojump_clock: MockClock) -> None:
    """A peer that cancels its operations at once has `max_running` of them at work or undone, no more."""
    busy = most = 0

    async def work(call: Call) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await trio.sleep_forever()

    async def undo(call: Call, reason: str) -> None:
        nonlocal busy
        await trio.sleep(3)
        busy -= 1

    async with start({100: Handler(work, on_cancel=undo)}, max_running=2) as ends:
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(ends.peer.request, 100, b"x")
                await trio.sleep(0.5)
                nursery.cancel_scope.cancel()
        assert most == 2
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.parametrize("ending", ["cancelled", "closed"])
async def test_work_that_is_cut_short_behind_the_gate_is_undone_in_its_turn(
    start: Start, autojump_clock: MockClock, ending: str
) -> None:
    """The operations wait for the rest of their bodies, so no code of them runs and they have no places; those that undo them have."""
    busy = most = 0
    said: list[str] = []

    async def decide(call: Call) -> None:
        said.append("decided")

    async def undo(call: Call, reason: str) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await trio.sleep(0.5)
        busy -= 1
        said.append("undone")

    async def half() -> AsyncIterator[bytes]:
        yield b"x"
        await trio.sleep_forever()

    spec = HandlerSpec(allow_undefined_length=True)
    handler = Handler(nothing, before_execute=decide, on_cancel=undo, spec=spec)
    async with start({100: handler}, max_running=2) as ends:
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(partial(ends.peer.message, 100, half()))
            await trio.sleep(0.1)
            assert said == ["decided"] * 6
            limiter = ends.server.shared.limiter
            if ending == "closed":
                ends.peer.abort()
            nursery.cancel_scope.cancel()
        await settled()
        await trio.sleep(3)
        assert said[6:] == ["undone"] * 6
        assert most == 2
        assert (limiter.running, limiter.waiting) == (0, 0)


@pytest.mark.handler_fails
async def test_a_failing_on_cancel_is_logged_and_harms_nobody(
    start: Start, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def slow(call: Call) -> None:
        await trio.sleep(10)

    async def undo(call: Call, reason: str) -> None:
        raise RuntimeError("undo is broken")

    async with start({100: Handler(slow, on_cancel=undo), 101: echo}) as ends:
        with trio.move_on_after(1):
            await ends.peer.request(100)
        await settled()
        assert [r.message.split(": ", 1)[1][:25] for r in caplog.records if r.levelno == logging.ERROR] == [
            "on_cancel of msg_id 100 f"
        ]
        assert await ends.peer.request(101, b"alive") == b"alive"
        assert ends.left() == NOTHING


@pytest.mark.handler_fails
async def test_an_actor_that_fails_is_a_failure_of_its_operation_only(start: Start, autojump_clock: MockClock) -> None:
    class Fails(OperationActor):
        async def execute(self, call: Call) -> None:
            if call.priority == 1:
                raise OperationError(1234, "on purpose")
            raise ZeroDivisionError

    async with start({101: Fails, 102: echo}) as ends:
        await fail_with(ends.peer.request(101), 17)
        await fail_with(ends.peer.request(101, priority=1), 1234)
        assert await ends.peer.request(102, b"alive") == b"alive"
        await settled()
        assert ends.left() == NOTHING


async def test_errors_say_what_they_are_and_survive_pickle() -> None:
    errors: list[MaopError] = [
        OperationRefused(code=14, retry_after=1.5),
        OperationFailed("boom", code=2000, by_peer=True),
        OperationTimeout("late", code=5),
        OperationLost("gone", code=11, not_executed=True),
        Disapproved("no", code=1, retry_after=2.0),
    ]
    texts = ["CAPACITY_LIMIT", "UNKNOWN_ERROR(2000): boom", "TIMEOUT: late", "CANCELLED: gone", "UNAUTHORIZED: no"]
    for error, text in zip(errors, texts, strict=True):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), vars(again), str(again)) == (type(error), vars(error), text)
    assert isinstance(errors[3], ConnectionLost)
    assert isinstance(errors[4], ConnectionLost)


async def test_using_a_closed_connection_is_a_mistake_of_this_program(start: Start) -> None:
    async with start({101: echo}) as ends:
        await ends.peer.aclose()
        with pytest.raises(ConnectionClosed):
            await ends.peer.request(101)
        with pytest.raises(ConnectionClosed):
            async with ends.peer.open_request(101):
                pass
        assert ends.peer.closed
