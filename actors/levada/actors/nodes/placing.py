"""Actors on nodes that their driver supervises: it starts them again when their node is lost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import trio

from levada.framework import Actor, Failed, Lost, Reason, Ref
from levada.framework.embedding import release
from levada.framework.errors import (
    ActorError,
    AskTimeout,
    ConfigurationError,
    LevadaError,
    NameTaken,
    RemoteFailure,
)

from .messages import End, Member, MemberState, NodeLost, Spawn

if TYPE_CHECKING:
    from .fleet import Fleet

__all__ = ["Placed", "Placing"]

_ENDS_SYSTEM: Final = frozenset({"SystemExit", "KeyboardInterrupt", "BaseExceptionGroup"})
"""Kinds of failures of an actor that end its system, and with it the node. A group that is no `ExceptionGroup` has one of the others in it."""


class Placing:
    """An actor on a node: its order, the choice of its node, and its current ref and node."""

    def __init__(self, fleet: Fleet, order: Spawn, on: str | int, name: str | None) -> None:
        self.fleet = fleet
        self.order = order
        self.on = on
        self.name = name
        self.ref: Ref[Any] | None = None
        """The actor, until its node is lost."""
        self.member: Member | None = None
        """The actor's node, as it was when the actor was started."""
        self.abandoned = False
        """Whether the caller has stopped waiting for the first start."""
        self._known = trio.Event()
        self._error: Exception | None = None
        self._control: Ref[Any] | None = None

    @property
    def begun(self) -> bool:
        """Whether its first start has succeeded or failed."""
        return self._known.is_set()

    async def first(self, timeout: float | None) -> Ref[Any]:
        """Wait until `Placed` has started it for the first time. Errors are as for `Nodes.spawn`.

        Cancellation:
            the actor ends as soon as it has started.
        """
        with trio.move_on_after(math.inf if timeout is None else timeout):
            try:
                await self._known.wait()
            finally:
                self.abandoned = not self._known.is_set()
            if self._error is not None:
                raise self._error
            assert self.ref is not None
            return self.ref
        raise AskTimeout(f"{self.order.cls} was not started within {timeout:g} s", seconds=timeout or 0.0)

    async def begin(self) -> bool:
        """Start it for the first time, and wake the task in `first`. Return whether the actor is to be watched."""
        try:
            ref = await self.start(None)
        except (LevadaError, TypeError, ValueError) as error:
            self._error = error
            return False
        else:
            if self.abandoned:
                self._end(ref)
            return not self.abandoned
        finally:
            self._known.set()

    async def start(self, timeout: float | None) -> Ref[Any]:
        """Start it on a node that is up, and register its name, which is its own from now on. Errors are as for `Nodes.spawn`."""
        if self.name is None:
            return await self._start(timeout)
        starting, holder = self.fleet.starting, self.fleet.system.registry.get(self.name)
        if holder is not None:
            raise NameTaken(f"the name {self.name!r} belongs to {holder.where}", actor=holder.path, name=self.name)
        if self.name in starting:
            raise NameTaken(f"the name {self.name!r} belongs to an actor that is starting", name=self.name)
        starting.add(self.name)
        try:
            return await self._start(timeout)
        finally:
            starting.remove(self.name)

    async def _start(self, timeout: float | None) -> Ref[Any]:
        place = self.fleet.choose(self.on)
        assert place.control is not None
        self._control = place.control
        member = self.fleet.directory[place.name]
        try:
            ref: Ref[Any] = await place.control.ask(self.order, timeout=timeout)
        except ActorError as error:
            cause = error.__cause__
            if isinstance(cause, RemoteFailure) and cause.kind == "ConfigurationError":
                raise ConfigurationError(f"{place.name}: {cause.detail}") from error
            raise
        if self.name is not None:
            try:
                self.fleet.system.registry.register(self.name, ref)
            except BaseException:
                self._end(ref)
                raise
        self.ref, self.member = ref, member
        return ref

    def _end(self, ref: Ref[Any]) -> None:
        """Tell the node to kill the actor: only its own system can."""
        try:
            if self._control is not None:
                self._control.tell(End(ref))
        except ActorError:
            pass  # the node is ending, or has not read for long

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

    def is_unwanted(self) -> bool:
        """Return whether no node for it is left in the fleet."""
        members = self.fleet.directory.members
        return not any(self.on in ("any", member.name, member.index) for member in members)

    def may_start(self) -> bool:
        """Return whether a node for it is up, or none is left."""
        try:
            return self.is_unwanted() or self.fleet.choose(self.on) is not None
        except ActorError:
            return False


class Placed(Actor[Any]):
    """Watches an actor on a node, and starts it again on a node that is up when its own has drained.

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
            if placing.ref is None:
                await directory.until(placing.may_start)
                if placing.is_unwanted():
                    break
                await placing.start(None)
            assert placing.ref is not None
            reason = await placing.ref.terminated()
            loss = _loss(reason)
            if not loss and not placing.is_leaving():
                break
            # Wait until the actor has certainly ended, so that there are never two.
            await directory.until(placing.ended)
            where, placing.ref = placing.ref.where, None
            if loss:
                release(self, Failed(NodeLost(f"{where} {loss}")))
                return
        self.stop()


def _loss(reason: Reason) -> str:
    """Return how an actor was lost with its node, for the text behind its name; empty if it ended by itself."""
    if isinstance(reason, Lost):
        return "was lost with its node"
    if isinstance(reason, Failed) and isinstance(reason.error, RemoteFailure) and reason.error.kind in _ENDS_SYSTEM:
        return f"has ended its node: {reason.error.kind}({reason.error.detail})"
    return ""
