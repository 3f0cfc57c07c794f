"""A headless Chromium, driven by the DevTools protocol over a pipe: JSON messages that end with a zero byte.

The pipe needs no port and no WebSocket, and Chromium ends when it closes, so no browser outlives a test that is killed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
)
_START = """\
import fcntl, os, sys
reading, writing = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads from file 3 and writes to file 4."""
KEYS = {
    "Enter": 13,
    "Escape": 27,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "End": 35,
    "Home": 36,
    "Tab": 9,
}


class Page:
    """One tab."""

    def __init__(self, reading: trio.lowlevel.FdStream, writing: trio.lowlevel.FdStream) -> None:
        self._reading = reading
        self._writing = writing
        self._data = bytearray()
        self._number = 0
        self.session: str | None = None
        self.log: list[str] = []
        """What pages complained about: errors of scripts, refused resources, breaches of the content security policy."""

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile is logged."""
        self._number += 1
        members = {"id": self._number, "method": method, "params": params}
        if self.session is not None:
            members["sessionId"] = self.session
        await self._writing.send_all(json.dumps(members).encode() + b"\0")
        while True:
            answer = await self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") == "Log.entryAdded":
                self.log.append(answer["params"]["entry"]["text"])
            elif answer.get("method") == "Runtime.exceptionThrown":
                self.log.append(json.dumps(answer["params"]["exceptionDetails"]))

    async def _next(self) -> dict[str, Any]:
        while (end := self._data.find(b"\0")) < 0:
            data = await self._reading.receive_some()
            assert data, "Chromium has ended"
            self._data += data
        message: dict[str, Any] = json.loads(bytes(self._data[:end]))
        del self._data[: end + 1]
        return message

    async def go(self, url: str) -> None:
        await self.command("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        found = await self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true in the page, which is looked at for each of its frames; return it."""
        with trio.fail_after(300):
            return await self.evaluate(
                f"new Promise((done) => {{ const look = () => {{ let value; try {{ value = ({expression}); }} catch {{ value = null; }}"
                " if (value) done(value); else setTimeout(look, 16); }; look(); })"
            )

    async def text(self, selector: str) -> str:
        found: str = await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def key(self, name: str) -> None:
        """Press a key: one of `KEYS`, or a character."""
        code = KEYS.get(name, ord(name[0].upper()))
        members = {"key": name, "windowsVirtualKeyCode": code}
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        await self.command("Input.dispatchKeyEvent", type="keyDown", **members, **text)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **members)

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = "dark" if dark else "light"
        await self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, path: Path) -> None:
        found = await self.command("Page.captureScreenshot", format="png")
        await trio.Path(path).write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Page]:
    """Start Chromium with a profile in a folder; it ends with the block, however that ends."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe(), os.pipe()
    files = to_write[0], to_read[1]
    browser = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(  # noqa: ASYNC220 - its end is waited for in a thread
        [sys.executable, "-c", _START, *map(str, files), *browser],
        pass_fds=files,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(to_write[0])
    os.close(to_read[1])
    async with trio.lowlevel.FdStream(to_read[0]) as reading:
        try:
            async with trio.lowlevel.FdStream(to_write[1]) as writing:
                page = Page(reading, writing)
                targets = (await page.command("Target.getTargets"))["targetInfos"]
                target = next(each["targetId"] for each in targets if each["type"] == "page")
                attached = await page.command("Target.attachToTarget", targetId=target, flatten=True)
                page.session = attached["sessionId"]
                for domain in ("Page", "Runtime", "Log"):
                    await page.command(f"{domain}.enable")
                yield page
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(10):
                    await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
                process.kill()
                process.wait(10)
