"""The octets of remote refs, against a peer that knows nothing but octets; and what becomes of bad ones."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgpack
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import Listener, Peer, PeerConfig, RawMessage, connect, envelopes, serve
from levada.actors.aqueduct.envelopes import ActorIdentity
from levada.framework import (
    ActorSystem,
    Asks,
    Cancelled,
    Down,
    Exit,
    Failed,
    Killed,
    Lost,
    Normal,
    Reason,
    Receiver,
    Sender,
    Shutdown,
    TerminalState,
    channel,
    message,
    oneshot,
)
from levada.framework.errors import (
    DecodeError,
    EndOfChannel,
    LevadaError,
    NameUnknown,
    ReceiverClosed,
    RemoteFailure,
)

from .conftest import Private, Trapper, settled

VECTORS = json.loads((Path(__file__).parents[2] / "transports/aqueduct-refs/data/vectors.json").read_text("utf-8"))
SENT = {vector["name"]: vector for vector in VECTORS["sent"]}


@message("tests.aqueduct.Small")
class Small:
    number: int


@message("tests.aqueduct.Size")
class Size(Asks[int]):
    """How large?"""


def packed(value: Any) -> bytes:
    """Octets by msgpack's own means."""
    return bytes(msgpack.packb(value))


def record(tag: str, *fields: Any) -> msgpack.ExtType:
    """A message of a class."""
    return msgpack.ExtType(2, packed([tag, *fields]))


def attachment(kind: int, index: int, note: bytes = b"") -> msgpack.ExtType:
    return msgpack.ExtType(1, bytes([kind, index]) + note)


def ref_of(identity: bytes, index: int = 0) -> bytes:
    """A ref, as it is written."""
    return packed(attachment(4, index, identity))


ME = bytes.fromhex(VECTORS["identities"][0]["hex"])


@attrs.frozen
class Raw:
    """A peer that speaks octets, connected to a system with an actor."""

    system: ActorSystem
    listener: Listener
    peer: Peer[RawMessage]
    clerk: Any
    home: bytes
    """Identity of the actor."""
    to: Sender[RawMessage]
    """The channel of a ref of the actor."""

    @property
    def notes(self) -> list[Any]:
        notes: list[Any] = self.clerk._actor.notes
        return notes

    async def do(self, what: str, value: Any = None, who: Any = None, attached: tuple[Any, ...] = ()) -> None:
        """Tell the actor to do something."""
        octets = envelopes.TELL + packed(record("tests.aqueduct.Do", what, value, who))
        await self.to.send(RawMessage(octets, attached))

    async def give(self, what: str, value: Any = None) -> Receiver[RawMessage]:
        """Tell the actor to do something with a ref of an actor of the peer's; return what the ref's channel brings."""
        sender, receiver = channel(RawMessage)
        await self.do(what, value, attachment(4, 0, ME), (sender,))
        return receiver

    async def ask(self, octets: bytes, *more: Any) -> bytes:
        """Ask the actor; return the octets of the answer."""
        reply, answer = oneshot(RawMessage)
        await self.to.send(RawMessage(envelopes.ASK + octets, (reply, *more)))
        return (await answer).payload


Begin = Callable[..., AbstractAsyncContextManager[Raw]]


async def look_up(peer: Peer[RawMessage], name: str = "clerk") -> RawMessage:
    """Look an actor up by octets."""
    octets = bytes.fromhex(VECTORS["lookup"]["hex"])
    if name != "clerk":
        octets = packed(record("levada.lookup", name, attachment(2, 0)))
    reply, answer = oneshot(RawMessage)
    await peer.send(RawMessage(octets, (reply,)))
    return await answer


@pytest.fixture
def raw() -> Begin:
    """Connect a peer of octets to a system with an actor, and let it look the actor up."""

    @asynccontextmanager
    async def begin(kind: Any = Trapper, **changes: Any) -> AsyncIterator[Raw]:
        async def ignore(m: Any) -> None: ...

        config = PeerConfig(**changes)
        async with ActorSystem() as system:
            clerk = system.spawn(kind, name="clerk")
            system.registry.register("clerk", clerk)
            system.registry.register("secret", clerk)
            async with (
                serve(system, "aqueduct+memory://desk", ignore, Any, expose={"clerk"}, config=config) as listener,
                connect(system, listener.url, RawMessage, config=config) as peer,
            ):
                found = await look_up(peer)
                home = ActorIdentity(clerk.incarnation, "/clerk").encode()
                assert found.payload == ref_of(home)
                with found.attachments[0] as to:
                    yield Raw(system, listener, peer, clerk, home, to)

    return begin


def plain(reason: Reason) -> list[str]:
    """A reason, as the vectors write it."""
    match reason:
        case Failed(error=RemoteFailure() as error):
            return ["failed", error.kind, error.detail]
        case Lost(peer=peer):
            return ["lost", peer]
    return [type(reason).__name__.lower()]


# ---------------------------------------------------------------- vectors


@pytest.mark.rule("RF-11")
@pytest.mark.parametrize("vector", VECTORS["identities"], ids=lambda vector: vector["path"])
def test_rf11_identities(vector: dict[str, Any]) -> None:
    """Incarnation as a base-128 integer, then the path."""
    identity = ActorIdentity(vector["incarnation"], vector["path"])
    assert identity.encode().hex() == vector["hex"]
    assert ActorIdentity.decode(bytes.fromhex(vector["hex"])) == identity


@pytest.mark.rule("RF-11")
@pytest.mark.parametrize("vector", VECTORS["bad_identities"], ids=lambda vector: vector["why"])
def test_rf11_bad_identities(vector: dict[str, Any]) -> None:
    """Each is refused."""
    with pytest.raises(DecodeError):
        ActorIdentity.decode(bytes.fromhex(vector["hex"]))


@given(st.integers(0, 2**64 - 1), st.text().filter(str.isprintable))
def test_identities_come_back(incarnation: int, path: str) -> None:
    identity = ActorIdentity(incarnation, f"/{path}")
    assert ActorIdentity.decode(identity.encode()) == identity


@pytest.mark.rule("RF-10")
@pytest.mark.parametrize("vector", VECTORS["reasons"], ids=lambda vector: vector["reason"][0])
@pytest.mark.parametrize("head", [envelopes.DOWN, envelopes.EXIT], ids=["down", "exit"])
def test_rf8_rf9_rf10_reasons(vector: dict[str, Any], head: bytes) -> None:
    """A reason is an array of texts."""
    reason = envelopes.read_signal(head, head + bytes.fromhex(vector["hex"]), "/desk")
    assert plain(reason) == vector["reason"]
    assert envelopes.encode_signal(head, reason) == head + bytes.fromhex(vector["hex"])
    assert type(reason) in (Normal, Shutdown, Killed, Cancelled, Failed, Lost)


@pytest.mark.parametrize("octets", VECTORS["bad_reasons"])
def test_bad_reasons(octets: str) -> None:
    with pytest.raises(DecodeError):
        envelopes.read_signal(envelopes.DOWN, envelopes.DOWN + bytes.fromhex(octets), "/desk")
    with pytest.raises(DecodeError):
        envelopes.read_signal(envelopes.EXIT, envelopes.DOWN + bytes.fromhex("91a66b696c6c6564"), "/desk")


@pytest.mark.rule("RF-7")
@pytest.mark.parametrize("vector", VECTORS["failures"], ids=lambda vector: vector["text"])
def test_rf7_failures(vector: dict[str, Any]) -> None:
    """Class, text, and what else there is to know; a system that passes a failure on sends the same bytes."""
    octets = bytes.fromhex(vector["hex"])
    error: Any = envelopes.error_from(octets, "/desk", "question")
    assert (type(error).__name__, error.detail) == (vector["error"], vector["text"])
    if "reason" in vector:
        assert plain(error.reason) == vector["reason"]
    if "capacity" in vector:
        assert error.capacity == vector["capacity"]
    assert envelopes.encode_failure(error) == octets


@pytest.mark.parametrize("octets", VECTORS["bad_failures"])
def test_bad_failures(octets: str) -> None:
    with pytest.raises(DecodeError):
        envelopes.error_from(bytes.fromhex(octets), "/desk", "question")


def every_vector() -> list[bytes]:
    lists = [VECTORS["sent"], VECTORS["reasons"], VECTORS["failures"], VECTORS["identities"]]
    return [bytes.fromhex(vector["hex"].replace("*ref*", ref_of(ME).hex())) for vectors in lists for vector in vectors]


@given(st.data())
def test_every_cut_and_every_changed_octet_is_read_or_refused(data: st.DataObject) -> None:
    """Nothing but a `DecodeError` comes out of the readers."""
    octets = bytearray(data.draw(st.sampled_from(every_vector())))
    if octets and data.draw(st.booleans()):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(octets[: data.draw(st.integers(0, len(octets)))])
    texts: list[str] = []
    for read in (
        lambda: envelopes.head_of(cut),
        lambda: ActorIdentity.decode(cut),
        lambda: envelopes.read_signal(envelopes.DOWN, cut, "/a"),
        lambda: envelopes.read_signal(envelopes.DOWN, envelopes.DOWN + cut, "/a"),
        lambda: envelopes.error_from(cut, "/a", None),
        lambda: envelopes.read_done(cut),
        lambda: envelopes.read_load(cut),
        lambda: envelopes.read_number(envelopes.REPLY, cut),
        lambda: envelopes.read_withdrawal(cut),
    ):
        try:
            read()
        except DecodeError as error:
            texts.append(str(error))
    assert [text for text in texts if not text.isprintable()] == []


# ---------------------------------------------------------------- what this side writes


@pytest.mark.rule("RF-1")
@pytest.mark.rule("RF-2")
@pytest.mark.parametrize(
    ("name", "value"),
    [("tell a text", "hi"), ("tell an int", 7), ("tell a message", record("tests.aqueduct.Small", 42))],
)
async def test_rf1_rf2_tell(raw: Begin, autojump_clock: MockClock, name: str, value: Any) -> None:
    """Kind 0 and the message."""
    async with raw() as ends:
        receiver = await ends.give("tell", value)
        got = await receiver.receive()
        assert (got.payload.hex(), got.attachments) == (SENT[name]["hex"], ())
        assert await receiver.terminated() is not None  # nobody holds the ref any more: its channel ends in order
        with pytest.raises(StopAsyncIteration):
            await receiver.__anext__()


@pytest.mark.rule("RF-3")
@pytest.mark.rule("RF-6")
async def test_rf3_rf6_ask_and_answer(raw: Begin, autojump_clock: MockClock) -> None:
    """Kind 1, the oneshot, the question; kind 4 and the value."""
    async with raw() as ends:
        sender, receiver = channel(RawMessage)
        reply, answer = oneshot(RawMessage)
        octets = envelopes.ASK + packed(
            record("tests.aqueduct.Do", "ask", record("tests.aqueduct.Size"), attachment(4, 1, ME))
        )
        await ends.to.send(RawMessage(octets, (reply, sender)))
        got = await receiver.receive()
        assert got.payload.hex() == SENT["ask"]["hex"]
        (theirs,) = got.attachments
        theirs.send(RawMessage(envelopes.ANSWER + packed(1234)))
        assert (await answer).payload == b"\x92\x04" + packed(1234)
        receiver.close()


@pytest.mark.rule("RF-3")
@pytest.mark.rule("RF-7")
@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"\x92\x04",
        b"\x92\x04\xa1x",  # not an int
        b"\x92\x04\x07\x07",
        b"\x92\x06\x07",
        *(bytes.fromhex(octets) for octets in VECTORS["bad_failures"]),
    ],
    ids=bytes.hex,
)
async def test_rf3_rf7_an_answer_that_is_none_is_an_error(raw: Begin, autojump_clock: MockClock, octets: bytes) -> None:
    """The asker gets a `DecodeError`; the connection and the ref go on."""
    async with raw() as ends:
        sender, receiver = channel(RawMessage)
        reply, answer = oneshot(RawMessage)
        question = packed(record("tests.aqueduct.Do", "ask", record("tests.aqueduct.Size"), attachment(4, 1, ME)))
        await ends.to.send(RawMessage(envelopes.ASK + question, (reply, sender)))
        (theirs,) = (await receiver.receive()).attachments
        theirs.send(RawMessage(octets))
        failure = (await answer).payload
        kind, _, more = envelopes.read_failure(failure)
        assert (kind, more[:2]) == ("ActorStopped", ["failed", "DecodeError"])
        assert not ends.peer.closed
        receiver.close()


@pytest.mark.rule("RF-4")
@pytest.mark.rule("RF-8")
@pytest.mark.parametrize("vector", VECTORS["reasons"], ids=lambda vector: vector["reason"][0])
async def test_rf4_rf8_watch_and_down(raw: Begin, autojump_clock: MockClock, vector: dict[str, Any]) -> None:
    """Kind 2 and the oneshot; kind 6 and the reason."""
    async with raw() as ends:
        receiver = await ends.give("watch", "tag")
        got = await receiver.receive()
        assert got.payload.hex() == SENT["watch"]["hex"]
        got.attachments[0].send(RawMessage(envelopes.DOWN + bytes.fromhex(vector["hex"])))
        await wait_all_tasks_blocked()
        (down,) = ends.notes
        assert isinstance(down, Down)
        assert (down.ref.path, plain(down.reason), down.tag) == ("/desk", vector["reason"], "tag")
        with pytest.raises(StopAsyncIteration):
            await receiver.__anext__()  # a ref of the dead needs no channel


@pytest.mark.rule("RF-5")
@pytest.mark.rule("RF-9")
@pytest.mark.parametrize("vector", VECTORS["reasons"], ids=lambda vector: vector["reason"][0])
async def test_rf5_rf9_link_and_exit(raw: Begin, autojump_clock: MockClock, vector: dict[str, Any]) -> None:
    """Kind 3, the ref that links and a oneshot each way; kind 7 and the reason."""
    async with raw() as ends:
        receiver = await ends.give("link")
        got = await receiver.receive()
        assert got.payload.hex() == SENT["link"]["hex"].replace("*ref*", ref_of(ends.home).hex())
        copy, to_them, from_them = got.attachments
        copy.finish_nowait()
        to_them.send(RawMessage(envelopes.EXIT + bytes.fromhex(vector["hex"])))
        await wait_all_tasks_blocked()
        (exit_,) = ends.notes
        assert isinstance(exit_, Exit)
        assert (exit_.ref.path, plain(exit_.reason)) == ("/desk", vector["reason"])
        with pytest.raises(LevadaError):
            await from_them
        receiver.close()


@pytest.mark.rule("RF-9")
async def test_rf9_the_exit_of_this_side(raw: Begin, autojump_clock: MockClock) -> None:
    """The actor's own end is told on the other oneshot."""
    async with raw() as ends:
        receiver = await ends.give("link")
        copy, to_them, from_them = (await receiver.receive()).attachments
        ends.clerk.kill()
        assert (await from_them).payload == b"\x92\x07" + packed(["killed"])
        copy.finish_nowait()
        to_them.finish_nowait()
        receiver.close()


@pytest.mark.rule("RF-12")
async def test_rf12_a_ref_goes_home_by_its_number(raw: Begin, autojump_clock: MockClock) -> None:
    """The peer's own ref comes back as kind 5; ours arrives as the actor; who is not known has ended."""
    async with raw() as ends:
        sender, receiver = channel(RawMessage)
        who = attachment(4, 0, ME)
        await ends.to.send(RawMessage(envelopes.TELL + packed(record("tests.aqueduct.Note", "n", [who])), (sender,)))
        reply, answer = oneshot(RawMessage)
        await ends.to.send(
            RawMessage(envelopes.ASK + packed(record("tests.aqueduct.Do", "last", None, None)), (reply,))
        )
        home = attachment(5, 7)
        assert (await answer).payload == envelopes.ANSWER + packed(home)
        number, path = ends.clerk.incarnation, "/clerk"
        await ends.to.send(
            RawMessage(envelopes.TELL + packed(record("tests.aqueduct.Note", "m", [attachment(5, number)] * 2)))
        )
        await ends.to.send(
            RawMessage(
                envelopes.TELL + packed(record("tests.aqueduct.Note", "x", [attachment(5, 100), attachment(5, 0)]))
            )
        )
        await wait_all_tasks_blocked()
        assert ends.notes[1].refs == [ends.clerk] * 2
        assert [(ref.is_alive, ref.incarnation) for ref in ends.notes[2].refs] == [(False, 100), (False, 0)]
        assert ends.clerk.path == path
        receiver.close()


@pytest.mark.rule("RF-11")
@pytest.mark.rule("RF-14")
async def test_rf11_rf14_a_second_copy_is_the_same_ref(raw: Begin, autojump_clock: MockClock) -> None:
    """Its channel is finished at once, the first one goes on."""
    async with raw() as ends:
        note = record("tests.aqueduct.Note", "n", [attachment(4, 0, ME), attachment(4, 1, ME)])
        pairs = [channel(RawMessage) for _ in range(2)]
        await ends.to.send(RawMessage(envelopes.TELL + packed(note), [sender for sender, _ in pairs]))
        with pytest.raises(StopAsyncIteration):
            await pairs[1][1].__anext__()
        first, second = ends.notes[0].refs
        assert first is second
        first.tell("hi")
        assert (await pairs[0][1].receive()).payload.hex() == SENT["tell a text"]["hex"]
        pairs[0][1].close()
        await wait_all_tasks_blocked()
        assert not first.is_alive  # its channel was closed, which these rules do not know: the way is lost
        again, receiver = channel(RawMessage)
        await ends.to.send(
            RawMessage(envelopes.TELL + packed(record("tests.aqueduct.Note", "n", [attachment(4, 0, ME)])), (again,))
        )
        await wait_all_tasks_blocked()
        third = ends.notes[1].refs[0]
        assert third is not first
        assert third.is_alive
        receiver.close()


# ---------------------------------------------------------------- what this side reads


@pytest.mark.rule("RF-6")
@pytest.mark.rule("RF-16")
async def test_rf6_rf16_questions_of_octets(raw: Begin, autojump_clock: MockClock) -> None:
    """Answered in order; one whose oneshot is closed before it begins is never begun."""
    async with raw() as ends:
        assert await ends.ask(packed(record("tests.aqueduct.Do", "say", [1, "x", None]))) == b"\x92\x04" + packed(
            [1, "x", None]
        )
        await ends.do("sleep", 1)
        reply, answer = oneshot(RawMessage)
        await ends.to.send(
            RawMessage(envelopes.ASK + packed(record("tests.aqueduct.Do", "fail", "never begun")), (reply,))
        )
        answer.close()
        await trio.sleep(2)
        assert ends.clerk.is_alive
        failure = await ends.ask(packed(record("tests.aqueduct.Do", "fail", "x")))
        assert failure == b"\x94\x05" + b"".join(
            map(packed, ["ActorStopped", "/clerk failed: KeyError('x')", ["failed", "KeyError", "'x'"]])
        )
        late = await ends.ask(packed(record("tests.aqueduct.Do", "count")))
        assert envelopes.read_failure(late)[::2] == ("ActorStopped", ["failed", "KeyError", "'x'"])


@pytest.mark.rule("RF-16")
async def test_rf16_watches_of_octets(raw: Begin, autojump_clock: MockClock) -> None:
    """Closing the oneshot takes the watch back; the dead are reported at once."""
    async with raw() as ends:
        (given_up, closed), (notice, told) = oneshot(RawMessage), oneshot(RawMessage)
        for sender in (given_up, notice):
            await ends.to.send(RawMessage(envelopes.WATCH, (sender,)))
        await wait_all_tasks_blocked()
        before = len(ends.clerk._extras.watchers)
        closed.close()
        await wait_all_tasks_blocked()
        assert len(ends.clerk._extras.watchers) == before - 1
        ends.clerk.stop()
        assert (await told).payload == b"\x92\x06" + packed(["shutdown"])
        again, told_again = oneshot(RawMessage)
        await ends.to.send(RawMessage(envelopes.WATCH, (again,)))
        assert (await told_again).payload == b"\x92\x06" + packed(["shutdown"])


async def link(ends: Raw) -> tuple[Any, Any, Receiver[RawMessage]]:
    """Link by octets; return what the actor's exit comes on, what that of the peer's actor is sent on, and the ref's channel."""
    copy, receiver = channel(RawMessage)
    (theirs, from_them), (to_them, ours) = oneshot(RawMessage), oneshot(RawMessage)
    octets = envelopes.LINK + ref_of(ME) + packed(attachment(2, 1)) + packed(attachment(3, 2))
    await ends.to.send(RawMessage(octets, (copy, theirs, ours)))
    return from_them, to_them, receiver


@pytest.mark.rule("RF-16")
async def test_rf16_links_of_octets(raw: Begin, autojump_clock: MockClock) -> None:
    """A oneshot that is finished without a value unlinks."""
    async with raw() as ends:
        from_them, to_them, receiver = await link(ends)
        await wait_all_tasks_blocked()
        assert [ref.path for ref in ends.clerk._extras.links] == ["/desk"]
        to_them.finish_nowait()
        with pytest.raises(LevadaError, match="without a value"):
            await from_them
        assert not ends.clerk._extras.links
        from_them, to_them, other = await link(ends)
        to_them.send(RawMessage(envelopes.EXIT + packed(["killed"])))
        await wait_all_tasks_blocked()
        assert [type(note) for note in ends.notes] == [Exit]
        assert ends.notes[0].reason == Killed()
        with pytest.raises(LevadaError):
            await from_them
        for each in (receiver, other):
            each.close()


@pytest.mark.rule("RF-19")
async def test_rf19_links_are_refused_where_they_are_not_wanted(raw: Begin, autojump_clock: MockClock) -> None:
    """The answer is an exit that says so."""
    async with raw(Private) as ends:
        from_them, to_them, receiver = await link(ends)
        detail = "/clerk lets no actor of another system link to it (accept_remote_links)"
        assert (await from_them).payload == b"\x92\x07" + packed(["failed", "ActorError", detail])
        assert not ends.clerk._extras.links if ends.clerk._extras else True
        to_them.finish_nowait()
        receiver.close()


@pytest.mark.rule("RF-20")
@pytest.mark.parametrize("how", ["cancel", "garbage"])
async def test_rf20_other_ends_mean_lost(raw: Begin, autojump_clock: MockClock, how: str) -> None:
    """Of a watch and of a link."""
    async with raw() as ends:
        watched, linked = await ends.give("watch"), await ends.give("link")
        (notice,) = (await watched.receive()).attachments
        more = await watched.receive()  # the same ref: the link comes over the channel that is there
        copy, to_them, from_them = more.attachments
        for sender in (notice, to_them):
            sender.cancel() if how == "cancel" else sender.send(RawMessage(b"\xff"))
        await settled()
        assert {(type(note), type(note.reason)) for note in ends.notes} == {(Down, Lost), (Exit, Lost)}
        copy.finish_nowait()
        from_them.close()
        for receiver in (watched, linked):
            receiver.close()


@pytest.mark.rule("RF-17")
@pytest.mark.parametrize("octets", VECTORS["bad_envelopes"])
async def test_rf17_what_is_no_envelope_ends_its_ref(raw: Begin, autojump_clock: MockClock, octets: str) -> None:
    """The channel is closed; the connection, the actor, and other refs of it go on."""
    async with raw() as ends:
        found = await look_up(ends.peer)
        with found.attachments[0] as other:
            other.send_nowait(RawMessage(bytes.fromhex(octets)))
            with pytest.raises(ReceiverClosed):
                while True:
                    await other.send(RawMessage(envelopes.TELL + packed("late")))
                    await trio.sleep(0.1)
        assert await ends.ask(packed(record("tests.aqueduct.Do", "texts"))) == b"\x92\x04\x90"
        assert not ends.peer.closed


@pytest.mark.rule("RF-17")
@pytest.mark.parametrize("octets", [envelopes.ASK + packed("x"), envelopes.WATCH], ids=["ask", "watch"])
@pytest.mark.parametrize("attached", ["nothing", "a sender", "a receiver", "a oneshot to receive"])
async def test_rf17_an_envelope_needs_its_own_oneshot(
    raw: Begin, autojump_clock: MockClock, octets: bytes, attached: str
) -> None:
    """And no other channel in its place."""
    async with raw() as ends:
        pairs: dict[str, Any] = {
            "a sender": channel(RawMessage),
            "a receiver": reversed(channel(RawMessage)),
            "a oneshot to receive": reversed(oneshot(RawMessage)),
        }
        there, here = pairs.get(attached, (None, None))
        with (await look_up(ends.peer)).attachments[0] as other:
            other.send_nowait(RawMessage(octets, () if there is None else (there,)))
            assert (await other.terminated()).value == "receiver closed"
        await settled()
        assert here is None or here.state.value != "open"
        for pair in pairs.values():
            for handle in () if attached in pairs and pair is pairs[attached] else tuple(pair):
                handle.cancel() if hasattr(handle, "cancel") else handle.close()
        assert not ends.peer.closed


@pytest.mark.rule("RF-17")
@pytest.mark.parametrize("order", ["ab", "abcd", "acb", "bac", "aab", "abb", "cab"])
async def test_rf17_a_link_needs_its_three_channels_in_order(raw: Begin, autojump_clock: MockClock, order: str) -> None:
    """a: the ref; b: a oneshot to send on; c: one to receive from."""
    async with raw() as ends:
        open_: list[Any] = []

        def make(kind: str) -> Any:
            here, there = channel(RawMessage) if kind == "a" else oneshot(RawMessage)
            handle, other = (there, here) if kind == "c" else (here, there)
            open_.append(other)
            return handle

        octets = envelopes.LINK + ref_of(ME) + packed(attachment(2, 1)) + packed(attachment(3, 2))
        with (await look_up(ends.peer)).attachments[0] as other:
            other.send_nowait(RawMessage(octets, [make(kind) for kind in order]))
            assert (await other.terminated()).value == "receiver closed"
        await settled()
        for handle in open_:
            assert handle.state.value != "open"
        assert not ends.clerk._extras.links
        assert not ends.peer.closed


@pytest.mark.rule("RF-18")
@pytest.mark.parametrize(
    "octets",
    ["", "c1", "c70401a0", "d5010400", "d5010100", "c7040291a1", "81", packed(record("nobody.knows", 1)).hex()],
)
async def test_rf18_messages_that_cannot_be_decoded(raw: Begin, autojump_clock: MockClock, octets: str) -> None:
    """Told, it is dropped; asked, it is answered with a failure; the ref goes on either way."""
    async with raw() as ends:
        await ends.to.send(RawMessage(envelopes.TELL + bytes.fromhex(octets)))
        failure = await ends.ask(bytes.fromhex(octets))
        kind, text, _ = envelopes.read_failure(failure)
        assert (kind, text.partition(":")[0]) == ("ActorError", "the question cannot be decoded")
        assert await ends.ask(packed(record("tests.aqueduct.Do", "texts"))) == b"\x92\x04\x90"


@pytest.mark.rule("RF-18")
async def test_rf18_the_oneshot_of_an_ask_is_not_the_questions(raw: Begin, autojump_clock: MockClock) -> None:
    """A question that names attachment 0 cannot be decoded."""
    async with raw() as ends:
        failure = await ends.ask(packed(record("tests.aqueduct.Do", "say", attachment(2, 0))))
        assert "it does not belong to the message" in envelopes.read_failure(failure)[1]


@pytest.mark.rule("RF-11")
@pytest.mark.parametrize("vector", VECTORS["bad_identities"], ids=lambda vector: vector["why"])
async def test_rf11_a_ref_that_says_nonsense_of_itself(
    raw: Begin, autojump_clock: MockClock, vector: dict[str, Any]
) -> None:
    """The message cannot be decoded, its channel is given up."""
    async with raw() as ends:
        sender, receiver = channel(RawMessage)
        who = attachment(4, 0, bytes.fromhex(vector["hex"]))
        await ends.do("watch", None, who, (sender,))
        with pytest.raises(LevadaError):
            await receiver.receive()
        assert await ends.ask(packed(record("tests.aqueduct.Do", "texts"))) == b"\x92\x04\x90"


@pytest.mark.rule("RF-21")
@pytest.mark.rule("RF-22")
async def test_rf21_rf22_lookup(raw: Begin, autojump_clock: MockClock) -> None:
    """A ref, or nil: for a name that is not exposed as for one that nobody has."""
    async with raw() as ends:
        for name in ("secret", "nobody"):
            assert (await look_up(ends.peer, name)).payload.hex() == VECTORS["lookup"]["unknown"]
        found = await look_up(ends.peer)
        assert found.payload == ref_of(ends.home)
        found.attachments[0].finish_nowait()
        for octets in (
            packed(record("levada.lookup", 7, attachment(2, 0))),
            packed(record("levada.lookup", "clerk")),
            packed(record("levada.lookup")),
            packed(record("levada.lookup", "clerk", attachment(0, 0))),
        ):
            reply, answer = oneshot(RawMessage)
            await ends.peer.send(RawMessage(octets, (reply,)))
            with pytest.raises(LevadaError):
                await answer
        assert not ends.peer.closed


@pytest.mark.rule("RF-23")
async def test_rf23_where_a_client_is_looked_up(raw: Begin, autojump_clock: MockClock) -> None:
    """levada.lookups brings a sender of levada.lookup messages, which are answered as those on the entrypoint are; the last one counts."""
    vector = VECTORS["lookups"]
    got: list[RawMessage] = []

    async def keep(m: RawMessage) -> None:
        got.append(m)

    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://octets", keep, message_type=RawMessage) as listener,
        connect(system, listener.url, int, expose={"clerk"}),
    ):
        await settled()
        assert [m.payload.hex() for m in got] == [vector["hex"]]
        reply, answer = oneshot(RawMessage)
        await got[0].attachments[0].send(RawMessage(bytes.fromhex(VECTORS["lookup"]["hex"]), (reply,)))
        assert (await answer).payload.hex() == VECTORS["lookup"]["unknown"]
        await got[0].attachments[0].send(RawMessage(b"\xc0"))
        # What is no lookup closes it.
        assert await got[0].attachments[0].terminated() is TerminalState.RECEIVER_CLOSED
    async with raw() as ends:
        (server,) = ends.listener.peers
        with pytest.raises(NameUnknown):
            await server.lookup("clerk")
        first, questions = channel(RawMessage)
        await ends.peer.send(RawMessage(bytes.fromhex(vector["hex"]), (first,)))
        await settled()
        async with trio.open_nursery() as nursery:

            async def expect_unknown() -> None:
                with pytest.raises(NameUnknown, match="no actor named 'clerk'"):
                    await server.lookup("clerk")

            nursery.start_soon(expect_unknown)
            question = await questions.receive()
            assert question.payload.hex() == VECTORS["lookup"]["hex"]
            question.attachments[0].send(RawMessage(bytes.fromhex(VECTORS["lookup"]["unknown"])))
        second, others = channel(RawMessage)
        await ends.peer.send(RawMessage(bytes.fromhex(vector["hex"]), (second,)))
        with pytest.raises(EndOfChannel):
            await questions.receive()
        for octets in vector["bad"]:
            await ends.peer.send(RawMessage(bytes.fromhex(octets)))
        others.close()
        await settled()
        with pytest.raises(ReceiverClosed):
            await server.lookup("clerk")
        assert not ends.peer.closed


@pytest.mark.rule("RF-20")
async def test_rf20_a_channel_that_its_owner_closes_is_lost(raw: Begin, autojump_clock: MockClock) -> None:
    """With everything that was tied over it, though the oneshots still stand."""
    async with raw() as ends:
        receiver = await ends.give("link")
        copy, to_them, from_them = (await receiver.receive()).attachments
        receiver.close()
        await settled()
        (exit_,) = ends.notes
        assert (exit_.ref.path, type(exit_.reason)) == ("/desk", Lost)
        with pytest.raises(LevadaError):
            await from_them
        with pytest.raises(LevadaError):
            to_them.send(RawMessage(envelopes.EXIT + packed(["killed"])))
        copy.finish_nowait()
