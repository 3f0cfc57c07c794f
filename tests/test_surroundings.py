"""Clocks, ids, files and threads come from the `Platform`, so that a whole program runs in a simulated world unchanged."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

import pytest
from tests.test_layout import LAYERS, definitions, parse, sources

HARMLESS: Mapping[str, Collection[str]] = {
    "concurrent.futures": ("Executor", "Future", "wait"),
    "datetime.date": ("from*", "isoformat", "max", "min"),
    "datetime.datetime": ("from*", "max", "min", "strptime"),
    "fcntl": (),
    "glob": ("has_magic",),
    "io": ("BytesIO", "StringIO"),
    "mmap": ("ALLOCATIONGRANULARITY", "mmap"),  # the second as a type
    "os": (
        "O_*", "PathLike", "cpu_count", "environ", "fsdecode", "fsencode", "fspath", "getcwd", "getgid", "getuid", "name", "nice", "path",
        "register_at_fork", "sched_*", "sep", "stat_result", "strerror",
    ),
    "os.path": ("abspath", "basename", "dirname", "join", "samestat"),
    "random": ("Random",),  # with a seed
    "secrets": (),
    "shutil": (),
    "socket": ("[!g]*", "getaddrinfo", "getpeername", "getsockname"),  # no `gethostname`; sockets are the network's
    "sqlite3": ("Connection", "Cursor", "DatabaseError", "Error", "OperationalError", "SQLITE_*"),
    "tempfile": (),
    "threading": ("[!T]*", "TIMEOUT_MAX"),  # no `Thread` and no `Timer`
    "time": (),
    "trio": ("[!Po]*", "open_memory_channel", "open_nursery", "open_[stu]*"),  # no `Path` and no `open_file`
    "trio.lowlevel": ("[!s]*", "spawn_system_task", "start_guest_run"),  # no `start_thread_soon`
    "trio.to_thread": (),
    "uuid": ("UUID",),
}  # fmt: skip
"""Modules that reach the surroundings, and patterns of the names in them that do not."""
LOOKS_AT_FILES = {
    "chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "is_socket", "is_symlink", "iterdir", "lstat", "mkdir", "open",
    "read_bytes", "read_text", "rename", "rglob", "rmdir", "samefile", "stat", "symlink_to", "unlink", "write_bytes", "write_text",
}  # fmt: skip
"""Methods of `pathlib.Path`."""
OUTSIDE: Mapping[str, tuple[str, Collection[str]]] = {
    "framework/levada/framework/platform.py": ("it is the real platform", ("*",)),
    "framework/levada/framework/files.py": ("they are the real files", ("*",)),
    "framework/levada/framework/_runtime/virtual_time.py": ("virtual time stands still while it waits for real threads", ("*.REAL", "time.sleep")),
    "framework/levada/framework/aio.py": ("a program of asyncio is around it: it gives levada a thread with a trio run", ("threading.Thread",)),
    "framework/levada/framework/testing/simulation/database.py": ("its databases are in memory", ("sqlite3.connect",)),
    "framework/levada/framework/testing/simulation/files.py": ("it is a disk in memory", ("self.exists",)),
    "transports/levada/transports/carriers/sockets.py": ("a simulated network has no names of sockets", ("os.chmod", "os.lstat", "os.unlink")),
    "transports/levada/transports/carriers/streams.py": ("these are sockets", ("fcntl.ioctl", "os.read", "os.write")),
    "transports/levada/transports/carriers/unix.py": ("a simulated network has no names of sockets", ("os.stat", "path.*")),
    "transports/levada/transports/private_files.py": ("folders of Unix sockets, and keys that OpenSSL reads", ("os.stat", "path.mkdir")),
    "transports/levada/transports/quic/config.py": ("certificates are configuration; OpenSSL reads them from real files", ("Path(*).read_bytes",)),
    "actors/levada/actors/authority.py": ("OpenSSL checks the dates of certificates by the real clock", ("datetime.datetime.now",)),
    "actors/levada/actors/authenticators.py": ("tokens are configuration, as certificates are", ("path.read_bytes",)),
    "actors/levada/actors/cli/": ("a command is a process at a terminal; what it serves is made elsewhere", ("*",)),
    "actors/levada/actors/console/history.py": ("it reads the memory of the real process", ("os.*",)),
    "actors/levada/actors/console/server.py": ("a simulated network has no names of sockets", ("Path(path).*",)),
    "actors/levada/actors/dashboard/site.py": ("these files are parts of the package", ("*.iterdir", "file.read_bytes")),
    "actors/levada/actors/demo/": ("it starts Spark, and measures real time", ("*",)),
    "actors/levada/actors/interop/": ("commands for tests against other implementations", ("*",)),
    "actors/levada/actors/lumberjack/logging_handler.py": ("its thread has a trio run, in a program without one", ("threading.Thread",)),
    "actors/levada/actors/maop/bodies.py": ("a body that is a path is a file of the user's code", ("trio.*",)),
    "actors/levada/actors/nodes/__main__.py": ("a simulated world has its own process for a node", ("os.set_inheritable", "shutil.rmtree")),
    "actors/levada/actors/nodes/certificates.py": (
        "OpenSSL reads certificates from real files",
        ("io.open", "os.*"),
    ),
    "actors/levada/actors/nodes/fence.py": ("real processes inherit its lock", ("fcntl.*", "os.*")),
    "actors/levada/actors/nodes/heartbeat.py": ("it ends real processes that hang", ("os._exit", "threading.Thread", "time.*")),
    "actors/levada/actors/nodes/local.py": (
        "it starts real processes; a simulated world has its own",
        ("os.*", "tempfile.TemporaryDirectory", "trio.Process"),
    ),
    "actors/levada/actors/nodes/spark": ("Spark and its processes are not simulated", ("*",)),
    "actors/levada/actors/rsocket/blocking": ("it is for programs without a system, and has a thread of its own", ("*",)),
    "actors/levada/actors/spark/desk.py": (
        "certificates are configuration; a simulated machine has one name only",
        ("Path(*).read_text", "socket.getfqdn"),
    ),
    **{
        f"actors/levada/actors/spark/{module}.py": ("it runs in Spark's processes or starts them, which are not simulated", ("*",))
        for module in ("asks", "datasource", "query", "session", "shipping", "sink", "source", "worker")
    },
}  # fmt: skip
"""Files and folders that may reach some of the surroundings, and why."""


def surroundings(tree: ast.Module) -> list[str]:
    """The lines in which a module reaches its surroundings other than through the `Platform`, and what they reach."""
    nodes = list(ast.walk(tree))
    names, found = {"open": "io.open"}, []
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {each.asname: each.name for each in node.names if each.asname}
            names |= {each.name.split(".")[0]: each.name.split(".")[0] for each in node.names if not each.asname}
        elif isinstance(node, ast.ImportFrom) and (not node.level or node.module == "platform"):
            module = "levada.framework.platform" if node.level else node.module
            names |= {each.asname or each.name: f"{module}.{each.name}" for each in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            module, _, name = full_name(node, names).rpartition(".")
            if (module, name) == ("levada.framework.platform", "REAL") or (
                module in HARMLESS and not any(fnmatchcase(name, each) for each in HARMLESS[module])
            ):
                found.append(f"{node.lineno}: {module}.{name}")
        if isinstance(node, ast.Call):
            if full_name(node.func, names) == "random.Random" and not node.args:
                found.append(f"{node.lineno}: random.Random()")
            if isinstance(node.func, ast.Attribute) and node.func.attr in LOOKS_AT_FILES:
                of = ast.unparse(node.func.value).rpartition(".")[2]
                mode = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
                is_other = of.endswith("files") or (of.isidentifier() and of[0].isupper()) or of in ("cls", "keep")
                if (
                    not is_other
                    and (node.func.attr != "open" or isinstance(mode, str))
                    and node.func.attr not in definitions(nodes)
                ):
                    found.append(f"{node.lineno}: {ast.unparse(node.func)}")
    found += [f"{line}: PLATFORM, as the module is imported" for line in bound_at_import(tree, names)]
    return found


def full_name(node: ast.expr, names: Mapping[str, str]) -> str:
    """The name of an expression such as ``os.path.join`` with that of its module, or nothing."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        of = full_name(node.value, names)
        return of and f"{of}.{node.attr}"
    return ""


def bound_at_import(node: ast.AST, names: Mapping[str, str]) -> Iterator[int]:
    """The lines that call `PLATFORM.get` when the module is imported, defaults of arguments among them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for default in (*child.args.defaults, *child.args.kw_defaults):
                if default is not None:
                    yield from bound_at_import(ast.Expr(default), names)
            continue
        if isinstance(child, ast.Call) and full_name(child.func, names) == "levada.framework.platform.PLATFORM.get":
            yield child.lineno
        yield from bound_at_import(child, names)


@pytest.mark.ci
def test_what_a_program_takes_from_its_surroundings_it_takes_from_the_platform() -> None:
    found, used = [], set()
    for path in sources(*(f"{layer}/levada" for layer in LAYERS)):
        outside = next((each for each in OUTSIDE if path.startswith(each)), "")
        for each in surroundings(parse(path)):
            if any(fnmatchcase(each.partition(": ")[2], allowed) for allowed in OUTSIDE.get(outside, ("", ()))[1]):
                used.add(outside)
            else:
                found.append(f"{path}:{each}")
    assert found == []
    assert OUTSIDE.keys() - used == set(), "these reach nothing any more"


def test_each_way_to_the_surroundings_is_noticed() -> None:
    source = """
import os, time, trio, uuid, sqlite3, os.path, random, socket
from os.path import exists as there
from time import monotonic
from threading import Lock, Thread
from uuid import UUID, uuid4
from pathlib import Path
from levada.framework.platform import PLATFORM, REAL
def work(clock=time.time, later=lambda: PLATFORM.get(), now=PLATFORM.get().time):
    monotonic(), there("a"), Thread(), uuid4(), open("a"), os.stat("a"), os.path.isdir("a"), sqlite3.connect("a"), trio.to_thread.run_sync
    Path("a").exists(), self.path.open("rb"), (folder / "a").unlink()
    Lock(), UUID(), os.O_RDWR, os.fspath("a"), sqlite3.Error, files.exists("a"), self._files.open("a"), Store.open("a"), trio.sleep(1)
    random.Random(), REAL.files, socket.gethostname(), trio.open_file("a"), trio.Path("a")
    random.Random(1), PLATFORM.get().files, socket.socket(), trio.open_nursery(), stream.open()
class Kept:
    clock = PLATFORM.get().monotonic
"""
    assert {*surroundings(ast.parse(source))} == {
        "9: time.time", "9: PLATFORM, as the module is imported", "10: io.open", "10: os.path.exists", "10: os.path.isdir", "10: os.stat",
        "10: sqlite3.connect", "10: threading.Thread", "10: time.monotonic", "10: trio.to_thread.run_sync", "10: uuid.uuid4",
        "11: (folder / 'a').unlink", "11: Path('a').exists", "11: self.path.open",
        "13: levada.framework.platform.REAL", "13: random.Random()", "13: socket.gethostname", "13: trio.Path", "13: trio.open_file",
        "16: PLATFORM, as the module is imported",
    }  # fmt: skip


PROGRAM = """
import os, random, secrets, sys, threading, time, uuid

wrong = []

def noticed(name, real):
    def function(*arguments, **options):
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").startswith("levada"):
            wrong.append(f"{name} in {caller.f_code.co_name}")
        return real(*arguments, **options)

    return function

for module, names in {
    os: ("getpid", "open", "stat", "urandom"),
    secrets: ("token_bytes", "token_hex"),
    time: ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "sleep", "time", "time_ns"),
    uuid: ("uuid4",),
}.items():
    for name in names:
        setattr(module, name, noticed(name, getattr(module, name)))

import trio
from levada.actors import aqueduct, lumberjack, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.framework import ActorSystem, Identity, OneshotSender, actor, message, oneshot
from levada.framework.platform import PLATFORM
from levada.framework.testing.clock import autojump, counted_time

@message("ask")
class Ask:
    number: int
    reply: OneshotSender[int]

async def rsocket_pair(system):
    async def echo(request):
        return request.payload

    async with (
        rsocket.serve(system, "rsocket+memory://a", echo) as listener,
        rsocket.connect(system, listener.url) as peer,
    ):
        await peer.fire_and_forget(b"1")
        assert (await peer.request_response(b"2")).data == b"2"

async def aqueduct_pair(system):
    @actor
    async def double(m: Ask):
        m.reply.send(2 * m.number)

    async with (
        aqueduct.serve(system, "aqueduct+memory://a", double, message_type=Ask) as listener,
        aqueduct.connect(system, listener.url, Ask) as peer,
    ):
        reply, answer = oneshot(int)
        await peer.send(Ask(21, reply))
        assert await answer == 42

async def maop_pair(system):
    async def nothing(call):
        pass

    clients = BearerTokens.of({b"t": Identity("t")})
    async with (
        maop.serve(system, "maop+memory://a", {101: nothing}, authenticate=clients) as listener,
        maop.connect(system, listener.url, token=b"t") as peer,
    ):
        await peer.request(101)

async def lumberjack_pair(system):
    async def take(unit):
        pass

    async with (
        lumberjack.serve(system, "lumberjack+memory://a", take) as reader,
        lumberjack.connect(system, reader.url) as writer,
    ):
        await writer.send({"line": "x"})
        await writer.flush()

async def main():
    PLATFORM.set(counted_time(random.Random(1)))
    async with ActorSystem() as system:
        for pair in (rsocket_pair, aqueduct_pair, maop_pair, lumberjack_pair):
            await pair(system)
            print(pair.__name__)

wrong.clear()
trio.run(main, clock=autojump())
print(*wrong)
"""


@pytest.mark.ci
def test_protocols_in_memory_read_no_real_clock_and_make_no_random_bytes() -> None:
    """A process of its own, since it replaces the functions before levada is imported, which may keep them."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split("\n") == ["rsocket_pair", "aqueduct_pair", "maop_pair", "lumberjack_pair", "", ""]
