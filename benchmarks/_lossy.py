"""A path that loses and reorders packets, on loopback: a UDP proxy with a seed, run as a program.

``_lossy.py PORT SEED LOSS LATE`` prints its own port and passes datagrams on to `PORT` and back, 40 Mbit/s, each after 10 ms.
It loses the share `LOSS` of them, and keeps the share `LATE` up to 20 ms longer, so that others overtake them.

Python's QUIC keeps up with this rate on a busy core, so the path limits the transfer.
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import sys
import time
from typing import Any

DELAY = 0.01
LONGER = 0.02
RATE = 5_000_000  # bytes a second
QUEUE = 256 << 10  # bytes that wait for their turn; packets that do not fit are lost


def udp() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    return made


def main(port: int, seed: int, loss: float, late: float) -> None:
    chance = random.Random(seed)
    front = udp()
    front.bind(("127.0.0.1", 0))
    print(front.getsockname()[1], flush=True)
    backs: dict[Any, socket.socket] = {}
    clients: dict[socket.socket, Any] = {}
    under_way: list[tuple[float, int, bytes, socket.socket, Any]] = []
    busy: dict[bool, float] = {}  # until when, there and back
    count = 0
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([front, *clients], [], [], wait)  # epoll would round the time up to milliseconds
        now = time.monotonic()
        for source in readable:
            for _ in range(64):
                try:
                    data, address = source.recvfrom(65_535)
                except OSError:
                    break
                count += 1
                lost, delayed, longer = chance.random(), chance.random(), chance.random()
                start = max(now, busy.get(source is front, 0.0))
                if lost < loss or (start - now) * RATE > QUEUE:
                    continue
                busy[source is front] = start + len(data) / RATE
                at = start + len(data) / RATE + DELAY + (LONGER * longer if delayed < late else 0.0)
                if source is front:
                    if address not in backs:
                        back = backs[address] = udp()
                        clients[back] = address
                    heapq.heappush(under_way, (at, count, data, backs[address], ("127.0.0.1", port)))
                else:
                    heapq.heappush(under_way, (at, count, data, front, clients[source]))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, data, sender, to = heapq.heappop(under_way)
            try:
                sender.sendto(data, to)
            except OSError:
                pass  # lost


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
