"""The approximate size of a command, which a shard counts while the command is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any

import attrs

from levada.framework import Codec
from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.message import field_types

__all__ = ["bytes_of"]

_NUMBERS = (bool, float, int)
_PLAIN = frozenset({*_NUMBERS, NoneType})


@cache
def _sized_of(cls: type) -> Callable[[Any], Iterable[Any]]:
    """Return a function that gives the values of a message's fields, except of those that are numbers by their annotation."""
    try:
        names = [name for name, annotation in field_types(cls).items() if annotation not in _NUMBERS]
    except ConfigurationError:  # the class cannot travel, and may be handled here all the same
        names = [field.name for field in attrs.fields(cls)]
    if len(names) > 1:
        return attrgetter(*names)  # a tuple
    if not names:
        return lambda message: ()
    only = attrgetter(names[0])
    return lambda message: (only(message),)


def bytes_of(message: Any, codec: Codec) -> int:
    """Return the approximate size of a message in bytes: the length of its texts and bytes, and the encoded size of other fields."""
    octets = 0
    for value in _sized_of(type(message))(message):
        kind = type(value)
        if kind is str or kind is bytes:
            octets += len(value)
        elif kind not in _PLAIN:
            try:
                octets += len(codec.encode(value))
            except (TypeError, ValueError, LevadaError):
                pass  # a handle, or a value that the handler will reject
    return octets
