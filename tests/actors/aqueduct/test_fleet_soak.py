"""Refs by the million, sent around four members: memory stays flat, every ref reaches its actor, and equal refs are equal."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from levada.framework import Actor, Ref, handles, message

from .members import Fleet, Member

ACTORS = 100
"""Actors whose refs a member sends around in one round."""


@message("tests.aqueduct.Round")
class Round:
    """Refs on their way around, each twice."""

    owner: str
    hops: int
    refs: list[Ref[Any]]
    again: list[Ref[Any]] = attrs.field(factory=list)


class Counting(Actor[str]):
    """Counts what each member tells it."""

    def __attrs_post_init__(self) -> None:
        self.told: list[str] = []

    @handles(str)
    def count(self, m: str) -> None:
        self.told.append(m)


class Post(Actor[Round]):
    """Uses the refs that arrive at a member, and sends them on to the next."""

    name: str
    next: dict[str, Any]
    """By the name of a member: the post that follows it."""

    def __attrs_post_init__(self) -> None:
        self.arrived = 0
        self.home: list[Any] = []
        self.complete = trio.Event()

    @handles
    async def pass_on(self, m: Round) -> None:
        """Refs that are home again stay here."""
        assert all(one is other for one, other in zip(m.refs, m.again, strict=True)), "RF-32"
        assert len(set(m.refs)) == len(m.refs)
        self.arrived += 2 * len(m.refs)
        if m.owner == self.name:
            self.home += m.refs
            self.complete.set()
            return
        for ref in m.refs:
            ref.tell(self.name)
        await self.next[self.name].send(Round(m.owner, m.hops + 1, m.refs, m.refs))


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def one_round(members: list[Member], posts: dict[str, Any]) -> None:
    """Each member sends the refs of new actors around, in random order; all come home."""
    lot: list[tuple[Member, Any]] = []
    for member in members:
        cells: list[Any] = [member.system.spawn(Counting) for _ in range(ACTORS)]
        random.shuffle(cells)
        lot += [(member, cell) for cell in cells]
        post = posts[member.name]
        await post._actor.next[member.name].send(Round(member.name, 1, cells, cells))
    with trio.fail_after(600):
        for post in posts.values():
            await post._actor.complete.wait()
    await trio.sleep(30)
    for member, cell in lot:
        others = sorted({other.name for other in members} - {member.name})
        assert sorted(cell._actor.told) == others, "resolved"
        assert cell in posts[member.name]._actor.home, "it is itself at home"
        cell.stop()
    for post in posts.values():
        post._actor.home.clear()
        post._actor.complete = trio.Event()
    cell = lot = None  # type: ignore[assignment]
    await trio.sleep(30)


async def sent_around(count: int) -> list[tuple[int, int]]:
    """Send so many refs; return the blocks of memory and the bytes in use after each round of the second half."""
    measures: list[tuple[int, int]] = []
    async with Fleet("memory") as f:
        members = [await f.add(name) for name in "abcd"]
        next: dict[str, Any] = {}
        posts: dict[str, Any] = {}
        for member in members:
            posts[member.name] = member.system.spawn(Post, member.name, next, name="post")
        for number, member in enumerate(members):
            follower = members[(number + 1) % len(members)]
            follower.system.registry.register("post", posts[follower.name])
            peer = await f.connect(member, follower)
            next[member.name] = await peer.lookup("post", Round)
        while sum(post._actor.arrived for post in posts.values()) < count:
            await one_round(members, posts)
            gc.collect()
            for member in members:
                member.dialled.clear()  # closed by now
                assert len(member.refs.refs) <= 2, "refs that nobody holds"  # the next post, and its copies
                assert len(member.refs._keys) <= 2
            if sum(post._actor.arrived for post in posts.values()) > count / 2:
                measures.append((sys.getallocatedblocks(), resident()))
    return measures


@pytest.mark.ci
async def test_some_refs_sent_around(autojump_clock: MockClock) -> None:
    """The same as below, so short that it is part of every longer run."""
    await sent_around(2 * 4 * 3 * ACTORS)


@pytest.mark.soak
async def test_a_million_refs_sent_around(
    autojump_clock: MockClock, record_property: Any, caplog: pytest.LogCaptureFixture
) -> None:
    count = int(os.environ.get("LEVADA_SOAK_REFS", "1000000"))
    caplog.set_level(logging.ERROR, "levada")
    measures = await sent_around(count)
    record_property("measures", [measures[0], measures[-1]])
    print(measures[0], measures[-1])
    (blocks, octets), (blocks_after, bytes_after) = measures[0], measures[-1]
    assert blocks_after <= blocks * 1.02
    assert bytes_after <= octets * 1.05
