"""A journal stops, or fails, at each call that changes its disk: what was answered is there whole, the rest whole or not at all.

The histories of `test_histories` are drawn. These are written down, and their faults come at every position, one after the other.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import attrs
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.journal", exc_type=ImportError)

from tests.pace import every
from tests.simulation.history import History, Life, Operation
from tests.simulation.runner import Outcome, run
from tests.simulation.shrink import explain

from levada.framework.testing.simulation import Fault

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="files of POSIX"), pytest.mark.ci]

CONFIG = {
    "partitions": 2, "segment_bytes": 2048, "block_rows": 20, "block_bytes": 1024, "max_bytes": 1 << 20, "retain_bytes": None,
    "sync": "group", "keyed": False,
}  # fmt: skip
KEYED = {**CONFIG, "keyed": True}


@attrs.frozen
class Story:
    """What is done with a journal."""

    before: list[Operation]
    """Without a fault."""
    watched: list[Operation]
    """A fault comes at each call of these, and of the opening before them."""
    after: list[Operation]
    """What is done again by those who had no answer, and a little more."""
    calls: set[str]
    """Kinds of calls that the faults have to hit, or the story is not about what it says."""
    config: dict[str, Any] = attrs.field(factory=lambda: CONFIG)


STAGED = [[0, 100, 30], [1, 200, 30], [2, 300, 1]]
DELIVERED = [[0, 100, 70], [1, 200, 70]]
STORIES = {
    "a journal that is made": Story([], [["append", [[0, 0, 1]]]], [["append", [[1, 1, 1]]]], {"mkdir", "commit", "create", "fsync"}),
    "appends": Story(
        [["append", [[0, 0, 3]]]],
        [
            ["append", [[0, 100, 1]]],  # one block
            ["append", [[0, 200, 70]]],  # many, over the end of a segment
            ["append", [[0, 500, 60], [1, 600, 70], [0, 700, 1]]],
        ],
        [["append", [[0, 800, 1], [1, 801, 1]]]],
        {"create", "write", "fdatasync", "rename"},
    ),
    "copies": Story(
        [["append", [[0, 0, 3]]]],
        [["copy", 0, 100, 5, 7], ["copy", 0, 200, 10, 0], ["copy", 0, 300, 3, 60]],
        [["copy", 0, 800, 3, 4]],
        {"create", "write", "fdatasync", "rename"},
    ),
    "groups": Story(
        [["append", [[0, 0, 3]]]],
        [["group", [[0, 100, 70], [1, 200, 1]]], ["group", [[1, 300, 70], [0, 400, 1]]]],
        [["group", [[0, 800, 1], [1, 801, 1]]]],
        {"create", "write", "fdatasync", "rename"},
    ),
    "deliveries": Story(
        [["append", [[0, 0, 3]]]],
        [["deliver", 0, DELIVERED], ["append", [[1, 300, 2]]], ["deliver", 1, [[0, 400, 1], [1, 500, 60]]]],
        [["deliver", 0, DELIVERED], ["deliver", 1, [[0, 400, 1], [1, 500, 60]]]],
        {"write", "fdatasync", "commit"},
    ),
    "deliveries of staged rows": Story(
        [["append", [[0, 0, 3]]]],
        [["stage", 0, STAGED, 0], ["hand_in", 0, STAGED, 0], ["hand_in", 0, STAGED, 0]],
        [["hand_in", 0, STAGED, 0], ["stage", 0, STAGED, 1], ["hand_in", 0, STAGED, 1]],
        {"write", "rename", "unlink", "commit"},
    ),
    "small blocks that are merged": Story(
        [["many", 0, 0, 70]],
        [["append", [[0, 100, 1]]], ["append", [[0, 200, 60]]], ["append", [[0, 300, 1]]]],
        [["append", [[0, 800, 1]]]],
        {"write", "link", "rename"},
        {**CONFIG, "segment_bytes": 26_500},
    ),
    "erasures": Story(
        [["append", [[0, 0, 45]]]],
        [["erase", 0, "e1"], ["append", [[0, 300, 3]]]],
        [["erase", 0, "e1"], ["append", [[0, 800, 3], [1, 900, 3]]]],
        {"write", "link", "rename", "unlink"},
        KEYED,
    ),
    "retention": Story(
        [["declare", "g", "first"], ["append", [[0, 0, 70]]], ["append", [[0, 100, 70]]], ["append", [[1, 200, 70]]]],
        [
            ["commit", "g", {"0": 0.7}],
            ["append", [[0, 300, 70]]],
            ["commit", "g", {"0": 0.9, "1": 1.0}],
            ["append", [[1, 400, 70]]],
        ],
        [["commit", "g", {"0": 1.0, "1": 1.0}], ["append", [[0, 800, 70]]]],
        {"unlink", "commit"},
    ),
}  # fmt: skip


def history(story: Story, *lives: Life, **settings: Any) -> History:
    """Return a story with these lives in its middle."""
    before = [Life(operations=story.before)] if story.before else []
    return History(lives=[*before, *lives, Life(operations=story.after)], config=story.config, **settings)


def require_good(outcome: Outcome) -> Outcome:
    if outcome.wrong:
        pytest.fail(explain(outcome.history), pytrace=False)
    return outcome


def positions(step: int = 1) -> Iterator[int]:
    return count(1, step)


def hit(outcome: Outcome) -> set[str]:
    """Return the kinds of calls at which faults have come."""
    return {call.kind for life in outcome.history.lives for call, _ in life.faults}


@pytest.mark.parametrize("name", STORIES)
def test_whatever_a_crash_leaves_is_what_was_answered(name: str) -> None:
    """It is a kill in the middle of each call, and a power failure before it; in the profile ci one of the two."""
    story, kinds = STORIES[name], set[str]()
    for at in positions():
        kill = Life(operations=story.watched, aims=[("", at, Fault(crash=True, done=0.5))])
        failure = Life(
            operations=story.watched,
            aims=[("", at, Fault(crash=True))],
            end="power",
            seed=at,
            share=(0.0, 0.5, 0.9)[at % 3],
        )
        lives, model = (kill, failure)[at % every(2) :: every(2)], ("lax", "ordered")[at // 2 % 2]
        outcomes = [require_good(run(history(story, life, model=model))) for life in lives]
        kinds |= set[str]().union(*map(hit, outcomes))
        if not outcomes[-1].crashes:
            break
    assert story.calls <= kinds, sorted(kinds)


@pytest.mark.parametrize("name", STORIES)
def test_whatever_a_crash_leaves_that_cuts_a_recovery_short_is_what_was_answered(name: str) -> None:
    story, step, at, again = STORIES[name], every(32), 0, 0
    for at in positions(step):
        crash = Life(operations=story.watched, aims=[("", at, Fault(crash=True))], end="power", seed=at, share=0.5)
        for again in positions():
            recovery = Life(
                aims=[("", again, Fault(crash=True, done=0.5))],
                end="power" if again % 2 else "kill",
                seed=again,
                share=0.5,
            )
            outcome = require_good(run(history(story, crash, recovery, model=("lax", "ordered")[at % 2])))
            if outcome.crashes < 2:
                break
        if again == 1:  # the first crash did not come
            break
    assert at > step


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("name", STORIES)
def test_whatever_calls_fail_each_answer_stays_true(name: str, times: int) -> None:
    """Some of them are those that take a write back."""
    story, codes, at = STORIES[name], (errno.EIO, errno.ENOSPC), 0
    for at in positions(every(5)):
        fault = Fault(codes[at % 2])
        aims = [("", at, fault), *(("", 1, fault) for _ in range(times - 1))]
        life = Life(operations=story.watched, aims=aims, end="power", seed=at, share=(0.0, 0.5, 0.9)[at % 3])
        if not hit(require_good(run(history(story, life, model=("lax", "ordered")[at // 2 % 2])))):
            break
    assert at > 5
