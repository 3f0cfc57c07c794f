"""Versions and capabilities, and how two sides agree on them."""

from __future__ import annotations

import enum
import re
from typing import Final

import attrs

__all__ = ["Capability", "Version", "parse_capabilities", "parse_version"]

_NUMBER: Final = r"(0|[1-9][0-9]*)"
_SEMVER: Final = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}"
    # MA-31: a numeric identifier has no leading zero, and none begins with a hyphen.
    r"(?:-((?:0|[1-9][0-9]*|(?!-)[0-9A-Za-z-]*[A-Za-z-][0-9A-Za-z-]*)(?:\.(?:0|[1-9][0-9]*|(?!-)[0-9A-Za-z-]*[A-Za-z-][0-9A-Za-z-]*))*))?"
    r"(?:\+([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?"
)
_DIGITS: Final = re.compile(r"[0-9A-Fa-f]{1,16}")

CAPABILITY_PAIR: Final = "maop-capabilities"
"""Key of the metadata pair in which a client announces its capabilities. Source: MA-35."""


class Capability(enum.IntFlag):
    """Abilities of a side; the effective set is the intersection. Source: MA-35, MA-36."""

    CONTROL_BIDI = 1
    """Takes signals on bidirectional control streams."""
    CONTROL_UNI = 2
    """Takes signals on unidirectional control streams."""
    TEST = 4
    """Implements the native Test."""
    UNDEFINED_LENGTH = 8
    """At least one handler takes undefined length."""
    IDEMPOTENCY = 16
    """Headers carry the idempotency field."""
    TRACE = 32
    """Headers carry the trace field."""


@attrs.frozen
class Version:
    """A semantic version. Source: MA-31."""

    major: int
    """Peers with different major versions do not understand each other."""
    minor: int
    """The lower minor version of the two decides on features."""
    patch: int
    """No influence on the wire."""
    prerelease: str = ""
    """Identifiers between the hyphen and the plus."""
    build: str = ""
    """Metadata after the plus; never compared."""

    def __str__(self) -> str:
        pre = f"-{self.prerelease}" if self.prerelease else ""
        build = f"+{self.build}" if self.build else ""
        return f"{self.major}.{self.minor}.{self.patch}{pre}{build}"

    def effective(self, other: Version) -> tuple[int, int, int]:
        """Return the lower of two versions, without pre-release or build. Source: MA-34."""
        return min((self.major, self.minor, self.patch), (other.major, other.minor, other.patch))

    @property
    def capabilities(self) -> str:
        """The digits that a server announces in its build metadata; empty if there are none. Source: MA-35."""
        name, _, digits = self.build.partition(".")
        return digits if name == "cap" else ""


def parse_version(text: str) -> Version | None:
    """Read a version; None if it is malformed. Source: MA-31, MA-32.

    Example:
        >>> str(parse_version("1.2.3-rc.1+cap.1f"))
        '1.2.3-rc.1+cap.1f'
        >>> parse_version("1.0"), parse_version("01.0.0"), parse_version("1.0.0--beta")
        (None, None, None)
    """
    # The numbers in a text of 255 bytes are below Python's limit for int().
    match = _SEMVER.fullmatch(text) if len(text) <= 255 else None
    if match is None:
        return None
    return Version(int(match[1]), int(match[2]), int(match[3]), match[4] or "", match[5] or "")


def parse_capabilities(text: str) -> Capability:
    """Read 1 to 16 hex digits; malformed text counts as 0. Source: MA-35, MA-36.

    Example:
        >>> parse_capabilities("0000000000000011") == Capability.CONTROL_BIDI | Capability.IDEMPOTENCY
        True
        >>> int(parse_capabilities("0x11"))
        0
    """
    return Capability(int(text, 16) if _DIGITS.fullmatch(text) else 0)
