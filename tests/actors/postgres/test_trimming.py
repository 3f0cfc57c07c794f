"""A log in PostgreSQL is trimmed: by its shards, by another program, and in several transactions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

from tests.actors.durable.accounts import EVENTS, Account, Balance, Deposit
from tests.actors.postgres.cluster import Cluster
from tests.actors.postgres.test_questions import table_of

from levada.actors.durable import shards, trim_log
from levada.actors.postgres import log as postgres_log
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError


@pytest.mark.ci
async def test_rows_behind_snapshots_are_deleted_in_batches(
    url: str, server: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_log, "MOST_TRIMMED", 3)
    async with ActorSystem("test", ask_timeout=60.0) as system:
        with pytest.raises(ConfigurationError, match="no log of this name"):
            await trim_log(system, url, keep=0)  # there is none, and none is made
        options: dict[str, Any] = {"events": EVENTS, "journal": url, "shards": 2, "snapshot_every": 5, "remember": 3}
        accounts = await shards(system, Account, **options)
        for name in ("anna", "bert"):
            for number in range(12):
                await accounts[name].ask(Deposit(1), command=f"{name} {number}")
        assert await trim_log(system, url, keep=3600.0, remember=3) == 0
        assert await trim_log(system, url, keep=0, remember=3) == 20
        assert await trim_log(system, url, keep=0, remember=3) == 0
        assert await accounts["anna"].ask(Deposit(1), command="anna 9") == 10
    table = table_of(url)
    left = server.execute(f"SELECT sequence FROM {table} WHERE entity = 'anna' AND kind NOT LIKE '$%' ORDER BY _offset")
    assert [sequence for (sequence,) in left] == [10, 11, 12]
    async with ActorSystem("test", ask_timeout=60.0) as system:
        accounts = await shards(system, Account, **options)
        assert await accounts["bert"].ask(Deposit(1), command="bert 11") == 12
        assert [await accounts[name].ask(Balance()) for name in ("anna", "bert")] == [12, 12]
