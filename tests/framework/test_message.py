"""Message classes: tags, annotations, reply types."""

from __future__ import annotations

import collections
import dataclasses
import enum
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

import attrs
import pytest

from levada.framework import Actor, handles
from levada.framework.errors import ConfigurationError
from levada.framework.message import Asks, class_of, field_types, message, reply_type, tag_of

T = TypeVar("T")
U = TypeVar("U")


@message("test.Price")
class Price:
    symbol: str
    bid: float = 0.0


@message
class Deal(Price):
    amount: int = 0


@message(frozen=True)
class Key:
    name: str


def test_a_message_is_an_attrs_class_with_slots() -> None:
    price = Price("EURUSD", bid=1.08)
    assert price == Price("EURUSD", 1.08)
    assert repr(price) == "Price(symbol='EURUSD', bid=1.08)"
    assert not hasattr(price, "__dict__")
    price.bid = 1.09
    with pytest.raises(AttributeError):
        price.ask = 1.1  # type: ignore[attr-defined]


def test_frozen_messages_are_hashable_and_cannot_be_changed() -> None:
    assert {Key("a"): 1}[Key("a")] == 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Key("a").name = "b"  # type: ignore[misc]
    with pytest.raises(TypeError, match="unhashable"):
        hash(Price("EURUSD"))


def test_tags_are_explicit_or_from_module_and_qualified_name() -> None:
    assert tag_of(Price) == "test.Price"
    assert tag_of(Deal) == f"{__name__}:Deal"
    assert class_of("test.Price") is Price
    assert class_of("nobody") is None


def test_subclasses_have_the_fields_of_their_base_first_and_need_the_decorator() -> None:
    assert list(field_types(Deal)) == ["symbol", "bid", "amount"]

    class Plain(Price):
        pass

    with pytest.raises(TypeError, match=r"Plain is not decorated with @message"):
        tag_of(Plain)


def test_a_tag_of_another_class_is_refused_with_both_names() -> None:
    with pytest.raises(
        ConfigurationError, match=r"tag 'test.Price' is taken by .*test_message\.Price; .*Other needs another"
    ):

        @message("test.Price")
        class Other:
            pass

    assert class_of("test.Price") is Price


@pytest.mark.parametrize("tag", ["", "x" * 256])
def test_a_tag_has_1_to_255_octets(tag: str) -> None:
    with pytest.raises(ConfigurationError, match="wanted 1 to 255"):

        @message(tag)
        class Other:
            pass


def define_local(field: str) -> type[Any]:
    namespace: dict[str, Any] = {
        "__annotations__": {field: "int"},
        "__qualname__": "define_local.<locals>.Local",
        "__module__": __name__,
    }
    return message(type("Local", (), namespace))


def test_a_new_definition_of_the_same_class_takes_over_the_tag() -> None:
    first, second = define_local("a"), define_local("b")
    assert tag_of(first) == tag_of(second) == f"{__name__}:define_local.<locals>.Local"
    assert class_of(tag_of(first)) is second
    assert first(1).a == 1


def test_classes_that_something_else_makes_are_refused_with_what_to_leave_out() -> None:
    class Colour(enum.Enum):
        RED = 1

    class Typed(TypedDict):
        number: int

    class Clerk(Actor):
        number: int

    made: list[tuple[Any, str]] = [
        (Clerk, "leave out the base Actor: an actor is no message$"),
        (message(type("Twice", (), {})), "leave out the second @message"),
        (attrs.define(type("Attrs", (), {})), "leave out @attrs.define"),
        (dataclasses.make_dataclass("Data", ["number"]), "leave out @dataclass"),
        (Colour, "derives from Enum, wanted a plain class"),
        (collections.namedtuple("Pair", ["one", "two"]), "derives from tuple, wanted a plain class"),
        (type("Text", (str,), {}), "derives from str, wanted a plain class"),
        (Typed, "derives from dict, wanted a plain class"),
    ]
    for cls, why in made:
        with pytest.raises(ConfigurationError, match=f"^{cls.__qualname__}.*{why}"):
            message(cls)


def test_a_field_of_another_library_is_no_default() -> None:
    with pytest.raises(ConfigurationError, match=r"Odd\.lines: .* field of dataclasses; use lines = attrs\.field"):

        @message
        class Odd:
            lines: list[str] = dataclasses.field(default_factory=list)


def test_a_field_without_a_default_behind_one_with_a_default_is_named() -> None:
    advice = "has no default and follows a field that has one: give it a default, or move it up$"
    with pytest.raises(ConfigurationError, match=rf"Price\.bid {advice}"):

        @message
        class Price:
            symbol: str = ""
            bid: float  # type: ignore[misc]  # so say type checkers too

    with pytest.raises(ConfigurationError, match=rf"Desk\.name {advice}"):

        class Desk(Actor[str]):
            limit: int = 3
            name: str  # type: ignore[misc]

            @handles
            def text(self, m: str) -> None: ...


def test_only_classes_without_an_init_of_their_own_can_be_messages() -> None:
    with pytest.raises(ConfigurationError, match="has an __init__ of its own"):

        @message
        class Own:
            def __init__(self) -> None: ...

    with pytest.raises(TypeError, match="got 3, wanted a class or a tag"):
        message(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="got 3, wanted a class"):
        message("x")(3)  # type: ignore[arg-type]


SCRIPT = """
from levada.framework.message import message, tag_of
@message
class Ping:
    pass
result = tag_of(Ping)
if __name__ == "__main__":
    print(result)
"""


@pytest.mark.ci
def test_a_script_and_its_import_agree_on_the_tag(tmp_path: Path) -> None:
    (tmp_path / "desk.py").write_text(SCRIPT)
    path = [str(tmp_path), *sys.path]

    def run(*arguments: str) -> str:
        code = f"import sys; sys.path[:] = {path!r}; import runpy; {arguments[0]}"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert run("runpy.run_module('desk', run_name='__main__', alter_sys=True)") == "desk:Ping"
    assert run(f"runpy.run_path({str(tmp_path / 'desk.py')!r}, run_name='__main__')") == "desk:Ping"
    assert run("import desk; print(desk.result)") == "desk:Ping"
    assert runpy.run_path(str(tmp_path / "desk.py"), run_name="desk")["result"] == "desk:Ping"


@message
class Tree:
    children: list[Tree]
    later: Later | None = None
    anything: Any = None


@message
class Later:
    pass


@message
class Broken:
    good: int
    bad: Missing  # type: ignore[name-defined]  # noqa: F821


def test_annotations_are_resolved_when_first_needed() -> None:
    assert field_types(Tree) == {"children": list[Tree], "later": Later | None, "anything": Any}


def test_an_annotation_that_cannot_be_resolved_names_the_field_and_what_is_missing() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^Broken\.bad: cannot resolve the annotation 'Missing': name 'Missing' is not defined$",
    ):
        field_types(Broken)


def test_local_classes_see_their_neighbours_and_themselves() -> None:
    @message
    class Leaf:
        value: int

    @message
    class Node:
        leaves: list[Leaf]
        parent: Node | None = None

    @message
    class Special(Node):
        best: Leaf | None = None

    assert field_types(Node) == {"leaves": list[Leaf], "parent": Node | None}
    assert field_types(Special) == {"leaves": list[Leaf], "parent": Node | None, "best": Leaf | None}
    assert set(Node.__dict__["__message_names__"]) == {"Leaf"}


@message
class Get(Asks[int]):
    pass


@message
class Page(Asks[list[T]], Generic[T]):
    number: int = 0


class IntPage(Page[int]):
    pass


class Same(Asks[U]):
    pass


class Text(Same[str]):
    pass


class Forward(Asks["Later"]):
    pass


def test_reply_types() -> None:
    assert reply_type(Get) is int
    assert not hasattr(Get(), "__dict__")
    assert reply_type(IntPage) == list[int]
    assert reply_type(Text) is str
    assert reply_type(Forward) is Later
    assert reply_type(Asks) is Any

    class Mute(Asks):  # type: ignore[type-arg]
        pass

    class Child(Get):
        pass

    assert reply_type(Mute) is Any
    assert reply_type(Child) is int
    with pytest.raises(TypeError, match="Price is not a question"):
        reply_type(Price)  # type: ignore[arg-type]
