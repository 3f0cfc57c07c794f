"""A snapshot as a table, and as text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, TextIO, get_args

import attrs

from levada.framework.text import printable

from .snapshot import NodeSnapshot, Row, Snapshot, take_snapshot

if TYPE_CHECKING:
    from levada.framework import ActorSystem

__all__ = [
    "HEADINGS", "SORTS", "Entry", "Sort", "cells", "duration", "entries", "headline", "in_order", "show", "table", "text",
]  # fmt: skip

Sort = Literal["tree", "path", "queue", "age", "handled", "rate", "restarts"]
"""An order of a table: one of `SORTS`."""
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
"""Orders of a table: ``tree`` indents children below their parent, ``path`` is alphabetical, the others put the largest figure first."""

HEADINGS: Final = ("actor", "class", "state", "queue", "oldest", "handled", "per s", "restarts", "in", "about")
NUMBERS: Final = frozenset({3, 4, 5, 6, 7})
"""Columns that are aligned right."""

Entry = tuple[Row, float | None]
"""A row, and the messages that the actor handles per second if they are known."""
_ORDERS: Final[Mapping[Sort, Callable[[Entry], float]]] = {
    "queue": lambda entry: entry[0].depth,
    "age": lambda entry: entry[0].age,
    "handled": lambda entry: entry[0].handled,
    "rate": lambda entry: entry[1] or 0.0,
    "restarts": lambda entry: entry[0].restarts,
}


def show(
    system: ActorSystem, *, sort: Sort = "tree", depth: int | None = None, limit: int = 1000, file: TextIO | None = None
) -> None:
    """Print what ``levada top`` shows of a system. Call it in the system's thread.

    Args:
        system: has been entered and has not ended.
        sort: the order of the actors, see `SORTS`.
        depth: how many levels below the root are shown; ``None``: all.
        limit: the most actors, see `take_snapshot`.
        file: where to print; ``None``: standard error.
    """
    (file or sys.stderr).write(text(take_snapshot(system, limit=limit), sort=sort, depth=depth))


def text(snapshot: Snapshot, *, previous: Snapshot | None = None, sort: Sort = "tree", depth: int | None = None) -> str:
    """Return a snapshot as text. Arguments as for `table`."""
    rows = [HEADINGS, *table(snapshot, previous=previous, sort=sort, depth=depth)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [*headline(snapshot, previous)]
    for row in rows:
        cells = [
            cell.rjust(width) if number in NUMBERS else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def headline(snapshot: Snapshot, previous: Snapshot | None = None) -> list[str]:
    """Return a summary of the system in two to four lines; the longest stall is that since `previous`, or of ten minutes."""
    counts = snapshot.statistics
    stall = duration(snapshot.longest_stall(0.0 if previous is None else previous.time))
    q = {name: duration(seconds) for name, seconds in snapshot.quantiles().items()}
    lines = [
        f"{printable(snapshot.system)} (process {snapshot.pid}, {printable(snapshot.phase)}): {counts.actors:,} actors, "
        f"{counts.ready:,} ready, {counts.waiting:,} waiting, {counts.timers:,} timers; so far {counts.failures:,} failures, "
        f"{counts.restarts:,} restarts, {counts.dead_letters:,} dead letters, {counts.slow_turns:,} slow turns",
        f"wait for a turn: 50 % below {q['queue_50']}, 99 % {q['queue_99']}; a turn: 50 % {q['turn_50']}, 99 % {q['turn_99']}; longest stall {stall}",
    ]
    if snapshot.nodes:
        states = Counter(node.state for node in snapshot.nodes)
        lines.append(f"nodes: {', '.join(f'{count} {printable(state)}' for state, count in states.items())}")
    hidden = snapshot.hidden + sum(node.snapshot.hidden for node in snapshot.nodes if node.snapshot is not None)
    if hidden:
        lines.append(f"{hidden:,} actors and those below them are not shown (raise the limit)")
    return lines


def table(
    snapshot: Snapshot, *, previous: Snapshot | None = None, sort: Sort = "tree", depth: int | None = None
) -> list[tuple[str, ...]]:
    """Return a snapshot as rows of text, with a cell for each of `HEADINGS`.

    Args:
        snapshot: the snapshot.
        previous: an earlier snapshot of the same system, for the messages handled per second since then.
        sort: the order of the actors, see `SORTS`.
        depth: how many levels below the root are shown; ``None``: all.
    """
    rows = [(row, rate) for row, rate in entries(snapshot, previous) if depth is None or row.level <= depth]
    return [cells(row, rate, indented=sort == "tree") for row, rate in in_order(rows, sort)]


def entries(snapshot: Snapshot, previous: Snapshot | None = None) -> list[Entry]:
    """Return all rows of a snapshot: the program's own, then each node and its rows, whose paths begin with the node's name."""
    rows = _rows(snapshot, previous)
    before = {node.name: node.snapshot for node in previous.nodes} if previous is not None else {}
    for node in snapshot.nodes:
        rows.append((_node_row(node), None))
        if node.snapshot is not None:
            # The node's own row stands for its root.
            rows += _rows(node.snapshot, before.get(node.name), node.name)[1:]
    return rows


def in_order(rows: list[Entry], sort: Sort) -> list[Entry]:
    """Return rows in an order of `SORTS`; ``tree`` leaves them where they are."""
    if sort == "path":
        return sorted(rows, key=lambda entry: entry[0].path)
    return rows if sort == "tree" else sorted(rows, key=_ORDERS[sort], reverse=True)


def cells(row: Row, rate: float | None, *, indented: bool) -> tuple[str, ...]:
    """Return the cells of one row, one for each of `HEADINGS`."""
    return (
        _name(row, indented=indented),
        printable(row.kind.lstrip("_")),
        printable(row.state),
        f"{row.depth:,}",
        duration(row.age) if row.age else "",
        f"{row.handled:,}",
        "" if rate is None else f"{rate:,.0f}",
        f"{row.restarts:,}" if row.restarts else "",
        _doing(row),
        printable(row.about),
    )


def _rows(snapshot: Snapshot, previous: Snapshot | None, node: str = "") -> list[Entry]:
    """Return the rows of one process, each with the messages handled per second if they are known."""
    rates = _rates(snapshot, previous)
    return [(attrs.evolve(row, path=node + row.path), rates.get(row.path)) for row in snapshot.actors]


def _node_row(node: NodeSnapshot) -> Row:
    about = node.error or f"process {node.pid}{f' on {node.host}' if node.host else ''}"
    return Row(
        level=0,
        path=node.name,
        kind="node",
        state=node.state,
        depth=0,
        age=0.0,
        handled=0 if node.snapshot is None else sum(row.handled for row in node.snapshot.actors),
        restarts=node.restarts,
        handler=None,
        where=None,
        waits_for=(),
        hidden=0 if node.snapshot is None else node.snapshot.actors[0].hidden,
        about=about,
    )


def _rates(snapshot: Snapshot, previous: Snapshot | None) -> dict[str, float]:
    if previous is None or previous.pid != snapshot.pid or not snapshot.time > previous.time:
        return {}
    seconds = snapshot.time - previous.time
    before = {row.path: row.handled for row in previous.actors}
    # A new actor may have the path now, and its count begins at 0.
    return {row.path: max(0, row.handled - before.get(row.path, 0)) / seconds for row in snapshot.actors}


def _name(row: Row, *, indented: bool) -> str:
    hidden = f" (+{row.hidden:,})" if row.hidden else ""
    name = "  " * (row.level - 1) + row.path.rpartition("/")[2] if indented and row.level else row.path
    return printable(name) + hidden


def _doing(row: Row) -> str:
    waits = (f"waits for {', '.join(row.waits_for)}",) if row.waits_for else ()
    return printable(" ".join((*filter(None, (row.handler, row.where)), *waits)))


def duration(seconds: float) -> str:
    """Format seconds for people: ``64 µs``, ``1.2 ms``, ``3.4 s``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
