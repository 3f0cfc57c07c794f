"""Packages as pip would install them, made in a folder: modules from a page of the documentation, and their entry points."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE = re.compile(r"```python\n(?P<text># (?P<name>\w+)\.py\n.*?)```(?:\n\n```text\n(?P<output>.*?)```)?", re.DOTALL)


def modules_of(page: str) -> dict[str, tuple[str, str | None]]:
    """Return the modules on a page, and what it says that each prints."""
    text = (ROOT / "docs" / "how-to" / page).read_text("utf-8")
    return {found["name"]: (found["text"], found["output"]) for found in MODULE.finditer(text)}


def install(folder: Path, name: str, group: str, **entry_points: str) -> None:
    """Write what tells Python that `folder` holds a package with these entry points."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{entry} = {target}" for entry, target in entry_points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that has the package installed."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package installed."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
