"""`Live`, the shard's record of an entity in memory, and `CommandTurn`, one of its commands, with its size and its answer.

Answers wait for the disk while later commands change the state, so an answer is copied when its handler returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from levada.framework import Codec, message
from levada.framework.embedding import AddressedMessage, Ask, LocalRef, pass_on
from levada.framework.errors import AskCycle, ConfigurationError, LevadaError
from levada.framework.message import Asks, field_types

if TYPE_CHECKING:
    import trio

    from levada.framework import Ref

    from .entity import Durable
    from .reminders import Reminder, Reminders
    from .rows import LogRow, ShardLog

__all__ = ["IMMUTABLE", "CommandTurn", "EntityCommand", "Erase", "Live", "ShardWriter", "bytes_of", "copy_of"]

IMMUTABLE: Final = frozenset({NoneType, bool, bytes, float, int, str})
"""The types of most answers."""
_NUMBERS = (bool, float, int)
_PLAIN = frozenset({*_NUMBERS, NoneType})


@message("levada.durable.command")
class EntityCommand(Asks[Any], AddressedMessage):
    """A message to an entity, sent to its shard. The entity's handler answers."""

    entity: str
    message: Any
    command: str | None = None
    """The id of the command: a second one with the same id gets the answer of the first."""

    @property
    def addressed(self) -> str:
        """The class of the message, and the entity."""
        return f"{type(self.message).__name__} to entity {self.entity!r:.100}"


@message("levada.durable.erase", frozen=True)
class Erase(Asks[int], AddressedMessage):
    """Erase an entity; the answer is the number of rows that were removed from the files."""

    entity: str

    @property
    def addressed(self) -> str:
        """What it does, and the entity."""
        return f"Erase of entity {self.entity!r:.100}"


class ShardWriter(Protocol):
    """The part of a shard that its entities use."""

    log: ShardLog
    number: int
    own: Live
    """The record of the shard's own rows."""
    reminders: Reminders

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        ...

    def commit(self, live: Live) -> trio.Event | None:
        """Queue the recorded rows; return an event that is set when they are on disk, None if they are already."""
        ...

    def placed(self, row: LogRow, offset: int) -> None:
        """Called with the offset of each row, in the order of the log."""
        ...

    def finished(self, turn: CommandTurn, value: Any) -> None:
        """Queue the answer of a handler. If it raises, because the answer cannot be encoded, nothing was queued."""
        ...

    def done(self, turn: CommandTurn) -> None:
        """Answer a command whose rows are on disk."""
        ...

    def part_done(self, entity: str, tells: Sequence[tuple[Ref[Any], Any]]) -> None:
        """Send the messages of an entity that waited for the rows of a commit within a handler."""
        ...

    def failed(self, turn: CommandTurn, error: BaseException) -> None:
        """Called when an entity ended on a command, or before it."""
        ...


class Live:
    """An entity in memory."""

    __slots__ = (
        "actor", "appliers", "begun", "cell", "commands", "entity", "failed", "own", "recorded", "sequence", "since", "size", "snapshot", "tells",
        "ticket", "turn", "underway", "used", "waiting", "writer",
    )  # fmt: skip

    actor: Durable[Any]
    appliers: Mapping[type, Callable[[Any, Any], None]]
    cell: LocalRef

    def __init__(self, entity: str, writer: ShardWriter) -> None:
        self.entity = entity
        self.writer = writer
        self.sequence = 0
        """The sequence number of its newest event."""
        self.snapshot: int | None = None
        """The offset of its newest snapshot."""
        self.since = 0
        """The number of its rows since the snapshot."""
        self.begun = 0
        """The number of commands that were put into its mailbox."""
        self.ticket = 0
        """The place of its newest row in the shard's queue."""
        self.used = 0.0
        """The time of its last command, on trio's clock."""
        self.commands: dict[str, tuple[int, bytes]] | None = None
        """The offset of the last row and the hash of each remembered command, by id, oldest first."""
        self.underway: dict[str, CommandTurn] | None = None
        """The commands with ids that are not on disk yet."""
        self.turn: CommandTurn | None = None
        """The command that is being handled."""
        self.waiting: deque[CommandTurn] | None = None
        """The commands that wait for it."""
        self.recorded: list[LogRow] = []
        """The rows of this command that are not in the shard's queue yet."""
        self.own: list[LogRow] | None = None
        """The shard's own rows that are written with them."""
        self.size = 0
        """The approximate size of this command's rows since the last commit, in bytes."""
        self.tells: list[tuple[Ref[Any], Any]] | None = None
        """Messages that go when the rows are on the disk."""
        self.failed: BaseException | None = None
        """Why the state cannot be used: an `applies` failed while this command recorded."""

    def knows(self, command: str) -> bool:
        """Whether a command with this id was given to it."""
        return (self.underway is not None and command in self.underway) or (
            self.commands is not None and command in self.commands
        )


class CommandTurn(Ask):
    """A command on its way through an entity. First it is an entry of the entity's mailbox, and fails if the entity ends.

    When its handler has returned, it is an entry of the queue of `Commits`, with the answer as its `value`.
    """

    __slots__ = (
        "also", "body", "command", "entity", "handler", "live", "message_bytes", "part", "question", "reminder", "rows", "running", "shard",
        "size", "tells", "waiter",
    )  # fmt: skip

    rows: Sequence[LogRow]
    size: int
    """About the size of the rows."""
    tells: Sequence[tuple[Ref[Any], Any]] | None
    """Messages that go when the rows are on the disk."""

    def __init__(
        self,
        target: LocalRef,
        shard: ShardWriter,
        command: EntityCommand,
        handler: Callable[[Any, Any], Any],
        question: Ask | None,
        reminder: Reminder | None = None,
    ) -> None:
        Ask.__init__(self, command.message, target)  # `super` costs 0.1 µs
        self.shard = shard
        self.entity = command.entity
        self.command = command.command
        self.handler = handler
        """The entity's method for the message."""
        self.body: bytes | None = None
        """The hash of the command, if it has an id."""
        self.message_bytes = 0
        """The approximate size of the message in bytes, which its shard counts until the command is answered."""
        self.question = question
        """The question to answer; None if the command was told, not asked."""
        self.also: list[CommandTurn] | None = None
        """Repetitions of this command that arrived meanwhile."""
        self.live: Live | None = None
        self.running = False
        """Whether its handler has begun."""
        self.part: int | None = None
        """The place in the shard's queue of the first part that its handler committed; None if it has committed nothing."""
        self.waiter: trio.lowlevel.Task | None = None
        """The task of its handler, if that is async."""
        self.reminder = reminder
        """The reminder, if the command is one."""

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be begun: it was told, or an asker of it still waits."""
        return self.question is None or not self.question.settled or any(each.is_wanted for each in self.also or ())

    def wait_for(self, entity: LocalRef) -> None:
        """Record that the asker waits for what the entity handles now. If the entity waits for the asker, the ask fails, and nothing is begun."""
        if self.question is not None:
            try:
                pass_on(self.question, entity)
            except AskCycle as error:
                self.question.fail(error)

    def fail(self, error: BaseException) -> None:
        """Report to the shard that the entity ended before it answered."""
        if not self.settled:
            self.settled = True
            self.shard.failed(self, error)

    def done(self) -> None:
        """Send the answer."""
        self.shard.done(self)


@cache
def _sized_of(cls: type) -> tuple[str, ...]:
    """Return the names of a message's fields, except of those that are numbers by their annotation."""
    try:
        return tuple(name for name, annotation in field_types(cls).items() if annotation not in _NUMBERS)
    except ConfigurationError:  # the class cannot travel, and may be handled here all the same
        return tuple(field.name for field in attrs.fields(cls))


def bytes_of(message: Any, codec: Codec) -> int:
    """Return the approximate size of a message in bytes: the length of its texts and bytes, and the encoded size of other fields."""
    size = 0
    cls: type = type(message)
    for name in _sized_of(cls):
        value = getattr(message, name)
        kind = type(value)
        if kind is str or kind is bytes:
            size += len(value)
        elif kind not in _PLAIN:
            try:
                size += len(codec.encode(value))
            except (TypeError, ValueError, LevadaError):
                pass  # a handle, or a value that the handler will reject
    return size


def copy_of(value: Any) -> Any:
    """Return what a value is now: copies of lists, dicts, sets and messages, and everything else itself, such as refs and channel handles."""
    try:
        hash(value)
    except TypeError:
        pass
    else:
        return value  # it cannot change, or it is not its content that counts
    if type(value) is tuple:
        return tuple(map(copy_of, value))
    if isinstance(value, list):
        found: Any = copy(value)
        if not IMMUTABLE.issuperset(map(type, value)):
            found[:] = map(copy_of, value)
    elif isinstance(value, dict):
        found = copy(value)
        if not IMMUTABLE.issuperset(map(type, value.values())):
            found.update((key, copy_of(item)) for key, item in value.items())
    elif isinstance(value, set | bytearray):
        found = copy(value)
    elif attrs.has(type(value)):
        found = copy(value)
        for field in attrs.fields(type(value)):
            item = getattr(value, field.name, None)
            if type(item) not in IMMUTABLE:
                object.__setattr__(found, field.name, copy_of(item))  # the class may be frozen
    else:
        found = value
    return found
