"""The tutorial's snippets are parts of programs in examples/, and these print what the tutorial says."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from levada.framework import ActorSystem, channel
from levada.framework.errors import ChannelCancelled

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tutorial" / "index.md").read_text("utf-8")
BLOCKS = re.findall(r"(?:<!-- (output of )?(\S+) -->\n)?```(python|text)\n(.*?)```", TEXT, re.DOTALL)
SNIPPETS = [(path, code) for _, path, language, code in BLOCKS if language == "python"]
OUTPUTS = [(path, code) for _, path, language, code in BLOCKS if language == "text"]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "PYTHONIOENCODING": "utf-8",
}


@pytest.mark.parametrize(("path", "code"), SNIPPETS)
def test_a_snippet_is_part_of_its_program(path: str, code: str) -> None:
    assert path, f"no file is named above this snippet:\n{code}"
    assert code in (ROOT / path).read_text("utf-8")


def test_every_step_shows_its_output() -> None:
    steps = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "examples" / "tutorial").glob("step*.py"))]
    assert [path for path, _ in OUTPUTS] == steps


@pytest.mark.ci
@pytest.mark.parametrize(("path", "output"), OUTPUTS)
def test_a_program_prints_what_the_tutorial_says(path: str, output: str) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, encoding="utf-8", check=False, timeout=250)
    assert (done.stdout, done.stderr, done.returncode) == (output, "", 0)


async def test_a_follower_of_a_station_that_crashes_gets_an_error_that_says_so() -> None:
    step = importlib.import_module("examples.tutorial.step4_channels")
    async with ActorSystem() as system:
        station = system.spawn(step.Station, {})
        sender, receiver = channel(step.Reading)
        station.tell(step.Follow(sender))
        station.tell(step.Mean())  # of no readings
        with pytest.raises(ChannelCancelled) as caught:
            async for _ in receiver:
                pass
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.ci
def test_the_tests_of_the_fifth_step_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/tutorial"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, encoding="utf-8", check=False, timeout=250
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
