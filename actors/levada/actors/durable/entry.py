"""`shards` starts the durable actors of a class, and `Shards` and `Entity` reach them."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import attrs
import trio

from levada.actors.apps import importable
from levada.actors.journal import LogStore, partition_of
from levada.actors.journal.places import archive_place, misplaced
from levada.actors.journal.value_rows import takes_values
from levada.framework import Actor, ActorSystem, Asks, Ref, bounded, handles
from levada.framework.errors import ConfigurationError, LevadaError, NameTaken
from levada.framework.files import folder_path
from levada.framework.handlers import flatten
from levada.framework.message import tag_of
from levada.framework.ref import DEFAULT_TIMEOUT

from .access import Access
from .entity import Durable, handler_of, state_not_kept, state_set_by_handlers
from .hosting import MAILBOX
from .opening import AGAIN, Folder, OpenShards, Place, database_at, has_streams, open_journal
from .routing import Follower, Route, ShardRoutes, ToShard, subscribed
from .rows import ShardLog, load_arrow
from .settings import EntityLimits, GetShardStatistics, Keep, ShardSettings, ShardStatistics, Terms, require_keep
from .shard import Finisher, Shard
from .turns import CommandTurn, EntityCommand, Erase

if TYPE_CHECKING:
    from levada.actors.nodes import Nodes

__all__ = ["Entity", "Shards", "shards", "shards_of"]

logger = logging.getLogger("levada.actors.durable")

M = TypeVar("M")
R = TypeVar("R")

LONGEST_ID = 1000
"""The most bytes of an id."""
_SHARD_AGAIN = attrs.evolve(AGAIN, max_backoff=1.0)
"""A shard ends with each append that a failing disk refuses, and what needs no rows should not wait for long."""


@attrs.define(eq=False)
class Entity(Generic[M]):
    """One durable actor, whether it is in memory or not. Made by ``shards[id]``, which is cheap."""

    id: str
    cls: type[Durable[Any]] = attrs.field(repr=False)
    shard: ToShard = attrs.field(repr=False)
    """The shard that owns it."""

    def ask(
        self, message: Asks[R], *, command: str | None = None, timeout: float | None = DEFAULT_TIMEOUT
    ) -> Coroutine[Any, Any, R]:
        """Send a question and return the answer, once everything that the answer depends on is on disk.

        Args:
            message: an instance of a class that the durable actor handles.
            command: an id for this command, text of 1 to 1000 bytes. If the entity has handled a command with this id, nothing is done again, and
                the recorded answer is returned. The entity remembers its newest ids (``shards(remember=…)``).
            timeout: as for `Ref.ask`.

        Raises:
            CommandFailed: the handler raised, and nothing was recorded except what it had committed. It is an `ActorStopped`.
            OutcomeUnknown: the shard was lost meanwhile, or its journal for long; ask again with the same id.
            ReplayFailed: the entity's events cannot be applied.
            EntityErased: the entity was erased.
            CommandReused: the id belongs to another message.
            JournalError: the journal refused the rows.
            AskCycle, AskTimeout, ActorStopped: as for `Ref.ask`.
            ConfigurationError: the durable actor has no handler for the message, or the node of its shard has another version of the class.

        Cancellation:
            a command that has not begun is withdrawn. Otherwise it continues, and its answer is dropped.
        """
        # Not a coroutine function: a coroutine around the one of the ref costs 0.2 µs.
        return self.shard.ask(self._command(message, command), timeout=timeout)

    def tell(self, message: M, *, command: str | None = None) -> None:
        """Send a message without waiting; errors are as for `Ref.tell`. It is lost if the process ends before its events are on disk."""
        self.shard.tell(self._command(message, command))

    async def send(self, message: M, *, command: str | None = None) -> None:
        """Send a message, waiting for room at the shard; errors are as for `Ref.send`."""
        await self.shard.send(self._command(message, command))

    def _command(self, message: Any, command: str | None) -> EntityCommand:
        if type(message) not in self.cls.command_table and handler_of(self.cls, type(message)) is None:
            raise ConfigurationError(f"{self.cls.__name__} has no handler for {type(message).__name__}")
        if command is not None:
            _checked("command", command)
        return EntityCommand(self.id, message, command)


@attrs.define(eq=False)
class Shards(Generic[M]):
    """All entities of a durable class. Made by `shards`.

    Example:
        ``await accounts["anna"].ask(Deposit(5), command="order-17")``
    """

    cls: type[Durable[M]]
    """The durable class."""
    ref: Ref[Any]
    """The actor above the shards: stop it to end all entities. On a node it only follows where they are."""
    _ways: Sequence[ToShard] = attrs.field(repr=False)
    journal: Ref[Any] | None = None
    """The log, which may be in a process of its own. None: `shards_of` found the shards in another process."""
    archive: str = ""
    """Where its old rows go (`Keep.archive`); empty: nowhere, or `shards_of` found the shards in another process."""

    def __getitem__(self, entity: str) -> Entity[M]:
        """Return an entity; its id is text of 1 to 1000 bytes."""
        encoded = _checked("id of an entity", entity)
        return Entity(entity, self.cls, self._ways[partition_of(encoded, len(self._ways))])

    async def erase(self, entity: str, *, timeout: float | None = None) -> int:
        """Erase an entity from the files of the journal; return the number of erased rows. One row stays, which says that the id was erased.

        If the journal was out of reach meanwhile, rows that were erased before are not counted.

        Its reminders are erased too. A command that is being handled fails with `ActorStopped`, all later commands with `EntityErased`. If
        this fails, call it again.

        Args:
            entity: its id.
            timeout: seconds; None: no limit. Whole segments are rewritten, so it can take long.

        Raises:
            EntityErased: it is being erased.
            OutcomeUnknown: the shard was lost meanwhile.
            JournalError: the journal cannot erase it, see `EraseEntity`.
        """
        rows: int = await self[entity].shard.ask(Erase(entity), timeout=timeout)
        return rows

    async def statistics(self) -> ShardStatistics:
        """Add up the counters of all shards."""
        found: list[Any] = [await ref.ask(GetShardStatistics()) for ref in self._ways]
        return ShardStatistics(*(sum(column) for column in zip(*[attrs.astuple(each) for each in found], strict=True)))


def _checked(what: str, text: object) -> bytes:
    """Return a text as bytes."""
    if isinstance(text, str):
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            encoded = b""
        if 1 <= len(encoded) <= LONGEST_ID:
            return encoded
    raise ConfigurationError(f"the {what} is {text!r:.60}, wanted text of 1 to {LONGEST_ID} bytes")


@attrs.frozen
class _Start(Asks[tuple[Ref[Any], Sequence[Ref[Any]]]]):
    """Start the journal and the shards. The answer is their refs."""


class _Root(Actor[_Start]):
    """The actor above the shards of a class in this process, and above its journal if that is a folder."""

    cls: type[Durable[Any]]
    log: ShardLog
    """With the columns of a new log."""
    terms: Terms
    clock: Callable[[], float] | None
    place: Place

    @handles
    async def start(self, _: _Start) -> tuple[Ref[Any], Sequence[Ref[Any]]] | None:
        """Start the journal and the shards."""
        log, terms = self.log, self.terms
        try:
            journal, columns = await open_journal(self, self.place, log.schema, terms.shards)
            if columns is not log.schema:
                log = ShardLog([*log.kinds], columns)
            settings = ShardSettings.of(self.system, self.cls, log, terms, self.clock)
        except (LevadaError, OSError) as error:
            self.reply_later().fail(error)
            self.stop()
            return None
        patience = terms.limits.patience
        found = [
            self.spawn(
                Shard, settings, Access(journal, number, has_streams(self.place), patience, takes_values(self.place)),
                name=str(number), mailbox=bounded(MAILBOX), supervise=_SHARD_AGAIN,
            )
            for number in range(terms.shards)
        ]  # fmt: skip
        self.spawn(Finisher, found, name="finisher")
        return journal, found


@attrs.frozen
class _Here:
    """Shards of this process alone, and their arguments."""

    shards: Shards[Any]
    opening: OpenShards
    clock: Callable[[], float] | None

    @property
    def is_alive(self) -> bool:
        return self.shards.ref.is_alive


@attrs.define
class _Known:
    """The shards that a process can reach under a name."""

    shards: Shards[Any] | None = None
    here: _Here | None = None
    """The newest that this process has started itself."""
    finding: trio.Lock = attrs.field(factory=trio.Lock)

    @property
    def is_alive(self) -> bool:
        return self.shards is not None and self.shards.ref.is_alive


_known: weakref.WeakKeyDictionary[ActorSystem, defaultdict[str, _Known]] = weakref.WeakKeyDictionary()
"""The shards of each system, by the name of the actor above them."""


def _known_as(system: ActorSystem, name: str) -> _Known:
    return _known.setdefault(system, defaultdict(_Known))[name]


async def shards_of(
    system: ActorSystem, cls: type[Durable[M]], *, name: str | None = None, timeout: float | None = DEFAULT_TIMEOUT
) -> Shards[M]:
    """Find the entities of a durable class that `shards` has started in this process, or in the driver of this node.

    Args:
        system: the system of this process.
        cls: the durable class.
        name: the name given to `shards`.
        timeout: seconds to wait until they are started; ``None``: no limit. The default is the system's ``ask_timeout``.

    Raises:
        NameUnknown: they were not started in time.
        ConfigurationError: they have another class; or they were not started in this process, and it is not a node.

    Cancellation:
        has no effect.
    """
    name = name or cls.__name__
    known = _known_as(system, name)
    if not known.is_alive:
        from levada.actors.nodes import nodes_of

        from .fleet_shards import fleet_name

        root = await nodes_of(system).lookup(fleet_name(name), timeout=timeout)
        async with known.finding:  # so that actors that start together share one follower
            if not known.is_alive:
                known.shards = await _follow(system, cls, root)
    found = known.shards
    assert found is not None
    if found.cls is not cls:
        raise ConfigurationError(f"the shards {name!r} are of {found.cls.__qualname__}, not of {cls.__qualname__}")
    return found


async def _follow(system: ActorSystem, cls: type[Durable[M]], root: Ref[Any]) -> Shards[M]:
    owners, count = await subscribed(root)
    routes = ShardRoutes(system, count)
    ref = system.spawn(Follower, routes, root, owners)
    return Shards(cls, ref, [Route(routes, shard) for shard in range(count)])


def _nodes_for(system: ActorSystem, nodes: Nodes | Literal["default"] | None) -> Nodes | None:
    """Return the nodes for the entities; by default the fleet's, if this process is a node."""
    if nodes != "default":
        return nodes
    fleet = _fleet_of(system)
    return None if fleet is None or fleet.is_driver else fleet


def _fleet_of(system: ActorSystem) -> Nodes | None:
    module = sys.modules.get("levada.actors.nodes.nodes")  # if no one has imported it, the system has no fleet
    fleet: Nodes | None = None if module is None else module.fleet_of(system)
    return fleet


async def shards(
    system: ActorSystem,
    cls: type[Durable[M]],
    *,
    events: Any,
    journal: str | os.PathLike[str] | Ref[Any] | LogStore,
    shards: int = 16,
    nodes: Nodes | Literal["default"] | None = "default",
    idle: float = 60.0,
    remember: int = 256,
    snapshot_every: int = 1000,
    max_live: int = 100_000,
    keep: float | Keep | None = None,
    patience: float = 30.0,
    keeper: bool = False,
    name: str | None = None,
    clock: Callable[[], float] | None = None,
) -> Shards[M]:
    """Start the shards of a durable class, or join them.

    Later calls with the same arguments join them. On a node they are the fleet's: the driver has the journal and decides where each shard is,
    whichever node calls first, so they survive the loss of every node. Calls on any node join them, and calls in the driver with ``nodes=``.

    Args:
        system: the system of this process.
        cls: the durable class; all its fields have defaults.
        events: the classes of its events, as a union (``Deposited | Withdrawn``). Each has an `applies` method.
        journal: a folder, made if it is missing, that no other process has open; for entities on nodes, a folder of the driver's machine. Or the ref
            of a `levada.actors.journal.Log`, which may be in another process, with the columns ``log_columns(events)``, or the same in another
            order; a `Journal` has the config ``log_config(shards)``. Or a `levada.actors.journal.LogStore`, which every node opens for itself: the
            URL of a database, ``postgresql://user@host/database``, makes a `levada.actors.postgres.PostgresStore`.
        shards: the number of partitions of the log, 1 to 4096, fixed when the log is made. Entities are spread over them by their ids.
        nodes: the nodes for the entities: each shard is on one node that is up, and every node must have imported the class. None: this process. The
            default: on a node the nodes of its fleet, elsewhere this process.
        idle: seconds without a command after which an entity leaves memory.
        remember: how many command ids an entity remembers, the newest first.
        snapshot_every: the number of rows of an entity after which its state is written too, so that reading it begins there.
        max_live: about the most entities in memory: beyond it the least recently used leave first.
        keep: seconds. Older rows leave the log when the newest snapshot of their entity is behind them; the answers of the commands that an entity
            remembers stay, and reminders do. Fields of the class cannot change any more then: without its old rows, an entity is only in its
            snapshot. `Keep` has them archived first. None: all rows stay.
        patience: seconds to wait for a journal that is out of reach. Commands wait too, each for its own time. Rows whose answer was lost are
            sent again, and are written once. Behind that, commands whose rows may have been written fail with `OutcomeUnknown`.
        keeper: whether the journal of a folder runs in a child process, as with `levada.actors.journal.keeper`, so that it does not hold up
            this one, or the driver.
        name: the name of the actor above the shards; by default the name of the class.
        clock: returns seconds since 1970. None: the time of the system, which is virtual if a test's clock of trio is. Not for entities on
            nodes: a function cannot travel, and each node has its own clock.

    Raises:
        ConfigurationError: an argument is invalid, does not fit the class or the log, or differs from the first call's; the text says what
            to do.
        JournalError: the folder cannot be opened, see `Store.open`, within five seconds if another process has it, or within ten minutes if that
            one only reads or trims it; or the journal refuses; `SchemaMismatch` if its columns are not of these events.
        NodeLost, OSError: the keeper cannot be started.
        NameTaken: another actor has the name.

    Cancellation:
        nothing was started.
    """
    kinds = _kinds_of(events)
    _check_class(cls, kinds)
    limits = EntityLimits(idle, remember, snapshot_every, max_live, patience)
    if not isinstance(keeper, bool):
        raise ConfigurationError(f"keeper is {keeper!r}, wanted True or False")
    if not isinstance(shards, int) or isinstance(shards, bool) or not 1 <= shards <= 4096:
        raise ConfigurationError(f"shards is {shards!r}, wanted a number from 1 to 4096")
    if keep is not None and not isinstance(keep, Keep):
        require_keep(keep)
    if clock is not None and not callable(clock):
        raise ConfigurationError(f"clock is {clock!r}, wanted a function that returns seconds since 1970")
    fleet = _nodes_for(system, nodes)
    if fleet is not None and clock is not None:
        raise ConfigurationError(
            "clock= is for shards in this process, because a function cannot travel to nodes: leave out clock=, or give nodes=None"
        )
    name = name or cls.__name__
    place = _place_of(journal, name, keeper=keeper)
    await load_arrow()
    wanted = ShardLog(kinds)
    terms = Terms(
        cls=f"{cls.__module__}:{cls.__qualname__}" if fleet is None else importable(cls),
        schema=wanted.schema.serialize().to_pybytes(),
        shards=shards,
        limits=limits,
        keep=keep.seconds if isinstance(keep, Keep) else keep,
        archive=archive_place(keep.archive) if isinstance(keep, Keep) else "",
    )
    if isinstance(place, Folder) and (wrong := misplaced(terms.archive, place.path)):
        raise ConfigurationError(wrong)
    opening = OpenShards.of(terms, place)
    if fleet is not None:
        return await _join(system, cls, name, fleet, opening)
    known = _known_as(system, name)
    async with known.finding:  # a call at the same time joins what this one starts
        here = known.here
        if here is None or not here.is_alive:
            if known.is_alive:
                join = "leave out nodes=None" if nodes is None else "give nodes=nodes"
                text = f"the shards {name!r} of the nodes are known here: to join them, {join}; shards of this process need another name="
                raise NameTaken(text, name=name)
            started = await _start(system, cls, name, opening, wanted, clock)
            known.shards, known.here = started, _Here(started, opening, clock)
            return started
        here.opening.require_same(name, opening)
        if here.shards.cls is not cls or here.clock is not clock:
            what = "clock= (another function)" if here.shards.cls is cls else "cls= (another class of the same name)"
            raise ConfigurationError(f"the shards {name!r} were started with other arguments: {what}")
        return here.shards


async def _start(
    system: ActorSystem,
    cls: type[Durable[M]],
    name: str,
    opening: OpenShards,
    wanted: ShardLog,
    clock: Callable[[], float] | None,
) -> Shards[M]:
    """Start the shards of a class in this process."""
    place, terms = opening.place, opening.terms
    try:
        ref = system.spawn(_Root, cls, wanted, terms, clock, place, name=name, supervise="escalate")
    except NameTaken as error:
        fleet = _fleet_of(system)
        join = "to join the shards of the nodes, give nodes=nodes; " if fleet is not None and fleet.is_driver else ""
        text = f"{error}: {join}shards of this process need another name="
        raise NameTaken(text, actor=error.actor, name=name) from None
    try:
        log_ref, started = await ref.ask(_Start(), timeout=None)
    except BaseException:
        ref.kill()
        with trio.CancelScope(shield=True):
            await ref.terminated()  # so that its name is free
        raise
    return Shards(cls, ref, started, log_ref, terms.archive)


async def _join(system: ActorSystem, cls: type[Durable[M]], name: str, fleet: Nodes, opening: OpenShards) -> Shards[M]:
    """Start the shards of a class on the nodes of a fleet, or join them."""
    from .fleet_shards import open_shards  # a program without nodes needs none of it

    known = _known_as(system, name)
    async with known.finding:  # so that calls at the same time share one follower
        if known.here is not None and known.here.is_alive:
            raise NameTaken(
                f"this process has shards {name!r} of its own: give those of the nodes another name=", name=name
            )
        root, journal = await open_shards(fleet, name, opening.sent())
        found = known.shards
        if found is None or not found.ref.is_alive or found.cls is not cls:
            found = await _follow(system, cls, root)
            found.journal, found.archive = journal, opening.terms.archive
            if fleet.is_driver:
                found.ref = root
            known.shards = found
        return found


def _place_of(journal: Any, name: str, *, keeper: bool) -> Place:
    journal = database_at(journal, name) or journal
    is_path = isinstance(journal, str | os.PathLike)
    if not isinstance(journal, Ref) and (is_path or not callable(getattr(journal, "open", None))):
        return Folder(folder_path(cast(Any, journal)), keeper)
    if keeper:
        raise ConfigurationError(
            "keeper=True needs a folder as journal=, and got a ref or a store: leave out one of the two"
        )
    return cast(Place, journal)


def _kinds_of(events: Any) -> tuple[type, ...]:
    """Return the classes of ``events=``."""
    kinds = tuple(flatten(events))
    for kind in kinds:
        if not isinstance(kind, type) or kind is type(None):
            raise ConfigurationError(
                f"events is {events!r}, wanted the classes of the events, as in Deposited | Withdrawn"
            )
    return tuple(dict.fromkeys(kinds))


def _check_class(cls: type[Durable[Any]], events: tuple[type, ...]) -> None:
    if not isinstance(cls, type) or not issubclass(cls, Durable):
        raise ConfigurationError(f"shards() got {cls!r}, wanted a class derived from Durable")
    missing = [kind.__name__ for kind in events if kind not in cls.appliers]
    if missing:
        raise ConfigurationError(f"{cls.__name__} has no @applies method for {', '.join(missing)}")
    extra = [kind.__name__ for kind in cls.appliers if kind not in events]
    if extra:
        raise ConfigurationError(f"{cls.__name__} applies {', '.join(extra)}, which shards(events=…) does not name")
    for handler, field in state_set_by_handlers(cls):
        logger.warning(
            "the handler %s.%s sets self.%s, which is lost when the entity leaves memory: record an event, and set it in the @applies method; "
            "if it is no state, declare it with attrs.field(init=False)",
            cls.__name__, handler, field, extra={"event": "state_without_event"},
        )  # fmt: skip
    for method, field in state_not_kept(cls):
        logger.warning(
            "the @applies method %s.%s sets self.%s, which is no state, so it is lost when the entity is loaded from a snapshot: declare it as a "
            "field of the class, without attrs.field(init=False)",
            cls.__name__, method, field, extra={"event": "state_not_kept"},
        )  # fmt: skip
    for kind in cls.command_table:
        if (
            isinstance(kind, type)
            and kind.__module__.split(".")[:2] != ["levada", "framework"]
            and kind is not CommandTurn
        ):
            try:
                tag_of(kind)
            except TypeError as error:
                raise ConfigurationError(
                    f"{cls.__name__} handles {kind.__name__}: commands are messages, decorate it with @message('a.name')"
                ) from error
