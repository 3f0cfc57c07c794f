"""`Durable`: an actor whose state survives its process, because it is rebuilt from its events.

A handler records events. A method marked with `applies` changes the state for one event, when it is recorded and at each replay. The shard
(`shard.py`) gives the entity one command after another, and writes the recorded events before it sends the answer.

A class of events may get new fields with defaults at its end. If the meaning of its fields changes, it sets ``event_version: ClassVar[int] = 2``,
and a function marked with `upcasts` converts the columns of an old row to the next version, or makes an event of them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
import textwrap
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from numbers import Real
from typing import Any, ClassVar, NoReturn, TypeVar

import attrs
import trio

from levada.framework import Actor, Failed, Ref, handles
from levada.framework.embedding import BEFORE_ASKS, local_ref, stopped_error
from levada.framework.errors import ActorError, ConfigurationError
from levada.framework.handlers import build_table, find_handler, flatten
from levada.framework.links import CANCELLED
from levada.framework.message import tag_of

from .reminders import MOST_BYTES as REMINDER_BYTES
from .reminders import Reminder
from .rows import FORGOT, REMIND, LogRow
from .turns import CommandTurn, Live

__all__ = ["Durable", "Upcaster", "applies", "bind", "handler_of", "state_not_kept", "state_set_by_handlers", "upcasts"]

M = TypeVar("M")
F = TypeVar("F", bound=Callable[..., Any])
D = TypeVar("D")

Upcaster = Callable[[Mapping[str, Any]], Any]

_APPLIES, _UPCASTS = "__levada_applies__", "__levada_upcasts__"
MOST_BYTES = 8 << 20
"""The most bytes that one command may record, approximately."""
_LONGEST = 3650 * 86400.0
"""Whoever gives fewer seconds since 1970 for a reminder means seconds from now on."""


class Durable(Actor[M]):
    """An actor whose state survives its process. Derive a class, give its fields defaults, and mark methods with `handles` and `applies`.

    Only `applies` methods change the state, with the events that handlers `record`. An answer is sent when the events of its handler are on
    disk. If a handler raises, its events are dropped, except those that it committed before.

    The fields are the state. Each has a default and a type that a message may have, because snapshots store them.

    Example:
        >>> from levada.framework import Asks, handles, message
        >>> @message("docs.deposit")
        ... class Deposit(Asks[int]):
        ...     amount: int
        >>> @message("docs.deposited")
        ... class Deposited:
        ...     amount: int
        >>> class Account(Durable[Deposit]):
        ...     balance: int = 0
        ...     @handles
        ...     def deposit(self, m: Deposit) -> int:
        ...         self.record(Deposited(m.amount))
        ...         return self.balance
        ...     @applies
        ...     def deposited(self, e: Deposited) -> None:
        ...         self.balance += e.amount
    """

    _live: Live = attrs.field(init=False)

    appliers: ClassVar[dict[type, Callable[[Any, Any], None]]] = {}
    """The `applies` methods, by class of events."""
    command_table: ClassVar[dict[Any, Any]] = {}
    """The handlers, by class of messages."""
    upcasters: ClassVar[dict[tuple[str, int], Upcaster]] = {}
    """The functions that `upcasts` old events, by wire name and version."""
    snapshot_version: ClassVar[int] = 1
    """Change it when the same events lead to another state than before: snapshots of other versions are ignored."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.appliers = {**cls.appliers, **_appliers(cls)}
        cls.command_table = build_table(cls)
        cls.upcasters = {**cls.upcasters, **_upcasters(cls)}

    @handles(CommandTurn)
    def _take_turn(self, turn: CommandTurn) -> Awaitable[None] | None:
        turn.running = True
        try:
            handler = turn.handler
            result = handler(self, turn.message)
            if hasattr(result, "__await__"):
                return self._finish_turn(turn, result)
            turn.shard.finished(turn, result)
        except BaseException as error:
            self._fail_turn(turn, error)
            raise
        return None

    async def _finish_turn(self, turn: CommandTurn, result: Awaitable[Any]) -> None:
        turn.waiter = trio.lowlevel.current_task()
        try:
            turn.shard.finished(turn, await result)
        except BaseException as error:
            self._fail_turn(turn, error)
            raise
        finally:
            BEFORE_ASKS.pop(turn.waiter, None)

    def _fail_turn(self, turn: CommandTurn, error: BaseException) -> None:
        reason = Failed(error) if isinstance(error, Exception) else CANCELLED
        turn.fail(stopped_error(local_ref(self), reason, turn.message, begun=True))

    @property
    def entity(self) -> str:
        """The id of this entity."""
        return self._here_live("entity").entity

    def record(self, *events: Any) -> None:
        """Apply events to the state; they are written before the answer of this command is sent.

        Raises:
            ActorError: no command is being handled. Timers, watches, messages to `ref` and `applies` methods cannot record: send the entity a
                command.
            ConfigurationError: the class has no `applies` method for an event, or ``shards(events=…)`` does not name it.
            SchemaMismatch: a value does not fit its column.
            ValueError: the command has recorded more than 8 MiB since its last commit.
            Exception: an error of the `applies` method. The command fails, even if the handler catches it.
        """
        live, turn = self._here_turn("record()")
        writer = live.writer
        kinds, appliers = writer.log.kinds, live.appliers
        if turn.waiter is not None:
            BEFORE_ASKS[turn.waiter] = self.commit
        for event in events:
            kind = kinds.get(type(event))
            if kind is None:
                raise ConfigurationError(
                    f"{type(self).__name__} records {type(event).__name__}, which shards(events=…) does not name"
                )
            values_of = kind.values
            values, size = values_of(event)
            # As in a replay, which has no command: an `applies` method that records fails now, not there.
            turn.running = False
            try:
                appliers[kind.cls](self, event)
            except BaseException as error:
                live.failed = error
                raise
            finally:
                turn.running = True
            live.sequence += 1
            live.since += 1
            row = LogRow(live, kind.tag, writer.now(), turn.command, kind.version, values, size)
            live.recorded.append(row)
            live.size += row.size
        if live.size > MOST_BYTES:
            _refuse_size(live)

    async def commit(self) -> None:
        """Wait until all events recorded so far are on disk. Only an ``async def`` handler needs this, before it affects others.

        Committed events stay, even if the handler raises afterwards.

        Cancellation:
            the events may be on disk, or may be written later.
        """
        live, turn = self._here_turn("commit()")
        if turn.waiter is not None:
            BEFORE_ASKS.pop(turn.waiter, None)
        event = live.writer.commit(live)
        if event is not None:
            await event.wait()
        else:
            await trio.lowlevel.checkpoint()

    def after_commit(self, ref: Ref[Any], message: Any) -> None:
        """Tell an actor a message once the events of this command are on disk. A plain `Ref.tell` is sent at once.

        Delivery is at most once: the message is lost if the process ends in between, or if `Ref.tell` raises, which is a line in the log.

        Raises:
            ActorError: no command is being handled.
            TypeError: `ref` is not a ref.
        """
        live, _ = self._here_turn("after_commit()")
        if not hasattr(ref, "tell"):  # an `Entity` has it too
            raise TypeError(f"after_commit() got {ref!r:.60}, wanted the ref of an actor")
        live.tells = live.tells or []
        live.tells.append((ref, message))

    def remind(self, at: float | datetime, message: Any, *, key: str | None = None) -> None:
        """Send this entity a message at a given time, even after a restart. The reminder is written with the events of this command.

        The message is a command like any other and is handled once; if its handler fails, it is tried again later. Overdue reminders are sent at
        once.

        Args:
            at: seconds since 1970, or a datetime with a timezone.
            message: an instance of a class that this actor handles.
            key: a reminder replaces an earlier one with the same key. None: the wire name of the message.

        Raises:
            ActorError: no command is being handled.
            ConfigurationError: the class has no handler for the message, or `at` has no timezone, is not a number, or is a number of a moment
                before 1980 (except 0 and less, which are due at once), or `key` is no text.
            TypeError, ValueError: the message cannot be encoded.
            ValueError: the command has recorded more than 8 MiB since its last commit, or the shard would have more than 12 MiB of pending reminders.
        """
        live, _ = self._here_turn("remind()")
        if find_handler(type(message), self.command_table) is None:
            raise ConfigurationError(f"{type(self).__name__} has no handler for {type(message).__name__}")
        if isinstance(at, datetime):
            if at.utcoffset() is None:
                raise ConfigurationError(
                    "a datetime without a timezone depends on the machine: use datetime.now(UTC), for example"
                )
            seconds = at.timestamp()
        else:
            seconds = _seconds_of(at, live.writer.now() / 1e6)
        reminders = live.writer.reminders
        key = tag_of(type(message)) if key is None else key
        try:
            key.encode()
        except (AttributeError, UnicodeEncodeError):
            raise ConfigurationError(f"the key of a reminder is {key!r:.100}, wanted Unicode text") from None
        command = f"$remind-{self.system.platform.token_bytes(16).hex()}"
        reminder = Reminder(live.entity, key, command, seconds, reminders.codec.encode(message))
        if reminders.size + reminders.coming + reminder.size > REMINDER_BYTES:
            raise ValueError(
                f"shard {live.writer.number} would have more than {REMINDER_BYTES} bytes of pending reminders"
            )
        self._keep(live, REMIND, reminder)

    def forget_reminder(self, key: str | type) -> bool:
        """Cancel a reminder; return whether there was one. The key may be the message's class.

        Raises:
            ActorError: no command is being handled.
        """
        live, _ = self._here_turn("forget_reminder()")
        name = tag_of(key) if isinstance(key, type) else key
        for row in reversed(live.own or ()):
            found = live.writer.reminders.read(row)
            if found.key == name:
                if row.kind == FORGOT:
                    return False
                self._keep(live, FORGOT, found)
                return True
        reminder = live.writer.reminders.pending.get((live.entity, name))
        if reminder is None or reminder.id in live.writer.reminders.handled:
            return False
        self._keep(live, FORGOT, reminder)
        return True

    def _keep(self, live: Live, kind: str, reminder: Reminder) -> None:
        live.own = live.own or []
        row = live.writer.reminders.row(live.writer.own, kind, live.writer.now(), reminder)
        live.own.append(row)
        if kind == REMIND:
            live.writer.reminders.coming += reminder.size
        live.size += row.size
        if live.size > MOST_BYTES:
            _refuse_size(live)

    def reply_later(self) -> NoReturn:
        """Raise `ActorError`: a durable actor answers with the return value of its handler."""
        raise ActorError(
            f"{type(self).__name__} is durable: return the answer; the handler may be async",
            actor=self.ref.path,
        )

    def stash(self, message: Any) -> NoReturn:
        """Raise `ActorError`: messages that a durable actor sets aside belong to its state."""
        raise ActorError(
            f"{type(self).__name__} is durable: record an event for a message that it sets aside", actor=self.ref.path
        )

    def become(self, behaviour: Any) -> NoReturn:
        """Raise `ActorError`: a replay would not restore the behaviour."""
        raise ActorError(
            f"{type(self).__name__} is durable: keep its mode in a field, and record its changes", actor=self.ref.path
        )

    def _here_turn(self, what: str) -> tuple[Live, CommandTurn]:
        try:
            live = self._live
        except AttributeError:
            live = self._here_live(what)  # raises
        turn = live.turn
        if turn is None or not turn.running:
            raise ActorError(
                f"{what} in an @applies method, or outside a command of entity {live.entity!r:.100}: send the entity a command through its "
                "shards",
                actor=self.ref.path,
            )
        return live, turn

    def _here_live(self, what: str) -> Live:
        try:
            return self._live
        except AttributeError:
            raise ActorError(
                f"{what}: this {type(self).__name__} belongs to no shards(): use shards(system, …)[id]"
            ) from None


def _refuse_size(live: Live) -> NoReturn:
    live.failed = ValueError(
        f"one command recorded more than {MOST_BYTES} bytes: commit() between the parts, or record less"
    )
    raise live.failed


def bind(actor: Durable[Any], live: Live) -> None:
    """Connect an entity's record with its actor."""
    actor._live = live
    live.actor, live.appliers = actor, actor.appliers


def handler_of(cls: type[Durable[Any]], kind: type) -> Callable[[Any, Any], Any] | None:
    """Return the handler of a class of messages; None if there is none."""
    found: Callable[[Any, Any], Any] | None = cls.command_table.get(kind) or find_handler(kind, cls.command_table)
    return found


def applies(function: F) -> F:
    """Mark a method that changes the state for one event: ``def deposited(self, e: Deposited) -> None``.

    It runs when the event is recorded, and again at each replay. So it may depend only on the state and the event: no clock, no
    randomness, no messages.
    """
    if not hasattr(function, "__code__"):
        raise ConfigurationError(f"@applies got {function!r}, wanted a method")
    names = dict(sys._getframe(1).f_locals)
    outer = sys._getframe(1).f_back
    if outer is not None and outer.f_globals is function.__globals__ and outer.f_locals is not outer.f_globals:
        names = {**outer.f_locals, **names}
    setattr(function, _APPLIES, names)
    return function


def _appliers(cls: type) -> dict[type, Callable[[Any, Any], None]]:
    found: dict[type, Callable[[Any, Any], None]] = {}
    for name, function in list(vars(cls).items()):
        if not hasattr(function, _APPLIES):
            continue
        where = f"{cls.__name__}.{name}"
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigurationError(
                f"{where} applies an event: it must be a plain def, since it runs again at each replay"
            )
        code = function.__code__
        parameters = code.co_varnames[: code.co_argcount]
        annotation = function.__annotations__.get(parameters[1]) if len(parameters) == 2 else None
        if annotation is None:
            raise ConfigurationError(
                f"{where} applies an event: it takes self and one parameter annotated with its class"
            )
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, function.__globals__, getattr(function, _APPLIES))
            except Exception as error:
                raise ConfigurationError(
                    f"{where}: cannot resolve the annotation {annotation!r} ({error}); define the class first"
                ) from error
        setattr(function, _APPLIES, {})
        for kind in flatten(annotation):
            if kind in found:
                raise ConfigurationError(f"{where}: another method of {cls.__name__} applies {kind.__name__} too")
            found[kind] = function
    return found


def state_set_by_handlers(cls: type[Durable[Any]]) -> list[tuple[str, str]]:
    """List the handlers that assign to a field of the state, each with the field: a replay does not know of such changes."""
    fields = _state_of(cls)
    handlers = {each.__name__: each for each in cls.command_table.values() if inspect.isfunction(each)}
    return [(name, field) for name, handler in handlers.items() for field, _ in _assigned(handler) if field in fields]


def state_not_kept(cls: type[Durable[Any]]) -> list[tuple[str, str]]:
    """List the methods that apply events and assign to an attribute outside of the state, each with its name: snapshots do not have it.

    A constant may be assigned: that is how a cache is emptied.
    """
    fields, methods = _state_of(cls), {each.__name__: each for each in cls.appliers.values()}
    found = ((name, field) for name, method in methods.items() for field, resets in _assigned(method) if not resets)
    return [each for each in dict.fromkeys(found) if each[1] not in fields]


def _state_of(cls: type[Durable[Any]]) -> set[str]:
    return {field.name for field in attrs.fields(cls) if field.init}  # type: ignore[arg-type]  # each actor class is an attrs class


@functools.lru_cache(maxsize=1024)
def _assigned(function: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """The attributes that a method assigns to its first parameter, and whether it is a constant. Empty if Python has no source of it."""
    try:
        (method,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return ()
    if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or not method.args.args:
        return ()
    own = method.args.args[0].arg
    nodes = [*ast.walk(method)]
    resets = [
        target
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
    ]
    return tuple(
        (node.attr, node in resets)
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == own
    )


def upcasts(kind: str, *, version: int) -> Callable[[D], D]:
    """Mark a static method of a durable class that turns an old row into the next version of its event.

    It gets the row's columns by name, with Arrow's values (an enum is its value, a message is a dict); columns of other events are null.
    It returns a mapping of the columns of version ``version + 1``, or an event. A missing column is None,
    or the field's default if the field may not be None.
    A value that does not fit its column, or a name that is neither a field nor a column of the row, is a `ReplayFailed`.

    Args:
        kind: the wire name of the event.
        version: the version of the rows that it converts.

    Raises:
        ConfigurationError: `kind` is not text, or `version` is not 1 or more.

    Example:
        ``@staticmethod`` below ``@upcasts("account.deposited", version=1)``: ``def in_cents(row): return {"cents": round(row["amount"] * 100)}``
    """
    if not isinstance(kind, str) or not isinstance(version, int) or version < 1:
        raise ConfigurationError(f"upcasts got {kind!r} and {version!r}, wanted a wire name and a version of 1 or more")

    def mark(function: D) -> D:
        setattr(getattr(function, "__func__", function), _UPCASTS, (kind, version))
        return function

    return mark


def _upcasters(cls: type) -> dict[tuple[str, int], Upcaster]:
    """Collect the marked functions of a class body."""
    found: dict[tuple[str, int], Upcaster] = {}
    for name, member in list(vars(cls).items()):
        function = getattr(member, "__func__", member)
        key = getattr(function, _UPCASTS, None)
        if key is None:
            continue
        if not isinstance(member, staticmethod):
            raise ConfigurationError(
                f"{cls.__name__}.{name} upcasts a row: make it a @staticmethod, because there is no entity yet"
            )
        if key in found:
            raise ConfigurationError(
                f"{cls.__name__}.{name}: another method upcasts {key[0]!r} of version {key[1]} too"
            )
        found[key] = function
    return found


def _seconds_of(at: float, now: float) -> float:
    """Return the time of a reminder that is given as a number."""
    try:
        seconds = float(at) if isinstance(at, Real) else math.nan
    except OverflowError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ConfigurationError(
            f"at is {at!r:.100}, wanted seconds since 1970, as in self.system.platform.time() + 60, or a datetime with a timezone"
        )
    if 0 < seconds < _LONGEST <= now:
        raise ConfigurationError(
            f"at is {at!r:.100}, a moment before 1980: from now on, that is self.system.platform.time() + {at!r:.100}"
        )
    return seconds
