"""One side of a connection, as its operations and control streams see it: its state, its table of streams, and its end.

`MaopCore` begins operations and hands them what arrives. The end comes at once, or after a drain that both sides may shorten.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from levada.framework.errors import LocalProtocolError

from .body import BodyReader
from .codes import close_code, sanitise
from .config import HandlerSpec, MaopConfig
from .events import Draining, Event, Stepped
from .session import Session
from .shared import DedupStore, Quota, ReplayWindow
from .state import CONNECTION, ConnectionInput, ConnectionState
from .timers import MaopTimers, Timed

if TYPE_CHECKING:
    from .control import ControlIn, ControlPool, Signals
    from .gate import OperationGate

__all__ = ["STOPPED", "EndedOperation", "Side", "Statistics", "nothing"]


@attrs.define
class Statistics:
    """The counters of a connection. Source: MA-133."""

    opened: int = 0
    """Operations of this side."""
    received: int = 0
    """Operations of the peer whose stream was classified."""
    approved: int = 0
    """Operations of the peer that passed the gate."""
    done: int = 0
    """Operations of the peer that succeeded."""
    block_bytes: int = 0
    """Bytes received on data streams."""
    streams_aborted: int = 0
    """Streams that the peer has reset."""
    responses_unacked: int = 0
    """Responses that the requester never acknowledged."""
    invalid_content_types: int = 0
    """Successes received with an invalid content type."""
    refused: Counter[int] = attrs.Factory(Counter)
    """Refuses sent, by code."""
    failed: Counter[int] = attrs.Factory(Counter)
    """Fails sent and received, and failures found here, by code."""


_OPEN, _DRAINING = ConnectionState.OPEN, ConnectionState.DRAINING
STOPPED = 1
"""Replaces what has ended on a stream whose peer direction is open, after STOP_SENDING was sent."""
_ENDLESS: Final = 2**60
"""Stream credit until the owner reports it."""


def nothing() -> None:
    """Do nothing: the default of `Side.wake`."""


class EndedOperation(Timed, Protocol):
    """An ended operation, as the table of streams sees it."""

    stream_id: int
    fin: bool
    """Whether the peer's direction has ended."""


class Side(Session):
    """What operations of either side, and control streams, use of their connection, and the steps to its end. Source: section 11."""

    gate: OperationGate
    """Decides whether and when an operation of the peer may begin."""
    pool: ControlPool
    """Our control streams."""
    signals: Signals
    """The limits on the peer's signals."""

    def __init__(
        self,
        *,
        client: bool,
        config: MaopConfig,
        random_bytes: Callable[[int], bytes],
        specs: Mapping[int, HandlerSpec],
        wall_offset: float,
        now: float,
        quota: Quota,
        dedup: DedupStore,
        replay: ReplayWindow,
    ) -> None:
        super().__init__(client=client, config=config, random_bytes=random_bytes, now=now)
        self.specs = specs
        """The operations that the peer may request, by msg_id, with the native Test unless it is disabled. Source: MA-41, MA-112."""
        self.wall_offset = wall_offset
        self.wake: Callable[[], None] = nothing
        """Called when another connection has freed room in a shared quota: the owner then takes a turn."""
        self.steps = False
        """Whether `Begun` and `Stepped` are emitted, for a log."""
        self.quota = quota
        self.dedup = dedup
        self.replay = replay
        self.statistic = Statistics()
        self.streams: dict[int, Any] = {}
        """The content of each stream whose operation, or whose peer direction, has not ended: the operation, `ControlIn`, or what replaces it."""
        self.operations = 0
        """Operations that have not ended, of either side."""
        self.unacked: OrderedDict[int, float] = OrderedDict()
        """Our unacknowledged Responses, and when they are forgotten. Source: MA-71."""
        self.timers = MaopTimers()
        self._control_streams = 0
        self._next_id = {False: 4 if client else 1, True: 2 if client else 3}
        self._credit = {False: _ENDLESS, True: _ENDLESS}

    # What `MaopCore` does with signals, and with all operations.

    @abstractmethod
    def on_proceed(self, stream_id: int, now: float) -> None:
        """Process a Proceed: the peer wants the body of an operation of ours."""

    @abstractmethod
    def on_refuse(self, stream_id: int, retry_ms: int, code: int, now: float) -> None:
        """Process a Refuse: the peer does not want an operation of ours."""

    @abstractmethod
    def on_done(self, stream_id: int, start_ms: int, time_ms: int, now: float) -> None:
        """Process a Done for a Message or a Response of ours."""

    @abstractmethod
    def on_fail(self, stream_id: int, code: int, reason: str, now: float) -> None:
        """Process a Fail for an operation of ours, or from a requester that cannot use the Response."""

    @abstractmethod
    def retire(self, operation: EndedOperation) -> None:
        """Replace an ended operation; its stream is remembered until the peer's direction has ended too."""

    @abstractmethod
    def cancel_all(self, *, signal: bool) -> None:
        """End every operation; with `signal` the peer is told of each."""

    # The table of streams.

    def mark_stopped(self, stream_id: int) -> None:
        """Record for `retire` that STOP_SENDING was sent."""
        self._stopping = stream_id

    def keep_control(self, control: ControlIn) -> None:
        """Record that a stream carries signals from now on."""
        self.streams[control.stream_id] = control

    def is_control(self, control: ControlIn) -> bool:
        """Whether a stream still carries signals."""
        return self.streams.get(control.stream_id) is control

    def forget_control(self, control: ControlIn, *, ended: bool = True) -> None:
        """Record that a stream carries no more signals."""
        if ended:
            self.streams.pop(control.stream_id, None)
        else:
            self.streams[control.stream_id] = STOPPED
        if not control.own:
            self._control_streams -= 1

    def credit_left(self, *, unidirectional: bool) -> int:
        """Return how many more streams of a kind may be opened, according to `stream_credit`."""
        return max(0, self._credit[unidirectional] - (self._next_id[unidirectional] >> 2))

    def take_stream_id(self, *, unidirectional: bool) -> int:
        """Number a new stream of ours."""
        stream_id = self._next_id[unidirectional]
        self._next_id[unidirectional] = stream_id + 4
        return stream_id

    # What operations say.

    def fail_stream(self, stream_id: int, code: int, reason: str) -> None:
        """Queue a Fail for a stream that carries no operation."""
        self.pool.fail(stream_id, code, self.reason(reason))
        self.statistic.failed[code] += 1

    def note_blocks(self, stream_id: int, before: int, body: BodyReader) -> None:
        """Report the first Block of a body, and its end; `before` counts the earlier Blocks. Source: MA-132."""
        if body.blocks and not before:
            self.emit(Stepped(stream_id, "first_block", body.total))
        if body.ended:
            self.emit(Stepped(stream_id, "last_block", body.total))

    def reason(self, text: str) -> bytes:
        """Make a reason fit for the wire. Source: MA-78."""
        return sanitise(text, self.random_bytes(4).hex(), secrets=self.secrets)

    # The end.

    def drain(self, now: float) -> list[Event]:
        """Begin no new work, let open work finish within `TimesConfig.drain_timeout` seconds, then end. A second call changes nothing.

        A connection that is not open yet has no work and ends at once.
        """
        if self.state < ConnectionState.LINGERING:
            return self.close(0, "", now)
        if self.state is _OPEN or (self.state is _DRAINING and not self._asked):
            return self.request_disconnect(self.config.times.drain_timeout, "", now)
        return self.take_events()

    def request_disconnect(self, drain_time: float, reason: str, now: float) -> list[Event]:
        """Request the end: running operations may finish within `drain_time` seconds; 0 ends the connection at once.

        The drain also lasts until the peer has answered by a request of its own or by Disconnect: operations that cross the request are refused.
        While draining, the call answers the peer's request with our own time, and the shorter one holds. If our own request was answered, it
        grants more time.

        Raises:
            LocalProtocolError: not open.

        Source: MA-89, MA-90, MA-92.
        """
        if self.state not in (_OPEN, _DRAINING):
            raise LocalProtocolError(f"request_disconnect() in state {self.state.name}", rule="MA-89")
        self.now = now
        self.pool.disconnect_request(min(round(drain_time * 1000), 2**32 - 1), self.reason(reason))
        if self.state is _DRAINING and not self._asked:
            left = max(0.0, (self.at or now) - now)
            drain_time = min(drain_time, left)
        self._asked = True
        self._drain(drain_time, reason, by_peer=False, now=now)
        return self.take_events()

    def _drain(self, time: float, reason: str, *, by_peer: bool, now: float) -> None:
        self.go(ConnectionInput.DRAIN)
        self._drain_time = time
        self.at = now + time
        self.emit(Draining(time, reason, by_peer))

    def disconnect(self, now: float) -> list[Event]:
        """End the connection at once, which also denies a drain. A second call does nothing. Source: MA-28, MA-90 (c), MA-93."""
        self.now = now
        if (self.state, ConnectionInput.DISCONNECT) in CONNECTION:
            self.cancel_all(signal=False)
            self._say_disconnect(0)
        return self.take_events()

    def control_acknowledged(self, now: float) -> list[Event]:
        """Record that the peer has all signals, if QUIC can tell; it matters only at the end. Source: MA-92, MA-93."""
        if self.state in (ConnectionState.FLUSHING, ConnectionState.CLOSING) and not self.pool.waiting():
            self.step(now)
        return self.take_events()

    def close(self, code: int, reason: str, now: float) -> list[Event]:
        """Close with only QUIC's own close frame. `code` is 0 for an orderly end, else an `ErrorCode` (MA-7); the reason is sanitised here."""
        self.now = now
        self.end(close_code(code) if code else 0, reason, None, tell=True)
        return self.take_events()

    def connection_lost(self, code: int, reason: str, now: float) -> list[Event]:
        """Record that QUIC has ended, by the peer or the network."""
        self.now = now
        self.end(code, reason, None, tell=False)
        return self.take_events()

    def _say_disconnect(self, code: int) -> None:
        self.go(ConnectionInput.DISCONNECT)
        self.closing_code = code
        self.pool.disconnect(self.out)
        self.at = self.now + self.config.times.flush_timeout

    def step(self, now: float) -> None:
        """Continue towards the end: flush the signals, then Disconnect. Source: MA-92."""
        if self.state is ConnectionState.FLUSHING:
            self._say_disconnect(0)
        else:
            self.end(
                self.closing_code, "disconnected" if not self.closing_code else self.closing_reason, None, tell=True
            )

    def drained(self, now: float) -> None:
        """Continue when no operation is left, or the time is up. Source: MA-92."""
        self.cancel_all(signal=True)
        self.go(ConnectionInput.DRAINED)
        self.at = now + self.config.times.flush_timeout
        if not self.pool.streams and not self.pool.waiting():
            self.step(now)

    def on_disconnect(self, now: float) -> None:
        """Process a Disconnect. Source: MA-93."""
        self.end(0, "the peer disconnected", None, tell=True)

    def on_disconnect_request(self, drain_time: float, reason: str, now: float) -> None:
        """Process a Disconnect Request. Source: MA-89, MA-90, MA-92."""
        time = min(drain_time, self.config.times.max_drain_time)
        if self._asked and not self.heard:
            # MA-90 (b): an answer; the shorter time holds. Two simultaneous requests look the same to both sides.
            time = min(time, self._drain_time)
        self.heard = True
        self._drain(time, reason, by_peer=True, now=now)
