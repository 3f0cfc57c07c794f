"""Numbers on the command line: a wrong one is refused with the range that was expected."""

from __future__ import annotations

import argparse

import pytest

from levada.actors import cli
from levada.actors.cli.arguments import port, positive, real, seconds, whole


def test_numbers_within_their_range() -> None:
    assert [positive("1"), port("0"), port("65535"), whole(0)("0")] == [1, 0, 65_535, 0]
    assert [seconds("0.5"), seconds("1e3"), real("seconds", 0.1, 300)("0.1")] == [0.5, 1000.0, 0.1]


@pytest.mark.parametrize("text", ["", "x", "1.5", "0", "-1"])
def test_not_a_positive_whole_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number, 1 or more, got"):
        positive(text)


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "0", "-1"])
def test_not_a_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected more than 0 seconds, got"):
        seconds(text)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["demo", "--rate", "fast"], "--rate: expected more than 0 lines a second, got 'fast'"),
        (["demo", "--lines", "all"], "--lines: expected a whole number, 1 or more, got 'all'"),
        (["demo", "--ports", "99999"], "--ports: expected a whole number from 0 to 65535, got '99999'"),
        (["call", "maop://host:1", "--id", "0"], "--id: expected a whole number from 1 to 65535, got '0'"),
        (["call", "maop://host:1", "--timeout", "soon"], "--timeout: expected more than 0 seconds, got 'soon'"),
        (["journal", "show", "DIR", "--start", "-1"], "--start: expected a whole number, 0 or more, got '-1'"),
        (["journal", "trim", "LOG", "--keep", "-1"], "--keep: expected 0 days or more, got '-1'"),
        (["top", "--interval", "0"], "--interval: expected 0.1 to 300 seconds, got '0'"),
        (["interop", "maop", "--port", "http"], "--port: expected a whole number from 0 to 65535, got 'http'"),
        (
            ["receive", "--listen", ":5044"],
            "levada receive: error: unrecognized arguments: --listen; `levada receive --help` lists",
        ),
        (
            ["journal", "ls", "DIR", "--all"],
            "levada journal ls: error: unrecognized arguments: --all; `levada journal ls --help` lists",
        ),
        (["call", "maop://host:1", "--date", "x"], "error: unrecognized arguments: --date x; is it --data?\n"),
        (["serve", "desk:app", "--nods=2"], "error: unrecognized arguments: --nods=2; is it --nodes?\n"),
        (["demo", "--out", "x"], "error: unrecognized arguments: --out x; `levada demo --help` lists the options\n"),
        (["serve", "desk:app", "--help-me"], "error: unrecognized arguments: --help-me; is it --help?\n"),
        (["top", "PATH", "-x"], "levada top: error: unrecognized arguments: -x\n"),
        (["servr"], "'completion', 'help'); is it 'serve'?\n"),
        (["journal", "lis", "DIR"], "'export'); is it 'ls'?\n"),
        (["top", "--sort", "queues"], "'restarts'); is it 'queue'?\n"),
    ],
)
def test_the_error_names_the_option(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err
