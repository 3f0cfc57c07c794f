"""``levada demo``: what it prints, and that it notices when something is wrong."""

from __future__ import annotations

import json
from datetime import date

import attrs
import pytest

from levada.actors import cli
from levada.actors.cli import demo
from levada.actors.demo import KNOWN, Summary, log_lines, mistakes, summarise


async def test_the_result_is_what_is_known_about_the_log() -> None:
    seen: list[int] = []
    assert await summarise(log_lines(), seen.append) == KNOWN
    assert seen == list(range(500, 10_001, 500))


async def test_damage_is_reported_and_nothing_is_lost() -> None:
    good = '1.2.3.4 - - [01/Jan/2020:00:00:00 +0000] "GET / HTTP/1.1" 404 - "-" "a \\"quoted\\" agent"'
    summary = await summarise([good, "nonsense", good.replace("404", "4o4"), good[:-1], good])
    assert summary == Summary(
        5,
        {"404": 2},
        {date(2020, 1, 1): 4},
        {
            2: "does not begin as a line of an access log",
            3: "not in the format",
            4: "not in the format",
        },
    )
    assert await summarise([]) == Summary(0, {}, {}, {})


def test_a_difference_is_named() -> None:
    assert mistakes(KNOWN) == []
    assert mistakes(attrs.evolve(KNOWN, lines=9_999)) == ["lines: wanted 10000, got 9999"]


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("10,000 lines of a web server's access log, parsed and counted by actors in ")
    assert lines[3].split()[:2] == ["200", "9,125"]
    assert "Wed 2015-05-20   2,579" in out
    assert lines[-2:] == [
        "damaged, and reported: line 8,899, 5 quotation marks, wanted 6",
        "verified: all counts are those that are known for this log",
    ]


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verified"] is True
    assert sum(result["statuses"].values()) + len(result["damaged"]) == result["lines"] == 10_000
    assert sum(result["days"].values()) == 10_000


def test_a_wrong_count_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "log_lines", lambda: list(log_lines())[:9_000])
    assert cli.main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert "verified" not in out
    assert err.startswith("levada: lines: wanted 10000, got 9000\nlevada: statuses: wanted {")


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(done: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_tell_progress", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")
