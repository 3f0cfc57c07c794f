"""An operation that the peer began, from its header to its terminal."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from levada.framework.errors import LocalProtocolError
from levada.transports.core import ResetStream, StopStream, StreamData

from .body import BodyReader, misplaced, write_blocks, write_end
from .codes import ErrorCode, OperationFault, close_code
from .config import HandlerSpec
from .events import (
    BodyEnded,
    BodyReceived,
    Execute,
    Octets,
    OperationCancelled,
    Received,
    RoomWanted,
    SetPriority,
    Stepped,
)
from .frames import BLOCK, BLOCK_END, MESSAGE, REQUEST, RESPONSE, UNDEFINED, check_key, check_trace
from .native import OPAQUE, SUCCESS, TEST, TEST_WINDOW, success_header, test_payload
from .shared import Key, StoredDone, StoredResponse
from .side import Side
from .state import RECEIVER, UNARMED, ReceiverInput, ReceiverState

__all__ = ["Incoming"]

_NEW, _PENDING, _ARMED, _RUNNING, _RESPONDING, _ENDED = ReceiverState
_CHECKED, _APPROVED, _COMPLETE, _RESPONSE, _DONE, _REFUSED, _FAILED, _RESET = ReceiverInput


class Incoming(Received):
    """A Message or Request of the peer. Source: MA-114, section 21."""

    __slots__ = (
        "_announced", "_body", "_core", "_digest", "_head", "_pieces", "_stored", "_written", "checked", "dedup_key",
        "executing", "filed", "fin", "granted", "pending", "repeated", "reserved", "state", "told",
    )  # fmt: skip

    def __init__(self, core: Side, stream_id: int, now: float) -> None:
        self._core = core
        self.stream_id = stream_id
        self.is_request = not stream_id & 2
        self.msg_id = 0
        self.length = 0
        self.priority = 128
        self.response_msg_id = 0
        self.response_timeout = None
        self.idempotency_key = b""
        self.trace = b""
        self.spec = _NO_SPEC
        self.since = self.approved_at = self.exec_at = now
        self.state = _NEW
        self.deadline: float | None = None
        self.filed: int | None = None
        self.checked = False
        """Whether the header is whole."""
        self.pending = False
        """Whether the gate has not decided."""
        self.granted = False
        """Whether it counts in the quota."""
        self.told = False
        """Whether the application knows it and must be told of the end."""
        self.executing = False
        """Whether the handler was started, by the body or its first Block."""
        self.fin = False
        """Whether the initiator's direction is over."""
        self.reserved = 0
        """Bytes that it occupies in the quota."""
        self.dedup_key: Key | None = None
        """Its entry in the store of finished operations."""
        self.repeated: StoredDone | StoredResponse | None = None
        """The stored answer, sent again once the body has proved to be the same. Only the digest of the body is kept."""
        self._digest: blake2b
        self._head = b""
        self._body: BodyReader | None = None
        self._announced = 0
        self._written = 0
        self._stored: list[Octets] | None = None
        self._pieces: Iterator[Octets] | None = None

    def _go(self, what: ReceiverInput) -> None:
        self.state = RECEIVER[self.state, what]

    def receive(self, data: bytes, fin: bool, now: float) -> None:
        """Take bytes of the initiator's direction."""
        self.fin = fin
        try:
            at = 0
            if not self.checked:
                at = self._header(data, now)
                if at < 0:
                    if fin:
                        raise OperationFault(ErrorCode.INVALID_FORMAT, "stream ends inside the header", "MA-14")
                    return
            if at < len(data) or self._head:
                self._take(data, at, now)
            if fin and (self.length != 0 or self._head) and self.state is not _ENDED:
                self._finished()
        except OperationFault as fault:
            self.abort(fault.code, fault.reason, now)

    def _header(self, data: bytes, now: float) -> int:
        """Read the header; return where it ends, or -1."""
        core = self._core
        layout = REQUEST if self.is_request else MESSAGE
        at = layout.size
        skip = len(self._head)
        if skip:
            data = self._head + data
        if len(data) >= at:
            tail = core.idempotency
            if tail and len(data) > at:
                if data[at]:
                    check_key(data[at])
                at += 1 + data[at]
                if len(data) >= at:
                    self.idempotency_key = data[layout.size + 1 : at]
                    tail = False
            if core.traces and not tail:
                tail, at = self._trace(data, at)
            if not tail:
                if self.is_request:
                    _, self.msg_id, length, self.priority, self.response_msg_id, timeout = REQUEST.unpack_from(data)
                    if timeout:
                        self.response_timeout = timeout / 1000
                else:
                    _, self.msg_id, length, self.priority = MESSAGE.unpack_from(data)
                self.length = None if length == UNDEFINED else length
                self._head = b""
                self.checked = True
                core.gate.check(self, now)
                return at - skip
        self._head = data
        if not skip:
            core.timers.set(self, now + core.config.times.transfer_idle_timeout)
        return -1

    def _trace(self, data: bytes, at: int) -> tuple[bool, int]:
        """Read the trace field; return whether bytes of it are missing, and where it ends. Source: MA-138."""
        begin = at + 2
        if len(data) < begin:
            return True, at
        size = int.from_bytes(data[at:begin], "big")
        check_trace(size)
        self.trace = data[begin : begin + size]
        return len(data) < begin + size, begin + size

    def _take(self, data: bytes, at: int, now: float) -> None:
        if self.state is _ARMED:
            body = self._body
            assert body is not None
            held, before = len(body.pieces), body.blocks
            at = body.read(data, at)
            if self._core.steps:
                self._core.note_blocks(self.stream_id, before, body)
            if self.idempotency_key:
                for piece in body.pieces[held:]:
                    self._digest.update(piece)
                if self.repeated is not None:
                    body.pieces.clear()
            self._take_pieces(body, now)
            if body.ended and self.state is _ARMED:
                self._complete(body, now)
        if at == len(data) or self.state is _ENDED:
            return
        head = self._head
        op = head[0] if head else data[at]
        code = UNARMED[self.state, self.length == 0] if op in (5, 6) else None
        if code is None:
            raise misplaced(op)
        # MA-55: one Block End(0) after a header that announced nothing is dropped, however it is cut.
        if op == 6 and self.length == 0 and not self._announced:
            more = 9 - len(head)
            self._head = head = head + data[at : at + more]
            if BLOCK_END.pack(6, 0).startswith(head):
                if len(head) == 9:
                    self._announced = 1
                    self._head = b""
                    if at + more < len(data):
                        self._take(data, at + more, now)
                return
        raise OperationFault(code, "Block or Block End has no place here", "MA-95")

    def _watch_transfer(self, now: float) -> None:
        config = self._core.config
        at = now + config.times.transfer_idle_timeout
        if config.times.transfer_total_timeout is not None:
            at = min(at, self.approved_at + config.times.transfer_total_timeout)
        self._core.timers.set(self, at)

    def _take_pieces(self, body: BodyReader, now: float) -> None:
        core = self._core
        if not body.pieces and not body.blocks:
            return
        self._watch_transfer(now)
        if self.repeated is not None:
            return
        size = sum(map(len, body.pieces)) if self.spec.streaming or self.length is None else 0
        if self.spec.streaming:
            self._start(now)
            for piece in body.pieces:
                core.emit(BodyReceived(self.stream_id, piece))
            body.pieces.clear()
        elif self.length is None:
            size -= self.reserved
        if size:
            self.reserved += size
            core.quota.buffered += size
            if core.quota.buffered > core.quota.max_bytes:
                # MA-54c
                raise OperationFault(ErrorCode.CAPACITY_LIMIT, "no room for the body", "MA-54c")

    def _start(self, now: float) -> None:
        if not self.executing:
            self.executing = self.told = True
            self.exec_at = now
            self._core.emit(Execute(self, None))

    def _finished(self) -> None:
        # MA-61: FIN before Block End; without a body there is no Block End to wait for.
        if self.state is _PENDING or self.state is _ARMED:
            raise OperationFault(ErrorCode.ORDER_VIOLATION, "stream ended before Block End", "MA-61")
        if self._head:
            raise OperationFault(ErrorCode.PAYLOAD_LENGTH_MISMATCH, "stream ended inside Block End", "MA-55")

    def reset(self, now: float) -> None:
        """Record that the initiator gave up its direction. Source: MA-61."""
        self.fin = True
        self._core.statistic.streams_aborted += 1
        self.abort(ErrorCode.CANCELLED, "the initiator reset the stream", now, signal=self.executing)

    def stopped(self, now: float) -> None:
        """Record that the initiator does not want the Response. Source: section 21."""
        self.abort(ErrorCode.CANCELLED, "the initiator wants no Response", now, signal=self.executing)

    def approved(self, now: float) -> None:
        """Continue after all checks have passed."""
        core = self._core
        core.statistic.approved += 1
        self.approved_at = now
        if self.length == 0:
            self.state = RECEIVER[self.state, _APPROVED]
            if self.is_request:
                core.pool.proceed(self.stream_id)
            self._execute(b"", now)
        else:
            core.gate.arm(self)

    def arm(self, now: float) -> None:
        """Write Proceed: Blocks may come from now on."""
        core = self._core
        self._go(_APPROVED)
        self._body = BodyReader(UNDEFINED if self.length is None else self.length, self.spec.max_payload, core.config)
        core.pool.proceed(self.stream_id)
        self._watch_transfer(now)

    def refuse(self, code: int, retry_after: float, now: float) -> None:
        """Refuse the operation. Source: MA-51."""
        core = self._core
        self._go(_REFUSED)
        core.pool.refuse(self.stream_id, code, min(round(retry_after * 1000), 2**32 - 1))
        core.statistic.refused[code] += 1
        self._abandon(code, now)

    def _complete(self, body: BodyReader, now: float) -> None:
        self._go(_COMPLETE)
        self._body = None
        repeated = self.repeated
        if repeated is not None:
            if not self.repeats(repeated):
                raise OperationFault(ErrorCode.DUPLICATE_OPERATION, "the key was used with another body", "MA-123")
            self.answer_again(repeated, now)
            return
        if self.spec.streaming:
            self._start(now)
            self.exec_at = now
            self._core.emit(BodyEnded(self.stream_id, body.total))
            self._limit(now)
            return
        whole = body.whole()
        self._release()
        self._execute(whole, now)

    def _limit(self, now: float) -> None:
        limit = self.response_timeout
        cap = self.spec.max_timeout
        if cap is not None and self.is_request:
            limit = cap if limit is None else min(limit, cap)
        # MA-68: from the completion of the body; without a body, from the header.
        start = self.since if self.length == 0 else now
        if limit is not None:
            self._core.timers.set(self, start + limit)
        elif self.deadline is not None:
            self._core.timers.set(self, None)

    def _execute(self, body: bytes, now: float) -> None:
        self.exec_at = now
        self.executing = True
        self._limit(now)
        if self.msg_id == TEST:
            self._test(body, now)
            return
        self.told = True
        self._core.emit(Execute(self, body))

    def _test(self, body: bytes, now: float) -> None:
        """Answer the native Test. Source: section 13.2."""
        plan = test_payload(body)
        if not self.is_request:
            self.finish(now)
        elif plan is None:
            self._respond(OPAQUE, now)
        elif not plan.mode:
            self._respond(b"", now)
        else:
            quota = self._core.quota
            if quota.buffered + TEST_WINDOW > quota.max_bytes:
                raise OperationFault(ErrorCode.CAPACITY_LIMIT, "no room for the body", "MA-54c")
            self.reserved = TEST_WINDOW
            quota.buffered += TEST_WINDOW
            self._begin_response(plan.announced, now)
            self._stored = None  # MA-123: too large to keep
            self._written = plan.length
            self._pieces = plan.pieces()
            self.has_room(now)

    def has_room(self, now: float) -> None:
        """Write more of the answer to a Test; the initiator sets the pace."""
        if self.state is not _RESPONDING or self._pieces is None:
            return
        core = self._core
        size = 0
        for piece in self._pieces:
            core.out.append(StreamData(self.stream_id, piece, False))
            size += len(piece)
            if size >= TEST_WINDOW:
                core.timers.set(self, now + core.config.times.transfer_idle_timeout)
                core.emit(RoomWanted(self.stream_id))
                return
        write_end(core.out, self.stream_id, self._written)
        self._responded(now)

    def finish(self, now: float) -> None:
        """Send Done for a Message. Source: MA-74."""
        if self.is_request:
            raise LocalProtocolError("a Request is answered by respond() or fail(), never by Done", rule="MA-72")
        if self.state is not _RUNNING:
            raise LocalProtocolError(f"finish() in state {self.state.name}: the body is not complete", rule="MA-64")
        start, took = self._times(now)
        self._done(start, took, now)
        if self.dedup_key is not None:
            self._core.dedup.finish(self.dedup_key, StoredDone(start, took, self.length, self._digest.digest()), now)
            self.dedup_key = None

    def _done(self, start_ms: int, time_ms: int, now: float) -> None:
        self._go(_DONE)
        self._core.pool.done(self.stream_id, start_ms, time_ms)
        self._core.statistic.done += 1
        self._retire(now)

    def _times(self, now: float) -> tuple[int, int]:
        start = self.exec_at
        return int((self._core.wall_offset + start) * 1000), int((now - start) * 1000) if now > start else 0

    def respond(self, body: Octets, content_type: str | None, now: float) -> None:
        """Write a whole Response. Source: MA-65."""
        header = self._native_header(content_type, bool(body)) if body or content_type is not None else b""
        if self.state is not _RUNNING or not self.is_request:
            self._responding()
        if len(body) <= 16_384:
            self._respond(header + body, now)
            return
        self._begin_response(len(header) + len(body), now, header)
        write_blocks(self._core.out, self.stream_id, body, self._core.config.max_block_chunk_size)
        if self._stored is not None:
            self._stored.append(body)
        write_end(self._core.out, self.stream_id, self._announced)
        self._responded(now)

    def _native_header(self, content_type: str | None, body: bool) -> bytes:
        wire = self.response_msg_id
        if wire != SUCCESS and wire not in self.spec.success_layout:
            if content_type is not None:
                raise LocalProtocolError(f"response {wire} has no content type", rule="MA-99a")
            return b""
        if content_type is None:
            if body:
                raise LocalProtocolError("a Success with a body needs a content type", rule="MA-96")
            return b""
        try:
            return _HEADERS.get(content_type) or success_header(content_type)
        except ValueError as error:
            raise LocalProtocolError(str(error), rule="MA-97") from error

    def _responding(self) -> None:
        if not self.is_request:
            raise LocalProtocolError("a Message has no Response: finish() or fail()", rule="MA-74")
        if self.state is not _RUNNING:
            raise LocalProtocolError(f"a Response in state {self.state.name}", rule="MA-66")

    def _respond(self, payload: bytes, now: float, times: tuple[int, int] | None = None) -> None:
        """Write a whole Response, which the operation then forgets; `times`: of an execution before."""
        start_ms, time_ms = times or self._times(now)
        if self.dedup_key is not None:
            self._keep(payload, start_ms, time_ms, now)
        self.state = RECEIVER[self.state, _RESPONSE]
        size = len(payload)
        if self._core.steps:
            self._core.emit(Stepped(self.stream_id, "response", size))
        data = RESPONSE.pack(2, size, start_ms, time_ms)
        if size:
            data = b"".join((data, BLOCK.pack(5, size), payload, BLOCK_END.pack(6, size)))
        if self.priority != 128:
            self._prioritise()
        self._core.out.append(StreamData(self.stream_id, data, True))
        self._responded(now)

    def _prioritise(self) -> None:
        if self.priority != 128:
            self._core.out.append(SetPriority(self.stream_id, self.priority))

    def _begin_response(self, length: int, now: float, header: bytes = b"") -> None:
        core = self._core
        start, took = self._times(now)
        self._go(_RESPONSE)
        self._announced = length
        if core.steps:
            core.emit(Stepped(self.stream_id, "response", None if length == UNDEFINED else length))
        self._prioritise()
        core.out.append(StreamData(self.stream_id, RESPONSE.pack(2, length, start, took), False))
        core.timers.set(self, now + core.config.times.transfer_idle_timeout)
        if self.dedup_key is not None:
            self._stored = [header] if header else []
        if header:
            self._written = len(header)
            core.out.append(StreamData(self.stream_id, BLOCK.pack(5, len(header)) + header, False))

    def start_response(self, length: int | None, content_type: str | None, now: float) -> None:
        """Write the header of a Response whose body comes in pieces."""
        header = self._native_header(content_type, length != 0)
        self._responding()
        if not length and length is not None:
            self._respond(header, now)
            return
        self._begin_response(UNDEFINED if length is None else len(header) + length, now, header)

    def send_body(self, data: Octets, now: float) -> None:
        """Write a piece of the Response's body."""
        if self.state is not _RESPONDING:
            raise LocalProtocolError(f"send_body() in state {self.state.name}: start_response() first", rule="MA-65")
        if self._written + len(data) > self._announced:
            raise LocalProtocolError(f"more than the {self._announced} bytes announced", rule="MA-56")
        if not data:
            return
        self._written += len(data)
        write_blocks(self._core.out, self.stream_id, data, self._core.config.max_block_chunk_size)
        if self._stored is not None:
            # MA-123: a Response that is too large is not kept, and takes no memory before that.
            self._stored = [*self._stored, data] if self._written <= 65_536 else None
        self._core.timers.set(self, now + self._core.config.times.transfer_idle_timeout)

    def end_body(self, now: float) -> None:
        """End the Response's body."""
        if self.state is not _RESPONDING:
            raise LocalProtocolError(f"end_body() in state {self.state.name}", rule="MA-65")
        if self._announced not in (self._written, UNDEFINED):
            raise LocalProtocolError(f"{self._written} bytes of {self._announced}", rule="MA-56")
        write_end(self._core.out, self.stream_id, self._written)
        self._responded(now)

    def _responded(self, now: float) -> None:
        core = self._core
        if self.dedup_key is not None:
            stored = None if self._stored is None else b"".join(self._stored)
            self._keep(stored, *self._times(now), now)
        self.state = RECEIVER[self.state, _DONE]
        core.statistic.done += 1
        core.unacked[self.stream_id] = now + core.config.times.response_ack_timeout
        self._retire(now)

    def take_digest(self) -> None:
        """Begin the digest of the request; the body is added as it arrives. Source: MA-123."""
        # 16 bytes: keys belong to one identity, so a collision would only deceive the identity that made it.
        self._digest = blake2b(self.response_msg_id.to_bytes(2, "big"), digest_size=16)

    def repeats(self, stored: StoredDone | StoredResponse) -> bool:
        """Whether the whole request equals the request answered then."""
        return self._digest.digest() == stored.digest

    def _keep(self, payload: bytes | None, start_ms: int, time_ms: int, now: float) -> None:
        assert self.dedup_key is not None
        stored = StoredResponse(payload, start_ms, time_ms, self.length, self._digest.digest())
        self._core.dedup.finish(self.dedup_key, stored, now)
        self.dedup_key = None

    def answer_again(self, stored: StoredDone | StoredResponse, now: float) -> None:
        """Send the stored terminal again, without execution. Source: MA-123."""
        if isinstance(stored, StoredDone):
            self._done(stored.exec_start_ms, stored.exec_time_ms, now)
            return
        assert stored.payload is not None
        self._respond(stored.payload, now, (stored.exec_start_ms, stored.exec_time_ms))

    def fail(self, code: int, reason: str, now: float) -> None:
        """Report that the handler failed. Source: MA-66, MA-74, MA-79."""
        if not self.told:
            raise LocalProtocolError(f"operation {self.stream_id} was not handed out", rule="MA-76")
        self.told = False
        self.abort(code, reason, now)

    def abort(self, code: int, reason: str, now: float, *, signal: bool = True) -> None:
        """End without success; the application is told if it knows the operation."""
        core = self._core
        self._go(_FAILED if signal else _RESET)
        if signal:
            core.pool.fail(self.stream_id, code, core.reason(reason))
            core.statistic.failed[code] += 1
        else:
            core.pool.withdraw(self.stream_id)
        self._abandon(code, now, reason)

    def _abandon(self, code: int, now: float, reason: str = "refused") -> None:
        core = self._core
        self._stop(close_code(code))
        if self.is_request:
            core.out.append(ResetStream(self.stream_id, close_code(code)))
        if self.told:
            core.emit(OperationCancelled(self.stream_id, code, reason))
        if self.dedup_key is not None:
            core.dedup.abandon(self.dedup_key)
        self._retire(now)

    def _stop(self, code: int) -> None:
        if not self.fin:
            self._core.out.append(StopStream(self.stream_id, code))
            self._core.mark_stopped(self.stream_id)

    def forget(self) -> None:
        """End with the connection: tell the application, and release the shared state. Source: MA-61, MA-93."""
        self.state = _ENDED
        if self.told:
            self._core.emit(OperationCancelled(self.stream_id, ErrorCode.CANCELLED, "the connection is over"))
        if self.dedup_key is not None:
            self._core.dedup.abandon(self.dedup_key)
        self._release()
        if self.granted:
            self._core.quota.operations -= 1
            self._core.quota.freed()

    def _release(self) -> None:
        if not self.reserved:
            return
        quota = self._core.quota
        quota.buffered -= self.reserved
        self.reserved = 0
        if quota.waiting:
            quota.freed()

    def consumed(self, size: int) -> None:
        """Record that the application has consumed bytes of a streamed body."""
        size = min(size, self.reserved)
        quota = self._core.quota
        self.reserved -= size
        quota.buffered -= size
        if quota.waiting:
            quota.freed()

    def _retire(self, now: float) -> None:
        self._body = None
        if self.reserved:
            self._release()
        self._core.retire(self)
        self._core.gate.release(self, now)

    def expire(self, now: float) -> None:
        """Handle a deadline. Source: section 17."""
        config = self._core.config
        if self.checked and self.state in (_NEW, _PENDING):
            limit = self.response_timeout
            # MA-68: with an empty body the wait at the gate counts.
            if not (self.length == 0 and limit is not None and now >= self.since + limit):
                self.refuse(ErrorCode.CAPACITY_LIMIT, config.gate.capacity_retry, now)
                return
        self.abort(ErrorCode.TIMEOUT, "time is up", now)


_NO_SPEC = HandlerSpec()
_HEADERS = {kind: success_header(kind) for kind in ("application/octet-stream", "application/json", "text/plain")}
"""Headers that are needed often."""
