"""`printable`: whatever a peer wrote becomes one harmless line. `texts`: one text is not several."""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.framework.text import printable, texts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("all is well: 10 €, 測試, 🙂", "all is well: 10 €, 測試, 🙂"),
        ("a\nb\r\tc\0", r"a\nb\r\tc\x00"),
        ("\x1b[31mred\x7f", r"\x1b[31mred\x7f"),
        ("\x85\x9b2J", r"\x85\x9b2J"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\u202egnp\u202c \u2066x\u2069 \u200f", r"\u202egnp\u202c \u2066x\u2069 \u200f"),
        ("\ud800 \udcff", r"\ud800 \udcff"),
        (b"caf\xc3\xa9 \xff\n", r"café \xff\n"),
        (bytearray(b"\xed\xa0\x80"), r"\xed\xa0\x80"),
        (r"C:\new 'and' \x1b", r"C:\new 'and' \x1b"),
    ],
)
def test_what_is_not_printable_is_shown_as_an_escape(text: str | bytes, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("12345", 5, "12345"),
        ("123456", 5, "1234…"),
        (b"123456", 5, "1234…"),
        ("ÄÖÜß".encode(), 4, "ÄÖÜß"),
        ("ÄÖÜßé".encode(), 4, "ÄÖÜ…"),
        ("🙂🙂🙂".encode(), 2, "🙂…"),
        ("\n\n\n", 4, r"\n\…"),
        ("a", 1, "a"),
        ("ab", 1, "…"),
    ],
)
def test_a_long_text_is_cut_with_an_ellipsis(text: str | bytes, limit: int, shown: str) -> None:
    assert printable(text, limit) == shown


@given(st.one_of(st.text(st.characters(), max_size=300), st.binary(max_size=300)), st.integers(1, 250))
def test_any_text_becomes_one_printable_line_within_the_limit(text: str | bytes, limit: int) -> None:
    shown = printable(text, limit)
    assert shown.isprintable()
    assert len(shown) <= limit
    shown.encode()  # fails on a lone surrogate


def test_several_texts_are_a_tuple() -> None:
    assert texts(["a", "bc"]) == texts(("a", "bc")) == texts(each for each in ("a", "bc")) == ("a", "bc")
    assert texts(()) == ()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ("levada.actors.dashboard:DashboardConfig", "names"),
        ("levada.actors.lumberjack:TailConfig", "exclude"),
        ("levada.transports.carriers.tls:TlsConfig", "alpn"),
        ("levada.transports.carriers.websocket_config:WebSocketConfig", "origins"),
        ("levada.transports.carriers.websocket_config:WebSocketConfig", "subprotocols"),
        ("levada.transports.qmux:QmuxConfig", "protocols"),
        ("levada.transports.quic:QuicConfig", "alpn"),
    ],
)
@pytest.mark.parametrize("wrong", ["*.log", ["a", 5]])
def test_a_setting_of_several_texts_refuses_one(config: str, field: str, wrong: object) -> None:
    """Its characters would be taken for texts, and ``*`` for a pattern that fits all files."""
    module, _, name = config.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}")
    with pytest.raises(TypeError):
        make(**{field: wrong})
