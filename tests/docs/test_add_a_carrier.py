"""The carrier of ``docs/how-to/add-a-carrier.md``: it keeps the contract, and programs get it from an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.packages import install, modules_of, run

MODULES = modules_of("add-a-carrier.md")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (text, _) in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    install(tmp_path, "levada-toy", "levada.carriers", toy="toy_carrier:CARRIER")
    return tmp_path


def test_the_page_has_a_small_carrier_and_two_programs() -> None:
    assert list(MODULES) == ["toy_carrier", "check_toy", "use_toy"]
    assert len(MODULES["toy_carrier"][0].splitlines()) < 120


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.parametrize("program", ["check_toy", "use_toy"])
def test_a_program_prints_what_the_page_says(program: str, folder: Path) -> None:
    done = run(folder, f"{program}.py")
    assert (done.stdout, done.stderr, done.returncode) == (MODULES[program][1], "", 0)
