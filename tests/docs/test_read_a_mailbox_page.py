"""The programs of "Read a live mailbox" print what the page says, each in a process beside the one with the mailbox."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ci, pytest.mark.loopback]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "read-a-mailbox.md"
TEXT = PAGE.read_text("utf-8")
STATION = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
READERS: list[tuple[str, str]] = re.findall(
    r"```python\n((?:(?!```).)*?)```\n\nIt prints\n\n```\n(.*?)```", TEXT, re.DOTALL
)
LIBRARIES = ["pyarrow", "duckdb", "polars", "pandas", "pyarrow"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the bridge of the program on the page, which runs meanwhile."""
    pytest.importorskip("levada.actors.spark", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("page")
    with subprocess.Popen([sys.executable, "-c", STATION], cwd=folder, stdout=subprocess.PIPE, text=True) as station:
        assert station.stdout is not None
        try:
            yield station.stdout.readline().strip()
        finally:
            station.kill()


@pytest.mark.parametrize(
    ("library", "reader"),
    list(zip(LIBRARIES, READERS, strict=True)),
    ids=["arrow", "duckdb", "polars", "pandas", "only new rows"],
)
def test_a_library_reads_the_running_program(
    library: str, reader: tuple[str, str], address: str, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    program, output = reader
    command = [sys.executable, "-W", "error", "-c", program, address]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == (output, "", 0)
