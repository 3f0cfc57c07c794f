"""A bank of durable accounts on the nodes of a fleet, its clients, and the oracle of its history."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import attrs
import pyarrow as pa
import trio

from levada.actors.durable import Durable, Keep, ReplayFailed, applies, shards
from levada.actors.journal import Extent, GetExtent, GetSchema, ReadRows, TrimRows
from levada.actors.journal.archive import Archive
from levada.actors.nodes import NodeSettings, local_nodes
from levada.framework import ActorSystem, Asks, Ref, handles, message, restart
from levada.framework.errors import LevadaError
from levada.framework.platform import PLATFORM
from levada.framework.testing.simulation import Faults, World, check_linear

__all__ = ["FAULTS", "Account", "Bank", "app"]

SETTINGS: Final = NodeSettings(
    start_timeout=20.0,
    drain_timeout=2.0,
    silence=5.0,
    restart=restart("transient", max=1000, within=60.0, initial_backoff=0.2, max_backoff=1.0),
)
FAULTS: Final = Faults(
    jump=5.0,  # a reminder that a wrong clock has set is late by as much
    strikes=10,
    every=0.5,
    disk_errors=2.0,
    power_failures=2.0,
    aims={"Add", "Append", "Close", "Command", "Due", "Open", "fdatasync", "rename"},
)
"""Strikes at random times; in half of the worlds, also at commands, appends, their syncs, and moves of shards."""
_REMINDED: Final = (0.05, 1.0, 3.0)
"""Seconds after which a reminder is due."""


@message("simulation.bank.Add")
class Add(Asks[int]):
    """Add an id, and remind of it after some seconds; 0: never. The answer is its number."""

    id: str
    after: float = 0


@message("simulation.bank.Due")
class Due:
    """A reminder of an id."""

    id: str


@message("simulation.bank.Look")
class Look(Asks[list[list[str]]]):
    """Ask for the ids, and for the ids whose reminders have come."""


@message("simulation.bank.Added")
class Added:
    """An id was added."""

    id: str


@message("simulation.bank.Reminded")
class Reminded:
    """A reminder has come."""

    id: str


class Account(Durable[Add | Due | Look]):
    """Remembers ids, and which reminders have come."""

    ids: list[str] = attrs.field(factory=list)
    due: list[str] = attrs.field(factory=list)

    @handles
    def add(self, m: Add) -> int:
        """Add an id."""
        self.record(Added(m.id))
        if m.after:
            self.remind(self.system.platform.time() + m.after, Due(m.id), key=m.id)
        return len(self.ids)

    @handles
    def come(self, m: Due) -> None:
        """Note a reminder."""
        self.record(Reminded(m.id))

    @handles
    def look(self, m: Look) -> list[list[str]]:
        """Show everything."""
        return [self.ids, self.due]

    @applies
    def added(self, e: Added) -> None:
        """Add an id."""
        self.ids = [*self.ids, e.id]

    @applies
    def reminded(self, e: Reminded) -> None:
        """Note a reminder."""
        self.due = [*self.due, e.id]


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Run on the nodes."""
    yield


class Bank:
    """The driver of the bank in one world, with its clients. The seed decides how it is set up, and the work."""

    clients = 3
    commands = 12
    entities = 4
    settings = SETTINGS
    patience = 30.0
    timeouts: tuple[float, ...] = 0.5, 5.0
    """Seconds for which a client waits for an answer before it asks again."""
    rests: tuple[float, ...] = 0.0, 0.05, 0.8
    """Seconds between an answer and the next command, so that there is work for as long as there are strikes."""

    def __init__(self, world: World) -> None:
        self._world = world
        rng = random.Random(f"bank {world.seed}")
        self._keeper, self._alone = rng.random() < 0.5, False
        self._nodes = rng.choice((2, 3))
        self._idle, self._snapshot_every = rng.choice((0.5, 5.0, 60.0)), rng.choice((3, 1000))
        self._todo = [
            deque(
                (f"e{rng.randrange(self.entities)}", Add(f"{client}.{n}", rng.choice((0, 0, *_REMINDED))))
                for n in range(self.commands)
            )
            for client in range(self.clients)
        ]
        self._reminders = {add.id for todo in self._todo for _, add in todo if add.after}
        self._trims = random.Random(f"trims {world.seed}").random() < 0.5
        archives = self._trims and random.Random(f"archives {world.seed}").random() < 0.5
        self._archive = "/archive" if archives else ""
        self._done = trio.Event()
        self._lives = 0
        self._trimmed = 0
        """Rows that were trimmed by `_trim`."""

    async def run(self) -> None:
        """Run it until every command is answered and the history is right."""
        await self._world.start("driver", self._drive, restart=0.5)
        await self._done.wait()

    async def _drive(self) -> None:
        self._lives += 1
        async with (
            ActorSystem("driver", ask_timeout=10.0) as system,
            local_nodes(system, self._nodes, app, settings=self.settings) as nodes,
        ):
            accounts = await shards(
                system,
                Account,
                events=Added | Reminded,
                journal="/accounts",
                shards=4,
                nodes=None if self._alone else nodes,
                patience=self.patience,
                keeper=self._keeper,
                idle=self._idle,
                snapshot_every=self._snapshot_every,
                keep=None if not self._trims else Keep(0.0, self._archive) if self._archive else 0.0,
            )
            with trio.CancelScope() as trimming:
                async with trio.open_nursery() as operator:
                    if self._trims:
                        operator.start_soon(self._trim, accounts)
                    async with trio.open_nursery() as clients:
                        for number, todo in enumerate(self._todo):
                            rng = random.Random(f"client {self._world.seed} {number} {self._lives}")
                            clients.start_soon(self._work, accounts, todo, rng)
                    trimming.cancel()
            self._world.strikes.stop()
            await self._check(accounts)
            self._done.set()

    async def _work(self, accounts: Any, todo: deque[tuple[str, Add]], rng: random.Random) -> None:
        """Give commands one after the other, each until it is answered. The next life of the driver goes on with what is left."""
        while todo:
            entity, add = todo[0]
            account: Any = accounts[entity]
            try:
                await self._world.history.call(
                    entity,
                    add.id,
                    lambda _: account.ask(add, command=add.id, timeout=rng.choice(self.timeouts)),  # noqa: B023 - awaited here
                )
            except ReplayFailed as error:
                raise AssertionError(f"a log is broken: {error}") from error
            except LevadaError:
                await trio.sleep(rng.choice((0.01, 0.2, 1.0)))
            else:
                todo.popleft()
                await trio.sleep(rng.choice(self.rests))

    async def _trim(self, accounts: Any) -> None:
        """Have the log trimmed again and again, besides what the shards do."""
        rng = random.Random(f"trimming {self._world.seed} {self._lives}")
        while True:
            await trio.sleep(rng.choice((0.1, 0.5, 2.0)))
            for shard in range(4):
                try:
                    self._trimmed += (
                        await accounts.journal.ask(TrimRows(shard, 1e12, archive=self._archive), timeout=5.0)
                    ).rows
                except LevadaError:
                    pass  # the journal is away, or refuses

    async def _check(self, accounts: Any) -> None:
        """Each command is done once, each answer is its number, in the order of real time; each reminder has come once."""
        operations = self._world.history.operations
        came: list[str] = []
        for entity in sorted({str(operation.key) for operation in operations}):
            mine = [operation for operation in operations if operation.key == entity]
            while True:
                ids, due = await self._look(accounts[entity])
                assert len(due) == len(set(due)), f"{entity}: reminders came twice: {due}"
                if {id for id in ids if id in self._reminders} <= set(due):
                    break
                await trio.sleep(1.0)
            came += due
            assert sorted(ids) == sorted({operation.question for operation in mine}), f"{entity}: {ids}"
            for operation in mine:
                assert operation.answer is None or ids[operation.answer - 1] == operation.question, (
                    f"{operation}; but {ids}"
                )
        assert sorted(came) == sorted(self._reminders)
        if self._archive:
            recorded = [id for shard in range(4) for id in await self._recorded(accounts.journal, shard)]
            assert sorted(recorded) == sorted({operation.question for operation in operations})
        check_linear(self._world.history, _apply, ())

    async def _recorded(self, journal: Ref[Any], shard: int) -> list[str]:
        """Return the ids in a shard of the log and of its archive, read as one table."""
        columns = pa.ipc.read_schema(pa.py_buffer(await _answered(journal, GetSchema())))
        extent: Extent = await _answered(journal, GetExtent())
        at = extent.whole[shard]
        pages = [rows for _, rows in Archive.at(self._archive, PLATFORM.get().files).rows(shard, 0, at, columns)]
        while (rows := await _answered(journal, ReadRows(shard, at))).count:
            pages.append(rows.batch())
            at = rows.end
        return [row["id"] for page in pages for row in page.to_pylist() if row["kind"] == "simulation.bank.Added"]

    async def _look(self, account: Ref[Any]) -> list[list[str]]:
        while True:
            try:
                found: list[list[str]] = await account.ask(Look(), timeout=5.0)
            except ReplayFailed as error:
                raise AssertionError(f"a log is broken: {error}") from error
            except LevadaError:
                await trio.sleep(0.5)
            else:
                return found


async def _answered(journal: Ref[Any], question: Asks[Any]) -> Any:
    while True:
        try:
            return await journal.ask(question, timeout=5.0)
        except LevadaError:
            await trio.sleep(0.5)


def _apply(ids: tuple[str, ...], id: str) -> tuple[tuple[str, ...], int]:
    """Add an id, once."""
    after = ids if id in ids else (*ids, id)
    return after, after.index(id) + 1
