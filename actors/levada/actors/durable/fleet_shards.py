"""`FleetShards`: the actor in the driver above the shards that a fleet has on its nodes, and the messages to it.

Whichever process comes first starts it, by name: the driver of an app imports this module and never the app. So it outlives every node. If it
fails, it starts again with what it was first asked for.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Final

import attrs
import pyarrow as pa
import trio

from levada.actors.journal import journal_error
from levada.actors.nodes import NodeLost, nodes_of
from levada.actors.nodes.driver_actor import DRIVER, DriverActor
from levada.actors.nodes.nodes import Nodes
from levada.actors.nodes.orders import spawn_order
from levada.framework import Asks, Ref, Shutdown, handles, message
from levada.framework.errors import ActorError, ActorStopped, ConfigurationError, LevadaError, RemoteFailure
from levada.framework.links import NORMAL

from .hosting import GetPlacement, Terms
from .opening import AGAIN, Folder, Place, columns_in, open_journal
from .placement import Placement, PrepareHosts
from .rows import load_arrow

__all__ = ["FleetShards", "OpenShards", "OpenedShards", "fleet_name", "open_shards"]


@message("levada.durable.opened_shards")
class OpenedShards:
    """The shards are open."""

    journal: Ref[Any]


@message("levada.durable.open_shards")
class OpenShards(Asks[OpenedShards]):
    """Open the shards of a class; later requests join them. Fails with `ConfigurationError` if the shards were opened with other terms."""

    terms: Terms
    """The schema has the columns of a new log."""
    journal: Any
    """A ref, a `LogStore`, or None for a folder."""
    folder: bytes
    """The folder in the driver's process: a name of a file, which need not be Unicode."""
    keeper: bool

    @classmethod
    def of(cls, terms: Terms, place: Place) -> OpenShards:
        """Make a request for shards whose log is at a place."""
        if isinstance(place, Folder):
            return cls(terms, None, os.fsencode(place.path.absolute()), place.keeper)
        return cls(terms, place, b"", False)

    def differences(self, other: OpenShards) -> list[str]:
        """List the arguments of `shards` in which another request differs, with both values."""
        values = {
            field.name: (getattr(self.terms, field.name), getattr(other.terms, field.name))
            for field in attrs.fields(Terms)  # type: ignore[arg-type]  # a message class is an attrs class
        }
        values |= {"keeper": (self.keeper, other.keeper), "journal": (self._journal, other._journal)}
        shards, others = values["shards"]
        values["max_live"] = (
            self.terms.max_live * shards,
            other.terms.max_live * shards,
        )  # the terms have it for one shard
        if shards != others:
            del values["max_live"]
        found = [f"{name}={ours}, now {theirs}" for name, (ours, theirs) in values.items() if ours != theirs]
        return [text if not text.startswith("schema=") else "events= (their columns differ)" for text in found]

    @property
    def _journal(self) -> object:
        return os.fsdecode(self.folder) if self.journal is None else self.journal

    @property
    def place(self) -> Place:
        """Where the log is."""
        found: Place = Folder(Path(os.fsdecode(self.folder)), self.keeper) if self.journal is None else self.journal
        return found


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
            differences = before.differences(m)
            if differences:
                text = f"the shards {self.ref.path[1:]!r} were started with other arguments: {', '.join(differences)}"
                self.reply_later().fail(ConfigurationError(text))
                return None
        return OpenedShards(self._journal)

    async def _open_all(self, m: OpenShards) -> None:
        await load_arrow()
        wanted = pa.ipc.read_schema(pa.py_buffer(m.terms.schema))
        columns = await columns_in(self.system, m.place, wanted, m.terms.shards)
        self._journal = await open_journal(self, m.place, columns, m.terms.shards)
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
        root = await nodes.join(order, DRIVER, fleet_name(name))
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
