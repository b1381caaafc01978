"""Debian's chromium, driven by selenium: one for the session, offline, with an empty profile."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from selenium import webdriver
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.chrome.service import Service

CHROMIUM: Final = shutil.which("chromium")
DRIVER: Final = shutil.which("chromedriver")
FLAGS: Final = (
    "--headless",
    "--hide-scrollbars",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
SECONDS: Final = 60
PAUSE: Final = 0.01
KEYS: Final = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
}
"""Code, number and text of the keys that are no characters."""


needs_browser = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="chromium and chromium-driver are not installed: .ci/run installs them for root",
    ),
]


def in_browser(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark one test of a file as `needs_browser`."""
    for mark in needs_browser:
        test = mark(test)
    return test


LAYOUT_FAULTS: Final = """
const width = document.documentElement.clientWidth, faults = [];
if (document.scrollingElement.scrollWidth > width) faults.push("the page scrolls sideways");
for (const one of document.querySelectorAll("main *, header *, footer *")) {
  const box = one.getBoundingClientRect();
  if (box.width === 0 || one.closest(".table, pre, svg, .hidden, dialog")) continue;
  if (one.parentElement.closest(".row > *")) continue;  // cut off on purpose, with an ellipsis
  if (box.right > width + 1 || box.left < -1)
    faults.push(`${one.tagName}.${one.className} ${box.right}`);
}
for (const rows of document.querySelectorAll("ol.rows")) {
  const heights = new Set([...rows.querySelectorAll(".row")].map((row) => row.offsetHeight));
  if (heights.size > 1) faults.push(`rows of ${[...heights]} pixels`);
}
return faults.slice(0, 5);
"""
"""Elements that leave the page, and rows of the graph whose heights differ."""

INTRUSIONS: Final = """
const foreign = [...document.scripts].filter((one) => !one.src.includes("/static/"));
const made = document.querySelectorAll("main img, main iframe, main style, main object");
return [window.pwned ?? null, foreign.length, made.length];
"""
"""Whether a script of an event has run, and elements that only an event can have made."""


class Browser:
    """A browser for tests that run in an event loop. Its calls wait in a thread."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self.driver.get, url)

    async def run(self, script: str, *given: Any) -> Any:
        """Run a script to its `return`."""
        return await asyncio.to_thread(self.driver.execute_script, script, *given)

    async def wait(self, script: str, *given: Any) -> Any:
        """Run a script again and again until it returns a value that is true.

        Each run is a call of its own: a script that waits in the page would be lost with the page
        when that loads again, or another one.
        """
        looking = f"const given = [...arguments]; {script}"
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with suppress(JavascriptException):  # of a page that is only half there
                found = await self.run(looking, *given)
                if found:
                    return found
            await asyncio.sleep(PAUSE)
        state = await self.run("return [location.href, document.body.textContent.slice(0, 2000)]")
        raise AssertionError(f"after {SECONDS} s it is not true: {script} {state}")

    async def texts(self, selector: str) -> list[str]:
        return await self.values(selector, "textContent")

    async def values(self, selector: str, name: str) -> list[Any]:
        """Return a property, or a `data-` value, of each element."""
        found: list[Any] = await self.run(
            "const [selector, name] = arguments;"
            "return [...document.querySelectorAll(selector)].map((one) =>"
            " name in one ? String(one[name]).trim() : one.dataset[name] ?? null)",
            selector,
            name,
        )
        return found

    async def text(self, selector: str) -> str:
        [found] = await self.texts(selector)
        return " ".join(found.split())

    async def press(self, *keys: str) -> None:
        for key in keys:
            code, number, text = KEYS.get(key, ("", 0, key))
            given = {"key": key, "code": code, "windowsVirtualKeyCode": number}
            for kind in ({"type": "keyDown", "text": text}, {"type": "keyUp"}):
                await asyncio.to_thread(
                    self.driver.execute_cdp_cmd, "Input.dispatchKeyEvent", given | kind
                )

    async def resize(self, width: int, height: int = 900) -> None:
        given = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await asyncio.to_thread(
            self.driver.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", given
        )

    async def dark(self, *, is_dark: bool) -> None:
        value = "dark" if is_dark else "light"
        given = {"features": [{"name": "prefers-color-scheme", "value": value}]}
        await asyncio.to_thread(self.driver.execute_cdp_cmd, "Emulation.setEmulatedMedia", given)

    async def faults(self) -> list[str]:
        """Return what is wrong with the page: its layout, and messages of the browser."""
        layout: list[str] = await self.run(LAYOUT_FAULTS)
        return layout + await self.messages()

    async def messages(self) -> list[str]:
        """Return the errors of the page: of scripts, and of its policy."""
        found = await asyncio.to_thread(self.driver.get_log, "browser")
        return [str(one["message"]) for one in found]

    async def picture(self, path: Path) -> None:
        await asyncio.to_thread(self.driver.save_screenshot, str(path))


@contextmanager
def browsing(folder: str | None = None) -> Iterator[Browser]:
    """Start a browser for a block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(
        prefix="browser-", dir=folder, ignore_cleanup_errors=True
    ) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        driver.set_script_timeout(SECONDS)
        driver.set_page_load_timeout(SECONDS)
        try:
            yield Browser(driver)
        finally:
            driver.quit()
