"""Arguments of actors, encoded where they come from and decoded on the actor's node.

The driver may have imported an older version of a message class than the nodes, or none. If it decoded a message of that class, it would
drop the fields that it does not know.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import msgpack

from levada.framework.codec import AttachmentKind, Codec
from levada.framework.errors import DecodeError

from .messages import Packed

__all__ = ["is_same", "pack", "unpack"]

_CODEC: Final = Codec()
_MESSAGE: Final = 2  # msgpack's ext type of a message, as `levada.framework.codec` says; the other is that of a handle


@attrs.frozen
class _Handles:
    """Takes the handles of a value while it is encoded; a `levada.framework.codec.Attachments`."""

    taken: list[Any]

    def attach(self, handle: Any, /) -> tuple[AttachmentKind, int]:
        self.taken.append(handle)
        return AttachmentKind[handle.attachment_kind.upper()], len(self.taken) - 1

    def rollback(self) -> None:
        """Do nothing: handles are moved when the message with the `Packed` is encoded."""


def pack(value: Any) -> Packed:
    """Encode a value.

    Raises:
        TypeError, ValueError, ConfigurationError: it cannot travel.
    """
    handles: list[Any] = []
    return Packed(_CODEC.encode(value, attachments=_Handles(handles)), handles)


def unpack(packed: Packed) -> Any:
    """Decode a value.

    Raises:
        DecodeError: this process does not know a class in it, or has a version of it that does not fit.
    """

    def handle(number: int, kind: AttachmentKind, item: Any, _: bytes = b"") -> Any:
        found = packed.handles[number]
        if getattr(found, "attachment_kind", None) != kind.name.lower():
            raise ValueError(f"it is {found!r}, wanted a {kind.name.lower()}")
        return found

    return _CODEC.decode(packed.data, detach=handle)


def is_same(one: Packed, other: Packed) -> bool:
    """Return whether two values are equal in all that their versions of message classes have in common.

    A later version of a class has more fields than an earlier one. Only the fields that both have are compared.
    """
    return one == other or _equal(_read(one.data, one.handles), _read(other.data, other.handles))


class _Message(list[Any]):
    """The tag of a message and its fields."""


class _Map(list[Any]):
    """The pairs of a map, sorted."""


def _read(data: bytes, handles: list[Any]) -> Any:
    def ext(code: int, inner: bytes) -> Any:
        if code == _MESSAGE:
            return _Message(_read(inner, handles))
        return handles[sum((octet & 0x7F) << 7 * i for i, octet in enumerate(inner[1:]))]

    try:
        return msgpack.unpackb(
            data,
            ext_hook=ext,
            object_pairs_hook=lambda pairs: _Map(sorted(map(list, pairs), key=repr)),
            strict_map_key=False,
            timestamp=3,
        )
    except (ValueError, LookupError) as error:
        raise DecodeError(f"not an argument: {error}") from error


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and type(one) is type(other):
        same = type(one) is _Message or len(one) == len(other)
        return same and all(map(_equal, one, other))
    return bool(one == other)
