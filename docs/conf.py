"""How Sphinx makes a site of these pages; ``python3 run.py docs`` runs it."""

from __future__ import annotations

import html
import importlib.metadata
import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "levada"
author = "The levada authors"
copyright = author
release = version = importlib.metadata.version("levada")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "pictures",
    "reference",
]
exclude_patterns = ["changes/*", "extensions/*"]  # a release gathers them into the changelog
html_theme = "furo"
html_title = f"levada {release}"
html_static_path = ["pictures"]
html_logo = html_favicon = "pictures/logo.svg"
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = [
    "misc.highlighting_failure",
    "ref.python",
]  # frames of octets in code blocks; `Ref` may be a class or a field
default_role = "py:obj"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88  # longer ones have a line for each parameter
toc_object_entries = False  # `reference` makes these lists
napoleon_numpy_docstring = False  # it would read what the Google style has read again
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def check_pages(app: Sphinx, error: Exception | None) -> None:
    """Warn of links that lead nowhere, and of descriptions that were taken apart, on the pages as readers get them."""
    if error is not None or app.builder.name != "html":
        return
    pages = {path: path.read_text("utf-8") for path in Path(app.outdir).resolve().rglob("*.html")}
    anchors = {path: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for path, text in pages.items()}
    log = logging.getLogger(__name__)
    for path, text in pages.items():
        for link in sorted(set(re.findall(r'\b(?:href|src)="([^"]+)"', text))):
            url = urlsplit(html.unescape(link))
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.exists() or (url.fragment and unquote(url.fragment) not in anchors.get(target, ())):
                log.warning("%s: a link leads nowhere: %s", path.relative_to(app.outdir), link)
        if 'Type<span class="colon">' in text:
            log.warning("%s: the beginning of a description is shown as a type", path.relative_to(app.outdir))
        for entry in re.findall(r'<dt class="sig sig-object py".*?</dt>', text, re.DOTALL):
            shown = html.unescape(re.sub("<[^>]*>", "", entry))
            if re.search(r"NOTHING|= -1\.0|<|~", shown):
                log.warning(
                    "%s: no program says it like this: %s", path.relative_to(app.outdir), " ".join(shown.split())
                )


def setup(app: Sphinx) -> None:  # noqa: D103
    app.add_css_file("site.css")
    app.connect("build-finished", check_pages)
