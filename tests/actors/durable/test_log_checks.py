"""The conformance kit of logs, on levada's own: a journal of this process, and a keeper's."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

import pyarrow as pa

from levada.actors.durable import log_config
from levada.actors.durable.testing import LogCheck, MadeLog, log_checks
from levada.actors.journal import GetExtent, Journal, keeper
from levada.framework import ActorSystem, restart
from levada.framework.embedding import restart_actor
from levada.framework.errors import ActorError

pytestmark = pytest.mark.usefixtures("only_what_callers_see")


@asynccontextmanager
async def journal_here(folder: Path, columns: pa.Schema, partitions: int) -> AsyncIterator[MadeLog]:
    async with ActorSystem("test", ask_timeout=1000.0) as system:
        factory = partial(Journal, folder / "log", columns, config=log_config(partitions))
        journal: Any = system.spawn(factory, supervise=restart("permanent", max=1 << 30))

        async def again() -> None:
            restart_actor(journal)

        yield MadeLog(system=system, ref=journal, restart=again, tailed=True, copied=True, trimmed=True)


@asynccontextmanager
async def kept_journal(folder: Path, columns: pa.Schema, partitions: int) -> AsyncIterator[MadeLog]:
    async with ActorSystem("test", ask_timeout=60.0) as system, keeper(system) as keep:
        journal = await keep.open(folder / "log", columns, config=log_config(partitions))

        async def again() -> None:
            os.kill(keep.nodes[keep.name].pid, signal.SIGKILL)
            while True:
                try:
                    await journal.ask(GetExtent())
                except ActorError:
                    await trio.lowlevel.checkpoint()
                else:
                    break

        yield MadeLog(system=system, ref=journal, restart=again, tailed=True, copied=True, trimmed=True)


LONG = {"each_question_and_each_answer_may_be_lost"}
KEPT = {"kills_leave_every_command_done_once", "large_appends_are_whole_and_are_read_in_pages"}
"""To start a keeper takes a second, so the profile ci has few of them."""


@pytest.mark.parametrize(
    "check",
    [pytest.param(each, marks=pytest.mark.ci if each.name in LONG else ()) for each in log_checks(timeout=1000.0)],
    ids=str,
)
async def test_a_journal_keeps_the_promise(check: LogCheck, tmp_path: Path, autojump_clock: MockClock) -> None:
    await check(partial(journal_here, tmp_path))


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(each, marks=pytest.mark.ci if each.name in KEPT else pytest.mark.release)
        for each in log_checks(timeout=300.0)
    ],
    ids=str,
)
async def test_a_keeper_keeps_the_promise(check: LogCheck, tmp_path: Path) -> None:
    await check(partial(kept_journal, tmp_path))
