"""Drive a page in headless Chromium over its remote debugging protocol: a websocket, and no driver to install."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--remote-debugging-port=0",
)
START_S = 60.0
ANSWER_S = 60.0
_LISTENING = b"DevTools listening on "


CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium on PATH, so no page was tested; on Debian: apt-get install chromium",
)


class PageError(AssertionError):
    """The page's script raised, or Chromium refused a command."""


def drive(url: str, profile: Path, visit: Callable[[Page], Awaitable[None]]) -> None:
    """Open a page and let `visit` use it. Fails if the console shows an error. `profile`: folder of the browser."""

    async def go() -> None:
        assert CHROMIUM is not None
        async with chromium_page(CHROMIUM, profile) as page:
            await page.open(url)
            try:
                await visit(page)
            finally:
                (profile / "page.png").write_bytes(await page.picture())  # shows the state at a failure
            assert page.problems == []

    asyncio.run(go())


class Page:
    """One tab. Commands are sent one at a time; what the page logs in between is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session = ""
        self._sent = 0
        self.problems: list[str] = []
        """What the console showed as an error or a warning, and exceptions that nobody caught."""

    async def open(self, url: str) -> None:
        """Open a tab and go there. What the page says from its first line on is noted."""
        target = await self._call("Target.createTarget", url="about:blank")
        attached = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            await self._call(f"{domain}.enable")
        gone = await self._call("Page.navigate", url=url)
        assert "errorText" not in gone, f"{url}: {gone['errorText']}"
        await self.run(
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        )

    async def run(self, script: str) -> Any:
        """Evaluate an expression, wait for it if it is a promise, return its value. Raises PageError."""
        done = await self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise PageError(done["exceptionDetails"].get("exception", {}).get("description", done["exceptionDetails"]))
        return done["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression over the document is true, looking after every change of the document."""
        await self.run(
            "new Promise(done => { const look = () => { if (!(" + condition + ")) return false; done(); return true; };"
            " if (look()) return;"
            " const observer = new MutationObserver(() => { if (look()) observer.disconnect(); });"
            " observer.observe(document, {subtree: true, childList: true, characterData: true, attributes: true}); })"
        )

    async def press(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        x, y = await self.run(
            f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Press the left button, move the mouse, and release the button."""
        mouse = "Input.dispatchMouseEvent"
        await self._call(mouse, type="mouseMoved", x=x, y=y)
        await self._call(mouse, type="mousePressed", x=x, y=y, button="left", clickCount=1)
        await self._call(mouse, type="mouseMoved", x=to_x, y=to_y, button="left")
        await self._call(mouse, type="mouseReleased", x=to_x, y=to_y, button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        await self._call("Input.insertText", text=text)

    async def grant(self, *permissions: str) -> None:
        """Allow pages what a user would be asked for."""
        await self._call("Browser.grantPermissions", permissions=list(permissions))

    async def key(self, name: str) -> None:
        """Press and release a key that has a name, such as Enter."""
        code, text = {
            "Enter": (13, "\r"),
            "Escape": (27, ""),
            "ArrowLeft": (37, ""),
            "ArrowRight": (39, ""),
            "+": (187, "+"),
        }[name]
        for kind in ("keyDown", "keyUp"):
            await self._call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, text=text
            )

    async def prefer(self, scheme: str) -> None:
        """Be a user of light or dark colors."""
        await self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def resize(self, width: int, height: int = 800) -> None:
        """Give the window this size in pixels."""
        await self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def picture(self) -> bytes:
        """Take a picture of what is seen, as PNG."""
        return base64.b64decode((await self._call("Page.captureScreenshot"))["data"])

    async def heap_bytes(self) -> int:
        """Return the bytes of the page's objects after a garbage collection."""
        await self._call("HeapProfiler.enable")
        await self._call("HeapProfiler.collectGarbage")
        return (await self._call("Runtime.getHeapUsage"))["usedSize"]

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        while True:
            said = await asyncio.wait_for(self._socket.receive_json(), ANSWER_S)
            if said.get("id") == self._sent:
                if "error" in said:
                    raise PageError(f"{method}: {said['error']['message']}")
                return said["result"]
            self._note(said)

    def _note(self, said: dict[str, Any]) -> None:
        match said.get("method"), said.get("params"):
            case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Runtime.consoleAPICalled", {"type": "error" | "warning", "args": words}:
                self.problems.append(" ".join(str(word.get("value")) for word in words))
            case "Log.entryAdded", {"entry": {"level": "error" | "warning", "text": text} as entry}:
                self.problems.append(f"{text} {entry.get('url', '')}".strip())
            case _:
                pass


@contextlib.asynccontextmanager
async def chromium_page(program: str, profile: Path) -> AsyncIterator[Page]:
    """Start a browser with an empty profile; end it with the block."""
    process = await asyncio.create_subprocess_exec(
        program,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        address = await asyncio.wait_for(_address(process), START_S)
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
            yield Page(socket)
            await socket.send_json({"id": 0, "method": "Browser.close"})
            await asyncio.wait_for(process.communicate(), START_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said: list[bytes] = []
    async for line in process.stderr:
        said.append(line)
        if line.startswith(_LISTENING):
            return line.removeprefix(_LISTENING).decode().strip()
    raise PageError("Chromium ended before it listened:\n" + b"".join(said).decode(errors="replace"))
