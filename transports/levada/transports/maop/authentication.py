"""The exchange on stream 0: the client's message, the server's result, and an incremental reader for each.

The readers are generators: each asks for a number of bytes and gets exactly that many from `Octets`. So each length is judged before
anything of that size is awaited (MA-18), and no byte is read twice, however the bytes are cut.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, Generic, TypeVar

import attrs

from .codes import ErrorCode, OperationFault
from .config import MaopConfig
from .versions import CAPABILITY_PAIR, Capability, Version, parse_capabilities, parse_version

__all__ = ["Authentication", "Octets", "Result", "read_authentication", "read_result"]

_TCHAR: Final = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
MIN_RESULT: Final = 32
"""Bytes that a known peer waits for before it reads a result. Source: MA-25."""

T = TypeVar("T")


def _short(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return bytes((len(data),)) + data


def _long(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return len(data).to_bytes(2, "big") + data


@attrs.frozen
class Authentication:
    """A client's message. Source: section 3.1."""

    auth_type: str
    token: bytes = attrs.field(repr=False)
    pairs: dict[str, str] = attrs.field(repr=False)
    version: Version
    vendor: str

    def __attrs_post_init__(self) -> None:
        raw = self.auth_type.encode()
        if not 0 < len(raw) < 256 or not _TCHAR.issuperset(raw):
            raise ValueError(f"auth_type is {self.auth_type!r}, wanted 1 to 255 token characters [MA-16]")
        if len(self.token) > 65_535 or len(self.pairs) > 255:
            raise ValueError("at most 65535 bytes of token and 255 pairs [MA-18]")
        if len(self.vendor.encode()) > 255 or len(str(self.version)) > 255:
            raise ValueError("vendor and version have at most 255 bytes [MA-31]")
        if any(len(text.encode()) > 65_535 for pair in self.pairs.items() for text in pair):
            raise ValueError("a pair is too long [MA-18]")

    @property
    def capabilities(self) -> Capability:
        """The capabilities that the client announces. Source: MA-35."""
        return parse_capabilities(self.pairs.get(CAPABILITY_PAIR, ""))

    def encode(self) -> bytes:
        """Return the message in bytes."""
        pairs = b"".join(_long(key) + _long(value) for key, value in self.pairs.items())
        head = _short(self.auth_type) + _long(self.token) + bytes((len(self.pairs),)) + pairs
        return head + _short(str(self.version)) + _short(self.vendor)


@attrs.frozen
class Result:
    """A server's answer, approved if it has a session. Source: section 3.2."""

    version: Version
    vendor: str
    session_id: bytes | None = None
    identifier: str = ""
    code: int = 0
    retry_after_ms: int = 0
    reason: str = ""

    def encode(self) -> bytes:
        """Return the answer in bytes."""
        if self.session_id is not None:
            head = b"\x01" + self.session_id + _short(self.identifier)
        else:
            head = b"\x00" + self.code.to_bytes(2, "big") + self.retry_after_ms.to_bytes(4, "big") + _long(self.reason)
        return head + _short(str(self.version)) + _short(self.vendor)


class Octets(Generic[T]):
    """Feeds a reader with incoming bytes."""

    __slots__ = ("_buffer", "_need", "_reader", "rest", "value")

    def __init__(self, reader: Generator[int, bytes, T]) -> None:
        self._reader = reader
        self._buffer = bytearray()
        self._need = next(reader)
        self.value: T | None = None
        """The result, once the message is whole."""
        self.rest = b""
        """Bytes that arrived with it and follow it."""

    def feed(self, data: bytes) -> bool:
        """Take bytes; return whether the message is whole.

        Raises:
            Fault: the message is malformed.
        """
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= self._need:
            piece = bytes(buffer[at : at + self._need])
            at += self._need
            try:
                self._need = self._reader.send(piece)
            except StopIteration as done:
                self.value = done.value
                self.rest = bytes(buffer[at:])
                buffer.clear()
                return True
        del buffer[:at]
        return False


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "big")


def _text(raw: bytes, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise OperationFault(ErrorCode.INVALID_FORMAT, f"the {what} is not UTF-8.", "MA-5") from None


def read_authentication(config: MaopConfig) -> Generator[int, bytes, Authentication]:
    """Read a client's message, judging each part as soon as it arrives. Source: MA-16 to MA-18, MA-32 to MA-34a."""
    size = _number((yield 1))
    if not size:
        raise OperationFault(ErrorCode.INVALID_FORMAT, "the authentication type is empty.", "MA-16")
    name = bytearray()
    while len(name) < size:
        octet = yield 1
        # MA-16: garbage shows here, before waiting for the bytes that it seems to announce.
        if octet[0] not in _TCHAR:
            raise OperationFault(
                ErrorCode.INVALID_FORMAT, "the authentication type has characters that no type has.", "MA-16"
            )
        name += octet
    size = _number((yield 2))
    if size > config.authentication.max_token:
        raise OperationFault(
            ErrorCode.CONTENT_TOO_LARGE,
            f"the token has {size} bytes, at most {config.authentication.max_token}.",
            "MA-18",
        )
    token = yield size
    count = _number((yield 1))
    if count > config.authentication.max_pairs:
        raise OperationFault(
            ErrorCode.CONTENT_TOO_LARGE, f"there are {count} pairs, at most {config.authentication.max_pairs}.", "MA-18"
        )
    pairs: dict[str, str] = {}
    total = 0
    for _ in range(count):
        texts = []
        for what in ("key of a pair", "value of a pair"):
            size = _number((yield 2))
            total += 2 + size
            if total > config.authentication.max_pair_bytes:
                raise OperationFault(
                    ErrorCode.CONTENT_TOO_LARGE,
                    f"the pairs have more than {config.authentication.max_pair_bytes} bytes.",
                    "MA-18",
                )
            texts.append(_text((yield size), what))
        pairs[texts[0]] = texts[1]  # MA-17: the last value counts.
    version = yield from _version()
    vendor = _text((yield _number((yield 1))), "vendor")
    if version is None:
        raise OperationFault(ErrorCode.INVALID_FORMAT, "the version is malformed.", "MA-32")
    return Authentication(name.decode().lower(), token, pairs, version, vendor)


def _version() -> Generator[int, bytes, Version | None]:
    raw = yield _number((yield 1))
    return parse_version(raw.decode("ascii")) if raw.isascii() else None


def read_result() -> Generator[int, bytes, Result]:
    """Read a server's answer. Source: MA-21 to MA-26, MA-33."""
    approved = (yield 1) == b"\x01"
    session_id, identifier, code, retry, reason = None, "", 0, 0, ""
    if approved:
        session_id = yield 16
        identifier = _text((yield _number((yield 1))), "identifier")
    else:
        code = _number((yield 2))
        retry = _number((yield 4))
        reason = _text((yield _number((yield 2))), "reason")
    version = yield from _version()
    vendor = _text((yield _number((yield 1))), "vendor")
    if version is None:
        # The content of a refusal is useful whatever version it names.
        if approved:
            raise OperationFault(ErrorCode.INVALID_FORMAT, "the server's version is malformed.", "MA-32")
        version = Version(0, 0, 0)
    return Result(version, vendor, session_id, identifier, code, retry, reason)
