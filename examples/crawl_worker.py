"""The side of `crawl.py` that runs on nodes: fetch a page, score it, say where it leads.

It is a module of its own because nodes import it: what is in the main module of a program is not known elsewhere.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator
from urllib.parse import urljoin, urlsplit

import trio

from levada.framework import Actor, ActorSystem, Asks, handles, message

TAG = re.compile(r"<[^>]*>")
LINK = re.compile(r'href="([^"]+)"')
WORD = re.compile(r"\w+")
HASHES, SHINGLE = 32, 4


@message("crawl.Page", frozen=True)
class Page:
    url: str
    links: list[str]
    words: int
    fingerprint: tuple[int, ...]
    """Equal for pages with the same text, nearly equal for similar ones."""


@message("crawl.Visit", frozen=True)
class Visit(Asks[Page]):
    url: str


class Crawler(Actor[Visit]):
    @handles
    async def visit(self, m: Visit) -> Page:
        html = await fetch(m.url)
        words = WORD.findall(TAG.sub(" ", html.partition("<body>")[2]))
        return Page(m.url, [urljoin(m.url, link) for link in LINK.findall(html)], len(words), fingerprint(words))


async def fetch(url: str) -> str:
    parts = urlsplit(url)
    async with await trio.open_tcp_stream(parts.hostname or "", parts.port or 80) as stream:
        await stream.send_all(f"GET {parts.path} HTTP/1.0\r\n\r\n".encode())
        answer = b"".join([data async for data in stream])
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.0 200"):
        raise OSError(f"{url}: {head[:40]!r}")
    return body.decode()


def fingerprint(words: list[str]) -> tuple[int, ...]:
    """MinHash in plain Python: some milliseconds in which this process computes."""
    shingles = [" ".join(words[at : at + SHINGLE]).encode() for at in range(len(words) - SHINGLE + 1)]
    return tuple(min(zlib.crc32(shingle, seed) for shingle in shingles) for seed in range(HASHES))


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """What runs on each node: nothing of its own, the driver spawns the crawlers."""
    yield
