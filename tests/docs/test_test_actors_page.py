"""What ``docs/how-to/test-actors.md`` shows of virtual time runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio.testing

pytest.importorskip("pyarrow")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "test-actors.md"


async def test_the_lot_of_the_page_closes_after_a_week(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    section = PAGE.read_text("utf-8").partition("## Virtual time")[2].partition("\n## ")[0]
    code = section.partition("```python\n")[2].partition("```")[0]
    module: dict[str, Any] = {"__name__": "test_lots"}
    exec(compile(code, str(PAGE), "exec"), module)
    await module["test_a_lot_closes_after_a_week"](autojump_clock, tmp_path)
    assert trio.current_time() == pytest.approx(8 * 86_400.0, abs=1.0)
