"""What the page about deployment shows is what the command line takes."""

from __future__ import annotations

import configparser
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from levada.actors import cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/deploy.md").read_text("utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def commands() -> list[list[str]]:
    unit = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names of settings have capitals
    unit.read_string(block("ini"))
    entry = re.search(r"^ENTRYPOINT (.*)$", block("dockerfile"), re.MULTILINE)
    assert entry is not None
    assert unit["Service"]["KillMode"] == "mixed"
    return [shlex.split(unit["Service"]["ExecStart"]), json.loads(entry[1])]


@pytest.mark.parametrize("command", commands(), ids=["systemd", "container"])
def test_the_command_of_the_page_is_understood(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The app is not there; an option that is not there would be said first."""
    program, *arguments = command
    assert program.rsplit("/", 1)[-1] == "levada"
    arguments[1] = "no_such_desk:app"
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert "no_such_desk" in said
    assert "usage" not in said


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("project", "served"),
    [
        ("new", ["HEALTH http://0.0.0.0", "SERVING lumberjack://0.0.0.0", "SERVING rsocket+tcp://0.0.0.0"]),
        ("new --durable", ["HEALTH http://0.0.0.0", "SERVING rsocket+tcp://0.0.0.0"]),
        ("auction", ["HEALTH http://0.0.0.0", "SERVING aqueduct+tcp://127.0.0.1", "SERVING rsocket+tcp://0.0.0.0"]),
    ],
)
def test_what_a_container_starts_serves(
    project: str, served: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command, with its variables, in an empty folder. The ports are free ones."""
    if project == "auction":
        app = Path(shutil.copytree(ROOT / "examples/auction", tmp_path / "auction"))
    else:
        monkeypatch.chdir(tmp_path)
        assert cli.main(["new", "tally", *project.split()[1:]]) == 0
        app = tmp_path / "tally"
    file = re.sub(r":\d{4}\b", ":0", (app / "Containerfile").read_text("utf-8"))
    for module in app.glob("*.py"):
        module.write_text(re.sub(r":\d{4}\b", ":0", module.read_text("utf-8")), "utf-8")
    variables = dict(
        pair.split("=", 1) for line in re.findall(r"^ENV (.*)$", file, re.MULTILINE) for pair in line.split()
    )
    program, *arguments = json.loads(re.findall(r"^CMD (\[.*\])$", file, re.MULTILINE)[0])
    assert program == "levada"
    paths = os.pathsep.join([str(app), *filter(None, sys.path)])
    data = tmp_path / "data"
    data.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "levada.actors", *arguments],
        cwd=data,
        env=os.environ | variables | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            said = [line.rpartition(":")[0] for line in itertools.islice(process.stdout, len(served))]
        finally:
            process.terminate()
        assert process.wait(60) == 0
    assert said == served
