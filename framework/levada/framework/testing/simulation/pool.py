"""A pool of threads for a simulated process, without threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

__all__ = ["SimulatedPool"]

P = ParamSpec("P")
R = TypeVar("R")


class SimulatedPool(Executor):
    """Runs each function when it is submitted, in the thread that submits it, so that their order repeats. See `Platform.thread_pool`.

    Args:
        threads: not used.
        name: not used.
    """

    def __init__(self, threads: int, name: str) -> None:
        pass

    def submit(self, function: Callable[P, R], /, *args: P.args, **keywords: P.kwargs) -> Future[R]:
        """Run a function; return its result, or the error that it raised, also if that ends a simulated process."""
        done: Future[R] = Future()
        try:
            done.set_result(function(*args, **keywords))
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            done.set_exception(error)
        return done
