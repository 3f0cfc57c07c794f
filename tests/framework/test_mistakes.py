"""Mistakes that everybody makes once, and the errors that name the cure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal, Protocol

import attrs
import pytest

import levada.framework
from levada.framework import (
    Actor,
    ActorError,
    ActorSystem,
    Asks,
    ConfigurationError,
    Failed,
    bounded,
    errors,
    handles,
    message,
)


class Idle(Actor[Any]):
    pass


# ---------------------------------------------------------------- the system


@pytest.mark.parametrize(
    "use",
    [
        lambda system: system.spawn(Idle),
        lambda system: system.lookup("/idle"),
        lambda system: system.statistics(),
        lambda system: system.groups.publish("topic", 1),
        lambda system: system.registry.register("name", None),
    ],
    ids=["spawn", "lookup", "statistics", "groups", "registry"],
)
def test_a_system_that_was_not_entered_says_so(use: Callable[[ActorSystem], object]) -> None:
    with pytest.raises(ConfigurationError, match="'desk' was not entered: async with ActorSystem"):
        use(ActorSystem("desk"))


def test_what_no_system_has_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'spwan'"):
        ActorSystem().spwan  # type: ignore[attr-defined]  # noqa: B018


def test_a_system_below_asyncio_says_what_to_start_it_with() -> None:
    async def main() -> None:
        async with ActorSystem():
            raise AssertionError("entered")

    with pytest.raises(ConfigurationError, match=r"runs on trio.*trio\.run\(main\)"):
        asyncio.run(main())


@pytest.mark.parametrize("mailbox", [5, "bounded", bounded])
async def test_a_mailbox_that_is_none_is_refused(system: ActorSystem, mailbox: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"wanted bounded\(…\) or unbounded\(\)"):
        system.spawn(Idle, mailbox=mailbox)


async def test_a_name_that_is_no_text_is_refused(system: ActorSystem) -> None:
    with pytest.raises(ConfigurationError, match=r"the name is 5, wanted printable text"):
        wrong: Any = 5
        system.spawn(Idle, name=wrong)


async def test_failures_without_a_supervisor_are_counted_and_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Actor[str]):
        @handles
        def text(self, m: str) -> None:
            raise ValueError(m)

    with pytest.raises(ValueError, match="up"):
        async with ActorSystem("app") as system:
            for name in ("one", "two"):
                ref = system.spawn(Fails, name=name)
                ref.tell("alone")
                assert isinstance(await ref.terminated(), Failed)
            assert system.statistics().unsupervised == 2
            above = system.spawn(Fails, supervise="escalate")
            above.tell("up")
            await above.terminated()
            assert system.statistics().failures == 3
    (line,) = (r for r in caplog.records if vars(r).get("event") == "ended")
    assert (line.levelno, line.getMessage()) == (
        logging.WARNING,
        "app ended with 2 unsupervised failures and 0 dead letters",
    )


# ---------------------------------------------------------------- defaults


@attrs.define
class Plain:
    n: int = 0


@pytest.mark.parametrize(
    ("default", "cure"),
    [
        ([], "factory=list"),
        ({}, "factory=dict"),
        (set(), "factory=set"),
        ([1, 2], r"factory=lambda: \[1, 2\]"),
        (bytearray(), "factory=bytearray"),
        (Plain(), "factory=lambda: Plain"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("make", [message, lambda cls: type("A", (Actor,), dict(vars(cls)))], ids=["message", "actor"])
def test_a_default_that_all_would_share_is_refused(make: Callable[[type], type], default: object, cure: str) -> None:
    body = {"__annotations__": {"held": "object"}, "held": default, "__module__": __name__}
    with pytest.raises(ConfigurationError, match=rf"\.held: all instances would share .*{cure}"):
        make(type("Holder", (), body))


def test_defaults_that_cannot_change_are_taken() -> None:
    @message
    class Fine:
        one: tuple[int, ...] = ()
        two: frozenset[int] = frozenset()
        three: list[int] = attrs.field(factory=list)
        four: type = list

    assert Fine() == Fine((), frozenset(), [], list)


# ---------------------------------------------------------------- answers


class Speaks(Protocol):
    def speak(self) -> str: ...


@pytest.mark.parametrize(
    ("promise", "answer", "fine"),
    [
        (int, 5, True),
        (int, "five", False),
        (float, 5, True),
        (str | None, None, True),
        (str | None, 5, False),
        (list[int], [], True),
        (list[int], (), False),
        (Literal["on", "off"], "on", True),
        (Literal["on", "off"], "of", False),
        (None, None, True),
        (None, 0, False),
        (Any, object(), True),
        (Speaks, object(), True),
    ],
)
async def test_strict_answers_are_of_the_promised_type(promise: Any, answer: object, fine: bool) -> None:
    class Question(Asks[promise]):
        pass

    class Answers(Actor[Any]):
        @handles
        def question(self, m: Question) -> Any:
            return answer

    async with ActorSystem(strict=True) as system:
        for mailbox in (None, bounded(3), bounded(3, overflow="drop_old")):
            ref = system.spawn(Answers, mailbox=mailbox)
            if fine:
                assert await ref.ask(Question()) is answer
            else:
                with pytest.raises(ActorError, match=r"answered Question with a \w+, but Question is Asks\["):
                    await ref.ask(Question())
    async with ActorSystem() as system:
        assert await system.spawn(Answers).ask(Question()) is answer


# ---------------------------------------------------------------- where errors are


def test_the_errors_of_the_framework_are_exported_by_it() -> None:
    elsewhere = {  # of carriers and protocols
        *("CarrierError", "ConnectionClosed", "DatagramTooLarge", "IdleTimeout", "LocalProtocolError", "ProtocolError"),
        *("RemoteProtocolError", "StreamError", "StreamWasReset", "StreamWasStopped"),
    }
    assert {name for name in errors.__all__ if hasattr(levada.framework, name)} == set(errors.__all__) - elsewhere
