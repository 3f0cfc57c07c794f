"""The runtime's record of one actor, which is also its local `Ref`.

Rules of this file:

* A cell is in exactly one of these places: *idle* (mailbox empty, ``_idle`` true), in the *run queue*, *with a worker* (running, or
  waiting inside an async handler), or *paused* (ending or about to restart).  A sender puts only an idle cell into the run queue.
* Messages arrive in ``_box``. A worker takes them over as ``_batch``, newest first, so that `list.pop` returns the oldest and frees
  memory.  Swapping lists costs less than a deque, and an empty list takes 56 bytes where an empty deque takes 760.
* A paused cell has an empty handler table: the worker finds no handler, checks the phase, and puts the message back.
  So no message pays for a check of a rare state.
* A stopped cell changes its class to a dead one, so `tell` needs no branch for it.
* A cell belongs to the thread of its system.  A `tell` that wakes a worker notices that it is in another thread before it has put the
  message in. A `tell` to an actor that is about to run anyway does not check the thread: the check would cost a fifth of the call.
* Rare parts (children, links, timers, …) are in `Extras`, made on first use.  An idle actor takes at most 400 bytes, including its
  object without fields.

Private fields used here: ``Actor._cell``, ``Actor._has_start``.
"""

from __future__ import annotations

import functools
from _thread import get_ident
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import trio
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    current_task,
    enable_ki_protection,
    reschedule,
    wait_task_rescheduled,
)

from levada.framework.errors import MailboxFull, WrongThread, wrong_thread
from levada.framework.links import KILLED, NORMAL, SHUTDOWN, Reason
from levada.framework.mailbox import Conflate, MailboxPolicy
from levada.framework.ref import DEFAULT_TIMEOUT, FromThread, Ref, check_timeout

from .ask import BEFORE_ASKS, Ask, ThreadAsk, Wrapped, content_of, prepare_to_ask, stopped_error
from .extras import Extras
from .phase import PAUSED, RUNNING, STOPPED, ActorPhase
from .tokens import ROOM, START, STOP, TAKE, TURN, Start, Stop, TakeSignal, Turn

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable, Hashable

    from levada.framework.supervision import Supervised

    from .contract import ActorObject, System
    from .lifecycle import Ending, Group
    from .scheduler import RunQueue, Worker

__all__ = ["BoundedCell", "Cell", "CellFromThread", "StoreCell", "make_dead"]

NO_MESSAGES: Any = ()
"""The batch of a cell that no worker holds; a tuple, so that nothing can be appended to it by mistake."""

NO_HANDLERS: dict[Any, Any] = {}
"""The handler table of a paused cell; never filled."""


class Cell(Ref[Any]):
    """An actor with an unbounded mailbox."""

    __slots__ = (
        "__weakref__", "_actor", "_asking", "_batch", "_box", "context", "_extras", "_handled", "_idle", "_name",
        "_number", "_parent", "_quantum", "reason", "_scheduler", "_since", "phase", "_table", "_worker",
    )  # fmt: skip

    line: OrderedDict[WaitingMessage, None] | None = None
    """Messages that wait for room, first come first served."""
    traced: ClassVar[bool] = False
    """Whether handlers are recorded by the system's tracing."""
    dead: ClassVar[type[Cell]]
    """The class of the same cell when its actor has ended."""

    def __init__(
        self, scheduler: RunQueue, actor: ActorObject, parent: Cell | None, name: str | None, number: int
    ) -> None:
        self._scheduler = scheduler
        self._actor: Any = actor
        self._parent = parent
        self._name = name
        self._number = number
        self._box: list[Any] = []
        self._batch: list[Any] = NO_MESSAGES
        self._idle = True
        self.phase: ActorPhase = RUNNING
        self._table: dict[Any, Any] = type(actor)._table
        self._quantum = 128
        self._since = 0.0
        self._handled = 0
        self.context: contextvars.Context | None = None
        self._worker: Worker | None = None
        self._asking: Ask | None = None
        self._extras: Extras | None = None
        self.reason: Reason = NORMAL

    @property
    def path(self) -> str:
        names = []
        cell: Cell = self
        while cell._parent is not None:
            names.append(cell.name)
            cell = cell._parent
        return "/" + "/".join(reversed(names))

    @property
    def name(self) -> str:
        """The name given at spawn, or else ``$`` and a number."""
        return self._name or f"${self._number}"

    @property
    def incarnation(self) -> int:
        return self._number

    @property
    def is_alive(self) -> bool:
        return self.phase is not STOPPED

    @property
    def accepts_links(self) -> bool:
        """Whether an actor of another system may link to this one."""
        return getattr(self._actor, "accept_remote_links", False)

    @enable_ki_protection
    def tell(self, message: Any) -> None:
        if self._idle:
            scheduler = self._scheduler
            if scheduler.parked:
                scheduler.wake(self)  # first: in another thread this raises, and nothing was put in
            self._idle = False
            self._since = scheduler.now
            self._box.append(message)
            scheduler.ready.append(self)
        else:
            self._box.append(message)

    async def send(self, message: Any) -> None:
        await self.system.scheduler.checkpoint_if_slice_over()
        if self.phase is STOPPED:
            raise stopped_error(self, self.reason, message)
        self.tell(message)

    async def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        if timeout is not DEFAULT_TIMEOUT:
            check_timeout(timeout)
        if BEFORE_ASKS:
            await prepare_to_ask()
        scheduler = self._scheduler
        if scheduler.parked and get_ident() != scheduler.thread:
            raise self.wrong_thread_error("ask")
        question = Ask(message, self)
        if self._idle and (handler := self._table[None].get(type(message))) is not None and scheduler.may_inline():
            # An idle cell has handled everything told before, so calling the handler here keeps the order. A sync handler
            # cannot wait, so the asker's cancellation cannot hit it. This saves two task steps, 8 µs.
            extras = self._extras
            if extras is not None and extras.take is not None and self._has_taken(extras.take, question):
                if question.settled:
                    scheduler.now = scheduler.clock()  # perhaps nobody was called, who would have done it
            else:
                self._asking = question
                scheduler.call_inline(self, handler, message, question)
            if scheduler.now > scheduler.end:
                await scheduler.shielded_checkpoint()
            if question.settled:
                return question.result()
        else:
            if self.phase is STOPPED:
                raise stopped_error(self, self.reason, message)
            self.enqueue(question)
        waits = scheduler.system.waits
        edge = waits.begin(self, question)
        try:
            question.start_timer(timeout)
            return await question.wait()
        finally:
            waits.end(edge)

    def _has_taken(self, take: Callable[[Ask], bool], question: Ask) -> bool:
        """Give a question to the function of `take_at_once`; its error is this actor's, as that of a handler."""
        try:
            taken = take(question)
        except BaseException as error:
            self._scheduler.fail_inline(self, question, error)
            return True
        if taken:
            self._handled += 1
        return taken

    def stop(self, *, now: bool = False) -> None:
        if now:
            if get_ident() != self._scheduler.thread:
                raise self.wrong_thread_error("stop")
            self.system.lifecycle.request(self, SHUTDOWN)
        else:
            self.admit(STOP)

    def kill(self) -> None:
        if get_ident() != self._scheduler.thread:
            raise self.wrong_thread_error("kill")
        self.system.lifecycle.request(self, KILLED, cancel=True)

    @enable_ki_protection
    async def terminated(self) -> Reason:
        if get_ident() != self._scheduler.thread:
            raise self.wrong_thread_error("terminated")
        if self.phase is STOPPED:
            await trio.lowlevel.checkpoint()
            return self.reason
        extras = self.make_extras()
        waiters = extras.waiters = extras.waiters if extras.waiters is not None else {}
        task = current_task()
        waiters[task] = None

        def abort(_: RaiseCancelT) -> Abort:
            del waiters[task]
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)
        return self.reason

    @property
    def from_thread(self) -> FromThread[Any]:
        return CellFromThread(self)

    # The next three methods are `channel_mailbox.Destination`, for channels.
    def try_tell(self, message: Any) -> bool:
        """Put a message in if there is room; return whether there was."""
        self.tell(message)
        return True

    def on_room(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called when there is room, in line with the waiting senders; return a function that undoes this."""
        callback()
        return lambda: None

    def on_stopped(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called when this actor has ended, at once if it has; return a function that undoes this."""
        key = object()
        self.add_watcher(key, lambda _: callback())
        return functools.partial(self.forget_watcher, key)

    @property
    def system(self) -> System:
        return self._scheduler.system

    def check_thread(self, what: str) -> None:
        """Raise `WrongThread` unless this is the thread of the system."""
        if get_ident() != self._scheduler.thread:
            raise wrong_thread(f"{what} {self.path}")

    def wrong_thread_error(self, call: str) -> WrongThread:
        return wrong_thread(f"{call} to {self.path}", "ref.from_thread")

    def make_extras(self) -> Extras:
        """Return the extras; make them if this actor has none."""
        extras = self._extras
        if extras is None:
            extras = self._extras = Extras()
        return extras

    admit = tell
    """Put an entry of the runtime into the mailbox; it does not count against the capacity."""

    def admit_first(self, entry: Any) -> None:
        """Put an entry of the runtime before all others; the caller makes the cell ready."""
        self.fill_batch().append(entry)

    def _forget_start(self) -> None:
        """Remove a `Start` that has not run: a paused cell has none, and the next object gets its own."""
        batch = self.fill_batch()
        at = len(batch) - 1
        while at >= 0 and batch[at] is TURN:
            at -= 1
        if at >= 0 and batch[at] is START:
            del batch[at]
            self.entry_left(START)
            if not batch:
                batch.append(TURN)  # a cell in the run queue must not have an empty mailbox

    def entry_left(self, entry: Any) -> None:
        """Note that an entry of the runtime has left the mailbox; only bounded mailboxes count them."""

    def enveloped(self, message: Any) -> Any:
        """Return the mailbox entry for a message that the running code sends; in a traced system this is an envelope."""
        return message

    def enqueue(self, message: Any, *, patient: bool = False) -> None:
        """Put a message in, or in line for room, without waiting; with `patient` even if the policy is ``raise``."""
        self.tell(message)

    def handle_or_enqueue(self, entry: Ask) -> None:
        """Let this actor handle an entry of a class of its own at once, in this task, if it is idle; else put it into the mailbox.

        Only for functions of `take_at_once`. The handler, which is sync, settles the entry, and so does the end of the actor.
        """
        if self._idle and (handler := self._table.get(type(entry))) is not None and self._scheduler.may_inline():
            self._scheduler.call_inline(self, handler, entry, entry)
        else:
            self.enqueue(entry)

    def take_at_once(self, take: Callable[[Ask], bool]) -> None:
        """Have questions with sync handlers given to a function while this actor is idle; it returns whether it has taken the question.

        It is called in the asker's task and context, and starts no task and calls no code of others, except by `handle_or_enqueue` of the
        actor that shall answer. Its errors are this actor's failures. So a question that is only passed on costs one call in place of two,
        and no round of the event loop.
        A new object after a restart says so again.
        """
        self.make_extras().take = take

    def depth(self) -> int:
        """Return about how many messages wait: entries of the runtime count too."""
        return len(self._box) + len(self._batch)

    def load(self) -> int:
        """Return about how many messages wait; a running async handler counts as one."""
        return len(self._box) + len(self._batch) + (self._worker is not None)

    @enable_ki_protection
    def put_first(self, message: Any) -> None:
        """Put a signal message before all user messages, after earlier signals and the `started` hook.

        The batch gets a `TakeSignal` for each signal, so no insertion has to move earlier signals. When it had to, the end of 8,000 actors
        watched by one took 15 s.
        """
        extras = self.make_extras()
        if extras.signals is None:
            extras.signals = deque()
        extras.signals.append(message)
        batch = self.fill_batch()
        at = len(batch)
        while at and type(batch[at - 1]) in (Start, Turn):
            at -= 1
        batch.insert(at, TakeSignal())
        self._wake_up()

    @enable_ki_protection
    def put_back(self, messages: list[Any]) -> None:
        """Put messages, oldest first, before all others."""
        self.fill_batch().extend(reversed(messages))
        self._wake_up()

    def fill_batch(self) -> list[Any]:
        """Move the box into an empty batch, in place because a worker may hold it; return the batch."""
        batch = self._batch
        if batch is NO_MESSAGES:
            batch = self._batch = []
        if not batch:
            batch.extend(reversed(self._box))
            self._box.clear()
        return batch

    def _wake_up(self) -> None:
        if self._idle:
            scheduler = self._scheduler
            if scheduler.parked:
                scheduler.wake(self)
            self._idle = False
            self._since = scheduler.now
            scheduler.ready.append(self)

    def take_messages(self) -> list[Any]:
        """Take all entries out, oldest first."""
        entries = (*reversed(self._batch), *self._box)
        self._batch, self._box = NO_MESSAGES, []
        return [entry.next(self) if type(entry) is TakeSignal else entry for entry in entries]

    def add_watcher(self, key: Hashable, ended: Callable[[Reason], None]) -> None:
        """Have `ended` called when this actor ends, at once if it has."""
        if self.phase is STOPPED:
            ended(self.reason)
            return
        extras = self.make_extras()
        if extras.watchers is None:
            extras.watchers = {}
        extras.watchers[key] = ended

    def forget_watcher(self, key: Hashable) -> None:
        if self._extras is not None and self._extras.watchers is not None:
            self._extras.watchers.pop(key, None)

    @enable_ki_protection
    def link(self, other: Any) -> None:
        """Link both actors; if `other` has ended, its exit signal comes at once."""
        if other is self:
            return
        if not other.is_alive:
            self.exited(other, other.reason)
            return
        other.tie(self)
        self.tie(other)

    @enable_ki_protection
    def unlink(self, other: Any) -> None:
        """Remove the link on both sides."""
        self.untie(other)
        other.untie(self)

    # Each of the next three is one side of a link; proxies of actors in other systems have their own.
    def tie(self, other: Any) -> None:
        """Tell `other` when this actor ends."""
        extras = self.make_extras()
        if extras.links is None:
            extras.links = {}
        extras.links[other] = None

    def untie(self, other: Any) -> None:
        """Undo `tie`."""
        if self._extras is not None and self._extras.links is not None:
            self._extras.links.pop(other, None)

    def exited(self, other: Any, reason: Reason) -> None:
        """Take the exit signal of the linked `other`."""
        self.untie(other)
        self.system.lifecycle.exit_signal(self, other, reason)

    @property
    def ending(self) -> Ending | None:
        """The state of the ending that is under way, if any."""
        return self._extras.ending if self._extras is not None else None

    @property
    def supervised(self) -> Supervised | None:
        """The record of its supervision, if it is supervised."""
        return self._extras.supervised if self._extras is not None else None

    @property
    def group(self) -> Group | None:
        """The children that are about to restart together, if any."""
        return self._extras.group if self._extras is not None else None

    def take_question(self) -> Ask | None:
        """Return the current question, once."""
        question, self._asking = self._asking, None
        return question

    def pause(self) -> None:
        """Handle no more messages until `revive`."""
        self.phase = PAUSED
        self._forget_start()
        self._table = NO_HANDLERS
        self._idle = False

    def revive(self, actor: Any) -> None:
        """Continue with a new object."""
        self._actor = actor
        if self._extras is not None:
            self._extras.take = None  # the old object's
        actor._cell = self
        self._table = type(actor)._table
        self.phase = RUNNING
        if actor._has_start:
            self.admit_first(START)

    def end(self, reason: Reason) -> Any:
        """Become a dead cell; return the actor object. The mailbox must be empty."""
        self.phase = STOPPED
        self.reason = reason
        self._idle = False
        self._table = NO_HANDLERS
        self._batch = [TURN]  # if the cell is in the run queue, its last turn ends at once
        self.__class__ = self.dead  # pyright: ignore[reportAttributeAccessIssue] - same slots, so it may
        actor, self._actor = self._actor, None
        return actor


class BoundedCell(Cell):
    """An actor whose mailbox has a capacity."""

    __slots__ = ("_admitted", "_capacity", "_granted", "line", "_overflow", "_room_due", "_stops", "_sweep_at")

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
        """Have the line checked again when half of the queued messages are handled, since there is then room for many at once."""
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
            f"the mailbox of {self.path} holds {self._capacity} messages; send() waits for room, or give it a larger one",
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
            self.system.lifecycle.overflowed(self, self._full(message))

    def _drop(self, message: Any) -> None:
        if isinstance(message, Ask):
            message.fail(self._full(message))
        else:
            self.system.dead_letter(message, self, "mailbox full")


class StoreCell(BoundedCell):
    """An actor whose mailbox drops or conflates queued messages.

    The messages are in a separate store. The mailbox holds one `TAKE` for each, so the worker loop needs no special case.
    """

    __slots__ = ("_key", "_store", "last_stored")

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
        self.last_stored: Any = None
        """The last message taken out, for the report if its handler fails."""

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
        self.admit(TAKE)

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
        _, message = self._store.popitem(last=False)
        self.last_stored = message
        return message

    def take_messages(self) -> list[Any]:
        entries = [self.next_stored() if entry is TAKE else entry for entry in super().take_messages()]
        self._store.clear()
        return entries


@attrs.define(eq=False, weakref_slot=False)
class WaitingMessage:
    """A message that waits for room, and the task inside `send`; an ask, or a message from a thread, has no such task."""

    message: Any
    task: Task | None


@attrs.define(eq=False, weakref_slot=False)
class RoomCallback:
    """Stands in line in place of a message, for a caller of `on_room`."""

    back: Callable[[], None]


class _Dead(Cell):
    """The class of a cell whose actor has ended: messages become dead letters, questions fail, signals are ignored."""

    __slots__ = ()

    def tell(self, message: Any) -> None:
        if isinstance(message, Ask):
            message.fail(stopped_error(self, self.reason, message.message))
        else:
            self.system.dead_letter(message, self, "stopped")

    def try_tell(self, message: Any) -> bool:
        raise stopped_error(self, self.reason, message)

    async def send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        raise stopped_error(self, self.reason, message)

    def stop(self, *, now: bool = False) -> None:
        pass

    def kill(self) -> None:
        pass

    def enqueue(self, message: Any, *, patient: bool = False) -> None:
        self.tell(message)

    def admit(self, message: Any) -> None:
        pass

    def put_first(self, message: Any) -> None:
        pass

    def _wake_up(self) -> None:
        pass


class _DeadBoundedCell(_Dead, BoundedCell):
    __slots__ = ()


class _DeadStoreCell(_Dead, StoreCell):
    __slots__ = ()


def make_dead(system: System, number: int) -> Cell:
    """Make the cell of an actor that is known only to have ended."""
    cell = _Dead(system.scheduler, NoActor(), system.root, None, number)
    cell.phase, cell.reason, cell._idle, cell._actor = STOPPED, SHUTDOWN, False, None
    return cell


class NoActor:
    """Stands for the actor of a cell that has none."""

    _table: ClassVar[dict[Any, Any]] = NO_HANDLERS
    _is_traced: ClassVar[bool] = False


Cell.dead = _Dead
BoundedCell.dead = _DeadBoundedCell
StoreCell.dead = _DeadStoreCell


class CellFromThread(FromThread[Any]):
    """A local actor, for other threads."""

    __slots__ = ("cell",)

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def tell(self, message: Any) -> None:
        self.cell.system.inbox.put(self.cell, message)

    def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        return self.put(ThreadAsk(message, self.cell), timeout)

    def put(self, question: ThreadAsk, timeout: float | None) -> Any:
        """Ask a question; arguments and errors as for `ask`."""
        check_timeout(timeout)
        cell = self.cell
        system = cell.system
        if system.inbox.is_home():
            raise RuntimeError("from_thread.ask() in the system's own thread would wait forever; await ask() instead")
        system.inbox.put(cell, question)
        return question.block(system.inbox, system.ask_timeout if timeout is DEFAULT_TIMEOUT else timeout)
