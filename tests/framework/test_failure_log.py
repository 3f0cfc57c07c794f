"""The log of failures: whole tracebacks, a limit for each cause, and nothing that a peer could forge."""

from __future__ import annotations

import gc
import logging
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from levada.framework import Actor, ActorSystem, channel, handles, message
from levada.framework.embedding import FailureLog
from levada.framework.errors import (
    AskCycle,
    AskTimeout,
    ConnectionClosed,
    EndOfChannel,
    HandleMoved,
    SenderFinished,
)
from levada.framework.text import printable

logger = logging.getLogger("levada.tests")
EVIL = "x\x1b[2J\nCRITICAL:root:forged\u2028more"


def wrong_value(text: str) -> None:
    raise ValueError(text)


def wrong_key(text: str) -> None:
    raise KeyError(text)


def deep(text: str, depth: int) -> None:
    if depth:
        deep(text, depth - 1)
    raise ValueError(text)


def failed(function: Callable[..., None], *arguments: Any) -> Exception:
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - what is tested
        return error
    raise AssertionError("it must fail")


async def test_the_first_ten_of_a_cause_in_a_minute_have_lines(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever their texts are, and however deep a recursion was; other causes have lines of their own."""
    log = FailureLog()
    for number in range(100):
        log.log(logger, failed(wrong_value, f"bad {number}"), "%s failed", "desk", actor="/desk")
        log.log(logger, failed(deep, "bad", 2 + number), "%s failed", "deep")
    log.log(logger, failed(wrong_key, "bad"), "%s failed", "desk")
    log.log(logger, failed(wrong_value, "bad"), "%s failed elsewhere", "desk")
    assert caplog.messages == ["desk failed", "deep failed"] * 10 + ["desk failed", "desk failed elsewhere"]
    assert all(record.exc_info and record.levelno == logging.ERROR for record in caplog.records)
    assert vars(caplog.records[0])["actor"] == "/desk"
    assert caplog.records[0].funcName == "test_the_first_ten_of_a_cause_in_a_minute_have_lines"
    caplog.clear()
    await trio.sleep(59.0)
    log.log(logger, failed(wrong_value, "bad"), "%s failed", "desk")
    assert caplog.messages == []
    await trio.sleep(1.0)
    for _ in range(11):
        log.log(logger, failed(wrong_value, "bad"), "%s failed", "desk")
    assert caplog.messages[:2] == ["desk failed (91 more of this cause since the last such line)", "desk failed"]
    assert len(caplog.messages) == 10


def wrong_either(kind: type[Exception], text: str) -> None:
    raise kind(text)


def wrong_value_elsewhere(text: str) -> None:
    raise ValueError(text)


async def test_errors_of_two_classes_or_places_are_two_causes(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for _ in range(11):
        log.log(logger, failed(wrong_either, ValueError, "bad"), "it failed")
    log.log(logger, failed(wrong_either, KeyError, "bad"), "it failed")
    assert len(caplog.messages) == 11
    errors = [failed(wrong_value, "bad"), failed(wrong_value_elsewhere, "bad"), failed(wrong_either, KeyError, "bad")]
    assert len({log.mark(error) for error in errors}) == 3


async def test_so_many_causes_are_remembered(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    error = failed(wrong_value, "bad")
    for _ in range(11):
        log.log(logger, error, "first")
    for number in range(1_000):
        log.log(logger, error, f"other {number}")
    log.log(logger, error, "first")
    assert caplog.messages.count("first") == 11


async def test_the_traceback_is_whole_and_only_code_begins_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """Causes and the errors of a group among them; further lines of a text are indented, other control characters escaped."""

    def both() -> None:
        try:
            wrong_value(EVIL)
        except ValueError as error:
            raise ExceptionGroup(EVIL, [KeyError(EVIL), error]) from error

    FailureLog().log(logger, failed(both), "it failed")
    written = logging.Formatter("%(levelname)s:%(message)s").format(caplog.records[0])
    assert written.startswith("ERROR:it failed\nTraceback (most recent call last):\n  File ")
    assert ", in wrong_value\n    raise ValueError(text)\n" in written
    assert "ValueError: x\\x1b[2J\n    CRITICAL:root:forged\\u2028more\n" in written
    assert "direct cause of the following exception" in written
    assert "\x1b" not in written
    assert "\u2028" not in written
    assert not [line for line in written.split("\n") if line.startswith("CRITICAL")]


async def test_a_kept_record_keeps_nothing_of_the_code_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    """A message that could not be sent is freed with the channels in it, although the record and its traceback are kept."""
    kept: list[weakref.ref[Any]] = []
    log = FailureLog()

    def sends() -> None:
        sender, _ = channel(int)
        sender.finish_nowait()
        kept.append(weakref.ref(sender))
        try:
            sender.send_nowait(1)
        except SenderFinished as error:
            log.log(logger, error, "not sent")

    gc.disable()
    try:
        for _ in range(12):  # the last two have no line
            sends()
        assert [each() for each in kept] == [None] * 12
    finally:
        gc.enable()
    (record, *_) = caplog.records
    assert record.exc_info is not None
    assert [frame.name for frame in traceback.extract_tb(record.exc_info[2])][:2] == ["sends", "send_nowait"]


async def test_an_error_that_others_caused_is_one_line(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """At most ten of a cause in a minute, as tracebacks; an error that tells of a mistake here is a failure."""
    log = FailureLog()
    errors = [failed(wrong_either, AskTimeout, EVIL) for _ in range(11)]
    mark = log.mark(errors[0])
    assert {log.for_peer(error) for error in errors} == {f"an actor did not answer in time [{mark}]"}
    for error in errors:
        log.log(logger, error, "%s failed", "desk", actor="/desk")
    line = f"desk failed: AskTimeout: {printable(EVIL)}; failure {mark}"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(logging.WARNING, line)] * 10
    assert all(record.exc_info is None for record in caplog.records)
    assert vars(caplog.records[0])["actor"] == "/desk"
    await trio.sleep(60)
    log.log(logger, failed(wrong_either, AskTimeout, EVIL), "%s failed", "desk")
    assert caplog.messages[-1].endswith("(1 more of this cause since the last such line)")
    for mistake in (SenderFinished, HandleMoved, EndOfChannel, ConnectionClosed, AskCycle):
        assert log.for_peer(failed(wrong_either, mistake, "bad")).startswith("the handler failed [")


async def test_a_long_text_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    FailureLog().log(logger, failed(wrong_value, "long " * 1_000_000), "it failed")
    FailureLog().log(logger, failed(wrong_value, "\n" * 1_000_000), "it failed")
    FailureLog().log(logger, failed(wrong_either, AskTimeout, "\n" * 1_000_000), "it failed")
    assert max(map(len, caplog.messages)) < 15_000
    assert max(len(record.exc_text or "") for record in caplog.records) < 15_000


async def test_an_id_for_the_peer_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Failures of one place have one id, so that it is found although only ten have lines; it differs between places and processes."""
    log = FailureLog()
    ids = set()
    for number in range(20):
        error = failed(wrong_value, f"bad {number}")
        ids.add(log.mark(error))
        log.log(logger, error, "it failed")
    (only,) = ids
    assert all((record.exc_text or "").endswith(f"\nfailure {only}") for record in caplog.records)
    assert log.mark(failed(wrong_key, "bad")) != only
    assert FailureLog().mark(failed(wrong_value, "bad")) != only


async def test_an_id_is_that_of_the_place_however_it_was_reached() -> None:
    log = FailureLog()
    assert log.mark(failed(deep, "bad", 0)) == log.mark(failed(deep, "bad", 1)) == log.mark(failed(deep, "bad", 5))


class NoNotes(Exception):
    def add_note(self, note: str, /) -> None:
        raise TypeError("no notes")


async def test_an_error_that_takes_no_notes_has_an_id_too() -> None:
    assert len(FailureLog().mark(NoNotes())) == 8


@message
class Bad:
    text: str


class Desk(Actor[Bad]):
    @handles
    def on_bad(self, m: Bad) -> None:
        raise ValueError(m.text)


async def test_actors_that_fail_from_one_cause_do_not_fill_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem() as system:
        for _ in range(50):
            desk = system.spawn(Desk)
            desk.tell(Bad(EVIL))
            await desk.terminated()
        assert system.statistics().failures == 50
    lines = [record for record in caplog.records if "failed while it handled Bad" in record.getMessage()]
    assert len(lines) == 10
    assert "raise ValueError(m.text)" in caplog.text
    assert "\nCRITICAL" not in caplog.text
