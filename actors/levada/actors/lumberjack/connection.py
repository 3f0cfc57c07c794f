"""The actor of one writer's connection: it moves bytes, asks the sink and keeps the clock. The rules are in `ReaderCore`.

All tasks run in the actor's nursery: `_read_loop` reads, unpacks and watches the clock; `_ask` runs once for each unit at the sink.
Acks are queued at the carrier and sent by its own task, so the sink never waits for a writer that does not read (LJ-27).

While the loop waits, a commit may move the core's deadline or let a stopped reader continue.  So every call of the core ends with
`_nudge`.
"""

from __future__ import annotations

import logging
import ssl
import uuid
from collections.abc import Callable, Mapping
from enum import Enum, auto
from math import inf
from time import perf_counter
from typing import Any, Final

import attrs
import trio

from levada.framework import Actor, Ref, Shutdown
from levada.framework.errors import CarrierError
from levada.transports.carriers import ByteStream
from levada.transports.lumberjack import (
    Finished,
    PeerClosed,
    ReaderCore,
    ReaderEvent,
    ReaderState,
    Refused,
    UnitReady,
)

from .load import Load
from .turns import Share
from .unit import Origin, Unit

__all__ = ["Connection"]

logger = logging.getLogger("levada.actors.lumberjack.reader")

_LATE = 60.0  # seconds after its end in which a connection still counts commits (LJ-26)
_LATE_LOG = 60.0  # seconds between log lines about them
_SLOW = 1.0  # seconds from which on a late commit is the sink's fault


class Phase(Enum):
    """Where the connection is in its life."""

    NEW = auto()
    """The actor has not started."""
    OPEN = auto()
    """Bytes are read and worked off."""
    PAUSED = auto()
    """All connections together hold too much: nothing is read or worked off (LJ-42b)."""
    CLOSING = auto()
    """The core has finished; the carrier is being closed."""
    LATE = auto()
    """The carrier is closed; commits are counted as late (LJ-26)."""
    CLOSED = auto()


class Step(Enum):
    """What moves it on."""

    START = auto()
    PAUSE = auto()
    RESUME = auto()
    FINISH = auto()
    CARRIER_CLOSED = auto()
    END = auto()
    """Nothing is left to do, or the actor was killed."""


TRANSITIONS: Final[Mapping[tuple[Phase, Step], Phase]] = {
    (Phase.NEW, Step.START): Phase.OPEN,
    (Phase.OPEN, Step.PAUSE): Phase.PAUSED,
    (Phase.OPEN, Step.FINISH): Phase.CLOSING,
    (Phase.PAUSED, Step.RESUME): Phase.OPEN,
    (Phase.PAUSED, Step.FINISH): Phase.CLOSING,
    (Phase.CLOSING, Step.PAUSE): Phase.CLOSING,
    (Phase.CLOSING, Step.RESUME): Phase.CLOSING,
    (Phase.CLOSING, Step.CARRIER_CLOSED): Phase.LATE,
    (Phase.LATE, Step.PAUSE): Phase.LATE,
    (Phase.LATE, Step.RESUME): Phase.LATE,
} | {(phase, Step.END): Phase.CLOSED for phase in Phase if phase is not Phase.CLOSED}


class Connection(Actor[Any]):
    """One writer, from the first octet to the last commit. Started by `serve`.

    Args:
        stream: the connection; it is closed at the end.
        sink: takes units, or makes an actor for this connection that does.
        load: of the reader.
    """

    stream: ByteStream
    sink: Ref[Unit] | Callable[[], Actor[Unit]]
    load: Load
    core: ReaderCore = attrs.field(init=False)
    _sink: Ref[Unit] = attrs.field(init=False)
    _origin: Origin | None = attrs.field(init=False, default=None)
    _phase: Phase = attrs.field(init=False, default=Phase.NEW)
    _asks: trio.Nursery = attrs.field(init=False)
    _asked: trio.Event | None = attrs.field(init=False, default=None)  # set once the last unit is in the sink's mailbox
    _open_asks: int = attrs.field(init=False, default=0)
    _read: trio.CancelScope | None = attrs.field(init=False, default=None)  # the loop waits for bytes in it
    _wait: trio.CancelScope | None = attrs.field(init=False, default=None)  # or for anything else
    _data: bytes | None = attrs.field(init=False, default=None)  # came, and was not looked at
    _share: Share = attrs.field(init=False, factory=Share)
    _late: float = attrs.field(init=False, default=_LATE)  # seconds in which late commits are counted
    _done: trio.Event = attrs.field(init=False, factory=trio.Event)

    def started(self) -> None:
        """Begin to read, in a task of this actor."""
        self.core = ReaderCore(self.load.config, now=trio.current_time())
        try:
            self._sink = self.sink if isinstance(self.sink, Ref) else self.spawn(self.sink)
        except BaseException:
            self.stream.abort()
            raise
        self.load.add(self)
        self._move(Step.START)
        self.start_soon(self._run)

    def end(self) -> None:
        """End in order: units at the sink have their time to be committed, then the connection closes (LJ-28)."""
        self._take(self.core.drain(trio.current_time()))
        if self._phase is Phase.LATE:
            self._asks.cancel_scope.cancel()

    async def stopping(self, reason: object) -> None:
        """End in order, within the time that the system gives."""
        if self._phase is Phase.NEW:
            self.stream.abort()
            return
        if isinstance(reason, Shutdown):
            # The system stops one connection after another: let the time of all of them run now.
            self.load.drain()
        elif not self._done.is_set():
            self.end()
        await self._done.wait()

    async def _run(self) -> None:
        try:
            async with self.stream, trio.open_nursery() as self._asks:
                self._log(logging.DEBUG, "connected", "connected")
                await self._read_loop()
                await self.stream.aclose()
                self._move(Step.CARRIER_CLOSED)
                with trio.move_on_after(self._late):
                    await self._all_answered()
                self._asks.cancel_scope.cancel()
        finally:
            self._move(Step.END)
            self.load.remove(self)
            self._done.set()
            self.stop()

    def _move(self, step: Step) -> None:
        self._phase = TRANSITIONS[self._phase, step]

    # ------------------------------------------------------------ reading

    async def _read_loop(self) -> None:
        core = self.core
        while self._phase is not Phase.CLOSING:
            if self._phase is Phase.OPEN and (self._data is not None or core.has_work):
                await self._step()
            elif self.stream.unsent > self.load.config.send_buffer:
                await self._wait_for_room()
            else:
                await self._wait_for_something()

    async def _step(self) -> None:
        """Give the core new bytes, or let it continue, when it is this connection's turn (LJ-35)."""
        core, share, turns = self.core, self._share, self.load.turns
        large = core.large
        alone = large or share.spent
        # Most turns are free; waiting for one opens a cancel scope, which costs 5 us.
        if alone and not turns.take(large=large) and not await self._turn_came():
            return
        began = perf_counter()
        try:
            data, self._data = self._data, None
            now = trio.current_time()
            if data is None:
                self._take(core.work(now))
            else:
                self.load.octets_received += len(data)
                self._take(core.receive_data(data, now))
        finally:
            took = perf_counter() - began
            share.use(took)
            if alone:
                await turns.rest(took, large=large)
            elif core.has_work:
                await trio.lowlevel.checkpoint()

    async def _turn_came(self) -> bool:
        """Wait for this connection's turn; false if something else is to be looked at first."""
        core = self.core
        with trio.CancelScope(deadline=_deadline(core)) as self._wait:
            await self.load.turns.wait(self._share, large=core.large)
            self._wait = None
            return True
        self._wait = None
        self._take(core.handle_timeout(trio.current_time()))
        return False

    async def _wait_for_something(self) -> None:
        """Wait for octets if they are wanted, until the core's deadline, or a nudge."""
        core = self.core
        reading = self._phase is Phase.OPEN and self._data is None and core.wants_data
        if reading:
            core.reading(trio.current_time())
        came = False
        with trio.CancelScope(deadline=_deadline(core)) as scope:
            if reading:
                self._read = scope
            else:
                self._wait = scope
            try:
                if reading:
                    self._data = await self.stream.receive_some()
                    came = True
                else:
                    await trio.sleep_forever()
            except CarrierError as error:
                core.stop_reading(trio.current_time())
                self._lost(error)
                return
            finally:
                self._read = self._wait = None
        now = trio.current_time()
        if not came:
            self._take(core.handle_timeout(now))
        core.stop_reading(now)

    async def _wait_for_room(self) -> None:
        """The writer leaves its acks unread: wait, but not for ever (LJ-27)."""
        try:
            with trio.move_on_after(self.load.config.send_timeout) as scope:
                await self.stream.send_all(b"")
        except CarrierError as error:
            self._lost(error)
            return
        if scope.cancelled_caught:
            self._log(logging.WARNING, "no_room", "does not read its acks")
            self.stream.abort()
            self._take(self.core.connection_lost(0, "does not read its acks", trio.current_time()))

    def _lost(self, error: CarrierError) -> None:
        now = trio.current_time()
        if isinstance(error.__cause__, ssl.SSLError) and self.core.state is ReaderState.OPEN:
            # LJ-6, LJ-63: no close_notify, which many writers leave out. The core knows whether a frame was cut.
            self._take(self.core.receive_data(b"", now))
        else:
            self._log(logging.DEBUG, "lost", "lost: %s", error)
            self._take(self.core.connection_lost(0, str(error), now))

    # ------------------------------------------------------------ what the core tells

    def _take(self, events: list[ReaderEvent]) -> None:
        """Apply events, send queued acks, and wake the loop if its wait is out of date."""
        for event in events:
            match event:
                case UnitReady():
                    before, self._asked = self._asked, trio.Event()
                    self._open_asks += 1
                    self._asks.start_soon(self._ask, event, before, self._asked)
                case Refused():
                    self.load.protocol_errors[event.error.rule] += 1
                    self._log(logging.WARNING, "refused", "refused: %s; it begins with %r", event.error, event.head)
                case PeerClosed():
                    if not event.clean and not event.lost:
                        self._log(logging.ERROR, "cut", "ended inside a frame, which is dropped")
                case Finished():
                    self._move(Step.FINISH)
                    self._late = 0.0 if event.reason == "drained" else _LATE
                    self.load.events_unacked += event.unacked
                    self.load.sink_failures += event.reason == "sink_failed"
                    self._log(logging.DEBUG, "finished", "finished: %s", event.reason)
        out = self.core.data_to_send(trio.current_time())
        if out:
            try:
                self.stream.send_nowait(b"".join(out))
            except CarrierError as error:
                self._take(self.core.connection_lost(0, str(error), trio.current_time()))
        self.load.report(self)
        self._nudge()

    def _nudge(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
        elif self._read is not None:
            if self._phase is Phase.OPEN and self.core.wants_data:
                self._read.deadline = _deadline(self.core)
            else:
                self._read.cancel()

    def pause(self) -> None:
        """Stop reading and unpacking, and hand on the open unit, so that it does not wait, too (LJ-42b)."""
        self._move(Step.PAUSE)
        self.core.hand_on(trio.current_time())
        self._take(self.core.take_events())

    def resume(self) -> None:
        """Read and unpack again."""
        self._move(Step.RESUME)
        self._nudge()

    # ------------------------------------------------------------ the sink

    async def _ask(self, ready: UnitReady, before: trio.Event | None, asked: trio.Event) -> None:
        if before is not None:
            await before.wait()
        began = trio.current_time()
        asked.set()  # an ask enters the mailbox, or the line before it, without a yield: so the next one comes behind
        try:
            await self._sink.ask(self._unit(ready), timeout=None)
        except Exception as error:  # noqa: BLE001 - whatever a sink fails with means the same: the unit is not safe
            self._open_asks -= 1
            if self._phase in (Phase.OPEN, Phase.PAUSED):
                self._log(logging.WARNING, "sink_failed", "closed, as the sink failed: %s", error)
            self.core.sink_failed()
        else:
            self._open_asks -= 1
            late = self.core.late_commits
            self.core.commit(ready.number, trio.current_time())
            if self.core.late_commits > late:
                self._note_late_commit(trio.current_time() - began)
        self._take(self.core.take_events())

    def _unit(self, ready: UnitReady) -> Unit:
        if self._origin is None:
            info = self.stream.info
            self._origin = Origin(
                connection=uuid.uuid4().hex,
                peer=info.peer,
                version=self.core.version or 0,
                subject=info.peer_subject,
                names=info.peer_names,
            )
        return Unit(ready.events, self._origin, ready.number, ready.whole)

    async def _all_answered(self) -> None:
        while self._open_asks:
            with trio.CancelScope() as self._wait:
                await trio.sleep_forever()
            self._wait = None

    def _note_late_commit(self, took: float) -> None:
        now = trio.current_time()
        if took < _SLOW:  # some writers close as soon as they have sent, or after the first of their acks
            self._log(logging.DEBUG, "late_commit", "was gone before a unit could be acked, which may come again")
        elif now >= self.load.late_log_at:
            self.load.late_log_at = now + _LATE_LOG
            text = (
                "was gone when the sink committed a unit after %.0f s; it comes again: put a spool before a slow sink"
            )
            self._log(logging.WARNING, "late_commit", text, took)

    def _log(self, level: int, event: str, text: str, *arguments: object) -> None:
        extra = {"protocol": "lumberjack", "connection_id": self._peer, "actor": self.ref.path, "event": event}
        logger.log(level, "%s %s", self._peer, text % arguments if arguments else text, extra=extra)

    @property
    def _peer(self) -> str:
        return self.stream.info.peer


def _deadline(core: ReaderCore) -> float:
    deadline = core.next_deadline()
    return inf if deadline is None else deadline
