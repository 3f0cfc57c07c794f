"""A way to the database that can be cut at any byte."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

__all__ = ["Proxy", "proxy_to"]


class Proxy:
    """Passes connections on to the socket of a server, until one of its budgets is used up: then it cuts them all."""

    def __init__(self, socket: Path) -> None:
        self.port = 0
        self.left: dict[str, int | None] = {"up": None, "down": None}
        """Bytes to the server and from it until the cut; None: no cut."""
        self.passed = {"up": 0, "down": 0}
        self.cuts = 0
        self.next_cut = trio.Event()
        self._socket = socket
        self._scopes: set[trio.CancelScope] = set()

    def cut(self) -> None:
        """Cut all connections."""
        self.cuts += 1
        self.next_cut.set()
        self.next_cut = trio.Event()
        self.left = {"up": None, "down": None}
        for scope in self._scopes:
            scope.cancel()

    async def serve(self, client: trio.SocketStream) -> None:
        """Serve one connection."""
        try:
            server = await trio.open_unix_socket(str(self._socket))
        except OSError:
            await client.aclose()
            return
        async with client, server, trio.open_nursery() as nursery:
            self._scopes.add(nursery.cancel_scope)
            try:
                async with trio.open_nursery() as both:
                    both.start_soon(self._pump, "up", client, server, nursery.cancel_scope)
                    both.start_soon(self._pump, "down", server, client, nursery.cancel_scope)
            finally:
                self._scopes.discard(nursery.cancel_scope)

    async def _pump(self, way: str, source: trio.abc.Stream, target: trio.abc.Stream, scope: trio.CancelScope) -> None:
        try:
            while data := await source.receive_some(65536):
                left = self.left[way]
                if left is not None and left <= len(data):
                    if left:
                        await target.send_all(data[:left])
                    self.cut()
                    return
                if left is not None:
                    self.left[way] = left - len(data)
                self.passed[way] += len(data)
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()


@asynccontextmanager
async def proxy_to(socket: Path) -> AsyncIterator[Proxy]:
    """Listen on a port of this machine, and pass connections on to a socket."""
    proxy = Proxy(socket)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, proxy.serve, 0, host="127.0.0.1"))
        proxy.port = listeners[0].socket.getsockname()[1]
        yield proxy
        nursery.cancel_scope.cancel()
