"""Fixtures for pytest with pytest-trio. Opt in, in a ``conftest.py``: ``pytest_plugins = ["levada.framework.testing.fixtures"]``.

* ``actor_system``: a running `ActorSystem` with ``seed=0``.
* ``probe``: a `Probe` in it.
* ``strict_actor_system``: a running system of `strict`.

Each ends with the test, in its phases; an error that ended the system fails the test.  For virtual time let the test itself take
``autojump_clock``, a fixture of pytest-trio, which sees only the test's own arguments.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

try:
    import pytest_trio  # type: ignore[import-untyped]  # it has no types
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"levada.framework.testing.fixtures needs {missing.name}: pip install pytest-trio, or 'levada[dev]' for all that the tests use",
        name=missing.name,
    ) from missing

from levada.framework.system import ActorSystem

from .probe import Probe
from .strict import strict

__all__ = ["actor_system", "probe", "strict_actor_system"]


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
