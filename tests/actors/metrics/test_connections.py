"""Metrics of connections and listeners, for every protocol, over memory carriers."""

from __future__ import annotations

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'levada[prometheus]'")

from levada.actors import rsocket
from levada.actors.authentication import Credentials, Refused
from levada.actors.metrics import Metrics
from levada.framework import ActorSystem, Identity

from .scraped import Found, part, scrape


async def answer(request: rsocket.Request) -> bytes:
    return request.data


def bytes_of(found: Found) -> dict[tuple[str, ...], float]:
    return {key[1:]: value for key, value in found.items() if key[0] == "levada_connection_sent_bytes_total"}


@pytest.mark.parametrize("scheme", ["rsocket", "reactivesocket"])
async def test_rsocket(scheme: str, autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        metrics = Metrics(system)
        url = f"{scheme}+memory://desk"
        async with rsocket.serve(system, url, answer):
            for round_ in (1, 2):
                async with rsocket.connect(system, url) as peer:
                    await peer.request_response(b"x" * 1000)
                    found = await scrape(metrics)
                    assert part(found, "levada_connections") == {
                        ("levada_connections", scheme, "server", "open"): 1,
                        ("levada_connections", scheme, "client", "open"): 1,
                        ("levada_connections_opened_total", scheme, "server"): round_,
                        ("levada_connections_opened_total", scheme, "client"): round_,
                        ("levada_connections_lost_total", scheme, "server"): round_ - 1,  # left by the client
                        ("levada_connections_lost_total", scheme, "client"): 0,
                    }
                    assert part(found, "levada_clients") == {
                        ("levada_clients", url, scheme): 1,
                        ("levada_clients_limit", url, scheme): 10_000,
                        ("levada_clients_refused_total", url, scheme): 0,
                    }
            await wait_all_tasks_blocked()
            found = await scrape(metrics)
            assert not part(found, "levada_connections_now")
            sent = bytes_of(found)
            assert sent[scheme, "client"] > 2000
            for side, other in (("client", "server"), ("server", "client")):
                received = found["levada_connection_received_bytes_total", scheme, other]
                assert received == sent[scheme, side]
        ended = await scrape(metrics)
        assert bytes_of(ended) == sent
        assert ended["levada_clients_refused_total", url, scheme] == 0
        assert ("levada_clients", url, scheme) not in ended


async def test_refused_clients_and_failed_connections(autojump_clock: MockClock) -> None:
    async def admit(credentials: Credentials) -> Identity | Refused:
        return Refused("no")

    async with ActorSystem() as system:
        metrics = Metrics(system)
        url = "rsocket+memory://closed"
        async with rsocket.serve(system, url, answer, authenticate=admit):
            for _ in range(2):
                with pytest.raises(rsocket.SetupRejected):
                    async with rsocket.connect(system, url) as peer:
                        await peer.request_response(b"x")
            found = await scrape(metrics)
            assert found["levada_clients_refused_total", url, "rsocket"] == 2
        with pytest.raises(Exception, match=r"nobody|no |listen"):
            async with rsocket.connect(system, "rsocket+memory://nowhere"):
                pass
        found = await scrape(metrics)
        assert found["levada_clients_refused_total", url, "rsocket"] == 2
        assert found["levada_connections_failed_total", "rsocket", "client"] == 1
