"""The places of a listener: which connection makes room for the newest."""

from __future__ import annotations

import weakref
from functools import partial
from math import inf

import pytest
import trio
import trio.testing

from levada.transports.carriers.contracts import CarrierInfo
from levada.transports.carriers.listeners import ReadyQueue
from levada.transports.carriers.places import GRACE, Place, Places, share_of


class Clients:
    """Takes places under names, and notes in which order they ended."""

    def __init__(self, room: float) -> None:
        self.places = Places(room)
        self.ended: list[str] = []

    def come(self, name: str, share: str = "here") -> Place:
        return self.places.take(share, partial(self.ended.append, name))


async def test_the_oldest_makes_room_and_one_that_is_kept_does_not() -> None:
    clients = Clients(3)
    first = clients.come("first")
    clients.come("second")
    clients.come("third")
    first.keep()
    clients.come("fourth")
    assert (clients.ended, len(clients.places)) == (["second"], 3)


async def test_the_network_with_the_most_loses_its_oldest() -> None:
    """Also for a client of its own, and whichever came first; of equals, the one that came first."""
    clients = Clients(5)
    clients.come("alone", "there")
    for name in ("a", "b", "c", "d", "e", "f"):
        clients.come(name)
    clients.come("other", "elsewhere")
    assert clients.ended == ["a", "b", "c"]
    clients.come("g", "there")
    clients.come("h", "there")
    assert clients.ended == ["a", "b", "c", "d", "alone"]


async def test_kept_connections_do_not_count_in_the_share_of_their_network() -> None:
    clients = Clients(4)
    for _ in range(2):
        clients.come("kept").keep()
    clients.come("x", "there")
    clients.come("y", "there")
    clients.come("z")
    assert clients.ended == ["x"]


async def test_a_session_that_was_left_makes_room_after_those_that_wait_longer() -> None:
    clients = Clients(2)
    session = clients.come("session")
    session.keep()
    clients.come("silent")
    session.give_way()
    session.give_way()
    clients.come("a")
    clients.come("b")
    assert clients.ended == ["silent", "session"]
    session.keep()
    session.give_way()
    session.leave()
    assert len(clients.places) == 2
    clients.come("c")
    assert clients.ended == ["silent", "session", "a"]


async def test_a_session_that_was_resumed_makes_no_room() -> None:
    clients = Clients(1)
    session = clients.come("session")
    session.keep()
    session.give_way()
    session.keep()
    assert clients.places.full
    assert not clients.places.make_room()


async def test_newcomers_wait_while_all_are_kept(autojump_clock: trio.testing.MockClock) -> None:
    clients = Clients(1)
    place = clients.come("first")
    place.keep()
    waited = []

    async def wait() -> None:
        await clients.places.available()
        waited.append(trio.current_time())

    for free in (Place.leave, Place.give_way):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(1.0)
            free(place)
        place = clients.come("next")
        place.keep()
    assert [at - waited[0] for at in waited] == [0.0, 1.0]
    assert clients.ended == ["next"]


async def test_newcomers_wait_a_moment_for_one_that_has_just_come(autojump_clock: trio.testing.MockClock) -> None:
    """Not if there is a place, nor for one that gives way again."""
    clients = Clients(2)
    began = trio.current_time()
    await clients.places.available()
    clients.come("first")
    await trio.sleep(0.1)
    clients.come("second")
    await clients.places.available()
    assert trio.current_time() - began == pytest.approx(GRACE)
    clients.come("third").keep()
    await clients.places.available()
    assert trio.current_time() - began == pytest.approx(0.1 + GRACE)
    session = clients.come("session")
    session.keep()
    session.give_way()
    await clients.places.available()
    assert trio.current_time() - began == pytest.approx(0.1 + GRACE)
    assert clients.ended == ["first", "second"]


async def test_a_place_is_free_when_its_connection_is_told_to_end() -> None:
    """However long the end takes, it frees no second place."""
    places = Places(1)
    seen = []
    first = places.take("here", lambda: seen.append(len(places)))
    places.take("here", lambda: None)
    first.leave()
    assert (seen, len(places)) == ([0], 1)


async def test_a_place_that_is_free_refers_to_nothing_of_its_connection() -> None:
    """The connection refers to its place, and is freed without the garbage collector."""

    class Connection:
        def end(self) -> None:
            pass

    connection = Connection()
    gone = weakref.ref(connection)
    place = Places(1).take("here", connection.end)
    del connection
    assert gone() is not None
    place.leave()
    assert gone() is None


async def test_a_newcomer_that_has_a_place_at_once_lets_others_run() -> None:
    with trio.testing.assert_checkpoints():
        await Places(1).available()


async def test_without_a_limit_none_makes_room() -> None:
    clients = Clients(inf)
    for number in range(1000):
        clients.come(str(number))
    assert (clients.ended, clients.places.full) == ([], False)


def test_a_share_is_a_network_or_a_user() -> None:
    unix = CarrierInfo(scheme="unix", local="/run/desk", peer="pid=7 uid=1000 gid=5", peer_credentials=(7, 1000, 5))
    assert share_of(unix.peer, unix) == "uid 1000"
    assert share_of("192.0.2.1:443") == "192.0.2.1"
    assert share_of("[::ffff:192.0.2.1]:443") == "192.0.2.1"
    assert share_of("[2001:db8::1:2:3:4]:443") == "2001:db8::/64"
    assert share_of("slow:1") == "slow"
    assert share_of("desk/client") == ""


async def test_a_handshake_that_is_complete_just_when_it_makes_room_is_queued(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its task was about to run, so that its cancellation came too late."""
    ready, ended = ReadyQueue[str](1), list[str]()
    first = await ready.reserve("here", partial(ended.append, "first"))
    second = await ready.reserve("here", partial(ended.append, "second"))
    ready.put("first", first)
    ready.put("second", second)
    assert [await ready.take("tls://desk") for _ in range(2)] == ["first", "second"]
    assert ended == ["first"]
    await ready.reserve("here", partial(ended.append, "third"))
    assert ended == ["first"]
