"""One counter behind two doors: HTTP by FastAPI on uvicorn, and RSocket, in one asyncio program."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.request import Request, urlopen

import attrs
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from levada.actors import rsocket
from levada.framework import Actor, ActorSystem, Asks, Ref, Sender, aio, channel, handles, message
from levada.framework.errors import ReceiverClosed


@message("counter.Add")
class Add(Asks[int]):
    """The answer is the new total."""

    n: int


@message("counter.Follow")
class Follow:
    totals: Sender[int]


class Counter(Actor[Add | Follow]):
    total: int = 0
    followers: list[Sender[int]] = attrs.field(factory=list)

    @handles
    def add(self, m: Add) -> int:
        self.total += m.n
        for follower in list(self.followers):
            try:
                follower.send_nowait(self.total)
            except ReceiverClosed:
                self.followers.remove(follower)
        return self.total

    @handles
    def follow(self, m: Follow) -> None:
        self.followers.append(m.totals.unreliable(10))  # a slow reader misses totals, and holds up nobody


def make_app() -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aio.open_in_loop(ActorSystem("counter")) as portal:
            counter = portal.system.spawn(Counter)
            door = rsocket.serve(portal.system, "rsocket+tcp://127.0.0.1:0", counter)
            async with portal.enter(door) as listener:
                app.state.portal, app.state.counter, app.state.url = portal, counter, listener.url
                yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/add/{n}")
    async def add(n: int) -> int:
        portal: aio.Portal = app.state.portal
        counter: Ref[Add | Follow] = app.state.counter
        return await portal.ask(counter, Add(n))

    @app.get("/totals/{count}")
    async def totals(count: int) -> StreamingResponse:
        portal: aio.Portal = app.state.portal
        counter: Ref[Add | Follow] = app.state.counter
        sender, receiver = channel(int)
        counter.tell(Follow(sender))  # a guest of this loop: what does not wait needs no portal

        async def lines() -> AsyncIterator[str]:
            with receiver:
                async for total in portal.iterate(receiver):
                    yield f"{total}\n"
                    if total >= count:
                        return

        return StreamingResponse(lines(), media_type="text/plain")

    return app


async def main() -> None:
    app = make_app()
    # Bound and listening before uvicorn starts, so that the first request need not wait for it.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def request(method: str, path: str) -> str:
            with urlopen(Request(base + path, method=method), timeout=20) as answer:
                text: str = answer.read().decode()
                return text

        by_http = int(await asyncio.to_thread(request, "POST", "/add/2"))
        portal: aio.Portal = app.state.portal
        async with portal.enter(rsocket.connect(portal.system, app.state.url)) as peer:
            by_rsocket = await portal.run(peer.request_response, Add(40))
        server.should_exit = True
        await serving
    assert portal.system.phase == "over"
    print(f"{by_http} by HTTP and {by_rsocket} by RSocket: one counter, and nothing is left")


if __name__ == "__main__":
    asyncio.run(main())
