"""How Sphinx makes a site of these pages; ``python3 run.py docs`` runs it."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def setup(app: Sphinx) -> None:  # noqa: D103
    app.connect("builder-inited", export_descriptions)
    app.connect("autodoc-skip-member", show_once)
    app.connect("env-check-consistency", miss_nothing)
