"""TLS: the contract, who is trusted, reload, slow and broken peers, and openssl at either end."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from tests import output

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.transports.carriers import tcp, tls
from levada.transports.carriers.contracts import ByteStream
from levada.transports.carriers.streams import JoinedStream
from levada.transports.carriers.tcp import TcpConfig, TcpListener
from levada.transports.carriers.tls import TlsConfig, TlsListener
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks

if TYPE_CHECKING:
    from tests.transports.conftest import Authority

pytestmark = pytest.mark.loopback

ANY = "tls://127.0.0.1:0"
SMALL = TcpConfig(send_buffer=32 * 1024, receive_buffer=32 * 1024)


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


TRAITS = CarrierTraits(shape="bytes", half_close=False, settle=settle, timeout=20)


@pytest.fixture
def serving(authority: Authority) -> TlsConfig:
    file = authority.issue("server")
    return TlsConfig(certificate=file, tcp=SMALL)


@pytest.fixture
def dialling(authority: Authority) -> TlsConfig:
    return TlsConfig(ca=authority.ca, tcp=SMALL)


@asynccontextmanager
async def pair(serving: TlsConfig, dialling: TlsConfig) -> AsyncIterator[tuple[ByteStream, ByteStream]]:
    async with (
        tls.listen(ANY, serving) as listener,
        tls.dial(listener.url, dialling) as client,
        await listener.accept() as server,
    ):
        yield client, server


@pytest.mark.parametrize("check", carrier_checks(TRAITS), ids=str)
async def test_keeps_the_contract(check: CarrierCheck, serving: TlsConfig, dialling: TlsConfig) -> None:
    await check(lambda: pair(serving, dialling))


async def test_both_ends_know_what_was_agreed_on(serving: TlsConfig, dialling: TlsConfig) -> None:
    serving = attrs.evolve(serving, alpn=("two", "one"))
    dialling = attrs.evolve(dialling, alpn=("one", "two"), server_name="server")
    async with pair(serving, dialling) as (client, server):
        assert (client.info.scheme, client.info.alpn, client.info.tls_version) == ("tls", "two", "TLSv1.3")
        assert (server.info.scheme, server.info.alpn, server.info.tls_version) == ("tls", "two", "TLSv1.3")
        assert client.info.server_name == server.info.server_name == "server"
        assert (client.info.resumed, server.info.resumed) == (False, False)
        assert client.info.peer_certificate is not None
        assert "CN=server" in x509.load_der_x509_certificate(client.info.peer_certificate).subject.rfc4514_string()
        assert server.info.peer_certificate is None
        assert client.info.peer == server.info.local
        assert server.info.peer == client.info.local


async def refused(url: str, config: TlsConfig) -> ConnectionLost:
    with pytest.raises(ConnectionLost) as caught:
        async with tls.dial(url, config):
            pass
    return caught.value


async def test_strangers_are_not_trusted_unless_told_to(
    authority: Authority, stranger: Authority, dialling: TlsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with tls.listen(ANY, TlsConfig(certificate=stranger.issue("server"))) as listener:
        assert "CERTIFICATE_VERIFY_FAILED" in str(await refused(listener.url, dialling))
        assert "CERTIFICATE_VERIFY_FAILED" in str(await refused(listener.url, TlsConfig()))
        async with tls.dial(listener.url, TlsConfig(verify=False)) as client:
            assert client.info.peer_certificate is None, "a certificate that nobody has checked says nothing"
        assert "without verification" in caplog.text


async def test_the_name_is_checked(serving: TlsConfig, dialling: TlsConfig) -> None:
    async with tls.listen(ANY, serving) as listener:
        error = await refused(listener.url, attrs.evolve(dialling, server_name="elsewhere"))
        assert "elsewhere" in str(error)


async def test_client_certificates(
    authority: Authority, stranger: Authority, serving: TlsConfig, dialling: TlsConfig
) -> None:
    asking = attrs.evolve(serving, ca=authority.ca, client_certificates="required")
    showing = attrs.evolve(dialling, certificate=authority.issue("client"))
    async with pair(asking, showing) as (_, server):
        assert server.info.peer_certificate is not None
        assert "CN=client" in x509.load_der_x509_certificate(server.info.peer_certificate).subject.rfc4514_string()
    async with pair(attrs.evolve(asking, client_certificates="optional"), dialling) as (_, server):
        assert server.info.peer_certificate is None
    for config in (dialling, attrs.evolve(dialling, certificate=stranger.issue("client"))):
        async with tls.listen(ANY, asking) as listener, tls.dial(listener.url, config) as client:
            with pytest.raises(ConnectionLost):  # TLS 1.3: the client learns it after its own handshake
                await client.receive_some()


async def test_tls_1_2_is_the_floor_and_1_3_can_be_required(
    serving: TlsConfig, dialling: TlsConfig, authority: Authority
) -> None:
    old = ssl.create_default_context(cafile=str(authority.ca))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with tls.listen(ANY, serving) as listener, tls.dial(listener.url, TlsConfig(context=old)) as client:
        assert client.info.tls_version == "TLSv1.2"
    async with tls.listen(ANY, attrs.evolve(serving, minimum_version=ssl.TLSVersion.TLSv1_3)) as listener:
        await refused(listener.url, TlsConfig(context=old))


async def test_cut_without_close_notify_is_a_loss(serving: TlsConfig, dialling: TlsConfig) -> None:
    """Somebody on the way can end TCP in good order, and must not be able to end the stream."""
    cut = trio.Event()

    async def copy(source: ByteStream, target: ByteStream) -> None:
        while data := await source.receive_some():
            await target.send_all(data)

    async def relay(between: TcpListener, url: str) -> None:
        async with await between.accept() as client, tcp.dial(url) as server, trio.open_nursery() as nursery:
            nursery.start_soon(copy, client, server)
            nursery.start_soon(copy, server, client)
            await cut.wait()
            nursery.cancel_scope.cancel()

    async with (
        tls.listen(ANY, serving) as listener,
        tcp.listen("tcp://127.0.0.1:0") as between,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(relay, between, listener.url.replace("tls", "tcp"))
        url = between.url.replace("tcp", "tls")
        async with tls.dial(url, dialling) as client, await listener.accept() as server:
            await server.send_all(b"data")
            assert await client.receive_some() == b"data"
            cut.set()
            for _ in range(2):
                for end in (client, server):
                    with pytest.raises(ConnectionLost):
                        await end.receive_some()


async def test_reload_serves_the_new_certificate(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    file = tmp_path / "server.pem"
    authority.issue("old", file=file)
    async with tls.listen(ANY, TlsConfig(certificate=file)) as listener:
        assert await _subject(listener, authority) == "CN=old"
        authority.issue("new", file=file)
        assert await _subject(listener, authority) == "CN=old"
        listener.reload()
        assert await _subject(listener, authority) == "CN=new"
        file.write_text("no certificate")
        with pytest.raises(ConfigurationError):
            listener.reload()
        assert await _subject(listener, authority) == "CN=new"
        stranger.issue("other", file=file)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(file)
        listener.reload(context)
        assert await _subject(listener, stranger) == "CN=other"


async def test_context_of_ones_own_keeps_its_choice_by_name(authority: Authority, dialling: TlsConfig) -> None:
    """Several certificates behind one port: the context chooses, the listener still tells the name."""
    contexts = {}
    for name in ("one", "two"):
        contexts[name] = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        contexts[name].load_cert_chain(authority.issue(name))

    def choose(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        tls.context = contexts[name or "one"]

    contexts["one"].sni_callback = choose
    async with tls.listen(ANY, TlsConfig(context=contexts["one"])) as listener:
        with pytest.raises(ConfigurationError, match="pass a new context to reload"):
            listener.reload()
        for name in ("one", "two"):
            async with (
                tls.dial(listener.url, attrs.evolve(dialling, server_name=name)) as client,
                await listener.accept() as server,
            ):
                assert server.info.server_name == name
                assert client.info.peer_certificate is not None
                certificate = x509.load_der_x509_certificate(client.info.peer_certificate)
                assert certificate.subject.rfc4514_string() == f"CN={name}"


async def test_a_context_is_wrapped_once_however_often_it_is_used(authority: Authority, dialling: TlsConfig) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority.issue("server"))
    seen: list[str | None] = []
    context.sni_callback = lambda _, name, __: seen.append(name)
    async with tls.listen(ANY, TlsConfig(context=context)) as listener:
        noting = context.sni_callback
        async with tls.listen(ANY, TlsConfig(context=context)) as other:
            other.reload(context)
            assert context.sni_callback is noting
        async with (
            tls.dial(listener.url, attrs.evolve(dialling, server_name="server")),
            await listener.accept() as server,
        ):
            assert server.info.server_name == "server"
    assert seen == ["server"]


async def _subject(listener: TlsListener, authority: Authority) -> str:
    async with tls.dial(listener.url, TlsConfig(ca=authority.ca)) as client, await listener.accept():
        assert client.info.peer_certificate is not None
        return x509.load_der_x509_certificate(client.info.peer_certificate).subject.rfc4514_string()


# ---------------------------------------------------------------- peers that dawdle or talk nonsense


async def test_silent_peers_disturb_nobody(serving: TlsConfig, dialling: TlsConfig) -> None:
    """As many as have room say nothing; whoever shakes hands is served at once all the same."""
    async with tls.listen(ANY, attrs.evolve(serving, backlog=4)) as listener:
        silent = [await trio.open_tcp_stream("127.0.0.1", int(listener.url.rpartition(":")[2])) for _ in range(10)]
        await settle()
        for _ in range(5):
            async with tls.dial(listener.url, dialling) as client, await listener.accept() as server:
                await client.send_all(b"x")
                assert await server.receive_some() == b"x"
        cut_off = 0
        for stream in silent:
            try:
                cut_off += os.read(stream.socket.fileno(), 1) == b""
            except BlockingIOError:
                pass
            except ConnectionResetError:
                cut_off += 1
            await stream.aclose()
        assert cut_off >= 6


async def test_handshake_has_a_deadline(
    serving: TlsConfig, dialling: TlsConfig, autojump_clock: trio.testing.MockClock
) -> None:
    """Time jumps only while nothing happens, which on sockets holds for a peer that is silent."""
    async with tls.listen(ANY, attrs.evolve(serving, handshake_timeout=3)) as listener:
        stream = await trio.open_tcp_stream("127.0.0.1", int(listener.url.rpartition(":")[2]))
        start = trio.current_time()
        assert await stream.receive_some() == b""
        assert trio.current_time() - start == pytest.approx(3, abs=0.5)
        await stream.aclose()
    async with tcp.listen("tcp://127.0.0.1:0") as silent:
        with pytest.raises(IdleTimeout):
            async with tls.dial(silent.url.replace("tcp", "tls"), attrs.evolve(dialling, handshake_timeout=3)):
                pass


async def test_nonsense_ends_one_handshake_only(serving: TlsConfig, dialling: TlsConfig) -> None:
    async with tls.listen(ANY, serving) as listener:
        async with tcp.dial(listener.url.replace("tls", "tcp")) as stranger:
            await stranger.send_all(b"GET / HTTP/1.1\r\n\r\n")
            try:
                assert await stranger.receive_some() == b""
            except ConnectionLost:
                pass  # the kernel resets it if it had octets unread
        async with tls.dial(listener.url, dialling) as client, await listener.accept():
            assert client.info.tls_version == "TLSv1.3"


async def test_settings_that_cannot_work(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for config in (
        TlsConfig(),
        TlsConfig(certificate=empty),
        TlsConfig(certificate=tmp_path / "missing.pem"),
        TlsConfig(certificate=authority.issue("server"), key=stranger.issue("server")),
        TlsConfig(certificate=authority.issue("server"), client_certificates="required"),
    ):
        with pytest.raises(ConfigurationError):
            async with tls.listen(ANY, config):
                pass
    for context, purpose in ((tls.listen, ssl.Purpose.SERVER_AUTH), (tls.dial, ssl.Purpose.CLIENT_AUTH)):
        with pytest.raises(ConfigurationError, match="for the other side"):
            async with context(ANY, TlsConfig(context=ssl.create_default_context(purpose))):
                pass
    async with tcp.listen("tcp://127.0.0.1:0") as listener:
        with pytest.raises(ConfigurationError, match="cannot be the name of a server"):
            async with tls.dial(listener.url.replace("tcp", "tls"), TlsConfig(server_name=".dot")):
                pass
    with pytest.raises(ConfigurationError):
        async with tls.dial(ANY, TlsConfig(ca=empty)):
            pass
    with pytest.raises(ValueError, match="minimum_version"):
        TlsConfig(minimum_version=ssl.TLSVersion.MINIMUM_SUPPORTED)


async def test_an_encrypted_key_asks_nobody_for_its_password(authority: Authority, tmp_path: Path) -> None:
    """OpenSSL would read one from the terminal, and everything would stand still meanwhile."""
    plain = authority.issue("server")
    key = serialization.load_pem_private_key(plain.read_bytes(), None)
    kind = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = tmp_path / "locked.pem"
    # Nothing else: one wrong password of 256 seems to fit, and then OpenSSL reads on to the next key.
    locked.write_bytes(key.private_bytes(pem, pkcs8, kind))
    config = TlsConfig(certificate=plain, key=locked)
    with pytest.raises(ConfigurationError, match="cannot use the certificates"):
        async with tls.listen(ANY, config):
            pass
    async with tls.listen(ANY, attrs.evolve(config, key_password="secret")) as listener:
        assert listener.url.startswith("tls://127.0.0.1:")


async def test_closing_the_listener_ends_handshakes_and_leaves_what_was_accepted(
    serving: TlsConfig, dialling: TlsConfig
) -> None:
    async with tls.listen(ANY, serving) as listener:
        silent = await trio.open_tcp_stream("127.0.0.1", int(listener.url.rpartition(":")[2]))
        async with tls.dial(listener.url, dialling) as client:
            server = await listener.accept()
            await settle()
            await listener.aclose()
            with pytest.raises(ConnectionClosed):
                await listener.accept()
            assert await silent.receive_some() == b""
            await client.send_all(b"still here")
            assert await server.receive_some() == b"still here"
            await server.aclose()
        await silent.aclose()


# ---------------------------------------------------------------- openssl

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is not installed")


async def openssl(nursery: trio.Nursery, *arguments: str) -> trio.Process:
    """Run the program with pipes to and from it."""
    run = partial(
        trio.run_process,
        ["openssl", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    process = await nursery.start(run)
    assert isinstance(process, trio.Process)
    return process


async def says(process: trio.Process, line: bytes) -> None:
    assert process.stdin is not None
    await process.stdin.send_all(line)


async def hears(process: trio.Process, end: bytes) -> bytes:
    return await output.heard(process.stdout, lambda said: said.endswith(end))


async def leaves(process: trio.Process) -> None:
    assert process.stdin is not None
    await process.stdin.aclose()


@needs_openssl
async def test_openssl_s_client(serving: TlsConfig, authority: Authority) -> None:
    async with tls.listen(ANY, attrs.evolve(serving, alpn=("levada",))) as listener, trio.open_nursery() as nursery:
        client = ["s_client", "-connect", listener.url.removeprefix("tls://"), "-CAfile", str(authority.ca), "-quiet"]
        client += ["-servername", "server", "-alpn", "levada", "-verify_return_error", "-no_ign_eof"]
        process = await openssl(nursery, *client)
        async with await listener.accept() as server:
            assert (server.info.alpn, server.info.server_name) == ("levada", "server")
            await says(process, b"from openssl\n")
            assert await server.receive_some() == b"from openssl\n"
            await server.send_all(b"from levada\n")
            assert await hears(process, b"\n") == b"from levada\n"
            await leaves(process)
            assert await server.receive_some() == b"", "openssl says close_notify"


@needs_openssl
async def test_openssl_s_client_resumes(serving: TlsConfig, authority: Authority, tmp_path: Path) -> None:
    resumed = []
    async with tls.listen(ANY, serving) as listener, trio.open_nursery() as nursery:
        client = ["s_client", "-connect", listener.url.removeprefix("tls://"), "-CAfile", str(authority.ca), "-quiet"]
        for flag in ("-sess_out", "-sess_in"):
            process = await openssl(nursery, *client, "-no_ign_eof", flag, str(tmp_path / "session"))
            async with await listener.accept() as server:
                resumed.append(server.info.resumed)
                await server.send_all(b"the tickets come with this\n")
                assert await hears(process, b"\n") == b"the tickets come with this\n"
                await leaves(process)
                assert await server.receive_some() == b""
    assert resumed == [False, True]


@needs_openssl
async def test_openssl_s_server(authority: Authority, dialling: TlsConfig) -> None:
    file = str(authority.issue("server"))
    async with trio.open_nursery() as nursery:
        server = ["s_server", "-accept", "127.0.0.1:0", "-cert", file, "-key", file, "-alpn", "levada", "-naccept", "1"]
        process = await openssl(nursery, *server)
        heard = b""
        while not (port := re.search(rb"ACCEPT \S+:(\d+)\n", heard)):
            heard += await hears(process, b"\n")
        dialling = attrs.evolve(dialling, alpn=("levada",))
        async with tls.dial(f"tls://127.0.0.1:{port[1].decode()}", dialling) as client:
            assert (client.info.alpn, client.info.tls_version) == ("levada", "TLSv1.3")
            await client.send_all(b"from levada\n")
            assert b"Shared ciphers" in await hears(process, b"from levada\n")
            await says(process, b"from openssl\n")
            assert await client.receive_some() == b"from openssl\n"
        await leaves(process)


async def cancelled_as_bytes_come(stream: ByteStream, descriptor: int, send: Callable[[], Awaitable[None]]) -> bytes:
    """Receive, and cancel that in the very turn of the scheduler in which octets are there."""
    got = b""

    async def receive() -> None:
        nonlocal got
        got = await stream.receive_some()

    async def cancel() -> None:
        await trio.lowlevel.wait_readable(descriptor)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        nursery.start_soon(cancel)
        await trio.testing.wait_all_tasks_blocked()
        await send()
    return got


@needs_openssl
async def test_key_updates_survive_cancelled_receives(serving: TlsConfig, authority: Authority) -> None:
    """The program asks for new keys (its command ``K``) again and again; an answer that got lost would end the connection.

    None can get lost, as OpenSSL answers with its next write: receiving has nothing to send.
    """
    async with tls.listen(ANY, serving) as listener, trio.open_nursery() as nursery:
        client = ["s_client", "-connect", listener.url.removeprefix("tls://"), "-CAfile", str(authority.ca)]
        process = await openssl(nursery, *client, "-servername", "server")
        async with await listener.accept() as server:
            assert isinstance(server, JoinedStream)
            with trio.fail_after(50), closing(server._socket.dup()) as second:
                for number in range(12):
                    ask = partial(says, process, b"K\n")
                    assert await cancelled_as_bytes_come(server, second.fileno(), ask) == b""
                    await server.send_all(b"still there %d?\n" % number)
                    await hears(process, b"still there %d?\n" % number)
            await says(process, b"yes\n")
            assert await server.receive_some() == b"yes\n"
            server.abort()
            process.kill()


def shake(client: ssl.SSLContext, server_name: str) -> tuple[ssl.MemoryBIO, ssl.MemoryBIO, ssl.SSLObject]:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return incoming, outgoing, client.wrap_bio(incoming, outgoing, server_hostname=server_name)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_is_told_why_a_listener_refuses_it(
    version: ssl.TLSVersion, serving: TlsConfig, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Here: it shows no certificate; the alert is the last that comes, and whole."""
    serving = attrs.evolve(serving, client_certificates="required", ca=authority.ca)
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.check_hostname = False
    context.maximum_version = version
    incoming, outgoing, client = shake(context, "server")
    async with tls.listen(ANY, serving) as listener, tcp.dial(listener.url.replace("tls", "tcp")) as stream:
        told = ""
        while not told:
            try:
                client.do_handshake()
                client.read()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                told = str(error)
                break
            if outgoing.pending:
                await stream.send_all(outgoing.read())
            data = await stream.receive_some()
            assert data, "it ended without an alert"
            incoming.write(data)
        assert re.search("CERTIFICATE_REQUIRED|HANDSHAKE_FAILURE", told)
        assert await stream.receive_some() == b""
        await stream.aclose()
        await settle()
        assert listener.admission.refused == 1
        assert "peer did not return a certificate" in caplog.text


async def test_a_listener_is_told_why_a_client_refuses_it(serving: TlsConfig, stranger: Authority) -> None:
    """The client does not know who signed the certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    assert serving.certificate is not None
    context.load_cert_chain(serving.certificate)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(incoming, outgoing, server_side=True)
    told: list[str] = []

    async def serve(listener: TcpListener) -> None:
        async with await listener.accept() as stream:
            while not told:
                try:
                    server.do_handshake()
                    server.read()
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError as error:
                    told.append(str(error))
                    break
                if outgoing.pending:
                    await stream.send_all(outgoing.read())
                data = await stream.receive_some()
                assert data, "it ended without an alert"
                incoming.write(data)

    async with tcp.listen("tcp://127.0.0.1:0") as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        with pytest.raises(ConnectionLost, match=r"self-signed|unable to get local issuer"):
            async with tls.dial(listener.url.replace("tcp", "tls"), TlsConfig(ca=stranger.ca)):
                pass
    assert "UNKNOWN_CA" in told[0]


@needs_openssl
async def test_openssl_shows_the_alert(serving: TlsConfig, authority: Authority) -> None:
    serving = attrs.evolve(serving, client_certificates="required", ca=authority.ca)
    async with tls.listen(ANY, serving) as listener:
        client = ["openssl", "s_client", "-connect", listener.url.removeprefix("tls://"), "-CAfile", str(authority.ca)]
        client.append("-ign_eof")
        done = await trio.run_process(client, stdin=b"", capture_stdout=True, capture_stderr=True, check=False)
    assert b"alert certificate required" in done.stderr + done.stdout
