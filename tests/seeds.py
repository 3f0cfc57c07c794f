"""Seeds of simulations: a few for the profile ci, more for release."""

from __future__ import annotations

import pytest

__all__ = ["seeds"]


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize `seed`: the first `few` run where the test runs, the rest up to `many` in the profile release."""
    rest = [pytest.param(seed, marks=pytest.mark.release) for seed in range(few + 1, many + 1)]
    return pytest.mark.parametrize("seed", [*range(1, few + 1), *rest])
