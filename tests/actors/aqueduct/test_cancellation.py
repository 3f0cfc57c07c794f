"""Cancelled or cut off at each step of a whole exchange: every channel ends, nobody hangs, no task is left."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import PeerConfig, connect, serve
from levada.framework import ActorSystem, TerminalState, channel, oneshot
from levada.framework.errors import CarrierError, ChannelError
from levada.transports.aqueduct import AqueductConfig
from levada.transports.carriers import MemoryConfig

from .conftest import Parcel, Start, settled


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope when so many steps of tasks have begun."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self.scope = scope
        self.left = steps

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel()


class Exchange:
    """Messages both ways on channels and oneshots, one in the other; keeps every handle, to look at it afterwards."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.done = False

    async def serve(self, m: Parcel) -> None:
        self.handles += [m.sender, m.receiver, m.sends_one]
        assert m.sender is not None
        assert m.receiver is not None
        assert m.sends_one is not None
        async with m.sender as sender:
            async for inner in m.receiver:
                self.handles.append(inner.sender)
                async with inner.sender as nested:
                    await nested.send(1)
                await sender.send(2)
        m.sends_one.send(3)

    async def run(self, url: str, system: ActorSystem, config: PeerConfig) -> None:
        async with connect(system, url, Parcel, config=config) as peer:
            back, results = channel(int)
            outer, at_peer = channel(Parcel)
            answer, asked = oneshot(int)
            self.handles += [results, outer, asked, back, at_peer, answer]
            await peer.send(Parcel(sender=back, receiver=at_peer, sends_one=answer))
            async with outer:
                for _ in range(3):
                    inner, numbers = channel(int)
                    self.handles += [inner, numbers]
                    await outer.send(Parcel(sender=inner))
                    assert [number async for number in numbers] == [1]
            assert [number async for number in results] == [2, 2, 2]
            assert await asked == 3
        self.done = True

    def end(self) -> None:
        """Give up what the program itself still holds."""
        for handle in self.handles:
            if handle._moved is None:
                handle.cancel() if hasattr(handle, "cancel") else handle.close()


def tasks() -> int:
    """Count all tasks there are."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    count, todo = 0, [root]
    while todo:
        count += 1
        todo += [child for nursery in todo.pop().child_nurseries for child in nursery.child_tasks]
    return count


async def exchange(config: PeerConfig, steps: int = 0) -> bool:
    """Run an exchange, cancelled after so many steps; whether it came to its end."""
    whole = Exchange()
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", whole.serve, Any, config=config) as listener,
    ):
        await wait_all_tasks_blocked()
        before = tasks()
        with trio.CancelScope() as scope:
            instrument = CancelAtStep(scope, steps)
            trio.lowlevel.add_instrument(instrument)
            try:
                await whole.run(listener.url, system, config)
            except* (CarrierError, ChannelError):
                pass
            finally:
                trio.lowlevel.remove_instrument(instrument)
        await settled()
        assert tasks() == before, "tasks are left"
        assert listener.peers == []
    for handle in whole.handles:
        if handle._moved is None and handle._other_half.away:
            # A receiver that still has messages ends when they have been taken.
            assert handle.state is not TerminalState.OPEN or handle._core.pending is not None, handle
    whole.end()
    return whole.done


@pytest.mark.handler_fails
async def test_cancelled_at_every_step(autojump_clock: MockClock) -> None:
    config = PeerConfig(core=AqueductConfig(drain_timeout=0.5))
    steps = 1
    while not await exchange(config, steps):
        steps += 1
    assert 50 < steps < 2000


@pytest.mark.ci
@pytest.mark.handler_fails
async def test_cut_off_at_every_call_of_the_carrier(autojump_clock: MockClock) -> None:
    """The connection is lost at each operation on it, of either side."""
    call = 0
    while True:
        call += 1
        carrier = MemoryConfig(shape="connection", cut_at_call=call, handshake_timeout=1.0)
        if await exchange(PeerConfig(carrier=carrier, core=AqueductConfig(drain_timeout=0.5))):
            break
    assert call > 20


@pytest.mark.parametrize("latency", [0.0, 0.01])
async def test_cut_off_after_some_octets(latency: float, autojump_clock: MockClock) -> None:
    for octets in range(1, 400, 7):
        carrier = MemoryConfig(shape="connection", cut_after=octets, latency=latency)
        assert not await exchange(PeerConfig(carrier=carrier, core=AqueductConfig(drain_timeout=0.5))) or octets > 300


async def test_a_cancelled_send_keeps_its_handles(start: Start, autojump_clock: MockClock) -> None:
    """A send that waits for room and is given up has sent nothing; the handles in its message are still here."""
    async with start(core=AqueductConfig(window=1, mailbox=1)) as ends:
        outer, travelling = channel(Parcel)
        await ends.peer.send(Parcel(receiver=travelling))
        got = (await ends.got.receive()).receiver
        outer.ordered(1)
        sender, receiver = channel(int)
        count = 0
        with trio.move_on_after(60):
            while True:
                await outer.send(Parcel())
                count += 1
        assert count > 256
        with trio.move_on_after(60) as scope:
            await outer.send(Parcel(sender=sender))
        assert scope.cancelled_caught
        sender.send_nowait(1)
        sender.finish_nowait()
        assert [number async for number in receiver] == [1]
        outer.finish_nowait()
        assert len([_ async for _ in got]) == count


async def test_leaving_may_be_cancelled(start: Start, autojump_clock: MockClock) -> None:
    """Cancelled while it waits for open channels, the end is at once."""
    async with start(core=AqueductConfig(drain_timeout=100.0)) as ends:
        sender, receiver = channel(int)
        theirs: Any = None
        began = trio.current_time()
        with trio.move_on_after(1):
            async with connect(
                ends.system, ends.listener.url, Parcel, config=PeerConfig(core=AqueductConfig(drain_timeout=100.0))
            ) as peer:
                await peer.send(Parcel(sender=sender))
                theirs = (await ends.got.receive()).sender
        assert trio.current_time() - began == pytest.approx(1.0, abs=0.01)
        assert receiver.state is theirs.state is TerminalState.CONNECTION_LOST


async def test_a_server_whose_end_is_cancelled_while_its_client_does_not_know_ends_at_once(
    autojump_clock: MockClock,
) -> None:
    """The client's answer would take two seconds; it hears of the loss as soon as that is possible."""

    async def take(m: Parcel) -> None:
        pass

    config = PeerConfig(carrier=MemoryConfig(shape="connection", latency=1.0))
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", take, Parcel, config=config) as listener,
        connect(system, listener.url, Parcel, config=config) as peer,
    ):
        await peer.send(Parcel())
        await trio.sleep(5.0)
        (serving,) = listener.peers
        began = trio.current_time()
        with trio.move_on_after(0.5) as scope:
            await serving.aclose()
        assert scope.cancelled_caught
        await serving.terminated()
        assert trio.current_time() == pytest.approx(began + 0.5)
        assert not listener.peers
        assert peer.entry.state is TerminalState.OPEN
        await peer.terminated()
        assert trio.current_time() == pytest.approx(began + 1.5, abs=0.02)


async def test_a_server_that_never_greets_can_be_given_up(autojump_clock: MockClock) -> None:
    from levada.transports.carriers import listen

    async with ActorSystem() as system, trio.open_nursery() as nursery:
        async with listen("memory://desk", MemoryConfig(shape="connection")) as listener:

            async def stay_silent() -> None:
                carrier = (await listener.accept()).accept()  # type: ignore[union-attr]
                assert (await carrier.wait_closed()).by_peer

            nursery.start_soon(stay_silent)
            with trio.move_on_after(3) as scope:
                async with connect(system, "aqueduct+memory://desk", Parcel):
                    pass
            assert scope.cancelled_caught
        assert system.statistics().actors == 0


async def test_cancelled_before_the_connection_has_begun() -> None:
    """Not even its actor runs then; the cancellation comes out as it is, and nothing stays behind."""
    async with ActorSystem() as system:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with connect(system, "aqueduct+memory://nobody", Parcel):
                raise AssertionError("it was entered")
        assert scope.cancelled_caught
        assert system.statistics().actors == 0
