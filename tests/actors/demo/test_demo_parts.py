"""The parts of the demo that need no Spark: what is shipped and how fast, what subscribers pass on, what is drawn."""

from __future__ import annotations

import datetime as dt
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import trio

for needed in ("pyarrow", "pyspark"):
    pytest.importorskip(needed)

from levada.actors import aqueduct, rsocket  # noqa: E402
from levada.actors.demo.ingest import Pace  # noqa: E402
from levada.actors.demo.known import KNOWN, differences, mistakes  # noqa: E402
from levada.actors.demo.live import Feed, FeedDesk, FeedSubscriber, Results  # noqa: E402
from levada.actors.demo.parsing import source_of  # noqa: E402
from levada.actors.demo.pipeline import Pipeline  # noqa: E402
from levada.actors.demo.report import Facts, report  # noqa: E402
from levada.actors.demo.rows import Anomaly, Attack, Count, Follow, RateRow  # noqa: E402
from levada.actors.spark.bridge import Delivery, RowKey  # noqa: E402
from levada.actors.spark.query import AwaitAvailable, GetProgress, QueryFailed, QueryProgress  # noqa: E402
from levada.framework import Actor, ActorSystem, Sender, channel, handles  # noqa: E402
from levada.framework.errors import ChannelCancelled  # noqa: E402

MORNING = dt.datetime(2015, 5, 17, 10, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ('1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1 "-" "unfinished', "access"),
        ("Apr  1 18:22:30 host sshd[22958]: Disconnecting", "auth"),
        ("[2016-12-19 18:01:53,612] TRACE [Controller 0]: checking\n\tat x", "kafka"),
        ("java.io.IOException: gone", "other"),
        ("", "other"),
    ],
)
def test_a_line_is_known_by_its_beginning(line: str, source: str) -> None:
    assert source_of(line) == source


class Taker:
    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []

    async def deliver(self, events: list[dict[str, Any]]) -> None:
        self.calls.append((trio.current_time(), len(events)))


async def test_a_pace_is_kept_by_all_files_together(autojump_clock: trio.testing.MockClock) -> None:
    """Twenty lines a second, in two parts a tenth of a second apart, whoever they come from."""
    taker, pace = Taker(), Pace(20.0)
    lines: list[dict[str, Any]] = [{"line": "x"}] * 10
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pace.deliver, taker.deliver, lines)
        nursery.start_soon(pace.deliver, taker.deliver, lines)
    assert [size for _, size in taker.calls] == [2] * 10
    assert [time for time, _ in taker.calls] == pytest.approx([part / 10 for part in range(10)])
    assert pace.shipped == 20


async def test_without_a_pace_all_goes_at_once() -> None:
    taker, pace = Taker(), Pace()
    await pace.deliver(taker.deliver, [{"line": "x"}] * 1000)
    assert [size for _, size in taker.calls] == [1000]


async def test_a_row_that_comes_again_is_passed_on_once() -> None:
    feed = Feed()
    async with ActorSystem() as system:
        subscriber = system.spawn(FeedSubscriber, feed)
        for partition, offset in ((0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (0, 2)):
            row = Count("access", "status", "200", offset)
            await subscriber.ask(Delivery(row, RowKey("e", partition, offset)))
    async with aclosing(feed.follow()) as follower:
        rows = [await anext(follower) for _ in range(4)]
    assert rows == [Count("access", "status", "200", count) for count in (0, 1, 0, 2)]
    assert feed.count == 4


async def test_who_follows_gets_what_was_and_what_comes_and_misses_what_was_forgotten() -> None:
    feed, got = Feed(kept=3), list[Any]()

    async def follow() -> None:
        async for row in feed.follow():
            got.append(row)

    rows = [Count("access", "lines", "", number) for number in range(6)]
    for row in rows[:5]:
        feed.put(row)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        assert got == rows[2:5]
        feed.put(rows[5])
        await trio.testing.wait_all_tasks_blocked()
        assert got[3:] == rows[5:]
        nursery.cancel_scope.cancel()


async def test_the_same_comes_over_rsocket_and_over_aqueduct() -> None:
    desk, over_rsocket, over_aqueduct = FeedDesk(), Results(), Results()
    east = MORNING.astimezone(dt.timezone(dt.timedelta(hours=2)))
    desk.feeds["counts"].put(Count("access", "lines", "", 1))
    desk.feeds["counts"].put(Count("access", "lines", "", 2))
    desk.feeds["rates"].put(RateRow(east, 4, 1, 0, 9))
    desk.feeds["attacks"].put(Attack("192.0.2.1", MORNING, MORNING, 3, 2))
    desk.feeds["anomalies"].put(Anomaly("GET <n>", MORNING, 9, 1.5, 5.0))
    wanted = {"counts": 2, "rates": 1, "attacks": 1, "anomalies": 1}
    async with (
        ActorSystem() as system,
        rsocket.serve(system, "rsocket+memory://door", desk.answer) as door,
        rsocket.connect(system, door.url) as peer,
        aqueduct.serve(system, "aqueduct+memory://desk", desk.send, message_type=Follow) as publisher,
        aqueduct.connect(system, publisher.url, Follow) as subscriber,
        trio.open_nursery() as nursery,
    ):
        for name in wanted:
            nursery.start_soon(over_rsocket.follow, peer, name)
            nursery.start_soon(over_aqueduct.receive, subscriber, name)
        await over_rsocket.reach(wanted)
        await over_aqueduct.reach(wanted)
        nursery.cancel_scope.cancel()
    assert over_aqueduct.counts == {("access", "lines", ""): 2}
    assert differences(over_rsocket, over_aqueduct) == []
    over_aqueduct.attacks.clear()
    assert differences(over_rsocket, over_aqueduct) == ["attacks over Aqueduct differ from those over RSocket"]


async def test_a_channel_for_no_mailbox_is_cancelled_and_one_that_is_closed_is_let_go(
    autojump_clock: trio.testing.MockClock,
) -> None:
    desk, config = FeedDesk(), aqueduct.PeerConfig(core=aqueduct.AqueductConfig(drain_timeout=1000.0))
    async with (
        ActorSystem() as system,
        aqueduct.serve(system, "aqueduct+memory://desk", desk.send, message_type=Follow, config=config) as publisher,
        aqueduct.connect(system, publisher.url, Follow, config=config) as peer,
    ):
        sender: Sender[Any]
        sender, rows = channel(RateRow)
        await peer.send(Follow("prices", sender))
        with pytest.raises(ChannelCancelled):
            await rows.receive()
        sender, rows = channel(RateRow)
        await peer.send(Follow("rates", sender))
        desk.feeds["rates"].put(RateRow(MORNING, 4, 1, 0, 9))
        assert await rows.receive() == RateRow(MORNING, 4, 1, 0, 9)
        rows.close()
    # Nothing more comes that could not be sent, and nobody waits for that.
    assert trio.current_time() < 100


def taken(rows: list[Count]) -> Results:
    results = Results()
    for row in rows:
        values = {"source": row.source, "kind": row.kind, "key": row.key, "count": row.count}
        results.take("counts", values)
    return results


async def test_later_counts_replace_earlier_ones_and_a_difference_is_named() -> None:
    right = [Count(*names, key, count) for names, counts in KNOWN.items() for key, count in counts.items()]
    results = taken([Count("access", "lines", "", 3), *right])
    assert mistakes(results) == []
    assert results.count("access", "lines") == 10_000
    results = taken([*right, Count("access", "lines", "", 9_999)])
    assert mistakes(results) == ["access, lines: wanted {'': 10000}, got {'': 9999}"]


async def test_reaching_waits_for_every_route(autojump_clock: trio.testing.MockClock) -> None:
    results = Results()
    row = RateRow(MORNING, 1, 0, 0, 0)
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(1)
            results.take("rates", {"start": row.start.isoformat()})

        nursery.start_soon(later)
        await results.reach({"rates": 1, "counts": 0})
        assert trio.current_time() == pytest.approx(1)


async def test_a_report_draws_and_escapes() -> None:
    results = taken(
        [
            Count("access", "lines", "", 3),
            Count("access", "status", "200", 2),
            Count("access", "template", "GET /<script>alert(1)</script>", 1),
        ]
    )
    rate = {"start": MORNING.isoformat(), "requests": 4, "client_errors": 1, "server_errors": 0, "bytes_sent": 9}
    results.take("rates", rate)
    facts = Facts(seconds=1.0, batches=2, shipped=3, files=["a&b.log"], mistakes=["x < y"])
    text = report(results, facts)
    assert "<script" not in text
    assert "GET /&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "a&amp;b.log" in text
    assert "Wrong: x &lt; y" in text
    right = report(results, Facts(seconds=1.0, batches=2, shipped=3, files=["a.log"], mistakes=[]))
    assert "Verified: all counts match the known facts about these logs." in right
    assert '<rect class="b"' in text  # the one in four that was an error
    assert "<title>2015-05-17 10:00: 25 %</title>" in text


async def test_the_scale_of_a_chart_has_round_numbers_and_its_colours_a_legend() -> None:
    results = taken([Count("access", "lines", "", 3)])
    for hour, (requests, client, server) in enumerate([(136, 10, 2), (68, 0, 0), (5, 5, 0)]):
        start = (MORNING + dt.timedelta(hours=hour)).isoformat()
        results.take(
            "rates",
            {"start": start, "requests": requests, "client_errors": client, "server_errors": server, "bytes_sent": 9},
        )
    text = report(results, Facts(seconds=1.0, batches=2, shipped=3, files=["a.log"], mistakes=None))
    by_hour, share = text.split('<div class="plot">')[1:3]
    assert re.findall(r"<span>([\d,.% ]+)</span></div>", by_hour) == ["0", "50", "100", "150"]
    assert re.findall(r"<span>([\d,.% ]+)</span></div>", share) == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert re.findall(r"<i class=\"(.)\"></i>([^<]+)", text) == [
        ("a", "answered"),
        ("b", "client errors (4xx)"),
        ("c", "server errors (5xx)"),
    ]
    # The first and the last column have their label, the last one's inside the page.
    labels = re.findall(r"<span(?: class=\w+)?>(2015[^<]+)</span>", by_hour.partition('<div class="under">')[2])
    assert labels == ["2015-05-17 10:00", "2015-05-17 11:00", "2015-05-17 12:00"]


class Failing(Actor[AwaitAvailable | GetProgress]):
    """A query on a disk that is full."""

    @handles
    def wait(self, m: AwaitAvailable) -> None:
        raise QueryFailed("IOException: no room on the disk\nAn error occurred while calling o1626.start.")

    @handles
    def progress(self, m: GetProgress) -> QueryProgress | None:
        return None


async def test_a_query_that_fails_again_and_again_ends_the_demo_with_its_cause_and_the_log(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """In one line: it is what the command line shows."""
    async with ActorSystem() as system:
        run = Pipeline(log=Path("demo-output/spark.log"))
        run.queries["access"] = system.spawn(Failing, name="access")
        run.shipped.set()
        with pytest.raises(BaseExceptionGroup) as group:
            await run.finish()
    [error] = group.value.exceptions
    assert isinstance(error, QueryFailed)
    assert str(error) == (
        "query access has failed for good: IOException: no room on the disk; Spark's log is demo-output/spark.log"
    )
