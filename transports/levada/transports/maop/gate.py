"""The gate decides whether and when an operation of the peer may begin.

The checks of MA-44 run in order when the header is complete; the first failure decides. Quotas and the rate may make an operation wait.
Waiting operations take turns by class and age (`FairQueue`). An approved operation is armed at the end of the turn, when all input at
hand has been read: a Block that came earlier was sent without Proceed (MA-50).
"""

from __future__ import annotations

from .codes import ErrorCode
from .events import Audited, OperationOffered
from .fairness import FairQueue
from .rates import TokenBucket
from .receiver import Incoming
from .shared import StoredResponse
from .side import Side
from .state import RECEIVER, ConnectionState, ReceiverInput, ReceiverState

__all__ = ["OperationGate"]

_OPEN, _CHECKED, _PENDING = ConnectionState.OPEN, ReceiverInput.CHECKED, ReceiverState.PENDING


class OperationGate:
    """Decides on the operations of one connection."""

    __slots__ = ("_armed", "_coalesce", "_core", "_next", "_queue", "_rate", "_told", "due", "pending", "timed")

    def __init__(self, core: Side, now: float) -> None:
        self._core = core
        self._queue: FairQueue[Incoming] = FairQueue()
        self._next: Incoming | None = None
        self._armed: list[Incoming] = []
        rate = core.config.gate.max_op_rate
        self._coalesce = core.config.control.proceed_coalesce
        self._told = False
        """Whether another connection has freed room since the last turn."""
        self.due = False
        """Whether `flush` has work to do."""
        self.timed = rate is not None or self._coalesce > 0
        """Whether there can ever be a `deadline`."""
        self._rate = None if rate is None else TokenBucket(rate, max(1.0, rate), now)
        self.pending = 0
        """Undecided operations."""

    def check(self, op: Incoming, now: float) -> None:
        """Check a header. Source: MA-43 to MA-45, MA-54a to MA-54c, MA-63, MA-89, MA-109."""
        core = self._core
        spec = core.specs.get(op.msg_id)
        if op.length != 0:
            op.state = RECEIVER[op.state, _CHECKED]
        if core.state is not _OPEN and not (spec is not None and spec.allow_while_draining):
            op.refuse(ErrorCode.CAPACITY_LIMIT, 0, now)
            return
        if spec is None or not (spec.requests if op.is_request else spec.messages):
            if op.msg_id == 0:
                core.emit(Audited(op.stream_id, ErrorCode.INVALID_FORMAT, "operation with msg_id 0"))
                op.refuse(ErrorCode.INVALID_FORMAT, 0, now)
            else:
                op.refuse(ErrorCode.INCOMPATIBLE_MESSAGE, 0, now)
            return
        op.spec = spec
        if spec.priority is not None:
            op.priority = spec.priority
        if spec.role is not None and spec.role not in core.roles:
            op.refuse(ErrorCode.UNAUTHORIZED, 0, now)
            return
        length = op.length
        if length is None:
            allowed = spec.allow_undefined_length
            if allowed is None:
                allowed = not core.config.gate.refuse_undefined_length_by_default
            if not allowed:
                op.refuse(ErrorCode.POLICY_UNDEFINED_LENGTH, 0, now)
                return
        elif length > spec.max_payload or (length > core.quota.max_bytes and not spec.streaming):
            op.refuse(ErrorCode.CONTENT_TOO_LARGE, 0, now)
            return
        if op.is_request and op.response_msg_id not in spec.responses:
            op.abort(ErrorCode.ID_MISMATCH, f"no response {op.response_msg_id} here", now)
            return
        if spec.replay_window and not core.replay.admit(core.identity, op.msg_id, spec.replay_window, now):
            op.refuse(ErrorCode.DUPLICATE_OPERATION, 0, now)
            return
        if op.idempotency_key and not self._first(op, now):
            return
        # Apart from waiting for others, this is `_room` for an operation that holds nothing: most have no body.
        quota = core.quota
        if (
            length == 0
            and not self.pending
            and self._rate is None
            and not spec.gated
            and quota.operations < quota.max_operations
            and core.pool.backlog <= core.config.control.control_ring
        ):
            op.granted = True
            quota.operations += 1
            op.approved(now)
        else:
            self._admit(op, now)

    def _first(self, op: Incoming, now: float) -> bool:
        """Whether an operation with a key continues: to be executed, or until its body shows that it is a repetition."""
        core = self._core
        key = (core.identity, op.msg_id, op.idempotency_key)
        op.take_digest()
        found = core.dedup.begin(key, now)
        if found is True:
            op.dedup_key = key
            return True
        if found is False:
            op.refuse(ErrorCode.DUPLICATE_OPERATION, core.config.gate.capacity_retry, now)
        elif isinstance(found, StoredResponse) != op.is_request or getattr(found, "payload", b"") is None:
            op.refuse(ErrorCode.DUPLICATE_OPERATION, 0, now)
        elif op.length == 0 and op.repeats(found):
            op.answer_again(found, now)
        elif op.length == 0 or (op.length != found.length and None not in (op.length, found.length)):
            op.refuse(ErrorCode.DUPLICATE_OPERATION, 0, now)
        else:
            op.repeated = found
            return True
        return False

    def _admit(self, op: Incoming, now: float) -> None:
        if not self._queue.waiting and self._next is None and self._room(op, now):
            self._grant(op, now)
            return
        core = self._core
        if self.pending >= core.config.gate.max_pending_approvals:
            op.refuse(ErrorCode.CAPACITY_LIMIT, core.config.gate.capacity_retry, now)
            return
        self._wait(op, now)
        self._queue.push(op, op.priority, op.length or 0, now)

    def _wait(self, op: Incoming, now: float) -> None:
        op.pending = True
        self.pending += 1
        at = op.since + self._core.config.times.approval_timeout
        if op.length == 0 and op.response_timeout is not None:
            at = min(at, op.since + op.response_timeout)
        self._core.timers.set(op, at)

    def _decided(self, op: Incoming) -> None:
        if op.pending:
            op.pending = False
            self.pending -= 1

    def _reservation(self, op: Incoming) -> int:
        # MA-54c: a streaming handler counts the bytes held, and none are held yet. A repetition never holds any.
        return 0 if op.spec.streaming or op.length is None or op.repeated is not None else op.length

    def _room(self, op: Incoming, now: float) -> bool:
        core = self._core
        # MA-85: while signals pile up, no operation is approved.
        if core.pool.backlog > core.config.control.control_ring:
            return False
        quota = core.quota
        if quota.operations >= quota.max_operations or quota.buffered + self._reservation(op) > quota.max_bytes:
            quota.waiting[self.room_came] = None
            return False
        return self._rate is None or self._rate.take(now)

    def _grant(self, op: Incoming, now: float) -> None:
        core = self._core
        op.granted = True
        core.quota.operations += 1
        op.reserved = size = self._reservation(op)
        core.quota.buffered += size
        if not op.spec.gated or op.repeated is not None:
            self._decided(op)
            op.approved(now)
            return
        if not op.pending:
            if self.pending >= core.config.gate.max_pending_approvals:
                op.refuse(ErrorCode.CAPACITY_LIMIT, core.config.gate.capacity_retry, now)
                return
            self._wait(op, now)
        op.told = True
        core.emit(OperationOffered(op))

    def approve(self, op: Incoming, now: float) -> None:
        """Approve an offered operation for the application."""
        self._decided(op)
        op.approved(now)

    def arm(self, op: Incoming) -> None:
        """Write Proceed for an approved operation at the end of the turn."""
        self._armed.append(op)
        self.due = True

    def flush(self, now: float) -> None:
        """Arm the approved operations. Source: MA-50."""
        self.due = False
        if self._told:
            self._told = False
            self.pump(now)
            quota = self._core.quota
            if self.room_came not in quota.waiting and quota.fits(0):
                quota.freed()  # the rest is for others
        if not self._armed:
            return
        if self._coalesce:
            # The window belongs to the operation that has waited longest, and ends with it.
            self._armed = [op for op in self._armed if op.state is _PENDING]
            if not self._armed or now < self._armed[0].approved_at + self._coalesce:
                self.due = bool(self._armed)
                return
        armed, self._armed = self._armed, []
        for op in armed:
            if op.state is _PENDING:
                op.arm(now)

    def release(self, op: Incoming, now: float) -> None:
        """Release the room of an ended operation for the waiting ones."""
        if op.pending:
            self._decided(op)
            if self._next is op:
                self._next = None
            elif not op.granted:
                self._queue.remove(op)
        if op.granted:
            op.granted = False
            quota = self._core.quota
            quota.operations -= 1
            if quota.waiting:
                quota.freed()
                if self.room_came in quota.waiting:
                    return  # another connection has its turn first
        if self.pending:
            self.pump(now)

    def pump(self, now: float) -> None:
        """Admit the waiting operations in their order, as long as there is room."""
        while True:
            op = self._next or self._queue.pop(now)
            self._next = None
            if op is None:
                return
            if not self._room(op, now):
                self._next = op
                return
            self._grant(op, now)

    def room_came(self) -> bool:
        """Record that another operation, perhaps of another connection, has freed room; return whether this gate still has a use for it."""
        if not self.pending:
            return False
        self._told = self.due = True
        self._core.wake()
        return True

    def quit(self) -> None:
        """Pass this connection's place in the quota's queue to the next one: the connection has ended."""
        quota = self._core.quota
        quota.waiting.pop(self.room_came, None)
        if self._told:
            self._told = False
            quota.freed()

    def let_go(self) -> None:
        """Drop the references to the ended connection."""
        self._queue = FairQueue()
        self._next = None
        self._armed.clear()
        del self._core

    def deadline(self) -> float | None:
        """When room may come without an operation of this connection ending, or Proceeds are due."""
        at = self._armed[0].approved_at + self._coalesce if self._armed and self._coalesce else None
        if self._rate is not None and self.pending and (self._queue.waiting or self._next is not None):
            due = self._core.now + max(self._rate.wait(), 0.001)
            at = due if at is None else min(at, due)
        return at
