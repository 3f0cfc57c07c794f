"""Our writer against our reader, over connections that are lost at any octet and sinks that fail: all arrives, and what is acked is committed."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from levada.actors.lumberjack import Unit, WriterConfig, connect, serve
from levada.framework import ActorSystem
from levada.transports.carriers import MemoryConfig

EVENTS = 120


class Sink:
    """Commits units but for those that it was told to fail on."""

    def __init__(self, failures: set[int], slow: float) -> None:
        self.failures = failures
        self.slow = slow
        self.asked = 0
        self.committed: Counter[int] = Counter()

    async def take(self, unit: Unit) -> None:
        self.asked += 1
        await trio.sleep(self.slow)
        if self.asked in self.failures:
            raise OSError("the disk is full")
        self.committed.update(int(event["n"]) for event in unit.events)


async def go_through(
    version: Literal[1, 2], mode: Literal["batch", "stream"], compression: int, cuts: list[int], sink: Sink, seed: int
) -> None:
    # A queue with room for all: they are in it before any reader is there.
    writing = WriterConfig(version=version, mode=mode, compression=compression, window=16, linger=0.05)
    url = "lumberjack+memory://both"
    async with ActorSystem(seed=seed) as system, connect(system, url, config=writing) as writer:
        for number in range(EVENTS):
            await writer.send({"n": number})
        for cut in [*cuts, None]:
            # This reader's connections are lost after so many octets, both directions together; then the next reader comes.
            carrier = MemoryConfig(cut_after=cut, chunk=(1, 40), seed=seed, latency=0.001)
            async with serve(system, url, sink.take, carrier=carrier):
                with trio.move_on_after(30.0 if cut is not None else 4000.0):
                    await writer.flush()
            assert writer.statistics().events_acked <= sink.committed.total(), "an event was acked and not committed"
        assert writer.unacked == 0
        assert writer.statistics().events_acked == EVENTS
    assert set(sink.committed) == set(range(EVENTS))


@pytest.mark.ci
@given(
    st.sampled_from([(1, "batch", 0), (1, "batch", 3), (1, "stream", 0), (2, "batch", 0), (2, "batch", 3)]),
    st.lists(st.integers(0, 3000), max_size=4),
    st.sets(st.integers(1, 12), max_size=4),
    st.sampled_from([0.0, 0.1, 5.0]),
    st.integers(0, 1000),
)
@pytest.mark.rule("LJ-55")
@pytest.mark.usefixtures("user_code_fails")
def test_lj55_every_event_is_committed_and_none_acked_before(
    form: tuple[Any, Any, int], cuts: list[int], failures: set[int], slow: float, seed: int
) -> None:
    """LJ-55: at least once, with connections cut at any octet in either direction, and a sink that fails and dawdles."""
    sink = Sink(failures, slow)
    trio.run(go_through, *form, cuts, sink, seed, clock=MockClock(autojump_threshold=0.0))
