"""How a connection ends: drained by either side, cut off, lost; and what becomes of operations then."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import trio
import trio.lowlevel
from tests.actors.carried import cut, memory_only
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.maop import (
    Call,
    Handler,
    HandlerSpec,
    MaopConfig,
    OperationFailed,
    OperationLost,
    OperationRefused,
    PeerConfig,
    RetryPolicy,
    TimesConfig,
    connect,
    serve,
)
from levada.actors.maop.operations import begin_operation
from levada.framework import ActorSystem
from levada.framework.errors import ConnectionClosed, ConnectionLost
from levada.transports.carriers import MemoryConfig

from .conftest import NOTHING, TOKENS, Start, echo, settled


class Work:
    """A handler that takes its time, and what came of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.said: list[str] = []

    async def execute(self, call: Call) -> bytes:
        await trio.sleep(self.seconds)
        self.said.append("done")
        return b"done"

    async def undo(self, call: Call, reason: str) -> None:
        self.said.append(reason)

    def handler(self) -> Handler:
        return Handler(self.execute, on_cancel=self.undo)


@pytest.mark.rule("MA-89")
@pytest.mark.parametrize("side", ["client", "server"])
async def test_ma89_running_operations_end_before_the_connection_does(
    start: Start, side: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A Disconnect Request lets running handlers finish within drain_time; nothing new begins."""
    caplog.set_level(logging.INFO, "levada.actors.maop")
    work = Work(3.0)
    answers: list[bytes] = []
    async with start({101: work.handler(), 102: echo}) as ends:

        async def ask() -> None:
            answers.append(await ends.peer.request(101))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1)
            closing = ends.peer if side == "client" else ends.caller
            nursery.start_soon(closing.aclose, "maintenance")
            await trio.sleep(0.1)
            with pytest.raises(ConnectionClosed if side == "client" else ConnectionLost):
                await ends.peer.request(102)
        assert answers == [b"done"]
        assert work.said == ["done"]
        assert trio.current_time() == pytest.approx(3.0, abs=0.2)
        assert ends.peer.closed
        assert ends.listener.metrics.drain_ms.count == 1
        assert ends.listener.metrics.drain_ms.quantile(0.5) >= 2000
    assert "maintenance" in caplog.text


@pytest.mark.rule("MA-92")
@pytest.mark.parametrize("side", ["client", "server"])
async def test_ma92_what_is_left_when_the_time_is_up_is_cancelled(
    start: Start, side: str, autojump_clock: MockClock
) -> None:
    """It is cancelled by onCancel and gets Fail CANCELLED (11) with reason SHUTDOWN."""
    work = Work(100.0)
    async with start({101: work.handler()}, core=MaopConfig(times=TimesConfig(drain_timeout=2.0))) as ends:
        async with trio.open_nursery() as nursery:
            await trio.lowlevel.checkpoint()

            async def ask() -> None:
                with pytest.raises(OperationFailed) as failed:
                    await ends.peer.request(101, timeout=None)
                assert failed.value.code == 11
                assert failed.value.detail == "SHUTDOWN"

            nursery.start_soon(ask)
            await trio.sleep(1)
            nursery.start_soon((ends.peer if side == "client" else ends.caller).aclose)
        # The time is up on both sides at once: the handler hears of its own side's end, or of what the other did.
        assert work.said in (["SHUTDOWN"], ["the connection is over"], ["the initiator wants no Response"])
        assert trio.current_time() == pytest.approx(3.0, abs=0.6)


@pytest.mark.rule("MA-92")
@pytest.mark.parametrize("leaving", ["client", "server"])
async def test_ma92_what_crosses_the_end_is_refused(start: Start, leaving: str, autojump_clock: MockClock) -> None:
    """The error says that the peer leaves and that nothing was begun; then the connection ends without further waiting."""
    begun: list[int] = []

    async def work(call: Call) -> None:
        begun.append(1)

    carrier = MemoryConfig(shape="connection", latency=0.1)
    async with start({101: work}, client={"handlers": {101: work}}, carrier=carrier) as ends:
        await ends.peer.request(101)
        leaver, caller = (ends.peer, ends.caller) if leaving == "client" else (ends.caller, ends.peer)
        errors: list[OperationRefused] = []

        async def ask(body: bytes) -> None:
            with pytest.raises(OperationRefused) as refused:
                await caller.request(101, body)
            errors.append(refused.value)

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for body in (b"", b"x"):
                nursery.start_soon(ask, body)
            await wait_all_tasks_blocked()
            nursery.start_soon(leaver.aclose)
        assert [(error.code, str(error)) for error in errors] == [
            (14, "CAPACITY_LIMIT: the peer is closing the connection")
        ] * 2
        assert all(RetryPolicy().allows(error, keyed=False) for error in errors)
        assert begun == [1]
        await ends.peer.terminated()
        assert trio.current_time() - began < 1.0


@pytest.mark.rule("MA-92")
@memory_only  # QMux waits for the other end of its carrier, for a bounded time
@pytest.mark.parametrize("leaving", ["client", "server"])
async def test_ma92_an_end_that_is_cancelled_while_it_waits_for_the_peer_is_at_once(
    start: Start, leaving: str, autojump_clock: MockClock
) -> None:
    """The answer would take two seconds more. The other side hears of the loss as soon as that is possible."""
    carrier = MemoryConfig(shape="connection", latency=1.0)
    async with start({101: echo}, carrier=carrier) as ends:
        await ends.peer.request(101)
        leaver, other = (ends.peer, ends.caller) if leaving == "client" else (ends.caller, ends.peer)
        began = trio.current_time()
        with trio.move_on_after(0.5) as scope:
            await leaver.aclose()
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(began + 0.5)
        assert leaver.closed
        await leaver.terminated()
        assert trio.current_time() == pytest.approx(began + 0.5)
        assert not other.closed
        await other.terminated()
        assert trio.current_time() == pytest.approx(began + 1.5, abs=0.02)


@pytest.mark.rule("MA-89")
async def test_ma89_kinds_that_running_operations_need_may_begin_while_draining(
    start: Start, autojump_clock: MockClock
) -> None:
    """A Message or Request that arrives while draining is refused by 14, unless its handler allows it."""

    async def slow(call: Call) -> bytes:
        await trio.sleep(3)
        return b"done"

    handlers = {101: slow, 102: echo, 103: Handler(echo, spec=HandlerSpec(allow_while_draining=True))}
    async with start(handlers) as ends, trio.open_nursery() as nursery:
        nursery.start_soon(ends.peer.request, 101)
        await trio.sleep(1)
        core = ends.client.core
        nursery.start_soon(ends.caller.aclose)
        begin = partial(begin_operation, ends.client)
        operations = [  # the client has not heard of it
            begin(lambda now: core.send_request(102, b"", now=now)),
            begin(lambda now: core.send_request(103, b"x", now=now)),
        ]
        await trio.sleep(1)
        with pytest.raises(OperationRefused) as refused:
            operations[0].result()
        assert (refused.value.code, refused.value.retry_after) == (14, None)
        assert operations[1].result().body == b"x"


async def test_leaving_serve_drains_all_clients(autojump_clock: MockClock, scheme: str) -> None:
    work = Work(3.0)
    answers: list[bytes] = []
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        async with serve(system, f"maop+{scheme}://desk", {101: work.handler()}, authenticate=TOKENS) as listener:

            async def client() -> None:
                async with connect(system, listener.url, token=b"secret") as peer:
                    answers.append(await peer.request(101))

            for _ in range(5):
                nursery.start_soon(client)
            await trio.sleep(1)
            assert len(listener.peers) == 5
        assert trio.current_time() == pytest.approx(3.0, abs=0.2)
        assert work.said == ["done"] * 5
    assert answers == [b"done"] * 5


async def test_abort_ends_operations_of_both_sides(start: Start, autojump_clock: MockClock) -> None:
    work = Work(100.0)
    async with start({101: work.handler()}) as ends, trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(OperationLost) as lost:
                await ends.peer.request(101, b"body")
            assert not lost.value.not_executed  # the peer had said Proceed

        nursery.start_soon(ask)
        await trio.sleep(1)
        ends.caller.abort()
        await ends.peer.terminated()
        await trio.sleep(1)
        assert work.said == ["the connection is over"]
        assert trio.current_time() < 3


@pytest.mark.rule("MA-120")
async def test_ma120_a_lost_connection_tells_what_was_surely_not_executed(
    start: Start, autojump_clock: MockClock
) -> None:
    """Not executed is known only before Proceed with N ≠ 0."""

    async def decide(call: Call) -> None:
        await trio.sleep_forever()

    found: dict[str, bool] = {}
    handlers = {100: Handler(echo, before_execute=decide), 101: Work(100).handler()}
    async with start(handlers) as ends, trio.open_nursery() as nursery:

        async def ask(name: str, msg_id: int, body: bytes) -> None:
            with pytest.raises(OperationLost) as lost:
                await ends.peer.request(msg_id, body, timeout=None)
            found[name] = lost.value.not_executed

        nursery.start_soon(ask, "gated with body", 100, b"x")
        nursery.start_soon(ask, "gated without", 100, b"")
        nursery.start_soon(ask, "running", 101, b"x")
        await trio.sleep(1)
        cut(ends.client.carrier)
        await trio.sleep(1)
    assert found == {"gated with body": True, "gated without": False, "running": False}


async def test_a_connection_that_is_lost_at_any_call_leaves_nothing(autojump_clock: MockClock) -> None:
    """The link is cut at each of its calls in turn: callers hear of it, both sides end."""
    outcomes = set()
    for call in range(1, 60, 2):
        config = PeerConfig(
            carrier=MemoryConfig(shape="connection", cut_at_call=call),
            core=MaopConfig(times=TimesConfig(drain_timeout=1.0)),
        )
        try:
            async with (
                ActorSystem() as system,
                serve(system, "maop+memory://desk", {101: echo}, authenticate=TOKENS, config=config) as listener,
                connect(system, listener.url, token=b"secret", config=config) as peer,
            ):
                assert await peer.request(101, b"hello") == b"hello"
                assert await peer.request(101, bytes(100_000)) == bytes(100_000)
                outcomes.add("worked")
        except* (ConnectionLost, OperationFailed):
            outcomes.add("lost")
    assert outcomes == {"lost", "worked"}


async def test_a_client_that_vanishes_frees_its_place(start: Start, autojump_clock: MockClock) -> None:
    work = Work(100.0)
    async with start({101: work.handler(), 102: echo}, max_running=1) as ends:
        with pytest.RaisesGroup(OperationLost, flatten_subgroups=True):
            async with (
                connect(ends.system, ends.listener.url, token=b"secret") as other,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(other.request, 101)
                await trio.sleep(1)
                other.abort()
        await settled()
        assert work.said == ["the connection is over"]
        assert await ends.peer.request(102, b"free") == b"free"
        assert ends.left() == NOTHING


@pytest.mark.rule("MA-26")
async def test_ma26_stream_0_is_closed_on_both_sides(start: Start, autojump_clock: MockClock) -> None:
    """Both sides of stream 0 are closed after the result."""
    async with start({101: echo}, core=MaopConfig()) as ends:
        await ends.peer.request(101)
        for end in (ends.client, ends.server):
            assert end.stream(0) is None
