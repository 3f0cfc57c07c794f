"""Settings of Spark that are refused, by name and with the remedy; no Spark runs here."""

from __future__ import annotations

import pytest

from levada.actors.nodes.spark_settings import SparkSlots, check_settings, cores_of_a_node, executor_cores
from levada.framework.errors import ConfigurationError

ENCRYPTED = {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"spark.speculation": "true"}, "set spark.speculation=false"),
        (
            {"spark.speculation": "TRUE", "spark.speculation.task.duration.threshold": "6s"},
            "set spark.speculation=false",
        ),
        (
            {"spark.python.worker.idleTimeoutSeconds": "4", "spark.python.worker.killOnIdleTimeout": "true"},
            "after spark.python.worker.idleTimeoutSeconds=4: set spark.python.worker.killOnIdleTimeout=false",
        ),
        ({"spark.python.use.daemon": "false"}, "set spark.python.use.daemon=true"),
    ],
)
def test_a_setting_that_harms_nodes_is_refused_by_name(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        check_settings("local[4]", settings, 2)


def test_all_harmful_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_settings("spark://desk:7077", {"spark.speculation": "true", "spark.python.use.daemon": "false"}, 2)
    _, _, text = str(caught.value).partition(": ")
    speculation, daemon, network = text.split("; ")
    assert (speculation.split()[0], daemon.split()[0]) == ("spark.speculation", "spark.python.use.daemon")
    assert network.endswith(
        "set spark.authenticate=true and spark.network.crypto.enabled=true, or spark.ssl.rpc.enabled=true with its keys"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"spark.python.worker.idleTimeoutSeconds": "4"},
        {"spark.python.worker.killOnIdleTimeout": "true"},
        {"spark.python.worker.idleTimeoutSeconds": "0", "spark.python.worker.killOnIdleTimeout": "true"},
        {"spark.speculation": "false", "spark.speculation.task.duration.threshold": "6s"},
        {"spark.task.maxFailures": "4", "spark.dynamicAllocation.enabled": "true"},
    ],
)
@pytest.mark.parametrize("master", ["local[4]", "local[*]", "local[4,2]", "local-cluster[2,3,1024]"])
def test_settings_under_which_nodes_live_are_taken(master: str, settings: dict[str, str]) -> None:
    check_settings(master, settings, 2)


@pytest.mark.parametrize("master", ["spark://desk:7077", "yarn", "k8s://https://desk:6443"])
def test_a_master_on_other_machines_needs_encryption(master: str) -> None:
    for settings in (ENCRYPTED, {"spark.ssl.rpc.enabled": "true"}):
        check_settings(master, settings, 50)
    with pytest.raises(ConfigurationError, match=f"at {master} are not encrypted: set spark.authenticate=true and"):
        check_settings(master, {}, 2)
    with pytest.raises(ConfigurationError, match=r"not encrypted: set spark\.authenticate=true, or"):
        check_settings(master, {"spark.network.crypto.enabled": "true"}, 2)


@pytest.mark.parametrize(
    ("master", "count", "text"),
    [
        ("local", 1, "local has 1 slots, and 1 nodes would hold all of them"),
        ("local[2]", 2, r"for example local\[4\]"),
        ("local[2,3]", 5, "5 nodes would hold more"),
        ("local-cluster[2,1,1024]", 3, "fewer cores than 3 nodes"),
    ],
)
def test_slots_that_can_never_suffice_are_refused(master: str, count: int, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        check_settings(master, {}, count)


@pytest.mark.parametrize(
    ("master", "settings", "cores", "node"),
    [
        ("local[8]", {"spark.executor.cores": "4"}, None, None),
        ("local-cluster[2,3,1024]", {}, 3, 2),
        ("local-cluster[2,8,1024]", {"spark.executor.cores": "4"}, 4, 3),
        ("spark://desk:7077", {"spark.executor.cores": "1"}, 1, 1),
        ("spark://desk:7077", {}, None, None),
    ],
)
def test_a_node_takes_more_than_half_of_an_executor(
    master: str, settings: dict[str, str], cores: int | None, node: int | None
) -> None:
    assert executor_cores(master, settings) == cores
    assert cores_of_a_node(master, settings, None) == node


def test_a_program_says_how_many_cores_a_node_takes() -> None:
    assert cores_of_a_node("spark://desk:7077", {}, 7) == 7
    with pytest.raises(ConfigurationError, match=r"cores=1: local\[4\] has no executors"):
        cores_of_a_node("local[4]", {}, 1)
    with pytest.raises(ConfigurationError, match="a number from 1 to 3"):
        cores_of_a_node("local-cluster[2,3,1024]", {}, 4)
    with pytest.raises(ConfigurationError, match="a number from 1 to the cores of an executor"):
        cores_of_a_node("yarn", {}, 0)


def test_a_node_without_a_slot_is_told_in_numbers() -> None:
    assert SparkSlots(slots=2, cores=8, running=2, nodes=1).describe("local[2]") == (
        "no free slot: local[2] has 2 slots and 8 cores, and 2 tasks are running, 1 of them nodes; "
        "a node holds its slot until it ends: set the master to local[nodes + cores]"
    )
    assert "fewer `cores` of an executor" in SparkSlots(slots=2, cores=8, running=2, nodes=1).describe("yarn")
