"""A journal: an actor that keeps rows on the disk, in Arrow's columns.

Needs the extra: ``pip install 'levada[journal]'``.

`Journal` is the actor, `Store` the same on the disk, for programs without actors. `columns_of` turns message classes into Arrow columns.
For the guarantees see ``docs/explanation/journal.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import pyarrow as _  # noqa: F401 - only to say what is missing
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "levada.actors.journal needs pyarrow: pip install 'levada[journal]'", name="pyarrow"
    ) from missing

from levada.actors.on_demand import on_demand

if TYPE_CHECKING:
    from .actor import Journal
    from .blocks import Block, Message
    from .columns import Columns, Envelope, columns_of
    from .config import JournalConfig, Keyed
    from .copying import Copied, backup, restore
    from .errors import (
        BatchReused,
        CommandReused,
        CopyUnfinished,
        JournalBehind,
        JournalDamaged,
        JournalError,
        JournalFull,
        JournalLocked,
        JournalUnwritable,
        OffsetGone,
        SchemaMismatch,
        journal_error,
    )
    from .exporting import Exported, export
    from .extent import Appended, Extent, Fenced, StoreStatistics, partition_of
    from .ipc import rows_of_stream, stream_of
    from .keeper_process import Keeper, keeper
    from .keys import Taken
    from .ledger import Delivered, Reach
    from .log import Answer, CopiedLog, Log, LogStore, MailboxLog, TailedLog, TrimmedLog
    from .questions import (
        Append,
        AwaitRows,
        CommitGroup,
        CopyRows,
        DeclareGroup,
        Deliver,
        DiscardOlder,
        DiscardStaged,
        Erased,
        EraseEntity,
        FindCommand,
        ForgetGroup,
        Found,
        GetExtent,
        GetGroups,
        GetJournalStatistics,
        GetReach,
        GetSchema,
        JournalStatistics,
        OffsetWithin,
        Read,
        ReadEntity,
        ReadRows,
        Rows,
        StageRows,
        Trimmed,
        TrimRows,
    )
    from .schema import check_growth, differences, fit
    from .staging import Stage
    from .store import Store

__all__ = [
    "Answer", "Append", "Appended", "AwaitRows", "BatchReused", "Block", "Columns", "CommandReused", "CommitGroup", "Copied", "CopiedLog",
    "CopyRows", "CopyUnfinished", "DeclareGroup", "Deliver", "Delivered", "DiscardOlder", "DiscardStaged", "Envelope", "EraseEntity", "Erased",
    "Exported", "Extent", "Fenced", "FindCommand", "ForgetGroup", "Found", "GetExtent", "GetGroups", "GetJournalStatistics", "GetReach",
    "GetSchema", "Journal", "JournalBehind", "JournalConfig", "JournalDamaged", "JournalError", "JournalFull", "JournalLocked", "JournalStatistics",
    "JournalUnwritable", "Keeper", "Keyed", "Log", "LogStore", "MailboxLog", "Message", "OffsetGone", "OffsetWithin", "Reach", "Read", "ReadEntity",
    "ReadRows", "Rows", "SchemaMismatch", "Stage", "StageRows", "Store", "StoreStatistics", "TailedLog", "Taken", "TrimRows", "Trimmed",
    "TrimmedLog", "backup", "check_growth", "columns_of", "differences", "export", "fit", "journal_error", "keeper", "partition_of", "restore",
    "rows_of_stream", "stream_of",
]  # fmt: skip

_MODULES = (
    "errors",
    "schema",
    "columns",
    "ledger",
    "blocks",
    "config",
    "extent",
    "keys",
    "staging",
    "store",
    "ipc",
    "questions",
    "log",
    "actor",
    "copying",
    "exporting",
    "keeper_process",
)
"""Where the names above are, those first that import least."""

# Spark's worker processes need little of this package.
__getattr__ = on_demand(__name__, _MODULES, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
