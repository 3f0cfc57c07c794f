"""Message classes: the `@message` decorator, the tags that name them on the wire, and the reply type of a question.

The rules of this file:

* A message class is an attrs class with slots. `@message` adds one class attribute, its *tag*, and nothing to its instances, so making a
  message costs the same as with `attrs.define` (185 ns for three fields).
* A tag names one class. Only a new definition of the same class may take over its tag: a reloaded module, a notebook cell that ran
  again, a function with a local class that was called again; or a class elsewhere, if the module of the first one was removed from
  ``sys.modules``.
* Annotations are resolved on first use (by the codec, or for a handler table). So classes may refer to later ones, and a message that
  never leaves the process may have fields of any type.
"""

from __future__ import annotations

import enum
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    Self,
    TypeGuard,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import attrs

from .errors import ConfigurationError

__all__ = [
    "Asks", "Question", "class_of", "define_fields", "field_types", "fits", "is_message", "message", "reply_type", "tag_of",
]  # fmt: skip

T = TypeVar("T")
M_co = TypeVar("M_co", covariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_DECORATORS: Final = {
    "_is_loop": "the base Actor: an actor is no message", "__message_tag__": "the second @message",
    "__attrs_attrs__": "@attrs.define", "__dataclass_fields__": "@dataclass", "__pydantic_validator__": "BaseModel",
}  # fmt: skip
"""What shows that a class is made already, and what makes it."""
_VALUES: Final = frozenset({bool, bytes, dict, enum.Enum, float, frozenset, int, list, set, str, tuple})

BY_TAG: dict[str, type] = {}
"""The class of each tag; only `message` writes here."""


class Asks(Generic[R_co]):
    """Base of the messages that are questions: ``Asks[R]`` is answered with an ``R``.

    Example:
        >>> @message
        ... class Total(Asks[int]):
        ...     account: str
        >>> reply_type(Total)
        <class 'int'>
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __levada_question__(self) -> Self: ...

        def __levada_answer__(self) -> R_co: ...

        def __levada_answered__(self) -> _Exactly[R_co]: ...

        def __sizeof__(self) -> str: ...  # type: ignore[override] # so that no question is `Unasked`


class _Exactly(Generic[R]):
    """A type that neither a subtype nor a supertype replaces."""

    answer: R


class Answered(Protocol[R]):
    """A question that is answered with just an `R`: how `handles` tells pyright what a handler owes. Only type checkers see its method."""

    def __levada_answered__(self) -> _Exactly[R]: ...


class Unasked(Protocol):
    """What is not a question: `Asks` alone does not have the ``__sizeof__`` of `object` for type checkers."""

    def __sizeof__(self) -> int: ...


class Question(Protocol[M_co, R_co]):
    """A question of class `M_co` that is answered with an `R_co`: how `Ref.ask` tells type checkers which questions an actor takes.

    Only type checkers see its methods.
    """

    def __levada_question__(self) -> M_co: ...

    def __levada_answer__(self) -> R_co: ...


@overload
@dataclass_transform(field_specifiers=(attrs.field,))
def message(cls: type[T], /) -> type[T]: ...
@overload
def message(tag: str | None = None, /, *, frozen: bool = False) -> Callable[[type[T]], type[T]]: ...
def message(cls: type[Any] | str | None = None, /, *, frozen: bool = False) -> Any:
    """Make a class a message: an attrs class with slots, registered for the codec under a tag.

    Between actors of one process a message is an ordinary object. To send it further, both sides must have imported its class.
    Subclasses of a message class are messages if they are decorated too.

    Args:
        cls: the class, or, as in ``@message("desk.Price")``, the tag: any text of 1 to 255 bytes. The default tag is
            ``module:QualName``; the module run as a script counts under its import name.
        frozen: fields cannot be set again, and instances are hashable if their fields are.

    Raises:
        ConfigurationError: another class has this tag, the tag is empty or too long, the class has an ``__init__`` of its own, is made by
            another library or derives from `tuple` or the like, a field has a default that all messages would share, such as ``[]``, or a
            field without a default follows one with a default.
        TypeError: used on something that is not a class.

    Example:
        >>> @message("docs.Price")
        ... class Price:
        ...     symbol: str
        ...     bid: float = 0.0
        >>> Price("EURUSD", bid=1.08)
        Price(symbol='EURUSD', bid=1.08)
        >>> tag_of(Price)
        'docs.Price'
    """
    if isinstance(cls, type):
        return _define(cls, None, frozen, sys._getframe(1).f_locals)
    if cls is not None and not isinstance(cls, str):
        raise TypeError(f"@message got {cls!r}, wanted a class or a tag")

    def decorate(decorated: type[T]) -> type[T]:
        if not isinstance(decorated, type):
            raise TypeError(f"@message got {decorated!r}, wanted a class")
        return _define(decorated, cls, frozen, sys._getframe(1).f_locals)

    return decorate


def is_message(cls: Any) -> TypeGuard[type[Any]]:
    """Whether this is a message class itself; a decorated base class is not enough."""
    return isinstance(cls, type) and "__message_tag__" in cls.__dict__


def tag_of(cls: type) -> str:
    """Return the tag of a message class.

    Raises:
        TypeError: the class is not decorated with `@message` (a decorated base class is not enough).
    """
    tag = cls.__dict__.get("__message_tag__")
    if tag is None:
        raise TypeError(f"{cls.__module__}.{cls.__qualname__} is not decorated with @message")
    return str(tag)


def class_of(tag: str) -> type | None:
    """Return the message class with this tag in this process, or None. Never imports anything."""
    return BY_TAG.get(tag)


def field_types(cls: type) -> dict[str, Any]:
    """Return the resolved annotations of a message class, by field name in definition order.

    Raises:
        ConfigurationError: an annotation cannot be resolved; names the field and the cause.

    Example:
        >>> @message
        ... class Tree:
        ...     children: "list[Tree]"
        >>> field_types(Tree) == {"children": list[Tree]}
        True
    """
    found: dict[str, Any] = {}
    for attribute in attrs.fields(cls):
        # A string is resolved where it was written: in the module and function of the class that introduced the field.
        owner = next(base for base in cls.__mro__ if attrs.has(base) and attribute.name in _own_fields(base))
        found[attribute.name] = Any if attribute.type is None else _resolve(attribute.type, owner, attribute.name)
    return found


def reply_type(cls: type[Asks[Any]]) -> Any:
    """Return the ``R`` of a subclass of ``Asks[R]``: a type as in an annotation; `Any` if the class does not say.

    Raises:
        TypeError: the class is not a subclass of `Asks`.
        ConfigurationError: the reply type is text that cannot be resolved.

    Example:
        >>> class Names(Asks[list[str]]): ...
        >>> reply_type(Names)
        list[str]
    """
    if not issubclass(cls, Asks):
        raise TypeError(f"{cls.__qualname__} is not a question: derive it from Asks[R]")
    # Cached in the class itself, since a base class may say something else: a twentieth of the cost, for each question over a network.
    if "__message_reply__" not in cls.__dict__:
        cls.__message_reply__ = _reply(cls)  # type: ignore[attr-defined]
    return cls.__dict__["__message_reply__"]


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value can be of a type. Looks only at the outermost class: the items of a list are not checked."""
    origin = get_origin(annotation)
    if origin is Literal:
        return value in get_args(annotation)
    if origin is Annotated:
        return fits(value, get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return any(fits(value, member) for member in get_args(annotation))
    if annotation is None:
        return value is None
    kind = origin or annotation
    if kind is float:
        return isinstance(value, (float, int))  # as PEP 484 has it
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def define_fields(cls: type, **options: Any) -> Any:
    """Return an attrs class made of a class, with the options of `attrs.define`.

    Raises:
        ConfigurationError: a field without a default follows a field with a default; or a default is shared or of another library.
    """
    try:
        defined = attrs.define(cls, **options)
    except ValueError as error:
        found = re.match(r"No mandatory attributes .*?name='(\w+)'", str(error))
        if found is None:
            raise
        raise ConfigurationError(
            f"{cls.__qualname__}.{found[1]} has no default and follows a field that has one: give it a default, or move it up"
        ) from None
    _check_defaults(defined)
    return defined


def _check_defaults(cls: type) -> None:
    """Raise `ConfigurationError` for a mutable default that all instances would share, or a field of another library.

    The error says what to write instead.
    """
    for attribute in attrs.fields(cls):
        default = attribute.default
        if type(default).__module__ in ("dataclasses", "pydantic.fields"):
            raise ConfigurationError(
                f"{cls.__qualname__}.{attribute.name}: the default is a field of {type(default).__module__}; "
                f"use {attribute.name} = attrs.field(…)"
            )
        if default is not attrs.NOTHING and type(default).__hash__ is None:
            factory = type(default).__name__ if not default else f"lambda: {default!r}"
            raise ConfigurationError(
                f"{cls.__qualname__}.{attribute.name}: all instances would share the default {default!r}; "
                f"use {attribute.name} = attrs.field(factory={factory})"
            )


def _define(cls: type[T], tag: str | None, frozen: bool, local_names: Mapping[str, Any]) -> type[T]:
    for mark, decorator in _DECORATORS.items():
        if mark in cls.__dict__:
            raise ConfigurationError(f"{cls.__qualname__}: @message makes the whole class, so leave out {decorator}")
    for base in cls.__mro__:
        if base in _VALUES:
            raise ConfigurationError(
                f"{cls.__qualname__} derives from {base.__name__}, wanted a plain class with annotated fields"
            )
    if "__init__" in cls.__dict__:
        raise ConfigurationError(
            f"{cls.__qualname__} has an __init__ of its own, but a message is built from its fields: use __attrs_post_init__"
        )
    if tag is None:
        tag = f"{_module_name(cls.__module__)}:{cls.__qualname__}"
    if not 1 <= len(tag.encode()) <= 255:
        raise ConfigurationError(
            f"tag {tag[:40]!r} of {cls.__qualname__} has {len(tag.encode())} bytes, wanted 1 to 255"
        )
    taken = BY_TAG.get(tag)
    if _is_in_use(taken) and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigurationError(
            f"tag {tag!r} is taken by {taken.__module__}.{taken.__qualname__}; {cls.__module__}.{cls.__qualname__} needs another: @message('…')"
        )
    defined = define_fields(cls, slots=True, frozen=frozen)
    defined.__message_tag__ = tag
    # A class inside a function or class may refer to its neighbours there. Keep the names that annotations mention, not the frame.
    if "." in cls.__qualname__:
        words = set(re.findall(r"\w+", " ".join(str(a.type) for a in attrs.fields(defined))))
        defined.__message_names__ = {name: value for name, value in local_names.items() if name in words}
    BY_TAG[tag] = defined
    return defined  # type: ignore[no-any-return]


def _is_in_use(cls: type | None) -> TypeGuard[type]:
    # A module that is imported again, because its file has changed, may have passed its class on to another module.
    return cls is not None and cls.__module__ in sys.modules


def _module_name(module: str) -> str:
    # A script, also when multiprocessing loads it again, gets its import name, so that tags agree between processes.
    if module not in {"__main__", "__mp_main__"}:
        return module
    main = sys.modules[module]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return PurePath(file).stem if file else module


def _own_fields(cls: type) -> set[str]:
    return {attribute.name for attribute in attrs.fields(cls) if not attribute.inherited}


def _resolve(annotation: Any, owner: type, name: str) -> Any:
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    names = {**owner.__dict__.get("__message_names__", {}), owner.__name__: owner}
    module = sys.modules.get(owner.__module__)
    try:
        return get_type_hints(holder, vars(module) if module else {}, names, include_extras=True)[name]
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        what = f"{owner.__qualname__}.{name}: cannot resolve the annotation {annotation!r}: {error}"
        raise ConfigurationError(what) from error


def _reply(cls: type) -> Any:
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = get_origin(base) or base
        if origin is Asks:
            return _resolve(get_args(base)[0], cls, "reply") if get_args(base) else Any
        if isinstance(origin, type) and issubclass(origin, Asks):
            reply = _reply(origin)
            given: dict[Any, Any] = dict(zip(getattr(origin, "__parameters__", ()), get_args(base), strict=False))
            if isinstance(reply, TypeVar):
                return given.get(reply, reply)
            wanted = getattr(reply, "__parameters__", ())
            return reply[tuple(given.get(parameter, parameter) for parameter in wanted)] if wanted else reply
    return Any
