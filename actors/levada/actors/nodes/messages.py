"""The messages between a driver and its nodes, and `Member`, `NodeUp`, `NodeDown`, `NodeLost`.

A node connects, and sends a `Hello` on the entrypoint. The answer is a `Welcome`, or `Refused` with a text. The connection's identity
(`levada.framework.Identity.name`) says which start of which node it is, so a `Hello` claims nothing. Afterwards both sides use the refs
in these two messages: the driver sends `Spawn`, `Changed` and `Drain` to the node's control actor, the node sends `Ready` or `AppFailed`
to the driver's `Node` actor and everything else to the fleet's coordinator.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Final, Literal

import attrs

from levada.framework import Asks, OneshotSender, Reason, Ref, message, schema_fingerprint
from levada.framework.embedding import UntracedMessage
from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.message import BY_TAG

__all__ = [
    "CONTROL", "AppFailed", "Changed", "Drain", "DrainOf", "Hello", "Leaving", "Look", "LookupOn", "Measure", "Member", "MemberState", "Membership",
    "Named", "NodeDown", "NodeLost", "NodeUp", "Policy", "Ready", "Refused", "Register", "Reload", "Restart", "Room", "Shared", "Show", "Spawn",
    "SpawnOn", "Unregister", "Watch", "Welcome", "Wish", "fingerprints",
]  # fmt: skip


class MemberState(enum.Enum):
    """How far a node is."""

    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


@message("levada.node.Member", frozen=True)
class Member:
    """A node, as its fleet knows it."""

    name: str
    """It stays the same when the node restarts."""
    index: int
    """A number, from 0 on."""
    node_id: bytes
    """16 random bytes for each start of its process; empty until it has said hello."""
    state: MemberState
    pid: int
    """Of its process; 0 until it has said hello."""
    host: str
    """The name of its machine; empty until it has said hello."""
    url: str
    """Where it listens for other members; empty until it is up."""
    started: float
    """When its process was started: seconds since the epoch."""
    restarts: int
    """How often the process was started again."""


@attrs.frozen
class NodeUp:
    """A node's app is ready."""

    member: Member


@attrs.frozen
class NodeDown:
    """A node's process has ended."""

    member: Member
    reason: Reason
    """`Normal` if it was told to and did in time; else `Failed` with a `NodeLost`."""


@attrs.define(eq=False, slots=False, str=False)
class NodeLost(LevadaError):
    """A node has ended without an order, or could not start."""

    node: str = ""
    """Its name."""
    exit_code: int | None = None
    """Of its process, if it exited."""
    signal: int | None = None
    """The signal that killed its process, if one did."""


@message("levada.node.Refused", frozen=True)
class Refused:
    """The driver does not want this node."""

    text: str


@message("levada.node.Welcome")
class Welcome:
    """What a node is to do."""

    name: str
    index: int
    app: str
    """``module:name`` of the app."""
    path: list[str]
    """The driver's ``sys.path``."""
    log_level: int
    drain_timeout: float
    silence: float
    beat: float
    nice: int
    affinity: list[int]
    rlimits: dict[str, int]
    members: list[Member]
    """All nodes, this one too."""
    listen: str
    """The URL where the node is to listen for other members."""
    driver: bytes
    """The driver's node id."""
    driver_url: str
    """Where the driver listens for claims of its refs."""
    node: Ref[Any]
    """Takes `Ready` and `AppFailed`."""
    coordinator: Ref[Any]
    """Takes `SpawnOn`, `LookupOn`, `DrainOf` and `Restart`."""


@message("levada.node.Hello")
class Hello:
    """The first message of a node."""

    node_id: bytes
    pid: int
    host: str
    python: str
    version: str
    """Of levada."""
    schema: str
    """The fingerprint of all these messages."""
    control: Ref[Any]
    answer: OneshotSender[Welcome | Refused]


@message("levada.node.Ready")
class Ready(Asks[str]):
    """The app is ready. The answer is empty, or says why the node is refused."""

    url: str
    """Where it listens for other members."""
    listeners: list[str]
    """URLs of the app."""
    classes: dict[str, str]
    """Fingerprints of the message classes that the node knows, by tag."""


@message("levada.node.AppFailed")
class AppFailed:
    """The app could not be imported, or has failed."""

    text: str
    traceback: str


@message("levada.node.Leaving", frozen=True)
class Leaving(Asks[None]):
    """The node ends in order, by the driver's order or by a signal."""


@message("levada.node.Drain", frozen=True)
class Drain:
    """End in order."""


@message("levada.node.Changed", frozen=True)
class Changed:
    """News of another node."""

    member: Member
    lost: str
    """Why it is down; empty unless it was lost."""
    exit_code: int | None = None
    signal: int | None = None


@message("levada.node.Policy", frozen=True)
class Policy:
    """A `RestartPolicy`, with the names of the error classes."""

    kind: Literal["permanent", "transient", "temporary"]
    max: int
    within: float
    backoff: tuple[float, float]
    jitter: float
    resume: list[str]


@message("levada.node.Room", frozen=True)
class Room:
    """A `MailboxPolicy`."""

    capacity: int | None
    overflow: Literal["wait", "raise", "drop_new", "drop_old", "stop"]


@message("levada.node.Spawn")
class Spawn(Asks[Ref[Any]]):
    """Start an actor on the node that gets this."""

    cls: str
    """``module:qualname`` of a class that the node's app has imported."""
    args: list[Any]
    policy: Policy | None
    mailbox: Room | None


@message("levada.node.Look", frozen=True)
class Look(Asks[str], UntracedMessage):
    """Take a snapshot of the actors; the answer is `levada.actors.console.Snapshot.to_json` as JSON."""

    limit: int
    """Actors in it at most."""


@message("levada.node.Measure", frozen=True)
class Measure(Asks[str], UntracedMessage):
    """Collect metrics; the answer is `levada.actors.metrics.nodes.to_json`."""


@message("levada.node.Watch", frozen=True)
class Watch(Asks[Ref[Any]], UntracedMessage):
    """Let a browser see the actors; the answer is an actor that takes `Show`."""

    actions: bool
    tracebacks: bool


@message("levada.node.Show", frozen=True)
class Show(Asks[str], UntracedMessage):
    """Answer a request of the browser: JSON, see `levada.actors.console.Viewer.answer`."""

    request: str


@message("levada.node.Reload", frozen=True)
class Reload(Asks[list[str]], UntracedMessage):
    """Let the listeners read their files again; the answer says how it went."""


@message("levada.node.SpawnOn")
class SpawnOn(Asks[Ref[Any]]):
    """Let the driver start an actor on a node."""

    spawn: Spawn
    on: str | int
    name: str | None


@message("levada.node.LookupOn")
class LookupOn(Asks[Ref[Any]]):
    """Let the driver find an actor in the registry of a node."""

    name: str
    on: str | int


@message("levada.node.DrainOf")
class DrainOf(Asks[None]):
    """Let the driver drain a node."""

    name: str


@message("levada.node.Membership")
class Membership:
    """An actor is a member of a group, or is none any more."""

    topic: Any
    node: bytes
    """Node id of the actor's process."""
    number: int
    """The actor's `Ref.incarnation` there."""
    ref: Ref[Any] | None
    """None: it has left."""


@message("levada.node.Wish")
class Wish:
    """An actor is to join a group, or to leave it."""

    topic: Any
    node: bytes
    """Node id of the actor's process, which decides."""
    ref: Ref[Any]
    member: bool


@message("levada.node.Named")
class Named:
    """A name of the fleet has another actor, or none."""

    name: str
    ref: Ref[Any] | None


@message("levada.node.Shared")
class Shared:
    """News of groups and names; the first of them is all there is."""

    news: list[Membership | Named | Wish]
    whole: bool
    """Whether this is all that there was to say."""


@message("levada.node.Register")
class Register(Asks[None]):
    """Give an actor a name of the fleet."""

    name: str
    ref: Ref[Any]


@message("levada.node.Unregister")
class Unregister(Asks[None]):
    """Free a name of the fleet."""

    name: str


@message("levada.node.Restart")
class Restart(Asks[None]):
    """Let the driver restart a node, or all."""

    node: str | None
    rolling: bool


CONTROL: Final = (
    Member,
    Refused,
    Welcome,
    Hello,
    Ready,
    AppFailed,
    Drain,
    Changed,
    Policy,
    Room,
    Look,
    Measure,
    Watch,
    Show,
    Reload,
    Spawn,
    SpawnOn,
    LookupOn,
    DrainOf,
    Membership,
    Wish,
    Named,
    Shared,
    Register,
    Unregister,
    Restart,
)


def fingerprints(tags: Iterable[str] | None = None) -> dict[str, str]:
    """Return the fingerprint of each message class that can travel.

    Args:
        tags: which; None: all that this process knows.
    """
    found: dict[str, str] = {}
    for tag in list(BY_TAG) if tags is None else tags:
        kind = BY_TAG.get(tag)
        if kind is not None:
            try:
                found[tag] = schema_fingerprint([kind])
            except ConfigurationError:
                pass  # a field of it cannot travel, so no message of it ever will
    return found
