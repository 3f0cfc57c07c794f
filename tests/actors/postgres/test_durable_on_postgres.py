"""The behaviours of durable actors, with a log in PostgreSQL: the same tests as on disk, where ``tmp_path`` is the URL of a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("psycopg")

from tests.actors.durable import test_durable, test_durable_replay, test_erasing
from tests.actors.durable.accounts import Deposit
from tests.actors.durable.test_durable import (  # noqa: F401
    test_a_command_with_an_id_is_done_once_and_answered_alike,
    test_a_failing_handler_has_recorded_nothing,
    test_a_repeated_id_waits_for_the_command_under_way,
    test_a_told_command_is_done,
    test_an_entity_is_an_actor_below_its_shard,
    test_an_erased_entity_is_gone_from_the_files,
    test_commands_behind_a_failing_one_are_handled,
    test_events_may_have_fields_of_common_names,
    test_misuse_is_refused_where_it_is_given,
    test_state_survives_its_process,
    test_the_least_recently_used_leave_first,
    test_the_newest_ids_are_remembered,
)
from tests.actors.durable.test_durable_end import (  # noqa: F401
    test_a_told_command_may_ask_an_entity_of_any_shard_at_the_end,
)
from tests.actors.durable.test_durable_handlers import (  # noqa: F401
    test_a_killed_entity_fails_its_command_and_comes_back,
    test_a_message_that_cannot_be_told_after_a_commit_is_lost_alone,
    test_an_entity_in_memory_answers_in_its_askers_task_with_a_context_of_its_own,
    test_an_entity_that_leaves_memory_runs_its_hook,
    test_commands_behind_one_that_stops_the_entity_are_for_its_next_life,
    test_committed_events_stay_though_the_handler_fails,
    test_durable_actors_run_in_strict_systems_which_check_what_is_the_apps,
    test_misuse_in_a_handler_fails_its_command_alone,
)
from tests.actors.durable.test_durable_replay import (  # noqa: F401
    test_a_new_field_without_default_names_the_event,
    test_a_poison_event_is_named_and_a_repaired_class_goes_on,
    test_a_result_of_an_upcaster_that_does_not_fit_fails_its_entity,
    test_a_snapshot_that_does_not_fit_is_ignored,
    test_a_snapshot_whose_values_the_class_refuses_is_ignored,
    test_a_state_without_a_field_costs_its_snapshot,
    test_an_object_that_cannot_be_made_fails_its_commands_alone,
    test_columns_that_changed_their_type_are_refused,
    test_command_ids_are_part_of_a_snapshot,
    test_new_fields_with_defaults_are_filled,
    test_old_versions_are_upcast,
    test_reading_begins_at_the_newest_snapshot,
    test_the_event_that_does_not_fit_is_named_among_many,
    test_what_an_upcaster_leaves_of_a_row_is_ignored_and_nulls_are_defaults,
    test_without_a_snapshot_commands_go_on,
)
from tests.actors.durable.test_erasing import (  # noqa: F401
    silent,
    test_an_interrupted_erasure_is_finished_when_it_is_asked_again,
    test_reminders_of_an_erased_entity_are_gone_from_the_files,
)
from tests.actors.durable.test_reminders import (  # noqa: F401
    World,
    test_a_late_reminder_comes_after_a_restart_and_only_once,
    test_a_reminder_comes_at_its_time,
    test_a_reminder_may_set_the_next_one,
    test_a_reminder_of_a_failing_handler_is_not_set,
    test_a_reminder_replaces_another_with_its_key_and_may_be_forgotten,
    test_reminders_outlive_snapshots_of_their_shard,
)
from tests.actors.postgres.cluster import Cluster

pytestmark = pytest.mark.release


@pytest.fixture
def tmp_path(url: str) -> str:
    return url


@pytest.fixture
def world() -> World:
    """Time also passes by itself: a jump while the server is asked is a time-out, after which the shard waits and asks again."""
    return World(rate=1.0)


def rows(server: Cluster, url: str) -> list[dict[str, Any]]:
    """The rows of the log, shard by shard."""
    [table] = parse_qs(urlsplit(url).query)["table"]
    found = server.execute(f"SELECT to_jsonb(t) FROM {table} t ORDER BY _shard, _offset")
    return [row for (row,) in found]


@pytest.fixture(autouse=True)
def as_on_disk(server: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tests look into the table instead of the files."""

    def rows_of(url: str, *columns: str, shards: int = 2) -> list[tuple[Any, ...]]:
        return [tuple(row[name] for name in columns) for row in rows(server, url) if row["entity"]]

    def kinds(url: str) -> list[tuple[str, int | None]]:
        return [(row["kind"], row["_snapshot"]) for row in rows(server, url) if row["entity"] == "a"]

    def octets(url: str) -> bytes:
        """All that a reader of the table may see, with its bytes as they are."""
        found = b""
        for row in rows(server, url):
            for value in row.values():
                text = str(value)
                found += bytes.fromhex(text[2:]) if text.startswith("\\x") else text.encode()
        return found

    replaced: dict[Any, Callable[..., Any]] = {test_durable: rows_of, test_durable_replay: kinds, test_erasing: octets}
    for module, function in replaced.items():
        monkeypatch.setattr(module, function.__name__, function)


async def test_a_start_opens_the_log_once(tmp_path: Any, server: Cluster) -> None:
    """Also the first one, which makes its tables."""
    [table] = parse_qs(urlsplit(tmp_path).query)["table"]
    for opened in 1, 2:
        async with test_durable.accounts_in(tmp_path) as accounts:
            await accounts["anna"].ask(Deposit(1))
        assert server.execute(f"SELECT count(*) FROM {table}_openings") == [(opened,)]
