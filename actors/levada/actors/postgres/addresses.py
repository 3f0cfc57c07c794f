"""Where a log is: the URL of a database, and the name of the log's table in it. Passwords are never shown."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

import attrs

from levada.framework.errors import ConfigurationError

__all__ = ["PostgresAddress"]

LONGEST: Final = 48
"""The most bytes of the name of a table: PostgreSQL has 63, and some tables and the index have a longer name."""
CONNECT_TIMEOUT: Final = 5
"""Seconds for one attempt to connect to one host, unless the URL has ``connect_timeout``: a thread that connects cannot be interrupted."""
_NAME = re.compile(rf"[a-z_][a-z0-9_]{{0,{LONGEST - 1}}}")
_PORTS = re.compile(r"[0-9,]*")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SHOWN = ("service", "user", "host", "hostaddr", "port", "dbname")
_DEFAULTS: Final = {
    "application_name": ("PGAPPNAME", "levada"),
    "connect_timeout": ("PGCONNECT_TIMEOUT", str(CONNECT_TIMEOUT)),
    "target_session_attrs": (
        "PGTARGETSESSIONATTRS",
        "read-write",
    ),  # of several hosts, after a failover too, the primary
    # A host that has vanished is noticed in about ten seconds.
    "keepalives_idle": ("", "5"),
    "keepalives_interval": ("", "2"),
    "keepalives_count": ("", "3"),
    "tcp_user_timeout": ("", "10000"),
}
"""Parameters of libpq that a URL, a service file, or these variables may set otherwise."""


@attrs.frozen
class PostgresAddress:
    """A database, and the table of a log in it. Its text has no password."""

    url: str = attrs.field(repr=False)
    """As it was given but for the table, with the password that it may have."""
    table: str
    """The name of the table, perhaps after the name of its schema and a dot."""
    shown: str
    """Where it is, for errors and logs."""
    parameters: dict[str, str] = attrs.field(repr=False, eq=False)
    """What libpq is given."""

    def __str__(self) -> str:
        return self.shown

    @classmethod
    def of(cls, url: str, name: str) -> PostgresAddress:
        """Read a URL.

        Args:
            url: as libpq takes it, ``postgresql://user@host:port/database?sslmode=verify-full``. Its parameter ``table`` is the name of the log.
            name: gives the name of the log, if the URL does not: ``BankAccount`` is in the table ``bank_account``.

        Raises:
            ConfigurationError: it cannot be read, or it is no name of a table. The text does not show the URL, which may have a password.
        """
        from psycopg import ProgrammingError, conninfo  # only those who use a database need it

        base, _, query = url.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        names = [value for key, value in pairs if key == "table"]
        rest = urlencode([pair for pair in pairs if pair[0] != "table"], quote_via=quote)
        login, _, path = base.partition("://")[2].partition("/")
        found: dict[str, Any] = {}
        try:
            found = conninfo.conninfo_to_dict(f"{base}?{rest}" if rest else base)
            is_read = login.count("@") < 2 and "@" not in path and _PORTS.fullmatch(str(found.get("port") or ""))
        except ProgrammingError:
            is_read = None
        if is_read is None:
            _refuse_misspelt([key for key, _ in pairs])
        if not is_read:  # a password with @ or / in it would be shown as a part of something else
            raise ConfigurationError(
                "the URL of the database cannot be read (it is not shown, because it may have a password): wanted "
                "postgresql://user@host:port/database?parameter=value, with special characters percent-encoded"
            )
        table = names[-1] if names else _WORD.sub("_", name).lower()
        if not 1 <= len(parts := table.split(".")) <= 2 or not all(map(_NAME.fullmatch, parts)):
            raise ConfigurationError(
                f"{table!r:.80} is no name for the table of a log: give one in the URL, ?table=accounts, or ?table=schema.accounts; lower-case "
                f"letters, digits and _, at most {LONGEST}"
            )
        given = {key: str(value) for key, value in found.items() if value is not None}
        defaults = {}
        if "service" not in given and "PGSERVICE" not in os.environ:
            defaults = {key: value for key, (name, value) in _DEFAULTS.items() if name not in os.environ}
        return cls(
            f"{base}?{rest}" if rest else base,
            table,
            _shown(given, table),
            {**defaults, **given, "client_encoding": "UTF8"},
        )


def _refuse_misspelt(names: list[str]) -> None:
    """Raise `ConfigurationError` for a parameter that is nearly one of libpq. Others are not shown: they may be a part of a password."""
    from psycopg import pq

    known = {"ssl", "table", *(option.keyword.decode() for option in pq.Conninfo.get_defaults())}
    for name in names:
        [*meant] = get_close_matches(name, known, 1, 0.7)
        if name not in known and meant:
            raise ConfigurationError(
                f"the URL of the database has the parameter {name!r}, which there is not: {meant[0]}?"
            )


def _shown(given: dict[str, str], table: str) -> str:
    known = {key: unquote(given[key]) for key in _SHOWN if key in given}
    user = f"{known['user']}@" if "user" in known else ""
    where = known.get("host", known.get("hostaddr", ""))
    port = f":{known['port']}" if "port" in known else ""
    service = f"service={known['service']}&" if "service" in known else ""
    shown = f"postgresql://{user}{where}{port}/{known.get('dbname', '')}?{service}table={table}"
    return "".join(each if each.isprintable() else "?" for each in shown)
