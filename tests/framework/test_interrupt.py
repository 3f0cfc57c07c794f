"""Dangers (d): Ctrl-C. The runtime is protected from it, handlers are not, and the system ends in its named phases.

The signal is raised by the code under test, in the main thread, so that it comes at a known place.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import (
    PHASES,
    Actor,
    ActorSystem,
    Asks,
    Behaviour,
    Failed,
    Reason,
    Ref,
    actor,
    bounded,
    conflate,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorStopped


def interrupt() -> None:
    """Be Ctrl-C, here and now."""
    signal.raise_signal(signal.SIGINT)


def helper() -> None:
    """Stand for code that a handler calls."""
    interrupt()


@message
class Go(Asks[None]):
    pass


@message
class Get(Asks[int]):
    pass


class SyncHandler(Actor[Go]):
    @handles
    def go(self, m: Go) -> None:
        helper()


class AsyncHandler(Actor[Go]):
    @handles
    async def go(self, m: Go) -> None:
        helper()


class WaitingHandler(Actor[Go]):
    @handles
    async def go(self, m: Go) -> None:
        await trio.lowlevel.checkpoint()
        helper()


class NurseryHandler(Actor[Go]):
    @handles
    async def go(self, m: Go) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.child)

    async def child(self) -> None:
        await trio.lowlevel.checkpoint()
        helper()


class Inherited(SyncHandler):
    pass


class Overridden(SyncHandler):
    def go(self, m: Go) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        super().go(m)


class Unhandled(Actor[Any]):
    def unhandled(self, message: Any) -> None:
        helper()


class Started(Actor[Go]):
    def started(self) -> None:
        helper()

    @handles
    def go(self, m: Go) -> None:
        pass


class Loop(Actor[Go]):
    async def run(self) -> None:
        async for _ in self.mailbox:
            helper()


class Becomes(Actor[Go]):
    def started(self) -> None:
        self.become(Spins)

    @handles
    def go(self, m: Go) -> None:
        raise AssertionError("not this one")


class Spins(Behaviour):
    @handles
    def go(self: Any, m: Go) -> None:
        helper()


class Task(Actor[Go]):
    @handles
    def go(self, m: Go) -> None:
        self.start_soon(self.child)

    async def child(self) -> None:
        await trio.lowlevel.checkpoint()
        helper()


@actor
def function(m: Go) -> None:
    helper()


class Witness(Actor[Get]):
    """An actor beside the one that is interrupted: it must end in order."""

    log: list[str]

    @handles
    async def get(self, m: Get) -> int:
        await trio.lowlevel.checkpoint()
        return 1

    async def stopping(self, reason: Reason) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append(f"witness: {type(reason).__name__}")


def run_interrupted(body: Callable[[ActorSystem, list[str]], Awaitable[None]], *, in_group: bool = False) -> list[str]:
    """Run a body that is interrupted, and return what was seen of the end."""
    log: list[str] = []

    async def note(phase: str) -> None:
        await trio.lowlevel.checkpoint()
        log.append(phase)

    async def main() -> None:
        async with ActorSystem(shutdown_timeout=2.0, stop_timeout=1.0) as system:
            for phase in PHASES:
                system.at_end(phase, lambda phase=phase: note(phase))  # type: ignore[misc]
            witness = system.spawn(Witness, log)
            assert await witness.ask(Get()) == 1
            await body(system, log)

    with pytest.raises(BaseException) as caught:  # noqa: PT011  # a nursery wraps it in a group, as everywhere in trio
        trio.run(main)
    error: BaseException = caught.value
    assert isinstance(error, BaseExceptionGroup) == in_group
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert type(error) is KeyboardInterrupt
    return log


KINDS: list[Any] = [
    SyncHandler,
    AsyncHandler,
    WaitingHandler,
    NurseryHandler,
    Inherited,
    Overridden,
    Unhandled,
    Started,
    Loop,
    Becomes,
    Task,
    function,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("supervised", [False, True], ids=["stop", "restart"])
def test_d_ctrl_c_in_a_handler_ends_the_system_in_its_phases(kind: Any, supervised: bool) -> None:
    """Whatever the supervision says: an interrupt is nothing to recover from."""

    async def body(system: ActorSystem, log: list[str]) -> None:
        ref = system.spawn(kind, supervise=restart("permanent") if supervised else "stop")
        ref.tell(Go())
        await trio.sleep_forever()

    # Actors end in the phase "drain", beside what is called in it.
    log = run_interrupted(body, in_group=kind is NurseryHandler)
    assert sorted(log) == sorted(["accept", "drain", "witness: Shutdown", "close", "flush"])
    assert [line for line in log if line in PHASES] == list(PHASES)


@pytest.mark.parametrize("kind", [SyncHandler, AsyncHandler, WaitingHandler, Unhandled], ids=lambda kind: kind.__name__)
def test_d_an_asker_hears_that_the_actor_was_interrupted(kind: Any) -> None:
    """Inline or on a worker, the interrupt is the handler's and not the asker's."""

    async def body(system: ActorSystem, log: list[str]) -> None:
        ref = system.spawn(kind)
        with pytest.raises(ActorStopped) as caught:
            await ref.ask(Go())
        cause = caught.value.__cause__
        assert isinstance(cause, KeyboardInterrupt)
        log.append("heard")
        reason = await ref.terminated()
        assert isinstance(reason, Failed)
        assert reason.error is cause

    assert run_interrupted(body)[0] == "heard"


class Asker(Actor[Go]):
    """Asks another actor, and fails with it."""

    other: Ref[Go]

    @handles
    async def go(self, m: Go) -> None:
        await self.other.ask(Go())


class Exits(Actor[Go]):
    @handles
    def go(self, m: Go) -> None:
        raise SystemExit(3)


async def ask_in_a_nursery(ref: Ref[Go]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ref.ask, Go())


@pytest.mark.parametrize("how", ["ask", "ask by another actor", "ask in a nursery", "ask and say more"])
@pytest.mark.parametrize(("kind", "ends"), [(SyncHandler, KeyboardInterrupt), (Exits, SystemExit)])
def test_d_what_ends_the_program_comes_out_alone_if_the_block_waits_for_that_answer(
    kind: type[Actor[Go]], ends: type[BaseException], how: str
) -> None:
    """The error of the ask, which tells the same, would make a group of it: another exit code, and another traceback."""

    async def main() -> None:
        async with ActorSystem() as system:
            ref = system.spawn(kind)
            if how == "ask by another actor":
                ref = system.spawn(Asker, ref)
            if how == "ask in a nursery":
                await ask_in_a_nursery(ref)
            try:
                await ref.ask(Go())
            except ActorStopped as error:
                if how == "ask and say more":
                    raise ValueError("no answer") from error
                raise

    with pytest.raises(ends) as caught:
        trio.run(main)
    assert type(caught.value) is ends
    assert caught.value.__context__ is None


def test_d_another_error_of_the_block_comes_out_beside_the_interrupt() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = system.spawn(SyncHandler)
            with pytest.raises(ActorStopped):
                await ref.ask(Go())
            raise ValueError("mine")

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(main)
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyboardInterrupt]


@pytest.mark.parametrize("way", ["tell", "send"])
def test_d_ctrl_c_during_tell_is_put_off_until_the_message_is_in(way: str) -> None:
    """Between looking and putting in, the runtime runs a function of the user's: the key."""
    handled: list[int] = []

    def key(m: Any) -> int:
        interrupt()
        return m.n  # type: ignore[no-any-return]

    @message
    class Item:
        n: int

    class Takes(Actor[Item]):
        @handles
        def item(self, m: Item) -> None:
            handled.append(m.n)

    async def body(system: ActorSystem, log: list[str]) -> None:
        ref = system.spawn(Takes, mailbox=bounded(5, overflow=conflate(key)))
        if way == "tell":
            ref.tell(Item(1))
        else:
            await ref.send(Item(1))
        log.append("told")
        await trio.sleep_forever()

    log = run_interrupted(body)
    assert log[0] == "told"
    assert handled == [1]


def test_d_ctrl_c_while_nothing_runs_ends_the_system_in_its_phases() -> None:
    async def body(system: ActorSystem, log: list[str]) -> None:
        await wait_all_tasks_blocked()
        interrupt()

    log = run_interrupted(body)
    assert [line for line in log if line in PHASES] == list(PHASES)
    assert "witness: Shutdown" in log


def test_d_ctrl_c_again_and_again_while_the_system_ends_still_ends_it() -> None:
    """The second one cuts the phases short, and none of them leaves a task behind."""
    log: list[str] = []

    class Stubborn(Actor[Go]):
        async def stopping(self, reason: Reason) -> None:
            for _ in range(3):
                interrupt()
                await trio.lowlevel.checkpoint()
            log.append("stopped")

        @handles
        def go(self, m: Go) -> None:
            pass

    async def main() -> None:
        async with ActorSystem() as system:
            ref = system.spawn(Stubborn)
            system.spawn(Witness, log)
            await ref.ask(Go())

    with pytest.raises(BaseException) as caught:  # noqa: PT011  # alone or in a group
        trio.run(main)
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, KeyboardInterrupt)


# ---------------------------------------------------------------- at any line


class Interrupts:
    """Raises the signal when the interpreter comes to the n-th line of the runtime."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if "/levada/framework/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                interrupt()
        return self


class Tally(Actor[Get]):
    handled: list[int]

    @handles
    def get(self, m: Get) -> int:
        self.handled.append(1)
        return 1

    def undelivered(self, messages: list[Any]) -> None:
        self.handled.extend(1 for _ in messages)


class Slow(Tally):
    @handles
    async def get(self, m: Get) -> int:  # type: ignore[override]  # waits where the other does not
        self.handled.append(1)
        await trio.lowlevel.checkpoint()
        return 1


def run_traced(at: int) -> tuple[int, int, int, list[bool]]:
    """Run a little of everything; return lines left, messages put in, messages accounted for, and who is alive."""
    handled: list[int] = []
    told = 0
    refs: list[Ref[Any]] = []
    tracer = Interrupts(at)

    async def main() -> None:
        nonlocal told
        async with ActorSystem(shutdown_timeout=2.0, stop_timeout=1.0) as system:
            quick = system.spawn(Tally, handled)
            refs.append(quick)
            slow = system.spawn(Slow, handled, mailbox=bounded(1), supervise=restart())
            refs.append(slow)
            for _ in range(3):
                quick.tell(Get())
                told += 1
            for ref in refs:
                for _ in range(3):
                    await ref.send(Get())
                    told += 1
            await quick.ask(Get())
            await slow.ask(Get())
            slow.kill()
            await trio.lowlevel.checkpoint()

    previous = sys.gettrace()
    sys.settrace(tracer)
    others = None
    try:
        trio.run(main)
    except KeyboardInterrupt:
        pass
    except BaseExceptionGroup as group:
        others = group.split(KeyboardInterrupt)[1]
    finally:
        sys.settrace(previous)
    assert others is None
    return tracer.left, told, len(handled), [ref.is_alive for ref in refs]


@pytest.mark.ci
def test_d_ctrl_c_at_any_line_of_the_runtime_loses_no_message_and_leaves_nobody_behind() -> None:
    """What `tell` has taken is handled or given back; every actor has ended; the interrupt comes out."""
    whole = 100_000
    total = whole - run_traced(whole)[0]
    assert total > 500
    for at in range(1, total, total // 150):
        left, told, accounted, alive = run_traced(at)
        if left <= 0:
            # Two asks are not counted as told: they may or may not have been put in.
            assert told <= accounted <= told + 3, f"line {at}: {told} told, {accounted} accounted for"
            assert not any(alive), f"line {at}"
