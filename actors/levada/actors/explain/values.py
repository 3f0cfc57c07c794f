"""Read values of the message codec (`levada.framework.codec`) without their classes."""

from __future__ import annotations

import base64
import datetime as dt
import json
from functools import partial
from typing import Any

import attrs
import msgpack

from levada.framework.codec import AttachmentKind, Codec, has_at_most
from levada.framework.text import finite

__all__ = ["Handle", "Tagged", "as_json", "as_text", "read_value"]

EXT_ATTACHMENT, EXT_MESSAGE = 1, 2
_LIMITS = Codec()
_MOST_NESTED = 200
"""Most levels of lists, maps and messages that are shown. Each takes `as_json` two frames of Python's stack."""


@attrs.frozen
class Tagged:
    """A message."""

    tag: str
    fields: list[Any]
    """Its values, in the order in which the class defines them."""


@attrs.frozen
class Handle:
    """A handle in a message."""

    kind: str
    """Its kind, as in ``"oneshot_sender"``."""
    index: int
    """Its index among the attachments; for a ref that returns to its own node, the incarnation of its actor."""
    path: str = ""
    """The path of a ref's actor; empty for other kinds."""


def read_value(data: bytes) -> Any:
    """Read one value as `Codec.decode` does, but messages become `Tagged` and handles `Handle`.

    Raises:
        ValueError: the bytes are not a value.

    Example:
        >>> from levada.framework import Codec, message
        >>> @message("docs.Bid")
        ... class Bid:
        ...     symbol: str
        ...     price: float
        >>> value = read_value(Codec().encode(Bid("EURUSD", 1.08)))
        >>> as_text(value)
        'docs.Bid ["EURUSD", 1.08]'
    """
    try:
        if not has_at_most(data, _LIMITS.max_items):
            raise ValueError("too many items")
        value = _unpack(data, _LIMITS.max_depth)
        _check_nesting(value, _MOST_NESTED)
        return value
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"not a value of the codec: {error}") from error


def _check_nesting(value: Any, left: int) -> None:
    if left < 0:
        raise ValueError("nested too deeply to be shown")
    match value:
        case Tagged(_, fields):
            _check_nesting(fields, left)
        case list():
            for item in value:
                _check_nesting(item, left - 1)
        case dict():
            for item in value.values():
                _check_nesting(item, left - 1)
        case _:
            pass


def _unpack(data: bytes, depth: int) -> Any:
    if depth < 1:
        raise ValueError("nested too deeply")
    # The bytes are scanned first, because nested headers could each claim a list as long as all of them.
    scanner = msgpack.Unpacker(max_buffer_size=len(data) or 1)
    scanner.feed(data)
    scanner.skip()
    return msgpack.unpackb(data, ext_hook=partial(_ext, depth - 1), strict_map_key=False, timestamp=3)


def as_json(value: Any) -> Any:
    """Convert a value to types that `json.dumps` takes."""
    match value:
        case Tagged(tag, fields):
            return {"message": tag, "fields": as_json(fields)}
        case Handle(kind, index, path):
            return {"attachment": index, "kind": kind} | ({"path": path} if path else {})
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return {"base64": base64.b64encode(value).decode()}
        case dt.datetime():
            return value.isoformat()
        case float():
            return finite(value)
        case list():
            return [as_json(item) for item in value]
        case dict():
            return {key if isinstance(key, str) else str(as_json(key)): as_json(item) for key, item in value.items()}
    return value


def as_text(value: Any) -> str:
    """Show a value on one line: text as it is, a message as its tag and fields, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Tagged):
        return f"{value.tag} {json.dumps(as_json(value.fields), ensure_ascii=False)}"
    return json.dumps(as_json(value), ensure_ascii=False)


def _ext(depth: int, code: int, data: bytes) -> Any:
    if code == EXT_MESSAGE:
        row = _unpack(data, depth)
        if not isinstance(row, list) or not row or not isinstance(row[0], str):
            raise ValueError("a message without a tag")
        return Tagged(row[0], row[1:])
    if code == EXT_ATTACHMENT:
        kind = AttachmentKind(data[0])
        index, at = _number(data, 1)
        path = data[_number(data, at)[1] :].decode() if kind == AttachmentKind.REF else ""
        return Handle(kind.name.lower(), index, path)
    raise ValueError(f"ext type {code}")


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Read a base-128 integer; return it and its end."""
    start, number = at, 0
    while data[at] >= 0x80:
        number |= (data[at] & 0x7F) << 7 * (at - start)
        at += 1
    return number | data[at] << 7 * (at - start), at + 1
