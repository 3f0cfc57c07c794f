"""Hooks that end an actor also run if `started` never ran, or failed. So they may use only what the object has from the moment it is made."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("framework", "actors", "examples")  # `levada.transports` has no actors
MAKING = ("__init__", "__attrs_post_init__")
ENDING = ("stopping", "restarting", "undelivered", "release", "refuse")
WITH_CARRIER = {"core"}
"""Of connections of RSocket: the carrier says which kind of core it takes, and `Driver.phase` whether there is one."""

Methods = Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]


def methods_of(definition: ast.ClassDef) -> Methods:
    return {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def declared(definition: ast.ClassDef) -> Iterator[str]:
    """Yield the names of fields, class variables and methods."""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


@cache
def attributes(method: ast.AST) -> tuple[frozenset[str], frozenset[str]]:
    """Return the attributes of ``self`` that a method uses, and those that it sets. An annotation without a value sets nothing."""
    nodes = list(ast.walk(method))
    bare = {id(node.target) for node in nodes if isinstance(node, ast.AnnAssign) and node.value is None}
    own = [node for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"]
    return (
        frozenset(node.attr for node in own if isinstance(node.ctx, ast.Load)),
        frozenset(node.attr for node in own if isinstance(node.ctx, ast.Store) and id(node) not in bare),
    )


def reached(names: Iterable[str], methods: Mapping[str, list[ast.AST]]) -> list[ast.AST]:
    """Return these methods, and the methods that they use, of the class and its bases."""
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in methods and name not in seen:
            seen.add(name)
            todo += {each for method in methods[name] for each in attributes(method)[0]}
    return [method for name in seen for method in methods[name]]


def late_attributes(classes: list[ast.ClassDef]) -> set[str]:
    """Return the attributes that hooks at the end use, and that are first set when the object has been made.

    Args:
        classes: a class and its bases.
    """
    methods: dict[str, list[ast.AST]] = {}
    for definition in classes:
        for name, method in methods_of(definition).items():
            methods.setdefault(name, []).append(method)
    there = {name for definition in classes for name in declared(definition)}
    there |= {name for method in reached(MAKING, methods) for name in attributes(method)[1]}
    used = {name for method in reached(ENDING, methods) for name in attributes(method)[0]}
    later = {name for several in methods.values() for method in several for name in attributes(method)[1]}
    return (used & later) - there


def base_names(definition: ast.ClassDef) -> Iterator[str]:
    for base in definition.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(named, ast.Name):
            yield named.id
        elif isinstance(named, ast.Attribute):
            yield named.attr


def findings(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the late attributes of all actor classes, by file and class."""
    found: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    for path, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append((path, node))

    def with_bases(path: str, definition: ast.ClassDef) -> list[ast.ClassDef]:
        classes = [definition]
        for name in base_names(definition):
            candidates = [each for each in found.get(name, ()) if each[1] is not definition]
            for at in [each for each in candidates if each[0] == path] or candidates:
                classes += with_bases(*at)
        return classes

    result = {}
    for path, definition in [each for several in found.values() for each in several]:
        classes = with_bases(path, definition)
        if any(each.name == "Actor" for each in classes) and (late := late_attributes(classes)):
            result[f"{path}: {definition.name}"] = late
    return result


@pytest.mark.ci
def test_hooks_at_the_end_use_only_what_the_object_was_made_with() -> None:
    """Else they fail for an actor that is stopped before it started."""
    sources = {
        str(file.relative_to(ROOT)): file.read_text("utf-8")
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
    }
    folder = "actors/levada/actors/rsocket"
    assert findings(sources) == {
        f"{folder}/{side}.py: {side.title()}Connection": WITH_CARRIER for side in ("client", "server")
    }


def test_the_check_finds_what_only_started_sets() -> None:
    """Also through a method, in a base class, and after an annotation without a value; not what a method of the making sets."""
    text = """
class Actor: ...
class Base(Actor):
    field: int
    def __attrs_post_init__(self):
        self.made = 1
        self.prepare()
        self.announced: int
    def prepare(self):
        self.prepared = 1
    def started(self):
        self.late = self.announced = self.unused = 1
    def stopping(self, reason):
        self.tidy()
    def tidy(self):
        return self.field, self.made, self.prepared, self.late
class Derived(Base):
    async def restarting(self, error, message):
        self.announced.close()
"""
    assert findings({"a.py": text}) == {"a.py: Base": {"late"}, "a.py: Derived": {"late", "announced"}}
