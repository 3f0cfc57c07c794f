"""Refs of a fleet: three members, whose refs travel between any of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
from tests.actors.carried import settings
from trio.testing import MockClock

from levada.actors.aqueduct import FleetRefs, Listener, Peer, PeerConfig, connect, serve
from levada.actors.aqueduct.refs import RefState, RemoteRef
from levada.framework import ActorSystem, Ref
from levada.framework.errors import ConnectionLost

from .conftest import Clerk, Do, Note, settled


@attrs.define(eq=False)
class Member:
    """A system of the fleet, with a clerk."""

    system: ActorSystem
    refs: FleetRefs
    config: PeerConfig
    listener: Listener
    clerk: Any
    dialled: list[str] = attrs.field(factory=list)
    """Whom it has dialled for claims."""

    @property
    def actor(self) -> Any:
        return self.clerk._actor


class Fleet:
    """Members by name, and connections between them."""

    def __init__(self, scheme: str, stack: AsyncExitStack, **changes: Any) -> None:
        self.scheme = scheme
        self.stack = stack
        self.changes = changes
        self.members: dict[bytes, Member] = {}
        self.reach: Callable[[str, str], bool] = lambda source, target: True

    def id(self, name: str) -> bytes:
        return name.encode().ljust(16, b".")

    async def add(self, name: str) -> Member:
        """Start a member."""
        system = await self.stack.enter_async_context(ActorSystem(name))
        refs = FleetRefs(system, self.id(name), partial(self.dial, name), **self.changes)
        config = PeerConfig(fleet=refs, carrier=settings(self.scheme, None))
        clerk: Any = system.spawn(Clerk, name="clerk")
        system.registry.register("clerk", clerk)
        handler = partial(self.ignore, name)
        listener = await self.stack.enter_async_context(
            serve(system, f"aqueduct+{self.scheme}://{name}", handler, Any, expose={"clerk"}, config=config)
        )
        member = self.members[self.id(name)] = Member(system, refs, config, listener, clerk)
        for each in self.members:
            for other in self.members.values():
                other.refs.known(each, self.members[each].system.name)
        return member

    async def ignore(self, name: str, m: Any) -> None:
        """Messages of the entrypoint are not wanted."""

    @asynccontextmanager
    async def dial(self, source: str, node_id: bytes) -> AsyncIterator[Peer[Any]]:
        """Connect one member to another."""
        here, there = self.members[self.id(source)], self.members[node_id]
        here.dialled.append(there.system.name)
        if not self.reach(source, there.system.name):
            raise ConnectionLost("there is no way")
        async with connect(here.system, there.listener.url, object, config=here.config) as peer:
            yield peer

    async def look_up(self, source: Member, target: Member) -> Ref[Any]:
        """Find the clerk of a member by name, over a connection that stays."""
        peer = await self.stack.enter_async_context(
            connect(source.system, target.listener.url, object, config=source.config)
        )
        return await peer.lookup("clerk", object)


@pytest.fixture
def fleet(scheme: str) -> Callable[..., AbstractAsyncContextManager[Fleet]]:
    """Make a fleet; keyword arguments are those of `FleetRefs`."""

    @asynccontextmanager
    async def begin(**changes: Any) -> AsyncIterator[Fleet]:
        async with AsyncExitStack() as stack:
            yield Fleet(scheme, stack, **changes)

    return begin


async def hand_over(fleet: Fleet, a: Member, b: Member, c: Member) -> RemoteRef:
    """Send the ref of A's clerk from B to C's clerk; return it as C got it."""
    to_a, to_c = await fleet.look_up(b, a), await fleet.look_up(b, c)
    to_c.tell(Note(refs=[to_a]))
    await settled()
    ref: Any = c.actor.notes.pop().refs[0]
    return ref


async def test_a_ref_reaches_a_third_member(fleet: Any, autojump_clock: MockClock) -> None:
    async with fleet() as f:
        a, b, c = await f.add("a"), await f.add("b"), await f.add("c")
        ref = await hand_over(f, a, b, c)
        assert (ref.state, ref.path, ref.incarnation, ref.is_alive) == (
            RefState.UNCLAIMED, "/clerk", a.clerk.incarnation, True,
        )  # fmt: skip
        assert repr(ref) == f"<Ref /clerk#{a.clerk.incarnation} at a>"
        assert c.dialled == []
        ref.tell("first")
        assert ref.state is RefState.CLAIMING
        ref.tell("second")
        assert await ref.ask(Do("texts")) == ["first", "second"]
        assert ref.state is RefState.OPEN
        assert c.dialled == ["a"]
        assert await ref.ask(Do("say", "hello")) == "hello"
