"""`LumberjackHandler` sends the log records of any Python program, from any thread, with or without an event loop.

Threads that log put events into a bounded queue.  One task, the *sender*, takes them out and gives them to a `Writer`.  The sender runs
in its own thread, with its own trio run and `ActorSystem`, or in the system of the program.

* `emit` formats in the thread that logs, because the arguments of a record may change later.  Otherwise it only appends to the queue.
* While the queue is full, `emit` waits for `block` seconds at most, then drops the record and counts it.  In the sender's thread it never
  waits.
* Records of levada itself are not sent, because sending each would cause another one.  `logging` writes warnings that find no handler to
  stderr, and this handler does the same with warnings of levada that find no other handler.
* After a fork the parent still sends its records.  The child begins with an empty queue, and starts its own thread when it logs.
* A process of `multiprocessing` may end by `os._exit`, so there a finalizer of `multiprocessing` also closes the handler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import trio

from levada.framework import Actor, ActorSystem
from levada.framework.errors import ConfigurationError
from levada.framework.platform import PLATFORM
from levada.transports.lumberjack import EventRejected, WriterConfig

from .balance import HostConfig, targets
from .disk_spool import SpoolConfig, check_spool
from .writer import Writer, connect

__all__ = ["LumberjackHandler"]

logger = logging.getLogger("levada.actors.lumberjack.logging_handler")

_OURS = "levada"

# Python imports this codec at the first lookup of a host. If the program forked during that import in the sender's thread, the child could
# never look up a host, because the lock of the import would stay taken there.
"".encode("idna")


class LumberjackHandler(logging.Handler):
    """Sends log records to Lumberjack readers.

    An event has the keys ``line`` (the formatted message), ``host``, ``logger``, ``level``, ``time`` (ISO 8601, UTC), ``process`` and
    ``thread``, and the keys of `fields`; override `event` to change them.  `logging` closes the handler when the program ends.

    Args:
        url: one reader or several, as for `connect`.
        level: records below it are not sent.
        config: settings of the protocol.
        hosts: settings of the connections.
        spool: keep records on disk until they are acked.
        system: send in this running system instead of in a thread; call `aclose` before leaving the system.
        queue: records that may wait for the writer, in addition to those in the writer's own queue.
        block: seconds that a logging call may wait while the queue is full; 0 never waits.
        close_timeout: seconds that `flush` and `close` wait for acks.
        fields: added to each event.

    Raises:
        ConfigurationError: a URL or the settings cannot work. The sender reads certificates later: if they cannot be used, `failure` has the
            reason, and records are dropped.

    Example:
        ::

            logging.getLogger().addHandler(LumberjackHandler("lumberjack+tls://logs.example.org:5044"))
    """

    def __init__(
        self,
        url: str | Sequence[str],
        level: int | str = logging.NOTSET,
        *,
        config: WriterConfig | None = None,
        hosts: HostConfig | None = None,
        spool: SpoolConfig | None = None,
        system: ActorSystem | None = None,
        queue: int = 10_000,
        block: float = 0.0,
        close_timeout: float = 5.0,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        targets(url, hosts or HostConfig())  # raises for a wrong URL
        check_spool(config or WriterConfig(), spool)
        if queue < 1 or not block >= 0 or not close_timeout >= 0:
            raise ConfigurationError("queue must be at least 1, block and close_timeout must not be negative")
        super().__init__(level)
        self._url = url
        self._config = config
        self._hosts = hosts
        self._spool = spool
        self._system = system
        self._limit = queue
        self._block = block
        self._close_timeout = close_timeout
        self._fields = dict(fields or {})
        self._host = PLATFORM.get().host()
        self._closed = False
        self._begin_anew()
        _handlers.add(self)
        if system is not None:
            self._start()

    def _begin_anew(self) -> None:
        """Reset the state, in a new handler and in the child of a fork."""
        self.dropped = 0
        """Records that were dropped: the queue was full, the handler had ended, or the record cannot be sent."""
        self.failure: Exception | None = None
        """Why the sender has given up; ``None`` while it works."""
        self._records: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition(threading.Lock())  # guards all that follows
        self._started = False
        self._ended = False
        self._asleep = False
        """Whether the sender waits to be woken."""
        self._asked = 0  # flushes asked for…
        self._flushed = 0  # …and done
        self._taken = 0  # out of the queue and not in the writer's
        self._unacked = 0  # in the writer's
        self._thread: int | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._wake = trio.Event()
        self._scope = trio.CancelScope()
        self._done = trio.Event()

    def event(self, record: logging.LogRecord) -> dict[str, Any]:
        """Make the event of a record, in the thread that logs. Override it to change the keys; an error drops the record, as in `logging`."""
        return {
            "line": self.format(record),
            "host": self._host,
            "logger": record.name,
            "level": record.levelname,
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "process": record.process,
            "thread": record.threadName,
            **self._fields,
        }

    def handle(self, record: logging.LogRecord) -> bool:
        """Take a record without the lock of `logging.Handler`, so that a thread that waits for room does not hold up other threads."""
        if record.name == _OURS or record.name.startswith(_OURS + "."):
            self._show(record)
            return False
        if not self.filter(record):
            return False
        self.emit(record)
        return True

    def _show(self, record: logging.LogRecord) -> None:
        """Give a record of levada to `logging.lastResort` if all its handlers are of this class. Only the first of them does so."""
        last = logging.lastResort
        if last is None or record.levelno < last.level:
            return
        found: list[logging.Handler] = []
        at: logging.Logger | None = logging.getLogger(record.name)
        while at is not None:
            found += [handler for handler in at.handlers if record.levelno >= handler.level]
            at = at.parent if at.propagate else None
        if found[:1] == [self] and all(isinstance(handler, LumberjackHandler) for handler in found):
            last.handle(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record. It never raises, and waits for `block` seconds at most."""
        try:
            event = self.event(record)
        except Exception:  # noqa: BLE001 - as in logging: a record that cannot be formatted does not end the program
            self.handleError(record)
            return
        with self._changed:
            if self._block and not self._has_room() and threading.get_ident() != self._thread:
                self._changed.wait_for(lambda: self._has_room() or self._closed or self._ended, self._block)
            if self._closed or self._ended or not self._has_room():
                self.dropped += 1
                return
            if not self._started:
                self._start()
            self._records.append(event)
            self._wake_sender()

    def _has_room(self) -> bool:
        return len(self._records) < self._limit

    def _start(self) -> None:
        self._started = True
        if self._system is not None:
            self._thread = threading.get_ident()  # the thread of the system, in which emit must not wait
            self._system.spawn(_Sender, self)
        else:
            threading.Thread(target=self._run, name="lumberjack log handler", daemon=True).start()
            _close_at_end_of_child(self)

    def _wake_sender(self) -> None:
        if self._asleep:
            self._asleep = False
            assert self._token is not None
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._wake.set)

    def flush(self) -> None:
        """Wait until all records so far are acked, for `close_timeout` seconds at most. In the sender's own thread it does not wait."""
        with self._changed:
            if self._started and not self._ended and threading.get_ident() != self._thread:
                self._asked += 1
                wanted = self._asked
                self._wake_sender()
                self._changed.wait_for(lambda: self._flushed >= wanted or self._ended, self._close_timeout)

    def close(self) -> None:
        """Take no more records, and wait for acks for `close_timeout` seconds at most. In the sender's own thread it does not wait.

        Records that are not acked by then are lost. One error in the log says how many; without another handler it goes to stderr.
        """
        waited = False
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.notify_all()
            if self._token is not None:
                with contextlib.suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._hurry)
            if self._started and threading.get_ident() != self._thread:
                # The sender ends by itself after `close_timeout`. The extra second is for its cleanup.
                self._changed.wait_for(lambda: self._ended, self._close_timeout + 1.0)
                waited = True
        super().close()
        if first and waited and (self.unacked or self.dropped):
            reason = f": {self.failure}" if self.failure else ""
            counts = f"{self.unacked} log records were not acknowledged, {self.dropped} were dropped"
            logger.error("LumberjackHandler: %s%s", counts, reason)

    async def aclose(self) -> int:
        """Close the handler from a task of the given system, and wait until the sender has ended; return the number of unacked records.

        Cancellation:
            the handler is closed; the sender goes on until `close_timeout` is over.
        """
        self.close()
        if self._started:
            await self._done.wait()
        return self.unacked

    @property
    def unacked(self) -> int:
        """Number of records that are queued or sent and not acked; after `close`, of those that are lost."""
        with self._changed:
            return len(self._records) + self._taken + self._unacked

    def _run(self) -> None:
        async def main() -> None:
            async with ActorSystem("log handler") as system:
                await self.send_in(system)

        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001 - the edge of the thread; this handler does not take the records of levada
            self.failure = self.failure or RuntimeError(f"the sender of log records has failed: {error!r}")
            self._end()

    async def send_in(self, system: ActorSystem) -> None:
        """Send records until the handler is closed, or the sender fails."""
        with self._changed:
            self._thread = threading.get_ident()
            self._token = trio.lowlevel.current_trio_token()
            if self._closed:
                self._hurry()
        try:
            with self._scope:
                async with connect(
                    system, self._url, config=self._config, hosts=self._hosts, spool=self._spool, close_timeout=0.0
                ) as writer:
                    try:
                        await self._empty_queue(writer)
                    finally:
                        self._unacked = writer.unacked
        except ConfigurationError as error:
            self.failure = error
        finally:
            self._end()
            self._done.set()

    def _hurry(self) -> None:
        """Make the sender end within `close_timeout`."""
        self._scope.deadline = min(self._scope.deadline, trio.current_time() + self._close_timeout)
        self._wake.set()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def _empty_queue(self, writer: Writer) -> None:
        async with trio.open_nursery() as nursery:
            flushing = 0
            while True:
                with self._changed:
                    events = list(self._records)
                    self._records.clear()
                    self._taken = len(events)
                    self._unacked = writer.unacked
                    self._changed.notify_all()
                    asked, closed = self._asked, self._closed
                    self._asleep = not events and asked == flushing and not closed
                    if self._asleep:
                        self._wake = trio.Event()
                for event in events:
                    rejected = 0
                    try:
                        await writer.send(event)
                    except EventRejected:
                        rejected = 1
                    with self._changed:  # every record is in one of the sums at any time
                        self.dropped += rejected
                        self._taken -= 1
                        self._unacked = writer.unacked
                if events:
                    continue
                if asked > flushing:
                    flushing = asked
                    nursery.start_soon(self._flush, writer, asked)
                elif closed:
                    await writer.flush()
                    nursery.cancel_scope.cancel()
                    return
                else:
                    await self._wake.wait()

    async def _flush(self, writer: Writer, number: int) -> None:
        await writer.flush()
        with self._changed:
            self._flushed = max(self._flushed, number)
            self._unacked = writer.unacked
            self._changed.notify_all()


class _Sender(Actor[Any]):
    """The sender as an actor of a system that was given."""

    handler: LumberjackHandler

    def started(self) -> None:
        self.start_soon(self.send)

    async def send(self) -> None:
        await self.handler.send_in(self.system)
        self.stop()


def _close_at_end_of_child(handler: LumberjackHandler) -> None:
    util = sys.modules.get("multiprocessing.util")
    if util is not None and sys.modules["multiprocessing.process"].parent_process() is not None:
        util.Finalize(handler, handler.close, exitpriority=0)


_handlers: weakref.WeakSet[LumberjackHandler] = weakref.WeakSet()


def _after_fork() -> None:
    for handler in _handlers:
        handler._begin_anew()
        # A system that was given lives in the parent only.
        handler._system = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
