"""The consoles of ``levada serve --nodes``: where they are, and how other commands find them.

Each server has a socket, named after its process, in a folder that only this user can open: ``$XDG_RUNTIME_DIR/levada``, or
``$RUNTIME_DIRECTORY/levada`` (of a systemd unit with ``RuntimeDirectory=``), or ``/tmp/levada-UID`` if neither variable is set. Another user
can take the last of these names first; then the server does not start.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

from levada.framework.errors import ConfigurationError

__all__ = ["console_of", "own_console"]

_SUFFIX = ".console"


def _folder() -> Path:
    """Return the folder; make it if it is missing.

    Raises:
        ConfigurationError: it cannot be made, or other users own it or can open it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    folder = Path(runtime, "levada") if runtime else Path(tempfile.gettempdir(), f"levada-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigurationError(f"cannot use {folder} for the sockets of servers: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(f"{folder} must be a folder of yours that no other user can open: chmod 700 it")
    return folder


def own_console() -> Path:
    """Return the path for the console of this process, and remove the sockets of dead servers.

    Raises:
        ConfigurationError: the folder cannot be used.
    """
    folder = _folder()
    for path in folder.glob(f"*{_SUFFIX}"):
        if not _answers(path):
            path.unlink(missing_ok=True)
    return folder / f"{os.getpid()}{_SUFFIX}"


def console_of(pid: int | None) -> Path:
    """Return the console of a server of this user.

    Args:
        pid: the server's process; ``None`` if it is the only server.

    Raises:
        ConfigurationError: there is no such server, or `pid` is ``None`` and there are several.
    """
    found = {path.name.removesuffix(_SUFFIX): path for path in sorted(_folder().glob(f"*{_SUFFIX}")) if _answers(path)}
    if pid is not None:
        if str(pid) not in found:
            raise ConfigurationError(f"process {pid} is not a 'levada serve --nodes' of yours; {_servers(list(found))}")
        return found[str(pid)]
    if len(found) != 1:
        raise ConfigurationError(_servers(list(found)))
    return next(iter(found.values()))


def _servers(pids: list[str]) -> str:
    return f"choose a server: --pid {' or '.join(pids)}" if pids else "no 'levada serve --nodes' of yours is running"


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # the queue is full
            return True
        except OSError:
            return False
    return True
