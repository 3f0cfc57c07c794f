"""The programs of "Read a journal without Spark" print what the page says, each with a library."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "read-a-journal.md"
PROGRAMS: list[tuple[str, str]] = re.findall(
    r"```python\n(.*?)```\n\nIt prints\n\n```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
)
FIRST, *READERS = PROGRAMS


def printed(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first program has written its file."""
    pytest.importorskip("levada.actors.journal", exc_type=ImportError)
    path = tmp_path_factory.mktemp("page")
    assert printed(FIRST[0], path) == FIRST[1]
    return path


@pytest.mark.parametrize(("library", "program"), list(zip(["pandas", "polars", "duckdb"], READERS, strict=True)))
def test_a_library_reads_the_file(library: str, program: tuple[str, str], folder: Path) -> None:
    pytest.importorskip(library)
    assert printed(program[0], folder) == program[1]
