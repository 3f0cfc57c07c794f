"""Compiled annotations: what lowers a value to what msgpack packs, and lifts it back. `levada.framework.codec` has the theory."""

from __future__ import annotations

import datetime as dt
import types
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from enum import Enum, Flag
from functools import lru_cache
from typing import Any
from uuid import UUID

import attrs

from . import _straight
from ._straight import Otherwise, Straight
from ._wire import (
    COPIES,
    EXT_ATTACHMENT,
    EXT_MESSAGE,
    NAMES,
    PIECEMEAL_FROM,
    REFS,
    AttachmentKind,
    In,
    Misfit,
    Out,
    Pairs,
    Row,
    ext_value,
    got,
    is_bulk,
    kind_of,
    read_attachment,
    unpack,
    wire_key,
)
from .annotations import CONTAINERS, Form, part_of, type_name
from .errors import ConfigurationError
from .flags import bits_of, flag_maker
from .message import BY_TAG, field_types, is_message, tag_of


@attrs.frozen(eq=False)
class Shape:
    """A compiled annotation."""

    name: str
    lower: Callable[[Any, Out, int], Any]
    """Value, call, levels left: to what msgpack packs."""
    lift: Callable[[Any, In, int], Any]
    """What msgpack unpacked, call, levels left: to the value."""
    takes: tuple[type, ...]
    """Python types that a union hands to this member."""
    wire_kinds: tuple[Any, ...]
    """Wire keys that a union hands to this member."""
    plain: frozenset[type] = frozenset()
    """Values of exactly these types are not converted, in either direction."""
    straight: Straight | None = None
    """The same as straight code, if there is such code for this annotation."""


PLAIN = frozenset({types.NoneType, bool, int, float, str, bytes})
"""The types of msgpack: values of exactly these types are not converted."""
_TOO_DEEP = "nested too deeply (max_depth)"


def _refuse(name: str, value: Any) -> Misfit:
    return Misfit(f"expected {name}, got {type_name(type(value))}")


def _native(
    kind: type, widen: Callable[[Any], Any] | None = None, also: tuple[type, ...] = (), also_wire: tuple[type, ...] = ()
) -> Shape:
    """A type that msgpack has. Encoding also takes `also` and subclasses, made exact by `widen`; decoding also `also_wire`."""
    name = type_name(kind)

    def lower(value: Any, out: Out, depth: int) -> Any:
        if type(value) is kind:
            return value
        if widen is None or not isinstance(value, (kind, *also)):
            raise _refuse(name, value)
        return make_exact(widen, value)

    def make_exact(widen: Callable[[Any], Any], value: Any) -> Any:
        try:
            return widen(value)
        except (ValueError, OverflowError) as error:
            raise Misfit(f"{error} (from {type(value).__qualname__} to {name})", ValueError) from error

    def lift(wire: Any, into: In, depth: int) -> Any:
        if type(wire) is kind:
            return wire
        if widen is None or type(wire) not in also_wire:
            raise Misfit(f"expected {name}, got {got(wire)}")
        return make_exact(widen, wire)

    plain = frozenset({kind}) & PLAIN
    straight = _straight.number() if kind is float else _straight.as_is(plain)
    return Shape(name, lower, lift, (kind,), (kind,), plain, straight)


def _converted(kind: type, wire_type: type, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> Shape:
    name = kind.__name__

    def lower(value: Any, out: Out, depth: int) -> Any:
        if type(value) is not kind:
            raise _refuse(name, value)
        return write(value)

    def lift(wire: Any, into: In, depth: int) -> Any:
        if type(wire) is not wire_type:
            raise Misfit(f"expected {name} (as {wire_type.__name__}), got {got(wire)}")
        try:
            return read(wire)
        except (ValueError, ArithmeticError) as error:
            raise Misfit(f"{NAMES.repr(wire)} is not a {name}: {error}") from error

    return Shape(name, lower, lift, (kind,), (wire_type,), straight=_straight.converted(lower, lift))


def _datetime() -> Shape:
    native = _native(dt.datetime)

    def lower(value: Any, out: Out, depth: int) -> Any:
        if not isinstance(value, dt.datetime):
            raise _refuse("datetime", value)
        if value.utcoffset() is None:
            raise Misfit(
                "a datetime without timezone is another moment elsewhere; use e.g. datetime.now(UTC)", ValueError
            )
        return value

    arrives = _straight.as_is(frozenset({dt.datetime}))
    straight = attrs.evolve(arrives, lower=_straight.converted(lower, native.lift).lower, lowers_as_is=frozenset())
    return attrs.evolve(native, lower=lower, straight=straight)


_MICROSECOND = dt.timedelta(microseconds=1)
_LEAVES: dict[Any, Shape] = {
    None: _native(types.NoneType),
    types.NoneType: _native(types.NoneType),
    bool: _native(bool),
    int: _native(int, int),
    float: _native(float, float, (int,), (int,)),
    str: _native(str, str.__str__),
    bytes: _native(bytes, bytes, (bytearray, memoryview)),
    dt.datetime: _datetime(),
    dt.date: _converted(dt.date, str, dt.date.isoformat, dt.date.fromisoformat),
    dt.timedelta: _converted(dt.timedelta, int, lambda value: value // _MICROSECOND, lambda wire: wire * _MICROSECOND),
    UUID: _converted(UUID, bytes, lambda value: value.bytes, lambda wire: UUID(bytes=wire)),
    Decimal: _converted(Decimal, str, str, Decimal),
}


def _choice(name: str, members: dict[tuple[type, Any], Any], takes: tuple[type, ...]) -> Shape:
    """One of some constants: `members` maps wire values, with their types (``True == 1``), to what they stand for."""
    wire_of = {(type(member), member): wire for (_, wire), member in members.items()}
    wire_types = {kind for kind, _ in members}

    def lower(value: Any, out: Out, depth: int) -> Any:
        if not isinstance(value, takes) or (type(value), value) not in wire_of:
            raise Misfit(f"expected {name}, got {NAMES.repr(value)}")
        return wire_of[type(value), value]

    def lift(wire: Any, into: In, depth: int) -> Any:
        if type(wire) not in wire_types:
            raise Misfit(f"expected {name}, got {got(wire)}")
        if (type(wire), wire) not in members:
            raise Misfit(f"expected {name}, got {NAMES.repr(wire)}")
        return members[type(wire), wire]

    straight = _straight.converted(lower, lift)
    return Shape(name, lower, lift, takes, tuple(sorted(wire_types, key=str)), straight=straight)


def _enum(kind: type[Enum]) -> Shape:
    if issubclass(kind, Flag):
        return _flag(kind)
    members = {(type(member.value), member.value): member for member in kind}
    if not {value_type for value_type, _ in members} <= {str, int}:
        raise ConfigurationError(f"enum {kind.__qualname__} has values other than str and int, which alone can travel")
    return _choice(kind.__name__, members, (kind,))


def _flag(kind: type[Flag]) -> Shape:
    """A combination of flags, without bits that the class does not know."""
    bits = bits_of(kind)
    make = flag_maker(kind)

    def known(value: int) -> int:
        if value & ~bits:
            raise Misfit(f"{NAMES.repr(value)} has bits that no member of {kind.__name__} has", ValueError)
        return value

    return _converted(kind, int, lambda value: known(value.value), lambda wire: make(known(wire)))


def _literal(name: str, values: tuple[Any, ...]) -> Shape:
    wire_values = [value.value if isinstance(value, Enum) else value for value in values]
    members = {(type(wire), wire): value for wire, value in zip(wire_values, values, strict=True)}
    if len(members) < len(values) or not {wire_type for wire_type, _ in members} <= PLAIN:
        raise ConfigurationError(f"{name} has values that look the same on the wire or cannot travel")
    return _choice(name, members, tuple({type(value): None for value in values}))


def _array(name: str, item: Shape, takes: Any, build: Callable[[list[Any]], Any]) -> Shape:
    """A container of one item type; `build` makes it of a list."""
    plain = item.plain
    is_set = build is set or build is frozenset
    lower_item, lift_item = item.lower, item.lift

    def lower(value: Any, out: Out, depth: int) -> Any:
        if not isinstance(value, takes):
            raise _refuse(name, value)
        _check_container(len(value), depth, out.max_items)
        if plain.issuperset(map(type, value)):
            lowered = list(value) if is_set else value
        else:
            lowered = []
            try:
                for each in value:
                    lowered.append(lower_item(each, out, depth - 1))
            except Misfit as misfit:
                misfit.path = f"[{len(lowered)}]{misfit.path}"
                raise
        return sorted(lowered, key=out.pack) if is_set else lowered

    def lift(wire: Any, into: In, depth: int) -> Any:
        if type(wire) is not list:
            raise Misfit(f"expected {name}, got {got(wire)}")
        _check_container(len(wire), depth, into.max_items)
        if plain.issuperset(map(type, wire)):
            lifted = wire
        else:
            lifted = []
            try:
                for each in wire:
                    lifted.append(lift_item(each, into, depth - 1))
            except Misfit as misfit:
                misfit.path = f"[{len(lifted)}]{misfit.path}"
                raise
        if build is list:
            return lifted
        try:
            if is_set and lifted is not wire:
                alike: dict[int, int] = {}
                for each in lifted:
                    _check_hash(each, alike)
            built = build(lifted)
        except TypeError as error:
            raise Misfit(f"an item is {error}") from error
        if len(built) != len(lifted):
            raise Misfit("an item is there twice")
        return built

    straight = None if is_set or item.straight is None else _straight.array(item.straight, takes, build)
    return Shape(name, lower, lift, takes, (list,), straight=straight)


def _check_hash(key: Any, alike: dict[int, int]) -> None:
    """Refuse the hundredth key of one hash, as finding one of n takes n steps: a peer can choose UUIDs, decimals and tuples for that.

    Args:
        key: not of a type that msgpack has; of those no more than some tens have the same hash.
        alike: how many had which hash so far.
    """
    value = hash(key)
    count = alike[value] = alike.get(value, 0) + 1
    if count == 100:
        raise Misfit("a hundred keys with one hash")


def _check_container(size: int, depth: int, max_items: int) -> None:
    if depth < 1:
        raise Misfit(_TOO_DEEP, ValueError)
    if size > max_items:
        raise Misfit(f"{size} items, at most {max_items} (max_items)", ValueError)


def _fixed_tuple(name: str, items: tuple[Shape, ...]) -> Shape:
    def each(values: Any, convert: Callable[[Shape, Any], Any], depth: int) -> tuple[Any, ...]:
        _check_container(0, depth, 0)
        if len(values) != len(items):
            raise Misfit(f"expected {name}, got {len(values)} items", ValueError)
        done: list[Any] = []
        try:
            for item, value in zip(items, values, strict=True):
                done.append(convert(item, value))
        except Misfit as misfit:
            misfit.path = f"[{len(done)}]{misfit.path}"
            raise
        return tuple(done)

    def lower(value: Any, out: Out, depth: int) -> Any:
        if not isinstance(value, tuple):
            raise _refuse(name, value)
        return each(value, lambda item, inner: item.lower(inner, out, depth - 1), depth)

    def lift(wire: Any, into: In, depth: int) -> Any:
        if type(wire) is not list:
            raise Misfit(f"expected {name}, got {got(wire)}")
        return each(wire, lambda item, inner: item.lift(inner, into, depth - 1), depth)

    parts = [item.straight for item in items if item.straight is not None]
    straight = _straight.row(parts) if len(parts) == len(items) else None
    return Shape(name, lower, lift, (tuple,), (list,), straight=straight)


def _mapping(name: str, key: Shape, item: Shape) -> Shape:
    def lower(value: Any, out: Out, depth: int) -> Any:
        if not isinstance(value, dict):
            raise _refuse(name, value)
        _check_container(len(value), depth, out.max_items)
        if key.plain.issuperset(map(type, value)) and item.plain.issuperset(map(type, value.values())):
            return value
        lowered = {}
        for k, each in value.items():
            step = f"[key {NAMES.repr(k)}]"
            try:
                plain_key = key.lower(k, out, depth - 1)
                step = f"[{NAMES.repr(k)}]"
                # A dict cannot hold a lowered key that is a list (from a frozenset); as a tuple it packs the same.
                lowered[tuple(plain_key) if type(plain_key) is list else plain_key] = item.lower(each, out, depth - 1)
            except Misfit as misfit:
                misfit.path = step + misfit.path
                raise
        return lowered

    def lift(wire: Any, into: In, depth: int) -> Any:
        if type(wire) is not Pairs:
            raise Misfit(f"expected {name}, got {got(wire)}")
        _check_container(len(wire), depth, into.max_items)
        lifted: dict[Any, Any] = {}
        alike: dict[int, int] = {}
        for raw_key, raw_item in wire:
            try:
                k = key.lift(raw_key, into, depth - 1)
                try:
                    if type(k) not in PLAIN:
                        _check_hash(k, alike)
                    if k in lifted:
                        raise Misfit(f"{NAMES.repr(k)} is there twice")
                except TypeError as error:
                    raise Misfit(f"a key is {error}") from error
            except Misfit as misfit:
                misfit.path = f"[key {len(lifted)}]{misfit.path}"
                raise
            try:
                lifted[k] = item.lift(raw_item, into, depth - 1)
            except Misfit as misfit:
                misfit.path = f"[{NAMES.repr(k)}]{misfit.path}"
                raise
        return lifted

    straight = _straight.mapping(key.plain, item.straight) if key.plain and item.straight else None
    return Shape(name, lower, lift, (dict,), (Pairs,), straight=straight)


def _handle(name: str, kind: AttachmentKind | None, item: Any) -> Shape:
    kinds = REFS if kind is AttachmentKind.REF else (kind,)

    def lower(value: Any, out: Out, depth: int) -> Any:
        if kind_of(type(value)) is not kind:
            raise _refuse(name, value)
        return out.attach(value)

    def lift(wire: Any, into: In, depth: int) -> Any:
        attachment = read_attachment(wire[1]) if type(wire) is tuple and wire[0] == EXT_ATTACHMENT else None
        if attachment is None or attachment[0] not in kinds:
            raise Misfit(f"expected {name}, got {got(wire)}")
        return into.take(attachment, item)

    return Shape(name, lower, lift, (), kinds)


def _union(members: list[Shape]) -> Shape:
    name = " | ".join(sorted(member.name for member in members))
    by_type: dict[type, Shape] = {}
    by_wire: dict[Any, Shape] = {}
    for member in members:
        for wire in member.wire_kinds:
            if by_wire.setdefault(wire, member) is not member:
                raise ConfigurationError(
                    f"{by_wire[wire].name} and {member.name} look the same on the wire; wrap one of them in a message class"
                )
        by_type.update(dict.fromkeys(member.takes, member))
    if float in by_wire:
        by_wire.setdefault(int, by_wire[float])
        by_type.setdefault(int, by_wire[float])

    def member_for(value: Any) -> Shape | None:
        kind = type(value)
        if kind in by_type:
            return by_type[kind]
        if is_message(kind):
            return by_wire.get("message")
        if kind_of(kind) is not None:
            return by_wire.get(kind_of(kind))
        return next((by_type[base] for base in kind.__mro__ if base in by_type), None)

    def lower(value: Any, out: Out, depth: int) -> Any:
        member = member_for(value)
        if member is None:
            raise _refuse(name, value)
        return member.lower(value, out, depth)

    def lift(wire: Any, into: In, depth: int) -> Any:
        member = by_wire.get(wire_key(wire))
        if member is None:
            raise Misfit(f"expected {name}, got {got(wire)}")
        return member.lift(wire, into, depth)

    plain = frozenset[type]().union(*(member.plain for member in members))
    straight = _straight.as_is(plain) if plain else None
    others = [member for member in members if member.takes != (types.NoneType,)]
    if len(others) == 1 and others[0].straight is not None:
        straight = _straight.optional(others[0].straight)
    return Shape(name, lower, lift, tuple(by_type), tuple(by_wire), plain, straight)


def _anything(*, as_key: bool = False) -> Shape:
    """Make the shape of `Any`; with `as_key` that of a key of a dict or a member of a set, which must come back hashable."""

    def lower(value: Any, out: Out, depth: int) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if as_key and kind is tuple:
            raise Misfit(
                "a tuple comes back as a list, which is no key: annotate it, as in dict[tuple[int, str], float]"
            )
        if kind in lower_as:
            return lower_as[kind](value, out, depth)
        if is_message(kind):
            return _ANY_MESSAGE.lower(value, out, depth)
        if kind_of(kind) is not None:
            return out.attach(value)
        if kind is types.CoroutineType:
            raise Misfit(f"the coroutine {value.__qualname__} cannot travel: await it")
        raise Misfit(
            f"{kind.__qualname__} cannot travel without an annotation that says {kind.__name__}: "
            "annotate the value, or use a @message class"
        )

    def lift(wire: Any, into: In, depth: int) -> Any:
        kind = type(wire)
        if kind in PLAIN or kind is dt.datetime:
            return wire
        if kind is list:
            return items.lift(wire, into, depth)
        if kind is Pairs:
            return pairs.lift(wire, into, depth)
        if wire_key(wire) == "message":
            return _ANY_MESSAGE.lift(wire, into, depth)
        return into.take(read_attachment(wire[1]), Any)

    shape = Shape("Any", lower, lift, (), (), PLAIN, _straight.as_is(PLAIN))
    items = _array("list", shape, (list, tuple), list)
    pairs = _mapping("dict", shape if as_key else _ANY_KEY, shape)
    lower_as = {dt.datetime: _LEAVES[dt.datetime].lower, list: items.lower, tuple: items.lower, dict: pairs.lower}
    return shape


@attrs.frozen(eq=False)
class Field:
    name: str
    alias: str
    """What the constructor calls it."""
    shape: Shape
    has_default: bool


@attrs.frozen(eq=False)
class Plan:
    """How one message class travels."""

    cls: type
    tag: str
    fields: tuple[Field, ...]
    steps: tuple[str, ...]
    """What each item of a row adds to a path: nothing for the tag, ``.name`` for a field."""
    by_name: bool
    """The constructor wants its arguments by name."""
    flat: bool
    """Whether every field may have a value that goes over as it is. The two functions below then raise only `Otherwise` and what validators raise."""
    bulky: bool
    """Whether a field may be bytes, which are long perhaps."""
    lower_row: Callable[[Any, Any, int], tuple[Any, ...]] | None
    """Instance, function that packs a row, levels of messages inside it: the row ``(tag, field, …)``. Any error: by way of the shapes."""
    lower_rows: Callable[[Sequence[Any], Any, int], list[tuple[Any, ...]]] | None
    """The same for many instances."""
    lift_row: Callable[[list[Any], int], Any] | None
    """The instance of a row with a tag and all fields. Any error as above."""
    lift_rows: Callable[[list[list[Any]], int], list[Any]] | None
    """The same for many rows."""


def plan_of(cls: Any) -> Plan:
    plan: Plan | None = cls.__dict__.get("__message_plan__")
    if plan is None:
        tag = tag_of(cls)
        annotations = field_types(cls)
        fields: list[Field] = []
        attributes = [attribute for attribute in attrs.fields(cls) if attribute.init]
        for attribute in attributes:
            try:
                shape = _compile(annotations[attribute.name])
            except ConfigurationError as error:
                raise ConfigurationError(f"{cls.__qualname__}.{attribute.name}: {error}") from error
            except RecursionError as error:
                raise ConfigurationError(
                    f"{cls.__qualname__}.{attribute.name}: contains itself without a message class between"
                ) from error
            fields.append(
                Field(attribute.name, attribute.alias or attribute.name, shape, attribute.default is not attrs.NOTHING)
            )
        steps = ("", *(f".{field.name}" for field in fields))
        by_name = any(attribute.kw_only for attribute in attributes)
        flat = all(field.shape.plain for field in fields)
        bulky = any(bytes in field.shape.plain for field in fields)
        straight = [(field.name, field.alias, field.shape.straight) for field in fields]
        plan = Plan(
            cls,
            tag,
            tuple(fields),
            steps,
            by_name,
            flat,
            bulky,
            *_straight.row_functions(cls, tag, straight, by_name=by_name),
        )
        cls.__message_plan__ = plan
    return plan


def _flat_row(plan: Plan, value: Any) -> tuple[Any, ...] | None:
    """Return the row of an instance whose fields all go over as they are; None for others. The plan is flat."""
    if plan.lower_row is not None:
        try:
            return plan.lower_row(value, None, 0)
        except Otherwise:
            pass
    return None


def _flat_message(plan: Plan, row: list[Any]) -> Any:
    """Return the instance of a complete row whose fields all arrive as they are; None for others. The plan is flat. Raises what validators raise."""
    if plan.lift_row is not None and len(row) == len(plan.steps):
        try:
            return plan.lift_row(row, 0)
        except Otherwise:
            pass
    return None


def _message(name: str, wanted: tuple[type, ...]) -> Shape:
    only = wanted[0]  # the usual case, without the 0.1 µs of issubclass()

    def lower(value: Any, out: Out, depth: int) -> Any:
        cls = type(value)
        if cls is not only and not issubclass(cls, wanted):
            raise _refuse(name, value)
        plan = getattr(cls, "__message_plan__", None)
        if plan is None or plan.cls is not cls:
            if not is_message(cls):
                raise Misfit(f"{cls.__module__}.{cls.__qualname__} is not decorated with @message")
            plan = plan_of(cls)
        if depth < 1:
            raise Misfit(_TOO_DEEP, ValueError)
        row = _flat_row(plan, value) if plan.flat else None
        if row is None:
            lowered = [plan.tag]
            try:
                for field in plan.fields:
                    lowered.append(field.shape.lower(getattr(value, field.name), out, depth - 1))
            except Misfit as misfit:
                misfit.path = plan.steps[len(lowered)] + misfit.path
                raise
            row = tuple(lowered)
        payload = out.pack(row, plan.steps)
        out.budget -= len(payload)
        if out.budget < 0:
            raise Misfit(f"messages nested in messages add up to more than {COPIES} times max_bytes", ValueError)
        return ext_value(EXT_MESSAGE, payload)

    def lift(wire: Any, into: In, depth: int) -> Any:
        if type(wire) is not tuple or wire[0] != EXT_MESSAGE:
            raise Misfit(f"expected {name}, got {got(wire)}")
        if depth < 1:
            raise Misfit(_TOO_DEEP)
        payload = wire[1]
        into.budget -= len(payload)
        if into.budget < 0:
            raise Misfit(f"messages nested in messages add up to more than {COPIES} times max_bytes")
        large = Row(payload) if len(payload) >= PIECEMEAL_FROM and not is_bulk(payload) else None
        row = unpack(payload) if large is None else [large.tag]
        tag = row[0] if type(row) is list and row else None
        if type(tag) is not str:
            raise Misfit("a message must be an array that begins with a tag")
        cls: Any = BY_TAG.get(tag)
        if cls is None:
            raise Misfit(f"unknown tag {NAMES.repr(tag)}: the module that defines this message must be imported here")
        if depth == into.max_depth:
            into.root = cls.__name__
        if cls is not only and not issubclass(cls, wanted):
            raise Misfit(f"expected {name}, got {cls.__name__}")
        try:
            plan = getattr(cls, "__message_plan__", None)
            if plan is None or plan.cls is not cls:
                plan = plan_of(cls)
        except ConfigurationError as error:
            raise Misfit(f"{cls.__name__} cannot travel: {error}") from error
        try:
            if large is not None:
                return build(plan, large.fields(field.shape for field in plan.fields), large.size - 1, into, depth)
            made = _flat_message(plan, row) if plan.flat else None
            return made if made is not None else build(plan, row[1:], len(row) - 1, into, depth)
        except Misfit:
            raise
        except Exception as error:
            # Validators, converters and __attrs_post_init__ are the user's and may raise anything at what a peer sent.
            raise Misfit(f"{cls.__name__} refuses these values: {error}") from error

    def build(plan: Plan, wire_values: Iterable[Any], size: int, into: In, depth: int) -> Any:
        values: list[Any] = []
        try:
            for field, wire in zip(plan.fields, wire_values, strict=False):
                values.append(field.shape.lift(wire, into, depth - 1))
        except Misfit as misfit:
            misfit.path = plan.steps[len(values) + 1] + misfit.path
            raise
        if len(values) < len(plan.fields):
            missing = [field.name for field in plan.fields[len(values) :] if not field.has_default]
            if missing:
                raise Misfit(f"{size} fields came, {', '.join(missing)} missing and without default")
        if plan.by_name:
            return plan.cls(**{field.alias: value for field, value in zip(plan.fields, values, strict=False)})
        return plan.cls(*values)

    return Shape(name, lower, lift, wanted, ("message",), straight=_straight.message(wanted))


_ANY_MESSAGE = _message("a message", (object,))
_ANY_KEY = _anything(as_key=True)
_ANY = _anything()


@lru_cache(maxsize=512)
def shape_of(annotation: Any) -> Shape:
    """Return the shape of an annotation. If it is a message class, its plan is made too, so that a field that cannot travel is told here."""
    shape = _compile(annotation)
    if is_message(annotation):
        plan_of(annotation)
    return shape


def _compile(annotation: Any, *, as_key: bool = False) -> Shape:
    part = part_of(annotation)
    origin, arguments = part.origin, part.arguments
    match part.form:
        case Form.ANY:
            return _ANY_KEY if as_key else _ANY
        case Form.VARIABLE:
            return _compile(*arguments, as_key=as_key)
        case Form.LITERAL:
            return _literal(type_name(part.annotation), arguments)
        case Form.UNION:
            return _compile_union([_compile(argument, as_key=as_key) for argument in arguments])
        case Form.ITEMS:
            takes, build = CONTAINERS[origin]
            item = _compile(*arguments, as_key=as_key or build in (set, frozenset))
            return _array(f"{build.__name__}[{item.name}{', ...' if build is tuple else ''}]", item, takes, build)
        case Form.TUPLE:
            shapes = tuple(_compile(argument, as_key=as_key) for argument in arguments)
            return _fixed_tuple(f"tuple[{', '.join(shape.name for shape in shapes)}]", shapes)
        case Form.MAPPING:
            key, item = _compile(arguments[0], as_key=True), _compile(arguments[1])
            return _mapping(f"dict[{key.name}, {item.name}]", key, item)
        case Form.ENUM:
            return _enum(origin)
        case Form.MESSAGE:
            return _message(origin.__name__, (origin,))
        case Form.HANDLE:
            return _handle(type_name(part.annotation), kind_of(origin), *arguments)
        case Form.OTHER if origin in _LEAVES:
            return _LEAVES[origin]
    raise ConfigurationError(
        f"{type_name(part.annotation)} cannot travel; wanted one of the types that levada.framework.codec lists, or a @message class"
    )


def _compile_union(shapes: list[Shape]) -> Shape:
    for anything in (_ANY, _ANY_KEY):
        if anything in shapes:
            return anything
    messages = [shape for shape in shapes if shape.wire_kinds == ("message",)]
    if len(messages) > 1:
        together = _message(
            " | ".join(sorted(shape.name for shape in messages)),
            tuple(cls for shape in messages for cls in shape.takes),
        )
        shapes = [shape for shape in shapes if shape not in messages] + [together]
    return shapes[0] if len(shapes) == 1 else _union(shapes)
