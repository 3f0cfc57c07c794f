"""`Referring`: what the channels of a connection, and the entries of a ref's channel, need of the refs that have travelled over it."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import attrs

from levada.framework import Ref
from levada.framework.codec import AttachmentKind
from levada.framework.embedding import ChannelCore

if TYPE_CHECKING:
    from .halves import Halves, Packing
    from .name_lookup import Claim

__all__ = ["Referring"]


class Referring(ABC):
    """The refs that have travelled over one connection, as its channels need them: `levada.actors.aqueduct.ref_tables.Refs`."""

    def __init__(self, halves: Halves) -> None:
        self.halves = halves
        """The channels of the connection."""
        # An envelope has a few bytes before its message.
        self.codec = attrs.evolve(halves.codec, max_bytes=max(1, halves.codec.max_bytes - 16))
        """Writes and reads the messages in envelopes."""
        self.answers = ChannelCore(Any, 1, "for an answer")
        """The channel that errors name for handles in answers."""
        self._peer = ""

    @property
    def peer(self) -> str:
        """Name of the peer."""
        return self._peer or self.halves.peer

    def release(self) -> None:
        """Drop the connection's halves, since its actor has ended and they may hold this object."""
        self._peer = self.halves.peer
        self.halves = weakref.proxy(self.halves)

    @abstractmethod
    def attach(self, handle: Any, packing: Packing) -> tuple[AttachmentKind, int] | tuple[AttachmentKind, int, bytes]:
        """Put a ref, or a oneshot of one, into a message."""

    @abstractmethod
    def arrived(self, half: Any, note: bytes) -> Any:
        """Return the ref that came with a message."""

    @abstractmethod
    def unattached(self, number: int, kind: AttachmentKind, item: Any = None, note: bytes = b"") -> Ref[Any]:
        """Return the ref that came without a channel."""

    @abstractmethod
    def answer(self, claim: Claim) -> None:
        """Answer the claim of a ref."""
