"""Orders to start an actor on a node: how the caller describes the actor in a message, and how the node reads the description."""

from __future__ import annotations

import sys
from typing import Any, Final

import attrs
import msgpack

from levada.actors.apps import importable
from levada.framework import Actor, MailboxPolicy, RestartPolicy, Supervision, restart
from levada.framework.codec import AttachmentKind, Codec
from levada.framework.errors import ConfigurationError, DecodeError
from levada.framework.text import printable

from .messages import MailboxRoom, Packed, Policy, Spawn

__all__ = ["actor_class", "arguments_of", "joined", "mailbox_of", "policy_of", "spawn_order"]

_CODEC: Final = Codec()
_MESSAGE: Final = 2  # msgpack's ext type of a message, as `levada.framework.codec` says; the other is that of a handle


def spawn_order(
    cls: Any,
    args: tuple[Any, ...],
    supervise: Supervision,
    mailbox: MailboxPolicy | None,
    *,
    label: str | None = None,
    travels: bool = True,
) -> Spawn:
    """Describe an actor to start.

    Args:
        cls: its class.
        args: the arguments of the class.
        supervise: its supervision.
        mailbox: its mailbox.
        label: its name on its node, if no other actor has that there; of a name with ``/``, the last part. None: it has no name.
        travels: whether another process reads the description. Otherwise the class and the arguments may be any.

    Raises:
        ConfigurationError: a part of the description cannot travel.
        TypeError, ValueError: an argument cannot travel.
    """
    named = importable if travels else _name_of
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
        if not isinstance(mailbox, MailboxPolicy):
            raise ConfigurationError(f"the mailbox is {mailbox!r}, wanted bounded(…) or unbounded()")
        if not isinstance(mailbox.overflow, str):
            raise ConfigurationError("conflate(key) is a function, which cannot travel: set the mailbox on the node")
        room = MailboxRoom(mailbox.capacity, mailbox.overflow)
    packed = [_packed(i, each) for i, each in enumerate(args)] if travels else [*args]
    last = label.rpartition("/")[2] if isinstance(label, str) else ""  # the name in the fleet is checked elsewhere
    return Spawn(named(cls), packed, policy, room, last)


def _name_of(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _packed(index: int, value: Any) -> Packed:
    handles: list[Any] = []
    try:
        return Packed(_CODEC.encode(value, attachments=_Handles(handles)), handles)
    except (TypeError, ValueError) as error:
        raise type(error)(f"argument {index + 1}: {error}") from error


def arguments_of(order: Spawn) -> list[Any]:
    """Return the arguments of the class that came in a message.

    Raises:
        ConfigurationError: this process does not know the class of one, or cannot read it.
    """
    found: list[Any] = []
    for each in order.args:
        try:
            found.append(_unpack(each))
        except DecodeError as error:
            raise ConfigurationError(
                f"argument {len(found) + 1} of {printable(order.cls)} cannot be read: {printable(str(error))}"
            ) from error
    return found


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


def joined(name: str, known: tuple[Spawn, str | int], wanted: tuple[Spawn, str | int]) -> Spawn:
    """Check that two orders for a singleton are the same; return the order for its next start, whose arguments are of the newer code.

    Raises:
        ConfigurationError: they differ; the text says in what.
    """
    (there, place), (order, on) = known, wanted
    if there.cls != order.cls:
        raise ConfigurationError(
            f"the singleton {name!r} is a {there.cls}, and a {order.cls} was asked for: give one of them another name="
        )
    # Values of arguments are not shown: they may be secrets.
    parts = [
        f"argument {i + 1}" for i, pair in enumerate(zip(there.args, order.args, strict=False)) if not _same(*pair)
    ]
    if len(there.args) != len(order.args):
        parts = [f"the number of arguments ({len(there.args)}, now {len(order.args)})"]
    settings = (("on", place, on), ("supervise", there.policy, order.policy), ("mailbox", there.mailbox, order.mailbox))
    parts += [f"{setting} ({_shown(a)}, now {_shown(b)})" for setting, a, b in settings if a != b]
    if parts:
        raise ConfigurationError(
            f"the singleton {name!r} ({there.cls}) was started with other arguments; these differ: {', '.join(parts)}"
        )
    args = [_newer(*pair) for pair in zip(there.args, order.args, strict=True)]
    return attrs.evolve(there, args=args)  # type: ignore[misc]  # a message class is an attrs class


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal in all that their versions of message classes have in common.

    A later version of a class has more fields than an earlier one. Only the fields that both have are compared.
    """
    if isinstance(one, Packed) and isinstance(other, Packed) and one != other:
        return _equal(_read(one.data, one.handles), _read(other.data, other.handles))
    return bool(one == other)


def _newer(one: Any, other: Any) -> Any:
    """Return the later version of two arguments that are the same: its messages have more fields."""
    return other if isinstance(one, Packed) and len(other.data) > len(one.data) else one


def _shown(value: Any) -> str:
    return printable(repr(value)[:200])


# The driver may have imported an older version of a message class than the nodes, or none. If it decoded a message of that class, it would drop
# the fields that it does not know. So arguments are encoded where they come from, and decoded on the actor's node.


@attrs.frozen
class _Handles:
    """Takes the handles of a value while it is encoded; a `levada.framework.codec.Attachments`."""

    taken: list[Any]

    def attach(self, handle: Any, /) -> tuple[AttachmentKind, int]:
        self.taken.append(handle)
        return AttachmentKind[handle.attachment_kind.upper()], len(self.taken) - 1

    def rollback(self) -> None:
        """Do nothing: handles are moved when the message with the `Packed` is encoded."""


def _unpack(packed: Packed) -> Any:
    """Decode a value.

    Raises:
        DecodeError: this process does not know a class in it, or has a version of it that does not fit.
    """

    def handle(number: int, kind: AttachmentKind, item: Any, _: bytes = b"") -> Any:
        found = packed.handles[number]
        if getattr(found, "attachment_kind", None) != kind.name.lower():
            raise ValueError(f"it is {found!r}, wanted a {kind.name.lower()}")
        return found

    return _CODEC.decode(packed.data, detach=handle)


class _Message(list[Any]):
    """The tag of a message and its fields."""


class _Map(list[Any]):
    """The pairs of a map, sorted."""


def _read(data: bytes, handles: list[Any]) -> Any:
    def ext(code: int, inner: bytes) -> Any:
        if code == _MESSAGE:
            return _Message(_read(inner, handles))
        return handles[sum((octet & 0x7F) << 7 * i for i, octet in enumerate(inner[1:]))]

    try:
        return msgpack.unpackb(
            data,
            ext_hook=ext,
            object_pairs_hook=lambda pairs: _Map(sorted(map(list, pairs), key=repr)),
            strict_map_key=False,
            timestamp=3,
        )
    except (ValueError, LookupError) as error:
        raise DecodeError(f"not an argument: {error}") from error


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and type(one) is type(other):
        same = type(one) is _Message or len(one) == len(other)
        return same and all(map(_equal, one, other))
    return bool(one == other)
