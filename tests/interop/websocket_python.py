"""A WebSocket peer made with wsproto and blocking sockets, for `test_websocket_peers`; run as a program.

``websocket_python.py serve [CERT KEY]`` prints ``LISTENING <port>`` and does with each message what the path says, see `Served`; it ends
when its standard input does.  ``websocket_python.py call URL SCENARIO [CA]`` plays one scenario against an echo server and prints one
JSON value.  Both do what the programs in ``node/`` do with npm's ws.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason

LARGEST = 8 << 20


class Peer:
    """One WebSocket: events in, events out."""

    def __init__(self, sock: socket.socket, kind: ConnectionType) -> None:
        self.sock = sock
        self.ws = WSConnection(kind)
        self._pieces: list[Any] = []

    def send(self, event: Event) -> None:
        self.sock.sendall(self.ws.send(event))

    def events(self) -> Iterator[Event]:
        """Yield what comes, until the connection is gone; pings and closes are answered on the way."""
        while True:
            try:
                data = self.sock.recv(65_536)
            except OSError:
                return
            if not data:
                return
            self.ws.receive_data(data)
            for event in self.ws.events():
                yield event
                if isinstance(event, Ping):
                    self.send(event.response())
                elif isinstance(event, CloseConnection):
                    if self.ws.state.name == "REMOTE_CLOSING":
                        self.send(event.response())
                    return

    def whole(self, event: Message[Any]) -> Any:
        """Gather fragments; the message once it is complete, else ``None``."""
        self._pieces.append(event.data)
        if not event.message_finished:
            return None
        pieces, self._pieces = self._pieces, []
        return pieces[0][:0].join(pieces)

    def gathered(self) -> int:
        return sum(map(len, self._pieces))


# ---------------------------------------------------------------- server


class Served:
    """A client of the server. Each path has a method for its messages."""

    last_close = ""

    def __init__(self, sock: socket.socket) -> None:
        self.peer = Peer(sock, ConnectionType.SERVER)
        self.path = ""

    def run(self) -> None:
        peer = self.peer
        for event in peer.events():
            if isinstance(event, Request):
                self.path = event.target.partition("?")[0]
                chosen = "rsocket" if "rsocket" in event.subprotocols else None
                peer.send(AcceptConnection(subprotocol=chosen))
            elif isinstance(event, Message):
                message = peer.whole(event)
                if peer.gathered() > LARGEST or (message is not None and len(message) > LARGEST):
                    peer.send(CloseConnection(1009))
                elif message is not None and peer.ws.state.name == "OPEN":
                    getattr(self, "on_" + self.path[1:].replace("-", "_"))(message)
            elif isinstance(event, Pong) and self.path == "/ping":
                peer.send(BytesMessage(event.payload))
            elif isinstance(event, CloseConnection) and self.path != "/last-close":
                Served.last_close = f"{int(event.code)} {event.reason or ''}"
        peer.sock.close()

    def on_echo(self, message: Any) -> None:
        self.peer.send(TextMessage(message) if isinstance(message, str) else BytesMessage(message))

    def on_fragments(self, message: bytes) -> None:
        third = -(-len(message) // 3)
        self.peer.send(BytesMessage(message[:third], message_finished=False))
        self.peer.send(Ping(b"between"))
        self.peer.send(BytesMessage(message[third : 2 * third], message_finished=False))
        self.peer.send(BytesMessage(message[2 * third :]))

    def on_ping(self, message: bytes) -> None:
        self.peer.send(Ping(message))

    def on_close(self, message: bytes) -> None:
        self.peer.send(BytesMessage(message))
        self.peer.send(CloseConnection(4001, message.decode()))

    def on_terminate(self, message: bytes) -> None:
        self.peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.peer.sock.close()

    def on_last_close(self, message: Any) -> None:
        self.peer.send(TextMessage(self.last_close))


def serve(files: list[str]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if files else None
    if context is not None:
        context.load_cert_chain(*files)

    def one(sock: socket.socket) -> None:
        try:
            Served(context.wrap_socket(sock, server_side=True) if context is not None else sock).run()
        except OSError:
            sock.close()

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=one, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(f"LISTENING {listener.getsockname()[1]}", flush=True)
    sys.stdin.read()


# ---------------------------------------------------------------- client


class Caller:
    """Plays the scenarios; each method is one and returns what it found."""

    def __init__(self, url: str, scenario: str, ca: str | None) -> None:
        parts = urlsplit(url)
        sock = socket.create_connection((parts.hostname, parts.port))
        if parts.scheme == "wss":
            sock = ssl.create_default_context(cafile=ca).wrap_socket(sock, server_hostname=parts.hostname)
        self.peer = Peer(sock, ConnectionType.CLIENT)
        self.events = self.peer.events()
        offered = ["other", "rsocket"] if scenario == "subprotocol" else []
        self.peer.send(Request(host=parts.netloc, target=parts.path, subprotocols=offered))

    def play(self, scenario: str) -> Any:
        event = next(self.events)
        if isinstance(event, RejectConnection):
            body = b"".join(event.data for event in self.events if isinstance(event, RejectData))
            return {"status": event.status_code, "body": body.decode()}
        assert isinstance(event, AcceptConnection)
        self.subprotocol_chosen = event.subprotocol
        return getattr(self, scenario)()

    def message(self) -> Any:
        for event in self.events:
            if isinstance(event, Message) and (whole := self.peer.whole(event)) is not None:
                return whole
        raise AssertionError("the connection ended")

    def ended(self) -> dict[str, Any]:
        """Wait for the peer's close: its code and reason."""
        for event in self.events:
            if isinstance(event, CloseConnection):
                return {"code": int(event.code), "reason": event.reason or ""}
        return {"code": 1006, "reason": ""}

    def close(self, code: int = CloseReason.NO_STATUS_RCVD, reason: str | None = None) -> dict[str, Any]:
        self.peer.send(CloseConnection(code, reason))
        return self.ended()

    def echo(self) -> Any:
        results = {}
        for size in (0, 1, 125, 126, 1023, 1024, 65_535, 65_536, 5 << 20):
            data = os.urandom(size)
            sender = threading.Thread(target=self.peer.send, args=(BytesMessage(data),))
            sender.start()
            results[size] = self.message() == data
            sender.join()
        return {"results": results} | self.close(4002, "enough")

    def many(self) -> Any:
        wanted = [b"message %d" % number for number in range(2000)]
        for data in wanted:
            self.peer.send(BytesMessage(data))
        return {"same": [self.message() for _ in wanted] == wanted} | self.close()

    def fragments(self) -> Any:
        peer = self.peer
        peer.send(BytesMessage(b"one ", message_finished=False))
        peer.send(Ping(b"between"))
        peer.send(BytesMessage(b"two ", message_finished=False))
        peer.send(BytesMessage(b"three"))
        data = pong = None
        while data is None or pong is None:
            event = next(self.events)
            if isinstance(event, Pong):
                pong = event.payload.decode()
            elif isinstance(event, Message):
                whole = peer.whole(event)
                data = whole.decode() if whole is not None else None
        return {"data": data, "pong": pong} | self.close(1000)

    def text(self) -> Any:
        self.peer.send(TextMessage("text"))
        return self.ended()

    def large(self) -> Any:
        sender = threading.Thread(target=self.send_large)
        sender.start()
        found = self.ended()
        sender.join()
        return found

    def send_large(self) -> None:
        try:
            self.peer.send(BytesMessage(os.urandom((6 << 20) + 1)))
        except OSError:
            pass  # the server had read enough

    def broken(self) -> Any:
        self.peer.sock.sendall(bytes([0xF2, 0x80, 0, 0, 0, 0]))  # all reserved bits
        return self.ended()

    def closed_by_server(self) -> Any:
        self.peer.send(BytesMessage(b"close me"))
        return self.ended()

    def subprotocol(self) -> Any:
        return {"protocol": self.subprotocol_chosen} | self.close()


def main() -> None:
    if sys.argv[1] == "serve":
        serve(sys.argv[2:])
    else:
        url, scenario, *rest = sys.argv[2:]
        print(json.dumps(Caller(url, scenario, rest[0] if rest else None).play(scenario)))


if __name__ == "__main__":
    main()
