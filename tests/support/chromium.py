"""A headless Chromium that can reach no network, for tests of pages."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVERS = ("chromedriver",)
MOST_SECONDS = 60
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
    "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:1",
)


@functools.cache
def why_no_chromium() -> str:
    """Return what is missing; empty: nothing."""
    if find_program(BROWSERS) is None:
        return "no Chromium"
    if find_program(DRIVERS) is None:
        return "no chromedriver"
    try:
        import selenium  # noqa: F401 - whether it is there
    except ImportError:
        return "no selenium"
    return ""


def find_program(names: tuple[str, ...]) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """Run a browser; what it keeps goes into a folder."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = find_program(BROWSERS) or ""
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(find_program(DRIVERS))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def open_page(driver: Any, page: Path, *, scheme: str = "light") -> int:
    """Open a page and wait until all is drawn; return the milliseconds since it was opened."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(page.as_uri())
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        ready = driver.execute_script("return document.documentElement.dataset.ready")
        if ready is not None:
            return int(ready)
        time.sleep(0.05)
    raise TimeoutError(f"{page} is not drawn after {MOST_SECONDS} s: {driver.get_log('browser')}")
