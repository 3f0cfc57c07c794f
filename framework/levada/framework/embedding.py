"""The interface for code that runs machines inside actors: protocol drivers, bridges, anything driven by a network.

It has things that applications do not need:

* **Children driven by direct calls.** A mailbox turn costs more than all of a protocol's work for one frame. `adopt` makes an actor
  object a child without a factory, and its parent calls its methods; the child can still be watched, linked and killed like any actor.
  `release` ends it, `finish` ends it after its queued messages; `signal_exit` ends it as if something it was linked to was lost;
  `restart_actor` restarts it on request.
* **The runtime's record of an actor**: `local_ref` returns its `LocalRef`, a `Ref` with the actor's `ActorPhase` and more. A driver
  that uses it often keeps it.
* **Peers**: an actor that is a connection derives from `ConnectionActor`, so that `Actor.peer` of its children is the other end. What it
  passes to other actors goes by `send_for` and `ask_for`, or in a `RemoteTell` or `RemoteAsk`. A task that runs a user's function calls
  `act_for`.
* **Channels whose other half is in another process**: `ChannelCore` is the core of a channel, and its module documentation says how a
  network takes the place of either half. An `Envelope` is a channel entry for a message that is decoded only when it is received.
* **Questions that an actor hands on**: a parent whose `LocalRef.take_at_once` has a function takes questions without a turn of its own, and has
  a child handle them with `handle_or_enqueue`, in the asker's task. `pass_on` says which actor the asker waits for now, so that a circle of
  asks is found, and an `AddressedMessage` says in a time-out whom it was for. A shard of durable actors does all this.
* **An actor in front of another one**: a `Forwarder` passes everything on to one actor, which may change, or be away for a while.
* **Work before an ask**: a task in `BEFORE_ASKS` awaits a function before each of its asks. A ref of another process calls `prepare_to_ask`.
* **Routers whose routees are in another process**: a `Work` in an actor's mailbox brings one message of a `pull` router, and reports when
  it is finished.
* **Errors that are kept**: `drop_frames` leaves the lines of their tracebacks, but not the frames, which hold messages and refer to each other.
* **Lines that peers cause**: a `RateLimitedLog` logs ten a second. The `FailureLog` of a system (`failure_log`) limits tracebacks;
  `loss_of` tells whether others are the cause of a failure.
* **Traces**: `TracedTell` and `TracedAsk` carry the context of a sender to a ref of another system; `make_core` makes the channels that a
  message brings. `levada.framework.tracing` describes contexts.

Everything here belongs to the system's thread, except `drop_frames`.

Example:
    >>> from typing import Any, ClassVar
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

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import trio

from ._forwarder import Forwarder
from ._pull import Work
from ._runtime.ask import (
    BEFORE_ASKS,
    AddressedMessage,
    Ask,
    RemoteAsk,
    RemoteTell,
    ThreadAsk,
    prepare_to_ask,
    question_name,
    stopped_error,
)
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
from ._runtime.remains import drop_frames
from ._runtime.remote import act_for
from ._runtime.tokens import Stop
from ._runtime.tracing import TracedAsk, TracedTell, make_core
from .actor import Actor
from .errors import ActorError, ConfigurationError, loss_of
from .events import RateLimitedLog, UntracedMessage
from .failure_log import FailureLog
from .identity import RemotePeer
from .links import NORMAL, SHUTDOWN, Failed, Reason
from .observe import FlowWindow
from .ref import Ref
from .supervision import RestartPolicy, wants_restart

__all__ = [
    "BEFORE_ASKS",
    "LARGE",
    "ActorPhase",
    "AddressedMessage",
    "Ask",
    "ChannelCore",
    "ConnectionActor",
    "DescribedActor",
    "Envelope",
    "FailureLog",
    "Forwarder",
    "Half",
    "LocalRef",
    "Mode",
    "Outcome",
    "RateLimitedLog",
    "Receipt",
    "RemoteAsk",
    "RemoteTell",
    "TerminalState",
    "ThreadAsk",
    "TracedAsk",
    "TracedTell",
    "Tracked",
    "UntracedActor",
    "UntracedMessage",
    "Work",
    "act_for",
    "adopt",
    "ask_for",
    "dead_ref",
    "drop_frames",
    "finish",
    "let_others_run",
    "local_ref",
    "loss_of",
    "make_core",
    "pass_on",
    "prepare_to_ask",
    "question_name",
    "release",
    "restart_actor",
    "send_for",
    "signal_exit",
    "stopped_error",
]  # fmt: skip


M = TypeVar("M")


class DescribedActor(Actor[M], ABC, Generic[M]):
    """An actor that says in a snapshot what it is."""

    _has_about: ClassVar[bool] = True
    subject: ClassVar[str] = ""
    """What it is for a dashboard, which lists all actors of a subject: ``connection``, ``listener``, ``journal``, ``query``."""

    @property
    @abstractmethod
    def about(self) -> str:
        """A short printable text for `ActorInfo.about`. Called for each snapshot, so it must be quick and must not raise."""

    @property
    def window(self) -> FlowWindow | None:
        """`ActorInfo.window`; called as `about` is."""
        return None

    async def report(self) -> Mapping[str, object]:
        """Return its figures for a dashboard: values that JSON has, text printable. Called only while a dashboard shows them.

        Raises:
            LevadaError: there are none now; the dashboard shows the text.

        Cancellation:
            nothing has changed.
        """
        return {}


class UntracedActor(Actor[M], Generic[M]):
    """An actor whose own messages are of no interest in a trace: it keeps up connections, or nodes."""

    _is_traced: ClassVar[bool] = False


class ConnectionActor(DescribedActor[Any], UntracedActor[Any]):
    """An actor that is a connection: it and the actors that it spawns act for `remote_peer`, see `Actor.peer`."""

    _is_connection: ClassVar[bool] = True
    subject = "connection"

    @property
    def about(self) -> str:
        """The other end."""
        peer = self.remote_peer
        return "" if peer is None else str(peer)

    @property
    @abstractmethod
    def remote_peer(self) -> RemotePeer | None:
        """The other end; None as long as there is none."""


def adopt(parent: Actor[Any], child: Actor[Any], *, name: str | None = None) -> bool:
    """Make an actor object a child of `parent`, with an unbounded mailbox and no supervision; its `Actor.started` runs soon.

    Raises `NameTaken` if a living sibling has the name; the default is a number.

    When the parent ends, children adopted one after another are stopped together: they share ``stop_timeout`` seconds.
    Costs 1.5 µs; `Actor.spawn` with a function that returns the object costs 2.5.  If the parent is ending, does nothing and returns False.
    """
    cell: LocalRef = parent._cell
    if cell.phase is not RUNNING:
        return False
    cell._scheduler.system.install(cell, child, type(child), (), name, None, "stop", True)
    return True


def release(actor: Actor[Any], reason: Reason = NORMAL, *, hook: bool = False) -> None:
    """End an actor, as a rule one whose hooks have nothing left to do.

    An idle actor without children, tasks and contexts ends immediately, without `Actor.stopping`: 2 µs, not 6 and a turn of a worker.
    Any other actor ends as by `Ref.stop`, before its queued messages.

    Args:
        actor: to be ended.
        reason: why it ends.
        hook: whether a class that has a `stopping` of its own needs it.
    """
    cell: LocalRef = actor._cell
    cell._scheduler.system.lifecycle.release(cell, reason, hook=hook)  # `cell.system` would be one call more


def finish(ref: LocalRef) -> None:
    """Ask an actor to end after the messages queued so far, and not to restart, whatever its supervision says."""
    ref.admit(Stop(SHUTDOWN, final=True))


def restart_actor(ref: LocalRef) -> None:
    """Restart an actor as after a failure; its running handler is cancelled.

    Raises:
        ConfigurationError: its supervision would not start it again.
    """
    supervised = ref.make_extras().supervised
    reason = Failed(ActorError("restarted on request", actor=ref.path))
    policy = supervised.policy if supervised is not None else None
    if not isinstance(policy, RestartPolicy) or not wants_restart(policy, reason):
        raise ConfigurationError(f"{ref.path} was not spawned with supervise=restart(…), so it would end for good")
    ref.system.lifecycle.request(ref, reason, cancel=True)


def signal_exit(actor: Actor[Any], source: Any, reason: Reason) -> None:
    """Give an actor the exit signal of `source`, as if they were linked: it ends for `reason`, or gets an `Exit` if it traps exits."""
    cell: LocalRef = actor._cell
    cell.system.lifecycle.exit_signal(cell, source, reason)


def local_ref(actor: Actor[Any]) -> LocalRef:
    """Return the runtime's record of an actor.

    Besides the interface of `Ref` a driver may use: ``phase``, ``context`` (None unless the actor has set a ContextVar), ``reason``
    (why it ended), ``system``, ``accepts_links``; ``take_at_once`` and ``handle_or_enqueue``; ``try_tell``, ``on_room`` and ``on_stopped``; and,
    as the proxy of an actor in another system, ``add_watcher``, ``forget_watcher``, ``tie``, ``untie`` and ``exited``.

    Raises:
        ActorError: the actor was not spawned.
    """
    return actor._bound()


def pass_on(question: Ask, ref: LocalRef) -> None:
    """Say which actor has a question now, so the asker waits for that one. The caller puts the question, or an entry of its own, into the mailbox.

    Raises:
        AskCycle: that actor already waits for the asker; nothing has changed. If the asker's task is still in `LocalRef.take_at_once`, the
            ask itself raises this later, and settles the question.
    """
    ref.system.waits.forward(question, ref)


async def send_for(peer: RemotePeer | None, ref: Ref[Any], message: Any) -> None:
    """Send a message of `peer` to an actor, as by `Ref.send`; an actor in another system is not told of the peer."""
    local = peer is not None and isinstance(ref, LocalRef)
    await ref.send(RemoteTell(message, peer) if local else message)


async def ask_for(peer: RemotePeer | None, ref: Ref[Any], message: Any) -> Any:
    """Ask an actor a question of `peer`, as by `Ref.ask` without a timeout; an actor in another system is not told of the peer."""
    if peer is None or not isinstance(ref, LocalRef):
        return await ref.ask(message, timeout=None)
    await trio.lowlevel.checkpoint_if_cancelled()
    if not ref.is_alive:
        raise stopped_error(ref, ref.reason, message)
    question = RemoteAsk(message, ref, peer)
    ref.enqueue(question)
    edge = ref.system.waits.begin(ref, question)
    try:
        return await question.wait()
    finally:
        ref.system.waits.end(edge)
