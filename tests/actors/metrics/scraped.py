"""What a scrape said, read by the parser of prometheus-client and held to the rules of Prometheus."""

from __future__ import annotations

import re
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from levada.actors.metrics import Metrics, render

Found = dict[tuple[str, ...], float]
"""Values by the name of the sample and its labels, in order of their names."""


def read(text: str) -> Found:
    """Check a scrape as ``promtool check metrics`` does, and return its values."""
    parse: Any = open_metrics if text.endswith("# EOF\n") else prometheus
    families = list(parse(text))
    assert len({family.name for family in families}) == len(families)
    found: Found = {}
    for family in families:
        check(family)
        for sample in family.samples:
            key = (sample.name, *(sample.labels[name] for name in sorted(sample.labels) if name != "le"))
            if sample.name.endswith("_bucket"):
                key = (*key, sample.labels["le"])
            assert key not in found
            found[key] = sample.value
    return found


def check(family: Any) -> None:
    assert family.type in ("counter", "gauge", "histogram"), family
    assert family.documentation.endswith("."), family
    if not family.name.startswith("levada_"):
        return  # a protocol or a program has named it
    assert re.fullmatch(r"levada_[a-z]+(_[a-z]+)*", family.name)
    assert not re.search(r"(^|_)(ms|us|ns|milliseconds|minutes|octets|kb|mb|percent)(_|$)", family.name), family.name
    for sample in family.samples:
        assert sample.name.endswith("_total") == (family.type == "counter"), sample
        assert all(re.fullmatch(r"[a-z]+|le", label) for label in sample.labels), sample


async def scrape(metrics: Metrics, accept: str = "") -> Found:
    _, body = await render(await metrics.collect(), accept)
    return read(body.decode())


def part(found: Found, *prefixes: str) -> Found:
    """Leave the samples whose names begin so."""
    return {key: value for key, value in found.items() if key[0].startswith(prefixes)}
