"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from levada.framework import ActorSystem


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    """A running system; leaving the test ends it in its phases."""
    async with ActorSystem("test", seed=0, shutdown=1.0) as system:
        yield system


@pytest.fixture
async def strict_system() -> AsyncIterator[ActorSystem]:
    """The same with the checks for tests switched on."""
    async with ActorSystem("strict", seed=0, shutdown=1.0, strict=True) as system:
        yield system
