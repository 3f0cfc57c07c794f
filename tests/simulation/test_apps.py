"""Apps in simulated worlds: every protocol at every kind of URL, while servers and clients are killed, paused and cut off, and lose their power."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation.app_worlds import REPEATED
from tests.simulation.apps import FAULTS, MACHINES, SCHEMES, Counters, Ledgers, Served, Sessions

from levada.framework.testing.simulation import Faults, simulate


@pytest.mark.ci
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_entry_is_made_once_and_nothing_hangs_whatever_strikes(scheme: str, certificate: Path) -> None:
    ledgers = Ledgers(scheme, certificate)
    done = simulate(ledgers.run, seeds=range(2), machines=MACHINES, faults=FAULTS, limit=900.0)
    assert done.strikes > (1 if scheme.startswith("lumberjack") else 4)


@pytest.mark.ci
def test_a_stream_of_a_session_that_is_resumed_loses_no_item_and_repeats_none() -> None:
    sessions = Sessions()
    faults = Faults(strikes=12, every=0.8, kills=0.5, crashes=0, cuts=5, pauses=4, power_failures=0.3)
    simulate(sessions.run, seeds=range(10), machines=MACHINES, faults=faults, limit=600.0)
    assert sessions.resumed > 3
    assert sessions.streams > 40


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_the_same_seed_sends_the_same_in_another_process(certificate: Path) -> None:
    def lines(hash_seed: int) -> list[str]:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.simulation.app_worlds", str(certificate), "11"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        return ended.stdout.splitlines()

    first = lines(1)
    assert len(first) == len(REPEATED) + 1
    assert lines(2) == first


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_hundred_worlds_of_each_have_no_bad_one(scheme: str, certificate: Path) -> None:
    ledgers = Ledgers(scheme, certificate)
    done = simulate(ledgers.run, seeds=range(1000, 1100), machines=MACHINES, faults=FAULTS, limit=900.0)
    assert done.strikes > (150 if scheme.startswith("lumberjack") else 200)  # its worlds end sooner


@pytest.mark.ci
def test_nodes_behind_one_address_enter_each_entry_once_whatever_strikes() -> None:
    counters = Counters()
    done = simulate(counters.run, seeds=range(6), machines=MACHINES, faults=FAULTS, limit=900.0)
    assert counters.served >= 6 * 16
    assert done.strikes > 12


@pytest.mark.ci
def test_levada_serve_with_nodes_enters_each_entry_once_whatever_strikes_and_drains_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = Served()
    done = simulate(served.run, seeds=range(4), machines=MACHINES, faults=FAULTS, limit=900.0)
    assert served.served >= 4 * 16
    assert done.strikes > 8
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 4
    assert set(lines) == {"SERVING rsocket+tcp://0.0.0.0:7000"}


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_two_hundred_worlds_of_nodes_behind_one_address_have_no_bad_one() -> None:
    done = simulate(Counters().run, seeds=range(1000, 1200), machines=MACHINES, faults=FAULTS, limit=900.0)
    assert done.strikes > 150
