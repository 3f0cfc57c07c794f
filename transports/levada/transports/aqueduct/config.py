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
    """Messages on streams that a sender may have unacked. Source: AQ-40."""
    window_octets: int = _positive(2**20)
    """Octets of payload that a sender may have unacked, but for the last message."""
    max_unacked: int = _positive(2**26)
    """Octets of payload that all senders of a connection may have unacked; above that, each may have one message."""
    unreliable_window: int = _positive(16_384)
    """Datagrams that a sender may have unsettled; those above are the caller's to drop."""
    mailbox: int = _positive(256)
    """Messages that wait for the application on a channel; more are not processed and close the peer's window."""
    mailbox_octets: int = _positive(2**20)
    """Octets of payload that wait for the application on a channel, but for the last message."""
    max_untaken: int = _positive(2**25)
    """Octets that wait for the application on all channels; above that, a channel takes no more while anything waits on it."""
    max_channels: int = _positive(10_000)
    """Channels of a connection that have not ended, or not been claimed, or not been resolved."""
    max_message: int = _positive(2**24)
    """Octets of one payload, or of the ids attached to one message. Source: AQ-3."""
    max_control: int = _positive(2**16)
    """Octets of the peer's header data, or of the ranges in one frame."""
    max_held: int = _positive(2**27)
    """Octets that a connection holds: not processed yet, or processed and not taken. More close it (code 4). Source: AQ-40."""
    max_held_early: int = _positive(2**20)
    """Octets held before both sides have greeted. Source: AQ-17."""
    max_ranges: int = _positive(100_000)
    """Holes in the message numbers of a channel, or in the record of ended channels."""
    ack_delay: float = _seconds(0.05)
    """Seconds that an ack may wait for more. Source: AQ-35."""
    declare_delay: float = _seconds(0.05)
    """Seconds that the declaration of datagrams may wait for more. Source: AQ-37."""
    nack_delay: float = _seconds(1.0)
    """Seconds, at least, that a declared datagram has to arrive; twice the round trip if that is longer. Source: AQ-36."""
    drain: float = attrs.field(default=5.0, converter=float, validator=v.ge(0.0))
    """Seconds that open channels have to end after `AqueductCore.drain`; what is sent last has the rest of them to arrive."""
    stop_grace: float = _seconds(10.0)
    """Seconds after which a channel whose message stream the peer has stopped must be over. Source: AQ-20a."""
