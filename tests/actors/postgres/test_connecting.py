"""Ways to a database: TLS that is verified, passwords from everywhere, services, poolers, and nodes that each have their own."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.nodes.conftest import nodes_here
from tests.actors.postgres.cluster import Cluster, cluster, free_port, programs
from tests.actors.postgres.test_questions import store

from levada.actors.durable import shards
from levada.actors.interop.certificates import make_certificates
from levada.actors.journal import JournalError
from levada.actors.nodes import local_nodes
from levada.framework import ActorSystem

pytestmark = pytest.mark.release

SECRET = "s3cret-of-anna"
APP = "tests.actors.durable.test_placement:app"


async def balance(url: str, **settings: Any) -> int:
    async with ActorSystem("test", ask_timeout=50.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=url, shards=1, **settings)
        return await accounts["anna"].ask(Deposit(1))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, int, Path]]:
    """A server by TCP, with TLS and a password; its port, and the file of its authority."""
    found = programs()
    if found is None:
        pytest.skip("initdb is needed: install the package postgresql")
    certificates = make_certificates(tmp_path_factory.mktemp("tls"))
    with cluster(found) as made:
        for name, source in (("server.crt", certificates.certificate), ("server.key", certificates.key)):
            made.give(source, made.folder / "data" / name)
        made.execute(f"CREATE ROLE anna LOGIN PASSWORD '{SECRET}'")
        made.execute("CREATE SCHEMA bank AUTHORIZATION anna")
        made.stop()
        port = free_port()
        (made.folder / "data/pg_hba.conf").write_text("local all all trust\nhostssl all all all scram-sha-256\n")
        made.set(listen_addresses="127.0.0.1", port=str(port), ssl="on")
        made.start()
        yield made, port, certificates.ca


def by_tls(port: int, certificate: Path, login: str = "anna", host: str = "localhost") -> str:
    return (
        f"postgresql://{login}@{host}:{port}/postgres?table=bank.accounts&sslmode=verify-full&sslrootcert={certificate}"
    )


async def test_tls_is_verified_and_passwords_come_from_everywhere(
    guarded: tuple[Cluster, int, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, port, certificate = guarded
    caplog.set_level(logging.DEBUG)
    plain = by_tls(port, certificate)
    assert await balance(by_tls(port, certificate, f"anna:{SECRET}")) == 1
    with monkeypatch.context() as patch:
        patch.setenv("PGPASSWORD", SECRET)
        assert await balance(plain) == 2
    passwords = tmp_path / "passwords"
    passwords.write_text(f"localhost:{port}:postgres:anna:{SECRET}\n")
    passwords.chmod(0o600)
    assert await balance(f"{plain}&passfile={passwords}") == 3
    services = tmp_path / "services"
    services.write_text(
        f"[bank]\nhost=localhost\nport={port}\ndbname=postgres\nuser=anna\npassword={SECRET}\nsslmode=verify-full\nsslrootcert={certificate}\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    assert await balance("postgresql://?service=bank&table=bank.accounts") == 4
    errors = []
    for wrong, says in (
        (plain, "no password supplied"),
        (by_tls(port, certificate, f"anna:{SECRET}x"), 'password authentication failed for user "anna"'),
        (by_tls(port, certificate, f"anna:{SECRET}", "db.example") + "&hostaddr=127.0.0.1", "does not match host name"),
        (by_tls(port, tmp_path / "none.pem", f"anna:{SECRET}"), "none.pem"),
        (by_tls(port, certificate, f"anna:{SECRET}").replace("verify-full", "disable"), "no encryption"),
    ):
        with pytest.raises(JournalError, match=says) as caught:
            await balance(wrong)
        errors.append(f"{caught.value!r} {caught.value}")
    assert SECRET not in caplog.text + "".join(errors)


@pytest.fixture(params=["session", "transaction"])
def pooler(request: pytest.FixtureRequest, server: Cluster) -> Iterator[tuple[str, str]]:
    """The folder of the socket of a pgbouncer, and its mode."""
    program = shutil.which("pgbouncer")
    if program is None:
        pytest.skip("pgbouncer is needed: install the package of this name")
    folder = server.folder / f"pooler-{request.param}"
    folder.mkdir()
    (folder / "users").write_text('"levada" ""\n')
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\npostgres = host={server.folder}\n[pgbouncer]\nlisten_addr =\nunix_socket_dir = {folder}\nlisten_port = 6432\n"
        f"auth_type = trust\nauth_file = {folder}/users\npool_mode = {request.param}\nlogfile = {folder}/log\npidfile = {folder}/pid\n"
    )
    server.own(folder)
    process = subprocess.Popen(
        [program, settings], user=server.user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not (folder / ".s.PGSQL.6432").exists():
            assert process.poll() is None, (folder / "log").read_text()
            os.sched_yield()
        yield str(folder), request.param
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def prepares(program: str) -> bool:
    """Whether this pgbouncer keeps prepared statements in transactions."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    return tuple(map(int, version.split(".")[:2])) >= (1, 21)


async def test_poolers_are_used_or_refused_by_name(
    url: str, pooler: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")
    folder, mode = pooler
    own = f"postgresql://levada@/postgres?host={folder}&port=6432&table={store(url).table}"
    errors: list[BaseException] = []
    async with ActorSystem("test", ask_timeout=50.0) as system:
        accounts = await shards(system, Account, events=EVENTS, journal=own, shards=2)

        async def deposit(name: str) -> None:
            try:
                assert [await accounts[name].ask(Deposit(1)) for _ in range(10)] == list(range(1, 11))
            except JournalError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(deposit, f"a{number}")
    if mode == "session" or prepares("pgbouncer"):
        assert errors == []
    else:
        assert errors
        for error in errors:
            assert "let pgbouncer pool sessions, or give it max_prepared_statements" in str(error)


async def test_every_node_connects_for_itself(url: str, server: Cluster) -> None:
    own = f"{url}&application_name=fleet"
    async with (
        ActorSystem("driver", shutdown_timeout=100.0, ask_timeout=50.0) as system,
        nodes_here(system, 2, APP) as (nodes, tasks),
    ):
        accounts = await shards(system, Account, events=EVENTS, journal=own, shards=8, nodes=nodes)
        names = [f"e{number}" for number in range(16)]
        assert [await accounts[name].ask(Deposit(1), command="c") for name in names] == [1] * 16
        [(count,)] = server.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fleet' AND query LIKE 'WITH fence%'"
        )
        assert count == 2
        tasks[0].kill()
        assert [await accounts[name].ask(Deposit(1), command="c") for name in names] == [1] * 16
        assert [await accounts[name].ask(Balance()) for name in names] == [1] * 16
        accounts.ref.stop()
        await accounts.ref.terminated()


async def test_processes_of_nodes_connect_by_themselves_and_their_driver_imports_no_app(
    url: str, server: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEVADA_TEST_URL", f"{url}&application_name=processes")
    async with (
        ActorSystem("driver", shutdown_timeout=30.0, ask_timeout=50.0) as system,
        local_nodes(system, 2, "tests.actors.postgres.node_app:app") as nodes,
    ):
        root = await nodes.lookup("levada.durable/Account", timeout=50.0)
        assert root.is_alive
        accounts = await shards(
            system, Account, events=EVENTS, journal=os.environ["LEVADA_TEST_URL"], shards=4, nodes=nodes
        )
        names = [f"e{number}" for number in range(16)]
        assert [await accounts[name].ask(Deposit(1), command="c") for name in names] == [1] * 16
        [(count,)] = server.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'processes' AND query LIKE 'WITH fence%'"
        )
        assert count == 2
