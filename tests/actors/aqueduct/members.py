"""A fleet for tests: systems that know each other, on the memory carrier, each with a clerk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import trio
from tests.actors.carried import settings

from levada.actors.aqueduct import FleetRefs, Listener, Peer, PeerConfig, connect, serve
from levada.actors.aqueduct.refs import RemoteRef
from levada.framework import ActorSystem, Ref
from levada.framework.errors import ConnectionLost
from levada.transports.carriers import MemoryConfig

from .conftest import Clerk, Note, settled


def id_of(name: str) -> bytes:
    """The node id of a member."""
    return name.encode().ljust(16, b".")


@attrs.define(eq=False)
class Member:
    """A system of the fleet, with a clerk."""

    name: str
    system: ActorSystem
    refs: FleetRefs
    config: PeerConfig
    listener: Listener
    clerk: Any
    over: trio.Event = attrs.field(factory=trio.Event)
    """Ends it."""
    gone: trio.Event = attrs.field(factory=trio.Event)
    """Set when it has ended."""
    dialled: list[tuple[str, Peer[Any]]] = attrs.field(factory=list)
    """The connections that it has dialled for claims, and to whom."""

    @property
    def node_id(self) -> bytes:
        return id_of(self.name)

    @property
    def actor(self) -> Any:
        """The object of the clerk."""
        return self.clerk._actor

    @property
    def whom(self) -> list[str]:
        """Whom it has dialled for claims."""
        return [name for name, _ in self.dialled]


async def any_way(source: Member, target: Member) -> None:
    """Let every member reach every other, at once."""


class Fleet:
    """Members by name, and connections between them; arguments are those of `FleetRefs`."""

    def __init__(self, scheme: str, **changes: Any) -> None:
        self.scheme = scheme
        self.changes = changes
        self.members: dict[str, Member] = {}
        self.way: Callable[[Member, Member], Any] = any_way
        """Awaited before a member dials another; may wait, or raise."""
        self.carrier: Callable[[Member, Member], MemoryConfig | None] = lambda source, target: None
        """Settings of a member's connection to another."""
        self.lines: list[tuple[Member, Member, Peer[Any]]] = []
        """All connections: who has dialled whom."""

    async def __aenter__(self) -> Fleet:
        self._stack = AsyncExitStack()
        self._nursery = await self._stack.enter_async_context(trio.open_nursery())
        return self

    async def __aexit__(self, *error: Any) -> None:
        for member in self.members.values():
            member.over.set()
        await self._stack.__aexit__(*error)

    async def add(self, name: str, kind: type[Clerk] = Clerk, *, known: bool = True) -> Member:
        """Start a member, and with `known` tell all of it."""
        member: Member = await self._nursery.start(self._live, name, kind)
        self.members[name] = member
        for other in self.members.values():
            member.refs.known(other.node_id, other.name)
            if known:
                other.refs.known(member.node_id, name)
        return member

    async def _live(self, name: str, kind: type[Clerk], *, task_status: trio.TaskStatus[Member]) -> None:
        async def ignore(m: Any) -> None: ...

        url = self.url(name)
        async with ActorSystem(name) as system:
            refs = FleetRefs(system, id_of(name), partial(self._dial, name), **self.changes)
            config = PeerConfig(fleet=refs, carrier=self.settings(name))
            clerk: Any = system.spawn(kind, name="clerk")
            system.registry.register("clerk", clerk)
            async with serve(system, url, ignore, Any, expose={"clerk", "post"}, config=config) as listener:
                member = Member(name, system, refs, config, listener, clerk)
                del clerk  # what the test does not hold, nobody does
                task_status.started(member)
                await member.over.wait()
        member.gone.set()

    def url(self, name: str) -> str:
        """Where a member listens."""
        return f"aqueduct+{self.scheme}://{name}"

    def settings(self, name: str) -> Any:
        """The carrier's settings of a member."""
        return settings(self.scheme, None)

    async def end(self, name: str) -> Member:
        """End a member; the others are not told."""
        member = self.members.pop(name)
        member.over.set()
        await member.gone.wait()
        return member

    @asynccontextmanager
    async def _dial(self, source: str, node_id: bytes) -> AsyncIterator[Peer[Any]]:
        here = self.members[source]
        name = node_id.rstrip(b".").decode()
        there = self.members.get(name)
        if there is None:
            raise ConnectionLost(f"no node {name}")
        await self.way(here, there)
        async with self._connected(here, there) as peer:
            here.dialled.append((name, peer))
            yield peer

    @asynccontextmanager
    async def _connected(self, source: Member, target: Member) -> AsyncIterator[Peer[Any]]:
        carrier = self.carrier(source, target)
        config = (
            source.config if carrier is None else attrs.evolve(source.config, carrier=settings(self.scheme, carrier))
        )
        async with connect(source.system, target.listener.url, object, config=config) as peer:
            self.lines = [line for line in self.lines if not line[2].closed]
            self.lines.append((source, target, peer))
            yield peer

    async def connect(self, source: Member, target: Member) -> Peer[Any]:
        """Connect one member to another, as long as it lives."""
        return await self._stack.enter_async_context(self._connected(source, target))

    async def look_up(self, source: Member, target: Member) -> Any:
        """Return the ref of a member's clerk, over a new connection."""
        return await (await self.connect(source, target)).lookup("clerk", object)

    async def hand_over(self, owner: Member, source: Member, target: Member, ref: Ref[Any] | None = None) -> RemoteRef:
        """Send the ref of an actor of the owner's, by default its clerk, by way of `source` to `target`; return it as it arrives."""
        if ref is not None:
            at_source: Any = await self.give(owner, source, ref)
        else:
            at_source = await self.look_up(source, owner)
        arrived: RemoteRef = await self.give(source, target, at_source)
        return arrived

    async def give(self, source: Member, target: Member, ref: Ref[Any]) -> Any:
        """Send a ref from one member to another; return it as it arrives."""
        to_target = await self.look_up(source, target)
        to_target.tell(Note("given", refs=[ref]))
        await settled()
        (note,) = [note for note in target.actor.notes if getattr(note, "text", None) == "given"]
        target.actor.notes.remove(note)
        return note.refs[0]

    def between(self, one: Member, other: Member) -> list[Any]:
        """The carriers of the connections between two members."""
        pairs = {(one, other), (other, one)}
        carriers = [peer._connection.carrier for *pair, peer in self.lines if tuple(pair) in pairs and not peer.closed]
        return [carrier for carrier in carriers if carrier is not None]
