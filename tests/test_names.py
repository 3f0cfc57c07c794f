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


@attrs.frozen
class Facts:
    """What the syntax trees of all modules say; they are made once, which takes seconds."""

    octets: list[str] = attrs.field(factory=list)
    """Names in code that count octets."""
    raised: list[str] = attrs.field(factory=list)
    """The composed texts of errors."""
    classes: dict[str, list[str]] = attrs.field(factory=dict)
    """The public classes by name, and the modules of each."""

    def read(self, module: str, tree: ast.Module) -> None:
        names: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= set(ast.literal_eval(node.value))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                self.classes.setdefault(node.name, []).append(module)
        for each in ast.walk(tree):
            if isinstance(each, ast.Name | ast.Attribute):
                name = each.id if isinstance(each, ast.Name) else each.attr
                if "octets" in name and re.fullmatch(r"\w*octets(_\w+)?", name):
                    self.octets.append(f"{module}: {name}")
            elif isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call):
                texts = [ast.unparse(part) for part in each.exc.args if isinstance(part, ast.JoinedStr)]
                self.raised.extend(f"{module}: {text}" for text in texts)


@pytest.fixture(scope="module")
def facts() -> Facts:
    found = Facts()
    for module, file in source_modules().items():
        found.read(module, ast.parse(file.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("banned", BANNED)
def test_a_meaning_has_one_name(defined: dict[str, set[str]], banned: str) -> None:
    used = {name: sorted(modules) for name, modules in defined.items() if re.fullmatch(banned, name)}
    assert used == {}, f"the name is {BANNED[banned]}"


def test_what_is_counted_is_bytes(facts: Facts) -> None:
    """Octets are a word of specifications: in code they are ``data``, ``size`` or ``…_bytes``, also in local names."""
    assert facts.octets == []


OTHER_TEXTS = re.compile(r", not (by )?\{|\bmust (be|have|take)\b.*[,;] (got|not) |, unlike \{|\btakes\b.*[,;] got\b")


def test_what_is_wrong_with_a_value_has_one_form(facts: Facts) -> None:
    """``window is 0, wanted 1 or more``, or of unnamed input: ``expected HOST:PORT, got 'x'``."""
    assert [text for text in facts.raised if OTHER_TEXTS.search(text)] == []
    assert len(facts.raised) > 500


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


SHARED = {
    "ActorFailed": "the framework's event, and Spark's error: each package has it public",
    "Authentication": "MAOP's and RSocket's own word, and the hook of every `serve`",
    "Block": "MAOP's frame; the rows of a journal",
    "Call": "the package is part of the name: what a handler of MAOP gets, a command of a protocol, a call of a simulated disk",
    "Delivery": "the package is part of the name: Aqueduct's message, Spark's row",
    "Disapproved": "MAOP's own word: the core's event, and the error that follows",
    "Envelope": "what stands in a queue for protocols (`embedding`); the row of a journal, on disk by this name",
    "Failed": "why an actor ended; MAOP's event",
    "Histogram": "the package is part of the name: MAOP's has quantiles of its own",
    "Incoming": "a peer that asks a carrier for a connection; MAOP's operation",
    "Message": "a frame of Aqueduct and of MAOP; a message of a journal",
    "Metrics": "the package is part of the name",
    "Mode": "how a channel travels: the framework's word, and Aqueduct's on the wire",
    "Process": "the package is part of the name: a simulated one, a node's",
    "Refuse": "MAOP's own word: its frame, and the error that sends it",
    "Refused": "Lumberjack's and MAOP's event, and the answer of an `authenticate` hook",
    "Reply": "the framework's right to answer; MAOP's answer",
    "Request": "MAOP's frame; RSocket's request",
    "Routing": "a router's policy; RSocket's routing metadata",
    "Statistics": "the package is part of the name",
    "StreamData": "bytes for a stream of any carrier; QMux's event: bytes from one",
}
"""Public class names of several modules, and why each may keep them."""
OF_PROTOCOLS = re.compile(
    r"levada\.transports\.(aqueduct|lumberjack|maop|qmux|reactivesocket|rsocket)\.(codes|events|frames|state|versions)"
    r"|levada\.actors\.(aqueduct|maop|rsocket)\.(client|config|peers?|server)|levada\.transports\.carriers\.contracts"
)
"""Specifications name their frames, events, states and codes alike; and every protocol has peers, listeners and connections."""


def test_a_class_name_is_one_thing(facts: Facts) -> None:
    modules = facts.classes
    several = {name: found for name, found in modules.items() if len(found) > 1}
    free = {name: found for name, found in several.items() if not all(map(OF_PROTOCOLS.fullmatch, found))}
    assert {name: found for name, found in free.items() if name not in SHARED} == {}
    assert SHARED.keys() - free.keys() == set(), "no longer shared"
    assert len(modules) > 1000
