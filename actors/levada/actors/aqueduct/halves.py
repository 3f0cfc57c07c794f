"""Connects the channels of a program to the halves of a connection: messages in both directions, handles in them, and the ends.

* A channel has one half here and one at the peer. An `Outbound` (the peer receives) or an `Inbound` (the peer sends) stands in for the
  peer's half: an actor (`levada.actors.aqueduct.links`), driven by calls from the channel and by events from the connection.
* ``send`` encodes its message, and at the same moment moves the handles in it: all of them, or none. ``receive`` decodes the message
  that it takes, so only that receiver gets the `DecodeError` of a bad message.
* A channel that travels keeps its queue. Messages in the queue are encoded when they leave; a message that cannot be encoded is logged and
  not delivered.
* Nothing here recurses: channels that travel in messages of channels that travel begin one after the other.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from levada.framework import (
    Actor,
    OneshotReceiver,
    OneshotSender,
    Reason,
    Receiver,
    Ref,
    RemotePeer,
    Sender,
    Shutdown,
    message,
)
from levada.framework.channel import WINDOW
from levada.framework.codec import AttachmentKind, Codec, Detach
from levada.framework.embedding import (
    LARGE,
    ChannelCore,
    Envelope,
    Mode,
    Outcome,
    RateLimitedLog,
    TerminalState,
    Tracked,
    adopt,
    make_core,
)
from levada.framework.errors import ChannelError, DecodeError, HandleMoved, LocalProtocolError
from levada.framework.text import printable
from levada.framework.tracing import Tracing
from levada.transports import aqueduct
from levada.transports.aqueduct import Attach, Delivery, ReceiverHalf, ReceiverState, SenderHalf, SenderState

from .envelopes import MAX_STAMP, read_stamp, stamped
from .links import CreationLink, Half, HalfActor, HalfRecord, OwnHalf
from .raw import RawMessage, encode_raw
from .streams import AqueductStreams

if TYPE_CHECKING:
    from .referring import Referring

__all__ = [
    "CODEC", "REASONS", "SENDING", "Arrival", "CancelReason", "Halves", "Inbound", "Letter", "Outbound", "Packing", "Unreadable", "give_up",
]  # fmt: skip

logger = logging.getLogger("levada.actors.aqueduct")

_OPEN = TerminalState.OPEN
_PROCESSED = Outcome.PROCESSED

_MODES: Final = {
    Mode.ORDERED: aqueduct.Mode.ORDERED,
    Mode.UNORDERED: aqueduct.Mode.UNORDERED,
    Mode.UNRELIABLE: aqueduct.Mode.UNRELIABLE,
}
_KINDS: Final = {
    Sender: (AttachmentKind.SENDER, Attach.SENDER),
    Receiver: (AttachmentKind.RECEIVER, Attach.RECEIVER),
    OneshotSender: (AttachmentKind.ONESHOT_SENDER, Attach.ONESHOT_SENDER),
    OneshotReceiver: (AttachmentKind.ONESHOT_RECEIVER, Attach.ONESHOT_RECEIVER),
}

# A member of an enum takes several times as long to look up as a name, and each message needs these.
_ORDERED, _ORDERED_HERE = aqueduct.Mode.ORDERED, Mode.ORDERED
SENDING: Final = (SenderState.OPEN, SenderState.UNATTACHED)

MOST_WAITING = 2**24
"""Bytes of the messages of a channel that wait for room in its connection: then the window counts as full. One message may exceed it."""
ANSWERS_ROOM = 2**23
"""Bytes of a connection's answers that wait, or are under way on oneshots, from which an actor should not make more of them."""
_PLACE = MOST_WAITING // WINDOW
"""A message that waits takes one more place of the window for each of these bytes."""

CODEC: Final = ("levada-codec", b"1")
"""Connection header: the format of this side's messages. It also says that this side understands `Unreadable`. An `Unreadable` from a
peer without this header is accepted."""
REASONS: Final = ("levada-reasons", b"1")
"""Connection header: this side understands `CancelReason`."""
MAX_CAUSE = 1000
"""The most characters of the cause in an `Unreadable`, and of the reason in a `CancelReason`."""
MAX_EXPLAINED = 8
"""Senders of one message that get an `Unreadable`: a peer that attaches thousands to nonsense must not get thousands of answers."""


@message("levada.unreadable")
class Unreadable:
    """The last message on a sender that travelled in an unreadable message."""

    cause: str
    """Why the message could not be read."""

    @property
    def reason(self) -> str:
        """Why the sender was cancelled."""
        return f"the peer could not read the message that the sender was in: {printable(self.cause, MAX_CAUSE)}"


@message("levada.cancelled")
class CancelReason:
    """The last message on a sender that was cancelled for a reason. Without one, the stream is reset."""

    reason: str


_LAST: Final = (Unreadable, CancelReason)
_BEGINNINGS: Final = (b"\xb1levada.unreadable", b"\xb0levada.cancelled")
"""How their tags begin, behind the headers of the ext type and of the array."""


def _nothing() -> None:
    """Do not flush a core that has ended."""


class Halves:
    """The channels of one connection that have a half at the peer.

    Args:
        connection: its actor is the parent of all their actors.
        codec: writes and reads messages.
        max_answer_bytes: see `PeerConfig.max_answer_bytes`.
    """

    def __init__(self, connection: AqueductStreams, codec: Codec, max_answer_bytes: int) -> None:
        self.connection = connection
        self.core = connection.core
        self.flush_soon: Callable[[], None] = connection.flush_soon
        self.codec = codec
        self.peer = "peer"
        """Name of the peer, for errors."""
        self.remote: RemotePeer | None = None
        """The peer, for handlers of its messages."""
        self.records: dict[Half, HalfRecord] = {}
        """What stands in for the peer's halves of the channels that have not ended."""
        self.links: dict[Half, CreationLink] = {}
        """Links of the halves whose other half the peer's program does not have yet."""
        self.refs: Referring
        """Refs that have travelled; set before the first message."""
        self.unattached: Detach
        """Of these. To make the bound method for each message took a thirtieth of a message of 100 bytes."""
        self.detail = ""
        """How the connection ended; empty before that."""
        self.cause: BaseException | None = None
        self.reason: Reason = Shutdown()
        """The reason of actors that end with the connection."""
        self.sent = self.received = self.undelivered = 0
        self.questions = 0
        """Open questions of the peer whose answers share a channel."""
        self.max_answer_bytes = max_answer_bytes
        self.answers = 0
        """Bytes of answers that wait for room, or are under way on oneshots."""
        self.makers: OrderedDict[trio.Event, None] = OrderedDict()
        """Those that wait to make an answer until fewer wait."""
        itself: Halves = weakref.proxy(self)
        self.packing = Packing(itself)
        self.tracing: Tracing | None = None
        """Reads and writes the contexts of messages, once both sides have said that they do."""
        self.context: object = None
        """Of the message that was opened last, with tracing."""
        self.plain = Letter(itself, b"", None, [])
        """The shared letter of all messages whose outcome is not tracked."""
        self.complain = RateLimitedLog("unreadable message", logger).line
        """Logs what is wrong with a message of the peer."""
        self._starting: deque[HalfRecord] = deque()
        self.going_on: list[HalfRecord] = []
        """Records that have left some of what has arrived, until the connection writes."""
        self._busy = False

    def release(self) -> None:
        """Drop the connection, whose actor has ended."""
        del self.connection
        self.flush_soon = _nothing
        self.refs.release()

    def bind(self, channel: ChannelCore | OwnHalf, half: Half) -> None:
        """Continue a channel at the peer."""
        if not isinstance(channel, ChannelCore):
            channel.use(half)
        elif isinstance(half, SenderHalf):
            self.start(Outbound(self, channel, half=half))
        else:
            self.start(Inbound(self, channel, half=half))

    def start(self, record: HalfRecord) -> None:
        """Begin a record, after the records that are beginning now."""
        self._starting.append(record)
        if self._busy:
            return
        self._busy = True
        try:
            while self._starting:
                self._starting.popleft().start()
        finally:
            self._busy = False

    def go_on_later(self, record: HalfRecord) -> None:
        """Make a record take more of what has arrived when the connection writes what it has to write now."""
        self.going_on.append(record)
        self.flush_soon()

    def go_on(self) -> None:
        """Make records take more, since the connection writes."""
        records, self.going_on = self.going_on, []
        for record in records:
            record.pump()

    def dispatch(
        self, half: SenderHalf, letter: Letter, source: Actor[Any] | None, mode: aqueduct.Mode = _ORDERED
    ) -> None:
        """Send a letter, and continue the channels that travel with it.

        Args:
            half: sends it.
            letter: has not left.
            source: the actor that sends the message: the halves that the message leaves here are linked to it. Source: AQ-53.
            mode: how the message travels.

        Raises:
            LocalProtocolError: the half has ended; nothing has left.
        """
        made = half.send(letter.payload, [kind for _, kind in letter.attached], mode=mode, token=letter)
        self.sent += 1
        letter.payload = b""  # the core has it; this would keep it until the ack
        if not made:
            return
        if source is not None:
            assert half.links is not None
            link = CreationLink(source, next(reversed(half.links)))
            for other in made:
                self.links[other] = link
        attached, letter.attached = letter.attached, []
        for (channel, _), other in zip(attached, made, strict=True):
            self.bind(channel, other)

    def end(self, channel: ChannelCore, state: TerminalState, *, discard: bool = True) -> None:
        """End a channel in the same way as its half."""
        if state is TerminalState.CONNECTION_LOST:
            channel.end(state, discard=discard, detail=self.detail, cause=self.cause)
        else:
            channel.end(state, discard=discard)

    def answer_left(self, size: int) -> None:
        """Count an answer no more that has waited for room, or was under way."""
        self.answers -= size
        self.let_make()

    def let_make(self) -> None:
        """Make the next answer, if there is room: one at a time, since there may be a thousand."""
        if self.makers and self.answers < ANSWERS_ROOM:
            self.makers.popitem(last=False)[0].set()

    def forget(self, channel: ChannelCore | OwnHalf) -> None:
        """End a channel whose other half was in a message that never left."""
        if isinstance(channel, ChannelCore):
            self.end(channel, TerminalState.CONNECTION_LOST if self.detail else TerminalState.LOST)
        else:
            channel.over()

    def stamp(self, context: object, payload: bytes) -> bytes:
        """Put a context before a payload, if there is one and the peer takes the whole. Source: RF-58."""
        assert self.tracing is not None
        headers = self.tracing.headers(context)
        if headers is None or len(payload) + MAX_STAMP > self.core.config.max_message:
            return payload
        return stamped(headers, payload)

    def read_stamp(self, delivery: Delivery) -> object:
        """Take the context off a message.

        Raises:
            DecodeError: it is malformed.

        Source: RF-59, RF-60.
        """
        assert self.tracing is not None
        headers, delivery.payload = read_stamp(delivery.payload)
        self.context = None if headers is None else self.tracing.context(headers, self.remote)
        return self.context


class Letter(Envelope):
    """A message on its way to the peer: its bytes, and the sender to tell of its outcome."""

    __slots__ = ("attached", "halves", "payload", "tracked")

    def __init__(
        self,
        halves: Halves,
        payload: bytes,
        tracked: Tracked | None,
        attached: list[tuple[ChannelCore | OwnHalf, Attach]],
    ) -> None:
        self.halves = halves
        self.payload = payload
        self.tracked = tracked
        self.attached = attached
        """Channels that travel with it. Empty once it has left, since the core knows them from then on."""

    def settle(self, outcome: Outcome) -> None:
        """Report the outcome of the message, once."""
        if outcome is not _PROCESSED:
            self.halves.undelivered += 1
        if self.tracked is not None:
            self.tracked.settle(outcome)
        if self.attached:
            attached, self.attached = self.attached, []
            for channel, _ in attached:
                self.halves.forget(channel)


class Packing:
    """The handles of the message being encoded, as `levada.framework.codec.Attachments`; one object for all messages."""

    __slots__ = ("_attached", "channel", "halves", "taken")

    def __init__(self, halves: Halves) -> None:
        self.halves = halves
        self.channel: ChannelCore | None = None
        """The channel of the message."""
        self.taken: list[Any] = []
        """Handles and passengers, to be given back if the message cannot leave."""
        self._attached: list[tuple[ChannelCore | OwnHalf, Attach]] = []
        """Their channels, and the halves that the peer gets."""

    def attach(self, handle: Any) -> tuple[AttachmentKind, int] | tuple[AttachmentKind, int, bytes]:
        """Take a handle from its owner."""
        kinds = _KINDS.get(type(handle))
        if kinds is None:
            return self.halves.refs.attach(handle, self)
        assert self.channel is not None
        where = f"a message on channel {self.channel.name} to {self.halves.peer}"
        self._attached.append((handle.take_over(where), kinds[1]))
        self.taken.append(handle)
        return kinds[0], len(self.taken) - 1

    def take(self, passenger: Any, kind: Attach) -> int:
        """Take a passenger; return its index."""
        self._attached.append((passenger, kind))
        self.taken.append(passenger)
        return len(self.taken) - 1

    def rollback(self) -> None:
        """Give the handles back to their owners."""
        while self.taken:
            self.taken.pop().give_back()
        self._attached.clear()

    def leave(self) -> list[tuple[ChannelCore | OwnHalf, Attach]]:
        """Take what travels with the message, which is encoded."""
        attached, self._attached = self._attached, []
        self.taken.clear()
        return attached

    def require_room(self) -> None:
        """Give the handles back if there is no room for their channels.

        Raises:
            ChannelError: they were given back.
        """
        core = self.halves.core
        if not core.has_room(len(self.taken)):
            self.rollback()
            text = f"more than {core.config.max_channels} channels (raise max_channels, or end some)"
            raise ChannelError(text, channel="" if self.channel is None else self.channel.name)


def give_up(handles: Iterable[Any], reason: str = "") -> None:
    """Cancel senders, for a reason or without one, and close receivers that will not be used."""
    for handle in handles:
        if isinstance(handle, Ref):
            continue  # it ends with its last holder
        try:
            handle.cancel(reason) if isinstance(handle, Sender | OneshotSender) else handle.close()
        except HandleMoved:
            pass  # it is in use elsewhere


class Arrival(Delivery, Envelope):
    """A message from the peer, decoded when it is taken. Source: AQ-33, AQ-34.

    The `user_data` of its half are the channels of the connection, the annotation of the messages, and their own channel.
    """

    __slots__ = ("context", "handles", "large")

    def __init__(self, half: ReceiverHalf, payload: bytes, attachments: tuple[SenderHalf | ReceiverHalf, ...]) -> None:
        # Without a call of `Delivery.__init__`, because each message is one.
        self.half = half
        self.payload = payload
        self.attachments = attachments
        self._size = size = len(payload)
        self.handles: tuple[Any, ...] = ()
        """The handles in the message, once it is open."""
        self.context: object = None
        self.large = size > LARGE

    @property
    def peer(self) -> RemotePeer | None:
        """The peer that sent the message."""
        halves: Halves = self.half.user_data[0]
        return halves.remote

    def open(self) -> Any:
        """Decode the message and attach its handles.

        Raises:
            DecodeError: the bytes are not a message of this type, or use an attachment wrongly; all attachments are given up.
            ChannelCancelled: the peer could not read the message that the sender was in, and says why.
        """
        halves: Halves
        halves, item_type, channel = self.half.user_data
        if halves.tracing is not None:
            self.context = halves.read_stamp(self)
        if item_type is RawMessage:
            self.handles = tuple(_handle(halves, half, _kind(half), RawMessage) for half in self.attachments)
            halves.flush_soon()
            return RawMessage(self.payload, self.handles)
        try:
            if not self.attachments:
                message = halves.codec.decode(self.payload, item_type, detach=halves.unattached)
            else:
                message, self.handles = open_delivery(halves, self, self.payload, item_type)
        except DecodeError:
            message = read_last(halves, self.payload)
            if message is None:
                raise
        if type(message) in _LAST:
            channel.cancelled(printable(message.reason, MAX_CAUSE + 100))
            raise channel.receiver.error(channel.name)
        return message

    def settle(self, outcome: Outcome) -> None:
        """Report the outcome of the message, once."""
        half = self.half
        if not half.stalled:  # as `release`, without the call
            size, self._size = self._size, 0
            half.untaken -= size
            half.core.held -= size
        elif self.release():
            half.user_data[0].flush_soon()
        if outcome is not _PROCESSED:
            self.discard(lost=half.state in (ReceiverState.CANCELLED, ReceiverState.LOST))
            half.user_data[0].flush_soon()


def open_delivery(
    halves: Halves, delivery: Delivery, payload: bytes, item: Any, first: int = 0
) -> tuple[Any, tuple[Any, ...]]:
    """Decode a message; return it and its handles.

    Args:
        halves: the channels of the connection.
        delivery: the message.
        payload: its bytes, or the last part of them.
        item: annotation of the message.
        first: attachments before this index do not belong to the message.

    Raises:
        DecodeError: the bytes are not a message of this type, or use an attachment wrongly; attachments from `first` on are given up.
    """
    attachments = delivery.attachments
    if not attachments:
        return halves.codec.decode(payload, item, detach=halves.unattached), ()
    used: dict[int, Any] = {}

    def detach(number: int, kind: AttachmentKind, item: Any, note: bytes = b"") -> Any:
        if kind is AttachmentKind.RETURNED_REF or kind is AttachmentKind.THIRD_REF:
            return halves.unattached(number, kind, item, note)
        if number < first:
            raise ValueError("it does not belong to the message")
        handle = used[number] = _handle(halves, attachments[number], kind, item, note)
        return handle

    try:
        message = halves.codec.decode(payload, item, detach=detach)
    except BaseException as error:
        own = [half for number, half in enumerate(attachments) if number >= first]
        if isinstance(error, DecodeError) and CODEC in (halves.core.peer_headers or ()):
            _explain(halves, own, error)
        for number, handle in used.items():
            if isinstance(handle, Sender | OneshotSender) and attachments[number].state not in SENDING:
                handle.finish_nowait()  # after the explanation
            else:
                give_up([handle])
        _give_up_halves(own)
        halves.flush_soon()
        raise
    if len(used) < len(attachments) - first:
        unused = [half for number, half in enumerate(attachments) if number >= first and number not in used]
        halves.complain("%s: %d attachments that no field names", halves.peer, len(unused))
        _give_up_halves(unused)
    halves.flush_soon()
    return message, tuple(used.values())


def read_last(halves: Halves, payload: bytes) -> Unreadable | CancelReason | None:
    """Read an `Unreadable` or a `CancelReason` if the bytes begin like one."""
    if not (payload.startswith(_BEGINNINGS, 4) or payload.startswith(_BEGINNINGS, 5)):
        return None
    return halves.codec.decode(payload, Unreadable | CancelReason)


def _explain(halves: Halves, attached: Iterable[Half], error: DecodeError) -> None:
    """Send the reason why a message was not read on its unused senders."""
    fresh = (half for half in attached if isinstance(half, SenderHalf) and half.state in SENDING and not half.sent)
    for half in islice(fresh, MAX_EXPLAINED):
        try:
            half.send(halves.codec.encode(Unreadable(printable(str(error), MAX_CAUSE))))
        except (LocalProtocolError, ValueError):
            continue  # the settings allow not even this
        half.finish()


def _give_up_halves(halves: Iterable[Half]) -> None:
    for half in halves:
        if not isinstance(half, SenderHalf):
            half.close()
        elif half.state in SENDING:
            half.cancel()


def _handle(halves: Halves, half: Half, kind: AttachmentKind, item: Any, note: bytes = b"") -> Any:
    sends, expected = isinstance(half, SenderHalf), _kind(half)
    if kind is AttachmentKind.REF and expected is AttachmentKind.SENDER:
        return halves.refs.arrived(half, note)
    if kind != expected:
        raise ValueError(f"it is a {expected.name.lower()}, not a {kind.name.lower()}")
    oneshot = kind is AttachmentKind.ONESHOT_SENDER or kind is AttachmentKind.ONESHOT_RECEIVER
    window = WINDOW if sends else max(WINDOW, halves.core.config.mailbox)
    channel = make_core(item, 1 if oneshot else window, half.id, opener=halves.context)
    (channel.receiver if sends else channel.sender).away = 1
    halves.bind(channel, half)
    if oneshot:
        return OneshotSender(channel) if sends else OneshotReceiver(channel)
    return Sender(channel) if sends else Receiver(channel)


def _kind(half: Half) -> AttachmentKind:
    """Return the kind of handle that the receiver of a message gets for an attached half."""
    sends = isinstance(half, SenderHalf)
    return AttachmentKind((AttachmentKind.SENDER if sends else AttachmentKind.RECEIVER) + (2 if half.oneshot else 0))


class Outbound(HalfActor):
    """Stands in for a receiver at the peer: takes messages from the channel and sends them, as far as the window allows."""

    channel: ChannelCore
    half: SenderHalf = attrs.field(kw_only=True)
    _busy: bool = attrs.field(default=False, init=False)

    def start(self) -> None:
        """Begin; the message with the half has been sent, or opened."""
        gone = self.half.ended
        if not gone:
            self.is_actor = adopt(self.halves.connection, self)
        self.halves.records[self.half] = self
        self.channel.sender.on_terminated(self._ended_here)
        self.channel.consume(self.pump, self.prepare)
        if gone:
            self.ended()

    def prepare(self, entry: Any) -> Letter | None:
        """Encode a message and take its handles; raises the errors of ``send``. A plain message leaves at once. Source: AQ-26."""
        channel, halves = self.channel, self.halves
        tracked = type(entry) is Tracked
        payload = self._encode(entry.message if tracked else entry)
        if halves.tracing is not None and (context := self._context(entry, halves.tracing)) is not None:
            payload = halves.stamp(context, payload)
        plain = not (tracked or halves.packing.taken or channel.queue or self._busy)
        first = not halves.core.streams.dirty  # else what is there to write has been announced
        if plain and channel.mode is _ORDERED_HERE and self.half.push(payload, halves.plain):
            # As if it had been queued and taken: with this and the codec's short way 100 bytes cost 20 µs of CPU time, not 26.
            channel.limit -= 1
            halves.sent += 1
            if first:
                halves.flush_soon()
            return None
        letter = self._letter(entry, payload)
        if len(payload) >= _PLACE:
            if channel.mode is Mode.UNRELIABLE:
                self._drop_old(len(payload))
            else:
                channel.take_places(len(payload) // _PLACE)
        return letter

    def _drop_old(self, size: int) -> None:
        """Drop the oldest messages that wait in an unreliable channel, so that a new one of so many bytes has room."""
        queue = self.channel.queue
        sizes = deque(len(entry.payload) if type(entry) is Letter else 0 for entry in queue)
        most = max(0, MOST_WAITING - size)
        waiting = sum(sizes)
        while waiting > most:
            waiting -= sizes.popleft()
            self.channel.drop_oldest()

    def _context(self, entry: Any, tracing: Tracing) -> object:
        """Return the context that a message takes along: only messages with handles do, since a channel is one piece of work."""
        return tracing.current() if self.halves.packing.taken else None

    def _encode(self, message: Any) -> bytes:
        halves, channel = self.halves, self.channel
        packing, codec = halves.packing, halves.codec
        packing.channel = channel
        if channel.item_type is RawMessage:
            return encode_raw(message, codec.max_bytes, packing)
        return codec.encode(message, channel.item_type, attachments=packing)

    def _letter(self, entry: Any, payload: bytes) -> Letter:
        """Make a letter of an encoded message, if its handles may travel."""
        halves, packing = self.halves, self.halves.packing
        attached = []
        if packing.taken:
            packing.require_room()
            attached = packing.leave()
        return Letter(halves, payload, entry if isinstance(entry, Tracked) else None, attached)

    def pump(self) -> None:
        """Send queued messages while there is room, then the end of the channel if it has come."""
        if self._busy:
            return
        self._busy = True
        channel, half = self.channel, self.half
        try:
            mode = _ORDERED if channel.mode is _ORDERED_HERE else _MODES[channel.mode]
            while channel.queue and half.state in SENDING and half.has_room(mode):
                entry = channel.take()
                size = len(entry.payload) if type(entry) is Letter else 0
                self._send(entry, mode)
                if size >= _PLACE and mode is not aqueduct.Mode.UNRELIABLE:
                    channel.take_places(-(size // _PLACE))
            if channel.pending is not None and not channel.queue and channel.sender.state is _OPEN:
                half.finish()
        finally:
            self._busy = False
        self.halves.flush_soon()

    def _send(self, entry: Any, mode: aqueduct.Mode) -> None:
        letter = entry
        if type(entry) is not Letter:  # it was queued before the channel travelled
            try:
                letter = self._letter(entry, self._encode(entry.message if isinstance(entry, Tracked) else entry))
            except Exception as error:  # noqa: BLE001 - what was sent may be anything
                text = "channel %s: a message that was queued cannot travel"
                self.halves.connection.log_failure(error, text, self.channel.name, event="unsendable")
                self.channel.settle(entry, outcome=Outcome.NOT_PROCESSED)
                return
        try:
            self.halves.dispatch(self.half, letter, self if self.is_actor else None, mode)
        except LocalProtocolError as error:
            logger.error("channel %s: a message was not sent: %s", self.channel.name, error)
            self.channel.settle(letter, outcome=Outcome.NOT_PROCESSED)

    def settled(self, letters: list[Any], outcome: Outcome) -> None:
        """Report the outcome of messages."""
        if self.channel.putters and self.half.ended:
            self.halves.end(self.channel, _SENDER_ENDS[self.half.state])  # messages that the end settles make no room
        if outcome is _PROCESSED and letters.count(self.halves.plain) == len(letters):
            self.channel.settle(outcome=outcome, more=len(letters))
        else:
            self.channel.settle(*letters, outcome=outcome)

    def ended(self) -> None:
        """End the channel with the half, which is gone. Source: section 8 of the protocol."""
        self.halves.records.pop(self.half, None)
        self.halves.end(self.channel, _SENDER_ENDS[self.half.state])
        self.retire()

    def give_up(self, detail: str) -> None:
        """Cancel the channel; `detail` is in its error."""
        self.channel.end(TerminalState.CANCELLED, detail=detail)

    def _ended_here(self) -> None:
        """End the half, since the channel was ended by its owner or the peer. The peer confirms a finish."""
        if not self.half.ended:
            if self.channel.sender.state is TerminalState.FINISHED or self._reason_sent():
                self.half.finish()
            else:
                self.half.cancel()
            self.halves.flush_soon()

    def _reason_sent(self) -> bool:
        """Send why the channel was cancelled as its last message, if the peer can read it and has room for it."""
        reason, half, core = self.channel.sender.reason, self.half, self.halves.core
        if not reason or REASONS not in (core.peer_headers or ()):
            return False
        try:
            half.send(self.halves.codec.encode(CancelReason(printable(reason, MAX_CAUSE))))
        except (LocalProtocolError, ValueError):  # it has ended, has no room, or the settings allow not even this
            return False
        return True


_SENDER_ENDS: Final = {
    SenderState.FINISHED: TerminalState.FINISHED,
    SenderState.CANCELLED: TerminalState.CANCELLED,
    SenderState.RECEIVER_CLOSED: TerminalState.RECEIVER_CLOSED,
    SenderState.LOST: TerminalState.LOST,
    SenderState.CONNECTION_LOST: TerminalState.CONNECTION_LOST,
}


class Inbound(HalfActor):
    """Stands in for a sender at the peer: puts arriving messages into the channel while it has room."""

    channel: ChannelCore
    half: ReceiverHalf = attrs.field(kw_only=True)
    _held: Arrival | None = attrs.field(default=None, init=False)
    """A message taken from the half when the channel had no room."""
    _waiting: bool = attrs.field(default=False, init=False)
    """Whether the channel will call when it has room."""
    _final: TerminalState | None = attrs.field(default=None, init=False)
    """How the channel ends when all arrived messages are in it."""
    _busy: bool = attrs.field(default=False, init=False)

    def start(self) -> None:
        """Begin; the message with the half has been sent, or opened."""
        half = self.half
        half.user_data = (self.halves, self.channel.item_type, self.channel)
        gone = half.ended
        if not gone:
            self.is_actor = adopt(self.halves.connection, self)
        self.halves.records[half] = self
        self.channel.sender.on_terminated(self._ended_here)
        if gone:
            self.ended()
        elif half.mailbox:
            self.pump()

    def pump(self) -> None:
        """Put arrived messages into the channel."""
        if self._busy or self._waiting:
            return
        self._busy = True
        channel, halves, half = self.channel, self.halves, self.half
        channel.enveloped = True
        try:
            while channel.sender.state is _OPEN:
                arrival = self._held
                if arrival is None:
                    if not half.mailbox:
                        break
                    if channel.taker is None and channel.consumer is None:
                        queue = channel.open_queue()
                        halves.received += self._fill(queue, channel.limit - len(queue))
                    arrival = self._take()
                    if arrival is None:
                        break
                    halves.received += 1
                else:
                    self._held = None
                if not channel.offer(arrival, self._room):
                    self._held, self._waiting = arrival, True
                    return
            if self._final is not None and self._held is None and not half.mailbox:
                final, self._final = self._final, None
                if final is TerminalState.FINISHED:
                    channel.finish_producer()
                else:
                    halves.end(channel, final, discard=False)
        finally:
            self._busy = False

    def _fill(self, queue: deque[Any], most: int) -> int:
        """Put messages for the channel, so many at most, into its queue, which nobody waits for; return how many."""
        return self.half.take_into(queue, most)

    def _take(self) -> Any:  # an `Arrival`, as `AqueductDriver` has the core make them, or None
        """Take a message for the channel out of the half's mailbox, if there is one left."""
        return self.half.take(release=False) if self.half.mailbox else None

    def _room(self) -> None:
        self._waiting = False
        self.pump()
        self.halves.flush_soon()

    def ended(self) -> None:
        """End the channel with the half, which is gone. Unless it was cancelled or closed, messages in its mailbox are still received."""
        state = self.half.state
        self.halves.records.pop(self.half, None)
        if state in (ReceiverState.CANCELLED, ReceiverState.CLOSED):
            self.halves.end(self.channel, _RECEIVER_ENDS[state])
        else:
            self._final = _RECEIVER_ENDS[state]
            self.pump()
        self.retire()

    def give_up(self, detail: str) -> None:
        """Close the channel's receiver; `detail` is in its error."""
        self.channel.end(TerminalState.RECEIVER_CLOSED, detail=detail)

    def _ended_here(self) -> None:
        """Close the half, since the channel has ended, by its receiver or with the half."""
        if self._held is not None:
            held, self._held = self._held, None
            held.settle(Outcome.NOT_PROCESSED)
        if self.half.mailbox or not self.half.ended:
            self.half.close()
            self.halves.flush_soon()


_RECEIVER_ENDS: Final = {
    ReceiverState.FINISHED: TerminalState.FINISHED,
    ReceiverState.CANCELLED: TerminalState.CANCELLED,
    ReceiverState.CLOSED: TerminalState.RECEIVER_CLOSED,
    ReceiverState.LOST: TerminalState.LOST,
    ReceiverState.CONNECTION_LOST: TerminalState.CONNECTION_LOST,
}
