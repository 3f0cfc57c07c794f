"""An operation that this side began, from its header to its end."""

from __future__ import annotations

from levada.framework.errors import LocalProtocolError
from levada.transports.core import ResetStream, StopStream

from .body import BodyReader, write_blocks, write_end
from .codes import ErrorCode, OperationFault, close_code
from .config import ResponseTerms
from .events import BodyReceived, BodyWanted, Completed, Failed, Octets, Refused, ResponseStarted, Stepped
from .frames import RESPONSE, UNDEFINED
from .native import SuccessReader
from .side import Side
from .state import INITIATOR, InitiatorInput, InitiatorState

__all__ = ["Outgoing"]

_HEADER_SENT, _SENDING, _WAITING, _RECEIVING, _CONSUMING, _ENDED = InitiatorState
_PROCEED, _BODY_SENT, _RESPONSE, _RESPONSE_COMPLETE, _DONE, _REFUSED, _FAILED = InitiatorInput


class Outgoing:
    """A Message or Request of ours. Source: section 21 (initiator)."""

    __slots__ = (
        "_announced", "_core", "_head", "_reader", "_response", "_sent", "_success", "body", "cut_off",
        "deadline", "filed", "fin", "is_request", "length", "own_over", "proceeded", "since", "state",
        "stream_id", "terms", "timeout", "used_at",
    )  # fmt: skip

    def __init__(
        self,
        core: Side,
        stream_id: int,
        length: int,
        body: Octets | None,
        terms: ResponseTerms,
        timeout: float | None,
        now: float,
    ) -> None:
        self._core = core
        self.stream_id = stream_id
        self.is_request = not stream_id & 2
        """Whether a Response is wanted; else a Message."""
        self.length = length
        """Bytes announced, or `UNDEFINED`."""
        self.body = body
        """The whole body, if it is sent once the peer says Proceed."""
        self.state = _HEADER_SENT if length else _WAITING
        self.since = now
        self.timeout = timeout
        """Seconds for the Response header, or for the Done of a Message; None without limit."""
        self.terms = terms
        self.proceeded = False
        """Whether a Proceed has come."""
        self.own_over = not length
        """Whether our direction has ended."""
        self.fin = stream_id & 2 != 0
        """Whether the peer's direction has ended; a Message has none."""
        self.cut_off = False
        """Whether the peer has reset or stopped the stream, and its reason may follow."""
        self.used_at = now
        """When the Response was completed."""
        self.deadline: float | None = None
        self.filed: int | None = None
        self._sent = 0
        self._head = b""
        self._reader: BodyReader | None = None
        self._response = (0, 0)
        self._announced: int | None = None
        self._success: SuccessReader | None = None

    def _go(self, what: InitiatorInput) -> None:
        self.state = INITIATOR[self.state, what]

    def _wait(self, now: float) -> None:
        """Set the deadline for the answer, as the body has been sent. Source: MA-69."""
        if self.timeout is not None or self.deadline is not None:
            self._core.timers.set(self, None if self.timeout is None else now + self.timeout)

    def send_body(self, data: Octets, now: float) -> None:
        """Write a piece of the body."""
        if self.state is not _SENDING or self.cut_off:
            raise LocalProtocolError(f"send_body() in state {self.state.name}: wait for BodyWanted", rule="MA-46")
        if self._sent + len(data) > self.length:
            raise LocalProtocolError(f"more than the {self.length} bytes announced", rule="MA-56")
        if data:
            core = self._core
            self._sent += len(data)
            write_blocks(core.out, self.stream_id, data, core.config.max_block_chunk_size)
            core.timers.set(self, now + core.config.times.transfer_idle_timeout)

    def end_body(self, now: float) -> None:
        """End the body."""
        if self.state is not _SENDING or self.cut_off:
            raise LocalProtocolError(f"end_body() in state {self.state.name}", rule="MA-46")
        if self.length not in (self._sent, UNDEFINED):
            raise LocalProtocolError(f"{self._sent} bytes of {self.length}", rule="MA-56")
        write_end(self._core.out, self.stream_id, self._sent)
        self.own_over = True
        self._go(_BODY_SENT)
        self._wait(now)

    def on_proceed(self, now: float) -> None:
        """Process a Proceed. Source: MA-47, MA-48."""
        if self.proceeded:
            self.fail(ErrorCode.DUPLICATE_OPERATION, "second Proceed", now)
            return
        self.proceeded = True
        if self._core.steps:
            self._core.emit(Stepped(self.stream_id, "proceed", None))
        if self.state is not _HEADER_SENT or self.cut_off:
            return
        self._go(_PROCEED)
        if self.body is None:
            self._core.timers.set(self, now + self._core.config.times.transfer_idle_timeout)
            self._core.emit(BodyWanted(self.stream_id))
            return
        body, self.body = self.body, None
        self.send_body(body, now)
        self.end_body(now)

    def on_refuse(self, retry_ms: int, code: int, now: float) -> None:
        """Process a Refuse. Source: MA-48, MA-51."""
        if self.proceeded or (self.state, _REFUSED) not in INITIATOR:
            self.fail(ErrorCode.DUPLICATE_OPERATION, "Refuse after Proceed", now)
            return
        self._go(_REFUSED)
        self._leave(close_code(ErrorCode.CANCELLED), stop=False)
        self._core.emit(Refused(self.stream_id, code, retry_ms / 1000 if retry_ms else None))
        self._retire()

    def on_done(self, start_ms: int, time_ms: int, now: float) -> None:
        """Process a Done. Source: MA-72, MA-74."""
        if self.is_request or (self.state, _DONE) not in INITIATOR:
            what = "a Request was answered by Done" if self.is_request else "Done before the body was complete"
            self.fail(ErrorCode.PROTOCOL_VIOLATION, what, now)
            return
        self._go(_DONE)
        self._leave(0, stop=False)
        self._core.emit(Completed(self.stream_id, None, None, start_ms, time_ms))
        self._retire()

    def on_fail(self, code: int, reason: str, now: float) -> None:
        """Process a Fail. Source: MA-66, MA-67."""
        self.fail(code, reason, now, by_peer=True)

    def receive(self, data: bytes, fin: bool, now: float) -> None:
        """Take bytes of a Response."""
        self.fin = fin
        try:
            at = 0
            if self.state < _RECEIVING:
                at = self._header(data, now)
                if at < 0:
                    if fin:
                        self._ended_early(now)
                    return
            # MA-55, MA-66: data after the terminal is dropped.
            if self.state is _RECEIVING:
                self._take(data, at, now)
            if fin and self.state is _RECEIVING:
                raise OperationFault(ErrorCode.ORDER_VIOLATION, "the Response ended before its Block End", "MA-71")
        except OperationFault as fault:
            if fault.rule == "MA-111" and fault.code == ErrorCode.INVALID_FORMAT:
                self._core.statistic.invalid_content_types += 1
            self.fail(fault.code, fault.reason, now, signal=True)

    def _ended_early(self, now: float) -> None:
        if self._head:
            raise OperationFault(ErrorCode.ORDER_VIOLATION, "the stream ended inside the Response header", "MA-71")
        # MA-66: a responder may end a direction in which it wrote nothing; its Fail gives the reason.
        self._explain(now)

    def _explain(self, now: float) -> None:
        """Wait for the signal that explains why the stream was cut off. Source: MA-67."""
        self.cut_off = True
        self._core.timers.set(self, now + self._core.config.times.response_grace)

    def _header(self, data: bytes, now: float) -> int:
        core, terms = self._core, self.terms
        skip = len(self._head)
        if skip:
            data = self._head + data
        if not data:
            return -1
        if data[0] != 2:
            raise OperationFault(
                ErrorCode.ILLEGAL_STREAM, f"operation 0x{data[0]:02x} in place of a Response", "MA-14a"
            )
        if len(data) < 21:
            self._head = data
            return -1
        _, length, start, took = RESPONSE.unpack_from(data)
        self._head = b""
        state = INITIATOR.get((self.state, _RESPONSE))
        if state is None:
            raise OperationFault(ErrorCode.PROTOCOL_VIOLATION, "Response before the end of the request", "MA-64")
        if core.config.strict_timestamps and (
            start > (core.wall_offset + now + 5) * 1000 or took > (now - self.since + 5) * 1000
        ):
            raise OperationFault(ErrorCode.INVALID_HEADER, "the times of the Response cannot be", "MA-73")
        self.state = state
        self._response = (start, took)
        if length == UNDEFINED:
            if not terms.allow_undefined:
                raise OperationFault(ErrorCode.POLICY_UNDEFINED_LENGTH, "Response of undefined length", "MA-71")
        elif terms.max_size is not None and length > terms.max_size:
            raise OperationFault(
                ErrorCode.CONTENT_TOO_LARGE, f"Response of {length} bytes, at most {terms.max_size}", "MA-71"
            )
        self._announced = None if length == UNDEFINED else length
        if core.steps:
            core.emit(Stepped(self.stream_id, "response", self._announced))
        if not length:
            # MA-98: no body, and no content type either.
            if terms.streamed:
                core.emit(ResponseStarted(self.stream_id, 0, None, start, took))
            self._complete(None if terms.streamed else b"", 0, now)
        else:
            self._reader = BodyReader(length, UNDEFINED if terms.max_size is None else terms.max_size, core.config)
            if terms.success:
                self._success = SuccessReader()
            elif terms.streamed:
                core.emit(ResponseStarted(self.stream_id, self._announced, None, start, took))
            core.timers.set(self, now + core.config.times.response_transfer_timeout)
        return 21 - skip

    def _take(self, data: bytes, at: int, now: float) -> None:
        reader = self._reader
        assert reader is not None
        before = reader.blocks
        reader.read(data, at)
        if self._core.steps:
            self._core.note_blocks(self.stream_id, before, reader)
        if self.terms.success and self._success is not None and self._success.content_type is None and reader.pieces:
            self._success_header(reader)
        if self.terms.streamed and (self._success is None or self._success.content_type is not None):
            for piece in reader.pieces:
                self._core.emit(BodyReceived(self.stream_id, piece))
            reader.pieces.clear()
        self._core.timers.set(self, now + self._core.config.times.response_transfer_timeout)
        if reader.ended:
            if self._success is not None:
                if reader.total:
                    self._success.end()
                else:
                    raise OperationFault(ErrorCode.INVALID_HEADER, "Success header is missing", "MA-111")
            self._complete(None if self.terms.streamed else reader.whole(), reader.blocks, now)

    def _success_header(self, reader: BodyReader) -> None:
        success = self._success
        assert success is not None
        pieces, reader.pieces = reader.pieces, []
        for place, piece in enumerate(pieces):
            rest = success.read(piece)
            if rest is not None:
                reader.pieces = [rest, *pieces[place + 1 :]] if rest else pieces[place + 1 :]
                if self.terms.streamed:
                    self._core.emit(
                        ResponseStarted(self.stream_id, self._announced, success.content_type, *self._response)
                    )
                return

    def _complete(self, body: bytes | None, blocks: int, now: float) -> None:
        core = self._core
        self.state = INITIATOR[self.state, _RESPONSE_COMPLETE]
        self.used_at = now
        kind = self._success.content_type if self._success is not None else None
        start, took = self._response
        core.emit(Completed(self.stream_id, body, kind, start, took, self._announced, blocks))
        if self.terms.acknowledge:
            self.consumed(now)
        else:
            self._reader = None
            core.timers.set(self, None)

    def consumed(self, now: float) -> None:
        """Record that the application has used the Response. Source: MA-71."""
        if self.state is not _CONSUMING:
            raise LocalProtocolError(f"the Response of {self.stream_id} is not complete", rule="MA-71")
        core = self._core
        start = int((core.wall_offset + self.used_at) * 1000)
        core.pool.done(self.stream_id, start, int((now - self.used_at) * 1000) if now > self.used_at else 0)
        self.state = INITIATOR[self.state, _DONE]
        self._retire()

    def reject(self, code: int, reason: str, now: float) -> None:
        """Record that the application cannot use the Response. Source: MA-71."""
        if self.state not in (_RECEIVING, _CONSUMING):
            raise LocalProtocolError(f"there is no Response of {self.stream_id} to reject", rule="MA-71")
        self._core.pool.fail(self.stream_id, code, self._core.reason(reason))
        self._end(code)

    def reset(self, now: float) -> None:
        """Record that the responder gave up its direction. Source: MA-67."""
        self.fin = True
        self._core.statistic.streams_aborted += 1
        self._explain(now)

    def stopped(self, now: float) -> None:
        """Record that the receiver wants no more of the body; its Fail or Refuse gives the reason. Source: section 21."""
        if self.own_over:
            return
        self.own_over = True
        self.body = None
        self._core.out.append(ResetStream(self.stream_id, close_code(ErrorCode.CANCELLED)))
        self._explain(now)

    def fail(self, code: int, reason: str, now: float, *, by_peer: bool = False, signal: bool = False) -> None:
        """End without success."""
        core = self._core
        if self.state is _CONSUMING:
            # MA-67: after a complete Response the operation cannot fail at the peer.
            core.signals.late += 1
            return
        if signal:
            core.pool.fail(self.stream_id, code, core.reason(reason))
        core.statistic.failed[code] += 1
        not_executed = self.state is _HEADER_SENT and not by_peer and not self.proceeded
        core.emit(Failed(self.stream_id, code, reason, by_peer, not_executed))
        self._end(ErrorCode.CANCELLED if code == ErrorCode.TIMEOUT else code)

    def cancel(self) -> None:
        """Cancel for the caller; no event follows, except for a log. Source: MA-61."""
        if self._core.steps:
            self._core.emit(Stepped(self.stream_id, "cancelled", None))
        self._end(ErrorCode.CANCELLED)

    def _end(self, code: int) -> None:
        self._go(_FAILED)
        self._leave(close_code(code), stop=True)
        self._retire()

    def _leave(self, code: int, *, stop: bool) -> None:
        """End both directions."""
        core = self._core
        if not self.own_over or (stop and not self.is_request):
            self.own_over = True
            core.out.append(ResetStream(self.stream_id, code))
        if stop and not self.fin:
            core.out.append(StopStream(self.stream_id, code))
            core.mark_stopped(self.stream_id)

    def forget(self) -> None:
        """End with the connection."""
        if self.state is not _CONSUMING:
            # Section 21: the only certainty is that nothing runs without Proceed.
            not_executed = self.state is _HEADER_SENT and not self.proceeded
            self._core.emit(Failed(self.stream_id, ErrorCode.CANCELLED, "the connection is over", False, not_executed))
        self.state = _ENDED

    def _retire(self) -> None:
        self.body = self._reader = None
        self._core.retire(self)

    def expire(self, now: float) -> None:
        """Handle a deadline. Source: MA-53, MA-67, MA-69, MA-126."""
        if self.cut_off:
            self.fail(ErrorCode.CANCELLED, "the peer gave the stream up", now)
        else:
            self.fail(ErrorCode.TIMEOUT, f"time is up in state {self.state.name}", now)
