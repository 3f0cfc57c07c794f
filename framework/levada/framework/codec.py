"""The message codec: message classes to msgpack and back, by their annotations.

On the wire
    A message is ext type 2; its payload is a msgpack array ``[tag, field, …]``, fields in definition order (base classes first).
    An attachment is ext type 1; its payload is one octet for the `AttachmentKind`, then its number as an unsigned base-128 integer, least
    significant group first, bit 7 set on every octet but the last, the fewest octets possible, below 2**64; for a `REF` and
    a `THIRD_REF`, octets that identify the actor may follow.
    Ext type -1 is msgpack's timestamp. Other ext types are errors. Nothing is pickled, and the wire never makes us import anything.

What a field may hold
    ===========================================  ====================================================================
    annotation                                   on the wire
    ===========================================  ====================================================================
    None, bool, int, float, str, bytes           themselves; int from -2**63 to 2**64-1; an int in a float field is made a float
    list[T], Sequence[T], tuple[T, U],           array (a set: no item twice, written in the order of its octets)
    tuple[T, ...], set[T], frozenset[T]
    dict[K, V], Mapping[K, V]                    map; no key twice
    Enum classes, Literal[...]                   the value (str or int); of Flag classes only bits that members have
    datetime                                     timestamp; needs a timezone, arrives in UTC
    date, Decimal                                str: ISO 8601, decimal digits
    timedelta                                    int: microseconds
    UUID                                         bytes: the 16 octets
    a message class                              ext 2 of this class or of a registered subclass
    Sender[T] and whatever else is `Attachable`  ext 1
    A | B                                        as the member; members must differ on the wire (messages count as one)
    Any                                          None, bool, int, float, str, bytes, datetime, list, dict, messages, handles;
                                                 a tuple arrives as a list, so it is refused as a key and in a set
    ===========================================  ====================================================================

Growth
    Add fields only at the end and with a default. Values beyond the last known field are ignored; missing fields take their defaults.

How it works
    An annotation is compiled once into a `Shape`: two closures, `lower` (value to msgpack's types) and `lift` (back). A nested message is
    packed before the one around it, so one packer is enough. For messages of usual values there is straight code (`_straight`); whatever
    it does not take goes through the closures, which find the place of a bad value.

    Decoding trusts no length: msgpack refuses lengths beyond the end of the data, larger payloads are first scanned for completeness
    (otherwise a thousand nested headers could each claim a list as long as the message), and payloads of nested messages, copied once
    per level, share one budget. The values of a whole message are counted before the first is built; n bytes are at most n values, so
    most messages need no counting. A large message is unpacked field by field, so nothing behind a misfit is built.

    A message inside another costs 0.9 µs to encode and 1.1 µs to decode (four fields, one of them a list), in a list of 100 0.7 and 1.0 µs;
    making the object is 0.2 µs of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, TypeVar, overload

import attrs
from attrs import validators as v
from msgpack import Packer

from ._shapes import PLAIN, plan_of, shape_of
from ._straight import DEPTH, LEVELS
from ._wire import (
    EXT_MESSAGE,
    PLAIN_KINDS,
    SCAN_FROM,
    Attachable,
    AttachmentKind,
    Attachments,
    Detach,
    In,
    Misfit,
    Out,
    has_at_most,
    message_start,
    pack_message,
    refuse_container,
    unpack,
)
from .annotations import type_name
from .errors import DecodeError
from .message import BY_TAG, is_message

__all__ = [
    "Attachable", "AttachmentKind", "Attachments", "Codec", "Detach", "has_at_most", "schema_fingerprint",
    "schema_of", "type_name",
]  # fmt: skip

_BIN8 = [bytes((0xC4, size)) for size in range(0x100)]
"""The heads of short bytes in msgpack."""

T = TypeVar("T")

_TOO_MANY = "more than {} items in all, a container or a message counted as 8 (max_items)"


@attrs.frozen(kw_only=True)
class Codec:
    """Turns values into bytes and back. Immutable and stateless; threads may share it.

    Example:
        >>> from levada.framework.message import message
        >>> @message("docs.Quote")
        ... class Quote:
        ...     symbol: str
        ...     bids: list[float]
        >>> octets = Codec().encode(Quote("EURUSD", [1.08, 1.07]))
        >>> Codec().decode(octets)
        Quote(symbol='EURUSD', bids=[1.08, 1.07])
        >>> Codec().decode(octets[:-1])
        Traceback (most recent call last):
        ...
        levada.framework.errors.DecodeError: not valid msgpack: Unpack failed: incomplete input
        >>> Codec().encode(Quote("EURUSD", [1.08, "n/a"]))
        Traceback (most recent call last):
        ...
        TypeError: Quote.bids[1]: expected float, got str
    """

    max_bytes: int = attrs.field(default=16 * 2**20, validator=[v.instance_of(int), v.ge(1)])
    """The most bytes of one encoded value, in both directions."""
    max_depth: int = attrs.field(default=64, validator=[v.instance_of(int), v.ge(1), v.le(128)])
    """The deepest nesting of containers and messages, including the outermost; up to 128."""
    max_items: int = attrs.field(default=2**20, validator=[v.instance_of(int), v.ge(0)])
    """The most values in one message, at any depth and in both directions. Numbers, texts, keys and fields count 1 each; a container, a
    nested message or an attachment counts 8. Below 1,024 bytes only the items of each container are counted."""
    _levels: int = attrs.field(init=False, eq=False, repr=False)
    """Messages inside a message that straight code takes; below 0 it takes only fields that are no containers."""

    @_levels.default  # pyright: ignore[reportAttributeAccessIssue]  # it is attrs' field here
    def _levels_of_depth(self) -> int:
        # An octet has at most one item, so below `SCAN_FROM` of them nothing has to be counted.
        return min(LEVELS, self.max_depth // DEPTH - 1) if self.max_items >= SCAN_FROM else -1

    def encode(self, value: Any, expected: Any = Any, *, attachments: Attachments | None = None) -> bytes:
        """Encode one value.

        Args:
            value: a message, or any value of the table in this module's docstring.
            expected: the annotation to encode as, for example the item type of a channel. It decides the encoding of values other than
                messages (``UUID``, ``set[int]``).
            attachments: takes the handles inside. Without it, a handle is an error. On success the caller sends them or rolls them back.

        Raises:
            TypeError: a value does not fit its field, or cannot travel; names the path.
            ValueError: a value cannot be written (an int of more than 64 bits, a datetime without timezone) or is over a limit; names the
                path.
            ConfigurationError: the annotation of a field of a message class cannot travel or cannot be resolved.
            LevadaError: from ``attachments.attach``. After any error, all handles have been given back.
        """
        cls = type(value)
        if cls is expected and cls in PLAIN:
            if cls is bytes and len(value) < 0x100 <= self.max_bytes - 2:
                short: bytes = _BIN8[len(value)] + value
                return short  # half of what a `Packer` takes
            # msgpack's own types need no shape, which halves the time.
            try:
                encoded = Packer(datetime=True).pack(value)
            except (ValueError, OverflowError):
                pass
            else:
                if len(encoded) <= self.max_bytes:
                    return encoded
        plan = getattr(cls, "__message_plan__", None)
        if plan is not None and plan.cls is cls and plan.lower_row is not None and (expected is Any or expected is cls):
            # A message of plain fields costs 2.2 times a packb() of the same row here, 6.5 times by way of shapes.
            packer = Packer(datetime=True)
            try:
                row = plan.lower_row(value, packer.pack, self._levels)
                encoded = pack_message(row, packer, bulky=plan.bulky)
            except Exception:  # noqa: BLE001 - the careful way below meets it again and reports it
                pass
            else:
                size = len(encoded)
                if size <= self.max_bytes and (
                    plan.flat or (self._levels >= 0 and (size < SCAN_FROM or has_at_most(encoded, self.max_items)))
                ):
                    return encoded
        shape = shape_of(expected)
        out = Out(attachments, max_bytes=self.max_bytes, max_items=self.max_items)
        try:
            encoded = out.pack(shape.lower(value, out, self.max_depth))
            if len(encoded) > self.max_bytes:
                raise Misfit(f"{len(encoded)} bytes, at most {self.max_bytes} (max_bytes)", ValueError)
            if len(encoded) >= SCAN_FROM and not has_at_most(encoded, self.max_items):
                raise Misfit(_TOO_MANY.format(self.max_items), ValueError)
        except BaseException as error:
            if attachments is not None:
                attachments.rollback()
            if not isinstance(error, Misfit):
                raise
            root = cls.__name__ if is_message(cls) else ""
            raise error.kind(
                f"{root}{error.path}: {error.detail}" if root + error.path else error.detail
            ) from error.__cause__
        return encoded

    @overload
    def decode(self, data: bytes | bytearray | memoryview, expected: type[T], *, detach: Detach | None = None) -> T: ...
    @overload
    def decode(
        self, data: bytes | bytearray | memoryview, expected: Any = Any, *, detach: Detach | None = None
    ) -> Any: ...
    def decode(self, data: bytes | bytearray | memoryview, expected: Any = Any, *, detach: Detach | None = None) -> Any:
        r"""Decode exactly one value.

        Args:
            data: the whole value and nothing more.
            expected: an annotation that the value must fit. `Any` admits every message class that this process has imported.
            detach: makes handles of attachments. Without it, an attachment is an error.

        Raises:
            DecodeError: the data is not such a value; names path and cause. The caller drops the handles that ``detach`` has returned.
            ConfigurationError: ``expected``, or a field of it if it is a message class, cannot travel or cannot be resolved.

        Example:
            >>> Codec().decode(b"\x92\x01\xa3two", list[int])
            Traceback (most recent call last):
            ...
            levada.framework.errors.DecodeError: [1]: expected int, got str
        """
        if type(data) is not bytes:
            if not isinstance(data, bytearray | memoryview):
                raise TypeError(f"decode() got {type(data).__qualname__}, wanted bytes")
            data = bytes(data)
        size = len(data)
        if size > self.max_bytes:
            raise DecodeError(f"{size} bytes, at most {self.max_bytes} (max_bytes)")
        if size and PLAIN_KINDS[data[0]] is expected:
            if data[0] == 0xC4 and size > 1 and data[1] == size - 2:  # short bytes: half of what `unpack` takes
                return data[2:]
            try:
                return unpack(data)
            except Misfit as misfit:
                raise DecodeError(misfit.detail) from misfit.__cause__
        # With plain fields it costs 2.4 times an unpackb() of the same row together with making the object (5.4 times the unpackb() alone);
        # 6.2 times by way of shapes.
        # The usual header without a call: 0.1 µs.
        usual = size > 3 and data[0] == 0xC7 and data[2] == EXT_MESSAGE and data[1] == size - 3
        start = 3 if usual else message_start(data)
        if start and self._levels >= 0 and (size < SCAN_FROM or has_at_most(data, self.max_items)):
            try:
                row = unpack(data[start:])
                cls: Any = BY_TAG[row[0]]
                plan = cls.__message_plan__
                if plan.cls is cls and plan.lift_row is not None and (expected is Any or issubclass(cls, expected)):
                    return plan.lift_row(row, self._levels)
            except Exception:  # noqa: BLE001 - the careful way below meets it again and reports it; validators may raise anything
                pass
        shape = shape_of(expected)
        into = In(detach, max_bytes=self.max_bytes, max_items=self.max_items, max_depth=self.max_depth)
        try:
            if size >= SCAN_FROM:
                refuse_container(data[0], shape)
                if not has_at_most(data, self.max_items):
                    raise Misfit(_TOO_MANY.format(self.max_items))
            return shape.lift((EXT_MESSAGE, data[start:]) if start else unpack(data), into, self.max_depth)
        except Misfit as misfit:
            raise DecodeError(misfit.detail, into.root + misfit.path) from misfit.__cause__


def schema_fingerprint(classes: Iterable[type]) -> str:
    """Return eight hex digits that change with the tag or the fields (name, type, order) of any of these message classes.

    They are the same in every run and process; the order of ``classes`` does not matter.

    Raises:
        TypeError: one of them is not a message class.
        ConfigurationError: a field cannot travel or cannot be resolved.

    Example:
        >>> from levada.framework.message import message
        >>> @message("docs.Ping")
        ... class Ping:
        ...     number: int
        >>> schema_fingerprint([Ping])
        '28e94cf7'
    """
    lines = sorted(
        f"{plan.tag}({', '.join(f'{f.name}: {f.shape.name}' for f in plan.fields)})"
        for plan in map(plan_of, set(classes))
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def schema_of(classes: Iterable[type]) -> dict[str, list[tuple[str, str, bool]]]:
    """Describe message classes for comparison: tag to fields, each with its name, its type as written, and whether it has a default.

    Raises:
        TypeError: one of them is not a message class.
        ConfigurationError: a field cannot travel or cannot be resolved.

    Example:
        >>> from levada.framework.message import message
        >>> @message("docs.Pong")
        ... class Pong:
        ...     number: int
        ...     note: str = ""
        >>> schema_of([Pong])
        {'docs.Pong': [('number', 'int', False), ('note', 'str', True)]}
    """
    return {plan.tag: [(f.name, f.shape.name, f.has_default) for f in plan.fields] for plan in map(plan_of, classes)}
