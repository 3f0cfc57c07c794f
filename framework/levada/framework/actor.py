"""`Actor`: state, and a handler for each class of message.

A class becomes an actor class when it is defined: `attrs` makes its constructor from the annotated fields, and its handlers become a
table from message class to function, so that handling a message is one look-up and one call.

Private fields used here: ``Cell._asking``, ``Cell._batch``, ``Cell._extras``, ``Cell._idle``, ``Cell._scheduler``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from _thread import get_ident
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    TypeVarTuple,
    Unpack,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    overload,
)

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._runtime.ask import OpenAsks, Reply
from ._runtime.cell import Cell
from ._runtime.channel_link import ChannelLink
from ._runtime.dispatch import RUNTIME_ENTRIES
from ._runtime.host import ActorHost
from ._runtime.remote import peer_of
from ._runtime.tokens import TURN
from .durations import is_duration
from .errors import ActorError, ConfigurationError, MailboxFull
from .events import Unhandled
from .handlers import Behaviour, build_table, find_handler, flatten, handles, is_handler, refuse_generator, unprotected
from .links import NORMAL, Down, Reason
from .loop import Inbox
from .message import define_fields
from .ref import Ref
from .supervision import one_for_one
from .text import text_of
from .timers import Timers

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from .identity import RemotePeer
    from .mailbox import MailboxPolicy
    from .metrics import Sample
    from .supervision import SpawnOptions, Supervision
    from .system import ActorSystem

    M = TypeVar("M", default=Any)  # strict checkers take `class Desk(Actor)` too
else:
    from typing import TypeVar

    M = TypeVar("M")

__all__ = ["Actor", "ReceiveTimeout", "actor"]

R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@attrs.frozen
class ReceiveTimeout:
    """The actor handled nothing for the time that `Actor.set_receive_timeout` set."""

    seconds: float


@dataclass_transform(field_specifiers=(attrs.field,))
class Actor(Generic[M]):
    """State, and handlers for messages. Derive, annotate fields, mark methods with `handles`; or write ``async def run(self)``.

    ``class Counter(Actor[Add | Get])`` gives refs typed by the union, and the definition fails if a handler is missing.
    Without the brackets the refs take anything.

    Fields are constructor arguments (by `attrs`). A restart calls the factory given to `spawn` for a new object, so state starts over.
    `ref`, `system` and everything that needs them work from `started` on, not in ``__init__``.
    An actor belongs to the system's thread; other threads use `Ref.from_thread`.
    """

    __slots__ = ("_cell",)

    _cell: Any  # a Cell; set by spawn

    trap_exits = False
    """Whether this actor gets an `Exit` message when a linked actor ends, instead of ending too."""
    accept_remote_links = False
    """Whether an actor in another system may link to this one. Its exit signals then end this actor, as local ones do."""
    strategy = one_for_one()
    """Which children restart together, see `one_for_all`."""
    stash_limit = 1000
    """The most messages that `stash` holds."""

    _table: ClassVar[dict[Any, Any]] = {}
    _is_connection: ClassVar[bool] = False
    _is_traced: ClassVar[bool] = True
    _has_about: ClassVar[bool] = False
    _has_metrics: ClassVar[bool] = False
    _is_loop: ClassVar[bool] = False
    _has_start: ClassVar[bool] = False
    _has_stopping: ClassVar[bool] = False
    _has_restarting: ClassVar[bool] = False
    _has_undelivered: ClassVar[bool] = False
    _slots: ClassVar[tuple[str, ...]] = ()
    """Fields that are not in the object's dictionary."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, kinds: Any) -> Any:
            if cls is Actor and isinstance(kinds, tuple):
                names = [kind.__name__ if isinstance(kind, type) else text_of(kind, repr) for kind in kinds]
                raise ConfigurationError(f"Actor[{', '.join(names)}]: several classes of messages are Actor[A | B]")
            return super().__class_getitem__(kinds)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__attrs_attrs__" in vars(cls):  # a decorator has made the class anew, with slots
            raise ConfigurationError(
                f"{cls.__name__} is an attrs class already, as each actor class is: leave the decorator out"
            )
        define_fields(cls, slots=False, eq=False, repr=False)
        _check_names(cls)
        cls._table = build_table(cls)
        for name, arguments in _HOOKS.items():
            if name in vars(cls):
                hook = vars(cls)[name]
                refuse_generator(hook, f"{cls.__name__}.{name}")
                _check_takes(hook, f"{cls.__name__}.{name}", arguments)
                unprotected(hook)
        cls._is_loop = hasattr(cls, "run")
        run: Any = getattr(cls, "run", None)  # compiled code does not say whether it is async
        if inspect.isfunction(run) and not inspect.iscoroutinefunction(run):
            raise ConfigurationError(f"{cls.__name__}.run must be async: it is the actor's own loop")
        if cls._is_loop and len(cls._table) > len(RUNTIME_ENTRIES) + 1:
            raise ConfigurationError(f"{cls.__name__} has both run() and handlers; keep one of them")
        if inspect.iscoroutinefunction(cls.undelivered):
            raise ConfigurationError(f"{cls.__name__}.undelivered must not be async: the actor has ended")
        if inspect.iscoroutinefunction(cls.metrics):
            raise ConfigurationError(
                f"{cls.__name__}.metrics must be sync: it returns figures, also when the actor has ended"
            )
        cls._has_start = cls._is_loop or cls.started is not Actor.started
        cls._has_stopping = cls.stopping is not Actor.stopping
        cls._has_restarting = cls.restarting is not Actor.restarting
        cls._has_undelivered = cls.undelivered is not Actor.undelivered
        cls._has_metrics = callable(cls.metrics) and cls.metrics is not Actor.metrics
        cls._slots = tuple(
            name
            for base in cls.__mro__
            if base is not Actor
            for name, value in vars(base).items()
            if isinstance(value, types.MemberDescriptorType)
        )
        cls._check_cover()

    @classmethod
    def _check_cover(cls) -> None:
        if cls._is_loop:
            return
        for base in getattr(cls, "__orig_bases__", ()):
            for kind in _promised(base):
                if isinstance(kind, list | tuple | str) or attrs.has(type(kind)):
                    raise ConfigurationError(
                        f"{cls.__name__}: {kind!r} is not a class of messages; several are Actor[A | B]"
                    )
                if isinstance(kind, type) and find_handler(kind, cls._table) is None:
                    cure = "mark the method that takes it with @handles"
                    if kind is object:
                        cure = (
                            "name the messages that it takes, as in Actor[A | B], or derive from Actor without brackets"
                        )
                    raise ConfigurationError(
                        f"{cls.__name__} promises to handle {kind.__name__} and has no handler for it: {cure}"
                    )

    def started(self) -> Awaitable[None] | None:
        """Run before any message, in each incarnation; may be async. If it raises, the actor fails."""
        return None

    def stopping(self, reason: Reason) -> Awaitable[None] | None:
        """Run when all children have stopped, before the actor's tasks and contexts are closed; may be async, cannot spawn.

        It also runs if `started` has failed, or has not run because the actor was stopped first.
        Shielded from cancellation for ``stop_timeout`` seconds (a setting of the system).
        """
        return None

    def restarting(self, error: BaseException | None, message: Any) -> Awaitable[None] | None:
        """Run instead of `stopping` before a restart. `message` was being handled, and is dropped."""
        return None

    def undelivered(self, messages: list[Any]) -> None:
        """Take the messages that were in the mailbox when the actor ended. By default they become dead letters."""

    def metrics(self) -> Iterable[Sample]:
        """Return this actor's figures for a monitoring system, see `levada.framework.metrics`. By default there are none.

        Called for each scrape, and once when the object ends or is replaced by a restart, after its hooks. Must be quick and not async.
        """
        return ()

    def unhandled(self, message: Any) -> Any:
        """Take a message without a handler. By default: publish `Unhandled`; fail an ask, log a warning for a tell."""
        cell = self._cell
        self.system.counters.unhandled += 1
        self.system.events.publish(Unhandled(message, cell))
        question = cell._asking
        if question is not None and question.message is message:
            cell._asking = None
            kind = f"the class {message.__name__}" if isinstance(message, type) else type(message).__name__
            question.fail(ActorError(f"{cell.path} ({type(self).__name__}) has no handler for {kind}", actor=cell.path))
        else:
            self.system.log_unhandled.note(message, cell, f"{type(self).__name__} has no handler for it")

    def _bound(self) -> Cell:
        try:
            cell: Cell = self._cell
        except AttributeError:
            raise ActorError(
                f"this {type(self).__name__} was not spawned, or is still in __init__: use started()"
            ) from None
        return cell

    def _here(self) -> Cell:
        """Return the cell; raise unless this is the system's thread."""
        cell = self._bound()
        if get_ident() != cell._scheduler.thread:  # saves the call
            cell.check_thread("change of")
        return cell

    @property
    def ref(self) -> Ref[M]:
        """This actor's address."""
        return self._bound()

    @property
    def system(self) -> ActorSystem:
        """The system that this actor lives in."""
        return self._bound()._scheduler.system  # type: ignore[return-value]  # the only class of systems that there is

    @property
    def peer(self) -> RemotePeer | None:
        """The peer whose message is being handled, if it came over a connection; None for a message of this system.

        An actor that a connection has spawned always has the connection's peer, even for its own timers and between messages.
        In a route of RSocket it is the peer of the request, which may have credentials of its own.
        A task of the actor should read this before it waits, because the actor may handle another message by then.
        """
        return peer_of(self._bound())

    @overload
    def spawn(self, factory: Callable[[*Ts], Actor[T]], *args: *Ts, **options: Unpack[SpawnOptions]) -> Ref[T]: ...
    @overload
    def spawn(self, factory: Callable[[T], Awaitable[object]], **options: Unpack[SpawnOptions]) -> Ref[T]: ...
    def spawn(  # type: ignore[misc]  # mypy does not take Any for *Ts
        self,
        factory: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        mailbox: MailboxPolicy | None = None,
        supervise: Supervision = "stop",
    ) -> Ref[Any]:
        """Start a child, which ends before this actor does. Arguments and errors are the same as for `ActorSystem.spawn`."""
        ref: Ref[Any] = self.system.spawn_below(self._bound(), factory, args, name, mailbox, supervise)
        return ref

    @property
    def children(self) -> list[Ref[Any]]:
        """The children that have not ended, in order of start."""
        extras = self._bound()._extras
        return list(extras.children) if extras is not None and extras.children is not None else []

    @enable_ki_protection
    def watch(self, target: Any, tag: Any = None) -> None:
        """Get one `Down` message when `target` ends, at once if it has; watching again with the same tag changes nothing.

        The `Down` of an actor overtakes queued messages. The `Down` of a handle does not: it comes after the last message of a
        channel that feeds this mailbox.  Watches survive a restart.  The watch keeps a handle alive.

        Args:
            target: a `Ref`, or a `Sender` or `Receiver` of a channel.
            tag: any hashable value, given back in `Down.tag`.

        Raises:
            HandleMoved: the handle was sent away before.
            TypeError: `target` is neither.
            WrongThread: `target` lives in another thread.
        """
        cell = self._here()
        key = (target, tag)
        watched = cell.make_extras().watched
        if watched is None:
            watched = cell.make_extras().watched = {}
        if key in watched:
            return

        def ended(reason: Any) -> None:
            if watched.pop(key, None) is not None:
                # Looked up now, because the cell may have changed to a dead one.
                put = cell.put_first if isinstance(target, Ref) else cell.admit
                put(cell.enveloped(Down(target, reason, tag)))

        watched[key] = lambda: None  # a placeholder: the target may call `ended` before we know how to undo the watch
        forget: Callable[[], None]
        try:
            if isinstance(target, Ref):
                target.add_watcher((cell, tag), ended)  # type: ignore[attr-defined]
                forget = functools.partial(target.forget_watcher, (cell, tag))  # type: ignore[attr-defined]
            else:
                forget = _handle(target, "watch").on_terminated(lambda _, error: ended(error))
        except BaseException:
            del watched[key]
            raise
        if key in watched:
            watched[key] = forget

    def unwatch(self, target: Any, tag: Any = None) -> None:
        """Undo `watch`; a `Down` that is already in the mailbox stays there."""
        watched = self._here().make_extras().watched
        forget = watched.pop((target, tag), None) if watched is not None else None
        if forget is not None:
            forget()

    def link(self, target: Any) -> None:
        """Make this actor and `target` end together; if `target` has ended, its exit signal comes at once.

        With a channel handle: if the other side ends the channel, or it is lost (``Lost``), this actor ends. If this actor ends, other
        than as `Normal`, the sender is cancelled or the receiver closed.

        Args:
            target: a `Ref`, or a `Sender` or `Receiver` of a channel. An actor in another system has to ``accept_remote_links``.

        Raises:
            HandleMoved: the handle was sent away before.
            TypeError: `target` is neither.
            WrongThread: `target` lives in another thread.
        """
        cell = self._here()
        if isinstance(target, Ref):
            cell.link(target)
        elif ChannelLink.find(cell, target) is None:
            ChannelLink(cell, _handle(target, "link")).tie()

    def unlink(self, target: Any) -> None:
        """Undo `link`; does nothing if there is no link."""
        cell = self._here()
        if isinstance(target, Ref):
            cell.unlink(target)
        else:
            link = ChannelLink.find(cell, target)
            if link is not None:
                link.cut()

    def stop(self) -> None:
        """End this actor after the running handler, as `Normal`. Queued messages go to `undelivered`."""
        self.system.lifecycle.request(self._here(), NORMAL)

    def become(self, behaviour: type[Behaviour] | None) -> None:
        """Switch to another set of handlers from the next message on; ``None`` switches back to the actor's own.

        Raises:
            TypeError: `behaviour` is neither a class derived from `Behaviour` nor None.
        """
        if behaviour is not None and not (isinstance(behaviour, type) and issubclass(behaviour, Behaviour)):
            raise TypeError(f"become() got {behaviour!r:.100}, wanted a class derived from Behaviour, or None")
        cell = self._here()
        cell._table = behaviour._table if behaviour is not None else type(self)._table
        if cell._batch:
            cell._batch.append(TURN)

    def reply_later(self) -> Reply[Any]:
        """Answer the current ask later. The handler's return value is then ignored.

        Raises:
            ActorError: the current message is not an ask, or `reply_later` was called for it before.
        """
        cell = self._here()
        question = cell._asking
        if question is None:
            raise ActorError(f"{cell.path} is not handling an ask now", actor=cell.path)
        cell._asking = None
        extras = cell.make_extras()
        if extras.open_asks is None:
            extras.open_asks = OpenAsks()
        return Reply(question, extras.open_asks)

    def stash(self, message: Any) -> None:
        """Set the current message aside until `unstash_all`; an ask stays an ask.

        Raises:
            MailboxFull: the stash holds `stash_limit` messages.
        """
        cell = self._here()
        extras = cell.make_extras()
        if extras.stash is None:
            extras.stash = []
        if len(extras.stash) >= self.stash_limit:
            raise MailboxFull(
                f"the stash of {cell.path} holds {self.stash_limit} messages (raise stash_limit)",
                actor=cell.path,
                capacity=self.stash_limit,
                message=message,
            )
        question = cell._asking
        if question is not None and question.message is message:
            cell._asking = None
            extras.stash.append(question)
        elif extras.brought is not None and extras.brought.message is message:
            extras.stash.append(extras.brought)
        elif extras.traced is not None and extras.traced.message is message:
            extras.stash.append(extras.traced)
        else:
            extras.stash.append(message)

    def unstash_all(self) -> None:
        """Put the stashed messages in front of the mailbox, in the order in which they came."""
        cell = self._here()
        extras = cell.make_extras()
        if extras.stash:
            cell.put_back(extras.stash)
            extras.stash = None
            cell._batch.append(TURN)  # `become` may have run in this same handler; a new turn sees its table

    def _find_handler(self, kind: type, table: dict[Any, Any]) -> Callable[[Any, Any], Any]:
        return cast("Callable[[Any, Any], Any]", find_handler(kind, table) or type(self).unhandled)

    @property
    def timers(self) -> Timers:
        """Keyed timers of this actor, see `Timers`."""
        extras = self._here().make_extras()
        if extras.timers is None:
            extras.timers = Timers(self._cell, self.system.heap)
        return extras.timers

    def set_receive_timeout(self, seconds: float | None) -> None:
        """Get a `ReceiveTimeout` message whenever the actor handled nothing for `seconds`; ``None`` switches it off.

        For actors with handlers. A loop puts `trio.move_on_after` around its ``receive``.
        """
        if seconds is not None and not is_duration(seconds):
            raise ConfigurationError(f"the receive timeout is {seconds!r}, wanted more than 0 seconds")
        cell = self._here()
        extras = cell.make_extras()
        if extras.receive_timer is not None:
            extras.receive_timer.cancel()
            extras.receive_timer = None
        if seconds is not None:
            if cell.context is None:
                # The scheduler notes the time of a turn only if the actor has its own context.
                cell.context = self.system.scheduler.base_context()
            extras.touched = trio.current_time()
            look = functools.partial(_look_at_receive_timeout, cell, seconds)
            extras.receive_timer = self.system.heap.after(seconds, look)

    def _host(self) -> ActorHost:
        extras = self._here().make_extras()
        if extras.host is None:
            extras.host = ActorHost(self._cell)
        return extras.host

    def start_soon(self, function: Callable[[*Ts], Awaitable[object]], *args: *Ts, name: object = None) -> None:
        """Run a task in this actor's nursery. It ends with the actor; if it fails, the actor fails."""
        self._host().start_soon(function, args, name)

    async def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter a context; leave it when this actor ends or restarts, last entered first.

        Cancellation: the context was left again, or never entered.
        """
        return cast("T", await self._host().enter(context))

    def pipe(
        self,
        function: Callable[[], Awaitable[T]],
        wrap: Callable[[T], Any],
        *,
        failed: Callable[[Exception], Any] | None = None,
    ) -> None:
        """Run `function` as a task and tell this actor ``wrap(result)``. The actor handles messages meanwhile.

        Args:
            function: an async function without parameters (`functools.partial` for arguments).
            wrap: makes the message.
            failed: makes the message for an exception; without it the actor fails.
        """
        self.start_soon(self._pipe, function, wrap, failed, name=function)

    async def _pipe(self, function: Callable[[], Awaitable[T]], wrap: Callable[[T], Any], failed: Any) -> None:
        try:
            message = wrap(await function())
        except Exception as error:
            if failed is None:
                raise
            message = failed(error)
        await self._cell.send(message)

    @property
    def mailbox(self) -> Inbox[M]:
        """The mailbox, for the loop of an actor with ``run``: ``async for message in self.mailbox``.

        Raises:
            ActorError: the actor has handlers; they take the messages.
        """
        if not self._is_loop:
            path = self._bound().path
            raise ActorError(f"{path} has handlers, not a loop: they take its messages", actor=path)
        inbox = self._bound().make_extras().inbox
        assert inbox is not None
        return cast("Inbox[M]", inbox)

    def _start(self) -> Any:
        """Start an incarnation: call the hook, then the loop if there is one."""
        if self._is_loop:
            cell = self._cell
            inbox = cell.make_extras().inbox = Inbox(cell)
            cell._scheduler = inbox
            return self._run_loop(inbox)
        return self.started()

    async def _run_loop(self, inbox: Inbox[M]) -> None:
        try:
            # The checkpoint makes the loop a waiting handler, so `Lifecycle.waited` sees its end in any case.
            await trio.lowlevel.checkpoint()
            waiting = self.started()
            if waiting is not None:
                await waiting
            await self.run()  # type: ignore[attr-defined]
        except BaseException as error:
            inbox.let_go(error)
            raise
        finally:
            self._cell._scheduler = inbox.scheduler
            inbox.let_go()


Actor._table = build_table(Actor)  # so that one of no class of its own can be told to stop


def _check_names(cls: type) -> None:
    for field in attrs.fields(cls):
        if isinstance(getattr(Actor, field.name, None), property):
            raise ConfigurationError(
                f"{cls.__name__}.{field.name}: each actor has a property of this name; choose another"
            )
    for name, value in vars(cls).items():
        if is_handler(value) and hasattr(Actor, name):
            raise ConfigurationError(
                f"{cls.__name__}.{name}: each actor has a method of this name; name the handler differently"
            )


_HOOKS: Final[dict[str, tuple[str, ...]]] = {
    "started": (),
    "stopping": ("reason",),
    "restarting": ("error", "message"),
    "undelivered": ("messages",),
    "unhandled": ("message",),
    "run": (),
}
"""What each hook gets beside self."""


def _handle(target: Any, use: str) -> Any:
    """Return a handle of a channel; raise `TypeError` for anything else."""
    if not hasattr(target, "on_terminated"):
        raise TypeError(f"{use}() got {target!r:.100}, wanted a Ref, or a Sender or Receiver of a channel")
    return target


def _check_takes(hook: Any, where: str, arguments: tuple[str, ...]) -> None:
    if inspect.isfunction(hook):
        try:
            inspect.signature(hook, follow_wrapped=False).bind("self", *arguments)
        except TypeError as error:
            raise ConfigurationError(f"{where} is called with {', '.join(('self', *arguments))}: {error}") from None


def _promised(base: Any) -> list[Any]:
    """List the message classes, and type parameters, that a base class with brackets promises to handle."""
    origin, arguments = get_origin(base), get_args(base)
    if origin is Actor:
        return [] if arguments[0] is Any else flatten(arguments[0])
    if not (isinstance(origin, type) and issubclass(origin, Actor)):
        return []
    values = dict(zip(origin.__parameters__, arguments, strict=False))  # type: ignore[attr-defined]
    promised = [part for upper in origin.__orig_bases__ for part in _promised(upper)]  # type: ignore[attr-defined]
    kinds = [values.get(part, part) for part in promised]
    return [kind for part in kinds if part is not Any for kind in flatten(part)]


def _look_at_receive_timeout(cell: Cell, seconds: float) -> None:
    extras = cell.make_extras()
    left = seconds
    if cell._idle:
        left = extras.touched + seconds - trio.current_time()
        if left <= 0:
            Cell.tell(cell, cell.enveloped(ReceiveTimeout(seconds)))
            left = seconds
    look = functools.partial(_look_at_receive_timeout, cell, seconds)
    extras.receive_timer = cell.system.heap.after(left, look)


def actor(function: Callable[[M], Any]) -> Callable[[], Actor[M]]:
    """Make an actor class of one function: ``async def show(price: Price) -> None``; the annotation says which messages.

    Example:
        >>> from levada.framework import actor, message
        >>> @message
        ... class Line:
        ...     text: str
        >>> @actor
        ... def show(line: Line) -> None:
        ...     print(line.text)
    """
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    parameters = list(inspect.signature(function).parameters.values())
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if not parameters or parameters[0].kind in by_name or any(each.default is each.empty for each in parameters[1:]):
        raise ConfigurationError(
            f"{plain.__name__} takes {len(parameters)} parameters, wanted one message: "
            "an actor that has more is a class with fields, and a task that takes more is started with start_soon"
        )
    refuse_generator(plain, plain.__name__)
    annotation = plain.__annotations__.get(parameters[0].name)
    if isinstance(annotation, str):
        frame = sys._getframe(1)
        try:
            annotation = eval(annotation, plain.__globals__, dict(frame.f_locals))
        except Exception as error:
            what = f"{plain.__name__}: cannot resolve the annotation {annotation!r} ({error})"
            raise ConfigurationError(what) from error
    if annotation is None:
        annotation = object
    unprotected(plain)

    handle: Callable[[Actor[M], M], Any]
    if inspect.iscoroutinefunction(function):

        async def handle_async(self: Actor[M], message: M) -> Any:
            return await function(message)

        handle = handle_async
    else:

        def handle_sync(self: Actor[M], message: M) -> Any:
            return function(message)

        handle = handle_sync

    handle.__name__ = "handle"
    vars(handle)["__wrapped__"] = plain  # it has the annotation of the answer
    generic: Any = Actor
    body = {"handle": handles(annotation)(handle), "__doc__": plain.__doc__, "__module__": plain.__module__}
    return cast(
        "Callable[[], Actor[M]]",
        types.new_class(plain.__name__, (generic[annotation],), exec_body=lambda ns: ns.update(body)),
    )
