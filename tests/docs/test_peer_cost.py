"""The page of what a peer can cost names tests that exist, and says what they assert."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "peer-cost.md"
TEXT = PAGE.read_text("utf-8")
FILES = dict(re.findall(r"^\[(\w+)\]: (\S+)$", TEXT, re.MULTILINE))
ROW = re.compile(
    r"^\|[^|]*\|[^|]*\| (?P<memory>[^|]*) \| (?P<cpu>[^|]*) \|[^|]*\|[^|]*\| \[`(?P<test>[^`]+)`\]\[(?P<file>\w+)\] \|$",
    re.MULTILINE,
)
SILENT = re.compile(r"^\|[^|]*\|[^|]*\|[^|]*\| \[`(?P<test>[^`]+)`\]\[(?P<file>\w+)\] \|$", re.MULTILINE)
CASE = re.compile(r"^    \((?P<test>\w+), .*?(?P<peak>[\d_]+), (?P<cpu>[\d.]+)\),$", re.MULTILINE)


def test_each_row_names_a_test_that_exists() -> None:
    rows = [*((test, file) for _, _, test, file in ROW.findall(TEXT)), *SILENT.findall(TEXT)]
    assert len(rows) == TEXT.count("[`") > 50
    for test, file in rows:
        source = (PAGE.parent / FILES[file]).read_text("utf-8")
        assert f"def {test}(" in source or f'"{test}":' in source, test


def test_the_figures_are_those_of_the_tests() -> None:
    """Of the files whose tests are a table of cases, in which all cases are on the page."""
    for file in ("rs", "ma", "he", "co"):
        source = (PAGE.parent / FILES[file]).read_text("utf-8")
        unit = 1_000 if file == "he" else 1  # that file counts kB
        asserted = {test: (int(peak) // unit, float(cpu)) for test, peak, cpu in CASE.findall(source)}
        said = {
            test: (int(memory.split()[0]), float(cpu))
            for memory, cpu, test, of in ROW.findall(TEXT)
            if of == file and not test.startswith("test_")
        }
        assert said == asserted
