"""What nodes run whose app keeps its accounts in PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from tests.actors.durable.accounts import EVENTS, Account

from levada.actors.durable import shards
from levada.framework import ActorSystem

__all__ = ["Account", "app"]


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Open the shards of the fleet; the driver does not import this."""
    await shards(system, Account, events=EVENTS, journal=os.environ["LEVADA_TEST_URL"], shards=4)
    yield
