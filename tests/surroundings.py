"""Surroundings for systems of tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from levada.framework.platform import PLATFORM
from levada.framework.testing.clock import counted_time

__all__ = ["measure_by", "surrounded"]


def measure_by(clock: Callable[[], float]) -> None:
    """Have the systems that this task makes from now on measure their work by `clock`."""
    PLATFORM.set(counted_time(random.Random(0), clock))


@contextmanager
def surrounded(**changes: Any) -> Iterator[None]:
    """Change fields of the `Platform` of what is made in the block."""
    token = PLATFORM.set(attrs.evolve(PLATFORM.get(), **changes))
    try:
        yield
    finally:
        PLATFORM.reset(token)
