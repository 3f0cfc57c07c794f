"""``levada new``: what it makes works as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from levada.actors import cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "options", "files"),
    [
        ("tally", [], {"Containerfile"}),
        ("words", ["--spark"], {"query.py"}),
        ("bids", ["--durable"], {"Containerfile"}),
    ],
)
def test_a_new_project(
    name: str,
    options: list[str],
    files: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", name, *options]) == 0
    found = {file.name for file in (tmp_path / name).iterdir()}
    assert found == {"pyproject.toml", f"{name}.py", f"test_{name}.py", "README.md", ".gitignore"} | files
    commands = f"{' '.join([f'levada new {name}', *options])}\n{capsys.readouterr().out}"
    assert f"```\n{commands}```\n" in (ROOT / "README.md").read_text("utf-8")
    readme = (tmp_path / name / "README.md").read_text("utf-8")
    for command in re.split(r"\n| && ", commands)[2:]:
        assert re.split(r"    #| --", command)[0] in readme
    assert "$" not in readme
    assert cli.main(["new", name, *options]) == 2
    assert (
        capsys.readouterr().err
        == f"levada: {name} is there. Nothing is overwritten: move it away, or choose another name\n"
    )


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Tally", "lower-case letters"),
        ("../tally", "lower-case letters"),
        ("class", "'class', a word of Python's own, which names no module: choose another name"),
        ("tally_", "_, with a letter first and no _ at the end"),  # pip refuses such a project
        ("trio", "would hide it"),
        ("json", "would hide it"),
        ("hypothesis", "would hide it"),
        ("pyspark", "would hide it"),
        ("pyarrow", "would hide it"),
        ("x" * 250, "File name too long"),  # long enough for test_NAME.py only
    ],
)
def test_names_that_cannot_be_used(
    name: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", name]) == 2
    assert error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_the_query_is_not_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "query", "--spark"]) == 2
    assert capsys.readouterr().err == "levada: the project has another query.py: choose another name\n"
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["new", "query"]) == 0


@pytest.mark.parametrize("command", [["serve", "tally:app"], ["simulate", "test_tally:strike"]])
def test_a_mistake_in_the_new_project_is_named_with_its_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["new", "tally", "--durable"]) == 0
    monkeypatch.chdir(tmp_path / "tally")
    file = tmp_path / "tally" / "tally.py"
    line = 1 + file.read_text("utf-8").count("\n")
    with file.open("a", encoding="utf-8") as text:
        text.write("app = ap\n")
    capsys.readouterr()
    assert cli.main(command) == 2
    *above, last = capsys.readouterr().err.splitlines()
    module = command[1].partition(":")[0]
    assert last == f"levada: module {module} cannot be imported: NameError: name 'ap' is not defined (tally.py:{line})"
    frames = [text for text in above if text.startswith('  File "')]
    assert frames
    assert all("/tally/" in text for text in frames), above


def run(folder: Path, *command: str) -> str:
    """Run a module as a user would in the folder of the project."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.release
@pytest.mark.parametrize("options", [[], ["--spark"], ["--durable"]])
def test_the_new_project_passes_its_own_test_and_every_check(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "tally", *options]) == 0
    folder = tmp_path / "tally"
    run(folder, "pytest", "-q", "-W", "error", "-p", "no:cacheprovider")
    run(folder, "ruff", "check", "--isolated", "--select", "E,F,I,UP,B", "--line-length", "120", ".")
    run(folder, "ruff", "format", "--isolated", "--line-length", "120", "--check", ".")
    run(folder, "mypy")  # as its README says


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_a_durable_project_serves_as_its_readme_says_and_its_simulation_finds_a_bid_that_is_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "tally", "--durable"]) == 0
    folder = tmp_path / "tally"
    program = (folder / "tally.py").read_text("utf-8")
    (folder / "tally.py").write_text(program.replace(":7000", ":0"), "utf-8")
    for _ in range(2):  # the second life knows what the first has taken
        with subprocess.Popen(
            [sys.executable, "-m", "levada.actors", "serve", "tally:app", "--nodes", "2"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *filter(None, sys.path)])},
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split()[-1]
                call = ["levada.actors", "call", url, "--data"]
                answers = [run(folder, *call, bid) for bid in ("clock 1 anna 1500", "clock 2 bert 1500")]
                for bid, why in (("clock anna", "wanted: LOT ID"), ("clock 1 bert 9", "1 is the id of another bid")):
                    with pytest.raises(AssertionError, match=why):
                        run(folder, *call, bid)
            finally:
                server.terminate()
        assert (server.returncode, answers) == (0, ["leads\n", "too low, or too late\n"])
    (folder / "tally.py").write_text(program.replace(", command=order)", ")"), "utf-8")
    command = ["levada.actors", "simulate", "test_tally:strike", "--faults", "test_tally:FAULTS", "--seeds", "100"]
    with pytest.raises(AssertionError, match="NotLinear"):
        run(folder, *command)


@pytest.mark.release
@pytest.mark.timeout(600)
def test_lines_go_from_a_file_through_actors_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of README.md, at a free port."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "tally", "--spark"]) == 0
    folder = tmp_path / "tally"
    (folder / "free.py").write_text(
        "import tally\n\n\nasync def app(system):\n    async for reader in tally.app(system, 'lumberjack://127.0.0.1:0'):\n        yield reader\n",
        "utf-8",
    )
    (folder / "app.log").write_text("ERROR one\nINFO two\nERROR three\n", "utf-8")
    with subprocess.Popen(
        [sys.executable, "-m", "levada.actors", "serve", "free:app"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *filter(None, sys.path)])},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            serving = server.stdout.readline().split()
            run(folder, "levada.actors", "ship", "app.log", "--to", serving[-1], "--once")
            assert "|     ERROR|    2|\n|      INFO|    1|\n" in run(folder, "query")
        finally:
            server.terminate()
    assert server.returncode == 0
