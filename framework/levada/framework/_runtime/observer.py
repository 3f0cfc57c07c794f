"""Observation of a running system: the tree of actors, how long turns take, which actor waits for which.

Nothing is collected per message.  One turn in 63 goes into the histograms, and each that is longer than a slice; the clock is read once per
turn anyway.

Private fields used here: ``Cell._actor``, ``Cell._extras``, ``Cell._handled``, ``Cell._idle``, ``Cell._parent``,
``Cell._since``, ``Cell._worker``, ``Actor._has_about``, ``Actor._has_metrics``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import trio

from levada.framework.errors import ActorError
from levada.framework.events import SlowHandler
from levada.framework.metrics import OTHER, Sample, Tally
from levada.framework.observe import ActorDetail, ActorInfo, ChannelInfo, ClassFigures, Histogram, Stalls
from levada.framework.supervision import RestartPolicy

from .ask import content_of
from .phase import PAUSED, RUNNING
from .remains import open_handles
from .scheduler import EVERY, SLICE

if TYPE_CHECKING:
    from .cell import Cell
    from .contract import System

__all__ = ["Observer"]

logger = logging.getLogger("levada.framework.observe")

_FLOOD = 1_000_000
_MOST = 100
_MOST_FLOWS = 10_000
"""Most pairs of actors in `Observer.flows`."""
_CONTAINERS = (list, tuple, set, frozenset)
_OWN_SUBJECTS = frozenset({"journal", "query", "shard"})
"""What actors of levada are about that a program starts for itself: its journals, queries and durable entities."""
_MOST_CLASSES = 1000
"""Most classes that are counted by name."""


class Observer:
    """Histograms and snapshots of a system: ``system.observe``."""

    def __init__(self, system: System, slow_handler: float) -> None:
        self._system = system
        self._slow_handler = slow_handler
        self._tells = 0
        self._told_at = -1
        self.turn_times = Histogram()
        """Seconds per turn of an actor (a batch of its messages): of each turn longer than a slice, and of one in 63 of the others, for which it
        stands."""
        self.queue_times = Histogram()
        """Seconds that actors waited for their turns: of one turn in 63, for which it stands, and of timers that were late by more than a slice."""
        self.stalls = Stalls()
        """How long turns longer than a slice took, and by how much timers were late."""
        self.flows: Counter[tuple[Cell, Cell]] | None = None
        """While this is a counter, sampled turns are asked for the actors that they made ready: sender, receiver. A sample stands for 63."""
        self.ended = Tally()
        """The totals (`Actor.metrics`) of actors that have ended or restarted."""
        self.failures: Counter[str] = Counter()
        """Failures by class."""
        self.restarts: Counter[str] = Counter()
        """Restarts by class."""

    @property
    def handled(self) -> Mapping[type | None, int]:
        """Messages handled by actors that have ended, by class; ``None`` stands for classes that had no room."""
        return self._system.scheduler.ended

    def keep(self, actor: Any) -> None:
        """Keep the totals of an actor object that ends."""
        try:
            self.ended.add(actor.metrics(), lasting=True)
        except Exception as error:
            text = "%s.metrics failed at its end"
            self._system.failure_log.log(logger, error, text, type(actor).__name__, event="metrics_failed")
        except BaseException as error:  # SystemExit, for example: the block raises it, as from a hook
            self._system.crash(error)

    def count_failure(self, cell: Cell) -> None:
        """Count a failure for its class."""
        self.failures[self.class_name(self.kind(cell), self.failures)] += 1

    def count_restart(self, cell: Cell) -> None:
        """Count a restart for its class."""
        self.restarts[self.class_name(self.kind(cell), self.restarts)] += 1

    @staticmethod
    def class_name(kind: str, known: Collection[str]) -> str:
        """Return the name to count by. Names are limited, since a program may make new classes without end."""
        return kind if kind in known or len(known) < _MOST_CLASSES else OTHER

    def sample(self, cell: Cell, now: float) -> None:
        """Add the turn that has just ended to the histograms."""
        if cell._parent is None:
            return  # signals of the runtime, which wait for no turn
        scheduler = self._system.scheduler
        self.turn_times.add(max(0.0, now - scheduler.turn_began), EVERY)
        self.queue_times.add(max(0.0, scheduler.turn_began - cell._since), EVERY)
        if self.flows is not None:
            for other in islice(reversed(scheduler.ready), _MOST):
                if other._since != scheduler.turn_began:
                    break  # it was ready before this turn
                if other is not cell and len(self.flows) < _MOST_FLOWS:
                    self.flows[cell, other] += EVERY

    def late(self, seconds: float) -> None:
        """Record that a timer was late."""
        if seconds > SLICE:
            self.queue_times.add(seconds)
            self.stalls.add(trio.current_time(), seconds)

    def took_long(self, cell: Cell, message: Any, seconds: float, count: int) -> None:
        """Count a turn that took longer than a slice; log and publish it if it took longer than ``slow_handler``."""
        self.stalls.add(trio.current_time(), seconds)
        if cell._parent is None:
            return
        self.turn_times.add(seconds)
        if seconds < self._slow_handler:
            return
        self._system.counters.slow_turns += 1
        kind = type(content_of(message))
        logger.warning(
            "%s held everything up for %.3f s with %d message%s, last %s (%s)",
            cell.path,
            seconds,
            count,
            "" if count == 1 else "s",
            kind.__name__,
            "use @blocking, or await something" if self.is_own(cell) else _OF_LEVADA,
            extra={"actor": cell.path, "event": "slow_handler"},
        )
        if self._system.events.wants(SlowHandler):
            self._system.events.publish(SlowHandler(cell, kind, seconds, count))

    def count_tell(self, cell: Cell) -> None:
        """In strict mode, refuse a loop of tells that never lets a receiver run."""
        turns = self._system.scheduler.slices
        if turns != self._told_at:
            self._told_at, self._tells = turns, 0
        self._tells += 1
        if self._tells > _FLOOD:
            raise ActorError(
                f"{_FLOOD} tells (the last to {cell.path}) and no actor had a turn; use send()", actor=cell.path
            )

    def tree(self, *, limit: int | None = None) -> ActorInfo:
        """Take a snapshot of all actors, the root first; nothing else runs meanwhile (about 3 µs for each actor).

        Args:
            limit: the most actors in the snapshot. Actors near the root come first; `ActorInfo.hidden` counts the others.
        """
        root = self._system.root
        now = self._system.scheduler.clock()
        # Children before parents, without recursion, because trees may be deep.
        order = [root]
        shown: list[int] = []
        for cell in order:
            before = len(order)
            if cell._extras is not None and cell._extras.children is not None:
                order.extend(islice(cell._extras.children, None if limit is None else max(0, limit - before)))
            shown.append(len(order) - before)
        infos: dict[Cell, ActorInfo] = {}
        for cell, count in zip(reversed(order), reversed(shown), strict=True):
            extras = cell._extras
            children = extras.children if extras is not None and extras.children is not None else ()
            taken = tuple(infos.pop(child) for child in islice(children, count))
            infos[cell] = self._info(cell, now, taken, len(children) - count)
        return infos[root]

    def actor(self, cell: Cell) -> ActorInfo:
        """Take a snapshot of one actor (3 µs), without its children: `ActorInfo.hidden` counts them."""
        return self._info(cell, self._system.scheduler.clock(), (), len(self.children(cell)))

    def children(self, cell: Cell) -> Collection[Cell]:
        """Return the living children in order of start; they change as soon as other code runs."""
        extras = cell._extras
        return () if extras is None or extras.children is None else extras.children.keys()

    def detail(self, cell: Cell) -> ActorDetail:
        """Return more about one living actor. The cost grows with its fields, so this is for one actor at a time."""
        extras, actor = cell._extras, cell._actor
        handles = open_handles(actor) if actor is not None else []
        due = extras.ending.due if extras is not None and extras.ending is not None else None
        return ActorDetail(
            supervision=_supervision(cell),
            capacity=cell.capacity,
            links=tuple(other.path for other in islice(extras.links or (), _MOST)) if extras is not None else (),
            watchers=_watchers(cell),
            channels=tuple(_channel(handle) for handle in islice(handles, _MOST)),
            restarts_in=None if due is None else max(0.0, due - trio.current_time()),
        )

    def holds_channels(self, cell: Cell) -> bool:
        """Whether the actor has an open end of a channel in a field."""
        return cell._actor is not None and bool(open_handles(cell._actor))

    def count(self, cell: Cell, classes: dict[str, ClassFigures], now: float) -> bool:
        """Add a living actor to the figures of its class (about 1 µs, more with many fields).

        Returns:
            Whether the actor has more to tell: `metrics`, or a `report`.
        """
        actor = cell._actor
        kind = type(actor).__name__
        figures = classes.get(kind)
        if figures is None:
            kind = self.class_name(kind, classes)
            figures = classes.setdefault(kind, ClassFigures())
        figures.actors += 1
        figures.handled += cell._handled
        figures.waiting += cell._worker is not None
        depth = cell.depth()
        if depth:
            figures.depth += depth
            if cell.phase is RUNNING:
                figures.age = max(figures.age, now - cell._since)
        if actor is None:
            return False
        for handle in open_handles(actor):
            figures.channels += 1
            figures.queued += handle.queued if hasattr(handle, "receive") else 0
        tells_more: bool = actor._has_metrics or actor._has_about
        return tells_more

    def metrics(self, cell: Cell) -> Iterable[Sample]:
        """Return `Actor.metrics` of a living actor; errors of the method are raised."""
        actor = cell._actor
        samples: Iterable[Sample] = actor.metrics() if actor is not None else ()
        return samples

    def glance(self, cell: Cell) -> tuple[int, int, int]:
        """Return how many messages an actor has in its mailbox and has handled, and how often it was restarted (0.3 µs)."""
        return cell.depth(), cell._handled, cell._extras.restarts if cell._extras is not None else 0

    def knows(self, cell: Cell) -> list[Cell]:
        """Return the actors of this system whose refs an actor has in its fields, also in lists, sets and dicts, a hundred at most."""
        found: list[Cell] = []
        for value in vars(cell._actor).values() if cell._actor is not None else ():
            inside = (
                value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else (value,)
            )
            found += (each for each in islice(inside, _MOST) if isinstance(each, type(cell)))
        return [each for each in found[:_MOST] if each.is_alive]

    def is_own(self, cell: Cell) -> bool:
        """Return `ActorInfo.own`."""
        return cell._actor is not None and _is_own(type(cell._actor))

    def kind(self, cell: Cell) -> str:
        """Return the name of the actor's class."""
        return type(cell._actor).__name__

    def about(self, cell: Cell) -> str:
        """Return `ActorInfo.about`."""
        actor = cell._actor
        return actor.about if actor is not None and actor._has_about else ""

    def subject(self, cell: Cell) -> str:
        """Return `levada.framework.embedding.DescribedActor.subject`; empty for other actors."""
        actor = cell._actor
        return actor.subject if actor is not None and actor._has_about else ""

    async def report(self, cell: Cell) -> Mapping[str, object]:
        """Return `levada.framework.embedding.DescribedActor.report`; empty for other actors. Errors of the method are raised."""
        actor = cell._actor
        return await actor.report() if actor is not None and actor._has_about else {}

    def _info(self, cell: Cell, now: float, children: tuple[ActorInfo, ...], hidden: int) -> ActorInfo:
        worker = cell._worker
        extras, actor = cell._extras, cell._actor
        depth = cell.depth()
        if worker is not None:
            state = "waiting"
        elif cell.phase is PAUSED:
            ending = extras.ending if extras is not None else None
            state = "restarting" if ending is not None and ending.restart else "stopping"
        else:
            state = "idle" if cell._idle else "ready"
        return ActorInfo(
            path=cell.path,
            kind=type(actor).__name__,
            state=state,
            depth=depth,
            age=max(0.0, now - cell._since) if depth and cell.phase is RUNNING else 0.0,
            handled=cell._handled,
            restarts=extras.restarts if extras is not None else 0,
            handler=worker.coroutine.__qualname__ if worker is not None else None,
            where=_where(worker.task) if worker is not None else None,
            waits_for=tuple(edge.target.path for edge in worker.waits) if worker is not None else (),
            children=children,
            hidden=hidden,
            about=self.about(cell),
            own=_is_own(type(actor)),
            window=actor.window if actor is not None and actor._has_about else None,
        )

    def waits(self) -> list[tuple[str, str]]:
        """List which actor waits for which, as pairs of paths."""
        return self._system.waits.edges()


_OF_LEVADA: Final = "an actor of levada: the machine is busy, or a function of yours that it calls"


def _is_own(kind: type) -> bool:
    module = kind.__module__
    if not module.startswith("levada.") or module.startswith("levada.actors.demo."):
        return True
    return getattr(kind, "subject", "") in _OWN_SUBJECTS


def _where(task: Any) -> str | None:
    found = None
    for frame, line in task.iter_await_frames():
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(("trio.", "levada.framework.")):
            found = f"{PurePath(frame.f_code.co_filename).name}:{line}"
    return found


def _watchers(cell: Cell) -> int:
    """Count the watchers of an actor, and the tasks that wait for its end."""
    extras = cell._extras
    if extras is None:
        return 0
    return len(extras.watchers or ()) + (0 if extras.ended is None else extras.ended.statistics().tasks_waiting)


def _supervision(cell: Cell) -> str:
    supervised = cell._extras.supervised if cell._extras is not None else None
    if supervised is None:
        return "stop"
    policy = supervised.policy
    if not isinstance(policy, RestartPolicy):
        return policy
    return f"restart ({policy.kind}, {policy.max} in {policy.within:g} s)"


def _channel(handle: Any) -> ChannelInfo:
    item = handle.item_type
    return ChannelInfo(
        name=handle.name,
        end=type(handle).__name__,
        item=getattr(item, "__name__", str(item)),
        mode=handle.mode.value,
        queued=handle.queued,
        window=handle.window,
    )
