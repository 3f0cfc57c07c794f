"""Scores of requests: what gets points, and that executors get them from the scorers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import trio

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from levada.actors.demo.scoring import points_of, score_by, scorers  # noqa: E402
from levada.framework import ActorSystem  # noqa: E402


def line(path: str) -> str:
    return f'1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET {path} HTTP/1.1" 200 1 "-" "wp-admin"'


@pytest.mark.parametrize(
    ("path", "points"),
    [
        ("/", 0),
        ("/blog/tags/sysadmin", 0),
        ("/wp-login.php?action=register", 5),
        ("/Administrator/index.php", 5),
        ("/scripts//%22file", 2),
        ("/?q=%252527", 2),
        ("/?q=%25", 0),
        ("/node/add/<script>", 7),
        pytest.param(
            "/?q=%" + "25" * 50_000 + "3c", 2, id="escaped very often"
        ),  # unescaped step by step, it would take seconds
    ],
)
def test_points_of_a_request(path: str, points: int) -> None:
    assert points_of(line(path)) == points


@pytest.mark.parametrize("text", ["", "no request", line(""), '"GET /wp-admin', '1.2.3.4 - - [x] "G'])
def test_a_line_that_is_none_of_an_access_log_has_few_points_and_no_error(text: str) -> None:
    assert points_of(text) in (0, 5)


async def test_a_scorer_in_this_process_answers_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each column of lines gets as many points, in order, also if the folder is given by a relative path; the lines are counted."""
    monkeypatch.chdir(tmp_path)
    scored = Counter[str]()
    columns = [pa.array([line("/"), line("/wp-admin/")]), pa.array([line("/%3E")]), pa.array([], pa.string())]
    async with (
        ActorSystem("demo") as system,
        scorers(system, Path("asks"), scored, on_nodes=False) as scorer,
    ):
        found = await trio.to_thread.run_sync(lambda: [each.to_pylist() for each in score_by(scorer)(iter(columns))])
    assert found == [[0, 5], [2], []]
    assert scored == {"demo": 3}
