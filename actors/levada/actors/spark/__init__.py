"""The bridge to Spark: mailboxes kept by journals, read and written in Arrow batches.

Needs the extra: ``pip install 'levada[spark]'``.

`serve_bridge` opens mailboxes to Spark, `session` starts a Spark session that reads and writes them by ``format("mailbox")``.
`read_mailbox` reads them without Spark; ``pip install 'levada[journal]'`` is enough for it.
The journals are `levada.actors.journal`'s. ``docs/explanation/journal.md`` lists the guarantees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import pyarrow as _  # noqa: F401 - to name the missing package
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "levada.actors.spark needs pyarrow: pip install 'levada[spark]'", name="pyarrow"
    ) from missing

from levada.actors.on_demand import on_demand

from .session import Java, find_java, session  # here at once: the module and the function have the same name

if TYPE_CHECKING:
    from .asks import AskRows, EachRow, RemoteActor, ask, ask_batches, ask_many
    from .bridge import Bridge, Delivery, Mailbox, RowKey, serve_bridge
    from .desk import BridgeConfig, Desk, serve_asks
    from .entities import EachCommand
    from .protocol import ActorFailed, BridgeError, BridgeRefused, BridgeUnreachable, EpochChanged, UnknownName
    from .reading import read_mailbox

__all__ = [
    "ActorFailed", "AskRows", "Bridge", "BridgeConfig", "BridgeError", "BridgeRefused", "BridgeUnreachable", "Delivery", "Desk",
    "EachCommand", "EachRow", "EpochChanged", "Java", "Mailbox", "RemoteActor", "RowKey", "UnknownName", "ask", "ask_batches", "ask_many",
    "find_java", "read_mailbox", "serve_asks", "serve_bridge", "session",
]  # fmt: skip

_MODULES = "protocol", "asks", "reading", "entities", "desk", "bridge"
"""The modules that have these names, the modules with the fewest imports first."""

# Each worker process of Spark imports this package, and needs little of it.
__getattr__ = on_demand(__name__, _MODULES, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
