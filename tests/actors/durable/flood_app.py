"""What nodes run that flood the keeper of a durable class."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")

from tests.actors.durable.test_placement import Placed

from levada.actors.journal import Append, GetExtent, ReadEntity
from levada.actors.journal.keeper_process import without_pandas
from levada.framework import Actor, ActorSystem, Asks, Ref, Reply, handles, message
from levada.framework.errors import LevadaError

__all__ = ["Flood", "Flooder", "Placed", "Sent", "app"]


@message("test.flood.flood")
class Flood(Asks[None]):
    """Send all kinds of questions to a journal, as fast as they go, until this node ends; answered when there were as many."""

    journal: Ref[Any]
    many: int


@message("test.flood.sent")
class Sent(Asks[int]):
    """Ask for the number of questions that were sent."""


class Flooder(Actor[Flood | Sent]):
    async def started(self) -> None:
        self._sent = 0

    @handles
    def begin(self, m: Flood) -> None:
        for _ in range(500):
            self.start_soon(self._ask, m.journal)
        self.start_soon(self._tell, m.journal, m.many, self.reply_later())

    @handles
    def count(self, _: Sent) -> int:
        return self._sent

    async def _ask(self, journal: Ref[Any]) -> None:
        rubbish = [Append(octets, partition=0, at=7) for octets in (b"nonsense", bytes(1 << 20))]
        while True:
            for question in (GetExtent(), ReadEntity("anna", partition=0), *rubbish):
                self._sent += 1
                try:
                    await journal.ask(question)
                except LevadaError:
                    await trio.lowlevel.checkpoint()

    async def _tell(self, journal: Ref[Any], many: int, reply: Reply[None]) -> None:
        rubbish = Append(bytes(1 << 20), partition=0, at=7)
        while True:
            self._sent += 1
            if reply.wanted and self._sent >= many:
                reply.send(None)
            try:
                journal.tell(rubbish)
            except LevadaError:
                pass
            await trio.lowlevel.checkpoint()


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """What runs on nodes."""
    without_pandas()
    yield
