"""Journals with a fault of their own: the histories of the profile ci find each of them, and a failure shrinks to a short replay."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from tests.simulation.history import History, draw
from tests.simulation.runner import Outcome, run
from tests.simulation.shrink import shrink

from levada.actors.journal import partitions
from levada.actors.journal.blocks import Header
from levada.actors.journal.partitions import Partition
from levada.framework.testing.simulation import SimulatedFiles

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="files of POSIX"), pytest.mark.ci]


class _Unsynced(SimulatedFiles):
    """Never syncs."""

    def fsync(self, fd: Any) -> None:
        self.fstat(fd)

    fdatasync = fsync


def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are as `_Unsynced` has them."""


def half_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block counts, whether or not the append goes on in the next one."""
    monkeypatch.setattr(Header, "more", False)


def early_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are answered, and synced before the next ones."""
    write = Partition.write

    def sync(self: Partition) -> None:
        self.synced_end = self.segments[-1].end

    def late(self: Partition, *args: Any, **keywords: Any) -> int:
        self.segments[-1].sync()
        return write(self, *args, **keywords)

    monkeypatch.setattr(Partition, "sync", sync)
    monkeypatch.setattr(Partition, "write", late)


def oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write is taken back from its oldest segment on."""
    monkeypatch.setattr(partitions, "reversed", list, raising=False)


MUTANTS = [no_sync, half_a_record, early_answer, oldest_first]


def found(seeds: range, files: type[SimulatedFiles]) -> Outcome | None:
    return next((outcome for seed in seeds if (outcome := run(draw(seed), files)).wrong), None)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found_and_its_failure_shrinks_to_a_short_replay(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _Unsynced if mutant is no_sync else SimulatedFiles
    with monkeypatch.context() as patch:
        mutant(patch)
        outcome = found(range(100), files)
        assert outcome is not None
        small = shrink(outcome.history, lambda history: bool(run(history, files).wrong), runs=150)
        again = History.of_json(small.to_json())
        assert run(again, files).wrong
    assert run(again).wrong == ""
    assert size(small) < size(outcome.history)
    assert sum(len(life.operations) for life in small.lives) <= 4


def size(history: History) -> int:
    return sum(len(life.operations) + len(life.faults) for life in history.lives)
