"""Authentication metadata: the credentials of a request (EXT-3).

Secrets are in no ``repr``, in no error and in no error's cause. Comparing two of these objects takes a time that depends on the secrets, so
compare secrets with `hmac.compare_digest`.
"""

from __future__ import annotations

from typing import ClassVar, Self

import attrs

from levada.framework.errors import DecodeError
from levada.transports.rsocket.extensions.mime import check_name, decode_name, encode_name

__all__ = ["Authentication", "BearerAuthentication", "OtherAuthentication", "SimpleAuthentication"]

_IDS = {"simple": 0, "bearer": 1}  # EXT-3
_MAX_USERNAME = 2**16 - 1  # EXT-3: 16-bit length


class Authentication:
    """Base of the three classes; `decode` returns one of them.

    Source: authentication metadata (EXT-3).
    """

    __slots__ = ()

    MIME_TYPE: ClassVar[str] = "message/x.rsocket.authentication.v0"
    """What this kind of metadata is called in composite metadata."""

    def encode(self) -> bytes:
        """Return the bytes."""
        raise TypeError(f"{type(self).__name__} is a base class, wanted one of the three that `decode` returns")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read credentials of any type; called on a subclass, of that type only.

        Raises:
            DecodeError: cut off, not UTF-8, or another type than wanted. The error holds no part of the bytes.
        """
        kind, at = decode_name(data, 0, "type")
        found: Authentication
        if kind in (0, "simple"):
            start = at + 2
            end = start + int.from_bytes(data[at:start], "big")
            if len(data) < max(start, end):
                raise DecodeError("cut off", path="username")
            found = SimpleAuthentication(_text(data[start:end], "username"), _text(data[end:], "password"))
        elif kind in (1, "bearer"):
            found = BearerAuthentication(_text(data[at:], "token"))
        else:
            found = OtherAuthentication(kind, data[at:])
        if not isinstance(found, cls):
            raise DecodeError(f"{type(found).__name__} where {cls.__name__} was wanted")
        return found


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    # Raised out here, since a UnicodeDecodeError as its context would hold the secret.
    raise DecodeError("not UTF-8", path=path)


def _check_text(instance: object, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str):  # the value is not shown
        raise TypeError(f"{attribute.name} is {type(value).__name__}, wanted str")


@attrs.frozen
class SimpleAuthentication(Authentication):
    """A user name and a password."""

    username: str = attrs.field(validator=_check_text)
    """At most 65,535 bytes of UTF-8."""
    password: str = attrs.field(validator=_check_text, repr=False)
    """Not shown by ``repr``."""

    def __attrs_post_init__(self) -> None:
        if len(self.username.encode()) > _MAX_USERNAME:
            raise ValueError(f"a username of {len(self.username.encode())} bytes, at most {_MAX_USERNAME}")

    def encode(self) -> bytes:
        """Return the bytes."""
        username = self.username.encode()
        return b"\x80" + len(username).to_bytes(2, "big") + username + self.password.encode()


@attrs.frozen
class BearerAuthentication(Authentication):
    """A bearer token."""

    token: str = attrs.field(validator=_check_text, repr=False)
    """Not shown by ``repr``."""

    def encode(self) -> bytes:
        """Return the bytes."""
        return b"\x81" + self.token.encode()


@attrs.frozen
class OtherAuthentication(Authentication):
    """Credentials of any other type, as bytes."""

    type: str | int
    """Name of the type, or an id other than the ids of ``simple`` and ``bearer``."""
    credentials: bytes = attrs.field(repr=False)
    """Not shown by ``repr``."""

    def __attrs_post_init__(self) -> None:
        check_name(self.type, _IDS.values(), "an authentication type")
        if self.type in _IDS:
            raise ValueError(f"authentication type {self.type!r} has a class of its own")
        if not isinstance(self.credentials, bytes):
            raise TypeError(f"credentials is {type(self.credentials).__name__}, wanted bytes")

    def encode(self) -> bytes:
        """Return the bytes."""
        return encode_name(self.type, _IDS) + self.credentials
