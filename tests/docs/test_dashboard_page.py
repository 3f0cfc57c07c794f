"""The program on the page about the dashboard prints an address as the page shows it."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from levada.framework import ActorSystem

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "dashboard.md"
PAIR = re.search(r"```python\n(.*?)```\n\nIt prints an address:\n\n```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
assert PAIR is not None
PROGRAM, OUTPUT = PAIR.groups()


@pytest.mark.ci
@pytest.mark.loopback
async def test_the_program_prints_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    """Its port is free on this machine, and its token is a secret."""
    pytest.importorskip("levada.actors.dashboard", exc_type=ImportError)
    page: dict[str, Any] = {"ActorSystem": ActorSystem}
    exec(f"async def main():\n{indent(PROGRAM, '    ')}", page)
    await page["main"]()
    shown = re.escape(OUTPUT).replace("38217", r"\d+").replace("…", r"[\w-]+")
    assert re.fullmatch(shown, capsys.readouterr().out)
