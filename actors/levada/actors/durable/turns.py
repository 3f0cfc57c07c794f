"""`Live`, the shard's record of an entity in memory, and `Turn`, one command of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from levada.framework import Reply, message
from levada.framework.embedding import Ask, LocalRef
from levada.framework.message import Asks

if TYPE_CHECKING:
    import trio

    from levada.framework import Ref

    from .entity import Durable
    from .reminders import Reminder, Reminders
    from .rows import Log, Row

__all__ = ["Command", "Erase", "Live", "Turn", "Writer"]


@message("levada.durable.command")
class Command(Asks[Any]):
    """A message to an entity, as its shard takes it. The entity's handler answers."""

    entity: str
    message: Any
    command: str | None = None
    """The id of the command: a second one with the same id gets the answer of the first."""


@message("levada.durable.erase", frozen=True)
class Erase(Asks[int]):
    """Erase an entity; answered with the number of its rows that are gone from the files."""

    entity: str


class Writer(Protocol):
    """What an entity needs of its shard."""

    log: Log
    number: int
    own: Live
    """The record of the shard's own rows."""
    reminders: Reminders

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        ...

    def commit(self, live: Live) -> trio.Event | None:
        """Queue the recorded rows; return the event of its being on the disk, None if all is."""
        ...

    def placed(self, row: Row, offset: int) -> None:
        """Note the offset that a row gets; rows come in the order of the log."""
        ...

    def finished(self, turn: Turn, value: Any) -> None:
        """Take the answer of a handler. Raises if it cannot be kept; then nothing was queued."""
        ...

    def done(self, turn: Turn) -> None:
        """Answer: everything up to the command's last row is on the disk."""
        ...

    def part_done(self, tells: Sequence[tuple[Ref[Any], Any]]) -> None:
        """Send the messages that waited for rows in the middle of a handler."""
        ...

    def failed(self, turn: Turn, error: BaseException) -> None:
        """Note that an entity ended on a command, or before it."""
        ...


class Live:
    """An entity in memory."""

    __slots__ = (
        "actor", "cell", "commands", "entity", "failed", "octets", "own", "recorded", "sequence", "since", "snapshot", "tells", "ticket",
        "turn", "underway", "used", "waiting", "writer",
    )  # fmt: skip

    actor: Durable[Any]
    cell: LocalRef

    def __init__(self, entity: str, writer: Writer) -> None:
        self.entity = entity
        self.writer = writer
        self.sequence = 0
        """Of its newest event."""
        self.snapshot: int | None = None
        """Offset of its newest snapshot."""
        self.since = 0
        """Its rows since that."""
        self.ticket = 0
        """Place of its newest row in the queue of the shard."""
        self.used = 0.0
        """When it last got a command, on trio's clock."""
        self.commands: dict[str, tuple[int, bytes]] | None = None
        """Ids of commands, oldest first: the offset of the last row, and the hash of the command."""
        self.underway: dict[str, Turn] | None = None
        """Commands with ids that are not on the disk yet."""
        self.turn: Turn | None = None
        """The command that is being handled."""
        self.waiting: deque[Turn] | None = None
        """Commands after that."""
        self.recorded: list[Row] = []
        """Rows of this command that are not in the shard's queue yet."""
        self.own: list[Row] | None = None
        """Rows of the shard itself that go with them."""
        self.octets = 0
        """About the size of all rows of this command since the last commit."""
        self.tells: list[tuple[Ref[Any], Any]] | None = None
        """Messages that go when the rows are on the disk."""
        self.failed: BaseException | None = None
        """Why the state cannot be used: an `applies` failed while this command recorded."""


class Turn(Ask):
    """A command on its way through an entity. It is an entry of the entity's mailbox, and fails if the entity ends first.

    When its handler has returned it is an entry of the queue of `Commits`, with the answer as its `value`.
    """

    __slots__ = (
        "also", "body", "command", "entity", "live", "message_bytes", "octets", "part", "reminder", "reply", "rows", "running", "shard",
        "tells", "waiter",
    )  # fmt: skip

    rows: Sequence[Row]
    octets: int
    """About the size of the rows."""
    tells: Sequence[tuple[Ref[Any], Any]] | None
    """Messages that go when the rows are on the disk."""

    def __init__(self, target: LocalRef, shard: Writer, command: Command, reply: Reply[Any] | None) -> None:
        super().__init__(command.message, target)
        self.shard = shard
        self.entity = command.entity
        self.command = command.command
        self.body: bytes | None = None
        """Hash of the command, if it has an id."""
        self.message_bytes = 0
        """About the size of the message, which its shard counts until the command is answered."""
        self.reply = reply
        """None: told, not asked."""
        self.also: list[Turn] | None = None
        """The same command, sent meanwhile."""
        self.live: Live | None = None
        self.running = False
        """Whether its handler has begun."""
        self.part: int | None = None
        """The place in the shard's queue of the first part that its handler has committed; None if it has committed nothing yet."""
        self.waiter: trio.lowlevel.Task | None = None
        """The task of its handler, if that is async."""
        self.reminder: Reminder | None = None
        """The reminder that it is."""

    def fail(self, error: BaseException) -> None:
        """Tell the shard that the entity ended before the answer."""
        if not self.settled:
            self.settled = True
            self.shard.failed(self, error)

    def done(self) -> None:
        """Answer."""
        self.shard.done(self)
