# ruff: noqa: F811 - the fixture
"""Messages that wait for room are bounded in bytes too, however few they are."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import RawMessage, envelopes
from levada.framework import Reply, Sender, bounded, channel, handles, oneshot
from levada.framework.channel import Outcome
from levada.framework.errors import AskTimeout, ChannelCancelled, MailboxFull
from levada.framework.router import Routing, group, pull, round_robin

from .conftest import Clerk, Do, Note, Parcel, Start, settled
from .test_refs_answers import further, open_answers, withdrawal
from .test_refs_wire import Begin, Raw, packed, raw, record  # noqa: F401 - a fixture

MIB = 1 << 20
MOST = 16
"""MiB that may wait on a channel."""
UNDER_WAY = 6
"""MiB that may be elsewhere: in the window of the protocol, and with the peer."""


def text(number: int) -> str:
    return f"{number:04}" + "x" * (MIB - 4)


@pytest.mark.rule("RF-15")
async def test_rf15_tells_of_large_messages_fill_the_window_by_their_bytes(two: Any, autojump_clock: MockClock) -> None:
    """`tell` raises, `send` waits; all arrive in order, and then the window takes as many messages as ever."""
    async with two(mailbox=bounded(1)) as both, trio.open_nursery() as nursery:
        both.cell.tell(Do("wait"))
        await settled()
        sent = 0
        with pytest.raises(
            MailboxFull, match=r"256 messages are on their way to /clerk at .*, or 16 MiB of them"
        ) as full:
            while sent < 256:
                both.ref.tell(text(sent))
                sent += 1
                await wait_all_tasks_blocked()
        assert MOST <= sent <= MOST + UNDER_WAY
        assert full.value.message == text(sent)
        with pytest.raises(MailboxFull):
            both.ref.tell("a small one")
        nursery.start_soon(both.ref.send, "last")
        await settled()
        assert both.cell.depth() <= 2
        both.clerk.gate.set()
        await settled()
        assert both.clerk.notes == [*map(text, range(sent)), "last"]
        for number in range(256):
            both.ref.tell(str(number))
        await settled()
        assert both.clerk.notes[sent + 1 :] == [*map(str, range(256))]


async def test_one_message_may_be_larger_than_what_may_wait(two: Any, autojump_clock: MockClock) -> None:
    """The largest that travels, with others before and behind it."""
    async with two() as both:
        size = 15 * MIB
        for each in ("a", bytes(size), "b", bytes(size), "c"):
            await both.ref.send(Do("say") if isinstance(each, bytes) else each)
            assert await both.ref.ask(Do("say", each), timeout=60) == each
        assert both.clerk.notes == ["a", "b", "c"]


@pytest.mark.parametrize("ordered", [True, False])
async def test_large_messages_of_a_channel_wait_for_room(
    start: Start, autojump_clock: MockClock, ordered: bool
) -> None:
    async with start() as ends:
        sender, receiver = channel(bytes)
        sender = sender if ordered else sender.unordered()
        await ends.peer.send(Parcel(receiver=receiver))
        got = await ends.got.receive()
        sent = 0
        with pytest.raises(trio.WouldBlock):
            while sent < 256:
                sender.send_nowait(bytes([sent]) * MIB)
                sent += 1
                await wait_all_tasks_blocked()
        assert MOST <= sent <= MOST + UNDER_WAY
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, bytes([sent]) * MIB)
            await settled()
            found = [await got.receiver.receive() for _ in range(sent + 1)]
        assert sorted(found) == [bytes([number]) * MIB for number in range(sent + 1)]
        assert not ordered or found == sorted(found)
        sender.finish_nowait()
        assert [rest async for rest in got.receiver] == []


async def test_large_messages_of_an_unreliable_channel_displace_older_ones(
    start: Start, autojump_clock: MockClock
) -> None:
    async with start() as ends:
        sender, receiver = channel(bytes)
        sender = sender.unreliable()
        await ends.peer.send(Parcel(receiver=receiver))
        got = await ends.got.receive()
        receipts = [await sender.send(bytes([number]) * MIB, receipt=True) for number in range(100)]
        dropped = [number for number, receipt in enumerate(receipts) if receipt.outcome is Outcome.NOT_PROCESSED]
        assert 100 - MOST - UNDER_WAY <= len(dropped) <= 101 - MOST  # each has some bytes more than its MiB
        assert max(dropped) <= 100 - MOST
        sender.finish_nowait()
        found = {each[0] async for each in got.receiver}
        assert found == {*range(100)} - {*dropped}


async def test_large_questions_wait_at_the_asker(two: Any, autojump_clock: MockClock) -> None:
    """The actor's side takes a few, until they are answered or withdrawn."""
    async with two() as both, trio.open_nursery() as nursery:
        answers: list[str] = []

        async def ask(number: int) -> None:
            answers.append((await both.ref.ask(Do("say", text(number)), timeout=None))[:4])

        both.cell.tell(Do("wait"))
        await settled()
        async with trio.open_nursery() as impatient:
            for number in range(40):
                (impatient if number % 2 else nursery).start_soon(ask, number)
            await settled()
            assert 8 <= both.cell.depth() <= 9
            impatient.cancel_scope.cancel()
        await settled()
        assert 8 <= both.cell.depth() <= 18  # those that were withdrawn leave the mailbox in their turn
        both.clerk.gate.set()
        await settled()
        assert sorted(answers) == [f"{number:04}" for number in range(0, 40, 2)]


async def test_a_question_that_waits_for_room_leaves_the_line_with_its_asker(
    two: Any, autojump_clock: MockClock
) -> None:
    """After a time-out, and after a cancellation."""
    async with two(mailbox=bounded(1)) as both:
        both.cell.tell(Do("wait"))
        await settled()
        with pytest.raises(MailboxFull):
            while True:
                both.ref.tell("x")
                await wait_all_tasks_blocked()
        waiting = both.ref.depth()
        with pytest.raises(AskTimeout):
            await both.ref.ask(Do("say", 1), timeout=5)
        with trio.move_on_after(5):
            await both.ref.ask(Do("say", 1), timeout=None)
        with trio.move_on_after(5):
            await both.ref.terminated()
        assert both.ref.depth() == waiting
        both.clerk.gate.set()


@pytest.mark.parametrize("routing", [pull, round_robin])
async def test_a_router_drops_the_handles_of_a_question_whose_asker_has_gone(
    two: Any, autojump_clock: MockClock, routing: Callable[[], Routing], caplog: pytest.LogCaptureFixture
) -> None:
    """The question came from another system, and no routee had room for it."""
    async with two(mailbox=bounded(1)) as both:
        there = both.there
        there.groups.join("g", both.cell)
        both.cell.tell(Note(refs=[there.spawn(group("g", routing=routing()))]))
        router = await both.ref.ask(Do("last"))
        both.cell.tell(Do("wait"))
        both.ref.tell("in the mailbox")
        await settled()
        sender, receiver = channel(int)
        with pytest.raises(AskTimeout):
            await router.ask(Do("say", sender), timeout=5)
        both.clerk.gate.set()
        with trio.fail_after(60), pytest.raises(ChannelCancelled):
            await receiver.receive()
        assert both.clerk.notes[1:] == ["in the mailbox"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_messages_that_cannot_be_decoded_are_few_lines(
    raw: Begin, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw(Clerk) as ends:
        for _ in range(300):
            await ends.to.send(RawMessage(envelopes.TELL + b"\xc1"))
        await trio.sleep(2)
        await ends.to.send(RawMessage(envelopes.TELL + b"\xc1"))
        await settled()
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert [text for text in said if "a message for /clerk cannot be decoded" not in text] == [
            "290 more unreadable messages were not logged"
        ]
        assert len(said) == 12


# ---------------------------------------------------------------- answers that are not taken


class Maker(Clerk):
    """Answers with a MiB: now, late, or when there is room for it."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.made = self.making = 0
        self.size = MIB
        self.scopes: list[trio.CancelScope] = []
        self.kept: list[Reply[bytes]] = []

    @handles
    async def do(self, m: Do) -> Any:
        if m.what == "now":
            return bytes(MIB)
        makers = {"make": self._make, "try": self._try, "late": self._make_late}
        self.start_soon(makers[m.what], self.reply_later())
        return None

    async def _try(self, reply: Reply[bytes]) -> None:
        """Make an answer, or keep the reply when this is cancelled."""
        with trio.CancelScope() as scope:
            self.scopes.append(scope)
            await self._make(reply)
        if scope.cancelled_caught:
            self.kept.append(reply)

    async def _make_late(self, reply: Reply[bytes]) -> None:
        await self.gate.wait()
        reply.send(bytes(self.size))

    async def _make(self, reply: Reply[bytes]) -> None:
        self.making += 1
        try:
            while reply.wanted:
                await reply.room()
                if reply.wanted and reply.has_room:
                    self.made += 1
                    reply.send(bytes(MIB))
        finally:
            self.making -= 1


def question(what: str) -> bytes:
    return packed(record("tests.aqueduct.Do", what, None, None))


Take = Callable[[], Awaitable[bytes]]


@asynccontextmanager
async def asked(ends: Raw, what: str, oneshots: bool = False) -> AsyncIterator[tuple[list[Take], Sender[RawMessage]]]:
    """Ask 100 questions as a peer that takes no answers; yield functions that take one each, and where withdrawals go."""
    shared, withdrawals = await open_answers(ends, 0, question(what))

    async def take() -> bytes:
        return (await shared.receive()).payload.partition(b"\x0f\xce")[2][4:]

    takers: list[Take] = [take] * 100
    if oneshots:
        takers[1:] = [await one_more(ends, what) for _ in range(99)]
    else:
        for each in range(1, 100):
            await ends.to.send(RawMessage(further(each) + question(what)))
    await settled()
    yield takers, withdrawals
    withdrawals.cancel()
    shared.close()


async def one_more(ends: Raw, what: str) -> Take:
    reply, answer = oneshot(RawMessage)
    await ends.to.send(RawMessage(envelopes.ASK + question(what), (reply,)))

    async def take() -> bytes:
        return (await answer).payload

    return take


def is_failure(payload: bytes) -> bool:
    return len(payload) < MIB


@pytest.mark.parametrize("oneshots", [False, True])
async def test_answers_that_nobody_takes_are_bounded(raw: Begin, autojump_clock: MockClock, oneshots: bool) -> None:
    """All come at once: 64 MiB of them wait, and the others are failures that say so."""
    async with raw(Maker) as ends, asked(ends, "late", oneshots) as (takers, _):
        ends.clerk._actor.gate.set()
        await settled()
        with trio.fail_after(1000):
            got = [await take() for take in takers]
        failures = [envelopes.read_failure(each)[:2] for each in got if is_failure(each)]
        assert 101 - 64 - UNDER_WAY <= len(failures) <= 101 - 64  # each has some bytes more than its MiB
        assert {kind for kind, _ in failures} == {"ActorError"}
        assert "wait for this system to take them, at most 67108864 (max_answer_bytes); ask fewer" in failures[0][1]
        assert len(await ends.ask(question("now"))) > MIB


@pytest.mark.parametrize("size", [8192, 4000])
async def test_answers_of_middle_size_count_too(raw: Begin, autojump_clock: MockClock, size: int) -> None:
    """Answers of 4 KiB are sent in any case: 10,000 of them, the most questions, are as much as the limit."""
    async with raw(Maker, max_answer_bytes=16 * 8192) as ends, asked(ends, "late", oneshots=True) as (takers, _):
        ends.clerk._actor.size = size
        ends.clerk._actor.gate.set()
        await settled()
        with trio.fail_after(1000):
            got = [await take() for take in takers]
        failed = sum(len(each) < size for each in got)
        # Some may have arrived before the last ones are made.
        assert 0 < failed <= 101 - 16 if size == 8192 else failed == 0


async def test_an_actor_makes_large_answers_as_they_are_taken(raw: Begin, autojump_clock: MockClock) -> None:
    async with raw(Maker) as ends, asked(ends, "make") as (takers, _):
        maker = ends.clerk._actor
        assert 8 <= maker.made <= 8 + UNDER_WAY
        with trio.fail_after(10_000):
            for number, take in enumerate(takers):
                assert not is_failure(await take())
                await settled()
                assert maker.made <= number + 1 + 8 + UNDER_WAY
        assert (maker.made, maker.making) == (100, 0)


async def test_the_turn_of_one_who_is_cancelled_goes_to_the_next(raw: Begin, autojump_clock: MockClock) -> None:
    """Those before it keep their replies, so nothing else gives their turns back."""
    async with raw(Maker) as ends, asked(ends, "try") as (takers, _):
        maker = ends.clerk._actor
        for scope in maker.scopes[:-20]:
            scope.cancel()
        await settled()
        left = 100 - len(maker.kept)
        assert maker.made < left < 40
        with trio.fail_after(10_000):
            for _ in range(left):
                assert not is_failure(await takers[0]())
        assert (maker.made, maker.making) == (left, 0)


@pytest.mark.parametrize("how", ["withdrawn", "aborted"])
async def test_who_waits_to_make_an_answer_learns_that_its_asker_has_gone(
    raw: Begin, autojump_clock: MockClock, how: str
) -> None:
    """Its questions are withdrawn, or its connection has ended. An asker in the same system has room at any time."""
    async with raw(Maker) as ends, asked(ends, "make") as (_, withdrawals):
        maker = ends.clerk._actor
        made = maker.made
        assert maker.making == 100 - made > 0
        assert await ends.clerk.ask(Do("make"), timeout=60) == bytes(MIB)
        if how == "aborted":
            ends.peer.abort()
        else:
            for each in range(100):
                await withdrawals.send(RawMessage(withdrawal(each)))
        await settled()
        assert (maker.made, maker.making) == (made + 1, 0)
