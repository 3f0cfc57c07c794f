"""Snapshots: the state of an entity as bytes.

A snapshot has the fields of the class by name, each encoded by its annotation, and the command ids that the entity remembers. It fits a class
that has exactly these fields, of the same types, takes their values, and has the same `Durable.snapshot_version`. Any other snapshot is ignored,
and the entity is replayed from its first row. `Snapshots.layout` tells which snapshots fit, so that rows before others are not trimmed.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from levada.framework.codec import type_name
from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.message import field_types

from .rows import WHOLE

if TYPE_CHECKING:
    from .entity import Durable
    from .turns import Live

__all__ = ["MOST_BYTES", "Snapshots"]

MOST_BYTES: Final = 14 << 20
"""The most bytes of a snapshot, approximately: a journal in another process reads rows of 15 MiB at most."""


class Snapshots:
    """Encodes and decodes the state of the entities of one class.

    Raises:
        ConfigurationError: the class needs arguments, a field has no default, or its type cannot be in a message.
    """

    def __init__(self, cls: type[Durable[Any]]) -> None:
        fields: Any = attrs.fields(cls)  # type: ignore[arg-type]  # each actor class is an attrs class
        kept = [field for field in fields if field.init]
        for field in kept:
            if field.default is attrs.NOTHING:
                raise ConfigurationError(
                    f"{cls.__name__}.{field.name}: a field of a durable actor is state, and needs a default"
                )
        self._codec = codec = WHOLE
        self._version = cls.snapshot_version
        self._types = _types_of(cls, [field.name for field in kept])
        self._names = {name: type_name(kind) for name, kind in self._types.items()}
        self.layout = zlib.crc32(repr((self._version, sorted(self._names.items()))).encode()) >> 1
        """A number for what a snapshot must have to fit: it is in the log beside each one."""
        try:
            inspect.signature(cls).bind()
        except TypeError as error:
            raise ConfigurationError(
                f"{cls.__name__} needs arguments ({error}), and an entity is made without any: give each field a default, and let events set it"
            ) from None
        fresh = cls()
        for name, kind in self._types.items():
            try:
                codec.encode(getattr(fresh, name), kind)
            except (TypeError, ValueError, LevadaError) as error:
                raise ConfigurationError(
                    f"{cls.__name__}.{name}: a field of a durable actor is state, and this one cannot be kept: {error}; give it the type "
                    "of a field of a message, or attrs.field(init=False)"
                ) from error

    def state(self, live: Live) -> dict[str, bytes]:
        """Encode the fields. Errors are as for `Codec.encode`, and `ValueError` if the snapshot would be too large."""
        actor = live.actor
        state = {name: self._codec.encode(getattr(actor, name), kind) for name, kind in self._types.items()}
        size = sum(map(len, state.values())) + sum(map(len, live.commands or ())) + 32 * len(live.commands or ())
        if size > MOST_BYTES:
            raise ValueError(f"{size} bytes, at most {MOST_BYTES}")
        return state

    def pack(self, state: Mapping[str, bytes], live: Live) -> bytes:
        """Encode a state together with the remembered commands."""
        commands = [[command, *known] for command, known in (live.commands or {}).items()]
        return self._codec.encode(
            {"version": self._version, "types": self._names, "state": dict(state), "commands": commands}
        )

    def restore(self, data: bytes, actor: Durable[Any], live: Live) -> bool:
        """Give a new actor the state of a snapshot. Return False if it does not fit: then the actor may have a part of it."""
        try:
            found = self._codec.decode(data)
            state = found["state"]
            if found["version"] != self._version or state.keys() != self._types.keys():
                return False
            if "types" in found and found["types"] != self._names:  # version 0.2 wrote none
                return False
            values = {name: self._codec.decode(state[name], kind) for name, kind in self._types.items()}
            for name, value in values.items():
                setattr(actor, name, value)
            commands = {command: (offset, body) for command, offset, body in found["commands"]}
        except Exception:  # noqa: BLE001 - validators and converters of the class may raise anything
            return False
        live.commands = commands or None
        return True


def _types_of(cls: type[Durable[Any]], names: list[str]) -> dict[str, Any]:
    try:
        found = field_types(cls)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; the fields of a durable actor are kept in snapshots") from error
    return {name: found[name] for name in names}
