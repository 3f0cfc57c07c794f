"""A reader's core with a clock and a sink that commits at once or when told."""

from __future__ import annotations

import gc
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from levada.transports.lumberjack import Finished, PeerClosed, ReaderConfig, ReaderCore, ReaderEvent, Refused, UnitReady

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text(encoding="utf-8"))


class Desk:
    """Drives a `ReaderCore` as a driver would, in time that stands until `wait` is called."""

    def __init__(self, *, commits: bool = True, keeps: bool = True, **settings: Any) -> None:
        self.now = 0.0
        self.core = ReaderCore(ReaderConfig(**settings), now=self.now)
        self.commits = commits
        self.keeps = keeps
        self.units: list[UnitReady] = []
        self.others: list[ReaderEvent] = []
        self.sent = b""
        self.core.reading(self.now)

    @property
    def delivered(self) -> list[dict[str, Any]]:
        return [event for unit in self.units for event in unit.events]

    @property
    def acks(self) -> list[int]:
        """Numbers in all A frames so far."""
        assert len(self.sent) % 6 == 0
        return [int.from_bytes(self.sent[at + 2 : at + 6], "big") for at in range(0, len(self.sent), 6)]

    @property
    def refused(self) -> str | None:
        rules = [event.error.rule for event in self.others if isinstance(event, Refused)]
        assert len(rules) <= 1
        return rules[0] if rules else None

    @property
    def finished(self) -> str | None:
        reasons = [event.reason for event in self.others if isinstance(event, Finished)]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None

    @property
    def peer_closed(self) -> bool | None:
        clean = [event.clean for event in self.others if isinstance(event, PeerClosed)]
        assert len(clean) <= 1
        return clean[0] if clean else None

    def take(self, events: list[ReaderEvent]) -> None:
        todo = deque(events)
        while todo:
            event = todo.popleft()
            if isinstance(event, UnitReady):
                if self.keeps:
                    self.units.append(event)
                if self.commits:
                    self.core.commit(event.number, self.now)
                    todo += self.core.take_events()
            else:
                self.others.append(event)
        self.sent += b"".join(self.core.data_to_send(self.now))

    def work(self) -> None:
        while self.core.has_work:
            self.take(self.core.work(self.now))
        if self.core.wants_data:
            self.core.reading(self.now)
        else:
            self.core.stop_reading(self.now)

    def feed(self, data: bytes) -> None:
        self.take(self.core.receive_data(data, self.now))
        self.work()

    def end(self) -> None:
        self.feed(b"")

    def reset(self) -> None:
        self.take(self.core.connection_lost(0, "", self.now))
        self.work()

    def commit(self, number: int) -> None:
        self.core.commit(number, self.now)
        self.take(self.core.take_events())
        self.work()

    def drain(self) -> None:
        self.take(self.core.drain(self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass, calling the core when it wants to be called."""
        until = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.take(self.core.handle_timeout(self.now))
            self.work()
        self.now = until


def octets(text: str) -> bytes:
    """Hexadecimal, with names of vectors in between."""
    named = re.sub(r"V\d+", lambda match: VECTORS["vectors"][match[0]]["hex"], text)
    return bytes.fromhex(named)


@pytest.fixture
def desk() -> Callable[..., Desk]:
    return Desk


@pytest.fixture
def hexed() -> Callable[[str], bytes]:
    return octets


@pytest.fixture(scope="session")
def vectors() -> dict[str, Any]:
    assert isinstance(VECTORS, dict)
    return VECTORS


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed by reference counting."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A core raises, or tells; it logs nothing, least of all a traceback."""
    yield
    assert caplog.get_records("call") == []
