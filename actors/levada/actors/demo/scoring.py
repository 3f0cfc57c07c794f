"""Suspicious requests: actors score each line of an access log, and Spark's executors ask them.

::

    Spark's task ──ask_batches──> node n0: Scorer ──Scored──> Tally (in the driver)
                 ──────────────>  node n1: Scorer

Scores are computed in plain Python, which takes one core however many tasks ask. So with nodes there is a scorer on each, at a socket of its own in
one folder; without nodes there is one, in this process.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import pyarrow as pa
import trio

from levada.actors.nodes import nodes_of
from levada.actors.spark.asks import AskRows, RemoteActor, ask_batches
from levada.actors.spark.desk import serve_asks
from levada.framework import Actor, ActorSystem, Ref, handles, restart

from .rows import Scored

__all__ = ["ScoreTally", "Scorer", "ScoringDesk", "points_of", "score_by", "scorers"]

NAME = "scorer"
TIMEOUT = 120.0
"""Seconds that a task waits for scores, on a machine that may be busy."""
ROWS_A_TURN = 64
"""Lines after which a scorer lets other actors run: half a millisecond."""

_REQUEST = re.compile(r'[^"]*"[A-Z]+ ([^ "]+)')
_DOOR = re.compile(r"/(?:wp-login|wp-admin|admin|administrator|fckeditor|user/register|node/add)", re.IGNORECASE)
_QUOTE = re.compile(r"""["'<>]|%(?:25)*(?:22|27|3c|3e)""", re.IGNORECASE)
DOOR, QUOTE = 5, 2
"""Points for paths of programs that are often attacked, and for characters that end a string, however often they are escaped."""


def points_of(line: str) -> int:
    """Score a line of an access log; 0: an ordinary request, or no request at all.

    Example:
        >>> points_of('1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET /blog/wp-admin/?q=%2527 HTTP/1.1" 404 1 "-" "x"')
        7
    """
    request = _REQUEST.match(line)
    if request is None:
        return 0
    path = request[1]
    return DOOR * bool(_DOOR.search(path)) + QUOTE * bool(_QUOTE.search(path))


class Scorer(Actor[AskRows]):
    """Scores the lines of Spark's tasks.

    Args:
        tally: is told how many.
    """

    tally: Ref[Scored]

    @handles
    async def score(self, m: AskRows) -> pa.RecordBatch:
        """Answer with the points of each line."""
        points = list[int]()
        for number, line in enumerate(m.rows["text"].to_pylist()):
            if number % ROWS_A_TURN == 0:
                await trio.lowlevel.checkpoint()
            points.append(points_of(line))
        self.tally.tell(Scored(self.system.name, len(points)))
        return pa.record_batch({"points": pa.array(points, pa.int64())})


class ScoringDesk(Actor[Any]):
    """Lets executors ask a scorer, at a socket in a folder.

    Args:
        folder: this user's alone, the same for all nodes.
        tally: is told how many lines are scored.
    """

    folder: str
    tally: Ref[Scored]

    async def started(self) -> None:
        """Start a scorer, and listen."""
        scorer = self.spawn(Scorer, self.tally)
        await self.enter(serve_asks(self.system, self.folder, {NAME: scorer}))


class ScoreTally(Actor[Scored]):
    """Counts the lines that are scored, by node; those of a task that is tried again count again."""

    scored: Counter[str] = attrs.field(factory=Counter[str])

    @handles
    def add(self, m: Scored) -> None:
        """Add to the counts."""
        self.scored[m.node] += m.lines


@asynccontextmanager
async def scorers(
    system: ActorSystem, folder: Path, scored: Counter[str], *, on_nodes: bool
) -> AsyncIterator[RemoteActor]:
    """Run a scorer in this process, or one on each of its nodes; yields what executors ask.

    Args:
        system: the driver.
        folder: for their sockets and token.
        scored: counts the lines that are scored, by node.
        on_nodes: whether the system has nodes. A scorer starts again with its node.
    """
    tally = system.spawn(ScoreTally, scored, name="tally")
    again = restart("permanent")
    if on_nodes:
        fleet = nodes_of(system)
        for member in fleet.members:
            await fleet.spawn(ScoringDesk, str(folder), tally, on=member.name, supervise=again)
    else:
        system.spawn(ScoringDesk, str(folder), tally, name="scoring", supervise=again)
    yield _asked_at(folder)


def _asked_at(folder: Path) -> RemoteActor:
    # Executors have working directories of their own.
    return RemoteActor(NAME, f"unix://{quote(os.fsencode(folder.absolute()))}/*.socket")


def score_by(actor: RemoteActor) -> Callable[[Iterator[pa.Array]], Iterator[pa.Array]]:
    """Return a function of Arrow columns that has lines scored by an actor; Spark ships it to its executors."""

    def score(texts: Iterator[pa.Array]) -> Iterator[pa.Array]:
        batches = (pa.record_batch({"text": text}) for text in texts)
        for answer in ask_batches(actor, batches, timeout=TIMEOUT, idempotent=True):
            yield answer["points"]

    return score
