"""One name for each meaning: synonyms of a standard name are not defined anywhere in the three packages."""

from __future__ import annotations

import re

import pytest

from .test_layout import source_modules

DEFINED = re.compile(r"^ *(?:async )?def (\w+)|(?:^ +|[(,] ?)(\w+): |\"--([a-z-]+)\"", re.MULTILINE)
"""Functions and methods, annotated parameters and fields, and the options of commands."""

BANNED = {
    r"high_water|send_high|high": "high_watermark",
    r"low_water|send_low|low": "low_watermark",
    r"\w+_octets|octets_\w+": "…_bytes or bytes_…",
    r"shutdown|grace|(close|shutdown|stop|cancel|drain)_grace": "drain_timeout, or what the time is for, with _timeout",
    r"is_(over|closed|ended)": "closed",
    r"keepalive|keepalive_(delay|every|period|seconds|time)": "keepalive_interval",
    r"backoff|(first|min)_backoff|reconnect_(min|max|delay)": "initial_backoff and max_backoff",
}
"""Patterns of whole names, and the name that stands for their meaning."""


@pytest.fixture(scope="module")
def defined() -> dict[str, set[str]]:
    """Every name that is defined, and the modules that define it."""
    found: dict[str, set[str]] = {}
    for module, file in source_modules().items():
        for names in DEFINED.findall(file.read_text(encoding="utf-8")):
            found.setdefault("".join(names).replace("-", "_"), set()).add(module)
    return found


@pytest.mark.parametrize("banned", BANNED)
def test_a_meaning_has_one_name(defined: dict[str, set[str]], banned: str) -> None:
    used = {name: sorted(modules) for name, modules in defined.items() if re.fullmatch(banned, name)}
    assert used == {}, f"the name is {BANNED[banned]}"
