"""Turns of phrase that make English hard to read stay rare: counted in docstrings and on pages, per 10,000 words.

A turn that is common in translated English and rare in the documentation of trio and h11 has a regular expression here. Zero is not the
aim, since each has its right place; more than `LIMIT` is a sign that a text was not read aloud.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 5.0
TURNS = {
    "that of": r"\b(that of|those of|one that|what (is|was|has))\b",
    "whoever": r"\b(whoever|somebody|nobody)\b",
    "of which": r"\b(of|in|by|from|to) which\b",
    "anew": r"\b(anew|for ever)\b",
}
STARTS = re.compile(r"\s*(Note (that|a|an|how|who|the|whether)|Let|Have (`\w+`|an?) \w+ed)\b")
"""First words of a docstring that a native reads otherwise than they are meant: record, allow, call."""
TREES = ("framework", "transports", "actors", "docs")
POINTER = re.compile(r"\s*See (`|the class)")
POINTER_IN_SOURCE = re.compile(r"[\"']" + POINTER.pattern)
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@cache
def docstrings(file: Path) -> Sequence[str]:
    """The strings of a module that stand alone: docstrings, and the ones below attributes."""
    found: list[str] = []
    blocks = [ast.parse(file.read_text("utf-8")).body]
    while blocks:
        for node in blocks.pop(0):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                found.append(node.value.value)
            # Expressions, nine of ten nodes, have none.
            blocks += (value for _, value in ast.iter_fields(node) if isinstance(value, list) and is_block(value))
    return found


def is_block(nodes: Sequence[object]) -> bool:
    return bool(nodes) and isinstance(nodes[0], ast.stmt | ast.ExceptHandler | ast.match_case)


@cache
def text_of(tree: str) -> str:
    if tree == "docs":
        names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
        pages = [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]
        return "\n".join(CODE.sub("", page.read_text("utf-8")) for page in pages)
    return "\n".join(text for file in sorted((ROOT / tree).rglob("*.py")) for text in docstrings(file))


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("tree", TREES)
def test_a_turn_of_phrase_is_rare(tree: str, turn: str) -> None:
    text = text_of(tree)
    rate = 10_000 * len(re.findall(TURNS[turn], text, re.IGNORECASE)) / len(text.split())
    assert rate <= LIMIT, f"{tree}: {rate:.1f} times in 10,000 words, as in {TURNS[turn]}"


@pytest.mark.parametrize("tree", ["framework", "transports", "actors", "tests", "examples", "benchmarks"])
def test_a_docstring_says_what_it_documents_before_it_refers(tree: str) -> None:
    pointers = [
        f"{file.relative_to(ROOT)}: {text.strip()}"
        for file in sorted((ROOT / tree).rglob("*.py"))
        if POINTER_IN_SOURCE.search(file.read_text("utf-8"))  # to parse all trees takes 6 s
        for text in docstrings(file)
        if POINTER.match(text)
    ]
    assert pointers == [], "say it in a line, then refer"


@pytest.mark.parametrize("tree", ["framework", "transports", "actors"])
def test_a_docstring_begins_with_what_is_done(tree: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}: {text.strip()}"
        for file in sorted((ROOT / tree).rglob("*.py"))
        for text in docstrings(file)
        if STARTS.match(text)
    ]
    assert found == [], "say: Record that, Allow, Call it when"
