"""The octets of work for remote routees, against a peer that knows nothing but octets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import RawMessage, envelopes
from levada.framework import Failed, OneshotReceiver, Receiver, TerminalState, channel, oneshot
from levada.framework.errors import AskTimeout, ConfigurationError, DecodeError, LevadaError, NoValue
from levada.framework.events import DeadLetter
from levada.framework.router import group, least_mailbox, pull, round_robin
from levada.transports.aqueduct import Headers

from .test_refs_routers import Letters
from .test_refs_wire import SENT, VECTORS, Begin, Raw, Size, attachment, packed, raw, record  # noqa: F401 - a fixture

GREETED: dict[str, Headers] = {"headers": (envelopes.WORK_GREETING,)}
DONE = bytes.fromhex(VECTORS["reports"]["done"])
OPEN: list[Any] = []
"""Oneshots that the peer keeps."""
RETURNED = bytes.fromhex(VECTORS["reports"]["returned"])


@pytest.fixture(autouse=True)
def nothing_is_forgotten() -> Iterator[None]:
    """Finish the oneshots that the peer left open."""
    yield
    while OPEN:
        OPEN.pop().finish_nowait()


async def meet(ends: Raw, number: int = 0) -> Receiver[RawMessage]:
    """Send a ref of an actor of the peer's, which the actor notes; return what its channel brings."""
    sender, receiver = channel(RawMessage)
    identity = attachment(4, 0, bytes.fromhex(VECTORS["identities"][number]["hex"]))
    await ends.to.send(RawMessage(envelopes.TELL + packed(record("tests.aqueduct.Note", "n", [identity])), (sender,)))
    await wait_all_tasks_blocked()
    return receiver


async def begin(ends: Raw, routing: Any = None) -> tuple[Any, Receiver[RawMessage], list[Any]]:
    """Spawn a router whose only routee is an actor of the peer's; return it, what the routee's channel brings, and the dead letters."""
    letters: list[Any] = []
    ends.system.events.subscribe(DeadLetter, ends.system.spawn(Letters, letters))
    receiver = await meet(ends)
    router = ends.system.spawn(group("g", routing=routing or pull()))
    await wait_all_tasks_blocked()
    ends.system.groups.join("g", ends.notes[-1].refs[0])
    await wait_all_tasks_blocked()
    watch = await receiver.receive()
    assert watch.payload == envelopes.WATCH
    OPEN.extend(watch.attachments)
    return router, receiver, letters


async def work(ends: Raw, message: bytes, *more: Any) -> OneshotReceiver[RawMessage]:
    """Give the actor work; return where its report comes."""
    report, reported = oneshot(RawMessage)
    await ends.to.send(RawMessage(envelopes.WORK + message, (report, *more)))
    return reported


def do(what: str, value: Any = None) -> bytes:
    return packed(record("tests.aqueduct.Do", what, value, None))


# ---------------------------------------------------------------- vectors


@pytest.mark.rule("RF-43")
@pytest.mark.rule("RF-44")
def test_rf43_rf44_reports() -> None:
    """Done is 92 0a c3, returned is 92 0a c2."""
    assert (envelopes.DONE, envelopes.RETURNED) == (DONE, RETURNED)
    assert [envelopes.read_done(octets) for octets in (DONE, RETURNED)] == [True, False]


@pytest.mark.rule("RF-45")
@pytest.mark.parametrize("octets", VECTORS["reports"]["bad"])
def test_rf45_bad_reports(octets: str) -> None:
    """Anything else is refused."""
    with pytest.raises(DecodeError):
        envelopes.read_done(bytes.fromhex(octets))


@pytest.mark.rule("RF-47")
@pytest.mark.parametrize("vector", VECTORS["loads"], ids=lambda vector: vector["waiting"])
def test_rf47_loads(vector: dict[str, Any]) -> None:
    """92 0c, and a number."""
    octets = bytes.fromhex(vector["hex"])
    assert envelopes.read_load(octets) == vector["waiting"]
    assert envelopes.encode_load(vector["waiting"]) == octets
    assert envelopes.read_load(envelopes.encode_load(2**40)) == 2**32 - 1


@pytest.mark.rule("RF-47")
@pytest.mark.parametrize("octets", VECTORS["bad_loads"])
def test_rf47_bad_loads(octets: str) -> None:
    """Anything else is refused."""
    with pytest.raises(DecodeError):
        envelopes.read_load(bytes.fromhex(octets))


# ---------------------------------------------------------------- what this side writes


@pytest.mark.rule("RF-40")
async def test_rf40_an_actor_of_a_peer_that_has_not_greeted_cannot_pull(
    raw: Begin,  # noqa: F811
    autojump_clock: MockClock,
) -> None:
    """It is refused when it joins, whichever of the two comes first; other routings take it."""
    async with raw() as ends:
        receiver = await meet(ends)
        ref = ends.notes[-1].refs[0]
        ends.system.spawn(group("g", routing=pull()))
        await wait_all_tasks_blocked()
        with pytest.raises(ConfigurationError, match=r"does not report finished work: .* use round_robin\(\)"):
            ends.system.groups.join("g", ref)
        assert ends.system.groups.members("g") == []
        ends.system.groups.join("other", ref)
        late = ends.system.spawn(group("other", routing=pull()))
        reason = await late.terminated()
        assert isinstance(reason, Failed)
        assert isinstance(reason.error, ConfigurationError)
        for routing in (round_robin(), least_mailbox()):
            ends.system.spawn(group("other", routing=routing)).tell("hi")
        got = [await receiver.receive() for _ in range(3)]
        OPEN.extend(got[0].attachments)
        assert [message.payload for message in got] == [envelopes.WATCH, *[envelopes.TELL + packed("hi")] * 2]
        receiver.close()


@pytest.mark.rule("RF-41")
@pytest.mark.rule("RF-43")
async def test_rf41_rf43_work_and_done(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """The next message comes when the first is done."""
    async with raw(**GREETED) as ends:
        router, receiver, letters = await begin(ends)
        router.tell("hi")
        router.tell("there")
        got = await receiver.receive()
        assert got.payload.hex() == SENT["work"]["hex"]
        await wait_all_tasks_blocked()
        with pytest.raises(trio.WouldBlock):
            receiver.receive_nowait()
        got.attachments[0].send(RawMessage(DONE))
        again = await receiver.receive()
        assert again.payload == envelopes.WORK + packed("there")
        OPEN.extend(again.attachments)
        assert letters == []
        receiver.close()


@pytest.mark.rule("RF-42")
@pytest.mark.rule("RF-44")
async def test_rf42_rf44_work_ask_and_returned(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """A returned question goes to another routee, and the answer's oneshot does not count."""
    async with raw(**GREETED) as ends:
        router, receiver, _ = await begin(ends)
        answers: list[int] = []

        async def ask() -> None:
            answers.append(await router.ask(Size(), timeout=None))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            got = await receiver.receive()
            assert got.payload.hex() == SENT["work-ask"]["hex"]
            report, answer = got.attachments
            answer.finish_nowait()
            await wait_all_tasks_blocked()
            report.send(RawMessage(RETURNED))
            await wait_all_tasks_blocked()
            their_receiver = await meet(ends, 1)
            ends.system.groups.join("g", ends.notes[-1].refs[0])
            first, again = await their_receiver.receive(), await their_receiver.receive()
            OPEN.extend(first.attachments)
            assert (first.payload, again.payload) == (envelopes.WATCH, got.payload)
            again.attachments[1].send(RawMessage(envelopes.ANSWER + packed(1234)))
            again.attachments[0].send(RawMessage(DONE))
        assert answers == [1234]
        receiver.close()
        their_receiver.close()


@pytest.mark.rule("RF-43")
async def test_rf43_a_question_that_is_done_without_an_answer_has_none(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """Whichever of the two comes first."""
    async with raw(**GREETED) as ends:
        router, receiver, _ = await begin(ends)
        for order in (0, 1):

            async def ask() -> None:
                with pytest.raises(NoValue):
                    await router.ask(Size(), timeout=None)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                report, answer = (await receiver.receive()).attachments
                for step in (order, 1 - order):
                    await wait_all_tasks_blocked()
                    answer.finish_nowait() if step else report.send(RawMessage(DONE))
        receiver.close()


@pytest.mark.rule("RF-45")
@pytest.mark.parametrize("how", [*VECTORS["reports"]["bad"], "finished", "cancelled"])
async def test_rf45_without_a_report_the_message_and_the_ref_are_lost(
    raw: Begin,  # noqa: F811
    autojump_clock: MockClock,
    how: str,
) -> None:
    """A dead letter says so; the connection goes on."""
    async with raw(**GREETED) as ends:
        router, receiver, letters = await begin(ends)
        router.tell("hi")
        (report,) = (await receiver.receive()).attachments
        if how == "finished":
            report.finish_nowait()
        elif how == "cancelled":
            report.cancel()
        else:
            report.send(RawMessage(bytes.fromhex(how)))
        await wait_all_tasks_blocked()
        await trio.sleep(1)
        await trio.sleep(20)
        assert letters == [("hi", "lost")]
        assert ends.system.groups.members("g") == []
        assert router.is_alive
        assert not ends.peer.closed
        receiver.close()


@pytest.mark.rule("RF-47")
async def test_rf47_least_mailbox_asks_for_the_load(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """When it routes, and not more often than every 50 ms; a bad answer is the end of the ref."""
    async with raw(**GREETED) as ends:
        router, receiver, _ = await begin(ends, least_mailbox())
        router.tell("hi")
        got = await receiver.receive()
        assert got.payload.hex() == SENT["load"]["hex"]
        assert (await receiver.receive()).payload == envelopes.TELL + packed("hi")
        router.tell("unanswered")
        assert (await receiver.receive()).payload == envelopes.TELL + packed("unanswered")
        got.attachments[0].send(RawMessage(bytes.fromhex("920c07")))
        await wait_all_tasks_blocked()
        router.tell("too soon")
        assert (await receiver.receive()).payload == envelopes.TELL + packed("too soon")
        await trio.sleep(0.06)
        router.tell("again")
        got = await receiver.receive()
        assert got.payload.hex() == SENT["load"]["hex"]
        got.attachments[0].send(RawMessage(bytes.fromhex("920cc0")))
        await trio.sleep(1)
        assert ends.system.groups.members("g") == []
        receiver.close()


# ---------------------------------------------------------------- what this side does when it reads


@pytest.mark.rule("RF-43")
async def test_rf43_the_report_comes_when_the_handler_has_finished(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """Or has failed; also if the message cannot be decoded."""
    async with raw() as ends:
        reported = await work(ends, do("sleep", 5.0))
        with trio.move_on_after(4) as early:
            await reported
        assert early.cancelled_caught
        began = trio.current_time()
        assert (await (await work(ends, do("sleep", 2.0)))).payload == DONE
        reported.close()
        assert trio.current_time() - began == pytest.approx(3)
        assert (await (await work(ends, packed(record("tests.aqueduct.Unknown"))))).payload == DONE
        assert (await (await work(ends, do("fail", "x")))).payload == DONE
        await wait_all_tasks_blocked()
        assert not ends.clerk.is_alive


@pytest.mark.rule("RF-42")
@pytest.mark.rule("RF-43")
async def test_rf42_rf43_an_answer_and_a_report(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """Each on its oneshot; a question that cannot be decoded is answered with a failure, and done."""
    async with raw() as ends:
        for message, head in ((do("say", 7), envelopes.ANSWER), (b"\xc1", envelopes.FAILURE)):
            (report, reported), (answer, answered) = oneshot(RawMessage), oneshot(RawMessage)
            await ends.to.send(RawMessage(envelopes.WORK_ASK + message, (report, answer)))
            assert (await answered).payload.startswith(head)
            assert (await reported).payload == DONE


@pytest.mark.rule("RF-44")
async def test_rf44_what_was_not_begun_is_returned(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """Told and asked; also to an actor that has ended already. With a channel in the message it is done, and lost here."""
    async with raw() as ends:
        letters: list[Any] = []
        ends.system.events.subscribe(DeadLetter, ends.system.spawn(Letters, letters))
        busy = await work(ends, do("sleep", 5.0))
        told = await work(ends, packed("hi"))
        inner, their_inner = channel(RawMessage)
        moved = await work(ends, packed(record("tests.aqueduct.Parcel", "t", attachment(0, 1), *[None] * 6)), inner)
        (report, reported), (answer, answered) = oneshot(RawMessage), oneshot(RawMessage)
        await ends.to.send(RawMessage(envelopes.WORK_ASK + do("say", 7), (report, answer)))
        await trio.sleep(1)
        ends.clerk.kill()
        assert (await busy).payload == DONE
        assert (await told).payload == RETURNED
        assert (await moved).payload == DONE
        assert (await reported).payload == RETURNED
        with pytest.raises(LevadaError):
            await answered
        assert (await (await work(ends, packed("late")))).payload == RETURNED
        assert [type(message).__name__ for message, _ in letters] in ([], ["Parcel"])
        their_inner.close()


@pytest.mark.rule("RF-46")
async def test_rf46_who_closes_the_report_takes_the_message_back(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """One that has begun goes on."""
    async with raw() as ends:
        running = await work(ends, do("sleep", 5.0))
        waiting = await work(ends, packed("never"))
        waits = await work(ends, packed("handled"))
        await trio.sleep(1)
        running.close()
        waiting.close()
        assert (await waits).payload == DONE
        assert ends.notes == ["handled"]


@pytest.mark.rule("RF-47")
async def test_rf47_the_load_is_what_waits(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """A running async handler counts as one."""
    async with raw() as ends:
        for waiting in ("00", "01", "02", "03"):
            answer, answered = oneshot(RawMessage)
            await ends.to.send(RawMessage(envelopes.LOAD, (answer,)))
            assert (await answered).payload.hex() == f"920c{waiting}"
            await ends.to.send(RawMessage(envelopes.TELL + do("sleep", 50.0)))
            await wait_all_tasks_blocked()


@pytest.mark.rule("RF-48")
async def test_rf48_at_most_64_messages_are_in_work(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """Whatever the peer sends, the mailbox gets no more from it; the others come when there is room."""
    async with raw() as ends:
        reports = [await work(ends, do("sleep", 1.0))]
        for number in range(70):
            reports.append(await work(ends, packed(str(number))))
        await wait_all_tasks_blocked()
        assert ends.clerk.depth() == 64
        for reported in reports:
            assert (await reported).payload == DONE
        assert ends.notes == [str(number) for number in range(70)]


@pytest.mark.rule("RF-49")
@pytest.mark.parametrize("how", ["time-out", "cancelled"])
async def test_rf49_an_asker_that_goes_away_closes_the_oneshot_of_the_answer(
    raw: Begin,  # noqa: F811
    autojump_clock: MockClock,
    how: str,
) -> None:
    """And nothing else: the routee gets its next message when this one is reported."""
    async with raw(**GREETED) as ends:
        router, receiver, letters = await begin(ends)

        async def ask() -> None:
            if how == "cancelled":
                with trio.move_on_after(2):
                    await router.ask(Size(), timeout=None)
            else:
                with pytest.raises(AskTimeout):
                    await router.ask(Size(), timeout=2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            report, answer = (await receiver.receive()).attachments
            await trio.sleep(1.9)
            assert answer.state is TerminalState.OPEN
        assert await answer.terminated() is TerminalState.RECEIVER_CLOSED
        assert report.state is TerminalState.OPEN
        router.tell("next")
        await wait_all_tasks_blocked()
        with pytest.raises(trio.WouldBlock):
            receiver.receive_nowait()
        report.send(RawMessage(DONE))
        following = await receiver.receive()
        assert following.payload == envelopes.WORK + packed("next")
        OPEN.extend(following.attachments)
        assert letters == []
        receiver.close()


@pytest.mark.rule("RF-49")
async def test_rf49_a_question_whose_answer_is_not_wanted_is_not_begun(raw: Begin, autojump_clock: MockClock) -> None:  # noqa: F811
    """It is done when its turn comes; one that has begun goes on."""
    async with raw() as ends:
        reports, answers = [], []
        for seconds in (5.0, 7.0, 9.0):
            (report, reported), (answer, answered) = oneshot(RawMessage), oneshot(RawMessage)
            await ends.to.send(RawMessage(envelopes.WORK_ASK + do("sleep", seconds), (report, answer)))
            reports.append(reported)
            answers.append(answered)
            if seconds < 9:
                await trio.sleep(1)
                answered.close()
        began = trio.current_time()
        for reported, after in zip(reports, (3, 3, 12), strict=True):
            assert (await reported).payload == DONE
            assert trio.current_time() - began == pytest.approx(after)
        assert (await answers[-1]).payload.startswith(envelopes.ANSWER)
