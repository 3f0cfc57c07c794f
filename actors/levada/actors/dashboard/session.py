"""The WebSocket of one browser. The browser sends its view, and gets the rows in view: when the view changes, and then twice a second at most.

A browser that does not read gets no more answers: each look waits until the answer before it is in the carrier's queue, which is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import attrs
import trio

from levada.actors.console import View
from levada.actors.console.snapshot import Watching
from levada.framework.errors import DecodeError, LevadaError
from levada.framework.text import printable
from levada.transports.carriers.websocket_stream import WebSocketStream

from .sources import Source

__all__ = ["AGAIN", "SOONEST", "DashboardSession"]

SOONEST: Final = 0.15
"""The shortest time between two answers in seconds, for a browser whose view keeps changing."""
AGAIN: Final = 1.0
"""Seconds between two attempts to reach a program that is away."""


class DashboardSession:
    """Runs one WebSocket."""

    def __init__(self, socket: WebSocketStream, source: Source) -> None:
        self._socket = socket
        self._source = source
        self._view = View(page="none", count=0)
        self._last = 0  # number of the last event of this node that the browser has
        self._node = ""
        self._requests: list[Mapping[str, Any]] = []  # one at most: the reader waits for its answer
        self._changed = trio.Event()
        self._answered = trio.Event()

    async def run(self) -> None:
        """Serve the browser until it leaves, or sends an invalid message.

        Raises:
            CarrierError: the browser has disconnected.

        Cancellation:
            the carrier stays open.
        """
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def show() -> None:
                while True:
                    self._last = 0  # a new connection numbers its events from 1
                    try:
                        async with self._source() as ask:
                            await self._show(ask)
                    except LevadaError as error:
                        await self._send({"gone": printable(str(error))})
                    await trio.sleep(AGAIN)

            try:
                await self._read()
            finally:
                nursery.cancel_scope.cancel()

    async def _read(self) -> None:
        while True:
            try:
                members = json.loads(await self._socket.receive())
                if not isinstance(members, dict):
                    raise DecodeError("a message is a JSON object")
                if "view" in members:
                    self._view = View.from_json(members["view"])
                else:
                    self._answered = trio.Event()
                    self._requests.append(members)
            except (ValueError, RecursionError) as error:  # DecodeError is a ValueError
                await self._socket.aclose(1008, printable(str(error), 100))
                return
            self._changed.set()
            if self._requests:
                await self._answered.wait()

    async def _show(self, ask: Watching) -> None:
        while True:
            self._changed = trio.Event()
            while self._requests:
                answer = await ask(self._requests[0])
                self._requests.clear()
                self._answered.set()
                await self._send({"answer": answer})
            view = self._view
            if view.node != self._node:
                self._node, self._last = view.node, 0
            answer = await ask({"view": attrs.evolve(view, after=self._last).to_json()})
            await self._send({"view": answer})
            self._last = answer["last"]
            began = trio.current_time()
            with trio.move_on_after(answer["interval"]):
                await self._changed.wait()
                await trio.sleep_until(began + SOONEST)

    async def _send(self, members: Mapping[str, Any]) -> None:
        await self._socket.send(json.dumps(members, separators=(",", ":")).encode())
