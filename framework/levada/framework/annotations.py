"""What the annotation of a message's field says, level by level: the walk of all that compile annotations.

The codec and the columns of a journal both go this way, so a new form of annotation is recognized here and compiled there. Types of their own
encoding, such as `int` and `datetime`, are in the tables of those that encode them.
"""

from __future__ import annotations

import types
from collections import abc
from enum import Enum, auto
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin

import attrs

from ._wire import Misfit, kind_of
from .message import Asks, is_message

__all__ = ["CONTAINERS", "Form", "Misfit", "Part", "expand", "is_value", "part_of", "type_name"]

CONTAINERS: dict[Any, tuple[Any, Any]] = {
    list: ((list,), list),
    abc.Sequence: ((list, tuple), list),
    tuple: ((tuple,), tuple),
    set: ((set,), set),
    frozenset: ((frozenset,), frozenset),
    abc.Set: ((frozenset, set), frozenset),
}
"""What each container of `Form.ITEMS` takes, and the class of what decoding makes of it."""


class Form(Enum):
    """The forms of an annotation; each says what `Part.arguments` are."""

    ANY = auto()
    """``Any`` or ``object``."""
    VARIABLE = auto()
    """A type variable: its bound, or ``Any``."""
    LITERAL = auto()
    """One of some constants: these."""
    UNION = auto()
    """One of some annotations: these."""
    ITEMS = auto()
    """A container of `CONTAINERS`: the annotation of its items."""
    TUPLE = auto()
    """A tuple of fixed length: the annotations of its items."""
    MAPPING = auto()
    """A dict: the annotations of key and item."""
    ENUM = auto()
    """A class of constants or flags."""
    MESSAGE = auto()
    """A message class, or a base of questions."""
    HANDLE = auto()
    """An `Attachable`: the annotation of what it carries."""
    OTHER = auto()
    """Any other class, or what no message may hold."""


@attrs.frozen(eq=False)
class Part:
    """One level of an annotation."""

    form: Form
    annotation: Any
    """The annotation, expanded."""
    origin: Any
    """Its class, or the typing form."""
    arguments: tuple[Any, ...]
    """As its form says; not expanded."""


def part_of(annotation: Any) -> Part:
    """Read one level of an annotation.

    Example:
        >>> part = part_of(list[int])
        >>> part.form.name, part.origin, part.arguments
        ('ITEMS', <class 'list'>, (<class 'int'>,))
    """
    annotation = expand(annotation)
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    form = Form.OTHER
    if annotation is Any or annotation is object:
        form = Form.ANY
    elif isinstance(annotation, TypeVar):
        form, arguments = Form.VARIABLE, (annotation.__bound__ or Any,)
    elif origin is Literal:
        form = Form.LITERAL
    elif origin is Union or origin is types.UnionType:
        form = Form.UNION
    elif origin is tuple and arguments and arguments[1:] != (...,):
        form = Form.TUPLE
    elif origin in CONTAINERS:
        form, arguments = Form.ITEMS, arguments[:1] or (Any,)
    elif origin is dict or origin is abc.Mapping:
        form, arguments = Form.MAPPING, arguments or (Any, Any)
    elif isinstance(origin, type):
        if issubclass(origin, Enum):
            form = Form.ENUM
        elif is_message(origin) or issubclass(origin, Asks):
            form = Form.MESSAGE
        elif kind_of(origin) is not None:
            form, arguments = Form.HANDLE, arguments[:1] or (Any,)
    return Part(form, annotation, origin, arguments)


def expand(annotation: Any) -> Any:
    """See through the names that typing gives to other annotations: ``Annotated``, ``NewType``, ``type X = …``."""
    if get_origin(annotation) is Annotated:
        return expand(annotation.__origin__)
    if isinstance(annotation, NewType):
        return expand(annotation.__supertype__)
    if type(annotation).__name__ == "TypeAliasType":  # `type X = …`, Python 3.12 and later
        return expand(annotation.__value__)
    return annotation


def is_value(annotation: Any) -> bool:
    """Whether this is a value, which was given in place of an annotation. What only typing knows is not."""
    plain = expand(annotation)
    return isinstance(plain, str | int | float | bytes | list | tuple | dict) or attrs.has(type(plain))


def type_name(annotation: Any) -> str:
    """Return an annotation as its author wrote it, without modules: the same in a script and in the module that it is to others.

    Example:
        >>> type_name(dict[str, int] | None)
        'None | dict[str, int]'
    """
    if annotation is None or annotation is types.NoneType:
        return "None"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is Union or origin is types.UnionType:
        return " | ".join(sorted(map(type_name, arguments)))
    if arguments:
        return f"{type_name(origin)}[{', '.join(map(type_name, arguments))}]"
    return str(getattr(annotation, "__name__", annotation))
