"""Drivers and nodes in one process: starts, spawns, losses, drains, restarts."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from levada.actors.console import take_snapshot
from levada.actors.nodes import MemberState, NodeDown, NodeLost, NodeSettings, NodeUp, nodes_of
from levada.actors.nodes.fleet import Fleet
from levada.actors.nodes.inspection import look
from levada.actors.nodes.node_side import run_node
from levada.framework import ActorSystem, Failed, Lost, Normal, Ref, Shutdown, bounded, conflate, restart
from levada.framework.errors import ActorError, ConfigurationError, ConnectionLost, NameTaken, NameUnknown

from . import apps
from .apps import Add, Ask, Counter, Fail, Friend, GetMembers, Leave, SpawnOn, app
from .conftest import SETTINGS, nodes_here
from .single import Where


async def successor(system: ActorSystem, name: str, old: Ref[Any]) -> Ref[Any]:
    """Wait until another actor has a name."""
    for _ in range(1000):
        found = system.registry.get(name)
        if found is not None and found is not old:
            return found
        await trio.sleep(0.01)
    raise AssertionError(f"nobody took the name {name}")


async def test_nodes_are_up_when_the_block_begins_and_gone_after_it(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        async with nodes_here(system, 2, app) as (nodes, tasks):
            assert [(m.name, m.index, m.state, m.restarts) for m in nodes.members] == [
                ("n0", 0, MemberState.UP, 0),
                ("n1", 1, MemberState.UP, 0),
            ]
            assert nodes_of(system) is nodes
            assert len({m.node_id for m in nodes.members}) == 2
        assert all(task.gone.is_set() for task in tasks)
        assert [task.how.exit_code for task in tasks] == [0, 0]
        assert nodes.members == []
        with pytest.raises(ActorError, match=r"^no node is up: there is none$"):
            await nodes.spawn(Counter)


async def test_actors_are_spawned_in_turn_or_on_a_node_by_name_or_index(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 2) as (nodes, _):
        there = [await (await nodes.spawn(Counter, on=on)).ask(Where()) for on in ("any", "any", "n1", 0)]
        names = [name for _, name in there]
        assert set(names[:2]) == {"n0", "n1"}
        assert names[2:] == ["n1", "n0"]
        counter = await nodes.spawn(Counter, 5, on="n0", mailbox=bounded(10))
        assert await counter.ask(Add(2)) == 7


async def test_a_node_that_is_not_for_any_takes_actors_by_its_name_only(autojump_clock: MockClock) -> None:
    async with (
        ActorSystem() as system,
        nodes_here(system, 1) as (nodes, _),
        nodes_here(system, 1, settings=attrs.evolve(SETTINGS, on_any=False)),
    ):
        there = [await (await nodes.spawn(Counter, on=on)).ask(Where()) for on in ("any", "any", "any", "n1")]
        assert [name for _, name in there] == ["n0", "n0", "n0", "n1"]


async def test_a_node_waits_for_a_driver_that_is_busy(autojump_clock: MockClock) -> None:
    """Longer than a connection usually waits for its handshake: the driver says when a start takes too long."""
    began = trio.current_time()
    settings = NodeSettings(start_timeout=60.0)
    async with ActorSystem() as system, nodes_here(system, 1, busy=40.0, settings=settings) as (_, tasks):
        assert 40 <= trio.current_time() - began < 41
        assert len(tasks) == 1


async def test_lookup_finds_what_the_app_of_a_node_has_registered(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 2) as (nodes, _):
        counter = await nodes.lookup("counter", on="n1")
        assert await counter.ask(Add(1)) == 101
        with pytest.raises(NameUnknown):
            await nodes.lookup("other", on="n1")


async def test_a_killed_node_is_known_and_starts_again(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 2) as (nodes, tasks), nodes.events() as events:
        counter = await nodes.spawn(Counter, on="n0")
        before = nodes["n0"]
        tasks[0].kill()
        down, up = await events.receive(), await events.receive()
        assert isinstance(down, NodeDown)
        assert isinstance(down.reason, Failed)
        assert isinstance(down.reason.error, NodeLost)
        assert (down.member.name, down.reason.error.signal) == ("n0", 9)
        assert isinstance(await counter.terminated(), Lost)
        assert isinstance(up, NodeUp)
        assert (up.member.name, up.member.restarts) == ("n0", 1)
        assert up.member.node_id != before.node_id
        assert await (await nodes.spawn(Counter, on="n0")).ask(Add(1)) == 1


async def test_a_supervised_actor_starts_anew_elsewhere_under_its_name(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 2) as (nodes, tasks):
        first = await nodes.spawn(Counter, on="any", name="single", supervise=restart("permanent"))
        name = (await first.ask(Where()))[1]
        first.tell(Fail())  # restarts on its node, as the same ref
        assert await first.ask(Add(1)) == 1
        tasks[0 if name == "n0" else 1].kill()
        await first.terminated()
        second = await successor(system, "single", first)
        assert await second.ask(Add(3)) == 3


async def test_nothing_is_left_of_a_supervised_actor_that_has_ended(autojump_clock: MockClock) -> None:
    def kinds(system: ActorSystem) -> list[str]:
        """Return the kinds of all actors but the streams of connections, of which some end when another one is used."""
        return sorted(row.kind for row in take_snapshot(system).actors if row.kind != "StreamActor")

    async with ActorSystem() as system, nodes_here(system, 1) as (nodes, tasks):
        before = kinds(system)
        for policy in (restart("temporary"), restart("transient"), restart("temporary")):
            counter = await nodes.spawn(Counter, on="n0", supervise=policy)
            await counter.ask(Leave())
            await counter.terminated()
        with pytest.raises(ActorError, match="no counter starts at 13"):
            await nodes.spawn(Counter, 13, on="n0", supervise=restart())
        await nodes.spawn(Counter, on="n0", supervise=restart("temporary"))
        tasks[0].kill()
        await trio.sleep(60)
        assert nodes["n0"].state is MemberState.UP
        assert kinds(system) == before


@pytest.mark.ci
async def test_thousands_of_actors_of_a_node_are_used_at_once(autojump_clock: MockClock) -> None:
    """Each has a channel, and each channel a stream."""
    async with ActorSystem() as system, nodes_here(system, 1) as (nodes, _):
        counters = [await nodes.spawn(Counter, on="n0") for _ in range(4100)]
        assert [await counter.ask(Add(1)) for counter in counters] == [1] * 4100


async def test_a_drained_node_stays_down_and_its_supervised_actors_move(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 2) as (nodes, _), nodes.events() as events:
        first = await nodes.spawn(Counter, on="n0", name="plain")
        single = await nodes.spawn(Counter, on="any", name="single", supervise=restart())
        name = (await single.ask(Where()))[1]
        await nodes.drain(name)
        event = await events.receive()
        assert isinstance(event, NodeDown)
        assert event.reason == Normal()
        assert nodes[name].state is MemberState.DOWN
        assert (await (await successor(system, "single", single)).ask(Where()))[1] != name
        assert ("plain" in system.registry) is (name != "n0")
        assert first.is_alive is (name != "n0")


async def test_a_supervised_actor_moves_before_the_app_of_its_node_has_ended(autojump_clock: MockClock) -> None:
    app = "tests.actors.nodes.apps:slow_to_end"
    async with ActorSystem() as system, nodes_here(system, 2, app) as (nodes, _), trio.open_nursery() as nursery:
        first = await nodes.spawn(Counter, on="any", name="single", supervise=restart("permanent"))
        name = (await first.ask(Where()))[1]
        began = trio.current_time()
        nursery.start_soon(nodes.drain, name)
        assert await first.terminated() == Shutdown()
        second = await successor(system, "single", first)
        assert (await second.ask(Where()))[1] != name
        assert trio.current_time() - began < 1
        assert nodes[name].state is MemberState.DRAINING


async def test_a_rolling_restart_never_has_two_nodes_down(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 3) as (nodes, tasks), nodes.events() as events:
        await nodes.restart()
        seen = [events.receive_nowait() for _ in range(6)]
        assert [(type(event), event.member.name) for event in seen] == [
            (kind, name) for name in ("n0", "n1", "n2") for kind in (NodeDown, NodeUp)
        ]
        assert [m.restarts for m in nodes.members] == [1, 1, 1]
        assert [task.how.exit_code for task in tasks[:3]] == [0, 0, 0]


async def test_restarts_at_the_same_time_take_turns(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 2) as (nodes, _), nodes.events() as events:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes.restart)
            assert isinstance(await events.receive(), NodeDown)
            nursery.start_soon(nodes.restart)
            nursery.start_soon(nodes.restart, "n1")
        seen = [events.receive_nowait() for _ in range(9)]
        assert [type(event) for event in seen] == [NodeUp, NodeDown] * 4 + [NodeUp]
        assert [m.restarts for m in nodes.members] == [2, 3]


async def test_errors_of_a_spawn_are_raised_at_the_caller(autojump_clock: MockClock) -> None:
    class Local(Counter):
        pass

    main = type("Main", (Counter,), {"__module__": "__main__"})
    async with ActorSystem() as system, nodes_here(system, 1) as (nodes, _):
        with pytest.raises(ConfigurationError, match=r"Main is in the main module.*: move it into a module of its own"):
            await nodes.spawn(main)
        with pytest.raises(ConfigurationError, match="inside a function"):
            await nodes.spawn(Local)
        with pytest.raises(ConfigurationError, match=r"^cls is <function app .*, wanted an Actor class that can be"):
            await nodes.spawn(app)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^argument 1: object cannot travel .*use a @message class"):
            await nodes.spawn(Counter, object())
        with pytest.raises(ActorError, match="ValueError: no counter starts at 13"):
            await nodes.spawn(Counter, 13)
        with pytest.raises(ActorError, match="ValueError: no counter starts at 13"):
            await nodes.spawn(Counter, 13, supervise=restart())
        with pytest.raises(ConfigurationError, match="there is no node 'n7'; there are: n0"):
            await nodes.spawn(Counter, on="n7")
        with pytest.raises(ConfigurationError, match="escalate"):
            await nodes.spawn(Counter, supervise="escalate")
        with pytest.raises(ConfigurationError, match="conflate"):
            await nodes.spawn(Counter, mailbox=bounded(3, overflow=conflate(type)))
        await nodes.spawn(Counter, name="one")
        with pytest.raises(NameTaken):
            await nodes.spawn(Counter, name="one")
        assert isinstance(nodes, Fleet)
        with pytest.raises(TypeError, match="name is 1, wanted a str"):
            await nodes.spawn(Counter, name=1)  # type: ignore[arg-type]
        await trio.sleep(1)
        (node,) = await look(nodes, 100)
        counters = [actor["path"] for actor in node["snapshot"]["actors"] if "Counter" in actor["kind"]]
        assert len(counters) == 2  # the app's, and "one"


async def test_an_app_that_fails_is_an_error_of_the_block_with_its_traceback(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the node has the traceback of the app's own error; one of levada says enough."""
    (tmp_path / "broken_for_nodes.py").write_text('raise OSError("no such queue")')
    monkeypatch.syspath_prepend(tmp_path)
    async with ActorSystem() as system:
        with pytest.raises(NodeLost, match="n0 has failed: RuntimeError: no such table") as caught:
            async with nodes_here(system, 1, "tests.actors.nodes.apps:fails"):
                pass
        assert "in fails" in caught.value.__notes__[0]
        with pytest.raises(NodeLost, match="OSError: no such queue"):
            async with nodes_here(system, 1, "broken_for_nodes:app"):
                pass
        with pytest.raises(NodeLost, match="no module named 'nowhere'"):
            async with nodes_here(system, 1, "nowhere:app"):
                pass
        with pytest.raises(NodeLost, match="not_an_app"):
            async with nodes_here(system, 1, "tests.actors.nodes.apps:not_an_app"):
                pass
    failed = [record for record in caplog.records if record.__dict__.get("event") == "app_failed"]
    assert [record.exc_info and record.exc_info[0] for record in failed] == [RuntimeError, OSError, None, None]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fails_in_a_task", r"RuntimeError: no such queue \(.*/?apps.py:\d+\)"),
        ("exits", "SystemExit: SHOP_DATABASE is not set"),
        ("interrupts", r"KeyboardInterrupt \(.*/?apps.py:\d+\)"),
    ],
)
async def test_an_app_that_fails_in_a_task_or_exits_is_an_error_that_says_why(
    name: str, text: str, autojump_clock: MockClock
) -> None:
    async with ActorSystem() as system:
        with pytest.raises(NodeLost, match=f"^n0 has failed: {text}(\n|$)"):
            async with nodes_here(system, 1, f"tests.actors.nodes.apps:{name}"):
                pass


async def test_silence_from_before_a_node_was_up_does_not_count_as_a_hang(autojump_clock: MockClock) -> None:
    settings = attrs.evolve(SETTINGS, hang_timeout=2.0)
    async with (
        ActorSystem() as system,
        nodes_here(system, 1, settings=settings) as (nodes, tasks),
        nodes.events() as events,
    ):
        tasks[0].silence = 100.0  # of a start that held up its heartbeat
        await trio.sleep(1.5)
        assert nodes["n0"].state is MemberState.UP
        tasks[0].silence = 0.0
        await trio.sleep(10.0)
        assert (nodes["n0"].state, nodes["n0"].restarts) == (MemberState.UP, 0)
        tasks[0].silence = 100.0
        down = await events.receive()
        assert isinstance(down, NodeDown)
        assert isinstance(down.reason, Failed)
        assert str(down.reason.error).startswith("n0 hangs: no heartbeat for ")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ([(3600.0, "Traceback of an hour ago")], ""),
        ([(3600.0, "Traceback of an hour ago"), (0.5, "out of memory")], "; its last lines: out of memory"),
    ],
)
async def test_an_old_line_of_a_node_that_was_up_is_not_why_it_was_lost(
    written: list[tuple[float, str]], said: str, autojump_clock: MockClock
) -> None:
    async with ActorSystem() as system, nodes_here(system, 1) as (nodes, tasks), nodes.events() as events:
        tasks[0].written = written
        tasks[0].kill()
        down = await events.receive()
        assert isinstance(down, NodeDown)
        assert isinstance(down.reason, Failed)
        assert str(down.reason.error) == f"n0 was killed by SIGKILL{said}"


async def test_a_node_that_dies_while_it_drains_is_a_line_in_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ActorSystem() as system,
        nodes_here(system, 1, "tests.actors.nodes.apps:slow_to_end") as (nodes, tasks),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(nodes.drain, "n0")
        await trio.sleep(0.5)
        assert nodes["n0"].state is MemberState.DRAINING
        tasks[0].kill()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ["n0 was draining and was killed by SIGKILL"]


async def test_a_node_that_has_lost_its_connection_takes_no_actors_and_may_end_by_itself(
    autojump_clock: MockClock,
) -> None:
    async def ends_slowly(opens: Any, **more: Any) -> None:
        try:
            await run_node(opens, **more)
        except* ConnectionLost:
            await trio.sleep(SETTINGS.drain_timeout + SETTINGS.kill_after / 2)
            raise

    async with ActorSystem() as system, nodes_here(system, 2, body=ends_slowly) as (nodes, tasks):
        tasks[0].connection.shutdown(socket.SHUT_RDWR)
        await trio.sleep(1)
        assert nodes["n0"].state is MemberState.UP  # its process has not ended
        for _ in range(4):
            counter = await nodes.spawn(Counter)
            assert (await counter.ask(Where()))[1] == "n1"
        with pytest.raises(ActorError, match=r"^n0 has lost its connection$"):
            await nodes.spawn(Counter, on="n0")
        async with nodes.events() as events:
            event = await events.receive()
        assert isinstance(event, NodeDown)
        assert isinstance(event.reason, Failed)
        assert "n0 ended with exit code 1" in str(event.reason.error)


async def test_an_actor_on_a_node_by_index_ends_with_the_block_of_that_node(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem() as system, nodes_here(system, 1):
        async with nodes_here(system, 1) as (nodes, _):
            counter = await nodes.spawn(Counter, on=1, name="counter", supervise=restart("permanent"))
        await counter.terminated()
        await trio.sleep(60)
        assert "counter" not in system.registry
        assert take_snapshot(system).statistics.failures == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_nodes_start_when_the_path_has_a_folder_that_is_not_unicode(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(os.fsdecode(b"/caf\xe9"))
    async with ActorSystem() as system, nodes_here(system, 1) as (nodes, _):
        assert nodes["n0"].state is MemberState.UP


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"drain_timeout": float("inf")}, "'drain_timeout' must be < inf"),
        ({"kill_after": float("inf")}, "'kill_after' must be < inf"),
        ({"start_timeout": float("inf")}, "'start_timeout' must be < inf"),
        ({"rlimits": {"RLIMIT_AS": "1G"}}, r"rlimits\['RLIMIT_AS'\] is '1G', wanted a number"),
        ({"rlimits": {"RLIMIT_AS": 1 << 64}}, "wanted a number, -1 for no limit"),
        ({"env": {"PORT": 80}}, "env has 'PORT', a str with a value of type int, wanted two str"),
        ({"affinity": [0, 1]}, r"affinity is \[0, 1\], wanted the CPUs of each node, such as \[\[0\], \[1\]\]"),
        ({"affinity": [["0"]]}, r"affinity is \[\['0'\]\], wanted"),
        ({"affinity": [[-1]]}, r"affinity is \[\[-1\]\], wanted"),
    ],
)
def test_settings_that_no_node_can_have_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NodeSettings(**settings)


async def test_nodes_start_when_the_current_folder_was_removed(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    async with ActorSystem() as system:
        async with nodes_here(system, 1) as (nodes, _):
            assert nodes["n0"].state is MemberState.UP
        with pytest.raises(
            NodeLost, match="no module named 'nowhere' in the current folder, which was removed, or among"
        ):
            async with nodes_here(system, 1, "nowhere:app"):
                pass


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fails_late", "RuntimeError: cannot flush"),
        ("exits_late", "SystemExit: cannot flush"),
        ("interrupts_late", "KeyboardInterrupt ("),
        ("yields_in_a_loop", "ConfigurationError: tests.actors.nodes.apps:yields_in_a_loop yields more than once"),
        ("yields_twice", "ConfigurationError: tests.actors.nodes.apps:yields_twice yields more than once"),
        (
            "yields_twice_within",
            "ConfigurationError: tests.actors.nodes.apps:yields_twice_within yields more than once",
        ),
    ],
)
async def test_a_node_whose_app_fails_while_it_ends_has_ended(
    name: str, text: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem() as system:
        async with nodes_here(system, 2, f"tests.actors.nodes.apps:{name}") as (nodes, tasks), nodes.events() as events:
            begin = trio.current_time()
            await nodes.drain("n0")
            event = await events.receive()
            assert isinstance(event, NodeDown)
            assert isinstance(event.reason, Failed)
            assert f"n0 has failed: {text}" in str(event.reason.error)
            assert nodes["n0"].state is MemberState.DOWN
            await nodes.restart("n1")
            assert nodes["n1"].state is MemberState.UP
        assert trio.current_time() - begin < SETTINGS.drain_timeout
        assert [task.run.id for task in tasks] == ["n0#0", "n1#0", "n1#1"]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(":")[0] for line in lines] == ["n0 has failed", "n1 has failed", "n1 has failed"]


async def test_a_node_that_fails_again_and_again_says_when_it_starts_next(autojump_clock: MockClock) -> None:
    settings = attrs.evolve(SETTINGS, restart=restart("transient", initial_backoff=10.0, jitter=0.0))
    async with (
        ActorSystem() as system,
        nodes_here(system, 2, settings=settings) as (nodes, tasks),
        nodes.events() as events,
    ):
        assert isinstance(nodes, Fleet)
        for _ in range(2):
            tasks[-1].kill()
            assert isinstance(await events.receive(), NodeDown)
            if len(tasks) == 2:
                assert isinstance(await events.receive(), NodeUp)
        await trio.sleep(4)
        assert nodes["n1"].state is MemberState.DOWN
        assert [nodes.starts_in(name) for name in ("n0", "n1", "n2")] == [None, pytest.approx(6.0), None]
        assert isinstance(await events.receive(), NodeUp)
        assert nodes.starts_in("n1") is None
        await nodes.drain("n1")
        assert nodes.starts_in("n1") is None


async def test_who_waits_for_a_restart_learns_that_the_node_was_drained(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 1) as (nodes, _), nodes.events() as events:

        async def restart_it() -> None:
            with pytest.raises(NodeLost, match=r"^n0 was drained before its app was ready$"):
                await nodes.restart("n0")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(restart_it)
            assert isinstance(await events.receive(), NodeDown)
            await nodes.drain("n0")
        await nodes.restart("n0")
        assert nodes["n0"].state is MemberState.UP


@pytest.mark.parametrize("name", ["slow", "fails_slowly", "hangs"])
async def test_a_node_that_is_drained_while_it_starts_again_ends_in_order(
    name: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no work yet, so nothing was cut off, even if its app fails."""
    async with (
        ActorSystem() as system,
        nodes_here(system, 1, "tests.actors.nodes.apps:slow") as (nodes, tasks),
        nodes.events() as events,
    ):
        monkeypatch.setattr(apps, "slow", getattr(apps, name))
        tasks[0].kill()
        assert isinstance(await events.receive(), NodeDown)
        await trio.sleep(0.5)
        assert nodes["n0"].state is MemberState.STARTING
        await nodes.drain("n0")
        event = await events.receive()
        assert isinstance(event, NodeDown)
        assert event.reason == Normal()


async def test_nodes_spawn_on_each_other_and_refs_travel_between_all_members(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 3) as (nodes, tasks):
        friend, other = await nodes.spawn(Friend, on="n0"), await nodes.spawn(Friend, on="n2")
        counter = await friend.ask(SpawnOn("n1", "shared"))
        assert await counter.ask(Where()) == (os.getpid(), "n1")
        assert system.registry["shared"] is counter
        assert await friend.ask(Ask(counter)) == 41
        assert await other.ask(Ask(counter)) == 42
        here = system.spawn(Counter, 1)
        assert await other.ask(Ask(here)) == 2
        tasks[1].kill()
        assert isinstance(await counter.terminated(), Lost)
        with pytest.raises(ActorError, match="n1"):
            await other.ask(Ask(counter))


async def test_nodes_that_start_together_learn_of_each_other_whatever_comes_first(autojump_clock: MockClock) -> None:
    """The driver's answer to a hello and its news of other nodes travel on different channels."""
    async with ActorSystem() as system, nodes_here(system, 8) as (nodes, _):
        friends = [await nodes.spawn(Friend, on=number) for number in range(8)]
        await trio.sleep(1)  # all news has arrived
        up = [(f"n{number}", "up", f"aqueduct+memory://n{number}.0") for number in range(8)]
        assert [await friend.ask(GetMembers()) for friend in friends] == [up] * 8


async def test_members_of_a_block_that_has_ended_are_forgotten_by_all(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 1) as (nodes, _):
        friend = await nodes.spawn(Friend, on="n0")
        async with nodes_here(system, 1):
            await trio.sleep(1)
            assert [name for name, _, _ in await friend.ask(GetMembers())] == ["n0", "n1"]
        await trio.sleep(1)
        assert [name for name, _, _ in await friend.ask(GetMembers())] == ["n0"]
        async with nodes_here(system, 1, names=["n1"]):  # the name is free again
            await trio.sleep(1)
            assert [(name, state) for name, state, _ in await friend.ask(GetMembers())] == [("n0", "up"), ("n1", "up")]


async def test_a_node_knows_the_members_and_a_mistake_in_it_is_an_error_there(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, nodes_here(system, 2) as (nodes, _):
        friend = await nodes.spawn(Friend, on="n0")
        with pytest.raises(ActorError, match="there is no node 'n5'; there are: n0, n1"):
            await friend.ask(SpawnOn("n5"))
