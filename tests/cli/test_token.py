"""``levada token new``."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from levada.actors import cli
from levada.actors.authentication import Credentials
from levada.actors.authenticators import BearerTokens
from levada.framework import Identity
from levada.transports.carriers import CarrierInfo


@pytest.mark.parametrize(
    ("words", "identity"),
    [
        (["web-01"], Identity("web-01")),
        (
            ["web 1", "--tenant", "the shop", "--role", "reader", "--role", "it's"],
            Identity("web 1", tenant="the shop", roles={"reader", "it's"}),
        ),
    ],
)
def test_a_token_and_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], identity: Identity
) -> None:
    assert cli.main(["token", "new", *words]) == 0
    out, err = capsys.readouterr()
    token, line = out.splitlines()
    assert err == ""
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(line)
    info = CarrierInfo(scheme="tls", local="a:1", peer="b:2")
    shown = Credentials(protocol="maop", listener="maop+tls://a:1", info=info, scheme="bearer", token=token.encode())
    assert trio.run(BearerTokens(file), shown) == identity


@pytest.mark.parametrize(
    "words",
    [
        ["new", ""],
        ["new", "a\nb"],
        ["new", "a", "--tenant", "\x1b"],
        ["new", "a", "--role", "\n"],
        ["new", "a", "--role", ""],
    ],
)
def test_names_that_cannot_be(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(["token", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("levada: ")
    assert err.count("\n") == 1
