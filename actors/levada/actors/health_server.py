"""A small HTTP server for health checks and metrics: one request and one response for each connection, with limits on both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio

from levada.framework.errors import ConfigurationError
from levada.transports.carriers.addresses import may_name
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.places import Places, share_of
from levada.transports.carriers.sockets import why_not_bound
from levada.transports.carriers.streams import accept_from, plain_nursery
from levada.transports.carriers.tcp import authority

__all__ = ["Answer", "Asked", "HealthResponse", "serve_answers"]

REQUEST = 8192  # bytes of a request's head at most
PATIENCE = 5.0  # seconds for one request
AT_ONCE = 64
"""Requests under way; one more takes the place of another, see `Places`. All give way until their end."""


@attrs.frozen
class Asked:
    """A request: GET or HEAD, without a body."""

    path: str
    """Without the query."""
    accept: str
    """The header of that name; empty without one."""


@attrs.frozen
class HealthResponse:
    """The response to a request."""

    status: str
    """Status code and reason phrase."""
    content_type: str
    body: bytes = attrs.field(repr=False)


_MISDIRECTED: Final = HealthResponse(
    "421 Misdirected Request",
    "text/plain; charset=utf-8",
    b"the Host of a request to a loopback address must be localhost or an address\n",
)
"""Otherwise a web page could give its own name the address of this machine (DNS rebinding)."""

Answer = Callable[[Asked], Awaitable[HealthResponse]]
"""Answers a request within `PATIENCE` seconds."""


async def serve_answers(
    host: str, port: int, answer: Answer, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer requests until cancelled.

    Args:
        host: to listen at.
        port: 0 takes a free one.
        answer: called for each request.
        task_status: gets the URL.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {host}:{port}: {why_not_bound(error)}") from error
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listeners[0].socket.getsockname()[1]}/"
    admission = Admission(url)
    places = Places(AT_ONCE)

    async def serve(stream: trio.SocketStream) -> None:
        try:
            peer, at = stream.socket.getpeername(), authority(stream.socket.getsockname())
        except OSError:  # it is gone already
            stream.socket.close()
            return
        why = None
        with trio.move_on_after(PATIENCE) as scope:
            place = places.take(share_of(authority(peer)), scope.cancel)
            try:
                async with stream:
                    why = await _serve(stream, at, answer)
            except (trio.BrokenResourceError, OSError):
                pass  # the client is gone
            finally:
                place.leave()
        if scope.cancelled_caught:
            why = "no whole request in time"
        if why is not None:
            admission.turn_away(authority(peer), why)

    async def take_in(stream: trio.SocketStream) -> None:
        nursery.start_soon(serve, stream)

    try:
        async with plain_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(accept_from, listener, take_in)
            task_status.started(url)
            await trio.sleep_forever()
    finally:
        for listener in listeners:
            listener.socket.close()


async def _serve(stream: trio.SocketStream, at: str, answer: Answer) -> str | None:
    """Answer a request. Without one, return why there is none."""
    head = bytearray()
    end = -1
    while end < 0:
        more = await stream.receive_some(REQUEST)
        if not more:
            return "the connection ended inside a request" if head else None
        seen = max(0, len(head) - 3)
        head += more
        end = head.find(b"\r\n\r\n", seen)
        if len(head) > REQUEST:
            return f"a request of more than {REQUEST} bytes"
    method, host, asked = _parsed(bytes(head[:end]))
    if not may_name(host, at):
        response = _MISDIRECTED
    elif method in (b"GET", b"HEAD"):
        response = await answer(asked)
    else:
        response = HealthResponse("405 Method Not Allowed", "application/json", b"")
    lines = (
        f"HTTP/1.1 {response.status}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        "Cache-Control: no-store",
        "Connection: close",
        "\r\n",
    )
    await stream.send_all("\r\n".join(lines).encode() + (b"" if method == b"HEAD" else response.body))
    return None


def _parsed(head: bytes) -> tuple[bytes, str, Asked]:
    """Return the method, the host and the request; missing parts are empty."""
    line, *lines = head.split(b"\r\n")
    method, _, rest = line.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
    fields = [(name.lower(), value.strip()) for name, _, value in (each.partition(b":") for each in lines)]

    def field(wanted: bytes) -> str:
        return b",".join(value for name, value in fields if name == wanted).decode("latin-1")

    return method, field(b"host"), Asked(path, field(b"accept"))
