"""The sending half of a channel: numbers, window, the fate of each message, and the ways a channel ends.

A message is *settled* once: acked or nacked, by a frame of the receiver or because the half has ended. Until then the sender keeps its
record: the size, the caller's token, the message's own stream if it has one, and in `links` the channels whose halves it carries.

The gate (AQ-45, D-22): QUIC delivers no data of a stream after its reset. A reset that overtakes ChannelControl names no channel, and
the peer's half would wait forever. So the side that opened a control stream resets it only once the peer is known to have seen it, and
makes the peer answer if it otherwise would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from levada.framework.errors import LocalProtocolError

from .codes import ResetCode, violation
from .events import Ended, Settled, Writable
from .frames import LARGEST, MORE, ONESHOT, SHORT, Attach, encode_int, rest_of_number
from .links import ChannelHalf
from .state import SENDER, Mode, SenderInput, SenderState, StreamPosition
from .streams import DatagramData

if TYPE_CHECKING:
    from .core import AqueductCore
    from .receiver import ReceiverHalf
    from .streams import AqueductStream

__all__ = ["SenderHalf"]

_Record: TypeAlias = "tuple[int, object, AqueductStream | None]"

_NO_RECORDS: list[_Record] = []
"""Shared by all senders without a message under way; nothing is put into it."""
_UNATTACHED, _OPEN, _FINISHING = SenderState.UNATTACHED, SenderState.OPEN, SenderState.FINISHING
_ORDERED = Mode.ORDERED


class SenderHalf(ChannelHalf):
    """One local sender, made by the core and used by the owner of the channel."""

    __slots__ = (
        "_base_unreliable", "_blocked", "_bytes", "_code", "_declared", "_first", "_head", "_overtaken", "_records", "_rest",
        "_stream", "_unreliable", "acked_links", "core", "declaring", "links", "sent", "sent_unreliable",
    )  # fmt: skip

    state: SenderState

    def __init__(self, core: AqueductCore, channel: int, *, minted_here: bool, reachable: bool) -> None:
        super().__init__(channel, minted_here=minted_here, reachable=reachable)
        self.core = core
        self.state = _UNATTACHED
        self.sent = 0
        """Messages sent on streams; also the number of the next one."""
        self.sent_unreliable = 0
        """Messages sent as datagrams; also the number of the next one."""
        self.declaring = False
        """Whether the core will make it declare its datagrams."""
        self.links: dict[int, tuple[int, ...]] | None = None
        """Channels attached to unsettled messages, by number; ``~number`` for datagrams. Source: AQ-53."""
        self.acked_links: list[int] | None = None
        """Channels attached to messages that were acked while this sender was not reachable. Source: AQ-54."""
        self._head = b"\x03" + encode_int(channel)
        self._rest = b""
        self._stream: AqueductStream | None = None
        # Unsettled: in `_records` all from number `_first` on, in `_overtaken` those before it, while later ones are settled.
        self._records = _NO_RECORDS
        self._first = 0
        self._overtaken: dict[int, _Record] | None = None
        self._unreliable: dict[int, object] | None = None
        self._bytes = 0
        self._base_unreliable = 0
        self._declared = 0
        self._blocked = False
        self._code = ResetCode.CANCELLED

    @property
    def unsettled(self) -> int:
        """Messages whose fate is not known."""
        return len(self._records) + len(self._overtaken or ()) + len(self._unreliable or ())

    @property
    def waits_for_room(self) -> bool:
        """Whether `has_room` refused the owner, and no `Writable` has followed yet."""
        return self._blocked

    def has_room(self, mode: Mode = Mode.ORDERED) -> bool:
        """Whether the window has room for another message. If not, a `Writable` follows. Source: AQ-40 (D-20).

        The message that fills the window in bytes may have any size, so the caller need not know the size yet.
        """
        core, config = self.core, self.core.config
        count = len(self._records) + len(self._overtaken or ())
        crowd = core.unacked >= config.max_unacked and count > 0
        if (
            count < config.window
            and self._bytes < config.window_bytes
            and not crowd
            and (mode is not Mode.UNRELIABLE or len(self._unreliable or ()) < config.unreliable_window)
        ):
            return True
        self._blocked = True
        if crowd:
            core.crowded[self] = None
        return False

    def wake(self) -> None:
        """Emit `Writable`, since the owner waits for room, if there is some."""
        if self.state in (_OPEN, _UNATTACHED):
            self._blocked = False
            if self.has_room(Mode.UNRELIABLE):
                self.core.events.append(Writable(self))

    def send(
        self, payload: bytes, attachments: Sequence[Attach] = (), *, mode: Mode = Mode.ORDERED, token: object = None
    ) -> tuple[SenderHalf | ReceiverHalf, ...]:
        """Send one message.

        Args:
            payload: the bytes. They are not copied, so do not change them.
            attachments: the halves that the peer gets, by index. Their ids are minted in the same step (AQ-26).
            mode: how the message travels.
            token: returned in `Settled`, unless it is None.

        Returns:
            The opposite half of each attachment. It stays here and may be used at once.

        Raises:
            LocalProtocolError: the half was finished or cancelled, or has ended; there is no room (`has_room`); this is a second message
                on a oneshot; the payload is over `AqueductConfig.max_message`; there would be more channels than
                `AqueductConfig.max_channels`. No message was sent and no id minted.

        Source: AQ-22, AQ-23, AQ-26, AQ-40.
        """
        if mode is _ORDERED and not attachments and self.push(payload, token):
            return ()
        core = self.core
        if self.state is not _OPEN and self.state is not _UNATTACHED:
            raise LocalProtocolError(f"send on a channel that is {self.state.value}", rule="AQ-41")
        if not self.has_room(mode):
            raise LocalProtocolError("the window is full: wait for Writable", rule="AQ-40")
        size, limit = len(payload), core.config.max_message
        if size > limit:
            raise LocalProtocolError(f"payload of {size} bytes, at most {limit}", rule="AQ-3")
        halves = core.mint(attachments)
        self._send_frame(payload, tuple([half.id for half in halves]), mode, token)
        if self.id & ONESHOT:  # AQ-7: one message, then finished
            self.finish()
        return halves

    def push(self, payload: bytes, token: object = None) -> bool:
        """Send one ordered message without attachments: the fast path for most messages.

        Returns:
            False, with no effect, if there is no room, the channel is ending or a oneshot, or the payload too large; `send` says which.
        """
        core = self.core
        records, config, size = self._records, core.config, len(payload)
        if (
            (self.state is not _OPEN and self.state is not _UNATTACHED)
            or len(records) >= config.window
            or self._bytes >= config.window_bytes
            or size > config.max_message
            or (core.unacked >= config.max_unacked and records)
            or self.id & ONESHOT
            or self._overtaken
        ):
            return False
        if records is _NO_RECORDS:
            records = self._records = []
        number = self.sent
        self.sent = number + 1
        records.append((size, token, None))
        self._bytes += size
        core.unacked += size
        stream = self._stream or self._open_stream()
        if not stream.fin and not stream.given_up:
            if not stream.dirty:
                stream.mark()
            low = number & 0x7F
            if not low or not self._rest:
                self._rest = rest_of_number(number)
            # In pieces, which are joined when they leave: to join them here took 0.1 µs.
            stream.chunks += (
                self._head,
                SHORT[low] if number < 0x80 else MORE[low],
                self._rest,
                SHORT[size] if size < 0x80 else encode_int(size),
                payload,
            )
        return True

    def finish(self) -> None:
        """Send no more; the channel ends when the peer has everything. After the end, or a second time, this does nothing. Source: AQ-41.

        Raises:
            LocalProtocolError: the sender was cancelled.
        """
        if self.ended:
            return
        if (self.state, SenderInput.FINISH) not in SENDER:
            raise LocalProtocolError("finish() after cancel()", rule="AQ-41")
        before = self.state
        self.state = SENDER[self.state, SenderInput.FINISH]
        if before is _OPEN:
            self._finish()

    def cancel(self) -> None:
        """Give up the channel; undelivered messages may be dropped. After the end this does nothing. Source: AQ-45, AQ-47 (D-22, D-23)."""
        if not self.ended:
            self._cancel(ResetCode.CANCELLED)

    def tear_down(self) -> None:
        """End the half because the message that carried it is discarded unread. The remote side is told *lost*. Source: AQ-50."""
        if self.ended:
            return
        if self.control is None or self.control.gate_open:
            self.lose()
        else:
            self._cancel(ResetCode.LOST)

    def attached(self, control: AqueductStream) -> None:
        """Record that the control stream exists. Source: section 8."""
        self.control = control
        before = self.state
        self.state = SENDER[self.state, SenderInput.ATTACHED]
        if before is _UNATTACHED:
            if self.sent_unreliable:
                self.declare()
        elif before is SenderState.FINISH_WAIT:
            self._finish()
        else:
            control.reset(ResetCode.CANCELLED)

    def gate_opened(self) -> None:
        """Record that the peer has seen the control stream. Source: AQ-45 (D-22)."""
        if self.state is not SenderState.CANCEL_WAIT or self.control is None:
            return
        if self._code is ResetCode.LOST:
            self.lose()
            return
        self.state = SENDER[self.state, SenderInput.GATE_OPENED]
        self.control.reset(ResetCode.CANCELLED)

    def declare(self) -> None:
        """Tell the receiver how many datagrams were sent. Source: AQ-37."""
        count = self.sent_unreliable - self._declared
        if count and self.control is not None:
            self._declared = self.sent_unreliable
            self.control.write(b"\x04" + encode_int(count))

    def acked(self, runs: tuple[int, ...]) -> None:
        """Process AckReliable. Source: AQ-35, AQ-54."""
        at = next(iter(self._overtaken)) if self._overtaken else self._first  # the lowest that is not settled
        self._check(at, runs)
        tokens: list[object] = []
        for index, run in enumerate(runs):
            if not index & 1:
                if at + run > self.sent:
                    raise violation("E-25", f"reliable {at + run - 1}, sent {self.sent}")
                if not self._acked(at, run, tokens):
                    raise violation("E-24", f"reliable {at} to {at + run - 1}")
            at += run
        if tokens:
            self._report(tokens, delivered=True)

    def settled_unreliable(self, runs: tuple[int, ...]) -> None:
        """Process AckNackUnreliable. Source: AQ-36, AQ-54, AQ-55."""
        at = self._base_unreliable
        end = self._check(at, runs)
        if end > self.sent_unreliable:
            raise violation("E-25", f"unreliable {end - 1}, sent {self.sent_unreliable}")
        records = self._unreliable or {}
        for index, run in enumerate(runs):
            tokens = [records.pop(number) for number in range(at, at + run)]
            for number in range(at, at + run):
                self._resolve(~number, delivered=not index & 1)
            if tokens:
                self._report(tokens, delivered=not index & 1)
            at += run
        self._base_unreliable = at

    def receiver_closed(self, runs: tuple[int, ...]) -> None:
        """Process CloseReceiver: the half has ended. Source: AQ-38, AQ-44, AQ-44a (D-19, D-21)."""
        control = self.control
        assert control is not None
        at = next(iter(self._overtaken)) if self._overtaken else self._first  # the lowest that is not settled
        end = self._check(at, runs)
        if end > self.sent:
            raise violation("E-25", f"reliable {end - 1}, sent {self.sent}")
        tokens: list[object] = []
        for index, run in enumerate(runs):
            if not index & 1:
                for number in [n for n in self._overtaken or () if at <= n < at + run]:
                    self._acked(number, 1, tokens)
                start = max(at, self._first)
                self._acked(start, at + run - start, tokens)
            at += run
        if tokens:
            self._report(tokens, delivered=True)
        if not control.fin:
            self.declare()
            control.write(b"\x07" + encode_int(self.sent), fin=True)
        complete = not (self._records or self._overtaken)
        if self._stream is not None and complete:
            self._stream.finish()
        self.state = SENDER[self.state, SenderInput.CLOSED_COMPLETE if complete else SenderInput.CLOSED]
        self._gone(ResetCode.CANCELLED)
        self.core.links.leave_tombstone(self)

    def lose(self, *, told: bool = False) -> None:
        """Lose the half and all channels attached to its messages. With `told` the peer has said so, and is not told (D-25).

        Source: AQ-48, AQ-56.
        """
        control = self.control
        if control is not None:
            if self.minted_here and not told and (control.fin or control.given_up):
                self.core.streams.announce(b"\x09" + encode_int(self.id))
            control.reset(ResetCode.LOST)
        self.state = SENDER[self.state, SenderInput.LOST]
        self._reset_streams(ResetCode.LOST)
        self._gone(ResetCode.LOST)
        if self.acked_links:
            self.core.links.lose(self.acked_links)

    def take_acked_links(self) -> list[int]:
        """Take the channels attached to messages acked while this sender was not reachable."""
        links, self.acked_links = self.acked_links, None
        return links or []

    def connection_lost(self) -> None:
        """End with the connection: no output, and nothing cascades."""
        self.state = SENDER[self.state, SenderInput.CONNECTION_CLOSED]
        self.links = None
        self._gone(ResetCode.LOST)

    def _open_stream(self) -> AqueductStream:
        stream = self._stream = self.core.streams.open()
        stream.sender = self
        stream.kept = True
        return stream

    def _send_frame(self, payload: bytes, attached: tuple[int, ...], mode: Mode, token: object) -> None:
        """Number a message and write it."""
        core = self.core
        ids = b"".join(map(encode_int, attached))
        tail = encode_int(len(ids)) + ids + encode_int(len(payload)) + payload
        if mode is Mode.UNRELIABLE:
            datagram = core.streams.prefix + self._head + encode_int(self.sent_unreliable) + tail
            # AQ-22: each way has its own numbers, and a message that is too large would stop all messages behind it.
            if len(datagram) <= core.datagram_limit:
                key = ~self.sent_unreliable
                self._count_unreliable(token)
                core.streams.commands.append(DatagramData(datagram))
                if not self.declaring:
                    self.declaring = True
                    core.declare_soon(self)
                self._link(key, attached)
                return
        if mode is Mode.ORDERED:
            stream = self._stream or self._open_stream()
            own = None
        else:
            stream = own = core.streams.open()
            own.sender = self
            own.kept = True
        if self._records is _NO_RECORDS:
            self._records = []
        self._records.append((len(payload), token, own))
        self._bytes += len(payload)
        core.unacked += len(payload)
        self._link(self.sent, attached)
        stream.write(self._head + encode_int(self.sent) + tail, fin=own is not None)
        self.sent += 1
        self._rest = b""  # the next number may begin another 128

    def _count_unreliable(self, token: object) -> None:
        if self._unreliable is None:
            self._unreliable = {}
        self._unreliable[self.sent_unreliable] = token
        self.sent_unreliable += 1

    def _link(self, key: int, attached: tuple[int, ...]) -> None:
        if attached:
            if self.links is None:
                self.links = {}
            self.links[key] = attached

    def _finish(self) -> None:
        """Send FinishSender. Source: AQ-41."""
        assert self.control is not None
        if self.sent_unreliable:
            self.declare()
        self.control.write(b"\x07" + encode_int(self.sent), fin=True)
        if self._stream is not None:
            self._stream.finish()

    def _cancel(self, code: ResetCode) -> None:
        if (self.state, SenderInput.CANCEL_SHUT) not in SENDER:
            return  # already cancelled
        self._code = code
        control = self.control
        # AQ-47: after FinishSender the receiver waits for every message; a reset would leave it waiting.
        if self.state is not _FINISHING:
            self._reset_streams(code)
        if control is not None and control.gate_open:
            self.state = SENDER[self.state, SenderInput.CANCEL]
            control.reset(code)
            return
        if control is not None and self.state is _OPEN:
            self.declare()
            if not self._unreliable:  # a number without a datagram: the receiver must nack it, which makes it answer
                self._count_unreliable(None)
                self.declare()
        self.state = SENDER[self.state, SenderInput.CANCEL_SHUT]

    def _reset_streams(self, code: ResetCode) -> None:
        if self._stream is not None:
            self._stream.reset(code)
        for _, _, stream in self._under_way():
            if stream is not None:
                stream.reset(code)

    def _under_way(self) -> list[_Record]:
        """Return the records of the messages under way, in ascending order of their numbers."""
        return [*(self._overtaken or {}).values(), *self._records]

    @staticmethod
    def _check(start: int, runs: tuple[int, ...]) -> int:
        end = start + sum(runs)
        if end > LARGEST:
            raise violation("E-4", f"ranges from {start} to {end}")
        return end

    def _acked(self, start: int, count: int, tokens: list[object]) -> bool:
        """Settle messages as processed, which have been sent; False, with no effect, if one of them was settled before."""
        first, records, overtaken = self._first, self._records, self._overtaken or {}
        before = range(start, min(start + count, first))
        acked: list[_Record] = []
        if before:
            if not all(number in overtaken for number in before):
                return False
            acked = [overtaken.pop(number) for number in before]
        beyond = start + count - first
        if beyond > 0:
            left = max(0, start - first)
            if left:  # later ones are settled before them
                overtaken.update(zip(range(first, start), records[:left], strict=True))
            acked += records[left:beyond]
            self._first = start + count
            if beyond == len(records):
                self._records = _NO_RECORDS
            else:
                del records[:beyond]
        self._overtaken = overtaken or None
        total = 0
        for size, token, stream in acked:
            total += size
            tokens.append(token)
            if stream is not None:
                stream.release()
        self._bytes -= total
        self.core.unacked -= total
        if self.links:
            for number in range(start, start + count):
                self._resolve(number, delivered=True)
        return True

    def _resolve(self, key: int, *, delivered: bool) -> None:
        """Remove the link of a message and carry out the consequences. Source: AQ-54, AQ-55."""
        attached = self.links.pop(key, None) if self.links else None
        if attached is None:
            return
        if not delivered:
            self.core.links.lose(attached)
        elif self.reachable:
            self.core.links.reach(attached)
        else:
            self.acked_links = [*(self.acked_links or ()), *attached]

    def _report(self, tokens: list[object], *, delivered: bool | None) -> None:
        told = [token for token in tokens if token is not None]
        if told:
            self.core.events.append(Settled(self, told, delivered))
        if self._blocked:
            self.wake()

    def _gone(self, code: ResetCode) -> None:
        """Nack the unsettled messages, end the message streams, remove the half. The state has been set."""
        streams, tokens = [self._stream], [*(self._unreliable or {}).values()]
        if self._records or self._overtaken:
            unsettled = self._under_way()
            self._reset_streams(code)
            streams += [stream for _, _, stream in unsettled]
            tokens = [token for _, token, _ in unsettled] + tokens
        for stream in streams:
            if stream is not None:
                stream.sender = None
                stream.release()
        self._records = _NO_RECORDS
        self._overtaken = None
        self._unreliable = None
        self._stream = None
        self.core.unacked -= self._bytes
        self.core.crowded.pop(self, None)
        self._bytes = 0
        if self.links:
            for attached in self.links.values():
                self.core.links.lose(attached)
            self.links = None
        # A receiver that closes has acked all it processed. A receiver that is lost or unreachable may have processed more than it acked.
        if tokens:
            self._report(tokens, delivered=None if code is ResetCode.LOST else False)
        if self.control is not None:
            self.control.half = None
            if self.control.place is not StreamPosition.RECEIVER_DONE:
                self.control.place = StreamPosition.DISCARD
        self.core.forget(self)
        if self.known:
            self.core.events.append(Ended(self))
