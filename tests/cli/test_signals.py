"""Signals of programs of many hours: wishes that come when it is too late for them."""

from __future__ import annotations

import os
import signal

import pytest
import trio
import trio.testing

from levada.actors.cli.signals import ENDS, RELOAD, Terminal, late_ones_dropped

pytestmark = pytest.mark.skipif(not RELOAD, reason="Windows has no SIGHUP")


@pytest.mark.parametrize("taken", [False, True], ids=["in the loop's queue", "with the receiver"])
def test_a_wish_that_comes_while_the_program_ends_does_not_kill_it(taken: bool) -> None:
    killed_by: list[int] = []
    before = signal.signal(RELOAD, lambda number, _: killed_by.append(number))  # stands for the default

    async def main(numbers: list[int]) -> None:
        with trio.open_signal_receiver(*numbers) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            assert await anext(signals) == signal.SIGTERM
            os.kill(os.getpid(), RELOAD)
            if taken:
                await trio.testing.wait_all_tasks_blocked()

    try:
        with late_ones_dropped(RELOAD, 0) as numbers:
            assert numbers == [*ENDS, RELOAD]
            trio.run(main, numbers)
        assert killed_by == []
        os.kill(os.getpid(), RELOAD)
        assert killed_by == [RELOAD]
    finally:
        signal.signal(RELOAD, before)


def test_a_terminal_that_was_closed_is_noticed() -> None:
    ours, theirs = os.openpty()
    reading, writing = os.pipe()
    try:
        on_terminal, on_pipe = Terminal(theirs), Terminal(writing)
        assert (on_terminal.closed, on_pipe.closed) == (False, False)
        os.close(ours)
        assert (on_terminal.closed, on_pipe.closed) == (True, False)
    finally:
        for number in (theirs, reading, writing):
            os.close(number)
