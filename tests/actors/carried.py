"""The carriers in memory that protocols over many streams are tested on: the memory carrier, and QMux over a memory pipe."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from levada.transports.carriers import MemoryConfig
from levada.transports.carriers.memory import MemoryConnection
from levada.transports.qmux import QmuxConfig

CARRIERS = ["memory", pytest.param("qmux+memory", marks=pytest.mark.ci)]
"""For the fixture that starts connections: everything runs on the first, and with ``--profile ci`` on the second too."""

memory_only = pytest.mark.parametrize("scheme", ["memory"], indirect=True)
"""For tests that count the memory carrier's windows or calls."""

_PLAIN = MemoryConfig(shape="connection")


def settings(scheme: str, carrier: MemoryConfig | None) -> MemoryConfig | QmuxConfig | None:
    """Turn settings for the memory carrier into settings for the carrier `scheme`."""
    if scheme == "memory":
        return carrier
    carrier = carrier or _PLAIN
    if (carrier.datagram_loss, carrier.cut_at_call) != (_PLAIN.datagram_loss, _PLAIN.cut_at_call):
        raise ValueError(
            f"only the memory carrier has datagram_loss and cut_at_call, and this is {scheme}: see memory_only"
        )
    return QmuxConfig(
        max_streams=carrier.max_streams,
        max_streams_unidirectional=carrier.max_streams_unidirectional,
        below=attrs.evolve(
            MemoryConfig(), latency=carrier.latency, chunk=carrier.chunk, seed=carrier.seed, cut_after=carrier.cut_after
        ),
    )


def cut(carrier: Any) -> None:
    """Lose a connection, as if the cable was cut."""
    end = carrier if isinstance(carrier, MemoryConnection) else carrier._below._stream
    end.link.cut("somebody dug")
