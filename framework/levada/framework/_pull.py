"""The router whose routees pull messages. `levada.framework.router` has the theory.

Private fields used here: ``Cell._batch``, ``Cell._box``, ``Cell._handled``, ``Cell._idle``, ``Cell._scheduler``.
"""

from __future__ import annotations

from _thread import get_ident
from collections import deque
from typing import Any

from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, enable_ki_protection, wait_task_rescheduled

from ._routees import Resize, RouterBase
from ._runtime.ask import Ask, RemoteTell
from ._runtime.cell import Cell
from ._runtime.dispatch import RUNTIME_ENTRIES
from ._runtime.phase import RUNNING
from ._runtime.tokens import TURN, Stop, Take
from .errors import AskCycle, ConfigurationError
from .loop import Inbox
from .ref import Ref

__all__ = ["PullRouter"]


class PullRouter(RouterBase):
    """Lets its routees take messages, see `pull`. It sleeps; its inbox does the work."""

    @property
    def _inbox(self) -> _PullInbox:
        inbox: _PullInbox = self._bound().make_extras().inbox  # not a field: the inbox refers to this router
        return inbox

    def check(self, ref: Ref[Any]) -> None:
        if not isinstance(ref, Cell):
            raise ConfigurationError(
                f"{ref.path} is in another system and cannot pull from {self.ref.path}: use round_robin() or another "
                "routing that hands messages on"
            )

    def add(self, ref: Any, label: str) -> None:
        self._inbox.add(ref)

    def remove(self, ref: Ref[Any]) -> None:
        self._inbox.remove(ref)

    async def run(self) -> None:
        await self._inbox.run()

    def _start(self) -> Any:
        cell = self._bound()
        inbox = cell.make_extras().inbox = _PullInbox(cell, self)
        cell._scheduler = inbox  # type: ignore[assignment]
        return self._run_loop(inbox)


class Pull(Take):
    """In a routee's mailbox: take the router's oldest message here. A busy routee has one for each router, a free one none."""

    __slots__ = ("_inbox", "_message", "_routee")

    def __init__(self, inbox: _PullInbox, routee: Cell) -> None:
        self._inbox = inbox
        self._routee = routee
        self._message: Any = None

    def next(self, cell: Any) -> Any:
        self._message = self._inbox.take(self._routee, self)
        return self._message

    def taken(self, cell: Any) -> Any:
        return self._message


class _PullInbox(Inbox[Any]):
    """The router's mailbox. The cell always counts as idle, so that each message leads to a call of `append`."""

    def __init__(self, cell: Cell, router: PullRouter) -> None:
        super().__init__(cell)
        self._router = router
        self._pulls: dict[Cell, Pull] = {}
        """The `Pull` of each routee."""
        self._free: deque[Cell] = deque()
        """Routees without a `Pull` in their mailbox."""

    # Senders call the next two.
    def wake(self, cell: Cell) -> None:
        if get_ident() != self.thread:
            raise cell.wrong_thread_error("tell")

    @enable_ki_protection
    def append(self, _: Cell) -> None:
        cell = self._cell
        cell._idle = True
        box = cell._box
        if box:
            kind = type(box[-1])
            if kind is Resize:
                # At once: more routees are wanted now, not when the few there are reach this message.
                self._resize(box.pop().size)
                return
            if kind is Stop and not self._pulls:
                stop = box.pop()
                cell.entry_left(stop)
                self._see_stop(stop)
                return
        self._offer()

    # The router calls the next four.
    async def run(self) -> None:
        """Sleep until the router is asked to end."""
        self._cell._idle = True
        try:
            if not self._pulls:
                self._look_for_stop()
            for _ in range(min(self._cell.depth(), len(self._free))):
                self._offer()
            if not self._ended:
                self._task = current_task()
                await wait_task_rescheduled(self._give_up)
        finally:
            self._ended = True
            self._cell._idle = False

    def add(self, routee: Cell) -> None:
        """Let a routee take messages from now on."""
        self._pulls[routee] = Pull(self, routee)
        self._free.append(routee)
        if self._cell.depth():
            self._offer()

    def remove(self, routee: Any) -> None:
        """Let a routee take no more messages; it may finish the current one."""
        if self._pulls.pop(routee, None) is None:
            return
        if routee in self._free:
            self._free.remove(routee)
        elif self._cell.depth():
            self._offer()  # it may have been about to take a message that another routee can take
        if not self._pulls:
            self._look_for_stop()

    def end(self) -> None:
        self._ended = True
        super().wake(self._cell)

    @enable_ki_protection
    def take(self, routee: Cell, pull: Pull) -> Any:
        """Return the oldest message, for a routee in its turn."""
        if self._ended or self._pulls.get(routee) is not pull:
            return TURN
        cell = self._cell
        while batch := cell.fill_batch():
            entry = batch.pop()
            kind = type(entry)
            if kind is Stop:
                cell.entry_left(entry)
                self._see_stop(entry)
                return TURN
            if isinstance(entry, Take):
                entry = entry.next(cell)
                kind = type(entry)
            if kind is RemoteTell and type(entry.message) is Resize:
                entry, kind = entry.message, Resize
            if kind is Resize:
                self._resize(entry.size)
                if self._pulls.get(routee) is not pull:
                    return TURN
            elif isinstance(entry, Ask):
                if entry.settled:
                    continue
                try:
                    self._router.system.waits.forward(entry, routee)
                except AskCycle as error:
                    entry.fail(error)
                    continue
                cell._handled += 1
                routee.admit(pull)
                return entry
            elif kind in RUNTIME_ENTRIES and kind is not RemoteTell:
                cell._handled += 1  # it uncounts itself
                RUNTIME_ENTRIES[kind](self._router, entry)
            else:
                cell._handled += 1
                routee.admit(pull)
                return entry
        self._free.append(routee)
        return TURN

    def _offer(self) -> None:
        """Let a free routee look for a message, if possible one that is not about to restart."""
        free = self._free
        if free and not self._ended:
            for _ in range(len(free)):
                if free[0].phase is RUNNING:
                    break
                free.rotate(-1)
            routee = free.popleft()
            routee.admit(self._pulls[routee])

    def _look_for_stop(self) -> None:
        """Find a queued stop: without routees nothing else would reach it."""
        for entry in (*self._cell._batch, *self._cell._box):
            if type(entry) is Stop:
                self._see_stop(entry)

    def _resize(self, size: int) -> None:
        try:
            self._router.source.resize(self._router, size)
        except Exception as error:  # noqa: BLE001 - from the factory: the router fails, not the actor that runs now
            host = self._cell.make_extras().host
            self._router.system.lifecycle.task_failed(self._cell, host, error)

    def _see_stop(self, stop: Stop) -> None:
        self.stop = stop
        self.end()

    def _give_up(self, _: RaiseCancelT) -> Abort:
        self._task: Task | None = None
        return Abort.SUCCEEDED
