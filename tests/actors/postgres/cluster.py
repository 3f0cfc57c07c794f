"""A cluster of PostgreSQL for the tests, from the packages of the system: in a temporary folder, and run by an unprivileged user."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

__all__ = ["Cluster", "cluster", "programs"]

SETTINGS = {
    "fsync": "off",  # the tests kill processes, and not the machine
    "listen_addresses": "",
    "max_connections": "100",
    "shared_buffers": "16MB",
    "max_wal_size": "64MB",
    "wal_level": "replica",
    "log_min_messages": "warning",
}


def programs() -> Path | None:
    """Return the folder of the programs of the newest server, if there is one: Debian has none of them on the path."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    folders = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in folders), key=lambda path: int(path.parent.name), default=None)


class Cluster:
    """One server with its data."""

    def __init__(self, folder: Path, bin: Path, user: str | None, **settings: str) -> None:
        self.folder = folder
        self._bin = bin
        self.user = user
        """Who runs it; None: who runs the tests."""
        self._settings = {**SETTINGS, **settings, "unix_socket_directories": str(folder)}
        self._server: subprocess.Popen[bytes] | None = None
        self._schemas = 0

    def run(self, program: str, *arguments: str) -> None:
        """Run one of the programs of PostgreSQL."""
        done = subprocess.run(
            [self._bin / program, *arguments], user=self.user, cwd=self.folder, capture_output=True, text=True, check=False,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        )  # fmt: skip
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def set(self, **settings: str) -> None:
        """Change settings for the next start."""
        self._settings |= settings

    def own(self, path: Path) -> None:
        """Give a file, or a folder with its files, to the user who runs it."""
        for each in [path, *path.rglob("*")]:
            if self.user is not None:
                shutil.chown(each, self.user)

    def give(self, source: Path, target: Path) -> None:
        """Copy a file that only its user may read."""
        shutil.copyfile(source, target)
        target.chmod(0o600)
        self.own(target)

    def make(self) -> None:
        """Make the data."""
        self.run(
            "initdb", "-D", str(self.folder / "data"), "-A", "trust", "-U", "levada", "-E", "UTF8", "--locale=C", "-N"
        )

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        options = [each for name, value in self._settings.items() for each in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self._bin / "postgres", "-D", str(self.folder / "data"), *options],
                user=self.user, cwd=self.folder, stdout=log, stderr=log, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
            )  # fmt: skip
        until = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url()).close()
            except psycopg.OperationalError as error:
                if self._server.poll() is not None or time.monotonic() > until:
                    raise AssertionError((self.folder / "log").read_text()[-2000:]) from error
                time.sleep(0.02)
            else:
                return

    def standby(self, name: str) -> Cluster:
        """Make a server that follows this one, as it is now."""
        folder = self.folder / name
        folder.mkdir()
        if self.user is not None:
            shutil.chown(folder, self.user)
        made = Cluster(folder, self._bin, self.user, hot_standby="on")
        made.run(
            "pg_basebackup", "-D", str(folder / "data"), "-R", "-X", "stream", "-c", "fast", "-N", "-d", self.url()
        )
        return made

    def catch_up(self, primary: Cluster) -> None:
        """Wait until a standby has all that its primary has."""
        [(lsn,)] = primary.execute("SELECT pg_current_wal_lsn()")
        until = time.monotonic() + 60
        while not self.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", lsn)[0][0]:
            assert time.monotonic() < until, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.01)

    def promote(self) -> None:
        """Have a standby take writes."""
        self.execute("SELECT pg_promote(true, 30)")

    def stop(self, how: int = signal.SIGINT) -> None:
        """End the server: SIGINT for a fast shutdown, SIGQUIT for an immediate one, SIGKILL."""
        if self._server is not None:
            self._server.send_signal(how)
            self._server.wait()
            self._server = None
            if how == signal.SIGKILL:  # its children notice, and end
                pid = self.folder / "data/postmaster.pid"
                pid.unlink(missing_ok=True)

    def url(self, table: str | None = None, **parameters: str) -> str:
        """Return the URL of the database."""
        parameters = {"host": str(self.folder), "port": self._settings.get("port", "5432"), **parameters}
        if table is not None:
            parameters["table"] = table
        query = "&".join(f"{key}={quote(value, safe='')}" for key, value in parameters.items())
        return f"postgresql://levada@/postgres?{query}"

    def schema(self) -> str:
        """Make a schema, and return its name."""
        self._schemas += 1
        name = f"test_{self._schemas}"
        self.execute(f"CREATE SCHEMA {name}")
        return name

    def connections(self, application: str) -> int:
        """Count the connections of an application, once those that have been closed are gone."""
        until = time.monotonic() + 10
        while True:
            [(count,)] = self.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", application)
            if not count or time.monotonic() > until:
                found: int = count
                return found
            time.sleep(0.01)

    def execute(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows."""
        with psycopg.connect(self.url(), autocommit=True) as session:
            found = session.execute(text.encode(), values or None)
            return found.fetchall() if found.description is not None else []


def free_port() -> int:
    """Return a port that was free a moment ago: the server of PostgreSQL cannot choose one."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def account() -> str | None:
    """Return who runs the server: it refuses to be run by root."""
    if os.geteuid() != 0:
        return None
    import pwd

    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@contextmanager
def cluster(bin: Path, **settings: str) -> Iterator[Cluster]:
    """Make a cluster, start it, and remove it."""
    user = account()
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # the path of a socket has 107 bytes at most
    try:
        if user is not None:
            shutil.chown(folder, user)
        made = Cluster(folder, bin, user, **settings)
        made.make()
        made.start()
        try:
            yield made
        finally:
            made.stop(signal.SIGQUIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
