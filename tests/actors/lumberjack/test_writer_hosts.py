"""URLs of readers, and whose turn it is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from levada.actors.lumberjack.balance import HostConfig, Rota, targets
from levada.framework.errors import ConfigurationError
from levada.transports.lumberjack import WriterConfig


def test_urls_name_the_carrier_and_a_usual_port() -> None:
    hosts = HostConfig()
    found = targets(
        ["lumberjack://a", "lumberjack+tls://[::1]", "lumberjack+tcp://c:99", "lumberjack+memory://d"], hosts
    )
    assert [target.carrier_url for target in found] == ["tcp://a:5044", "tls://[::1]:5044", "tcp://c:99", "memory://d"]


@pytest.mark.parametrize("url", ["tcp://a:1", "lumberjack://", "lumberjack://a:b", "lumberjack://a/path", "a:5044", []])
def test_a_url_that_is_none_is_a_mistake(url: Any) -> None:
    with pytest.raises(ConfigurationError):
        targets(url, HostConfig())


def test_pauses_of_a_rota_are_bounded_for_ever() -> None:
    hosts = targets(["lumberjack://a", "lumberjack://b"], HostConfig())
    rota = Rota(hosts, WriterConfig(), random.Random(1))
    pauses = [rota.fault() for _ in range(3000)]
    assert pauses[0::2] == [0.0] * 1500
    assert max(pauses) <= 60.0
