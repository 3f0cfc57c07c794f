"""What `levada call` has in common for all protocols: octets that arguments stand for, octets that are printed, and failure."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

from levada.framework.errors import ConfigurationError, LevadaError
from levada.transports.text import printable

__all__ = ["CallFailed", "named", "octets_of", "print_octets", "shown"]


class CallFailed(LevadaError):
    """The responder answered with an error, or not in time."""


def octets_of(text: str) -> bytes:
    """Give what an argument stands for: itself, what a file holds, or standard input.

    Raises:
        ConfigurationError: a file that cannot be read.
    """
    if text == "-":
        return sys.stdin.buffer.read()
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read {text[1:]}: {error.strerror}") from error
    return text.encode("utf-8", "surrogateescape")


def print_octets(octets: bytes, *, as_json: bool = False, **facts: str | None) -> None:
    """Print an answer: text as a line, other octets as they are; as JSON with the facts that are known."""
    if as_json:
        known = {name: fact for name, fact in facts.items() if fact is not None}
        print(json.dumps(named("data", octets) | known), flush=True)
        return
    try:
        print(shown(octets.decode()), flush=True)
    except UnicodeDecodeError:
        if sys.stdout.isatty():
            print(f"({len(octets):,} octets that are no text: redirect the output, or use --json)", flush=True)
        else:
            sys.stdout.buffer.write(octets)
            sys.stdout.buffer.flush()


def shown(text: str) -> str:
    """Give a peer's text as it is written to standard output: a terminal gets escapes for what would drive it, a file the text itself."""
    if not sys.stdout.isatty():
        return text
    return "\n".join(printable(line, 6 * len(line)) for line in text.split("\n"))


def named(name: str, octets: bytes) -> dict[str, str]:
    """Give octets as text under their name, or in base64 under one that says so."""
    try:
        return {name: octets.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(octets).decode()}
