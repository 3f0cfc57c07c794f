"""How ``levada top`` and ``levada nodes`` find the server of a user."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from levada.actors import cli
from levada.actors.cli.servers import console_of, own_console
from levada.framework.errors import ConfigurationError

pytestmark = pytest.mark.loopback


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "levada"


@pytest.fixture
def servers(folder: Path) -> Iterator[list[Path]]:
    """Two servers that listen, and the socket of a dead one."""
    own_console()
    with ExitStack() as ended:
        for pid in (5, 40, 7):
            listening = ended.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listening.bind(str(folder / f"{pid}.console"))
            listening.listen()
        listening.close()
        yield [folder / "40.console", folder / "5.console"]


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
        ConfigurationError, match="process 7 is not a 'levada serve --nodes' of yours; choose a server: --pid 40 or 5"
    ):
        console_of(7)
    assert cli.main(["top", "/somewhere", "--pid", "5"]) == 2
    assert capsys.readouterr().err == "levada: give either PATH or --pid\n"


def test_a_new_server_clears_away_the_dead_ones(servers: list[Path], folder: Path) -> None:
    assert len(list(folder.iterdir())) == 3
    own_console()
    assert sorted(folder.iterdir()) == servers
    for path in servers:
        path.unlink()
    with pytest.raises(ConfigurationError, match=r"no 'levada serve --nodes' of yours is running"):
        console_of(None)
