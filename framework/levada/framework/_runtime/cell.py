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
from trio.lowlevel import enable_ki_protection

from levada.framework.errors import WrongThread, wrong_thread
from levada.framework.links import KILLED, NORMAL, SHUTDOWN, Reason
from levada.framework.ref import DEFAULT_TIMEOUT, FromThread, Ref, check_timeout

from .ask import BEFORE_ASKS, Ask, OpenAsks, RemoteAsk, RemoteTell, ThreadAsk, Wrapped, prepare_to_ask, stopped_error
from .phase import PAUSED, RUNNING, STOPPED, ActorPhase
from .reasons import ForPeers, reason_of_end
from .tokens import START, STOP, TURN, EndTurn, Start, TakeSignal

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable, Hashable

    from levada.framework.supervision import Supervised
    from levada.framework.timers import Timer, Timers

    from .contract import ActorObject, System
    from .host import ActorHost
    from .scheduler import RunQueue, Worker
    from .tokens import WaitingMessage

__all__ = ["ActorEnding", "Cell", "CellFromThread", "DeadCell", "Extras", "Group", "make_dead"]

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
        if timeout is not None and timeout is not DEFAULT_TIMEOUT:
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
        self.system.waits.refuse_own_end(self)
        extras = self.make_extras()
        if extras.ended is None:
            extras.ended = trio.Event()
        await extras.ended.wait()
        return self.reason

    @property
    def capacity(self) -> int | None:
        """The most messages in the mailbox; None: any number."""
        return None

    @property
    def from_thread(self) -> FromThread[Any]:
        return CellFromThread(self)

    # The next three methods are `channel_mailbox.Destination`, for channels.
    def try_tell(self, message: Any) -> bool:
        """Put a message in if there is room; return whether there was."""
        self.tell(message)
        return True

    def on_room(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when there is room, in line with the waiting senders; return a function that undoes this."""
        callback()
        return lambda: None

    def on_stopped(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when this actor has ended, at once if it has; return a function that undoes this."""
        key = object()
        self.add_watcher(key, lambda _: callback())
        return functools.partial(self.forget_watcher, key)

    @property
    def system(self) -> System:
        return self._scheduler.system

    def check_thread(self, what: str) -> None:
        """Raise `WrongThread` unless this is the thread of the system."""
        if get_ident() != self._scheduler.thread:
            raise wrong_thread(f"{what} {self.path}", forked=self._scheduler.thread is None)

    def wrong_thread_error(self, call: str) -> WrongThread:
        return wrong_thread(f"{call} to {self.path}", "ref.from_thread", forked=self._scheduler.thread is None)

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
        """Record that an entry of the runtime has left the mailbox; only bounded mailboxes count them."""

    def enveloped(self, message: Any) -> Any:
        """Return the mailbox entry for a message that the running code sends; in a traced system this is an envelope."""
        return message

    def enqueue(self, message: Any, *, patient: bool = False) -> None:
        """Put a message in, or in line for room, without waiting; with `patient` even if the policy is ``raise``."""
        self.tell(message)

    def handle_or_enqueue(self, entry: Ask) -> None:
        """Handle an entry of a class of its own at once, in this task, if the actor is idle; else put it into the mailbox.

        Only for functions of `take_at_once`. The handler, which is sync, settles the entry, and so does the end of the actor.
        """
        if self._idle and (handler := self._table.get(type(entry))) is not None and self._scheduler.may_inline():
            self._scheduler.call_inline(self, handler, entry, entry)
        else:
            self.enqueue(entry)

    def take_at_once(self, take: Callable[[Ask], bool]) -> None:
        """Give questions with sync handlers to a function while this actor is idle; it returns whether it has taken the question.

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
        while at and type(batch[at - 1]) in (Start, EndTurn):
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
        """Call `ended` when this actor ends, at once if it has."""
        if self.phase is STOPPED:
            ended(self.reason)
            return
        self.check_thread("watch of")
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
        self.check_thread("link to")
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
    def ending(self) -> ActorEnding | None:
        """The state of the ending that is under way, if any."""
        return self._extras.ending if self._extras is not None else None

    def end_for_peers(self) -> ForPeers | None:
        """Return why its handler and its tasks are cancelled, because it ends."""
        ending = self.ending
        return None if ending is None else reason_of_end(ending.reason)

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


class DeadCell(Cell):
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


def make_dead(system: System, number: int) -> Cell:
    """Make the cell of an actor that is known only to have ended."""
    cell = DeadCell(system.scheduler, NoActor(), system.root, None, number)
    cell.phase, cell.reason, cell._idle, cell._actor = STOPPED, SHUTDOWN, False, None
    return cell


class NoActor:
    """Stands for the actor of a cell that has none."""

    _table: ClassVar[dict[Any, Any]] = NO_HANDLERS
    _is_traced: ClassVar[bool] = False


Cell.dead = DeadCell


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


@attrs.define(eq=False, weakref_slot=False)
class ActorEnding:
    """The state of an actor that ends or restarts."""

    reason: Reason
    final: bool = attrs.field(default=False, kw_only=True)
    """Whether the actor must not restart, whatever its policy, since its parent or the system ends it."""
    cancel: bool = attrs.field(default=False, kw_only=True)
    """Whether to cancel everything that can be cancelled, and to kill the children."""
    graceful: bool = attrs.field(default=False, kw_only=True)
    """Whether children may handle their queued messages."""
    restart: bool = attrs.field(default=False, init=False)
    escalate: bool = attrs.field(default=False, init=False)
    delay: float = attrs.field(default=0.0, init=False)
    due: float | None = attrs.field(default=None, init=False)
    """When the actor restarts, once it only waits for that."""
    message: Any = attrs.field(default=None, init=False)
    together: int = attrs.field(default=0, init=False)
    """The number of children that are being stopped together and have not ended."""
    closed: bool = attrs.field(default=False, init=False)
    """Whether step 3 has begun."""
    concluded: bool = attrs.field(default=False, init=False)
    """Whether the actor only waits for its restart."""


@attrs.define(eq=False, weakref_slot=False)
class Group:
    """Siblings that restart together: all must have concluded before the first one starts again."""

    members: dict[Cell, None] = attrs.Factory(dict)
    """In order of start."""
    running: list[Cell] = attrs.Factory(list)
    """Members that have not concluded, and some that have."""
    delay: float = 0.0

    def add(self, cells: list[Cell]) -> None:
        """Add members; they may be members already."""
        self.running = sorted({*self.members, *cells}, key=lambda member: member._number)
        self.members = dict.fromkeys(self.running)


class Extras:
    """The rare parts of an actor's record, made on first use so that other actors do not pay for them."""

    __slots__ = (
        "brought", "children", "ended", "ending", "failure", "host", "inbox", "links", "names", "open_asks", "queued", "receive_timer",
        "group", "regroups", "restarts", "signals", "stash", "stop_timer", "supervised", "take", "timers", "touched",
        "traced", "watched", "watchers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.brought: RemoteTell | RemoteAsk | None = None
        """The entry that is being handled, if it came over a connection."""
        self.children: dict[Cell, bool] | None = None
        """The children, and whether each was adopted; adopted children are stopped together."""
        self.ended: trio.Event | None = None
        """For tasks that wait for the end; made for the first of them."""
        self.ending: ActorEnding | None = None
        self.failure: BaseException | None = None
        """The error that the actor object failed with, with its traceback, until it is decided whether the parent fails with it."""
        self.host: ActorHost | None = None
        self.inbox: Any = None
        self.links: dict[Cell, None] | None = None
        self.names: dict[str, Cell] | None = None
        self.open_asks: OpenAsks | None = None
        self.queued = False
        self.receive_timer: Timer | None = None
        self.group: Group | None = None
        self.regroups: deque[float] | None = None
        self.restarts = 0
        self.signals: deque[Any] | None = None
        self.stash: list[Any] | None = None
        self.stop_timer: Timer | None = None
        self.supervised: Supervised | None = None
        self.take: Callable[[Ask], bool] | None = None
        """Takes questions of the idle actor in their askers' tasks; see `Cell.take_at_once`."""
        self.timers: Timers | None = None
        self.touched = 0.0
        self.traced: Wrapped | None = None
        """The entry that is being handled, in a traced system."""
        self.watched: dict[tuple[Any, Hashable], Callable[[], None]] | None = None
        self.watchers: dict[Hashable, Callable[[Reason], None]] | None = None
