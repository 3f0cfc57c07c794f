"""A relay: a writer sends on the events of a reader, and the reader acks them only when the next reader has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .unit import Unit
from .writer import Writer

__all__ = ["relay"]


def relay(writer: Writer) -> Callable[[Unit], Awaitable[None]]:
    """Make a sink for `serve` that sends units on.

    A unit is committed when the next reader has acked it, so the first writer gets its ack from the end of the chain.
    A unit is sent on at once, whether or not it fills a window; units of several connections may share one.
    Writers of version 1 give up after about 15 s: give the relay's writer a spool if its reader may be away for longer (LJ-26).

    Args:
        writer: made by `connect`; many connections may share it. With a spool, a unit is committed when it is on disk.

    Example:
        ``async with connect(system, far) as writer, serve(system, near, relay(writer)):``
    """

    async def send_on(unit: Unit) -> None:
        await writer.deliver(unit.events)

    return send_on
