"""Variables of modules. All processes of a world share them, and a process that is started again finds what its last life has left in them.

Real processes have their own, so a program that depends on such a variable behaves otherwise in a world. `ModuleState` finds variables of the
program that a world has changed, and warns of each once.

It looks at the modules of the packages that the main functions are from, and not at levada's own. Of a variable it sees another value, and other
elements or attributes of the same value. It does not see deeper changes, variables of classes, what functions and closures hold (such as the
cache of `functools.cache`), the state of compiled code, and other packages. It cannot tell who has made a change: the scenario may have.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import sys
import warnings
from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

__all__ = ["ModuleState", "SharedStateWarning"]

_CODE: Final = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType)
_SIMPLE: Final = (int, float, complex, bool, str, bytes, type(None))
"""Two equal values of these types are the same value."""

_CACHED_HASH: Final = "_attrs_cached_hash"
"""attrs sets it when an object of a class with ``cache_hash`` is first hashed, such as a `levada.framework.Metric`."""


class SharedStateWarning(UserWarning):
    """A variable of a module has changed in a simulated world, where all processes share it."""


class ModuleState:
    """The variables of a program at the start of its processes."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, list[Any]]] = {}
        """By module and name, a value and its parts."""

    def watch(self, main: object) -> None:
        """Remember the variables of the package of a main function, unless they are known already."""
        while isinstance(main, functools.partial):
            main = main.func
        package = (getattr(main, "__module__", None) or "levada").partition(".")[0]
        if package == "levada" or package in self._before:  # a package is the parent of its modules, so it is loaded
            return
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == package and isinstance(module, ModuleType):
                self._before[name] = _variables(module)

    def warn(self) -> None:
        """Warn of each variable that is not as it was, once as long as the filters of warnings stay the same."""
        for name, before in self._before.items():
            for variable, now in _variables(sys.modules.get(name)).items():
                if variable not in before or not _all_same(before[variable], now):
                    self._warn_of(sys.modules[name], variable)

    @staticmethod
    def _warn_of(module: ModuleType, variable: str) -> None:
        file = getattr(module, "__file__", None) or module.__name__
        starts = f"{variable} ", f"{variable}:"
        lines = enumerate(linecache.getlines(file), 1)
        warnings.warn_explicit(
            f"{module.__name__}.{variable} has changed in a simulated world, where all processes share it, also a process that is started "
            "again; each real process has its own",
            SharedStateWarning,
            file,
            next((number for number, line in lines if line.startswith(starts)), 1),
            module.__name__,
            vars(module).setdefault("__warningregistry__", {}),
        )


def _variables(module: ModuleType | None) -> dict[str, list[Any]]:
    """Return the variables of a module, each with its value and the parts of the value; none for a module that is not loaded."""
    return {
        name: [value, *_parts(value)]
        for name, value in ({} if module is None else vars(module)).items()
        if not name.startswith("__") and not isinstance(value, _CODE)
    }


def _parts(value: Any) -> list[Any]:
    """Return the elements of a container, or the attributes of another object."""
    if isinstance(value, _SIMPLE):
        return []
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque | bytearray):
        return list(value)
    if isinstance(value, itertools.count):
        return [repr(value)]
    try:
        state: Any = object.__getstate__(value)  # attributes in __dict__ and in slots
    except Exception:  # noqa: BLE001 - a stand-in for an object that is not there runs code of its own
        return []
    found = [state] if isinstance(state, dict) else [part for part in state or () if part]
    named = (each for attributes in found for each in attributes.items() if each[0] != _CACHED_HASH)
    return [part for each in named for part in each]


def _same(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _SIMPLE) and a == b)


def _all_same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(_same, before, after))
