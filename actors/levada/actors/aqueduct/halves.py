"""Between the channels of a program and the halves of a connection: what is sent, what arrives, handles that travel, and the ends.

* A channel has one half here and one at the peer. What stands in for the peer's half is an `Outbound` (the peer receives) or an
  `Inbound` (the peer sends): an actor (`levada.actors.aqueduct.links`), driven by calls from the channel and by events from the
  connection.
* A message is encoded inside the ``send`` that sends it, which is also when the handles in it move: all of them, or none. It is
  decoded in the ``receive`` that takes it, so that what cannot be decoded is that receiver's `DecodeError` and nobody else's.
* A channel that travels keeps its queue. What was sent before is encoded when it leaves; what cannot be is logged and not delivered.
* Nothing here recurses: channels that travel in messages of channels that travel are begun one after the other.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from levada.framework import OneshotReceiver, OneshotSender, Reason, Receiver, Ref, Sender, Shutdown, message
from levada.framework.channel import WINDOW
from levada.framework.codec import AttachmentKind, Codec
from levada.framework.embedding import LARGE, ChannelCore, Envelope, Mode, Outcome, TerminalState, Tracked
from levada.framework.errors import ChannelCancelled, ChannelError, DecodeError, HandleMoved, LocalProtocolError
from levada.transports import aqueduct
from levada.transports.aqueduct import Attach, Delivery, ReceiverHalf, ReceiverState, SenderHalf, SenderState
from levada.transports.text import printable

from .links import Connecting, CreationLink, Half, HalfActor
from .raw import RawMessage, encode_raw

if TYPE_CHECKING:
    from .refs import Refs

__all__ = ["CODEC", "Arrival", "Halves", "Inbound", "Letter", "Outbound", "Unreadable", "give_up"]

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

# A member of an enum takes several times as long to look up as a name; these are wanted for each message.
_ORDERED, _ORDERED_HERE = aqueduct.Mode.ORDERED, Mode.ORDERED
_SENDING: Final = (SenderState.OPEN, SenderState.UNATTACHED)

CODEC: Final = ("levada-codec", b"1")
"""Connection header: which messages this side writes, and that it knows `Unreadable`. A peer that says nothing about it is taken at its
word when it sends any."""
MAX_CAUSE = 1000
"""Characters of the cause in an `Unreadable`."""
MAX_EXPLAINED = 8
"""Senders of one message that get one: a peer that attaches thousands to nonsense gets no thousands of answers."""


@message("levada.unreadable")
class Unreadable:
    """Comes on a sender that travelled in a message which could not be read, and is the last on it."""

    cause: str
    """Why not."""


_UNREADABLE = b"\xb1levada.unreadable"


class Record(Protocol):
    """What stands in for a peer's half."""

    def start(self) -> None:
        """Begin; the message that the half travels in has been sent, or opened."""
        ...

    def pump(self) -> None:
        """Something has arrived, or there is room to send."""
        ...

    def ended(self) -> None:
        """The half is gone."""
        ...


class SendingRecord(Record, Protocol):
    """What stands in for a peer's receiver."""

    def settled(self, letters: list[Any], outcome: Outcome) -> None:
        """It is known what became of messages."""
        ...


class Passenger(Protocol):
    """What travels in a message like a channel does, and is none of the program's: the channels of remote refs."""

    def bound(self, half: Any) -> Record:
        """Go on over this half: the message has left."""
        ...

    def forget(self) -> None:
        """The message will never leave."""
        ...


def _nothing() -> None:
    """Take nothing from a core that has nothing to say any more."""


class Halves:
    """The channels of one connection that have a half at the peer.

    Args:
        connection: whose actor is the parent of all of theirs.
        codec: writes and reads messages.
    """

    def __init__(self, connection: Connecting, codec: Codec) -> None:
        self.connection = connection
        self.core = connection.core
        self.flush_soon: Callable[[], None] = connection.flush_soon
        self.codec = codec
        self.peer = "peer"
        """Name of the peer, for errors."""
        self.outbound: dict[SenderHalf, SendingRecord] = {}
        self.inbound: dict[ReceiverHalf, Record] = {}
        self.links: dict[Half, CreationLink] = {}
        """What halves hang on that the peer's program has not got yet."""
        self.refs: Refs
        """Refs that have travelled; set before the first message."""
        self.detail = ""
        """How the connection ended, when it has."""
        self.cause: BaseException | None = None
        self.reason: Reason = Shutdown()
        """Why the actors of halves end that end with it."""
        self.sent = self.received = self.undelivered = 0
        itself: Halves = weakref.proxy(self)
        self.packing = Packing(itself)
        self.plain = Letter(itself, b"", None, [])
        """Stands for every message that nobody wants to hear of."""
        self._starting: deque[Record] = deque()
        self._busy = False

    def release(self) -> None:
        """The connection's actor has ended: let go of it."""
        del self.connection
        self.flush_soon = _nothing
        self.refs.release()

    def bind(self, channel: ChannelCore | Passenger, half: Half) -> None:
        """Let a channel go on at the peer."""
        if not isinstance(channel, ChannelCore):
            self.start(channel.bound(half))
        elif isinstance(half, SenderHalf):
            self.start(Outbound(self, channel, half=half))
        else:
            self.start(Inbound(self, channel, half=half))

    def start(self, record: Record) -> None:
        """Let a record begin, after those that are beginning."""
        self._starting.append(record)
        if self._busy:
            return
        self._busy = True
        try:
            while self._starting:
                self._starting.popleft().start()
        finally:
            self._busy = False

    def link(self, source: Ref[Any], carrier: SenderHalf, made: Iterable[Half]) -> None:
        """Link the halves that a message has left here to the actor that has just sent it on `carrier`. Source: AQ-53."""
        assert carrier.links is not None
        link = CreationLink(source, next(reversed(carrier.links)))
        for half in made:
            self.links[half] = link

    def end(self, channel: ChannelCore, state: TerminalState, *, discard: bool = True) -> None:
        """End a channel the way its half ended."""
        if state is TerminalState.CONNECTION_LOST:
            channel.end(state, discard=discard, detail=self.detail, cause=self.cause)
        else:
            channel.end(state, discard=discard)

    def forget(self, channel: ChannelCore | Passenger) -> None:
        """End a channel whose other half was in a message that never left."""
        if isinstance(channel, ChannelCore):
            self.end(channel, TerminalState.CONNECTION_LOST if self.detail else TerminalState.LOST)
        else:
            channel.forget()

    def has_room(self, channels: int) -> bool:
        """Whether so many channels more may be made."""
        core = self.core
        live = len(core.halves) + len(core.unclaimed) + len(core.links.tombstones)
        return live + channels <= core.config.max_channels


class Letter(Envelope):
    """A message on its way to the peer: its octets, and what is to be told when it is known what became of it."""

    __slots__ = ("attached", "halves", "payload", "tracked")

    def __init__(
        self,
        halves: Halves,
        payload: bytes,
        tracked: Tracked | None,
        attached: list[tuple[ChannelCore | Passenger, Attach]],
    ) -> None:
        self.halves = halves
        self.payload = payload
        self.tracked = tracked
        self.attached = attached
        """Channels that travel with it; empty from when it has left, as the core knows of them then."""

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
    """The handles of the message that is being encoded, as `levada.framework.codec.Attachments`; one for all messages."""

    __slots__ = ("channel", "halves", "taken")

    def __init__(self, halves: Halves) -> None:
        self.halves = halves
        self.channel: ChannelCore | None = None
        """That of the message."""
        self.taken: list[tuple[Any, ChannelCore | Passenger, Attach]] = []

    def attach(self, handle: Any) -> tuple[AttachmentKind, int] | tuple[AttachmentKind, int, bytes]:
        """Take a handle from its owner."""
        kinds = _KINDS.get(type(handle))
        if kinds is None:
            return self.halves.refs.attach(handle, self)
        assert self.channel is not None
        where = f"a message on channel {self.channel.name} to {self.halves.peer}"
        self.taken.append((handle, handle.take_over(where), kinds[1]))
        return kinds[0], len(self.taken) - 1

    def take(self, passenger: Any, kind: Attach) -> int:
        """Take what belongs to no channel of the program; return its index."""
        self.taken.append((passenger, passenger, kind))
        return len(self.taken) - 1

    def rollback(self) -> None:
        """Give all of them back."""
        while self.taken:
            self.taken.pop()[0].give_back()


def give_up(handles: Iterable[Any]) -> None:
    """Cancel senders and close receivers that nobody will use."""
    for handle in handles:
        if isinstance(handle, Ref):
            continue  # it ends with the last one who holds it
        try:
            handle.cancel() if isinstance(handle, Sender | OneshotSender) else handle.close()
        except HandleMoved:
            pass  # somebody does use it


class Arrival(Envelope):
    """A message from the peer, decoded when it is taken. Source: AQ-33, AQ-34."""

    __slots__ = ("delivery", "halves", "handles", "item_type")

    def __init__(self, halves: Halves, delivery: Delivery, item_type: Any) -> None:
        self.halves = halves
        self.delivery = delivery
        self.item_type = item_type
        self.handles: tuple[Any, ...] = ()
        """What was in the message, once it is open."""

    @property
    def large(self) -> bool:
        """Whether decoding may take long, so that others run before the next message."""
        return len(self.delivery.payload) > LARGE

    def open(self) -> Any:
        """Decode the message and attach its handles; see `Envelope.open`.

        Raises:
            DecodeError: the octets are no such message, or use an attachment wrongly; everything attached is given up.
            ChannelCancelled: the peer could not read the message in which it got the sender, and says why.
        """
        delivery, halves = self.delivery, self.halves
        if self.item_type is RawMessage:
            self.handles = tuple(_handle(halves, half, _kind(half), RawMessage) for half in delivery.attachments)
            halves.flush_soon()
            return RawMessage(delivery.payload, self.handles)
        try:
            if not delivery.attachments:
                message = halves.codec.decode(delivery.payload, self.item_type, detach=halves.refs.returned)
            else:
                message, self.handles = open_delivery(halves, delivery, delivery.payload, self.item_type)
        except DecodeError:
            message = read_unreadable(halves, delivery.payload)
            if message is None:
                raise
        if type(message) is Unreadable:
            cause = printable(message.cause, MAX_CAUSE)
            raise ChannelCancelled(f"the peer could not read the message that the sender was in: {cause}")
        return message

    def settle(self, outcome: Outcome) -> None:
        """Report the outcome of the message, once."""
        if self.delivery.release():
            self.halves.flush_soon()
        if outcome is not _PROCESSED:
            lost = self.delivery.half.state in (ReceiverState.CANCELLED, ReceiverState.LOST)
            self.delivery.discard(lost=lost)
            self.halves.flush_soon()


def open_delivery(
    halves: Halves, delivery: Delivery, payload: bytes, item: Any, first: int = 0
) -> tuple[Any, tuple[Any, ...]]:
    """Decode a message with attachments; return it, and the handles that are in it.

    Args:
        halves: of the connection.
        delivery: the message.
        payload: its octets, or the end of them.
        item: annotation of the message.
        first: attachments before this one are no concern of the message.

    Raises:
        DecodeError: the octets are no such message, or use an attachment wrongly; everything attached from `first` on is given up.
    """
    used: dict[int, Any] = {}
    attachments = delivery.attachments

    def detach(number: int, kind: AttachmentKind, item: Any, note: bytes = b"") -> Any:
        if kind is AttachmentKind.RETURNED_REF:
            return halves.refs.returned(number, kind)
        if number < first:
            raise ValueError("it is not the message's")
        handle = used[number] = _handle(halves, attachments[number], kind, item, note)
        return handle

    try:
        message = halves.codec.decode(payload, item, detach=detach)
    except BaseException as error:
        own = [half for number, half in enumerate(attachments) if number >= first]
        if isinstance(error, DecodeError) and CODEC in (halves.core.peer_headers or ()):
            _explain(halves, own, error)
        for number, handle in used.items():
            if isinstance(handle, Sender | OneshotSender) and attachments[number].state not in _SENDING:
                handle.finish_nowait()  # behind the explanation
            else:
                give_up([handle])
        _give_up_halves(own)
        halves.flush_soon()
        raise
    unused = [half for number, half in enumerate(attachments) if number >= first and number not in used]
    if unused:
        logger.warning("%s: %d attachments that no field names", halves.peer, len(unused))
        _give_up_halves(unused)
    halves.flush_soon()
    return message, tuple(used.values())


def read_unreadable(halves: Halves, payload: bytes) -> Unreadable | None:
    """Read the octets of an `Unreadable` if they begin like one: behind the header of its ext type and that of the array comes its tag."""
    if not (payload.startswith(_UNREADABLE, 4) or payload.startswith(_UNREADABLE, 5)):
        return None
    return halves.codec.decode(payload, Unreadable)


def _explain(halves: Halves, attached: Iterable[Half], error: DecodeError) -> None:
    """Say on senders of a message why it was not read, as far as they have not been used."""
    fresh = (half for half in attached if isinstance(half, SenderHalf) and half.state in _SENDING and not half.sent)
    for half in islice(fresh, MAX_EXPLAINED):
        try:
            half.send(halves.codec.encode(Unreadable(printable(str(error), MAX_CAUSE))))
        except (LocalProtocolError, ValueError):
            continue  # settings so tight that not even this fits
        half.finish()


def _give_up_halves(halves: Iterable[Half]) -> None:
    for half in halves:
        if not isinstance(half, SenderHalf):
            half.close()
        elif half.state in _SENDING:
            half.cancel()


def _handle(halves: Halves, half: Half, kind: AttachmentKind, item: Any, note: bytes = b"") -> Any:
    sends, expected = isinstance(half, SenderHalf), _kind(half)
    if kind is AttachmentKind.REF and expected is AttachmentKind.SENDER:
        return halves.refs.arrived(half, note)
    if kind != expected:
        raise ValueError(f"it is a {expected.name.lower()}, not a {kind.name.lower()}")
    name = f"{getattr(item, '__name__', item)}#{half.id}"
    window = WINDOW if sends else max(WINDOW, halves.core.config.mailbox)
    channel = ChannelCore(item, 1 if half.oneshot else window, name)
    (channel.receiver if sends else channel.sender).away = 1
    halves.bind(channel, half)
    if half.oneshot:
        return OneshotSender(channel) if sends else OneshotReceiver(channel)
    return Sender(channel) if sends else Receiver(channel)


def _kind(half: Half) -> AttachmentKind:
    """Tell what whoever gets a message may do with a half that is attached to it."""
    sends = isinstance(half, SenderHalf)
    return AttachmentKind((AttachmentKind.SENDER if sends else AttachmentKind.RECEIVER) + (2 if half.oneshot else 0))


class Outbound(HalfActor):
    """The place of a receiver that is at the peer: takes what is sent on the channel, as far as the window lets it."""

    channel: ChannelCore
    half: SenderHalf = attrs.field(kw_only=True)
    _busy: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.halves.outbound[self.half] = self

    def start(self) -> None:
        """Begin; the message that the half travels in has been sent, or opened."""
        gone = self.half.ended
        if not gone:
            self.begin()
        self.channel.sender.on_terminated(self._ended_here)
        self.channel.consume(self.pump, self.prepare)
        if gone:
            self.ended()

    def prepare(self, entry: Any) -> Letter | None:
        """Encode a message, and take the handles in it; raises what ``send`` raises. A plain one leaves at once. Source: AQ-26."""
        payload = self._encode(entry)
        channel, halves = self.channel, self.halves
        plain = not (halves.packing.taken or channel.queue or self._busy or isinstance(entry, Tracked))
        if plain and channel.mode is _ORDERED_HERE and self.half.push(payload, halves.plain):
            # As if it had been queued and taken: with this and the codec's short way 100 octets cost 20 µs of CPU time, not 26.
            channel.limit -= 1
            halves.sent += 1
            halves.flush_soon()
            return None
        return self._letter(entry, payload)

    def _encode(self, entry: Any) -> bytes:
        halves, channel = self.halves, self.channel
        message = entry.message if isinstance(entry, Tracked) else entry
        packing, codec = halves.packing, halves.codec
        packing.channel = channel
        if channel.item_type is RawMessage:
            return encode_raw(message, codec.max_bytes, packing)
        return codec.encode(message, channel.item_type, attachments=packing)

    def _letter(self, entry: Any, payload: bytes) -> Letter:
        """Make the letter of what has been encoded, if its handles may travel."""
        halves, packing = self.halves, self.halves.packing
        attached = [(core, kind) for _, core, kind in packing.taken]
        if attached and not halves.has_room(len(attached)):
            packing.rollback()
            limit = halves.core.config.max_channels
            raise ChannelError(
                f"more than {limit} channels (raise max_channels, or end some)", channel=self.channel.name
            )
        packing.taken.clear()
        return Letter(halves, payload, entry if isinstance(entry, Tracked) else None, attached)

    def pump(self) -> None:
        """Send what is queued while there is room, then the end if it has come."""
        if self._busy:
            return
        self._busy = True
        channel, half = self.channel, self.half
        try:
            mode = _ORDERED if channel.mode is _ORDERED_HERE else _MODES[channel.mode]
            queue = channel.queue
            while queue and half.state in _SENDING and half.has_room(mode):
                self._send(channel.take(), mode)
            if channel.pending is not None and not channel.queue and channel.sender.state is _OPEN:
                half.finish()
        finally:
            self._busy = False
        self.halves.flush_soon()

    def _send(self, entry: Any, mode: aqueduct.Mode) -> None:
        letter = entry
        if type(entry) is not Letter:  # it was queued before the channel travelled
            try:
                letter = self._letter(entry, self._encode(entry))
            except Exception:
                logger.exception("channel %s: a message that was queued cannot travel", self.channel.name)
                self.channel.settle(entry, outcome=Outcome.NOT_PROCESSED)
                return
        kinds = [kind for _, kind in letter.attached] if letter.attached else ()
        try:
            made = self.half.send(letter.payload, kinds, mode=mode, token=letter)
        except LocalProtocolError as error:
            logger.error("channel %s: a message was not sent: %s", self.channel.name, error)
            self.channel.settle(letter, outcome=Outcome.NOT_PROCESSED)
            return
        self.halves.sent += 1
        letter.payload = b""  # the core has it; this would keep it until the ack
        if made:
            if self.is_actor:
                self.halves.link(self.ref, self.half, made)
            attached, letter.attached = letter.attached, []
            for (channel, _), half in zip(attached, made, strict=True):
                self.halves.bind(channel, half)

    def settled(self, letters: list[Any], outcome: Outcome) -> None:
        """It is known what became of messages."""
        if self.channel.putters and self.half.ended:
            self.halves.end(self.channel, _SENDER_ENDS[self.half.state])  # what is settled by the end makes no room
        self.channel.settle(*letters, outcome=outcome)

    def ended(self) -> None:
        """The half is gone. Source: section 8 of the protocol."""
        self.halves.outbound.pop(self.half, None)
        self.halves.end(self.channel, _SENDER_ENDS[self.half.state])
        self.retire()

    def give_up(self, detail: str) -> None:
        """See `HalfActor.give_up`."""
        self.channel.end(TerminalState.CANCELLED, detail=detail)

    def _ended_here(self) -> None:
        """The channel has ended, by its owner or the peer; finishing is the peer's to confirm."""
        if not self.half.ended:
            if self.channel.sender.state is TerminalState.FINISHED:
                self.half.finish()
            else:
                self.half.cancel()
            self.halves.flush_soon()


_SENDER_ENDS: Final = {
    SenderState.FINISHED: TerminalState.FINISHED,
    SenderState.CANCELLED: TerminalState.CANCELLED,
    SenderState.RECEIVER_CLOSED: TerminalState.RECEIVER_CLOSED,
    SenderState.LOST: TerminalState.LOST,
    SenderState.CONNECTION_LOST: TerminalState.CONNECTION_LOST,
}


class Inbound(HalfActor):
    """The place of a sender that is at the peer: puts what arrives into the channel, while that has room."""

    channel: ChannelCore
    half: ReceiverHalf = attrs.field(kw_only=True)
    _held: Arrival | None = attrs.field(default=None, init=False)
    """Taken, and the channel had no room."""
    _waiting: bool = attrs.field(default=False, init=False)
    """Whether the channel will call when it has."""
    _final: TerminalState | None = attrs.field(default=None, init=False)
    """How the channel ends when everything that arrived is in it."""
    _busy: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.halves.inbound[self.half] = self

    def start(self) -> None:
        """Begin; the message that the half travels in has been sent, or opened."""
        gone = self.half.ended
        if not gone:
            self.begin()
        self.channel.sender.on_terminated(self._ended_here)
        if gone:
            self.ended()
        else:
            self.pump()

    def pump(self) -> None:
        """Put what has arrived into the channel."""
        if self._busy or self._waiting:
            return
        self._busy = True
        try:
            self._move()
        finally:
            self._busy = False
        self.halves.flush_soon()

    def _move(self) -> None:
        channel, half, halves = self.channel, self.half, self.halves
        mailbox, queue = half.mailbox, channel.queue
        channel.enveloped = True
        while channel.sender.state is _OPEN:
            arrival = self._held
            if arrival is None:
                delivery = self._take()
                if delivery is None:
                    break
                arrival = self._held = Arrival(halves, delivery, channel.item_type)
                halves.received += 1
            self._held = None
            if len(queue) < channel.limit and not channel.takers and channel.consumer is None:
                queue.append(arrival)  # as `offer` does, without two calls for each message
            elif not channel.offer(arrival, self._room):
                self._held, self._waiting = arrival, True
                return
        if self._final is not None and self._held is None and not mailbox:
            final, self._final = self._final, None
            if final is TerminalState.FINISHED:
                channel.finish_producer()
            else:
                halves.end(channel, final, discard=False)

    def _take(self) -> Delivery | None:
        """Take a message for the channel out of the half's mailbox, if there is one."""
        return self.half.take(release=False) if self.half.mailbox else None

    def _room(self) -> None:
        self._waiting = False
        self.pump()

    def ended(self) -> None:
        """The half is gone; what is in its mailbox is still to be had, unless it was cancelled or lost."""
        state = self.half.state
        self.halves.inbound.pop(self.half, None)
        if state in (ReceiverState.CANCELLED, ReceiverState.CLOSED):
            self.halves.end(self.channel, _RECEIVER_ENDS[state])
        else:
            self._final = _RECEIVER_ENDS[state]
            self.pump()
        self.retire()

    def give_up(self, detail: str) -> None:
        """See `HalfActor.give_up`."""
        self.channel.end(TerminalState.RECEIVER_CLOSED, detail=detail)

    def _ended_here(self) -> None:
        """The channel has ended: by its receiver, or as the half did."""
        if self._held is not None:
            held, self._held = self._held, None
            held.settle(Outcome.NOT_PROCESSED)
        self.half.close()
        self.halves.flush_soon()


_RECEIVER_ENDS: Final = {
    ReceiverState.FINISHED: TerminalState.FINISHED,
    ReceiverState.CANCELLED: TerminalState.CANCELLED,
    ReceiverState.CLOSED: TerminalState.RECEIVER_CLOSED,
    ReceiverState.LOST: TerminalState.LOST,
    ReceiverState.CONNECTION_LOST: TerminalState.CONNECTION_LOST,
}
