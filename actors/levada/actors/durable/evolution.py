"""Evolution: how old rows become events of the current classes.

A class of events may get new fields with defaults at its end. If the meaning of its fields changes, it sets ``event_version: ClassVar[int] = 2``,
and a function marked with `upcasts` converts the columns of an old row to the next version, or makes an event of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from levada.framework.errors import ConfigurationError

__all__ = ["Upcaster", "upcasters_of", "upcasts"]

Upcaster = Callable[[Mapping[str, Any]], Any]
_MARK = "__levada_upcasts__"
F = TypeVar("F")


def upcasts(kind: str, *, version: int) -> Callable[[F], F]:
    """Mark a static method of a durable class that turns an old row into the next version of its event.

    It gets the row's columns by name, with Arrow's values (an enum is its value, a message is a dict); columns of other events are null.
    It returns a mapping of the columns of version ``version + 1``, or an event. A missing column is None,
    or the field's default if the field may not be None.
    A value that does not fit its column, or a name that is neither a field nor a column of the row, is a `ReplayFailed`.

    Args:
        kind: the wire name of the event.
        version: the version of the rows that it converts.

    Raises:
        ConfigurationError: `kind` is not text, or `version` is not 1 or more.

    Example:
        ``@staticmethod`` below ``@upcasts("account.deposited", version=1)``: ``def in_cents(row): return {"cents": round(row["amount"] * 100)}``
    """
    if not isinstance(kind, str) or not isinstance(version, int) or version < 1:
        raise ConfigurationError(f"upcasts got {kind!r} and {version!r}, wanted a wire name and a version of 1 or more")

    def mark(function: F) -> F:
        setattr(getattr(function, "__func__", function), _MARK, (kind, version))
        return function

    return mark


def upcasters_of(cls: type) -> dict[tuple[str, int], Upcaster]:
    """Collect the marked functions of a class body."""
    found: dict[tuple[str, int], Upcaster] = {}
    for name, member in list(vars(cls).items()):
        function = getattr(member, "__func__", member)
        key = getattr(function, _MARK, None)
        if key is None:
            continue
        if not isinstance(member, staticmethod):
            raise ConfigurationError(
                f"{cls.__name__}.{name} upcasts a row: make it a @staticmethod, because there is no entity yet"
            )
        if key in found:
            raise ConfigurationError(
                f"{cls.__name__}.{name}: another method upcasts {key[0]!r} of version {key[1]} too"
            )
        found[key] = function
    return found
