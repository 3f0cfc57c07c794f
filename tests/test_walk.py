"""The walk of a message through levada gets no longer."""

from __future__ import annotations

import pytest
from benchmarks.walk import LIMITS, measure


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.parametrize("key", LIMITS)
def test_a_message_walks_no_further_than_its_limit(key: str) -> None:
    calls, files = measure(key)
    most_calls, most_files = LIMITS[key]
    assert calls <= most_calls
    assert files <= most_files
