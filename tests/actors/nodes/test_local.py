"""Nodes that are child processes."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from levada.actors.nodes import NodeDown, NodeLost, NodeSettings, NodeUp, Run, local_nodes, nodes_of
from levada.actors.nodes.heartbeat import Pulse
from levada.actors.nodes.local import ChildProcesses
from levada.framework import ActorSystem, Failed, Lost, restart
from levada.framework.errors import ConfigurationError, ConnectionClosed, HandleNotForwardable
from levada.transports.carriers import unix

from .apps import (
    Add,
    Ask,
    Counter,
    Facts,
    Friend,
    Interrupt,
    Quit,
    QuitInATask,
    Quitter,
    Reporter,
    app,
    forks,
    not_async,
    talks,
)
from .processes import ROOT, START, driver, gone, is_alive, processes_of
from .single import Where

pytestmark = pytest.mark.ci


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's path, which its nodes get, has the root."""
    monkeypatch.syspath_prepend(str(ROOT))


async def test_a_killed_child_process_is_replaced_and_nothing_is_left() -> None:
    async with ActorSystem() as system:
        async with local_nodes(system, 2, app) as nodes, nodes.events() as events:
            counter = await nodes.spawn(Counter, 5, on="n1")
            pid, name = await counter.ask(Where())
            assert (name, pid) == ("n1", nodes["n1"].pid)
            assert await counter.ask(Add(2)) == 7
            os.kill(pid, signal.SIGKILL)
            down, up = await events.receive(), await events.receive()
            assert isinstance(down, NodeDown)
            assert isinstance(down.reason, Failed)
            assert str(down.reason.error) == "n1 was killed by SIGKILL"
            assert isinstance(up, NodeUp)
            assert up.member.pid != pid
            pids = [pid, *(member.pid for member in nodes.members)]
        assert [is_alive(pid) for pid in pids] == [False, False, False]


async def test_nodes_end_at_once_when_their_driver_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a path that has room for sockets
        monkeypatch.setenv("TMPDIR", folder)
        async with driver() as d:
            pids = await d.ready()
            (name,) = os.listdir(folder)
            assert len(os.listdir(f"{folder}/{name}")) == 3
            os.kill(d.pid, signal.SIGKILL)
            assert [await gone(pid, 5.0) for pid in pids] == [True, True]
        assert os.listdir(folder) == []


@pytest.mark.skipif(sys.platform != "linux", reason="paths are text elsewhere")
async def test_the_folder_for_temporary_files_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        odd = os.path.join(folder, os.fsdecode(b"\xff% #"))
        os.mkdir(odd)
        monkeypatch.setattr(tempfile, "tempdir", odd)
        async with ActorSystem() as system, local_nodes(system, 2, app) as nodes:
            counter = await nodes.spawn(Counter, 5, on="n1")
            friend = await nodes.spawn(Friend, on="n0")
            assert await friend.ask(Ask(counter)) == 6  # over a socket in this folder
            (name,) = os.listdir(odd)
            assert len(os.listdir(f"{odd}/{name}")) == 3
        assert os.listdir(odd) == []


async def test_a_folder_whose_path_is_too_long_is_an_error_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match=r"has at most 107 bytes.* set TMPDIR to a shorter one"):
            async with local_nodes(system, 1, app):
                pass


@pytest.mark.parametrize("app", ["stubborn", "deaf"])
async def test_an_app_that_does_not_end_cannot_outlive_its_driver(app: str) -> None:
    async with driver(app, drain_timeout=0.5, nodes=1) as d:
        (pid,) = await d.ready()
        os.kill(d.pid, signal.SIGKILL)
        assert await gone(pid, 5.0)


@pytest.mark.parametrize("app", ["stubborn", "deaf"])
async def test_an_app_that_does_not_end_is_killed_when_it_drains(app: str) -> None:
    async with driver(app, drain_timeout=0.5, kill_after=0.3, nodes=1) as d:
        (pid,) = await d.ready()
        assert d.process.stdin is not None
        await d.process.stdin.aclose()
        with trio.fail_after(50):
            assert await d.process.wait() == 0
        assert not is_alive(pid)


async def test_ctrl_c_is_for_the_driver_which_ends_its_nodes() -> None:
    async with driver() as d:
        pids = await d.ready()
        os.killpg(d.pid, signal.SIGINT)
        with trio.fail_after(100):
            assert await d.process.wait() in (1, -signal.SIGINT, 130)
        assert [is_alive(pid) for pid in pids] == [False, False]


async def test_nodes_of_a_stopped_driver_end_and_it_starts_others_when_it_goes_on() -> None:
    async with driver(silence=4.0) as d:
        pids = await d.ready()
        os.kill(d.pid, signal.SIGSTOP)
        assert [await gone(pid, 50.0) or not is_alive(pid) for pid in pids] == [True, True]
        os.kill(d.pid, signal.SIGCONT)
        with trio.fail_after(100):
            lines = sorted([await d.line() for _ in range(4)])
        assert [line[:2] for line in lines] == [["DOWN", "n0"], ["DOWN", "n1"], ["UP", "n0"], ["UP", "n1"]]
        assert "exit code 70" in lines[0][2]


async def test_a_hang_is_found_by_the_heartbeat() -> None:
    async with driver(hang_timeout=1.0, nodes=1) as d:
        (pid,) = await d.ready()
        os.kill(pid, signal.SIGSTOP)
        with trio.fail_after(100):
            down, up = await d.line(), await d.line()
        assert down[2].startswith("n0 hangs: no heartbeat for 1.")
        assert up[:2] == ["UP", "n0"]
        assert not is_alive(pid)


@pytest.mark.ci
async def test_a_start_that_holds_the_interpreter_is_no_hang() -> None:
    async with driver("native", hang_timeout=0.5, nodes=1) as d:
        (pid,) = await d.ready()
        assert is_alive(pid)


async def test_a_blocked_event_loop_is_no_hang() -> None:
    async with driver("deaf", hang_timeout=1.0, nodes=1, drain_timeout=0.1, kill_after=0.1) as d:
        (pid,) = await d.ready()
        with trio.move_on_after(3):
            await d.line()
            raise AssertionError("the node was taken for a hang")
        assert is_alive(pid)


async def test_a_node_that_ends_too_often_is_given_up_with_its_error() -> None:
    async with driver("short", nodes=1, max=2) as d:
        process = d.process
        with trio.fail_after(START):
            assert await process.wait() == 1


async def test_lines_of_a_node_are_logged_whole_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "levada.actors.nodes.output")
    async with ActorSystem() as system, local_nodes(system, 1, talks):
        pass
    seen = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "levada.actors.nodes.output"]
    assert ("INFO", "n0: plain \\x1b[31m text") in seen
    assert ("WARNING", "n0: shop: stock is low") in seen
    two, traceback, many, thread, finalizer = [text.split("\n    ") for level, text in seen if level == "ERROR"]
    assert two == ["n0: shop: two", "lines"]
    assert traceback[:2] == ["n0: shop: failed", "Traceback (most recent call last):"]
    assert traceback[-2:] == ["ValueError: no price", "2000-01-01 forged"]
    assert not any("\n" in line for line in traceback)
    assert many == ["n0: shop: 0", *map(str, range(1, 100)), "… 100 lines …", *map(str, range(200, 300))]
    assert [thread[0], thread[-1]] == ["n0: levada.actors.nodes: thread packer failed", "KeyError: 'tea'"]
    assert finalizer[0].startswith("n0: levada.actors.nodes: exception ignored in: <function _fail_in_a_finalizer")
    assert finalizer[-1] == "OSError: no lid"
    (forgotten,) = [text for level, text in seen if level == "WARNING" and "was never awaited" in text]
    assert forgotten.startswith("n0: py.warnings: ")
    assert ("INFO", "n0: no end of line") in seen
    (long,) = [text for _, text in seen if "xxx" in text]
    assert long.endswith("x (34464 bytes more)")


async def test_a_program_that_ends_before_its_hello_is_an_error_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "levada").mkdir()
    (tmp_path / "levada" / "__init__.py").write_text("")  # hides the namespace package
    async with ActorSystem() as system:
        settings = NodeSettings(env={"PYTHONPATH": str(tmp_path)})
        with pytest.raises(NodeLost, match=r"n0 ended with exit code 1; its last lines: .*No module named"):
            async with local_nodes(system, 1, app, settings=settings):
                pass


async def test_a_process_has_what_the_settings_say_and_inherits_no_file(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    settings = NodeSettings(nice=3, affinity=[[cpu]], rlimits={"RLIMIT_NOFILE": 200}, env={"SHOP": "open"})
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with ActorSystem() as system, local_nodes(system, 1, app, names=["east"], settings=settings) as nodes:
            facts = await (await nodes.spawn(Reporter, on="east")).ask(Facts())
    assert facts == {
        "nice": os.nice(0) + 3, "cpus": [cpu], "files": 200, "env": "open", "stdin": "/dev/null", "open": [], "group": True,
        "frozen": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"affinity": [[1000]]}, r"has failed: .*cannot run on the CPUs \[1000\] \(NodeSettings.affinity\): .*Invalid argument"),
        ({"affinity": [[1 << 40]]}, r"has failed: .*cannot run on the CPUs .* too large"),
        ({"rlimits": {"RLIMIT_NOFILE": 1 << 40}}, r"has failed: .*cannot set RLIMIT_NOFILE to \d+ \(NodeSettings.rlimits\): "),
        ({"env": {"A=B": ""}}, "cannot be started: illegal environment variable name"),
        ({"env": {"A": "\0"}}, "cannot be started: embedded null byte"),
    ],
)  # fmt: skip
async def test_an_impossible_setting_is_an_error_of_the_block(setting: dict[str, Any], text: str) -> None:
    async with ActorSystem() as system:
        with pytest.raises(NodeLost, match=f"^n0 {text}"):
            async with local_nodes(system, 1, app, settings=NodeSettings(**setting)):
                pass


@pytest.mark.parametrize(
    ("quits", "code", "said"), [(Quit(4), 4, "SystemExit: 4"), (Interrupt(), 130, "KeyboardInterrupt")]
)
async def test_an_actor_that_calls_exit_ends_its_node_with_that_code_and_a_line_in_the_log(
    quits: Quit | Interrupt, code: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ActorSystem() as system,
        local_nodes(system, 1, app) as nodes,
        nodes.events() as events,
    ):
        (await nodes.spawn(Quitter)).tell(quits)
        event = await events.receive()
        assert isinstance(event, NodeDown)
        assert isinstance(event.reason, Failed)
        assert isinstance(event.reason.error, NodeLost)
        assert event.reason.error.exit_code == code
        assert f"ended by an actor: {said} … {said}" in str(event.reason.error)
    (record,) = [r for r in caplog.records if "ended by an actor" in r.getMessage() and r.levelname == "ERROR"]
    assert record.getMessage().startswith(f"n0: levada.actors.nodes: ended by an actor: {said}\n    Traceback")


@pytest.mark.parametrize("quits", [Quit(4), Quit(0), QuitInATask(4)], ids=str)
async def test_a_supervised_actor_that_calls_exit_starts_again_with_its_node(quits: Quit | QuitInATask) -> None:
    async with ActorSystem() as system, local_nodes(system, 1, app) as nodes:
        policy = restart("permanent", max=5)
        quitter, neighbour = [
            await nodes.spawn(Quitter, name=name, supervise=policy) for name in ("quitter", "neighbour")
        ]
        quitter.tell(quits)
        assert isinstance(await quitter.terminated(), Failed)
        assert isinstance(await neighbour.terminated(), Lost)
        again = [await nodes.lookup(name) for name in ("quitter", "neighbour")]
        assert [await ref.ask(Where(), timeout=30) for ref in again] == [(nodes["n0"].pid, "n0")] * 2
        assert nodes["n0"].restarts == 1


async def test_a_node_restarts_after_the_folder_of_the_sockets_was_removed() -> None:
    async with ActorSystem() as system, local_nodes(system, 2, app) as nodes, nodes.events() as events:
        folder = Path(nodes["n0"].url.partition("://")[2]).parent
        shutil.rmtree(folder)
        os.kill(nodes["n0"].pid, signal.SIGKILL)
        assert isinstance(await events.receive(), NodeDown)
        assert isinstance(await events.receive(), NodeUp)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (await (await nodes.spawn(Counter, on="n0")).ask(Where()))[1] == "n0"
    assert not folder.exists()


async def test_a_start_without_free_descriptors_is_an_error_of_the_block() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    async with ActorSystem() as system:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            for number in taken[-4:]:  # for the listener of the block and the first socket pair
                os.close(number)
            del taken[-4:]
            with pytest.raises(
                NodeLost, match=r"n0 cannot be started: \[Errno 24\] Too many open files: raise the limit"
            ):
                async with local_nodes(system, 1, app):
                    pass
        finally:
            for number in taken:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]
)
async def test_a_start_without_room_for_a_process_or_thread_is_an_error_of_the_block(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(trio.lowlevel, "open_process", full)
    async with ActorSystem() as system:
        with pytest.raises(NodeLost) as caught:
            async with local_nodes(system, 1, app):
                pass
    remedy = "raise the limit of processes and threads (ulimit -u)"
    assert str(caught.value) == f"n0 cannot be started: [Errno {errno.EAGAIN}] {error.args[-1]}: {remedy}"


async def test_a_folder_that_cannot_be_made_is_an_error_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    async with ActorSystem() as system:
        with pytest.raises(OSError, match="/nowhere/levada-"):
            async with local_nodes(system, 1, app):
                pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """A file system of its own for temporary files; called with how many files and folders there may be."""
    place = tempfile.mkdtemp(dir="/tmp")  # a path that has room for sockets

    def mount(room: int) -> None:
        options = ["-t", "tmpfs", "-o", f"size=16k,nr_inodes={room + 1}", "tmpfs", place]
        if subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
            pytest.skip("this user may not mount a file system")
        mounted.append(place)

    mounted: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", place)
        yield mount
    for each in mounted:
        subprocess.run(["umount", each], check=True)
    os.rmdir(place)


@pytest.mark.parametrize(
    ("room", "kind", "text"),
    [
        (0, OSError, "No space left on device: '/tmp/.*/levada-"),
        (1, ConfigurationError, "cannot listen at /tmp/.*/driver: No space left on device"),
        (3, NodeLost, "n. has failed: ConfigurationError: cannot listen at .*: No space left on device"),
    ],
)
async def test_a_full_disk_is_an_error_of_the_block(
    small_disk: Callable[[int], None], room: int, kind: type[Exception], text: str
) -> None:
    """Without room for the folder, for the driver's socket, or for that of the second node."""
    small_disk(room)
    marker = uuid.uuid4().hex
    async with ActorSystem() as system:
        with pytest.raises(kind, match=text):
            async with local_nodes(system, 2, app, settings=NodeSettings(env={"LEVADA_TEST": marker})):
                pass
    assert processes_of(f"LEVADA_TEST={marker}", parent=os.getpid()) == []
    assert os.listdir(tempfile.gettempdir()) == []


async def test_two_fleets_on_one_machine_know_nothing_of_each_other() -> None:
    """Their nodes, names and groups are called the same. One is killed to its last node, and the other does not notice."""
    async with (
        ActorSystem("one") as one,
        ActorSystem("two") as two,
        local_nodes(one, 2, app) as ours,
        local_nodes(two, 2, app) as theirs,
    ):
        assert [member.name for member in ours.members] == [member.name for member in theirs.members]
        assert len({member.pid for fleet in (ours, theirs) for member in fleet.members}) == 4
        counters = [
            await fleet.spawn(Counter, start, on="n0", name="single", supervise=restart("permanent"))
            for fleet, start in ((ours, 10), (theirs, 20))
        ]
        assert [await counter.ask(Add(1)) for counter in counters] == [11, 21]
        assert [await system.registry["single"].ask(Add(0)) for system in (one, two)] == [11, 21]
        one.groups.join("g", one.spawn(Counter))
        friend = await theirs.spawn(Friend, on="n1")
        with pytest.raises(HandleNotForwardable):
            await friend.ask(Ask(counters[0]))
        async with theirs.events() as events:
            before = theirs.members
            async with ours.events() as lost:
                for member in ours.members:
                    os.kill(member.pid, signal.SIGKILL)
                with trio.fail_after(150):
                    while [member.restarts for member in ours.members] != [1, 1]:
                        await lost.receive()
                    again = await ours.lookup("single")
            assert await again.ask(Add(1)) == 11
            assert await counters[1].ask(Add(1)) == 22
            assert theirs.members == before
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()
        assert two.groups.members("g") == []


async def test_a_start_may_be_cancelled_at_any_moment() -> None:
    marker = uuid.uuid4().hex
    settings = NodeSettings(env={"LEVADA_TEST": marker})
    for milliseconds in (0, 3, 10, 30, 100, 300, 1000):
        async with ActorSystem() as system:
            with trio.move_on_after(milliseconds / 1000):
                async with local_nodes(system, 2, app, settings=settings):
                    pass
            assert processes_of(f"LEVADA_TEST={marker}", parent=os.getpid()) == []


async def starts_a_process(system: ActorSystem) -> AsyncIterator[None]:
    await trio.lowlevel.open_process([sys.executable, "-c", "import signal; signal.pause()"])
    yield


async def test_what_a_killed_node_has_started_is_killed_with_it() -> None:
    marker = uuid.uuid4().hex
    settings = NodeSettings(env={"LEVADA_TEST": marker})
    of_node: list[int] = []
    async with ActorSystem() as system:
        with pytest.raises(ZeroDivisionError):
            async with local_nodes(system, 1, starts_a_process, settings=settings) as nodes:
                of_node = processes_of(f"LEVADA_TEST={marker}", parent=nodes["n0"].pid)
                raise ZeroDivisionError
    assert len(of_node) == 1
    assert await gone(of_node[0], 50)


async def test_a_start_that_ends_closes_its_connection_for_the_task_that_serves_it(tmp_path: Path) -> None:
    """The kernel gives the number of a closed socket to the next file, which must get nothing that was meant for the node."""
    handed = unix.HandedListener(1)
    with Pulse(1.0) as pulse, ExitStack() as later:
        launcher = ChildProcesses(handed, pulse, str(tmp_path), NodeSettings())
        async with launcher.start(Run("n0", 0, 0)):
            stream = await handed.accept()
        others = [later.enter_context(each) for _ in range(50) for each in socket.socketpair()]
        with pytest.raises(ConnectionClosed):
            stream.send_nowait(b"for the node")
        for each in others:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(100)


async def test_a_lost_node_is_lost_though_a_process_of_its_own_keeps_the_connection_open() -> None:
    async with ActorSystem() as system, local_nodes(system, 1, forks) as nodes, nodes.events() as events:
        counter = await nodes.spawn(Counter)
        os.kill(nodes["n0"].pid, signal.SIGKILL)
        with trio.fail_after(50):
            assert isinstance(await events.receive(), NodeDown)
            assert isinstance(await counter.terminated(), Lost)


async def test_what_cannot_be_a_node_is_refused_at_the_call() -> None:
    async def inner(system: ActorSystem) -> AsyncIterator[None]:
        yield

    async with ActorSystem() as system:
        for wrong, text in (
            (inner, "inside a function"),
            (Counter, "is no app"),
            ("shop", "MODULE:NAME"),
            (not_async, "is no app"),
        ):
            with pytest.raises(ConfigurationError, match=text):
                async with local_nodes(system, 1, wrong):
                    pass
        for n in (0, -1, 1.5, "2"):
            with pytest.raises(ConfigurationError, match=f"n is {n!r}, wanted 1 node or more"):
                async with local_nodes(system, n, app):  # type: ignore[arg-type]
                    pass
        for names, text in (
            (["a/b"], "wanted up to 64 letters"),
            (["a", "a"], "wanted 1 different names"),
            ([7], "the name of a node is 7, wanted up to 64 letters"),
            ("a", "names is 'a', wanted a list of 1 different names"),
            (7, "names is 7, wanted a list of 1 different names"),
        ):
            with pytest.raises(ConfigurationError, match=text):
                async with local_nodes(system, 1, app, names=names):  # type: ignore[arg-type]
                    pass
        with pytest.raises(ConfigurationError, match="is neither a node nor the driver"):
            nodes_of(ActorSystem())


class Unknown(Counter):
    """In a module that no node imports."""


async def test_a_class_that_the_node_has_not_imported_is_an_error_of_the_caller() -> None:
    async with ActorSystem() as system, local_nodes(system, 1, app) as nodes:
        with pytest.raises(ConfigurationError, match=r"n0: .*:Unknown is not imported in this node: let the module of"):
            await nodes.spawn(Unknown)
        assert await (await nodes.spawn(Counter)).ask(Add(1)) == 1


@pytest.mark.ci
async def test_with_a_fence_no_node_starts_before_the_nodes_of_a_killed_driver_have_ended(tmp_path: Path) -> None:
    """The event loop of such a node is blocked, so it ends when its time is over."""
    fence = tmp_path / "fence"
    async with driver("deaf", nodes=2, drain_timeout=1.5, fence=str(fence)) as d, ActorSystem() as system:
        old = await d.ready()
        await trio.sleep(0.5)  # now they are blocked
        os.kill(d.pid, signal.SIGKILL)
        await d.process.wait()
        assert any(map(is_alive, old))
        async with local_nodes(system, 1, app, settings=NodeSettings(fence=fence)) as nodes:
            assert not any(map(is_alive, old))
            assert is_alive(nodes["n0"].pid)
            with pytest.raises(
                ConfigurationError, match=r"processes of another fleet have had the fence \S+fence for 0.1 s"
            ):
                async with local_nodes(system, 1, app, settings=NodeSettings(fence=fence, start_timeout=0.1)):
                    pass
        with fence.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
