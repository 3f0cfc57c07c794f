"""Fixtures for pytest with pytest-trio. Opt in, in a ``conftest.py``: ``pytest_plugins = ["levada.framework.testing.fixtures"]``.

* ``actor_system``: a running `ActorSystem` with ``seed=0``.
* ``probe``: a `Probe` in it.
* ``strict_actor_system``: a running system of `strict`.
* ``simulated``: `levada.framework.testing.simulation.simulate` for a plain test function, with as many worlds as the environment wants.

The first three end with the test, in their phases; an error that ended the system fails the test.  For virtual time let the test itself take
``autojump_clock``, a fixture of pytest-trio, which sees only the test's own arguments.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar, cast

try:
    import pytest
    import pytest_trio  # type: ignore[import-untyped]  # it has no types
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"levada.framework.testing.fixtures needs {missing.name}: pip install pytest-trio, or 'levada[dev]' for all that the tests use",
        name=missing.name,
    ) from missing

from levada.framework.errors import ConfigurationError
from levada.framework.system import ActorSystem

from .probe import Probe
from .simulation import Simulated, World, simulate
from .strict import strict

__all__ = ["actor_system", "probe", "simulated", "strict_actor_system"]

F = TypeVar("F", bound=Callable[..., Any])


def _fixture(function: F) -> F:
    # Not pytest's own decorator: that needs `trio_mode`, which is the user's choice.
    return cast("F", pytest_trio.trio_fixture(function))


@_fixture
async def actor_system() -> AsyncIterator[ActorSystem]:
    """A running system."""
    async with ActorSystem("test", seed=0) as system:
        yield system


@_fixture
async def strict_actor_system() -> AsyncIterator[ActorSystem]:
    """A running system with the checks of `strict`."""
    async with strict()("strict test", seed=0) as system:
        yield system


@_fixture
async def probe(actor_system: ActorSystem) -> Probe:
    """A probe in ``actor_system``."""
    return Probe(actor_system, name="probe")


@pytest.fixture
def simulated() -> Callable[..., Simulated]:
    """A function as `simulate`, whose ``seeds`` is the number of worlds, 20 by default.

    ``LEVADA_SEEDS=1000`` in the environment runs 1,000 worlds instead, and ``LEVADA_SEED=17`` only the world of seed 17.
    """

    def run(scenario: Callable[[World], Awaitable[object]], *, seeds: int = 20, **more: Any) -> Simulated:
        return simulate(scenario, seeds=_seeds(seeds), **more)

    return run


def _seeds(worlds: int) -> Iterable[int]:
    for name in ("LEVADA_SEED", "LEVADA_SEEDS"):
        text = os.environ.get(name)
        if text:
            if not text.isdecimal():
                raise ConfigurationError(f"{name} is {text!r}, wanted a whole number")
            return [int(text)] if name == "LEVADA_SEED" else range(int(text))
    return range(worlds)
