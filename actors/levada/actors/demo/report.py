"""The report: one HTML file with charts in it, which needs nothing else and runs no scripts.

A chart's shapes are SVG and stretch with the page; its text is HTML beside them and keeps its size, so it can be read on a phone, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import attrs

from .known import VERIFIED
from .live import Results

__all__ = ["Facts", "report"]

_STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2733; --faint: #566575; --line: #d5dde5; --paper: #fff; --a: #2f7dc4; --b: #c9780f; --c: #c8403a; --good: #217a3f
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4eaf0; --faint: #a3b1bf; --line: #37434f; --paper: #161c22; --a: #5aa5e8; --b: #e0953a; --c: #f07670; --good: #62c683 }
}
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em; margin-bottom: 0 } h2 { font-size: 1.15em; margin: 2em 0 .3em }
p { margin: .3em 0; color: var(--faint) } p.good { color: var(--good) } p.bad { color: var(--c) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: .2em 1em .2em 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere }
td.n, th.n, td.w, th.w { white-space: nowrap; overflow-wrap: normal } td.n, th.n { text-align: right; padding-right: 0; padding-left: 1em }
.a { fill: var(--a); background: var(--a) } .b { fill: var(--b); background: var(--b) } .c { fill: var(--c); background: var(--c) }
.chart { font-size: 13px; color: var(--faint); font-variant-numeric: tabular-nums; margin: .6em 0 }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.4em; margin-bottom: .4em }
.legend span { display: inline-flex; align-items: center; gap: .5em } .legend i { width: .8em; height: .8em; border-radius: 2px }
.plot { position: relative; height: 200px; margin: .7em 0 0 4.5em }
.plot svg { position: absolute; width: 100%; height: 100%; overflow: visible }
.tick { position: absolute; left: 0; right: 0; border-top: 1px solid var(--line) }
.tick span { position: absolute; right: 100%; transform: translateY(-50%); padding-right: .6em; white-space: nowrap }
.under { display: flex; justify-content: space-between; margin: .3em 0 0 4.5em; gap: 1em } .under span { white-space: nowrap }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .25em .8em; align-items: center }
.bars span:nth-child(3n) { text-align: right } .bars i { display: block; height: 1em; border-radius: 2px; min-width: 1px }
@media (max-width: 600px) { .wide { display: none } }
@media (max-width: 420px) { .middle { display: none } }
"""


@attrs.frozen(kw_only=True)
class Facts:
    """The facts of a run, besides its results."""

    seconds: float
    batches: int
    """Micro-batches of all queries."""
    shipped: int
    """Records."""
    files: Sequence[str]
    mistakes: Sequence[str] | None
    """Differences from the known counts; None: there are none for these files."""


def report(results: Results, facts: Facts) -> str:
    """Write the report; the text of an HTML file."""
    rates = sorted(results.rates.values(), key=lambda row: row["start"])
    attacks = sorted(results.attacks.values(), key=lambda row: -row["failures"])
    anomalies = sorted(results.anomalies.values(), key=lambda row: -row["score"])
    parts = [
        "<h1>What the logs say</h1>",
        f"<p>{facts.shipped:,} records of {escape(', '.join(facts.files))}; {facts.batches} micro-batches in {facts.seconds:.1f} s.</p>",
        *_verdict(facts.mistakes),
    ]
    if results.count("access", "lines"):
        statuses, days = results.by_key("access", "status"), results.by_key("access", "day")
        parts += [
            "<h2>Web server: requests by hour</h2>",
            "<p>An hour is here once the watermark is past it, the last one is not.</p>",
            _columns(
                [(_hour(row["start"]), _stack(row)) for row in rates],
                "answered",
                "client errors (4xx)",
                "server errors (5xx)",
            ),
            "<h2>Web server: share of errors by hour</h2>",
            _columns([(_hour(row["start"]), (0.0, _errors(row), 0.0)) for row in rates], unit=" %"),
            "<h2>Web server: answers by status</h2>",
            _bars(statuses),
            "<h2>Web server: lines by day</h2>",
            _bars(dict(sorted(days.items()))),
            *_list("Web server: damaged lines", results.by_key("access", "damaged")),
            *_list("Web server: what is asked for most", results.by_key("access", "template")),
            *_list("Web server: clients with suspicious requests", results.by_key("access", "suspicious"), "points"),
        ]
    if results.count("auth", "lines"):
        parts += [
            "<h2>Log-ins: attacks by guessing passwords</h2>",
            "<p>Sessions of failed log-ins from one address, with no ten minutes between two of them.</p>",
            _table(
                ["!address", "!from", "!until", "#users", "#failures"],
                ([a["address"], _hour(a["start"]), _hour(a["end"]), a["users"], a["failures"]] for a in attacks[:15]),
            ),
            "<h2>Log-ins: lines by day</h2>",
            _columns([(day, (float(count), 0.0, 0.0)) for day, count in sorted(results.by_key("auth", "day").items())]),
            "<h2>Log-ins: hours that stand out</h2>",
            "<p>Kinds of lines that came far more often than in the hours before; the score is in standard deviations.</p>",
            _table(
                ["!hour", "line", "#expected", "#came", "#score"],
                (
                    [_hour(a["start"]), a["template"], f"{a['expected']:.1f}", a["count"], f"{a['score']:.1f}"]
                    for a in anomalies[:15]
                ),
            ),
            *_list("Log-ins: most frequent kinds of lines", results.by_key("auth", "template")),
        ]
    if results.count("kafka", "lines"):
        traces = results.count("kafka", "traces")
        parts += [
            "<h2>Kafka: events by level</h2>",
            f"<p>{results.count('kafka', 'records'):,} events of {results.count('kafka', 'lines'):,} lines; {traces} have a stack trace.</p>",
            _bars(results.by_key("kafka", "level")),
            *_list("Kafka: most frequent events", results.by_key("kafka", "template")),
        ]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>What the logs say</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def _verdict(mistakes: Sequence[str] | None) -> list[str]:
    if mistakes is None:
        return []
    if not mistakes:
        return [f'<p class="good">Verified: {VERIFIED}.</p>']
    return [f'<p class="bad">Wrong: {escape(mistake)}</p>' for mistake in mistakes]


def _stack(row: Mapping[str, int]) -> tuple[float, float, float]:
    client, server = row["client_errors"], row["server_errors"]
    return float(row["requests"] - client - server), float(client), float(server)


def _errors(row: Mapping[str, int]) -> float:
    return 100 * (row["client_errors"] + row["server_errors"]) / max(row["requests"], 1)


def _hour(moment: str) -> str:
    return moment[:16].replace("T", " ")


def _columns(items: Sequence[tuple[str, tuple[float, float, float]]], *legend: str, unit: str = "") -> str:
    """Draw vertical columns of up to three parts each; the legend names the parts, from the bottom."""
    if not items:
        return "<p>Nothing yet.</p>"
    step = _tick_step(max(sum(parts) for _, parts in items))
    steps = max(1, math.ceil(max(sum(parts) for _, parts in items) / step - 1e-9))
    drawn = []
    for at, (label, parts) in enumerate(items):
        y, rectangles = 100.0, []
        for kind, part in zip("abc", parts, strict=True):
            height = part / (steps * step) * 100
            y -= height
            if height:
                rectangles.append(
                    f'<rect class="{kind}" x="{at + 0.08:.2f}" y="{y:.2f}" width=".84" height="{height:.2f}"/>'
                )
        drawn.append(f"<g><title>{escape(label)}: {sum(parts):,.6g}{unit}</title>{''.join(rectangles)}</g>")
    ticks = "".join(
        f'<div class="tick" style="bottom:{100 * n / steps:.2f}%"><span>{n * step:,.6g}{unit}</span></div>'
        for n in range(steps + 1)
    )
    # At equal distances from the first to the last; fewer on a narrow page.
    shown = sorted({round(n * (len(items) - 1) / 4) for n in range(5)})
    marks = dict.fromkeys(shown[1:-1], " class=wide") | {shown[len(shown) // 2]: " class=middle"}
    marks |= dict.fromkeys((shown[0], shown[-1]), "")
    under = "".join(f"<span{marks[n]}>{escape(items[n][0])}</span>" for n in shown)
    named = "".join(
        f'<span><i class="{kind}"></i>{escape(name)}</span>' for kind, name in zip("abc", legend, strict=False)
    )
    return (
        f'<div class="chart">{f"<div class=legend>{named}</div>" if named else ""}<div class="plot">{ticks}'
        f'<svg viewBox="0 0 {len(items)} 100" preserveAspectRatio="none" role="img">{"".join(drawn)}</svg></div>'
        f'<div class="under">{under}</div></div>'
    )


def _tick_step(most: float) -> float:
    """Return the distance between the ticks of a scale: 1, 2 or 5 times a power of ten, with at most five steps up to `most`.

    Example:
        >>> [_tick_step(most) for most in (0.4, 3, 136, 1000, 100)]
        [0.1, 1.0, 50.0, 200.0, 20.0]
    """
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(round(times * power, 12) for times in (1, 2, 5, 10) if most <= 5 * times * power * (1 + 1e-9))


def _bars(counts: Mapping[str, int]) -> str:
    """Draw horizontal bars."""
    most = max(counts.values(), default=1)
    rows = (
        f'<span>{escape(key)}</span><i class="a" style="width:{100 * count / most:.2f}%"></i><span>{count:,}</span>'
        for key, count in counts.items()
    )
    return f'<div class="chart bars">{"".join(rows)}</div>'


def _list(title: str, counts: Mapping[str, int], what: str = "times") -> list[str]:
    rows = ([key, count] for key, count in list(counts.items())[:12])
    return [f"<h2>{escape(title)}</h2>", _table([f"{len(counts):,} of them", f"#{what}"], rows)] if counts else []


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; a heading with ``#`` in front is for numbers, with ``!`` for text that must not wrap."""
    marks = [{"#": ' class="n"', "!": ' class="w"'}.get(heading[0], "") for heading in headings]
    head = "".join(
        f"<th{mark}>{escape(heading.lstrip('#!'))}</th>" for mark, heading in zip(marks, headings, strict=True)
    )
    lines = []
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else escape(str(cell)) for cell in row)
        lines.append(
            "<tr>" + "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, cells, strict=True)) + "</tr>"
        )
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
