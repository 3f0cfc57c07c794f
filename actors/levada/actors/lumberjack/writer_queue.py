"""The waits around a writer's queue: senders wait for room and for acks, connections wait for events.

`levada.transports.lumberjack.SendQueue` decides which events wait, which are in flight, and which go next.

Each event carries a *ticket*.  A ticket counts the events of one call of `Intake.deliver`, or all events of `Intake.put` since the last
`Intake.flush`.  An ack takes its events off their tickets.  A task that waits for a ticket continues when the count is zero.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import attrs
import trio

from levada.framework.errors import ConfigurationError, ConnectionClosed, LevadaError
from levada.transports.lumberjack import Batch, EventsAcked, SendQueue, WriterConfig, WriterCore

__all__ = ["EventsDropped", "Hub", "Intake", "QueuedEvents", "WriterCounters"]

logger = logging.getLogger("levada.actors.lumberjack.writer")


@attrs.define(eq=False, slots=False, str=False)
class EventsDropped(LevadaError):
    """Events of a call of `Writer.deliver` were dropped from a full queue to make room for others (`WriterConfig.drop`)."""

    count: int = 0
    """Number of dropped events. The others are acked."""


class QueuedEvents:
    """Counts events that a task waits for."""

    __slots__ = ("done", "dropped", "left")

    def __init__(self) -> None:
        self.left = 0
        self.dropped = 0
        self.done: trio.Event | None = None


@attrs.define
class WriterCounters:
    """The counters of a `WriterStatistics` that are not the queue's."""

    events_sent: int = 0
    events_acked: int = 0
    windows_sent: int = 0
    bytes_sent: int = 0
    connections: int = 0
    connects: int = 0
    faults: int = 0


class Intake(Protocol):
    """The first place of encoded events: the queue, or a spool on disk before it."""

    async def put(self, bodies: list[bytes]) -> None:
        """Take events, waiting for room whatever `WriterConfig.drop` says.

        Raises:
            ConnectionClosed: the writer has ended.
        """
        ...

    def put_nowait(self, body: bytes) -> None:
        """Take one event, or drop one, or raise `trio.WouldBlock`."""
        ...

    async def deliver(self, bodies: list[bytes]) -> None:
        """Take events, waiting for room, and return when they are safe. Errors as `Writer.deliver`."""
        ...

    async def flush(self) -> None:
        """Wait until all events taken so far are acked. Errors as `put`."""
        ...


class Hub:
    """The state that the connections of one writer share: the queue, the waiting tasks, the counters."""

    def __init__(self, config: WriterConfig) -> None:
        self.config = config
        self.queue = SendQueue(config)
        self.counters = WriterCounters()
        self.windows = 0
        """Windows in flight on all connections."""
        self.work = trio.lowlevel.ParkingLot()
        """Connections that wait for events to send."""
        self.attempted = trio.Event()
        """Set after the first attempt to connect."""
        self.mistake: ConfigurationError | None = None
        """Why no connection can ever be made; found at the first attempt."""
        self._room = trio.lowlevel.ParkingLot()
        self._common = QueuedEvents()
        self._open: set[QueuedEvents] = set()
        self._ended = False
        self.idle = False
        """Whether a connection waits for the first event of a window."""
        self._fresh = 0  # events since a connection was woken
        self._fresh_bytes = 0
        self._flushing = 0

    async def put(self, bodies: list[bytes], ticket: QueuedEvents | None = None) -> None:
        """Take events, waiting for room whatever `WriterConfig.drop` says. Errors as `Intake.put`."""
        for body in bodies:
            while self.queue.full:
                self.check_open()
                await self._room.park()
            self._put(body, ticket or self._common)

    def put_nowait(self, body: bytes) -> None:
        """Take one event, or drop one, or raise `trio.WouldBlock`."""
        if self.queue.full and self.config.drop is None:
            raise trio.WouldBlock
        self._put(body, self._common)

    def _put(self, body: bytes, ticket: QueuedEvents) -> None:
        if not ticket.left:
            self._open.add(ticket)
        ticket.left += 1
        for dropped in self.queue.put(body, ticket, trio.current_time()):
            dropped.dropped += 1
            self._settle(dropped, 1)
        self._fresh += 1
        self._fresh_bytes += len(body)
        # Waking a connection costs as much as ten sends, so only the first event, which starts the clock, and a full window do it.
        if self.idle or self._fresh >= self.config.window or self._fresh_bytes >= self.config.max_bytes:
            self.idle = False
            self._fresh = self._fresh_bytes = 0
            self.work.unpark_all()

    async def deliver(self, bodies: list[bytes]) -> None:
        """Take events, waiting for room, and return when they are acked; errors as `Writer.deliver`."""
        ticket = await self.hand_in(bodies)
        with self.flushing():
            await self.wait_for(ticket)
        if ticket.dropped:
            raise EventsDropped(f"{ticket.dropped} of {len(bodies)} events were dropped", count=ticket.dropped)

    async def hand_in(self, bodies: list[bytes]) -> QueuedEvents:
        """Take events, waiting for room, and return a ticket for them."""
        ticket = QueuedEvents()
        ticket.left = 1  # held until all are in, because the first may be acked before
        try:
            await self.put(bodies, ticket)
        finally:
            self._settle(ticket, 1)
        return ticket

    async def flush(self) -> None:
        """Wait until all events taken so far are acked, without waiting for windows to fill. Errors as `Intake.put`."""
        tickets, self._common = list(self._open), QueuedEvents()
        with self.flushing():
            for ticket in tickets:
                await self.wait_for(ticket)
            await trio.lowlevel.checkpoint()

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Send windows without waiting for more events while the block lasts."""
        self._flushing += 1
        self.work.unpark_all()
        try:
            yield
        finally:
            self._flushing -= 1

    async def wait_for(self, ticket: QueuedEvents) -> None:
        """Wait until all events of a ticket are acked, dropped or given up. Errors as `Intake.put`."""
        if ticket.left:
            self.check_open()
            if ticket.done is None:
                ticket.done = trio.Event()
            await ticket.done.wait()
            if ticket.left:
                self.check_open()

    def end(self) -> None:
        """Fail the tasks that still wait for room or for acks, because all connections have ended for good."""
        self._ended = True
        self._room.unpark_all()
        for ticket in self._open:
            if ticket.done is not None:
                ticket.done.set()

    def check_open(self) -> None:
        """Raise `ConnectionClosed` after `end`."""
        if self._ended:
            raise ConnectionClosed("the writer was closed before these events were acked")

    def _settle(self, ticket: QueuedEvents, count: int) -> None:
        ticket.left -= count
        if not ticket.left:
            self._open.discard(ticket)
            if ticket.done is not None:
                ticket.done.set()

    def take(self, core: WriterCore) -> Batch | float:
        """Return a window to send now, or the time at which to ask again if `work` does not wake the connection before."""
        room = core.room
        if not room or (self.queue.stuck and self.windows):
            return math.inf  # an ack, or the end of another connection, wakes it
        batch = self.queue.next_batch(trio.current_time(), room, flush=self._flushing > 0)
        if batch is not None:
            return batch
        deadline = self.queue.next_deadline()
        if deadline is None:
            self.idle = True
            return math.inf
        return deadline

    async def wanted(self) -> None:
        """Wait until events wait for a connection."""
        while not self.queue.waiting:
            self.idle = True
            await self.work.park()

    def acked(self, event: EventsAcked) -> None:
        """Take the events of an ack off their tickets, and make room."""
        self.queue.acked(event)
        self.counters.events_acked += len(event.tokens)
        # Most tokens of a window are the same ticket; counting them costs a tenth of taking them off one by one.
        for ticket, count in Counter(event.tokens).items():
            self._settle(ticket, count)
        self._room.unpark(count=len(event.tokens))

    def give_back(self, batches: list[Batch]) -> None:
        """Take back the windows of a connection that has ended."""
        self.windows -= len(batches)
        stuck = self.queue.stuck_windows
        for ticket in self.queue.give_back(batches):
            logger.error(
                "an event is dropped, because it ended five connections in a row", extra={"event": "event_rejected"}
            )
            self._settle(ticket, 1)
            self._room.unpark()
        if self.queue.stuck_windows > stuck:
            logger.warning(
                "a window has ended five connections in a row without an ack: it is sent in halves",
                extra={"event": "window_stuck"},
            )
        self.work.unpark_all()
