"""Admission of clients, as a protocol gets it from the driver: the toy protocol of ``docs/how-to/add-a-protocol.md`` adds two methods."""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any

import pytest
import trio
from tests.packages import modules_of
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors import aqueduct, maop, reactivesocket, rsocket
from levada.actors.authentication import Authentication, Authenticator, Credentials, Gatekeeper, PeerRefused, Refused
from levada.framework import Actor, ActorSystem, Identity, Limits, handles
from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.testing import Probe
from levada.transports.carriers import CarrierInfo, MemoryConfig, dial

Serve = Callable[..., AbstractAsyncContextManager[Any]]
FAILED = "The server could not check these credentials."
LATE = "The server did not check these credentials in time."


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("toy")
    for name, (text, _) in modules_of("add-a-protocol.md").items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("toy_protocol")


async def shout(data: bytes) -> bytes:
    return data.upper()


async def ada(asked: Credentials) -> Identity | Refused:
    return Identity("ada")


async def no(asked: Credentials) -> Identity | Refused:
    return Refused("Not today.")


def serving(toy: Any, system: ActorSystem, authenticate: Any) -> AbstractAsyncContextManager[Any]:
    serving: AbstractAsyncContextManager[Any] = toy.serve(system, "toy+memory://desk", shout, authenticate=authenticate)
    return serving


async def reason(toy: Any, system: ActorSystem) -> str:
    """Return why a client is refused; empty if it is served."""
    try:
        async with toy.connect(system, "toy+memory://desk") as peer:
            assert await peer.request(b"a") == b"A"
    except ExceptionGroup as group:
        [error] = group.exceptions
        return str(error)
    except LevadaError as error:
        return str(error)
    return ""


def connections(listener: Any) -> list[Any]:
    return list(listener._actor.connections)


async def test_an_admitted_client_is_served_and_named(toy: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked: list[Credentials] = []

    async def decide(credentials: Credentials) -> Identity | Refused:
        asked.append(credentials)
        return Identity("ada", tenant="acme")

    async with ActorSystem() as system, serving(toy, system, decide) as listener:
        async with toy.connect(system, listener.url) as peer:
            assert await peer.request(b"hello") == b"HELLO"
            [connection] = connections(listener)
            assert connection.identity == Identity("ada", tenant="acme")
            assert str(connection.remote) == f"ada ({connection.info.peer})"
            assert (connection.remote.protocol, connection.remote.info) == ("toy", connection.info)
            assert peer.remote.identity is None
            path = connection.ref.path
        await connection.ref.terminated()
        assert listener.refused == 0
    [credentials] = asked
    assert (credentials.protocol, credentials.listener, credentials.early) == ("toy", "toy+memory://desk", False)
    assert credentials.info.scheme == "memory"
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith(path)] == [
        f"{path} (ada): ended: drained, code 0"
    ]


async def test_what_a_client_has_shown_is_not_kept(toy: Any) -> None:
    asked: list[weakref.ref[Credentials]] = []

    async def decide(credentials: Credentials) -> Identity | Refused:
        asked.append(weakref.ref(credentials))
        return Identity("ada") if len(asked) == 1 else Refused()

    async with ActorSystem() as system, serving(toy, system, decide) as listener:
        async with toy.connect(system, listener.url) as peer:
            await peer.request(b"")
            await wait_all_tasks_blocked()
            assert [credentials() for credentials in asked] == [None]
        await reason(toy, system)
        await wait_all_tasks_blocked()
        assert [credentials() for credentials in asked] == [None, None]


async def test_without_a_hook_every_client_comes_in(toy: Any) -> None:
    async with ActorSystem() as system, serving(toy, system, None) as listener:
        assert await reason(toy, system) == ""
        async with toy.connect(system, listener.url) as peer:
            await peer.request(b"")
            [connection] = connections(listener)
            assert (connection.identity, connection.remote.identity) == (None, None)


async def test_a_refusal_reaches_the_client_an_event_a_counter_and_one_log_line(
    toy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem() as system, serving(toy, system, no) as listener:
        audit = Probe(system)
        system.events.subscribe(PeerRefused, audit.ref)
        for _ in range(3):
            assert "Not today." in await reason(toy, system)
        events = [await audit.expect(PeerRefused) for _ in range(3)]
        assert listener.refused == 3
        assert connections(listener) == []
    for event in events:
        assert (event.protocol, event.listener, event.name, event.reason) == (
            "toy", "toy+memory://desk", "", "Not today.",
        )  # fmt: skip
    lines = [record.getMessage() for record in caplog.records if "turned" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("toy+memory://desk turned ")
    assert lines[0].endswith(" away: Not today.")


async def test_nothing_of_a_client_is_handled_before_it_is_admitted(toy: Any) -> None:
    handled, may = list[bytes](), trio.Event()

    async def note(data: bytes) -> bytes:
        handled.append(data)
        return data

    async def decide(asked: Credentials) -> Identity | Refused:
        await may.wait()
        return Identity("ada")

    async with (
        ActorSystem() as system,
        toy.serve(system, "toy+memory://desk", note, authenticate=decide) as listener,
        toy.connect(system, listener.url) as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(peer.request, b"early")
        await wait_all_tasks_blocked()
        assert (handled, connections(listener)) == ([], [])
        may.set()
        await wait_all_tasks_blocked()
        assert handled == [b"early"]


async def test_an_actor_decides(toy: Any) -> None:
    class Door(Actor[Credentials]):
        known: int = 0

        @handles
        def check(self, m: Credentials) -> Identity | Refused:
            self.known += 1
            return Identity(f"guest-{self.known}") if self.known < 2 else Refused("Full.")

    async with ActorSystem() as system:
        door = system.spawn(Door)
        async with serving(toy, system, door) as listener:
            assert await reason(toy, system) == ""
            assert "Full." in await reason(toy, system)
            door.stop()
            assert FAILED in await reason(toy, system)
            assert listener.refused == 2


async def fails(asked: Credentials) -> Identity | Refused:
    raise ZeroDivisionError("secret detail")


async def returns_a_name(asked: Credentials) -> Any:
    return "ada"


@pytest.mark.parametrize("hook", [fails, returns_a_name, lambda asked: Identity("ada")], ids=["fails", "str", "sync"])
async def test_a_hook_that_fails_refuses_in_neutral_words(
    toy: Any, hook: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem() as system, serving(toy, system, hook):
        told = await reason(toy, system)
    assert FAILED in told
    assert "secret" not in told
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == ["toy+memory://desk: authenticate failed"]
    assert errors[0].exc_info is not None


async def test_a_hook_that_is_stopped_refuses() -> None:
    answers: list[Identity | Refused] = []
    info = CarrierInfo(scheme="memory", local="a", peer="b")
    credentials = Credentials(protocol="toy", listener="toy:", info=info)
    async with ActorSystem() as system:
        authenticator = system.spawn(Authenticator, Gatekeeper(Authentication(hangs)), credentials, answers.append)
        await wait_all_tasks_blocked()
        authenticator.kill()
        await authenticator.terminated()
    assert answers == [Refused(FAILED, retry_after=1.0)]


async def hangs(asked: Credentials) -> Identity | Refused:
    await trio.sleep_forever()
    raise AssertionError


async def test_a_decision_has_a_deadline(toy: Any, autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, serving(toy, system, Authentication(hangs, timeout=3.0)) as listener:
        began = trio.current_time()
        assert LATE in await reason(toy, system)
        assert trio.current_time() - began == pytest.approx(3.0)
        assert listener.refused == 1


async def test_few_hooks_run_at_once_and_the_others_wait_in_order(toy: Any, autojump_clock: MockClock) -> None:
    running, most, order = 0, 0, list[str]()

    async def decide(asked: Credentials) -> Identity | Refused:
        nonlocal running, most
        running += 1
        most = max(most, running)
        order.append(asked.info.peer)
        await trio.sleep(1.0)
        running -= 1
        return Identity(asked.info.peer)

    async with (
        ActorSystem() as system,
        serving(toy, system, Authentication(decide, at_once=2, timeout=2.5)) as listener,
        AsyncExitStack() as stack,
    ):
        for _ in range(6):
            await stack.enter_async_context(dial("memory://desk"))
        await trio.sleep(2.4)
        assert [connection.identity.name for connection in connections(listener)] == order[:4]
        assert (most, len(order)) == (2, 6)
        await trio.sleep(0.2)
        assert (len(connections(listener)), listener.refused) == (4, 2)  # those that waited share the deadline


async def test_a_client_that_leaves_gives_its_place_back(toy: Any, autojump_clock: MockClock) -> None:
    async def decide(asked: Credentials) -> Identity | Refused:
        return await hangs(asked) if not begun.is_set() else Identity("ada")

    begun = trio.Event()
    async with ActorSystem() as system, serving(toy, system, Authentication(decide, at_once=1)) as listener:
        async with dial("memory://desk") as carrier:
            await wait_all_tasks_blocked()
            begun.set()
            began = trio.current_time()
            assert not isinstance(carrier, MemoryConfig)
        assert await reason(toy, system) == ""
        assert trio.current_time() - began < 0.1
        assert listener.refused == 0  # it was not refused: it left


async def test_a_listener_ends_at_once_while_hooks_run(toy: Any, autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, AsyncExitStack() as stack:
        async with serving(toy, system, hangs) as listener:
            for _ in range(3):
                await stack.enter_async_context(dial("memory://desk"))
            await wait_all_tasks_blocked()
            began = trio.current_time()
            await listener.aclose()
            assert trio.current_time() - began < 0.1
        assert listener.refused == 0


async def test_a_tenant_has_a_limit_of_connections(toy: Any) -> None:
    names = iter(["ada", "bob", "eve", "ada"])

    async def decide(asked: Credentials) -> Identity | Refused:
        name = next(names)
        tenant = "acme" if name != "eve" else ""
        return Identity(name, tenant=tenant, limits=Limits(max_connections=1))

    async with ActorSystem() as system, serving(toy, system, decide) as listener:
        audit = Probe(system)
        system.events.subscribe(PeerRefused, audit.ref)
        async with toy.connect(system, listener.url) as peer:
            await peer.request(b"")
            told = await reason(toy, system)
            assert "Too many connections of this tenant: 1, at most 1." in told
            assert (await audit.expect(PeerRefused)).name == "bob"
            assert await reason(toy, system) == ""  # another tenant
            [connection, *_] = connections(listener)
        await connection.ref.terminated()
        assert await reason(toy, system) == ""  # the place is free again


@pytest.mark.parametrize("hook", [{b"token": Identity("ada")}, "ada", 5])
async def test_what_is_no_hook_is_refused_at_once(toy: Any, hook: Any) -> None:
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match=r"^authenticate is .*, wanted an async function or a Ref$"):
            async with serving(toy, system, hook):
                pass


def test_secrets_do_not_show() -> None:
    info = CarrierInfo(scheme="memory", local="a", peer="b")
    shown = repr(
        Credentials(
            protocol="toy",
            listener="toy:",
            info=info,
            scheme="bearer",
            user="ada",
            token=b"hush",
            headers={"a": b"hush"},
        )
    )
    assert "hush" not in shown
    assert "ada" in shown


@pytest.mark.parametrize(
    "wrong",
    [{"code": "no"}, {"code": -1}, {"code": 1 << 62}, {"retry_after": -1.0}, {"retry_after": float("nan")}],
)
def test_a_refusal_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises((ConfigurationError, TypeError, ValueError)):
        Refused("No.", **wrong)


@pytest.mark.parametrize(("code", "of_maop"), [((1 << 62) - 1, 1), (1 << 16, 1), ((1 << 16) - 1, (1 << 16) - 1)])
async def test_a_refusal_that_not_every_protocol_can_express(code: int, of_maop: int) -> None:
    """A text without UTF-8, and codes that only some protocols have."""

    async def decide(credentials: Credentials) -> Identity | Refused:
        return Refused("Who is \udcff?", code=code)

    async def ignore(message: float) -> None: ...

    async def told(
        serve: Callable[..., AbstractAsyncContextManager[Any]],
        connect: Callable[..., AbstractAsyncContextManager[Any]],
        url: str,
        *what: Any,
    ) -> tuple[str, int]:
        async with serve(system, url, *what, authenticate=decide) as listener:
            with pytest.raises(LevadaError) as caught:
                async with connect(system, url, *what[1:]) as peer:
                    await peer.request_response(b"")  # RSocket's client hears of nothing before it asks
            assert listener.refused == 1
        error: Any = caught.value
        return str(error), error.code

    async with ActorSystem() as system:
        for carrier in ("memory", "qmux+memory"):
            text, found = await told(aqueduct.serve, aqueduct.connect, f"aqueduct+{carrier}://desk", ignore, float)
            assert (text.rpartition(": ")[2], found) == ("Who is \\udcff?", code)
        text, found = await told(maop.serve, partial(maop.connect, token=b"a"), "maop+memory://desk", {})
        assert ("Who is" in text, found) == (True, of_maop)
        for dialect in (rsocket, reactivesocket):
            url = f"{dialect.__name__.rpartition('.')[2]}+memory://desk"
            assert await told(dialect.serve, dialect.connect, url, shout) == ("Who is \\udcff?", 3)


@pytest.mark.parametrize("method", ["admitted", "refused"])
async def test_a_client_is_not_kept_waiting_by_a_protocol_that_fails(
    toy: Any, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, decision: object) -> None:
        if self.acceptor is None:
            self.greeted()  # the client
        else:
            raise RuntimeError("not this one")

    monkeypatch.setattr(toy.Connection, method, fail)
    async with ActorSystem() as system:
        audit = Probe(system)
        system.events.subscribe(PeerRefused, audit.ref)
        async with serving(toy, system, ada if method == "admitted" else no) as listener:
            assert FAILED in await reason(toy, system)
            assert (await audit.expect(PeerRefused)).reason == (FAILED if method == "admitted" else "Not today.")
            assert listener.refused == 1
    assert [r.levelname for r in caplog.records if "could not be carried out" in r.getMessage()] == ["ERROR"]


def test_a_channel_binding_is_compared() -> None:
    def bound(own: bytes | None, named: bytes) -> bool:
        info = CarrierInfo(scheme="quic", local="a", peer="b", channel_binding=own)
        return Credentials(protocol="x", listener="x:", info=info, headers={"channel-binding": named}).bound

    assert bound(b"\x01\x02", b"0102")
    assert not bound(b"\x01\x02", b"0103")
    assert not bound(b"\x01\x02", b"")
    assert not bound(None, b"")
