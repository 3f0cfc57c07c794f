"""Types of arguments for argparse: numbers within a range. Their errors name the range."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

__all__ = ["port", "positive", "real", "seconds", "whole"]


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a type of whole numbers from `least` to `most`; without `most` they have no upper limit."""
    expected = f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"

    def read(text: str) -> int:
        """Read a whole number."""
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return number

    return read


def real(unit: str, least: float | None = None, most: float = math.inf) -> Callable[[str], float]:
    """Return a type of finite numbers from `least` to `most`, an infinite one for no limit; without `least` they are above 0.

    Args:
        unit: in the plural, for the error.
        least: the smallest number.
        most: the largest number.
    """
    expected = f"more than 0 {unit}" if least is None else f"{least:g} to {most:g} {unit}"
    if least is not None and math.isinf(most):
        expected = f"{least:g} {unit} or more"

    def read(text: str) -> float:
        """Read a number."""
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (number > 0 if least is None else least <= number) or not number <= most or math.isinf(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return number

    return read


positive = whole(1)
"""Reads a whole number above 0."""
port = whole(0, 65_535)
"""Reads the number of a port."""
seconds = real("seconds")
"""Reads a duration above 0."""
