"""Mistakes of the caller are refused where they are made, with the cure; and what is logged is what is used."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import pytest
from trio.testing import MockClock

from levada.actors.interop import maop as interop
from levada.actors.maop import Call, Handler, OperationActor, PeerConfig, connect, serve
from levada.actors.maop.config import fit_carrier
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError
from levada.transports.quic import QuicConfig

from .conftest import TOKENS, Start, echo


@pytest.mark.rule("MA-18")
async def test_ma18_a_token_that_does_not_fit_is_refused_at_once(scheme: str) -> None:
    """65535 bytes at most, and bytes."""
    async with ActorSystem() as system, serve(system, f"maop+{scheme}://desk", {}, authenticate=TOKENS) as listener:
        with pytest.raises(ConfigurationError, match="the token has 70,000 bytes, wanted at most 65,535"):
            async with connect(system, listener.url, token=bytes(70_000)):
                pass
        with pytest.raises(TypeError, match="the token is str, wanted bytes"):
            async with connect(system, listener.url, token="secret"):  # type: ignore[arg-type] # that is it
                pass


def test_a_handler_that_is_not_async_is_refused() -> None:
    function: Any = lambda call: b"x"  # noqa: E731 - as somebody writes it
    with pytest.raises(ConfigurationError, match="is not a handler: give an async function"):
        Handler(function)

    class Unfinished(OperationActor):
        """Has no `execute`."""

    with pytest.raises(ConfigurationError, match="Unfinished has no method execute"):
        Handler(Unfinished)

    class Worker(Unfinished):
        async def execute(self, call: Call) -> bytes:
            return b""

    assert Handler(Worker).code is None
    assert Handler(lambda: Worker()).code is None


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
async def test_a_timeout_is_more_than_nothing(start: Start, timeout: float, autojump_clock: MockClock) -> None:
    async with start({101: echo}) as ends:
        for call in (ends.peer.request(101, timeout=timeout), ends.peer.message(101, timeout=timeout)):
            with pytest.raises(ValueError, match="wanted more than 0 seconds"):
                await call
        with pytest.raises(ValueError, match="wanted more than 0 seconds"):
            await ends.peer.test(timeout=timeout)
        with pytest.raises(ValueError, match="wanted more than 0 seconds"):
            async with ends.peer.open_request(101, timeout=timeout):
                pass
        assert await ends.peer.request(101, b"x", timeout=0.001) == b"x"


@pytest.mark.rule("MA-132")
async def test_ma132_a_step_says_how_it_went(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Success is not logged as the absence of a result, by neither side."""
    caplog.set_level(logging.DEBUG, "levada.actors.maop")
    async with start({101: echo}) as ends:
        await ends.peer.request(101, b"x")
    steps = [r.getMessage() for r in caplog.records if "msg_id 101" in r.getMessage()]
    assert [step.rpartition("result ")[2] for step in steps if " done:" in step] == ["ok", "ok"]


def test_the_settings_that_are_logged_are_those_of_the_connection() -> None:
    config = fit_carrier("maop://localhost:4433", PeerConfig(carrier=QuicConfig(datagrams=True)))
    assert (config.carrier.alpn, config.carrier.datagrams, config.carrier.early_data) == (("maop/1",), False, False)
    assert fit_carrier("maop://localhost:4433", config) == config
    assert fit_carrier("maop+memory://desk", PeerConfig()).carrier.shape == "connection"


async def test_control_backlog_is_one_sample_for_any_number_of_clients(start: Start) -> None:
    async with start({101: echo}) as ends, connect(ends.system, ends.listener.url, token=b"secret") as other:
        await other.request(101, b"x")
        found = [sample[1:] for sample in ends.listener.metrics.samples() if sample[0].name == "maop_control_backlog"]
        assert found == [(0, ("fullest",))]


def test_interop_takes_the_settings_of_signals() -> None:
    parser = argparse.ArgumentParser()
    interop.add_arguments(parser)
    args = parser.parse_args(["--proceed-coalesce", "20", "--control-batch-max", "3"])
    assert (args.proceed_coalesce, args.control_batch_max) == (20.0, 3)
    for wrong in (["--proceed-coalesce", "-1"], ["--control-batch-max", "0"], ["--control-batch-max", "70000"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
