"""The octets of refs between members of a fleet, against a peer that knows nothing but octets; and what becomes of bad ones."""

from __future__ import annotations

import json
import os
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

from levada.actors.aqueduct import FleetRefs, Listener, Peer, PeerConfig, RawMessage, connect, envelopes, serve
from levada.actors.aqueduct.envelopes import ActorIdentity
from levada.actors.aqueduct.refs import RefState, RemoteRef
from levada.framework import ActorSystem, Lost, OneshotSender, Ref, channel, oneshot
from levada.framework.codec import Codec
from levada.framework.errors import ConnectionLost, DecodeError, EndOfChannel

from .conftest import Clerk, settled

VECTORS = json.loads((Path(__file__).parents[2] / "transports/aqueduct-refs/data/vectors.json").read_text("utf-8"))
NODE, KEY = bytes.fromhex(VECTORS["node"]), bytes.fromhex(VECTORS["key"])
CLAIM = bytes.fromhex(VECTORS["claim"]["hex"])
HERE = b"the node that is"
THEIRS = ActorIdentity(7, "/desk", NODE, KEY)
"""An actor of the peer of octets."""


def greeting(node_id: bytes = NODE) -> PeerConfig:
    """Settings of a peer of octets that is a member."""
    return PeerConfig(headers=[("levada-node", node_id.hex().encode())])


def attachment(kind: int, number: int, note: bytes = b"") -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(1, bytes([kind, number]) + note)))


# ---------------------------------------------------------------- vectors


@pytest.mark.rule("RF-26")
@pytest.mark.parametrize("vector", VECTORS["member_identities"], ids=lambda vector: vector["path"])
def test_rf26_identities_of_members(vector: dict[str, Any]) -> None:
    """The key follows the path, after a zero octet."""
    identity = ActorIdentity(vector["incarnation"], vector["path"], NODE, KEY)
    assert identity.encode().hex() == vector["hex"]
    assert ActorIdentity.decode(bytes.fromhex(vector["hex"]), NODE) == identity
    with pytest.raises(DecodeError, match="a ref with the path"):
        ActorIdentity.decode(bytes.fromhex(vector["hex"]))  # of one who is no member
    assert KEY.hex() not in repr(identity)
    assert repr(KEY) not in repr(identity)


@pytest.mark.rule("RF-26")
@pytest.mark.parametrize("vector", VECTORS["bad_member_identities"], ids=lambda vector: vector["why"])
def test_rf26_bad_identities_of_members(vector: dict[str, Any]) -> None:
    """Each is refused."""
    with pytest.raises(DecodeError):
        ActorIdentity.decode(bytes.fromhex(vector["hex"]), NODE)


@pytest.mark.rule("RF-26")
def test_rf26_a_ref_without_a_key_belongs_to_no_fleet() -> None:
    assert ActorIdentity.decode(ActorIdentity(7, "/desk").encode(), NODE) == ActorIdentity(7, "/desk")


Many: Any = list[Ref[Any]]


class Noted:
    """Attaches and detaches third refs."""

    def __init__(self, identity: ActorIdentity | None = None) -> None:
        self.identity = identity

    def attach(self, handle: Any, /) -> Any:
        assert self.identity is not None
        return 6, self.identity.incarnation, self.identity.encode_third()

    def rollback(self) -> None: ...

    def detach(self, number: int, kind: int, item: Any, note: bytes = b"") -> ActorIdentity:
        assert kind == 6
        return ActorIdentity.decode_third(number, note)


@pytest.mark.rule("RF-27")
@pytest.mark.parametrize("vector", VECTORS["third_refs"], ids=lambda vector: vector["path"])
def test_rf27_third_refs(vector: dict[str, Any]) -> None:
    """Incarnation, node id, key, path; the number is no attachment's, so the same ref may be there twice."""
    identity = ActorIdentity(vector["incarnation"], vector["path"], NODE, KEY)
    octets = bytes.fromhex(vector["hex"])
    handle: Any = type("Handle", (), {"attachment_kind": "ref"})()
    assert Codec().encode(handle, attachments=Noted(identity)) == octets
    assert Codec().decode(octets, detach=Noted().detach) == identity
    assert Codec().decode(b"\x92" + 2 * octets, Many, detach=Noted().detach) == [identity] * 2


@pytest.mark.rule("RF-27")
@pytest.mark.parametrize("vector", VECTORS["bad_third_refs"], ids=lambda vector: vector["why"])
def test_rf27_bad_third_refs(vector: dict[str, Any]) -> None:
    """Each is refused, and the key is in no error."""
    with pytest.raises(DecodeError) as refused:
        Codec().decode(bytes.fromhex(vector["hex"]), detach=Noted().detach)
    assert VECTORS["key"] not in str(refused.value)


@given(st.integers(0, 2**64 - 1), st.text().filter(str.isprintable), st.binary(min_size=16, max_size=16))
def test_member_identities_come_back(incarnation: int, path: str, key: bytes) -> None:
    identity = ActorIdentity(incarnation, f"/{path}", NODE, key)
    assert ActorIdentity.decode(identity.encode(), NODE) == identity
    assert ActorIdentity.decode_third(incarnation, identity.encode_third()) == identity


@given(st.binary(max_size=60), st.integers(0, 2**64 - 1))
def test_any_octets_are_an_identity_or_an_error(data: bytes, number: int) -> None:
    decodes: list[Callable[[], ActorIdentity]] = [
        lambda: ActorIdentity.decode(data, NODE),
        lambda: ActorIdentity.decode_third(number, data),
    ]
    for decode in decodes:
        try:
            identity = decode()
        except DecodeError:
            continue
        assert identity.path.startswith("/")
        assert len(identity.key) in (0, 16)


# ---------------------------------------------------------------- a client of octets


class Taker(Clerk):
    """A clerk that keeps what it does not know, too."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.unknown: list[Any] = []

    def unhandled(self, message: Any) -> None:
        self.unknown.append(message)


@attrs.frozen
class Raw:
    """A client of octets, and the member that it is connected to."""

    listener: Listener
    peer: Peer[RawMessage]
    clerk: Any
    refs: FleetRefs

    async def look_up(self) -> RawMessage:
        return await self.reply(bytes.fromhex(VECTORS["lookup"]["hex"]))

    async def reply(self, octets: bytes) -> RawMessage:
        """Send octets with a oneshot; return what comes on it."""
        reply, answer = oneshot(RawMessage)
        await self.peer.send(RawMessage(octets, (reply,)))
        return await answer

    async def tell(self, octets: bytes, *attached: Any) -> None:
        """Tell the clerk."""
        (sender,) = (await self.look_up()).attachments
        async with sender:
            await sender.send(RawMessage(envelopes.TELL + octets, attached))

    async def claim(self, incarnation: int, key: bytes) -> RawMessage:
        fields = ["levada.claim", incarnation, key, msgpack.ExtType(1, bytes([2, 0]))]
        return await self.reply(bytes(msgpack.packb(msgpack.ExtType(2, bytes(msgpack.packb(fields))))))


BeginRaw = Callable[..., AbstractAsyncContextManager[Raw]]


@pytest.fixture
def raw() -> BeginRaw:
    """Connect a client of octets to a member; without a config the client is one, too."""

    @asynccontextmanager
    async def begin(config: PeerConfig | None = None) -> AsyncIterator[Raw]:
        async def ignore(m: Any) -> None: ...

        def never(node_id: bytes) -> Any:
            raise ConnectionLost("there is no way")

        async with ActorSystem() as system:
            clerk: Any = system.spawn(Taker, name="clerk")
            system.registry.register("clerk", clerk)
            refs = FleetRefs(system, HERE, never)
            url = "aqueduct+memory://desk"
            async with (
                serve(system, url, ignore, Any, expose={"clerk"}, config=PeerConfig(fleet=refs)) as listener,
                connect(system, listener.url, RawMessage, config=config or greeting()) as peer,
            ):
                yield Raw(listener, peer, clerk, refs)

    return begin


@pytest.mark.rule("RF-24", "RF-26")
async def test_rf24_rf26_members_greet_with_their_node_ids(raw: BeginRaw, autojump_clock: MockClock) -> None:
    """From then on refs bring keys: the same one each time."""
    async with raw() as r:
        assert dict(r.peer.headers)["levada-node"] == HERE.hex().encode()
        first, second = await r.look_up(), await r.look_up()
        key = r.refs.export(r.clerk)
        assert len(key) == 16
        home = ActorIdentity(r.clerk.incarnation, "/clerk", key=key).encode()
        assert first.payload == second.payload == attachment(4, 0, home)
        for found in (first, second):
            found.attachments[0].cancel()


@pytest.mark.rule("RF-24")
async def test_rf24_who_says_no_node_id_gets_no_keys(raw: BeginRaw, autojump_clock: MockClock) -> None:
    async with raw(PeerConfig()) as r:
        found = await r.look_up()
        assert found.payload == attachment(4, 0, ActorIdentity(r.clerk.incarnation, "/clerk").encode())
        found.attachments[0].cancel()


@pytest.mark.rule("RF-25")
@pytest.mark.parametrize(
    "value", [b"", b"ab", b"x" * 32, VECTORS["node"].upper().encode(), 31 * b"a", 33 * b"a", 32 * b"\xff"]
)
async def test_rf25_a_malformed_node_id_ends_the_connection(
    raw: BeginRaw, value: bytes, autojump_clock: MockClock
) -> None:
    """The peer is told."""
    with pytest.raises(ConnectionLost, match="levada-node is not 32 hex digits"):
        async with raw(PeerConfig(headers=[("levada-node", value)])):
            pass


@pytest.mark.rule("RF-27")
async def test_rf27_a_third_ref_arrives(raw: BeginRaw, autojump_clock: MockClock) -> None:
    """Two of one actor are one; what is malformed costs its own message."""
    async with raw() as r:
        third = bytes.fromhex(VECTORS["third_refs"][0]["hex"])
        await r.tell(b"\x93" + third + third + bytes.fromhex(VECTORS["third_refs"][1]["hex"]))
        for vector in VECTORS["bad_third_refs"]:
            await r.tell(bytes.fromhex(vector["hex"]))
        await settled()
        (note,) = r.clerk._actor.unknown
        one, same, other = note
        assert isinstance(one, RemoteRef)
        assert (one.incarnation, one.path, one.identity.node, one.state) == (7, "/desk", NODE, RefState.UNCLAIMED)
        assert same is one
        assert (other.incarnation, other.path) == (128, "/")
        assert other is not one


@pytest.mark.rule("RF-27")
async def test_rf27_a_third_ref_of_no_member_is_refused(
    raw: BeginRaw, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw(PeerConfig()) as r:
        await r.tell(bytes.fromhex(VECTORS["third_refs"][0]["hex"]))
        await settled()
        assert r.clerk._actor.unknown == []
        assert "the peer is no member of a fleet" in caplog.text


@pytest.mark.rule("RF-28")
async def test_rf28_a_third_ref_of_this_side(raw: BeginRaw, autojump_clock: MockClock) -> None:
    """With its key it is the actor; with another, or another number, an actor that has ended."""
    async with raw() as r:
        key, number = r.refs.export(r.clerk), r.clerk.incarnation
        for note in (
            ActorIdentity(number, "/x", HERE, key),
            ActorIdentity(number, "/x", HERE, KEY),
            ActorIdentity(99, "/x", HERE, key),
        ):
            await r.tell(attachment(6, note.incarnation, note.encode_third()))
        await settled()
        right, wrong, unknown = r.clerk._actor.unknown
        assert right is r.clerk
        assert (wrong.is_alive, unknown.is_alive) == (False, False)
        assert (wrong.incarnation, unknown.incarnation) == (number, 99)


@pytest.mark.rule("RF-29")
async def test_rf29_claims(raw: BeginRaw, autojump_clock: MockClock) -> None:
    """Number and key must be of one living actor; the answer is its ref, or nil."""
    async with raw() as r:
        key, number = r.refs.export(r.clerk), r.clerk.incarnation
        other: Any = r.listener._actor.spawn(Clerk)
        theirs = r.refs.export(other)
        found = await r.claim(number, key)
        home = ActorIdentity(number, "/clerk", key=key).encode()
        assert found.payload == attachment(4, 0, home)
        found.attachments[0].cancel()
        assert (await r.reply(CLAIM)).payload == bytes.fromhex(VECTORS["claim"]["unknown"])
        for bad in (
            (number, KEY),
            (number, b""),
            (number, key[:15]),
            (number, theirs),
            (99, key),
            (-1, key),
            (2**64 - 1, key),
        ):
            assert (await r.claim(*bad)).payload == b"\xc0", bad
        assert r.clerk._actor.unknown == r.clerk._actor.notes == []


@pytest.mark.rule("RF-29")
async def test_rf29_who_is_no_member_claims_nothing(raw: BeginRaw, autojump_clock: MockClock) -> None:
    async with raw(PeerConfig()) as r:
        key = r.refs.export(r.clerk)
        assert (await r.claim(r.clerk.incarnation, key)).payload == b"\xc0"


@pytest.mark.rule("RF-29")
@pytest.mark.parametrize("fields", [[], [7], [7, KEY], [7, "text", None], ["7", KEY, None], [7, KEY, 7]])
async def test_rf29_malformed_claims_are_dropped(raw: BeginRaw, fields: list[Any], autojump_clock: MockClock) -> None:
    """The connection goes on."""
    async with raw() as r:
        octets = msgpack.packb(msgpack.ExtType(2, bytes(msgpack.packb(["levada.claim", *fields]))))
        await r.peer.send(RawMessage(bytes(octets)))
        await settled()
        assert (await r.claim(1, KEY)).payload == b"\xc0"


@pytest.mark.ci
async def test_claims_without_end_take_no_memory(raw: BeginRaw, autojump_clock: MockClock) -> None:
    """Of refs that are there, up to the number of channels; of others, none."""
    async with raw() as r:
        key, number = r.refs.export(r.clerk), r.clerk.incarnation
        for _ in range(300):
            assert (await r.claim(number, os.urandom(16))).payload == b"\xc0"
            (await r.claim(number, key)).attachments[0].cancel()
        await settled()
        (connection,) = r.listener.peers
        assert connection.statistics().channels == 1
        assert len(r.refs.refs) == 0


async def test_made_up_third_refs_take_no_memory(raw: BeginRaw, autojump_clock: MockClock) -> None:
    """Neither received nor used: each is lost when its node is unknown, and gone when nobody holds it."""
    async with raw() as r:
        for turn in range(200):
            note = ActorIdentity(turn, "/x", os.urandom(16), os.urandom(16))
            await r.tell(attachment(6, turn % 128, note.encode_third()))
        await settled()
        refs = r.clerk._actor.unknown
        assert len(refs) == len(r.refs.refs) == 200
        ref: Any
        for ref in refs:
            ref.tell("x")
        actors = r.refs.system.statistics().actors
        await trio.sleep(20)
        assert {ref.state for ref in refs} == {RefState.LOST}
        assert r.refs.system.statistics().dead_letters == 200
        assert r.refs.system.statistics().actors == actors - 200
        refs.clear()
        ref = None
        assert len(r.refs.refs) == 0


# ---------------------------------------------------------------- a server of octets


Answer = Callable[[RawMessage], Any]


@asynccontextmanager
async def claimed(answer: Answer, *, node_id: bytes = NODE) -> AsyncIterator[tuple[RemoteRef, Any]]:
    """A member that claims the actor `THEIRS` from a server of octets; the ref, and a watcher's reasons."""
    async with ActorSystem() as system:

        @asynccontextmanager
        async def dial(node_id: bytes) -> AsyncIterator[Peer[Any]]:
            async with connect(system, listener.url, object, config=PeerConfig(fleet=refs)) as peer:
                yield peer

        refs = FleetRefs(system, HERE, dial, dial_timeout=5, claim_timeout=5)
        refs.known(NODE, "a")
        url = "aqueduct+memory://octets"
        async with serve(system, url, answer, RawMessage, config=greeting(node_id)) as listener:
            ref = refs.third(THEIRS)
            assert isinstance(ref, RemoteRef)
            reasons: list[Any] = []
            ref.add_watcher("watcher", reasons.append)
            ref.tell("x")
            yield ref, reasons


def reply_to(m: RawMessage) -> OneshotSender[RawMessage]:
    """The oneshot of a claim, whose octets are right."""
    assert m.payload == CLAIM
    (reply,) = m.attachments
    assert isinstance(reply, OneshotSender)
    return reply


@pytest.mark.rule("RF-29", "RF-30")
async def test_rf29_rf30_a_claim_and_what_follows(autojump_clock: MockClock) -> None:
    """The answer's ref is that of the claim; what waited comes on its channel. The path is as the owner says."""
    envelopes_: list[bytes] = []

    async def answer(m: RawMessage) -> None:
        sender, receiver = channel(RawMessage)
        identity = ActorIdentity(7, "/renamed", NODE, KEY)
        reply_to(m).send(RawMessage(attachment(4, 0, identity.encode()), (sender,)))
        async for envelope in receiver:
            envelopes_.append(envelope.payload)
            for each in envelope.attachments:
                each.cancel()

    async with claimed(answer) as (ref, reasons):
        assert ref.path == "/desk"
        await wait_all_tasks_blocked()
        await trio.sleep(1)
        assert ref.path == "/renamed"
        assert envelopes_ == [envelopes.WATCH, envelopes.TELL + b"\xa1x"]
        await settled()
        assert (ref.state, reasons) == (RefState.LOST, [Lost("octets/server")])  # its oneshot was cancelled


@pytest.mark.rule("RF-31")
@pytest.mark.parametrize(
    "how", ["nil", "other number", "other key", "no key", "malformed", "text", "nothing", "never", "cut"]
)
async def test_rf31_answers_that_are_none(how: str, autojump_clock: MockClock) -> None:
    """Each means lost, for one reason; the connection goes on but for its own end."""
    notes = {
        "other number": ActorIdentity(8, "/desk", NODE, KEY).encode(),
        "other key": ActorIdentity(7, "/desk", NODE, KEY[::-1]).encode(),
        "no key": ActorIdentity(7, "/desk").encode(),
        "malformed": b"\x80",
    }
    ends: list[Any] = []

    async def answer(m: RawMessage) -> None:
        reply = reply_to(m)
        match how:
            case "nil":
                reply.send(RawMessage(b"\xc0"))
            case "text":
                reply.send(RawMessage(b"\xa1x"))
            case "nothing":
                reply.finish_nowait()
            case "cut":
                await trio.sleep(1)
                reply.cancel()
            case "never":
                ends.append(await reply.terminated())
            case _:
                sender, receiver = channel(RawMessage)
                reply.send(RawMessage(attachment(4, 0, notes[how]), (sender,)))
                with receiver, pytest.raises(Exception) as ended:  # noqa: PT011 - by either of two ends
                    await receiver.receive()
                ends.append(type(ended.value))

    async with claimed(answer) as (ref, reasons):
        await trio.sleep(6)
        assert (ref.state, reasons) == (RefState.LOST, [Lost("a")])
        assert ref.system.statistics().dead_letters == 1
        await settled()
        assert len(ends) == (how in notes or how == "never")
        assert all(end in (EndOfChannel, *ends) for end in ends)
        assert ref.fleet is not None
        again = ref.fleet.third(THEIRS)
        assert again is not ref
        assert again.is_alive


@pytest.mark.rule("RF-31")
async def test_rf31_another_node_answers(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    """Its claim would show it the key."""

    async def answer(m: RawMessage) -> None:
        raise AssertionError("there is no claim")

    async with claimed(answer, node_id=b"another node....") as (_, reasons):
        await settled()
        assert reasons == [Lost("a")]
        assert "another system answers there" in caplog.text
