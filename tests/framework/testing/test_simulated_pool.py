"""The pool of a simulated process."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from levada.framework.testing.simulation import Crashed, SimulatedPool


def test_functions_run_one_after_the_other_in_the_thread_that_submits_them() -> None:
    ran: list[tuple[int, int]] = []

    def run(number: int) -> int:
        ran.append((number, threading.get_ident()))
        return number

    with SimulatedPool(16, "sync") as pool:
        done = [pool.submit(run, n) for n in range(3)]
    assert wait(done).not_done == set()
    assert [each.result() for each in done] == [0, 1, 2]
    assert ran == [(n, threading.get_ident()) for n in range(3)]


def test_the_end_of_a_process_comes_out_where_the_result_is_taken() -> None:
    def crash() -> None:
        raise Crashed("the power failed")

    done = SimulatedPool(1, "sync").submit(crash)
    with pytest.raises(Crashed, match="the power failed"):
        done.result()
