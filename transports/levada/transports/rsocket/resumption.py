"""What lets a session outlive its carriers: the frames kept to be sent again, and the server's register of sessions.

Theory:

* A position is the number of bytes of *positioned* frames sent, or received, so far in one direction; the length field does not count
  (RS-90).  Positioned is every frame with a stream id above 0 (RS-91).
* The sender keeps each positioned frame until the peer says, by a KEEPALIVE or while resuming, that it has it.  So whatever a lost carrier
  swallowed is sent again, from a frame's first byte; and as the receiver counts whole frames only, nothing comes twice.
* `Replay` is bounded: when it is full the oldest frames go, and a peer that still needs them cannot resume (RS-94).
* All of a listener's sessions share a second bound. Where they pass it, the one that keeps the most loses all of it: a session that has lost
  one frame cannot resume anyway. So peers that fill their sessions do no harm to those that keep little.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

__all__ = ["Replay", "Sessions"]

S = TypeVar("S")

_FRAME_COST: Final = 48  # bytes of a bytes object beside its contents, and of its place in the deque


class Room:
    """What the sessions of a listener keep together, in bytes."""

    __slots__ = ("bound", "replays", "used")

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = 0
        self.replays: set[Replay] = set()

    def shrink(self) -> None:
        """Drop what the largest of them keeps."""
        max(self.replays, key=lambda replay: replay.cost).drop_all()


class Replay:
    """Frames of one direction that the peer may not have yet.

    Args:
        bound: bytes; each frame counts with what it costs to keep it, so that many small ones do not take many times the bound.
        room: shared with other sessions; `close` gives back what this one has of it.
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
        """The highest position that the peer has said to have."""

    @property
    def half_full(self) -> bool:
        """Whether it is time to ask the peer what it has."""
        return self.cost * 2 > self._bound

    @property
    def cost(self) -> int:
        """Bytes that count: the frames kept, and 48 for each."""
        return self.kept + _FRAME_COST * len(self._frames)

    def keep(self, frame: bytes) -> None:
        """Add a frame; the oldest go if the bound is passed (RS-94)."""
        frames = self._frames
        frames.append(frame)
        self.sent += len(frame)
        self.kept += len(frame)
        room = self._room
        if room is not None:
            room.used += len(frame) + _FRAME_COST
        while self.cost > self._bound:
            self._drop(frames.popleft())
        while room is not None and room.used > room.bound:
            room.shrink()

    def release(self, position: int) -> bool:
        """Drop what ends at or before the peer's position; false if the position cannot be (RS-93)."""
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
        """Keep nothing of the frames sent so far."""
        while self._frames:
            self._drop(self._frames.popleft())

    def close(self) -> None:
        """Give the room back: the session is over."""
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
        limit: sessions at once, those without carrier included; a SETUP that asks for one more is refused.
        octets: of frames that all of them keep together, and 48 for each; beyond it the session that keeps the most loses what it keeps.
    """

    def __init__(self, limit: int = 1_000, octets: int = 256 * 1024 * 1024) -> None:
        self._limit = limit
        self.room = Room(octets)
        self._sessions: dict[bytes, S] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, token: bytes, session: S) -> bool:
        """Register a session; false if the token is in use (RS-44) or there are too many."""
        if token in self._sessions or len(self._sessions) >= self._limit:
            return False
        self._sessions[token] = session
        return True

    def find(self, token: bytes) -> S | None:
        """Return the session of this token, if it lives."""
        return self._sessions.get(token)

    def remove(self, token: bytes) -> None:
        """Forget a session that is over."""
        self._sessions.pop(token, None)
