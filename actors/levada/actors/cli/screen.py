"""The screen of ``levada top`` on a terminal: its rows, and the effects of keys. It reads no terminal, so that it can be tested as values."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import attrs
from rich.text import Text

from levada.actors.console import SORTS, Row, Snapshot, Sort
from levada.actors.console.view import ShownRow, cells, duration, entries, in_order, processes, tree
from levada.framework.text import printable

__all__ = ["Screen", "keys_in"]

_STATES: Final = {"waiting": "yellow", "restarting": "red", "stopping": "magenta", "down": "red", "ready": "green"}
_COLUMNS: Final = (
    ("actor", 0, False), ("class", 1, False), ("state", 2, False), ("queue", 3, True), ("oldest", 4, True), ("per s", 6, True),
    ("restarts", 7, True), ("handled", 5, True), ("in", 8, False), ("about", 9, False),
)  # fmt: skip
"""Heading, place in `levada.actors.console.view.HEADINGS`, and whether it is aligned right. The last ones are left out first."""
_KEYS: Final = (
    ("q", "quit"), ("↑↓", "move"), ("←→", "fold"), ("⏎", "detail"), ("/", "filter"), ("s", "sort"), ("r", "reverse"), ("i", "all"),
)  # fmt: skip
_DETAIL: Final = 9
"""Lines of the detail pane."""
_TROUBLES: Final = 3
"""The most sentences about troubles, of two lines each."""
_NAMES: Final = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left", b"\x1b[H": "home", b"\x1b[F": "end", b"\x1b[1~": "home",
    b"\x1b[4~": "end", b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\r": "enter", b"\n": "enter", b"\x7f": "erase", b"\b": "erase",
    b"\x1b": "escape",
}  # fmt: skip
_SEQUENCE: Final = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|[\xc2-\xf4][\x80-\xbf]+|.", re.DOTALL)


def keys_in(data: bytes) -> Iterator[str]:
    """Return the names of the keys whose bytes a terminal sent: a character, or for example ``up``, ``page down``, ``enter``."""
    for found in _SEQUENCE.findall(data):
        key = found.replace(b"\x1bO", b"\x1b[")
        name = _NAMES.get(key) or found.decode(errors="ignore")
        if len(name) > 1 or name.isprintable():
            yield name


@attrs.define
class Screen:
    """What a terminal shows of the latest snapshot."""

    sort: Sort = "tree"
    depth: int | None = None
    reverse: bool = False
    internals: bool = False
    """Whether levada's own actors are shown."""
    filter: str = ""
    typing: bool = False
    """Whether keys go into the filter."""
    detail: bool = False
    folded: set[str] = attrs.field(factory=set)
    at: str = ""
    """Path of the chosen actor."""
    _snapshot: Snapshot | None = None
    _previous: Snapshot | None = None
    _troubles: Sequence[str] = ()
    _first: int = 0  # the row at the top
    _shown: list[ShownRow] = attrs.field(factory=list)
    _room: int = 1  # rows on the screen

    def take(self, snapshot: Snapshot, previous: Snapshot | None, troubles: Sequence[str] = ()) -> None:
        """Show another snapshot, and the troubles of the moment, in a sentence each."""
        self._snapshot, self._previous, self._troubles = snapshot, previous, troubles
        self._arrange()

    def press(self, key: str) -> bool:
        """Change what is shown. Return whether the user wants to leave."""
        if self.typing:
            self._type(key)
        elif key == "q":
            return True
        elif key in _MOVES:
            self._move(key)
        elif key in ("left", "right", " "):
            self._fold(key)
        elif key == "enter":
            self.detail = not self.detail
        elif key == "escape":
            self.detail, self.filter = False, "" if not self.detail else self.filter
        elif key == "/":
            self.typing = True
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "i":
            self.internals = not self.internals
        self._arrange()
        return False

    def lines(self, width: int, height: int) -> list[Text]:
        """Return the lines of the screen, `height` at most."""
        if self._snapshot is None:
            return [Text("waiting for the program")]
        head = [*self._head(), *self._wrong(width)]
        keys = self._footer()
        pane = self._pane() if self.detail else []
        self._room = max(1, height - len(head) - len(pane) - 2)
        paths = self._paths
        at = paths.index(self.at) if self.at in paths else 0
        self._first = max(0, min(self._first, len(paths) - self._room), at - self._room + 1)
        self._first = min(self._first, at)
        table = self._table(self._shown[self._first :][: self._room], width, at - self._first)
        table += [Text()] * (self._room + 1 - len(table))
        lines = [*head, *table, *pane, keys]
        for line in lines:
            line.truncate(width, overflow="ellipsis" if line in head else "crop")
        return lines[:height]

    def _head(self) -> list[Text]:
        """Return the figures of all processes together; quantiles and CPU are the first one's."""
        assert self._snapshot is not None
        now, before = self._snapshot, self._previous
        pairs = processes(now, before)
        counts = [one.statistics for one, _ in pairs]
        stall = max(one.longest_stall(0.0 if earlier is None else earlier.time) for one, earlier in pairs)
        failures = sum(each.failures for each in counts)
        q = now.quantiles()
        known = before is not None and before.pid == now.pid and now.time > before.time
        cpu = f", {100 * (now.cpu - before.cpu) / (now.time - before.time):.0f} % CPU" if known and before else ""
        rate = sum(rate or 0.0 for _, rate in entries(now, before))
        name = f"{printable(now.system)} (process {now.pid}, {printable(now.phase)}{cpu})"
        first = f"{name}: {sum(each.actors for each in counts):,} actors, {rate:,.0f} messages/s"
        second = Text()
        second.append(f"longest stall {duration(stall)}", "red" if stall >= 0.1 else "")
        second.append(f"; {failures:,} failures", "red" if failures else "")
        second.append(f"; {sum(each.restarts for each in counts):,} restarts")
        second.append(f"; {sum(each.dead_letters for each in counts):,} dead letters")
        second.append(f"; 99 %: wait {duration(q['queue_99'])}, turn {duration(q['turn_99'])}")
        head = [Text(first, style="bold"), second]
        if self.filter or not self._is_tree:
            order = f"by {self.sort}{', reversed' if self.reverse else ''}"
            found = f" with {printable(self.filter)} (Esc clears)" if self.filter else ""
            head.append(Text(f"{len(self._shown):,} actors{found}, {order}", style="yellow"))
        hidden = now.hidden + sum(node.snapshot.hidden for node in now.nodes if node.snapshot is not None)
        if hidden:
            head.append(Text(f"{hidden:,} actors and those below them were not fetched: raise --limit", style="yellow"))
        return head

    def _wrong(self, width: int) -> Iterator[Text]:
        for sentence in self._troubles[:_TROUBLES]:
            wrapped = textwrap.wrap(
                f"! {printable(sentence, 500)}", width, subsequent_indent="  ", max_lines=2, placeholder=" …"
            )
            yield from (Text(line, style="red") for line in wrapped)
        if len(self._troubles) > _TROUBLES:
            yield Text(f"! and {len(self._troubles) - _TROUBLES} more: levada top --web shows all", style="red")

    def _footer(self) -> Text:
        if self.typing:
            return Text(f"filter: {printable(self.filter)}█   ⏎ keep, Esc clear", style="reverse")
        text = Text()
        for key, what in _KEYS:
            text.append(f" {key} ", "reverse").append(f"{what} ")
        return text

    def _table(self, shown: Sequence[ShownRow], width: int, at: int) -> list[Text]:
        rows = [cells(line) for line in shown]
        widths = [max([len(name), *(len(row[place]) for row in rows)]) for name, place, _ in _COLUMNS]
        widths[0] = min(widths[0], max(20, width // 3))
        widths[1] = min(widths[1], 24)
        taken, columns = 0, []
        for number, (_, _, right) in enumerate(_COLUMNS):
            left = width - taken
            if left < (widths[number] if right or number < 3 else 10):
                continue
            widths[number] = min(widths[number], left)
            taken += widths[number] + 2
            columns.append(number)
        head = Text(style="reverse")
        for number in columns:
            name, _, right = _COLUMNS[number]
            head.append(f"{name.rjust(widths[number]) if right else name.ljust(widths[number])}  ")
        head.pad_right(max(0, width - len(head)))
        lines = [head]
        for number, row in enumerate(rows):
            line = Text(style="bold reverse" if number == at else "")
            for column in columns:
                _, place, right = _COLUMNS[column]
                text, most = row[place], widths[column]
                text = text if len(text) <= most else text[: most - 1] + "…"
                style = _STATES.get(text, "") if place == 2 else ""
                line.append(f"{text.rjust(most) if right else text.ljust(most)}  ", style)
            lines.append(line)
        return lines

    def _pane(self) -> list[Text]:
        found = next((line for line in self._shown if line.row.path == self.at), None)
        pane = [Text(f"── {printable(self.at, 500)} ", style="bold")]
        if found is not None:
            row, rate = found.row, found.rate
            facts = (
                ("class", row.kind.lstrip("_")),
                ("state", row.state),
                ("mailbox", f"{row.depth:,} messages{f', the oldest for {duration(row.age)}' if row.age else ''}"),
                (
                    "handled",
                    f"{row.handled:,}{'' if rate is None else f', {rate:,.1f} per s'}; {row.restarts:,} restarts",
                ),
                ("in", " at ".join(filter(None, (row.handler, row.where))) or "no handler waits"),
                ("waits for", ", ".join(row.waits_for) or "no other actor"),
                ("about", row.about),
            )
            pane += (Text.assemble((f"{name:>10}  ", "dim"), printable(text, 500)) for name, text in facts if text)
        return (pane + [Text()] * _DETAIL)[:_DETAIL]

    @property
    def _is_tree(self) -> bool:
        return self.sort == "tree" and not self.filter

    @property
    def _paths(self) -> list[str]:
        return [line.row.path for line in self._shown]

    def _arrange(self) -> None:
        """Choose the rows: the program's own as a tree below their nodes, or in the wanted order."""
        if self._snapshot is None:
            return
        text = self.filter.casefold()
        found = entries(self._snapshot, self._previous)
        if self._is_tree:
            self._shown = list(tree(found, internals=self.internals, folded=self.folded, depth=self.depth))
        else:
            wanted = [entry for entry in found if self._wants(entry[0], text)]
            ordered = in_order(wanted, "path" if self.sort == "tree" else self.sort)
            self._shown = [
                ShownRow(printable(row.path), row, rate) for row, rate in (ordered[::-1] if self.reverse else ordered)
            ]
        paths = self._paths
        if self.at not in paths and paths:
            self.at = paths[0]

    def _wants(self, row: Row, text: str) -> bool:
        if text:  # also among those that are not shown otherwise
            return text in row.path.casefold() or text in row.kind.casefold()
        return row.path != "/" and row.kind != "node" and (row.own or self.internals)

    def _move(self, key: str) -> None:
        if paths := self._paths:
            at = paths.index(self.at) if self.at in paths else 0
            self.at = paths[max(0, min(len(paths) - 1, _MOVES[key](at, self._room, len(paths))))]

    def _fold(self, key: str) -> None:
        parent = self.at.rpartition("/")[0]
        if key == "right" or (key == " " and self.at in self.folded):
            self.folded.discard(self.at)
        elif any(path.startswith(f"{self.at}/") for path in self._paths):
            self.folded.add(self.at)
        elif key == "left" and parent in self._paths:
            self.at = parent

    def _type(self, key: str) -> None:
        if key == "enter":
            self.typing = False
        elif key == "escape":
            self.typing, self.filter = False, ""
        elif key == "erase":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter = (self.filter + key)[:200]


_MOVES: Final[Mapping[str, Callable[[int, int, int], int]]] = {
    "up": lambda at, room, count: at - 1,
    "down": lambda at, room, count: at + 1,
    "k": lambda at, room, count: at - 1,
    "j": lambda at, room, count: at + 1,
    "page up": lambda at, room, count: at - room,
    "page down": lambda at, room, count: at + room,
    "home": lambda at, room, count: 0,
    "end": lambda at, room, count: count,
}
