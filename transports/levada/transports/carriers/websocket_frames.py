"""WebSocket frames without I/O: a fast path for plain binary messages, and wsproto for the rest.

The rules of this file:

* Each frame header is read here, so a length is compared with the limit before anything of that size exists.  wsproto gets one irregular
  frame at a time: a fragment, a text or control frame, or a wrong frame, which only wsproto checks.
* A frame is *plain* if it is a whole binary message without reserved bits, masked as its direction requires, with the shortest length
  field, outside a fragmented message.  Plain frames never reach wsproto.  Both paths give the same bytes and messages.
* After an error, or once this side is closing, data frames are skipped, and only the peer's close frame matters.

Cost of one message of 64 bytes in µs, here / with wsproto 1.3, Python 3.11: sending by a client 1.5 / 5.8, by a server 0.14 / 3.2; receiving
in batches of 64 KiB by a server 1.1 / 9.4, by a client 0.3 / 7.2.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

import attrs
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, TextMessage
from wsproto.events import Ping as WsprotoPing
from wsproto.events import Pong as WsprotoPong
from wsproto.frame_protocol import CloseReason, XorMaskerSimple

from levada.framework.errors import RemoteProtocolError
from levada.transports.carriers.contracts import Octets

__all__ = ["CloseReceived", "Ping", "Pong", "WebSocketCore", "WebSocketFrameError", "encode_binary", "mask"]

NORMAL, PROTOCOL_ERROR, UNSUPPORTED_DATA, TOO_BIG = 1000, 1002, 1003, 1009
NO_CODE = 1005
"""Stands for the code of a close frame without one; never on the wire. Source: RFC 6455, 7.1.5."""

_BINARY = 0x82  # FIN and opcode 2
_TEXT, _FIRST_CONTROL = 0x1, 0x8
_MASKED = 0x80
_SHORT = tuple(bytes((_BINARY, size)) for size in range(126))
_SHORT_MASKED = tuple(bytes((_BINARY, _MASKED | size)) for size in range(126))
_MEDIUM = struct.Struct(">BBH")
_LONG = struct.Struct(">BBQ")

# Masking with one big integer / with wsproto's four translated slices, in µs: 0.7 / 1.8 for 64 B, 3.2 / 3.2 for 1,023 B,
# 181 / 79 for 64 KiB. So only large payloads are masked with wsproto.
_BIG_INTEGER_BELOW = 1024


@attrs.define(eq=False, slots=False, str=False)
class WebSocketFrameError(RemoteProtocolError):
    """The peer sent a frame that it must not send, or that this side does not accept."""

    code: int = PROTOCOL_ERROR
    """Close code for the peer."""


@attrs.frozen
class Ping:
    """The peer sent a ping, which asks for a pong with the same payload."""

    payload: bytes


@attrs.frozen
class Pong:
    """The peer sent a pong, as an answer to a ping or unasked."""

    payload: bytes


@attrs.frozen
class CloseReceived:
    """The peer sent its close frame; later bytes are ignored."""

    code: int
    reason: str


Control = Ping | Pong | CloseReceived


def mask(payload: Octets, key: bytes) -> bytes:
    """XOR the payload with the repeated key of 4 bytes. The same call removes the mask."""
    size = len(payload)
    if size >= _BIG_INTEGER_BELOW:
        return bytes(XorMaskerSimple(key).process(payload if isinstance(payload, bytearray) else bytearray(payload)))
    words = (size + 3) >> 2
    masked = int.from_bytes(payload, "little") ^ int.from_bytes(key * words, "little")
    return masked.to_bytes(words << 2, "little")[:size]


def encode_binary(payload: Octets, key: bytes | None) -> bytes:
    """Return the frame of one whole binary message, masked if there is a key (RFC 6455, 5.2)."""
    size = len(payload)
    if key is not None:
        if size < 126:
            return _SHORT_MASKED[size] + key + mask(payload, key)
        second, payload = _MASKED, key + mask(payload, key)
    elif size < 126:
        return _SHORT[size] + payload
    else:
        second = 0
    header = _MEDIUM.pack(_BINARY, second | 126, size) if size < 1 << 16 else _LONG.pack(_BINARY, second | 127, size)
    return header + payload


class WebSocketCore:
    """One end of a WebSocket after its handshake: bytes to messages and control frames, and back.

    Args:
        client: whether this end is the client, which masks its frames and accepts no masked ones.
        max_message: bytes of the largest message to accept, at least 125.
        accept_text: whether text messages are accepted, as their UTF-8 bytes; if not, they are an error (close code 1003).
        random: returns the given number of unpredictable bytes, for masks (RFC 6455, 5.3).
    """

    def __init__(
        self, *, client: bool, max_message: int, random: Callable[[int], bytes], accept_text: bool = False
    ) -> None:
        self.messages: deque[bytes] = deque()
        """Complete messages that wait to be taken."""
        self._wsproto = Connection(ConnectionType.CLIENT if client else ConnectionType.SERVER)
        self._client = client
        self._peer_masks = 0 if client else _MASKED
        self._max_message = max_message
        self._accept_text = accept_text
        self._random = random
        self._offset = 0  # bytes before the next byte that receive_data looks at
        self._frame_at = 0  # bytes before the frame being read
        self._rest = b""  # an incomplete header of at most 13 bytes; after an error, everything that followed
        self._left = 0  # bytes to come of a frame whose header is read, which go to
        self._foreign = False  # wsproto,
        self._part: bytearray | None = None  # or this payload of a plain frame; otherwise they are skipped
        self._key = b""
        self._fragments = bytearray()  # of a message that wsproto is reading
        self._plain = True  # whether a plain frame may come now: no fragmented message, not discarding
        self._discarding = False
        self._deaf = False  # the peer has closed, or the boundaries of its frames are lost

    @property
    def may_send(self) -> bool:
        """Whether messages, pings and pongs may be sent: neither side has sent a close frame."""
        return self._wsproto.state is ConnectionState.OPEN

    def message(self, payload: Octets) -> bytes:
        """Return the frame of one binary message."""
        if isinstance(payload, memoryview):  # its length counts items, which may be wider than a byte
            payload = payload.tobytes()
        if not self._client:
            return encode_binary(payload, None)
        return encode_binary(payload, self._random(4))

    def ping(self, payload: bytes = b"") -> bytes:
        """Return a ping frame, or nothing once closing has begun."""
        return self._control(WsprotoPing(payload)) if self.may_send else b""

    def pong(self, payload: bytes) -> bytes:
        """Return a pong frame, or nothing once closing has begun."""
        return self._control(WsprotoPong(payload)) if self.may_send else b""

    def close(self, code: int, reason: str = "") -> bytes:
        """Return this side's close frame, with the reason cut to 123 bytes, or nothing if it was sent before."""
        if self._wsproto.state not in (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING):
            return b""
        if code == NO_CODE:
            return self._control(CloseConnection(CloseReason.NO_STATUS_RCVD))
        return self._control(CloseConnection(code, reason))

    def _control(self, event: WsprotoPing | WsprotoPong | CloseConnection) -> bytes:
        """Return a control frame, under a mask of this side's own: wsproto draws another one."""
        frame = self._wsproto.send(event)
        if not self._client:
            return frame
        key = self._random(4)
        return frame[:2] + key + mask(mask(frame[6:], frame[2:6]), key)

    def discard(self) -> None:
        """Drop the messages that were not taken, and later ones too. From now on only the peer's close frame matters."""
        self.messages.clear()
        self._discarding, self._plain = True, False
        self._part = None
        self._fragments = bytearray()

    def receive_data(self, data: bytes) -> list[Control]:
        """Take bytes from the peer; messages go to `messages`, in order, and control frames are returned.

        Args:
            data: any number of bytes, cut anywhere.

        Raises:
            FrameError: a frame is wrong or too large. Messages before it are kept; later data is discarded.
        """
        found: list[Control] = []
        if self._deaf:
            return found
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at, end = 0, len(data)
        unmasked = not self._peer_masks
        append = self.messages.append
        try:
            while at < end:
                if self._left:
                    at = self._go_on(data, at, found)
                    if self._deaf:
                        return found
                    continue
                if end - at < 2:
                    break
                first, second = data[at], data[at + 1]
                length = second & 0x7F
                payload = at + 2
                if length >= 126:
                    payload += 2 if length == 126 else 8
                    if end < payload:
                        break
                    length = int.from_bytes(data[at + 2 : payload], "big")
                    shortest = length >= (126 if payload - at == 4 else 1 << 16)
                else:
                    shortest = True
                if self._plain and first == _BINARY and shortest and second & _MASKED == self._peer_masks:
                    if length > self._max_message:
                        self._refuse_size(length, at)
                    if unmasked:
                        stop = payload + length
                        if stop <= end:
                            append(data[payload:stop])
                            at = stop
                            continue
                    else:
                        payload += 4
                        if end < payload:
                            break
                        self._key = data[payload - 4 : payload]
                        stop = payload + length
                        if stop <= end:
                            append(mask(data[payload:stop], self._key))
                            at = stop
                            continue
                    self._part = bytearray(data[payload:])
                    self._left = stop - end
                    at = end
                else:
                    self._frame_at = self._offset + at
                    self._check_irregular(first & 0xF, length, at)
                    self._left = payload - at + (4 if second & _MASKED else 0) + length
        except WebSocketFrameError:
            self._discard_after_error(data, at)
            raise
        self._rest = data[at:]
        self._offset += at
        return found

    def _discard_after_error(self, data: bytes, at: int) -> None:
        """Keep the messages before the frame at fault, and look only for a close frame after it."""
        self._discarding, self._plain = True, False
        self._fragments = bytearray()
        if not self._deaf:
            self._rest = data[at:]
            self._offset += at

    def _check_irregular(self, opcode: int, length: int, at: int) -> None:
        """Check the size and kind of a frame for wsproto before taking any of its payload."""
        is_data = opcode < _FIRST_CONTROL
        self._foreign = not (is_data and self._discarding)
        if not is_data or self._discarding:
            return
        if opcode == _TEXT and not self._accept_text:
            detail = "a text message, but only binary ones are accepted (set accept_text)"
            raise WebSocketFrameError(detail, rule="RFC 6455 5.6", offset=self._offset + at, code=UNSUPPORTED_DATA)
        if len(self._fragments) + length > self._max_message:
            self._refuse_size(len(self._fragments) + length, at)
        self._plain = False

    def _refuse_size(self, size: int, at: int) -> None:
        detail = f"message of {size} bytes or more, at most {self._max_message} (raise max_message)"
        raise WebSocketFrameError(detail, rule="RFC 6455 7.4.1", offset=self._offset + at, code=TOO_BIG)

    def _go_on(self, data: bytes, at: int, found: list[Control]) -> int:
        """Take more of the frame that is being read; return where it ends in `data`."""
        stop = min(len(data), at + self._left)
        self._left -= stop - at
        if self._foreign:
            self._wsproto.receive_data(data[at:stop])
            if not self._left:
                self._foreign = False
            self._collect(found)
        elif self._part is not None:
            self._part += memoryview(data)[at:stop]
            if not self._left:
                part, self._part = self._part, None
                self.messages.append(mask(part, self._key) if self._peer_masks else bytes(part))
        return stop

    def _collect(self, found: list[Control]) -> None:
        """Turn wsproto's events into ours."""
        for event in self._wsproto.events():
            if isinstance(event, (BytesMessage, TextMessage)):
                if self._discarding:
                    continue
                self._fragments += event.data if isinstance(event, BytesMessage) else event.data.encode()
                if event.message_finished:
                    self.messages.append(bytes(self._fragments))
                    self._fragments = bytearray()
                    self._plain = True
            elif isinstance(event, WsprotoPing):
                found.append(Ping(bytes(event.payload)))
            elif isinstance(event, WsprotoPong):
                found.append(Pong(bytes(event.payload)))
            elif isinstance(event, CloseConnection):
                # wsproto uses this event for a close frame and for a broken rule; only a close frame changes its state.
                self._deaf = True
                if self._wsproto.state in (ConnectionState.REMOTE_CLOSING, ConnectionState.CLOSED):
                    found.append(CloseReceived(int(event.code), event.reason or ""))
                elif not self._discarding:
                    detail = event.reason or "broken frame"
                    raise WebSocketFrameError(detail, rule="RFC 6455 5", offset=self._frame_at, code=int(event.code))
