"""Scrapes over HTTP, and registries that a program has."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import trio
from prometheus_client import CollectorRegistry, generate_latest
from trio.testing import MockClock

from levada.actors.health_server import Asked
from levada.actors.metrics import Metrics, MetricsCollector, Scrapes, render, serve_metrics
from levada.framework import Actor, ActorSystem, handles, message
from levada.framework.metrics import Metric, Series

from .scraped import read

OPEN = "application/openmetrics-text"
PROMETHEUS = f"{OPEN};version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@message
class Work:
    pass


class Idler(Actor[Work]):
    @handles
    def work(self, m: Work) -> None: ...


async def get(url: str, accept: str = "") -> tuple[str, dict[str, str], str]:
    """Return the status line, the headers and the body."""
    host, _, rest = url.removeprefix("http://").partition(":")
    port, _, path = rest.partition("/")
    request = f"GET /{path} HTTP/1.1\r\nHost: {host}\r\n" + (f"Accept: {accept}\r\n" if accept else "") + "\r\n"
    answer = b""
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(request.encode())
        async for data in stream:
            answer += data
    head, _, body = answer.decode().partition("\r\n\r\n")
    status, *fields = head.split("\r\n")
    return status, dict(field.split(": ", 1) for field in fields), body


@pytest.mark.loopback
async def test_prometheus_scrapes_a_program() -> None:
    async with ActorSystem() as system, serve_metrics(system, port=0) as url:
        system.spawn(Idler)
        status, headers, body = await get(url)
        assert status == "HTTP/1.1 200 OK"
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert read(body)["levada_actors", "Idler"] == 1
        status, headers, body = await get(url, PROMETHEUS)
        assert headers["Content-Type"].startswith(f"{OPEN}; version=1.0.0")
        assert "# UNIT levada_turn_seconds seconds\n" in body
        assert read(body)["levada_actors", "Idler"] == 1


@pytest.mark.parametrize("accept", [f"{OPEN}; version=x\r", f"{OPEN};version=9e9;escaping=\x00", ",;=,", "é" * 100])
async def test_an_odd_accept_header_chooses_and_does_no_more(accept: str) -> None:
    async with ActorSystem() as system:
        response = await Scrapes(Metrics(system)).answer(Asked("/metrics", accept))
        assert response.status == "200 OK"
        assert response.content_type.startswith(OPEN if accept.startswith(OPEN) else "text/plain")
        assert response.content_type.isprintable()


async def test_many_scrapes_cost_as_much_as_one(autojump_clock: MockClock) -> None:
    """For a second, or longer if it took long, they get the same figures."""

    class Counted(Metrics):
        passes = 0

        async def collect(self) -> Series:
            self.passes += 1
            return await super().collect()

    async with ActorSystem() as system:
        metrics = Counted(system)
        scrapes = Scrapes(metrics)
        async with trio.open_nursery() as nursery:
            for accept in 20 * ("", OPEN):
                nursery.start_soon(scrapes.answer, Asked("/metrics", accept))
        assert metrics.passes == 1
        await trio.sleep(10)
        await scrapes.answer(Asked("/metrics", ""))
        assert metrics.passes == 2


async def test_a_mistake_is_the_scrapes_alone_and_has_ten_lines_in_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Metrics):
        async def collect(self) -> Series:
            raise KeyError("secret")

    async with ActorSystem() as system:
        scrapes = Scrapes(Broken(system))
        for _ in range(20):
            response = await scrapes.answer(Asked("/metrics", ""))
            assert (response.status, response.body) == (
                "500 Internal Server Error",
                b"the scrape failed; see the log\n",
            )
        assert [record.getMessage() for record in caplog.records] == 10 * ["a scrape failed"]


async def test_a_registry_collects_from_another_thread() -> None:
    registry = CollectorRegistry()
    async with ActorSystem() as system:
        system.spawn(Idler)
        registry.register(MetricsCollector(Metrics(system)))
        found = read((await trio.to_thread.run_sync(generate_latest, registry)).decode())
        assert found["levada_actors", "Idler"] == 1
        with pytest.raises(RuntimeError, match="cannot be collected in the thread of trio"):
            generate_latest(registry)


def test_after_the_end_a_registry_finds_nothing() -> None:
    async def make() -> MetricsCollector:
        async with ActorSystem() as system:
            return MetricsCollector(Metrics(system))

    assert list(trio.run(make).collect()) == []


def test_a_registry_that_collects_at_the_end_finds_nothing() -> None:
    class Endless(Metrics):
        async def collect(self) -> Series:
            collecting.set()
            await trio.sleep_forever()
            raise AssertionError

    collecting = threading.Event()
    found: list[object] = []

    async def main() -> threading.Thread:
        async with ActorSystem() as system:
            thread = threading.Thread(
                target=lambda each: found.append(list(each.collect())), args=[MetricsCollector(Endless(system))]
            )
            thread.start()
            await trio.to_thread.run_sync(collecting.wait)
            return thread

    trio.run(main).join()
    assert found == [[]]


async def test_a_unit_is_named_once() -> None:
    for name in ("seconds", "wait_seconds"):
        series: Series = {Metric(name, "gauge", "How long.", ()): {(): 3}}
        assert (await render(series))[1].decode().endswith(f"# TYPE {name} gauge\n{name} 3.0\n")


async def test_more_figures_than_a_slice_are_written_in_a_thread() -> None:
    class Many(Metrics):
        async def collect(self) -> Series:
            from levada.framework import Metric

            return {Metric(f"desk_m{n}", "gauge", "Some."): {(): n} for n in range(1500)}

    async with ActorSystem() as system:
        response = await Scrapes(Many(system)).answer(Asked("/metrics", ""))
        assert len(read(response.body.decode())) == 1500


async def test_without_the_extra_the_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("prometheus_client", "levada.actors.metrics.rend"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delattr("levada.actors.metrics.rendering")
    text = r"pip install 'levada\[prometheus\]'"
    async with ActorSystem() as system:
        metrics: Any = Metrics(system)
        assert len(await metrics.collect()) > 10  # figures need no extra
        response = await Scrapes(metrics).answer(Asked("/metrics", ""))
        assert (response.status, response.body) == (
            "501 Not Implemented",
            b"metrics need prometheus-client: pip install 'levada[prometheus]'\n",
        )
        with pytest.raises(ModuleNotFoundError, match=text) as raised:
            async with serve_metrics(system, port=0):
                pass
        assert raised.value.name == "prometheus_client"
