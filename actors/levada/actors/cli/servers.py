"""The consoles of ``levada serve``: where they are, and how other commands find them.

Each server has a socket, named after its process, in a folder that only this user can open: ``$XDG_RUNTIME_DIR/levada``, or
``$RUNTIME_DIRECTORY/levada`` (of a systemd unit with ``RuntimeDirectory=``), or ``/tmp/levada-UID`` if neither variable is set. Another user
can take the last of these names first; then the server has no console, and its log says so.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from levada.actors.console import serve_console
from levada.actors.console.server import Command
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError
from levada.framework.platform import PLATFORM

__all__ = ["console_of", "own_console", "serve_own_console"]

logger = logging.getLogger("levada.serve")

_SUFFIX: Final = ".console"
_HAS_CONSOLES: Final = hasattr(socket, "AF_UNIX") and hasattr(os, "getuid")
"""Not on Windows."""
_NODES: Final = ".nodes.console"
"""The suffix of servers with nodes."""


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


def own_console(*, nodes: bool = False) -> Path:
    """Return the path for the console of this process, and remove the sockets of dead servers.

    Args:
        nodes: whether ``levada nodes`` is to find it, too.

    Raises:
        ConfigurationError: the folder cannot be used.
    """
    folder = _folder()
    for path in folder.glob(f"*{_SUFFIX}"):
        if not _answers(path):
            path.unlink(missing_ok=True)
    return folder / f"{os.getpid()}{_NODES if nodes else _SUFFIX}"


@asynccontextmanager
async def serve_own_console(system: ActorSystem, commands: Mapping[str, Command] | None = None) -> AsyncIterator[None]:
    """Show this server to ``levada top`` while the block lasts, and with commands also to ``levada nodes``.

    If there can be no console, the log says why, and the server works without it. A server in a simulated network has none.
    """
    async with AsyncExitStack() as console:
        if PLATFORM.get().network is None and _HAS_CONSOLES:
            try:
                path = own_console(nodes=commands is not None)
                await console.enter_async_context(serve_console(system, path, commands=commands))
            except ConfigurationError as error:
                logger.warning("levada top does not find this server: %s", error)
        yield


def console_of(pid: int | None, *, nodes: bool = False) -> Path:
    """Return the console of a server of this user.

    Args:
        pid: the server's process; ``None`` if it is the only server.
        nodes: whether only servers with nodes count.

    Raises:
        ConfigurationError: there is no such server, or `pid` is ``None`` and there are several; or the system has no Unix sockets.
    """
    if not _HAS_CONSOLES:
        raise ConfigurationError("servers are found through Unix sockets, which this system does not have")
    kind = "levada serve --nodes" if nodes else "levada serve"
    pattern = f"*{_NODES if nodes else _SUFFIX}"
    found = {path.name.partition(".")[0]: path for path in sorted(_folder().glob(pattern)) if _answers(path)}
    if pid is not None:
        if str(pid) not in found:
            raise ConfigurationError(f"process {pid} is not a '{kind}' of yours; {_servers(list(found), kind)}")
        return found[str(pid)]
    if len(found) != 1:
        raise ConfigurationError(_servers(list(found), kind))
    return next(iter(found.values()))


def _servers(pids: list[str], kind: str) -> str:
    return f"choose a server: --pid {' or '.join(pids)}" if pids else f"no '{kind}' of yours is running"


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
