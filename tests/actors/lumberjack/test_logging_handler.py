"""`LumberjackHandler`: threads, a full queue, the end of the program, a fork, records of levada itself."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio

from levada.actors.lumberjack.balance import HostConfig
from levada.actors.lumberjack.logging_handler import LumberjackHandler
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import TlsConfig
from levada.transports.lumberjack import WriterConfig

pytestmark = pytest.mark.loopback

Readers = Callable[..., AbstractAsyncContextManager[Any]]
ANY = "tcp://127.0.0.1:0"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.getLogger("test of the handler")
    log.propagate = False
    log.setLevel(logging.DEBUG)
    yield log
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await trio.to_thread.run_sync(function, *arguments)


async def test_records_of_any_thread_arrive_with_their_origin(small_reader: Readers, log: logging.Logger) -> None:
    async with small_reader(ANY) as reader:
        handler = LumberjackHandler(reader.url, logging.INFO, fields={"env": "test"})
        handler.setFormatter(logging.Formatter("<%(message)s>"))
        log.addHandler(handler)
        mutable = [1]
        log.info("hello %s", mutable)
        mutable.append(2)  # later changes are not seen
        log.debug("below the level")

        def log_many(name: str) -> None:
            for number in range(50):
                log.warning("%s %d", name, number)

        async with trio.open_nursery() as nursery:
            for name in ("a", "b", "c"):
                nursery.start_soon(in_thread, log_many, name)
        await in_thread(handler.flush)
        events = reader.events
        first = events[0]
        assert (first["line"], first["logger"], first["level"], first["env"], first["process"]) == (
            "<hello [1]>",
            "test of the handler",
            "INFO",
            "test",
            os.getpid(),
        )
        assert first["time"].endswith("+00:00")
        assert len(events) == 151
        for name in ("a", "b", "c"):
            own = [event["line"] for event in events if event["line"].startswith(f"<{name} ")]
            assert own == [f"<{name} {number}>" for number in range(50)], "those of one thread are in order"
        assert (handler.unacked, handler.dropped) == (0, 0)
        await in_thread(handler.close)
        log.info("after the end")
        assert handler.dropped == 1


async def test_a_full_queue_holds_nobody_up_for_longer_than_block(log: logging.Logger) -> None:
    config = WriterConfig(window=1, queue=1)
    handler = LumberjackHandler("lumberjack://127.0.0.1:9", config=config, queue=5, close_timeout=0.1)
    log.addHandler(handler)
    begin = time.perf_counter()
    for number in range(100):
        log.info("%d", number)
    assert time.perf_counter() - begin < 20.0
    assert handler.dropped > 80
    assert handler.dropped + handler.unacked == 100
    await in_thread(handler.close)
    assert handler.dropped + handler.unacked == 100

    slow = LumberjackHandler("lumberjack://127.0.0.1:9", config=config, queue=1, block=0.05, close_timeout=0.0)
    log.removeHandler(handler)
    log.addHandler(slow)
    for number in range(5):
        log.info("%d", number)
    begin = time.perf_counter()
    await in_thread(log.info, "one too many")
    assert 0.04 < time.perf_counter() - begin < 20.0
    await in_thread(slow.close)


async def test_waiting_for_room_ends_when_there_is_room(small_reader: Readers, log: logging.Logger) -> None:
    async with small_reader(ANY) as reader:
        reader.acks = trio.Event()
        config = WriterConfig(window=1, queue=1)
        handler = LumberjackHandler(reader.url, config=config, queue=1, block=30.0)
        log.addHandler(handler)

        def log_some() -> None:
            for number in range(20):
                log.info("%d", number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, log_some)
            await reader.has(1)
            reader.acks.set()
            lines = await reader.has(19)
        assert lines[-1]["line"] == "19"
        assert handler.dropped == 0
        await in_thread(handler.close)


async def test_records_of_levada_itself_are_not_taken(small_reader: Readers) -> None:
    async with small_reader(ANY) as reader:
        handler = LumberjackHandler(reader.url)
        root = logging.getLogger()
        root.addHandler(handler)
        try:
            logging.getLogger("levada.actors.lumberjack.writer").error("about the writer itself")
            logging.getLogger("levadas").error("of somebody else")
            await in_thread(handler.flush)
        finally:
            root.removeHandler(handler)
            await in_thread(handler.close)
        assert [event["line"] for event in reader.events] == ["of somebody else"]


async def test_a_record_that_cannot_be_formatted_or_sent_disturbs_no_other(
    small_reader: Readers, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    async with small_reader(ANY) as reader:
        handler = LumberjackHandler(reader.url, fields={"odd": float("nan")})
        log.addHandler(handler)
        handler.handle(log.makeRecord("x", logging.INFO, "here", 1, "%d", ("no number",), None))
        log.info("cannot be JSON")
        handler._fields.clear()
        log.info("good")
        await in_thread(handler.flush)
        assert [event["line"] for event in reader.events] == ["good"]
        assert handler.dropped == 1
        assert "no number" in capsys.readouterr().err  # logging's own report
        await in_thread(handler.close)


async def test_in_a_system_that_is_given(small_reader: Readers, log: logging.Logger) -> None:
    async with small_reader(ANY) as reader, ActorSystem() as system:
        threads = threading.active_count()
        handler = LumberjackHandler(reader.url, system=system, block=10.0, queue=10)
        log.addHandler(handler)
        for number in range(20):
            log.info("%d", number)  # in the sender's own thread: must not wait for itself
        assert handler.dropped == 10
        await in_thread(log.info, "from a thread")
        assert len(await reader.has(11)) == 11
        handler.flush()  # as well
        assert await handler.aclose() == 0
        assert threading.active_count() <= threads + 1  # no thread of the handler; one of trio's for `in_thread`


async def test_a_mistake_shows_at_once_or_in_failure(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError):
        LumberjackHandler("http://example.org")
    hosts = HostConfig(tls=TlsConfig(ca="/nowhere/ca.pem"))
    handler = LumberjackHandler("lumberjack+tls://127.0.0.1:9", hosts=hosts)
    log.addHandler(handler)
    log.info("lost")
    await in_thread(handler.flush)
    assert "cannot use the certificates" in str(handler.failure)
    log.info("lost too")
    assert handler.dropped + handler.unacked == 2
    await in_thread(handler.close)
    counts = f"{handler.unacked} log records were not acknowledged, {handler.dropped} were dropped"
    assert caplog.messages[-1] == f"LumberjackHandler: {counts}: {handler.failure}"


PROGRAM = """
import logging, os, sys
from levada.actors.lumberjack.balance import HostConfig
from levada.actors.lumberjack.logging_handler import LumberjackHandler
handler = LumberjackHandler(sys.argv[1], close_timeout=float(sys.argv[2]))
logging.getLogger().addHandler(handler)
"""


def program(code: str, url: str, close_timeout: float = 1000.0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + code, url, str(close_timeout)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.ci
async def test_what_was_logged_last_is_sent_at_the_end_of_the_program(small_reader: Readers) -> None:
    async with small_reader(ANY) as reader:
        code = "for number in range(3000): logging.warning('%d', number)"
        done = await in_thread(program, code, reader.url)
        assert (done.returncode, done.stderr) == (0, "")
        assert [event["line"] for event in reader.events] == [str(number) for number in range(3000)]


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
async def test_after_a_fork_each_process_sends_its_own_records(small_reader: Readers) -> None:
    async with small_reader(ANY) as reader:
        code = (
            "logging.warning('parent 1')\n"
            "child = os.fork()\n"
            "logging.warning('child' if not child else 'parent 2')\n"
            "if child: os.waitpid(child, 0)\n"
        )
        done = await in_thread(program, code, reader.url)
        assert done.returncode == 0, done.stderr
        assert sorted(event["line"] for event in reader.events) == ["child", "parent 1", "parent 2"]
        assert len({event["process"] for event in reader.events}) == 2


LOG = "logging.warning('x')\n"
"""The first record starts the thread that connects."""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        pytest.param(LOG, True, id="no other handler"),
        pytest.param(f"{LOG}logging.getLogger().addHandler(LumberjackHandler(sys.argv[1]))\n", True, id="two of them"),
        pytest.param(
            f"{LOG}logging.getLogger().removeHandler(handler)\nhandler.close()\n", True, id="no handler any more"
        ),
        pytest.param(
            f"logging.getLogger('levada').addHandler(logging.FileHandler(os.devnull))\n{LOG}",
            False,
            id="another handler",
        ),
        pytest.param(f"logging.getLogger('levada').setLevel(logging.CRITICAL)\n{LOG}", False, id="not wanted"),
    ],
)
async def test_an_absent_reader_delays_the_end_for_the_time_allowed_only(code: str, *, shown: bool) -> None:
    """The loss, and the reason before it, are on stderr unless another handler takes them or they are switched off."""
    done = await in_thread(program, code, "lumberjack://127.0.0.1:9", 0.3)
    assert done.returncode == 0
    said = [
        line for line in done.stderr.splitlines() if not line.startswith("lumberjack://127.0.0.1:9: cannot connect")
    ]
    assert said == ["LumberjackHandler: 1 log records were not acknowledged, 0 were dropped"] * shown
    assert shown or not done.stderr


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
async def test_a_process_of_multiprocessing_that_ends_at_once_loses_nothing(
    small_reader: Readers, method: str, tmp_path: Path
) -> None:
    """It ends by `os._exit`, which runs nothing of what `logging` does at the end of a program."""
    program = (
        "import logging, multiprocessing, sys\n"
        "from levada.actors.lumberjack import LumberjackHandler\n"
        "def child(url):\n"
        "    if not logging.getLogger().handlers:\n"
        "        logging.getLogger().addHandler(LumberjackHandler(url))\n"
        "    for number in range(5): logging.warning('child %s', number)\n"
        "if __name__ == '__main__':\n"
        "    logging.getLogger().addHandler(LumberjackHandler(sys.argv[1]))\n"
        "    logging.warning('parent')\n"
        "    process = multiprocessing.get_context(sys.argv[2]).Process(target=child, args=sys.argv[1:2])\n"
        "    process.start()\n"
        "    process.join()\n"
        "    sys.exit(process.exitcode)\n"
    )
    async with small_reader("tcp://127.0.0.1:0") as reader:
        file = tmp_path / "program.py"
        file.write_text(program)
        done = await trio.run_process([sys.executable, file, reader.url, method], capture_stderr=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        lines = sorted(event["line"] for event in await reader.has(6))
        assert lines == [*(f"child {number}" for number in range(5)), "parent"]


async def test_the_sender_imports_nothing(small_reader: Readers) -> None:
    """A module that its thread imports just when the program forks could never be imported in the child, whose records would be lost."""
    async with small_reader("tcp://127.0.0.1:0") as reader:
        code = (
            "import sys\n"
            "before = set(sys.modules)\n"
            "logging.warning('x')\n"
            "handler.flush()\n"
            "print(sorted(set(sys.modules) - before), end='', file=sys.stderr)\n"
        )
        done = await in_thread(program, code, reader.url)
        assert (done.returncode, done.stderr) == (0, "[]")


@pytest.mark.ci
def test_what_is_lost_at_the_end_is_counted_and_said() -> None:
    program = (
        "import logging, multiprocessing\n"
        "from levada.actors.lumberjack import LumberjackHandler\n"
        "handlers = [LumberjackHandler('lumberjack+memory://nobody', close_timeout=0.1), logging.StreamHandler()]\n"
        "logging.basicConfig(handlers=handlers)\n"
        "def child():\n"
        "    for number in range(5): logging.warning('child')\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start()\n"
        "process.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "5 log records were not acknowledged, 0 were dropped" in done.stderr
