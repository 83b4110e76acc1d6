"""Pictures of the dashboards, from their own queries against a real Prometheus that scrapes the real services.

    python benchmarks/dashboard_pictures.py

The Overlap dashboard for run-ahead 0 and 1, with dummy kernels of a known length; the others with the
bundled models. Each becomes a page of HTML, which Chromium draws without a screen. Needs Debian's `prometheus` and
`chromium`; takes three minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.benchmarks.dashboard_page import page, size
from slipstream.benchmarks.dashboard_queries import boards, panels_of
from slipstream.benchmarks.dashboard_values import PanelResult
from slipstream.benchmarks.headless_chromium import NoPictureError, find_chromium, take_picture
from slipstream.benchmarks.observed_stack import busy, observed_stack
from slipstream.benchmarks.prometheus_server import find_prometheus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from slipstream.benchmarks.dashboard_queries import FoundPanel
    from slipstream.benchmarks.prometheus_server import Prometheus

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
RESULTS = Path(__file__).resolve().parent / "results" / "dashboards_cpu.json"
DRAFT_MS, VERIFY_MS = 1.0, 4.0
NUM_CLIENTS = 8
INTERVAL_MS = 1000
RATE_INTERVAL = "5s"
WARM_UP_S = 12.0
"""Longer than a rate's interval, so that no curve begins with the server's start."""
OVERLAP = "slipstream-overlap.json"
DUMMIES = f"{NUM_CLIENTS} clients, dummy kernels of {DRAFT_MS:g} + {VERIFY_MS:g} ms, two CPU cores"
BUNDLED = f"{NUM_CLIENTS} clients for 4 slots, the bundled models, two CPU cores"


@dataclass(frozen=True, slots=True)
class Watched:
    """A dashboard after a run."""

    name: str
    """Of its picture."""
    board: dict[str, Any]
    about: str
    """What ran."""
    results: list[PanelResult]

    def means(self) -> dict[str, dict[str, float]]:
        """The mean of each series, by panel and name."""
        return {one.panel.title: one.means() for one in self.results if one.panel.kind not in ("table", "heatmap")}


def main(
    seconds: Annotated[float, typer.Option(help="How long each picture's server is watched.")] = 40.0,
    pictures: Annotated[Path, typer.Option(help="Folder for the pictures.")] = PICTURES,
    pages: Annotated[Path | None, typer.Option(help="Folder in which the pages themselves are kept.")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="Where the panels' mean values go.")] = RESULTS,
) -> None:
    """Runs the servers, asks the queries, draws."""
    _check_programs()
    watched = asyncio.run(_all(seconds))
    with tempfile.TemporaryDirectory() as folder:
        for one in watched:
            draw(one, pages or Path(folder), pictures)
    host = (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )
    means = {one.name: one.means() for one in watched}
    json_file.write_text(json.dumps({"host": host, "seconds": seconds, "dashboards": means}, indent=1) + "\n")
    for name, panels in means.items():
        print(name, json.dumps(panels.get("Share of a step that is lost", "")))


def draw(watched: Watched, pages: Path, pictures: Path) -> None:
    """Writes the page, and the picture of it. Raises NoPictureError."""
    pages.mkdir(parents=True, exist_ok=True)
    html = pages / f"{watched.name}.html"
    html.write_text(page(watched.board, watched.about, watched.results), encoding="utf-8")
    take_picture(html, size(watched.results), pictures / f"{watched.name}.png")


def _check_programs() -> None:
    if find_prometheus() is None:
        sys.exit("prometheus is not installed (Debian: apt-get install prometheus)")
    try:
        find_chromium()
    except NoPictureError as error:
        sys.exit(str(error))


async def _all(seconds: float) -> list[Watched]:
    watched = []
    for run_ahead in (0, 1):
        name, about = f"overlap-run-ahead-{run_ahead}", f"Run-ahead {run_ahead}: {DUMMIES}"
        async with _running(
            seconds, 600, run_ahead=run_ahead, slots=NUM_CLIENTS, dummy_ms=(DRAFT_MS, VERIFY_MS)
        ) as prometheus:
            watched.append(await _watch(prometheus, name, OVERLAP, about, seconds))
    async with _running(seconds, 48, slots=4) as prometheus:
        for file in boards():
            if file != OVERLAP:
                name = file.removeprefix("slipstream-").removesuffix(".json")
                watched.append(await _watch(prometheus, name, file, BUNDLED, seconds))
    return watched


@asynccontextmanager
async def _running(seconds: float, max_new_tokens: int, **options: Any) -> AsyncIterator[Prometheus]:
    """A server that has been busy, and watched, for so long."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            observed_stack(Path(folder), interval_ms=INTERVAL_MS, **options) as observed,
            busy(observed.address, num_clients=NUM_CLIENTS, max_new_tokens=max_new_tokens),
        ):
            await asyncio.sleep(WARM_UP_S + seconds)
            yield observed.prometheus


async def _watch(prometheus: Prometheus, name: str, file: str, about: str, seconds: float) -> Watched:
    """One dashboard over the last `seconds`."""
    board, end = boards()[file], time.time()
    results = [await _result(prometheus, panel, end - seconds, end) for panel in panels_of(board)]
    return Watched(name, board, about, results)


async def _result(prometheus: Prometheus, panel: FoundPanel, start: float, end: float) -> PanelResult:
    queries = (prometheus.query_range(query.filled(RATE_INTERVAL), start, end, 1.0) for query in panel.queries)
    found = [tuple(await query) for query in queries]
    return PanelResult(panel, tuple(found), start, end)


if __name__ == "__main__":
    typer.run(main)
