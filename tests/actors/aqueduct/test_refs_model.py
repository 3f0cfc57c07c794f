"""Two systems, a connection that is lost now and then, and a model of who hears what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import attrs
import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from tests.actors.carried import cut

from levada.actors.aqueduct import Peer, connect, serve
from levada.framework import ActorSystem, Down, Exit, Failed, Killed, Lost, Normal, Shutdown
from levada.framework.errors import ActorStopped
from levada.framework.testing.stateful import ActorStateMachine, initialize, invariant, rule

from .conftest import Do, Trapper

HOW: dict[str, tuple[Callable[[Any], Any], type]] = {
    "stop": (lambda cell: cell.stop(), Shutdown),
    "kill": (lambda cell: cell.kill(), Killed),
    "return": (lambda cell: cell.tell(Do("stop")), Normal),
    "fail": (lambda cell: cell.tell(Do("fail")), Failed),
}
NUMBER = st.integers(0, 7)


@attrs.define(eq=False)
class Local:
    """An actor here, and what it should have heard."""

    cell: Any
    actor: Any
    heard: list[Any] = attrs.field(factory=list)


@attrs.define(eq=False)
class Remote(Local):
    """An actor there, with its ref here."""

    ref: Any = None
    reason: Any = None
    """Why it ended, or is out of reach."""
    told: list[str] = attrs.field(factory=list)
    watches: set[Any] = attrs.field(factory=set)
    """Who here watches it, and under which tag."""
    links: set[Local] = attrs.field(factory=set)


class Refs(ActorStateMachine):
    """Whatever is told, asked, watched, linked, ended and cut: everybody hears what they should, once, and nothing is left."""

    url = "aqueduct+memory://model"
    peer: Peer[Any]

    @initialize()
    async def begin(self) -> None:
        """Two systems and a connection."""

        async def ignore(m: Any) -> None: ...

        self.stack = AsyncExitStack()
        self.there = await self.stack.enter_async_context(ActorSystem("there"))
        self.listener = await self.stack.enter_async_context(
            serve(self.there, self.url, ignore, Any, expose=lambda name: True)
        )
        self.locals: list[Local] = []
        self.remotes: list[Remote] = []
        self.spawned = 0
        self.peer = await self.stack.enter_async_context(connect(self.system, self.listener.url, object))
        await self.add_there()
        self.add_here()

    async def rest(self) -> None:
        """Let everything arrive."""
        await trio.sleep(5)
        await self.wait_until_idle()

    @rule()
    async def spawn_there(self) -> None:
        """One more actor there, and its ref."""
        await self.add_there()

    async def add_there(self) -> None:
        self.spawned += 1
        cell: Any = self.there.spawn(Trapper, name=f"far{self.spawned}")
        self.there.registry.register(f"far{self.spawned}", cell)
        ref = await self.peer.lookup(f"far{self.spawned}")
        self.remotes.append(Remote(cell, cell._actor, ref=ref))
        await self.rest()

    @rule()
    def spawn_here(self) -> None:
        """One more actor here."""
        self.add_here()

    def add_here(self) -> None:
        self.spawned += 1
        cell: Any = self.system.spawn(Trapper, name=f"near{self.spawned}")
        self.locals.append(Local(cell, cell._actor))

    def far(self, number: int) -> Remote:
        return self.remotes[number % len(self.remotes)]

    def near(self, number: int) -> Local:
        return self.locals[number % len(self.locals)]

    @precondition(lambda self: self.remotes)
    @rule(number=NUMBER, text=st.text(max_size=3), count=st.integers(1, 3))
    async def tell(self, number: int, text: str, count: int) -> None:
        """Arrives, in order, while the actor lives."""
        far = self.far(number)
        for _ in range(count):
            far.ref.tell(text)
        if far.reason is None:
            far.told += [text] * count
        await self.rest()

    @precondition(lambda self: self.remotes)
    @rule(number=NUMBER)
    async def send(self, number: int) -> None:
        """Arrives; to who is known to have ended, it is an error."""
        far = self.far(number)
        if far.reason is None:
            await far.ref.send("sent")
            far.told.append("sent")
        elif not far.ref.is_alive:
            with pytest.raises(ActorStopped) as stopped:
                await far.ref.send("sent")
            assert type(stopped.value.reason) is far.reason
        await self.rest()

    @precondition(lambda self: self.remotes)
    @rule(number=NUMBER)
    async def ask(self, number: int) -> None:
        """Answered by the living; the dead and the lost say why not."""
        far = self.far(number)
        if far.reason is None:
            texts = await far.ref.ask(Do("texts"))
            assert [text for text in texts if isinstance(text, str)] == far.told
            assert await far.ref.ask(Do("me")) is far.ref
        else:
            with pytest.raises(ActorStopped) as stopped:
                await far.ref.ask(Do("texts"))
            assert type(stopped.value.reason) is far.reason
        await self.rest()

    @precondition(lambda self: self.remotes and self.locals)
    @rule(one=NUMBER, other=NUMBER, tag=st.integers(0, 1))
    async def watch(self, one: int, other: int, tag: int) -> None:
        """One notice for each tag, at once if it has ended."""
        near, far = self.near(one), self.far(other)
        await near.cell.ask(Do("watch", tag, far.ref))
        if far.reason is None:
            far.watches.add((near, tag))
        else:
            near.heard.append((Down, far.ref.path, far.reason, tag))
        await self.rest()

    @precondition(lambda self: self.remotes and self.locals)
    @rule(one=NUMBER, other=NUMBER, tag=st.integers(0, 1))
    async def unwatch(self, one: int, other: int, tag: int) -> None:
        """No notice any more."""
        near, far = self.near(one), self.far(other)
        await near.cell.ask(Do("unwatch", tag, far.ref))
        far.watches.discard((near, tag))
        await self.rest()

    @precondition(lambda self: self.remotes and self.locals)
    @rule(one=NUMBER, other=NUMBER)
    async def link(self, one: int, other: int) -> None:
        """Tied both ways; to the dead, the signal comes at once."""
        near, far = self.near(one), self.far(other)
        await near.cell.ask(Do("link", who=far.ref))
        if far.reason is None:
            far.links.add(near)
        else:
            near.heard.append((Exit, far.ref.path, far.reason, None))
        await self.rest()

    @precondition(lambda self: self.remotes and self.locals)
    @rule(one=NUMBER, other=NUMBER)
    async def unlink(self, one: int, other: int) -> None:
        """Untied both ways."""
        near, far = self.near(one), self.far(other)
        await near.cell.ask(Do("unlink", who=far.ref))
        far.links.discard(near)
        await self.rest()

    def ended(self, far: Remote, reason: Any) -> None:
        """Note who hears that an actor there has ended, or is out of reach."""
        far.reason = reason
        for near, tag in far.watches:
            near.heard.append((Down, far.ref.path, reason, tag))
        for near in far.links:
            near.heard.append((Exit, far.ref.path, reason, None))
            if reason is Lost:
                far.heard.append((Exit, near.cell.path, Lost, None))
        far.watches.clear()
        far.links.clear()

    @precondition(lambda self: self.remotes)
    @rule(number=NUMBER, how=st.sampled_from(list(HOW)))
    async def end_there(self, number: int, how: str) -> None:
        """An actor there ends."""
        far = self.far(number)
        end, reason = HOW[how]
        end(far.cell)
        await self.rest()
        if far.reason is None:
            self.ended(far, reason)

    @precondition(lambda self: self.locals)
    @rule(number=NUMBER, how=st.sampled_from(list(HOW)))
    async def end_here(self, number: int, how: str) -> None:
        """An actor here ends."""
        near = self.near(number)
        self.locals.remove(near)
        end, reason = HOW[how]
        end(near.cell)
        await self.rest()
        for far in self.remotes:
            if near in far.links:
                far.heard.append((Exit, near.cell.path, reason, None))
            far.links.discard(near)
            far.watches = {watch for watch in far.watches if watch[0] is not near}

    @rule()
    async def cut(self) -> None:
        """The connection is lost; there is a new one, with new refs of those who live."""
        cut(self.peer._connection.carrier)
        await self.rest()
        client = self.peer._connection
        assert not client.halves.records
        assert not client.core.background
        for far in self.remotes:
            if far.reason is None:
                self.ended(far, Lost)
                assert not far.ref.is_alive
        self.compare()
        self.peer = await self.stack.enter_async_context(connect(self.system, self.listener.url, object))
        living = [far for far in self.remotes if far.cell.is_alive]
        self.remotes = []
        for far in living:
            ref = await self.peer.lookup(far.cell.name)
            assert ref is not far.ref
            self.remotes.append(Remote(far.cell, far.actor, far.heard, ref=ref, told=far.told))
        await self.rest()

    @invariant()
    def check(self) -> None:
        """All heard what they should have."""
        self.compare()

    def compare(self) -> None:
        for local in [*getattr(self, "locals", ()), *getattr(self, "remotes", ())]:
            if local.cell.is_alive:
                heard = Counter(
                    (type(note), note.ref.path, type(note.reason), getattr(note, "tag", None))
                    for note in local.actor.notes
                    if not isinstance(note, str)
                )
                assert heard == Counter(local.heard)
        for far in getattr(self, "remotes", ()):
            texts = [note for note in far.actor.notes if isinstance(note, str)]
            assert texts == far.told

    @invariant()
    def nothing_is_left(self) -> None:
        """Channels are those of refs, their answers, watches and links, and no more."""
        if hasattr(self, "peer"):
            links = sum(len(far.links) for far in self.remotes)
            noted = sum(heard[0] is Exit for far in self.remotes for heard in far.heard)  # an `Exit` holds its ref
            most = 1 + 4 * len(self.remotes) + len(self.locals) + 2 * links + noted
            assert len(self.peer._connection.core.halves) <= most

    def teardown(self) -> None:
        """Leave the connections, then the systems."""
        if hasattr(self, "stack"):
            self._run(self.stack.aclose)
        super().teardown()


class RefsOverQmux(Refs):
    """The same over QMux."""

    url = "aqueduct+qmux+memory://model"


TestRefs = Refs.TestCase
TestRefsOverQmux = pytest.mark.ci(RefsOverQmux.TestCase)
TestRefsOverQmux.settings = settings(settings.default, max_examples=12, stateful_step_count=20)
TestRefs.settings = settings(settings.default, max_examples=12, stateful_step_count=20)  # 0.25 s for one
