"""The interface for code that runs machines inside actors: protocol drivers, bridges, anything driven by a network.

It has three things that applications do not need:

* **Children driven by direct calls.** A mailbox turn costs more than all of a protocol's work for one frame. `adopt` makes an actor
  object a child without a factory, and its parent calls its methods; the child can still be watched, linked and killed like any actor.
  `release` ends it; `signal_exit` ends it as if something it was linked to was lost.
* **The runtime's record of an actor**: `local_ref` returns its `LocalRef`, a `Ref` with the actor's `ActorPhase` and more. A driver
  that uses it often keeps it.
* **Channels whose other half is in another process**: `ChannelCore` is the core of a channel, and its module documentation says how a
  network takes the place of either half. An `Envelope` is a channel entry for a message that is decoded only when it is received.

Everything here belongs to the system's thread.

Example:
    >>> from typing import Any
    >>> import trio
    >>> from levada.framework import Actor, ActorSystem, Asks, handles, message
    >>> @message
    ... class Open(Asks[str]):
    ...     pass
    >>> class Stream(Actor[Any]):
    ...     received: bytes = b""
    ...     def feed(self, data: bytes) -> None:
    ...         self.received += data
    >>> class Connection(Actor[Open]):
    ...     @handles
    ...     def open(self, m: Open) -> str:
    ...         stream = Stream()
    ...         adopt(self, stream)
    ...         stream.feed(b"hello")
    ...         path = stream.ref.path
    ...         release(stream)
    ...         return f"{path}: {local_ref(stream).phase.value}"
    >>> async def main() -> None:
    ...     async with ActorSystem() as system:
    ...         print(await system.spawn(Connection, name="connection").ask(Open()))
    >>> trio.run(main)
    /connection/$2: stopped

Private fields used here: ``Actor._bound``, ``Actor._cell``, ``Cell._scheduler``.
"""

from __future__ import annotations

from typing import Any

from ._runtime.ask import Ask, ThreadAsk, stopped_error
from ._runtime.cell import Cell as LocalRef
from ._runtime.cell import make_dead as dead_ref
from ._runtime.channel_core import (
    LARGE,
    ChannelCore,
    Envelope,
    Half,
    Mode,
    Outcome,
    Receipt,
    TerminalState,
    Tracked,
    let_others_run,
)
from ._runtime.phase import RUNNING, ActorPhase
from .actor import Actor
from .links import NORMAL, Reason

__all__ = [
    "LARGE", "ActorPhase", "Ask", "ChannelCore", "Envelope", "Half", "LocalRef", "Mode", "Outcome", "Receipt",
    "TerminalState", "ThreadAsk", "Tracked", "adopt", "dead_ref", "let_others_run", "local_ref", "release",
    "signal_exit", "stopped_error",
]  # fmt: skip


def adopt(parent: Actor[Any], child: Actor[Any]) -> bool:
    """Make an actor object a child of `parent`, with an unbounded mailbox and no supervision; its `Actor.started` runs soon.

    When the parent ends, children adopted one after another are stopped together: they share ``stop_timeout`` seconds.
    Costs 1.5 µs; `Actor.spawn` with a function that returns the object costs 2.5.  If the parent is ending, does nothing and returns False.
    """
    cell: LocalRef = parent._cell
    if cell.phase is not RUNNING:
        return False
    cell._scheduler.system.install(cell, child, type(child), (), None, None, "stop", True)
    return True


def release(actor: Actor[Any], reason: Reason = NORMAL) -> None:
    """End an actor whose hooks have nothing left to do.

    An idle actor without children, tasks and contexts ends immediately, without `Actor.stopping`: 2 µs, not 6 and a turn of a worker.
    Any other actor ends as by `Ref.stop`, before its queued messages.
    """
    cell: LocalRef = actor._cell
    cell._scheduler.system.lifecycle.release(cell, reason)  # `cell.system` would be one call more


def signal_exit(actor: Actor[Any], source: Any, reason: Reason) -> None:
    """Give an actor the exit signal of `source`, as if they were linked: it ends for `reason`, or gets an `Exit` if it traps exits."""
    cell: LocalRef = actor._cell
    cell.system.lifecycle.exit_signal(cell, source, reason)


def local_ref(actor: Actor[Any]) -> LocalRef:
    """Return the runtime's record of an actor.

    Besides the interface of `Ref` a driver may use: ``phase``, ``context`` (None unless the actor has set a ContextVar), ``reason``
    (why it ended), ``system``, ``accepts_links``; ``try_tell``, ``on_room`` and ``on_stopped``; and, as the proxy of an actor in
    another system, ``add_watcher``, ``forget_watcher``, ``tie``, ``untie`` and ``exited``.

    Raises:
        ActorError: the actor was not spawned.
    """
    return actor._bound()
