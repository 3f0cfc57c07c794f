# ruff: noqa: F811 - the fixture
"""Numbered questions, whose answers share a channel: the octets, against a peer that knows nothing but octets, and whole systems."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import RawMessage, envelopes
from levada.framework import Receiver, Sender, bounded, channel
from levada.framework.errors import ActorError, ActorStopped, AskTimeout, DecodeError, LevadaError, NoValue
from levada.transports.aqueduct import AqueductConfig, Headers

from .conftest import Do, settled
from .test_refs_wire import ME, Begin, Raw, Size, attachment, packed, raw, record  # noqa: F401 - a fixture

GREETED: dict[str, Headers] = {"headers": (envelopes.ANSWERS_GREETING,)}
FEW = 8
SAY = packed(record("tests.aqueduct.Do", "say", 5, None))


def number(value: int) -> bytes:
    return b"\xce" + value.to_bytes(4, "big")


def first(value: int) -> bytes:
    return bytes.fromhex("950dd5010000d5010101") + number(value)


def further(value: int) -> bytes:
    return b"\x93\x0e" + number(value)


def reply(value: int) -> bytes:
    return b"\x93\x0f" + number(value)


def withdrawal(value: int) -> bytes:
    return b"\x92\x10" + number(value)


async def open_answers(
    ends: Raw, value: int = 7, question: bytes = SAY
) -> tuple[Receiver[RawMessage], Sender[RawMessage]]:
    """Ask the first numbered question; return where answers come, and where withdrawals go."""
    there, answers = channel(RawMessage)
    withdrawals, taken = channel(RawMessage)
    await ends.to.send(RawMessage(first(value) + question, (there, taken)))
    return answers, withdrawals


# ---------------------------------------------------------------- the owner's side


@pytest.mark.rule("RF-51")
@pytest.mark.rule("RF-52")
@pytest.mark.rule("RF-53")
async def test_rf51_rf52_rf53_questions_and_answers(raw: Begin, autojump_clock: MockClock) -> None:
    """Kinds 13 and 14 with the number; kind 15 with the same number and the answer or the failure."""
    async with raw() as ends:
        answers, withdrawals = await open_answers(ends)
        assert (await answers.receive()).payload == reply(7) + b"\x92\x04\x05"
        await ends.to.send(RawMessage(further(2**32 - 1) + SAY))
        await ends.to.send(RawMessage(further(0) + b"\xc1"))
        failure = (await answers.receive()).payload  # it did not wait for the mailbox
        assert (await answers.receive()).payload == reply(2**32 - 1) + b"\x92\x04\x05"
        assert failure.startswith(reply(0) + b"\x94\x05")
        assert envelopes.read_failure(failure[7:])[0] == "ActorError"
        withdrawals.finish_nowait()
        answers.close()


@pytest.mark.rule("RF-51")
@pytest.mark.rule("RF-52")
@pytest.mark.parametrize(
    "octets", [further(1) + SAY, first(1), first(1) + SAY, b"\x93\x0e\xce\x00\x00", b"\x93\x0e\xcd\x00\x01"]
)
async def test_rf51_rf52_a_malformed_question_ends_its_channel(
    raw: Begin, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, octets: bytes
) -> None:
    """Without its channels, before the first, cut off, or with another form of number."""
    async with raw() as ends:
        await ends.to.send(RawMessage(octets))
        await wait_all_tasks_blocked()
        assert "an envelope for /clerk" in caplog.text
        assert ends.clerk.is_alive


@pytest.mark.rule("RF-51")
async def test_rf51_a_number_is_open_once(
    raw: Begin, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A second first question, or a number that is open, ends the channel."""
    for again in (further(7), first(8)):
        async with raw() as ends:
            await ends.do("sleep", 1)
            answers, withdrawals = await open_answers(ends)
            spare, mine = channel(RawMessage)
            mine2, spare2 = channel(RawMessage)
            await ends.to.send(RawMessage(again + SAY, (spare, spare2) if again == first(8) else ()))
            await trio.sleep(2)
            assert "an envelope for /clerk" in caplog.text
            assert (await answers.receive()).payload == reply(7) + b"\x92\x04\x05"
            with pytest.raises(StopAsyncIteration):  # the channel of the ref has ended
                await answers.__anext__()
            for sender in (withdrawals, mine2):
                sender.cancel()
            for receiver in (answers, mine):
                receiver.close()
        caplog.clear()


@pytest.mark.rule("RF-54")
async def test_rf54_a_withdrawn_question_is_never_begun(raw: Begin, autojump_clock: MockClock) -> None:
    """Kind 16 and the number, on the channel of its own; a number that is not open is ignored."""
    async with raw() as ends:
        await ends.do("sleep", 1)
        answers, withdrawals = await open_answers(ends)
        await ends.to.send(RawMessage(further(8) + packed(record("tests.aqueduct.Do", "fail", "never begun"))))
        await wait_all_tasks_blocked()
        for octets in (withdrawal(8), withdrawal(99)):
            await withdrawals.send(RawMessage(octets))
        await trio.sleep(2)
        assert ends.clerk.is_alive
        assert (await answers.receive()).payload == reply(7) + b"\x92\x04\x05"
        await withdrawals.send(RawMessage(b"nonsense"))
        await wait_all_tasks_blocked()
        assert ends.clerk.is_alive
        answers.close()
        withdrawals.cancel()


@pytest.mark.rule("RF-55")
async def test_rf55_answers_end_after_the_ref(raw: Begin, autojump_clock: MockClock) -> None:
    """The open questions are still answered; then the owner finishes."""
    async with raw() as ends:
        await ends.do("sleep", 1)
        answers, withdrawals = await open_answers(ends)
        ends.to.finish_nowait()
        assert [each.payload async for each in answers] == [reply(7) + b"\x92\x04\x05"]
        withdrawals.finish_nowait()


@pytest.mark.rule("RF-56")
async def test_rf56_without_the_holder_questions_are_withdrawn(raw: Begin, autojump_clock: MockClock) -> None:
    """The holder closes the answers: what has not begun never does."""
    async with raw() as ends:
        await ends.do("sleep", 1)
        answers, withdrawals = await open_answers(ends)
        await ends.to.send(RawMessage(further(8) + packed(record("tests.aqueduct.Do", "fail", "never begun"))))
        await wait_all_tasks_blocked()
        answers.close()
        await trio.sleep(2)
        assert ends.clerk.is_alive
        withdrawals.cancel()


@pytest.mark.parametrize("octets", [b"", b"\x92\x10\xce\x00", b"\x93\x0f\xce\x00\x00\x00\x01"])
def test_numbers_are_read_or_refused(octets: bytes) -> None:
    for read in (envelopes.read_withdrawal, lambda data: envelopes.read_number(envelopes.REPLY, data)):
        with pytest.raises(DecodeError):
            read(octets)


# ---------------------------------------------------------------- the holder's side


class Asked:
    """A ref of the peer's actor that was asked until its questions have numbers."""

    def __init__(self, ref: Any, brings: Receiver[RawMessage], question: RawMessage) -> None:
        self.ref = ref
        self.brings = brings
        self.question = question
        self.answers: Sender[RawMessage]
        self.withdrawals: Receiver[RawMessage]
        self.answers, self.withdrawals = question.attachments


async def ask_often(ends: Raw, nursery: trio.Nursery, into: list[Any], timeout: float = 60) -> Asked:
    """Ask an actor of the peer; the last question has number 0 and no answer yet."""
    sender, brings = channel(RawMessage)
    await ends.to.send(
        RawMessage(envelopes.TELL + packed(record("tests.aqueduct.Note", "n", [attachment(4, 0, ME)])), (sender,))
    )
    await wait_all_tasks_blocked()
    ref = ends.notes[-1].refs[0]

    for count in range(FEW):
        nursery.start_soon(ask_into, ref, into, timeout)
        got = await brings.receive()
        assert got.payload == envelopes.ASK + packed(record("tests.aqueduct.Size"))
        got.attachments[0].send(RawMessage(envelopes.ANSWER + packed(count)))
        await wait_all_tasks_blocked()
    nursery.start_soon(ask_into, ref, into, timeout)
    return Asked(ref, brings, await brings.receive())


@pytest.mark.rule("RF-50")
@pytest.mark.rule("RF-51")
@pytest.mark.rule("RF-52")
@pytest.mark.rule("RF-53")
async def test_rf50_to_rf53_numbered_questions(raw: Begin, autojump_clock: MockClock) -> None:
    """The ninth question brings the channels, the tenth uses them; answers come in any order."""
    async with raw(**GREETED) as ends, trio.open_nursery() as nursery:
        got: list[Any] = []
        asked = await ask_often(ends, nursery, got)
        assert asked.question.payload == first(0) + packed(record("tests.aqueduct.Size"))
        nursery.start_soon(ask_into, asked.ref, got)
        further_one = await asked.brings.receive()
        assert (further_one.payload, further_one.attachments) == (
            further(1) + packed(record("tests.aqueduct.Size")),
            (),
        )
        await asked.answers.send(RawMessage(reply(1) + envelopes.ANSWER + packed(11)))
        await wait_all_tasks_blocked()
        await asked.answers.send(RawMessage(reply(0) + envelopes.ANSWER + packed(10)))
        await asked.answers.send(RawMessage(reply(0) + envelopes.ANSWER + packed(12)))  # nobody waits for it
        await wait_all_tasks_blocked()
        assert got == [*range(FEW), 11, 10]
        assert asked.ref.is_alive
        asked.answers.finish_nowait()
        asked.brings.close()
        assert [each async for each in asked.withdrawals] == []


async def ask_into(ref: Any, got: list[Any], timeout: float = 5) -> None:
    try:
        got.append(await ref.ask(Size(), timeout=timeout))
    except LevadaError as error:
        got.append(type(error))


@pytest.mark.rule("RF-50")
async def test_rf50_a_peer_that_has_not_greeted_is_asked_with_oneshots(raw: Begin, autojump_clock: MockClock) -> None:
    async with raw() as ends, trio.open_nursery() as nursery:
        got: list[Any] = []
        sender, brings = channel(RawMessage)
        note = record("tests.aqueduct.Note", "n", [attachment(4, 0, ME)])
        await ends.to.send(RawMessage(envelopes.TELL + packed(note), (sender,)))
        await wait_all_tasks_blocked()
        for _ in range(FEW + 2):
            nursery.start_soon(ask_into, ends.notes[-1].refs[0], got)
            question = await brings.receive()
            assert question.payload == envelopes.ASK + packed(record("tests.aqueduct.Size"))
            question.attachments[0].send(RawMessage(envelopes.ANSWER + packed(1)))
        brings.close()


@pytest.mark.rule("RF-54")
async def test_rf54_a_question_out_of_time_is_withdrawn(raw: Begin, autojump_clock: MockClock) -> None:
    """Its answer is too late, and dropped."""
    async with raw(**GREETED) as ends, trio.open_nursery() as nursery:
        got: list[Any] = []
        asked = await ask_often(ends, nursery, got, timeout=5)
        assert (await asked.withdrawals.receive()).payload == withdrawal(0)
        assert got[-1] is AskTimeout
        await asked.answers.send(RawMessage(reply(0) + envelopes.ANSWER + packed(1)))
        nursery.start_soon(ask_into, asked.ref, got)
        await asked.brings.receive()
        await asked.answers.send(RawMessage(reply(1) + envelopes.ANSWER + packed(2)))
        await wait_all_tasks_blocked()
        assert got[FEW:] == [AskTimeout, 2]
        asked.answers.finish_nowait()
        asked.brings.close()


@pytest.mark.rule("RF-56")
@pytest.mark.parametrize("octets", [b"", b"\x92\x04\x05", reply(0), b"\x93\x0f\xcd\x00\x00\x92\x04\x05", None])
async def test_rf56_other_ends_mean_lost(raw: Begin, autojump_clock: MockClock, octets: bytes | None) -> None:
    """A malformed reply, or the end of the channel: the open question fails, and the ref is lost."""
    async with raw(**GREETED) as ends, trio.open_nursery() as nursery:
        got: list[Any] = []
        asked = await ask_often(ends, nursery, got)
        if octets is None:
            asked.answers.cancel()
        else:
            await asked.answers.send(RawMessage(octets))
        await settled()
        assert got[-1] is (NoValue if octets is None else ActorStopped)
        assert not asked.ref.is_alive
        if octets is not None:
            asked.answers.finish_nowait()
        asked.brings.close()


@pytest.mark.rule("RF-53")
async def test_rf53_an_answer_that_is_none_fails_its_question(raw: Begin, autojump_clock: MockClock) -> None:
    async with raw(**GREETED) as ends, trio.open_nursery() as nursery:
        got: list[Any] = []
        asked = await ask_often(ends, nursery, got)
        await asked.answers.send(RawMessage(reply(0) + b"\x92\x04\xa1x"))  # not an int
        await wait_all_tasks_blocked()
        assert got[-1] is DecodeError
        assert asked.ref.is_alive
        asked.answers.finish_nowait()
        asked.brings.close()


# ---------------------------------------------------------------- whole systems


async def test_handles_travel_in_numbered_questions_and_answers(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        for count in range(2 * FEW):
            assert await both.ref.ask(Do("say", count)) == count
        sender, receiver = channel(int)
        await both.ref.ask(Do("into", sender))
        assert [number async for number in receiver] == [0]
        assert [number async for number in await both.ref.ask(Do("stream", 5))] == [0, 1, 2, 3, 4]
        assert await both.ref.ask(Do("me")) is both.ref
        with pytest.raises(ActorError, match="refused: ValueError: no"):
            await both.ref.ask(Do("refuse", "no"))
        await settled()
        assert (
            len(both.client.core.halves) == len(both.server.core.halves) == 4
        )  # entrypoint, ref, answers, withdrawals


async def test_numbers_of_questions_begin_again(two: Any, autojump_clock: MockClock) -> None:
    """After 2^32 of them; a question that is still open keeps its number."""
    async with two() as both, trio.open_nursery() as nursery:
        await both.ref.ask(Do("say", 0))
        for _ in range(FEW):
            await both.ref.ask(Do("say", 0))
        both.ref.answers._asked = 2**32 - 2
        got: list[int] = []

        async def ask(value: int) -> None:
            got.append(await both.ref.ask(Do("say", value)))

        for value in range(4):
            nursery.start_soon(ask, value)
        await settled()
        assert sorted(got) == [0, 1, 2, 3]
        assert await both.ref.ask(Do("say", 4)) == 4


async def test_a_cut_fails_numbered_questions(two: Any, autojump_clock: MockClock) -> None:
    async with two() as both:
        for _ in range(FEW):
            await both.ref.ask(Do())
        got: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_into, both.ref, got)
            both.cut()
        assert got == [ActorStopped]
        assert not both.ref.is_alive


class Rounds(trio.abc.Instrument):
    """Counts the rounds of trio's loop."""

    count = 0

    def after_io_wait(self, timeout: float) -> None:
        self.count += 1


@pytest.mark.parametrize("askers", [40, 64])
async def test_of_many_answers_half_are_taken_before_this_side_writes_again(
    two: Any, autojump_clock: MockClock, askers: int
) -> None:
    """So that the other side has questions while this one is busy with answers."""
    async with two() as both:
        for _ in range(2 * FEW):
            await both.ref.ask(Do())
        rounds, took = Rounds(), Counter[int]()

        async def ask(number: int) -> None:
            assert await both.ref.ask(Do("say", number)) == number
            took[rounds.count] += 1

        trio.lowlevel.add_instrument(rounds)
        async with trio.open_nursery() as nursery:
            for number in range(askers):
                nursery.start_soon(ask, number)
        trio.lowlevel.remove_instrument(rounds)
        assert took.total() == askers
        assert max(took.values()) < askers  # in how many rounds, depends on the order in which trio runs tasks


async def test_answers_wait_for_a_slow_network_and_hold_up_nothing_else(two: Any, autojump_clock: MockClock) -> None:
    """More answers than fit into the window, to a mailbox that is always full."""
    async with (
        two(mailbox=bounded(2), core=AqueductConfig(window=4, mailbox=4)) as both,
        trio.open_nursery() as nursery,
    ):
        got: list[int] = []

        async def ask(number: int) -> None:
            got.append(await both.ref.ask(Do("say", number)))

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(300):
                    nursery.start_soon(ask, number)
        assert sorted(got) == [*range(300)]


async def test_a_connection_that_closes_in_order_waits_for_numbered_answers(
    two: Any, autojump_clock: MockClock
) -> None:
    async with two() as both, trio.open_nursery() as nursery:
        got: list[Any] = []
        for _ in range(FEW):
            await both.ref.ask(Do())

        async def ask() -> None:
            got.append(await both.ref.ask(Do("sleep", 2)))

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        await both.peer.aclose()
        assert got == ["slept"]
        assert 2 <= trio.current_time() - began < 3


async def test_refs_have_no_channel_for_answers_where_channels_are_few(two: Any, autojump_clock: MockClock) -> None:
    async with two(core=AqueductConfig(max_channels=4)) as both:
        for count in range(2 * FEW):
            assert await both.ref.ask(Do("say", count)) == count
            await settled()
        assert len(both.client.core.halves) == 2
