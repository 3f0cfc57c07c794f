"""Answers wait for the disk while later commands change the state, so an answer is copied when its handler returns."""

from __future__ import annotations

from copy import copy
from types import NoneType
from typing import Any, Final

import attrs

__all__ = ["IMMUTABLE", "copy_of"]

IMMUTABLE: Final = frozenset({NoneType, bool, bytes, float, int, str})
"""The types of most answers."""


def copy_of(value: Any) -> Any:
    """Return what a value is now: copies of lists, dicts, sets and messages, and everything else itself, such as refs and channel handles."""
    try:
        hash(value)
    except TypeError:
        pass
    else:
        return value  # it cannot change, or it is not its content that counts
    if type(value) is tuple:
        return tuple(map(copy_of, value))
    if isinstance(value, list):
        found: Any = copy(value)
        if not IMMUTABLE.issuperset(map(type, value)):
            found[:] = map(copy_of, value)
    elif isinstance(value, dict):
        found = copy(value)
        if not IMMUTABLE.issuperset(map(type, value.values())):
            found.update((key, copy_of(item)) for key, item in value.items())
    elif isinstance(value, set | bytearray):
        found = copy(value)
    elif attrs.has(type(value)):
        found = copy(value)
        for field in attrs.fields(type(value)):
            item = getattr(value, field.name, None)
            if type(item) not in IMMUTABLE:
                object.__setattr__(found, field.name, copy_of(item))  # the class may be frozen
    else:
        found = value
    return found
