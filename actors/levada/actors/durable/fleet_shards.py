"""`FleetShards`: the actor in the driver above the shards that a fleet has on its nodes.

Whichever process comes first starts it, by name: the driver of an app imports this module and never the app. So it outlives every node. If it
fails, it starts again with what it was first asked for.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import attrs
import pyarrow as pa
import trio

from levada.actors.journal import journal_error
from levada.actors.nodes import NodeLost, nodes_of
from levada.actors.nodes.driver_actor import DRIVER, DriverActor
from levada.actors.nodes.nodes import Nodes
from levada.actors.nodes.orders import spawn_order
from levada.framework import Ref, Shutdown, handles
from levada.framework.errors import ActorError, ActorStopped, ConfigurationError, LevadaError, NameTaken, RemoteFailure
from levada.framework.links import NORMAL

from .hosting import GetPlacement
from .opening import AGAIN, OpenedShards, OpenShards, open_journal
from .placement import Placement, PrepareHosts
from .rows import load_arrow

__all__ = ["FleetShards", "fleet_name", "open_shards"]


_opened: weakref.WeakKeyDictionary[Ref[Any], OpenShards] = weakref.WeakKeyDictionary()
"""What the shards below each root were opened with, for its next life."""


class FleetShards(DriverActor[OpenShards | GetPlacement]):
    """Keeps the journal and the placement of a durable class."""

    async def started(self) -> None:
        """Open the shards again after a failure; while that fails, this actor restarts."""
        self._placement: Ref[Any] | None = None
        self._journal: Ref[Any]
        before = _opened.get(self.ref)
        if before is not None:
            await self._open_all(before)

    @handles
    async def open(self, m: OpenShards) -> OpenedShards | None:
        """Open the shards, or join them."""
        before = _opened.get(self.ref)
        if before is None:
            try:
                await self._open_all(m)
            except (LevadaError, OSError) as error:
                self.reply_later().fail(error)
                self.ref.stop(now=True)
                return None
            _opened[self.ref] = m
        else:
            try:
                before.require_same(self.ref.path[1:], m)
            except ConfigurationError as error:
                self.reply_later().fail(error)
                return None
        return OpenedShards(self._journal)

    async def _open_all(self, m: OpenShards) -> None:
        await load_arrow()
        wanted = pa.ipc.read_schema(pa.py_buffer(m.terms.schema))
        self._journal, columns = await open_journal(self, m.place, wanted, m.terms.shards)
        terms = attrs.evolve(m.terms, schema=columns.serialize().to_pybytes())  # type: ignore[misc]  # a message class is an attrs class
        theirs = self._journal if m.journal is None else m.journal  # a store is opened by each of them
        placement = self.spawn(Placement, nodes_of(self.system), terms, theirs, name="placement", supervise="escalate")
        await placement.ask(PrepareHosts(), timeout=None)
        self._placement = placement

    @handles
    def placement(self, _: GetPlacement) -> Ref[Any] | None:
        """Return the actor that says where the shards are."""
        if self._placement is None:
            self.reply_later().fail(ActorStopped("the shards are not open", reason=NORMAL))
        return self._placement


def fleet_name(name: str) -> str:
    """Return the name in the fleet of the root of shards."""
    return f"levada.durable/{name}"


async def open_shards(nodes: Nodes, name: str, question: OpenShards) -> tuple[Ref[Any], Ref[Any]]:
    """Open the shards of a class on the nodes of a fleet, or join them; return the root and the journal. Errors are as for `shards`."""
    order = spawn_order(FleetShards, (), AGAIN, None)
    while True:
        try:
            root = await nodes.join(order, DRIVER, fleet_name(name))
        except NameTaken as error:
            text = f"in the driver, {error}: if the driver calls shards, then with nodes=nodes; otherwise give these shards another name="
            raise NameTaken(text, actor=error.actor, name=name) from error
        try:
            opened: OpenedShards = await root.ask(question, timeout=None)
        except ActorStopped as error:
            if not isinstance(error.reason, Shutdown):
                raise
            await trio.lowlevel.checkpoint()  # another caller's arguments could not be opened: try these
        except ActorError as error:
            raise _as_sent(error) from error.__cause__
        else:
            return root, opened.journal


_KINDS: Final = {each.__name__: each for each in (ConfigurationError, NodeLost)}


def _as_sent(error: ActorError) -> LevadaError:
    """Return the error that the root has raised in the driver."""
    cause = error.__cause__
    if isinstance(cause, RemoteFailure) and cause.kind in _KINDS:
        return _KINDS[cause.kind](cause.detail)
    return journal_error(error) or error
