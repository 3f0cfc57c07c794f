"""Routes: how a process reaches the shards of a durable class, wherever they are.

A `Route` has the part of `Ref` that entities need. It waits while its shard moves. It repeats a command that was certainly not done, and any
command with an id, because the shard recognises it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import trio

from levada.actors.journal import CommandReused, JournalError, journal_error
from levada.framework import Actor, ActorSystem, Failed, Normal, Receiver, Ref, Sender, channel
from levada.framework.embedding import question_name
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    AskTimeout,
    ChannelError,
    ConfigurationError,
    LevadaError,
    MailboxFull,
    NoValue,
    RemoteFailure,
)
from levada.framework.links import NORMAL
from levada.framework.ref import DEFAULT_TIMEOUT, check_timeout
from levada.framework.text import text_of

from .errors import CommandFailed, EntityErased, OutcomeUnknown, ReplayFailed
from .hosting import MAILBOX, GetPlacement, Owner, Subscribe
from .turns import EntityCommand, Erase

__all__ = ["Follower", "Route", "ShardRoutes", "ToShard", "subscribed"]

PAUSE: Final = 0.2
"""Seconds to wait for a new place of a shard that did not answer, before it is asked again."""

_ERRORS: Final[dict[str, Callable[[str, EntityCommand], LevadaError]]] = {
    "OutcomeUnknown": lambda text, m: OutcomeUnknown(text, entity=m.entity, command=m.command or ""),
    "ReplayFailed": lambda text, m: ReplayFailed(text, entity=m.entity),
    "EntityErased": lambda text, m: EntityErased(text, entity=m.entity),
    "CommandFailed": lambda text, m: CommandFailed(text, message=m.message),
    "CommandReused": lambda text, m: CommandReused(text, command=m.command or ""),
}
"""The errors of a shard on a node, by class name."""


class ToShard(Protocol):
    """The part of a shard's `Ref` that entities use; a `Route` has it too."""

    def tell(self, message: Any) -> None:
        """Send a message without waiting."""
        ...

    async def send(self, message: Any) -> None:
        """Send a message, waiting for room."""
        ...

    def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Coroutine[Any, Any, Any]:
        """Send a question and return the answer."""
        ...


class ShardRoutes:
    """The owners of all shards, as this process knows them."""

    def __init__(self, system: ActorSystem, count: int) -> None:
        self.system = system
        self.table = [Owner(shard) for shard in range(count)]
        self.closed = False
        """Whether the shards have ended: the root in the driver has ended."""
        self.leaving = False
        """Whether this node drains, so that it does not wait for nodes that start."""
        self._told: dict[int, deque[Any]] = {}
        self._changed = trio.lowlevel.ParkingLot()

    async def follow(self, owners: Receiver[Owner]) -> None:
        """Update the table until the placement ends. Then no place is known."""
        with owners:
            try:
                async for news in owners:
                    self._take(news)
            except ChannelError:
                pass  # the driver, or the placement, has ended
        self.table = [Owner(shard) for shard in range(len(self.table))]
        self._changed.unpark_all()

    def close(self, ref: Ref[Any]) -> None:
        """End, because the shards have ended; `ref` is the actor that followed them."""
        self.closed = True
        self._changed.unpark_all()
        for told in self._told.values():
            for each in told:
                self.system.dead_letter(each, ref, "the shards have ended")
        self._told.clear()

    def _take(self, news: Owner) -> None:
        self.table[news.shard] = news
        self._changed.unpark_all()
        if news.ref is not None:
            for each in self._told.pop(news.shard, ()):
                try:
                    news.ref.tell(each)
                except Exception as error:  # noqa: BLE001 - one that cannot travel, say, and the next one can
                    self.system.dead_letter(each, news.ref, text_of(error))

    async def changed(self) -> None:
        """Wait until any shard has another place."""
        await self._changed.park()

    async def owner(self, shard: int) -> Ref[Any]:
        """Wait until a shard is open, and return its ref. Errors are as for `require_open`."""
        while True:
            ref = self.table[shard].ref
            if ref is not None and ref.is_alive:
                return ref
            self.require_open(shard)
            await self._changed.park()

    async def leave(self) -> None:
        """Do not wait for nodes that start: this node drains."""
        self.leaving = True
        self._changed.unpark_all()

    def require_open(self, shard: int) -> None:
        """Raise `ActorStopped` if the shards have ended, and `ConfigurationError` if the shard's node cannot open it."""
        if self.closed:
            raise ActorStopped("the shards have ended", reason=NORMAL)
        if self.leaving and self.table[shard].nowhere:
            raise ActorStopped(f"shard {shard} has ended, because all nodes are ending", reason=NORMAL)
        if self.table[shard].refused:
            raise ConfigurationError(f"shard {shard}: {self.table[shard].refused}")

    def tell(self, shard: int, m: Any) -> None:
        """Tell a shard a message, or keep the message until the shard is open."""
        self.require_open(shard)
        ref = self.table[shard].ref
        if ref is not None and ref.is_alive:
            ref.tell(m)
            return
        waiting = self._told.setdefault(shard, deque())
        if len(waiting) >= MAILBOX:
            raise MailboxFull(
                f"shard {shard} is not open now, and {MAILBOX} messages wait for it", capacity=MAILBOX, message=m
            )
        waiting.append(m)


class Follower(Actor[Any]):
    """Keeps routes up to date; on a node that drains, until its app has ended, whose last work may need them."""

    routes: ShardRoutes
    root: Ref[Any]
    owners: Receiver[Owner]

    async def started(self) -> None:
        """Start to follow the shards."""
        from levada.actors.nodes import nodes_of  # imported here, so that a program without nodes does not import it

        self.start_soon(self._follow)
        nodes = nodes_of(self.system)
        await self.enter(nodes.before_leaving(self.routes.leave))
        # Otherwise the connection to the driver would wait for the channel.
        await self.enter(nodes.before_leaving(self._leave, last=True))

    async def _leave(self) -> None:
        self.stop()
        await self.ref.terminated()

    async def _follow(self) -> None:
        try:
            while True:
                await self.routes.follow(self.owners)
                # The placement has ended. If its root has only failed, it starts again.
                self.owners, _ = await subscribed(self.root)
        except ActorError:
            self.stop()
        finally:
            self.routes.close(self.ref)


async def subscribed(root: Ref[Any]) -> tuple[Receiver[Owner], int]:
    """Ask a root for the places of the shards; return where they come, and the number of shards.

    Raises:
        ActorError: it has ended, or is out of reach.
    """
    while True:
        sender: Sender[Owner]
        sender, owners = channel(Owner, name="owners of shards")
        try:
            placement = await root.ask(GetPlacement(), timeout=None)
            return owners, await placement.ask(Subscribe(sender), timeout=None)
        except BaseException as error:
            owners.close()
            sender.cancel()
            if not isinstance(error, ActorStopped) or not root.is_alive:
                raise
        await trio.sleep(PAUSE)  # it has failed, and starts again


class Route:
    """One shard, wherever it is."""

    def __init__(self, routes: ShardRoutes, shard: int) -> None:
        self._routes = routes
        self._shard = shard

    def tell(self, message: Any) -> None:
        """Send a message without waiting. It is lost with the shard's node; while the shard moves, up to `MAILBOX` messages are kept."""
        self._routes.tell(self._shard, message)

    async def send(self, message: Any) -> None:
        """Send a message, waiting for room and for the shard."""
        while True:
            ref = await self._routes.owner(self._shard)
            try:
                await ref.send(message)
            except ActorStopped:
                await self._news(ref)
            else:
                return

    async def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        """Send a question and return the answer.

        Raises:
            OutcomeUnknown: the shard was lost, and the command has no id, so it cannot be repeated.
            AskTimeout: no answer came in time, for any reason.
            ActorStopped: the shards have ended for good.
            LevadaError: an error of the shard.
        """
        check_timeout(timeout)
        seconds = self._routes.system.ask_timeout if timeout is DEFAULT_TIMEOUT else timeout
        with trio.move_on_after(math.inf if seconds is None else seconds):
            return await self._ask(message)
        raise AskTimeout(
            f"shard {self._shard} did not answer {question_name(message)} in {seconds:g} s",
            seconds=seconds or 0.0,
            message=message,
        )

    async def _ask(self, m: Any) -> Any:
        unknown: LevadaError | None = None  # the error of an earlier attempt that may have been done
        while True:
            ref = await self._routes.owner(self._shard)
            try:
                return await ref.ask(m, timeout=None)
            except CommandFailed:
                raise
            except ActorStopped as error:
                # A shard that stopped normally or failed has answered every command that it had begun.
                begun = not isinstance(error.reason, Normal | Failed)
                lost: LevadaError = _unknown(m, str(error)) if isinstance(m, EntityCommand) else error
                lost.__cause__ = error
            except (OutcomeUnknown, NoValue) as error:
                begun, lost = True, error
            except ActorError as error:
                lost = _as_sent(error, m)
                if not isinstance(lost, OutcomeUnknown):
                    if unknown is not None and isinstance(lost, JournalError) and not isinstance(lost, CommandReused):
                        raise _unknown(m, str(lost)) from unknown  # the refusal is of this attempt only
                    raise lost from error.__cause__
                begun = True
            if begun and isinstance(m, EntityCommand):
                if m.command is None:
                    raise lost
                unknown = lost
            await self._news(ref)

    async def _news(self, of: Ref[Any]) -> None:
        """Wait until the shard has another place, for `PAUSE` seconds at most."""
        self._routes.require_open(self._shard)
        with trio.move_on_after(PAUSE):
            while self._routes.table[self._shard].ref is of:
                await self._routes.changed()


def _unknown(m: EntityCommand, why: str) -> OutcomeUnknown:
    what = f"command {m.command!r:.100}" if m.command is not None else type(m.message).__name__
    text = f"{what} of entity {m.entity!r:.100} is not done, or not known to be: {why}: ask again, with a command id"
    return OutcomeUnknown(text, entity=m.entity, command=m.command or "")


def _as_sent(error: ActorError, m: Any) -> LevadaError:
    """Return the error that a shard on a node raised."""
    cause = error.__cause__
    if isinstance(cause, RemoteFailure) and isinstance(m, EntityCommand | Erase) and cause.kind in _ERRORS:
        return _ERRORS[cause.kind](cause.detail, m if isinstance(m, EntityCommand) else EntityCommand(m.entity, m))
    return journal_error(error) or error
