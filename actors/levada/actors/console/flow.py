"""Who sends to whom: the program's own actors in groups of a class and a parent, and how they are tied.

Nothing is noted until a client looks.  Then a sampled turn, one in 63, says which actors it made ready; asks and sends that wait are seen as they
are; refs in fields, and the ends of channels of one name, say who can send to whom.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice, product
from typing import Any, Final

from levada.framework.embedding import LocalRef
from levada.framework.text import printable

from .survey import Survey

__all__ = ["Flow"]

_MOST_ACTORS: Final = 2000
"""The most actors that are looked at."""
_MOST_ENDS: Final = 10
"""The most actors at either side of channels of one name."""
_MOST_PAIRS: Final = 200
"""The most pairs of groups."""


class Flow:
    """Notes who sends to whom from its first look on, until `close`.

    Args:
        survey: passes over the actors of the system.
    """

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._waited: Counter[tuple[str, str]] = Counter()

    def close(self) -> None:
        """Note no more."""
        self._survey.system.observe.flows = None
        self._waited.clear()

    def look(self, text: str) -> list[dict[str, Any]]:
        """Return a row for each pair of groups that are tied and whose names have a text: ``path``, ``to``, and how often in each way."""
        observe = self._survey.system.observe
        if observe.flows is None:
            observe.flows = Counter()
        own = self._survey.own[:_MOST_ACTORS]
        groups: dict[LocalRef, tuple[str, str]] = {
            cell: (cell.path.rpartition("/")[0], observe.kind(cell).lstrip("_")) for cell in own
        }
        sizes = Counter(groups.values())
        names: dict[LocalRef | None, str] = {}
        for cell, group in groups.items():
            many = sizes[group] > 1
            names[cell] = printable(f"{group[0]}/{group[1]} \u00d7 {sizes[group]:,}" if many else cell.path, 200)
        found: dict[tuple[str, str], dict[str, int]] = {}

        def tie(one: LocalRef | None, two: LocalRef | None, how: str, count: int) -> None:
            ends = names.get(one, ""), names.get(two, "")
            if all(ends) and ends[0] != ends[1]:
                found.setdefault(ends, {"sent": 0, "waited": 0, "channels": 0, "refs": 0})[how] += count

        for cell in own:
            for other in observe.knows(cell):
                tie(cell, other, "refs", 1)
        holders: dict[tuple[str, str], dict[bool, list[LocalRef]]] = {}
        for cell in own:
            for end in observe.detail(cell).channels if observe.holds_channels(cell) else ():
                receives = end.end.endswith("Receiver")
                holders.setdefault((end.name, end.item), {True: [], False: []})[receives].append(cell)
        for sides in holders.values():
            for one, two in product(sides[False][:_MOST_ENDS], sides[True][:_MOST_ENDS]):
                tie(one, two, "channels", 1)
        for (one, two), count in observe.flows.items():
            tie(one, two, "sent", count)
        at = {cell.path: cell for cell in own}
        self._waited.update(observe.waits())
        for (asker, asked), count in self._waited.most_common(1000):
            tie(at.get(asker), at.get(asked), "waited", count)
        ordered = sorted(found.items(), key=lambda each: (-each[1]["sent"] - each[1]["waited"], each[0]))
        rows = ({"path": one, "to": two, **ties} for (one, two), ties in ordered if text in f"{one} {two}".casefold())
        return list(islice(rows, _MOST_PAIRS))
