"""Tokens that a server recognises without storing them: address tokens and stateless reset tokens.

* A **Retry token** proves that the client now receives at an address and port, and contains the connection ids of its first attempt. It is
  good for 30 seconds and for any number of packets of one attempt.
* A **new token** (frame NEW_TOKEN) proves the address of a later connection. It is bound to the host only, since ports change, and is good for
  a day and for one connection. The log of used tokens is bounded; while it is full, new tokens prove nothing.
* A **stateless reset token** is a hash of a connection id, so that a server that has lost its state can still end the connection.

All are derived from one secret. Processes with the same secret, also after a restart, recognise each other's tokens, so times are wall-clock
times. Each process keeps its own log of used tokens, so a new token could be used once in each.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import attrs
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from levada.framework.platform import PLATFORM

__all__ = ["AddressTokens", "Proof", "reset_token"]

RETRY_LIFETIME = 30.0
TOKEN_LIFETIME = 86_400.0
KEY_PERIOD = 86_400.0  # seconds; a key seals for one period and opens for the next one as well
LOG_LIMIT = 100_000  # most used tokens remembered, at 12 bytes each and the dictionary's overhead
_NONCE = 12
_RETRY, _NEW = 1, 2
_HEAD = struct.Struct(">Bd")  # kind, time of issue


@attrs.frozen
class Proof:
    """The content of a valid address token."""

    original_cid: bytes | None = None
    """Connection id of the client's first packet, if the token comes from a Retry."""


def reset_token(secret: bytes, connection_id: bytes) -> bytes:
    """Derive the stateless reset token of a connection id (RFC 9000 section 10.3.2)."""
    return hmac.digest(secret, b"levada stateless reset" + connection_id, "sha256")[:16]


class AddressTokens:
    """Seals and opens address tokens."""

    def __init__(self, secret: bytes, *, clock: Callable[[], float] | None = None, log_limit: int = LOG_LIMIT):
        self._secret = secret
        self._clock = clock or PLATFORM.get().time
        self._token_bytes = PLATFORM.get().token_bytes
        self._log_limit = log_limit
        self._used: OrderedDict[bytes, float] = OrderedDict()
        self._keys: dict[int, AESGCM] = {}

    def retry(self, address: Any, *, original_cid: bytes, retry_cid: bytes) -> bytes:
        """Make the token of a Retry packet to a socket address."""
        return self._seal(_RETRY, bytes([len(original_cid)]) + original_cid + retry_cid, _socket(address))

    def issue(self, address: Any) -> bytes:
        """Make the token of a NEW_TOKEN frame to a socket address."""
        return self._seal(_NEW, b"", _host(address))

    def check(self, token: bytes, address: Any, *, destination_cid: bytes) -> Proof | None:
        """Check the token of an Initial packet; this uses up a token from NEW_TOKEN.

        Returns:
            ``None`` if the token proves nothing: it is foreign, forged, too old, for another address, or used up.
        """
        now = self._clock()
        period = int(now // KEY_PERIOD)
        for kind, bound in ((_RETRY, _socket(address)), (_NEW, _host(address))):
            for key in (period, period - 1):
                plain = self._open(token, key, bytes([kind]) + bound)
                if plain is not None:
                    return self._judge(kind, plain, token[:_NONCE], now, destination_cid)
        return None

    def is_retry(self, token: bytes, address: Any) -> bool:
        """Whether the token is from a Retry to this address, valid or not. If it is not valid, the client must be told."""
        period = int(self._clock() // KEY_PERIOD)
        return any(
            self._open(token, key, bytes([_RETRY]) + _socket(address)) is not None for key in (period, period - 1)
        )

    def _judge(self, kind: int, plain: bytes, nonce: bytes, now: float, destination_cid: bytes) -> Proof | None:
        _, issued = _HEAD.unpack_from(plain)
        if kind == _RETRY:
            end = _HEAD.size + 1 + plain[_HEAD.size]
            good = now - issued <= RETRY_LIFETIME and plain[end:] == destination_cid
            return Proof(plain[_HEAD.size + 1 : end]) if good else None
        while self._used and next(iter(self._used.values())) <= now:
            self._used.popitem(last=False)
        if now - issued > TOKEN_LIFETIME or nonce in self._used or len(self._used) >= self._log_limit:
            return None
        # Entries expire in the order of use, not of issue, so each is kept for a whole lifetime from now on.
        self._used[nonce] = now + TOKEN_LIFETIME
        return Proof()

    def _key(self, period: int) -> AESGCM:
        key = self._keys.get(period)
        if key is None:
            for old in [old for old in self._keys if old < period - 1]:
                del self._keys[old]
            material = hmac.digest(self._secret, b"levada address token %d" % period, "sha256")
            key = self._keys[period] = AESGCM(material)
        return key

    def _seal(self, kind: int, body: bytes, bound: bytes) -> bytes:
        now = self._clock()
        nonce = self._token_bytes(_NONCE)
        return nonce + self._key(int(now // KEY_PERIOD)).encrypt(
            nonce, _HEAD.pack(kind, now) + body, bytes([kind]) + bound
        )

    def _open(self, token: bytes, period: int, bound: bytes) -> bytes | None:
        if len(token) < _NONCE + _HEAD.size + 16:
            return None
        try:
            return self._key(period).decrypt(token[:_NONCE], token[_NONCE:], bound)
        except InvalidTag:
            return None


def _host(address: Any) -> bytes:
    try:
        return ipaddress.ip_address(address[0]).packed
    except ValueError:  # a name in a simulated network
        return hashlib.sha256(str(address[0]).encode()).digest()


def _socket(address: Any) -> bytes:
    return _host(address) + int(address[1]).to_bytes(2, "big")
