"""Mistakes that everybody makes once, and the errors that name the cure."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal, NewType, Protocol, cast

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
    Shutdown,
    blocking,
    bounded,
    channel,
    errors,
    handles,
    message,
    oneshot,
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


# ---------------------------------------------------------------- handlers


@pytest.mark.parametrize("wrapper", [staticmethod, classmethod, property, functools.cached_property])
@pytest.mark.parametrize("order", ["inside", "outside", "with a class", "of a base"])
def test_a_handler_that_is_no_plain_method_is_refused(wrapper: Any, order: str) -> None:
    def text(self: Any, m: str) -> None:
        raise AssertionError("called")

    class Base(Actor[Any]):
        @handles
        def text(self, m: str) -> None:
            raise AssertionError("called")

    with pytest.raises(ConfigurationError, match=f" is a {wrapper.__name__}: a handler is a plain method of self"):
        made = {
            "inside": lambda: wrapper(handles(text)),
            "outside": lambda: handles(wrapper(text)),
            "with a class": lambda: handles(str)(wrapper(text)),
            "of a base": lambda: wrapper(text),
        }[order]()
        type("Wrong", (Base if order == "of a base" else Actor,), {"text": made, "__module__": __name__})


class Based(Actor[Any]):
    @handles
    def text(self, m: str) -> None:
        raise AssertionError("called")


def _slotted() -> None:
    @attrs.define
    class Wrong(Actor[Any]):
        n: int = 0


def _of_a_value() -> None:
    class Wrong(Actor[Plain(5)]):  # type: ignore[misc]
        pass


def _of_a_list() -> None:
    class Wrong(Actor[[str, int]]):  # type: ignore[valid-type]
        pass


def _hook(name: str, function: Any) -> None:
    type("Wrong", (Actor,), {name: function, "__module__": __name__})


async def _loop(self: Any, first: int) -> None:
    raise AssertionError("called")


def _one_name_twice() -> None:
    class Wrong(Actor[Any]):
        @handles
        def text(self, m: str) -> None:  # pyright: ignore[reportRedeclaration]
            raise AssertionError("called")

        @handles(int)  # type: ignore[no-redef]
        def text(self, m: int) -> None:  # noqa: F811
            raise AssertionError("called")


def _hidden_by_a_field() -> None:
    class Wrong(Based):
        text: str = ""  # type: ignore[assignment]


def _hidden_by_none() -> None:
    class Wrong(Based):
        text = None  # type: ignore[assignment]


def _async_in_a_thread() -> None:
    @blocking
    async def fetch(self: Any, m: str) -> None:
        raise AssertionError("called")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_slotted, "^Wrong is an attrs class already, as each actor class is: leave the decorator out$"),
        (_of_a_value, r"^Wrong: Plain\(n=5\) is not a class of messages; several are Actor\[A \| B\]$"),
        (_of_a_list, r"^Wrong: \[.*\] is not a class of messages; several are Actor\[A \| B\]$"),
        (lambda: _hook("started", lambda self, first: None), "^Wrong.started is called with self: missing .* 'first'$"),
        (lambda: _hook("stopping", lambda self: None), "^Wrong.stopping is called with self, reason: too many"),
        (
            lambda: _hook("restarting", lambda self, e: None),
            "^Wrong.restarting is called with self, error, message: too",
        ),
        (lambda: _hook("undelivered", lambda self: None), "^Wrong.undelivered is called with self, messages: too many"),
        (lambda: _hook("unhandled", lambda self: None), "^Wrong.unhandled is called with self, message: too many"),
        (lambda: _hook("run", _loop), "^Wrong.run is called with self: missing a required argument: 'first'$"),
        (_one_name_twice, "Wrong.text is the name of two handlers: the second would replace the first$"),
        (_hidden_by_a_field, "^Wrong.text is a field, and hides the handler of that name: rename one$"),
        (_hidden_by_none, "^Wrong.text hides the handler of that name of a base: give it another name$"),
        (_async_in_a_thread, "fetch is async, and waits without a thread: leave @blocking out$"),
        (lambda: handles(str)(functools.partial(print)), "print.* is a partial: a handler is a plain method of self"),
        (lambda: handles(functools.partial(print)), "print.* is a partial: a handler is a plain method of self"),
        (lambda: channel(5), "^the channel is of 5, wanted the class of its messages, or an annotation$"),
        (lambda: oneshot(Plain()), r"^the channel is of Plain\(n=0\), wanted the class of its messages"),
        (lambda: ActorSystem(cast(Any, 4)), "^the name of a system is 4, wanted text$"),
    ],
)
def test_what_would_be_wrong_without_a_word_is_refused_where_it_is_written(
    make: Callable[[], object], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


Words = Annotated[str, "of a language"]
Number = NewType("Number", int)


async def test_other_names_of_a_class_of_messages_are_that_class(system: ActorSystem) -> None:
    class Hears(Actor[Words | Number]):
        heard: list[object] = attrs.field(factory=list)

        @handles
        def words(self, m: Words) -> None:
            self.heard.append(m)

        @handles
        def number(self, m: Number) -> None:
            self.heard.append(m)

    actor = Hears()
    ref = system.spawn(lambda: actor)
    ref.tell("a")
    ref.tell(Number(1))
    ref.stop()
    await ref.terminated()
    assert actor.heard == ["a", 1]


@pytest.mark.parametrize("use", ["watch", "link"])
async def test_what_cannot_be_watched_is_refused(system: ActorSystem, use: Literal["watch", "link"]) -> None:
    class Watches(Actor[Any]):
        def started(self) -> None:
            with pytest.raises(TypeError, match=rf"^{use}\(\) got 'desk', wanted a Ref, or a Sender or Receiver"):
                getattr(self, use)("desk")

    ref = system.spawn(Watches)
    ref.stop()
    assert isinstance(await ref.terminated(), Shutdown)


async def test_a_class_in_place_of_a_message_is_named(system: ActorSystem, caplog: pytest.LogCaptureFixture) -> None:
    ref = system.spawn(Based)
    ref.tell(Plain)
    ref.stop()
    await ref.terminated()
    assert caplog.messages == [f"unhandled message: the class Plain to {ref.path} (Based has no handler for it)"]


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
