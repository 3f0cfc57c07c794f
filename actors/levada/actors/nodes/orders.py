"""Orders to start an actor on a node: how the caller describes the actor in a message, and how the node reads the description."""

from __future__ import annotations

import sys
from typing import Any

from levada.actors.apps import importable
from levada.framework import Actor, MailboxPolicy, RestartPolicy, Supervision, restart
from levada.framework.errors import ConfigurationError
from levada.transports.text import printable

from .messages import MailboxRoom, Policy, Spawn

__all__ = ["actor_class", "mailbox_of", "policy_of", "spawn_order"]


def spawn_order(cls: Any, args: tuple[Any, ...], supervise: Supervision, mailbox: MailboxPolicy | None) -> Spawn:
    """Describe an actor to start.

    Raises:
        ConfigurationError: a part of the description cannot travel.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise ConfigurationError(f"cls is {cls!r}, wanted an Actor class that can be imported by its name")
    if supervise == "escalate":
        raise ConfigurationError("supervise='escalate' would end the node's system: use 'stop' or restart(…)")
    policy = None
    if isinstance(supervise, RestartPolicy):
        resume = [importable(error) for error in supervise.resume]
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
    return Spawn(importable(cls), list(args), policy, room)


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
