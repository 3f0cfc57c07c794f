"""Handlers whose annotation contradicts the answer that their question promises are refused when their class is made; no others are."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NewType, NoReturn, Optional, Protocol, TypedDict, TypeVar, Union

import pytest

from levada.framework import Actor, ActorSystem, Asks, Behaviour, Ref, actor, blocking, handles, message
from levada.framework.errors import ConfigurationError

T = TypeVar("T")
Number = NewType("Number", int)


class Base:
    pass


class Derived(Base):
    pass


class Other:
    pass


class Shape(Protocol):
    x: int


class Entry(TypedDict):
    x: int


class Level(enum.IntEnum):
    LOW = 1


@message
class Box(Generic[T]):
    item: T


CONTRADICT = [
    (int, str),
    (int, bytes),
    (int, list[int]),
    (str, int | None),
    (int | None, str),
    (list[int], dict[str, int]),
    (None, int),
    (Base, Other),
    (Base | int, Other | str),
    (Literal["a"], int),
    (Number, str),
    (int, Awaitable[str]),
    (int, Coroutine[Any, Any, str]),
    (Annotated[int, "seconds"], Annotated[str, "words"]),
    (Box[int], Base),
    (bool, str),
]

AGREE = [
    (int, int),
    (int, bool),
    (int, Level),
    (float, int),
    (int, float),
    (bytes, bytearray),
    (Base, Derived),
    (Derived, Base),
    (int | None, int),
    (int, int | str),
    (int, Optional[int]),  # noqa: UP045
    (Union[int, str], str),  # noqa: UP007
    (int, None),
    (int, Any),
    (int, object),
    (Any, str),
    (int, NoReturn),
    (int, Awaitable[int]),
    (int, Awaitable),
    (int, T),
    (T, int),
    (list[int], list[str]),
    (list[int], Sequence[int]),
    (list[int], Iterable[int]),
    (Mapping[str, int], dict[str, int]),
    (Box[int], Box[str]),
    (Box, Box[str]),
    (int, Literal[1]),
    (Literal["a", 1], int),
    (Shape, Base),
    (Entry, dict[str, int]),
    (Number, int),
    (Ref[Any], Ref[int]),
    (Callable[[], int], Other),
    (type[int], type),
    (tuple[int, str], tuple[()]),
]


def define(promised: Any, answer: Any, *, is_async: bool = False) -> type:
    """Make a question and an actor with a handler of it."""

    @message
    class Question(Asks[promised]):
        pass

    if is_async:

        async def later(self: Any, m: Question) -> Any: ...

        function: Any = later
    else:

        def now(self: Any, m: Question) -> Any: ...

        function = now
    function.__annotations__ = {"m": Question, "return": answer}
    return type("Clerk", (Actor,), {"answer": handles(function)})


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("promised", "answer"), CONTRADICT, ids=str)
def test_an_answer_of_another_type_is_refused(promised: Any, answer: Any, is_async: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"^Clerk\.(now|later) answers with .*, and Question is Asks\[.*\]: "):
        define(promised, answer, is_async=is_async)


@pytest.mark.parametrize(("promised", "answer"), AGREE, ids=str)
def test_an_answer_that_may_fit_is_accepted(promised: Any, answer: Any) -> None:
    assert define(promised, answer).__name__ == "Clerk"


@message
class Total(Asks[int]):
    pass


@message
class Name(Asks[str]):
    pass


@message
class Forward(Asks["Later"]):
    pass


class Totals(Total):
    """Promises what its base does."""


@message
class Boxed(Asks[Box[T]], Generic[T]):
    pass


def test_the_error_names_the_handler_the_question_and_both_types() -> None:
    with pytest.raises(ConfigurationError) as caught:

        class Clerk(Actor[Total]):
            @handles  # pyright: ignore[reportGeneralTypeIssues]
            def total(self, m: Total) -> "str | None":  # noqa: UP037
                return ""

    assert str(caught.value) == "Clerk.total answers with str | None, and Total is Asks[int]: correct one of the two"


def test_each_way_to_write_a_handler_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="total answers with str"):

        class Blocks(Actor[Total]):
            @handles  # pyright: ignore[reportGeneralTypeIssues]
            @blocking
            def total(self, m: Total) -> str:
                return ""

    with pytest.raises(ConfigurationError, match="total answers with str"):

        class Given(Actor[Total]):
            @handles(Totals, Name)
            def total(self, m: Any) -> str:
                return ""

    with pytest.raises(ConfigurationError, match=r"Sub\.total answers with str"):

        class Good(Actor[Total]):
            @handles
            def total(self, m: Total) -> int:
                return 1

        class Sub(Good):
            def total(self, m: Total) -> str:  # type: ignore[override]
                return ""

    with pytest.raises(ConfigurationError, match=r"Busy\.total answers with str"):

        class Busy(Behaviour):
            @handles  # pyright: ignore[reportGeneralTypeIssues]
            def total(self, m: Total) -> str:
                return ""

    with pytest.raises(ConfigurationError, match="answers with str"):

        @actor
        def total(m: Total) -> str:
            return ""

    with pytest.raises(ConfigurationError, match="answers with str"):

        class Generics(Actor[Any]):
            @handles(Boxed)
            def boxed(self, m: Boxed[int]) -> str:
                return ""


async def test_a_name_that_is_defined_later_and_a_handler_of_many_questions_are_accepted(system: ActorSystem) -> None:
    class Clerk(Actor[Any]):
        @handles
        def forward(self, m: Forward) -> Later:
            return Later()

        @handles  # pyright: ignore[reportGeneralTypeIssues]
        def both(self, m: Total | Name) -> int | str:
            return 1 if isinstance(m, Total) else "one"

    ref = system.spawn(Clerk)
    assert [await ref.ask(Total()), await ref.ask(Name())] == [1, "one"]
    assert isinstance(await ref.ask(Forward()), Later)


class Later:
    pass
