"""A small reader that acks what it gets, for tests of what writes; and certificates."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from levada.framework.errors import CarrierError
from levada.transports.carriers import ByteStream, Listener, listen
from levada.transports.lumberjack import ReaderConfig, ReaderCore, UnitReady


@pytest.fixture
def user_code_fails() -> None:
    """For a test whose sink or actor fails on purpose: that may be logged with its traceback."""


@pytest.fixture(autouse=True)
def _no_traceback(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer sends, and no fault of ours, ends in a traceback in a log."""
    yield
    if "user_code_fails" in request.fixturenames:
        return
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


class SmallReader:
    """Takes whatever comes, of any number of writers, and acks it unless it is held."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.events: list[dict[str, Any]] = []
        self.acks = trio.Event()
        self.acks.set()
        self._changed = trio.Event()

    async def read(self, stream: ByteStream) -> None:
        core = ReaderCore(ReaderConfig(), now=trio.current_time())
        try:
            async with stream:
                while data := await stream.receive_some():
                    found = core.receive_data(data, trio.current_time())
                    while found or core.has_work:
                        for event in found:
                            if isinstance(event, UnitReady):
                                self.events += event.events
                                self._changed.set()
                                await self.acks.wait()
                                core.commit(event.number, trio.current_time())
                        found = core.work(trio.current_time())
                    await stream.send_all(b"".join(core.data_to_send(trio.current_time())))
        except CarrierError:
            pass

    async def grows(self) -> None:
        """Wait for the next events."""
        self._changed = trio.Event()
        await self._changed.wait()

    async def has(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many events since the last time, and take them."""
        while len(self.events) < count:
            self._changed = trio.Event()
            await self._changed.wait()
        events, self.events = self.events, []
        return events


@asynccontextmanager
async def open_small_reader(url: str = "memory://small", config: Any = None) -> AsyncIterator[SmallReader]:
    async with listen(url, config) as found, trio.open_nursery() as nursery:
        listener = cast("Listener[ByteStream]", found)

        async def accept() -> None:
            while True:
                nursery.start_soon(reader.read, await listener.accept())

        reader = SmallReader(
            listener.url.replace("tcp://", "lumberjack://")
            .replace("memory", "lumberjack+memory")
            .replace("tls://", "lumberjack+tls://")
        )
        nursery.start_soon(accept)
        yield reader
        nursery.cancel_scope.cancel()


@pytest.fixture
def small_reader() -> Callable[..., AbstractAsyncContextManager[SmallReader]]:
    return open_small_reader


@attrs.frozen
class Authority:
    """A certificate authority of one's own; `ca` is its certificate's file."""

    ca: Path
    key: ec.EllipticCurvePrivateKey

    def issue(self, name: str, *hosts: str, hours: int = 24) -> Path:
        """Write a file with a certificate, for 127.0.0.1 unless other hosts are given, and its key."""
        own = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts]
        names = names or [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        made = _certificate(name, self.ca.stem, own.public_key(), hours)
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        file = self.ca.with_name(f"{name}.pem")
        pem = serialization.Encoding.PEM
        secret = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        file.write_bytes(secret + made.sign(self.key, hashes.SHA256()).public_bytes(pem))
        return file


def _certificate(subject: str, issuer: str, public: ec.EllipticCurvePublicKey, hours: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    from_whom, for_whom = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in (issuer, subject)
    )
    return x509.CertificateBuilder(
        from_whom,
        for_whom,
        public,
        x509.random_serial_number(),
        now - datetime.timedelta(hours=48),
        now + datetime.timedelta(hours=hours),
    )


@pytest.fixture(scope="session")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """Two that do not know each other."""
    made = []
    for name in ("one", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        ca = tmp_path_factory.mktemp(name) / f"{name}.pem"
        top = _certificate(name, name, key.public_key(), 24)
        top = top.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        ca.write_bytes(top.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        made.append(Authority(ca, key))
    return made[0], made[1]
