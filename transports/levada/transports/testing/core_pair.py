"""Two protocol cores wired to each other, without I/O: a test decides which bytes arrive, when, in which pieces, and which are lost."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

__all__ = ["CorePair"]

C = TypeVar("C")


class CorePair(Generic[C]):
    """Client and server of one protocol, the bytes between them, and a clock that moves when the test says so.

    Args:
        client: the client's core, with `data_to_send` and `receive_data`, or `receive_message` if `framed`.
        server: the server's core.
        framed: whether messages are delivered whole, as by a WebSocket.
        ignore: classes of events that are left out.
    """

    def __init__(self, client: C, server: C, *, framed: bool = False, ignore: tuple[type, ...] = ()) -> None:
        self.client = client
        self.server = server
        self.framed = framed
        self.now = 0.0
        """The time that both cores are given."""
        self.bytes_in_flight = {"client": bytearray(), "server": bytearray()}
        """Bytes sent and not delivered yet, by the end that receives them; a framed pair has `messages_in_flight`."""
        self.messages_in_flight: dict[str, list[bytes]] = {"client": [], "server": []}
        self._ignore = ignore

    def collect(self) -> None:
        """Put the output of both cores on the wire."""
        for sender, to in ((self.client, "server"), (self.server, "client")):
            core: Any = sender
            data = core.data_to_send(self.now)
            if self.framed:
                self.messages_in_flight[to] += data
            else:
                self.bytes_in_flight[to] += b"".join(data)

    def to_server(self, size: int | None = None) -> list[Any]:
        """Deliver to the server up to `size` bytes (framed: messages; ``None``: all) and return its events."""
        return self._deliver(self.server, "server", size)

    def to_client(self, size: int | None = None) -> list[Any]:
        """Deliver to the client up to `size` bytes (framed: messages; ``None``: all) and return its events."""
        return self._deliver(self.client, "client", size)

    def settle(self) -> tuple[list[Any], list[Any]]:
        """Deliver in both directions until nothing is under way; return the events of the client and of the server."""
        of_client: list[Any] = []
        of_server: list[Any] = []
        while True:
            self.collect()
            if not any((*self.bytes_in_flight.values(), *self.messages_in_flight.values())):
                return of_client, of_server
            of_server += self.to_server()
            of_client += self.to_client()

    def cut(self) -> None:
        """Lose everything queued and under way, as a broken carrier does."""
        self.collect()
        for buffer in self.bytes_in_flight.values():
            buffer.clear()
        for messages in self.messages_in_flight.values():
            messages.clear()

    def _deliver(self, core: Any, name: str, size: int | None) -> list[Any]:
        self.collect()
        events: list[Any] = []
        if self.framed:
            messages = self.messages_in_flight[name]
            taken = messages[:size]
            del messages[:size]
            for message in taken:
                events += core.receive_message(message, self.now)
        else:
            buffer = self.bytes_in_flight[name]
            data = bytes(buffer[:size])
            del buffer[:size]
            if data:
                events += core.receive_data(data, self.now)
        return [event for event in events if not isinstance(event, self._ignore)]
