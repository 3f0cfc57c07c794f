"""Supervision policies: who restarts when a child ends, how often, and what the parent learns.

This module decides; `levada.framework._runtime.lifecycle` carries it out.  The runtime decides from the parent's settings and sends
the parent no message, so a busy parent delays no restart and back-off holds up no mailbox.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import attrs

from .durations import is_duration
from .errors import ConfigurationError
from .links import Failed, Killed, Lost, Reason

if TYPE_CHECKING:
    from .mailbox import MailboxPolicy

__all__ = [
    "ChildSpec", "RestartPolicy", "SpawnOptions", "Strategy", "Supervised", "Supervision", "child", "one_for_all",
    "one_for_one", "rest_for_one", "restart",
]  # fmt: skip

Kind = Literal["permanent", "transient", "temporary"]


@attrs.frozen
class RestartPolicy:
    """When a child restarts. Made by `restart`."""

    kind: Kind
    """``permanent``: after every end; ``transient``: after failure, kill or loss; ``temporary``: never."""
    max: int
    """The most restarts within `within` seconds; with one more the parent fails."""
    within: float
    """Seconds."""
    initial_backoff: float
    """Seconds before the second restart in a row; each further wait is twice as long."""
    max_backoff: float
    """The longest wait in seconds."""
    jitter: float
    """The random share of each wait, 0 to 1."""
    resume: tuple[type[BaseException], ...]
    """Errors after which the actor keeps its state and goes on with its next message."""


Supervision = Literal["stop", "escalate"] | RestartPolicy
"""After a failure the child stops (the default; logged), its parent fails too, or it restarts, see `restart`."""


class SpawnOptions(TypedDict, total=False):
    """The named arguments of `ActorSystem.spawn` and `Actor.spawn`, for type checkers."""

    name: str | None
    mailbox: MailboxPolicy | None
    supervise: Supervision


def restart(
    kind: Kind = "transient",
    *,
    max: int = 5,
    within: float = 10.0,
    initial_backoff: float = 0.0,
    max_backoff: float = 60.0,
    jitter: float = 0.2,
    resume: Sequence[type[BaseException]] = (),
) -> RestartPolicy:
    """Restart a child when it ends: same ref, same mailbox, a new object from the same factory.

    The message that failed is dropped (delivery is at most once) and given to `Actor.restarting`.

    Args:
        kind: after which ends, see `RestartPolicy.kind`.
        max: the most restarts…
        within: …in this many seconds. With one more the child ends for good and its parent fails.
        initial_backoff: seconds to wait before the second restart in a row; the first restart is immediate, and each further wait is
            twice as long. 0: all restarts are immediate.
        max_backoff: the longest wait in seconds.
        jitter: a random share of the wait, up to this, is taken off, so that many children do not restart in step.
        resume: errors that do not end the actor.

    Raises:
        ConfigurationError: a value out of its range.
    """
    if kind not in ("permanent", "transient", "temporary"):
        raise ConfigurationError(f"kind is {kind!r}, wanted permanent, transient or temporary")
    _check_intensity(max, within)
    if not (
        is_duration(initial_backoff, zero=True)
        and is_duration(max_backoff, zero=True)
        and initial_backoff <= max_backoff
    ):
        raise ConfigurationError(
            f"initial_backoff is {initial_backoff!r}, wanted 0 to max_backoff ({max_backoff!r}) seconds"
        )
    if not (is_duration(jitter, zero=True) and jitter <= 1):
        raise ConfigurationError(f"jitter is {jitter!r}, wanted 0 to 1")
    return RestartPolicy(kind, max, within, initial_backoff, max_backoff, jitter, tuple(resume))


def _check_intensity(max: int, within: float) -> None:
    if not isinstance(max, int) or max < 0 or not is_duration(within):
        raise ConfigurationError(
            f"max and within are {max!r} and {within!r}, wanted 0 or more restarts in more than 0 seconds"
        )


@attrs.frozen
class Strategy:
    """Which siblings restart with a child that failed. Made by `one_for_one`, `one_for_all`, `rest_for_one`."""

    scope: Literal["one", "all", "rest"]
    """The child alone; all supervised children; the child and those started after it."""
    max: int = 5
    """Group restarts within `within` seconds; unused by ``one``, where each child's policy counts."""
    within: float = 10.0
    """Seconds."""


def one_for_one() -> Strategy:
    """Restart only the child that failed; each child's own `restart` policy limits how often."""
    return Strategy("one")


def one_for_all(*, max: int = 5, within: float = 10.0) -> Strategy:
    """Restart all supervised children when one fails, because their states belong together.

    The others stop in reverse order of start, then all start in order. This counts as one restart of the group.

    Raises:
        ConfigurationError: a value out of its range.
    """
    _check_intensity(max, within)
    return Strategy("all", max, within)


def rest_for_one(*, max: int = 5, within: float = 10.0) -> Strategy:
    """Restart a child that failed, and the children started after it, which depend on it.

    Raises:
        ConfigurationError: a value out of its range.
    """
    _check_intensity(max, within)
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
    """Describe a child for a `Supervisor`. Arguments as for `Actor.spawn`; `supervise` defaults to ``restart("transient")``."""
    return ChildSpec(factory, args, name, mailbox, supervise if supervise is not None else restart())


@attrs.define(eq=False, weakref_slot=False)
class Supervised:
    """The record of a supervised child."""

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    policy: Supervision
    times: deque[float] = attrs.field(factory=deque, init=False)


def wants_restart(policy: RestartPolicy, reason: Reason) -> bool:
    """Whether this kind of child restarts after `reason`."""
    if policy.kind == "permanent":
        return True
    return policy.kind == "transient" and isinstance(reason, Failed | Killed | Lost)


def resumes(policy: Supervision, error: BaseException) -> bool:
    """Whether the actor goes on after `error`; in a group, every part must be an error to resume from."""
    if not isinstance(policy, RestartPolicy) or not policy.resume:
        return False
    if isinstance(error, BaseExceptionGroup):
        return error.split(policy.resume)[1] is None
    return isinstance(error, policy.resume)


def record(times: deque[float], now: float, *, max: int, within: float) -> bool:
    """Count one restart at `now`; return whether it is within the intensity."""
    times.append(now)
    while times[0] <= now - within:
        times.popleft()
    return len(times) <= max


def delay(policy: RestartPolicy, in_a_row: int, rng: random.Random) -> float:
    """Return the seconds to wait before restart number `in_a_row` (1: the first) within the policy's window."""
    if in_a_row < 2 or policy.initial_backoff == 0.0:
        return 0.0
    return doubled(policy.initial_backoff, in_a_row - 2, policy.max_backoff) * (1.0 - policy.jitter * rng.random())


def doubled(seconds: float, times: int, most: float) -> float:
    """Return `seconds`, doubled so many `times`, but at most `most`."""
    return min(most, seconds * 2.0 ** min(times, 64))  # 2.0 ** 1100 overflows
