"""Mistakes that everybody makes once, and the errors that name the cure."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, NewType, Protocol, cast

import attrs
import pytest
import trio

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


def test_several_classes_between_the_brackets_are_a_union() -> None:
    with pytest.raises(ConfigurationError, match=r"Actor\[str, int\]: several classes of messages are Actor\[A \| B\]"):

        class Both(Actor[str, int]):  # type: ignore[type-arg]  # pyright: ignore[reportInvalidTypeArguments]
            pass


def test_a_cache_around_a_handler_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Cached\.text is a _lru_cache_wrapper: a handler is a plain method"):

        class Cached(Actor[Any]):
            @handles
            @functools.cache  # noqa: B019
            def text(self, m: str) -> None: ...


@pytest.mark.handler_fails
@pytest.mark.parametrize("work", [len, "coroutine"])
async def test_what_start_soon_cannot_run_is_named(work: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The traceback of such an error has no line of the user's."""

    async def coroutine() -> None: ...

    made = coroutine()
    made.close()

    class Works(Actor[str]):
        @handles
        def text(self, m: str) -> None:
            wrong: Any = made if work == "coroutine" else work
            self.start_soon(wrong, "")

    async with ActorSystem() as system:
        ref = system.spawn(Works)
        ref.tell("")
        assert isinstance(await ref.terminated(), Failed)
    (shown,) = [record.exc_text or "" for record in caplog.records if record.levelno == logging.ERROR]
    last = shown.splitlines()[-1]
    assert last.startswith("start_soon() takes an async function and its arguments; the function is <")
    assert ("coroutine object" if work == "coroutine" else "built-in function len") in last


# ---------------------------------------------------------------- calls of asyncio


async def nothing() -> None:
    pass


async def make_a_task() -> None:
    asyncio.create_task(asyncio.sleep(0))  # noqa: RUF006


async def enter_a_group() -> None:
    async with asyncio.TaskGroup():
        pass


async def enter_a_timeout() -> None:
    async with asyncio.timeout(1):
        await nothing()


async def wait_for_a_future() -> None:
    loop = asyncio.new_event_loop()
    try:
        await loop.create_future()
    finally:
        loop.close()


@pytest.mark.handler_fails
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: asyncio.sleep(1), "use trio.sleep in place of asyncio.sleep"),
        (lambda: asyncio.sleep(0), "use trio.sleep in place of asyncio.sleep"),
        (make_a_task, "use self.start_soon or a nursery of trio in place of asyncio.create_task"),
        (enter_a_group, "use a nursery of trio in place of asyncio.TaskGroup"),
        (enter_a_timeout, "use trio.fail_after in place of asyncio.timeout"),
        (lambda: asyncio.wait_for(nothing(), 1), "use trio.fail_after in place of asyncio.wait_for"),
        (lambda: asyncio.Queue[int]().get(), "use a channel in place of asyncio.Queue"),
        (lambda: asyncio.Event().wait(), "use trio.Event in place of asyncio.Event"),
        (lambda: asyncio.to_thread(nothing), "use trio.to_thread.run_sync in place of asyncio.to_thread"),
        (wait_for_a_future, "use trio's calls, or levada.framework.aio for a library of asyncio"),
    ],
)
async def test_a_call_of_asyncio_says_what_to_call_instead(
    call: Callable[[], Awaitable[object]], hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The asker reads it, and the log of the handler and of a task."""

    class Foreign(Actor[str]):
        @handles
        async def text(self, m: str) -> None:
            if m == "here":
                await call()
            self.start_soon(call)

    async with ActorSystem() as system:
        foreign: Any = system.spawn(Foreign)
        with pytest.raises(ActorError, match=r": levada runs on trio.*" + re.escape(hint)):
            await foreign.ask("here")
        task = system.spawn(Foreign)
        task.tell("in a task")
        assert isinstance(await task.terminated(), Failed)
    shown = [record.exc_text or "" for record in caplog.records if record.levelno == logging.ERROR]
    assert len(shown) == 2
    assert all(text.splitlines()[-1].startswith("levada runs on trio") and text.endswith(hint) for text in shown)


async def test_a_call_of_asyncio_in_the_block_of_a_system_says_what_to_call_instead() -> None:
    advice = ["levada runs on trio: use trio.sleep in place of asyncio.sleep"]
    with pytest.raises(RuntimeError, match="no running event loop") as caught:
        async with ActorSystem():
            await asyncio.sleep(1)
    assert caught.value.__notes__ == advice
    with pytest.raises(ExceptionGroup) as group:
        async with ActorSystem(), trio.open_nursery() as nursery:
            nursery.start_soon(asyncio.sleep, 1)
    assert group.value.__notes__ == advice
    with pytest.raises(RuntimeError, match="no tea") as own:
        async with ActorSystem():
            raise RuntimeError("no tea")
    assert not hasattr(own.value, "__notes__")


@pytest.mark.handler_fails
async def test_errors_that_only_look_like_those_of_asyncio_have_no_such_advice(system: ActorSystem) -> None:
    class Own(Actor[str]):
        @handles
        def text(self, m: str) -> None:
            raise AttributeError("'NoneType' object has no attribute 'create_future'")

    own: Any = system.spawn(Own)
    with pytest.raises(ActorError) as caught:
        await own.ask("")
    assert "trio" not in str(caught.value)


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
