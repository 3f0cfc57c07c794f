"""Aqueduct: typed channels inside messages, over QUIC. A handle in a message arrives as a handle that works like a local one.

Example:
    Here the message is a sender. Usually it is a message class with senders and receivers in its fields.

    >>> import trio
    >>> from levada.actors.aqueduct import connect, serve
    >>> from levada.framework import ActorSystem, Sender, channel
    >>> async def count(numbers: Sender[int]) -> None:
    ...     async with numbers:
    ...         for number in range(3):
    ...             await numbers.send(number)
    >>> async def main() -> None:
    ...     async with ActorSystem() as system:
    ...         async with serve(system, "aqueduct+memory://counter", count, Sender[int]) as listener:
    ...             async with connect(system, listener.url, Sender[int]) as peer:
    ...                 sender, receiver = channel(int)
    ...                 await peer.send(sender)
    ...                 print([number async for number in receiver])
    >>> trio.run(main)
    [0, 1, 2]
"""

from __future__ import annotations

from levada.transports.aqueduct import AqueductConfig

from .config import PeerConfig
from .entry import connect, connect_over, serve, serve_over
from .fleet import FleetRefs
from .name_lookup import Expose
from .peer import ConnectionStatistics, Peer
from .raw import RawMessage
from .server import Handler, Listener

__all__ = [
    "AqueductConfig", "ConnectionStatistics", "Expose", "FleetRefs", "Handler", "Listener", "Peer", "PeerConfig", "RawMessage", "connect",
    "connect_over", "serve", "serve_over",
]  # fmt: skip
