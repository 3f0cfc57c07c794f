"""Tools for tests of carriers and of protocols."""

from __future__ import annotations

from levada.transports.testing.check_carrier import CarrierCheck, carrier_checks, check_carrier
from levada.transports.testing.core_pair import CorePair
from levada.transports.testing.faults import Fault, FaultyNetwork, FaultyStream
from levada.transports.testing.traits import CarrierTraits

__all__ = [
    "CarrierCheck", "CarrierTraits", "CorePair", "Fault", "FaultyNetwork", "FaultyStream", "carrier_checks", "check_carrier",
]  # fmt: skip
