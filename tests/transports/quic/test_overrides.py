"""Each override of an aioquic method, with its reason and the lines it overrides: a release that changes those lines fails here by name.

``python tests/transports/quic/test_overrides.py`` writes the new lines and digests into the table, once the overrides have been compared
with the new source. A new override gets an entry with the reason ``""``, which a test refuses.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from levada.transports.quic import congestion, engine, keys, packets, ranges, recovery

FILE = Path(__file__).parent / "data" / "overrides.json"
MODULES = (engine, keys, packets, ranges, congestion, recovery)
TABLE: dict[str, dict[str, str]] = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}


def function(member: Any) -> Any:
    return member.fget if isinstance(member, property) else member


def overridden() -> dict[str, Any]:
    """The aioquic method behind each method of ours that overrides one, by ``Class.method`` of ours."""
    found = {}
    for module in MODULES:
        for owner in vars(module).values():
            if not isinstance(owner, type) or owner.__module__ != module.__name__:
                continue
            for name, member in vars(owner).items():
                if name == "__init__" or not inspect.isfunction(function(member)):
                    continue
                bases = (b for b in owner.__mro__ if b.__module__.startswith("aioquic.") and name in vars(b))
                if (base := next(bases, None)) is not None:
                    found[f"{owner.__name__}.{name}"] = function(vars(base)[name])
    return found


def place(method: Any) -> dict[str, str]:
    """Where a method of aioquic is, and a digest of its source."""
    lines, first = inspect.getsourcelines(method)
    file = method.__module__.removeprefix("aioquic.").replace(".", "/")
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
    return {"overrides": f"{file}.py {first}-{first + len(lines) - 1}", "digest": digest}


def test_every_override_has_an_entry_with_a_reason() -> None:
    assert overridden().keys() == TABLE.keys()
    assert [name for name, entry in TABLE.items() if not entry["reason"]] == []


@pytest.mark.parametrize("name", TABLE)
def test_aioquic_has_the_method_that_the_override_was_written_for(name: str) -> None:
    entry = TABLE[name]
    now = place(overridden()[name])
    assert now["digest"] == entry["digest"], (
        f"aioquic changed {entry['overrides']}, now {now['overrides']}: {entry['reason']}"
    )
    assert now["overrides"] == entry["overrides"], "only its lines have moved: run this file"


if __name__ == "__main__":
    entries = {
        name: {"reason": TABLE.get(name, {}).get("reason", ""), **place(method)}
        for name, method in overridden().items()
    }
    FILE.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
