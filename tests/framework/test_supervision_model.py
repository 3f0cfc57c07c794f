"""Random trees, random ends: the runtime against a small model of OTP's rules.

The model knows nothing of the runtime. It works on one end at a time, to the very last consequence, and writes down the same three
things as the actors do: ``start``, ``restart`` (the hook, when an object makes way for the next) and ``stop``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import attrs
import trio
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorInfo,
    ActorSystem,
    Reason,
    Strategy,
    handles,
    message,
    one_for_all,
    one_for_one,
    rest_for_one,
    restart,
)
from levada.framework.errors import ActorError
from levada.framework.supervision import RestartPolicy

Log = list[tuple[str, str]]


# ---------------------------------------------------------------- what a tree is


@attrs.frozen
class Spec:
    """One actor of a tree, and those below it."""

    policy: Any
    strategy: Strategy
    children: tuple[Spec, ...]


policies = st.one_of(
    st.just("stop"),
    st.just("escalate"),
    st.builds(
        lambda kind, most: restart(kind, max=most, within=10.0),
        st.sampled_from(["permanent", "transient", "temporary"]),
        st.integers(0, 3),
    ),
)
rules = st.one_of(
    st.builds(one_for_one),
    st.builds(lambda most: one_for_all(max=most, within=10.0), st.integers(0, 3)),
    st.builds(lambda most: rest_for_one(max=most, within=10.0), st.integers(0, 3)),
)
specs = st.recursive(
    st.builds(Spec, policies, rules, st.just(())),
    lambda below: st.builds(Spec, policies, rules, st.lists(below, min_size=1, max_size=4).map(tuple)),
    max_leaves=12,
)
forests = st.lists(specs, min_size=1, max_size=3)
ends = st.lists(
    st.tuples(
        st.integers(0, 10_000), st.sampled_from(["fail", "fail", "kill", "stop", "normal"]), st.sampled_from([0, 3, 11])
    ),
    max_size=12,
)


# ---------------------------------------------------------------- the runtime's side


class Crash(Exception):
    """Raised on order."""


@message
class Raise:
    error: Exception


@message
class End:
    pass


class Node(Actor[Raise | End]):
    spec: Spec
    called: str
    log: Log

    def started(self) -> None:
        self.log.append(("start", self.called))
        self.strategy = self.spec.strategy
        for number, spec in enumerate(self.spec.children):
            self.spawn(Node, spec, f"{self.called}/{number}", self.log, name=str(number), supervise=spec.policy)

    def stopping(self, reason: Reason) -> None:
        self.log.append(("stop", self.called))

    def restarting(self, error: BaseException | None, message: Any) -> None:
        self.log.append(("restart", self.called))

    @handles
    def fail(self, m: Raise) -> None:
        raise m.error

    @handles
    def end(self, m: End) -> None:
        self.stop()


def living(info: ActorInfo) -> dict[str, int]:
    """Restarts of all actors below, by path."""
    found: dict[str, int] = {}
    todo = list(info.children)
    for one in todo:
        found[one.path] = one.restarts
        todo.extend(one.children)
    return found


# ---------------------------------------------------------------- the model's side


class Model:
    """One actor of the model, or (without a parent) what stands above all."""

    def __init__(self, spec: Spec, path: str, parent: Model | None, world: World) -> None:
        self.spec = spec
        self.path = path
        self.parent = parent
        self.world = world
        self.children: list[Model] = []
        self.restarts = 0
        self.times: list[float] = []
        self.group_times: list[float] = []

    @property
    def kind(self) -> str | None:
        """Kind of restart, if it is supervised at all."""
        return self.spec.policy.kind if isinstance(self.spec.policy, RestartPolicy) else None

    def below(self) -> Iterator[Model]:
        for child in self.children:
            yield child
            yield from child.below()

    def stop_children(self) -> None:
        for child in reversed(self.children):
            child.stop_children()
            self.world.log.append(("stop", child.path))
        self.children = []

    def end(self, how: str, error: Exception | None) -> None:
        """End for a reason, with all that follows."""
        assert self.parent is not None
        world, parent = self.world, self.parent
        self.stop_children()
        kind = self.kind
        if kind is None or kind == "temporary" or (kind == "transient" and how not in ("fail", "kill")):
            self.gone()
            if self.spec.policy == "escalate" and how == "fail":
                assert error is not None
                parent.failed(error)
            return
        strategy = parent.spec.strategy
        if strategy.scope == "one":
            times, most = self.times, self.spec.policy.max
        else:
            times, most = parent.group_times, strategy.max
        times.append(world.now)
        if sum(time > world.now - 10.0 for time in times) > most:
            self.gone()
            parent.failed(error if error is not None else ActorError(f"{self.path} ended too often"))
            return
        world.log.append(("restart", self.path))
        group = [self]
        if strategy.scope != "one":
            first = 0 if strategy.scope == "all" else parent.children.index(self)
            group = [child for child in parent.children[first:] if child.kind is not None]
        again = []
        for member in reversed(group):
            if member is not self:
                member.stop_children()
                if member.kind == "temporary":
                    member.gone()
                    continue
                world.log.append(("restart", member.path))
            again.append(member)
        for member in again:
            member.restarts += 1
        world.start(list(reversed(again)))

    def gone(self) -> None:
        assert self.parent is not None
        self.world.log.append(("stop", self.path))
        self.parent.children.remove(self)

    def failed(self, error: Exception) -> None:
        """A child's failure has become this one's."""
        if self.parent is None:
            self.world.crashed = error
        else:
            self.end("fail", error)


class World:
    """All of the model, and its clock."""

    def __init__(self, forest: list[Spec]) -> None:
        self.log: Log = []
        self.now = 0.0
        self.crashed: Exception | None = None
        self.root = Model(Spec("stop", one_for_one(), tuple(forest)), "", None, self)
        self.root.children = [Model(spec, f"/{n}", self.root, self) for n, spec in enumerate(forest)]
        self.start(list(self.root.children))

    def start(self, nodes: list[Model]) -> None:
        """Start some siblings and all below them, level by level: `started` of each spawns the next."""
        queue = deque(nodes)
        while queue:
            node = queue.popleft()
            self.log.append(("start", node.path))
            node.group_times = []
            node.children = [Model(spec, f"{node.path}/{n}", node, self) for n, spec in enumerate(node.spec.children)]
            queue.extend(node.children)

    def living(self) -> dict[str, int]:
        return {node.path: node.restarts for node in self.root.below()}


# ---------------------------------------------------------------- one against the other


async def compare(forest: list[Spec], plan: list[tuple[int, str, int]]) -> None:
    world = World(forest)
    log: Log = []
    raised: BaseException | None = None
    try:
        async with ActorSystem(seed=0) as system:
            for number, spec in enumerate(forest):
                system.spawn(Node, spec, f"/{number}", log, name=str(number), supervise=spec.policy)
            await wait_all_tasks_blocked()
            assert log == world.log
            for pick, how, pause in plan:
                alive = sorted(world.living())
                if not alive:
                    break
                path = alive[pick % len(alive)]
                target = next(node for node in world.root.below() if node.path == path)
                unordered = how == "kill" and any(True for _ in target.below())
                ref = system.lookup(path)
                assert ref is not None
                error = Crash(path)
                log.clear()
                world.log.clear()
                world.now = trio.current_time()
                note(f"{world.now:g}: {how} {path}")
                if how == "fail":
                    ref.tell(Raise(error))
                elif how == "kill":
                    ref.kill()
                elif how == "stop":
                    ref.stop(now=True)
                else:
                    ref.tell(End())
                target.end(how, error if how == "fail" else None)
                if world.crashed is not None:
                    break  # the block is being left: the rest is compared behind it
                await wait_all_tasks_blocked()
                # Children of a killed actor are killed all at once, in no promised order.
                assert (sorted(log) == sorted(world.log)) if unordered else (log == world.log)
                assert living(system.observe.tree()) == world.living()
                await trio.sleep(pause)
            else:
                log.clear()
                world.log.clear()
            if world.crashed is not None:
                await trio.sleep_forever()
    except (Crash, ActorError) as error:
        raised = error
    world.root.stop_children()
    if world.crashed is None:
        assert raised is None
    elif isinstance(world.crashed, Crash):
        event("crashed")
        assert raised is world.crashed
    else:
        event("crashed")
        assert isinstance(raised, ActorError)
        assert str(raised) == str(world.crashed)
    assert sorted(log) == sorted(world.log)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(forests, ends)
def test_the_outcome_is_the_models(forest: list[Spec], plan: list[tuple[int, str, int]]) -> None:
    trio.run(compare, forest, plan, clock=MockClock(autojump_threshold=0))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(forests, ends, st.integers(0, 2**32))
def test_whatever_ends_at_the_same_moment_the_tree_stays_a_tree(
    forest: list[Spec], plan: list[tuple[int, str, int]], seed: int
) -> None:
    """Without a model: several ends at once, in the middle of one another."""
    lot = random.Random(seed)

    async def main() -> None:
        log: Log = []
        system = ActorSystem(seed=0)
        try:
            async with system:
                for number, spec in enumerate(forest):
                    system.spawn(Node, spec, f"/{number}", log, name=str(number), supervise=spec.policy)
                for pick, how, pause in plan:
                    paths = sorted(living(system.observe.tree()))
                    if not paths:
                        break
                    for path in (paths[pick % len(paths)], lot.choice(paths), lot.choice(paths)):
                        ref = system.lookup(path)
                        if ref is not None:
                            if how == "fail":
                                ref.tell(Raise(Crash(path)))
                            elif how == "kill":
                                ref.kill()
                            elif how == "stop":
                                ref.stop(now=lot.random() < 0.5)
                            else:
                                ref.tell(End())
                    if pause:
                        await wait_all_tasks_blocked()
                        found = living(system.observe.tree())
                        assert all(path.rpartition("/")[0] in found or path.count("/") == 1 for path in found)
                        await trio.sleep(pause)
                    else:
                        await trio.lowlevel.checkpoint()
        except (Crash, ActorError):
            pass
        assert system.statistics().actors == 0
        # Each object that started was ended by exactly one of the two hooks; some were ended before they ever started.
        starts: dict[str, int] = {}
        finals: dict[str, int] = {}
        for what, path in log:
            counts = starts if what == "start" else finals
            counts[path] = counts.get(path, 0) + 1
        assert all(starts.get(path, 0) <= finals.get(path, 0) for path in starts)

    trio.run(main, clock=MockClock(autojump_threshold=0))
