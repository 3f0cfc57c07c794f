"""A web server's access log, summed up by actors.

::

    reader --Line--> pool of parsers ==status==> tally       -->  sends into a bounded mailbox, waiting for room
                           |         ===day====> tally       ==>  sends into a channel, waiting for room
                           |
                           +--Damaged--> clerk

Nothing in it can pile up: the pool's mailbox holds `QUEUE` lines, a channel its window, and whoever is faster waits.  The parsers
*pull*: each takes the next line when it is done with the last.  They share one thread, so the pool makes nothing faster here; it shows
the form that a program has whose parsers wait for something (a database, a look-up).
"""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime
from importlib.resources import files

import attrs
import trio

from levada.framework import Actor, ActorSystem, Asks, Reason, Receiver, Ref, Sender, bounded, channel, handles, message
from levada.framework.router import pool, pull

PARSERS = 4
QUEUE = 64

# Apache's combined format: client, identity, user, [time], "request", status, size, "referrer", "user agent".
_HEAD = re.compile(r"\S+ \S+ \S+ \[([^\]]+)\] ")
_REST = re.compile(r'"(?:[^"\\]|\\.)*" (\d{3}) (?:\d+|-) "(?:[^"\\]|\\.)*" "(?:[^"\\]|\\.)*"')


@message
class Line:
    """One line of the log."""

    number: int
    text: str


@message
class Damaged:
    """A line that is not in the format."""

    number: int
    why: str


@message
class Damages(Asks[dict[int, str]]):
    """Which lines were damaged, and why."""


@message
class Counts(Asks[dict[str, int]]):
    """What was counted; answered when the channel has ended."""


class Parser(Actor[Line]):
    """Finds out the day and the status of a line."""

    statuses: Sender[str]
    days: Sender[str]
    clerk: Ref[Damaged | Damages]

    @handles
    async def line(self, m: Line) -> None:
        """Send on what is in the line; of a damaged one, what can still be read."""
        head = _HEAD.match(m.text)
        if head is None:
            self.clerk.tell(Damaged(m.number, "does not begin as a line of an access log"))
            return
        when = datetime.strptime(head[1], "%d/%b/%Y:%H:%M:%S %z")
        await self.days.send(when.date().isoformat())
        rest = _REST.fullmatch(m.text, head.end())
        if rest is None:
            quotes = m.text.count('"')
            self.clerk.tell(
                Damaged(m.number, f"{quotes} quotation marks, wanted 6" if quotes < 6 else "not in the format")
            )
            return
        await self.statuses.send(rest[1])

    def stopping(self, reason: Reason) -> None:
        """Finish in order; after a failure the channels are cancelled already."""
        self.statuses.finish_nowait()
        self.days.finish_nowait()


class Tally(Actor[Counts]):
    """Counts what comes through a channel, in a task of its own."""

    items: Receiver[str]

    def started(self) -> None:
        """Begin to count."""
        self.counts: Counter[str] = Counter()
        self.over = trio.Event()
        self.start_soon(self.count)

    async def count(self) -> None:
        """Count until the channel ends."""
        async for item in self.items:
            self.counts[item] += 1
        self.over.set()

    @handles
    async def report(self, m: Counts) -> dict[str, int]:
        """Answer when everything is counted."""
        await self.over.wait()
        return dict(self.counts)


class Clerk(Actor[Damaged | Damages]):
    """Keeps the list of damaged lines."""

    def started(self) -> None:
        """Begin with an empty list."""
        self.list: dict[int, str] = {}

    @handles
    def damaged(self, m: Damaged) -> None:
        """Take one down."""
        self.list[m.number] = m.why

    @handles
    def damages(self, m: Damages) -> dict[int, str]:
        """Give the list."""
        return self.list


@attrs.frozen
class Summary:
    """What came out."""

    lines: int
    statuses: Mapping[str, int]
    """Lines by HTTP status; the damaged are missing here."""
    days: Mapping[date, int]
    """Lines by day, in the server's time."""
    damaged: Mapping[int, str]
    """Number of each damaged line, and what is wrong with it."""


KNOWN = Summary(
    lines=10_000,
    statuses={"200": 9125, "304": 445, "404": 213, "301": 164, "206": 45, "500": 3, "403": 2, "416": 2},
    days={date(2015, 5, 17): 1632, date(2015, 5, 18): 2893, date(2015, 5, 19): 2896, date(2015, 5, 20): 2579},
    damaged={8899: "5 quotation marks, wanted 6"},
)
"""What has to come out for the log that belongs to the demo, see ``data/README.md``."""


def log_lines() -> Iterator[str]:
    """Read the log that belongs to the demo."""
    with (
        (files("levada.actors.demo") / "data" / "apache-access-2015.log.gz").open("rb") as packed,
        gzip.open(packed, "rt", encoding="utf-8") as log,
    ):
        for line in log:
            yield line.rstrip("\n")


async def summarise(lines: Iterable[str]) -> Summary:
    """Let the actors sum up a log."""
    statuses, by_status = channel(str, name="statuses")
    days, by_day = channel(str, name="days")
    # The channels outlive the actors: left early, by Ctrl-C say, whoever still works on a line can still send what is in it.
    with statuses, days:
        async with ActorSystem("demo") as system:
            status_tally = system.spawn(Tally, by_status, name="statuses")
            day_tally = system.spawn(Tally, by_day, name="days")
            clerk = system.spawn(Clerk, name="clerk")
            # Channels end with the actors that hold their handles, so each parser gets senders of its own.
            crew = pool(lambda: Parser(statuses.clone(), days.clone(), clerk), size=PARSERS, routing=pull())
            parsers = system.spawn(crew, name="parsers", mailbox=bounded(QUEUE))
            number = 0
            for number, text in enumerate(lines, 1):
                await parsers.send(Line(number, text))
            # Stopping comes after what is queued: when the pool has ended, every line is parsed and nothing more will be sent.
            parsers.stop()
            await parsers.terminated()
            statuses.finish_nowait()
            days.finish_nowait()
            return Summary(
                number,
                await status_tally.ask(Counts()),
                {date.fromisoformat(day): count for day, count in (await day_tally.ask(Counts())).items()},
                await clerk.ask(Damages()),
            )


async def main() -> None:
    summary = await summarise(log_lines())
    for status, count in sorted(summary.statuses.items(), key=lambda item: -item[1]):
        print(f"{status}  {count:6,}")
    for day, count in sorted(summary.days.items()):
        print(f"{day}  {count:6,}")
    for number, why in summary.damaged.items():
        print(f"damaged, and reported: line {number:,}, {why}")
    assert summary == KNOWN
    print("verified: all counts match the known facts about this log")


if __name__ == "__main__":
    trio.run(main)
