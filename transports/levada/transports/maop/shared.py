"""State shared by the connections of one identity: finished operations by key, replay windows, quotas.

Each of the three may serve one core or many cores of one thread. Times are arguments, as everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias

import attrs

__all__ = ["DedupStore", "Quota", "ReplayWindow", "StoredDone", "StoredResponse"]

Key: TypeAlias = tuple[str, int, bytes]
"""Identity, msg_id, idempotency key."""

MAX_STORED: Final = 65_536
"""Bytes of the largest Response kept. Source: MA-123."""


@attrs.frozen
class StoredDone:
    """An executed Message."""

    exec_start_ms: int
    exec_time_ms: int
    length: int | None
    """Bytes announced by its header; None for undefined length."""
    digest: bytes
    """Digest of its body: another body under the same key is refused."""


@attrs.frozen
class StoredResponse:
    """An answered Request."""

    payload: bytes | None
    """As on the wire, with native header; None if it was too large to keep."""
    exec_start_ms: int
    exec_time_ms: int
    length: int | None
    """As for `StoredDone`."""
    digest: bytes
    """Digest of the wanted response id and the body."""


class DedupStore:
    """Operations by idempotency key. Source: MA-123.

    Args:
        ttl: seconds for which a terminal is kept; at least as long as callers retry.
        max_entries: most entries; the least recently used goes first.
        max_bytes: most bytes of stored Responses.
    """

    def __init__(self, *, ttl: float = 600.0, max_entries: int = 100_000, max_bytes: int = 64 * 2**20) -> None:
        self._ttl: Final = ttl
        self._max_entries: Final = max_entries
        self._max_bytes: Final = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[Key, tuple[float, StoredDone | StoredResponse | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, key: Key, now: float) -> StoredDone | StoredResponse | bool:
        """Return whether to execute.

        Returns:
            True: execute, and report the end. False: it is running. Otherwise the stored answer.
        """
        entry = self._entries.get(key)
        if entry is not None and (entry[1] is None or now < entry[0]):
            self._entries.move_to_end(key)
            return False if entry[1] is None else entry[1]
        self._put(key, now, None)
        return True

    def finish(self, key: Key, terminal: StoredDone | StoredResponse, now: float) -> None:
        """Keep the answer of an operation."""
        if isinstance(terminal, StoredResponse) and terminal.payload is not None and len(terminal.payload) > MAX_STORED:
            terminal = attrs.evolve(terminal, payload=None)
        self._put(key, now, terminal)

    def abandon(self, key: Key) -> None:
        """Forget an operation that failed or was never executed: the next one with its key is executed."""
        self._drop(key)

    def _put(self, key: Key, now: float, terminal: StoredDone | StoredResponse | None) -> None:
        self._drop(key)
        self._entries[key] = (now + self._ttl, terminal)
        self._bytes += _bytes_of(terminal)
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= _bytes_of(entry[1])


def _bytes_of(terminal: StoredDone | StoredResponse | None) -> int:
    return len(terminal.payload or b"") if isinstance(terminal, StoredResponse) else 0


class ReplayWindow:
    """When each identity last began an operation of a kind. Source: MA-124."""

    def __init__(self, size: int = 100_000) -> None:
        self._size: Final = size
        self._last: OrderedDict[tuple[str, int], float] = OrderedDict()

    def admit(self, identity: str, msg_id: int, window: float, now: float) -> bool:
        """Return whether an operation may begin, and record that it did."""
        key = (identity, msg_id)
        last = self._last.get(key)
        if last is not None and now - last < window:
            return False
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > self._size:
            self._last.popitem(last=False)
        return True


class Quota:
    """What one identity uses at the moment. Source: MA-118.

    Args:
        max_operations: most operations approved and not ended.
        max_bytes: most bytes of bodies held for the application.
    """

    __slots__ = ("buffered", "max_bytes", "max_operations", "operations", "waiting")

    def __init__(self, max_operations: int, max_bytes: int) -> None:
        self.max_operations = max_operations
        self.max_bytes = max_bytes
        self.operations = 0
        """Operations in flight."""
        self.buffered = 0
        """Bytes held, or promised room."""
        self.waiting: dict[Callable[[], bool], None] = {}
        """Connections that found no room, longest waiting first. Each is told once, and answers whether it still wants room."""

    def fits(self, size: int) -> bool:
        """Whether there is room for one more operation with this many bytes."""
        return self.operations < self.max_operations and self.buffered + size <= self.max_bytes

    def freed(self) -> None:
        """Tell the next connection that there may be room."""
        while self.waiting:
            told = next(iter(self.waiting))
            del self.waiting[told]
            if told():
                return
