"""A crawler on all cores: pages are fetched and scored by actors on nodes, behind one router that gives each of them one page at a time.

::

    python examples/crawl.py --nodes 4 --pages 1000

The site is generated and served by this program, and every tenth page is a copy of the one before, so the result can be checked.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict

import trio
from crawl_worker import Crawler, Page, Visit, app

from levada.actors.nodes import Nodes, NodeUp, local_nodes
from levada.framework import ActorSystem, Ref
from levada.framework.errors import ActorStopped, LevadaError
from levada.framework.router import group, pull

CRAWLERS = 2
"""On each node: one fetches its next page while the other one computes."""
WORDS = ["".join(random.Random(n).choices("abcdefghij", k=6)) for n in range(500)]


def html(number: int, pages: int) -> str:
    """Page `number` of the site. It leads to two new pages and to one that is known already."""
    links = [link for link in (2 * number + 1, 2 * number + 2, number // 2) if link < pages]
    text = " ".join(random.Random(number - (number % 10 == 9)).choices(WORDS, k=600))
    anchors = "".join(f'<a href="/{link}"></a>' for link in links)
    return f"<title>{number}</title><body><p>{text}</p>{anchors}</body>"


async def serve_site(stream: trio.SocketStream, pages: int) -> None:
    """Answer one request."""
    async with stream:
        request = await stream.receive_some(4096)
        body = html(int(request.split()[1][1:]), pages).encode()
        await stream.send_all(b"HTTP/1.0 200 OK\r\n\r\n" + body)


async def hire(nodes: Nodes, name: str) -> None:
    """Start the crawlers of a node; from now on they get pages."""
    for _ in range(CRAWLERS):
        nodes.system.groups.join("crawlers", await nodes.spawn(Crawler, on=name))


async def hire_again(nodes: Nodes) -> None:
    """A node that was lost starts again by itself, without the actors it had."""
    async with nodes.events() as events:
        async for event in events:
            if isinstance(event, NodeUp):
                try:
                    await hire(nodes, event.member.name)
                except LevadaError as error:
                    print(f"no crawlers on {event.member.name}: {error}")


class Crawl:
    """One crawl; `pages` has what was found."""

    def __init__(self, crawlers: Ref[Visit]) -> None:
        self.pages: dict[str, Page] = {}
        self._crawlers = crawlers
        self._seen = set[str]()

    async def run(self, start: str) -> None:
        """Visit all that can be reached."""
        self._seen.add(start)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._visit, nursery, start)

    async def _visit(self, nursery: trio.Nursery, url: str) -> None:
        while url not in self.pages:
            try:
                self.pages[url] = await self._crawlers.ask(Visit(url), timeout=None)
            except ActorStopped:
                pass  # its node was lost; reading a page again does no harm
        if len(self.pages) % 50 == 0:
            print(f"{len(self.pages)} pages scored, {len(self._seen) - len(self.pages)} known and waiting", flush=True)
        for link in self.pages[url].links:
            if link not in self._seen:
                self._seen.add(link)
                nursery.start_soon(self._visit, nursery, link)

    def copies(self) -> list[list[str]]:
        """Pages with the same text."""
        alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for url, page in self.pages.items():
            alike[page.fingerprint].append(url)
        return [sorted(urls) for urls in alike.values() if len(urls) > 1]


async def main(count: int, pages: int) -> None:
    async with ActorSystem("crawl") as system, local_nodes(system, count, app) as nodes, trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, lambda stream: serve_site(stream, pages), 0)
        site = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        for member in nodes.members:
            await hire(nodes, member.name)
        nursery.start_soon(hire_again, nodes)
        crawl = Crawl(system.spawn(group("crawlers", routing=pull())))
        await crawl.run(f"{site}/0")
        nursery.cancel_scope.cancel()
    planted = [sorted([f"{site}/{n - 1}", f"{site}/{n}"]) for n in range(9, pages, 10)]
    assert set(crawl.pages) == {f"{site}/{n}" for n in range(pages)}
    assert sum(page.words for page in crawl.pages.values()) == 600 * pages
    assert sorted(crawl.copies()) == sorted(planted)
    print(f"{pages} pages scored on {count} nodes; the {len(planted)} copies among them are found")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--pages", type=int, default=200)
    arguments = parser.parse_args()
    trio.run(main, arguments.nodes, arguments.pages)
