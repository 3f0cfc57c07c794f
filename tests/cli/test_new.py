"""``levada new``: what it makes works as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from levada.actors import cli


def test_a_new_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "tally"]) == 0
    assert sorted(file.name for file in (tmp_path / "tally").iterdir()) == [
        "Containerfile",
        "pyproject.toml",
        "tally.py",
        "test_tally.py",
    ]
    commands = "levada new tally\n" + capsys.readouterr().out
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert f"```\n{commands}```\n" in readme
    assert cli.main(["new", "tally"]) == 2
    assert capsys.readouterr().err == "levada: cannot make the folder tally: File exists\n"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Tally", "lower-case letters"),
        ("../tally", "lower-case letters"),
        ("class", "lower-case letters"),
        ("trio", "would hide it"),
        ("json", "would hide it"),
    ],
)
def test_names_that_cannot_be_used(
    name: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", name]) == 2
    assert error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_the_new_project_passes_its_own_test_and_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "tally"]) == 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", *filter(None, sys.path)])}
    for command in (
        ["pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
        ["ruff", "check", "--isolated", "--select", "E,F,I,UP,B", "--line-length", "120", "."],
        ["ruff", "format", "--isolated", "--line-length", "120", "--check", "."],
        ["mypy", "--strict", "--explicit-package-bases", "tally.py"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path / "tally",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
