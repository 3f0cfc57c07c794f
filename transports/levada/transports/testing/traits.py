"""What a carrier is and can do, as `check_carrier` needs to know it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal

import attrs
import trio
import trio.testing
from attrs import validators as v

from levada.transports.carriers.contracts import ByteStream, Connection, MessageStream

__all__ = ["Carrier", "CarrierTraits", "Factory"]

Carrier = ByteStream | MessageStream | Connection
Factory = Callable[[], AbstractAsyncContextManager[tuple[Carrier, Carrier]]]


@attrs.frozen(kw_only=True)
class CarrierTraits:
    """What a carrier is and can do, for `carrier_checks`."""

    shape: Literal["bytes", "messages", "connection"]
    """What the factory gives."""
    half_close: bool = True
    """Byte streams: whether `send_eof` exists; else it must raise `NotImplementedError`."""
    tells_loss: bool = True
    """Whether an abort can be told from a close."""
    buffered: int = attrs.field(default=1024 * 1024, validator=[v.instance_of(int), v.gt(0)])
    """Octets that may be under way in one direction of a stream whose receiver takes nothing: queues, windows, the kernel's buffers."""
    max_message: int | None = None
    """Messages: bytes of the largest one; ``None`` leaves the check of the limit out."""
    streams: int = attrs.field(default=10_000, validator=[v.instance_of(int), v.gt(0)])
    """Connections: streams opened and closed by the check that looks for growth."""
    max_open: int = attrs.field(default=1000, validator=[v.instance_of(int), v.gt(0)])
    """Connections: streams of one kind that can be open at once, at most; the check of credit opens that many."""
    datagram_queue: int = attrs.field(default=1024, validator=[v.instance_of(int), v.gt(0)])
    """Connections: datagrams that are kept until they are taken, at most."""
    settle: Callable[[], Awaitable[None]] = trio.testing.wait_all_tasks_blocked
    """Waits until what can go on without the check has gone on. On a simulated network a virtual second of sleep, on sockets
    `wait_all_tasks_blocked` with a cushion of some milliseconds."""
    cut: Callable[[Carrier, Carrier], None] | None = None
    """Loses the connection between two ends abruptly, if the factory's carrier can be made to."""
    timeout: float = attrs.field(default=60.0, validator=v.gt(0))
    """Seconds on trio's clock for one check."""
