"""How Sphinx makes a site of these pages; ``python3 run.py docs`` runs it."""

from __future__ import annotations

import html
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

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
]
exclude_patterns = ["changes/*"]  # a release gathers them into the changelog
html_theme = "furo"
html_title = f"levada {release}"
html_static_path = ["pictures"]
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
toc_object_entries = False  # each page would copy those of all pages: 230 s for a build instead of 60
napoleon_numpy_docstring = False  # it would read what the Google style has read again
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

SHOWN: dict[int, str] = {}
"""The module in whose documentation an object stands, by the object's id: many are exported by the packages of two layers.

Known before any page is read: a build may read a few pages again.
"""


def public_names(app: Sphinx) -> Iterator[tuple[str, str, Any]]:
    """Go over the names in ``__all__`` of the packages and modules in the reference: the module, the name and its value."""
    for page in sorted(Path(app.srcdir, "api").glob("*.rst")):
        for name in re.findall(r"automodule:: (\S+)", page.read_text("utf-8")):
            module = importlib.import_module(name)
            for each in module.__all__:
                yield name, each, getattr(module, each)


def export_descriptions(app: Sphinx) -> None:
    """Let Sphinx find names that a package imports on first use, and texts below aliases and constants, which stand in other modules."""
    for package, name, value in public_names(app):
        SHOWN.setdefault(id(value), package)
        setattr(sys.modules[package], name, value)
        analyzer = ModuleAnalyzer.for_module(package)
        analyzer.analyze()
        for module in () if getattr(value, "__module__", "").startswith("levada.") else sorted(sys.modules):
            if module.startswith("levada.") and vars(sys.modules[module]).get(name) is value:
                text = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
                if text is not None:
                    analyzer.attr_docs["", name] = text


def miss_nothing(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that the reference does not show, neither there nor in another module."""
    shown: dict[str, list[Any]] = {}
    for path in env.domains["py"].data["objects"]:
        parent, _, name = path.rpartition(".")
        if parent in sys.modules:
            shown.setdefault(name, []).append(getattr(sys.modules[parent], name))
    for module, name, value in public_names(app):
        if not any(each is value for each in shown.get(name, ())):
            logging.getLogger(__name__).warning("the reference does not show %s.%s", module, name)


def show_once(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:  # noqa: D103
    if what != "module" or not callable(obj):
        return None
    here = app.env.temp_data.get("autodoc:module")
    return True if SHOWN.get(id(obj), here) != here else None


def whole_sentences(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from showing what stands before the first colon of a field's docstring as its type: give it another first colon."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"


def link_back(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Repair the links from source code to the reference: viewcode takes one module for the home of all that a source file has."""
    objects = app.env.domains["py"].data["objects"]

    def repair(link: re.Match[str]) -> str:
        folders, document, target = link.groups()
        if target in objects:
            return link[0]
        module = target
        while module not in sys.modules:
            module = module.rpartition(".")[0]
        name = target.removeprefix(module)
        right = [each for each, entry in objects.items() if entry.docname == document and each.endswith(name)]
        return f'href="{folders}{document}.html#{right[0]}"'

    if page.startswith("_modules/") and "body" in context:
        context["body"] = re.sub(r'href="([./]*)(api/\w+)\.html#([\w.]+)"', repair, context["body"])


def forget_missing_sources(app: Sphinx, env: BuildEnvironment) -> None:
    """Leave modules without a page, such as that of numbers, out of the list of sources."""
    sources = getattr(env, "_viewcode_modules", {})
    for name in [name for name, entry in sources.items() if not entry]:
        del sources[name]


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


def setup(app: Sphinx) -> None:  # noqa: D103
    app.connect("autodoc-process-docstring", whole_sentences, priority=400)  # before napoleon, which has 500
    app.connect("builder-inited", export_descriptions)
    app.connect("autodoc-skip-member", show_once)
    app.connect("env-check-consistency", miss_nothing)
    app.connect("env-check-consistency", forget_missing_sources)
    app.connect("html-page-context", link_back, priority=100)
    app.connect("build-finished", check_pages)
