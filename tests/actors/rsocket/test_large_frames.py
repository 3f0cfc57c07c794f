"""Frames that come in many pieces: both dialects say how much of one is still to come, so that it is taken in as few steps as it came."""

from __future__ import annotations

import pytest

from levada.actors.rsocket.dialects import core_of
from levada.transports.rsocket import CoreConfig, Payload
from levada.transports.rsocket.events import RequestReceived


@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
def test_a_core_says_how_much_of_a_frame_is_missing(dialect: str) -> None:
    client, server = (
        core_of(dialect)(CoreConfig(), client=side, framed=False, now=0.0, random_bytes=bytes) for side in (True, False)
    )
    server.receive_data(b"".join(client.data_to_send(0.0)), 0.0)
    server.accept_setup(0.0)
    assert server.missing == 0
    client.send_request_response(Payload(b"x" * 100_000), 0.0)
    octets = b"".join(client.data_to_send(0.0))
    for begin, end in ((0, 10), (10, 50_000), (50_000, len(octets) - 1)):
        assert server.receive_data(octets[begin:end], 0.0) == []
        assert server.missing == len(octets) - end
    [request] = server.receive_data(octets[-1:], 0.0)
    assert isinstance(request, RequestReceived)
    assert request.payload.data == b"x" * 100_000
    assert server.missing == 0
