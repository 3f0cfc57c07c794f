"""Fleets of a durable bank in simulated worlds: driver, keeper and nodes, with kills, crashes, pauses, cuts, zombies and power failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.simulation.mutants import BRIDGES, FOUND, KEEPERS, MOVES, MUTANTS, OWNERS

ROOT = Path(__file__).parents[2]


def worlds(
    first: int, count: int, *mutant: str, hash_seed: int = 0, program: str = "fleets"
) -> subprocess.CompletedProcess[str]:
    """Run worlds in a process of their own: the message classes of other tests would travel in them."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.simulation.{program}", str(first), str(count), *mutant],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=False,
    )


def lines(ended: subprocess.CompletedProcess[str]) -> list[str]:
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def twenty() -> list[str]:
    return lines(worlds(0, 20))


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_bank_does_each_command_once_in_the_order_of_its_answers_whatever_strikes(twenty: list[str]) -> None:
    strikes = [int(line.split()[2]) for line in twenty]
    assert len(strikes) == 20
    assert sum(strikes) > 40


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_the_same_seed_sends_the_same_bytes_at_the_same_time_in_another_process(twenty: list[str]) -> None:
    assert lines(worlds(0, 10, hash_seed=4711)) == twenty[:10]


@pytest.mark.release
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_worlds_have_no_bad_one(part: int) -> None:
    assert len(lines(worlds(1000 + 50 * part, 50))) == 50


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_what_a_former_owner_sends_late_is_fenced_off() -> None:
    fences = [int(line.split()[3]) for line in lines(worlds(0, 2, program="handover"))]
    assert len(fences) == 2
    assert sum(fences) > 0


@pytest.mark.release
@pytest.mark.parametrize("part", range(4))
def test_a_bank_does_each_command_once_when_shards_move_behind_the_back_of_their_owner(part: int) -> None:
    assert len(lines(worlds(100 + 50 * part, 50, program="handover"))) == 50


@pytest.mark.release
@pytest.mark.parametrize("mutant", sorted(MUTANTS.keys() - OWNERS - KEEPERS))
def test_a_mutant_is_found_as_often_as_ever(mutant: str) -> None:
    require_found(mutant, "fleets")


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", sorted(OWNERS))
def test_a_second_owner_is_found_as_often_as_ever(mutant: str) -> None:
    require_found(mutant, "handover")


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_the_loss_of_a_keeper_leaves_no_outcome_unknown() -> None:
    """Commands without ids, so each of them is given once, and answered or refused."""
    assert len(lines(worlds(0, 4, program="keepers"))) == 4


@pytest.mark.release
@pytest.mark.parametrize("part", range(8))
def test_the_loss_of_a_keeper_leaves_no_outcome_unknown_in_four_hundred_worlds(part: int) -> None:
    assert len(lines(worlds(1000 + 50 * part, 50, program="keepers"))) == 50


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", sorted(KEEPERS))
def test_a_shard_that_does_not_find_out_what_was_written_is_found_as_often_as_ever(mutant: str) -> None:
    require_found(mutant, "keepers")


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_in_an_app_with_everything_nothing_runs_twice_and_nothing_is_done_twice() -> None:
    """Singletons, kept names, names of nodes and durable accounts, used before and after the ``yield``; strikes at starts and moves."""
    ended = lines(worlds(0, 4, program="moves"))
    assert len(ended) == 4
    assert (
        sum(int(line.split()[3]) for line in ended) > 12
    )  # two begin in each world, and again when their nodes are struck
    assert lines(worlds(3, 1, program="moves", hash_seed=4711)) == ended[3:]


@pytest.mark.release
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_apps_with_everything_have_no_bad_one(part: int) -> None:
    assert len(lines(worlds(1000 + 50 * part, 50, program="moves"))) == 50


@pytest.mark.release
@pytest.mark.parametrize("mutant", sorted(MOVES))
def test_a_singleton_that_runs_twice_is_found_as_often_as_ever(mutant: str) -> None:
    require_found(mutant, "moves")


@pytest.mark.release
@pytest.mark.parametrize("mutant", sorted(BRIDGES))
def test_a_batch_that_is_delivered_again_is_found_as_often_as_ever(mutant: str) -> None:
    require_found(mutant, "bridges")


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mutant", "program", "failures", "most"),
    [
        ("no_command_memory", "fleets", 1, 2),
        ("reminders_fire_twice", "fleets", 1, 2),
        ("moves_twice", "moves", 1, 2),
        ("asks_anew", "keepers", 3, 4),
        ("no_fence", "handover", 1, 2),
    ],
)
def test_a_world_that_finds_a_mutant_shrinks_to_few_strikes(
    mutant: str, program: str, failures: int, most: int
) -> None:
    """In some worlds of a lost keeper, four strikes have to meet."""
    ended = worlds(0, 60, mutant, str(failures), "shrink", program=program)
    assert ended.returncode == 1
    _, *found = ended.stdout.split(", strikes=[")
    assert len(found) == failures
    assert min(strikes.partition("])")[0].count("Strike(") for strikes in found) <= most


def require_found(mutant: str, program: str) -> None:
    least, most = FOUND[mutant]
    ended = worlds(0, most, mutant, str(least), program=program)
    found = ended.stdout.count("failed in the world of seed")
    assert found == least, f"{found} of {most} worlds have found it, wanted {least}: {ended.stderr[-2000:]}"
    assert ended.returncode == 1
