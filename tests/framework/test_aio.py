"""A system inside an asyncio program, as a guest of its loop and in a thread: `levada.framework.aio`."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Asks, Failed, Reason, Sender, aio, channel, handles, message
from levada.framework.errors import ActorStopped, ChannelCancelled, ConfigurationError

Open = Callable[[ActorSystem], aio.Portal]
WHERE = contextvars.ContextVar("WHERE", default="nowhere")


@message
class Add:
    n: int


@message
class Total(Asks[int]):
    pass


@message
class Break(Asks[int]):
    pass


@message
class Follow:
    numbers: Sender[int]


@message
class Call(Asks[int]):
    function: Callable[..., Awaitable[int]]
    args: tuple[int, ...] = ()


class Counter(Actor[Add | Total | Break | Follow]):
    total: int = 0
    ends: list[str] = attrs.field(factory=list)

    @handles
    def add(self, m: Add) -> None:
        self.total += m.n

    @handles
    def tell_total(self, m: Total) -> int:
        return self.total

    @handles
    def fail(self, m: Break) -> int:
        raise LookupError("no such number")

    @handles
    async def follow(self, m: Follow) -> None:
        async with m.numbers:
            for number in range(3):
                await m.numbers.send(number)

    def stopping(self, reason: Reason) -> None:
        self.ends.append("stopped")


class Waits(Actor[Total]):
    """Never answers, and says when its handler was cancelled."""

    seen: list[str] = attrs.field(factory=list)

    @handles
    async def wait(self, m: Total) -> int:
        self.seen.append("asked")
        try:
            await trio.sleep_forever()
        finally:
            self.seen.append("cancelled")


@pytest.fixture(params=[aio.open_in_loop, aio.open_in_thread], ids=["loop", "thread"])
def open_portal(request: pytest.FixtureRequest) -> Open:
    chosen: Open = request.param
    return chosen


def run(main: Callable[[], Awaitable[object]]) -> None:
    """Run a program of asyncio; no thread and no run of trio may be left."""
    before = set(threading.enumerate())

    async def whole() -> None:
        await main()

    asyncio.run(whole(), debug=True)
    assert not trio.lowlevel.in_trio_run()
    # trio keeps the threads of its cache for ten seconds.
    assert {thread for thread in threading.enumerate() if thread.name.startswith("levada")} <= before


async def settled(portal: aio.Portal) -> None:
    """Let the tasks that were just made begin, then wait until nothing moves in trio."""
    await asyncio.sleep(0)
    await portal.run(wait_all_tasks_blocked)


def test_asks_are_answered(open_portal: Open) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            counter = await portal.call(lambda: portal.system.spawn(Counter))
            counter.from_thread.tell(Add(2))
            await portal.run(counter.send, Add(3))
            assert await portal.ask(counter, Total()) == 5
        assert portal.system.phase == "over"

    run(main)


def test_in_the_loop_refs_and_channels_are_used_directly() -> None:
    async def main() -> None:
        async with aio.open_in_loop(ActorSystem(strict=True)) as portal:
            counter = portal.system.spawn(Counter)
            numbers, received = channel(int)
            counter.tell(Add(5))
            counter.tell(Follow(numbers))
            assert [number async for number in portal.iterate(received)] == [0, 1, 2]
            assert await portal.ask(counter, Total()) == 5

    run(main)


def test_the_failure_of_a_handler_is_an_actor_stopped(open_portal: Open, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            counter = await portal.call(lambda: portal.system.spawn(Counter))
            with pytest.raises(ActorStopped) as stopped:
                await portal.ask(counter, Break())
            assert isinstance(stopped.value.__cause__, LookupError)
            assert isinstance(await portal.run(counter.terminated), Failed)

    run(main)
    assert "LookupError: no such number" in caplog.text


def test_a_cancelled_channel_raises_in_the_loop_over_it(open_portal: Open) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            numbers, received = channel(int)
            await portal.run(numbers.send, 1)
            items = portal.iterate(received)
            assert await anext(items) == 1
            await portal.call(numbers.cancel)
            with pytest.raises(ChannelCancelled):
                await anext(items)

    run(main)


def test_a_cancelled_wait_takes_nothing(open_portal: Open) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            numbers, received = channel(int)
            items = portal.iterate(received)
            waiting = asyncio.ensure_future(anext(items))
            await settled(portal)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await portal.call(numbers.send_nowait, 7)
            assert await anext(items) == 7
            await portal.call(numbers.finish_nowait)
            with pytest.raises(StopAsyncIteration):
                await anext(items)

    run(main)


def test_an_item_that_was_taken_before_the_cancellation_is_not_lost() -> None:
    async def main() -> None:
        async with aio.open_in_loop(ActorSystem()) as portal:
            numbers, received = channel(int)
            items = portal.iterate(received)
            waiting = asyncio.ensure_future(anext(items))
            await settled(portal)
            numbers.send_nowait(1)  # given to the waiting task of trio
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            numbers.send_nowait(2)
            numbers.finish_nowait()
            assert [number async for number in items] == [1, 2]

    run(main)


def test_a_cancelled_call_ends_when_trio_has_cleaned_up(open_portal: Open) -> None:
    seen: list[str] = []

    async def slow(gate: trio.Event) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await gate.wait()
            seen.append("cleaned up")

    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            gate = trio.Event()
            call = asyncio.create_task(portal.run(slow, gate))
            await settled(portal)
            for _ in range(3):  # more of them change nothing
                call.cancel()
                await settled(portal)
            assert not call.done()
            await portal.call(gate.set)
            with pytest.raises(asyncio.CancelledError):
                await call
            assert seen == ["cleaned up"]

    run(main)


def test_a_cancelled_ask_withdraws_the_question(open_portal: Open) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            seen: list[str] = []

            def make() -> Waits:
                return Waits(seen)

            waits = await portal.call(portal.system.spawn, make)
            first, second = (asyncio.create_task(portal.ask(waits, Total(), timeout=None)) for _ in range(2))
            await settled(portal)
            second.cancel()
            first.cancel()
            assert [type(error) for error in await asyncio.gather(first, second, return_exceptions=True)] == [
                asyncio.CancelledError
            ] * 2
            await portal.call(waits.kill)
            assert await portal.run(waits.terminated)
            assert seen == ["asked", "cancelled"]

    run(main)


def test_a_timeout_of_asyncio_works(open_portal: Open) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await portal.run(trio.sleep_forever)
            assert await portal.call(len, "still here") == 10

    run(main)


def test_an_error_during_the_cancellation_is_the_result(open_portal: Open) -> None:
    async def fails() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise KeyError("while it ended") from None

    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            call = asyncio.create_task(portal.run(fails))
            await settled(portal)
            call.cancel()
            with pytest.raises(KeyError, match="while it ended"):
                await call

    run(main)


class Scene:
    """A context manager of trio that notes how it was left."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.broken = trio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Scene, None]:
        async def breaks() -> None:
            await self.broken.wait()
            raise OSError("the line is cut")

        self.seen.append("entered")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(breaks)
                yield self
                self.seen.append("left")
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            self.seen.append(type(group.exceptions[0]).__name__)
            raise group.exceptions[0] from None


def test_a_context_manager_is_held_in_one_task(open_portal: Open) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            scene = Scene()
            async with portal.enter(scene.open()) as opened:
                assert opened is scene
                assert scene.seen == ["entered"]
            assert scene.seen == ["entered", "left"]

    run(main)


def test_the_error_of_a_block_goes_through_its_context_manager(open_portal: Open) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            scene = Scene()
            with pytest.raises(KeyError, match="body"):
                async with portal.enter(scene.open()):
                    raise KeyError("body")
            assert scene.seen == ["entered", "KeyError"]

    run(main)


def test_a_cancelled_block_cancels_its_context_manager(open_portal: Open) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            scene = Scene()

            async def block() -> None:
                async with portal.enter(scene.open()):
                    await asyncio.get_running_loop().create_future()

            task = asyncio.create_task(block())
            await settled(portal)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert scene.seen == ["entered", "Cancelled"]

    run(main)


def test_a_context_manager_that_fails_ends_the_block(open_portal: Open) -> None:
    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:
            scene = Scene()
            with pytest.raises(OSError, match="the line is cut"):
                async with portal.enter(scene.open()):
                    await portal.call(scene.broken.set)
                    await asyncio.get_running_loop().create_future()
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            scene.broken = trio.Event()
            with pytest.raises(OSError, match="the line is cut"):
                async with portal.enter(scene.open()):
                    await portal.call(scene.broken.set)
            await asyncio.sleep(0)

    run(main)


def test_trio_waits_for_a_function_of_asyncio(open_portal: Open) -> None:
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    async def fails() -> int:
        raise KeyError("in asyncio")

    async def cancelled() -> int:
        raise asyncio.CancelledError

    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:

            async def answer(m: Call) -> int:
                try:
                    return await portal.run_asyncio(m.function, *m.args)
                except KeyError:
                    return -1
                except aio.TaskCancelled:
                    return -2

            actor = await portal.call(portal.system.spawn, answer)
            assert await portal.ask(actor, Call(double, (4,))) == 8
            assert await portal.ask(actor, Call(fails)) == -1
            assert await portal.ask(actor, Call(cancelled)) == -2

    run(main)


def test_a_cancellation_in_trio_cancels_the_task_of_asyncio(open_portal: Open) -> None:
    seen: list[str] = []

    async def waits(cancel: Callable[[], object]) -> None:
        try:
            cancel()
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:

            async def limited() -> bool:
                token = trio.lowlevel.current_trio_token()
                with trio.CancelScope() as scope:
                    await portal.run_asyncio(waits, lambda: token.run_sync_soon(scope.cancel))
                seen.append("over")
                return scope.cancelled_caught

            assert await portal.run(limited)
            assert seen == ["cleaned up", "over"]
            assert len(asyncio.all_tasks()) == 2  # this one and the keeper

    run(main)


def test_context_variables_cross_both_ways(open_portal: Open) -> None:
    async def in_asyncio() -> str:
        return WHERE.get()

    async def main() -> None:
        async with open_portal(ActorSystem()) as portal:

            async def in_trio() -> tuple[str, str]:
                here = WHERE.get()
                WHERE.set("trio")
                return here, await portal.run_asyncio(in_asyncio)

            WHERE.set("asyncio")
            assert await portal.run(in_trio) == ("asyncio", "trio")
            assert WHERE.get() == "asyncio"

    run(main)


def test_a_failure_that_no_supervisor_handles_comes_out_of_the_block(
    open_portal: Open, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with pytest.raises(LookupError, match="no such number"):
            async with open_portal(ActorSystem()) as portal:
                counter = await portal.call(lambda: portal.system.spawn(Counter, supervise="escalate"))
                counter.from_thread.tell(Break())
                await asyncio.get_running_loop().create_future()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # no cancellation is left

    run(main)


def test_the_system_ends_in_its_phases_after_the_calls(open_portal: Open) -> None:
    async def main() -> None:
        ends: list[str] = []
        system = ActorSystem()

        def make() -> Counter:
            return Counter(ends=ends)

        async def held() -> None:
            try:
                await trio.sleep_forever()
            finally:
                ends.append("call")

        async def note(phase: str) -> None:
            ends.append(phase)

        async with open_portal(system) as portal:
            await portal.call(system.spawn, make)
            await portal.call(system.at_end, "accept", lambda: note("accept"))
            await portal.call(system.at_end, "flush", lambda: note("flush"))
            call = asyncio.create_task(portal.run(held))
            await settled(portal)
        with pytest.raises(ActorStopped, match="the actor system 'levada' has ended"):
            await call
        assert ends == ["call", "accept", "stopped", "flush"]
        with pytest.raises(ActorStopped, match="has ended"):
            await portal.run(trio.sleep, 0)

    run(main)


def test_the_end_of_the_loop_ends_the_system(open_portal: Open) -> None:
    ends: list[str] = []
    system = ActorSystem()

    async def main() -> None:
        stack = AsyncExitStack()
        portal = await stack.enter_async_context(open_portal(system))
        await portal.call(system.spawn, lambda: Counter(ends=ends))
        # As in a notebook that is closed: nothing leaves the block.

    run(main)
    assert (system.phase, ends) == ("over", ["stopped"])


def test_a_cancellation_of_the_end_skips_the_phases(open_portal: Open) -> None:
    async def main() -> None:
        system = ActorSystem(shutdown_timeout=1000)
        seen: list[str] = []
        entered, ending = asyncio.Event(), asyncio.Event()

        async def drains() -> None:
            asyncio_loop.call_soon_threadsafe(ending.set)

        asyncio_loop = asyncio.get_running_loop()
        system.at_end("drain", drains)

        async def block() -> None:
            async with open_portal(system) as portal:
                waits = await portal.call(system.spawn, lambda: Waits(seen))
                asyncio.create_task(portal.ask(waits, Total(), timeout=None)).add_done_callback(lambda _: None)
                await settled(portal)
                entered.set()
                await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(block())
        await entered.wait()
        task.cancel()
        await ending.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (system.phase, seen) == ("over", ["asked", "cancelled"])

    run(main)


def test_the_error_of_the_block_comes_out_after_the_end(open_portal: Open) -> None:
    async def main() -> None:
        system = ActorSystem()
        with pytest.raises(KeyError, match="mine"):
            async with open_portal(system):
                raise KeyError("mine")
        assert system.phase == "over"

    run(main)


def test_an_entering_that_is_cancelled_leaves_nothing(open_portal: Open) -> None:
    async def main() -> None:
        system = ActorSystem()
        task = asyncio.create_task(open_portal(system).__aenter__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert system.phase == "over"
        assert len(asyncio.all_tasks()) == 1

    run(main)


@pytest.mark.parametrize("runner", ["asyncio.run", "run_until_complete"])
def test_ctrl_c_ends_the_system_in_order(open_portal: Open, runner: str) -> None:
    """`asyncio.run` cancels the main task; elsewhere trio's own handler or Python's raises."""
    ends: list[str] = []
    system = ActorSystem()

    async def main() -> None:
        async with open_portal(system) as portal:
            await portal.call(system.spawn, lambda: Counter(ends=ends))
            await portal.call(len, "started")
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.get_running_loop().create_future()

    if runner == "asyncio.run":
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    else:
        loop = asyncio.new_event_loop()
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(main())
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.close()
    assert (system.phase, ends) == ("over", ["stopped"])


@trio.lowlevel.enable_ki_protection
async def interrupt_in_trio() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_skips_the_phases_even_if_it_strikes_in_the_code_of_trio() -> None:
    ends: list[str] = []
    seen: list[str] = []
    system = ActorSystem()

    async def main() -> None:
        async with aio.open_in_loop(system) as portal:
            system.spawn(lambda: Counter(ends=ends))
            waits = system.spawn(lambda: Waits(seen=seen))
            waits.tell(Total())
            await portal.run(wait_all_tasks_blocked)

            async def again() -> None:
                trio.lowlevel.spawn_system_task(interrupt_in_trio)

            system.at_end("accept", again)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert (system.phase, ends, seen) == ("over", ["stopped"], ["asked", "cancelled"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Spins(Actor[Add]):
    """Computes until it is interrupted."""

    ends: list[str] = attrs.field(factory=list)

    @handles
    def spin(self, m: Add) -> None:
        try:
            while True:
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            self.ends.append("interrupted")
            raise


def test_a_second_ctrl_c_ends_a_handler_that_never_returns() -> None:
    ends: list[str] = []
    system = ActorSystem()

    async def main() -> None:
        async with aio.open_in_loop(system):
            system.spawn(lambda: Spins(ends=ends)).tell(Add(1))
            await asyncio.get_running_loop().create_future()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert (system.phase, ends) == ("over", ["interrupted"])


def test_the_handler_of_ctrl_c_is_the_one_of_asyncio_again_after_the_block() -> None:
    async def main() -> None:
        before = signal.getsignal(signal.SIGINT)
        async with aio.open_in_loop(ActorSystem()):
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before

    run(main)


def test_pythons_handler_of_ctrl_c_is_back_if_the_block_was_never_left() -> None:
    stack = AsyncExitStack()
    system = ActorSystem()

    async def main() -> None:
        await stack.enter_async_context(aio.open_in_loop(system))

    run(main)
    assert system.phase == "over"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_system_goes_into_the_same_run() -> None:
    async def main() -> None:
        async with aio.open_in_loop(ActorSystem("one")) as portal:
            with pytest.raises(ConfigurationError, match=r"runs trio already; use Portal\.enter\(system\)"):
                await aio.open_in_loop(ActorSystem("two")).__aenter__()
            async with portal.enter(ActorSystem("two")) as two:
                counter = two.spawn(Counter)
                counter.tell(Add(1))
                assert await portal.ask(counter, Total()) == 1
            assert two.phase == "over"

    run(main)


def test_a_system_in_a_thread_beside_one_in_the_loop() -> None:
    async def main() -> None:
        async with aio.open_in_loop(ActorSystem("one")) as one, aio.open_in_thread(ActorSystem("two")) as two:
            here = one.system.spawn(Counter)
            there = await two.call(lambda: two.system.spawn(Counter))
            assert (await one.ask(here, Total()), await two.ask(there, Total())) == (0, 0)

    run(main)


def test_mistakes_say_what_to_do(open_portal: Open) -> None:
    async def main() -> None:
        portal = open_portal(ActorSystem())
        with pytest.raises(ConfigurationError, match="this portal was not entered"):
            await portal.run(trio.sleep, 0)
        async with portal:
            with pytest.raises(ConfigurationError, match="this portal was entered before"):
                await portal.__aenter__()
            with pytest.raises(ConfigurationError, match="in trio await the function directly"):
                await portal.run(portal.run, trio.sleep, 0)
            with pytest.raises(ConfigurationError, match="in asyncio await the function directly"):
                await portal.run_asyncio(asyncio.sleep, 0)

            def elsewhere() -> None:
                with pytest.raises(ConfigurationError, match="belongs to another asyncio loop"):
                    asyncio.run(portal.call(len, ""))

            await asyncio.to_thread(elsewhere)

    run(main)


def test_a_system_that_cannot_be_entered_says_so(open_portal: Open) -> None:
    async def main() -> None:
        system: Any = ActorSystem()
        async with open_portal(system):
            pass
        with pytest.raises(ConfigurationError, match="was entered before"):
            await open_portal(system).__aenter__()

    run(main)
