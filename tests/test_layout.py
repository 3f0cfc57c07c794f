"""What holds for the whole source tree: the namespace, the public names, and what protocol cores may import."""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("framework", "transports", "actors")
PROTOCOLS = ("aqueduct", "lumberjack", "maop", "reactivesocket", "rsocket")
RUNTIME = "levada.framework._runtime"
CIRCLES_UNDER_WORK = {
    "levada.transports.maop": 10,
    "levada.transports.aqueduct": 7,
    "levada.actors.aqueduct": 8,
    "levada.actors.maop": 8,
    "levada.actors.rsocket": 7,
}
"""Packages whose circles are being taken apart, and the largest one of each; to become empty."""
IO_MODULES = {"asyncio", "logging", "random", "secrets", "select", "socket", "ssl", "threading", "time", "trio"}


def public_modules() -> list[str]:
    """Names of all packages and modules that users may import."""
    found = []
    for layer in LAYERS:
        for file in (ROOT / layer / "levada").rglob("*.py"):
            parts = file.relative_to(ROOT / layer).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if not any(part.startswith("_") for part in parts):
                found.append(".".join(parts))
    return sorted(found)


def source_modules() -> dict[str, Path]:
    """Every module of the three layers and its file."""
    found = {}
    for layer in LAYERS:
        for file in sorted((ROOT / layer / "levada").rglob("*.py")):
            parts = file.relative_to(ROOT / layer).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(module: str, file: Path, known: Collection[str]) -> set[str]:
    """Modules of ours that a file imports, wherever in it: also for types only, and inside functions."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                names.append(f"{start}.{alias.name}" if f"{start}.{alias.name}" in known else start)
    return {name for name in names if name in known and name != module}


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Groups of modules each of which leads to all others of its group (the strongly connected components of two or more)."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += graph[at]
        reached[start] = seen
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return [list(group) for group in sorted(groups)]


def test_modules_go_in_small_circles_only() -> None:
    """Also imports for types only count: modules of one circle can only be understood together."""
    files = source_modules()
    graph = {module: imports(module, file, files.keys()) for module, file in files.items()}
    too_large = []
    for circle in circles(graph):
        package = circle[0].rpartition(".")[0]
        most = CIRCLES_UNDER_WORK.get(package, 5)
        if len(circle) > (8 if all(RUNTIME in module for module in circle) else most):
            too_large.append(circle)
    assert too_large == []


def test_levada_is_a_namespace() -> None:
    strays = [str(file.relative_to(ROOT)) for layer in LAYERS for file in (ROOT / layer / "levada").glob("*.py")]
    assert not strays, (
        f"remove {strays}: a file directly in a folder levada/ hides the other two portions of the namespace"
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_is_marked_as_typed(layer: str) -> None:
    assert (ROOT / layer / "levada" / layer / "py.typed").is_file()


@pytest.mark.parametrize("name", public_modules())
def test_public_names(name: str) -> None:
    """What is in `__all__` exists, is there once, and has a docstring of its own; ruff sees to the order (RUF022)."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("levada", ""):
            raise
        pytest.skip(f"{name} needs {error.name}, which belongs to an extra")
    assert module.__doc__, f"{name} has no docstring"
    names = getattr(module, "__all__", None)
    if names is None:
        assert not hasattr(module, "__path__"), f"the package {name} has no __all__"
        return
    assert len(names) == len(set(names))
    values = {public: getattr(module, public) for public in names}
    ours = {public: value for public, value in values.items() if inspect.isclass(value) or inspect.isroutine(value)}
    assert [public for public, value in ours.items() if not value.__doc__] == []


def test_protocol_cores_do_no_io() -> None:
    """Time and randomness are arguments of a core; octets go in and out by calls; logging is the actors' work."""
    wrong = []
    for protocol in PROTOCOLS:
        for file in sorted((ROOT / "transports" / "levada" / "transports" / protocol).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                for name in names:
                    if name.partition(".")[0] in IO_MODULES:
                        wrong.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} imports {name}")
    assert wrong == []


def test_constraints_name_no_address() -> None:
    """Each line pins one package to one version, so that any mirror of the index will do."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        requirement = line.partition(";")[0].strip()
        name, separator, version = requirement.partition("==")
        assert (bool(name), separator, bool(version)) == (True, "==", True), line
        assert not set(requirement) & set(":/@ "), line


def test_the_command_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["levada"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
