"""Encode the frames of the writer and of the reader; `parser` decodes them.

A frame is a version byte, a type byte and a payload; all integers are unsigned and big-endian (LJ-1, LJ-2, LJ-4).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from levada.framework.errors import LocalProtocolError
from levada.transports.lumberjack.config import WriterConfig

__all__ = [
    "EventRejected", "encode_ack", "encode_data", "encode_envelope", "encode_event", "encode_json", "encode_text", "encode_window",
    "flatten",
]  # fmt: skip


@attrs.define(eq=False, slots=False, str=False)
class EventRejected(LocalProtocolError, ValueError):
    """An event cannot be encoded, or its frame is larger than `WriterConfig.max_frame` (LJ-59). Nothing was queued."""

    size: int = 0
    """Bytes of its frame; 0 if it could not be encoded."""
    limit: int = 0
    """Bytes that a frame may have; 0 if the event could not be encoded."""


_HEAD = struct.Struct(">2sI")
_U32 = struct.Struct(">I")
_HALVES = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the surrogates that are no escaped bytes

_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _json_dumper() -> Callable[[Any], str]:
    make: Any = getattr(json.encoder, "c_make_encoder", None)  # not in typeshed, and not in every Python
    if make is None:
        return _encoder.encode
    # `JSONEncoder.encode` makes this for each value: 3.8 instead of 4.9 us for 400 bytes. It does not get the table of the values
    # that are being encoded, because an error would leave it filled: a value that contains itself is a RecursionError.
    parts = make(None, _encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)
    return lambda value: "".join(parts(value, 0))


_dump_json = _json_dumper()


def encode_window(version: int, size: int) -> bytes:
    """Return a W frame: `size` events follow before the writer waits for an ack (LJ-14)."""
    return _HEAD.pack(b"%dW" % version, size)


def encode_ack(version: int, sequence: int) -> bytes:
    """Return an A frame: every event up to this number is safe (LJ-15)."""
    return _HEAD.pack(b"%dA" % version, sequence)


def encode_envelope(version: int, packed: bytes) -> bytes:
    """Return a C frame around a zlib stream of frames (LJ-30)."""
    return _HEAD.pack(b"%dC" % version, len(packed)) + packed


def encode_data(version: int, sequence: int, pairs: Mapping[str, str]) -> bytes:
    """Return a D frame, an event that maps text to text, encoded by `encode_text`."""
    return _HEAD.pack(b"%dD" % version, sequence) + _data_body(pairs)


def encode_json(version: int, sequence: int, value: Any) -> bytes:
    """Return a J frame, an event as JSON (LJ-11).

    Raises:
        TypeError, ValueError, RecursionError: the value cannot be JSON.
    """
    return _HEAD.pack(b"%dJ" % version, sequence) + _json_body(value)


def encode_event(event: Mapping[str, Any], config: WriterConfig) -> bytes:
    """Return an event's frame without its first six bytes (version, type and number), for `SendQueue.put`.

    Args:
        event: for a J frame, any JSON; for a D frame, the values that `flatten` takes.
        config: the version, the frame type, and the size limit.

    Raises:
        EventRejected: it cannot be encoded, or is too large (LJ-59).
    """
    try:
        body = _json_body(event) if config.json else _data_body(flatten(event))
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        raise EventRejected(f"the event cannot be encoded: {error}", rule="LJ-59") from error
    size = _HEAD.size + len(body)
    if size > config.max_frame:
        raise EventRejected(
            f"event of {size} bytes, at most {config.max_frame} (raise max_frame, here and at the reader)",
            rule="LJ-59",
            size=size,
            limit=config.max_frame,
        )
    return body


def encode_text(text: str) -> bytes:
    r"""Return the bytes of a text of an event. Never raises.

    Surrogate escapes become the bytes that they stand for (LJ-7). Other halves of surrogate pairs, which JSON can hold and UTF-8 cannot, are
    escaped as in a Python literal.

    Example:
        >>> encode_text("caf\udce9 \ud83d")
        b'caf\xe9 \\ud83d'
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return _HALVES.sub(lambda half: f"\\u{ord(half[0]):x}", text).encode("utf-8", "surrogateescape")


def flatten(event: Mapping[str, Any]) -> dict[str, str]:
    """Turn an event into a flat map of text to text, for a D frame (LJ-9).

    Numbers become decimal text, and booleans ``true`` and ``false``. The keys of a nested map are joined to its own key with ``.``.
    Lists become JSON text. Keys with the value ``None`` are left out.

    Raises:
        ValueError: NaN or infinity in a list.
        TypeError: a key is not text, or a value has another class.
        RecursionError: maps or lists are nested too deep, or contain themselves.

    Example:
        >>> flatten({"line": "hi", "offset": 7, "ok": True, "tags": ["a"], "host": {"name": "web"}, "none": None})
        {'line': 'hi', 'offset': '7', 'ok': 'true', 'tags': '["a"]', 'host.name': 'web'}
    """
    flat: dict[str, str] = {}
    _flatten_into(flat, "", event)
    return flat


def _flatten_into(flat: dict[str, str], prefix: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if not isinstance(key, str):
            raise TypeError(f"the key is {key!r}, wanted text")
        name = prefix + key
        if isinstance(value, str):
            flat[name] = value
        elif value is None:
            continue
        elif isinstance(value, bool):
            flat[name] = "true" if value else "false"
        elif isinstance(value, int | float):
            flat[name] = str(value)
        elif isinstance(value, Mapping):
            _flatten_into(flat, name + ".", value)
        elif isinstance(value, list | tuple):
            flat[name] = _dump_json(value)
        else:
            raise TypeError(
                f"field {name!r} is {type(value).__name__}, wanted text, a number, a bool, a map, a list or None"
            )


def _data_body(pairs: Mapping[str, str]) -> bytes:
    u32 = _U32.pack
    parts = [u32(len(pairs))]
    for key, value in pairs.items():
        data = encode_text(key)
        parts += (u32(len(data)), data)
        data = encode_text(value)
        parts += (u32(len(data)), data)
    return b"".join(parts)


def _json_body(value: Any) -> bytes:
    text = _dump_json(value)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        # Surrogates, which stand for escaped bytes too, cannot be encoded as UTF-8. As JSON escapes they are legal.
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return _U32.pack(len(data)) + data
