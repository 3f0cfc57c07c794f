"""Parse frames into events and control frames, in time linear in their bytes (LJ-5).

* Bytes are parsed in the buffer in which they arrived.  The parser keeps only the beginning of an unfinished item (a header, a pair, the
  payload of a J or C frame), and looks at it again once the item is complete.  So each byte is copied at most twice, however small the
  reads are.
* Parsing of a D frame may stop after any pair and resume at the next one.  No pair is parsed twice.
* A length is checked against its limit as soon as its four bytes have come, before anything of that size is allocated or awaited (LJ-45).

`FrameParser.parse` builds events; with `out=None` it only checks and counts them, which envelopes need (LJ-31a, LJ-42).
"""

from __future__ import annotations

import struct
from enum import Enum, auto
from gc import is_tracked
from typing import Any, TypeAlias

from levada.framework.errors import RemoteProtocolError
from levada.transports.lumberjack.config import ReaderConfig
from levada.transports.lumberjack.json_text import (
    BYTE_COST,
    FIELD_COST,
    OBJECT_COST,
    exact_cost,
    parse_json,
    structure_cost,
)

__all__ = ["EVENT_COST", "PAIR_COST", "FrameParser", "ParserStop"]

EVENT_COST = 256  # LJ-42: memory that an event takes beside its bytes
PAIR_COST = 128
_LARGE = 64 * 1024  # bytes above which a J frame or a value is a step of its own; JSON takes 160 ns a byte at worst
_SMALL = 1024  # bytes up to which a J frame is parsed before its cost is known
_FLAT_COST = EVENT_COST + OBJECT_COST
_SMALL_COST = EVENT_COST + _SMALL * (OBJECT_COST + BYTE_COST)  # upper bound for such a frame
_PIECE = 4 * 1024  # bytes; smaller pieces of an unfinished item are joined as they come
_HEAD = struct.Struct(">2sI")
_EVENT_HEAD = struct.Struct(">2sII")
_U32 = struct.Struct(">I")
_A, _C, _D, _J, _W = b"ACDJW"
_KEYS = 256  # keys whose text is cached, of up to _KEY bytes each
_KEY = 64
_EXPECTED = 32  # keys that are expected in the next event, of up to _KEY bytes each


_Expected: TypeAlias = tuple[tuple[bytes, int, str], ...]
"""The keys of the next event: each with its length in front, the bytes from there to its value, and its text."""


class ParserStop(Enum):
    """Why `FrameParser.parse` returned."""

    NEED_DATA = auto()
    FULL = auto()
    """`room` events were found."""
    COST = auto()
    """The cost has reached `cost_room`, or the next event would exceed it."""
    LARGE = auto()
    """The next event takes long to count or to build, or takes much memory. Other tasks should run first; the next call continues.
    `FrameParser.held` counts the event already."""
    WINDOW = auto()
    """A W frame: `FrameParser.window`."""
    ENVELOPE = auto()
    """A C frame: `FrameParser.payload`."""


class FrameParser:
    """Parses the frames of a writer, one after another.

    Args:
        version: 1 or 2; a frame of any other version is an error (LJ-3).
        config: the limits.
        depth: number of envelopes around these frames.
    """

    # fmt: off
    __slots__ = (
        "_ahead", "_at", "_base", "_config", "_data", "_depth", "_expected", "_fields", "_item_cost", "_items", "_keys", "_left", "_need", "_number",
        "_pairs", "_rate", "_tail", "_tail_size", "_types", "_used", "_version", "cost", "count", "payload", "sequence", "window",
    )  # fmt: skip
    # fmt: on

    def __init__(self, version: int, config: ReaderConfig, *, depth: int = 0) -> None:
        self._version = version
        self._config = config
        self._depth = depth
        self._types = (b"1D" if version == 1 else b"none", b"%dJ" % version)
        self._data = b""
        self._at = 0
        self._base = 0  # bytes before `_data`
        # An unfinished item, joined once: fifty buffers that grew to 9 MiB side by side left 700 MB of holes in the heap.
        self._tail: list[bytes | bytearray] = []
        self._tail_size = 0
        self._need = 1  # bytes that it needs
        self._left = -1  # pairs of an unfinished D frame; -1 at its header
        self._number = 0
        self._pairs = 0
        self._used = 0  # bytes of it that were parsed
        self._fields: dict[str, str] = {}
        self._keys: dict[bytes, str] = {}
        self._expected: _Expected | None = None  # until an event of `_data` is complete
        self._rate = 0.0  # cost of a byte of JSON in the rest of `_data`; 0 if it is not known yet
        self._items: list[Any] = []  # items of an array in version 1 that are still to be delivered, the last one first
        self._item_cost = 0
        # Cost of the next event if `LARGE` was returned for it; 0 until that is counted.
        self._ahead: int | None = None
        self.count = 0
        """Events that the last `parse` found."""
        self.cost = 0
        """Their cost (LJ-42)."""
        self.sequence = 0
        """Number of the last event."""
        self.window = 0
        """Size that the last W frame announced, in events."""
        self.payload = memoryview(b"")
        """Payload of the last C frame."""

    @property
    def in_frame(self) -> bool:
        """Whether the parser is inside a frame."""
        return bool(self._tail) or self._left >= 0

    @property
    def has_data(self) -> bool:
        """Whether `parse` can continue without more bytes."""
        return self._at < len(self._data) or bool(self._items)

    @property
    def large(self) -> bool:
        """Whether the next `parse` takes long."""
        return self._ahead is not None

    @property
    def announced(self) -> int:
        """Bytes that the unfinished frame has announced so far."""
        return self._used + self._need

    @property
    def held(self) -> int:
        """Bytes and costs of an unfinished frame, and the cost of a large event that comes next."""
        pairs = BYTE_COST * self._used + PAIR_COST * len(self._fields)
        # Items of an array are built already; `EVENT_COST` is counted when their events are made.
        items = (self._item_cost - EVENT_COST) * len(self._items)
        # While a large event is built, its text is also in memory as characters.
        ahead = self._ahead + BYTE_COST * len(self._data) if self._ahead else 0
        return self._tail_size + len(self._data) + pairs + items + ahead

    @property
    def frame_offset(self) -> int:
        """Bytes before the unfinished, or next, frame."""
        return self._base + self._at - self._used

    def head(self) -> bytes:
        """Return up to 32 bytes from the beginning of the frame in which `parse` stopped."""
        start = max(0, self._at - self._used)
        return self._data[start : start + 32] or b"".join(self._tail[:1])[:32]

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Call it only after `parse` has returned `ParserStop.NEED_DATA`, or before the first call."""
        if self._tail:
            last = self._tail[-1]
            if len(data) >= _PIECE:
                self._tail.append(data)
            elif isinstance(last, bytearray) and len(last) < _LARGE:
                last += data
            else:
                self._tail.append(bytearray(data))
            self._tail_size += len(data)
            if self._tail_size < self._need:
                return
            data = b"".join(self._tail)
            self._tail = []
            self._tail_size = 0
        self._data = data
        self._rate = 0.0
        self._expected = None

    def parse(self, out: list[dict[str, Any]] | None, room: int, cost_room: int, *, cut: bool = True) -> ParserStop:
        """Find events until there is a reason to stop.

        Args:
            out: gets the events; ``None`` checks their frames, but not the JSON in them, and counts them.
            room: events at most.
            cost_room: stop at the event that brings the cost to this. A J frame that would exceed it is left for the next call,
                unless this is all of `ReaderConfig.max_cost`.
            cut: whether the items of an array (LJ-11) may be delivered in parts; the event is counted with the last part. If not, an
                array that does not fit is left for the next call.

        Raises:
            RemoteProtocolError: a frame breaks a rule; `head` is its beginning. Only after an error in JSON (LJ-12) may parsing
                continue, with ``out=None``.
        """
        if self._tail:  # still not enough
            self.count = self.cost = 0
            return ParserStop.NEED_DATA
        data = self._data
        at = self._at
        end = len(data)
        data_type, json_type = self._types
        config = self._config
        max_frame, max_key, max_cost = config.max_frame, config.max_key, config.max_cost
        max_depth = config.max_json_depth
        keys, expected, large = self._keys, self._expected, _LARGE
        event_head, u32 = _EVENT_HEAD.unpack_from, _U32.unpack_from
        small_room = min(cost_room, max_cost) - _SMALL_COST
        count = cost = 0
        sequence = self.sequence
        # The unfinished D frame, if there is one: its number, its start, and the pairs that are still to come.
        fields, number, pairs, left = self._fields, self._number, self._pairs, self._left
        start = at - self._used
        last = start + max_frame  # where it must have ended
        bound = min(last, end)
        stop = ParserStop.FULL
        if self._items and out is not None:
            cost = self._hand_on(out, cost_room)
            if not self._items:
                count, sequence = 1, number
        try:
            while count < room:
                if cost >= cost_room:
                    stop = ParserStop.COST
                    break
                if left < 0:
                    start = at
                    kind, number, length = event_head(data, at) if end - at >= 10 else (b"", 0, 0)
                    if kind == json_type:
                        if length > max_frame - 10:
                            raise self._large("J frame", length + 10, "max_frame", "LJ-36", at)
                        frame_end = at + 10 + length
                        if frame_end > end:
                            self._need = 10 + length
                            stop = ParserStop.NEED_DATA
                            break
                        price = 0
                        small = length <= _SMALL and cost <= small_room and not self._rate
                        if not small:
                            ahead = self._ahead if length > _LARGE else self._price(at, frame_end)
                            if ahead is None:
                                self._ahead = 0
                                stop = ParserStop.LARGE
                                break
                            price = ahead or self._price(at, frame_end)
                            if cost + price > cost_room and (cost or cost_room < max_cost):
                                stop = ParserStop.COST
                                break
                            if not ahead and out is not None:
                                self._ahead = price
                                stop = ParserStop.LARGE
                                break
                            self._ahead = None
                        if out is None:
                            price = EVENT_COST
                        else:
                            text: bytes | memoryview = data if small or length <= large else memoryview(data)
                            try:
                                value = parse_json(text[at + 10 : frame_end], max_depth)
                            except ValueError as error:
                                value = self._bad_json(text[at + 10 : frame_end], str(error), at)
                            if small:
                                # The garbage collector does not track a dict of only texts and numbers: asking it takes 0.05 us,
                                # a scan of 400 bytes 0.35. From 3.14 on CPython tracks every dict, so there each frame is scanned.
                                if not is_tracked(value) and isinstance(value, dict):
                                    out.append(value)
                                    cost += _FLAT_COST + BYTE_COST * length + FIELD_COST * len(value)
                                    sequence = number
                                    count += 1
                                    at = frame_end
                                    continue
                                price = self._price(at, frame_end)
                            if isinstance(value, dict):
                                out.append(value)
                            elif self._version == 2 or not isinstance(value, list):
                                out.append({"value": value})
                            elif not cut and cost + price + EVENT_COST * len(value) > cost_room:
                                stop = ParserStop.COST
                                break
                            else:
                                at = frame_end
                                self._items, self._number = value[::-1], number
                                self._item_cost = EVENT_COST + price // max(1, len(value))
                                del value
                                cost += self._hand_on(out, cost_room - cost)
                                if self._items:
                                    stop = ParserStop.COST
                                    break
                                price = 0
                        sequence = number
                        cost += price
                        count += 1
                        at = frame_end
                        continue
                    if kind != data_type:
                        stop = self._control(data, at, end)
                        at = self._at
                        break
                    if length > config.max_pairs:
                        raise self._large("pairs", length, "max_pairs", "LJ-37", at)
                    pairs = left = length
                    fields = {}
                    last = start + max_frame
                    bound = min(last, end)
                    at += 10
                    if expected and length == len(expected) and out is not None:
                        # Most events have the keys of the one before: comparing them takes 1.9 us for an event of five pairs, reading
                        # them 2.35. Whatever is unusual, or missing, is left for the loop below.
                        for name, size, key in expected:
                            value_at = at + size
                            if value_at > bound or data[at : value_at - 4] != name:
                                break
                            value_end = value_at + u32(data, value_at - 4)[0]
                            if value_end > bound or value_end - value_at > large:
                                break
                            fields[key] = data[value_at:value_end].decode("utf-8", "surrogateescape")
                            at = value_end
                            left -= 1
                while left:
                    if end - at < 4:
                        self._need = 4
                        stop = ParserStop.NEED_DATA
                        break
                    (length,) = u32(data, at)
                    if length > max_key:
                        raise self._large("key", length, "max_key", "LJ-38", at)
                    value_at = at + 8 + length
                    if value_at > bound:
                        if value_at > last:
                            raise self._large("D frame", value_at - start, "max_frame", "LJ-36", at)
                        self._need = 8 + length
                        stop = ParserStop.NEED_DATA
                        break
                    (length,) = u32(data, value_at - 4)
                    value_end = value_at + length
                    if value_end > bound:
                        if value_end > last:
                            raise self._large("value in a D frame", length, "max_frame", "LJ-39", at)
                        self._need = value_end - at
                        stop = ParserStop.NEED_DATA
                        break
                    if out is not None:
                        name = data[at + 4 : value_at - 4]
                        try:
                            key = keys[name]
                        except KeyError:
                            key = self._key(name)
                        if length <= large:
                            # `str` of the same takes 0.1 us longer, a tenth of an event of five pairs.
                            fields[key] = data[value_at:value_end].decode("utf-8", "surrogateescape")
                        elif self._ahead is None:
                            price = BYTE_COST * (value_end - start) + EVENT_COST + PAIR_COST * pairs
                            if cost + price > cost_room and (cost or cost_room < max_cost):
                                stop = ParserStop.COST
                            else:
                                self._ahead = BYTE_COST * length
                                stop = ParserStop.LARGE
                            break
                        else:
                            self._ahead = None
                            fields[key] = str(memoryview(data)[value_at:value_end], "utf-8", "surrogateescape")
                    at = value_end
                    left -= 1
                else:
                    if out is not None:
                        out.append(fields)
                        if expected is None:
                            expected = self._expected = _expect(fields)
                    sequence = number
                    cost += BYTE_COST * (at - start) + EVENT_COST + PAIR_COST * pairs
                    count += 1
                    left = -1
                    continue
                break
        finally:
            self.count, self.cost, self.sequence = count, cost, sequence
            self._fields = fields if left >= 0 else {}
            self._number, self._pairs, self._left = number, pairs, left
            self._used = at - start if left >= 0 else 0
            self._at = at
        if stop is ParserStop.NEED_DATA:
            self._tail = [data[at:]] if at < end else []
            self._tail_size = end - at
        if stop is ParserStop.NEED_DATA or at == end:
            self._base += at
            self._data = b""
            self._at = 0
        return stop

    def _control(self, data: bytes, at: int, end: int) -> ParserStop:
        """Take a control frame, or the beginning of any frame. If the frame is complete, `_at` is moved to its end."""
        self._at = at
        self._need = 2 if end - at == 1 else 1
        if at == end:
            return ParserStop.NEED_DATA
        if data[at] != ord(b"0") + self._version:
            if data[at] in b"12":
                raise self._broken(
                    f"version {data[at : at + 1]!r} on a connection of version {self._version}", "LJ-3", at
                )
            raise self._broken(f"expected version {self._version}, got {data[at : at + 1]!r}", "LJ-2", at)
        if end - at == 1:
            return ParserStop.NEED_DATA
        kind = data[at + 1]
        if kind == _J or (kind == _D and self._version == 1):
            self._need = 10
            return ParserStop.NEED_DATA
        if kind == _D:
            raise self._broken("a D frame in version 2", "LJ-4", at)
        if kind == _A:
            raise self._broken("an ack from the writer", "LJ-24", at)
        if kind not in (_W, _C):
            raise self._broken(f"unknown frame type {data[at + 1 : at + 2]!r}", "LJ-2", at)
        self._need = 6
        if end - at < 6:
            return ParserStop.NEED_DATA
        (value,) = _U32.unpack_from(data, at + 2)
        if kind == _W:
            self.window = value
            self._at = at + 6
            return ParserStop.WINDOW
        if self._depth >= self._config.max_depth:
            raise self._broken(f"envelopes nested deeper than {self._config.max_depth}", "LJ-32", at)
        if value > self._config.max_envelope:
            raise self._large("envelope", value, "max_envelope", "LJ-40", at)
        self._need = 6 + value
        if end - at < self._need:
            return ParserStop.NEED_DATA
        self.payload = memoryview(data)[at + 6 : at + 6 + value]
        self._at = at + 6 + value
        return ParserStop.ENVELOPE

    def _key(self, data: bytes) -> str:
        key = str(data, "utf-8", "surrogateescape")
        if len(data) <= _KEY:
            if len(self._keys) == _KEYS:
                self._keys.clear()
            self._keys[data] = key
        return key

    def _price(self, at: int, end: int) -> int:
        """Return an upper bound for the cost of a J frame; if it exceeds the limit, count exactly."""
        # One scan for this frame and all that follow in `data`: 0.35 instead of 0.85 us for an event of 400 bytes.
        if not self._rate:
            rest = self._data[at:]
            self._rate = BYTE_COST + structure_cost(rest) / len(rest)
        price = int((end - at) * self._rate)
        limit = self._config.max_cost
        if price > limit:  # a long text in it may look like structure
            price = exact_cost(self._data[at + 10 : end], limit)
            if price > limit:
                raise self._large("cost of the JSON of an event", price, "max_cost", "LJ-42", at)
        return price + EVENT_COST

    def _bad_json(self, data: bytes | memoryview, wrong: str, at: int) -> dict[str, Any]:
        """Return the event for a J frame that is not JSON, or raise (LJ-12)."""
        if self._config.on_bad_json == "close":
            raise self._broken(f"a J frame is not JSON: {wrong}", "LJ-12", at)
        return {"message": str(data, "utf-8", "surrogateescape"), "tags": ["_jsonparsefailure"]}

    def _hand_on(self, out: list[dict[str, Any]], cost_room: int) -> int:
        """Deliver items of an array until their cost reaches `cost_room`; return their cost."""
        items = self._items
        count = min(len(items), -(-cost_room // self._item_cost))
        for _ in range(count):
            item = items.pop()
            out.append(item if isinstance(item, dict) else {"value": item})
        return count * self._item_cost

    def _large(self, what: str, size: int, limit: str, rule: str, at: int) -> RemoteProtocolError:
        allowed = getattr(self._config, limit)
        return self._broken(f"{what}: {size}, at most {allowed} (raise {limit})", rule, at)

    def _broken(self, detail: str, rule: str, at: int) -> RemoteProtocolError:
        return RemoteProtocolError(detail, rule=rule, offset=self._base + at)


def _expect(fields: dict[str, str]) -> _Expected:
    """Return the keys of an event, which the next one probably has too; none if they are many or long."""
    if len(fields) > _EXPECTED or max(map(len, fields), default=0) > _KEY:
        return ()
    names = ((key, key.encode("utf-8", "surrogateescape")) for key in fields)
    return tuple((_U32.pack(len(name)) + name, len(name) + 8, key) for key, name in names)
