"""Frames kept to be sent again on the next carrier, and the server's register of sessions.

Theory:

* A position is the number of bytes of *positioned* frames sent or received so far in one direction, without length fields (RS-90).  Every
  frame with a stream id above 0 is positioned (RS-91).
* The sender keeps each positioned frame until the peer says, in a KEEPALIVE or while resuming, that it has received it.  So frames that
  were lost with a carrier are sent again, each from its first byte; and since the receiver counts whole frames only, no frame comes twice.
* `Replay` is bounded: when it is full, the oldest frames are dropped, and a peer that still needs them cannot resume (RS-94).
* All sessions of a listener share a second bound. When it is passed, the session that keeps the most loses all of its frames: a session
  that has lost one frame cannot resume anyway. So peers that fill their sessions do no harm to sessions that keep little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["Replay", "Sessions"]

S = TypeVar("S")

_FRAME_COST: Final = 48  # bytes of a bytes object beside its contents, and of its place in the deque


class Room:
    """Bytes that all sessions of a listener keep."""

    __slots__ = ("bound", "replays", "used")

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = 0
        self.replays: set[Replay] = set()

    def shrink(self) -> None:
        """Drop all frames of the session that keeps the most."""
        max(self.replays, key=lambda replay: replay.cost).drop_all()


class Replay:
    """Frames of one direction that the peer may not have yet.

    Args:
        bound: bytes, the cost of keeping each frame included, so that many small frames do not take many times the bound.
        room: shared with other sessions; `close` returns this session's part of it.
    """

    __slots__ = ("_bound", "_frames", "_room", "first", "kept", "reported", "sent")

    def __init__(self, bound: int, room: Room | None = None) -> None:
        self._bound = bound
        self._room = room
        if room is not None:
            room.replays.add(self)
        self._frames: deque[bytes] = deque()
        self.first = 0
        """Position of the oldest frame kept."""
        self.sent = 0
        """Position behind the newest frame."""
        self.kept = 0
        """Bytes of the frames kept."""
        self.reported = 0
        """The highest position that the peer has confirmed."""

    @property
    def half_full(self) -> bool:
        """Whether it is time to ask the peer for its position."""
        return self.cost * 2 > self._bound

    @property
    def cost(self) -> int:
        """Bytes that count against the bounds: the frames kept, and 48 more for each."""
        return self.kept + _FRAME_COST * len(self._frames)

    def keep(self, frame: bytes) -> None:
        """Add a frame; drop the oldest frames if the bound is passed (RS-94)."""
        frames = self._frames
        frames.append(frame)
        self.sent += len(frame)
        self.kept += len(frame)
        room = self._room
        if room is not None:
            room.used += len(frame) + _FRAME_COST
        while self.cost > self._bound:
            self._drop(frames.popleft())
        if room is not None and room.used > room.bound:
            room.shrink()  # once is enough: the session that keeps the most keeps at least this frame

    def release(self, position: int) -> bool:
        """Drop the frames up to the peer's position. Return false if the position is impossible (RS-93)."""
        if not self.reported <= position <= self.sent:
            return False
        frames = self._frames
        while frames and self.first + len(frames[0]) <= position:
            self._drop(frames.popleft())
        self.reported = position
        # Below `first` only if the bound made frames go; a position inside a frame leaves `first` below it.
        return position <= self.first

    def frames(self) -> list[bytes]:
        """Return the frames kept, oldest first."""
        return list(self._frames)

    def drop_all(self) -> None:
        """Drop all frames."""
        while self._frames:
            self._drop(self._frames.popleft())

    def close(self) -> None:
        """Drop all frames and leave the shared room: the session is over."""
        self.drop_all()
        if self._room is not None:
            self._room.replays.discard(self)

    def _drop(self, frame: bytes) -> None:
        self.first += len(frame)
        self.kept -= len(frame)
        if self._room is not None:
            self._room.used -= len(frame) + _FRAME_COST


class Sessions(Generic[S]):
    """The sessions of one listener that can be resumed, by token (RS-104).

    Args:
        max_sessions: sessions at once, also without a carrier; a SETUP that asks for one more is refused, unless `make_room` ends a session.
        max_bytes: bytes of the frames that all sessions keep, and 48 more for each frame. Beyond it, the session that keeps the most loses
            its frames.
        make_room: ends a session without a carrier; returns whether there was one.
    """

    def __init__(
        self,
        max_sessions: int = 1_000,
        max_bytes: int = 256 * 1024 * 1024,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self._max_sessions = max_sessions
        self._make_room = make_room
        self.room = Room(max_bytes)
        self._sessions: dict[bytes, S] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, token: bytes, session: S) -> bool:
        """Register a session; false if the token is in use (RS-44) or there are too many."""
        if token in self._sessions or (len(self._sessions) >= self._max_sessions and not self._make_room()):
            return False
        self._sessions[token] = session
        return True

    def find(self, token: bytes) -> S | None:
        """Return the session of this token, if it lives."""
        return self._sessions.get(token)

    def remove(self, token: bytes) -> None:
        """Forget a session that is over."""
        self._sessions.pop(token, None)
