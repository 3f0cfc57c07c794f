"""`ActorStateMachine`: async rules in one run of trio."""

from __future__ import annotations

import functools
import gc
from typing import Any, ClassVar

import pytest
import trio
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, precondition, run_state_machine_as_test

from levada.framework import Actor, Asks, Ref, handles, message
from levada.framework.testing import StrictViolation, strict
from levada.framework.testing.stateful import ActorStateMachine, initialize, invariant, rule

QUICK = settings(max_examples=8, stateful_step_count=10, deadline=None, database=None)


@message
class Add:
    n: int


@message
class Get(Asks[int]):
    pass


@message
class Beat:
    pass


class Counter(Actor[Add | Get | Beat]):
    total: int = 0
    beats: int = 0

    def started(self) -> None:
        self.timers.every("beat", 1.0, Beat())

    @handles
    def add(self, m: Add) -> None:
        self.total += m.n

    @handles
    async def get(self, m: Get) -> int:
        await trio.lowlevel.checkpoint()
        return self.total

    @handles
    def beat(self, m: Beat) -> None:
        self.beats += 1


class Counting(ActorStateMachine):
    """Async and sync rules, bundles, preconditions, data, time."""

    counters = Bundle("counters")

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[Ref[Any], int] = {}
        self.elapsed = 0

    @initialize(target=counters)
    async def first(self) -> Ref[Any]:
        return await self._spawn()

    @rule(target=counters)
    async def another(self) -> Ref[Any]:
        return await self._spawn()

    async def _spawn(self) -> Ref[Any]:
        ref: Ref[Any] = self.system.spawn(Counter)
        await self.wait_until_idle()
        self.model[ref] = 0
        return ref

    @rule(counter=counters, n=st.integers(-5, 5))
    def tell(self, counter: Ref[Any], n: int) -> None:
        assume(n)
        counter.tell(Add(n))
        self.model[counter] += n

    @precondition(lambda self: len(self.model) > 1)
    @rule(data=st.data())
    async def send_to_some(self, data: st.DataObject) -> None:
        for ref in self.model:
            if data.draw(st.booleans()):
                await ref.send(Add(1))
                self.model[ref] += 1

    @rule(seconds=st.integers(1, 1000))
    async def wait(self, seconds: int) -> None:
        before = trio.current_time()
        await trio.sleep(seconds)
        assert trio.current_time() == before + seconds
        self.elapsed += seconds

    @invariant()
    async def each_has_its_total(self) -> None:
        for ref, total in self.model.items():
            assert await ref.ask(Get()) == total

    @invariant()
    def no_time_passes_between_rules(self) -> None:
        assert trio.current_time() == self.elapsed


TestCounting = Counting.TestCase
TestCounting.settings = QUICK


def test_a_failing_rule_is_shrunk_and_comes_out_as_it_is() -> None:
    class Wrong(ActorStateMachine):
        @initialize()
        def begin(self) -> None:
            self.counter = self.system.spawn(Counter)

        @rule(n=st.integers(0, 1000))
        async def add(self, n: int) -> None:
            self.counter.tell(Add(n))
            assert await self.counter.ask(Get()) < 100

    with pytest.raises(AssertionError) as failure:
        run_state_machine_as_test(Wrong, settings=settings(QUICK, max_examples=100, print_blob=False))
    assert "state.add(n=100)" in "\n".join(getattr(failure.value, "__notes__", []))


def test_an_error_that_ends_the_system_fails_the_rule_that_runs() -> None:
    class Fragile(Actor[Add]):
        @handles
        def add(self, m: Add) -> None:
            raise OSError("gone")

    class Breaking(ActorStateMachine):
        @rule()
        async def breaks(self) -> None:
            self.system.spawn(Fragile, supervise="escalate").tell(Add(1))
            await trio.sleep(1)

    with pytest.raises(OSError, match="gone"):
        run_state_machine_as_test(Breaking, settings=settings(QUICK, print_blob=False))


def test_the_system_is_chosen_by_the_class_and_ends_with_each_example() -> None:
    phases: list[str] = []

    class Choosing(ActorStateMachine):
        make_system = functools.partial(strict(), "chosen")

        @initialize()
        def begin(self) -> None:
            self.system.at_end("flush", self._flush)
            phases.append(self.system.phase)

        @rule()
        async def look(self) -> None:
            assert self.system.name == "chosen"

        async def _flush(self) -> None:
            phases.append(self.system.phase)

    run_state_machine_as_test(Choosing, settings=settings(QUICK, max_examples=5))
    assert phases == ["running", "flush"] * (len(phases) // 2)


def test_an_error_that_ends_the_system_after_the_last_rule_is_not_lost() -> None:
    class Changing(ActorStateMachine):
        make_system = strict()

        @rule()
        def change(self) -> None:
            add = Add(1)
            self.system.spawn(Counter).tell(add)
            add.n = 2

    with pytest.raises(StrictViolation):
        run_state_machine_as_test(Changing, settings=settings(QUICK, stateful_step_count=1, print_blob=False))


def test_a_system_that_cannot_be_made_leaves_nothing_behind() -> None:
    run: Any = trio._core._run
    before = (run._r.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING, gc.isenabled())

    class Impossible(ActorStateMachine):
        make_system: ClassVar[Any] = functools.partial(strict(), max_waiting=0)

        @rule()
        def never(self) -> None:
            raise AssertionError

    with pytest.raises(ValueError, match="max_waiting"):
        Impossible()
    assert (run._r.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING, gc.isenabled()) == before
    with pytest.raises(RuntimeError, match="async context"):
        trio.lowlevel.current_trio_token()
