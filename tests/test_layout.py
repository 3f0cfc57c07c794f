"""What holds for the whole source tree: the namespace, the public names, what protocol cores may import, and that tests assert."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

import levada.framework

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("framework", "transports", "actors")
PROTOCOLS = ("aqueduct", "lumberjack", "maop", "reactivesocket", "rsocket")
RUNTIME = "levada.framework._runtime"
FRAMEWORK = "framework/levada/framework"
OVERRIDES = {
    "actors/levada/actors/demo/engine.py": "pyspark",
    "actors/levada/actors/spark/query.py": "pyspark",
    "benchmarks/carriers.py": "aioquic",
    f"{FRAMEWORK}/_runtime/virtual_time.py": "trio",
    f"{FRAMEWORK}/testing/clock.py": "trio",
    f"{FRAMEWORK}/testing/strict.py": "trio",
    "transports/levada/transports/carriers/tls.py": "trio",
    **{
        f"transports/levada/transports/quic/{name}.py": "aioquic"
        for name in ("engine", "packets", "paths", "ranges", "ready", "receiving", "sending")
    },
}
"""Files that use private names of a library on purpose, and which library."""
IO_MODULES = {"asyncio", "logging", "random", "secrets", "select", "socket", "ssl", "threading", "time", "trio"}


CARRIER_CALLS = {
    "accept", "all_acked", "close", "flush", "handshake", "join", "max_datagram_size", "move_on_after", "open_spare", "open_stream", "opened",
    "receive", "receive_datagram", "receive_nowait", "receive_some", "room", "send", "send_all", "send_datagram_nowait", "send_eof",
    "send_nowait", "try_open_stream", "wait_for_room",
}  # fmt: skip
"""What a ``try`` may call whose handler catches errors of carriers: the carrier, and nothing that runs code of users."""
WHOLE_CONNECTIONS = {
    "actors/levada/actors/dashboard/server.py": "serve_client",
    "actors/levada/actors/driver.py": "_main",
    "actors/levada/actors/listening.py": "_listen",
    "actors/levada/actors/lumberjack/writer.py": "keep_connected",
    "actors/levada/actors/nodes/__main__.py": "main",
    "actors/levada/actors/nodes/launched.py": "main",
    "actors/levada/actors/rsocket/client.py": "_dial",
    "actors/levada/actors/spark/asks.py": "_start",
    "actors/levada/actors/spark/worker.py": "_connect",
    "actors/levada/actors/stream_carriers.py": "__aenter__",
    "transports/levada/transports/carriers/listeners.py": "_open",
    "transports/levada/transports/carriers/race.py": "attempt",
    "transports/levada/transports/carriers/tcp.py": "take_in",
    "transports/levada/transports/carriers/unix.py": "take_in",
}
"""Functions that open or carry a whole connection, and end it for an error of its carrier. Handlers run in actors of their own."""
KITS = {"carrier_checks", "check_linear", "explore", "log_checks", "simulate"}
"""Parts of the test kits that raise if something is not as it should be."""
ASSERTIONS = {"pytest.RaisesGroup", "pytest.fail", "pytest.raises", "pytest.warns"}
WITHOUT_ASSERTION = {
    "tests/actors/nodes/test_spark_settings.py::test_settings_under_which_nodes_live_are_taken": "they are not refused",
    "tests/docs/test_test_actors_page.py::test_the_answer_of_the_page_comes_after_the_network_is_back": "its page asserts",
}
"""Tests that fail without an assertion of ours, and by what."""


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


@pytest.mark.ci
def test_modules_go_in_small_circles_only() -> None:
    """Also imports for types only count: modules of one circle can only be understood together."""
    files = source_modules()
    graph = {module: imports(module, file, files.keys()) for module, file in files.items()}
    too_large = [c for c in circles(graph) if len(c) > (7 if all(RUNTIME in module for module in c) else 4)]
    assert too_large == []


def definitions(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that a file gives to functions, classes, variables and fields."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Assign) and any(
            isinstance(at, ast.Name) and at.id == "__slots__" for at in node.targets
        ):
            found |= {str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return found


def is_own(node: ast.expr) -> bool:
    """Whether an expression stands for the object, or the class, whose method it is in."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("super", "type") and all(is_own(argument) for argument in node.args)
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_uses(nodes: Sequence[ast.AST], *, inherited: Collection[str] = ()) -> dict[str, list[int]]:
    """Private names of other objects that a file uses, and the lines.

    A file may use the private names that it defines itself, of whatever object; and those of ``self``, unless they are `inherited`
    from a class whose privates are not for its subclasses.
    """
    own = definitions(nodes) | {"_asdict", "_fields", "_make", "_replace"}  # of named tuples these are public
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    found: dict[str, list[int]] = {}
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.endswith("__"):
            continue
        ours = is_own(node.value) or (isinstance(node.value, ast.Name) and node.value.id in classes)
        if node.attr in own or (ours and node.attr not in inherited):
            continue
        if ast.unparse(node) not in ("sys._getframe", "os._exit"):  # public, and documented
            found.setdefault(node.attr, []).append(node.lineno)
    return found


def sources(*folders: str) -> list[str]:
    """Paths of the Python files of some folders."""
    return [str(file.relative_to(ROOT)) for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def privates(path: str) -> frozenset[str]:
    """Private names that a file defines."""
    return frozenset(name for name in definitions(ast.walk(parse(path))) if name.startswith("_"))


def parse(path: str) -> ast.Module:
    """Read one file of this repository."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sources("transports/levada", "actors/levada", "benchmarks", "examples"))
def test_nobody_uses_the_private_names_of_others(path: str) -> None:
    """Users of the framework keep to what it publishes, and so do the parts of a protocol among each other."""
    nodes = list(ast.walk(parse(path)))
    uses = private_uses(nodes, inherited=privates(f"{FRAMEWORK}/actor.py"))
    if path in OVERRIDES:
        return
    assert uses == {}
    runtime = [
        ast.unparse(node)
        for node in nodes
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith(RUNTIME))
        or (isinstance(node, ast.Import) and any(alias.name.startswith(RUNTIME) for alias in node.names))
    ]
    assert runtime == [], "levada.framework.embedding has what is for others"


@pytest.mark.parametrize("path", sources("framework/levada"))
def test_a_file_of_the_framework_says_whose_fields_it_touches(path: str) -> None:
    """The text at the top names each private field of `Cell` and of `Actor` that is used below it, and no other."""
    tree = parse(path)
    if path in OVERRIDES:
        return
    declared = set(re.findall(r"``(?:Cell|Actor)\.(_\w+)``", ast.get_docstring(tree) or ""))
    used = private_uses(list(ast.walk(tree))).keys()
    assert used - declared == set(), "used, and not named at the top"
    assert declared - used == set(), "named at the top, and not used"
    assert declared <= privates(f"{FRAMEWORK}/_runtime/cell.py") | privates(f"{FRAMEWORK}/actor.py")


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


def test_errors_of_users_are_not_taken_for_errors_of_a_carrier() -> None:
    """A user's iterator or callback may raise the error of another connection. In such a ``try`` it would be swallowed."""
    errors = importlib.import_module("levada.framework.errors")
    family = {name for name in errors.__all__ if issubclass(getattr(errors, name), errors.CarrierError)}
    handler = re.compile(rf"except\b.*\b({'|'.join(family)})\b")
    wrong, whole = [], set()
    for module, file in source_modules().items():
        text = file.read_text(encoding="utf-8")
        if not handler.search(text) or module.startswith(
            ("levada.actors.cli", "levada.actors.interop", "levada.transports.testing")
        ):
            continue
        path = str(file.relative_to(ROOT))
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            blocks = [node for node in ast.walk(function) if isinstance(node, ast.Try | ast.TryStar)]
            for block in (block for block in blocks if family & caught(block)):
                if function.name == WHOLE_CONNECTIONS.get(path):
                    whole.add(path)
                    continue
                nodes = [node for statement in block.body for node in ast.walk(statement)]
                calls = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
                loops = {type(node).__name__ for node in nodes if isinstance(node, ast.AsyncFor | ast.Yield)}
                if odd := loops | calls - CARRIER_CALLS:
                    wrong.append(f"{path}:{block.lineno}: {', '.join(sorted(odd))}")
    assert wrong == []
    assert whole == set(WHOLE_CONNECTIONS)


def caught(block: ast.Try | ast.TryStar) -> set[str]:
    """Names of the classes that the handlers of a ``try`` catch."""
    kinds = [node for handler in block.handlers if handler.type is not None for node in ast.walk(handler.type)]
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in kinds
        if isinstance(node, ast.Attribute | ast.Name)
    }


def asserts(node: ast.AST) -> bool:
    """Whether a statement or an expression is there to fail a test."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return name in ASSERTIONS or name.rpartition(".")[2].startswith("assert_")
    return isinstance(node, ast.Assert) or (isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node))


def modules_named(path: str, node: ast.AST) -> set[str]:
    """The files of tests that an import may mean."""
    if isinstance(node, ast.Import):
        return {alias.name.replace(".", "/") + ".py" for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    package = Path(path).parents[node.level - 1] if node.level else Path()
    module = package / (node.module or "").replace(".", "/")
    return {f"{module}.py", *(f"{module / alias.name}.py" for alias in node.names)}


@pytest.mark.ci
def test_each_test_asserts_something() -> None:
    """Itself, or in a function or class that it names, from its own file, from one that this imports, or from a conftest."""
    named: dict[str, dict[str, set[str]]] = {}
    asserting: dict[str, set[str]] = {}
    visible: dict[str, set[str]] = {}
    for path in sources("tests"):
        tree = parse(path)
        named[path], asserting[path] = {}, set()
        visible[path] = {path, *(str(folder / "conftest.py") for folder in Path(path).parents)}
        visible[path] |= {name for node in ast.walk(tree) for name in modules_named(path, node)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                within = list(ast.walk(node))
                named[path][node.name] = {each.id for each in within if isinstance(each, ast.Name)}
                named[path][node.name] |= {each.arg for each in within if isinstance(each, ast.arg)}
                if any(map(asserts, within)):
                    asserting[path].add(node.name)
    grown = True
    while grown:
        grown = False
        for path, functions in named.items():
            known = KITS.union(*(asserting.get(other, ()) for other in visible[path]))
            more = {name for name, words in functions.items() if words & known} - asserting[path]
            asserting[path] |= more
            grown = grown or bool(more)
    tests = {(path, name) for path, functions in named.items() for name in functions if name.startswith("test_")}
    without = {f"{path}::{name}" for path, name in tests if name not in asserting[path]}
    assert without == WITHOUT_ASSERTION.keys()


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


def test_the_framework_names_its_release() -> None:
    assert levada.framework.__version__ == version("levada")
    with pytest.raises(AttributeError, match=r"module 'levada\.framework' has no attribute 'release'"):
        levada.framework.release  # noqa: B018 - it raises
