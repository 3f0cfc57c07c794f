"""Which reader a writer connects to, and how long it waits before that."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import attrs
from attrs import validators as v

from levada.actors.stream_carriers import AsWritten
from levada.framework.errors import ConfigurationError
from levada.framework.supervision import doubled
from levada.transports.carriers import ByteStream, MemoryConfig, TcpConfig, TlsConfig, dial
from levada.transports.lumberjack import WriterConfig

__all__ = ["HostConfig", "Rota", "Target", "targets"]

_SCHEMES = {"lumberjack": "tcp", "lumberjack+tcp": "tcp", "lumberjack+tls": "tls", "lumberjack+memory": "memory"}
_PORT = 5044  # LJ-1

_maybe_seconds: Any = v.optional(v.and_(v.instance_of((int, float)), v.gt(0)))


@attrs.frozen(kw_only=True)
class HostConfig:
    """How a writer reaches its readers. Immutable; derive with `attrs.evolve`."""

    several: Literal["failover", "balance"] = attrs.field(default="failover", validator=v.in_(("failover", "balance")))
    """With more than one URL: ``"failover"`` has one connection, to the next host after each fault; ``"balance"`` has one to each host and
    sends each window where there is room (LJ-58)."""
    ttl: float | None = attrs.field(default=None, validator=_maybe_seconds)
    """Seconds, ±20 % at random, after which a connection is replaced once everything on it is acked, so that a load balancer can choose
    another host; ``None``: never."""
    tcp: TcpConfig | None = attrs.field(default=None, validator=v.optional(v.instance_of(TcpConfig)))
    """For ``lumberjack://``."""
    tls: TlsConfig | None = attrs.field(default=None, validator=v.optional(v.instance_of(TlsConfig)))
    """For ``lumberjack+tls://``: trusted authorities, and the certificate and key of this side (LJ-60, LJ-61)."""
    memory: MemoryConfig | None = attrs.field(default=None, validator=v.optional(v.instance_of(MemoryConfig)))
    """For ``lumberjack+memory://``."""


@attrs.frozen
class Target:
    """One reader."""

    url: str
    """As the user gave it."""
    carrier_url: str
    config: TcpConfig | TlsConfig | MemoryConfig | None

    def dial(self) -> AbstractAsyncContextManager[ByteStream]:
        """Connect. Each call resolves the name again (LJ-58)."""
        return AsWritten(self.url, self.carrier_url, partial(dial, self.carrier_url, cast("Any", self.config)))


def targets(urls: str | Sequence[str], hosts: HostConfig) -> list[Target]:
    """Make targets of URLs like ``lumberjack+tls://logs.example.org:5044``.

    Raises:
        ConfigurationError: there is no URL, or one has another form.
    """
    found: list[Target] = []
    for url in [urls] if isinstance(urls, str) else urls:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigurationError(f"not a URL: {url!r}: {error}") from error
        carrier = _SCHEMES.get(parts.scheme)
        if carrier is None or not parts.netloc or parts.path not in ("", "/"):
            raise ConfigurationError(f"expected lumberjack://host:port or lumberjack+tls://host:port, got {url!r}")
        place = parts.netloc if port is not None or carrier == "memory" else f"{parts.netloc.rstrip(':')}:{_PORT}"
        found.append(Target(url, f"{carrier}://{place}", getattr(hosts, carrier)))
    if not found:
        raise ConfigurationError("a writer needs the URL of at least one reader")
    return found


class Rota:
    """The order of hosts and the pauses between attempts, for one connection at a time.

    After a fault the next host is tried at once, until each has been tried.  Then there is a pause: a random part (full jitter) of a
    time that doubles with each round.  Only an ack makes it short again (LJ-54): a connect does not, because a reader may accept
    connections only to close them.

    Args:
        hosts: the hosts of one writer.
        config: the bounds of the pause.
        lot: chooses the first host, and the length of each pause.
    """

    def __init__(self, hosts: Sequence[Target], config: WriterConfig, lot: random.Random) -> None:
        self._hosts = hosts
        self._config = config
        self._lot = lot
        self._at = lot.randrange(len(hosts))
        self._faults = 0

    @property
    def current(self) -> Target:
        """The host to connect to next."""
        return self._hosts[self._at]

    def acked(self) -> None:
        """Record an ack above 0."""
        self._faults = 0

    def fault(self) -> float:
        """Go to the next host after a failed attempt or a lost connection; return the seconds to wait before the next attempt."""
        self._at = (self._at + 1) % len(self._hosts)
        self._faults += 1
        rounds, rest = divmod(self._faults, len(self._hosts))
        if rest:
            return 0.0
        return self._lot.uniform(0.0, doubled(self._config.initial_backoff, rounds - 1, self._config.max_backoff))
