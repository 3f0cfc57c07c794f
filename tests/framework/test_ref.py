"""What a `Ref` is, and what holding one means."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    DeadLetter,
    Failed,
    Killed,
    MailboxPolicy,
    Normal,
    Reason,
    Ref,
    Shutdown,
    actor,
    bounded,
    conflate,
    handles,
    message,
    restart,
    unbounded,
)
from levada.framework.errors import ActorStopped, ConfigurationError, NameTaken


@message
class Get(Asks[int]):
    pass


@message
class Fail:
    pass


@message
class Spawn(Asks["Ref[Any]"]):
    name: str | None = None


class Plain(Actor[Get | Fail | Spawn]):
    number: int = 0

    @handles
    def get(self, m: Get) -> int:
        return self.number

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError("told to")

    @handles
    def start(self, m: Spawn) -> Ref[Any]:
        return self.spawn(Plain, name=m.name)


async def test_a_ref_is_hashable_and_equals_only_itself(system: ActorSystem) -> None:
    one, two = system.spawn(Plain), system.spawn(Plain)
    assert one == one
    assert one != two
    assert {one: 1, two: 2}[one] == 1
    assert len({one, two, one}) == 2
    before = hash(one)
    one.kill()
    await one.terminated()
    assert hash(one) == before


async def test_a_ref_cannot_be_pickled_or_copied(system: ActorSystem) -> None:
    ref = system.spawn(Plain, name="plain")
    text = rf"<Ref /plain#{ref.incarnation}> cannot be pickled; send it in a message over a connection instead"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=text):
            attempt(ref)


async def test_an_incarnation_is_never_used_again(system: ActorSystem) -> None:
    seen: set[int] = set()
    for _ in range(20):
        ref = system.spawn(Plain, name="same")
        assert ref.incarnation not in seen
        seen.add(ref.incarnation)
        ref.stop()
        await ref.terminated()


async def test_a_ref_to_the_dead_does_not_reach_a_successor_of_the_same_name(system: ActorSystem) -> None:
    old = system.spawn(Plain, 1, name="same")
    old.stop()
    await old.terminated()
    new = system.spawn(Plain, 2, name="same")
    assert (old.path, new.path) == ("/same", "/same")
    assert old != new
    with pytest.raises(ActorStopped):
        await old.ask(Get())
    assert await new.ask(Get()) == 2
    assert (old.is_alive, new.is_alive) == (False, True)


async def test_a_ref_and_its_incarnation_survive_a_restart(system: ActorSystem) -> None:
    ref = system.spawn(Plain, 3, supervise=restart())
    number = ref.incarnation
    ref.tell(Fail())
    assert await ref.ask(Get()) == 3
    assert ref.incarnation == number
    assert ref.is_alive
    assert system.statistics().restarts == 1


async def test_paths_are_the_names_from_the_root(system: ActorSystem) -> None:
    desk = system.spawn(Plain, name="desk")
    prices = await desk.ask(Spawn("prices"))
    nameless = await prices.ask(Spawn())
    assert (desk.path, prices.path) == ("/desk", "/desk/prices")
    assert nameless.path == f"/desk/prices/${nameless.incarnation}"
    assert system.lookup("/desk/prices") is prices
    assert system.lookup("desk") is desk
    assert system.lookup("/desk/none") is None
    assert system.lookup("/") is None
    assert system.lookup(nameless.path) is None


async def test_a_name_is_unique_among_living_siblings(system: ActorSystem) -> None:
    desk = system.spawn(Plain, name="desk")
    with pytest.raises(NameTaken) as caught:
        system.spawn(Plain, name="desk")
    assert (str(caught.value), caught.value.name) == ("/desk lives already", "desk")
    inner = await desk.ask(Spawn("desk"))
    assert inner.path == "/desk/desk"
    desk.kill()
    await desk.terminated()
    assert system.spawn(Plain, name="desk").is_alive


@pytest.mark.parametrize("name", ["", "a/b", "/", "$1", "a\nERROR", "\x1b[31m", "\u202e", "a\ud800"])
async def test_a_name_that_would_break_a_path_or_a_log_is_refused(system: ActorSystem, name: str) -> None:
    with pytest.raises(ConfigurationError, match="wanted printable text without '/' that does not begin with"):
        system.spawn(Plain, name=name)


async def test_repr_names_path_and_incarnation(system: ActorSystem) -> None:
    ref = system.spawn(Plain, name="plain")
    assert repr(ref) == f"<Ref /plain#{ref.incarnation}>"
    ref.kill()
    await ref.terminated()
    assert repr(ref) == f"<Ref /plain#{ref.incarnation}>"


async def test_is_alive_until_the_end_for_good(system: ActorSystem) -> None:
    gate = trio.Event()

    class Lingers(Actor[Any]):
        async def stopping(self, reason: Reason) -> None:
            await gate.wait()

    ref = system.spawn(Lingers)
    ref.stop()
    await wait_all_tasks_blocked()
    assert ref.is_alive
    gate.set()
    assert await ref.terminated() == Shutdown()
    assert not ref.is_alive


# ---------------------------------------------------------------- terminated


async def test_terminated_tells_everybody_who_waits_and_everybody_who_comes_later(system: ActorSystem) -> None:
    ref = system.spawn(Plain)
    reasons: list[Reason] = []

    async def wait() -> None:
        reasons.append(await ref.terminated())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        assert reasons == []
        ref.tell(Fail())
    first, second = reasons
    assert isinstance(first, Failed)
    assert repr(first.error) == "ValueError('told to')"
    assert first is second
    assert await ref.terminated() is first


async def test_terminated_may_be_cancelled(system: ActorSystem, autojump_clock: trio.testing.MockClock) -> None:
    ref = system.spawn(Plain)
    with trio.move_on_after(1) as scope:
        await ref.terminated()
    assert scope.cancelled_caught
    ref.kill()
    assert await ref.terminated() == Killed()


# ---------------------------------------------------------------- holding, dropping, the dead


async def test_dropping_a_ref_does_not_stop_the_actor_and_holding_one_does_not_keep_it(system: ActorSystem) -> None:
    ended: list[str] = []

    class Ends(Actor[Get]):
        @handles
        def get(self, m: Get) -> int:
            return 5

        def stopping(self, reason: Reason) -> None:
            ended.append(type(reason).__name__)

    system.spawn(Ends, name="ends")
    gc.collect()
    await wait_all_tasks_blocked()
    assert ended == []
    ref = system.lookup("ends")
    assert ref is not None
    assert await ref.ask(Get()) == 5
    ref.stop()
    await ref.terminated()
    assert ended == ["Shutdown"]
    assert not ref.is_alive


async def test_a_stopped_actor_is_not_kept_by_its_ref(system: ActorSystem) -> None:
    made: list[weakref.ref[Any]] = []

    def make() -> Plain:
        plain = Plain()
        made.append(weakref.ref(plain))
        return plain

    ref = system.spawn(make)
    assert made[0]() is not None
    ref.stop()
    await ref.terminated()
    gc.collect()
    assert made[0]() is None


async def test_signals_to_the_dead_are_ignored(system: ActorSystem) -> None:
    ref = system.spawn(Plain)
    ref.kill()
    await ref.terminated()
    ref.stop()
    ref.stop(now=True)
    ref.kill()
    await wait_all_tasks_blocked()
    assert await ref.terminated() == Killed()


POLICIES = [
    unbounded(),
    bounded(2),
    bounded(2, overflow="raise"),
    bounded(2, overflow="drop_new"),
    bounded(2, overflow="drop_old"),
    bounded(2, overflow="stop"),
    bounded(2, overflow=conflate(type)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: str(p.overflow) if p.capacity else "unbounded")
@pytest.mark.parametrize("strict", [False, True], ids=["normal", "strict"])
async def test_the_dead_refuse_send_and_ask_and_make_dead_letters_of_tells(policy: MailboxPolicy, strict: bool) -> None:
    letters: list[tuple[Any, Any, str]] = []

    @actor
    def listener(letter: DeadLetter) -> None:
        letters.append((letter.message, letter.to, letter.why))

    async with ActorSystem(strict=strict) as system:
        system.events.subscribe(DeadLetter, system.spawn(listener))
        ref = system.spawn(Plain, mailbox=policy, name="late")
        ref.stop()
        assert await ref.terminated() == Shutdown()
        told, sent, asked = Get(), Get(), Get()
        ref.tell(told)
        for attempt, given_back in ((ref.send(sent), sent), (ref.ask(asked), asked)):
            with pytest.raises(ActorStopped) as caught:
                await attempt
            assert str(caught.value) == "/late has stopped (shutdown)"
            assert (caught.value.actor, caught.value.reason) == ("/late", Shutdown())
            assert caught.value.message is given_back
            assert caught.value.__cause__ is None
        await wait_all_tasks_blocked()
        assert letters == [(told, ref, "stopped")]
        assert system.statistics().dead_letters == 1


async def test_a_ref_still_says_what_it_was_after_the_system_is_over() -> None:
    async with ActorSystem() as system:
        ref = system.spawn(Plain, name="plain")
    assert not ref.is_alive
    assert ref.path == "/plain"
    assert await ref.terminated() == Shutdown()
    ref.tell(Get())
    with pytest.raises(ActorStopped):
        await ref.ask(Get())
    with pytest.raises(ActorStopped):
        await ref.send(Get())
    assert system.statistics().dead_letters == 1
    assert system.statistics().actors == 0


async def test_stopped_by_itself_is_normal(system: ActorSystem) -> None:
    @message
    class Enough:
        pass

    class Ends(Actor[Enough]):
        @handles
        def on(self, m: Enough) -> None:
            self.stop()

    ref = system.spawn(Ends)
    ref.tell(Enough())
    assert await ref.terminated() == Normal()
