"""Histories of a journal on a simulated disk: whatever a crash, a power failure or a fault leaves is what was answered."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from tests.simulation.history import History, draw
from tests.simulation.runner import place, run
from tests.simulation.shrink import explain

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")

REPLAYS = sorted((Path(__file__).parent / "replays").glob("*.json"))


def first_bad(seeds: Iterable[int]) -> int | None:
    """Return the first seed whose history goes wrong."""
    return next((seed for seed in seeds if run(draw(seed)).wrong), None)


def require_good(seed: int | None) -> None:
    """Fail with the story of a bad seed, shrunk, and with the file that replays it."""
    if seed is None:
        return
    pytest.fail(f"seed {seed}, {explain(run(draw(seed)).history)}", pytrace=False)


def test_a_few_histories() -> None:
    require_good(first_bad(range(25)))


@pytest.mark.ci
@pytest.mark.timeout(60)
def test_histories() -> None:
    require_good(first_bad(range(25, 325)))


@pytest.mark.release
def test_many_histories() -> None:
    require_good(first_bad(range(325, 10_325)))


@pytest.mark.soak
def test_histories_on_all_cores() -> None:
    start = random.randrange(1 << 40)
    chunks = [range(at, at + 500) for at in range(start, start + 200_000, 500)]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as cores:
        for bad in cores.map(first_bad, chunks):
            require_good(bad)


@pytest.mark.parametrize("path", REPLAYS, ids=lambda path: path.stem)
def test_what_failed_before_does_not_fail_again(path: Path) -> None:
    outcome = run(History.of_json(path.read_text()))
    assert outcome.wrong == "", "\n".join(outcome.story)


def test_the_same_seed_makes_the_same_calls() -> None:
    first, again = (run(draw(7)) for _ in range(2))
    assert first == again
    assert first.crashes > 0


def test_a_share_that_was_rounded_to_the_whole_is_the_last() -> None:
    assert [place(share, 4) for share in (0.0, 0.25, 0.9999, 1.0)] == [0, 1, 3, 3]


def test_a_saved_history_is_the_same_history() -> None:
    for seed in range(10):
        history = run(draw(seed)).history
        assert History.of_json(history.to_json()) == history
        assert run(history).story == run(draw(seed)).story
