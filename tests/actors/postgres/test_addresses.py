"""URLs of databases: what libpq is given, the name of the table, and that no password is shown. Without a database."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

from tests.actors.durable.accounts import EVENTS, Account

from levada.actors.durable import shards
from levada.actors.durable.hosting import SentStore
from levada.actors.durable.opening import OpenShards
from levada.actors.durable.settings import EntityLimits, Terms
from levada.actors.postgres import PostgresStore
from levada.actors.postgres.addresses import PostgresAddress
from levada.framework import ActorSystem, Codec
from levada.framework.errors import ConfigurationError

VARIABLES = ("PGSERVICE", "PGAPPNAME", "PGCONNECT_TIMEOUT", "PGTARGETSESSIONATTRS")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


SECRET = "s3cr%2ft"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://anna:{SECRET}@db.example:5433/bank?table=bank.accounts", "postgresql://anna@db.example:5433/bank?table=bank.accounts"),
        ("postgres://one,two:6432/bank", "postgresql://one,two:,6432/bank?table=account"),
        (f"postgresql:///bank?user=anna&password={SECRET}&host=/run/postgresql", "postgresql://anna@/run/postgresql/bank?table=account"),
        ("postgresql://?service=bank&table=accounts", "postgresql:///?service=bank&table=accounts"),
        (f"postgresql://db/bank?sslpassword={SECRET}&sslmode=verify-full", "postgresql://db/bank?table=account"),
        (f"postgresql://anna:{SECRET}@db/b%0Ab", "postgresql://anna@db/b?b?table=account"),
    ],
)  # fmt: skip
def test_an_address_shows_where_and_never_the_password(url: str, shown: str) -> None:
    address = PostgresAddress.of(url, "Account")
    assert (str(address), address.shown) == (shown, shown)
    for text in (repr(address), str(address)):
        assert "s3cr" not in text
    if "s3cr" in url:
        assert "s3cr/t" in address.parameters.values()


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://anna:{SECRET}%@db/bank",
        f"postgresql://anna:{SECRET}@db:port/bank?no_such={SECRET}",
        f"postgresql://anna:{SECRET}@[db/bank",
        "postgresql://anna:s3cr@t@db/bank",
        "postgresql://anna:12/s3cr@db/bank",
        "postgresql://anna:s3cr/t@db/bank",
        "postgresql://anna:s3cr?t@db/bank",
    ],
)
def test_a_url_that_cannot_be_read_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the URL of the database cannot be read") as caught:
        PostgresAddress.of(url, "Account")
    assert "s3cr" not in str(caught.value)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("sslmod", "sslmode"), ("tabel", "table"), ("connect_timout", "connect_timeout"), ("Host", "host")],
)
def test_a_misspelt_parameter_is_named(wrong: str, meant: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"has the parameter '{wrong}', which there is not: {meant}\\?"
    ) as caught:
        PostgresAddress.of(f"postgresql://anna:{SECRET}@db/bank?user=anna&{wrong}={SECRET}", "Account")
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "table"),
    [("Account", "account"), ("BankAccount", "bank_account"), ("accounts_2", "accounts_2"), ("V2Box", "v2_box")],
)
def test_the_table_is_named_after_the_shards(name: str, table: str) -> None:
    assert PostgresAddress.of("postgresql://db/bank", name).table == table


@pytest.mark.parametrize("table", ["", "a b", "a.b.c", 'a"b', "1a", "x" * 49, "Ä"])
def test_a_name_that_is_no_table_is_refused(table: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is no name for the table of a log: give one in the URL, \?table="):
        PostgresAddress.of("postgresql://db/bank", table or "?")


def test_a_url_a_service_and_the_environment_say_how_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PostgresAddress.of("postgresql://one,two/bank", "a").parameters
    assert (plain["target_session_attrs"], plain["connect_timeout"], plain["tcp_user_timeout"]) == (
        "read-write",
        "5",
        "10000",
    )
    given = PostgresAddress.of("postgresql://one/bank?connect_timeout=60&target_session_attrs=any", "a").parameters
    assert (given["target_session_attrs"], given["connect_timeout"]) == ("any", "60")
    assert PostgresAddress.of("postgresql://?service=bank", "a").parameters == {
        "service": "bank",
        "client_encoding": "UTF8",
    }
    monkeypatch.setenv("PGAPPNAME", "bank")
    assert "application_name" not in PostgresAddress.of("postgresql://one/bank", "a").parameters


def test_a_store_is_a_message_that_shows_no_password() -> None:
    url = f"postgresql://anna:{SECRET}@db/bank"
    store = PostgresStore.at(f"{url}?table=accounts", "Account")
    assert (store.url, store.table) == (url, "accounts")
    assert repr(store) == "PostgresStore(url=postgresql://anna@db/bank, table='accounts')"
    assert Codec().decode(Codec().encode(store), PostgresStore) == store
    with pytest.raises(ConfigurationError, match="is no name for the table"):
        PostgresStore(url, "a b")


async def test_a_keeper_is_for_folders() -> None:
    async with ActorSystem("test") as system:
        with pytest.raises(
            ConfigurationError, match="keeper=True needs a folder as journal=, and got a ref or a store"
        ):
            await shards(system, Account, events=EVENTS, journal="postgresql://db/bank", keeper=True)


@pytest.mark.ci
def test_a_store_travels_to_a_process_that_has_not_imported_it() -> None:
    """As to the driver, which never imports the app."""
    terms = Terms(cls="app:Account", schema=b"", shards=1, limits=EntityLimits())
    sent = OpenShards.of(terms, PostgresStore(f"postgresql://anna:{SECRET}@db/bank", "accounts")).sent()
    assert "s3cr" not in repr(sent)
    program = (
        "import sys; from levada.actors.durable.fleet_shards import OpenShards; from levada.framework import Codec; "
    )
    program += "print(Codec().decode(sys.stdin.buffer.read(), OpenShards).place)"
    done = subprocess.run([sys.executable, "-c", program], input=Codec().encode(sent), capture_output=True, check=True)
    assert done.stdout.decode() == "PostgresStore(url=postgresql://anna@db/bank, table='accounts')\n"


def test_the_driver_opens_no_store_of_a_module_that_it_does_not_know() -> None:
    with pytest.raises(
        ConfigurationError, match=r"the log is in a store of nowhere\.app, which this process has not imported"
    ):
        _ = SentStore("nowhere.app", b"").store
