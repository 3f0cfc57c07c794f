"""Testing actors: probes, fake refs, virtual time, every order of events that a seed can make, and a strict system.

* `Probe`: an actor that keeps what it is told; a test waits for messages and answers questions.
* `FakeRef`: a ref with no actor and no system behind it.
* `autojump`: a clock for `trio.run` on which waiting takes no time.
* `explore`: runs a scenario under many schedules; one that fails is named by its seed and can be run again.
* `strict`: systems that find messages changed after they were sent, or that could not travel, and scopes left open.

Two more modules need packages that levada itself does not: `levada.framework.testing.fixtures` (pytest, pytest-trio) and
`levada.framework.testing.stateful` (hypothesis).

What virtual time is, and is not: `trio.current_time`, timers, timeouts and back-off run on trio's clock, which under `autojump` stands still
while anybody can run and then jumps to the next deadline.  The runtime's slices (a yield to trio every 0.5 ms, the alarm for slow handlers,
the histograms) are real seconds even then, because they are about the real thread.  So the order in which actors have their
turns may differ from run to run; under `explore` slices are counted instead, and everything is decided by the seed.
"""

from __future__ import annotations

from .clock import autojump
from .explore import Explored, ScheduleFailure, Turn, explore
from .fake import FakeRef
from .probe import Probe
from .strict import StrictViolation, strict

__all__ = [
    "Explored", "FakeRef", "Probe", "ScheduleFailure", "StrictViolation", "Turn", "autojump", "explore", "strict",
]  # fmt: skip
