"""Straight code for a message class: the usual values of its fields, without a look for the place of a bad one.

It is made once for each class, as attrs makes its methods. Values that it does not take go the way of the shapes, which place a mistake.
Encoding and decoding four fields, one of them a list, takes 3.6 times msgpack's own time; by way of the shapes 12 times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final

import attrs
from msgpack import ExtType

from ._wire import COPIES, EXT_MESSAGE, Pairs, unpack, unpack_all
from .message import BY_TAG

LEVELS: Final = COPIES - 1
"""Messages inside messages that are taken: their payloads, copied once a level, are within the budget of one call."""
CONTAINERS: Final = 3
"""Containers inside containers of one field that are taken."""
DEPTH: Final = CONTAINERS + 1
"""Levels of nesting of one message with its containers."""
_EXACT: Final = 2**1000
"""An int below this, of either sign, can be made a float."""

_as_ext: Callable[[tuple[int, bytes]], Any] = partial(tuple.__new__, ExtType)


class Otherwise(Exception):
    """A value has to go the way of the shapes."""


class Source:
    """The code that is being made, and the names that it uses."""

    def __init__(self, **scope: Any) -> None:
        self.scope: dict[str, Any] = {
            "lift": _lift, "lift_all": _lift_all, "lower": _lower, "lower_all": _lower_all, "otherwise": _otherwise,
            "to_dict": _to_dict, **scope,
        }  # fmt: skip

    def name(self, value: Any = None) -> str:
        """Return a new name for a value, or for a variable."""
        name = f"v{len(self.scope)}"
        self.scope[name] = value
        return name


Code = Callable[[Source, str], tuple[str, str]]
"""Source and the name of a variable: a condition under which the value is taken, and an expression for the result."""


@attrs.frozen(eq=False, kw_only=True)
class Straight:
    """How straight code takes the values of an annotation."""

    lower: Code
    lift: Code
    lowers_as_is: frozenset[type] = frozenset()
    """All types that `lower` takes, if it leaves values as they are."""
    lifts_as_is: frozenset[type] = frozenset()
    """All types that `lift` takes, if it leaves values as they are."""
    lower_all: Code | None = None
    """The same as `lower` for all items of a list or tuple, if there is something cheaper."""
    lift_all: Code | None = None
    """The same as `lift` for all items of a list, if there is something cheaper."""
    containers: int = 0
    """Containers inside each other."""


def as_is(kinds: frozenset[type]) -> Straight:
    """Return the code for values of exactly these types, which msgpack has."""

    def code(source: Source, value: str) -> tuple[str, str]:
        return _is_of(source, value, kinds), value

    return Straight(lower=code, lift=code, lowers_as_is=kinds, lifts_as_is=kinds)


def number() -> Straight:
    """Return the code for floats, and for ints that become floats."""

    def code(source: Source, value: str) -> tuple[str, str]:
        most = source.name(_EXACT)
        whole = f"type({value}) is int and -{most} < {value} < {most}"
        return f"(type({value}) is float or {whole})", f"({value} if type({value}) is float else float({value}))"

    return Straight(lower=code, lift=code)


def converted(lower: Callable[[Any, Any, int], Any], lift: Callable[[Any, Any, int], Any]) -> Straight:
    """Return the code for a value without others in it; the functions of its shape convert it."""

    def code(convert: Callable[[Any, Any, int], Any]) -> Code:
        return lambda source, value: ("", f"{source.name(convert)}({value}, None, 1)")

    return Straight(lower=code(lower), lift=code(lift))


def message(wanted: tuple[type, ...]) -> Straight:
    """Return the code for messages of these classes."""

    def code(function: str, *more: str) -> Code:
        return lambda source, value: ("", f"{function}({', '.join((value, source.name(wanted), *more))})")

    return Straight(
        lower=code("lower", "pack", "left"),
        lift=code("lift", "left"),
        lower_all=code("lower_all", "pack", "left"),
        lift_all=code("lift_all", "left"),
    )


def optional(inner: Straight) -> Straight:
    """Return the code for a value or None."""

    def code(inside: Code) -> Code:
        def either(source: Source, value: str) -> tuple[str, str]:
            fits, made = inside(source, value)
            return f"({value} is None or {fits})" if fits else "", f"(None if {value} is None else {made})"

        return either

    none = frozenset({type(None)})
    return Straight(
        lower=code(inner.lower),
        lift=code(inner.lift),
        lowers_as_is=inner.lowers_as_is and inner.lowers_as_is | none,
        lifts_as_is=inner.lifts_as_is and inner.lifts_as_is | none,
        containers=inner.containers,
    )


def array(item: Straight, takes: tuple[type, ...], build: Callable[[list[Any]], Any]) -> Straight:
    """Return the code for a list, or for a tuple of any length."""

    def lower(source: Source, value: str) -> tuple[str, str]:
        fits = _is_of(source, value, frozenset(takes))
        return _items(source, value, fits, item.lower, item.lower_all, item.lowers_as_is)

    def lift(source: Source, value: str) -> tuple[str, str]:
        fits, made = _items(source, value, f"type({value}) is list", item.lift, item.lift_all, item.lifts_as_is)
        return fits, made if build is list else f"tuple({made})"

    return Straight(lower=lower, lift=lift, containers=1 + item.containers)


def _items(
    source: Source, value: str, fits: str, item: Code, all_items: Code | None, as_they_are: frozenset[type]
) -> tuple[str, str]:
    if as_they_are:
        return f"{fits} and {source.name(as_they_are)}.issuperset(map(type, {value}))", value
    if all_items is not None:
        return fits, all_items(source, value)[1]
    each = source.name()
    return fits, f"[{_each(*item(source, each))} for {each} in {value}]"


def _each(fits: str, made: str) -> str:
    return f"({made} if {fits} else otherwise())" if fits else made


def row(items: Sequence[Straight]) -> Straight:
    """Return the code for a tuple with an annotation for each item."""

    def code(kind: str, inside: Callable[[Straight], Code]) -> Code:
        def all_of(source: Source, value: str) -> tuple[str, str]:
            parts = [inside(item)(source, f"{value}[{place}]") for place, item in enumerate(items)]
            fits = [f"type({value}) is {kind}", f"len({value}) == {len(items)}", *(fit for fit, _ in parts if fit)]
            return f"({' and '.join(fits)})", f"({''.join(f'{made}, ' for _, made in parts)})"

        return all_of

    return Straight(
        lower=code("tuple", lambda item: item.lower),
        lift=code("list", lambda item: item.lift),
        containers=1 + max((item.containers for item in items), default=0),
    )


def mapping(keys: frozenset[type], item: Straight) -> Straight | None:
    """Return the code for a dict with keys of these types, which msgpack has; None for values that are converted when they arrive."""
    if not item.lifts_as_is:
        return None

    def lower(source: Source, value: str) -> tuple[str, str]:
        fits = f"type({value}) is dict and {source.name(keys)}.issuperset(map(type, {value}))"
        if item.lowers_as_is:
            return f"{fits} and {source.name(item.lowers_as_is)}.issuperset(map(type, {value}.values()))", value
        key, each = source.name(), source.name()
        return fits, f"{{{key}: {_each(*item.lower(source, each))} for {key}, {each} in {value}.items()}}"

    def lift(source: Source, value: str) -> tuple[str, str]:
        return "", f"to_dict({value}, {source.name(keys)}, {source.name(item.lifts_as_is)})"

    return Straight(lower=lower, lift=lift, containers=1 + item.containers)


def _is_of(source: Source, value: str, kinds: frozenset[type]) -> str:
    if len(kinds) == 1:
        return f"type({value}) is {source.name(*kinds)}"
    return f"type({value}) in {source.name(kinds)}"


def _otherwise(*_: Any) -> Any:
    raise Otherwise


def _to_dict(pairs: Any, keys: frozenset[type], items: frozenset[type]) -> dict[Any, Any]:
    if type(pairs) is not Pairs:
        raise Otherwise
    made = dict(pairs)
    if (
        len(made) != len(pairs)
        or not keys.issuperset(map(type, made))
        or not items.issuperset(map(type, made.values()))
    ):
        raise Otherwise
    return made


def _lower(value: Any, wanted: tuple[type, ...], pack: Callable[[Any], bytes], left: int) -> Any:
    """Pack a message inside another one."""
    plan = value.__message_plan__
    if not left or not isinstance(value, wanted) or plan.cls is not type(value):
        raise Otherwise
    return _as_ext((EXT_MESSAGE, pack(plan.lower_row(value, pack, left - 1))))


def _lower_all(
    values: Sequence[Any], wanted: tuple[type, ...], pack: Callable[[Any], bytes], left: int
) -> Sequence[Any]:
    """Pack messages of one class: 0.5 µs each, alone 1.1 µs."""
    if not values:
        return values
    cls: Any
    [cls] = set(map(type, values))
    plan = cls.__message_plan__
    if not left or not issubclass(cls, wanted) or plan.cls is not cls:
        raise Otherwise
    lower_row, below = plan.lower_row, left - 1
    rows = [lower_row(value, pack, below) for value in values]
    return list(map(_as_ext, zip(repeat(EXT_MESSAGE), map(pack, rows), strict=False)))


def _lift_function(tag: str, wanted: Any) -> Callable[[Any, int], Any]:
    """Return the `Plan.lift_row` of the class with a tag, which has to be one of the classes that are wanted; any error if there is none."""
    cls: Any = BY_TAG[tag]
    plan = cls.__message_plan__
    lift_row: Callable[[Any, int], Any] | None = plan.lift_row
    if lift_row is None or plan.cls is not cls or not issubclass(cls, wanted):
        raise Otherwise
    return lift_row


def _lift(wire: Any, wanted: tuple[type, ...], left: int) -> Any:
    """Make a message inside another one."""
    if not left or type(wire) is not tuple or wire[0] != EXT_MESSAGE:
        raise Otherwise
    row = unpack(wire[1])
    return _lift_function(row[0], wanted)(row, left - 1)


def _lift_all(wires: Sequence[Any], wanted: tuple[type, ...], left: int) -> list[Any]:
    """Make messages: 0.9 µs each, alone 1.2 µs."""
    if not left or set(map(type, wires)) - {tuple} or {code for code, _ in wires} - {EXT_MESSAGE}:
        raise Otherwise
    below, made, known, lift_row = left - 1, [], None, _otherwise
    for row in unpack_all([payload for _, payload in wires]):
        if row[0] != known:
            known = row[0]
            lift_row = _lift_function(known, wanted)
        made.append(lift_row(row, below))
    return made


def row_functions(
    cls: type, tag: str, fields: Sequence[tuple[str, str, Straight | None]], *, by_name: bool
) -> tuple[Callable[[Any, Any, int], tuple[Any, ...]] | None, Callable[[list[Any], int], Any] | None]:
    """Make the functions `lower_row` and `lift_row` of a `Plan`; of each field, give the name, the constructor's name, and the code."""
    source = Source(cls=cls, tag=tag)
    names = [source.name() for _ in fields]
    lowered, lifted = list[tuple[str, str]](), list[tuple[str, str]]()
    for name, (_, _, code) in zip(names, fields, strict=True):
        if code is None or code.containers > CONTAINERS:
            return None, None
        lowered.append(code.lower(source, name))
        lifted.append(code.lift(source, name))
    reads = "".join(f"    {name} = value.{field}\n" for name, (field, _, _) in zip(names, fields, strict=True))
    arguments = ", ".join(
        f"{alias}={value}" if by_name else value for (_, alias, _), (_, value) in zip(fields, lifted, strict=True)
    )
    items = ", ".join(["tag", *(value for _, value in lowered)])
    text = (
        f"def lower_row(value, pack, left):\n{reads}"
        f"    return {_if_all(lowered, f'({items},)')}\n"
        f"def lift_row(row, left):\n"
        f"    [{', '.join(['_', *names])}] = row\n"
        f"    return {_if_all(lifted, f'cls({arguments})')}\n"
    )
    exec(compile(text, f"<codec of {cls.__qualname__}>", "exec"), source.scope)  # only names of attributes go in
    return source.scope["lower_row"], source.scope["lift_row"]


def _if_all(parts: Sequence[tuple[str, str]], made: str) -> str:
    return _each(" and ".join(fits for fits, _ in parts if fits), made)
