"""The wire format of remote refs: envelopes, reasons, failures, identities and trace contexts. ``docs/protocols/aqueduct-refs.md`` specifies it.

An envelope is a msgpack array whose first item is its kind, always in the shortest form. So the bytes before a message are fixed, and the
codec's fast path reads the message after them.  Nothing here knows of channels or actors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import attrs

from levada.framework import Cancelled, Codec, Failed, Killed, Lost, Normal, Reason, Shutdown
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    DecodeError,
    LevadaError,
    MailboxFull,
    NoValue,
    RemoteFailure,
)
from levada.framework.text import text_of
from levada.framework.tracing import TraceHeaders

__all__ = [
    "ANSWER", "ANSWERS_GREETING", "ASK", "ASK_FIRST", "ASK_NEXT", "DONE", "DOWN", "EXIT", "FAILURE", "LINK", "LOAD", "LOADED",
    "MAX_NUMBER", "MAX_STAMP", "NUMBER_SIZE", "REPLY", "RETURNED", "TELL", "TRACE_GREETING", "WATCH", "WITHDRAWAL", "WORK", "WORK_ASK",
    "WORK_GREETING", "ActorIdentity", "encode_failure", "encode_load", "encode_signal", "encode_withdrawal", "error_from", "head_of",
    "read_done", "read_failure", "read_load", "read_number", "read_signal", "read_stamp", "read_withdrawal", "stamped",
]  # fmt: skip

# On the channel of a ref. A message follows the first two. Attachment 0 is the oneshot for the answer, or for the notice of the end.
TELL: Final = b"\x92\x00"
ASK: Final = b"\x93\x01\xd5\x01\x02\x00"
WATCH: Final = b"\x92\x02\xd5\x01\x02\x00"
LINK: Final = b"\x94\x03"
WORK: Final = b"\x93\x08\xd5\x01\x02\x00"
WORK_ASK: Final = b"\x94\x09\xd5\x01\x02\x00\xd5\x01\x02\x01"
LOAD: Final = b"\x92\x0b\xd5\x01\x02\x00"
# A number of `NUMBER_SIZE` bytes, then a message.
ASK_FIRST: Final = b"\x95\x0d\xd5\x01\x00\x00\xd5\x01\x01\x01\xce"
ASK_NEXT: Final = b"\x93\x0e\xce"
# On the channels that come with `ASK_FIRST`: a number, then an `ANSWER` or a `FAILURE`; a number.
REPLY: Final = b"\x93\x0f\xce"
WITHDRAWAL: Final = b"\x92\x10\xce"
# On oneshots.
ANSWER: Final = b"\x92\x04"
FAILURE: Final = b"\x94\x05"
DOWN: Final = b"\x92\x06"
EXIT: Final = b"\x92\x07"
DONE: Final = b"\x92\x0a\xc3"
RETURNED: Final = b"\x92\x0a\xc2"
LOADED: Final = b"\x92\x0c"

WORK_GREETING: Final = ("levada-work", b"1")
"""Connection header: this side understands `WORK`, `WORK_ASK` and `LOAD`. A peer without it is sent none."""

ANSWERS_GREETING: Final = ("levada-answers", b"1")
"""Connection header: this side understands `ASK_FIRST` and `ASK_NEXT`. A peer without it is sent `ASK`."""

_HEADS: Final = {head[1]: head for head in (TELL, ASK, ASK_FIRST, ASK_NEXT, WATCH, LINK, WORK, WORK_ASK, LOAD)}

NUMBER_SIZE: Final = 4
"""Bytes of the number of a question."""
MAX_NUMBER: Final = 2**32 - 1
"""The number of a question after that is 0 again."""

MAX_TEXT: Final = 4096
"""The most characters of a text about a failure; the rest is cut off."""
MAX_PATH: Final = 4096
"""The most bytes of a path."""
ID_SIZE: Final = 16
"""Bytes of a node id, and of the key of an actor."""
MAX_LOAD: Final = 2**32 - 1
"""The most messages that an answer to a `LOAD` counts."""

_PLAIN = Codec(max_bytes=8 * MAX_TEXT)  # a character has up to four bytes, and a failure has two texts


def head_of(payload: bytes) -> bytes:
    """Return the head of an envelope from the channel of a ref: `TELL`, `ASK`, `ASK_FIRST`, `ASK_NEXT`, `WATCH`, `LINK`, `WORK` or another.

    Raises:
        DecodeError: the head is unknown, or not in the prescribed form.
    """
    head = _HEADS.get(payload[1]) if len(payload) > 1 else None
    if head is None or not payload.startswith(head):
        raise DecodeError(f"no envelope begins with {payload[:8].hex()}")
    return head


@attrs.frozen
class ActorIdentity:
    """Identifies the actor of a ref; travels with the ref."""

    incarnation: int
    """`Ref.incarnation`; a ref that returns home is sent as this number."""
    path: str
    """`Ref.path`; for people."""
    node: bytes = b""
    """In a fleet, the id of the node where the actor lives."""
    key: bytes = attrs.field(default=b"", repr=False)
    """In a fleet, the key of the actor: the holder of the key may use the actor."""

    @property
    def address(self) -> tuple[bytes, bytes, int]:
        """What tells the actors of a fleet apart: node id, key and incarnation, but not the path, which a third system may have made up."""
        return self.node, self.key, self.incarnation

    def encode(self) -> bytes:
        """Return the bytes of a `REF`: the incarnation as a base-128 integer, least significant group first, then the path in UTF-8.

        A key follows the path after a zero byte, which no path contains.
        """
        groups = bytearray()
        number = self.incarnation
        while number > 0x7F:
            groups.append(number & 0x7F | 0x80)
            number >>= 7
        groups.append(number)
        return bytes(groups) + self.path.encode() + (b"\0" + self.key if self.key else b"")

    def encode_third(self) -> bytes:
        """Return the bytes of a `THIRD_REF`, which follow the incarnation: the node id, the key, then the path in UTF-8."""
        return self.node + self.key + self.path.encode()

    @classmethod
    def decode(cls, data: bytes, node: bytes = b"") -> ActorIdentity:
        """Read the identity in a `REF`.

        Args:
            data: the bytes that follow the index.
            node: id of the peer, if the connection is between members of a fleet.

        Raises:
            DecodeError: the number is cut off, not in the shortest form, or over 64 bits; the path is too long, not UTF-8 or not printable;
                the key has another size.
        """
        number = size = 0
        for size, octet in enumerate(data[:10], 1):
            number |= (octet & 0x7F) << 7 * (size - 1)
            if octet < 0x80:
                break
        else:
            raise DecodeError("a ref without a whole number")
        if number >= 1 << 64 or (size > 1 and not data[size - 1]):
            raise DecodeError("a ref whose number is over 64 bits, or longer than it need be")
        if not node:
            return cls(number, _path(data[size:]))
        path, zero, key = data[size:].partition(b"\0")
        if zero and len(key) != ID_SIZE:
            raise DecodeError(f"the key of a ref has {len(key)} bytes, wanted {ID_SIZE}")
        return cls(number, _path(path), node if key else b"", key)

    @classmethod
    def decode_third(cls, number: int, data: bytes) -> ActorIdentity:
        """Read the identity in a `THIRD_REF`.

        Raises:
            DecodeError: the node id or the key is cut off; the path is too long, not UTF-8 or not printable.
        """
        if len(data) < 2 * ID_SIZE:
            raise DecodeError("a third ref without a whole node id and key")
        return cls(number, _path(data[2 * ID_SIZE :]), data[:ID_SIZE], data[ID_SIZE : 2 * ID_SIZE])


def _path(data: bytes) -> str:
    if len(data) > MAX_PATH:
        raise DecodeError(f"a ref with a path of {len(data)} bytes, at most {MAX_PATH}")
    try:
        path = data.decode()
    except UnicodeDecodeError as error:
        raise DecodeError("a ref whose path is not UTF-8") from error
    if not path.startswith("/") or not path.isprintable():  # it shows up in logs
        raise DecodeError(f"a ref with the path {path[:60]!a}")
    return path


_NAMES: Final[dict[str, Reason]] = {
    "normal": Normal(),
    "shutdown": Shutdown(),
    "killed": Killed(),
    "cancelled": Cancelled(),
}


def _plain_reason(reason: Reason) -> list[str]:
    match reason:
        case Failed(error=error):
            return ["failed", *_describe(error)]
        case Lost(peer=peer):
            return ["lost", peer[:MAX_TEXT]]
        case _:
            return [type(reason).__name__.lower()]


def _reason(plain: Any, actor: str) -> Reason:
    match plain:
        case [str() as name] if name in _NAMES:
            return _NAMES[name]
        case ["failed", str() as kind, str() as text]:
            return Failed(RemoteFailure(text, actor=actor, kind=kind))
        case ["lost", str() as peer]:
            return Lost(peer)
        case _:
            raise DecodeError(f"no reason: {str(plain)[:60]!a}")


def read_number(head: bytes, payload: bytes) -> int:
    """Return the number that follows a head, with more after it.

    Raises:
        DecodeError: the head is another one, or nothing follows the number.
    """
    size = len(head)
    if not payload.startswith(head) or len(payload) <= size + NUMBER_SIZE:
        raise DecodeError(f"expected {head.hex()} and a number, got {payload[:12].hex()}")
    return int.from_bytes(payload[size : size + NUMBER_SIZE], "big")


def encode_withdrawal(number: int) -> bytes:
    """Write a `WITHDRAWAL`."""
    return WITHDRAWAL + number.to_bytes(NUMBER_SIZE, "big")


def read_withdrawal(payload: bytes) -> int:
    """Return the number of the question that is withdrawn.

    Raises:
        DecodeError: it is malformed.
    """
    if not payload.startswith(WITHDRAWAL) or len(payload) != len(WITHDRAWAL) + NUMBER_SIZE:
        raise DecodeError(f"expected {WITHDRAWAL.hex()} and a number, got {payload[:12].hex()}")
    return int.from_bytes(payload[-NUMBER_SIZE:], "big")


def encode_signal(head: bytes, reason: Reason) -> bytes:
    """Write a `DOWN` or an `EXIT`."""
    return head + _PLAIN.encode(_plain_reason(reason))


def read_signal(head: bytes, payload: bytes, actor: str) -> Reason:
    """Read a `DOWN` or an `EXIT` of the actor at that path.

    Raises:
        DecodeError: it is malformed.
    """
    if not payload.startswith(head):
        raise DecodeError(f"expected {head.hex()}, got {payload[:8].hex()}")
    return _reason(_PLAIN.decode(payload[len(head) :]), actor)


def read_done(payload: bytes) -> bool:
    """Return whether the work was done, and not returned.

    Raises:
        DecodeError: it is malformed.
    """
    if payload not in (DONE, RETURNED):
        raise DecodeError(f"expected the end of work, got {payload[:8].hex()}")
    return payload == DONE


def encode_load(waiting: int) -> bytes:
    """Write the answer to a `LOAD`."""
    return LOADED + _PLAIN.encode(min(waiting, MAX_LOAD))


def read_load(payload: bytes) -> int:
    """Read how many messages wait for an actor.

    Raises:
        DecodeError: it is malformed.
    """
    if not payload.startswith(LOADED):
        raise DecodeError(f"expected {LOADED.hex()}, got {payload[:8].hex()}")
    waiting = _PLAIN.decode(payload[len(LOADED) :])
    if type(waiting) is not int or not 0 <= waiting <= MAX_LOAD:
        raise DecodeError(f"no number of messages: {str(waiting)[:60]!a}")
    return waiting


def _describe(error: BaseException) -> tuple[str, str]:
    """Return the class name and the text of an exception; never fails, and returns at most `MAX_TEXT` characters of text."""
    if isinstance(error, RemoteFailure):
        return error.kind, error.detail
    return type(error).__name__, text_of(error)[:MAX_TEXT].encode("utf-8", "replace").decode()


def encode_failure(error: BaseException) -> bytes:
    """Write the failure that an asker gets in place of an answer: class, text, and one more value."""
    if type(error) is ActorError and isinstance(error.__cause__, RemoteFailure):
        error = error.__cause__  # from a third system: its class is kept, however many systems it passes through
    kind, text = _describe(error)
    more: Any = None
    if isinstance(error, ActorStopped):
        more = _plain_reason(error.reason or Normal())  # a program may raise it without a reason
    elif isinstance(error, MailboxFull):
        more = error.capacity
    return FAILURE + b"".join(_PLAIN.encode(item) for item in (kind, text, more))


def read_failure(payload: bytes) -> tuple[str, str, Any]:
    """Read the class, the text and the other value of a failure.

    Raises:
        DecodeError: it is malformed.
    """
    plain = _PLAIN.decode(payload)
    match plain:
        case [5, str() as kind, str() as text, more]:
            return kind, text, more
        case _:
            raise DecodeError(f"no failure: {payload[:8].hex()}")


def _stopped(text: str, actor: str, more: Any, message: Any) -> LevadaError:
    reason = _reason(more, actor)
    error = ActorStopped(text, actor=actor, reason=reason, message=message)
    error.__cause__ = getattr(reason, "error", None)
    return error


def _full(text: str, actor: str, more: Any, message: Any) -> LevadaError:
    capacity = more if isinstance(more, int) else 0
    return MailboxFull(text, actor=actor, capacity=capacity, message=message)


_ERRORS: Final[dict[str, Callable[[str, str, Any, Any], LevadaError]]] = {
    "ActorError": lambda text, actor, more, message: ActorError(text, actor=actor),
    "ActorStopped": _stopped,
    "MailboxFull": _full,
    "NoValue": lambda text, actor, more, message: NoValue(text),
}


def error_from(payload: bytes, actor: str, message: Any) -> LevadaError:
    """Make the error for the asker from a failure: levada's own classes unchanged, all others as an `ActorError` with a cause.

    Args:
        payload: the failure.
        actor: path of the asked actor.
        message: the question.

    Raises:
        DecodeError: the failure is malformed.
    """
    kind, text, more = read_failure(payload)
    make = _ERRORS.get(kind)
    if make is not None:
        return make(text, actor, more, message)
    error = ActorError(f"{actor} refused: {kind}: {text}", actor=actor)
    error.__cause__ = RemoteFailure(text, actor=actor, kind=kind)
    return error


# ---------------------------------------------------------------- the contexts of messages, between two sides that both trace

TRACE_GREETING: Final = ("levada-trace", b"1")
"""Connection header: this side reads stamps. A peer without it is sent none."""

_MARK: Final = b"\xc1"
"""The first byte of a stamp: no msgpack value begins with it."""
_HEAD: Final = struct.Struct(">55sH")
"""``traceparent``, and the size of ``tracestate``."""
_MAX_STATE: Final = 512
MAX_STAMP: Final = 1 + _HEAD.size + _MAX_STATE


def stamped(headers: TraceHeaders, payload: bytes) -> bytes:
    """Put a context before a payload. Source: RF-58."""
    state = headers.tracestate.encode("ascii")
    return b"".join((_MARK, _HEAD.pack(headers.traceparent.encode("ascii"), len(state)), state, payload))


def read_stamp(payload: bytes) -> tuple[TraceHeaders | None, bytes]:
    """Split a payload into the context, if there is a good one, and the rest.

    Raises:
        DecodeError: the stamp is cut, or its ``tracestate`` is too long.

    Source: RF-58, RF-59.
    """
    if payload[:1] != _MARK:
        return None, payload
    start = 1 + _HEAD.size
    if len(payload) < start:
        raise DecodeError("a stamp is cut")
    parent, size = _HEAD.unpack_from(payload, 1)
    if size > _MAX_STATE or len(payload) < start + size:
        raise DecodeError(f"a stamp with a tracestate of {size} bytes")
    state = payload[start : start + size].decode("ascii", "replace")
    return TraceHeaders.parse(parent.decode("ascii", "replace"), state), payload[start + size :]
