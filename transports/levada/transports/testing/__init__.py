"""For tests of carriers and of what runs on them."""

from __future__ import annotations

from levada.transports.testing.check_carrier import CarrierCheck, CarrierTraits, carrier_checks, check_carrier
from levada.transports.testing.core_pair import CorePair
from levada.transports.testing.faults import Fault, FaultyNetwork, FaultyStream

__all__ = [
    "CarrierCheck",
    "CarrierTraits",
    "CorePair",
    "Fault",
    "FaultyNetwork",
    "FaultyStream",
    "carrier_checks",
    "check_carrier",
]
