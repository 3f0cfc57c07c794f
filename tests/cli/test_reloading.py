"""``levada serve --reload``: which changes count, and how an app is imported again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from levada.actors import cli
from levada.actors.apps import find
from levada.actors.cli.reloading import CodeChanges, import_again, is_code, project_of, shown
from levada.framework.errors import ConfigurationError
from levada.framework.message import class_of

pytestmark = pytest.mark.loopback


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a package, in the current folder; its modules are forgotten at the end."""
    (tmp_path / "shop_for_reload").mkdir()
    for name in ("__init__.py", "desk.py", "prices.py"):
        (tmp_path / "shop_for_reload" / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("shop_for_reload"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("/desk/shop/app.py", True),
        ("/desk/app.py", True),
        ("/desk/.venv/lib/site.py", False),
        ("/desk/venv/lib/python3.11/site-packages/trio.py", False),
        ("/desk/.app.py", False),
        ("/desk/__pycache__/app.py", False),
        ("/desk/app.pyc", False),
        ("/desk/journal/0.segment", False),
        ("/desk/app.py.log", False),
        ("/elsewhere/app.py", False),
    ],
)
def test_python_files_of_the_project_count(path: str, counts: bool) -> None:
    assert is_code(Path("/desk"), Path(path)) == counts


async def test_changes_of_code_are_gathered_and_other_files_are_ignored(project: Path) -> None:
    pytest.importorskip("watchfiles")
    changes = CodeChanges(project)
    app, prices, log = (project / "shop_for_reload" / name for name in ("desk.py", "prices.py", "desk.log"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(changes.watch)
        seen: list[Path] = []
        while not seen:  # the watch needs a moment to begin
            app.write_text("x = 1")
            with trio.move_on_after(0.2):
                seen = await changes.next()
        assert seen == [Path("shop_for_reload/desk.py")]
        log.write_text("a line")
        app.unlink()
        prices.write_text("x = 1")
        gathered = set[Path]()
        while len(gathered) < 2:  # at once, unless this process was held up between the two
            gathered.update(await changes.next())
        assert gathered == {Path("shop_for_reload/desk.py"), Path("shop_for_reload/prices.py")}
        nursery.cancel_scope.cancel()


async def test_a_folder_that_is_gone_cannot_be_watched(tmp_path: Path) -> None:
    pytest.importorskip("watchfiles")
    with pytest.raises(ExceptionGroup) as raised:
        await CodeChanges(tmp_path / "gone").watch()
    assert raised.group_contains(ConfigurationError, match=r"cannot watch .*gone \(--reload\): ")


def test_the_project_is_the_folder_of_the_top_module(project: Path) -> None:
    (project / "shop_for_reload" / "desk.py").write_text("app = 1")
    (project / "shop_for_reload" / "__init__.py").write_text("app = 1")
    for target in ("shop_for_reload.desk:app", "shop_for_reload:app"):
        find(target)
        assert project_of(target) == project
    with pytest.raises(ConfigurationError, match="--reload watches files, and module sys has none"):
        project_of("sys:path")
    with pytest.raises(
        ConfigurationError, match=r"module pytest is installed in .*: run it in its project, or install it"
    ):
        project_of("pytest:main")


MESSAGE = """
from levada.framework import message

@message("shop_for_reload.Ask")
class Ask:
    symbol: str
"""


def test_an_app_is_imported_again_with_its_modules(project: Path) -> None:
    """A message class may have other fields, or be in another module."""
    desk, prices = (project / "shop_for_reload" / name for name in ("desk.py", "prices.py"))
    target = "shop_for_reload.desk:app"
    prices.write_text(MESSAGE)
    desk.write_text("from .prices import Ask\napp = 1")
    assert find(target) == 1
    prices.write_text("PRICE = 2")
    desk.write_text(f"{MESSAGE}    count: int = 0\nfrom .prices import PRICE as app")
    import_again(target, project)
    assert find(target) == 2
    known = class_of("shop_for_reload.Ask")
    assert known is not None
    assert known.__module__ == "shop_for_reload.desk"
    assert known("EURUSD").count == 0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("app = (", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit('no')", "SystemExit: no"),
        ("import no_such_module_at_all", "no module named 'no_such_module_at_all'"),
        ("other = 1", "nothing is named 'app' in module shop_for_reload.desk"),
    ],
)
def test_code_that_cannot_be_imported_leaves_the_modules_as_they_were(project: Path, code: str, text: str) -> None:
    target = "shop_for_reload.desk:app"
    (project / "shop_for_reload" / "desk.py").write_text("app = 1")
    assert find(target) == 1
    before = sys.modules["shop_for_reload.desk"]
    (project / "shop_for_reload" / "desk.py").write_text(code)
    with pytest.raises(ConfigurationError, match=text):
        import_again(target, project)
    assert sys.modules["shop_for_reload.desk"] is before


def test_of_many_files_some_are_shown() -> None:
    names = [Path("shop", f"{letter}.py") for letter in "abcde"]
    assert shown(names[:2]) == "shop/a.py, shop/b.py"
    assert shown(names) == "shop/a.py, shop/b.py, shop/c.py and 2 more"


def test_without_its_package_the_option_says_how_to_get_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    assert cli.main(["serve", "shop_for_reload:app", "--reload"]) == 2
    assert capsys.readouterr().err == "levada: --reload needs watchfiles: pip install 'levada[reload]'\n"
