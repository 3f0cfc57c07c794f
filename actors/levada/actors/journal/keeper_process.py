"""`keeper`: a process that has journals, so that neither syncs nor Arrow hold up the actors of this one.

It is a node (`levada.actors.nodes.local_nodes`): it ends with the process that started it, and starts again when it is lost. A journal in it
is reached through a router, whose ref stays the same; while the keeper is away, the router has no journal to send questions to, and they fail.
The folder's lock keeps two keepers apart: the system frees the lock of a process that has ended, and only then can the next one open the journal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.abc import MetaPathFinder
from typing import Any

import attrs
import pyarrow as pa

from levada.actors.nodes import Nodes, NodeSettings, local_nodes
from levada.framework import Actor, ActorSystem, Asks, Joined, Ref, Reply, bounded, handles, restart
from levada.framework.router import group

from .actor import Journal
from .asking import until_free
from .columns import columns_of
from .config import REOPEN_EVERY, JournalConfig, Keyed
from .questions import GetExtent
from .store import Store

__all__ = ["Keeper", "KeptJournal", "app", "keeper"]

_AGAIN = restart("permanent", max=1 << 30, within=60.0, initial_backoff=0.05, max_backoff=5.0)
"""Only the end of its keeper ends a journal."""


@asynccontextmanager
async def keeper(
    system: ActorSystem,
    *,
    name: str = "keeper",
    app: Any = "levada.actors.journal.keeper_process:app",
    settings: NodeSettings | None = None,
) -> AsyncIterator[Keeper]:
    """Start a child process for journals; the block begins when it is up.

    Leaving the block writes all pending appends and ends the process; after an exception or a cancellation it is killed. It also ends when
    this process ends, however that happens.

    Args:
        system: has been entered, and is no node itself.
        name: of the node.
        app: as of `local_nodes`. One of your own imports the modules of the messages that are appended, and this module; it is not needed for
            rows that travel as Arrow streams.
        settings: how the process starts, ends and restarts; ``on="any"`` never chooses it.

    Raises:
        ConfigurationError, NodeLost, OSError: as `local_nodes`.

    Example:
        ::

            async with ActorSystem() as system, keeper(system) as keep:
                journal = await keep.open("readings", Reading)
                await journal.ask(Append(stream_of(columns_of(Reading).encode([Reading("north", 41.5)]))))
    """
    settings = attrs.evolve(settings or NodeSettings(), on_any=False)
    async with local_nodes(system, 1, app, names=[name], settings=settings) as nodes:
        keep = Keeper(nodes, name)
        yield keep
        await keep.pass_on()


class Keeper:
    """A process that has journals. Made by `keeper`."""

    def __init__(self, nodes: Nodes, name: str) -> None:
        self.nodes = nodes
        """The fleet that its process belongs to."""
        self.name = name
        """Of its node: ``nodes[name]``."""
        self._routers: list[Ref[Any]] = []

    async def open(
        self,
        directory: str | os.PathLike[str],
        columns: type | pa.Schema | None = None,
        *,
        config: JournalConfig | None = None,
        mailbox: int = 256,
        name: str | None = None,
    ) -> Ref[Any]:
        """Open a journal in the keeper, or make one; return a ref that stays the same when the keeper restarts.

        It answers the questions that are messages (see `levada.actors.journal.questions`). While the keeper is away they fail with
        `ActorStopped` or `ActorError`: an append that was under way may have been written, see `Append.at` and `Keyed.command`.

        Args:
            directory: see `Journal`.
            columns: see `Journal`.
            config: see `Journal`.
            mailbox: how many questions may wait in the keeper; senders of more wait on this side.
            name: of the actor that passes questions on.

        Raises:
            JournalError: it cannot be opened, see `Store.open`.
            ActorError: the keeper is not up.

        Cancellation: the journal may be open in the keeper.
        """
        schema = columns_of(columns).schema if isinstance(columns, type) else columns
        config = config or JournalConfig()
        # Here first: an error keeps its class, and a journal without columns says which ones it has.
        system = self.nodes.system
        platform = system.platform
        path, found = await until_free(lambda: platform.run_in_thread(_opened, directory, schema, config))
        topic = f"levada.journal/{platform.token_bytes(8).hex()}"
        waiting = system.spawn(_Waiting)
        try:
            await self.nodes.spawn(
                KeptJournal, path, None, topic, found.serialize().to_pybytes(), _plain(config),
                on=self.name, supervise=_AGAIN, mailbox=bounded(mailbox),
            )  # fmt: skip
            first: Ref[Any] = await waiting.ask(_AwaitMember(topic), timeout=None)
            await first.ask(GetExtent(), timeout=None)
        finally:
            waiting.stop()
        router: Ref[Any] = system.spawn(group(topic), name=name)
        self._routers.append(router)
        return router

    async def pass_on(self) -> None:
        """End the refs of its journals. Before that, they pass on what they were told: the node takes them from the group when it leaves."""
        for router in self._routers:
            router.stop()
            await router.terminated()


class KeptJournal(Journal):
    """A `Journal` that is described by values that travel, and joins a group when it is open."""

    topic: str = ""
    """Of the group."""
    described: bytes = attrs.field(default=b"", repr=False)
    """Its columns, as an Arrow IPC message."""
    settings: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    """Its config, see `_plain`."""

    reopen_every: float | None = attrs.field(default=REOPEN_EVERY, kw_only=True)
    dedicated: bool = attrs.field(default=True, kw_only=True)

    async def started(self) -> None:
        """Open the journal."""
        self.columns = pa.ipc.read_schema(pa.py_buffer(self.described))
        keyed = self.settings["keyed"]
        if keyed is not None:
            keyed = Keyed(**{**keyed, "body": None if keyed["body"] is None else tuple(keyed["body"])})
        self.config = JournalConfig(**{**self.settings, "keyed": keyed})
        await super().started()
        self.system.groups.join(self.topic, self.ref)


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Run in the keeper: this module is imported there, and nothing else is needed."""
    without_pandas()
    yield


def without_pandas() -> None:
    """Prevent imports of pandas in this process. Arrow does with its first array, which is 0.5 s of the 1.2 s in which a keeper starts."""
    sys.meta_path.insert(0, _NoPandas())


class _NoPandas(MetaPathFinder):
    """Finds all modules but one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse pandas, and leave others to other finders."""
        if name == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=name)


def _opened(
    directory: str | os.PathLike[str], schema: pa.Schema | None, config: JournalConfig
) -> tuple[str, pa.Schema]:
    with Store.open(directory, schema, config) as store:
        return os.path.abspath(directory), store.schema


def _plain(config: JournalConfig) -> dict[str, Any]:
    """Return a config as values that travel. A loss is accepted where the journal is opened first, and not again after a restart."""
    return attrs.asdict(attrs.evolve(config, accept_loss=False))


@attrs.frozen
class _AwaitMember(Asks[Ref[Any]]):
    """Wait for the first member of a group."""

    topic: str


class _Waiting(Actor[_AwaitMember | Joined]):
    """Waits for a member of a group: its system tells others of it a moment later."""

    async def started(self) -> None:
        self._reply: Reply[Ref[Any]] | None = None

    @handles
    def begin(self, m: _AwaitMember) -> None:
        """Wait."""
        self._reply = self.reply_later()
        self.system.groups.subscribe(m.topic, self.ref)

    @handles
    def joined(self, m: Joined) -> None:
        """Answer."""
        if self._reply is not None:
            self._reply.send(m.ref)
