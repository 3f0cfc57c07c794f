"""What the kill trials of durable actors run on nodes: entities and clerks that kill their process where a command says so."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")

import trio.lowlevel

from levada.actors.durable import Durable, applies, shards_of
from levada.framework import Actor, ActorSystem, Asks, Reply, handles, message
from levada.framework.errors import LevadaError


@message("test.trials.pay", frozen=True)
class Pay(Asks[int]):
    """Pay in; the answer is the new total."""

    amount: int
    strike: str = ""
    """Where the entity's process dies, when this file is not there yet: ``recorded``, ``written`` or ``answered``."""
    once: str = ""


@message("test.trials.total", frozen=True)
class Total(Asks[int]):
    pass


@message("test.trials.paid", frozen=True)
class Paid:
    amount: int
    by: str
    """The process that recorded it."""


@message("test.trials.errand", frozen=True)
class Errand(Asks[int]):
    """Pay from the clerk's node."""

    entity: str
    pay: Pay
    command: str


def die(once: str) -> None:
    """Kill this process, unless it has been done."""
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class AtOnce:
    """Takes the place of a ref: `tell` is called when the rows are on the disk, before the answer leaves."""

    def tell(self, once: str) -> None:
        die(once)


class Soon(Actor[str]):
    """Dies a moment later, when answers may be on their way."""

    @handles
    async def strike(self, once: str) -> None:
        await trio.lowlevel.checkpoint()
        die(once)


class Purse(Durable[Pay | Total]):
    total: int = 0

    @handles
    def pay(self, m: Pay) -> int:
        self.record(Paid(m.amount, f"{self.system.name}:{os.getpid()}"))
        if m.strike == "recorded":
            die(m.once)
        elif m.strike == "written":
            at_once: Any = AtOnce()
            self.after_commit(at_once, m.once)
        elif m.strike == "answered":
            self.after_commit(self.system.spawn(Soon), m.once)
        return self.total

    @handles
    def look(self, _: Total) -> int:
        return self.total

    @applies
    def paid(self, e: Paid) -> None:
        self.total += e.amount


class Clerk(Actor[Errand]):
    """Runs errands, many at a time."""

    @handles
    def begin(self, m: Errand) -> None:
        self.start_soon(self._go, m, self.reply_later())

    async def _go(self, m: Errand, reply: Reply[int]) -> None:
        try:
            purses = await shards_of(self.system, Purse)
            reply.send(await purses[m.entity].ask(m.pay, command=m.command))
        except LevadaError as error:
            reply.fail(error)


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """What runs on nodes."""
    yield
