"""Bridges for Spark in simulated worlds: executors, and streams that copy a log into a mailbox, while the bridge is killed and its disk fails."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("pyarrow")

from tests.simulation.bridges import FAULTS, Bridges

from levada.framework.testing.simulation import simulate

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")


@pytest.mark.ci
def test_each_event_is_in_the_log_once_and_in_the_copy_once_whatever_strikes() -> None:
    bridges = Bridges()
    done = simulate(bridges.run, seeds=range(12), faults=FAULTS, limit=900.0)
    assert done.strikes > 40
    assert bridges.delivered > 60


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_a_thousand_bridges_have_no_bad_one() -> None:
    bridges = Bridges()
    simulate(bridges.run, seeds=range(1000, 2000), faults=FAULTS, limit=900.0)
    assert bridges.repeated > 0
