"""Each program on a page, followed by a block with what it prints (perhaps after "It prints…"), prints just that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIR = re.compile(
    r"```python\n(?P<program>(?:(?!```).)*)```\n\n(?P<text>It prints[^\n]*\n\n)?```\n(?P<output>.*?)```", re.DOTALL
)


def programs() -> list[tuple[str, str, str]]:
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, pair in enumerate(PAIR.finditer(page.read_text("utf-8")), 1):
            if not pair["text"] or ".run(main" in pair["program"]:  # with a text between, it may be a part of a program
                found.append((f"{page.relative_to(ROOT)}:{number}", pair["program"], pair["output"]))
    return found


PROGRAMS = programs()


def test_the_readme_has_programs() -> None:
    assert [name for name, _, _ in PROGRAMS if name.startswith("README.md")] == [
        "README.md:1",
        "README.md:2",
        "README.md:3",
        "README.md:4",
    ]


@pytest.mark.ci
@pytest.mark.parametrize(("program", "output"), [pair[1:] for pair in PROGRAMS], ids=[pair[0] for pair in PROGRAMS])
def test_a_program_prints_what_its_page_says(program: str, output: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(program, "utf-8")
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.stdout, done.returncode) == (output, 0), done.stderr
