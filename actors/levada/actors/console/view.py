"""A snapshot as a table, and as text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, TextIO, get_args

import attrs

from levada.framework.text import printable

from .snapshot import NodeSnapshot, Row, Snapshot, take_snapshot

if TYPE_CHECKING:
    from levada.framework import ActorSystem

__all__ = [
    "HEADINGS", "SORTS", "Entry", "ShownRow", "Sort", "cells", "duration", "entries", "headline", "in_order", "processes", "show", "table", "text",
    "tree",
]  # fmt: skip

Sort = Literal["tree", "path", "queue", "age", "handled", "rate", "restarts"]
"""An order of a table: one of `SORTS`."""
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
"""Orders of a table: ``tree`` indents children below their parent, and in each process puts the program's own actors first; ``path`` is
alphabetical, the others put the largest figure first."""

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
    """Return a summary in two to four lines: counts of all processes, and the first one's times.

    The longest stall is that since `previous`, or of ten minutes.
    """
    pairs = processes(snapshot, previous)
    stall = duration(max(now.longest_stall(0.0 if before is None else before.time) for now, before in pairs))

    def total(name: str) -> str:
        return f"{sum(getattr(now.statistics, name) for now, _ in pairs):,}"

    q = {name: duration(seconds) for name, seconds in snapshot.quantiles().items()}
    lines = [
        f"{printable(snapshot.system)} (process {snapshot.pid}, {printable(snapshot.phase)}): {total('actors')} actors, "
        f"{total('ready')} ready, {total('waiting')} waiting, {total('timers')} timers; so far {total('failures')} failures, "
        f"{total('restarts')} restarts, {total('dead_letters')} dead letters, {total('slow_turns')} slow turns",
        f"wait for a turn: 50 % below {q['queue_50']}, 99 % {q['queue_99']}; a turn: 50 % {q['turn_50']}, 99 % {q['turn_99']}; longest stall {stall}",
    ]
    if snapshot.nodes:
        states = Counter(node.state for node in snapshot.nodes)
        lines.append(f"nodes: {', '.join(f'{count} {printable(state)}' for state, count in states.items())}")
    hidden = snapshot.hidden + sum(node.snapshot.hidden for node in snapshot.nodes if node.snapshot is not None)
    if hidden:
        lines.append(f"{hidden:,} actors and those below them are not shown (raise the limit)")
    return lines


def processes(snapshot: Snapshot, previous: Snapshot | None = None) -> list[tuple[Snapshot, Snapshot | None]]:
    """Return the snapshot of each process that answered, the program's first, and its earlier one in `previous`."""
    then = {} if previous is None else {node.name: node.snapshot for node in previous.nodes}
    nodes = [(node.snapshot, then.get(node.name)) for node in snapshot.nodes if node.snapshot is not None]
    return [(snapshot, previous), *nodes]


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
    found = entries(snapshot, previous)
    if sort == "tree":
        root = [ShownRow(_name(row), row, rate) for row, rate in found if row.path == "/"]
        return [cells(line) for line in (*root, *tree(found, depth=depth))]
    rows = [(row, rate) for row, rate in found if depth is None or row.level <= depth]
    return [cells(ShownRow(_name(row), row, rate)) for row, rate in in_order(rows, sort)]


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


@attrs.frozen
class ShownRow:
    """A row as it is shown."""

    name: str
    row: Row
    rate: float | None


def tree(
    found: Sequence[Entry], *, internals: bool = True, folded: Collection[str] = (), depth: int | None = None
) -> Iterator[ShownRow]:
    """Yield the lines of each process: the program's own actors, then levada's, each as a tree. The roots have none.

    Levada's actors of the first process come last, behind the nodes: of a driver there are dozens, and the program's actors are on the nodes.

    Args:
        found: what `entries` returned.
        internals: whether levada's own actors are among them.
        folded: paths of actors and nodes below which nothing is shown.
        depth: how many levels below the root are shown; ``None``: all.
    """
    processes: list[tuple[Entry | None, list[Entry]]] = [(None, [])]
    for entry in found:
        if entry[0].kind == "node" and "/" not in entry[0].path:
            processes.append((entry, []))
        elif entry[0].path != "/":
            processes[-1][1].append(entry)
    for node, those in processes:
        name = ""
        if node is not None:
            name = node[0].path
            yield ShownRow(_name(node[0]), *node)
            if name in folded:
                continue
        for own in (True, False) if internals and name else (True,):
            yield from _branch([entry for entry in those if entry[0].own is own], name, folded, depth)
    if internals:
        yield from _branch([entry for entry in processes[0][1] if not entry[0].own], "", folded, depth)


def _branch(found: Sequence[Entry], node: str, folded: Collection[str], depth: int | None) -> Iterator[ShownRow]:
    levels = {node: 0} if node else {}
    hidden = ""
    for row, rate in found:
        parent, _, name = row.path.rpartition("/")
        level = levels[row.path] = levels.get(parent, levels.get(node, -1)) + 1
        if parent not in levels or (parent == node and not node):  # below an actor that is not shown
            name = row.path.removeprefix(node).removeprefix("/")
        if hidden and row.path.startswith(hidden):
            continue
        hidden = f"{row.path}/" if row.path in folded else ""
        if depth is None or row.level <= depth:
            inside = sum(1 for other, _ in found if other.path.startswith(f"{row.path}/")) if hidden else row.hidden
            yield ShownRow("  " * level + printable(name) + (f" (+{inside:,})" if inside else ""), row, rate)


def in_order(rows: list[Entry], sort: Sort) -> list[Entry]:
    """Return rows in an order of `SORTS`; ``tree`` leaves them where they are."""
    if sort == "path":
        return sorted(rows, key=lambda entry: entry[0].path)
    return rows if sort == "tree" else sorted(rows, key=_ORDERS[sort], reverse=True)


def cells(line: ShownRow) -> tuple[str, ...]:
    """Return the cells of one line, one for each of `HEADINGS`."""
    row, rate = line.row, line.rate
    return (
        line.name,
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


def _name(row: Row) -> str:
    return printable(row.path) + (f" (+{row.hidden:,})" if row.hidden else "")


def _doing(row: Row) -> str:
    waits = (f"waits for {', '.join(row.waits_for)}",) if row.waits_for else ()
    return printable(" ".join((*filter(None, (row.handler, row.where)), *waits)))


def duration(seconds: float) -> str:
    """Format seconds for people: ``64 µs``, ``1.2 ms``, ``3.4 s``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
