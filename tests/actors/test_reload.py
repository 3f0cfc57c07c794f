"""``Listener.reload`` of servers that have certificates, and of those that have no files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from levada.actors import aqueduct, rsocket
from levada.actors.interop.certificates import SelfSigned, make_certificates
from levada.actors.rsocket import ClientConfig, Request, ServerConfig
from levada.framework import ActorSystem
from levada.framework.errors import CarrierError, ConfigurationError
from levada.transports.carriers import TlsConfig
from levada.transports.carriers.websocket_config import WebSocketConfig


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[SelfSigned]:
    return [make_certificates(tmp_path_factory.mktemp("certificates")) for _ in range(2)]


def put(made: SelfSigned, folder: Path) -> TlsConfig:
    for file in (made.certificate, made.key):
        shutil.copy(file, folder / file.name)
    return TlsConfig(certificate=folder / "cert.pem", key=folder / "key.pem")


async def echo(request: Request) -> bytes:
    return request.data


@pytest.mark.loopback
@pytest.mark.parametrize("carrier", ["tls", "wss"])
async def test_new_clients_see_the_new_certificate_and_old_ones_stay(
    made: list[SelfSigned], tmp_path: Path, carrier: str
) -> None:
    def settings(tls: TlsConfig) -> Any:
        return tls if carrier == "tls" else WebSocketConfig(tls=tls)

    trusting = [ClientConfig(carrier=settings(TlsConfig(ca=one.ca))) for one in made]
    config = ServerConfig(carrier=settings(put(made[0], tmp_path)))
    async with (
        ActorSystem() as system,
        rsocket.serve(system, f"rsocket+{carrier}://127.0.0.1:0", echo, config=config) as listener,
        rsocket.connect(system, listener.url, config=trusting[0]) as old,
    ):
        put(made[1], tmp_path)
        listener.reload()
        async with rsocket.connect(system, listener.url, config=trusting[1]) as new:
            assert (await new.request_response(b"new")).data == b"new"
        with pytest.raises(CarrierError):
            async with rsocket.connect(system, listener.url, config=trusting[0]):
                pass
        (tmp_path / "cert.pem").write_text("nothing of the kind")
        with pytest.raises(ConfigurationError, match=r"cert\.pem"):
            listener.reload()
        assert (await old.request_response(b"old")).data == b"old"
        async with rsocket.connect(system, listener.url, config=trusting[1]):
            pass


async def test_a_server_without_files_has_nothing_to_do() -> None:
    async def ignore(m: object) -> None:
        pass

    async with (
        ActorSystem() as system,
        rsocket.serve(system, "rsocket+memory://none", echo) as one,
        aqueduct.serve(system, "aqueduct+memory://nothing", ignore, Any) as other,
        rsocket.connect(system, one.url) as peer,
        aqueduct.connect(system, other.url, object) as entry,
    ):
        for listener in (one, other):
            listener.reload()
        assert (await peer.request_response(b"still here")).data == b"still here"
        await entry.send("still here")
        assert [len(one.peers), len(other.peers)] == [1, 1]
