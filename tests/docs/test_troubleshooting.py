"""Each heading under "Errors" in troubleshooting.md is in the text of an error that its test here raises."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from levada.actors import rsocket
from levada.framework import Actor, ActorSystem, Asks, bounded, handles, message
from levada.framework.codec import Codec

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/troubleshooting.md").read_text("utf-8")
ERRORS = PAGE.partition("\n## Errors\n")[2].partition("\n## Questions\n")[0]
HEADINGS = [each.strip("`") for each in re.findall(r"^### (.+)$", ERRORS, re.MULTILINE)]
Mistake = Callable[[], object]
MISTAKES: dict[str, Mistake] = {}


def mistake(text: str) -> Callable[[Mistake], Mistake]:
    """Note which heading a mistake belongs to."""

    def note(function: Mistake) -> Mistake:
        MISTAKES[text] = function
        return function

    return note


@message
class Question(Asks[int]):
    pass


@message
class Other(Asks[int]):
    pass


class Clerk(Actor[Question]):
    @handles
    async def answer(self, m: Question) -> int:
        await trio.sleep(100)
        return 1


def in_system(function: Callable[[ActorSystem], Awaitable[object]]) -> None:
    async def main() -> None:
        async with ActorSystem(stop_timeout=0.01) as system:
            try:
                await function(system)
            finally:
                for ref in MADE:
                    ref.kill()
                MADE.clear()

    trio.run(main)


MADE: list[Any] = []


def clerk(system: ActorSystem, **options: Any) -> Any:
    MADE.append(system.spawn(Clerk, **options))
    return MADE[-1]


@mistake("an actor system runs on trio: start the program with trio.run(main)")
def asyncio_instead() -> None:
    async def main() -> None:
        async with ActorSystem():
            pass

    asyncio.run(main())


@mistake("no running event loop")
def asyncio_in_a_handler() -> None:
    class Sleeper(Actor[Question]):
        @handles
        async def answer(self, m: Question) -> int:
            await asyncio.sleep(1)
            return 1

    async def ask(system: ActorSystem) -> None:
        await system.spawn(Sleeper).ask(Question())

    in_system(ask)


@mistake("Cell' object has no attribute")
def a_method_of_a_ref() -> None:
    async def call(system: ActorSystem) -> None:
        clerk(system).answer(Question())

    in_system(call)


@mistake("spawn() got an unexpected keyword argument")
def arguments_by_name() -> None:
    async def spawn(system: ActorSystem) -> None:
        system.spawn(Clerk, desk=5)  # type: ignore[call-overload]

    in_system(spawn)


@mistake("NoneType can't be used in 'await' expression")
def await_tell() -> None:
    async def tell(system: ActorSystem) -> None:
        await clerk(system).tell(Question())

    in_system(tell)


@mistake("was not entered: async with ActorSystem() as system")
def not_entered() -> None:
    ActorSystem().spawn(Clerk)


@mistake("wanted an Actor class or a factory")
def an_object() -> None:
    async def spawn(system: ActorSystem) -> None:
        system.spawn(Clerk())  # type: ignore[call-overload]

    in_system(spawn)


@mistake("has no handler for it")
def no_method() -> None:
    class Lazy(Actor[Question]):
        pass


@mistake("has no handler for")
def another_question() -> None:
    async def ask(system: ActorSystem) -> None:
        await clerk(system).ask(Other())

    in_system(ask)


@mistake("annotate 'm' with the message class")
def no_annotation() -> None:
    class Plain(Actor):
        @handles
        def take(self, m): ...  # type: ignore[no-untyped-def]


@mistake("yields, but the runtime does not run generators")
def a_generator() -> None:
    class Many(Actor[Question]):
        @handles
        def answer(self, m: Question) -> Any:
            yield 1


@mistake("all instances would share the default")
def a_shared_list() -> None:
    @message
    class Order:
        lines: list[int] = []  # noqa: RUF012


@mistake("has an __init__ of its own")
def own_init() -> None:
    @message
    class Order:
        def __init__(self, n: int) -> None:
            self.n = n


@mistake("answers with str, and")
def another_answer() -> None:
    class Text(Actor[Question]):
        @handles  # pyright: ignore[reportGeneralTypeIssues]
        def answer(self, m: Question) -> str:
            return ""


@mistake("is taken by")
def the_same_tag() -> None:
    @message("troubleshooting.same")
    class One:
        pass

    @message("troubleshooting.same")
    class Two:
        other: int


class Undecorated:
    pass


@mistake("annotate the value, or use a @message class")
def not_a_message() -> None:
    Codec().encode(Undecorated())


@mistake("the module that defines this message must be imported here")
def not_imported() -> None:
    data = Codec().encode(Question())
    Codec().decode(bytes(data).replace(b"Question", b"Quostion"), Any)


@mistake("none of them would ever go on")
def a_circle() -> None:
    class Narcissus(Actor[Question]):
        @handles
        async def answer(self, m: Question) -> int:
            return await self.ref.ask(Question())

    async def ask(system: ActorSystem) -> None:
        await system.spawn(Narcissus).ask(Question())

    in_system(ask)


@mistake("did not answer")
def too_slow() -> None:
    async def ask(system: ActorSystem) -> None:
        await clerk(system).ask(Question(), timeout=0.0)

    in_system(ask)


@mistake("the handler failed")
def a_handler_of_rsocket() -> None:
    async def handler(_: rsocket.Request) -> bytes:
        raise KeyError("not told")

    async def request(system: ActorSystem) -> None:
        async with (
            rsocket.serve(system, "rsocket+memory://desk", handler) as listener,
            rsocket.connect(system, listener.url) as peer,
        ):
            await peer.request_response(b"x")

    in_system(request)


@mistake("has stopped")
def ended() -> None:
    async def ask(system: ActorSystem) -> None:
        ref = clerk(system)
        ref.stop()
        await ref.terminated()
        await ref.ask(Question())

    in_system(ask)


@mistake("send() waits for room, or give it a larger one")
def full() -> None:
    async def tell(system: ActorSystem) -> None:
        ref = clerk(system, mailbox=bounded(1))
        for _ in range(3):
            ref.tell(Question())

    in_system(tell)


@mistake("lives already")
def the_same_name() -> None:
    async def spawn(system: ActorSystem) -> None:
        clerk(system, name="clerk")
        clerk(system, name="clerk")

    in_system(spawn)


@mistake("from a foreign thread or trio run; use ref.from_thread")
def another_thread() -> None:
    async def tell(system: ActorSystem) -> None:
        await trio.to_thread.run_sync(clerk(system).tell, Question())

    in_system(tell)


async def answer(request: rsocket.Request) -> bytes:
    return b""


@mistake("another process or listener has this address")
def a_taken_port() -> None:
    async def serve(system: ActorSystem) -> None:
        async with (
            rsocket.serve(system, "rsocket+tcp://127.0.0.1:0", answer) as first,
            rsocket.serve(system, first.url, answer),
        ):
            pass

    in_system(serve)


@mistake("Connection refused")
def no_server() -> None:
    async def connect(system: ActorSystem) -> None:
        async with rsocket.serve(system, "rsocket+tcp://127.0.0.1:0", answer) as listener:
            url = listener.url
        async with rsocket.connect(system, url):
            pass

    in_system(connect)


@mistake("this journal open")
def two_journals() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from levada.actors.journal import Store

    columns = pyarrow.schema([("n", pyarrow.int64())])
    with tempfile.TemporaryDirectory() as folder, Store.open(folder, columns), Store.open(folder, columns):
        pass


@mistake("pip install 'levada[…]'")
def a_missing_extra() -> None:
    code = "import sys; sys.modules['aioquic'] = None; from levada.actors.cli import main; sys.exit(main(['call', 'aqueduct://127.0.0.1:1']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    raise RuntimeError(re.sub(r"levada\[\w+\]", "levada[…]", done.stderr))


def test_each_heading_has_a_mistake() -> None:
    assert set(HEADINGS) == MISTAKES.keys()
    assert len(HEADINGS) >= 20


def texts(error: BaseException) -> str:
    """The text of an error, its notes and its parts."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return "\n".join([str(error), *map(texts, parts)])


@pytest.mark.handler_fails
@pytest.mark.loopback
@pytest.mark.parametrize("heading", HEADINGS)
def test_the_error_has_the_text_of_the_heading(heading: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        MISTAKES[heading]()
    assert heading in texts(caught.value)
