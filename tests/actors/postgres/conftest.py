"""Fixtures of the tests with a database: one cluster for all of them, and a schema for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.actors.postgres.cluster import Cluster


@pytest.fixture(scope="session")
def server() -> Iterator[Cluster]:
    """The server of all tests."""
    pytest.importorskip("psycopg")
    from tests.actors.postgres.cluster import cluster, programs

    found = programs()
    if found is None:
        pytest.skip("initdb is needed: install the package postgresql")
    with cluster(found) as made:
        yield made


@pytest.fixture
def url(server: Cluster) -> str:
    """The URL of a log that is not there yet."""
    return server.url(f"{server.schema()}.log")
