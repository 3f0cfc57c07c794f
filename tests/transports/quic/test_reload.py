"""A listener reads its certificate files again, while connections live on."""

from __future__ import annotations

import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio
from tests.simnet import SimNet

from levada.actors.interop.certificates import SelfSigned, make_certificates
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports.quic import QuicConfig, QuicConnection, QuicListener, dial, listen


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[SelfSigned]:
    return [make_certificates(tmp_path_factory.mktemp("certificates")) for _ in range(2)]


def put(made: SelfSigned, folder: Path) -> QuicConfig:
    for file in (made.certificate, made.key):
        shutil.copy(file, folder / file.name)
    return QuicConfig(certificate=folder / "cert.pem", key=folder / "key.pem")


async def accept_all(listener: QuicListener, nursery: trio.Nursery) -> None:
    async def keep(connection: QuicConnection) -> None:
        async with connection:
            await connection.wait_closed()

    while True:
        nursery.start_soon(keep, (await listener.accept()).accept())


async def test_new_clients_see_the_new_certificate_and_old_ones_stay(
    made: list[SelfSigned], tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    net, ports = SimNet(1), iter("abcdef")

    def dialling(ca: Path) -> AbstractAsyncContextManager[QuicConnection]:
        trust = QuicConfig(ca=ca, server_name="localhost")
        return dial("quic://server:4433", trust, port=net.port(next(ports)))

    config = put(made[0], tmp_path)
    async with (
        listen("quic://server:4433", config, port=net.port("server", 4433)) as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(accept_all, listener, nursery)
        async with dialling(made[0].ca) as old:
            put(made[1], tmp_path)
            with pytest.raises(ConnectionLost):
                async with dialling(made[1].ca):
                    pass
            listener.reload()
            async with dialling(made[1].ca):
                pass
            with pytest.raises(ConnectionLost):
                async with dialling(made[0].ca):
                    pass
            stream = await old.open_stream()
            await stream.send_all(b"still here")
            await stream.flush()
        nursery.cancel_scope.cancel()


async def test_files_that_cannot_be_used_change_nothing(
    made: list[SelfSigned], tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    net = SimNet(1)
    config = put(made[0], tmp_path)
    async with (
        listen("quic://server:4433", config, port=net.port("server", 4433)) as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(accept_all, listener, nursery)
        shutil.copy(made[1].key, tmp_path / "key.pem")
        with pytest.raises(ConfigurationError, match=r"key\.pem is not the key of .*cert\.pem"):
            listener.reload()
        (tmp_path / "cert.pem").write_text("nothing of the kind")
        with pytest.raises(ConfigurationError, match="cannot use"):
            listener.reload()
        trust = QuicConfig(ca=made[0].ca, server_name="localhost")
        async with dial("quic://server:4433", trust, port=net.port("client")):
            pass
        nursery.cancel_scope.cancel()
