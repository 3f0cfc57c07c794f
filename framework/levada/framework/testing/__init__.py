"""Testing actors: probes, fake refs, virtual time, seeded schedules, and a strict system.

* `Probe`: an actor that keeps its messages; a test waits for messages and answers questions.
* `FakeRef`: a ref with no actor and no system behind it.
* `autojump`: a clock for `trio.run` on which waiting takes no time.
* `explore`: runs a scenario under many schedules; the seed of a failing schedule runs it again.
* `strict`: systems that find messages changed after they were sent, or that could not travel, and scopes left open.

Two more modules need packages that levada does not: `levada.framework.testing.fixtures` (pytest, pytest-trio) and
`levada.framework.testing.stateful` (hypothesis).

Virtual time: `trio.current_time`, timers, timeouts and back-off run on trio's clock. Under `autojump` it stands still while a task can
run, and then jumps to the next deadline.  The runtime's slices (a yield to trio every 0.5 ms, the report of slow handlers, the
histograms) are still real seconds, because they measure the real thread.  So actors may take turns in a different order from run to
run. Under `explore` slices are counted instead, and the seed decides everything.
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
