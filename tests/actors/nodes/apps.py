"""Apps and actors of the tests, which child processes import."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import trio

from levada.actors.nodes import nodes_of
from levada.framework import Actor, ActorSystem, Asks, Ref, handles, message

from .single import Where


@message("tests.nodes.Add")
class Add(Asks[int]):
    """Add a number; the answer is the total."""

    n: int


@message("tests.nodes.Fail")
class Fail:
    """Let the handler raise."""


@message("tests.nodes.Leave")
class Leave(Asks[None]):
    """Let the actor stop."""


class Counter(Actor[Add | Where | Fail | Leave]):
    """Counts from a start."""

    total: int = 0

    def started(self) -> None:
        """Check the start."""
        if self.total < 0:
            raise ValueError(f"a counter starts at 0 or more, not {self.total}")

    def __attrs_post_init__(self) -> None:
        if self.total == 13:
            raise ValueError("no counter starts at 13")

    @handles
    def add(self, m: Add) -> int:
        """Count."""
        self.total += m.n
        return self.total

    @handles
    def where(self, m: Where) -> tuple[int, str]:
        """Tell."""
        return os.getpid(), self.system.name

    @handles
    def fail(self, m: Fail) -> None:
        """Fail."""
        raise RuntimeError("as told")

    @handles
    def leave(self, m: Leave) -> None:
        """Stop."""
        self.stop()


@message("tests.nodes.SpawnOn")
class SpawnOn(Asks[Ref[Any]]):
    """Spawn a counter on a node, from another node."""

    on: str
    name: str | None = None


@message("tests.nodes.Ask")
class Ask(Asks[int]):
    """Ask a counter."""

    counter: Ref[Any]


@message("tests.nodes.GetMembers")
class GetMembers(Asks[list[tuple[str, str, str]]]):
    """Ask for the name, the state and the URL of each member, as a node knows them."""


class Friend(Actor[SpawnOn | Ask | GetMembers]):
    """Uses the fleet from a node."""

    @handles
    def members(self, m: GetMembers) -> list[tuple[str, str, str]]:
        """Tell."""
        return [(member.name, member.state.value, member.url) for member in nodes_of(self.system).members]

    @handles
    async def spawn_on(self, m: SpawnOn) -> Ref[Any]:
        """Spawn."""
        return await nodes_of(self.system).spawn(Counter, 40, on=m.on, name=m.name)

    @handles
    async def ask(self, m: Ask) -> int:
        """Ask."""
        total: int = await m.counter.ask(Add(1))
        return total


@message("tests.nodes.Watch")
class Watch(Asks[str]):
    """Wait for the end of an actor; the answer is the name of the reason's class."""

    target: Ref[Any]


@message("tests.nodes.Quit")
class Quit:
    """Let the actor call `sys.exit`."""

    code: int


@message("tests.nodes.Interrupt")
class Interrupt:
    """Let the actor raise what Ctrl-C raises."""


@message("tests.nodes.QuitInATask")
class QuitInATask:
    """Let a task of a nursery in the handler call `sys.exit`."""

    code: int


class Quitter(Actor[Quit | QuitInATask | Interrupt | Where]):
    """Ends its process, as no actor should."""

    @handles
    def interrupt(self, m: Interrupt) -> None:
        """Exit."""
        raise KeyboardInterrupt

    @handles
    def where(self, m: Where) -> tuple[int, str]:
        """Tell."""
        return os.getpid(), self.system.name

    @handles
    async def quit_in_a_task(self, m: QuitInATask) -> None:
        """Exit."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._quit, m.code)

    async def _quit(self, code: int) -> None:
        sys.exit(code)

    @handles
    def quit(self, m: Quit) -> None:
        """Exit."""
        sys.exit(m.code)


class Watcher(Actor[Watch]):
    """Waits for ends."""

    @handles
    async def watch_it(self, m: Watch) -> str:
        """Wait."""
        return type(await m.target.terminated()).__name__


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Registers a counter."""
    counter: Ref[Add | Where | Fail | Leave] = system.spawn(Counter, 100)
    system.registry.register("counter", counter)
    yield


async def fails(system: ActorSystem) -> AsyncIterator[None]:
    """An app that fails before it is ready."""
    raise RuntimeError("no such table")
    yield


async def fails_in_a_task(system: ActorSystem) -> AsyncIterator[None]:
    """An app one of whose tasks fails before it is ready."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_fail)
        await trio.sleep_forever()
        yield


async def _fail() -> None:
    raise RuntimeError("no such queue")


async def exits(system: ActorSystem) -> AsyncIterator[None]:
    """An app that ends its process before it is ready."""
    sys.exit("SHOP_DATABASE is not set")
    yield


async def exits_late(system: ActorSystem) -> AsyncIterator[None]:
    """An app that ends its process when it is to end."""
    yield
    sys.exit("cannot flush")


async def interrupts(system: ActorSystem) -> AsyncIterator[None]:
    """An app that ends its process as Ctrl-C does, before it is ready."""
    raise KeyboardInterrupt
    yield


async def interrupts_late(system: ActorSystem) -> AsyncIterator[None]:
    """An app that ends its process as Ctrl-C does, in a nursery, when it is to end."""
    async with trio.open_nursery():
        yield
        raise KeyboardInterrupt


async def slow_to_end(system: ActorSystem) -> AsyncIterator[None]:
    """An app that needs a second to end."""
    yield
    await trio.sleep(1)


async def slow(system: ActorSystem) -> AsyncIterator[None]:
    """An app that is ready after a second."""
    await trio.sleep(1)
    yield


async def fails_slowly(system: ActorSystem) -> AsyncIterator[None]:
    """An app that fails after a second, before it is ready."""
    await trio.sleep(1)
    raise RuntimeError("no such table")
    yield


async def hangs(system: ActorSystem) -> AsyncIterator[None]:
    """An app that is never ready, and does not notice that it is to end."""
    await trio.sleep_forever()
    yield


async def fails_late(system: ActorSystem) -> AsyncIterator[None]:
    """An app that fails when it is to end."""
    yield
    raise RuntimeError("cannot flush")


async def yields_twice(system: ActorSystem) -> AsyncIterator[None]:
    """An app that yields once more when it is to end."""
    yield
    yield


async def yields_twice_within(system: ActorSystem) -> AsyncIterator[None]:
    """The same, with open work around it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        yield
        yield


async def yields_in_a_loop(system: ActorSystem) -> AsyncIterator[None]:
    """An app that begins again after an error."""
    while True:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                yield
                raise RuntimeError("cannot flush")
        except Exception:  # noqa: BLE001 - the mistake
            pass


def not_async(system: ActorSystem) -> Iterator[None]:
    """A generator function, but not an async one."""
    yield


def not_an_app() -> None:
    """A function without a system."""


async def stubborn(system: ActorSystem) -> AsyncIterator[None]:
    """An app that ignores cancellation."""
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()


async def deaf(system: ActorSystem) -> AsyncIterator[None]:
    """An app whose event loop is blocked once it is ready."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_block)
        yield


async def _block() -> None:
    await trio.sleep(0.3)
    while True:
        time.sleep(60)  # noqa: ASYNC251 - it blocks on purpose


async def native(system: ActorSystem) -> AsyncIterator[None]:
    """Needs 1.5 s to start, in native code that holds the interpreter's lock, as imports do."""
    ctypes.PyDLL(None).usleep(1_500_000)
    yield


async def short(system: ActorSystem) -> AsyncIterator[None]:
    """An app that kills its process soon after it is ready."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_exit)
        yield


async def _exit() -> None:
    await trio.sleep(0.05)
    os._exit(3)


async def talks(system: ActorSystem) -> AsyncIterator[None]:
    """An app that writes to stdout, stderr and the log."""
    print("plain \x1b[31m text")
    print("x" * 100_000, file=sys.stderr)
    logging.getLogger("shop").warning("stock is low")
    logging.getLogger("shop").error("two\nlines")
    try:
        raise ValueError("no price\x1e2000-01-01 forged")
    except ValueError:
        logging.getLogger("shop").exception("failed")
    logging.getLogger("shop").error("%s", "\n".join(map(str, range(300))))
    for odd in (_fail_in_a_thread, _fail_in_a_finalizer, _forget_to_await):
        odd()
    sys.stdout.write("no end of line")
    sys.stdout.flush()
    yield


def _fail_in_a_thread() -> None:
    def pack() -> None:
        raise KeyError("tea")

    thread = threading.Thread(target=pack, name="packer")
    thread.start()
    thread.join()


def _fail_in_a_finalizer() -> None:
    class Box:
        def __del__(self) -> None:
            raise OSError("no lid")

    Box()


def _forget_to_await() -> None:
    _exit()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]


async def mute(system: ActorSystem) -> AsyncIterator[None]:
    """An app that is never ready."""
    await trio.sleep_forever()
    yield


@message("tests.nodes.Facts")
class Facts(Asks[dict[str, Any]]):
    """Ask what a process is allowed."""


class Reporter(Actor[Facts]):
    """Tells."""

    @handles
    def facts(self, m: Facts) -> dict[str, Any]:
        """Tell."""
        open_files = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the list itself was open
                open_files.append(os.readlink(f"/proc/self/fd/{number}"))
        return {
            "nice": os.nice(0),
            "cpus": sorted(os.sched_getaffinity(0)),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "env": os.environ.get("SHOP"),
            "stdin": os.readlink("/proc/self/fd/0"),
            "open": [name for name in open_files if name.startswith("/") and name != "/dev/null"],
            "group": os.getpgid(0) == os.getpid(),
            "frozen": gc.get_freeze_count() > 10_000,
        }


async def forks(system: ActorSystem) -> AsyncIterator[None]:
    """An app with a forked process that keeps the connection open for a while."""
    if os.fork() == 0:
        time.sleep(20)  # noqa: ASYNC251 - in another process
        os._exit(0)
    yield
