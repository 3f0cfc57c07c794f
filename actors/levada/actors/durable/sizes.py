"""The approximate size of a command, which a shard counts while the command is under way."""

from __future__ import annotations

from functools import cache
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
def _sized_of(cls: type) -> tuple[str, ...]:
    """Return the names of a message's fields, except of those that are numbers by their annotation."""
    try:
        return tuple(name for name, annotation in field_types(cls).items() if annotation not in _NUMBERS)
    except ConfigurationError:  # the class cannot travel, and may be handled here all the same
        return tuple(field.name for field in attrs.fields(cls))


def bytes_of(message: Any, codec: Codec) -> int:
    """Return the approximate size of a message in bytes: the length of its texts and bytes, and the encoded size of other fields."""
    octets = 0
    cls: type = type(message)
    for name in _sized_of(cls):
        value = getattr(message, name)
        kind = type(value)
        if kind is str or kind is bytes:
            octets += len(value)
        elif kind not in _PLAIN:
            try:
                octets += len(codec.encode(value))
            except (TypeError, ValueError, LevadaError):
                pass  # a handle, or a value that the handler will reject
    return octets
