"""Health checks over HTTP, for the tools that watch processes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping

import trio

from levada.framework.errors import ConfigurationError
from levada.transports.carriers.admission import Admission, network_of
from levada.transports.carriers.streams import accept_from, plain_nursery
from levada.transports.carriers.tcp import authority

__all__ = ["serve_health"]

REQUEST = 8192  # bytes of a request's head at most
PATIENCE = 5.0  # seconds for one request
AT_ONCE = 64
"""Requests under way; one more takes the place of the oldest."""
AT_ONCE_OF_ADDRESS = 16
"""Requests under way from one address, or from one /64 of IPv6; likewise, so a probe never waits for others from its own address."""

Report = Callable[[], Awaitable[tuple[bool, Mapping[str, object]]]]
"""Returns whether all is well, and details, within a second or so."""


async def serve_health(
    host: str, port: int, report: Report, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer requests for any path, until cancelled: 200 if all is well, else 503, with a JSON object.

    An answer also shows that the trio loop of this process runs.

    Args:
        host: to listen at.
        port: 0 takes a free one.
        report: is called for each request.
        task_status: gets the URL.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listeners[0].socket.getsockname()[1]}/"
    admission = Admission(url)
    unfinished: dict[trio.CancelScope, str] = {}  # and their networks, the oldest first

    def make_room(network: str) -> None:
        own = [scope for scope, other in unfinished.items() if other == network]
        if len(own) < AT_ONCE_OF_ADDRESS:
            own = list(unfinished) if len(unfinished) >= AT_ONCE else []
        if own:
            del unfinished[own[0]]
            own[0].cancel()

    async def answer(stream: trio.SocketStream) -> None:
        try:
            peer = stream.socket.getpeername()
        except OSError:  # it is gone already
            stream.socket.close()
            return
        network = network_of(peer[0])
        make_room(network)
        why = None
        with trio.move_on_after(PATIENCE) as scope:
            unfinished[scope] = network
            try:
                async with stream:
                    why = await _answer(stream, report)
            except (trio.BrokenResourceError, OSError):
                pass  # the client is gone
            finally:
                unfinished.pop(scope, None)
        if scope.cancelled_caught:
            why = "no whole request in time"
        if why is not None:
            admission.turn_away(authority(peer), why)

    async def take_in(stream: trio.SocketStream) -> None:
        nursery.start_soon(answer, stream)

    try:
        async with plain_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(accept_from, listener, take_in)
            task_status.started(url)
            await trio.sleep_forever()
    finally:
        for listener in listeners:
            listener.socket.close()


async def _answer(stream: trio.SocketStream, report: Report) -> str | None:
    """Answer a request; if there is none, return the reason."""
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
    method = bytes(head.partition(b" ")[0])
    if method in (b"GET", b"HEAD"):
        well, facts = await report()
        status, body = "200 OK" if well else "503 Service Unavailable", json.dumps(facts).encode() + b"\n"
    else:
        status, body = "405 Method Not Allowed", b""
    lines = (
        f"HTTP/1.1 {status}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
        "\r\n",
    )
    await stream.send_all("\r\n".join(lines).encode() + (b"" if method == b"HEAD" else body))
    return None
