"""Simulated worlds: what a kill, a pause, a cut and a power failure do; seeds that repeat; and histories that no object could have given."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import pickle
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable
from math import inf, nan
from types import ModuleType
from typing import Any

import pytest
import trio

from levada.framework import Actor, ActorSystem, Asks, handles, message
from levada.framework.errors import ConfigurationError
from levada.framework.platform import PLATFORM, Network, Wire
from levada.framework.testing.simulation import (
    Faults,
    NotLinear,
    Operation,
    SimulatedFiles,
    SimulationFailure,
    World,
    check_linear,
    simulate,
)


def run(scenario: Callable[[World], Any], **more: Any) -> World:
    """Run a scenario in one world, and return the world."""
    worlds: list[World] = []

    async def noted(world: World) -> None:
        worlds[:] = [world]
        await scenario(world)

    simulate(noted, seeds=[1], **more)
    return worlds[0]


async def connect(name: str) -> tuple[Wire, list[Any]]:
    network = PLATFORM.get().network
    assert network is not None
    wire, inbox = await network.connect("tcp", name, 1)
    return wire, inbox


class Peers:
    """Two processes: "a" on the machine A sends numbers to "b" on the machine B, which notes them with their times."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.heard: list[tuple[int, int]] = []
        """Numbers, with the whole seconds at which they came."""
        self.lost: list[tuple[str, str, int]] = []
        """Who learned of the end, how, and when."""

    async def begin(self) -> None:
        await self.world.start("b", self.receive, machine="B")
        await self.world.start("a", self.send, machine="A")

    async def receive(self) -> None:
        network = PLATFORM.get().network
        assert network is not None
        network.bind("tcp", "", 1, self.heard)
        await trio.sleep_forever()

    async def send(self) -> None:
        wire, _ = await connect("B")
        wire.on_lost = lambda side, why: self.lost.append(("ab"[side], why, round(trio.current_time())))
        for number in range(10):
            wire.post(0, self.arrive, number)
            await trio.sleep(1)
        await trio.sleep_forever()

    def arrive(self, number: int) -> None:
        self.heard.append((number, round(trio.current_time())))


def test_a_killed_process_ends_and_its_peer_learns_of_it_after_what_it_has_sent() -> None:
    async def scenario(world: World) -> None:
        peers = Peers(world)
        await peers.begin()
        await trio.sleep(2.5 - 0.0001)
        world["a"].kill()
        assert await world["a"].wait() == -9
        await trio.sleep(5)
        assert peers.heard == [(0, 0), (1, 1), (2, 2)]
        assert peers.lost == [
            ("a", "this process has ended", 2),
            ("b", "the process at the other end has ended", 3),
        ]

    run(scenario, machines=["A", "B"])


def test_what_a_paused_process_would_have_heard_arrives_in_order_after_the_pause() -> None:
    async def scenario(world: World) -> None:
        peers = Peers(world)
        await peers.begin()
        await trio.sleep(2.5)
        world["b"].pause(4.0)
        await trio.sleep(5)
        assert peers.heard == [(0, 0), (1, 1), (2, 2), (3, 6), (4, 6), (5, 6), (6, 6), (7, 7)]

    run(scenario, machines=["A", "B"])


def test_a_world_ends_while_a_cut_is_to_heal_and_a_thread_works() -> None:
    ends: list[float] = []

    async def wait() -> None:
        while True:
            await PLATFORM.get().run_in_thread(str)

    async def scenario(world: World) -> None:
        await world.start("a", wait)
        await trio.sleep(1)
        world.cut("A", "B", seconds=1e-9)
        ends.append(trio.current_time())

    for seed in range(3):
        simulate(scenario, seeds=[seed], machines=["A", "B"])
    assert ends == [pytest.approx(1.0)] * 3


@pytest.mark.parametrize("one_way", [True, False])
def test_a_cut_lasts_until_it_heals(one_way: bool) -> None:
    async def scenario(world: World) -> None:
        peers = Peers(world)
        await peers.begin()
        await trio.sleep(1.5)
        world.cut("A", "B", one_way=one_way)
        await trio.sleep(3)
        assert [number for number, _ in peers.heard] == [0, 1]
        world.heal("A", "B")
        await trio.sleep(0.1)
        assert [number for number, _ in peers.heard] == [0, 1, 2, 3, 4]

    run(scenario, machines=["A", "B"])


def test_a_cut_of_the_other_way_holds_nothing_up() -> None:
    async def scenario(world: World) -> None:
        peers = Peers(world)
        await peers.begin()
        world.cut("b", "a", one_way=True)
        await trio.sleep(3.5)
        assert peers.heard == []  # it could not connect
        world.heal("a", "b")
        await trio.sleep(0.5)
        world.cut("b", "a", one_way=True)
        await trio.sleep(2)
        assert [number for number, _ in peers.heard] == [0, 1, 2]

    run(scenario, machines=["A", "B"])


def test_a_power_failure_is_silent_until_the_machine_is_up_again() -> None:
    async def scenario(world: World) -> None:
        peers = Peers(world)
        await peers.begin()
        await trio.sleep(1.5)
        world["b"].power_failure(3.0)
        assert await world["b"].wait() == -9
        await trio.sleep(2)
        assert [who for who, _, _ in peers.lost] == ["b"]
        await trio.sleep(2)
        assert peers.lost[1][:2] == ("a", "the connection was reset by the peer")

    run(scenario, machines=["A", "B"])


def test_a_file_that_was_not_synced_is_gone_with_the_power_and_stays_after_a_kill() -> None:
    async def scenario(world: World) -> None:
        async def write() -> None:
            files = PLATFORM.get().files
            for name in ("/synced", "/not"):
                number = files.open(name, os.O_RDWR | os.O_CREAT)
                files.pwrite(number, b"text", 0)
                if name == "/synced":
                    files.fsync(number)
                    files.sync_folder("/")
            await trio.sleep_forever()

        async def read() -> None:
            files = PLATFORM.get().files
            found.append(files.read("/synced") + (b" and text" if files.exists("/not") else b""))

        found: list[bytes] = []
        await world.start("writer", write)
        await trio.sleep(1)
        world["writer"].kill()
        await (await world.start("reader", read)).wait()
        assert found == [b"text and text"]
        await world.start("again", write)
        await trio.sleep(1)
        world["again"].power_failure(1.0)
        await (await world.start("last", read)).wait()
        assert found[1].startswith(b"text")
        assert world.disk("last") is world.disk("machine")

    run(scenario)


def test_a_process_comes_back_after_its_end_unless_it_has_ended_well() -> None:
    lives: list[float] = []

    async def main() -> int:
        lives.append(round(trio.current_time(), 6))
        await trio.sleep(1)
        if len(lives) == 2:
            raise ValueError("the second life")
        if len(lives) == 1:
            await trio.sleep_forever()
        return 0

    async def scenario(world: World) -> None:
        await world.start("main", main, restart=2.0)
        await trio.sleep(5)
        world["main"].kill()
        await trio.sleep(20)
        assert world["main"].code == 0

    run(scenario)
    assert lives == [0.0, 7.0, 10.0]


@pytest.mark.parametrize(("restart", "count"), [(0.0, 1000), (1.0, 61), (30.0, 20)])
def test_a_process_that_fails_at_once_each_time_fails_the_world_with_its_last_error(restart: float, count: int) -> None:
    lives: list[None] = []

    async def main() -> None:
        lives.append(None)
        await trio.lowlevel.checkpoint()
        raise ValueError(f"no settings {len(lives)}")

    async def scenario(world: World) -> None:
        await world.start("main", main, restart=restart)
        await trio.sleep_forever()

    with pytest.raises(SimulationFailure) as error:
        simulate(scenario, seeds=[1])
    assert len(lives) == count
    assert f"main failed at once {count} times in " in str(error.value)
    assert f"the last time with ValueError('no settings {count}')" in str(error.value)


def test_a_process_may_fail_for_a_while_if_what_it_needs_is_not_there() -> None:
    lives: list[None] = []

    async def main() -> int:
        lives.append(None)
        if len(lives) % 20:
            return 1
        await trio.sleep(1.5)
        return 2 if len(lives) < 200 else 0

    async def scenario(world: World) -> None:
        await world.start("main", main, restart=1.0)
        await trio.sleep(300)
        assert world["main"].code == 0

    run(scenario)
    assert len(lives) == 200


def test_an_error_of_a_process_that_does_not_come_back_fails_the_world() -> None:
    async def main() -> None:
        await trio.sleep(1)
        raise ValueError("no such account")

    async def scenario(world: World) -> None:
        await world.start("main", main)
        await trio.sleep(10)

    with pytest.raises(SimulationFailure) as error:
        simulate(scenario, seeds=[5])
    assert isinstance(error.value.__cause__, ValueError)
    assert error.value.seed == 5
    assert "seeds=[5]" in str(error.value)
    assert "ValueError('no such account')" in str(error.value)
    assert error.value.events[0] == (0.0, "main: started on machine as process 101")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_a_scenario_that_hangs_fails_at_its_limit() -> None:
    async def scenario(world: World) -> None:
        await trio.sleep_forever()

    with pytest.raises(SimulationFailure, match="did not end within 60 s of virtual time"):
        simulate(scenario, seeds=[1], limit=60.0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_scenario_may_end_while_a_paused_process_waits_for_its_disk(fails: bool) -> None:
    async def work() -> None:
        async with ActorSystem() as system:
            system.spawn(Looking).tell(Next())
            await trio.sleep_forever()

    async def scenario(world: World) -> None:
        await world.start("a", work)
        await trio.sleep(1)
        world["a"].pause(60)
        await trio.sleep(1)
        assert not fails

    if fails:
        with pytest.raises(SimulationFailure, match="AssertionError") as error:
            simulate(scenario, seeds=[1])
        assert error.value.events[-1][0] < 60
    else:
        assert simulate(scenario, seeds=[1]).seconds < 60


def test_a_world_in_which_nothing_will_happen_any_more_fails_and_names_its_processes() -> None:
    async def wait() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()

    async def scenario(world: World) -> None:
        await world.start("a", wait)
        await trio.sleep(1)

    with pytest.raises(SimulationFailure, match=r"every task waits, and no time-out will wake one.* not ended: a"):
        simulate(scenario, seeds=[1])


def test_each_process_has_a_clock_of_its_own_that_jumps() -> None:
    async def scenario(world: World) -> None:
        times: dict[str, float] = {}

        def main(name: str) -> Callable[[], Any]:
            async def sleep() -> None:
                await trio.sleep(2)
                times[name] = PLATFORM.get().time()

            return sleep

        await world.start("a", main("a"))
        await world.start("b", main("b"))
        world["b"].clock(+3600)
        await trio.sleep(5)
        assert times["b"] - times["a"] == 3600

    run(scenario)


def test_an_app_runs_in_a_system_until_sigterm() -> None:
    events = []

    async def app(system: ActorSystem) -> AsyncIterator[None]:
        events.append(system.name)
        yield
        events.append("ended")

    async def scenario(world: World) -> None:
        process = await world.start("shop", app)
        await trio.sleep(1)
        process.terminate()
        assert await process.wait() == 0

    run(scenario)
    assert events == ["shop", "ended"]


def test_names_that_are_wrong_are_refused() -> None:
    async def scenario(world: World) -> None:
        await world.start("a", trio.sleep_forever)
        with pytest.raises(ConfigurationError, match="there is a process 'a' already"):
            await world.start("a", trio.sleep_forever)
        with pytest.raises(ConfigurationError, match="there is no machine 'M'; there are: machine"):
            await world.start("b", trio.sleep_forever, machine="M")
        with pytest.raises(KeyError, match="there is no process 'c'; there are: a"):
            world["c"]
        with pytest.raises(KeyError, match="there is no process 'c'; there are: a"):
            world.cut("a", "c")
        with pytest.raises(KeyError, match="there is no process 'c'; there are: a"):
            world.heal("c", "machine")

    run(scenario)


async def idle(world: World) -> None:
    await world.start("a", trio.sleep_forever)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seeds": []}, "no seeds, so nothing was tried"),
        ({"machines": ()}, r"machines is \(\), wanted a list of at least one name, each once"),
        ({"machines": "ab"}, "machines is 'ab', wanted a list of at least one name, each once"),
        ({"machines": ["a", "A"]}, r"machines is \['a', 'A'\], wanted a list of at least one name"),
        ({"machines": ["a", "b", "a"]}, r"machines is \['a', 'b', 'a'\], wanted a list of at least one name"),
    ],
)
def test_nothing_is_simulated_without_seeds_and_machines(more: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(idle, **more)


async def test_a_simulation_cannot_be_made_in_a_run_of_trio() -> None:
    with pytest.raises(RuntimeError, match="cannot be called inside of one"):
        simulate(idle)


def test_two_threads_cannot_simulate_at_once() -> None:
    refused: list[RuntimeError] = []

    def simulate_too() -> None:
        with pytest.raises(RuntimeError, match="one world at a time") as raised:
            simulate(idle)
        refused.append(raised.value)

    async def scenario(world: World) -> None:
        thread = threading.Thread(target=simulate_too)
        thread.start()
        thread.join()

    run(scenario)
    assert len(refused) == 1
    assert run(idle).events  # the next one may


def test_a_world_that_imports_another_module_in_each_run_is_refused() -> None:
    numbers = itertools.count()
    made: list[str] = []

    async def scenario(world: World) -> None:
        made.append(f"imported_in_run_{next(numbers)}")
        sys.modules[made[-1]] = ModuleType(made[-1])

    try:
        with pytest.raises(RuntimeError, match=r"seed 1 imports a module in each run, at last imported_in_run_9,"):
            run(scenario)
    finally:
        for name in made:
            del sys.modules[name]


@pytest.mark.parametrize("seconds", [-1.0, nan, inf])
@pytest.mark.parametrize(
    "strike",
    [
        lambda world, seconds: world["a"].pause(seconds),
        lambda world, seconds: world["a"].power_failure(seconds),
        lambda world, seconds: world.cut("a", "machine", seconds=seconds),
    ],
)
def test_what_lasts_no_time_or_for_ever_is_refused(strike: Callable[[World, float], None], seconds: float) -> None:
    async def scenario(world: World) -> None:
        await idle(world)
        strike(world, seconds)

    with pytest.raises(SimulationFailure) as failure:
        run(scenario)
    assert isinstance(failure.value.__cause__, ConfigurationError)
    assert str(failure.value.__cause__) == f"{seconds!r} seconds; wanted 0 or more"


@pytest.mark.parametrize(
    "more",
    [
        {"aims": "Buy"},
        {"only": "n0"},
        {"aims": {Faults}},
        {"lengths": ()},
        {"lengths": (-1.0,)},
        {"latency": (0.5, 0.1)},
        {"latency": (-1.0, 1.0)},
        {"every": inf},
        {"kills": inf},
        {"disk": "laks"},
    ],
)
def test_faults_that_cannot_be_are_refused(more: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(more))):
        Faults(**more)


@pytest.mark.parametrize("code", [None, 0, 3, "no room"])
def test_a_process_that_exits_has_the_exit_code_that_it_would_have(code: object) -> None:
    codes: list[int] = []

    async def main() -> None:
        await trio.sleep(1.0)
        sys.exit(code)  # type: ignore[arg-type]

    async def scenario(world: World) -> None:
        codes.append(await (await world.start("a", main)).wait())

    run(scenario)
    assert codes == [{None: 0, "no room": 1}.get(code, code)]  # type: ignore[call-overload]


@pytest.mark.parametrize("is_process", [False, True])
def test_an_outcome_of_pytest_fails_the_world_and_names_its_seed(is_process: bool) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="never"):
            await trio.sleep(1.0)

    async def scenario(world: World) -> None:
        await world.start("a", main if is_process else trio.sleep_forever, restart=1.0)
        if is_process:
            await trio.sleep(5.0)
        await main()

    with pytest.raises(SimulationFailure) as failure:
        run(scenario)
    assert failure.value.seed == 1
    assert isinstance(failure.value.__cause__, pytest.fail.Exception)


def test_ctrl_c_is_no_failure_of_a_world() -> None:
    async def scenario(world: World) -> None:
        await idle(world)
        raise KeyboardInterrupt

    with pytest.raises(BaseExceptionGroup) as raised:
        run(scenario)
    assert raised.group_contains(KeyboardInterrupt)


def test_the_story_of_a_world_does_not_end_with_what_its_end_has_ended() -> None:
    async def child(_: object) -> int:
        await trio.sleep_forever()

    async def parent() -> None:
        launch = PLATFORM.get().launch
        assert launch is not None
        launched = launch("child", child)
        try:
            await trio.sleep_forever()
        finally:
            launched.kill()

    async def scenario(world: World) -> None:
        await world.start("parent", parent)
        await trio.sleep(1.0)
        raise AssertionError("the cause")

    with pytest.raises(SimulationFailure) as failure:
        run(scenario)
    assert [text for _, text in failure.value.events] == [
        "parent: started on machine as process 101",
        "child: started on machine as process 102",
    ]


# Datagrams.


class Posts:
    """Two processes: "a" on the machine A sends numbered datagrams to "b" on the machine B, which notes them."""

    def __init__(self, world: World, count: int = 10, every: float = 1.0) -> None:
        self.world = world
        self.count = count
        self.every = every
        self.heard: list[tuple[int, int]] = []
        """Numbers, with the whole seconds at which they came."""
        self.answered: list[int] = []

    async def begin(self) -> None:
        await self.world.start("b", self.receive, machine="B")
        await trio.lowlevel.checkpoint()  # it has bound its address
        await self.world.start("a", self.send, machine="A")

    async def receive(self) -> None:
        network = PLATFORM.get().network
        assert network is not None
        socket = network.datagrams("", 1)
        while True:
            for data, address in await socket.receive():
                self.heard.append((int(data), round(trio.current_time())))
                assert address == ("A", 49152)
                socket.send([(data, address)])

    async def send(self) -> None:
        network = PLATFORM.get().network
        assert network is not None
        socket = network.datagrams("0.0.0.0", 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.take, socket)
            for number in range(self.count):
                assert socket.send([(b"%d" % number, (network.resolve("B"), 1))]) == 1
                if self.every:
                    await trio.sleep(self.every)

    async def take(self, socket: Any) -> None:
        while True:
            for data, address in await socket.receive():
                assert address == ("B", 1)
                self.answered.append(int(data))


def post(scenario: Callable[[World], Any], **more: Any) -> World:
    return run(scenario, machines=["A", "B"], **more)


def test_datagrams_overtake_each_other_and_are_answered() -> None:
    async def scenario(world: World) -> None:
        posts = Posts(world, 100, 0)
        await posts.begin()
        await trio.sleep(1)
        numbers = [number for number, _ in posts.heard]
        assert numbers != sorted(numbers) == list(range(100)) == sorted(posts.answered)

    post(scenario)


@pytest.mark.ci
def test_a_share_of_datagrams_is_lost_in_some_worlds() -> None:
    arrived: list[int] = []

    async def scenario(world: World) -> None:
        posts = Posts(world, 500, 0)
        await posts.begin()
        await trio.sleep(1)
        arrived.append(len(posts.heard))

    simulate(scenario, seeds=range(20), machines=["A", "B"], faults=Faults(strikes=0, loss=0.2))
    assert 5 <= arrived.count(500) <= 15
    assert min(arrived) > 350


def test_a_cut_loses_datagrams_and_a_pause_holds_them() -> None:
    async def scenario(world: World) -> None:
        posts = Posts(world)
        await posts.begin()
        await trio.sleep(1.5)
        world.cut("A", "B", one_way=True, seconds=2)
        await trio.sleep(2)
        world["b"].pause(2)
        await trio.sleep(3)
        world.cut("B", "A", one_way=True)
        await trio.sleep(10)
        assert posts.heard == [(0, 0), (1, 1), (4, 6), (5, 6), *((n, n) for n in range(6, 10))]
        assert sorted(posts.answered) == [0, 1, 4, 5, 6]

    post(scenario)


def test_a_cut_of_udp_lets_everything_else_pass() -> None:
    async def scenario(world: World, peers: Peers | Posts, lost: set[int]) -> None:
        await peers.begin()
        await trio.sleep(1.5)
        world.cut("A", "B", only_udp=True, seconds=2)
        await trio.sleep(10)
        assert peers.heard == [(n, n) for n in range(10) if n not in lost]

    post(lambda world: scenario(world, Posts(world), {2, 3}))
    post(lambda world: scenario(world, Peers(world), set()))


def test_a_cut_heals_itself_and_no_other() -> None:
    async def scenario(world: World) -> None:
        posts = Posts(world)
        await posts.begin()
        await trio.sleep(1.5)
        world.cut("A", "B", one_way=True, seconds=2)
        world.cut("A", "B", only_udp=True, seconds=4)
        world.cut("A", "B", one_way=True, seconds=3)
        await trio.sleep(10)
        assert [number for number, _ in posts.heard] == [0, 1, 6, 7, 8, 9]

    post(scenario)


def test_a_datagram_to_a_dead_process_or_larger_than_the_network_takes_is_lost() -> None:
    async def scenario(world: World) -> None:
        async def main() -> None:
            network = PLATFORM.get().network
            assert network is not None
            with pytest.raises(OSError, match="no machine has the name 'C'"):
                network.resolve("C")
            socket = network.datagrams("localhost", 5)
            with pytest.raises(OSError, match="in use"):
                network.datagrams("127.0.0.1", 5)
            socket.send([(b"5", ("B", 1)), (b"6".zfill(1472), ("B", 1)), (b"7".zfill(1473), ("B", 1))])
            socket.send([(bytes(size), ("127.0.0.1", 5)) for size in (65_507, 65_508)])
            await trio.sleep(0.5)
            assert [(len(data), address) for data, address in await socket.receive()] == [(65_507, ("127.0.0.1", 5))]
            socket.close()
            assert socket.send([(b"8", ("B", 1))]) == 1
            with pytest.raises(trio.ClosedResourceError):
                await socket.receive()
            network.datagrams("localhost", 5).close()

        async def receive() -> None:
            network = PLATFORM.get().network
            assert network is not None
            socket = network.datagrams("B", 1)
            while True:
                heard.extend(int(data) for data, _ in await socket.receive())

        heard: list[int] = []
        await world.start("b", receive, machine="B")
        await trio.sleep(1)
        assert await (await world.start("a", main, machine="A")).wait() == 0
        assert sorted(heard) == [5, 6]

    post(scenario)


# Shared addresses.


def test_processes_share_an_address_that_is_held_until_it_is_shared_no_more() -> None:
    answered: list[str] = []

    async def scenario(world: World) -> None:
        async def node(exit: Any) -> int:
            network = PLATFORM.get().network
            assert network is not None
            inbox: list[Any] = []
            ports.append([network.bind("tcp", "", port, inbox) for port in (80, 0, 0)])
            inbox.append(PLATFORM.get().pid())
            socket = network.datagrams("", 53)
            while True:
                for data, address in await socket.receive():
                    socket.send([(b"%d" % PLATFORM.get().pid(), address)])
                    answered.append(data.decode())

        async def driver() -> None:
            network, launch = PLATFORM.get().network, PLATFORM.get().launch
            assert network is not None
            assert launch is not None
            shares = network.share()
            first, second = (launch(name, node, shares=shares) for name in ("n0", "n1"))
            await trio.sleep(2)
            assert ports == [[80, 49152, 49153]] * 2
            with pytest.raises(OSError, match="in use"):
                network.bind("tcp", "", 80, None)
            reached = {(await network.connect("tcp", "localhost", 80))[1][0] for _ in range(20)}
            assert len(reached) == 2
            assert len({await ask(network) for _ in range(5)}) == 1  # one reads datagrams, until it ends
            first.kill()
            assert len({(await network.connect("tcp", "localhost", 80))[1][0] for _ in range(20)} & reached) == 1
            assert await ask(network) in {b"%d" % pid for pid in reached}
            second.kill()
            with trio.move_on_after(5) as scope:
                await network.connect("tcp", "localhost", 80)
            assert scope.cancelled_caught  # it waits for a process to listen
            with pytest.raises(OSError, match="in use"):
                network.bind("tcp", "", 80, None)
            third = launch("n2", node, shares=shares)
            (_, (pid,)) = await network.connect("tcp", "localhost", 80)
            assert pid not in reached
            assert ports[-1] == [80, 49152, 49153]
            shares.close()
            await network.connect("tcp", "localhost", 80)
            third.kill()
            with pytest.raises(OSError, match="refused"):
                await network.connect("tcp", "localhost", 80)
            assert network.bind("tcp", "", 80, None) == 80
            assert await launch("n3", late, shares=shares).wait() == 0

        async def late(exit: Any) -> int:
            network = PLATFORM.get().network
            assert network is not None
            with pytest.raises(OSError, match="the server is ending"):
                network.bind("tcp", "", 81, None)
            return 0

        async def ask(network: Network) -> bytes:
            socket = network.datagrams("localhost", 0)
            socket.send([(b"who", ("127.0.0.1", 53))])
            ((pid, _),) = await socket.receive()
            socket.close()
            return bytes(pid)

        ports: list[list[int]] = []
        assert await (await world.start("driver", driver)).wait() == 0

    run(scenario)
    assert answered == ["who"] * 6


@message("simulated.next")
class Next(Asks[int]):
    """Ask for the next number."""


class Numbers(Actor[Next]):
    """Gives random numbers."""

    @handles
    def next(self, m: Next) -> int:
        return self.system.random.randrange(1 << 30)


class Looking(Actor[Next]):
    """Looks at its disk for ever."""

    @handles
    async def next(self, m: Next) -> int:
        while True:
            await PLATFORM.get().run_in_thread(os.getpid)


def test_a_seed_decides_ids_and_order_and_another_seed_decides_otherwise() -> None:
    async def scenario(world: World) -> None:
        async def main() -> None:
            async with ActorSystem() as system:
                numbers = system.spawn(Numbers)
                for _ in range(3):
                    found.append(await numbers.ask(Next()))
                found.append(PLATFORM.get().token_bytes(8))

        await (await world.start("main", main)).wait()

    results = []
    for seed in (1, 1, 2):
        found: list[Any] = []
        simulate(scenario, seeds=[seed])
        results.append(found)
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_faults_strike_only_what_comes_back() -> None:
    async def scenario(world: World) -> None:
        await world.start("stays", trio.sleep_forever)
        await world.start("comes back", trio.sleep_forever, restart=1.0)
        await trio.sleep(60)
        assert not world["stays"].dead
        kills.append(sum("comes back: killed" in text for _, text in world.events))

    kills: list[int] = []
    result = simulate(scenario, seeds=range(20), faults=Faults(strikes=10))
    assert sum(kills) > 10
    assert result.strikes > 50


ONLY_DISKS = Faults(
    strikes=10,
    every=0.3,
    kills=0,
    crashes=0,
    pauses=0,
    cuts=0,
    zombies=0,
    power_failures=0,
    clock_jumps=0,
    disk_errors=3,
)


class Scribe:
    """A process that writes some pages into a new file every 0.1 s, and notes what the disk did."""

    def __init__(self) -> None:
        self.found = set[str]()
        """Names of errors; "short" writes, "slow" syncs."""
        self.last = ""
        """What came of the last file; empty: it was written."""

    async def main(self) -> None:
        for pages in range(2, 102):
            started = trio.current_time()
            try:
                self.last = await PLATFORM.get().run_in_thread(self.write, 4096 * pages)
            except OSError as error:
                self.last = errno.errorcode[error.errno or 0]
            if trio.current_time() > started + 0.03:
                self.last = "slow"
            self.found.add(self.last)
            await trio.sleep(0.1)

    @staticmethod
    def write(size: int) -> str:
        files = PLATFORM.get().files
        files.discard("/page")
        with files.opened("/page", os.O_RDWR | os.O_CREAT) as descriptor:
            first = done = files.pwrite(descriptor, bytes(size), 0)
            while done < size:
                done += files.pwrite(descriptor, bytes(size - done), done)
            files.fsync(descriptor)
        return "short" if first < size else ""


@pytest.mark.ci
def test_disks_refuse_calls_are_full_and_are_slow_and_recover() -> None:
    async def scenario(world: World) -> None:
        scribe = Scribe()
        await (await world.start("scribe", scribe.main, restart=1.0)).wait()
        await trio.sleep(8)
        await (await world.start("another scribe", scribe.main)).wait()
        assert scribe.last == ""
        found.update(scribe.found)

    found = set[str]()
    assert simulate(scenario, seeds=range(16), faults=ONLY_DISKS).strikes > 50
    assert found == {"", "EIO", "EMFILE", "ENOSPC", "short", "slow"}


def test_what_strikes_the_processes_of_a_machine_does_not_strike_who_reads_its_disk() -> None:
    async def scenario(world: World) -> None:
        scribe = Scribe()
        process = await world.start("scribe", scribe.main, restart=1.0)
        files = SimulatedFiles(world.disk("scribe"))
        while process.code is None:
            reads.append([len(files.read(path)) % 4096 for path in files.glob("/", "page")])
            await trio.sleep(0.05)
        found.update(scribe.found)

    reads: list[list[int]] = []
    found = set[str]()
    simulate(scenario, seeds=range(8), faults=ONLY_DISKS)
    assert found >= {"EIO", "EMFILE"}
    assert [0] in reads


@pytest.mark.ci
def test_a_disk_is_only_slow_if_a_process_on_it_does_not_come_back() -> None:
    async def scenario(world: World) -> None:
        scribe = Scribe()
        await (await world.start("scribe", scribe.main)).wait()
        found.update(scribe.found)

    found = set[str]()
    simulate(scenario, seeds=range(10), faults=ONLY_DISKS)
    assert found == {"", "slow"}


@pytest.mark.ci
def test_an_aim_at_a_kind_of_disk_call_strikes_before_it_and_between_it_and_what_follows() -> None:
    async def scenario(world: World) -> None:
        async def main() -> None:
            files = PLATFORM.get().files
            number = files.open("/numbers", os.O_RDWR | os.O_CREAT)
            end, synced = len(files.pread(number, 100, 0)), len(world.disk("main").find("/numbers").durable)
            if end - 1 not in answered:
                outcomes.add("synced, not answered" if synced == end else "not synced")
            for at in range(end, 20):
                files.pwrite(number, b"x", at)
                try:
                    files.fsync(number)
                except OSError:
                    outcomes.add("refused")
                answered.add(at)
                await trio.sleep(0.1)
            done.set()

        answered, done = {-1}, trio.Event()
        await world.start("main", main, restart=0.5)
        await done.wait()

    outcomes = set[str]()
    simulate(scenario, seeds=range(30), faults=Faults(strikes=5, every=1e6, aims={"fsync"}))
    assert outcomes == {"synced, not answered", "not synced", "refused"}


def test_what_a_dead_process_logs_goes_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        async def main() -> None:
            try:
                await trio.sleep_forever()
            finally:
                logging.getLogger("a program").error("one ends")

        one = await world.start("one", main)
        other = await world.start("other", trio.sleep_forever)
        await trio.sleep(1)
        one.kill()
        await one.gone.wait()
        logging.getLogger("a program").error("%s is alive", other.name)

    run(scenario)
    assert caplog.messages == ["other is alive"]


# Histories.


def add(total: int, amount: int) -> tuple[int, int]:
    return total + amount, total + amount


def test_answers_in_the_order_of_real_time_are_linear() -> None:
    check_linear([Operation("a", 1, 0, 1, 1), Operation("a", 2, 2, 3, 3), Operation("b", 5, 0, 9, 5)], add, 0)


def test_operations_at_the_same_time_may_be_in_any_order() -> None:
    check_linear([Operation("a", 1, 0, 2, 3), Operation("a", 2, 1, 3, 2)], add, 0)


def test_an_answer_that_misses_an_earlier_operation_is_not_linear() -> None:
    with pytest.raises(NotLinear, match="at most 1 of 2 fit"):
        check_linear([Operation("a", 1, 0, 1, 1), Operation("a", 2, 2, 3, 2)], add, 0)


def test_an_operation_without_an_answer_may_have_happened_late_or_never() -> None:
    unknown = Operation("a", 10, 0, inf)
    check_linear([unknown, Operation("a", 1, 1, 2, 1), Operation("a", 1, 3, 4, 12)], add, 0)
    check_linear([unknown, Operation("a", 1, 1, 2, 1), Operation("a", 1, 3, 4, 2)], add, 0)
    with pytest.raises(NotLinear):
        check_linear([unknown, Operation("a", 1, 1, 2, 11), Operation("a", 1, 3, 4, 2)], add, 0)


def test_many_operations_without_an_answer_are_tried_when_nothing_else_fits() -> None:
    """In their own orders there are more than 10 to the power of 18 of twenty."""
    tried = 0

    def append(done: tuple[int, ...], number: int) -> tuple[tuple[int, ...], int]:
        nonlocal tried
        tried += 1
        assert tried < 2000
        return (*done, number), len(done) + 1

    unknown = [Operation("a", number, 1 + number / 20, inf) for number in range(20)]
    places = [*range(2, 11), *range(13, 21)]  # two of the others are between
    known = [
        Operation("a", 101, 0, 2, 1),
        *(Operation("a", 100 + place, place, place + 0.5, place) for place in places),
    ]
    check_linear([*unknown, *known], append, ())
    assert tried > len(known)


def test_a_command_that_is_repeated_after_a_restart_is_one_operation() -> None:
    """Its answer is older than what others were answered meanwhile; as two operations that would be a false alarm."""

    async def scenario(world: World) -> None:
        sold, answers = 0, dict[str, int]()
        tickets: dict[str, Operation] = {}

        def sell(order: str) -> int:
            nonlocal sold
            if order not in answers:
                sold += 1
                answers[order] = sold
            return answers[order]

        async def client() -> None:
            operation = tickets.get("mine") or tickets.setdefault("mine", world.history.ask("show", 1))
            answer = sell("mine")
            await trio.sleep(5.0)  # the answer is under way
            world.history.answer(operation, answer)

        async def sell_another(_: int) -> int:
            return sell("another")

        process = await world.start("client", client, restart=1.0)
        await trio.sleep(1.0)
        process.kill()
        await world.history.call("show", 1, sell_another)
        await trio.sleep(10.0)
        assert [(each.answer, each.answered) for each in world.history.operations] == [(1, 7.0), (2, 1.0)]
        check_linear(world.history, lambda total, count: (total + count, total + count), 0)

    run(scenario)


def test_long_histories_of_few_clients_are_checked_fast() -> None:
    rng = random.Random(1)
    operations, total, now = [], 0, 0.0
    for _ in range(500):
        parts = [rng.randrange(1, 5) for _ in range(4)]
        for amount in parts:
            total += amount
            operations.append(Operation("a", amount, now, now + 1, total))
        now += 2
    check_linear(operations, add, 0)
    operations[-1].answer += 1
    with pytest.raises(NotLinear, match="at most 1999 of 2000 fit"):
        check_linear(operations, add, 0)
