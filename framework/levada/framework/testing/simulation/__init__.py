"""The simulated world: disks that keep what a power failure leaves, and fail at named calls.

* `SimulatedDisk`: the disk of one machine, as ext4 and XFS are, or as POSIX allows.
* `SimulatedFiles`: the files of one process on it, for `levada.framework.platform.Platform`.
* `SimulatedPool`: the threads of one process that sync its files.
* `Fault`, `Call`: what happens at which call. `Crashed` is what a dead process gets.
"""

from __future__ import annotations

from .disk import SimulatedDisk
from .faults import CHANGES, Call, Crashed, Fault, Faults, chance
from .files import SimulatedFiles
from .pool import SimulatedPool

__all__ = [
    "CHANGES",
    "Call",
    "Crashed",
    "Fault",
    "Faults",
    "SimulatedDisk",
    "SimulatedFiles",
    "SimulatedPool",
    "chance",
]
