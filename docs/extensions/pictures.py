"""Pictures as part of their pages, so that they are dark when the page is: drawn by svgbob from text, from SVG files, and plots of tables."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from sphinxcontrib.svgbob.directive import SvgbobDirective

UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
LEFT, WIDTH, ROW = 230, 720, 26
"""Pixels of a plot: where its axis begins, where it ends, and the height of a row."""


class Drawing(SvgbobDirective):
    """Characters that svgbob turns into a picture; the option ``alt`` says what it shows to people who cannot see it."""

    option_spec = dict(SvgbobDirective.option_spec or {}, alt=directives.unchanged_required)  # noqa: RUF012

    def run(self) -> list[nodes.Node]:  # noqa: D102
        if "alt" not in self.options:
            raise self.error("a drawing needs the option alt: what it shows")
        found: list[nodes.Node] = super().run()
        return found


class Plot(SphinxDirective):
    """Values of a table that ``levada bench`` has printed, on a logarithmic axis; the page shows the table too.

    The argument is the beginning of the table's first line. Its columns are named by the option ``columns``, its rows by the content, a
    line each.
    """

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {"alt": directives.unchanged_required, "columns": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:  # noqa: D102
        page = Path(self.env.doc2path(self.env.docname)).read_text("utf-8")
        table = re.search(rf"^```\n({re.escape(self.arguments[0])}.*?)^```", page, re.MULTILINE | re.DOTALL)
        if table is None:
            raise self.error(f"no table of this page begins with {self.arguments[0]!r}")
        columns = [each.strip() for each in self.options["columns"].split(",")]
        rows = {row: read_row(table[1].splitlines(), row, columns) for row in self.content}
        svg = draw_plot(columns, rows)
        return [nodes.raw("", in_page(svg, self.options["alt"]), format="html")]


def read_row(table: list[str], row: str, columns: list[str]) -> dict[str, tuple[str, float]]:
    """Return the texts and values of a row by column; columns are aligned to the right."""
    line = next((line for line in table if line.startswith(f"{row}  ")), None)
    if line is None:
        raise ExtensionError(f"the table has no row {row!r}")
    found = {}
    for column in columns:
        end = table[0].index(column) + len(column)
        text = re.split(r"\s{2,}", line[:end])[-1]
        value = re.fullmatch(r"([\d.,]+) ?(ns|µs|ms|s|)", text)
        if value:
            found[column] = text, float(value[1].replace(",", "")) * UNITS[value[2]]
    return found


def draw_plot(columns: list[str], rows: dict[str, dict[str, tuple[str, float]]]) -> str:
    """Draw a line for each row and a point for each value; a point tells its value when the mouse rests on it."""
    values = [value for row in rows.values() for _, value in row.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    top, bottom = 34, 34 + ROW * len(rows)

    def place(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 20) * (math.log10(value) - low) / (high - low), 1)

    parts = []
    for number, column in enumerate(columns):
        x = LEFT + number * 84
        parts.append(
            f'<circle class="series{number}" cx="{x}" cy="12" r="5"/><text x="{x + 9}" y="16">{column.split()[0]}</text>'
        )
    times = any(re.search(r"s$", text) for row in rows.values() for text, _ in row.values())
    for power in range(low, high + 1):
        at = place(10.0**power)
        parts.append(f'<path class="axis" d="M{at} {top - 8}V{bottom}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{tick(power, times=times)}</text>')
    for number, (row, found) in enumerate(rows.items()):
        y = top + ROW * number + 10
        parts.append(
            f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{html.escape(row)}</text><path class="axis" d="M{LEFT} {y}H{WIDTH - 20}"/>'
        )
        parts += [
            f'<circle class="series{columns.index(column)}" cx="{place(value)}" cy="{y}" r="6"><title>{column}: {text}</title></circle>'
            for column, (text, value) in reversed(found.items())
        ]
    return f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 24}">{"".join(parts)}</svg>'


def tick(power: int, *, times: bool) -> str:
    """Write a power of ten as people read it: ``100 ns``, ``10,000``."""
    if not times:
        return f"{10**power:,}"
    unit = max((unit for unit in ("ns", "µs", "ms", "s") if 10.0**power >= UNITS[unit] * 0.99), key=UNITS.__getitem__)
    return f"{round(10.0**power / UNITS[unit])} {unit}"


def in_page(svg: str, alt: str) -> str:
    """Return a picture as part of a page: as wide as it likes to be, and the colours are left to the style sheet."""
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bwidth="(\d+)" height="(\d+)"', r'viewBox="0 0 \1 \2" style="max-width: \1px"', svg, count=1)
    return f'<div class="picture" role="img" aria-label="{html.escape(alt)}" tabindex="0">{svg}</div>'


def put_inside(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Replace pictures that are files by what is in them."""
    for image in list(doctree.findall(nodes.image)) if app.builder.format == "html" else ():
        path = Path(app.srcdir, image["uri"])
        if path.suffix == ".svg":
            alt = image["svgbob"]["options"]["alt"] if "svgbob" in image else image["alt"]
            image.replace_self(nodes.raw("", in_page(path.read_text("utf-8"), alt), format="html"))


def setup(app: Sphinx) -> dict[str, Any]:  # noqa: D103
    app.setup_extension("sphinxcontrib.svgbob")
    app.add_directive("svgbob", Drawing, override=True)
    app.add_directive("plot", Plot)
    app.connect("doctree-resolved", put_inside)
    return {"parallel_read_safe": True}
