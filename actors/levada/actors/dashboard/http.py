"""HTTP/1.1 on a byte stream, one request per connection: h11 with limits."""

from __future__ import annotations

import attrs
import h11

from levada.transports.carriers import ByteStream
from levada.transports.carriers.websocket_config import Refusal
from levada.transports.carriers.websocket_handshake import HandshakeRefused, Head

from .site import LOGIN_BODY, SiteRequest, SiteResponse

__all__ = ["HEAD", "ReceivedRequest", "receive", "send"]

HEAD = 16_384
"""The most bytes of a request's head."""


@attrs.frozen
class ReceivedRequest:
    """A request, and its bytes for a WebSocket handshake."""

    request: SiteRequest
    head: bytes = attrs.field(repr=False)
    rest: bytes = attrs.field(repr=False)
    """The bytes after the head, if the request has no body."""


async def receive(stream: ByteStream) -> ReceivedRequest | None:
    """Read a request; ``None`` if the stream ends before the end of its head.

    Raises:
        HandshakeRefused: it is not a valid request, or too large.
        CarrierError: the stream broke.
    """
    collecting, found = Head(HEAD), None
    while found is None:
        data = await stream.receive_some()
        if not data:
            return None
        found = collecting.receive_data(data)
    head, rest = found
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD)
    body = bytearray()
    try:
        connection.receive_data(head + rest)
        event = connection.next_event()
        if not isinstance(event, h11.Request):
            raise HandshakeRefused(Refusal(400, "this is not an HTTP/1.1 request"))
        request = event
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                body += event.data
                if len(body) > LOGIN_BODY:
                    raise HandshakeRefused(Refusal(413, f"a body of more than {LOGIN_BODY} bytes"))
            else:  # NEED_DATA
                connection.receive_data(await stream.receive_some())
    except h11.RemoteProtocolError as error:
        raise HandshakeRefused(Refusal(error.error_status_hint, "this is not an HTTP/1.1 request")) from error
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers)
    asked = SiteRequest(request.method.decode(), request.target.decode("latin-1"), headers, bytes(body))
    return ReceivedRequest(asked, head, b"" if body else rest)


async def send(stream: ByteStream, response: SiteResponse, *, head_only: bool = False) -> None:
    """Send a response. The caller closes the connection.

    Raises:
        CarrierError: the stream broke.
    """
    connection = h11.Connection(h11.SERVER)
    begin = connection.send(h11.Response(status_code=response.status, headers=response.fields()))
    body = b"" if head_only else response.body
    await stream.send_all((begin or b"") + body)
