"""Calls to the disk fail, one or a few: what was answered is there once, and what failed is not, also behind a later power failure."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from tests.pace import every

pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from tests.actors.journal.disk import Disk
from tests.actors.journal.test_crashes import STORIES, Seen, Trial, base, seen

from levada.actors.journal import JournalDamaged, JournalError, Store

__all__ = ["base"]  # a fixture


def failing(first: int, times: int, code: int) -> Callable[[str], None]:
    """Return what makes some of the calls fail that come: so many, from this one on."""
    numbers = count()

    def before(_: str) -> None:
        if first <= next(numbers) < first + times:
            raise OSError(code, os.strerror(code))

    return before


def opened(trial: Trial, folder: Path) -> Store:
    """Open a journal, as often as it takes. It is never said to be damaged."""
    while True:
        try:
            return trial.open(folder)
        except JournalDamaged:
            raise
        except (OSError, JournalError):
            continue


def may_be(trial: Trial, found: Seen, place: int) -> bool:
    """Whether an action that failed may leave these rows. An erasure may have erased some of them."""
    if not (trial.story.actions[place].apart and trial.story.actions[place].again):
        return trial.may_be(found, place)
    between = zip(trial.truth[place + 1], found, trial.truth[place], strict=True)
    return all(set(fewer) <= set(each) <= set(more) for fewer, each, more in between)


def do(trial: Trial, folder: Path, store: Store, place: int) -> Store:
    """Do an action, as often as it takes; return the store, which is another one if the first one broke."""
    action = trial.story.actions[place]
    while True:
        try:
            action.do(store)
        except JournalDamaged:
            raise
        except JournalError:
            if store.broken:
                store.close()
                store = opened(trial, folder)
                if not action.again and trial.is_behind(seen(store), place):
                    return store  # it could not be taken back
            assert may_be(trial, seen(store), place)
        else:
            return store


# If a group of appends of several senders cannot be taken back, each sender has to look whether its own rows are there.
CASES = [(name, times) for name in STORIES for times in (1, 2, 3) if times == 1 or name != "groups"]


@pytest.mark.ci
@pytest.mark.parametrize(("name", "times"), CASES)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_whatever_calls_fail_each_answer_stays_true(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int
) -> None:
    """Some of the calls are those that take a write back, and those of the opening behind them."""
    trial, disk = Trial(STORIES[name], base), Disk(monkeypatch)
    trial.live(disk)
    folder = base / "life"
    shutil.rmtree(folder)
    for first in count(0, every(11)):
        store = trial.open(folder)
        for action in trial.story.before:
            action.do(store)
        with disk.watch(folder, notes=False) as watch:
            disk.before = failing(first, times, code)
            for place in range(len(trial.story.actions)):
                store = do(trial, folder, store, place)
                assert trial.is_behind(seen(store), place)
            disk.before = None
        store.close()
        for seed in range(3):
            left = watch.moments[-1].power_failure(random.Random(seed), names_lost=seed == 2)
            trial.check(left, len(trial.story.actions))
        shutil.rmtree(folder)
        if first > sum(watch.calls.values()):
            return
