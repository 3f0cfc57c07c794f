"""The auction in browsers: FastAPI takes bids, and shows prices as server-sent events. Its processes are clients of the nodes.

::

    uvicorn web:app --timeout-graceful-shutdown 5
    curl -X PUT 'localhost:8000/lots/7?title=Clock&cents=1000&seconds=60'
    curl -N localhost:8000/lots/7/prices
    curl -X POST 'localhost:8000/lots/7/bids/1?bidder=anna&cents=1500'
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

import client
from auction import Bid, Open
from fastapi import FastAPI, Path, Query
from fastapi.responses import StreamingResponse

from levada.framework import ActorSystem, aio

Id = Annotated[str, Path(min_length=1, max_length=100)]
Text = Annotated[str, Query(min_length=1, max_length=100)]
Number = Annotated[int, Query(gt=0, lt=1 << 53)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with aio.open_in_loop(ActorSystem("web")) as portal, portal.enter(client.connect(portal.system)) as house:
        app.state.portal, app.state.house = portal, house
        yield


app = FastAPI(lifespan=lifespan)


def here() -> tuple[aio.Portal, client.House]:
    return app.state.portal, app.state.house


@app.put("/lots/{lot}")
async def offer(lot: Id, title: Text, cents: Number, seconds: Number) -> bool:
    portal, house = here()
    return await portal.run(house.order, lot, "offer", Open(title, cents, seconds))


@app.post("/lots/{lot}/bids/{id}")
async def bid(lot: Id, id: Id, bidder: Text, cents: Number) -> bool:
    """Bid. The browser makes the id, and keeps it when it tries again."""
    portal, house = here()
    return await portal.run(house.order, lot, f"bid {id}", Bid(bidder, cents))


@app.get("/lots")
async def browse() -> list[dict[str, Any]]:
    portal, house = here()
    return [price.as_json() for price in await portal.run(house.browse)]


@app.get("/lots/{lot}/prices")
async def prices(lot: Id) -> StreamingResponse:
    portal, house = here()

    async def events() -> AsyncIterator[str]:
        async with portal.enter(aclosing(house.follow(lot))) as prices:
            async for price in portal.iterate(prices):
                yield f"data: {json.dumps(price.as_json())}\n\n"
        yield "event: closed\ndata:\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
