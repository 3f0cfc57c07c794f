"""How an Aqueduct connection behaves."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import validators as v

__all__ = ["AqueductConfig"]


def _positive(default: int) -> Any:
    return attrs.field(default=default, validator=[v.instance_of(int), v.ge(1)])


def _seconds(default: float) -> Any:
    return attrs.field(default=default, converter=float, validator=v.gt(0.0))


@attrs.frozen(kw_only=True)
class AqueductConfig:
    """Windows, limits and delays of one side. Immutable; derive with `attrs.evolve`."""

    window: int = _positive(256)
    """Messages that a sender may have unacked on streams. Source: AQ-40."""
    window_bytes: int = _positive(2**20)
    """Bytes of payload that a sender may have unacked. The last message may exceed it."""
    max_unacked: int = _positive(2**26)
    """Bytes of payload that all senders of a connection may have unacked. Above it, each sender may have one message unacked."""
    unreliable_window: int = _positive(16_384)
    """Datagrams that a sender may have unsettled. Above it, the caller drops them."""
    mailbox: int = _positive(256)
    """Messages that wait for the application on a channel. Further ones are not processed, which closes the peer's window."""
    mailbox_bytes: int = _positive(2**20)
    """Bytes of payload that wait for the application on a channel. The last message may exceed it."""
    max_untaken: int = _positive(2**25)
    """Bytes that wait for the application on all channels. Above it, a channel with a waiting message takes no more."""
    max_channels: int = _positive(10_000)
    """Channels of a connection that have not ended, have not been claimed, or have not been resolved."""
    max_message: int = _positive(2**24)
    """Bytes of one payload, or of the ids attached to one message. Source: AQ-3."""
    max_control: int = _positive(2**16)
    """Bytes of the peer's header data, or of the ranges in one frame."""
    max_held: int = _positive(2**27)
    """Bytes that a connection holds, unprocessed or not taken. More close it (code 4). Source: AQ-40."""
    max_held_early: int = _positive(2**20)
    """Bytes held before both sides have greeted. Source: AQ-17."""
    greeting: float = _seconds(10.0)
    """Seconds that a client has for its ConnectionControl, from the handshake on. Source: AQ-15."""
    max_ranges: int = _positive(100_000)
    """Gaps in the message numbers of a channel, or in the record of ended channels."""
    ack_delay: float = _seconds(0.05)
    """Seconds that an ack may wait for more. Source: AQ-35."""
    declare_delay: float = _seconds(0.05)
    """Seconds that the declaration of datagrams may wait for more. Source: AQ-37."""
    nack_delay: float = _seconds(1.0)
    """Shortest time in seconds that a declared datagram has to arrive; two round trips if they are longer. Source: AQ-36."""
    drain_timeout: float = attrs.field(default=5.0, converter=float, validator=v.ge(0.0))
    """Seconds that open channels have to end after `AqueductCore.drain`. The last data sent has the rest of this time to arrive."""
    stop_timeout: float = _seconds(10.0)
    """Seconds within which a channel must end after the peer has stopped its message stream. Source: AQ-20a."""
