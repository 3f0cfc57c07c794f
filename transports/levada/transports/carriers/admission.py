"""Admission to a listener: a limit for each address, and at most one warning every ten seconds about refused peers."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

import trio

from levada.framework.text import printable
from levada.transports.carriers.contracts import CloseReason

__all__ = ["Admission", "network_of"]

logger = logging.getLogger("levada.transports.carriers")

_QUIET: Final = 10.0  # seconds between two warnings of one listener


class Admission:
    """Counts the connections of each address, and the peers that a listener turned away.

    Args:
        url: URL of the listener, for its warnings.
        limit: most connections from one address, or for IPv6 from one /64, since one host can have all its addresses; ``None``: no limit.
        of: the rest of the warning about the limit, with the option that sets it.
    """

    def __init__(
        self, url: str, limit: int | None = None, of: str = "its address are open (max_connections_per_address)"
    ) -> None:
        self.url = url
        self.refused = 0
        """Peers that were turned away so far."""
        self._limit = limit
        self._of = of
        self._connections: dict[str, int] = {}
        self._quiet_until = -inf
        self._unsaid = 0

    def enter(self, host: str) -> Callable[[], None] | None:
        """Count a connection, unless its address has too many.

        Returns:
            A function that removes it from the count, to be called once, or ``None``.
        """
        if self._limit is None:
            return _nothing
        network = network_of(host)
        count = self._connections.get(network, 0)
        if count >= self._limit:
            return None
        self._connections[network] = count + 1
        return partial(self._leave, network)

    def _leave(self, network: str) -> None:
        self._connections[network] -= 1
        if not self._connections[network]:
            del self._connections[network]

    def turn_away(self, peer: str, why: object) -> None:
        """Count a refused peer, and warn unless the last warning was less than ten seconds ago."""
        self.refused += 1
        now = trio.current_time()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        self._quiet_until = now + _QUIET
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._unsaid = 0
        extra = {"event": "peer_refused", "connection_id": printable(peer)}
        text = "%s turned %s away: %s%s"
        logger.warning(text, self.url, printable(peer), printable(str(why)), more, extra=extra)

    def ended_early(self, peer: str, reason: CloseReason) -> None:
        """Turn away a peer whose connection has ended before its handshake was over, unless this side ended it."""
        if reason.lost or reason.by_peer:
            who = "it broke its handshake off" if reason.by_peer else "its handshake was not finished"
            code = f" (code {reason.code:#x})" if reason.code > 1 else ""  # 1 is a loss without a code
            self.turn_away(peer, f"{who}: {reason.text or 'no reason given'}{code}")

    def too_many(self, peer: str) -> None:
        """Turn away a peer whose address, or user, has too many connections."""
        self.turn_away(peer, f"{self._limit} connections of {self._of}")


def _nothing() -> None:
    pass


def network_of(host: str) -> str:
    """Return the unit of counting: the /64 of an IPv6 address, the IPv4 address in a mapped one, otherwise `host` itself.

    >>> network_of("2001:db8::1"), network_of("::ffff:192.0.2.1")
    ('2001:db8::/64', '192.0.2.1')
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)
