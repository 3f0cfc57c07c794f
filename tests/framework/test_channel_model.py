"""Random use of one channel by several senders, receivers and waiting tasks, compared step by step with a small model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from trio.testing import wait_all_tasks_blocked

from levada.framework.channel import Sender, TerminalState, channel
from levada.framework.errors import ChannelCancelled, ChannelError, EndOfChannel, ReceiverClosed, SenderFinished

OPEN, FINISHED, CANCELLED, RECEIVER_CLOSED, _, _ = TerminalState
RECEIVERS_ERROR = {FINISHED: EndOfChannel, CANCELLED: ChannelCancelled, RECEIVER_CLOSED: ReceiverClosed}


class Model:
    """What a channel is: a list of at most `window` messages, people who wait at either end, and one word for how it ended."""

    def __init__(self, window: int, reliable: bool) -> None:
        self.window, self.reliable, self.state = window, reliable, OPEN
        self.queue: list[int] = []
        self.senders = {0: True}  # number → still sends
        self.sends: list[tuple[int, int, int]] = []  # operation, sender, message
        self.receives: list[int] = []  # operations
        self.results: dict[int, Any] = {}

    def send(self, operation: int, sender: int, message: int) -> None:
        if not self.senders[sender]:
            self.results[operation] = SenderFinished
        elif self.state is not OPEN:
            self.results[operation] = RECEIVERS_ERROR[self.state]
        else:
            self.sends.append((operation, sender, message))
            self.settle()

    def receive(self, operation: int) -> None:
        self.receives.append(operation)
        self.settle()

    def settle(self) -> None:
        """Move on until nothing can move; only then is anything seen from outside."""
        while self.sends and (len(self.queue) < self.window or self.receives or not self.reliable):
            operation, _, message = self.sends.pop(0)
            self.queue.append(message)
            self.results[operation] = None
            self.deliver()
            del self.queue[: -self.window]
        self.deliver()

    def deliver(self) -> None:
        while self.receives and self.queue:
            self.results[self.receives.pop(0)] = self.queue.pop(0)
            while self.sends and len(self.queue) < self.window:
                operation, _, message = self.sends.pop(0)
                self.queue.append(message)
                self.results[operation] = None
        if not any(self.senders.values()) and not self.queue and self.state is OPEN:
            self.state = FINISHED
        while self.receives and self.state is not OPEN:
            self.results[self.receives.pop(0)] = RECEIVERS_ERROR[self.state]

    def finish(self, sender: int) -> None:
        if self.state is OPEN:
            self.senders[sender] = False
            self.refuse(lambda who: who == sender)
            self.settle()

    def end(self, state: TerminalState, by: int | None = None) -> None:
        if self.state is OPEN:
            self.state = state
            if by is not None:
                self.senders[by] = False
            self.queue.clear()
            self.refuse(lambda who: True)
            self.settle()

    def refuse(self, which: Callable[[int], bool]) -> None:
        for operation, who, _ in [waiting for waiting in self.sends if which(waiting[1])]:
            self.results[operation] = RECEIVERS_ERROR[self.state] if self.senders[who] else SenderFinished
        self.sends = [waiting for waiting in self.sends if not which(waiting[1])]

    def forget(self, operation: int) -> None:
        self.sends = [waiting for waiting in self.sends if waiting[0] != operation]
        self.receives = [waiting for waiting in self.receives if waiting != operation]


class ChannelMachine(RuleBasedStateMachine):
    """Runs in a worker thread of trio; each step is done in the trio thread, then everybody runs until all wait again."""

    nursery: trio.Nursery

    @initialize(window=st.integers(1, 3), mode=st.sampled_from(["ordered", "unordered", "unreliable"]))
    def make(self, window: int, mode: str) -> None:
        self.model = Model(window, mode != "unreliable")
        self.results: dict[int, Any] = {}
        self.scopes: dict[int, trio.CancelScope] = {}
        self.operations = 0
        sender, self.receiver = trio.from_thread.run_sync(channel, int)
        self.handles: list[Sender[int]] = [getattr(sender, mode)(window)]

    def step(self, call: Callable[[], Any]) -> None:
        async def do() -> None:
            call()
            await wait_all_tasks_blocked()

        trio.from_thread.run(do)

    def start(self, call: Callable[[], Awaitable[Any]]) -> int:
        self.operations += 1
        operation = self.operations
        scope = self.scopes[operation] = trio.CancelScope()

        async def run() -> None:
            with scope:
                try:
                    self.results[operation] = await call()
                except ChannelError as error:
                    self.results[operation] = type(error)

        self.step(lambda: self.nursery.start_soon(run))
        return operation

    def pick(self, which: int) -> int:
        return which % len(self.handles)

    @rule(which=st.integers(0, 9))
    def send(self, which: int) -> None:
        sender = self.pick(which)
        message = self.operations + 1000
        self.model.send(self.start(lambda: self.handles[sender].send(message)), sender, message)

    @rule()
    def receive(self) -> None:
        self.model.receive(self.start(self.receiver.receive))

    @rule(which=st.integers(0, 9))
    def send_without_waiting(self, which: int) -> None:
        sender = self.pick(which)
        model, message = self.model, self.operations + 1000

        async def now() -> None:
            self.handles[sender].send_nowait(message)

        room = (
            len(model.queue) < model.window
            or not model.reliable
            or model.state is not OPEN
            or not model.senders[sender]
        )
        if room:
            model.send(self.start(now), sender, message)
        else:
            self.refused(lambda: self.handles[sender].send_nowait(message))

    @rule()
    def receive_without_waiting(self) -> None:
        async def now() -> int:
            return self.receiver.receive_nowait()

        if self.model.queue or self.model.state is not OPEN:
            self.model.receive(self.start(now))
        else:
            self.refused(self.receiver.receive_nowait)

    def refused(self, call: Callable[[], object]) -> None:
        def attempt() -> None:
            try:
                call()
            except trio.WouldBlock:
                return
            raise AssertionError("this would have to wait")

        self.step(attempt)

    @precondition(lambda self: self.model.sends or self.model.receives)
    @rule(which=st.integers(0, 9))
    def cancel_a_waiting_task(self, which: int) -> None:
        waiting = [operation for operation, _, _ in self.model.sends] + self.model.receives
        operation = waiting[which % len(waiting)]
        self.step(self.scopes[operation].cancel)
        self.model.forget(operation)

    @precondition(lambda self: len(self.handles) < 4)
    @rule(which=st.integers(0, 9))
    def clone(self, which: int) -> None:
        sender = self.pick(which)
        if self.model.senders[sender] and self.model.state is OPEN:
            self.step(lambda: self.handles.append(self.handles[sender].clone()))
            self.model.senders[len(self.handles) - 1] = True

    @rule(which=st.integers(0, 9))
    def finish(self, which: int) -> None:
        self.step(self.handles[self.pick(which)].finish_nowait)
        self.model.finish(self.pick(which))

    @precondition(lambda self: self.operations > 12)
    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        self.step(self.handles[self.pick(which)].cancel)
        self.model.end(CANCELLED, by=self.pick(which))

    @precondition(lambda self: self.operations > 12)
    @rule()
    def close(self) -> None:
        self.step(self.receiver.close)
        self.model.end(RECEIVER_CLOSED)

    @invariant()
    def both_agree(self) -> None:
        if hasattr(self, "model"):
            assert self.results == self.model.results
            assert [handle.state for handle in (*self.handles, self.receiver)] == [self.model.state] * (
                len(self.handles) + 1
            )
            assert len(self.model.queue) <= self.model.window

    def teardown(self) -> None:
        def end() -> None:
            self.receiver.close()
            for scope in self.scopes.values():
                scope.cancel()

        if hasattr(self, "model"):
            self.step(end)


async def test_a_channel_does_what_the_model_does() -> None:
    async with trio.open_nursery() as nursery:
        machine = type("Machine", (ChannelMachine,), {"nursery": nursery})
        await trio.to_thread.run_sync(run_state_machine_as_test, machine)
