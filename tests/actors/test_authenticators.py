"""The ready-made hooks: tokens of a file, names in certificates, users of a Unix socket, several hooks in turn."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.actors.authentication import Credentials, Refused, Reloads
from levada.actors.authenticators import BearerTokens, CertificateNames, UnixUsers, any_of, new_token
from levada.framework import Actor, ActorSystem, Identity, Limits, handles
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import CarrierInfo

INFO = CarrierInfo(scheme="tls", local="127.0.0.1:1", peer="127.0.0.1:2")
NOTHING = Credentials(protocol="toy", listener="toy+tls://127.0.0.1:1", info=INFO)
UNKNOWN = Refused()


def bearer(token: str) -> Credentials:
    return attrs.evolve(NOTHING, scheme="bearer", token=token.encode())


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def written(folder: Path, text: str | bytes) -> Path:
    file = folder / "tokens"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    file.chmod(0o600)
    return file


async def test_a_file_says_who_has_which_token(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        f"""
        # who may come in
        ada sha256={digest("first")} tenant=acme role=reader role=writer   # until June
        ada sha256={digest("second").upper()} tenant=acme
        'web 1' max_connections=3 bytes_per_second=1e6 sha256={digest("third")}\r
        """,
    )
    tokens = BearerTokens(file)
    assert await tokens(bearer("first")) == Identity("ada", tenant="acme", roles={"reader", "writer"})
    assert await tokens(bearer("second")) == Identity("ada", tenant="acme"), "two tokens of one name, at once"
    limits = Limits(max_connections=3, bytes_per_second=1e6)
    assert await tokens(bearer("third")) == Identity("web 1", limits=limits)
    assert await tokens(bearer("fourth")) == UNKNOWN
    assert await tokens(bearer(digest("first"))) == UNKNOWN
    assert await tokens(bearer("")) == UNKNOWN
    assert await tokens(NOTHING) == UNKNOWN
    assert await tokens(attrs.evolve(bearer("first"), scheme="basic")) == UNKNOWN
    assert "first" not in repr(tokens)
    assert digest("first") not in repr(tokens)


async def test_reading_the_file_again_replaces_tokens(tmp_path: Path) -> None:
    file = written(tmp_path, f"ada sha256={digest('old')}")
    tokens = BearerTokens(file)
    written(tmp_path, f"ada sha256={digest('old')}\nada sha256={digest('new')}")
    assert await tokens(bearer("new")) == UNKNOWN, "not before it is told to"
    tokens.reload()
    assert [await tokens(bearer(token)) for token in ("old", "new")] == [Identity("ada")] * 2
    written(tmp_path, f"ada sha256={digest('new')}")
    tokens.reload()
    assert [await tokens(bearer(token)) for token in ("old", "new")] == [UNKNOWN, Identity("ada")]
    written(tmp_path, "ada")
    with pytest.raises(ConfigurationError):
        tokens.reload()
    assert await tokens(bearer("new")) == Identity("ada"), "a file that cannot be used changes nothing"
    file.unlink()
    with pytest.raises(ConfigurationError, match=r"cannot read the tokens in .*tokens: "):
        tokens.reload()
    assert await tokens(bearer("new")) == Identity("ada")


async def test_files_as_other_systems_write_them(tmp_path: Path) -> None:
    """With CR LF, and with the mark that begins a UTF-8 file of Windows."""
    file = written(
        tmp_path, f"\ufeffada sha256={digest('first')}\r\n# a comment\r\n\r\nbob sha256={digest('second')}\r\n"
    )
    tokens = BearerTokens(file)
    assert [await tokens(bearer(token)) for token in ("first", "second")] == [Identity("ada"), Identity("bob")]


async def test_tokens_of_a_program_need_no_file() -> None:
    tokens = BearerTokens.of({b"secret": Identity("ada")})
    tokens.reload()
    assert await tokens(bearer("secret")) == Identity("ada")
    assert "secret" not in repr(tokens)


BAD: dict[str, str | bytes] = {
    "no digest": "secret",
    "the token itself": "ada sha256=secret",
    "a short digest": f"ada sha256={'5ec12e7' * 9}",
    "no value": f"ada role= sha256={digest('a')}",
    "two digests": f"ada sha256={digest('a')} sha256={digest('b')}",
    "an unknown field": f"ada secret=1 sha256={digest('a')}",
    "a limit that is no number": f"ada max_connections=secret sha256={digest('a')}",
    "a limit of none": f"ada max_connections=0 sha256={digest('a')}",
    "an open quotation": f"'secret sha256={digest('a')}",
    "a name that cannot be printed": f"'secret\x07' sha256={digest('a')}",
    "a long name": f"{'secret' * 50} sha256={digest('a')}",
    "no name": f"'' sha256={digest('a')}",
    "no UTF-8": b"secret\xff sha256=" + digest("a").encode(),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_line_is_named_by_its_number_only(tmp_path: Path, why: str) -> None:
    line = BAD[why]
    file = written(tmp_path, b"# first\n\n" + (line.encode() if isinstance(line, str) else line) + b"\n")
    with pytest.raises(ConfigurationError, match=r"tokens, line 3: expected NAME .*sha256=DIGEST$") as caught:
        BearerTokens(file)
    told: BaseException | None = caught.value
    assert "secret" not in str(told)
    assert told is not None
    assert told.__suppress_context__, "the cause would show the line"


def test_a_token_has_one_line(tmp_path: Path) -> None:
    line = f"ada sha256={digest('secret')}\n"
    with pytest.raises(ConfigurationError, match="tokens, line 2: this token is on an earlier line, too"):
        BearerTokens(written(tmp_path, line + line))


@pytest.mark.skipif(os.name != "posix", reason="there are no such modes")
def test_a_file_that_others_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, f"ada sha256={digest('secret')}\n")
    BearerTokens(file)
    assert caplog.records == []
    file.chmod(0o644)
    BearerTokens(file)
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.WARNING,
        f"{file} holds digests of tokens and can be read by all users of this machine: chmod 600 it",
    )


words = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1, max_size=20)


@given(
    st.builds(
        Identity,
        words,
        tenant=words,
        roles=st.frozensets(words, max_size=3),
        limits=st.builds(Limits, max_operations=st.none() | st.integers(1, 9)),
    )
)
async def test_new_tokens_and_their_lines_fit(tmp_path_factory: pytest.TempPathFactory, identity: Identity) -> None:
    made = [new_token(identity) for _ in range(2)]
    tokens = BearerTokens(written(tmp_path_factory.getbasetemp(), "\n".join(line for _, line in made)))
    assert len({token for token, _ in made}) == 2
    for token, line in made:
        assert len(token) == 43
        assert token.decode() not in line
        assert await tokens(bearer(token.decode())) == identity


def certified(subject: str | None, *names: str) -> Credentials:
    info = attrs.evolve(INFO, peer_certificate=b"DER", peer_subject=subject, peer_names=names)
    return attrs.evolve(NOTHING, info=info)


NAMES = CertificateNames(
    {
        "CN=root,O=Example": Identity("root", roles={"admin"}),
        "CN=*,O=Example": None,
        "DNS:*.example.org": Identity("web"),
        "DNS:desk.example.com": Identity("desk"),
        "URI:spiffe://example.org/*/*": None,
    }
)
NOT_KNOWN = Refused("The names in the client certificate are not known here.")


@pytest.mark.parametrize(
    ("shown", "answer"),
    [
        (certified("CN=root,O=Example"), Identity("root", roles={"admin"})),
        (certified("CN=ada,O=Example"), Identity("CN=ada,O=Example")),
        (certified("CN=,O=Example"), NOT_KNOWN),
        (certified("CN=ada,O=Elsewhere"), NOT_KNOWN),
        (certified("CN=ada,OU=x,O=Example"), NOT_KNOWN),
        (certified(r"CN=ada\,O=Example,O=Elsewhere"), NOT_KNOWN),
        (certified(r"CN=ada\,O=Elsewhere,O=Example"), NOT_KNOWN),
        (certified("cn=ada,O=Example"), NOT_KNOWN),
        (certified("CN=ada,O=Example\n"), NOT_KNOWN),
        (certified("CN=" + "a" * 300 + ",O=Example"), NOT_KNOWN),
        (certified("CN=a\x07,O=Example", "DNS:a.example.org"), Identity("web")),
        (certified(None, "email:a@b", "DNS:WEB-1.Example.org"), Identity("web")),
        (certified(None, "DNS:a.b.example.org"), NOT_KNOWN),
        (certified(None, "DNS:.example.org"), NOT_KNOWN),
        (certified(None, "DNS:DESK.example.com"), Identity("desk")),
        (certified(None, "DNS:des\u212a.example.com"), NOT_KNOWN),  # the Kelvin sign, whose lower case is k
        (certified(None, "DNS:a-example-org"), NOT_KNOWN),
        (certified(None, "URI:spiffe://example.org/a/b"), Identity("URI:spiffe://example.org/a/b")),
        (certified(None, "URI:spiffe://EXAMPLE.org/a/b"), NOT_KNOWN),
        (certified(None), NOT_KNOWN),
        (NOTHING, Refused("A client certificate is required here.")),
    ],
)
async def test_patterns_of_certificates(shown: Credentials, answer: Identity | Refused) -> None:
    assert await NAMES(shown) == answer


async def test_without_patterns_every_verified_certificate_is_good() -> None:
    anyone = CertificateNames()
    assert await anyone(certified("CN=ada,O=Example", "DNS:a")) == Identity("CN=ada,O=Example")
    assert await anyone(certified(None, "DNS:a", "DNS:b")) == Identity("DNS:a")
    assert await anyone(certified(None)) == NOT_KNOWN
    assert await anyone(NOTHING) == Refused("A client certificate is required here.")
    assert await CertificateNames({})(certified("CN=ada")) == NOT_KNOWN


@pytest.mark.parametrize("pattern", ["", "*", "web-1.example.org", "dns:a"])
def test_a_pattern_that_could_never_fit_is_a_mistake(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match=r"wanted one such as 'CN=\*'"):
        CertificateNames({pattern: None})


async def test_users_of_a_unix_socket() -> None:
    users = UnixUsers({1000: Identity("ada")})
    shown = [attrs.evolve(NOTHING, info=attrs.evolve(INFO, peer_credentials=(7, uid, 1000))) for uid in (1000, 0)]
    assert await users(shown[0]) == Identity("ada")
    assert await users(shown[1]) == Refused("This user is not known here.")
    assert await users(NOTHING) == Refused("A connection over a Unix socket is required here.")


async def test_the_first_hook_that_does_not_refuse_decides(tmp_path: Path) -> None:
    asked = []

    class Last(Actor[Credentials]):
        @handles
        async def decide(self, m: Credentials) -> Identity | Refused:
            asked.append(m)
            return Identity("by the actor") if m.user == "grace" else Refused("No.", code=7)

    file = written(tmp_path, f"ada sha256={digest('old')}")
    async with ActorSystem() as system:
        hook = any_of(BearerTokens(file), NAMES, system.spawn(Last))
        assert await hook(bearer("old")) == Identity("ada")
        assert await hook(certified("CN=root,O=Example")) == Identity("root", roles={"admin"})
        assert asked == []
        grace = attrs.evolve(NOTHING, user="grace")
        assert await hook(grace) == Identity("by the actor")
        assert asked == [grace]
        assert await hook(bearer("new")) == UNKNOWN, "the first refusal is the answer"
        written(tmp_path, f"ada sha256={digest('new')}")
        files: object = hook
        assert isinstance(files, Reloads)
        files.reload()
        assert await hook(bearer("new")) == Identity("ada")


@pytest.mark.parametrize("wrong", [None, "tokens", Identity("ada")])
def test_each_of_several_hooks_is_a_hook(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^authenticate is .*, wanted an async function or a Ref$"):
        any_of(BearerTokens.of({}), wrong)


async def test_a_hook_that_fails_ends_the_search() -> None:
    async def broken(asked: Credentials) -> Identity | Refused:
        raise RuntimeError("the database is away")

    hook = any_of(broken, BearerTokens.of({b"secret": Identity("ada")}))
    with pytest.raises(RuntimeError):
        await hook(bearer("secret"))
