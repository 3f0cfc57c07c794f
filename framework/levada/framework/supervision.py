"""When a child ends: who starts again, how often, and what is told upwards.

Decisions only; carrying them out is in `levada.framework._runtime.lifecycle`.  A decision is made by the runtime from the parent's
settings, not by a message to the parent, so a busy parent delays nothing and back-off holds up no mailbox.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from .errors import ConfigurationError
from .links import Failed, Killed, Lost, Reason

if TYPE_CHECKING:
    from .mailbox import MailboxPolicy

__all__ = [
    "ChildSpec", "RestartPolicy", "Strategy", "Supervised", "Supervision", "child", "one_for_all", "one_for_one",
    "rest_for_one", "restart",
]  # fmt: skip

Kind = Literal["permanent", "transient", "temporary"]


@attrs.frozen
class RestartPolicy:
    """Which ends of a child are followed by a new start. Made by `restart`."""

    kind: Kind
    """``permanent``: after each; ``transient``: after failure, kill or loss; ``temporary``: after none."""
    max: int
    """Restarts within `within` seconds; one more is a failure of the parent."""
    within: float
    """Seconds."""
    backoff: tuple[float, float]
    """Seconds before the second restart in a row, and the most; doubles from one to the other."""
    jitter: float
    """Share of the back-off that is drawn by lot, 0 to 1."""
    resume: tuple[type[BaseException], ...]
    """Errors after which the actor just goes on with its state and its next message."""


Supervision = Literal["stop", "escalate"] | RestartPolicy
"""What a failure of a child does: it stops (the default; logged), it is the parent's failure too, or see `restart`."""


def restart(
    kind: Kind = "transient",
    *,
    max: int = 5,
    within: float = 10.0,
    backoff: tuple[float, float] = (0.0, 0.0),
    jitter: float = 0.2,
    resume: Sequence[type[BaseException]] = (),
) -> RestartPolicy:
    """Start a child again when it ends: same ref, same mailbox, a new object from the same factory.

    The message that failed is dropped (delivery is at most once) and given to `Actor.restarting`.

    Args:
        kind: which ends count, see `RestartPolicy.kind`.
        max: so many restarts…
        within: …in so many seconds; one more, and the child ends for good and its parent fails.
        backoff: seconds to wait before the second restart in a row and at most; the first is at once.
        jitter: up to this share of the wait is taken off by lot, so that many children do not come back in step.
        resume: errors that do not end the actor at all.

    Raises:
        ConfigurationError: a value out of its range.
    """
    if kind not in ("permanent", "transient", "temporary"):
        raise ConfigurationError(f"kind is permanent, transient or temporary, not {kind!r}")
    if max < 0 or not within > 0:
        raise ConfigurationError(f"max is 0 or more restarts within more than 0 seconds, not {max!r} within {within!r}")
    if not 0 <= backoff[0] <= backoff[1] or not 0 <= jitter <= 1:
        raise ConfigurationError(f"backoff is (first, most) seconds and jitter 0 to 1, not {backoff!r} and {jitter!r}")
    return RestartPolicy(kind, max, within, backoff, jitter, tuple(resume))


@attrs.frozen
class Strategy:
    """Which siblings start again together with a child that failed. Made by `one_for_one`, `one_for_all`, `rest_for_one`."""

    scope: Literal["one", "all", "rest"]
    """The child alone; all supervised children; the child and those started after it."""
    max: int = 5
    """Group restarts within `within` seconds; unused by ``one``, where each child's policy counts."""
    within: float = 10.0
    """Seconds."""


def one_for_one() -> Strategy:
    """Restart a child that failed and nobody else; each child's own `restart` policy limits how often."""
    return Strategy("one")


def one_for_all(*, max: int = 5, within: float = 10.0) -> Strategy:
    """Restart all supervised children when one fails: they share state that only makes sense together.

    The others are stopped in reverse order of start, then all start in order. Counted once for the group.
    """
    return Strategy("all", max, within)


def rest_for_one(*, max: int = 5, within: float = 10.0) -> Strategy:
    """Restart a child that failed and those started after it, which were built on it."""
    return Strategy("rest", max, within)


@attrs.frozen
class ChildSpec:
    """One child of a `Supervisor`. Made by `child`."""

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    name: str | None
    mailbox: MailboxPolicy | None
    supervise: Supervision


def child(
    factory: Callable[..., Any],
    *args: Any,
    name: str | None = None,
    mailbox: MailboxPolicy | None = None,
    supervise: Supervision | None = None,
) -> ChildSpec:
    """Describe a child for a `Supervisor`: what `Actor.spawn` takes; supervised by ``restart("transient")`` unless said otherwise."""
    return ChildSpec(factory, args, name, mailbox, supervise if supervise is not None else restart())


class Supervised:
    """What is remembered about a child that may start again."""

    __slots__ = ("args", "factory", "policy", "times")

    def __init__(self, factory: Callable[..., Any], args: tuple[Any, ...], policy: Supervision) -> None:
        self.factory = factory
        self.args = args
        self.policy: Supervision = policy
        self.times: deque[float] = deque()


def wants_restart(policy: RestartPolicy, reason: Reason) -> bool:
    """Say whether this kind of child starts again after `reason`."""
    if policy.kind == "permanent":
        return True
    return policy.kind == "transient" and isinstance(reason, Failed | Killed | Lost)


def resumes(policy: Supervision, error: BaseException) -> bool:
    """Say whether the actor just goes on; of a group, all parts must be of the kinds to resume from."""
    if not isinstance(policy, RestartPolicy) or not policy.resume:
        return False
    if isinstance(error, BaseExceptionGroup):
        return error.split(policy.resume)[1] is None
    return isinstance(error, policy.resume)


def record(times: deque[float], now: float, *, max: int, within: float) -> bool:
    """Count one restart at `now`; say whether it is within the intensity."""
    times.append(now)
    while times[0] <= now - within:
        times.popleft()
    return len(times) <= max


def delay(policy: RestartPolicy, in_a_row: int, lot: random.Random) -> float:
    """Seconds to wait before the restart that is number `in_a_row` (1: the first) within the policy's window."""
    first, most = policy.backoff
    if in_a_row < 2 or first == 0.0:
        return 0.0
    # The exponent is capped: 2 ** 1100 is no float.
    wait: float = min(most, first * 2.0 ** min(in_a_row - 2, 64))
    return wait * (1.0 - policy.jitter * lot.random())
