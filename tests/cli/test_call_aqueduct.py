"""``levada call aqueduct://…``: against ``levada interop aqueduct``, and against a server with message classes."""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from levada.actors import cli
from levada.actors.aqueduct import PeerConfig, RawMessage, serve
from levada.actors.authenticators import BearerTokens
from levada.actors.cli.protocols.aqueduct import message_bytes
from levada.actors.interop.aqueduct import answer
from levada.actors.interop.certificates import SelfSigned, make_certificates
from levada.framework import Actor, ActorSystem, Asks, Codec, Identity, OneshotSender, Sender, handles, message
from levada.framework.codec import AttachmentKind
from levada.framework.errors import ConfigurationError
from levada.transports.quic import QuicConfig

pytestmark = pytest.mark.loopback


@message("tests.call.Price")
class Price:
    symbol: str
    bid: float


@message("tests.call.Get")
class Get:
    price: OneshotSender[Any]
    symbol: str


@message("tests.call.Follow")
class Follow:
    first: Price
    notes: list[bytes]
    prices: Sender[Any]


@message("tests.call.Note")
class Note:
    text: str


@message("tests.call.Total")
class Total(Asks[Any]):
    symbol: str


class Clerk(Actor[Total | Note]):
    notes: list[str]

    @handles
    def total(self, m: Total) -> Any:
        if m.symbol == "none":
            raise ValueError("no such symbol")
        return Price(m.symbol, float(len(self.notes)))

    @handles
    def note(self, m: Note) -> None:
        self.notes.append(m.text)


class Desk:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.noted = threading.Event()

    async def answer(self, m: Get | Follow | Note) -> None:
        match m:
            case Get(price, symbol):
                price.send(Price(symbol, 1.5))
            case Follow(Price("none"), _, prices):
                await prices.send("one")
                prices.cancel("sold out")
            case Follow(first, notes, prices):
                async with prices:
                    for item in (first, notes, "höre", None, dt.datetime(2026, 1, 2, tzinfo=dt.UTC), {1: m.notes}):
                        await prices.send(item)
            case Note(text):
                self.notes.append(text)
                self.noted.set()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SelfSigned:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk()


def _served(handler: Callable[..., Any], made: SelfSigned, message_type: Any, hook: Any = None) -> Iterator[str]:
    """Serve in a thread: `cli.main` has a trio run of its own."""
    ready, urls = threading.Event(), []
    stop: list[tuple[trio.lowlevel.TrioToken, trio.CancelScope]] = []

    async def main() -> None:
        quic = QuicConfig(certificate=made.certificate, key=made.key)
        config = PeerConfig(carrier=quic)
        url, exposed = "aqueduct://127.0.0.1:0", ["clerk"]
        with trio.CancelScope() as scope:
            async with (
                ActorSystem() as system,
                serve(system, url, handler, message_type, authenticate=hook, config=config, expose=exposed) as listener,
            ):
                system.registry.register("clerk", system.spawn(Clerk, []))
                urls.append(listener.url)
                stop.append((trio.lowlevel.current_trio_token(), scope))
                ready.set()
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert ready.wait(250)
    yield urls[0]
    token, scope = stop[0]
    token.run_sync_soon(scope.cancel)
    thread.join(50)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def url(made: SelfSigned, desk: Desk) -> Iterator[str]:
    yield from _served(desk.answer, made, Any)


@pytest.fixture(scope="module")
def raw_url(made: SelfSigned) -> Iterator[str]:
    """The contract of `levada interop aqueduct`."""
    yield from _served(answer, made, RawMessage)


@pytest.fixture
def guarded_url(made: SelfSigned) -> Iterator[str]:
    yield from _served(answer, made, RawMessage, BearerTokens.of({b"secret": Identity("ada")}))


@pytest.fixture
def call(made: SelfSigned, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["call", *arguments, "--ca", str(made.ca)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


Call = Callable[..., tuple[int, str, str]]


def test_octets_without_a_tag(raw_url: str, call: Call, tmp_path: Path) -> None:
    assert call(raw_url, "--data", "hällo") == (0, "hällo\n", "")
    assert call(raw_url, "--data", "x", "--stream", "--json") == (0, '{"data": "x"}\n', "")
    assert call(raw_url, "--data", "x", "--fnf") == (0, "", "")
    (tmp_path / "octets").write_bytes(b"\xff\x00")
    assert call(raw_url, "--data", f"@{tmp_path / 'octets'}", "--json") == (0, '{"data_base64": "/wA="}\n', "")


def test_a_message_by_tag_and_fields(url: str, call: Call, desk: Desk) -> None:
    """The sender takes the place that is kept for it; without one it is the last field."""
    get = ("--tag", "tests.call.Get", "--data", '["@reply", "EURUSD"]')
    assert call(url, *get, "--reply") == (0, 'tests.call.Price ["EURUSD", 1.5]\n', "")
    assert call(url, *get, "--json") == (0, '{"message": "tests.call.Price", "fields": ["EURUSD", 1.5]}\n', "")
    assert call(url, "--tag", "tests.call.Note", "--data", '["see"]', "--fnf") == (0, "", "")
    assert desk.noted.wait(250)  # it was taken; the handler has a turn of its own
    assert desk.notes == ["see"]


def test_a_stream_of_all_kinds_of_values(url: str, call: Call) -> None:
    fields = [{"message": "tests.call.Price", "fields": ["A", 2.0]}, [{"base64": "/w=="}]]
    follow = (url, "--tag", "tests.call.Follow", "--data", json.dumps(fields), "--stream")
    code, out, err = call(*follow)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        'tests.call.Price ["A", 2.0]',
        '[{"base64": "/w=="}]',
        "höre",
        "null",
        '"2026-01-02T00:00:00+00:00"',
        '{"1": [{"base64": "/w=="}]}',
    ]
    assert call(*follow, "--limit", "1")[1] == 'tests.call.Price ["A", 2.0]\n'


def test_a_named_actor_is_asked_and_told(url: str, call: Call) -> None:
    """In the octets of remote refs: lookup, tell, ask, answer, failure."""
    clerk = (url, "--lookup", "clerk", "--tag")
    assert call(*clerk, "tests.call.Total", "--data", '["EUR"]') == (0, 'tests.call.Price ["EUR", 0.0]\n', "")
    assert call(*clerk, "tests.call.Note", "--data", '["see"]', "--fnf") == (0, "", "")
    assert call(*clerk, "tests.call.Total", "--data", '["CHF"]') == (0, 'tests.call.Price ["CHF", 1.0]\n', "")
    code, out, err = call(*clerk, "tests.call.Nothing")
    assert (code, out) == (1, "")
    assert "'tests.call.Nothing'" in err
    code, out, err = call(*clerk, "tests.call.Total", "--data", '["none"]')
    assert (code, out) == (1, "")
    assert re.fullmatch(r"levada: ActorStopped: .* failed: ValueError\('no such symbol'\)\n", err)
    assert call(url, "--lookup", "boss", "--tag", "t") == (1, "", "levada: no actor named 'boss' is exposed there\n")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (
            ("--tag", "tests.call.Nothing"),
            "unknown tag 'tests.call.Nothing': the module that defines this message must be imported here",
        ),
        (("--tag", "tests.call.Get", "--data", '["@reply", 5]'), "Get.symbol: expected str, got int"),
        (("--tag", "tests.call.Get", "--data", '[5, "@reply"]'), "Get.price: expected OneshotSender[Any], got int"),
        (("--tag", "tests.call.Follow", "--data", "[7, []]", "--stream"), "Follow.first: expected Price, got int"),
    ],
    ids=["tag", "type", "place", "stream"],
)
def test_what_the_server_cannot_read_is_exit_code_1_and_says_why(
    url: str, call: Call, caplog: pytest.LogCaptureFixture, arguments: tuple[str, ...], cause: str
) -> None:
    """The cause is one line here and one line in the server's log."""
    assert call(url, *arguments) == (1, "", f"levada: the server could not read the message: {cause}\n")
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage().partition(" cannot be read: ")[2] for record in said] == [cause]
    assert said[0].exc_info is None


def test_a_stream_that_is_cancelled_says_why(url: str, call: Call) -> None:
    none = '[{"message": "tests.call.Price", "fields": ["none", 2.0]}, []]'
    cancelled = (1, "one\n", "levada: the server cancelled the channel: sold out\n")
    assert call(url, "--tag", "tests.call.Follow", "--data", none, "--stream") == cancelled


def test_a_sender_of_the_wrong_kind_names_the_option(url: str, call: Call) -> None:
    """A class that is answered once has no place for a stream's sender, and one with a stream has none for a oneshot."""
    cannot = "levada: the server could not read the message: "
    get = call(url, "--tag", "tests.call.Get", "--data", '["@reply", "EUR"]', "--stream")
    assert get == (
        1,
        "",
        f"{cannot}Get.price: expected OneshotSender[Any], got an attachment (sender); it is answered once: leave out --stream\n",
    )
    follow = call(
        url, "--tag", "tests.call.Follow", "--data", '[{"message": "tests.call.Price", "fields": ["A", 2.0]}, []]'
    )
    assert follow == (
        1,
        "",
        f"{cannot}Follow.prices: expected Sender[Any], got an attachment (oneshot_sender); it is answered by a stream: add --stream\n",
    )
    misplaced = call(url, "--tag", "tests.call.Get", "--data", '["EUR", "@reply"]', "--stream")
    assert misplaced == (1, "", f"{cannot}Get.price: expected OneshotSender[Any], got str\n")


@pytest.mark.parametrize(
    ("url", "options"),
    [("aqueduct://127.0.0.1:9", ()), ("rsocket+quic://127.0.0.1:9", ()), ("maop://127.0.0.1:9", ("--id", "1"))],
)
def test_no_connection_in_time_is_exit_code_2(call: Call, url: str, options: tuple[str, ...]) -> None:
    """Nothing listens at this port. UDP does not say so, and QUIC would try for ten seconds."""
    code, out, err = call(url, *options, "--timeout", "0.1")
    assert (code, out, err) == (2, "", f"levada: no connection to {url} within 0.1 s\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--token-file", "/no/such/file"], "cannot read /no/such/file"),
        (["--token-file", "/dev/null"], "--token-file: /dev/null is empty"),
        (["--channel"], "--channel is not for aqueduct: use --reply, --stream or --fnf"),
        (["--data", "a", "--data", "b"], "aqueduct takes one --data"),
        (["--lookup", "clerk"], "--lookup needs --tag"),
        (["--lookup", "clerk", "--tag", "t", "--stream"], "--lookup needs --tag"),
        (["--tag", "t", "--data", "x"], "with --tag, --data must be JSON"),
        (["--tag", "t", "--data", '{"a": 1}'], 'with --tag, --data is {"a": 1}, wanted a JSON array of fields'),
        (["--tag", "t", "--data", '["@reply"]', "--fnf"], '"@reply" may stand among the fields once, and not with'),
        (["--tag", "t", "--data", '["@reply", "@reply"]'], '"@reply" may stand among the fields once, and not with'),
        (["--tag", "t", "--data", "[1e999, 18446744073709551616]"], "the fields cannot be encoded: "),
        (["--tag", "t", "--data", '[{"base64": "?"}]'], "the fields cannot be encoded: "),
        (["--tag", "t", "--data", "[" * 600 + "]" * 600], "the fields cannot be encoded: "),
        (["--tag", "t", "--data", "[" * 100_000], "with --tag, --data must be JSON: "),
    ],
)
def test_mistakes(call: Call, arguments: list[str], complaint: str) -> None:
    code, out, err = call("aqueduct://127.0.0.1:9", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"levada: {complaint}")


def test_a_url_of_an_unknown_carrier_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["call", "aqueduct+smoke://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith(
        "levada: no carrier for 'aqueduct+smoke://127.0.0.1:9': the carrier is one of "
    )


def test_octets_are_those_of_the_codec() -> None:
    bid = Price("EURUSD", 1.08)
    assert message_bytes("tests.call.Price", ["EURUSD", 1.08], None) == Codec().encode(bid)
    follow = message_bytes(
        "tests.call.Follow", [{"message": "tests.call.Price", "fields": ["E", 1.0]}, []], AttachmentKind.SENDER
    )
    got: list[tuple[int, AttachmentKind]] = []
    decoded = Codec().decode(follow, Follow, detach=lambda index, kind, _: got.append((index, kind)))
    assert (decoded.first, got) == (Price("E", 1.0), [(0, AttachmentKind.SENDER)])
    with pytest.raises(ConfigurationError):
        message_bytes("t", [sys.maxsize * 4], None)


def test_a_token_opens_the_door(call: Callable[..., tuple[int, str, str]], guarded_url: str, tmp_path: Path) -> None:
    tokens = [tmp_path / name for name in ("good", "bad")]
    for file, token in zip(tokens, ("secret\n", "guess\n"), strict=True):
        file.touch(mode=0o600)
        file.write_text(token)
    assert call(guarded_url, "--data", "echo hello", "--token-file", str(tokens[0])) == (0, "echo hello\n", "")
    code, out, err = call(guarded_url, "--data", "echo hello", "--token-file", str(tokens[1]))
    assert (code, out) == (2, "")
    assert "These credentials are not valid here." in err
