"""``levada bench rsocket``: its structure only; no time that is measured here decides anything."""

from __future__ import annotations

import json

import pytest

from levada.actors import cli


@pytest.mark.ci
@pytest.mark.loopback
def test_the_first_row_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "rsocket", "--quick", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["key"], row["budgets"]) == ("rr1", {"echo": 0.66, "rsocket": 2.0})
    assert all(figure > 0 for figures in row["figures"].values() for figure in figures)
    assert {"levada", "echo"} <= set(row["figures"])
