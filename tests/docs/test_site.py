"""The site as its readers get it: built with warnings as errors, then looked at in a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from tests.actors.dashboard.browser import CHROMIUM, Page, browsing

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PICTURES = (
    "explanation/semantics",
    "explanation/durable",
    "how-to/hold-back-senders",
    "how-to/nodes",
    "how-to/spark",
    "reference/carriers",
    "reference/benchmarks",
    "index",
)
CONTRAST = """\
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const page = getComputedStyle(document.body).backgroundColor;
  const found = [];
  for (const text of document.querySelectorAll(".picture text")) {
    const box = text.closest("svg").querySelector("rect");
    for (const behind of [page, box ? getComputedStyle(box).fill : page]) found.push(ratio(getComputedStyle(text).fill, behind));
  }
  for (const line of document.querySelectorAll(".picture line, .overview path")) found.push(1.5 * ratio(getComputedStyle(line).stroke, page));
  return [found.length, Math.min(...found)];
})()
"""
"""Text has 4.5 at least, lines 3."""


def test_the_front_page_begins_with_ten_lines_and_what_they_print() -> None:
    """`test_pages` runs them."""
    page = (DOCS / "index.md").read_text("utf-8")
    found = re.match(r"# levada\n\n[^\n]+\n\n```python\n(.*?)```\n\n```\n(.*?)```\n\n[^\n]+\n\n!\[", page, re.DOTALL)
    assert found is not None, "a sentence, a program, its output, a sentence, the picture"
    assert len([line for line in found[1].splitlines() if line]) == 10


def test_the_rarest_tasks_are_the_last_group_of_how_to_pages() -> None:
    captions = re.findall(r"^:caption: (.+)$", (DOCS / "index.md").read_text("utf-8"), re.MULTILINE)
    assert captions == [
        "Write actors",
        "Stream",
        "Talk to others",
        "Keep state",
        "Many cores and machines",
        "Spark",
        "Operate",
        "Extend",
        "Understand",
        "Reference",
        "Protocols",
    ]


def test_the_cookbook_has_twenty_recipes() -> None:
    """`test_pages` runs those with an output below them, which are all."""
    page = (DOCS / "how-to/cookbook.md").read_text("utf-8")
    recipes = re.findall(r"^## [^\n]+\n\n[^\n]+\n\n```python\n.*?```\n\n```\n.*?```$", page, re.DOTALL | re.MULTILINE)
    assert len(recipes) == page.count("\n## ") >= 20


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "--keep-going", str(DOCS), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with browsing(tmp_path / "profile") as page:
        yield page


async def load(page: Page, url: str, ready: str = "true") -> None:
    """Go to a page. Until it is there, what runs in the browser belongs to the page before."""
    await page.go(url)
    with trio.fail_after(120):
        while not await page.evaluate(  # noqa: ASYNC110 - what is waited for is in another process
            f"location.href === {url!r} && document.readyState === 'complete' && Boolean({ready})"
        ):
            await trio.sleep(0.05)


def words(path: Path) -> str:
    """What a page says, without its markup."""
    return re.sub(r"<[^>]*>", "", path.read_text("utf-8"))


@pytest.mark.release
@pytest.mark.timeout(1800)
class TestBuilt:
    """The built pages."""

    def test_the_reference_writes_defaults_as_programs_do(self, site: Path) -> None:
        pages = sorted((site / "api").glob("*.html"))
        assert len(pages) >= 18
        for path in pages:
            assert not re.search(r"NOTHING|= -1\.0|= ~?&lt;\w|: ~\w", words(path)), path.name
        text = (site / "api/framework.html").read_text("utf-8")
        assert "time.time" in words(site / "api/framework.html")
        assert 'href="#levada.framework.Actor"><code>Actor</code>' in text

    def test_the_reference_and_the_pages_link_each_other(self, site: Path) -> None:
        text = (site / "api/durable.html").read_text("utf-8")
        entry = text[text.index('id="levada.actors.durable.Durable"') :].partition('<dt class="sig sig-object py"')[0]
        assert 'href="../how-to/durable.html"' in entry
        text = (site / "how-to/durable.html").read_text("utf-8")
        assert 'href="../api/durable.html#levada.actors.durable.Durable"' in text.partition('id="in-the-reference"')[2]

    @pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt install chromium")
    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("width", [390, 1280])
    async def test_pages_fit_and_pictures_can_be_read(self, site: Path, page: Page, width: int, dark: bool) -> None:
        await page.size(width, 900, dark=dark)
        for name in (*PICTURES, "how-to/cookbook", "api/framework"):
            await load(page, f"file://{site}/{name}.html", "document.querySelector('.sidebar-logo')?.complete")
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert await page.evaluate("document.querySelector('.sidebar-logo').naturalWidth") > 0
            if name in PICTURES:
                texts, contrast = await page.evaluate(CONTRAST)
                assert texts > 0
                assert contrast >= 4.5, name
        assert page.log == []

    @pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt install chromium")
    async def test_pictures_follow_the_switch_of_the_page(self, site: Path, page: Page) -> None:
        """Also where the system is light and the reader has chosen dark."""
        await page.size(1280, 900)
        await load(page, f"file://{site}/index.html")
        await page.evaluate("document.body.dataset.theme = 'dark'")
        _, contrast = await page.evaluate(CONTRAST)
        assert contrast >= 4.5

    @pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt install chromium")
    async def test_each_program_can_be_copied(self, site: Path, page: Page) -> None:
        await load(page, f"file://{site}/how-to/cookbook.html", "document.querySelector('button.copybtn')")
        blocks = await page.evaluate("document.querySelectorAll('div.highlight pre').length")
        assert await page.evaluate("document.querySelectorAll('button.copybtn').length") == blocks

    @pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt install chromium")
    @pytest.mark.parametrize(
        ("question", "first"),
        [
            ("test durable reminder", "Cookbook"),
            ("celery", "Coming from another framework"),
            ("address already in use", "Troubleshooting"),
        ],
    )
    async def test_the_search_finds_what_people_look_for(
        self, site: Path, page: Page, question: str, first: str
    ) -> None:
        found = "document.querySelector('#search-results .search-summary')?.innerText.includes('found')"
        await load(page, f"file://{site}/search.html?q={question.replace(' ', '+')}", found)
        texts = await page.evaluate(
            "[...document.querySelectorAll('#search-results ul.search > li a')].map((a) => a.innerText)"
        )
        assert any(first in text for text in texts[:3]), texts[:10]
