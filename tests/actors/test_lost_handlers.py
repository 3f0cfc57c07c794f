"""A handler that lost something (an actor, a channel, its node) fails by others' fault: its client reads what was lost, the log has one line."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors import aqueduct, maop, rsocket
from levada.actors.authenticators import BearerTokens
from levada.actors.maop import OperationFailed
from levada.actors.rsocket import ApplicationError
from levada.framework import Actor, ActorSystem, Asks, Identity, OneshotSender, channel, handles, message, oneshot
from levada.framework.embedding import loss_of
from levada.framework.errors import ActorStopped, AskTimeout, ChannelCancelled

Work: TypeAlias = Callable[[ActorSystem], Awaitable[None]]
Ask: TypeAlias = Callable[[], Awaitable[str]]


@message("tests.lost.Wait")
class Wait(Asks[None]):
    pass


@message("tests.lost.Question")
class Question:
    answer: OneshotSender[str]


class Deaf(Actor[Wait]):
    @handles
    async def wait(self, _: Wait) -> None:
        await trio.sleep_forever()


class Broken(Actor[Wait]):
    @handles
    def wait(self, _: Wait) -> None:
        raise KeyError("a secret")


async def ask_in_vain(system: ActorSystem) -> None:
    await system.spawn(Deaf).ask(Wait(), timeout=1)


async def stop_while_asked(system: ActorSystem) -> None:
    deaf = system.spawn(Deaf)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deaf.ask, Wait())
        await wait_all_tasks_blocked()
        deaf.kill()


async def read_from_a_lost_source(system: ActorSystem) -> None:
    sender, receiver = channel(int)
    sender.cancel()
    await receiver.receive()


async def fail(_: object) -> None:
    raise rsocket.RequestCanceled("no tea")


async def ask_another_server(system: ActorSystem) -> None:
    """In a nursery, whose group says nothing about this handler's own request."""
    async with (
        rsocket.serve(system, "rsocket+memory://kitchen", fail) as listener,
        rsocket.connect(system, listener.url) as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(peer.request_response, b"tea")


async def begin_at_another_server(system: ActorSystem) -> None:
    clients = BearerTokens.of({b"secret": Identity("desk")})
    async with (
        maop.serve(system, "maop+memory://kitchen", {}, authenticate=clients) as listener,
        maop.connect(system, listener.url, token=b"secret") as peer,
    ):
        await peer.request(101)


LOSSES: dict[str, tuple[Work, str, str]] = {
    "ask": (ask_in_vain, "an actor did not answer in time", "AskTimeout: "),
    "stopped": (stop_while_asked, "an actor has stopped", "ActorStopped: "),  # a group of errors
    "request": (ask_another_server, "a request was answered with an error", "RequestCanceled: no tea"),
    "operation": (begin_at_another_server, "an operation did not succeed", "OperationRefused: "),
    "source": (read_from_a_lost_source, "a channel was cancelled", "ChannelCancelled: "),
}


@asynccontextmanager
async def over_rsocket(system: ActorSystem, work: Work, url: str, call: str) -> AsyncIterator[Ask]:
    async def items() -> AsyncIterator[bytes]:
        yield b"first"
        await work(system)

    async def handler(request: rsocket.Request) -> Any:
        if call == "stream":
            return items()
        return await work(system)

    async with rsocket.serve(system, url, handler) as listener, rsocket.connect(system, listener.url) as peer:

        async def ask() -> str:
            with pytest.raises(ApplicationError) as failed:
                if call == "stream":
                    async for _ in await peer.request_stream(b"x"):
                        pass
                else:
                    await peer.request_response(b"x")
            return failed.value.data.decode()

        yield ask


@asynccontextmanager
async def over_maop(system: ActorSystem, work: Work) -> AsyncIterator[Ask]:
    async def handler(_: maop.Call) -> None:
        await work(system)

    clients = BearerTokens.of({b"secret": Identity("office-1")})
    async with (
        maop.serve(system, "maop+memory://desk", {101: handler}, authenticate=clients) as listener,
        maop.connect(system, listener.url, token=b"secret") as peer,
    ):

        async def ask() -> str:
            with pytest.raises(OperationFailed) as failed:
                await peer.request(101)
            return failed.value.detail

        yield ask


PEERS: dict[str, Callable[[ActorSystem, Work], Any]] = {
    "rsocket response": lambda system, work: over_rsocket(system, work, "rsocket+memory://desk", "response"),
    "rsocket stream": lambda system, work: over_rsocket(system, work, "rsocket+memory://desk", "stream"),
    "reactivesocket": lambda system, work: over_rsocket(system, work, "reactivesocket+memory://desk", "stream"),
    "maop": over_maop,
}


def logged(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """Return the one record that somebody must read."""
    [record] = [record for record in caplog.records if record.levelno > logging.INFO]
    return record


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("peer", PEERS)
async def test_a_client_reads_what_its_handler_has_lost(
    peer: str, loss: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """With an id that the server's line has too; nothing failed there."""
    work, words, error = LOSSES[loss]
    async with ActorSystem() as system, PEERS[peer](system, work) as ask:
        found = re.fullmatch(rf"{words} \[([0-9a-f]{{8}})\]", await ask())
        assert found is not None
        await wait_all_tasks_blocked()
        record = logged(caplog)
        assert (record.levelno, record.exc_info) == (logging.WARNING, None)
        assert error in record.getMessage()
        assert record.getMessage().endswith(f"; failure {found[1]}")
        assert system.statistics().failures == 0
        assert await ask() == found[0], "the connection lives on"


@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
async def test_a_message_without_an_answer(
    dialect: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: rsocket.Request) -> bytes | None:
        if request.data == b"lose":
            await ask_in_vain(system)
        return b"fine"

    async with (
        ActorSystem() as system,
        rsocket.serve(system, f"{dialect}+memory://desk", handler) as listener,
        rsocket.connect(system, listener.url) as peer,
    ):
        await peer.fire_and_forget(b"lose")
        await trio.sleep(6)
        assert "a handler has lost what it needs: AskTimeout: " in logged(caplog).getMessage()
        assert system.statistics().failures == 0
        assert (await peer.request_response(b"x")).data == b"fine"


async def test_aqueduct_gives_up_the_answer(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(_: Question) -> None:
        await ask_in_vain(system)

    async with (
        ActorSystem() as system,
        aqueduct.serve(system, "aqueduct+memory://desk", handler, Question) as listener,
        aqueduct.connect(system, listener.url, Question) as peer,
    ):
        answer, answered = oneshot(str)
        await peer.send(Question(answer))
        with pytest.raises(ChannelCancelled):
            await answered
        record = logged(caplog)
        assert (record.levelno, record.exc_info) == (logging.WARNING, None)
        assert "a handler failed: AskTimeout: " in record.getMessage()


@pytest.mark.handler_fails
async def test_an_actor_that_fails_at_the_question_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    """The program itself is at fault, wherever in it."""

    async def work(system: ActorSystem) -> None:
        await system.spawn(Broken).ask(Wait())

    async with ActorSystem() as system, PEERS["rsocket response"](system, work) as ask:
        assert re.fullmatch(r"the handler failed \[[0-9a-f]{8}\]", await ask())


@pytest.mark.handler_fails
async def test_a_group_with_a_failure_is_a_failure() -> None:
    async def work(_: ActorSystem) -> None:
        raise ExceptionGroup("both", [AskTimeout("no answer"), ValueError("a bug")])

    async with ActorSystem() as system, PEERS["maop"](system, work) as ask:
        assert re.fullmatch(r"the handler failed \[[0-9a-f]{8}\]", await ask())


async def test_parts_of_a_group_are_all_named(caplog: pytest.LogCaptureFixture) -> None:
    async def work(_: ActorSystem) -> None:
        raise ExceptionGroup("both", [AskTimeout("no answer\n"), ChannelCancelled("gone")])

    async with ActorSystem() as system, PEERS["maop"](system, work) as ask:
        assert (await ask()).startswith("an actor did not answer in time [")
        assert r"AskTimeout: no answer\n; ChannelCancelled: gone; failure " in logged(caplog).getMessage()


def caused(error: Exception, cause: Exception | None) -> Exception:
    error.__cause__ = cause
    return error


def stopped_by(cause: Exception | None) -> Exception:
    return caused(ActorStopped("/desk has failed", actor="/desk"), cause)


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (stopped_by(None), "an actor has stopped"),
        (stopped_by(AskTimeout("/till did not answer")), "an actor did not answer in time"),
        (stopped_by(KeyError("tea")), ""),
        (stopped_by(ExceptionGroup("both", [AskTimeout("a"), KeyError("tea")])), ""),
        (ExceptionGroup("both", [stopped_by(None), AskTimeout("a")]), "an actor has stopped"),
        (ChannelCancelled("over"), "a channel was cancelled"),
        (ChannelCancelled("over", reason="sold out"), "sold out"),
        (KeyError("tea"), ""),
        (caused(KeyError("tea"), AskTimeout("a")), ""),
        (caused(AskTimeout("a"), KeyError("tea")), "an actor did not answer in time"),
    ],
)
def test_the_loss_of_an_error(error: BaseException, loss: str) -> None:
    """An actor that failed on the question has lost what its own error says, and otherwise it failed itself."""
    assert loss_of(error) == loss
