"""The dashboard's answers to HTTP requests: who gets what, and what no one gets."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from levada.actors.dashboard import DashboardConfig
from levada.actors.dashboard.login import LASTING, Login, key_from
from levada.actors.dashboard.site import Site, SiteRequest, SiteResponse
from levada.framework.errors import ConfigurationError
from levada.transports.carriers.tls import TlsConfig

ASSETS = (
    "/",
    "/app.js",
    "/charts.js",
    "/detail.js",
    "/dom.js",
    "/events.js",
    "/flow.js",
    "/format.js",
    "/grid.js",
    "/icon.svg",
    "/overview.js",
    "/pages.js",
    "/style.css",
    "/uplot.min.css",
    "/uplot.min.js",
)


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def site(login: Login | None = None, *, secure: bool = False) -> Site:
    hosts = DashboardConfig().hosts(8437)
    return Site(login or Login(b"k" * 32), hosts=hosts, secure=secure, cookie="levada-8437")


def ask(site: Site, target: str, method: str = "GET", body: object = None, **headers: str) -> SiteResponse | None:
    fields = {"host": "127.0.0.1:8437", **headers}
    return site.answer(
        SiteRequest(method, target, tuple(fields.items()), b"" if body is None else json.dumps(body).encode())
    )


def status(response: SiteResponse | None) -> int | None:
    return None if response is None else response.status


@pytest.mark.parametrize("path", ASSETS)
def test_files_are_open_to_all_and_guarded(path: str) -> None:
    response = ask(site(), path)
    assert response is not None
    assert response.status == 200
    assert len(response.body) > 100
    fields = dict(response.fields())
    assert fields["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in fields["Content-Security-Policy"]
    assert fields["X-Content-Type-Options"] == "nosniff"
    assert fields["Referrer-Policy"] == "no-referrer"
    assert fields["Cache-Control"] == "no-store"
    assert fields["Content-Length"] == str(len(response.body))


def test_all_files_of_the_package_are_known() -> None:
    import levada.actors.dashboard

    folder = Path(next(iter(levada.actors.dashboard.__path__))) / "assets"
    served = {f"/{'' if name == 'index.html' else name}" for name in os.listdir(folder)} - {"/uplot.LICENSE"}
    assert sorted(served) == sorted(ASSETS)


@pytest.mark.parametrize("path", ASSETS)
def test_files_name_no_other_address_and_hold_nothing_inline(path: str) -> None:
    response = ask(site(), path)
    assert response is not None
    text = response.body.decode().removeprefix("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
    assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    for wrong in (
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        ' onclick="',
        "<style",
        'style="',
    ):
        assert wrong not in text


@pytest.mark.parametrize(
    ("target", "method", "headers", "wanted"),
    [
        ("/", "GET", {"host": "localhost:8437"}, 200),
        ("/", "GET", {"host": "LOCALHOST:8437"}, 200),
        ("/", "GET", {"host": "[::1]:8437"}, 200),
        ("/", "GET", {"host": "evil.example:8437"}, 421),
        ("/", "GET", {"host": "127.0.0.1"}, 421),
        ("/", "GET", {"host": "127.0.0.1:80"}, 421),
        ("/", "GET", {"host": ""}, 421),
        ("/socket", "GET", {"host": "evil.example", "origin": "http://evil.example"}, 421),
        ("/app.js?x=1", "GET", {}, 200),
        ("/", "HEAD", {}, 200),
        ("/", "POST", {}, 405),
        ("/../login.py", "GET", {}, 404),
        ("/assets/app.js", "GET", {}, 404),
        ("/index.html", "GET", {}, 404),
        ("/login", "GET", {}, 401),
        ("/login", "PUT", {}, 405),
        ("/login", "POST", {}, 403),
        ("/login", "POST", {"origin": "http://evil.example"}, 403),
        ("/login", "POST", {"origin": "null"}, 403),
        ("/login", "POST", {"origin": "https://127.0.0.1:8437"}, 403),
        ("/login", "POST", {"origin": "http://localhost:8437"}, 403),
        ("/login", "POST", {"origin": "http://127.0.0.1:8437"}, 401),
        ("/socket", "GET", {}, 403),
        ("/socket", "GET", {"origin": "http://evil.example"}, 403),
        ("/socket", "GET", {"origin": "http://127.0.0.1:8437"}, 401),
        ("/socket", "GET", {"origin": "http://127.0.0.1:8437", "cookie": "levada-8437=1.2.3"}, 401),
    ],
)
def test_statuses(target: str, method: str, headers: dict[str, str], wanted: int) -> None:
    assert status(ask(site(), target, method, **headers)) == wanted


ORIGIN = {"origin": "http://127.0.0.1:8437"}


def test_a_token_is_exchanged_once_for_a_cookie() -> None:
    clock = Clock()
    login = Login(b"k" * 32, clock)
    served = site(login)
    token = login.token()
    assert token not in repr(login)
    response = ask(served, "/login", "POST", {"token": token}, **ORIGIN)
    assert response is not None
    assert response.status == 204
    ((name, value),) = response.headers
    assert (name, value.split("; ")[1:]) == (
        "Set-Cookie",
        [f"Max-Age={LASTING}", "Path=/", "HttpOnly", "SameSite=Strict"],
    )
    assert token not in value
    cookie = value.split(";")[0]
    again = ask(served, "/login", "POST", {"token": token}, **ORIGIN)
    assert again is not None
    # The page shows this text.
    text = b"this link was used before, or belongs to another run of the program: get a new one\n"
    assert (again.status, again.body) == (401, text)
    # The cookie opens the WebSocket, beside others, until it runs out.
    assert status(ask(served, "/socket", cookie=f"other=1; {cookie}; more=2", **ORIGIN)) is None
    assert status(ask(served, "/login", cookie=cookie)) == 204
    clock.now += LASTING - 1
    assert status(ask(served, "/socket", cookie=cookie, **ORIGIN)) is None
    clock.now += 1
    assert status(ask(served, "/socket", cookie=cookie, **ORIGIN)) == 401


@pytest.mark.parametrize("body", [None, 5, [], {}, {"token": 5}, {"token": ""}, {"token": "é"}, {"token": "x" * 100}])
def test_what_is_no_token(body: object) -> None:
    login = Login(b"k" * 32)
    login.token()
    assert status(ask(site(login), "/login", "POST", body, **ORIGIN)) == 401


def test_https_has_its_own_cookie() -> None:
    login = Login(b"k" * 32)
    served = site(login, secure=True)
    origin = {"origin": "https://127.0.0.1:8437"}
    response = ask(served, "/login", "POST", {"token": login.token()}, **origin)
    assert response is not None
    value = response.headers[0][1]
    assert value.startswith("__Host-levada-8437=")
    assert value.endswith("; Secure")
    assert status(ask(served, "/socket", cookie=value.split(";")[0], **origin)) is None


@pytest.mark.parametrize("change", range(8))
def test_a_changed_cookie_is_refused(change: int) -> None:
    login = Login(b"k" * 32)
    right = login.cookie()
    at = change * (len(right) - 1) // 7
    wrong = right[:at] + ("0" if right[at] != "0" else "1") + right[at + 1 :]
    assert login.admits(right)
    assert not login.admits(wrong)
    assert not Login(b"other" * 7).admits(right)


@pytest.mark.parametrize("cookie", ["", ".", "..", "é.é.é", "9999999999", "x.y.z", "\ud800.a.b"[1:]])
def test_what_is_no_cookie(cookie: str) -> None:
    assert not Login(b"k" * 32).admits(cookie)


def test_tokens_are_few() -> None:
    login = Login(b"k" * 32)
    tokens = [login.token() for _ in range(20)]
    assert [login.redeem(token) for token in tokens] == [False] * 4 + [True] * 16


def test_a_key_is_kept_for_this_user(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = key_from(path)
    assert (len(key), key_from(path), path.stat().st_mode & 0o777) == (32, key, 0o600)
    assert key_from(None) != key_from(None)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="other users can read"):
        key_from(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="is not the key of a dashboard"):
        key_from(path)
    with pytest.raises(ConfigurationError, match=r"cannot use .*: No such file"):
        key_from(tmp_path / "missing" / "key")


def test_another_address_must_be_asked_for() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::", "desk.example"):
        with pytest.raises(ConfigurationError, match=r"needs TLS, or plaintext=True"):
            DashboardConfig(host=host)
    with pytest.raises(ConfigurationError, match="needs the names that browsers will use"):
        DashboardConfig(host="0.0.0.0", tls=TlsConfig())
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert DashboardConfig(host=host).is_loopback
    assert DashboardConfig(host="192.0.2.1", plaintext=True).hosts(81) == {"192.0.2.1:81"}
    assert DashboardConfig(host="::", names=("Desk.example",), tls=TlsConfig()).hosts(443) == {
        "[::]",
        "[::]:443",
        "desk.example",
        "desk.example:443",
    }
