"""A real browser for tests: Chromium without a window, driven over its DevTools protocol (commands and events as JSON over a
WebSocket, https://chromedevtools.github.io/devtools-protocol/). Only what our page needs."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)

# Where to click something, and whether it is what lies on top there.
MIDDLE = """{
  it.scrollIntoView({ block: "nearest" });
  const { x, y, width, height } = it.getBoundingClientRect();
  const at = [x + width / 2, y + height / 2];
  return [...at, it.contains(document.elementFromPoint(...at))];
}"""


def find_browser() -> str | None:
    """Where a Chromium is on this machine, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(AssertionError):
    """A script in the page failed, or something did not come in time."""


class Browser:
    """One Chromium with a profile of its own. Use as a context manager."""

    def __init__(self, program: str, profile: Path, start_seconds: float = 30) -> None:
        root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium refuses its sandbox to root
        command = [program, *OPTIONS, *(["--no-sandbox"] if root else []), f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            port, path = self._address(profile / "DevToolsActivePort", start_seconds)
            self._after = ExitStack()
            self.connection = self._after.enter_context(
                connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None)
            )
        except BaseException:
            self._kill()
            raise
        self._last = 0
        self._pages: dict[str, Page] = {}

    def _address(self, file: Path, seconds: float) -> tuple[str, str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            lines = file.read_text().split() if file.exists() else []
            if len(lines) == 2:
                return lines[0], lines[1]
            if self.process.poll() is not None:
                raise BrowserError(f"the browser ended with {self.process.returncode} before it could be reached")
            time.sleep(0.02)
        raise BrowserError(f"the browser did not offer DevTools within {seconds} s")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._after.close()
        self._kill()

    def _kill(self) -> None:
        """The browser and the processes it started: they are a group of their own."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def page(self, *, width: int = 1280, height: int = 860, dark: bool = False) -> Page:
        """A fresh page with storage of its own."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        page.look(width=width, height=height, dark=dark)
        return page

    def send(
        self, method: str, session: str | None = None, seconds: float = 20, /, **parameters: Any
    ) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come in between go to their pages."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        self.connection.send(json.dumps(message | ({"sessionId": session} if session else {})))
        end = time.monotonic() + seconds
        while True:
            answer = self.receive(end - time.monotonic())
            if answer is None:
                raise BrowserError(f"no answer to {method} within {seconds} s")
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error'].get('message')}")
                return answer["result"]

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, after giving it to its page where it is an event."""
        try:
            message = json.loads(self.connection.recv(timeout=max(0.0, seconds)))
        except TimeoutError:
            return None
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.take(message["method"], message["params"])
        return message


class Page:
    """One tab, with everything it asked for and complained about."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.browser, self.session, self.context = browser, session, context
        self.requests: list[dict[str, Any]] = []
        self.complaints: list[str] = []

    def close(self) -> None:
        self.browser.send("Target.disposeBrowserContext", browserContextId=self.context)

    def send(self, method: str, /, **parameters: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **parameters)

    def take(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"])
        elif event == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(
                " ".join(str(each.get("value", each.get("description"))) for each in parameters["args"])
            )
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{parameters['entry']['text']} ({parameters['entry'].get('url', '')})")

    def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """The size of the screen, and whether the system is dark."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, motion])

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(f"{expression}: {details.get('exception', {}).get('description') or details['text']}")
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            if time.monotonic() > end:
                text = self.js("document.body.innerText")
                raise BrowserError(
                    f"not within {seconds} s: {condition}\ncomplaints: {self.complaints}\nthe page says:\n{text}"
                )
            time.sleep(0.03)

    def each(self, selector: str, expression: str) -> list[Any]:
        """An expression in `it` for everything that a selector finds."""
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((it) => {expression})")

    def text(self, selector: str) -> str:
        """What a person reads there; of the last one where there are several."""
        return (self.each(selector, "it.innerText") or [""])[-1]

    def count(self, selector: str) -> int:
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str) -> None:
        """A real click, in the middle of the last one that is found. Fails where something else is in the way."""
        x, y, free = self.each(selector, MIDDLE)[-1]
        if not free:
            raise BrowserError(f"{selector} cannot be clicked: something lies over it, or it is not shown")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Put text in a field as typing does."""
        self.each(selector, "{ it.focus(); it.select() }")
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
        code, text = codes[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
