"""Surroundings for systems of tests."""

from __future__ import annotations

import random
from collections.abc import Callable

from levada.framework.platform import PLATFORM
from levada.framework.testing.clock import counted_time

__all__ = ["measure_by"]


def measure_by(clock: Callable[[], float]) -> None:
    """Have the systems that this task makes from now on measure their work by `clock`."""
    PLATFORM.set(counted_time(random.Random(0), clock))
