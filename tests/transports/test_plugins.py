"""Entries that packages announce: loaded when named, never in place of levada's own, with errors that name the package."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest
from tests.packages import install

from levada.framework.errors import ConfigurationError
from levada.transports.plugins import Plugins, name_of, resolve

GROUP = "levada.test_plugins"


@attrs.frozen
class Entry:
    where: str

    def __str__(self) -> str:
        return self.where


@pytest.fixture
def table() -> Plugins[Entry]:
    return Plugins(GROUP, Entry, {"own": Entry("levada.own")})


def package(folder: Path, name: str, text: str, **entry_points: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    install(folder, name, GROUP, **entry_points)


def test_an_entry_point_is_loaded_when_its_scheme_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Plugins[Entry]
) -> None:
    package(tmp_path, "plugged_one", f"from {__name__} import Entry\nONE = Entry('here')", one="plugged_one:ONE")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Entry.__module__])
    assert table.find("own") == Entry("levada.own")
    assert table.find("two") is None
    assert "plugged_one" not in sys.modules
    found = table.find("one")
    assert found == Entry("here")
    assert table.find("one") is found
    assert list(table) == ["own", "one"]


def test_what_cannot_be_loaded_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Plugins[Entry]
) -> None:
    package(
        tmp_path,
        "plugged_bad",
        "if True:\n    import module_that_does_not_exist",
        bad="plugged_bad:ENTRY",
    )
    package(tmp_path / "more", "plugged_odd", "ODD = 5", odd="plugged_odd:ODD", none="plugged_odd:MISSING")
    package(tmp_path, "plugged_end", "raise SystemExit(0)", end="plugged_end:ENTRY")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "more")
    with pytest.raises(
        ConfigurationError,
        match=r"^bad:// comes from plugged_bad 1.0 \(plugged_bad:ENTRY\), which cannot be loaded: "
        r"ModuleNotFoundError: No module named 'module_that_does_not_exist'$",
    ) as raised:
        table.find("bad")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)
    with pytest.raises(ConfigurationError, match=r"plugged_odd 1.0 \(plugged_odd:ODD\), which is not a Entry"):
        table.find("odd")
    with pytest.raises(ConfigurationError, match="cannot be loaded: AttributeError"):
        table.find("none")
    with pytest.raises(ConfigurationError, match="cannot be loaded: SystemExit: 0"):
        table.find("end")


def test_two_packages_with_one_scheme_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Plugins[Entry]
) -> None:
    for name in ("plugged_left", "plugged_right"):
        package(tmp_path, name, "raise AssertionError('imported')", twice=f"{name}:X")
    monkeypatch.syspath_prepend(tmp_path)
    both = r"plugged_left 1.0 \(plugged_left:X\) and plugged_right 1.0 \(plugged_right:X\)"
    with pytest.raises(ConfigurationError, match=f"^twice:// is announced by {both}: uninstall all but one$"):
        table.find("twice")


def test_a_package_cannot_replace_an_entry_of_levada(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Plugins[Entry]
) -> None:
    package(tmp_path, "plugged_greedy", "raise AssertionError('imported')", own="plugged_greedy:X")
    monkeypatch.syspath_prepend(tmp_path)
    assert table.find("own") == Entry("levada.own")
    with pytest.raises(
        ConfigurationError, match=r"^own:// is levada's own \(levada.own\), so mine needs another scheme$"
    ):
        table.register("own", Entry("mine"))


def test_a_program_registers_a_scheme_once(table: Plugins[Entry]) -> None:
    table.register("new", Entry("mine"))
    table.register("new", Entry("mine"))
    assert table.find("new") == Entry("mine")
    with pytest.raises(ConfigurationError, match=r"new:// is taken \(mine\), so yours needs another scheme"):
        table.register("new", Entry("yours"))


@pytest.mark.parametrize("scheme", ["", "New", "rsocket+new", "1st", "new://", "a b"])
def test_what_is_no_scheme_is_refused(table: Plugins[Entry], scheme: str) -> None:
    assert table.find(scheme) is None
    with pytest.raises(ConfigurationError, match="not a scheme"):
        table.register(scheme, Entry("x"))


def test_what_is_no_entry_is_refused(table: Plugins[Entry]) -> None:
    with pytest.raises(TypeError, match="the entry of new:// is 5, wanted a Entry"):
        table.register("new", 5)  # type: ignore[arg-type]  # that is the mistake


def test_parts_are_objects_or_their_names() -> None:
    part: str = resolve("os.path:join")
    assert part is resolve(part)
    assert name_of("os.path:join") == "os.path:join"
    assert name_of(Plugins) == "levada.transports.plugins:Plugins"
