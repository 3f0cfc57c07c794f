"""`Front`: an actor of this process that passes everything on to the actor that has a kept name of the fleet.

A name is *kept* while the driver starts its actor again whenever its node is lost or leaves. Such an actor has another ref after each
start, and there may be none for a while; the ref of the front stays, and messages wait in the front meanwhile. Each process has its own
front for a name, made when the name is first looked up. So the front is an actor like any other: its ref travels in messages and to
systems that are no members of the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import trio

from levada.framework import Reason, Ref
from levada.framework.embedding import DescribedActor, Forwarder, LocalRef
from levada.framework.links import NORMAL

__all__ = ["HELD", "SETTLING", "Front"]

HELD: Final = 1024
"""The most messages that wait in a front for their actor; questions beyond them stand in line, and `tell` raises `MailboxFull`."""
SETTLING: Final = 2.0
"""Seconds for news that is on its way: that an actor has ended, or that a mailbox has everything that was sent to it."""
_PAUSE: Final = 0.2
"""Seconds before an actor that could not be reached is tried again."""


class Front(Forwarder, DescribedActor[Any]):
    """Passes everything on to the actor that has a name now. Nothing goes to an actor before it has been reached.

    Args:
        name: the name.
        find: returns the actor that has it, if there is one that lives.
    """

    def __init__(self, name: str, find: Callable[[], Ref[Any] | None]) -> None:
        super().__init__()
        self.name = name
        self._find = find
        self._last: Ref[Any] | None = None
        """The actor that messages were passed on to last."""
        self._news = trio.Event()
        self._over = False
        """Whether the name is free."""

    @property
    def about(self) -> str:
        """The name, and where its actor is."""
        where = "nowhere now" if self.target is None else self.target.where
        return f"{self.name}: {where}"

    def started(self) -> None:
        """Begin."""
        self.start_soon(self._follow)

    def turn(self) -> None:
        """Learn that another actor may have the name, or none: at once, so that nothing more goes to the one before."""
        if self._find() is not self.target:
            self.point(None)
        self._news.set()

    def target_ended(self, reason: Reason) -> None:
        """Look whether only the connection was lost, or wait for the next actor."""
        self._news.set()

    async def _follow(self) -> None:
        while not self._over:
            self._news = trio.Event()
            ref, pause = self._find(), math.inf
            if ref is not self.target:
                self.point(None)
                if ref is None or isinstance(ref, LocalRef) or await _is_reached(ref):
                    if ref is self._find():
                        self._last = ref or self._last
                        self.point(ref)
                else:
                    pause = _PAUSE
            with trio.move_on_after(pause):
                await self._news.wait()
        reason: Reason = NORMAL
        with trio.move_on_after(SETTLING):
            if self._last is not None:
                reason = await self._last.terminated()
        self.end(reason)

    async def settle(self) -> None:
        """Wait until the mailbox of the last actor has everything that this front has passed on."""
        if self._last is not None and not isinstance(self._last, LocalRef):
            await _is_reached(self._last)

    def free(self) -> None:
        """End, because the name is free: for the reason of its last actor."""
        self._over = True
        self._find = lambda: None  # the next actor with this name is another one
        self.turn()


async def _is_reached(ref: Ref[Any]) -> bool:
    """Return whether an actor of another system can be reached. If so, its mailbox has everything that was sent to it before."""
    found: list[int | None] = []
    over = trio.Event()

    def got(waiting: int | None) -> None:
        found.append(waiting)
        over.set()

    forget = ref.on_stopped(over.set)
    try:
        ref.sample_load(got)
        with trio.move_on_after(SETTLING):
            await over.wait()
    finally:
        forget()
    return ref.is_alive and found != [] and found[0] is not None
