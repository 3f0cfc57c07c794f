"""Figures that actors tell of themselves, for a monitoring system.

Nothing is collected until something asks.  An actor says what it has counted by `Actor.metrics`, as samples of metrics that its module
declares:

    >>> from levada.framework import Actor, handles
    >>> from levada.framework.metrics import Metric, Sample
    >>> ORDERS = Metric("shop_orders_total", "counter", "Orders that were taken.", ("kind",))
    >>> class Desk(Actor[str]):
    ...     books: int = 0
    ...     @handles
    ...     def take(self, book: str) -> None:
    ...         self.books += 1
    ...     def metrics(self) -> list[Sample]:
    ...         return [ORDERS.sample(self.books, "book")]

Samples of the same metric with the same labels are added up, whichever actors they come from.  When an actor ends or restarts, the runtime
takes its counters and distributions once more, and adds them from then on (`Tally`), so a total never goes back.

A metric has at most `MOST_SERIES` combinations of label values: the first ones of the process.  All others together are ``other``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from numbers import Real
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from .errors import ConfigurationError
from .text import printable

__all__ = ["MOST_SERIES", "OTHER", "Distribution", "Labels", "Measured", "Metric", "Sample", "Series", "Tally", "Value"]

MOST_SERIES: Final = 50
"""Combinations of label values that a metric has, beside ``other``."""
OTHER: Final = "other"
"""The value of all labels of the combinations that are too many."""
_LONGEST: Final = 100
"""Characters of a label value."""

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = tuple[str, ...]
"""Names of labels, or their values in the same order."""

_COMBINE: Final[Mapping[str, Callable[[float, float], float]]] = {"sum": operator.add, "max": max, "min": min}
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*")


@attrs.frozen
class Distribution:
    """How often values fell into buckets: the value of a histogram.

    Raises:
        ConfigurationError: the bounds do not grow, or there is not one number more than bounds.
    """

    bounds: tuple[float, ...]
    """Upper bounds of all buckets but the last, which has none."""
    counts: tuple[int, ...]
    """Values in each bucket alone: one number more than there are bounds."""
    total: float
    """The sum of the values."""

    def __attrs_post_init__(self) -> None:
        if len(self.counts) != len(self.bounds) + 1 or any(one >= other for one, other in pairwise(self.bounds)):
            raise ConfigurationError(f"wanted growing bounds, and one count more than bounds: {self}")

    def __add__(self, other: Distribution) -> Distribution:
        """Add what another one with the same bounds has counted.

        Raises:
            ConfigurationError: the bounds differ.
        """
        if self.bounds != other.bounds:
            raise ConfigurationError(f"a histogram has the same bounds in all samples: {self.bounds}, {other.bounds}")
        counts = tuple(one + more for one, more in zip(self.counts, other.counts, strict=True))
        return Distribution(self.bounds, counts, self.total + other.total)


Value: TypeAlias = float | Distribution
"""A number, or for a histogram a `Distribution`."""


@attrs.frozen(cache_hash=True)
class Metric:
    """Declares a metric, once for each name, as a constant of a module.

    Raises:
        ConfigurationError: a name breaks the rules of Prometheus.
    """

    name: str
    """With its unit (``_seconds``, ``_bytes``); of counters, and of no others, ending in ``_total``."""
    kind: Kind
    """A counter only grows, a gauge is as it is now, and a histogram's values are `Distribution`."""
    help: str
    """A sentence."""
    labels: Labels = ()
    """Names of the labels. A value is a class, a protocol, a queue: never an id, an address or a user, of which there is no end."""
    combine: Literal["sum", "max", "min"] = "sum"
    """What to make of the gauges of several actors."""

    def __attrs_post_init__(self) -> None:
        for name in (self.name, *self.labels):
            if not _NAME.fullmatch(name) or name == "le" or name.startswith("__"):
                raise ConfigurationError(
                    f"{name!r} is no name of a metric or label: lower-case letters, digits and '_'"
                )
        if self.name.endswith("_total") != (self.kind == "counter"):
            raise ConfigurationError(f"{self.name} is a {self.kind}: names of counters end in _total, and no others do")
        if not self.help:
            raise ConfigurationError(f"{self.name} needs a sentence that explains it")

    def sample(self, value: Value, *labels: str) -> Sample:
        """Say what the value is now, for `labels` in the order of the declaration.

        Raises:
            ConfigurationError: there are too few or too many labels, a label is not text, or the value does not fit the kind of the metric.
        """
        if len(labels) != len(self.labels) or not all(isinstance(label, str) for label in labels):
            raise ConfigurationError(f"{self.name} has the labels {self.labels}, and this is {labels}")
        if not isinstance(value, Distribution if self.kind == "histogram" else Real):
            wanted = "a Distribution" if self.kind == "histogram" else "a number"
            raise ConfigurationError(f"the {self.kind} {self.name} is {value!r}, wanted {wanted}")
        return self, value, labels


Sample: TypeAlias = tuple[Metric, Value, Labels]
"""A value with its labels; `Metric.sample` makes it."""
Series: TypeAlias = Mapping[Metric, Mapping[Labels, Value]]
"""Values by metric and labels."""


@runtime_checkable
class Measured(Protocol):
    """An object with figures: an actor that overrides `Actor.metrics`, or anything that is added to an exporter."""

    def metrics(self) -> Iterable[Sample]:
        """Return the samples of this moment. Called in the system's thread; must be quick."""
        ...


class Tally:
    """Sums of samples."""

    def __init__(self) -> None:
        self.series: dict[Metric, dict[Labels, Value]] = {}
        """The sums."""
        self._shown: dict[Metric, dict[Labels, Labels]] = {}
        """Which labels stand for which ones."""
        self._declared: dict[str, Metric] = {}

    def branch(self) -> Tally:
        """Return a tally that begins with these sums. Both have the same series."""
        made = Tally()
        made.series = {metric: dict(values) for metric, values in self.series.items()}
        made._shown, made._declared = self._shown, self._declared
        return made

    def add(self, samples: Iterable[Sample], *, lasting: bool = False) -> None:
        """Add samples; `lasting`: only what stays true when their actor has ended, which gauges do not.

        Raises:
            ConfigurationError: another metric has the same name.
        """
        for metric, value, labels in samples:
            if lasting and metric.kind == "gauge":
                continue
            values = self.series.get(metric)
            if values is None:
                values = self.series[metric] = {}
            if labels:
                labels = self._admitted(metric, labels)
            before = values.get(labels)
            if before is None:
                self._declare(metric)
                values[labels] = value
            elif isinstance(before, Distribution) or isinstance(value, Distribution):
                assert isinstance(before, Distribution)
                assert isinstance(value, Distribution)
                values[labels] = before + value
            else:
                values[labels] = _COMBINE[metric.combine](before, value)

    def _declare(self, metric: Metric) -> None:
        known = self._declared.setdefault(metric.name, metric)
        if known != metric:
            del self.series[metric]
            raise ConfigurationError(f"there are two metrics named {metric.name}: {known} and {metric}")

    def _admitted(self, metric: Metric, labels: Labels) -> Labels:
        shown = self._shown.setdefault(metric, {})
        found = shown.get(labels)
        if found is None:
            if len(shown) >= MOST_SERIES:
                return (OTHER,) * len(labels)
            found = shown[labels] = tuple(printable(label, _LONGEST) for label in labels)
        return found
