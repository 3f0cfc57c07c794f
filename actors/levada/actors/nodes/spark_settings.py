"""Checks of Spark's settings: settings that harm nodes, the cores of a node, and the slots of an application."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import attrs

from levada.framework.errors import ConfigurationError

__all__ = ["SparkSlots", "check_settings", "cores_of_a_node", "executor_cores", "is_local"]

_LOCAL: Final = re.compile(r"local(\[(?P<slots>\d+|\*)\s*(,\s*\d+)?\])?")
_CLUSTER: Final = re.compile(r"local-cluster\[\s*(?P<executors>\d+)\s*,\s*(?P<cores>\d+)\s*,\s*\d+\s*\]")


def is_local(master: str) -> bool:
    """Return whether all processes of Spark are on this machine and were started by the driver.

    Example:
        >>> is_local("local[4]"), is_local("local-cluster[2,1,1024]"), is_local("spark://desk:7077")
        (True, True, False)
    """
    return bool(_LOCAL.fullmatch(master) or _CLUSTER.fullmatch(master))


def executor_cores(master: str, settings: Mapping[str, str]) -> int | None:
    """Return the cores of each executor; None if the master has no executors, or they are not known."""
    if _LOCAL.fullmatch(master):
        return None
    found = _CLUSTER.fullmatch(master)
    cores = settings.get("spark.executor.cores", found["cores"] if found else "")
    return int(cores) if cores.isdecimal() and int(cores) else None


def cores_of_a_node(master: str, settings: Mapping[str, str], asked: int | None) -> int | None:
    """Return the number of cores that the task of a node asks for; None: Spark's default.

    Args:
        master: the master of the application.
        settings: the settings of the application.
        asked: the number that the program asks for. None: more than half of an executor, so that no executor gets two nodes.

    Raises:
        ConfigurationError: the master has no executors with cores, or no executor has so many.

    Example:
        >>> cores_of_a_node("local-cluster[2,4,1024]", {}, None)
        3
    """
    cores = executor_cores(master, settings)
    if asked is None:
        return None if cores is None else cores // 2 + 1
    if _LOCAL.fullmatch(master):
        raise ConfigurationError(
            f"cores={asked}: {master} has no executors with cores: leave `cores` out, or use a master with executors"
        )
    if asked < 1 or (cores is not None and asked > cores):
        raise ConfigurationError(f"cores={asked}: expected a number from 1 to {cores or 'the cores of an executor'}")
    return asked


def check_settings(master: str, settings: Mapping[str, str], count: int) -> None:
    """Check that nodes can run with these settings of Spark.

    Args:
        master: the master of the application, ``SparkContext.master``.
        settings: the settings of the application, ``SparkContext.getConf().getAll()``.
        count: the number of nodes.

    Raises:
        ConfigurationError: some settings would harm nodes; the text names each with its remedy.

    Example:
        >>> check_settings("local[4]", {"spark.speculation": "true"}, 2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        levada.framework.errors.ConfigurationError: nodes cannot live under these settings of Spark: spark.speculation is true, so Spark...
    """
    complaints = [*_harmful(settings), *_open_network(master, settings), *_too_few(master, settings, count)]
    if complaints:
        raise ConfigurationError(f"nodes cannot live under these settings of Spark: {'; '.join(complaints)}")


def _is_true(settings: Mapping[str, str], name: str) -> bool:
    return settings.get(name, "false").strip().lower() == "true"


def _harmful(settings: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    if _is_true(settings, "spark.speculation"):
        found.append(
            "spark.speculation is true, so Spark would start a second copy of a node that is still running: set spark.speculation=false"
        )
    if _is_true(settings, "spark.python.worker.killOnIdleTimeout") and _positive(
        settings.get("spark.python.worker.idleTimeoutSeconds", "0")
    ):
        found.append(
            "spark.python.worker.killOnIdleTimeout is true, so Spark would end nodes after "
            f"spark.python.worker.idleTimeoutSeconds={settings['spark.python.worker.idleTimeoutSeconds']}: "
            "set spark.python.worker.killOnIdleTimeout=false"
        )
    if not _is_true({"spark.python.use.daemon": "true", **settings}, "spark.python.use.daemon"):
        found.append(
            "spark.python.use.daemon is false, so a node could outlive its executor: set spark.python.use.daemon=true"
        )
    return found


def _positive(text: str) -> bool:
    digits = re.match(r"\s*(\d+)", text)
    return digits is not None and int(digits[1]) > 0


def _open_network(master: str, settings: Mapping[str, str]) -> list[str]:
    if is_local(master) or _is_true(settings, "spark.ssl.rpc.enabled"):
        return []
    encrypted, authenticated = (
        _is_true(settings, name) for name in ("spark.network.crypto.enabled", "spark.authenticate")
    )
    if encrypted and authenticated:
        return []
    missing = [
        f"{name}=true"
        for name, there in (("spark.authenticate", authenticated), ("spark.network.crypto.enabled", encrypted))
        if not there
    ]
    return [
        f"the job of a node carries a secret, and Spark's connections at {master} are not encrypted: "
        f"set {' and '.join(missing)}, or spark.ssl.rpc.enabled=true with its keys"
    ]


def _too_few(master: str, settings: Mapping[str, str], count: int) -> list[str]:
    local, cluster = _LOCAL.fullmatch(master), _CLUSTER.fullmatch(master)
    if local and local["slots"] != "*":
        slots = int(local["slots"] or 1)
        if count >= slots:
            return [
                f"{master} has {slots} slots, and {count} nodes would hold {'all of them' if count == slots else 'more'}, "
                f"so no query could ever run: set the master to local[nodes + cores], for example local[{count + 2}]"
            ]
    if cluster and count > int(cluster["executors"]) * (executor_cores(master, settings) or 1):
        return [f"{master} has fewer cores than {count} nodes: give it more executors, or more cores"]
    return []


@attrs.frozen
class SparkSlots:
    """The slots of an application, as Spark reports them when a node does not start."""

    slots: int
    """The number of tasks that can run at the same time."""
    cores: int
    """The cores of this machine, or of all executors."""
    running: int
    """The running tasks, including nodes."""
    nodes: int
    """The running nodes of this fleet."""

    def describe(self, master: str) -> str:
        """Return the numbers and a remedy as text."""
        remedy = (
            "set the master to local[nodes + cores]"
            if _LOCAL.fullmatch(master)
            else "add executors, let other jobs end, or ask for fewer `cores` of an executor for each node"
        )
        return (
            f"no free slot: {master} has {self.slots} slots and {self.cores} cores, and {self.running} tasks are running, "
            f"{self.nodes} of them nodes; a node holds its slot until it ends: {remedy}"
        )
