"""The command ``levada`` itself; each subcommand has tests of its own."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TextIO

import pytest

from levada.actors import cli
from levada.framework.errors import ConfigurationError, ConnectionLost


class ErrorOfLines(ConfigurationError):
    """An error with a text of several lines, as of `levada.actors.spark.query.QueryFailed`."""

    def __str__(self) -> str:
        return self.detail


class CommandModule(ModuleType):
    """A subcommand ``probe`` whose work is the function it is given."""

    def __init__(self, work: Callable[[argparse.Namespace], int]) -> None:
        super().__init__("levada.actors.cli.probe")
        self.run = work

    def add_parser(self, subparsers: cli.Subparsers) -> None:
        parser = subparsers.add_parser("probe", help="look around")
        parser.add_argument("--depth", type=int, default=1)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Make ``probe`` the only subcommand, doing what the argument does."""

    def install(work: Callable[[argparse.Namespace], int]) -> None:
        monkeypatch.setitem(sys.modules, "levada.actors.cli.probe", CommandModule(work))
        monkeypatch.setattr(cli, "COMMANDS", ("probe",))

    return install


Install = Callable[[Callable[[argparse.Namespace], int]], None]


def raiser(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def work(args: argparse.Namespace) -> int:
        raise error

    return work


def test_a_subcommand_gets_its_arguments_and_gives_the_exit_code(install: Install) -> None:
    install(lambda args: 10 + args.depth)
    assert cli.main(["probe", "--depth", "3"]) == 13


def test_help_lists_the_subcommands(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(lambda args: 0)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    assert re.search(r"probe +look around", capsys.readouterr().out)


@pytest.mark.parametrize("words", [[], ["journal"], ["journal", "ls"], ["help"]])
def test_help_of_a_command_is_the_same_in_front_of_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for argv in ["help", *words], [*words, "--help"]:
        with pytest.raises(SystemExit) as exit_:
            cli.main(argv)
        assert exit_.value.code == 0
        said.append(capsys.readouterr())
    assert said[0] == said[1]
    assert said[0].out.startswith("usage: levada ")


def test_help_of_an_unknown_command_names_a_similar_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["help", "jornal"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.endswith("; is it 'journal'?\n")


def test_no_subcommand_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("usage: levada ")
    assert captured.out == ""


def test_an_unknown_subcommand_is_named(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(lambda args: 0)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["dance"])
    assert exit_.value.code == 2
    assert "'dance' (choose from" in capsys.readouterr().err


def test_other_subcommands_are_not_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(lambda args: 0)
    monkeypatch.setattr(cli, "COMMANDS", ("probe", "module_that_does_not_exist"))
    assert cli.main(["probe"]) == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ConfigurationError("no port in 'tcp://host'; write tcp://host:7000"),
            "no port in 'tcp://host'; write tcp://host:7000",
        ),
        (ConnectionLost(), "ConnectionLost"),
        (ExceptionGroup("nursery", [ConnectionLost("refused")]), "refused"),
        (ConnectionLost("the query failed\nbecause of\nmuch"), r"the query failed\nbecause of\nmuch"),
        (ErrorOfLines("the query failed\nbecause of\nmuch"), "the query failed"),
    ],
)
def test_our_errors_are_one_line(
    error: BaseException, text: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(raiser(error))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr() == ("", f"levada: {text}\n")


@pytest.mark.parametrize(
    ("code", "returned", "text"), [("no table", 1, "no table\n"), (4, 4, ""), (0, 0, ""), (None, 0, "")]
)
def test_an_exit_in_a_nursery_is_one_as_elsewhere(
    code: str | int | None, returned: int, text: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(raiser(BaseExceptionGroup("nursery", [SystemExit(code)])))
    assert cli.main(["probe"]) == returned
    assert capsys.readouterr() == ("", text)


@pytest.mark.parametrize("fails_at", ["print", "nursery", "flush"])
def test_a_reader_of_the_output_that_leaves_is_no_error(
    fails_at: str, install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in ``levada explain … | head -1``; the output may still be in Python's buffer when the command has ended."""

    def work(args: argparse.Namespace) -> int:
        try:
            print("a line", flush=fails_at != "flush")
        except BrokenPipeError as error:
            if fails_at == "nursery":
                raise ExceptionGroup("nursery", [error]) from None
            raise
        return 1

    install(work)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert cli.main(["probe"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("fails_at", ["print", "flush"])
def test_a_full_disk_is_one_line(
    fails_at: str, install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(args: argparse.Namespace) -> int:
        print("a line", flush=fails_at == "print")
        return 0

    install(work)
    with open("/dev/full", "w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "levada: [Errno 28] No space left on device\n"


def test_closed_streams_are_empty_ones(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with the shell's ``<&- >&- 2>&-``."""

    def work(args: argparse.Namespace) -> int:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            opened.append(stream)
            assert not stream.isatty()
        assert sys.stdin.read() == ""
        print("nothing", flush=True)
        print("nothing", flush=True, file=sys.stderr)
        return 0

    opened: list[TextIO] = []
    install(work)
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert cli.main(["probe"]) == 0
    monkeypatch.undo()
    for stream in opened:
        stream.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_output_in_an_encoding_that_lacks_a_character(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, errors: str
) -> None:
    def work(args: argparse.Namespace) -> int:
        print("5 \u20ac")
        return 0

    install(work)
    with open(tmp_path / "output", "w", encoding="ascii", errors=errors) as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert cli.main(["probe"]) == 0
    assert (tmp_path / "output").read_text() == "5 \\u20ac\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseExceptionGroup("nursery", [KeyboardInterrupt()])])
def test_ctrl_c_is_one_line(error: BaseException, install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(raiser(error))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr() == ("", "levada: interrupted\n")


def test_a_command_that_ends_itself_on_ctrl_c_says_so_too(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(lambda args: 130)
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr() == ("", "levada: interrupted\n")


@pytest.mark.parametrize("module", ["trio", "levada.framework", "levada.actors.cli.top"])
def test_ctrl_c_during_the_imports_is_one_line(module: str) -> None:
    """The imports of a command take most of its first half second."""
    program = f"""
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from levada.actors.cli import main
sys.exit(main(["top", "socket"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "levada: interrupted\n")


def test_a_bug_shows_its_traceback(install: Install) -> None:
    install(raiser(ExceptionGroup("nursery", [ConnectionLost("refused"), ZeroDivisionError("bug")])))
    with pytest.raises(ExceptionGroup, match="nursery"):
        cli.main(["probe"])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_registered_modules_keep_the_contract(name: str) -> None:
    module = importlib.import_module(f"levada.actors.cli.{name}")
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(action=cli.Subparsers)
    module.add_parser(subparsers)
    assert list(subparsers.choices or ()) == [name]
    assert callable(module.run)


@pytest.mark.ci
def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "levada.actors", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert re.fullmatch(r"levada \S.*\n", done.stdout)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in cli.COMMANDS)
    assert "--self-signed" in script


def test_completion_without_shtab_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "levada: completion needs shtab: pip install 'levada[cli]'\n"


def test_the_help_of_explain_names_the_protocols(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", "--help"])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")}
    assert {"aqueduct", "rsocket", "reactivesocket", "maop", "lumberjack"} <= listed
