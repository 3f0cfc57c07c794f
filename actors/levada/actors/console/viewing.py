"""A system as one client sees it: only the rows in view are computed.

A client sends its `View` again and again, and `Viewer.look` answers with the rows in it.  Between requests a viewer does nothing, except
that its recorder takes events until `Viewer.close`.

The cost is small: the tree is walked along open actors only, rows are made for the window only, and a search continues from request to
request (`Scan`).  After an answer that took long the next one waits, so a viewer uses 2 % of a core at most, except for the first pass of a
search.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any, Final, Literal, get_args

import attrs
import trio

from levada.framework import ActorSystem
from levada.framework.embedding import LocalRef, restart_actor
from levada.framework.errors import ConfigurationError, DecodeError, LevadaError
from levada.framework.text import printable

from .flow import Flow
from .history import history_of
from .news import Recorder
from .scan import MOST_FOUND, Scan
from .snapshot import Row, Watching, ask_nodes, has_nodes, watch_node
from .survey import answers_of
from .trouble import Watchman

__all__ = ["ACTIONS", "MOST_OPEN", "MOST_ROWS", "PAGES", "SORTS", "Page", "View", "Viewer"]

Page = Literal["overview", "actors", "flow", "connections", "channels", "journals", "queries", "nodes", "none"]
PAGES: Final[tuple[Page, ...]] = get_args(Page)
"""The pages of a dashboard. ``none`` shows only the system as a whole, the others add rows. ``overview`` has the program's own actors and what
is wrong."""
SUBJECTS: Final[Mapping[Page, tuple[str, ...]]] = {
    "connections": ("connection", "listener"),
    "journals": ("journal",),
    "queries": ("query",),
}
"""The actors of a page, by `levada.framework.embedding.DescribedActor.subject`."""
SORTS: Final[Mapping[str, Callable[[Row], Any]]] = {
    "name": lambda row: row.path,
    "class": lambda row: row.kind,
    "state": lambda row: row.state,
    "queue": lambda row: (row.depth, row.age, row.handled),
    "oldest": lambda row: row.age,
    "handled": lambda row: row.handled,
    "restarts": lambda row: row.restarts,
    "in": lambda row: (row.handler or "", row.where or "", row.about),
}
"""Orders of actors. The viewer has ``rate`` and ``wait`` too, which need an earlier look."""
_RATES: Final = ("rate", "wait")
Action = Literal["stop", "kill", "restart"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)

_INTERNAL: Final = 2000
"""The most actors of levada among which actors of the program are looked for, see `View.internals`."""
_MOST_NODES: Final = 16
"""The most nodes whose own overviews are a part of their driver's."""
_SURVEY: Final = 0.004
"""Seconds of work for a pass over all actors in one answer."""
MOST_ROWS: Final = 200
"""The most rows in view."""
MOST_OPEN: Final = 500
"""The most actors whose children are in view."""
_TEXT: Final = 1000
"""The most characters of a name, of a search text, or of a path in a text for people."""
_SHARE: Final = 0.02
"""The largest share of a core for one viewer."""
_LONGEST: Final = 3.0
"""The longest pause between two answers in seconds, however long they take."""
_PATIENCE: Final = 1.0
"""Seconds for an actor to answer with its figures."""
_CONFIRM: Final = 60.0
"""Seconds in which an action can be confirmed."""
_EVERY: Final[Mapping[Page, float]] = {
    "queries": 2.0,
    "nodes": 2.0,
    "journals": 1.0,
    "connections": 1.0,
    "channels": 1.0,
    "overview": 1.0,
    "flow": 1.0,
}
"""Seconds between two answers, for the pages whose figures cost more than rows."""


@attrs.frozen(kw_only=True)
class View:
    """The part of a system that a client shows."""

    page: Page = "actors"
    node: str = ""
    """Name of the node to show; empty: the program itself."""
    search: str = ""
    """Text to find in paths, class names, addresses and directories; case is ignored. Empty: the tree, or all rows."""
    open: tuple[str, ...] = ()
    """Paths of the actors whose children are shown."""
    first: int = 0
    """Rows above the window."""
    count: int = 50
    """Rows in the window."""
    selected: str | None = None
    """Path of the actor whose details are shown."""
    after: int = 0
    """Number of the last event that the client has."""
    sort: str = ""
    """The order of actors: one of `SORTS`, ``rate`` or ``wait``, the least first; with ``-`` before it the greatest. Empty: the tree."""
    internals: bool = False
    """Whether levada's own actors are shown too, after the program's. An actor of the program below one of these is shown anyway."""
    history: bool = False
    """Whether the client wants the figures of the last 15 minutes."""

    @classmethod
    def from_json(cls, value: object) -> View:
        """Read a view.

        Raises:
            DecodeError: the value is not a view, or exceeds a limit.
        """
        if not isinstance(value, dict):
            raise DecodeError("a view is a JSON object")
        names = {field.name for field in attrs.fields(cls)}
        view = cls(**{name: member for name, member in value.items() if name in names})
        paths = view.open
        # Paths have any length, as those of actors have; what carries the request bounds it.
        if not isinstance(paths, list) or len(paths) > MOST_OPEN or not all(isinstance(path, str) for path in paths):
            raise DecodeError(f"open is a list of {MOST_OPEN} paths at most")
        numbers = (view.first, view.count, view.after)
        if not all(type(number) is int and 0 <= number < 1 << 53 for number in numbers) or view.count > MOST_ROWS:
            raise DecodeError(f"first, count and after are numbers, and count is {MOST_ROWS} at most")
        if (
            view.page not in PAGES
            or not _is_short(view.search)
            or not _is_short(view.node)
            or not isinstance(view.selected, str | None)
            or not (isinstance(view.sort, str) and view.sort.removeprefix("-") in ("", *SORTS, *_RATES))
        ):
            raise DecodeError(
                f"page is one of {', '.join(PAGES)}; node and search are short texts, selected is a path, "
                f"sort is one of {', '.join((*SORTS, *_RATES))}"
            )
        return attrs.evolve(view, open=tuple(paths))

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {**attrs.asdict(self), "open": list(self.open)}


def _is_short(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _TEXT


@attrs.frozen
class _Prepared:
    """An action that waits for confirmation. It refers to the actor itself, not to its path, which another actor may get."""

    action: Action
    actor: LocalRef
    code: str
    until: float

    def is_meant_by(self, code: object) -> bool:
        right = isinstance(code, str) and hmac.compare_digest(code.encode(errors="replace"), self.code.encode())
        return right and trio.current_time() <= self.until and self.actor.is_alive

    def carry_out(self) -> None:
        match self.action:
            case "restart":
                restart_actor(self.actor)
            case "kill":
                self.actor.kill()
            case "stop":
                self.actor.stop()


class Viewer:
    """Answers one client.

    Args:
        system: has been entered.
        actions: whether the client may stop, kill and restart actors.
        tracebacks: whether the client sees the texts and tracebacks of errors.
    """

    def __init__(self, system: ActorSystem, *, actions: bool = False, tracebacks: bool = False) -> None:
        self._system = system
        self._actions = actions
        self._tracebacks = tracebacks
        self._node: tuple[str, Watching] | None = None
        self._watched: dict[str, Watching] = {}  # for the overview
        self._seen: dict[str, dict[str, Any]] = {}  # their last answers
        self._recorder = Recorder(system, tracebacks=tracebacks)
        self._resources = ExitStack()
        self._history = self._resources.enter_context(history_of(system))
        self._watchman = Watchman(self._history.survey)
        self._flow = Flow(self._history.survey)
        self._rates: dict[LocalRef, tuple[float, int, float]] = {}  # when, the count then, messages per second
        self._known: dict[str, LocalRef] = {}
        self._scan: Scan | None = None
        self._scanned: tuple[str, str, bool] = ("", "", False)
        self._prepared: _Prepared | None = None
        self._rest_until = 0.0
        self._began = system.platform.time()

    def close(self) -> None:
        """Stop recording events."""
        self._recorder.close()
        self._flow.close()
        self._resources.close()

    async def answer(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request, on the node that it names: ``view`` with `look`, any other with `act`.

        A refused action, and a node that does not answer, are answers too: ``refused`` and ``away`` have the reason.

        Raises:
            DecodeError: the request is not valid.
        """
        view = View.from_json(members["view"]) if "view" in members else None
        name = view.node if view is not None else members.get("node", "")
        if not _is_short(name):
            raise DecodeError("node is a short text")
        try:
            if name:
                return {**await self._ask_node(name, members), "node": name}
            return await self.look(view) if view is not None else await self.act(members)
        except LevadaError as error:
            if view is None and (name or isinstance(error, ConfigurationError)):
                return {"refused": printable(str(error), _TEXT)}  # the actor, or the node, may just have ended
            if view is None or not name:
                raise
            return {"node": name, "away": printable(f"{name}: {error}", _TEXT), "last": 0, "interval": _PATIENCE}

    async def _ask_node(self, name: str, members: Mapping[str, Any]) -> dict[str, Any]:
        if self._node is None or self._node[0] != name:
            self._node = None
            watching = await watch_node(self._system, name, actions=self._actions, tracebacks=self._tracebacks)
            self._node = name, watching
        try:
            if "view" in members:
                return await self._node[1]({"view": {**members["view"], "node": ""}})
            return await self._node[1]({name: value for name, value in members.items() if name != "node"})
        except LevadaError:
            self._node = None  # the next request starts a new viewer
            raise

    async def _overviews(self, nodes: Iterable[Mapping[str, Any]], view: View) -> dict[str, dict[str, Any]]:
        """Return the overviews of the first nodes that are up; of a node that does not answer in time, the one before."""
        names = [node["name"] for node in nodes if node["state"] == "up" and not node.get("error")][:_MOST_NODES]
        self._watched = {name: watching for name, watching in self._watched.items() if name in names}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        request = {"view": attrs.evolve(view, count=MOST_ROWS, first=0, selected=None, history=False).to_json()}

        async def ask(name: str) -> dict[str, Any]:
            if name not in self._watched:
                self._watched[name] = await watch_node(self._system, name, actions=False, tracebacks=False)
            return await self._watched[name](request)

        for name, seen in (await answers_of(names, ask, _PATIENCE)).items():
            if isinstance(seen, LevadaError):
                self._watched.pop(name, None)  # the list of nodes says why
                self._seen.pop(name, None)
            else:
                self._seen[name] = seen
        return {name: self._seen[name] for name in names if name in self._seen}

    async def look(self, view: View) -> dict[str, Any]:
        """Return the rows in view, and figures of the system, as values of JSON. Waits if the last answer took long.

        Cancellation:
            the viewer can still be used.
        """
        await trio.sleep_until(self._rest_until)
        self._rest_until = 0.0
        perf_counter = self._system.platform.perf_counter
        began = perf_counter()
        rows: list[dict[str, Any]] = []
        nodes: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        total, searching, capped = 0, False, False
        survey = self._history.survey
        survey.advance(_SURVEY)
        if view.page != "flow":
            self._flow.close()
        if view.page == "actors" and not view.search and not view.sort:
            rows, total = self._tree(view)
            self._scan = None
        elif view.page == "overview":
            rows, total = self._sorted(survey.own, view)
            searching = not survey.complete
            worked = perf_counter() - began
            nodes = await ask_nodes(self._system, 1)
            troubles = await self._watchman.look(self._history.events(), nodes)
            more = {"troubles": [attrs.asdict(each) for each in troubles], "nodes": [_node(node) for node in nodes]}
            for name, seen in (await self._overviews(nodes, view)).items():
                rows += ({**row, "node": name} for row in seen["rows"])
                more["troubles"] += ({**trouble, "node": name} for trouble in seen.get("troubles", ()))
                total += seen["total"]
            began = perf_counter() - worked  # waiting is not work
        elif view.page == "flow":
            rows = self._flow.look(view.search.casefold())
            total = len(rows)
        elif view.page == "nodes":
            nodes = await ask_nodes(self._system, 1)
            rows, total = [_node(node) for node in nodes[view.first :][: view.count]], len(nodes)
            began = perf_counter()  # waiting for nodes is not work
        elif view.page != "none":
            scan = self._scan_for(view)
            await scan.advance()
            found, searching = scan.found, not scan.complete
            if searching:
                # The first pass does not count: a million actors take 1 s of a core, spread over 10 s.
                began = perf_counter()
            total, capped = len(found), scan.full
            if view.page == "actors":
                rows, total = self._sorted(found, view)
            elif view.page == "channels":
                rows, total, capped = self._channels(found, view, capped)
            else:
                rows = await self._reports(found[view.first :][: view.count])
                began = perf_counter()
        detail = self._detail(view.selected)
        last, news = self._recorder.after(view.after)
        if view.history:
            more["history"] = self._history.to_json(self._began)
        interval = min(_LONGEST, (perf_counter() - began) / _SHARE)
        self._rest_until = trio.current_time() + interval
        return {
            **self._summary(),
            **more,
            "page": view.page,
            "rows": rows,
            "first": view.first,
            "total": total,
            "capped": capped,
            "searching": searching,
            "detail": detail,
            "news": news,
            "last": last,
            "interval": max(interval, 0.5 if searching else _EVERY.get(view.page, 0.5)),
        }

    async def act(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare an action, or confirm the action that was prepared last.

        Args:
            members: ``act`` and ``path`` to prepare an action; ``confirm``, with the code of that answer, to carry it out.

        Raises:
            ConfigurationError: actions are not allowed, there is no such action or actor, or the code is wrong or too old.
        """
        await trio.lowlevel.checkpoint()
        if not self._actions:
            raise ConfigurationError(
                "actions are not allowed: the program has to serve its console or dashboard with actions=True"
            )
        if "confirm" in members:
            prepared, self._prepared = self._prepared, None
            if prepared is None or not prepared.is_meant_by(members["confirm"]):
                raise ConfigurationError("there is nothing to confirm: the actor has ended, or a minute has passed")
            prepared.carry_out()
            return {"done": f"{prepared.action} {printable(prepared.actor.path, _TEXT)}"}
        action, path = members.get("act"), members.get("path")
        actor = self._find(path) if isinstance(path, str) else None
        if action not in ACTIONS or actor is None:
            raise ConfigurationError("there is no such action, or the actor has ended")
        code = self._system.platform.token_bytes(16).hex()
        self._prepared = _Prepared(action, actor, code, trio.current_time() + _CONFIRM)
        supervision = self._system.observe.detail(actor).supervision
        return {"confirm": code, "act": action, "path": printable(actor.path, _TEXT), "supervision": supervision}

    def _summary(self) -> dict[str, Any]:
        system = self._system
        return {
            "system": printable(system.name),
            "phase": system.phase,
            "pid": system.platform.pid(),
            "time": trio.current_time(),
            "cpu": system.platform.process_time(),
            "statistics": attrs.asdict(system.statistics()),
            "turn_times": list(system.observe.turn_times.counts),
            "queue_times": list(system.observe.queue_times.counts),
            "stalls": list(system.observe.stalls),
            "actions": list(ACTIONS) if self._actions else [],
            "pages": self._pages(),
            **self._history.figures(),
        }

    def _pages(self) -> list[str]:
        """Return the pages that have rows, or may have."""
        survey = self._history.survey
        if not survey.complete:
            return list(PAGES)
        pages: list[str] = ["overview", "actors", "flow"]
        pages += [page for page, subjects in SUBJECTS.items() if any(survey.of(subject) for subject in subjects)]
        if survey.channels:
            pages.append("channels")
        if has_nodes(self._system):
            pages.append("nodes")
        return pages

    def _sorted(self, cells: Collection[LocalRef], view: View) -> tuple[list[dict[str, Any]], int]:
        """Return the rows of the window among these actors in the wanted order, and their number."""
        key, descending = view.sort.removeprefix("-"), view.sort.startswith("-")
        if view.search and view.page == "overview":
            text = view.search.casefold()
            kind = self._system.observe.kind
            cells = [cell for cell in cells if text in cell.path.casefold() or text in kind(cell).casefold()]
        window: Iterable[LocalRef] = cells
        if key:
            rows = {cell: Row.of(self._system.observe.actor(cell), 0) for cell in cells}
            if key in _RATES:
                rates = self._note_rates(rows)
                waits = {cell: row.depth / rates[cell] if rates[cell] else 0.0 for cell, row in rows.items()}
                figures = rates if key == "rate" else waits
                window = sorted(rows, key=lambda cell: figures[cell], reverse=descending)
            else:
                order = SORTS[key]
                window = sorted(rows, key=lambda cell: order(rows[cell]), reverse=descending)
        window = list(islice(window, view.first, view.first + view.count))
        self._known.update((cell.path, cell) for cell in window)
        return [Row.of(self._system.observe.actor(cell), 0).to_json() for cell in window], len(cells)

    def _note_rates(self, rows: Mapping[LocalRef, Row]) -> dict[LocalRef, float]:
        now, before = trio.current_time(), self._rates
        self._rates = {}
        for cell, row in rows.items():
            at, handled, rate = before.get(cell, (now, row.handled, 0.0))
            if now >= at + 0.4:
                at, handled, rate = now, row.handled, (row.handled - handled) / (now - at)
            self._rates[cell] = at, handled, rate
        return {cell: rate for cell, (_, _, rate) in self._rates.items()}

    def _channels(self, cells: Iterable[LocalRef], view: View, capped: bool) -> tuple[list[dict[str, Any]], int, bool]:
        """Return the rows of the window, a row for each end of a channel, their number, and whether there may be more."""
        rows: list[dict[str, Any]] = []
        for cell in cells:
            channels = self._system.observe.detail(cell).channels
            rows += ({"path": printable(cell.path, _TEXT), **attrs.asdict(channel)} for channel in channels)
            if len(rows) > MOST_FOUND:
                capped = True
                break
        return rows[view.first :][: view.count], len(rows), capped

    def _tree(self, view: View) -> tuple[list[dict[str, Any]], int]:
        """Return the rows in the window, and the number of all rows."""
        observe, root = self._system.observe, self._system.root
        tops = self._tops(internals=view.internals)
        hoisted = set(tops) if view.open else set()
        inner: dict[LocalRef, set[LocalRef]] = {}
        at_path: dict[str, LocalRef] = {"": root}
        for path in sorted(view.open, key=lambda path: path.count("/")):
            cell, parent = self._find(path), at_path.get(path.rpartition("/")[0])
            if cell in hoisted:
                parent = root
            if cell is not None and parent is not None:
                at_path[path] = cell
                inner.setdefault(parent, set()).add(cell)
        known = {cell.path: cell for cell in at_path.values() if cell is not root}
        rows: list[dict[str, Any]] = []
        end = view.first + view.count
        at = 0

        def show(cells: Iterator[LocalRef], level: int) -> None:
            for cell in cells:
                row = Row.of(observe.actor(cell), level)
                known[row.path] = cell
                rows.append(row.to_json())

        todo: list[tuple[LocalRef, Iterator[LocalRef], int]] = [(root, iter(tops), len(tops))]
        while todo:
            cell, children, left = todo.pop()
            special, level = inner.get(cell, set()), len(todo)
            # One by one up to the next open child. The children after the last open one are only counted.
            opened: LocalRef | None = None
            while special and left and opened is None:
                child = next(children)
                left -= 1
                if view.first <= at < end:
                    show(iter((child,)), level)
                at += 1
                if child in special:
                    special.discard(child)
                    opened = child
            if opened is not None:
                todo.append((cell, children, left))
                todo.append((opened, iter(observe.children(opened)), len(observe.children(opened))))
                continue
            show(islice(children, max(0, view.first - at), max(0, min(left, end - at))), level)
            at += left
        self._known = known
        return rows, at

    def _tops(self, *, internals: bool) -> list[LocalRef]:
        """Return the actors at the top of the tree: the program's own, also from below levada's, and then levada's if wanted."""
        observe = self._system.observe
        children = observe.children(self._system.root)
        tops = [cell for cell in children if observe.is_own(cell)]
        others = [cell for cell in children if not observe.is_own(cell)]
        if internals:
            return tops + others
        for cell in others:  # it grows meanwhile: from the top down
            for child in observe.children(cell):
                if observe.is_own(child):
                    tops.append(child)
                elif len(others) < _INTERNAL:
                    others.append(child)
        return tops

    def _find(self, path: str) -> LocalRef | None:
        cell = self._known.get(path)
        if cell is not None and cell.is_alive:
            return cell
        found = self._system.lookup(path)
        return found if isinstance(found, LocalRef) else None

    def _scan_for(self, view: View) -> Scan:
        wanted = view.page, view.search, view.internals
        if self._scan is None or self._scanned != wanted:
            self._scan, self._scanned = Scan(self._system, self._predicate(view)), wanted
            self._known = {path: cell for path, cell in self._known.items() if path == view.selected}
        return self._scan

    def _predicate(self, view: View) -> Callable[[LocalRef, str], bool]:
        observe, text = self._system.observe, view.search.casefold()
        if view.page == "actors" and not text:
            return lambda cell, path: view.internals or observe.is_own(cell)
        if view.page == "actors":
            return lambda cell, path: text in path.casefold() or text in observe.kind(cell).casefold()
        if view.page == "channels":
            return lambda cell, path: text in path.casefold() and observe.holds_channels(cell)
        subjects = SUBJECTS[view.page]
        return lambda cell, path: (
            observe.subject(cell) in subjects and (text in path.casefold() or text in observe.about(cell).casefold())
        )

    async def _reports(self, cells: Collection[LocalRef]) -> list[dict[str, Any]]:
        """Return the rows of these actors, with their own reports."""
        observe = self._system.observe
        rows = [{**Row.of(observe.actor(cell), 0).to_json(), "subject": observe.subject(cell)} for cell in cells]
        reports = await answers_of(cells, observe.report, _PATIENCE)
        for row, cell in zip(rows, cells, strict=True):
            report = reports.get(cell, f"no answer within {_PATIENCE:g} s")
            if isinstance(report, Mapping):
                row["report"] = dict(report)
            else:
                row["error"] = printable(str(report))
        self._known.update((cell.path, cell) for cell in cells)
        return rows

    def _detail(self, path: str | None) -> dict[str, Any] | None:
        cell = self._find(path) if path is not None else None
        if cell is None:
            return None
        self._known[cell.path] = cell
        row = Row.of(self._system.observe.actor(cell), 0).to_json()
        return {**row, **attrs.asdict(self._system.observe.detail(cell)), "incarnation": cell.incarnation}


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a node's snapshot that its row shows."""
    snapshot = node.get("snapshot")
    rest = {name: value for name, value in node.items() if name != "snapshot"}
    if not isinstance(snapshot, dict):
        return rest
    return {
        **rest,
        **{name: snapshot.get(name) for name in ("statistics", "phase", "cpu", "turn_times", "queue_times", "stalls")},
    }
