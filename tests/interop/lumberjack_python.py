"""Ships events with one of the Python packages that speak Lumberjack; run by `test_lumberjack_peers`.

``lumberjack_python.py KIND PORT COUNT [CA]``: COUNT events, numbered from 0, to 127.0.0.1; over TLS if there is a CA file.
Ends with code 0 when the package says that all of them were delivered, or when it has sent them if it cannot tell.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from typing import Any

Event = dict[str, Any]


def pylogbeat(port: int, ca: str | None, events: list[Event]) -> None:
    """Version 2, always packed; numbers run on over windows and the last one must be acked."""
    from pylogbeat import PyLogBeatClient

    with PyLogBeatClient("127.0.0.1", port, timeout=100, ssl_enable=ca is not None, ca_certs=ca) as client:
        for at in range(0, len(events), 100):
            client.send(events[at : at + 100])


def logstash_async(port: int, ca: str | None, events: list[Event]) -> None:
    """The logging handler that sits on pylogbeat; a thread of its own sends."""
    from logstash_async.handler import AsynchronousLogstashHandler

    handler = AsynchronousLogstashHandler(
        "127.0.0.1",
        port,
        database_path=None,
        transport="logstash_async.transport.BeatsTransport",
        ssl_enable=ca is not None,
        ca_certs=ca,
    )
    logger = logging.getLogger("shipped")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for event in events:
        logger.info("%s", event["message"])
    handler.close()  # flushes


def timbersnake(port: int, ca: str | None, events: list[Event]) -> None:
    """Version 2, numbers from 0, a window of 3 inside the envelope whatever the count; takes any frame for its ack."""
    from timbersnake.client import Client

    context = ssl.create_default_context(cafile=ca) if ca else None
    try:
        asyncio.run(Client("127.0.0.1", port, ssl=context).send(events))
    except ssl.SSLError as error:
        # It closes after the first of its acks, and does not like the ones behind.
        if error.reason != "APPLICATION_DATA_AFTER_CLOSE_NOTIFY":
            raise


def stashward(port: int, ca: str | None, events: list[Event]) -> None:
    """Version 1, TLS only, one endless window, acks never read."""
    from stashward import StashwardHandler

    handler = StashwardHandler("127.0.0.1", port, ca)
    logger = logging.getLogger("shipped")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for event in events:
        logger.info("%s", event["message"])
    socket.socket.shutdown(handler.sock, socket.SHUT_WR)
    while handler.sock.recv(4096):  # closing over unread acks would cut off what is under way
        pass
    handler.close()


if __name__ == "__main__":
    shippers = {
        "pylogbeat": pylogbeat,
        "logstash_async": logstash_async,
        "timbersnake": timbersnake,
        "stashward": stashward,
    }
    numbered = [{"message": f"event {i}", "number": i} for i in range(int(sys.argv[3]))]
    shippers[sys.argv[1]](int(sys.argv[2]), sys.argv[4] if len(sys.argv) > 4 else None, numbered)
