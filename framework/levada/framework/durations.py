"""Numbers of seconds, as settings and arguments give them."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import Any, Final

__all__ = ["is_duration"]

MOST: Final = sys.float_info.max


def is_duration(value: object, *, zero: bool = False) -> bool:
    """Whether a value is a number of seconds more than 0, or, with `zero`, 0 or more.

    Text, None, NaN and numbers that no `float` can be are not; infinity is.

    Example:
        >>> [is_duration(value) for value in (0.5, 3, 0, -1.0, float("nan"), "5", None, 10**400)]
        [True, True, False, False, False, False, False, False]
    """
    # The first two are for speed: a question with a time-out asks this.
    if type(value) is float or type(value) is int or isinstance(value, Real):
        number: Any = value
        return bool((number >= 0 if zero else number > 0) and (number <= MOST or number == math.inf))
    return False
