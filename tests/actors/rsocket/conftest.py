"""A certificate for the tests over TLS and QUIC, and the settings of each carrier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from levada.transports.carriers import TlsConfig
from levada.transports.carriers.websocket import WebSocketConfig
from levada.transports.quic import QuicConfig


@attrs.frozen
class CarrierSettings:
    """What a URL and two configurations need to use one carrier."""

    url: str
    serving: Any = None
    dialling: Any = None


@pytest.fixture
def settings(certificate: Path, tmp_path: Path) -> Callable[[str], CarrierSettings]:
    """Make the settings of a carrier by its scheme."""
    serving = TlsConfig(certificate=certificate)
    dialling = TlsConfig(ca=certificate)

    def make(scheme: str) -> CarrierSettings:
        match scheme:
            case "memory":
                return CarrierSettings("memory://desk")
            case "unix":
                return CarrierSettings(f"unix://{tmp_path}/desk.socket")
            case "tls":
                return CarrierSettings("tls://127.0.0.1:0", serving, dialling)
            case "ws":
                return CarrierSettings("ws://127.0.0.1:0/desk")
            case "wss":
                return CarrierSettings(
                    "wss://127.0.0.1:0/", WebSocketConfig(tls=serving), WebSocketConfig(tls=dialling)
                )
            case "quic":
                return CarrierSettings(
                    "quic://127.0.0.1:0",
                    QuicConfig(certificate=certificate, private_key=certificate),
                    QuicConfig(ca=certificate),
                )
        return CarrierSettings("tcp://127.0.0.1:0")

    return make
