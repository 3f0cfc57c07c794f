"""Routers: actors that forward each message to one of several others, or to all of them.

Spawn a router like any actor, from a `pool`, whose routees are its children, or from a `group`, whose routees join and leave
(`Groups`).  It takes messages of any class.  It forwards the envelope of an ask, so the reply does not pass the router, and the
`WaitGraph` follows the question.

There are three kinds with the same interface:

* `Router` picks a routee for each message at once: one table look-up, one call, one `tell`; no coroutine, no state per message
  (0.3 µs for each message and hop on the machine where a bare tell and its handling take 0.2 µs).
* `BroadcastRouter` tells all routees.
* `PullRouter` picks no routee: its messages stay in its mailbox until a routee is free, so the bound of that mailbox holds senders
  back.  A routee gets work as a `Pull` in its mailbox: it takes the router's oldest message, gets a new `Pull` behind it, and handles
  the message.  So a routee holds at most one message, finishes it before it takes the next, and loses no other if it fails.
  A routee in another system is sent one message, and the next when its system reports that it has finished.
  The router itself never runs for a message: it is a loop actor that sleeps, and the sender's `tell` and the routee's turn call its
  inbox (`_pull.PullRouter`).

A routee has a label that survives a restart: the number of its place in the pool, or the path of a group's member.
The runtime calls back in the same turn when a routee ends, so no message goes to a dead one.

Private fields used here: ``Cell._table``.
"""

from __future__ import annotations

import functools
import logging
import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, Literal, TypeVar, TypeVarTuple, overload

import attrs
import trio

from ._pull import PullRouter
from ._routees import GroupMembers, PoolChildren, Resize, RouterBase
from ._runtime.ask import Ask, RemoteAsk, RemoteTell, ThreadAsk, content_of
from ._runtime.cell import Cell
from ._runtime.tracing import TracedAsk, TracedTell, TracedThreadAsk
from .actor import Actor
from .errors import ActorError, AskCycle, ConfigurationError, MailboxFull
from .handlers import handles
from .mailbox import MailboxPolicy
from .ref import Ref
from .supervision import Supervision, restart

__all__ = [
    "Resize", "Routing", "at_random", "broadcast", "consistent_hash", "group", "least_mailbox", "pool", "pull",
    "round_robin",
]  # fmt: skip

logger = logging.getLogger("levada.framework.router")

M = TypeVar("M")
Ts = TypeVarTuple("Ts")

_SAMPLE_AGE = 0.05
"""Seconds after which `least_mailbox` asks a routee in another system again: 20 questions a second at most, of 60 µs each on both sides."""


@attrs.frozen
class Routing:
    """How a router chooses. Made by `round_robin`, `at_random`, `least_mailbox`, `consistent_hash`, `broadcast` and `pull`."""

    kind: Literal["round robin", "random", "least mailbox", "consistent hash", "broadcast", "pull"]
    key: Callable[[Any], str | bytes | int] | None = None
    """For ``consistent hash``: returns the key of a message."""
    virtual_nodes: int = 0
    """For ``consistent hash``: points of each routee on the ring."""


def round_robin() -> Routing:
    """Give each routee one message in turn. Messages of one sender keep their order at each routee, not across routees."""
    return Routing("round robin")


def at_random() -> Routing:
    """Give each message to a random routee (by the system's ``seed``)."""
    return Routing("random")


def least_mailbox() -> Routing:
    """Give each message to the routee with the fewest waiting messages; a running async handler counts as one.

    Looks at all routees for each message. For work of uneven length `pull` is better: it decides when a routee is free.

    For a routee in another system the number is an estimate: its answer when it was last asked, and the messages sent since then.
    It is asked when a message is routed and the last answer is 50 ms old, so an idle router asks no questions.
    """
    return Routing("least mailbox")


def consistent_hash(key: Callable[[Any], str | bytes | int], *, virtual_nodes: int = 100) -> Routing:
    """Give messages with equal keys to the same routee, so that it can keep their state.

    When a pool grows from n to n + 1 routees, about one key in n + 1 moves, all of them to the new routee; when a routee leaves, only
    its keys move.  The same keys go to the same places in every run.  Order per sender and key is kept while the routees stay.

    Args:
        key: returns the key of a message; it must not wait. If it raises, an ask fails, a message becomes a dead letter, and the error is
            logged.
        virtual_nodes: points of each routee on the ring, 1 or more: 100 spread keys within about a tenth.
    """
    if not callable(key):
        raise ConfigurationError(f"key is {key!r}, wanted a function of a message")
    if virtual_nodes < 1:
        raise ConfigurationError(f"virtual_nodes is {virtual_nodes!r}, wanted 1 or more")
    return Routing("consistent hash", key, virtual_nodes)


def broadcast() -> Routing:
    """Give each message, the same object, to all routees. An ask is refused: it has no single answer."""
    return Routing("broadcast")


def pull() -> Routing:
    """Give a routee the next message when it has finished one; until then the message waits in the router's mailbox.

    If the router has a bounded mailbox, senders wait for the work to be done.  Messages are started in the order in which they came.
    A routee that fails loses the message that it was handling and no other; none is handled twice.

    A routee in another system holds one message too, and gets the next one when it has finished.  If it ends before it has started, its
    message goes to another routee.  If it is out of reach, its message becomes a dead letter, or the ask fails with `Lost`.
    """
    return Routing("pull")


@overload
def pool(
    factory: Callable[[*Ts], Actor[M]],
    *args: *Ts,
    size: int,
    routing: Routing | None = None,
    mailbox: MailboxPolicy | None = None,
    supervise: Supervision | None = None,
) -> Callable[[], Actor[M | Resize]]: ...
@overload
def pool(
    factory: Callable[[M], Awaitable[object]],
    *,
    size: int,
    routing: Routing | None = None,
    mailbox: MailboxPolicy | None = None,
    supervise: Supervision | None = None,
) -> Callable[[], Actor[M | Resize]]: ...
def pool(  # type: ignore[misc]  # mypy does not take Any for *Ts
    factory: Callable[..., Any],
    *args: Any,
    size: int,
    routing: Routing | None = None,
    mailbox: MailboxPolicy | None = None,
    supervise: Supervision | None = None,
) -> Callable[[], Actor[Any]]:
    """Describe a router over its own children: ``system.spawn(pool(Worker, size=4))``.

    A routee that fails restarts according to `supervise`, with its ref and mailbox, and stays in the pool.  A routee that ends for good
    leaves it; the pool ends with the last one, so that no sender waits for an empty pool.  ``restart("permanent")`` keeps all.
    If a routee fails too often, the router fails.  `Resize` changes the number of routees.

    If the chosen routee is full (``mailbox``, see `bounded`), the next one with room gets the message; with `consistent_hash`, or if all
    are full, it becomes a dead letter.  An ask waits for room at the chosen routee if its policy is ``wait``, or moves on like a message.

    Args:
        factory: makes a routee, as for `ActorSystem.spawn`.
        args: for the factory.
        size: the initial number of routees, 1 or more.
        routing: the default is `round_robin`.
        mailbox: of each routee; the default is unbounded. The router's own mailbox is an argument of ``spawn``.
        supervise: of each routee; the default is ``restart()``: after failures.

    Raises:
        ConfigurationError: the size is below 1, or `routing` is not a `Routing`.

    Example:
        >>> import trio
        >>> from levada.framework import Actor, ActorSystem, Asks, handles, message
        >>> from levada.framework.router import pool, round_robin
        >>> @message
        ... class Square(Asks[int]):
        ...     n: int
        >>> class Worker(Actor[Square]):
        ...     @handles
        ...     def square(self, m: Square) -> int:
        ...         return m.n**2
        >>> async def main() -> None:
        ...     async with ActorSystem() as system:
        ...         workers = system.spawn(pool(Worker, size=4, routing=round_robin()))
        ...         print([await workers.ask(Square(n)) for n in range(5)])
        >>> trio.run(main)
        [0, 1, 4, 9, 16]
    """
    if not isinstance(size, int) or size < 1:
        raise ConfigurationError(f"the size of the pool is {size!r}, wanted 1 routee or more")
    if not callable(factory):
        raise ConfigurationError(f"pool() got {factory!r}, wanted an Actor class or a factory")
    policy = supervise if supervise is not None else restart()
    return _factory(routing, lambda: PoolChildren(factory, args, size, mailbox, policy))


def group(topic: Hashable, *, routing: Routing | None = None) -> Callable[[], Actor[Any]]:
    """Describe a router over the members of a topic: ``system.spawn(group("prices", routing=broadcast()))``.

    A change of the members (``system.groups``) takes effect at once.  Without members a message becomes a dead letter and an ask fails;
    with `pull` both wait.  Full mailboxes are handled as in a `pool`.

    Members may be actors of other systems.  One is full when the window to its system is; an ask waits there for room.  A message that cannot
    travel becomes a dead letter, and an ask fails.  With `consistent_hash`, the place of a member is its path, and the name of its system.

    Args:
        topic: any hashable value.
        routing: the default is `round_robin`.
    """
    return _factory(routing, lambda: GroupMembers(topic))


def _factory(routing: Routing | None, source: Callable[[], PoolChildren | GroupMembers]) -> Callable[[], Actor[Any]]:
    chosen = routing if routing is not None else round_robin()
    if not isinstance(chosen, Routing):
        raise ConfigurationError(f"routing is {chosen!r}, wanted round_robin(), pull(), …")
    if chosen.kind == "pull":
        return lambda: PullRouter(source())
    if chosen.kind == "broadcast":
        return lambda: BroadcastRouter(source())
    return lambda: Router(source(), chosen)


class _Picker(ABC):
    """Picks a routee for each message. `pick` raises `IndexError` if there is none."""

    def __init__(self) -> None:
        self.routees: list[Any] = []

    def add(self, ref: Any, label: str) -> None:
        self.routees.append(ref)

    def remove(self, ref: Any) -> None:
        self.routees.remove(ref)

    @abstractmethod
    def pick(self, message: Any) -> Any:
        """Return the routee for this message."""

    def others(self, ref: Any) -> Iterable[Any]:
        """List the routees that may take a message for which `ref` has no room."""
        at = self.routees.index(ref)
        return self.routees[at + 1 :] + self.routees[:at]


class _RoundRobin(_Picker):
    def __init__(self) -> None:
        super().__init__()
        self._at = 0

    def pick(self, message: Any) -> Any:
        at = self._at
        routees = self.routees
        if at >= len(routees):
            at = 0
        routee = routees[at]
        self._at = at + 1
        return routee

    def remove(self, ref: Any) -> None:
        at = self.routees.index(ref)
        del self.routees[at]
        if at < self._at:
            self._at -= 1


class _AtRandom(_Picker):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._draw = rng.random

    def pick(self, message: Any) -> Any:
        routees = self.routees
        # A third of the cost of random.choice().
        return routees[int(self._draw() * len(routees))]


class _LeastMailbox(_Picker):
    def __init__(self) -> None:
        super().__init__()
        self._far: dict[Ref[Any], _FarLoad] = {}
        """Estimates for the routees in other systems."""

    def add(self, ref: Any, label: str) -> None:
        super().add(ref, label)
        if not isinstance(ref, Cell):
            self._far[ref] = _FarLoad()

    def remove(self, ref: Any) -> None:
        super().remove(ref)
        self._far.pop(ref, None)

    def pick(self, message: Any) -> Any:
        if not self.routees:
            raise IndexError
        if not self._far:
            return min(self.routees, key=Cell.load)
        now = trio.current_time()
        for ref, far in self._far.items():
            if now >= far.due and ref.takes_work:
                far.ask(ref)
        routee = min(self.routees, key=self._load)
        chosen = self._far.get(routee)
        if chosen is not None:
            chosen.sent += 1
        return routee

    def _load(self, ref: Any) -> int:
        far = self._far.get(ref)
        load: int = ref.load() if far is None else far.waiting + far.sent if far.waiting is not None else ref.depth()
        return load


class _FarLoad:
    """Estimates how many messages wait for a routee in another system. It is asked only while messages are routed, so no timer runs."""

    def __init__(self) -> None:
        self.waiting: int | None = None
        """The last answer."""
        self.sent = 0
        """Messages sent behind the last question that was answered."""
        self.due = -math.inf
        """When to ask again; never while a question is open."""

    def ask(self, ref: Ref[Any]) -> None:
        """Ask the routee."""
        self.due = math.inf
        ref.sample_load(functools.partial(self._got, self.sent))

    def _got(self, before: int, waiting: int | None) -> None:
        self.waiting = waiting
        self.sent -= before
        self.due = trio.current_time() + _SAMPLE_AGE


class _Ring(_Picker):
    """Consistent hashing: each routee owns the arcs of a ring that end at its points."""

    def __init__(self, key: Callable[[Any], str | bytes | int], virtual_nodes: int) -> None:
        super().__init__()
        self._key = key
        self._nodes = virtual_nodes
        self._labels: dict[Any, str] = {}
        self._points: list[tuple[int, str]] = []
        self._owners: dict[str, Any] = {}

    def add(self, ref: Any, label: str) -> None:
        super().add(ref, label)
        while label in self._owners:
            label += "'"  # two systems with the same name and path: the later one gets other keys
        self._labels[ref] = label
        self._owners[label] = ref
        for point in self._points_of(label):
            insort(self._points, point)

    def remove(self, ref: Any) -> None:
        super().remove(ref)
        label = self._labels.pop(ref)
        del self._owners[label]
        for point in self._points_of(label):
            del self._points[bisect_left(self._points, point)]

    def pick(self, message: Any) -> Any:
        points = self._points
        at = bisect_right(points, (_hash(self._key(message)), ""))
        return self._owners[points[at if at < len(points) else 0][1]]

    def others(self, ref: Any) -> Iterable[Any]:
        return ()

    def _points_of(self, label: str) -> Iterator[tuple[int, str]]:
        return ((_hash(f"{label}#{node}"), label) for node in range(self._nodes))


def _hash(key: str | bytes | int) -> int:
    """Place a key on the ring; the same in every process, unlike Python's hash of text."""
    if isinstance(key, str):
        data = b"s" + key.encode()
    elif isinstance(key, bytes):
        data = b"b" + key
    elif isinstance(key, int):
        data = b"i%d" % key
    else:
        raise TypeError(f"the key is {type(key).__name__}, wanted str, bytes or int")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def _picker(routing: Routing, rng: random.Random) -> _Picker:
    match routing.kind:
        case "random":
            return _AtRandom(rng)
        case "least mailbox":
            return _LeastMailbox()
        case "consistent hash":
            assert routing.key is not None
            return _Ring(routing.key, routing.virtual_nodes)
        case _:
            return _RoundRobin()


class Router(RouterBase):
    """Forwards each message to one routee, see `pool` and `group`."""

    routing: Routing

    def begin(self) -> None:
        self._picker = _picker(self.routing, self.system.random)
        self._pick = self._picker.pick

    def add(self, ref: Ref[Any], label: str) -> None:
        self._picker.add(ref, label)

    def remove(self, ref: Ref[Any]) -> None:
        self._picker.remove(ref)

    @handles
    def on_resize(self, m: Resize) -> None:
        self.source.resize(self, m.size)

    @handles
    def on_message(self, m: object) -> None:
        try:
            routee = self._pick(m)
        except Exception as error:  # noqa: BLE001 - the key function is the user's; one bad message must not end the pool
            self._not_picked(m, error)
            return
        try:
            routee.tell(m)
        except MailboxFull as full:
            self._move_on(m, routee, full)
        except Exception as error:  # noqa: BLE001 - it cannot travel; one bad message must not end the pool
            self.not_taken(m, routee, error)

    def on_wrapped_tell(self, entry: RemoteTell | TracedTell) -> None:
        """Forward a message with its peer, or the context of its sender."""
        if type(entry.message) is Resize:
            self.on_resize(entry.message)
            return
        try:
            routee = self._pick(entry.message)
        except Exception as error:  # noqa: BLE001 - as above
            self._not_picked(entry, error)
            return
        try:
            _pass_on(entry, routee)
        except MailboxFull as full:
            self._move_on(entry, routee, full)
        except Exception as error:  # noqa: BLE001 - as above
            self.not_taken(entry, routee, error)

    def on_ask(self, question: Ask) -> None:
        """Forward the envelope, so that the reply goes straight to the asker."""
        if question.settled:
            question.pass_over()
            return
        if type(question.message) is Resize:
            question.fail(ActorError(f"{self.ref.path} has no answer to Resize: tell it", actor=self.ref.path))
            return
        try:
            routee = self._pick(question.message)
        except Exception as error:  # noqa: BLE001 - as above
            self._not_picked(question, error)
            return
        try:
            self._hand_on(question, routee)
        except (MailboxFull, AskCycle) as error:
            self._move_on(question, routee, error)

    def _hand_on(self, question: Ask, routee: Any) -> None:
        if isinstance(routee, Cell):
            self.system.waits.forward(question, routee)
        routee.enqueue(question)

    def _move_on(self, entry: Any, full: Any, error: ActorError) -> None:
        for routee in self._picker.others(full):
            try:
                if isinstance(entry, Ask):
                    self._hand_on(entry, routee)
                else:
                    _pass_on(entry, routee)
            except (MailboxFull, AskCycle):
                continue
            except Exception as not_taken:  # noqa: BLE001 - as above
                self.not_taken(entry, routee, not_taken)
            return
        self.refuse(entry, error, "mailbox full")

    def _not_picked(self, entry: Any, error: Exception) -> None:
        path = self.ref.path
        if not self._picker.routees:
            self.refuse(entry, ActorError(f"{path} has no routees now", actor=path), "no routee")
            return
        self.system.failure_log.log(logger, error, "%s: the key function failed", path, actor=path, event="no_key")
        self.refuse(entry, error, "no key")


class BroadcastRouter(RouterBase):
    """Forwards each message to all routees, see `broadcast`."""

    def begin(self) -> None:
        self._routees: dict[Ref[Any], None] = {}

    def add(self, ref: Ref[Any], label: str) -> None:
        self._routees[ref] = None

    def remove(self, ref: Ref[Any]) -> None:
        del self._routees[ref]

    @handles
    def on_resize(self, m: Resize) -> None:
        self.source.resize(self, m.size)

    @handles
    def on_message(self, m: object) -> None:
        if not self._routees:
            self.system.dead_letter(m, self.ref, "no routee")
        for routee in list(self._routees):
            try:
                routee.tell(m)
            except MailboxFull:
                self.system.dead_letter(m, routee, "mailbox full")
            except Exception as error:  # noqa: BLE001 - it cannot travel; the other routees get it
                self.not_taken(m, routee, error)

    def on_wrapped_tell(self, entry: RemoteTell | TracedTell) -> None:
        """Forward a message to all, with its peer, or the context of its sender."""
        if type(entry.message) is Resize:
            self.on_resize(entry.message)
            return
        if not self._routees:
            self.system.dead_letter(entry, self.ref, "no routee")
        for routee in list(self._routees):
            try:
                _pass_on(entry, routee)
            except MailboxFull:
                self.system.dead_letter(entry, routee, "mailbox full")
            except Exception as error:  # noqa: BLE001 - as above
                self.not_taken(entry, routee, error)

    def on_ask(self, question: Ask) -> None:
        """Refuse, because a question has one answer."""
        path = self.ref.path
        kind = type(question.message).__name__
        what = f"{path} broadcasts, so the ask of {kind} has no single answer; tell it, or use another routing"
        question.fail(ActorError(what, actor=path))


def _pass_on(entry: Any, routee: Ref[Any]) -> None:
    """Tell a routee what a router got; one in another system does not learn of a peer."""
    routee.tell(entry if isinstance(routee, Cell) or type(entry) is TracedTell else content_of(entry))


def _route_envelopes(kind: Any) -> None:
    """Give a router the envelopes of asks, and no inline calls, which have no envelope."""
    asks = dict.fromkeys((Ask, RemoteAsk, ThreadAsk, TracedAsk, TracedThreadAsk), kind.on_ask)
    tells = dict.fromkeys((RemoteTell, TracedTell), kind.on_wrapped_tell)
    kind._table.update({**asks, **tells, None: {}})


_route_envelopes(Router)
_route_envelopes(BroadcastRouter)
