"""How nodes behave: `NodeSettings`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import validators as v

from levada.framework import RestartPolicy, restart
from levada.framework.errors import ConfigurationError

try:
    import resource
except ModuleNotFoundError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["NodeSettings"]

_SECONDS: Any = [v.instance_of((int, float)), v.gt(0)]
_TIMED: Any = [*_SECONDS, v.lt(float("inf"))]
"""For a timer, which needs an end."""


def _check_rlimits(_: Any, attribute: Any, limits: Mapping[str, int]) -> None:
    for name, value in limits.items():
        if not name.startswith("RLIMIT_") or not hasattr(resource, name):
            raise ConfigurationError(
                f"a key of rlimits is {name!r}, wanted a name of the module resource, such as RLIMIT_AS"
            )
        if not isinstance(value, int) or not -1 <= value < 1 << 63:
            raise ConfigurationError(f"rlimits[{name!r}] is {value!r}, wanted a number, -1 for no limit")


def _check_env(_: Any, attribute: Any, env: Mapping[str, str]) -> None:
    for name, value in env.items():  # a value may be a secret, so errors do not show it
        if not isinstance(name, str) or not isinstance(value, str):
            kinds = f"{type(name).__name__} with a value of type {type(value).__name__}"
            raise ConfigurationError(f"env has {name!r}, a {kinds}, wanted two str")


def _sets(sets: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        found = tuple(tuple(one) for one in sets)
    except TypeError:
        found = ((-1,),)
    if not all(isinstance(cpu, int) and cpu >= 0 for one in found for cpu in one):
        raise ConfigurationError(f"affinity is {sets!r}, wanted the CPUs of each node, such as [[0], [1]]")
    return found


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


@attrs.frozen(kw_only=True)
class NodeSettings:
    """How nodes start, end, and restart. Immutable; derive with `attrs.evolve`."""

    start_timeout: float = attrs.field(default=60.0, validator=_TIMED)
    """Seconds from the start of a process until its app must be ready. It matters for a process that hangs, because a process that ends is
    noticed at once. On a busy machine Python itself may take half a minute to start."""
    drain_timeout: float = attrs.field(default=10.0, validator=_TIMED)
    """Seconds that a node has for open work when it drains; then it gets SIGTERM, and `kill_after` seconds later SIGKILL. A node that
    has lost its driver ends its actors at once, and its process after this time at the latest."""
    kill_after: float = attrs.field(default=2.0, validator=_TIMED)
    """Seconds between SIGTERM and SIGKILL."""
    silence: float = attrs.field(default=10.0, validator=_SECONDS)
    """Seconds without a heartbeat from the driver after which a node ends its actors and its process. Then the driver is stopped, or native
    code in it holds the interpreter's lock. The node notices the end of the driver's process at once."""
    hang_timeout: float | None = attrs.field(default=None, validator=v.optional(_SECONDS))
    """Seconds without a heartbeat from a node that is up after which the driver kills it; None: never. The heartbeat has a thread of its own, so
    a busy handler does not count as a hang; native code that holds the interpreter's lock does. A node that starts has `start_timeout`."""
    restart: RestartPolicy = attrs.field(
        factory=lambda: restart("transient", max=10, within=60.0, initial_backoff=0.2, max_backoff=5.0),
        validator=v.instance_of(RestartPolicy),
    )
    """How a lost node restarts. If it exceeds `RestartPolicy.max`, the error ends the driver's system."""
    on_any: bool = attrs.field(default=True, validator=v.instance_of(bool))
    """Whether ``on="any"`` chooses these nodes, see `Nodes.spawn`. False is for nodes with work of their own, such as keepers of journals:
    `Nodes.restart` without a name leaves them alone."""
    nice: int = attrs.field(default=0, validator=[v.instance_of(int), v.in_(range(20))])
    """The increment of each process's niceness."""
    affinity: tuple[tuple[int, ...], ...] = attrs.field(default=(), converter=_sets)
    """The CPUs of each node, by its index modulo the length: ``[[0], [1]]`` pins nodes to two cores in turn. Empty: all CPUs."""
    rlimits: Mapping[str, int] = attrs.field(factory=dict[str, int], validator=_check_rlimits)
    """Resource limits of each process, soft and hard, such as ``{"RLIMIT_AS": 2**31}``."""
    fence: str | None = attrs.field(default=None, converter=_path, validator=v.optional(v.instance_of(str)))
    """A file of the fleet, for nodes that are child processes. No node starts before all processes of an earlier fleet with the same file have
    ended, also after their driver was killed; the driver waits for `start_timeout` seconds. So a singleton of the earlier fleet never runs beside
    one of this fleet. Blocks of `local_nodes` that run at the same time need different files."""
    env: Mapping[str, str] = attrs.field(factory=dict[str, str], validator=_check_env, repr=False)
    """Variables added to the environment of child processes."""

    @property
    def beat(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.silence, self.hang_timeout or self.silence, 5.0) / 5
