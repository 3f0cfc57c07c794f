"""Bridges and nodes for Spark in simulated worlds: executors, and streams that copy a log into a mailbox, while processes and disks fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.simulation import asks
from tests.simulation.asks import Desks
from tests.simulation.bridges import FAULTS, Bridges

from levada.framework.testing.simulation import simulate

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")


@pytest.mark.ci
@pytest.mark.parametrize(("over_tls", "count"), [(False, 12), (True, 6)])
def test_each_event_is_in_the_log_once_and_in_the_copy_once_whatever_strikes(
    over_tls: bool, count: int, certificate: Path
) -> None:
    bridges = Bridges(certificate if over_tls else None)
    done = simulate(bridges.run, seeds=range(count), machines=bridges.machines, faults=FAULTS, limit=900.0)
    assert done.strikes > 3 * count
    assert bridges.delivered > 5 * count


@pytest.mark.ci
@pytest.mark.parametrize("over_tls", [False, True])
def test_what_executors_ask_of_nodes_is_done_once_whatever_strikes(over_tls: bool, certificate: Path) -> None:
    desks = Desks(certificate if over_tls else None)
    done = simulate(desks.run, seeds=range(4), machines=desks.machines, faults=asks.FAULTS, limit=900.0)
    assert done.strikes > 8


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_a_thousand_bridges_have_no_bad_one() -> None:
    bridges = Bridges()
    simulate(bridges.run, seeds=range(1000, 2000), machines=bridges.machines, faults=FAULTS, limit=900.0)
    assert bridges.repeated > 0


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [Bridges, Desks])
def test_two_hundred_worlds_of_each_over_tls_have_no_bad_one(kind: type[Bridges | Desks], certificate: Path) -> None:
    made = kind(certificate)
    faults = FAULTS if kind is Bridges else asks.FAULTS
    done = simulate(made.run, seeds=range(1000, 1200), machines=made.machines, faults=faults, limit=900.0)
    assert done.strikes > 400
