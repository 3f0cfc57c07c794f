"""The messages between a driver and its nodes, and `Member`, `NodeUp`, `NodeDown`, `NodeLost`.

A node connects, and sends a `Hello` to the entrypoint. The answer is a `Welcome`, or `NodeRefused` with a text. The connection's identity
(`levada.framework.Identity.name`) names the node and its start, so `Hello` does not. Then both sides use the refs in these two
messages: the driver sends `Spawn`, `Changed` and `Drain` to the node's control actor, the node sends `Imported`, `Ready`, `Leaving` and
`AppFailed` to the driver's `Node` actor and everything else to the fleet's coordinator.
"""

from __future__ import annotations

import enum
from typing import Any, Final, Literal

import attrs

from levada.framework import Asks, OneshotSender, Reason, Ref, message
from levada.framework.embedding import UntracedMessage
from levada.framework.errors import ActorError, LevadaError

__all__ = [
    "CONTROL", "LINE_END", "AppFailed", "Changed", "Drain", "DrainOf", "Finish", "Hello", "Imported", "Join", "Leaving", "Look",
    "LookupOn", "MailboxRoom", "Measure", "Member", "MemberState", "Membership", "Named", "NodeDown", "NodeLeaves",
    "NodeLost", "NodeRefused", "NodeUp", "Packed", "Policy", "Ready", "Register", "Reload", "Restart", "Settle", "SharedChanges", "Show",
    "Spawn", "SpawnOn", "Unregister", "Watch", "Welcome", "Wish",
]  # fmt: skip

LINE_END: Final = "\x1e"
"""Between the lines of a record in the log of a node that is a child process; a record goes to the driver as one line."""


class MemberState(enum.Enum):
    """The state of a node."""

    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


@message("levada.node.Member", frozen=True)
class Member:
    """A node, as its fleet knows it."""

    name: str
    """The node's name, which a restart does not change."""
    index: int
    """The node's number in the fleet, from 0."""
    node_id: bytes
    """16 random bytes for each start of its process; empty until it has said hello."""
    state: MemberState
    pid: int
    """Its process id; 0 until it has said hello."""
    host: str
    """The name of its machine; empty until it has said hello."""
    url: str
    """Where it listens for other members; empty until it has imported its app."""
    started: float
    """When its process was started, in seconds since 1970."""
    restarts: int
    """How often the process was restarted."""


@attrs.frozen
class NodeUp:
    """A node's app is ready."""

    member: Member


@attrs.frozen
class NodeDown:
    """A node's process has ended."""

    member: Member
    reason: Reason
    """`Normal` if it drained in time when it was told to; otherwise `Failed` with a `NodeLost`."""


@attrs.define(eq=False, slots=False, str=False)
class NodeLost(LevadaError):
    """A node ended without being told to, or could not start."""

    loss = "a node was lost"

    node: str = ""
    """Its name."""
    exit_code: int | None = None
    """The exit code of its process, if it exited."""
    signal: int | None = None
    """The signal that killed its process, if one did."""


class NodeLeaves(ActorError):
    """A node starts no actor, because it has begun to drain."""

    loss = "a node is about to leave"


@message("levada.node.Refused", frozen=True)
class NodeRefused:
    """The driver refuses this node."""

    text: str


@message("levada.node.Welcome")
class Welcome:
    """The driver's answer to `Hello`: the app, the settings, and the other members."""

    name: str
    index: int
    app: str
    """``module:name`` of the app."""
    path: list[bytes]
    """The driver's ``sys.path``, as names of files, which need not be Unicode."""
    log_level: int
    drain_timeout: float
    silence: float
    beat: float
    nice: int
    affinity: list[int]
    rlimits: dict[str, int]
    members: list[Member]
    """All nodes, including this one."""
    listen: str
    """The URL at which the node listens for other members."""
    driver: bytes
    """The driver's node id."""
    driver_url: str
    """The URL at which the driver listens for claims of its refs."""
    node: Ref[Any]
    """Takes `Imported`, `Ready`, `Leaving` and `AppFailed`."""
    coordinator: Ref[Any]
    """Takes `SpawnOn`, `Join`, `LookupOn`, `DrainOf`, `Restart`, `SharedChanges`, `Register` and `Unregister`."""


@message("levada.node.Hello")
class Hello(UntracedMessage):
    """The first message of a node."""

    node_id: bytes
    pid: int
    host: str
    python: str
    version: str
    """The version of levada."""
    schema: str
    """The fingerprint of the messages in `CONTROL`."""
    control: Ref[Any]
    answer: OneshotSender[Welcome | NodeRefused]


@message("levada.node.Ready")
class Ready(Asks[str], UntracedMessage):
    """The app is ready. The answer is empty, or the reason why the node is refused."""

    url: str
    """Where it listens for other members."""
    listeners: list[str]
    """The URLs that the app serves."""
    classes: dict[str, list[tuple[str, str, bool]]]
    """The node's message classes, as `levada.framework.codec.schema_of` describes them."""


@message("levada.node.Imported", frozen=True)
class Imported(Asks[str], UntracedMessage):
    """The app's module is imported. With an empty answer actors can be started here, and the app; any other says why the node is refused."""

    url: str
    """Where it listens for other members."""
    classes: dict[str, list[tuple[str, str, bool]]]
    """The message classes so far, as in `Ready`."""


@message("levada.node.AppFailed")
class AppFailed:
    """The app could not be imported, or has failed."""

    text: str
    traceback: str


@message("levada.node.Leaving", frozen=True)
class Leaving(Asks[None], UntracedMessage):
    """The node begins to drain, by the driver's order or by a signal."""


@message("levada.node.Drain", frozen=True)
class Drain(UntracedMessage):
    """Drain: let the app end, then end the process."""


@message("levada.node.Changed", frozen=True)
class Changed(UntracedMessage):
    """Another node has changed."""

    member: Member
    lost: str
    """Why it was lost; empty if it was not."""
    exit_code: int | None = None
    signal: int | None = None
    forgotten: bool = False
    """Whether the block that started it has ended, so that it is a member no more."""


@message("levada.node.Policy", frozen=True)
class Policy:
    """A `RestartPolicy`, with the names of the error classes."""

    kind: Literal["permanent", "transient", "temporary"]
    max: int
    within: float
    initial_backoff: float
    max_backoff: float
    jitter: float
    resume: list[str]


@message("levada.node.Room", frozen=True)
class MailboxRoom:
    """A `MailboxPolicy`."""

    capacity: int | None
    overflow: Literal["wait", "raise", "drop_new", "drop_old", "stop"]


@message("levada.node.Packed", frozen=True)
class Packed:
    """An encoded value, which the driver passes on as it is: it may not know the classes in it, or other versions of them."""

    data: bytes
    handles: list[Any]
    """The refs and channels in the value."""


@message("levada.node.Spawn")
class Spawn(Asks[Ref[Any]], UntracedMessage):
    """Start an actor on this node."""

    cls: str
    """``module:qualname`` of a class that the node's app has imported."""
    args: list[Any]
    """The arguments of the class, each as a `Packed`. In a system without nodes, where the order does not travel, they are as they are."""
    policy: Policy | None
    mailbox: MailboxRoom | None
    label: str = ""
    """Its name on the node, if no other actor has that there."""


@message("levada.node.End")
class End(UntracedMessage):
    """Kill an actor that was started in vain: its name is taken, or nobody waits for it any more."""

    ref: Ref[Any]


@message("levada.node.Finish")
class Finish(UntracedMessage):
    """Stop an actor for good, after the messages that it has: it moves to another node."""

    ref: Ref[Any]


@message("levada.node.Look", frozen=True)
class Look(Asks[str], UntracedMessage):
    """Take a snapshot of the actors; the answer is `levada.actors.console.Snapshot.to_json` as JSON."""

    limit: int
    """The most actors in it."""


@message("levada.node.Measure", frozen=True)
class Measure(Asks[str], UntracedMessage):
    """Collect metrics; the answer is `levada.actors.metrics.nodes.to_json`."""


@message("levada.node.Watch", frozen=True)
class Watch(Asks[Ref[Any]], UntracedMessage):
    """Start a viewer for a browser; the answer is an actor that takes `Show`."""

    actions: bool
    tracebacks: bool


@message("levada.node.Show", frozen=True)
class Show(Asks[str], UntracedMessage):
    """Answer a request of the browser: JSON, see `levada.actors.console.Viewer.answer`."""

    request: str


@message("levada.node.Reload", frozen=True)
class Reload(Asks[list[str]], UntracedMessage):
    """Make the listeners read their files again; the answer has a line for each listener with files."""


@message("levada.node.SpawnOn")
class SpawnOn(Asks[Ref[Any]], UntracedMessage):
    """Ask the driver to start an actor on a node."""

    spawn: Spawn
    on: str | int
    name: str | None


@message("levada.node.Join")
class Join(Asks[None]):
    """Ask the driver for a singleton; the first request starts it."""

    spawn: Spawn
    on: str | int
    name: str


@message("levada.node.Settle", frozen=True)
class Settle(Asks[None], UntracedMessage):
    """Ask a node to answer when it knows so many changes of names, and what it has sent to the actor of a name has arrived."""

    name: str
    renames: int


@message("levada.node.LookupOn")
class LookupOn(Asks[Ref[Any]], UntracedMessage):
    """Ask the driver for an actor in the registry of a node."""

    name: str
    on: str | int


@message("levada.node.DrainOf")
class DrainOf(Asks[None], UntracedMessage):
    """Ask the driver to drain a node."""

    name: str


@message("levada.node.Membership")
class Membership:
    """An actor has joined a group, or left it."""

    topic: Any
    node: bytes
    """The node id of the actor's process."""
    number: int
    """The actor's `Ref.incarnation` there."""
    ref: Ref[Any] | None
    """The actor; None: it has left."""


@message("levada.node.Wish")
class Wish:
    """A request that an actor joins a group, or leaves it."""

    topic: Any
    node: bytes
    """The node id of the actor's process, which decides."""
    ref: Ref[Any]
    member: bool


@message("levada.node.Named")
class Named:
    """A name of the fleet belongs to another actor now, or to none."""

    name: str
    ref: Ref[Any] | None
    kept: int
    """The number of its keeping; 0: it is not kept, and free without an actor."""


@message("levada.node.Shared")
class SharedChanges(UntracedMessage):
    """Changes of groups and names. The first messages to a process have the complete state."""

    news: list[Membership | Named | Wish]
    whole: bool
    """Whether no more changes are waiting to be sent."""
    renames: int
    """If so, the number of changes of names so far, as the driver counts them."""


@message("levada.node.Register")
class Register(Asks[None], UntracedMessage):
    """Give an actor a name of the fleet."""

    name: str
    ref: Ref[Any]


@message("levada.node.Unregister")
class Unregister(Asks[None], UntracedMessage):
    """Free a name of the fleet."""

    name: str


@message("levada.node.Renames", frozen=True)
class Renames(Asks[int], UntracedMessage):
    """Ask the driver how many changes of names of the fleet there were."""


@message("levada.node.Restart")
class Restart(Asks[None], UntracedMessage):
    """Ask the driver to restart a node, or all nodes."""

    node: str | None
    rolling: bool


CONTROL: Final = (
    Member,
    NodeRefused,
    Welcome,
    Hello,
    Imported,
    Ready,
    AppFailed,
    Drain,
    Changed,
    Policy,
    MailboxRoom,
    Packed,
    Look,
    Measure,
    Watch,
    Show,
    Reload,
    Spawn,
    End,
    Finish,
    SpawnOn,
    Join,
    Settle,
    LookupOn,
    DrainOf,
    Membership,
    Wish,
    Named,
    SharedChanges,
    Register,
    Unregister,
    Renames,
    Restart,
)
