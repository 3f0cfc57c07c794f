"""Every rule of every protocol has a test, and each protocol's page says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tests" / "docs" / "conformance.py"


def run(*arguments: str) -> tuple[str, int]:
    command = [sys.executable, str(TOOL), *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=250, check=False)
    assert done.stderr == ""
    return done.stdout, done.returncode


@pytest.mark.ci
def test_every_rule_has_a_test_and_the_page_is_up_to_date() -> None:
    assert run("--check") == ("", 0)


RULES = """
page = "docs/protocols/knock.md"
[rules]
KN-1 = "knock twice"
KN-2 = "wait | listen"
KN-3 = "do not break the door"
[untested]
KN-3 = "doors do not complain"
"""

MARKED = """
@pytest.mark.rule("KN-1")
def test_kn1_two_knocks():
    pass

@pytest.mark.parametrize("door", [pytest.param("oak", marks=pytest.mark.rule("KN-2"))])
async def test_kn2_waiting(door):
    pass

TestMachine = pytest.mark.rule("KN-1")(Machine.TestCase)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    data = tmp_path / "tests" / "transports" / "knock" / "data"
    data.mkdir(parents=True)
    (data / "rules.toml").write_text(RULES)
    (data.parent / "test_core.py").write_text(MARKED)
    page = tmp_path / "docs" / "protocols" / "knock.md"
    page.parent.mkdir(parents=True)
    page.write_text("# Knock\n<!-- conformance: begin -->\nold\n<!-- conformance: end -->\nThe end.\n")
    return tmp_path


def test_the_table_is_written_between_the_markers_and_then_is_up_to_date(checkout: Path) -> None:
    check = ("--root", str(checkout), "--check")
    stale = "knock: docs/protocols/knock.md is out of date: run python tests/docs/conformance.py\n"
    assert run(*check) == (stale, 1)
    assert run("--root", str(checkout)) == ("", 0)
    assert run(*check) == ("", 0)
    core = "[test_core](../../tests/transports/knock/test_core.py)"
    assert (checkout / "docs/protocols/knock.md").read_text() == (
        "# Knock\n<!-- conformance: begin -->\n"
        "| rule | what it wants | tests |\n|---|---|---|\n"
        f"| KN-1 | knock twice | {core}: `test_kn1_two_knocks`, `TestMachine` |\n"
        f"| KN-2 | wait &#124; listen | {core}: `test_kn2_waiting` |\n"
        "| KN-3 | do not break the door | none: doors do not complain |\n"
        "<!-- conformance: end -->\nThe end.\n"
    )


def test_rules_without_tests_and_tests_of_unknown_rules_are_named(checkout: Path) -> None:
    tests = checkout / "tests" / "transports" / "knock" / "test_core.py"
    tests.write_text('@pytest.mark.rule("KN-1")\n@pytest.mark.rule("KN-4")\ndef test_kn1_two_knocks(): ...\n')
    (checkout / "tests" / "test_other.py").write_text('@pytest.mark.rule("KN-3")\nclass TestDoor: ...\n')
    assert run("--root", str(checkout)) == (
        "knock: KN-2 has no test\n"
        "knock: KN-3 has a test: take it out of [untested]\n"
        "knock: KN-4 is not in tests/transports/knock/data/rules.toml: tests/transports/knock/test_core.py test_kn1_two_knocks\n",
        1,
    )


def test_a_page_without_the_markers_is_named(checkout: Path) -> None:
    (checkout / "docs/protocols/knock.md").write_text("# Knock\n")
    assert run("--root", str(checkout)) == (
        "knock: docs/protocols/knock.md lacks the lines <!-- conformance: begin --> and <!-- conformance: end -->\n",
        1,
    )
