"""The processes of ``levada bench lumberjack``: ``python -m benchmarks._lumberjack_peers READER`` and, in front of it, a raw writer.

The raw writer has encoded its windows before the clock starts and keeps one in flight, so its rate is the reader's.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
import zlib
from typing import Any

__all__ = ["EVENTS", "raw_writer"]

EVENTS = 2_000  # in a window
_LINE = (
    "203.0.113.7 - - [17/May/2015:10:05:03 +0000] "
    + "GET /presentations/logstash/images/kibana.png " * 5
    + "0123456789" * 3
)


def windows(version: int, packed: bool, count: int) -> list[bytes]:
    """Windows of lines of 300 bytes and four other fields, `count` events in all."""
    made = []
    for first in range(0, count, EVENTS):
        frames = []
        for number in range(1, EVENTS + 1):
            fields = {
                "line": _LINE[:300],
                "host": "web-01",
                "file": "/var/log/access.log",
                "offset": str((first + number) * 301),
                "id": str(first + number),
            }
            if version == 1:
                parts = [b"1D", struct.pack(">II", number, len(fields))]
                for key, value in fields.items():
                    parts += [struct.pack(">I", len(key)), key.encode(), struct.pack(">I", len(value)), value.encode()]
                frames.append(b"".join(parts))
            else:
                body = json.dumps(fields).encode()
                frames.append(b"2J" + struct.pack(">II", number, len(body)) + body)
        data = b"".join(frames)
        head = b"%d" % version
        if packed:
            data = zlib.compress(data, 3)
            data = head + b"C" + struct.pack(">I", len(data)) + data
        made.append(head + b"W" + struct.pack(">I", EVENTS) + data)
    return made


def raw_writer(port: int, version: int, packed: bool, count: int) -> float:
    """Send and wait for each ack; events a second."""
    todo = windows(version, packed, count)
    expected = b"%dA" % version + struct.pack(">I", EVENTS)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        for window in todo:
            connection.sendall(window)
            ack = b""
            while len(ack) < 6:
                ack += connection.recv(6 - len(ack))
                if ack[2:] == b"\0\0\0\0":
                    ack = b""  # a keepalive
            assert ack == expected, ack
        return len(todo) * EVENTS / (time.perf_counter() - began)


# ---------------------------------------------------------------- readers


def serve_threads() -> None:
    """A plain decoding reader: a thread for each connection, no limits, acks when its list has been counted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=read, args=(connection,), daemon=True).start()


def read(connection: socket.socket) -> None:
    window = 0
    events: list[dict[str, Any]] = []
    seen: set[str] = set()
    unpack = struct.unpack_from

    def parse(data: bytes) -> int:
        """Take all whole frames; return the offset of the rest."""
        nonlocal window
        at = 0
        while len(data) - at >= 6:
            start = at
            head = data[at : at + 2]
            (number,) = unpack(">I", data, at + 2)
            at += 6
            if head[1:] == b"W":
                window = number
                continue
            if head[1:] == b"C":
                at += number
                if at > len(data):
                    return start
                parse(zlib.decompress(data[at - number : at]))
                continue
            if len(data) - at < 4:
                return start
            (count,) = unpack(">I", data, at)
            at += 4
            if head[1:] == b"J":
                at += count
                if at > len(data):
                    return start
                value = json.loads(data[at - count : at])
            else:
                value = {}
                try:
                    for _ in range(count):
                        (size,) = unpack(">I", data, at)
                        key = data[at + 4 : at + 4 + size].decode("utf-8", "surrogateescape")
                        at += 4 + size
                        (size,) = unpack(">I", data, at)
                        value[key] = data[at + 4 : at + 4 + size].decode("utf-8", "surrogateescape")
                        at += 4 + size
                except struct.error:
                    return start
                if at > len(data):
                    return start
            events.append(value)
            if len(events) == window:
                seen.update(each["id"] for each in events)
                events.clear()
                connection.sendall(head[:1] + b"A" + struct.pack(">I", number))
        return at

    left = b""
    with connection:
        while data := connection.recv(65536):
            data = left + data
            left = data[parse(data) :]


def serve_levada() -> None:
    """Ours as users run it: limits on, units handed to an actor, acked after its reply."""
    import trio

    from levada.actors.apps import freeze_heap
    from levada.actors.lumberjack import Unit, serve
    from levada.framework import Actor, ActorSystem, handles

    class Count(Actor[Unit]):
        seen: set[str]

        @handles
        def count(self, unit: Unit) -> None:
            self.seen.update(event["id"] for event in unit.events)

    async def main() -> None:
        async with ActorSystem() as system:
            sink = system.spawn(Count, set())
            async with serve(system, "lumberjack://127.0.0.1:0", sink) as reader:
                freeze_heap()  # as `levada serve` does
                print(reader.url.rpartition(":")[2], flush=True)
                await trio.sleep_forever()

    trio.run(main)


def tell_cpu_time() -> None:
    """Answer each line with the CPU time of this process."""
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


if __name__ == "__main__":
    threading.Thread(target=tell_cpu_time, daemon=True).start()
    {"threads": serve_threads, "levada": serve_levada}[sys.argv[1]]()
