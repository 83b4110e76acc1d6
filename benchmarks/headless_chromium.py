"""Pictures of web pages, with Debian's Chromium and without a screen."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60.0
SCALE = 1.5
"""Pixels of a picture for one of the page: text stays sharp where the picture is shown smaller."""
COLORS = 256


class NoPictureError(Exception):
    """Chromium is missing, or drew nothing."""


def find_chromium() -> str:
    """The program. Raises NoPictureError naming it when there is none."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        raise NoPictureError(f"none of {', '.join(PROGRAMS)} is installed (Debian: apt-get install chromium)")
    return found


def take_picture(html: Path, size: tuple[int, int], png: Path) -> None:
    """Writes what a page of so many pixels' width and height looks like, in few colours. Raises NoPictureError."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    with tempfile.TemporaryDirectory() as profile:
        command = (
            *(find_chromium(), *options, f"--force-device-scale-factor={SCALE}", f"--user-data-dir={profile}"),
            *(f"--window-size={size[0]},{size[1]}", f"--screenshot={png.resolve()}", html.resolve().as_uri()),
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0 or not png.is_file():
        raise NoPictureError(f"Chromium ended with status {done.returncode}:\n{done.stderr}")
    if page_size(png) != size:
        raise NoPictureError(f"{png}: Chromium drew a page of {page_size(png)} pixels, asked for {size}")
    with Image.open(png) as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(png, optimize=True)


def page_size(png: Path) -> tuple[int, int]:
    """Width and height of the page that a picture shows, in its pixels."""
    with Image.open(png) as picture:
        return round(picture.width / SCALE), round(picture.height / SCALE)
