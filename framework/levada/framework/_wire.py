"""The codec's wire format: packing, unpacking, attachments, and the paths of errors. `levada.framework.codec` has the theory."""

from __future__ import annotations

import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgpack

from .errors import LevadaError

if TYPE_CHECKING:
    from ._shapes import Shape

EXT_ATTACHMENT = 1
EXT_MESSAGE = 2
# Payloads of all messages in one, each counted again at every level around it, may be this many times `max_bytes`.
COPIES = 8
# Octets from which a scan for completeness precedes building: below, the worst claim of nested headers is 3 MB.
SCAN_FROM = 1024
# Handles of one message: each takes some µs to make.
MAX_HANDLES = 16_384
# Octets from which a message is unpacked field by field: below, what is made in vain before a misfit is found is 6 MB.
PIECEMEAL_FROM = 1 << 16
# Octets from which a message may be bulk, and the values that bulk has at most.
BULK_FROM, BULK_VALUES = 1 << 14, 64
NAMES = reprlib.Repr()
NAMES.maxstring = NAMES.maxother = 60


class AttachmentKind(IntEnum):
    """The kind of a handle, from the view of the message's receiver; the byte on the wire."""

    SENDER = 0
    """The receiver of the message may send."""
    RECEIVER = 1
    """The receiver of the message may receive."""
    ONESHOT_SENDER = 2
    """As `SENDER`, for exactly one value."""
    ONESHOT_RECEIVER = 3
    """As `RECEIVER`, for exactly one value."""
    REF = 4
    """A reference to an actor on the side of the message's sender."""
    RETURNED_REF = 5
    """A reference that goes home: the number is the one its owner gave it, no attachment of this message."""
    THIRD_REF = 6
    """A reference to an actor of a third system: the number is its owner's, no attachment of this message."""


REFS = (AttachmentKind.REF, AttachmentKind.RETURNED_REF, AttachmentKind.THIRD_REF)
"""The forms in which a ref arrives."""
_NOTED = (AttachmentKind.REF, AttachmentKind.THIRD_REF)
_HANDLES: dict[Any, AttachmentKind] = {kind.name.lower(): kind for kind in AttachmentKind}


class Attachable(Protocol):
    """A handle that can be sent inside a message. If its class is generic, ``Handle[T]`` in an annotation gives the item type."""

    attachment_kind: ClassVar[str]
    """The name of an `AttachmentKind` in lower case; not ``"returned_ref"`` or ``"third_ref"``, which only `Attachments.attach` returns."""


class Attachments(Protocol):
    """Takes the handles of one message while it is encoded."""

    def attach(self, handle: Any, /) -> tuple[AttachmentKind, int] | tuple[AttachmentKind, int, bytes]:
        """Take a handle; return its kind and number for the wire; for a `REF` or a `THIRD_REF` also bytes that identify the actor.

        Any error (`HandleMoved`, for example) ends the encoding and reaches the caller of `Codec.encode` unchanged.
        """
        ...

    def rollback(self) -> None:
        """Give every handle taken so far back to its owner, because the encoding failed."""


Detach = Callable[..., Any]
"""Returns the handle for an attachment's number, kind and item type (as annotated); for a ref perhaps also the bytes that identify it.

`ValueError`, `LookupError` or a `LevadaError` from it becomes the `DecodeError` of the message.
"""


def kind_of(cls: type) -> AttachmentKind | None:
    """Return the kind of an `Attachable` class; None for other classes."""
    return _HANDLES.get(getattr(cls, "attachment_kind", None))


class Misfit(Exception):
    """A value does not fit; `path` grows from the inside out while this travels up."""

    def __init__(self, detail: str, kind: type[Exception] = TypeError, path: str = "") -> None:
        self.detail = detail
        self.kind = kind
        self.path = path


class Pairs(list[tuple[Any, Any]]):
    """An unpacked map: keys not yet hashed, so that none is lost."""

    __slots__ = ()


def _ext(code: int, data: bytes) -> tuple[int, bytes]:
    # Arrays are lists, so a tuple is always an ext value; an ExtType would cost 0.4 µs more.
    return code, data


# RecursionError comes from msgpack without its C extension, which otherwise has a limit of its own.
_MALFORMED = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)


def _malformed(error: Exception) -> Misfit:
    return Misfit(f"not valid msgpack: {str(error) or type(error).__name__}")


def unpack(data: bytes) -> Any:
    """Exactly one msgpack value: arrays as lists, maps as `Pairs`, timestamps as datetimes in UTC, other ext values as ``(code, payload)``."""
    try:
        if len(data) >= SCAN_FROM and not is_bulk(data):
            _scan(data)
        return msgpack.unpackb(data, ext_hook=_ext, object_pairs_hook=Pairs, strict_map_key=False, timestamp=3)
    except _MALFORMED as error:
        raise _malformed(error) from error


def unpack_all(payloads: Sequence[bytes]) -> list[Any]:
    """Unpack each; 0.1 µs less than `unpack` for short ones."""
    if max(map(len, payloads), default=0) >= SCAN_FROM:
        return [unpack(payload) for payload in payloads]
    try:
        return [
            msgpack.unpackb(payload, ext_hook=_ext, object_pairs_hook=Pairs, strict_map_key=False, timestamp=3)
            for payload in payloads
        ]
    except _MALFORMED as error:
        raise _malformed(error) from error


def _scan(data: bytes) -> None:
    """Raise `ValueError` unless the data is one complete value, without building it."""
    scanner = msgpack.Unpacker(max_buffer_size=len(data))
    scanner.feed(data)
    scanner.skip()
    if scanner.tell() < len(data):
        raise ValueError("unpack(b) received extra data.")


class Row:
    """The row of a large message, unpacked item by item."""

    __slots__ = ("_payload", "_unpacker", "size", "tag")

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self.tag: Any = None
        """The first item; None if there is none."""
        try:
            _scan(payload)
            self._unpacker = msgpack.Unpacker(
                ext_hook=_ext, object_pairs_hook=Pairs, strict_map_key=False, timestamp=3, max_buffer_size=len(payload)
            )
            self._unpacker.feed(payload)
            self.size = self._unpacker.read_array_header() if _KINDS[payload[0]] is list else 0
            """Items."""
            if self.size and not is_container(payload[self._unpacker.tell()]):
                self.tag = self._unpacker.unpack()
        except _MALFORMED as error:
            raise _malformed(error) from error

    def fields(self, shapes: Iterable[Shape]) -> Iterator[Any]:
        """Unpack the items after the tag, as many as there are shapes; refuse a misplaced container before it is built."""
        for _, shape in zip(range(self.size - 1), shapes, strict=False):
            refuse_container(self._payload[self._unpacker.tell()], shape)
            try:
                wire = self._unpacker.unpack()
            except _MALFORMED as error:
                raise _malformed(error) from error
            yield wire


# The type that `unpack` makes of a value, by the octet that it begins with.
_KINDS: list[Any] = [
    *[int] * 0x80,
    *[Pairs] * 0x10,
    *[list] * 0x10,
    *[str] * 0x20,
    *[types.NoneType, tuple, bool, bool, bytes, bytes, bytes, tuple, tuple, tuple, float, float],
    *[int] * 8,
    *[tuple] * 5,
    *[str, str, str, list, list, Pairs, Pairs],
    *[int] * 0x20,
]
PLAIN_KINDS: list[Any] = [NotImplemented if kind in (list, Pairs, tuple) else kind for kind in _KINDS]
"""The same for types that need no conversion; for the others a value that is not a type."""
# Octets that a value takes, where the one that it begins with says so; of containers and messages only the header is meant.
_SIZES = [
    *[1] * 0xA0,
    *range(1, 0x21),
    *[1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 0, 0, 0, 0, 0, 0, 0, 0, 3, 5, 3, 5],
    *[1] * 0x20,
]
# For the others: octets of their length (or the length itself, below 0), and whether the code of an ext value follows it.
_LENGTHS = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1), 0xD4: (-1, 1), 0xD5: (-2, 1),
    0xD6: (-4, 1), 0xD7: (-8, 1), 0xD8: (-16, 1), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
}  # fmt: skip
# A list, a map or an ext value takes about as much memory and time as 8 others: 64 octets and more, 1 µs as `Any`.
_HEAVY = bytes(octet for octet, kind in enumerate(_KINDS) if kind in (list, Pairs, tuple))
_WEIGHTS = [8 if octet in _HEAVY else 1 for octet in range(0x100)]


def is_bulk(data: bytes) -> bool:
    """Whether data is a few values, most of it long strings or bytes, so that it can be built without a scan for completeness.

    No container among them claims more than 15 items. With 270 kB of bytes, decoding takes 0.3 of the time.
    """
    size = len(data)
    if size < BULK_FROM:
        return False
    at = 0
    for _ in range(BULK_VALUES):
        if at >= size:
            return True
        octet = data[at]
        if 0xDC <= octet <= 0xDF:
            return False
        at += _SIZES[octet] or _long(data, at)
    return at >= size


def _long(data: bytes, at: int) -> int:
    """Octets of a string, of bytes, or of an ext value that has its length after the first octet."""
    width, code = _LENGTHS[data[at]]
    if width < 0:
        return 2 - width
    return 1 + width + code + int.from_bytes(data[at + 1 : at + 1 + width], "big")


def message_start(data: bytes) -> int:
    """Where the payload of a message begins that is all of the data, below `PIECEMEAL_FROM` octets; 0 if it is something else."""
    size = len(data)
    if size < 3:
        return 0
    octet = data[0]
    if octet == 0xC7:
        return 3 if data[2] == EXT_MESSAGE and data[1] == size - 3 else 0
    if octet == 0xC8:
        return 4 if size > 4 and data[3] == EXT_MESSAGE and data[1] << 8 | data[2] == size - 4 else 0
    fixed = 0xD4 <= octet <= 0xD8 and data[1] == EXT_MESSAGE and 1 << (octet - 0xD4) == size - 2
    return 2 if fixed else 0


def is_container(octet: int) -> bool:
    """Whether a value that begins with this octet is a list or a map."""
    return _KINDS[octet] in (list, Pairs)


def refuse_container(octet: int, shape: Shape) -> None:
    """Refuse a misplaced list or map, by its first byte."""
    if is_container(octet) and shape.wire_kinds and _KINDS[octet] not in shape.wire_kinds:
        raise Misfit(f"expected {shape.name}, got {got(_KINDS[octet]())}")


def has_at_most(data: bytes, most: int) -> bool:
    """Whether a message has at most so many values, before any is built; see `Codec.max_items`."""
    # Most are known to be few by counting the octets that a container may begin with, 2 ns each; else each value is looked at, for 0.1 µs,
    # until there are too many. Of bulk, which has few, the first ones are looked at before the octets are counted.
    if 8 * len(data) <= most:
        return True
    weights, sizes = _WEIGHTS, _SIZES
    left, at, end = most, 0, len(data)
    uncounted = BULK_VALUES if end >= BULK_FROM else 0
    ends: list[int] = []
    while True:
        while at < end:
            if not uncounted:
                rest = len(data) - at
                if rest <= left and rest + 7 * (rest - len(data[at:].translate(None, _HEAVY))) <= left:
                    return True
            uncounted -= 1
            octet = data[at]
            left -= weights[octet]
            if left < 0:
                return False
            size = sizes[octet]
            if size:
                at += size
                continue
            width, code = _LENGTHS[octet]
            at += 1
            size = -width
            if width > 0:
                size = int.from_bytes(data[at : at + width], "big")
                at += width
            at += code
            if code and data[at - 1 : at] == b"\x02":  # EXT_MESSAGE
                ends.append(end)
                end = min(at + size, end)
            else:
                at += size
        if not ends:
            return True
        at, end = end, ends.pop()


def ext_value(code: int, payload: bytes) -> Any:
    # What ExtType(code, payload) makes, without its checks: 0.3 µs less.
    return tuple.__new__(msgpack.ExtType, (code, payload))


# What precedes a message's payload of 0 to 255 octets.
_HEADERS = [msgpack.packb(msgpack.ExtType(EXT_MESSAGE, bytes(size)))[: -size or None] for size in range(256)]


def pack_message(row: tuple[Any, ...], packer: msgpack.Packer, *, bulky: bool) -> bytes:
    """A whole message; `bulky` if bytes may be in its row. The header from a table saves 0.3 µs over packing an `msgpack.ExtType`."""
    if bulky:
        for value in row:
            if type(value) is bytes and len(value) >= BULK_FROM:
                return _pack_bulk(row, packer)
    payload = packer.pack(row)
    return _HEADERS[len(payload)] + payload if len(payload) < 256 else packer.pack(ext_value(EXT_MESSAGE, payload))


def _pack_bulk(row: tuple[Any, ...], packer: msgpack.Packer) -> bytes:
    """The same for a row with long bytes, which are copied once: 0.2 of the time for 270 kB."""
    parts = [b"", packer.pack_array_header(len(row))]
    for value in row:
        if type(value) is bytes and 0x10000 <= len(value) < 1 << 32:
            parts += (b"\xc6", len(value).to_bytes(4, "big"), value)
        else:
            parts.append(packer.pack(value))
    size = sum(map(len, parts))
    if not 0x10000 <= size < 1 << 32:
        return packer.pack(ext_value(EXT_MESSAGE, b"".join(parts)))
    parts[0] = b"\xc9" + size.to_bytes(4, "big") + b"\x02"  # EXT_MESSAGE
    return b"".join(parts)


class Out:
    """One call of `Codec.encode`."""

    __slots__ = ("attachments", "budget", "max_items", "packer")

    def __init__(self, attachments: Attachments | None, *, max_bytes: int, max_items: int) -> None:
        self.attachments = attachments
        self.max_items = max_items
        self.budget = max_bytes * COPIES
        self.packer = msgpack.Packer(datetime=True)  # threads cannot share one; making one costs 0.1 µs

    def pack(self, plain: Any, steps: Iterable[str] = ()) -> bytes:
        """Pack what shapes have lowered. The values only msgpack refuses (too large an int, half a surrogate pair) are searched for afterwards."""
        try:
            return self.packer.pack(plain)
        except (ValueError, OverflowError) as error:
            if isinstance(plain, dict):
                inner = [(f"[key {NAMES.repr(k)}]", k) for k in plain] + [
                    (f"[{NAMES.repr(k)}]", item) for k, item in plain.items()
                ]
            elif isinstance(plain, list | tuple):
                inner = list(zip(steps or (f"[{i}]" for i in range(len(plain))), plain, strict=True))
            else:
                inner = []
            for step, item in inner:
                try:
                    self.pack(item)
                except Misfit as misfit:
                    misfit.path = step + misfit.path
                    raise
            if isinstance(plain, int):
                what = f"expected an int from -2**63 to 2**64-1, got one of {plain.bit_length()} bits"
                raise Misfit(what, ValueError) from error
            raise Misfit(str(error), ValueError) from error

    def attach(self, handle: Any) -> Any:
        if self.attachments is None:
            raise Misfit(f"{type(handle).__qualname__} cannot travel here: this place takes no attachments")
        kind, number, *note = self.attachments.attach(handle)
        groups = bytearray([kind])
        while number > 0x7F:
            groups.append(number & 0x7F | 0x80)
            number >>= 7
        groups.append(number)
        return ext_value(EXT_ATTACHMENT, b"".join((groups, *note)))


class In:
    """One call of `Codec.decode`."""

    __slots__ = ("budget", "detach", "handles", "max_depth", "max_items", "root", "seen")

    def __init__(self, detach: Detach | None, *, max_bytes: int, max_items: int, max_depth: int) -> None:
        self.detach = detach
        self.max_depth = max_depth
        self.max_items = max_items
        self.budget = max_bytes * COPIES
        self.handles = MAX_HANDLES
        self.root = ""
        self.seen: set[int] = set()

    def take(self, attachment: tuple[AttachmentKind, int, bytes], item: Any) -> Any:
        """The handle of an attachment, as `read_attachment` returns it."""
        kind, number, note = attachment
        self.handles -= 1
        if self.handles < 0:
            raise Misfit(f"more than {MAX_HANDLES} handles")
        if self.detach is None:
            raise Misfit("an attachment where none can be")
        if kind is not AttachmentKind.RETURNED_REF and kind is not AttachmentKind.THIRD_REF:
            if number in self.seen:
                raise Misfit(f"attachment {number} is used twice")
            self.seen.add(number)
        try:
            return self.detach(number, kind, item, note) if note else self.detach(number, kind, item)
        except (ValueError, LookupError, LevadaError) as error:
            raise Misfit(f"attachment {number}: {error}") from error


def read_attachment(payload: bytes) -> tuple[AttachmentKind, int, bytes]:
    """Return the kind, the number, and the remaining bytes, which only a `REF` and a `THIRD_REF` may have."""
    number = 0
    for size, octet in enumerate(payload[1:11], 1):
        number |= (octet & 0x7F) << 7 * (size - 1)
        if octet < 0x80:
            note = payload[size + 1 :]
            shortest = octet or size == 1
            if shortest and payload[0] < len(AttachmentKind) and number < 1 << 64:
                kind = AttachmentKind(payload[0])
                if not note or kind in _NOTED:
                    return kind, number, note
            break
    raise Misfit(f"not an attachment: {payload[:8].hex()}")


def wire_key(wire: Any) -> Any:
    """Return the key by which a union chooses its member: msgpack's type, "message", or the kind of an attachment."""
    if type(wire) is not tuple:
        return type(wire)
    if wire[0] == EXT_MESSAGE:
        return "message"
    if wire[0] == EXT_ATTACHMENT:
        return read_attachment(wire[1])[0]
    raise Misfit(f"unknown ext type {wire[0]}")


def got(wire: Any) -> str:
    key = wire_key(wire)
    if isinstance(key, AttachmentKind):
        return f"an attachment ({key.name.lower()})"
    if key == "message":
        return "a message"
    return str({types.NoneType: "None", Pairs: "dict"}.get(key, key.__name__))
