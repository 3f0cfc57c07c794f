"""Opening a WebSocket over memory: whom a server lets in, what a client takes for an answer; trio's virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.transports.conftest import in_background
from trio.testing import MockClock, wait_all_tasks_blocked
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection

from levada.framework.embedding import FailureLog
from levada.framework.errors import ConfigurationError, ConnectionLost, IdleTimeout
from levada.transports.carriers.memory import memory_streams
from levada.transports.carriers.websocket import (
    Refusal,
    UpgradeRequest,
    WebSocketConfig,
    WebSocketStream,
    accept_over,
    open_over,
)
from levada.transports.carriers.websocket_frames import encode_binary
from levada.transports.carriers.websocket_handshake import ClientHandshake, HandshakeRefused, answer, refusal_bytes

QUIET = WebSocketConfig(keepalive_interval=None)
URL = "ws://desk.example/rsocket"


def test_the_key_of_a_client_is_made_of_its_random_bytes() -> None:
    handshake = ClientHandshake("desk.example", "/", (), (), random=lambda n: b"the sample nonce"[:n])
    assert b"\r\nsec-websocket-key: dghlihnhbxbszsbub25jzq==\r\n" in handshake.request.lower()
    accept = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455, 1.3
    assert handshake.receive_head(b"HTTP/1.1 101 Switching Protocols\r\n" + accept + b"\r\n\r\n") is None


# ---------------------------------------------------------------- handshake: the server


def request(line: str = "GET /rsocket HTTP/1.1", **changes: str | None) -> bytes:
    """A good request, with some headers changed or (``None``) left out."""
    headers: dict[str, str | None] = {
        "Host": "desk.example",
        "Upgrade": "websocket",
        "Connection": "keep-alive, Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    headers.update({name.replace("_", "-"): value for name, value in changes.items()})
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value is not None)
    return f"{line}\r\n{lines}\r\n".encode("latin-1")


async def ask(octets: bytes, config: WebSocketConfig = QUIET, path: str | None = "/rsocket") -> tuple[bytes, Any]:
    """Send octets to a server that has just accepted; its answer, and what `accept_over` gave."""
    near, far = memory_streams()
    async with in_background(lambda: accept_over(near, config, path=path)) as outcome:
        await far.send_all(octets)
        answer = await far.receive_some()
        if not answer.startswith(b"HTTP/1.1 101"):
            assert await far.receive_some() == b""
            await far.aclose()
    return answer, outcome[0]


async def test_the_example_of_the_rfc() -> None:
    """RFC 6455, 1.3: this key has this answer."""
    answer, websocket = await ask(request())
    assert answer.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert b"\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in answer
    assert b"extensions" not in answer.lower()
    assert isinstance(websocket, WebSocketStream)
    assert websocket.request is not None
    assert (websocket.request.path, websocket.request.host, websocket.request.origin) == (
        "/rsocket",
        "desk.example",
        None,
    )


@pytest.mark.parametrize(
    ("octets", "status", "words"),
    [
        (request("POST /rsocket HTTP/1.1"), 405, b"Allow: GET"),
        (request("GET /rsocket HTTP/1.0"), 505, b"HTTP/1.1"),
        (request("GET /rsocket HTTP/2"), 400, b"not an HTTP/1.1 request"),
        (request("GET /other HTTP/1.1"), 404, b"no WebSocket at this path"),
        (request("GET /rsocket/ HTTP/1.1"), 404, b"no WebSocket at this path"),
        (request("hello"), 400, b"not an HTTP/1.1 request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, b"this is not HTTP"),
        (request(Upgrade=None), 426, b"Upgrade: websocket"),
        (request(Upgrade="h2c"), 400, b"Upgrade: websocket"),
        (request(Connection="close"), 400, b"Connection: Upgrade"),
        (request(Host=None), 400, b"Bad HTTP message"),
        (request(Host="\xe4\xff"), 400, b"not ASCII"),
        (request(Sec_WebSocket_Version="8"), 426, b"Sec-WebSocket-Version: 13"),
        (request(Sec_WebSocket_Version=None), 400, b"Sec-WebSocket-Version"),
        (request(Sec_WebSocket_Key=None), 400, b"Sec-WebSocket-Key"),
        (request(Sec_WebSocket_Key="short"), 400, b"Sec-WebSocket-Key"),
        (request(Sec_WebSocket_Key="AAAA"), 400, b"Sec-WebSocket-Key"),
        (request(Sec_WebSocket_Key="\x80"), 400, b"Sec-WebSocket-Key"),
        (request(Sec_WebSocket_Protocol="\xe4"), 400, b"not ASCII"),
        (request(Content_Length="5"), 400, b"no body"),
        (request(Transfer_Encoding="chunked"), 400, b"no body"),
        (request() + b"\x82\x80", 400, b"bytes after the request"),
        (request().replace(b"\r\nConnection", b"\nConnection"), 400, b"carriage return"),
        (request()[:-2] + b"\nX: y\r\n\r\n", 400, b"carriage return"),
        (request(X="y" * 20_000), 431, b"16384"),
        (b"GET /" + b"x" * 20_000, 431, b"16384"),
        (request(Origin="https://evil.example"), 403, b"origin"),
        (request(Origin="null"), 403, b"origin"),
        (request(Origin="https://desk.example:8443"), 403, b"origin"),
        (request(Origin="http://desk.example@evil.example"), 403, b"origin"),
    ],
)
async def test_who_gets_an_http_answer_instead(octets: bytes, status: int, words: bytes) -> None:
    answer, error = await ask(octets)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nConnection: close\r\n" in answer
    assert words in answer
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    assert isinstance(error, ConnectionLost)
    assert error.code == status


@pytest.mark.parametrize(
    ("octets", "config"),
    [
        (request("GET /rsocket?token=1 HTTP/1.1"), QUIET),
        (request("GET http://desk.example/rsocket HTTP/1.1"), QUIET),
        (request(Origin="https://desk.example"), QUIET),
        (request(Origin="https://desk.example:443"), QUIET),
        (request(Origin="https://app.example"), attrs.evolve(QUIET, origins=("https://app.example",))),
        (request(Origin="null"), attrs.evolve(QUIET, origins=("*",))),
        (request(Sec_WebSocket_Extensions="permessage-deflate; client_max_window_bits"), QUIET),
        (request(upgrade="WebSocket", Upgrade=None), QUIET),
    ],
)
async def test_who_is_let_in(octets: bytes, config: WebSocketConfig) -> None:
    answer, websocket = await ask(octets, config)
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert isinstance(websocket, WebSocketStream)


async def test_the_users_own_check() -> None:
    def allow(asked: UpgradeRequest) -> Refusal | None:
        if dict(asked.headers).get("authorization") == "Bearer secret":
            return None
        if asked.target == "/rsocket?bug":
            raise KeyError("bug")
        return Refusal(401, "who are you?", (("WWW-Authenticate", "Bearer"),))

    config = attrs.evolve(QUIET, allow=allow)
    answer, _ = await ask(request(Authorization="Bearer secret"), config)
    assert answer.startswith(b"HTTP/1.1 101 ")
    answer, error = await ask(request(), config)
    assert answer == (
        b"HTTP/1.1 401 Unauthorized\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 13\r\nConnection: close\r\n"
        b"WWW-Authenticate: Bearer\r\n\r\nwho are you?\n"
    )
    assert error.code == 401
    answer, error = await ask(request("GET /rsocket?bug HTTP/1.1"), config)
    assert answer.startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize(
    ("offered", "supported", "agreed"),
    [
        ("rsocket", ("rsocket",), "rsocket"),
        ("a, b , c", ("c", "b"), "c"),
        ("a", ("rsocket",), None),
        (None, ("rsocket",), None),
        ("rsocket", (), None),
    ],
)
async def test_the_server_chooses_the_subprotocol(
    offered: str | None, supported: tuple[str, ...], agreed: str | None
) -> None:
    config = attrs.evolve(QUIET, subprotocols=supported, headers=(("X-Desk", "7"),))
    answer, websocket = await ask(request(Sec_WebSocket_Protocol=offered), config)
    assert websocket.subprotocol == agreed
    assert (f"\r\nSec-WebSocket-Protocol: {agreed}\r\n".encode() in answer) == (agreed is not None)
    assert b"\r\nX-Desk: 7\r\n" in answer


@pytest.mark.parametrize("octets", [b"", request()[:-1]])
async def test_a_client_that_dawdles_is_sent_away(octets: bytes, autojump_clock: MockClock) -> None:
    """One octet now and then does not help: the time is for the whole request."""
    near, far = memory_streams()

    async def drip() -> bytes:
        with suppress(ConnectionLost):
            for octet in octets:
                await trio.sleep(0.1)
                await far.send_all(bytes((octet,)))
        return await far.receive_some()

    async with in_background(partial(accept_over, near, QUIET)) as outcome:
        answer = await drip()
    assert outcome[0].code == 408
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert 10 <= trio.current_time() <= 30


async def test_every_cut_of_a_request() -> None:
    octets = request()
    for cut in range(len(octets)):
        near, far = memory_streams()
        async with in_background(partial(accept_over, near, QUIET)) as outcome:
            await far.send_all(octets[:cut])
            await wait_all_tasks_blocked()
            await far.send_all(octets[cut:])
        assert isinstance(outcome[0], WebSocketStream)


@given(
    st.binary(max_size=300)
    | st.builds(lambda a, b: request()[:a] + b + request()[a:], st.integers(0, 150), st.binary(max_size=9))
)
def test_any_request_gets_an_answer(octets: bytes) -> None:
    async def main() -> None:
        near, far = memory_streams()
        async with in_background(lambda: accept_over(near, QUIET)) as outcome:
            await far.send_all(octets)
            await far.send_eof()
            with suppress(ConnectionLost):  # the request was cut off
                assert (await far.receive_some()).startswith(b"HTTP/1.1 ")
            await far.aclose()
        assert isinstance(outcome[0], WebSocketStream | ConnectionLost)

    trio.run(main)


HOSTS: list[tuple[str, bool]] = [
    ("localhost", True), ("localhost.", True), ("LOCALHOST:80", True), ("app.localhost", True), ("127.0.0.1:8080", True), ("[::1]:80", True),
    ("192.0.2.1", True), ("desk", True), ("evil.example", False), ("evil.example.:80", False), ("EVIL.example:80", False),
    ("127.0.0.1.evil.example", False), ("localhost.evil.example", False),
]  # fmt: skip


@pytest.mark.parametrize(("host", "served"), HOSTS)
async def test_a_domain_name_is_refused_at_a_loopback_address(host: str, served: bool) -> None:
    """A page of that name could have given it this machine's address; its own origin changes nothing."""
    head = request(Host=host, Origin=f"http://{host}")
    for at in ("127.0.0.1:80", "[::1]:80", "127.1.2.3:80"):
        if served:
            assert answer(head, b"", QUIET, None, FailureLog(), at=at)[0].host == host
        else:
            with pytest.raises(HandshakeRefused) as refused:
                answer(head, b"", QUIET, None, FailureLog(), at=at)
            assert refused.value.refusal.status == 421
            assert refused.value.refusal.detail.endswith("needs this name in WebSocketConfig.hosts")
    for config, at in (
        (QUIET, "192.0.2.1:80"),
        (QUIET, "[2001:db8::1]:80"),
        (QUIET, "desk/server"),
        (QUIET, ""),
        (attrs.evolve(QUIET, hosts=("*",)), "127.0.0.1:80"),
    ):
        assert answer(head, b"", config, None, FailureLog(), at=at)[0].host == host


async def test_domain_names_that_are_listed_are_served_at_a_loopback_address() -> None:
    config = attrs.evolve(QUIET, hosts=("App.example",))
    assert (
        answer(request(Host="app.example:8080"), b"", config, None, FailureLog(), at="127.0.0.1:80")[0].host
        == "app.example:8080"
    )
    with pytest.raises(HandshakeRefused):
        answer(request(Host="api.app.example"), b"", config, None, FailureLog(), at="127.0.0.1:80")


# ---------------------------------------------------------------- handshake: the client


async def answered(answer: Callable[[bytes], bytes], config: WebSocketConfig = QUIET) -> tuple[bytes, Any]:
    """Open a WebSocket to a server that answers so; the request, and what `open_over` gave."""
    near, far = memory_streams()
    async with in_background(lambda: open_over(near, "ws://Desk.example:80/rsocket?a=b", config)) as outcome:
        head = await far.receive_some()
        await far.send_all(answer(head))
        await wait_all_tasks_blocked()
        if not outcome:
            await far.send_eof()
    return head, outcome[0]


def good(head: bytes) -> bytes:
    """A server's right answer."""
    server = WSConnection(ConnectionType.SERVER)
    server.receive_data(head)
    list(server.events())
    return server.send(AcceptConnection())


async def test_what_a_client_asks_for() -> None:
    config = attrs.evolve(QUIET, subprotocols=("a", "rsocket"), headers=(("Authorization", "Bearer secret"),))
    head, websocket = await answered(good, config)
    assert isinstance(websocket, WebSocketStream)
    assert (websocket.subprotocol, websocket.request) == (None, None)
    lines = head.decode().split("\r\n")
    assert lines[0] == "GET /rsocket?a=b HTTP/1.1"
    assert lines[-2:] == ["", ""]
    key = next(line for line in lines if line.startswith("Sec-WebSocket-Key: "))
    assert len(key) == len("Sec-WebSocket-Key: ") + 24
    assert sorted(lines[1:-2]) == sorted(
        [
            "Host: desk.example",
            "Upgrade: websocket",
            "Connection: Upgrade",
            key,
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Protocol: a, rsocket",
            "Authorization: Bearer secret",
        ]
    )


async def test_frames_right_behind_the_answer_are_not_lost() -> None:
    _, websocket = await answered(
        lambda head: good(head) + encode_binary(b"first", None) + encode_binary(b"second", None)[:3]
    )
    assert await websocket.receive() == b"first"


HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </s.css>; rel=preload\r\n\r\n"


@pytest.mark.parametrize(
    "interim", [HINTS, b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 102 \r\n\r\n" + HINTS, HINTS * 250]
)
async def test_interim_answers_come_before_the_answer(interim: bytes) -> None:
    """RFC 9110, section 15.2: a client takes any number of them; here they count against the limit of a head."""
    _, websocket = await answered(lambda head: interim + good(head) + encode_binary(b"first", None))
    assert await websocket.receive() == b"first"


def with_header(header: bytes) -> Callable[[bytes], bytes]:
    return lambda head: good(head).replace(b"\r\n\r\n", b"\r\n" + header + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (lambda _: b"HTTP/1.1 403 Forbidden\r\n\r\n", 403, "the server answered 403"),
        (lambda _: b"HTTP/1.1 301 Moved\r\nLocation: /there\r\n\r\n", 502, "answered 301, location /there"),
        (lambda _: b"HTTP/1.1 200 OK\r\n\r\nhello", 502, "the server answered 200"),
        (lambda _: HINTS + b"HTTP/1.1 403 Forbidden\r\n\r\n", 403, "the server answered 403"),
        (lambda _: HINTS, None, "the connection ended during the WebSocket handshake"),
        (lambda head: b"HTTP/1.1 100 \r\n\r\n" * 1000 + good(head), 502, "head of more than"),
        (lambda _: b"HTTP/1.1 700 Whatever\r\n\r\n", 502, "the server answered 700"),
        (lambda _: b"SSH-2.0-OpenSSH\r\n\r\n", 502, "not a WebSocket handshake: Bad HTTP message"),
        (lambda _: b"\x00\x01", 502, "this is not HTTP"),
        (lambda _: b"HTTP/1.1 101 x\r\n" + b"X: " + b"y" * 20_000, 502, "head of more than 16384 bytes"),
        (lambda head: good(head).replace(b"Accept: ", b"Accept: x"), 502, "Bad accept token"),
        (lambda head: good(head).replace(b"Upgrade: websocket", b"Upgrade: other"), 502, "Upgrade: websocket"),
        (lambda head: good(head).replace(b"Connection: Upgrade", b"Connection: close"), 502, "Connection: Upgrade"),
        (with_header(b"Sec-WebSocket-Protocol: unasked"), 502, "unrecognized subprotocol"),
        (with_header(b"Sec-WebSocket-Extensions: permessage-deflate"), 502, "unrecognized extension"),
        (with_header(b"Sec-WebSocket-Protocol: \xe4"), 502, "not a WebSocket handshake"),
        (lambda head: good(head)[:-1], None, "the connection ended during the WebSocket handshake"),
        (lambda _: b"", None, "the connection ended during the WebSocket handshake"),
    ],
)
async def test_answers_that_open_no_websocket(answer: Callable[[bytes], bytes], code: int | None, words: str) -> None:
    _, error = await answered(answer)
    assert type(error) is ConnectionLost
    assert error.code == code
    assert words in error.detail


async def test_a_server_that_does_not_answer(autojump_clock: MockClock) -> None:
    near, _ = memory_streams()
    with pytest.raises(IdleTimeout, match="no answer to the WebSocket handshake within 3 s"):
        await open_over(near, URL, attrs.evolve(QUIET, handshake_timeout=3))
    assert trio.current_time() == pytest.approx(3)


@given(st.integers(0, 128), st.integers(0, 128), st.binary(max_size=9))
def test_any_answer_gives_a_websocket_or_a_named_error(start: int, skip: int, octets: bytes) -> None:
    async def main() -> None:
        _, outcome = await answered(lambda head: good(head)[:start] + octets + good(head)[start + skip :])
        assert isinstance(outcome, WebSocketStream | ConnectionLost)

    trio.run(main)


@pytest.mark.parametrize(
    "url",
    [
        "http://desk.example/",
        "ws:///x",
        "ws://",
        "ws://a:b/",
        "ws://u:p@desk.example/",
        "ws://desk.example/#x",
        "ws://a/\xe4",
        "ws://[/",
        "ws://a b/",
        "ws://" + "a" * 64 + "/",
    ],
)
async def test_urls_that_are_none(url: str) -> None:
    near, _ = memory_streams()
    with pytest.raises(ConfigurationError):
        await open_over(near, url)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_message": 124},
        {"max_message": 1 << 63},
        {"subprotocols": ("two words",)},
        {"subprotocols": ("",)},
        {"headers": (("Host", "other"),)},
        {"headers": (("Sec-WebSocket-Key", "x"),)},
        {"headers": (("X", "a\r\nY: b"),)},
        {"headers": (("X Y", "z"),)},
        {"keepalive_interval": 0},
        {"close_timeout": 0},
        {"handshake_timeout": -1},
        {"max_handshake": 100},
        {"backlog": 0},
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - from attrs or ours
        WebSocketConfig(**settings)


def test_refusals_are_checked_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="status"):
        Refusal(200)
    assert refusal_bytes(Refusal(599)).startswith(b"HTTP/1.1 599 Refused\r\n")
    with pytest.raises(ConfigurationError, match="are not the name and value"):
        Refusal(403, "no", (("X", "a\r\nSet-Cookie: b"),))
