"""``levada bench``: its structure only; no time that is measured here decides anything."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from levada.actors import cli
from levada.actors.cli import bench


@pytest.fixture(scope="module")
def measures() -> ModuleType:
    bench.find_benchmarks()
    return importlib.import_module("benchmarks._measure")


@pytest.mark.timeout(180)  # five seconds of processor time, which a busy machine does not give at once
@pytest.mark.ci
def test_every_row_of_the_actors_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "actors", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["contenders"]) == ["levada", "trio", "asyncio", "Pykka", "Thespian", "xoscar"]
    rows = {row["key"]: row for row in report["rows"]}
    assert {key: row["budget"] for key, row in rows.items() if row["budget"]} == {
        "tell": 5,
        "hop": 20,
        "ask": 50,
        "ask inside": 60,
        "tell async": 12,
        "spawn": 100,
        "idle": 400,
        "bounded": 12,
        "thread": 2000,
        "codec": 4,
        "codec nested": 5,
        "codec list": 6,
        "ask async": 3,
    }
    assert all(row["figures"]["levada"]["median"] > 0 for row in rows.values())
    assert all({"trio", "asyncio"} <= set(rows[key]["figures"]) for key in list(rows)[:8])


@pytest.mark.ci
def test_the_table_names_who_is_not_installed(capsys: pytest.CaptureFixture[str], measures: ModuleType) -> None:
    present = measures.Contender(name="levada", remark="here", runs={"a": lambda n: 100.0, "b": lambda n: 7.0})
    absent = measures.Contender(name="Rival", remark="not installed (pip install rival)", runs={})
    workloads = [
        measures.Workload(key="a", title="first", n=1000, base=lambda n: 50.0, budget=1.5),
        measures.Workload(key="b", title="second", n=1000, unit="B", base=None, budget=8),
    ]
    said: list[str] = []
    report = measures.measure(workloads, [present, absent], rounds=3, quick=False, progress=said.append)
    assert report.text(judged=True).splitlines()[:6] == [
        "workload  levada median    best  ratio   best  to      budget        Rival",
        "first            100 ns  100 ns  2.0 ×  2.0 ×  deque  ≤ 1.5 ×  MISS      –",
        "second              7 B     7 B                         ≤ 8 B  pass      –",
        "",
        "levada  here",
        "Rival   not installed (pip install rival)",
    ]
    assert report.missed == ["first"]
    quick = report.text(judged=False)
    assert (quick.count("not judged: quick"), "MISS" in quick, "pass" in quick) == (2, False, False)
    assert said[0] == "round 1 of 3: first, levada"
    assert len(said) == 6


def test_figures_are_readable(measures: ModuleType) -> None:
    shown = [measures.figure(value, "ns") for value in (0.4, 350.2, 1234.0, 12_345.0, 123_456.0, 1.5e6, 2e9)]
    assert shown == ["0 ns", "350 ns", "1.2 µs", "12.3 µs", "123 µs", "1.5 ms", "2.0 s"]
    assert measures.figure(4550.0, "B") == "4,550 B"


def test_which_benchmarks_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    assert "actors" in capsys.readouterr().out.splitlines()
    assert cli.main(["bench", "kettles"]) == 2
    assert capsys.readouterr().err.startswith("levada: no benchmark is named 'kettles': choose from ")
    with pytest.raises(SystemExit):
        cli.main(["bench", "actors", "--rounds", "0"])
    assert "--rounds: expected a whole number, 1 or more, got '0'" in capsys.readouterr().err


def test_without_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert cli.main(["bench", "actors"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"levada: levada bench needs a source tree and there is no {tmp_path / 'benchmarks'}: ")
    assert err.endswith("clone the repository, pip install -e '.[dev]' in it, and run levada bench there\n")


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "budgets"),
    [
        (
            "nodes",
            {
                "20 ms of computing, 2 nodes": 0.93,
                "2 ms of computing, 2 nodes": 1.3,
                "ask from node to node, one at a time": 1.3,
                "ask from node to node, 64 at a time": 1.3,
                "spawn on a node": 3.0,
                "two nodes up": 1.5,
                "a killed node is known": 0.05,
                "a killed node is up again": 2.5,
            },
        ),
        (
            "ingest",
            {
                "ship, read, parse and append, CPU": 0.8,
                "the same on 2 nodes, CPU": 0.8,
                "lines of the node with fewer": 0.8,
            },
        ),
    ],
)
def test_every_row_of_the_benchmarks_with_nodes(
    name: str, budgets: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", name, "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["title"]: row["budget"] for row in report["rows"]} == budgets
    assert {row["missed"] for row in report["rows"]} == {None}
    assert all(len(row["ours"]) == 1 and row["ours"][0] >= 0 for row in report["rows"])  # CPU time counts in 10 ms
