"""An app with a singleton, durable accounts and names, in one fleet whose nodes are struck while actors move; and the oracle of it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import attrs
import trio
from tests.simulation.bank import SETTINGS, Account, Add, Added, Look, Reminded

from levada.actors.durable import ReplayFailed, shards
from levada.actors.nodes import MemberState, NodeLost, Nodes, local_nodes, nodes_of, singleton
from levada.framework import Actor, ActorSystem, Asks, handles, message, restart
from levada.framework.errors import ActorStopped, AskTimeout, ConfigurationError, LevadaError, MailboxFull, NameUnknown
from levada.framework.testing.simulation import Faults, World

__all__ = ["FAULTS", "OneApp", "app", "scenario"]

FAULTS: Final = Faults(
    strikes=10,
    every=0.5,
    zombies=0.0,  # one that the operating system takes for dead has no actors
    aims={"Close", "Command", "Finish", "Imported", "Join", "Open", "Settle", "Spawn"},
)
"""Strikes at random times; in half of the worlds, also at starts and moves."""
_ALWAYS: Final = restart("permanent", max=1000)
_ITEMS: Final = 12
"""Questions of each client to each of the three."""


@message("simulation.one_app.Handle", frozen=True)
class Handle(Asks[str]):
    """Handle an id once; the answer is the id."""

    id: str


class House(Actor[Handle]):
    """Notes that it runs, and what it handles."""

    kind: str

    def started(self) -> None:
        """Begin; another one that lives is a failure of the world."""
        WORLDS[-1].begins(self.kind, self.system.platform.pid())

    def stopping(self, reason: Any) -> None:
        """End."""
        WORLDS[-1].running[self.kind].discard(self.system.platform.pid())

    def restarting(self, error: BaseException | None, message: Any) -> None:
        """End, to begin again."""
        WORLDS[-1].running[self.kind].discard(self.system.platform.pid())

    @handles
    async def handle(self, m: Handle) -> str:
        """Handle an id."""
        WORLDS[-1].handled.append(m.id)
        await trio.sleep(WORLDS[-1].slow)
        return m.id


class Lamp(Actor[Handle]):
    """An actor of one node, with a name of the fleet."""

    @handles
    def handle(self, m: Handle) -> str:
        """Handle an id."""
        return m.id


class Client(Actor[Any]):
    """Asks the singleton, the accounts and the named actor from its node."""

    house: Any
    accounts: Any
    todo: Any

    def started(self) -> None:
        """Begin."""
        world = WORLDS[-1]
        for work in (world.ask_house, world.ask_account, world.ask_named):
            self.start_soon(world.work, work, self)


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Use the fleet before and after the ``yield``."""
    world = WORLDS[-1]
    house = await singleton(system, House, "house")
    accounts = await shards(
        system, Account, events=Added | Reminded, journal="/accounts", shards=4, keeper=world.keeper
    )
    lamp = system.spawn(Lamp)
    await nodes_of(system).register(f"lamp {system.name}", lamp)
    system.spawn(Client, house, accounts, world.todo[system.name])
    yield


class OneApp:
    """The driver of the app in one world, and what all its processes have done. The seed decides how it is set up."""

    def __init__(self, world: World) -> None:
        self._world = world
        rng = random.Random(f"one app {world.seed}")
        self.keeper = rng.random() < 0.3
        self.slow = rng.choice((0.0, 0.01, 0.2))
        self._nodes = rng.choice((2, 3))
        self._rng = rng
        self.todo = {
            f"n{node}": {
                kind: deque(f"{kind}.n{node}.{n}" for n in range(_ITEMS)) for kind in ("house", "account", "named")
            }
            for node in range(self._nodes)
        }
        self.running: dict[str, set[int]] = {"house": set(), "named": set()}
        self.handled: list[str] = []
        self.answered: list[str] = []
        self.begun = 0
        self.done = False
        self.wrong: list[str] = []
        """What must not be."""

    def begins(self, kind: str, pid: int) -> None:
        """Note that a house begins; a process that was killed has none any more."""
        living = {each.pid for each in self._world.processes if not each.dead}
        others = self.running[kind] & living
        if others:
            self.wrong.append(f"{kind} runs in the processes {sorted(others)} and {pid}")
        self.running[kind] = others | {pid}
        self.begun += 1

    async def run(self) -> None:
        """Run it until all is done."""
        while not self.done:
            await (await self._world.start("driver", self._live)).wait()
            assert self.wrong == [], self.wrong

    async def _live(self) -> None:
        try:
            await self._drive()
        except* NodeLost:
            pass  # a node was struck before it was ever up, so the fleet did not start

    async def _drive(self) -> None:
        settings = attrs.evolve(SETTINGS, start_timeout=60.0)
        async with (
            ActorSystem("driver", ask_timeout=30.0) as system,
            local_nodes(system, self._nodes, app, settings=settings) as nodes,
        ):
            while "named" not in system.registry:
                try:
                    await nodes.spawn(House, "named", name="named", supervise=_ALWAYS)
                except LevadaError:
                    await trio.sleep(0.1)  # no node is up, or its node was struck
            house = await singleton(system, House, "house")
            accounts = await shards(
                system, Account, events=Added | Reminded, journal="/accounts", shards=4, keeper=self.keeper, nodes=nodes
            )
            for _ in range(self._rng.choice((0, 1, 3))):
                await trio.sleep(self._rng.uniform(0.0, 2.0))
                try:
                    await nodes.restart(f"n{self._rng.randrange(self._nodes)}")
                except LevadaError:
                    pass  # it was struck
            while any(each for todo in self.todo.values() for each in todo.values()):
                assert self.wrong == [], self.wrong
                await self._start_again(nodes)
            self._world.strikes.stop()
            while any(member.state is not MemberState.UP for member in nodes.members):
                await self._start_again(nodes)
            await self._check(house, await nodes.lookup("named"), accounts)
            self.done = True

    async def _start_again(self, nodes: Nodes) -> None:
        """Start the nodes that were struck in a restart, before they were up: these stay down."""
        await trio.sleep(1.5)
        for member in nodes.members:
            if member.state is MemberState.DOWN and nodes.is_for_any(member.name):
                try:
                    await nodes.restart(member.name)
                except LevadaError:
                    pass  # struck again

    async def _check(self, house: Any, named: Any, accounts: Any) -> None:
        for ref in (house, named):
            assert ref.is_alive
            assert await _asked(ref, Handle("last")) == "last"
        handled = [id for id in self.handled if id != "last"]
        assert len(handled) == len({*handled}), "an id was handled twice"
        assert {id for id in self.answered if not id.startswith("account")} <= {*handled}
        for node in self.todo:
            ids, _ = await _asked(accounts[node], Look())
            assert sorted(ids) == sorted(f"account.{node}.{n}" for n in range(_ITEMS))

    async def work(self, ask: Any, client: Client) -> None:
        """Ask until nothing is left to do. The next life of the node goes on."""
        rng = random.Random(f"{self._world.seed} {client.system.name} {client.system.platform.pid()} {ask.__name__}")
        try:
            while await ask(client, rng):  # noqa: ASYNC110
                await trio.sleep(rng.choice((0.0, 0.05, 0.5)))
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")  # the driver fails the world
            raise

    async def ask_house(self, client: Client, rng: random.Random) -> bool:
        """Ask the singleton one question, once."""
        return await self._ask_once(client.house, client.todo["house"], rng)

    async def ask_named(self, client: Client, rng: random.Random) -> bool:
        """Ask the actor with a kept name one question, once; and the actor of another node, whose name may be free."""
        nodes = nodes_of(client.system)
        try:
            lamp = await nodes.lookup(f"lamp n{rng.randrange(self._nodes)}", timeout=0.1)
            assert await lamp.ask(Handle("light"), timeout=5.0) == "light"
        except (NameUnknown, ActorStopped, AskTimeout):
            pass
        try:
            named = await nodes.lookup("named", timeout=5.0)
        except NameUnknown:
            return True  # the driver has not started it yet
        return await self._ask_once(named, client.todo["named"], rng)

    async def _ask_once(self, ref: Any, todo: deque[str], rng: random.Random) -> bool:
        if todo:
            id = todo.popleft()
            try:
                assert await ref.ask(Handle(id), timeout=rng.choice((0.5, 10.0))) == id
            except (ActorStopped, AskTimeout, MailboxFull) as error:
                # Each failure says whom it was about, and why.
                if "/" not in str(error) or (isinstance(error, ActorStopped) and error.reason is None):
                    self.wrong.append(f"no cause in {error!r}")
            else:
                self.answered.append(id)
        return bool(todo)

    async def ask_account(self, client: Client, rng: random.Random) -> bool:
        """Give an account one command, until it is answered."""
        todo = client.todo["account"]
        if todo:
            try:
                await client.accounts[client.system.name].ask(
                    Add(todo[0]), command=todo[0], timeout=rng.choice((0.5, 5.0))
                )
            except (ReplayFailed, ConfigurationError):
                raise
            except LevadaError:
                await trio.sleep(rng.choice((0.01, 0.2, 1.0)))
            else:
                self.answered.append(todo.popleft())
        return bool(todo)


async def _asked(ref: Any, question: Any) -> Any:
    """Ask until there is an answer: a node that was cut off before the last strike may end later."""
    while True:
        try:
            return await ref.ask(question, timeout=30.0)
        except LevadaError:
            await trio.sleep(0.5)


WORLDS: Final[list[OneApp]] = [OneApp.__new__(OneApp)]
"""The app of the present world, for the actors on its nodes."""


async def scenario(world: World) -> None:
    """Run an app."""
    WORLDS[-1] = OneApp(world)
    await WORLDS[-1].run()
