"""What all connections of one reader share: counters, and the bound on what they hold together (LJ-42b).

A connection reports what it holds after each step, and before a large event what that will take.  `_first` is the oldest that holds much;
it goes on until it holds little, and room is kept for all that it may come to hold meanwhile.  When the others together hold more than
the rest, those of them that hold much are paused.  As their sum falls they are let on, one at each report, the oldest first, so the
newest wait longest; below half of the bound all of them, since those that go on may have nothing to report.  Who holds little is paused
only when all together hold more than they may, so peers that ask for much do not delay those that ask for little.
A paused connection neither reads nor unpacks.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Protocol

import attrs

from levada.transports.lumberjack import ReaderConfig, ReaderCore

from .turns import Turns

__all__ = ["Load", "Pausable", "ReaderStatistics"]


@attrs.frozen(kw_only=True)
class ReaderStatistics:
    """Counters of a reader since it began; a snapshot."""

    connections: int
    """Open now."""
    connections_accepted: int
    connections_refused: int
    """Closed at once, as there were too many (LJ-43), of all or of their address, or their TLS handshake failed."""
    connections_paused: int
    """Not read now, as all together hold too much (LJ-42b)."""
    units: int
    """Units and slices given to the sink."""
    events: int
    """Received, as windows count them."""
    bytes_received: int
    bytes_unpacked: int
    acks: int
    keepalives: int
    late_commits: int
    """Units committed when their connection was over, so that they come again (LJ-26)."""
    sink_failures: int
    """Connections closed because the sink failed or took too long (LJ-25)."""
    events_unacked: int
    """Handed on, and their connection ended before the ack; they come again."""
    protocol_errors: dict[str, int]
    """Connections closed by the rule that they broke (LJ-46)."""
    bytes_held: int
    """Bytes, and costs of events, of all connections now."""
    oldest_unacked: float
    """Seconds that the sink has had the oldest unit; 0 if it has none."""


class Pausable(Protocol):
    """A connection, as its reader's load sees it."""

    core: ReaderCore

    def pause(self) -> None:
        """Stop reading and unpacking."""

    def resume(self) -> None:
        """Go on."""


class Load:
    """The connections of one reader, the oldest first, and their sums.

    Args:
        config: bounds.
    """

    def __init__(self, config: ReaderConfig) -> None:
        self.config = config
        self.accepted = self.refused = self.sink_failures = self.events_unacked = 0
        self.bytes_received = 0
        self.late_log_at = -inf  # when the next log line about late commits may come
        self.protocol_errors: Counter[str] = Counter()
        self.turns = Turns()
        limit = config.max_inflight_bytes
        # An envelope, the events of a slice, and a frame whose characters take four bytes each.
        most = config.max_envelope + config.max_cost + 5 * config.max_frame
        self._bound = limit - min(most, limit // 2)  # of all but `_first`
        self._little = limit // 16  # of all that hold little
        self._first: Pausable | None = None
        self._held: dict[Pausable, int] = {}
        self._total = 0
        self._holding = 0  # connections that hold anything
        self.paused: dict[Pausable, None] = {}
        self._past: Counter[str] = Counter()  # of connections that ended

    def __len__(self) -> int:
        return len(self._held)

    def add(self, connection: Pausable) -> None:
        """Take in a new connection."""
        self.accepted += 1
        self._held[connection] = 0

    def remove(self, connection: Pausable) -> None:
        """Forget a connection that ended; its counters stay."""
        if connection not in self._held:
            return  # it never began
        self._note(connection, 0)
        del self._held[connection]
        self.paused.pop(connection, None)
        for name in _COUNTERS:
            self._past[name] += getattr(connection.core, name)
        self._balance()

    def report(self, connection: Pausable) -> None:
        """Look at what a connection holds now, and at what that means for all."""
        if connection not in self._held:
            return  # it has ended, or never began
        self._note(connection, connection.core.held)
        if self.paused or self._total > self._bound:
            self._balance()

    def _note(self, connection: Pausable, held: int) -> None:
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
                if each in self.paused:  # what one hands on may end it, and let others go on
                    each.pause()
        if not full:
            waiting = [each for each in self._held if each in self.paused]
            some = [] if over else [each for each in waiting if self._held[each] > much]
            if others > self._bound // 2:
                del some[1:]
            for each in [each for each in waiting if self._held[each] <= much] + some:
                if each in self.paused:
                    self._resume(each)

    def _resume(self, connection: Pausable | None) -> None:
        if connection is not None:
            del self.paused[connection]
            connection.resume()

    def statistics(self, now: float) -> ReaderStatistics:
        """Return the counters as they are at `now`."""
        cores = [each.core for each in self._held]
        sums = {name: self._past[name] + sum(getattr(core, name) for core in cores) for name in _COUNTERS}
        asked = [since for core in cores if (since := core.oldest_uncommitted) is not None]
        return ReaderStatistics(
            connections=len(self._held),
            connections_accepted=self.accepted,
            connections_refused=self.refused,
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
