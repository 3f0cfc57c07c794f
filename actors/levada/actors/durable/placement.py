"""Placement: the shards of a durable class on the nodes of a fleet.

The driver decides. Each shard is on the node with the highest hash of shard and node (rendezvous hashing) among the nodes that are up, so a node
that comes or goes moves only its own share. If none is up, nodes count whose app is starting. In a move the shard finishes on the old node, then
it is opened on the new node. If the old node is out of reach, the first row of the new owner in the log fences it off. If all nodes drain, each
shard stays until its node has ended its app.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from math import inf
from typing import Any, Final

import trio

from levada.actors.nodes import Member, MemberState, Nodes
from levada.actors.nodes.orders import spawn_order
from levada.framework import Actor, Asks, Normal, Reason, Ref, Sender, Shutdown, handles, message
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    ChannelError,
    ConfigurationError,
    LevadaError,
    RemoteFailure,
)

from .hosting import CheckHost, Close, EndHost, Host, Open, Owner, SentStore, Subscribe
from .settings import Terms

__all__ = ["Placement", "PrepareHosts", "target"]

logger = logging.getLogger("levada.actors.durable")

CLOSING: Final = 30.0
"""Seconds for a shard to finish when it moves; then its new owner fences it off."""
OPENING: Final = 30.0
"""Seconds for a node to answer."""
FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0
"""The first and the longest pause in seconds before a shard that has ended is opened again."""
TOLD_EVERY: Final = 10.0
"""Seconds between two warnings that shards cannot be opened on a node, of which each has sixteen and more."""
LONG: Final = 4.0
"""Seconds after which a shard that ends is opened again after the first pause; less than the five that a shard waits for room on the disk."""


def target(members: list[Member], shard: int) -> Member | None:
    """Return the member that should have a shard, among the members that are up; None if none is up."""
    return _best([member for member in members if member.state is MemberState.UP], shard)


def _best(members: list[Member], shard: int) -> Member | None:
    return max(members, key=lambda member: _score(member.name, shard), default=None)


def _score(name: str, shard: int) -> bytes:
    return hashlib.blake2b(f"{shard} {name}".encode(), digest_size=8).digest()


@message("levada.durable.prepare_hosts", frozen=True)
class PrepareHosts(Asks[None]):
    """Ask to start the hosts on all nodes that are up. Fails with `ConfigurationError` if a node does not have the class."""


class Placement(Actor[PrepareHosts | Subscribe]):
    """Keeps each shard on its node, and tells subscribers where it is."""

    fleet: Nodes
    terms: Terms
    journal: Ref[Any] | SentStore

    def __attrs_post_init__(self) -> None:
        self._owners = [Owner(shard) for shard in range(self.terms.shards)]
        self._hosts: dict[bytes, Ref[Any]] = {}
        self._starting: dict[bytes, trio.Lock] = {}
        self._told: dict[str, float] = {}
        self._work = trio.CancelScope()
        self._outboxes: dict[int, dict[int, None]] = {}
        self._news = trio.lowlevel.ParkingLot()
        self._subscribers = 0

    @handles
    async def prepare(self, _: PrepareHosts) -> None:
        """Start the hosts, and the shards."""
        for member in self.fleet.members:
            try:
                if member.state is MemberState.UP and self.fleet.is_for_any(member.name):
                    await self._host_on(member)
            except ConfigurationError as error:
                self.reply_later().fail(error)
                return
            except LevadaError as error:  # the node is ending or hangs; `_keep` opens its shards later
                logger.warning("%s: no shards of %s yet: %s", member.name, self.terms.cls, error)
        self.start_soon(self._run)

    async def _run(self) -> None:
        with self._work:
            async with trio.open_nursery() as nursery:
                for shard in range(self.terms.shards):
                    nursery.start_soon(self._keep, shard)

    async def stopping(self, reason: Reason) -> None:
        """End the hosts; their shards finish the commands that they have taken."""
        self._work.cancel()
        if not isinstance(reason, Normal | Shutdown):
            # The root has failed, and its journal is gone, so there is nothing to wait for. A node that hangs would hold up the next life.
            for host in self._hosts.values():
                with suppress(ActorError):
                    host.tell(EndHost())
            return
        async with trio.open_nursery() as nursery:
            for host in self._hosts.values():
                nursery.start_soon(_end, host)

    async def _host_on(self, member: Member) -> Ref[Any]:
        async with self._starting.setdefault(member.node_id, trio.Lock()):
            ref = self._hosts.get(member.node_id)
            if ref is None or not ref.is_alive:
                order = spawn_order(
                    Host, (self.terms, self.journal), "stop", None, label=self.terms.cls.rpartition(":")[2]
                )
                ref = await self.fleet.spawn_order(order, member.name, None)
                try:
                    await ref.ask(CheckHost(), timeout=OPENING)
                except ActorError as error:
                    cause = error.__cause__
                    if isinstance(cause, RemoteFailure) and cause.kind == "ConfigurationError":
                        raise ConfigurationError(f"{member.name}: {cause.detail}") from error
                    raise
                alive = {each.node_id for each in self.fleet.members}
                self._hosts = {node: host for node, host in self._hosts.items() if node in alive}
                self._starting = {node: lock for node, lock in self._starting.items() if node in alive}
                self._hosts[member.node_id] = ref
            return ref

    async def _keep(self, shard: int) -> None:
        """Keep a shard open on the node that should have it."""
        pause = FIRST_PAUSE
        while True:
            if self._target(shard) is None:
                self._announce(Owner(shard, nowhere=True))
            await self.fleet.directory.until(lambda: self._target(shard) is not None)
            member = self._target(shard)
            assert member is not None
            opened = trio.current_time()
            try:
                host = await self._host_on(member)
                ref = await host.ask(Open(shard), timeout=OPENING)
            except LevadaError as error:
                if isinstance(error, ConfigurationError):  # until the node restarts with other code
                    self._announce(Owner(shard, refused=str(error)))
                self._tell(member, shard, error)
            else:
                self._announce(Owner(shard, ref))
                ended = await self._until_it_moves(shard, ref, member)
                self._announce(Owner(shard))
                if not ended:
                    await self._close(shard, host)
                    continue
                if trio.current_time() - opened > LONG:
                    pause = FIRST_PAUSE
            await self._pause(shard, member, pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _tell(self, member: Member, shard: int, error: LevadaError) -> None:
        """Log why a shard cannot be opened, unless another one of that node has just been logged."""
        now = trio.current_time()
        if now < self._told.get(member.name, -inf) + TOLD_EVERY:
            return
        self._told[member.name] = now
        what = "shard %d of %s, and perhaps others, cannot be opened on %s: %s; they are tried again"
        logger.warning(what, shard, self.terms.cls, member.name, error, extra={"event": "shard_not_opened"})

    async def _pause(self, shard: int, member: Member, seconds: float) -> None:
        await self.fleet.directory.until(lambda: self._moved(shard, member), seconds)

    def _target(self, shard: int) -> Member | None:
        members = [member for member in self.fleet.members if self.fleet.is_for_any(member.name)]
        # Before any node is up, an app may use entities all the same: its node can have them.
        return target(members, shard) or _best([m for m in members if self.fleet.takes_orders(m.name)], shard)

    def _moved(self, shard: int, member: Member) -> bool:
        now = self._target(shard)
        return now is not None and now.node_id != member.node_id

    async def _until_it_moves(self, shard: int, ref: Ref[Any], member: Member) -> bool:
        """Wait until a shard ends or should move; return whether it has ended."""
        ended = False

        async def watch() -> None:
            nonlocal ended
            await ref.terminated()
            ended = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await self.fleet.directory.until(lambda: self._moved(shard, member))
            nursery.cancel_scope.cancel()
        return ended

    async def _close(self, shard: int, host: Ref[Any]) -> None:
        try:
            await host.ask(Close(shard), timeout=CLOSING)
        except ActorStopped:
            pass  # its node has ended, and the shard with it
        except LevadaError as error:
            # Its new owner fences it off.
            logger.warning(
                "shard %d of %s did not finish: %s",
                shard,
                self.terms.cls,
                error,
                extra={"event": "shard_not_closed"},
            )

    def _announce(self, news: Owner) -> None:
        self._owners[news.shard] = news
        for outbox in self._outboxes.values():
            outbox[news.shard] = None
        self._news.unpark_all()

    @handles
    def subscribe(self, m: Subscribe) -> int:
        """Send the places of the shards, now and at each move."""
        self._subscribers += 1
        self.start_soon(self._inform, self._subscribers, m.owners)
        return self.terms.shards

    async def _inform(self, number: int, owners: Sender[Owner]) -> None:
        """Send changes to a subscriber. A shard that moves twice before the subscriber has room is sent once."""
        outbox = self._outboxes[number] = dict.fromkeys(range(self.terms.shards))
        try:
            with owners:
                while True:
                    while outbox:
                        shard = next(iter(outbox))
                        del outbox[shard]
                        await owners.send(self._owners[shard])
                    await self._news.park()
        except ChannelError:
            pass  # the process has ended
        finally:
            del self._outboxes[number]


async def _end(host: Ref[Any]) -> None:
    try:
        await host.ask(EndHost(), timeout=CLOSING)
    except LevadaError:
        pass  # its node has ended
