"""`trim_log`: a log of durable actors, trimmed once, whether a program has it open or not."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from levada.actors.journal import GetExtent, Store, Trimmed, journal_error
from levada.actors.journal.inspection import inspect, journals_in
from levada.actors.journal.log_events import event_columns
from levada.actors.journal.places import archive_place, misplaced
from levada.actors.journal.trim_requests import TrimRequest, ask_to_trim
from levada.framework import ActorSystem
from levada.framework.errors import ActorError, ConfigurationError
from levada.framework.files import StrPath, folder_path
from levada.framework.platform import Platform

from .opening import database_at
from .rows import log_config
from .settings import kept_from, require_keep

if TYPE_CHECKING:
    from levada.actors.postgres import PostgresStore

__all__ = ["trim_log"]


async def trim_log(
    system: ActorSystem,
    source: str | os.PathLike[str],
    *,
    keep: float,
    remember: int = 256,
    archive: StrPath | None = None,
    forget_archive: bool = False,
    timeout: float = 600.0,
) -> int:
    """Remove old rows behind snapshots from the log of a durable class, as ``shards(keep=…)`` does from time to time.

    The program of the log may run meanwhile: the process that has a folder open does it then. This function does not know the class. So it takes any
    snapshot for one that the class can read: call it for a class whose fields have not changed since.

    Args:
        system: the system of this process.
        source: a folder; or the URL of a database, with the name of the table: ``postgresql://host/bank?table=accounts``.
        keep: seconds. Younger rows stay.
        remember: how many answers of commands stay for each entity; what the program gives to `shards`, or more.
        archive: where old rows are written first, as `Keep.archive`; what the program gives to `shards`. None: there is no archive.
        forget_archive: the archive that the log remembers is gone for good; `archive` may be a new one.
        timeout: seconds to wait for a process that has the folder open.

    Returns:
        The number of rows that went.

    Raises:
        ConfigurationError: there is no log of a durable class, or `keep`, `remember` or `archive` is invalid; or log and
            archive are inside each other.
        JournalLocked: the process that has the folder open does not answer.
        JournalError, OSError: the log cannot be read or written; the archive is out of reach, lacks rows, or is another log's; or the log has an
            archive, and it is not named.

    Cancellation:
        rows that are gone by then stay gone.
    """
    require_keep(keep)
    if not isinstance(remember, int) or remember < 1:
        raise ConfigurationError(f"remember is {remember!r}, wanted a whole number of 1 or more")
    older = kept_from(system.platform.time(), keep)
    place = "" if archive is None else archive_place(archive)
    wanted = TrimRequest(older, remember, place, forget_archive)
    store = database_at(source)
    if store is not None:
        return await _trim_database(system, store, wanted)
    path = folder_path(source)
    if wrong := misplaced(place, path):
        raise ConfigurationError(wrong)
    with ExitStack() as turn:
        rows = await system.platform.run_in_thread(_ask_writer, system.platform, path, wanted, timeout, turn)
        return await _trim_folder(system.platform, path, wanted) if rows is None else rows


def _ask_writer(platform: Platform, path: Path, wanted: TrimRequest, timeout: float, turn: ExitStack) -> int | None:
    if journals_in(path) != [path]:
        raise ConfigurationError(f"{path} is not a log: name a folder that has a ledger.sqlite")
    return ask_to_trim(platform, path, wanted, timeout, turn)


async def _trim_folder(platform: Platform, path: Path, wanted: TrimRequest) -> int:
    from levada.actors.journal.archive import archived_rows  # Arrow's Parquet takes 50 ms

    def opened() -> Store:
        with inspect(path) as found:
            event_columns(found.schema, str(path))  # raises, if it is another kind of journal
            shards = len(found.partitions)
        return Store.open(path, None, log_config(shards))

    run, rows = platform.run_in_thread, 0
    store = await run(opened)
    try:
        for shard in store.extent().end:
            to_go = await archived_rows(store, wanted.question(shard), platform.files, run, run)
            rows += sum(await run(list, store.trim(shard, to_go)))
    finally:
        with trio.CancelScope(shield=True):
            await run(store.close)
    return rows


async def _trim_database(system: ActorSystem, store: PostgresStore, wanted: TrimRequest) -> int:
    from levada.actors.postgres.copying import still_postgres

    def shards_of() -> int:
        with still_postgres(store.address) as still:  # raises if there is no log; to open one would make it
            return len(still.ends)

    rows = 0
    async with store.open(system, await system.platform.run_in_thread(shards_of)) as log:
        try:
            for shard in (await log.ask(GetExtent(), timeout=None)).end:
                done: Trimmed = await log.ask(wanted.question(shard), timeout=None)
                rows += done.rows
        except ActorError as error:
            raise journal_error(error) or error from error
    return rows
