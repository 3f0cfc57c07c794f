"""Tables by URL scheme that other packages can extend.

A table has entries of levada, entries that the program adds by `Plugins.register`, and entries that installed packages announce as an
entry point. An entry point is loaded only when a program names its scheme and no other entry has it; so a package that is installed
costs nothing until a program names it, and cannot replace what levada has.
"""

from __future__ import annotations

import difflib
import logging
import pkgutil
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from levada.framework.errors import ConfigurationError
from levada.framework.text import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Part", "Plugins", "name_of", "resolve"]

T = TypeVar("T")

Part: TypeAlias = T | str
"""An object, or its name as in an entry point: ``"package.module:name"``. A named one is imported when it is first used."""

logger = logging.getLogger("levada.transports.plugins")

_SCHEME = re.compile(r"[a-z][a-z0-9.-]*")  # RFC 3986, section 3.1; a plus parts protocol and carrier


def resolve(part: Part[T]) -> T:
    """Return the object, imported if only its name is known."""
    return cast("T", pkgutil.resolve_name(part)) if isinstance(part, str) else part


def name_of(part: Part[Any]) -> str:
    """Return the name of a part, for error messages."""
    return part if isinstance(part, str) else f"{part.__module__}:{part.__qualname__}"


class Plugins(Generic[T]):
    """Entries by URL scheme.

    Args:
        group: of the entry points; also what an entry is called in errors, so that ``"levada.carriers"`` has carriers.
        kind: class of the entries.
        built_in: levada's own entries.
    """

    def __init__(self, group: str, kind: type[T], built_in: Mapping[str, T]) -> None:
        self._group = group
        self._kind = kind
        self._built_in = built_in
        self._known = dict(built_in)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the schemes of levada and of the program."""
        return iter(self._known)

    def register(self, scheme: str, entry: T) -> None:
        """Add an entry.

        Raises:
            ConfigurationError: not a scheme, or a scheme that has an entry.
            TypeError: not an entry.
        """
        if not isinstance(entry, self._kind):
            raise TypeError(f"the entry of {scheme}:// is {entry!r}, wanted a {self._kind.__name__}")
        if not _SCHEME.fullmatch(scheme):
            raise ConfigurationError(f"not a scheme: {scheme!r}: expected lower-case letters, digits, '.' and '-'")
        there = self._known.get(scheme)
        if there is not None and there != entry:
            whose = "levada's own" if scheme in self._built_in else "taken"
            raise ConfigurationError(f"{scheme}:// is {whose} ({there}), so {entry} needs another scheme")
        self._known[scheme] = entry

    def find(self, scheme: str) -> T | None:
        """Return the entry of a scheme, loading it if a package announces it; ``None`` if there is none.

        Raises:
            ConfigurationError: the entry cannot be loaded, or two packages announce it.
        """
        found = self._known.get(scheme)
        return self._load(scheme) if found is None and _SCHEME.fullmatch(scheme) else found

    def hint(self, scheme: str) -> str:
        """Return ``"; is it tcp?"`` for a scheme that is nearly one of them, otherwise an empty text."""
        near = difflib.get_close_matches(scheme, self._known, 1)
        return f"; is it {near[0]}?" if near else ""

    def _load(self, scheme: str) -> T | None:
        from importlib.metadata import entry_points  # 20 ms, and most programs need none

        announced = [point for point in entry_points(group=self._group) if point.name == scheme]
        if not announced:
            return None
        if len(announced) > 1:
            both = " and ".join(sorted(map(_origin, announced)))
            raise ConfigurationError(f"{scheme}:// is announced by {both}: uninstall all but one")
        [point] = announced
        try:
            entry = point.load()
        except (Exception, SystemExit) as error:
            logger.debug("%s:// cannot be loaded", scheme, exc_info=True)
            why = printable(f"{type(error).__name__}: {error}")
            raise ConfigurationError(
                f"{scheme}:// comes from {_origin(point)}, which cannot be loaded: {why}"
            ) from error
        if not isinstance(entry, self._kind):
            raise ConfigurationError(f"{scheme}:// comes from {_origin(point)}, which is not a {self._kind.__name__}")
        self._known[scheme] = entry
        return entry


def _origin(point: EntryPoint) -> str:
    package = "a package without a name" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return f"{package} ({point.value})"
