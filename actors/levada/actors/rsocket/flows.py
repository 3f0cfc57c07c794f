"""Payloads on their way to a `Receiver`, and the credit that taking them grants.

A `PayloadChannel` is the inside of an ordinary channel, so everything about receivers applies here: one owner, explicit ends, `to_mailbox`,
closing. It differs in three ways. The receiver's window is the peer's credit, so the protocol core bounds the queue, not this class.
Payloads are counted as they are taken, and after half a window one REQUEST_N grants that many again (RS-66, RS-72). And a stream that
its responder failed raises the responder's error, not a channel error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from levada.framework import TerminalState
from levada.framework.embedding import LARGE, ChannelCore, Envelope, Half, Outcome
from levada.framework.errors import ChannelError, ConnectionLost, LevadaError

__all__ = ["Arrived", "PayloadChannel", "again"]


def again(error: LevadaError) -> LevadaError:
    """Return an equal error to raise once more: a raised error would collect the traceback of every call."""
    copy = attrs.evolve(error)
    copy.__cause__ = error.__cause__
    return copy


class _EndedBy(Half):
    """A channel half that may have ended with an error of the peer's own."""

    __slots__ = ("failure",)

    def __init__(self) -> None:
        super().__init__()
        self.failure: ChannelError | None = None

    def error(self, name: str) -> ChannelError:
        if self.failure is None:
            return super().error(name)
        failure = again(self.failure)
        assert isinstance(failure, ChannelError)
        return failure


class Arrived(Envelope):
    """A payload that is decoded only when the application takes it, so that errors are raised there, or whose size counts until then."""

    __slots__ = ("_payload", "_settled", "decode", "large")

    def __init__(
        self, payload: Any, decode: Callable[[Any], Any] | None, settled: Callable[[], object] | None = None
    ) -> None:
        self._payload = payload
        self._settled = settled
        self.convert(decode)

    def convert(self, decode: Callable[[Any], Any] | None) -> None:
        """Decode the payload by this function; a large one lets other tasks run first."""
        self.decode = decode
        self.large = decode is not None and len(self._payload.data) > LARGE

    def open(self) -> Any:
        """Decode the payload."""
        return self._payload if self.decode is None else self.decode(self._payload)

    def settle(self, outcome: Outcome) -> None:
        """Record that the payload is no longer held."""
        settled, self._settled = self._settled, None
        if settled is not None:
            settled()


class PayloadChannel(ChannelCore):
    """The inside of the channel that carries a stream's payloads.

    Args:
        window: payloads that may be under way or queued.
        name: for logs and errors.
        item_type: as for `channel`.
        grant: called with this object and the number of payloads taken since the last call.
    """

    __slots__ = ("_convert", "_grant", "_taken", "_top_up", "ended_by")

    def __init__(self, window: int, name: str, item_type: Any, grant: Callable[[PayloadChannel, int], None]) -> None:
        super().__init__(item_type, window, name)
        self.receiver = self.ended_by = _EndedBy()
        self.enveloped = True  # so that each payload goes through `took`
        self._grant = grant
        self._convert: Callable[[Any], Any] | None = None
        self._taken = 0
        self._top_up = max(1, window // 2)

    def convert(self, convert: Callable[[Any], Any]) -> None:
        """From now on give the receiver ``convert(payload)``, for queued payloads too; its errors are raised where the payload is taken."""
        self._convert = convert
        for at, payload in enumerate(self.queue):
            if isinstance(payload, Arrived):
                payload.convert(convert)
            else:
                self.queue[at] = Arrived(payload, convert)

    def took(self, entry: Any) -> Any:
        """Count a payload that the receiver takes; see `ChannelCore.took`."""
        self._count()
        return super().took(entry)

    def put(self, entry: Any, settled: Callable[[], object] | None = None) -> None:
        """Hand over a payload; if a task waits for it, it is taken at once. `settled` is called when it is taken or dropped."""
        if self._convert is not None or settled is not None:
            entry = Arrived(entry, self._convert, settled)
        if self.taker is not None:
            self.give(entry)
            self._count()
        else:
            self.open_queue().append(entry)
            if self.consumer is not None:
                self.consumer()

    def settle(self, *entries: Any, outcome: Outcome, more: int = 0) -> None:
        """Count payloads that a mailbox takes; see `ChannelCore.settle`."""
        super().settle(*entries, outcome=outcome, more=more)
        for _ in range(len(entries) + more):
            self._count()

    def _count(self) -> None:
        self._taken += 1
        if self._taken >= self._top_up:
            taken, self._taken = self._taken, 0
            self._grant(self, taken)

    def fail(self, error: LevadaError) -> None:
        """End after the queued payloads: with the connection's loss if it was lost, otherwise with `error` itself."""
        if isinstance(error, ConnectionLost) or not isinstance(error, ChannelError):
            self.end(TerminalState.CONNECTION_LOST, discard=False, detail=error.detail, cause=error)
        else:
            self.ended_by.failure = error
            self.end(TerminalState.CANCELLED, discard=False)
