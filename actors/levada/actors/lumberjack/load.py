"""Counters and a common memory bound for all connections of one reader (LJ-42b).

A connection reports its memory after each step, and the need of a large event before it is built.  `_first` is the oldest connection
that holds much.  It is never paused, and room is reserved for all that it may come to hold.  If the others together
hold more than the rest, those of them that hold much are paused.  As their sum falls they resume, one at each report, the oldest first.
Below half of the bound all of them resume, because the connections that run may have nothing to report.  A connection that holds little
is paused only if all together exceed the limit, so large batches do not delay small ones.  A paused connection neither reads nor unpacks.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING

import attrs

from levada.transports.lumberjack import ReaderConfig

from .turns import Turns

if TYPE_CHECKING:
    from .connection import LumberjackDriver

__all__ = ["Load", "ReaderStatistics"]


@attrs.frozen(kw_only=True)
class ReaderStatistics:
    """Counters of a reader since it began; a snapshot."""

    connections: int
    """Connections that are open now."""
    connections_accepted: int
    connections_refused: int
    """Connections closed at once: there were too many (LJ-43) in all or from one address, they made room for others, the TLS handshake
    failed, or the hook refused."""
    connections_paused: int
    """Connections that are not read now, because all together hold too much (LJ-42b)."""
    units: int
    """Units and slices given to the sink."""
    events: int
    """Events received, as windows count them."""
    bytes_received: int
    bytes_unpacked: int
    acks: int
    keepalives: int
    late_commits: int
    """Units that were committed after the end of their connection, and so come again (LJ-26)."""
    sink_failures: int
    """Connections closed because the sink failed or took too long (LJ-25)."""
    events_unacked: int
    """Events given to the sink whose connection ended before the ack; they come again."""
    protocol_errors: dict[str, int]
    """Connections closed because the writer broke a rule, by the id of the rule (LJ-46)."""
    bytes_held: int
    """Bytes, and costs of events, that all connections hold now."""
    oldest_unacked: float
    """Seconds since the sink got the oldest unit that it has not committed; 0 if there is none."""


class Load:
    """The connections of one reader, the oldest first, and their sums.

    Args:
        config: the bounds.
    """

    def __init__(self, config: ReaderConfig) -> None:
        self.config = config
        self.accepted = self.sink_failures = self.events_unacked = 0
        self.bytes_received = 0
        self.late_log_at = -inf  # when the next log line about late commits may come
        self.protocol_errors: Counter[str] = Counter()
        self.turns = Turns()
        limit = config.max_inflight_bytes
        # An envelope, the events of a slice, and a frame whose characters take four bytes each.
        most = config.max_envelope + config.max_cost + 5 * config.max_frame
        self._bound = limit - min(most, limit // 2)  # for all but `_first`
        self._little = limit // 16  # for all that hold little
        self._first: LumberjackDriver | None = None
        self._held: dict[LumberjackDriver, int] = {}
        self._total = 0
        self._holding = 0  # connections that hold anything
        self.paused: dict[LumberjackDriver, None] = {}
        self._past: Counter[str] = Counter()  # sums of connections that have ended

    def __len__(self) -> int:
        return len(self._held)

    def add(self, connection: LumberjackDriver) -> None:
        """Add a new connection."""
        self.accepted += 1
        self._held[connection] = 0

    def remove(self, connection: LumberjackDriver) -> None:
        """Remove a connection that has ended; its counters stay in the sums."""
        if connection not in self._held:
            return  # it never began
        self._note(connection, 0)
        del self._held[connection]
        self.paused.pop(connection, None)
        for name in _COUNTERS:
            self._past[name] += getattr(connection.core, name)
        self._balance()

    def report(self, connection: LumberjackDriver) -> None:
        """Record the memory of a connection, and pause or resume connections."""
        if connection not in self._held:
            return  # it has ended, or never began
        self._note(connection, connection.core.held)
        if self.paused or self._total > self._bound:
            self._balance()

    def _note(self, connection: LumberjackDriver, held: int) -> None:
        before, self._held[connection] = self._held[connection], held
        self._total += held - before
        self._holding += (held > 0) - (before > 0)

    def _balance(self) -> None:
        much = self._little // max(1, self._holding)
        if self._first is None or self._held.get(self._first, 0) <= much:
            self._first = next((each for each, held in self._held.items() if held > much), None)
        first = self._first
        others = self._total - (0 if first is None else self._held[first])
        full, over = self._total > self.config.max_inflight_bytes, others > self._bound
        if first in self.paused:
            self._resume(first)
        if full or over:
            paused = [
                each
                for each, held in self._held.items()
                if each is not first and each not in self.paused and (full or held > much)
            ]
            self.paused.update(dict.fromkeys(paused))
            for each in paused:
                if each in self.paused:  # pausing one may end it, and so resume others
                    each.pause()
        if not full:
            waiting = [each for each in self._held if each in self.paused]
            some = [] if over else [each for each in waiting if self._held[each] > much]
            if others > self._bound // 2:
                del some[1:]
            for each in [each for each in waiting if self._held[each] <= much] + some:
                if each in self.paused:
                    self._resume(each)

    def _resume(self, connection: LumberjackDriver | None) -> None:
        if connection is not None:
            del self.paused[connection]
            connection.resume()

    def statistics(self, now: float, *, refused: int = 0) -> ReaderStatistics:
        """Return the counters as they are at `now`; `refused` is the number of connections closed at once."""
        cores = [each.core for each in self._held]
        sums = {name: self._past[name] + sum(getattr(core, name) for core in cores) for name in _COUNTERS}
        asked = [since for core in cores if (since := core.oldest_uncommitted) is not None]
        return ReaderStatistics(
            connections=len(self._held),
            connections_accepted=self.accepted,
            connections_refused=refused,
            connections_paused=len(self.paused),
            bytes_received=self.bytes_received,
            sink_failures=self.sink_failures,
            events_unacked=self.events_unacked,
            protocol_errors=dict(self.protocol_errors),
            bytes_held=self._total,
            oldest_unacked=now - min(asked, default=now),
            **sums,
        )


_COUNTERS = ("units", "events", "bytes_unpacked", "acks", "keepalives", "late_commits")
