"""`singleton`: the one actor of its kind in a fleet, or in a system without nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

import trio

from levada.framework import Actor, ActorSystem, MailboxPolicy, Ref, RestartPolicy, restart
from levada.framework.errors import ConfigurationError, NameTaken

from .messages import Spawn
from .nodes import fleet_of
from .orders import joined, spawn_order

__all__ = ["singleton"]

T = TypeVar("T")

_ALWAYS: Final = restart("permanent")

_alone: weakref.WeakKeyDictionary[ActorSystem, dict[str, tuple[Spawn, str | int, Ref[Any]]]] = (
    weakref.WeakKeyDictionary()
)
"""The singletons of systems without nodes, by name."""


async def singleton(
    system: ActorSystem,
    cls: Callable[..., Actor[T]],
    *args: Any,
    name: str | None = None,
    on: str | int = "any",
    supervise: RestartPolicy = _ALWAYS,
    mailbox: MailboxPolicy | None = None,
) -> Ref[T]:
    """Start the one actor of a name, or find it: the same line on every node, in the driver, and in a system without nodes.

    The first call starts the actor, all others join it. In a fleet the driver starts it on a node, and on another one when that node drains
    or is lost. There are never two: the next one starts when the one before has certainly ended. A new one begins with `args`, without the
    state of the one before. A call before the app's ``yield`` may start it on a node whose app is still starting.

    In a fleet the ref is of an actor in this process, which passes everything on, see `Nodes.lookup`: it follows the actor, and what is
    sent during a move waits. Without nodes the actor is in this system, below ``/NAME`` and in its registry.

    Args:
        system: the system of this process.
        cls: an `Actor` class. In a fleet it can be imported, and the app of every node has imported it.
        args: the arguments of the class; in a fleet, values that messages can hold.
        name: the name in the fleet, or in the registry of the system; by default the name of the class.
        on: the name or the index of the only node for it, or ``"any"``.
        supervise: when the actor restarts, and how often.
        mailbox: see `bounded`; `conflate` cannot travel.

    Raises:
        ConfigurationError: the name was given to a singleton with other arguments; the text says which argument differs. Or the class cannot be
            imported elsewhere, a node has not imported it, there is no such node, or `supervise` is no policy.
        NameTaken: an actor that is no singleton has the name.
        TypeError, ValueError: an argument cannot travel.
        ActorError: the class raised.
        ActorStopped: the driver, or the actor, has ended.
        AskTimeout: it was not started within the system's ``ask_timeout``, because no node for it is up.

    Cancellation:
        the actor may have been started.
    """
    if not isinstance(supervise, RestartPolicy):
        raise ConfigurationError(f"supervise is {supervise!r}, wanted restart(…): a singleton is started again")
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise ConfigurationError(f"cls is {cls!r}, wanted an Actor class")
    name = cls.__name__ if name is None else name
    if not isinstance(name, str):
        raise ConfigurationError(f"name is {name!r}, wanted a str")
    fleet = fleet_of(system)
    if fleet is not None:
        return await fleet.join(spawn_order(cls, args, supervise, mailbox, label=name), on, name)
    await trio.lowlevel.checkpoint()
    order = spawn_order(cls, args, supervise, mailbox, travels=False)
    known = _alone.setdefault(system, {})
    if name in known and known[name][2].is_alive:
        joined(name, known[name][:2], (order, on))
        return known[name][2]
    holder = system.registry.get(name)
    if holder is not None:
        raise NameTaken(f"the name {name!r} belongs to {holder.where}", actor=holder.path, name=name)
    try:
        ref = system.spawn(cls, *args, name=name, supervise=supervise, mailbox=mailbox)
    except NameTaken as error:
        text = f"{error}, and the singleton {name!r} was asked for: give one of them another name="
        raise NameTaken(text, actor=error.actor, name=name) from None
    system.registry.register(name, ref)
    known[name] = order, on, ref
    return ref
