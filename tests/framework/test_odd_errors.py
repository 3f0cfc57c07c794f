"""Exceptions whose own methods fail: they fail their actor like any other, and the system goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Asks, Failed, Sender, Supervision, channel, handles, message, restart
from levada.framework.errors import ActorStopped, ChannelCancelled


class Broken(Exception):
    """What the methods of the odd errors raise."""


def broken(*_: Any) -> Any:
    raise Broken


@dataclass(frozen=True)
class Frozen(Exception):
    item: str = "tea"


class Wordless(Exception):
    def __repr__(self) -> str:
        raise Broken

    __str__ = __repr__


class Incomparable(Exception):
    def __eq__(self, other: object) -> bool:
        raise Broken

    def __hash__(self) -> int:
        raise Broken


class Empty(Exception):
    def __len__(self) -> int:
        return 0


ODD = [Frozen, Wordless, Incomparable, Empty]


@message
class Go(Asks[int]):
    way: str


@message
class Wait(Asks[int]):
    pass


@message
class Fine(Asks[int]):
    pass


class Clerk(Actor[Go | Wait | Fine]):
    """Fails in one of three ways, or not at all."""

    error: Callable[[], Exception]

    @handles
    def go(self, m: Go) -> int:
        if m.way == "in a task":
            self.start_soon(self.fail)
            return 0
        raise self.error()

    @handles
    async def wait(self, _: Wait) -> int:
        await trio.lowlevel.checkpoint()
        raise self.error()

    @handles
    def fine(self, _: Fine) -> int:
        return 1

    async def fail(self) -> None:
        raise self.error()


@pytest.mark.parametrize("supervise", ["stop", restart()], ids=["stop", "restart"])
@pytest.mark.parametrize("question", [Go("at once"), Wait(), Go("in a task")], ids=["sync", "async", "task"])
@pytest.mark.parametrize("error", ODD)
async def test_an_odd_error_fails_its_actor_and_nothing_else(
    error: type[Exception], question: Go | Wait, supervise: Supervision
) -> None:
    async with ActorSystem() as system:
        bystander, ref = system.spawn(Clerk, error), system.spawn(Clerk, error, supervise=supervise)
        if question == Go("in a task"):
            assert await ref.ask(question) == 0
        else:
            with pytest.raises(ActorStopped) as caught:
                await ref.ask(question)
            assert type(caught.value.__cause__) is error
        await wait_all_tasks_blocked()
        if supervise == "stop":
            reason = await ref.terminated()
            assert isinstance(reason, Failed)
            assert type(reason.error) is error
        else:
            assert await ref.ask(Fine()) == 1
        assert await bystander.ask(Fine()) == 1
        assert (system.statistics().failures, system.statistics().restarts) == (1, int(supervise != "stop"))


async def test_an_error_without_text_is_named_by_its_class(system: ActorSystem) -> None:
    ref = system.spawn(Clerk, Wordless, name="clerk")
    with pytest.raises(ActorStopped, match=r"^/clerk failed: <Wordless without text: Broken>$") as caught:
        await ref.ask(Go("at once"))
    assert repr(caught.value.reason) == "Failed(error=<Wordless without text: Broken>)"


async def test_an_error_that_is_false_is_logged_with_its_traceback(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    ref = system.spawn(Clerk, Empty)
    ref.tell(Wait())
    await ref.terminated()
    [info] = [record.exc_info for record in caplog.records if record.levelno == logging.ERROR]
    assert isinstance(info, tuple)
    assert info[0] is Empty


async def test_a_channel_says_that_its_actor_failed_also_without_text(system: ActorSystem) -> None:
    class Source(Actor[Wait]):
        out: Sender[int]

        @handles
        async def wait(self, _: Wait) -> int:
            raise Wordless

    sender, receiver = channel(int)
    ref = system.spawn(Source, sender, name="source")
    ref.tell(Wait())
    with pytest.raises(ChannelCancelled, match="failed: <Wordless without text: Broken>"):
        await receiver.receive()


@pytest.mark.parametrize("error", ODD)
async def test_an_odd_error_escalates_to_the_block(error: type[Exception]) -> None:
    with pytest.raises(error):
        async with ActorSystem() as system:
            system.spawn(Clerk, error, supervise="escalate").tell(Go("at once"))
            await trio.sleep_forever()


@pytest.mark.parametrize("error", ODD)
async def test_an_odd_error_of_the_body_and_that_of_an_actor_come_out_as_a_group(error: type[Exception]) -> None:
    with pytest.RaisesGroup(error, error):
        async with ActorSystem() as system:
            system.spawn(Clerk, error, supervise="escalate").tell(Go("at once"))
            try:
                await trio.sleep_forever()
            finally:
                raise error


async def test_an_error_of_the_runtime_comes_out_of_the_block_although_an_actor_cannot_end(
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(Broken):
        async with ActorSystem() as system:
            ref = system.spawn(Clerk, Frozen)
            ref.add_watcher("a watcher must not fail", broken)  # type: ignore[attr-defined]
            assert await ref.ask(Fine()) == 1
            ref.kill()
            await trio.sleep_forever()
    assert trio.current_time() == 0.0
