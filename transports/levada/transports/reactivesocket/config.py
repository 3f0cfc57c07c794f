"""Settings of a ReactiveSocket connection that RSocket does not allow."""

from __future__ import annotations

from typing import Final

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError
from levada.transports.reactivesocket.frames import MAX_LENGTH
from levada.transports.rsocket.config import CoreConfig

__all__ = ["ReactiveSocketConfig"]

MAX_U32: Final = 2**32 - 1


def _milliseconds(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if value and not 0.001 <= value <= MAX_U32 / 1000:
        raise ConfigurationError(f"{attribute.name} is {value}, wanted 0 or 0.001 to {MAX_U32 / 1000} seconds")


@attrs.frozen(kw_only=True)
class ReactiveSocketConfig(CoreConfig):
    """How one side of a connection behaves. A plain `CoreConfig` works too, within its own limits.

    The settings of resumption and the version have no effect, and stream ids are always reused (RX-16).
    """

    keepalive_interval: float = attrs.field(default=20.0, validator=_milliseconds)
    """Client: seconds between KEEPALIVEs; 0 for none (RX-35)."""
    max_lifetime: float = attrs.field(default=90.0, validator=_milliseconds)
    """Client: seconds of silence after which the peer is considered dead; 0 for no limit. SETUP carries the value, and the server uses
    it too (RX-35).
    """
    max_frame_size: int = attrs.field(
        default=16 * 1024 * 1024, validator=[v.instance_of(int), v.ge(12), v.le(MAX_LENGTH)]
    )
    """Bytes of the largest frame accepted from the peer (RX-4), or sent without fragmentation, its length field included."""
