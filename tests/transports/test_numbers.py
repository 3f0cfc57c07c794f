"""Sets of numbers that mostly come in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from levada.transports.numbers import Numbers


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_numbers_are_a_set(steps: list[tuple[bool, int]]) -> None:
    numbers, model = Numbers(), set[int]()
    for add, number in steps:
        if add:
            numbers.add(number)
            model.add(number)
        else:
            numbers.discard(number)
            model.discard(number)
        assert {n for n in range(32) if n in numbers} == model
        assert len(numbers) == sum(n - 1 not in model for n in model)
