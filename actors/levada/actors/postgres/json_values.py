"""Lists, maps and structs as JSON, for columns of the type ``jsonb``: readable in SQL, and the same value when it is read again.

A struct is an object, a list is an array, and a map is an array of pairs, because the order of its keys counts. Numbers are numbers, except those
that JSON does not have: NaN, the infinities and -0.0 are texts, as are decimals, times and bytes (hexadecimal). A duration is a number of
microseconds. Texts are escaped as in columns of text.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa

from levada.actors.journal.schema import default_of

from .escapes import escaped, unescaped

__all__ = ["from_json", "to_json"]

_MICROSECOND = dt.timedelta(microseconds=1)


def to_json(value: Any, kind: pa.DataType) -> bytes:
    """Return a value of Python that is not None, as Arrow gives it, as JSON."""
    return json.dumps(_lowered(value, kind), ensure_ascii=False, separators=(",", ":")).encode()


def from_json(text: bytes, kind: pa.DataType) -> Any:
    """Undo `to_json`; fields that a struct got later have their defaults.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, ArithmeticError: it is no such value.
    """
    return _lifted(json.loads(text), kind)


def _lowered(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _lowered(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind):
        return [_lowered(each, kind.value_type) for each in value]
    if pa.types.is_map(kind):
        return [[_lowered(key, kind.key_type), _lowered(each, kind.item_type)] for key, each in value]
    if pa.types.is_floating(kind):
        plain = math.isfinite(value) and (value != 0 or math.copysign(1, value) > 0)
        return value if plain else str(value)
    if pa.types.is_string(kind):
        return escaped(value.encode()).decode()
    if pa.types.is_binary(kind):
        return value.hex()
    if pa.types.is_decimal(kind):
        return str(value)
    if pa.types.is_temporal(kind):
        return value // _MICROSECOND if pa.types.is_duration(kind) else value.isoformat()
    return value


def _lifted(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {
            field.name: _lifted(value[field.name], field.type) if field.name in value else _default(field)
            for field in kind
        }
    if pa.types.is_list(kind):
        return [_lifted(each, kind.value_type) for each in value]
    if pa.types.is_map(kind):
        return [(_lifted(key, kind.key_type), _lifted(each, kind.item_type)) for key, each in value]
    read = _READ.get(kind)
    if read is None:
        return Decimal(value) if pa.types.is_decimal(kind) else value
    return read(value)


def _default(field: pa.Field) -> Any:
    default = default_of(field)
    return None if default is None else default[0].as_py()


_READ: dict[pa.DataType, Callable[[Any], Any]] = {
    pa.float64(): float,
    pa.string(): lambda text: unescaped(text.encode()).decode(),
    pa.binary(): bytes.fromhex,
    pa.date32(): dt.date.fromisoformat,
    pa.timestamp("us", tz="UTC"): dt.datetime.fromisoformat,
    pa.timestamp("us"): dt.datetime.fromisoformat,
    pa.duration("us"): lambda count: count * _MICROSECOND,
}
"""What reads the JSON of a type, if it is not the value itself."""
