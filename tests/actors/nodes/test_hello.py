"""Nodes that say the wrong thing, or nothing, and blocks that are cancelled at every point."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from levada.actors.aqueduct import Peer, PeerConfig, connect_over
from levada.actors.nodes import MemberState, NodeLost, NodeSettings
from levada.actors.nodes.messages import AppFailed, Hello, Imported, NodeRefused, Ready, Welcome
from levada.actors.nodes.node import control_schema
from levada.actors.nodes.node_side import run_node
from levada.framework import Actor, ActorSystem, OneshotReceiver, OneshotSender, Ref, oneshot, restart
from levada.framework.errors import ActorStopped

from .apps import Add, Counter, app
from .conftest import SETTINGS, Task, nodes_here


class Idle(Actor[Any]):
    """Does nothing."""


async def say_hello(peer: Peer[Hello], control: Ref[Any], **changes: Any) -> Any:
    """Send a hello; return the answer."""
    answer: OneshotSender[Welcome | NodeRefused]
    answered: OneshotReceiver[Welcome | NodeRefused]
    answer, answered = oneshot(Welcome | NodeRefused)
    hello = Hello(
        node_id=b"x" * 16, pid=1, host="here", python="3", version="0", schema=control_schema(), control=control, answer=answer
    )  # fmt: skip
    with answer, answered:
        await peer.send(attrs.evolve(hello, **changes))  # type: ignore[misc]  # a message class is an attrs class
        return await answered


async def never_says_hello(opens: Any, *, name: str, end: trio.Event) -> None:
    """Connect and say nothing."""
    async with ActorSystem(name) as system, connect_over(system, opens, Hello):
        await trio.sleep_forever()


async def says_it_twice(opens: Any, *, name: str, end: trio.Event) -> None:
    """Say hello twice; report the second answer as the reason of a failure."""
    async with ActorSystem(name) as system, connect_over(system, opens, Hello) as peer:
        control = system.spawn(Idle)
        welcome = await say_hello(peer, control)
        refused = await say_hello(peer, control)
        await welcome.node.send(AppFailed(refused.text, ""))
        await trio.sleep_forever()


async def has_other_messages(opens: Any, *, name: str, end: trio.Event) -> None:
    """Say hello with other message classes."""
    async with ActorSystem(name) as system, connect_over(system, opens, Hello) as peer:
        await say_hello(peer, system.spawn(Idle), schema="0" * 8, version="0.0.1")


def has_classes(
    classes: Callable[[str], dict[str, list[tuple[str, str, bool]]]],
) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return the body of a node that is ready, with versions of message classes that depend on its name."""

    async def ready(opens: Any, *, name: str, end: trio.Event) -> None:
        async with ActorSystem(name) as system, connect_over(system, opens, Hello) as peer:
            welcome = await say_hello(peer, system.spawn(Idle))
            if not await welcome.node.ask(Ready("", [], classes(name))):
                await trio.sleep_forever()

    return ready


async def imports_another_class(opens: Any, *, name: str, end: trio.Event) -> None:
    """Ask for the start of an app with another version of a message class; end as soon as it is refused."""
    async with ActorSystem(name) as system, connect_over(system, opens, Hello) as peer:
        welcome = await say_hello(peer, system.spawn(Idle))
        if await welcome.node.ask(Imported("", {"tests.nodes.Add": [("n", "str", False)]})) == "":
            await trio.sleep_forever()


has_another_class = has_classes(lambda _: {"tests.nodes.Add": [("n", "str", False)], "unknown": []})
needs_another_field = has_classes(lambda _: {"tests.nodes.Add": [("n", "int", False), ("carry", "int", False)]})


async def has_another_hello(opens: Any, *, name: str, end: trio.Event) -> None:
    """Connect with another class of the same tag as `Hello`."""
    schema = b"\x81\xb1levada.node.Hello\x91\x93\xa4name\xa3int\xc2"
    config = PeerConfig(schema="off", headers=(("levada-schema", schema),))
    async with ActorSystem(name) as system, connect_over(system, opens, Hello, config=config):
        await trio.sleep_forever()


WRONG = "n0 has another version of a message class, and the two cannot work together"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (never_says_hello, r"n0 did not say hello within 5 s \(NodeSettings.start_timeout\)"),
        (says_it_twice, "n0 has failed: n0#0 has said hello before"),
        (has_other_messages, "n0 runs levada 0.0.1 on Python 3, whose control messages are not those of this process"),
        (imports_another_class, f"{WRONG}: tests.nodes.Add: n: int in the driver, n: str in n0$"),
        (has_another_class, f"{WRONG}: tests.nodes.Add: n: int in the driver, n: str in n0$"),
        (needs_another_field, f"{WRONG}: tests.nodes.Add: carry has no default, and is missing in the driver$"),
        (has_another_hello, "n0 ended with exit code 1"),
    ],
)
async def test_a_node_that_says_the_wrong_thing_is_an_error_of_the_block(
    body: Callable[..., Any], text: str, autojump_clock: MockClock
) -> None:
    async with ActorSystem() as system:
        with pytest.raises(NodeLost, match=text):
            async with nodes_here(system, 1, body=body):
                pass


async def test_a_node_may_have_message_classes_that_have_grown_and_new_ones(autojump_clock: MockClock) -> None:
    grown = has_classes(lambda _: {"tests.nodes.Add": [("n", "int", False), ("carry", "int", True)], "tests.new": []})
    async with ActorSystem() as system, nodes_here(system, 2, body=grown) as (nodes, _):
        assert [member.state for member in nodes.members] == [MemberState.UP] * 2


async def test_two_nodes_whose_message_classes_do_not_fit_are_an_error_though_the_driver_knows_neither(
    autojump_clock: MockClock,
) -> None:
    body = has_classes(lambda name: {"tests.shop.Order": [("price", "int" if name == "n0" else "float", False)]})
    text = r"n(\d) has another version .*: tests.shop.Order: price: \w+ in n(?!\1)\d, price: \w+ in n\1$"
    async with ActorSystem() as system:
        with pytest.raises(NodeLost, match=text):
            async with nodes_here(system, 2, body=body):
                pass


async def test_a_renamed_field_is_logged(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    renamed = has_classes(lambda _: {"tests.nodes.Add": [("number", "int", False)]})
    async with ActorSystem() as system, nodes_here(system, 1, body=renamed):
        said = "message classes differ: tests.nodes.Add: n in the driver is called number in n0"
        assert [record.getMessage() for record in caplog.records if "differ" in record.getMessage()] == [said]


async def test_a_process_that_takes_too_long_to_start_is_an_error_of_the_block(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem() as system:
        text = r"^n0 was not started within 5 s \(NodeSettings.start_timeout\)$"
        with pytest.raises(NodeLost, match=text):
            async with nodes_here(system, 1, busy=SETTINGS.start_timeout + 1):
                pass
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


async def test_an_app_that_is_never_ready_is_an_error_of_the_block(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        text = r"n0 did not say that its app is ready within 5 s \(NodeSettings.start_timeout\)$"
        with pytest.raises(NodeLost, match=text):
            async with nodes_here(system, 1, "tests.actors.nodes.apps:mute"):
                pass


async def test_a_process_that_cannot_be_started_is_an_error_of_the_block(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    def no_descriptors() -> Any:
        raise OSError(24, "Too many open files")

    async with ActorSystem() as system:
        monkeypatch.setattr("tests.actors.nodes.conftest.socket.socketpair", no_descriptors)
        with pytest.raises(
            NodeLost, match=r"n0 cannot be started: \[Errno 24\] Too many open files: raise the limit of open files"
        ):
            async with nodes_here(system, 1):
                pass


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope when so many steps of tasks have begun."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self.scope = scope
        self.left = steps

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel()


async def run_and_cancel(steps: int) -> bool:
    """Run a node and an actor on it; whether all was over before the cancellation."""
    tasks: list[Task] = []
    with trio.CancelScope() as scope:
        instrument = CancelAtStep(scope, steps)
        trio.lowlevel.add_instrument(instrument)
        try:
            async with ActorSystem() as system, nodes_here(system, 1, app) as (nodes, tasks):
                await nodes.spawn(Counter, supervise=restart())
        finally:
            trio.lowlevel.remove_instrument(instrument)
    assert all(task.gone.is_set() for task in tasks)
    return not scope.cancelled_caught


@pytest.mark.ci
async def test_a_block_may_be_cancelled_at_every_point_of_its_start_and_end(autojump_clock: MockClock) -> None:
    steps = 1
    while not await run_and_cancel(steps):
        steps += 5
    assert 200 < steps < 2000


async def test_a_node_that_is_lost_while_it_starts_an_actor_is_an_error_of_the_caller(
    autojump_clock: MockClock,
) -> None:
    async with ActorSystem() as system, nodes_here(system, 2) as (nodes, tasks):
        tasks[1].kill()
        with pytest.raises(ActorStopped, match="n1"):
            await nodes.spawn(Counter, on="n1")
        assert await (await nodes.spawn(Counter, on="n0")).ask(Add(1)) == 1


async def test_a_node_that_fails_again_and_again_ends_the_drivers_system(autojump_clock: MockClock) -> None:
    settings = attrs.evolve(SETTINGS, restart=restart(max=2, within=60.0))
    begun: list[str] = []

    async def dies(opens: Any, *, name: str, end: trio.Event) -> None:
        begun.append(name)
        if len(begun) > 1:
            raise NodeLost("out of luck")
        await run_node(opens, name=name, end=end)

    with pytest.raises(NodeLost, match="n0 ended with exit code 1"):
        async with ActorSystem() as system, nodes_here(system, 1, settings=settings, body=dies) as (_, tasks):
            tasks[0].kill()
            await trio.sleep_forever()
    assert len(begun) >= 2


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="a key of rlimits is"):
        NodeSettings(rlimits={"RLIMIT_MEMORY": 1})
    with pytest.raises(ValueError, match="start_timeout"):
        NodeSettings(start_timeout=0)
    assert NodeSettings(silence=1.0).beat == 0.2
    assert NodeSettings(affinity=[[0], [1]]).affinity == ((0,), (1,))
