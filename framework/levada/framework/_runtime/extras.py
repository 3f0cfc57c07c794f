"""The rare parts of an actor's record, made on first use so that other actors do not pay for them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from .ask import Ask, OpenAsks, RemoteAsk, RemoteTell, Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from trio.lowlevel import Task

    from levada.framework.links import Reason
    from levada.framework.supervision import Supervised
    from levada.framework.timers import Timer, Timers

    from .cell import Cell
    from .host import ActorHost
    from .lifecycle import ActorEnding, Group

__all__ = ["Extras"]


class Extras:
    """The record's rare parts."""

    __slots__ = (
        "brought", "children", "ending", "failure", "host", "inbox", "links", "names", "open_asks", "queued", "receive_timer",
        "group", "regroups", "restarts", "signals", "stash", "stop_timer", "supervised", "take", "timers", "touched",
        "waiters", "traced", "watched", "watchers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.brought: RemoteTell | RemoteAsk | None = None
        """The entry that is being handled, if it came over a connection."""
        self.children: dict[Cell, bool] | None = None
        """The children, and whether each was adopted; adopted children are stopped together."""
        self.ending: ActorEnding | None = None
        self.failure: BaseException | None = None
        """The error that the actor object failed with, with its traceback, until it is decided whether the parent fails with it."""
        self.host: ActorHost | None = None
        self.inbox: Any = None
        self.links: dict[Cell, None] | None = None
        self.names: dict[str, Cell] | None = None
        self.open_asks: OpenAsks | None = None
        self.queued = False
        self.receive_timer: Timer | None = None
        self.group: Group | None = None
        self.regroups: deque[float] | None = None
        self.restarts = 0
        self.signals: deque[Any] | None = None
        self.stash: list[Any] | None = None
        self.stop_timer: Timer | None = None
        self.supervised: Supervised | None = None
        self.take: Callable[[Ask], bool] | None = None
        """Takes questions of the idle actor in their askers' tasks; see `Cell.take_at_once`."""
        self.timers: Timers | None = None
        self.touched = 0.0
        self.traced: Wrapped | None = None
        """The entry that is being handled, in a traced system."""
        self.waiters: dict[Task, None] | None = None
        self.watched: dict[tuple[Any, Hashable], Callable[[], None]] | None = None
        self.watchers: dict[Hashable, Callable[[Reason], None]] | None = None
