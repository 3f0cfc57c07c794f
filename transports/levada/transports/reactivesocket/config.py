"""How a ReactiveSocket connection behaves, where that is more than RSocket allows."""

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
        raise ConfigurationError(f"{attribute.name} must be 0 or 0.001 to {MAX_U32 / 1000} seconds, got {value}")


@attrs.frozen(kw_only=True)
class ReactiveSocketConfig(CoreConfig):
    """How one side of a connection behaves; a plain `CoreConfig` does as well, within its limits.

    Settings of resumption or the version have no meaning here, and ids are always used again (RX-16).
    """

    keepalive_interval: float = attrs.field(default=20.0, validator=_milliseconds)
    """Client: seconds between KEEPALIVEs; 0: none (RX-35)."""
    max_lifetime: float = attrs.field(default=90.0, validator=_milliseconds)
    """Client: seconds of silence after which the peer is held dead; 0: no limit (RX-35); the server uses the number of the SETUP."""
    max_frame_size: int = attrs.field(
        default=16 * 1024 * 1024, validator=[v.instance_of(int), v.ge(12), v.le(MAX_LENGTH)]
    )
    """Bytes of the largest frame, its length field included: taken from the peer (RX-4), or sent without being cut."""
