"""How ``levada top`` and ``levada nodes`` find the server of a user."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from levada.actors import cli
from levada.actors.cli.servers import console_of, own_console, serve_own_console
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError

pytestmark = pytest.mark.loopback


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "levada"


@pytest.fixture
def servers(folder: Path) -> Iterator[list[Path]]:
    """Two servers that listen, the first with nodes, and the socket of a dead one."""
    own_console()
    with ExitStack() as ended:
        for name in ("40.nodes.console", "5.console", "7.console"):
            listening = ended.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listening.bind(str(folder / name))
            listening.listen()
        listening.close()
        yield [folder / "40.nodes.console", folder / "5.console"]


def test_the_folder_is_for_this_user_alone(folder: Path) -> None:
    assert own_console() == folder / f"{os.getpid()}.console"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigurationError, match="that no other user can open: chmod 700 it"):
        own_console()
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(ConfigurationError, match="must be a folder of yours"):
        own_console()
    folder.unlink()
    folder.touch()
    with pytest.raises(ConfigurationError, match=r"cannot use .* for the sockets of servers"):
        own_console()


def test_the_folder_of_a_systemd_unit_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, if the unit has several; not before the user's own, where commands in a shell look."""
    unit = folder.parent / "unit"
    unit.mkdir()
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{unit}:/run/other")
    assert own_console() == folder / f"{os.getpid()}.console"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert own_console() == unit / "levada" / f"{os.getpid()}.console"
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    assert own_console() == folder.parent / f"levada-{os.getuid()}" / f"{os.getpid()}.console"


def test_which_server(servers: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert console_of(40) == servers[0]
    with pytest.raises(ConfigurationError, match=r"choose a server: --pid 40 or 5"):
        console_of(None)
    with pytest.raises(
        ConfigurationError, match="process 7 is not a 'levada serve' of yours; choose a server: --pid 40 or 5"
    ):
        console_of(7)
    assert console_of(None, nodes=True) == servers[0]
    with pytest.raises(
        ConfigurationError, match="process 5 is not a 'levada serve --nodes' of yours; choose a server: --pid 40"
    ):
        console_of(5, nodes=True)
    assert cli.main(["top", "/somewhere", "--pid", "5"]) == 2
    assert capsys.readouterr().err == "levada: give either PATH or --pid\n"


def test_a_new_server_clears_away_the_dead_ones(servers: list[Path], folder: Path) -> None:
    assert len(list(folder.iterdir())) == 3
    own_console()
    assert sorted(folder.iterdir()) == servers
    for path in servers:
        path.unlink()
    with pytest.raises(ConfigurationError, match=r"no 'levada serve' of yours is running"):
        console_of(None)
    with pytest.raises(ConfigurationError, match=r"no 'levada serve --nodes' of yours is running"):
        console_of(None, nodes=True)


async def test_a_server_without_a_place_for_its_console_says_so_and_serves(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkdir(folder, 0o755)
    async with ActorSystem() as system, serve_own_console(system):
        (line,) = [record.getMessage() for record in caplog.records if record.name == "levada.serve"]
    assert line.startswith("levada top does not find this server: ")
    assert line.endswith("must be a folder of yours that no other user can open: chmod 700 it")


def test_nodes_that_wait_for_their_start_show_when_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"pid": None, "restarts": 1, "host": "desk", "started": 0.0, "starts_in": None}
    nodes = [
        known | {"name": "n0", "state": "starting"},
        known | {"name": "n1", "state": "down", "pid": 4711, "starts_in": 2.34},
    ]
    serving, asked = threading.Event(), threading.Event()

    async def listed(_: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": nodes}

    async def serve() -> None:
        async with ActorSystem() as system, serve_own_console(system, {"nodes": listed}):
            serving.set()
            await trio.to_thread.run_sync(asked.wait)

    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(trio.run, serve)
        try:
            assert serving.wait(50)
            assert cli.main(["nodes", "ls"]) == 0
        finally:
            asked.set()
        server.result(50)
    assert capsys.readouterr().out.splitlines() == [
        "name  state     pid   restarts  host  next start",
        "n0    starting        1         desk",
        "n1    down      4711  1         desk  in 2.3 s",
    ]
