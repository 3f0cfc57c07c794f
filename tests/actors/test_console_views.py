"""Views of the console: what a dashboard gets is what it shows, and what it may do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors import rsocket
from levada.actors.console import View, Viewer, connect_console, serve_console, take_snapshot
from levada.actors.console.news import KEPT, MOST_NEWS, Recorder
from levada.actors.console.snapshot import Watching, nodes_asked_by
from levada.actors.console.viewing import MOST_OPEN, MOST_ROWS
from levada.actors.journal import Append, CommitGroup, DeclareGroup, Envelope, Journal
from levada.framework import (
    Actor,
    ActorFailed,
    ActorRestarted,
    ActorSystem,
    DeadLetter,
    Receiver,
    Ref,
    Sender,
    SlowHandler,
    Unhandled,
    channel,
    handles,
    message,
    restart,
)
from levada.framework.embedding import DescribedActor
from levada.framework.errors import CarrierError, ConfigurationError, DecodeError


@message
class Work:
    pass


@message
class Fail:
    secret: str


class Clerk(Actor[Work | Fail]):
    @handles
    def work(self, m: Work) -> None:
        pass

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError(m.secret)


class Office(Actor[Work]):
    clerks: int

    def started(self) -> None:
        for number in range(self.clerks):
            self.spawn(Clerk, name=f"clerk{number}")

    @handles
    def work(self, m: Work) -> None:
        pass


class Desk(Actor[Work]):
    out: Sender[int]

    @handles
    def work(self, m: Work) -> None:
        self.out.send_nowait(1)


@asynccontextmanager
async def viewed(*offices: int, **allowed: bool) -> AsyncIterator[tuple[ActorSystem, Viewer]]:
    async with ActorSystem("town") as system:
        for number, clerks in enumerate(offices):
            system.spawn(Office, clerks, name=f"office{number}")
        await wait_all_tasks_blocked()
        viewer = Viewer(system, **allowed)
        await wait_all_tasks_blocked()
        yield system, viewer
        viewer.close()


def shown(answer: dict[str, Any]) -> list[tuple[int, str, int]]:
    return [(row["level"], row["path"], row["hidden"]) for row in answer["rows"]]


async def test_a_tree_is_folded_but_for_the_open_actors(autojump_clock: MockClock) -> None:
    async with viewed(2, 3) as (_, viewer):
        folded = await viewer.look(View())
        assert shown(folded) == [(0, "/office0", 2), (0, "/office1", 3)]
        assert folded["total"] == 2
        answer = await viewer.look(View(open=("/office1",)))
        assert shown(answer) == [
            (0, "/office0", 2),
            (0, "/office1", 3),
            (1, "/office1/clerk0", 0),
            (1, "/office1/clerk1", 0),
            (1, "/office1/clerk2", 0),
        ]
        assert answer["total"] == 5


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("count", [0, 1, 3, 20])
async def test_a_window_is_a_part_of_the_whole(autojump_clock: MockClock, first: int, count: int) -> None:
    paths = ("/office0", "/office2", "/nobody", "/office0/clerk1")
    async with viewed(2, 3, 1) as (_, viewer):
        whole = await viewer.look(View(open=paths, count=200))
        part = await viewer.look(View(open=paths, first=first, count=count))
        assert len(shown(whole)) == whole["total"] == part["total"] == 6
        assert shown(part) == shown(whole)[first : first + count]


async def test_children_of_a_folded_actor_are_not_shown(autojump_clock: MockClock) -> None:
    async with viewed(2) as (_, viewer):
        answer = await viewer.look(View(open=("/office0/clerk1",)))
        assert [path for _, path, _ in shown(answer)] == ["/office0"]


async def test_a_search_finds_paths_and_classes(autojump_clock: MockClock) -> None:
    async with viewed(2, 2) as (system, viewer):
        for text, found in (
            ("CLERK1", ["/office0/clerk1", "/office1/clerk1"]),
            ("office1/", ["/office1/clerk0", "/office1/clerk1"]),
            ("CLERK", ["/office0/clerk0", "/office0/clerk1", "/office1/clerk0", "/office1/clerk1"]),
            ("nothing", []),
        ):
            answer = await viewer.look(View(search=text))
            assert ([path for _, path, _ in shown(answer)], answer["total"]) == (found, len(found))
            assert not answer["searching"]
        # What ended is gone at once, what began is found by a later pass.
        clerk = system.lookup("/office0/clerk1")
        assert clerk is not None
        await viewer.look(View(search="clerk1"))
        clerk.kill()
        await wait_all_tasks_blocked()
        assert [path for _, path, _ in shown(await viewer.look(View(search="clerk1")))] == ["/office1/clerk1"]
        system.spawn(Clerk, name="clerk11")
        await viewer.look(View(search="clerk1"))
        assert [path for _, path, _ in shown(await viewer.look(View(search="clerk1")))] == [
            "/office1/clerk1",
            "/clerk11",
        ]


async def test_the_selected_actor_in_detail(autojump_clock: MockClock) -> None:
    async with viewed() as (system, viewer):
        sender, receiver = channel(int, name="orders")
        desk: Ref[Work] = system.spawn(Desk, sender, name="desk", supervise=restart("permanent", max=2, within=9.0))
        desk.tell(Work())
        await wait_all_tasks_blocked()
        detail = (await viewer.look(View(page="none", selected="/desk")))["detail"]
        assert {name: detail[name] for name in ("path", "kind", "handled", "supervision", "capacity", "links")} == {
            "path": "/desk",
            "kind": "Desk",
            "handled": 1,
            "supervision": "restart (permanent, 2 in 9 s)",
            "capacity": None,
            "links": (),
        }
        channels = ({"name": "orders", "end": "Sender", "item": "int", "mode": "ordered", "queued": 1, "window": 256},)
        assert detail["channels"] == channels
        answer = await viewer.look(View(page="channels"))
        assert answer["rows"] == [{"path": "/desk", **channels[0]}]
        assert (await viewer.look(View(selected="/gone")))["detail"] is None
        receiver.close()
        assert isinstance(receiver, Receiver)


@pytest.mark.handler_fails
async def test_what_happens_is_told_without_the_texts(autojump_clock: MockClock) -> None:
    async with viewed() as (system, viewer):
        clerk: Ref[Work | Fail] = system.spawn(Clerk, name="clerk")
        clerk.tell(Fail("password"))
        await wait_all_tasks_blocked()
        clerk.tell(Work())
        await wait_all_tasks_blocked()
        answer = await viewer.look(View())
        news = [each for each in answer["news"] if each["what"] != "slow turn"]  # which a busy machine adds
        assert [(each["what"], each["actor"], each["message"], each["why"]) for each in news] == [
            ("failure", "/clerk", "Fail", "ValueError"),
            ("dead letter", "/clerk", "Work", "stopped"),
        ]
        assert [each["number"] for each in answer["news"]] == list(range(1, answer["last"] + 1))
        assert "password" not in repr(answer)
        assert (await viewer.look(View(after=answer["last"])))["news"] == []


@pytest.mark.handler_fails
async def test_tracebacks_if_they_are_asked_for(autojump_clock: MockClock) -> None:
    async with viewed(tracebacks=True) as (system, viewer):
        system.spawn(Clerk, name="clerk").tell(Fail("wrong"))
        await wait_all_tasks_blocked()
        (failure,) = (await viewer.look(View()))["news"]
        assert failure["traceback"][0] == "Traceback (most recent call last):"
        assert failure["traceback"][-1] == "ValueError: wrong"


async def test_a_flood_of_events_is_cut_off_until_the_next_look(autojump_clock: MockClock) -> None:
    async with viewed() as (system, viewer):
        clerk: Ref[Work | Fail] = system.spawn(Clerk, name="clerk")
        clerk.kill()
        await wait_all_tasks_blocked()
        last = 0
        for flood in (10_000, MOST_NEWS + 1, MOST_NEWS, 1):
            for _ in range(flood):
                clerk.tell(Work())
            assert system.events.wants(DeadLetter) == (flood < MOST_NEWS)  # the rest costs nothing
            answer = await viewer.look(View(after=last))
            letters = [each for each in answer["news"] if each["what"] == "dead letter"]
            assert [each["actor"] for each in letters[:MOST_NEWS]] == ["/clerk"] * min(flood, MOST_NEWS)
            left_out = flood - MOST_NEWS
            assert [(each["actor"], each["why"]) for each in letters[MOST_NEWS:]] == (
                [("", f"{left_out:,} more, which are not listed")] if left_out > 0 else []
            )
            assert system.events.wants(DeadLetter)
            last = answer["last"]
        assert answer["statistics"]["dead_letters"] == 10_000 + 2 * MOST_NEWS + 2


@pytest.mark.handler_fails
async def test_events_do_not_wait_for_a_turn(autojump_clock: MockClock) -> None:
    """An overloaded system tells of them at the next look, however many actors are ready before."""
    async with viewed() as (system, viewer):
        clerk, gone = system.spawn(Clerk, name="clerk"), system.spawn(Clerk, name="gone")
        gone.kill()
        await wait_all_tasks_blocked()
        recorder = Recorder(system, tracebacks=False)
        for _ in range(10_000):
            system.spawn(Clerk).tell(Work())
        gone.tell(Work())
        assert system.statistics().ready >= 10_000
        (letter,) = recorder.after(0)[1]
        assert (letter["what"], letter["actor"], letter["message"]) == ("dead letter", "/gone", "Work")
        clerk.tell(Fail("password"))
        await wait_all_tasks_blocked()
        failure = next(each for each in recorder.after(letter["number"])[1] if each["what"] == "failure")
        assert (failure["actor"], failure["why"]) == ("/clerk", "ValueError")
        recorder.close()
        viewer.close()
        assert not any(system.events.wants(kind) for kind in (DeadLetter, ActorFailed))


async def test_all_events_of_one_look_are_kept(autojump_clock: MockClock) -> None:
    async with viewed() as (system, viewer):
        gone = system.spawn(Clerk, name="gone")
        await wait_all_tasks_blocked()
        for _ in range(2 * MOST_NEWS):
            for event in (
                DeadLetter(Work(), gone, "stopped"),
                Unhandled(Work(), gone),
                ActorFailed(gone, ValueError(), None),
                ActorRestarted(gone, 1),
                SlowHandler(gone, Work, 1.0, 1),
            ):
                system.events.publish(event)
        news = (await viewer.look(View()))["news"]
        assert len(news) == 5 * MOST_NEWS <= KEPT - 5
        assert [(each["what"], each.get("why")) for each in news[:5]] == [
            ("dead letter", "stopped"),
            ("unhandled", None),
            ("failure", "ValueError"),
            ("restart", "restart 1"),
            ("slow turn", "1.000 s, messages: 1"),
        ]


async def test_nobody_watching_leaves_no_trace(autojump_clock: MockClock) -> None:
    async with viewed(1) as (system, viewer):
        assert system.events.wants(DeadLetter)
        assert system.statistics().actors == 2
        viewer.close()
        assert not system.events.wants(DeadLetter)
        assert not system.events.wants(ActorFailed)


@pytest.mark.handler_fails
async def test_actions_are_confirmed(autojump_clock: MockClock) -> None:
    async with viewed(actions=True) as (system, viewer):
        clerk = system.spawn(Clerk, name="clerk", supervise=restart("transient"))
        clerk.tell(Work())
        await wait_all_tasks_blocked()
        asked = await viewer.act({"act": "restart", "path": "/clerk"})
        assert (asked["act"], asked["path"], asked["supervision"]) == (
            "restart",
            "/clerk",
            "restart (transient, 5 in 10 s)",
        )
        assert (await viewer.look(View(selected="/clerk")))["detail"]["restarts"] == 0
        assert await viewer.act({"confirm": asked["confirm"]}) == {"done": "restart /clerk"}
        await trio.sleep(1)
        assert (await viewer.look(View(selected="/clerk")))["detail"]["restarts"] == 1
        for wrong in (asked["confirm"], "", "é", "\ud800", None, 5):
            with pytest.raises(ConfigurationError, match="nothing to confirm"):
                await viewer.act({"confirm": wrong})
        asked = await viewer.act({"act": "stop", "path": "/clerk"})
        await trio.sleep(61)
        with pytest.raises(ConfigurationError, match="a minute has passed"):
            await viewer.act({"confirm": asked["confirm"]})
        asked = await viewer.act({"act": "stop", "path": "/clerk"})
        await viewer.act({"confirm": asked["confirm"]})
        await wait_all_tasks_blocked()
        assert not clerk.is_alive
        # The code was for that actor, not for the next one of its name.
        other = system.spawn(Clerk, name="clerk")
        asked = await viewer.act({"act": "kill", "path": "/clerk"})
        other.kill()
        await wait_all_tasks_blocked()
        heir = system.spawn(Clerk, name="clerk")
        with pytest.raises(ConfigurationError, match="the actor has ended"):
            await viewer.act({"confirm": asked["confirm"]})
        assert heir.is_alive
        asked = await viewer.act({"act": "restart", "path": "/clerk"})
        with pytest.raises(ConfigurationError, match="was not spawned with supervise=restart"):
            await viewer.act({"confirm": asked["confirm"]})
        for wrong in ({"act": "delete", "path": "/clerk"}, {"act": "stop", "path": "/nobody"}, {"act": "stop"}):
            with pytest.raises(ConfigurationError, match="there is no such action, or the actor has ended"):
                await viewer.act(wrong)


async def test_nothing_can_be_changed_unless_it_is_allowed(autojump_clock: MockClock) -> None:
    async with viewed(1) as (system, viewer):
        with pytest.raises(ConfigurationError, match="actions are not allowed"):
            await viewer.act({"act": "stop", "path": "/office0"})
        assert (await viewer.look(View()))["actions"] == []
        assert system.lookup("/office0") is not None


@pytest.mark.parametrize(
    "wrong",
    [
        5,
        {"page": "secrets"},
        {"page": []},
        {"search": 1},
        {"search": "x" * 1001},
        {"open": "/a"},
        {"open": [1]},
        {"open": [], "node": "n" * 1001},
        {"open": ["/a"] * (MOST_OPEN + 1)},
        {"first": -1, "open": []},
        {"first": True, "open": []},
        {"first": 1.5, "open": []},
        {"count": MOST_ROWS + 1, "open": []},
        {"after": 1 << 53, "open": []},
        {"selected": {}, "open": []},
    ],
)
def test_what_is_no_view(wrong: object) -> None:
    with pytest.raises(DecodeError):
        View.from_json(wrong)


async def test_a_path_of_any_length_is_found(autojump_clock: MockClock) -> None:
    async with viewed() as (system, viewer):
        system.spawn(Office, 1, name="x" * 5000)
        await wait_all_tasks_blocked()  # its clerk is there
        path = f"/{'x' * 5000}"
        answer = await viewer.look(View.from_json({"open": [path], "selected": f"{path}/clerk0"}))
        assert answer["detail"]["path"] == f"{path}/clerk0"
        assert [row["path"] for row in answer["rows"]] == [path, f"{path}/clerk0"]


@pytest.mark.loopback
async def test_views_over_the_socket(tmp_path: Path) -> None:
    async with ActorSystem("town") as system, serve_console(system, tmp_path / "c", actions=True) as path:
        office = system.spawn(Office, 2, name="office")
        await wait_all_tasks_blocked()
        async with connect_console(path) as console:
            answer = await console.view(View(open=("/office",), count=2, first=1))
            assert [row["path"] for row in answer["rows"]] == ["/office/clerk0", "/office/clerk1"]
            assert (await console.act({"act": "stop", "path": "/nobody"}))["refused"].startswith(
                "there is no such action"
            )
            asked = await console.act({"act": "kill", "path": "/office"})
            assert (await console.act({"confirm": asked["confirm"]}))["done"] == "kill /office"
            await office.terminated()
            assert (await console.snapshot()).statistics.actors == 1
            with pytest.raises(CarrierError, match="count is 200 at most"):
                await console.view(View(count=1000))
        await wait_all_tasks_blocked()
        assert system.statistics().actors == 1


async def test_connections_tell_who_is_there_and_how_much_has_passed(autojump_clock: MockClock) -> None:
    async def answer(request: rsocket.Request) -> bytes:
        return request.data

    async with viewed() as (system, viewer):
        url = "rsocket+memory://desk"
        async with rsocket.serve(system, url, answer) as listener, rsocket.connect(system, listener.url) as peer:
            await peer.request_response(b"x" * 1000)
            answers = await viewer.look(View(page="connections"))
            found = {(row["subject"], row["report"].get("side")): row["report"] for row in answers["rows"]}
            assert found["listener", None] == {"url": listener.url, "clients": 1, "refused": 0}
            client, server = found["connection", "client"], found["connection", "server"]
            assert (client["protocol"], client["phase"], client["requests_sent"]) == ("rsocket", "OPEN", 1)
            assert (server["requests_received"], server["identity"]) == (1, "")
            assert client["bytes_sent"] == server["bytes_received"] > 1000
            assert (await viewer.look(View(page="connections", search="no such")))["rows"] == []
            (found_by_url,) = (await viewer.look(View(page="connections", search="CLIENTS: 1")))["rows"]
            assert found_by_url["subject"] == "listener"


async def test_journals_tell_how_far_groups_are_behind(tmp_path: Path) -> None:
    async with viewed() as (system, viewer):
        journal = system.spawn(Journal, tmp_path / "orders", name="orders")
        await journal.ask(DeclareGroup("billing"))
        await journal.ask(Append([Envelope(datetime.now(UTC), value=b"row")] * 3))
        await journal.ask(CommitGroup("billing", {0: 1}))
        (row,) = (await viewer.look(View(page="journals")))["rows"]
        report = row["report"]
        assert (row["path"], row["about"]) == ("/orders", str(tmp_path / "orders"))
        assert {name: report[name] for name in ("name", "partitions", "rows", "groups", "full", "rows_appended")} == {
            "name": "orders",
            "partitions": 1,
            "rows": 3,
            "groups": {"billing": 2},
            "full": False,
            "rows_appended": 3,
        }
        assert report["bytes_stored"] > 0


class Silent(DescribedActor[Work]):
    """One whose figures never come, and one that has none."""

    subject = "query"
    fails: bool

    @property
    def about(self) -> str:
        return "silent"

    async def report(self) -> dict[str, object]:
        if self.fails:
            raise ConfigurationError("none\x1b yet")
        await trio.sleep_forever()
        return {}

    @handles
    def work(self, m: Work) -> None:
        pass


async def test_figures_that_do_not_come_are_waited_for_one_second(autojump_clock: MockClock) -> None:
    async with viewed() as (system, viewer):
        system.spawn(Silent, False, name="silent")
        system.spawn(Silent, True, name="failing")
        began = trio.current_time()
        rows = (await viewer.look(View(page="queries")))["rows"]
        assert [(row["path"], row["error"]) for row in rows] == [
            ("/silent", "no answer within 1 s"),
            ("/failing", "none\\x1b yet"),
        ]
        assert trio.current_time() - began == pytest.approx(1.0)


async def no_node(name: str, actions: bool, tracebacks: bool) -> Watching:
    raise ConfigurationError(f"there is no node {name!r}")


async def test_nodes_are_rows(autojump_clock: MockClock) -> None:
    async def ask(limit: int) -> list[dict[str, Any]]:
        there = take_snapshot(system, limit=limit).to_json()
        return [
            {"name": "n0", "state": "up", "pid": 7, "host": "", "restarts": 0, "error": "", "snapshot": there},
            {"name": "n1", "state": "down", "pid": None, "host": "", "restarts": 2, "error": "gone", "snapshot": None},
        ]

    async with viewed(1) as (system, viewer):
        nodes_asked_by(system, ask, no_node)
        answer = await viewer.look(View(page="nodes"))
        assert [(row["name"], row["state"], row.get("statistics", {}).get("actors")) for row in answer["rows"]] == [
            ("n0", "up", 2),
            ("n1", "down", None),
        ]
        assert answer["total"] == 2
        away = await viewer.answer({"view": {"node": "n2", "open": []}})
        assert away == {"node": "n2", "away": "n2: there is no node 'n2'", "last": 0, "interval": 1.0}
