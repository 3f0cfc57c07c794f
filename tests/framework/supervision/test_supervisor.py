"""The supervisor that is nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import ActorSystem, Failed, Shutdown, child, handles, rest_for_one, restart
from levada.framework.errors import ConfigurationError, NameTaken
from levada.framework.supervisor import Children, StartChild, StopChild, Supervisor

from .conftest import PERMANENT, Log, Say, Wait, Worker, restarts


def worker(log: Log, name: str, **keywords: Any) -> Any:
    return child(Worker, log, name, name=name, **keywords)


async def test_supervisor_starts_its_list_in_order_and_supervises_it(system: ActorSystem) -> None:
    log: Log = []
    team = system.spawn(Supervisor, [worker(log, "a"), worker(log, "b"), worker(log, "c")], rest_for_one(), name="team")
    refs = await team.ask(Children())
    assert [ref.path for ref in refs] == ["/team/a", "/team/b", "/team/c"]
    await wait_all_tasks_blocked()  # the answer may come before their turn does
    assert log == [("a", "start"), ("b", "start"), ("c", "start")]
    log.clear()
    refs[1].kill()
    await wait_all_tasks_blocked()
    assert log == [("b", "restart", type(None)), ("c", "restart", type(None)), ("b", "start"), ("c", "start")]
    assert await team.ask(Children()) == refs


async def test_supervisor_starts_and_stops_children_at_run_time(system: ActorSystem) -> None:
    log: Log = []
    team = system.spawn(Supervisor, [worker(log, "a")], name="team")
    late = await team.ask(StartChild(worker(log, "late", supervise=PERMANENT)))
    assert late.path == "/team/late"
    assert await late.ask(Say("here")) == "here"
    assert await team.ask(StopChild("late")) is True
    assert not late.is_alive
    assert await late.terminated() == Shutdown()
    assert await team.ask(StopChild("late")) is False
    assert await system.spawn(Supervisor).ask(StopChild("late")) is False
    assert [ref.path for ref in await team.ask(Children())] == ["/team/a"]
    again = await team.ask(StartChild(worker(log, "late")))
    assert again is not late


async def test_a_child_that_cannot_be_started_is_an_answer_and_no_failure(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    team = system.spawn(Supervisor, [worker([], "a")], name="team")
    with pytest.raises(NameTaken):
        await team.ask(StartChild(worker([], "a")))

    def broken() -> Worker:
        raise OSError("no such thing")

    with pytest.raises(OSError, match="no such thing"):
        await team.ask(StartChild(child(broken)))
    for _ in range(20):
        team.tell(StartChild(child(broken)))
    await wait_all_tasks_blocked()
    assert team.is_alive
    assert caplog.messages == 10 * ["/team could not start a child"]
    assert len(await team.ask(Children())) == 1


async def test_stop_child_kills_after_the_deadline(autojump_clock: MockClock) -> None:
    async with ActorSystem(stop_timeout=2.0) as system:
        team = system.spawn(Supervisor, [worker([], "a", supervise=PERMANENT)], name="team")
        (ref,) = await team.ask(Children())
        ref.tell(Wait(1000.0))
        await wait_all_tasks_blocked()
        assert await team.ask(StopChild("a"), timeout=None) is True
        assert trio.current_time() == pytest.approx(2.0)
        assert await ref.terminated() == Shutdown()
        assert await team.ask(Children()) == []


async def test_stop_child_waits_for_the_end_of_a_child_that_it_kills(autojump_clock: MockClock) -> None:
    class Tidy(Worker):
        @handles
        async def wait(self, m: Wait) -> None:
            try:
                await trio.sleep(m.seconds)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(3.0)

    async with ActorSystem(stop_timeout=2.0) as system:
        team = system.spawn(Supervisor, [child(Tidy, [], name="a")])
        (ref,) = await team.ask(Children())
        ref.tell(Wait(1000.0))
        await wait_all_tasks_blocked()
        assert await team.ask(StopChild("a"), timeout=None) is True
        assert trio.current_time() == pytest.approx(5.0)
        assert await team.ask(Children()) == []


async def test_stop_child_is_for_good_also_for_a_child_that_ends_already(autojump_clock: MockClock) -> None:
    """And would start again, as it is permanent."""
    async with ActorSystem() as system:
        team = system.spawn(Supervisor, [worker([], "a", supervise=PERMANENT)], name="team")
        (ref,) = await team.ask(Children())
        ref.tell(Wait(1.0))
        await wait_all_tasks_blocked()
        ref.stop(now=True)
        await wait_all_tasks_blocked()
        assert await team.ask(StopChild("a")) is True
        assert trio.current_time() == pytest.approx(1.0)
        assert await team.ask(Children()) == []
        assert restarts(team) == 0


async def test_a_supervisor_that_starts_again_has_the_children_of_its_list(system: ActorSystem) -> None:
    log: Log = []
    team = system.spawn(Supervisor, [worker(log, "a", supervise=restart(max=0))], name="team", supervise=restart())
    await team.ask(StartChild(worker(log, "late")))
    first, late = await team.ask(Children())
    first.kill()
    await wait_all_tasks_blocked()
    (again,) = await team.ask(Children())
    assert again.path == "/team/a"
    assert again is not first
    assert not late.is_alive
    assert restarts(team) == 1


async def test_child_ref_finds_the_living(system: ActorSystem) -> None:
    found: Log = []

    class Looking(Supervisor):
        def started(self) -> None:
            super().started()
            found.extend([self.child_ref("a"), self.child_ref("nobody")])

    system.spawn(Looking, [worker([], "a")], name="team")
    await wait_all_tasks_blocked()
    assert found == [system.lookup("/team/a"), None]


def test_a_supervisor_checks_its_list() -> None:
    with pytest.raises(ConfigurationError, match="a child is"):
        Supervisor([Worker])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="different names"):
        Supervisor([worker([], "a"), worker([], "a")])
    with pytest.raises(TypeError):
        Supervisor([], "one_for_one")  # type: ignore[arg-type]


async def test_supervisors_nest(system: ActorSystem) -> None:
    log: Log = []
    inner = child(Supervisor, [worker(log, "leaf", supervise=restart(max=1))], name="inner", supervise=restart(max=1))
    top = system.spawn(Supervisor, [inner], name="top", supervise="stop")
    await wait_all_tasks_blocked()
    for _ in range(4):  # a restart of the leaf, of inner, of the leaf, and then it is too much for the top
        leaf = system.lookup("/top/inner/leaf")
        assert leaf is not None
        leaf.kill()
        await wait_all_tasks_blocked()
    assert isinstance(await top.terminated(), Failed)
    assert [entry[1] for entry in log] == ["start", "restart", "start", "stop", "start", "restart", "start", "stop"]
