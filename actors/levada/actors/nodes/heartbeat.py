"""Heartbeats between a driver and its nodes. They have their own threads, so a busy handler does not look like a hang.

Each node has a connection to its driver for heartbeats only. Both sides write a byte at intervals, and read what has arrived:

* A node knows at once that its driver has ended, because the connection closes. A silent driver counts as gone too: it may be stopped
  (SIGSTOP) or out of reach. `Heart` then calls back, and makes sure that the process ends soon, whatever its actors do.
* The driver learns of the end of a node from the operating system. Its `Pulse` only records when it last heard from each node.

The bytes have no meaning. This module imports only the standard library.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["LAST", "MARGIN", "ORPHANED", "Beats", "Heart", "Pulse", "exit_within"]

ORPHANED: Final = 70
"""The exit code of a node that has lost its driver."""
MARGIN: Final = 5.0
"""Seconds after `NodeSettings.silence` within which a node that is out of reach has certainly ended: it notices after one heartbeat, 1 second at
most, and ends within `LAST`."""
LAST: Final = 3.0
"""The most seconds for a process to end that has lost its driver, if the driver cannot see it end."""
_BEAT: Final = b"\0"
_ENDED: Final = "the driver has ended"
_FIRST_BEAT: Final = 1.0  # seconds, until `Heart.settle` says


def exit_within(seconds: float) -> None:
    """End this process after `seconds`, whatever its actors do. Native code that keeps the interpreter's lock delays it."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(ORPHANED)

    threading.Thread(target=end, name="levada exit", daemon=True).start()


class Heart:
    """Sends a node's heartbeat, and listens to the driver's.

    Args:
        connection: a socket; this object closes it.
        lost: called once, in the heart's thread, with the reason why the driver counts as gone.
    """

    def __init__(self, connection: socket.socket, lost: Callable[[str], object]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._lost = lost
        self._closed = False
        self._silence: float | None = None
        self._beat = _FIRST_BEAT
        self.is_alone = False
        """Whether the driver's process has certainly ended."""
        self._thread = threading.Thread(target=self._run, name="levada heart", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until it has called back, but no longer than so many seconds."""
        self._thread.join(seconds)

    def settle(self, beat: float, silence: float) -> None:
        """Send a byte every `beat` seconds, and treat the driver as gone after `silence` seconds without one."""
        self._beat, self._silence = beat, silence

    def close(self) -> None:
        """Stop without calling back, in a process that continues."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        heard = looked = time.monotonic()
        reason = ""
        while not reason:
            try:
                self._socket.send(_BEAT)
            except BlockingIOError:
                pass  # the driver is stopped
            except OSError:
                reason = _ENDED
                break
            poll.poll(self._beat * 1000)
            now = time.monotonic()
            silence = self._silence
            if silence is not None and now - looked > silence:
                # This process was stopped for so long that the driver may have started a successor.
                reason = f"this process did not run for {now - looked:.1f} s"
                break
            looked = now
            try:
                if not self._socket.recv(4096):
                    reason = _ENDED
                heard = now
            except BlockingIOError:
                if silence is not None and now - heard > silence:
                    reason = f"nothing was heard from the driver for {now - heard:.1f} s"
            except OSError:
                reason = _ENDED
        self.is_alone = reason is _ENDED
        self._socket.close()
        if not self._closed:
            self._lost(reason)


class Beats:
    """The heartbeat of one node, on the driver's side."""

    def __init__(self, pulse: Pulse, connection: socket.socket) -> None:
        self._pulse = pulse
        self.socket = connection
        self.missed = 0
        """Rounds of the pulse since the node was last heard. Not seconds, because a driver that was stopped has not listened."""

    @property
    def silence(self) -> float:
        """Seconds of listening since the node was last heard."""
        return self.missed * self._pulse.beat

    def close(self) -> None:
        """Close the connection, which the node notices."""
        self._pulse.forget(self)


class Pulse:
    """The driver's thread that sends heartbeats to nodes and records theirs: ``with Pulse(beat) as pulse``.

    Args:
        beat: seconds between two bytes.
    """

    def __init__(self, beat: float) -> None:
        self.beat = beat
        self._lock = threading.Lock()
        self._nodes: list[Beats] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="levada pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for node in list(self._nodes):
            node.close()

    def listen(self, connection: socket.socket) -> Beats:
        """Add a node. The returned object closes the socket."""
        connection.setblocking(False)
        beats = Beats(self, connection)
        with self._lock:
            self._nodes.append(beats)
        return beats

    def forget(self, beats: Beats) -> None:
        """Remove a node, and close its socket."""
        with self._lock:
            if beats in self._nodes:
                self._nodes.remove(beats)
        beats.socket.close()

    def _run(self) -> None:
        while not self._over.wait(self.beat):
            with self._lock:
                for node in self._nodes:
                    self._exchange(node)

    def _exchange(self, node: Beats) -> None:
        try:
            node.socket.send(_BEAT)
        except OSError:
            pass  # the node is stopped, or has ended, which the operating system reports
        node.missed += 1
        try:
            if node.socket.recv(4096):
                node.missed = 0
        except OSError:
            pass
