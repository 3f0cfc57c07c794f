"""An actor that passes everything on to another one, which may change: `Forwarder`.

It is a loop actor that sleeps: the sender's call passes its message on, as in a `pull` router (`_pull.PullRouter`), so a hop costs no turn.
Its mailbox holds what waits, in order, while there is no actor to pass it on to, or that actor's mailbox is full. So the mailbox's policy
says what happens when too much waits.

Private fields used here: ``Cell._batch``, ``Cell._box``, ``Cell._handled``, ``Cell._idle``, ``Cell._scheduler``.
"""

from __future__ import annotations

import logging
from typing import Any

import trio
from trio.lowlevel import enable_ki_protection

from ._runtime.ask import Ask, RemoteTell, content_of
from ._runtime.cell import Cell
from ._runtime.dispatch import RUNTIME_ENTRIES
from ._runtime.tokens import Stop, Take
from ._runtime.tracing import TracedTell
from .actor import Actor
from .errors import ActorError, ActorStopped, AskCycle, MailboxFull
from .links import Reason
from .loop import SleepingInbox
from .ref import Ref

__all__ = ["Forwarder"]

logger = logging.getLogger("levada.framework.router")

_TELLS = (RemoteTell, TracedTell)


class Forwarder(Actor[Any]):
    """Passes messages and questions on to one actor, whichever it is now. Answers do not pass it.

    Each message is passed on once. What an actor that ended had not handled is not passed on again: a question fails with `ActorStopped`.
    """

    def __init__(self) -> None:
        self.target: Ref[Any] | None = None
        """The actor; None: messages wait."""
        self.is_here = False
        """Whether it is an actor of this system. To find out costs 0.4 µs, as refs have an abstract base class."""

    def point(self, ref: Ref[Any] | None) -> None:
        """Pass messages on to this actor from now on; None: let them wait."""
        if ref is self.target:
            return
        if self.target is not None:
            self.target.forget_watcher(self)  # type: ignore[attr-defined]
        self.target, self.is_here = ref, isinstance(ref, Cell)
        if ref is not None:
            ref.add_watcher(self, self.target_ended)  # type: ignore[attr-defined]
        inbox = self._bound().make_extras().inbox
        if inbox is not None:  # otherwise it has not started
            inbox.turn()

    def end(self, reason: Reason) -> None:
        """End now, for this reason. What waits is not passed on."""
        inbox = self._bound().make_extras().inbox
        if inbox is None:
            self.stop()  # it has not started, so no one waits
        else:
            inbox.end_with(reason)

    def target_ended(self, reason: Reason) -> None:
        """Learn that the actor has ended. Messages wait from now on."""

    async def run(self) -> None:
        inbox: _ForwarderInbox = self._bound().make_extras().inbox
        await inbox.run()

    def _start(self) -> Any:
        cell = self._bound()
        inbox = cell.make_extras().inbox = _ForwarderInbox(cell, self)
        cell._scheduler = inbox  # type: ignore[assignment]
        return self._run_loop(inbox)


class _ForwarderInbox(SleepingInbox):
    """The forwarder's mailbox."""

    def __init__(self, cell: Cell, forwarder: Forwarder) -> None:
        super().__init__(cell)
        self._forwarder = forwarder
        self._sending: trio.CancelScope | None = None
        """Set while the loop waits for room for the oldest message."""

    @enable_ki_protection
    def append(self, _: Cell) -> None:
        self._cell._idle = True
        self._pass_on()

    async def run(self) -> None:
        """Pass on messages that have no room at the actor; otherwise sleep."""
        try:
            while not self._ended:
                self._cell._idle = True
                if self._sending is not None:
                    await self._send_oldest()
                self._pass_on()
                if self._sending is None and not self._ended:
                    await self._sleep()
        finally:
            self._ended = True
            self._cell._idle = False

    def turn(self) -> None:
        """Pass messages on to another actor from now on."""
        if self._sending is not None:
            self._sending.cancel()
        elif self._task is not None:
            self._pass_on()

    def end_with(self, reason: Reason) -> None:
        """End the loop, and the actor for this reason."""
        self._see_stop(Stop(reason, final=True))

    def end(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        super().end()

    @enable_ki_protection
    def _pass_on(self) -> None:
        """Pass on all messages, until one has to wait."""
        cell, forwarder = self._cell, self._forwarder
        while (cell._box or cell._batch) and not self._ended and self._sending is None:
            batch = cell.fill_batch()
            target = forwarder.target
            if target is None or not target.is_alive:
                self._look_for_stop()
                return
            entry = batch[-1]
            kind = type(entry)
            if isinstance(entry, Ask):
                batch.pop()
                if entry.settled:
                    entry.pass_over()
                    continue
                cell._handled += 1
                self._hand_on(entry, target)
            elif kind is Stop:
                batch.pop()
                cell.entry_left(entry)
                self._see_stop(entry)
            elif isinstance(entry, Take):
                batch.pop()
                cell.entry_left(entry)
                batch.append(entry.next(cell))
            elif kind in RUNTIME_ENTRIES and kind not in _TELLS:
                batch.pop()
                cell._handled += 1  # it uncounts itself
                RUNTIME_ENTRIES[kind](forwarder, entry)
            elif not self._tell(entry, target):
                self._sending = trio.CancelScope()
                self._rouse()
            else:
                batch.pop()
                cell._handled += 1

    def _hand_on(self, question: Ask, target: Any) -> None:
        try:
            if self._forwarder.is_here:
                self.system.waits.forward(question, target)
            target.enqueue(question)
        except (MailboxFull, AskCycle) as error:
            question.fail(error)

    def _tell(self, entry: Any, target: Ref[Any]) -> bool:
        """Tell the actor a message; return False if there is no room."""
        try:
            target.tell(_as_taken(entry, target))
        except MailboxFull:
            return False
        except Exception as error:  # noqa: BLE001 - it cannot travel; one bad message must not end the forwarder
            self._refuse(entry, target, error)
        return True

    async def _send_oldest(self) -> None:
        """Wait for room for the oldest message. If the actor ends or changes meanwhile, the message stays the oldest."""
        cell, target = self._cell, self._forwarder.target
        assert self._sending is not None
        entry = cell.fill_batch().pop()
        sent = False
        try:
            with self._sending:
                if target is not None:
                    await target.send(_as_taken(entry, target))
                    sent = True
        except ActorStopped:
            pass
        except Exception as error:  # noqa: BLE001 - as above
            assert target is not None
            self._refuse(entry, target, error)
            sent = True
        finally:
            self._sending = None
            if sent:
                cell._handled += 1
            else:
                cell.fill_batch().append(entry)

    def _refuse(self, entry: Any, target: Ref[Any], error: Exception) -> None:
        path, what = self._cell.path, type(content_of(entry)).__name__
        if not isinstance(error, MailboxFull):
            text = "%s: %s does not take a %s"
            self.system.failure_log.log(logger, error, text, path, target.where, what, actor=path, event="not_taken")
        why = "mailbox full" if isinstance(error, ActorError) else "cannot travel"
        self.system.dead_letter(entry, self._cell, why)

    def _look_for_stop(self) -> None:
        """Find a queued stop: without an actor nothing else would reach it."""
        cell = self._cell
        for entry in cell.fill_batch() + cell._box:
            if type(entry) is Stop:
                self._see_stop(entry)
                return


def _as_taken(entry: Any, target: Ref[Any]) -> Any:
    """Return a message as an actor takes it; one in another system does not learn of a peer."""
    return entry if isinstance(target, Cell) or type(entry) is TracedTell else content_of(entry)
