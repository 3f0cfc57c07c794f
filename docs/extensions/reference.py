"""The API reference: which names it shows and where, how it writes their signatures, and its links to other pages and back."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.inspect import object_description

from levada.framework.ref import DEFAULT_TIMEOUT

SHOWN: dict[int, str] = {}
"""The module in whose documentation an object stands, by the object's id: many are exported by the packages of two layers.

Known before any page is read: a build may read a few pages again.
"""
USED: dict[str, list[str]] = {}
"""The public names that a page imports, as the reference shows them, by page."""
CLASS = re.compile(
    r"""<span class="pre">&lt;class</span> <span class="pre">(?:'|&#39;|&#x27;)(\w+)(?:'|&#39;|&#x27;)&gt;</span>"""
)
KINDS = ("class", "exception", "function")
IMPORT = re.compile(r"^from (levada\.[\w.]+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)


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
        if ("", name) in analyzer.attr_docs and re.search(r"<\w", object_description(value)):  # an address, or worse
            analyzer.attr_docs["", name] = [*analyzer.attr_docs["", name], ":meta hide-value:", ""]


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


def write_defaults(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, args: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Write defaults as a program does: ``Codec()``, not ``NOTHING``; ``time.time``, not ``<built-in function time>``."""
    if args is None:
        return None
    try:
        parameters = inspect.signature(obj).parameters
    except (TypeError, ValueError):
        return None
    fields = {each.alias: each for each in attrs.fields(obj)} if inspect.isclass(obj) and attrs.has(obj) else {}
    for parameter in parameters.values():
        default = parameter.default
        if default is attrs.NOTHING:  # only a factory has no value yet
            made = fields[parameter.name].default
            text = "..." if made.takes_self else _made_by(made.factory)
        elif default is DEFAULT_TIMEOUT:
            text = "DEFAULT_TIMEOUT"
        elif object_description(default).startswith("<"):
            text = _named(default)
        else:
            continue
        there = rf"(\b{parameter.name}(?:: [^=]*?)?\s?=\s?){re.escape(object_description(default))}"
        args = re.sub(there, lambda found, text=text: found[1] + text, args, count=1)  # type: ignore[misc]
    return args, returns


def _named(default: Any) -> str:
    """Return the name of a function or class as programs write it, or dots if it has none."""
    name = getattr(default, "__qualname__", "<")
    if "<" in name or name.startswith("_"):
        return "..."
    module = default.__module__
    return str(name) if module in (None, "builtins") or module.startswith("levada.") else f"{module}.{name}"


def _made_by(factory: Any) -> str:
    if factory in (dict, list):
        return repr(factory())
    name = _named(factory)
    if name != "...":
        return f"{factory.__name__ if inspect.isclass(factory) else name}()"
    return f"{type(factory()).__name__}(...)"


def list_objects(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """List the classes and functions of each module in "On this page".

    Sphinx can do so itself, but each page would then copy the lists of all pages: 230 s for a build instead of 60.
    """
    if not page.startswith("api/") or "toc" not in context:
        return
    # Sphinx takes the default of an overloaded method over from its last form, after `write_defaults`.
    context["body"] = CLASS.sub(r'<span class="pre">\1</span>', context["body"])
    found: dict[str, list[str]] = {}
    for path, entry in app.env.domains["py"].data["objects"].items():
        module, _, name = path.rpartition(".")
        if entry.docname == page and entry.objtype in KINDS and not entry.aliased and module in sys.modules:
            found.setdefault(module, []).append(name)

    def extend(link: re.Match[str]) -> str:
        module = link[1]
        items = "".join(
            f'<li><a class="reference internal" href="#{module}.{name}"><code>{name}</code></a></li>'
            for name in sorted(found.get(module, ()), key=str.lower)
        )
        return f"{link[0]}<ul>{items}</ul>" if items else link[0]

    context["toc"] = re.sub(r'<a class="reference internal" href="#module-([\w.]+)">[\w.]+</a>', extend, context["toc"])


def find_uses(app: Sphinx) -> None:
    """Note which public names the programs of the pages import."""
    for page in sorted(Path(app.srcdir).rglob("*.md")):
        document = page.relative_to(app.srcdir).with_suffix("").as_posix()
        if document.split("/")[0] not in ("how-to", "tutorial", "explanation"):
            continue
        names = set()
        for module, several, one in IMPORT.findall(page.read_text("utf-8")):
            for name in re.findall(r"(\w+)(?: as \w+)?", (several or one).partition("#")[0]):
                value = getattr(importlib.import_module(module), name, None)
                if id(value) in SHOWN and callable(value):
                    names.add(f"{SHOWN[id(value)]}.{name}")
        if names:
            USED[document] = sorted(names, key=lambda each: each.rpartition(".")[2].lower())


def link_to_reference(app: Sphinx, document: str, source: list[str]) -> None:
    """End a page with links to what its programs import."""
    if document in USED:
        links = " · ".join(f"{{py:obj}}`~{name}`" for name in USED[document])
        source[0] += f"\n\n## In the reference\n\n{links}\n"


def link_to_pages(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """End the description of a name with links to the pages whose programs import it."""
    pages = [document for document, names in USED.items() if name in names]
    if pages and what in KINDS:
        lines += ["", "Used in " + ", ".join(f":doc:`/{page}`" for page in pages) + ".", ""]


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


def setup(app: Sphinx) -> dict[str, bool]:  # noqa: D103
    app.connect("autodoc-process-docstring", whole_sentences, priority=400)  # before napoleon, which has 500
    app.connect("autodoc-process-docstring", link_to_pages, priority=600)
    app.connect("autodoc-process-signature", write_defaults)
    app.connect("builder-inited", export_descriptions, priority=400)
    app.connect("builder-inited", find_uses)
    app.connect("source-read", link_to_reference)
    app.connect("autodoc-skip-member", show_once)
    app.connect("env-check-consistency", miss_nothing)
    app.connect("env-check-consistency", forget_missing_sources)
    app.connect("html-page-context", link_back, priority=100)
    app.connect("html-page-context", list_objects, priority=100)
    return {"parallel_read_safe": True}
