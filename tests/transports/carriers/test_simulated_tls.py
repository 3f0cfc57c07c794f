"""TLS in simulated worlds agrees with TLS on sockets: who is trusted, by which name, and what both ends know of each other."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from levada.framework.errors import ConfigurationError, ConnectionLost, IdleTimeout
from levada.framework.testing.simulation import World, simulate
from levada.transports.carriers import tls
from levada.transports.carriers.tls import TlsConfig, make_context

if TYPE_CHECKING:
    from tests.transports.conftest import Authority


def in_a_world(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a main function as the process of a world, and return its result."""
    found: list[Any] = []

    async def noted() -> None:
        found.append(await main())

    async def scenario(world: World) -> None:
        assert await (await world.start("main", noted)).wait() == 0

    simulate(scenario, seeds=[1])
    return found[-1]


async def agreed(serving: TlsConfig, dialling: TlsConfig) -> tuple[Any, ...]:
    """Return what both sides know of a connection; or the client's error and when it came, when the server has counted it as refused."""
    served: list[Any] = []
    async with tls.listen("tls://127.0.0.1:0", serving) as listener, trio.open_nursery() as nursery:

        async def accept() -> None:
            async with await listener.accept() as server:
                served.append(facts(server.info))
                await server.send_all(await server.receive_some())

        nursery.start_soon(accept)
        when, error = "in the handshake", ""
        try:
            async with tls.dial(listener.url, dialling) as client:
                when = "after the handshake"
                await client.send_all(b"hello")
                assert await client.receive_some() == b"hello"
                return facts(client.info), *served
        except ConnectionLost as lost:
            error = str(lost)
        while not listener.admission.refused:  # noqa: ASYNC110 - the listener has no event for it
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
        return when, error.partition(" failed: ")[2] or error, served


def facts(info: Any) -> Any:
    return attrs.asdict(attrs.evolve(info, local="", peer=""))


CASES = [
    "trusted", "stranger", "wrong name", "not verified", "protocols", "client shown", "client missing", "client optional", "client stranger",
    "1.2", "1.3 wanted",
]  # fmt: skip


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.parametrize("case", CASES)
def test_a_world_agrees_with_sockets(case: str, authority: Authority, stranger: Authority) -> None:
    serving = TlsConfig(certificate=authority.issue("server"))
    dialling = TlsConfig(ca=authority.ca)
    asking = attrs.evolve(serving, ca=authority.ca, client_certificates="required")
    old = ssl.create_default_context(cafile=str(authority.ca))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    sides = {
        "trusted": (serving, dialling),
        "stranger": (attrs.evolve(serving, certificate=stranger.issue("server")), dialling),
        "wrong name": (serving, attrs.evolve(dialling, server_name="elsewhere")),
        "not verified": (serving, TlsConfig(verify=False)),
        "protocols": (
            attrs.evolve(serving, alpn=("two", "one")),
            attrs.evolve(dialling, alpn=("one", "two"), server_name="server"),
        ),
        "client shown": (asking, attrs.evolve(dialling, certificate=authority.issue("client"))),
        "client missing": (asking, dialling),
        "client optional": (attrs.evolve(asking, client_certificates="optional"), dialling),
        "client stranger": (asking, attrs.evolve(dialling, certificate=stranger.issue("client"))),
        "1.2": (serving, TlsConfig(context=old)),
        "1.3 wanted": (attrs.evolve(serving, minimum_version=ssl.TLSVersion.TLSv1_3), TlsConfig(context=old)),
    }
    main = partial(agreed, *sides[case])
    found = in_a_world(main)
    assert found == trio.run(main)
    if case == "client shown":
        assert found[1]["peer_subject"] == "CN=client"
        assert "DNS:client" in found[1]["peer_names"]
    if case == "wrong name":
        assert "elsewhere" in found[1]


def test_a_reloaded_certificate_is_shown_to_the_next_client(authority: Authority, stranger: Authority) -> None:
    async def main() -> list[str | None]:
        file = authority.issue("server")  # in here: a world that imports modules is run again
        shown: list[str | None] = []
        async with tls.listen("tls://localhost:0", TlsConfig(certificate=file)) as listener:
            for name in ("server", "renewed"):
                async with tls.dial(listener.url, TlsConfig(ca=authority.ca)) as client:
                    shown.append(client.info.peer_subject)
                if name == "server":
                    authority.issue("renewed", file=file)
                    listener.reload()
        return shown

    assert in_a_world(main) == ["CN=server", "CN=renewed"]


def test_mistakes_in_settings_are_refused(authority: Authority) -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="needs a certificate"):
            async with tls.listen("tls://localhost:0"):
                pass
        with pytest.raises(ConfigurationError, match="cannot be the name of a server"):
            async with tls.dial("tls://localhost:1", TlsConfig(ca=authority.ca, server_name=".")):
                pass

    in_a_world(main)


def test_a_handshake_out_of_reach_ends_in_time(authority: Authority) -> None:
    async def scenario(world: World) -> None:
        async def server() -> None:
            context = make_context(TlsConfig(certificate=authority.issue("a")), ssl.Purpose.CLIENT_AUTH)
            context.sni_callback = lambda *_: world.cut("a", "b")  # before the answer
            async with tls.listen("tls://0.0.0.0:443", TlsConfig(context=context)):
                await trio.sleep_forever()

        async def client() -> None:
            with pytest.raises(IdleTimeout, match=r"no TLS handshake with a:443 within 3\.0 s"):
                async with tls.dial("tls://a:443", TlsConfig(ca=authority.ca, handshake_timeout=3.0)):
                    pass

        await world.start("server", server, machine="a")
        await trio.sleep(1)
        assert await (await world.start("client", client, machine="b")).wait() == 0

    simulate(scenario, seeds=[1], machines=["a", "b"])
