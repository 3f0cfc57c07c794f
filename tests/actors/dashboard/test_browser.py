"""The dashboard in a real browser: it loads, logs in, updates, survives a restart, and works by keyboard at all widths in both themes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio

from levada.actors import rsocket
from levada.actors.console import serve_console
from levada.actors.dashboard import DashboardConfig, serve_console_dashboard, serve_dashboard
from levada.actors.journal import Append, DeclareGroup, Envelope, Journal
from levada.actors.nodes import local_nodes
from levada.framework import Actor, ActorSystem, Sender, bounded, channel, handles, message, restart

from .browser import CHROMIUM, Page, browsing

pytestmark = [
    pytest.mark.release,
    pytest.mark.loopback,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt install chromium"),
]


@message
class Work:
    pass


@message
class Fail:
    pass


class Clerk(Actor[Work | Fail]):
    @handles
    def work(self, m: Work) -> None:
        pass

    @handles
    def fail(self, m: Fail) -> None:
        raise ValueError("<img src=x onerror=alert(1)>")


class Office(Actor[Work]):
    clerks: int

    def started(self) -> None:
        for number in range(self.clerks):
            self.spawn(Clerk, name=f"clerk{number}", supervise=restart())

    @handles
    def work(self, m: Work) -> None:
        pass


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with browsing(tmp_path / "profile") as page:
        await page.size(1280, 800)
        yield page
        assert page.log == []


def row(name: str) -> str:
    return f"[...document.querySelectorAll('.row')].find((row) => row.querySelector('.name')?.innerText.includes('{name}'))"


async def open_actors(page: Page, url: str, shown: str) -> None:
    """Open a page, and from its overview the tree of actors."""
    await page.go(url)
    await page.until("document.querySelector('#link').innerText.includes('live')")
    await page.click("#page-actors")
    await page.until(row(shown))


async def rows(page: Page) -> list[str]:
    found: list[str] = await page.evaluate(
        "[...document.querySelectorAll('.row .name')].map((name) => name.innerText.replace(/^[▸▾]/, '').trim())"
    )
    return found


async def test_it_loads_logs_in_and_updates(page: Page) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system) as dashboard:
        system.spawn(Office, 2, name="<b>office")
        link = dashboard.login_url()
        await page.go(link)
        await page.until(row("clerk1"))
        assert await page.evaluate("location.href") == f"{dashboard.url}#overview"
        await page.click("#page-actors")
        await page.until("document.querySelector('.row[aria-level=\"2\"]')")
        assert await page.evaluate("document.cookie") == ""  # HttpOnly
        assert "token" not in await page.evaluate("JSON.stringify(Object.values(localStorage))")
        assert (await rows(page))[:3] == ["<b>office (2)", "clerk0", "clerk1"]
        assert await page.text("#system") == "town"
        await page.until("document.querySelector('#link').innerText.includes('live')")
        clerk = system.lookup("/<b>office/clerk0")
        assert clerk is not None
        for _ in range(1234):
            clerk.tell(Work())
        await page.until(f"{row('clerk0')}.innerText.includes('1,234')")
        clerk.tell(Fail())
        await page.until("document.querySelector('#page-events .badge')")
        await page.click("#page-events")
        await page.until("document.querySelector('#events').innerText.includes('ValueError')")
        assert "onerror" not in await page.evaluate("document.documentElement.outerHTML")
        # Logged in by the cookie; the link was for once.
        await page.go(dashboard.url)
        await page.until(row("clerk1"))
        await page.go("about:blank")
        await page.go(link)
        await page.until("document.querySelector('#banner').innerText.includes('this link was used before')")
        page.log.clear()  # Chromium notes the 401


async def test_a_browser_without_a_login_sees_nothing(page: Page) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system) as dashboard:
        await page.go(dashboard.url)
        await page.until("document.querySelector('#banner').innerText.includes('not logged in')")
        assert await page.text("#system") == "levada"
        assert system.statistics().actors == 0
        page.log.clear()


async def test_tracebacks_are_text(page: Page) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system, DashboardConfig(tracebacks=True)) as dashboard:
        clerk = system.spawn(Clerk, name="clerk", supervise=restart())
        await page.go(f"{dashboard.login_url()}")
        await page.until(row("clerk"))
        clerk.tell(Fail())
        await page.until("document.querySelector('#page-events')")
        await page.click("#page-events")
        await page.until("document.querySelector('#events pre')")
        assert await page.evaluate("document.querySelector('#events pre').textContent.includes('<img src=x')")
        assert await page.evaluate("document.querySelectorAll('img[src=x]').length") == 0


class Nested(Actor[Work]):
    names: list[str]

    def started(self) -> None:
        if self.names:
            self.spawn(Nested, self.names[1:], name=self.names[0])

    @handles
    def work(self, m: Work) -> None:
        pass


@pytest.mark.parametrize("console", [False, True])
async def test_long_and_odd_names(page: Page, tmp_path: Path, console: bool) -> None:
    """Actors of such names can be unfolded and selected; more than a request has room for stays folded."""
    names = ["%ED%B2%80", "<b>&amp;<b>", "'\"\\", "100%41", "a:b#c", *(f"{n}{'ü' * 250}" for n in range(10, 20))]
    shown = 10
    async with ActorSystem("town") as system, AsyncExitStack() as stack:
        top = system.spawn(Nested, names, name="top")
        if console:
            await stack.enter_async_context(serve_console(system, tmp_path / "c"))
            dashboard = await stack.enter_async_context(serve_console_dashboard(tmp_path / "c"))
        else:
            dashboard = await stack.enter_async_context(serve_dashboard(system))
        await open_actors(page, dashboard.login_url(), names[0].replace("'", "\\'"))
        await page.evaluate("document.querySelector('#grid').focus()")
        for level in range(1, shown + 1):
            if level > 1:  # a small program is shown with its first level unfolded
                await page.key("ArrowRight")
            await page.until(f"document.querySelector('.row[aria-level=\"{level + 1}\"]')")
            await page.key("ArrowDown")
            await page.key("Enter")
            path = json.dumps("/".join(["/top", *names[:level]]))
            await page.until(f"document.querySelector('#detail h2').textContent === {path}")
            await page.until("document.querySelector('#detail dd')?.innerText === 'Nested'")
        for _ in range(len(names) - shown):
            await page.key("ArrowRight")
            await page.key("ArrowDown")
        for _ in range(1234):
            top.tell(Work())
        await page.until(f"{row('top')}.innerText.includes('1,234')")
        assert await page.text("#link") == "live"


async def test_it_survives_a_restart_of_the_program(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "c"
    async with serve_console_dashboard(path) as dashboard:
        async with ActorSystem("first") as system, serve_console(system, path):
            system.spawn(Clerk, name="clerk")
            await page.go(dashboard.login_url())
            await page.until(row("clerk"))
        await page.until("document.querySelector('#banner').innerText.includes('waits for the program')")
        assert "program gone" in await page.text("#link")
        async with ActorSystem("second") as system, serve_console(system, path):
            system.spawn(Office, 1, name="office")
            await page.until(row("office"))
            assert await page.text("#system") == "second"
            await page.until("document.querySelector('#banner').hidden")


async def test_the_keyboard(page: Page) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system, DashboardConfig(actions=True)) as dashboard:
        system.spawn(Office, 40, name="office")
        clerk = system.spawn(Clerk, name="clerk")
        await open_actors(page, dashboard.login_url(), "office")
        active = "document.getElementById(document.querySelector('#grid').getAttribute('aria-activedescendant'))"
        await page.evaluate("document.querySelector('#grid').focus()")
        await page.key("ArrowRight")
        await page.until(row("clerk0"))
        assert await page.evaluate(f"{active}.getAttribute('aria-expanded')") == "true"
        await page.key("ArrowDown")
        assert "clerk0" in await page.evaluate(f"{active}.innerText")
        assert await page.evaluate(f"{active}.getAttribute('aria-level')") == "2"
        await page.key("ArrowLeft")
        assert "office" in await page.evaluate(f"{active}.innerText")
        await page.key("ArrowLeft")
        await page.until(f"!{row('clerk0')}")
        await page.key("ArrowDown")
        await page.key("Enter")
        await page.until("document.querySelector('#detail h2').innerText === '/clerk'")
        await page.key("Escape")
        await page.until("document.querySelector('#detail').hidden")
        # The search: a slash leads there, Escape back.
        await page.key("/")
        for letter in "clerk39":
            await page.key(letter)
        await page.until("document.querySelector('#count').innerText === '1 row'")
        assert await rows(page) == ["/office/clerk39"]
        await page.evaluate(
            "(() => { const s = document.querySelector('#search'); s.value = ''; s.dispatchEvent(new Event('input')); })()"
        )
        await page.key("Escape")
        await page.until(row("office"))
        # An action is asked twice, and Escape takes it back.
        await page.evaluate(f"{row('clerk')}.click()")
        await page.until("document.querySelector('#detail .danger')")
        await page.click("#detail .danger")
        await page.until("document.querySelector('dialog[open]')")
        await page.key("Escape")
        await page.until("!document.querySelector('dialog[open]')")
        assert clerk.is_alive
        await page.click("#detail .danger")
        await page.until("document.querySelector('dialog[open] h2').innerText === 'Stop /clerk?'")
        await page.click("dialog .danger")
        await page.until("document.querySelector('dialog[open] h2').innerText === 'Really stop /clerk?'")
        assert clerk.is_alive
        await page.click("dialog .danger")
        await clerk.terminated()
        await page.until("!document.querySelector('dialog[open]')")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 768, 1280, 1600])
async def test_every_width_in_both_themes(page: Page, width: int, dark: bool) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system) as dashboard:
        system.spawn(Office, 3, name="office")
        await page.size(width, 800, dark=dark)
        await page.go(dashboard.login_url())
        await page.until(row("clerk1"))
        await page.evaluate(f"{row('clerk1')}.click()")
        await page.until("document.querySelector('#detail dd')")
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        assert await page.evaluate("document.documentElement.scrollHeight") == 800
        ground, ink = await page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
            ".map((color) => color.match(/\\d+/g).map(Number).reduce((sum, each) => sum + each) / 765)"
        )
        assert (ground < 0.2, ink > 0.8) == (dark, dark)
        # Everything that can be used has a name.
        assert (
            await page.evaluate(
                "[...document.querySelectorAll('button, input, a, [role=treegrid], [role=img], dialog[open], aside, section, nav')]"
                ".filter((each) => !each.closest('[hidden]') && !(each.ariaLabel || each.innerText || each.labels?.length"
                " || each.getAttribute('aria-label'))).map((each) => each.outerHTML)"
            )
            == []
        )
        await page.click("#theme")
        await page.click("#theme")
        await page.until("getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")


async def test_a_hundred_thousand_rows(page: Page) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system) as dashboard:
        system.spawn(Office, 100_000, name="office")
        await open_actors(page, dashboard.login_url(), "office")
        await page.evaluate("document.querySelector('.fold').click()")
        await page.until("document.querySelector('#count').innerText === '100,001 rows'")
        await page.evaluate("document.querySelector('#grid').focus()")
        await page.key("End")
        await page.until(f"{row('clerk99999')}")
        assert await page.evaluate("document.querySelectorAll('.row').length") < 60
        await page.evaluate(
            "document.querySelector('#grid').scrollTop = document.querySelector('#spacer').clientHeight / 2"
        )
        await page.until(f"{row('clerk5000')}")
        await page.key("Home")
        await page.until(row("clerk0"))


async def test_the_tree_of_a_node(page: Page) -> None:
    async with ActorSystem("driver") as system, serve_dashboard(system) as dashboard:
        system.spawn(Clerk, name="clerk")
        async with local_nodes(system, 2, "tests.actors.nodes.apps:app") as nodes:
            await page.go(dashboard.login_url())
            await page.until(row("clerk"))
            # The overview of the driver has the actors of the nodes.
            await page.until(row("n1/"))
            await page.until("document.querySelector('#nodes').innerText.includes('CPU')")
            await page.click("#page-nodes")
            await page.until(f"{row('n1')}?.innerText.includes('up')")
            await page.evaluate(f"{row('n1')}.click()")
            await page.until("document.querySelector('#system').innerText === 'n1'")
            assert await page.evaluate("location.hash") == "#overview@n1"
            await page.key("i")  # levada's own actors, too
            await page.until("document.querySelector('#grid').innerText.includes('Control')")
            assert "clerk" not in await rows(page)
            assert await page.evaluate("location.hash") == "#actors@n1"
            pid = next(member.pid for member in nodes.members if member.name == "n1")
            assert f"process {pid}" in await page.text("#program")
            await page.click("#node")
            await page.until(row("n0"))
            assert await page.evaluate("location.hash") == "#nodes"
            await page.click("#page-actors")
            await page.until(row("clerk"))
            assert await page.text("#system") == "driver"
            # These rows are not the fleet's, which one can miss.
            assert await page.text("#node") == "driver only, see nodes"
            await page.click("#node")
            await page.until(row("n0"))
            assert await page.evaluate("document.querySelector('#node').hidden")
            # A look that the address names, and a node that ends.
            await page.go(f"{dashboard.url}#actors@n0")
            await page.until("document.querySelector('#system').innerText === 'n0'")
            os.kill(next(member.pid for member in nodes.members if member.name == "n0"), signal.SIGKILL)
            await page.until("document.querySelector('#banner').innerText.includes('process')")  # it has come back


class Desk(Actor[Work]):
    out: Sender[int]

    @handles
    def work(self, m: Work) -> None:
        self.out.send_nowait(1)


class Stuck(Actor[Work]):
    door: trio.Event

    @handles
    async def work(self, m: Work) -> None:
        await self.door.wait()


async def test_what_waits_is_shown(page: Page) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system) as dashboard:
        door = trio.Event()
        stuck = system.spawn(Stuck, door, name="stuck", mailbox=bounded(5))
        for _ in range(4):
            stuck.tell(Work())
        sender, receiver = channel(int, name="quotes")
        for number in range(3):
            sender.send_nowait(number)
        desk = system.spawn(Desk, sender, name="desk")
        await open_actors(page, dashboard.login_url(), "stuck")
        await page.evaluate(f"{row('stuck')}.click()")
        # One is being handled, where its handler waits, and three are in the queue.
        await page.until("document.querySelector('#detail').innerText.includes('3 of 5, the oldest for')")
        assert "work" in await page.text("#detail")
        assert "test_browser.py" in await page.text("#detail")
        cells = f"[...{row('stuck')}.querySelectorAll('[role=gridcell]')].map((cell) => cell.innerText)"
        assert (await page.evaluate(cells))[2] == "3"
        await page.evaluate(f"{row('desk')}.click()")
        channels = "[...document.querySelectorAll('#detail li')].map((each) => each.innerText)"
        await page.until("document.querySelector('#detail').innerText.includes('quotes')")
        [shown] = await page.evaluate(channels)
        assert shown == f"Sender quotes: int, ordered, 3 of {sender.window} queued"
        await page.click("#page-channels")
        await page.until(f"{row('/desk')}.innerText.includes('quotes')")
        await page.click("#page-actors")
        await page.until(row("stuck"))
        await page.evaluate(f"{row('stuck')}.click()")
        door.set()
        await page.until("document.querySelector('#detail').innerText.includes('0 of 5')")
        assert desk.is_alive
        receiver.close()


async def test_every_page(page: Page, tmp_path: Path) -> None:
    async def answer(request: rsocket.Request) -> bytes:
        return request.data

    async with ActorSystem("town", ask_timeout=60.0) as system, serve_dashboard(system) as dashboard:
        journal = system.spawn(Journal, tmp_path / "orders", name="orders")
        await journal.ask(DeclareGroup("billing"))
        await journal.ask(Append([Envelope(datetime.now(UTC), value=b"row")] * 3))
        sender, receiver = channel(int, name="quotes")
        system.spawn(Desk, sender, name="desk").tell(Work())
        async with (
            rsocket.serve(system, "rsocket+memory://desk", answer) as listener,
            rsocket.connect(system, listener.url),
        ):
            await page.go(dashboard.login_url())
            await page.until(row("desk"))
            for name, shown in (
                ("connections", ("rsocket+memory", "listens", "OPEN", "0 payloads")),
                ("channels", ("/desk", "quotes", "Sender", "ordered")),
                ("journals", ("orders", "billing 3")),
                ("actors", ("desk", "Journal")),
            ):
                await page.click(f"#page-{name}")
                await page.until(f"document.querySelector('#page-{name}').ariaCurrent === 'page'")
                for text in shown:
                    await page.until(f"document.querySelector('#grid').innerText.includes('{text}')")
            await page.go(f"{dashboard.url}#nodes")
            await page.until("document.querySelector('#count').innerText === 'this program has no nodes'")
        receiver.close()


AXE = (Path(__file__).parent / "axe.min.js").read_text("utf-8")
"""axe-core 4.14.1, which finds what people with a screen reader or weak eyes cannot use."""


async def barriers(page: Page) -> list[str]:
    await page.evaluate(AXE)
    found: list[str] = await page.evaluate(
        "axe.run().then(({ violations }) => violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(' ')}`))"
    )
    return found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1600])
async def test_pages_have_no_barriers(page: Page, width: int, dark: bool) -> None:
    """Labels, roles, focus and contrast, with everything that can be shown."""
    sender, receiver = channel(int, name="quotes")
    config = DashboardConfig(tracebacks=True, actions=True)
    async with ActorSystem("town") as system, serve_dashboard(system, config) as dashboard:
        system.spawn(Office, 3, name="office")
        system.spawn(Desk, sender, name="desk")
        clerk = system.spawn(Clerk, name="clerk", supervise=restart(max=100, within=1))
        await page.size(width, 900, dark=dark)
        await page.go(dashboard.login_url())
        await page.until(row("/office/clerk1"))
        for _ in range(5):
            clerk.tell(Fail())
        await page.until("document.querySelector('#troubles').innerText.includes('fails again and again')")
        assert await barriers(page) == []
        await page.evaluate(f"{row('clerk1')}.click()")
        await page.until("document.querySelector('#detail dd')")
        for name in ("actors", "flow", "channels", "events"):
            await page.click(f"#page-{name}")
            await page.until(f"document.querySelector('#page-{name}').ariaCurrent === 'page'")
            await page.until("document.querySelector('.row, #events details, #flow p')")
            assert await barriers(page) == []
        await page.click("#detail .danger")
        await page.until("document.querySelector('dialog[open]')")
        assert await barriers(page) == []
        receiver.close()


async def test_the_overview_says_what_is_wrong_and_goes_there(page: Page) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system) as dashboard:
        clerk = system.spawn(Clerk, name="clerk", supervise=restart(max=100, within=1))
        await page.go(dashboard.login_url())
        await page.until("document.querySelector('#troubles').innerText.startsWith('Nothing is wrong')")
        assert await page.evaluate("[...document.querySelectorAll('nav a')].map((each) => each.innerText)") == [
            "Overview",
            "Actors",
            "Flow",
        ]
        clerk.tell(Fail())
        await page.until("document.querySelector('#page-events')")
        for _ in range(40):
            clerk.tell(Fail())
        text = "document.querySelector('#troubles').innerText"
        await page.until(
            f"/clerk fails again and again: 4[01] restarts in [^ ]+ m?s, after ValueError at test_browser.py:/.test({text})"
        )
        await page.click("#troubles button")
        await page.until("document.querySelector('#detail h2')?.innerText === '/clerk'")
        # Equal events are one line with their number.
        await page.click("#page-events")
        await page.until("document.querySelectorAll('#events li').length === 2")
        lines = await page.text("#events")
        assert "ValueError, test_browser.py:" in lines
        assert lines.count("41 × since ") == 2


async def test_a_click_on_a_column_sorts_by_it(page: Page) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system) as dashboard:
        door = trio.Event()
        for number, depth in enumerate((2, 11, 5)):
            stuck = system.spawn(Stuck, door, name=f"stuck{number}")
            for _ in range(depth):
                stuck.tell(Work())
        senders = [channel(int, name=f"feed{number}") for number in (2, 10, 1)]
        for number, (sender, _) in enumerate(senders):
            system.spawn(Desk, sender, name=f"desk{number}")
        await page.go(dashboard.login_url())
        await page.until("document.querySelectorAll('.row').length === 6")
        assert (await rows(page))[:3] == ["/stuck1", "/stuck2", "/stuck0"]  # the longest queue first
        heads = "[...document.querySelectorAll('#head [role=columnheader]')]"
        queue = f"{heads}.find((head) => head.innerText.includes('queue'))"
        assert await page.evaluate(f"{queue}.ariaSort") == "descending"
        await page.evaluate(f"{queue}.querySelector('button').click()")
        await page.until(f"{queue}.ariaSort === 'ascending'")
        first = "document.querySelector('.row .name').innerText"
        await page.until(f"{first}.startsWith('/desk')")
        await page.evaluate(f"{heads}[0].querySelector('button').click()")
        await page.until(f"{first} === '/desk0'")
        assert (await rows(page))[-1] == "/stuck2"
        # The page itself sorts channels, numbers in names as numbers.
        await page.click("#page-channels")
        await page.until("document.querySelectorAll('.row').length === 3")
        await page.evaluate(f"{heads}[1].querySelector('button').click()")
        await page.until(f"{heads}[1].ariaSort === 'ascending'")
        await page.until("document.querySelectorAll('.row').length === 3")
        names = "[...document.querySelectorAll('.row')].map((row) => row.children[1].innerText)"
        await page.until(f"{names}.join() === 'feed1,feed2,feed10'")
        door.set()
        for _, receiver in senders:
            receiver.close()


async def test_charts_have_axes_values_and_zoom(page: Page) -> None:
    async with ActorSystem("town") as system, serve_dashboard(system) as dashboard:
        system.spawn(Clerk, name="clerk")
        await page.go(dashboard.login_url())
        figure = "[...document.querySelectorAll('figure')].find((each) => each.innerText.includes('actors'))"
        await page.until(f"{figure}.querySelector('canvas')")
        await page.until(f"{figure}.querySelector('[role=img]').ariaLabel === 'actors: now 1, at most 1'")
        await page.until(f"{figure}.querySelector('b').innerText === '1'")
        await page.until("document.querySelector('#link').innerText.includes('live')")
        await trio.sleep(1.2)  # two points of time are needed for a place between them
        await page.evaluate(f"{figure}.scrollIntoView()")
        left, top, width, height = await page.evaluate(
            f"(({{ left, top, width, height }}) => [left, top, width, height])({figure}.querySelector('.u-over').getBoundingClientRect())"
        )

        async def mouse(kind: str, at: float, **more: object) -> None:
            await page.command("Input.dispatchMouseEvent", type=kind, x=left + at * width, y=top + height / 2, **more)

        await mouse("mouseMoved", 0.999)
        await page.until(f"/^1 at \\d\\d:\\d\\d:\\d\\d$/.test({figure}.querySelector('b').innerText)")
        # The memory's chart shows the same moment.
        memory = "[...document.querySelectorAll('figure')].find((each) => each.innerText.includes('memory'))"
        await page.until(f"/MB at /.test({memory}.querySelector('b').innerText)")
        await mouse("mousePressed", 0.5, button="left", clickCount=1)
        await mouse("mouseMoved", 0.9, button="left")
        await mouse("mouseReleased", 0.9, button="left", clickCount=1)
        zoomed = "import('/charts.js').then(({ range }) => range.to - range.from)"
        assert 0 < await page.evaluate(zoomed) < 60
        await page.evaluate(f"{figure}.querySelector('.plot').dispatchEvent(new MouseEvent('dblclick'))")
        assert await page.evaluate(zoomed) == 0
