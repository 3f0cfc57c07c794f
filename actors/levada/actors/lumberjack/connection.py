"""The actor of one writer's connection: it moves bytes and asks the sink. The rules are in `ReaderCore`.

It pulls, where `levada.actors.single` pushes: it reads only while the core wants bytes, and processes them step by step in fair turns.
`LumberjackDriver.carry` does both. `_ask` runs once for each unit at the sink. Acks are queued at the carrier, whose own task sends
them, so the sink never waits for a writer that does not read (LJ-27).
"""

from __future__ import annotations

import logging
import ssl
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import ClassVar, Final

import trio

from levada.actors.driver import Driver, Phase
from levada.framework import Actor, FlowWindow, Identity, Ref
from levada.framework.embedding import ask_for
from levada.framework.errors import CarrierError
from levada.framework.platform import PLATFORM
from levada.transports.carriers import ByteStream, CarrierStatistics
from levada.transports.lumberjack import Finished, PeerClosed, ReaderCore, ReaderEvent, ReaderState, Refused, UnitReady

from .load import Load
from .tracing import serving
from .turns import ProcessorShare
from .unit import Origin, Unit

__all__ = ["LumberjackDriver"]

_LATE: Final = 60.0  # seconds after its end for which a connection still counts commits (LJ-26)
_LATE_LOG: Final = 60.0  # seconds between warnings about them
_UNTRACED: Final = nullcontext()
_SLOW: Final = 1.0  # seconds from which on the sink, not the writer, is to blame for a late commit


class LumberjackDriver(Driver[ReaderCore]):
    """One writer, from the first byte to the last commit.

    Args:
        stream: the connection, which this actor closes at the end.
        sink: takes units; or a factory of an actor that takes the units of this connection.
        load: the counters and bounds of the reader.
    """

    stream: ByteStream
    sink: Ref[Unit] | Callable[[], Actor[Unit]]
    load: Load

    protocol: ClassVar = "lumberjack"
    keeps_when_greeted: ClassVar = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.core = ReaderCore(self.load.config, now=trio.current_time())
        self.end: Finished | None = None
        self._sink: Ref[Unit]
        self._asks: trio.Nursery
        """Has a task for each unit at the sink; in the actor's own nursery each would cost five calls more."""
        self._origin: Origin | None = None
        self._asked: trio.Event | None = None
        """Set when the last unit is in the sink's mailbox."""
        self._open_asks = 0
        self._read: trio.CancelScope | None = None
        """The scope in which `carry` waits for bytes."""
        self._wait: trio.CancelScope | None = None
        """The scope in which it waits for anything else."""
        self._data: bytes | None = None
        """Bytes that the core has not seen yet."""
        self._perf_counter = PLATFORM.get().perf_counter
        self._share = ProcessorShare(self._perf_counter())
        self._late = trio.CancelScope()

    def carrier_statistics(self) -> CarrierStatistics:
        """Return the counters of the carrier."""
        return self.stream.statistics()

    def figures(self) -> dict[str, object]:
        """Return the units that the sink has not answered, and whether the reader holds this writer back."""
        return {"units_at_sink": self._open_asks, "held_back": self in self.load.paused}

    def flow(self, queued: int) -> FlowWindow:
        """Return the rest of the writer's window; acks need none."""
        return FlowWindow(None, self.core.room, queued, "lines")

    async def carry(self) -> None:
        """Read and process until the connection is over; close the carrier; count late commits (LJ-26)."""
        core = self.core
        self.load.add(self)
        async with trio.open_nursery() as self._asks:
            async with self.stream:
                self.connected(self.stream.info)
                try:
                    await self._let_in()
                    while self.end is None:
                        if (self._data is not None or core.has_work) and self not in self.load.paused:
                            await self._step()
                        elif self.stream.unsent > self.load.config.send_buffer:
                            await self._wait_for_room()
                        else:
                            await self._wait_for_something()
                finally:
                    if self.end is None:
                        self.shut()
                assert self.end is not None
                if self.end.reason == "closed":
                    self.stream.abort()  # a close at once does not wait for the writer
            self._late.deadline = trio.current_time() + (0.0 if self.end.reason in ("drained", "closed") else _LATE)
            with self._late:
                while self._open_asks:
                    with trio.CancelScope() as self._wait:
                        await trio.sleep_forever()
            self._asks.cancel_scope.cancel()

    async def _let_in(self) -> None:
        """Wait for the decision on the writer. Meanwhile one read is made, and its bytes are kept."""
        self.authenticate(self.credentials)
        while self.phase is Phase.GREETING:
            await self._wait_for_something()
            if self._data == b"":
                self.lost(0, "the writer left before it was let in")
        if self.end is None:
            self._sink = self.sink if isinstance(self.sink, Ref) else self.spawn(self.sink)

    def admitted(self, identity: Identity | None) -> None:
        """Admit the writer."""
        self.greeted()
        self._wake()

    def shut(self, code: int = 0, reason: str = "") -> None:
        """Close at once. Units at the sink are not acked, and come again. A second call ends the counting of late commits."""
        if self.end is not None:
            self._late.cancel()
        super().shut(code, reason)

    def release(self) -> None:
        """Give the reader's bounds back."""
        self.load.remove(self)

    async def _step(self) -> None:
        """Give the core new bytes, or let it continue, when this connection has its turn (LJ-35)."""
        core, share, turns = self.core, self._share, self.load.turns
        large = core.large
        alone = large or share.spent
        # Most turns are free. Waiting for one opens a cancel scope, which costs 5 us.
        if alone and not turns.take(large=large) and not await self._turn_came():
            return
        began = self._perf_counter()
        try:
            data, self._data = self._data, None
            now = trio.current_time()
            if data is None:
                self.apply(core.work(now))
            else:
                self.load.bytes_received += len(data)
                self.apply(core.receive_data(data, now))
        finally:
            now = self._perf_counter()
            took = now - began
            share.use(took, now)
            if alone:
                await turns.rest(took, large=large)
            elif core.has_work:
                await trio.lowlevel.checkpoint()

    async def _turn_came(self) -> bool:
        """Wait for this connection's turn; return false if `_wake` came first."""
        self.retime()
        with trio.CancelScope() as self._wait:
            await self.load.turns.wait(self._share, large=self.core.large)
            self._wait = None
            return True
        self._wait = None
        return False

    async def _wait_for_something(self) -> None:
        """Wait for bytes if they are wanted, or until `_wake`."""
        core = self.core
        with trio.CancelScope() as scope:
            if self._data is None and core.wants_data and self not in self.load.paused:
                core.reading(trio.current_time())
                self.retime()
                self._read = scope
                try:
                    self._data = await self.stream.receive_some()
                except CarrierError as error:
                    self._read = None
                    core.stop_reading(trio.current_time())
                    self._cut_off(error)
            else:
                self.retime()
                self._wait = scope
                await trio.sleep_forever()
        self._read = self._wait = None
        core.stop_reading(trio.current_time())

    async def _wait_for_room(self) -> None:
        """Wait while the writer leaves its acks unread, for `ReaderConfig.send_timeout` seconds at most (LJ-27)."""
        try:
            with trio.move_on_after(self.load.config.send_timeout) as scope:
                await self.stream.send_all(b"")
        except CarrierError as error:
            self._cut_off(error)
            return
        if scope.cancelled_caught:
            self.log(logging.WARNING, "no_room", "does not read its acks")
            self.stream.abort()
            self.lost(0, "does not read its acks")

    def _cut_off(self, error: CarrierError) -> None:
        if isinstance(error.__cause__, ssl.SSLError) and self.core.state is ReaderState.OPEN:
            # LJ-6, LJ-63: there was no close_notify, which many writers leave out. The core knows whether a frame was cut.
            self.apply(self.core.receive_data(b"", trio.current_time()))
        else:
            self.log(logging.DEBUG, "lost", "lost: %s", error)
            self.lost(0, str(error))

    def _wake(self) -> None:
        """End the wait of `carry` if its reason is gone."""
        if self._wait is not None:
            self._wait.cancel()
        elif self._read is not None:
            if self.core.wants_data and self not in self.load.paused:
                self.retime()
            else:
                self._read.cancel()

    def apply(self, events: list[ReaderEvent]) -> None:
        """Act on events, send the queued acks, and wake the task."""
        table = self.events
        for event in events:
            table[type(event)](self, event)
        out = self.core.data_to_send(trio.current_time())
        if out:
            self._send(out)
        self.load.report(self)
        self._wake()

    def flush(self) -> bool:
        """Hand the queued acks to the carrier; return whether there were any."""
        out = self.core.data_to_send(trio.current_time())
        if out:
            self._send(out)
        return bool(out)

    def _send(self, out: list[bytes]) -> None:
        try:
            self.stream.send_nowait(b"".join(out))
        except CarrierError as error:
            self.lost(0, str(error))

    def _on_unit(self, event: UnitReady) -> None:
        self.keep_place()
        before, self._asked = self._asked, trio.Event()
        self._open_asks += 1
        self._asks.start_soon(self._ask, event, before, self._asked)

    def _on_refused(self, event: Refused) -> None:
        self.load.protocol_errors[event.error.rule] += 1
        self.log(logging.WARNING, "refused", "refused: %s; it begins with %r", event.error, event.head)

    def _on_peer_closed(self, event: PeerClosed) -> None:
        if not event.clean and not event.lost:
            self.log(logging.ERROR, "cut", "ended inside a frame, which is dropped")

    def _on_finished(self, event: Finished) -> None:
        self.load.events_unacked += event.unacked
        self.load.sink_failures += event.reason == "sink_failed"
        self.ended(event, event.reason)

    events: ClassVar = {Finished: _on_finished, PeerClosed: _on_peer_closed, Refused: _on_refused, UnitReady: _on_unit}

    def pause(self) -> None:
        """Stop reading and unpacking, and hand on the open unit, so that it does not wait meanwhile (LJ-42b)."""
        self.core.hand_on(trio.current_time())
        self.apply(self.core.take_events())

    def resume(self) -> None:
        """Read and unpack again."""
        self._wake()

    async def _ask(self, ready: UnitReady, before: trio.Event | None, asked: trio.Event) -> None:
        if before is not None:
            await before.wait()
        began = trio.current_time()
        asked.set()  # an ask enters the mailbox, or the queue before it, without a yield, so the next one comes behind it
        try:
            tracing = self.system.tracing
            with _UNTRACED if tracing is None else serving(tracing, ready.events, self.remote):
                await ask_for(self.remote if self._sink is self.sink else None, self._sink, self._unit(ready))
        except Exception as error:  # noqa: BLE001 - after any error of the sink, the unit is not safe
            self._open_asks -= 1
            if self.end is None:
                self.log(logging.WARNING, "sink_failed", "closed, because the sink failed: %s", error)
            self.core.sink_failed()
        else:
            self._open_asks -= 1
            late = self.core.late_commits
            self.core.commit(ready.number, trio.current_time())
            if self.core.late_commits > late:
                self._note_late_commit(trio.current_time() - began)
        self.apply(self.core.take_events())

    def _unit(self, ready: UnitReady) -> Unit:
        if self._origin is None:
            info = self.stream.info
            self._origin = Origin(
                connection=uuid.UUID(bytes=self.system.platform.token_bytes(16), version=4).hex,
                peer=info.peer,
                version=self.core.version or 0,
                subject=info.peer_subject,
                names=info.peer_names,
                identity="" if self.identity is None else self.identity.name,
            )
        return Unit(ready.events, self._origin, ready.number, ready.whole)

    def _note_late_commit(self, took: float) -> None:
        now = trio.current_time()
        if took < _SLOW:  # some writers close as soon as they have sent, or after their first ack
            self.log(logging.DEBUG, "late_commit", "was gone before a unit could be acked; it may come again")
        elif now >= self.load.late_log_at:
            self.load.late_log_at = now + _LATE_LOG
            text = (
                "was gone when the sink committed a unit after %.0f s; it comes again: put a spool before a slow sink"
            )
            self.log(logging.WARNING, "late_commit", text, took)

    def log(self, level: int, event: str, text: str, *arguments: object) -> None:
        """Log a line that names the writer."""
        super().log(level, event, "%s " + text, self.stream.info.peer, *arguments)
