"""The program of ``docs/how-to/break-your-own-system.md`` has the bug that the page names, worlds find it, and the cure of the page is one."""

from __future__ import annotations

import contextvars
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from levada.framework.testing.simulation import Faults, NotLinear, SimulationFailure, simulate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "break-your-own-system.md"

MANY, FOUND = 40, 4
"""Of so many worlds, so many find the bug; it was 9 when this was written. A change that blinds worlds is seen here."""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page's program as a module that nodes can import; with the cure, if the test asks for it."""
    monkeypatch.syspath_prepend(tmp_path)
    logging.disable(logging.CRITICAL)
    program, cure = PAGE.read_text("utf-8").split("```python\n")[1:3]
    code = program.partition("```")[0]
    if request.param == "cured":
        wrong = "            return await show.ask(Buy(count), timeout=1.0)\n"
        assert wrong in code
        code = code.replace(wrong, cure.partition("```")[0])
    name = f"box_office_{request.param}"
    (tmp_path / f"{name}.py").write_text(code, "utf-8")
    try:
        yield importlib.import_module(name)
    finally:
        logging.disable(logging.NOTSET)
        sys.modules.pop(name, None)


@pytest.mark.ci
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", ["wrong"], indirect=True)
def test_worlds_find_the_bug_of_the_page(program: Any) -> None:
    with pytest.raises(SimulationFailure) as failure:
        program.test_the_box_office_sells_each_ticket_once()
    assert isinstance(failure.value.__cause__, NotLinear)
    assert 1 <= len(failure.value.strikes or ()) <= 2
    found = 1
    for seed in range(failure.value.seed + 1, MANY):
        try:
            simulate(program.scenario, seeds=[seed], faults=Faults(aims={"Buy"}), shrink=False)
        except SimulationFailure:
            found += 1
            if found == FOUND:
                return
    pytest.fail(f"{found} of {MANY} worlds find it, wanted {FOUND}: what has made worlds blind?")


@pytest.mark.ci
@pytest.mark.parametrize("program", ["wrong", "cured"], indirect=True)
def test_the_saved_test_of_the_page_finds_the_bug_and_passes_with_the_cure(program: Any) -> None:
    saved = PAGE.read_text("utf-8").split("```python\n")[3].partition("```")[0]
    exec(saved, vars(program))
    again = program.test_a_pause_at_the_sixth_ticket_sells_no_ticket_twice
    if program.__name__.endswith("cured"):
        again()
        return
    with pytest.raises(SimulationFailure) as failure:
        again()
    assert [strike.what for strike in failure.value.strikes or ()] == ["pause"]


@pytest.mark.ci
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", ["cured"], indirect=True)
def test_the_cure_of_the_page_is_one(program: Any) -> None:
    done = simulate(program.scenario, seeds=range(3), faults=Faults(aims={"Buy"}))
    assert done.strikes > 0


def test_a_system_has_the_platform_that_the_page_makes(capsys: pytest.CaptureFixture[str]) -> None:
    *_, last = PAGE.read_text("utf-8").split("```python\n")
    contextvars.Context().run(exec, last.partition("```")[0], {"__name__": "page"})
    assert capsys.readouterr().out == "SmallDisk\n"
