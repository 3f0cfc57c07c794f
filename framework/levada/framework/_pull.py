"""The router whose routees pull messages. `levada.framework.router` has the theory.

Private fields used here: ``Cell._batch``, ``Cell._box``, ``Cell._handled``, ``Cell._idle``, ``Cell._scheduler``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from trio.lowlevel import enable_ki_protection

from ._routees import Resize, RouterBase
from ._runtime.ask import Ask, RemoteTell, content_of
from ._runtime.cell import Cell
from ._runtime.channel_core import Outcome
from ._runtime.dispatch import RUNTIME_ENTRIES
from ._runtime.phase import RUNNING, STOPPED
from ._runtime.tokens import TURN, Stop, Take
from ._runtime.tracing import TracedTell
from .errors import AskCycle, ConfigurationError
from .loop import SleepingInbox
from .ref import Ref

__all__ = ["PullRouter", "Work"]

_TELLS = (RemoteTell, TracedTell)


class PullRouter(RouterBase):
    """Lets its routees take messages, see `pull`. It sleeps; its inbox does the work."""

    @property
    def _inbox(self) -> _PullInbox:
        inbox: _PullInbox = self._bound().make_extras().inbox  # not a field: the inbox refers to this router
        return inbox

    def check(self, ref: Ref[Any]) -> None:
        if not isinstance(ref, Cell) and not ref.takes_work:
            raise ConfigurationError(
                f"{ref.where} cannot pull from {self.ref.path}, because its system does not report finished work: update it, "
                "or use round_robin() or another routing that hands messages on"
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

    __slots__ = ("_inbox", "_routee")

    def __init__(self, inbox: _PullInbox, routee: Cell) -> None:
        self._inbox = inbox
        self._routee = routee

    def is_ready(self) -> bool:
        """Whether the routee is not about to restart."""
        return self._routee.phase is RUNNING

    def offer(self) -> None:
        """Make the routee look for a message in its next turn."""
        self._routee.admit(self)

    @enable_ki_protection
    def next(self, cell: Any) -> Any:
        message = self._message = self._inbox.take(self._routee, self)
        if message is not TURN:
            self._routee.admit(self)
        return message


class RemotePull:
    """Gives a routee in another system one message at a time. The other side has a `Work` in the routee's mailbox."""

    __slots__ = ("_inbox", "_routee")

    def __init__(self, inbox: _PullInbox, routee: Ref[Any]) -> None:
        self._inbox = inbox
        self._routee = routee

    def is_ready(self) -> bool:
        """Always: its system does not say when it restarts."""
        return True

    def offer(self) -> None:
        """Send the router's oldest message. A routee that has ended gets none; it is about to be removed."""
        routee = self._routee
        while routee.is_alive and (entry := self._inbox.take(routee, self)) is not TURN:
            work = entry if isinstance(entry, Ask | TracedTell) else content_of(entry)
            if routee.work(work, functools.partial(self._over, entry)):
                return

    def _over(self, entry: Any, outcome: Outcome) -> None:
        """Go on: a finished routee gets the next message, and a message that no handler has started goes to another routee."""
        if outcome is Outcome.PROCESSED:
            self.offer()
        elif outcome is Outcome.NOT_PROCESSED:
            self._inbox.put_back(entry)
        elif not isinstance(entry, Ask):
            self._inbox.system.dead_letter(entry, self._routee, "lost")


class Work(Take):
    """In the mailbox of an actor whose router is in another system: handle one message here, and report when it is finished.

    Like a `Pull`, it goes into the mailbox again behind its message: when it comes up again, the message has been handled.
    """

    __slots__ = ("_cell", "_entry", "_over", "_started")

    def __init__(self, cell: Cell, entry: Any, over: Callable[[bool], None]) -> None:
        """Put it into the mailbox.

        Args:
            cell: the actor.
            entry: the message, or the question.
            over: called once: with True when the handler has finished, the actor has ended meanwhile, or the asker had gone before; with
                False if the actor has ended and no handler has started.
        """
        self._cell = cell
        self._entry = entry
        self._over: Callable[[bool], None] | None = over
        self._started = False
        cell.add_watcher(self, lambda _: self._end())
        cell.admit(self)

    def withdraw(self) -> bool:
        """Do not start it any more, since the router is out of reach; return whether it was started. No call follows."""
        self._over = None
        self._cell.forget_watcher(self)
        return self._started

    @enable_ki_protection
    def next(self, cell: Any) -> Any:
        if self._over is None:
            return TURN
        entry = self._entry
        if not self._started:
            self._started = True
            if not (isinstance(entry, Ask) and entry.settled):
                cell.admit(self)
                return entry
            entry.pass_over()  # its asker has gone
        self._cell.forget_watcher(self)
        self._end()
        return TURN

    def taken(self) -> Any:
        return self._entry

    def _end(self) -> None:
        over, self._over = self._over, None
        if over is not None:
            over(self._started)


class _PullInbox(SleepingInbox):
    """The router's mailbox."""

    def __init__(self, cell: Cell, router: PullRouter) -> None:
        super().__init__(cell)
        self._router = router
        self._pulls: dict[Any, Pull | RemotePull] = {}
        """The pull of each routee."""
        self._free: deque[Pull | RemotePull] = deque()
        """Pulls that have found no message: none is in a mailbox."""

    @enable_ki_protection
    def append(self, _: Cell) -> None:
        cell = self._cell
        cell._idle = True
        box = cell._box
        if box:
            kind = type(box[-1])
            if kind is Resize or (kind in _TELLS and type(box[-1].message) is Resize):
                # At once: more routees are wanted now, not when the few there are reach this message.
                self._resize(content_of(box.pop()).size)
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
                await self._sleep()
        finally:
            self._ended = True
            self._cell._idle = False

    def add(self, routee: Any) -> None:
        """Give messages to a routee from now on."""
        pull = Pull(self, routee) if isinstance(routee, Cell) else RemotePull(self, routee)
        self._pulls[routee] = pull
        self._free.append(pull)
        if self._cell.depth():
            self._offer()

    def remove(self, routee: Any) -> None:
        """Give a routee no more messages; it may finish the current one."""
        pull = self._pulls.pop(routee, None)
        if pull is None:
            return
        if pull in self._free:
            self._free.remove(pull)
        elif self._cell.depth():
            self._offer()  # it may have been about to take a message that another routee can take
        if not self._pulls:
            self._look_for_stop()

    def put_back(self, entry: Any) -> None:
        """Take back a message that no routee has started to handle."""
        cell = self._cell
        if cell.phase is STOPPED:
            cell.tell(entry)  # a dead letter, or an error for the asker
        else:
            cell.put_back([entry])

    @enable_ki_protection
    def take(self, routee: Any, pull: Pull | RemotePull) -> Any:
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
            if kind in _TELLS and type(entry.message) is Resize:
                entry, kind = entry.message, Resize
            if kind is Resize:
                self._resize(entry.size)
                if self._pulls.get(routee) is not pull:
                    return TURN
            elif isinstance(entry, Ask):
                if entry.settled:
                    entry.pass_over()
                    continue
                if isinstance(routee, Cell):
                    try:
                        self._router.system.waits.forward(entry, routee)
                    except AskCycle as error:
                        entry.fail(error)
                        continue
                cell._handled += 1
                return entry
            elif kind in RUNTIME_ENTRIES and kind not in _TELLS:
                cell._handled += 1  # it uncounts itself
                RUNTIME_ENTRIES[kind](self._router, entry)
            else:
                cell._handled += 1
                return entry
        self._free.append(pull)
        return TURN

    def _offer(self) -> None:
        """Make a free routee look for a message, if possible not one about to restart."""
        free = self._free
        if free and not self._ended:
            for _ in range(len(free)):
                if free[0].is_ready():
                    break
                free.rotate(-1)
            free.popleft().offer()

    def _look_for_stop(self) -> None:
        """Find a queued stop: without routees nothing else would reach it."""
        for entry in (*self._cell._batch, *self._cell._box):
            if type(entry) is Stop:
                self._see_stop(entry)

    def _resize(self, size: int) -> None:
        try:
            self._router.source.resize(self._router, size)
        except Exception as error:  # noqa: BLE001 - from the factory: the router fails, not the actor that runs now
            self._router.system.lifecycle.task_failed(self._cell, error)
