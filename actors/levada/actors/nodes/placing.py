"""Actors on nodes that their driver supervises: it starts them again when their node drains or is lost.

There are never two of one: an actor starts again only when the one before has certainly ended. Either its own system has said so, or the
process of its node has ended.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import trio

from levada.framework import Actor, Cancelled, Failed, Lost, Reason, Ref, Shutdown
from levada.framework.embedding import release
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    AskTimeout,
    ConfigurationError,
    LevadaError,
    NameTaken,
    RemoteFailure,
)
from levada.framework.supervision import wants_restart

from .messages import End, Finish, Member, MemberState, NodeLeaves, NodeLost, Spawn
from .orders import policy_of

if TYPE_CHECKING:
    from .fleet import Fleet

__all__ = ["Placed", "Placing"]

_ENDS_SYSTEM: Final = frozenset({"SystemExit", "KeyboardInterrupt", "BaseExceptionGroup"})
"""Kinds of failures of an actor that end its system, and with it the node. A group that is no `ExceptionGroup` has one of the others in it."""


class Placing:
    """An actor on a node: its order, the choice of its node, and its current ref and node."""

    def __init__(self, fleet: Fleet, order: Spawn, on: str | int, name: str | None, *, singleton: bool = False) -> None:
        self.fleet = fleet
        self.order = order
        self.on = on
        self.name = name
        self.singleton = singleton
        """Whether it waits for a node, many callers may wait for it, and it stays when they have gone."""
        self.kept = False
        """Whether its name is kept."""
        self.ref: Ref[Any] | None = None
        """The actor, until it has ended."""
        self.member: Member | None = None
        """The node where it is, or may be, as the node was when the actor was started."""
        self.abandoned = False
        """Whether the caller has stopped waiting for the first start."""
        self._known = trio.Event()
        self._first: Ref[Any] | None = None
        self._error: Exception | None = None
        self._control: Ref[Any] | None = None

    @property
    def begun(self) -> bool:
        """Whether its first start has succeeded or failed."""
        return self._known.is_set()

    async def first(self, timeout: float | None) -> Ref[Any]:
        """Wait until `Placed` has started it for the first time. Errors are as for `Nodes.spawn`.

        Cancellation:
            the actor ends as soon as it has started, unless it is a singleton.
        """
        with trio.move_on_after(math.inf if timeout is None else timeout):
            try:
                await self._known.wait()
            finally:
                self.abandoned = not self.begun and not self.singleton
            if self._error is not None:
                raise self._error
            assert self._first is not None
            return self._first
        raise AskTimeout(f"{self.order.cls} was not started within {timeout:g} s", seconds=timeout or 0.0)

    async def begin(self) -> bool:
        """Start it for the first time, and wake the tasks in `first`. Return whether the actor is to be watched."""
        try:
            if self.singleton:
                self.require_name()
                ref: Ref[Any] | None = await self.start_when_possible()
            else:
                ref = await self.start(None)
        except (LevadaError, TypeError, ValueError) as error:
            self._error = error
            return False
        else:
            assert ref is not None
            self._first = ref
            if self.abandoned:
                self._end(ref)
            return not self.abandoned
        finally:
            self._known.set()

    async def start_when_possible(self) -> Ref[Any] | None:
        """Start it as soon as there is a node for it and the one before has ended; again if that node ends or drains meanwhile.

        Returns:
            None if it was started before, and no node for it is left. Errors are as for `Nodes.spawn`.
        """
        while True:
            await self.fleet.directory.until(self.ended)
            await self.fleet.directory.until(self.may_start)
            if self.begun and self.is_unwanted():
                return None
            try:
                return await self.start(None)
            except ActorStopped:
                pass  # the node was lost, or has begun to drain

    async def start(self, timeout: float | None) -> Ref[Any]:
        """Start it on a node that is up, and register its name, which is its own from now on. Errors are as for `Nodes.spawn`."""
        if self.name is None or self.kept:
            return await self._start(timeout)
        self.require_name()
        starting = self.fleet.starting
        starting.add(self.name)
        try:
            return await self._start(timeout)
        finally:
            starting.remove(self.name)

    def require_name(self) -> None:
        """Raise `NameTaken` if its name belongs to another actor."""
        name = self.name
        assert name is not None
        self.fleet.sharing.require_free(name)
        holder = self.fleet.system.registry.get(name)
        if holder is not None:
            raise NameTaken(f"the name {name!r} belongs to {holder.where}", actor=holder.path, name=name)
        if name in self.fleet.starting:
            raise NameTaken(f"the name {name!r} belongs to an actor that is starting", name=name)

    async def _start(self, timeout: float | None) -> Ref[Any]:
        place = self.fleet.choose(self.on)
        assert place.control is not None
        self._control = place.control
        self.member = self.fleet.directory[place.name]
        try:
            ref: Ref[Any] = await place.control.ask(self.order, timeout=timeout)
        except ActorError as error:
            cause = error.__cause__
            if isinstance(cause, RemoteFailure):
                self.member = None  # the node has refused, so the actor is not there
                if cause.kind == "ConfigurationError":
                    raise ConfigurationError(f"{place.name}: {cause.detail}") from error
                if cause.kind == NodeLeaves.__name__:
                    raise ActorStopped(cause.detail) from error
            raise
        if self.name is not None:
            try:
                self._take_name(self.name, ref)
            except BaseException:
                self._end(ref)
                raise
        self.ref = ref
        return ref

    def _take_name(self, name: str, ref: Ref[Any]) -> None:
        if self.order.policy is None:
            self.fleet.system.registry.register(name, ref)
        else:
            self.fleet.sharing.keep(name, ref)
            self.kept = True

    def _end(self, ref: Ref[Any]) -> None:
        """Tell the node to kill the actor: only its own system can."""
        try:
            if self._control is not None:
                self._control.tell(End(ref))
        except ActorError:
            pass  # the node is ending, or has not read for long

    async def move(self) -> bool:
        """Stop it in order on its node, which leaves. Messages to its name wait until it has started elsewhere.

        Returns:
            False if the other nodes have left meanwhile, so that it stays until its node ends.
        """
        if self.kept and self.ref is not None:
            assert self.name is not None
            await self.fleet.settle(self.name)
            if not self.can_move():
                self.fleet.sharing.keep(self.name, self.ref)
                return False
        try:
            if self._control is not None and self.ref is not None:
                self._control.tell(Finish(self.ref))
        except ActorError:
            pass  # as above
        return True

    def over(self) -> None:
        """Record that the actor has ended, and may start again."""
        self.ref = None
        if self.kept:
            assert self.name is not None
            self.fleet.sharing.vacate(self.name)
        self.fleet.directory.wake()

    def ended(self) -> bool:
        """Return whether the process of the node, as it was when the actor was started, has ended."""
        directory, member = self.fleet.directory, self.member
        if member is None or member.name not in directory:
            return True
        now = directory[member.name]
        return now.node_id != member.node_id or now.state is MemberState.DOWN

    def is_leaving(self) -> bool:
        """Return whether the node is draining or has ended."""
        member = self.member
        return self.ended() or (member is not None and self.fleet.directory[member.name].state is MemberState.DRAINING)

    def can_move(self) -> bool:
        """Return whether it is on a node that leaves, and another node is there for it."""
        return self.is_leaving() and not self.is_unwanted() and self.may_start()

    def moves_from(self, name: str) -> bool:
        """Return whether it is on this node, and can move."""
        return self.ref is not None and self.member is not None and self.member.name == name and self.can_move()

    def starts_again(self, reason: Reason) -> bool:
        """Return whether it starts elsewhere after it has ended with its node in order."""
        policy = self.order.policy
        assert policy is not None
        return self.is_leaving() and (
            isinstance(reason, Shutdown) or wants_restart(policy_of(policy, resume=False), reason)
        )

    def is_unwanted(self) -> bool:
        """Return whether no node for it is left in the fleet."""
        members = self.fleet.directory.members
        return not any(self.on in ("any", member.name, member.index) for member in members)

    def may_start(self) -> bool:
        """Return whether a node for it is up, or none is left."""
        try:
            return self.is_unwanted() or bool(self.fleet.candidates(self.on))
        except ActorError:
            return False


class Placed(Actor[Any]):
    """Watches an actor on a node, and starts it again on a node that is up when its own drains.

    When the node was lost, or the actor has ended its node with `sys.exit`, it fails, and its supervisor restarts it or gives up by the
    caller's policy.
    """

    placing: Placing

    def started(self) -> None:
        """Begin."""
        self.start_soon(self._follow)

    async def _follow(self) -> None:
        placing = self.placing
        directory = placing.fleet.directory
        if not placing.begun and not await placing.begin():
            self.stop()
            return
        while True:
            if placing.ref is None and await placing.start_when_possible() is None:
                break
            assert placing.ref is not None
            where = placing.ref.where
            reason = await self._ends(placing.ref)
            loss = _loss(reason)
            if not loss and not placing.starts_again(reason):
                break
            placing.over()
            if loss:
                # Only the end of its process says that the actor has ended, and there are never two.
                await directory.until(placing.ended)
                release(self, Failed(NodeLost(f"{where} {loss}")))
                return
            placing.member = None
        self.stop()

    async def _ends(self, ref: Ref[Any]) -> Reason:
        """Wait until the actor has ended; when its node drains and another is up, let it end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._move)
            reason = await ref.terminated()
            nursery.cancel_scope.cancel()
        return reason

    async def _move(self) -> None:
        while True:
            await self.placing.fleet.directory.until(self.placing.can_move)
            if await self.placing.move():
                return


def _loss(reason: Reason) -> str:
    """Return how an actor was lost with its node, for the text behind its name; empty if it ended by itself."""
    if isinstance(reason, Lost | Cancelled):  # the system of a node is cancelled only at the end of its process
        return "was lost with its node"
    if isinstance(reason, Failed) and isinstance(reason.error, RemoteFailure) and reason.error.kind in _ENDS_SYSTEM:
        return f"has ended its node: {reason.error.kind}({reason.error.detail})"
    return ""
