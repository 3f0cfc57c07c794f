"""The entrypoint of a connection: a channel whose lookups and claims no handler sees."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from levada.framework.errors import LevadaError
from levada.framework.tracing import Tracing
from levada.transports.aqueduct import Delivery

from .halves import Inbound, Outbound, open_delivery
from .name_lookup import Claim, Lookup, Lookups, Names

__all__ = ["EntryInbound", "EntryOutbound"]

logger = logging.getLogger("levada.actors.aqueduct")

_TAGS = b"\xadlevada.lookup", b"\xaelevada.lookups", b"\xaclevada.claim"


def is_reserved(payload: bytes) -> bool:
    """Whether a message is a `Lookup`, a `Lookups` or a `Claim`: its tag follows the headers of the ext type and of the array."""
    return payload.startswith(_TAGS, 4) or payload.startswith(_TAGS, 5)


class EntryInbound(Inbound):
    """Stands in for the client's entrypoint: handles lookups and claims here, and leaves all other messages to the handler."""

    names: Names

    def _fill(self, queue: deque[Any], most: int) -> int:
        return 0  # each message is looked at

    def _take(self) -> Any:
        mailbox = self.half.mailbox
        while mailbox:
            delivery = self.half.take()
            if not is_reserved(delivery.payload):
                return delivery
            self.halves.received += 1
            self._open(delivery)
        return None

    def _open(self, delivery: Delivery) -> None:
        halves = self.halves
        item: Any = Lookup | Lookups | Claim
        try:
            reserved, _ = open_delivery(halves, delivery, delivery.payload, item)
        except LevadaError as error:
            logger.warning("%s: a lookup: %s", halves.peer, error)
            return
        if isinstance(reserved, Lookup):
            self.names.answer(reserved)
        elif isinstance(reserved, Claim):
            halves.refs.answer(reserved)
        else:
            halves.connection.look_up_at(reserved.there)


class EntryOutbound(Outbound):
    """Stands in for the server's entrypoint: sends lookups and claims there too, whatever type its handler takes."""

    def _context(self, entry: Any, tracing: Tracing) -> object:
        return None if type(entry) in (Lookup, Lookups, Claim) else tracing.current()

    def _encode(self, message: Any) -> bytes:
        if type(message) in (Lookup, Lookups, Claim):
            packing = self.halves.packing
            packing.channel = self.channel
            return self.halves.codec.encode(message, attachments=packing)
        return super()._encode(message)
