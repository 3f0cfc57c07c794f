"""One name for each meaning: synonyms of a standard name are not defined anywhere. A time is seconds, and is checked."""

from __future__ import annotations

import ast
import contextlib
import importlib
import math
import re

import attrs
import pytest

from .test_layout import public_modules, source_modules

DEFINED = re.compile(r"^ *(?:async )?def (\w+)|(?:^ +|[(,] ?)(\w+): |\"--([a-z-]+)\"", re.MULTILINE)
"""Functions and methods, annotated parameters and fields, and the options of commands."""

BANNED = {
    r"high_water|send_high|high": "high_watermark",
    r"low_water|send_low|low": "low_watermark",
    r"octets|\w+_octets|octets_\w+": "data, size, …_bytes or bytes_…",
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


OTHER_TEXTS = re.compile(r", not (by )?\{|\bmust (be|have|take)\b.*[,;] (got|not) |, unlike \{|\btakes\b.*[,;] got\b")


def test_what_is_wrong_with_a_value_has_one_form() -> None:
    """``window is 0, wanted 1 or more``, or of unnamed input: ``expected HOST:PORT, got 'x'``."""
    found, read = [], 0
    for module, file in source_modules().items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = [ast.unparse(part) for part in node.exc.args if isinstance(part, ast.JoinedStr)]
                read += len(texts)
                found += [f"{module}: {text}" for text in texts if OTHER_TEXTS.search(text)]
    assert found == []
    assert read > 500


TIME = re.compile(r"\w+_(timeout|interval|backoff|delay)|linger|ttl|silence|idle")


def settings() -> set[type]:
    """The public classes of settings of which every setting has a default."""
    found = set()
    for module in public_modules():
        with contextlib.suppress(ModuleNotFoundError):  # an extra is not installed
            values = vars(importlib.import_module(module)).values()
            found |= {value for value in values if isinstance(value, type) and attrs.has(value)}
    return {
        cls
        for cls in found
        if re.search(r"(Config|NodeSettings|Policy|Reconnect)$", cls.__name__)
        and all(field.default is not attrs.NOTHING for field in attrs.fields(cls))
    }


@pytest.mark.ci  # imports everything
def test_no_time_is_negative_or_nan() -> None:
    accepted, tried = [], 0
    for cls in settings():
        for field in attrs.fields(cls):
            if TIME.fullmatch(field.name) and "float" in str(field.type):
                for wrong in (-1.0, math.nan):
                    tried += 1
                    with contextlib.suppress(ValueError):
                        accepted.append(cls(**{field.name: wrong}))
    assert accepted == []
    assert tried > 100


@pytest.mark.ci  # imports everything
def test_a_setting_is_the_core_s_or_the_driver_s() -> None:
    """Settings that hold the core's settings have none of the same name, so nobody has to know which of the two counts.

    `lease` is in both: RSocket's driver takes a policy for all leases, and gives the core the first one.
    """
    both, compared = set(), 0
    for cls in settings():
        fields = attrs.asdict(cls(), recurse=False)
        if "core" in fields:
            compared += 1
            both |= fields.keys() & attrs.asdict(fields["core"], recurse=False).keys()
    assert both == {"lease"}
    assert compared > 3
