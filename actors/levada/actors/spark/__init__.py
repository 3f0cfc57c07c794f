"""The bridge to Spark: a journal on the actors' side, read and written in Arrow batches.

Needs the extra: ``pip install 'levada[spark]'``.

`serve_bridge` opens mailboxes to Spark, `session` starts a Spark session that reads and writes them by ``format("mailbox")``.
`Journal` is the actor that keeps a journal, `Store` the same on the disk, for programs without actors. `columns_of` turns message classes
into Arrow columns. For the guarantees see ``docs/explanation/journal.md``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

try:
    import pyarrow as _  # noqa: F401 - only to say what is missing
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "levada.actors.spark needs pyarrow: pip install 'levada[spark]'", name="pyarrow"
    ) from missing

from .session import Java, find_java, session  # here at once: the module and the function have the same name

if TYPE_CHECKING:
    from .asks import AskRows, EachRow, RemoteActor, ask, ask_batches, ask_many
    from .bridge import Bridge, BridgeConfig, Delivery, Mailbox, RowKey, serve_bridge
    from .columns import Columns, Envelope, columns_of
    from .config import JournalConfig
    from .errors import (
        JournalBehind,
        JournalDamaged,
        JournalError,
        JournalFull,
        JournalLocked,
        JournalUnwritable,
        OffsetGone,
        SchemaMismatch,
    )
    from .extent import Appended, Extent, StoreStatistics, partition_of
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
        GetReach,
        GetSchema,
        Journal,
        JournalStatistics,
        OffsetWithin,
        Read,
        StageRows,
    )
    from .ledger import Delivered, Reach
    from .protocol import ActorFailed, BridgeError, BridgeRefused, EpochChanged, UnknownName
    from .schema import check_growth, differences, fit
    from .segments import Block, Message
    from .staging import Stage
    from .store import Store

__all__ = [
    "ActorFailed", "Append", "Appended", "AskRows", "AwaitRows", "Block", "Bridge", "BridgeConfig", "BridgeError",
    "BridgeRefused", "Columns", "CommitGroup", "DeclareGroup", "Deliver", "Delivered", "Delivery", "DiscardStaged",
    "EachRow", "Envelope", "EpochChanged", "Extent", "ForgetGroup", "GetExtent", "GetGroups",
    "GetJournalStatistics", "GetReach", "GetSchema", "Java", "Journal", "JournalBehind", "JournalConfig",
    "JournalDamaged", "JournalError", "JournalFull", "JournalLocked", "JournalStatistics", "JournalUnwritable",
    "Mailbox", "Message", "OffsetGone", "OffsetWithin", "Reach", "Read", "RemoteActor", "RowKey", "SchemaMismatch",
    "Stage", "StageRows", "Store", "StoreStatistics", "UnknownName", "ask", "ask_batches", "ask_many",
    "check_growth", "columns_of", "differences", "find_java", "fit", "partition_of", "serve_bridge", "session",
]  # fmt: skip

_MODULES = (
    "errors", "protocol", "schema", "asks", "ledger", "segments", "config", "extent", "staging", "store", "journal", "bridge",
)  # fmt: skip
"""Where the names above are, those first that import least."""


def __getattr__(name: str) -> object:
    """Import a name on first use: each of Spark's worker processes imports this package, and most of it is for the actors' side."""
    if name in __all__:
        for module in _MODULES:
            found: object = vars(import_module(f".{module}", __name__)).get(name)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
