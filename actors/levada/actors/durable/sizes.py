"""The approximate size of a command, which a shard counts while the command is under way."""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Any

import attrs

from levada.framework import Codec
from levada.framework.errors import LevadaError

__all__ = ["bytes_of"]

_PLAIN = frozenset({bool, float, int, NoneType})


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(cls))


def bytes_of(message: Any, codec: Codec) -> int:
    """Return the approximate size of a message in bytes: the length of its texts and bytes, and the encoded size of other fields."""
    octets = 0
    cls: type = type(message)
    for name in _names(cls):
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
