"""A headless Chromium for tests of pages, driven by the DevTools protocol over a pair of pipes, which needs no library.

with Browser(chromium) as browser:
    browser.open(path)
    browser.evaluate("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from waiting import LONG, comes

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """The browser that is installed here, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser."""

    def __init__(self, program: str, width: int = 1280, height: int = 800) -> None:
        self.folder = tempfile.mkdtemp(prefix="partc-browser-")
        to_read, self.out = os.pipe()
        self.into, to_write = os.pipe()
        shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            "--no-first-run",
        ]
        flags += [f"--user-data-dir={self.folder}", f"--window-size={width},{height}", "--disable-extensions"]
        flags += ["--disable-background-networking", "--hide-scrollbars", "about:blank"]
        ends = (to_read, to_write)
        command = ["bash", "-c", shell, "bash", *map(str, ends), program, *flags]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, pass_fds=ends, stdout=quiet, stderr=quiet)
        for end in ends:
            os.close(end)
        self.number, self.rest, self.session = 0, b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # else focus moves without its events
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol; events on the way are looked at and left."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.number:
                assert "error" not in found, (method, found["error"])
                result: dict[str, Any] = found["result"]
                return result
            self._event(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], LONG)
            assert ready, "the browser does not answer"
            self.rest += os.read(self.into, 1 << 20)
        text, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _event(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"])[:2000])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])

    def open(self, address: str, drawn: str) -> None:
        """Loads a page, until an expression is true."""
        self.call("Page.navigate", url="about:blank")  # else another hash of the same page loads nothing
        self.wait("location.href === 'about:blank'")
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url=address)
        self.wait(drawn)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true; what the page has thrown meanwhile ends the wait."""
        assert comes(lambda: self.errors or self.evaluate(f"!!({expression})")), expression
        assert not self.errors, self.errors

    def click(self, selector: str) -> None:
        """Clicks into an element near its upper edge, by the mouse, when it has been brought into sight and has the focus."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.focus({{preventScroll: true}})")
        self.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
        self.evaluate(f"{found}.scrollIntoView({{block: 'nearest'}})")
        place = self.evaluate(
            f"(() => {{ const r = {found}.getBoundingClientRect(); return [r.x + r.width / 2, r.y + Math.min(r.height / 2, 12)]; }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def press(self, key: str, text: str = "") -> None:
        """Presses a key; a letter has its `text`."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38}
        about = {
            "key": key,
            "windowsVirtualKeyCode": codes.get(key, 0),
            "text": text or ("\r" if key == "Enter" else ""),
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def write(self, text: str) -> None:
        """Writes into what has the focus."""
        self.call("Input.insertText", text=text)

    def fill(self, selector: str, value: str | bool) -> None:
        """Gives a field a text, or checks a box or not, as one who types or clicks would."""
        field = f"document.querySelector({json.dumps(selector)})"
        if isinstance(value, bool):
            self.evaluate(f"{field}.checked === {json.dumps(value)} || {field}.click()")
        else:
            self.evaluate(
                f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))"
            )

    def resize(self, width: int, height: int) -> None:
        """Gives the page another size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def theme(self, name: str) -> None:
        """Prefers `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path: Path) -> None:
        """Writes what is seen as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
