"""A relay: what a reader takes in, a writer sends on; the ack goes back only when the next reader has acked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .unit import Unit
from .writer import Writer

__all__ = ["relay"]


def relay(writer: Writer) -> Callable[[Unit], Awaitable[None]]:
    """Make a sink for `serve` that sends units on.

    The writer's reader decides when a unit is safe, so an ack that reaches the first writer comes from the end of the line.
    Writers of version 1 give up after 15 s or so: give the relay's writer a spool if its reader may be away for longer (LJ-26).

    Args:
        writer: see `connect`; many connections may share it. With a spool on disk "safe" means on disk.

    Example:
        ``async with connect(system, far) as writer, serve(system, near, relay(writer)):``
    """

    async def send_on(unit: Unit) -> None:
        await writer.deliver(unit.events)

    return send_on
