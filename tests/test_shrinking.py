"""A failure that hypothesis finds is told, also if it is slow to be shrunk: the limit of a test does not come first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine
from tests.pace import PATIENCE


def test_shrinking_ends_long_before_the_limit_of_a_test(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) * PATIENCE / 4 >= engine.MAX_SHRINKING_SECONDS


def test_a_failure_whose_time_for_shrinking_is_over_is_told_as_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_SHRINKING_SECONDS", 0)

    @settings(database=None, print_blob=False, report_multiple_bugs=False)
    @given(st.integers())
    def fails(number: int) -> None:
        if number > 12_345:
            raise ArithmeticError(number)

    with pytest.raises(ArithmeticError) as error:
        fails()
    assert error.value.args[0] > 12_346
