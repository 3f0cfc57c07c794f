"""The settings of a dashboard."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError
from levada.framework.text import texts
from levada.transports.carriers.tls import TlsConfig

__all__ = ["DashboardConfig"]


@attrs.frozen(kw_only=True)
class DashboardConfig:
    """Where a dashboard listens, and what browsers may do. Immutable; derive with `attrs.evolve`.

    Raises:
        ConfigurationError: `host` is not loopback, and there is neither `tls` nor `plaintext`; or it is a wildcard, and there are no `names`.
        TypeError, ValueError: a value is of the wrong type, or the port is not one.
    """

    host: str = attrs.field(default="127.0.0.1", validator=v.instance_of(str))
    """Address to listen at."""
    port: int = attrs.field(default=0, validator=[v.instance_of(int), v.in_(range(1 << 16))])
    """Port to listen at; 0 takes a free one."""
    names: tuple[str, ...] = attrs.field(default=(), converter=texts)
    """More names or addresses of this machine, as in the browser's address bar, without a port. Requests for other names are refused, so a
    page of another site cannot reach the dashboard under a name of its own (DNS rebinding)."""
    tls: TlsConfig | None = attrs.field(default=None, validator=v.optional(v.instance_of(TlsConfig)))
    """Certificate and key; ``None``: plain HTTP."""
    plaintext: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Allow plain HTTP at an address other than loopback, although anyone on the network path can read the cookie and use it."""
    actions: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Allow the browser to stop, kill and restart actors."""
    tracebacks: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Show the texts and tracebacks of errors; they may quote messages."""
    key_file: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    """File with the key that signs cookies, so that browsers stay logged in when the program restarts. A missing file is made, readable by
    this user only. ``None``: a new key for each start."""

    def __attrs_post_init__(self) -> None:
        if self.is_loopback:
            return
        if self.tls is None and not self.plaintext:
            raise ConfigurationError(
                f"a dashboard at {self.host} needs TLS, or plaintext=True in a network that you trust; "
                "or listen at 127.0.0.1 and reach it through an SSH tunnel"
            )
        if not self.names and self.host in ("0.0.0.0", "::", ""):
            raise ConfigurationError("a dashboard at all addresses needs the names that browsers will use: set names")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def hosts(self, port: int) -> frozenset[str]:
        """Return the ``Host`` headers to accept."""
        names = {self.host, *self.names}
        if self.is_loopback:
            names |= {"127.0.0.1", "localhost", "::1"}
        bracketed = {f"[{name}]" if ":" in name else name.lower() for name in names}
        default = 443 if self.tls is not None else 80
        return frozenset({f"{name}:{port}" for name in bracketed} | (bracketed if port == default else set()))
