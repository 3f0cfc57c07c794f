"""Tokens, Retry, NEW_TOKEN, 0-RTT, version negotiation, stateless reset."""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime
from typing import Any

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.simnet import SimNet, SimPacket
from trio.testing import MockClock

from levada.framework.errors import ConnectionLost
from levada.transports.quic import ClientSessions, QuicConnection, QuicStream, TicketStore
from levada.transports.quic.keys import channel_binding
from levada.transports.quic.tokens import AddressTokens, Proof, reset_token

HOME = ("192.0.2.1", 1234)
OTHER_PORT = ("192.0.2.1", 4321)
AWAY = ("192.0.2.2", 1234)
SIX_FAMILY = ("2001:db8::1", 1234, 0, 0)


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


# ---------------------------------------------------------------- tokens by themselves


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(clock: Clock) -> AddressTokens:
    return AddressTokens(b"s" * 32, clock=clock)


@pytest.mark.parametrize("address", [HOME, SIX_FAMILY, ("client", 50_001)])
def test_a_retry_token_gives_the_first_connection_id_back(tokens: AddressTokens, address: Any) -> None:
    token = tokens.retry(address, original_cid=b"original", retry_cid=b"retry")
    assert tokens.check(token, address, destination_cid=b"retry") == Proof(b"original")
    assert tokens.check(token, address, destination_cid=b"retry") == Proof(b"original")
    assert tokens.is_retry(token, address)


def test_a_retry_token_holds_for_one_address_one_id_and_half_a_minute(tokens: AddressTokens, clock: Clock) -> None:
    token = tokens.retry(HOME, original_cid=b"original", retry_cid=b"retry")
    assert tokens.check(token, OTHER_PORT, destination_cid=b"retry") is None
    assert tokens.check(token, AWAY, destination_cid=b"retry") is None
    assert tokens.check(token, HOME, destination_cid=b"other") is None
    clock.now += 30.1
    assert tokens.check(token, HOME, destination_cid=b"retry") is None
    assert tokens.is_retry(token, HOME)


def test_a_new_token_holds_for_one_host_one_connection_and_a_day(tokens: AddressTokens, clock: Clock) -> None:
    token = tokens.issue(HOME)
    assert tokens.check(token, AWAY, destination_cid=b"x") is None
    assert tokens.check(token, OTHER_PORT, destination_cid=b"x") == Proof()
    assert tokens.check(token, HOME, destination_cid=b"x") is None
    late = tokens.issue(HOME)
    clock.now += 86_401
    assert tokens.check(late, HOME, destination_cid=b"x") is None
    assert not tokens.is_retry(late, HOME)


def test_every_changed_octet_spoils_a_token(tokens: AddressTokens) -> None:
    token = tokens.issue(HOME)
    for at in range(len(token)):
        spoilt = bytearray(token)
        spoilt[at] ^= 0x40
        assert tokens.check(bytes(spoilt), HOME, destination_cid=b"x") is None
    for length in range(len(token)):
        assert tokens.check(token[:length], HOME, destination_cid=b"x") is None
    assert tokens.check(token, HOME, destination_cid=b"x") == Proof()


def test_workers_with_one_secret_know_each_others_tokens(tokens: AddressTokens, clock: Clock) -> None:
    token = tokens.issue(HOME)
    assert AddressTokens(b"t" * 32, clock=clock).check(token, HOME, destination_cid=b"x") is None
    assert AddressTokens(b"s" * 32, clock=clock).check(token, HOME, destination_cid=b"x") == Proof()


def test_the_log_of_used_tokens_is_bounded(clock: Clock) -> None:
    tokens = AddressTokens(b"s" * 32, clock=clock, log_limit=2)
    assert [tokens.check(tokens.issue(HOME), HOME, destination_cid=b"x") for _ in range(3)] == [Proof(), Proof(), None]
    clock.now += 86_401
    assert tokens.check(tokens.issue(HOME), HOME, destination_cid=b"x") == Proof()


def test_a_reset_token_depends_on_secret_and_id() -> None:
    tokens = {reset_token(secret, cid) for secret in (b"a", b"b") for cid in (b"1", b"2")}
    assert len(tokens) == 4
    assert all(len(token) == 16 for token in tokens)


def test_tickets_are_taken_once_and_bounded(clock: Clock) -> None:
    class Ticket:
        def __init__(self, label: bytes):
            self.ticket = label

    store = TicketStore(limit=2, lifetime=10.0, clock=clock)
    for label in (b"a", b"b", b"c"):
        store.add(Ticket(label))  # type: ignore[arg-type]  # only the label is looked at
    assert len(store) == 2
    assert store.take(b"a") is None
    assert store.take(b"b") is not None
    assert store.take(b"b") is None
    clock.now += 10.0
    assert store.take(b"c") is None
    none = TicketStore(limit=0, clock=clock)
    none.add(Ticket(b"d"))  # type: ignore[arg-type]
    assert len(none) == 0


def test_a_store_of_tickets_outlives_a_run_of_trio() -> None:
    """Each run of trio has a clock of its own, which begins anywhere."""

    class Ticket:
        ticket = b"a"

    store = TicketStore(lifetime=60.0)

    async def add() -> None:
        store.add(Ticket())  # type: ignore[arg-type]  # only the label is looked at

    async def take() -> object:
        return store.take(b"a")

    trio.run(add)
    assert trio.run(take, clock=MockClock()) is not None


# ---------------------------------------------------------------- Retry and NEW_TOKEN


async def test_retry_always(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(retry="always") as ends:
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x", fin=True)
        assert await read_all(await ends.server.accept_stream()) == b"x"
        assert ends.listener.endpoint.counters["retries"] == 1


async def test_retry_under_load_and_not_without(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.listening(net, retry_threshold=3, handshake_timeout=5.0) as listener, trio.open_nursery() as nursery:
        for n in range(3):  # three that nobody accepts
            nursery.start_soon(dial_in_vain, lab, net, f"slow{n}")
        await trio.sleep(0.1)
        assert (listener.unfinished, listener.endpoint.counters["retries"]) == (3, 0)
        nursery.start_soon(accept_validated, listener)
        async with lab.dialling(net):
            assert listener.endpoint.counters["retries"] == 1


async def dial_in_vain(lab: Any, net: SimNet, host: str) -> None:
    with pytest.raises(ConnectionLost):
        async with lab.dialling(net, host=host, handshake_timeout=3.0):
            pass


async def accept_validated(listener: Any) -> None:
    while True:
        incoming = await listener.accept()
        if incoming.validated:
            incoming.accept()
            return


async def test_a_forged_retry_token_is_answered_with_invalid_token(lab: Any, autojump_clock: MockClock) -> None:
    """A token of this server for another connection id closes the attempt; one it does not know is as good as none."""
    net = SimNet(1)
    async with lab.listening(net, retry="always") as listener:
        token = listener._tokens.retry(("client", 50_001), original_cid=b"original", retry_cid=b"retry")
        sessions = ClientSessions()
        sessions.add_token("server:4433", token)
        with pytest.raises(ConnectionLost, match="transport error 0xb"):
            async with lab.dialling(net, sessions=sessions):
                pass


async def test_a_new_token_spares_the_retry_once(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    sessions = ClientSessions()
    validated: list[bool] = []

    async def serve(listener: Any) -> None:
        while True:
            incoming = await listener.accept()
            validated.append(incoming.validated)
            incoming.accept()

    async with lab.listening(net, retry="always") as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        for expected in (1, 1, 1):
            async with lab.dialling(net, sessions=sessions):
                await trio.sleep(0.5)
            assert listener.endpoint.counters["retries"] == expected
        assert validated == [True, True, True]
        nursery.cancel_scope.cancel()


async def test_a_validated_client_is_not_held_to_three_times_what_it_sent(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    paths: list[bool] = []

    async def serve(listener: Any) -> None:
        connection = (await listener.accept()).accept()
        paths.append(connection.engine._network_paths[0].is_validated)

    for retry in ("never", "always"):
        async with lab.listening(net, retry=retry) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(serve, listener)
            async with lab.dialling(net):
                pass
    assert paths == [False, True]


# ---------------------------------------------------------------- 0-RTT


class EarlyServer:
    """Accepts, and reads one stream of each connection."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bool]] = []
        self.datagrams: list[tuple[bytes, bool]] = []
        self.connections: list[QuicConnection] = []

    async def serve(self, listener: Any) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                connection = (await listener.accept()).accept()
                self.connections.append(connection)
                nursery.start_soon(self.streams, connection)
                nursery.start_soon(self.take_datagrams, connection)

    async def streams(self, connection: QuicConnection) -> None:
        try:
            while True:
                stream = await connection.accept_stream()
                data = await read_all(stream)
                self.seen.append((data, stream.early))
                stream.send_nowait(data.upper(), fin=True)
        except ConnectionLost:
            pass

    async def take_datagrams(self, connection: QuicConnection) -> None:
        try:
            while True:
                datagram = await connection.receive_datagram()
                self.datagrams.append((datagram.data, datagram.early))
        except ConnectionLost:
            pass


async def ask(connection: QuicConnection, data: bytes) -> bytes:
    stream = await connection.open_stream()
    stream.send_nowait(data, fin=True)
    return await read_all(stream)


async def test_early_data_arrives_with_the_first_packet_and_is_marked(lab: Any, autojump_clock: MockClock) -> None:
    net, server, sessions = SimNet(1, delay=0.1), EarlyServer(), ClientSessions()
    async with lab.listening(net) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, listener)
        async with lab.dialling(net, sessions=sessions) as connection:
            assert connection.info.resumed is False
            assert await ask(connection, b"first") == b"FIRST"
            await trio.sleep(1)
        start = trio.current_time()
        async with lab.dialling(net, sessions=sessions, early=True) as connection:
            connection.send_datagram_nowait(b"early bird")
            assert await ask(connection, b"second") == b"SECOND"
            assert trio.current_time() - start < 0.25  # one round trip
            info = await connection.handshake()
            assert (info.resumed, info.early_data_accepted) == (True, True)
            assert await ask(connection, b"third") == b"THIRD"
        assert server.seen == [(b"first", False), (b"second", True), (b"third", False)]
        assert server.datagrams == [(b"early bird", True)]
        assert server.connections[1].info.resumed
        nursery.cancel_scope.cancel()


async def test_refused_early_data_is_reported_and_streams_are_sent_again(lab: Any, autojump_clock: MockClock) -> None:
    net, server, sessions = SimNet(1), EarlyServer(), ClientSessions()
    tickets = TicketStore()
    async with lab.listening(net, tickets=tickets) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, listener)
        async with lab.dialling(net, sessions=sessions):
            await trio.sleep(1)
        tickets._tickets.clear()
        async with lab.dialling(net, sessions=sessions, early=True) as connection:
            connection.send_datagram_nowait(b"never to be seen")
            assert await ask(connection, b"hello") == b"HELLO"
            info = await connection.handshake()
            assert (info.resumed, info.early_data_accepted) == (False, False)
        assert server.seen == [(b"hello", False)]
        assert server.datagrams == []
        nursery.cancel_scope.cancel()


async def test_a_replayed_first_flight_finds_its_ticket_used(lab: Any, autojump_clock: MockClock) -> None:
    net, server, sessions = SimNet(1), EarlyServer(), ClientSessions()
    recorded: list[bytes] = []
    async with lab.listening(net) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, listener)
        async with lab.dialling(net, sessions=sessions):
            await trio.sleep(1)
        net.fault(lambda p: recorded.append(p.data) if p.source[0] == "client" else None)
        async with lab.dialling(net, sessions=sessions, early=True) as connection:
            await ask(connection, b"pay once")
        net.clear_faults()
        assert server.seen == [(b"pay once", True)]
        await trio.sleep(5)
        attacker = net.port("attacker")
        attacker.send([(data, ("server", 4433)) for data in recorded])
        await trio.sleep(5)
        assert len(server.seen) == 1
        nursery.cancel_scope.cancel()


async def test_early_without_a_ticket_is_an_ordinary_connection(lab: Any, autojump_clock: MockClock) -> None:
    net, server = SimNet(1), EarlyServer()
    async with lab.listening(net) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, listener)
        async with lab.dialling(net, sessions=ClientSessions(), early=True) as connection:
            assert connection.try_open_stream() is None
            assert await ask(connection, b"hi") == b"HI"
            assert connection.info.early_data_accepted is None
        nursery.cancel_scope.cancel()


async def test_a_ticket_without_early_only_resumes(lab: Any, autojump_clock: MockClock) -> None:
    net, server, sessions = SimNet(1), EarlyServer(), ClientSessions()
    async with lab.listening(net) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, listener)
        async with lab.dialling(net, sessions=sessions):
            await trio.sleep(1)
        async with lab.dialling(net, sessions=sessions) as connection:
            assert (connection.info.resumed, connection.info.early_data_accepted) == (True, None)
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize("versions", [(1,), (0x6B3343CF,), (0x6B3343CF, 1)])
async def test_versions_are_negotiated(lab: Any, autojump_clock: MockClock, versions: tuple[int, ...]) -> None:
    async with lab.connected(versions=versions) as ends:
        assert ends.client.engine._version in versions


async def test_no_common_version(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.listening(net := SimNet(1), versions=(1,)):
        with pytest.raises(ConnectionLost, match="common protocol version"):
            async with lab.dialling(net, versions=(0x6B3343CF,)):
                pass


@pytest.mark.parametrize("lost", range(2, 8))
async def test_a_token_that_got_lost_is_sent_again(lab: Any, autojump_clock: MockClock, lost: int) -> None:
    """One of the server's packets after its handshake carries NEW_TOKEN, whichever it is."""
    net, sessions = SimNet(1), ClientSessions()
    numbers: list[int] = []

    def is_the_one(packet: SimPacket) -> bool:
        if packet.source[0] == "server":
            numbers.append(packet.n)
        return len(numbers) == lost and numbers[-1] == packet.n

    net.drop(is_the_one)
    async with lab.connected(net, client={"sessions": sessions}) as ends:
        for n in range(10):
            assert ends.server.send_datagram_nowait(b"%d" % n)
            await trio.sleep(0.1)
        assert net.lost == 1
    assert sessions.take_token("server:4433")


# ---------------------------------------------------------------- stateless reset


async def test_resets_are_smaller_than_their_cause_and_bounded_in_number(lab: Any, autojump_clock: MockClock) -> None:
    """Two endpoints without state would otherwise answer each other forever (RFC 9000 section 10.3.3)."""
    net = SimNet(1)
    async with lab.listening(net) as listener:
        stranger = net.port("stranger")

        def answers() -> list[int]:
            return [size for _, source, _, size in net.trace if source[0] == "server"]

        async def get(datagrams: list[bytes]) -> list[int]:
            before = len(answers())
            stranger.send([(data, ("server", 4433)) for data in datagrams])
            await trio.sleep(0.05)
            return answers()[before:]

        for size in range(10, 60):
            (*got,) = await get([b"\x40" + bytes(size - 1)])
            assert got == ([min(size - 1, 43)] if size > 21 else []), size
        await trio.sleep(10)
        assert len(await get([b"\x40" + bytes(50)] * 500)) == 100
        await trio.sleep(0.45)
        assert len(await get([b"\x40" + bytes(50)] * 500)) == 50
        assert listener.endpoint.counters["stateless resets sent"] == len(answers())


async def test_a_server_that_lost_its_state_resets(lab: Any, autojump_clock: MockClock) -> None:
    """And one that came back with the same secret can do so too."""
    net = SimNet(1)
    secret = os.urandom(32)
    async with lab.connected(net, secret=secret) as ends:
        await trio.sleep(1)
        port = ends.listener.endpoint._port
        ends.listener.endpoint.forget(ends.server)
        stream = await ends.client.open_stream()
        stream.send_nowait(b"x" * 100)
        with pytest.raises(ConnectionLost, match="stateless reset"):
            await stream.receive_some()
        assert ends.listener.endpoint.counters["stateless resets sent"] == 1
        assert port.address == ("server", 4433)


async def test_resets_are_known_for_the_connection_id_in_use_also_after_it_changed(
    lab: Any, autojump_clock: MockClock
) -> None:
    async with lab.connected() as ends:
        await trio.sleep(1)
        ends.client.change_path()
        await trio.sleep(1)
        ends.listener.endpoint.forget(ends.server)
        (await ends.client.open_stream()).send_nowait(b"x" * 100)
        with pytest.raises(ConnectionLost, match="stateless reset"):
            await ends.client.accept_stream()


async def test_late_packets_under_an_id_that_was_given_up_reset_nothing(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net) as ends:
        await trio.sleep(1)
        late: list[int] = []

        def the_first(packet: SimPacket) -> bool:
            if packet.source[0] == "client" and not late:
                late.append(packet.n)
            return packet.n in late

        net.hold(the_first, 0.5)
        assert ends.client.send_datagram_nowait(b"under the old id")
        await trio.sleep(0.01)
        ends.client.change_path()
        await trio.sleep(2)
        assert late
        assert ends.listener.endpoint.counters["stateless resets sent"] == 0
        assert not ends.client.closed
        for _ in range(40):  # what is kept of old ids is bounded
            ends.client.change_path()
            await trio.sleep(0.2)
        assert len(ends.server.cids) <= 1 + 8 + 8
        assert len(ends.listener.endpoint._routes) <= 1 + 8 + 8
        assert not ends.client.closed


async def test_resets_for_ids_that_are_not_in_use_are_ignored(lab: Any, autojump_clock: MockClock) -> None:
    """RFC 9000, section 10.3.1: neither for those that were given up nor for those not used yet."""
    async with lab.connected() as ends:
        await trio.sleep(1)
        engine = ends.client.engine
        unused = engine._peer_cid_available[-1].stateless_reset_token
        ends.client.change_path()
        given_up = engine._peer_cid.stateless_reset_token
        ends.client.change_path()
        await trio.sleep(1)
        for token in (unused, given_up):
            ends.listener.endpoint.send([(b"\x40" + b"\x00" * 30 + token, ends.client._endpoint.address)])
            await trio.sleep(1)
            assert not ends.client.closed
        token = engine._peer_cid.stateless_reset_token
        ends.listener.endpoint.send([(b"\x40" + b"\x00" * 30 + token, ends.client._endpoint.address)])
        assert "stateless reset" in (await ends.client.wait_closed()).text


async def test_a_reset_from_elsewhere_is_ignored(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.connected(net) as ends:
        token = next(iter(ends.client.engine.peer_reset_tokens()))
        net.port("stranger").send([(b"\x40" + b"\x00" * 30 + token, ends.client._endpoint.address)])
        await trio.sleep(1)
        assert not ends.client.closed


async def test_resets_are_rare_and_smaller_than_what_they_answer(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.listening(net) as listener:
        stranger = net.port("stranger")
        for size in (1, 9, 21, 22, 30, 43, 44, 1_200):
            stranger.send([(b"\x40" + b"\x00" * (size - 1), ("server", 4433))])
        await trio.sleep(0.1)
        sizes = [size for _, source, _, size in net.trace if source[0] == "server"]
        assert sizes == [21, 29, 42, 43, 43]
        stranger.send([(b"\x40" + b"\x00" * 50, ("server", 4433))] * 1_000)
        await trio.sleep(0.1)
        assert listener.endpoint.counters["stateless resets sent"] <= 110


async def test_packets_of_another_worker_are_handed_on(lab: Any, autojump_clock: MockClock) -> None:
    net = SimNet(1)
    async with lab.listening(net, worker=3) as listener:
        handed: list[tuple[int, bytes]] = []
        listener.endpoint.foreign = lambda worker, data, address: handed.append((worker, data))
        packet = b"\x40\x07" + b"\x00" * 40
        net.port("stranger").send([(packet, ("server", 4433))])
        await trio.sleep(0.1)
        assert handed == [(7, packet)]
        assert all(source[0] != "server" for _, source, _, _ in net.trace)


async def test_connection_ids_name_the_worker(lab: Any, autojump_clock: MockClock) -> None:
    async with lab.connected(worker=9) as ends:
        await trio.sleep(1)
        own = [
            cid
            for cid in ends.server.cids
            if len(cid) == 8 and cid != ends.server.engine.original_destination_connection_id
        ]
        assert len(own) == 8
        assert {cid[0] for cid in own} == {9}


# ---------------------------------------------------------------- channel binding


async def test_both_ends_of_a_connection_have_the_same_binding_and_no_other_has(
    lab: Any, autojump_clock: MockClock
) -> None:
    """Resumed connections too have one of their own."""
    net, sessions = SimNet(1), ClientSessions()
    found: list[tuple[bool, bytes | None]] = []
    theirs: list[bytes | None] = []

    async def serve(listener: Any) -> None:
        while True:
            connection = (await listener.accept()).accept()
            theirs.append((await connection.handshake()).channel_binding)

    async with lab.listening(net) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        for _ in range(3):
            async with lab.dialling(net, sessions=sessions) as connection:
                await trio.sleep(1)
                found.append((connection.info.resumed, connection.info.channel_binding))
        nursery.cancel_scope.cancel()
    assert [binding for _, binding in found] == theirs
    assert [resumed for resumed, _ in found] == [False, True, True]
    assert len(set(theirs)) == 3
    assert {len(binding or b"") for binding in theirs} == {32}


def test_a_binding_is_what_openssl_exports() -> None:
    """The same exporter secret gives the same value: OpenSSL logs the one and exports the other."""
    from OpenSSL import SSL

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    start = datetime(2026, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(start).not_valid_after(start.replace(year=2036))
    secrets: dict[str, bytes] = {}

    def log(connection: object, line: bytes) -> None:
        label, _, secret = line.decode().split()
        secrets[label] = bytes.fromhex(secret)

    contexts = SSL.Context(SSL.TLS_CLIENT_METHOD), SSL.Context(SSL.TLS_SERVER_METHOD)
    contexts[0].set_keylog_callback(log)
    contexts[1].use_privatekey(key)
    contexts[1].use_certificate(builder.sign(key, hashes.SHA256()))
    client, server = (SSL.Connection(context) for context in contexts)
    client.set_connect_state()
    server.set_accept_state()
    for _ in range(3):
        for end, other in ((client, server), (server, client)):
            with contextlib.suppress(SSL.WantReadError):
                end.do_handshake()
            with contextlib.suppress(SSL.WantReadError):
                other.bio_write(end.bio_read(65_536))
    assert client.get_protocol_version_name() == "TLSv1.3"
    bits = client.get_cipher_name()
    algorithm = hashes.SHA384() if bits and bits.endswith("SHA384") else hashes.SHA256()
    expected = client.export_keying_material(b"EXPORTER-Channel-Binding", 32, b"")
    assert channel_binding(algorithm, secrets["EXPORTER_SECRET"]) == expected
