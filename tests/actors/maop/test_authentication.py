"""Who is let in, who decides, and how long that may take."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from levada.actors.authentication import Credentials, PeerRefused, Refused
from levada.actors.maop import (
    AuthenticationConfig,
    Disapproved,
    Handler,
    HandlerSpec,
    MaopConfig,
    OperationRefused,
    PeerConfig,
    connect,
    serve,
)
from levada.framework import Actor, ActorSystem, Identity, Limits, handles
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.framework.testing import Probe
from levada.transports.maop import Version

from .conftest import CLIENT, Start, echo, nothing


async def test_tokens_name_the_client(start: Start) -> None:
    async with start({}) as ends:
        assert ends.peer.identifier == "client-1"
        assert ends.caller.identity == CLIENT
        assert [peer.identifier for peer in ends.listener.peers] == ["client-1"]
        assert len(ends.peer.session_id) == 16


@pytest.mark.rule("MA-34a")
@pytest.mark.parametrize(
    "wrong", [{"token": b"guess"}, {"token": b""}, {"auth_type": "Basic"}], ids=["token", "no token", "type"]
)
async def test_ma34a_nobody_is_let_in_without_a_valid_token(
    start: Start, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Token and pairs are judged last; the failure is 1, and the log has no token."""
    caplog.set_level(logging.DEBUG)
    async with start({}) as ends:
        with pytest.raises(Disapproved) as refused:
            given: dict[str, Any] = {"token": b"secret"} | wrong
            async with connect(ends.system, ends.listener.url, **given):
                pass
        assert (refused.value.code, refused.value.retry_after) == (1, None)
        assert refused.value.detail == "These credentials are not valid here."
        assert len(ends.listener.peers) == 1
    assert "guess" not in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.rule("MA-19")
async def test_ma19_a_function_decides_by_token_and_pairs(start: Start, scheme: str) -> None:
    """The server decides by token and pairs, which stay with the session; it may demand a channel binding."""
    asked: list[Credentials] = []

    async def decide(question: Credentials) -> Identity | Refused:
        asked.append(question)
        if question.headers.get("binding") != question.info.peer.encode():
            return Refused("The channel binding is absent or wrong.", retry_after=3.0)
        return Identity("bound", tenant="acme", roles=frozenset({"admin"}))

    handlers = {101: Handler(echo, spec=HandlerSpec(role="admin")), 102: Handler(echo, spec=HandlerSpec(role="root"))}
    async with (
        ActorSystem() as system,
        serve(system, f"maop+{scheme}://desk", handlers, authenticate=decide) as listener,
    ):
        with pytest.raises(Disapproved) as refused:
            async with connect(system, listener.url, token=b"t"):
                pass
        assert (refused.value.code, refused.value.retry_after) == (1, 3.0)
        pairs = {"binding": asked[0].info.peer}
        async with connect(system, listener.url, token=b"t", auth_type="Custom", pairs=pairs) as peer:
            assert await peer.request(101, b"x") == b"x"
            with pytest.raises(OperationRefused) as no:
                await peer.request(102)
            assert no.value.code == 1
            [caller] = listener.peers
            assert caller.identity == Identity("bound", tenant="acme", roles=frozenset({"admin"}))
            assert caller.pairs["binding"] == asked[0].info.peer
    assert (asked[1].protocol, asked[1].listener) == ("maop", f"maop+{scheme}://desk")
    assert (asked[1].scheme, asked[1].token) == ("custom", b"t")
    assert (asked[1].setup.vendor, asked[1].setup.version) == ("levada", Version(1, 0, 0))
    assert "b't'" not in repr(asked[1])


async def test_an_actor_decides(start: Start, scheme: str) -> None:
    class Gatekeeper(Actor[Credentials]):
        @handles
        def on_question(self, m: Credentials) -> Identity | Refused:
            return Identity(m.token.decode()) if m.token.startswith(b"c-") else Refused()

    async with ActorSystem() as system:
        gatekeeper = system.spawn(Gatekeeper)
        async with serve(system, f"maop+{scheme}://desk", {}, authenticate=gatekeeper) as listener:
            async with connect(system, listener.url, token=b"c-7") as peer:
                assert peer.identifier == "c-7"
            with pytest.raises(Disapproved):
                async with connect(system, listener.url, token=b"x"):
                    pass


@pytest.mark.rule("MA-20")
async def test_ma20_the_decision_has_a_deadline(autojump_clock: MockClock, scheme: str) -> None:
    """Authentication deadline, then Disapproved UNAUTHORIZED (1) and close; the function is cancelled."""
    said: list[str] = []

    async def never(question: Credentials) -> Identity:
        try:
            await trio.sleep_forever()
        finally:
            said.append("cancelled")
        raise AssertionError

    config = PeerConfig(core=MaopConfig(authentication=AuthenticationConfig(auth_timeout=2.0)))
    async with (
        ActorSystem() as system,
        serve(system, f"maop+{scheme}://desk", {}, authenticate=never, config=config) as listener,
    ):
        with pytest.raises(Disapproved) as refused:
            async with connect(system, listener.url, token=b"t"):
                pass
        assert refused.value.code == 1
        assert trio.current_time() == pytest.approx(2.0, abs=0.1)
        assert said == ["cancelled"]
        assert listener.refused == 1


async def test_refusals_and_limits_of_a_tenant_are_on_record(scheme: str) -> None:
    """Each refusal is one event: the hook's, the core's deadline, and a connection more than the tenant may have."""

    async def decide(question: Credentials) -> Identity | Refused:
        if question.token == b"":
            return Refused("No token.", code=1025, retry_after=2.5)
        return Identity(question.token.decode(), tenant="acme", limits=Limits(max_connections=1))

    async with ActorSystem() as system, serve(system, f"maop+{scheme}://desk", {}, authenticate=decide) as listener:
        audit = Probe(system)
        system.events.subscribe(PeerRefused, audit.ref)
        async with connect(system, listener.url, token=b"ada") as peer:
            [caller] = listener.peers
            assert (caller.identity, peer.identity) == (
                Identity("ada", tenant="acme", limits=Limits(max_connections=1)),
                None,
            )
            with pytest.raises(Disapproved) as refused:
                async with connect(system, listener.url, token=b"bob"):
                    pass
            assert (refused.value.code, refused.value.detail) == (
                1,
                "Too many connections of this tenant: 1, at most 1.",
            )
            with pytest.raises(Disapproved) as refused:
                async with connect(system, listener.url):
                    pass
            assert (refused.value.code, refused.value.retry_after) == (1025, 2.5)
        events = [await audit.expect(PeerRefused) for _ in range(2)]
        assert [(event.protocol, event.name, event.reason) for event in events] == [
            ("maop", "bob", "Too many connections of this tenant: 1, at most 1."),
            ("maop", "", "No token."),
        ]
        assert listener.refused == 2


@pytest.mark.handler_fails
@pytest.mark.parametrize("outcome", ["raises", "returns nonsense", "names nobody"])
async def test_an_authenticator_that_fails_lets_nobody_in(
    outcome: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock, scheme: str
) -> None:
    async def broken(question: Credentials) -> Any:
        if outcome == "raises":
            raise OSError("database is down")
        return True if outcome == "returns nonsense" else Identity("")

    async with ActorSystem() as system, serve(system, f"maop+{scheme}://desk", {}, authenticate=broken) as listener:
        with pytest.raises(Disapproved) as refused:
            async with connect(system, listener.url, token=b"t"):
                pass
        assert refused.value.code == 1
        assert "database" not in refused.value.detail
        assert listener.peers == []
    assert any(record.levelno == logging.ERROR for record in caplog.records)


async def test_who_cannot_decide_is_refused_at_once(start: Start) -> None:
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match="authenticate"):
            async with serve(system, "maop+memory://desk", {}, authenticate=None):  # type: ignore[arg-type]
                pass
        with pytest.raises(ConfigurationError, match="expected maop://"):
            async with connect(system, "rsocket://desk"):
                pass
        with pytest.raises(ConnectionLost):
            async with connect(system, "maop+memory://nobody-there", token=b"t"):
                pass


@pytest.mark.rule("MA-33")
async def test_ma33_another_major_version_is_not_let_in(start: Start, autojump_clock: MockClock) -> None:
    """Major differs: audit record, Disapproved PROTOCOL_VIOLATION (12)."""
    async with start({101: nothing}) as ends:
        other = PeerConfig(core=MaopConfig(version=Version(2, 0, 0)))
        with pytest.raises(Disapproved) as refused:
            async with connect(ends.system, ends.listener.url, token=b"secret", config=other):
                pass
        assert refused.value.code == 12
        assert await ends.peer.request(101) == b""
