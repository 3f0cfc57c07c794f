"""Identities: names that fit a log line, and limits that are numbers."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from levada.framework import ConfigurationError, Identity, Limits, RemotePeer


def test_a_tenant_is_the_name_unless_said() -> None:
    assert Identity("ada").tenant == "ada"
    assert Identity("ada", tenant="acme").tenant == "acme"
    assert attrs.evolve(Identity("ada", tenant="acme"), name="bob").tenant == "acme"


def test_values_are_made_what_they_should_be() -> None:
    identity = Identity("ada", roles=["a", "b", "a"], headers=[("x", b"1")])
    assert (identity.roles, identity.headers, identity.limits) == (frozenset({"a", "b"}), (("x", b"1"),), Limits())
    assert hash(identity) == hash(attrs.evolve(identity))
    assert Identity("Zoë 7", tenant="a" * 256).name == "Zoë 7"


@pytest.mark.parametrize("name", ["", "a" * 257, "a\nb", "\x1b[2J", "a\u202eb"])
def test_names_are_printable_and_short(name: str) -> None:
    with pytest.raises(ConfigurationError):
        Identity(name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": 5},
        {"roles": "admin"},
        {"roles": [5]},
        {"limits": 5},
        {"headers": [("a", "b")]},
        {"headers": [(b"a", b"b")]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_types(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Identity("ada", **wrong)


@pytest.mark.parametrize(
    "wrong", [{"max_connections": 0}, {"max_operations": 1.5}, {"max_bytes": -1}, {"bytes_per_second": 0}]
)
def test_limits_are_positive(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Limits(**wrong)


def test_a_peer_as_text() -> None:
    assert str(RemotePeer("toy", "192.0.2.1:4", None, None)) == "192.0.2.1:4"
    assert str(RemotePeer("toy", "192.0.2.1:4", Identity("ada"), None)) == "ada (192.0.2.1:4)"
