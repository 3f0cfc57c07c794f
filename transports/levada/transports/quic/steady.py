"""Signatures of one length, for simulated networks: QUIC in a world repeats its packets, with their sizes, though not their bytes.

The crypto library draws keys and nonces of its own, so each run has other bytes. All of them have fixed lengths except for ECDSA signatures, whose
two numbers lose their leading zeros: with P-256 a signature has 70, 71 or 72 bytes, and rarely fewer. Two bytes more in a packet may change
how many packets fit into a window.
"""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["steady"]


class _SteadyKey:
    """An ECDSA key that signs until the signature is as long as it can be: four times on average."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        number = key.key_size // 8 + 1  # bytes, with the sign
        numbers = 2 * (2 + number)
        self._longest = numbers + (2 if numbers < 0x80 else 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._key, name)

    def sign(self, data: bytes, algorithm: ec.EllipticCurveSignatureAlgorithm) -> bytes:
        while len(signature := self._key.sign(data, algorithm)) < self._longest:
            pass
        return signature


ec.EllipticCurvePrivateKey.register(_SteadyKey)


def steady(key: Any) -> Any:
    """Return a key whose signatures have one length: the key itself, unless it is one for ECDSA."""
    return _SteadyKey(key) if isinstance(key, ec.EllipticCurvePrivateKey) else key
