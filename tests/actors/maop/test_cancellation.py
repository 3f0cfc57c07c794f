"""Each await of a caller is cancelled: the operation ends at the peer too, its handler undoes, and nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.authentication import Credentials
from levada.actors.maop import Call, Handler, HandlerSpec, Refuse, RetryPolicy, connect
from levada.framework import ActorSystem
from levada.transports.carriers import MemoryConfig

from .conftest import CLIENT, NOTHING, Ends, Start, echo, nothing, settled

STREAMING = HandlerSpec(allow_undefined_length=True, streaming=True, max_payload=2**30)


class Log:
    """Handlers that never end, and what they went through."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def hang(self, call: Call) -> None:
        self.said.append("execute")
        await trio.sleep_forever()

    async def decide(self, call: Call) -> None:
        self.said.append("decide")
        await trio.sleep_forever()

    async def take(self, call: Call) -> None:
        self.said.append("execute")
        async for _ in call:
            pass

    async def give(self, call: Call) -> AsyncIterator[bytes]:
        async def endless() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(65_536)
                    if call.msg_id == 105:
                        await trio.sleep_forever()
            finally:
                self.said.append("closed")

        return endless()

    async def undo(self, call: Call, reason: str) -> None:
        self.said.append("undo")

    def handlers(self) -> dict[int, Any]:
        return {
            100: Handler(self.hang, on_cancel=self.undo),
            101: Handler(nothing, before_execute=self.decide, on_cancel=self.undo),
            102: Handler(self.take, spec=STREAMING, on_cancel=self.undo),
            103: Handler(self.give, on_cancel=self.undo),
            104: echo,
            105: Handler(self.give, on_cancel=self.undo),
            106: Handler(self.hang, spec=STREAMING, on_cancel=self.undo),
        }


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield bytes(65_536)
        await trio.sleep(0.01)


async def hasty() -> AsyncIterator[bytes]:
    while True:
        yield bytes(65_536)


async def silent() -> AsyncIterator[bytes]:
    await trio.sleep_forever()
    yield b""


async def read(ends: Ends, msg_id: int) -> None:
    async with ends.peer.open_request(msg_id) as reply:
        async for _ in reply:
            await trio.sleep(0.01)


CASES: dict[str, tuple[Callable[[Ends], Awaitable[Any]], list[str]]] = {
    "request: waits for the answer": (lambda e: e.peer.request(100), ["execute", "undo"]),
    "request with body: waits for the answer": (lambda e: e.peer.request(100, b"body"), ["execute", "undo"]),
    "request: waits at the gate": (lambda e: e.peer.request(101), ["decide", "undo"]),
    "request with body: waits for Proceed": (lambda e: e.peer.request(101, b"body"), ["decide", "undo"]),
    "message: waits for Proceed": (lambda e: e.peer.message(101, b"body"), ["decide", "undo"]),
    "message: sends": (lambda e: e.peer.message(102, endless()), ["execute", "undo"]),
    "message: waits for the window": (lambda e: e.peer.message(106, hasty()), ["execute", "undo"]),
    "message: its source gives nothing": (lambda e: e.peer.message(102, silent()), []),
    "request: sends": (lambda e: e.peer.request(102, endless()), ["execute", "undo"]),
    "reply: waits for its beginning": (lambda e: open_and_close(e), ["execute", "undo"]),
    "reply: reads": (lambda e: read(e, 103), ["closed", "undo"]),
    "reply: waits for more": (lambda e: read(e, 105), ["closed", "undo"]),
}


async def open_and_close(ends: Ends) -> None:
    async with ends.peer.open_request(100):
        raise AssertionError("there is no answer to enter for")


@pytest.mark.rule("MA-115")
@pytest.mark.parametrize("case", CASES)
async def test_ma115_a_cancelled_call_is_cancelled_at_the_peer(
    start: Start, case: str, autojump_clock: MockClock
) -> None:
    """Cancellation is cooperative: when the stream closes the handler is cancelled and onCancel runs, once."""
    call, said = CASES[case]
    log = Log()
    async with start(log.handlers()) as ends:
        with trio.move_on_after(1) as scope:
            await call(ends)
        assert scope.cancelled_caught
        await settled()
        assert sorted(log.said) == sorted(said)
        assert ends.left() == NOTHING
        assert await ends.peer.request(104, b"alive") == b"alive"


@pytest.mark.rule("MA-61")
async def test_ma61_a_message_that_has_arrived_cannot_be_taken_back(start: Start, autojump_clock: MockClock) -> None:
    """RESET_STREAM is the initiator's own cancel, and says nothing behind the end of a stream that has arrived."""
    log = Log()
    async with start(log.handlers()) as ends:
        with trio.move_on_after(1):
            await ends.peer.message(100)
        await settled()
        assert log.said == ["execute"]
        assert ends.client.core.operations == 0
    assert log.said == ["execute", "undo"]  # by the end of the connection


async def test_a_caller_that_waits_for_a_stream_begins_nothing(start: Start, autojump_clock: MockClock) -> None:
    log = Log()
    carrier = MemoryConfig(shape="connection", max_streams=3)
    async with start(log.handlers(), carrier=carrier) as ends:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ends.peer.request, 100)
            await trio.sleep(1)
            waiting = ends.peer.statistics().waiting_for_streams
            assert waiting >= 3
            opened = ends.peer.statistics().opened
            nursery.cancel_scope.cancel()
        await settled()
        assert ends.peer.statistics().opened == opened
        assert ends.left() == NOTHING
        assert await ends.peer.request(104, b"alive") == b"alive"


async def test_a_caller_that_waits_to_repeat(start: Start, autojump_clock: MockClock) -> None:
    async def full(call: Call) -> None:
        raise Refuse(14, 100.0)

    async with start({100: Handler(nothing, before_execute=full)}) as ends:
        with trio.move_on_after(1) as scope:
            await ends.peer.message(100, retry=RetryPolicy())
        assert scope.cancelled_caught
        assert ends.peer.statistics().opened == 1


async def test_an_operation_that_ends_in_the_moment_of_its_cancellation(start: Start) -> None:
    async with start({101: echo}) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.peer.request, 101, b"x")
            while ends.client.core.statistic.opened == 0:
                await trio.lowlevel.checkpoint()
            while ends.client.operations:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert ends.client.core.operations == 0
        assert await ends.peer.request(101, b"alive") == b"alive"


async def test_what_is_cancelled_while_it_waits_for_its_turn_is_never_executed(
    start: Start, autojump_clock: MockClock
) -> None:
    said: list[str] = []

    async def decide(call: Call) -> None:
        await trio.sleep(1)

    async def work(call: Call) -> None:
        said.append("work")

    async def hold(call: Call) -> None:
        await trio.sleep(10)

    async def undo(call: Call, reason: str) -> None:
        said.append("undo")

    handlers = {
        100: Handler(work, before_execute=decide, on_cancel=undo),
        101: hold,
        102: Handler(work, on_cancel=undo),
    }
    async with start(handlers, max_running=1) as ends, trio.open_nursery() as nursery:
        with trio.move_on_after(3):
            async with trio.open_nursery() as calls:
                calls.start_soon(ends.peer.request, 100)  # decided after a second, and then behind the next
                await trio.sleep(0.5)
                nursery.start_soon(partial(ends.peer.request, 101, timeout=None, priority=0))
                await trio.sleep(0.1)
                calls.start_soon(ends.peer.request, 102)
        await trio.sleep(20)
        assert said == ["undo"]  # of the decided one: no code of the other has run
        assert ends.left() == NOTHING


async def test_a_reader_of_a_call_that_is_cancelled_has_lost_nothing(start: Start, autojump_clock: MockClock) -> None:
    got: list[bytes] = []

    async def slow() -> AsyncIterator[bytes]:
        yield b"one"
        await trio.sleep(1)
        yield b"two"

    async def patient(call: Call) -> None:
        with trio.move_on_after(0.5):
            await call.body()
        got.append(await call.body())

    async with start({100: Handler(patient, spec=STREAMING)}) as ends:
        await ends.peer.message(100, slow())
        assert got == [b"onetwo"]


async def test_connecting_may_be_cancelled_before_it_has_begun(start: Start) -> None:
    async with start({101: echo}) as ends:
        for checkpoints in range(6):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cancel_after, checkpoints, scope)
                    async with connect(ends.system, ends.listener.url, token=b"secret"):
                        pass
        assert await ends.peer.request(101, b"alive") == b"alive"


async def cancel_after(checkpoints: int, scope: trio.CancelScope) -> None:
    for _ in range(checkpoints):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_connecting_and_serving_may_be_cancelled(start: Start, autojump_clock: MockClock) -> None:
    async def never(question: Any) -> Any:
        await trio.sleep_forever()

    async def decide(question: Credentials) -> Any:
        return CLIENT if question.token == b"secret" else await never(question)

    async with start({101: echo}, server={"authenticate": decide}) as ends:
        with trio.move_on_after(1) as scope:
            async with connect(ends.system, ends.listener.url, token=b"x"):
                pass
        assert scope.cancelled_caught
        await settled()
        assert len(ends.listener.peers) == 1
        assert await ends.peer.request(101, b"alive") == b"alive"


async def test_leaving_by_an_exception_closes_at_once(start: Start, autojump_clock: MockClock) -> None:
    log = Log()
    with pytest.RaisesGroup(KeyError, flatten_subgroups=True):
        async with start(log.handlers()) as ends, trio.open_nursery() as nursery:
            nursery.start_soon(ends.peer.request, 100)
            await trio.sleep(1)
            raise KeyError
    assert log.said == ["execute", "undo"]
    assert trio.current_time() < 3


async def test_files_are_closed_when_their_sending_is_cancelled(start: Start, tmp_path: Path) -> None:
    """In real time: files are read in threads, and for a virtual clock a thread that reads is a pause to jump over."""
    file = tmp_path / "body"
    file.write_bytes(bytes(10_000_000))
    begun = trio.Event()

    async def slow(call: Call) -> None:
        async for _ in call:
            begun.set()
            await trio.sleep_forever()

    def is_open() -> bool:
        return any(Path(f"/proc/self/fd/{number}").resolve() == file for number in os.listdir("/proc/self/fd"))

    async with start({100: Handler(slow, spec=STREAMING)}) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.peer.message, 100, file)
            await begun.wait()
            assert is_open()
            nursery.cancel_scope.cancel()
        assert not is_open()
        await wait_all_tasks_blocked()
        assert ends.left() == NOTHING


async def test_the_system_ends_under_running_operations(autojump_clock: MockClock) -> None:
    from levada.actors.maop import serve

    from .conftest import TOKENS

    log = Log()
    async with ActorSystem() as system, trio.open_nursery() as nursery:

        async def run() -> None:
            async with (
                serve(system, "maop+memory://desk", log.handlers(), authenticate=TOKENS) as listener,
                connect(system, listener.url, token=b"secret") as peer,
            ):
                await peer.request(100, timeout=None)

        nursery.start_soon(run)
        await trio.sleep(1)
        assert log.said == ["execute"]
        nursery.cancel_scope.cancel()
    assert log.said == ["execute", "undo"]


async def test_the_settings_say_how_long_undoing_takes(start: Start, autojump_clock: MockClock) -> None:
    undone: list[float] = []

    async def hang(call: Call) -> None:
        await trio.sleep_forever()

    async def undo(call: Call, reason: str) -> None:
        began = trio.current_time()
        try:
            await trio.sleep_forever()
        finally:
            undone.append(trio.current_time() - began)

    async with start({100: Handler(hang, on_cancel=undo), 101: echo}, cancel_timeout=2.0) as ends:
        with trio.move_on_after(1):
            await ends.peer.request(100)
        await trio.sleep(3)
        assert undone == pytest.approx([2.0])
        assert await ends.peer.request(101, b"alive") == b"alive"
