"""Debian's Chromium without a window, driven by its own DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
POLL_S = 0.05
START_S = 60.0
MAX_ANSWER_BYTES = 1 << 26


class Navigated(RuntimeError):
    """The browser left the page during a call."""


class Tab:
    """One page in a browser; see `browser`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)

    async def ask(self, method: str, **fields: Any) -> dict[str, Any]:
        """Send a command to the browser and return its answer."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": fields})
        while True:
            reply = await self._socket.receive_json()
            if reply.get("id") == number:
                if "error" in reply:
                    kind = Navigated if "navigated" in str(reply["error"]) else RuntimeError
                    raise kind(f"{method}: {reply['error']}")
                found: dict[str, Any] = reply["result"]
                return found

    async def look(self, script: str) -> Any:
        """Evaluate an expression in the page's own script."""
        found = await self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def open(self, address: str) -> None:
        """Go there, and where that leads to."""
        await self.ask("Page.navigate", url=address)
        is_there = "location.protocol.startsWith('http') && !location.search"
        await self.until(f"{is_there} && document.readyState === 'complete'")

    async def warned_of(self, address: str) -> str:
        """Go there, and the certificate that its warning shows, in PEM.

        Raises:
            RuntimeError: it does not warn.
        """
        navigation = await self.ask("Page.navigate", url=address)
        if "CERT" not in navigation.get("errorText", ""):
            raise RuntimeError(f"{address}: expected a warning, got {navigation}")
        details = "document.getElementById('error-debugging-info').textContent"
        shown = str(await self.until(f"document.readyState === 'complete' && {details}"))
        begins, ends = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        return begins + shown.partition(begins)[2].partition(ends)[0] + ends

    async def go_on(self) -> None:
        """Past the warning, as its owner does."""
        for button in ("details-button", "proceed-link"):
            await self.look(f"document.getElementById('{button}').click()")

    async def until(self, script: str) -> Any:
        """Wait until it is so, on whatever page."""
        while True:
            with contextlib.suppress(Navigated):
                if found := await self.look(script):
                    return found
            await asyncio.sleep(POLL_S)

    async def press(self, key: str, code: int) -> None:
        """A key down and up again."""
        for kind in ("keyDown", "keyUp"):
            fields = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.ask("Input.dispatchKeyEvent", type=kind, **fields, **text)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Look at it on another screen."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """Return the visible page as PNG."""
        found = await self.ask("Page.captureScreenshot", format="png")
        return base64.b64decode(found["data"])


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A browser with an empty page, whose profile is in this folder.

    Raises:
        RuntimeError: there is no Chromium here.
        TimeoutError: it does not start.
    """
    if CHROMIUM is None:
        raise RuntimeError("expected chromium on the path")
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    try:
        async with aiohttp.ClientSession() as session:
            address = await _address_of_tab(session, folder)
            async with session.ws_connect(address, max_msg_size=MAX_ANSWER_BYTES) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.wait()


async def _address_of_tab(session: aiohttp.ClientSession, folder: Path) -> str:
    port_file = folder / "DevToolsActivePort"
    async with asyncio.timeout(START_S):
        while True:
            await asyncio.sleep(POLL_S)
            if not port_file.exists() or len(port_file.read_text().splitlines()) < 2:
                continue
            port = port_file.read_text().splitlines()[0]
            async with session.get(f"http://127.0.0.1:{port}/json/list") as got:
                tabs = [one for one in json.loads(await got.text()) if one["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
