"""The simulated world: a whole system of processes in one run, under one seed, in virtual time, with faults.

* `simulate`: runs a scenario in one world for each seed; the seed of a failing world runs it again.
* `World`, `Process`, `Machine`: what a scenario starts, and what happens to it. `Faults`: what goes wrong by chance.
* `Strike`, `Moment`: records of strikes, by name, in a failure's text; a world is struck so again.
* `History`, `check_linear`: what clients were answered, and whether one object could have answered so.
* `SimulatedDisk`: the disk of one machine, as ext4 and XFS are, or as POSIX allows: it keeps what a power failure leaves.
* `SimulatedFiles`: the files of one process on it, for `levada.framework.platform.Platform`.
* `Fault`, `Call`: what happens at which call of a disk. `Crashed` is what a dead process gets.

Real: the program, its actor systems, its protocols above the carriers, its journals. Simulated: the network, threads, clocks, disks.

* TCP and Unix sockets are wires in memory. TLS does its real handshake in memory, so certificates and names are checked; nothing is encrypted.
* QUIC is real, over datagrams that may be lost. Its keys are random in each run, so a seed repeats their sizes and times, not their bytes.
* All processes share one interpreter: a global variable of the program is one variable for all of them; `SharedStateWarning` names those that
  a world has changed. A paused process has no network and no threads, and its timers run on.
* A call in a thread is made in a task, after a while. Native code and threads of the program's own are out of reach.
"""

from __future__ import annotations

from .by_chance import Faults
from .disk import SimulatedDisk
from .failure import SimulationFailure
from .faults import CHANGES, Call, Crashed, DiskFaults, Fault, chance
from .files import SimulatedFiles
from .history import History, NotLinear, Operation, check_linear
from .modules import SharedStateWarning
from .process import Machine, Process
from .strike import Moment, Strike
from .world import Simulated, World, simulate

__all__ = [
    "CHANGES", "Call", "Crashed", "DiskFaults", "Fault", "Faults", "History", "Machine", "Moment", "NotLinear", "Operation", "Process",
    "SharedStateWarning", "Simulated", "SimulatedDisk", "SimulatedFiles", "SimulationFailure", "Strike", "World", "chance", "check_linear",
    "simulate",
]  # fmt: skip
