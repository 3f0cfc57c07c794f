"""How the log of a durable class is opened: its columns, and its journal, in this process or in a keeper."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import pyarrow as pa

from levada.actors.journal import (
    GetExtent,
    GetSchema,
    Journal,
    JournalConfig,
    JournalError,
    LogStore,
    ReadEntity,
    SchemaMismatch,
    Store,
    check_growth,
    journal_error,
)
from levada.actors.journal.asking import until_free
from levada.actors.journal.config import REOPEN_EVERY
from levada.actors.journal.inspection import inspect
from levada.actors.journal.log import DATABASES
from levada.actors.journal.log_events import event_columns
from levada.framework import Actor, ActorSystem, Asks, Ref, bounded, message, restart
from levada.framework.errors import ActorError, ConfigurationError, LevadaError

from .hosting import SentStore
from .rows import grown, log_config
from .settings import Terms

if TYPE_CHECKING:
    from levada.actors.postgres import PostgresStore

__all__ = [
    "AGAIN", "Folder", "OpenShards", "OpenedShards", "Place", "database_at", "has_streams", "open_journal",
]  # fmt: skip

AGAIN: Final = restart("transient", max=1 << 30, within=60.0, initial_backoff=0.05, max_backoff=5.0)
"""The policy of what uses a disk: a disk may fail for long."""


UNLOCKED_WITHIN: Final = 5.0
"""Seconds to wait for a folder that another program has open: it may be about to end."""


@attrs.frozen
class Folder:
    """A folder with the log of a durable class."""

    path: Path
    keeper: bool
    """Whether its journal runs in a child process."""


Place: TypeAlias = Folder | Ref[Any] | LogStore
"""Where the log of a durable class is: in a folder, behind a ref of the caller's, or in a store that each process opens for itself."""


def database_at(place: object, name: str = "") -> PostgresStore | None:
    """Return the store that a URL names, with the table `name` unless the URL has one; None if this is no URL of a database.

    Raises:
        ConfigurationError: what databases need is not installed, or the URL is wrong.
    """
    if not isinstance(place, str) or not place.startswith(DATABASES):
        return None
    try:
        from levada.actors.postgres import PostgresStore
    except ModuleNotFoundError as missing:
        raise ConfigurationError(str(missing)) from missing
    return PostgresStore.at(place, name)


@message("levada.durable.opened_shards")
class OpenedShards:
    """The shards are open."""

    journal: Ref[Any]


@message("levada.durable.open_shards")
class OpenShards(Asks[OpenedShards]):
    """Open the shards of a class; later requests join them. Fails with `ConfigurationError` if the shards were opened with other terms."""

    terms: Terms
    """The schema has the columns of a new log."""
    journal: Any
    """A ref, a `LogStore`, a `SentStore`, or None for a folder."""
    folder: bytes
    """The absolute folder, in the driver's process if there are nodes: a name of a file, which need not be Unicode."""
    keeper: bool

    @classmethod
    def of(cls, terms: Terms, place: Place) -> OpenShards:
        """Make a request for shards whose log is at a place."""
        if isinstance(place, Folder):
            return cls(terms, None, os.fsencode(place.path.absolute()), place.keeper)
        return cls(terms, place, b"", False)

    def require_same(self, name: str, other: OpenShards) -> None:
        """Check that another request for the shards of a name has the same arguments.

        Raises:
            ConfigurationError: it has others; the text names them, with both values.
        """
        ours, theirs = self._arguments, other._arguments
        found = [
            f"{argument}={ours[argument]}, now {theirs[argument]}"
            for argument in ours
            if ours[argument] != theirs[argument]
        ]
        found = [
            _columns_text(ours["schema"], theirs["schema"]) if text.startswith("schema=") else text for text in found
        ]
        if found:
            raise ConfigurationError(f"the shards {name!r} were started with other arguments: {', '.join(found)}")

    @property
    def _arguments(self) -> dict[str, Any]:
        """The arguments of `shards`, by their names, and the schema in place of the events."""
        terms, journal = self.terms, os.fsdecode(self.folder) if self.journal is None else self.place
        found = {name: getattr(terms, name) for name in ("cls", "schema", "shards", "keep", "archive")}
        return found | attrs.asdict(terms.limits) | {"keeper": self.keeper, "journal": journal}  # type: ignore[arg-type]  # it is an attrs class

    @property
    def place(self) -> Place:
        """Where the log is. `ConfigurationError` if it is in a store whose class this process does not know."""
        if self.journal is None:
            return Folder(Path(os.fsdecode(self.folder)), self.keeper)
        found: Place = self.journal.store if isinstance(self.journal, SentStore) else self.journal
        return found

    def sent(self) -> OpenShards:
        """Return the request as it travels."""
        if self.journal is None or isinstance(self.journal, Ref):
            return self
        return OpenShards(self.terms, SentStore.of(self.journal), self.folder, self.keeper)


def _columns_text(ours: bytes, theirs: bytes) -> str:
    """Name the columns in which two schemas differ."""
    first, second = ({str(field) for field in pa.ipc.read_schema(pa.py_buffer(each))} for each in (ours, theirs))
    differ = ", ".join(sorted(first ^ second)) or "their order"
    return f"events= (their columns differ: {differ}; to change events, start the driver and all nodes again)"


def has_streams(place: Place) -> bool:
    """Return whether rows go to the log as bytes, because it may be in another process."""
    return place.keeper if isinstance(place, Folder) else isinstance(place, Ref)


async def open_journal(root: Actor[Any], place: Place, wanted: pa.Schema, shards: int) -> tuple[Ref[Any], pa.Schema]:
    """Open the journal of a log, for as long as `root` lives.

    Args:
        root: the actor above the shards.
        place: where it is.
        wanted: the columns of a new log of these events.
        shards: the number of its partitions.

    Returns:
        The journal, and its columns: those that the log had, then those that its events add.

    Raises:
        LevadaError, OSError: the keeper cannot be started, or the log cannot be opened with these.
    """
    if not isinstance(place, Folder):
        journal = place if isinstance(place, Ref) else await root.enter(_opened(root.system, root.ref, place, shards))
        return journal, await _columns_of(journal, wanted, shards)
    path, config = place.path, log_config(shards)
    in_thread = root.system.platform.run_in_thread
    columns = await until_free(lambda: in_thread(_prepare, path, wanted, shards), UNLOCKED_WITHIN)
    if place.keeper:
        return await root.enter(_kept(root.system, root.ref, path, columns, config)), columns
    factory = partial(Journal, path, columns, config=config, reopen_every=REOPEN_EVERY)
    return root.spawn(factory, name="journal", mailbox=bounded(256), supervise=AGAIN), columns


@asynccontextmanager
async def _opened(system: ActorSystem, root: Ref[Any], store: LogStore, shards: int) -> AsyncIterator[Ref[Any]]:
    """Open a store, for the actor above the shards."""
    async with store.open(system, shards) as journal, _ended_first(system, root):
        yield journal


@asynccontextmanager
async def _kept(
    system: ActorSystem, root: Ref[Any], folder: Path, schema: pa.Schema, config: JournalConfig
) -> AsyncIterator[Ref[Any]]:
    """Keep a journal in a child process, for the actor above the shards."""
    from levada.actors.journal import keeper  # a program without other processes needs none of it

    async with keeper(system, name=f"{root.path[1:]}-keeper") as keep:
        journal = await keep.open(folder, schema, config=config)
        async with _ended_first(system, root):
            try:
                yield journal
            finally:
                journal.stop()


@asynccontextmanager
async def _ended_first(system: ActorSystem, root: Ref[Any]) -> AsyncIterator[None]:
    """Have the shards end first at the end of the system: the youngest actors end first, and what reaches the log is younger than the shards."""

    async def end() -> None:
        root.stop()
        await root.terminated()

    forget = system.at_end("accept", end)
    try:
        yield
    finally:
        forget()


def _prepare(folder: Path, wanted: pa.Schema, shards: int) -> pa.Schema:
    """Return the columns of the log in a folder. If the folder cannot be opened, this raises before an actor fails."""
    config = log_config(shards)
    try:
        Store.try_to_open(folder, wanted, config)
    except SchemaMismatch:  # the log has columns of earlier events, or in another order
        with inspect(folder) as found:
            event_columns(found.schema, str(folder))  # raises, if it is another kind of journal
        there = Store.try_to_open(folder, None, config)
        columns = grown(there, wanted)
        check_growth(there, columns, where=str(folder))
        return columns
    return wanted


_NO_ENTITY: Final = "\0"
"""Has no rows, so to look for them reads none."""


async def _columns_of(journal: Ref[Any], wanted: pa.Schema, shards: int) -> pa.Schema:
    """Return the columns of the log of a journal, which has them all, or adds them."""
    try:
        extent = await journal.ask(GetExtent())
        there = pa.ipc.read_schema(pa.py_buffer(await journal.ask(GetSchema())))
        columns = grown(there, wanted)
        if len(there):  # a new log may have no columns yet
            check_growth(there, columns)
        if len(columns) > len(there):
            asked = GetSchema(columns.serialize().to_pybytes())
            there = pa.ipc.read_schema(pa.py_buffer(await journal.ask(asked)))
    except ActorError as error:
        raise journal_error(error) or error from error.__cause__
    if len(extent.end) != shards:
        raise ConfigurationError(f"shards is {shards}, wanted {len(extent.end)}, as many as the journal has partitions")
    lacks = columns.names[len(there) :]
    if lacks:
        raise ConfigurationError(
            f"the journal lacks the columns {', '.join(lacks)}: open it with log_columns(events, there), where there is its schema"
        )
    try:
        await journal.ask(ReadEntity(_NO_ENTITY, partition=0, newest=1, max_bytes=1))
    except LevadaError as error:
        refusal = error if isinstance(error, JournalError) else journal_error(error)
        if type(refusal) is not JournalError:
            raise
        raise ConfigurationError(
            f"the journal finds no rows of an entity: open it with the config log_config({shards}) ({refusal})"
        ) from error
    return columns
