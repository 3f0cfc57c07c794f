"""`strict`: changed messages, messages that cannot travel, scopes left open."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Behaviour,
    Down,
    Killed,
    Normal,
    Ref,
    bounded,
    conflate,
    handles,
    message,
    restart,
)
from levada.framework.channel import Sender, channel
from levada.framework.errors import ActorError
from levada.framework.testing import Probe, StrictViolation, strict


@message
class Order:
    lines: list[str]


@message
class Price(Asks[int]):
    lines: list[str]


@message
class Follow:
    prices: Sender[int]


@message
class Callback:
    """A field that no codec takes."""

    function: Any


@message
class Pair:
    """Arrives as something else: in `Any` a tuple becomes a list."""

    both: Any


class Shop(Actor[Any]):
    got: list[Any]

    @handles
    def price(self, m: Price) -> int:
        return len(m.lines)

    @handles
    def other(self, m: object) -> None:
        self.got.append(m)


class LateShop(Shop):
    """Opens when the gate does."""

    gate: trio.Event

    async def started(self) -> None:
        await self.gate.wait()


MAILBOXES = [None, bounded(5), bounded(5, overflow="drop_old"), bounded(5, overflow=conflate(id))]


# ---------------------------------------------------------------- changed messages


@pytest.mark.parametrize("mailbox", MAILBOXES, ids=["unbounded", "bounded", "drop_old", "conflate"])
@pytest.mark.parametrize("how", ["tell", "send", "ask"])
async def test_a_message_changed_while_it_is_queued_ends_the_system(mailbox: Any, how: str) -> None:
    order = Price(["tea"]) if how == "ask" else Order(["tea"])
    gate = trio.Event()
    with pytest.raises(
        StrictViolation, match=r"\['tea', 'milk'\]\) was changed between tell and its handling by /shop"
    ):
        async with strict()() as system, trio.open_nursery() as nursery:
            shop: Ref[Any] = system.spawn(LateShop, [], gate, name="shop", mailbox=mailbox)
            if how == "tell":
                shop.tell(order)
            elif how == "send":
                await shop.send(order)
            else:
                nursery.start_soon(shop.ask, cast("Price", order))
            await wait_all_tasks_blocked()
            order.lines.append("milk")
            gate.set()
            await trio.sleep_forever()


async def test_an_end_of_a_channel_that_is_sent_twice_ends_the_system(autojump_clock: MockClock) -> None:
    lines, received = channel(int)
    gate = trio.Event()
    with pytest.raises(
        StrictViolation, match=r"^<Sender of channel int: .*> was sent to /one, and again to /two: it has one owner$"
    ):
        async with strict()() as system:
            refs = [system.spawn(LateShop, [], gate, name=name) for name in ("one", "two")]
            for ref in refs:
                ref.tell(Follow(lines))
    lines.cancel()
    received.close()


async def test_an_end_of_a_channel_may_be_passed_on_and_one_message_may_be_sent_to_many() -> None:
    class Forwards(Actor[Follow]):
        to: Ref[Any]

        @handles
        def follow(self, m: Follow) -> None:
            self.to.tell(Follow(m.prices))

    lines, received = channel(int)
    clone = lines.clone()
    async with strict()() as system:
        one = Shop([])
        shop = system.spawn(lambda: one)
        other = system.spawn(Shop, [])
        system.spawn(Forwards, shop).tell(Follow(lines))
        other.tell(Follow(clone))
        third, kept = channel(int)
        shared = Follow(third)
        for ref in (shop, other):
            ref.tell(shared)
        await wait_all_tasks_blocked()
        assert [m.prices for m in one.got] == [shared.prices, lines]
        shared.prices.cancel()
        lines.cancel()
    clone.cancel()
    kept.close()
    received.close()


async def test_a_message_changed_between_two_receivers_is_found() -> None:
    class Greedy(Actor[Order]):
        @handles
        def order(self, m: Order) -> None:
            m.lines.clear()

    with pytest.raises(StrictViolation, match=r"Order\(lines=\[\]\) was changed between tell and its handling by /b"):
        async with strict()() as system:
            order = Order(["tea"])
            for name in "ab":
                system.spawn(Greedy, name=name).tell(order)
            await trio.sleep_forever()


async def test_a_message_changed_and_sent_again_is_found_at_once() -> None:
    with pytest.raises(StrictViolation, match="was changed after it was sent and sent again, to /shop"):
        async with strict()() as system:
            shop = system.spawn(Shop, [], name="shop")
            order = Order(["tea"])
            shop.tell(order)
            order.lines.append("milk")
            shop.tell(order)


@pytest.mark.parametrize("mailbox", MAILBOXES, ids=["unbounded", "bounded", "drop_old", "conflate"])
async def test_messages_left_alone_are_no_violation(mailbox: Any) -> None:
    got: list[Any] = []
    async with strict(codec=True)() as system:
        shop = system.spawn(Shop, got, mailbox=mailbox, supervise=restart())
        order = Order(["tea"])
        for _ in range(3):
            shop.tell(order)
            await shop.send(Order(["milk"]))
        assert await shop.ask(Price(["a", "b"])) == 2
        order.lines.append("mine again")  # it has been handled
        shop.tell(order)
        shop.tell(5)
        await wait_all_tasks_blocked()
        shop.stop()
        await shop.terminated()
        shop.tell(order)  # a dead letter
        assert len(system._seals) <= 1  # type: ignore[attr-defined]
    assert got[-2:] == [order, 5]


async def test_without_the_codec_check_any_object_is_a_message() -> None:
    got: list[Any] = []
    async with strict()() as system:
        shop = system.spawn(Shop, got)
        for thing in (Callback(print), object, {1: {2}}, threading.Lock()):
            shop.tell(thing)
    assert len(got) == 4


# ---------------------------------------------------------------- messages that cannot travel


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (Callback(print), r"Callback for /shop cannot travel: Callback\.function"),
        (Order(["tea", 5]), r"Order for /shop cannot travel: Order\.lines\[1\]: expected str, got int"),  # type: ignore[list-item]
        (object(), "object for /shop cannot travel"),
        (2**70, "int for /shop cannot travel"),
    ],
    ids=["a function", "a wrong type", "no message class", "too large"],
)
async def test_a_message_that_cannot_travel_is_refused_where_it_is_sent(told: Any, text: str) -> None:
    with pytest.raises(StrictViolation, match=text):
        async with strict(codec=True)() as system:
            system.spawn(Shop, [], name="shop").tell(told)


async def test_handles_inside_a_message_stay_where_they_are() -> None:
    got: list[Any] = []
    async with strict(codec=True)() as system:
        sender, receiver = channel(int)
        system.spawn(Shop, got).tell(Follow(sender))
        await wait_all_tasks_blocked()
        assert got == [Follow(sender)]
        await sender.send(1)
        assert await receiver.receive() == 1
        await sender.finish()
        receiver.close()


async def test_signals_and_events_are_no_messages_to_check(system: ActorSystem) -> None:
    async with strict(codec=True)() as checked:
        probe = Probe(checked)
        worker = checked.spawn(Shop, [])
        probe.watch(worker)
        checked.groups.subscribe("topic", probe.ref)
        checked.groups.join("topic", worker)
        worker.kill()
        assert {type(await probe.expect()).__name__ for _ in range(3)} == {"Down", "Joined", "Left"}
        assert any(isinstance(m, Down) for m in probe.received)


# ---------------------------------------------------------------- scopes left open


@message
class OpenScope:
    pass


@message
class OpenLater:
    pass


@message
class OpenNursery:
    pass


@message
class OpenAndFail:
    pass


class Careless(Actor[OpenScope | OpenLater | OpenNursery | OpenAndFail | Order]):
    got: list[Any]

    @handles
    def scope(self, m: OpenScope) -> None:
        self.kept: Any = trio.CancelScope()
        self.kept.__enter__()

    @handles
    async def later(self, m: OpenLater) -> None:
        await trio.sleep(0.1)
        self.kept = trio.CancelScope()
        self.kept.__enter__()
        await trio.sleep(0.1)

    @handles
    async def nursery(self, m: OpenNursery) -> None:
        self.kept = trio.open_nursery()
        nursery = await self.kept.__aenter__()
        nursery.start_soon(trio.sleep, 1000)

    @handles
    def fails(self, m: OpenAndFail) -> None:
        self.scope(OpenScope())
        raise ValueError("and fails")

    @handles
    def order(self, m: Order) -> None:
        self.got.append(m)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (OpenScope(), r"Careless\.scope left a cancel scope open when it was done with OpenScope in /careless"),
        (OpenLater(), r"Careless\.later left a cancel scope open"),
        (OpenNursery(), r"Careless\.nursery left a nursery open"),
        (OpenAndFail(), r"Careless\.fails left a cancel scope open"),
    ],
    ids=["sync", "async", "nursery", "raises too"],
)
async def test_what_a_handler_leaves_open_ends_the_system_and_harms_nobody_else(
    told: Any, text: str, autojump_clock: MockClock
) -> None:
    got: list[Any] = []
    with pytest.raises(StrictViolation, match=text):
        async with strict()() as system:
            careless = system.spawn(Careless, got, name="careless")
            bystander = system.spawn(Careless, got)
            careless.tell(told)
            try:
                await trio.sleep(50)
            finally:
                bystander.tell(Order(["still served"]))
    assert got == [Order(["still served"])]
    assert trio.current_time() < 50


@pytest.mark.parametrize("asked", [True, False])
async def test_a_handler_that_forgets_an_await_ends_the_system(asked: bool) -> None:
    @message
    class Count(Asks[int]):
        pass

    class Clerk(Actor[Count]):
        async def counted(self) -> int:
            return 1

        @handles
        async def count(self, m: Count) -> Any:
            made.append(self.counted())
            return made[0]

    made: list[Any] = []
    with pytest.raises(StrictViolation, match=r"Clerk\.count returned the coroutine .*Clerk\.counted: await it$"):
        async with strict()() as system:
            clerk = system.spawn(Clerk)
            if asked:
                await clerk.ask(Count())
            else:
                clerk.tell(Count())
                await trio.sleep_forever()
    made[0].close()


async def test_scopes_that_are_left_in_time_are_fine(autojump_clock: MockClock) -> None:
    @message
    class Work(Asks[float]):
        pass

    class Tidy(Actor[Work]):
        async def started(self) -> None:
            with trio.move_on_after(0.1):
                await trio.sleep(1)

        @handles
        async def work(self, m: Work) -> float:
            with trio.move_on_after(1):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep, 5)
            await self.enter(trio.open_nursery())
            return trio.current_time()

    async with strict()() as system:
        tidy = system.spawn(Tidy)
        assert await tidy.ask(Work()) == pytest.approx(1.1)
        tidy.kill()
        await tidy.terminated()


async def test_a_killed_handler_leaves_nothing_open(autojump_clock: MockClock) -> None:
    class Sleeper(Actor[Order]):
        @handles
        async def order(self, m: Order) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)

    async with strict()() as system:
        sleeper = system.spawn(Sleeper)
        sleeper.tell(Order([]))
        await wait_all_tasks_blocked()
        sleeper.kill()
        assert await sleeper.terminated() == Killed()


# ---------------------------------------------------------------- the rest of the actor's life


async def test_become_restart_loops_stash_and_unhandled_work_as_ever(autojump_clock: MockClock) -> None:
    class Other(Behaviour):
        @handles
        def order(self, m: Order) -> None:
            self.got.append("other")  # type: ignore[attr-defined]

    class Turncoat(Actor[Order | Callback]):
        got: list[Any]

        @handles
        def order(self, m: Order) -> None:
            self.got.append("own")
            self.become(Other)

        @handles
        def fail(self, m: Callback) -> None:
            raise ValueError

    class Loop(Actor[Order]):
        got: list[Any]

        async def run(self) -> None:
            async for m in self.mailbox:
                self.got.append(m)

    got: list[Any] = []
    async with strict()() as system:
        turncoat: Ref[Any] = system.spawn(Turncoat, got, supervise=restart())
        for _ in range(2):
            turncoat.tell(Order([]))
        await wait_all_tasks_blocked()
        with pytest.raises(ActorError, match="has no handler for int"):
            turncoat.tell(5)
        turncoat.tell(Order([]))
        await wait_all_tasks_blocked()
        assert got == ["own", "other", "other"]
        loop = system.spawn(Loop, got)
        loop.tell(Order(["x"]))
        loop.stop()
        assert await loop.terminated() == Normal() or not loop.is_alive
    assert got[-1] == Order(["x"])


async def test_the_checks_of_a_strict_actor_system_are_on_too() -> None:
    async with strict()() as system:
        shop = system.spawn(Shop, [])

        def tell() -> None:
            with pytest.raises(RuntimeError, match="foreign thread"):
                shop.tell(1)

        await trio.to_thread.run_sync(tell)
