"""Numbers of seconds, as settings and arguments give them."""

from __future__ import annotations

from numbers import Real
from typing import Any

__all__ = ["is_duration"]


def is_duration(value: object, *, zero: bool = False) -> bool:
    """Whether a value is a number of seconds more than 0, or, with `zero`, 0 or more. Text, None and NaN are not; infinity is.

    Example:
        >>> [is_duration(value) for value in (0.5, 3, 0, -1.0, float("nan"), "5", None)]
        [True, True, False, False, False, False, False]
    """
    # The first two are for speed: a question with a time-out asks this.
    if type(value) is float or type(value) is int or isinstance(value, Real):
        number: Any = value
        return bool(number >= 0 if zero else number > 0)
    return False
