"""Orders to start an actor on a node: how the caller describes the actor in a message, and how the node reads the description."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from levada.actors.apps import importable
from levada.framework import Actor, MailboxPolicy, RestartPolicy, Supervision, restart
from levada.framework.errors import ConfigurationError
from levada.transports.text import printable

from .messages import MailboxRoom, Policy, Spawn

__all__ = ["actor_class", "mailbox_of", "policy_of", "require_same", "spawn_order"]


def spawn_order(
    cls: Any,
    args: tuple[Any, ...],
    supervise: Supervision,
    mailbox: MailboxPolicy | None,
    *,
    named: Callable[[Any], str] = importable,
) -> Spawn:
    """Describe an actor to start.

    Args:
        cls: its class.
        args: the arguments of the class.
        supervise: its supervision.
        mailbox: its mailbox.
        named: returns the name of a class.

    Raises:
        ConfigurationError: a part of the description cannot travel.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise ConfigurationError(f"cls is {cls!r}, wanted an Actor class that can be imported by its name")
    if supervise == "escalate":
        raise ConfigurationError("supervise='escalate' would end the node's system: use 'stop' or restart(…)")
    policy = None
    if isinstance(supervise, RestartPolicy):
        resume = [named(error) for error in supervise.resume]
        policy = Policy(
            supervise.kind, supervise.max, supervise.within, supervise.initial_backoff, supervise.max_backoff, supervise.jitter, resume
        )  # fmt: skip
    elif supervise != "stop":
        raise ConfigurationError(f"supervise is {supervise!r}, wanted 'stop' or restart(…)")
    room = None
    if mailbox is not None:
        if not isinstance(mailbox.overflow, str):
            raise ConfigurationError("conflate(key) is a function, which cannot travel: set the mailbox on the node")
        room = MailboxRoom(mailbox.capacity, mailbox.overflow)
    return Spawn(named(cls), list(args), policy, room)


def _imported(name: str) -> Any:
    """Return the object ``module:qualname`` of an imported module; None if there is no such object."""
    module, _, attribute = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return found


def actor_class(name: str) -> type[Actor[Any]]:
    """Return the actor class of a name that came in a message. Never imports a module.

    Raises:
        ConfigurationError: no imported module has such a name, or it is not an actor class.
    """
    found = _imported(name)
    if isinstance(found, type) and issubclass(found, Actor):
        return found
    if found is not None:
        raise ConfigurationError(f"{printable(name)} is not an Actor class")
    raise ConfigurationError(f"{printable(name)} is not imported in this node: let the module of its app import it")


def policy_of(policy: Policy, *, resume: bool = True) -> RestartPolicy:
    """Return the policy that a message describes.

    Args:
        policy: the description.
        resume: whether to read the error classes to resume from, which only the actor's node needs.

    Raises:
        ConfigurationError: a value is invalid, or an error class is not imported here.
    """
    errors = [_imported(name) for name in policy.resume] if resume else []
    for name, error in zip(policy.resume, errors, strict=False):
        if not (isinstance(error, type) and issubclass(error, BaseException)):
            raise ConfigurationError(f"{printable(name)} is not an exception class that this node has imported")
    return restart(
        policy.kind,
        max=policy.max,
        within=policy.within,
        initial_backoff=policy.initial_backoff,
        max_backoff=policy.max_backoff,
        jitter=policy.jitter,
        resume=errors,
    )


def mailbox_of(room: MailboxRoom | None) -> MailboxPolicy | None:
    """Return the policy of a mailbox that a message describes."""
    return None if room is None else MailboxPolicy(room.capacity, room.overflow)


def require_same(name: str, known: tuple[Spawn, str | int], wanted: tuple[Spawn, str | int]) -> None:
    """Check that two orders for a singleton are the same.

    Raises:
        ConfigurationError: they differ; the text says in what.
    """
    (there, place), (order, on) = known, wanted
    if there.cls != order.cls:
        raise ConfigurationError(
            f"the singleton {name!r} is a {there.cls}, and a {order.cls} was asked for: give one of them another name="
        )
    # Values of arguments are not shown: they may be secrets.
    ours, theirs = _plain(there.args), _plain(order.args)
    parts = [f"argument {i + 1}" for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if len(ours) != len(theirs):
        parts = [f"the number of arguments ({len(ours)}, now {len(theirs)})"]
    settings = (("on", place, on), ("supervise", there.policy, order.policy), ("mailbox", there.mailbox, order.mailbox))
    parts += [f"{setting} ({_shown(a)}, now {_shown(b)})" for setting, a, b in settings if a != b]
    if parts:
        raise ConfigurationError(
            f"the singleton {name!r} ({there.cls}) was started with other arguments; these differ: {', '.join(parts)}"
        )


def _shown(value: Any) -> str:
    return printable(repr(value)[:200])


def _plain(value: Any) -> Any:
    """Return a value as it is after it has travelled."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
