"""The page about the demo shows what the demo prints."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "demo.md"
TEXT = PAGE.read_text("utf-8")
(SHARES,) = re.findall(r"the first node read 52 %:\n\n```\n(.*?)```", TEXT, re.DOTALL)
(COMMANDS,) = re.findall(r"commands for what comes next:\n\n```\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.ci
def test_the_shares_and_the_commands_are_printed_so() -> None:
    """The command that the page names has the ports and the folder."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("levada.actors.spark", exc_type=ImportError)
    from levada.actors.cli import demo
    from levada.actors.demo.pipeline import Pipeline

    ports = re.search(r"^levada demo --serve --ports (\d+) (\d+) (\d+) --keep (\S+)$", TEXT, re.MULTILINE)
    assert ports is not None
    run = Pipeline(
        read=Counter(n0=52, n1=48),
        scored=Counter(n0=50, n1=50),
        reader_urls=[f"lumberjack+tls://127.0.0.1:{ports[1]}"],
        door_url=f"rsocket+tcp://127.0.0.1:{ports[2]}",
        channels_url=f"aqueduct://127.0.0.1:{ports[3]}",
        ca=Path(ports[4], "run", "tls", "ca.pem"),
    )
    _, *summary = demo._summary(run, 1.0)
    assert "\n".join(summary[:2]) + "\n" == SHARES
    assert f"{demo._invitation(run)}\n" == COMMANDS
