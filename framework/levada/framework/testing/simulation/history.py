"""What the clients of a world have asked, and what they were answered; and whether that is possible without a fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from math import inf
from typing import Any

import attrs
import trio

from .addresses import PROCESS

__all__ = ["History", "NotLinear", "Operation", "check_linear"]


@attrs.define(eq=False)
class Operation:
    """A question and its answer."""

    key: object
    """What it is about: operations with different keys have nothing to do with each other."""
    question: Any
    asked: float
    """The virtual time at which it was asked, in seconds."""
    answered: float = inf
    """The virtual time of the answer; infinite without one: it may have been carried out at any time since, or not at all."""
    answer: Any = None

    def __str__(self) -> str:
        if self.answered == inf:
            return f"{self.key}: {self.question!r} at {self.asked:.4f} s, not answered"
        return f"{self.key}: {self.question!r} at {self.asked:.4f} s, answered with {self.answer!r} at {self.answered:.4f} s"


class History:
    """The operations of a world, the first question first."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def ask(self, key: object, question: Any) -> Operation:
        """Record that a question is asked now."""
        operation = Operation(key, question, trio.current_time())
        if _is_alive():
            self.operations.append(operation)
        return operation

    def answer(self, operation: Operation, answer: Any) -> None:
        """Record the answer. Does nothing in a process that is dead: it has told no one."""
        if _is_alive():
            operation.answered, operation.answer = trio.current_time(), answer

    async def call(self, key: object, question: Any, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Ask, and record the question and its answer; an error leaves the question without an answer.

        Args:
            key: see `Operation.key`.
            question: to ask.
            ask: asks it, such as ``ref.ask``.

        Returns:
            The answer.
        """
        operation = self.ask(key, question)
        found = await ask(question)
        self.answer(operation, found)
        return found


def _is_alive() -> bool:
    process = PROCESS.get()
    return process is None or not process.dead


class NotLinear(AssertionError):
    """The answers of a history cannot have come from one object that did one thing after the other."""


def check_linear(
    history: History | Iterable[Operation],
    apply: Callable[[Any, Any], tuple[Any, Any]],
    initial: Any = None,
) -> None:
    """Check that a history is linearizable: for each key, there is an order of all operations that gives these answers.

    In this order an operation that was answered before another was asked comes before it. An operation without an answer is at any place after
    its question, or nowhere. The time grows with the operations that are under way at once, not with the length of the history.

    Args:
        history: of one run.
        apply: what a question does: takes a state and a question, and returns the next state and the answer. States can be hashed.
        initial: the state before the first operation, of each key.

    Raises:
        NotLinear: there is no such order; the text has the operations after which it fails.

    Example:
        >>> counter = lambda total, amount: (total + amount, total + amount)
        >>> check_linear([Operation("a", 1, 0.0, 2.0, 3), Operation("a", 2, 1.0, 3.0, 2)], counter, 0)
        >>> check_linear([Operation("a", 1, 0.0, 1.0, 3), Operation("a", 2, 2.0, 3.0, 2)], counter, 0)
        Traceback (most recent call last):
        levada.framework.testing.simulation.history.NotLinear: no order of the operations gives these answers; at most 0 of 2 fit:
          a: 1 at 0.0000 s, answered with 3 at 1.0000 s
    """
    operations = history.operations if isinstance(history, History) else list(history)
    by_key: dict[object, list[Operation]] = {}
    for operation in operations:
        by_key.setdefault(operation.key, []).append(operation)
    for mine in by_key.values():
        _check_one(sorted(mine, key=lambda operation: operation.asked), apply, initial)


def _check_one(operations: list[Operation], apply: Callable[[Any, Any], tuple[Any, Any]], initial: Any) -> None:
    """Search an order, depth first; a state that was seen after the same operations is not tried again.

    Early answers are tried first, and operations without an answer last: of ten of these there are millions of orders.
    """
    wanted = sum(1 << i for i, operation in enumerate(operations) if operation.answered != inf)
    stack: list[tuple[int, Any]] = [(0, initial)]
    seen = {(0, initial)}
    best = 0
    while stack:
        done, state = stack.pop()
        if done & wanted == wanted:
            return
        if (done & wanted).bit_count() > (best & wanted).bit_count():
            best = done
        for i in sorted(_next(operations, done), key=lambda i: operations[i].answered, reverse=True):
            after, answer = apply(state, operations[i].question)
            if operations[i].answered == inf or answer == operations[i].answer:
                place = done | 1 << i, after
                if place not in seen:
                    seen.add(place)
                    stack.append(place)
    stuck = "\n  ".join(str(operations[i]) for i in _next(operations, best))
    fit = f"at most {(best & wanted).bit_count()} of {wanted.bit_count()} fit"
    raise NotLinear(f"no order of the operations gives these answers; {fit}:\n  {stuck}")


def _next(operations: list[Operation], done: int) -> list[int]:
    """Return the operations that may come next: asked before any other that is left was answered."""
    found: list[int] = []
    first = inf
    for i in range(_lowest_left(done), len(operations)):
        operation = operations[i]
        if operation.asked > first:
            break
        if not done >> i & 1:
            found.append(i)
            first = min(first, operation.answered)
    return found


def _lowest_left(done: int) -> int:
    """Return the number of the first operation that is left."""
    return ((done + 1) & ~done).bit_length() - 1
