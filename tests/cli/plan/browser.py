"""A headless browser: the content of a page and its console."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def shown(page: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """The page after its scripts have run, as HTML, and every line of the console."""
    browser = find()
    assert browser is not None
    done = subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
            "--window-size=1300,900",
            *options,
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def attribute(dom: str, element: str, name: str) -> str:
    """An attribute of the element with that id."""
    tag = re.search(rf'<[^>]*\bid="{element}"[^>]*>', dom)
    assert tag, f"no element {element}"
    value = re.search(rf'{name}="([^"]*)"', tag[0])
    assert value, f"{tag[0]} has no {name}"
    return value[1]
