"""What the page about deployment shows is what the command line takes."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

from levada.actors import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/deploy.md").read_text("utf-8")


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
