"""Cells whose mailbox has a capacity, for each policy of a full one: senders wait, or get an error, or messages are dropped or conflated."""

from __future__ import annotations

import functools
from _thread import get_ident
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    current_task,
    enable_ki_protection,
    reschedule,
    wait_task_rescheduled,
)

from levada.framework.errors import MailboxFull
from levada.framework.mailbox import Conflate, MailboxPolicy

from .ask import Ask, Wrapped, content_of, stopped_error
from .cell import Cell, DeadCell
from .phase import STOPPED
from .tokens import ROOM, TURN, RoomCallback, Stop, Take, WaitingMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    from .contract import ActorObject
    from .scheduler import RunQueue

__all__ = ["BoundedCell", "StoreCell"]


class BoundedCell(Cell):
    """An actor whose mailbox has a capacity."""

    __slots__ = ("_admitted", "_capacity", "_granted", "_overflow", "_room_due", "_stops", "_sweep_at", "line")

    def __init__(
        self,
        scheduler: RunQueue,
        actor: ActorObject,
        parent: Cell | None,
        name: str | None,
        number: int,
        policy: MailboxPolicy,
    ) -> None:
        super().__init__(scheduler, actor, parent, name, number)
        assert policy.capacity is not None
        self._capacity = policy.capacity
        self._overflow = policy.overflow
        self.line = None
        self._room_due = False
        """Whether a `ROOM` is in the mailbox; one is enough, however often senders come and give up."""
        self._granted = False
        """Whether the callback that runs now may take a place ahead of the line."""
        self._admitted = 0
        """Entries of the runtime in the mailbox; they take no room."""
        self._stops = 0
        """How many of these entries are stops. Messages in line behind a stop are not let in; their senders get them back."""
        self._sweep_at = 64
        """The length of the line at which withdrawn questions are removed."""

    @property
    def capacity(self) -> int:
        return self._capacity

    @enable_ki_protection
    def tell(self, message: Any) -> None:
        box = self._box
        if self.line or len(box) + len(self._batch) >= self._capacity:
            self._refuse(message)
        elif self._idle:
            scheduler = self._scheduler
            if scheduler.parked:
                scheduler.wake(self)
            self._idle = False
            self._since = scheduler.now
            box.append(message)
            scheduler.ready.append(self)
        else:
            box.append(message)

    @enable_ki_protection
    async def send(self, message: Any) -> None:
        box = self._box
        if not self.line and len(box) + len(self._batch) < self._capacity:
            # No need to check the clock: a loop of sends to a bounded mailbox soon waits.
            if self._idle:
                scheduler = self._scheduler
                if scheduler.parked:
                    scheduler.wake(self)
                self._idle = False
                self._since = scheduler.now
                box.append(message)
                scheduler.ready.append(self)
            else:
                box.append(message)
        elif not self.line and not self._is_full():
            Cell.tell(self, message)
        elif get_ident() != self._scheduler.thread:
            raise self.wrong_thread_error("send")
        elif self._overflow == "wait":
            edge = self.system.waits.begin(self, message)
            try:
                await self._wait_for_room(message)
            finally:
                self.system.waits.end(edge)
        else:
            await self.system.scheduler.checkpoint_if_slice_over()
            if self.phase is STOPPED:
                raise stopped_error(self, self.reason, message)
            self.tell(message)

    async def _wait_for_room(self, message: Any) -> None:
        entry = WaitingMessage(message, current_task())
        line = self._queue_up(entry)

        def abort(_: RaiseCancelT) -> Abort:
            del line[entry]
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)

    def _queue_up(self, entry: WaitingMessage) -> OrderedDict[WaitingMessage, None]:
        line = self.line
        if line is None:
            line = self.line = OrderedDict()
        if len(line) >= self._sweep_at:
            for gone in [other for other in line if isinstance(other.message, Ask) and other.message.settled]:
                del line[gone]
                gone.message.pass_over()
            self._sweep_at = max(64, 2 * len(line))
        line[entry] = None
        if not self._room_due:
            self._await_room()
        return line

    def _await_room(self) -> None:
        """Check the line again when half of the queued messages are handled, since there is then room for many at once."""
        self._room_due = True
        self._admitted += 1
        if self._batch:
            self._batch.insert(len(self._batch) // 2, ROOM)
        else:
            self._box.insert((len(self._box) + 1) // 2, ROOM)

    @enable_ki_protection
    def let_in(self) -> None:
        """Give free room to the line, first come first served; a sender has its slot before it wakes."""
        self._admitted -= 1
        self._room_due = False
        line = self.line
        while line and not self._stops and not self._is_full():
            entry, _ = line.popitem(last=False)
            message = entry.message
            if isinstance(message, Ask) and message.settled:
                message.pass_over()
                continue
            if isinstance(message, RoomCallback):
                self._granted = True
                message.back()
                self._granted = False
                continue
            self._box.append(message)
            if entry.task is not None:
                reschedule(entry.task)
        if line and not self._room_due and not self._stops:
            self._await_room()

    @enable_ki_protection
    def try_tell(self, message: Any) -> bool:
        if self._overflow == "wait" or self._overflow == "raise":
            if (self.line and not self._granted) or self._is_full():
                return False
            self._granted = False
            Cell.tell(self, message)
        else:
            self.tell(message)
        return True

    @enable_ki_protection
    def on_room(self, callback: Callable[[], None]) -> Callable[[], None]:
        entry = WaitingMessage(RoomCallback(callback), None)
        return functools.partial(self._queue_up(entry).pop, entry, None)

    def enqueue(self, message: Any, *, patient: bool = False) -> None:
        if (self.line or self._is_full()) and (self._overflow == "wait" or (patient and self._overflow == "raise")):
            self._queue_up(WaitingMessage(message, None))
        else:
            self.tell(message)

    def admit(self, message: Any) -> None:
        Cell.tell(self, message)
        self._admitted += 1
        self._stops += type(message) is Stop

    def admit_first(self, entry: Any) -> None:
        self._admitted += 1
        super().admit_first(entry)

    def entry_left(self, entry: Any) -> None:
        self._admitted -= 1
        if type(entry) is Stop:
            self._stops -= 1
            if self.line and not self._stops and not self._room_due:
                self._await_room()  # after a restart the line is served again

    def put_first(self, message: Any) -> None:
        self._admitted += 1
        super().put_first(message)

    def _is_full(self) -> bool:
        """Whether the mailbox is at its capacity."""
        batch = self._batch
        turn = bool(batch) and batch[-1] is TURN  # the only entry of the runtime that `_admitted` does not count
        return len(self._box) + len(batch) - self._admitted - turn >= self._capacity

    def _full(self, message: Any) -> MailboxFull:
        return MailboxFull(
            f"the mailbox of {self.path} holds {self._capacity} message{'s' if self._capacity > 1 else ''}; "
            "send() waits for room, or give it a larger one",
            actor=self.path,
            capacity=self._capacity,
            message=content_of(message),
        )

    def _refuse(self, message: Any) -> None:
        if get_ident() != self._scheduler.thread:
            raise self.wrong_thread_error("tell")
        if not self.line and not self._is_full():
            Cell.tell(self, message)
            return
        overflow = self._overflow
        if overflow == "wait" or overflow == "raise":
            raise self._full(message)
        self._drop(message)
        if overflow == "stop":
            self.system.lifecycle.overflowed(self, self._full(None))  # without the message: the actor's reason is kept

    def _drop(self, message: Any) -> None:
        if isinstance(message, Ask):
            message.fail(self._full(message))
        else:
            self.system.dead_letter(message, self, "mailbox full")


class StoreCell(BoundedCell):
    """An actor whose mailbox drops or conflates queued messages.

    The messages are in a separate store. The mailbox holds one `Take` for each, so the worker loop needs no special case.
    """

    __slots__ = ("_key", "_store")

    def __init__(
        self,
        scheduler: RunQueue,
        actor: ActorObject,
        parent: Cell | None,
        name: str | None,
        number: int,
        policy: MailboxPolicy,
    ) -> None:
        super().__init__(scheduler, actor, parent, name, number, policy)
        self._key = policy.overflow.key if isinstance(policy.overflow, Conflate) else None
        # A plain dict steps over all deleted entries to find the oldest one: 0.5 s for a full mailbox of 40,000.
        self._store: OrderedDict[Any, Any] = OrderedDict()
        """Messages by key, oldest first; without a key function each message has a unique key."""

    @enable_ki_protection
    def tell(self, message: Any) -> None:
        if get_ident() != self._scheduler.thread:
            raise self.wrong_thread_error("tell")
        store = self._store
        key: Any
        if self._key is not None and not isinstance(message, Wrapped):
            key = self._key(message)
        elif self._key is None or isinstance(message, Ask):
            key = object()
        else:
            key = self._key(content_of(message))
        if key in store:
            store[key] = message
            return
        if len(store) >= self._capacity:
            oldest = next(iter(store))
            self._drop(store.pop(oldest))
            store[key] = message
            return
        store[key] = message
        self.admit(Take())

    @enable_ki_protection
    async def send(self, message: Any) -> None:
        await self.system.scheduler.checkpoint_if_slice_over()
        if self.phase is STOPPED:
            raise stopped_error(self, self.reason, message)
        self.tell(message)

    def enqueue(self, message: Any, *, patient: bool = False) -> None:
        self.tell(message)

    try_tell = Cell.try_tell
    admit = Cell.tell
    admit_first = Cell.admit_first
    put_first = Cell.put_first
    entry_left = Cell.entry_left

    def next_stored(self) -> Any:
        """Take the oldest message out of the store."""
        return self._store.popitem(last=False)[1]

    def take_messages(self) -> list[Any]:
        entries = [self.next_stored() if type(entry) is Take else entry for entry in super().take_messages()]
        self._store.clear()
        return entries


class _DeadBoundedCell(DeadCell, BoundedCell):
    __slots__ = ()


class _DeadStoreCell(DeadCell, StoreCell):
    __slots__ = ()


BoundedCell.dead = _DeadBoundedCell
StoreCell.dead = _DeadStoreCell
