"""The traits of a carrier that `check_carrier` needs."""

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
    """The properties of a carrier, for `carrier_checks`."""

    shape: Literal["bytes", "messages", "connection"]
    """The ends that the factory yields: byte streams, message streams or connections."""
    half_close: bool = True
    """Byte streams: whether `send_eof` works. If not, it must raise `NotImplementedError`."""
    tells_loss: bool = True
    """Whether the peer sees a difference between an abort and a close."""
    buffered: int = attrs.field(default=1024 * 1024, validator=[v.instance_of(int), v.gt(0)])
    """Bytes that may be under way in one direction of a stream whose receiver takes nothing: queues, windows, the kernel's buffers."""
    max_message: int | None = None
    """Messages: bytes of the largest one; ``None`` skips the check of the limit."""
    streams: int = attrs.field(default=10_000, validator=[v.instance_of(int), v.gt(0)])
    """Connections: streams that the check of growth opens and closes."""
    max_open: int = attrs.field(default=1000, validator=[v.instance_of(int), v.gt(0)])
    """Connections: upper bound of the streams of one kind that can be open at once; the check of credit opens as many as it can."""
    datagram_queue: int = attrs.field(default=1024, validator=[v.instance_of(int), v.gt(0)])
    """Connections: upper bound of the datagrams that are kept until they are taken."""
    settle: Callable[[], Awaitable[None]] = trio.testing.wait_all_tasks_blocked
    """Waits until nothing more happens by itself. On a simulated network it sleeps a virtual second; on sockets it is
    `wait_all_tasks_blocked` with a cushion of some milliseconds."""
    cut: Callable[[Carrier, Carrier], None] | None = None
    """Loses the connection between two ends abruptly; ``None`` if the carrier cannot be made to."""
    timeout: float = attrs.field(default=60.0, validator=v.gt(0))
    """Seconds on trio's clock for one check."""
