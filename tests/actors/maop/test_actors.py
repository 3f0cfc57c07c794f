"""A connection and its parts are actors: what hangs below what, and that the end of one hurts nobody else."""

from __future__ import annotations

import contextvars
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.actors import carried
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.authentication import Authenticator, Credentials, Refused
from levada.actors.maop import (
    Call,
    Disapproved,
    Handler,
    HandlerSpec,
    MaopConfig,
    OperationActor,
    OperationFailed,
    OperationLost,
    OperationStopped,
    Peer,
    PeerConfig,
    TimesConfig,
    connect,
    serve,
)
from levada.actors.maop.connection import MaopDriver
from levada.actors.maop.control import ControlKeeper
from levada.actors.maop.executions import Execution
from levada.actors.maop.operations import OwnOperation
from levada.actors.maop.streams import MAX_IDLE
from levada.framework import ActorSystem, Identity, Ref
from levada.framework.errors import ActorStopped, ConnectionLost
from levada.transports.carriers import MemoryConfig
from levada.transports.maop import ConnectionState, decode_operations
from levada.transports.maop.frames import Message, Proceed

from .conftest import NOTHING, Start, echo, nothing, settled
from .test_limits import raw

STREAMING = HandlerSpec(allow_undefined_length=True, streaming=True)
SEEN: contextvars.ContextVar[int] = contextvars.ContextVar("seen", default=0)


def kinds(connection: MaopDriver) -> list[type]:
    """List the classes of a connection's children, in order of start."""
    return [type(actor(child)) for child in connection.children]


def pool_of(connection: MaopDriver) -> Ref[Any]:
    assert connection.control is not None
    return connection.control


def actor(ref: Ref[Any]) -> Any:
    """Look into an actor."""
    cell: Any = ref
    return cell._actor


class Work:
    """A handler that takes as long as it is let, and what it went through."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.go = trio.Event()

    async def execute(self, call: Call) -> bytes:
        self.said.append("execute")
        await self.go.wait()
        return b"done"

    async def undo(self, call: Call, reason: str) -> None:
        await trio.lowlevel.checkpoint()
        self.said.append(f"undo: {reason}")

    def handler(self, **settings: Any) -> Handler:
        return Handler(self.execute, on_cancel=self.undo, **settings)


async def expect(peer: Peer, kind: type[Exception], said: list[Exception], msg_id: int = 100) -> None:
    """Send a request that fails."""
    with pytest.raises(kind) as failed:
        await peer.request(msg_id, timeout=None)
    said.append(failed.value)


# ---------------------------------------------------------------- the tree


async def test_parts_of_a_connection_are_its_children(start: Start) -> None:
    work = Work()
    async with start({100: work.handler(), 101: echo}) as ends:
        await wait_all_tasks_blocked()  # the authenticator has ended
        assert (kinds(ends.client), kinds(ends.server)) == ([ControlKeeper], [ControlKeeper])
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ends.peer.request, 100)
            await wait_all_tasks_blocked()
            assert kinds(ends.client) == [ControlKeeper] + 3 * [OwnOperation]
            assert kinds(ends.server) == [ControlKeeper] + 3 * [Execution]
            work.go.set()
        await ends.peer.request(101)
        assert kinds(ends.client) == [ControlKeeper] + 3 * [OwnOperation]
        assert kinds(ends.server) == [ControlKeeper] + 3 * [Execution]
        for end in (ends.client, ends.server):
            assert end.children[0].path.endswith("/control")
            assert all(child.path.startswith(end.ref.path + "/") for child in end.children)


@pytest.mark.ci
async def test_few_actors_are_left_after_many_operations(start: Start) -> None:
    """What is at rest is bounded, and bursts above that end their actors."""
    async with start({100: nothing, 101: echo}, carrier=MemoryConfig(shape="connection", max_streams=600)) as ends:
        await wait_all_tasks_blocked()
        before = ends.system.statistics().actors
        for _ in range(1000):
            await ends.peer.request(101, b"x")
        assert ends.system.statistics().actors == before + 2
        async with trio.open_nursery() as nursery:
            for _ in range(500):
                nursery.start_soon(ends.peer.request, 101, b"x")
        await wait_all_tasks_blocked()
        for end, kind in ((ends.client, OwnOperation), (ends.server, Execution)):
            assert len(end.idle.of(kind)) == len(end.children) - 1 <= MAX_IDLE
        assert ends.left() == NOTHING


async def test_a_context_is_no_others(start: Start) -> None:
    """What the code of one operation sets, the next one does not see, though actors are used again."""
    saw: list[int] = []

    async def remember(call: Call) -> None:
        saw.append(SEEN.get())
        SEEN.set(call.stream_id + 1)
        if call.priority == 1:
            await trio.lowlevel.checkpoint()
        assert SEEN.get() == call.stream_id + 1

    async with start({100: remember, 101: echo}) as ends:
        for number in range(10):
            await ends.peer.request(100, priority=number % 2)
            await ends.peer.request(101)
    assert saw == [0] * 10


async def test_a_body_is_not_kept_by_an_actor_at_rest(start: Start) -> None:
    async with start({101: echo}) as ends:
        assert await ends.peer.request(101, bytes(100_000)) == bytes(100_000)
        await wait_all_tasks_blocked()
        (idle,) = ends.server.idle.of(Execution)
        assert not {"call", "operation", "handler"} & vars(idle).keys()
        (other,) = ends.client.idle.of(OwnOperation)
        assert (other.outcome, other.chunks, other.head) == (None, None, None)


# ---------------------------------------------------------------- operations of the peer


@pytest.mark.handler_fails
@pytest.mark.parametrize("how", ["kill", "fail"])
async def test_the_end_of_an_execution_is_its_operations(start: Start, how: str, autojump_clock: MockClock) -> None:
    """It fails at the initiator, its code undoes, and another one goes on."""
    work, other = Work(), Work()
    failed: list[Any] = []
    async with start({100: work.handler(), 101: other.handler(), 102: echo}) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect, ends.peer, OperationFailed, failed)
            nursery.start_soon(ends.peer.request, 101)
            await wait_all_tasks_blocked()
            (execution,) = (e for e in ends.server.executions.values() if e.call.msg_id == 100)
            if how == "kill":
                execution.ref.kill()
            else:

                async def breaks() -> None:
                    raise KeyError("a task of its own nursery")

                execution.start_soon(breaks)
            await trio.sleep(1)
            assert [(error.code, error.by_peer, error.detail) for error in failed] == [
                (11, True, "the handler was ended")
            ]
            assert work.said == ["execute", "undo: shutdown"]
            assert other.said == ["execute"]
            other.go.set()
        assert await ends.peer.request(102, b"alive") == b"alive"
        assert execution not in ends.server.idle.of(Execution)
        await settled()
        assert ends.left() == NOTHING
        assert ends.server.unbegun == 0


@pytest.mark.parametrize("where", ["body", "place", "turn"])
async def test_an_execution_ends_where_no_code_runs(start: Start, where: str, autojump_clock: MockClock) -> None:
    """It waits for the body, for a place at work, or for the turn in which it uses it: that place is free again."""
    work = Work()
    said: list[str] = []
    failed: list[Any] = []

    async def decide(call: Call) -> None:
        pass

    async def undo(call: Call, reason: str) -> None:
        said.append(reason)

    async def body() -> AsyncIterator[bytes]:
        await trio.sleep_forever()
        yield b""

    handlers = {
        100: Handler(nothing, spec=STREAMING, before_execute=decide, on_cancel=undo),
        101: work.handler(),
        102: Handler(nothing, on_cancel=undo),
        103: echo,
    }
    async with start(handlers, max_running=1) as ends:
        async with trio.open_nursery() as nursery:
            if where == "body":

                async def send() -> None:
                    with pytest.raises(OperationFailed) as error:
                        await ends.peer.message(100, body())
                    failed.append(error.value)

                nursery.start_soon(send)
            else:
                nursery.start_soon(ends.peer.request, 101)
                await wait_all_tasks_blocked()
                nursery.start_soon(expect, ends.peer, OperationFailed, failed, 102)
            await wait_all_tasks_blocked()
            (waiting,) = (e for e in ends.server.executions.values() if e.call.msg_id != 101)
            assert waiting.placed is (where != "body")
            if where == "turn":
                (running,) = (e for e in ends.server.executions.values() if e is not waiting)
                running.running = False
                ends.server.shared.limiter.done()  # gives the place to the other, whose turn does not come before the kill
                ends.server.shared.limiter.running += 1
                running.running = True
                assert ends.server.unbegun == 1
            waiting.ref.kill()
            await trio.sleep(1)
            assert [(error.code, error.detail) for error in failed] == [(11, "the handler was ended")]
            assert said == (["shutdown"] if where == "body" else [])  # otherwise no code of the handler has run
            work.go.set()
        assert await ends.peer.request(103, b"alive") == b"alive"
        await settled()
        assert ends.left() == NOTHING
        assert ends.server.unbegun == 0


async def test_an_operation_actor_undoes_when_its_execution_is_killed(start: Start, autojump_clock: MockClock) -> None:
    said: list[str] = []
    failed: list[Any] = []

    class Slow(OperationActor):
        async def execute(self, call: Call) -> None:
            said.append("execute")
            await trio.sleep_forever()

        async def on_cancel(self, call: Call, reason: str) -> None:
            said.append(f"undo: {reason}")

    async with start({100: Slow}) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect, ends.peer, OperationFailed, failed)
            await wait_all_tasks_blocked()
            assert kinds(ends.server) == [ControlKeeper, Execution, Slow]
            (execution,) = ends.server.executions.values()
            execution.ref.kill()
        assert said == ["execute", "undo: shutdown"]
        await settled()
        assert kinds(ends.server) == [ControlKeeper]


@pytest.mark.handler_fails
async def test_an_actor_whose_code_failed_is_not_used_again(start: Start) -> None:
    async def breaks(call: Call) -> None:
        raise KeyError

    async with start({100: breaks, 101: echo}) as ends:
        failed: list[Any] = []
        await expect(ends.peer, OperationFailed, failed)
        await wait_all_tasks_blocked()
        assert failed[0].code == 17
        assert kinds(ends.server) == [ControlKeeper]
        assert await ends.peer.request(101, b"alive") == b"alive"


# ---------------------------------------------------------------- operations of this side


async def test_a_killed_operation_is_cancelled_and_its_caller_told(start: Start, autojump_clock: MockClock) -> None:
    work, other = Work(), Work()
    failed: list[Any] = []
    async with start({100: work.handler(), 101: other.handler()}) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect, ends.peer, OperationStopped, failed)
            await wait_all_tasks_blocked()
            (operation,) = ends.client.operations.values()
            nursery.start_soon(ends.peer.request, 101)
            await wait_all_tasks_blocked()
            operation.ref.kill()
            await trio.sleep(1)
            assert len(work.said) == 2
            assert work.said[1].startswith("undo: the initiator ")
            other.go.set()
        (error,) = failed
        assert issubclass(type(error), ActorStopped)
        assert (error.code, error.by_peer, error.actor) == (11, False, operation.ref.path)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (OperationStopped, str(error))
        await settled()
        assert ends.left() == NOTHING
        assert kinds(ends.client) == [ControlKeeper, OwnOperation]


async def test_a_killed_operation_ends_an_upload_and_a_download(start: Start, autojump_clock: MockClock) -> None:
    said: list[str] = []

    async def swallow(call: Call) -> None:
        async for _ in call:
            pass

    async def give(call: Call) -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"piece"
                await trio.sleep(1)

        return pieces()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1000)
                await trio.sleep(0.1)
        finally:
            said.append("closed")

    async def upload() -> None:
        with pytest.raises(OperationStopped):
            await ends.peer.message(100, endless())
        said.append("upload")

    async def download() -> None:
        with pytest.raises(OperationStopped):
            async with ends.peer.open_request(101) as reply:
                async for _ in reply:
                    pass
        said.append("download")

    async with start({100: Handler(swallow, spec=STREAMING), 101: give}) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload)
            nursery.start_soon(download)
            await trio.sleep(3.5)
            for operation in [*ends.client.operations.values()]:
                operation.ref.kill()
        assert sorted(said) == ["closed", "download", "upload"]
        await settled()
        assert ends.left() == NOTHING


async def test_an_answer_is_not_read_behind_its_block(start: Start) -> None:
    """Its actor may have another operation by then."""
    async with start({101: echo}) as ends:
        async with ends.peer.open_request(101, b"x") as reply:
            pass
        with pytest.raises(OperationFailed, match="has been left"):
            await anext(reply)


async def test_the_end_of_the_connections_actor_is_a_lost_connection(start: Start, autojump_clock: MockClock) -> None:
    """Killed or stopped: callers are not told of their own actors, which end with it."""
    for stop in (False, True):
        work = Work()
        failed: list[Any] = []
        async with start({100: work.handler()}) as ends, trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(expect, ends.peer, OperationLost, failed)
            await wait_all_tasks_blocked()
            if stop:
                ends.client.ref.stop()
            else:
                ends.client.ref.kill()
            await ends.peer.terminated()
            await trio.sleep(1)
            assert len(failed) == 3
            assert [said for said in work.said if said != "execute"] == ["undo: the connection is over"] * 3


# ---------------------------------------------------------------- signals


async def test_a_killed_control_pool_goes_on_where_it_was(start: Start, autojump_clock: MockClock) -> None:
    """It is restarted under the same name; a full control stream is written on by the new one."""
    work = Work()
    async with start({100: work.handler(), 101: echo}) as ends:
        await ends.peer.request(101, b"x")
        server = ends.server
        (stream_id,) = server.core.pool.streams
        server.core.set_control_writable(stream_id, False)
        pool_of(server).kill()
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ends.peer.request, 101, b"x")
        assert server.core.pool.streams[stream_id].writable
        assert server.children[0] == server.control
        assert kinds(server)[0] is ControlKeeper
        assert ends.system.statistics().restarts == 1
    assert server.end is not None
    assert server.end.code == 0


@pytest.mark.handler_fails
async def test_a_control_pool_that_fails_too_often_ends_its_connection(start: Start, autojump_clock: MockClock) -> None:
    async with start({101: echo}) as ends:
        server = ends.server
        async with connect(ends.system, ends.listener.url, token=b"secret") as other:
            for _ in range(6):
                pool_of(server).kill()
                await wait_all_tasks_blocked()
            await ends.peer.terminated()
            assert await other.request(101, b"alive") == b"alive"


@pytest.mark.rule("MA-92")
@carried.memory_only
async def test_ma92_the_end_goes_on_when_the_control_pool_is_killed(start: Start, autojump_clock: MockClock) -> None:
    """Flushed, then Disconnect and close by 0: within the time that signals need, not the time limit."""
    carrier = MemoryConfig(shape="connection", latency=0.1)
    async with start({101: echo}, carrier=carrier, core=MaopConfig(times=TimesConfig(flush_timeout=5.0))) as ends:
        await ends.peer.request(101, b"x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.peer.aclose)
            await trio.sleep(0.105)
            # The client waits for an answer; the server, for the acknowledgement of its Disconnect.
            assert ends.client.core.state is ConnectionState.DRAINING
            assert ends.server.core.state is ConnectionState.CLOSING
            pool_of(ends.client).kill()
            pool_of(ends.server).kill()
            began = trio.current_time()
        assert trio.current_time() - began < 0.6
        assert ends.client.end is not None
        assert ends.client.end.code == 0


@pytest.mark.rule("MA-130")
async def test_ma130_signals_wait_until_there_is_a_stream_for_them(start: Start, autojump_clock: MockClock) -> None:
    """The peer stops the control stream while all it allows are in use: the next one is opened as soon as it allows more."""
    carrier = MemoryConfig(shape="connection", max_streams=3)
    async with (
        start({100: nothing}, server={"config": PeerConfig(carrier=carrier)}) as ends,
        raw(ends, carrier, listening=False) as peer,
        trio.open_nursery() as nursery,
    ):
        server = next(p for p in ends.listener.peers if p.vendor == "raw")._connection
        for _ in range(2):
            nursery.start_soon(expect, server.handle, OperationFailed, [])
        for _ in range(2):
            await peer.connection.accept_stream()
        first = await peer.open(Message(100, 5), uni=True)
        control = await peer.connection.accept_stream()
        assert list(decode_operations(await control.receive_some())) == [Proceed((first.stream_id,))]
        control.stop(0)
        await wait_all_tasks_blocked()
        assert not server.core.pool.starved
        second = await peer.open(Message(100, 5), uni=True)
        await trio.sleep(1)
        assert server.core.pool.starved
        assert peer.connection.accept_stream_nowait() is None
        control.send_nowait(b"", fin=True)
        following = await peer.connection.accept_stream()
        assert list(decode_operations(await following.receive_some())) == [Proceed((second.stream_id,))]
        await wait_all_tasks_blocked()
        assert not server.core.pool.starved
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------- who is let in


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_an_authenticator_that_is_ended_lets_nobody_in(how: str, autojump_clock: MockClock, scheme: str) -> None:
    asked: list[Credentials] = []

    async def decide(question: Credentials) -> Identity | Refused:
        asked.append(question)
        if question.token == b"slow":
            await trio.sleep_forever()
        return Identity(question.token.decode())

    async with (
        ActorSystem() as system,
        serve(system, f"maop+{scheme}://desk", {101: echo}, authenticate=decide) as listener,
        connect(system, listener.url, token=b"first") as peer,
        trio.open_nursery() as nursery,
    ):
        refused: list[ConnectionLost] = []

        async def enter() -> None:
            with pytest.raises(ConnectionLost) as no:
                async with connect(system, listener.url, token=b"slow"):
                    pass
            refused.append(no.value)

        nursery.start_soon(enter)
        await wait_all_tasks_blocked()
        (waiting,) = (
            c for c in listener._actor.children if c.path != listener.peers[0]._connection.ref.path and kinds_of(c)
        )
        assert kinds(actor(waiting)) == [ControlKeeper, Authenticator]
        authenticator = actor(waiting).children[1]
        assert authenticator.path.endswith("/authenticator")
        if how == "kill":
            authenticator.kill()
        else:
            actor(waiting).ref.stop()
        await trio.sleep(1)
        assert [(type(error), error.code) for error in refused] == [
            (Disapproved, 1) if how == "kill" else (ConnectionLost, 0)
        ]
        assert await peer.request(101, b"alive") == b"alive"
        assert len(listener.peers) == 1


def kinds_of(ref: Ref[Any]) -> list[type]:
    """List the classes of a connection's children; none of another actor."""
    made = actor(ref)
    return kinds(made) if isinstance(made, MaopDriver) else []
