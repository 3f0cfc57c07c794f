"""What ``docs/how-to/test-actors.md`` shows of virtual time and of simulated worlds runs as it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from levada.framework.testing import fixtures
from levada.framework.testing.simulation import Simulated

pytest.importorskip("pyarrow")

simulated = fixtures.simulated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "test-actors.md"


def code_of(section: str) -> dict[str, Any]:
    """Run the first program of a section, and return its names."""
    text = PAGE.read_text("utf-8").partition(f"## {section}")[2].partition("\n## ")[0]
    module: dict[str, Any] = {"__name__": "test_page"}
    exec(compile(text.partition("```python\n")[2].partition("```")[0], str(PAGE), "exec"), module)
    return module


async def test_the_lot_of_the_page_closes_after_a_week(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    module = code_of("Virtual time")
    await module["test_a_lot_closes_after_a_week"](autojump_clock, tmp_path)
    assert trio.current_time() == pytest.approx(8 * 86_400.0, abs=1.0)


def test_the_answer_of_the_page_comes_after_the_network_is_back(simulated: Callable[..., Simulated]) -> None:
    code_of("Simulated worlds")["test_an_answer_comes_after_the_network_is_back"](simulated)
