"""`trim_log`: a log of durable actors, trimmed once, whether a program has it open or not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from levada.actors.journal import GetExtent, Store, Trimmed, TrimRows, journal_error
from levada.actors.journal.inspection import inspect, journals_in
from levada.actors.journal.places import archive_place
from levada.actors.journal.trim_requests import ask_to_trim
from levada.framework import ActorSystem
from levada.framework.errors import ActorError, ConfigurationError
from levada.framework.files import StrPath, folder_path
from levada.framework.platform import Platform

from .opening import database_at
from .rows import log_config
from .settings import require_keep

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
        timeout: seconds to wait for a process that has the folder open.

    Returns:
        The number of rows that went.

    Raises:
        ConfigurationError: there is no log of a durable class, or `keep`, `remember` or `archive` is invalid.
        JournalLocked: the process that has the folder open does not answer.
        JournalError, OSError: the log cannot be read or written, or the archive is out of reach or another log's.

    Cancellation:
        rows that are gone by then stay gone.
    """
    require_keep(keep)
    if not isinstance(remember, int) or remember < 1:
        raise ConfigurationError(f"remember is {remember!r}, wanted a whole number of 1 or more")
    older = system.platform.time() - keep
    place = "" if archive is None else archive_place(archive)
    store = database_at(source)
    if store is not None:
        return await _trim_database(system, store, older, remember, place)
    path = folder_path(source)
    return await system.platform.run_in_thread(_trim_folder, system.platform, path, older, remember, place, timeout)


def _trim_folder(platform: Platform, path: Path, older: float, remember: int, archive: str, timeout: float) -> int:
    if journals_in(path) != [path]:
        raise ConfigurationError(f"{path} is not a log: name a folder that has a ledger.sqlite")
    rows = ask_to_trim(platform, path, older, remember, archive, timeout)
    if rows is not None:
        return rows
    from levada.actors.journal.archive import rows_to_go  # Arrow's Parquet takes 50 ms

    with inspect(path) as found:
        shards = len(found.partitions)
    rows = 0
    with Store.open(path, None, log_config(shards)) as store:
        for shard in range(shards):
            to_go = rows_to_go(store, TrimRows(shard, older, remember, archive=archive), platform.files)
            rows += sum(store.trim(shard, to_go))
    return rows


async def _trim_database(system: ActorSystem, store: PostgresStore, older: float, remember: int, archive: str) -> int:
    from levada.actors.postgres.copying import still_postgres

    def shards_of() -> int:
        with still_postgres(store.address) as still:  # raises if there is no log; to open one would make it
            return len(still.ends)

    rows = 0
    async with store.open(system, await system.platform.run_in_thread(shards_of)) as log:
        try:
            for shard in (await log.ask(GetExtent(), timeout=None)).end:
                m = TrimRows(shard, older, remember, archive=archive)
                done: Trimmed = await log.ask(m, timeout=None)
                rows += done.rows
        except ActorError as error:
            raise journal_error(error) or error from error
    return rows
