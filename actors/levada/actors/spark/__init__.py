"""The bridge to Spark: a journal on the actors' side, read and written in Arrow batches.

Needs the extra: ``pip install 'levada[spark]'``.

`Journal` is the actor that keeps a journal, `Store` what it keeps on the disk, for programs without actors. `columns_of` turns message classes
into Arrow columns; `session` starts Spark. What is guaranteed, and when, stands in ``docs/explanation/journal.md``.
"""

from __future__ import annotations

try:
    import pyarrow as _  # noqa: F401 - only to say what is missing
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "levada.actors.spark needs pyarrow: pip install 'levada[spark]'", name="pyarrow"
    ) from missing

from .columns import Columns, Envelope, columns_of
from .errors import (
    JournalDamaged,
    JournalError,
    JournalFull,
    JournalLocked,
    JournalUnwritable,
    OffsetGone,
    SchemaMismatch,
)
from .journal import (
    Append,
    AwaitRows,
    CommitGroup,
    DeclareGroup,
    Deliver,
    DiscardStaged,
    ForgetGroup,
    GetExtent,
    GetGroups,
    GetJournalStatistics,
    GetSchema,
    Journal,
    JournalStatistics,
    OffsetWithin,
    Read,
    StageRows,
)
from .ledger import Delivered
from .schema import check_growth, differences, fit
from .segments import Block, Message
from .session import Java, find_java, session
from .store import Appended, Extent, JournalConfig, Stage, Store, StoreStatistics, partition_of

__all__ = [
    "Append",
    "Appended",
    "AwaitRows",
    "Block",
    "Columns",
    "CommitGroup",
    "DeclareGroup",
    "Deliver",
    "Delivered",
    "DiscardStaged",
    "Envelope",
    "Extent",
    "ForgetGroup",
    "GetExtent",
    "GetGroups",
    "GetJournalStatistics",
    "GetSchema",
    "Java",
    "Journal",
    "JournalConfig",
    "JournalDamaged",
    "JournalError",
    "JournalFull",
    "JournalLocked",
    "JournalStatistics",
    "JournalUnwritable",
    "Message",
    "OffsetGone",
    "OffsetWithin",
    "Read",
    "SchemaMismatch",
    "Stage",
    "StageRows",
    "Store",
    "StoreStatistics",
    "check_growth",
    "columns_of",
    "differences",
    "find_java",
    "fit",
    "partition_of",
    "session",
]
