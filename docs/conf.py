"""How Sphinx makes a site of these pages; ``python3 run.py docs`` runs it."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from sphinx.application import Sphinx

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
"""The module in whose documentation an object stands, by the object's id: many are exported by the packages of two layers."""


def show_once(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:  # noqa: D103
    if what != "module" or not callable(obj):
        return None
    here = str(app.env.temp_data.get("autodoc:module"))
    return True if SHOWN.setdefault(id(obj), here) != here else None


def setup(app: Sphinx) -> None:  # noqa: D103
    app.connect("autodoc-skip-member", show_once)
