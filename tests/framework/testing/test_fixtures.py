"""The pytest fixtures, used as a program outside would: in a run of pytest of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from levada.framework.errors import ConfigurationError
from levada.framework.testing import fixtures
from levada.framework.testing.simulation import Simulated, World

pytest_plugins = ["pytester"]

simulated = fixtures.simulated

PROLOGUE = """
import trio
import pytest
from levada.framework import Actor, handles, message
from levada.framework.testing import Probe
pytest_plugins = ["levada.framework.testing.fixtures"]

@message("fixtures.Order")
class Order:
    lines: list

class Shop(Actor):
    @handles
    def order(self, m: Order) -> None:
        if not m.lines:
            raise ValueError("nothing to buy")
"""


SOURCE = str(Path(__file__).parents[3] / "framework")


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], pytest.RunResult]:
    """Run tests that a user might have written."""
    monkeypatch.setenv("PYTHONPATH", SOURCE)

    def run_tests(body: str) -> pytest.RunResult:
        pytester.makepyfile(PROLOGUE + body)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider")

    return run_tests


@pytest.mark.ci
def test_the_fixtures_give_a_system_a_probe_and_virtual_time(run: Callable[[str], pytest.RunResult]) -> None:
    result = run(
        """
@pytest.mark.trio
async def test_probe(actor_system, probe, autojump_clock):
    probe.ref.tell(Order(["tea"]))
    assert (await probe.expect(Order)).lines == ["tea"]
    await trio.sleep(3600)
    assert actor_system.lookup("/probe") is probe.ref
    assert actor_system.phase == "running"
""",
    )
    result.assert_outcomes(passed=1)


@pytest.mark.ci
def test_what_ends_the_system_fails_the_test(run: Callable[[str], pytest.RunResult]) -> None:
    result = run(
        """
@pytest.mark.trio
async def test_escalated(actor_system):
    actor_system.spawn(Shop, supervise="escalate").tell(Order([]))
    await trio.sleep_forever()

@pytest.mark.trio
async def test_changed(strict_actor_system):
    order = Order(["tea"])
    strict_actor_system.spawn(Shop).tell(order)
    order.lines.clear()
    await trio.sleep_forever()
""",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*ValueError: nothing to buy*"])
    result.stdout.fnmatch_lines(["*StrictViolation: *was changed between tell and its handling*"])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("module", "package"), [("fixtures", "pytest_trio"), ("stateful", "hypothesis")], ids=["pytest-trio", "hypothesis"]
)
def test_a_missing_package_is_named_with_the_extra(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    code = f"import sys; sys.modules[{package!r}] = None; import levada.framework.testing.{module}"
    result = pytester.run(sys.executable, "-c", code)
    assert result.ret == 1
    result.stderr.fnmatch_lines(
        [f"ModuleNotFoundError: levada.framework.testing.{module} needs {package}: pip install *'levada[[]dev[]]'*"]
    )


@pytest.mark.ci
def test_the_rest_needs_neither_pytest_nor_hypothesis(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    code = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None;"
        "import levada.framework.testing as testing; print(sorted(testing.__all__))"
    )
    result = pytester.run(sys.executable, "-c", code)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*'Explored', 'FakeRef', 'Probe', 'ScheduleFailure', 'StrictViolation'*"])


@pytest.mark.parametrize(
    ("environment", "seeds"),
    [
        ({}, [0, 1, 2]),
        ({"LEVADA_SEEDS": "5"}, [0, 1, 2, 3, 4]),
        ({"LEVADA_SEEDS": "5", "LEVADA_SEED": "17"}, [17]),
    ],
)
def test_the_environment_says_how_many_worlds(
    environment: dict[str, str],
    seeds: list[int],
    monkeypatch: pytest.MonkeyPatch,
    simulated: Callable[..., Simulated],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen: list[int] = []

    async def scenario(world: World) -> None:
        assert list(world.machines) == ["A", "B"]
        seen.append(world.seed)
        await trio.sleep(10)

    assert simulated(scenario, seeds=3, machines=["A", "B"]).seconds == 10 * len(seeds)
    assert seen == seeds


def test_a_number_of_worlds_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Simulated]
) -> None:
    monkeypatch.setenv("LEVADA_SEEDS", "many")
    with pytest.raises(ConfigurationError, match="LEVADA_SEEDS is 'many', wanted a whole number"):
        simulated(trio.sleep_forever)
