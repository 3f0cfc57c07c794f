"""The runtime's tests pass with the oldest versions that pyproject.toml allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("pytest", "pytest-trio", "pytest-timeout", "hypothesis")


def oldest() -> list[str]:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    floors = [re.fullmatch(r"(\w+)>=([\d.]+)", dependency) for dependency in dependencies]
    return [f"{floor[1]}=={floor[2]}.*" for floor in floors if floor is not None]


def test_each_dependency_has_a_floor() -> None:
    assert sorted(pin.split("==")[0] for pin in oldest()) == ["attrs", "msgpack", "trio"]


@pytest.mark.timeout(900)
@pytest.mark.ci  # it makes an environment of its own
def test_the_runtime_on_the_oldest_versions(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([str(python), "-m", "pip", "install", *quiet, *oldest(), *TOOLS], check=True)
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/framework"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("framework", "transports", "actors")),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
