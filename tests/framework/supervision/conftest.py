"""Workers that log what happens to them, and a parent that keeps a crew of them under a strategy."""

from __future__ import annotations

from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import Actor, ActorSystem, Asks, Reason, Ref, Strategy, handles, message, restart

Log = list[Any]

PERMANENT = restart("permanent")
ENDS = ["normal", "stop", "kill", "fail"]


@message
class Say(Asks[str]):
    text: str


@message
class Raise:
    error: BaseException


@message
class Work:
    n: int


@message
class End:
    """End yourself as `Normal`."""


@message
class Wait:
    seconds: float


@message
class Late:
    """Fail in so many seconds."""

    seconds: float


class Worker(Actor[Say | Raise | Work | End | Wait | Late]):
    """Logs what happens to it as ``(name, what)``."""

    log: Log
    called: str = ""

    def started(self) -> None:
        self.log.append((self.called, "start"))

    def stopping(self, reason: Reason) -> None:
        self.log.append((self.called, "stop", type(reason)))

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.log.append((self.called, "restart", type(error)))

    @handles
    def say(self, m: Say) -> str:
        return m.text

    @handles
    def fail(self, m: Raise) -> None:
        raise m.error

    @handles
    def work(self, m: Work) -> None:
        self.log.append((self.called, m.n))

    @handles
    def end(self, m: End) -> None:
        self.stop()

    @handles
    async def wait(self, m: Wait) -> None:
        await trio.sleep(m.seconds)

    @handles
    async def late(self, m: Late) -> None:
        await trio.sleep(m.seconds)
        raise ValueError


class Crew(Actor[Any]):
    """A parent of workers, one for each policy, under a strategy."""

    log: Log
    rules: Strategy
    policies: tuple[Any, ...]

    def started(self) -> None:
        self.strategy = self.rules
        for name, policy in zip("abcdefgh", self.policies, strict=False):
            self.spawn(Worker, self.log, name, name=name, supervise=policy)

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.log.append(("crew", "restart", type(error)))

    def stopping(self, reason: Reason) -> None:
        self.log.append(("crew", "stop", type(reason)))


async def crew(
    system: ActorSystem, log: Log, rules: Strategy, *policies: Any, supervise: Any = "stop"
) -> tuple[Ref[Any], ...]:
    """Start a crew; return its ref and those of its workers."""
    parent = system.spawn(Crew, log, rules, policies, name="crew", supervise=supervise)
    await wait_all_tasks_blocked()
    refs: list[Ref[Any]] = [parent]
    for name, _ in zip("abcdefgh", policies, strict=False):
        ref = system.lookup(f"/crew/{name}")
        assert ref is not None
        refs.append(ref)
    log.clear()
    return tuple(refs)


def restarts(ref: Any) -> int:
    count: int = ref._extras.restarts if ref._extras is not None else 0
    return count


async def end(ref: Ref[Any], how: str) -> None:
    if how == "normal":
        ref.tell(End())
    elif how == "stop":
        ref.stop(now=True)
    elif how == "kill":
        ref.kill()
    else:
        ref.tell(Raise(ValueError()))
    await wait_all_tasks_blocked()
