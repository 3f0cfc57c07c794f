"""The kinds of cells: one for each kind of mailbox, and variants with checks (strict mode) or with contexts (traced systems).

Private field used here: ``Actor._is_traced``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from levada.framework.mailbox import Conflate, MailboxPolicy
from levada.framework.ref import DEFAULT_TIMEOUT, FromThread, check_timeout

from .ask import BEFORE_ASKS, RemoteAsk, RemoteTell, Wrapped, prepare_to_ask, stopped_error
from .bounded import BoundedCell, StoreCell
from .cell import Cell, CellFromThread
from .phase import STOPPED
from .tracing import TracedAsk, TracedTell, TracedThreadAsk

if TYPE_CHECKING:
    from levada.framework.tracing import Tracing

    from .contract import ActorObject
    from .scheduler import RunQueue

__all__ = ["StrictBoundedCell", "StrictCell", "StrictStoreCell", "make_cell"]


class StrictCell(Cell):
    """Checks each `tell` and each answer, for tests; see `levada.framework.testing`. Mixed into the other kinds of cells."""

    __slots__ = ()

    def tell(self, message: Any) -> None:
        self.system.strict_check(self, message)
        super().tell(message)

    async def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        return self.system.strict_answer(self, message, await super().ask(message, timeout=timeout))


class StrictBoundedCell(StrictCell, BoundedCell):
    """`StrictCell` with a bounded mailbox."""

    __slots__ = ()


class StrictStoreCell(StrictCell, StoreCell):
    """`StrictCell` with a mailbox that drops or conflates."""

    __slots__ = ()


class _TracedCell(Cell):
    """Puts each message into an envelope with the context of its sender. Mixed into the other kinds of cells."""

    __slots__ = ()

    traced = True

    @property
    def tracing(self) -> Tracing:
        """The system's tracing."""
        tracing = self.system.tracing
        assert tracing is not None
        return tracing

    def enveloped(self, message: Any) -> Any:
        if not isinstance(message, Wrapped):
            return TracedTell(message, self.tracing.current())
        if isinstance(message, RemoteTell | RemoteAsk) and message.context is None:
            message.context = self.tracing.current()
        return message

    def tell(self, message: Any) -> None:
        super().tell(self.enveloped(message))

    def enqueue(self, message: Any, *, patient: bool = False) -> None:
        super().enqueue(self.enveloped(message), patient=patient)

    async def send(self, message: Any) -> None:
        await super().send(self.enveloped(message))

    def try_tell(self, message: Any) -> bool:
        return super().try_tell(self.enveloped(message))

    async def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        # Always through the mailbox: within a span, a call in the asker's task would save little.
        await trio.lowlevel.checkpoint_if_cancelled()
        check_timeout(timeout)
        if BEFORE_ASKS:
            await prepare_to_ask()
        system = self.system
        self.check_thread("ask to")
        if self.phase is STOPPED:
            raise stopped_error(self, self.reason, message)
        with self.tracing.ask(self, system.observe.kind(self), message) as span:
            question = TracedAsk(message, self, span.context)
            self.enqueue(question)
            edge = system.waits.begin(self, question)
            try:
                question.start_timer(timeout)
                return await question.wait()
            finally:
                system.waits.end(edge)

    @property
    def from_thread(self) -> FromThread[Any]:
        return _TracedFromThread(self)


class _TracedBoundedCell(_TracedCell, BoundedCell):
    __slots__ = ()


class _TracedStoreCell(_TracedCell, StoreCell):
    __slots__ = ()


class _TracedFromThread(CellFromThread):
    __slots__ = ()

    cell: _TracedCell

    def tell(self, message: Any) -> None:
        super().tell(self.cell.enveloped(message))

    def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        cell = self.cell
        with cell.tracing.ask(cell, cell.system.observe.kind(cell), message) as span:
            return self.put(TracedThreadAsk(message, cell, span.context), timeout)


_PLAIN = (Cell, BoundedCell, StoreCell)
_STRICT = (StrictCell, StrictBoundedCell, StrictStoreCell)
_TRACED = (_TracedCell, _TracedBoundedCell, _TracedStoreCell)


def make_cell(
    scheduler: RunQueue,
    actor: ActorObject,
    parent: Cell | None,
    name: str | None,
    number: int,
    policy: MailboxPolicy,
    *,
    strict: bool,
) -> Cell:
    """Make the kind of cell that the mailbox policy needs."""
    traced = scheduler.system.tracing is not None and actor._is_traced
    unbounded, bounded, store = _STRICT if strict else _TRACED if traced else _PLAIN
    if policy.capacity is None:
        return unbounded(scheduler, actor, parent, name, number)
    kind = store if policy.overflow == "drop_old" or isinstance(policy.overflow, Conflate) else bounded
    return kind(scheduler, actor, parent, name, number, policy)
