"""A probe for those who watch over processes: a little of HTTP, so that what is there already can ask."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import trio

from levada.framework.errors import ConfigurationError

__all__ = ["serve_health"]

REQUEST = 8192  # octets of a request's head at most
PATIENCE = 5.0  # seconds for one request
AT_ONCE = 64
"""Requests; one more is turned away."""

Report = Callable[[], tuple[bool, Mapping[str, object]]]
"""Says whether all is well, and more about it."""


async def serve_health(
    host: str, port: int, report: Report, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer requests for any path, until cancelled: 200 if all is well, else 503, with a JSON object.

    An answer also says that the trio loop of this process turns.

    Args:
        host: to listen at.
        port: 0 takes a free one.
        report: is called for each request.
        task_status: is told the URL.

    Raises:
        ConfigurationError: the address cannot be had.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
    places = trio.Semaphore(AT_ONCE)

    async def answer(stream: trio.SocketStream) -> None:
        try:
            places.acquire_nowait()
        except trio.WouldBlock:
            await stream.aclose()
            return
        try:
            with trio.move_on_after(PATIENCE):
                async with stream:
                    await _answer(stream, report)
        except trio.BrokenResourceError:
            pass  # whoever asked is gone
        finally:
            places.release()

    name = f"[{host}]" if ":" in host else host
    task_status.started(f"http://{name}:{listeners[0].socket.getsockname()[1]}/")
    await trio.serve_listeners(answer, listeners)


async def _answer(stream: trio.SocketStream, report: Report) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        more = await stream.receive_some(REQUEST)
        head += more
        if not more or len(head) > REQUEST:
            return
    method = head.partition(b" ")[0]
    if method in (b"GET", b"HEAD"):
        well, facts = report()
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
