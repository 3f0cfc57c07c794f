"""Variables of modules that a simulated world has changed are warned of, each once, at their definition."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import trio

from levada.framework.testing.simulation import SharedStateWarning, SimulationFailure, World, simulate

STATE = """
import itertools
import logging
import re

from levada.framework import Metric

CACHE = {}
NUMBERS = itertools.count(1)
TOTAL = 0
WORDS = ["tea"]
RATES = {"tea": 1000}
DEEP = {"tea": []}
PATTERN = re.compile("tea")
LOG = logging.getLogger("teashop")
SALES = Metric("teashop_sales_total", "counter", "Cups that were sold.")


class Slots:
    __slots__ = ("open", "sold")


class Shop:
    def __init__(self):
        self.sold = 0


class Absent:
    @property
    def __dict__(self):
        raise RuntimeError("no request")


SHOP = Shop()
SLOTS = Slots()
ABSENT = Absent()
"""

MAIN = """
import trio
from . import state


async def quiet():
    state.RATES["tea"] = int("1000")
    state.DEEP["tea"].append(1)
    hash(state.SALES)
    state.WORDS.append("milk")
    await trio.sleep(1)
    state.WORDS.pop()


async def loud():
    state.CACHE["tea"] = 1
    next(state.NUMBERS)
    state.TOTAL += 1
    state.WORDS[0] = "coffee"
    state.SHOP.sold += 1
    state.SLOTS.open = True
    state.NEW = 1


async def fails():
    state.TOTAL += 1
    raise ValueError("no tea")
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The main functions of a program of two modules."""
    folder = tmp_path / "teashop"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "state.py").write_text(STATE, "utf-8")
    (folder / "main.py").write_text(MAIN, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("teashop.main")
    for name in ("teashop", "teashop.main", "teashop.state"):
        del sys.modules[name]


def names(seen: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message).partition(" has changed in a simulated world")[0] for warning in seen]


def test_each_changed_variable_is_warned_of_once_at_its_definition(shop: ModuleType) -> None:
    async def scenario(world: World) -> None:
        await (await world.start("a", partial(shop.loud))).wait()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        simulate(scenario, seeds=range(3))
    assert {warning.category for warning in seen} == {SharedStateWarning}
    changed = ["CACHE", "NUMBERS", "TOTAL", "WORDS", "SHOP", "SLOTS", "NEW"]
    assert names(seen) == [f"teashop.state.{name}" for name in changed]
    assert (Path(seen[0].filename).name, seen[0].lineno) == ("state.py", 8)


def test_what_is_as_it_was_or_lies_deeper_is_not_warned_of(shop: ModuleType) -> None:
    async def scenario(world: World) -> None:
        await (await world.start("a", shop.quiet)).wait()

    with warnings.catch_warnings(record=True) as seen:
        simulate(scenario, seeds=[1])
    assert names(seen) == []


def test_a_world_that_fails_warns_too(shop: ModuleType) -> None:
    async def scenario(world: World) -> None:
        await world.start("a", shop.fails)
        await trio.sleep(1)

    with pytest.warns(SharedStateWarning) as seen, pytest.raises(SimulationFailure, match="no tea"):
        simulate(scenario, seeds=[1])
    assert names(list(seen)) == ["teashop.state.TOTAL"]


def test_a_module_without_processes_is_the_scenarios_own(shop: ModuleType) -> None:
    async def scenario(world: World) -> None:
        await shop.loud()

    with warnings.catch_warnings(record=True) as seen:
        simulate(scenario, seeds=[1])
    assert names(seen) == []
