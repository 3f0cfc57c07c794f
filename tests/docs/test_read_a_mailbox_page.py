"""The programs of "Read a live mailbox" print what the page says, each in a process beside the one with the mailbox."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


MESSAGES: list[str] = re.findall(r"`([^`]*)`", "".join(re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)))
REFUSED: dict[str, dict[str, Any]] = {
    "address is empty": {"address": ""},
    "the address is 'http://x', wanted": {"address": "http://x"},
    "token_file (as an option: tokenFile) is missing": {"address": "tls://localhost:1"},
    "no mailbox 'reading' here; there are:": {"name": "reading"},
    "columns is 'value', wanted": {"columns": "value"},
    "columns is ['size'], wanted": {"columns": ["size"]},
    "cannot read the token file": {"token_file": "away/bridge.token"},
}
"""The beginnings of messages in the page's table, and the arguments that cause them."""


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


@pytest.mark.parametrize("beginning", REFUSED)
def test_a_message_of_the_table_is_the_real_one(beginning: str, address: str) -> None:
    from levada.actors.spark import read_mailbox

    [message] = [each for each in MESSAGES if each.startswith(beginning)]
    with pytest.raises(Exception, match="^" + re.escape(message).replace("…", ".*")):
        read_mailbox(**({"address": address, "name": "readings"} | REFUSED[beginning]))
