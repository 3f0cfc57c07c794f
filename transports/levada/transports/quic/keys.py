"""1-RTT keys and their updates, and the channel binding; both derive from the secrets of TLS.

The 1-RTT keys include the previous one, for packets that were on their way during a key update (RFC 9001 sections 6.3 to 6.5).

aioquic's own pair moves to new keys with the first packet that it seals, and then cannot read a peer that has not followed. If this packet
has only acknowledgements and gets lost, both sides hang: the side with the new keys has nothing to resend and cannot read the other side,
which resends its data until the idle timeout.
"""

from __future__ import annotations

import math

from aioquic._crypto import AEAD, CryptoError
from aioquic.quic.connection import QuicConnectionError
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, decode_packet_number, is_long_header
from aioquic.tls import hkdf_expand_label
from cryptography.hazmat.primitives import hashes

__all__ = ["RollingKeys", "channel_binding"]

_NONE_YET = 1 << 62


def channel_binding(algorithm: hashes.HashAlgorithm, exporter_secret: bytes) -> bytes:
    """Derive the channel binding from the exporter secret. Source: RFC 9266 section 2, RFC 8446 section 7.5."""
    empty = hashes.Hash(algorithm).finalize()
    size = algorithm.digest_size
    derived = hkdf_expand_label(algorithm, exporter_secret, b"EXPORTER-Channel-Binding", empty, size)
    return hkdf_expand_label(algorithm, derived, b"exporter", empty, 32)


class RollingKeys(CryptoPair):
    """aioquic's pair of keys, with the previous key for receiving."""

    def __init__(self, pair: CryptoPair) -> None:
        super().__init__()
        self.recv, self.send = pair.recv, pair.send
        self.previous: AEAD | None = None
        """Opens packets that the peer sealed before it saw the last update; ``None`` some time after the update."""
        self.until = math.inf
        """When `previous` is dropped; set once the peer has made the update too."""
        self.first = _NONE_YET
        """Lowest packet number seen under the present key, while `previous` is kept."""
        self._sending: AEAD | None = None
        self._start = 0  # number of the first packet under these keys, or of a later one

    def update_is_due(self, number: int, acked: int, wanted: bool, after: int) -> bool:
        """Whether to renew the keys: it is `wanted` or due, and the peer has acknowledged a packet under the present ones.

        A side two updates ahead of its peer would show the key phase that the peer is in. The peer would open its packets with the wrong keys,
        and could never read it again.

        Args:
            number: number of the next packet.
            acked: highest number that the peer has acknowledged.
            wanted: whether the application asked for new keys.
            after: packets after which keys are renewed.

        Source: RFC 9001 section 6.1.
        """
        if self.send.aead is not self._sending:  # by an update of either side
            self._sending = self.send.aead
            self._start = number
        return (wanted or number - self._start >= after) and acked >= self._start and not self._update_key_requested

    def _update_key(self, trigger: str) -> None:
        previous = self.recv.aead
        super()._update_key(trigger)
        self.previous, self.until, self.first = previous, math.inf, _NONE_YET

    def decrypt_packet(
        self, packet: bytes, encrypted_offset: int, expected_packet_number: int
    ) -> tuple[bytes, bytes, int]:
        """Open a packet with the previous, present or next key; a packet under the next key makes the update here too.

        Raises:
            CryptoError: no key opens the packet.
            QuicConnectionError: the peer used an old key after a new one.

        Source: RFC 9001 sections 6.2 to 6.4.
        """
        if self.previous is not None and not is_long_header(packet[0]):
            assert self.recv.hp is not None
            header, truncated = self.recv.hp.remove(packet, encrypted_offset)
            if (header[0] & 4) >> 2 != self.recv.key_phase:
                number = decode_packet_number(truncated, ((header[0] & 3) + 1) * 8, expected_packet_number)
                try:
                    plain = self.previous.decrypt(packet[len(header) :], header, number)
                except CryptoError:
                    pass  # a further update by the peer looks like this
                else:
                    self.previous_opened(number)
                    return header, plain, number
        opened = super().decrypt_packet(packet, encrypted_offset, expected_packet_number)
        if self.previous is not None:
            self.first = min(self.first, opened[2])
        return opened

    def previous_opened(self, number: int) -> None:
        """Check the number of a packet that the previous key has opened.

        Raises:
            QuicConnectionError: a packet with a lower number has come under the present key.
        """
        if number > self.first:
            raise QuicConnectionError(
                error_code=QuicErrorCode.KEY_UPDATE_ERROR,
                frame_type=QuicFrameType.PADDING,
                reason_phrase="Old key used after a new one",
            )

    def give_up_previous(self, now: float, keep: float) -> None:
        """Drop the previous key `keep` seconds after the peer has made the update too."""
        if self.until == math.inf:
            if self.first != _NONE_YET:
                self.until = now + keep
        elif now >= self.until:
            self.previous = None
