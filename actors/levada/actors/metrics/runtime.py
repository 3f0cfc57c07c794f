"""Figures of the runtime: actors by class, mailboxes, supervision, channels, turns."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from levada.actors.console.scan import Walk
from levada.framework import ActorSystem
from levada.framework.embedding import LocalRef
from levada.framework.metrics import OTHER, Metric, Sample, Tally
from levada.framework.observe import ClassFigures

from .journal import group_samples
from .spark import query_samples

__all__ = ["Census", "system_samples"]

logger = logging.getLogger("levada.actors.metrics")

REPORTING: Final[Mapping[str, Callable[[Mapping[str, Any]], list[Sample]]]] = {
    "journal": group_samples,
    "query": query_samples,
}
"""The samples of actors that are asked for a report, by their subject."""
MOST_REPORTING: Final = 100

_CLASS: Final = ("class",)
ACTORS = Metric("levada_actors", "gauge", "Living actors.", _CLASS)
WAITING = Metric("levada_handlers_waiting", "gauge", "Async handlers that wait; each is a trio task.", _CLASS)
DEPTH = Metric("levada_mailbox_messages", "gauge", "Messages in mailboxes.", _CLASS)
AGE = Metric(
    "levada_mailbox_oldest_seconds",
    "gauge",
    "How long the oldest message in a mailbox has waited, at most.",
    _CLASS,
    "max",
)
HANDLED = Metric("levada_messages_handled_total", "counter", "Messages that handlers have taken.", _CLASS)
FAILURES = Metric("levada_actor_failures_total", "counter", "Exceptions from handlers, hooks and tasks.", _CLASS)
RESTARTS = Metric("levada_actor_restarts_total", "counter", "Restarts by supervisors.", _CLASS)
CHANNELS = Metric("levada_channel_ends", "gauge", "Open ends of channels in fields of actors.", _CLASS)
QUEUED = Metric("levada_channel_messages", "gauge", "Messages in channels that actors receive from.", _CLASS)

SYSTEM: Final = {
    "spawned": Metric("levada_actors_spawned_total", "counter", "Actors that were started; restarts are not counted."),
    "stopped": Metric("levada_actors_stopped_total", "counter", "Actors that have ended."),
    "unsupervised": Metric("levada_unsupervised_failures_total", "counter", "Failures of actors without a supervisor."),
    "dead_letters": Metric("levada_dead_letters_total", "counter", "Messages that reached no handler."),
    "unhandled": Metric("levada_unhandled_messages_total", "counter", "Messages for which an actor has no handler."),
    "late_replies": Metric(
        "levada_late_replies_total", "counter", "Answers that came when the asker no longer waited."
    ),
    "slow_turns": Metric(
        "levada_slow_turns_total", "counter", "Turns that held up everything for longer than slow_handler."
    ),
    "workers": Metric("levada_workers", "gauge", "Tasks that run actors."),
    "ready": Metric("levada_actors_ready", "gauge", "Actors that wait for their turn."),
    "timers": Metric("levada_timers", "gauge", "Timers that are set."),
}
"""By the name of a member of `levada.framework.Statistics`."""
TURN = Metric(
    "levada_turn_seconds",
    "histogram",
    "Turns of actors, each a batch of messages: all above 0.5 ms, and one in 63 of the others.",
)
QUEUE = Metric(
    "levada_turn_wait_seconds",
    "histogram",
    "How long actors waited for their turns, of one turn in 63, and late timers.",
)
STALL = Metric(
    "levada_longest_stall_seconds",
    "gauge",
    "The longest time of the last minute for which the event loop was held up: by a turn, or as seen by a late timer.",
)
CPU = Metric("levada_process_cpu_seconds_total", "counter", "CPU time of the process.")
COMPLETE = Metric(
    "levada_scrape_complete",
    "gauge",
    "1 if this scrape went over all actors; 0 if there was no time: figures of actors are from an earlier scrape.",
)


def system_samples(system: ActorSystem, *, complete: bool) -> list[Sample]:
    """Return the figures of the system as a whole."""
    counts, observe = system.statistics(), system.observe
    return [
        *(metric.sample(getattr(counts, name)) for name, metric in SYSTEM.items()),
        TURN.sample(observe.turn_times.distribution()),
        QUEUE.sample(observe.queue_times.distribution()),
        STALL.sample(observe.stalls.longest(trio.current_time() - 60)),
        CPU.sample(system.platform.process_time()),
        COMPLETE.sample(int(complete)),
        *(FAILURES.sample(count, kind) for kind, count in observe.failures.most_common()),
        *(RESTARTS.sample(count, kind) for kind, count in observe.restarts.most_common()),
    ]


class Census:
    """One pass over all actors.

    The totals of ended actors are read at the start. An actor that ends during the pass counts with its figures at the visit, or not at
    all if it was not visited. So totals may lag for one pass, and are never too high.
    """

    def __init__(self, system: ActorSystem) -> None:
        self.tally: Tally = system.observe.ended.branch()
        """The result, complete once `advance` has returned True."""
        self.reporting: list[LocalRef] = []
        """Actors that must be asked for figures, at most `MOST_REPORTING`."""
        self._observe = system.observe
        self._failures = system.failure_log
        self._now = system.scheduler.clock()
        self._walk = Walk(system)
        self._classes: dict[str, ClassFigures] = {}
        self._handled: Counter[str] = Counter()
        for cls, count in system.observe.handled.items():
            self._handled[OTHER if cls is None else cls.__name__] += count

    def advance(self, until: float) -> bool:
        """Visit actors until `Platform.perf_counter` reaches `until`; return whether all have been visited."""
        if not self._walk.advance(until, self._visit):
            return False
        self.tally.add(class_samples(self._classes, self._handled))
        return True

    def _visit(self, cell: LocalRef, parent: str) -> None:
        if not self._observe.count(cell, self._classes, self._now):
            return
        try:
            self.tally.add(self._observe.metrics(cell))
        except Exception as error:  # noqa: BLE001 - the failure log has it
            kind = self._observe.kind(cell)
            self._failures.log(logger, error, "%s.metrics failed", kind, actor=cell.path, event="metrics_failed")
        if self._observe.subject(cell) in REPORTING and len(self.reporting) < MOST_REPORTING:
            self.reporting.append(cell)


def class_samples(classes: Mapping[str, ClassFigures], handled: dict[str, int]) -> list[Sample]:
    """Return the samples of actor classes, the classes with the most actors first.

    Args:
        classes: the figures of living actors.
        handled: the messages that ended actors have handled, by class; entries of `classes` are removed from it.
    """
    samples: list[Sample] = []
    for kind, figures in sorted(classes.items(), key=lambda item: -item[1].actors):
        samples += (
            (ACTORS, figures.actors, (kind,)),
            (WAITING, figures.waiting, (kind,)),
            (DEPTH, figures.depth, (kind,)),
            (AGE, figures.age, (kind,)),
            (HANDLED, figures.handled + handled.pop(kind, 0), (kind,)),
            (CHANNELS, figures.channels, (kind,)),
            (QUEUED, figures.queued, (kind,)),
        )
    return samples + [(HANDLED, count, (kind,)) for kind, count in handled.items()]
