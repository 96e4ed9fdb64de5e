"""A headless Chromium, driven by its own driver over WebDriver, a protocol of plain HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
CONTROL, ENTER, ESCAPE, TAB, RIGHT = "\ue009", "\ue007", "\ue00c", "\ue004", "\ue014"


def find_browser() -> tuple[str, str] | None:
    """Paths of Chromium and its driver; None where either is not installed."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One window."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def _ask(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, url: str) -> None:
        self._ask("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a JavaScript function of this body returns."""
        return self._ask("execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, seconds: float = 60) -> Any:
        """The value of an expression, once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)
        return value

    def press(self, *keys: str) -> None:
        """Press keys together, then let them go."""
        actions = [{"type": kind, "value": key} for kind, listed in
                   (("keyDown", keys), ("keyUp", keys[::-1])) for key in listed]  # fmt: skip
        self._ask("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def command(self, name: str, **settings: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("goog/cdp/execute", cmd=name, params=settings)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip

    def set_dark(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def list_messages(self) -> list[str]:
        """What the console shows since the last call."""
        return [entry["message"] for entry in self._ask("se/log", type="browser")]

    def list_requests(self) -> list[str]:
        """The addresses asked for since the last call."""
        found = []
        for entry in self._ask("se/log", type="performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [url for url in found if not url.startswith("chrome://")]  # its own pages


@contextlib.contextmanager
def start_browser(folder: Path) -> Iterator[Browser]:
    """A window of a browser whose profile is in `folder`."""
    paths = find_browser()
    assert paths is not None
    command = [paths[1], "--port=0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        port = next(
            found[1] for line in process.stdout if (found := re.search(r"on port (\d+)\.", line))
        )
        options = {"binary": paths[0], "args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {
            "browserName": "chrome", "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }  # fmt: skip
        address = f"http://127.0.0.1:{port}/session"
        with httpx.Client(timeout=60) as http:
            answer = http.post(address, json={"capabilities": {"alwaysMatch": wanted}}).json()
            assert "sessionId" in answer["value"], answer
            session = f"{address}/{answer['value']['sessionId']}"
            http.base_url = session
            try:
                yield Browser(http)
            finally:
                http.delete(session)  # which ends the browser, too
    finally:
        process.terminate()
        process.wait()
