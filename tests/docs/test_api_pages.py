"""The reference shows what packages export, and what pages and examples import."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOWN = set(
    re.findall(r"automodule:: (\S+)", "".join(page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.rst")))
)
TOOLS = {"levada.actors.cli", "levada.actors.demo", "levada.actors.explain", "levada.actors.interop"}
"""Commands, not interfaces: the reference of the command line has them."""


def packages() -> set[str]:
    found = set()
    for layer in ("framework", "transports", "actors"):
        for path in (ROOT / layer / "levada").rglob("__init__.py"):
            found.add(".".join(path.parent.relative_to(ROOT / layer).parts))
    return {
        name
        for name in found
        if name.count(".") > 1 and not re.search(r"\._", name) and not any(name.startswith(tool) for tool in TOOLS)
    }


def test_every_package_that_exports_names_has_a_place_in_the_reference() -> None:
    exporting = {name for name in packages() if importlib.import_module(name).__all__}
    assert exporting - SHOWN == set()


def test_what_a_page_or_an_example_imports_is_in_the_reference() -> None:
    """Or is exported by a module that is."""
    shown = {name: set(importlib.import_module(name).__all__) for name in SHOWN}
    everything = set().union(*shown.values())
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    missing = {}
    for page in pages:
        if "changes" in page.parts:
            continue
        for module, names in re.findall(
            r"^from (levada\.[a-z_.]+) import ([\w, ]+)$", page.read_text("utf-8"), re.MULTILINE
        ):
            if any(module.startswith(tool) for tool in TOOLS):
                continue
            absent = {name.split(" as ")[0].strip() for name in names.split(",")} - everything
            absent = {name for name in absent if f"{module}.{name}" not in SHOWN and module.count(".") > 1}
            if absent:
                missing[f"{page.relative_to(ROOT)}: {module}"] = absent
    assert missing == {}


@pytest.mark.ci
def test_a_public_name_without_a_text_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "index.rst").write_text("Pages\n=====\n\n.. toctree::\n\n   api/desk\n")
    (tmp_path / "api" / "desk.rst").write_text("Desk\n====\n\n.. automodule:: desk\n")
    (tmp_path / "desk.py").write_text('__all__ = ["A", "B"]\nA = 1\n"""One."""\nB = 2\n')
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "--no-color",
            "-W",
            "-c",
            str(ROOT / "docs"),
            str(tmp_path),
            str(tmp_path / "out"),
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    missing = re.findall("the reference does not show .*", done.stderr)
    assert (done.returncode, missing) == (1, ["the reference does not show desk.B"]), done.stderr
