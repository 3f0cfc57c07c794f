"""Metrics of connections and listeners, for every protocol, over memory carriers."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'levada[prometheus]'")

from levada.actors import aqueduct, lumberjack, rsocket
from levada.actors.authentication import Credentials, Refused
from levada.actors.metrics import Metrics
from levada.framework import Actor, ActorSystem, Identity, handles
from levada.transports.core import MAX_CONNECTIONS

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
                        ("levada_connections_failed_total", scheme, "server"): 0,
                        ("levada_connections_failed_total", scheme, "client"): 0,
                    }
                    assert part(found, "levada_requests", "levada_streams", "levada_rsocket") == {
                        ("levada_streams", scheme, "server"): 0,
                        ("levada_streams", scheme, "client"): 0,
                        ("levada_requests_sent_total", scheme, "client"): round_,
                        ("levada_requests_sent_total", scheme, "server"): 0,
                        ("levada_requests_received_total", scheme, "client"): 0,
                        ("levada_requests_received_total", scheme, "server"): round_,
                        ("levada_rsocket_sessions_resumed_total", "client"): 0,
                        ("levada_rsocket_sessions_resumed_total", "server"): 0,
                        ("levada_rsocket_fired_dropped_total", "client"): 0,
                        ("levada_rsocket_fired_dropped_total", "server"): 0,
                    }
                    assert part(found, "levada_clients") == {
                        ("levada_clients", url, scheme): 1,
                        ("levada_clients_limit", url, scheme): MAX_CONNECTIONS,
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


class Desk(Actor[str]):
    @handles
    def work(self, m: str) -> None:
        pass


async def test_aqueduct(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        metrics = Metrics(system)
        url = "aqueduct+memory://desk"
        for round_ in (1, 2):
            async with (
                aqueduct.serve(system, url, Desk, str),
                aqueduct.connect(system, url, str) as peer,
            ):
                for _ in range(5):
                    await peer.send("x" * 100)
                await wait_all_tasks_blocked()
                found = await scrape(metrics)
                assert part(found, "levada_connections_opened") == {
                    ("levada_connections_opened_total", "aqueduct", "server"): round_,
                    ("levada_connections_opened_total", "aqueduct", "client"): round_,
                }
                assert part(found, "levada_aqueduct") == {
                    ("levada_aqueduct_channels", "server"): 1,
                    ("levada_aqueduct_channels", "client"): 1,
                    ("levada_aqueduct_messages_sent_total", "server"): 0,
                    ("levada_aqueduct_messages_sent_total", "client"): 5 * round_,
                    ("levada_aqueduct_messages_received_total", "server"): 5 * round_,
                    ("levada_aqueduct_messages_received_total", "client"): 0,
                    ("levada_aqueduct_held_bytes", "server"): 0,
                    ("levada_aqueduct_held_bytes", "client"): 0,
                }
                assert found["levada_streams", "aqueduct", "client"] >= 1
        ended = await scrape(metrics)
        assert ended["levada_aqueduct_messages_received_total", "server"] == 10
        assert bytes_of(ended)["aqueduct", "client"] > 1000
        assert ("levada_aqueduct_channels", "server") not in ended


class Sink(Actor[lumberjack.Unit]):
    @handles
    def take(self, m: lumberjack.Unit) -> None:
        pass


async def test_lumberjack(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        metrics = Metrics(system)
        url = "lumberjack+memory://logs"
        sink = system.spawn(Sink)
        for round_ in (1, 2):
            async with (
                lumberjack.serve(system, url, sink),
                lumberjack.connect(system, url) as writer,
            ):
                for number in range(10):
                    await writer.send({"line": number})
                await writer.flush()
                found = await scrape(metrics)
                assert found["levada_lumberjack_events_received_total", url] == 10 * round_
                assert found["levada_lumberjack_events_sent_total",] == 10 * round_
                assert found["levada_lumberjack_events_acked_total",] == 10 * round_
                assert found["levada_lumberjack_unacked_events",] == 0
                assert found["levada_lumberjack_held_bytes", url] == 0
                assert found["levada_clients", url, "lumberjack"] == 1
                assert part(found, "levada_connections_opened") == {
                    ("levada_connections_opened_total", "lumberjack", "server"): round_,
                    ("levada_connections_opened_total", "lumberjack", "client"): round_,
                }
                assert bytes_of(found)["lumberjack", "client"] > 0
        ended = await scrape(metrics)
        assert ended["levada_lumberjack_events_received_total", url] == 20
        assert ended["levada_lumberjack_events_acked_total",] == 20
        assert ("levada_lumberjack_unacked_events",) not in ended
        sent = bytes_of(ended)["lumberjack", "client"]
        assert ended["levada_connection_received_bytes_total", "lumberjack", "server"] == sent


class NeverDone(Actor[lumberjack.Unit]):
    @handles
    async def take(self, m: lumberjack.Unit) -> None:
        await trio.sleep_forever()


async def test_lost_connections_of_a_writer_are_counted_each(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        metrics = Metrics(system)
        url = "lumberjack+memory://logs"
        sink = system.spawn(NeverDone)
        async with lumberjack.connect(system, url) as writer:
            await writer.send({"line": 1})  # stays unacked, so the writer dials again
            for round_ in (1, 2):
                async with lumberjack.serve(system, url, sink):
                    await trio.sleep(100)
                await trio.sleep(100)
                found = await scrape(metrics)
                assert found["levada_connections_opened_total", "lumberjack", "client"] == round_
                assert found["levada_connections_lost_total", "lumberjack", "client"] == round_
                assert found["levada_connections_failed_total", "lumberjack", "client"] > round_
                failed = found["levada_connections_failed_total", "lumberjack", "client"]
                assert found["levada_lumberjack_faults_total",] == round_ + failed
