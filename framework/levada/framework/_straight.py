"""Straight code for a message class: the usual values of its fields, without a look for the place of a bad one.

It is made once for each class, as attrs makes its methods. Values that it does not take go the way of the shapes, which place a mistake.
Encoding and decoding four fields, one of them a list, takes 3.2 times msgpack's own time; by way of the shapes 12 times. msgspec underneath
would make it 3.0, and a list of messages 4.3 instead of 5.1; but it would be a second packer, whose decoder loses equal keys.
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
            "to_dict": _to_dict, "as_ext": _as_ext, "as_float": _as_float, **scope,
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
        return "", f"({value} if type({value}) is float else as_float({value}))"

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

    def lower(source: Source, value: str) -> tuple[str, str]:
        # The usual class without a call: 0.2 µs.
        only, plan = source.name(wanted[0]), f"{value}.__message_plan__"
        usual = f"left and type({value}) is {only} and {plan}.cls is {only}"
        made = f"as_ext(({EXT_MESSAGE}, pack({plan}.lower_row({value}, pack, left - 1))))"
        return "", f"({made} if {usual} else {code('lower', 'pack', 'left')(source, value)[1]})"

    return Straight(
        lower=lower,
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


def _as_float(value: Any) -> float:
    if type(value) is not int or not -_EXACT < value < _EXACT:
        raise Otherwise
    return float(value)


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
    """Pack messages: 0.6 µs each, alone 1.0 µs."""
    classes: set[Any] = set(map(type, values))
    if len(classes) != 1:
        return [_lower(value, wanted, pack, left) for value in values]
    [cls] = classes
    plan = cls.__message_plan__
    if not left or not issubclass(cls, wanted) or plan.cls is not cls:
        raise Otherwise
    rows = plan.lower_rows(values, pack, left - 1)
    return list(map(_as_ext, zip(repeat(EXT_MESSAGE), map(pack, rows), strict=False)))


def _lift(wire: Any, wanted: tuple[type, ...], left: int) -> Any:
    """Make a message inside another one."""
    if not left or type(wire) is not tuple or wire[0] != EXT_MESSAGE:
        raise Otherwise
    return _lift_row(unpack(wire[1]), wanted, left - 1)


def _lift_row(row: list[Any], wanted: tuple[type, ...], left: int) -> Any:
    cls: Any = BY_TAG[row[0]]
    plan = cls.__message_plan__
    if plan.cls is not cls or (cls is not wanted[0] and not issubclass(cls, wanted)):
        raise Otherwise
    return plan.lift_row(row, left)


def _lift_all(wires: Sequence[Any], wanted: tuple[type, ...], left: int) -> list[Any]:
    """Make messages: 0.8 µs each, alone 1.5 µs."""
    if not wires:
        return []
    codes, payloads = zip(*wires, strict=True)
    if not left or set(codes) != {EXT_MESSAGE} or set(map(type, wires)) != {tuple}:
        raise Otherwise
    rows = unpack_all(payloads)
    tags = {row[0] for row in rows}
    if len(tags) != 1:
        return [_lift_row(row, wanted, left - 1) for row in rows]
    cls: Any = BY_TAG[tags.pop()]
    plan = cls.__message_plan__
    if plan.cls is not cls or not issubclass(cls, wanted):
        raise Otherwise
    made: list[Any] = plan.lift_rows(rows, left - 1)
    return made


def row_functions(
    cls: type, tag: str, fields: Sequence[tuple[str, str, Straight | None]], *, by_name: bool
) -> tuple[Any, Any, Any, Any]:
    """Make the functions of a `Plan` for rows; of each field, give the name, the constructor's name, and the code."""
    source = Source(cls=cls, tag=tag)
    names = [source.name() for _ in fields]
    lowered, lifted = list[tuple[str, str]](), list[tuple[str, str]]()
    for name, (_, _, code) in zip(names, fields, strict=True):
        if code is None or code.containers > CONTAINERS:
            return None, None, None, None
        lowered.append(code.lower(source, name))
        lifted.append(code.lift(source, name))
    reads = [f"{name} = value.{field}" for name, (field, _, _) in zip(names, fields, strict=True)]
    items = ", ".join(["tag", *(value for _, value in lowered)])
    arguments = ", ".join(
        f"{alias}={value}" if by_name else value for (_, alias, _), (_, value) in zip(fields, lifted, strict=True)
    )
    text = _functions("lower", "pack, left", reads, _if_all(lowered, f"({items},)")) + _functions(
        "lift", "left", [f"[{', '.join(['_', *names])}] = value"], _if_all(lifted, f"cls({arguments})")
    )
    exec(compile(text, f"<codec of {cls.__qualname__}>", "exec"), source.scope)  # only names of attributes go in
    scope = source.scope
    return scope["lower_row"], scope["lower_rows"], scope["lift_row"], scope["lift_rows"]


def _functions(name: str, more: str, reads: Sequence[str], made: str) -> str:
    """Write the function for one value, and the one for many, which is a third faster than a call each."""
    return "\n".join(
        [
            f"def {name}_row(value, {more}):",
            *(f"    {read}" for read in reads),
            f"    return {made}",
            f"def {name}_rows(values, {more}):",
            "    made = []",
            "    for value in values:",
            *(f"        {read}" for read in reads),
            f"        made.append({made})",
            "    return made",
            "",
        ]
    )


def _if_all(parts: Sequence[tuple[str, str]], made: str) -> str:
    return _each(" and ".join(fits for fits, _ in parts if fits), made)
