"""Members of `enum.Flag` classes for numbers that a peer chose, or that are read from a file.

A class of flags remembers each combination that it makes, and never forgets one: of 20 flags there are a million, and with the boundary
``KEEP``, the default of `enum.IntFlag`, any number is one. 9 MB of a peer's bytes once left 426 MB. So the combinations made here are not
remembered by their class.

A combination of an `IntFlag` is a number, so an equal one is as good. Combinations of a plain `Flag` are equal only if they are the same object.
So such a class gets a memory that keeps a combination for as long as a program has it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from enum import Flag
from typing import Any

__all__ = ["bits_of", "flag_maker"]


_MEMORY = "_value2member_map_"
"""The attribute of an enum class with its members by value; `Flag` puts combinations there, too."""


def bits_of(kind: type[Flag]) -> int:
    """Return the bits that the members of a class have."""
    return functools.reduce(operator.or_, (member.value for member in kind.__members__.values()), 0)


def flag_maker(kind: type[Flag]) -> Callable[[int], Any]:
    """Return a function that makes a member of a class of a number, as a call of the class does, and leaves nothing behind in the class.

    The function raises ValueError for a number that is not valid for the class.
    """
    known: dict[Any, Any] = getattr(kind, _MEMORY)
    if issubclass(kind, int):
        return functools.partial(_make_and_forget, kind, known)
    if not isinstance(known, _Combinations):
        setattr(kind, _MEMORY, _Combinations(known))
    return kind


def _make_and_forget(kind: type[Flag], known: dict[Any, Any], value: int) -> Any:
    member = known.get(value)
    if member is None:
        member = kind(value)
        for key in (value, member):
            known.pop(key, None)
    return member


class _Combinations(dict[Any, Any]):
    """What a class of flags knows: its members and former combinations for good, others while they are in use."""

    def __init__(self, known: dict[Any, Any]) -> None:
        super().__init__(known)
        self._in_use: weakref.WeakValueDictionary[int, Flag] = weakref.WeakValueDictionary()

    def __missing__(self, value: int) -> Flag:
        return self._in_use[value]

    def __setitem__(self, value: int, member: Flag) -> None:
        self._in_use[value] = member

    def setdefault(self, value: int, member: Flag) -> Flag:  # type: ignore[override]  # the caller is `Flag._missing_`
        return self._in_use.setdefault(value, member)
