"""The walk of a message through levada gets no longer, and the page that describes it is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.walk import LIMITS, WALKS, Step, measure

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "how-a-message-travels.md"
DESCRIBED = ("tell", "rsocket", "aqueduct-sender", "durable", "spark")


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.parametrize("key", WALKS)
def test_a_message_walks_no_further_than_its_limit_and_as_its_page_says(key: str) -> None:
    if key in ("durable", "lumberjack", "spark"):
        pytest.importorskip("pyarrow")
    counter = measure(key)
    if key in LIMITS:
        calls, files = counter.walk
        most_calls, most_files = LIMITS[key]
        assert calls <= most_calls
        assert files <= most_files
    if key in DESCRIBED:
        rest = iter(counter.calls)
        missing = [step for step in steps(key) if step not in rest]  # in this order: `in` takes steps from the iterator
        assert missing == []


def test_the_page_describes_five_walks() -> None:
    assert tuple(re.findall(r"^## (\S+)$", PAGE.read_text("utf-8"), re.MULTILINE)) == DESCRIBED
    assert all(len(steps(key)) >= 3 for key in DESCRIBED)


def steps(key: str) -> list[Step]:
    """The steps of a walk on the page."""
    section = PAGE.read_text("utf-8").partition(f"\n## {key}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `(\S+)` `(\S+)`:", section, re.MULTILINE)
