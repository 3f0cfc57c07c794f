"""Questions from Spark's executors to actors in this process: answers in order, deadlines, failures, retries, and how much is under way."""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

pytest.importorskip("levada.actors.spark", exc_type=ImportError)

import pyarrow as pa

from levada.actors.journal import SchemaMismatch, columns_of
from levada.actors.spark import asks as asks_module
from levada.actors.spark.asks import AskRows, EachRow, RemoteActor, ask, ask_batches, ask_many
from levada.actors.spark.desk import BridgeConfig
from levada.actors.spark.protocol import ActorFailed, UnknownName
from levada.framework import Actor, Asks, Ref, handles, message, restart
from levada.framework.errors import ActorError, ActorStopped, AskTimeout, ConfigurationError, ConnectionLost

if TYPE_CHECKING:
    from .conftest import VirtualTime


@message("test.asks.Doubled")
class Doubled:
    result: int


@message("test.asks.Double")
class Double(Asks[Doubled]):
    n: int


@message("test.asks.Count")
class Count(Asks[int]):
    n: int


class Desk(Actor[Double | Count | AskRows]):
    """Doubles numbers; notes what it was asked."""

    seen: list[int]
    requests: list[str]
    refused: int = -1

    def started(self) -> None:
        self.seen.clear()

    @handles
    def double(self, m: Double) -> Doubled:
        if m.n == self.refused:
            raise ValueError(f"no {m.n} here")
        self.seen.append(m.n)
        return Doubled(m.n * 2)

    @handles
    def count(self, m: Count) -> int:
        self.seen.append(m.n)
        return len(self.seen)

    @handles
    def rows(self, m: AskRows) -> pa.RecordBatch:
        self.requests.append(m.request)
        numbers = m.rows.column("n").to_pylist()
        if self.refused in numbers:
            raise ValueError(f"no {self.refused} here")
        return pa.record_batch({"result": [2 * n for n in numbers]})


def numbers(*batches: int, start: int = 0) -> Iterator[Any]:
    for size in batches:
        yield pa.record_batch({"n": pa.array(range(start, start + size), pa.int64())})
        start += size


class Held(Actor[Double]):
    """Answers nothing until it is let go; counts how many questions wait in it at most."""

    gate: trio.Event
    most: list[int]

    def started(self) -> None:
        self._waiting = 0

    @handles
    def double(self, m: Double) -> None:
        reply = self.reply_later()
        self._waiting += 1
        self.most[0] = max(self.most[0], self._waiting)

        async def answer() -> None:
            await self.gate.wait()
            self._waiting -= 1
            reply.send(Doubled(m.n * 2))

        self.start_soon(answer)


class Slow(Actor[Double]):
    """Waits in its handler until it is let go."""

    gate: trio.Event
    seen: list[int]

    @handles
    async def double(self, m: Double) -> Doubled:
        self.seen.append(m.n)
        await self.gate.wait()
        return Doubled(m.n * 2)


def expose(actors: Any, name: str, factory: Callable[[], Any], **settings: Any) -> tuple[RemoteActor, Ref[Any]]:
    def make() -> Ref[Any]:
        ref: Ref[Any] = actors.system.spawn(factory, name=name, **settings)
        actors.bridge.expose(name, ref)
        return ref

    return RemoteActor(name, actors.bridge.address), actors.do(make)


def desk(actors: Any, **settings: Any) -> RemoteActor:
    return expose(actors, "desk", partial(Desk, seen=[], requests=[], **settings))[0]


def test_one_question_and_many_are_answered_in_order(actors: Any) -> None:
    there = desk(actors)
    assert ask(there, Double(21)) == Doubled(42)
    assert ask(there, Count(0)) == 2
    assert list(ask_many(there, map(Double, range(1000)))) == [Doubled(2 * n) for n in range(1000)]
    assert list(ask_many(there, [])) == []


def test_batches_are_answered_in_order_row_by_row(actors: Any) -> None:
    there = desk(actors)
    answers = [batch.column("result").to_pylist() for batch in ask_batches(there, numbers(3, 0, 2, 1), window=2)]
    assert answers == [[0, 2, 4], [], [6, 8], [10]]


def test_no_more_than_the_window_is_under_way(actors: Any) -> None:
    gate, most, taken = trio.Event(), [0], []
    there, _ = expose(actors, "held", partial(Held, gate=gate, most=most))

    def questions() -> Iterator[Double]:
        for n in range(40):
            taken.append(n)
            yield Double(n)

    answers = ask_many(there, questions(), window=7)
    first = threading.Thread(target=lambda: first_answer.append(next(answers)))
    first_answer: list[Doubled] = []
    first.start()

    async def seven() -> None:
        while most[0] < 7:
            await trio.lowlevel.checkpoint()
        # The eighth has been taken from the iterator, and waits for the first answer.
        gate.set()

    actors.do(seven)
    first.join()
    assert len(taken) == 8
    assert first_answer + list(answers) == [Doubled(2 * n) for n in range(40)]
    assert most == [7]


def test_closed_early_what_is_under_way_is_withdrawn(actors: Any) -> None:
    gate, seen = trio.Event(), list[int]()
    there = desk(actors)
    slow, _ = expose(actors, "slow", partial(Slow, gate=gate, seen=seen))
    answers = ask_many(slow, map(Double, range(10)), window=3, timeout=100.0)
    thread = threading.Thread(target=lambda: next(answers, None))
    thread.start()

    async def one() -> None:
        while not seen:
            await trio.lowlevel.checkpoint()
        gate.set()

    actors.do(one)
    thread.join()
    answers.close()  # type: ignore[attr-defined]
    assert ask(there, Double(1)) == Doubled(2)
    # The rest of the window at most; nothing of what had not been sent.
    assert set(seen) <= {0, 1, 2, 3}


def test_a_slow_actor_is_waited_for_until_the_deadline(actors: Any) -> None:
    gate, seen = trio.Event(), list[int]()
    there, _ = expose(actors, "slow", partial(Slow, gate=gate, seen=seen))
    answers: list[Doubled] = []
    first = threading.Thread(target=lambda: answers.append(ask(there, Double(1))))
    first.start()

    async def begun() -> None:
        while not seen:
            await trio.lowlevel.checkpoint()

    actors.do(begun)
    # These wait in its mailbox, and are withdrawn: no handler ever begins with them.
    with pytest.raises(AskTimeout, match=r"^slow did not answer within 0\.05 s$") as caught:
        ask(there, Double(2), timeout=0.05)
    assert (caught.value.actor, caught.value.seconds) == ("slow", 0.05)
    with pytest.raises(AskTimeout):
        list(ask_many(there, [Double(3), Double(4)], timeout=0.05, idempotent=True))
    actors.do(gate.set)
    first.join()
    assert ask(there, Double(5)) == Doubled(10)
    assert answers == [Doubled(2)]
    assert seen == [1, 5]


def test_an_actor_that_has_ended_is_named(actors: Any) -> None:
    there, ref = expose(actors, "desk", partial(Desk, seen=[], requests=[]))
    actors.do(ref.stop)
    actors.do(ref.terminated)
    for attempt in (
        lambda: ask(there, Double(1), idempotent=True),
        lambda: list(ask_many(there, [Double(1)])),
        lambda: list(ask_batches(there, numbers(2))),
    ):
        with pytest.raises(ActorStopped, match=r"^/desk has stopped \(shutdown\)$") as caught:
            attempt()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.actor) == ("/desk has stopped (shutdown)", "/desk")


def test_an_actor_that_is_not_there_is_named(actors: Any) -> None:
    desk(actors)
    with pytest.raises(UnknownName, match="no actor is exposed as 'nobody'; there are: desk"):
        ask(RemoteActor("nobody", actors.bridge.address), Double(1))


def test_a_failing_handler_is_named_with_its_error(actors: Any) -> None:
    there, _ = expose(actors, "desk", partial(Desk, seen=[], requests=[], refused=3), supervise=restart())
    with pytest.raises(
        ActorFailed, match=r"desk \(/desk\) failed on this question: ValueError\('no 3 here'\)"
    ) as caught:
        list(ask_many(there, map(Double, range(5))))
    assert caught.value.actor == "/desk"
    answers = ask_batches(there, numbers(2, 3))
    assert next(answers).column("result").to_pylist() == [0, 2]
    with pytest.raises(ActorFailed, match="no 3 here"):
        next(answers)


def test_an_actor_that_has_failed_did_not_fail_on_later_questions(actors: Any) -> None:
    there, target = expose(actors, "desk", partial(Desk, seen=[], requests=[], refused=3))
    rows, _ = expose(actors, "rows", partial(EachRow, target, Double))
    with pytest.raises(ActorFailed, match="failed on this question"):
        ask(there, Double(3))
    for attempt in (
        lambda: ask(there, Double(1)),
        lambda: list(ask_many(there, [Double(1)])),
        lambda: list(ask_batches(there, numbers(2))),
        lambda: list(ask_batches(rows, numbers(2))),
    ):
        with pytest.raises(ActorStopped, match=r"^/desk failed: ValueError\('no 3 here'\)$"):
            attempt()


def test_questions_behind_the_failing_one_did_not_fail_themselves(actors: Any) -> None:
    class Late(Slow):
        @handles
        async def double(self, m: Double) -> Doubled:
            await super().double(m)
            raise ValueError(f"no {m.n} here")

    gate, seen, errors = trio.Event(), list[int](), dict[int, str]()
    ref: Any
    there, ref = expose(actors, "late", partial(Late, gate=gate, seen=seen))

    def asked(n: int) -> None:
        with pytest.raises(ActorError) as caught:
            ask(there, Double(n))
        errors[n] = f"{type(caught.value).__name__}: {caught.value}"

    async def until(met: Callable[[], bool]) -> None:
        while not met():
            await trio.lowlevel.checkpoint()

    threads = [threading.Thread(target=asked, args=(n,)) for n in (1, 2)]
    threads[0].start()
    actors.do(until, lambda: seen == [1])
    threads[1].start()
    actors.do(until, lambda: ref.depth() == 1)
    actors.do(gate.set)
    for thread in threads:
        thread.join()
    assert errors == {
        1: "ActorFailed: late (/late) failed on this question: ValueError('no 1 here')",
        2: "ActorStopped: /late failed: ValueError('no 1 here')",
    }


class Short(Actor[AskRows]):
    answer: Any

    @handles
    def rows(self, m: AskRows) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [(None, "answered 4 rows by NoneType"), ("short", "answered 4 rows by 1 rows")],
)
def test_an_answer_of_another_length_is_refused(actors: Any, answer: Any, said: str) -> None:
    answer = pa.record_batch({"result": [1]}) if answer == "short" else answer
    there, _ = expose(actors, "short", partial(Short, answer=answer))
    with pytest.raises(ActorFailed, match=f"short {said}"):
        list(ask_batches(there, numbers(4)))


def test_rows_become_messages_for_an_actor_that_takes_one_at_a_time(actors: Any) -> None:
    seen: list[int] = []
    _, target = expose(actors, "target", partial(Desk, seen=seen, requests=[], refused=203), supervise=restart(max=9))
    there, _ = expose(actors, "rows", partial(EachRow, target, Double))
    answers = ask_batches(there, numbers(200, 1, 5, start=0))
    assert next(answers).column("result").to_pylist() == [2 * n for n in range(200)]
    assert next(answers).column("result").to_pylist() == [400]
    with pytest.raises(ActorFailed, match=r"row 2: /target failed: ValueError\('no 203 here'\)") as caught:
        next(answers)
    assert caught.value.actor == "/target"
    # It is the failure of that batch only.
    (batch,) = ask_batches(there, numbers(2))
    assert batch.schema.equals(columns_of(Doubled).schema)
    assert batch.column("result").to_pylist() == [0, 2]


def test_rows_of_other_columns_are_refused(actors: Any) -> None:
    _, target = expose(actors, "target", partial(Desk, seen=[], requests=[]))
    there, _ = expose(actors, "rows", partial(EachRow, target, Double))
    with pytest.raises(SchemaMismatch, match="m: column 1, wanted n"):
        list(ask_batches(there, [pa.record_batch({"m": [1]})]))


def test_a_question_without_columns_cannot_be_asked_row_by_row(actors: Any) -> None:
    with pytest.raises(ConfigurationError, match="Count and its answer, <class 'int'>, must be message classes"):
        EachRow(None, Count)  # type: ignore[arg-type]


# ---------------------------------------------------------------- lost connections


def test_a_bridge_that_starts_anew_between_two_batches_is_asked_again_if_idempotent(make_actors: Any) -> None:
    actors = make_actors()
    requests: list[str] = []
    there, _ = expose(actors, "desk", partial(Desk, seen=[], requests=requests))

    def batches(at: int) -> Iterator[Any]:
        for number, batch in enumerate(numbers(*[10] * 6)):
            if number == at:
                actors.stop()
                actors.start()
                expose(actors, "desk", partial(Desk, seen=[], requests=requests))
            yield batch

    answers = [batch.num_rows for batch in ask_batches(there, batches(3), window=2, idempotent=True)]
    assert answers == [10] * 6
    # Each has an id of its own; those that were under way may have come twice, by the same one.
    assert len(set(requests)) == 6
    assert all(len(request) == 32 for request in requests)


def test_a_question_that_may_have_been_handled_is_not_asked_again_unless_idempotent(make_actors: Any) -> None:
    actors = make_actors(config=BridgeConfig(drain_timeout=0.0))
    seen: list[int] = []
    there, _ = expose(actors, "slow", partial(Slow, gate=actors.bridge_gone, seen=seen))
    with pytest.raises(ConnectionLost, match="the bridge was lost while slow was asked, which may have handled"):
        list(ask_many(there, stopping_meanwhile(actors, seen), window=3))
    assert seen == [0]


def test_all_that_were_under_way_are_asked_again_if_idempotent(make_actors: Any) -> None:
    actors = make_actors(config=BridgeConfig(drain_timeout=0.0))
    seen: list[int] = []
    there, _ = expose(actors, "slow", partial(Slow, gate=actors.bridge_gone, seen=seen))

    def questions() -> Iterator[Double]:
        yield from stopping_meanwhile(actors, seen)
        actors.start()
        gate = trio.Event()
        expose(actors, "slow", partial(Slow, gate=gate, seen=seen))
        actors.do(gate.set)
        yield Double(3)

    answers = list(ask_many(there, questions(), window=4, idempotent=True, timeout=100.0))
    assert answers == [Doubled(2 * n) for n in range(4)]
    # The handler had begun with the first one; it gets it twice.
    assert sorted(seen) == [0, 0, 1, 2, 3]


def stopping_meanwhile(actors: Any, seen: list[int]) -> Iterator[Double]:
    """Three questions; the bridge goes away while the first is in its handler and the others wait in the mailbox."""
    for n in range(3):
        yield Double(n)

    async def begun() -> None:
        while not seen:
            await trio.lowlevel.checkpoint()

    actors.do(begun)
    actors.stop()


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_bridge_that_is_away_is_waited_for_until_the_deadline(
    make_actors: Any, virtual_time: VirtualTime, idempotent: bool
) -> None:
    """Nothing was sent, so it does no harm to questions that must not be asked twice."""
    actors = make_actors()
    there = desk(actors)
    actors.stop()
    with pytest.raises(ConnectionLost, match="no bridge answers"):
        ask(there, Double(1), timeout=30.0, idempotent=idempotent)
    assert 28.0 < virtual_time.now <= 30.0

    def come_back() -> None:
        actors.start()
        desk(actors)

    virtual_time.at(20.0, come_back)
    assert ask(there, Double(4), timeout=30.0, idempotent=idempotent) == Doubled(8)
    assert 48.0 < virtual_time.now <= 52.0


# ---------------------------------------------------------------- mistakes and hints


def test_what_cannot_be_asked_is_refused(actors: Any) -> None:
    there = desk(actors)
    with pytest.raises(TypeError, match="expected an instance of a message class"):
        ask(there, 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="window is 0, wanted 1 or more"):
        ask_many(there, [], window=0)
    with pytest.raises(ConfigurationError, match="timeout is 0, wanted more than 0 seconds"):
        ask(there, Double(1), timeout=0)


async def test_inside_trio_nothing_is_asked_by_blocking_it() -> None:
    with pytest.raises(ConfigurationError, match=r"inside trio, use Ref\.ask"):
        ask(RemoteActor("desk", "unix:///nowhere"), Double(1))


def test_a_batch_larger_than_a_peer_takes_is_refused_before_it_is_sent(
    actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = desk(actors)
    monkeypatch.setattr(asks_module, "MAX_BYTES", 1000)
    with pytest.raises(ConfigurationError, match=r"at most 1000 .lower spark.sql.execution.arrow.maxRecordsPerBatch"):
        list(ask_batches(there, numbers(200)))


def test_one_at_a_time_is_hinted_at_once(
    actors: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = desk(actors)
    monkeypatch.setattr(asks_module, "_asked", itertools.count(1))
    with caplog.at_level(logging.WARNING, "levada.actors.spark"):
        for n in range(asks_module.HINT_AFTER + 50):
            ask(there, Double(n))
    assert [record.getMessage() for record in caplog.records] == [
        "200 questions to actors one at a time, the last one to desk: ask_many() or, from mapInArrow, ask_batches() are many times faster"
    ]
