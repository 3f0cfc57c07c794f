"""The interface between `ActorSystem` and the runtime below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from trio import CapacityLimiter

    from levada.framework.events import EventStream, RateLimitedLog
    from levada.framework.failure_log import FailureLog
    from levada.framework.platform import Platform
    from levada.framework.ref import Ref
    from levada.framework.timers import TimerHeap
    from levada.framework.tracing import Tracing

    from .ask import WaitGraph
    from .cell import Cell
    from .lifecycle import Lifecycle
    from .observer import Observer
    from .scheduler import RunQueue

__all__ = ["ActorObject", "System", "SystemCounters", "ThreadInbox"]


@attrs.define
class SystemCounters:
    """The counters of a system, see `Statistics`."""

    spawned: int = 0
    stopped: int = 0
    failures: int = 0
    unsupervised: int = 0
    restarts: int = 0
    unhandled: int = 0
    late_replies: int = 0
    slow_turns: int = 0


class ActorObject(Protocol):
    """The object that a cell runs."""

    _table: ClassVar[dict[Any, Any]]
    _is_traced: ClassVar[bool]


class ThreadInbox(Protocol):
    """Messages from other threads."""

    def is_home(self) -> bool:
        """Whether this is the system's thread, inside its run of trio."""
        ...

    def put(self, cell: Any, message: Any) -> None:
        """Send a message; from any thread."""

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the system's thread soon; from any thread."""


class System(Protocol):
    """The parts of an `ActorSystem` that the runtime uses; `levada.framework.system` describes them."""

    name: str
    ask_timeout: float | None
    stop_timeout: float
    max_waiting: int
    random: random.Random
    counters: SystemCounters
    events: EventStream
    failure_log: FailureLog
    log_unreadable: RateLimitedLog
    platform: Platform
    heap: TimerHeap
    tracing: Tracing | None
    observe: Observer
    blocking_limiter: CapacityLimiter
    fatal: BaseException | None
    scheduler: RunQueue
    lifecycle: Lifecycle
    waits: WaitGraph
    root: Cell

    @property
    def inbox(self) -> ThreadInbox:
        """Messages from other threads."""
        ...

    @property
    def phase(self) -> str:
        """The phase of the system."""
        ...

    def start_task(self, function: Callable[..., Awaitable[object]], *args: Any, name: str) -> None:
        """Run a task of the runtime in the system's nursery."""

    def install(
        self,
        parent: Cell,
        actor: Any,
        factory: Callable[..., Any],
        args: tuple[Any, ...],
        name: str | None,
        mailbox: Any,
        supervise: Any,
        adopted: bool = False,
    ) -> Cell:
        """Make an actor object the actor of a new cell below `parent`."""
        ...

    def dead_letter(self, message: Any, to: Ref[Any], why: str) -> None:
        """Record a message that reached no handler."""

    def crash(self, error: BaseException) -> None:
        """End the system because of an error that no supervisor handled."""

    def root_ended(self) -> None:
        """Record that all actors have ended."""

    def strict_check(self, cell: Cell, message: Any) -> None:
        """In strict mode, check a `tell`."""

    def strict_answer(self, cell: Cell, question: Any, answer: Any) -> Any:
        """In strict mode, check an answer and return it."""
