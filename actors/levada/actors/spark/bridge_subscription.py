"""Subscriptions: actors that deliver the rows of a mailbox to another actor or to a sender."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import trio

from levada.actors.journal.blocks import Block
from levada.actors.journal.errors import JournalError, OffsetGone
from levada.actors.journal.extent import Extent
from levada.actors.journal.questions import AwaitRows, CommitGroup, DeclareGroup, Read
from levada.framework import Actor, Asks, Ref, Sender, message
from levada.framework.errors import ActorStopped, ChannelError, ConfigurationError

if TYPE_CHECKING:
    from .bridge import Mailbox

__all__ = ["Delivery", "RowKey", "Subscription"]

logger = logging.getLogger("levada.actors.spark")

READ_BYTES = 4 << 20
"""Bytes of blocks taken from the journal at a time; a block is at least one."""
DECODED_ROWS = 512
"""Rows decoded at a time: no other task runs for about 0.5 ms."""
PATIENCE = 1.0
"""Seconds that a subscription waits for the former one of its group without a word."""
ATTEMPTS, PAUSE = 5, 0.2  # attempts at the same rows, and seconds before the second attempt; each pause doubles


@message("levada.spark.RowKey", frozen=True)
class RowKey:
    """Identifies a row. It is the same at each delivery, so a subscriber can recognise a repetition.

    Two rows can have the same key only if an older copy of the journal was restored: then forget the keys.
    """

    epoch: str
    """`Extent.epoch` of the journal."""
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.epoch}/{self.partition}/{self.offset}"


@message("levada.spark.Delivery", frozen=True)
class Delivery(Asks[None]):
    """A row for a subscriber. The row is done once its handler has returned; the result is ignored."""

    message: Any
    """The row, as an instance of the mailbox's class."""
    key: RowKey
    """Rows may come again after a crash. To skip them, keep the last key of each partition."""


class Subscription(Actor[Any]):
    """Reads a mailbox and delivers its rows, for one group."""

    mailbox_: Mailbox[Any]
    target: Ref[Any] | Sender[Any]
    former: Sequence[Ref[Any]] = ()
    """The subscriptions that the group had before, the oldest first: each may be waiting for the one before it."""
    group: str = attrs.field(kw_only=True)
    keyed: bool = attrs.field(kw_only=True)
    at: Literal["first", "end"] = attrs.field(kw_only=True)

    def started(self) -> None:
        """Start to read."""
        try:
            self._declare = DeclareGroup(self.group, self.at)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the group of a subscription is {self.group!r:.100}: {error}") from error
        self._failures = 0
        self.start_soon(self._follow)
        if isinstance(self.target, Ref):
            self.start_soon(self._end_with, self.target)

    async def _end_with(self, target: Ref[Any]) -> None:
        await target.terminated()
        self.stop()

    async def _await_turn(self, former: Ref[Any]) -> None:
        with trio.move_on_after(PATIENCE):
            await former.terminated()
        if former.is_alive:
            logger.warning(
                "%s waits for the end of %s: the group %.100r has one subscription at a time",
                self.ref.path,
                former.path,
                self.group,
                extra={"event": "group_taken"},
            )
            await former.terminated()

    async def _follow(self) -> None:
        for former in self.former:
            await self._await_turn(former)
        journal = self.mailbox_.ref
        while True:
            try:
                await self._deliver(journal)
            except ChannelError as error:
                logger.info("%s: its receiver is gone: %s", self.ref.path, error, extra={"event": "subscriber_gone"})
                break
            except (ActorStopped, JournalError):
                # The journal or the target has ended for good, or it failed and restarts with the same ref.
                if not journal.is_alive or (isinstance(self.target, Ref) and not self.target.is_alive):
                    break
                self._failures += 1
                if self._failures >= ATTEMPTS:
                    raise
                await trio.sleep(PAUSE * 2 ** (self._failures - 1))
        self.stop()

    async def _deliver(self, journal: Ref[Any]) -> None:
        while True:
            offsets, extent = await self._rows(journal)
            for partition, end in extent.end.items():
                start = offsets.get(partition, 0)
                while start < end:
                    try:
                        blocks: list[Block] = await journal.ask(Read(partition, start, end, READ_BYTES), timeout=None)
                    except OffsetGone as gone:
                        # Retention keeps rows that a group has not read, so these were lost, which was accepted at the opening.
                        logger.error(
                            "%s continues after lost rows: %s", self.ref.path, gone, extra={"event": "rows_lost"}
                        )
                        offsets[partition] = start = gone.first
                        await journal.ask(CommitGroup(self.group, {partition: start}), timeout=None)
                        continue
                    for block in blocks:
                        await self._hand_over(block, extent.epoch)
                        start = block.end
                        await journal.ask(CommitGroup(self.group, {partition: start}), timeout=None)
                        offsets[partition] = start
                        self._failures = 0

    async def _rows(self, journal: Ref[Any]) -> tuple[dict[int, int], Extent]:
        """Wait for rows behind the group's offsets. A journal that restarts meanwhile has failed on no row of this group."""
        while True:
            try:
                offsets: dict[int, int] = dict(await journal.ask(self._declare, timeout=None))
                return offsets, await journal.ask(AwaitRows(offsets), timeout=None)
            except ActorStopped:
                if not journal.is_alive:
                    raise
                await trio.sleep(PAUSE)

    async def _hand_over(self, block: Block, epoch: str) -> None:
        columns, batch = self.mailbox_.columns, block.batch()
        assert columns is not None
        for at in range(0, batch.num_rows, DECODED_ROWS):  # erased rows are passed over
            for number, row in enumerate(columns.decode(batch.slice(at, DECODED_ROWS)), block.first + at):
                if not self.keyed:
                    await self.target.send(row)
                    continue
                delivery = Delivery(row, RowKey(epoch, block.partition, number))
                if isinstance(self.target, Ref):
                    await self.target.ask(delivery, timeout=None)
                else:
                    await self.target.send(delivery)
