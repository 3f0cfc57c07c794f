"""`Host`: the actor on a node that has the node's shards of a durable class; and the messages of placement.

The driver's `levada.actors.durable.placement.Placement` tells each host which shards to open and close. A host never restarts a shard: the
driver opens it again, there or on another node. So a shard that was fenced off never takes its partition back.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import attrs
import pyarrow as pa
import trio

from levada.actors.journal import LogStore
from levada.actors.journal.value_rows import takes_values
from levada.framework import Actor, Asks, Codec, Down, Ref, Reply, Sender, bounded, handles, message
from levada.framework.errors import ActorError, ConfigurationError, NameTaken
from levada.framework.text import printable

from .access import Access
from .entity import Durable
from .rows import ShardLog, load_arrow
from .settings import ShardSettings, Terms
from .shard import Leave, Shard

__all__ = [
    "MAILBOX", "CheckHost", "Close", "EndHost", "GetPlacement", "Host", "Open", "Owner", "SentStore", "Subscribe",
]  # fmt: skip

MAILBOX = 1024
"""The most commands that wait in the mailbox of a shard."""
UNUSED: Final = 30.0
"""Seconds after which a host ends that the driver has never asked anything: the driver did not learn of its start in time, and has made another."""
FINISHING: Final = 20.0
"""Seconds for a shard to finish before it is killed. A shard that waits for its journal could take the partition back from its next owner."""


@message("levada.durable.check_host", frozen=True)
class CheckHost(Asks[None]):
    """Ask a new host whether it has the class. If not, the ask fails with `ConfigurationError`, and the host ends."""


@message("levada.durable.open", frozen=True)
class Open(Asks[Ref[Any]]):
    """Ask a host to open a shard. The answer comes at once; commands wait until the shard has its partition.

    If the host still has a shard of this number, that shard is killed, because it may have been fenced off.
    """

    shard: int


@message("levada.durable.close", frozen=True)
class Close(Asks[None]):
    """Ask a host to let a shard finish; the answer comes when the shard has ended."""

    shard: int


@message("levada.durable.end_host", frozen=True)
class EndHost(Asks[None]):
    """Ask a host to let all its shards finish, and to end."""


@message("levada.durable.owner", frozen=True)
class Owner:
    """The current place of a shard."""

    shard: int
    ref: Ref[Any] | None = None
    """None: it is on no node until it is opened again."""
    refused: str = ""
    """Why its node cannot open it: the class differs there. Empty if it can, or if that is not known."""
    nowhere: bool = False
    """Whether there is no node for it: all are draining, or down."""


@message("levada.durable.get_placement", frozen=True)
class GetPlacement(Asks[Ref[Any]]):
    """Ask the root of the shards, in the driver, for their `Placement`."""


@message("levada.durable.subscribe")
class Subscribe(Asks[int]):
    """Ask the driver's `Placement` for the places of the shards, now and at each move. The answer is the number of shards."""

    owners: Sender[Owner]


@attrs.frozen
class _Unused:
    """The driver has asked nothing."""


@message("levada.durable.sent_store", frozen=True)
class SentStore:
    """A `LogStore` on its way to another process, which may not know its class yet: the driver never imports the app."""

    module: str
    """Has the class."""
    data: bytes = attrs.field(repr=False)
    """The store as a message; it may have a password."""

    @classmethod
    def of(cls, store: LogStore) -> SentStore:
        """Take a store along."""
        return cls(type(store).__module__, Codec().encode(store))

    @property
    def store(self) -> LogStore:
        """The store. `ConfigurationError` if its class is not of levada, and this process has not imported it."""
        if self.module.startswith("levada."):
            try:
                import_module(self.module)
            except ModuleNotFoundError as missing:
                raise ConfigurationError(str(missing)) from missing
        elif self.module not in sys.modules:
            raise ConfigurationError(
                f"the log is in a store of {printable(self.module)}, which this process has not imported"
            )
        found: LogStore = Codec().decode(self.data)
        return found


class Host(Actor[CheckHost | Open | Close | EndHost | _Unused]):
    """The shards of a durable class on this node."""

    terms: Terms
    journal: Any
    """The ref of the log, or a `SentStore`."""

    async def started(self) -> None:
        """Find the class."""
        from levada.actors.nodes import nodes_of

        self._shards: dict[int, Ref[Any]] = {}
        shards, patience, journal = self.terms.shards, self.terms.limits.patience, self.journal
        is_ref, values = isinstance(journal, Ref), False
        if not is_ref:
            values = takes_values(journal.store)
            journal = await self.enter(journal.store.open(self.system, shards))
        self._ways = [Access(journal, shard, is_ref, patience, values) for shard in range(shards)]
        self._told: set[int] = set()
        self._leaving = False
        self._refusal: ConfigurationError | None = None
        try:
            self._settings = await self._find()
        except ConfigurationError as error:
            self._refusal = error
        # While the app ends, the driver moves the shards, if there is another node.
        await self.enter(nodes_of(self.system).before_leaving(self._leave, last=True))
        self.timers.once("unused", UNUSED, _Unused())

    async def _find(self) -> ShardSettings:
        """Find the class in this node; `ConfigurationError` if its app has not imported it, or has another version of it."""
        # Imported here, so that a program without nodes does not import it.
        from levada.actors.nodes.orders import actor_class

        terms = self.terms
        cls = actor_class(terms.cls)
        if not issubclass(cls, Durable):
            raise ConfigurationError(f"{terms.cls} is not derived from Durable in this node")
        await load_arrow()
        there = pa.ipc.read_schema(pa.py_buffer(terms.schema))
        log = ShardLog(tuple(cls.appliers), there)
        if not log.schema.equals(there):
            raise ConfigurationError(
                f"{terms.cls} has other events on this node than in the driver: both must run the same code"
            )
        return ShardSettings.of(self.system, cls, log, terms)

    @handles
    def check(self, _: CheckHost) -> None:
        """Answer whether this node has the class."""
        self.timers.cancel("unused")
        if self._refusal is not None:
            self.reply_later().fail(self._refusal)
            self.stop()

    @handles
    def open(self, m: Open) -> Ref[Any] | None:
        """Open a shard; kill a former one of the same number."""
        self.timers.cancel("unused")
        if self._leaving:
            self.reply_later().fail(ActorError(f"{self.system.name} is about to end", actor=self.ref.path))
            return None
        former = self._shards.get(m.shard)
        if former is not None:
            former.kill()
        settings, way = self._settings, self._ways[m.shard]
        try:
            ref = self.spawn(Shard, settings, way, name=str(m.shard), mailbox=bounded(MAILBOX))
        except NameTaken:  # a former one is still ending
            ref = self.spawn(Shard, settings, way, mailbox=bounded(MAILBOX))
        self._shards[m.shard] = ref
        self._told.discard(m.shard)
        self.watch(ref, m.shard)
        return ref

    @handles
    def unused(self, _: _Unused) -> None:
        """End."""
        self.stop()

    @handles
    def close(self, m: Close) -> None:
        """End a shard after the commands that it has taken."""
        ref = self._shards.get(m.shard)
        if ref is not None:
            self.start_soon(self._close, m.shard, ref, self.reply_later())

    async def _close(self, shard: int, ref: Ref[Any], reply: Reply[None]) -> None:
        await self._left(shard, ref)
        reply.send(None)

    @handles
    async def end(self, _: EndHost) -> None:
        """Close all shards, and end."""
        await self._leave()
        self.stop()

    async def _leave(self) -> None:
        """Close all shards, and open no more."""
        self._leaving = True
        async with trio.open_nursery() as nursery:
            for shard, ref in self._shards.items():
                self.unwatch(ref, shard)
                nursery.start_soon(self._left, shard, ref)

    async def _left(self, shard: int, ref: Ref[Any]) -> None:
        with trio.move_on_after(FINISHING):
            if shard not in self._told:
                self._told.add(shard)
                try:
                    await ref.send(Leave())
                except ActorError:
                    pass  # it has ended
            await ref.terminated()
            return
        ref.kill()
        await ref.terminated()

    @handles
    def down(self, m: Down) -> None:
        """Forget a shard that has ended."""
        if self._shards.get(m.tag) is m.ref:
            del self._shards[m.tag]
            self._told.discard(m.tag)
