"""Client certificates: asked for, verified before the client is heard, and named as TLS over TCP names them. Certificates of servers."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aioquic.quic.connection
import attrs
import pytest
import trio
from aioquic import tls
from aioquic.quic.packet import QuicErrorCode
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports.carriers import CarrierInfo, TlsConfig
from levada.transports.carriers import tls as tls_carrier
from levada.transports.quic import ClientSessions, QuicConfig

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
SUBJECT = x509.Name(
    [
        x509.NameAttribute(NameOID.COUNTRY_NAME, "UA"),
        x509.NameAttribute(NameOID.STATE_OR_PROVINCE_NAME, "Kyiv"),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Levada, and Sons"),
        x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, " web+mail"),
        x509.NameAttribute(NameOID.COMMON_NAME, "Олена"),
        x509.NameAttribute(NameOID.EMAIL_ADDRESS, "olena@example.org"),
        x509.NameAttribute(NameOID.SERIAL_NUMBER, "7"),
        x509.NameAttribute(NameOID.USER_ID, "42"),
        x509.NameAttribute(x509.ObjectIdentifier("1.3.6.1.4.1.99999.1"), "#own"),
    ]
)
WRITTEN = (
    r"C=UA,ST=Kyiv,O=Levada\, and Sons,OU=\ web\+mail,CN=Олена,emailAddress=olena@example.org,serialNumber=7,UID=42,"
    r"1.3.6.1.4.1.99999.1=\#own"
)
NAMES = [
    x509.DNSName("olena.example.org"),
    x509.UniformResourceIdentifier("spiffe://example.org/olena"),
    x509.RFC822Name("olena@example.org"),
    x509.IPAddress(ipaddress.ip_address("2001:db8::7")),
    x509.IPAddress(ipaddress.ip_address("192.0.2.7")),
    x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "left out")])),
]
WRITTEN_NAMES = (
    "DNS:olena.example.org",
    "URI:spiffe://example.org/olena",
    "email:olena@example.org",
    "IP Address:2001:db8::7",
    "IP Address:192.0.2.7",
)


def named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


@attrs.frozen
class Issuer:
    """Signs certificates; without a certificate of its own it signs that."""

    folder: Path
    key: Key = attrs.field(factory=new_key)
    title: str = "authority"

    def sign(
        self,
        subject: x509.Name,
        key: Key,
        *extensions: x509.ExtensionType,
        begins: datetime.datetime = NOW - DAY,
        ends: datetime.datetime = NOW + DAY,
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(named(self.title))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self.key, None if isinstance(self.key, ed25519.Ed25519PrivateKey) else hashes.SHA256())

    @property
    def ca(self) -> bytes:
        return pem(self.sign(named(self.title), self.key, x509.BasicConstraints(ca=True, path_length=None)))

    def client(
        self,
        *extensions: x509.ExtensionType,
        key: Key | None = None,
        subject: x509.Name | None = None,
        chain: Sequence[x509.Certificate] = (),
        **times: datetime.datetime,
    ) -> Path:
        """Write a client's certificate and its key."""
        key = key or new_key()
        file = self.folder / f"{x509.random_serial_number()}.pem"
        form, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        written = key.private_bytes(form, private, serialization.NoEncryption())
        file.write_bytes(written + pem(self.sign(subject or named("client"), key, *extensions, **times), *chain))
        file.chmod(0o600)
        return file


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path)


def asking(issuer: Issuer, how: str = "required") -> dict[str, Any]:
    return {"ca": issuer.ca, "client_certificates": how}


KEYS: dict[str, Callable[[], Key]] = {
    "P-256": new_key,
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
}


@pytest.mark.parametrize("kind", KEYS)
async def test_a_client_is_known_by_its_certificate(
    lab: Any, autojump_clock: MockClock, issuer: Issuer, kind: str
) -> None:
    file = issuer.client(x509.SubjectAlternativeName(NAMES), key=KEYS[kind](), subject=SUBJECT)
    async with lab.connected(client={"certificate": file}, **asking(issuer)) as ends:
        info = ends.server.info
        assert info.peer_certificate is not None
        assert x509.load_der_x509_certificate(info.peer_certificate).subject == SUBJECT
        assert info.peer_subject == WRITTEN
        assert info.peer_names == WRITTEN_NAMES
        assert ends.client.info.peer_subject == "CN=server", "the client is told of the server in the same way"
        assert ends.client.info.peer_names == ("DNS:server", "DNS:localhost")
        assert ends.client.info.channel_binding == info.channel_binding is not None


async def test_tls_over_tcp_says_the_same(lab: Any, issuer: Issuer, tmp_path: Path) -> None:
    file, ca = issuer.client(x509.SubjectAlternativeName(NAMES), subject=SUBJECT), tmp_path / "ca.pem"
    ca.write_bytes(issuer.ca)
    serving = TlsConfig(
        certificate=lab.certificate.certificate, key=lab.certificate.private_key, ca=ca, client_certificates="required"
    )
    infos: list[CarrierInfo] = []
    async with tls_carrier.listen("tls://127.0.0.1:0", serving) as listener:
        trust = TlsConfig(ca=lab.certificate.certificate, certificate=file, server_name="server")
        async with tls_carrier.dial(listener.url, trust) as stream, await listener.accept() as accepted:
            infos += [accepted.info, stream.info]
    assert (infos[0].peer_subject, infos[0].peer_names) == (WRITTEN, WRITTEN_NAMES)
    assert (infos[1].peer_subject, infos[1].peer_names) == ("CN=server", ("DNS:server", "DNS:localhost"))


async def test_a_certificate_may_be_optional(lab: Any, autojump_clock: MockClock, issuer: Issuer) -> None:
    async with lab.connected(**asking(issuer, "optional")) as ends:
        assert ends.server.info.peer_certificate is None
        assert (ends.server.info.peer_subject, ends.server.info.peer_names) == (None, ())
    async with lab.connected(client={"certificate": issuer.client()}, **asking(issuer, "optional")) as ends:
        assert ends.server.info.peer_subject == "CN=client"
    async with lab.connected(client={"certificate": issuer.client()}) as ends:
        assert ends.server.info.peer_certificate is None, "it was not asked for"


async def test_a_chain_leads_to_the_authority(lab: Any, autojump_clock: MockClock, issuer: Issuer) -> None:
    below = Issuer(issuer.folder, title="below")
    between = issuer.sign(named("below"), below.key, x509.BasicConstraints(ca=True, path_length=None))
    async with lab.connected(client={"certificate": below.client(chain=[between])}, **asking(issuer)) as ends:
        assert ends.server.info.peer_subject == "CN=client"


def not_for_clients(issuer: Issuer) -> Path:
    return issuer.client(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]))


def not_for_signatures(issuer: Issuer) -> Path:
    sign = dict.fromkeys(("digital_signature", "content_commitment", "data_encipherment", "key_agreement"), False)
    rest = dict.fromkeys(("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False)
    return issuer.client(x509.KeyUsage(key_encipherment=True, **sign, **rest))


def below_one_for_servers(issuer: Issuer) -> Path:
    below = Issuer(issuer.folder, title="below")
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    between = issuer.sign(named("below"), below.key, x509.BasicConstraints(ca=True, path_length=None), usages)
    return below.client(chain=[between])


def below_a_client(issuer: Issuer) -> Path:
    below = Issuer(issuer.folder, title="below")
    return below.client(chain=[issuer.sign(named("below"), below.key)])


REFUSED: dict[str, tuple[Callable[[Issuer], Path | None], tls.AlertDescription]] = {
    "none": (lambda issuer: None, tls.AlertDescription.certificate_required),
    "of a stranger": (lambda issuer: Issuer(issuer.folder).client(), tls.AlertDescription.bad_certificate),
    "too old": (lambda issuer: issuer.client(ends=NOW - DAY / 2), tls.AlertDescription.bad_certificate),
    "too new": (lambda issuer: issuer.client(begins=NOW + DAY / 2), tls.AlertDescription.bad_certificate),
    "not for clients": (not_for_clients, tls.AlertDescription.unsupported_certificate),
    "not for signatures": (not_for_signatures, tls.AlertDescription.unsupported_certificate),
    "below one for servers": (below_one_for_servers, tls.AlertDescription.unsupported_certificate),
    "below a client": (below_a_client, tls.AlertDescription.bad_certificate),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_a_client_without_a_good_certificate_is_refused_unheard(
    lab: Any, autojump_clock: MockClock, issuer: Issuer, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    make, alert = REFUSED[why]
    net = SimNet(1)
    seen: list[object] = []

    async def serve(listener: Any) -> None:
        connection = (await listener.accept()).accept()
        try:
            seen.append(await connection.accept_stream())
        except ConnectionLost as error:
            seen.append(str(error))

    async with lab.listening(net, **asking(issuer)) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        with pytest.raises(ConnectionLost, match=f"transport error {0x100 + alert:#x}: .*certificate"):
            # As in TLS over TCP, a client cannot know at the end of its handshake whether the server takes its certificate.
            async with lab.dialling(net, certificate=make(issuer)) as connection:
                (await connection.open_stream()).send_nowait(b"too early", fin=True)
                await connection.accept_stream()
        refused = listener.admission.refused
    assert [type(one) for one in seen] == [str], "the stream that came with the refused certificate is not seen"
    assert refused == 1
    assert [record.levelno for record in caplog.records if record.exc_info or record.levelno > logging.WARNING] == []


SERVERS: dict[str, tuple[list[x509.ExtensionType], Callable[[], Key], str]] = {
    "for clients": ([x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])], new_key, r"0x12b: .* not for servers"),
    "too weak": ([], lambda: rsa.generate_private_key(65537, 1024), r"0x12a: .* too weak"),
    "good": ([x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])], new_key, ""),
}


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_server_needs_a_certificate_for_servers(
    lab: Any, autojump_clock: MockClock, issuer: Issuer, kind: str
) -> None:
    extensions, key, error = SERVERS[kind]
    file = issuer.client(x509.SubjectAlternativeName([x509.DNSName("server")]), *extensions, key=key())
    net = SimNet(1)
    async with lab.listening(net, certificate=file, key=file) as listener, trio.open_nursery() as nursery:

        async def serve() -> None:
            connection = (await listener.accept()).accept()
            with contextlib.suppress(ConnectionLost):
                await connection.accept_stream()

        nursery.start_soon(serve)
        with pytest.raises(ConnectionLost, match=error) if error else contextlib.nullcontext():
            async with lab.dialling(net, ca=issuer.ca):
                pass


VERSION = b"\xa0\x03\x02\x01\x02"  # of X.509: 3
NAMED = b"\x82\x01a"  # DNS:a


@pytest.mark.parametrize(
    "change",
    [
        (VERSION, b"\xa0\x03\x02\x01\x09"),
        (NAMED, b"\xa3\x01a"),
        (b"\x30\x82", b"\x31\x82"),
    ],
    ids=["version", "kind of name", "no certificate"],
)
async def test_a_certificate_that_cannot_be_read_ends_its_connection_only(
    lab: Any,
    autojump_clock: MockClock,
    issuer: Issuer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: tuple[bytes, bytes],
) -> None:
    file = issuer.client(x509.SubjectAlternativeName([x509.DNSName("a")]))
    good = x509.load_pem_x509_certificate(file.read_bytes()).public_bytes(serialization.Encoding.DER)
    bad = good.replace(*change, 1)
    assert bad != good
    push = tls.push_certificate

    def push_bad(buf: Any, certificate: tls.Certificate) -> None:
        certificate.certificates = [(bad if der == good else der, more) for der, more in certificate.certificates]
        push(buf, certificate)

    monkeypatch.setattr(tls, "push_certificate", push_bad)
    net = SimNet(1)

    async def serve(listener: Any) -> None:
        while True:
            (await listener.accept()).accept()

    async with lab.listening(net, **asking(issuer)) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        with pytest.raises(ConnectionLost, match=r"transport error 0x1(2a|33): "):
            async with lab.dialling(net, certificate=file) as connection:
                await connection.accept_stream()
        monkeypatch.undo()
        async with lab.dialling(net, certificate=file) as connection:
            await trio.sleep(1)
            assert not connection.closed
        nursery.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_a_server_that_asks_resumes_no_session(lab: Any, autojump_clock: MockClock, issuer: Issuer) -> None:
    """A ticket that a server gave before it asked is worth nothing: the client shows its certificate, and early data is refused."""
    net, sessions = SimNet(1), ClientSessions()
    async with lab.connected(net, client={"sessions": sessions}) as ends:
        await trio.sleep(1)
    shown = {"sessions": sessions, "certificate": issuer.client()}
    for _ in range(2):
        async with lab.connected(SimNet(1), client=shown, **asking(issuer)) as ends:
            assert (ends.server.info.resumed, ends.client.info.resumed) == (False, False)
            assert ends.server.info.peer_subject == "CN=client"
            await trio.sleep(1)
        assert sessions.take_ticket("server:4433") is None


async def test_a_long_message_of_the_handshake_is_not_kept(
    lab: Any, autojump_clock: MockClock, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of 97 kB, in pieces that the server would have to keep until the last has come."""
    chain = [issuer.sign(SUBJECT, new_key(), x509.SubjectAlternativeName(NAMES * 30)) for _ in range(25)]
    with pytest.raises(ConfigurationError, match=r"have 9\d{4} bytes, at most 14336"):
        lab.client(certificate=issuer.client(chain=chain)).for_engine(is_client=True)
    monkeypatch.setattr(aioquic.quic.connection, "CRYPTO_BUFFER_SIZE", 1 << 20)
    net = SimNet(1)

    async def serve(listener: Any) -> None:
        (await listener.accept()).accept()

    async with lab.listening(net, **asking(issuer)) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        with pytest.raises(ConnectionLost, match=f"{QuicErrorCode.CRYPTO_BUFFER_EXCEEDED:#x}: Handshake message"):
            async with lab.dialling(net, certificate=issuer.client(chain=chain)) as connection:
                await connection.accept_stream()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"client_certificates": "required"}, "set `ca`"),
        ({"client_certificates": "optional", "ca": b"no certificate"}, "cannot use `ca`"),
        ({"client_certificates": "required", "ca": "missing.pem"}, "cannot use missing.pem"),
    ],
)
def test_authorities_that_cannot_be_used_are_found_before_the_first_client(
    lab: Any, changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigurationError, match=what):
        lab.server(**changes).for_engine(is_client=False)


def test_a_clients_key_must_fit_its_certificate(issuer: Issuer) -> None:
    with pytest.raises(ConfigurationError, match="is not the key of"):
        QuicConfig(certificate=issuer.client(), key=issuer.client()).for_engine(is_client=True)
