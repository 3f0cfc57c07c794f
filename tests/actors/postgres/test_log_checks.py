"""The conformance kit of logs, on PostgreSQL: by two pools of connections, and with a server that ends at once and starts again."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

import pyarrow as pa
from tests.actors.postgres.cluster import Cluster

from levada.actors.durable.testing import LogCheck, MadeLog, log_checks
from levada.actors.journal import GetExtent, GetSchema
from levada.actors.postgres import PostgresStore
from levada.framework import ActorSystem
from levada.framework.errors import LevadaError

pytestmark = [pytest.mark.release, pytest.mark.usefixtures("only_what_callers_see")]


@pytest.fixture
def only_what_callers_see(caplog: pytest.LogCaptureFixture) -> None:
    """Leave the log out of tests that make shards fail."""
    caplog.set_level("CRITICAL", "levada")


@asynccontextmanager
async def made(server: Cluster, url: str, columns: pa.Schema, partitions: int) -> AsyncIterator[MadeLog]:
    store = PostgresStore.at(url, "log")
    async with (
        ActorSystem("test", ask_timeout=60.0) as system,
        store.open(system, partitions) as one,
        store.open(system, partitions) as two,
    ):
        for each in (one, two):
            await each.ask(GetSchema(columns.serialize().to_pybytes()))

        async def again() -> None:
            await trio.to_thread.run_sync(server.stop, signal.SIGQUIT)
            await trio.to_thread.run_sync(server.start)
            while True:
                try:
                    await one.ask(GetExtent())
                except (LevadaError, OSError):
                    await trio.lowlevel.checkpoint()
                else:
                    break

        yield MadeLog(system=system, ref=one, other=two, restart=again, tailed=True, copied=True, trimmed=True)


@pytest.mark.parametrize("check", log_checks(timeout=300.0), ids=str)
async def test_postgresql_keeps_the_promise(check: LogCheck, server: Cluster, url: str) -> None:
    await check(partial(made, server, url))
