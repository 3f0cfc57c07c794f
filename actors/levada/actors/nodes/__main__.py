"""``python -m levada.actors.nodes NAME TRACING FENCE CONNECTION HEARTBEAT [SOCKETS]``: a node as a child process; `local_nodes` runs it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

import trio

from levada.actors.apps import freeze_heap
from levada.actors.descriptors import raise_descriptor_limit
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.framework.text import text_of
from levada.transports.carriers import unix
from levada.transports.carriers.shared_sockets import PassedSockets, ServerEnding
from levada.transports.carriers.sockets import ListeningAddress, ListeningSocket, open_here, sockets_from
from levada.transports.qmux import dial_over

from .heartbeat import ORPHANED, Heart, exit_within
from .messages import LINE_END, NodeLost, Welcome
from .node_side import run_node
from .nodes import TO_DRIVER
from .tracing import made_by

__all__ = ["main"]

_LEVELS = ((logging.ERROR, "<3>"), (logging.WARNING, "<4>"), (logging.INFO, "<6>"))
_ENDS: Final = 100
"""Lines of a record's begin and of its end that are sent. A traceback through two functions that call each other has thousands."""

_NOTICED_WITHIN: Final = 1.0
"""Seconds in which the heart notices the end of a driver too, once the connection has."""


class _Marked(logging.Formatter):
    """Writes each record as one line that begins with its level, as in syslog, so that the driver logs one record of that level."""

    def format(self, record: logging.LogRecord) -> str:
        mark = next((mark for level, mark in _LEVELS if record.levelno >= level), "<7>")
        lines = super().format(record).splitlines()
        if len(lines) > 2 * _ENDS:
            lines[_ENDS:-_ENDS] = [f"… {len(lines) - 2 * _ENDS} lines …"]
        return mark + LINE_END.join(lines)


class _Process:
    """This process as a node."""

    def __init__(
        self,
        name: str,
        tracing: str,
        connection: socket.socket,
        heartbeat: socket.socket,
        shared: PassedSockets | None,
    ) -> None:
        self._name = name
        self._tracing = tracing
        self._connection = connection
        self._shared = shared
        self._drain_timeout = 1.0
        self._lost = ""
        self._folder = ""
        self._life = trio.CancelScope()
        self._end = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._heart = Heart(heartbeat, self._driver_lost)

    def _driver_lost(self, reason: str) -> None:
        """End without draining; called in the heart's thread."""
        self._lost = reason
        exit_within(self._drain_timeout)
        if self._folder and self._heart.is_alone:  # the fleet's sockets, which no other process can remove now
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._life.cancel)
            except trio.RunFinishedError:
                pass

    def _settle(self, welcome: Welcome) -> None:
        self._drain_timeout = welcome.drain_timeout
        self._folder = os.fsdecode(os.path.dirname(unquote_to_bytes(urlsplit(welcome.listen).path)))
        self._heart.settle(welcome.beat, welcome.silence)
        sys.path[:] = map(os.fsdecode, welcome.path)
        logging.getLogger().setLevel(welcome.log_level)
        if welcome.nice:
            os.nice(welcome.nice)
        if welcome.affinity:
            try:
                os.sched_setaffinity(0, welcome.affinity)
            except (OSError, OverflowError) as error:
                raise ConfigurationError(
                    f"cannot run on the CPUs {welcome.affinity} (NodeSettings.affinity): {error}"
                ) from error
        if welcome.rlimits:
            import resource

            for limit, value in welcome.rlimits.items():
                try:
                    resource.setrlimit(getattr(resource, limit), (value, value))
                except (OSError, ValueError) as error:
                    raise ConfigurationError(
                        f"cannot set {limit} to {value} (NodeSettings.rlimits): {error}"
                    ) from error

    async def _open_sockets(self, address: ListeningAddress) -> list[ListeningSocket]:
        """Open sockets for a listener. The app's are shared with other nodes; the socket for members is this node's own."""
        own = address.kind == "unix" and os.path.dirname(address.host) == self._folder
        if self._shared is None or own:
            return await open_here(address)
        try:
            return await self._shared(address)
        except ServerEnding:
            self._end.set()  # the order to drain is on its way
            raise

    def main(self) -> int:
        """Run the node to its end; return the exit code."""
        log = logging.getLogger("levada.actors.nodes")
        code = 0
        try:
            with sockets_from(self._open_sockets):
                trio.run(self._run)
        except* ConnectionLost as group:
            self._lost = self._lost or str(_first(group))
        except* NodeLost as group:
            log.error("%s", _first(group))
            code = 1
        except* (SystemExit, KeyboardInterrupt) as group:  # of an actor; an app's is its failure
            error = _first(group)
            error.__suppress_context__ = True  # how the system ended because of it
            if isinstance(error, SystemExit):
                log.error("ended by an actor: SystemExit: %s", error, exc_info=error)
                code = error.code if isinstance(error.code, int) else 1
            else:
                log.error("ended by an actor: KeyboardInterrupt", exc_info=error)
                code = 130
        if self._lost:
            self._heart.join(_NOTICED_WITHIN)  # it removes the fleet's sockets
            log.warning("%s", self._lost)
            return ORPHANED
        return 1 if self._life.cancelled_caught else code

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._life, trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            if self._lost:
                self._life.cancel()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, signals)
                opens = partial(dial_over, unix.over(self._connection, "the driver"), TO_DRIVER)
                await run_node(
                    opens,
                    name=self._name,
                    end=self._end,
                    tracing=made_by(self._tracing),
                    settle=self._settle,
                    ready=freeze_heap,
                    lost=exit_within,
                )
                nursery.cancel_scope.cancel()

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async for _ in signals:
            if self._end.is_set():
                self._life.cancel()
            self._end.set()


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group, whose own text says nothing."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _log_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is not SystemExit:
        error = failed.exc_value or failed.exc_type()
        name = failed.thread.name if failed.thread is not None else "that has ended"
        logging.getLogger("levada.actors.nodes").error(
            "thread %s failed", name, exc_info=(failed.exc_type, error, failed.exc_traceback)
        )


def _log_unraisable(ignored: sys.UnraisableHookArgs) -> None:
    error = ignored.exc_value or ignored.exc_type()
    logging.getLogger("levada.actors.nodes").error(
        "%s: %s",
        ignored.err_msg or "exception ignored in",
        text_of(ignored.object, repr),
        exc_info=(ignored.exc_type, error, ignored.exc_traceback),
    )


def main(arguments: list[str]) -> int:
    """Run a node; returns the exit code: 0 drained, 1 failed, 70 lost its driver; or the code of ``sys.exit``."""
    raise_descriptor_limit()
    name, tracing, fence, *numbers = arguments
    if fence:
        os.set_inheritable(int(fence), False)  # it stays open until this process has ended
    inherited = [socket.socket(fileno=int(number)) for number in numbers]
    for each in inherited:
        each.set_inheritable(False)  # child processes of the app must not keep them open
    connection, heartbeat, *passed = inherited
    handler = logging.StreamHandler()
    handler.setFormatter(_Marked("%(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    # Python writes these in several lines, and each would be a record of the driver's log.
    threading.excepthook = _log_thread
    sys.unraisablehook = _log_unraisable
    logging.captureWarnings(True)
    return _Process(name, tracing, connection, heartbeat, PassedSockets(passed[0]) if passed else None).main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
