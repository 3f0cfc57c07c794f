"""The runtime's tests pass with the oldest versions that pyproject.toml allows, and on every Python that is here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ("trio", "attrs", "msgpack")
TOOLS = ("pytest", "pytest-trio", "pytest-timeout", "hypothesis")


def oldest() -> list[str]:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    floors = [re.fullmatch(r"(\w+)>=([\d.]+)", dependency) for dependency in dependencies]
    return [f"{floor[1]}=={floor[2]}.*" for floor in floors if floor is not None]


def test_each_dependency_has_a_floor() -> None:
    assert sorted(pin.split("==")[0] for pin in oldest()) == sorted(CORE)


def python_of(minor: int) -> str | None:
    """Find Python 3.`minor` on the PATH or among those of pyenv; what stands on the PATH may be pyenv's empty shim."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python3.{minor}"), *map(str, pyenv.glob(f"versions/3.{minor}.*/bin/python"))]
    show = "import sys; print(sys.version_info[:2])"
    for python in filter(None, found):
        done = subprocess.run([python, "-c", show], capture_output=True, text=True, check=False)
        if done.stdout.strip() == str((3, minor)):
            return python
    return None


def run_framework_tests(folder: Path, python: str, *packages: str) -> None:
    """Run the tests of the framework in an environment with just these packages and the test tools."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *quiet, *packages, *TOOLS], check=True)
    sources = [str(ROOT / name) for name in ("framework", "transports", "actors")]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/framework"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_runtime_on_the_oldest_versions(tmp_path: Path) -> None:
    run_framework_tests(tmp_path / "venv", sys.executable, *oldest())


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_the_runtime_on_every_python(tmp_path: Path, minor: int) -> None:
    if sys.version_info[:2] == (3, minor):
        pytest.skip("that is the Python of this run")
    python = python_of(minor)
    if python is None:
        pytest.skip(f"there is no Python 3.{minor} on this machine")
    run_framework_tests(tmp_path / "venv", python, *CORE, "-c", str(ROOT / "constraints.txt"))
