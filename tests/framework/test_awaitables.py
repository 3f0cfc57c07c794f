"""Whatever a handler returns to be awaited is awaited; a handler that yields is refused when its class is made."""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Behaviour,
    OneshotReceiver,
    actor,
    blocking,
    handles,
    message,
    oneshot,
)
from levada.framework.errors import ConfigurationError
from levada.framework.testing import strict


@message
class Do(Asks[int]):
    kind: str
    waits: bool


@message
class Seen(Asks[list[str]]):
    pass


class Compiled(Coroutine[Any, Any, int]):
    """A coroutine as compiled code makes it: not of Python's own class."""

    def __init__(self, coroutine: Coroutine[Any, Any, int]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, int]:
        return self._coroutine.__await__()


class Wanted:
    """Is no coroutine at all, but can be awaited."""

    def __init__(self, coroutine: Coroutine[Any, Any, int]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, int]:
        return self._coroutine.__await__()


@types.coroutine
def old_style(coroutine: Coroutine[Any, Any, int]) -> Generator[Any, Any, int]:
    return (yield from coroutine.__await__())


KINDS: dict[str, Callable[[Coroutine[Any, Any, int]], Awaitable[int]]] = {
    "a coroutine": lambda coroutine: coroutine,
    "a compiled coroutine": Compiled,
    "an awaitable": Wanted,
    "a generator of types.coroutine": old_style,
}


class Doer(Actor[Do | Seen]):
    begins_with: str = ""

    def started(self) -> Any:
        self.seen: list[str] = []
        return KINDS[self.begins_with](self.note("started", True)) if self.begins_with else None

    async def note(self, text: str, waits: bool) -> int:
        if waits:
            await trio.lowlevel.checkpoint()
        self.seen.append(text)
        return len(self.seen)

    @handles
    def do(self, m: Do) -> Any:
        return KINDS[m.kind](self.note(m.kind, m.waits))

    @handles
    def answer(self, m: Seen) -> list[str]:
        return self.seen

    def stopping(self, reason: object) -> Any:
        return KINDS[self.begins_with](self.note("stopping", True)) if self.begins_with else None


SYSTEMS: dict[str, type[ActorSystem]] = {"plain": ActorSystem, "strict": strict()}


@pytest.mark.parametrize("system_class", SYSTEMS)
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_handler_returns_to_be_awaited_is_awaited(kind: str, waits: bool, system_class: str) -> None:
    async with SYSTEMS[system_class]() as system:
        ref = system.spawn(Doer)
        ref.tell(Do(kind, waits))
        await wait_all_tasks_blocked()
        assert await ref.ask(Do(kind, waits)) == 2  # in the asker's task
        ref.tell(Do(kind, waits))
        assert await ref.ask(Do(kind, waits)) == 4  # behind another message
        assert await ref.ask(Seen()) == [kind] * 4


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_hook_returns_to_be_awaited_is_awaited(system: ActorSystem, kind: str) -> None:
    ref = system.spawn(Doer, kind)
    seen = await ref.ask(Seen())
    assert seen == ["started"]
    ref.stop()
    await ref.terminated()
    assert seen == ["started", "stopping"]


async def test_the_handle_of_a_channel_is_an_answer_though_it_can_be_awaited(system: ActorSystem) -> None:
    @message
    class Promise(Asks[OneshotReceiver[int]]):
        pass

    class Promises(Actor[Promise]):
        @handles
        def promise(self, m: Promise) -> OneshotReceiver[int]:
            self.done, answer = oneshot(int)
            return answer

        def stopping(self, reason: object) -> None:
            self.done.send(7)

    ref = system.spawn(Promises)
    answer = await ref.ask(Promise())
    ref.stop()
    assert await answer == 7


async def test_a_plain_answer_to_a_tell_is_dropped(system: ActorSystem) -> None:
    ref = system.spawn(Doer)
    ref.tell(Seen())
    ref.tell(Seen())
    assert await ref.ask(Seen()) == []


# ---------------------------------------------------------------- generators


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make()
    return str(caught.value)


def test_a_handler_that_yields_is_refused() -> None:
    def plain() -> None:
        class Yields(Actor[Do]):
            @handles  # pyright: ignore[reportGeneralTypeIssues]
            def do(self, m: Do) -> Iterator[int]:
                yield 1

    def asynchronous() -> None:
        class Yields(Actor[Do]):
            @handles  # pyright: ignore[reportGeneralTypeIssues]
            async def do(self, m: Do) -> AsyncIterator[int]:
                yield 1

    def behaviour() -> None:
        class Mood(Behaviour):
            @handles  # pyright: ignore[reportGeneralTypeIssues]
            async def do(self, m: Do) -> AsyncIterator[int]:
                yield 1

    def overridden() -> None:
        class Changed(Doer):
            def do(self, m: Do) -> Iterator[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
                yield 1

    wanted = (
        "yields, but the runtime does not run generators; return or await instead, and send several values by a channel"
    )
    assert refused(plain) == f"Yields.do {wanted}"
    assert refused(asynchronous) == f"Yields.do {wanted}"
    assert refused(behaviour) == f"Mood.do {wanted}"
    assert refused(overridden) == f"Changed.do {wanted}"


@pytest.mark.parametrize("hook", ["started", "stopping", "restarting", "undelivered", "unhandled"])
def test_a_hook_that_yields_is_refused(hook: str) -> None:
    async def yields(*_: Any) -> AsyncIterator[int]:
        yield 1

    assert f"Yields.{hook} yields" in refused(
        lambda: types.new_class("Yields", (Actor,), exec_body=lambda body: body.update({hook: yields}))
    )


def test_blocking_and_functions_as_actors_take_no_generators() -> None:
    def numbers(m: Do) -> Iterator[int]:
        yield 1

    def method(self: Any, m: Do) -> Iterator[int]:
        yield 1

    assert "yields" in refused(lambda: actor(numbers))
    assert "yields" in refused(lambda: blocking(method))
