"""The table on each protocol's page that says which tests cover which rule, made from the tests' markers.

How a protocol gets its table:

1. List its rules, in our own words, one line each, in ``tests/transports/<protocol>/data/rules.toml``::

       page = "docs/protocols/lumberjack.md"

       [rules]
       LJ-1 = "one line that says what the rule wants"
       LJ-2 = "..."

       [untested]  # only for rules that leave nothing to observe
       LJ-1 = "why no test can see it"

2. Mark the tests, anywhere below ``tests/``, with ``@pytest.mark.rule("LJ-2")``; several markers on one test, on a class of tests, or in
   ``pytest.param(..., marks=pytest.mark.rule("LJ-2"))`` count too.  Of a hypothesis state machine mark the test made from it::

       TestAckWire = pytest.mark.rule("LJ-5")(AckWire.TestCase)

3. Put these two lines on the page, and the table comes between them::

       <!-- conformance: begin -->
       <!-- conformance: end -->

4. ``.venv/bin/python tests/docs/conformance.py`` writes all tables, or those of the protocols named; with ``--check`` it writes nothing and
   says what is wrong: a rule without a test, a marker with an id that is not listed, a page that is out of date.

``tests/docs/test_conformance.py`` runs the check for each protocol that has a ``rules.toml``.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "<!-- conformance: begin -->"
END = "<!-- conformance: end -->"

Tests = dict[str, list[tuple[str, str]]]
"""Rule id to file, relative to the root, and name of each test that is marked with it."""


def marks(node: ast.AST) -> Iterator[str]:
    """Yield the ids in all calls of ``….mark.rule(…)`` below a node."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.rule"):
            yield from (ast.literal_eval(argument) for argument in call.args)


def marked_tests(root: Path) -> Tests:
    """Return the marked tests below ``tests/``; the source is read, not run."""
    found: Tests = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text("utf-8")
        if "mark.rule(" not in text:
            continue
        file = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(text, filename=file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name, places = node.name, list[ast.AST](node.decorator_list)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, places = node.targets[0].id, [node.value]
            else:
                continue
            if name.startswith(("test", "Test")):
                for rule in dict.fromkeys(rule for place in places for rule in marks(place)):
                    found[rule].append((file, name))
    return found


def table(rules: dict[str, str], untested: dict[str, str], tests: Tests, up: str) -> str:
    """Return the Markdown table; `up` leads from the page to the root."""
    lines = ["| rule | what it wants | tests |", "|---|---|---|"]
    for rule, summary in rules.items():
        by_file: dict[str, list[str]] = defaultdict(list)
        for file, name in tests.get(rule, []):
            by_file[file].append(f"`{name}`")
        cells = [f"[{Path(file).stem}]({up}{file}): {', '.join(names)}" for file, names in by_file.items()]
        if not cells:
            cells = [f"none: {untested.get(rule, 'missing')}"]
        lines.append(f"| {rule} | {summary.replace('|', '&#124;')} | {'; '.join(cells)} |")
    return "\n".join(lines)


def problems(root: Path, listing: Path, tests: Tests, *, write: bool) -> list[str]:
    """Return what is wrong with one protocol's rules, tests and page; with `write` the page is brought up to date first."""
    data = tomllib.loads(listing.read_text("utf-8"))
    rules: dict[str, str] = data["rules"]
    untested: dict[str, str] = data.get("untested", {})
    found = [f"{rule} has no test" for rule in rules if rule not in tests and rule not in untested]
    found += [f"{rule} has a test: take it out of [untested]" for rule in untested if rule in tests]
    prefixes = {rule.rpartition("-")[0] for rule in rules}
    found += [
        f"{rule} is not in {listing.relative_to(root).as_posix()}: {file} {name}"
        for rule, where in sorted(tests.items())
        if rule.rpartition("-")[0] in prefixes and rule not in rules
        for file, name in where
    ]
    page = root / data["page"]
    text = page.read_text("utf-8") if page.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        return [*found, f"{data['page']} lacks the lines {BEGIN} and {END}"]
    up = "../" * (len(Path(data["page"]).parts) - 1)
    wanted = f"{before}{BEGIN}\n{table(rules, untested, tests, up)}\n{END}{after}"
    if text != wanted:
        if write:
            page.write_text(wanted, "utf-8")
        else:
            found.append(f"{data['page']} is out of date: run python {Path(__file__).relative_to(ROOT).as_posix()}")
    return found


def main() -> int:
    """Write or check the tables."""
    parser = argparse.ArgumentParser(description="Write the tables of rules and their tests.")
    parser.add_argument(
        "protocols", nargs="*", help="folders below tests/transports (default: all that list their rules)"
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout")
    options = parser.parse_args()
    tests = marked_tests(options.root)
    found = [
        f"{listing.parent.parent.name}: {problem}"
        for listing in sorted((options.root / "tests" / "transports").glob("*/data/rules.toml"))
        if not options.protocols or listing.parent.parent.name in options.protocols
        for problem in problems(options.root, listing, tests, write=not options.check)
    ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
