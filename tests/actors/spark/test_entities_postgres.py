"""Durable actors and Spark, with a log in PostgreSQL: the same tests as on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from tests.actors.durable.accounts import Move
from tests.actors.postgres.conftest import server, url  # noqa: F401
from tests.actors.spark import test_entities as on_disk
from tests.actors.spark.test_entities import (  # noqa: F401
    test_a_batch_of_commands_is_done_once,
    test_a_command_that_fails_is_named_and_its_batch_fails,
    test_a_restarted_bridge_is_waited_for_until_it_has_the_log,
    test_only_entities_write_their_log,
    test_the_events_of_a_durable_class_are_read_without_the_bookkeeping,
    test_what_is_no_log_is_refused,
)

from levada.actors.journal import JournalDamaged

from .conftest import Actors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.actors.postgres.cluster import Cluster

pytestmark = [pytest.mark.release, pytest.mark.loopback]


@attrs.frozen
class Place:
    """A folder whose file ``log`` is in a database."""

    folder: Path
    url: str

    def __truediv__(self, name: str) -> Path | str:
        return self.url if name == "log" else self.folder / name


@pytest.fixture
def tmp_path(tmp_path: Path, url: str) -> Place:  # noqa: F811
    return Place(tmp_path, url)


def test_a_job_sends_commands_and_reads_what_they_did(spark: SparkSession, actors: Actors, tmp_path: Any) -> None:
    on_disk.test_a_job_sends_commands_and_reads_what_they_did(spark, actors, tmp_path, False)


def test_a_stream_of_events_goes_on_behind_erased_ones(spark: SparkSession, actors: Actors, tmp_path: Any) -> None:
    on_disk.test_a_stream_of_events_goes_on_behind_erased_ones(spark, actors, tmp_path, False)


def test_rows_that_were_deleted_by_hand_are_named(actors: Actors, tmp_path: Any, server: Cluster) -> None:  # noqa: F811
    accounts = on_disk.open_accounts(actors, tmp_path / "log")
    assert on_disk.ask(actors, accounts, "anna", Move([1, 2, 3, 4])) == 10
    assert len(on_disk.events(actors)) == 4
    table = tmp_path.url.rpartition("table=")[2]
    server.execute(f"DELETE FROM {table} WHERE sequence IN (2, 3) AND amount IS NOT NULL")
    with pytest.raises(JournalDamaged, match=r"2 of the rows \d+ to \d+ of shard \d+ are gone from the table"):
        on_disk.events(actors)
