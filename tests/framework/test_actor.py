"""Handlers and how they are found, `become`, constructors, function actors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, cast

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Behaviour,
    Killed,
    Normal,
    Ref,
    Shutdown,
    Unhandled,
    actor,
    blocking,
    handles,
    message,
)
from levada.framework.errors import ActorError, ActorStopped, ConfigurationError

T = TypeVar("T")


@message
class Add:
    n: int


@message
class Get(Asks[int]):
    pass


@message
class AddTwice(Add):
    """A subclass of a message that has a handler."""


@message
class Reset:
    pass


@message
class Who(Asks[str]):
    pass


class Counter(Actor[Add | Get]):
    total: int = 0

    @handles
    def add(self, m: Add) -> None:
        self.total += m.n

    @handles
    async def get(self, m: Get) -> int:
        return self.total


# ---------------------------------------------------------------- handlers


async def test_sync_and_async_handlers_take_messages_in_order_and_answer(system: ActorSystem) -> None:
    counter = system.spawn(Counter, 40)
    counter.tell(Add(1))
    await counter.send(Add(1))
    assert await counter.ask(Get()) == 42


async def test_an_async_handler_that_waits_answers_when_it_is_done(
    system: ActorSystem, autojump_clock: trio.testing.MockClock
) -> None:
    class Slow(Actor[Who]):
        @handles
        async def who(self, m: Who) -> str:
            await trio.sleep(3)
            return "slow"

    assert await system.spawn(Slow).ask(Who()) == "slow"
    assert trio.current_time() == pytest.approx(3)


async def test_each_class_has_a_table_of_its_own(system: ActorSystem) -> None:
    class Base(Actor[Who]):
        @handles
        def who(self, m: Who) -> str:
            return "base"

    class Left(Base):
        @handles
        def get(self, m: Get) -> int:
            return 1

    class Right(Base):
        @handles
        def get(self, m: Get) -> int:
            return 2

    left: Ref[Any] = system.spawn(Left)
    right: Ref[Any] = system.spawn(Right)
    assert await left.ask(Get()) == 1
    assert await right.ask(Get()) == 2
    with pytest.raises(ActorError, match=r"\(Base\) has no handler for Get"):
        await cast(Any, system.spawn(Base)).ask(Get())
    with pytest.raises(ActorError, match=r"\(Left\) has no handler for the class Who$"):
        await cast(Any, system.spawn(Left)).ask(Who)
    assert await system.spawn(Left).ask(Who()) == "base"


async def test_a_handler_overridden_by_name_keeps_its_class_of_messages(system: ActorSystem) -> None:
    class Base(Actor[Who]):
        @handles
        def who(self, m: Who) -> str:
            return "base"

    class Plain(Base):
        def who(self, m: Who) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
            return "plain, over " + super().who(m)

    class Marked(Base):
        @handles(Who)
        async def answer(self, m: Who) -> str:
            return "marked"

    assert await system.spawn(Plain).ask(Who()) == "plain, over base"
    assert await system.spawn(Marked).ask(Who()) == "marked"


async def test_a_handler_of_a_base_class_of_the_message_serves_if_there_is_none_nearer(system: ActorSystem) -> None:
    class ByBase(Actor[Any]):
        seen: list[str] = attrs.field(factory=list)

        @handles
        def add(self, m: Add) -> None:
            self.seen.append("add")

        @handles
        def rest(self, m: Any) -> None:
            self.seen.append(type(m).__name__)

    seen: list[str] = []
    ref = system.spawn(ByBase, seen)
    for m in (AddTwice(1), Add(1), Reset(), AddTwice(1), None, 7, (), "text"):
        ref.tell(m)
    await wait_all_tasks_blocked()
    assert seen == ["add", "add", "Reset", "add", "NoneType", "int", "tuple", "str"]


async def test_one_handler_for_a_union_and_for_several_classes(system: ActorSystem) -> None:
    class Unions(Actor[Add | Reset | Get | Who | None]):
        seen: list[Any]

        @handles
        def by_annotation(self, m: Add | Reset | None) -> None:
            self.seen.append(m)

        @handles(Get, Who)
        def by_argument(self, m: Get | Who) -> Any:
            return type(m).__name__

    seen: list[Any] = []
    ref = system.spawn(Unions, seen)
    first, second = Add(1), Reset()
    ref.tell(first)
    ref.tell(second)
    ref.tell(None)
    assert await ref.ask(Who()) == "Who"
    assert await ref.ask(Get()) == "Get"  # type: ignore[comparison-overlap]  # the handler breaks its promise
    assert seen == [first, second, None]


async def test_an_explicit_class_needs_no_annotation(system: ActorSystem) -> None:
    class Explicit(Actor[Any]):
        @handles(Who)
        def who(self, m):  # type: ignore[no-untyped-def]  # that is the point
            return "explicit"

    assert await system.spawn(Explicit).ask(Who()) == "explicit"


# ---------------------------------------------------------------- messages that nobody handles


async def test_an_unhandled_tell_is_counted_and_published_and_the_actor_goes_on(system: ActorSystem) -> None:
    events: list[Unhandled] = []

    @actor
    def listener(event: Unhandled) -> None:
        events.append(event)

    system.events.subscribe(Unhandled, system.spawn(listener))
    counter = system.spawn(Counter, 5)
    stray = Reset()
    cast(Any, counter).tell(stray)
    assert await counter.ask(Get()) == 5
    await wait_all_tasks_blocked()
    assert [(event.message, event.to) for event in events] == [(stray, counter)]
    assert system.statistics().unhandled == 1


async def test_an_unhandled_ask_fails_with_the_class_named_and_the_actor_goes_on(system: ActorSystem) -> None:
    counter = system.spawn(Counter, 5, name="counter")
    with pytest.raises(ActorError, match=r"^/counter \(Counter\) has no handler for Who$") as caught:
        await cast(Any, counter).ask(Who())
    assert not isinstance(caught.value, ActorStopped)
    assert caught.value.actor == "/counter"
    assert await counter.ask(Get()) == 5


async def test_unhandled_may_be_overridden_and_its_result_answers(system: ActorSystem) -> None:
    class Polite(Actor[Any]):
        def unhandled(self, message: Any) -> str:
            return f"what is a {type(message).__name__}?"

    class Patient(Actor[Any]):
        async def unhandled(self, message: Any) -> str:
            await trio.lowlevel.checkpoint()
            return "later"

    assert await system.spawn(Polite).ask(Who()) == "what is a Who?"
    assert await system.spawn(Patient).ask(Who()) == "later"
    assert system.statistics().unhandled == 0


# ---------------------------------------------------------------- resolution of annotations


async def test_bare_handles_sees_the_names_around_the_class(system: ActorSystem) -> None:
    @message
    class Local(Asks[str]):
        pass

    def make() -> type[Actor[Any]]:
        class Inner(Actor[Any]):
            @message
            class Own(Asks[str]):
                pass

            @handles
            def local(self, m: Local) -> str:
                return "local"

            @handles
            def own(self, m: Own) -> str:
                return "own"

            @handles
            def of_module(self, m: Get) -> int:
                return 3

        return Inner

    # `Local` is two frames away: only what is referred to by the code of `make` could be found, so it is spelled out there.
    with pytest.raises(ConfigurationError, match=r"Inner\.local: cannot resolve the annotation 'Local'"):
        make()

    class Outer(Actor[Any]):
        @message
        class Own(Asks[str]):
            pass

        @handles
        def local(self, m: Local) -> str:
            return "local"

        @handles
        def own(self, m: Own) -> str:
            return "own"

        @handles
        def of_module(self, m: Get) -> int:
            return 3

    ref = system.spawn(Outer)
    assert await ref.ask(Local()) == "local"
    assert await ref.ask(Outer.Own()) == "own"
    assert await ref.ask(Get()) == 3


def define_unresolvable() -> None:
    class Bad(Actor[Any]):
        @handles
        def on(self, m: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
            pass


def define_unannotated() -> None:
    class Bad(Actor[Any]):
        @handles
        def on(self, m):  # type: ignore[no-untyped-def]
            pass


def define_without_message() -> None:
    class Bad(Actor[Any]):
        @handles
        def on(self) -> None:
            pass


def define_with_two_parameters() -> None:
    class Bad(Actor[Any]):
        @handles
        def on(self, m: Add, n: int) -> None:
            pass


def define_not_a_class() -> None:
    class Bad(Actor[Any]):
        @handles
        def on(self, m: Literal["add"]) -> None:
            pass


def define_twice() -> None:
    class Bad(Actor[Any]):
        @handles
        def one(self, m: Add) -> None:
            pass

        @handles
        def two(self, m: Add | Reset) -> None:
            pass


def define_replacing() -> None:
    class Base(Actor[Any]):
        @handles
        def on(self, m: Add) -> None:
            pass

    class Bad(Base):
        @handles
        def on(self, m: Reset) -> None:  # type: ignore[override]
            pass


def define_uncovered() -> None:
    class Bad(Actor[Add | Get]):
        @handles
        def add(self, m: Add) -> None:
            pass


def define_promising_everything() -> None:
    class Bad(Actor[object]):
        @handles
        def add(self, m: Add) -> None:
            pass


def define_sync_run() -> None:
    class Bad(Actor[Any]):
        def run(self) -> None:
            pass


def define_run_with_handlers() -> None:
    class Bad(Actor[Any]):
        async def run(self) -> None:
            pass

        @handles
        def add(self, m: Add) -> None:
            pass


def define_function_of_two() -> None:
    @actor  # type: ignore[arg-type]
    def bad(one: Add, two: Add) -> None:
        pass


def define_function_of_missing() -> None:
    @actor
    def bad(m: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass


def define_bad_behaviour() -> None:
    class Bad(Behaviour):
        @handles
        def on(self, m: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
            pass


@pytest.mark.parametrize(
    ("define", "text"),
    [
        (
            define_unresolvable,
            "Bad.on: cannot resolve the annotation 'Missing' (name 'Missing' is not defined); define the class first or write @handles(TheClass)",
        ),
        (define_unannotated, "Bad.on: annotate 'm' with the message class, or write @handles(TheClass)"),
        (define_without_message, "the handler Bad.on takes ['self'], wanted self and one message"),
        (define_with_two_parameters, "the handler Bad.on takes ['self', 'm', 'n'], wanted self and one message"),
        (define_not_a_class, "Bad.on: typing.Literal is not a class of messages"),
        (define_twice, "Bad handles Add twice: in one and in two"),
        (define_replacing, "Bad.on replaces the handler of Add and does not handle it: give it another name"),
        (
            define_uncovered,
            "Bad promises to handle Get and has no handler for it: mark the method that takes it with @handles",
        ),
        (
            define_promising_everything,
            "Bad promises to handle object and has no handler for it: name the messages that it takes, as in Actor[A | B], or derive from "
            "Actor without brackets",
        ),
        (define_sync_run, "Bad.run must be async: it is the actor's own loop"),
        (
            define_run_with_handlers,
            "Bad has both run() and handlers; keep one of them",
        ),
        (
            define_function_of_two,
            "bad takes 2 parameters, wanted one message: an actor that has more is a class with fields, and a task that takes more "
            "is started with start_soon",
        ),
        (define_function_of_missing, "bad: cannot resolve the annotation 'Missing' (name 'Missing' is not defined)"),
        (
            define_bad_behaviour,
            "Bad.on: cannot resolve the annotation 'Missing' (name 'Missing' is not defined); define the class first or write @handles(TheClass)",
        ),
    ],
    ids=lambda value: value.__name__.removeprefix("define_") if callable(value) else "",
)
def test_a_class_that_cannot_work_fails_where_it_is_defined(define: Callable[[], None], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        define()
    assert str(caught.value) == text


# ---------------------------------------------------------------- the promise of Actor[A | B]


async def test_the_union_may_be_covered_by_bases_and_by_handlers_of_base_messages(system: ActorSystem) -> None:
    class Inherits(Counter):
        pass

    class Widens(Counter):
        @handles
        def reset(self, m: Reset) -> None:
            self.total = 0

    class ByBaseMessage(Actor[AddTwice]):
        @handles
        def add(self, m: Add) -> None:
            pass

    class Everything(Actor[Add | Get]):
        @handles(object)
        def on(self, m: object) -> int:
            return -1

    assert await system.spawn(Inherits, 1).ask(Get()) == 1
    assert await system.spawn(Everything).ask(Get()) == -1
    ref: Ref[Any] = system.spawn(Widens, 5)
    ref.tell(Reset())
    assert await ref.ask(Get()) == 0
    assert system.spawn(ByBaseMessage).is_alive


def test_a_parameter_of_a_generic_class_is_a_promise_only_where_it_stands_for_messages() -> None:
    class Holder(Actor[Add], Generic[T]):
        held: T

        @handles
        def add(self, m: Add) -> None:
            pass

    class Taker(Actor[T | Add]):
        @handles
        def add(self, m: Add) -> None:
            pass

    class HoldsText(Holder[str]):
        pass

    assert HoldsText("text").held == "text"
    with pytest.raises(
        ConfigurationError,
        match=r"^TakesToo promises to handle Get and has no handler for it: mark the method .* with @handles$",
    ):

        class TakesToo(Taker[Reset | Get]):
            @handles
            def reset(self, m: Reset) -> None:
                pass


def test_without_brackets_with_any_with_a_parameter_and_for_loops_nothing_is_promised() -> None:
    class Bare(Actor):
        pass

    class Anything(Actor[Any]):
        pass

    class Open(Actor[T]):
        pass

    class Loop(Actor[Add | Get]):
        async def run(self) -> None:
            pass

    with pytest.raises(
        ConfigurationError,
        match=r"^Concrete promises to handle Add and has no handler for it: mark the method .* with @handles$",
    ):

        class Concrete(Open[Add]):
            pass


# ---------------------------------------------------------------- become


async def test_become_takes_a_class_of_handlers(system: ActorSystem) -> None:
    class Wrong(Actor[Who]):
        @handles
        def who(self, m: Who) -> str:
            self.become(self.who)  # type: ignore[arg-type]
            return ""

    with pytest.raises(ActorStopped) as caught:
        await system.spawn(Wrong).ask(Who())
    assert isinstance(caught.value.__cause__, TypeError)
    assert "wanted a class derived from Behaviour, or None" in str(caught.value.__cause__)


class Closed(Behaviour):
    @handles
    def who(self: Door, m: Who) -> str:  # pyright: ignore[reportGeneralTypeIssues]
        return f"closed {self.number}"

    @handles
    async def open(self: Door, m: Reset) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        await trio.lowlevel.checkpoint()
        self.become(None)


class Door(Actor[Who | Reset]):
    number: int

    @handles
    def who(self, m: Who) -> str:
        return f"open {self.number}"

    @handles
    def close(self, m: Reset) -> None:
        self.become(Closed)


async def test_become_counts_from_the_next_message_on(system: ActorSystem) -> None:
    door = system.spawn(Door, 7)
    answers: list[str] = []

    async def ask() -> None:
        answers.append(await door.ask(Who()))

    async with trio.open_nursery() as nursery:
        for step in (ask, None, ask, ask, None, ask):
            if step is None:
                door.tell(Reset())
            else:
                nursery.start_soon(step)
            await wait_all_tasks_blocked()
    assert answers == ["open 7", "closed 7", "closed 7", "open 7"]


async def test_become_takes_effect_inside_a_batch(system: ActorSystem) -> None:
    seen: list[str] = []

    class Loud(Behaviour):
        @handles
        def add(self, m: Add) -> None:
            seen.append(f"loud {m.n}")

    class Quiet(Actor[Add | Reset]):
        @handles
        def add(self, m: Add) -> None:
            seen.append(f"quiet {m.n}")

        @handles
        def reset(self, m: Reset) -> None:
            self.become(Loud)

    ref = system.spawn(Quiet)
    for m in (Add(1), Reset(), Add(2), Add(3)):
        ref.tell(m)
    await wait_all_tasks_blocked()
    assert seen == ["quiet 1", "loud 2", "loud 3"]


async def test_a_behaviour_is_asked_inline_too_and_its_gaps_are_unhandled(system: ActorSystem) -> None:
    door = system.spawn(Door, 1)
    door.tell(Reset())
    await wait_all_tasks_blocked()
    assert await door.ask(Who()) == "closed 1"
    with pytest.raises(ActorError, match="has no handler for Get"):
        await cast(Any, door).ask(Get())


# ---------------------------------------------------------------- construction


async def test_fields_are_constructor_arguments_and_keywords_come_by_partial(system: ActorSystem) -> None:
    class Fields(Actor[Get]):
        a: int
        b: int = 2
        c: int = attrs.field(default=3, kw_only=True)

        @handles
        def get(self, m: Get) -> int:
            return 100 * self.a + 10 * self.b + self.c

    assert await system.spawn(Fields, 1).ask(Get()) == 123
    assert await system.spawn(Fields, 4, 5).ask(Get()) == 453
    assert await system.spawn(functools.partial(Fields, 1, c=9)).ask(Get()) == 129
    assert await system.spawn(lambda: Fields(7)).ask(Get()) == 723


async def test_what_is_no_factory_is_refused(system: ActorSystem) -> None:
    spawn = cast(Any, system.spawn)
    with pytest.raises(
        ConfigurationError,
        match=r"made int, not an Actor: a function that takes messages is async, or is wrapped with actor\(\)$",
    ):
        spawn(lambda: 7)
    with pytest.raises(ConfigurationError, match=r"spawn\(\) got 7, wanted an Actor class or a factory"):
        spawn(7)
    with pytest.raises(ConfigurationError, match=r"wanted an Actor class or a factory: spawn\(Counter, …\)$"):
        spawn(Counter())
    with pytest.raises(ConfigurationError, match="wanted 'stop', 'escalate' or restart"):
        spawn(Counter, supervise="always")
    with pytest.raises(TypeError, match="unexpected keyword"):
        spawn(functools.partial(cast(Any, Counter), wrong=1))
    assert system.statistics().spawned == 0


async def _takes(m: Add) -> None:
    raise AssertionError("called")


class _Callable:
    async def __call__(self, m: Add) -> None:
        raise AssertionError("called")


async def _yields(m: Add) -> Any:
    yield m


def _is_plain(m: Add) -> None:
    raise AssertionError("called")


@pytest.mark.parametrize(
    ("factory", "args", "text"),
    [
        (lambda m: None, (), r"<lambda> at .* to make an actor: .* missing 1 .*'m'; a function that takes messages is async, or is wrapped with"),
        (_is_plain, (), r"_is_plain at .* to make an actor: _is_plain\(\) missing 1 .*'m'; a function that takes messages is async"),
        (_yields, (Add(1),), "made async_generator, not an Actor: the runtime does not run generators: await instead"),
        (_Callable(), (Add(1),), "made coroutine, not an Actor: spawn the async function itself, with functools.partial"),
        (lambda: _takes(Add(1)), (), "made coroutine, not an Actor: spawn the async function itself, with functools.partial"),
        (functools.partial(_takes, m=Add(1)), (), "_takes takes 1 parameters, wanted one message"),
    ],
    ids=["lambda", "function", "generator", "callable", "lambda around", "partial that has the message"],
)  # fmt: skip
async def test_a_function_that_cannot_be_an_actor_is_refused_with_the_way_that_works(
    system: ActorSystem, factory: Any, args: tuple[Any, ...], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        cast(Any, system.spawn)(factory, *args)
    assert system.statistics().spawned == 0


async def test_a_coroutine_is_refused_and_closed(system: ActorSystem) -> None:
    with pytest.raises(
        ConfigurationError, match=r"wanted an Actor class or a factory: spawn\(_takes, …\), without a call$"
    ):
        cast(Any, system.spawn)(_takes(Add(1)))


async def test_a_type_error_inside_a_factory_is_its_own(system: ActorSystem) -> None:
    def factory() -> Counter:
        return Counter(wrong=1)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="unexpected keyword"):
        system.spawn(factory)


async def test_before_spawn_an_actor_has_no_ref(system: ActorSystem) -> None:
    class Early(Actor[Any]):
        def __attrs_post_init__(self) -> None:
            self.ref  # noqa: B018

    with pytest.raises(ActorError, match=r"this Early was not spawned, or is still in __init__: use started\(\)"):
        system.spawn(Early)
    with pytest.raises(ActorError, match="this Counter was not spawned"):
        Counter().system  # noqa: B018


async def test_started_runs_before_the_first_message_sync_or_async(system: ActorSystem) -> None:
    log: list[str] = []

    class Sync(Actor[Add]):
        def started(self) -> None:
            log.append("sync started")

        @handles
        def add(self, m: Add) -> None:
            log.append(f"sync {m.n}")

    class Async(Actor[Add]):
        async def started(self) -> None:
            await trio.lowlevel.checkpoint()
            log.append("async started")

        @handles
        def add(self, m: Add) -> None:
            log.append(f"async {m.n}")

    for kind in (Sync, Async):
        ref = system.spawn(kind)
        ref.tell(Add(1))
        await wait_all_tasks_blocked()
    assert log == ["sync started", "sync 1", "async started", "async 1"]


async def test_an_actor_may_stop_itself(system: ActorSystem) -> None:
    handled: list[int] = []
    left: list[Any] = []

    class Once(Actor[Add]):
        @handles
        def add(self, m: Add) -> None:
            handled.append(m.n)
            self.stop()

        def undelivered(self, messages: list[Any]) -> None:
            left.extend(messages)

    ref = system.spawn(Once)
    ref.tell(Add(1))
    ref.tell(Add(2))
    assert await ref.terminated() == Normal()
    assert (handled, left) == ([1], [Add(2)])


# ---------------------------------------------------------------- blocking handlers


async def test_a_blocking_handler_runs_in_a_thread_and_others_go_on(system: ActorSystem) -> None:
    gate = threading.Event()

    class Blocks(Actor[Who]):
        @handles
        @blocking
        def who(self, m: Who) -> str:
            assert gate.wait(10)
            return threading.current_thread().name

    ref = system.spawn(Blocks)
    counter = system.spawn(Counter, 1)
    names: list[str] = []

    async def ask() -> None:
        names.append(await ref.ask(Who()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert await counter.ask(Get()) == 1
        assert names == []
        gate.set()
    assert names != [threading.current_thread().name]


async def test_blocking_handlers_use_so_many_threads_and_no_more() -> None:
    gate = threading.Event()
    began: list[int] = []

    class Blocks(Actor[Add]):
        @handles
        @blocking
        def add(self, m: Add) -> None:
            began.append(m.n)
            assert gate.wait(10)

    async with ActorSystem(blocking_threads=2) as system:
        for n in range(3):
            system.spawn(Blocks).tell(Add(n))
        limiter = system.blocking_limiter
        while limiter.statistics().tasks_waiting < 1:
            await trio.lowlevel.checkpoint()
        assert limiter.borrowed_tokens == 2
        gate.set()
    assert sorted(began) == [0, 1, 2]


# ---------------------------------------------------------------- functions as actors


async def test_an_async_function_is_an_actor(system: ActorSystem) -> None:
    seen: list[int] = []

    async def show(m: Add) -> None:
        await trio.lowlevel.checkpoint()
        seen.append(m.n)

    ref = system.spawn(show)
    ref.tell(Add(1))
    ref.tell(Add(2))
    await wait_all_tasks_blocked()
    assert seen == [1, 2]


async def test_a_decorated_function_answers_and_takes_what_it_is_annotated_with(system: ActorSystem) -> None:
    @actor
    def either(m: Get | Who) -> Any:
        """Answer two questions."""
        return 5 if isinstance(m, Get) else "either"

    ref = system.spawn(either)
    assert await ref.ask(Get()) == 5
    assert await ref.ask(Who()) == "either"
    with pytest.raises(ActorError, match=r"\(either\) has no handler for Reset"):
        await cast(Any, ref).ask(Reset())
    assert (either.__name__, either.__doc__) == ("either", "Answer two questions.")


async def test_a_function_without_annotation_takes_anything(system: ActorSystem) -> None:
    seen: list[Any] = []

    async def anything(m) -> None:  # type: ignore[no-untyped-def]
        seen.append(m)

    ref = system.spawn(anything)
    for m in (1, "two", None):
        ref.tell(m)
    await wait_all_tasks_blocked()
    assert seen == [1, "two", None]


async def test_a_bound_method_and_a_partial_are_functions_too(system: ActorSystem) -> None:
    class Sink:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        async def take(self, m: Add) -> None:
            self.seen.append(m.n)

        async def take_tagged(self, tag: str, m: Add, times: int = 1) -> None:
            self.seen.append((tag, times * m.n))

    sink = Sink()
    system.spawn(sink.take).tell(Add(1))
    system.spawn(functools.partial(sink.take_tagged, "t")).tell(Add(2))
    system.spawn(functools.partial(sink.take_tagged, "t", times=2)).tell(Add(3))
    await wait_all_tasks_blocked()
    assert sink.seen == [1, ("t", 2), ("t", 6)]


class Slotted(Actor[Any]):
    __slots__ = ()


@pytest.mark.parametrize("cls", [Actor, Slotted])
async def test_an_actor_without_fields_and_without_a_dictionary_ends_as_any_other(
    cls: Callable[[], Actor[Any]], system: ActorSystem
) -> None:
    first, second = system.spawn(cls), system.spawn(cls)
    with pytest.raises(ActorError, match="has no handler for Get"):
        await first.ask(Get())
    first.stop()
    second.kill()
    assert isinstance(await first.terminated(), Shutdown)
    assert isinstance(await second.terminated(), Killed)
